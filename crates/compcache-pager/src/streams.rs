//! Read-ahead: which pages to bring with the one that was asked for.
//!
//! Faults come in streams: a scan forwards, one backwards, one with a stride, several at once, or none at all. A fault
//! that continues a stream (it lies where the stream's window ended, or one step on) doubles that stream's window, up to
//! 64 pages; a fault that continues none starts a stream with a window of one page. So random accesses cost one page
//! each, and a scan one fault in 64.
//!
//! | fault at | stream | brought | next expected |
//! |----------|--------|---------|---------------|
//! | 100      | new    | 100     | (unknown)     |
//! | 101      | step 1 | 101-102 | 103           |
//! | 103      | step 1 | 103-106 | 107           |
//! | 107      | step 1 | 107-114 | 115           |
//!
//! # Source
//! The doubling window is that of Linux `mm/readahead.c` (`get_next_ra_size`); looking for strides among recent faults is
//! Leap's idea (Maruf and Chowdhury, 2020), reduced to the last step.

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
    clock: u64,
}

impl Streams {
    /// The window for a fault at `page`.
    pub fn fault(&mut self, page: u64) -> Window {
        self.clock += 1;
        for stream in &mut self.streams {
            if stream.window == 0 {
                continue;
            }
            if stream.step != 0 && near(page, stream.next, stream.step) {
                let hits = stream.window - 1;
                stream.window = (stream.window * 2).min(WINDOW_MAX);
                return stream.go_on(page, self.clock, hits);
            }
            let step = page as i64 - stream.last as i64;
            if stream.step == 0 && step != 0 && step.abs() <= STEP_MAX {
                stream.step = step;
                stream.window = 2;
                return stream.go_on(page, self.clock, 0);
            }
        }
        let oldest = self.streams.iter_mut().min_by_key(|stream| stream.used_at);
        if let Some(stream) = oldest {
            *stream = Stream { last: page, next: 0, step: 0, window: 1, used_at: self.clock };
        }
        Window { step: 1, pages: 1, hits: 0 }
    }
}

/// Whether `page` is where a stream goes on: at `next`, or up to one step beyond.
fn near(page: u64, next: u64, step: i64) -> bool {
    let ahead = page as i64 - next as i64;
    ahead == 0 || ahead == step
}

impl Stream {
    fn go_on(&mut self, page: u64, clock: u64, hits: u32) -> Window {
        self.last = page;
        self.next = (page as i64 + self.step * i64::from(self.window)) as u64;
        self.used_at = clock;
        Window { step: self.step, pages: self.window, hits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faults that a walk over `pages` takes when each fault brings its window.
    fn faults(pages: impl Iterator<Item = u64>) -> usize {
        let (mut streams, mut present) = (Streams::default(), std::collections::HashSet::new());
        let mut faults = 0;
        for page in pages {
            if present.insert(page) {
                faults += 1;
                let window = streams.fault(page);
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
