//! Which processors the pager's threads run on.
//!
//! A fault is answered on the processor where it happened: to wake a handler elsewhere, and the program from there, takes
//! 30 to 60 us where there are virtual processors, several times what the answer takes. The kernel does not know that the two
//! take turns, and to it a processor that idles is wasted: it takes the program to the one that the handler has just left,
//! and back again when the handler has come after it. So, when the handler has moved, the evictor keeps the processor that it left
//! busy while the next fault is answered; after that the kernel has forgotten it. If the program is taken there again soon, the same for more
//! faults (docs/decisions/0013).

use crate::pager::{Pager, clock_ns};
use crate::process::{self, number, thread_path, with_high_number};
use core::sync::atomic::Ordering::*;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// No processor.
pub const NONE: u32 = u32::MAX;
/// Faults between two looks at where they come from, of which each costs a tenth of a fault: few after a move, more the longer
/// there was none: a move that is seen late costs several faults for each that crossed meanwhile.
const FAULTS_BETWEEN_LOOKS: u32 = 4;
const FAULTS_BETWEEN_LOOKS_MAX: u32 = 64;
/// The part of the faults since the last move after which there is a look.
const PART_BETWEEN_LOOKS: u32 = 256;
/// The same after the handler has moved, which costs as much as several faults, if several threads fault.
const FAULTS_AFTER_A_MOVE: u32 = 32;
/// How long the handler waits for the evictor to keep a processor busy, and how long that does.
const SETTLE_WAIT_NS: u64 = 100_000;
const SETTLE_NS: u64 = 500_000;
/// Answers given meanwhile after a move, and most of them after moves that come soon after each other.
const SETTLE_ANSWERS: u32 = 2;
const SETTLE_ANSWERS_MAX: u32 = 256;
/// Faults between moves that are not soon after each other.
const FAULTS_SETTLED: u32 = 1024;

// What the handler asks of the evictor, which answers by being there.
pub const SETTLED: u32 = 0;
const WANTED: u32 = 1;
const BUSY: u32 = 2;
// It was busy for as long as it may be, and there was no fault.
const LAPSED: u32 = 3;

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
    /// Answers still to be given while the processor that was left is kept busy; how many there were after the last move, and
    /// faults since.
    unsettled: u32,
    answers: u32,
    settled: u32,
}

impl Follower {
    /// Forgets what a parent's handler was bound to.
    pub fn reset(&mut self) {
        // Its descriptor was the parent's.
        core::mem::forget(self.watched.take());
        (self.cpu, self.unsettled) = (None, 0);
    }

    /// Forgets what the handler before was bound to, in the same table of descriptors.
    pub fn unbind(&mut self) {
        self.watched = None;
        (self.cpu, self.unsettled) = (None, 0);
    }

    /// A fault is about to be answered: after a move, not before the evictor keeps the processor busy that was left. An evictor at
    /// work is waited for by nobody. The caller does not hold the lock, for the evictor may want it.
    pub fn before_answer(&mut self, pager: &Pager) {
        if self.unsettled == 0 {
            return;
        }
        if pager.settle.load(Acquire) == LAPSED {
            // Faults this seldom are not worth a processor.
            self.unsettled = 1;
        }
        self.unsettled -= 1;
        if pager.settle.load(Acquire) == BUSY || !pager.evictor_sleeps.load(Acquire) {
            return;
        }
        pager.settle.store(WANTED, Release);
        pager.ring();
        let until_ns = clock_ns() + SETTLE_WAIT_NS;
        while pager.settle.load(Acquire) == WANTED && clock_ns() < until_ns {
            core::hint::spin_loop();
        }
        match pager.settle.load(Acquire) {
            BUSY if self.answers == SETTLE_ANSWERS => self.unsettled = 0,
            // It cannot, or not soon: once more at most.
            WANTED => self.unsettled = self.unsettled.min(1),
            _ => {}
        }
    }

    /// A thread has faulted, and has been answered.
    pub fn note_fault(&mut self, pager: &Pager, thread: u32) {
        let is_same = self.watched.as_ref().is_some_and(|watched| watched.thread == thread);
        if self.unsettled == 0 {
            pager.settle.store(SETTLED, Release);
        }
        self.settled = self.settled.saturating_add(1);
        self.is_one_thread &= is_same;
        self.faults += 1;
        if self.faults < self.until_look {
            return;
        }
        let apart = self.settled / PART_BETWEEN_LOOKS;
        (self.faults, self.until_look) = (0, apart.clamp(FAULTS_BETWEEN_LOOKS, FAULTS_BETWEEN_LOOKS_MAX));
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
            // Once is not enough while the other processors are hardly used: who is woken is taken to one that idles then.
            let is_soon = core::mem::take(&mut self.settled) < FAULTS_SETTLED;
            let answers = if is_soon { self.answers * 2 } else { 0 };
            self.answers = answers.clamp(SETTLE_ANSWERS, SETTLE_ANSWERS_MAX);
            // Where several threads fault, the processor that was left may be another one's.
            self.unsettled = if is_one_thread && self.cpu.is_some() { self.answers } else { 0 };
            self.cpu = Some(cpu);
            // It may be the one that is still kept busy.
            pager.settle.store(SETTLED, Release);
            pager.handler_cpu.store(cpu, Release);
        }
    }
}

/// The evictor's: keeps off the handler's processor, which is the program's, if there is another one.
#[derive(Default)]
pub struct Clear {
    /// The processors this thread may use, the one that it keeps off, and the one before that.
    cpus: CpuSet,
    of: Option<u32>,
    left: Option<u32>,
}

impl Clear {
    /// Of none yet.
    pub fn new() -> Clear {
        Clear { cpus: sched_getaffinity(None).unwrap_or_default(), ..Clear::default() }
    }

    /// How many the program has.
    pub fn all(&self) -> u64 {
        self.cpus.count().into()
    }

    /// If the handler has moved, leaves its processor.
    pub fn keep_clear(&mut self, pager: &Pager) {
        let cpu = pager.handler_cpu.load(Acquire);
        if cpu != NONE && self.of != Some(cpu) {
            self.left = self.of.replace(cpu);
            self.run_on_others();
        }
    }

    /// As [`Clear::keep_clear`]; and if the handler asks for it, keeps the processor busy that it left.
    pub fn settle(&mut self, pager: &Pager) {
        self.keep_clear(pager);
        let Some(left) = self.left.filter(|&left| self.cpus.is_set(left as usize)) else { return };
        if pager.settle.load(Acquire) != WANTED || !run_on(&only(left)) {
            return;
        }
        if pager.settle.compare_exchange(WANTED, BUSY, AcqRel, Relaxed).is_ok() {
            let (until_ns, seen) = (clock_ns() + SETTLE_NS, pager.bell.load(Acquire));
            while pager.settle.load(Acquire) == BUSY && pager.bell.load(Acquire) == seen && clock_ns() < until_ns {
                core::hint::spin_loop();
            }
            let ended = if pager.bell.load(Acquire) == seen { LAPSED } else { SETTLED };
            let _ = pager.settle.compare_exchange(BUSY, ended, AcqRel, Relaxed);
        }
        self.run_on_others();
    }

    fn run_on_others(&self) {
        let mut others = self.cpus;
        if let Some(cpu) = self.of {
            others.unset(cpu as usize);
        }
        run_on(if others.count() > 0 { &others } else { &self.cpus });
    }
}

/// That of who brakes: stays on the processor of the program's first thread, which it comes before there when it wakes.
#[derive(Default)]
pub struct Beside {
    cpu: Option<u32>,
}

impl Beside {
    /// Goes there, by that thread's `stat`.
    pub fn follow(&mut self, stat: BorrowedFd<'_>) {
        if let Some(cpu) = cpu_of(stat).filter(|cpu| self.cpu != Some(*cpu)) {
            run_on(&only(cpu));
            self.cpu = Some(cpu);
        }
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
        match &self.stat {
            Some(stat) => cpu_of(stat.as_fd()),
            None => cpu_of(Watched::stat_of(self.thread)?.as_fd()),
        }
    }
}

/// The processor that a thread last ran on, by its `stat` in /proc; `None` when it has ended.
fn cpu_of(stat: BorrowedFd<'_>) -> Option<u32> {
    let mut text = [0u8; 512];
    let read = rustix::io::pread(stat, &mut text, 0).ok()?;
    // The name, field 2, may contain anything: fields are counted from the last parenthesis.
    let after_name = text[..read].iter().rposition(|&byte| byte == b')')? + 2;
    let field = text.get(after_name..read)?.split(|&byte| byte == b' ').nth(39 - 3)?;
    number(field).map(|cpu| cpu as u32).filter(|&cpu| (cpu as usize) < CpuSet::MAX_CPU)
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
