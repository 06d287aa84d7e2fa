//! Spans: 256 KiB of addresses cut into slots of one class, and the descriptors that say which slots are taken.
//!
//! A descriptor is 192 bytes (0.07 % of its span), apart from the span, so that allocating reads no object's memory and
//! an object's damage cannot reach the allocator. Its fields are atomics only so that they can be shared without
//! `unsafe`: they are changed under the lock of the span's class, with two exceptions that need none, since an object
//! keeps its span what it is: the owner of an object may read `class`, and compaction may read `mark`.
//!
//! Objects are placed at the lowest free position, so the pages touched are always a prefix of the span, and a partly
//! filled span costs what it holds, not 256 KiB.

use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::class::{Class, OBJECTS_MAX};
use crate::page::PAGE_SIZE;

/// No span: the end of a list.
pub(crate) const NONE: u32 = u32::MAX;

/// What a span is for, besides holding objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mark {
    /// Not in use, or in use and nothing special.
    Plain = 0,
    /// Compaction is moving its objects away; nothing new is placed in it.
    Victim = 1,
    /// Empty, its memory kept for the next object of its class.
    Kept = 2,
    /// Compaction is moving its objects to its start, so that the pages at its end go back to the system.
    Squeezed = 3,
}

/// The descriptor of a span. All zeroes is a span that was never used.
#[repr(C, align(64))]
pub(crate) struct Span {
    taken: [AtomicU64; OBJECTS_MAX / 64],
    pub previous: AtomicU32,
    pub next: AtomicU32,
    objects: AtomicU16,
    touched_pages: AtomicU16,
    class: AtomicU8,
    mark: AtomicU8,
    pub bin: AtomicU8,
}

const _: () = assert!(size_of::<Span>() == 192);

/// Where an allocation landed, and which pages it touches for the first time.
pub(crate) struct Placed {
    pub position: usize,
    pub pages_before: usize,
    pub pages_after: usize,
}

impl Span {
    /// Makes an unused span one of `class`.
    pub fn begin(&self, class: Class) {
        for word in &self.taken {
            word.store(0, Relaxed);
        }
        self.objects.store(0, Relaxed);
        self.touched_pages.store(0, Relaxed);
        self.class.store(class.0, Relaxed);
        self.mark.store(Mark::Plain as u8, Relaxed);
    }

    /// The span's memory has gone back to the system.
    pub fn end(&self) {
        self.touched_pages.store(0, Relaxed);
        self.mark.store(Mark::Plain as u8, Relaxed);
    }

    pub fn class(&self) -> Class {
        Class(self.class.load(Relaxed))
    }

    pub fn mark(&self) -> Mark {
        match self.mark.load(Relaxed) {
            1 => Mark::Victim,
            2 => Mark::Kept,
            3 => Mark::Squeezed,
            _ => Mark::Plain,
        }
    }

    pub fn set_mark(&self, mark: Mark) {
        self.mark.store(mark as u8, Relaxed);
    }

    /// Objects in the span.
    pub fn objects(&self) -> usize {
        self.objects.load(Relaxed) as usize
    }

    /// Pages of the span that hold memory, from its start.
    pub fn touched_pages(&self) -> usize {
        self.touched_pages.load(Relaxed) as usize
    }

    /// Positions that lie in these pages.
    pub fn touched_positions(&self, class: Class) -> usize {
        (self.touched_pages() * PAGE_SIZE / class.slot_bytes()).min(class.objects())
    }

    pub fn set_touched_pages(&self, pages: usize) {
        self.touched_pages.store(pages as u16, Relaxed);
    }

    /// Whether there is an object at `position`.
    pub fn is_taken(&self, position: usize) -> bool {
        self.taken[position / 64].load(Relaxed) >> (position % 64) & 1 != 0
    }

    /// Takes the lowest free position if that touches at most `new_pages_max` new pages.
    #[inline]
    pub fn place(&self, class: Class, new_pages_max: usize) -> Option<Placed> {
        let (at, word) = self.taken.iter().enumerate().map(|(at, w)| (at, w.load(Relaxed))).find(|(_, w)| *w != !0)?;
        let position = at * 64 + word.trailing_ones() as usize;
        let pages_after = ((position + 1) * class.slot_bytes()).div_ceil(PAGE_SIZE);
        if position >= class.objects() || pages_after.saturating_sub(self.touched_pages()) > new_pages_max {
            return None;
        }
        Some(self.take(position, pages_after))
    }

    /// Takes `position`, if it is free, and no page with it: nothing is to be kept there. Returns whether it did.
    pub fn pin(&self, position: usize) -> bool {
        let free = !self.is_taken(position);
        if free {
            self.take(position, 0);
        }
        free
    }

    #[inline]
    fn take(&self, position: usize, pages_after: usize) -> Placed {
        let pages_before = self.touched_pages();
        let pages_after = pages_after.max(pages_before);
        let word = &self.taken[position / 64];
        word.store(word.load(Relaxed) | 1 << (position % 64), Relaxed);
        self.objects.store(self.objects.load(Relaxed) + 1, Relaxed);
        self.set_touched_pages(pages_after);
        Placed { position, pages_before, pages_after }
    }

    /// The highest position that is taken.
    pub fn highest(&self) -> Option<usize> {
        let words = self.taken.iter().enumerate().rev().map(|(at, word)| (at, word.load(Relaxed)));
        words.into_iter().find(|(_, word)| *word != 0).map(|(at, word)| at * 64 + word.ilog2() as usize)
    }

    /// Gives a position back. Returns how many objects are left.
    pub fn vacate(&self, position: usize) -> usize {
        let word = &self.taken[position / 64];
        let bit = 1 << (position % 64);
        let before = word.load(Relaxed);
        assert!(before & bit != 0, "an object was freed twice");
        word.store(before & !bit, Relaxed);
        let left = self.objects.load(Relaxed) - 1;
        self.objects.store(left, Relaxed);
        left as usize
    }
}
