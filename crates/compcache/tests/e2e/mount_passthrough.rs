//! Files that the kernel reads and writes past the server: `mount --passthrough`.
//!
//! What files are holds of them as of others: [`crate::mount_posix`] and [`crate::mount_below`] are run once more where they are passed through, and where none are. Unless
//! it is said otherwise the trees lie on tmpfs: not every file system under a build directory can be passed to (overlayfs).

use std::borrow::Borrow;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime};
use std::{ptr, slice};

use compcache_testkit::features::{Feature, requires};

use crate::mount_below::Below;
use crate::mount_posix::as_user;
use crate::support::{PATIENCE, Tree, can_mount, run_again_with};

const TMPFS: [&str; 3] = ["-t", "tmpfs", "none"];
const PAGE: usize = 4096;

fn can_pass() -> bool {
    can_mount(&["mount", "umount"]) && requires(&[Feature::FusePassthrough])
}

#[test]
fn all_of_this_holds_where_the_kernel_passes_what_is_written() {
    if !can_pass() {
        return;
    }
    // Without room, who stores through a mapping is told by a signal, as below.
    let but = ["what_there_is_no_room_for_below_is_not_said_to_be_synced", "all_of_this"];
    run_again_with(&["mount_posix", "mount_below"], &but, &["--passthrough=writable"]);
}

#[test]
fn all_of_this_holds_where_the_kernel_passes_nothing() {
    run_again_with(&["mount_posix", "mount_below"], &["all_of_this"], &["--passthrough=none"]);
}

/// Bytes that the server has read and written, of whatever it was.
fn served_bytes(tree: &Tree) -> u64 {
    let io = fs::read_to_string(format!("/proc/{}/io", tree.child.id())).unwrap();
    let number = |name| io.lines().find_map(|line| line.strip_prefix(name)?.parse::<u64>().ok()).unwrap();
    number("rchar: ") + number("wchar: ")
}

/// Calls `store` with a mapping of the first `length` bytes of a file, which is closed by then if it is given away; stores into it are the file's.
fn through_a_mapping(file: impl Borrow<File>, length: usize, store: impl FnOnce(&mut [u8])) {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a file that is not cut while it is there, unmapped once. Others of the same file are not used at the same moment.
    unsafe {
        let map = libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, file.borrow().as_raw_fd(), 0);
        assert_ne!(map, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        drop(file);
        store(slice::from_raw_parts_mut(map.cast(), length));
        assert_eq!(libc::munmap(map, length), 0);
    }
}

#[test]
fn what_is_passed_through_passes_the_server() {
    if !can_pass() {
        return;
    }
    // Flags; whether who only writes passes, and who reads and writes.
    let cases: [(&[&str], bool, bool); 6] = [
        (&[], true, false),
        (&["--passthrough", "write-only"], true, false),
        (&["--passthrough", "writable"], true, true),
        (&["--passthrough", "none"], false, false),
        (&["--exclusive"], false, false),
        (&["--exclusive", "-o", "passthrough=writable"], true, true),
    ];
    for (flags, writer_passes, both_pass) in cases {
        let mut below = Below::mounted(&TMPFS, flags);
        let tree = below.tree();
        for (name, reads, passes) in [("w", false, writer_passes), ("rw", true, both_pass)] {
            let (before, opened) = (served_bytes(tree), tree.stat("passed_opens"));
            let file = File::options().read(reads).write(true).create_new(true).open(tree.target().join(name)).unwrap();
            for nth in 0..256 {
                file.write_all_at(&[nth as u8; PAGE], nth * PAGE as u64).unwrap();
            }
            if reads {
                let mut read = vec![0; PAGE];
                file.read_exact_at(&mut read, 7 * PAGE as u64).unwrap();
                assert_eq!(read, [7; PAGE]);
                through_a_mapping(&file, 256 * PAGE, |bytes| bytes[9 * PAGE..10 * PAGE].fill(0xee));
                file.sync_all().unwrap();
            }
            let served = served_bytes(tree) - before;
            assert_eq!(served < 200 * PAGE as u64, passes, "{flags:?} {name}: {served} bytes were served");
            assert_eq!(tree.stat("passed_opens") - opened, u64::from(passes), "{flags:?} {name}");
            let whole = fs::read(tree.source().join(name)).unwrap();
            let expected = |nth: usize| if reads && nth == 9 { 0xee } else { nth as u8 };
            assert!(
                whole.len() == 256 * PAGE && (0..256).all(|nth| whole[nth * PAGE..][..PAGE] == [expected(nth); PAGE])
            );
            assert_eq!(fs::read(tree.target().join(name)).unwrap(), whole);
        }
        below.tree().unmount();
    }
}

/// Keeps opening a file as `open` does until that is `served` by the server, or passed: it hears a moment late that others have closed it.
fn opened_as(tree: &Tree, served: bool, open: impl Fn() -> File) -> File {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let before = tree.stat("passed_opens");
        let file = open();
        if (tree.stat("passed_opens") == before) == served {
            return file;
        }
        assert!(Instant::now() < give_up, "served: {}, still", !served);
        drop(file);
        thread::sleep(Duration::from_millis(5));
    }
}

/// Of what is passed through somebody may keep a mapping when he has closed it, as programs do.
#[test]
fn a_mapping_that_outlives_its_handle_is_of_the_same_file() {
    if !can_pass() {
        return;
    }
    let open = |path: &Path, reads, writes| File::options().read(reads).write(writes).open(path).unwrap();
    let holds =
        |read: &[u8], byte| assert!(read == [byte; 4 * PAGE], "{} and {}, not {byte}", read[0], read[4 * PAGE - 1]);
    for flags in [
        &["--passthrough", "writable"][..],
        &["--exclusive", "--passthrough", "writable"],
        &["--passthrough", "write-only"],
    ] {
        let mut below = Below::mounted(&TMPFS, flags);
        let tree = below.tree();
        let path = tree.target().join("f");
        fs::write(&path, vec![0; 4 * PAGE]).unwrap();
        let written = opened_as(tree, false, || open(&path, false, true));
        let mapped = open(&path, true, true);
        through_a_mapping(mapped, 4 * PAGE, |bytes| {
            drop(written);
            for round in 1..50u8 {
                bytes.fill(round);
                holds(&fs::read(&path).unwrap(), round);
                if round % 8 == 0 {
                    tree.drop_kernel_cache();
                    thread::sleep(Duration::from_millis(60));
                }
                through_a_mapping(open(&path, true, true), 4 * PAGE, |others| {
                    holds(others, round);
                    others.fill(round + 100);
                    holds(bytes, round + 100);
                });
                open(&path, false, true).write_all_at(&[round + 150; 4 * PAGE], 0).unwrap();
                holds(bytes, round + 150);
            }
        });
        // And when it has gone it is served again.
        let served = opened_as(tree, true, || open(&path, true, false));
        let mut read = [0; 4 * PAGE];
        served.read_exact_at(&mut read, 0).unwrap();
        holds(&read, 49 + 150);
        drop(served);
        below.tree().unmount();
    }
}

/// With the same length and the same times, again and again: nothing tells its contents apart but that it was passed through.
#[test]
fn nothing_is_left_of_what_a_file_had_before_it_was_passed_through() {
    if !can_pass() {
        return;
    }
    for flags in [&["--passthrough", "writable"][..], &["--exclusive", "--passthrough", "writable"]] {
        let mut below = Below::mounted(&TMPFS, flags);
        let tree = below.tree();
        let path = tree.target().join("f");
        fs::write(&path, vec![0; 64 * PAGE]).unwrap();
        for round in 1..100u8 {
            // Kept by the kernel and here.
            assert_eq!(fs::read(&path).unwrap(), vec![round - 1; 64 * PAGE]);
            if round % 10 == 0 {
                tree.drop_kernel_cache();
            }
            let file = File::options().read(round % 2 == 0).write(true).open(&path).unwrap();
            if round % 4 == 0 {
                through_a_mapping(&file, 64 * PAGE, |bytes| bytes.fill(round));
            } else {
                file.write_all_at(&vec![round; 64 * PAGE], 0).unwrap();
            }
            file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        }
        // Where others may change files, one that was changed a moment ago is not kept.
        let puts = if flags[0] == "--exclusive" { 64 } else { 0 };
        // That a reader has closed it the server may hear a moment late.
        assert!(tree.stat("passed_opens") > 50 && tree.stat("puts") >= puts);
        below.tree().unmount();
    }
}

#[test]
fn whoever_else_has_a_file_open_sees_and_writes_the_same() {
    if !can_pass() {
        return;
    }
    let mut below = Below::mounted(&TMPFS, &["--allow-other", "--passthrough", "write-only"]);
    let tree = below.tree();
    let path = tree.target().join("f");
    let content = || fs::read(tree.source().join("f")).unwrap();
    let served = |path: &Path| File::options().read(true).write(true).open(path).unwrap();
    let mut writer = File::create(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    writer.write_all(b"one").unwrap();
    let reader = File::open(&path).unwrap();
    // Another user, and one past the page cache, are served.
    let other = || as_user(1001, 1001, || File::options().append(true).open(&path)?.write_all(b" two"));
    other().unwrap();
    let direct = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    direct.write_all_at(b" three", 7).unwrap();
    let both = served(&path);
    through_a_mapping(&both, 3, |bytes| bytes.copy_from_slice(b"ONE"));
    let read = |file: &File| {
        let mut read = [0; 100];
        let length = file.read_at(&mut read, 0).unwrap();
        String::from_utf8(read[..length].to_vec()).unwrap()
    };
    for file in [&reader, &direct, &both] {
        assert_eq!(read(file), "ONE two three");
    }
    assert_eq!(tree.stat("passed_opens"), 3, "the first, the reader, and the third of the same user");
    drop((writer, reader, direct, both));
    // Whoever has it open by the server has the others served, too.
    let both = opened_as(tree, true, || served(&path));
    let before = tree.stat("passed_opens");
    File::options().append(true).open(&path).unwrap().write_all(b" four").unwrap();
    assert_eq!(read(&both), "ONE two three four");
    assert_eq!((tree.stat("passed_opens"), content()), (before, b"ONE two three four".to_vec()));
    drop(both);
    below.tree().unmount();
}

#[test]
fn a_file_that_is_passed_through_outlives_the_server_until_it_is_closed() {
    if !can_pass() {
        return;
    }
    let mut below = Below::mounted(&TMPFS, &[]);
    let tree = below.tree();
    let mut file = File::create(tree.target().join("f")).unwrap();
    file.write_all(b"before ").unwrap();
    tree.child.kill().unwrap();
    tree.child.wait().unwrap();
    file.write_all(b"and after").unwrap();
    assert_eq!(fs::read(tree.source().join("f")).unwrap(), b"before and after");
}

#[test]
fn a_file_that_is_open_beside_is_passed_through_until_the_last_is_closed() {
    if !can_pass() {
        return;
    }
    let mut below = Below::mounted(&TMPFS, &["--exclusive", "--passthrough", "write-only"]);
    let tree = below.tree();
    let path = tree.target().join("f");
    fs::write(&path, vec![1; 4 * PAGE]).unwrap();
    fs::read(&path).unwrap();
    let writer = opened_as(tree, false, || File::options().write(true).open(&path).unwrap());
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let mut read = vec![0; 4 * PAGE];
    for round in 2..20 {
        writer.write_all_at(&vec![round; 4 * PAGE], 0).unwrap();
        direct.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, vec![round; 4 * PAGE]);
    }
    drop(writer);
    let writer = File::options().write(true).open(&path).unwrap();
    writer.write_all_at(&vec![20; 4 * PAGE], 0).unwrap();
    direct.read_exact_at(&mut read, 0).unwrap();
    drop(direct);
    assert_eq!((read, fs::read(&path).unwrap()), (vec![20; 4 * PAGE], vec![20; 4 * PAGE]));
    drop(writer);
    assert_eq!(fs::read(&path).unwrap(), vec![20; 4 * PAGE]);
    below.tree().unmount();
}
