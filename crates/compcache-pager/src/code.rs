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
use rustix::mm::{Advice, MprotectFlags, madvise, mprotect, munlock};

const FRAMES_BYTES: usize = CODE_GROUPS * GROUP * PAGE;

/// The frames, and behind them the morgue.
pub struct CodeFrames {
    start: usize,
    is_open: AtomicBool,
}

impl CodeFrames {
    /// Sets the addresses aside.
    pub fn reserve() -> Result<CodeFrames, Errno> {
        let start = memory::reserve(FRAMES_BYTES + MORGUE_BYTES)? as usize;
        // A copy of the process finds them empty, as it does other frames.
        // SAFETY: the range is the pager's own, and empty.
        let _ = unsafe { madvise(start as *mut c_void, FRAMES_BYTES + MORGUE_BYTES, Advice::LinuxWipeOnFork) };
        Ok(CodeFrames { start, is_open: AtomicBool::new(false) })
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
        self.is_open.load(Acquire).then(|| self.start..self.start + FRAMES_BYTES + MORGUE_BYTES)
    }

    /// Makes them memory that is like the program's. `false` where the system does not let it, or there is no need: mremap takes pages
    /// whatever their rights.
    pub fn open(&self, channel: &Channel) -> bool {
        if self.is_open.load(Acquire) {
            return true;
        }
        let is_open = matches!(channel.way, Way::Move { .. }) && self.allow() && self.register(channel);
        self.is_open.store(is_open, Release);
        is_open
    }

    /// Lets them be touched, which nobody might, and are locked if the program locks all it has.
    pub fn allow(&self) -> bool {
        let (start, len) = (self.start as *mut c_void, FRAMES_BYTES + MORGUE_BYTES);
        // SAFETY: a range of the pager's own, which holds nothing.
        unsafe {
            let _ = munlock(start, len);
            mprotect(start, len, MprotectFlags::READ | MprotectFlags::WRITE | MprotectFlags::EXEC).is_ok()
        }
    }

    /// Asks for messages about them, as is done for other frames: each process does that for itself.
    pub fn register(&self, channel: &Channel) -> bool {
        let Way::Move { quiet } = channel.way else { return false };
        quiet.register(self.morgue(), MORGUE_BYTES).is_ok() && channel.uffd.register(self.start, FRAMES_BYTES).is_ok()
    }
}
