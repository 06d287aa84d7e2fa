//! What a process that waits gives up for those of its tree that work.
//!
//! What is too much leaves each process in proportion to what it has. That alone would leave one that waits, and faults on nothing, a part that
//! nobody uses: those that work keep within the limit by themselves. So one that had no fault for a quarter of a second, and used next to no
//! processor, gives up an eighth of what it has each tenth of a second in which the tree is at its limit and others evict. What it needs when it goes on
//! comes back from the pool; it may hold its part again with the first fault. With less than a megabyte, paging would take as much as it gives.

const AFTER_NS: u64 = 250_000_000;
const STEP_NS: u64 = 100_000_000;
/// Who uses less than so small a share of a processor in a step waits.
const WORK_SHARE: u64 = 64;
const LEAST_PAGES: u64 = 256;

/// What one look at a process and its tree shows.
#[derive(Clone, Copy)]
pub struct Seen {
    pub now_ns: u64,
    /// Time of a processor that the process has used, and its faults.
    pub cpu_ns: u64,
    pub faults: u64,
    pub resident_pages: u64,
    /// The tree has hardly any room left.
    pub is_full: bool,
    /// Pages that all others have evicted so far.
    pub evicted_by_others: u64,
}

/// One process's waiting.
#[derive(Default)]
pub struct Waits {
    worked_ns: u64,
    /// At the last step.
    stepped: Option<Seen>,
    may_hold_pages: Option<u64>,
}

impl Waits {
    /// The most pages that the process may hold, if it waits and others need what it has.
    pub fn may_hold(&mut self, seen: Seen) -> Option<u64> {
        let works = |before: &Seen| {
            seen.faults != before.faults || seen.cpu_ns.saturating_sub(before.cpu_ns) > STEP_NS / WORK_SHARE
        };
        let Some(before) = self.stepped.filter(|before| !works(before)) else {
            *self = Waits { worked_ns: seen.now_ns, stepped: Some(seen), may_hold_pages: None };
            return None;
        };
        if seen.now_ns - before.now_ns >= STEP_NS {
            self.stepped = Some(seen);
            let others_evict = seen.evicted_by_others != before.evicted_by_others;
            let gives = seen.now_ns - self.worked_ns >= AFTER_NS && seen.is_full && others_evict;
            let has = seen.resident_pages.min(self.may_hold_pages.unwrap_or(u64::MAX));
            self.may_hold_pages = gives.then(|| (has / 8 * 7).max(LEAST_PAGES));
        }
        self.may_hold_pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(step: u64, evicted_by_others: u64) -> Seen {
        Seen { now_ns: step * STEP_NS, cpu_ns: 0, faults: 7, resident_pages: 8000, is_full: true, evicted_by_others }
    }

    #[test]
    fn who_waits_while_others_are_short_gives_up_an_eighth_at_each_step_but_the_least() {
        let (mut waits, mut resident, mut held) = (Waits::default(), 8000, Vec::new());
        for step in 0..40 {
            let seen = Seen { resident_pages: resident, ..seen(step, step) };
            resident = resident.min(waits.may_hold(seen).unwrap_or(u64::MAX));
            held.push(resident);
            let within = Seen { now_ns: seen.now_ns + STEP_NS / 2, evicted_by_others: step + 99, ..seen };
            assert_eq!(waits.may_hold(within).unwrap_or(8000), resident);
        }
        assert_eq!(held[..6], [8000, 8000, 8000, 7000, 6125, 5355]);
        assert_eq!(held[39], LEAST_PAGES);
    }

    #[test]
    fn who_works_or_whom_nobody_needs_it_from_keeps_what_it_has() {
        let mut waits = Waits::default();
        let mut at = |step, change: fn(&mut Seen)| {
            let mut seen = seen(step, step);
            change(&mut seen);
            waits.may_hold(seen)
        };
        assert_eq!([0, 1, 2].map(|step| at(step, |_| ())), [None; 3]);
        assert_eq!(at(3, |_| ()), Some(7000));
        assert_eq!(at(4, |seen| seen.is_full = false), None);
        assert_eq!(at(5, |_| ()), Some(7000));
        assert_eq!(at(6, |seen| seen.evicted_by_others = 5), None);
        assert_eq!(at(7, |_| ()), Some(7000));
        // A fault: at once, and a quarter of a second must pass again.
        assert_eq!([8, 9, 10].map(|step| at(step, |seen| seen.faults = 8)), [None; 3]);
        assert_eq!(at(11, |seen| seen.faults = 8), Some(7000));
        let busy = |seen: &mut Seen| (seen.faults, seen.cpu_ns) = (8, STEP_NS / 10);
        assert_eq!([12, 13, 14].map(|step| at(step, busy)), [None; 3]);
        assert_eq!(at(15, busy), Some(7000));
    }

    #[test]
    fn what_others_evicted_before_is_none_of_it() {
        let mut waits = Waits::default();
        assert!((0..9).all(|step| waits.may_hold(seen(step, 1_000_000)).is_none()));
    }
}
