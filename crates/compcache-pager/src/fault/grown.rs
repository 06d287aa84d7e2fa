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
use crate::process;
use crate::remap::News;
use crate::scan;
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
    parts: [Range<usize>; PARTS_MAX],
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

    /// False when who waits there is not within mremap.
    fn leave_one(&mut self, channel: &Channel, fault: Fault) -> bool {
        let Some(len) = process::grown_by_mremap(fault.thread) else { return false };
        let start = fault.page as usize * PAGE;
        // It may have waited for something else, before.
        if scan::is_there(channel.pagemap(), start) != Some(false) {
            return false;
        }
        // The registrar may have found it, and registered it again.
        let known = self.parts.iter().find(|part| part.contains(&start)).cloned();
        if known.is_none() {
            let Some(place) = self.parts.iter_mut().find(|place| place.end == place.start) else { return false };
            // Nothing is there yet, and it begins at the beginning.
            *place = start..start + len;
        }
        channel.uffd.unregister(start, known.map_or(len, |part| part.end - start)).is_ok()
    }

    /// Something has been told: if it is that the old part has moved, the new one, behind it, is registered as that is.
    pub fn told(&mut self, channel: &Channel, event: &Message) {
        let Message::Remap { to, len, .. } = event else { return };
        for part in self.parts.iter_mut().filter(|part| part.end > part.start && part.start == to + len) {
            // If it is not what it was: nobody misses anything there, and the registrar finds what there is.
            let _ = channel.uffd.register(part.start, part.len());
            *part = 0..0;
        }
    }
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
            News::Read(message) => uffd::decode(message).iter().for_each(|event| grown.told(channel, event)),
            News::Nothing(messages) => grown.leave(channel, &mut since_ns, &mut pending[..*pending_len], messages),
        })
    }
}
