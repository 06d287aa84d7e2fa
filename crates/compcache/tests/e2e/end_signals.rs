//! Servers that are asked to end: by which signals, and by which not.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{PATIENCE, Server, Tree, can_mount, scratch};

/// As `nohup` and a script's `&` leave them.
const IGNORED: &[i32] = &[libc::SIGHUP, libc::SIGINT, libc::SIGQUIT];

fn send(signal: i32, child: &Child) {
    // SAFETY: it takes numbers, and the process is our child, not yet waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

fn is_mounted(target: &Path) -> bool {
    fs::read_to_string("/proc/self/mountinfo").unwrap().contains(target.to_str().unwrap())
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
