//! Servers that are asked to end: by which signals, and what becomes of one that cannot yet.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::mounts;

use crate::support::{Mounted, PATIENCE, Server, Tree, can_mount, scratch};

/// As `nohup` and a script's `&` leave them.
const IGNORED: &[i32] = &[libc::SIGHUP, libc::SIGINT, libc::SIGQUIT];

/// Longer than what is between two tries.
const A_WHILE: Duration = Duration::from_millis(2500);

/// A disk with a client, who is there as long as the answer lives.
fn disk_in_use(server: &Server) -> UnixStream {
    server.ok(&["disk", "create", "--name", "d", "--size", "1M", "--transport", "nbd"]);
    let mut client = UnixStream::connect(server.directory.path().join("d.nbd")).expect("it listens");
    client.read_exact(&mut [0; 18]).expect("it greets");
    client
}

fn send(signal: i32, child: &Child) {
    // SAFETY: it takes numbers, and the process is our child, not yet waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

fn is_mounted(target: &Path) -> bool {
    mounts().contains(target.to_str().unwrap())
}

#[track_caller]
fn ends(child: &mut Child) {
    let give_up = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < give_up, "it does not end");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn signals_that_were_ignored_when_a_server_was_started_do_not_end_it() {
    let server = Server::start_ignoring(IGNORED, scratch(), &[]);
    server.ok(&["disk", "create", "--name", "d", "--size", "1M", "--transport", "nbd"]);
    for signal in IGNORED {
        send(*signal, &server.child);
    }
    thread::sleep(Duration::from_millis(300));
    assert!(server.ok(&["list"]).contains("d "));
    server.signal("-TERM");
    let (status, text, _) = server.ended();
    assert!(status.success(), "{text}");
}

#[test]
fn signals_that_were_ignored_when_a_tree_was_mounted_do_not_end_it() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted_ignoring(IGNORED);
    for signal in IGNORED {
        send(*signal, &tree.child);
    }
    thread::sleep(Duration::from_millis(300));
    assert!(tree.child.try_wait().unwrap().is_none() && is_mounted(&tree.target()));
    send(libc::SIGTERM, &tree.child);
    ends(&mut tree.child);
}

#[test]
fn a_server_asked_once_by_sigterm_ends_when_its_disk_is_not_used_any_more() {
    let mut server = Server::start(&[]);
    let client = disk_in_use(&server);
    server.signal("-TERM");
    server.hears("not ending: disk d");
    thread::sleep(A_WHILE);
    assert!(server.ok(&["list"]).contains("d "));
    // It would go with the other.
    let another = ["disk", "create", "--name", "e", "--size", "1M", "--transport", "nbd"];
    server.refuses(&another, &["asked to end", "no disk was made"]);
    drop(client);
    let (status, text, _) = server.ended();
    assert!(status.success() && !text.contains("not ending"), "it is said again: {text}");
}

#[test]
fn a_server_that_refused_a_key_of_the_terminal_goes_on() {
    let mut server = Server::start(&[]);
    let client = disk_in_use(&server);
    server.signal("-INT");
    assert!(!server.hears("not ending: disk d").contains("again"));
    drop(client);
    thread::sleep(A_WHILE);
    assert!(server.ok(&["list"]).contains("d "));
    server.ok(&["disk", "create", "--name", "e", "--size", "1M", "--transport", "nbd"]);
}

#[test]
fn a_mount_asked_once_by_sigterm_ends_when_it_is_not_used_any_more() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    let mut held = File::create(tree.target().join("f")).unwrap();
    send(libc::SIGTERM, &tree.child);
    thread::sleep(A_WHILE);
    assert!(tree.child.try_wait().unwrap().is_none(), "it ended, though a file is open");
    held.write_all(b"still served").unwrap();
    drop(held);
    ends(&mut tree.child);
    assert!(!is_mounted(&tree.target()));
    assert_eq!(fs::read(tree.source().join("f")).unwrap(), b"still served");
}

#[test]
fn a_mount_that_refused_a_key_of_the_terminal_goes_on() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    let held = File::create(tree.target().join("f")).unwrap();
    send(libc::SIGINT, &tree.child);
    assert!(!tree.hears("not ending").contains("again"));
    drop(held);
    thread::sleep(A_WHILE);
    assert!(tree.child.try_wait().unwrap().is_none() && is_mounted(&tree.target()));
    tree.unmount();
}

#[test]
fn a_mount_that_was_taken_out_of_the_tree_is_not_unmounted_again() {
    if !can_mount(&["umount"]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    let mut held = File::create(tree.target().join("f")).unwrap();
    let taken = Command::new("umount").arg("-l").arg(tree.target()).status().expect("umount runs");
    assert!(taken.success());
    send(libc::SIGTERM, &tree.child);
    thread::sleep(A_WHILE);
    held.write_all(b"still served").unwrap();
    drop(held);
    ends(&mut tree.child);
    let said = tree.said_at_the_end();
    assert!(!said.contains("not ending"), "there is nothing to unmount: {said}");
    assert_eq!(fs::read(tree.source().join("f")).unwrap(), b"still served");
}

#[test]
fn what_somebody_mounted_over_a_mount_is_not_unmounted_in_its_place() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    fs::write(tree.source().join("f"), "ours").unwrap();
    let over = Mounted(tree.target());
    let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&over.0).status().expect("mount runs");
    assert!(mounted.success());
    fs::write(over.0.join("theirs"), "").unwrap();
    send(libc::SIGTERM, &tree.child);
    thread::sleep(A_WHILE);
    assert!(over.0.join("theirs").exists(), "it was unmounted");
    assert!(tree.child.try_wait().unwrap().is_none(), "it ended");
    drop(over);
    ends(&mut tree.child);
    assert!(!is_mounted(&tree.target()));
}

#[test]
fn a_mount_whose_directory_has_another_name_by_now_is_unmounted_there() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    let place = tree.target().parent().unwrap().to_owned();
    let moved = place.with_extension("moved");
    fs::rename(&place, &moved).unwrap();
    send(libc::SIGTERM, &tree.child);
    let give_up = Instant::now() + PATIENCE;
    while tree.child.try_wait().unwrap().is_none() && Instant::now() < give_up {
        thread::sleep(Duration::from_millis(20));
    }
    let is_left = is_mounted(&moved);
    fs::rename(&moved, &place).unwrap();
    assert!(!is_left, "it was not unmounted where it is");
    ends(&mut tree.child);
}

#[test]
fn a_mount_that_is_bound_elsewhere_ends_when_it_is_unmounted_there_too() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    let elsewhere = scratch();
    let bound = Mounted(elsewhere.path().to_owned());
    let mounted = Command::new("mount").arg("--bind").arg(tree.target()).arg(&bound.0).status().expect("mount runs");
    assert!(mounted.success());
    send(libc::SIGTERM, &tree.child);
    let said = tree.hears("not ending");
    assert!(said.contains(bound.0.to_str().unwrap()), "{said}");
    fs::write(bound.0.join("f"), "still served").unwrap();
    drop(bound);
    ends(&mut tree.child);
    assert_eq!(fs::read(tree.source().join("f")).unwrap(), b"still served");
}

#[test]
fn a_server_ends_with_all_its_disks_or_with_none() {
    for _ in 0..10 {
        let server = Server::start(&[]);
        let names: Vec<String> = (0..8).map(|number| format!("d{number}")).collect();
        for name in &names {
            server.ok(&["disk", "create", "--name", name, "--size", "1M", "--transport", "nbd"]);
        }
        // The last of them is used for an instant again and again.
        let (socket, done) = (server.directory.path().join("d7.nbd"), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) && socket.exists() {
                    let _ = UnixStream::connect(&socket).map(|mut client| client.read(&mut [0; 18]));
                }
            });
            thread::sleep(Duration::from_millis(20));
            server.signal("-INT");
            thread::sleep(Duration::from_millis(700));
            done.store(true, Relaxed);
        });
        let listed = server.asked(&["list"]);
        let listed = String::from_utf8_lossy(&listed.stdout);
        let left: Vec<_> = names.iter().filter(|name| listed.contains(&format!("{name} "))).collect();
        assert!(left.is_empty() || left.len() == names.len(), "of all disks these are left: {left:?}");
    }
}
