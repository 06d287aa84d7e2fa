//! The spill: a file for the pages that are too much even compressed (`compcache run --spill`).
//!
//! The pool has a backing ([`compcache_store::Backing`]), and here is who works for it: a *spiller*, which has pages leave for it
//! when the pool uses more than its share, and a few *fetchers*, which read what somebody waits for. Like all of the pager's threads
//! they use the evictor's file table, so that a program which closes every descriptor closes none of theirs.
//!
//! | a fault on a page in the file | who       | what                                                                  |
//! |-------------------------------|-----------|-----------------------------------------------------------------------|
//! | the first time                | handler   | orders it, and what its stream will ask for, and answers other faults |
//! | meanwhile                     | a fetcher | reads the record, and those of other orders that lie near it, with one access, into the orders' buffers, and wakes who waits: it faults again |
//! | the second time               | handler   | opens the record if the page's slot still names it, and copies the page in |
//!
//! So no decision is made twice: what happened between the two (munmap, mremap, madvise, another thread's fault) is in the page's word
//! and slot when it is looked at again, as for any other fault.
//!
//! Where no other fault waits for the handler, and either the program has one thread or the disk is fast ([`Spill::is_fast`]), it does the
//! fetcher's work itself, and then looks at the fault again: to wake a fetcher, the program from there, and the handler once more takes
//! longer than a fast disk (docs/decisions/0027).
//!
//! What the pool may use is adapted ([`Spill::set_limit`], [`crate::share`]). When nothing can be written (the file system is full, the disk failed) there is no
//! limit on the pool, as without a spill, and it is tried again every second.
//!
//! Copies of the process, by fork: [`copies`]. The files: [`files`].
//!
//! Lock order: below the state's; `files`, `orders` and `inline` are not held together, nor over anything but a system call.

mod copies;
mod device_time;
mod files;
mod orders;

use crate::lock::{self, Mutex};
use crate::memory::PAGE;
use crate::pager::{Pager, clock_ns};
use crate::process;
use crate::share::{Reuse, SHARES, Split};
use crate::shared::{Region, SpillNews, Totals};
use crate::sys;
use crate::uffd::Uffd;
use alloc::boxed::Box;
use alloc::sync::Arc;
use compcache_store::{
    Backing, BackingConfig, Batch, Fetcher, Health, MediumError, Page, PageIndex, Pool, Read, Record, Store,
    StoreError, Worker,
};
use copies::Hold;
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use device_time::DeviceTime;
use files::{PartFiles, PartMedium, unnamed_file};
use orders::{ORDERS, Orders, Progress};
use rustix::io::Errno;

/// Files that a process can have pages in: its own, and those of its ancestors.
pub const PARTS: usize = 4;
/// Threads that read.
pub const FETCHERS: usize = 4;
/// Them, and the spiller.
pub const THREADS: usize = FETCHERS + 1;
/// Them, and the handler, which is the first.
const READERS: usize = 1 + FETCHERS;
/// Forks whose children may still read what this process wrote; with more of them, the last ones are waited for together.
const HOLDS: usize = 16;
/// A part is at most a quarter of what a store can address.
const PART_BYTES_MAX: u64 = (512 << 30) / PARTS as u64;
/// Without a limit of its own the file is so many times the memory at most.
const TIMES_RAM: u64 = 16;
/// A segment is so small a share of the memory.
const SEGMENT_SHARE: u64 = 256;
const SEGMENT_BYTES_MAX: u64 = 4 << 20;
/// The pool's share of the memory before anything is known, thousandths.
const SHARE_FIRST: u64 = 300;
/// And for what does not compress, which goes through it.
const SHARE_LEAST: u64 = 150;
/// What a read takes before one was seen.
const READ_NS_FIRST: u64 = 100_000;
/// Longer than this is long; and who was stopped meanwhile, or had to wait for room as well, has not waited for a read all the time.
const READ_NS_MAX: u64 = 1_000_000;
/// The handler reads itself where the disk takes less, though others may have to wait for it.
const FAST_NS: u64 = 200_000;
/// Below this nothing is known of how well the pages compress.
const KNOWN_BYTES: u64 = 256 << 10;
/// Between two attempts when nothing can be written.
const RETRY_NS: u64 = 1_000_000_000;
/// And between two when nothing is worth being written.
const IN_VAIN_NS: u64 = 5_000_000;
/// Between two times that unused room is given back.
const TIDY_NS: u64 = 2_000_000_000;
/// An age is over when so large a share of what is stored was written anew.
const AGE_SHARE: u64 = 16;

/// An order, and where it stands, for who has taken it.
#[derive(Clone, Copy)]
struct Taken {
    place: usize,
    page: u64,
    record: Record,
}

/// What became of the attempt to read a page that is in the file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fetched {
    /// The page is in the buffer.
    Done,
    /// It is not read yet.
    Not,
    /// It cannot be read, now or ever.
    Lost,
}

/// What reads a page at once, in whatever thread.
pub struct Inline {
    worker: Worker,
    fetcher: Fetcher,
    page: Page,
}

/// The spill of one process.
pub struct Spill {
    backing: Arc<Backing>,
    files: Arc<PartFiles>,
    path: Box<[u8]>,
    orders: Mutex<Orders<Record>>,
    buffers: [UnsafeCell<Fetcher>; ORDERS],
    /// Memory of the buffers above and below that has ever been used.
    touched_bytes: AtomicU64,
    /// The handler's, and each fetcher's; how many of those have theirs.
    batches: [UnsafeCell<Batch>; READERS],
    fetchers: AtomicUsize,
    inline: Mutex<Inline>,
    /// The spiller's.
    worker: Mutex<Worker>,
    /// The spiller and the fetchers sleep on these.
    bell: AtomicU32,
    orders_bell: AtomicU32,
    started: AtomicUsize,
    /// Nothing could be written lately: the pool has no limit.
    is_failing: AtomicBool,
    /// When a thread could not be started.
    unstarted_ns: AtomicU64,
    share: AtomicU64,
    reuse: Reuse,
    /// What a read takes, lately: of the device, and until who waits for it has its page.
    device: DeviceTime,
    read_ns: AtomicU64,
    /// Pages written when the age last advanced.
    aged_at: AtomicU64,
    holds: Mutex<[Option<Hold>; HOLDS]>,
    holds_looked_at_ns: AtomicU64,
    /// The page mapped for the fork that is under way.
    held_at: AtomicUsize,
    /// The evictor's thread, whose descriptors these are.
    thread: AtomicU32,
    /// Parts that the copy of a fork that is under way may have pages in.
    parts_in_use: [AtomicBool; PARTS],
    /// Descriptors of the forking thread's table for the child, and what they must be.
    handed: [AtomicI32; PARTS],
    /// Device and inode of the files.
    handed_file: [(AtomicU64, AtomicU64); PARTS],
}

// SAFETY: a buffer is used by the one thread that the progress of its order names, a batch by the one thread it is for; all else is atomics, locks, and data that
// is only read.
unsafe impl Sync for Spill {}
// SAFETY: as above.
unsafe impl Send for Spill {}

/// How large a segment is, and the file at most, for the limits of the tree.
fn config(region: &Region) -> BackingConfig {
    let ram_bytes = region.header.ram_limit_bytes.load(Relaxed);
    let least = *BackingConfig::SEGMENT_BYTES.start() as u64;
    let most = match region.header.spill_max_bytes.load(Relaxed) {
        0 => SEGMENT_BYTES_MAX,
        // Sixteen of them, so that there is room to clean.
        max => (max / 16).next_power_of_two().clamp(least, SEGMENT_BYTES_MAX),
    };
    let segment_bytes = (ram_bytes / SEGMENT_SHARE).next_power_of_two().clamp(least, most);
    let asked = match region.header.spill_max_bytes.load(Relaxed) {
        0 => ram_bytes.saturating_mul(TIMES_RAM),
        max => max,
    };
    // The smallest is enough to write, clean and write again.
    let least_bytes = segment_bytes * BackingConfig::SEGMENTS_LEAST;
    let capacity_bytes = asked.clamp(least_bytes, PART_BYTES_MAX) / segment_bytes * segment_bytes;
    BackingConfig { capacity_bytes, segment_bytes: segment_bytes as usize }
}

impl Spill {
    /// What the pool needs of it, before there is one.
    pub fn backing(path: &CStr, region: &'static Region) -> Result<SpillParts, StoreError> {
        let config = config(region);
        let files = Arc::new(PartFiles {
            files: Mutex::new([const { None }; PARTS]),
            numbers: [const { AtomicI32::new(-1) }; PARTS],
            part_bytes: config.capacity_bytes,
            used_bytes: AtomicU64::new(0),
            segment_bytes: config.segment_bytes as u64,
            region,
        });
        let backing = Backing::new_for_copies(Box::new(PartMedium(files.clone())), config, PARTS)?;
        Ok(SpillParts { backing, files, path: path.to_bytes_with_nul().into() })
    }

    /// Opens what the evictor's file table is to have. Called by the evictor, and again in a copy of the process.
    pub fn open(&self, pager: &Pager) {
        self.thread.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Release);
        self.adopt();
        let Some(part) = self.backing.own_part() else {
            self.is_failing.store(true, Release);
            return pager.region.note_spill(self.why_full(SpillNews::NoPart), 0);
        };
        let path = CStr::from_bytes_with_nul(&self.path).unwrap_or(c"");
        match unnamed_file(path) {
            Ok(file) => self.files.put(part, process::out_of_the_way(file)),
            Err(errno) => {
                self.is_failing.store(true, Release);
                pager.region.note_spill(SpillNews::NoFile, errno.raw_os_error());
            }
        }
    }

    /// What is to be told where nothing more can be written: this, unless there are no numbers for it.
    fn why_full(&self, news: SpillNews) -> SpillNews {
        if self.backing.is_out_of_flights() { SpillNews::NoNumbers } else { news }
    }

    /// Whether there is a file to write to.
    fn has_file(&self) -> bool {
        self.backing.own_part().is_some_and(|part| self.files.numbers[part].load(Acquire) >= 0)
    }

    /// The threads that have been started.
    pub fn threads(&self) -> usize {
        self.started.load(Acquire)
    }

    /// Whether somebody reads what is ordered. In a copy of the process, and where no thread could be had, nobody does.
    pub fn has_fetchers(&self) -> bool {
        self.threads() > 0
    }

    /// Pages leave for the file as the pool needs it.
    pub fn is_relieving(&self) -> bool {
        self.threads() == THREADS && !self.is_failing.load(Acquire)
    }

    /// Memory of ours that is neither in the pool nor there without a spill, bytes.
    pub fn used_bytes(&self) -> u64 {
        let flown = self.backing.own_flights() > 0;
        // An image and the copies for it: docs/design/backing.md.
        let flight = if flown { self.files.segment_bytes * 21 / 10 } else { 0 };
        flight + self.touched_bytes.load(Relaxed)
    }

    /// Bytes of the file that are in use, but for what is being written.
    pub fn file_bytes(&self) -> u64 {
        let stats = self.backing.stats();
        stats.capacity_bytes - stats.free_bytes - stats.flying_bytes
    }

    /// Derives what the pool may use: the share that suits the faults that there were ([`Reuse`]), and while there were few, from how
    /// well the pages compress: a megabyte of pages that compress to a quarter keeps four from the disk in the pool, and one
    /// resident, so it goes with `1 - 1 / ratio`. A quarter of the way at each look.
    ///
    /// With several processes each takes its proportion of what is too much, and all of what is left.
    pub fn set_limit(&self, store: &Store, pool: &Pool, region: &Region, totals: &Totals, resident_pages: u64) {
        if self.is_failing.load(Acquire) || !self.has_file() {
            return store.set_limit_bytes(u64::MAX);
        }
        let (stats, share) = (pool.stats(), self.share.load(Relaxed));
        let ram_bytes = region.header.ram_limit_bytes.load(Relaxed);
        let used = store.mem_used_total_bytes();
        let used_by_all = totals.mem_used_total_bytes.max(used).max(1);
        let mine = |bytes: u64| (u128::from(bytes) * u128::from(used) / u128::from(used_by_all)) as u64;
        let split = Split {
            ram_bytes,
            ours_of_ram_bytes: mine(ram_bytes),
            resident_pages,
            pool_bytes: stats.slot_bytes,
            pool_pages: stats.pages_stored().saturating_sub(stats.same_pages + stats.bd_count),
            same_pages: stats.same_pages,
            file_pages: stats.bd_count,
            device_ns: self.device.ns(),
            read_ns: self.read_ns.load(Relaxed),
        };
        // With a limit of its own what is resident would not grow by what the pool had less.
        let is_adapted = region.header.resident_limit_bytes.load(Relaxed) == 0;
        let best = if is_adapted { self.reuse.best_share(&split, share) } else { None };
        let wanted = best.unwrap_or_else(|| match split.pool_bytes {
            0..KNOWN_BYTES => SHARE_FIRST,
            bytes => {
                let kept = (bytes * 1000).checked_div(split.pool_pages * PAGE as u64).unwrap_or(1000);
                1000u64.saturating_sub(kept).max(SHARE_LEAST)
            }
        });
        let share = (share * 3 + wanted.clamp(*SHARES.start(), *SHARES.end())) / 4;
        self.share.store(share, Relaxed);
        let all = ram_bytes / 1000 * share;
        let limit = match used_by_all.saturating_sub(used) {
            0 => all,
            _ if used_by_all <= all => used + (all - used_by_all),
            _ => mine(all),
        };
        // The tables of what is in the file are not what it is for.
        let limit = limit.max(4 * KNOWN_BYTES) + stats.table_bytes;
        // Not lower at once than what the spiller can have leave while others are taken in.
        store.set_limit_bytes(limit.max(store.limit_bytes().min(used + used / 7)));
    }

    /// A fault on a stored page that was so many pages back.
    pub fn note_fault(&self, region: &Region, back_pages: u64) {
        self.reuse.note(back_pages, region.header.ram_limit_bytes.load(Relaxed));
    }

    /// Has the spiller look, if there is something for it to do; starts it, and the fetchers, the first time. Called by the evictor, and not while frozen.
    pub fn relieve(&self, pager: &'static Pager) {
        let is_started = self.threads() == THREADS;
        if !is_started && self.is_failing.load(Acquire) && self.has_file() {
            if clock_ns() - self.unstarted_ns.load(Relaxed) < RETRY_NS {
                return;
            }
            // As the spiller does where it runs.
            self.is_failing.store(false, Release);
        }
        if !pager.store.wants_reclaim(&self.backing) {
            return;
        }
        if !self.start_threads(pager, THREADS) {
            // Those that have been started stay.
            self.unstarted_ns.store(clock_ns(), Relaxed);
            self.is_failing.store(true, Release);
            pager.region.note_spill(SpillNews::NoFile, Errno::NOMEM.raw_os_error());
            return;
        }
        self.bell.fetch_add(1, Release);
        lock::wake(&self.bell);
    }

    /// Starts threads until there are so many.
    fn start_threads(&self, pager: &'static Pager, threads: usize) -> bool {
        while self.threads() < threads {
            if pager.start_spill_thread(self.threads()).is_err() {
                return false;
            }
            self.started.fetch_add(1, Release);
        }
        true
    }

    /// Has all threads see what is asked of them.
    pub fn wake_all(&self) {
        for bell in [&self.bell, &self.orders_bell] {
            bell.fetch_add(1, Release);
            lock::wake(bell);
        }
    }

    /// In an evictor that goes on where another was, with the same descriptors: starts the threads that there were.
    pub fn go_on(&self, pager: &'static Pager) -> bool {
        self.thread.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Release);
        self.fetchers.store(0, Release);
        let threads = self.started.swap(0, AcqRel);
        self.start_threads(pager, threads)
    }

    /// The spiller's thread.
    pub fn run_spiller(&self, pager: &Pager) -> ! {
        let (mut tried_ns, mut tidied_ns) = (0, 0);
        loop {
            let seen = self.bell.load(Acquire);
            if pager.relay.is_ending() {
                sys::end_thread();
            }
            let now_ns = clock_ns();
            if self.is_failing.load(Acquire) && now_ns - tried_ns > RETRY_NS && self.has_file() {
                // The evictor sets a limit again, and what is above it is tried.
                self.is_failing.store(false, Release);
            }
            // Whether there is more to do, and whether it is wanted though nothing was worth it: both are asked here, for a copy of the
            // process would never be given a lock of the store's that this thread has.
            let looked = self.while_nobody_forks(pager, || {
                if !pager.store.wants_reclaim(&self.backing) {
                    if now_ns - tidied_ns > TIDY_NS {
                        let is_waited_for = || pager.frozen.load(Acquire) || pager.fork_turn.wants_to_freeze();
                        self.backing.tidy(|| !is_waited_for() && !pager.store.wants_reclaim(&self.backing));
                        tidied_ns = now_ns;
                    }
                    return (false, false);
                }
                tried_ns = now_ns;
                let is_busy = self.spill(pager);
                (is_busy, !is_busy && pager.store.wants_reclaim(&self.backing))
            });
            pager.tell_progress();
            match looked {
                Some((true, _)) => {}
                // The bell would be rung every millisecond.
                Some((false, true)) => lock::wait(&AtomicU32::new(0), 0, Some(IN_VAIN_NS)),
                Some((false, false)) => lock::wait(&self.bell, seen, Some(RETRY_NS)),
                None => lock::pause(),
            }
        }
    }

    /// `None` when somebody forks: then nothing may be changed.
    fn while_nobody_forks<T>(&self, pager: &Pager, work: impl FnOnce() -> T) -> Option<T> {
        {
            let mut state = pager.state.lock();
            if pager.frozen.load(Acquire) || pager.fork_turn.wants_to_freeze() {
                return None;
            }
            state.under_way += 1;
        }
        let result = work();
        pager.state.lock().under_way -= 1;
        Some(result)
    }

    /// Writes a segment, or as far as that there is no need any more. Whether there is more to do.
    fn spill(&self, pager: &Pager) -> bool {
        self.publish(pager);
        // However much the file could have: others' files share that, and cleaning begins when there is little of it.
        let gauges = pager.slot().map(|slot| &slot.gauges);
        self.backing.set_room_bytes(self.files.begin(gauges));
        let reclaimed = pager.store.reclaim(&mut self.worker.lock(), &self.backing);
        if let (Ok(reclaimed), Some(slot)) = (&reclaimed, pager.slot()) {
            let written = slot.counters.spill_written_pages.fetch_add(reclaimed.pages as u64, Relaxed);
            if (written - self.aged_at.load(Relaxed).min(written)) * AGE_SHARE > pager.pool.stats().pages_stored() {
                self.aged_at.store(written, Relaxed);
                pager.store.advance_age();
            }
        }
        self.publish(pager);
        self.files.end(gauges);
        match (reclaimed, self.backing.health()) {
            (Ok(reclaimed), Health::Good) => !reclaimed.finished,
            (Err(MediumError::System { errno }), _) => self.fail(pager, SpillNews::WriteFailed, errno),
            (Ok(_), Health::Full) => self.fail(pager, self.why_full(SpillNews::Max), 0),
            (Err(MediumError::NoSpace), _) => self.fail(pager, SpillNews::NoSpace, 0),
            (..) => self.fail(pager, SpillNews::WriteFailed, 0),
        }
    }

    /// Tells what the files have, which may have become less.
    pub fn publish(&self, pager: &Pager) {
        let bytes = self.file_bytes();
        self.files.used_bytes.store(bytes, Relaxed);
        if let Some(slot) = pager.slot() {
            slot.gauges.spill_bytes.store(bytes, SeqCst);
        }
    }

    /// Nothing can be written: the pool takes what there is, and who waits for room waits in vain.
    fn fail(&self, pager: &Pager, news: SpillNews, errno: i32) -> bool {
        pager.region.note_spill(news, errno);
        self.is_failing.store(true, Release);
        pager.store.set_limit_bytes(u64::MAX);
        false
    }

    /// A fetcher's thread.
    pub fn run_fetcher(&self, pager: &Pager, uffd: Uffd) -> ! {
        // SAFETY: the number is this thread's alone.
        let batch = unsafe { &mut *self.batches[1 + self.fetchers.fetch_add(1, Relaxed)].get() };
        loop {
            let seen = self.orders_bell.load(Acquire);
            if pager.relay.is_ending() {
                sys::end_thread();
            }
            let (taken, are_left) = self.take_wanted(batch, None);
            if are_left {
                // Another one begins with what lies elsewhere.
                self.ring_for_orders();
            }
            if taken[0].is_none() {
                lock::wait(&self.orders_bell, seen, None);
                continue;
            }
            self.fetch(batch, &taken);
            wake(&taken, uffd, None);
        }
    }

    /// Takes the order of a page, or the oldest that nobody has taken, and those whose records lie near its; whether there are others. If
    /// somebody has taken the page's, none.
    fn take_wanted(&self, batch: &mut Batch, page: Option<u64>) -> ([Option<Taken>; ORDERS], bool) {
        batch.clear();
        let (mut taken, mut places, mut wanted) = ([None; ORDERS], [(0, 0); ORDERS], 0);
        let mut orders = self.orders.lock();
        for (place, order) in orders.all.iter().enumerate() {
            if order.progress == Progress::Wanted {
                let number = if Some(order.page) == page { 0 } else { order.number };
                places[wanted] = (number, place);
                wanted += 1;
            }
        }
        places[..wanted].sort_unstable();
        if page.is_some() && places[0].0 != 0 {
            return (taken, wanted > 0);
        }
        let mut count = 0;
        for (_, place) in &places[..wanted] {
            let order = &mut orders.all[*place];
            if let Some(record) = order.record.filter(|record| self.backing.add_to(batch, *record)) {
                order.progress = Progress::Reading;
                taken[count] = Some(Taken { place: *place, page: order.page, record });
                count += 1;
            }
        }
        (taken, count < wanted)
    }

    /// Reads what was taken, and says so.
    fn fetch(&self, batch: &mut Batch, taken: &[Option<Taken>; ORDERS]) {
        let begun_ns = clock_ns();
        let mut before = batch.touched_bytes();
        let are_read = self.backing.fetch_batch(batch).is_ok();
        let mut after = batch.touched_bytes();
        if are_read && taken[0].is_some() {
            self.device.note(clock_ns() - begun_ns);
        }
        let mut read = [false; ORDERS];
        for Taken { place, record, .. } in taken.iter().flatten() {
            // SAFETY: the order is being read: this thread alone has its buffer.
            let buffer = unsafe { &mut *self.buffers[*place].get() };
            before += buffer.touched_bytes();
            read[*place] = match are_read {
                true => batch.hand_to(*record, buffer),
                // If one of them cannot be read, others can.
                false => self.backing.fetch(*record, buffer).is_ok(),
            };
            after += buffer.touched_bytes();
        }
        self.touched_bytes.fetch_add((after - before) as u64, Relaxed);
        let (mut orders, now_ns) = (self.orders.lock(), clock_ns());
        taken.iter().flatten().for_each(|taken| orders.end(taken.place, read[taken.place], now_ns));
    }

    /// Has a fetcher look for orders.
    pub fn ring_for_orders(&self) {
        self.orders_bell.fetch_add(1, Release);
        let _ = rustix::thread::futex::wake(&self.orders_bell, rustix::thread::futex::Flags::PRIVATE, 1);
    }

    /// Orders a page that is in the file; [`Spill::ring_for_orders`] is to follow. False when it is asked for and there no more, or there
    /// is no buffer for it ([`Orders::place`]).
    pub fn order(&self, pool: &Pool, worker: &mut Worker, page: u64, is_asked: bool) -> bool {
        // What is in the pool, or in the file no more, need not come from there; who waits for it is to ask again.
        let Some(record) = pool.record_of(worker, PageIndex(page)) else { return !is_asked };
        let asked_ns = is_asked.then(clock_ns);
        self.orders.lock().place(page, record, asked_ns)
    }

    /// Whether a read takes so little that others may wait for the handler meanwhile.
    pub fn is_fast(&self) -> bool {
        self.device.ns() < FAST_NS
    }

    /// Reads what was ordered for a page, and what lies near it. False if a fetcher is at it, or has read it just now: it wakes who waits. Only the handler calls this.
    pub fn fetch_for(&self, page: u64, uffd: Uffd) -> bool {
        // SAFETY: the first is the handler's alone.
        let batch = unsafe { &mut *self.batches[0].get() };
        let (taken, are_left) = self.take_wanted(batch, Some(page));
        if are_left {
            self.ring_for_orders();
        }
        self.fetch(batch, &taken);
        // The page itself is answered now.
        wake(&taken, uffd, Some(page));
        taken.iter().flatten().any(|taken| taken.page == page)
    }

    /// Whether a page's order has come to an end ([`Orders::ended`]).
    pub fn is_ready(&self, page: u64) -> bool {
        self.orders.lock().ended(page).is_some()
    }

    /// Reads a page from its order, which ends. What nobody asks for is not lost: whoever does will have it read again. Only the handler calls this.
    pub fn take(&self, pager: &Pager, worker: &mut Worker, page: u64, is_asked: bool, into: &mut Page) -> Fetched {
        let found = self.orders.lock().ended(page);
        let Some((place, order)) = found else { return Fetched::Not };
        if let Some(asked_ns) = order.asked_ns {
            note_time(&self.read_ns, asked_ns);
        }
        let fetched = if order.progress == Progress::Ready {
            // SAFETY: the order was read: the handler alone has its buffer.
            let buffer = unsafe { &mut *self.buffers[place].get() };
            match pager.pool.open_fetched(worker, buffer, PageIndex(page), into) {
                Some(Ok(())) => Fetched::Done,
                Some(Err(_)) => Fetched::Lost,
                None => Fetched::Not,
            }
        } else if pager.pool.record_of(worker, PageIndex(page)) == order.record {
            Fetched::Lost
        } else {
            Fetched::Not
        };
        self.orders.lock().all[place].progress = Progress::Free;
        let fetched = if fetched == Fetched::Lost && !is_asked { Fetched::Not } else { fetched };
        self.count_read(pager, fetched);
        fetched
    }

    fn count_read(&self, pager: &Pager, fetched: Fetched) {
        match (fetched, pager.slot()) {
            (Fetched::Done, Some(slot)) => _ = slot.counters.spill_read_pages.fetch_add(1, Relaxed),
            (Fetched::Lost, _) => pager.region.note_spill(SpillNews::LostPage, 0),
            _ => {}
        }
    }

    /// Reads a page that is in the file, and waits for it. Changes nothing but what a reader does.
    pub fn read(&self, pager: &Pager, worker: &mut Worker, index: PageIndex, into: &mut Page) -> Fetched {
        let mut inline = self.inline.lock();
        let Some(record) = pager.pool.record_of(worker, index) else { return Fetched::Not };
        let fetched = match self.backing.fetch(record, &mut inline.fetcher) {
            Ok(()) => match pager.pool.open_fetched(worker, &mut inline.fetcher, index, into) {
                Some(Ok(())) => Fetched::Done,
                Some(Err(_)) => Fetched::Lost,
                None => Fetched::Not,
            },
            Err(_) => Fetched::Lost,
        };
        drop(inline);
        self.count_read(pager, fetched);
        fetched
    }
}

/// Pages have been read. Whoever waits there faults again, and whoever does not has not heard.
fn wake(taken: &[Option<Taken>; ORDERS], uffd: Uffd, but: Option<u64>) {
    for page in taken.iter().flatten().map(|taken| taken.page).filter(|page| Some(*page) != but) {
        uffd.wake(page as usize * PAGE, PAGE);
    }
}

/// Something has taken until now: a sixteenth of what is believed that it takes.
fn note_time(believed_ns: &AtomicU64, begun_ns: u64) {
    let (took_ns, was_ns) = ((clock_ns() - begun_ns).min(READ_NS_MAX), believed_ns.load(Relaxed));
    believed_ns.store((was_ns * 15 + took_ns) / 16, Relaxed);
}

/// What there is of a spill before its pool.
pub struct SpillParts {
    /// The pool's.
    pub backing: Arc<Backing>,
    files: Arc<PartFiles>,
    path: Box<[u8]>,
}

impl SpillParts {
    /// All of it, with the buffers of its threads.
    pub fn finish(self, worker: impl Fn() -> Result<Worker, StoreError>) -> Result<Spill, StoreError> {
        // All of them, or none.
        let mut buffers = [const { None }; ORDERS];
        for buffer in &mut buffers {
            *buffer = Some(Fetcher::new()?);
        }
        let mut batches = [const { None }; READERS];
        for batch in &mut batches {
            *batch = Some(Batch::new()?);
        }
        let inline = Inline { worker: worker()?, fetcher: Fetcher::new()?, page: [0; PAGE] };
        Ok(Spill {
            backing: self.backing,
            files: self.files,
            path: self.path,
            orders: Mutex::new(Orders::new()),
            touched_bytes: AtomicU64::new(0),
            buffers: buffers.map(|buffer| UnsafeCell::new(buffer.expect("made above"))),
            batches: batches.map(|batch| UnsafeCell::new(batch.expect("made above"))),
            fetchers: AtomicUsize::new(0),
            inline: Mutex::new(inline),
            worker: Mutex::new(worker()?),
            bell: AtomicU32::new(0),
            orders_bell: AtomicU32::new(0),
            started: AtomicUsize::new(0),
            is_failing: AtomicBool::new(false),
            unstarted_ns: AtomicU64::new(0),
            share: AtomicU64::new(SHARE_FIRST),
            reuse: Reuse::new(),
            device: DeviceTime::new(READ_NS_FIRST),
            read_ns: AtomicU64::new(READ_NS_FIRST),
            aged_at: AtomicU64::new(0),
            holds: Mutex::new([const { None }; HOLDS]),
            holds_looked_at_ns: AtomicU64::new(0),
            held_at: AtomicUsize::new(0),
            thread: AtomicU32::new(0),
            parts_in_use: [const { AtomicBool::new(false) }; PARTS],
            handed: [const { AtomicI32::new(-1) }; PARTS],
            handed_file: [const { (AtomicU64::new(0), AtomicU64::new(0)) }; PARTS],
        })
    }
}

/// Reads a stored page, wherever it is, waiting for the file if it is there, and leaves it as it is: the process may be copied meanwhile.
/// False when it cannot be read.
pub fn read_stored(pager: &Pager, worker: &mut Worker, page: u64, into: &mut Page) -> bool {
    loop {
        match (pager.pool.look_at(worker, PageIndex(page), into), &pager.spill) {
            (Ok(Read::Done), _) => return true,
            (Ok(Read::OnBacking(_)), Some(spill)) => match spill.read(pager, worker, PageIndex(page), into) {
                Fetched::Done => return true,
                Fetched::Lost => return false,
                // It is somewhere else now.
                Fetched::Not => {}
            },
            _ => return false,
        }
    }
}

/// The entry of the spiller's thread.
pub extern "C" fn spiller_entry(pager: *mut c_void) -> ! {
    // SAFETY: `start_thread` passed a pager, which is never freed.
    let pager = unsafe { &*pager.cast::<Pager>().cast_const() };
    sys::ask_for_short_slices(1_000_000);
    match &pager.spill {
        Some(spill) => spill.run_spiller(pager),
        None => sys::abort(),
    }
}

/// The entry of a fetcher's thread.
pub extern "C" fn fetcher_entry(pager: *mut c_void) -> ! {
    // SAFETY: as above.
    let pager = unsafe { &*pager.cast::<Pager>().cast_const() };
    let channel = *pager.channel.lock();
    match (&pager.spill, channel) {
        (Some(spill), Some(channel)) => spill.run_fetcher(pager, channel.uffd),
        _ => sys::abort(),
    }
}
