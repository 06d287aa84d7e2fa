//! A file or a block device as a [`Medium`], by raw system calls.
//!
//! Input and output are direct where the file system takes it (ext4, xfs, btrfs and block devices do; tmpfs only since Linux
//! 6.6): what was just written is the coldest there is, and a second copy of it in the page cache would take the memory that
//! the backing is to relieve.

use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering::*};

use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, pread, pwrite};

use super::medium::{Medium, MediumError};
use crate::page::PAGE_SIZE;

/// What so short a direct request to a block device lies in is on the kernel's stack (`DIO_INLINE_BIO_VECS`, Linux
/// block/fops.c); for a longer one memory is asked for.
const FRUGAL_BYTES: usize = 4 * PAGE_SIZE;

/// A file, or a block device, that nobody else writes to.
pub struct FileMedium {
    file: OwnedFd,
    is_direct: AtomicBool,
    /// The most that the kernel is asked for at a time.
    request_bytes: usize,
}

impl FileMedium {
    /// Takes a file that is open for reading and writing; what is in it is overwritten.
    pub fn new(file: OwnedFd) -> FileMedium {
        let direct = fcntl_getfl(&file).and_then(|flags| fcntl_setfl(&file, flags | OFlags::DIRECT));
        FileMedium { file, is_direct: AtomicBool::new(direct.is_ok()), request_bytes: usize::MAX }
    }

    /// As [`FileMedium::new`], for a block device that is written while the system has no memory: it is asked for four pages at a
    /// time, for which the kernel takes none of its own, and nothing is punched.
    pub fn frugal(device: OwnedFd) -> FileMedium {
        FileMedium { request_bytes: FRUGAL_BYTES, ..FileMedium::new(device) }
    }

    /// What is asked for next of so many bytes, when some are done.
    fn request(&self, done: usize, bytes: usize) -> Range<usize> {
        done..bytes.min(done.saturating_add(self.request_bytes))
    }

    /// Whether the page cache is left out, as far as is known.
    pub fn is_direct(&self) -> bool {
        self.is_direct.load(Acquire)
    }

    /// What the system said to a request, unless that may be because a page is too little to be asked for directly (a disk of larger
    /// sectors): then it is asked through the page cache from now on, and this one once more.
    fn failed(&self, errno: Errno, was_direct: bool) -> Result<(), MediumError> {
        if errno != Errno::INVAL || !was_direct || self.request_bytes < usize::MAX {
            return Err(error(errno));
        }
        let buffered = fcntl_getfl(&self.file).and_then(|flags| fcntl_setfl(&self.file, flags - OFlags::DIRECT));
        buffered.map_err(|_| error(errno))?;
        // After it, so that nobody asks directly who does not know.
        self.is_direct.store(false, Release);
        Ok(())
    }
}

impl Medium for FileMedium {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        let mut done = 0;
        while done < into.len() {
            let (request, was_direct) = (self.request(done, into.len()), self.is_direct());
            match pread(&self.file, &mut into[request], offset_bytes + done as u64) {
                Ok(0) => return Err(MediumError::Short),
                Ok(more) => done += more,
                Err(Errno::INTR) => {}
                Err(errno) => self.failed(errno, was_direct)?,
            }
        }
        Ok(())
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        let mut done = 0;
        while done < from.len() {
            let (request, was_direct) = (self.request(done, from.len()), self.is_direct());
            match pwrite(&self.file, &from[request], offset_bytes + done as u64) {
                Ok(0) => return Err(MediumError::NoSpace),
                Ok(more) => done += more,
                Err(Errno::INTR) => {}
                Err(errno) => self.failed(errno, was_direct)?,
            }
        }
        Ok(())
    }

    fn fill(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        if self.request_bytes < usize::MAX {
            return Ok(());
        }
        // The file is as long as that then: ext4 punches nothing behind its end. A block device cannot do this, nor can some file systems.
        fallocate(&self.file, FallocateFlags::empty(), offset_bytes, length_bytes).map_err(error)
    }

    fn punch(&self, offset_bytes: u64, length_bytes: u64) {
        if self.request_bytes < usize::MAX {
            return;
        }
        // A block device that cannot forget, and a file system without holes, keep their room.
        let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(&self.file, holes, offset_bytes, length_bytes);
    }
}

fn error(errno: Errno) -> MediumError {
    match errno {
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => MediumError::NoSpace,
        _ => MediumError::System { errno: errno.raw_os_error() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_file_returns_what_was_written_and_says_when_it_was_made_shorter() {
        let named = tempfile::NamedTempFile::new().unwrap();
        // Opened once more: whether it is direct is said of each opening.
        let (file, medium) = (named.reopen().unwrap(), FileMedium::new(named.reopen().unwrap().into()));
        let mut block = crate::backing::buffer::Buffer::new(8192).unwrap();
        block.fill(0x5a);
        medium.write_at(1 << 20, &block).unwrap();
        let mut there = [0; 3];
        file.read_exact_at(&mut there, (1 << 20) + 8189).unwrap();
        assert_eq!(there, [0x5a; 3]);
        block.fill(0);
        medium.read_at(1 << 20, &mut block).unwrap();
        assert!(block.iter().all(|byte| *byte == 0x5a));
        medium.punch(1 << 20, 4096);
        medium.read_at(1 << 20, &mut block).unwrap();
        assert!(block[4096..].iter().all(|byte| *byte == 0x5a));
        file.set_len((1 << 20) + 4096).unwrap();
        assert_eq!(medium.read_at(1 << 20, &mut block), Err(MediumError::Short));
        let read_only = std::fs::File::open("/proc/self/exe").unwrap();
        let refused = FileMedium::new(read_only.into()).write_at(0, &block);
        assert!(matches!(refused, Err(MediumError::System { .. })), "{refused:?}");
    }

    #[test]
    fn a_frugal_one_is_written_and_read_in_pieces_and_keeps_its_room() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let medium = FileMedium::frugal(named.reopen().unwrap().into());
        let pieces = [0, 4, 8].map(|page| medium.request(page * PAGE_SIZE, 9 * PAGE_SIZE).len() / PAGE_SIZE);
        assert_eq!(pieces, [4, 4, 1]);
        let mut block = crate::backing::buffer::Buffer::new(9 * PAGE_SIZE).unwrap();
        block.chunks_mut(PAGE_SIZE).zip(1..).for_each(|(page, nth)| page.fill(nth));
        medium.write_at(PAGE_SIZE as u64, &block).unwrap();
        medium.punch(0, 10 * PAGE_SIZE as u64);
        block.fill(0);
        medium.read_at(PAGE_SIZE as u64, &mut block).unwrap();
        assert!(block.chunks(PAGE_SIZE).zip(1..).all(|(page, nth)| page.iter().all(|byte| *byte == nth)));
    }
}
