//! What a file of the `columns` worker holds at any moment, so that every byte that is read can be checked.
//!
//! A file is written in whole passes, its *generations*. Page N of generation G is a page of an image, another one in each generation, and its
//! second word says N and G: an old page, or one of another place, is a wrong one also where the image has but one page.
//! Pages of the image that repeat one word stay so, because they cost a compressed cache nothing; these alone look alike.
//!
//! | content  | image                                                    | N = 5, G = 2 begins with              |
//! |----------|----------------------------------------------------------|---------------------------------------|
//! | `iozone` | one page: 70 70 70 70 70 70 70 70, and zeroes            | 70..70, 00000002_00000005, 0 ...      |
//! | `real`   | pages of heaps                                           | a word of the heap, 00000002_00000005 |

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr;

use compcache_testkit::PAGE_BYTES;
use compcache_testkit::corpus::{self, Page};

/// How far the image is moved from one generation to the next.
const MOVED_PAGES: u64 = 257;
/// Where the word lies that says which page it is.
const STAMP: std::ops::Range<usize> = 8..16;

/// The image, mapped: its pages are charged to who made it.
pub struct Pattern {
    image: &'static [Page],
    is_same: Vec<bool>,
}

/// A byte was not what was written: the one thing that must never happen.
#[derive(Debug, PartialEq)]
pub struct WrongByte {
    /// Where in the file.
    pub at: u64,
    /// What was read.
    pub found: u8,
    /// What was written.
    pub wanted: u8,
}

impl fmt::Display for WrongByte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WRONG BYTES: {:#04x} at {}, wanted {:#04x}", self.found, self.at, self.wanted)
    }
}

impl std::error::Error for WrongByte {}

impl Pattern {
    /// Maps the image at `path`, for as long as the process lives.
    ///
    /// # Errors
    /// It cannot be read, or is shorter than a page.
    pub fn open(path: &Path) -> io::Result<Pattern> {
        let file = File::open(path)?;
        let pages = file.metadata()?.len() as usize / PAGE_BYTES;
        if pages == 0 {
            return Err(io::Error::other("the image is shorter than a page"));
        }
        // SAFETY: a new mapping of a file that is open here, at an address that the kernel chooses; it is never unmapped.
        let base = unsafe {
            let length = pages * PAGE_BYTES;
            libc::mmap(ptr::null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `pages` pages are mapped there until the process ends; arrays of bytes need no alignment. Nobody writes to the image once
        // it is made: the bench writes it before it starts a worker.
        let image = unsafe { std::slice::from_raw_parts(base.cast::<Page>(), pages) };
        Ok(Pattern { image, is_same: image.iter().map(corpus::is_same_filled).collect() })
    }

    /// The page of the image, and what its second word is to be, if it is not what it is in the image.
    fn page(&self, page: u64, generation: u32) -> (&Page, Option<[u8; 8]>) {
        let nth = ((page + u64::from(generation) * MOVED_PAGES) % self.image.len() as u64) as usize;
        let stamp = (u64::from(generation) << 32 | page & 0xffff_ffff).to_ne_bytes();
        (&self.image[nth], (!self.is_same[nth]).then_some(stamp))
    }

    /// What is to be written from `first` on, in whole pages.
    pub fn fill(&self, first: u64, generation: u32, into: &mut [u8]) {
        for (page, bytes) in (first..).zip(into.chunks_exact_mut(PAGE_BYTES)) {
            let (image, stamp) = self.page(page, generation);
            bytes.copy_from_slice(image);
            if let Some(stamp) = stamp {
                bytes[STAMP].copy_from_slice(&stamp);
            }
        }
    }

    /// Compares every byte of what was read from page `first` on.
    ///
    /// # Errors
    /// [`WrongByte`], the first one.
    pub fn check(&self, first: u64, generation: u32, found: &[u8]) -> Result<(), WrongByte> {
        for (page, found) in (first..).zip(found.chunks_exact(PAGE_BYTES)) {
            let (image, stamp) = self.page(page, generation);
            let stamped = stamp.as_ref().map_or(&image[STAMP], |stamp| &stamp[..]);
            let parts = [&image[..STAMP.start], stamped, &image[STAMP.end..]];
            let is_right =
                found[..STAMP.start] == *parts[0] && found[STAMP] == *parts[1] && found[STAMP.end..] == *parts[2];
            if !is_right {
                let wanted = parts.into_iter().flatten();
                let wrong = found.iter().zip(wanted).enumerate().find(|(_, (found, wanted))| found != wanted);
                let (at, (&found, &wanted)) = wrong.expect("the parts make a page, and one of them differs");
                return Err(WrongByte { at: page * PAGE_BYTES as u64 + at as u64, found, wanted });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(name: &str, image: &[u8]) -> Pattern {
        let path = std::env::temp_dir().join(format!("compcache-pattern-{name}.{}", std::process::id()));
        std::fs::write(&path, image).unwrap();
        let pattern = Pattern::open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        pattern
    }

    #[test]
    fn a_single_wrong_byte_is_noticed_wherever_it_is() {
        let image: Vec<u8> = (0..700 * PAGE_BYTES).map(|at| (at / 7) as u8).collect();
        for pattern in
            [pattern("byte", &image), pattern("zero", &[0; PAGE_BYTES]), pattern("one", &image[..PAGE_BYTES])]
        {
            let mut record = vec![0; 4 * PAGE_BYTES];
            pattern.fill(1000, 3, &mut record);
            pattern.check(1000, 3, &record).unwrap();
            for at in [0, 7, 8, 12, 15, 16, PAGE_BYTES - 1, PAGE_BYTES, 4 * PAGE_BYTES - 1] {
                record[at] ^= 0x10;
                let wrong = pattern.check(1000, 3, &record).unwrap_err();
                assert_eq!((wrong.at, wrong.found), (1000 * PAGE_BYTES as u64 + at as u64, record[at]));
                record[at] ^= 0x10;
            }
        }
    }

    #[test]
    fn an_old_page_and_one_of_another_place_are_wrong() {
        let mut image = [0; PAGE_BYTES];
        image[..8].fill(0x70);
        let pattern = pattern("place", &image);
        let mut page = [0; PAGE_BYTES];
        pattern.fill(9, 2, &mut page);
        assert!(pattern.check(9, 2, &page).is_ok());
        assert!(pattern.check(9, 1, &page).is_err() && pattern.check(9, 3, &page).is_err());
        assert!(pattern.check(8, 2, &page).is_err());
    }

    #[test]
    fn same_filled_pages_stay_so() {
        let pattern = pattern("same", &[[7; PAGE_BYTES], [0; PAGE_BYTES]].concat());
        let mut page = [1; PAGE_BYTES];
        pattern.fill(4, 1, &mut page);
        assert!(corpus::is_same_filled(&page));
    }
}
