//! The tree: each request of the kernel's, done below.
//!
//! | module          | requests                                                              |
//! |-----------------|-----------------------------------------------------------------------|
//! | [`names`]       | what takes a place in the tree: look up, make, link, rename, remove   |
//! | [`attributes`]  | what is known of a file, and changing it                              |
//! | [`contents`]    | open, write, sync, allocate, copy, seek                               |
//! | [`reading`]     | read: from the cache, or below                                        |
//! | [`directories`] | open and list                                                         |
//! | [`xattrs`]      | extended attributes, ACLs among them                                  |
//! | [`control`]     | those of the mount's root that are ours: statistics and settings      |
//!
//! Nothing is decided here that the kernel decides: it checks permissions, keeps locks (flock, fcntl) among those who use the mount, serves
//! FIFOs, sockets and devices itself, and holds back what is beyond a limit. An operation is done below by the one system call that means it;
//! its errno is the answer. Requests of one file come from several threads at once; what orders them is the file below.

mod attributes;
mod contents;
mod control;
mod directories;
mod names;
mod reading;
mod xattrs;

use std::ffi::OsStr;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use compcache_cache::Cache;
use compcache_fuse::{AfterThis, Linger};
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, Generation, INodeNo, InitFlags, KernelConfig, LockOwner,
    OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::fstatvfs;
use rustix::io::{self, Errno};

use crate::handles::{Handles, OpenDirectory, OpenFile};
use crate::inodes::Inodes;
use crate::lower::Lower;
use crate::stamp::Stamp;
use crate::watch::Watches;
use attributes::Changes;
use control::Control;
use names::Made;

/// The largest request to write, in bytes: what the kernel gives at most.
const WRITE_BYTES_MAX: u32 = 1 << 20;
/// How many requests of its own (read ahead, writing back) the kernel has under way at most.
const BACKGROUND_MAX: u16 = 64;

pub struct Tree {
    inodes: Arc<Inodes>,
    files: Handles<OpenFile>,
    directories: Handles<OpenDirectory>,
    lower: Lower,
    cache: Arc<Cache<Stamp>>,
    /// Nobody changes files behind the mount.
    exclusive: bool,
    /// How long the kernel may believe what it was told of names and attributes.
    remembered: Duration,
    /// If files are watched while they are open.
    watches: Option<Arc<Watches>>,
    /// What the kernel is to be told, by a thread that serves no requests.
    notices: Sender<Notice>,
    linger: Arc<OnceLock<Linger>>,
}

/// What the kernel is to be told. It may wait for a request to be served before it listens.
#[derive(Debug)]
pub enum Notice {
    /// What it keeps of a file is not what the file has.
    Outdated(INodeNo),
    /// It knows too many files.
    Crowded,
}

/// What a tree is made of.
pub struct Parts {
    pub inodes: Arc<Inodes>,
    pub cache: Arc<Cache<Stamp>>,
    pub exclusive: bool,
    pub remembered: Duration,
    pub watches: Option<Arc<Watches>>,
    pub notices: Sender<Notice>,
    /// For the threads that serve; there once the connection is.
    pub linger: Arc<OnceLock<Linger>>,
}

impl Tree {
    pub fn new(parts: Parts) -> Tree {
        let Parts { inodes, cache, exclusive, remembered, watches, notices, linger } = parts;
        let (files, directories, lower) = (Handles::new(), Handles::new(), Lower::new());
        Tree { inodes, files, directories, lower, cache, exclusive, remembered, watches, notices, linger }
    }
}

/// As fuser wants it.
fn errno(error: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(error.raw_os_error())
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

    fn tell(&self, notice: Notice) {
        // Nobody listens once it is unmounted.
        let _ = self.notices.send(notice);
    }

    fn entry(&self, reply: ReplyEntry, made: io::Result<Made>) {
        let made = answered!(reply, made);
        reply.entry(&self.remembered, &made.attributes(), Generation(made.generation()));
    }
}

impl Filesystem for Tree {
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
        if !self.remembered.is_zero() {
            let _ = config.add_capabilities(InitFlags::FUSE_DO_READDIRPLUS | InitFlags::FUSE_READDIRPLUS_AUTO);
        }
        let _ = config.set_max_write(WRITE_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _then = self.soon_done();
        self.entry(reply, self.find(parent, name));
    }

    fn forget(&self, _: &Request, number: INodeNo, count: u64) {
        self.inodes.forget(number, count);
    }

    fn getattr(&self, _: &Request, number: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        let _then = self.soon_done();
        let attributes = answered!(reply, self.attributes_of(number, handle));
        reply.attr(&self.remembered, &attributes);
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
        let _then = self.done_later();
        let changes = Changes { mode, uid, gid, size_bytes: size, accessed, modified };
        let changed = answered!(reply, self.change(request, number, handle, &changes));
        reply.attr(&self.remembered, &changed);
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        let _then = self.soon_done();
        let target = answered!(reply, self.target_of(number));
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
        let _then = self.soon_done();
        self.entry(reply, self.make_node(request, parent, name, mode, umask, device));
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let _then = self.soon_done();
        self.entry(reply, self.make_directory(request, parent, name, mode, umask));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _then = self.soon_done();
        empty(reply, self.remove(parent, name, false));
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _then = self.soon_done();
        empty(reply, self.remove(parent, name, true));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let _then = self.soon_done();
        self.entry(reply, self.make_symlink(request, parent, name, target));
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _then = self.soon_done();
        empty(reply, self.move_name(parent, name, new_parent, new_name, flags));
    }

    fn link(&self, request: &Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _then = self.soon_done();
        self.entry(reply, self.make_link(request, number, parent, name));
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _then = self.soon_done();
        let (handle, flags) = answered!(reply, self.open_file(number, flags));
        reply.opened(handle, flags);
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
        let _then = self.soon_done();
        let created = self.create_file(request, parent, name, mode, umask, OpenFlags(flags));
        let (made, handle, flags) = answered!(reply, created);
        reply.created(&self.remembered, &made.attributes(), Generation(made.generation()), handle, flags);
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
        let _then = self.soon_done();
        self.read_file(handle, offset, size as usize, reply);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        how: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _then = self.done_later();
        let written = answered!(reply, self.write_file(handle, offset, data, how, flags));
        reply.written(written as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        let _then = self.soon_done();
        empty(reply, self.close_report(handle));
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
        let _then = self.soon_done();
        let open = self.files.remove(handle).filter(|open| open.watched);
        if let (Some(open), Some(watches)) = (open, &self.watches) {
            watches.end(&open.node);
        }
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, data_alone: bool, reply: ReplyEmpty) {
        let _then = self.done_later();
        empty(reply, self.sync_file(handle, data_alone));
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
        let _then = self.done_later();
        empty(reply, self.allocate(request, handle, offset, length, mode));
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
        let _then = self.done_later();
        let copied = answered!(reply, self.copy_range(request, (from, from_offset), (to, to_offset), length));
        reply.written(copied as u32);
    }

    fn lseek(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let _then = self.soon_done();
        let at = answered!(reply, self.seek_file(handle, offset, whence));
        reply.offset(at as i64);
    }

    fn opendir(&self, _: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let _then = self.soon_done();
        let (handle, flags) = answered!(reply, self.open_directory(number));
        reply.opened(handle, flags);
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, reply: ReplyDirectory) {
        let _then = self.soon_done();
        self.list(handle, offset, reply);
    }

    fn readdirplus(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, reply: ReplyDirectoryPlus) {
        let _then = self.soon_done();
        self.list_with_attributes(handle, offset, reply);
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        let _then = self.soon_done();
        drop(self.directories.remove(handle));
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, handle: FileHandle, data_alone: bool, reply: ReplyEmpty) {
        let _then = self.done_later();
        empty(reply, self.sync_directory(handle, data_alone));
    }

    fn statfs(&self, _: &Request, number: INodeNo, reply: ReplyStatfs) {
        let _then = self.soon_done();
        let found = self.inodes.get(number).and_then(fstatvfs);
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
        let _then = self.soon_done();
        if let Some(control) = Control::named(number, name) {
            return empty(reply, self.control(request, control, value));
        }
        empty(reply, self.set_attribute(number, name, value, flags));
    }

    fn getxattr(&self, _: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let _then = self.soon_done();
        if Control::named(number, name).is_some() {
            return xattrs::answer_with(size, reply, self.statistics().as_bytes());
        }
        self.attribute(number, name, size, reply);
    }

    fn listxattr(&self, request: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let _then = self.soon_done();
        self.attribute_names(request, number, size, reply);
    }

    fn removexattr(&self, _: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _then = self.soon_done();
        empty(reply, self.remove_attribute(number, name));
    }
}
