//! Files that the kernel reads and writes past the server: `mount --passthrough`.
//!
//! What files are holds of them as of others: [`crate::mount_posix`] and [`crate::mount_below`] are run once more where they are passed through, and where none are. Unless
//! it is said otherwise the trees lie on tmpfs: not every file system under a build directory can be passed to (overlayfs).

use std::borrow::Borrow;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

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
    run_again_with(&["mount_posix", "mount_below", "mount_clients"], &but, &["--passthrough=writable"]);
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

/// A shared mapping of the first bytes of a file, which is closed by then if it is given away.
struct Mapping {
    start: *mut u8,
    length: usize,
}

impl Mapping {
    fn of(file: impl Borrow<File>, length: usize) -> Mapping {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let file = file.borrow().as_raw_fd();
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let map = unsafe { libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, file, 0) };
        assert_ne!(map, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Mapping { start: map.cast(), length }
    }

    fn fill(&self, range: Range<usize>, byte: u8) {
        assert!(range.end <= self.length);
        // SAFETY: within the mapping, of a file that is not cut; others may store there, and so it is volatile.
        range.for_each(|at| unsafe { self.start.add(at).write_volatile(byte) });
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: as above.
        (0..self.length).map(|at| unsafe { self.start.add(at).read_volatile() }).collect()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: a mapping of its own, used by nobody any more.
        unsafe { libc::munmap(self.start.cast(), self.length) };
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
                Mapping::of(&file, 256 * PAGE).fill(9 * PAGE..10 * PAGE, 0xee);
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
    let whole = 0..4 * PAGE;
    let holds = |read: &[u8], byte| {
        assert!(read == [byte; 4 * PAGE], "{} and {}, not {byte}", read[0], read[4 * PAGE - 1]);
    };
    let modes: [&[&str]; 3] = [
        &["--passthrough", "writable"],
        &["--exclusive", "--passthrough", "writable"],
        &["--passthrough", "write-only"],
    ];
    for flags in modes {
        let mut below = Below::mounted(&TMPFS, flags);
        let tree = below.tree();
        let name = |nth: u8| tree.target().join(nth.to_string());
        fs::write(name(0), vec![0; 4 * PAGE]).unwrap();
        let written = opened_as(tree, false, || open(&name(0), false, true));
        let mapping = Mapping::of(open(&name(0), true, true), 4 * PAGE);
        drop(written);
        for round in 1..48u8 {
            // By whatever name.
            match round % 3 {
                0 => fs::rename(name(round - 1), name(round)).unwrap(),
                1 => {
                    fs::hard_link(name(round - 1), name(round)).unwrap();
                    fs::remove_file(name(round - 1)).unwrap();
                }
                _ => fs::hard_link(name(round - 1), name(round)).unwrap(),
            }
            let path = name(round);
            mapping.fill(whole.clone(), round);
            holds(&fs::read(&path).unwrap(), round);
            if round % 8 == 0 {
                tree.drop_kernel_cache();
                thread::sleep(Duration::from_millis(60));
            }
            let other = Mapping::of(open(&path, true, true), 4 * PAGE);
            holds(&other.bytes(), round);
            other.fill(whole.clone(), round + 100);
            holds(&mapping.bytes(), round + 100);
            drop(other);
            open(&path, false, true).write_all_at(&[round + 150; 4 * PAGE], 0).unwrap();
            holds(&mapping.bytes(), round + 150);
        }
        drop(mapping);
        // And when it has gone it is served again.
        let served = opened_as(tree, true, || open(&name(47), true, false));
        let mut read = [0; 4 * PAGE];
        served.read_exact_at(&mut read, 0).unwrap();
        holds(&read, 47 + 150);
        drop(served);
        below.tree().unmount();
    }
}

/// The kernel is told to forget what was passed through, and not what somebody has mounted on it, wherever that can be seen.
#[test]
fn what_is_mounted_on_a_file_that_was_passed_through_stays() {
    if !can_pass() || !requires(&[Feature::FusePrune, Feature::Program("unshare")]) {
        return;
    }
    let mut below = Below::mounted(&TMPFS, &["--passthrough", "writable"]);
    let tree = below.tree();
    let (path, other) = (tree.target().join("f"), tree.source().join("other"));
    fs::write(&path, "the file").unwrap();
    fs::write(&other, "what is on it").unwrap();
    let script = r#"mount --bind "$2" "$1" && echo mounted && read go && exec cat "$1""#;
    let mut elsewhere = Command::new("unshare");
    elsewhere.args(["-m", "sh", "-c", script, "sh"]).arg(&path).arg(&other);
    let mut child = elsewhere.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "mounted\n");
    let before = tree.stat("passed_opens");
    for _ in 0..20 {
        File::options().read(true).write(true).open(&path).unwrap().write_all(b"THE FILE").unwrap();
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(tree.stat("passed_opens"), before + 20);
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let mut shown = String::new();
    said.read_to_string(&mut shown).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(shown, "what is on it");
    // Nobody keeps it from being served.
    drop(opened_as(tree, true, || File::open(&path).unwrap()));
    assert_eq!(fs::read(&path).unwrap(), b"THE FILE");
    below.tree().unmount();
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
                Mapping::of(&file, 64 * PAGE).fill(0..64 * PAGE, round);
            } else {
                file.write_all_at(&vec![round; 64 * PAGE], 0).unwrap();
            }
            file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        }
        // Where others may change files, one that was changed a moment ago is not kept.
        let puts = if flags[0] == "--exclusive" { 64 } else { 0 };
        // That a reader has closed it the server may hear a moment late; so it may that nobody has it mapped.
        opened_as(tree, true, || File::open(&path).unwrap()).read_exact(&mut [0; 64 * PAGE]).unwrap();
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
    Mapping::of(&both, 3).fill(0..3, b'-');
    let read = |file: &File| {
        let mut read = [0; 100];
        let length = file.read_at(&mut read, 0).unwrap();
        String::from_utf8(read[..length].to_vec()).unwrap()
    };
    for file in [&reader, &direct, &both] {
        assert_eq!(read(file), "--- two three");
    }
    assert_eq!(tree.stat("passed_opens"), 3, "the first, the reader, and the third of the same user");
    drop((writer, reader, direct, both));
    // Whoever has it open by the server has the others served, too.
    let both = opened_as(tree, true, || served(&path));
    let before = tree.stat("passed_opens");
    File::options().append(true).open(&path).unwrap().write_all(b" four").unwrap();
    assert_eq!(read(&both), "--- two three four");
    assert_eq!((tree.stat("passed_opens"), content()), (before, b"--- two three four".to_vec()));
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
