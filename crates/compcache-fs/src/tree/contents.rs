//! What is in files.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{available_parallelism, sleep};
use std::time::Duration;

use compcache_cache::FileId;
use compcache_store::Page;
use fuser::{FileHandle, FopenFlags, INodeNo, OpenFlags, WriteFlags};
use rustix::fs::{
    FallocateFlags, FileType, Mode, OFlags, SeekFrom, StatVfsMountFlags, Timespec, copy_file_range, fallocate,
    fcntl_getfl, fcntl_setfl, fdatasync, fsync, openat, seek,
};
use rustix::io::{self, Errno};

use super::names::Made;
use super::{Notice, Tree};
use crate::appends::Appends;
use crate::caller::{Caller, as_caller, taking_room, unchecked};
use crate::handles::{Direct, OpenFile, Stores};
use crate::mount::Remembered;
use crate::node::Node;
use crate::notify::forget_attributes;
use crate::passthrough::Way;
use crate::stamp::{id_of, look, now, stamp_of};
use crate::watch::Changed;
use crate::{lower, sys};

const PAGE: u64 = 4096;
/// Copied by one request, during which nobody who asked can be interrupted, nor killed. He goes on with the next; a multiple of what file systems share.
const COPY_BYTES_MAX: u64 = 32 << 20;

/// `FMODE_EXEC` among a file's flags: execve(2) opens it so.
const TO_RUN: i32 = 0x20;

/// How often an open is tried while another waits for a lease, and how long after one another.
const LEASE_TRIES: u32 = 4;
const LEASE_PAUSE: Duration = Duration::from_millis(5);

/// How many requests may wait for leases; where only two threads may serve, one.
const LEASE_WAITERS_MAX: usize = 2;

/// A request of this user waits for the end of a lease.
struct LeaseWaiter<'t> {
    all: &'t Mutex<Vec<u32>>,
    uid: u32,
}

impl<'t> LeaseWaiter<'t> {
    /// None where as many wait as may.
    fn new(all: &'t Mutex<Vec<u32>>, uid: u32, most: usize) -> Option<LeaseWaiter<'t>> {
        let mut waiting = all.lock().unwrap_or_else(PoisonError::into_inner);
        let may_wait = waiting.len() < most && !waiting.contains(&uid);
        may_wait.then(|| {
            waiting.push(uid);
            LeaseWaiter { all, uid }
        })
    }
}

impl Drop for LeaseWaiter<'_> {
    fn drop(&mut self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).retain(|uid| *uid != self.uid);
    }
}

/// lseek(2).
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

impl Tree {
    pub fn open_file(&self, caller: Caller, number: INodeNo, flags: OpenFlags) -> io::Result<(FileHandle, FopenFlags)> {
        let node = self.inodes.get(number)?;
        if flags.0 & TO_RUN != 0 && node.limits.contains(StatVfsMountFlags::NOEXEC) {
            return Err(Errno::ACCESS);
        }
        let open = |how| self.past_leases(caller, how, |how| self.inodes.reach(&node, how));
        let (fd, only_appends) = self.with_room(|| self.as_allowed(flags, open))?;
        let opened = self.opened(caller, fd, only_appends, node.clone(), flags)?;
        if self.remembered == Remembered::Directories && node.ways.were_believed() {
            // What was looked up is believed of what nobody has open.
            self.has_other_attributes(number);
        }
        Ok(opened)
    }

    pub fn create_file(
        &self,
        caller: Caller,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: OpenFlags,
    ) -> io::Result<(Made, FileHandle, FopenFlags)> {
        let parent = self.inodes.get(parent)?;
        let (mode, asked) = (Mode::from_raw_mode(mode), OFlags::from_bits_retain(flags.0 as u32));
        // The kernel has checked that who asks may make a file there, and knows of none.
        let fresh = self.flags_below(flags) | OFlags::NOFOLLOW | OFlags::CREATE | OFlags::EXCL;
        let fresh = || openat(&parent, name, fresh, mode);
        let (fd, only_appends, is_fresh) = match self.with_room(|| as_caller(caller, umask, fresh)) {
            // There is one by now, made behind the mount; nobody has checked who may open that.
            Err(Errno::EXIST) if !asked.contains(OFlags::EXCL) => {
                let there = || unchecked(caller, || self.open_there(caller, &parent, name, flags));
                let (fd, only_appends) = self.with_room(there)?;
                (fd, only_appends, false)
            }
            other => (other?, false, true),
        };
        // From the descriptor, not by name: that may be another's by now.
        let stat = look(&fd)?;
        self.has_nothing(id_of(&stat));
        let place = self.with_room(|| self.inodes.place_of(&fd))?;
        let made = self.made(self.inodes.give_as(place, &stat, &parent, name), stat);
        let made = if is_fresh { self.given(caller, &parent, made) } else { made };
        if self.writes_back && is_fresh {
            made.node.modified.told(Timespec { tv_sec: stat.stx_mtime.tv_sec, tv_nsec: stat.stx_mtime.tv_nsec.into() });
        }
        let (handle, how) = self
            .opened(caller, fd, only_appends, made.node.clone(), flags)
            .inspect_err(|_| self.inodes.forget(made.node.number, 1))?;
        Ok((made, handle, how))
    }

    /// The kernel is not to believe any more what a file is like.
    fn has_other_attributes(&self, number: INodeNo) {
        // Should it not know the file, it does not know that either.
        let _ = self.connection.get().map(|connection| forget_attributes(connection, number));
    }

    /// Does what takes room in a file, as [`taking_room`] does; the kernel, which does not see that set-user-ID goes by that, is told.
    fn taking_room<T>(
        &self,
        caller: Caller,
        drops: bool,
        node: &Node,
        change: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        let changed = taking_room(caller, drops, node, change);
        if node.has_lost_set_id.swap(false, Relaxed) {
            self.has_other_attributes(node.number);
        }
        changed
    }

    /// Opens the file that has this name already. What is no regular file is the kernel's to open, which is told that it knew another (ESTALE), and looks
    /// again: here it might wait for another program (a FIFO), or do something (a device).
    fn open_there(&self, caller: Caller, parent: &Node, name: &OsStr, flags: OpenFlags) -> io::Result<(OwnedFd, bool)> {
        let place = openat(parent, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        if !FileType::from_raw_mode(look(&place)?.stx_mode.into()).is_file() {
            return Err(Errno::STALE);
        }
        let cut = OFlags::from_bits_retain(flags.0 as u32) & OFlags::TRUNC;
        self.as_allowed(flags, |how| self.past_leases(caller, how | cut, |how| self.inodes.anew(&place, how)))
    }

    /// Calls `open` with the flags `how`. Somebody may hold a lease on the file below, and has as long as `fs.lease-break-time` says to give it up (45 s): a thread waits
    /// for that, for one request of a user and for two at a time, or one who holds many could have all of them wait. For others it is asked a few times more, and then
    /// who asks is told EWOULDBLOCK.
    pub fn past_leases(
        &self,
        caller: Caller,
        how: OFlags,
        open: impl Fn(OFlags) -> io::Result<OwnedFd>,
    ) -> io::Result<OwnedFd> {
        for _ in 0..LEASE_TRIES {
            match open(how | OFlags::NONBLOCK) {
                Err(Errno::WOULDBLOCK) => {}
                Err(error) => return Err(error),
                Ok(fd) => return fcntl_setfl(&fd, how).map(|()| fd),
            }
            self.call_another();
            let has_few_threads =
                self.by_rings.load(Relaxed) || available_parallelism().is_ok_and(|all| all.get() == 1);
            let most = if has_few_threads { 1 } else { LEASE_WAITERS_MAX };
            if let Some(_waits) = LeaseWaiter::new(&self.leased, caller.uid, most) {
                return open(how);
            }
            sleep(LEASE_PAUSE);
        }
        Err(Errno::WOULDBLOCK)
    }

    fn opened(
        &self,
        opener: Caller,
        fd: OwnedFd,
        only_appends: bool,
        node: Arc<Node>,
        flags: OpenFlags,
    ) -> io::Result<(FileHandle, FopenFlags)> {
        let asked = OFlags::from_bits_retain(flags.0 as u32);
        let writes = asked & OFlags::RWMODE != OFlags::RDONLY;
        // Who only reads has nothing to be told at the end, nor has who only writes where nothing is told then; who can map may leave something to be written.
        let is_told = writes && (asked.contains(OFlags::RDWR) || self.inodes.tells_at_close(node.id, &fd));
        let mut how = if is_told { FopenFlags::empty() } else { FopenFlags::FOPEN_NOFLUSH };
        // What may only be appended to is given to nobody who could write elsewhere; and who has no right to write on a file server by himself may by another group of his.
        let must_come = only_appends || writes && self.inodes.is_remote(node.id, &fd);
        let way = self.backings.open(&node.ways, (&fd, node.id.dev), opener, (asked, must_come))?;
        let (mut watched, mut unconfirmed) = (false, 0);
        match way {
            Way::Served => {
                // Before it is looked at: what comes later is heard.
                watched = self.watches.as_ref().is_some_and(|watches| watches.begin(&node));
                let stat = look(&fd).ok();
                let stamp = stat.as_ref().map(stamp_of);
                let stamp = stamp.filter(|stamp| self.exclusive || stamp.is_settled(now()));
                unconfirmed = node.kept.lock().unwrap_or_else(PoisonError::into_inner).open(stamp);
                how.set(FopenFlags::FOPEN_KEEP_CACHE, unconfirmed == 0);
                // The kernel reads nothing behind the end that it knows, but past its pages.
                let is_empty = stat.is_some_and(|stat| stat.stx_size == 0);
                how.set(FopenFlags::FOPEN_DIRECT_IO, is_empty && !self.inodes.has_lengths(node.id, &fd));
            }
            Way::Passed(_) => how |= FopenFlags::FOPEN_PASSTHROUGH,
            Way::Beside(_) => how |= FopenFlags::FOPEN_PASSTHROUGH | FopenFlags::FOPEN_DIRECT_IO,
        }
        if way != Way::Served {
            // Of no use to anybody any more.
            self.forget_pages(node.pages);
        }
        if self.writes_back && writes {
            // What the kernel keeps it writes in its place, and reads the rest of the page before, by any handle for writing that there is. Past it, this one is asked as it is
            // used.
            let reads = fcntl_getfl(&fd).is_ok_and(|how| how & OFlags::RWMODE == OFlags::RDWR);
            how |= if only_appends || !reads { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::empty() };
        }
        let stores = (way == Way::Served && asked.contains(OFlags::RDWR)).then(|| Stores::new(&node));
        let is_past_pages = how.contains(FopenFlags::FOPEN_DIRECT_IO);
        let (direct, unconfirmed, appends, run) =
            (Direct::default(), unconfirmed.into(), Appends::default(), Mutex::default());
        let opened = OpenFile {
            fd,
            direct,
            node,
            way,
            writes,
            opener,
            only_appends,
            stores,
            is_past_pages,
            watched,
            unconfirmed,
            appends,
            run,
        };
        Ok((self.files.add(opened), how))
    }

    /// The backing file that a handle is used with, or 0.
    pub fn backing_of(&self, handle: FileHandle) -> u32 {
        match self.files.get(handle).map(|open| open.way) {
            Ok(Way::Passed(backing) | Way::Beside(backing)) => backing,
            _ => 0,
        }
    }

    /// Nothing that is kept of a file, here or by the kernel, is good for who opens it next.
    fn forget_all(&self, node: &Node) {
        self.forget_pages(node.pages);
        node.kept.lock().unwrap_or_else(PoisonError::into_inner).forget();
    }

    /// Calls `change`, which changes the bytes from .. to of a file; nothing older of them is kept, here or by reads under way.
    pub fn writing<T>(&self, node: &Node, bytes: (u64, u64), change: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.writing_pages(node, bytes, change, |_| (0, &[]))
    }

    /// The same, and the file then has the bytes that `written` says, given what `change` returned: where they begin, and they.
    ///
    /// What else is kept of the file goes with the next look at it, since it then has another stamp; only if nobody else can have changed it in
    /// the meantime, it stays, and those pages are kept, too.
    fn writing_pages<'p, T>(
        &self,
        node: &Node,
        bytes: (u64, u64),
        change: impl FnOnce() -> io::Result<T>,
        written: impl FnOnce(&T) -> (u64, &'p [u8]),
    ) -> io::Result<T> {
        let pages = bytes.0 / PAGE..bytes.1.div_ceil(PAGE);
        let writing = self.cache.begin_write(node.pages, (pages.start, pages.end));
        self.ahead.void(node.pages, pages.clone());
        let changed = change();
        // What was read ahead in the meantime may be of before.
        self.ahead.void(node.pages, pages);
        if self.exclusive && !node.ways.are_past_us() {
            if let Ok(stat) = node.look() {
                node.follow(&stat);
                if let Ok(changed) = &changed {
                    let (offset_bytes, from) = written(changed);
                    let (first, pages, rest) = whole_pages(offset_bytes, from);
                    // Behind the end are zeroes, whatever becomes of the file.
                    let is_end = stat.stx_size == offset_bytes + from.len() as u64;
                    writing.done(self.version_of(&stat), first, pages, if is_end { rest } else { &[] });
                }
            }
            if changed.is_err() {
                self.may_be_lost(node);
            }
        }
        changed
    }

    pub fn write_file(
        &self,
        caller: Caller,
        handle: FileHandle,
        offset_bytes: u64,
        from: &[u8],
        how: WriteFlags,
        flags: OpenFlags,
    ) -> io::Result<usize> {
        let open = self.files.asked(handle)?;
        if from.len() as u64 >= PAGE {
            open.node.has_pages.store(true, SeqCst);
        }
        // Pages that are written back have their place; their flags are nobody's.
        let writes_back = how.contains(WriteFlags::FUSE_WRITE_CACHE);
        // Nor does the kernel say whose they are: where only what is stored through mappings is written so, they are taken for the server's own.
        let is_openers = writes_back && self.writes_back;
        let caller = if is_openers { open.opener } else { caller };
        // Where it keeps pages of its own, the file below may still be too short, and the place that it says is right.
        let has_place = writes_back || self.writes_back && !open.only_appends;
        let appends = flags.0 as u32 & OFlags::APPEND.bits() != 0 && !has_place;
        if open.only_appends && !appends {
            // It would be written at the end, wherever it belongs.
            return Err(Errno::PERM);
        }
        let drops_suid = how.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) || is_openers && caller.uid != 0;
        if !appends {
            let bytes = (offset_bytes, offset_bytes.saturating_add(from.len() as u64));
            // Nor does the kernel say of direct writes that there was room for a part: what it calls EIO then had better be what it was.
            let is_all = writes_back || flags.0 as u32 & OFlags::DIRECT.bits() != 0;
            let write = if is_all { lower::write_back } else { lower::write };
            let write = || self.taking_room(caller, drops_suid, &open.node, || write(&open.fd, offset_bytes, from));
            let write = || write().inspect(|_| self.keep_time(&open));
            return self.writing_pages(&open.node, bytes, write, |written| (offset_bytes, &from[..*written]));
        }
        // Of a file that is passed through the kernel asks for one part after the other, but for O_DIRECT.
        let goes_past = open.is_past_pages && open.way == Way::Served;
        let is_direct = goes_past || flags.0 as u32 & OFlags::DIRECT.bits() != 0;
        let append = if is_direct { lower::append_all } else { lower::append };
        let append = || {
            let append = || self.taking_room(caller, drops_suid, &open.node, || append(&open.fd, from));
            self.append(&open, offset_bytes, from, append)
        };
        if is_direct {
            return open.appends.in_order(&open.fd, (offset_bytes, from.len() as u64), append);
        }
        let _alone = open.appends.alone();
        append().map(|(written, _)| written)
    }

    /// Writes to the end of a file, which the kernel takes to be at `offset_bytes`. Returns how much, and where that ends.
    fn append(
        &self,
        open: &OpenFile,
        offset_bytes: u64,
        from: &[u8],
        append: impl FnOnce() -> io::Result<(usize, u64)>,
    ) -> io::Result<(usize, u64)> {
        // Where the end is then is not known before; it is not before the end now.
        let end = look(&open.fd)?.stx_size;
        let appended = |(written, began): &(usize, u64)| (*began, &from[..*written]);
        let (written, began) = self.writing_pages(&open.node, (end, u64::MAX), append, appended)?;
        if began != offset_bytes && open.node.has_pages.swap(false, SeqCst) {
            // Somebody made the file longer behind the mount; what the kernel keeps is in the wrong place. Of parts of pages it keeps nothing that
            // it would show, and it is told nothing without need: a length that it asked for meanwhile it does not take, and reads end at the old one.
            self.tell(Notice::Outdated(open.node.number));
        }
        Ok((written, began + written as u64))
    }

    /// The file system below says that it has lost something, of this write or of one before: what is kept of the file may be that.
    fn may_be_lost(&self, node: &Node) {
        self.forget_pages(node.pages);
    }

    /// Nothing that is kept of a file is what it has, or may not be.
    pub fn forget_pages(&self, id: FileId) {
        // In this order: who has taken something that was read ahead before is told by the cache that it may not be kept.
        self.ahead.void(id, 0..u64::MAX);
        self.cache.drop_file(id);
    }

    /// Somebody has changed a file, behind the mount perhaps. The file may look as it did when we read it: its time is given at the beginning of a write, and
    /// what was read before the end of it may be what was there before.
    /// The kernel may have forgotten the file by now; what we keep of it stays here.
    pub fn was_changed(&self, changed: Changed) {
        // First: what the kernel then asks for must not be answered from there.
        self.forget_pages(changed.pages);
        self.tell(Notice::Outdated(changed.number));
    }

    pub fn close_file(&self, handle: FileHandle) {
        let Some(open) = self.files.remove(handle) else { return };
        self.ahead.close(&open);
        if open.writes && open.way != Way::Served && open.opener.uid != 0 {
            // The kernel may have taken set-user-ID from the file below.
            self.has_other_attributes(open.node.number);
        }
        if let Some(ended) = open.node.ways.close(open.way, || self.forget_all(&open.node)) {
            self.backings.close(ended.backing);
            if ended.is_to_be_told {
                self.tell(Notice::ToForget(open.node.number));
            }
        }
        if let Some(watches) = self.watches.as_ref().filter(|_| open.watched) {
            watches.end(&open.node);
        }
    }

    pub fn close_report(&self, handle: FileHandle) -> io::Result<()> {
        let open = self.files.asked(handle)?;
        let closed = if open.writes { self.with_room(|| sys::close_report(&open.fd)) } else { Ok(()) };
        let closed = closed.inspect_err(|_| self.may_be_lost(&open.node));
        // Who closes is not told that there are too many descriptors of ours.
        if closed == Err(Errno::MFILE) { Ok(()) } else { closed }
    }

    /// When it returns, the file below has it where its file system puts it; what was kept there for writing is let go of, unless that is all that is kept of the file.
    pub fn sync_file(&self, handle: FileHandle, data_alone: bool) -> io::Result<()> {
        let open = self.files.asked(handle)?;
        let synced = if data_alone { fdatasync(&open.fd) } else { fsync(&open.fd) };
        synced.inspect_err(|_| self.may_be_lost(&open.node))?;
        if open.way == Way::Served {
            lower::let_go(&open.fd);
        }
        Ok(())
    }

    pub fn allocate(
        &self,
        caller: Caller,
        handle: FileHandle,
        offset_bytes: u64,
        length_bytes: u64,
        mode: i32,
    ) -> io::Result<()> {
        let open = self.files.asked(handle)?;
        let mode = FallocateFlags::from_bits_retain(mode as u32);
        let bytes = (offset_bytes, offset_bytes.saturating_add(length_bytes));
        let allocate = || fallocate(&open.fd, mode, offset_bytes, length_bytes);
        let allocate = || self.taking_room(caller, caller.uid != 0, &open.node, allocate);
        self.writing(&open.node, bytes, || allocate().inspect(|()| self.keep_time(&open)))
    }

    pub fn copy_range(
        &self,
        caller: Caller,
        from: (FileHandle, u64),
        to: (FileHandle, u64),
        length_bytes: u64,
    ) -> io::Result<usize> {
        let (source, target) = (self.files.asked(from.0)?, self.files.asked(to.0)?);
        let (mut from, mut to) = (from.1, to.1);
        let length = length_bytes.min(COPY_BYTES_MAX) as usize;
        let bytes = (to, to.saturating_add(length as u64));
        let copy = || copy_file_range(&source.fd, Some(&mut from), &target.fd, Some(&mut to), length);
        let copy = || self.taking_room(caller, caller.uid != 0, &target.node, copy);
        self.writing(&target.node, bytes, || copy().inspect(|_| self.keep_time(&target)))
    }

    /// The file was changed, of whose time the kernel has its own idea: but not of what goes past its pages.
    fn keep_time(&self, open: &OpenFile) {
        if self.writes_back && !open.is_past_pages {
            open.node.modified.restore(&open.node.path());
        }
    }

    /// Where the next data or hole is; the kernel asks for nothing else.
    pub fn seek_file(&self, handle: FileHandle, offset: i64, whence: i32) -> io::Result<u64> {
        if self.writes_back {
            // The file below does not have all data yet. The kernel then takes all that there is for data.
            return Err(Errno::NOSYS);
        }
        let open = self.files.asked(handle)?;
        let offset = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
        if open.node.stores.load(SeqCst) > 0 {
            // What was stored through a mapping the kernel writes later, and not for this: until then it may be a hole below.
            let end = look(&open.fd)?.stx_size;
            return match whence {
                SEEK_DATA | SEEK_HOLE if offset >= end => Err(Errno::NXIO),
                SEEK_DATA => Ok(offset),
                SEEK_HOLE => Ok(end),
                _ => Err(Errno::INVAL),
            };
        }
        let _alone = open.appends.alone();
        match whence {
            SEEK_DATA => seek(&open.fd, SeekFrom::Data(offset)),
            SEEK_HOLE => seek(&open.fd, SeekFrom::Hole(offset)),
            _ => Err(Errno::INVAL),
        }
    }

    /// Calls `open` with the flags for below; again with the one for appending, if without it a file that may only be appended to is not given. Says
    /// whether that was so.
    fn as_allowed(
        &self,
        flags: OpenFlags,
        open: impl Fn(OFlags) -> io::Result<OwnedFd>,
    ) -> io::Result<(OwnedFd, bool)> {
        let (asked, mut how) = (OFlags::from_bits_retain(flags.0 as u32), self.flags_below(flags));
        let mut opened = open(how);
        if matches!(opened, Err(Errno::ACCESS | Errno::PERM)) && how & OFlags::RWMODE != asked & OFlags::RWMODE {
            // It may be written, and we may not read it.
            how = (how - OFlags::RWMODE) | OFlags::WRONLY;
            opened = open(how);
        }
        match opened {
            Err(Errno::PERM) if asked.contains(OFlags::APPEND) => Ok((open(how | OFlags::APPEND)?, true)),
            other => Ok((other?, false)),
        }
    }

    /// How a file is opened below. Appending is said with each write, direct I/O is the kernel's affair above, and the rest
    /// concerns names, or waiting, which regular files do not. Who writes back a part of a page reads it before.
    fn flags_below(&self, flags: OpenFlags) -> OFlags {
        let kept = OFlags::RWMODE | OFlags::SYNC | OFlags::DSYNC | OFlags::NOATIME;
        let how = OFlags::from_bits_retain(flags.0 as u32) & kept | OFlags::CLOEXEC;
        let reads_too = self.writes_back && how & OFlags::RWMODE == OFlags::WRONLY;
        if reads_too { (how - OFlags::RWMODE) | OFlags::RDWR } else { how }
    }
}

/// The whole pages among bytes that were written: the number of the first, they, and the rest behind them.
fn whole_pages(offset_bytes: u64, from: &[u8]) -> (u64, &[Page], &[u8]) {
    let first = offset_bytes.div_ceil(PAGE);
    let whole = from.get((first * PAGE - offset_bytes) as usize..).unwrap_or_default();
    let (pages, rest) = whole.as_chunks();
    (first, pages, rest)
}

#[cfg(test)]
pub mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::sync::mpsc::channel;
    use std::thread;

    use compcache_cache::Cache;
    use compcache_store::Codec;
    use rustix::fs::{CWD, mknodat};
    use rustix::process::{getegid, geteuid};

    use super::*;
    use crate::inodes::Inodes;
    use crate::passthrough::Passthrough;
    use crate::tree::Parts;
    use crate::tree::attributes::Changes;
    use crate::tree::reading::Bytes;

    impl Bytes for &mut Vec<u8> {
        fn bytes(self, bytes: &[u8], _: bool) {
            self.extend_from_slice(bytes);
        }

        fn failed(self, error: Errno) {
            panic!("{error}");
        }
    }

    pub fn tree(directory: &Path, exclusive: bool) -> Tree {
        let parts = Parts {
            inodes: Arc::new(Inodes::new(directory).unwrap()),
            cache: Arc::new(Cache::new(2 << 20, Codec::Lz4).unwrap()),
            exclusive,
            writes_back: false,
            passthrough: Passthrough::None,
            remembered: Remembered::Nothing,
            whole_bytes: || 0,
            watches: None,
            notices: channel().0,
            by_rings: false,
        };
        Tree::new(parts).0
    }

    #[test]
    fn what_was_read_before_the_end_of_a_write_is_forgotten_when_that_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        // Where nobody else changes files, the time is not looked at: as if it were that of the beginning of the write.
        let tree = tree(directory.path(), true);
        fs::write(&path, "what was there before").unwrap();
        let node = tree.find(0, INodeNo::ROOT, OsStr::new("f")).unwrap().node;
        let changed = Changed { number: node.number, pages: node.pages };
        let handle = tree.open_file(Caller { uid: 0, gid: 0 }, node.number, OpenFlags(0)).unwrap().0;
        let read = || {
            let mut read = Vec::new();
            tree.read_file(handle, 0, 100, &mut read);
            String::from_utf8(read).unwrap()
        };
        assert_eq!(read(), "what was there before");
        fs::write(&path, "what was written then").unwrap();
        assert_eq!(read(), "what was there before", "found in the cache");
        // As far as we know the kernel knows it no more.
        tree.inodes.forget(node.number, 1);
        tree.was_changed(changed);
        assert_eq!(read(), "what was written then");
    }

    #[test]
    fn what_was_made_behind_the_mount_in_place_of_a_new_file_is_opened_if_it_is_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        mknodat(CWD, path("fifo"), FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
        symlink(path("file"), path("link")).unwrap();
        fs::write(path("file"), "there").unwrap();
        let tree = tree(directory.path(), false);
        let caller = Caller { uid: geteuid().as_raw(), gid: getegid().as_raw() };
        let (send, made) = channel();
        thread::spawn(move || {
            for (name, flags) in [("fifo", OFlags::WRONLY), ("fifo", OFlags::RDONLY), ("link", OFlags::WRONLY)] {
                let flags = OpenFlags((flags | OFlags::CREATE).bits() as i32);
                let made = tree.create_file(caller, INodeNo::ROOT, name.as_ref(), 0o644, 0, flags);
                send.send((name, made.map(drop))).unwrap();
            }
            let flags = OpenFlags((OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC).bits() as i32);
            let made = tree.create_file(caller, INodeNo::ROOT, "file".as_ref(), 0o644, 0, flags);
            send.send(("file", made.map(drop))).unwrap();
        });
        for (name, expected) in
            [("fifo", Err(Errno::STALE)), ("fifo", Err(Errno::STALE)), ("link", Err(Errno::STALE)), ("file", Ok(()))]
        {
            assert_eq!(made.recv_timeout(Duration::from_secs(20)), Ok((name, expected)));
        }
        assert_eq!(fs::read(path("file")).unwrap(), b"", "it was to be emptied");
    }

    #[test]
    fn the_kernel_keeps_pages_only_of_a_version_that_it_has_dropped_others_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        let tree = tree(directory.path(), false);
        let open = || {
            let number = tree.find(0, INodeNo::ROOT, OsStr::new("f")).unwrap().node.number;
            let (handle, how) = tree.open_file(Caller { uid: 0, gid: 0 }, number, OpenFlags(0)).unwrap();
            (handle, how.contains(FopenFlags::FOPEN_KEEP_CACHE))
        };
        for content in ["one", "another"] {
            fs::write(&path, content).unwrap();
            sleep(Duration::from_millis(100));
            let (one, two) = (open(), open());
            assert!(!one.1 && !two.1, "{content}: it has been told to drop pages, and may not have done it yet");
            tree.close_file(two.0);
            assert!(!open().1, "closed, as is what could not be used");
            let mut read = Vec::new();
            tree.read_file(one.0, 0, 100, &mut read);
            assert_eq!(read, content.as_bytes());
            assert!(open().1 && open().1);
        }
        // Who has asked for something by a handle of the version before.
        let old = open().0;
        fs::write(&path, "a third").unwrap();
        sleep(Duration::from_millis(100));
        let new = open();
        tree.read_file(old, 0, 100, &mut Vec::new());
        assert!(!new.1 && !open().1);
        tree.close_report(new.0).unwrap();
        assert!(open().1);
    }

    #[test]
    fn a_time_that_a_file_is_given_costs_the_kernel_no_pages_where_nobody_else_gives_any() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("f"), "text").unwrap();
        let caller = Caller { uid: geteuid().as_raw(), gid: getegid().as_raw() };
        for exclusive in [true, false] {
            let tree = tree(directory.path(), exclusive);
            let number = tree.find(0, INodeNo::ROOT, OsStr::new("f")).unwrap().node.number;
            sleep(Duration::from_millis(100));
            let open = || tree.open_file(caller, number, OpenFlags(0)).unwrap();
            tree.close_report(open().0).unwrap();
            assert!(open().1.contains(FopenFlags::FOPEN_KEEP_CACHE));
            let modified = Some(Timespec { tv_sec: 1_000_000_000 + i64::from(exclusive), tv_nsec: 7 });
            let changes = Changes { mode: None, uid: None, gid: None, size_bytes: None, accessed: None, modified };
            tree.change(caller, number, None, &changes).unwrap();
            assert_eq!(open().1.contains(FopenFlags::FOPEN_KEEP_CACHE), exclusive);
        }
    }
}
