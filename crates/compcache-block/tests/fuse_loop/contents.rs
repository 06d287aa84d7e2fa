//! What is written is read, what is discarded is gone, what fails says so, what is slow is slow alone.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use compcache_block::{BLOCK_BYTES, BlockDevice, Delayed, Fault, Faulty, Request};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};

use crate::spied::Spied;
use crate::support::{Aligned, Served, can_serve, disk, fill_run, run};

const MIB: u64 = 1 << 20;

#[test]
fn discarded_and_zeroed_blocks_free_their_memory_at_once() {
    if !can_serve(&["blkdiscard"]) {
        return;
    }
    let device = disk(16 * MIB);
    let served = Served::new(device.clone());
    let mut bytes = Aligned::new(16 << 20);
    fill_run(bytes.bytes(), 0, 1);
    served.open().write_all_at(bytes.bytes(), 0).unwrap();
    let full = device.stats();
    assert_eq!(full.orig_data_size, 16 * MIB);
    let path = served.disk.path().to_str().unwrap().to_owned();

    run("blkdiscard", &["-o", "4194304", "-l", "8388608", &path]);
    let discarded = device.stats();
    assert_eq!(discarded.orig_data_size, 8 * MIB);
    assert!(discarded.compr_data_size <= full.compr_data_size / 2 + 4096, "{}", discarded.compr_data_size);
    run("blkdiscard", &["-z", "-o", "0", "-l", "4194304", &path]);
    let zeroed = device.stats();
    assert!(zeroed.compr_data_size <= full.compr_data_size / 4 + 4096, "{}", zeroed.compr_data_size);

    served.open().read_exact_at(bytes.bytes(), 0).unwrap();
    let (zeroes, kept) = bytes.bytes().split_at(12 << 20);
    assert!(zeroes.iter().all(|byte| *byte == 0));
    let mut expected = vec![0; 4 << 20];
    fill_run(&mut expected, 3072, 1);
    assert!(kept == expected, "what was not discarded changed");
    run("blkdiscard", &[&path]);
    assert_eq!(device.stats().orig_data_size, 0);
    served.remove();
}

#[test]
fn holes_of_the_served_file_are_found_and_its_edges_read_as_zeroes() {
    if !can_serve(&[]) {
        return;
    }
    let served = Served::new(disk(MIB));
    let file = OpenOptions::new().read(true).write(true).open(served.file()).unwrap();
    file.write_all_at(&[7; 3 * BLOCK_BYTES], 8192).unwrap();
    assert_eq!(seek(&file, SeekFrom::Data(0)), Ok(8192));
    assert_eq!(seek(&file, SeekFrom::Hole(8192)), Ok(20480));
    assert_eq!(seek(&file, SeekFrom::Data(20480)), Err(rustix::io::Errno::NXIO));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, hole, 8193, 2 * BLOCK_BYTES as u64).unwrap();
    let mut back = vec![1; 3 * BLOCK_BYTES];
    file.read_exact_at(&mut back, 8192).unwrap();
    assert!(back[0] == 7 && back[1..=8192].iter().all(|byte| *byte == 0) && back[8193..].iter().all(|byte| *byte == 7));
    assert_eq!(file.read_at(&mut back, MIB - 100).unwrap(), 100, "a read ends where the disk ends");
    assert!(fallocate(&file, FallocateFlags::empty(), 0, 4096).is_err());
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
    let flushes = || spied.flushes.load(Ordering::SeqCst);
    let file = served.open();
    let mut bytes = Aligned::new(BLOCK_BYTES);
    fill_run(bytes.bytes(), 0, 1);
    file.write_all_at(bytes.bytes(), 0).unwrap();
    // The kernel flushes the file once when the loop device is set up.
    let before = flushes();
    file.write_all_at(bytes.bytes(), 0).unwrap();
    assert_eq!(flushes(), before, "a plain write is no flush");
    file.sync_all().unwrap();
    assert_eq!(flushes(), before + 1);
    let flags = (OFlags::DIRECT | OFlags::DSYNC).bits() as i32;
    let forced = OpenOptions::new().write(true).custom_flags(flags).open(served.disk.path()).unwrap();
    forced.write_all_at(bytes.bytes(), 0).unwrap();
    assert!(flushes() > before + 1, "a write with O_DSYNC came without a flush");
    drop((file, forced));
    served.remove();
}

#[test]
fn a_flush_reaches_the_device_also_where_somebody_had_the_loop_device_write_through() {
    if !can_serve(&[]) {
        return;
    }
    let write_cache = |path: &Path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        format!("/sys/block/{name}/queue/write_cache")
    };
    // Others take loop devices as well, and may take this one first.
    for _ in 0..50 {
        let before = Served::new(Arc::new(Spied::new(disk(MIB))));
        let path = before.disk.path().to_owned();
        fs::write(write_cache(&path), "write through").unwrap();
        before.remove();
        let spied = Arc::new(Spied::new(disk(MIB)));
        let served = Served::new(spied.clone());
        assert_eq!(fs::read_to_string(write_cache(served.disk.path())).unwrap().trim(), "write back");
        let is_the_same = served.disk.path() == path;
        let file = served.open();
        let mut bytes = Aligned::new(BLOCK_BYTES);
        fill_run(bytes.bytes(), 0, 1);
        file.write_all_at(bytes.bytes(), 0).unwrap();
        let flushes = spied.flushes.load(Ordering::SeqCst);
        file.sync_all().unwrap();
        assert_eq!(spied.flushes.load(Ordering::SeqCst), flushes + 1);
        drop(file);
        served.remove();
        if is_the_same {
            return;
        }
    }
    panic!("the kernel never gave the same loop device again");
}

#[test]
fn a_device_that_needs_no_flush_is_asked_for_none_and_flushes_succeed() {
    if !can_serve(&[]) {
        return;
    }
    let disk = disk(MIB);
    assert!(!disk.needs_flush(), "a disk in RAM has nothing to flush");
    let spied = Arc::new(Spied::lasting(disk));
    let served = Served::new(spied.clone());
    let file = served.open();
    let mut bytes = Aligned::new(BLOCK_BYTES);
    for generation in 1..4 {
        fill_run(bytes.bytes(), 0, generation);
        file.write_all_at(bytes.bytes(), 0).unwrap();
        file.sync_all().unwrap();
    }
    let mut back = Aligned::new(BLOCK_BYTES);
    file.read_exact_at(back.bytes(), 0).unwrap();
    assert!(back.bytes() == bytes.bytes());
    assert_eq!(spied.flushes.load(Ordering::SeqCst), 0);
    drop(file);
    served.remove();
}

#[test]
fn what_stays_in_memory_is_written_in_shorter_parts_than_what_is_flushed() {
    if !can_serve(&[]) {
        return;
    }
    const KIB: u64 = 1 << 10;
    // The longest writes and reads: longer than the first number, and not longer than the second.
    let in_memory = (Spied::lasting(disk(4 * MIB)), (0, 32 * KIB), (32 * KIB, 128 * KIB));
    let flushed = (Spied::new(disk(4 * MIB)), (128 * KIB, 256 * KIB), (128 * KIB, 256 * KIB));
    for (spied, writes, reads) in [in_memory, flushed] {
        let spied = Arc::new(spied);
        let served = Served::new(spied.clone());
        let (file, mut bytes) = (served.open(), Aligned::new(1 << 20));
        let (mut back, is_flushed) = (Aligned::new(1 << 20), spied.needs_flush());
        fill_run(bytes.bytes(), 256, 1);
        let said = |longest: &AtomicU64, (above, most): (u64, u64), what| {
            let longest = longest.load(Ordering::SeqCst);
            assert!(longest > above && longest <= most, "{what} of {longest} bytes, with flushes: {is_flushed}");
        };
        file.write_all_at(bytes.bytes(), MIB).unwrap();
        said(&spied.longest_write_bytes, writes, "writes");
        // The kernel has looked at the new disk.
        spied.longest_read_bytes.store(0, Ordering::SeqCst);
        file.read_exact_at(back.bytes(), MIB).unwrap();
        said(&spied.longest_read_bytes, reads, "reads");
        assert!(back.bytes() == bytes.bytes(), "the parts are not the whole, with flushes: {is_flushed}");
        drop(file);
        served.remove();
    }
}

#[test]
fn errors_of_the_device_arrive_at_the_served_file_as_they_are() {
    if !can_serve(&[]) {
        return;
    }
    let at = |block: u64| block * 4096..(block + 1) * 4096;
    let fault = |request, block, errno| Fault { request, offsets_bytes: at(block), one_in: 1, errno };
    const ENOSPC: i32 = 28;
    const EDQUOT: i32 = 122;
    let faults = vec![
        fault(Request::Write, 1, ENOSPC),
        fault(Request::Read, 2, EDQUOT),
        fault(Request::Discard, 3, EDQUOT),
        fault(Request::Flush, 0, EDQUOT),
    ];
    let served = Served::new(Arc::new(Faulty::new(disk(MIB), 1, faults)));
    let mut bytes = Aligned::new(BLOCK_BYTES);
    let errno = |result: std::io::Result<()>| result.err().and_then(|error| error.raw_os_error());
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;

    let file = OpenOptions::new().read(true).write(true).open(served.file()).unwrap();
    assert_eq!(errno(file.write_all_at(bytes.bytes(), 4096)), Some(ENOSPC));
    assert_eq!(errno(file.read_exact_at(bytes.bytes(), 8192)), Some(EDQUOT));
    assert_eq!(errno(fallocate(&file, hole, 12288, 4096).map_err(Into::into)), Some(EDQUOT));
    assert_eq!(errno(file.sync_all()), Some(EDQUOT));
    drop(file);
    served.remove();
}

#[test]
fn a_slow_request_does_not_hold_up_others() {
    if !can_serve(&[]) {
        return;
    }
    const SLOW: Duration = Duration::from_secs(5);
    // Not where others look what a new device holds.
    const AT: u64 = 128 * 4096;
    let device = Arc::new(Delayed::new(disk(MIB), AT..AT + 4096, SLOW));
    // One thread serves, and one waits.
    let served = Served::with_threads(device.clone(), 1);
    let before = device.waited();
    for slow_write in [false, true] {
        let begin = Instant::now();
        thread::scope(|scope| {
            let slow = scope.spawn(|| {
                let mut bytes = Aligned::new(BLOCK_BYTES);
                fill_run(bytes.bytes(), 0, 9);
                let file = served.open();
                let result = if slow_write {
                    file.write_all_at(bytes.bytes(), AT)
                } else {
                    file.read_exact_at(bytes.bytes(), AT)
                };
                result.unwrap();
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
    let mut bytes = Aligned::new(BLOCK_BYTES);
    let mut expected = vec![0; BLOCK_BYTES];
    fill_run(&mut expected, 0, 9);
    served.open().read_exact_at(bytes.bytes(), AT).unwrap();
    assert!(*bytes.bytes() == *expected, "the write that waited wrote something else");
    assert_eq!(device.size_bytes(), fs::metadata(served.file()).unwrap().len());
    served.remove();
}
