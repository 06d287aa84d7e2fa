//! The brake: a program that gets memory faster than it can leave waits until enough has left.
//!
//! What lies in a mapping that is not registered yet is nobody's to refuse, and a program that fills one new mapping after the other is over its limit by more than the
//! part that is kept for that before it is within again; a memory cgroup then kills. So while the tree is over its limit by more than [`TOLERATED_SHARE`], and
//! more can leave of a process than has so far, the stacks of its threads may not be written to: a thread that comes to that waits, as it waits for a page that has left.
//!
//! | a thread                                   | meanwhile                                                        |
//! |--------------------------------------------|------------------------------------------------------------------|
//! | works                                      | waits at its next write to its stack, in a system call too        |
//! | waits in a system call, sleeps             | goes on doing so; no call of it ends sooner or otherwise than it would |
//! | needs no stack but the page of its control block, or another than libc gave it | goes on       |
//! | fills a mapping without touching its stack | goes on until that is registered; then it waits for us           |
//!
//! That is for [`HOLD_NS`] at most, then they run for [`RUN_NS`] at least. The page on which a thread's control block lies is left out: the kernel writes to it when the thread
//! ends, and waits for nobody then. Where the kernel cannot protect pages so (UFFDIO_WRITEPROTECT: Linux 5.7, and later on other processors than x86-64) nobody waits.
//!
//! A thread of its own does it ([`run`]), which needs no lock and hardly any time, on the processor of the program's first thread: where others want the processors, the evictor,
//! which works, may come to see what is going on a tenth of a second later. The evictor tells it which stacks there are, and whether more can leave.
//!
//! Who waits is not remembered. What was protected is made writable again when it is over, which wakes them; and a page that is still protected then, since it was moved or what
//! lies beside it was unmapped, is made writable by the handler as soon as somebody asks for it ([`wants_to_write`]). No thread of the program's holds a lock that a
//! thread of ours wants while anything is registered.

use crate::cpus::Beside;
use crate::lock;
use crate::maps::{self, MapsBuffer};
use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State, clock_ns};
use crate::process;
use crate::sys::{self, Errno, RobustList};
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
/// Stacks that are known at a time.
pub(crate) const STACKS_MAX: usize = 64;
/// A stack may be a part of something large that is not.
const STACK_BYTES_MAX: usize = 8 << 20;
/// The kernel's word for the end of a thread lies a little below its list of robust futexes, in glibc's control blocks.
const BELOW_LIST_BYTES: usize = 64;
/// So long it is believed that the stacks of the same threads are where they were.
const NOTED_NS: u64 = 1_000_000_000;

/// What the threads of the pager know of it.
pub(crate) struct Brake {
    /// Where stacks begin and end, as far as they may be protected.
    stacks: [(AtomicUsize, AtomicUsize); STACKS_MAX],
    /// They may not be written to.
    is_on: AtomicBool,
    /// More has come than could leave so far, and there is more that can.
    is_behind: AtomicBool,
    /// `/proc/self/statm`, and the first thread's `stat` if that could be opened, in the table of descriptors of the pager's threads.
    statm: AtomicI32,
    stat: AtomicI32,
    /// The thread sleeps on this word.
    bell: AtomicU32,
}

impl Brake {
    /// No stacks.
    pub const fn new() -> Brake {
        Brake {
            stacks: [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; STACKS_MAX],
            is_on: AtomicBool::new(false),
            is_behind: AtomicBool::new(false),
            statm: AtomicI32::new(-1),
            stat: AtomicI32::new(-1),
            bell: AtomicU32::new(0),
        }
    }

    /// In a copy of the process: nobody is stopped, nor known.
    pub fn reset(&self) {
        self.is_on.store(false, Release);
        self.is_behind.store(false, Release);
        self.put_stacks(core::iter::empty());
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

    /// Whether threads are stopped.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Acquire)
    }

    /// Wakes its thread.
    pub fn ring(&self) {
        self.bell.fetch_add(1, Release);
        lock::wake(&self.bell);
    }

    fn put_stacks(&self, stacks: impl Iterator<Item = Range<usize>>) {
        let stacks = stacks.map(|stack| (stack.start, stack.end)).chain(core::iter::repeat((0, 0)));
        for (place, (start, end)) in self.stacks.iter().zip(stacks) {
            place.0.store(start, Release);
            place.1.store(end, Release);
        }
    }

    fn stacks(&self) -> impl Iterator<Item = Range<usize>> {
        let stacks = self.stacks.iter().map(|(start, end)| start.load(Acquire)..end.load(Acquire));
        stacks.filter(|stack| !stack.is_empty())
    }

    /// False when that is to be tried again.
    fn hold(&self, channel: &Channel) -> bool {
        // Before: the handler must know when somebody asks.
        self.is_on.store(true, SeqCst);
        // What is not where it was is not registered for this, or somebody asks for it by and by.
        self.stacks().all(|stack| protect(channel, &stack, true) != Err(Errno::EAGAIN))
    }

    fn let_go(&self, channel: &Channel) {
        self.is_on.store(false, SeqCst);
        for stack in self.stacks() {
            // Who is not let go so comes to the handler.
            if protect(channel, &stack, false).is_err() {
                channel.uffd.wake(stack.start, stack.len());
            }
        }
    }
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
    let (mut since_ns, mut is_held) = (None, false);
    loop {
        let seen_bell = brake.bell.load(Acquire);
        let is_ending = pager.relay.is_ending();
        let may = !is_ending && !pager.frozen.load(Acquire) && !pager.fork_turn.is_waited_for();
        let seen = Seen::look(pager).filter(|seen| may && seen.is_behind(pager));
        let now_ns = clock_ns();
        let wait_ns = match (since_ns, &seen) {
            (None, Some(seen)) if seen.is_far_over() => {
                is_held = brake.hold(&channel);
                since_ns = Some(now_ns);
                STEP_NS
            }
            // Once stopped, they stay so until all is within the limit.
            (Some(since), Some(seen)) if seen.total > seen.limit && now_ns - since < HOLD_NS => {
                is_held = is_held || brake.hold(&channel);
                STEP_NS
            }
            (Some(since), _) => {
                brake.let_go(&channel);
                since_ns = None;
                pager.region.header.held_ns.fetch_add(now_ns - since, Relaxed);
                RUN_NS
            }
            (None, _) => {
                let seen = Seen::look(pager);
                let total = seen.as_ref().map_or(0, |seen| seen.total);
                let is_steady = total.abs_diff(core::mem::replace(&mut last, total))
                    < seen.as_ref().map_or(u64::MAX, |seen| seen.limit / STEADY_SHARE);
                nap_ns = if is_steady { (nap_ns * 2).min(NAP_STEADY_NS) } else { NAP_MIN_NS };
                seen.map_or(NAP_MAX_NS, |seen| seen.until_far_over_ns()).clamp(nap_ns, NAP_MAX_NS)
            }
        };
        if is_ending {
            sys::end_thread();
        }
        if let Some(stat) = file(&brake.stat) {
            beside.follow(stat);
        }
        lock::wait(&brake.bell, seen_bell, Some(wait_ns));
    }
}

/// The evictor's: which threads there were when it last looked for their stacks, and when that was.
pub(crate) struct Noted {
    lists: [usize; STACKS_MAX],
    at_ns: u64,
}

impl Default for Noted {
    fn default() -> Noted {
        Noted { lists: [0; STACKS_MAX], at_ns: 0 }
    }
}

impl Noted {
    /// Finds the stacks of the program's threads, and has them be such as can be protected.
    pub fn note_stacks(&mut self, pager: &Pager, channel: &Channel, maps: BorrowedFd<'_>, buffer: &mut MapsBuffer) {
        let (lists, now_ns) = (lists_of_threads(pager), clock_ns());
        if lists == self.lists && now_ns - self.at_ns < NOTED_NS {
            return;
        }
        let state = pager.state.lock();
        // What the map shows must be what the regions say; nor may what is protected be forgotten.
        if pager.frozen.load(Acquire) || pager.brake.is_on() || !pager.is_settled(&state) || !channel.is_quiet() {
            return;
        }
        let State { regions, .. } = &**state;
        let (mut stacks, mut count) = ([const { 0..0 }; STACKS_MAX], 0);
        maps::for_each(maps, buffer, |mapping| {
            let range = mapping.start..mapping.end;
            let is_registered = regions.containing(range.start).is_some_and(|region| region.end >= range.end);
            let stack = match range.contains(&pager.main_stack) {
                true => Some(range.clone()),
                false if is_registered => stack_in(&range, &lists),
                false => None,
            };
            if let (Some(stack), Some(place)) = (stack, stacks.get_mut(count))
                // All of the mapping, which would be two else.
                && channel.uffd.register_for_writes(range.start, range.len(), is_registered).is_ok()
            {
                (*place, count) = (stack, count + 1);
            }
        });
        pager.brake.put_stacks(stacks.into_iter().take(count));
        (self.lists, self.at_ns) = (lists, now_ns);
    }
}

impl Pager {
    /// Whether a thread whose list of robust futexes is there is the pager's.
    pub(crate) fn is_own_list(&self, list: usize) -> bool {
        let own = self.robust as usize;
        (own..own + size_of::<RobustList>()).contains(&list)
    }
}

/// Where the lists of robust futexes of the program's threads are, which are in their control blocks.
fn lists_of_threads(pager: &Pager) -> [usize; STACKS_MAX] {
    let (mut lists, mut count) = ([0; STACKS_MAX], 0);
    process::for_each_thread(|thread| {
        if let Some(place) = lists.get_mut(count)
            && let Some(list) = sys::robust_list_of(thread).filter(|list| !pager.is_own_list(*list))
        {
            (*place, count) = (list, count + 1);
        }
    });
    lists
}

/// What lies in a mapping of a stack that has its thread's control block above.
fn stack_in(mapping: &Range<usize>, lists: &[usize]) -> Option<Range<usize>> {
    let list = lists.iter().copied().filter(|list| mapping.contains(list)).max()?;
    let end = (list - BELOW_LIST_BYTES) / PAGE * PAGE;
    Some(mapping.start.max(end.saturating_sub(STACK_BYTES_MAX))..end).filter(|stack| !stack.is_empty())
}

/// A thread waits to write to a page: until all are let go, or, if it waits for nothing, no longer.
pub(crate) fn wants_to_write(pager: &Pager, channel: &Channel, address: usize) {
    let is_held = || pager.brake.is_on.load(SeqCst) && pager.brake.stacks().any(|stack| stack.contains(&address));
    if !is_held() && channel.uffd.protect(address, PAGE, false).is_err() {
        // The map is changing: it asks again.
        channel.uffd.wake(address, PAGE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_is_what_lies_below_the_control_block_and_not_the_page_it_is_on() {
        let mapping = 0x10_0000..0x90_1000;
        assert_eq!(stack_in(&mapping, &[0, 0x90_0900]), Some(0x10_0000..0x90_0000));
        // The kernel's word is on the page before.
        assert_eq!(stack_in(&mapping, &[0x90_0010]), Some(0x10_0000..0x8f_f000));
        assert_eq!(stack_in(&mapping, &[0, 0x9000_0000]), None);
        assert_eq!(stack_in(&(0x90_0000..0x90_1000), &[0x90_0900]), None, "nothing below");
        assert_eq!(stack_in(&(0x10_0000..0x1000_0000), &[0xfff_f900]), Some(0xf7f_f000..0xfff_f000), "at most");
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
