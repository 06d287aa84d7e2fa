//! The files that a process can have pages in, one for each part of the backing: its own, and those of its ancestors.

use super::PARTS;
use crate::lock::Mutex;
use crate::pager::clock_ns;
use crate::process;
use crate::shared::Region;
use alloc::sync::Arc;
use compcache_store::{FileMedium, Medium, MediumError};
use core::ffi::CStr;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering::*};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

/// The file that holds each part, as far as this process has it.
pub(super) struct PartFiles {
    pub files: Mutex<[Option<Arc<FileMedium>>; PARTS]>,
    /// Their numbers in the evictor's table.
    pub numbers: [AtomicI32; PARTS],
    pub part_bytes: u64,
    /// Bytes of the file that are in use, as last told, and the most that the tree may use.
    pub used_bytes: AtomicU64,
    pub segment_bytes: u64,
    pub region: &'static Region,
}

impl PartFiles {
    fn of(&self, offset_bytes: u64) -> (Option<Arc<FileMedium>>, u64) {
        let part = (offset_bytes / self.part_bytes) as usize;
        (self.files.lock().get(part).cloned().flatten(), offset_bytes % self.part_bytes)
    }

    pub fn put(&self, part: usize, file: OwnedFd) {
        self.numbers[part].store(file.as_raw_fd(), Release);
        // One that a parent had is a number of its table, and nothing to close here.
        core::mem::forget(self.files.lock()[part].replace(Arc::new(FileMedium::new(file))));
    }

    pub fn forget_all(&self) {
        for (file, number) in self.files.lock().iter_mut().zip(&self.numbers) {
            core::mem::forget(file.take());
            number.store(-1, Release);
        }
    }

    /// What the tree may use beside what it uses. What is being written does not count: a file that is at its last segment would
    /// have no room for what was just begun.
    pub fn room_bytes(&self) -> u64 {
        let max = self.region.header.spill_max_bytes.load(Relaxed);
        let all: u64 = self.region.living().map(|slot| slot.gauges.spill_bytes.load(Relaxed)).sum();
        if max == 0 { u64::MAX } else { max.saturating_sub(all.max(self.used_bytes.load(Relaxed))) }
    }

    /// Whether one more segment is within that.
    pub fn has_room(&self) -> bool {
        self.room_bytes() >= self.segment_bytes
    }
}

/// As the backing has it.
pub(super) struct PartMedium(pub Arc<PartFiles>);

impl Medium for PartMedium {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        let (file, offset_bytes) = self.0.of(offset_bytes);
        file.ok_or(MediumError::Forked)?.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        let (file, offset_bytes) = self.0.of(offset_bytes);
        if !self.0.has_room() {
            return Err(MediumError::NoSpace);
        }
        file.ok_or(MediumError::Forked)?.write_at(offset_bytes, from)
    }

    fn fill(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        let (file, offset_bytes) = self.0.of(offset_bytes);
        file.ok_or(MediumError::Forked)?.fill(offset_bytes, length_bytes)
    }

    fn punch(&self, offset_bytes: u64, length_bytes: u64) {
        let (file, offset_bytes) = self.0.of(offset_bytes);
        if let Some(file) = file {
            file.punch(offset_bytes, length_bytes);
        }
    }
}

/// A file without a name beside `path`, or in it if it is a directory.
pub(super) fn unnamed_file(path: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::open(path, flags | OFlags::TMPFILE | OFlags::EXCL, mode) {
        // No such files on this file system, or a kernel that takes the flags for another's.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
        done => return done,
    }
    let directory = rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut name = [0; 64];
    let (thread, now_ns) = (rustix::thread::gettid().as_raw_nonzero().get(), clock_ns());
    let name = process::text(&mut name, format_args!(".compcache-spill-{thread}-{now_ns}\0")).ok_or(Errno::INVAL)?;
    let file = rustix::fs::openat(&directory, name, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    rustix::fs::unlinkat(&directory, name, AtFlags::empty())?;
    Ok(file)
}
