//! What programs do to files gives the same on a mounted tree as on the tree itself: the same results, the same errno.
//!
//! Each list of steps is carried out twice, in an empty directory of the file system below and in one that is mounted; what it wrote down must be
//! equal, line for line. What differs on purpose is left out here and has a number in docs/semantics.md ([S109]).

use std::ffi::CString;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{self as unix, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{Mounted, Tree, can_mount};

/// What was done, and what came of it.
#[derive(Default)]
struct Log(Vec<String>);

impl Log {
    fn add<T: Debug>(&mut self, what: &str, result: io::Result<T>) {
        let result = result.map_err(|error| error.raw_os_error());
        self.0.push(format!("{what}: {result:?}"));
    }
}

macro_rules! step {
    ($log:ident, $what:expr) => {
        $log.add(stringify!($what), (|| -> io::Result<_> { Ok($what) })())
    };
}

/// Carries `steps` out in both places, and compares.
#[track_caller]
fn same(steps: impl Fn(&Path, &mut Log)) {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["--allow-other"]);
    let plain = crate::support::scratch();
    fs::set_permissions(plain.path(), Permissions::from_mode(0o777)).unwrap();
    let (mut expected, mut found) = (Log::default(), Log::default());
    steps(plain.path(), &mut expected);
    steps(&tree.target(), &mut found);
    for (expected, found) in expected.0.iter().zip(&found.0) {
        assert_eq!(found, expected);
    }
    assert_eq!(found.0.len(), expected.0.len());
    assert!(!expected.0.is_empty());
}

fn c(path: impl AsRef<Path>) -> CString {
    CString::new(path.as_ref().as_os_str().as_bytes()).unwrap()
}

fn checked(result: i64) -> io::Result<i64> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Calls a function of the C library's that takes no more than numbers and pointers that outlive the call.
macro_rules! call {
    ($function:ident ( $($argument:expr),* )) => {
        // SAFETY: the pointers among the arguments are to values that live until the call returns.
        checked(unsafe { libc::$function($($argument),*) } as i64)?
    };
}

/// Does something as another user; the rights of a thread are its own.
pub fn as_user<T: Send>(uid: u32, gid: u32, what: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(move || {
            // SAFETY: numbers only; by the raw call they are this thread's alone.
            unsafe {
                assert_eq!(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()), 0);
                assert_eq!(libc::syscall(libc::SYS_setresgid, gid, gid, gid), 0);
                assert_eq!(libc::syscall(libc::SYS_setresuid, uid, uid, uid), 0);
            }
            what()
        });
        thread.join().unwrap()
    })
}

fn state(path: &Path) -> io::Result<String> {
    let m = fs::symlink_metadata(path)?;
    let kind = if m.is_dir() { 0 } else { m.size() };
    Ok(format!("{:o} {}:{} {} {kind} rdev {}", m.mode(), m.uid(), m.gid(), m.nlink(), m.rdev()))
}

fn names(path: &Path) -> io::Result<Vec<String>> {
    let mut names: Vec<String> =
        fs::read_dir(path)?.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

#[test]
fn files_are_made_written_cut_and_read_as_below() {
    same(|at, log| {
        let (a, b) = (&at.join("a"), &at.join("b"));
        step!(log, fs::write(a, b"hello")?);
        step!(log, fs::read(a)?);
        step!(log, OpenOptions::new().append(true).open(a)?.write_all(b" world")?);
        step!(log, fs::read_to_string(a)?);
        step!(log, OpenOptions::new().write(true).create_new(true).open(a)?);
        step!(log, OpenOptions::new().write(true).truncate(true).open(a).map(drop)?);
        step!(log, state(a)?);
        step!(log, File::open(b)?);
        step!(log, File::open(at)?.read(&mut [0; 4])?);
        step!(log, OpenOptions::new().write(true).open(at)?);
        step!(log, File::open(a)?.write(b"x")?);
        step!(log, OpenOptions::new().write(true).open(a)?.read(&mut [0; 4])?);
        let file = File::options().read(true).write(true).create(true).truncate(false).open(b).unwrap();
        step!(log, file.write_at(b"end", 1_000_000)?);
        step!(log, file.set_len(999_000)?);
        step!(log, file.set_len(1_000_100)?);
        let mut back = vec![1; 200];
        step!(log, file.read_at(&mut back, 1_000_000)?);
        log.add("read back", Ok(&back));
        step!(log, (&file).seek(SeekFrom::End(-5))?);
        step!(log, file.sync_all()?);
        step!(log, file.sync_data()?);
        step!(log, call!(truncate(c(b).as_ptr(), 10)));
        step!(log, call!(truncate(c(b).as_ptr(), -1)));
        step!(log, state(b)?);
    });
}

#[test]
fn holes_allocation_and_copies_are_as_below() {
    same(|at, log| {
        let open = |name: &str| File::options().read(true).write(true).create(true).truncate(false).open(at.join(name));
        step!(log, File::create(at.join("a"))?.write_at(&[7; 4096], 1 << 20)?);
        // While it is open to be written and read, all is data.
        let reads = File::open(at.join("a")).unwrap();
        for from in [0, 1 << 20, (1 << 20) + 4096, 5 << 20] {
            step!(log, call!(lseek(reads.as_raw_fd(), from, libc::SEEK_DATA)));
            step!(log, call!(lseek(reads.as_raw_fd(), from, libc::SEEK_HOLE)));
        }
        let (a, b) = (open("a").unwrap(), open("b").unwrap());
        let (fa, fb) = (a.as_raw_fd(), b.as_raw_fd());
        step!(log, call!(fallocate(fa, 0, 0, 2 << 20)));
        step!(log, a.metadata()?.size());
        step!(log, call!(fallocate(fa, libc::FALLOC_FL_KEEP_SIZE, 0, 3 << 20)));
        step!(log, a.metadata()?.size());
        step!(log, a.write_at(&[9; 8192], 0)?);
        step!(log, call!(fallocate(fa, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 100, 5000)));
        step!(log, call!(fallocate(fa, libc::FALLOC_FL_ZERO_RANGE, 6000, 100)));
        let mut back = vec![1; 8192];
        step!(log, a.read_at(&mut back, 0)?);
        log.add("after the hole", Ok(&back));
        let (mut from, mut to) = (0i64, 4000i64);
        step!(log, call!(copy_file_range(fa, &mut from, fb, &mut to, 10_000, 0)));
        log.add("copied", fs::read(at.join("b")));
        step!(log, call!(posix_fallocate(fb, 0, 100_000)));
        step!(log, b.metadata()?.size());
    });
}

#[test]
fn names_links_and_directories_are_as_below() {
    same(|at, log| {
        let path = |name: &str| at.join(name);
        step!(log, fs::create_dir(path("d"))?);
        step!(log, fs::create_dir(path("d"))?);
        step!(log, fs::write(path("d/f"), "1")?);
        step!(log, fs::remove_dir(path("d"))?);
        step!(log, fs::remove_file(path("d"))?);
        step!(log, fs::hard_link(path("d/f"), path("g"))?);
        step!(log, fs::hard_link(path("d"), path("h"))?);
        step!(log, state(&path("g"))?);
        step!(log, unix::symlink("d/f", path("s"))?);
        step!(log, unix::symlink("nowhere/at/all", path("dangling"))?);
        step!(log, fs::read_link(path("s"))?);
        step!(log, fs::read(path("s"))?);
        step!(log, fs::read(path("dangling"))?);
        step!(log, fs::hard_link(path("s"), path("s2"))?);
        step!(log, fs::read_link(path("s2"))?);
        step!(log, unix::symlink("loop", path("loop"))?);
        step!(log, fs::read(path("loop"))?);
        for (from, to) in [("d", "d/e"), ("g", "d"), ("d", "g"), ("g", "d/f"), ("g", "k"), ("d", "d2"), ("none", "x")] {
            log.add(&format!("rename {from} {to}"), fs::rename(path(from), path(to)));
        }
        step!(log, fs::create_dir_all(path("full/sub"))?);
        step!(log, fs::create_dir(path("empty"))?);
        step!(log, fs::rename(path("empty"), path("full"))?);
        step!(log, fs::rename(path("d2"), path("empty"))?);
        let (one, two) = (c(path("k")), c(path("full")));
        let rename = |flags| Ok(call!(renameat2(libc::AT_FDCWD, one.as_ptr(), libc::AT_FDCWD, two.as_ptr(), flags)));
        log.add("noreplace", rename(libc::RENAME_NOREPLACE));
        log.add("exchange", rename(libc::RENAME_EXCHANGE));
        step!(log, state(&path("k"))?);
        step!(log, state(&path("full"))?);
        step!(log, names(at)?);
        step!(log, names(&path("empty"))?);
        for length in [254, 255, 256] {
            log.add("a long name", fs::write(path(&"n".repeat(length)), "x"));
        }
        step!(log, fs::write(path("\u{fc}\n\t \u{1f600}"), "x")?);
        step!(log, names(at)?);
        step!(log, File::open(path("full/x/y"))?);
    });
}

#[test]
fn special_files_are_as_below() {
    same(|at, log| {
        let path = |name: &str| at.join(name);
        step!(log, call!(mkfifo(c(path("fifo")).as_ptr(), 0o640)));
        step!(log, fs::symlink_metadata(path("fifo"))?.file_type().is_fifo());
        step!(log, call!(mknod(c(path("null")).as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(1, 3))));
        step!(log, call!(mknod(c(path("disk")).as_ptr(), libc::S_IFBLK | 0o600, libc::makedev(259, 70_000))));
        step!(log, call!(mknod(c(path("file")).as_ptr(), libc::S_IFREG | 0o600, 0)));
        for name in ["fifo", "null", "disk", "file"] {
            log.add(name, state(&path(name)));
        }
        step!(log, fs::write(path("null"), "gone")?);
        step!(log, fs::read(path("null"))?);
        step!(log, std::os::unix::net::UnixListener::bind(path("socket")).map(drop)?);
        step!(log, fs::symlink_metadata(path("socket"))?.file_type().is_socket());
        let fifo = path("fifo");
        let written = thread::scope(|scope| {
            let writer = scope.spawn(|| fs::write(&fifo, "through"));
            let read = fs::read_to_string(path("fifo"));
            writer.join().unwrap().and(read)
        });
        log.add("through a fifo", written);
    });
}

#[test]
fn times_are_kept_to_the_nanosecond() {
    same(|at, log| {
        let (file, link) = (at.join("f"), at.join("l"));
        fs::write(&file, "x").unwrap();
        unix::symlink("f", &link).unwrap();
        let times =
            |path: &Path| fs::symlink_metadata(path).map(|m| (m.atime(), m.atime_nsec(), m.mtime(), m.mtime_nsec()));
        for (seconds, ns) in [
            (0, 0),
            (1, 1),
            (1_234_567_890, 123_456_789),
            (-1, 500_000_000),
            (-86_400, 1),
            (4_000_000_000, 999_999_999),
        ] {
            let accessed = libc::timespec { tv_sec: seconds, tv_nsec: ns };
            let modified = libc::timespec { tv_sec: seconds + 7, tv_nsec: 999_999_999 - ns };
            for path in [&file, &link] {
                let (name, set) = (c(path), [accessed, modified]);
                let nofollow = libc::AT_SYMLINK_NOFOLLOW;
                step!(log, call!(utimensat(libc::AT_FDCWD, name.as_ptr(), set.as_ptr(), nofollow)));
                step!(log, times(path)?);
            }
        }
        let omit = libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT };
        let set = [omit, libc::timespec { tv_sec: 5, tv_nsec: 6 }];
        step!(log, call!(utimensat(libc::AT_FDCWD, c(&file).as_ptr(), set.as_ptr(), 0)));
        step!(log, times(&file)?);
        // A write gives a new time; which, is nobody's to say.
        fs::write(&file, "y").unwrap();
        step!(log, fs::metadata(&file)?.mtime() > 1_600_000_000);
    });
}

#[test]
fn a_file_without_a_name_lives_until_it_is_closed() {
    same(|at, log| {
        let path = at.join("f");
        fs::write(&path, vec![3; 10_000]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        step!(log, fs::remove_file(&path)?);
        step!(log, file.metadata()?.nlink());
        step!(log, file.write_at(b"still", 9_998)?);
        let mut back = vec![0; 20];
        step!(log, file.read_at(&mut back, 9_990)?);
        log.add("back", Ok(&back));
        step!(log, file.set_len(3)?);
        step!(log, file.metadata()?.size());
        step!(log, file.set_permissions(Permissions::from_mode(0o600))?);
        step!(log, fs::write(&path, "another")?);
        step!(log, file.metadata()?.size());
        let directory = at.join("d");
        fs::create_dir(&directory).unwrap();
        let open = File::open(&directory).unwrap();
        step!(log, fs::remove_dir(&directory)?);
        step!(log, open.metadata()?.nlink());
    });
}

#[test]
fn users_may_do_what_they_may_below_and_own_what_they_make() {
    same(|at, log| {
        let path = |name: &str| at.join(name);
        fs::set_permissions(at, Permissions::from_mode(0o1777)).unwrap();
        step!(log, as_user(1001, 1002, || fs::write(path("his"), "1"))?);
        step!(log, as_user(1001, 1002, || fs::create_dir(path("hisdir")))?);
        step!(log, as_user(1001, 1002, || unix::symlink("x", path("hislink")))?);
        for name in ["his", "hisdir", "hislink"] {
            log.add(name, state(&path(name)));
        }
        step!(log, as_user(1003, 1003, || fs::remove_file(path("his")))?);
        step!(log, as_user(1003, 1003, || fs::rename(path("his"), path("mine")))?);
        step!(log, as_user(1003, 1003, || fs::write(path("his"), "2"))?);
        step!(log, as_user(1003, 1003, || fs::read(path("his")))?);
        step!(log, fs::set_permissions(path("his"), Permissions::from_mode(0o640))?);
        step!(log, as_user(1003, 1002, || fs::read(path("his")))?);
        step!(log, as_user(1003, 1003, || fs::read(path("his")))?);
        step!(log, as_user(1003, 1003, || fs::set_permissions(path("his"), Permissions::from_mode(0o777)))?);
        step!(log, as_user(1003, 1003, || unix::chown(path("his"), Some(1003), None))?);
        step!(log, as_user(1001, 1002, || unix::chown(path("his"), None, Some(4)))?);
        step!(log, as_user(1001, 1002, || fs::write(path("hisdir/f"), "1"))?);
        step!(log, as_user(1003, 1003, || fs::write(path("hisdir/g"), "1"))?);
        // A directory that gives its group to what is made in it.
        step!(log, fs::create_dir(path("shared"))?);
        step!(log, unix::chown(path("shared"), None, Some(55))?);
        step!(log, fs::set_permissions(path("shared"), Permissions::from_mode(0o2777))?);
        step!(log, as_user(1001, 1002, || fs::write(path("shared/f"), "1"))?);
        step!(log, as_user(1001, 1002, || fs::create_dir(path("shared/d")))?);
        step!(log, state(&path("shared/f"))?);
        step!(log, state(&path("shared/d"))?);
        step!(log, as_user(1001, 1002, || fs::create_dir(path("closed")))?);
        step!(log, fs::set_permissions(path("closed"), Permissions::from_mode(0o000))?);
        step!(log, as_user(1001, 1002, || names(&path("closed")))?);
        step!(log, as_user(1001, 1002, || File::open(path("closed/x")).map(drop))?);
    });
}

#[test]
fn root_of_another_group_owns_what_he_makes_and_takes_no_rights_from_others() {
    same(|at, log| {
        let path = |name: &str| at.join(name);
        fs::set_permissions(at, Permissions::from_mode(0o777)).unwrap();
        // So often that each thread of the server has done it.
        for _ in 0..40 {
            step!(log, as_user(0, 1000, || fs::write(path("roots"), "1"))?);
            step!(log, state(&path("roots"))?);
            step!(log, as_user(1001, 1002, || fs::write(path("his"), "1"))?);
            step!(log, state(&path("his"))?);
            step!(log, unix::chown(path("his"), Some(1003), None)?);
            step!(log, fs::remove_file(path("his"))?);
            step!(log, fs::remove_file(path("roots"))?);
        }
    });
}

/// Where the file system below has them, as NFS 4 has; who may change one only that knows.
#[test]
fn lists_of_another_kind_are_changed_by_who_may_below() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&["--allow-other"]);
    let (path, name) = (c(tree.target().join("f")), c"system.nfs4_acl");
    fs::write(tree.target().join("f"), "root's").unwrap();
    let mut list = vec![0u8; 4096];
    let get = |list: &mut Vec<u8>| {
        Ok(call!(getxattr(path.as_ptr(), name.as_ptr(), list.as_mut_ptr().cast(), list.len())) as usize)
    };
    let set = |list: &[u8]| -> io::Result<i64> {
        Ok(call!(setxattr(path.as_ptr(), name.as_ptr(), list.as_ptr().cast(), list.len(), 0)))
    };
    let length: io::Result<usize> = get(&mut list);
    match length {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            eprintln!("there are none here: this shows nothing")
        }
        length => {
            list.truncate(length.unwrap());
            let refused = as_user(1001, 1001, || set(&list)).unwrap_err().raw_os_error();
            assert!([Some(libc::EPERM), Some(libc::EACCES)].contains(&refused), "{refused:?}");
            unix::chown(tree.target().join("f"), Some(1001), Some(1001)).unwrap();
            as_user(1001, 1001, || set(&list)).unwrap();
        }
    }
    tree.unmount();
}

#[test]
fn nobody_else_gets_in_if_that_was_not_asked_for() {
    if !can_mount(&[]) {
        return;
    }
    for (arguments, gets_in) in [(&[][..], false), (&["--allow-other"], true)] {
        let tree = Tree::mounted(arguments);
        fs::write(tree.target().join("f"), "x").unwrap();
        let path = tree.target().join("f");
        let found = as_user(1001, 1001, || fs::read(path)).map_err(|error| error.raw_os_error());
        assert_eq!(found, if gets_in { Ok(b"x".to_vec()) } else { Err(Some(libc::EACCES)) });
    }
}

/// As on a file system of this machine's; NFS, asked without us, keeps the bits of a file that another cuts.
#[test]
fn set_user_id_goes_when_another_writes_cuts_or_owns() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&["--allow-other"]);
    let at = tree.target();
    fs::set_permissions(&at, Permissions::from_mode(0o777)).unwrap();
    let writing = |path: &Path| OpenOptions::new().write(true).open(path);
    let another = |what: fn(&File) -> io::Result<()>| {
        move |path: &Path| as_user(1001, 1001, || writing(path).and_then(|file| what(&file)))
    };
    let emptied =
        |path: &Path| as_user(1001, 1001, || OpenOptions::new().write(true).truncate(true).open(path).map(drop));
    type Change<'a> = &'a dyn Fn(&Path) -> io::Result<()>;
    let changes: [(&str, Change<'_>, u32); 5] = [
        ("written", &another(|mut file| file.write_all(b"x")), 0o777),
        ("cut", &another(|file| file.set_len(3)), 0o777),
        ("emptied", &emptied, 0o777),
        ("owned", &|path| unix::chown(path, Some(1001), Some(1001)), 0o777),
        ("root's", &|path| writing(path)?.write_all(b"x"), 0o6777),
    ];
    for (name, change, mode) in changes {
        let path = at.join(name);
        fs::write(&path, vec![1; 9000]).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o6777)).unwrap();
        change(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        for place in [&path, &tree.source().join(name)] {
            let found = fs::metadata(place).unwrap().mode() & 0o7777;
            assert_eq!(found, mode, "{name}: {found:o}");
        }
    }
    tree.unmount();
}

#[test]
fn extended_attributes_and_acls_are_as_below() {
    same(|at, log| {
        fs::set_permissions(at, Permissions::from_mode(0o777)).unwrap();
        let path = at.join("f");
        fs::write(&path, "secret").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let set = |path: &Path, name: &str, value: &[u8], flags| {
            let (path, name) = (c(path), c(name));
            Ok(call!(setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags)))
        };
        let get = |path: &Path, name: &str, length: usize| {
            let (path, name, mut value) = (c(path), c(name), vec![0u8; length]);
            let length = call!(getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), length));
            value.truncate(length as usize);
            Ok((length, value))
        };
        let list = |path: &Path| {
            let (path, mut names) = (c(path), vec![0u8; 1000]);
            let length = call!(listxattr(path.as_ptr(), names.as_mut_ptr().cast(), 1000));
            Ok(String::from_utf8_lossy(&names[..length as usize]).into_owned())
        };
        log.add("set", set(&path, "user.a", b"value", 0));
        log.add("create", set(&path, "user.a", b"value", libc::XATTR_CREATE));
        log.add("replace", set(&path, "user.b", b"value", libc::XATTR_REPLACE));
        log.add("trusted", set(&path, "trusted.c", &[0, 1, 2], 0));
        log.add("none such", set(&path, "nosuch.c", b"", 0));
        for length in [0, 3, 5, 100] {
            log.add("get", get(&path, "user.a", length));
        }
        log.add("list", list(&path));
        log.add("his list", as_user(1001, 1001, || list(&path)));
        log.add("remove", Ok(call_remove(&path, "user.a")));
        log.add("remove again", Ok(call_remove(&path, "user.a")));
        // Version 2; owner, user 1001 may read, group, mask, others.
        let entry = |tag: u16, rights: u16, id: u32| {
            [tag.to_le_bytes().to_vec(), rights.to_le_bytes().to_vec(), id.to_le_bytes().to_vec()].concat()
        };
        let acl = |mask: u16| {
            let none = u32::MAX;
            let entries =
                [entry(1, 6, none), entry(2, 4, 1001), entry(4, 0, none), entry(16, mask, none), entry(32, 0, none)];
            [2u32.to_le_bytes().to_vec(), entries.concat()].concat()
        };
        log.add("he reads", as_user(1001, 1001, || fs::read(&path)));
        log.add("acl", set(&path, "system.posix_acl_access", &acl(4), 0));
        log.add("he reads", as_user(1001, 1001, || fs::read(&path)));
        log.add("another reads", as_user(1003, 1003, || fs::read(&path)));
        log.add("mode", state(&path));
        step!(log, fs::set_permissions(&path, Permissions::from_mode(0o600))?);
        log.add("acl after chmod", get(&path, "system.posix_acl_access", 100));
        log.add("he reads", as_user(1001, 1001, || fs::read(&path)));
        // A default ACL decides in the place of the umask.
        let directory = at.join("d");
        step!(log, fs::create_dir(&directory)?);
        log.add("default acl", set(&directory, "system.posix_acl_default", &acl(7), 0));
        step!(log, fs::write(directory.join("f"), "x")?);
        step!(log, fs::create_dir(directory.join("e"))?);
        for name in ["f", "e"] {
            log.add(name, state(&directory.join(name)));
            log.add(name, get(&directory.join(name), "system.posix_acl_access", 100));
            log.add(name, get(&directory.join(name), "system.posix_acl_default", 100));
        }
    });
}

#[test]
fn others_may_what_modes_say_where_there_are_no_acls_below() {
    if !can_mount(&["mount", "umount"]) {
        return;
    }
    let directory = crate::support::scratch();
    fs::create_dir(directory.path().join("source")).unwrap();
    let source = directory.path().join("source");
    let mounted = Command::new("mount").args(["-t", "ramfs", "none"]).arg(&source).status().unwrap();
    assert!(mounted.success());
    let mut tree = Tree::over_itself(directory, &["--allow-other"]);
    let path = tree.target().join("f");
    fs::write(&path, "for some").unwrap();
    unix::chown(&path, None, Some(1002)).unwrap();
    for (mode, may) in [(0o640, [true, false]), (0o604, [false, true])] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let found = [1002, 1003].map(|group| as_user(1001, group, || fs::read(&path)));
        let found = found.map(|read| read.map(drop).map_err(|error| error.kind()));
        assert_eq!(found, may.map(|may| if may { Ok(()) } else { Err(io::ErrorKind::PermissionDenied) }), "{mode:o}");
    }
    tree.unmount();
    assert!(Command::new("umount").arg(source).status().unwrap().success());
}

fn call_remove(path: &Path, name: &str) -> Option<i32> {
    let (path, name) = (c(path), c(name));
    // SAFETY: both are strings that live until the call returns.
    let removed = unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) };
    (removed < 0).then(|| io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

#[test]
fn locks_exclude_those_who_use_the_mount() {
    same(|at, log| {
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(at.join("f")).unwrap();
        let (one, two) = (open(), open());
        let flock = |file: &File, how| Ok(call!(flock(file.as_raw_fd(), how | libc::LOCK_NB)));
        log.add("shared", flock(&one, libc::LOCK_SH));
        log.add("shared too", flock(&two, libc::LOCK_SH));
        log.add("exclusive", flock(&two, libc::LOCK_EX));
        log.add("unlock", flock(&one, libc::LOCK_UN));
        log.add("exclusive", flock(&two, libc::LOCK_EX));
        let range = |file: &File, command, kind: i32, start, length| {
            // SAFETY: all zeroes is a lock; its fields are numbers.
            let mut lock: libc::flock = unsafe { std::mem::zeroed() };
            (lock.l_type, lock.l_start, lock.l_len) = (kind as i16, start, length);
            Ok(call!(fcntl(file.as_raw_fd(), command, &mut lock)))
        };
        log.add("write 0..10", range(&one, libc::F_OFD_SETLK, libc::F_WRLCK, 0, 10));
        log.add("read 5..6", range(&two, libc::F_OFD_SETLK, libc::F_RDLCK, 5, 1));
        log.add("read 10..11", range(&two, libc::F_OFD_SETLK, libc::F_RDLCK, 10, 1));
        log.add("unlock", range(&one, libc::F_OFD_SETLK, libc::F_UNLCK, 0, 10));
        log.add("read 5..6", range(&two, libc::F_OFD_SETLK, libc::F_RDLCK, 5, 1));
    });
}

#[test]
fn the_numbers_of_a_file_system_and_of_files_are_those_below() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&[]);
    fs::create_dir(tree.source().join("d")).unwrap();
    fs::write(tree.source().join("d/f"), "x").unwrap();
    for name in ["", "d", "d/f"] {
        let (below, above) = (tree.source().join(name), tree.target().join(name));
        assert_eq!(fs::metadata(above).unwrap().ino(), fs::metadata(below).unwrap().ino(), "{name:?}");
    }
    let statistics = |path: &Path| {
        // SAFETY: all zeroes is a statvfs; the call fills it.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: path and structure live until the call returns.
        assert_eq!(unsafe { libc::statvfs(c(path).as_ptr(), &mut stat) }, 0);
        (stat.f_blocks, stat.f_files, stat.f_bsize, stat.f_frsize, stat.f_namemax)
    };
    assert_eq!(statistics(&tree.target()), statistics(&tree.source()));
}

#[test]
fn a_directory_of_twenty_thousand_names_is_listed_once_each() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&[]);
    for number in 0..20_000 {
        File::create(tree.source().join(format!("name {number}"))).unwrap();
    }
    let mut listed = names(&tree.target()).unwrap();
    assert_eq!(listed.len(), 20_000);
    listed.dedup();
    assert_eq!(listed.len(), 20_000);
    // What is removed while it is listed does not hide what is not.
    let mut seen = 0;
    for (at, entry) in fs::read_dir(tree.target()).unwrap().enumerate() {
        seen += 1;
        if at.is_multiple_of(2) {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }
    assert_eq!(seen, 20_000);
    assert_eq!(names(&tree.source()).unwrap().len(), 10_000);
}

#[test]
fn more_files_are_met_than_descriptors_may_be_open() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted_with_descriptors(1000, &[]);
    for number in 0..5000 {
        fs::write(tree.target().join(number.to_string()), number.to_string()).unwrap();
    }
    for number in 0..5000 {
        assert_eq!(fs::read_to_string(tree.target().join(number.to_string())).unwrap(), number.to_string());
    }
}

fn exchange(one: &Path, two: &Path) {
    let (one, two) = (c(one), c(two));
    // SAFETY: both are strings that outlive the call.
    let done =
        unsafe { libc::renameat2(libc::AT_FDCWD, one.as_ptr(), libc::AT_FDCWD, two.as_ptr(), libc::RENAME_EXCHANGE) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
}

#[test]
fn more_files_are_renamed_and_have_other_names_than_descriptors_may_be_open() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted_with_descriptors(1000, &[]);
    let place = |name: &str, number: u32| tree.target().join(format!("{name} {number}"));
    fs::create_dir(tree.target().join("other")).unwrap();
    for number in 0..2000 {
        fs::write(place("made", number), number.to_string()).unwrap();
        fs::rename(place("made", number), place("moved", number)).unwrap();
        if number % 2 == 1 {
            exchange(&place("moved", number - 1), &place("moved", number));
        }
    }
    for number in 0..2000 {
        assert_eq!(fs::read_to_string(place("moved", number)).unwrap(), (number ^ 1).to_string());
        fs::hard_link(place("moved", number), place("other/link", number)).unwrap();
        for name in ["moved", "other/link"] {
            assert_eq!(fs::metadata(place(name, number)).unwrap().nlink(), 2);
        }
    }
    // One that has more names than are known of a file.
    let names = |number| tree.target().join(format!("name {number}"));
    fs::write(names(0), "many").unwrap();
    (1..100).for_each(|number| fs::hard_link(names(0), names(number)).unwrap());
    for number in 0..2000 {
        assert_eq!(fs::read_to_string(place("other/link", number)).unwrap(), (number ^ 1).to_string());
    }
    (0..100).for_each(|number| assert_eq!(fs::read_to_string(names(number)).unwrap(), "many"));
}

#[test]
fn what_is_mounted_on_a_file_stays_where_room_is_made() {
    if !can_mount(&["umount"]) {
        return;
    }
    let tree = Tree::mounted_with_descriptors(1000, &[]);
    let (other, file, linked) =
        (tree.source().with_file_name("other"), tree.target().join("f"), tree.target().join("g"));
    fs::write(&other, "another").unwrap();
    let bound = [&file, &linked].map(|place| {
        fs::write(place, "ours").unwrap();
        let bound = Command::new("mount").arg("--bind").args([&other, place]).status().unwrap();
        assert!(bound.success());
        Mounted(place.clone())
    });
    // Its further names, more than are known of a file.
    for number in 0..100 {
        fs::hard_link(tree.source().join("g"), tree.source().join(format!("g {number}"))).unwrap();
        assert_eq!(fs::read(tree.target().join(format!("g {number}"))).unwrap(), b"ours");
    }
    for number in 0..3000 {
        fs::write(tree.target().join(number.to_string()), "").unwrap();
    }
    thread::sleep(Duration::from_millis(500));
    assert_eq!([&file, &linked].map(|place| fs::read_to_string(place).unwrap()), ["another"; 2]);
    drop(bound);
    assert_eq!([&file, &linked].map(|place| fs::read_to_string(place).unwrap()), ["ours"; 2]);
}

#[test]
fn who_cuts_or_closes_waits_for_a_descriptor_and_is_not_refused() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted_with_descriptors(400, &[]);
    let path = tree.target().join("f");
    let written = File::create(&path).unwrap();
    let mut open = vec![File::open(&path).unwrap()];
    let error = loop {
        match File::open(&path) {
            Ok(file) => open.push(file),
            Err(error) => break error,
        }
    };
    assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "all that there are are taken");
    // By the file itself, which asks for no other.
    let itself = c(format!("/proc/self/fd/{}", open[0].as_raw_fd()));
    let closed = thread::scope(|scope| {
        let last = open.pop();
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(300));
            drop(last);
        });
        let mut begun = Instant::now();
        // SAFETY: it reads a string that outlives the call.
        while unsafe { libc::truncate(itself.as_ptr(), 5) } != 0 {
            // That it may be told after a second.
            let error = io::Error::last_os_error();
            assert!(
                error.raw_os_error() == Some(libc::EMFILE) && begun.elapsed() > Duration::from_millis(900),
                "{error}"
            );
            begun = Instant::now();
        }
        while let Ok(file) = File::open(&path) {
            open.push(file);
        }
        // SAFETY: the number is given up by its owner in this very expression.
        checked(unsafe { libc::close(written.into_raw_fd()) }.into())
    });
    assert_eq!(closed.unwrap(), 0);
    assert_eq!(open[0].metadata().unwrap().len(), 5);
}

#[test]
fn a_long_copy_is_made_in_pieces_between_which_it_can_be_interrupted() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&[]);
    let open = |name: &str| {
        File::options().read(true).write(true).create(true).truncate(false).open(tree.target().join(name)).unwrap()
    };
    let (from, to, length) = (open("from"), open("to"), 100 << 20);
    from.set_len(length as u64).unwrap();
    from.write_at(b"at the end", length as u64 - 10).unwrap();
    let (mut at, mut pieces) = ((0i64, 0i64), 0);
    loop {
        let left = length - at.0 as usize;
        // SAFETY: both offsets outlive the call.
        let copied = unsafe { libc::copy_file_range(from.as_raw_fd(), &mut at.0, to.as_raw_fd(), &mut at.1, left, 0) };
        match copied {
            0 => break,
            1..=0x200_0000 => pieces += 1,
            _ => panic!("{copied}: {}", io::Error::last_os_error()),
        }
    }
    let mut end = [0; 10];
    to.read_exact_at(&mut end, length as u64 - 10).unwrap();
    assert_eq!((pieces, &end), (4, b"at the end"));
}

#[test]
fn files_in_use_are_not_asked_for_room_without_end() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted_with_descriptors(2100, &[]);
    // More than half of the descriptors: of directories, and of files that are open, each of which has two.
    (0..230).for_each(|number| fs::create_dir(tree.target().join(format!("directory {number}"))).unwrap());
    let open: Vec<File> =
        (0..700).map(|number| File::create(tree.target().join(format!("file {number}"))).unwrap()).collect();
    let tasks = || fs::read_dir(format!("/proc/{}/task", tree.child.id())).unwrap().map(|task| task.unwrap().path());
    let task = tasks().find(|task| fs::read_to_string(task.join("comm")).unwrap() == "notices\n").unwrap();
    let worked = || {
        let schedstat = fs::read_to_string(task.join("schedstat")).unwrap();
        Duration::from_nanos(schedstat.split(' ').next().unwrap().parse().unwrap())
    };
    // Each notice is one.
    let writes = || -> u64 {
        let io = fs::read_to_string(task.join("io")).unwrap();
        io.lines().find_map(|line| line.strip_prefix("syscw: ")).unwrap().parse().unwrap()
    };
    let (begun, before, writes_before) = (Instant::now(), worked(), writes());
    while begun.elapsed() < Duration::from_secs(2) {
        (0..200).for_each(|number| assert!(tree.target().join(format!("directory {number}")).exists()));
    }
    let (worked, elapsed) = (worked() - before, begun.elapsed());
    // A rest has an end, and so it rests less where once takes long; but that is not often.
    let times = (writes() - writes_before) / 930;
    assert!(worked < elapsed / 5 || times < 16, "it took {worked:?} of {elapsed:?}, {times} times");
    drop(open);
}

#[test]
fn opening_by_flags_no_file_system_of_fuses_has_is_refused_as_said() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&[]);
    let unnamed = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(tree.target());
    assert_eq!(unnamed.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
}
