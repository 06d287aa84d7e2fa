use std::sync::Barrier;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use compcache_store::{PoolConfig, Store, StoreConfig};

use super::*;
use crate::device::{Extent, Manner, Outcome, Zeroes};

const WAITING: Manner = Manner::WAITING;
const DONE: Result<Outcome, DeviceError> = Ok(Outcome::Done(()));

fn disk(size_bytes: u64, limit_bytes: u64) -> Arc<Disk> {
    let store = Store::new(StoreConfig { limit_bytes, reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
    Arc::new(Disk::new(store.create_pool(PoolConfig::default()).unwrap(), size_bytes).unwrap())
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
