//! Stopping as the program did, and waking when it goes on.
//!
//! A shell sees a job stop only if the process it has started stops, which is us. But who is stopped sees nothing: neither that the program
//! was sent SIGCONT by itself, nor that it was killed. So a copy of ours looks at it meanwhile:
//!
//! | we are woken by                          | the program then                        |
//! |------------------------------------------|-----------------------------------------|
//! | a shell's `fg` or `bg`, to the whole job | goes on already                         |
//! | `kill -CONT` to us alone                 | is told to go on, by us                 |
//! | the copy                                 | goes on already, or has ended           |
#![allow(unsafe_code)]

use std::fs;
use std::time::Duration;

use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, kill_process, set_parent_process_death_signal, setsid, waitpid,
};

/// Between two looks at the program.
const LOOK: Duration = Duration::from_millis(100);

/// Stops this process until somebody has it or `program`, our child, go on, or that has ended.
///
/// To be called by a process with one thread.
pub fn stop_with(program: Pid) {
    let watcher = match is_stopped(program) {
        Some(true) => watch(program),
        // Somebody was faster.
        Some(false) => return,
        None => None,
    };
    let _ = kill_process(getpid(), Signal::STOP);
    if let Some(watcher) = watcher {
        let _ = kill_process(watcher, Signal::KILL);
        let _ = waitpid(Some(watcher), WaitOptions::empty());
    }
    let _ = kill_process(program, Signal::CONT);
}

/// Starts the copy; none where the system refuses one.
fn watch(program: Pid) -> Option<Pid> {
    let us = getpid();
    // SAFETY: this process has one thread, so that the copy may do what we may.
    match unsafe { libc::fork() } {
        0 => {
            // Not one of the job: what stops and ends that is not for it. It ends with us.
            let _ = setsid();
            let _ = set_parent_process_death_signal(Some(Signal::KILL));
            while getppid() == Some(us) {
                if is_stopped(program) != Some(true) {
                    // Until we are awake and end it: it may be earlier than our stop.
                    let _ = kill_process(us, Signal::CONT);
                }
                std::thread::sleep(LOOK);
            }
            // SAFETY: ends the copy, and nothing that it shares with us.
            unsafe { libc::_exit(0) }
        }
        pid => Pid::from_raw(pid).filter(|_| pid > 0),
    }
}

/// Whether it is stopped, by a signal or a debugger; `None` where /proc does not tell, as of a program whose first thread has ended before others.
fn is_stopped(program: Pid) -> Option<bool> {
    let directory = format!("/proc/{}", program.as_raw_nonzero());
    let stat = fs::read(format!("{directory}/stat")).ok()?;
    // The name before it may have any bytes in it.
    let name_ends = stat.iter().rposition(|byte| *byte == b')')?;
    let has_others = || fs::read_dir(format!("{directory}/task")).is_ok_and(|threads| threads.count() > 1);
    match stat.get(name_ends + 2)? {
        b'Z' if has_others() => None,
        state => Some(b"Tt".contains(state)),
    }
}
