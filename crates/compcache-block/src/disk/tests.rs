use std::sync::atomic::AtomicBool;
use std::sync::{Barrier, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use compcache_store::{Backing, BackingConfig, FileMedium, Medium, MediumError, PoolConfig, Store, StoreConfig};

use super::*;
use crate::device::{Extent, Manner, Outcome, Zeroes};

const WAITING: Manner = Manner::WAITING;
const DONE: Result<Outcome, DeviceError> = Ok(Outcome::Done(()));

fn disk(size_bytes: u64, limit_bytes: u64) -> Arc<Disk> {
    let store = Store::new(StoreConfig { limit_bytes, reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
    Arc::new(Disk::new(store.create_pool(PoolConfig::default()).unwrap(), size_bytes).unwrap())
}

/// A disk of 64 MiB in a store of so much memory, with a backing of so much room.
fn disk_on_backing(limit_bytes: u64, capacity_bytes: u64) -> Arc<Disk> {
    let store = Store::new(StoreConfig { limit_bytes, reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
    let medium = Box::new(FileMedium::new(tempfile::tempfile().unwrap().into()));
    let backing = Backing::new(medium, BackingConfig { capacity_bytes, segment_bytes: 256 << 10 }).unwrap();
    Arc::new(Disk::new(store.create_pool_on(PoolConfig::default(), &backing).unwrap(), 64 << 20).unwrap())
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| rng.u8(..)).take(length).collect()
}

#[test]
fn a_full_disk_says_so_and_takes_blocks_again_after_a_discard() {
    let disk = disk(64 << 20, 4 << 20);
    let mut lane = disk.clone().lane().unwrap();
    let data = noise(1 << 20, 1);
    let refused = (0..).step_by(1 << 20).map(|at| lane.write(at, &data, WAITING)).find(Result::is_err).unwrap();
    assert_eq!(refused.unwrap_err().errno(), 28, "{refused:?}");
    let failed = disk.stats().failed_writes;
    assert!(failed > 0);
    lane.discard(0, 64 << 20, WAITING).unwrap();
    assert_eq!(lane.write(0, &data, WAITING), DONE);
    let mut back = vec![0; data.len()];
    assert_eq!(lane.read(0, &mut back, WAITING), DONE);
    assert_eq!((back == data, disk.stats().failed_writes), (true, failed));
}

#[test]
fn zeroes_far_from_each_other_are_taken_at_the_limit_and_take_nothing() {
    let disk = disk(1 << 36, u64::MAX);
    disk.pool().set_limit_bytes(1 << 20);
    let mut lane = disk.clone().lane().unwrap();
    let places = || (0..1 << 36).step_by(4 << 20);
    let refused = places().find_map(|at| lane.write(at, &[7; 4096], WAITING).err());
    assert_eq!(refused.map(|refused| refused.errno()), Some(28));
    let mut back = [9; 12288];
    for at in places() {
        assert_eq!(lane.write_zeroes(at, 4096, Zeroes::AreData, WAITING), DONE);
        assert_eq!(lane.write(at + 4096, &[0; 8192], WAITING), DONE);
        assert_eq!((lane.read(at, &mut back, WAITING), back), (DONE, [0; 12288]));
    }
    let stats = disk.stats();
    assert!(stats.mem_used_total <= 1 << 20 && stats.failed_writes == 1, "{stats:?}");
}

#[test]
fn for_the_tables_of_blocks_of_one_word_others_leave_for_the_backing() {
    let disk = disk_on_backing(3 << 20, 64 << 20);
    let mut lane = disk.clone().lane().unwrap();
    let mut next = (0..16 << 20).step_by(4096);
    for at in (16 << 20..64 << 20).step_by(4 << 20) {
        // There is no room left.
        while lane.write(next.next().unwrap(), &noise(4096, at), Manner::AT_ONCE) == DONE {}
        assert_eq!(lane.write(at, &[7; 4096], WAITING), DONE);
    }
    assert!(disk.pool().store().mem_used_total_bytes() <= 3 << 20);
}

#[test]
fn what_was_beyond_a_smaller_end_does_not_come_back_when_the_disk_grows() {
    let disk = disk(1 << 20, u64::MAX);
    let mut lane = disk.clone().lane().unwrap();
    lane.write(0, &noise(1 << 20, 2), WAITING).unwrap();
    disk.resize(512 << 10).unwrap();
    assert_eq!(disk.stats().disk_size, 512 << 10);
    assert_eq!(disk.stats().pages_stored(), 128);
    let beyond = lane.read((512 << 10) - 1, &mut [0; 2], WAITING);
    assert!(matches!(beyond, Err(DeviceError::BeyondEnd { .. })), "{beyond:?}");
    disk.resize(1 << 20).unwrap();
    let mut back = vec![9; 512 << 10];
    lane.read(512 << 10, &mut back, WAITING).unwrap();
    assert!(back.iter().all(|byte| *byte == 0));
}

#[test]
fn a_disk_whose_users_cannot_be_told_of_a_smaller_end_keeps_all_it_has() {
    let disk = disk(1 << 20, u64::MAX);
    let mut lane = disk.clone().lane().unwrap();
    lane.write(0, &noise(1 << 20, 2), WAITING).unwrap();
    let told = disk.resize_if(512 << 10, || {
        assert_eq!((disk.size_bytes(), disk.stats().disk_size), (512 << 10, 512 << 10));
        Err("gone")
    });
    assert_eq!(told.unwrap(), Err("gone"));
    assert_eq!((disk.size_bytes(), disk.stats().disk_size), (1 << 20, 1 << 20));
    let mut back = vec![0; 1 << 20];
    lane.read(0, &mut back, WAITING).unwrap();
    assert!(back == noise(1 << 20, 2), "something is lost");
}

/// Writers that were let in before the end moved must not leave anything beyond it.
#[test]
fn a_disk_that_shrinks_under_its_writers_keeps_nothing_beyond_its_end() {
    let disk = disk(1 << 20, u64::MAX);
    let stop = AtomicBool::new(false);
    let mut left_behind = None;
    thread::scope(|scope| {
        for thread in 0..3 {
            let (disk, stop) = (&disk, &stop);
            scope.spawn(move || {
                let mut lane = disk.clone().lane().unwrap();
                let data = noise(300_000, thread);
                while !stop.load(Relaxed) {
                    let offset = (512 << 10) + thread * 1000;
                    let written = lane.write(offset, &data, WAITING);
                    assert!(matches!(written, Ok(_) | Err(DeviceError::BeyondEnd { .. })), "{written:?}");
                }
            });
        }
        for round in 0..200 {
            disk.resize(256 << 10).unwrap();
            // Time for whoever was not waited for.
            thread::sleep(Duration::from_millis(1));
            if let Some(stored) = disk.pool().next_stored(PageIndex(64), 1 << 20) {
                left_behind = Some((round, stored));
                break;
            }
            disk.resize(1 << 20).unwrap();
        }
        stop.store(true, Relaxed);
    });
    assert_eq!(left_behind, None, "in this round, this page");
}

#[test]
fn a_size_that_is_none_changes_nothing() {
    let disk = disk(1 << 20, u64::MAX);
    for size_bytes in [4095, Disk::SIZE_BYTES_MAX + 4096] {
        assert_eq!(disk.resize(size_bytes).unwrap_err().errno(), 22);
    }
    assert_eq!(disk.size_bytes(), 1 << 20);
    disk.resize(Disk::SIZE_BYTES_MAX).unwrap();
    let mut lane = disk.clone().lane().unwrap();
    assert_eq!(lane.write(Disk::SIZE_BYTES_MAX - 3, b"end", WAITING), DONE);
    let mut back = [0; 3];
    lane.read(Disk::SIZE_BYTES_MAX - 3, &mut back, WAITING).unwrap();
    assert_eq!(&back, b"end");
}

/// Every thread owns some bytes of the same blocks; nobody's may be undone by another's.
#[test]
fn writes_of_parts_and_of_all_of_a_block_do_not_undo_each_other() {
    const PARTS: usize = 3;
    let disk = disk(1 << 20, u64::MAX);
    for round in 0..300u64 {
        let together = Barrier::new(PARTS + 1);
        thread::scope(|scope| {
            for part in 0..PARTS {
                let (disk, together) = (&disk, &together);
                scope.spawn(move || {
                    let mut lane = disk.clone().lane().unwrap();
                    together.wait();
                    lane.write(4096 + part as u64 * 100, &[part as u8 + 1; 100], WAITING).unwrap();
                });
            }
            let mut lane = disk.clone().lane().unwrap();
            together.wait();
            lane.write(4096, &[0xee; 4096], WAITING).unwrap();
        });
        let mut back = [0; 4096];
        disk.clone().lane().unwrap().read(4096, &mut back, WAITING).unwrap();
        for part in 0..PARTS {
            let bytes = &back[part * 100..][..100];
            let whole = bytes.iter().all(|byte| *byte == part as u8 + 1) || bytes.iter().all(|byte| *byte == 0xee);
            assert!(whole, "round {round}, part {part}: {bytes:?}");
        }
        assert!(back[PARTS * 100..].iter().all(|byte| *byte == 0xee), "round {round}: the whole write was undone");
        disk.reset();
    }
}

#[test]
fn holes_and_data_are_told_apart_block_by_block() {
    let disk = disk(1 << 40, u64::MAX);
    let mut lane = disk.clone().lane().unwrap();
    let mut extent = |offset, length| match lane.extent(offset, length, WAITING) {
        Ok(Outcome::Done(Extent { length_bytes, is_hole })) => (length_bytes, is_hole),
        other => panic!("{other:?}"),
    };
    assert_eq!(extent(0, 1 << 40), (1 << 40, true));
    let mut writer = disk.clone().lane().unwrap();
    writer.write(1 << 30, &noise(8192, 3), WAITING).unwrap();
    writer.write_zeroes((1 << 30) + 8192, 4096, Zeroes::AreData, WAITING).unwrap();
    writer.write_zeroes((1 << 30) + 16384, 4096, Zeroes::MayBeHoles, WAITING).unwrap();
    assert_eq!(extent(100, (1 << 40) - 100), ((1 << 30) - 100, true));
    assert_eq!(extent((1 << 30) + 1, 1 << 20), (12288 - 1, false));
    assert_eq!(extent((1 << 30) + 12288, 1 << 20), (1 << 20, true));
    assert_eq!(extent((1 << 40) - 1, 1), (1, true));
    assert_eq!(extent(1 << 40, 0), (0, true));
    writer.discard(1 << 30, 12288, WAITING).unwrap();
    assert_eq!(extent(0, 1 << 40), (1 << 40, true));
}

#[test]
fn requests_are_counted_by_what_became_of_them() {
    let disk = disk(1 << 20, u64::MAX);
    let mut lane = disk.clone().lane().unwrap();
    lane.write(0, &noise(8192, 4), WAITING).unwrap();
    lane.read(0, &mut [0; 12288], WAITING).unwrap();
    lane.discard(100, 8192, WAITING).unwrap();
    let end = 1 << 20;
    for outcome in [
        lane.read(end, &mut [0; 1], WAITING),
        lane.write(u64::MAX, &[0; 2], WAITING),
        lane.discard(end - 1, 2, WAITING),
        lane.write_zeroes(0, end + 1, Zeroes::AreData, WAITING),
    ] {
        assert!(matches!(outcome, Err(DeviceError::BeyondEnd { .. })), "{outcome:?}");
    }
    let stats = disk.stats();
    assert_eq!((stats.num_writes, stats.num_reads, stats.pages_discard, stats.invalid_io), (2, 3, 1, 4));
    assert_eq!((stats.failed_reads, stats.failed_writes), (0, 0));
}

#[test]
fn a_disk_on_a_backing_holds_many_times_its_memory_for_every_lane() {
    const LANES: u64 = 3;
    const EACH: u64 = 16 << 20;
    let disk = disk_on_backing(6 << 20, 60 << 20);
    thread::scope(|scope| {
        for nth in 0..LANES {
            let disk = &disk;
            scope.spawn(move || {
                let mut lane = disk.clone().lane().unwrap();
                let (mut rng, mut known) = (fastrand::Rng::with_seed(nth), vec![0; EACH as usize]);
                for round in 0..400 {
                    let length = rng.usize(1..200_000);
                    let at = rng.usize(0..EACH as usize - length);
                    let offset = nth * EACH + at as u64;
                    if rng.u8(0..3) < 2 {
                        // Of two kinds, for it must not all be raw.
                        let data = if rng.bool() { noise(length, round) } else { vec![rng.u8(..); length] };
                        assert_eq!(lane.write(offset, &data, WAITING), DONE);
                        known[at..at + length].copy_from_slice(&data);
                    } else {
                        let mut back = vec![0; length];
                        assert_eq!(lane.read(offset, &mut back, WAITING), DONE);
                        assert!(back == known[at..at + length], "lane {nth}, round {round}");
                    }
                }
                let mut back = vec![0; EACH as usize];
                assert_eq!(lane.read(nth * EACH, &mut back, WAITING), DONE);
                assert!(back == known, "lane {nth}");
            });
        }
    });
    let (stats, store) = (disk.stats(), disk.pool().store());
    assert!(store.mem_used_max_bytes() <= 6 << 20, "{stats:?}");
    assert!(stats.bd_count > 1000 && stats.bd_reads > 1000 && stats.bd_failed == 0, "{stats:?}");
    assert_eq!(stats.failed_writes, 0, "what was only made again has not failed");
    disk.reset();
    assert_eq!(disk.pool().backing().unwrap().stats().live_bytes, 0);
}

#[test]
fn who_may_not_wait_is_told_so_and_what_is_in_memory_is_served_at_once() {
    let disk = disk_on_backing(4 << 20, 60 << 20);
    let mut lane = disk.clone().lane().unwrap();
    let data = noise(16 << 20, 1);
    let must_wait = (0..16).any(|at| {
        lane.write(at << 20, &data[at as usize * (1 << 20)..][..1 << 20], Manner::AT_ONCE) == Ok(Outcome::MustWait)
    });
    assert!(must_wait, "there was no room for all of it");
    assert_eq!(lane.write(0, &data, WAITING), DONE);
    let mut back = vec![0; 4096];
    for block in 0..4096u64 {
        let is_out = disk.pool().is_on_backing(PageIndex(block));
        let outcome = lane.read(block * 4096, &mut back, Manner::AT_ONCE);
        assert_eq!(outcome, Ok(if is_out { Outcome::MustWait } else { Outcome::Done(()) }));
        assert_eq!(lane.read(block * 4096, &mut back, WAITING), DONE);
        assert!(back == data[block as usize * 4096..][..4096], "block {block}");
    }
    // A part of a block that is out.
    let out = (0..4096).find(|block| disk.pool().is_on_backing(PageIndex(*block))).unwrap() * 4096;
    assert_eq!(lane.write(out + 10, b"part", Manner::AT_ONCE), Ok(Outcome::MustWait));
    assert_eq!(lane.write(out + 10, b"part", WAITING), DONE);
    assert_eq!(lane.read(out, &mut back, WAITING), DONE);
    assert!(back[10..14] == *b"part" && back[14..] == data[out as usize + 14..][..4082]);
}

/// A request.
type Ask = fn(&mut dyn Lane, Manner) -> Result<Outcome, DeviceError>;

/// Who holds a stripe may wait for room, or for a block, as long as that takes.
#[test]
fn who_may_not_wait_does_not_wait_for_who_does() {
    let disk = disk(64 << 20, u64::MAX);
    let requests: [Ask; 7] = [
        |lane, manner| lane.write(0, &[1; 8192], manner),
        |lane, manner| lane.write(10, &[1; 100], manner),
        |lane, manner| lane.discard(0, 8192, manner),
        |lane, manner| lane.discard(0, 1 << 20, manner),
        |lane, manner| lane.write_zeroes(0, 8192, Zeroes::AreData, manner),
        |lane, manner| lane.write_zeroes(0, 1 << 20, Zeroes::MayBeHoles, manner),
        |lane, manner| lane.write_zeroes(10, 100, Zeroes::MayBeHoles, manner),
    ];
    let held = disk.stripes.have(0);
    let (said, heard) = mpsc::channel();
    let of_others = disk.clone();
    let asking = thread::spawn(move || {
        let mut lane = of_others.lane().unwrap();
        requests.iter().for_each(|ask| said.send(ask(&mut *lane, Manner::AT_ONCE)).unwrap());
        assert_eq!(lane.read(0, &mut [0; 8192], Manner::AT_ONCE), DONE);
        assert_eq!(lane.write(64 * 4096, &[1; 100], Manner::AT_ONCE), DONE, "of another stripe");
        requests.iter().for_each(|ask| said.send(ask(&mut *lane, WAITING)).unwrap());
    });
    for nth in 0..requests.len() {
        let answer = heard.recv_timeout(Duration::from_secs(20));
        assert_eq!(answer, Ok(Ok(Outcome::MustWait)), "request {nth}");
    }
    assert!(heard.recv_timeout(Duration::from_millis(50)).is_err(), "who may wait does");
    drop(held);
    asking.join().unwrap();
    assert!(heard.iter().eq([DONE; 7]));
    // Writers of whole blocks are in nobody's way but of who writes a part.
    let _shared = disk.stripes.share(0);
    let mut lane = disk.clone().lane().unwrap();
    let answers = requests.map(|ask| ask(&mut *lane, Manner::AT_ONCE));
    let must_wait = Ok(Outcome::MustWait);
    assert_eq!(answers, [DONE, must_wait, DONE, DONE, DONE, DONE, must_wait]);
}

#[test]
fn who_waits_for_the_reserve_is_one_that_may_wait() {
    let disk = disk(64 << 20, u64::MAX);
    let store = disk.pool().store().clone();
    disk.pool().prepare(16 << 10).unwrap();
    store.set_reserve_bytes(1 << 20);
    while store.refill().unwrap() {}
    disk.set_reserve_only();
    let mut lane = disk.clone().lane().unwrap();
    let data = noise(64 << 20, 1);
    let mut write = |at: usize, manner| lane.write(at as u64 * 4096, &data[at * 4096..][..4096], manner);
    let waits = (0..16 << 10).find(|at| write(*at, Manner::AT_ONCE) != DONE).expect("there is no end to the reserve");
    assert_eq!(write(waits, Manner::AT_ONCE), Ok(Outcome::MustWait));
    let waited = || disk.not_told.load(Relaxed);
    let before = waited();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // As often as makes it a late one.
            while waited() < before + 5 {
                thread::yield_now();
            }
            while store.refill().unwrap() {}
        });
        assert_eq!(write(waits, WAITING), DONE);
    });
    assert_eq!((disk.stats().failed_writes, disk.late_writes()), (0, 1), "it was taken in the end");
    // Nobody refills it: one write finds that out for all.
    let refused = (waits..16 << 10).find_map(|at| write(at, WAITING).err()).expect("there is no end to the reserve");
    assert_eq!(refused.errno(), 12);
    assert_eq!((disk.stats().failed_writes, disk.late_writes()), (1, 1), "it is one, however often it was tried");
    assert_eq!(write(waits + 4000, Manner::AT_ONCE), Err(refused));
}

#[test]
fn a_disk_without_a_backing_has_others_blocks_leave_at_the_limit_of_all() {
    let other = disk_on_backing(8 << 20, 64 << 20);
    let store = other.pool().store().clone();
    let own = Arc::new(Disk::new(store.create_pool(PoolConfig::default()).unwrap(), 64 << 20).unwrap());
    let (mut lane, mut own_lane) = (other.clone().lane().unwrap(), own.clone().lane().unwrap());
    let data = noise(5 << 20, 1);
    assert_eq!(lane.write(0, &data, WAITING), DONE);
    assert_eq!(own_lane.write(0, &data, WAITING), DONE);
    assert!(other.stats().bd_count > 500 && own.stats().failed_writes == 0, "{:?}", own.stats());
    for lane in [&mut lane, &mut own_lane] {
        let mut back = vec![0; data.len()];
        assert_eq!(lane.read(0, &mut back, WAITING), DONE);
        assert!(back == data);
    }
    // Its own limit is its own.
    own.pool().set_limit_bytes(5 << 20);
    assert_eq!(own_lane.write(32 << 20, &data, WAITING).unwrap_err().errno(), 28);
}

/// Nothing that is written there arrives before it is let.
struct Hanging(Arc<Mutex<()>>, FileMedium);

impl Medium for Hanging {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        self.1.read_at(offset_bytes, into)
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        let _let = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        self.1.write_at(offset_bytes, from)
    }

    fn punch(&self, offset_bytes: u64, length_bytes: u64) {
        self.1.punch(offset_bytes, length_bytes);
    }
}

#[test]
fn a_disk_without_a_backing_does_not_hang_with_anothers_medium() {
    let hangs = Arc::new(Mutex::new(()));
    let medium = Hanging(hangs.clone(), FileMedium::new(tempfile::tempfile().unwrap().into()));
    let config = BackingConfig { capacity_bytes: 64 << 20, segment_bytes: 256 << 10 };
    let backing = Backing::new(Box::new(medium), config).unwrap();
    let store = Store::new(StoreConfig { limit_bytes: 8 << 20, ..StoreConfig::default() }).unwrap();
    let other = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
    let other = Arc::new(Disk::new(other, 64 << 20).unwrap());
    let own = Arc::new(Disk::new(store.create_pool(PoolConfig::default()).unwrap(), 64 << 20).unwrap());
    let data = noise(12 << 20, 1);
    thread::scope(|scope| {
        let hang = hangs.lock().unwrap();
        let writing = scope.spawn(|| other.clone().lane().unwrap().write(0, &data, WAITING));
        // He goes to the medium himself, and is known to wait there from a tenth of a second on.
        thread::sleep(Duration::from_millis(500));
        let mut lane = own.clone().lane().unwrap();
        let refused = lane.write(0, &data, WAITING);
        // Those behind it do not each wait as long.
        let begun = Instant::now();
        let behind: Vec<_> = (0..20).map(|at| lane.write((20 << 20) + at * 4096, &data[..4096], WAITING)).collect();
        let took = begun.elapsed();
        drop(hang);
        assert_eq!(refused.unwrap_err().errno(), 28);
        assert!(behind.iter().all(Result::is_err) && took < Duration::from_secs(2), "{took:?} {behind:?}");
        assert_eq!(writing.join().unwrap(), DONE, "it waits for its own");
    });
    let little = &data[..2 << 20];
    assert_eq!(own.clone().lane().unwrap().write(0, little, WAITING), DONE, "the other's leave again");
}

#[test]
fn a_disk_at_its_own_limit_has_its_own_blocks_leave_and_no_others() {
    let other = disk_on_backing(10 << 20, 64 << 20);
    let store = other.pool().store().clone();
    let medium = Box::new(FileMedium::new(tempfile::tempfile().unwrap().into()));
    let config = BackingConfig { capacity_bytes: 64 << 20, segment_bytes: 256 << 10 };
    let backing = Backing::new(medium, config).unwrap();
    let own = store.create_pool_on(PoolConfig { limit_bytes: 1 << 20, ..PoolConfig::default() }, &backing).unwrap();
    let own = Arc::new(Disk::new(own, 64 << 20).unwrap());
    let data = noise(8 << 20, 1);
    assert_eq!(other.clone().lane().unwrap().write(0, &data, WAITING), DONE);
    assert_eq!(other.stats().bd_count, 0, "it fits");
    assert_eq!(own.clone().lane().unwrap().write(0, &data, WAITING), DONE);
    assert!(own.stats().bd_count > 1500, "{:?}", own.stats());
    assert_eq!(other.stats().bd_count, 0, "another's limit is none of its");
}

#[test]
fn where_the_reserve_is_used_up_blocks_leave_for_the_backing() {
    let disk = disk_on_backing(u64::MAX, 64 << 20);
    let store = disk.pool().store().clone();
    disk.pool().prepare(16 << 10).unwrap();
    store.set_reserve_bytes(4 << 20);
    while store.refill().unwrap() {}
    let reserved_bytes = store.mem_used_total_bytes();
    disk.set_reserve_only();
    let mut lane = disk.clone().lane().unwrap();
    let data = noise(32 << 20, 1);
    for (at, block) in (0..).step_by(4096).zip(data.chunks(4096)) {
        assert_eq!(lane.write(at, block, WAITING), DONE, "at {at}");
    }
    assert!(store.mem_used_total_bytes() <= reserved_bytes, "memory was asked for");
    assert_eq!(disk.stats().failed_writes, 0);
    let out = disk.stats().bd_count;
    let mut back = vec![0; data.len()];
    assert_eq!(lane.read(0, &mut back, WAITING), DONE);
    assert!(back == data);
    assert_eq!(disk.stats().bd_count, out, "what was read took of the reserve");
}

#[test]
fn a_disk_whose_backing_is_full_says_so_and_keeps_what_it_has() {
    let disk = disk_on_backing(4 << 20, 8 << 20);
    let mut lane = disk.clone().lane().unwrap();
    let data = noise(16 << 20, 1);
    let write = |lane: &mut Box<dyn Lane>, at: usize| lane.write(at as u64 * 4096, &data[at * 4096..][..4096], WAITING);
    let accepted = (0..4096).position(|at| write(&mut lane, at).is_err()).unwrap();
    assert_eq!(write(&mut lane, accepted).unwrap_err().errno(), 28);
    // Four megabytes here, eight there, but for tables, lists and the last segment.
    assert!((2500..3072).contains(&accepted), "{accepted} blocks");
    let mut back = vec![0; accepted * 4096];
    assert_eq!(lane.read(0, &mut back, WAITING), DONE);
    assert!(back == data[..accepted * 4096]);
    lane.discard(0, 8 << 20, WAITING).unwrap();
    assert!((0..1024).all(|at| write(&mut lane, at) == DONE), "there is room again");
}
