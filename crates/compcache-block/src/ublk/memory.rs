//! Memory that is there when it is needed: buffers, locked, and what the driver shares of a queue.
//!
//! Everything is mapped when it is made and unmapped when it is dropped. A buffer's pages are locked (mlock(2)): a request
//! that arrives because the system has no memory must not wait for memory to be read or written into.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::mem::size_of;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mlock, mmap, mmap_anonymous, munmap};
use rustix::param::page_size;

use super::uapi::{IoDesc, descriptors_offset};

/// A mapping of ours, of whole pages.
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `bytes` are what mmap(2) gave; whoever holds the mapping gave out no reference that outlives
        // it. Unmapping anything else would take memory from under the process.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Bytes at an address that is a multiple of a page, locked.
pub(super) struct Buffer {
    mapping: Mapping,
}

// SAFETY: the memory is the buffer's alone and is reached through `&mut` only.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Takes the memory now, all of it.
    pub fn new(bytes: usize) -> io::Result<Buffer> {
        let bytes = bytes.next_multiple_of(page_size());
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address the kernel chooses, touches no memory of ours.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE | MapFlags::POPULATE)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping { start, bytes };
        // SAFETY: the range is the mapping just made. Locking changes where its pages are, not what they hold.
        unsafe { mlock(start.as_ptr().cast(), bytes)? };
        Ok(Buffer { mapping })
    }

    pub fn get(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is readable and writable for `bytes` bytes, zeroed by the kernel, and ours as long as `self`
        // lives, which the slice borrows exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.start.as_ptr(), self.mapping.bytes) }
    }
}

/// The requests of a queue, one for each tag. The driver fills in a tag's before it completes its command, and leaves it
/// alone until the request is answered. The memory is the kernel's own, which is never swapped out.
pub(super) struct Descriptors {
    mapping: Mapping,
    depth: u16,
    /// It stays on the thread of its queue.
    on_its_thread: PhantomData<*const ()>,
}

impl Descriptors {
    /// Maps those of `queue` from the character device.
    pub fn map(device: BorrowedFd<'_>, queue: u16, depth: u16) -> io::Result<Descriptors> {
        let bytes = (usize::from(depth) * size_of::<IoDesc>()).next_multiple_of(page_size());
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let offset = descriptors_offset(queue, page_size());
        // SAFETY: a new mapping, at an address the kernel chooses, touches no memory of ours.
        let start = unsafe { mmap(ptr::null_mut(), bytes, ProtFlags::READ, flags, device, offset)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Descriptors { mapping: Mapping { start, bytes }, depth, on_its_thread: PhantomData })
    }

    /// The request of `tag`, whose command was completed.
    pub fn get(&self, tag: u16) -> IoDesc {
        assert!(tag < self.depth, "tag {tag} of a queue of {}", self.depth);
        // SAFETY: inside the mapping, by the assertion; page-aligned with 24 bytes each, so aligned. Any bytes are an `IoDesc`.
        // The driver does not write to it now (it completed the command, seen through the ring); were it to, the copy would
        // be of mixed requests, so it is volatile and made once.
        unsafe { self.mapping.start.as_ptr().cast::<IoDesc>().add(usize::from(tag)).read_volatile() }
    }
}
