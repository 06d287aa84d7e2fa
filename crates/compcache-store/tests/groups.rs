//! What is promised of pages that are compressed together: [S120] to [S123], [S151].

#![allow(unsafe_code)]

#[path = "model/content.rs"]
mod content;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use compcache_store::{
    Aged, Backing, BackingConfig, Fetcher, FileMedium, Page, PageIndex, Pool, PoolConfig, Read, Recompressor, Store,
    StoreConfig, StoreError, Worker,
};

const PAGES: u64 = 4096;

struct Place {
    store: Arc<Store>,
    pool: Arc<Pool>,
    worker: Worker,
    recompressor: Recompressor,
}

impl Place {
    fn new() -> Place {
        let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
        let pool = store.create_pool(PoolConfig::default()).unwrap();
        Place::of(store, pool)
    }

    fn of(store: Arc<Store>, pool: Arc<Pool>) -> Place {
        let worker = Worker::new(&store, || 0).unwrap();
        let recompressor = Recompressor::new(&store, 3).unwrap();
        Place { store, pool, worker, recompressor }
    }

    /// Writes the pages `0..count`.
    fn filled(mut self, count: u64) -> Place {
        (0..count).for_each(|index| self.write(index, 0));
        self
    }

    fn write(&mut self, index: u64, generation: u64) {
        self.pool.write(&mut self.worker, PageIndex(index), &heap(index, generation)).unwrap();
    }

    /// Makes groups of all that was last used so many ages ago, as far as there is room. Returns how many pages they have.
    fn recompress(&mut self, least: u8) -> Result<usize, StoreError> {
        let (mut pages, mut next) = (0, Some(PageIndex(0)));
        while let Some(from) = next {
            let cold = Aged::new(self.store.age(), least..=u8::MAX);
            let done = self.pool.recompress(&mut self.worker, &mut self.recompressor, &cold, from)?;
            pages += done.pages;
            next = done.next;
        }
        Ok(pages)
    }

    fn read(&mut self, index: u64) -> Result<Page, StoreError> {
        let mut page = [0; 4096];
        let read = self.pool.read(&mut self.worker, PageIndex(index), &mut page)?;
        assert_eq!(read, Read::Done, "page {index}");
        Ok(page)
    }

    fn must_hold(&mut self, index: u64, generation: u64) {
        assert!(self.read(index).unwrap() == heap(index, generation), "page {index} is not what was written");
    }

    fn grouped(&self) -> u64 {
        self.pool.stats().grouped_pages
    }
}

/// As heaps are: pointers that share their upper bytes, small numbers, zeroes, a few words of noise.
fn heap(index: u64, generation: u64) -> Page {
    let mut page = [0; 4096];
    let mut state = content::mix(index << 8 ^ generation);
    for (nth, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        state = content::mix(state);
        let value = match (nth + state as usize % 3) % 6 {
            0 => 0x7f3a_1000_0000 | (state >> 40 & 0xff_fff0),
            1 | 2 => state >> 56 & 0x3f,
            3 => 0x5555_5560_0000 | (state >> 50 & 0xff8),
            _ => 0,
        };
        *word = value.to_le_bytes();
    }
    page[..8].copy_from_slice(&(index + 1).to_le_bytes());
    page
}

/// Words of bytes below `values`, all alike likely, and zeroes. LZ4 finds nothing in the words; zstd makes `log2(values) / 8` of them.
fn noise(index: u64, words: usize, values: u64) -> Page {
    let mut page = [0; 4096];
    let mut state = index;
    for byte in &mut page[..words * 8] {
        state = content::mix(state);
        *byte = (state % values) as u8;
    }
    page
}

#[test]
fn cold_pages_take_two_thirds_at_most_of_what_they_took_and_read_as_they_were() {
    let mut place = Place::new().filled(PAGES);
    let before = place.store.mem_used_total_bytes();
    assert_eq!(place.recompress(0), Ok(PAGES as usize));
    let (after, stats) = (place.store.mem_used_total_bytes(), place.pool.stats());
    assert_eq!((stats.grouped_pages, stats.pages_recompressed, stats.pages_stored()), (PAGES, PAGES, PAGES));
    assert_eq!(stats.group_bytes, stats.compr_data_size);
    assert!(after * 3 < before * 2, "{before} bytes before, {after} after");
    assert!(stats.slot_bytes < stats.compr_data_size * 102 / 100, "{stats:?}");
    let tables = after - stats.slot_bytes;
    assert!(tables < PAGES * 16 + (64 << 10), "{tables} bytes beside objects for {PAGES} pages");
    for index in (0..PAGES).rev() {
        place.must_hold(index, 0);
    }
}

#[test]
fn pages_that_were_used_stay_as_they_are() {
    let mut place = Place::new().filled(PAGES);
    for _ in 0..3 {
        place.store.advance_age();
    }
    (0..PAGES).filter(|index| index % 2 == 0).for_each(|index| place.must_hold(index, 0));
    assert_eq!(place.recompress(3), Ok(PAGES as usize / 2));
    assert_eq!(place.recompress(1), Ok(0), "what was used just now was recompressed");
    for index in 0..PAGES {
        place.must_hold(index, 0);
    }
}

#[test]
fn what_does_not_pay_is_left_alone() {
    // As long with zstd as with LZ4; a thirteenth shorter; raw with LZ4, and a thirteenth shorter.
    for (words, values) in [(380, 256), (380, 170), (512, 170)] {
        let mut place = Place::new();
        for index in 0..256 {
            place.pool.write(&mut place.worker, PageIndex(index), &noise(index, words, values)).unwrap();
        }
        let before = place.pool.stats();
        assert_eq!(before.huge_pages == 256, words == 512, "{before:?}");
        assert_eq!(place.recompress(0), Ok(0), "{words} words below {values}");
        let after = place.pool.stats();
        assert_eq!([after.compr_data_size, after.slot_bytes], [before.compr_data_size, before.slot_bytes]);
        for index in 0..256 {
            assert!(place.read(index).unwrap() == noise(index, words, values));
        }
    }
    let mut place = Place::new();
    // Seven pages are no group, whatever they would save.
    (1000..1007).for_each(|index| place.write(index, 0));
    assert_eq!(place.recompress(0), Ok(0));
    // Nor does a raw page go along with fifteen that save enough for it.
    (1007..1015).for_each(|index| place.write(index, 0));
    place.pool.write(&mut place.worker, PageIndex(1015), &noise(1015, 512, 120)).unwrap();
    assert_eq!((place.recompress(0), place.pool.stats().huge_pages), (Ok(15), 1));
}

#[test]
fn what_only_zstd_compresses_is_gathered_too() {
    let mut place = Place::new();
    for (words, values, from) in [(380, 90, 0), (512, 50, 128)] {
        for index in from..from + 128 {
            place.pool.write(&mut place.worker, PageIndex(index), &noise(index, words, values)).unwrap();
        }
    }
    assert_eq!(place.pool.stats().huge_pages, 128);
    assert_eq!(place.recompress(0), Ok(256));
    assert_eq!(place.pool.stats().huge_pages, 0);
    for (words, values, from) in [(380, 90, 0), (512, 50, 128)] {
        for index in from..from + 128 {
            assert!(place.read(index).unwrap() == noise(index, words, values));
        }
    }
}

#[test]
fn a_page_is_written_discarded_moved_and_taken_alone_and_the_others_of_its_group_stay() {
    let mut place = Place::new().filled(PAGES);
    place.recompress(0).unwrap();
    let groups = place.pool.stats().group_bytes;
    for first in (0..PAGES).step_by(16) {
        place.write(first, 1);
        assert!(place.pool.discard(PageIndex(first + 1)));
        assert_eq!(place.pool.move_slot(PageIndex(first + 2), PageIndex((1 << 30) + first)), Ok(true));
        let mut page = [0; 4096];
        assert_eq!(place.pool.take(&mut place.worker, PageIndex(first + 3), &mut page), Ok(Read::Done));
        assert!(page == heap(first + 3, 0));
    }
    assert_eq!((place.grouped(), place.pool.stats().group_bytes), (PAGES / 16 * 13, groups), "a group was changed");
    while !place.store.compact(&mut place.worker, 1000).finished {}
    for first in (0..PAGES).step_by(16) {
        place.must_hold(first, 1);
        assert!([1, 2, 3].iter().all(|nth| !place.pool.contains(PageIndex(first + nth))));
        assert!(place.read((1 << 30) + first).unwrap() == heap(first + 2, 0));
        (first + 4..first + 16).for_each(|index| place.must_hold(index, 0));
    }
}

#[test]
fn the_last_page_of_a_group_takes_it_along_and_memory_goes_back() {
    let mut place = Place::new().filled(PAGES);
    place.recompress(0).unwrap();
    // All but one of each group: what is left holds its group.
    (0..PAGES).filter(|index| index % 16 != 5).for_each(|index| assert!(place.pool.discard(PageIndex(index))));
    assert!(place.pool.stats().group_bytes > 0 && place.grouped() == PAGES / 16);
    (0..PAGES).filter(|index| index % 16 == 5).for_each(|index| place.must_hold(index, 0));
    place.pool.discard_range(PageIndex(0), PAGES);
    let stats = place.pool.stats();
    assert_eq!([stats.grouped_pages, stats.group_bytes, stats.compr_data_size, stats.slot_bytes], [0; 4]);
    while !place.store.compact(&mut place.worker, 1000).finished {}
    assert!(place.store.mem_used_total_bytes() < 64 << 10, "{}", place.store.mem_used_total_bytes());
}

#[test]
fn groups_move_out_of_sparse_spans_and_read_as_before() {
    let mut place = Place::new().filled(4 * PAGES);
    place.recompress(0).unwrap();
    let before = place.store.mem_used_total_bytes();
    let stays = |index: &u64| index / 16 % 8 == 3;
    (0..4 * PAGES).filter(|index| !stays(index)).for_each(|index| _ = place.pool.discard(PageIndex(index)));
    let mut moved = 0;
    loop {
        let step = place.store.compact(&mut place.worker, 20);
        moved += step.moved;
        if step.finished {
            break;
        }
    }
    let (after, stats) = (place.store.mem_used_total_bytes(), place.pool.stats());
    assert!(moved > 50, "{moved} objects moved");
    assert!(after * 4 < before, "{before} before, {after} after, {stats:?}");
    (0..4 * PAGES).filter(stays).for_each(|index| place.must_hold(index, 0));
    place.pool.discard_range(PageIndex(0), 4 * PAGES);
    assert_eq!([place.pool.stats().slot_bytes, place.pool.stats().group_bytes], [0; 2]);
}

#[test]
fn groups_of_which_little_is_alive_are_made_into_full_ones() {
    let mut place = Place::new().filled(PAGES);
    place.recompress(0).unwrap();
    let full = place.pool.stats().group_bytes;
    (0..PAGES).filter(|index| index % 4 != 1).for_each(|index| assert!(place.pool.discard(PageIndex(index))));
    assert_eq!(place.pool.stats().group_bytes, full);
    // However old or young they are.
    assert_eq!(place.recompress(200), Ok(PAGES as usize / 4));
    let stats = place.pool.stats();
    assert!(stats.group_bytes * 7 < full * 2, "{full} bytes for {PAGES} pages, {stats:?}");
    // Too few for a group: objects of their own.
    (16..PAGES).for_each(|index| _ = place.pool.discard(PageIndex(index)));
    assert_eq!((place.grouped(), place.recompress(200), place.grouped()), (4, Ok(0), 0));
    (0..16).filter(|index| index % 4 == 1).for_each(|index| place.must_hold(index, 0));
}

#[test]
fn a_page_that_is_read_twice_leaves_its_group_unless_memory_is_short() {
    let mut place = Place::new().filled(PAGES);
    place.recompress(0).unwrap();
    place.must_hold(20, 0);
    assert_eq!(place.grouped(), PAGES);
    place.must_hold(20, 0);
    assert_eq!(place.grouped(), PAGES - 1);
    place.must_hold(20, 0);
    place.store.set_limit_bytes(place.store.mem_used_total_bytes());
    for _ in 0..3 {
        place.must_hold(21, 0);
    }
    assert_eq!(place.grouped(), PAGES - 1);
}

#[test]
fn a_full_store_takes_pages_again_after_recompressing_and_never_passes_its_limit() {
    let mut place = Place::new();
    let limit = 8 << 20;
    place.store.set_limit_bytes(limit);
    // As a front end has it: told so before memory is short.
    place.recompressor.set_aside().unwrap();
    let write = |place: &mut Place, index| place.pool.write(&mut place.worker, PageIndex(index), &heap(index, 0));
    let mut full = 0;
    while write(&mut place, full).is_ok() {
        full += 1;
    }
    assert!(write(&mut place, full).is_err());
    // By another one, as a command has it: what was set aside is for all of them.
    let first = core::mem::replace(&mut place.recompressor, Recompressor::new(&place.store, 3).unwrap());
    let pages = place.recompress(0).unwrap();
    assert!(pages as u64 > full / 10 * 9, "{pages} of {full}");
    assert!(write(&mut place, full).is_ok(), "{} of {limit} are used", place.store.mem_used_total_bytes());
    assert!(place.store.mem_used_max_bytes() <= limit, "{}", place.store.mem_used_max_bytes());
    (0..=full).for_each(|index| place.must_hold(index, 0));
    drop(first);
}

#[test]
fn a_pool_that_is_written_to_while_it_is_recompressed_never_passes_its_own_limit() {
    const FULL: u64 = 512;
    for round in 0..60 {
        let mut place = Place::new();
        // The tables of all that will be written are there, and take nothing more.
        (0..2 * FULL).for_each(|index| {
            let word = [1; 4096];
            place.pool.write(&mut place.worker, PageIndex(index), &word).unwrap();
        });
        let place = place.filled(FULL);
        let limit = place.pool.stats().mem_used_total + 5000;
        place.pool.set_limit_bytes(limit);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut worker = Worker::new(&place.store, || 0).unwrap();
                let mut index = FULL;
                while !is_over.load(Relaxed) {
                    // Ends the refusing at the limit, so that what becomes free is taken at once.
                    place.pool.set_limit_bytes(limit);
                    let written = place.pool.write(&mut worker, PageIndex(index), &heap(index, round));
                    index = if written.is_ok() && index + 1 < 2 * FULL { index + 1 } else { index };
                }
            });
            let mut worker = Worker::new(&place.store, || 0).unwrap();
            let mut recompressor = Recompressor::new(&place.store, 3).unwrap();
            let (mut next, mut most) = (Some(PageIndex(0)), 0);
            while let Some(from) = next {
                let done = place.pool.recompress(&mut worker, &mut recompressor, &Aged::ALL, from);
                next = done.ok().and_then(|done| done.next);
                most = most.max(place.pool.stats().mem_used_total);
            }
            is_over.store(true, Relaxed);
            assert!(most <= limit, "{most} of {limit} in round {round}");
        });
    }
}

#[test]
fn a_full_store_with_room_between_its_pages_can_be_recompressed_by_whoever_comes() {
    let mut place = Place::new().filled(PAGES);
    (0..PAGES).filter(|index| index % 2 == 1).for_each(|index| _ = place.pool.discard(PageIndex(index)));
    let limit = place.store.mem_used_total_bytes();
    place.store.set_limit_bytes(limit);
    assert_eq!(place.recompress(0), Ok(PAGES as usize / 2));
    assert!(place.store.mem_used_max_bytes() <= limit);
}

#[test]
fn a_flipped_bit_in_a_group_or_its_entry_is_reported_and_never_returned() {
    let mut place = Place::new().filled(16);
    assert_eq!(place.recompress(0), Ok(16));
    let length = place.pool.stats().group_bytes as usize;
    let arena = place.store.memory_ranges()[0];
    let entry = place.store.memory_ranges()[5].0;
    // SAFETY: the store's own memory; all of it that is looked at is open, and nobody else uses the store.
    let looked = |address: usize, bytes: usize| unsafe { core::slice::from_raw_parts_mut(address as *mut u8, bytes) };
    // The whole pages of the frame and its rest, by what the entry says of them.
    let word = |at: usize| u64::from_le_bytes(looked(entry + at, 8).try_into().unwrap());
    let whole = (length - 1) / 4096;
    let mut places: Vec<usize> = (0..whole).map(|nth| (word(4 + nth * 4) as u32) as usize * 4096).collect();
    places.push((word(24) as usize & ((1 << 36) - 1)) * 8);
    let (mut corrupt, mut sound) = (0, 0);
    let mut check = |place: &mut Place, address: usize, bit: usize| {
        looked(address, 1)[0] ^= 1 << bit;
        // A worker that has the group open would not look: this one has none open.
        let mut worker = Worker::new(&place.store, || 0).unwrap();
        for index in 0..16 {
            let mut page = [0; 4096];
            match place.pool.read(&mut worker, PageIndex(index), &mut page) {
                Ok(Read::Done) if page == heap(index, 0) => sound += 1,
                Err(StoreError::Corrupt { index: which }) if which.0 == index => corrupt += 1,
                other => panic!("{other:?} for page {index}, byte {address:#x} bit {bit}"),
            }
        }
        looked(address, 1)[0] ^= 1 << bit;
    };
    // Memory is short, so that no page leaves the group by being read.
    place.store.set_limit_bytes(1);
    for at in (0..length).step_by(61) {
        check(&mut place, arena.0 + places[at / 4096] + at % 4096, at % 8);
    }
    for byte in 4..32 {
        (0..8).for_each(|bit| check(&mut place, entry + byte, bit));
    }
    assert!(corrupt > 1000, "{corrupt} reads noticed, {sound} were sound");
    (0..16).for_each(|index| place.must_hold(index, 0));
}

#[test]
fn pages_of_groups_leave_for_the_backing_and_come_back() {
    let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
    let config = BackingConfig { capacity_bytes: 64 << 20, segment_bytes: 256 << 10 };
    let medium = Box::new(FileMedium::new(tempfile::tempfile().unwrap().into()));
    let backing = Backing::new(medium, config).unwrap();
    let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let mut place = Place::of(store, pool).filled(PAGES);
    assert_eq!(place.recompress(0), Ok(PAGES as usize));
    place.store.advance_age();
    let hot = PAGES..PAGES + 256;
    hot.clone().for_each(|index| place.write(index, 0));
    // Three quarters of that leave; the hot ones are a tenth of it.
    place.store.set_limit_bytes(place.store.mem_used_total_bytes() / 2);
    while !place.store.reclaim(&mut place.worker, &backing).unwrap().finished {}
    place.store.set_limit_bytes(u64::MAX);
    let stats = place.pool.stats();
    assert!(stats.bd_count > PAGES / 3 && stats.bd_count + stats.grouped_pages + 256 >= PAGES, "{stats:?}");
    assert!(stats.bd_bytes < stats.bd_count * 1500, "they leave compressed: {stats:?}");
    assert!(hot.clone().all(|index| !place.pool.is_on_backing(PageIndex(index))), "hot pages left before cold ones");
    let mut fetcher = Fetcher::new().unwrap();
    for index in 0..PAGES + 256 {
        let mut page = [0; 4096];
        let read = place.pool.fetch(&mut place.worker, &mut fetcher, PageIndex(index), &mut page);
        assert_eq!(read, Ok(Read::Done), "page {index}");
        assert!(page == heap(index, 0), "page {index}");
    }
}

#[test]
fn compaction_that_makes_room_for_a_group_costs_it_no_page() {
    for extra_pages in [14, 20, 40] {
        let mut place = Place::new().filled(PAGES);
        (0..PAGES).filter(|index| index % 3 != 1).for_each(|index| _ = place.pool.discard(PageIndex(index)));
        place.store.set_limit_bytes(place.store.mem_used_total_bytes() + extra_pages * 4096);
        let mut next = Some(PageIndex(0));
        let mut groups = 0;
        while let Some(from) = next {
            let done = place.pool.recompress(&mut place.worker, &mut place.recompressor, &Aged::ALL, from);
            let done = done.expect("there is room");
            assert!(done.pages == 0 || done.pages >= 8 || done.next.is_none(), "{extra_pages}: {done:?}");
            groups += usize::from(done.pages > 0);
            next = done.next;
        }
        assert!(groups > 5, "{groups}");
    }
}

#[test]
fn a_step_over_many_pages_that_no_group_is_worth_ends_soon() {
    const NOISE: u64 = 1000;
    let mut place = Place::new();
    for index in 0..NOISE {
        place.pool.write(&mut place.worker, PageIndex(index), &noise(index, 512, 256)).unwrap();
    }
    (NOISE..NOISE + 16).for_each(|index| place.write(index, 0));
    let (mut from, mut last) = (PageIndex(0), 0);
    let mut steps = 0;
    loop {
        let done = place.pool.recompress(&mut place.worker, &mut place.recompressor, &Aged::ALL, from).unwrap();
        steps += 1;
        let Some(next) = done.next else { break };
        assert!(next.0 > last && next.0 <= last + 64 + 16, "from {last} to {}", next.0);
        (from, last) = (next, next.0);
    }
    assert!(steps > NOISE / 80, "{steps}");
    assert!(
        place.grouped() >= 8 && place.grouped() <= 16,
        "what is worth it behind them is in a group: {}",
        place.grouped()
    );
    (NOISE..NOISE + 16).for_each(|index| place.must_hold(index, 0));
}

#[test]
fn a_page_that_is_looked_at_stays_as_it_was() {
    let mut place = Place::new().filled(32);
    assert_eq!(place.recompress(0), Ok(32));
    place.store.advance_age();
    let mut page = [0; 4096];
    for _ in 0..3 {
        for index in 0..32 {
            assert_eq!(place.pool.look_at(&mut place.worker, PageIndex(index), &mut page), Ok(Read::Done));
            assert!(page == heap(index, 0) && place.pool.is_grouped(PageIndex(index)), "page {index}");
            assert_eq!(place.pool.age_of(PageIndex(index)), Some(0), "page {index}");
        }
    }
    // Whereas who reads it twice has it leave its group.
    (0..2).for_each(|_| place.must_hold(7, 0));
    assert!(!place.pool.is_grouped(PageIndex(7)) && place.grouped() == 31);
}

#[test]
fn a_copy_of_the_process_can_read_what_a_thread_of_its_parent_was_looking_at() {
    let mut place = Place::new().filled(16);
    assert_eq!(place.recompress(0), Ok(16));
    place.must_hold(3, 0);
    // As a reader leaves them that is copied in its midst: the slot of page 3 locked, its group, too.
    let [leaf, entry] = [2, 5].map(|range| place.store.memory_ranges()[range].0 as *mut u8);
    // SAFETY: the store's own memory, open: the first leaf has the pages of this pool, the first entry the group. Nobody else uses it.
    let locked = |at: *mut u8, bit: u8| unsafe { (*at & 1, *at |= bit).0 };
    // Slots of a leaf begin with their words of four bytes.
    assert_eq!((locked(leaf.wrapping_add(3 * 4), 1), locked(entry, 1)), (0, 0), "they were free");
    // And the group half decoded.
    let (pages, bytes) = place.worker.memory_ranges()[2];
    // SAFETY: the worker's own buffer, which nobody reads meanwhile.
    unsafe { core::slice::from_raw_parts_mut(pages as *mut u8, bytes).fill(0xa5) };
    // SAFETY: nobody else does anything with the store; that this is no child makes no difference here.
    unsafe { place.pool.free_reader_after_fork(PageIndex(3)) };
    place.worker.forget_group();
    let (done, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        place.must_hold(3, 0);
        // The last of its pages frees the group, which takes its lock, too.
        (0..16).for_each(|index| _ = place.pool.discard(PageIndex(index)));
        done.send(place.grouped())
    });
    let left = heard.recv_timeout(std::time::Duration::from_secs(20));
    assert_eq!(left, Ok(0), "a lock was left behind");
}
