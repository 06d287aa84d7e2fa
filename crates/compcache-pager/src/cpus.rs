//! Which processors the pager's threads run on.
//!
//! A fault is answered on the processor where it happened: to wake a handler elsewhere, and the program from there, takes
//! 30 to 60 us where there are virtual processors, several times what the answer takes. The kernel does not know that the two
//! take turns, and to it a processor that idles is wasted: it takes the program to the one that the handler has just left,
//! and back again when the handler has come after it. So the evictor, when the handler moves, keeps the processor that it left
//! busy for the program's next few faults; by then the kernel has forgotten it (docs/decisions/0013).

use crate::fork;
use crate::pager::{Pager, clock_ns};
use crate::process::{self, number, thread_path, with_high_number};
use core::sync::atomic::Ordering::*;
use rustix::fd::OwnedFd;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// No processor.
pub const NONE: u32 = u32::MAX;
/// Faults between two looks at where they come from: a look costs a tenth of a fault.
const FAULTS_BETWEEN_LOOKS: u32 = 4;
/// The same after the handler has moved, which costs as much as several faults, if several threads fault.
const FAULTS_AFTER_A_MOVE: u32 = 32;
/// How long a processor is kept busy that the handler has left, and the least time between two such.
const SETTLE_NS: u64 = 200_000;
const BETWEEN_SETTLES_NS: u64 = 200_000;

/// The handler's: stays on the processor of the thread that faults.
#[derive(Default)]
pub struct Follower {
    /// The processor this thread is bound to, and where faults were last seen to come from.
    cpu: Option<u32>,
    seen_cpu: Option<u32>,
    watched: Option<Watched>,
    /// All faults since the last move were of the thread that is watched.
    is_one_thread: bool,
    faults: u32,
    until_look: u32,
}

impl Follower {
    /// Forgets what a parent's handler was bound to.
    pub fn reset(&mut self) {
        // Its descriptor was the parent's.
        core::mem::forget(self.watched.take());
        self.cpu = None;
    }

    /// A thread has faulted, and has been answered.
    pub fn note_fault(&mut self, pager: &Pager, thread: u32) {
        let is_same = self.watched.as_ref().is_some_and(|watched| watched.thread == thread);
        self.is_one_thread &= is_same;
        self.faults += 1;
        if self.faults < self.until_look {
            return;
        }
        (self.faults, self.until_look) = (0, FAULTS_BETWEEN_LOOKS);
        if !is_same {
            self.watched = Watched::open(thread);
        }
        let Some(cpu) = self.watched.as_ref().and_then(Watched::cpu) else {
            self.watched = None;
            return;
        };
        // Two looks must agree: several threads that fault in turn would have us run after each.
        let agreed = self.seen_cpu.replace(cpu) == Some(cpu);
        if self.cpu == Some(cpu) {
            return;
        }
        if !agreed {
            self.until_look = 1;
            return;
        }
        let is_one_thread = core::mem::replace(&mut self.is_one_thread, true);
        if !is_one_thread {
            self.until_look = FAULTS_AFTER_A_MOVE;
        }
        if run_on(&only(cpu)) {
            self.cpu = Some(cpu);
            pager.handler_moved_ns.store(if is_one_thread { clock_ns() } else { 0 }, Relaxed);
            pager.handler_cpu.store(cpu, Release);
            pager.ring();
        }
    }
}

/// The evictor's: keeps off the handler's processor, which is the program's, if there is another one.
#[derive(Default)]
pub struct Clear {
    /// The processors this thread may use, and the one that it keeps off.
    cpus: CpuSet,
    of: Option<u32>,
    settled_at_ns: u64,
}

impl Clear {
    /// Of none yet.
    pub fn new() -> Clear {
        Clear { cpus: sched_getaffinity(None).unwrap_or_default(), ..Clear::default() }
    }

    /// The handler may have moved: leaves its processor. Returns the one it has left.
    pub fn keep_clear(&mut self, pager: &Pager) -> Option<u32> {
        let cpu = pager.handler_cpu.load(Acquire);
        if cpu == NONE || self.of == Some(cpu) {
            return None;
        }
        let mut others = self.cpus;
        others.unset(cpu as usize);
        run_on(if others.count() > 0 { &others } else { &self.cpus });
        self.of.replace(cpu)
    }

    /// As [`Clear::keep_clear`], when there is nothing else to do: if the handler moved just now, keeps the processor busy that
    /// it left.
    pub fn settle(&mut self, pager: &Pager) {
        let Some(left) = self.keep_clear(pager) else { return };
        let now_ns = clock_ns();
        let moved_lately = now_ns < pager.handler_moved_ns.load(Relaxed) + SETTLE_NS / 2;
        let settled_lately = now_ns < self.settled_at_ns + BETWEEN_SETTLES_NS;
        if !moved_lately || settled_lately || !self.cpus.is_set(left as usize) || !run_on(&only(left)) {
            return;
        }
        self.settled_at_ns = now_ns + SETTLE_NS;
        while clock_ns() < self.settled_at_ns && !fork::is_asked(pager) {
            core::hint::spin_loop();
        }
        self.of = None;
        self.keep_clear(pager);
    }
}

/// Where a thread of this process runs.
struct Watched {
    thread: u32,
    /// Open, so that a look costs a microsecond; but no low number is kept, which may be the last.
    stat: Option<OwnedFd>,
}

impl Watched {
    fn open(thread: u32) -> Option<Watched> {
        let stat = Watched::stat_of(thread)?;
        Some(Watched { thread, stat: with_high_number(&stat) })
    }

    fn stat_of(thread: u32) -> Option<OwnedFd> {
        let mut path = [0u8; 64];
        process::open(thread_path(thread, &mut path)?)
    }

    /// The processor it last ran on; `None` when it has ended.
    fn cpu(&self) -> Option<u32> {
        let mut text = [0u8; 512];
        let read = match &self.stat {
            Some(stat) => rustix::io::pread(stat, &mut text, 0),
            None => rustix::io::pread(Watched::stat_of(self.thread)?, &mut text, 0),
        };
        let read = read.ok()?;
        // The name, field 2, may contain anything: fields are counted from the last parenthesis.
        let after_name = text[..read].iter().rposition(|&byte| byte == b')')? + 2;
        let field = text.get(after_name..read)?.split(|&byte| byte == b' ').nth(39 - 3)?;
        number(field).map(|cpu| cpu as u32).filter(|&cpu| (cpu as usize) < CpuSet::MAX_CPU)
    }
}

/// Binds the calling thread to processors. Returns whether the kernel agreed.
fn run_on(cpus: &CpuSet) -> bool {
    sched_setaffinity(None, cpus).is_ok()
}

fn only(cpu: u32) -> CpuSet {
    let mut cpus = CpuSet::new();
    cpus.set(cpu as usize);
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_seen_where_it_was_bound_to() {
        std::thread::spawn(|| {
            let cpus = sched_getaffinity(None).unwrap();
            let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            let watched = Watched::open(thread).unwrap();
            for cpu in (0..CpuSet::MAX_CPU as u32).filter(|&cpu| cpus.is_set(cpu as usize)).take(4) {
                assert!(run_on(&only(cpu)));
                assert_eq!(watched.cpu(), Some(cpu));
            }
        })
        .join()
        .unwrap();
    }
}
