//! Open files and directories, by the handle the kernel was given for each.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use fuser::{FileHandle, FileType};
use rustix::io::{self, Errno};

use crate::appends::Appends;
use crate::caller::Caller;
use crate::node::Node;
use crate::passthrough::Way;
use crate::tree::Run;

/// An open file.
pub struct OpenFile {
    pub fd: OwnedFd,
    pub direct: Direct,
    pub node: Arc<Node>,
    pub way: Way,
    /// Opened for writing.
    pub writes: bool,
    /// Who has opened it.
    pub opener: Caller,
    /// Opened for that below, too: whatever is written goes to the end.
    pub only_appends: bool,
    /// Where something can be stored through mappings of it.
    #[expect(dead_code, reason = "it ends with the handle")]
    pub stores: Option<Stores>,
    /// The kernel keeps nothing that is read or written by it, though it writes back what it keeps of others.
    pub is_past_pages: bool,
    /// Changes behind the mount are noticed meanwhile.
    pub watched: bool,
    /// To be [confirmed](crate::kept) with the first request, or 0.
    pub unconfirmed: AtomicU64,
    /// Who may use the descriptor's position.
    pub appends: Appends,
    /// What was asked for in order.
    pub run: Mutex<Run>,
}

impl OpenFile {
    /// The kernel asks for something by this handle: it has taken note of how it was given it.
    fn is_asked(&self) {
        if self.unconfirmed.load(Relaxed) != 0 {
            let number = self.unconfirmed.swap(0, Relaxed);
            self.node.kept.lock().unwrap_or_else(PoisonError::into_inner).confirm(number);
        }
    }
}

/// While it is there a file is served by a handle that can be mapped to be stored to: the kernel may have stores that the file below has not.
pub struct Stores(Arc<Node>);

impl Stores {
    pub fn new(node: &Arc<Node>) -> Stores {
        node.stores.fetch_add(1, SeqCst);
        Stores(node.clone())
    }
}

impl Drop for Stores {
    fn drop(&mut self) {
        self.0.stores.fetch_sub(1, SeqCst);
    }
}

/// The same file for direct reads, opened when one is wanted for the first time.
#[derive(Default)]
pub struct Direct {
    fd: OnceLock<Option<OwnedFd>>,
    is_given_up: AtomicBool,
}

impl Direct {
    /// The descriptor; `None` where there are no direct reads.
    pub fn get(&self, open: impl FnOnce() -> Option<OwnedFd>) -> Option<&OwnedFd> {
        self.fd.get_or_init(open).as_ref().filter(|_| !self.is_given_up.load(Relaxed))
    }

    /// One failed: there will be no more.
    pub fn give_up(&self) {
        self.is_given_up.store(true, Relaxed);
    }
}

/// A name in a directory, as it was read.
pub struct Listed {
    pub name: OsString,
    pub ino: u64,
    /// `None` where the file system below does not say.
    pub kind: Option<FileType>,
    /// Where the directory goes on after it.
    pub next: u64,
}

/// How far an open directory has been read.
#[derive(Default)]
pub struct Listing {
    /// Read, and not yet all given to the kernel.
    pub batch: Vec<Listed>,
    /// The first of `batch` that was not given.
    pub given: usize,
    /// Where that one is.
    pub at: u64,
}

/// An open directory.
pub struct OpenDirectory {
    pub fd: OwnedFd,
    pub node: Arc<Node>,
    pub listing: Mutex<Listing>,
}

/// What is open.
pub struct Handles<T> {
    next: AtomicU64,
    open: RwLock<HashMap<u64, Arc<T>>>,
}

impl<T> Handles<T> {
    pub fn new() -> Handles<T> {
        Handles { next: AtomicU64::new(1), open: RwLock::default() }
    }

    pub fn add(&self, opened: T) -> FileHandle {
        let handle = self.next.fetch_add(1, Relaxed);
        self.open.write().unwrap_or_else(PoisonError::into_inner).insert(handle, Arc::new(opened));
        FileHandle(handle)
    }

    pub fn get(&self, handle: FileHandle) -> io::Result<Arc<T>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).get(&handle.0).cloned().ok_or(Errno::BADF)
    }

    /// How many are open.
    pub fn count(&self) -> usize {
        self.open.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Takes it out; it is closed when the last who uses it has done so.
    pub fn remove(&self, handle: FileHandle) -> Option<Arc<T>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&handle.0)
    }
}

impl Handles<OpenFile> {
    /// The file of a request other than to close it, which comes also if the kernel could not do anything with the handle.
    pub fn asked(&self, handle: FileHandle) -> io::Result<Arc<OpenFile>> {
        self.get(handle).inspect(|open| open.is_asked())
    }
}
