//! Which pages left the small queue, or were not taken into it, a short while ago: a fingerprint of each, and nothing else.
//!
//! A table of buckets of eight; each place holds 32 bits of a page's hash and the turn at which it left. A page is remembered while fewer turns
//! have passed since than the table has places. A full bucket loses its oldest. A false match, one in some billions for each lookup, admits a page
//! to the main queue that should have begun in the small one.
//!
//! # Source
//! The ghost queue of S3-FIFO, there too a hash table of fingerprints with the time of insertion (section 4.2 of the paper, see [`crate::queues`]).

use crate::FileId;

const WAYS: usize = 8;

/// Zero: the place is empty. Else the turn in the upper half, the fingerprint in the lower.
type Left = u64;

pub struct Ghost {
    /// Buckets, one after the other. Zeroes take no memory until they are written to.
    places: Box<[Left]>,
    turn: u32,
}

impl Ghost {
    /// Remembers about `pages` pages, 8 bytes each.
    pub fn new(pages: usize) -> Ghost {
        Ghost { places: vec![0; pages.div_ceil(WAYS).next_power_of_two() * WAYS].into(), turn: 0 }
    }

    /// The memory it takes once it is full, in bytes.
    pub fn bytes(&self) -> u64 {
        size_of_val(&*self.places) as u64
    }

    /// Remembers a page from now on. One that is remembered already costs no turn: who is refused again and again makes nobody else be forgotten.
    pub fn remember(&mut self, file: FileId, page: u32) {
        let turn = u64::from(self.turn);
        if let Some(left) = self.find(file, page) {
            *left = turn << 32 | *left & u64::from(u32::MAX);
            return;
        }
        self.turn = self.turn.checked_add(1).unwrap_or_else(|| {
            // Once in four billion turns all is forgotten.
            self.places.fill(0);
            1
        });
        let turn = self.turn;
        let (bucket, print) = self.bucket(file, page);
        let oldest = (0..WAYS).min_by_key(|way| bucket[*way] >> 32).unwrap_or(0);
        bucket[oldest] = u64::from(turn) << 32 | u64::from(print);
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
        let (span, turn) = (self.places.len() as u64, u64::from(self.turn));
        let (bucket, print) = self.bucket(file, page);
        bucket.iter_mut().find(|left| **left != 0 && **left as u32 == print && turn - (**left >> 32) < span)
    }

    /// Where the page would be, and its fingerprint.
    fn bucket(&mut self, file: FileId, page: u32) -> (&mut [Left], u32) {
        let hash = hash(file, page);
        let first = (hash as usize & (self.places.len() / WAYS - 1)) * WAYS;
        (&mut self.places[first..first + WAYS], (hash >> 32) as u32)
    }
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
    fn a_page_is_remembered_once_and_for_about_as_many_turns_as_there_are_places() {
        let mut ghost = Ghost::new(1024);
        ghost.remember(FILE, 7);
        assert!(!ghost.take(FILE, 8));
        assert!(!ghost.take(FileId { dev: 2, ino: 2 }, 7));
        assert!(ghost.take(FILE, 7));
        assert!(!ghost.take(FILE, 7), "it was taken");
        ghost.remember(FILE, 7);
        for page in 1000..1000 + 1024 {
            ghost.remember(FILE, page);
        }
        assert!(!ghost.take(FILE, 7), "too long ago");
        let kept = (1000..1000 + 1024).filter(|page| ghost.take(FILE, *page)).count();
        assert!(kept > 700, "{kept} of the last 1024");
    }
}
