//! Whether a page that was read below for the first time is worth compressing, once others have to go for it.
//!
//! Of the pages that come into the small queue a share `p` is found again there. Each of these saves the time `b` that reading a page below takes; each that
//! comes costs the time `c` that compressing one takes. So all of them are taken while `p b > c`, and else fewer:
//!
//! | below                             | b, us | c, us | all are taken if there are found again |
//! |-----------------------------------|-------|-------|----------------------------------------|
//! | a throttled disk, 16 pages a read | 90    | 2.5   | 3 %                                    |
//! | a fast disk, a page a read        | 75    | 2.5   | 3 %                                    |
//! | a fast disk, in order             | 3     | 2.5   | 83 %                                   |
//!
//! The share that is taken goes from all to a sixteenth, in halves, and is looked at whenever 512 pages have left the small queue; it never is nothing, so
//! that `p` is known. Who is not taken is remembered as a ghost, and taken for certain should he come again while the ghost knows him: a scan costs no compression then, and what is
//! used again is found from the third time on instead of the second. A run of pages that was read at once is taken whole or not at all.
//!
//! While there is room for all, all are taken. Arithmetic only.

use std::time::Duration;

/// The least share that is taken: one of 2 to the power of this.
const SHIFT_MAX: u32 = 4;
/// Between two looks, so many pages leave the small queue.
const LEFT_BETWEEN: u32 = 512;
/// A mean of times is over about so many pages.
const PAGES_MEAN: u64 = 8192;
/// What a group of the store's holds, and about how long it takes to decode one (docs/numbers.md: 51 to 70 us).
const GROUP_PAGES: usize = 16;
const DECODING: Duration = Duration::from_micros(60);

/// A time for each page, over the last of them.
#[derive(Default)]
struct PerPage {
    ns: u64,
    pages: u64,
}

impl PerPage {
    fn add(&mut self, pages: usize, took: Duration) {
        self.ns += took.as_nanos() as u64;
        self.pages += pages as u64;
        if self.pages > PAGES_MEAN {
            self.ns /= 2;
            self.pages /= 2;
        }
    }
}

/// What it is decided by.
#[derive(Default)]
pub struct Admission {
    /// Of 2 to the power of this new runs one is taken.
    shift: u32,
    /// The last random number.
    random: u64,
    /// Pages that left the small queue since the last look, and those of them that were found there.
    left: u32,
    found: u32,
    below: PerPage,
    /// The same for each group that the pages of a request would have come from.
    below_groups: PerPage,
    compressed: PerPage,
}

impl Admission {
    /// Whether a run of new pages is to be taken.
    pub fn takes_new(&mut self) -> bool {
        // Knuth's linear congruential generator (MMIX), of which the upper bits are good: who reads in turns must not always meet the same turn.
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.random >> 32 & ((1 << self.shift) - 1) == 0
    }

    /// Whether not all are taken.
    pub fn is_choosy(&self) -> bool {
        self.shift > 0
    }

    /// So many pages were read below in this time.
    pub fn took_below(&mut self, pages: usize, took: Duration) {
        self.below.add(pages, took);
        self.below_groups.add(pages.div_ceil(GROUP_PAGES), took);
    }

    /// Whether what was read below lately took more than twice as long as it would have to decode groups; or, if it `was_slow` before, longer.
    pub fn is_below_slow(&self, was_slow: bool) -> bool {
        let times = if was_slow { 1 } else { 2 };
        self.below_groups.ns > times * DECODING.as_nanos() as u64 * self.below_groups.pages
    }

    /// So many pages were compressed in this time.
    pub fn took_compressing(&mut self, pages: usize, took: Duration) {
        if pages > 0 {
            self.compressed.add(pages, took);
        }
    }

    /// Pages left the small queue: so many that were found there, and others.
    pub fn left_small(&mut self, found: u32, others: u32) {
        self.found += found;
        self.left += found + others;
        if self.left < LEFT_BETWEEN {
            return;
        }
        let (below, compressed) = (&self.below, &self.compressed);
        // p b and c, times all that they are divided by. Without times of both, all are taken.
        let saved = u128::from(self.found) * u128::from(below.ns) * u128::from(compressed.pages);
        let costs = u128::from(self.left) * u128::from(compressed.ns) * u128::from(below.pages);
        if saved >= 2 * costs {
            self.shift = self.shift.saturating_sub(1);
        } else if saved < costs {
            self.shift = (self.shift + 1).min(SHIFT_MAX);
        }
        (self.left, self.found) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of 16 are taken, in the mean.
    fn taken_of_16(admission: &mut Admission) -> u64 {
        let taken = (0..16_000).filter(|_| admission.takes_new()).count();
        (taken as f64 / 1000.0).round() as u64
    }

    #[test]
    fn all_are_taken_while_nothing_is_known() {
        let mut admission = Admission::default();
        admission.left_small(0, 5000);
        assert_eq!(taken_of_16(&mut admission), 16);
    }

    #[test]
    fn what_lies_below_is_slow_if_groups_are_decoded_in_half_the_time() {
        let mut admission = Admission::default();
        let mut slow_after = |pages, us| {
            (0..100_000).for_each(|_| admission.took_below(pages, Duration::from_micros(us)));
            [false, true].map(|was_slow| admission.is_below_slow(was_slow))
        };
        assert_eq!(slow_after(1, 50), [false, false]);
        assert_eq!(slow_after(1, 100), [false, true], "it is not to change with every look");
        assert_eq!(slow_after(32, 100), [false, false]);
        assert_eq!(slow_after(32, 1700), [true, true]);
        assert_eq!(slow_after(1, 50), [false, false], "it has become fast");
        assert_eq!(slow_after(1, 150), [true, true]);
    }

    #[test]
    fn nothing_is_slow_of_which_nothing_is_known() {
        assert!(!Admission::default().is_below_slow(true));
    }

    #[test]
    fn fewer_are_taken_where_they_cost_more_than_they_save_and_all_again_where_they_do_not() {
        let mut admission = Admission::default();
        admission.took_below(100, Duration::from_micros(300));
        admission.took_compressing(100, Duration::from_micros(250));
        let mut seen = Vec::new();
        for _ in 0..6 {
            admission.left_small(100, 412);
            seen.push(taken_of_16(&mut admission));
        }
        assert_eq!(seen, [8, 4, 2, 1, 1, 1]);
        // Between one and two times what they cost: as it is.
        (0..10_000).for_each(|_| admission.took_below(1, Duration::from_micros(20)));
        admission.left_small(100, 412);
        assert_eq!(taken_of_16(&mut admission), 1);
        (0..10_000).for_each(|_| admission.took_below(1, Duration::from_micros(75)));
        for taken in [2, 4, 8, 16, 16] {
            admission.left_small(100, 412);
            assert_eq!(taken_of_16(&mut admission), taken);
        }
    }
}
