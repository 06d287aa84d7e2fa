//! The brake: a program that gets memory faster than it can leave waits until enough has left.
//!
//! What lies in a mapping that is not registered yet is nobody's to refuse, and a program that fills one new mapping after the other is over its limit by more than the
//! part that is kept for that before it is within again; a memory cgroup then kills. So while the tree is over its limit by more than [`TOLERATED_SHARE`], and
//! more can leave of a process than has so far, the stack of its first thread may not be written to: it waits when it comes to that, as it waits for a page that has left.
//!
//! | the first thread                           | meanwhile                                                        |
//! |--------------------------------------------|------------------------------------------------------------------|
//! | works                                      | waits at its next write to its stack                             |
//! | is in a system call, sleeps                | goes on: no call of it ends sooner or otherwise than it would     |
//! | works on another stack                     | goes on                                                          |
//! | fills a mapping without touching its stack | goes on until that is registered; then it waits for us           |
//!
//! That is for [`HOLD_NS`] at most, then it runs for [`RUN_NS`] at least. Other threads are left alone: on their stacks are their control blocks, to which the kernel writes when a thread ends,
//! and waits for nobody then. For the same reason nobody is stopped where the first one's stack has such words on it ([`Brake::bar`]: control blocks, robust mutexes and those that inherit
//! priorities). Where the kernel cannot protect pages so (UFFDIO_WRITEPROTECT: Linux 5.7, and later on other processors than x86-64) nobody waits.
//!
//! Who writes within a system call is let go: the kernel would not let it stop there (SIGSTOP, a debugger), but ask again and again as long as there is a signal for it. So is who asks a second
//! time. The page is protected again with the next step.
//!
//! A thread of its own does it ([`run`]), which needs no lock and hardly any time, on the processor of the program's first thread: where others want the processors, the evictor,
//! which works, may come to see what is going on a tenth of a second later. The evictor tells it where the stack is, and whether more can leave.
//!
//! Who waits is not remembered. What was protected is made writable again when it is over, which wakes it; and a page that is still protected then, since the map was changing,
//! is made writable by the handler as soon as somebody asks for it ([`wants_to_write`]). No thread of the program's holds a lock that a
//! thread of ours wants while anything is registered.

use crate::cpus::Beside;
use crate::lock;
use crate::maps::{self, MapsBuffer};
use crate::memory::PAGE;
use crate::pager::{Channel, Pager, clock_ns};
use crate::process;
use crate::sys::{self, Errno};
use core::ffi::c_void;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering::*};
use rustix::fd::{BorrowedFd, RawFd};

/// One of so many parts of the limit may be too much before anybody waits.
const TOLERATED_SHARE: u64 = 128;
/// How long nobody runs at most, and how long they run then at least.
const HOLD_NS: u64 = 1_000_000_000;
const RUN_NS: u64 = 2_000_000;
/// Between two looks while nobody runs.
const STEP_NS: u64 = 1_000_000;
/// Between two looks at most, and at least; and at least while what there is changes little.
const NAP_MAX_NS: u64 = 100_000_000;
const NAP_MIN_NS: u64 = 2_000_000;
const NAP_STEADY_NS: u64 = 20_000_000;
const STEADY_SHARE: u64 = 256;
/// What processors can touch in a second.
const GROWTH_BYTES_PER_S: u64 = 2 << 30;
const PROTECT_TRIES: u32 = 50;
/// So long it is believed that the stack is where it was: it grows.
const NOTED_NS: u64 = 1_000_000_000;

/// What the threads of the pager know of it.
pub(crate) struct Brake {
    /// Where the stack is: the evictor's.
    known: Place,
    /// What may not be written to: the thread's that brakes.
    held: Place,
    /// Odd while it may not be written to.
    turn: AtomicU32,
    /// Somebody has asked for it in this turn: the thread, and the page.
    asked: (AtomicU32, AtomicUsize),
    /// There is something on the stack that the kernel writes to.
    is_barred: AtomicBool,
    /// More has come than could leave so far, and there is more that can.
    is_behind: AtomicBool,
    /// The program has done hardly anything for a while.
    is_idle: AtomicBool,
    /// `/proc/self/statm`, and the first thread's `stat` if that could be opened, in the table of descriptors of the pager's threads.
    statm: AtomicI32,
    stat: AtomicI32,
    /// The thread sleeps on this word.
    bell: AtomicU32,
}

/// A range that one thread writes, and others read.
struct Place {
    start: AtomicUsize,
    end: AtomicUsize,
}

impl Place {
    const fn none() -> Place {
        Place { start: AtomicUsize::new(0), end: AtomicUsize::new(0) }
    }

    /// Who reads it meanwhile finds none.
    fn set(&self, range: &Range<usize>) {
        self.end.store(0, SeqCst);
        self.start.store(range.start, SeqCst);
        self.end.store(range.end, SeqCst);
    }

    fn get(&self) -> Option<Range<usize>> {
        let (end, start) = (self.end.load(SeqCst), self.start.load(SeqCst));
        (start < end && self.end.load(SeqCst) == end).then_some(start..end)
    }
}

impl Brake {
    /// No stack is known.
    pub const fn new() -> Brake {
        Brake {
            known: Place::none(),
            held: Place::none(),
            turn: AtomicU32::new(0),
            asked: (AtomicU32::new(0), AtomicUsize::new(0)),
            is_barred: AtomicBool::new(false),
            is_behind: AtomicBool::new(false),
            is_idle: AtomicBool::new(false),
            statm: AtomicI32::new(-1),
            stat: AtomicI32::new(-1),
            bell: AtomicU32::new(0),
        }
    }

    /// In a copy of the process: nobody is stopped, and no stack is known.
    pub fn reset(&self) {
        self.turn.store(0, SeqCst);
        self.is_behind.store(false, Release);
        self.known.set(&(0..0));
    }

    /// By what it is seen how much the process has, and where its first thread runs.
    pub fn set_files(&self, statm: RawFd, stat: Option<RawFd>) {
        self.statm.store(statm, Release);
        self.stat.store(stat.unwrap_or(-1), Release);
    }

    /// Whether more has come than has left, of what can.
    pub fn set_behind(&self, is_behind: bool) {
        self.is_behind.store(is_behind, Release);
    }

    /// Whether the program has done hardly anything for a while.
    pub fn set_idle(&self, is_idle: bool) {
        self.is_idle.store(is_idle, Release);
    }

    /// The kernel writes to something there, and does not wait for a pager when it does. On the stack nobody is stopped from now on. For any thread.
    pub fn bar(&self, range: &Range<usize>) {
        if [&self.known, &self.held].into_iter().filter_map(Place::get).any(|stack| overlap(&stack, range)) {
            self.is_barred.store(true, SeqCst);
            self.ring();
        }
    }

    /// Whether the first thread is stopped.
    pub fn is_on(&self) -> bool {
        self.turn.load(SeqCst) & 1 == 1
    }

    /// What may not be written to, or could not when it was last so.
    pub fn held(&self) -> Option<Range<usize>> {
        self.held.get()
    }

    /// Wakes its thread.
    pub fn ring(&self) {
        self.bell.fetch_add(1, Release);
        lock::wake(&self.bell);
    }

    /// Stops who writes to the stack, or does so again. False when there is none.
    fn hold(&self, channel: &Channel) -> bool {
        if !self.is_on() {
            let Some(stack) = self.known.get() else { return false };
            self.held.set(&stack);
            self.asked.0.store(0, SeqCst);
            // Before: the handler must know when somebody asks.
            self.turn.fetch_add(1, SeqCst);
        }
        // What cannot be protected now is with the next step.
        self.held.get().inspect(|stack| _ = protect(channel, stack, true));
        true
    }

    fn let_go(&self, channel: &Channel) {
        self.turn.fetch_add(1, SeqCst);
        if let Some(stack) = self.held.get()
            && protect(channel, &stack, false).is_err()
        {
            // Who is not let go so comes to the handler.
            channel.uffd.wake(stack.start, stack.len());
        }
    }
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// While the map is changing, as it does with each page that leaves by mremap, the kernel refuses for a moment.
fn protect(channel: &Channel, stack: &Range<usize>, is_protected: bool) -> Result<(), Errno> {
    let mut tries = 0..PROTECT_TRIES;
    loop {
        match channel.uffd.protect(stack.start, stack.len(), is_protected) {
            Err(Errno::EAGAIN) if tries.next().is_some() => lock::pause(),
            done => return done,
        }
    }
}

/// How much there is, bytes.
struct Seen {
    limit: u64,
    /// Of the whole tree.
    total: u64,
    /// Of the process, since it was last said.
    untold: u64,
}

impl Seen {
    fn look(pager: &Pager) -> Option<Seen> {
        let limit = pager.region.header.ram_limit_bytes.load(Relaxed);
        let (totals, told) = (pager.region.totals(), pager.slot()?.bytes());
        let untold = (process::anonymous_pages(file(&pager.brake.statm)?)? * PAGE as u64).saturating_sub(told);
        (limit != 0).then_some(Seen { limit, total: totals.resident_bytes + totals.ours_bytes + untold, untold })
    }

    fn is_far_over(&self) -> bool {
        self.total > self.limit + self.limit / TOLERATED_SHARE
    }

    /// Whether it is worth waiting: more can leave, or whoever must say so has not come to it.
    fn is_behind(&self, pager: &Pager) -> bool {
        pager.brake.is_behind.load(Acquire) || self.untold > self.limit / TOLERATED_SHARE
    }

    /// How long it takes at least until it can be far over.
    fn until_far_over_ns(&self) -> u64 {
        (self.limit + self.limit / TOLERATED_SHARE).saturating_sub(self.total) * 1_000_000_000 / GROWTH_BYTES_PER_S
    }
}

/// A file that the evictor opened before it started the calling thread, and does not close before that has ended.
fn file(number: &AtomicI32) -> Option<BorrowedFd<'_>> {
    let number = Some(number.load(Acquire)).filter(|number| *number >= 0)?;
    // SAFETY: as above.
    Some(unsafe { BorrowedFd::borrow_raw(number) })
}

/// The thread.
pub(crate) extern "C" fn entry(pager: *mut c_void) -> ! {
    // SAFETY: `start_thread` passed a pager, which is never freed.
    run(unsafe { &*pager.cast::<Pager>().cast_const() })
}

fn run(pager: &Pager) -> ! {
    sys::ask_for_short_slices(100_000);
    let channel = pager.channel.lock().expect("the evictor opens the channel before it starts this thread");
    let (brake, mut beside, mut last, mut nap_ns) = (&pager.brake, Beside::default(), 0, NAP_MIN_NS);
    let mut since_ns = None;
    loop {
        let seen_bell = brake.bell.load(Acquire);
        let is_ending = pager.relay.is_ending();
        let may = !is_ending
            && !brake.is_barred.load(SeqCst)
            && !pager.frozen.load(Acquire)
            && !pager.fork_turn.is_waited_for();
        let looked = Seen::look(pager);
        let seen = looked.as_ref().filter(|seen| may && seen.is_behind(pager));
        let now_ns = clock_ns();
        let wait_ns = match (since_ns, seen) {
            (None, Some(seen)) if seen.is_far_over() && brake.hold(&channel) => {
                since_ns = Some(now_ns);
                STEP_NS
            }
            // Once stopped, it stays so until all is within the limit.
            (Some(since), Some(seen)) if seen.total > seen.limit && now_ns - since < HOLD_NS => {
                brake.hold(&channel);
                STEP_NS
            }
            (Some(since), _) => {
                brake.let_go(&channel);
                since_ns = None;
                pager.region.header.held_ns.fetch_add(now_ns - since, Relaxed);
                RUN_NS
            }
            (None, _) => {
                let (total, limit) = looked.as_ref().map_or((0, u64::MAX), |looked| (looked.total, looked.limit));
                let is_steady = total.abs_diff(core::mem::replace(&mut last, total)) < limit / STEADY_SHARE;
                let longest = if brake.is_idle.load(Acquire) { NAP_MAX_NS } else { NAP_STEADY_NS };
                nap_ns = if is_steady { (nap_ns * 2).min(longest) } else { NAP_MIN_NS };
                looked.map_or(NAP_MAX_NS, |looked| looked.until_far_over_ns()).clamp(nap_ns, NAP_MAX_NS)
            }
        };
        if is_ending {
            sys::end_thread();
        }
        if let Some(stat) = file(&brake.stat).filter(|_| wait_ns < NAP_MAX_NS) {
            beside.follow(stat);
        }
        lock::wait(&brake.bell, seen_bell, Some(wait_ns));
    }
}

/// The evictor's: when it last looked for the stack.
#[derive(Default)]
pub(crate) struct Noted {
    at_ns: u64,
}

impl Noted {
    /// Finds the stack of the program's first thread, and has it be such as can be protected.
    pub fn note_stack(&mut self, pager: &Pager, channel: &Channel, maps: BorrowedFd<'_>, buffer: &mut MapsBuffer) {
        let now_ns = clock_ns();
        if now_ns - self.at_ns < NOTED_NS || pager.brake.is_barred.load(SeqCst) {
            return;
        }
        self.at_ns = now_ns;
        let mut stack = 0..0;
        maps::for_each(maps, buffer, |mapping| {
            if (mapping.start..mapping.end).contains(&pager.main_stack) {
                stack = mapping.start..mapping.end;
            }
        });
        let state = pager.state.lock();
        // What the program may have in that place by now would lose its missing pages; and all of the mapping, which would be two else.
        if stack.is_empty()
            || state.regions.overlaps(&stack)
            || channel.uffd.register_for_writes(stack.start, stack.len()).is_err()
        {
            return;
        }
        pager.brake.known.set(&stack);
        // What comes to be there from now on is barred by who says so.
        if state.kept.overlaps(&stack) || state.blocks.overlaps(&stack) || pager.fresh_blocks.are_in(&stack) {
            pager.brake.bar(&stack);
        }
    }
}

/// A thread waits to write to a page: until it is let go, or, if it waits for nothing, no longer.
pub(crate) fn wants_to_write(pager: &Pager, channel: &Channel, address: usize, thread: u32) {
    let brake = &pager.brake;
    let turn = brake.turn.load(SeqCst);
    let is_held = turn & 1 == 1 && brake.held.get().is_some_and(|stack| stack.contains(&address));
    let asked_before = || {
        let (who, page) = (brake.asked.0.swap(thread, SeqCst), brake.asked.1.swap(address, SeqCst));
        (who, page) == (thread, address)
    };
    if is_held && !asked_before() && process::is_in_program(thread) && brake.turn.load(SeqCst) == turn {
        return;
    }
    if channel.uffd.protect(address, PAGE, false).is_err() {
        // The map is changing: it asks again.
        channel.uffd.wake(address, PAGE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_writes_to_on_the_stack_bars_and_what_is_elsewhere_does_not() {
        let brake = Brake::new();
        brake.bar(&(0..usize::MAX));
        assert!(!brake.is_barred.load(SeqCst), "no stack is known");
        brake.known.set(&(0x5000..0x9000));
        brake.bar(&(0x9000..0xa000));
        brake.bar(&(0x4000..0x5000));
        assert!(!brake.is_barred.load(SeqCst));
        brake.bar(&(0x8ff0..0x9010));
        assert!(brake.is_barred.load(SeqCst));
    }

    #[test]
    fn a_little_too_much_stops_nobody() {
        let limit = 128 << 20;
        let seen = |total| Seen { limit, total, untold: 0 };
        assert!(!seen(limit + (1 << 20)).is_far_over() && seen(limit + (1 << 20) + 1).is_far_over());
        assert_eq!(seen(limit - (1 << 20)).until_far_over_ns(), 976_562);
        assert_eq!(seen(limit * 2).until_far_over_ns(), 0);
    }
}
