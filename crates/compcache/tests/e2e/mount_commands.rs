//! Mounts as who asks for them meets them: what is let go of, what is changed later, what is refused.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read, pipe};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use compcache_testkit::features::mounts;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::getxattr_query;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::mount_posix::as_user;
use crate::support::{Mounted, Tree, by_rings, can_mount, compcache, said, scratch};

#[test]
fn a_mount_in_the_background_keeps_nothing_open_of_who_asked_for_it() {
    if !can_mount(&[]) {
        return;
    }
    let directory = scratch();
    let (source, target) = (directory.path().join("source"), directory.path().join("target"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&target).unwrap();
    let (mut ours, theirs) = pipe().unwrap();
    let inherited = theirs.as_raw_fd();
    let mut command = Command::new(compcache());
    command.args(["mount", "--memory", "8M", "--background"]).args([&source, &target]);
    // SAFETY: dup2(2) is async-signal-safe, and nobody else has that number in the new process.
    unsafe {
        command.pre_exec(move || match libc::dup2(inherited, 19) {
            19 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let output = by_rings::mounting(|| command.output()).unwrap();
    drop(theirs);
    assert!(output.status.success(), "{}", said(&output));
    let _mounted = Mounted(target);
    let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&ours, PollFlags::IN)], Some(&patience)), Ok(1), "it is still open");
    assert_eq!(ours.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_mount_that_forbids_writing_is_changed_by_who_may_change_it() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["-o", "ro,allow_other,memory=8M"]);
    tree.ok(&["remount", "--memory", "16M", "--codec", "zstd:2"]);
    assert_eq!(tree.stat("memlimit"), 16 << 20);
    let shown = tree.ok(&["show"]);
    assert!(
        shown.contains("codec            zstd:2\n") && shown.contains("auto, what was not found for 60 s\n"),
        "{shown}"
    );
    tree.ok(&["remount", "--recompress", "zstd:1", "--recompress-after", "0.5"]);
    let shown = tree.ok(&["show", "--json"]);
    for setting in [r#""codec": "zstd:2""#, r#""recompress": "zstd:1""#, r#""recompress_after_ms": 500"#] {
        assert!(shown.contains(setting), "{setting}: {shown}");
    }
    tree.ok(&["remount", "--recompress", "none"]);
    assert!(tree.ok(&["show"]).contains("recompress       none\n"));
    let set = |value: &str| getxattr_query(tree.target(), format!("user.compcache.memory={value}"));
    assert_eq!(as_user(65534, 65534, || set("4194304")), Err(Errno::PERM));
    assert_eq!(set("much"), Err(Errno::INVAL));
    assert_eq!(tree.stat("memlimit"), 16 << 20);
}

#[test]
fn a_limit_without_room_for_pages_is_refused_and_none_is_not() {
    if !can_mount(&[]) {
        return;
    }
    for memory in [["--memory", "0"], ["--memory", "1023K"], ["-o", "memory=4096"]] {
        let output = Command::new(compcache()).arg("mount").args(memory).args(["/nowhere"; 2]).output().unwrap();
        assert!(said(&output).contains("1M at least"), "{}", said(&output));
    }
    let tree = Tree::mounted(&["--memory", "1M"]);
    for memory in ["1K", "0.0001%"] {
        let output =
            Command::new(compcache()).args(["remount", "--memory", memory]).arg(tree.target()).output().unwrap();
        assert!(!output.status.success() && said(&output).contains("1M at least"), "{}", said(&output));
    }
    assert_eq!(tree.stat("memlimit"), 1 << 20);
    tree.ok(&["remount", "--memory", "0"]);
    assert_eq!(tree.stat("memlimit"), 0);
}

#[test]
fn a_mount_whose_path_is_no_text_is_shown_changed_and_ended() {
    if !can_mount(&[]) {
        return;
    }
    let directory = scratch();
    let target = directory.path().join(OsStr::from_bytes(b"t\xff"));
    fs::create_dir(&target).unwrap();
    let does = |arguments: &[&str]| {
        let output = Command::new(compcache()).args(arguments).arg(&target).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let source = directory.path().join("source");
    fs::create_dir(&source).unwrap();
    by_rings::mounting(|| does(&["mount", "--background", "--memory", "8M", &source.display().to_string()]));
    let _mounted = Mounted(target.clone());
    does(&["remount", "--memory", "4M"]);
    assert!(does(&["show", "--json"]).contains(&(4 << 20).to_string()));
    does(&["umount"]);
}

/// What asks for more, a module that is loaded from a descriptor for direct reads, needs a kernel that loads modules.
#[test]
fn the_kernel_is_told_the_largest_read_that_there_is_room_for() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&[]);
    let mut tasks = fs::read_dir(format!("/proc/{}/task", tree.child.id())).unwrap();
    let is_ring = |comm: &str| comm.starts_with("fuse-ring");
    let by_rings = tasks.any(|task| fs::read_to_string(task.unwrap().path().join("comm")).is_ok_and(|it| is_ring(&it)));
    let largest = format!("max_read={}", if by_rings { 256 << 10 } else { 1 << 20 });
    let mounts = mounts();
    let target = tree.target();
    let line = mounts.lines().find(|line| line.split(' ').nth(1) == target.to_str()).unwrap();
    assert!(line.split([' ', ',']).any(|option| option == largest), "{line}");
}

#[test]
fn an_aborted_connection_is_told_of_and_its_mount_can_be_ended() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    let target = tree.target();
    fs::write(target.join("file"), "text").unwrap();
    let open = fs::File::open(target.join("file")).unwrap();
    let dead = || Command::new(compcache()).args(["umount", "--dead"]).arg(&target).output().unwrap();
    let output = dead();
    assert!(output.status.success() && mounts().contains(target.to_str().unwrap()), "{}", said(&output));
    // Of what is in use the kernel unmounts nothing, but it has ended the connection by then.
    assert_eq!(rustix::mount::unmount(&target, UnmountFlags::FORCE), Err(Errno::BUSY));
    let status = tree.child.wait().unwrap();
    let text = tree.said_at_the_end();
    assert!(status.code() == Some(125) && text.contains("aborted") && text.contains("umount"), "{status}: {text}");
    drop(open);
    for _ in 0..2 {
        let output = dead();
        assert!(output.status.success(), "{}", said(&output));
        assert!(!mounts().contains(target.to_str().unwrap()));
    }
}

/// A limit of whoever mounts is not one of those who write there.
#[test]
fn a_limit_on_the_size_of_files_ends_no_server() {
    if !can_mount(&[]) {
        return;
    }
    for (maximum, fails) in [(1 << 20, true), (libc::RLIM_INFINITY, false)] {
        let tree = Tree::mounted_with_files_of(1 << 20, maximum);
        // Open for both, it is written by the server.
        let mut both = fs::OpenOptions::new();
        let file = both.read(true).write(true).create_new(true).open(tree.target().join("large")).unwrap();
        let written = file.write_all_at(&[7; 4096], 4 << 20).map_err(|error| error.raw_os_error());
        assert_eq!(written, if fails { Err(Some(libc::EFBIG)) } else { Ok(()) });
        drop(file);
        fs::write(tree.target().join("small"), "text").unwrap();
        assert_eq!(fs::read_to_string(tree.source().join("small")).unwrap(), "text");
    }
}
