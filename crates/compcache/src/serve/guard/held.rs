//! Who takes memory while there is hardly any and nothing can be swapped out: held until swap is off.
//!
//! The kernel's OOM killer makes things worse then. It takes who takes swap off first, and gives him its reserves. He goes on, for he looks
//! at signals only between the memory of one process and that of the next, and holds the memory that he is in the middle of: if it chooses
//! that process next, nothing is freed by its end, and it ends one after the other (seen on Linux 6.12: until none was left, a panic).
//!
//! So that it does not come to that, a process is stopped (SIGSTOP) when memory runs short, and another whenever it has become clearly less since;
//! all go on (SIGCONT) when this is dropped, or after a while. If there is too little for them then, the kernel chooses, with nothing in its way.
//!
//! Not stopped are those that others may wait for, us too: who serves a file system over FUSE or a disk over ublk. Nor is anything written while somebody is
//! held: he may be the one who reads it.

use std::fs;
use std::mem;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use compcache_cache::pressure::{Memory, Pressure};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use crate::serve::overload::AVAILABLE_SHARE;

/// Hardly any is less than so many KiB, too.
const AVAILABLE_KIB: u64 = 256 << 10;
/// Who was told to stop does so when he has what he was asking for.
const BETWEEN: Duration = Duration::from_millis(100);
/// Nobody is held for longer, all in all.
const LONGEST: Duration = Duration::from_secs(60);

/// Processes that are held.
pub struct Held<'p> {
    pressure: &'p Pressure,
    until: Instant,
    not_before: Instant,
    processes: Vec<(Pid, OwnedFd)>,
    /// What there was when the last one was.
    memory: Option<Memory>,
    /// Who goes on by now.
    were: Vec<Pid>,
}

impl<'p> Held<'p> {
    /// None yet.
    pub fn new(pressure: &'p Pressure) -> Held<'p> {
        let now = Instant::now();
        let (until, not_before) = (now + LONGEST, now);
        Held { pressure, until, not_before, processes: Vec::new(), memory: None, were: Vec::new() }
    }

    /// Whether nobody is held any more, whatever memory there is.
    pub fn is_over(&self) -> bool {
        Instant::now() > self.until
    }

    /// Holds one more if that is needed: of those that run, the one that the kernel would end first (`/proc/PID/oom_score`), but `never`.
    pub fn look(&mut self, never: Option<Pid>) {
        if self.is_over() {
            return self.release();
        }
        let memory = self.pressure.memory().filter(|memory| is_short(*memory));
        let is_needed = match (memory, self.memory) {
            (Some(now), Some(before)) => now.has_shrunk_since(before),
            (now, _) => now.is_some(),
        };
        if memory.is_none() {
            self.memory = None;
        }
        if is_needed && Instant::now() >= self.not_before {
            self.memory = memory;
            self.not_before = Instant::now() + BETWEEN;
            self.hold_one(never);
        }
    }

    /// Has them go on, and nobody wait any more. Who they were.
    pub fn end(mut self) -> Vec<Pid> {
        self.release();
        mem::take(&mut self.were)
    }

    fn hold_one(&mut self, never: Option<Pid>) {
        let is_free = |pid: Pid| {
            let is_ours = pid == getpid() || Some(pid) == never;
            !is_ours && self.processes.iter().all(|(held, _)| *held != pid) && !is_stopped(pid) && !serves(pid)
        };
        let Some(pid) = choose(scores(), is_free) else { return };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        if pidfd_send_signal(&process, Signal::STOP).is_ok() {
            self.processes.push((pid, process));
        }
    }

    fn release(&mut self) {
        for (pid, process) in self.processes.drain(..) {
            // It may have been ended.
            let _ = pidfd_send_signal(&process, Signal::CONT);
            self.were.push(pid);
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

/// Whether hardly any memory is available.
pub fn is_short(memory: Memory) -> bool {
    memory.is_below(AVAILABLE_SHARE) && memory.is_below_kib(AVAILABLE_KIB)
}

/// The scores of all processes.
fn scores() -> Vec<(u32, Pid)> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    pids.filter_map(|pid| Some((read(pid, "oom_score")?.trim().parse().ok()?, pid))).collect()
}

/// The first by its score. Who must not be ended has none, but the first process, which the kernel never ends.
fn choose(mut scores: Vec<(u32, Pid)>, is_free: impl Fn(Pid) -> bool) -> Option<Pid> {
    scores.retain(|(score, pid)| *score > 0 && *pid != Pid::INIT);
    scores.sort_unstable_by_key(|(score, pid)| (*score, pid.as_raw_nonzero()));
    scores.into_iter().rev().map(|(_, pid)| pid).find(|pid| is_free(*pid))
}

/// Who is stopped already takes nothing, and is not ours to let go on; nor is who has ended.
fn is_stopped(pid: Pid) -> bool {
    let stat = read(pid, "stat").unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, fields)| fields.chars().next());
    state.is_none_or(|state| "TtZX".contains(state))
}

/// Whether others may wait for it: who has a device of FUSE's or ublk's, all of ours, and a guard.
fn serves(pid: Pid) -> bool {
    const DEVICES: [&str; 2] = ["/dev/fuse", "/dev/ublkc"];
    const NAMES: [&str; 2] = [env!("CARGO_BIN_NAME"), super::NAME];
    let open = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).into_iter().flatten().flatten();
    let mut open = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    let is_served = |name: &str| DEVICES.iter().any(|device| name.starts_with(device));
    read(pid, "comm").is_some_and(|name| NAMES.contains(&name.trim_end()))
        || open.any(|name| name.to_str().is_some_and(is_served))
}

fn read(pid: Pid, file: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/{}/{file}", pid.as_raw_nonzero())).ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::Command;
    use std::thread;

    use rustix::process::kill_process;

    use super::*;

    #[test]
    fn the_first_by_its_score_is_chosen_of_those_that_may_be() {
        let pid = |number| Pid::from_raw(number).unwrap();
        let scores = || vec![(3, pid(30)), (9, pid(1)), (7, pid(70)), (0, pid(9)), (8, pid(80))];
        assert_eq!(choose(scores(), |_| true), Some(pid(80)));
        assert_eq!(choose(scores(), |of| of != pid(80) && of != pid(70)), Some(pid(30)));
        assert_eq!(choose(scores(), |of| of == pid(1) || of == pid(9)), None);
        assert!(super::scores().iter().any(|(_, of)| *of == getpid()));
    }

    #[test]
    fn who_is_stopped_and_who_serves_is_seen_to_be() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert!(!is_stopped(pid) && !is_stopped(getpid()) && !serves(pid));
        kill_process(pid, Signal::STOP).unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while !is_stopped(pid) {
            assert!(Instant::now() < until, "it runs on");
            thread::sleep(Duration::from_millis(5));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_stopped(pid), "it is no more");
        let Ok(_device) = File::open("/dev/fuse") else { return };
        assert!(serves(getpid()));
    }
}
