//! What a process that waits gives up for those of its tree that work.
//!
//! What is too much leaves each process in proportion to what it has. That alone would leave one that waits, and faults on nothing, a part that
//! nobody uses: those that work keep within the limit by themselves. So one that has used next to no processor for a quarter of a second
//! gives up an eighth of what it has each tenth of a second in which others had to evict. What it needs when it goes on comes back from the
//! pool. With less than a megabyte, paging would take as much as it gives.

const AFTER_NS: u64 = 250_000_000;
const STEP_NS: u64 = 100_000_000;
const LEAST_PAGES: u64 = 256;

/// One process's waiting.
pub struct Waits {
    stepped_ns: u64,
    /// At the last step.
    evicted_by_others: u64,
    may_hold_pages: u64,
}

impl Waits {
    /// It has not waited yet.
    pub const fn new() -> Waits {
        Waits { stepped_ns: 0, evicted_by_others: 0, may_hold_pages: u64::MAX }
    }

    /// The most pages that a process may hold which has waited for so long and holds `resident_pages`, when all others together have evicted so
    /// many so far.
    pub fn may_hold(&mut self, waited_ns: u64, now_ns: u64, evicted_by_others: u64, resident_pages: u64) -> u64 {
        if waited_ns < AFTER_NS {
            self.may_hold_pages = u64::MAX;
        } else if now_ns.saturating_sub(self.stepped_ns) >= STEP_NS {
            let are_short = self.evicted_by_others != evicted_by_others;
            let less = (resident_pages.min(self.may_hold_pages) / 8 * 7).max(LEAST_PAGES);
            self.may_hold_pages = if are_short { less } else { u64::MAX };
            (self.stepped_ns, self.evicted_by_others) = (now_ns, evicted_by_others);
        }
        self.may_hold_pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_while_others_are_short_gives_up_an_eighth_at_each_step_but_the_least() {
        let (mut waits, mut resident, mut held) = (Waits::new(), 8000, Vec::new());
        for step in 1..40 {
            resident = resident.min(waits.may_hold(AFTER_NS, step * STEP_NS, step, resident));
            held.push(resident);
            assert_eq!(waits.may_hold(AFTER_NS, step * STEP_NS + STEP_NS / 2, step, resident), resident);
        }
        assert_eq!(held[..3], [7000, 6125, 5355]);
        assert_eq!(held[38], LEAST_PAGES);
    }

    #[test]
    fn who_works_or_whom_nobody_needs_it_from_keeps_what_it_has() {
        let mut waits = Waits::new();
        assert_eq!(waits.may_hold(AFTER_NS, STEP_NS, 5, 800), 700);
        assert_eq!(waits.may_hold(AFTER_NS, 2 * STEP_NS, 5, 700), u64::MAX);
        assert_eq!(waits.may_hold(AFTER_NS, 3 * STEP_NS, 6, 700), 609);
        assert_eq!(waits.may_hold(AFTER_NS - 1, 4 * STEP_NS, 7, 609), u64::MAX);
    }
}
