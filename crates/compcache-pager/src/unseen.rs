//! How much has come that no fault announced: where nothing is registered, or it would have been asked for.
//!
//! What is not registered cannot leave, and all else has to make room for it; so when there is much of it the map is read. A look at the process tells
//! how many pages it has, and the pager knows of how many; but what it knows is early or late by what is on its way just then, at many looks a second.
//! So a page that was known of and not found yet is not taken for new when it is found, nor one that is known of a look after it was found.

/// A process over its limit may have so many pages, since the map was last read; one near it such a share of the limit, if that is more.
const MOST_PAGES: u64 = 16;
const MOST_SHARE: u64 = 16;
/// What is less than that share, and more than those pages, waits so long: else it would stay for as long as nothing else grows.
const LITTLE_WAITS_NS: u64 = 50_000_000;
/// Reading the map may take such a share of the time, whatever grows: much that can never be registered would have it read again and again.
const READING_SHARE: u64 = 16;

/// Growth that no fault announced, from look to look.
#[derive(Default)]
pub struct Unseen {
    pages: u64,
    /// Of these the last look added.
    added: u64,
    /// Known of and not found at the last look, as far as it may still come.
    missed: u64,
    not_before_ns: u64,
    read_ns: u64,
}

impl Unseen {
    /// A look found so many pages where so many were known of, `announced` of them since the look before.
    pub fn note(&mut self, found: u64, known: u64, announced: u64) {
        let expected = known.saturating_add(self.missed);
        if found > expected {
            (self.added, self.missed) = (found - expected, 0);
            self.pages += self.added;
        } else {
            let surplus = expected - found;
            let taken_back = surplus.min(self.added);
            self.pages -= taken_back;
            // What is more was dropped.
            (self.added, self.missed) = (0, (surplus - taken_back).min(announced));
        }
    }

    /// In a copy of the process, whose first look compares with what its parent knew: only what comes after it is new.
    pub fn begin_copy(&mut self) {
        (self.added, self.missed) = (0, u64::MAX);
    }

    /// Whether the map should be read.
    pub fn is_much(&self, limit_pages: u64, is_over: bool, now_ns: u64) -> bool {
        let at_once = is_over || now_ns.saturating_sub(self.read_ns) >= LITTLE_WAITS_NS;
        let most = if at_once { MOST_PAGES } else { MOST_PAGES.max(limit_pages / MOST_SHARE) };
        self.pages > most && now_ns >= self.not_before_ns
    }

    /// The map was read, from and to these times, and what there was is registered.
    pub fn was_read(&mut self, begun_ns: u64, ended_ns: u64) {
        (self.pages, self.added) = (0, 0);
        (self.read_ns, self.not_before_ns) = (ended_ns, ended_ns + (ended_ns - begun_ns) * READING_SHARE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is left of looks that each found, knew of, and had announced so much.
    fn pages(looks: &[(u64, u64, u64)]) -> u64 {
        let mut unseen = Unseen::default();
        looks.iter().for_each(|&(found, known, announced)| unseen.note(found, known, announced));
        unseen.pages
    }

    #[test]
    fn growth_adds_up_however_little_each_look_finds() {
        assert_eq!(pages(&[(103, 100, 0), (106, 103, 0), (110, 106, 0)]), 10);
        // Beside faults that announce as much and more.
        assert_eq!(pages(&[(113, 110, 10), (166, 163, 50)]), 6);
    }

    #[test]
    fn what_is_early_or_late_is_not_new() {
        // Five are announced between the looking and the comparing, at one look, and at two in a row.
        assert_eq!(pages(&[(100, 105, 5), (105, 100, 0)]), 0);
        assert_eq!(pages(&[(100, 105, 5), (105, 105, 5), (110, 105, 0)]), 0);
        // Sixteen were there a look before they were announced.
        assert_eq!(pages(&[(116, 100, 0), (116, 132, 16)]), 0);
        assert_eq!(pages(&[(118, 100, 0), (120, 134, 16)]), 4);
    }

    #[test]
    fn what_was_dropped_hides_nothing_that_comes_later() {
        assert_eq!(pages(&[(50, 100, 0), (80, 50, 0)]), 30);
        assert_eq!(pages(&[(50, 104, 4), (80, 50, 0)]), 26);
    }

    #[test]
    fn a_copy_begins_with_what_it_has() {
        let mut unseen = Unseen::default();
        unseen.note(107, 100, 0);
        unseen.begin_copy();
        unseen.note(140, 100, 0);
        assert_eq!(unseen.pages, 7);
        unseen.note(143, 140, 0);
        assert_eq!(unseen.pages, 10);
    }

    #[test]
    fn it_is_much_by_the_limit_and_the_map_is_not_read_all_the_time() {
        let mut unseen = Unseen::default();
        unseen.note(117, 100, 0);
        assert!(unseen.is_much(4096, true, 0) && !unseen.is_much(4096, false, 0));
        unseen.was_read(1000, 1100);
        unseen.note(600, 100, 0);
        assert!(!unseen.is_much(4096, false, 2699) && unseen.is_much(4096, false, 2700));
        // A little is not forgotten.
        unseen.was_read(3000, 3100);
        unseen.note(617, 600, 0);
        let long = 3100 + LITTLE_WAITS_NS;
        assert!(!unseen.is_much(4096, false, long - 1) && unseen.is_much(4096, false, long));
    }
}
