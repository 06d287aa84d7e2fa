//! The calls that only this module may make, most of them of the system.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};

use fuser::{BackingId, ReplyCreate, ReplyOpen};
use rustix::io;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Gives this thread a working directory, root and umask of its own, with the same values.
pub fn own_umask() -> io::Result<()> {
    // SAFETY: no memory and no descriptor is concerned. Only threads of fuser's come here, and they use none of the three but the
    // umask. A mistake could at most give a file wrong permission bits.
    unsafe { unshare_unsafe(UnshareFlags::FS) }
}

/// What the file system below has to say when a writer lets go of a file, as file servers do of a full disk.
pub fn close_report(file: impl AsFd) -> io::Result<()> {
    let copy: OwnedFd = io::dup(file)?;
    // SAFETY: the number is a fresh duplicate's, given up by its owner in this very expression; nobody else closes or uses it. A mistake
    // could close a descriptor that another thread has just been given.
    unsafe { io::try_close(copy.into_raw_fd()) }
}

/// `FUSE_DEV_IOC_BACKING_CLOSE` of `<linux/fuse.h>`.
const CLOSE_BACKING: Opcode = opcode::write::<u32>(229, 2);

/// Takes a backing file from the kernel that it was given by this connection.
pub fn close_backing(connection: impl AsFd, backing: u32) -> io::Result<()> {
    // SAFETY: the kernel reads one number of four bytes, as the request's code says; whatever it is, only the kernel's own table is concerned.
    unsafe { ioctl(connection, Setter::<CLOSE_BACKING, u32>::new(backing)) }
}

/// A backing file of this number, as the library has it, for an answer; it is to be taken back out of that afterwards.
pub fn backing_to_open(reply: &ReplyOpen, backing: u32) -> BackingId {
    // SAFETY: the number is only sent, and closed if it is not taken back: then the kernel refuses who joins those who have the file open.
    unsafe { reply.wrap_backing(backing) }
}

/// The same for a file that is made.
pub fn backing_to_create(reply: &ReplyCreate, backing: u32) -> BackingId {
    // SAFETY: as above.
    unsafe { reply.wrap_backing(backing) }
}

/// cachestat(2) of Linux 6.5; the number is the same everywhere.
const SYS_CACHESTAT: libc::c_long = 451;

/// Whether the kernel has pages of this range of a file in its page cache, or may have: before Linux 6.5, and of a file that is neither ours nor
/// may be written by us, it does not say.
pub fn has_cached(file: impl AsFd, offset_bytes: u64, length_bytes: u64) -> bool {
    // Where from and how long; then how many pages there are, dirty ones, and three more numbers.
    let (range, mut counts) = ([offset_bytes, length_bytes], [0u64; 5]);
    // SAFETY: the kernel reads two numbers, which have the layout of its struct cachestat_range, and writes five, those of its struct cachestat;
    // both live until it returns. A wrong number of a call, on some kernel, could do anything to what these name; this one is either cachestat or none.
    let done =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_fd().as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0) };
    done != 0 || counts[0] != 0
}
