//! Which ranges of the process are registered, and which must never be.
//!
//! A range is registered the first time the process is over its limit, and stays so until it is unmapped. Never
//! registered are: what was mapped before the program's start (the data of the loader and of libraries, the main thread's control block,
//! and everything of ours, which is mapped then too), stacks, and what lies above 256 TiB.

use core::ops::Range;

/// A sorted list of ranges that do not touch, of fixed size.
pub struct Ranges<const N: usize> {
    list: [(usize, usize); N],
    len: usize,
    has_lost: bool,
}

impl<const N: usize> Ranges<N> {
    /// No ranges.
    #[cfg(test)]
    pub fn empty() -> Self {
        Ranges { list: [(0, 0); N], len: 0, has_lost: false }
    }

    /// Removes all.
    pub fn clear(&mut self) {
        (self.len, self.has_lost) = (0, false);
    }

    /// Whether something is not held since there was no room for it.
    pub fn has_lost(&self) -> bool {
        self.has_lost
    }

    /// The ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.list[..self.len].iter().map(|&(start, end)| start..end)
    }

    /// How many ranges.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Place of the first range that ends after `address`.
    fn place(&self, address: usize) -> usize {
        self.list[..self.len].partition_point(|&(_, end)| end <= address)
    }

    /// The range that contains `address`.
    pub fn containing(&self, address: usize) -> Option<Range<usize>> {
        let &(start, end) = self.list[..self.len].get(self.place(address))?;
        (start <= address).then_some(start..end)
    }

    /// The first range that ends after `address`.
    pub fn at_or_after(&self, address: usize) -> Option<Range<usize>> {
        self.list[..self.len].get(self.place(address)).map(|&(start, end)| start..end)
    }

    /// Whether any range has an address in common with `range`.
    pub fn overlaps(&self, range: &Range<usize>) -> bool {
        self.at_or_after(range.start).is_some_and(|found| found.start < range.end)
    }

    /// Adds a range, joining it with those it touches. False when the list is full.
    pub fn add(&mut self, range: Range<usize>) -> bool {
        let is_added = self.insert(range);
        self.has_lost |= !is_added;
        is_added
    }

    fn insert(&mut self, range: Range<usize>) -> bool {
        let (mut start, mut end) = (range.start, range.end);
        let first = self.list[..self.len].partition_point(|&(_, other)| other < start);
        let mut last = first;
        while last < self.len && self.list[last].0 <= end {
            start = start.min(self.list[last].0);
            end = end.max(self.list[last].1);
            last += 1;
        }
        if last == first {
            if self.len == N {
                return false;
            }
            self.list.copy_within(first..self.len, first + 1);
            self.len += 1;
        } else {
            self.list.copy_within(last..self.len, first + 1);
            self.len -= last - first - 1;
        }
        self.list[first] = (start, end);
        true
    }

    /// Adds a range, and more if it must: when the list is full it is joined with the nearest other range, and so are the
    /// addresses between them.
    pub fn add_at_least(&mut self, range: Range<usize>) {
        if self.insert(range.clone()) {
            return;
        }
        let place = self.place(range.start);
        let gap_above = self.list[..self.len].get(place).map(|&(start, _)| start - range.end);
        let gap_below = place.checked_sub(1).map(|below| range.start - self.list[below].1);
        let joined = if gap_below.is_none_or(|below| gap_above.is_some_and(|above| above < below)) {
            range.start..self.list[place].0
        } else {
            self.list[place - 1].1..range.end
        };
        self.insert(joined);
    }

    /// Removes a range, or nothing where that would need more room than there is.
    pub fn remove_at_most(&mut self, range: Range<usize>) {
        let found = self.containing(range.start);
        let makes_two = found.is_some_and(|found| found.start < range.start && found.end > range.end);
        if self.len < N || !makes_two {
            self.remove(range);
        }
    }

    /// What is in `from` is now at `to`; with more, or without having left, where there is no room for less.
    pub fn move_at_least(&mut self, from: Range<usize>, to: usize) {
        let mut at = from.start;
        while at < from.end
            && let Some(found) = self.at_or_after(at).filter(|found| found.start < from.end)
        {
            let (start, end) = (found.start.max(at), found.end.min(from.end));
            self.add_at_least(start - from.start + to..end - from.start + to);
            at = end;
        }
        self.remove_at_most(from);
    }

    /// Removes a range, cutting those that reach over its ends. When a cut makes two of one and there is no room for
    /// the second, the part above is forgotten.
    pub fn remove(&mut self, range: Range<usize>) {
        let mut place = self.place(range.start);
        while place < self.len && self.list[place].0 < range.end {
            let (start, end) = self.list[place];
            match (start < range.start, end > range.end) {
                (true, true) => {
                    self.list[place].1 = range.start;
                    if self.len < N {
                        self.list.copy_within(place + 1..self.len, place + 2);
                        self.list[place + 1] = (range.end, end);
                        self.len += 1;
                    } else {
                        self.has_lost = true;
                    }
                    return;
                }
                (true, false) => self.list[place].1 = range.start,
                (false, true) => self.list[place].0 = range.end,
                (false, false) => {
                    self.list.copy_within(place + 1..self.len, place);
                    self.len -= 1;
                    continue;
                }
            }
            place += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges() -> std::boxed::Box<Ranges<64>> {
        std::boxed::Box::new(Ranges::empty())
    }

    /// The same sets as bits, and every operation on both.
    #[test]
    fn ranges_are_the_set_of_addresses_that_were_added_and_not_removed() {
        let mut random = 88172645463325252u64;
        let mut next = move |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let (mut ranges, mut model) = (ranges(), [false; 100]);
        for _ in 0..20_000 {
            let start = next(95) as usize;
            let range = start..start + 1 + next(5) as usize;
            let add = next(2) == 0;
            if add {
                assert!(ranges.add(range.clone()));
            } else {
                ranges.remove(range.clone());
            }
            model[range].fill(add);
            for (address, &held) in model.iter().enumerate() {
                assert_eq!(ranges.containing(address).is_some(), held, "address {address}");
            }
            assert!(ranges.iter().zip(ranges.iter().skip(1)).all(|(a, b)| a.end < b.start), "ranges touch");
        }
    }

    #[test]
    fn a_list_that_has_lost_something_says_so_until_it_is_cleared() {
        let mut ranges = Ranges::<2>::empty();
        assert!(ranges.add(0..10) && ranges.add(20..30) && !ranges.has_lost());
        assert!(!ranges.add(40..50) && ranges.has_lost());
        ranges.clear();
        assert!(ranges.add(0..10) && ranges.add(20..30));
        ranges.remove(22..24);
        assert!(ranges.has_lost() && ranges.containing(25).is_none());
    }

    /// With room for fewer ranges than there are: what was added is there, whatever else is.
    #[test]
    fn a_full_list_holds_more_rather_than_less() {
        let mut random = 2463534242u64;
        let mut next = move |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let (mut ranges, mut model) = (Ranges::<4>::empty(), [false; 100]);
        for step in 0..20_000 {
            let start = next(45) as usize;
            let range = start..start + 1 + next(5) as usize;
            match next(3) {
                0 => {
                    ranges.add_at_least(range.clone());
                    model[range].fill(true);
                }
                1 => {
                    ranges.remove_at_most(range.clone());
                    model[range].fill(false);
                }
                _ => {
                    let to = 50 + next(40) as usize;
                    let held = model;
                    ranges.move_at_least(range.clone(), to);
                    model[range.clone()].fill(false);
                    for address in range.clone() {
                        model[to + address - range.start] |= held[address];
                    }
                }
            }
            if step % 50 == 0 {
                ranges.clear();
                model.fill(false);
            }
            assert!(!ranges.has_lost());
            for (address, &held) in model.iter().enumerate() {
                assert!(!held || ranges.containing(address).is_some(), "address {address}");
            }
            assert!(ranges.iter().zip(ranges.iter().skip(1)).all(|(a, b)| a.end < b.start), "ranges touch");
        }
    }
}
