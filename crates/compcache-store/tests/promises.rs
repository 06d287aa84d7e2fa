//! What the store promises beside being an array: damage is told, memory goes back, limits hold.

#![allow(unsafe_code)]

#[path = "model/content.rs"]
mod content;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use compcache_store::{
    Aged, Backing, BackingConfig, Batch, Codec, Fetcher, Leaving, Medium, MediumError, Page, PageIndex, Pool,
    PoolConfig, Read, Recompressor, Rewritten, Store, StoreConfig, StoreError, Worker, Written,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn store(limit_bytes: u64) -> Arc<Store> {
    Store::new(StoreConfig { limit_bytes, reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap()
}

fn pool(store: &Arc<Store>) -> (Arc<Pool>, Worker) {
    (store.create_pool(PoolConfig::default()).unwrap(), Worker::new(store, || 0).unwrap())
}

/// Heap-like, compresses to about `percent` of a page.
fn page_of(seed: u64, percent: u64) -> Page {
    let mut page = [0; 4096];
    let mut state = seed;
    for (nth, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        state = content::mix(state);
        if (nth as u64 * 37) % 100 < percent {
            *word = state.to_le_bytes();
        }
    }
    page
}

#[test]
fn a_flipped_bit_in_a_stored_object_is_reported_and_never_returned() {
    for codec in [Codec::Lz4, Codec::Zstd { level: 1 }] {
        for percent in [5, 50, 100] {
            let store = store(u64::MAX);
            let (pool, mut worker) = pool(&store);
            pool.set_codec(codec).unwrap();
            let page = page_of(7, percent);
            let bytes = match pool.write(&mut worker, PageIndex(3), &page).unwrap() {
                Written::Compressed { bytes } => bytes as usize,
                _ => 4096,
            };
            // The only object lies at the start of the arena.
            let arena = store.memory_ranges()[0].0 as *mut u8;
            for bit in (0..bytes * 8).step_by(97) {
                let flip = || {
                    // SAFETY: the byte belongs to the object, and no other thread uses the store.
                    unsafe { *arena.add(bit / 8) ^= 1 << (bit % 8) };
                };
                flip();
                let mut back = [0; 4096];
                let corrupt = Err(StoreError::Corrupt { index: PageIndex(3) });
                assert_eq!(pool.read(&mut worker, PageIndex(3), &mut back), corrupt, "bit {bit}");
                assert_eq!(pool.take(&mut worker, PageIndex(3), &mut back), corrupt, "bit {bit}");
                flip();
                assert_eq!(pool.read(&mut worker, PageIndex(3), &mut back), Ok(Read::Done));
                assert_eq!(back, page);
            }
            assert!(pool.stats().failed_reads > 0);
        }
    }
}

#[test]
fn a_flipped_bit_in_a_patched_object_is_reported() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    let mut page = page_of(7, 40);
    let Ok(Written::Compressed { bytes }) = pool.write(&mut worker, PageIndex(3), &page) else { panic!("a page") };
    let (start, length) = store.memory_ranges()[0];
    // SAFETY: the store's own memory, which nobody else uses meanwhile.
    let arena = unsafe { core::slice::from_raw_parts(start as *const u8, length.min(4 << 20)) };
    let base = arena[..usize::from(bytes)].to_vec();
    page[9] ^= 1;
    let rewritten = pool.rewrite(&mut worker, PageIndex(3), &page);
    let Ok(Rewritten::Patched { bytes }) = rewritten else { panic!("{rewritten:?}") };
    // Another class of sizes has another span; what was there before stays there, as garbage.
    let found: Vec<usize> = (0..arena.len()).step_by(8).filter(|at| arena[*at..].starts_with(&base)).collect();
    let object = start + found.last().expect("the old object is the first part of the new one");
    for bit in 0..usize::from(bytes) * 8 {
        let flip = || {
            // SAFETY: as above.
            unsafe { *((object + bit / 8) as *mut u8) ^= 1 << (bit % 8) };
        };
        let mut back = [0; 4096];
        flip();
        let corrupt = Err(StoreError::Corrupt { index: PageIndex(3) });
        assert_eq!(pool.read(&mut worker, PageIndex(3), &mut back), corrupt, "bit {bit}");
        flip();
        assert_eq!(pool.read(&mut worker, PageIndex(3), &mut back), Ok(Read::Done));
        assert_eq!(back, page);
    }
}

#[test]
fn a_page_whose_object_is_damaged_can_be_written_again() {
    // A few words, so that some damaged objects decode to the same page: that is no reason to keep them.
    let page: Page = core::array::from_fn(|at| if at % 64 < 8 { (at / 512) as u8 } else { (at % 8) as u8 });
    for bit in 0.. {
        let store = store(u64::MAX);
        let (pool, mut worker) = pool(&store);
        let Ok(Written::Compressed { bytes }) = pool.write(&mut worker, PageIndex(3), &page) else { panic!("a page") };
        if bit == usize::from(bytes) * 8 {
            break;
        }
        // SAFETY: the only object lies at the start of the arena, and no other thread uses the store.
        unsafe { *(store.memory_ranges()[0].0 as *mut u8).add(bit / 8) ^= 1 << (bit % 8) };
        let mut back = [0; 4096];
        assert!(pool.read(&mut worker, PageIndex(3), &mut back).is_err());
        pool.rewrite(&mut worker, PageIndex(3), &page).unwrap();
        assert_eq!(pool.read(&mut worker, PageIndex(3), &mut back), Ok(Read::Done), "bit {bit}");
        assert!(back == page, "bit {bit}");
    }
}

#[test]
fn a_page_is_unchanged_only_as_it_was_written() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    let mut back = [0; 4096];
    for codec in [Codec::Lz4, Codec::Zstd { level: 1 }] {
        pool.set_codec(codec).unwrap();
        // Compressed, raw, same-filled.
        for page in [page_of(1, 40), page_of(2, 100), [0x5a; 4096]] {
            let index = PageIndex(7);
            let mut rewrite = |page: &_| pool.rewrite(&mut worker, index, page).unwrap();
            assert!(matches!(rewrite(&page), Rewritten::Written(_)), "absent");
            assert_eq!(rewrite(&page), Rewritten::Unchanged);
            for at in (0..4096).step_by(13).chain([4095]) {
                let mut changed = page;
                changed[at] ^= 1;
                assert_ne!(rewrite(&changed), Rewritten::Unchanged, "{codec:?}, byte {at}");
                assert_eq!(rewrite(&changed), Rewritten::Unchanged, "{codec:?}, byte {at}");
                changed[at] ^= 1;
                changed[at ^ 8] ^= 1;
                assert_ne!(rewrite(&changed), Rewritten::Unchanged, "{codec:?}, byte {at}, and the next word");
                assert_ne!(rewrite(&page), Rewritten::Unchanged, "{codec:?}, byte {at}, and back");
            }
            assert!(pool.discard(index));
        }
    }
    assert!(pool.rewrite(&mut worker, PageIndex(PageIndex::LIMIT), &back).is_err());
    // What other codecs stored is compared, and gets no patch.
    let mut page = page_of(1, 40);
    pool.write(&mut worker, PageIndex(8), &page).unwrap();
    pool.set_codec(Codec::Lz4).unwrap();
    assert_eq!(pool.rewrite(&mut worker, PageIndex(8), &page), Ok(Rewritten::Unchanged));
    for (at, patched) in [(70, false), (71, true), (170, true)] {
        page[at] ^= 1;
        let rewritten = pool.rewrite(&mut worker, PageIndex(8), &page).unwrap();
        assert_eq!(matches!(rewritten, Rewritten::Patched { .. }), patched, "{rewritten:?}");
        assert_eq!((pool.read(&mut worker, PageIndex(8), &mut back), back), (Ok(Read::Done), page));
    }
    pool.set_codec(Codec::Zstd { level: 1 }).unwrap();
    assert_eq!(pool.rewrite(&mut worker, PageIndex(8), &page), Ok(Rewritten::Unchanged));
    page[9] ^= 1;
    assert!(matches!(pool.rewrite(&mut worker, PageIndex(8), &page), Ok(Rewritten::Written(_))));
    assert_eq!((pool.read(&mut worker, PageIndex(8), &mut back), back), (Ok(Read::Done), page));
}

/// Of the two words of a slot only the age may change unnoticed.
#[test]
fn a_flipped_bit_in_a_slot_never_yields_another_page() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    let page = page_of(7, 30);
    for index in 0..200 {
        pool.write(&mut worker, PageIndex(index), &page_of(index + 100, 30)).unwrap();
    }
    pool.write(&mut worker, PageIndex(3), &page).unwrap();
    let leaf = store.memory_ranges()[2].0 as *mut u8;
    let bytes = (3 * 4..3 * 4 + 4).chain(4096 + 3 * 8..4096 + 3 * 8 + 8);
    for (byte, bit) in bytes.flat_map(|byte| (0..8).map(move |bit| (byte, bit))) {
        if byte == 12 && bit < 2 {
            continue; // The lock itself: the reader would wait for its owner.
        }
        // SAFETY: a byte of slot 3 of the only leaf, and no other thread uses the store.
        let flip = || unsafe { *leaf.add(byte) ^= 1 << bit };
        flip();
        let mut back = [0; 4096];
        match pool.read(&mut worker, PageIndex(3), &mut back) {
            Ok(Read::Done) => assert!(byte == 13 && back == page, "byte {byte} bit {bit} was not noticed"),
            Err(error) => assert_eq!(error, StoreError::Corrupt { index: PageIndex(3) }),
            Ok(read) => panic!("byte {byte} bit {bit}: the page reads as {read:?}"),
        }
        flip();
    }
    let mut back = [0; 4096];
    assert_eq!(pool.read(&mut worker, PageIndex(3), &mut back), Ok(Read::Done));
    assert_eq!(back, page);
}

#[test]
fn to_discard_a_page_of_a_damaged_slot_ends_nothing_and_gives_no_page_away() {
    const PAGES: u64 = 200;
    for bit in 0..64 {
        let store = store(u64::MAX);
        let (pool, mut worker) = pool(&store);
        for index in 0..PAGES {
            pool.write(&mut worker, PageIndex(index), &page_of(index + 100, 30)).unwrap();
        }
        let leaf = store.memory_ranges()[2].0 as *mut u64;
        // SAFETY: a bit of slot 3 of the only leaf, and no other thread uses the store.
        unsafe { *leaf.add(512 + 3) ^= 1 << bit };
        pool.discard(PageIndex(3));
        for index in PAGES..2 * PAGES {
            pool.write(&mut worker, PageIndex(index), &page_of(index + 100, 30)).unwrap();
        }
        let mut back = [0; 4096];
        for index in (0..2 * PAGES).filter(|index| *index != 3) {
            match pool.read(&mut worker, PageIndex(index), &mut back) {
                Ok(read) => assert!(read == Read::Done && back == page_of(index + 100, 30), "bit {bit}, page {index}"),
                Err(error) => assert_eq!(error, StoreError::Corrupt { index: PageIndex(index) }),
            }
        }
    }
}

#[test]
fn to_write_a_page_of_a_damaged_slot_ends_nothing_and_stores_the_page() {
    const PAGES: u64 = 200;
    // Nearly all zeroes, so of the least class, which is also that of a span that was never used; and one like the others.
    let mut least = [0; 4096];
    least[4095] = 1;
    for (bit, page) in (0..64).flat_map(|bit| [(bit, least), (bit, page_of(7, 30))]) {
        let store = store(u64::MAX);
        let (pool, mut worker) = pool(&store);
        for index in 0..PAGES {
            pool.write(&mut worker, PageIndex(index), &page_of(index + 100, 30)).unwrap();
        }
        let leaf = store.memory_ranges()[2].0 as *mut u64;
        // SAFETY: a bit of slot 3 of the only leaf, and no other thread uses the store.
        unsafe { *leaf.add(512 + 3) ^= 1 << bit };
        // At the limit, where only what fits into the place of the old one is stored; then as ever.
        store.set_limit_bytes(1);
        let _ = pool.write(&mut worker, PageIndex(3), &least);
        store.set_limit_bytes(u64::MAX);
        pool.write(&mut worker, PageIndex(3), &page).unwrap();
        let mut back = [0; 4096];
        assert_eq!(pool.read(&mut worker, PageIndex(3), &mut back), Ok(Read::Done), "bit {bit}");
        assert!(back == page, "bit {bit}");
        for index in PAGES..2 * PAGES {
            pool.write(&mut worker, PageIndex(index), &page_of(index + 100, 30)).unwrap();
        }
        let mut lost = 0;
        for index in 0..2 * PAGES {
            let written = if index == 3 { page } else { page_of(index + 100, 30) };
            match pool.read(&mut worker, PageIndex(index), &mut back) {
                Ok(read) => assert!(read == Read::Done && back == written, "bit {bit}, page {index}"),
                Err(error) => {
                    assert_eq!(error, StoreError::Corrupt { index: PageIndex(index) });
                    lost += 1;
                }
            }
        }
        // The one whose place a flipped bit names, or that was given its place.
        assert!(lost <= 1, "bit {bit}: {lost} pages are lost");
    }
}

#[test]
fn compaction_of_a_page_of_a_damaged_slot_leaves_all_others_as_they_were() {
    const PAGES: u64 = 600;
    let mut moved = 0;
    // Its length: a longer one would be copied over what lies behind its new place.
    for (bit, damaged) in (16..28).flat_map(|bit| (0..PAGES).step_by(41).map(move |damaged| (bit, damaged))) {
        let store = store(u64::MAX);
        let (pool, mut worker) = pool(&store);
        for index in 0..PAGES {
            pool.write(&mut worker, PageIndex(index), &page_of(index + 100, 30)).unwrap();
        }
        let leaf = store.memory_ranges()[2].0 as *mut u32;
        // SAFETY: a bit of a slot of the only leaf, and no other thread uses the store.
        unsafe { *leaf.add(damaged as usize) ^= 1 << bit };
        let is_kept = |index: &u64| *index == damaged || content::mix(*index).is_multiple_of(5);
        for index in (0..PAGES).filter(|index| !is_kept(index)) {
            pool.discard(PageIndex(index));
        }
        while !store.compact(&mut worker, 100).finished {}
        moved += pool.stats().pages_compacted;
        let mut back = [0; 4096];
        for index in (0..PAGES).filter(|index| is_kept(index) && *index != damaged) {
            let read = pool.read(&mut worker, PageIndex(index), &mut back);
            assert!(read == Ok(Read::Done) && back == page_of(index + 100, 30), "bit {bit}, page {index}: {read:?}");
        }
        let corrupt = Err(StoreError::Corrupt { index: PageIndex(damaged) });
        assert_eq!(pool.read(&mut worker, PageIndex(damaged), &mut back), corrupt, "bit {bit}");
    }
    assert!(moved > 1000, "{moved} objects were moved");
}

/// Resident pages of our own ranges, asked from the kernel.
fn resident_bytes(store: &Store) -> u64 {
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    let mut entries = vec![0u8; 8 << 16];
    let mut resident = 0;
    for (start, length) in store.memory_ranges() {
        // Memory is used from the start of a range: the first 256 MiB are more than any test here uses.
        let pages = (length / 4096).min(1 << 16);
        let entries = &mut entries[..pages * 8];
        std::os::unix::fs::FileExt::read_exact_at(&pagemap, entries, start as u64 / 4096 * 8).unwrap();
        resident += entries.as_chunks::<8>().0.iter().filter(|entry| u64::from_le_bytes(**entry) >> 62 != 0).count();
    }
    resident as u64 * 4096
}

#[test]
fn what_the_store_says_it_uses_is_what_the_system_gave() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    for index in 0..20_000 {
        pool.write(&mut worker, PageIndex(index), &page_of(index, index % 100)).unwrap();
    }
    let (said, given) = (store.mem_used_total_bytes(), resident_bytes(&store));
    assert!(said >= given && said - given <= said / 50 + 64 * 1024, "said {said}, the system gave {given}");
    let fifth = (0..20_000).filter(|index| index % 5 != 0);
    fifth.for_each(|index| assert!(pool.discard(PageIndex(index))));
    while !store.compact(&mut worker, 1000).finished {}
    let (said, given) = (store.mem_used_total_bytes(), resident_bytes(&store));
    assert!(said >= given && said - given <= said / 20 + 64 * 1024, "said {said}, the system gave {given}");
    let stats = pool.stats();
    let ideal = stats.compr_data_size + stats.table_bytes;
    assert!(said <= ideal + ideal / 5, "compaction left {said} bytes for {ideal}");
    assert!(stats.pages_compacted > 0);
}

#[test]
fn memory_goes_back_to_the_system_after_discarding() {
    for by_range in [true, false] {
        let store = store(u64::MAX);
        let (pool, mut worker) = pool(&store);
        for index in 0..20_000 {
            pool.write(&mut worker, PageIndex(index), &page_of(index, index % 100)).unwrap();
        }
        let full = resident_bytes(&store);
        assert!(full > 30 * MIB);
        if by_range {
            assert_eq!(pool.discard_range(PageIndex(0), PageIndex::LIMIT), 20_000);
        } else {
            (0..20_000).for_each(|index| assert!(pool.discard(PageIndex(index))));
            while !store.compact(&mut worker, 1000).finished {}
        }
        let (said, given) = (store.mem_used_total_bytes(), resident_bytes(&store));
        assert!(said < full / 100 && given < full / 100, "said {said}, given {given} of {full}");
        assert_eq!(pool.stats().slot_bytes, 0);
    }
}

#[test]
fn pages_are_stored_in_a_reserve_without_asking_the_system() {
    const PAGES: u64 = 4000;
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    pool.prepare(PAGES).unwrap();
    store.set_reserve_bytes(32 * MIB);
    while store.refill().unwrap() {}
    assert_eq!(store.reserve_bytes(), 32 * MIB);
    let (said, given) = (store.mem_used_total_bytes(), resident_bytes(&store));
    assert!(given >= 32 * MIB, "{given} bytes were given");
    for round in 0..2 {
        for index in 0..PAGES {
            pool.write(&mut worker, PageIndex(index), &page_of(index + round, 40 + index % 10)).unwrap();
        }
        assert_eq!((store.mem_used_total_bytes(), resident_bytes(&store)), (said, given), "round {round}");
        // Tables that were prepared stay; so does what the reserve lacks.
        pool.discard_range(PageIndex(0), PAGES);
    }
    store.set_reserve_bytes(0);
    while store.refill().unwrap() {}
    while !store.compact(&mut worker, 1000).finished {}
    drop(pool);
    let (said, given) = (store.mem_used_total_bytes(), resident_bytes(&store));
    assert!(said < MIB && given < MIB, "said {said}, given {given}");
}

#[test]
fn tables_that_cannot_fit_are_refused_before_any_is_made() {
    let store = store(8 * MIB);
    let (pool, mut worker) = pool(&store);
    pool.write(&mut worker, PageIndex(0), &page_of(1, 50)).unwrap();
    let (said, given) = (store.mem_used_total_bytes(), resident_bytes(&store));
    // Twelve bytes a page: more than the limit, and more than there are addresses for.
    assert!(matches!(pool.prepare(1 << 20), Err(StoreError::LimitReached { .. })));
    assert!(matches!(pool.prepare(PageIndex::LIMIT), Err(StoreError::MemoryRefused { .. })));
    assert_eq!((store.mem_used_total_bytes(), resident_bytes(&store)), (said, given));
    pool.write(&mut worker, PageIndex(1), &page_of(2, 50)).unwrap();
    // Near what they take, with what leads to them: refused, or made.
    let said = store.mem_used_total_bytes();
    let limits = (0..64).map(|more| said + 2046 * 12 * KIB + more * 4 * KIB);
    let made = limits.into_iter().find(|limit| {
        store.set_limit_bytes(*limit);
        let prepared = pool.prepare(1 << 21);
        assert!(prepared.is_ok() || store.mem_used_total_bytes() == said, "{limit}: a part was made");
        prepared.is_ok()
    });
    assert!(made.is_some());
}

#[test]
fn tables_that_have_become_empty_go_however_short_the_steps_are() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    let pages = || (0..64).map(|leaf| PageIndex(leaf * 1024 + leaf * 15));
    pages().for_each(|index| _ = pool.write(&mut worker, index, &page_of(index.0, 50)).unwrap());
    let full = pool.stats().table_bytes;
    pages().for_each(|index| assert!(pool.discard(index)));
    while !store.compact(&mut worker, 1).finished {}
    let left = pool.stats().table_bytes;
    assert!(full - left == 64 * 12 * KIB, "{full} before, {left} left");
}

#[test]
fn a_worker_of_the_reserve_is_refused_rather_than_ask_the_system() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    pool.prepare(20_000).unwrap();
    store.set_reserve_bytes(4 * MIB);
    while store.refill().unwrap() {}
    worker.set_reserve_only(true);
    let (said, given) = (store.mem_used_total_bytes(), resident_bytes(&store));
    let mut write = |index| pool.write(&mut worker, PageIndex(index), &page_of(index, 40 + index % 60));
    let refused = (0..20_000).find(|index| write(*index).is_err()).expect("there is no end to the reserve");
    assert!(refused > 1000, "only {refused} pages were stored");
    assert!(matches!(write(refused), Err(StoreError::MemoryRefused { .. })));
    assert_eq!((store.mem_used_total_bytes(), resident_bytes(&store)), (said, given));
    while store.refill().unwrap() {}
    write(refused).unwrap();
}

#[test]
fn a_worker_of_the_reserve_fills_the_store_to_its_limit() {
    const LIMIT: u64 = 24 * MIB;
    let store = store(LIMIT);
    let (pool, mut worker) = pool(&store);
    pool.prepare(40_000).unwrap();
    store.set_reserve_bytes(2 * MIB);
    worker.set_reserve_only(true);
    // As the front end's thread would, whenever some of it was used.
    let mut write = |index| {
        while store.refill().is_ok_and(|more| more) {}
        pool.write(&mut worker, PageIndex(index), &page_of(index, 40))
    };
    let refused = (0..40_000).find_map(|index| write(index).err().map(|error| (index, error)));
    let Some((index, StoreError::LimitReached { .. })) = refused else { panic!("{refused:?}") };
    assert!((LIMIT - MIB / 2..=LIMIT).contains(&store.mem_used_total_bytes()), "{}", store.mem_used_total_bytes());
    // Nothing there is left, but for pages of classes larger than all that was written: they are ahead, in vain.
    let (stored, limit) = (pool.stats().mem_used_total, LIMIT - store.reserve_bytes());
    assert!(stored > limit * 3 / 4, "{stored} of {limit}");
    // Nobody waits for nine tenths.
    pool.discard_range(PageIndex(0), 300);
    write(index).unwrap();
}

#[test]
fn dropping_a_pool_frees_all_it_held_and_leaves_the_others() {
    let store = store(u64::MAX);
    let (first, mut worker) = pool(&store);
    let (second, _) = pool(&store);
    let stretches = [0, 1 << 20, 1 << 35];
    for index in (0..2000).flat_map(|nth| stretches.map(|start| start + nth)) {
        first.write(&mut worker, PageIndex(index), &page_of(index, 40)).unwrap();
        second.write(&mut worker, PageIndex(index), &page_of(index + 1, 40)).unwrap();
    }
    let both = store.mem_used_total_bytes();
    drop(first);
    assert!(store.mem_used_total_bytes() < both);
    let mut back = [0; 4096];
    for index in (0..2000).flat_map(|nth| stretches.map(|start| start + nth)) {
        assert_eq!(second.read(&mut worker, PageIndex(index), &mut back), Ok(Read::Done));
        assert!(back == page_of(index + 1, 40));
    }
    drop(second);
    while !store.compact(&mut worker, 1000).finished {}
    assert!(store.mem_used_total_bytes() < both / 50, "{} of {both}", store.mem_used_total_bytes());
}

#[test]
fn concurrent_writers_never_pass_the_limit_and_are_refused_until_nine_tenths() {
    let limit = 8 * MIB;
    let store = store(limit);
    let pool = store.create_pool(PoolConfig::default()).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert!(store.mem_used_total_bytes() <= limit);
                std::hint::spin_loop();
            }
        });
        let writers: Vec<_> = (0..4u64)
            .map(|thread| {
                let (store, pool) = (&store, &pool);
                scope.spawn(move || {
                    let mut worker = Worker::new(store, || 0).unwrap();
                    for index in (0..8000).map(|nth| nth * 4 + thread) {
                        match pool.write(&mut worker, PageIndex(index), &page_of(index, 40 + index % 50)) {
                            Ok(_) | Err(StoreError::LimitReached { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                        assert!(store.mem_used_total_bytes() <= limit);
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        done.store(true, Ordering::Relaxed);
        watch.join().unwrap();
    });
    assert!(store.mem_used_max_bytes() <= limit && store.mem_used_max_bytes() > limit - limit / 50);
    assert!(pool.stats().failed_writes > 0);

    // Full: refused while memory goes down to nine tenths, then accepted.
    let mut worker = Worker::new(&store, || 0).unwrap();
    let page = page_of(9, 60);
    assert!(pool.write(&mut worker, PageIndex(1 << 20), &page).is_err());
    // Which pages were refused depends on how the threads ran.
    let mut runs = (0..32_000).step_by(100);
    while store.mem_used_total_bytes() > limit - limit / 10 {
        assert!(pool.write(&mut worker, PageIndex(1 << 20), &page).is_err());
        pool.discard_range(PageIndex(runs.next().expect("all are discarded")), 100);
        while !store.compact(&mut worker, 1000).finished {}
    }
    assert!(pool.write(&mut worker, PageIndex(5), &page).is_ok(), "refused at {}", store.mem_used_total_bytes());
}

#[test]
fn a_full_store_still_takes_same_filled_pages_and_rewrites_that_shrink() {
    let store = store(4 * MIB);
    let (pool, mut worker) = pool(&store);
    let stored =
        (0..).take_while(|index| pool.write(&mut worker, PageIndex(*index), &page_of(*index, 50)).is_ok()).count();
    let stored = stored as u64;
    let refused = pool.write(&mut worker, PageIndex(0), &page_of(1, 90));
    assert!(matches!(refused, Err(StoreError::LimitReached { .. })));
    let mut back = [0; 4096];
    assert_eq!(pool.read(&mut worker, PageIndex(0), &mut back), Ok(Read::Done));
    assert!(back == page_of(0, 50), "a refused write changed the page");
    for index in 0..stored / 2 {
        let written = pool.write(&mut worker, PageIndex(index), &page_of(index + 7, 20));
        assert!(matches!(written, Ok(Written::Compressed { .. })), "{written:?}");
    }
    // As far as there are tables, and no further.
    let same_filled =
        (stored..).take_while(|index| pool.write(&mut worker, PageIndex(*index), &[0x77; 4096]).is_ok()).count() as u64;
    assert!((stored + same_filled).is_multiple_of(1024) && same_filled > 0, "{stored} and {same_filled}");
    assert!(store.mem_used_total_bytes() <= 4 * MIB);
    for index in 0..stored / 2 {
        assert_eq!(pool.read(&mut worker, PageIndex(index), &mut back), Ok(Read::Done));
        assert!(back == page_of(index + 7, 20));
    }
    pool.discard_range(PageIndex(0), PageIndex::LIMIT);
    assert_eq!(pool.stats().slot_bytes, 0);
}

#[test]
fn a_pools_own_limit_holds_for_it_alone() {
    let store = store(u64::MAX);
    let (small, mut worker) = pool(&store);
    let (large, _) = pool(&store);
    small.set_limit_bytes(MIB);
    let mut refused = 0;
    for index in 0..2000 {
        let page = page_of(index, 50);
        refused += u64::from(small.write(&mut worker, PageIndex(index), &page).is_err());
        large.write(&mut worker, PageIndex(index), &page).unwrap();
        assert!(small.stats().mem_used_total <= MIB);
    }
    assert!(refused > 500);
    small.set_limit_bytes(u64::MAX);
    assert!(small.write(&mut worker, PageIndex(1999), &page_of(1, 50)).is_ok());
}

#[test]
fn the_tables_of_pages_far_from_each_other_take_neither_a_pool_nor_its_store_past_its_limit() {
    // At ends that a page, a leaf and nodes do not meet at once; of pages of one word the tables are all.
    for (extra, is_word, of_store) in (0..32).map(|nth| (nth / 4, nth & 1 == 0, nth & 2 == 0)) {
        let limit = MIB + extra * 4096;
        let (store, of_pool) = if of_store { (store(limit), u64::MAX) } else { (store(u64::MAX), limit) };
        let (pool, mut worker) = pool(&store);
        pool.set_limit_bytes(of_pool);
        let far = |nth: u64| PageIndex(nth * (1 << 11) + (nth % 3) * (1 << 21));
        let content = |nth: u64| if is_word { [7; 4096] } else { page_of(nth, 50) };
        let refused = (0..).find(|nth| pool.write(&mut worker, far(*nth), &content(*nth)).is_err()).unwrap();
        let used = if of_store { store.mem_used_total_bytes() } else { pool.stats().mem_used_total };
        assert!(used <= limit && refused > 40, "{used} of {limit} after {refused} pages");
    }
}

#[test]
fn a_changed_codec_leaves_old_pages_readable() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    let codecs = [Codec::Lz4, Codec::Zstd { level: 1 }, Codec::Zstd { level: 19 }, Codec::Zstd { level: -7 }];
    for (nth, codec) in codecs.into_iter().enumerate() {
        pool.set_codec(codec).unwrap();
        assert_eq!(pool.codec(), codec);
        for index in (0..400).filter(|index| index % 4 == nth as u64) {
            pool.write(&mut worker, PageIndex(index), &page_of(index, 60)).unwrap();
        }
    }
    let mut back = [0; 4096];
    for index in 0..400 {
        assert_eq!(pool.read(&mut worker, PageIndex(index), &mut back), Ok(Read::Done));
        assert!(back == page_of(index, 60));
    }
    assert_eq!(pool.set_codec(Codec::Zstd { level: 0 }), Err(StoreError::NoSuchCodec));
    assert_eq!(pool.set_codec(Codec::Zstd { level: 20 }), Err(StoreError::NoSuchCodec));
}

#[test]
fn an_index_out_of_range_is_refused_and_counted() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    let mut page = page_of(1, 50);
    let (last, beyond) = (PageIndex(PageIndex::LIMIT - 1), PageIndex(PageIndex::LIMIT));
    pool.write(&mut worker, last, &page).unwrap();
    let refused = StoreError::IndexOutOfRange { index: beyond };
    assert_eq!(pool.write(&mut worker, beyond, &page), Err(refused));
    assert_eq!(pool.read(&mut worker, beyond, &mut page), Err(refused));
    assert!(!pool.contains(beyond) && !pool.discard(beyond) && pool.contains(last));
    assert_eq!(pool.move_slot(last, beyond), Err(refused));
    assert_eq!(pool.discard_range(last, u64::MAX), 1);
    assert_eq!(pool.stats().invalid_io, 2);
    // SAFETY: as in the child of a fork, nobody else uses the store.
    unsafe { pool.free_reader_after_fork(beyond) };
    assert_eq!((pool.age_of(beyond), pool.record_of(&mut worker, beyond)), (None, None));
    // What was read ahead is no page out of range.
    let config = BackingConfig { capacity_bytes: MIB, segment_bytes: 64 << 10 };
    let backing = Backing::new(Box::new(Zeroes), config).unwrap();
    let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    pool.write(&mut worker, PageIndex(3), &page).unwrap();
    assert_eq!(store.write_back(&mut worker, &pool, Leaving::Oldest).unwrap().pages, 1);
    let mut fetcher = Fetcher::new().unwrap();
    let record = pool.record_of(&mut worker, PageIndex(3)).unwrap();
    backing.fetch(record, &mut fetcher).unwrap();
    for far in [PageIndex::LIMIT, PageIndex::LIMIT + 3, u64::MAX] {
        assert_eq!(pool.open_fetched(&mut worker, &mut fetcher, PageIndex(far), &mut page), None);
        assert_eq!(pool.record_of(&mut worker, PageIndex(far)), None);
        assert_eq!(pool.fetch(&mut worker, &mut fetcher, PageIndex(far), &mut page), Err(out_of_range(far)));
    }
}

fn out_of_range(index: u64) -> StoreError {
    StoreError::IndexOutOfRange { index: PageIndex(index) }
}

#[test]
fn a_worker_of_another_store_is_refused_by_every_call() {
    let (ours, other) = (store(u64::MAX), store(u64::MAX));
    let config = BackingConfig { capacity_bytes: MIB, segment_bytes: 64 << 10 };
    let backing = Backing::new(Box::new(Zeroes), config).unwrap();
    let pool = ours.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let worker = || Worker::new(&ours, || 0).unwrap();
    let (at, mut page) = (PageIndex(3), page_of(7, 50));
    pool.write(&mut worker(), at, &page).unwrap();
    let tools = || (Box::leak(Box::new(Fetcher::new().unwrap())), Box::leak(Box::new(Batch::new().unwrap())));
    type Call<'a> = (&'a str, &'a dyn Fn(&mut Worker));
    let calls: [Call<'_>; 15] = [
        ("write", &|worker| _ = pool.write(worker, at, &page_of(7, 50))),
        ("write_run", &|worker| _ = pool.write_run(worker, at, &[page_of(7, 50)])),
        ("rewrite", &|worker| _ = pool.rewrite(worker, at, &page_of(7, 50))),
        ("read", &|worker| _ = pool.read(worker, at, &mut [0; 4096])),
        ("read_run", &|worker| _ = pool.read_run(worker, at, &mut [[0; 4096]], &mut [Read::Absent])),
        ("look_at", &|worker| _ = pool.look_at(worker, at, &mut [0; 4096])),
        ("take", &|worker| _ = pool.take(worker, at, &mut [0; 4096])),
        ("fetch", &|worker| _ = pool.fetch(worker, &mut Fetcher::new().unwrap(), at, &mut [0; 4096])),
        ("fetch_run", &|worker| _ = pool.fetch_run(worker, tools(), at, &mut [], &mut [])),
        ("record_of", &|worker| _ = pool.record_of(worker, at)),
        ("open_fetched", &|worker| _ = pool.open_fetched(worker, &mut Fetcher::new().unwrap(), at, &mut [0; 4096])),
        ("recompress", &|worker| {
            _ = pool.recompress(worker, &mut Recompressor::new(&ours, 1).unwrap(), &Aged::ALL, PageIndex(0));
        }),
        ("compact", &|worker| _ = ours.compact(worker, 1)),
        ("reclaim", &|worker| _ = ours.reclaim(worker, &backing)),
        ("write_back", &|worker| _ = ours.write_back(worker, &pool, Leaving::Oldest)),
    ];
    for (name, call) in calls {
        let mut stranger = Worker::new(&other, || 0).unwrap();
        let called = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(&mut stranger)));
        assert!(called.is_err(), "{name}");
    }
    assert!(pool.read(&mut worker(), at, &mut page) == Ok(Read::Done) && page == page_of(7, 50), "nothing was done");
}

/// A medium that takes all and gives zeroes.
struct Zeroes;

impl Medium for Zeroes {
    fn read_at(&self, _: u64, into: &mut [u8]) -> Result<(), MediumError> {
        into.fill(0);
        Ok(())
    }

    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), MediumError> {
        Ok(())
    }

    fn punch(&self, _: u64, _: u64) {}
}

#[test]
fn ages_follow_writes_and_reads_and_moves() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    let mut page = page_of(1, 50);
    pool.write(&mut worker, PageIndex(1), &page).unwrap();
    pool.write(&mut worker, PageIndex(2), &[0; 4096]).unwrap();
    let age = store.age();
    assert_eq!(store.advance_age(), age + 1);
    assert_eq!((pool.age_of(PageIndex(1)), pool.age_of(PageIndex(2))), (Some(age), Some(age)));
    pool.read(&mut worker, PageIndex(1), &mut page).unwrap();
    pool.move_slot(PageIndex(2), PageIndex(9)).unwrap();
    let ages = [1, 2, 9].map(|index| pool.age_of(PageIndex(index)));
    assert_eq!(ages, [Some(age + 1), None, Some(age)]);
}

#[test]
fn ranges_as_wide_as_the_address_space_take_no_time() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    let page = page_of(1, 50);
    let far: Vec<u64> = (0..36).map(|bit| 1 << bit).collect();
    for index in &far {
        pool.write(&mut worker, PageIndex(*index), &page).unwrap();
    }
    let start = std::time::Instant::now();
    let mut listed = Vec::new();
    pool.for_each_stored(PageIndex(0), PageIndex::LIMIT, |index| listed.push(index.0));
    assert_eq!(listed, far);
    assert_eq!(pool.discard_range(PageIndex(0), PageIndex::LIMIT), 36);
    // To go over all indexes takes minutes.
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn a_store_in_locked_memory_gives_memory_back_too() {
    let config = StoreConfig { reserve_bytes: 64 << 20, lock_in_ram: true, ..StoreConfig::default() };
    let store = Store::new(config).unwrap();
    let (pool, mut worker) = pool(&store);
    for index in 0..1000 {
        match pool.write(&mut worker, PageIndex(index), &page_of(index, 50)) {
            Ok(_) => {}
            Err(StoreError::MemoryRefused { .. }) => {
                println!("skipped: RLIMIT_MEMLOCK is too low here");
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
    let full = resident_bytes(&store);
    pool.discard_range(PageIndex(0), PageIndex::LIMIT);
    while !store.compact(&mut worker, 1000).finished {}
    assert!(resident_bytes(&store) < full / 4, "{} of {full}", resident_bytes(&store));
}

#[test]
fn statistics_count_what_happened() {
    let store = store(u64::MAX);
    let (pool, mut worker) = pool(&store);
    let mut back = [0; 4096];
    pool.write(&mut worker, PageIndex(0), &[3; 4096]).unwrap();
    assert_eq!(pool.write(&mut worker, PageIndex(1), &page_of(1, 100)), Ok(Written::Raw));
    let Written::Compressed { bytes } = pool.write(&mut worker, PageIndex(2), &page_of(1, 20)).unwrap() else {
        panic!("a page of a fifth of noise compresses")
    };
    pool.read(&mut worker, PageIndex(2), &mut back).unwrap();
    pool.discard(PageIndex(0));
    let stats = pool.stats();
    assert_eq!((stats.num_writes, stats.num_reads, stats.pages_discard), (3, 1, 1));
    assert_eq!((stats.orig_data_size, stats.compr_data_size), (8192, 4096 + u64::from(bytes)));
    assert_eq!((stats.same_pages, stats.huge_pages, stats.good_pages), (0, 1, 1));
    assert_eq!(pool.latency().writes.count, 3);
}

#[test]
fn tables_of_a_page_that_found_no_place_go_again() {
    let store = Store::new(StoreConfig { reserve_bytes: 256 << 10, ..StoreConfig::default() }).unwrap();
    let (pool, mut worker) = pool(&store);
    let mut held = 0;
    while pool.write(&mut worker, PageIndex(held), &page_of(held, 100)).is_ok() {
        held += 1;
    }
    let before = pool.stats().table_bytes;
    let far = (1..4u64).map(|nth| PageIndex(nth << 30));
    for index in far {
        let refused = pool.write(&mut worker, index, &page_of(1, 100));
        assert!(matches!(refused, Err(StoreError::MemoryRefused { .. })), "{refused:?}");
    }
    // What leads to them stays for the life of a pool; the leaves go.
    assert!(pool.stats().table_bytes <= before + 3 * 8192, "{} from {before}", pool.stats().table_bytes);
}
