//! Ours: a pool under a limit, and one thread that has its pages leave for the backing in batches.
//!
//! | who          | does                                                                                                       |
//! |--------------|-------------------------------------------------------------------------------------------------------------|
//! | the machine  | takes a page out of the pool, or off the backing; writes another one; while that is refused, waits for the thread |
//! | the thread   | as `compcache serve` does for a disk: looks fifty times a second whether the store is above its threshold, and if so goes on until it is ten percent below; advances ages |
//!
//! Whoever waits wakes the thread, and is woken after each segment. (In the server, a disk's writer that is refused writes a segment itself.)
//!
//! Memory that is limited is that of the store: objects and tables, 12 bytes for every page whether it is in memory or not. The two segments that the
//! thread makes ready are not in it, as they are not with the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, ScopedJoinHandle, Thread};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use compcache_store::{
    Backing, Fetcher, Page, PageIndex, Pool, PoolConfig, Read, Store, StoreConfig, StoreError, Worker,
};

use super::disk::Disk;
use super::machine::{Machine, Swap, Walk};
use super::{Point, Work};
use crate::clock::{cpu_time, now_ns};

/// Addresses, no memory.
const RESERVE_BYTES: u64 = 8 << 30;
/// As the server has them.
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);
const AGE_SHARE: u64 = 16;
const AGE_LEAST_PAGES: u64 = 256;
/// Whoever waits looks so often whether it is of any use still.
const BETWEEN_WAITS: Duration = Duration::from_millis(1);
/// No disk needs so long for a segment: nothing more can leave.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a run of steps took.
pub struct Run {
    /// By the clock.
    pub wall_s: f64,
    /// What of it was waiting for memory.
    pub waited_s: f64,
    /// CPU time of both threads.
    pub cpu_s: f64,
    /// Pages that came in from the backing.
    pub fetched_pages: u64,
    /// Pages that have left memory, and others that were moved out of segments to be cleaned.
    pub left_pages: u64,
    /// As above.
    pub moved_pages: u64,
    /// Segments written.
    pub segments: u64,
    /// The most memory that the store had.
    pub held_max_bytes: u64,
}

impl Run {
    /// All pages that were written to segments.
    pub fn written_pages(&self) -> u64 {
        self.left_pages + self.moved_pages
    }
}

/// The store, its pool, and what its thread is told and tells.
pub struct Cache {
    store: Arc<Store>,
    pool: Arc<Pool>,
    backing: Arc<Backing>,
    stop: AtomicBool,
    is_waited_for: AtomicBool,
    reclaim_cpu_ns: AtomicU64,
}

/// What is counted, at one moment.
struct Counts {
    at: Instant,
    waited: Duration,
    cpu: Duration,
    fetched_pages: u64,
    left_pages: u64,
    moved_pages: u64,
    segments: u64,
}

impl Cache {
    /// An empty one.
    ///
    /// # Errors
    /// There is no memory for it, or no such backing.
    pub fn new(disk: &Disk<'_>, point: &Point) -> Result<Cache> {
        let store = Store::new(StoreConfig { reserve_bytes: RESERVE_BYTES, ..StoreConfig::default() })?;
        store.set_limit_bytes(point.cache_bytes);
        let backing = disk.backing(point.segment_bytes)?;
        backing.set_above_percent(point.percent);
        let pool = store.create_pool_on(PoolConfig::default(), &backing)?;
        let no = || AtomicBool::new(false);
        Ok(Cache { store, pool, backing, stop: no(), is_waited_for: no(), reclaim_cpu_ns: AtomicU64::new(0) })
    }

    /// Has the machine swap to it: all pages go out, some steps that do not count, and those that do, on a disk that is slow if it shall be.
    ///
    /// # Errors
    /// A page is wrong, the disk fails, or the cache is too small to work at all.
    pub fn run(&self, disk: &Disk<'_>, work: &Work<'_>) -> Result<Run> {
        thread::scope(|scope| {
            let (named, machine) = (thread::Builder::new().name("reclaim".into()), thread::current());
            let reclaimer = named.spawn_scoped(scope, move || self.reclaim_until_stopped(&machine))?;
            let measured = self.measure(disk, work, &reclaimer);
            self.stop.store(true, Relaxed);
            reclaimer.thread().unpark();
            // What went wrong there is the reason for what went wrong here.
            reclaimer.join().map_err(|_| anyhow!("a thread died"))??;
            measured
        })
    }

    fn measure(&self, disk: &Disk<'_>, work: &Work<'_>, reclaimer: &ScopedJoinHandle<'_, Result<()>>) -> Result<Run> {
        let (worker, fetcher) = (Worker::new(&self.store, now_ns)?, Fetcher::new()?);
        let mut front = Front { cache: self, reclaimer, worker, fetcher, waited: Duration::ZERO };
        let (mut machine, mut walk) = (Machine::new(work.content), Walk::new(work.order, work.content.len()));
        machine.begin(work.resident_pages, &mut front)?;
        machine.run(&mut walk, work.steps_before, &mut front)?;
        let _slow = disk.slow_down()?;
        let before = front.counts();
        machine.run(&mut walk, work.steps, &mut front)?;
        let after = front.counts();
        let held_max_bytes = self.store.mem_used_max_bytes();
        ensure!(held_max_bytes <= self.store.limit_bytes(), "the store has taken {held_max_bytes} bytes");
        Ok(Run {
            wall_s: (after.at - before.at).as_secs_f64(),
            waited_s: (after.waited - before.waited).as_secs_f64(),
            cpu_s: (after.cpu - before.cpu).as_secs_f64(),
            fetched_pages: after.fetched_pages - before.fetched_pages,
            left_pages: after.left_pages - before.left_pages,
            moved_pages: after.moved_pages - before.moved_pages,
            segments: after.segments - before.segments,
            held_max_bytes,
        })
    }

    /// The thread's.
    fn reclaim_until_stopped(&self, machine: &Thread) -> Result<()> {
        let mut worker = Worker::new(&self.store, now_ns)?;
        let mut used_pages = 0;
        while !self.stop.load(Relaxed) {
            let stats = self.pool.stats();
            let used = stats.num_reads + stats.num_writes;
            if used - used_pages >= (stats.pages_stored() / AGE_SHARE).max(AGE_LEAST_PAGES) {
                used_pages = used;
                self.store.advance_age();
            }
            // At the limit there may be too little room for one page more, though the store is not above its threshold.
            if self.is_waited_for.swap(false, Relaxed) || self.store.wants_reclaim(&self.backing) {
                while !self.stop.load(Relaxed) && !self.store.reclaim(&mut worker, &self.backing)?.finished {
                    self.reclaim_cpu_ns.store(cpu_time().as_nanos() as u64, Relaxed);
                    machine.unpark();
                }
                machine.unpark();
            }
            self.reclaim_cpu_ns.store(cpu_time().as_nanos() as u64, Relaxed);
            thread::park_timeout(BETWEEN_LOOKS);
        }
        Ok(())
    }
}

/// The machine's end of it.
struct Front<'c> {
    cache: &'c Cache,
    reclaimer: &'c ScopedJoinHandle<'c, Result<()>>,
    worker: Worker,
    fetcher: Fetcher,
    waited: Duration,
}

impl Front<'_> {
    fn counts(&self) -> Counts {
        let (stats, backing) = (self.cache.pool.stats(), self.cache.backing.stats());
        Counts {
            at: Instant::now(),
            waited: self.waited,
            cpu: cpu_time() + Duration::from_nanos(self.cache.reclaim_cpu_ns.load(Relaxed)),
            fetched_pages: stats.bd_reads,
            left_pages: stats.bd_writes,
            moved_pages: backing.records_moved,
            segments: backing.segments_written,
        }
    }
}

impl Swap for Front<'_> {
    fn read(&mut self, index: usize, page: &mut Page) -> Result<()> {
        let (pool, index) = (&self.cache.pool, PageIndex(index as u64));
        let read = pool.fetch_and_take(&mut self.worker, &mut self.fetcher, index, page)?;
        ensure!(read == Read::Done, "page {} is gone: {read:?}", index.0);
        Ok(())
    }

    fn write(&mut self, index: usize, page: &Page) -> Result<()> {
        let mut since = None;
        loop {
            match self.cache.pool.write(&mut self.worker, PageIndex(index as u64), page) {
                Err(StoreError::LimitReached { .. }) => {}
                written => {
                    written?;
                    self.waited += since.map_or(Duration::ZERO, |since: Instant| since.elapsed());
                    return Ok(());
                }
            }
            let since = *since.get_or_insert_with(Instant::now);
            ensure!(!self.reclaimer.is_finished(), "the thread that reclaims has ended");
            if since.elapsed() > PATIENCE {
                bail!(
                    "a page waits for room in vain: of {} bytes {} are used, {} of them by tables (make the cache larger, or have fewer \
                     --megabytes): {:?}",
                    self.cache.store.limit_bytes(),
                    self.cache.store.mem_used_total_bytes(),
                    self.cache.pool.stats().table_bytes,
                    self.cache.backing.stats()
                );
            }
            self.cache.is_waited_for.store(true, Relaxed);
            self.reclaimer.thread().unpark();
            thread::park_timeout(BETWEEN_WAITS);
        }
    }
}

/// What the content is compressed to, and what tables it takes, in bytes, where nothing limits them.
///
/// # Errors
/// There is no memory for it.
pub fn weigh(content: &[Page]) -> Result<(u64, u64)> {
    let store = Store::new(StoreConfig { reserve_bytes: RESERVE_BYTES, ..StoreConfig::default() })?;
    let pool = store.create_pool(PoolConfig::default())?;
    let mut worker = Worker::new(&store, now_ns)?;
    pool.write_run(&mut worker, PageIndex(0), content).map_err(|failed| failed.error)?;
    let stats = pool.stats();
    Ok((stats.compr_data_size, stats.table_bytes))
}
