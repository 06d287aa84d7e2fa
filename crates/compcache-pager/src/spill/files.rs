//! The files that a process can have pages in, one for each part of the backing: its own, and those of its ancestors.

use super::PARTS;
use crate::lock::Mutex;
use crate::pager::clock_ns;
use crate::process;
use crate::shared::{Gauges, Region};
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

    /// Closes them, in the table of the calling thread, which has them all.
    pub fn close_all(&self) {
        for (file, number) in self.files.lock().iter_mut().zip(&self.numbers) {
            number.store(-1, Release);
            drop(file.take());
        }
    }

    /// What the tree may use beside what it uses, for the next segment of the process that has `gauges`. What others write counts, and this
    /// one says of its segment that it does before it looks what they write, so that no two have the last room; both may find none.
    /// Where there is none for it only a flight that gives back what it takes can begin, and it says so no more.
    pub fn begin(&self, gauges: Option<&Gauges>) -> u64 {
        let max = self.region.header.spill_max_bytes.load(Relaxed);
        if max == 0 {
            return u64::MAX;
        }
        let own_flying = gauges.map(|gauges| &gauges.spill_flying_bytes);
        own_flying.inspect(|flying| flying.store(self.segment_bytes, SeqCst));
        let is_own = |flying: &AtomicU64| own_flying.is_some_and(|own| core::ptr::eq(own, flying));
        let (mut used_bytes, mut others_flying_bytes) = (0, 0);
        for Gauges { spill_bytes, spill_flying_bytes, .. } in self.region.living().map(|slot| &slot.gauges) {
            // What has arrived is in use before it flies no more.
            others_flying_bytes += if is_own(spill_flying_bytes) { 0 } else { spill_flying_bytes.load(SeqCst) };
            used_bytes += spill_bytes.load(SeqCst);
        }
        let room_bytes = max.saturating_sub(used_bytes.max(self.used_bytes.load(Relaxed)) + others_flying_bytes);
        if room_bytes < 2 * self.segment_bytes {
            self.end(gauges);
        }
        room_bytes
    }

    /// Nothing is written any more.
    pub fn end(&self, gauges: Option<&Gauges>) {
        gauges.inspect(|gauges| gauges.spill_flying_bytes.store(0, SeqCst));
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
        file.ok_or(MediumError::Forked)?.write_at(offset_bytes, from)
    }

    /// Not where room is a number: what is not in use would take it beside that.
    fn fill(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        if self.0.region.header.spill_max_bytes.load(Relaxed) > 0 {
            return Err(MediumError::System { errno: Errno::OPNOTSUPP.raw_os_error() });
        }
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

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;
    use crate::memory::boxed_zeroed;
    use alloc::boxed::Box;

    const SEGMENT: u64 = 64 << 10;

    /// Of a tree of so many processes, which may have so many segments.
    fn files(processes: usize, segments: u64) -> PartFiles {
        // SAFETY: nothing but numbers, of which all may be zero.
        let region: &'static Region = Box::leak(unsafe { boxed_zeroed() });
        region.header.spill_max_bytes.store(segments * SEGMENT, Relaxed);
        region.header.slots_used.store(processes as u32, Relaxed);
        region.slots[..processes].iter().for_each(|slot| slot.owner.store(7, Relaxed));
        PartFiles {
            files: Mutex::new([const { None }; PARTS]),
            numbers: [const { AtomicI32::new(-1) }; PARTS],
            part_bytes: segments * SEGMENT,
            used_bytes: AtomicU64::new(0),
            segment_bytes: SEGMENT,
            region,
        }
    }

    fn gauges(files: &PartFiles, process: usize) -> &Gauges {
        &files.region.slots[process].gauges
    }

    #[test]
    fn the_last_room_is_for_who_says_first_that_it_writes_there() {
        let files = files(2, 4);
        let [one, other] = [0, 1].map(|process| gauges(&files, process));
        other.spill_bytes.store(2 * SEGMENT, Relaxed);
        assert_eq!(files.begin(Some(one)), 2 * SEGMENT, "its own does not count twice");
        assert_eq!(files.begin(Some(other)), SEGMENT);
        assert_eq!(other.spill_flying_bytes.load(Relaxed), 0, "it cannot begin, and is in nobody's way");
        assert_eq!(files.begin(None), SEGMENT);
        one.spill_bytes.store(SEGMENT, Relaxed);
        files.end(Some(one));
        assert_eq!(files.begin(Some(other)), SEGMENT);
        files.region.header.spill_max_bytes.store(0, Relaxed);
        assert_eq!(files.begin(Some(other)), u64::MAX);
    }

    #[test]
    fn nothing_takes_room_beforehand_beside_a_number_that_is_kept() {
        use std::os::unix::fs::MetadataExt;
        let (path, files) = (std::env::temp_dir(), Arc::new(files(1, 4)));
        let path = alloc::ffi::CString::new(path.to_str().unwrap()).unwrap();
        let file = std::fs::File::from(unnamed_file(&path).unwrap());
        files.put(0, file.try_clone().unwrap().into());
        let medium = PartMedium(files.clone());
        assert!(matches!(medium.fill(SEGMENT, SEGMENT), Err(MediumError::System { .. })));
        assert_eq!(file.metadata().unwrap().blocks(), 0);
        files.region.header.spill_max_bytes.store(0, Relaxed);
        assert_eq!(medium.fill(SEGMENT, SEGMENT), Ok(()));
    }

    #[test]
    fn however_many_write_at_once_they_leave_what_cleaning_needs() {
        const PROCESSES: usize = 4;
        let (files, begun) = (files(PROCESSES, 200), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for process in 0..PROCESSES {
                let (files, begun) = (&files, &begun);
                scope.spawn(move || {
                    let gauges = gauges(files, process);
                    for _ in 0..20_000 {
                        // As a flight that leaves one alone.
                        if files.begin(Some(gauges)) >= 2 * SEGMENT {
                            begun.fetch_add(1, Relaxed);
                            // While it is written others look.
                            std::thread::yield_now();
                            gauges.spill_bytes.fetch_add(SEGMENT, SeqCst);
                        }
                        files.end(Some(gauges));
                    }
                });
            }
        });
        assert_eq!(begun.load(Relaxed), 199);
    }
}
