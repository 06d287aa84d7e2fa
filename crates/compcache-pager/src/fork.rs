//! Copies of the process.
//!
//! fork copies the compressed data like any memory, but not the descriptors the pager lives by: in the child what is
//! evicted would read as zeroes. So, in the handlers that fork runs:
//!
//! | when    | where                  | what                                                              |
//! |---------|------------------------|-------------------------------------------------------------------|
//! | prepare | parent                 | staging is emptied; from here on nothing changes that the child needs (`frozen`) |
//! | parent  | parent                 | what happened meanwhile is applied, eviction goes on              |
//! | child   | child, one thread      | threads, descriptors and registrations of its own; then fork returns |
//!
//! Between prepare and the copy, faults are still answered, by copying and without changing anything. Between the copy
//! and the child's handler, libc touches a few structures of its own; they are brought back in prepare
//! (`compcache-preload` knows them) and cannot be evicted meanwhile.
//!
//! Copies that the C library makes without fork handlers (clone, `_Fork`, a bare system call by `syscall`) get the same from
//! the preloaded object: [`Copying`]. One that is made past the C library is noticed where the kernel announces it (fork events,
//! with CAP_SYS_PTRACE): all its evicted pages are brought to it at once, and it goes on unpaged.

use crate::events::EventLog;
use crate::lock::{self, Guard, Mutex};
use crate::memory::PAGE;
use crate::pager::{Channel, NOTHING, Pager, State, Way, clock_ns};
use crate::shared::Trouble;
use crate::sys::Errno;
use crate::table::{Phase, Word};
use crate::uffd::{Message, Uffd};
use crate::{compress, copies, cpus, events, process, relay, restore, sys};
use compcache_store::{Page, PageIndex, Worker};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

const WAITING: u32 = 0;
const RECOVERED: u32 = 1;
/// So long it is waited for that no change of the map is untold: threads that do nothing but change it may leave no such moment.
const QUIET_NS: u64 = 10_000_000;

/// One fork at a time.
pub struct ForkTurn {
    turn: Mutex<()>,
    /// The mask of signals before [`prepare`], which blocks all: a handler might fork.
    signals: AtomicU64,
    /// [`prepare`] has been, and neither [`parent`] nor [`child`].
    is_prepared: AtomicBool,
    /// Whether the process is about to be copied, or stands still for another reason.
    is_for_copy: AtomicBool,
    stage: AtomicU32,
    recovered: AtomicU32,
    /// In the child: where the stack of its only thread is, which waits until it has its memory.
    stack: AtomicUsize,
}

// What a fork asks of the evictor, and what the evictor answers.
const IDLE: u32 = 0;
const FREEZE: u32 = 1;
const FROZEN: u32 = 2;
const THAW: u32 = 3;
// What was evicted to a file cannot be handed over: it must come back first.
const RECALL: u32 = 5;
// What another thread of the program's asks of the evictor while nobody forks.
const KEEP: u32 = 4;
// The pager's threads are to end, and will.
const END: u32 = 6;
const ENDED: u32 = 7;
// As END, for good.
const RETIRE: u32 = 8;

impl Default for ForkTurn {
    fn default() -> Self {
        Self::new()
    }
}

impl ForkTurn {
    /// Nobody forks.
    pub const fn new() -> Self {
        ForkTurn {
            turn: Mutex::new(()),
            signals: AtomicU64::new(0),
            is_prepared: AtomicBool::new(false),
            is_for_copy: AtomicBool::new(false),
            stage: AtomicU32::new(IDLE),
            recovered: AtomicU32::new(WAITING),
            stack: AtomicUsize::new(0),
        }
    }

    /// Whether a page of the child's has come to be there by what its only thread has called since the copy: what was stored of it
    /// lay below the stack's pointer, and is nobody's.
    pub(crate) fn is_stack_in_use(&self, address: usize) -> bool {
        const DEEP_BYTES: usize = 256 << 10;
        let here = self.stack.load(Acquire);
        (here.saturating_sub(DEEP_BYTES)..here + PAGE).contains(&address) && sys::is_present(address)
    }

    /// Whether the calling thread's [`prepare`] has done something.
    pub(crate) fn is_prepared(&self) -> bool {
        self.is_prepared.load(Acquire)
    }

    /// Whether somebody waits for all that is under way to come to its end.
    pub(crate) fn wants_to_freeze(&self) -> bool {
        self.stage.load(Acquire) == FREEZE
    }

    /// Whether a thread of the program's waits for the evictor.
    pub(crate) fn is_waited_for(&self) -> bool {
        !matches!(self.stage.load(Acquire), IDLE | FROZEN | ENDED)
    }

    /// Whether the pager is to leave the process: [`crate::retire`].
    pub(crate) fn wants_to_retire(&self) -> bool {
        self.stage.load(Acquire) == RETIRE
    }

    /// Keeps everybody from forking, if nobody does already. For the evictor before it starts to page: whoever has the
    /// turn and finds that nothing is registered can rely on it.
    pub(crate) fn try_take(&self) -> Option<Guard<'_, ()>> {
        self.turn.try_lock()
    }
}

/// Events read while a fork was under way: applied when it is over, in both processes. What is not used of it takes no memory.
pub type ForkLog = EventLog<4096>;

impl ForkLog {
    /// Which page's stored copy is now the contents of `page`, after what is in the log; `None` for zeroes.
    pub fn source(&self, page: u64) -> Option<u64> {
        let mut address = page as usize * PAGE;
        for event in self.iter().rev() {
            match event {
                Message::Remap { from, to, len } if (to..to + len).contains(&address) => address = address - to + from,
                Message::Remap { from, len, .. } if (from..from + len).contains(&address) => return None,
                Message::Remove { start, end } | Message::Unmap { start, end } if (start..end).contains(&address) => {
                    return None;
                }
                _ => {}
            }
        }
        Some((address / PAGE) as u64)
    }
}

/// Before a fork, in the thread that forks.
///
/// The descriptors are in a file table that this thread does not have, so the evictor does what is to be done; this
/// thread asks for it and waits. Returns whether anything may be evicted: then what is touched in the child before its
/// handler must be touched now.
///
/// A copy of the process that has no pager has nothing to prepare, and its turn may be held by a thread it does not have.
pub fn prepare(pager: &Pager) -> bool {
    stop(pager, true)
}

/// As [`prepare`], but no copy will be made: nothing leaves until [`parent`], and events are applied as ever.
pub(crate) fn hold_still(pager: &Pager) -> bool {
    stop(pager, false)
}

/// Whether a copy of the process is about to be made, so that nothing may be changed that it will need.
pub(crate) fn is_being_copied(pager: &Pager) -> bool {
    pager.frozen.load(Acquire) && pager.fork_turn.is_for_copy.load(Acquire)
}

fn stop(pager: &Pager, is_for_copy: bool) -> bool {
    if !pager.has_threads().load(Acquire) {
        pager.fork_turn.is_prepared.store(false, Release);
        return false;
    }
    let signals = sys::block_signals();
    pager.fork_turn.turn.hold();
    if !pager.has_threads().load(Acquire) {
        // The pager has left meanwhile.
        pager.fork_turn.is_prepared.store(false, Release);
        // SAFETY: held just above.
        unsafe { pager.fork_turn.turn.free_held() };
        sys::restore_signals(signals);
        return false;
    }
    pager.fork_turn.signals.store(signals, Release);
    pager.fork_turn.is_prepared.store(true, Release);
    if !pager.armed.load(Acquire) {
        // No fault of ours can happen: nothing is registered, and nothing will be while the lock is held.
        pager.state.hold();
        if !pager.armed.load(Acquire) {
            return false;
        }
        // SAFETY: held just above.
        unsafe { pager.state.free_held() };
    }
    let stage = &pager.fork_turn.stage;
    ask(pager, IDLE);
    // Only now is what was kept for the copy before applied.
    pager.fork_turn.is_for_copy.store(is_for_copy, Release);
    stage.store(FREEZE, Release);
    ask(pager, FROZEN);
    if let Some(spill) = &pager.spill
        && !spill.hand_over()
    {
        stage.store(RECALL, Release);
        ask(pager, FROZEN);
    }
    true
}

/// Rings for the evictor until it has brought the stage to `until`.
fn ask(pager: &Pager, until: u32) {
    let stage = &pager.fork_turn.stage;
    loop {
        let seen = stage.load(Acquire);
        if seen == until {
            return;
        }
        pager.ring();
        lock::wait(stage, seen, Some(10_000_000));
    }
}

/// Runs `work` in a thread of the program's while nobody forks. No signal comes meanwhile: its handler might fork.
///
/// A copy of the process that has no pager has nobody to exclude, and its turn may be held by a thread it does not have.
pub(crate) fn while_nobody_forks<T>(pager: &Pager, work: impl FnOnce() -> T) -> T {
    if !pager.has_threads().load(Acquire) {
        return work();
    }
    let before = sys::block_signals();
    pager.fork_turn.turn.hold();
    let result = work();
    // SAFETY: held just above, in this thread.
    unsafe { pager.fork_turn.turn.free_held() };
    sys::restore_signals(before);
    result
}

/// Has the evictor carry out the request of [`crate::keep`]. Only within [`while_nobody_forks`].
pub(crate) fn ask_to_keep(pager: &Pager) {
    ask(pager, IDLE);
    pager.fork_turn.stage.store(KEEP, Release);
    ask(pager, IDLE);
}

/// Has the pager's threads end: [`crate::relay`]. False when they cannot. Only between [`prepare`] and [`parent`].
pub(crate) fn ask_to_end(pager: &Pager, is_armed: bool) -> bool {
    let answer = ask_for_the_end(pager, END);
    // As it was before: for the one that thaws.
    pager.fork_turn.stage.store(if is_armed { FROZEN } else { IDLE }, Release);
    answer == ENDED
}

/// Has the pager's threads bring everything back and end. Only within [`while_nobody_forks`].
pub(crate) fn ask_to_retire(pager: &Pager) {
    ask(pager, IDLE);
    ask_for_the_end(pager, RETIRE);
    pager.fork_turn.stage.store(IDLE, Release);
}

/// It is done, and the evictor, which says so, is about to end.
pub(crate) fn retired(pager: &Pager) {
    pager.fork_turn.stage.store(ENDED, Release);
    lock::wake(&pager.fork_turn.stage);
}

/// Asks, and rings until there is an answer.
fn ask_for_the_end(pager: &Pager, how: u32) -> u32 {
    let stage = &pager.fork_turn.stage;
    stage.store(how, Release);
    loop {
        match stage.load(Acquire) {
            asked if asked == how => {
                pager.ring();
                lock::wait(stage, how, Some(10_000_000));
            }
            answer => return answer,
        }
    }
}

/// Called by the evictor whenever it is between two things: does what a thread of the program's has asked for.
pub fn serve(pager: &Pager) {
    let stage = &pager.fork_turn.stage;
    match stage.load(Acquire) {
        FREEZE => {
            // From here on nothing leaves: whoever comes now has just been touched.
            pager.note_threads();
            freeze(pager);
            if let Some(spill) = &pager.spill {
                spill.prepare_copy(pager);
            }
            stage.store(FROZEN, Release);
        }
        RECALL => {
            if let Some(spill) = &pager.spill {
                spill.recall(pager);
            }
            stage.store(FROZEN, Release);
        }
        THAW => {
            if let Some(spill) = &pager.spill {
                spill.copied();
            }
            let mut state = pager.state.lock();
            apply_log(pager, &mut state);
            pager.frozen.store(false, Release);
            if !pager.fork_turn.is_for_copy.load(Acquire) {
                give_up_old(pager, &mut state);
            }
            stage.store(IDLE, Release);
        }
        KEEP => {
            crate::keep::carry_out(pager);
            stage.store(IDLE, Release);
        }
        END if relay::hand_over(pager) => {
            let channel = *pager.channel.lock();
            relay::have_others_end(pager, channel.as_ref());
            stage.store(ENDED, Release);
            lock::wake(stage);
            sys::end_thread();
        }
        END => stage.store(IDLE, Release),
        _ => return,
    }
    lock::wake(stage);
}

/// Gives up what is stored of pages that have come back while nothing was to be changed: where they are locked now they never leave, which would.
fn give_up_old(pager: &Pager, state: &mut State) {
    events::for_each_known(state, ALL_PAGES, |state, page, word| {
        if word.phase() == Phase::Stored && word.is_here() {
            copies::drop_object(pager, state, page, word);
            state.table.update(page, Word::new(Phase::Resident));
        }
    });
}

fn freeze(pager: &Pager) {
    let channel = *pager.channel.lock();
    let mut until_ns = None;
    loop {
        let mut state = pager.state.lock();
        let is_ready = state.under_way == 0 && pager.is_settled(&state) && unstage_all(pager, &mut state);
        // A copy would not know of what has changed and is not told yet. There may be something of it all the time.
        let mut is_late = || clock_ns() > *until_ns.get_or_insert_with(|| clock_ns() + QUIET_NS);
        if is_ready && (channel.is_none_or(|channel| channel.is_quiet()) || is_late()) {
            pager.frozen.store(true, Release);
            return;
        }
        drop(state);
        lock::pause();
    }
}

/// Moves every staged page back to where it came from. False when an event is in the way: it must be read first.
pub(crate) fn unstage_all(pager: &Pager, state: &mut State) -> bool {
    let Some(channel) = *pager.channel.lock() else { return true };
    while let Some(group) = state.staging.staged.pop() {
        let held = state.staging.groups[group];
        for place in 0..held.pages.len() {
            let (page, frame) = (held.pages[place], (group * held.pages.len() + place) as u32);
            let word = state.table.get(page);
            if held.present >> place & 1 == 0 || word.phase() != Phase::Staged || word.payload() != frame {
                continue;
            }
            if !unstage(pager, &channel, state, page, word) {
                state.staging.staged.push_front(group);
                return false;
            }
        }
        compress::release(pager, state, group);
    }
    true
}

fn unstage(pager: &Pager, channel: &Channel, state: &mut State, page: u64, word: Word) -> bool {
    let (address, source) = (page as usize * PAGE, state.staging.address(word.payload()));
    let moved =
        matches!(channel.way, Way::Move { .. }) && channel.move_pages(channel.uffd, address, source, PAGE).1.is_none();
    if moved {
        state.staging.forget(word.payload());
    } else {
        // SAFETY: a staged page's frame is present.
        let (copied, error) = unsafe { channel.uffd.copy(address, source as *const u8, PAGE) };
        match error {
            None => state.grown_pages += (copied / PAGE) as u64,
            Some(Errno::EAGAIN) => return false,
            // Perhaps it is being moved, and that is still to be told.
            Some(Errno::ENOENT) if !channel.is_quiet() => return false,
            // Its range was taken away: nobody can ask for it.
            Some(Errno::ENOENT | Errno::ESRCH) => {}
            Some(_) => process::die(pager, Trouble::Bug),
        }
    }
    state.table.update(page, Word::new(Phase::Resident).with_heat(1));
    true
}

/// After a fork, in the parent.
pub fn parent(pager: &Pager) {
    if !pager.fork_turn.is_prepared.swap(false, AcqRel) {
        return;
    }
    if let Some(spill) = &pager.spill {
        spill.close_handed();
    }
    if pager.frozen.load(Acquire) {
        pager.fork_turn.stage.store(THAW, Release);
        pager.ring();
    } else {
        // SAFETY: held by `prepare`, in this thread.
        unsafe { pager.state.free_held() };
    }
    let signals = pager.fork_turn.signals.load(Acquire);
    // SAFETY: held by `prepare`, in this thread.
    unsafe { pager.fork_turn.turn.free_held() };
    sys::restore_signals(signals);
}

fn apply_log(pager: &Pager, state: &mut State) {
    let Some(channel) = *pager.channel.lock() else { return };
    let mut place = 0;
    while let Some(event) = state.fork_log.nth(place) {
        events::apply(pager, &channel, state, event);
        place += 1;
    }
    state.fork_log.clear();
}

/// After a fork, in the child: there is one thread, this one, and nothing answers faults until it is paged again.
///
/// # Safety
/// Only in the child of a fork, from its only thread, once.
pub unsafe fn child(pager: &'static Pager) {
    if !pager.fork_turn.is_prepared.swap(false, AcqRel) {
        return;
    }
    // SAFETY: says the caller.
    unsafe { begin_again(pager) };
    sys::restore_signals(pager.fork_turn.signals.load(Acquire));
}

/// # Safety
/// As [`child`].
unsafe fn begin_again(pager: &'static Pager) {
    // SAFETY: no other thread exists here; `prepare` saw to it that what the locks protect is whole.
    unsafe {
        pager.state.free_after_fork();
        pager.fork_turn.turn.free_after_fork();
        pager.channel.free_after_fork();
        pager.pool.free_reader_after_fork(PageIndex(pager.frozen_read.load(Acquire)));
    }
    pager.turn.forget();
    pager.frozen.store(false, Release);
    pager.handler_cpu.store(cpus::NONE, Release);
    pager.settle.store(cpus::SETTLED, Release);
    pager.evictor_sleeps.store(false, Release);
    // Locks are not inherited.
    pager.remapping.locked.store(false, Release);
    pager.fork_turn.stage.store(IDLE, Release);
    pager.forget_own_threads();
    pager.relay.forget_threads();
    pager.brake.reset();
    pager.slot.store(0, Release);
    let was_armed = pager.armed.swap(false, AcqRel);
    // SAFETY: the parent's threads, whose structures these were, do not exist here.
    let (evictor, handler) = unsafe { (&mut *pager.evictor, &mut *pager.handler) };
    evictor.reset();
    handler.reset();
    evictor.recover = was_armed;
    if let Some(spill) = &pager.spill {
        // SAFETY: says the caller; whoever used the backing was reading.
        unsafe { spill.begin_copy(pager) };
    }
    pager.fork_turn.recovered.store(WAITING, Release);
    if was_armed {
        let mut state = pager.state.lock();
        state.locked.clear();
        // The descriptor of the parent's pagemap is not ours, and what was dropped need not be looked at: our own
        // registrations come after, so nothing is dropped behind them.
        while let Some(event) = state.fork_log.remove(0).or_else(|| state.pending.take(0)) {
            match event {
                Message::Remove { start, end } => events::forget_contents(pager, &mut state, start..end),
                Message::Unmap { start, end } => events::forget_range(pager, &mut state, start..end),
                Message::Remap { from, to, len } => events::move_range(pager, &mut state, from, to, len),
                Message::Fault { .. } | Message::Protected { .. } | Message::Fork { .. } => {}
            }
        }
        let coming = pager.frozen_bring.load(Acquire);
        if coming != NOTHING && sys::is_present(coming as usize * PAGE) {
            state.table.note_here(coming);
        }
        state.generation += 1;
    }
    pager.frozen_bring.store(NOTHING, Release);
    let here = 0u8;
    pager.fork_turn.stack.store(&raw const here as usize, Release);
    if pager.start().is_err() {
        pager.region.note_trouble(Trouble::NoThread, 0);
        if was_armed {
            let bring_back = || {
                evictor.forget_wiped(pager);
                if let Some(spill) = &pager.spill {
                    spill.adopt();
                }
                restore::restore_all(pager, &mut evictor.worker, evictor.registrar.buffer());
                if let Some(spill) = &pager.spill {
                    spill.close_adopted();
                }
            };
            // SAFETY: the thread that was to have it could not be started, and is not tried again.
            unsafe { pager.on_evictors_stack(bring_back) };
        }
        return;
    }
    if was_armed {
        while pager.fork_turn.recovered.load(Acquire) == WAITING {
            lock::wait(&pager.fork_turn.recovered, WAITING, None);
        }
    }
    if let Some(spill) = &pager.spill {
        spill.close_handed();
    }
}

/// A copy that is being made where no fork handler is called. No signal comes meanwhile: its handler might fork.
pub struct Copying {
    pager: &'static Pager,
}

impl Copying {
    /// Before the copy, in the thread that makes it.
    pub fn begin(pager: &'static Pager) -> Copying {
        prepare(pager);
        sys::touch_stack();
        Copying { pager }
    }

    /// Whether the calling thread, of the child, is the only one but for the pager's.
    pub fn is_alone(&self) -> bool {
        relay::is_only_thread(self.pager)
    }

    /// Brings what the child needs before it is paged: the words below `address`, as far as a few calls go, if it is a stack's end.
    pub fn touch_below(&self, address: usize) {
        sys::touch_below(address);
    }

    /// The same for one word, whatever is around it.
    pub fn touch(&self, address: usize) {
        sys::bring_back(address);
    }

    /// After the copy, or when there is none, in the parent.
    pub fn end_in_parent(&self) {
        parent(self.pager);
    }

    /// In the child.
    ///
    /// # Safety
    /// As [`child`].
    pub unsafe fn end_in_child(&self) {
        // SAFETY: says the caller.
        unsafe { child(self.pager) };
    }
}

/// Called by a child's evictor when it is paged again, or has all its memory.
pub fn recovered(pager: &Pager) {
    pager.fork_turn.recovered.store(RECOVERED, Release);
    lock::wake(&pager.fork_turn.recovered);
}

pub(crate) const ALL_PAGES: Range<u64> = 0..crate::table::PAGES;

/// The kernel announces a copy of the process. One that the fork handlers know looks after itself; for any other,
/// everything evicted is brought to it here.
pub fn on_event(pager: &Pager, state: &mut State, worker: &mut Worker, contents: &mut Page, child: Uffd) {
    if is_being_copied(pager) {
        return child.close();
    }
    crate::populate::populate(pager, state, worker, contents, child);
}
