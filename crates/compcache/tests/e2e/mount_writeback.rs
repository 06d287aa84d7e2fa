//! Trees of which the kernel keeps what is written, and writes it back: `mount --exclusive --writeback-cache`.
//!
//! What files are holds of them as of others: [`crate::mount_posix`] and [`crate::mount_below`] are run once more on such mounts.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, SystemTime};

use crate::support::{Tree, can_mount, run_again_with};

const MOUNT: [&str; 4] = ["--memory", "16M", "--exclusive", "--writeback-cache"];

#[test]
fn all_of_this_holds_where_the_kernel_writes_back() {
    // There all of a file is data ([S158]); and what nobody else may change is changed behind the mount.
    let but = ["holes_allocation_and_copies_are_as_below", "what_was_read_before_the_end_of_a_write_behind"];
    run_again_with(&["mount_posix", "mount_below", "mount_clients"], &but, &MOUNT[2..]);
}

/// Bytes that the server has written, to whatever it was.
fn written_bytes(tree: &Tree) -> u64 {
    let io = fs::read_to_string(format!("/proc/{}/io", tree.child.id())).unwrap();
    io.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap().parse().unwrap()
}

#[test]
fn a_record_that_is_written_again_and_again_is_written_below_a_few_times() {
    if !can_mount(&[]) {
        return;
    }
    for (mount, least, most) in [(&MOUNT[..], 0, 4 << 20), (&MOUNT[..3], 16_000_000, u64::MAX)] {
        let tree = Tree::mounted(mount);
        let file = File::create(tree.target().join("f")).unwrap();
        let before = written_bytes(&tree);
        for round in 0..4000u32 {
            file.write_all_at(&[round as u8; 4096], 0).unwrap();
        }
        drop(file);
        let written = written_bytes(&tree) - before;
        assert!((least..most).contains(&written), "{mount:?}: {written}");
        assert_eq!(fs::read(tree.source().join("f")).unwrap(), [(3999 % 256) as u8; 4096]);
    }
}

#[test]
fn what_is_written_is_below_when_it_is_synced_or_closed_and_a_killed_server_takes_no_more_than_the_rest() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&MOUNT);
    let below = |name: &str| tree.source().join(name);
    let mut file = File::create(tree.target().join("f")).unwrap();
    file.write_all(b"synced").unwrap();
    file.sync_data().unwrap();
    assert_eq!(fs::read(below("f")).unwrap(), b"synced");
    fs::write(tree.target().join("closed"), "closed").unwrap();
    assert_eq!(fs::read(below("closed")).unwrap(), b"closed");
    file.write_all(b" and not").unwrap();
    assert_eq!(file.metadata().unwrap().len(), 14, "seen above at once");
    let (synced, closed) = (below("f"), below("closed"));
    tree.child.kill().unwrap();
    tree.child.wait().unwrap();
    assert!(fs::read(synced).unwrap().starts_with(b"synced"));
    assert_eq!(fs::read(closed).unwrap(), b"closed");
}

#[test]
fn times_that_the_kernel_gives_are_those_below_and_stay() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&MOUNT);
    let times =
        |file: &std::path::Path| fs::metadata(file).map(|stat| (stat.mtime(), stat.mtime_nsec(), stat.len())).unwrap();
    let (above, below) = (tree.target().join("f"), tree.source().join("f"));
    fs::write(&above, "written").unwrap();
    let written = times(&above);
    assert_eq!(times(&below), written);
    tree.drop_kernel_cache();
    assert_eq!(times(&above), written);
    // Set while there is something to write back, it is not the time of that.
    let file = File::options().write(true).open(&above).unwrap();
    file.write_all_at(b"W", 0).unwrap();
    let old = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    file.set_modified(old).unwrap();
    drop(file);
    assert_eq!((times(&above), times(&below)), ((1_000_000_000, 123_456_789, 7), (1_000_000_000, 123_456_789, 7)));
    assert_eq!(fs::read(&below).unwrap(), b"Written");
}

#[test]
fn what_is_not_yet_below_is_no_hole() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&MOUNT);
    let file = File::create(tree.target().join("f")).unwrap();
    file.write_all_at(b"data", 1 << 20).unwrap();
    // SAFETY: it takes numbers, and the file is open.
    let seek = |offset, whence| unsafe { libc::lseek(file.as_raw_fd(), offset, whence) };
    assert_eq!(seek(1 << 20, libc::SEEK_DATA), 1 << 20);
    assert_eq!(seek(0, libc::SEEK_HOLE), (1 << 20) + 4);
}
