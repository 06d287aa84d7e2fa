//! The system calls that only this module may make.

use std::os::fd::{AsFd, IntoRawFd, OwnedFd};

use rustix::io;
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
