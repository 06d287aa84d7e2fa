//! How much of the memory the pool has, and how much is resident, where a spill file takes what is too much.
//!
//! A megabyte of pool keeps a few megabytes of pages from the disk, and pushes one out of resident memory. Which is better depends on
//! the program: one whose working set would fit without any pool does worse with one, and one that goes through more than both hold
//! does better with more. So it is derived from what happened. Of each fault on a stored page it is known how far back the page was
//! ([`crate::distance`]), which is how many pages would have had to be resident for the fault not to be; and so what
//! the faults that there were would have cost with another share:
//!
//! | how far back a page was                              | would have cost            |
//! |------------------------------------------------------|----------------------------|
//! | no farther than would be resident                    | nothing                    |
//! | no farther than that and what the pool would hold    | a fault                    |
//! | farther, unless the pool would hold all there is     | a fault, and a read        |
//!
//! With less resident than now, faults come that nobody has seen lately; there are taken to be at least as many of them as of those that
//! were nearest. Where the disk takes as long for a read as dozens of faults take ([`READ_NS_MOST`]) an estimate that is wrong would be
//! dear, and the share goes by how well pages compress instead.
//!
//! # Source
//! That compressed memory must be sized by what the working set would cost without it: Tuduce and Gross, "Adaptive main memory
//! compression" (2005). That a histogram of reuse distances tells the cost of any size: Mattson and others, "Evaluation
//! techniques for storage hierarchies" (1970); for compressed memory Wilson and others, "The case for compressed caching"
//! (1999).

use crate::memory::PAGE;
use core::cmp::Reverse;
use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Thousandths of the memory that the pool may have.
pub const SHARES: RangeInclusive<u64> = 50..=600;
const STEP: usize = 50;
/// A bucket is so small a part of the memory.
const BUCKETS_OF_RAM: u64 = 16;
/// Farther than five times the memory is far.
const BUCKETS: usize = 5 * BUCKETS_OF_RAM as usize;
/// Fewer faults than this say nothing.
const FAULTS_LEAST: u64 = 64;
/// With more, the older ones count half.
const FAULTS_MOST: u64 = 4096;
/// What a fault costs that the pool answers, with the eviction of the page that has to leave for it: measured with two processors.
const FAULT_NS: u64 = 20_000;
/// What a read costs besides: the page was written before.
const AROUND_READ_NS: u64 = 20_000;
/// What the pool uses of its share: more than 85 % leaves, down to 75 %, and of each span a little is empty.
const USED_PERCENT: u64 = 75;
/// It is thought about again when so many more have come: it takes some microseconds, and is asked for every millisecond.
const FAULTS_BETWEEN: u32 = 16;
/// Where the disk takes longer for a read, nothing is derived.
const READ_NS_MOST: u64 = 400_000;
/// A share is changed for what would have cost at least a tenth less.
const GAIN_PART: u64 = 10;

/// How far back the pages were that came back.
pub struct Reuse {
    /// The last one: farther.
    counts: [AtomicU32; BUCKETS + 1],
    /// Since the share was thought about, and what came of it; 0 if nothing did.
    since: AtomicU32,
    best: AtomicU64,
}

/// What there is now.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    /// All the memory that there is.
    pub ram_bytes: u64,
    /// As large a part of it as this process's pool is of all pools.
    pub ours_of_ram_bytes: u64,
    /// What is resident.
    pub resident_pages: u64,
    /// What the pool uses, for how many pages.
    pub pool_bytes: u64,
    /// See above.
    pub pool_pages: u64,
    /// Pages that are one word again and again, which take nothing.
    pub same_pages: u64,
    /// Pages in the file.
    pub file_pages: u64,
    /// What a read of one takes: of the disk, and until who waits for it has it.
    pub device_ns: u64,
    /// See above.
    pub read_ns: u64,
}

impl Reuse {
    pub const fn new() -> Self {
        Reuse { counts: [const { AtomicU32::new(0) }; BUCKETS + 1], since: AtomicU32::new(0), best: AtomicU64::new(0) }
    }

    /// A page came back that was so many pages back, in a process with so much memory.
    pub fn note(&self, back_pages: u64, ram_bytes: u64) {
        let bucket = (back_pages / bucket_pages(ram_bytes)).min(BUCKETS as u64);
        self.counts[bucket as usize].fetch_add(1, Relaxed);
        self.since.fetch_add(1, Relaxed);
    }

    /// The share of the pool with which the faults that there were would have cost least; `now` if it would have been hardly less,
    /// and nothing if there were few.
    pub fn best_share(&self, split: &Split, now: u64) -> Option<u64> {
        if self.since.load(Relaxed) >= FAULTS_BETWEEN {
            self.since.store(0, Relaxed);
            self.best.store(self.think(split, now).unwrap_or(0), Relaxed);
        }
        Some(self.best.load(Relaxed)).filter(|share| *share != 0)
    }

    fn think(&self, split: &Split, now: u64) -> Option<u64> {
        let counts = self.counts.each_ref().map(|count| u64::from(count.load(Relaxed)));
        let faults: u64 = counts.iter().sum();
        if faults < FAULTS_LEAST || split.pool_pages == 0 || split.device_ns > READ_NS_MOST {
            return None;
        }
        if faults > FAULTS_MOST {
            // A fault that is counted meanwhile may be lost.
            self.counts.iter().zip(counts).for_each(|(count, was)| count.store(was as u32 / 2, Relaxed));
        }
        let cost_now = split.cost_ns(&counts, now);
        // Of several that are as good, the one that leaves most in the pool.
        let shares = SHARES.step_by(STEP).map(|share| (split.cost_ns(&counts, share), Reverse(share)));
        let less = shares.min().filter(|(cost, _)| *cost < cost_now - cost_now / GAIN_PART);
        Some(less.map_or(now, |(_, share)| share.0))
    }

    /// In a copy of the process: nothing was counted.
    pub fn reset(&self) {
        self.counts.iter().for_each(|count| count.store(0, Relaxed));
        self.since.store(0, Relaxed);
        self.best.store(0, Relaxed);
    }
}

fn bucket_pages(ram_bytes: u64) -> u64 {
    (ram_bytes / PAGE as u64 / BUCKETS_OF_RAM).max(1)
}

impl Split {
    /// What the faults would have cost if the pool had such a share.
    fn cost_ns(&self, counts: &[u64; BUCKETS + 1], share: u64) -> u64 {
        let width = bucket_pages(self.ram_bytes);
        // Never more than it needs for all pages.
        let all_pages = self.pool_pages + self.file_pages;
        let all_bytes = self.pool_bytes.saturating_mul(all_pages) / self.pool_pages;
        let pool_bytes = (self.ours_of_ram_bytes / 1000 * share / 100 * USED_PERCENT).min(all_bytes);
        let pool_pages = u128::from(pool_bytes) * u128::from(self.pool_pages) / u128::from(self.pool_bytes.max(1));
        let freed = (self.pool_bytes as i64 - pool_bytes as i64) / PAGE as i64;
        let resident = self.resident_pages.saturating_add_signed(freed);
        let held = if pool_bytes == all_bytes { u64::MAX } else { resident + self.same_pages + pool_pages as u64 };
        // Of what is resident now little is known: as many as in the bucket it ends in, at least.
        let now = ((self.resident_pages / width) as usize).min(BUCKETS - 1);
        let nearest = counts[now].max(counts[now + 1]);
        let cost = |(bucket, count): (usize, &u64)| {
            let begin = bucket as u64 * width;
            let count = if bucket < now { (*count).max(nearest) } else { *count };
            // Of the last one only its beginning is known.
            let beyond = |than: u64| match bucket {
                BUCKETS => count * u64::from(than < u64::MAX),
                _ => count * (begin + width).saturating_sub(than).min(width) / width,
            };
            beyond(resident) * FAULT_NS + beyond(held) * (self.read_ns + AROUND_READ_NS)
        };
        counts.iter().enumerate().map(cost).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAM: u64 = 64 << 20;
    const PAGES: u64 = RAM / 4096;
    /// What the pool uses with half of the memory, with pages a third of their size, as many again in the file.
    const SPLIT: Split = Split {
        ram_bytes: RAM,
        ours_of_ram_bytes: RAM,
        resident_pages: PAGES / 2,
        pool_bytes: RAM * 3 / 8,
        pool_pages: 18 << 10,
        same_pages: 0,
        file_pages: 18 << 10,
        device_ns: 60_000,
        read_ns: 80_000,
    };

    fn after(faults: impl Iterator<Item = u64>, split: &Split) -> Option<u64> {
        let reuse = Reuse::new();
        faults.for_each(|back| reuse.note(back, RAM));
        reuse.best_share(split, 500)
    }

    #[test]
    fn a_working_set_that_would_fit_takes_the_pool_away() {
        let up_to_three_quarters = (0..1000).map(|nth| PAGES / 2 + nth * PAGES / 4000);
        assert_eq!(after(up_to_three_quarters, &SPLIT), Some(150), "a quarter more is all that it takes");
        let near = (0..1000).map(|nth| if nth % 10 == 0 { 4 * PAGES } else { PAGES * 4 / 5 });
        assert_eq!(after(near, &SPLIT), Some(50), "some that are far cost less than all that are near");
    }

    #[test]
    fn a_program_that_goes_through_all_of_it_keeps_the_pool_if_the_disk_is_slow() {
        let scan = || (0..1000).map(|_| PAGES * 3 / 2);
        let slow = Split { read_ns: READ_NS_MOST, ..SPLIT };
        assert_eq!(after(scan(), &slow), Some(500), "all of it is in the pool");
        let farther = || (0..1000).map(|_| PAGES * 27 / 16);
        assert_eq!(after(farther(), &slow), Some(600), "with a little more it would be");
    }

    #[test]
    fn nothing_is_read_when_the_pool_holds_all_there_is() {
        let few = Split { file_pages: 1 << 10, read_ns: READ_NS_MOST, ..SPLIT };
        assert_eq!(after((0..1000).map(|_| 1 << 30), &few), Some(600), "however far back the pages are");
    }

    #[test]
    fn faults_that_were_not_seen_lately_are_feared() {
        let most = Split { resident_pages: PAGES * 9 / 10, pool_bytes: RAM / 10, pool_pages: 4 << 10, ..SPLIT };
        let near = |nth: u64| if nth % 7 < 5 { PAGES * 9 / 10 } else { PAGES * 8 / 5 };
        let reuse = Reuse::new();
        (0..1000).for_each(|nth| reuse.note(near(nth), RAM));
        assert_eq!(reuse.best_share(&most, 150), Some(50), "more pool would push out what is as near");
        let reuse = Reuse::new();
        (0..1000).for_each(|_| reuse.note(PAGES * 8 / 5, RAM));
        assert_eq!(reuse.best_share(&most, 150), Some(600), "unless nothing was that near");
    }

    #[test]
    fn little_that_is_known_changes_nothing() {
        assert_eq!(after(0..FAULTS_LEAST - 1, &SPLIT), None);
        assert_eq!(after((0..100).map(|_| 1 << 30), &SPLIT), Some(500), "no share helps");
        assert_eq!(after(0..1000, &Split { device_ns: READ_NS_MOST + 1, ..SPLIT }), None, "a slow disk");
        assert_eq!(after(0..1000, &Split { pool_pages: 0, pool_bytes: 0, ..SPLIT }), None);
    }

    #[test]
    fn old_faults_count_less_and_less() {
        let reuse = Reuse::new();
        (0..FAULTS_MOST + 1).for_each(|_| reuse.note(0, RAM));
        reuse.best_share(&SPLIT, 500);
        assert_eq!(u64::from(reuse.counts[0].load(Relaxed)), FAULTS_MOST.div_ceil(2));
        reuse.reset();
        assert_eq!(reuse.best_share(&SPLIT, 500), None);
    }
}
