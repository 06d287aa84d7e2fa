//! Reading and writing the contents of a file below.
//!
//! The kernel keeps a file's pages for the mount above; kept once more for the file below, they would take twice the memory. So what is read
//! below is let go of again: with `RWF_DONTCACHE` where kernel and file system have it (Linux 6.14; pages that others brought in stay), else
//! by `posix_fadvise(POSIX_FADV_DONTNEED)` for the range that was read. Both go through the kernel's page cache below and see what others
//! write there at any alignment (docs/decisions/0023). Long runs of whole pages of which nothing is in that cache are read directly, past this module
//! (`tree/reading.rs`, docs/decisions/0036).
//!
//! Writes go to the page cache below and are written out when the kernel likes; an fsync waits for it and lets go of the pages.

use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::fs::{Advice, SeekFrom, fadvise, seek};
use rustix::io::{self, Errno, ReadWriteFlags, pread, preadv2, pwrite, pwritev2};

/// `RWF_DONTCACHE` of Linux 6.14.
const DONT_CACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

/// How files below are read.
pub struct Lower {
    /// Until the first file system says that it does not know it.
    dont_cache: AtomicBool,
}

impl Lower {
    pub fn new() -> Lower {
        Lower { dont_cache: AtomicBool::new(true) }
    }

    /// Reads from `offset_bytes` on until `into` is full or the file ends; returns how much there was.
    ///
    /// # Errors
    /// A part cannot be read. What came before it is not said: whoever is given less than he asked for takes that for the end of the file, and the
    /// kernel zeroes for the rest. After an error it asks again, page by page.
    pub fn read(&self, file: impl AsFd, offset_bytes: u64, into: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < into.len() {
            let read = match self.read_once(file.as_fd(), offset_bytes + done as u64, &mut into[done..]) {
                Err(Errno::INTR) => continue,
                Ok(0) => break,
                read => read?,
            };
            done += read;
        }
        Ok(done)
    }

    fn read_once(&self, file: impl AsFd, offset_bytes: u64, into: &mut [u8]) -> io::Result<usize> {
        if self.dont_cache.load(Relaxed) {
            match preadv2(&file, &mut [IoSliceMut::new(into)], offset_bytes, DONT_CACHE) {
                Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => self.dont_cache.store(false, Relaxed),
                other => return other,
            }
        }
        let read = pread(&file, &mut *into, offset_bytes)?;
        if let Some(length) = NonZeroU64::new(read as u64) {
            // Advice: where it is not taken, pages stay until the kernel wants them.
            let _ = fadvise(&file, offset_bytes, Some(length), Advice::DontNeed);
        }
        Ok(read)
    }
}

/// Writes all of `from` at `offset_bytes`, or as much as there is room for; an error only if nothing was written.
pub fn write(file: &OwnedFd, offset_bytes: u64, from: &[u8]) -> io::Result<usize> {
    match write_on(file, offset_bytes, from) {
        (0, Err(error)) => Err(error),
        (written, _) => Ok(written),
    }
}

/// Writes all of `from` at `offset_bytes`, or else says why not: who writes back what was stored through a mapping does not look at how much
/// of it was written.
pub fn write_back(file: &OwnedFd, offset_bytes: u64, from: &[u8]) -> io::Result<usize> {
    match write_on(file, offset_bytes, from) {
        (written, Ok(())) if written < from.len() => Err(Errno::IO),
        (written, ended) => ended.map(|()| written),
    }
}

/// Writes as much as can be; how much that was, and what there was no way around.
fn write_on(file: &OwnedFd, offset_bytes: u64, from: &[u8]) -> (usize, io::Result<()>) {
    let mut done = 0;
    while done < from.len() {
        match pwrite(file, &from[done..], offset_bytes + done as u64) {
            Err(Errno::INTR) => {}
            Err(error) => return (done, Err(error)),
            Ok(0) => break,
            Ok(written) => done += written,
        }
    }
    (done, Ok(()))
}

/// Writes `from` where the file ends at that moment, whoever else appends; returns how much, and where it begins.
///
/// The descriptor's position is used: nobody else may at the same time.
pub fn append(file: &OwnedFd, from: &[u8]) -> io::Result<(usize, u64)> {
    let written = pwritev2(file, &[IoSlice::new(from)], u64::MAX, ReadWriteFlags::APPEND)?;
    let end = seek(file, SeekFrom::Current(0))?;
    Ok((written, end.saturating_sub(written as u64)))
}

/// The same of all of `from`, in pieces if need be; an error also if not all of it was written.
pub fn append_all(file: &OwnedFd, from: &[u8]) -> io::Result<(usize, u64)> {
    let (mut done, began) = append(file, from)?;
    while done < from.len() {
        match append(file, &from[done..]) {
            Ok((0, _)) => return Err(Errno::IO),
            Ok((written, _)) => done += written,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok((done, began))
}

/// Lets go of what the kernel keeps of the whole file below, as far as it is written out.
pub fn let_go(file: impl AsFd) {
    let _ = fadvise(file, 0, None, Advice::DontNeed);
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    /// The end of the first piece of our memory that can be read and has nothing behind it.
    fn end_of_memory() -> u64 {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let pieces: Vec<_> = maps
            .lines()
            .map(|line| {
                let (range, rest) = line.split_once(' ').unwrap();
                let (start, end) = range.split_once('-').unwrap();
                (number(start), number(end), rest.starts_with('r'))
            })
            .collect();
        let mut pairs = pieces.windows(2);
        pairs.find(|pair| pair[0].2 && pair[0].1 + 4096 <= pair[1].0).map(|pair| pair[0].1).expect("there are gaps")
    }

    #[test]
    fn a_part_that_cannot_be_read_is_no_end_of_the_file() {
        let (memory, end) = (File::open("/proc/self/mem").unwrap(), end_of_memory());
        let (lower, mut into) = (Lower::new(), [0; 8192]);
        assert_eq!(lower.read(&memory, end - 4096, &mut into), Err(Errno::IO));
        assert_eq!(lower.read(&memory, end - 4096, &mut into[..4096]), Ok(4096));
        assert_eq!(lower.read(&memory, end, &mut into), Err(Errno::IO));
        let file = tempfile::tempfile().unwrap();
        file.set_len(5000).unwrap();
        assert_eq!(lower.read(&file, 0, &mut into), Ok(5000));
    }
}
