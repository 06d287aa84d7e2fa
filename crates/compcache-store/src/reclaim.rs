//! Reclaim: relieving memory before it is full.
//!
//! | memory used, of the limit | what happens                                                                     |
//! |---------------------------|----------------------------------------------------------------------------------|
//! | up to 75 %                | nothing; pages read from the backing come back                                   |
//! | above 85 %                | pages leave, in flights of a segment, until it is 75 %                           |
//! | 100 %                     | writes are refused until it is 90 %, so who may wait waits for a flight or two   |
//!
//! The 85 % can be changed while the backing is in use; it ends ten below. As long as nobody can be refused (90 %) no segment is written that would be less than
//! half full: where what stays anyway (tables, spans) is more than the threshold, all there is would leave as it comes, a page for a segment.
//! The same holds for the limit of a pool alone, and its pages. What leaves frees objects all over the spans, and spans that are not empty give their
//! memory back only when they are compacted; so whenever objects were freed whose memory, a sixteenth of all, has stayed, and whenever a flight finds
//! nothing to take, compaction is run to its end.
//!
//! [`Store::write_back`] has pages leave whatever is used: when the system is short of memory though the limit is far, or somebody asks for it.
//!
//! A front end's thread does this, or two, so that one gets the next segment ready while the other waits for the medium: the store has
//! none. Nobody who reads or writes waits for it, but for
//! memory.
//!
//! Lock order: takes none of its own.

use core::sync::atomic::Ordering::Relaxed;

use crate::backing::{Backing, Flown, Health, MediumError, SLOW_NS, Wanted};
use crate::pool::{Pool, PoolCore};
use crate::store::Store;
use crate::worker::Worker;

/// Reclaim begins above so much of the limit, unless told otherwise ([`Backing::set_above_percent`]), and ends so much below.
pub(crate) const ABOVE_PERCENT: u8 = 85;
pub(crate) const GAP_PERCENT: u8 = 10;
/// Below this nobody is refused: see [`crate::budget`].
const ACCEPT_PERCENT: u64 = 90;
/// Compaction is run when so large a share of what is used was freed and stays.
const COMPACT_SHARE: u64 = 16;
const COMPACTED_AT_ONCE: usize = 256;
/// More steps than any store has: others may keep it busy, and then this one must not go round for ever.
const STEPS_MAX: usize = 1 << 20;

/// What one step of reclaim did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Pages that have left memory.
    pub pages: usize,
    /// Memory given back to the system, in bytes, as far as this step saw it.
    pub freed_bytes: u64,
    /// Bytes of memory that the objects of these pages took; it is there for others, if not given back.
    pub object_bytes: u64,
    /// Another thread is at it; this one did nothing.
    pub is_busy: bool,
    /// Another thread is at it, and has been for long; look again in a while.
    pub is_held_up: bool,
    /// There is nothing more to do, or nothing more can be done now. `false`: call again.
    pub finished: bool,
}

/// Which pages of a pool [`Store::write_back`] has leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leaving {
    /// All there are: first those that do not compress, then those not used for longest.
    #[default]
    Oldest,
    /// Those alone that do not compress.
    Incompressible,
}

impl Store {
    /// Whether pages should go to `backing`: the store, or a pool on that backing, uses more than 85 % of its limit, or what was set.
    pub fn wants_reclaim(&self, backing: &Backing) -> bool {
        self.is_above(backing, backing.above_percent().into())
    }

    /// Writes one segment of pages to `backing`, raw ones first, then those not used for longest, if the store, or a pool on that
    /// backing, uses more than 75 % of its limit; of the store's, those that no other backing has older ones to take for. And compacts, now and then. May wait for the medium, and holds nobody up.
    ///
    /// Call it again and again until it has finished, whenever [`Store::wants_reclaim`], and again a little later if the
    /// backing is not in good health ([`Backing::health`]).
    ///
    /// # Errors
    /// What the medium said. No page is lost, or anywhere else than it was.
    pub fn reclaim(&self, worker: &mut Worker, backing: &Backing) -> Result<Reclaimed, MediumError> {
        worker.must_be_of(self);
        let until_percent = backing.until_percent();
        if !self.is_above(backing, until_percent) {
            return Ok(Reclaimed { finished: true, ..Reclaimed::default() });
        }
        // A pool above its own limit has its own oldest leave, however old others are.
        let is_own = self.is_own(backing, until_percent);
        let wants = |pool: &PoolCore| !is_own || pool.is_above(until_percent);
        let at_leisure = !self.is_above(backing, ACCEPT_PERCENT);
        let wanted = Wanted { wants: &wants, leaving: Leaving::Oldest, at_leisure, oldest_of_all: !is_own };
        let done = self.one_flight(worker, backing, &wanted)?;
        Ok(Reclaimed { finished: done.finished || !self.is_above(backing, until_percent), ..done })
    }

    /// Writes one segment of pages of `pool` to its backing, whatever its limit and the store's say; and compacts, now and then. Waits as
    /// [`Store::reclaim`] does. It has finished when nothing more can leave.
    ///
    /// # Errors
    /// What the medium said. No page is lost, or anywhere else than it was.
    pub fn write_back(&self, worker: &mut Worker, pool: &Pool, leaving: Leaving) -> Result<Reclaimed, MediumError> {
        worker.must_be_of(self);
        assert!(core::ptr::eq(self, &**pool.store()), "a pool is in one store");
        let Some(backing) = pool.backing() else {
            return Ok(Reclaimed { finished: true, ..Reclaimed::default() });
        };
        let serial = pool.core().serial();
        let wants = |pool: &PoolCore| pool.serial() == serial;
        self.one_flight(worker, backing, &Wanted { wants: &wants, leaving, at_leisure: false, oldest_of_all: false })
    }

    /// As [`Store::reclaim`], for the first backing that anything leaves for. One whose medium has kept a flight waiting for long is not asked, for we could
    /// come to wait for it as well; if nothing leaves for another, it is held up.
    ///
    /// # Errors
    /// What the last medium said that was asked, if nothing has left and none is busy or held up.
    pub fn reclaim_any(&self, worker: &mut Worker) -> Result<Reclaimed, MediumError> {
        worker.must_be_of(self);
        let nothing = Reclaimed { finished: true, ..Reclaimed::default() };
        let (mut last, mut is_busy, mut is_held_up) = (Ok(nothing), false, false);
        for nth in 0.. {
            let backing = match self.registry.lock().pools().get(nth) {
                None => break,
                Some(pool) if pool.can_leave() => pool.backing.clone(),
                Some(_) => None,
            };
            let Some(backing) = backing else { continue };
            if backing.has_waited_for(SLOW_NS, worker.now_ns()) {
                is_held_up = true;
                continue;
            }
            let done = self.reclaim(worker, &backing);
            is_busy |= done.is_ok_and(|done| done.is_busy);
            match done {
                Ok(some) if some.pages > 0 || some.freed_bytes > 0 || !some.finished => return done,
                Ok(Reclaimed { is_busy: true, .. }) => {}
                _ => last = done,
            }
        }
        if is_busy || is_held_up { Ok(Reclaimed { is_busy, is_held_up, ..nothing }) } else { last }
    }

    /// Whether any pool's pages can leave memory, as far as is known.
    pub fn can_reclaim(&self) -> bool {
        self.registry.lock().pools().iter().any(|pool| pool.can_leave())
    }

    fn one_flight(
        &self,
        worker: &mut Worker,
        backing: &Backing,
        wanted: &Wanted<'_>,
    ) -> Result<Reclaimed, MediumError> {
        let used = self.mem_used_total_bytes();
        let Flown { pages, freed_bytes: object_bytes, moved, is_busy } = backing.fly(self, worker, wanted)?;
        if is_busy {
            return Ok(Reclaimed { is_busy, finished: true, ..Reclaimed::default() });
        }
        // What others did meanwhile is in this as well; it is right often enough to say when to look.
        let returned_bytes = used.saturating_sub(self.mem_used_total_bytes());
        let is_stale = self.note_held_back(object_bytes.saturating_sub(returned_bytes));
        if pages == 0 || is_stale {
            self.compact_all(worker);
        }
        let freed_bytes = used.saturating_sub(self.mem_used_total_bytes());
        // One that only cleaned has made room for the next.
        let is_stuck = pages == 0 && moved == 0 && (freed_bytes == 0 || backing.health() != Health::Good);
        Ok(Reclaimed { pages, freed_bytes, object_bytes, finished: is_stuck, ..Reclaimed::default() })
    }

    fn is_above(&self, backing: &Backing, percent: u64) -> bool {
        self.budget.is_above(percent) || self.is_any_above(backing, percent)
    }

    /// Whether it is a pool's own limit that pages leave for: from its upper mark on (or where it is refused until it is below) until its lower one, or if it is above
    /// that and the store is not.
    fn is_own(&self, backing: &Backing, until_percent: u64) -> bool {
        let is_below = !self.is_any_above(backing, until_percent);
        if is_below || self.is_any_above(backing, u64::from(backing.above_percent()).min(ACCEPT_PERCENT)) {
            backing.own_leave.store(!is_below, Relaxed);
        }
        backing.own_leave.load(Relaxed) || !is_below && !self.budget.is_above(until_percent)
    }

    fn is_any_above(&self, backing: &Backing, percent: u64) -> bool {
        self.registry.lock().pools().iter().any(|pool| pool.is_on(backing) && pool.is_above(percent))
    }

    /// Notes that objects of so many bytes were freed, and compacts if that is a large share of what is used; or, after the last of
    /// a pass, if anything was freed.
    pub(crate) fn compact_after(&self, worker: &mut Worker, freed_bytes: u64, is_last: bool) {
        if self.note_held_back(freed_bytes) || (is_last && self.held_back.load(Relaxed) > 0) {
            self.compact_all(worker);
        }
    }

    /// Notes that so many bytes of objects were freed and have not gone back to the system. Whether those since the last time
    /// are a large share of what is used.
    fn note_held_back(&self, bytes: u64) -> bool {
        let held_back = self.held_back.fetch_add(bytes, Relaxed) + bytes;
        held_back > self.mem_used_total_bytes() / COMPACT_SHARE
    }

    fn compact_all(&self, worker: &mut Worker) {
        self.held_back.store(0, Relaxed);
        for _ in 0..STEPS_MAX {
            if self.compact_in_turn(worker, COMPACTED_AT_ONCE).finished {
                return;
            }
        }
    }
}
