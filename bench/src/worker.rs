//! The memory that the worker programs (`scan`, `hotcold`, `latency`) fill, touch and check; what `columns` does is in [`columns`].
//!
//! The workers are ordinary programs: dynamically linked, libc's malloc, one `mmap` of private anonymous memory. They
//! know nothing of who pages them. Every touch checks what it reads, and a last look checks every byte:
//!
//! | content      | a page holds                               | a touch                                | at the end              |
//! |--------------|--------------------------------------------|----------------------------------------|-------------------------|
//! | image file   | a page of the file; word 1 is a counter    | counter is index + visits; adds one    | hash of all other words |
//! | `same[:BYTE]`| that byte, 4096 times (as published)       | word 0 is right; writes it again       | every byte              |
//!
//! Tables kept beside the memory: 8 bytes of hash a page. They are memory of the program like any other.

pub mod columns;
pub mod pattern;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Instant;

use compcache_testkit::corpus::{self, Kind};
use serde::{Deserialize, Serialize};

/// Bytes in a page.
pub const PAGE_BYTES: usize = compcache_testkit::PAGE_BYTES;

const WORDS: usize = PAGE_BYTES / 8;

/// What the pages hold.
#[derive(Clone, Debug)]
pub enum Content {
    /// One byte, repeated: what `scan` as published writes. No codec ever runs.
    Same(u8),
    /// The pages of a file, from the start again when it is shorter.
    Image(PathBuf),
}

impl Content {
    /// Reads `same`, `same:BYTE`, the name of a [`Kind`], or a path.
    ///
    /// # Errors
    /// The image of that kind cannot be made.
    pub fn parse(word: &str) -> io::Result<Content> {
        if word == "same" {
            return Ok(Content::Same(0x5A));
        }
        if let Some(byte) = word.strip_prefix("same:") {
            return byte.parse().map(Content::Same).map_err(io::Error::other);
        }
        match word.parse::<Kind>() {
            Ok(kind) => corpus::image(kind).map(Content::Image),
            Err(_) => Ok(Content::Image(PathBuf::from(word))),
        }
    }
}

/// One timed part of a worker's run, printed as a line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Lap {
    /// `fill`, `pass`, `verify`.
    pub lap: String,
    /// Pages touched (for `hotcold`, accesses made).
    pub touches: u64,
    /// Seconds by the clock.
    pub wall_s: f64,
    /// Seconds of CPU in user mode, all threads of the process.
    pub user_s: f64,
    /// Seconds of CPU in the kernel, all threads of the process.
    pub sys_s: f64,
    /// Microseconds by the clock for one touch.
    pub us_per_touch: f64,
}

impl Lap {
    /// Runs `work`, which makes `touches` touches, and prints what it took.
    pub fn timed<T>(lap: &str, touches: u64, work: impl FnOnce() -> T) -> T {
        let (user, sys) = cpu_s();
        let started = Instant::now();
        let result = work();
        let wall_s = started.elapsed().as_secs_f64();
        let (user_after, sys_after) = cpu_s();
        let line = Lap {
            lap: lap.to_owned(),
            touches,
            wall_s,
            user_s: user_after - user,
            sys_s: sys_after - sys,
            us_per_touch: wall_s * 1e6 / touches as f64,
        };
        println!("{}", serde_json::to_string(&line).expect("numbers and a word"));
        result
    }
}

/// CPU seconds of this process so far, user and kernel.
pub fn cpu_s() -> (f64, f64) {
    // SAFETY: a `rusage` of zeroes is a valid value, and getrusage(2) writes one where the pointer says.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    (seconds(usage.ru_utime), seconds(usage.ru_stime))
}

/// A byte was not what was written: the one thing that must never happen.
#[derive(Debug)]
pub struct WrongBytes {
    /// The page, counted from the start of the memory.
    pub page: usize,
    /// What was compared: a word or the hash of the page.
    pub found: u64,
    /// What it should have been.
    pub wanted: u64,
}

impl std::fmt::Display for WrongBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WRONG BYTES in page {}: found {:#x}, wanted {:#x}", self.page, self.found, self.wanted)
    }
}

impl std::error::Error for WrongBytes {}

/// Private anonymous memory, filled with known content.
pub struct Memory {
    base: *mut u64,
    pages: usize,
    /// Some(word) when all pages repeat that word; else [`Memory::hashes`] says what each holds.
    same: Option<u64>,
    hashes: Vec<u64>,
}

impl Memory {
    /// Maps `megabytes` MiB and fills it.
    ///
    /// # Errors
    /// No memory, or the image cannot be read.
    pub fn filled(megabytes: usize, content: &Content) -> io::Result<Memory> {
        let bytes = megabytes << 20;
        // SAFETY: a new private mapping at an address that the kernel chooses; it is never unmapped, so that every
        // pointer made from it stays good until the process ends.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let pages = bytes / PAGE_BYTES;
        let mut memory = Memory { base: base.cast(), pages, same: None, hashes: Vec::new() };
        match content {
            Content::Same(byte) => memory.fill_same(*byte),
            Content::Image(path) => memory.fill_image(path)?,
        }
        Ok(memory)
    }

    /// How many pages there are.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// The address of a page.
    pub fn address(&self, page: usize) -> usize {
        assert!(page < self.pages);
        self.base as usize + page * PAGE_BYTES
    }

    fn fill_same(&mut self, byte: u8) {
        // SAFETY: `base` is a mapping of `pages` pages that nobody else refers to.
        unsafe { ptr::write_bytes(self.base.cast::<u8>(), byte, self.pages * PAGE_BYTES) };
        self.same = Some(u64::from_ne_bytes([byte; 8]));
    }

    fn fill_image(&mut self, path: &Path) -> io::Result<()> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let mut file = File::open(path).map_err(named)?;
        let held = file.metadata()?.len() as usize / PAGE_BYTES;
        if held == 0 {
            return Err(named(io::Error::other("shorter than a page")));
        }
        self.hashes.reserve_exact(self.pages);
        for page in 0..self.pages {
            if page % held == 0 {
                file.seek(SeekFrom::Start(0)).map_err(named)?;
            }
            file.read_exact(self.bytes_mut(page)).map_err(named)?;
            // SAFETY: the page is inside the mapping, see `word`.
            unsafe { self.word(page, 1).write(page as u64) };
            self.hashes.push(self.hash(page, 0));
        }
        Ok(())
    }

    /// Touches a page that has been visited `visits` times before: reads and checks a word of it, and when `write` is
    /// set writes one back.
    ///
    /// # Errors
    /// [`WrongBytes`].
    #[inline]
    pub fn touch(&self, page: usize, visits: u64, write: bool) -> Result<(), WrongBytes> {
        let (nth, wanted, next) = match self.same {
            Some(word) => (0, word, word),
            None => (1, page as u64 + visits, page as u64 + visits + 1),
        };
        let word = self.word(page, nth);
        // SAFETY: the word is inside the mapping. Volatile, because the access itself is what is measured.
        let found = unsafe { word.read_volatile() };
        if found != wanted {
            return Err(WrongBytes { page, found, wanted });
        }
        if write {
            // SAFETY: as above.
            unsafe { word.write_volatile(next) };
        }
        Ok(())
    }

    /// Moves all words of a page but the first two, which know where they are, one place on: every one of them is written to, and
    /// the page compresses as before.
    pub fn shift(&mut self, page: usize) {
        self.bytes_mut(page)[2 * size_of::<u64>()..].rotate_right(size_of::<u64>());
    }

    /// Checks every byte of a page that has been visited `visits` times, and shifted `shifts` times.
    ///
    /// # Errors
    /// [`WrongBytes`].
    pub fn verify(&self, page: usize, visits: u64, shifts: u64) -> Result<(), WrongBytes> {
        let check = |found, wanted| if found == wanted { Ok(()) } else { Err(WrongBytes { page, found, wanted }) };
        match self.same {
            Some(wanted) => self.words(page).iter().try_for_each(|&found| check(found, wanted)),
            None => {
                check(self.words(page)[1], page as u64 + visits)?;
                check(self.hash(page, shifts), self.hashes[page])
            }
        }
    }

    /// A hash of the page without its counter, as it was before its shifts.
    fn hash(&self, page: usize, shifts: u64) -> u64 {
        let words = self.words(page);
        let (last, first) = words[2..].split_at((shifts % (WORDS as u64 - 2)) as usize);
        let others = words[..1].iter().chain(first).chain(last);
        others.fold(0, |hash: u64, word| (hash.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    fn word(&self, page: usize, nth: usize) -> *mut u64 {
        assert!(page < self.pages && nth < WORDS);
        // SAFETY: the assertion keeps the result inside the mapping.
        unsafe { self.base.add(page * WORDS + nth) }
    }

    fn words(&self, page: usize) -> &[u64] {
        // SAFETY: `word` asserts the bounds; the page is mapped for as long as the process lives, and while `self` is
        // borrowed for this slice only `touch` could write, which the same thread calls at another time.
        unsafe { std::slice::from_raw_parts(self.word(page, 0), WORDS) }
    }

    fn bytes_mut(&mut self, page: usize) -> &mut [u8] {
        // SAFETY: as `words`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.word(page, 0).cast(), PAGE_BYTES) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> PathBuf {
        let path = std::env::temp_dir().join(format!("compcache-worker-test.{}.pages", std::process::id()));
        let bytes: Vec<u8> = (0..10 * PAGE_BYTES).map(|at| (at / 7) as u8).collect();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn a_single_wrong_byte_is_noticed_wherever_it_is() {
        let path = image();
        for content in [Content::Image(path.clone()), Content::Same(7)] {
            let memory = Memory::filled(1, &content).unwrap();
            (0..memory.pages()).for_each(|page| memory.verify(page, 0, 0).unwrap());
            for at in [0, 8, 15, 16, 2048, PAGE_BYTES - 1] {
                let byte = (memory.address(100) + at) as *mut u8;
                // SAFETY: `at` is inside page 100 of a mapping that stays; no reference into it lives.
                unsafe { byte.write(byte.read() ^ 0x10) };
                assert!(memory.verify(100, 0, 0).is_err(), "byte {at} of {content:?}");
                // SAFETY: as above.
                unsafe { byte.write(byte.read() ^ 0x10) };
                memory.verify(100, 0, 0).unwrap();
            }
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_touch_that_was_lost_is_noticed() {
        let memory = Memory::filled(1, &Content::Same(7)).unwrap();
        memory.touch(3, 0, true).unwrap();
        memory.verify(3, 1, 0).unwrap();
        let path = std::env::temp_dir().join(format!("compcache-worker-touch.{}.pages", std::process::id()));
        std::fs::write(&path, (0..PAGE_BYTES).map(|at| (at / 7) as u8).collect::<Vec<u8>>()).unwrap();
        let mut memory = Memory::filled(1, &Content::Image(path.clone())).unwrap();
        memory.touch(3, 0, true).unwrap();
        memory.touch(3, 1, false).unwrap();
        assert!(memory.touch(3, 0, true).is_err(), "it was visited once, not never");
        assert!(memory.verify(3, 0, 0).is_err() && memory.verify(3, 1, 0).is_ok());
        (0..513).for_each(|_| memory.shift(3));
        assert!(memory.verify(3, 1, 0).is_err() && memory.verify(3, 1, 513).is_ok());
        std::fs::remove_file(path).unwrap();
    }
}
