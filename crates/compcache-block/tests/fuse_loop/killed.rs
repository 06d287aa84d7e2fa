//! A server that is killed: nobody hangs, and what it leaves can be cleaned up.
//!
//! The server is a process of its own: this program again, told to run [`the_server`].

use std::env;
use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use compcache_block::Delayed;
use compcache_block::fuse_loop::{FuseLoop, FuseLoopError, Holder, clean, own_mounts};
use tempfile::TempDir;

use crate::support::{AT_LAST, Aligned, Mounted, assert_nothing_left, can_serve, disk, open_direct, options, run};

/// Where the server serves from.
const PARENT: &str = "COMPCACHE_TEST_SERVER";

/// Set when the server is to do what it must not: wait for itself.
const WAITS_FOR_ITSELF: &str = "COMPCACHE_TEST_SERVER_WAITS_FOR_ITSELF";

/// Set when the server is to have a mount namespace of its own.
const OWN_MOUNTS: &str = "COMPCACHE_TEST_SERVER_OWN_MOUNTS";

#[test]
#[ignore = "the other tests here start it as a process of its own"]
fn the_server() {
    let parent = PathBuf::from(env::var_os(PARENT).expect("only the other tests here start it"));
    if env::var_os(OWN_MOUNTS).is_some() {
        own_mounts().unwrap();
    }
    // The last block is slow for longer than any test takes.
    let last = (16 << 20) - 4096..16 << 20;
    let device = Delayed::new(disk(16 << 20), last, Duration::from_secs(600));
    let served = FuseLoop::serve(Arc::new(device), &options(&parent, 2)).unwrap();
    let waiting = env::var_os(WAITS_FOR_ITSELF).map(|_| hang(served.path(), false));
    println!("serving {}", served.path().display());
    // Until it is killed, or whoever started it is gone.
    io::stdin().read_line(&mut String::new()).unwrap();
    drop(waiting);
    std::process::exit(0);
}

/// The serving process; killed, and what it left cleaned up as far as possible, when dropped.
struct Server {
    child: Child,
    path: PathBuf,
    parent: TempDir,
}

impl Server {
    /// Starts one with its own mounts or the machine's, and what else is set.
    fn start(own_mounts: bool, environment: &[(&str, &str)]) -> Server {
        let parent = TempDir::new().unwrap();
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "killed::the_server", "--ignored", "--nocapture"])
            .env(PARENT, parent.path())
            .envs(environment.iter().copied())
            .envs(own_mounts.then_some((OWN_MOUNTS, "1")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut server = Server { child, path: PathBuf::new(), parent };
        let path = lines.map(Result::unwrap).find_map(|line| Some(PathBuf::from(line.split_once("serving ")?.1)));
        server.path = path.expect("it serves");
        server
    }

    /// Kills it and waits until it is gone, which it must be soon.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.wait_until_gone();
    }

    fn wait_until_gone(&mut self) {
        let (done, gone) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| done.send(self.child.wait()));
            gone.recv_timeout(AT_LAST).expect("the killed server is gone").unwrap();
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = clean(self.parent.path());
        let _ = self.child.wait();
        let _ = clean(self.parent.path());
    }
}

/// Reads or writes the last block, which never ends, in a thread of its own; what came of it arrives through the channel.
fn hang(path: &Path, write: bool) -> mpsc::Receiver<io::Result<()>> {
    let (file, (done, result)) = (open_direct(path), mpsc::channel());
    thread::spawn(move || {
        let (mut bytes, at) = (Aligned::new(4096), (16 << 20) - 4096);
        let answer = if write { file.write_all_at(bytes.bytes(), at) } else { file.read_exact_at(bytes.bytes(), at) };
        drop(file);
        done.send(answer)
    });
    result
}

#[test]
fn nobody_hangs_on_a_killed_server_and_cleaning_leaves_nothing() {
    if !can_serve(&[]) {
        return;
    }
    [false, true].into_iter().for_each(nobody_hangs);
}

fn nobody_hangs(own_mounts: bool) {
    let mut server = Server::start(own_mounts, &[]);
    let hanging = [hang(&server.path, false), hang(&server.path, true)];
    // More of them are in the page cache, and are written when the file is closed.
    let cached = OpenOptions::new().write(true).custom_flags(0).open(&server.path).unwrap();
    cached.write_all_at(&[1; 65536], 0).unwrap();
    thread::sleep(Duration::from_millis(300));
    for result in &hanging {
        assert!(result.try_recv().is_err(), "it does not hang before the server is killed");
    }
    let alive = clean(server.parent.path()).unwrap();
    assert!(alive.removed.is_empty() && alive.left.is_empty(), "{alive:?}");

    server.kill();
    for result in &hanging {
        let answer = result.recv_timeout(AT_LAST).expect("it hangs on a dead server");
        assert!(answer.is_err(), "nobody was there to answer");
    }
    drop(cached);
    let cleaned = clean(server.parent.path()).unwrap();
    assert_eq!((cleaned.removed.len(), cleaned.left.len()), (1, 0), "{cleaned:?}");
    assert_nothing_left(server.parent.path(), &server.path);
}

#[test]
fn a_disk_mounted_when_its_server_was_killed_is_cleaned_once_it_is_unmounted() {
    if !can_serve(&["mkfs.ext4", "mount"]) {
        return;
    }
    [false, true].into_iter().for_each(mounted);
}

fn mounted(own_mounts: bool) {
    let mut server = Server::start(own_mounts, &[]);
    // The file system ends before the block that is slow.
    run("mkfs.ext4", &["-q", server.path.to_str().unwrap(), "8192k"]);
    let at = TempDir::new().unwrap();
    let mounted = Mounted::new(&server.path, at.path());
    fs::write(at.path().join("file"), [1; 100_000]).unwrap();
    server.kill();
    let cleaned = clean(server.parent.path()).unwrap();
    assert!(cleaned.removed.is_empty());
    let by = |error: &FuseLoopError| matches!(error, FuseLoopError::InUse { by: Holder::Mounted { at: place }, .. } if place == at.path());
    assert!(cleaned.left.len() == 1 && by(&cleaned.left[0].1), "{cleaned:?}");
    mounted.unmount();
    let cleaned = clean(server.parent.path()).unwrap();
    assert_eq!((cleaned.removed.len(), cleaned.left.len()), (1, 0), "{cleaned:?}");
    assert_nothing_left(server.parent.path(), &server.path);
}

#[test]
fn a_killed_server_that_waits_for_itself_ends_when_it_is_cleaned_up() {
    if !can_serve(&[]) {
        return;
    }
    [false, true].into_iter().for_each(waits_for_itself);
}

fn waits_for_itself(own_mounts: bool) {
    let mut server = Server::start(own_mounts, &[(WAITS_FOR_ITSELF, "1")]);
    thread::sleep(Duration::from_millis(300));
    let alive = clean(server.parent.path()).unwrap();
    assert!(alive.removed.is_empty() && alive.left.is_empty(), "it hangs, but nobody killed it: {alive:?}");
    server.child.kill().unwrap();
    thread::sleep(Duration::from_millis(300));
    assert!(server.child.try_wait().unwrap().is_none(), "it ended by itself: what is documented of it is wrong");
    let cleaned = clean(server.parent.path()).unwrap();
    assert_eq!((cleaned.removed.len(), cleaned.left.len()), (1, 0), "{cleaned:?}");
    server.wait_until_gone();
    assert_nothing_left(server.parent.path(), &server.path);
}
