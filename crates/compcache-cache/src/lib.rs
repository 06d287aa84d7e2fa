//! Pages of files and disks, compressed, as many as a limit allows: what was dropped elsewhere is found here without reading below again.
//!
//! ```text
//!    compcache-fs      pages of the files of a tree        compcache-block      blocks of a device
//!          \                                                   /
//!           +----------------  a cache  ----------------------+     which pages, which go, which are good
//!                                 |
//!                       compcache-store: a pool                     their bytes, compressed
//! ```
//!
//! A *file* here is whatever has pages by number, under a [`FileId`]: a file of a tree, or a megabyte of a disk. What tells one version of it from
//! another is its *stamp*, of whatever type the front end has for that; a front end that hears of every change has none, `()`.
//!
//! The kernel tells nobody which page it drops. So a page enters when it is read from below or written, while the kernel has it too, and stays,
//! compressed, to a third of its size or so, for when the kernel has dropped it. What was written enters by a queue (`written`), if a thread of
//! the front end serves that.
//!
//! | call           | when                                | does                                                                     |
//! |----------------|-------------------------------------|--------------------------------------------------------------------------|
//! | `begin_read`   | before anything is read             | drops what was read under another stamp; gives a token                   |
//! | `get`          | then                                | the pages that are here                                                  |
//! | `put`          | the others were read below          | stores them, if the token is still good                                  |
//! | `begin_write`  | before a write, until it is done    | drops the range, makes all tokens of the file void, and new ones useless |
//! | `done`         | it is done                          | has its pages wait to be stored                                          |
//! | `keep_up`      | all the time, by a thread of its own | stores them, empties half-empty spans, compresses cold pages again (`cold`) |
//!
//! **Never stale.** A token is of a generation. A write makes a new one before it begins and again when it is done, so what a read took
//! from below before or during a write is not stored after it. A page that is got is checked to be still the same place and version after it was
//! decompressed, under the lock.
//!
//! **Memory.** What pages cost is estimated when they come (`index::charge`) and kept below 15/16 of the limit by letting others go
//! (`queues`); the store refuses at the limit itself, and then as many go, and at least a quarter of the limit is free of charges. A page that does not compress is kept only when it comes again soon: it costs
//! what it would in the kernel's cache, which had it already. Half-empty spans are emptied by [`Cache::compact`].
//!
//! **Allocations.** To find pages, and to write, asks nobody for memory (tests/allocation.rs of compcache-block): a write may be the kernel's, for want of it. To store pages does,
//! for the index.
//!
//! Lock: one, the index. Around the store only where a page is discarded, never where one is compressed, decompressed or read below.
//! Where very many pages go, they go in parts (`parts`).

#![deny(unsafe_code)]

mod admission;
mod aligned;
mod cold;
mod ghost;
mod index;
mod miniature;
mod parts;
pub mod pressure;
mod queues;
mod runs;
mod shrinker;
mod stats;
mod writing;
mod written;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use compcache_store::{
    Codec, Page, PageIndex, Pool, PoolConfig, Read, Store, StoreConfig, StoreError, Worker, Written,
};
use rustix::time::{ClockId, clock_gettime};

pub use aligned::Aligned;
pub use cold::Recompress;
pub use runs::{exactly_missing, missing};
pub use stats::CacheStats;
pub use writing::Writing;

use admission::Admission;
use cold::{Cold, TOOLS_SHARE};
use ghost::Ghost;
use index::{Files, Index, Turns};
use miniature::{Miniatures, soon_pages};
use parts::GONE_AT_ONCE;
use queues::Queues;
use shrinker::Shrinker;
use writing::clamp;
use written::WrittenPages;

/// Addresses for the pool: the limit can grow to a third of it and more.
const RESERVE_BYTES: u64 = 512 << 30;
/// The ghost remembers a page for so many bytes of the limit: as many pages as compress to that.
const GHOST_PER_BYTES: u64 = 2048;
const GHOST_PAGES_MAX: u64 = 1 << 22;
/// Of a limit: below this there is no room for a pool's tables, and nothing is kept.
pub const LEAST_BYTES: u64 = 1 << 20;
/// The index is counted in steps of this.
const OWN_STEP_BYTES: u64 = 64 << 10;
/// Objects moved by one step of compaction.
const COMPACTED_AT_ONCE: usize = 64;

/// Steps that whoever meets a full store makes: a millisecond or two.
const COMPACTED_WHEN_FULL: usize = 16;

/// Between two looks at whether there is something to compact.
const BETWEEN_COMPACTIONS: Duration = Duration::from_millis(250);

/// Pages that are got or put under one hold of the lock.
const AT_ONCE: usize = 64;
/// Pages that one which comes pushes out at the most, where groups are gathered.
const EVICTED_FOR_ONE: usize = 2;
/// Up to so much of the limit pages leave groups when they are found again: a little more than others have to go above.
const SPARE_PERCENT: u8 = 96;
/// Pages that are copied, or stored of those that wait, under one.
const KEPT_AT_ONCE: usize = 16;

/// Something that has pages, whatever its name: a file's device and number, or what a front end numbers so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The device of a file.
    pub dev: u64,
    /// The file's number on it.
    pub ino: u64,
}

/// What a read needs to store what it reads.
#[derive(Clone, Copy)]
pub struct Token {
    id: FileId,
    slot: u32,
    generation: u64,
    keeps: bool,
}

/// Pages of files that have stamps of type `S`.
pub struct Cache<S> {
    index: Mutex<Index<S>>,
    /// Pages wait to be stored.
    written: Condvar,
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

impl<S: Copy + PartialEq> Cache<S> {
    /// An empty cache.
    ///
    /// # Errors
    /// Those of making a store: the system refuses addresses (RLIMIT_AS), or the codec is none.
    pub fn new(limit_bytes: u64, codec: Codec) -> Result<Cache<S>, StoreError> {
        // The limit is set with each change of what the index takes.
        let store = Store::new(StoreConfig { limit_bytes: 0, reserve_bytes: RESERVE_BYTES, ..StoreConfig::default() })?;
        let pool = store.create_pool(PoolConfig { codec, spare_percent: SPARE_PERCENT, ..PoolConfig::default() })?;
        let index = Index {
            files: Files::new(),
            turns: Turns::new(),
            queues: Queues::new(),
            ghost: Ghost::new(ghost_pages(limit_bytes)),
            admission: Admission::default(),
            miniatures: Miniatures::new(ghost_pages(limit_bytes)),
            written: WrittenPages::new(),
            charged_bytes: 0,
            saved_bytes: 0,
            has_groups: false,
            gathers: false,
            expected_bytes: 0,
            recompress: Recompress::default(),
            cold_bytes: 0,
            limit_bytes,
            lent_bytes: 0,
            is_filling: true,
        };
        let zero = || AtomicU64::new(0);
        let cache = Cache {
            index: Mutex::new(index),
            written: Condvar::new(),
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
    pub fn begin_read(&self, id: FileId, stamp: S, is_settled: bool) -> Token {
        let mut guard = self.lock();
        let index = &mut *guard;
        let (mut slot, mut left) = (index.files.make(id), None);
        if index.files.at(slot).is_some_and(|file| file.seen != Some(stamp)) {
            index.turns.next(id);
            if index.files.at(slot).is_some_and(|file| file.seen.is_some()) {
                index.written.outdate_all(Some(id));
            }
            if !self.drop_some(index, slot, 0, u32::MAX) {
                left = index.files.leave(id);
                slot = index.files.make(id);
            }
            if let Some(file) = index.files.at(slot) {
                file.seen = Some(stamp);
            }
        }
        let turn = index.turns.of(id);
        let token = Token { id, slot, generation: turn.generation, keeps: is_settled && turn.writers == 0 };
        drop(guard);
        self.drop_left(left);
        token
    }

    /// Whether all of these pages are here now.
    pub fn has(&self, id: FileId, first: u32, count: usize) -> bool {
        let index = &mut *self.lock();
        let end = first.saturating_add(count as u32);
        index.files.find(id).is_some_and(|(_, file)| file.pages.range(first..end).count() == count)
    }

    /// Whether a write to a file is under way; of one of those that share its turn, perhaps.
    pub fn is_written(&self, id: FileId) -> bool {
        self.lock().turns.of(id).writers > 0
    }

    /// Says of each of the pages from `first` on whether it is here now.
    pub fn find(&self, id: FileId, first: u32, found: &mut [bool]) {
        found.fill(false);
        let index = &mut *self.lock();
        let end = first.saturating_add(found.len() as u32);
        if let Some((_, file)) = index.files.find(id) {
            file.pages.range(first..end).for_each(|(page, _)| found[(page - first) as usize] = true);
        }
    }

    /// Reads the pages from `first` on that are here into `pages`, and says of each in `found` whether it was. One that lies so between others that were not
    /// that it is read below along with them (`missing`) is counted as not found: it saves nothing.
    pub fn get(&self, worker: &mut Worker, token: Token, first: u32, pages: &mut [Page], found: &mut [bool]) {
        self.get_again(worker, token, first, pages, found);
        let saved = self.count_reads(token, first, found);
        self.found.fetch_add(saved as u64, Relaxed);
        self.missed.fetch_add((found.len() - saved) as u64, Relaxed);
    }

    /// The same for pages that were asked for with this token before, and counted then.
    pub fn get_again(&self, worker: &mut Worker, token: Token, first: u32, pages: &mut [Page], found: &mut [bool]) {
        let mut next = first;
        for (pages, found) in pages.chunks_mut(AT_ONCE).zip(found.chunks_mut(AT_ONCE)) {
            self.get_some(worker, token, next, pages, found);
            next = next.saturating_add(AT_ONCE as u32);
        }
    }

    /// Counts the pages of a request that were found as read. Returns how many need not be read below.
    fn count_reads(&self, token: Token, first: u32, found: &[bool]) -> usize {
        let index = &mut *self.lock();
        let end = first.saturating_add(found.len() as u32);
        index.ghost.pass(found.len(), index.queues.length());
        index.miniatures.note(token.id, first..end);
        let read_along = missing(found).map(|run| found[run].iter().filter(|found| **found).count()).sum::<usize>();
        let saved = found.iter().filter(|found| **found).count() - read_along;
        let Some(file) = index.files.at(token.slot).filter(|file| file.id == token.id) else { return saved };
        let mut runs = missing(found).peekable();
        for (page, place) in file.pages.range(first..end) {
            let at = (page - first) as usize;
            while runs.next_if(|run| run.end <= at).is_some() {}
            // Where main holds, it is to hold what saves something: runs that are here as a whole.
            let saves = !index.miniatures.main_holds() || runs.peek().is_none_or(|run| at < run.start);
            if found[at] && saves {
                index.queues.count_read(*place);
            }
        }
        saved
    }

    fn get_some(&self, worker: &mut Worker, token: Token, first: u32, pages: &mut [Page], found: &mut [bool]) {
        found.fill(false);
        // Page, place and version.
        let (mut places, mut count) = ([(0, 0, None); AT_ONCE], 0);
        {
            let index = &mut *self.lock();
            let is_same = index.turns.of(token.id).generation == token.generation;
            if let Some(file) = index.files.at(token.slot).filter(|file| is_same && file.id == token.id) {
                for (page, place) in file.pages.range(first..first.saturating_add(pages.len() as u32)) {
                    places[count] = (*page, *place, index.queues.version(*place));
                    count += 1;
                }
            }
        }
        let places = &places[..count];
        for (page, place, _) in places {
            let at = (page - first) as usize;
            // A damaged page is read below instead; it is replaced when it has gone.
            found[at] = self.pool.read(worker, PageIndex((*place).into()), &mut pages[at]) == Ok(Read::Done);
        }
        let index = self.lock();
        for (page, place, version) in places {
            found[(page - first) as usize] &= index.queues.version(*place) == *version;
        }
    }

    /// Pages were read below, so many in this time: what it saves to find one here, by which it is decided whether new ones are taken (`admission`).
    pub fn took_below(&self, pages: usize, took: Duration) {
        self.lock().admission.took_below(pages, took);
    }

    /// Stores pages that were read below since `token` was given, those from `first` on that are not here. To be called once for each run, and with
    /// none if nothing was read.
    pub fn put(&self, worker: &mut Worker, token: Token, first: u32, pages: &[Page]) {
        // Mostly all was found, and there is nothing to decide.
        let wanted = if pages.is_empty() { Wanted::Known } else { self.decide(token, first, pages.len()) };
        let (mut next, mut is_full) = (first, false);
        for pages in pages.chunks(AT_ONCE) {
            let refused = self.put_some(worker, token, wanted, next, pages);
            if refused > 0 {
                self.make_way(refused);
                is_full = true;
            }
            next = next.saturating_add(AT_ONCE as u32);
        }
        self.lock().files.tidy(token.slot);
        if is_full {
            self.make_room(worker);
        }
    }

    /// Returns how many the store had no room for.
    fn put_some(&self, worker: &mut Worker, token: Token, wanted: Wanted, first: u32, pages: &[Page]) -> usize {
        let mut places = [(0, 0); AT_ONCE];
        let count = self.reserve(token, wanted, first, pages.len(), &mut places);
        let places = &places[..count];
        let (mut written, mut is_full) = ([None; AT_ONCE], false);
        let begun = Instant::now();
        for ((page, place), written) in places.iter().zip(&mut written) {
            if !is_full {
                let page = &pages[(page - first) as usize];
                *written = self.pool.write(worker, PageIndex((*place).into()), page).ok();
                is_full = written.is_none();
            }
        }
        let (took, stored) = (begun.elapsed(), written.iter().flatten().count());
        let index = &mut *self.lock();
        index.admission.took_compressing(stored, took);
        let is_good = index.is_good(token);
        for ((page, place), written) in places.iter().zip(written) {
            let comes = match wanted {
                Wanted::Again => Comes::Again,
                Wanted::Soon => Comes::Soon,
                Wanted::None | Wanted::Known | Wanted::All => Comes::Read,
            };
            self.settle(index, token.slot, *page, *place, written.filter(|_| is_good), comes);
        }
        self.trim(index, count);
        count - stored
    }

    /// Lets go of what has become too much, after so many pages came. Where groups are gathered, their memory comes a little later than their pages go.
    fn trim(&self, index: &mut Index<S>, came: usize) {
        self.fit_store(index);
        let target_bytes = index.target_bytes(15);
        let more = if index.gathers_in_time() { 0 } else { GONE_AT_ONCE };
        let most = EVICTED_FOR_ONE * came + more;
        self.shrink_to(index, |_| target_bytes, true, most);
    }

    /// Stores pages that were written and wait for it; if there are none, waits for them, for so long at most. For one thread,
    /// again and again: with its first call what is written begins to be kept.
    pub fn keep_written(&self, worker: &mut Worker, patience: Duration) {
        let (wanted, there) = {
            let index = self.lock();
            (WrittenPages::<S>::buffers_wanted(index.limit_bytes), index.written.buffers())
        };
        if wanted != there {
            // Not of zeroes: the memory is to be there, and not to come with the first write.
            let more = (there..wanted).map(|_| Box::new([0xff; 4096])).collect();
            let index = &mut *self.lock();
            index.written.fit_buffers(wanted, more);
            self.trim(index, KEPT_AT_ONCE);
        }
        let index = self.lock();
        let waited = self.written.wait_timeout_while(index, patience, |index| index.written.is_empty());
        drop(waited);
        let begun = Instant::now();
        while self.keep_some(worker) && begun.elapsed() < BETWEEN_COMPACTIONS {}
    }

    /// Returns whether there may be more.
    fn keep_some(&self, worker: &mut Worker) -> bool {
        let mut contents = [const { None }; KEPT_AT_ONCE];
        let mut places = [None; KEPT_AT_ONCE];
        let taken = {
            let index = &mut *self.lock();
            let taken = index.written.take(&mut contents);
            for (at, place) in places.iter_mut().enumerate().take(taken) {
                let is_wanted = index.written.nth(at).is_some() && index.limit_bytes >= LEAST_BYTES;
                *place = if is_wanted { index.queues.take() } else { None };
            }
            taken
        };
        if taken == 0 {
            return false;
        }
        let (mut stored, mut is_full) = ([None; KEPT_AT_ONCE], false);
        for ((content, place), stored) in contents.iter().zip(places).zip(&mut stored) {
            if let (Some(content), Some(place), false) = (content, place, is_full) {
                *stored = self.pool.write(worker, PageIndex(place.into()), content).ok();
                is_full = stored.is_none();
            }
        }
        {
            let index = &mut *self.lock();
            for ((content, place), stored) in contents.into_iter().zip(places).zip(stored).take(taken) {
                let waiting = index.written.pop(content, index.limit_bytes);
                let Some(place) = place else { continue };
                let Some(waiting) = waiting else {
                    self.release(index, place);
                    continue;
                };
                let slot = index.files.make(waiting.id);
                let seen = index.files.at(slot).map(|file| *file.seen.get_or_insert(waiting.stamp));
                let stored = stored.filter(|_| seen == Some(waiting.stamp));
                self.settle(index, slot, waiting.page, place, stored, Comes::Written);
                index.files.tidy(slot);
            }
            index.written.kept();
            self.trim(index, taken);
        }
        if is_full {
            self.make_way(taken);
            self.make_room(worker);
        }
        true
    }

    /// What was let go of leaves spans half empty; some of them are emptied at once, so that the next pages find room.
    fn make_room(&self, worker: &mut Worker) {
        for _ in 0..COMPACTED_WHEN_FULL {
            if self.store.compact(worker, COMPACTED_AT_ONCE).finished {
                return;
            }
        }
    }

    /// Decides what is wanted of a run of pages that were read together.
    fn decide(&self, token: Token, first: u32, count: usize) -> Wanted {
        let index = &mut *self.lock();
        index.simulate();
        let pages = first..first.saturating_add(count as u32);
        if !index.is_good(token) || index.limit_bytes < LEAST_BYTES {
            // The record went while they were read, perhaps because nothing of the file was wanted.
            if token.keeps && (index.admission.is_choosy() || index.miniatures.main_holds()) {
                pages.for_each(|page| index.ghost.remember(token.id, page));
            }
            return Wanted::Known;
        }
        let soon = soon_pages(index.queues.length());
        let (mut absent, mut known, mut known_soon) = (0, 0, 0);
        for page in pages {
            if index.files.at(token.slot).is_some_and(|file| !file.pages.contains_key(&page)) {
                absent += 1;
                let age = index.ghost.age(token.id, page);
                known += u64::from(age.is_some());
                known_soon += u64::from(age.is_some_and(|age| age < soon));
            }
        }
        // They were read together, and will be: one that is missing costs as much as all. The ghost forgets some before others.
        if 2 * known > absent {
            index.wants_again(absent, 2 * known_soon > absent)
        } else if absent > 0 && (index.is_filling || index.has_room(absent) || index.admission.takes_new()) {
            Wanted::All
        } else {
            Wanted::Known
        }
    }

    /// Takes places for the pages that are not here yet and are wanted, and says for how many; none if the token is void.
    fn reserve(
        &self,
        token: Token,
        wanted: Wanted,
        first: u32,
        count: usize,
        places: &mut [(u32, u32); AT_ONCE],
    ) -> usize {
        let index = &mut *self.lock();
        if !index.is_good(token) || index.limit_bytes < LEAST_BYTES {
            return 0;
        }
        let (mut taken, mut left_out) = (0, 0);
        for page in first..first.saturating_add(count as u32) {
            if index.files.at(token.slot).is_none_or(|file| file.pages.contains_key(&page)) {
                continue;
            }
            if wanted == Wanted::None || wanted == Wanted::Known && !index.ghost.has(token.id, page) {
                index.ghost.remember(token.id, page);
                left_out += 1;
            } else if let Some(place) = index.queues.take() {
                places[taken] = (page, place);
                taken += 1;
            }
        }
        self.rejected.fetch_add(left_out, Relaxed);
        taken
    }

    /// Decides of one page that was written to the pool: admitted, or let go of.
    fn settle(&self, index: &mut Index<S>, slot: u32, page: u32, place: u32, stored: Option<Written>, comes: Comes) {
        let Some((written, file)) = stored.zip(index.files.at(slot)) else {
            self.refused.fetch_add(1, Relaxed);
            return self.release(index, place);
        };
        let (id, is_here) = (file.id, file.pages.contains_key(&page));
        if is_here {
            // Another read of the same page was quicker.
            return self.release(index, place);
        }
        let is_known = comes != Comes::Written && index.ghost.take(id, page) || comes == Comes::Again;
        let bytes = match written {
            Written::SameFilled => 0,
            Written::Compressed { bytes } => bytes,
            Written::Raw if is_known => 4096,
            Written::Raw => {
                if comes != Comes::Written {
                    index.ghost.remember(id, page);
                }
                self.rejected.fetch_add(1, Relaxed);
                return self.release(index, place);
            }
        };
        // By themselves they challenge nobody.
        let to_main = comes == Comes::Again || is_known && !index.miniatures.main_holds();
        index.admit(slot, page, place, bytes, comes != Comes::Written, to_main);
        self.stored.fetch_add(1, Relaxed);
    }

    /// A write to a file begins; it ends when the answer is dropped. `pages` of it are dropped, by numbers from .. to.
    pub fn begin_write(&self, id: FileId, pages: (u64, u64)) -> Writing<'_, S> {
        let mut number = None;
        self.in_parts(|index| {
            // None comes from here on.
            number.get_or_insert_with(|| {
                index.turns.next(id).writers += 1;
                index.written.begin(id, pages)
            });
            let Some((slot, _)) = index.files.find(id) else { return true };
            let is_done = self.drop_some(index, slot, clamp(pages.0), clamp(pages.1));
            index.files.tidy(slot);
            is_done
        });
        Writing::new(self, id, pages, number.unwrap_or_default())
    }

    /// Drops all pages of a file that is no more.
    pub fn drop_file(&self, id: FileId) {
        let left = {
            let index = &mut *self.lock();
            index.turns.next(id);
            index.written.outdate_all(Some(id));
            index.files.leave(id)
        };
        self.drop_left(left);
    }

    /// Drops all pages of all files, and whatever is being read for them.
    pub fn clear(&self) {
        let index = &mut *self.lock();
        index.turns.next_of_all();
        index.written.outdate_all(None);
        for slot in 0..index.files.slots() {
            self.drop_pages(index, slot, 0, u32::MAX);
            index.files.tidy(slot);
        }
    }

    /// Changes the limit, in bytes; what does not fit any more goes at once, and the memory with the next compaction.
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        // Nearly all of what has to go, as long as the limit is what it was.
        let most_bytes = if limit_bytes < LEAST_BYTES { 0 } else { limit_bytes / 16 * 15 };
        self.in_parts(|index| self.shrink_some(index, most_bytes));
        let index = &mut *self.lock();
        index.is_filling |= limit_bytes > index.limit_bytes - index.lent_bytes;
        (index.limit_bytes, index.lent_bytes) = (limit_bytes, 0);
        if index.cold_bytes > limit_bytes / TOOLS_SHARE {
            // The thread will give them up.
            index.cold_bytes = 0;
        }
        index.ghost = Ghost::new(ghost_pages(limit_bytes));
        index.miniatures = Miniatures::new(ghost_pages(limit_bytes));
        index.written.fit_buffers(WrittenPages::<S>::buffers_wanted(limit_bytes), Vec::new());
        self.fit_store(index);
        // Tables may take more than all of the new limit. So what goes is as many pages as is enough if the tables are given back with them, as they are then.
        let target = if limit_bytes < LEAST_BYTES { 0 } else { index.target_bytes_without_files(15) };
        let unused = |index: &Index<S>| index.queues.unused_bytes(index.queues.places_wanted(limit_bytes));
        let without_files = |index: &Index<S>| target.saturating_sub(index.files.fitted_bytes() + unused(index));
        self.shrink_to(index, without_files, false, usize::MAX);
        self.fit_tables(index);
        index.give_back_files();
        index.queues.give_back(0);
        let with_files = |index: &Index<S>| index.target_bytes(15).saturating_sub(unused(index));
        self.shrink_to(index, with_files, false, usize::MAX);
        self.fit_store(index);
    }

    /// What pages are compressed with.
    pub fn codec(&self) -> Codec {
        self.pool.codec()
    }

    /// Changes that from now on.
    ///
    /// # Errors
    /// [`StoreError::NoSuchCodec`].
    pub fn set_codec(&self, codec: Codec) -> Result<(), StoreError> {
        self.pool.set_codec(codec)
    }

    /// What must be done beside reading and writing, by a thread that does nothing else, as long as there is the cache: memory of
    /// half-empty spans is given back, so is what others need more, cold pages are compressed together, and, with `keeps_written`, what is written is stored.
    pub fn keep_up(cache: &Weak<Cache<S>>, mut worker: Worker, keeps_written: bool) {
        let (mut compacted, mut cold, mut shrinker) = (Instant::now(), Cold::default(), Shrinker::new());
        while let Some(cache) = cache.upgrade() {
            shrinker.look(&cache, &mut worker);
            if compacted.elapsed() >= BETWEEN_COMPACTIONS {
                cache.compact(&mut worker);
                let index = &mut *cache.lock();
                index.simulate();
                cache.trim(index, KEPT_AT_ONCE);
                cache.fit_tables(index);
                compacted = Instant::now();
            }
            let again = cold.go_on(&cache, &mut worker).unwrap_or(BETWEEN_COMPACTIONS);
            let again = again.min(BETWEEN_COMPACTIONS).min(shrinker.again());
            if keeps_written {
                cache.keep_written(&mut worker, again);
            } else {
                drop(cache);
                thread::sleep(again);
            }
        }
    }

    /// The statistics now.
    pub fn stats(&self) -> CacheStats {
        let index = self.lock();
        let (limit_bytes, lent_bytes) = (index.limit_bytes, index.lent_bytes);
        let (own_bytes, files) = (index.own_bytes(), index.files.count());
        drop(index);
        let pool = self.pool.stats();
        CacheStats {
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
            grouped_pages: pool.grouped_pages,
            orig_data_size: pool.orig_data_size,
            compr_data_size: pool.compr_data_size,
            mem_used_total: self.store.mem_used_total_bytes() + own_bytes,
            memlimit: limit_bytes,
            mem_lent: lent_bytes,
        }
    }

    /// Drops the pages of a file from `first` to before `end` (to the last, if that is `u32::MAX`).
    fn drop_pages(&self, index: &mut Index<S>, slot: u32, first: u32, end: u32) {
        while !self.drop_some(index, slot, first, end) {}
    }

    /// Leaves to the store what the index does not take, of which it is told in steps.
    fn fit_store(&self, index: &Index<S>) {
        let own_bytes = index.own_bytes().next_multiple_of(OWN_STEP_BYTES);
        let rest = index.limit_bytes.saturating_sub(own_bytes);
        if rest != self.store.limit_bytes() {
            self.store.set_limit_bytes(rest);
        }
    }

    /// Gives tables back that are too large for the limit, or for what is here. Some of the pages go for it, wherever the queues have them.
    fn fit_tables(&self, index: &mut Index<S>) {
        index.fit_files();
        let wanted = index.queues.places_wanted(index.limit_bytes);
        if !index.queues.has_beyond(wanted) {
            return;
        }
        let mut before = u32::MAX;
        while let Some(place) = index.evict_beyond(wanted, before) {
            self.evicted.fetch_add(1, Relaxed);
            self.release(index, place);
            before = place;
        }
        index.queues.give_back(wanted);
        self.fit_store(index);
    }

    /// Lets pages go, as many as it takes but no more than `most`, where what they may cost changes as they go; in the common way, where a page leaves for each that comes, how they
    /// fared in the small queue says something of new ones.
    fn shrink_to(
        &self,
        index: &mut Index<S>,
        target_bytes: impl Fn(&Index<S>) -> u64,
        is_common: bool,
        mut most: usize,
    ) {
        // What is expected may be long in coming: only what comes in the common way waits for it.
        let cost_bytes = |index: &Index<S>| if is_common { index.cost_bytes() } else { index.full_cost_bytes() };
        loop {
            self.reckon(index);
            if most == 0 || cost_bytes(index) <= target_bytes(index) {
                return;
            }
            while most > 0 && cost_bytes(index) > target_bytes(index) {
                if !self.let_one_go(index, is_common) {
                    return;
                }
                most -= 1;
            }
        }
    }

    fn release(&self, index: &mut Index<S>, place: u32) {
        self.pool.discard(PageIndex(place.into()));
        self.discarded.store(true, Relaxed);
        index.queues.release(place);
    }

    fn lock(&self) -> MutexGuard<'_, Index<S>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S> Index<S> {
    fn is_good(&mut self, token: Token) -> bool {
        let turn = self.turns.of(token.id);
        let is_same = turn.generation == token.generation && turn.writers == 0;
        token.keeps && is_same && self.files.at(token.slot).is_some_and(|file| file.id == token.id)
    }
}

/// What is wanted of a run of pages that were read together, and are not here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// None, though most of them are known to the ghost: main holds.
    None,
    /// Those that the ghost knows.
    Known,
    /// All.
    All,
    /// All, and most of them are known to the ghost.
    Again,
    /// The same, and were remembered a short while ago: they are new once more, for main holds.
    Soon,
}

/// Why a page is to be stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Comes {
    /// It was read below.
    Read,
    /// The same, and most of those that were read with it are known to the ghost.
    Again,
    /// The same, and they are new all the same.
    Soon,
    /// Somebody wrote it, which is no sign that it is read.
    Written,
}

fn ghost_pages(limit_bytes: u64) -> usize {
    (limit_bytes / GHOST_PER_BYTES).clamp(64, GHOST_PAGES_MAX) as usize
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests;
