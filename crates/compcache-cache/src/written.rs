//! What was written, on its way into the pool.
//!
//! ```text
//!   begin_write          done: copied             keep_written: compressed
//!        |------ write ------|-------- queue ---------------|------> pool
//!        +---- another write to one of the pages begins: it is not kept ----+
//! ```
//!
//! A write must ask nobody for memory, nor wait for compression, so its pages are copied into buffers that are there, a 16th of the
//! limit or 2 MiB, and who wrote goes on. (It takes the index's lock as reads do, under which those who store ask for a few bytes now and then.) A thread of the front end has them stored; while it lags behind, what finds no buffer is not kept. Without
//! such a thread there are no buffers.
//!
//! **Never stale.** Of two writes that overlap in time and in pages nobody knows which came last below, so neither's pages are kept. A write
//! that begins later makes void what waits here of its pages, as it drops those in the pool.
//!
//! No lock here: all of it belongs to the index.

use std::collections::VecDeque;

use compcache_store::Page;

use crate::FileId;

/// Buffers take so large a share of the limit.
const SHARE: u64 = 16;
const PAGES: std::ops::RangeInclusive<u64> = 16..=512;
const PAGE_BYTES: u64 = 4096;
/// Writes under way at a time, before their list asks for memory: more than there are threads and parts of requests.
const WRITES: usize = 1024;

/// A write under way, or being copied.
struct Write {
    number: u64,
    id: FileId,
    pages: (u64, u64),
    is_alone: bool,
}

/// A page that waits.
pub struct Waiting<S> {
    pub id: FileId,
    pub page: u32,
    /// What the file looks like with it.
    pub stamp: S,
    /// Nothing newer was written since.
    pub is_good: bool,
    /// With whoever compresses it, if it is not here.
    content: Option<Box<Page>>,
}

pub struct WrittenPages<S> {
    writes: Vec<Write>,
    begun: u64,
    queue: VecDeque<Waiting<S>>,
    free: Vec<Box<Page>>,
    buffers: usize,
    /// Somebody compresses the first of the queue.
    is_kept: bool,
}

fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 < b.1 && b.0 < a.1
}

impl<S: Copy + PartialEq> WrittenPages<S> {
    pub fn new() -> WrittenPages<S> {
        let (writes, queue) = (Vec::with_capacity(WRITES), VecDeque::new());
        WrittenPages { writes, begun: 0, queue, free: Vec::new(), buffers: 0, is_kept: false }
    }

    /// How many buffers a limit allows for.
    pub fn buffers_wanted(limit_bytes: u64) -> usize {
        let pages = limit_bytes / SHARE / PAGE_BYTES;
        if limit_bytes < crate::LEAST_BYTES { 0 } else { pages.clamp(*PAGES.start(), *PAGES.end()) as usize }
    }

    /// How many there are.
    pub fn buffers(&self) -> usize {
        self.buffers
    }

    /// Memory of the buffers, and of the lists.
    pub fn bytes(&self) -> u64 {
        let waiting = self.queue.capacity() * size_of::<Waiting<S>>() + self.free.capacity() * size_of::<Box<Page>>();
        self.buffers as u64 * PAGE_BYTES + (waiting + self.writes.capacity() * size_of::<Write>()) as u64
    }

    /// More of them; or fewer, if there are more than so many.
    pub fn fit_buffers(&mut self, wanted: usize, more: Vec<Box<Page>>) {
        let unused = self.buffers.saturating_sub(wanted).min(self.free.len());
        self.free.truncate(self.free.len() - unused);
        self.buffers -= unused;
        self.buffers += more.len();
        self.free.extend(more);
        // All may wait, and all may be free, without asking for memory.
        self.free.reserve(self.buffers - self.free.len());
        self.queue.reserve(self.buffers - self.queue.len());
    }

    /// A write begins; what it is called until it ends.
    pub fn begin(&mut self, id: FileId, pages: (u64, u64)) -> u64 {
        let mut is_alone = true;
        for other in self.writes.iter_mut().filter(|other| other.id == id && overlap(other.pages, pages)) {
            (other.is_alone, is_alone) = (false, false);
        }
        self.outdate(id, pages);
        self.begun += 1;
        self.writes.push(Write { number: self.begun, id, pages, is_alone });
        self.begun
    }

    /// Its pages are in the queue, or will not be.
    pub fn end(&mut self, number: u64) {
        if let Some(at) = self.writes.iter().position(|write| write.number == number) {
            self.writes.swap_remove(at);
        }
    }

    /// Whether no other write met this one so far.
    pub fn is_alone(&self, number: u64) -> bool {
        self.writes.iter().any(|write| write.number == number && write.is_alone)
    }

    /// What waits of these pages is not what the file has, or need not be.
    pub fn outdate(&mut self, id: FileId, pages: (u64, u64)) {
        for waiting in self.queue.iter_mut().filter(|waiting| waiting.id == id) {
            waiting.is_good &= !(pages.0..pages.1).contains(&waiting.page.into());
        }
    }

    /// What waits, and what is being written, is not to be kept: of one file, or of all.
    pub fn outdate_all(&mut self, id: Option<FileId>) {
        let is_meant = |other: FileId| id.is_none_or(|id| other == id);
        self.queue.iter_mut().filter(|waiting| is_meant(waiting.id)).for_each(|waiting| waiting.is_good = false);
        self.writes.iter_mut().filter(|write| is_meant(write.id)).for_each(|write| write.is_alone = false);
    }

    /// The file looks different because of a write, and of nothing else.
    pub fn becomes(&mut self, id: FileId, stamp: S) {
        self.queue.iter_mut().filter(|waiting| waiting.id == id).for_each(|waiting| waiting.stamp = stamp);
    }

    /// A buffer to copy a page into.
    pub fn buffer(&mut self) -> Option<Box<Page>> {
        self.free.pop()
    }

    pub fn give_back(&mut self, buffer: Box<Page>) {
        self.free.push(buffer);
    }

    pub fn push(&mut self, id: FileId, page: u32, stamp: S, content: Box<Page>) {
        self.queue.push_back(Waiting { id, page, stamp, is_good: true, content: Some(content) });
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes the contents of the first pages of the queue, at most as many as there is room for in `contents`: to be given
    /// back with as many calls of `pop`. How many; none if somebody else is at it.
    pub fn take(&mut self, contents: &mut [Option<Box<Page>>]) -> usize {
        if self.is_kept {
            return 0;
        }
        let taken =
            self.queue.iter_mut().zip(contents).map(|(waiting, content)| *content = waiting.content.take()).count();
        self.is_kept = taken > 0;
        taken
    }

    /// The first of the queue, where it is good.
    pub fn nth(&self, at: usize) -> Option<&Waiting<S>> {
        self.queue.get(at).filter(|waiting| waiting.is_good)
    }

    /// Takes the first of the queue out, whose content is no longer needed: that is kept if there should be so many buffers.
    pub fn pop(&mut self, content: Option<Box<Page>>, limit_bytes: u64) -> Option<Waiting<S>> {
        if self.buffers > Self::buffers_wanted(limit_bytes) {
            self.buffers -= 1;
        } else {
            self.free.extend(content);
        }
        self.queue.pop_front().filter(|waiting| waiting.is_good)
    }

    /// What was taken has been given back.
    pub fn kept(&mut self) {
        self.is_kept = false;
    }
}
