//! Very many pages that go, a part of them at a time.
//!
//! All of a large file, or a quarter of all there is, would keep the lock for up to seconds (half a million pages were seen to take 1.4, on a busy machine), in which no request is served. So others are let in between two parts. What
//! they then find is right all the same:
//!
//! | what goes                                    | until it has gone                                                                                  |
//! |----------------------------------------------|----------------------------------------------------------------------------------------------------|
//! | what is too much                             | is good                                                                                            |
//! | what is to be written                        | is good, as the write begins after that; none comes any more, since a writer is counted           |
//! | a file that is gone, or looks different now  | has [no record](crate::index::Files::leave) any more: it is nobody's, and found only by who is to let pages go |
//!
//! All has gone when the call returns.

use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use crate::index::{Index, charge};
use crate::{COMPACTED_AT_ONCE, Cache, EVICTED_FOR_ONE, Worker};

/// Pages that go under one hold of the lock: a millisecond or two. In tests few enough for parts to be common.
pub const GONE_AT_ONCE: usize = if cfg!(test) { 16 } else { 1024 };
/// So many are passed over then, since they were read: where all were, thousands may be for each that goes.
const PASSED_AT_ONCE: u64 = if cfg!(test) { 64 } else { 8192 };
/// How long others are let in then: who has just let go of the lock would have it again before them.
const BETWEEN_PARTS: Duration = Duration::from_micros(50);

impl<S: Copy + PartialEq> Cache<S> {
    /// Drops pages of a file from `first` to before `end` (to the last, if that is `u32::MAX`), but only so many. Whether that was all.
    pub(crate) fn drop_some(&self, index: &mut Index<S>, slot: u32, first: u32, end: u32) -> bool {
        let mut is_all = false;
        self.reckon(index);
        for _ in 0..GONE_AT_ONCE {
            let Some(place) = index.files.at(slot).and_then(|file| file.take_first(first, end)) else {
                is_all = true;
                break;
            };
            index.charged_bytes -= charge(index.queues.bytes_of(place));
            self.flushed.fetch_add(1, Relaxed);
            self.release(index, place);
        }
        // Most of it is gone: what comes now pushes out nothing.
        index.is_filling |= index.cost_bytes() <= index.target_bytes(15) / 2;
        is_all
    }

    /// Drops the pages in a slot that were [left](crate::index::Files::leave) there.
    pub(crate) fn drop_left(&self, slot: Option<u32>) {
        let Some(slot) = slot else { return };
        self.in_parts(|index| {
            // The last may have gone meanwhile. If others were left there since, those are as little anybody's.
            if !index.files.at(slot).is_some_and(|file| file.is_left) {
                return true;
            }
            let is_done = self.drop_some(index, slot, 0, u32::MAX);
            index.files.tidy(slot);
            is_done
        });
    }

    /// Calls `part` with the lock until it says that it was the last, and lets others have it in between.
    pub(crate) fn in_parts(&self, mut part: impl FnMut(&mut Index<S>) -> bool) {
        loop {
            let is_last = part(&mut self.lock());
            if is_last {
                return;
            }
            thread::sleep(BETWEEN_PARTS);
        }
    }

    /// Lets pages go until they cost so much, but only so many. Whether that was enough.
    pub(crate) fn shrink_some(&self, index: &mut Index<S>, target_bytes: u64) -> bool {
        let passed = index.queues.passed();
        self.reckon(index);
        for _ in 0..GONE_AT_ONCE {
            if index.full_cost_bytes() <= target_bytes {
                return true;
            }
            if index.queues.passed() - passed > PASSED_AT_ONCE {
                return false;
            }
            if !self.let_one_go(index, false) {
                return true;
            }
        }
        index.full_cost_bytes() <= target_bytes
    }

    /// Lets the page go that goes next. Whether there was one.
    pub(crate) fn let_one_go(&self, index: &mut Index<S>, is_common: bool) -> bool {
        let Some(place) = index.evict(is_common) else { return false };
        self.evicted.fetch_add(1, Relaxed);
        self.release(index, place);
        true
    }

    /// Lets go of what has become too much, however much that is.
    pub(crate) fn trim_in_parts(&self) {
        self.in_parts(|index| {
            self.fit_store(index);
            let target_bytes = index.target_bytes(15);
            self.shrink_to(index, |_| target_bytes, true, GONE_AT_ONCE);
            index.cost_bytes() <= target_bytes || index.queues.length() == 0
        });
    }

    /// Gives memory of half-empty spans back, if pages have gone since this was last called. What is too much all the same goes.
    pub fn compact(&self, worker: &mut Worker) {
        let mut is_due = self.discarded.swap(false, Relaxed) || self.store_excess_bytes() > 0;
        while is_due {
            while !self.store.compact_in_turn(worker, COMPACTED_AT_ONCE).finished {}
            is_due = self.shed();
        }
    }

    /// What the store takes beyond what is left to it: its limit was lowered, and pages cost more than they are taken to, as few do.
    pub(crate) fn store_excess_bytes(&self) -> u64 {
        self.store.mem_used_total_bytes().saturating_sub(self.store.limit_bytes())
    }

    /// Lets pages go for that, if gathering does not make up for it. Whether any went.
    pub(crate) fn shed(&self) -> bool {
        let target_bytes = {
            let index = &mut *self.lock();
            let excess_bytes = self.store_excess_bytes();
            self.reckon(index);
            if excess_bytes == 0 || index.gathers_in_time() && index.expected_bytes >= excess_bytes {
                return false;
            }
            index.full_cost_bytes().saturating_sub(excess_bytes + excess_bytes / 4)
        };
        let before = self.evicted.load(Relaxed);
        // The limit may be another by then.
        self.in_parts(|index| self.store_excess_bytes() == 0 || self.shrink_some(index, target_bytes));
        self.evicted.load(Relaxed) > before
    }

    /// The store is full, whatever the charges say, and refused so many pages: as many go, and more until a quarter of the limit is free of charges. Where groups are gathered, most of their memory comes with that.
    pub(crate) fn make_way(&self, refused: usize) {
        let gathers = {
            let index = &mut *self.lock();
            (0..refused.min(index.queues.length() / 4)).for_each(|_| _ = self.let_one_go(index, false));
            let gathers = index.gathers_in_time();
            if gathers {
                self.shrink_to(index, |index| index.target_bytes(12), true, (EVICTED_FOR_ONE - 1) * refused);
            }
            gathers
        };
        if !gathers {
            self.in_parts(|index| {
                let target_bytes = index.target_bytes(12);
                self.shrink_some(index, target_bytes)
            });
        }
    }
}
