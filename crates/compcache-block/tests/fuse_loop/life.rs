//! A disk's life: a file system on it, a new size, its removal, company, and a user who may not.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use compcache_block::fuse_loop::{FuseLoop, FuseLoopError, Holder, clean};
use compcache_block::{Array, BLOCK_BYTES};
use tempfile::TempDir;

use crate::support::{
    Aligned, Mounted, Served, assert_nothing_left, backing_file, can_serve, disk, fill_run, open_by_another_name,
    options, run,
};

const MIB: u64 = 1 << 20;

/// A loop device over a block device, detached when dropped.
struct LoopOver(PathBuf);

impl LoopOver {
    fn new(device: &Path) -> LoopOver {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(device).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        LoopOver(PathBuf::from(String::from_utf8(made.stdout).unwrap().trim()))
    }
}

impl Drop for LoopOver {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).output();
    }
}

/// Tells threads that it is over, also when a test fails.
struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn sectors(device: &Path) -> u64 {
    let path = format!("/sys/block/{}/size", device.file_name().unwrap().to_str().unwrap());
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[test]
fn a_file_system_keeps_its_files_and_is_found_clean() {
    if !can_serve(&["mkfs.ext4", "fsck.ext4", "mount"]) {
        return;
    }
    let served = Served::new(disk(64 * MIB));
    let path = served.disk.path().to_str().unwrap().to_owned();
    run("mkfs.ext4", &["-q", &path]);
    let at = TempDir::new().unwrap();
    let mut expected = vec![0; 256 << 10];
    for again in [false, true] {
        let mounted = Mounted::new(served.disk.path(), at.path());
        for number in 0..64u32 {
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
    if !can_serve(&[]) {
        return;
    }
    let device = Arc::new(Array::new(4 * MIB).unwrap());
    let served = Served::new(device.clone());
    let (file, mut bytes) = (served.open(), Aligned::new(BLOCK_BYTES));
    assert_eq!(sectors(served.disk.path()), 4 * MIB / 512);
    fill_run(bytes.bytes(), 5, 5);
    assert!(file.write_all_at(bytes.bytes(), 4 * MIB).is_err());
    device.resize(8 * MIB).unwrap();
    served.disk.resized().unwrap();
    assert_eq!(sectors(served.disk.path()), 8 * MIB / 512);
    file.write_all_at(bytes.bytes(), 8 * MIB - 4096).unwrap();
    let mut back = Aligned::new(BLOCK_BYTES);
    file.read_exact_at(back.bytes(), 8 * MIB - 4096).unwrap();
    assert!(back.bytes() == bytes.bytes());
    device.resize(MIB).unwrap();
    assert!(file.read_exact_at(back.bytes(), 8 * MIB - 4096).is_err(), "the device is smaller already");
    served.disk.resized().unwrap();
    assert_eq!(sectors(served.disk.path()), MIB / 512);
    drop(file);
    served.remove();
}

/// What direct reads reach ends where the kernel believes the served file to end, and what it is told of that is dropped when a read overtakes it.
#[test]
fn a_disk_grows_to_its_last_block_while_it_is_read_and_written() {
    if !can_serve(&[]) {
        return;
    }
    let device = disk(MIB);
    let served = Served::new(device.clone());
    let (file, mut bytes) = (served.open(), Aligned::new(BLOCK_BYTES));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _over = SetWhenDropped(&over);
        for worker in 0..8 {
            let (file, over) = (served.open(), &over);
            scope.spawn(move || {
                let (mut random, mut bytes) = (fastrand::Rng::with_seed(worker), Aligned::new(BLOCK_BYTES));
                while !over.load(Relaxed) {
                    let offset_bytes = random.u64(..MIB / BLOCK_BYTES as u64) * BLOCK_BYTES as u64;
                    let done = match worker {
                        0 => file.write_all_at(bytes.bytes(), offset_bytes),
                        _ => file.read_exact_at(bytes.bytes(), offset_bytes),
                    };
                    done.unwrap();
                }
            });
        }
        for size_bytes in (1..=2000).map(|blocks| MIB + blocks * BLOCK_BYTES as u64) {
            device.resize(size_bytes).unwrap();
            served.disk.resized().unwrap();
            assert_eq!(sectors(served.disk.path()), size_bytes / 512);
            let last = file.read_exact_at(bytes.bytes(), size_bytes - BLOCK_BYTES as u64);
            last.unwrap_or_else(|error| panic!("the last block of {size_bytes} bytes: {error}"));
        }
    });
    drop(file);
    served.remove();
}

#[test]
fn a_disk_whose_device_somebody_else_has_detached_takes_no_new_size() {
    if !can_serve(&["losetup"]) {
        return;
    }
    let device = disk(16 * MIB);
    let Served { disk: served, parent } = Served::new(device.clone());
    let path = served.path().to_owned();
    run("losetup", &["-d", path.to_str().unwrap()]);
    device.resize(8 * MIB).unwrap();
    let refused = served.resized();
    assert!(matches!(&refused, Err(FuseLoopError::Detached { path: said }) if *said == path), "{refused:?}");
    served.remove().unwrap();
    assert_nothing_left(parent.path(), &path);
}

#[test]
fn a_disk_in_use_is_not_removed_and_says_by_whom() {
    if !can_serve(&["mkfs.ext4", "mount", "losetup"]) {
        return;
    }
    let Served { disk: served, parent } = Served::new(disk(16 * MIB));
    let path = served.path().to_owned();
    run("mkfs.ext4", &["-q", path.to_str().unwrap()]);
    let at = TempDir::new().unwrap();
    let mounted = Mounted::new(&path, at.path());
    let refused = served.remove().unwrap_err();
    let by = Holder::Mounted { at: at.path().to_owned() };
    assert!(matches!(&refused.error, FuseLoopError::InUse { by: said, .. } if *said == by), "{}", refused.error);
    fs::write(at.path().join("file"), "still served").unwrap();
    mounted.unmount();

    let open = fs::File::open(&path).unwrap();
    let refused = refused.disk.remove().unwrap_err();
    let us = std::process::id();
    let said = |error: &FuseLoopError| matches!(error, FuseLoopError::InUse { by: Holder::Process { pid, .. }, .. } if *pid == us);
    assert!(said(&refused.error), "{}", refused.error);
    drop(open);

    // Neither claims the device, and one has another name for it.
    let above = LoopOver::new(&path);
    let refused = refused.disk.remove().unwrap_err();
    let by = Holder::Stacked { name: above.0.file_name().unwrap().into() };
    assert!(matches!(&refused.error, FuseLoopError::InUse { by: said, .. } if *said == by), "{}", refused.error);
    let claimed = refused.disk.claim().map(drop);
    assert!(matches!(&claimed, Err(FuseLoopError::InUse { by: said, .. }) if *said == by), "{claimed:?}");
    drop(above);
    let open = open_by_another_name(&path);
    let refused = refused.disk.remove().unwrap_err();
    assert!(said(&refused.error), "{}", refused.error);
    drop(open);

    refused.disk.remove().unwrap();
    assert_nothing_left(parent.path(), &path);
}

#[test]
fn who_uses_a_disk_is_known() {
    if !can_serve(&[]) {
        return;
    }
    let Served { disk: served, parent } = Served::new(disk(MIB));
    let path = served.path().to_owned();
    // While it is claimed nobody else has it for himself.
    let claimed = served.claim().unwrap();
    let exclusive = rustix::fs::OFlags::EXCL.bits() as i32;
    let busy = fs::OpenOptions::new().read(true).custom_flags(exclusive).open(&path).unwrap_err();
    assert_eq!(busy.kind(), std::io::ErrorKind::ResourceBusy);
    drop(claimed);
    let open = fs::File::open(&path).unwrap();
    let us = std::process::id();
    let by = served.claim().map(drop);
    assert!(matches!(&by, Err(FuseLoopError::InUse { by: Holder::Process { pid, .. }, .. }) if *pid == us), "{by:?}");
    drop(open);
    drop(served.claim().unwrap());
    served.remove().unwrap();
    assert_nothing_left(parent.path(), &path);
}

/// In a namespace of one's own anybody has a file of that name.
#[test]
fn who_only_calls_a_file_like_the_disk_does_not_use_it() {
    if !can_serve(&["unshare", "sh"]) {
        return;
    }
    let Served { disk: served, parent } = Served::new(disk(MIB));
    let path = served.path().to_owned();
    let script = format!("mount -t tmpfs none /dev && : >{0} && exec 3<{0} && echo has it && read end", path.display());
    let mut named = Command::new("unshare");
    named
        .args(["--mount", "--user", "--map-root-user", "sh", "-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut named = named.spawn().unwrap();
    let mut said = String::new();
    BufReader::new(named.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "has it\n");
    let removed = served.remove();
    // It reads the end of its input.
    drop(named.stdin.take());
    named.wait().unwrap();
    removed.unwrap();
    assert_nothing_left(parent.path(), &path);
}

#[test]
fn a_disk_that_is_dropped_while_it_is_open_is_taken_away() {
    if !can_serve(&[]) {
        return;
    }
    let Served { disk: served, parent } = Served::new(disk(MIB));
    let path = served.path().to_owned();
    let name = || Some(std::path::Path::new(&backing_file(&path)?).file_name()?.to_owned());
    let ours = name().expect("it is attached");
    let (file, mut bytes) = (crate::support::open_direct(&path), Aligned::new(BLOCK_BYTES));
    file.read_exact_at(bytes.bytes(), 0).unwrap();
    drop(served);
    assert!(file.read_exact_at(bytes.bytes(), 0).is_err());
    drop(file);
    let give_up = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while name().is_some_and(|name| name == ours) {
        assert!(std::time::Instant::now() < give_up, "{:?}", backing_file(&path));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_nothing_left(parent.path(), &path);
}

#[test]
fn two_disks_are_two_and_cleaning_leaves_them_alone() {
    if !can_serve(&[]) {
        return;
    }
    let parent = TempDir::new().unwrap();
    let serve = || FuseLoop::serve(disk(MIB), &options(parent.path(), 1)).unwrap();
    let (one, two) = (serve(), serve());
    assert_ne!(one.path(), two.path());
    let cleaned = clean(parent.path()).unwrap();
    assert!(cleaned.removed.is_empty() && cleaned.left.is_empty(), "{cleaned:?}");
    let (mut bytes, mut back) = (Aligned::new(BLOCK_BYTES), Aligned::new(BLOCK_BYTES));
    for (generation, disk) in [(1, &one), (2, &two)] {
        fill_run(bytes.bytes(), 0, generation);
        crate::support::open_direct(disk.path()).write_all_at(bytes.bytes(), 0).unwrap();
    }
    for (generation, disk) in [(1, &one), (2, &two)] {
        fill_run(bytes.bytes(), 0, generation);
        crate::support::open_direct(disk.path()).read_exact_at(back.bytes(), 0).unwrap();
        assert!(bytes.bytes() == back.bytes());
    }
    for entry in fs::read_dir(parent.path()).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o700, "only root may enter");
    }
    let path = one.path().to_owned();
    one.remove().unwrap();
    crate::support::open_direct(two.path()).read_exact_at(back.bytes(), 0).unwrap();
    let other = two.path().to_owned();
    two.remove().unwrap();
    assert_nothing_left(parent.path(), &path);
    assert_nothing_left(parent.path(), &other);
}

/// Set for the process that [`an_unprivileged_user_is_told_what_to_do`] starts.
const UNPRIVILEGED: &str = "COMPCACHE_TEST_UNPRIVILEGED";

#[test]
fn an_unprivileged_user_is_told_what_to_do() {
    if let Some(parent) = std::env::var_os(UNPRIVILEGED) {
        let refused = FuseLoop::serve(Arc::new(Array::new(MIB).unwrap()), &options(Path::new(&parent), 1));
        println!("refused: {}", refused.unwrap_err());
        return;
    }
    if !can_serve(&["setpriv"]) {
        return;
    }
    // A copy that this user may execute, wherever it was built.
    let place = TempDir::new().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = place.path().join("test");
    // By another process: what a test starts meanwhile would have it open for writing, and then it cannot be run.
    assert!(Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program).status().unwrap().success());
    let parent = place.path().join("served");
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(&program)
        .args(["--exact", "life::an_unprivileged_user_is_told_what_to_do", "--nocapture"])
        .env(UNPRIVILEGED, &parent)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    for word in ["refused:", "CAP_SYS_ADMIN", "run it as root", "NBD"] {
        assert!(said.contains(word), "{said}");
    }
    assert!(!parent.exists(), "something was made before it was refused");
}
