//! Flights that clean keep no pages from leaving, a medium that hangs while it is cleaned nobody from going elsewhere, and writes that fail no room.

use super::*;
use crate::flights::{Hook, Hooked};

/// What a segment has for records and their lines in its list, and what these take beside what is alive of a page.
const ROOM: u64 = 64 * KIB - 32;
const LINE: u64 = 16;
/// The record of a page that does not compress, and its line.
const RAW: u64 = 4096 + 16 + LINE;

/// Where the pages of a segment begin.
fn first_of(segment: u64) -> u64 {
    segment * 1000
}

/// Has so many segments written, each full of pages as this one; how many a segment has, and how long their records are.
fn fill_with(at: &mut Place, segments: u64, page: fn(u64, u64) -> Page) -> (u64, u64) {
    let mut pages = 0;
    for segment in 0..segments {
        (first_of(segment)..first_of(segment + 1)).for_each(|index| at.write(index, &page(index, 1)));
        pages = at.reclaim().unwrap() as u64;
        keep(at, segment, pages);
    }
    assert_eq!((at.pool.stats().bd_count, at.backing.stats().segments_written), (segments * pages, segments));
    (pages, at.pool.stats().bd_bytes / at.pool.stats().bd_count)
}

/// Discards all but the first of a segment.
fn keep(at: &Place, segment: u64, pages: u64) {
    at.pool.discard_range(PageIndex(first_of(segment) + pages), 1000 - pages);
}

/// So many bytes that do not compress, and zeroes.
fn short<const BYTES: usize>(index: u64, generation: u64) -> Page {
    let mut page = noise(index, generation);
    page[BYTES..].fill(0);
    page
}

#[test]
fn what_does_not_fit_beside_what_is_cleaned_leaves_without_it() {
    let mut at = place(Memory::new(1, Faults::NONE).medium(), config(8));
    let (_, record) = fill_with(&mut at, 6, short::<150>);
    let kept = (ROOM - RAW) / (record + LINE) + 1;
    assert!(kept * record * 9 / 8 <= ROOM, "such a segment is not cleaned: {kept} records of {record} bytes");
    (0..6).for_each(|segment| keep(&at, segment, kept));
    at.write(100_000, &noise(1, 1));
    assert_eq!((at.reclaim().unwrap(), at.is_out(100_000)), (1, true), "{:?}", at.backing.stats());
    assert!(at.fetch(100_000).unwrap() == noise(1, 1));
}

#[test]
fn a_flight_that_has_only_cleaned_is_not_the_last() {
    let mut at = place(Memory::new(1, Faults::NONE).medium(), config(8));
    let (pages, record) = fill_with(&mut at, 7, short::<1000>);
    // One is old and fuller than the other, and both together leave no room for what does not compress.
    let few = 16;
    let kept = pages - 3 - few;
    keep(&at, 0, kept);
    keep(&at, 6, few);
    let left = ROOM - kept * (record + LINE);
    assert!(few * record * 9 / 8 <= left && left - few * (record + LINE) < RAW, "{pages} records of {record} bytes");
    at.write(100_000, &noise(1, 1));
    let done = at.store.write_back(&mut at.worker, &at.pool, Leaving::Oldest).unwrap();
    assert_eq!((done.pages, done.finished, at.backing.stats().records_moved), (0, false, kept + few), "{done:?}");
    let done = at.store.write_back(&mut at.worker, &at.pool, Leaving::Oldest).unwrap();
    assert_eq!((done.pages, at.is_out(100_000)), (1, true), "{done:?}");
}

#[test]
fn a_medium_that_hangs_while_it_is_cleaned_is_known_to() {
    static NOW: AtomicU64 = AtomicU64::new(1);
    let now = || NOW.load(Ordering::SeqCst);
    let hook = Arc::new(Mutex::new(None::<Hook>));
    let mut at = place(Box::new(Hooked(Memory::new(1, Faults::NONE).medium(), hook.clone())), config(8));
    fill_with(&mut at, 6, noise);
    (0..6).for_each(|segment| keep(&at, segment, 3));
    let store = at.store.clone();
    let other = Backing::new(Memory::new(2, Faults::NONE).medium(), config(100)).unwrap();
    let pool = store.create_pool_on(PoolConfig::default(), &other).unwrap();
    at.write(100_000, &noise(1, 1));
    (0..100).for_each(|index| _ = pool.write(&mut at.worker, PageIndex(index), &noise(index, 2)).unwrap());
    let (looked, looking) = std::sync::mpsc::channel();
    *hook.lock().unwrap() = Some(Box::new(move || {
        NOW.store(10_000_000_000, Ordering::SeqCst);
        let mut worker = Worker::new(&store, now).unwrap();
        looked.send(reclaim_any(&mut worker, &store)).unwrap();
    }));
    at.worker = Worker::new(&at.store, now).unwrap();
    at.reclaim().unwrap();
    let done = looking.recv().unwrap();
    assert!(done.is_held_up && pool.stats().bd_count > 0, "{done:?}");
}

/// A medium that takes a part of the room for what there is no room for.
struct Parts {
    holes: failures::Holes,
    taken: Arc<Mutex<BTreeSet<u64>>>,
}

impl Parts {
    fn noted(&self, offset_bytes: u64, done: Result<(), MediumError>) -> Result<(), MediumError> {
        if done == Err(MediumError::NoSpace) {
            self.taken.lock().unwrap().insert(offset_bytes);
        }
        done
    }
}

impl Medium for Parts {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        self.holes.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        self.noted(offset_bytes, self.holes.write_at(offset_bytes, from))
    }

    fn fill(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.noted(offset_bytes, self.holes.fill(offset_bytes, length_bytes))
    }

    fn punch(&self, offset_bytes: u64, length_bytes: u64) {
        self.taken.lock().unwrap().remove(&offset_bytes);
        self.holes.punch(offset_bytes, length_bytes);
    }
}

#[test]
fn what_was_written_in_part_for_want_of_room_gives_that_back() {
    let (filled, taken) = <(Arc<_>, Arc<Mutex<BTreeSet<u64>>>)>::default();
    let memory = Memory::new(1, Faults::NONE).medium();
    let holes = failures::Holes { memory, filled, segments: Arc::new(AtomicU64::new(14)) };
    let mut at = place(Box::new(Parts { holes, taken: taken.clone() }), config(64));
    (0..300).for_each(|index| at.write(index, &noise(index, 1)));
    for _ in 0..40 {
        let _ = at.reclaim();
        at.backing.tidy(|| true);
        assert!(taken.lock().unwrap().is_empty());
    }
    assert!(at.backing.stats().failed_writes > 1 && at.backing.health() == Health::Full, "{:?}", at.backing.stats());
}
