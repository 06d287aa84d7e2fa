//! The brake: a program that gets memory faster than it can leave waits until enough has left.
//!
//! What is touched for the first time is nobody's to refuse, and where a program fills memory at the speed of memory, or has the processors to itself, it is over its
//! limit by more than the part that is kept for that before its pagers have it back within. A memory cgroup then kills. So when the tree is over its limit by more
//! than [`TOLERATED_SHARE`] and a pager has more to do than it has done, the threads of that process which run just then are stopped by ptrace(2), for
//! [`HOLD`] at most, and run again for [`RUN`] at least:
//!
//! | the tree has                        | and                                  | we                     |
//! |-------------------------------------|--------------------------------------|------------------------|
//! | less than seven eighths             |                                      | look again when it could have more |
//! | more                                | no pager is behind, or it is tolerated | look again soon        |
//! | too much                            | a pager is behind                    | stop, and look again and again |
//! | too much                            | nothing more can leave               | leave it alone         |
//!
//! Its parent sees nothing of that, nor who waits for it, as he would of SIGSTOP. A thread that is being stopped goes on with what it was waiting for, but for the few calls that end
//! with EINTR whenever a thread was stopped (epoll_wait(2), see signal(7)); so only threads that run are. Where ptrace(2) is refused (by Yama, by a filter, since a debugger is
//! there) nobody is stopped.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::{self, File};
use std::mem::zeroed;
use std::os::fd::AsFd;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

use compcache_pager::anonymous_pages;
use compcache_pager::memory::PAGE;
use compcache_pager::shared::{ProcessSlot, Region};
use rustix::fs::stat;
use rustix::process::{Pid, WaitStatus};

use crate::run::signals::state_of;

/// One of so many parts of the limit may be too much before anybody is stopped; the gap is a tenth.
const TOLERATED_SHARE: u64 = 128;
/// A process that says that it has so large a part of the limit is looked at; the others are believed.
const LARGE_SHARE: u64 = 16;
/// Between two looks while little is left, and while that stays as it is; while more is left, how fast that may become little.
const NEAR: Duration = Duration::from_millis(5);
const NEAR_AND_STEADY: Duration = Duration::from_millis(20);
const STEADY_SHARE: u64 = 256;
const GROWTH_BYTES_PER_S: u64 = 2 << 30;
/// How long nobody runs, and how long they run, at most and at least.
const HOLD: Duration = Duration::from_millis(100);
const RUN: Duration = Duration::from_millis(2);
/// Between two looks while nobody runs.
const STEP: Duration = Duration::from_millis(1);
/// When nothing is to be done.
const FAR: Duration = Duration::from_secs(1);
/// Who was let go of and has not stopped yet is waited for so long where there is no other moment.
const RELEASED_WITHIN: Duration = Duration::from_millis(200);

/// A thread that is stopped, or about to be.
struct Held {
    process: i32,
    thread: i32,
    /// With what it stopped.
    stopped: Option<i32>,
}

/// Who is stopped.
pub struct Brake {
    /// Our child, whose end is not ours to take note of.
    program: i32,
    namespace: Option<u64>,
    held: Vec<Held>,
    /// What the tree had at the last look, bytes, and how long after it the next one was to be.
    last: (u64, Duration),
}

impl Brake {
    /// Nobody yet.
    pub fn new(program: Pid) -> Brake {
        let namespace = stat("/proc/self/ns/pid").ok().map(|stat| stat.st_ino);
        Brake { program: program.as_raw_nonzero().get(), namespace, held: Vec::new(), last: (0, NEAR) }
    }

    /// Stops those who get too much too fast, for a moment. Returns when to come again.
    pub fn step(&mut self, region: &Region) -> Duration {
        self.let_go();
        if !self.held.is_empty() {
            return RUN;
        }
        let limit = region.header.ram_limit_bytes.load(Relaxed);
        let totals = region.totals();
        let total = totals.resident_bytes + totals.ours_bytes;
        let left = limit.saturating_sub(total);
        if limit == 0 {
            return FAR;
        }
        if left > limit / 8 {
            return Duration::from_nanos(left * 1_000_000_000 / GROWTH_BYTES_PER_S).max(NEAR);
        }
        let begun = Instant::now();
        while begun.elapsed() < HOLD {
            let behind = self.behind(region, limit);
            if behind.is_empty() {
                break;
            }
            behind.into_iter().for_each(|slot| self.stop(slot));
            self.settle();
            sleep(STEP);
        }
        if self.held.is_empty() {
            let is_steady = total.abs_diff(self.last.0) < limit / STEADY_SHARE;
            let nap = if is_steady { (self.last.1 * 2).min(NEAR_AND_STEADY) } else { NEAR };
            self.last = (total, nap);
            return nap;
        }
        self.last = (total, NEAR);
        region.header.held_ns.fetch_add(begun.elapsed().as_nanos() as u64, Relaxed);
        self.let_go();
        RUN
    }

    /// The processes whose pagers have more to do, if the tree has too much.
    fn behind<'r>(&self, region: &'r Region, limit: u64) -> Vec<&'r ProcessSlot> {
        let (mut all, mut behind) = (0, Vec::new());
        for slot in region.living() {
            let told = slot.gauges.resident_bytes.load(Relaxed) + slot.gauges.ours_bytes.load(Relaxed);
            let is_here = Some(slot.pid_namespace.load(Relaxed)) == self.namespace;
            let has =
                if is_here && told >= limit / LARGE_SHARE { anonymous_bytes(slot.pid.load(Acquire)) } else { None };
            let has = has.unwrap_or(0).max(told);
            all += has;
            // Where it has had no processor, it may not know yet.
            if is_here && (slot.is_behind.load(Relaxed) != 0 || has > told + limit / TOLERATED_SHARE) {
                behind.push(slot);
            }
        }
        if all > limit + limit / TOLERATED_SHARE { behind } else { Vec::new() }
    }

    /// Stops the threads that run.
    fn stop(&mut self, slot: &ProcessSlot) {
        let (process, owner) = (slot.pid.load(Acquire), slot.owner.load(Relaxed));
        let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return };
        for thread in threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok()) {
            let is_pagers = thread == owner || slot.threads.iter().any(|own| own.load(Acquire) == thread);
            let (process, thread) = (process as i32, thread as i32);
            let is_held = self.held.iter().any(|held| held.thread == thread);
            if !is_pagers && !is_held && runs(process, thread) && seize(thread) {
                self.held.push(Held { process, thread, stopped: None });
            }
        }
    }

    /// Notes who has stopped by now, or ended.
    fn settle(&mut self) {
        let program = self.program;
        self.held.retain_mut(|held| {
            if held.stopped.is_some() {
                return true;
            }
            match next(held.thread, program) {
                Next::Nothing => return true,
                Next::Stopped(status) => {
                    held.stopped = Some(status);
                    return true;
                }
                Next::Ended => {}
            }
            // A thread that executes another program goes on as the first one.
            let is_first = held.thread == held.process;
            held.thread = held.process;
            !is_first
        });
    }

    /// All run again; who has not stopped yet does so when he has, which is soon.
    pub fn let_go(&mut self) {
        self.settle();
        self.held.retain_mut(|held| {
            let Some(status) = held.stopped.take() else { return true };
            // Who was killed meanwhile is still to end.
            !detach(held.thread, status)
        });
    }

    /// Somebody waited for `process`, and was told that it has stopped. Whether that was our doing.
    pub fn has_stopped(&mut self, process: Pid, status: WaitStatus) -> bool {
        let held = self.held.iter_mut().find(|held| held.thread == process.as_raw_nonzero().get());
        held.map(|held| held.stopped = Some(status.as_raw())).is_some()
    }

    /// Lets all go, for longer than a moment.
    pub fn release(&mut self) {
        let begun = Instant::now();
        self.let_go();
        while !self.held.is_empty() && begun.elapsed() < RELEASED_WITHIN {
            sleep(STEP);
            self.let_go();
        }
    }
}

/// What became of a thread that was to stop.
enum Next {
    Nothing,
    Stopped(i32),
    Ended,
}

/// Takes note of that, but for the end of `program`.
fn next(thread: i32, program: i32) -> Next {
    let any = libc::WEXITED | libc::WSTOPPED | libc::WNOHANG | libc::__WALL;
    // SAFETY: zeroes are a valid value; the call writes to it.
    let (asked, info) = unsafe {
        let mut info = zeroed::<libc::siginfo_t>();
        (libc::waitid(libc::P_PID, thread as u32, &raw mut info, any | libc::WNOWAIT), info)
    };
    // SAFETY: a call that succeeds fills in the part for children.
    match (asked, unsafe { info.si_pid() }, info.si_code) {
        (0, 0, _) => return Next::Nothing,
        (0, _, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED) if thread == program => return Next::Ended,
        (0, ..) => {}
        _ => return Next::Ended,
    }
    let mut status = 0;
    // SAFETY: writes a number of ours.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::WNOHANG | libc::__WALL) };
    if waited == thread && libc::WIFSTOPPED(status) { Next::Stopped(status) } else { Next::Ended }
}

/// Has a thread stop soon. Whether that may be.
fn seize(thread: i32) -> bool {
    // SAFETY: the calls read and write no memory of ours, nor of the thread's.
    unsafe {
        libc::ptrace(libc::PTRACE_SEIZE, thread, null_mut::<c_void>(), null_mut::<c_void>()) == 0 && {
            libc::ptrace(libc::PTRACE_INTERRUPT, thread, null_mut::<c_void>(), null_mut::<c_void>());
            true
        }
    }
}

/// A thread that has stopped so goes on. False if it ends.
fn detach(thread: i32, status: i32) -> bool {
    // It stopped for us, or with others; or because it was about to get a signal, which it is to have.
    let is_event = status >> 16 == libc::PTRACE_EVENT_STOP;
    let signal = if is_event { 0 } else { libc::WSTOPSIG(status) };
    // SAFETY: as above.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, thread, null_mut::<c_void>(), signal as usize as *mut c_void) == 0 }
}

fn runs(process: i32, thread: i32) -> bool {
    state_of(&format!("/proc/{process}/task/{thread}")) == Some(b'R')
}

fn anonymous_bytes(process: u32) -> Option<u64> {
    let statm = File::open(format!("/proc/{process}/statm")).ok()?;
    Some(anonymous_pages(statm.as_fd())? * PAGE as u64)
}
