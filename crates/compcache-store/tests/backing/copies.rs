//! A backing in a process that forks: parts for the copies, and what is held for them.

use super::*;

/// As `place`, on a backing of three parts.
fn place_for_copies(medium: Box<dyn Medium>, config: BackingConfig) -> Place {
    let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
    let backing = Backing::new_for_copies(medium, config, 3).unwrap();
    let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let worker = Worker::new(&store, || 0).unwrap();
    Place { store, backing, pool, worker, fetcher: Fetcher::new().unwrap() }
}

/// What lies at the beginning of a medium.
fn bytes(memory: &Memory, length: u64) -> Vec<u8> {
    memory.with_bytes(|bytes| bytes.iter().copied().chain(std::iter::repeat(0)).take(length as usize).collect())
}

#[test]
fn a_copy_reads_what_its_parent_wrote_and_writes_to_a_part_of_its_own() {
    let memory = Memory::new(1, Faults::NONE);
    let mut place = place_for_copies(memory.medium(), config(32));
    (0..100).for_each(|index| place.write(index, &noise(index, 0)));
    place.reclaim_all();
    let parents = bytes(&memory, place.backing.part_bytes());
    // Nothing is copied here: this process is its own child.
    // SAFETY: nobody else uses the backing.
    unsafe { place.backing.begin_copy(1) };
    assert_eq!(place.backing.flights() >> 34, 1, "a copy would seal with what its parent has used");
    assert_eq!(place.backing.own_part(), Some(1));
    (0..100).for_each(|index| assert!(place.fetch(index).unwrap() == noise(index, 0), "page {index}"));
    // Others, the parent's again, and some of the parent's discarded: enough to clean its own part many times.
    for generation in 1..12 {
        (50..150).for_each(|index| place.write(index, &noise(index, generation)));
        place.reclaim_all();
        let stats = place.backing.stats();
        assert_eq!(stats.live_bytes + stats.dead_bytes + stats.free_bytes, stats.capacity_bytes);
    }
    assert_eq!(place.backing.health(), Health::Good);
    (0..150).for_each(|index| {
        assert!(place.fetch(index).unwrap() == noise(index, if index < 50 { 0 } else { 11 }), "page {index}");
    });
    assert!(bytes(&memory, place.backing.part_bytes()) == parents, "a copy wrote to what is its parent's");
    // The copy's copy finds the last part, and its copy none; when the first has died, that is free for another.
    // SAFETY: as above.
    unsafe { place.backing.begin_copy(2) };
    assert_eq!(place.backing.flights() >> 34, 2, "a copy would seal with what its parent has used");
    assert_eq!(place.backing.own_part(), Some(2));
    place.write(500, &noise(500, 0));
    place.reclaim_all();
    // SAFETY: as above.
    unsafe { place.backing.begin_copy(3) };
    assert_eq!(place.backing.flights() >> 34, 3, "a copy would seal with what its parent has used");
    assert_eq!((place.backing.own_part(), place.backing.health()), (None, Health::Full));
    place.write(501, &noise(501, 0));
    assert_eq!(place.reclaim(), Ok(0), "there is no part that it could write to");
    assert!(place.fetch(7).unwrap() == noise(7, 0) && place.fetch(500).unwrap() == noise(500, 0));
    (0..50).for_each(|index| _ = place.pool.discard(PageIndex(index)));
    assert!(!place.backing.is_part_alive(0) && place.backing.is_part_alive(1));
    // SAFETY: as above.
    unsafe { place.backing.begin_copy(4) };
    assert_eq!(place.backing.flights() >> 34, 4, "a copy would seal with what its parent has used");
    assert_eq!(place.backing.own_part(), Some(0));
    place.reclaim_all();
    assert!(place.fetch(501).unwrap() == noise(501, 0) && place.fetch(60).unwrap() == noise(60, 11));
}

#[test]
fn a_copy_for_which_there_is_no_number_writes_nothing_and_says_so() {
    for (number, is_one) in [(1, true), ((1 << 30) - 1, true), (1 << 30, false), (u64::MAX, false)] {
        let mut place = place_for_copies(Memory::new(1, Faults::NONE).medium(), config(32));
        (0..50).for_each(|index| place.write(index, &noise(index, 0)));
        place.reclaim_all();
        // SAFETY: nobody else uses the backing.
        unsafe { place.backing.begin_copy(number) };
        assert_eq!(
            (place.backing.is_out_of_flights(), place.backing.own_part().is_some()),
            (!is_one, is_one),
            "{number}"
        );
        (50..100).for_each(|index| place.write(index, &noise(index, 0)));
        assert_eq!(place.reclaim().unwrap() > 0, is_one, "{number}");
        assert_eq!(place.backing.own_flights() > 0, is_one, "{number}");
        (0..100).for_each(|index| assert!(place.fetch(index).unwrap() == noise(index, 0), "page {index}"));
    }
}

#[test]
fn what_copies_may_read_is_not_written_over_until_none_may() {
    let memory = Memory::new(1, Faults::NONE);
    let mut place = place_for_copies(memory.medium(), config(16));
    (0..60).for_each(|index| place.write(index, &noise(index, 0)));
    place.reclaim_all();
    let until = place.backing.flights();
    place.backing.hold(until);
    // But for the second segment, which has its room beforehand and nothing in it.
    let written = || {
        let mut bytes = bytes(&memory, (until + 1) * 64 * KIB);
        bytes.drain(64 << 10..128 << 10);
        bytes
    };
    let held = written();
    for generation in 1..20 {
        (0..60).for_each(|index| place.write(index, &noise(index, generation)));
        place.reclaim_all();
    }
    assert!(written() == held, "a copy of the process would have lost its pages");
    let dead_while_held = place.backing.stats().dead_bytes;
    place.backing.hold(0);
    assert!(place.backing.stats().dead_bytes <= dead_while_held - until * 64 * KIB + 64 * KIB);
    for generation in 20..40 {
        (0..60).for_each(|index| place.write(index, &noise(index, generation)));
        place.reclaim_all();
    }
    assert!(written() != held, "what nobody may read any more is used again");
    (0..60).for_each(|index| assert!(place.fetch(index).unwrap() == noise(index, 39)));
}

#[test]
fn what_copies_may_read_is_not_cleaned_in_vain() {
    let mut place = place_for_copies(Memory::new(1, Faults::NONE).medium(), config(16));
    (0..90).for_each(|index| place.write(index, &noise(index, 0)));
    place.reclaim_all();
    place.backing.hold(place.backing.flights());
    // Little of what is held is wanted here; half of what came after it could be cleaned.
    (0..90).filter(|index| index % 4 != 0).for_each(|index| _ = place.pool.discard(PageIndex(index)));
    (1000..1120).for_each(|index| place.write(index, &noise(index, 0)));
    place.reclaim_all();
    (1000..1120).filter(|index| index % 2 == 0).for_each(|index| _ = place.pool.discard(PageIndex(index)));
    for generation in 0..20 {
        (2000..2010).for_each(|index| place.write(index, &noise(index, generation)));
        place.reclaim_all();
        assert_eq!(place.backing.health(), Health::Good, "{generation}: {:?}", place.backing.stats());
    }
}
