//! A server that is killed: nobody hangs, and what it leaves can be cleaned up.
//!
//! The server is a process of its own: this program again, told to run [`the_server`].

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use compcache_block::Delayed;
use compcache_block::ublk::{Ublk, clean, probe};
use tempfile::TempDir;

use crate::support::{
    AT_LAST, Aligned, Mounted, Served, assert_nothing_left, attribute, can_serve, disk, open_direct, options, run,
    wait_for,
};

/// How many requests a queue of the server's holds; it has one queue.
const DEPTH: &str = "COMPCACHE_TEST_SERVER_DEPTH";

/// How long the last block takes, in seconds: for ever, as far as a test is concerned, or not at all.
const DELAY: &str = "COMPCACHE_TEST_SERVER_DELAY";

#[test]
#[ignore = "the other tests here start it as a process of its own"]
fn the_server() {
    let number = |name| -> u64 { env::var(name).expect("only the other tests here start it").parse().unwrap() };
    let last = (16 << 20) - 4096..16 << 20;
    let device = Delayed::new(disk(16 << 20), last, Duration::from_secs(number(DELAY)));
    let served = Ublk::serve(Arc::new(device), &options(1, number(DEPTH) as u16)).unwrap();
    println!("serving {}", served.path().display());
    // Until it is killed, or whoever started it is gone.
    io::stdin().read_line(&mut String::new()).unwrap();
    std::process::exit(0);
}

/// The serving process; killed, and what it left cleaned up as far as possible, when dropped.
struct Server {
    child: Child,
    path: PathBuf,
}

impl Server {
    fn start(depth: u16, delay: Duration) -> Server {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "killed::the_server", "--ignored", "--nocapture"])
            .env(DEPTH, depth.to_string())
            .env(DELAY, delay.as_secs().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut server = Server { child, path: PathBuf::new() };
        let path = lines.map(Result::unwrap).find_map(|line| Some(PathBuf::from(line.split_once("serving ")?.1)));
        server.path = path.expect("it serves");
        server
    }

    /// Kills it and waits until it is gone, which it must be soon.
    fn kill(&mut self) {
        self.child.kill().unwrap();
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
        let _ = self.child.wait();
        let _ = clean();
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

/// Kills a server whose queue holds `depth` requests with two in flight, and cleans up after it.
fn kill_in_flight(depth: u16) {
    let mut server = Server::start(depth, Duration::from_secs(600));
    // It looks every 30 seconds, unless told otherwise.
    let name = server.path.file_name().unwrap().to_str().unwrap();
    fs::write(format!("/sys/block/{name}/queue/io_timeout"), "3000").unwrap();
    let hanging = [hang(&server.path, false), hang(&server.path, true)];
    wait_for("both are in flight", || attribute(&server.path, "inflight").split_whitespace().all(|count| count == "1"));
    for result in &hanging {
        assert!(result.try_recv().is_err(), "it does not hang before the server is killed");
    }
    let alive = clean().unwrap();
    assert!(alive.removed.is_empty() && alive.left.is_empty(), "{alive:?}");

    server.kill();
    for result in &hanging {
        let answer = result.recv_timeout(AT_LAST).expect("it hangs on a dead server");
        assert!(answer.is_err(), "nobody was there to answer");
    }
    let cleaned = clean().unwrap();
    assert_eq!((cleaned.removed.len(), cleaned.left.len()), (1, 0), "{cleaned:?}");
    assert_eq!(cleaned.removed[0], server.path);
    assert_nothing_left(&server.path);
}

#[test]
fn nobody_hangs_on_a_killed_server_and_cleaning_leaves_nothing() {
    if can_serve(&[]) {
        kill_in_flight(16);
    }
}

/// Then the kernel has no command left that it could complete to tell, and notices when it looks after late requests.
#[test]
fn nobody_hangs_on_a_killed_server_whose_queue_was_full() {
    if can_serve(&[]) {
        kill_in_flight(2);
    }
}

#[test]
fn what_a_killed_server_leaves_mounted_can_be_unmounted_and_cleaned() {
    if !can_serve(&["mkfs.ext4", "mount"]) {
        return;
    }
    let mut server = Server::start(16, Duration::ZERO);
    run("mkfs.ext4", &["-q", server.path.to_str().unwrap()]);
    let at = TempDir::new().unwrap();
    let mounted = Mounted::new(&server.path, at.path());
    fs::write(at.path().join("file"), [1; 100_000]).unwrap();
    server.kill();
    let written = fs::write(at.path().join("other"), [1; 1 << 20]);
    let synced = written.and_then(|()| fs::File::open(at.path().join("other"))?.sync_all());
    assert!(synced.is_err(), "nobody is there to write to");
    mounted.unmount();
    wait_for("it can be cleaned", || {
        let _ = clean().unwrap();
        !crate::support::character(&server.path).exists()
    });
    assert_nothing_left(&server.path);
}

/// Where the kernel keeps the device, its swap can be taken off, and the rest be cleaned. Elsewhere the swap stays, without a
/// device; that harms nobody, and other disks can be served.
#[test]
fn a_system_whose_swap_is_on_a_killed_server_goes_on() {
    if !can_serve(&["mkswap", "swapon", "swapoff"]) {
        return;
    }
    let keeps = probe().unwrap().keep;
    let mut server = Server::start(16, Duration::ZERO);
    let device = server.path.to_str().unwrap().to_owned();
    run("mkswap", &[&device]);
    run("swapon", &[&device]);
    server.kill();
    wait_for("the kernel has noticed", || keeps || !server.path.exists());
    let off = Command::new("swapoff").arg(&device).output().unwrap();
    assert_eq!(off.status.success(), keeps, "{off:?}");
    wait_for("it can be cleaned", || {
        let _ = clean().unwrap();
        !crate::support::character(&server.path).exists()
    });
    assert_nothing_left(&server.path);
    let swaps = fs::read_to_string("/proc/swaps").unwrap();
    assert_eq!(swaps.contains("(deleted)"), !keeps, "{swaps}");
    Served::new(disk(1 << 20)).remove();
}
