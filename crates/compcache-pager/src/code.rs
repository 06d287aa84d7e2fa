//! Frames for memory that may be written and executed: the heaps of compilers that run what they compile, such as SBCL's and Chez Scheme's.
//!
//! UFFDIO_MOVE takes pages only between mappings of the same rights, so what leaves such memory has frames of its own in staging, and a
//! morgue of its own. Both are addresses and no more, that nobody may touch, until the program has memory of that kind: no
//! other has any that is executable because of us.

use crate::memory::{self, PAGE};
use crate::pager::{Channel, MORGUE_BYTES, Way};
use crate::staging::{CODE_GROUPS, GROUP};
use crate::sys::Errno;
use core::ffi::c_void;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering::*};
use rustix::io::Errno as Refused;
use rustix::mm::{Advice, MprotectFlags, madvise, mprotect, munlock};

const FRAMES_BYTES: usize = CODE_GROUPS * GROUP * PAGE;
const BYTES: usize = FRAMES_BYTES + MORGUE_BYTES;

/// The frames, and behind them the morgue.
pub struct CodeFrames {
    start: usize,
    is_open: AtomicBool,
    /// The system refuses them, or kills who asks.
    is_forbidden: AtomicBool,
}

impl CodeFrames {
    /// Sets the addresses aside.
    pub fn reserve() -> Result<CodeFrames, Errno> {
        let start = memory::reserve(BYTES)? as usize;
        // A copy of the process finds them empty, as it does other frames.
        // SAFETY: the range is the pager's own, and empty.
        let _ = unsafe { madvise(start as *mut c_void, BYTES, Advice::LinuxWipeOnFork) };
        Ok(CodeFrames { start, is_open: AtomicBool::new(false), is_forbidden: AtomicBool::new(false) })
    }

    /// They are not asked for any more.
    pub fn forbid(&self) {
        self.is_forbidden.store(true, Release);
    }

    /// Address of the first frame.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Address of the morgue.
    pub fn morgue(&self) -> usize {
        self.start + FRAMES_BYTES
    }

    /// Frames and morgue, if they are in use.
    pub fn in_use(&self) -> Option<Range<usize>> {
        self.is_open.load(Acquire).then_some(self.start..self.start + BYTES)
    }

    /// Makes them memory that is like the program's. `false` where the system does not let it, or there is no need: mremap takes pages
    /// whatever their rights.
    pub fn open(&self, channel: &Channel) -> bool {
        if matches!(channel.way, Way::Remap) || self.is_forbidden.load(Acquire) {
            return false;
        }
        let is_open = self.allow() && self.register(channel);
        self.is_open.store(is_open, Release);
        if !is_open {
            self.close();
        }
        is_open
    }

    /// In a copy of the process: goes on with them, if they were in use and the parent's descriptor has let go of its ranges. Where they begin
    /// then.
    pub fn begin_in_copy(&self, channel: &Channel) -> Option<usize> {
        self.in_use()?;
        if !self.register(channel) {
            self.close();
        }
        self.in_use().map(|frames| frames.start)
    }

    /// Lets them be touched again, which nobody might for a while, and has them not be locked. Where that is forbidden it is not asked again.
    pub fn allow(&self) -> bool {
        if self.is_forbidden.load(Acquire) {
            return false;
        }
        let start = self.start as *mut c_void;
        // SAFETY: a range of the pager's own, in which nothing is that is wanted.
        let allowed = unsafe {
            let _ = munlock(start, BYTES);
            mprotect(start, BYTES, MprotectFlags::READ | MprotectFlags::WRITE | MprotectFlags::EXEC)
        };
        // Room for them there may be another time.
        if matches!(allowed, Err(Refused::ACCESS | Refused::PERM)) {
            self.forbid();
        }
        allowed.is_ok()
    }

    /// They are not in use any more, when nothing is staged in them; the evictor has yet to hear of it.
    pub fn close(&self) {
        self.is_open.store(false, Release);
        // SAFETY: as above.
        unsafe {
            let _ = munlock(self.start as *mut c_void, BYTES);
            let _ = memory::set_access(self.start, BYTES, false);
        }
    }

    /// Asks for messages about them, as is done for other frames: each process does that for itself.
    fn register(&self, channel: &Channel) -> bool {
        let Way::Move { quiet } = channel.way else { return false };
        quiet.register(self.morgue(), MORGUE_BYTES).is_ok() && channel.uffd.register(self.start, FRAMES_BYTES).is_ok()
    }
}
