//! What fails for a while, or in one place, and what is in vain: the rest goes on.

use super::*;

/// Pages that do not compress, of which a segment holds so many.
const FULL: u64 = 15;

/// Has `count` segments written, full of such pages.
fn fill(at: &mut Place, count: u64) {
    (0..count * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    at.reclaim_all();
    assert_eq!(at.backing.stats().segments_written, count);
}

/// Discards all but `kept` pages of each of so many segments.
fn thin(at: &Place, count: u64, kept: u64) {
    for first in (0..count).map(|nth| nth * FULL) {
        at.pool.discard_range(PageIndex(first + kept), FULL - kept);
    }
}

#[test]
fn what_could_not_be_read_for_a_while_is_cleaned_afterwards() {
    let memory = Memory::new(1, Faults::NONE);
    let mut at = place(memory.medium(), config(8));
    fill(&mut at, 6);
    thin(&at, 6, 3);
    (1000..1000 + 3 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    memory.set_faults(Faults { failed_reads: 1, ..Faults::NONE });
    let left: usize = (0..20).map(|_| at.reclaim().unwrap()).sum();
    assert_eq!((left as u64, at.backing.health()), (FULL, Health::Full), "one free segment, and one for cleaning");
    memory.set_faults(Faults::NONE);
    at.reclaim_all();
    let stats = at.backing.stats();
    assert_eq!((at.pool.stats().bd_count, at.backing.health()), (6 * 3 + 3 * FULL, Health::Good), "{stats:?}");
    for index in (0..6 * FULL).filter(|index| index % FULL < 3).chain(1000..1000 + 3 * FULL) {
        assert!(at.fetch(index).unwrap() == noise(index, 1), "page {index}");
    }
    assert_eq!(stats.live_bytes, at.pool.stats().bd_bytes);
}

#[test]
fn a_segment_that_cannot_be_read_does_not_keep_others_from_being_cleaned() {
    let bad = Arc::new(Mutex::new(None));
    let mut at =
        place(Box::new(BadPlace { memory: Memory::new(1, Faults::NONE).medium(), bad: bad.clone() }), config(8));
    fill(&mut at, 6);
    thin(&at, 6, 3);
    // It has the most to gain.
    at.pool.discard_range(PageIndex(0), 2);
    *bad.lock().unwrap() = Some(0);
    (1000..1000 + 3 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    at.reclaim_all();
    assert_eq!(at.pool.stats().bd_count, 1 + 5 * 3 + 3 * FULL, "{:?}", at.backing.stats());
    assert!(at.fetch(2).is_err());
    *bad.lock().unwrap() = None;
    assert!(at.fetch(2).unwrap() == noise(2, 1));
}

/// A medium with a segment that can be neither read nor written.
pub struct BadPlace {
    pub memory: Box<dyn Medium>,
    pub bad: Arc<Mutex<Option<u64>>>,
}

impl BadPlace {
    fn check(&self, offset_bytes: u64) -> Result<(), MediumError> {
        match *self.bad.lock().unwrap() {
            Some(bad) if offset_bytes / (64 * KIB) == bad => Err(MediumError::System { errno: 5 }),
            _ => Ok(()),
        }
    }
}

impl Medium for BadPlace {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        self.check(offset_bytes)?;
        self.memory.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        self.check(offset_bytes)?;
        self.memory.write_at(offset_bytes, from)
    }

    fn punch(&self, offset_bytes: u64, length_bytes: u64) {
        self.memory.punch(offset_bytes, length_bytes);
    }
}

#[test]
fn one_bad_place_costs_one_write_and_no_more() {
    let bad = Arc::new(Mutex::new(Some(2)));
    let mut at = place(Box::new(BadPlace { memory: Memory::new(1, Faults::NONE).medium(), bad }), config(16));
    (0..8 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    let failed = (0..20).filter(|_| at.reclaim().is_err()).count();
    assert_eq!((failed, at.pool.stats().bd_count, at.backing.health()), (1, 8 * FULL, Health::Good));
    // Round and round, with what is alive moved from place to place.
    for generation in 2..40 {
        (0..8 * FULL).filter(|index| index % 3 > 0).for_each(|index| at.write(index, &noise(index, generation)));
        while !matches!(at.reclaim(), Ok(0)) {}
    }
    let stats = at.backing.stats();
    assert!(stats.segments_written > 100 && stats.failed_writes == 1, "{stats:?}");
    assert_eq!(stats.live_bytes, at.pool.stats().bd_bytes);
}

#[test]
fn a_segment_of_which_a_page_was_moved_is_cleaned_when_that_has_died() {
    let mut at = place(Memory::new(1, Faults::NONE).medium(), config(8));
    fill(&mut at, 7);
    // Only the first is mostly dead, and it has a page that its list does not tell of.
    at.pool.discard_range(PageIndex(3), FULL - 3);
    assert!(at.pool.move_slot(PageIndex(0), PageIndex(5000)).unwrap());
    (1000..1000 + FULL).for_each(|index| at.write(index, &noise(index, 1)));
    for _ in 0..3 {
        assert_eq!((at.reclaim().unwrap(), at.backing.health()), (0, Health::Full));
    }
    at.pool.discard(PageIndex(5000));
    assert_eq!(at.reclaim().unwrap() as u64, FULL - 2, "{:?}", at.backing.stats());
    assert!(at.is_out(1) && at.fetch(1).unwrap() == noise(1, 1));
    assert_eq!((at.backing.stats().records_moved, at.backing.health()), (2, Health::Good));
}

#[test]
fn a_segment_taken_to_empty_one_is_not_written_while_nothing_leaves_memory() {
    let memory = Memory::new(1, Faults::NONE);
    let mut at = place(memory.medium(), config(32));
    fill(&mut at, 30);
    // Two of them do not fit into one.
    thin(&at, 30, 9);
    let before = memory.did();
    (0..20).for_each(|_| assert_eq!(at.reclaim().unwrap(), 0));
    let after = memory.did();
    assert_eq!(after.writes, before.writes, "segments were moved from place to place");
    assert!(after.reads <= before.reads + 1, "{} segments were read for nothing", after.reads - before.reads);
    // With a page that leaves it is worth it.
    at.write(1000, &noise(1000, 1));
    assert_eq!((at.reclaim().unwrap(), memory.did().writes), (1, before.writes + 1));
    assert!(at.backing.stats().records_moved >= 9);
    // And so it is where many can be emptied for one.
    thin(&at, 30, 2);
    let free_bytes = at.backing.stats().free_bytes;
    at.write(1001, &noise(1001, 1));
    assert_eq!(at.reclaim().unwrap(), 1);
    (0..20).for_each(|_| assert_eq!(at.reclaim().unwrap(), 0));
    assert!(at.backing.stats().free_bytes > free_bytes, "{:?}", at.backing.stats());
    assert!(memory.did().writes <= before.writes + 3);
    assert_eq!(at.backing.stats().live_bytes, at.pool.stats().bd_bytes);
}

/// A medium that takes room where it is written, or is to be, of which there is so much.
pub struct Holes {
    pub memory: Box<dyn Medium>,
    pub filled: Arc<Mutex<BTreeSet<u64>>>,
    pub segments: Arc<AtomicU64>,
}

impl Medium for Holes {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        self.memory.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        self.fill(offset_bytes, from.len() as u64)?;
        self.memory.write_at(offset_bytes, from)
    }

    fn fill(&self, offset_bytes: u64, _: u64) -> Result<(), MediumError> {
        let mut filled = self.filled.lock().unwrap();
        let is_there = filled.contains(&offset_bytes);
        if !is_there && filled.len() as u64 >= self.segments.load(Ordering::Relaxed) {
            return Err(MediumError::NoSpace);
        }
        filled.insert(offset_bytes);
        Ok(())
    }

    fn punch(&self, offset_bytes: u64, _: u64) {
        self.filled.lock().unwrap().remove(&offset_bytes);
    }
}

/// Writes half of the pages anew again and again, and has all of them leave each time.
fn rewrite(at: &mut Place, pages: u64, generations: std::ops::Range<u64>, mut before: impl FnMut(&Place)) {
    let mut last = vec![0; pages as usize];
    let mut rng = fastrand::Rng::with_seed(generations.start);
    for generation in generations {
        for index in (0..pages).filter(|_| generation == 0 || rng.bool()) {
            last[index as usize] = generation;
            at.write(index, &noise(index, generation));
        }
        while at.pool.stats().bd_count < pages {
            before(at);
            assert!(at.reclaim().unwrap() > 0, "generation {generation}: {:?}", at.backing.stats());
        }
        at.backing.tidy(|| true);
    }
    for (index, generation) in last.into_iter().enumerate() {
        assert!(at.fetch(index as u64).unwrap() == noise(index as u64, generation), "page {index}");
    }
    assert_eq!(at.backing.stats().live_bytes, at.pool.stats().bd_bytes);
}

#[test]
fn where_the_file_system_has_less_room_than_the_backing_may_take_it_is_cleaned_as_soon_as_that_is_full() {
    let segments = Arc::new(AtomicU64::new(14));
    let memory = Memory::new(1, Faults::NONE).medium();
    let mut at = place(Box::new(Holes { memory, filled: Arc::default(), segments: segments.clone() }), config(64));
    rewrite(&mut at, 6 * FULL, 0..60, |_| {});
    let stats = at.backing.stats();
    assert!(stats.records_moved > 50 && (1..20).contains(&stats.failed_writes), "{stats:?}");
    // With more room more of it is taken again.
    segments.store(64, Ordering::Relaxed);
    (1000..1000 + 20 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    at.reclaim_all();
    assert_eq!((at.pool.stats().bd_count, at.backing.health()), (26 * FULL, Health::Good));
}

#[test]
fn what_has_no_room_is_not_counted_for_the_day_again_and_again() {
    let segments = Arc::new(AtomicU64::new(14));
    let memory = Memory::new(1, Faults::NONE).medium();
    let mut at = place(Box::new(Holes { memory, filled: Arc::default(), segments }), config(64));
    (0..20 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    while matches!(at.reclaim(), Ok(1..)) {}
    let (written, failed) = (at.backing.daily_writes(0).written_bytes, at.backing.stats().failed_writes);
    for _ in 0..20 {
        let _ = at.reclaim();
    }
    assert!(at.backing.stats().failed_writes > failed + 10 && at.backing.health() == Health::Full);
    assert_eq!(at.backing.daily_writes(0).written_bytes, written);
}

#[test]
fn where_there_was_no_room_an_eighth_of_what_there_is_is_kept() {
    let (segments, filled) = (Arc::new(AtomicU64::new(48)), Arc::<Mutex<BTreeSet<u64>>>::default());
    let memory = Memory::new(1, Faults::NONE).medium();
    let mut at = place(Box::new(Holes { memory, filled: filled.clone(), segments }), config(64));
    (0..60 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    while matches!(at.reclaim(), Ok(1..)) {}
    assert_eq!((at.backing.health(), filled.lock().unwrap().len()), (Health::Full, 48));
    (0..60 * FULL).for_each(|index| _ = at.pool.discard(PageIndex(index)));
    at.write(1000, &noise(1000, 1));
    at.reclaim_all();
    at.backing.tidy(|| true);
    assert_eq!(filled.lock().unwrap().len(), 1 + 48 / 8);
}

#[test]
fn where_there_is_room_again_it_is_not_cleaned_as_if_there_were_none() {
    let segments = Arc::new(AtomicU64::new(14));
    let memory = Memory::new(1, Faults::NONE).medium();
    let mut at = place(Box::new(Holes { memory, filled: Arc::default(), segments: segments.clone() }), config(64));
    rewrite(&mut at, 6 * FULL, 0..40, |_| {});
    segments.store(64, Ordering::Relaxed);
    at.backing.tidy(|| true);
    let before = at.backing.stats();
    for generation in 40..44 {
        (0..6 * FULL).filter(|index| index % 2 == 0).for_each(|index| at.write(index, &noise(index, generation)));
        at.reclaim_all();
    }
    assert_eq!(at.backing.stats().records_moved, before.records_moved, "{before:?} {:?}", at.backing.stats());
}

#[test]
fn where_no_segment_is_wholly_dead_there_is_one_with_room_to_clean_with() {
    let memory = Memory::new(1, Faults::NONE).medium();
    let segments = Arc::new(AtomicU64::new(14));
    let mut at = place(Box::new(Holes { memory, filled: Arc::default(), segments }), config(64));
    // Two are spared.
    fill(&mut at, 12);
    thin(&at, 12, 3);
    (1000..1000 + 5 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    while at.pool.stats().bd_count < 12 * 3 + 5 * FULL {
        assert!(at.reclaim().unwrap() > 0, "{:?}", at.backing.stats());
    }
    assert_eq!(at.backing.stats().live_bytes, at.pool.stats().bd_bytes);
}

#[test]
fn what_shares_its_room_with_others_is_cleaned_when_that_is_used() {
    let mut at = place(Memory::new(1, Faults::NONE).medium(), config(64));
    let used = |at: &Place| (at.backing.stats().capacity_bytes - at.backing.stats().free_bytes) / (64 * KIB);
    rewrite(&mut at, 6 * FULL, 0..60, |at| at.backing.set_room_bytes((14 - used(at)) * 64 * KIB));
    assert!(at.backing.stats().records_moved > 50 && used(&at) <= 14, "{:?}", at.backing.stats());
    // No more leaves than may, but for what cleaning needs.
    (1000..1000 + 20 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    while at.reclaim().unwrap() > 0 {
        at.backing.set_room_bytes((14 - used(&at)) * 64 * KIB);
    }
    assert_eq!(at.backing.health(), Health::Full);
    assert!((12..=14).contains(&used(&at)), "{:?}", at.backing.stats());
    at.backing.set_room_bytes(u64::MAX);
    at.reclaim_all();
    assert_eq!((at.pool.stats().bd_count, at.backing.health()), (26 * FULL, Health::Good));
}

#[test]
fn where_others_have_all_the_room_it_is_cleaned_nevertheless() {
    let mut at = place(Memory::new(1, Faults::NONE).medium(), config(64));
    let used = |at: &Place| (at.backing.stats().capacity_bytes - at.backing.stats().free_bytes) / (64 * KIB);
    fill(&mut at, 12);
    thin(&at, 12, 3);
    (1000..1000 + 5 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    for _ in 0..10 {
        at.backing.set_room_bytes((12 - used(&at)) * 64 * KIB);
        at.reclaim().unwrap();
        assert!(used(&at) <= 12, "it takes no more than it gives back: {:?}", at.backing.stats());
    }
    assert_eq!(at.pool.stats().bd_count, 12 * 3 + 5 * FULL, "{:?}", at.backing.stats());
    assert_eq!(at.backing.stats().live_bytes, at.pool.stats().bd_bytes);
}

type Hook = Box<dyn FnOnce() + Send>;

/// A medium that has something happen in the next write, before it is done.
struct HookedWrite(Box<dyn Medium>, Arc<Mutex<Option<Hook>>>);

impl Medium for HookedWrite {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        self.0.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        let hook = self.1.lock().unwrap().take();
        hook.into_iter().for_each(|hook| hook());
        self.0.write_at(offset_bytes, from)
    }

    fn fill(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.0.fill(offset_bytes, length_bytes)
    }

    fn punch(&self, _: u64, _: u64) {}
}

/// All of its room is in use. Of two segments little is wanted any more, and of that a page is moved to another index in the flight that cleans it, so
/// that it is not gained back.
fn move_while_cleaned(mut at: Place, hook: &Mutex<Option<Hook>>) {
    (0..70 * FULL).for_each(|index| at.write(index, &noise(index, 1)));
    while matches!(at.reclaim(), Ok(1..)) {}
    assert_eq!(at.backing.health(), Health::Full);
    let out: Vec<u64> = (0..70 * FULL).filter(|index| at.is_out(*index)).collect();
    for segment in out.chunks(FULL as usize).take(2) {
        let (pool, kept) = (at.pool.clone(), segment[0]);
        segment[3..].iter().for_each(|index| assert!(at.pool.discard(PageIndex(*index))));
        *hook.lock().unwrap() =
            Some(Box::new(move || assert!(pool.move_slot(PageIndex(kept), PageIndex(5000 + kept)).unwrap())));
        assert!(at.reclaim().unwrap() > 0, "{:?}", at.backing.stats());
        assert!(hook.lock().unwrap().is_none() && at.fetch(5000 + kept).unwrap() == noise(kept, 1));
    }
    assert_eq!(at.backing.stats().live_bytes, at.pool.stats().bd_bytes);
}

#[test]
fn a_page_that_is_moved_while_its_segment_is_cleaned_does_not_cost_the_last_one_that_is_free() {
    let hook = Arc::default();
    let medium = HookedWrite(Memory::new(1, Faults::NONE).medium(), Arc::clone(&hook));
    move_while_cleaned(place(Box::new(medium), config(64)), &hook);
}

#[test]
fn nor_does_it_cost_the_last_one_that_has_its_room_where_there_is_no_other() {
    let (hook, segments) = (Arc::default(), Arc::new(AtomicU64::new(20)));
    let holes = Holes { memory: Memory::new(1, Faults::NONE).medium(), filled: Arc::default(), segments };
    let medium = HookedWrite(Box::new(holes), Arc::clone(&hook));
    move_while_cleaned(place(Box::new(medium), config(64)), &hook);
}
