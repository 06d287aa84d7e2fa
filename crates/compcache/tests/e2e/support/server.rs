//! `compcache serve`, started for a test and asked as a person asks it; what it serves is undone with it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::{compcache, scratch};

/// How long the server may take to do anything it is asked to do.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A server of this test's own; killed at the end if it has not ended by then.
pub struct Server {
    pub child: Child,
    pub said: BufReader<ChildStderr>,
    pub directory: TempDir,
}

impl Server {
    pub fn start(arguments: &[&str]) -> Server {
        Server::start_in(scratch(), arguments)
    }

    pub fn start_in(directory: TempDir, arguments: &[&str]) -> Server {
        Server::start_ignoring(&[], directory, arguments)
    }

    /// One for which these signals are ignored when it is started.
    pub fn start_ignoring(ignored: &'static [i32], directory: TempDir, arguments: &[&str]) -> Server {
        let mut command = Command::new(compcache());
        command.args(["serve", "--socket"]).arg(directory.path().join("control")).args(arguments);
        ignore(&mut command, ignored);
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("compcache can be started");
        let said = BufReader::new(child.stderr.take().expect("it is piped"));
        let mut server = Server { child, said, directory };
        // It may speak first of what a dead one has left.
        server.hears("serving at");
        server
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("control")
    }

    pub fn asked(&self, arguments: &[&str]) -> Output {
        ask(&self.socket(), arguments)
    }

    /// What a command prints, which must succeed.
    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.asked(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).expect("text")
    }

    /// A command must fail, with nothing on its standard output, and say all these words.
    #[track_caller]
    pub fn refuses(&self, arguments: &[&str], words: &[&str]) {
        let output = self.asked(arguments);
        assert!(!output.status.success(), "{arguments:?} succeeded");
        assert!(output.stdout.is_empty(), "{arguments:?} printed on standard output");
        for word in words {
            assert!(said(&output).contains(word), "{arguments:?} does not say {word:?}: {}", said(&output));
        }
    }

    #[track_caller]
    pub fn stat(&self, disk: &str, name: &str) -> u64 {
        let state: Value = serde_json::from_str(&self.ok(&["disk", "show", "--json", disk])).expect("JSON");
        state["stats"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {state}"))
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().expect("kill runs").success());
    }

    /// Waits until it has said this.
    #[track_caller]
    pub fn hears(&mut self, words: &str) -> String {
        hears(&mut self.said, words)
    }

    /// Waits for its end; what it said meanwhile.
    pub fn ended(mut self) -> (std::process::ExitStatus, String, TempDir) {
        let until = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                break status;
            }
            assert!(Instant::now() < until, "the server does not end");
            thread::sleep(Duration::from_millis(10));
        };
        let mut text = String::new();
        self.said.read_to_string(&mut text).expect("text");
        let directory = std::mem::replace(&mut self.directory, scratch());
        (status, text, directory)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // Asked first, so that it takes its devices along.
        let _ = Command::new("kill").arg(self.child.id().to_string()).stderr(Stdio::null()).status();
        let until = Instant::now() + Duration::from_secs(5);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until a server has said this, in whole lines. Returns them.
#[track_caller]
pub fn hears(said: &mut BufReader<ChildStderr>, words: &str) -> String {
    let (mut text, give_up) = (String::new(), Instant::now() + PATIENCE);
    while !text.contains(words) {
        if said.buffer().is_empty() {
            let left = Timespec::try_from(give_up.saturating_duration_since(Instant::now())).expect("it is seconds");
            let heard = poll(&mut [PollFd::new(said.get_ref(), PollFlags::IN)], Some(&left));
            assert!(heard.expect("it can be waited for") > 0, "it does not say {words:?}: {text}");
        }
        assert!(said.read_line(&mut text).expect("it says text") > 0, "it ended: {text}");
    }
    text
}

/// Waits until nothing on a device is mounted. A server that was just started may have copies of others' mounts, and what was unmounted here lives on for as long.
pub fn await_unmounted(device: impl AsRef<Path>) {
    let until = Instant::now() + PATIENCE;
    let open = || File::options().read(true).custom_flags(libc::O_EXCL).open(&device);
    while open().is_err() {
        assert!(Instant::now() < until, "{} is in use still: {:?}", device.as_ref().display(), open());
        thread::sleep(Duration::from_millis(10));
    }
}

/// A process that stands still, until this is dropped.
pub struct Stopped(Pid);

impl Stopped {
    /// Returns when none of its threads runs any more: until one has taken the signal, others may go on with what they are asked for.
    #[track_caller]
    pub fn of(child: &Child) -> Stopped {
        let pid = Pid::from_child(child);
        kill_process(pid, Signal::STOP).expect("it is our child");
        let stopped = Stopped(pid);
        let stat = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // Behind the name, which may have any character.
        let stands = |stat: String| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'));
        let all_stand = || {
            let tasks = fs::read_dir(format!("/proc/{}/task", child.id())).expect("it has not been waited for");
            tasks.flatten().map(stat).all(stands)
        };
        let until = Instant::now() + PATIENCE;
        while !all_stand() {
            assert!(Instant::now() < until, "it does not stop");
            thread::sleep(Duration::from_millis(2));
        }
        stopped
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// Of the signals that ask a server to end these are ignored where the command starts, and no others, whatever holds for the test.
pub fn ignore(command: &mut Command, ignored: &'static [i32]) {
    let set = move || {
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
            let action = if ignored.contains(&signal) { libc::SIG_IGN } else { libc::SIG_DFL };
            // SAFETY: neither action has code of its own.
            unsafe { libc::signal(signal, action) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec nothing but that is done, which is async-signal-safe.
    unsafe { command.pre_exec(set) };
}

pub fn ask(socket: &Path, arguments: &[&str]) -> Output {
    Command::new(compcache())
        .args(arguments)
        .env("COMPCACHE_SOCKET", socket)
        .output()
        .expect("compcache can be started")
}

pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Unmounts when it goes out of scope, also when a test fails.
pub struct Mounted(pub PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

/// Unmounts what is mounted there, if anything. What another test starts has all that we have open until it is a program of its own, so that a file there may
/// be in use for a moment.
pub fn unmount(at: &Path) {
    let until = Instant::now() + PATIENCE / 4;
    let is_done = || Command::new("umount").arg("-q").arg(at).status().is_ok_and(|status| status.success());
    while !is_done() && is_mounted(at) && Instant::now() < until {
        thread::sleep(Duration::from_millis(20));
    }
}

fn is_mounted(at: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("a list of mounts");
    mounts.lines().any(|line| line.split(' ').nth(1) == at.to_str())
}

/// A loop device over a file or a device, by its path; detached when it goes out of scope.
pub struct LoopDevice(pub String);

impl LoopDevice {
    #[track_caller]
    pub fn over(file: &str) -> LoopDevice {
        LoopDevice::with(&[file])
    }

    /// As [`LoopDevice::over`], with what else losetup is told.
    #[track_caller]
    pub fn with(arguments: &[&str]) -> LoopDevice {
        let made = Command::new("losetup").args(["--find", "--show"]).args(arguments).output();
        let made = made.expect("losetup can be started");
        assert!(made.status.success(), "losetup {arguments:?}: {}", said(&made));
        LoopDevice(String::from_utf8_lossy(&made.stdout).trim().to_owned())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

/// The file a loop device lies on, if it is in use.
pub fn backing_file(device: &str) -> Option<String> {
    let name = device.trim().strip_prefix("/dev/")?;
    fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()
}
