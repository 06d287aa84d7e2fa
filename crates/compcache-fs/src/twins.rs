//! Files that look like one and are several: hard links of a lower layer of an overlayfs without an index.
//!
//! Each of its names is a file of its own there, since the first write to one copies that one up and leaves the others. Until then all show the same device and number. Hard
//! links of the upper layer, or with an index, show the same and are one file. Which it is, the kernel says by its watches: it has one for a file, however often it is asked.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
use rustix::fs::{FileType, Statx};

use crate::kinds::Kind;

/// Whether others that look the same may be other files.
pub fn may_have(kind: Kind, stat: &Statx) -> bool {
    kind.is_overlayfs() && stat.stx_nlink > 1 && !FileType::from_raw_mode(stat.stx_mode.into()).is_dir()
}

/// Whether these are descriptors of one file. No where that is not to be known: who may not read it may not watch it.
pub fn are_one(one: &OwnedFd, other: &OwnedFd) -> bool {
    let Ok(watches) = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK) else { return false };
    let watch = |fd: &OwnedFd| add_watch(&watches, format!("/proc/self/fd/{}", fd.as_raw_fd()), WatchFlags::MOVE_SELF);
    matches!((watch(one), watch(other)), (Ok(one), Ok(other)) if one == other)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, Mode, OFlags, openat};

    use super::*;

    #[test]
    fn links_are_one_file_and_copies_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("a"), "x").unwrap();
        std::fs::hard_link(path("a"), path("b")).unwrap();
        std::fs::copy(path("a"), path("c")).unwrap();
        let open = |name: &str| openat(CWD, path(name), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        assert!(are_one(&open("a"), &open("b")) && !are_one(&open("a"), &open("c")));
    }
}
