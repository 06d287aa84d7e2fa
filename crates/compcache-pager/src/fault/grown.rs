//! Locked memory that becomes longer and moves.
//!
//! mremap(2) has the kernel fill the new part of locked memory, and only then tells that the old one has moved; and until that is told, the kernel refuses to have anything filled. So
//! nobody could answer who fills it. A thread within mremap touches no other memory than that part: what is asked for by one is left to the kernel, which fills it with zeroes as it would
//! without us; when the move is told it is registered again, so that it is one mapping.
//!
//! # Source
//! Linux `mm/mremap.c`: `mm_populate` comes before `mremap_userfaultfd_complete`.

use super::{Fault, Handler};
use crate::lock::Guard;
use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State, clock_ns};
use crate::process::{self, Mremap};
use crate::remap::News;
use crate::uffd::{self, Message};
use alloc::boxed::Box;
use core::ops::Range;
use linux_raw_sys::general::uffd_msg;

/// How long nothing was told that must be before it is looked who waits.
const PATIENCE_NS: u64 = 2_000_000;
/// Threads that do this at the same time.
const PARTS_MAX: usize = 32;

/// No thread has this number.
const NOBODY: u32 = 0;

/// What was left to the kernel, until the move is told.
#[derive(Default)]
pub(super) struct Grown {
    /// The fault that is being answered.
    pub answering: Option<Fault>,
    /// Who was woken, and asks again if he still waits for that: what was read may be older than that.
    asked: [Option<(Fault, Mremap)>; PARTS_MAX],
    asked_next: usize,
    parts: [Option<Part>; PARTS_MAX],
}

/// The new part of what a thread makes longer.
struct Part {
    thread: u32,
    call: Mremap,
    range: Range<usize>,
}

impl Grown {
    /// In a copy of the process.
    pub fn clear(&mut self) {
        *self = Grown::default();
    }

    /// Leaves to the kernel what is asked for by threads within mremap, if nothing has been told since `since_ns`.
    fn leave(
        &mut self,
        channel: &Channel,
        since_ns: &mut Option<u64>,
        pending: &mut [Fault],
        messages: &mut [uffd_msg],
    ) {
        let now_ns = clock_ns();
        if now_ns - *since_ns.get_or_insert(now_ns) < PATIENCE_NS {
            return;
        }
        *since_ns = None;
        if let Some(fault) = self.answering.filter(|fault| self.leave_one(channel, *fault)) {
            self.answering = None;
            forget(fault.thread, pending, messages);
        }
        for place in 0..pending.len() + messages.len() {
            let asked = match pending.get(place) {
                Some(fault) => Some(*fault).filter(|fault| fault.thread != NOBODY),
                None => fault_of(&messages[place - pending.len()]),
            };
            if let Some(fault) = asked.filter(|fault| self.leave_one(channel, *fault)) {
                forget(fault.thread, pending, messages);
            }
        }
    }

    /// False when who waits there does not wait for that; else it goes on, perhaps to ask again.
    fn leave_one(&mut self, channel: &Channel, fault: Fault) -> bool {
        let start = fault.page as usize * PAGE;
        let Some(call) = process::mremap_of(fault.thread).filter(|call| moves_to(call, start)) else { return false };
        let asks = Some((fault, call));
        let Some(asked) = self.asked.iter_mut().find(|asked| **asked == asks) else {
            self.asked[self.asked_next] = asks;
            self.asked_next = (self.asked_next + 1) % PARTS_MAX;
            channel.uffd.wake(start, PAGE);
            return true;
        };
        *asked = None;
        let mut parts = self.parts.iter().flatten();
        let known = parts.find(|part| (part.thread, part.call) == (fault.thread, call) && part.range.contains(&start));
        let range = match known {
            // The registrar has found it, and registered it again.
            Some(part) => start..part.range.end,
            // Nothing is there yet, and it begins at the beginning.
            None => {
                let range = start..start + (call.new_len - call.old_len);
                if call.to.is_some_and(|to| to + call.old_len != start) {
                    return false;
                }
                let of_others = |part: &Option<Part>| part.as_ref().is_none_or(|part| part.thread == fault.thread);
                let Some(place) = self.parts.iter_mut().find(|part| of_others(part)) else { return false };
                *place = Some(Part { thread: fault.thread, call, range: range.clone() });
                range
            }
        };
        channel.uffd.unregister(range.start, range.len()).is_ok()
    }

    /// Something has been told: if it is that the old part has moved, the new one, behind it, is registered as that is.
    pub fn told(&mut self, channel: &Channel, event: &Message) {
        let Message::Remap { to, len, .. } = event else { return };
        for place in &mut self.parts {
            if let Some(part) = place.take_if(|part| part.range.start == to + len) {
                // If it is not what it was: nobody misses anything there, and the registrar finds what there is.
                let _ = channel.uffd.register(part.range.start, part.range.len());
            }
        }
    }
}

/// Whether a page may be of the new part of what a call makes longer and moves. What grows where it is is answered as ever: nothing is untold.
fn moves_to(call: &Mremap, page: usize) -> bool {
    let is_there = (call.address..call.address.saturating_add(call.new_len)).contains(&page);
    let is_before = |to| page < to + call.old_len || page >= to + call.new_len;
    call.new_len > call.old_len && !is_there && !call.to.is_some_and(is_before)
}

/// The thread goes on, and may soon be within mremap for something else: what it has asked for is not asked for any more.
fn forget(thread: u32, pending: &mut [Fault], messages: &mut [uffd_msg]) {
    pending.iter_mut().filter(|fault| fault.thread == thread).for_each(|fault| fault.thread = NOBODY);
    let its = messages.iter_mut().filter(|message| fault_of(message).is_some_and(|fault| fault.thread == thread));
    its.for_each(|message| message.event = 0);
}

fn fault_of(message: &uffd_msg) -> Option<Fault> {
    match uffd::decode(message)? {
        Message::Fault { address, thread } => Some(Fault { page: (address / PAGE) as u64, thread }),
        _ => None,
    }
}

impl Handler {
    /// Nothing can be read, and something is still to be told, since `since_ns`: perhaps by a thread that waits for us.
    pub(super) fn leave_what_grows(&mut self, channel: &Channel, since_ns: &mut Option<u64>) {
        let Handler { early, grown, pending, pending_len, .. } = self;
        grown.leave(channel, since_ns, &mut pending[..*pending_len], early.kept());
    }

    /// Takes the lock where pages leave by mremap: whoever has it may wait for a thread that waits for us.
    pub(super) fn lock_early<'a>(&mut self, pager: &'a Pager, channel: &Channel) -> Guard<'a, Box<State>> {
        let Handler { early, grown, pending, pending_len, .. } = self;
        let mut since_ns = None;
        early.lock(pager, channel, &pager.state, |news| match news {
            News::Read(message) => {
                since_ns = None;
                uffd::decode(message).iter().for_each(|event| grown.told(channel, event));
            }
            News::Nothing(messages) => grown.leave(channel, &mut since_ns, &mut pending[..*pending_len], messages),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_to_the_kernel_is_the_new_part_of_what_moves() {
        let fixed = Mremap { address: 0x10_0000, old_len: 0x4000, new_len: 0x9000, to: Some(0x50_0000) };
        assert!(moves_to(&fixed, 0x50_4000) && moves_to(&fixed, 0x50_8000));
        for elsewhere in [0x50_3000, 0x50_9000, 0x10_4000, 0x40_0000] {
            assert!(!moves_to(&fixed, elsewhere), "{elsewhere:#x}");
        }
        let anywhere = Mremap { to: None, ..fixed };
        assert!(moves_to(&anywhere, 0x90_4000) && !moves_to(&anywhere, 0x10_4000), "it may grow where it is");
        assert!(!moves_to(&Mremap { new_len: 0x4000, ..fixed }, 0x50_4000), "no longer");
    }
}
