//! What keeps a write of a part of a block apart from everything else that changes the block.
//!
//! Blocks fall into segments of neighbours (64 of them on a [`Disk`](crate::Disk), 256 on a [`Cached`](crate::Cached)), segments into 64 stripes by
//! their number. A run of whole blocks shares the stripe of each segment while it writes there; a write of a part has it to
//! itself while it reads and writes. So a run pays one lock for a segment, writers of whole blocks never wait for each other,
//! and two that write parts wait for each other only in the same segment, or by chance, one time in 64. Reads take none.
//!
//! A thread holds one stripe, or takes all of them by their numbers.

use std::array;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

const STRIPES: usize = 64;
pub(crate) type Shared<'s> = RwLockReadGuard<'s, ()>;

/// On its own cache lines, so that threads at work in different places do not slow each other down.
#[repr(align(128))]
struct Stripe(RwLock<()>);

impl Stripe {
    fn share(&self) -> Shared<'_> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn have(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct Stripes {
    stripes: Box<[Stripe; STRIPES]>,
    segment_blocks: u64,
}

impl Stripes {
    /// For segments of so many blocks.
    pub fn new(segment_blocks: u64) -> Stripes {
        Stripes { stripes: Box::new(array::from_fn(|_| Stripe(RwLock::new(())))), segment_blocks }
    }

    fn of(&self, block: u64) -> &Stripe {
        &self.stripes[(block / self.segment_blocks) as usize % STRIPES]
    }

    /// For those who change whole blocks of the segment of `block`.
    pub fn share(&self, block: u64) -> Shared<'_> {
        self.of(block).share()
    }

    /// For those who change whole blocks anywhere.
    pub fn share_all(&self) -> [Shared<'_>; STRIPES] {
        array::from_fn(|stripe| self.stripes[stripe].share())
    }

    /// For one who reads, changes and writes `block`.
    pub fn have(&self, block: u64) -> RwLockWriteGuard<'_, ()> {
        self.of(block).have()
    }

    /// Waits until everybody who holds a stripe now has let go of it.
    pub fn wait_for_all(&self) {
        for stripe in self.stripes.iter() {
            drop(stripe.have());
        }
    }
}
