//! What keeps a write of a part of a block apart from everything else that changes the block.
//!
//! Blocks fall into segments of 64 neighbours, segments into 64 stripes by their number. A run of whole blocks shares the
//! stripe of each segment while it writes there; a write of a part has it to itself while it reads and writes. So a run
//! pays one lock for 256 KiB, writers of whole blocks never wait for each other, and two that write parts wait for each
//! other only in the same block, or by chance, one time in 64. Reads take none.
//!
//! A thread holds one stripe, or takes all of them by their numbers.

use std::array;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

const STRIPES: usize = 64;
/// Blocks that share a stripe because they are neighbours.
pub(super) const SEGMENT_BLOCKS: u64 = 64;

pub(super) type Shared<'s> = RwLockReadGuard<'s, ()>;

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

pub(super) struct Stripes(Box<[Stripe; STRIPES]>);

impl Stripes {
    pub fn new() -> Stripes {
        Stripes(Box::new(array::from_fn(|_| Stripe(RwLock::new(())))))
    }

    fn of(&self, block: u64) -> &Stripe {
        &self.0[(block / SEGMENT_BLOCKS) as usize % STRIPES]
    }

    /// For those who change whole blocks of the segment of `block`.
    pub fn share(&self, block: u64) -> Shared<'_> {
        self.of(block).share()
    }

    /// For those who change whole blocks anywhere.
    pub fn share_all(&self) -> [Shared<'_>; STRIPES] {
        array::from_fn(|stripe| self.0[stripe].share())
    }

    /// For one who reads, changes and writes `block`.
    pub fn have(&self, block: u64) -> RwLockWriteGuard<'_, ()> {
        self.of(block).have()
    }

    /// Waits until everybody who holds a stripe now has let go of it.
    pub fn wait_for_all(&self) {
        for stripe in self.0.iter() {
            drop(stripe.have());
        }
    }
}
