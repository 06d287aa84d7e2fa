//! A file that the kernel knows.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Mutex, PoisonError};

use compcache_cache::FileId;
use fuser::INodeNo;
use rustix::fs::{FileType, StatVfsMountFlags, Statx};
use rustix::io;

use crate::kept::Kept;
use crate::modified::Modified;
use crate::names::Names;
use crate::passthrough::Ways;
use crate::stamp::{generation_of, id_of, look, mount_of, stamp_of};

/// A file that the kernel knows.
pub struct Node {
    /// What the kernel calls it.
    pub number: INodeNo,
    pub id: FileId,
    /// Under what its pages are kept: the same, unless others that look so may have it as well, of which none is to be given this one's.
    pub pages: FileId,
    /// Tells the file from one that had its number before; the same for as long as the kernel knows the file. What it comes from may change: on
    /// overlayfs, when a file is written to for the first time.
    pub generation: u64,
    /// Which mount it was found on, and what that forbids and the kernel above does not: nothing on the root's, which ours is like.
    pub mount: u64,
    pub limits: StatVfsMountFlags,
    /// Whether its file system calls a directory the same whenever it is looked up, as far as is known.
    pub is_steady: bool,
    /// Opened with O_PATH: good for what takes a place in the tree, not for contents.
    pub fd: OwnedFd,
    /// Where it was found.
    pub names: Names,
    /// What the kernel has of it.
    pub kept: Mutex<Kept>,
    /// Whether the kernel may have whole pages of it: some were read, or written, since it was last to forget them.
    pub has_pages: AtomicBool,
    /// It has lost set-user-ID or set-group-ID, and the kernel was not told.
    pub has_lost_set_id: AtomicBool,
    /// Where the kernel writes back: the last time that it has given the file.
    pub modified: Modified,
    /// How it is open.
    pub ways: Ways,
    /// Handles by which something may be stored through mappings that the kernel has not written yet ([`crate::handles::Stores`]).
    pub stores: AtomicUsize,
}

impl Node {
    pub fn new(number: INodeNo, stat: &Statx, limits: StatVfsMountFlags, is_steady: bool, fd: OwnedFd) -> Node {
        let (id, generation, mount) = (id_of(stat), generation_of(stat), mount_of(stat));
        let names = Names::new(FileType::from_raw_mode(stat.stx_mode.into()).is_dir());
        Node {
            number,
            id,
            pages: id,
            generation,
            mount,
            limits,
            is_steady,
            fd,
            names,
            kept: Mutex::default(),
            has_pages: AtomicBool::new(false),
            has_lost_set_id: AtomicBool::new(false),
            modified: Modified::default(),
            ways: Ways::default(),
            stores: AtomicUsize::new(0),
        }
    }

    /// The kernel itself has changed the file, which is this now.
    pub fn follow(&self, stat: &Statx) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).follow(stamp_of(stat));
    }

    /// The kernel is given it there. The root, where it is mounted below itself, is where it is all the same; and of a directory that may be another each time nothing is believed.
    pub fn is_found(&self, parent: &Node, name: &OsStr) {
        let is_believed = self.is_steady || matches!(self.names, Names::OfFile(_));
        if self.number != INodeNo::ROOT && is_believed {
            self.names.add(parent.number, name);
        }
    }

    /// What is known of the file now.
    pub fn look(&self) -> io::Result<Statx> {
        look(&self.fd)
    }

    /// The file's name in the directory of [`Inodes::reach`].
    pub fn name(&self) -> String {
        self.fd.as_raw_fd().to_string()
    }

    /// A path by which calls that take no descriptor reach the file, and no other.
    pub fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd())
    }
}

impl AsFd for Node {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
