//! A write under way, and what becomes of it.

use std::slice;
use std::sync::atomic::Ordering::Relaxed;

use compcache_store::Page;

use crate::index::Index;
use crate::{Cache, FileId, KEPT_AT_ONCE};

/// A write under way.
pub struct Writing<'c, S: Copy + PartialEq> {
    cache: &'c Cache<S>,
    id: FileId,
    pages: (u64, u64),
    /// What it is called among those that are written.
    number: u64,
    is_over: bool,
}

impl<'c, S: Copy + PartialEq> Writing<'c, S> {
    pub(crate) fn new(cache: &'c Cache<S>, id: FileId, pages: (u64, u64), number: u64) -> Writing<'c, S> {
        Writing { cache, id, pages, number, is_over: false }
    }

    /// The write is done, the file below has this stamp because of it and of nothing else, so that what else is kept of it stays good; and it has
    /// these pages from `first` on, of those that the write was begun for, and behind them, if that is not empty, its `end`, less than a page. They are
    /// kept if there is a buffer for them, and no other write came near.
    pub fn done(mut self, stamp: S, first: u64, pages: &[Page], end: &[u8]) {
        self.is_over = true;
        self.end(&mut self.cache.lock(), Some(stamp));
        let mut next = first;
        for pages in pages.chunks(KEPT_AT_ONCE) {
            // Those behind would find no buffer, either.
            if !self.keep(stamp, next, pages) {
                return;
            }
            next += pages.len() as u64;
        }
        if !end.is_empty() {
            let mut last = [0; 4096];
            last[..end.len()].copy_from_slice(end);
            self.keep(stamp, next, slice::from_ref(&last));
        }
    }

    /// Copies a few pages into the queue. Returns whether there is any use in more. A write that meets this one in between makes
    /// them not be kept; so does one that comes later.
    fn keep(&self, stamp: S, first: u64, pages: &[Page]) -> bool {
        let mut buffers = [const { None }; KEPT_AT_ONCE];
        {
            let written = &mut self.cache.lock().written;
            if written.buffers() == 0 {
                return false;
            }
            buffers.iter_mut().take(pages.len()).for_each(|buffer| *buffer = written.buffer());
        }
        let mut copied = 0;
        for (page, buffer) in pages.iter().zip(&mut buffers) {
            if let Some(buffer) = buffer {
                **buffer = *page;
                copied += 1;
            }
        }
        self.cache.refused.fetch_add((pages.len() - copied) as u64, Relaxed);
        let written = &mut self.cache.lock().written;
        let (is_alone, was_empty) = (written.is_alone(self.number), written.is_empty());
        for (buffer, page) in buffers.into_iter().flatten().zip(first..) {
            let is_of_write = (self.pages.0..self.pages.1).contains(&page);
            match u32::try_from(page).ok().filter(|page| is_alone && is_of_write && *page != u32::MAX) {
                Some(page) => written.push(self.id, page, stamp, buffer),
                None => written.give_back(buffer),
            }
        }
        if was_empty {
            self.cache.written.notify_one();
        }
        copied == pages.len()
    }

    /// Nothing is being written any more. What the file looks like now, if it is known that nobody else has changed it.
    fn end(&self, index: &mut Index<S>, becomes: Option<S>) {
        index.turns.next(self.id).writers -= 1;
        if let Some(stamp) = becomes {
            index.written.becomes(self.id, stamp);
        }
        if let Some((slot, file)) = index.files.find(self.id) {
            if becomes.is_some() && file.seen.is_some() {
                file.seen = becomes;
            }
            self.cache.drop_pages(index, slot, clamp(self.pages.0), clamp(self.pages.1));
            index.files.tidy(slot);
        }
    }
}

impl<S: Copy + PartialEq> Drop for Writing<'_, S> {
    fn drop(&mut self) {
        let index = &mut *self.cache.lock();
        if !self.is_over {
            self.end(index, None);
        }
        index.written.end(self.number);
    }
}

/// Pages beyond the last that is kept are not here anyway.
pub fn clamp(page: u64) -> u32 {
    u32::try_from(page).unwrap_or(u32::MAX)
}
