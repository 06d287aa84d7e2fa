//! Trees over file systems of a test's own: what those refuse, or do in their own way, is so on the mount.

use std::ffi::{CString, OsString};
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires, skip};
use tempfile::TempDir;

use crate::mount_posix::as_user;
use crate::support::{
    PATIENCE, Stopped, Tree, can_mount, compcache, copy_program, said, sample_until, scratch, tree_is_exclusive,
};

const MIB: usize = 1 << 20;
/// Longer than a file's times need to tell its versions apart.
const SETTLED: Duration = Duration::from_millis(100);

/// A file system that is mounted below the source of a tree, and unmounted after that.
pub struct Below {
    // In this order: the tree lies on it.
    tree: Option<Tree>,
    source: PathBuf,
}

impl Below {
    /// `mount` with these arguments and the place, then a tree over that.
    pub fn mounted(mount: &[&str], arguments: &[&str]) -> Below {
        Below::prepared(
            |directory| run("mount", &[mount, &[path(&directory.path().join("source"))]].concat()),
            arguments,
        )
    }

    /// A tree over what `prepare` mounts at `source` in a directory of its own.
    fn prepared(prepare: impl FnOnce(&TempDir), arguments: &[&str]) -> Below {
        let directory = scratch();
        let source = directory.path().join("source");
        fs::create_dir(&source).unwrap();
        prepare(&directory);
        Below { tree: Some(Tree::mounted_in(directory, arguments)), source }
    }

    pub fn tree(&mut self) -> &mut Tree {
        self.tree.as_mut().expect("it is there until the end")
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        // With the tree its directory goes, which must not have anything mounted in it by then.
        if let Some(mut tree) = self.tree.take() {
            let _ = tree.child.kill();
            let _ = tree.child.wait();
            for place in [&tree.target(), &self.source] {
                let _ = Command::new("umount").arg("-l").arg(place).stderr(Stdio::null()).status();
            }
        }
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a name of ours")
}

#[track_caller]
fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The first bytes of a file, to be stored to, and unmapped by who asks.
fn mapped(file: &File, bytes: usize) -> *mut libc::c_void {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: what is new disturbs nothing that is there.
    let map = unsafe { libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(map, libc::MAP_FAILED, "{}", io::Error::last_os_error());
    map
}

#[test]
fn what_there_is_no_room_for_below_is_not_said_to_be_synced() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let mut below = Below::mounted(&["-t", "tmpfs", "-o", "size=4M", "none"], &[]);
    let tree = below.tree();
    fs::write(tree.source().join("other"), vec![1; 7 * MIB / 2]).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(tree.target().join("f")).unwrap();
    file.set_len(MIB as u64).unwrap();
    let map = mapped(&file, MIB);
    // SAFETY: a mapping of a file that nobody cuts while it is there, written to within its length and unmapped once.
    let (synced, error) = unsafe {
        map.cast::<u8>().write_bytes(7, MIB);
        let synced = libc::msync(map, MIB, libc::MS_SYNC);
        let error = io::Error::last_os_error();
        libc::munmap(map, MIB);
        (synced, error)
    };
    assert_eq!((synced, error.raw_os_error()), (-1, Some(libc::ENOSPC)));
    drop(file);
    below.tree().unmount();
}

#[test]
fn a_direct_write_for_which_there_is_room_in_part_below_says_so() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let mut below = Below::mounted(&["-t", "tmpfs", "-o", "size=4M", "none"], &[]);
    let tree = below.tree();
    fs::write(tree.source().join("other"), vec![1; 7 * MIB / 2]).unwrap();
    let direct =
        File::options().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(tree.target().join("f"));
    let direct = direct.unwrap();
    // By one request.
    let refused = direct.write_at(&vec![7; MIB * 3 / 4], 0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    drop(direct);
    below.tree().unmount();
}

#[test]
fn what_was_stored_through_a_mapping_is_no_hole() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let mut below = Below::mounted(&["-t", "tmpfs", "none"], &[]);
    let tree = below.tree();
    let (place, half) = (tree.target().join("f"), MIB / 2);
    let file = File::options().read(true).write(true).create_new(true).open(&place).unwrap();
    file.set_len(MIB as u64).unwrap();
    // Else what the kernel has is not kept, but written, when it is opened.
    thread::sleep(SETTLED);
    let reads = File::open(&place).unwrap();
    let map = mapped(&file, MIB);
    // SAFETY: a mapping of a file that nobody cuts while it is there, written to within its length.
    unsafe { map.cast::<u8>().add(half).write_bytes(7, 4096) };
    // SAFETY: it takes numbers alone.
    let seek = |from, whence| unsafe { libc::lseek(reads.as_raw_fd(), from, whence) };
    let data = seek(0, libc::SEEK_DATA);
    assert!((0..=half as i64).contains(&data), "{data}: {}", io::Error::last_os_error());
    assert!(seek(half as i64, libc::SEEK_HOLE) > half as i64);
    assert_eq!((seek(MIB as i64, libc::SEEK_DATA), io::Error::last_os_error().raw_os_error()), (-1, Some(libc::ENXIO)));
    run("cp", &[path(&place), path(&tree.target().join("g"))]);
    assert!(fs::read(tree.target().join("g")).unwrap() == fs::read(&place).unwrap());
    // SAFETY: it is there, and nobody uses it any more.
    unsafe { libc::munmap(map, MIB) };
    // By then the file below has it.
    drop((file, reads));
    below.tree().unmount();
    assert_eq!(fs::read(below.source.join("f")).unwrap()[half..half + 4096], [7; 4096]);
}

#[test]
fn files_that_say_they_have_no_length_are_read() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let mut below = Below::mounted(&["--bind", "/proc/sys/kernel"], &[]);
    assert_eq!(fs::read_to_string(below.tree().target().join("ostype")).unwrap(), "Linux\n");
    below.tree().unmount();
}

#[test]
fn an_errno_of_the_kernels_own_reaches_who_asked_by_another_name() {
    if !can_mount(&[]) {
        return;
    }
    // 524, ENOTSUPP: a file system of NFS fails so where its server cannot do something. 512 is another.
    for (below, above) in [(524, libc::EOPNOTSUPP), (512, libc::EIO)] {
        let mut tree = Tree::mounted_where_a_call_fails(libc::SYS_fallocate, below);
        let file = File::create(tree.target().join("f")).unwrap();
        let (send, answer) = mpsc::channel();
        let asks = thread::spawn(move || {
            // SAFETY: it takes numbers alone.
            let failed = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, 4096) };
            send.send((failed, io::Error::last_os_error().raw_os_error())).unwrap();
        });
        let answer = answer.recv_timeout(PATIENCE);
        if answer.is_err() {
            // Nothing else ends it.
            tree.child.kill().unwrap();
        }
        asks.join().unwrap();
        assert_eq!(answer, Ok((-1, Some(above))));
        tree.unmount();
    }
}

#[test]
fn a_name_of_which_nothing_can_be_known_is_listed_with_the_others() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["--remember", "1"]);
    let names = |place: &Path| {
        let mut names: Vec<_> = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let mut made: Vec<_> = (0..50).map(|number| format!("name {number}").into()).collect();
    made.iter().for_each(|name: &OsString| drop(File::create(tree.source().join(name)).unwrap()));
    // The one whose server has died answers nothing, whoever asks.
    let dead = tree.source().join("dead");
    fs::create_dir(&dead).unwrap();
    made.push("dead".into());
    made.sort();
    let mut inner = Tree::mounted(&[]);
    run("mount", &["--bind", path(&inner.target()), path(&dead)]);
    inner.child.kill().unwrap();
    inner.child.wait().unwrap();
    let (above, below) = (names(&tree.target()), names(&tree.source()));
    let error = fs::metadata(tree.target().join("dead")).map_err(|error| error.raw_os_error());
    run("umount", &["-l", path(&dead)]);
    assert_eq!(above, made);
    assert_eq!(below, made);
    let dead = [libc::ENOTCONN, libc::ECONNABORTED, libc::ECANCELED].map(Some);
    assert!(error.as_ref().is_err_and(|error| dead.contains(error)), "{error:?}");
}

/// An overlayfs on a directory's `source`, without an index, with what `fill` makes in its lower layer.
fn overlay(directory: &TempDir, fill: impl Fn(&Path)) {
    let layers = directory.path().join("layers");
    fs::create_dir(&layers).unwrap();
    run("mount", &["-t", "tmpfs", "none", path(&layers)]);
    let [lower, upper, work] = ["lower", "upper", "work"].map(|name| layers.join(name));
    [&lower, &upper, &work].iter().for_each(|layer| fs::create_dir(layer).unwrap());
    fill(&lower);
    let options = format!("index=off,lowerdir={},upperdir={},workdir={}", path(&lower), path(&upper), path(&work));
    run("mount", &["-t", "overlay", "-o", &options, "none", path(&directory.path().join("source"))]);
    // The overlay has it.
    run("umount", &["-l", path(&layers)]);
}

fn append(file: &Path, more: &[u8]) {
    let mut file = File::options().append(true).open(file).unwrap();
    file.write_all(more).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn an_open_file_of_a_lower_layer_stays_the_same_when_it_is_copied_up() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let one = |lower: &Path| fs::write(lower.join("f"), "of the lower layer").unwrap();
    let mut below = Below::prepared(|directory: &TempDir| overlay(directory, one), &[]);
    let file = below.tree().target().join("f");
    let number = fs::metadata(&file).unwrap().ino();
    let open = File::options().read(true).write(true).open(&file).unwrap();
    assert_eq!(fs::metadata(&file).unwrap().ino(), number, "another number: this shows nothing");
    open.write_all_at(b"OF THE UPPER", 0).unwrap();
    open.sync_all().unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"OF THE UPPER layer");
    assert_eq!(open.metadata().unwrap().ino(), number);
    drop(open);
    below.tree().unmount();
}

/// Which they are until the first is written to; links of the upper layer are one file for ever.
#[test]
fn hard_links_of_a_lower_layer_are_files_of_their_own_when_they_are_written_to() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let links = |lower: &Path| {
        fs::write(lower.join("a"), "one").unwrap();
        ["b", "c", "d"].iter().for_each(|name| fs::hard_link(lower.join("a"), lower.join(name)).unwrap());
    };
    for flags in [&[][..], &["--exclusive"], &["--remember", "60"]] {
        let mut below = Below::prepared(|directory: &TempDir| overlay(directory, links), flags);
        let tree = below.tree();
        let (source, target) = (tree.source().to_owned(), tree.target().to_owned());
        let all = |expected: [&str; 4]| {
            for (name, expected) in ["a", "b", "c", "d"].into_iter().zip(expected) {
                assert_eq!(fs::read_to_string(target.join(name)).unwrap(), expected, "{name} with {flags:?}");
                assert_eq!(fs::read_to_string(source.join(name)).unwrap(), expected, "{name} below with {flags:?}");
            }
        };
        all(["one"; 4]);
        let append = |name: &str, more: &[u8]| append(&target.join(name), more);
        append("b", b" more");
        all(["one", "one more", "one", "one"]);
        fs::set_permissions(target.join("c"), Permissions::from_mode(0o600)).unwrap();
        let modes = ["a", "b", "c", "d"].map(|name| fs::metadata(source.join(name)).unwrap().mode() & 0o777);
        assert_eq!(modes, [0o644, 0o644, 0o600, 0o644]);
        fs::rename(target.join("d"), target.join("e")).unwrap();
        fs::write(target.join("e"), "of the fourth").unwrap();
        append("a", b" and only");
        fs::rename(target.join("e"), target.join("d")).unwrap();
        all(["one and only", "one more", "one", "of the fourth"]);
        below.tree().unmount();
    }
}

/// Those that come into the upper layer at one moment look the same there.
#[test]
fn what_is_kept_of_one_hard_link_of_a_lower_layer_is_not_another_s() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let names = || (100..400).map(|number| number.to_string());
    let links = |lower: &Path| {
        fs::write(lower.join("000"), "---").unwrap();
        names().for_each(|name| fs::hard_link(lower.join("000"), lower.join(name)).unwrap());
    };
    for flags in [&[][..], &["--exclusive"]] {
        let mut below = Below::prepared(|directory: &TempDir| overlay(directory, links), flags);
        let files = names().map(|name| below.tree().target().join(name));
        let files = files.inspect(|file| assert_eq!(fs::read(file).unwrap(), b"---")).collect::<Vec<_>>();
        // One after another without a pause.
        files.iter().for_each(|file| fs::set_permissions(file, Permissions::from_mode(0o600)).unwrap());
        for (file, name) in files.iter().zip(names()) {
            fs::write(file, name).unwrap();
        }
        for (file, name) in files.iter().zip(names()) {
            assert_eq!(fs::read_to_string(file).unwrap(), name, "with {flags:?}");
        }
        below.tree().unmount();
    }
}

/// As soon as it is looked up again: where names are remembered, in an exclusive tree above all, that is late ([S109]).
#[test]
fn hard_links_of_an_upper_layer_are_one_file() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let links = |lower: &Path| {
        fs::write(lower.join("a"), "one").unwrap();
        fs::hard_link(lower.join("a"), lower.join("b")).unwrap();
    };
    let mut below = Below::prepared(|directory: &TempDir| overlay(directory, links), &[]);
    let (source, target) = (below.tree().source().to_owned(), below.tree().target().to_owned());
    let append = |name: &str, more: &[u8]| append(&target.join(name), more);
    append("b", b" more");
    fs::hard_link(target.join("b"), target.join("x")).unwrap();
    append("x", b" by both");
    let all = |tree: &Path| ["a", "b", "x"].map(|name| fs::read_to_string(tree.join(name)).unwrap());
    let expected = ["one", "one more by both", "one more by both"].map(str::to_owned);
    assert_eq!(all(&source), expected);
    if !tree_is_exclusive() {
        assert_eq!(all(&target), expected);
        let number = |name: &str| fs::metadata(target.join(name)).unwrap().ino();
        sample_until("both names have one number", 10, || (number("b") == number("x")).then_some(()));
    }
    below.tree().unmount();
}

/// Its device has the number of the one before: what that was says nothing of it.
#[test]
fn a_file_system_that_comes_in_the_place_of_another_is_what_it_is() {
    // An exclusive tree need not see it come.
    if tree_is_exclusive() || !can_mount(&["mount", "umount"]) {
        return;
    }
    let mut below = Below::mounted(&["-t", "tmpfs", "none"], &[]);
    let (source, target) = (below.tree().source().to_owned(), below.tree().target().to_owned());
    let [lower, upper, work, inner] = ["lower", "upper", "work", "inner"].map(|name| source.join(name));
    [&lower, &upper, &work, &inner].iter().for_each(|directory| fs::create_dir(directory).unwrap());
    fs::write(lower.join("a"), "one").unwrap();
    fs::hard_link(lower.join("a"), lower.join("b")).unwrap();
    run("mount", &["-t", "tmpfs", "none", path(&inner)]);
    fs::write(inner.join("f"), "of the first").unwrap();
    assert_eq!(fs::read_to_string(target.join("inner/f")).unwrap(), "of the first");
    let device = fs::metadata(&inner).unwrap().dev();
    run("umount", &["-l", path(&inner)]);
    let options = format!("index=off,lowerdir={},upperdir={},workdir={}", path(&lower), path(&upper), path(&work));
    // The kernel takes the lowest that is free, which it is as soon as nobody has the first.
    sample_until("the number is free", 20, || {
        assert!(fs::read_dir(target.join("inner")).is_ok_and(|mut listed| listed.next().is_none()));
        run("mount", &["-t", "overlay", "-o", &options, "none", path(&inner)]);
        let is_again = fs::metadata(inner.join("a")).unwrap().dev() == device;
        if !is_again {
            run("umount", &[path(&inner)]);
        }
        is_again.then_some(())
    });
    let all = |tree: &Path| ["a", "b"].map(|name| fs::read_to_string(tree.join("inner").join(name)).unwrap());
    assert_eq!(all(&target), ["one", "one"]);
    append(&target.join("inner/a"), b" more");
    append(&target.join("inner/b"), b" of its own");
    let expected = ["one more", "one of its own"];
    assert_eq!((all(&source), all(&target)), (expected.map(str::to_owned), expected.map(str::to_owned)));
    run("umount", &["-l", path(&inner)]);
    below.tree().unmount();
}

#[test]
fn files_that_may_only_be_appended_to_are() {
    if !can_mount(&["mount", "umount", "chattr"]) || !requires(&[Feature::TmpfsAttributes]) {
        return;
    }
    let mut below = Below::mounted(&["-t", "tmpfs", "none"], &[]);
    let tree = below.tree();
    let (source, target) = (tree.source().join("f"), tree.target().join("f"));
    fs::write(&source, "begun").unwrap();
    run("chattr", &["+a", path(&source)]);
    let refused = |error: io::Result<File>| error.unwrap_err().raw_os_error();
    assert_eq!(refused(File::options().write(true).open(&target)), Some(libc::EPERM));
    assert_eq!(refused(File::options().write(true).truncate(true).open(&target)), Some(libc::EPERM));
    let mut file = File::options().read(true).append(true).open(&target).unwrap();
    for _ in 0..2000 {
        file.write_all(b" and more").unwrap();
    }
    let expected = format!("begun{}", " and more".repeat(2000));
    assert_eq!(fs::read_to_string(&source).unwrap(), expected);
    assert_eq!(fs::read_to_string(&target).unwrap(), expected);
    // Neither through a mapping nor after a change of its mind: it is at the end that each would be written.
    let map = mapped(&file, 4096);
    // SAFETY: a mapping of a file that nobody cuts while it is there, written to within its length and unmapped once; numbers else.
    let (synced, error) = unsafe {
        map.cast::<u8>().write_bytes(b'x', 10);
        let synced = libc::msync(map, 4096, libc::MS_SYNC);
        let error = io::Error::last_os_error().raw_os_error();
        libc::munmap(map, 4096);
        assert_eq!(libc::fcntl(file.as_raw_fd(), libc::F_SETFL, 0), 0);
        (synced, error)
    };
    assert_eq!((synced, error), (-1, Some(libc::EPERM)));
    let refused = file.write_all_at(b"y", 0).unwrap_err().raw_os_error();
    // Or what could not be written back before is told once more, as the kernel tells it.
    assert!([Some(libc::EPERM), Some(libc::EIO)].contains(&refused), "{refused:?}");
    assert_eq!(fs::read_to_string(&source).unwrap(), expected);
    drop(file);
    run("chattr", &["-a", path(&source)]);
    below.tree().unmount();
}

#[test]
fn a_long_direct_append_that_there_is_no_room_for_leaves_nothing_out_of_its_middle() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let mut below = Below::mounted(&["-t", "tmpfs", "-o", "size=12M", "none"], &[]);
    let tree = below.tree();
    let open = File::options().append(true).create(true).custom_flags(libc::O_DIRECT).open(tree.target().join("f"));
    let mut file = open.unwrap();
    let content: Vec<u8> = (0..4u32 << 20).flat_map(u32::to_ne_bytes).collect();
    for _ in 0..5 {
        assert_eq!(file.write(&content).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        let written = fs::read(tree.source().join("f")).unwrap();
        assert!(written == content[..written.len()], "{} bytes", written.len());
        file.set_len(0).unwrap();
        file.write_all(&content[..8 * MIB]).unwrap();
        assert!(fs::read(tree.source().join("f")).unwrap() == content[..8 * MIB]);
        file.set_len(0).unwrap();
    }
    drop(file);
    below.tree().unmount();
}

#[test]
fn what_was_read_before_the_end_of_a_write_behind_the_mount_is_not_kept_if_that_is_watched_for() {
    if !can_mount(&["python3"]) {
        return;
    }
    let tree = Tree::mounted(&["--watch"]);
    let (old, new) = (vec![1; 4 * MIB], vec![2; 4 * MIB]);
    fs::write(tree.source().join("f"), &old).unwrap();
    // What is written comes from a file of a tree whose server is stopped until below. By then the file that is written to has its time.
    let slow = Tree::mounted(&[]);
    fs::write(slow.source().join("new"), &new).unwrap();
    let modified = || fs::metadata(tree.source().join("f")).unwrap().modified().unwrap();
    thread::sleep(SETTLED);
    let above = File::open(tree.target().join("f")).unwrap();
    let before = modified();
    let program = "import mmap, os, sys
new, f = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_WRONLY)
new = mmap.mmap(new, 0, prot=mmap.PROT_READ)
print('ready', flush=True)
input()
assert os.pwrite(f, new, 0) == len(new)";
    let mut writer = Command::new("python3");
    writer.args(["-c", program]).arg(slow.target().join("new")).arg(tree.source().join("f"));
    let mut writer = writer.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    writer.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    let stopped = Stopped::of(&slow.child);
    writer.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    let begun = Instant::now();
    while modified() == before {
        assert!(begun.elapsed() < PATIENCE, "the write does not begin");
        thread::sleep(Duration::from_millis(10));
    }
    thread::sleep(SETTLED);
    let last = |file: &File| {
        let mut page = [0; 4096];
        file.read_exact_at(&mut page, (4 * MIB - 4096) as u64).unwrap();
        page[0]
    };
    let (read, reads) = mpsc::channel();
    let reader = above.try_clone().unwrap();
    let reader = thread::spawn(move || _ = read.send(last(&reader)));
    let was = reads.recv_timeout(PATIENCE);
    drop(stopped);
    assert!(writer.wait().unwrap().success());
    reader.join().unwrap();
    if was.is_err() {
        // XFS, for one.
        return skip("a read waits for the end of a write here");
    }
    assert_eq!(was, Ok(1));
    let begun = Instant::now();
    while last(&above) != 2 {
        assert!(begun.elapsed() < PATIENCE, "what was there before is read still");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A file system of which half is left for root.
fn half_for_root(directory: &TempDir, options: &str) {
    let image = directory.path().join("image");
    File::create(&image).unwrap().set_len(64 << 20).unwrap();
    run("mkfs.ext4", &["-q", "-m", "50", path(&image)]);
    run("mount", &["-o", options, path(&image), path(&directory.path().join("source"))]);
}

#[test]
fn what_is_left_for_a_group_below_is_not_used_up_by_others_because_the_server_is_in_it() {
    if !can_mount(&["mount", "umount", "mkfs.ext4"]) || !requires(&[Feature::Loop]) {
        return;
    }
    let directory = scratch();
    let source = directory.path().join("source");
    fs::create_dir(&source).unwrap();
    half_for_root(&directory, "loop,resgid=1234");
    let tree = Tree::mounted_in_group(directory, 1234, &["--allow-other"]);
    let mut below = Below { tree: Some(tree), source };
    let tree = below.tree();
    fs::set_permissions(tree.source(), fs::Permissions::from_mode(0o777)).unwrap();
    let refused = as_user(1001, 1001, || {
        let mut file = File::create(tree.target().join("f"))?;
        (0..64).try_for_each(|_| file.write_all(&[7; MIB]))?;
        file.sync_all()
    });
    assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert!(free_mib(&tree.source()).0 >= 25, "{:?}", free_mib(&tree.source()));
    below.tree().unmount();
}

#[test]
fn who_holds_leases_below_keeps_nobody_waiting_but_who_opens_those_files() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    const FILES: usize = 40;
    /// fcntl(2), of <asm-generic/fcntl.h>.
    const F_SETSIG: i32 = 10;
    let mut below = Below::mounted(&["-t", "tmpfs", "none"], &["--allow-other"]);
    let tree = below.tree();
    fs::write(tree.source().join("other"), "not leased").unwrap();
    let held: Vec<File> = (0..FILES)
        .map(|number| {
            let file = File::create(tree.source().join(number.to_string())).unwrap();
            // SAFETY: numbers only. The signal of a lease that is wanted is one that ends nobody.
            unsafe {
                assert_eq!(libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG), 0);
                assert_eq!(libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK), 0);
            }
            file
        })
        .collect();
    let (send, opened) = mpsc::channel();
    for number in 0..FILES {
        let (send, path) = (send.clone(), tree.target().join(number.to_string()));
        thread::spawn(move || _ = send.send(File::open(path).map(drop).map_err(|error| error.raw_os_error())));
    }
    // All but one are told.
    let told: Vec<_> = (1..FILES).map_while(|_| opened.recv_timeout(PATIENCE).ok()).collect();
    let (send, read) = mpsc::channel();
    let other = tree.target().join("other");
    thread::spawn(move || _ = send.send(fs::read(other).unwrap()));
    let read = read.recv_timeout(PATIENCE);
    drop(held);
    let last = opened.recv_timeout(PATIENCE);
    assert_eq!(read.as_deref(), Ok(&b"not leased"[..]));
    assert_eq!(told, [Err(Some(libc::EAGAIN)); FILES - 1]);
    assert_eq!(last, Ok(Ok(())), "who waited");
    File::open(tree.target().join("7")).unwrap();
    below.tree().unmount();
}

#[test]
fn what_a_mount_inside_the_source_forbids_is_forbidden_there() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let sticks = |directory: &TempDir| {
        let source = directory.path().join("source");
        run("mount", &["-t", "tmpfs", "none", path(&source)]);
        for (name, options) in [("free", "exec"), ("nosuid", "nosuid"), ("nodev", "nodev"), ("noexec", "noexec")] {
            fs::create_dir(source.join(name)).unwrap();
            run("mount", &["-t", "tmpfs", "-o", options, "none", path(&source.join(name))]);
        }
    };
    let mut below = Below::prepared(sticks, &["--allow-other"]);
    let tree = below.tree();
    let found = ["free", "nosuid", "nodev", "noexec"].map(|name| {
        let (source, target) = (tree.source().join(name), tree.target().join(name));
        fs::create_dir(source.join("d")).unwrap();
        // In a directory of its own: what holds for a mount holds all the way down.
        let (program, device) = (source.join("d/id"), source.join("d/null"));
        copy_program(Path::new("/usr/bin/id"), &program);
        let capabilities = [0x0200_0000u32, 1 << 10, 0, 0, 0].map(u32::to_le_bytes).concat();
        let (at, kind) = (CString::new(path(&program)).unwrap(), c"security.capability".as_ptr());
        fs::set_permissions(&program, fs::Permissions::from_mode(0o6755)).unwrap();
        let node = CString::new(path(&device)).unwrap();
        // SAFETY: names and a value that live until each call returns.
        unsafe {
            assert_eq!(libc::setxattr(at.as_ptr(), kind, capabilities.as_ptr().cast(), capabilities.len(), 0), 0);
            assert_eq!(libc::mknod(node.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(1, 3)), 0);
        }
        fs::set_permissions(&device, fs::Permissions::from_mode(0o666)).unwrap();
        let (program, device) = (target.join("d/id"), target.join("d/null"));
        let at = CString::new(path(&program)).unwrap();
        // SAFETY: names that live until the call returns.
        let has_capability = unsafe { libc::getxattr(at.as_ptr(), kind, ptr::null_mut(), 0) } > 0;
        let mode = fs::metadata(&program).unwrap().mode() & 0o7777;
        let ran = Command::new(&program).arg("-u").uid(1001).gid(1001).output();
        let user = ran.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        let opened = as_user(1001, 1001, || File::open(&device).map(drop));
        let error = |error: io::Error| error.raw_os_error();
        (mode, has_capability, user.map_err(error), opened.map_err(error))
    });
    let ran = |user: &str| Ok(user.to_owned());
    let expected = [
        (0o6755, true, ran("0"), Ok(())),
        (0o755, false, ran("1001"), Ok(())),
        (0o6755, true, ran("0"), Err(Some(libc::ENXIO))),
        (0o6755, true, Err(Some(libc::EACCES)), Ok(())),
    ];
    assert_eq!(found, expected);
    below.tree().unmount();
}

/// As it is where there is no mount between: below, in another directory.
#[test]
fn what_others_leave_and_change_is_as_it_would_be_below() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let mut below = Below::mounted(&["-t", "tmpfs", "-o", "mode=1777", "none"], &["--allow-other"]);
    let tree = below.tree();
    let found = [tree.source(), tree.target()].map(|tree| {
        let in_it = |name: &str| CString::new(path(&tree.join(name))).unwrap();
        let (from, to) = (in_it("from"), in_it("to"));
        let file = tree.join("of_root");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o2666)).unwrap();
        as_user(1001, 1001, || {
            File::create(tree.join("from"))?;
            // SAFETY: names that live until the call returns.
            let moved = unsafe {
                let (here, whiteout) = (libc::AT_FDCWD, libc::RENAME_WHITEOUT);
                libc::renameat2(here, from.as_ptr(), here, to.as_ptr(), whiteout)
            };
            assert_eq!(moved, 0, "{}", io::Error::last_os_error());
            File::options().write(true).open(&file)?.write_all(b"more")
        })
        .unwrap();
        let whiteout = fs::symlink_metadata(tree.join("from")).unwrap();
        let found = (whiteout.uid(), whiteout.gid(), fs::metadata(&file).unwrap().mode() & 0o7777);
        ["from", "to", "of_root"].iter().for_each(|name| fs::remove_file(tree.join(name)).unwrap());
        found
    });
    assert_eq!(found, [(1001, 1001, 0o666); 2]);
    below.tree().unmount();
}

#[test]
fn what_is_left_for_root_below_is_not_used_up_by_others() {
    if !can_mount(&["mount", "umount", "mkfs.ext4"]) || !requires(&[Feature::Loop]) {
        return;
    }
    let mut below = Below::prepared(|directory| half_for_root(directory, "loop"), &["--allow-other"]);
    let tree = below.tree();
    fs::set_permissions(tree.source(), fs::Permissions::from_mode(0o777)).unwrap();
    let fill = |name: &str, flags: i32| {
        let mut file = File::options().append(true).create(true).custom_flags(flags).open(tree.target().join(name))?;
        _ = (0..64).try_for_each(|_| file.write_all(&[7; MIB]));
        file.sync_all()?;
        // What ext4 had set aside for blocks that had no place yet is free again when they have.
        let result = (0..64 << 10).try_for_each(|_| file.write_all(&[7; 1024]));
        file.sync_all().and(result)
    };
    let refused = |result: io::Result<()>| result.unwrap_err().raw_os_error();
    // Attributes so long that each takes a block of its own, of 1 KiB.
    let with_attributes: Vec<_> = (0..1200).map(|nth| tree.target().join(format!("x{nth}"))).collect();
    as_user(1001, 1001, || with_attributes.iter().for_each(|file| _ = File::create(file).unwrap()));
    for (name, flags) in [("f", 0), ("g", libc::O_DIRECT)] {
        assert_eq!(as_user(1001, 1001, || refused(fill(name, flags))), Some(libc::ENOSPC));
        let long = |file: &PathBuf| {
            let value = path(file).repeat(600).into_bytes();
            rustix::fs::setxattr(file, "user.x", &value[..600], rustix::fs::XattrFlags::empty())
        };
        let long = as_user(1001, 1001, || with_attributes.iter().try_for_each(long));
        assert_eq!(long.map_err(|error| error.raw_os_error()), Err(libc::ENOSPC));
        let (all, for_him) = free_mib(&tree.source());
        assert!(all >= 25 && for_him <= 1, "{name}: {all} MiB are free, {for_him} for him");
        fs::remove_file(tree.target().join(name)).unwrap();
        let give_up = Instant::now() + PATIENCE;
        while free_mib(&tree.source()).1 < 20 {
            assert!(Instant::now() < give_up, "the file is gone, and its room is not");
            thread::sleep(Duration::from_millis(10));
        }
    }
    let allocated = as_user(1001, 1001, || {
        let file = File::create(tree.target().join("h"))?;
        // SAFETY: numbers only.
        match unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, 45 << 20) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    });
    assert_eq!(refused(allocated), Some(libc::ENOSPC));
    // Root may, and is root still.
    fs::remove_file(tree.target().join("h")).unwrap();
    assert_eq!(refused(fill("root", 0)), Some(libc::ENOSPC));
    assert!(free_mib(&tree.source()).0 <= 4, "{:?}", free_mib(&tree.source()));
    below.tree().unmount();
}

/// How many MiB of a file system are free: all, and for others than root.
fn free_mib(place: &Path) -> (u64, u64) {
    let place = CString::new(path(place)).unwrap();
    // SAFETY: all zeroes is a statvfs; the call fills it, and reads a name that lives until it returns.
    let stat = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        assert_eq!(libc::statvfs(place.as_ptr(), &mut stat), 0);
        stat
    };
    ((stat.f_bfree * stat.f_frsize) >> 20, (stat.f_bavail * stat.f_frsize) >> 20)
}

#[test]
fn a_mount_point_that_is_no_text_is_in_no_mounts_way() {
    if !can_mount(&["unshare"]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    // Only there: what else reads the table should not meet it.
    let script = r#"
other="$1/$(printf '\377')"; mkdir "$other" && mount -t tmpfs none "$other" || exit 1
"$0" show --json "$2" >/dev/null && "$0" remount --memory 8M "$2" && "$0" umount "$2"
"#;
    let (elsewhere, target) = (tree.source(), tree.target());
    let arguments = [elsewhere.as_os_str(), target.as_os_str()];
    let output = Command::new("unshare").args(["-m", "sh", "-c", script]).arg(compcache()).args(arguments).output();
    let output = output.expect("unshare runs");
    assert!(output.status.success(), "{}", said(&output));
    tree.unmount();
}

#[test]
fn who_owns_a_file_no_more_changes_neither_its_mode_nor_its_group_nor_its_acl() {
    const USER: u32 = 1234;
    /// The owner may all, others nothing.
    const ACL: [u32; 7] = [2, 7 << 16 | 1, !0, 4, !0, 0x20, !0];
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&["--allow-other"]);
    let (above, below) = (tree.target().join("f"), tree.source().join("f"));
    let file = as_user(USER, USER, || File::create(&above)).unwrap();
    let change = || {
        let acl = ACL.map(u32::to_le_bytes).concat();
        let acl = |name| rustix::fs::fsetxattr(&file, name, &acl, rustix::fs::XattrFlags::empty());
        let group = rustix::process::Gid::from_raw(USER);
        [
            rustix::fs::fchmod(&file, 0o6755.into()),
            rustix::fs::fchown(&file, None, Some(group)),
            acl("system.posix_acl_access"),
        ]
    };
    let [mode, group, acl] = as_user(USER, USER, change);
    assert_eq!((mode, group), (Ok(()), Ok(())));
    if acl != Err(rustix::io::Errno::OPNOTSUPP) {
        assert_eq!((acl, fs::metadata(&below).unwrap().mode()), (Ok(()), 0o100700));
    }
    // The kernel above has not looked since.
    std::os::unix::fs::chown(&below, Some(0), Some(0)).unwrap();
    fs::set_permissions(&below, fs::Permissions::from_mode(0o600)).unwrap();
    for refused in as_user(USER, USER, change) {
        assert!(matches!(refused, Err(rustix::io::Errno::PERM | rustix::io::Errno::OPNOTSUPP)), "{refused:?}");
    }
    let now = fs::metadata(&below).unwrap();
    assert_eq!((now.mode(), now.uid(), now.gid()), (0o100600, 0, 0));
    drop(file);
    tree.unmount();
}
