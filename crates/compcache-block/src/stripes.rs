//! What keeps a write of a part of a block apart from everything else that changes the block.
//!
//! Blocks fall into segments of neighbours (64 of them on a [`Disk`](crate::Disk), 256 on an [`Origin`](crate::Origin)), segments into 64 stripes by
//! their number. A run of whole blocks shares the stripe of each segment while it writes there; a write of a part has it to
//! itself while it reads and writes. So a run pays one lock for a segment, writers of whole blocks never wait for each other,
//! and two that write parts wait for each other only in the same segment, or by chance, one time in 64. Reads take none.
//!
//! A thread holds one stripe, or takes all of them by their numbers. Who holds one may be waiting, for room or for a block on a
//! slow medium; so a request that may not wait does not wait for a stripe either, but for the moments that one is held by who
//! does not wait.

use std::array;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::thread;

use crate::device::Manner;

const STRIPES: usize = 64;
/// How often who may not wait looks at a stripe that somebody has, and lets others run in between.
const LOOKS: u32 = 16;
pub(crate) type Shared<'s> = RwLockReadGuard<'s, ()>;
pub(crate) type Alone<'s> = RwLockWriteGuard<'s, ()>;

/// Takes a lock at once, or in a moment, or not at all.
fn soon<G>(mut look: impl FnMut() -> Result<G, TryLockError<G>>) -> Option<G> {
    for _ in 0..LOOKS {
        match look() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => thread::yield_now(),
        }
    }
    None
}

/// On its own cache lines, so that threads at work in different places do not slow each other down.
#[repr(align(128))]
struct Stripe(RwLock<()>);

impl Stripe {
    fn share(&self) -> Shared<'_> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn have(&self) -> Alone<'_> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn share_as(&self, manner: Manner) -> Option<Shared<'_>> {
        if manner.may_wait { Some(self.share()) } else { soon(|| self.0.try_read()) }
    }

    fn have_as(&self, manner: Manner) -> Option<Alone<'_>> {
        if manner.may_wait { Some(self.have()) } else { soon(|| self.0.try_write()) }
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
    pub fn have(&self, block: u64) -> Alone<'_> {
        self.of(block).have()
    }

    /// As [`Stripes::share`]; nothing, if that takes waiting and one may not.
    pub fn share_as(&self, block: u64, manner: Manner) -> Option<Shared<'_>> {
        self.of(block).share_as(manner)
    }

    /// As [`Stripes::share_all`]; nothing, if that takes waiting and one may not.
    pub fn share_all_as(&self, manner: Manner) -> Option<[Shared<'_>; STRIPES]> {
        let shared = array::from_fn(|stripe| self.stripes[stripe].share_as(manner));
        shared.iter().all(Option::is_some).then(|| shared.map(|shared| shared.expect("all are")))
    }

    /// As [`Stripes::have`]; nothing, if that takes waiting and one may not.
    pub fn have_as(&self, block: u64, manner: Manner) -> Option<Alone<'_>> {
        self.of(block).have_as(manner)
    }

    /// Waits until everybody who holds a stripe now has let go of it.
    pub fn wait_for_all(&self) {
        for stripe in self.stripes.iter() {
            drop(stripe.have());
        }
    }
}
