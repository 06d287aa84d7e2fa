//! What a backing promises beside the array: pages leave in the right order and in large writes, come back with one access, what
//! fails is said, what lies is found out, and nobody waits who need not.

#![allow(unsafe_code)]

#[path = "model/content.rs"]
mod content;
#[path = "backing/copies.rs"]
mod copies;
#[path = "backing/daily.rs"]
mod daily;
#[path = "backing/failures.rs"]
mod failures;
#[path = "backing/flights.rs"]
mod flights;
#[path = "model/medium.rs"]
mod medium;
#[path = "backing/progress.rs"]
mod progress;
#[path = "backing/runs.rs"]
mod runs;

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use compcache_store::{
    Backing, BackingConfig, Batch, Fetcher, FileMedium, Health, Leaving, Medium, MediumError, Page, PageIndex, Pool,
    PoolConfig, Read, Reclaimed, Store, StoreConfig, StoreError, Worker,
};
use medium::{Faults, Memory};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A store with one pool on a backing, and what a thread needs.
struct Place {
    store: Arc<Store>,
    backing: Arc<Backing>,
    pool: Arc<Pool>,
    worker: Worker,
    fetcher: Fetcher,
}

fn config(segments: u64) -> BackingConfig {
    BackingConfig { capacity_bytes: segments * 64 * KIB, segment_bytes: 64 << 10 }
}

fn place(medium: Box<dyn Medium>, config: BackingConfig) -> Place {
    let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
    let backing = Backing::new(medium, config).unwrap();
    let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let worker = Worker::new(&store, || 0).unwrap();
    Place { store, backing, pool, worker, fetcher: Fetcher::new().unwrap() }
}

/// Does not compress.
fn noise(index: u64, generation: u64) -> Page {
    let mut page = [0; 4096];
    let mut state = content::mix(index << 32 | generation);
    for word in page.as_chunks_mut::<8>().0 {
        state = content::mix(state);
        *word = state.to_le_bytes();
    }
    page
}

/// Compresses to less than half.
fn heap(index: u64, generation: u64) -> Page {
    let mut page = noise(index, generation);
    for (nth, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        if nth % 3 != 0 {
            *word = (nth as u64 / 16).to_le_bytes();
        }
    }
    page
}

impl Place {
    fn write(&mut self, index: u64, page: &Page) {
        self.pool.write(&mut self.worker, PageIndex(index), page).unwrap();
    }

    /// Writes back one segment, as at the limit.
    fn reclaim(&mut self) -> Result<usize, MediumError> {
        self.store.set_limit_bytes(self.store.mem_used_total_bytes());
        let reclaimed = self.store.reclaim(&mut self.worker, &self.backing);
        self.store.set_limit_bytes(u64::MAX);
        reclaimed.map(|reclaimed| reclaimed.pages)
    }

    fn reclaim_all(&mut self) {
        while self.reclaim().unwrap() > 0 {}
    }

    fn is_out(&self, index: u64) -> bool {
        self.pool.is_on_backing(PageIndex(index))
    }

    /// Reads without bringing the page back into memory.
    fn fetch(&mut self, index: u64) -> Result<Page, StoreError> {
        let mut page = [0; 4096];
        self.store.set_limit_bytes(1);
        let read = self.pool.fetch(&mut self.worker, &mut self.fetcher, PageIndex(index), &mut page);
        self.store.set_limit_bytes(u64::MAX);
        read.map(|read| {
            assert_eq!(read, Read::Done);
            page
        })
    }
}

#[test]
fn what_stays_anyway_being_more_than_the_threshold_costs_no_segment_for_a_page() {
    let mut place = place(Memory::new(1, Faults::NONE).medium(), config(400));
    place.backing.set_above_percent(10);
    // Tables alone are more than a tenth of it.
    place.store.set_limit_bytes(256 * KIB);
    let reclaim = |place: &mut Place| {
        assert!(place.store.wants_reclaim(&place.backing));
        while !place.store.reclaim(&mut place.worker, &place.backing).unwrap().finished {}
    };
    // As a thread does that looks again and again while pages come one by one.
    for index in 0..200 {
        place.write(index, &heap(index, 0));
        reclaim(&mut place);
    }
    let (stats, out) = (place.backing.stats(), place.pool.stats().bd_count);
    assert!(out >= 160 && stats.segments_written >= 4, "{out} pages left, {stats:?}");
    assert!(stats.live_bytes * 5 >= stats.segments_written * 64 * KIB * 2, "nearly empty segments: {stats:?}");
    // Who is told to have them leave has the rest leave, too; and so has who comes near the limit.
    let rest = place.pool.clone();
    while !place.store.write_back(&mut place.worker, &rest, Leaving::Oldest).unwrap().finished {}
    assert_eq!(place.pool.stats().bd_count, 200);
    place.write(0, &heap(0, 1));
    place.store.set_limit_bytes(place.store.mem_used_total_bytes());
    reclaim(&mut place);
    assert!(place.is_out(0), "it had to leave");
}

#[test]
fn incompressible_pages_leave_first_and_then_the_oldest() {
    let mut place = place(Memory::new(1, Faults::NONE).medium(), config(100));
    // Three ages of pages that compress; then, youngest of all, some that do not.
    for age in 0..3 {
        (0..100).for_each(|nth| place.write(age * 100 + nth, &heap(nth, age)));
        place.store.advance_age();
    }
    // An old page that is used again is young.
    place.pool.read(&mut place.worker, PageIndex(7), &mut [0; 4096]).unwrap();
    (1000..1012).for_each(|nth| place.write(nth, &noise(nth, 0)));
    let mut order = Vec::new();
    let mut out = BTreeSet::new();
    while place.reclaim().unwrap() > 0 {
        let now: BTreeSet<u64> = (0..2000).filter(|index| place.is_out(*index)).collect();
        order.push(now.difference(&out).copied().collect::<Vec<u64>>());
        out = now;
    }
    assert!(order[0].iter().filter(|index| **index >= 1000).count() == 12, "{order:?}");
    let place_of = |index: u64| order.iter().position(|flight| flight.contains(&index)).unwrap();
    let mean = |of: std::ops::Range<u64>| of.clone().map(place_of).sum::<usize>() as f64 / (of.end - of.start) as f64;
    assert!(mean(8..100) < mean(100..200) && mean(100..200) < mean(200..300), "{order:?}");
    assert!(place_of(7) > place_of(6), "it was used after the others");
}

#[test]
fn pages_leave_in_whole_segments_and_come_back_with_one_access_each() {
    let memory = Memory::new(1, Faults::NONE);
    let mut place = place(memory.medium(), config(100));
    (0..600).for_each(|index| place.write(index, &if index % 5 == 0 { noise(index, 1) } else { heap(index, 1) }));
    place.reclaim_all();
    assert_eq!(place.pool.stats().bd_count, 600);
    let written = memory.did();
    assert_eq!((written.longest_write, written.reads), (64 << 10, 0));
    assert_eq!(place.backing.stats().segments_written, written.writes);
    let least = place.pool.stats().bd_bytes.div_ceil(64 * KIB);
    assert!(written.writes <= least + 3, "{} segments for what fits into {least}", written.writes);
    for index in 0..600 {
        assert!(place.fetch(index).unwrap() == if index % 5 == 0 { noise(index, 1) } else { heap(index, 1) });
    }
    let read = memory.did();
    assert_eq!(read.reads, 600, "a read is one access");
    assert!(read.longest_read <= 12 << 10, "{}", read.longest_read);
    let stats = place.pool.stats();
    assert_eq!((stats.bd_reads, stats.bd_writes, stats.bd_count, stats.bd_failed), (600, 600, 600, 0));
    assert_eq!(stats.bd_bytes, place.backing.stats().live_bytes);
}

#[test]
fn neighbours_come_back_with_one_access_together() {
    let memory = Memory::new(1, Faults::NONE);
    let config = BackingConfig { capacity_bytes: 16 * MIB, segment_bytes: 1 << 20 };
    let mut place = place(memory.medium(), config);
    (0..1200).for_each(|index| place.write(index, &heap(index, 1)));
    place.reclaim_all();
    let bytes = place.pool.stats().bd_bytes;
    assert!(bytes > MIB, "more than a segment");
    let (mut batch, mut fetchers) = (Batch::new().unwrap(), [const { None }; 64]);
    fetchers.iter_mut().for_each(|fetcher| *fetcher = Some(Fetcher::new().unwrap()));
    let (mut next, mut page) = (0, [0; 4096]);
    while next < 1200 {
        batch.clear();
        let mut record_of = |index: u64| place.pool.record_of(&mut place.worker, PageIndex(index));
        let records: Vec<_> = (next..1200).map_while(&mut record_of).collect();
        let count = records.iter().take(64).take_while(|record| place.backing.add_to(&mut batch, **record)).count();
        assert!(count > 0, "an empty one takes any");
        assert!(next != 0 || !place.backing.add_to(&mut batch, records[1100]), "far away, or in another segment");
        place.backing.fetch_batch(&mut batch).unwrap();
        for (nth, fetcher) in fetchers[..count].iter_mut().flatten().enumerate() {
            assert!(batch.hand_to(records[nth], fetcher) && fetcher.holds(records[nth]));
            let opened = place.pool.open_fetched(&mut place.worker, fetcher, PageIndex(next + nth as u64), &mut page);
            assert!(opened == Some(Ok(())) && page == heap(next + nth as u64, 1), "page {next} and {nth}");
        }
        let other = fetchers[0].as_mut().unwrap();
        assert!(next != 0 || !batch.hand_to(records[1100], other) && !other.holds(records[1100]));
        next += count as u64;
    }
    let read = memory.did();
    assert!(read.longest_read <= 64 << 10 && read.reads <= bytes / (48 << 10) + 4, "{} of {bytes}", read.reads);
}

#[test]
fn a_page_that_is_read_comes_back_where_there_is_room_and_stays_where_there_is_none() {
    let memory = Memory::new(1, Faults::NONE);
    let mut place = place(memory.medium(), config(100));
    (0..100).for_each(|index| place.write(index, &heap(index, 1)));
    place.reclaim_all();
    assert!(place.fetch(3).unwrap() == heap(3, 1) && place.is_out(3), "there was no room");
    let mut page = [0; 4096];
    let read = place.pool.fetch(&mut place.worker, &mut place.fetcher, PageIndex(3), &mut page);
    assert!(read == Ok(Read::Done) && page == heap(3, 1) && !place.is_out(3), "there was room");
    assert_eq!(place.pool.stats().bd_count, 99);
    assert_eq!(place.pool.fetch(&mut place.worker, &mut place.fetcher, PageIndex(500), &mut page), Ok(Read::Absent));
    let taken = place.pool.fetch_and_take(&mut place.worker, &mut place.fetcher, PageIndex(4), &mut page);
    assert!(taken == Ok(Read::Done) && page == heap(4, 1) && !place.pool.contains(PageIndex(4)));
    assert_eq!(place.backing.stats().live_bytes, place.pool.stats().bd_bytes);
}

#[test]
fn reclaim_begins_above_85_percent_and_ends_at_75_for_the_store_and_for_a_pool() {
    for of_pool in [false, true] {
        let mut place = place(Memory::new(1, Faults::NONE).medium(), config(800));
        let limit = 8 * MIB;
        if of_pool {
            place.pool.set_limit_bytes(limit)
        } else {
            place.store.set_limit_bytes(limit)
        }
        let used = |place: &Place| {
            if of_pool { place.pool.stats().mem_used_total } else { place.store.mem_used_total_bytes() }
        };
        let mut index = 0;
        let mut write_one = |place: &mut Place| {
            index += 1;
            place.pool.write(&mut place.worker, PageIndex(index), &heap(index, 1)).unwrap();
        };
        while !place.store.wants_reclaim(&place.backing) {
            write_one(&mut place);
        }
        assert!((used(&place) * 100 / limit).abs_diff(85) <= 1, "{} of {limit}", used(&place));
        while !place.store.reclaim(&mut place.worker, &place.backing).unwrap().finished {}
        assert!((used(&place) * 100 / limit).abs_diff(74) <= 2, "{} of {limit}", used(&place));
        // Three times what fits, with reclaim between.
        for _ in 0..15_000 {
            write_one(&mut place);
            if place.store.wants_reclaim(&place.backing) {
                while !place.store.reclaim(&mut place.worker, &place.backing).unwrap().finished {}
            }
        }
        assert!(used(&place) <= limit && place.pool.stats().bd_count > 10_000);
    }
}

#[test]
fn pages_of_one_pool_leave_whatever_the_limit_when_they_are_to() {
    let mut at = place(Memory::new(1, Faults::NONE).medium(), config(64));
    let other = at.store.create_pool_on(PoolConfig::default(), &at.backing).unwrap();
    for index in 0..100 {
        at.write(index, &if index % 4 == 0 { noise(index, 0) } else { heap(index, 0) });
        other.write(&mut at.worker, PageIndex(index), &heap(index, 1)).unwrap();
    }
    let mut leave = |leaving| {
        let mut left = 0;
        loop {
            let done = at.store.write_back(&mut at.worker, &at.pool, leaving).unwrap();
            left += done.pages;
            if done.finished {
                return left;
            }
        }
    };
    assert_eq!(leave(Leaving::Incompressible), 25);
    let is_out = |index| at.pool.is_on_backing(PageIndex(index));
    assert!((0..100).all(|index| is_out(index) == (index % 4 == 0)));
    assert_eq!(leave(Leaving::Oldest), 75);
    assert_eq!((leave(Leaving::Oldest), other.stats().bd_count), (0, 0), "none is left, and the other pool's stayed");
    for index in 0..100 {
        let written = if index % 4 == 0 { noise(index, 0) } else { heap(index, 0) };
        assert!(at.fetch(index).unwrap() == written, "page {index}");
    }
    // Without a backing there is nothing to do.
    let alone = at.store.create_pool(PoolConfig::default()).unwrap();
    assert!(at.store.write_back(&mut at.worker, &alone, Leaving::Oldest).unwrap().finished);
}

#[test]
fn the_coldest_pages_leave_first_whichever_pool_they_are_in() {
    let memory = Memory::new(1, Faults::NONE);
    let mut cold = place(memory.medium(), config(400));
    let backing = Backing::new(Memory::new(2, Faults::NONE).medium(), config(400)).unwrap();
    let pool = cold.store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let (store, worker) = (cold.store.clone(), Worker::new(&cold.store, || 0).unwrap());
    let mut warm = Place { store, backing, pool, worker, fetcher: Fetcher::new().unwrap() };
    (0..1000).for_each(|index| cold.write(index, &heap(index, 1)));
    pass_ages(&cold.store, 5);
    (0..1000).for_each(|index| warm.write(index, &heap(index, 2)));
    // Who asks is the warm one; what leaves is cold, until hardly any is there.
    let limit_bytes = warm.store.mem_used_total_bytes() * 8 / 10;
    warm.store.set_limit_bytes(limit_bytes);
    assert_eq!(warm.store.reclaim(&mut warm.worker, &warm.backing).unwrap().pages, 0);
    reclaim_any(&mut warm.worker, &warm.store);
    let (left, stayed) = (cold.pool.stats().bd_count, warm.pool.stats().bd_count);
    assert!((700..=1000).contains(&left), "{left} cold pages have left");
    assert_eq!(stayed, 0, "of the warm ones; {left} cold ones have left");
    // A pool above its own limit has its own leave, however many colder ones there are.
    warm.store.set_limit_bytes(u64::MAX);
    (0..1000).for_each(|index| cold.write(index, &heap(index, 3)));
    pass_ages(&cold.store, 5);
    (0..1000).for_each(|index| warm.write(index, &heap(index, 4)));
    warm.pool.set_limit_bytes(warm.pool.stats().mem_used_total);
    while warm.store.reclaim(&mut warm.worker, &warm.backing).unwrap().pages > 0 {}
    assert!(warm.pool.stats().bd_count > 100);
    // What a backing that fails could take does not count: then the warm ones leave.
    warm.pool.set_limit_bytes(u64::MAX);
    (0..1000).for_each(|index| warm.write(index, &heap(index, 4)));
    memory.set_faults(Faults { failed_writes: 1, ..Faults::NONE });
    warm.store.set_limit_bytes(limit_bytes);
    reclaim_any(&mut warm.worker, &warm.store);
    warm.store.set_limit_bytes(u64::MAX);
    assert_eq!((cold.pool.stats().bd_count, warm.pool.stats().bd_count > 400), (0, true));
    (0..1000).for_each(|index| assert!(cold.fetch(index).unwrap() == heap(index, 3)));
    (0..1000).for_each(|index| assert!(warm.fetch(index).unwrap() == heap(index, 4)));
}

/// Until nothing leaves any more; what that says in the end.
fn reclaim_any(worker: &mut Worker, store: &Store) -> Reclaimed {
    let mut each = std::iter::repeat_with(|| store.reclaim_any(worker).unwrap());
    each.find(|done| done.pages == 0 && done.freed_bytes == 0).expect("it ends")
}

fn pass_ages(store: &Store, count: u32) {
    (0..count).for_each(|_| _ = store.advance_age());
}

#[test]
fn where_reclaim_begins_can_be_changed_and_it_ends_ten_below() {
    let mut at = place(Memory::new(1, Faults::NONE).medium(), config(64));
    (0..400).for_each(|index| at.write(index, &noise(index, 0)));
    let used = at.store.mem_used_total_bytes();
    at.store.set_limit_bytes(2 * used);
    assert!(!at.store.wants_reclaim(&at.backing), "half of the limit is less than 85 %");
    at.backing.set_above_percent(45);
    assert!(at.store.wants_reclaim(&at.backing));
    while !at.store.reclaim(&mut at.worker, &at.backing).unwrap().finished {}
    let now = at.store.mem_used_total_bytes();
    assert!((used * 3 / 5..=used * 7 / 10).contains(&now), "{now} of {used} are used still");
    at.backing.set_above_percent(0);
    assert_eq!(at.backing.above_percent(), 10, "it stays sensible");
}

#[test]
fn a_write_that_fails_leaves_every_page_where_it_was() {
    let memory = Memory::new(1, Faults { failed_writes: 1, ..Faults::NONE });
    let mut place = place(memory.medium(), config(100));
    (0..100).for_each(|index| place.write(index, &heap(index, 1)));
    for attempt in 1..=5 {
        assert_eq!(place.reclaim(), Err(MediumError::System { errno: 5 }));
        assert_eq!(place.backing.health(), Health::Failing(MediumError::System { errno: 5 }));
        let stats = place.backing.stats();
        assert_eq!((stats.failed_writes, stats.live_bytes, stats.free_bytes), (attempt, 0, stats.capacity_bytes));
        for index in 0..100 {
            let mut page = [0; 4096];
            assert_eq!(place.pool.read(&mut place.worker, PageIndex(index), &mut page), Ok(Read::Done));
            assert!(page == heap(index, 1));
        }
    }
    memory.set_faults(Faults::NONE);
    place.reclaim_all();
    assert_eq!((place.backing.health(), place.pool.stats().bd_count), (Health::Good, 100));
}

#[test]
fn a_full_backing_says_so_and_takes_pages_again_after_discards() {
    for room_bytes in [u64::MAX, 4 * 64 * KIB] {
        let memory = Memory::new(1, Faults { room_bytes, ..Faults::NONE });
        let mut place = place(memory.medium(), config(8));
        (0..400).for_each(|index| place.write(index, &noise(index, 1)));
        while place.reclaim().is_ok_and(|pages| pages > 0) {}
        assert_eq!(place.backing.health(), Health::Full);
        let out: Vec<u64> = (0..400).filter(|index| place.is_out(*index)).collect();
        assert!((40..=140).contains(&out.len()), "{} pages of 4 KiB in at most 512 KiB", out.len());
        for index in 0..400 {
            assert!(place.fetch(index).unwrap() == noise(index, 1), "page {index}");
        }
        out.iter().for_each(|index| assert!(place.pool.discard(PageIndex(*index))));
        assert_eq!((place.backing.stats().live_bytes, place.backing.health()), (0, Health::Good));
        assert!(place.reclaim().unwrap() > 0, "{:?}", place.backing.stats());
        assert_eq!(place.backing.health(), Health::Good);
    }
}

#[test]
fn a_flipped_bit_on_the_medium_is_reported_and_never_returned() {
    for page in [heap(3, 1), noise(3, 1)] {
        let memory = Memory::new(1, Faults::NONE);
        let mut place = place(memory.medium(), config(4));
        place.write(2, &heap(2, 1));
        place.write(3, &page);
        place.write(4, &heap(4, 1));
        place.reclaim_all();
        let read = place.pool.read(&mut place.worker, PageIndex(3), &mut [0; 4096]);
        let Ok(Read::OnBacking(extent)) = read else { panic!("{read:?}") };
        let start = extent.offset_bytes as usize * 8;
        // Up to seven bytes at the end are not the record's.
        let sealed_bits = (extent.length_bytes as usize - 7) * 8;
        for bit in (0..sealed_bits).step_by(37).chain(sealed_bits - 130..sealed_bits) {
            let flip = || memory.with_bytes(|bytes| bytes[(start + bit) / 8] ^= 1 << ((start + bit) % 8));
            flip();
            assert_eq!(place.fetch(3), Err(StoreError::Corrupt { index: PageIndex(3) }), "bit {bit}");
            assert!(place.fetch(2).unwrap() == heap(2, 1) && place.fetch(4).unwrap() == heap(4, 1));
            flip();
            assert!(place.fetch(3).unwrap() == page);
        }
        let stats = place.pool.stats();
        assert!(stats.bd_failed > 100 && stats.bd_failed == place.backing.stats().damaged_reads);
        // Writing the page ends the state.
        memory.with_bytes(|bytes| bytes[start / 8] ^= 1);
        assert!(place.fetch(3).is_err());
        place.write(3, &heap(3, 9));
        assert!(place.fetch(3).unwrap() == heap(3, 9));
    }
}

#[test]
fn sectors_that_are_swapped_or_older_or_another_backings_never_open() {
    let memory = Memory::new(1, Faults::NONE);
    let mut place = place(memory.medium(), config(4));
    let write_all = |place: &mut Place, generation| (0..30).for_each(|at| place.write(at, &noise(at, generation)));
    write_all(&mut place, 1);
    place.reclaim_all();
    let old = memory.with_bytes(|bytes| bytes.clone());
    // Emptied, and the same places filled anew with pages of the same length.
    (0..30).for_each(|index| assert!(place.pool.discard(PageIndex(index))));
    write_all(&mut place, 2);
    place.reclaim_all();
    let new = memory.with_bytes(|bytes| bytes.clone());
    assert!(old.len() == new.len() && old != new);
    let mut checked = 0;
    for lie in 0..3 {
        memory.with_bytes(|bytes| match lie {
            0 => bytes.copy_from_slice(&old),
            // Each block is its neighbour.
            1 => bytes.as_chunks_mut::<8192>().0.iter_mut().for_each(|two| two.rotate_left(4096)),
            _ => bytes.rotate_left(64 << 10),
        });
        for index in 0..30 {
            let fetched = place.fetch(index);
            // Some blocks are equal to what they were: the ends of segments, which nothing reads.
            assert_eq!(fetched, Err(StoreError::Corrupt { index: PageIndex(index) }), "lie {lie}");
            checked += 1;
        }
        memory.with_bytes(|bytes| bytes.copy_from_slice(&new));
    }
    assert_eq!(checked, 90);
    assert!((0..30).all(|index| place.fetch(index).unwrap() == noise(index, 2)));
}

#[test]
fn nothing_that_was_written_can_be_read_on_the_medium() {
    let memory = Memory::new(1, Faults::NONE);
    let mut place = place(memory.medium(), config(4));
    let words: Vec<[u8; 16]> =
        (0..40u64).map(|index| noise(index, 1)[..16].try_into().expect("sixteen bytes")).collect();
    // Each page twice: equal pages must not be equal there.
    (0..40).for_each(|index| place.write(index, &noise(index % 20, 1)));
    place.reclaim_all();
    let mut seen = BTreeSet::new();
    memory.with_bytes(|bytes| {
        assert!(bytes.len() >= 40 * 4096);
        for at in 0..bytes.len() - 16 {
            assert!(!words.iter().any(|word| bytes[at..at + 16] == *word), "found at {at}");
        }
        let blocks = bytes.chunks(64).filter(|block| block.iter().any(|byte| *byte != 0));
        assert!(blocks.into_iter().all(|block| seen.insert(block.to_vec())), "two parts are equal");
    });
}

#[test]
fn a_flipped_bit_in_the_slot_of_a_page_on_the_backing_never_yields_another() {
    let mut place = place(Memory::new(1, Faults::NONE).medium(), config(40));
    (0..200).for_each(|index| place.write(index, &noise(index, 1)));
    place.reclaim_all();
    assert!(place.is_out(3));
    // The first leaf: 1024 metas of four bytes, then as many payloads of eight.
    let leaf = place.store.memory_ranges()[2].0;
    let words = [(leaf + 3 * 4, 32), (leaf + 4096 + 3 * 8, 64)];
    for (word, bits) in words {
        // Not the lock, and not the age.
        for bit in (0..bits).filter(|bit| bits == 64 || (2..8).contains(bit) || *bit >= 16) {
            // SAFETY: the slot of page 3, which nobody else uses meanwhile.
            let flip = || unsafe { *((word + bit / 8) as *mut u8) ^= 1 << (bit % 8) };
            flip();
            let fetched = place.fetch(3);
            assert!(fetched.is_err(), "bit {bit} of {bits}: a page");
            flip();
            assert!(place.fetch(3).unwrap() == noise(3, 1));
        }
    }
    place.pool.discard_range(PageIndex(0), PageIndex::LIMIT);
    assert_eq!(place.backing.stats().live_bytes, 0);
}

#[test]
fn mostly_dead_segments_are_cleaned_and_what_lives_in_them_is_kept() {
    let memory = Memory::new(1, Faults::NONE);
    let mut place = place(memory.medium(), config(32));
    let mut rng = fastrand::Rng::with_seed(7);
    // Half of the room is alive at any time; a good forty times of it is written.
    let mut generations = [0u64; 600];
    for generation in 1..90 {
        for _ in 0..300 {
            let index = rng.usize(0..generations.len());
            generations[index] = generation;
            place.write(index as u64, &heap(index as u64, generation));
        }
        while place.reclaim().unwrap() > 0 {}
        assert_eq!(place.backing.health(), Health::Good, "{:?}", place.backing.stats());
    }
    let stats = place.backing.stats();
    assert!(stats.records_moved > 100 && stats.segments_written > 3 * 32, "{stats:?}");
    assert_eq!(stats.live_bytes, place.pool.stats().bd_bytes);
    assert_eq!(stats.live_bytes + stats.dead_bytes + stats.free_bytes, stats.capacity_bytes);
    for (index, generation) in generations.iter().enumerate().filter(|(_, generation)| **generation > 0) {
        assert!(place.fetch(index as u64).unwrap() == heap(index as u64, *generation), "page {index}");
    }
    println!("{stats:?}");
}

#[test]
fn a_pool_that_is_dropped_gives_its_room_back_and_another_on_the_same_backing_keeps_its_pages() {
    let mut place = place(Memory::new(1, Faults::NONE).medium(), config(40));
    let other = place.store.create_pool_on(PoolConfig::default(), &place.backing).unwrap();
    for index in 0..100 {
        place.write(index, &heap(index, 1));
        other.write(&mut place.worker, PageIndex(index), &heap(index, 2)).unwrap();
    }
    place.reclaim_all();
    assert_eq!((place.pool.stats().bd_count, other.stats().bd_count), (100, 100));
    drop(other);
    assert_eq!(place.backing.stats().live_bytes, place.pool.stats().bd_bytes);
    assert!((0..100).all(|index| place.fetch(index).unwrap() == heap(index, 1)));
    // Moved pages are read where they are now, and free what they had.
    assert_eq!(place.pool.move_range(PageIndex(0), PageIndex(1 << 30), 50), Ok(50));
    assert!((0..50).all(|index| place.fetch((1 << 30) + index).unwrap() == heap(index, 1)));
    place.pool.discard_range(PageIndex(0), PageIndex::LIMIT);
    let stats = place.backing.stats();
    assert_eq!((stats.live_bytes, stats.free_bytes), (0, stats.capacity_bytes));
}

/// A medium whose writes wait until they are let go.
struct Gate {
    memory: Box<dyn Medium>,
    closed: Mutex<bool>,
    moved: Condvar,
    waiting: AtomicBool,
}

struct Gated(Arc<Gate>);

impl Medium for Gated {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        self.0.memory.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        let mut closed = self.0.closed.lock().unwrap();
        while *closed {
            self.0.waiting.store(true, Ordering::SeqCst);
            closed = self.0.moved.wait(closed).unwrap();
        }
        drop(closed);
        self.0.memory.write_at(offset_bytes, from)
    }

    fn punch(&self, _: u64, _: u64) {}
}

#[test]
fn nobody_waits_for_a_write_and_what_changes_meanwhile_stays_changed() {
    let memory = Memory::new(1, Faults::NONE);
    let gate = Arc::new(Gate {
        memory: memory.medium(),
        closed: Mutex::new(true),
        moved: Condvar::new(),
        waiting: AtomicBool::new(false),
    });
    let mut place = place(Box::new(Gated(gate.clone())), config(100));
    (0..30).for_each(|index| place.write(index, &heap(index, 1)));
    place.store.set_limit_bytes(place.store.mem_used_total_bytes() + MIB);
    let Place { store, backing, pool, worker, .. } = &mut place;
    std::thread::scope(|scope| {
        let reclaimer = scope.spawn(|| {
            let mut worker = Worker::new(store, || 0).unwrap();
            store.set_limit_bytes(store.mem_used_total_bytes());
            store.reclaim(&mut worker, backing).unwrap().pages
        });
        while !gate.waiting.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        store.set_limit_bytes(u64::MAX);
        // All of this happens while the medium hangs; pages 0 to 29 are on their way.
        for index in 0..30 {
            let mut page = [0; 4096];
            match index % 5 {
                0 => assert!(pool.discard(PageIndex(index))),
                1 => _ = pool.write(worker, PageIndex(index), &heap(index, 2)).unwrap(),
                2 => _ = pool.move_slot(PageIndex(index), PageIndex(1000 + index)).unwrap(),
                3 => {
                    // Away and back as it was: what was copied is right for it.
                    assert_eq!(pool.take(worker, PageIndex(index), &mut page), Ok(Read::Done));
                    _ = pool.write(worker, PageIndex(index), &page).unwrap();
                }
                _ => assert_eq!(pool.read(worker, PageIndex(index), &mut page), Ok(Read::Done)),
            }
        }
        let second = store.create_pool_on(PoolConfig::default(), backing).unwrap();
        while !store.compact(worker, 100).finished {}
        drop(second);
        *gate.closed.lock().unwrap() = false;
        gate.moved.notify_all();
        let left = reclaimer.join().unwrap();
        assert!((6..=12).contains(&left), "{left} pages left: those that were read, or written as they were");
    });
    assert_eq!(place.backing.stats().live_bytes, place.pool.stats().bd_bytes);
    for index in 0..30 {
        match index % 5 {
            0 => assert!(!place.pool.contains(PageIndex(index))),
            1 => assert!(place.fetch(index).unwrap() == heap(index, 2)),
            2 => {
                assert!(place.fetch(1000 + index).unwrap() == heap(index, 1) && !place.pool.contains(PageIndex(index)))
            }
            _ => assert!(place.fetch(index).unwrap() == heap(index, 1)),
        }
    }
}

/// Takes everything and remembers nothing.
struct Nothing;

impl Medium for Nothing {
    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), MediumError> {
        Err(MediumError::Short)
    }

    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), MediumError> {
        Ok(())
    }

    fn punch(&self, _: u64, _: u64) {}
}

#[test]
fn a_page_on_the_backing_takes_less_than_sixteen_bytes_of_memory() {
    let config = BackingConfig { capacity_bytes: 128 * MIB, segment_bytes: 1 << 20 };
    let mut place = place(Box::new(Nothing), config);
    for index in 0..24_000 {
        place.write(index, &heap(index, 1));
        if index % 8000 == 7999 {
            place.reclaim_all();
        }
    }
    assert_eq!(place.pool.stats().bd_count, 24_000);
    while !place.store.compact(&mut place.worker, 1000).finished {}
    let segments = place.backing.stats().capacity_bytes / MIB * 16;
    let each = (place.store.mem_used_total_bytes() + segments) as f64 / 24_000.0;
    println!("{each:.2} bytes a page");
    assert!(each <= 16.0, "{each} bytes a page");
}

#[test]
fn a_file_that_somebody_truncates_costs_the_pages_in_it_and_no_others() {
    let named = tempfile::NamedTempFile::new().unwrap();
    let medium = Box::new(FileMedium::new(named.reopen().unwrap().into()));
    let mut place = place(medium, config(40));
    (0..200).for_each(|index| place.write(index, &heap(index, 1)));
    place.reclaim_all();
    (200..300).for_each(|index| place.write(index, &heap(index, 1)));
    assert!((0..300).all(|index| place.fetch(index).unwrap() == heap(index, 1)));
    let length = File::open(named.path()).unwrap().metadata().unwrap().len();
    // One in their midst has its room and nothing in it.
    assert_eq!(length, (1 + place.backing.stats().segments_written) * 64 * KIB);
    named.as_file().set_len(2 * 64 * KIB).unwrap();
    let mut lost = 0;
    for index in 0..300 {
        match place.fetch(index) {
            Ok(page) => assert!(page == heap(index, 1)),
            Err(StoreError::BackingFailed { index: at, error: MediumError::Short }) => {
                assert!(at == PageIndex(index) && index < 200);
                lost += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!((50..200).contains(&lost), "{lost}");
    // It grows again, with holes where segments were: these are no pages either.
    place.reclaim_all();
    let errors: Vec<StoreError> = (0..300).filter_map(|index| place.fetch(index).err()).collect();
    assert_eq!(errors.len(), lost, "{errors:?}");
    // Punched and emptied, the file takes no room.
    place.pool.discard_range(PageIndex(0), PageIndex::LIMIT);
    place.backing.tidy(|| true);
    let blocks = std::os::unix::fs::MetadataExt::blocks(&named.as_file().metadata().unwrap());
    assert!(blocks * 512 <= 4 * 64 * KIB + 4096, "{blocks} blocks");
}

#[test]
fn a_backing_of_no_sense_is_refused() {
    let refused = |capacity_bytes, segment_bytes| {
        let config = BackingConfig { capacity_bytes, segment_bytes };
        matches!(Backing::new(Box::new(Nothing), config), Err(StoreError::BackingRefused { .. }))
    };
    assert!(refused(MIB, 0) && refused(MIB, 4096) && refused(MIB, (64 << 10) + 8) && refused(1 << 40, 32 << 20));
    assert!(refused(3 * 64 * KIB, 64 << 10) && refused((512 << 30) + 1, 1 << 20));
    assert!(!refused(4 * 64 * KIB, 64 << 10));
}

#[test]
fn two_that_reclaim_at_once_do_not_wait_for_each_other() {
    static NOW: AtomicU64 = AtomicU64::new(0);
    let mut place = place(Memory::new(1, Faults::NONE).medium(), config(200));
    (0..3000).for_each(|index| place.write(index, &heap(index, 1)));
    place.store.set_limit_bytes(place.store.mem_used_total_bytes() / 2);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut worker = Worker::new(&place.store, || NOW.fetch_add(1, Ordering::Relaxed)).unwrap();
                while place.store.wants_reclaim(&place.backing) {
                    place.store.reclaim(&mut worker, &place.backing).unwrap();
                }
            });
        }
    });
    assert_eq!(place.backing.stats().live_bytes, place.pool.stats().bd_bytes);
    place.store.set_limit_bytes(u64::MAX);
    assert!((0..3000).all(|index| place.fetch(index).unwrap() == heap(index, 1)));
}

#[test]
fn what_was_read_ahead_is_no_other_page_that_was_read_since() {
    let mut place = place(Memory::new(1, Faults::NONE).medium(), config(32));
    (0..40).for_each(|index| place.write(index, &noise(index, 0)));
    place.reclaim_all();
    let record = place.pool.record_of(&mut place.worker, PageIndex(3)).unwrap();
    place.backing.fetch(record, &mut place.fetcher).unwrap();
    assert!(place.fetch(7).unwrap() == noise(7, 0));
    let mut page = [0; 4096];
    let opened = place.pool.open_fetched(&mut place.worker, &mut place.fetcher, PageIndex(3), &mut page);
    assert!(opened.is_none(), "{opened:?}");
}

#[test]
fn what_was_read_ahead_is_the_page_only_if_it_is_still_there() {
    let mut place = place(Memory::new(1, Faults::NONE).medium(), config(32));
    (0..40).for_each(|index| place.write(index, &heap(index, 0)));
    assert!(place.pool.record_of(&mut place.worker, PageIndex(3)).is_none(), "it is in memory");
    place.reclaim_all();
    let mut page = [0; 4096];
    let record = place.pool.record_of(&mut place.worker, PageIndex(3)).unwrap();
    let open = |place: &mut Place, index: u64, page: &mut Page| {
        place.pool.open_fetched(&mut place.worker, &mut place.fetcher, PageIndex(index), page)
    };
    assert_eq!(open(&mut place, 3, &mut page), None, "nothing was read");
    place.backing.fetch(record, &mut place.fetcher).unwrap();
    assert!(place.fetcher.holds(record));
    assert_eq!(open(&mut place, 4, &mut page), None, "it is another page's");
    // Written again, and out again: another record.
    place.write(3, &heap(3, 1));
    assert_eq!(open(&mut place, 3, &mut page), None, "it is outdated");
    (100..200).for_each(|index| place.write(index, &heap(index, 0)));
    place.reclaim_all();
    assert!(place.is_out(3));
    assert_eq!(open(&mut place, 3, &mut page), None, "it is outdated");
    let record = place.pool.record_of(&mut place.worker, PageIndex(3)).unwrap();
    place.backing.fetch(record, &mut place.fetcher).unwrap();
    assert_eq!(open(&mut place, 3, &mut page), Some(Ok(())));
    assert!(page == heap(3, 1) && !place.fetcher.holds(record));
    assert_eq!(open(&mut place, 3, &mut page), None, "it is opened where it was read");
}
