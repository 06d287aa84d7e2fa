//! Files that look like one and are several: hard links of a lower layer of an overlayfs without an index.
//!
//! Each of its names is a file of its own there, since the first write to one copies that one up and leaves the others. Until then all show the same device and number. Hard
//! links of the upper layer, or with an index, show the same and are one file. Which it is, the kernel says by its watches: it has one for a file, however often it is asked.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags, add_watch, init, remove_watch};
use rustix::fs::{FileType, Statx};

use crate::kinds::Kind;

/// Whether others that look the same may be other files.
pub fn may_have(kind: Kind, stat: &Statx) -> bool {
    kind.is_overlayfs() && stat.stx_nlink > 1 && !FileType::from_raw_mode(stat.stx_mode.into()).is_dir()
}

/// Which of several descriptors are of one file. The watches are no longer there than a question; what they are had from is, since to close it takes the kernel milliseconds.
#[derive(Default)]
pub struct Comparison(Option<OwnedFd>);

impl Comparison {
    /// The first of `all` that is the same file as `one`. None where that is not to be known: who may not read a file may not watch it.
    pub fn find<T: AsFd>(&mut self, one: &OwnedFd, all: impl IntoIterator<Item = T>) -> Option<T> {
        let mut all = all.into_iter().peekable();
        all.peek()?;
        let watches = match &mut self.0 {
            Some(watches) => watches,
            none => none.insert(init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?),
        };
        let watch = |fd: BorrowedFd<'_>| {
            add_watch(&*watches, format!("/proc/self/fd/{}", fd.as_raw_fd()), WatchFlags::MOVE_SELF)
        };
        let unwatch = |watch| _ = remove_watch(&*watches, watch);
        let watched = watch(one.as_fd()).ok()?;
        let same = all.find(|other| {
            let Ok(other) = watch(other.as_fd()) else { return false };
            if other != watched {
                unwatch(other);
            }
            other == watched
        });
        unwatch(watched);
        // What they tell is that they have gone.
        let mut events = [MaybeUninit::uninit(); 4096];
        let mut told = Reader::new(&*watches, &mut events);
        while told.next().is_ok() {}
        same
    }
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
        let mut comparison = Comparison::default();
        let all = [open("c"), open("b"), open("a")];
        for _ in 0..3 {
            let found = comparison.find(&open("a"), &all).unwrap();
            assert_eq!(found.as_raw_fd(), all[1].as_raw_fd());
            assert!(comparison.find(&open("a"), &all[..1]).is_none());
        }
    }
}
