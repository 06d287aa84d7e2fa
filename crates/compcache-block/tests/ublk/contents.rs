//! What is written is read, what is discarded is gone, what is slow is slow alone, and nothing is allocated.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use compcache_block::{Array, BLOCK_BYTES, BlockDevice, Delayed};
use compcache_testkit::seed::Seed;
use rustix::fs::{FallocateFlags, OFlags, fallocate};

use crate::spied::{Spied, allocated, assert_counting_works};
use crate::support::{Aligned, Served, can_serve, disk, fill_run};

const MIB: u64 = 1 << 20;
const HOLE: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// More threads than queues, each with its own blocks: many requests of one queue are in flight at once, and the data of
/// one must not become another's.
#[test]
fn many_in_flight_read_what_they_wrote() {
    if !can_serve(&[]) {
        return;
    }
    const THREADS: u64 = 12;
    const BLOCKS: u64 = 256;
    let seed = Seed::for_test("many_in_flight_read_what_they_wrote");
    let served = Served::new(disk(THREADS * BLOCKS * BLOCK_BYTES as u64));
    let work = |number: u64| {
        let (file, mut rng) = (served.open(), seed.part(number).rng());
        let (mut bytes, mut expected) = (Aligned::new(16 * BLOCK_BYTES), vec![0; 16 * BLOCK_BYTES]);
        move || {
            let mut model = [0u32; BLOCKS as usize];
            for step in 1..=150 {
                let at = rng.usize(..model.len() - 16);
                let count = rng.usize(1..=16);
                let (first, length) = (number * BLOCKS + at as u64, count * BLOCK_BYTES);
                let bytes = &mut bytes.bytes()[..length];
                if rng.bool() {
                    fill_run(bytes, first, step);
                    file.write_all_at(bytes, first * BLOCK_BYTES as u64).unwrap();
                    model[at..at + count].fill(step);
                } else {
                    file.read_exact_at(bytes, first * BLOCK_BYTES as u64).unwrap();
                    for (one, generation) in model[at..at + count].iter().enumerate() {
                        let place = one * BLOCK_BYTES..(one + 1) * BLOCK_BYTES;
                        fill_run(&mut expected[place], first + one as u64, *generation);
                    }
                    assert!(bytes[..] == expected[..length], "blocks {first}..+{count} in step {step}");
                }
            }
        }
    };
    thread::scope(|scope| (0..THREADS).for_each(|number| drop(scope.spawn(work(number)))));
    served.remove();
}

#[test]
fn the_largest_requests_arrive_whole() {
    if !can_serve(&[]) {
        return;
    }
    let served = Served::new(disk(8 * MIB));
    let (file, mut bytes, mut back) = (served.open(), Aligned::new(4 << 20), Aligned::new(4 << 20));
    fill_run(bytes.bytes(), 3, 1);
    file.write_all_at(bytes.bytes(), 3 * 4096).unwrap();
    file.read_exact_at(back.bytes(), 3 * 4096).unwrap();
    assert!(bytes.bytes() == back.bytes());
    drop(file);
    served.remove();
}

#[test]
fn discarded_blocks_free_their_memory_at_once() {
    if !can_serve(&["blkdiscard"]) {
        return;
    }
    let device = disk(16 * MIB);
    let served = Served::new(device.clone());
    let (file, mut bytes) = (served.open(), Aligned::new(16 << 20));
    fill_run(bytes.bytes(), 0, 1);
    file.write_all_at(bytes.bytes(), 0).unwrap();
    let full = device.stats();
    assert_eq!(full.orig_data_size, 16 * MIB);
    let path = served.0.path().to_str().unwrap().to_owned();
    crate::support::run("blkdiscard", &["-o", "4194304", "-l", "8388608", &path]);
    let discarded = device.stats();
    assert_eq!(discarded.orig_data_size, 8 * MIB);
    assert!(discarded.compr_data_size <= full.compr_data_size / 2 + 4096, "{}", discarded.compr_data_size);
    fallocate(&file, HOLE, 0, 4 * MIB).unwrap();
    assert_eq!(device.stats().orig_data_size, 4 * MIB, "holes are blocks that are forgotten");
    file.read_exact_at(bytes.bytes(), 0).unwrap();
    let (zeroes, kept) = bytes.bytes().split_at(12 << 20);
    assert!(zeroes.iter().all(|byte| *byte == 0));
    let mut expected = vec![0; 4 << 20];
    fill_run(&mut expected, 3072, 1);
    assert!(kept == expected, "what was not discarded changed");
    drop(file);
    served.remove();
}

#[test]
fn a_flush_reaches_the_device_and_so_does_forced_unit_access() {
    if !can_serve(&[]) {
        return;
    }
    let spied = Arc::new(Spied::new(disk(MIB)));
    let served = Served::new(spied.clone());
    let counts = || (spied.flushes.load(Ordering::SeqCst), spied.forced.load(Ordering::SeqCst));
    let (file, mut bytes) = (served.open(), Aligned::new(BLOCK_BYTES));
    let (flushes, forced) = counts();
    file.write_all_at(bytes.bytes(), 0).unwrap();
    assert_eq!(counts(), (flushes, forced), "a plain write is no flush");
    file.sync_all().unwrap();
    assert_eq!(counts(), (flushes + 1, forced));
    let flags = (OFlags::DIRECT | OFlags::DSYNC).bits() as i32;
    let forcing = OpenOptions::new().write(true).custom_flags(flags).open(served.0.path()).unwrap();
    forcing.write_all_at(bytes.bytes(), 0).unwrap();
    // The kernel may flush besides.
    assert!(
        counts().0 > flushes && counts().1 == forced + 1,
        "a write with O_DSYNC is one forced write: {:?}",
        counts()
    );
    drop((file, forcing));
    served.remove();
}

#[test]
fn a_device_that_needs_no_flush_is_asked_for_none_and_flushes_succeed() {
    if !can_serve(&[]) {
        return;
    }
    let spied = Arc::new(Spied::lasting(disk(MIB)));
    let served = Served::new(spied.clone());
    let (file, mut bytes) = (served.open(), Aligned::new(BLOCK_BYTES));
    file.write_all_at(bytes.bytes(), 0).unwrap();
    file.sync_all().unwrap();
    assert_eq!(spied.flushes.load(Ordering::SeqCst) + spied.forced.load(Ordering::SeqCst), 0);
    drop(file);
    served.remove();
}

#[test]
fn a_slow_request_does_not_hold_up_others_of_its_queue() {
    if !can_serve(&[]) {
        return;
    }
    const SLOW: Duration = Duration::from_secs(5);
    // Not where the kernel looks for partitions, which it may do behind our back.
    const AT: u64 = 128 * 4096;
    let device = Arc::new(Delayed::new(disk(MIB), AT..AT + 4096, SLOW));
    // One thread serves, and one waits.
    let served = Served::with_one_queue(device.clone(), 16);
    let before = device.waited();
    for slow_write in [true, false] {
        let begin = Instant::now();
        thread::scope(|scope| {
            let slow = scope.spawn(|| {
                let (mut bytes, mut expected) = (Aligned::new(BLOCK_BYTES), vec![0; BLOCK_BYTES]);
                fill_run(&mut expected, 0, 9);
                if slow_write {
                    bytes.bytes().copy_from_slice(&expected);
                    served.open().write_all_at(bytes.bytes(), AT).unwrap();
                } else {
                    served.open().read_exact_at(bytes.bytes(), AT).unwrap();
                    assert!(*bytes.bytes() == *expected, "what was read is not what was written");
                }
                begin.elapsed()
            });
            thread::sleep(Duration::from_millis(200));
            let (file, mut bytes) = (served.open(), Aligned::new(BLOCK_BYTES));
            for block in 1..51 {
                file.write_all_at(bytes.bytes(), block * 4096).unwrap();
                file.read_exact_at(bytes.bytes(), block * 4096).unwrap();
            }
            let quick = begin.elapsed();
            let slow = slow.join().unwrap();
            assert!(quick < SLOW && slow >= SLOW, "50 quick ones ended after {quick:?}, the slow one after {slow:?}");
        });
    }
    assert_eq!(device.waited(), before + 2);
    assert_eq!(device.size_bytes(), MIB);
    served.remove();
}

#[test]
fn more_slow_requests_than_a_queue_holds_all_end() {
    if !can_serve(&[]) {
        return;
    }
    const DEPTH: u16 = 2;
    let device = Arc::new(Delayed::new(disk(MIB), 0..MIB / 2, Duration::from_millis(20)));
    let served = Served::with_one_queue(device.clone(), DEPTH);
    let write = |number: u64| {
        let (file, mut bytes) = (served.open(), Aligned::new(BLOCK_BYTES));
        move || {
            for round in 0..5 {
                fill_run(bytes.bytes(), number, round);
                file.write_all_at(bytes.bytes(), number * 4096).unwrap();
                file.read_exact_at(bytes.bytes(), number * 4096).unwrap();
                let mut expected = vec![0; BLOCK_BYTES];
                fill_run(&mut expected, number, round);
                assert!(*bytes.bytes() == *expected);
            }
        }
    };
    thread::scope(|scope| (0..8).for_each(|number| drop(scope.spawn(write(number)))));
    assert!(device.waited() >= 80, "{}", device.waited());
    served.remove();
}

#[test]
fn serving_allocates_nothing() {
    if !can_serve(&[]) {
        return;
    }
    // Half of it waits, so that the waiting threads serve too.
    let slow = Delayed::new(Arc::new(Array::new(4 << 20).unwrap()), 0..2 << 20, Duration::from_micros(10));
    let served = Served::new(Arc::new(Spied::counting(Arc::new(slow))));
    let (file, mut bytes) = (served.open(), Aligned::new(1 << 20));
    for round in 0..300u64 {
        let length = if round % 10 == 0 { 1 << 20 } else { BLOCK_BYTES };
        let offset = round * 7 % 768 * 4096;
        file.write_all_at(&bytes.bytes()[..length], offset).unwrap();
        file.read_exact_at(&mut bytes.bytes()[..length], offset).unwrap();
        if round % 10 == 5 {
            file.sync_all().unwrap();
            fallocate(&file, HOLE, offset, 8192).unwrap();
        }
    }
    assert_eq!(allocated(), 0);
    drop(file);
    served.remove();
    assert_counting_works();
}
