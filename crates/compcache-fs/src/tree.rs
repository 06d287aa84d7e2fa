//! The tree: each request of the kernel's, done below.
//!
//! | module          | requests                                                              |
//! |-----------------|-----------------------------------------------------------------------|
//! | [`names`]       | what takes a place in the tree: look up, make, link, rename, remove   |
//! | [`attributes`]  | what is known of a file, and changing it                              |
//! | [`contents`]    | open, write, sync, allocate, copy, seek                               |
//! | [`reading`]     | read: from the cache, or below                                        |
//! | [`ahead`]       | read: ahead of who reads in order                                     |
//! | [`directories`] | open and list                                                         |
//! | [`xattrs`]      | extended attributes, ACLs among them                                  |
//! | [`control`]     | those of the mount's root that are ours: statistics and settings      |
//!
//! Nothing is decided here that the kernel decides: it checks permissions, keeps locks (flock, fcntl) among those who use the mount, serves
//! FIFOs, sockets and devices itself, and holds back what is beyond a limit. An operation is done below by the one system call that means it;
//! its errno is the answer. Requests of one file come from several threads at once; what orders them is the file below.

mod ahead;
mod attributes;
mod contents;
mod control;
mod directories;
mod names;
mod reading;
mod ring;
mod xattrs;

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use compcache_cache::Cache;
use compcache_fuse::{AfterThis, Linger, told};
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    TimeOrNow, WriteFlags,
};
use rustix::fs::fstatvfs;
use rustix::io::{self, Errno, dup};

use crate::astray::{About, Astray};
use crate::caller::Caller;
use crate::handles::{Handles, OpenDirectory, OpenFile};
use crate::inodes::Inodes;
use crate::lower::Lower;
use crate::mount::{Believed, Remembered};
use crate::node::Node;
use crate::passthrough::{Backings, Passthrough};
use crate::stamp::Stamp;
use crate::sys;
use crate::watch::Watches;
use ahead::Ahead;
pub use ahead::{Jobs, Run};
use attributes::{Changes, timespec};
pub use control::PASSED_OPENS;
use directories::Entry;
use names::Made;
use xattrs::Value;

/// The largest request to read or write, in bytes: what programs can ask for at a time. The kernel itself would read a whole file at once, for
/// finit_module(2) say, if it was not told so where the tree is mounted.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// How many requests of its own (read ahead, writing back) the kernel has under way at most.
const BACKGROUND_MAX: u16 = 64;

/// The same by io_uring, where each thread has memory for one: larger ones would save nothing.
pub const RING_BYTES_MAX: u32 = 256 << 10;

/// Either of the two.
pub fn request_bytes_max(by_rings: bool) -> u32 {
    if by_rings { RING_BYTES_MAX } else { REQUEST_BYTES_MAX }
}

/// The tree, as the library that speaks the protocol has it.
pub struct ByLibrary(pub Arc<Tree>);

pub struct Tree {
    inodes: Arc<Inodes>,
    files: Handles<OpenFile>,
    directories: Handles<OpenDirectory>,
    lower: Lower,
    pub backings: Backings,
    cache: Arc<Cache<Stamp>>,
    ahead: Ahead,
    /// Nobody changes files behind the mount.
    exclusive: bool,
    /// The kernel keeps what is written, and writes it back later; with `exclusive` alone.
    writes_back: bool,
    /// What the kernel may believe of what it was told of names and attributes.
    remembered: Remembered,
    /// The kernel.
    connection: OnceLock<OwnedFd>,
    /// Who was led to something since it believes what is so no more.
    astray: Astray,
    /// Of what a limit in per cent is a share.
    whole_bytes: fn() -> u64,
    /// If files are watched while they are open.
    watches: Option<Arc<Watches>>,
    /// What the kernel is to be told, by a thread that serves no requests.
    notices: Sender<Notice>,
    /// Whose requests wait for the end of a lease below.
    leased: Mutex<Vec<u32>>,
    /// Requests are to come by io_uring, or do.
    pub by_rings: AtomicBool,
    /// Else: for the threads that serve, once there is a connection.
    pub linger: OnceLock<Linger>,
}

/// What the kernel is to be told. It may wait for a request to be served before it listens.
#[derive(Debug)]
pub enum Notice {
    /// What it keeps of a file is not what the file has.
    Outdated(INodeNo),
    /// It knows too many files.
    Crowded,
    /// It knows a file by too many names.
    Superfluous(INodeNo),
    /// It is to forget a file, unless somebody has it mapped.
    ToForget(INodeNo),
}

/// What a tree is made of.
pub struct Parts {
    pub inodes: Arc<Inodes>,
    pub cache: Arc<Cache<Stamp>>,
    pub exclusive: bool,
    pub writes_back: bool,
    pub passthrough: Passthrough,
    pub remembered: Remembered,
    pub whole_bytes: fn() -> u64,
    pub watches: Option<Arc<Watches>>,
    pub notices: Sender<Notice>,
    pub by_rings: bool,
}

impl Tree {
    /// With what a thread that reads ahead is to serve.
    pub fn new(parts: Parts) -> (Tree, Jobs) {
        let Parts {
            inodes,
            cache,
            exclusive,
            writes_back,
            passthrough,
            remembered,
            whole_bytes,
            watches,
            notices,
            by_rings,
        } = parts;
        let (leased, by_rings, linger) = (Mutex::default(), by_rings.into(), OnceLock::new());
        let (files, directories, lower) = (Handles::new(), Handles::new(), Lower::new());
        let backings = Backings::new(passthrough);
        let (ahead, jobs) = Ahead::new();
        let tree = Tree {
            inodes,
            files,
            directories,
            lower,
            backings,
            cache,
            ahead,
            exclusive,
            writes_back,
            remembered,
            connection: OnceLock::new(),
            astray: Astray::default(),
            whole_bytes,
            watches,
            notices,
            leased,
            by_rings,
            linger,
        };
        (tree, jobs)
    }

    /// By which the kernel is told what it must hear at once.
    pub fn is_connected(&self, connection: &OwnedFd) -> io::Result<()> {
        let copy = dup(connection)?;
        self.connection.get_or_init(|| copy);
        self.backings.start(connection)
    }
}

/// As fuser wants it.
fn errno(error: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(told(error.raw_os_error()))
}

/// Answers with an error, or goes on with what there is instead.
macro_rules! answered {
    ($reply:ident, $result:expr) => {
        match $result {
            Ok(value) => value,
            Err(error) => return $reply.error(errno(error)),
        }
    };
}

fn empty(reply: ReplyEmpty, result: io::Result<()>) {
    answered!(reply, result);
    reply.ok();
}

fn attribute(reply: ReplyXattr, value: io::Result<Value>) {
    match answered!(reply, value) {
        Value::Length(length) => reply.size(length as u32),
        Value::Bytes(bytes) => reply.data(&bytes),
    }
}

impl Tree {
    /// The request that is served now takes microseconds, mostly. What is returned is kept until it is answered.
    fn soon_done(&self) -> Option<AfterThis<'_>> {
        self.linger.get().map(Linger::after_this)
    }

    /// The same of a request that waits for the file system below.
    fn done_later(&self) -> Option<AfterThis<'_>> {
        self.call_another();
        self.soon_done()
    }

    /// Has another thread serve what comes meanwhile.
    fn call_another(&self) {
        if let Some(linger) = self.linger.get() {
            linger.call_one();
        }
    }

    /// How long the kernel may believe what it is told of a file that it is given. What a file is like, only if it has looked that up: other answers it takes also if it was told to
    /// forget it meanwhile.
    fn believed(&self, node: &Node, kind: FileType, is_looked_up: bool) -> Believed {
        if self.remembered == Remembered::Directories && kind == FileType::Directory && !node.is_steady {
            return Remembered::Nothing.of(kind, true);
        }
        let believed = self.remembered.of(kind, !is_looked_up || !node.ways.may_be_believed());
        if !believed.name.is_zero() && self.inodes.folds_case(node) {
            // It may be removed under a name of another spelling, of which the kernel knows nothing.
            return Believed { name: Duration::ZERO, ..believed };
        }
        believed
    }

    /// The same of what a file is like, when it asks for that; it may be open.
    fn believed_asked(&self, known: &FileAttr) -> Duration {
        self.remembered.of(known.kind, true).attributes
    }

    fn tell(&self, notice: Notice) {
        // Nobody listens once it is unmounted.
        let _ = self.notices.send(notice);
    }

    fn entry(&self, reply: ReplyEntry, made: io::Result<Made>, is_looked_up: bool) {
        let made = answered!(reply, made);
        let (attributes, generation) = (made.attributes(), Generation(made.node.generation));
        let believed = self.believed(&made.node, attributes.kind, is_looked_up);
        reply.entry_with_ttls(&believed.attributes, &believed.name, &attributes, generation);
    }
}

impl Filesystem for ByLibrary {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DONT_MASK,
            InitFlags::FUSE_POSIX_ACL,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_MAX_PAGES,
        ];
        for flag in wanted {
            // What a kernel lacks of these it does in its own, older way.
            let _ = config.add_capabilities(flag);
        }
        if matches!(self.0.remembered, Remembered::Everything(time) if !time.is_zero()) {
            let _ = config.add_capabilities(InitFlags::FUSE_DO_READDIRPLUS | InitFlags::FUSE_READDIRPLUS_AUTO);
        }
        if self.0.writes_back {
            let _ = config.add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE);
            // Files that are written past the kernel's pages can be mapped all the same.
            let _ = config.add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);
        }
        self.0.backings.agree(config);
        let by_rings = &self.0.by_rings;
        if by_rings.load(Relaxed) && config.add_capabilities(InitFlags::FUSE_OVER_IO_URING).is_err() {
            by_rings.store(false, Relaxed);
            // There are no threads for that, nor is the mount's largest read the right one.
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        let _ = config.set_max_write(request_bytes_max(by_rings.load(Relaxed)));
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _then = self.0.soon_done();
        self.0.entry(reply, self.0.find(request.pid(), parent, name), true);
    }

    fn forget(&self, _: &Request, number: INodeNo, count: u64) {
        self.0.inodes.forget(number, count);
    }

    fn getattr(&self, _: &Request, number: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        let _then = self.0.soon_done();
        let attributes = answered!(reply, self.0.attributes_of(number, handle));
        reply.attr(&self.0.believed_asked(&attributes), &attributes);
    }

    fn setattr(
        &self,
        request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // To cut a long file takes its time.
        let _then = if size.is_some() { self.0.done_later() } else { self.0.soon_done() };
        let (accessed, modified) = (accessed.map(timespec), modified.map(timespec));
        let changes = Changes { mode, uid, gid, size_bytes: size, accessed, modified };
        if changes.are_by_path(handle) {
            answered!(reply, self.0.comes_to(request.pid(), Some(number), &[], About::Do));
        }
        let changed = answered!(reply, self.0.change(Caller::of(request), number, handle, &changes));
        reply.attr(&self.0.believed_asked(&changed), &changed);
    }

    fn readlink(&self, request: &Request, number: INodeNo, reply: ReplyData) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), Some(number), &[], About::GoOn));
        let target = answered!(reply, self.0.target_of(number));
        reply.data(&target);
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), None, &[parent], About::Do));
        self.0.entry(reply, self.0.make_node(Caller::of(request), parent, name, mode, umask, device), false);
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), None, &[parent], About::Do));
        self.0.entry(reply, self.0.make_directory(Caller::of(request), parent, name, mode, umask), false);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), None, &[parent], About::Do));
        empty(reply, self.0.remove(parent, name, false));
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), None, &[parent], About::Do));
        empty(reply, self.0.remove(parent, name, true));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), None, &[parent], About::Do));
        self.0.entry(reply, self.0.make_symlink(Caller::of(request), parent, name, target), false);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), None, &[parent, new_parent], About::Do));
        empty(reply, self.0.move_name(Caller::of(request), parent, name, new_parent, new_name, flags));
    }

    fn link(&self, request: &Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), Some(number), &[parent], About::Do));
        self.0.entry(reply, self.0.make_link(number, parent, name), false);
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), Some(number), &[], About::Do));
        let (handle, flags) = answered!(reply, self.0.open_file(Caller::of(request), number, flags));
        match self.0.backing_of(handle) {
            0 => reply.opened(handle, flags),
            backing => {
                let backing = sys::backing_to_open(&reply, backing);
                reply.opened_passthrough(handle, flags, &backing);
                backing.into_raw();
            }
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), None, &[parent], About::Do));
        let created = self.0.create_file(Caller::of(request), parent, name, mode, umask, OpenFlags(flags));
        let (made, handle, flags) = answered!(reply, created);
        let (attributes, generation) = (made.attributes(), Generation(made.node.generation));
        let believed = self.0.believed_asked(&attributes);
        match self.0.backing_of(handle) {
            0 => reply.created(&believed, &attributes, generation, handle, flags),
            backing => {
                let backing = sys::backing_to_create(&reply, backing);
                reply.created_passthrough(&believed, &attributes, generation, handle, flags, &backing);
                backing.into_raw();
            }
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _then = self.0.soon_done();
        self.0.read_file(handle, offset, size as usize, reply);
    }

    fn write(
        &self,
        request: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        how: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _then = self.0.done_later();
        let written = answered!(reply, self.0.write_file(Caller::of(request), handle, offset, data, how, flags));
        reply.written(written as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        let _then = self.0.soon_done();
        empty(reply, self.0.close_report(handle));
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let _then = self.0.soon_done();
        self.0.close_file(handle);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, data_alone: bool, reply: ReplyEmpty) {
        let _then = self.0.done_later();
        empty(reply, self.0.sync_file(handle, data_alone));
    }

    fn fallocate(
        &self,
        request: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let _then = self.0.done_later();
        empty(reply, self.0.allocate(Caller::of(request), handle, offset, length, mode));
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _: INodeNo,
        from: FileHandle,
        from_offset: u64,
        _: INodeNo,
        to: FileHandle,
        to_offset: u64,
        length: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let _then = self.0.done_later();
        let copied =
            answered!(reply, self.0.copy_range(Caller::of(request), (from, from_offset), (to, to_offset), length));
        reply.written(copied as u32);
    }

    fn lseek(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let _then = self.0.soon_done();
        let at = answered!(reply, self.0.seek_file(handle, offset, whence));
        reply.offset(at as i64);
    }

    fn opendir(&self, request: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let _then = self.0.soon_done();
        answered!(reply, self.0.comes_to(request.pid(), None, &[number], About::Do));
        let (handle, flags) = answered!(reply, self.0.open_directory(number));
        reply.opened(handle, flags);
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let _then = self.0.soon_done();
        let listed = self.0.list(handle, offset, |number, next, kind, name| !reply.add(number, next, kind, name));
        answered!(reply, listed);
        reply.ok();
    }

    fn readdirplus(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let _then = self.0.soon_done();
        let mut given = Ok(0);
        let listed = self.0.list_with_attributes(handle, offset, |entry, next, name| match entry {
            Entry::Known(shown, generation) => {
                given = given.map(|given| given + 1);
                !reply.add(shown.ino, next, name, &self.0.believed_asked(shown), shown, Generation(generation))
            }
            // The library has no names without a file. Mostly the kernel asks for what comes next without attributes.
            Entry::Named(_, _, error) => {
                given = if given == Ok(0) { Err(error) } else { given };
                false
            }
        });
        answered!(reply, listed);
        answered!(reply, given);
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        let _then = self.0.soon_done();
        drop(self.0.directories.remove(handle));
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, handle: FileHandle, data_alone: bool, reply: ReplyEmpty) {
        let _then = self.0.done_later();
        empty(reply, self.0.sync_directory(handle, data_alone));
    }

    fn statfs(&self, _: &Request, number: INodeNo, reply: ReplyStatfs) {
        let _then = self.0.soon_done();
        let found = self.0.inodes.get(number).and_then(fstatvfs);
        let stat = answered!(reply, found);
        reply.statfs(
            stat.f_blocks,
            stat.f_bfree,
            stat.f_bavail,
            stat.f_files,
            stat.f_ffree,
            stat.f_bsize as u32,
            stat.f_namemax as u32,
            stat.f_frsize as u32,
        );
    }

    fn setxattr(
        &self,
        request: &Request,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let _then = self.0.soon_done();
        empty(reply, self.0.set_attribute(Caller::of(request), number, name, value, flags));
    }

    fn getxattr(&self, request: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let _then = self.0.soon_done();
        attribute(reply, self.0.attribute(Caller::of(request), number, name, size));
    }

    fn listxattr(&self, request: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let _then = self.0.soon_done();
        attribute(reply, self.0.attribute_names(Caller::of(request), number, size));
    }

    fn removexattr(&self, request: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _then = self.0.soon_done();
        empty(reply, self.0.remove_attribute(Caller::of(request), number, name));
    }
}
