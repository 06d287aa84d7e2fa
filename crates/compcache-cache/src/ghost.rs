//! Which pages left the small queue, or were not taken, a short while ago: a fingerprint of each, when that was, and nothing else.
//!
//! A table of buckets of eight; each place holds 32 bits of a page's hash and the time, counted in pages that were asked for. A full bucket loses its oldest: a table of so
//! many places remembers seven of eight of as many pages, and an eighth of its places have older ones. What was remembered longer ago than twice the pages that
//! the cache has, or the table places, is not known any more: to have it would take more than there is, and it would push out what is no worse. A false match, one in some billions for each lookup, admits a page
//! to the main queue that should have begun in the small one.
//!
//! # Source
//! The ghost queue of S3-FIFO, there too a hash table of fingerprints with the time of insertion (section 4.2 of the paper, see [`crate::queues`]).

use crate::FileId;

const WAYS: usize = 8;

/// Zero: the place is empty. Else the time in the upper half, the fingerprint in the lower.
type Left = u64;

pub struct Ghost {
    /// Buckets, one after the other. Zeroes take no memory until they are written to.
    places: Box<[Left]>,
    /// Pages that were asked for. It begins anew after four billion, when what is old seems new, once.
    now: u32,
    /// For so many of them a page is known.
    span: u32,
}

impl Ghost {
    /// Remembers about `pages` pages, 8 bytes each.
    pub fn new(pages: usize) -> Ghost {
        let places = pages.div_ceil(WAYS).next_power_of_two() * WAYS;
        Ghost { places: vec![0; places].into(), now: 1, span: places as u32 }
    }

    /// Pages it has places for.
    pub fn length(&self) -> usize {
        self.places.len()
    }

    /// The memory it takes once it is full, in bytes.
    pub fn bytes(&self) -> u64 {
        size_of_val(&*self.places) as u64
    }

    /// So many pages were asked for, of a cache that has `here`.
    pub fn pass(&mut self, pages: usize, here: usize) {
        self.now = self.now.wrapping_add(pages as u32);
        self.span = (2 * here).max(self.places.len()) as u32;
    }

    pub fn remember(&mut self, file: FileId, page: u32) {
        let now = self.now;
        let (bucket, print) = self.bucket(file, page);
        let age = |left: Left| if left == 0 { u32::MAX } else { age(left, now) };
        let same = bucket.iter().position(|left| *left != 0 && *left as u32 == print);
        let oldest = (0..WAYS).max_by_key(|way| age(bucket[*way])).unwrap_or(0);
        bucket[same.unwrap_or(oldest)] = u64::from(now) << 32 | u64::from(print);
    }

    /// How many pages were asked for since this one was remembered, if it is.
    pub fn age(&mut self, file: FileId, page: u32) -> Option<u32> {
        let now = self.now;
        self.find(file, page).map(|left| age(*left, now))
    }

    /// Whether the page left a short while ago.
    pub fn has(&mut self, file: FileId, page: u32) -> bool {
        self.find(file, page).is_some()
    }

    /// The same; it is forgotten by being asked.
    pub fn take(&mut self, file: FileId, page: u32) -> bool {
        self.find(file, page).map(|left| *left = 0).is_some()
    }

    fn find(&mut self, file: FileId, page: u32) -> Option<&mut Left> {
        let (now, span) = (self.now, self.span);
        let (bucket, print) = self.bucket(file, page);
        bucket.iter_mut().find(|left| **left != 0 && **left as u32 == print && age(**left, now) < span)
    }

    /// Where the page would be, and its fingerprint.
    fn bucket(&mut self, file: FileId, page: u32) -> (&mut [Left], u32) {
        let hash = hash(file, page);
        let first = (hash as usize & (self.places.len() / WAYS - 1)) * WAYS;
        (&mut self.places[first..first + WAYS], (hash >> 32) as u32)
    }
}

fn age(left: Left, now: u32) -> u32 {
    now.wrapping_sub((left >> 32) as u32)
}

/// The finalizer of MurmurHash3, over the three numbers one after the other.
pub fn hash(file: FileId, page: u32) -> u64 {
    let mix = |mut word: u64| {
        word = (word ^ word >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        word = (word ^ word >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        word ^ word >> 33
    };
    mix(mix(mix(file.dev) ^ file.ino).wrapping_add(u64::from(page)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { dev: 1, ino: 2 };

    #[test]
    fn a_page_is_remembered_once_with_its_age_and_for_about_as_many_pages_as_there_are_places() {
        let mut ghost = Ghost::new(1024);
        ghost.remember(FILE, 7);
        assert!(!ghost.has(FILE, 8) && !ghost.has(FileId { dev: 2, ino: 2 }, 7));
        ghost.pass(5, 0);
        assert_eq!(ghost.age(FILE, 7), Some(5));
        assert!(ghost.take(FILE, 7) && !ghost.take(FILE, 7), "it was taken");
        ghost.remember(FILE, 7);
        for page in 1000..1000 + 4096 {
            ghost.pass(1, 0);
            ghost.remember(FILE, page);
            if page % 16 == 0 {
                ghost.remember(FILE, 1000);
            }
        }
        assert!(!ghost.has(FILE, 7), "too long ago");
        assert!(ghost.has(FILE, 1000), "not so long ago");
        let kept = (4096 + 1000 - 1024..4096 + 1000).filter(|page| ghost.take(FILE, *page)).count();
        assert!((850..950).contains(&kept), "{kept} of the last 1024");
    }

    #[test]
    fn a_page_is_known_for_twice_as_many_pages_as_there_are() {
        let mut ghost = Ghost::new(64);
        ghost.remember(FILE, 7);
        for (passed, here, known) in [(63, 0, true), (1, 0, false), (0, 100, true), (136, 100, false), (0, 101, true)] {
            ghost.pass(passed, here);
            assert_eq!(ghost.has(FILE, 7), known, "{passed} more, {here} here");
        }
    }
}
