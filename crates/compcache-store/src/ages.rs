//! When a store had which age: how "not used for a minute" becomes a number of ages.
//!
//! A slot knows the age that its store had when the page was last used, a number of eight bits. Whoever has the store grow older
//! ([`Store::advance_age`](crate::Store::advance_age)), or looks at it now and then, notes here when that was. Ages are counted without
//! end here; the store's are the lowest eight bits.
//!
//! Example: ages of 10 s, it is 300 s after the start, and the age is 37. What was not used for a minute was last used in age 31 or before,
//! which are the pages that are 6 to 255 ages old.

use core::ops::RangeInclusive;

/// A slot tells so many ages apart.
const KNOWN: u64 = 256;

/// The pages that were last used so many ages before the age that the store had when this was said, whatever age it has by the time they are looked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Aged {
    as_of: u8,
    ago: RangeInclusive<u8>,
}

impl Aged {
    /// All pages.
    pub const ALL: Aged = Aged::new(0, 0..=u8::MAX);

    /// No page, whatever its age.
    pub const NONE: Aged = Aged::new(0, RangeInclusive::new(u8::MAX, 0));

    /// The pages that were last used so many ages before age `as_of`.
    pub const fn new(as_of: u8, ago: RangeInclusive<u8>) -> Aged {
        Aged { as_of, ago }
    }

    /// Whether there can be none.
    pub fn is_empty(&self) -> bool {
        self.ago.is_empty()
    }

    /// Whether a page that was last used in age `used` is one, now that the store's age is `now`. One that was used since is none that was used long ago.
    pub(crate) fn has(&self, used: u8, now: u8) -> bool {
        self.ago.contains(&now.wrapping_sub(used).saturating_sub(now.wrapping_sub(self.as_of)))
    }
}

/// The ages that a store has had, and when they began. Time is in nanoseconds of any clock that only grows.
pub struct Ages {
    now: u64,
    /// Of the last ages; those before `first` are not known.
    began_ns: [u64; KNOWN as usize],
    first: u64,
}

impl Ages {
    /// The store is of this age now; nothing is known of what was before.
    pub fn new(age: u8, now_ns: u64) -> Ages {
        Ages { now: age.into(), began_ns: [now_ns; KNOWN as usize], first: age.into() }
    }

    /// The age now.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// When it began.
    pub fn began_ns(&self) -> u64 {
        self.began_ns[(self.now % KNOWN) as usize]
    }

    /// The store is of this age now; others may have advanced it, by less than 256.
    pub fn note(&mut self, age: u8, now_ns: u64) {
        for _ in 0..age.wrapping_sub(self.now as u8) {
            self.now += 1;
            self.began_ns[(self.now % KNOWN) as usize] = now_ns;
        }
        self.first = self.first.max((self.now + 2).saturating_sub(KNOWN));
    }

    /// Pages of ages before this one were not used for `idle_ns`. `None` if that is longer ago than is known.
    pub fn before(&self, idle_ns: u64, now_ns: u64) -> Option<u64> {
        let began = |age: u64| self.began_ns[(age % KNOWN) as usize];
        (self.first..=self.now).rev().find(|age| now_ns.saturating_sub(began(*age)) >= idle_ns)
    }

    /// The pages of all ages before `before`, also of those that are not known here.
    pub fn aged_before(&self, before: u64) -> Aged {
        self.aged_until(before, u8::MAX)
    }

    /// The pages of ages from `from` on and before `before`: what [`Pool::recompress`](crate::Pool::recompress) asks for.
    pub fn aged(&self, from: u64, before: u64) -> Aged {
        self.aged_until(before, self.ago(from.min(before)))
    }

    fn aged_until(&self, before: u64, oldest: u8) -> Aged {
        match self.ago(before).checked_add(1) {
            Some(youngest) => Aged::new(self.now as u8, youngest..=oldest),
            // Longer ago than pages know.
            None => Aged::NONE,
        }
    }

    fn ago(&self, age: u64) -> u8 {
        u8::try_from(self.now - age.min(self.now)).unwrap_or(u8::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_becomes_ages_and_each_is_looked_at_once() {
        let mut ages = Ages::new(7, 0);
        (1..=30).for_each(|age| ages.note(7 + age as u8, age * 10));
        assert_eq!((ages.now(), ages.began_ns()), (37, 300));
        assert_eq!(ages.before(60, 300), Some(31), "age 31 began at 240");
        assert_eq!(ages.before(400, 300), None);
        // Now is 37: pages of age 30 and older are cold.
        assert_eq!(ages.aged(0, 31), Aged::new(37, 7..=37));
        assert_eq!(ages.aged(25, 31), Aged::new(37, 7..=12));
        assert_eq!(ages.aged_before(31), Aged::new(37, 7..=255));
        assert!(ages.aged(31, 31).is_empty(), "nothing has become cold since");
        // Somebody else has it grow older, past the end of what the store counts.
        ages.note(250, 310);
        ages.note(4, 320);
        assert_eq!((ages.now(), ages.before(15, 325)), (260, Some(250)));
        assert_eq!(ages.aged(0, 250), Aged::new(4, 11..=255));
        assert_eq!(ages.before(320, 325), Some(7));
        (0..60).for_each(|n| ages.note((4 + n * 5) as u8, 330 + n));
        assert_eq!(ages.before(320, 400), None, "older than what pages know");
        assert!(ages.aged(0, 250).is_empty(), "pages of 255 ages ago are younger than those before age 250");
    }

    #[test]
    fn the_same_pages_are_meant_when_the_store_has_become_older() {
        let aged = Aged::new(10, 3..=255);
        for passed in [0, 1, 100, 245] {
            let now = 10u8.wrapping_add(passed);
            assert!(aged.has(7, now) && aged.has(0, now) && !aged.has(8, now) && !aged.has(10, now), "{passed}");
            assert!((0..=passed).all(|since| !aged.has(10u8.wrapping_add(since), now)), "used since: {passed}");
        }
        let aged = Aged::new(10, 3..=5);
        assert!(aged.has(5, 200) && !aged.has(4, 200) && !aged.has(8, 200) && !aged.has(200, 200));
        assert!((0..=255).all(|used| Aged::ALL.has(used, 77)));
    }
}
