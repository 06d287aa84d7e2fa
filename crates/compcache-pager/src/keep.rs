//! Pages that may not leave: the kernel refers to them and would not notice.
//!
//! A page lent to a pipe (vmsplice) can be moved like any other, and then the pipe has a frame that is no longer the
//! program's: what the program writes there does not reach the reader. A robust mutex whose owner ends is marked by the
//! kernel, which does not wait for a pager when it does. Such pages stay until they are unmapped. Only what is registered is announced when it is unmapped, so they are registered soon; what is mapped in the place of pages whose
//! end was not announced stays resident as well.
//!
//! A thread of the program's may not hold the state lock once anything is registered: its own stack may have left, and
//! the handler needs that lock to bring it back. So it leaves a request, and the evictor, which does nothing else at that
//! moment, carries it out; when the request is answered, no page of the range is on its way out any more unless it had
//! left before. Nobody forks meanwhile: events would be kept for later, and an unmapping that is older than the request
//! would be applied after it.

use crate::fork;
use crate::memory::PAGE;
use crate::pager::{Pager, State};
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering::*};

/// The range that a thread of the program's asks the evictor to keep.
pub struct KeepRequest {
    start: AtomicUsize,
    end: AtomicUsize,
}

impl KeepRequest {
    pub const fn new() -> Self {
        KeepRequest { start: AtomicUsize::new(0), end: AtomicUsize::new(0) }
    }
}

impl Pager {
    /// The pages of `len` bytes at `address` do not leave from now on, until they are unmapped. Those that have left come
    /// back when they are touched, and stay.
    pub fn keep(&self, address: usize, len: usize) {
        let Some(range) = pages_around(address, len) else { return };
        fork::while_nobody_forks(self, || request(self, range));
    }
}

/// The whole pages on which `len` bytes at `address` lie; `None` when there are none.
fn pages_around(address: usize, len: usize) -> Option<Range<usize>> {
    let end = address.checked_add(len)?.checked_next_multiple_of(PAGE)?;
    (len > 0).then_some(address / PAGE * PAGE..end)
}

fn request(pager: &Pager, range: Range<usize>) {
    if !pager.has_threads().load(Acquire) {
        return;
    }
    if !pager.armed.load(Acquire) {
        // No fault of ours can happen: nothing is registered, and nothing will be while nobody can fork.
        apply(pager, &mut pager.state.lock(), range);
        return;
    }
    pager.keep_request.start.store(range.start, Relaxed);
    pager.keep_request.end.store(range.end, Relaxed);
    fork::ask_to_keep(pager);
}

/// In the evictor: does what was asked for.
pub fn carry_out(pager: &Pager) {
    let request = &pager.keep_request;
    let range = request.start.load(Relaxed)..request.end.load(Relaxed);
    apply(pager, &mut pager.state.lock(), range);
}

fn apply(pager: &Pager, state: &mut State, range: Range<usize>) {
    let covers = |found: Option<Range<usize>>| found.is_some_and(|found| found.end >= range.end);
    if covers(state.kept.containing(range.start)) {
        return;
    }
    if !covers(state.regions.containing(range.start)) {
        pager.kept_unregistered.store(true, Release);
    }
    state.kept.add_at_least(range);
}
