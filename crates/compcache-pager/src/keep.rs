//! Pages that may not leave: the kernel refers to them and would not notice.
//!
//! A page lent to a pipe (vmsplice) can be moved like any other, and then the pipe has a frame that is no longer the
//! program's: what the program writes there does not reach the reader. A robust mutex whose owner ends is marked by the
//! kernel, which does not wait for a pager when it does. Such pages stay until they are unmapped. Only what is registered is
//! announced when it is unmapped, so they are registered soon; what is mapped in the place of pages whose end was not announced
//! stays resident as well.
//!
//! Locked memory is known to UFFDIO_MOVE, which refuses it, and not to mremap: where that is the way, mlock is told here.
//!
//! Guards (MADV_GUARD_INSTALL) are put on pages without an event. While that is done no page of the range may leave, and
//! then all that is kept of it is dropped. As long as there are guards nothing may be brought there that was not asked for:
//! UFFDIO_COPY lays a page over a guard.
//!
//! A thread of the program's may not hold the state lock once anything is registered: its own stack may have left, and
//! the handler needs that lock to bring it back. So it leaves a request, and the evictor, which does nothing else at that
//! moment, carries it out; when the request is answered, no page of the range is on its way out any more unless it had
//! left before. What was unmapped before the request must be forgotten before it: a mapping in the same place would lose what
//! was just asked for. So the evictor waits until every event has been told and applied, another thread's too, and nobody forks
//! meanwhile, which would keep events for later.

use crate::fork;
use crate::lock;
use crate::memory::{self, PAGE};
use crate::pager::{BEHIND_FRAMES_BYTES, MORGUE_BYTES, Pager, State};
use crate::process::page_of;
use crate::staging::Kind;
use core::ffi::c_void;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};

/// What a thread of the program's asks of the evictor, for a range.
pub struct KeepRequest {
    change: AtomicU32,
    start: AtomicUsize,
    end: AtomicUsize,
}

// The changes.
const KEEP: u32 = 0;
const GUARD: u32 = 1;
const UNGUARD: u32 = 2;
const LOCK: u32 = 3;
const UNLOCK: u32 = 4;

impl KeepRequest {
    pub const fn new() -> Self {
        KeepRequest { change: AtomicU32::new(KEEP), start: AtomicUsize::new(0), end: AtomicUsize::new(0) }
    }
}

impl Pager {
    /// The pages of `len` bytes at `address` do not leave from now on, until they are unmapped. Those that have left come
    /// back when they are touched, and stay.
    pub fn keep(&self, address: usize, len: usize) {
        let Some(range) = pages_around(address, len) else { return };
        self.brake.bar(&range);
        fork::while_nobody_forks(self, || request(self, KEEP, range));
    }

    /// Memory is locked, or no longer (mlock, munlock). UFFDIO_MOVE leaves such pages alone; other ways must be told.
    pub fn set_locked(&self, address: usize, len: usize, locked: bool) {
        let Some(range) = pages_around(address, len).filter(|_| self.remapping.is_possible()) else { return };
        fork::while_nobody_forks(self, || request(self, if locked { LOCK } else { UNLOCK }, range));
    }

    /// Runs `lock`, which locks all memory of the process (mlockall): what is evicted comes back to be locked, and frames are
    /// left out, empty, so that locked memory is not evicted again: they do not move between locked and unlocked ranges.
    ///
    /// The gate stays as it is: faults are answered meanwhile, and events put into their order by it.
    pub fn while_memory_is_locked(&self, lock: impl FnOnce() -> i32) -> i32 {
        fork::hold_still(self);
        // What moves by mremap is not asked whether it is locked.
        let was_locked = self.remapping.locked.swap(true, AcqRel);
        let (start, frames) = (self.frames.start, self.frames.len());
        let staging = frames + BEHIND_FRAMES_BYTES;
        let bell_start = start + staging - PAGE;
        let [frames, staging] = if self.remapping.shares_staging() { [0; 2] } else { [frames, staging] };
        let bell = if staging > 0 { PAGE } else { 0 };
        let morgue = (self.morgue(Kind::Data), MORGUE_BYTES);
        let code = self.code.in_use().map_or((0, 0), |code| (code.start, code.len()));
        for (start, len) in [(start, frames), (bell_start, bell), morgue, code] {
            // SAFETY: nothing is staged and nobody stages anything before `fork::parent`.
            let _ = unsafe { memory::set_access(start, len, false) };
        }
        let result = lock();
        if result != 0 {
            self.remapping.locked.store(was_locked, Release);
        }
        for (start, len) in [(start, staging), morgue] {
            // SAFETY: ranges of the pager's own.
            unsafe {
                let _ = rustix::mm::munlock(start as *mut c_void, len);
                let _ = memory::set_access(start, len, true);
            }
        }
        if code.1 > 0 && !self.code.allow() {
            self.code.close();
        }
        fork::parent(self);
        result
    }

    /// No memory is locked any more (munlockall).
    pub fn set_all_unlocked(&self) {
        self.remapping.locked.store(false, Release);
        self.set_locked(0, (usize::MAX >> 1) / PAGE * PAGE, false);
    }

    /// Runs `install`, which puts guards on a range and has dropped its contents when it returns. No page of the range
    /// leaves while it runs, and nothing is brought there unasked from now on.
    pub fn while_guards_come<T>(&self, address: usize, len: usize, install: impl FnOnce() -> T) -> T {
        let Some(range) = pages_around(address, len) else { return install() };
        fork::while_nobody_forks(self, || {
            request(self, GUARD, range);
            install()
        })
    }

    /// Runs `remove`, which takes the guards off a range; it says whether all are gone.
    pub fn while_guards_go(&self, address: usize, len: usize, remove: impl FnOnce() -> bool) {
        fork::while_nobody_forks(self, || {
            let removed = remove();
            if let Some(range) = pages_around(address, len).filter(|_| removed) {
                request(self, UNGUARD, range);
            }
        });
    }
}

impl State {
    /// Whether the page at an address may not be evicted.
    pub(crate) fn must_stay(&self, address: usize) -> bool {
        [&self.kept, &self.guarded, &self.locked].into_iter().any(|list| list.containing(address).is_some())
    }

    /// Forgets what was to stay of a range that is mapped no more.
    pub(crate) fn let_go(&mut self, range: Range<usize>) {
        for list in [&mut self.kept, &mut self.guarded, &mut self.locked, &mut self.blocks] {
            list.remove_at_most(range.clone());
        }
    }

    /// What was to stay at `from` has moved.
    pub(crate) fn keep_at(&mut self, from: Range<usize>, to: usize) {
        for list in [&mut self.kept, &mut self.guarded, &mut self.locked, &mut self.blocks] {
            list.move_at_least(from.clone(), to);
        }
    }
}

/// The whole pages on which `len` bytes at `address` lie; `None` when there are none.
fn pages_around(address: usize, len: usize) -> Option<Range<usize>> {
    let end = address.checked_add(len)?.checked_next_multiple_of(PAGE)?;
    (len > 0).then_some(address / PAGE * PAGE..end)
}

fn request(pager: &Pager, change: u32, range: Range<usize>) {
    if !pager.has_threads().load(Acquire) {
        return;
    }
    if !pager.armed.load(Acquire) {
        // No fault of ours can happen: nothing is registered, and nothing will be while nobody can fork.
        apply(pager, &mut pager.state.lock(), change, range);
        return;
    }
    pager.keep_request.change.store(change, Relaxed);
    pager.keep_request.start.store(range.start, Relaxed);
    pager.keep_request.end.store(range.end, Relaxed);
    fork::ask_to_keep(pager);
}

/// In the evictor: does what was asked for.
pub fn carry_out(pager: &Pager) {
    let request = &pager.keep_request;
    let range = request.start.load(Relaxed)..request.end.load(Relaxed);
    let pages = page_of(range.start)..page_of(range.end);
    let channel = *pager.channel.lock();
    loop {
        let mut state = pager.state.lock();
        // What is being brought there must not come after the guards.
        let is_loading = state.loading.start < pages.end && pages.start < state.loading.end;
        if !is_loading && pager.is_settled(&state) && channel.is_none_or(|channel| channel.is_quiet()) {
            return apply(pager, &mut state, request.change.load(Relaxed), range);
        }
        drop(state);
        lock::pause();
    }
}

fn apply(pager: &Pager, state: &mut State, change: u32, range: Range<usize>) {
    let list = match change {
        KEEP => &mut state.kept,
        LOCK | UNLOCK => &mut state.locked,
        _ => &mut state.guarded,
    };
    if matches!(change, UNGUARD | UNLOCK) {
        return list.remove_at_most(range);
    }
    let covers = |found: Option<Range<usize>>| found.is_some_and(|found| found.end >= range.end);
    if covers(list.containing(range.start)) {
        return;
    }
    if !covers(state.regions.containing(range.start)) {
        pager.kept_unregistered.store(true, Release);
    }
    list.add_at_least(range);
}
