//! Pages of files, compressed: what the kernel dropped is found here without reading the file again.
//!
//! The kernel tells nobody which page it drops. So a page enters when it is read from below, while the kernel has it too, and stays, compressed, to
//! a third of its size or so, for when the kernel has dropped it. What was written through the mount enters when it is read.
//!
//! | call           | when                                | does                                                                     |
//! |----------------|-------------------------------------|--------------------------------------------------------------------------|
//! | `begin_read`   | before anything is read             | drops what was read under another stamp; gives a token                   |
//! | `get`          | then                                | the pages that are here                                                  |
//! | `put`          | the others were read below          | stores them, if the token is still good                                  |
//! | `begin_write`  | before a write, until it is done    | drops the range, makes all tokens of the file void, and new ones useless |
//!
//! **Never stale.** A token is of the file's generation. A write makes a new one before it begins and again when it is done, so what a read took
//! from below before or during a write is not stored after it. A page that is got is checked to be still the same place and version after it was
//! decompressed, under the lock.
//!
//! **Memory.** What pages cost is estimated when they come ([`index::Index::charge`]) and kept below 15/16 of the limit by letting others go
//! ([`queues`]); the store refuses at the limit itself, and then a quarter goes. A page that does not compress is kept only when it comes again soon: it costs
//! what it would in the kernel's cache, which had it already. Half-empty spans are emptied by [`Cache::compact`].
//!
//! Lock: one, the index. Around the store only where a page is discarded, never where one is compressed, decompressed or read below.

mod ghost;
mod index;
mod queues;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use compcache_store::{
    Codec, Page, PageIndex, Pool, PoolConfig, Read, Store, StoreConfig, StoreError, Worker, Written,
};
use rustix::time::{ClockId, clock_gettime};

use crate::stamp::{FileId, Stamp};
use crate::stats::FsStats;
use ghost::Ghost;
use index::{Files, Index};
use queues::Queues;

/// Addresses for the pool: the limit can grow to a third of it and more.
const RESERVE_BYTES: u64 = 512 << 30;
/// The ghost remembers a page for so many bytes of the limit: as many pages as compress to that.
const GHOST_PER_BYTES: u64 = 2048;
const GHOST_PAGES_MAX: u64 = 1 << 22;
/// Below this there is no room for a pool's tables, and nothing is kept.
const LEAST_BYTES: u64 = 1 << 20;
/// The index is counted in steps of this.
const OWN_STEP_BYTES: u64 = 64 << 10;
/// Objects moved by one step of compaction.
const COMPACTED_AT_ONCE: usize = 64;

/// Steps that whoever meets a full store makes: a millisecond or two.
const COMPACTED_WHEN_FULL: usize = 16;

/// What a read needs to store what it reads.
#[derive(Clone, Copy)]
pub struct Token {
    slot: u32,
    generation: u64,
    keeps: bool,
}

pub struct Cache {
    index: Mutex<Index>,
    pool: Arc<Pool>,
    store: Arc<Store>,
    /// Pages were let go since compaction last looked.
    discarded: AtomicBool,
    found: AtomicU64,
    missed: AtomicU64,
    stored: AtomicU64,
    refused: AtomicU64,
    rejected: AtomicU64,
    flushed: AtomicU64,
    evicted: AtomicU64,
}

impl Cache {
    /// An empty cache.
    ///
    /// # Errors
    /// Those of making a store: the system refuses addresses (RLIMIT_AS), or the codec is none.
    pub fn new(limit_bytes: u64, codec: Codec) -> Result<Cache, StoreError> {
        // The limit is set with each change of what the index takes.
        let store = Store::new(StoreConfig { limit_bytes: 0, reserve_bytes: RESERVE_BYTES, ..StoreConfig::default() })?;
        let pool = store.create_pool(PoolConfig { codec, ..PoolConfig::default() })?;
        let index = Index {
            files: Files::default(),
            queues: Queues::new(),
            ghost: ghost(limit_bytes),
            charged_bytes: 0,
            limit_bytes,
        };
        let zero = || AtomicU64::new(0);
        let cache = Cache {
            index: Mutex::new(index),
            pool,
            store,
            discarded: AtomicBool::new(false),
            found: zero(),
            missed: zero(),
            stored: zero(),
            refused: zero(),
            rejected: zero(),
            flushed: zero(),
            evicted: zero(),
        };
        cache.fit_store(&cache.lock());
        Ok(cache)
    }

    /// What a thread needs to get and put pages.
    ///
    /// # Errors
    /// The system refuses memory.
    pub fn worker(&self) -> Result<Worker, StoreError> {
        Worker::new(&self.store, now_ns)
    }

    /// A read of a file that has this stamp begins. Unless it `is_settled`, nothing that is read now will be kept.
    pub fn begin_read(&self, id: FileId, stamp: Stamp, is_settled: bool) -> Token {
        let mut index = self.lock();
        let slot = index.files.make(id);
        if index.files.at(slot).is_some_and(|file| file.seen != Some(stamp)) {
            self.drop_pages(&mut index, slot, 0, u32::MAX);
            if let Some(file) = index.files.at(slot) {
                file.seen = Some(stamp);
            }
        }
        match index.files.at(slot) {
            Some(file) => Token { slot, generation: file.generation, keeps: is_settled && file.writers == 0 },
            None => Token { slot, generation: 0, keeps: false },
        }
    }

    /// Reads the pages from `first` on that are here into `pages`, and says of each in `found` whether it was.
    pub fn get(&self, worker: &mut Worker, token: Token, first: u32, pages: &mut [Page], found: &mut [bool]) {
        found.fill(false);
        let end = first.saturating_add(pages.len() as u32);
        let mut places = Vec::new();
        {
            let index = &mut *self.lock();
            if let Some(file) = index.files.at(token.slot).filter(|file| file.generation == token.generation) {
                places.extend(file.pages.range(first..end).map(|(page, place)| (*page, *place, 0)));
            }
            for (_, place, version) in &mut places {
                index.queues.count_read(*place);
                *version = index.queues.version(*place);
            }
        }
        for (page, place, _) in &places {
            let at = (page - first) as usize;
            // A damaged page is read below instead; it is replaced when it has gone.
            found[at] = self.pool.read(worker, PageIndex((*place).into()), &mut pages[at]) == Ok(Read::Done);
        }
        let index = self.lock();
        for (page, place, version) in &places {
            found[(page - first) as usize] &= index.queues.version(*place) == *version;
        }
        drop(index);
        let here = found.iter().filter(|found| **found).count() as u64;
        self.found.fetch_add(here, Relaxed);
        self.missed.fetch_add(found.len() as u64 - here, Relaxed);
    }

    /// Stores pages that were read below since `token` was given, those from `first` on. To be called once for each run, and with
    /// none if nothing was read.
    pub fn put(&self, worker: &mut Worker, token: Token, first: u32, pages: &[Page]) {
        let Some(places) = self.reserve(token, first, pages.len()) else { return };
        let mut written = Vec::with_capacity(places.len());
        let mut is_full = false;
        for (page, place) in places {
            let index = PageIndex(place.into());
            let stored =
                if is_full { None } else { self.pool.write(worker, index, &pages[(page - first) as usize]).ok() };
            is_full |= stored.is_none();
            written.push((page, place, stored));
        }
        let mut locked = self.lock();
        let index = &mut *locked;
        let is_good = index.is_good(token);
        for (page, place, stored) in written {
            self.settle(index, token.slot, page, place, stored.filter(|_| is_good));
        }
        self.fit_store(index);
        let target = index.limit_bytes / 16 * if is_full { 12 } else { 15 };
        self.shrink(index, target.saturating_sub(index.ghost.bytes()));
        index.files.tidy(token.slot);
        drop(locked);
        if is_full {
            self.make_room(worker);
        }
    }

    /// What was let go of leaves spans half empty; some of them are emptied at once, so that the next pages find room.
    fn make_room(&self, worker: &mut Worker) {
        for _ in 0..COMPACTED_WHEN_FULL {
            if self.store.compact(worker, COMPACTED_AT_ONCE).finished {
                return;
            }
        }
    }

    /// Takes places for the pages that are not here yet; `None` if the token is void.
    fn reserve(&self, token: Token, first: u32, count: usize) -> Option<Vec<(u32, u32)>> {
        let index = &mut *self.lock();
        if !index.is_good(token) || index.limit_bytes < LEAST_BYTES {
            index.files.tidy(token.slot);
            return None;
        }
        let here =
            |index: &mut Index, page| index.files.at(token.slot).is_some_and(|file| file.pages.contains_key(&page));
        let mut places = Vec::with_capacity(count);
        for page in first..first.saturating_add(count as u32) {
            if !here(index, page)
                && let Some(place) = index.queues.take()
            {
                places.push((page, place));
            }
        }
        Some(places)
    }

    /// Decides of one page that was written to the pool: admitted, or let go of.
    fn settle(&self, index: &mut Index, slot: u32, page: u32, place: u32, stored: Option<Written>) {
        let Some((written, file)) = stored.zip(index.files.at(slot)) else {
            self.refused.fetch_add(1, Relaxed);
            return self.release(index, place);
        };
        let (id, is_here) = (file.id, file.pages.contains_key(&page));
        if is_here {
            // Another read of the same page was quicker.
            return self.release(index, place);
        }
        let was_ghost = index.ghost.take(id, page);
        let bytes = match written {
            Written::SameFilled => 0,
            Written::Compressed { bytes } => bytes,
            Written::Raw if was_ghost => 4096,
            Written::Raw => {
                index.ghost.remember(id, page);
                self.rejected.fetch_add(1, Relaxed);
                return self.release(index, place);
            }
        };
        index.admit(slot, page, place, bytes, was_ghost);
        self.stored.fetch_add(1, Relaxed);
    }

    /// A write to a file begins; it ends when the answer is dropped. `pages` of it are dropped, by numbers from .. to.
    pub fn begin_write(&self, id: FileId, pages: (u64, u64)) -> Writing<'_> {
        let index = &mut *self.lock();
        let slot = index.files.make(id);
        self.drop_pages(index, slot, clamp(pages.0), clamp(pages.1));
        if let Some(file) = index.files.at(slot) {
            file.writers += 1;
        }
        Writing { cache: self, slot, pages, becomes: None }
    }

    /// Drops all pages of a file that is no more.
    pub fn drop_file(&self, id: FileId) {
        let index = &mut *self.lock();
        if let Some((slot, _)) = index.files.find(id) {
            self.drop_pages(index, slot, 0, u32::MAX);
            index.files.tidy(slot);
        }
    }

    /// Changes the limit, in bytes; what does not fit any more goes at once, and the memory with the next compaction.
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        let index = &mut *self.lock();
        index.limit_bytes = limit_bytes;
        index.ghost = ghost(limit_bytes);
        self.fit_store(index);
        let target = if limit_bytes < LEAST_BYTES { 0 } else { limit_bytes / 16 * 15 };
        self.shrink(index, target.saturating_sub(index.ghost.bytes()));
    }

    /// Changes what pages are compressed with from now on.
    ///
    /// # Errors
    /// [`StoreError::NoSuchCodec`].
    pub fn set_codec(&self, codec: Codec) -> Result<(), StoreError> {
        self.pool.set_codec(codec)
    }

    /// Gives memory of half-empty spans back, if pages have gone since this was last called.
    pub fn compact(&self, worker: &mut Worker) {
        if self.discarded.swap(false, Relaxed) {
            while !self.store.compact(worker, COMPACTED_AT_ONCE).finished {}
        }
    }

    /// The statistics now.
    pub fn stats(&self) -> FsStats {
        let index = self.lock();
        let (limit_bytes, own_bytes, files) = (index.limit_bytes, index.own_bytes(), index.files.count());
        drop(index);
        let pool = self.pool.stats();
        FsStats {
            succ_gets: self.found.load(Relaxed),
            failed_gets: self.missed.load(Relaxed),
            puts: self.stored.load(Relaxed),
            failed_puts: self.refused.load(Relaxed),
            rejected_puts: self.rejected.load(Relaxed),
            flushes: self.flushed.load(Relaxed),
            evictions: self.evicted.load(Relaxed),
            files: files as u64,
            pages_stored: pool.pages_stored(),
            zero_pages: pool.same_pages,
            orig_data_size: pool.orig_data_size,
            compr_data_size: pool.compr_data_size,
            mem_used_total: self.store.mem_used_total_bytes() + own_bytes,
            memlimit: limit_bytes,
        }
    }

    /// Makes the tokens of a file void, and drops its pages from `first` to before `end` (to the last, if that is `u32::MAX`).
    fn drop_pages(&self, index: &mut Index, slot: u32, first: u32, end: u32) {
        let generation = index.files.next_generation();
        let Some(file) = index.files.at(slot) else { return };
        file.generation = generation;
        let gone: Vec<u32> = if first == 0 && end == u32::MAX {
            std::mem::take(&mut file.pages).into_values().collect()
        } else {
            let pages: Vec<u32> = file.pages.range(first..end).map(|(page, _)| *page).collect();
            pages.iter().filter_map(|page| file.pages.remove(page)).collect()
        };
        self.flushed.fetch_add(gone.len() as u64, Relaxed);
        for place in gone {
            index.charged_bytes -= Index::charge(index.queues.bytes_of(place));
            self.release(index, place);
        }
    }

    /// Leaves to the store what the index does not take, of which it is told in steps.
    fn fit_store(&self, index: &Index) {
        let own_bytes = index.own_bytes().next_multiple_of(OWN_STEP_BYTES);
        let rest = index.limit_bytes.saturating_sub(own_bytes);
        if rest != self.store.limit_bytes() {
            self.store.set_limit_bytes(rest);
        }
    }

    fn shrink(&self, index: &mut Index, target_bytes: u64) {
        while index.charged_bytes > target_bytes {
            let Some(place) = index.evict() else { return };
            self.evicted.fetch_add(1, Relaxed);
            self.release(index, place);
        }
    }

    fn release(&self, index: &mut Index, place: u32) {
        self.pool.discard(PageIndex(place.into()));
        self.discarded.store(true, Relaxed);
        index.queues.release(place);
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Index {
    fn is_good(&mut self, token: Token) -> bool {
        let good = |file: &&mut index::CachedFile| file.generation == token.generation && file.writers == 0;
        token.keeps && self.files.at(token.slot).as_ref().is_some_and(good)
    }
}

/// A write under way.
pub struct Writing<'c> {
    cache: &'c Cache,
    slot: u32,
    pages: (u64, u64),
    becomes: Option<Stamp>,
}

impl Writing<'_> {
    /// The file has this stamp because of the write, and of nothing else: what else is kept of it stays good.
    pub fn becomes(&mut self, stamp: Stamp) {
        self.becomes = Some(stamp);
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let index = &mut *self.cache.lock();
        self.cache.drop_pages(index, self.slot, clamp(self.pages.0), clamp(self.pages.1));
        if let Some(file) = index.files.at(self.slot) {
            file.writers -= 1;
            if self.becomes.is_some() && file.seen.is_some() {
                file.seen = self.becomes;
            }
        }
        index.files.tidy(self.slot);
    }
}

fn ghost(limit_bytes: u64) -> Ghost {
    Ghost::new((limit_bytes / GHOST_PER_BYTES).clamp(64, GHOST_PAGES_MAX) as usize)
}

/// Pages beyond the last that is kept are not here anyway.
fn clamp(page: u64) -> u32 {
    u32::try_from(page).unwrap_or(u32::MAX)
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests;
