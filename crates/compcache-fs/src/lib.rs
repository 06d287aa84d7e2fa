//! A file tree over FUSE, whose pages are kept compressed in a pool: zcache, from user space.
//!
//! ```text
//!    programs            open, read, write, mmap ... under TARGET
//!       |
//!    the kernel          checks permissions, keeps hot pages uncompressed
//!       |  FUSE
//!    tree ------- cache  what is asked, done below by one system call; pages from the pool, if nothing has changed
//!       |
//!    the files below     SOURCE, on any file system
//! ```
//!
//! Every operation goes through to the tree at the source, and its answer is the answer (`tree.rs`). Pages that are read go to the pool behind the
//! answer, and come from there when the kernel has dropped its own (compcache-cache, `tree/reading.rs`). The source is held by a descriptor opened
//! before anything is mounted, so that it may be the directory that is mounted over. Several users are served if the mount is root's
//! (`caller.rs`).
//!
//! What is promised of it, and what FUSE does not allow, is in docs/semantics.md by number; why it is so, in docs/design/fs.md.
//!
//! # Lock order
//! An open file's position is held around the call that uses it, an open directory's listing around those that read it, an open file's second descriptor is opened by one thread while others wait, and
//! how a file is open is held while the kernel is given it and while what is kept of it is dropped; inside of them, and of
//! nothing else, one of these at a time: the table of inodes (also while a file is met that may have twins), the tables of handles, that of watches, who is astray, a node's name or stamp, the cache's index (inside of it, the
//! store's own), what was read ahead. That last one also inside of an open file's run of requests.

// Lifted for sys.rs, which makes the few calls that no safe function makes.
#![deny(unsafe_code)]

mod appends;
mod astray;
mod caller;
mod error;
mod handles;
mod helper;
mod inodes;
mod kept;
mod kinds;
mod lower;
mod modified;
mod mount;
mod mounted_on;
mod names;
mod node;
mod notify;
mod passthrough;
mod stamp;
#[allow(unsafe_code)]
mod sys;
mod tree;
mod twins;
mod watch;

pub use compcache_cache::CacheStats;
pub use error::FsError;
pub use mount::{Forbidden, Mount, MountOptions, MountedAt, Remembered, has_dead_server, is_dead, unmount};
pub use passthrough::Passthrough;
pub use tree::PASSED_OPENS;
