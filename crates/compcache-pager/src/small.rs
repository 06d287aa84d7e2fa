//! The small queue: pages that have come back from the pool, first in, first out.
//!
//! A page that nobody has used for longer than it takes to replace everything resident is brought, used, and most often not
//! used again for as long. If such pages took their turn under the hand, a scan of much memory would push out all the rest,
//! and would find nothing of itself the next time round either. So they wait here, are the first to leave when there are
//! more of them than a small part of the limit, and prove themselves in staging: what is touched there goes back with heat,
//! and belongs to the hand from then on.
//!
//! An entry may be out of date (the page has left, moved, or become hot): whoever takes it asks the page table.
//!
//! # Source
//! S3-FIFO (Yang et al., 2023): small queue, main queue (the hand), ghost queue (the refault distance).

use crate::staging::{FILLED_AT_ONCE, GROUP};
use core::ops::Range;

/// Runs that can wait, at most and at least; the oldest is left to the hand when one more comes.
const RUNS_MAX: usize = 1 << 14;
const RUNS_MIN: usize = 1 << 9;
/// One for so many pages of the memory: up to 640 MiB, more than the queue holds before its pages leave first. The ring goes round all of them.
const PAGES_OF_RAM: u64 = 8;
/// The part of what may be resident that the queue holds before its pages leave first, and the pages it holds in any case:
/// what was read ahead must stay until it is used.
const SHARE: u64 = 10;
const PAGES_MIN: u64 = 256;

/// Most pages of a run: as many as leave with one call.
const RUN_PAGES: u64 = (GROUP * FILLED_AT_ONCE) as u64;

/// Neighbouring pages that came one after the other: bits 0-9 how many, above them the first one's number.
#[derive(Clone, Copy)]
struct Run(u64);

impl Run {
    fn new(pages: Range<u64>) -> Run {
        Run(pages.start << 10 | (pages.end - pages.start))
    }

    fn pages(self) -> Range<u64> {
        self.0 >> 10..(self.0 >> 10) + (self.0 & 0x3ff)
    }
}

/// Pages that came back lately, oldest first.
pub struct SmallQueue {
    runs: [Run; RUNS_MAX],
    /// So many of them are used.
    runs_max: usize,
    head: usize,
    len: usize,
    pages: u64,
}

impl SmallQueue {
    /// Makes an empty queue, which is all zeroes, one for a memory of so many pages.
    pub fn set_size(&mut self, ram_pages: u64) {
        debug_assert!(self.len == 0);
        self.runs_max = ((ram_pages / PAGES_OF_RAM) as usize).clamp(RUNS_MIN, RUNS_MAX);
    }

    /// Adds pages at the end, and so to the last run if they go on where it ends. At most a group at a time. Returns the oldest run if it
    /// had to make room.
    pub fn push(&mut self, pages: Range<u64>) -> Option<Range<u64>> {
        debug_assert!(pages.end - pages.start <= GROUP as u64);
        self.pages += pages.end - pages.start;
        if self.len > 0 {
            let last = &mut self.runs[(self.head + self.len - 1) % self.runs_max];
            let before = last.pages();
            if before.end == pages.start && pages.end - before.start <= RUN_PAGES {
                *last = Run::new(before.start..pages.end);
                return None;
            }
        }
        let oldest = if self.len == self.runs_max { self.pop(RUN_PAGES) } else { None };
        self.runs[(self.head + self.len) % self.runs_max] = Run::new(pages);
        self.len += 1;
        oldest
    }

    /// Takes the oldest run, or `most` pages of it.
    pub fn pop(&mut self, most: u64) -> Option<Range<u64>> {
        if self.len == 0 {
            return None;
        }
        let run = self.runs[self.head].pages();
        let pages = run.start..run.end.min(run.start + most);
        if pages.end < run.end {
            self.runs[self.head] = Run::new(pages.end..run.end);
        } else {
            self.head = (self.head + 1) % self.runs_max;
            self.len -= 1;
        }
        self.pages -= pages.end - pages.start;
        Some(pages)
    }

    /// Whether it holds more than its share of what may be resident.
    pub fn is_full(&self, limit_pages: u64) -> bool {
        self.pages > SmallQueue::room(limit_pages)
    }

    /// How many pages it holds before they leave first.
    pub fn room(limit_pages: u64) -> u64 {
        (limit_pages / SHARE).max(PAGES_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> SmallQueue {
        let mut queue = SmallQueue { runs: [Run(0); RUNS_MAX], runs_max: 0, head: 0, len: 0, pages: 0 };
        queue.set_size(0);
        queue
    }

    #[test]
    fn what_came_first_leaves_first_and_neighbours_leave_together() {
        let mut queue = queue();
        for pages in [10..14, 14..18, 30..31] {
            assert_eq!(queue.push(pages), None);
        }
        assert_eq!(queue.pop(RUN_PAGES), Some(10..18));
        assert_eq!(queue.pop(RUN_PAGES), Some(30..31));
        assert_eq!(queue.pop(RUN_PAGES), None);
        assert!(!queue.is_full(0));
    }

    #[test]
    fn a_run_is_no_longer_than_what_leaves_at_once() {
        let mut queue = queue();
        (0..40).for_each(|run| _ = queue.push(run * 16..run * 16 + 16));
        assert_eq!(queue.pop(10), Some(0..10));
        assert_eq!(queue.pop(RUN_PAGES), Some(10..RUN_PAGES));
    }

    #[test]
    fn the_oldest_is_forgotten_when_there_is_no_room() {
        let mut queue = queue();
        (0..RUNS_MIN as u64).for_each(|run| assert_eq!(queue.push(run * 2..run * 2 + 1), None));
        let last = RUNS_MIN as u64 * 2;
        assert_eq!(queue.push(last..last + 1), Some(0..1));
        assert_eq!(queue.pop(RUN_PAGES), Some(2..3));
        assert!(queue.is_full(SHARE * (RUNS_MIN as u64 - 2)) && !queue.is_full(SHARE * RUNS_MIN as u64));
    }

    #[test]
    fn there_is_room_for_more_than_what_waits_in_memories_that_are_not_large() {
        for ram_pages in [0, 4096, 1 << 15, 1 << 16] {
            let mut queue = queue();
            queue.set_size(ram_pages);
            assert!(queue.runs_max as u64 > SmallQueue::room(ram_pages), "{ram_pages}");
        }
    }
}
