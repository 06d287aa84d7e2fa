//! How far back a page was when it came back: how many others were used since, whether they are here or out.
//!
//! Evictions alone do not tell: pages that leave and come back again and again are counted each time, and make all others look
//! farther than they are, most of all when far too many leave. So it is counted how many pages are out, by when they left. Those
//! that left after a page did and are out still would have had to be resident as well for it not to have left.
//!
//! # Source
//! The stack distance of Mattson and others, "Evaluation techniques for storage hierarchies" (1970), for a resident set that is the
//! top of the stack.

use crate::table::{Phase, Word};

/// Times that are told apart; what left before them was long ago.
const ERAS: usize = 512;
/// They reach back as far as so many evictions for each page that the memory holds; with more than 64 GiB not quite.
const EVICTIONS_OF_RAM: u64 = 8;
/// Evictions between two ticks of the clock whose time a stored page's word keeps, and how far that counts.
const TICK: u64 = 64;
const TICKS_MAX: u32 = 0xff_ffff;

/// The clock's time after so many evictions.
pub fn tick(evictions: u64) -> u32 {
    (evictions / TICK) as u32 & TICKS_MAX
}

/// Evictions since a tick, to some dozens.
pub fn evictions_since(tick: u32, evictions: u64) -> u64 {
    u64::from(self::tick(evictions).wrapping_sub(tick) & TICKS_MAX) * TICK
}

/// The pages that are out, by when they left.
pub struct Out {
    counts: [u32; ERAS],
    long_ago: u32,
    newest: u32,
    /// An era is so many ticks, as a power of two.
    shift: u32,
}

impl Out {
    /// Nothing is out of a memory of so many pages.
    pub fn new(ram_pages: u64) -> Out {
        let ticks = (ram_pages * EVICTIONS_OF_RAM / (ERAS as u64 * TICK)).max(1);
        Out { counts: [0; ERAS], long_ago: 0, newest: 0, shift: ticks.next_power_of_two().trailing_zeros().min(12) }
    }

    /// A page's word changes.
    pub fn note(&mut self, was: Word, is: Word) {
        if was.phase() == Phase::Stored {
            let count = self.count(was.payload());
            *count = count.saturating_sub(1);
        }
        if is.phase() == Phase::Stored {
            *self.count(is.payload()) += 1;
        }
    }

    /// Pages that left after one that left at this tick, and are out.
    pub fn left_after(&self, tick: u32) -> u64 {
        let count = |back: u32| u64::from(self.counts[self.newest.wrapping_sub(back) as usize % ERAS]);
        let since = self.eras_since(tick);
        let newer = (0..since.min(ERAS as u32)).map(count).sum::<u64>();
        // Of those that left in the same era, half.
        newer + if since < ERAS as u32 { count(since) } else { u64::from(self.long_ago) } / 2
    }

    fn count(&mut self, tick: u32) -> &mut u32 {
        match self.eras_since(tick) {
            since if since < ERAS as u32 => &mut self.counts[(tick >> self.shift) as usize % ERAS],
            _ => &mut self.long_ago,
        }
    }

    /// It is so late now: as many eras as have come, as many of the oldest are long ago. Before any page leaves at that time.
    pub fn pass_to(&mut self, tick: u32) {
        let mask = TICKS_MAX >> self.shift;
        let come = (tick >> self.shift).wrapping_sub(self.newest) & mask;
        for era in 0..come.min(ERAS as u32) {
            let oldest = (self.newest + 1 + era) as usize % ERAS;
            self.long_ago += core::mem::take(&mut self.counts[oldest]);
        }
        self.newest = tick >> self.shift;
    }

    fn eras_since(&self, tick: u32) -> u32 {
        self.newest.wrapping_sub(tick >> self.shift) & TICKS_MAX >> self.shift
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(tick: u32) -> Word {
        Word::new(Phase::Stored).with_payload(tick)
    }

    fn left(out: &mut Out, tick: u32) {
        out.pass_to(tick);
        out.note(Word::UNKNOWN, stored(tick));
    }

    /// An era of one tick.
    fn small() -> Out {
        Out::new(1024)
    }

    #[test]
    fn those_that_left_later_count_while_they_are_out() {
        let mut out = small();
        (10..20).for_each(|tick| (0..4).for_each(|_| left(&mut out, tick)));
        assert_eq!((out.left_after(19), out.left_after(10)), (2, 38));
        (0..4).for_each(|_| out.note(stored(15), Word::new(Phase::Resident)));
        assert_eq!((out.left_after(19), out.left_after(14), out.left_after(10)), (2, 18, 34));
    }

    #[test]
    fn pages_that_leave_and_come_back_again_and_again_make_no_other_look_farther() {
        let mut out = small();
        left(&mut out, 1);
        for tick in 2..5 * ERAS as u32 {
            left(&mut out, tick);
            assert!(out.left_after(1) <= 1);
            out.note(stored(tick), Word::new(Phase::Resident));
        }
        out.note(stored(1), Word::UNKNOWN);
        assert_eq!((out.long_ago, out.counts.iter().sum()), (0, 0));
    }

    #[test]
    fn what_left_long_ago_and_what_is_moved_stay_counted() {
        let mut out = Out::new(1 << 20);
        (0..3000).for_each(|_| left(&mut out, 5));
        left(&mut out, TICKS_MAX / 3);
        assert_eq!(out.left_after(5), 1 + 1500);
        // A page has another number now: its word is taken from one place, and put in another.
        out.note(stored(5), Word::UNKNOWN);
        out.note(Word::UNKNOWN, stored(5));
        assert_eq!(out.left_after(5), 1 + 1500);
    }

    #[test]
    fn the_clock_may_begin_anew() {
        let mut out = small();
        for tick in (TICKS_MAX - 400..=TICKS_MAX).chain(0..50) {
            left(&mut out, tick);
        }
        assert_eq!((out.left_after(49), out.left_after(TICKS_MAX), out.left_after(TICKS_MAX - 100)), (0, 50, 150));
    }
}
