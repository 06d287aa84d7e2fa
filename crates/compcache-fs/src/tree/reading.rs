//! Reading: from the cache what is there, the rest below.
//!
//! The order, on which everything depends (docs/design/fs.md):
//!
//! 1. look at the file: its stamp
//! 2. `begin_read`: what was cached under another stamp goes; a token
//! 3. what comes after it is planned to be read ahead, if this goes in order (`ahead`); `get` the pages that are cached
//! 4. take what was read ahead, and read the others below, in runs, over what lies between two of them: long ones of which nothing is in the page cache below directly, others
//!    through that
//! 5. answer
//! 6. look at the file again: the same stamp, or what was read may be of two versions, and is not kept
//! 7. `put` what was read
//!
//! A page enters the cache behind the answer, so whoever reads does not wait for the compression.

use std::cell::RefCell;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use compcache_cache::{Aligned, Token, exactly_missing, missing};
use compcache_store::{Page, Worker};
use fuser::{FileHandle, ReplyData};
use rustix::fs::{AtFlags, OFlags, Statx, StatxFlags, fcntl_getfl, statx};
use rustix::io::{self, Errno, pread};

use super::{Tree, errno};
use crate::handles::OpenFile;
use crate::kinds::Kind;
use crate::passthrough::Way;
use crate::stamp::{Stamp, look, now, stamp_of};
use crate::sys;

const PAGE: u64 = 4096;
/// From here on a direct read takes less time than one through the page cache below (docs/decisions/0036).
const DIRECT_BYTES_MIN: usize = 32 << 10;

/// Where what was read goes.
pub trait Bytes {
    /// The answer; there may be more to do for this request.
    fn bytes(self, bytes: &[u8], more: bool);
    fn failed(self, error: Errno);
}

impl Bytes for ReplyData {
    fn bytes(self, bytes: &[u8], _: bool) {
        self.data(bytes);
    }

    fn failed(self, error: Errno) {
        self.error(errno(error));
    }
}

/// What a thread reads with.
struct Own {
    worker: Worker,
    buffer: Aligned,
    /// In the cache; and by now, wherever it is from.
    found: Vec<bool>,
    there: Vec<bool>,
}

thread_local! {
    /// Taken with the first read. A thread belongs to one mount for all its life.
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

impl Tree {
    pub fn read_file(&self, handle: FileHandle, offset_bytes: u64, length_bytes: usize, reply: impl Bytes) {
        let open = match self.files.asked(handle) {
            Ok(open) => open,
            Err(error) => return reply.failed(error),
        };
        // Before it is read: what is written later meets pages.
        open.node.has_pages.store(true, SeqCst);
        OWN.with_borrow_mut(|own| {
            if own.is_none() {
                let fresh = self.cache.worker().ok();
                *own =
                    fresh.map(|worker| Own { worker, buffer: Aligned::new(0), found: Vec::new(), there: Vec::new() });
            }
            match own {
                Some(own) => self.read_through(own, &open, offset_bytes, length_bytes, reply),
                // No memory for what would save some.
                None => self.read_below(&open, offset_bytes, length_bytes, reply),
            }
        });
    }

    /// What tells this version of a file from others. Where nobody changes files but through us, it is the file alone: we know of each
    /// change without it, and reads that meet writes need not drop what is kept.
    pub fn version_of(&self, stat: &Statx) -> Stamp {
        let stamp = stamp_of(stat);
        if self.exclusive { stamp.identity() } else { stamp }
    }

    fn read_below(&self, open: &OpenFile, offset_bytes: u64, length_bytes: usize, reply: impl Bytes) {
        self.call_another();
        let mut into = vec![0; length_bytes];
        match self.lower.read(&open.fd, offset_bytes, &mut into) {
            Ok(length) => reply.bytes(&into[..length], false),
            Err(error) => reply.failed(error),
        }
    }

    fn read_through(
        &self,
        own: &mut Own,
        open: &Arc<OpenFile>,
        offset_bytes: u64,
        length_bytes: usize,
        reply: impl Bytes,
    ) {
        if open.way != Way::Served {
            return self.read_below(open, offset_bytes, length_bytes, reply);
        }
        let Ok(stat) = look(&open.fd) else { return self.read_below(open, offset_bytes, length_bytes, reply) };
        let (size_bytes, stamp) = (stat.stx_size, self.version_of(&stat));
        let end_bytes = offset_bytes.saturating_add(length_bytes as u64).min(size_bytes);
        let (first, end) = (offset_bytes / PAGE, end_bytes.div_ceil(PAGE));
        // Nothing there, or so it says (files of /proc have no size); or farther out than pages are counted.
        if offset_bytes >= end_bytes || end >= u32::MAX.into() {
            return self.read_below(open, offset_bytes, length_bytes, reply);
        }
        let count = (end - first) as usize;
        if own.found.len() < count {
            own.buffer = Aligned::new(count * PAGE as usize);
            own.found.resize(count, false);
            own.there.resize(count, false);
        }
        let Own { worker, buffer, found, there } = own;
        let (pages, _) = buffer.bytes().as_chunks_mut();
        let (pages, found, there) = (&mut pages[..count], &mut found[..count], &mut there[..count]);
        let is_settled = self.exclusive || stamp_of(&stat).is_settled(now());
        let token = self.cache.begin_read(open.node.pages, stamp, is_settled);
        if is_settled {
            self.plan_ahead(open, stamp, first as u32..end as u32, size_bytes);
        }
        self.cache.get(worker, token, first as u32, pages, found);
        there.copy_from_slice(found);
        let begun = Instant::now();
        let count_missing = found.iter().filter(|found| !**found).count();
        if count_missing > 0 {
            self.call_another();
            self.ahead.take(open, stamp, first as u32, pages, there);
        }
        let read = self.read_missing(worker, token, open, first, (&mut *pages, &*there), size_bytes - first * PAGE);
        if count_missing > 0 && read.is_ok() {
            self.cache.took_below(count_missing, begun.elapsed());
        }
        let (begin, end) = ((offset_bytes - first * PAGE) as usize, (end_bytes - first * PAGE) as usize);
        let is_whole = match read {
            Ok(valid) => {
                reply.bytes(&pages.as_flattened()[begin..end.min(valid).max(begin)], found.contains(&false));
                valid == pages.len() * PAGE as usize
            }
            Err(error) => {
                reply.failed(error);
                false
            }
        };
        let is_same =
            || look(&open.fd).is_ok_and(|stat| stat.stx_size == size_bytes && self.version_of(&stat) == stamp);
        let keeps = is_whole && found.contains(&false) && is_same();
        self.keep(worker, token, first as u32, pages, if keeps { found } else { &[] });
    }

    /// Has what comes next be read ahead.
    fn plan_ahead(&self, open: &Arc<OpenFile>, stamp: Stamp, asked: Range<u32>, size_bytes: u64) {
        if let Some(planned) = self.ahead.plan(open, stamp, asked, size_bytes)
            && self.cache.is_written(open.node.pages)
        {
            // Whoever writes there may have looked before it was planned, and what is read may be of before.
            self.ahead.void(open.node.pages, planned.start.into()..planned.end.into());
        }
    }

    /// Reads below the pages that are not there; returns how many bytes of all are there now.
    fn read_missing(
        &self,
        worker: &mut Worker,
        token: Token,
        open: &OpenFile,
        first: u64,
        (pages, found): (&mut [Page], &[bool]),
        size_bytes: u64,
    ) -> io::Result<usize> {
        for run in missing(found) {
            let read = self.read_run(open, first, run.clone(), pages, size_bytes);
            let is_whole = read.as_ref().is_ok_and(|is_whole| *is_whole == run.end * PAGE as usize);
            if is_whole {
                continue;
            }
            if !found[run.clone()].contains(&true) {
                return read;
            }
            // What was found does not have to be read; but it was read over.
            let mut again = vec![false; run.len()];
            self.cache.get_again(worker, token, (first + run.start as u64) as u32, &mut pages[run.clone()], &mut again);
            for part in exactly_missing(&again) {
                let part = run.start + part.start..run.start + part.end;
                let read = self.read_run(open, first, part.clone(), pages, size_bytes)?;
                if read < part.end * PAGE as usize {
                    return Ok(read);
                }
            }
        }
        Ok(pages.as_flattened().len())
    }

    /// Reads a run of pages below, numbers within `pages`, of which the first is the file's page `first`; `size_bytes` are those of the file from there on. Returns
    /// where in `pages` what is there now ends: with the run, unless the file is shorter than it was a moment ago.
    pub fn read_run(
        &self,
        open: &OpenFile,
        first: u64,
        run: Range<usize>,
        pages: &mut [Page],
        size_bytes: u64,
    ) -> io::Result<usize> {
        let (page, offset_bytes) = (PAGE as usize, (first + run.start as u64) * PAGE);
        let into = pages[run.clone()].as_flattened_mut();
        let wanted = into.len().min(size_bytes as usize - run.start * page);
        let read = self.read_whole_pages(open, offset_bytes, into, wanted)?;
        into[read..].fill(0);
        Ok(if read < wanted { run.start * page + read } else { run.end * page })
    }

    /// Reads whole pages below, of which `wanted` bytes are in the file; returns how many of these there are.
    fn read_whole_pages(
        &self,
        open: &OpenFile,
        offset_bytes: u64,
        into: &mut [u8],
        wanted: usize,
    ) -> io::Result<usize> {
        if into.len() >= DIRECT_BYTES_MIN
            && !sys::has_cached(&open.fd, offset_bytes, into.len() as u64)
            && let Some(direct) = open.direct.get(|| self.direct(open))
        {
            // What fails or ends early is tried again in the common way, which says why.
            match pread(direct, &mut *into, offset_bytes) {
                Ok(read) if read >= wanted => return Ok(wanted),
                Ok(_) => {}
                Err(_) => open.direct.give_up(),
            }
        }
        self.lower.read(&open.fd, offset_bytes, &mut into[..wanted])
    }

    /// Another descriptor for an open file, if the file system says that it takes direct reads of pages, and there are enough descriptors. On overlayfs, what is
    /// cached is cached of another file, and not told.
    fn direct(&self, open: &OpenFile) -> Option<OwnedFd> {
        if !self.inodes.has_room_for_two_each(self.files.count()) || Kind::of(&open.fd).is_overlayfs() {
            return None;
        }
        let as_opened = fcntl_getfl(&open.fd).ok()? & OFlags::NOATIME;
        let fd = self.inodes.reach(&open.node, as_opened | OFlags::RDONLY | OFlags::DIRECT).ok()?;
        let stat = statx(&fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
        let is_fine = |align: u32| (1..=PAGE).contains(&align.into());
        (is_fine(stat.stx_dio_mem_align) && is_fine(stat.stx_dio_offset_align)).then_some(fd)
    }

    /// Stores what was not found.
    fn keep(&self, worker: &mut Worker, token: Token, first: u32, pages: &[Page], found: &[bool]) {
        if found.is_empty() {
            return self.cache.put(worker, token, first, &[]);
        }
        for run in missing(found) {
            self.cache.put(worker, token, first + run.start as u32, &pages[run]);
        }
    }
}
