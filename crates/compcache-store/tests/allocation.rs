//! Nothing on the page path allocates, in Rust or in C.
//!
//! The C library's allocator is replaced, for this test program alone, by one that counts the calls of a watched thread
//! and passes them on: Rust's allocator ends there, and so would zstd's.

#![allow(unsafe_code)]

#[path = "model/content.rs"]
mod content;

use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use compcache_store::{
    Aged, Backing, BackingConfig, Batch, Codec, Fetcher, FileMedium, Page, PageIndex, Pool, PoolConfig, Read,
    Recompressor, Store, StoreConfig, Worker, train_dictionary,
};

static WATCHED: AtomicI32 = AtomicI32::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(old: *mut c_void, bytes: usize) -> *mut c_void;
    fn __libc_memalign(alignment: usize, bytes: usize) -> *mut c_void;
    fn __libc_free(old: *mut c_void);
}

fn count() {
    let watched = WATCHED.load(Ordering::Relaxed);
    if watched != 0 && rustix::thread::gettid().as_raw_nonzero().get() == watched {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }
}

#[unsafe(no_mangle)]
extern "C" fn malloc(bytes: usize) -> *mut c_void {
    count();
    // SAFETY: the C library's own function under its other name, with its own contract.
    unsafe { __libc_malloc(bytes) }
}

#[unsafe(no_mangle)]
extern "C" fn calloc(items: usize, bytes: usize) -> *mut c_void {
    count();
    // SAFETY: as for malloc.
    unsafe { __libc_calloc(items, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(old: *mut c_void, bytes: usize) -> *mut c_void {
    count();
    // SAFETY: as for malloc; the caller keeps realloc's contract.
    unsafe { __libc_realloc(old, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_memalign(to: *mut *mut c_void, alignment: usize, bytes: usize) -> i32 {
    count();
    // SAFETY: as for malloc; `to` is the caller's to write to.
    unsafe { *to = __libc_memalign(alignment, bytes) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn free(old: *mut c_void) {
    // Giving memory back would reach the host program's allocator just as taking it.
    count();
    // SAFETY: as for malloc; the caller keeps free's contract.
    unsafe { __libc_free(old) }
}

fn calls_during(work: impl FnOnce()) -> u64 {
    let before = CALLS.load(Ordering::Relaxed);
    WATCHED.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Relaxed);
    work();
    WATCHED.store(0, Ordering::Relaxed);
    CALLS.load(Ordering::Relaxed) - before
}

/// Everything out to the backing, twice so that segments are cleaned, and some of it back.
fn there_and_back(
    store: &Store,
    pool: &Pool,
    worker: &mut Worker,
    (fetcher, batch): (&mut Fetcher, &mut Batch),
    (run, found): (&mut [Page], &mut [Read]),
) {
    let backing = pool.backing().expect("made with one");
    let mut page = [0; 4096];
    for generation in 0..4 {
        for index in (0..2000).filter(|index| index % 4 >= generation) {
            content::fill(&mut page, 3, index, generation);
            pool.write(worker, PageIndex(index), &page).expect("there is no limit");
        }
        store.set_limit_bytes(store.mem_used_total_bytes());
        while store.reclaim(worker, backing).expect("a file takes it").pages > 0 {}
        store.set_limit_bytes(u64::MAX);
    }
    for index in 0..500 {
        assert_eq!(pool.fetch(worker, fetcher, PageIndex(index), &mut page), Ok(Read::Done));
        assert_eq!(pool.fetch_and_take(worker, fetcher, PageIndex(1000 + index), &mut page), Ok(Read::Done));
    }
    for first in (500..1000).step_by(64) {
        pool.read_run(worker, PageIndex(first), run, found).expect("it is there");
        pool.fetch_run(worker, (fetcher, batch), PageIndex(first), run, found).expect("it is there");
    }
    backing.tidy(|| true);
    assert!(pool.stats().bd_reads > 0 && backing.stats().live_bytes == pool.stats().bd_bytes);
}

/// Groups are made, read from, left, thinned out, moved, made anew and freed.
fn in_groups(store: &Store, pool: &Pool, worker: &mut Worker, recompressor: &mut Recompressor) {
    let mut page = [0; 4096];
    for index in 0..2000 {
        content::fill(&mut page, 3, index, 1);
        pool.write(worker, PageIndex(index), &page).expect("there is no limit");
    }
    let before = pool.stats().pages_recompressed;
    for thinned in 1..4 {
        let mut next = Some(PageIndex(0));
        while let Some(from) = next {
            next = pool.recompress(worker, recompressor, &Aged::ALL, from).expect("there is no limit").next;
        }
        for index in (0..2000).filter(|index| index % 4 >= thinned) {
            pool.read(worker, PageIndex(index), &mut page).expect("nothing is corrupt");
            if index % 4 == thinned {
                pool.discard(PageIndex(index));
            }
        }
        while !store.compact(worker, 100).finished {}
    }
    // What zstd made before is not much smaller in groups, on this content.
    let stats = pool.stats();
    assert!(pool.codec() != Codec::Lz4 || stats.pages_recompressed > before + 500, "{stats:?}");
    pool.discard_range(PageIndex(0), PageIndex::LIMIT);
}

/// Every operation of the page path, over enough pages to make tables, spans and victims.
fn page_path(
    store: &Store,
    pool: &Pool,
    worker: &mut Worker,
    (fetcher, batch): (&mut Fetcher, &mut Batch),
    run: &mut [Page],
    found: &mut [Read],
) {
    let mut page = [0; 4096];
    for index in 0..3000 {
        content::fill(&mut page, 3, index, 1);
        pool.write(worker, PageIndex(index * 3), &page).expect("there is no limit");
        page[index as usize] ^= 1;
        pool.rewrite(worker, PageIndex(index * 3), &page).expect("there is no limit");
        assert_eq!(pool.read(worker, PageIndex(index * 3), &mut page), Ok(Read::Done));
    }
    pool.write_run(worker, PageIndex(1 << 33), run).expect("there is no limit");
    pool.read_run(worker, PageIndex(1 << 33), run, found).expect("nothing is corrupt");
    for index in (0..3000).filter(|index| index % 3 != 0) {
        assert_eq!(pool.take(worker, PageIndex(index * 3), &mut page), Ok(Read::Done));
    }
    pool.move_slot(PageIndex(0), PageIndex(1 << 30)).expect("memory for a table");
    pool.move_range(PageIndex(0), PageIndex(1 << 32), 9000).expect("memory for tables");
    let moved = (0..10_000).map(|_| store.compact(worker, 100)).take_while(|step| !step.finished);
    assert!(moved.map(|step| step.moved).sum::<usize>() > 0, "compaction had nothing to do");
    assert!(pool.contains(PageIndex(1 << 30)) && pool.discard(PageIndex(1 << 30)));
    store.set_limit_bytes(0);
    content::fill(&mut page, 3, 7, 1);
    page[0] ^= 1;
    pool.write(worker, PageIndex(5), &page).expect_err("the limit is reached");
    store.set_limit_bytes(u64::MAX);
    there_and_back(store, pool, worker, (fetcher, batch), (run, found));
    pool.discard_range(PageIndex(0), PageIndex::LIMIT);
    assert!(pool.stats().pages_stored() == 0 && pool.latency().reads.count > 0);
}

#[test]
fn the_page_path_allocates_nothing_with_any_codec() {
    let samples: Vec<Page> = (0..400)
        .map(|index| {
            let mut page = [0; 4096];
            content::fill(&mut page, 77, index, 1);
            page
        })
        .collect();
    let dictionary = train_dictionary(&samples, 16 << 10).unwrap();
    let store = Store::new(StoreConfig::default()).unwrap();
    let id = store.load_dictionary(&dictionary, 3).unwrap();
    // Larger than what is alive, and smaller than what is written.
    let config = BackingConfig { capacity_bytes: 5 << 20, segment_bytes: 256 << 10 };
    let medium = Box::new(FileMedium::new(tempfile::tempfile().unwrap().into()));
    let backing = Backing::new(medium, config).unwrap();
    let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let (mut fetcher, mut batch) = (Fetcher::new().unwrap(), Batch::new().unwrap());
    let mut worker = Worker::new(&store, || 0).unwrap();
    let mut recompressor = Recompressor::new(&store, 3).unwrap();
    let (mut run, mut found) = (samples[..64].to_vec(), vec![Read::Absent; 64]);
    assert!(calls_during(|| drop(std::hint::black_box(vec![0u8; 64]))) >= 2, "the counter does not count");
    let levels = [-7, 1, 3, 9, 19].map(|level| Codec::Zstd { level });
    for codec in levels.into_iter().chain([Codec::Lz4, Codec::ZstdDictionary(id)]) {
        let calls = calls_during(|| {
            pool.set_codec(codec).expect("a codec of this store");
            page_path(&store, &pool, &mut worker, (&mut fetcher, &mut batch), &mut run, &mut found);
            in_groups(&store, &pool, &mut worker, &mut recompressor);
        });
        assert_eq!(calls, 0, "{codec:?}");
    }
    assert!(backing.stats().records_moved > 0, "nothing was cleaned: {:?}", backing.stats());
}
