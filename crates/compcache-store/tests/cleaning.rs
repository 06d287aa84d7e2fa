//! A small backing in a file, with two threads that write, read and discard pages and one that writes them back, for as long as one
//! likes: `COMPCACHE_LONG=7200 cargo test -p compcache-store --test cleaning` (seconds; 3). How much of the room is alive goes from half to
//! more than there is. After each round all stand still, and every byte must be accounted for.

#[path = "model/content.rs"]
mod content;

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use compcache_store::{
    Backing, BackingConfig, Fetcher, FileMedium, Health, Page, PageIndex, Pool, PoolConfig, Read, Store, StoreConfig,
    StoreError, Worker,
};
use compcache_testkit::seed::Seed;

const THREADS: u64 = 2;
const SEGMENT_BYTES: u64 = 64 << 10;
const CAPACITY_BYTES: u64 = 128 * SEGMENT_BYTES;
const LIMIT_BYTES: u64 = 3 << 20;
/// What all of them take, compressed, is half as much again as the backing and memory have room for.
const PAGES: u64 = 4000;
const OPERATIONS: u64 = 4000;
/// What of the pages is there, in percent: a round each.
const TIDE: [u64; 8] = [35, 45, 55, 60, 65, 75, 100, 50];

/// Pages of one thread: the generation of each, or zero where there is none.
struct Part {
    first: u64,
    generations: Vec<u64>,
    next: u64,
    refused: u64,
    reads: u64,
}

struct Place {
    store: Arc<Store>,
    backing: Arc<Backing>,
    pool: Arc<Pool>,
    /// The backing's.
    file: File,
    seed: u64,
}

impl Place {
    fn content(&self, index: u64, generation: u64) -> Page {
        let mut page = [0; 4096];
        content::fill(&mut page, self.seed, index, generation);
        page
    }

    /// Some operations on pages of one thread, so that in the end about so many percent of them are there.
    fn load(&self, part: &mut Part, percent: u64, rng: &mut fastrand::Rng) {
        let mut worker = Worker::new(&self.store, || 0).unwrap();
        let mut fetcher = Fetcher::new().unwrap();
        for _ in 0..OPERATIONS {
            // Three of four are of an eighth of the pages.
            let among = if rng.u32(0..4) > 0 { PAGES / 8 } else { PAGES };
            let at = rng.u64(0..among) as usize;
            let index = part.first + at as u64;
            // Which pages are there hangs on the page, so that what is cold and alive stays so.
            let is_wanted = content::mix(index) % 100 < percent;
            match rng.u32(0..10) {
                0..4 => self.check(part, at, &mut worker, &mut fetcher),
                _ if is_wanted => {
                    part.next += 1;
                    let page = self.content(index, part.next);
                    match self.pool.write(&mut worker, PageIndex(index), &page) {
                        Ok(_) => part.generations[at] = part.next,
                        // What was there is there still.
                        Err(StoreError::LimitReached { .. }) => part.refused += 1,
                        Err(error) => panic!("writing page {index}: {error}"),
                    }
                }
                _ => {
                    let was_there = std::mem::take(&mut part.generations[at]) != 0;
                    assert_eq!(self.pool.discard(PageIndex(index)), was_there, "page {index}");
                }
            }
        }
    }

    fn check(&self, part: &mut Part, at: usize, worker: &mut Worker, fetcher: &mut Fetcher) {
        let (index, generation) = (part.first + at as u64, part.generations[at]);
        let mut page = [0; 4096];
        match self.pool.fetch(worker, fetcher, PageIndex(index), &mut page) {
            Ok(Read::Absent) if generation == 0 => {}
            Ok(Read::Done) if generation > 0 && page == self.content(index, generation) => part.reads += 1,
            other => panic!("page {index} of generation {generation}: {other:?}"),
        }
    }

    /// As a front end's thread: while memory is short.
    fn write_back(&self, is_over: &AtomicBool) {
        let mut worker = Worker::new(&self.store, || 0).unwrap();
        while !is_over.load(Relaxed) {
            while self.store.wants_reclaim(&self.backing)
                && !self.store.reclaim(&mut worker, &self.backing).unwrap().finished
            {}
            self.backing.tidy(|| true);
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// While nobody is at it.
    fn account(&self, parts: &[Part]) {
        let (stats, pool) = (self.backing.stats(), self.pool.stats());
        assert_eq!(stats.live_bytes + stats.dead_bytes + stats.free_bytes, CAPACITY_BYTES, "{stats:?}");
        assert_eq!(stats.live_bytes, pool.bd_bytes, "{stats:?} {pool:?}");
        let there = parts.iter().flat_map(|part| &part.generations).filter(|generation| **generation > 0).count();
        assert_eq!(pool.pages_stored(), there as u64, "{pool:?}");
        assert_eq!([stats.failed_writes, stats.failed_reads, stats.damaged_reads], [0; 3], "{stats:?}");
        assert!(self.store.mem_used_total_bytes() <= LIMIT_BYTES);
        // What the file system itself needs, to find the pieces, comes on top.
        let taken = self.file.metadata().unwrap().blocks() * 512;
        assert!(taken <= CAPACITY_BYTES + SEGMENT_BYTES, "{taken} bytes are taken: {stats:?}");
    }
}

#[test]
fn a_small_backing_is_cleaned_again_and_again_and_every_byte_is_accounted_for() {
    let seconds = std::env::var("COMPCACHE_LONG").map_or(3, |text| text.parse().expect("a number of seconds"));
    let seed = Seed::for_test("a_small_backing_is_cleaned_again_and_again_and_every_byte_is_accounted_for");
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let medium = FileMedium::new(file.try_clone().unwrap().into());
    let config = BackingConfig { capacity_bytes: CAPACITY_BYTES, segment_bytes: SEGMENT_BYTES as usize };
    let backing = Backing::new(Box::new(medium), config).unwrap();
    let limits = StoreConfig { limit_bytes: LIMIT_BYTES, reserve_bytes: 1 << 30, ..StoreConfig::default() };
    let store = Store::new(limits).unwrap();
    let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let place = Place { store, backing, pool, file, seed: seed.number() };
    let part = |thread| {
        let generations = vec![0; PAGES as usize];
        Part { first: thread * PAGES, generations, next: 0, refused: 0, reads: 0 }
    };
    let mut parts: Vec<Part> = (0..THREADS).map(part).collect();
    let begun = Instant::now();
    let (mut was_full, mut was_not) = (0, 0);
    for round in 0.. {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| place.write_back(&is_over));
            let loads = parts.iter_mut().enumerate().map(|(thread, part)| {
                let mut rng = seed.part(round).part(thread as u64).rng();
                let place = &place;
                scope.spawn(move || place.load(part, TIDE[round as usize / 4 % TIDE.len()], &mut rng))
            });
            let ended: Vec<_> = loads.collect::<Vec<_>>().into_iter().map(thread::ScopedJoinHandle::join).collect();
            is_over.store(true, Relaxed);
            ended.into_iter().for_each(|ended| ended.unwrap());
        });
        place.account(&parts);
        *if place.backing.health() == Health::Full { &mut was_full } else { &mut was_not } += 1;
        if begun.elapsed() > Duration::from_secs(seconds) && round as usize >= 4 * TIDE.len() {
            break;
        }
    }
    let stats = place.backing.stats();
    let refused: u64 = parts.iter().map(|part| part.refused).sum();
    let reads: u64 = parts.iter().map(|part| part.reads).sum();
    println!(
        "{was_full} rounds ended with a full backing, {was_not} not; {reads} pages read, {refused} refused; {stats:?}"
    );
    assert!(was_full > 0 && was_not > 0 && refused > 0 && reads > 10_000, "not all that can be was met");
    assert!(stats.records_moved > 1000 && stats.segments_written > 10 * 128, "{stats:?}");
    let mut worker = Worker::new(&place.store, || 0).unwrap();
    let mut fetcher = Fetcher::new().unwrap();
    for part in &mut parts {
        (0..PAGES as usize).for_each(|at| place.check(part, at, &mut worker, &mut fetcher));
        place.pool.discard_range(PageIndex(part.first), PAGES);
    }
    place.backing.tidy(|| true);
    let stats = place.backing.stats();
    assert_eq!([stats.live_bytes, stats.dead_bytes, stats.free_bytes], [0, 0, CAPACITY_BYTES], "{stats:?}");
    // A few segments keep their room, to be written to again.
    let taken = place.file.metadata().unwrap().blocks() * 512;
    assert!(taken <= 5 * SEGMENT_BYTES, "{taken} bytes are taken by nothing");
}
