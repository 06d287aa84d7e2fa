//! What may be written in a day: never more, whoever writes and why; and what stays in memory meanwhile is all there.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::*;
use compcache_store::DailyWrites;

const SEGMENT: u64 = 64 * KIB;
const SPAN_NS: u64 = 15 * 60 * 1_000_000_000;
const HOUR_NS: u64 = 4 * SPAN_NS;
const DAY_NS: u64 = 24 * HOUR_NS;

thread_local! {
    static NOW_NS: Cell<u64> = const { Cell::new(0) };
}

fn now_ns() -> u64 {
    NOW_NS.get()
}

fn pass(time_ns: u64) {
    NOW_NS.set(now_ns() + time_ns);
}

/// When something was to be written, and how much; whether that succeeds or not.
type Log = Arc<Mutex<Vec<(u64, u64)>>>;

struct Logged(Box<dyn Medium>, Log);

impl Medium for Logged {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        self.0.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        self.1.lock().unwrap().push((now_ns(), from.len() as u64));
        self.0.write_at(offset_bytes, from)
    }

    fn punch(&self, offset_bytes: u64, length_bytes: u64) {
        self.0.punch(offset_bytes, length_bytes);
    }
}

fn timed(medium: Box<dyn Medium>, segments: u64, budget_bytes: Option<u64>) -> (Place, Log) {
    let log = Log::default();
    let mut place = place(Box::new(Logged(medium, log.clone())), config(segments));
    place.worker = Worker::new(&place.store, now_ns).unwrap();
    place.backing.set_daily_bytes(budget_bytes);
    (place, log)
}

impl Place {
    fn daily(&self) -> DailyWrites {
        self.backing.daily_writes(now_ns())
    }

    /// Whether a page reads as it was written, wherever it is; it stays there.
    fn holds(&mut self, index: u64, written: &Page) -> bool {
        let mut page = [0; 4096];
        match self.pool.read(&mut self.worker, PageIndex(index), &mut page).unwrap() {
            Read::OnBacking(_) => page = self.fetch(index).unwrap(),
            read => assert_eq!(read, Read::Done),
        }
        page == *written
    }
}

fn bytes_since(log: &Log, since_ns: u64) -> u64 {
    log.lock().unwrap().iter().rev().take_while(|(at, _)| *at > since_ns).map(|(_, bytes)| bytes).sum()
}

/// Pages are written and discarded, cleaning moves others, some writes fail, time passes in steps of all sizes, and the budget is changed.
#[test]
fn no_24_hours_see_more_written_than_the_budget_and_nothing_is_lost_while_it_is_spent() {
    let (mut spent, mut moved, mut failed) = (0, 0, 0);
    for seed in 0..24 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let failed_writes = if seed % 3 == 0 { 4 } else { 0 };
        let memory = Memory::new(seed, Faults { failed_writes, ..Faults::NONE });
        let mut budget = rng.u64(1..40) * SEGMENT + rng.u64(0..SEGMENT);
        let (mut at, log) = timed(memory.medium(), 24, Some(budget));
        NOW_NS.set(rng.u64(0..100 * DAY_NS));
        let mut generations: BTreeMap<u64, u64> = BTreeMap::new();
        let step_ns = [SPAN_NS / 10, HOUR_NS, 8 * HOUR_NS][seed as usize % 3];
        for generation in 1..300 {
            for _ in 0..rng.u64(0..60) {
                let index = rng.u64(0..400);
                if rng.u8(0..8) == 0 {
                    assert_eq!(at.pool.discard(PageIndex(index)), generations.remove(&index).is_some());
                } else {
                    at.write(index, &heap(index, generation));
                    generations.insert(index, generation);
                }
            }
            pass(rng.u64(0..step_ns));
            if rng.u8(0..40) == 0 {
                budget = rng.u64(0..40) * SEGMENT;
                at.backing.set_daily_bytes(Some(budget));
            }
            for _ in 0..rng.u8(0..12) {
                let (before, attempts) = (bytes_since(&log, 0), log.lock().unwrap().len());
                let pages = at.reclaim().unwrap_or(0);
                let written = bytes_since(&log, 0) - before;
                assert!(written == 0 || bytes_since(&log, now_ns().saturating_sub(DAY_NS)) <= budget, "seed {seed}");
                if at.backing.health() == Health::Spent {
                    assert_eq!((pages, log.lock().unwrap().len()), (0, attempts));
                    let counted = bytes_since(&log, now_ns().saturating_sub(DAY_NS + SPAN_NS));
                    assert!(counted + SEGMENT > budget, "seed {seed}: {counted} of {budget}, and it is called spent");
                    spent += 1;
                }
            }
            let daily = at.daily();
            let [least, most] = [DAY_NS, DAY_NS + SPAN_NS].map(|ns| bytes_since(&log, now_ns().saturating_sub(ns)));
            assert!((least..=most).contains(&daily.written_bytes), "seed {seed}: {daily:?}");
            if generation % 20 == 0 {
                for (index, generation) in &generations {
                    assert!(at.holds(*index, &heap(*index, *generation)), "seed {seed}: page {index}");
                }
            }
        }
        let stats = at.backing.stats();
        assert_eq!(stats.live_bytes + stats.dead_bytes + stats.free_bytes, stats.capacity_bytes);
        assert_eq!(stats.live_bytes, at.pool.stats().bd_bytes);
        (moved, failed) = (moved + stats.records_moved, failed + stats.failed_writes);
    }
    assert!(spent > 1000 && moved > 1000 && failed > 50, "{spent} times spent, {moved} moved, {failed} failed");
}

#[test]
fn a_day_that_is_spent_is_said_leaves_pages_in_memory_and_ends_by_itself() {
    let memory = Memory::new(1, Faults::NONE);
    let (mut at, log) = timed(memory.medium(), 100, Some(3 * SEGMENT));
    NOW_NS.set(5 * DAY_NS);
    (0..200).for_each(|index| at.write(index, &noise(index, 1)));
    for hours in [1, 2, 3] {
        pass(HOUR_NS);
        assert_eq!(at.reclaim(), Ok(15), "after {hours} hours");
    }
    assert_eq!((at.backing.health(), at.daily().waits), (Health::Good, 0), "nobody was refused yet");
    for _ in 0..5 {
        assert_eq!((at.reclaim(), at.backing.health()), (Ok(0), Health::Spent));
    }
    let daily = at.daily();
    assert_eq!((daily.budget_bytes, daily.written_bytes, daily.waits), (Some(3 * SEGMENT), 3 * SEGMENT, 1));
    assert_eq!(daily.wait_ns, Some(22 * HOUR_NS + SPAN_NS), "the first was two hours ago");
    for index in 0..200 {
        assert!(at.is_out(index) == (index < 45) && at.holds(index, &noise(index, 1)), "page {index}");
    }
    // It is over at that time and not a moment before, and said so even if nobody tries.
    pass(22 * HOUR_NS + SPAN_NS - 1);
    assert_eq!((at.reclaim(), at.daily().wait_ns, at.backing.health()), (Ok(0), Some(1), Health::Spent));
    pass(1);
    assert_eq!((at.daily().wait_ns, at.backing.health()), (Some(0), Health::Good));
    assert_eq!((at.reclaim(), at.reclaim()), (Ok(15), Ok(0)), "one has become so old, the next has not");
    assert_eq!((at.daily().waits, log.lock().unwrap().len()), (2, 4));
    // With nothing that could leave, nothing waits.
    at.pool.discard_range(PageIndex(0), PageIndex::LIMIT);
    pass(2 * DAY_NS);
    at.write(0, &noise(0, 2));
    at.backing.set_daily_bytes(Some(SEGMENT));
    assert_eq!((at.reclaim(), at.reclaim(), at.backing.health()), (Ok(1), Ok(0), Health::Good));
}

#[test]
fn a_budget_is_changed_while_it_is_used_and_counts_what_was_written_before() {
    let (mut at, log) = timed(Memory::new(1, Faults::NONE).medium(), 100, None);
    assert_eq!(at.backing.daily_bytes(), None);
    (0..300).for_each(|index| at.write(index, &noise(index, 1)));
    (0..4).for_each(|_| assert_eq!(at.reclaim(), Ok(15)));
    assert_eq!((at.daily().budget_bytes, at.daily().written_bytes, at.daily().wait_ns), (None, 4 * SEGMENT, Some(0)));
    // Less than was written without one.
    at.backing.set_daily_bytes(Some(3 * SEGMENT));
    assert_eq!((at.reclaim(), at.backing.health()), (Ok(0), Health::Spent));
    // More, but not for a segment; and then for one.
    at.backing.set_daily_bytes(Some(5 * SEGMENT - 1));
    assert_eq!((at.backing.health(), at.reclaim()), (Health::Spent, Ok(0)));
    at.backing.set_daily_bytes(Some(5 * SEGMENT));
    assert_eq!(at.backing.health(), Health::Good, "at once");
    assert_eq!((at.reclaim(), at.reclaim(), at.backing.health()), (Ok(15), Ok(0), Health::Spent));
    at.backing.set_daily_bytes(None);
    assert_eq!((at.backing.health(), at.reclaim()), (Health::Good, Ok(15)));
    // Nothing at all, for as long as one likes; nor with less than a segment.
    for little in [0, SEGMENT - 1] {
        at.backing.set_daily_bytes(Some(little));
        pass(10 * DAY_NS);
        assert_eq!((at.reclaim(), at.backing.health(), at.daily().wait_ns), (Ok(0), Health::Spent, None));
    }
    at.backing.set_daily_bytes(Some(SEGMENT));
    assert_eq!((at.reclaim(), log.lock().unwrap().len()), (Ok(15), 7));
    for index in 0..300 {
        assert!(at.holds(index, &noise(index, 1)), "page {index}");
    }
}

#[test]
fn what_cleaning_moves_counts_and_waits_and_so_do_writes_that_fail() {
    let memory = Memory::new(1, Faults::NONE);
    let (mut at, log) = timed(memory.medium(), 32, None);
    let mut rng = fastrand::Rng::with_seed(7);
    let mut generations = [0u64; 600];
    let mut change = |at: &mut Place, generation: u64| {
        for _ in 0..300 {
            let index = rng.usize(0..generations.len());
            generations[index] = generation;
            at.write(index as u64, &heap(index as u64, generation));
        }
    };
    // Until it is cleaned all the time.
    for generation in 1..40 {
        change(&mut at, generation);
        at.reclaim_all();
    }
    let before = at.backing.stats();
    let full = before.live_bytes + before.dead_bytes + 3 * SEGMENT >= before.capacity_bytes;
    assert!(before.records_moved > 100 && full, "{before:?}");
    pass(2 * DAY_NS);
    at.backing.set_daily_bytes(Some(4 * SEGMENT));
    let written = |log: &Log| log.lock().unwrap().len();
    let (begun, mut generation) = (written(&log), 40);
    while at.backing.health() != Health::Spent {
        change(&mut at, generation);
        while at.reclaim().unwrap() > 0 {}
        generation += 1;
        assert!(generation < 100, "it is never spent");
    }
    let stats = at.backing.stats();
    assert!(stats.records_moved > before.records_moved, "it was not cleaned: {stats:?}");
    assert_eq!((written(&log) - begun, at.daily().written_bytes), (4, 4 * SEGMENT));
    // Nothing is read to be cleaned that cannot be written.
    let reads = memory.did().reads;
    (0..5).for_each(|_| assert_eq!(at.reclaim(), Ok(0)));
    assert_eq!((memory.did().reads, written(&log) - begun), (reads, 4));

    // Of a write that failed nobody knows how much has arrived.
    pass(2 * DAY_NS);
    memory.set_faults(Faults { failed_writes: 1, ..Faults::NONE });
    (0..4).for_each(|_| assert_eq!(at.reclaim(), Err(MediumError::System { errno: 5 })));
    memory.set_faults(Faults::NONE);
    let failing = Health::Failing(MediumError::System { errno: 5 });
    assert_eq!(
        (at.reclaim(), at.backing.health(), written(&log) - begun),
        (Ok(0), failing, 8),
        "it is not said to be well"
    );
    pass(2 * DAY_NS);
    assert!(at.reclaim().unwrap() > 0);
    assert_eq!(at.backing.health(), Health::Good);
    for (index, generation) in generations.iter().enumerate().filter(|(_, generation)| **generation > 0) {
        assert!(at.holds(index as u64, &heap(index as u64, *generation)), "page {index}");
    }
}

#[test]
fn room_is_given_back_while_the_day_is_spent_and_what_does_not_compress_leaves_first_after_it() {
    let memory = Memory::new(1, Faults::NONE);
    let (mut at, _) = timed(memory.medium(), 100, Some(12 * SEGMENT));
    (0..180).for_each(|index| at.write(index, &noise(index, 1)));
    at.reclaim_all();
    (200..800).for_each(|index| at.write(index, &heap(index, 1)));
    (0..7).for_each(|_| assert_eq!((at.reclaim(), at.backing.health()), (Ok(0), Health::Spent)));
    assert!((0..180).all(|index| at.pool.discard(PageIndex(index))));
    at.backing.tidy(|| true);
    assert_eq!(memory.did().punches, 10, "twelve are free, and two that have their room beforehand; four are kept");
    (900..910).for_each(|index| at.write(index, &noise(index, 1)));
    pass(2 * DAY_NS);
    assert!(at.reclaim().unwrap() >= 10);
    assert!((900..910).all(|index| at.is_out(index)), "older ones went before those that do not compress");
}

#[test]
fn two_flights_never_share_the_last_of_a_day() {
    // One hangs in the medium with the last of it.
    let memory = Memory::new(1, Faults::NONE);
    let gate = Arc::new(Gate {
        memory: memory.medium(),
        closed: Mutex::new(true),
        moved: Condvar::new(),
        waiting: AtomicBool::new(false),
    });
    let mut at = place(Box::new(Gated(gate.clone())), config(100));
    at.backing.set_daily_bytes(Some(SEGMENT));
    (0..100).for_each(|index| at.write(index, &noise(index, 1)));
    at.store.set_limit_bytes(at.store.mem_used_total_bytes());
    let Place { store, backing, worker, .. } = &mut at;
    std::thread::scope(|scope| {
        let hangs = scope.spawn(|| store.reclaim(&mut Worker::new(store, || 0).unwrap(), backing).unwrap().pages);
        while !gate.waiting.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let second = scope.spawn(|| store.reclaim(worker, backing).unwrap());
        let until = Instant::now() + Duration::from_secs(20);
        while !second.is_finished() && Instant::now() < until {
            std::thread::yield_now();
        }
        let health = backing.health();
        *gate.closed.lock().unwrap() = false;
        gate.moved.notify_all();
        let second = second.join().unwrap();
        assert_eq!((second.pages, second.is_busy, health), (0, false, Health::Spent));
        assert_eq!(hangs.join().unwrap(), 15);
    });
    assert_eq!((memory.did().writes, at.backing.health()), (1, Health::Spent), "it is not good again by arriving");
    at.store.set_limit_bytes(u64::MAX);

    // Four that race for it.
    for round in 1..=100 {
        at.backing.set_daily_bytes(Some((1 + round * 3) * SEGMENT));
        (0..100).for_each(|index| at.write(index, &noise(index, round + 1)));
        at.store.set_limit_bytes(at.store.mem_used_total_bytes() / 2);
        let Place { store, backing, .. } = &at;
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut worker = Worker::new(store, || 0).unwrap();
                    (0..20).for_each(|_| _ = store.reclaim(&mut worker, backing).unwrap());
                });
            }
        });
        at.store.set_limit_bytes(u64::MAX);
        assert_eq!(memory.did().writes, 1 + round * 3, "round {round}");
    }
    assert!((0..100).all(|index| at.holds(index, &noise(index, 101))));
}
