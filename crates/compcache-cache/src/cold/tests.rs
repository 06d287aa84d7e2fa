//! More pages fit, and are what they were.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use compcache_store::{Codec, Page};

use super::*;
use crate::{FileId, LEAST_BYTES};

const ALWAYS: Recompress = Recompress { level: Some(1), where_it_pays: false, after: Duration::from_millis(40) };
const FILE: FileId = FileId { dev: 1, ino: 1 };
/// Longer than anything takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A page that compresses beside its neighbours much better than alone: some noise that all have, and something of its own.
fn content(page: u32, version: u64) -> Page {
    let mut bytes = [0; 4096];
    fastrand::Rng::with_seed(7).fill(&mut bytes[..1500]);
    fastrand::Rng::with_seed(u64::from(page) << 20 ^ version).fill(&mut bytes[1500..1600]);
    bytes
}

/// A cache that a thread keeps up.
fn kept_up(limit_bytes: u64, recompress: Recompress) -> (Arc<Cache<u64>>, Worker) {
    let cache = Arc::new(Cache::new(limit_bytes, Codec::Lz4).unwrap());
    cache.set_recompress(recompress).unwrap();
    let (kept, worker) = (Arc::downgrade(&cache), cache.worker().unwrap());
    thread::spawn(move || Cache::keep_up(&kept, worker, false));
    let worker = cache.worker().unwrap();
    (cache, worker)
}

/// Reads pages in runs of 16 and puts those that are not here. Returns how many were.
fn read(cache: &Cache<u64>, worker: &mut Worker, pages: std::ops::Range<u32>, version: u64) -> usize {
    let mut here = 0;
    for first in pages.step_by(16) {
        let token = cache.begin_read(FILE, version, true);
        let (mut got, mut found) = ([[0; 4096]; 16], [false; 16]);
        cache.get(worker, token, first, &mut got, &mut found);
        for (at, page) in (first..).zip(&got).filter(|(at, _)| found[(at - first) as usize]) {
            assert!(*page == content(at, version), "page {at} is not what it was");
        }
        here += found.iter().filter(|found| **found).count();
        if found.contains(&false) {
            let below: Vec<Page> = (first..first + 16).map(|page| content(page, version)).collect();
            cache.put(worker, token, first, &below);
        }
    }
    here
}

/// Reads pages, in parts for which there is room beside those that are in groups by then.
fn group(cache: &Cache<u64>, worker: &mut Worker, pages: u32) {
    for first in (0..pages).step_by(2048) {
        read(cache, worker, first..first + 2048, 1);
        let least = u64::from(first + 2048) / 10 * 9;
        wait_until("nine tenths are in groups", || cache.stats().grouped_pages >= least);
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not in a minute");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn more_pages_fit_where_cold_ones_are_compressed_together() {
    const LIMIT_BYTES: u64 = 16 << 20;
    // Twice as many as fit one by one.
    let pages = 0..16_384;
    let (cache, mut worker) = kept_up(LIMIT_BYTES, Recompress { level: None, ..ALWAYS });
    for _ in 0..3 {
        read(&cache, &mut worker, pages.clone(), 1);
    }
    let alone = cache.stats();
    assert_eq!(alone.grouped_pages, 0);
    assert!((5000..12_000).contains(&alone.pages_stored), "{alone:?}");
    cache.set_recompress(ALWAYS).unwrap();
    let begun = Instant::now();
    while cache.stats().pages_stored < pages.end.into() {
        let grouped = cache.stats().grouped_pages;
        thread::sleep(Duration::from_millis(500));
        let stats = cache.stats();
        assert!(stats.mem_used_total <= LIMIT_BYTES, "{stats:?}");
        assert!(begun.elapsed() < PATIENCE, "{stats:?}");
        if stats.grouped_pages == grouped {
            read(&cache, &mut worker, pages.clone(), 1);
        }
    }
    assert!(cache.stats().grouped_pages > pages.end as u64 / 2, "{:?}", cache.stats());
    // Pages that are found the second time leave their groups, and others may have to go for them.
    assert!(read(&cache, &mut worker, pages.clone(), 1) > pages.len() / 4 * 3, "{:?}", cache.stats());
}

#[test]
fn where_it_is_to_pay_nothing_is_done_unless_what_lies_below_is_slow() {
    let (cache, mut worker) = kept_up(16 << 20, Recompress { where_it_pays: true, ..ALWAYS });
    read(&cache, &mut worker, 0..4096, 1);
    cache.took_below(4096, Duration::from_millis(12));
    thread::sleep(Duration::from_millis(800));
    assert_eq!(cache.stats().grouped_pages, 0, "what lies below is fast");
    cache.took_below(4096, Duration::from_millis(400));
    wait_until("pages are in groups", || cache.stats().grouped_pages > 3000);
}

#[test]
fn the_memory_of_groups_of_which_pages_go_is_no_memory_beyond_the_limit() {
    let (cache, mut worker) = kept_up(32 << 20, ALWAYS);
    let mut rng = fastrand::Rng::with_seed(1);
    read(&cache, &mut worker, 0..16_384, 1);
    wait_until("pages are in groups", || cache.stats().grouped_pages > 15_000);
    // Of most groups some pages go.
    for _ in 0..3000 {
        let page = rng.u32(..16_384);
        cache.begin_write(FILE, (page.into(), u64::from(page) + 1)).done(1, page.into(), &[], &[]);
    }
    for limit_bytes in [12 << 20, 5 << 20, LEAST_BYTES, 16 << 20] {
        cache.set_limit_bytes(limit_bytes);
        // Memory goes with the next compaction.
        wait_until("memory is within the limit", || cache.stats().mem_used_total <= limit_bytes);
        for _ in 0..200 {
            let first = rng.u32(..1000) * 16;
            read(&cache, &mut worker, first..first + 16, 1);
            assert!(cache.stats().mem_used_total <= limit_bytes, "{limit_bytes}: {:?}", cache.stats());
        }
        assert!(cache.stats().pages_stored > 50, "{limit_bytes}: {:?}", cache.stats());
    }
    cache.drop_file(FILE);
    assert_eq!(cache.lock().charged_bytes, 0);
}

/// A cache whose limit is reached by the groups that it has, and pages of which all are in them.
pub fn full_of_groups() -> (Arc<Cache<u64>>, Worker) {
    let (cache, mut worker) = kept_up(14 << 20, ALWAYS);
    group(&cache, &mut worker, 16_384);
    cache.set_limit_bytes(6 << 20);
    assert!(cache.stats().pages_stored > 9_000, "{:?}", cache.stats());
    (cache, worker)
}

#[test]
fn new_pages_are_taken_where_little_is_left_of_groups_though_no_more_are_made() {
    let (cache, mut worker) = full_of_groups();
    let mut rng = fastrand::Rng::with_seed(4);
    for (recompress, begin) in [(Recompress { level: None, ..ALWAYS }, 20_000), (ALWAYS, 40_000)] {
        // New tools do not know what the old ones made.
        cache.set_recompress(Recompress { after: Duration::from_secs(3600), ..ALWAYS }).unwrap();
        thread::sleep(Duration::from_millis(600));
        cache.set_recompress(recompress).unwrap();
        for page in (0..16_384).filter(|_| rng.u8(..8) > 0) {
            cache.begin_write(FILE, (page, page + 1)).done(1, page, &[], &[]);
        }
        let (begun, before) = (Instant::now(), cache.stats().evictions);
        let (mut first, mut taken) = (begin, 0);
        while taken < 4000 {
            assert!(begun.elapsed() < PATIENCE, "{taken} pages: {:?}", cache.stats());
            read(&cache, &mut worker, first..first + 16, 1);
            taken += read(&cache, &mut worker, first..first + 16, 1);
            first += 16;
            assert!(cache.stats().mem_used_total <= 6 << 20, "{:?}", cache.stats());
            thread::sleep(Duration::from_millis(1));
        }
        assert!(first < begin + 2 * 4000, "{taken} of {}: {:?}", first - begin, cache.stats());
        assert!(recompress.level.is_some() || cache.stats().evictions > before, "there was room for all");
    }
}

#[test]
fn a_new_page_pushes_out_few_others_though_some_of_each_group_are_read_again() {
    let (cache, mut worker) = full_of_groups();
    let mut rng = fastrand::Rng::with_seed(5);
    // One of four is read again.
    for _ in 0..4096 {
        let page = rng.u32(..16_384);
        let token = cache.begin_read(FILE, 1, true);
        cache.get(&mut worker, token, page, &mut [[0; 4096]], &mut [false]);
    }
    let (begun, before, mut first) = (Instant::now(), cache.stats(), 20_000);
    while cache.stats().puts - before.puts < 6000 {
        assert!(begun.elapsed() < PATIENCE, "{before:?} {:?}", cache.stats());
        // One by one, too, as who reads at random has them.
        let token = cache.begin_read(FILE, 1, true);
        cache.put(&mut worker, token, first + 16, &[content(first + 16, 1)]);
        read(&cache, &mut worker, first..first + 16, 1);
        first += 17;
        thread::sleep(Duration::from_millis(1));
    }
    let after = cache.stats();
    let came = after.puts + after.failed_puts - before.puts - before.failed_puts;
    let evictions = after.evictions - before.evictions;
    assert!(evictions > 0 && evictions < came * 5 / 2, "{evictions} went for {came}: {before:?} {after:?}");
    assert!(after.pages_stored > before.pages_stored / 2, "{before:?} {after:?}");
}

#[test]
fn a_limit_that_is_lowered_by_much_is_kept_soon_though_groups_are_half_empty() {
    let (cache, mut worker) = kept_up(64 << 20, ALWAYS);
    group(&cache, &mut worker, 65_536);
    let mut rng = fastrand::Rng::with_seed(6);
    for limit_bytes in [6 << 20, LEAST_BYTES] {
        for page in (0..65_536).filter(|_| rng.u8(..3) == 0) {
            cache.begin_write(FILE, (page, page + 1)).done(1, page, &[], &[]);
        }
        cache.set_limit_bytes(limit_bytes);
        let begun = Instant::now();
        while cache.stats().mem_used_total > limit_bytes {
            assert!(begun.elapsed() < Duration::from_secs(15), "{limit_bytes}: {:?}", cache.stats());
            thread::sleep(Duration::from_millis(10));
        }
        let before = cache.stats().puts;
        (100_000..100_800).step_by(16).for_each(|first| _ = read(&cache, &mut worker, first..first + 16, 1));
        assert!(cache.stats().puts > before + 200, "{:?}", cache.stats());
    }
}

#[test]
fn pages_are_what_was_written_last_while_they_are_put_into_groups() {
    const PAGES: u32 = 4096;
    let (cache, mut worker) = kept_up(6 << 20, Recompress { after: Duration::from_millis(5), ..ALWAYS });
    let mut rng = fastrand::Rng::with_seed(2);
    let begun = Instant::now();
    let (mut version, mut grouped) = (1, 0);
    while begun.elapsed() < Duration::from_secs(8) || grouped == 0 {
        assert!(begun.elapsed() < PATIENCE, "no page was ever in a group");
        for _ in 0..rng.u32(..500) {
            let first = rng.u32(..PAGES / 16) * 16;
            read(&cache, &mut worker, first..first + 16, version);
        }
        grouped += cache.stats().grouped_pages;
        match rng.u32(..60) {
            // The file looks different.
            0 => version += 1,
            1 => cache.set_limit_bytes(rng.u64(5..9) << 20),
            2 => cache.clear(),
            // Long enough for pages to become cold.
            3..9 => thread::sleep(Duration::from_millis(800)),
            _ => thread::sleep(Duration::from_millis(rng.u64(..20))),
        }
    }
}
