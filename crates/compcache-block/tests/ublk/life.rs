//! A disk's life: what kind of device it is, its users, a new size, its removal, company, and a user who may not.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use compcache_block::ublk::{Holder, Ublk, UblkError, clean};
use compcache_block::{Array, BLOCK_BYTES, Delayed};
use compcache_testkit::features::{Feature, requires};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

use crate::spied::Spied;
use crate::support::{
    AT_LAST, Aligned, Mounted, Served, assert_nothing_left, attribute, can_serve, disk, fill_run, open_by_another_name,
    open_direct, options, run, wait_for,
};

const MIB: u64 = 1 << 20;

#[test]
fn the_kernel_knows_what_kind_of_device_it_is() {
    if !can_serve(&[]) {
        return;
    }
    let served = Served::new(disk(64 * MIB));
    let path = served.0.path();
    for (name, value) in [
        ("size", "131072"),
        ("ro", "0"),
        ("queue/logical_block_size", "4096"),
        ("queue/physical_block_size", "4096"),
        ("queue/minimum_io_size", "4096"),
        ("queue/max_hw_sectors_kb", "1024"),
        ("queue/discard_granularity", "4096"),
        ("queue/discard_max_hw_bytes", "67108864"),
        ("queue/write_zeroes_max_bytes", "67108864"),
        ("queue/rotational", "0"),
    ] {
        assert_eq!(attribute(path, name), value, "{name}");
    }
    // A disk in RAM has no cache that could be flushed to something more lasting; others have.
    let needing = Served::new(Arc::new(Spied::new(disk(MIB))));
    for (served, write_cache, fua) in [(&served, "write through", "0"), (&needing, "write back", "1")] {
        assert_eq!(attribute(served.0.path(), "queue/write_cache"), write_cache);
        assert_eq!(attribute(served.0.path(), "queue/fua"), fua);
    }
    served.remove();
    needing.remove();
}

#[test]
fn a_file_system_keeps_its_files_and_is_found_clean() {
    if !can_serve(&["mkfs.ext4", "fsck.ext4", "mount"]) {
        return;
    }
    let served = Served::new(disk(64 * MIB));
    let path = served.0.path().to_str().unwrap().to_owned();
    run("mkfs.ext4", &["-q", &path]);
    let at = TempDir::new().unwrap();
    let mut expected = vec![0; 256 << 10];
    for again in [false, true] {
        let mounted = Mounted::new(served.0.path(), at.path());
        for number in 0..32u32 {
            fill_run(&mut expected, number.into(), number + 1);
            let length = expected.len() - number as usize * 1000;
            let file = at.path().join(number.to_string());
            if again {
                assert!(fs::read(file).unwrap() == expected[..length], "file {number} changed");
            } else {
                fs::write(file, &expected[..length]).unwrap();
            }
        }
        mounted.unmount();
        run("fsck.ext4", &["-f", "-n", &path]);
    }
    served.remove();
}

#[test]
fn a_disk_takes_a_new_size_while_it_is_open() {
    if !can_serve(&[]) || !requires(&[Feature::UblkResize]) {
        return;
    }
    let device = Arc::new(Array::new(4 * MIB).unwrap());
    let served = Served::new(device.clone());
    let (file, mut bytes) = (served.open(), Aligned::new(BLOCK_BYTES));
    device.resize(8 * MIB).unwrap();
    served.0.resized().unwrap();
    assert_eq!(attribute(served.0.path(), "size"), (8 * MIB / 512).to_string());
    file.write_all_at(bytes.bytes(), 8 * MIB - 4096).unwrap();
    device.resize(MIB).unwrap();
    served.0.resized().unwrap();
    assert!(file.read_exact_at(bytes.bytes(), MIB).is_err());
    drop(file);
    served.remove();
}

#[test]
fn a_kernel_that_cannot_change_the_size_is_said_to() {
    if !can_serve(&[]) || Feature::UblkResize.probe().is_ok() {
        return;
    }
    let device = Arc::new(Array::new(4 * MIB).unwrap());
    let served = Served::new(device.clone());
    assert!(!served.0.can_be_resized());
    device.resize(MIB).unwrap();
    let refused = served.0.resized().unwrap_err();
    assert!(matches!(refused, UblkError::TooOld { since: "6.16", .. }), "{refused}");
    let mut bytes = Aligned::new(BLOCK_BYTES);
    assert!(served.open().read_exact_at(bytes.bytes(), 2 * MIB).is_err(), "the device is smaller already");
    served.open().read_exact_at(bytes.bytes(), 0).unwrap();
    served.remove();
}

#[test]
fn a_disk_in_use_is_not_removed_and_says_by_whom() {
    if !can_serve(&["mkfs.ext4", "mount", "mkswap", "swapon", "swapoff"]) {
        return;
    }
    let served = Ublk::serve(disk(16 * MIB), &options(2, 16)).unwrap();
    let path = served.path().to_owned();
    let device = path.to_str().unwrap();
    run("mkfs.ext4", &["-q", device]);
    let at = TempDir::new().unwrap();
    let mounted = Mounted::new(&path, at.path());
    let refused = served.remove().unwrap_err();
    let by = Holder::Mounted { at: at.path().to_owned() };
    assert!(matches!(&refused.error, UblkError::InUse { by: said, .. } if *said == by), "{}", refused.error);
    fs::write(at.path().join("file"), "still served").unwrap();
    mounted.unmount();

    let open = fs::File::open(&path).unwrap();
    let refused = refused.disk.remove().unwrap_err();
    let us = std::process::id();
    let by =
        |error: &UblkError| matches!(error, UblkError::InUse { by: Holder::Process { pid, .. }, .. } if *pid == us);
    assert!(by(&refused.error), "{}", refused.error);
    assert!(by(&refused.disk.claim().map(drop).unwrap_err()));
    drop(open);
    let open = open_by_another_name(&path);
    let refused = refused.disk.remove().unwrap_err();
    assert!(by(&refused.error), "{}", refused.error);
    drop(open);

    run("mkswap", &[device]);
    run("swapon", &[device]);
    let refused = refused.disk.remove();
    run("swapoff", &[device]);
    let refused = refused.unwrap_err();
    assert!(matches!(refused.error, UblkError::InUse { by: Holder::Swap, .. }), "{}", refused.error);
    refused.disk.remove().unwrap();
    assert_nothing_left(&path);
}

#[test]
fn a_disk_is_gone_although_somebody_who_was_not_seen_keeps_its_number() {
    if !can_serve(&["losetup"]) || !requires(&[Feature::Loop]) {
        return;
    }
    let served = Served::new(disk(MIB)).0;
    let path = served.path().to_owned();
    let number = fs::metadata(&path).unwrap().rdev();
    // Outside of /dev, and where devices can be opened, as may not be in the usual places.
    let directory = TempDir::new().unwrap();
    run("mount", &["-t", "tmpfs", "none", directory.path().to_str().unwrap()]);
    let nodes = Mounted::there(directory.path());
    let alias = directory.path().join("alias");
    mknodat(CWD, &alias, FileType::BlockDevice, Mode::from_raw_mode(0o600), number).unwrap();
    let alias = alias.to_str().unwrap();
    run("losetup", &["-f", alias]);
    let above = fs::read_dir("/sys/block")
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|device| fs::read_to_string(device.join("loop/backing_file")).is_ok_and(|over| over.trim_end() == alias));
    let above = Path::new("/dev").join(above.expect("a loop device over it").file_name().unwrap());
    served.remove().expect("it was stopped, and nobody can have it back");
    assert!(!path.exists());
    run("losetup", &["-d", above.to_str().unwrap()]);
    nodes.unmount();
    wait_for("its number is free", || !crate::support::character(&path).exists());
    Served::new(disk(MIB)).remove();
}

#[test]
fn removal_waits_for_what_is_in_flight() {
    if !can_serve(&[]) {
        return;
    }
    // The request goes on when the descriptor it was made through is closed: io_uring's users do that, and so does fork.
    let device = disk(MIB);
    let served = Served::with_one_queue(Arc::new(Delayed::new(device.clone(), 0..4096, Duration::from_secs(2))), 4);
    let path = served.0.path().to_owned();
    let writer = thread::spawn(move || {
        let (file, mut bytes) = (open_direct(&path), Aligned::new(BLOCK_BYTES));
        fill_run(bytes.bytes(), 0, 7);
        file.write_all_at(bytes.bytes(), 0)
    });
    wait_for("the request is in flight", || {
        attribute(served.0.path(), "inflight").split_whitespace().any(|count| count != "0")
    });
    let path = served.0.path().to_owned();
    // Whoever has it open is in the way; dropping takes it away from him, after his request.
    drop(served.0);
    writer.join().unwrap().expect("it was in flight, and is answered");
    assert_eq!(device.stats().orig_data_size, 4096);
    wait_for("nothing is left", || !crate::support::character(&path).exists());
    assert_nothing_left(&path);
}

#[test]
fn a_disk_that_is_dropped_in_use_fails_its_users_and_hangs_nobody() {
    if !can_serve(&["mkfs.ext4", "mount"]) {
        return;
    }
    let served = Served::new(disk(16 * MIB));
    let path = served.0.path().to_owned();
    run("mkfs.ext4", &["-q", path.to_str().unwrap()]);
    let at = TempDir::new().unwrap();
    let mounted = Mounted::new(&path, at.path());
    fs::write(at.path().join("file"), [1; 100_000]).unwrap();
    let (said, heard) = mpsc::channel();
    let reads = open_direct(&path);
    let reader = thread::spawn(move || {
        let mut bytes = Aligned::new(BLOCK_BYTES);
        while reads.read_exact_at(bytes.bytes(), 0).is_ok() {}
        said.send(()).unwrap();
    });
    thread::sleep(Duration::from_millis(300));
    drop(served.0);
    heard.recv_timeout(AT_LAST).expect("requests go on, or hang");
    reader.join().unwrap();
    assert!(
        fs::write(at.path().join("other"), [1; 1 << 20])
            .and_then(|()| fs::File::open(at.path().join("other"))?.sync_all())
            .is_err()
    );
    mounted.unmount();
    wait_for("nothing is left", || !crate::support::character(&path).exists());
    assert_nothing_left(&path);
    // Its number is free again, also for the kernel.
    Served::new(disk(MIB)).remove();
}

#[test]
fn two_disks_are_two_and_cleaning_leaves_them_alone() {
    if !can_serve(&[]) {
        return;
    }
    let serve = || Served::new(disk(MIB));
    let (one, two) = (serve(), serve());
    assert_ne!(one.0.path(), two.0.path());
    let cleaned = clean().unwrap();
    assert!(cleaned.removed.is_empty() && cleaned.left.is_empty(), "{cleaned:?}");
    let (mut bytes, mut back) = (Aligned::new(BLOCK_BYTES), Aligned::new(BLOCK_BYTES));
    for (generation, disk) in [(1, &one), (2, &two)] {
        fill_run(bytes.bytes(), 0, generation);
        disk.open().write_all_at(bytes.bytes(), 0).unwrap();
    }
    for (generation, disk) in [(1, &one), (2, &two)] {
        fill_run(bytes.bytes(), 0, generation);
        disk.open().read_exact_at(back.bytes(), 0).unwrap();
        assert!(bytes.bytes() == back.bytes());
    }
    one.remove();
    two.open().read_exact_at(back.bytes(), 0).unwrap();
    two.remove();
}

#[test]
fn twenty_disks_come_and_go_and_leave_nothing() {
    if !can_serve(&[]) {
        return;
    }
    let open_files = || fs::read_dir("/proc/self/fd").unwrap().count();
    Served::new(disk(MIB)).remove();
    let before = open_files();
    let device = disk(MIB);
    for _ in 0..20 {
        Served::new(device.clone()).remove();
    }
    assert_eq!(open_files(), before);
    let names =
        fs::read_dir("/proc/self/task").unwrap().map(|task| fs::read_to_string(task.unwrap().path().join("comm")));
    let left: Vec<_> = names.flatten().filter(|name| name.starts_with("ublk-")).collect();
    assert!(left.is_empty(), "{left:?}");
}
