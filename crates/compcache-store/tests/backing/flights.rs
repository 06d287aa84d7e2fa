//! Flights that come to nothing, and two at a time.

use super::*;

#[test]
fn what_a_failed_write_did_not_take_leaves_first_the_next_time() {
    for faults in [Faults { failed_writes: 1, ..Faults::NONE }, Faults { room_bytes: 0, ..Faults::NONE }] {
        let memory = Memory::new(1, faults);
        let mut at = place(memory.medium(), config(100));
        (0..300).for_each(|index| at.write(index, &if index % 30 == 7 { noise(index, 1) } else { heap(index, 1) }));
        at.reclaim().unwrap_err();
        memory.set_faults(Faults::NONE);
        assert!(at.reclaim().unwrap() > 0);
        let stayed: Vec<u64> = (0..300).filter(|index| index % 30 == 7 && !at.is_out(*index)).collect();
        assert!(stayed.is_empty(), "{stayed:?} do not compress, and others have left");
    }
}

#[test]
fn what_is_old_leaves_first_also_after_many_failed_writes() {
    let memory = Memory::new(1, Faults { room_bytes: 0, ..Faults::NONE });
    let mut at = place(memory.medium(), config(100));
    (1000..2000).for_each(|index| at.write(index, &heap(index, 1)));
    pass_ages(&at.store, 5);
    (0..1000).for_each(|index| at.write(index, &heap(index, 1)));
    at.store.set_limit_bytes(at.store.mem_used_total_bytes());
    for _ in 0..20 {
        at.store.reclaim(&mut at.worker, &at.backing).unwrap_err();
    }
    memory.set_faults(Faults::NONE);
    while !at.store.reclaim(&mut at.worker, &at.backing).unwrap().finished {}
    let young = (0..1000).filter(|index| at.is_out(*index)).count();
    let old = (1000..2000).filter(|index| at.is_out(*index)).count();
    assert!(young == 0 && old > 300, "{young} young pages and {old} old ones have left");
}

pub type Hook = Box<dyn FnOnce() + Send>;

/// A medium that has something happen when a whole segment is read for the first time, before it is.
pub struct Hooked(pub Box<dyn Medium>, pub Arc<Mutex<Option<Hook>>>);

impl Medium for Hooked {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        let hook = if into.len() == 64 << 10 { self.1.lock().unwrap().take() } else { None };
        hook.into_iter().for_each(|hook| hook());
        self.0.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        self.0.write_at(offset_bytes, from)
    }

    fn punch(&self, offset_bytes: u64, length_bytes: u64) {
        self.0.punch(offset_bytes, length_bytes);
    }
}

#[test]
fn a_segment_that_dies_and_is_written_again_while_it_is_read_is_no_damage_and_can_be_cleaned() {
    /// Pages that do not compress, of which a segment holds so many.
    const FULL: u64 = 15;
    let hook = Arc::new(Mutex::new(None::<Hook>));
    let mut at = place(Box::new(Hooked(Memory::new(1, Faults::NONE).medium(), hook.clone())), config(8));
    (0..6 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    at.reclaim_all();
    let stats = at.backing.stats();
    assert_eq!((stats.segments_written, stats.free_bytes), (6, 2 * 64 * KIB));
    let segment_of = |at: &mut Place, index: u64| {
        let read = at.pool.read(&mut at.worker, PageIndex(index), &mut [0; 4096]);
        let Ok(Read::OnBacking(extent)) = read else { panic!("page {index}: {read:?}") };
        extent.offset_bytes / (64 * KIB)
    };
    assert!(at.pool.discard_range(PageIndex(0), FULL - 3) > 0 && segment_of(&mut at, FULL - 1) == 0);
    (100..100 + 2 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    // What lives in the first segment is to be moved; but it dies, and others are written there.
    let (store, backing, pool) = (at.store.clone(), at.backing.clone(), at.pool.clone());
    *hook.lock().unwrap() = Some(Box::new(move || {
        assert_eq!(pool.discard_range(PageIndex(0), FULL), 3);
        let mut worker = Worker::new(&store, || 0).unwrap();
        assert_eq!(store.reclaim(&mut worker, &backing).unwrap().pages, FULL as usize);
    }));
    assert_eq!(at.reclaim().unwrap(), FULL as usize);
    assert!(hook.lock().unwrap().is_none(), "nothing was cleaned");
    assert_eq!(segment_of(&mut at, 100), 0, "the segment was not written again");
    let stats = at.backing.stats();
    assert_eq!((stats.damaged_reads, stats.failed_reads, stats.records_moved), (0, 0, 0), "{stats:?}");
    // Now that one is mostly dead, too.
    assert_eq!(at.pool.discard_range(PageIndex(100), FULL - 1), FULL - 1);
    (200..200 + FULL).for_each(|index| at.write(index, &noise(index, 1)));
    assert!(at.reclaim().unwrap() > 0, "{:?}", at.backing.stats());
    let survivor = 100 + FULL - 1;
    assert_ne!(segment_of(&mut at, survivor), 0, "{:?}", at.backing.stats());
    assert!(at.fetch(survivor).unwrap() == noise(survivor, 1));
    assert_eq!(at.backing.stats().live_bytes, at.pool.stats().bd_bytes);
}

/// Of whose medium nothing is heard for seconds, nobody asks anything, unless there is no other.
#[test]
fn a_medium_that_hangs_holds_up_its_own_pages_alone() {
    static NOW: AtomicU64 = AtomicU64::new(1);
    let now = || NOW.load(Ordering::SeqCst);
    let gate = Arc::new(Gate {
        memory: Memory::new(1, Faults::NONE).medium(),
        closed: Mutex::new(true),
        moved: Condvar::new(),
        waiting: AtomicBool::new(false),
    });
    let mut hanging = place(Box::new(Gated(gate.clone())), config(100));
    let store = hanging.store.clone();
    let backing = Backing::new(Memory::new(2, Faults::NONE).medium(), config(100)).unwrap();
    let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let mut worker = Worker::new(&store, now).unwrap();
    (0..300).for_each(|index| hanging.write(index, &heap(index, 1)));
    pass_ages(&store, 5);
    (0..300).for_each(|index| _ = pool.write(&mut worker, PageIndex(index), &heap(index, 2)).unwrap());
    store.set_limit_bytes(store.mem_used_total_bytes());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut worker = Worker::new(&store, now).unwrap();
            store.reclaim(&mut worker, &hanging.backing).unwrap();
        });
        while !gate.waiting.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        // It is opened at the end, also where an assertion fails; and after a while, for who goes there all the same would wait for ever.
        let (is_over, over) = std::sync::mpsc::channel::<()>();
        let gate = &gate;
        scope.spawn(move || {
            let _ = over.recv_timeout(std::time::Duration::from_secs(20));
            *gate.closed.lock().unwrap() = false;
            gate.moved.notify_all();
        });
        // What leaves first is what is colder, and it is on its way. Nobody else goes to where it is written, however early.
        assert_eq!(store.reclaim(&mut worker, &backing).unwrap().pages, 0);
        NOW.store(500_000_000, Ordering::SeqCst);
        let done = reclaim_any(&mut worker, &store);
        assert!(done.is_held_up && pool.stats().bd_count == 0, "{done:?}");
        NOW.store(10_000_000_000, Ordering::SeqCst);
        reclaim_any(&mut worker, &store);
        let left = pool.stats().bd_count;
        assert!((1..300).contains(&left), "{left} pages have left");
        // Who has nothing else waits until it is heard of.
        store.set_limit_bytes(1);
        let done = reclaim_any(&mut worker, &store);
        assert!(done.is_held_up && pool.stats().bd_count == 300, "{done:?}");
        drop(is_over);
    });
    reclaim_any(&mut worker, &store);
    assert_eq!(hanging.pool.stats().bd_count, 300);
    store.set_limit_bytes(u64::MAX);
    (0..300).for_each(|index| assert!(hanging.fetch(index).unwrap() == heap(index, 1)));
}

#[test]
fn ages_pass_no_faster_however_many_see_to_it() {
    let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
    let passed = |now_ns| store.advance_age_unless_since(now_ns, 100);
    assert_eq!([1000, 1000, 1099, 1100, 1150, 5000].map(passed), [true, false, false, true, false, true]);
    assert_eq!(store.age(), 3);
}

#[test]
fn a_pool_that_is_not_above_its_own_mark_keeps_warm_pages_while_there_are_colder_ones() {
    let mut cold = place(Memory::new(1, Faults::NONE).medium(), config(400));
    let backing = Backing::new(Memory::new(2, Faults::NONE).medium(), config(400)).unwrap();
    let store = cold.store.clone();
    let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let worker = Worker::new(&store, || 0).unwrap();
    let mut warm = Place { store: store.clone(), backing, pool, worker, fetcher: Fetcher::new().unwrap() };
    (0..1000).for_each(|index| cold.write(index, &heap(index, 1)));
    (0..5).for_each(|_| _ = store.advance_age());
    (0..1000).for_each(|index| warm.write(index, &heap(index, 2)));
    // It uses four fifths of its own limit, and the store nine tenths of its.
    warm.pool.set_limit_bytes(warm.pool.stats().mem_used_total * 5 / 4);
    store.set_limit_bytes(store.mem_used_total_bytes() * 10 / 9);
    assert_eq!(store.reclaim(&mut warm.worker, &warm.backing).unwrap().pages, 0);
    assert!(store.reclaim(&mut cold.worker, &cold.backing).unwrap().pages > 0);
    // The store is not short of anything: then it is its own limit that is asked for.
    store.set_limit_bytes(u64::MAX);
    assert!(store.reclaim(&mut warm.worker, &warm.backing).unwrap().pages > 0);
}
