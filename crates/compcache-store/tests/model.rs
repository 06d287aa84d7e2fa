//! A pool is an array of pages: random walks over all operations, codecs, limits, threads and planted bugs.
//!
//! `COMPCACHE_TEST_SEED=n` repeats one seed; `COMPCACHE_TEST_SCALE=n` walks n times as far.

#[path = "model/checker.rs"]
mod checker;
#[path = "model/content.rs"]
mod content;
#[path = "model/medium.rs"]
mod medium;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use checker::{Divergence, Pages, Walk, Walked};
use compcache_store::{
    Aged, Backing, Batch, Codec, Fetcher, Page, PageIndex, Pool, PoolConfig, PoolStats, Read, Recompressor, Store,
    StoreConfig, StoreError, Worker, train_dictionary,
};
use medium::{Faults, Memory};

fn clock() -> u64 {
    static NOW: AtomicU64 = AtomicU64::new(0);
    NOW.fetch_add(1, Ordering::Relaxed)
}

fn scale() -> u64 {
    std::env::var("COMPCACHE_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1)
}

fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("COMPCACHE_TEST_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => vec![seed],
        None => (1..=count).collect(),
    }
}

/// A pool with a worker, as a walk sees it.
struct Subject {
    store: Arc<Store>,
    pool: Arc<Pool>,
    worker: Worker,
    fetcher: Fetcher,
    batch: Batch,
    recompressor: Recompressor,
    /// Where recompression goes on.
    next: PageIndex,
    codecs: Vec<Codec>,
    limited: bool,
}

impl Subject {
    fn new(store: &Arc<Store>, pool: &Arc<Pool>, codecs: &[Codec], limited: bool) -> Subject {
        let worker = Worker::new(store, clock).unwrap();
        let (fetcher, batch) = (Fetcher::new().unwrap(), Batch::new().unwrap());
        let recompressor = Recompressor::new(store, 1).unwrap();
        let (store, pool, codecs) = (store.clone(), pool.clone(), codecs.to_vec());
        Subject { store, pool, worker, fetcher, batch, recompressor, next: PageIndex(0), codecs, limited }
    }

    /// Makes groups of what was not used for `least` ages.
    fn recompress(&mut self, steps: u64, least: u8) {
        for _ in 0..steps {
            let Subject { store, pool, worker, recompressor, .. } = self;
            match pool.recompress(worker, recompressor, &Aged::new(store.age(), least..=u8::MAX), self.next) {
                Ok(done) => self.next = done.next.unwrap_or(PageIndex(0)),
                Err(StoreError::LimitReached { .. }) => return,
                Err(error) => panic!("recompressing from {:?}: {error}", self.next),
            }
        }
    }

    /// Writes pages back, some segments full, whatever the limit is otherwise.
    fn reclaim(&mut self, segments: u64) {
        let Some(backing) = self.pool.backing().cloned() else { return };
        let limit = self.store.limit_bytes();
        self.store.set_limit_bytes(self.store.mem_used_total_bytes());
        for _ in 0..segments {
            // A medium that fails costs nothing.
            let _ = self.store.reclaim(&mut self.worker, &backing);
        }
        self.store.set_limit_bytes(limit);
        backing.tidy(|| true);
        let stats = backing.stats();
        assert!(stats.live_bytes + stats.dead_bytes + stats.free_bytes == stats.capacity_bytes, "{stats:?}");
    }
}

impl Pages for Subject {
    fn write(&mut self, index: PageIndex, page: &Page) -> Result<(), StoreError> {
        self.pool.write(&mut self.worker, index, page).map(|_| ())
    }

    fn rewrite(&mut self, index: PageIndex, page: &Page) -> Result<(), StoreError> {
        self.pool.rewrite(&mut self.worker, index, page).map(|_| ())
    }

    fn write_run(&mut self, first: PageIndex, pages: &[Page]) -> Result<(), usize> {
        self.pool.write_run(&mut self.worker, first, pages).map_err(|failed| failed.done)
    }

    fn read(&mut self, index: PageIndex, page: &mut Page, take: bool) -> Result<Read, StoreError> {
        let Subject { pool, worker, fetcher, .. } = self;
        let read = if take { pool.take(worker, index, page) } else { pool.read(worker, index, page) };
        let Ok(Read::OnBacking(_)) = read else { return read };
        // A medium that fails now may succeed the next time; what it has must not be lost by failing.
        for _ in 0..1000 {
            let read = match take {
                true => pool.fetch_and_take(worker, fetcher, index, page),
                false => pool.fetch(worker, fetcher, index, page),
            };
            if !matches!(read, Err(StoreError::BackingFailed { .. })) {
                return read;
            }
        }
        Err(StoreError::Corrupt { index })
    }

    fn read_run(&mut self, first: PageIndex, pages: &mut [Page], found: &mut [Read]) -> Result<(), StoreError> {
        self.pool.read_run(&mut self.worker, first, pages, found).map_err(|failed| failed.error)?;
        let mut fetched = Ok(());
        // As above: what was read is not read again, and no other is lost by one that fails.
        for _ in 0..1000 {
            let Subject { pool, worker, fetcher, batch, .. } = self;
            fetched = pool.fetch_run(worker, (fetcher, batch), first, pages, found).map_err(|failed| failed.error);
            if !matches!(fetched, Err(StoreError::BackingFailed { .. })) {
                break;
            }
        }
        fetched
    }

    fn contains(&mut self, index: PageIndex) -> bool {
        self.pool.contains(index)
    }

    fn discard(&mut self, index: PageIndex) -> bool {
        self.pool.discard(index)
    }

    fn discard_range(&mut self, first: PageIndex, count: u64) -> u64 {
        self.pool.discard_range(first, count)
    }

    fn move_slot(&mut self, from: PageIndex, to: PageIndex) -> Result<bool, StoreError> {
        self.pool.move_slot(from, to)
    }

    fn move_range(&mut self, from: PageIndex, to: PageIndex, count: u64) -> Result<u64, StoreError> {
        self.pool.move_range(from, to, count)
    }

    fn stored(&mut self, first: PageIndex, count: u64) -> Vec<PageIndex> {
        let mut found = Vec::new();
        self.pool.for_each_stored(first, count, |index| found.push(index));
        found
    }

    fn disturb(&mut self, random: u64) {
        self.reclaim(random >> 40 & 3);
        self.recompress(random >> 42 & 0x3f, [0, 0, 1, 3][(random >> 48) as usize % 4]);
        match random % 5 {
            0 => {
                let codec = self.codecs[(random >> 8) as usize % self.codecs.len()];
                self.pool.set_codec(codec).unwrap();
            }
            1 if self.limited => {
                let used = self.store.mem_used_total_bytes();
                self.store.set_limit_bytes(used + (random >> 8) % (used / 4 + 1));
            }
            2 => {
                self.store.advance_age();
            }
            3 => {
                self.store.set_reserve_bytes((random >> 8) % (2 << 20));
                // Refused at the limit, as any write.
                while self.store.refill().is_ok_and(|more| more) {}
            }
            _ => {
                self.store.compact(&mut self.worker, 1 + (random >> 8) as usize % 500);
            }
        }
    }
}

/// Every codec there is; the levels are the cheap ones, the others have a test of their own.
fn all_codecs(store: &Store) -> Vec<Codec> {
    let samples: Vec<Page> = (0..400)
        .map(|index| {
            let mut page = [0; 4096];
            content::fill(&mut page, 77, index, 1);
            page
        })
        .collect();
    let dictionary = train_dictionary(&samples, 16 << 10).unwrap();
    let id = store.load_dictionary(&dictionary, 1).unwrap();
    vec![Codec::Lz4, Codec::Zstd { level: 1 }, Codec::Zstd { level: -3 }, Codec::ZstdDictionary(id)]
}

fn small_store() -> Arc<Store> {
    Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap()
}

/// After everything is discarded and compaction has finished, nothing is held.
fn assert_nothing_leaks(store: &Arc<Store>, pool: &Arc<Pool>) {
    pool.discard_range(PageIndex(0), PageIndex::LIMIT);
    let stats = pool.stats();
    let gauges = |stats: &PoolStats| {
        let groups = [stats.grouped_pages, stats.group_bytes];
        ([stats.orig_data_size, stats.compr_data_size, stats.same_pages, stats.slot_bytes], groups)
    };
    assert_eq!(gauges(&stats), ([0; 4], [0; 2]), "{stats:?}");
    let mut worker = Worker::new(store, clock).unwrap();
    store.set_reserve_bytes(0);
    while store.refill().unwrap() {}
    while !store.compact(&mut worker, 1000).finished {}
    let used = store.mem_used_total_bytes();
    assert!(used <= 256 << 10, "{used} bytes are held by an empty store");
    if let Some(backing) = pool.backing() {
        let stats = backing.stats();
        assert_eq!([stats.live_bytes, stats.dead_bytes], [0, 0], "{stats:?}");
        assert_eq!([stats.free_bytes, pool.stats().bd_count, pool.stats().bd_bytes], [stats.capacity_bytes, 0, 0]);
    }
}

/// Every byte alive on the backing is one of this pool's.
fn assert_live_bytes_are(backing: &Backing, pool: &Pool) {
    let (stats, ours) = (backing.stats(), pool.stats());
    assert_eq!(stats.live_bytes, ours.bd_bytes, "{stats:?} {ours:?}");
    assert!(ours.bd_count <= ours.pages_stored());
}

fn walk_alone(seed: u64, operations: u64) -> Result<(Walked, PoolStats), Divergence> {
    let store = small_store();
    let codecs = all_codecs(&store);
    let codec = codecs[seed as usize % codecs.len()];
    let pool = store.create_pool(PoolConfig { codec, ..PoolConfig::default() }).unwrap();
    let mut subject = Subject::new(&store, &pool, &codecs, seed.is_multiple_of(2));
    let mut walk = Walk::new(seed, 0);
    let walked = walk.run(&mut subject, operations)?;
    walk.check_all(&mut subject)?;
    drop(subject);
    let stats = pool.stats();
    assert_nothing_leaks(&store, &pool);
    Ok((walked, stats))
}

#[test]
fn a_pool_is_an_array_of_pages() {
    let (mut total, mut recompressed) = (Walked::default(), 0);
    for seed in seeds(24) {
        let (walked, stats) = walk_alone(seed, 20_000 * scale()).unwrap_or_else(|divergence| panic!("{divergence}"));
        total.operations += walked.operations;
        total.refused += walked.refused;
        recompressed += stats.pages_recompressed;
    }
    println!("{total:?}, {recompressed} pages recompressed");
    let all = std::env::var("COMPCACHE_TEST_SEED").is_err();
    assert!(!all || total.refused > 0, "no walk ever met the limit");
    assert!(!all || recompressed > 10_000, "{recompressed} pages were recompressed");
}

#[test]
fn a_pool_is_an_array_of_pages_for_every_thread_while_others_write_discard_and_compact() {
    const THREADS: u64 = 4;
    for seed in seeds(8) {
        let store = small_store();
        let codecs = all_codecs(&store);
        let pool = store.create_pool(PoolConfig::default()).unwrap();
        let other = store.create_pool(PoolConfig { codec: codecs[1], ..PoolConfig::default() }).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                // Two walks in each pool; their stretches lie next to each other, so they share leaves and spans.
                let pool = if thread % 2 == 0 { &pool } else { &other };
                let (store, codecs) = (&store, &codecs);
                scope.spawn(move || {
                    let mut subject = Subject::new(store, pool, codecs, seed.is_multiple_of(2));
                    let mut walk = Walk::new(seed * 100 + thread, thread / 2 * 1500);
                    walk.run(&mut subject, 20_000 * scale()).unwrap_or_else(|divergence| panic!("{divergence}"));
                    walk.check_all(&mut subject).unwrap_or_else(|divergence| panic!("{divergence}"));
                });
            }
        });
        drop(other);
        assert_nothing_leaks(&store, &pool);
    }
}

/// One walk over a pool with a backing that has these faults. Returns also what the medium did.
fn walk_on_backing(seed: u64, operations: u64, faults: Faults) -> Result<(Walked, Arc<Memory>), Divergence> {
    let store = small_store();
    let codecs = all_codecs(&store);
    let memory = Memory::new(seed, faults);
    // From less than a walk's pages take, so that cleaning and a full backing come up, to more.
    let backing = Backing::new(memory.medium(), medium::config(seed)).unwrap();
    let codec = codecs[seed as usize % codecs.len()];
    let pool = store.create_pool_on(PoolConfig { codec, ..PoolConfig::default() }, &backing).unwrap();
    let mut subject = Subject::new(&store, &pool, &codecs, seed.is_multiple_of(3));
    let mut walk = Walk::new(seed, 0);
    walk.lossy = faults.lies();
    for _ in 0..10 {
        walk.run(&mut subject, operations / 10)?;
        subject.reclaim(3);
        assert_live_bytes_are(&backing, &pool);
    }
    let walked = walk.check_all(&mut subject)?;
    assert_live_bytes_are(&backing, &pool);
    let (damaged, stats) = (backing.stats().damaged_reads, pool.stats());
    assert!(faults.lies() || damaged == 0, "an honest medium was not believed");
    assert!(stats.bd_failed <= stats.failed_reads && (walked.lost == 0 || damaged > 0));
    drop(subject);
    assert_nothing_leaks(&store, &pool);
    Ok((walked, memory))
}

#[test]
fn a_pool_with_a_backing_is_an_array_of_pages() {
    let (mut written, mut read, mut overwritten) = (0, 0, 0);
    for seed in seeds(16) {
        let (_, memory) =
            walk_on_backing(seed, 8_000 * scale(), Faults::NONE).unwrap_or_else(|divergence| panic!("{divergence}"));
        let did = memory.did();
        (written, read, overwritten) = (written + did.writes, read + did.reads, overwritten + did.overwritten);
    }
    println!("{written} segments written, {overwritten} of them over others, {read} reads");
    let all = std::env::var("COMPCACHE_TEST_SEED").is_err();
    assert!(!all || (written > 1000 && read > 1000 && overwritten > 100));
}

#[test]
fn a_backing_that_fails_loses_no_page_and_one_that_lies_returns_no_other() {
    for faults in Faults::ALL {
        let (mut struck, mut lost) = (0, 0);
        for seed in seeds(6) {
            let (walked, memory) = walk_on_backing(seed, 6_000 * scale(), faults)
                .unwrap_or_else(|divergence| panic!("{faults:?}: {divergence}"));
            struck += memory.did().struck;
            lost += walked.lost;
        }
        println!("{faults:?}: struck {struck} times, {lost} pages lost");
        let all = std::env::var("COMPCACHE_TEST_SEED").is_err();
        assert!(!all || (struck > 20 && (lost > 0) == faults.lies()), "{faults:?}: {struck}, {lost}");
    }
}

#[test]
fn a_pool_with_a_backing_is_an_array_for_every_thread_while_pages_leave_and_come_back() {
    const THREADS: u64 = 3;
    for seed in seeds(6) {
        let store = small_store();
        let codecs = all_codecs(&store);
        let memory = Memory::new(seed, Faults { failed_writes: 10, failed_reads: 10, ..Faults::NONE });
        let backing = Backing::new(memory.medium(), medium::config(seed)).unwrap();
        let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
        let other = store.create_pool_on(PoolConfig { codec: codecs[1], ..PoolConfig::default() }, &backing).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let pool = if thread % 2 == 0 { &pool } else { &other };
                let (store, codecs) = (&store, &codecs);
                scope.spawn(move || {
                    let mut subject = Subject::new(store, pool, codecs, false);
                    let mut walk = Walk::new(seed * 100 + thread, thread / 2 * 1500);
                    walk.run(&mut subject, 8_000 * scale()).unwrap_or_else(|divergence| panic!("{divergence}"));
                    walk.check_all(&mut subject).unwrap_or_else(|divergence| panic!("{divergence}"));
                });
            }
        });
        assert_eq!(backing.stats().live_bytes, pool.stats().bd_bytes + other.stats().bd_bytes);
        assert_eq!(backing.stats().damaged_reads, 0, "what was written must be believed");
        drop(other);
        assert_live_bytes_are(&backing, &pool);
        store.set_limit_bytes(u64::MAX);
        assert_nothing_leaks(&store, &pool);
    }
}

/// Pages that several threads write: what is read must be, whole, one of the generations written to that page.
#[test]
fn a_page_written_by_many_is_always_one_of_their_writes() {
    const PAGES: u64 = 64;
    let store = small_store();
    let codecs = all_codecs(&store);
    let backing = Backing::new(Memory::new(1, Faults::NONE).medium(), medium::config(1)).unwrap();
    let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let issued: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let reads = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (store, pool, codecs, issued, reads) = (&store, &pool, &codecs, &issued, &reads);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(thread + 1);
                let mut worker = Worker::new(store, clock).unwrap();
                let mut fetcher = Fetcher::new().unwrap();
                let mut recompressor = Recompressor::new(store, 1).unwrap();
                let backing = pool.backing().expect("made with one");
                for _ in 0..60_000 * scale() {
                    let index = rng.u64(0..PAGES);
                    let mut page = [0; 4096];
                    match rng.u32(0..100) {
                        0..45 => {
                            let generation = issued[index as usize].fetch_add(1, Ordering::SeqCst) + 1;
                            stamped(&mut page, index, generation);
                            match generation % 2 {
                                0 => refused_at_most(pool.write(&mut worker, PageIndex(index), &page)),
                                _ => refused_at_most(pool.rewrite(&mut worker, PageIndex(index), &page)),
                            }
                        }
                        45..90 => {
                            let take = rng.u32(0..10) == 0;
                            let read = match take {
                                true => pool.fetch_and_take(&mut worker, &mut fetcher, PageIndex(index), &mut page),
                                false => pool.fetch(&mut worker, &mut fetcher, PageIndex(index), &mut page),
                            };
                            if read.unwrap() == Read::Done {
                                assert_is_one_written(&page, index, issued[index as usize].load(Ordering::SeqCst));
                                reads.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        90..94 => _ = pool.discard(PageIndex(index)),
                        94 => pool.set_codec(codecs[rng.usize(0..codecs.len())]).unwrap(),
                        95 => {
                            let from = PageIndex(rng.u64(0..PAGES));
                            let done = pool.recompress(&mut worker, &mut recompressor, &Aged::ALL, from);
                            refused_at_most(done);
                        }
                        96 => {
                            store.compact(&mut worker, 50);
                            // All of it is above three quarters of this; nobody is refused for long.
                            store.set_limit_bytes(store.mem_used_total_bytes() + (64 << 10));
                            let _ = store.reclaim(&mut worker, backing);
                            store.set_limit_bytes(u64::MAX);
                        }
                        97 => {
                            store.set_reserve_bytes(rng.u64(0..4 << 20));
                            let _ = store.refill();
                        }
                        _ => {
                            // Out and back; what it passes over on the way is another page's and nobody else's business.
                            let aside = PageIndex((1 << 20) + thread * 5000 + index);
                            pool.move_slot(PageIndex(index), aside).unwrap();
                            pool.move_slot(aside, PageIndex(index)).unwrap();
                        }
                    }
                }
            });
        }
    });
    assert!(reads.load(Ordering::Relaxed) > 10_000);
    let stats = pool.stats();
    assert!(stats.bd_reads > 100 && stats.bd_writes > 100 && stats.pages_recompressed > 1000, "{stats:?}");
    assert_nothing_leaks(&store, &pool);
}

fn refused_at_most<T>(done: Result<T, StoreError>) {
    if let Err(error) = done {
        assert!(matches!(error, StoreError::LimitReached { .. }), "{error}");
    }
}

/// A content that carries its index and generation; eight in a row differ in nothing else.
fn stamped(page: &mut Page, index: u64, generation: u64) {
    content::fill(page, 5, index, generation / 8);
    page[..8].copy_from_slice(&index.to_le_bytes());
    page[8..16].copy_from_slice(&generation.to_le_bytes());
}

fn assert_is_one_written(page: &Page, index: u64, issued: u64) {
    let generation = u64::from_le_bytes(page[8..16].try_into().unwrap());
    let mut expected = [0; 4096];
    stamped(&mut expected, index, generation);
    assert!((1..=issued).contains(&generation) && *page == expected, "page {index} is nobody's write");
}

/// What a planted bug does to a read.
#[derive(Clone, Copy)]
enum Bug {
    FlippedBit,
    StalePage,
    ForgottenDiscard,
    WriteLost,
    RewriteLost,
}

/// A pool with a bug, once in some thousand operations.
struct Buggy {
    subject: Subject,
    bug: Bug,
    operations: u64,
    last: Page,
}

impl Buggy {
    fn strikes(&mut self) -> bool {
        self.operations += 1;
        self.operations.is_multiple_of(997)
    }
}

impl Pages for Buggy {
    fn write(&mut self, index: PageIndex, page: &Page) -> Result<(), StoreError> {
        if matches!(self.bug, Bug::WriteLost) && self.strikes() {
            return Ok(());
        }
        self.subject.write(index, page)
    }

    fn read(&mut self, index: PageIndex, page: &mut Page, take: bool) -> Result<Read, StoreError> {
        let read = self.subject.read(index, page, take)?;
        if read == Read::Done && matches!(self.bug, Bug::FlippedBit | Bug::StalePage) {
            let before = core::mem::replace(&mut self.last, *page);
            if self.strikes() {
                match self.bug {
                    Bug::FlippedBit => page[4095] ^= 0x10,
                    _ => *page = before,
                }
            }
        }
        Ok(read)
    }

    fn discard(&mut self, index: PageIndex) -> bool {
        if matches!(self.bug, Bug::ForgottenDiscard) && self.strikes() {
            return self.subject.contains(index);
        }
        self.subject.discard(index)
    }

    fn rewrite(&mut self, index: PageIndex, page: &Page) -> Result<(), StoreError> {
        if matches!(self.bug, Bug::RewriteLost) && self.strikes() {
            return Ok(());
        }
        self.subject.rewrite(index, page)
    }

    fn write_run(&mut self, first: PageIndex, pages: &[Page]) -> Result<(), usize> {
        self.subject.write_run(first, pages)
    }

    fn read_run(&mut self, first: PageIndex, pages: &mut [Page], found: &mut [Read]) -> Result<(), StoreError> {
        self.subject.read_run(first, pages, found)
    }

    fn contains(&mut self, index: PageIndex) -> bool {
        self.subject.contains(index)
    }

    fn discard_range(&mut self, first: PageIndex, count: u64) -> u64 {
        self.subject.discard_range(first, count)
    }

    fn move_slot(&mut self, from: PageIndex, to: PageIndex) -> Result<bool, StoreError> {
        self.subject.move_slot(from, to)
    }

    fn move_range(&mut self, from: PageIndex, to: PageIndex, count: u64) -> Result<u64, StoreError> {
        self.subject.move_range(from, to, count)
    }

    fn stored(&mut self, first: PageIndex, count: u64) -> Vec<PageIndex> {
        self.subject.stored(first, count)
    }

    fn disturb(&mut self, random: u64) {
        self.subject.disturb(random);
    }
}

#[test]
fn a_planted_bug_is_caught_by_the_same_walk() {
    for bug in [Bug::FlippedBit, Bug::StalePage, Bug::ForgottenDiscard, Bug::WriteLost, Bug::RewriteLost] {
        let caught = (1..=20).any(|seed| {
            let store = small_store();
            let pool = store.create_pool(PoolConfig::default()).unwrap();
            let subject = Subject::new(&store, &pool, &[Codec::Lz4], false);
            let mut buggy = Buggy { subject, bug, operations: 0, last: [0; 4096] };
            let mut walk = Walk::new(seed, 0);
            walk.run(&mut buggy, 20_000).is_err() || walk.check_all(&mut buggy).is_err()
        });
        assert!(caught, "bug {} was not noticed", bug as u8);
    }
}
