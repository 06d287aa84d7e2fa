//! Read-ahead: which pages to bring with the one that was asked for.
//!
//! Faults come in streams: a scan forwards, one backwards, one with a stride, several at once, or none at all. A fault
//! that continues a stream (it lies where the stream's window ended, or one step on) doubles that stream's window, up to
//! 64 pages; a fault that continues none starts a stream with a window of one page. So random accesses cost one page
//! each, and a scan one fault in 64. A step must be seen twice in a row before anything is brought for it.
//!
//! | fault at | stream | brought | next expected |
//! |----------|--------|---------|---------------|
//! | 100      | new    | 100     | (unknown)     |
//! | 101      | step 1 | 101     | 102           |
//! | 102      | step 1 | 102-103 | 104           |
//! | 104      | step 1 | 104-107 | 108           |
//!
//! # Source
//! The doubling window is that of Linux `mm/readahead.c` (`get_next_ra_size`); looking for strides among recent faults is
//! Leap's idea (Maruf and Chowdhury, 2020), reduced to the last step.

use crate::memory::PAGE;
use crate::pager::State;
use crate::table::Phase;

/// Pages brought for one fault, at most.
pub const WINDOW_MAX: u32 = 64;
/// Streams followed at once.
const STREAMS: usize = 16;
/// Farthest step that is taken for a stride, pages.
const STEP_MAX: i64 = 64;

#[derive(Clone, Copy, Default)]
struct Stream {
    /// The last page asked for.
    last: u64,
    /// Where the window ended: the page a continuation is expected at. 0 before a step is known.
    next: u64,
    /// Pages from one access to the next; negative for backward scans.
    step: i64,
    window: u32,
    /// Pages really brought last time, with the one asked for.
    brought: u32,
    used_at: u64,
}

/// What to bring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// Pages from one to the next.
    pub step: i64,
    /// How many, with the one asked for: 1 to 64.
    pub pages: u32,
    /// Pages brought before by this stream, every one of which was passed without a fault.
    pub hits: u32,
}

/// The streams of one process.
#[derive(Default)]
pub struct Streams {
    streams: [Stream; STREAMS],
    /// The stream of the last fault.
    current: usize,
    clock: u64,
}

impl Streams {
    /// The window for a fault at `page`. Say with [`Streams::brought`] what became of it.
    pub fn fault(&mut self, page: u64) -> Window {
        self.clock += 1;
        for (number, stream) in self.streams.iter_mut().enumerate() {
            if stream.window == 0 {
                continue;
            }
            let step = page as i64 - stream.last as i64;
            let hits = if stream.step != 0 && near(page, stream.next, stream.step) {
                stream.window = (stream.window * 2).min(WINDOW_MAX);
                stream.brought - 1
            } else if stream.window == 1 && step != 0 && step.abs() <= STEP_MAX {
                // A step, or another one than before: it must be seen twice before anything is brought for it.
                stream.step = step;
                0
            } else {
                continue;
            };
            (stream.last, stream.used_at) = (page, self.clock);
            self.current = number;
            return Window { step: stream.step, pages: stream.window, hits };
        }
        let oldest = (0..STREAMS).min_by_key(|&number| self.streams[number].used_at).unwrap_or(0);
        self.streams[oldest] = Stream { last: page, next: 0, step: 0, window: 1, brought: 1, used_at: self.clock };
        self.current = oldest;
        Window { step: 1, pages: 1, hits: 0 }
    }

    /// How many pages of the last window were brought, with the one asked for: the stream is expected where they end.
    pub fn brought(&mut self, pages: u32) {
        let stream = &mut self.streams[self.current];
        stream.brought = pages.max(1);
        stream.next = (stream.last as i64 + stream.step * i64::from(stream.brought)) as u64;
    }

    /// The stream will come through pages that are there without a fault, and is expected behind them, at `page`.
    pub fn expect(&mut self, page: u64) {
        self.streams[self.current].next = page;
    }
}

/// Whether `page` is where a stream goes on: at `next`, or up to one step beyond.
fn near(page: u64, next: u64, step: i64) -> bool {
    let ahead = page as i64 - next as i64;
    ahead == 0 || ahead == step
}

/// A run of neighbouring stored pages, in the direction of its stream.
pub struct Run {
    pub asked: u64,
    pub at: u64,
    pub step: i64,
    pub pages: usize,
}

impl Run {
    /// The lowest page when `pages` of the run are taken, nearest first.
    pub fn first_of(&self, pages: usize) -> u64 {
        if self.step < 0 { self.at + 1 - pages as u64 } else { self.at }
    }
}

/// The run of stored pages from `at` on, in the window's direction: neighbours for a step of one, else a single page.
pub fn stored_run(state: &State, asked: u64, at: u64, window: &Window, most: usize) -> Run {
    let most = if window.step.abs() == 1 { most } else { 1 };
    let direction = window.step.signum();
    let bounds = state.regions.containing(at as usize * PAGE);
    let inside = |page: u64| bounds.as_ref().is_none_or(|range| range.contains(&(page as usize * PAGE)));
    let pages = (0..most as i64)
        .map(|ahead| (at as i64 + direction * ahead) as u64)
        .take_while(|&page| inside(page) && (page == asked || !state.must_stay(page as usize * PAGE)))
        .take_while(|&page| state.table.get(page).phase() == Phase::Stored)
        .count();
    Run { asked, at, step: direction, pages }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_goes_on_behind_pages_that_are_there() {
        let (mut streams, mut page) = (Streams::default(), 100);
        while {
            let pages = streams.fault(page).pages;
            streams.brought(pages);
            page += u64::from(pages);
            pages < WINDOW_MAX
        } {}
        streams.expect(page + 500);
        assert_eq!(streams.fault(page + 500).pages, WINDOW_MAX);
        streams.brought(1);
        assert_eq!(streams.fault(page + 1000).pages, 1);
    }

    /// Faults that a walk over `pages` takes when each fault brings its window.
    fn faults(pages: impl Iterator<Item = u64>) -> usize {
        let (mut streams, mut present) = (Streams::default(), std::collections::HashSet::new());
        let mut faults = 0;
        for page in pages {
            if present.insert(page) {
                faults += 1;
                let window = streams.fault(page);
                streams.brought(window.pages);
                for ahead in 1..i64::from(window.pages) {
                    present.insert((page as i64 + ahead * window.step) as u64);
                }
            }
        }
        faults
    }

    #[test]
    fn a_scan_costs_one_fault_in_64_pages_forwards_backwards_and_with_a_stride() {
        for (name, pages) in [
            ("forward", (10_000..14_096).collect::<std::vec::Vec<u64>>()),
            ("backward", (10_000..14_096).rev().collect()),
            ("stride 7", (10_000..38_672).step_by(7).collect()),
        ] {
            let faults = faults(pages.into_iter());
            assert!(faults <= 4096 / 64 + 8, "{name}: {faults} faults");
        }
    }

    #[test]
    fn random_accesses_bring_one_page_each() {
        let mut streams = Streams::default();
        let mut random = 88172645463325252u64;
        let mut brought = 0;
        for _ in 0..1000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            brought += streams.fault(random % (1 << 30)).pages;
            streams.brought(1);
        }
        assert!(brought <= 1010, "{brought} pages for 1000 random faults");
    }

    #[test]
    fn eight_scans_at_once_are_eight_streams() {
        let pages = (0..4096u64).map(|i| (i % 8) * 1_000_000 + i / 8);
        let faults = faults(pages);
        assert!(faults <= 8 * (512 / 64 + 8), "{faults} faults");
    }
}
