//! Who takes memory while there is hardly any and nothing can be swapped out: held until swap is off.
//!
//! The kernel's OOM killer makes things worse then. It takes who takes swap off first, and gives him its reserves. He goes on, for he looks
//! at signals only between the memory of one process and that of the next, and holds the memory that he is in the middle of: if it chooses
//! that process next, nothing is freed by its end, and it ends one after the other (seen on Linux 6.12: until none was left, a panic).
//!
//! So that it does not come to that, a process is stopped (SIGSTOP) when memory runs short, and another whenever it has become clearly less since;
//! all go on (SIGCONT) when this is dropped. If there is too little for them then, the kernel chooses, with nothing in its way.

use std::fs;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::run::say;
use crate::serve::pressure::{Memory, Pressure};

/// Less than this share of the RAM is hardly any.
const AVAILABLE_SHARE: u64 = 20;

/// Processes that are held.
pub struct Held<'p> {
    pressure: &'p Pressure,
    processes: Vec<(Pid, OwnedFd)>,
    /// What there was when the last one was.
    memory: Option<Memory>,
}

impl<'p> Held<'p> {
    /// None yet.
    pub fn new(pressure: &'p Pressure) -> Held<'p> {
        Held { pressure, processes: Vec::new(), memory: None }
    }

    /// Holds one more if that is needed: of those that run, the one that the kernel would end first (`/proc/PID/oom_score`).
    pub fn look(&mut self) {
        let Some(memory) = self.pressure.memory().filter(|memory| memory.is_below(AVAILABLE_SHARE)) else { return };
        if self.memory.is_some_and(|before| !memory.has_shrunk_since(before)) {
            return;
        }
        self.memory = Some(memory);
        let Some(pid) = self.next() else { return };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        if pidfd_send_signal(&process, Signal::STOP).is_ok() {
            self.processes.push((pid, process));
            say(&format!("compcache: memory is short: process {} waits until swap is off\n", pid.as_raw_nonzero()));
        }
    }

    /// Who must not be ended has no score, but the first process, which the kernel never ends.
    fn next(&self) -> Option<Pid> {
        let all = fs::read_dir("/proc").ok()?.flatten();
        let all = all.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
        let free = all.filter(|pid| *pid != Pid::INIT && self.processes.iter().all(|(held, _)| held != pid));
        let scores = free.filter_map(|pid| Some((score(pid).filter(|score| *score > 0)?, pid.as_raw_nonzero())));
        let mut scores: Vec<_> = scores.collect();
        scores.sort_unstable();
        // Who is stopped already takes nothing, and is not ours to let go on.
        let runs = |pid: &Pid| !is_stopped(*pid);
        scores.into_iter().rev().filter_map(|(_, pid)| Pid::from_raw(pid.get())).find(runs)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for (_, process) in &self.processes {
            // It may have been ended.
            let _ = pidfd_send_signal(process, Signal::CONT);
        }
    }
}

fn score(pid: Pid) -> Option<u32> {
    fs::read_to_string(format!("/proc/{}/oom_score", pid.as_raw_nonzero())).ok()?.trim().parse().ok()
}

fn is_stopped(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, fields)| fields.chars().next());
    state.is_none_or(|state| "TtZX".contains(state))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::thread;
    use std::time::{Duration, Instant};

    use rustix::process::kill_process;

    use super::*;

    #[test]
    fn a_stopped_process_is_seen_to_be_one_and_is_not_chosen() {
        let pressure = Pressure::open().unwrap();
        let held = Held::new(&pressure);
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert!(!is_stopped(pid) && !is_stopped(Pid::INIT));
        kill_process(pid, Signal::STOP).unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while !is_stopped(pid) {
            assert!(Instant::now() < until, "it runs on");
            thread::sleep(Duration::from_millis(5));
        }
        let next = held.next().expect("somebody runs");
        assert!(next != pid && next != Pid::INIT && score(next) > Some(0));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_stopped(pid), "it is no more");
    }
}
