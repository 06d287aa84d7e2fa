//! Neighbours come back with one access together, and each as if it had been read alone.

use super::*;

/// Reads a run, from memory and from the backing.
fn run(at: &mut Place, batch: &mut Batch, first: u64, pages: &mut [Page]) -> Result<(), (usize, StoreError)> {
    let mut found = vec![Read::Absent; pages.len()];
    let first = PageIndex(first);
    at.pool.read_run(&mut at.worker, first, pages, &mut found).unwrap();
    let fetched = at.pool.fetch_run(&mut at.worker, (&mut at.fetcher, batch), first, pages, &mut found);
    assert!(fetched.is_err() || found.iter().all(|found| !matches!(found, Read::OnBacking(_))));
    fetched.map_err(|failed| (failed.done, failed.error))
}

#[test]
fn a_run_takes_few_accesses_whatever_is_between_its_pages() {
    let memory = Memory::new(1, Faults::NONE);
    let mut at = place(memory.medium(), config(400));
    let content = |index: u64| if index.is_multiple_of(7) { noise(index, 1) } else { heap(index, 1) };
    (0..1000).for_each(|index| at.write(index, &content(index)));
    at.reclaim_all();
    // One that is in memory, one that is nowhere, and one that lies far from its neighbours.
    at.write(130, &heap(130, 2));
    at.pool.discard(PageIndex(131));
    at.write(150, &noise(150, 2));
    at.reclaim_all();
    at.write(130, &heap(130, 3));
    let expected = |index: u64| match index {
        130 => heap(130, 3),
        131 => [7; 4096],
        150 => noise(150, 2),
        _ => content(index),
    };
    let (mut batch, before, reads) = (Batch::new().unwrap(), memory.did(), at.pool.stats().bd_reads);
    // As where there is no memory to spare.
    at.store.set_limit_bytes(1);
    for (first, count) in [(0, 64), (64, 1), (65, 63), (128, 64), (192, 300)] {
        let mut pages = vec![[7; 4096]; count];
        run(&mut at, &mut batch, first, &mut pages).unwrap();
        for (index, page) in (first..).zip(&pages) {
            assert!(*page == expected(index), "page {index} of {count} from {first}");
        }
    }
    let read = memory.did();
    assert_eq!(at.pool.stats().bd_reads - reads, 490, "each page is counted");
    // Of 64 KiB at most, of which three in five are pages'.
    assert!(read.longest_read <= 64 << 10 && read.reads - before.reads <= 40, "{} accesses", read.reads - before.reads);
    at.store.set_limit_bytes(u64::MAX);
    run(&mut at, &mut batch, 0, &mut vec![[0; 4096]; 64]).unwrap();
    assert!((0..64).all(|index| !at.is_out(index)), "where there is room they come back into memory");
}

/// A medium that fails whoever asks it for more than one page takes.
struct Short(Box<dyn Medium>);

impl Medium for Short {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        match into.len() {
            0..=12288 => self.0.read_at(offset_bytes, into),
            _ => Err(MediumError::System { errno: 5 }),
        }
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        self.0.write_at(offset_bytes, from)
    }

    fn punch(&self, offset_bytes: u64, length_bytes: u64) {
        self.0.punch(offset_bytes, length_bytes);
    }
}

#[test]
fn of_a_run_that_cannot_be_read_as_a_whole_each_page_is_read_alone() {
    let mut at = place(Box::new(Short(Memory::new(1, Faults::NONE).medium())), config(100));
    (0..300).for_each(|index| at.write(index, &heap(index, 1)));
    at.reclaim_all();
    let (mut batch, mut pages) = (Batch::new().unwrap(), vec![[0; 4096]; 300]);
    run(&mut at, &mut batch, 0, &mut pages).unwrap();
    assert!((0..300).all(|index| pages[index] == heap(index as u64, 1)));
}

#[test]
fn a_page_of_a_run_that_cannot_be_read_is_told_and_those_before_it_are_there() {
    let bad = Arc::new(Mutex::new(None));
    let medium = failures::BadPlace { memory: Memory::new(1, Faults::NONE).medium(), bad: bad.clone() };
    let mut at = place(Box::new(medium), config(100));
    (0..300).for_each(|index| at.write(index, &heap(index, 1)));
    at.reclaim_all();
    at.store.set_limit_bytes(1);
    let (mut batch, mut pages) = (Batch::new().unwrap(), vec![[0; 4096]; 300]);
    // Far from page 0.
    let Ok(Read::OnBacking(extent)) = at.pool.read(&mut at.worker, PageIndex(200), &mut pages[0]) else { panic!() };
    *bad.lock().unwrap() = Some(extent.offset_bytes / (64 * KIB));
    let (done, error) = run(&mut at, &mut batch, 0, &mut pages).unwrap_err();
    let StoreError::BackingFailed { index, error: MediumError::System { errno: 5 } } = error else {
        panic!("{error:?}")
    };
    assert!(0 < done && done as u64 <= index.0 && index.0 < 300, "{done}, {index:?}");
    assert!((0..done).all(|index| pages[index] == heap(index as u64, 1)));
    *bad.lock().unwrap() = None;
    run(&mut at, &mut batch, 0, &mut pages).unwrap();
    assert!((0..300).all(|index| pages[index] == heap(index as u64, 1)));
}
