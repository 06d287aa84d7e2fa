//! The file system: a directory with one file, which is the device.
//!
//! Its file is opened for direct I/O, with writes in parallel, so that the kernel keeps none of it and holds no lock
//! around a request; nothing is answered from what the kernel remembers but where the file ends, which it is told when that changes
//! (`LoopDevice::resized`). The size cannot be changed through the file. Nothing else can be done in this file system: whoever tries gets an
//! error (ENOSYS or EPERM).

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{io, iter};

use compcache_fuse::Linger;
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek,
    ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use linux_raw_sys::general::{FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE, SEEK_DATA, SEEK_HOLE};

use super::Largest;
use super::lanes::{Lanes, Own};
use super::waiting::{EmptyRequest, Job, Seek, Waiters, done, errno};
use crate::device::{BLOCK_BYTES, Manner, Outcome, Zeroes};
use crate::error::DeviceError;

const ROOT: INodeNo = INodeNo(1);
const FILE: INodeNo = INodeNo(2);

/// The mode of the file. It can be set to what it is.
pub(super) const FILE_MODE: u16 = 0o600;

/// Nothing may be remembered: the size changes, and a file system of one file is asked seldom.
const REMEMBERED: Duration = Duration::ZERO;

/// How many requests the kernel may have given us without being answered. A loop device has at most 128.
const IN_FLIGHT_MAX: u16 = 128;

/// Reads and writes of more take as long as it takes to wake another thread.
const LONG_READ_BYTES: usize = 32 << 10;
const LONG_WRITE_BYTES: usize = 16 << 10;

pub(super) struct OneFile {
    /// What the file is called.
    pub name: String,
    pub lanes: Lanes,
    pub largest: Largest,
    pub waiting: Arc<Waiters>,
    pub linger: Linger,
    pub uid: u32,
    pub gid: u32,
}

impl OneFile {
    fn attr(&self, inode: INodeNo) -> FileAttr {
        let is_file = inode == FILE;
        let size = if is_file { self.lanes.device().size_bytes() } else { 0 };
        FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_file { FileType::RegularFile } else { FileType::Directory },
            perm: if is_file { FILE_MODE } else { 0o700 },
            nlink: if is_file { 1 } else { 2 },
            uid: self.uid,
            gid: self.gid,
            rdev: 0,
            blksize: BLOCK_BYTES as u32,
            flags: 0,
        }
    }

    /// Calls `serve` with what this thread owns, or with why it owns nothing; then looks for the next request a while. If
    /// it takes long, others look meanwhile.
    fn with_own<T>(&self, takes_long: bool, serve: impl FnOnce(Result<&mut Own, DeviceError>) -> T) -> T {
        if takes_long {
            self.linger.call_one();
        }
        let _then = self.linger.after_this();
        self.lanes.with_own(serve)
    }

    /// Has a request done where waiting is allowed: perhaps by this very thread.
    fn pass_on(&self, own: &mut Own, job: Job) {
        self.linger.call_one();
        self.waiting.pass_on(own, job);
    }

    /// Serves a request that is answered with nothing.
    fn serve_empty(&self, request: EmptyRequest, reply: ReplyEmpty) {
        self.with_own(true, |own| match own {
            Ok(own) => match request.serve(&mut *own.lane, Manner::AT_ONCE) {
                Ok(Outcome::Done(())) => reply.ok(),
                Ok(Outcome::MustWait) => self.pass_on(own, Job::Empty { request, reply }),
                Err(error) => reply.error(errno(&error)),
            },
            Err(error) => reply.error(errno(&error)),
        });
    }
}

impl Filesystem for OneFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // What a kernel lacks of these it does without: requests then come one after the other.
        for wanted in [InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_ASYNC_READ] {
            let _ = config.add_capabilities(wanted);
        }
        let _ = config.set_max_write(self.largest.write_bytes as u32);
        // What is read in one request is limited by the larger of the two; a kernel that offers less than this stays at its own.
        let _ = config.set_max_readahead(self.largest.read_bytes as u32);
        let _ = config.set_max_background(IN_FLIGHT_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == ROOT && *name == *self.name {
            reply.entry(&REMEMBERED, &self.attr(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&REMEMBERED, &self.attr(inode));
    }

    /// Changes nothing. It is asked for its answer, from which the kernel takes the size in any case.
    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let is_same = mode.is_some_and(|mode| mode & 0o7777 == FILE_MODE.into());
        let others = uid.is_some() || gid.is_some() || size.is_some() || accessed.is_some() || modified.is_some();
        if inode == FILE && is_same && !others {
            reply.attr(&REMEMBERED, &self.attr(inode));
        } else {
            reply.error(Errno::EPERM);
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES | FopenFlags::FOPEN_NOFLUSH;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset_bytes: u64,
        length_bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let length_bytes = clip(offset_bytes, length_bytes.into(), self.lanes.device().size_bytes()) as usize;
        if length_bytes == 0 {
            return reply.data(&[]);
        }
        self.with_own(length_bytes > LONG_READ_BYTES, |own| {
            let own = match own {
                Ok(own) => own,
                Err(error) => return reply.error(errno(&error)),
            };
            let (lane, into) = own.lane_and_buffer(length_bytes);
            match lane.read(offset_bytes, into, Manner::AT_ONCE) {
                Ok(Outcome::Done(())) => reply.data(into),
                Ok(Outcome::MustWait) => self.pass_on(own, Job::Read { offset_bytes, length_bytes, reply }),
                Err(error) => reply.error(errno(&error)),
            }
        });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset_bytes: u64,
        from: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.with_own(from.len() > LONG_WRITE_BYTES, |own| {
            let own = match own {
                Ok(own) => own,
                Err(error) => return reply.error(errno(&error)),
            };
            let mut outcome = own.lane.write(offset_bytes, from, Manner::AT_ONCE);
            if outcome == Ok(Outcome::MustWait) {
                match self.waiting.copy(from) {
                    Some(from) => return self.pass_on(own, Job::Write { offset_bytes, from, reply }),
                    None => {
                        self.linger.call_one();
                        outcome = own.lane.write(offset_bytes, from, Manner::WAITING);
                    }
                }
            }
            match done(outcome) {
                Ok(()) => reply.written(from.len() as u32),
                Err(error) => reply.error(error),
            }
        });
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        if !self.lanes.device().needs_flush() {
            // The kernel takes it as success, now and every later time without asking.
            return reply.error(Errno::ENOSYS);
        }
        self.serve_empty(EmptyRequest::Flush, reply);
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset_bytes: u64,
        length_bytes: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        match freeing(offset_bytes, length_bytes, mode, self.lanes.device().size_bytes()) {
            Some(request) => self.serve_empty(request, reply),
            None => reply.error(Errno::EOPNOTSUPP),
        }
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let for_hole = match whence as u32 {
            SEEK_HOLE => true,
            SEEK_DATA => false,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(offset_bytes) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        let seek = Seek { offset_bytes, size_bytes: self.lanes.device().size_bytes(), for_hole };
        self.with_own(true, |own| match own {
            Ok(own) => match seek.serve(&mut *own.lane, Manner::AT_ONCE) {
                Ok(Outcome::Done(Some(at))) => reply.offset(at as i64),
                Ok(Outcome::Done(None)) => reply.error(Errno::ENXIO),
                Ok(Outcome::MustWait) => self.pass_on(own, Job::Seek { seek, reply }),
                Err(error) => reply.error(errno(&error)),
            },
            Err(error) => reply.error(errno(&error)),
        });
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        // The loop device discards in units of this block size.
        let block = BLOCK_BYTES as u32;
        reply.statfs(self.lanes.device().size_bytes() / BLOCK_BYTES as u64, 0, 0, 1, 0, block, 255, block);
    }

    fn readdir(&self, _: &Request, inode: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        if inode != ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let names = [(ROOT, FileType::Directory, "."), (ROOT, FileType::Directory, "..")];
        let names = names.into_iter().chain(iter::once((FILE, FileType::RegularFile, &*self.name)));
        for (at, (inode, kind, name)) in names.enumerate().skip(offset as usize) {
            if reply.add(inode, at as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

/// How much of a range lies before the end.
fn clip(offset_bytes: u64, length_bytes: u64, size_bytes: u64) -> u64 {
    length_bytes.min(size_bytes.saturating_sub(offset_bytes))
}

/// What fallocate(2) asks for, if it is one of the two kinds a disk can do.
///
/// The loop device punches holes both to discard and to write zeroes that may be holes, so a hole must read as zeroes to
/// its last byte, edges too.
fn freeing(offset_bytes: u64, length_bytes: u64, mode: i32, size_bytes: u64) -> Option<EmptyRequest> {
    let mode = mode as u32;
    let keeps_size = mode & FALLOC_FL_KEEP_SIZE != 0;
    let length_bytes = if keeps_size { clip(offset_bytes, length_bytes, size_bytes) } else { length_bytes };
    let block = BLOCK_BYTES as u64;
    let whole_blocks = offset_bytes.is_multiple_of(block) && length_bytes.is_multiple_of(block);
    let zeroes = |zeroes| EmptyRequest::WriteZeroes { offset_bytes, length_bytes, zeroes };
    match (mode & !FALLOC_FL_KEEP_SIZE, keeps_size) {
        (FALLOC_FL_PUNCH_HOLE, true) if whole_blocks => Some(EmptyRequest::Discard { offset_bytes, length_bytes }),
        (FALLOC_FL_PUNCH_HOLE, true) => Some(zeroes(Zeroes::MayBeHoles)),
        (FALLOC_FL_ZERO_RANGE, _) => Some(zeroes(Zeroes::AreData)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PUNCH: i32 = (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE) as i32;

    #[test]
    fn a_hole_of_whole_blocks_is_a_discard_and_any_other_is_zeroes() {
        let is_discard = |offset, length| match freeing(offset, length, PUNCH, 1 << 20) {
            Some(EmptyRequest::Discard { .. }) => true,
            Some(EmptyRequest::WriteZeroes { zeroes: Zeroes::MayBeHoles, .. }) => false,
            _ => panic!("neither"),
        };
        assert!(is_discard(4096, 8192));
        assert!(!is_discard(4096, 8000));
        assert!(!is_discard(4000, 4096));
    }

    #[test]
    fn a_hole_ends_where_the_disk_ends_and_zeroes_that_would_grow_it_do_not() {
        let hole = freeing(8192, 1 << 40, PUNCH, 16384);
        assert!(matches!(hole, Some(EmptyRequest::Discard { offset_bytes: 8192, length_bytes: 8192 })));
        let zeroes = freeing(8192, 1 << 40, FALLOC_FL_ZERO_RANGE as i32, 16384);
        assert!(matches!(zeroes, Some(EmptyRequest::WriteZeroes { length_bytes, .. }) if length_bytes == 1 << 40));
        assert!(freeing(0, 4096, 0, 16384).is_none(), "plain allocation means nothing here");
    }
}
