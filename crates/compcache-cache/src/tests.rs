//! The cache is an array of pages for each file, or has not the page: never an old one.

use super::*;
use crate::index::charge;

/// A version of a file.
type Stamp = u64;

fn id(file: u64) -> FileId {
    FileId { dev: 1, ino: file }
}

fn stamp_of_version(version: u64) -> Stamp {
    version
}

/// What page `page` of version `version` of a file holds: compressible, and like no other.
fn content(file: u64, page: u32, version: u64) -> Page {
    let mut bytes = [0; 4096];
    let mut rng = fastrand::Rng::with_seed(file << 48 ^ u64::from(page) << 20 ^ version);
    rng.fill(&mut bytes[..700]);
    bytes
}

fn incompressible(page: u32) -> Page {
    let mut bytes = [0; 4096];
    fastrand::Rng::with_seed(page.into()).fill(&mut bytes);
    bytes
}

fn cache(limit_bytes: u64) -> (Cache<Stamp>, Worker) {
    let cache = Cache::new(limit_bytes, Codec::Lz4).unwrap();
    let worker = cache.worker().unwrap();
    (cache, worker)
}

fn got(cache: &Cache<Stamp>, worker: &mut Worker, token: Token, page: u32) -> Option<Page> {
    let (mut pages, mut found) = ([[0; 4096]], [false]);
    cache.get(worker, token, page, &mut pages, &mut found);
    found[0].then_some(pages[0])
}

#[test]
fn a_page_is_found_as_it_was_until_the_file_looks_different() {
    let (cache, mut worker) = cache(16 << 20);
    let (old, new) = (stamp_of_version(1), stamp_of_version(2));
    let token = cache.begin_read(id(1), old, true);
    cache.put(&mut worker, token, 3, &[content(1, 3, 1)]);
    let token = cache.begin_read(id(1), old, true);
    assert_eq!(got(&cache, &mut worker, token, 3), Some(content(1, 3, 1)));
    assert_eq!(got(&cache, &mut worker, token, 2), None);
    let token = cache.begin_read(id(1), new, true);
    assert_eq!(got(&cache, &mut worker, token, 3), None);
    assert_eq!(cache.stats().pages_stored, 0);
}

#[test]
fn what_a_read_took_before_or_during_a_write_is_not_kept() {
    let (cache, mut worker) = cache(16 << 20);
    let stamp = stamp_of_version(1);
    let before = cache.begin_read(id(1), stamp, true);
    let writing = cache.begin_write(id(1), (3, 4));
    let during = cache.begin_read(id(1), stamp, true);
    cache.put(&mut worker, before, 3, &[content(1, 3, 1)]);
    writing.done(stamp, 0, &[], &[]);
    for token in [before, during] {
        cache.put(&mut worker, token, 3, &[content(1, 3, 1)]);
    }
    let after = cache.begin_read(id(1), stamp, true);
    assert_eq!(got(&cache, &mut worker, after, 3), None);
    assert_eq!(cache.stats().puts, 0);
}

#[test]
fn an_unsettled_stamp_keeps_nothing() {
    let (cache, mut worker) = cache(16 << 20);
    let token = cache.begin_read(id(1), stamp_of_version(1), false);
    cache.put(&mut worker, token, 0, &[content(1, 0, 1)]);
    assert_eq!(cache.stats().puts, 0);
    assert_eq!(cache.stats().files, 0, "nor a record of the file");
}

#[test]
fn a_write_that_is_known_to_be_the_only_change_leaves_other_pages_here() {
    let (cache, mut worker) = cache(16 << 20);
    let (old, new) = (stamp_of_version(1), stamp_of_version(2));
    let token = cache.begin_read(id(1), old, true);
    cache.put(&mut worker, token, 0, &[content(1, 0, 1), content(1, 1, 1), content(1, 2, 1)]);
    let writing = cache.begin_write(id(1), (1, 2));
    writing.done(new, 0, &[], &[]);
    let token = cache.begin_read(id(1), new, true);
    assert_eq!(got(&cache, &mut worker, token, 0), Some(content(1, 0, 1)));
    assert_eq!(got(&cache, &mut worker, token, 1), None);
    assert_eq!(got(&cache, &mut worker, token, 2), Some(content(1, 2, 1)));
}

/// A cache that keeps what is written.
fn keeping(limit_bytes: u64) -> (Cache<Stamp>, Worker) {
    let (cache, mut worker) = cache(limit_bytes);
    cache.keep_written(&mut worker, Duration::ZERO);
    (cache, worker)
}

fn keep(cache: &Cache<Stamp>, worker: &mut Worker) {
    cache.keep_written(worker, Duration::ZERO);
}

#[test]
fn what_was_written_is_found_without_reading_below() {
    let (cache, mut worker) = keeping(16 << 20);
    let stamps = [1, 2, 3].map(stamp_of_version);
    let pages: Vec<Page> = (0..40).map(|page| content(1, page, 1)).collect();
    cache.begin_write(id(1), (100, 140)).done(stamps[0], 100, &pages, &[]);
    cache.begin_write(id(1), (140, 141)).done(stamps[1], 140, &[content(1, 140, 2)], &[]);
    let token = cache.begin_read(id(1), stamps[1], true);
    assert_eq!(got(&cache, &mut worker, token, 100), None, "it waits");
    cache.begin_write(id(2), (0, 2)).done(stamps[0], 0, &[content(2, 0, 1)], b"the end");
    keep(&cache, &mut worker);
    let end = cache.begin_read(id(2), stamps[0], true);
    let last = got(&cache, &mut worker, end, 1).unwrap();
    assert!(last.starts_with(b"the end") && last[7..] == [0; 4089]);
    for page in 100..140 {
        assert_eq!(got(&cache, &mut worker, token, page), Some(content(1, page - 100, 1)));
    }
    assert_eq!(got(&cache, &mut worker, token, 140), Some(content(1, 140, 2)));
    let other = cache.begin_read(id(1), stamps[2], true);
    assert_eq!(got(&cache, &mut worker, other, 100), None, "the file was changed since");
}

#[test]
fn what_was_written_again_or_at_the_same_time_is_not_kept() {
    let (cache, mut worker) = keeping(16 << 20);
    let stamp = stamp_of_version(1);
    let page = |version| [content(1, 5, version)];
    // Again, while it waits.
    cache.begin_write(id(1), (5, 6)).done(stamp, 5, &page(1), &[]);
    drop(cache.begin_write(id(1), (0, 6)));
    // At the same time: neither is known to be the last.
    let (one, other) = (cache.begin_write(id(1), (4, 6)), cache.begin_write(id(1), (5, 7)));
    one.done(stamp, 5, &page(2), &[]);
    other.done(stamp, 5, &page(3), &[]);
    // The file is gone, the file looked different; or all was dropped.
    cache.begin_write(id(2), (5, 6)).done(stamp, 5, &page(4), &[]);
    cache.drop_file(id(2));
    cache.begin_write(id(3), (5, 6)).done(stamp, 5, &page(5), &[]);
    cache.begin_read(id(3), stamp_of_version(2), true);
    keep(&cache, &mut worker);
    assert_eq!(cache.stats().pages_stored, 0, "{:?}", cache.stats());
    let writing = cache.begin_write(id(4), (5, 6));
    cache.clear();
    writing.done(stamp, 5, &page(6), &[]);
    keep(&cache, &mut worker);
    assert_eq!(cache.stats().pages_stored, 0, "{:?}", cache.stats());
    // Writes that touch each other's files and neighbours only.
    let (one, other, third) =
        (cache.begin_write(id(1), (4, 6)), cache.begin_write(id(1), (6, 8)), cache.begin_write(id(2), (4, 8)));
    one.done(stamp, 5, &page(7), &[]);
    other.done(stamp, 6, &page(8), &[]);
    third.done(stamp, 5, &page(9), &[]);
    keep(&cache, &mut worker);
    assert_eq!(cache.stats().pages_stored, 3);
}

#[test]
fn a_file_larger_than_the_cache_that_is_read_in_order_again_is_found_in_part() {
    let (cache, mut worker) = cache(4 << 20);
    let stamp = stamp_of_version(1);
    let mut rounds = Vec::new();
    const PAGES: u32 = 12_000;
    for _ in 0..4 {
        let (mut here, mut most) = (0, 0);
        for page in 0..PAGES {
            let token = cache.begin_read(id(1), stamp, true);
            match got(&cache, &mut worker, token, page) {
                Some(found) => {
                    assert!(found == content(1, page, 1));
                    here += 1;
                }
                None => cache.put(&mut worker, token, page, &[content(1, page, 1)]),
            }
            most = most.max(cache.stats().pages_stored);
        }
        rounds.push((here, most));
    }
    for (round, (here, most)) in rounds.into_iter().enumerate().skip(1) {
        assert!(most < PAGES.into(), "all of it fits");
        assert!(here > most / 5 * 4, "{here} of {most} pages that are there are found in round {round}");
    }
}

#[test]
fn what_is_read_along_below_is_found_but_saves_nothing() {
    let (cache, mut worker) = cache(16 << 20);
    let stamp = stamp_of_version(1);
    let token = cache.begin_read(id(1), stamp, true);
    for page in [0, 2, 4, 5] {
        cache.put(&mut worker, token, page, &[content(1, page, 1)]);
    }
    let (mut pages, mut found) = (vec![[0; 4096]; 7], vec![false; 7]);
    cache.get(&mut worker, token, 0, &mut pages, &mut found);
    assert_eq!(found, [true, false, true, false, true, true, false]);
    assert!(pages[2] == content(1, 2, 1));
    assert_eq!((cache.stats().succ_gets, cache.stats().failed_gets), (1, 6));
    let (mut pages, mut found) = (vec![[0; 4096]; 2], vec![false; 2]);
    cache.get(&mut worker, token, 4, &mut pages, &mut found);
    assert_eq!((cache.stats().succ_gets, cache.stats().failed_gets), (3, 6));
}

#[test]
fn where_main_holds_what_is_read_along_below_was_not_read() {
    for holds in [true, false] {
        let (cache, mut worker) = cache(16 << 20);
        let token = cache.begin_read(id(1), stamp_of_version(1), true);
        // The second is the only one of main.
        for page in [10, 1] {
            cache.put(&mut worker, token, page, &[content(1, page, 1)]);
        }
        cache.lock().miniatures.let_main_hold(holds);
        cache.get(&mut worker, token, 0, &mut [[0; 4096]; 3], &mut [false; 3]);
        assert_eq!(cache.lock().queues.gives_way(1), holds);
    }
}

#[test]
fn main_holds_only_as_long_as_it_has_most_of_what_is_here() {
    let (cache, mut worker) = keeping(2 << 20);
    read_runs(&cache, &mut worker, 1, 0..4000);
    for _ in 0..2 {
        read_runs(&cache, &mut worker, 1, (0..4000).filter(|page| cache.has(id(1), *page, 1)));
    }
    let wanted = |soon| {
        let index = &mut *cache.lock();
        index.miniatures.let_main_hold(true);
        index.wants_again(1, soon)
    };
    assert!(wanted(false) == Wanted::None && wanted(true) == Wanted::Soon);
    let stored: Vec<u32> = (0..4000).filter(|page| cache.has(id(1), *page, 1)).collect();
    for page in &stored[..stored.len() * 2 / 5] {
        let range = (u64::from(*page), u64::from(*page) + 1);
        cache.begin_write(id(1), range).done(stamp_of_version(1), range.0, &[content(1, *page, 1)], &[]);
        keep(&cache, &mut worker);
    }
    assert!(wanted(false) == Wanted::Again);
}

/// Reads runs of pages from the pages `firsts` on, through the cache. Returns how many were found and how many are stored then.
fn read_runs(cache: &Cache<Stamp>, worker: &mut Worker, run: usize, firsts: impl Iterator<Item = u32>) -> (u64, u64) {
    let (stamp, before) = (stamp_of_version(1), cache.stats());
    for first in firsts {
        let token = cache.begin_read(id(1), stamp, true);
        let (mut pages, mut found) = (vec![[0; 4096]; run], vec![false; run]);
        cache.get(worker, token, first, &mut pages, &mut found);
        for ((page, now), found) in (first..).zip(&mut pages).zip(&found) {
            let then = content(1, page, 1);
            assert!(!found || *now == then);
            *now = then;
        }
        for missing in missing(&found) {
            cache.took_below(missing.len(), Duration::from_millis(1));
            cache.put(worker, token, first + missing.start as u32, &pages[missing]);
        }
    }
    let after = cache.stats();
    (after.succ_gets - before.succ_gets, after.pages_stored)
}

/// By the page and by the run.
#[test]
fn of_a_file_a_little_larger_than_the_cache_as_much_is_found_as_fits_and_then_what_is_used_most() {
    const PAGES: usize = 6144;
    for run in [1, 16] {
        let (cache, mut worker) = cache(4 << 20);
        let mut rng = fastrand::Rng::with_seed(9);
        let mut firsts: Vec<u32> = (0..PAGES as u32).step_by(run).collect();
        let (mut here, mut fit) = (0, 0);
        for _ in 0..12 {
            rng.shuffle(&mut firsts);
            (here, fit) = read_runs(&cache, &mut worker, run, firsts.iter().copied());
        }
        assert!((4000..5500).contains(&fit) && here > fit / 5 * 4, "{here} of {fit} that fit, in runs of {run}");
        // Nine of ten reads go to one tenth.
        for _ in 0..2 {
            let among = |tenth: u8| if tenth == 0 { firsts.len() } else { firsts.len() / 10 };
            let skewed: Vec<u32> = (0..firsts.len())
                .map(|_| among(rng.u8(..10)))
                .collect::<Vec<_>>()
                .into_iter()
                .map(|count| firsts[rng.usize(..count)])
                .collect();
            (here, _) = read_runs(&cache, &mut worker, run, skewed.into_iter());
        }
        assert!(here as usize > PAGES / 10 * 9, "{here} of {PAGES} are found, in runs of {run}");
    }
}

#[test]
fn new_pages_are_taken_only_where_that_pays_and_all_while_there_is_room() {
    let (cache, mut worker) = cache(2 << 20);
    let stamp = stamp_of_version(1);
    // Sixteen pages at a time, which it took no time to read below.
    let mut read = |file: u64, first: u32| {
        let token = cache.begin_read(id(file), stamp, true);
        let (mut pages, mut found) = (vec![[0; 4096]; 16], vec![false; 16]);
        cache.get(&mut worker, token, first, &mut pages, &mut found);
        for (page, (content_now, found)) in (first..).zip(pages.iter_mut().zip(&found)) {
            if *found {
                assert!(*content_now == content(file, page, 1));
            }
            *content_now = content(file, page, 1);
        }
        cache.took_below(16, Duration::from_nanos(16));
        cache.put(&mut worker, token, first, &pages);
        cache.stats()
    };
    let filled = (0..40).map(|run| read(1, run * 16)).last().unwrap();
    assert_eq!((filled.pages_stored, filled.rejected_puts), (640, 0), "there was room for all");
    let scanned = (0..2000).map(|run| read(2, run * 16)).last().unwrap();
    assert!(scanned.rejected_puts > 16_000, "most of 32 000 are not worth it: {scanned:?}");
    // What was left out is known, and taken when it comes again.
    let before = cache.stats();
    let again = (1985..2000).map(|run| read(2, run * 16)).last().unwrap();
    let (here, taken) = (again.succ_gets - before.succ_gets, again.puts - before.puts);
    assert!(here + taken > 200, "{here} of 240 were here, {taken} were taken");
    // Most of it is gone, though not all: there is room.
    cache.drop_file(id(2));
    let before = cache.stats();
    assert!(before.pages_stored > 0, "{before:?}");
    let refilled = (0..30).map(|run| read(3, run * 16)).last().unwrap();
    assert_eq!(refilled.puts - before.puts, 480);
    // A limit that is raised makes room, too.
    (0..1000).for_each(|run| _ = read(4, run * 16));
    cache.set_limit_bytes(8 << 20);
    let before = cache.stats();
    let raised = (0..40).map(|run| read(5, run * 16)).last().unwrap();
    assert_eq!(raised.puts - before.puts, 640);
}

#[test]
fn writing_pushes_out_nothing_that_is_read() {
    let (cache, mut worker) = keeping(2 << 20);
    let stamp = stamp_of_version(1);
    for round in 0..2 {
        for page in 0..200 {
            let token = cache.begin_read(id(1), stamp, true);
            if got(&cache, &mut worker, token, page).is_none() {
                assert_eq!(round, 0);
                cache.put(&mut worker, token, page, &[content(1, page, 1)]);
            }
        }
    }
    // Again and again the same, and more than there is room for beside the others, so that the ghost knows some.
    for round in 1..8 {
        for page in 0..2600 {
            cache.begin_write(id(2), (page, page + 1)).done(stamp, page, &[content(2, page as u32, round)], &[]);
            keep(&cache, &mut worker);
        }
    }
    let token = cache.begin_read(id(1), stamp, true);
    let left = (0..200).filter(|page| got(&cache, &mut worker, token, *page).is_some()).count();
    assert!(left >= 190, "{left} of 200 are left: {:?}", cache.stats());
    assert!(cache.stats().evictions > 1000, "{:?}", cache.stats());
    let kept = cache.stats().pages_stored;
    cache.begin_write(id(3), (0, 1)).done(stamp, 0, &[incompressible(0)], &[]);
    keep(&cache, &mut worker);
    cache.begin_write(id(3), (0, 1)).done(stamp, 0, &[incompressible(0)], &[]);
    keep(&cache, &mut worker);
    assert_eq!((cache.stats().pages_stored, cache.stats().rejected_puts), (kept, 2));
}

#[test]
fn what_finds_no_buffer_is_not_kept_and_buffers_follow_the_limit() {
    let (cache, mut worker) = keeping(1 << 20);
    let stamp = stamp_of_version(1);
    let pages: Vec<Page> = (0..40).map(|page| content(1, page, 1)).collect();
    for (limit, buffers) in [(1 << 20, 16), (2 << 20, 32), (0, 0), (1 << 20, 16)] {
        cache.set_limit_bytes(limit);
        keep(&cache, &mut worker);
        for round in 0..3 {
            cache.drop_file(id(1));
            cache.begin_write(id(1), (0, 40)).done(stamp, 0, &pages, &[]);
            keep(&cache, &mut worker);
            assert_eq!(cache.stats().pages_stored, buffers, "limit {limit} round {round}");
        }
    }
}

#[test]
fn pages_that_do_not_compress_are_kept_when_they_come_again() {
    let (cache, mut worker) = cache(16 << 20);
    let stamp = stamp_of_version(1);
    for round in 0..2 {
        let token = cache.begin_read(id(1), stamp, true);
        cache.put(&mut worker, token, 0, &[incompressible(0)]);
        assert_eq!(cache.stats().puts, round);
    }
    assert_eq!(cache.stats().rejected_puts, 1);
    let token = cache.begin_read(id(1), stamp, true);
    assert_eq!(got(&cache, &mut worker, token, 0), Some(incompressible(0)));
}

#[test]
fn what_is_read_with_pages_that_come_again_is_taken_with_them() {
    let (cache, mut worker) = cache(16 << 20);
    let stamp = stamp_of_version(1);
    // The fourth is new the second time; by itself it would have to come again.
    for (pages, puts) in [(3, 0), (4, 4)] {
        let run: Vec<Page> = (0..pages).map(incompressible).collect();
        let token = cache.begin_read(id(1), stamp, true);
        cache.put(&mut worker, token, 0, &run);
        assert_eq!(cache.stats().puts, puts);
    }
}

#[test]
fn memory_stays_within_the_limit_whatever_it_is_changed_to() {
    let (cache, mut worker) = cache(8 << 20);
    let stamp = stamp_of_version(1);
    for (limit, pages) in [(8 << 20, 30_000), (3 << 20, 10_000), (0, 500), (12 << 20, 40_000)] {
        cache.set_limit_bytes(limit);
        cache.compact(&mut worker);
        for page in 0..pages {
            let token = cache.begin_read(id(1), stamp, true);
            cache.put(&mut worker, token, page, &[content(1, page, 1)]);
            if page % 256 == 0 {
                cache.compact(&mut worker);
            }
            // What is kept while another limit is reached goes with compaction; below 2 MiB are tables that stay.
            let used = cache.stats().mem_used_total;
            assert!(used <= limit.max(2 << 20) || page < 256, "{used} of {limit} at page {page}");
        }
        let stats = cache.stats();
        assert_eq!(stats.pages_stored == 0, limit == 0, "{stats:?}");
        assert!(limit == 0 || stats.mem_used_total > limit / 2, "{stats:?} does not use its limit");
    }
}

#[test]
fn a_limit_below_what_the_tables_took_is_used_again() {
    let (cache, mut worker) = cache(64 << 20);
    let stamp = stamp_of_version(1);
    // Zeroes take no memory but the tables'.
    let zeroes = vec![[0; 4096]; 1024];
    for first in (0..500_000).step_by(zeroes.len()) {
        let token = cache.begin_read(id(1), stamp, true);
        cache.put(&mut worker, token, first, &zeroes);
    }
    assert!(cache.stats().pages_stored > 400_000, "{:?}", cache.stats());
    cache.set_limit_bytes(8 << 20);
    cache.compact(&mut worker);
    assert!(cache.stats().mem_used_total < 8 << 20, "{:?}", cache.stats());
    for round in 0..2 {
        let mut found = 0;
        for page in 0..1000 {
            let token = cache.begin_read(id(2), stamp, true);
            match got(&cache, &mut worker, token, page) {
                Some(there) => found += u32::from(there == content(2, page, 1)),
                None => cache.put(&mut worker, token, page, &[content(2, page, 1)]),
            }
        }
        assert!(round == 0 || found > 900, "{found} of 1000 pages are found: {:?}", cache.stats());
    }
    for limit in [0, 8 << 20] {
        cache.set_limit_bytes(limit);
    }
    assert!(cache.lock().queues.bytes() < 100, "nothing is left");
}

#[test]
fn of_many_small_files_the_last_are_here_and_memory_stays_within_the_limit() {
    const LIMIT: u64 = 8 << 20;
    let (cache, mut worker) = cache(LIMIT);
    let stamp = stamp_of_version(1);
    // Some are zeroes, and some compress to little.
    let page = |file: u64| {
        let mut page = [0; 4096];
        page[..8 * (file % 3) as usize].fill(file as u8 | 1);
        page
    };
    for file in 0..100_000 {
        let token = cache.begin_read(id(file), stamp, true);
        cache.put(&mut worker, token, 0, &[page(file)]);
        if file % 256 == 0 {
            cache.compact(&mut worker);
            let used = cache.stats().mem_used_total;
            assert!(used <= LIMIT, "{used} at file {file}");
        }
    }
    let is_here = |file: u64| cache.has(id(file), 0, 1);
    let last = (99_000..100_000).filter(|file| is_here(*file)).count();
    assert!(last > 800, "{last} of the last thousand are here: {:?}", cache.stats());
    // Half of what is here goes, and the records of the rest move.
    let here: Vec<u64> = (0..100_000).filter(|file| is_here(*file)).collect();
    here.iter().filter(|file| *file % 8 > 0).for_each(|file| cache.drop_file(id(*file)));
    let full = cache.lock().files.bytes();
    cache.fit_tables(&mut cache.lock());
    let rest = cache.lock().files.bytes();
    assert!(rest < full / 2, "{rest} of {full} bytes");
    for file in here.into_iter().filter(|file| file % 8 == 0) {
        let token = cache.begin_read(id(file), stamp, true);
        assert_eq!(got(&cache, &mut worker, token, 0), Some(page(file)));
    }
    cache.set_limit_bytes(1 << 20);
    assert!(cache.stats().mem_used_total < 2 << 20, "{:?}", cache.stats());
}

#[test]
fn a_limit_below_what_the_records_of_many_small_files_took_leaves_as_many_pages_as_fit() {
    let (cache, mut worker) = cache(64 << 20);
    let stamp = stamp_of_version(1);
    // Zeroes: they take no memory but the tables'.
    let read = |worker: &mut Worker, file| {
        let token = cache.begin_read(id(file), stamp, true);
        cache.put(worker, token, 0, &[[0; 4096]]);
    };
    (0..150_000).for_each(|file| read(&mut worker, file));
    assert!(cache.lock().files.bytes() > 16 << 20, "{:?}", cache.stats());
    let limit = 16 << 20;
    cache.set_limit_bytes(limit);
    cache.compact(&mut worker);
    let stats = cache.stats();
    assert!(stats.mem_used_total <= limit, "{stats:?}");
    assert!(stats.pages_stored > 16_384, "{stats:?}");
}

#[test]
fn while_very_many_pages_go_others_are_let_in() {
    const PAGES: u32 = 50_000;
    // Zeroes: they take no memory but the tables'.
    let zeroes = vec![[0; 4096]; 1000];
    let ways: [fn(&Cache<Stamp>); 4] = [
        |cache| cache.drop_file(id(1)),
        |cache| drop(cache.begin_write(id(1), (0, u64::MAX))),
        |cache| _ = cache.begin_read(id(1), stamp_of_version(2), true),
        |cache| cache.set_limit_bytes(1 << 20),
    ];
    for (way, drops) in ways.into_iter().enumerate() {
        let (cache, mut worker) = cache(64 << 20);
        for first in (0..PAGES).step_by(zeroes.len()) {
            let token = cache.begin_read(id(1), stamp_of_version(1), true);
            cache.put(&mut worker, token, first, &zeroes);
        }
        assert_eq!(cache.stats().pages_stored, u64::from(PAGES));
        let (others, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    cache.begin_read(id(2), stamp_of_version(1), true);
                    others.fetch_add(1, Relaxed);
                    thread::sleep(Duration::from_micros(20));
                }
            });
            while others.load(Relaxed) == 0 {
                thread::yield_now();
            }
            let before = others.load(Relaxed);
            drops(&cache);
            let between = others.load(Relaxed) - before;
            is_over.store(true, Relaxed);
            assert!(between > 100, "in way {way} others were let in {between} times");
        });
        // All of it went before the call returned.
        let stats = cache.stats();
        assert!(stats.pages_stored < u64::from(PAGES) / 2 && (way == 3 || stats.pages_stored == 0), "{way}: {stats:?}");
        assert_eq!(cache.lock().charged_bytes, stats.pages_stored * charge(0));
    }
}

#[test]
fn of_very_many_pages_that_were_all_read_few_are_passed_over_at_a_time() {
    const PAGES: u32 = 20_000;
    let (cache, mut worker) = cache(64 << 20);
    let mut pages = vec![[0; 4096]; 1000];
    let mut found = vec![false; 1000];
    for _ in 0..4 {
        for first in (0..PAGES).step_by(pages.len()) {
            let token = cache.begin_read(id(1), stamp_of_version(1), true);
            cache.get(&mut worker, token, first, &mut pages, &mut found);
            cache.put(&mut worker, token, first, &pages);
        }
    }
    let (mut parts, mut most) = (0, 0);
    loop {
        let index = &mut *cache.lock();
        let before = index.queues.passed();
        let is_last = cache.shrink_some(index, charge(0) * 100);
        (parts, most) = (parts + 1, most.max(index.queues.passed() - before));
        if is_last {
            break;
        }
    }
    // All were passed over, and by each that went at most so many (`STEPS_MAX` of the queues).
    assert!(most <= 4096 + 2 * 64 && cache.lock().queues.passed() > u64::from(PAGES), "{most} in one of {parts} parts");
}

#[test]
fn what_a_file_has_left_is_neither_found_nor_in_the_way_of_what_it_has_now() {
    const PAGES: u32 = 10_000;
    let (cache, mut worker) = cache(16 << 20);
    let stamps = [1, 2].map(stamp_of_version);
    let zeroes = vec![[0; 4096]; 1000];
    for first in (0..PAGES).step_by(zeroes.len()) {
        let token = cache.begin_read(id(1), stamps[0], true);
        cache.put(&mut worker, token, first, &zeroes);
    }
    let old = cache.begin_read(id(1), stamps[0], true);
    let left = {
        let index = &mut *cache.lock();
        index.turns.next(id(1));
        index.files.leave(id(1))
    };
    assert!(!cache.has(id(1), 0, 1) && got(&cache, &mut worker, old, 0).is_none());
    // Another of the same number, also of the same stamp, has pages of its own, and those that were left leave in their turn.
    let new = cache.begin_read(id(1), stamps[0], true);
    assert!(got(&cache, &mut worker, new, 5).is_none());
    cache.put(&mut worker, new, 5, &[content(1, 5, 2)]);
    cache.put(&mut worker, old, 6, &[content(1, 6, 1)]);
    {
        let index = &mut *cache.lock();
        let target_bytes = index.charged_bytes / 2;
        cache.shrink_to(index, |_| target_bytes, false, usize::MAX);
    }
    cache.put(&mut worker, new, 5, &[content(1, 5, 2)]);
    cache.drop_left(left);
    assert_eq!(got(&cache, &mut worker, new, 5), Some(content(1, 5, 2)));
    assert!(!cache.has(id(1), 6, 1));
    let stats = cache.stats();
    assert_eq!((stats.files, stats.pages_stored), (1, 1), "{stats:?}");
    // The slot is free for another.
    cache.drop_left(left);
    cache.drop_file(id(1));
    assert_eq!((cache.stats().files, cache.lock().charged_bytes), (0, 0));
}

#[test]
fn a_cache_is_an_array_of_pages_or_has_not_the_page() {
    const FILES: u64 = 6;
    const PAGES: u32 = 1200;
    const READS_AT_ONCE: usize = 32;
    let seed = compcache_testkit::seed::Seed::for_test("a_cache_is_an_array_of_pages_or_has_not_the_page");
    let mut rng = seed.rng();
    let (cache, mut worker) = keeping(1 << 20);
    let stamps: Vec<Stamp> = (0..200).map(stamp_of_version).collect();
    let mut versions = [0u64; FILES as usize];
    // Reads that have begun, with the version they took from below.
    let mut begun: Vec<(u64, u32, u64, Token)> = Vec::new();
    let (mut hits, mut kept) = (0, 0);
    for _ in 0..60_000 {
        let file = rng.u64(..FILES);
        let version = versions[file as usize];
        let page = (rng.f64() * rng.f64() * f64::from(PAGES)) as u32;
        match rng.u32(..1000) {
            0..500 => {
                let token = cache.begin_read(id(file), stamps[version as usize], true);
                match got(&cache, &mut worker, token, page) {
                    Some(found) => {
                        assert!(found == content(file, page, version), "file {file} page {page} version {version}");
                        hits += 1;
                    }
                    None => {
                        begun.push((file, page, version, token));
                        // Else there are ever more of them, nearly all of them void.
                        if begun.len() > READS_AT_ONCE {
                            begun.swap_remove(rng.usize(..begun.len()));
                        }
                    }
                }
            }
            500..980 if !begun.is_empty() => {
                let (file, page, version, token) = begun.swap_remove(rng.usize(..begun.len()));
                let pages: Vec<Page> = (page..(page + 9).min(PAGES)).map(|page| content(file, page, version)).collect();
                cache.put(&mut worker, token, page, &pages);
            }
            980..982 if version < 199 => {
                let writing = cache.begin_write(id(file), (0, PAGES.into()));
                versions[file as usize] += 1;
                drop(writing);
            }
            985..988 if version < 199 => {
                let writing = cache.begin_write(id(file), (0, PAGES.into()));
                versions[file as usize] += 1;
                let pages: Vec<Page> =
                    (page..(page + 9).min(PAGES)).map(|page| content(file, page, version + 1)).collect();
                writing.done(stamps[version as usize + 1], page.into(), &pages, &[]);
                kept += pages.len();
            }
            // Behind the mount: nobody tells.
            990..992 if version < 199 => versions[file as usize] += 1,
            995..997 => cache.drop_file(id(file)),
            997..999 => keep(&cache, &mut worker),
            _ => cache.compact(&mut worker),
        }
    }
    let evicted = cache.stats().evictions;
    let is_enough = hits > 1000 && kept > 1000 && evicted > 1000;
    assert!(is_enough, "{hits} hits, {kept} pages written, {evicted} evicted: too few to show anything");
    keep(&cache, &mut worker);
    (0..FILES).for_each(|file| cache.drop_file(id(file)));
    let stats = cache.stats();
    assert_eq!((stats.pages_stored, stats.files), (0, 0), "something is left: {stats:?}");
    assert_eq!(cache.lock().charged_bytes, 0);
}

#[test]
fn threads_that_read_and_write_one_file_find_no_page_older_than_the_last_write() {
    use std::sync::atomic::AtomicU64;
    const PAGES: u32 = 64;
    let (cache, mut worker) = keeping(1 << 20);
    let is_over = AtomicBool::new(false);
    // The file below: a version for each page. A write bumps all of them, between its begin and its end.
    let below: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let stamp = stamp_of_version(1);
    std::thread::scope(|scope| {
        let (cache, below, is_over) = (&cache, &below, &is_over);
        scope.spawn(move || {
            for version in 1..400 {
                let writing = cache.begin_write(id(1), (0, PAGES.into()));
                below.iter().for_each(|page| page.store(version, Relaxed));
                if version % 2 == 0 {
                    writing.done(stamp, 0, &[], &[]);
                } else {
                    let pages: Vec<Page> = (0..PAGES).map(|page| content(1, page, version)).collect();
                    writing.done(stamp, 0, &pages, &[]);
                }
                std::thread::yield_now();
            }
            is_over.store(true, Relaxed);
        });
        scope.spawn(move || {
            while !is_over.load(Relaxed) {
                cache.keep_written(&mut worker, Duration::from_millis(1));
            }
        });
        scope.spawn(move || {
            while !is_over.load(Relaxed) {
                cache.drop_file(id(1));
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        for reader in 0..3 {
            scope.spawn(move || {
                let mut worker = cache.worker().unwrap();
                let mut rng = fastrand::Rng::with_seed(reader);
                for _ in 0..20_000 {
                    let page = rng.u32(..PAGES);
                    let least = below[page as usize].load(Relaxed);
                    let token = cache.begin_read(id(1), stamp, true);
                    match got(cache, &mut worker, token, page) {
                        // A write may have begun since; what is found is not from before the one that was over.
                        Some(found) => {
                            let now = below[page as usize].load(Relaxed);
                            assert!((least.saturating_sub(1)..=now).any(|version| found == content(1, page, version)));
                        }
                        None => {
                            let version = below[page as usize].load(Relaxed);
                            cache.put(&mut worker, token, page, &[content(1, page, version)]);
                        }
                    }
                }
            });
        }
    });
    assert!(cache.stats().succ_gets > 0, "{:?}", cache.stats());
}
