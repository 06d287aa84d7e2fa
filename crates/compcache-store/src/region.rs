//! A reserved range of addresses that becomes memory from its start, in steps.
//!
//! The range is mapped without access; steps of it are opened with `mprotect` as they are needed. A system that counts
//! commitments (`vm.overcommit_memory=2`) therefore counts only what was opened, and refuses a step instead of killing
//! the process later. Memory arrives when a page is first touched, and goes back with `madvise(DONTNEED)`; both are the
//! owner's to count, in whole pages. Huge pages are declined, since one touch would then cost 2 MiB.
//!
//! Lock: `grow`, a leaf lock around `mprotect`. Nothing here allocates.

#![allow(unsafe_code)]

use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{Advice, MapFlags, MlockFlags, MprotectFlags, ProtFlags};

use crate::error::StoreError;
use crate::lock::Mutex;
use crate::page::PAGE_SIZE;

/// A reserved address range, opened from its start.
pub(crate) struct Region {
    base: NonNull<u8>,
    reserved_bytes: usize,
    step_bytes: usize,
    lock_in_ram: bool,
    open_bytes: AtomicUsize,
    grow: Mutex<()>,
}

// SAFETY: the range is owned by this value until it is dropped; `base` is only an address, and who may touch which part
// of it is kept by the arena (class locks, slot locks) and the tables (atomics).
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Reserves `bytes`, to be opened in steps of `step_bytes`.
    pub fn reserve(bytes: usize, step_bytes: usize, lock_in_ram: bool) -> Result<Region, StoreError> {
        let refused = StoreError::MemoryRefused { bytes: bytes as u64 };
        let reserved_bytes = bytes.next_multiple_of(PAGE_SIZE);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice disturbs no memory of anybody.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                reserved_bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let base = NonNull::new(base.map_err(|_| refused)?.cast::<u8>()).ok_or(refused)?;
        // SAFETY: the range was mapped above. The advice changes no content; a kernel without huge pages refuses it, and
        // then there is nothing to decline.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast::<c_void>(), reserved_bytes, Advice::LinuxNoHugepage) };
        // What is compressed here may be what its owner keeps out of core dumps.
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast::<c_void>(), reserved_bytes, Advice::LinuxDontDump) };
        let open_bytes = AtomicUsize::new(0);
        Ok(Region { base, reserved_bytes, step_bytes, lock_in_ram, open_bytes, grow: Mutex::new(()) })
    }

    /// Makes sure that the first `bytes` may be touched.
    pub fn ensure(&self, bytes: usize) -> Result<(), StoreError> {
        if bytes <= self.open_bytes.load(Ordering::Acquire) {
            return Ok(());
        }
        if bytes > self.reserved_bytes {
            return Err(StoreError::MemoryRefused { bytes: bytes as u64 });
        }
        let _growing = self.grow.lock();
        let open = self.open_bytes.load(Ordering::Relaxed);
        if bytes <= open {
            return Ok(());
        }
        // Steps grow with the region, so that a large one is not opened by thousands of calls.
        let step = self.step_bytes.max(open / 8).next_multiple_of(PAGE_SIZE);
        let target = bytes.next_multiple_of(step).min(self.reserved_bytes);
        self.open(open, target).or_else(|_| self.open(open, bytes.next_multiple_of(PAGE_SIZE)))
    }

    fn open(&self, from: usize, to: usize) -> Result<(), StoreError> {
        let refused = StoreError::MemoryRefused { bytes: (to - from) as u64 };
        // SAFETY: `from..to` lies in the reserved range (checked by `ensure`) and was never opened: nothing is in it.
        let step = unsafe { self.base.as_ptr().add(from) }.cast::<c_void>();
        // SAFETY: as above.
        unsafe { rustix::mm::mprotect(step, to - from, MprotectFlags::READ | MprotectFlags::WRITE) }
            .map_err(|_| refused)?;
        if self.lock_in_ram {
            // SAFETY: locking changes no content.
            unsafe { rustix::mm::mlock_with(step, to - from, MlockFlags::ONFAULT) }.map_err(|_| refused)?;
        }
        self.open_bytes.store(to, Ordering::Release);
        Ok(())
    }

    /// Gives the memory of `bytes` from `offset` back to the system; it reads as zeroes when next touched.
    ///
    /// # Safety
    /// The range lies in the open part, and nobody reads or writes it, or holds a reference into it, during the call.
    pub unsafe fn release(&self, offset: usize, bytes: usize) {
        // SAFETY: the caller keeps the range unused; it lies inside our mapping.
        let released = unsafe {
            let start = self.base.as_ptr().add(offset).cast::<c_void>();
            let advise = |advice| rustix::mm::madvise(start, bytes, advice);
            // It may be locked without our doing (`mlockall`).
            advise(Advice::LinuxDontNeed).or_else(|_| advise(Advice::LinuxDontneedLocked))
        };
        if released.is_err() {
            // Kernels before 5.18 give locked memory back only after unlocking it.
            // SAFETY: as above; if one of these fails the memory stays, unused and readable.
            unsafe {
                let start = self.base.as_ptr().add(offset).cast::<c_void>();
                let _ = rustix::mm::munlock(start, bytes);
                let _ = rustix::mm::madvise(start, bytes, Advice::LinuxDontNeed);
                let _ = rustix::mm::mlock_with(start, bytes, MlockFlags::ONFAULT);
            }
        }
    }

    /// Asks for the memory of `bytes` from `offset` at once, which is cheaper than page by page. The content does not
    /// change; kernels before 5.14 refuse and the memory comes by touching.
    pub fn populate(&self, offset: usize, bytes: usize) {
        debug_assert!(offset + bytes <= self.open_bytes.load(Ordering::Relaxed));
        // SAFETY: inside our mapping; no content changes.
        let _ = unsafe {
            let start = self.base.as_ptr().add(offset).cast::<c_void>();
            rustix::mm::madvise(start, bytes, Advice::LinuxPopulateWrite)
        };
    }

    /// Has the system give the memory of `bytes` from `offset` now, whatever it takes; it becomes zeroes.
    ///
    /// The range lies in the open part, and nobody else knows it yet.
    pub fn touch(&self, offset: usize, bytes: usize) {
        assert!(offset + bytes <= self.open_bytes());
        self.populate(offset, bytes);
        for page in (offset..offset + bytes).step_by(PAGE_SIZE) {
            // SAFETY: in the open part, checked above; the caller keeps others away. A page that is there already is written
            // to no harm: it is empty.
            unsafe { self.base.as_ptr().add(page).write_volatile(0) };
        }
    }

    /// The address of the range. Memory behind it is there for the open part only.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes that may be touched, from the start.
    pub fn open_bytes(&self) -> usize {
        self.open_bytes.load(Ordering::Acquire)
    }

    /// Address and length of the whole reserved range.
    pub fn range(&self) -> (usize, usize) {
        (self.base.as_ptr() as usize, self.reserved_bytes)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and who drops the region holds no reference into it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.reserved_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_refuses_more_than_it_reserved() {
        let region = Region::reserve(1 << 20, 64 << 10, false).unwrap();
        assert!(region.ensure(1 << 20).is_ok());
        assert!(matches!(region.ensure((1 << 20) + 1), Err(StoreError::MemoryRefused { .. })));
    }

    #[test]
    fn a_region_grows_by_any_amount_up_to_its_end() {
        let region = Region::reserve(4 << 20, 64 << 10, false).unwrap();
        for bytes in (0..=4 << 20).step_by(192) {
            region.ensure(bytes).unwrap_or_else(|error| panic!("{bytes}: {error}"));
            assert!(region.open_bytes() >= bytes);
        }
    }

    #[test]
    fn released_memory_reads_as_zeroes() {
        for lock_in_ram in [false, true] {
            let region = Region::reserve(1 << 20, 64 << 10, lock_in_ram).unwrap();
            region.ensure(8192).unwrap();
            // SAFETY: the first 8192 bytes are open and nobody else knows them.
            unsafe {
                region.base().as_ptr().write(7);
                // As after mlockall, of which the region is not told.
                rustix::mm::mlock(region.base().as_ptr().cast::<c_void>(), 8192).unwrap();
                region.release(0, 8192);
                assert_eq!(region.base().as_ptr().read(), 0);
            }
        }
    }
}
