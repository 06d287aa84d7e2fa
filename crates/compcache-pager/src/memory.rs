//! Memory of the pager's own: mapped directly, never registered, never evicted.

use crate::sys::Errno;
use alloc::boxed::Box;
use core::alloc::{GlobalAlloc, Layout};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicUsize, Ordering::*};
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect};

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Maps `len` bytes of private memory. Nothing of it costs anything until it is touched.
pub fn map(len: usize) -> Result<*mut u8, Errno> {
    map_with(len, ProtFlags::READ | ProtFlags::WRITE)
}

/// Sets `len` bytes of addresses aside, to be opened with [`set_access`]: a program that locks all its memory makes the
/// kernel fill whatever can be touched.
pub fn reserve(len: usize) -> Result<*mut u8, Errno> {
    map_with(len, ProtFlags::empty())
}

/// Allows or forbids access to a range of the pager's own.
///
/// # Safety
/// While access is forbidden nobody may touch the range.
pub unsafe fn set_access(start: usize, len: usize, allowed: bool) -> Result<(), Errno> {
    let flags = if allowed { MprotectFlags::READ | MprotectFlags::WRITE } else { MprotectFlags::empty() };
    // SAFETY: says the caller.
    unsafe { mprotect(start as *mut core::ffi::c_void, len, flags) }.map_err(|errno| Errno(errno.raw_os_error()))
}

/// Maps private memory at a range where nothing should be. False when something is, or there is no memory.
pub fn map_where_nothing_is(start: usize, len: usize) -> bool {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: the kernel refuses where anything is mapped.
    let mapped = unsafe { mmap_anonymous(start as *mut _, len, ProtFlags::READ | ProtFlags::WRITE, flags) };
    mapped.is_ok_and(|mapped| mapped as usize == start)
}

/// Maps private memory over whatever there is.
///
/// # Safety
/// The range must be the pager's own, and nothing in it wanted.
pub unsafe fn map_over(start: usize, len: usize) -> bool {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: says the caller.
    unsafe { mmap_anonymous(start as *mut _, len, ProtFlags::READ | ProtFlags::WRITE, flags) }.is_ok()
}

/// How deep the stack is that making a pager takes, at most.
const DEEP_BYTES: usize = 96 << 10;
/// Of what lies below the caller, so much is left: where it has called to last.
const SHALLOW_BYTES: usize = 8 << 10;

/// Gives back the memory of what the program's first thread called before, and has returned from: few programs come to need a stack as deep.
///
/// # Safety
/// Only on the stack that the kernel gave the process: below it nothing else is mapped, as far as this reaches.
#[inline(never)]
pub unsafe fn give_back_dead_stack() {
    let mark = 0u8;
    let here = core::hint::black_box(&raw const mark) as usize;
    let end = (here - SHALLOW_BYTES) / PAGE * PAGE;
    // Where nothing is mapped the kernel says so, and goes on.
    // SAFETY: says the caller; nobody reads what lies below a stack's pointer before writing it, and a signal comes before the call or after it.
    let _ = unsafe { madvise((end - DEEP_BYTES) as *mut core::ffi::c_void, DEEP_BYTES, Advice::LinuxDontNeed) };
}

fn map_with(len: usize, access: ProtFlags) -> Result<*mut u8, Errno> {
    // SAFETY: a fresh private mapping at an address of the kernel's choice disturbs nobody.
    let mapped = unsafe { mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE | MapFlags::NORESERVE) };
    let start = mapped.map_err(|errno| Errno(errno.raw_os_error()))?;
    // Huge pages would make a touch of one byte cost two megabytes.
    // SAFETY: the range was mapped just now.
    let _ = unsafe { madvise(start, len, Advice::LinuxNoHugepage) };
    // What the program keeps out of its core dumps shall not be in them by way of ours.
    // SAFETY: as above.
    let _ = unsafe { madvise(start, len, Advice::LinuxDontDump) };
    Ok(start.cast())
}

/// A zeroed `T` in memory of the pager's own, without a detour over the stack.
///
/// # Safety
/// All zero bytes must be a valid `T`.
pub unsafe fn boxed_zeroed<T>() -> Box<T> {
    // SAFETY: says the caller.
    unsafe { Box::<T>::new_zeroed().assume_init() }
}

/// The allocator of the preloaded object: bytes from one mapped range, in order, never given back.
///
/// The pager and its store allocate while they are set up and never afterwards, so there is nothing to reuse; and the
/// program's own allocator must not be called, for its memory can be evicted.
pub struct SetupHeap {
    start: AtomicUsize,
    /// Bytes that may be touched.
    open: AtomicUsize,
    used: AtomicUsize,
}

const HEAP_BYTES: usize = 8 << 20;
/// Opened at once: a system may count what could be touched (vm.overcommit_memory=2).
const HEAP_STEP_BYTES: usize = 256 << 10;

impl SetupHeap {
    /// An allocator that maps its range at the first call.
    pub const fn new() -> Self {
        SetupHeap { start: AtomicUsize::new(0), open: AtomicUsize::new(0), used: AtomicUsize::new(0) }
    }

    /// Bytes handed out.
    pub fn used_bytes(&self) -> usize {
        self.used.load(Relaxed)
    }

    fn start(&self) -> Option<usize> {
        let start = self.start.load(Acquire);
        if start != 0 {
            return Some(start);
        }
        // The first call is made by the constructor, when there is one thread.
        let start = reserve(HEAP_BYTES).ok()? as usize;
        self.start.store(start, Release);
        Some(start)
    }

    /// Makes sure that the first `bytes` may be touched.
    fn ensure(&self, start: usize, bytes: usize) -> Option<()> {
        let open = self.open.load(Acquire);
        if bytes > open {
            let wanted = bytes.next_multiple_of(HEAP_STEP_BYTES);
            // SAFETY: a part of the range, and access to what is open already stays as it is.
            unsafe { set_access(start + open, wanted - open, true) }.ok()?;
            self.open.fetch_max(wanted, AcqRel);
        }
        Some(())
    }
}

impl Default for SetupHeap {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: every call hands out a range of its own, by one atomic addition, inside a mapping that is never unmapped.
unsafe impl GlobalAlloc for SetupHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(start) = self.start() else { return null_mut() };
        let room = layout.size() + layout.align();
        let offset = self.used.fetch_add(room, Relaxed);
        if offset + room > HEAP_BYTES || self.ensure(start, offset + room).is_none() {
            return null_mut();
        }
        (start + offset).next_multiple_of(layout.align()) as *mut u8
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as `alloc`; fresh mapped memory is zero.
        unsafe { self.alloc(layout) }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}
