//! Eviction without UFFDIO_MOVE, for kernels before 6.8: page tables move with mremap(MREMAP_DONTUNMAP) (Linux 5.7).
//!
//! The range stays mapped and registered, and is empty: whoever touches it is a fault of ours, as with UFFDIO_MOVE. Three
//! things are different.
//!
//! **mremap takes one range whole.** A call costs as much for 64 pages as for one, so it takes what lies between two cold
//! pages along with them; what is hot comes back by the next fault.
//!
//! **mremap announces itself.** The caller sleeps until its own event has been read, and the handler alone reads; but the
//! evictor must hold the lock, or the range could be unmapped, and something else mapped there, between its decision and
//! the call. So the handler, while it waits for the lock, looks at the probe, the first frame that is being filled. Once
//! there is a page in it, it is safe to let whoever changes the map go on: what they changed is ordered after the move.
//! Then the handler reads without the lock, keeps what it reads ([`Early`]), and takes it in before it decides anything.
//! Until then nobody else decides either ([`Remapping::unread`]).
//!
//! | evictor                    | handler                        |
//! |----------------------------|--------------------------------|
//! | lock; no event on its way  |                                |
//! | probe is set               | wants the lock                 |
//! | mremap ...                 | no page at the probe: waits    |
//! | ... has moved, sleeps      | a page at the probe: reads     |
//! | goes on; probe is cleared  | waits for the lock             |
//! | unlock                     | lock; takes in what it read    |
//!
//! **mremap asks nobody.** UFFDIO_MOVE refuses a range that is not registered, and pages that a device may write to. Here
//! the first is found out afterwards: a range that was unmapped in the instant before the call, and mapped anew by another
//! thread, is not registered at its new place either; if another thread has moved a registered range there, its event comes
//! with those that were read early ([`not_meant`]). What was taken then cannot be given back unseen, and the process is
//! ended: a lost page would be a wrong byte. The second nobody can find out: a process that may have such pages is not
//! evicted from at all ([`Pager::note_devices`]).

use crate::lock::{Guard, Mutex};
use crate::memory::{self, PAGE};
use crate::pager::{Channel, Pager, State, clock_ns};
use crate::scan;
use crate::shared::Trouble;
use crate::staging::{Frame, GROUP};
use crate::sys::{self, Errno};
use crate::uffd::Message;
use alloc::boxed::Box;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use linux_raw_sys::general::uffd_msg;

/// Messages that can be kept.
const EARLY_MAX: usize = 4096;
/// A call that has not moved its first page after this time never will: an emulated machine beside busy ones took a second.
const CALL_NS_MAX: u64 = 30_000_000_000;
/// How long the handler sleeps at most before it looks at the probe again.
const BETWEEN_LOOKS_NS: u64 = 50_000;
const SPINS: u32 = 250;

/// What evictor and handler tell each other while page tables move.
pub struct Remapping {
    kernel: Option<Kernel>,
    /// The frame that shows whether the call has moved anything; 0 when there is no call.
    probe: AtomicUsize,
    /// The handler has read messages that it has not taken in.
    unread: AtomicBool,
    /// A device may write to pages of this process at any time.
    devices: AtomicBool,
    /// All memory is locked.
    pub locked: AtomicBool,
    /// Something of the program's is mapped within staging.
    shares_staging: AtomicBool,
}

impl Remapping {
    /// No call is under way.
    pub const fn new(kernel: Option<Kernel>) -> Self {
        Remapping {
            kernel,
            probe: AtomicUsize::new(0),
            unread: AtomicBool::new(false),
            devices: AtomicBool::new(false),
            locked: AtomicBool::new(false),
            shares_staging: AtomicBool::new(false),
        }
    }

    /// Whether the kernel can do what is needed here.
    pub fn is_possible(&self) -> bool {
        self.kernel.is_some()
    }

    /// Whether something of the program's is mapped within staging: not all of that range is the pager's any more.
    pub fn shares_staging(&self) -> bool {
        self.shares_staging.load(Acquire)
    }

    /// Whether there are messages that were read and not taken in: then nobody decides anything.
    pub fn has_unread(&self) -> bool {
        self.unread.load(Acquire)
    }

    fn has_moved(&self, channel: &Channel) -> bool {
        let probe = self.probe.load(Acquire);
        probe != 0 && scan::is_there(channel.pagemap(), probe) == Some(true)
    }
}

impl Pager {
    /// A device may write to pages of this process at any time from now on, and the kernel does not say to which: the process has opened
    /// a file for direct input, or a queue of asynchronous input. None leaves any more, once this has returned.
    pub fn note_devices(&self) {
        if !self.remapping.devices.swap(true, SeqCst) {
            self.state.pass();
        }
    }

    /// Whether [`Pager::note_devices`] matters: whether pages leave in a way that asks nobody.
    pub fn needs_to_know_devices(&self) -> bool {
        self.remapping.is_possible()
    }

    /// Whether [`Pager::note_devices`] was called.
    pub(crate) fn has_devices(&self) -> bool {
        self.remapping.devices.load(Acquire)
    }
}

/// Messages read without the lock, in order.
pub struct Early {
    messages: [uffd_msg; EARLY_MAX],
    next: usize,
    len: usize,
}

impl Early {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.next == self.len
    }

    /// Forgets all of them.
    pub fn clear(&mut self) {
        (self.next, self.len) = (0, 0);
    }

    /// The oldest. The caller holds the lock, and takes in all of them before it decides anything.
    pub fn pop(&mut self, pager: &Pager) -> Option<uffd_msg> {
        if self.is_empty() {
            self.clear();
            pager.remapping.unread.store(false, Release);
            return None;
        }
        self.next += 1;
        Some(self.messages[self.next - 1])
    }

    /// What was read, and not taken in.
    pub fn kept(&mut self) -> &mut [uffd_msg] {
        &mut self.messages[self.next..self.len]
    }

    /// Takes the lock in the handler; reads meanwhile what the evictor waits for, and tells of it.
    pub fn lock<'a>(
        &mut self,
        pager: &Pager,
        channel: &Channel,
        state: &'a Mutex<Box<State>>,
        mut tell: impl FnMut(News<'_>),
    ) -> Guard<'a, Box<State>> {
        let (mut rounds, begun_ns) = (0, clock_ns());
        loop {
            if let Some(guard) = state.try_lock() {
                pager.remapping.unread.store(!self.is_empty(), Release);
                return guard;
            }
            if pager.remapping.has_moved(channel) && self.read(pager, channel) {
                tell(News::Read(&self.messages[self.len - 1]));
                rounds = 0;
            } else if rounds < SPINS {
                rounds += 1;
                core::hint::spin_loop();
            } else if let Some(guard) = state.lock_within(BETWEEN_LOOKS_NS) {
                pager.remapping.unread.store(!self.is_empty(), Release);
                return guard;
            } else if pager.remapping.probe.load(Acquire) != 0 && clock_ns() - begun_ns > CALL_NS_MAX {
                // The evictor waits for its event, and there is no telling whether something moved.
                crate::process::die(pager, Trouble::NotMeant);
            } else {
                tell(News::Nothing(self.kept()));
            }
        }
    }

    /// Reads one message, if there is one.
    fn read(&mut self, pager: &Pager, channel: &Channel) -> bool {
        if self.len == EARLY_MAX {
            crate::process::die(pager, Trouble::Bug);
        }
        // Before it is read: who waits for that goes on at once.
        pager.remapping.unread.store(true, Release);
        let read = channel.uffd.read(&mut self.messages[self.len..=self.len]);
        self.len += read;
        read > 0
    }
}

/// What there is to tell while the lock is waited for.
pub enum News<'a> {
    /// This was read.
    Read(&'a uffd_msg),
    /// It takes long, and these have been read, and not taken in.
    Nothing(&'a mut [uffd_msg]),
}

/// What mremap does on this kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kernel {
    /// A call that is refused for its source leaves its target alone (Linux 6.17; before, it was unmapped by then).
    keeps_target: bool,
}

impl Kernel {
    /// Tries; `None` without MREMAP_DONTUNMAP. Only while the process has one thread: others might map something between.
    pub fn probe() -> Option<Kernel> {
        let (from, to) = (memory::map(2 * PAGE).ok()?, memory::map(2 * PAGE).ok()?);
        // SAFETY: ranges mapped just now, which nobody uses.
        unsafe {
            let possible = sys::mremap_dont_unmap(from as usize, PAGE, to as usize).is_ok();
            // As it is refused later: a range that its first mapping does not fill.
            let _ = rustix::mm::munmap(from.add(PAGE).cast(), PAGE);
            let _ = sys::mremap_dont_unmap(from as usize, 2 * PAGE, to as usize);
            let keeps_target = !memory::map_where_nothing_is(to as usize, 2 * PAGE);
            let _ = rustix::mm::munmap(from.cast(), PAGE);
            let _ = rustix::mm::munmap(to.cast(), 2 * PAGE);
            possible.then_some(Kernel { keeps_target })
        }
    }
}

/// Whether an event that was read early may say that the span just taken was not the one meant: something was moved there at
/// the same time. If it came before the call, the call took all of it; if a page is there, it came after.
pub fn not_meant(channel: &Channel, state: &State, event: &Message) -> bool {
    let Message::Remap { to, len, .. } = event else { return false };
    let both = state.taken_span.start.max(*to)..state.taken_span.end.min(to + len);
    !both.is_empty() && scan::are_there(channel.pagemap(), both).is_none_or(|there| there == 0)
}

/// Moves what is present of `span`, at most a group's worth, to the frames from `frame` on, which hold nothing. Returns
/// which frames hold a page now, the first in the lowest bit.
///
/// The caller holds the lock, and every event has been taken in.
///
/// # Errors
/// ENOENT when there is nothing at the start of the span; else what mremap says. Nothing has moved.
pub fn take_out(
    pager: &Pager,
    channel: &Channel,
    state: &mut State,
    span: &Range<usize>,
    frame: Frame,
) -> Result<u64, Errno> {
    let (target, len) = (state.staging.address(frame), span.end - span.start);
    if scan::is_there(channel.pagemap(), span.start) != Some(true) {
        return Err(Errno::ENOENT);
    }
    state.own_move = (span.start, target);
    pager.remapping.probe.store(target, Release);
    // SAFETY: the target's frames hold nothing; the source stays mapped, and its pages are accounted for below.
    let moved = unsafe { sys::mremap_dont_unmap(span.start, len, target) };
    let there = moved.map(|()| scan::are_there(channel.pagemap(), target..target + len));
    let registered = matches!(there, Ok(Some(there)) if there & 1 == 1) && channel.registration_of(target);
    pager.remapping.probe.store(0, Release);
    let there = match there {
        Ok(Some(there)) => there,
        Ok(None) => crate::process::die(pager, Trouble::NoProc),
        Err(errno) => {
            state.own_move = (0, 0);
            let kept = errno != Errno::ENOMEM && pager.remapping.kernel.is_some_and(|kernel| kernel.keeps_target);
            if kept && scan::are_there(channel.pagemap(), target..target + len).is_some_and(|there| there != 0) {
                // Kernels that keep the target move several mappings with one call, and have then moved a part of it.
                crate::process::die(pager, Trouble::NotMeant);
            }
            // Else somebody may have mapped something there since.
            if !kept && !memory::map_where_nothing_is(target, len) {
                state.staging.retire(frame as usize / GROUP);
                pager.remapping.shares_staging.store(true, Release);
            }
            return Err(errno);
        }
    };
    if !registered {
        state.own_move = (0, 0);
        // Another mapping than the one that was meant. Nothing of it is lost if it had no pages yet.
        // SAFETY: the frames are the pager's own.
        if there != 0 || !unsafe { memory::map_over(target, len) } {
            crate::process::die(pager, Trouble::NotMeant);
        }
        return Err(Errno::ENOENT);
    }
    // The frames are the pager's now: no events, no faults, and rights as its own memory has them.
    let _ = channel.uffd.unregister(target, len);
    // SAFETY: frames are the pager's own.
    if unsafe { memory::set_access(target, len, true) }.is_err() {
        crate::process::die(pager, Trouble::NoMemory);
    }
    // SAFETY: as above. A copy of the process must find no holes there, and locked frames could not be given back.
    unsafe {
        let _ = rustix::mm::madvise(target as *mut core::ffi::c_void, len, rustix::mm::Advice::LinuxDoFork);
        let _ = rustix::mm::munlock(target as *mut core::ffi::c_void, len);
    }
    state.taken_span = span.clone();
    Ok(there)
}
