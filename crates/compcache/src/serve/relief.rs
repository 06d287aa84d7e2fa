//! When blocks leave memory though no limit is near: while the machine is short of it, and as long as they stay away.
//!
//! A limit says what the compressed part may take when it was set; how much would help the programs beside it changes. So each
//! second or so in which somebody waited for memory for a tenth of the time, and hardly any was available, a small part of what is stored
//! leaves for the backing: what does not compress, then the oldest. Whether that helps shows in what comes back: while more than a quarter of what
//! left the last time is read again in such a window, no more leaves; after some windows it is tried again. So the compressed part shrinks
//! while it does more harm than good, and stops where it is needed.
//!
//! # Source
//! That the compressed part must shrink where the working set would fit without it: compressed caching with an adaptive size
//! (Wilson, Kaplan and Smaragdakis, 1999). The signs here are the kernel's PSI and the backing's own counts.

use std::time::Duration;

use compcache_cache::pressure::{Memory, Stalled};

/// The share of a window that somebody waited for memory.
const STALLED_SHARE: u32 = 10;
/// Less than this share of the RAM is hardly any.
const AVAILABLE_SHARE: u64 = 8;
/// The share of what is stored that leaves in one window.
const LEAVES_SHARE: u64 = 32;
/// As long as no more than this share of it comes back in one.
const COMES_BACK_SHARE: u64 = 4;
/// After so many windows in which too much came back it is tried again.
const WINDOWS_TRIED_AGAIN: u32 = 16;

/// What is seen at the end of a window.
pub struct Signs {
    /// How long it was.
    pub window: Duration,
    /// Counts up; `None` where the kernel does not say.
    pub stalled: Option<Stalled>,
    pub memory: Option<Memory>,
    /// Pages read from the backing so far.
    pub came_back: u64,
    /// Memory of all that is stored, in bytes.
    pub used_bytes: u64,
}

/// One window after the other.
#[derive(Default)]
pub struct Relief {
    stalled: Duration,
    came_back: u64,
    /// Pages that left when any did last.
    left: u64,
    /// Windows since then that were bad, and in which too much came back.
    held: u32,
}

impl Relief {
    /// How much memory, in bytes, is to be freed now. The first window is not whole.
    pub fn wanted_bytes(&mut self, signs: &Signs) -> u64 {
        let stalled = signs.stalled.map_or(Duration::ZERO, |stalled| stalled.some);
        let waited = stalled.saturating_sub(self.stalled);
        let came_back = signs.came_back.saturating_sub(self.came_back);
        let is_first = self.stalled.is_zero();
        (self.stalled, self.came_back) = (stalled, signs.came_back);
        let is_short = signs.memory.is_some_and(|memory| memory.is_below(AVAILABLE_SHARE));
        if is_first || !is_short || waited < signs.window / STALLED_SHARE {
            return 0;
        }
        let stays_away = came_back <= self.left / COMES_BACK_SHARE || self.left == 0;
        if !stays_away && self.held < WINDOWS_TRIED_AGAIN {
            self.held += 1;
            return 0;
        }
        self.held = 0;
        signs.used_bytes / LEAVES_SHARE
    }

    /// So many pages have left.
    pub fn have_left(&mut self, pages: u64) {
        if pages > 0 {
            self.left = pages;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signs(some_ms: u64, is_short: bool, came_back: u64) -> Signs {
        let available = if is_short { 99 } else { 100 };
        Signs {
            window: Duration::from_secs(1),
            stalled: Some(Stalled { some: Duration::from_millis(some_ms), full: Duration::ZERO }),
            memory: Some(Memory::of(800, available)),
            came_back,
            used_bytes: 3200,
        }
    }

    #[test]
    fn blocks_leave_while_somebody_waits_and_memory_is_short() {
        let mut relief = Relief::default();
        let wanted: Vec<_> = [(5000, true), (5100, true), (5199, true), (5400, false), (5500, true)]
            .iter()
            .map(|(some_ms, is_short)| relief.wanted_bytes(&signs(*some_ms, *is_short, 0)))
            .collect();
        assert_eq!(wanted, [0, 100, 0, 0, 100]);
        let long = Signs { window: Duration::from_secs(20), ..signs(6000, true, 0) };
        assert_eq!(relief.wanted_bytes(&long), 0, "half a second of twenty");
        let unsaid = Signs { stalled: None, ..signs(0, true, 0) };
        assert_eq!(relief.wanted_bytes(&unsaid), 0);
    }

    #[test]
    fn no_more_leaves_while_it_comes_back() {
        let mut relief = Relief::default();
        relief.wanted_bytes(&signs(1, true, 0));
        assert_eq!(relief.wanted_bytes(&signs(1001, true, 1000)), 100, "nothing has left that could have come back");
        relief.have_left(40);
        let windows = [(2002, 1011), (3003, 1021), (4004, 1032)];
        let wanted = windows.map(|(some_ms, came_back)| relief.wanted_bytes(&signs(some_ms, true, came_back)));
        assert_eq!(wanted, [0, 100, 0]);
        let windows: Vec<_> = (5..22).map(|s| relief.wanted_bytes(&signs(s * 1001, true, s * 1000))).collect();
        assert_eq!(windows.iter().position(|wanted| *wanted > 0), Some(15), "it is tried again");
    }
}
