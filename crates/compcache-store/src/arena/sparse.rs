//! Which spans compaction empties.
//!
//! Within a class, the sparsest spans become victims as long as all they hold fits into the free positions of the spans
//! that stay. A victim is taken off its list, so nothing new is placed in it; the sweep ([`crate::compact`]) moves what
//! it holds, and freeing the last object gives its memory back. A span fuller than 15/16 is left alone: moving it would
//! cost more than it gives.

use core::sync::atomic::Ordering::Relaxed;

use super::class::Class;
use super::span::{Mark, NONE, Span};
use super::{Arena, BINS, Lists, Location, PAGE};
use crate::budget::Budget;

impl Arena {
    /// Marks victims in all classes and returns how many objects they hold.
    pub fn choose_victims(&self) -> usize {
        Class::all().map(|class| self.choose_in(class)).sum()
    }

    fn choose_in(&self, class: Class) -> usize {
        let mut lists = self.lists(class);
        let room = class.objects();
        let mut to_move = 0;
        while let Some((span, objects)) = self.sparsest(&lists) {
            let free_elsewhere = lists.free - (room - objects);
            if objects == 0 || free_elsewhere < to_move + objects || objects * 16 > room * 15 {
                break;
            }
            self.unlink(&mut lists, span);
            span.set_mark(Mark::Victim);
            lists.free -= room - objects;
            to_move += objects;
        }
        to_move
    }

    /// The first span of the emptiest list, which is within an eighth of the sparsest.
    fn sparsest(&self, lists: &Lists) -> Option<(&Span, usize)> {
        let id = *lists.bins.iter().find(|id| **id != NONE)?;
        let span = self.span(id);
        Some((span, span.objects()))
    }

    /// Whether the object at `location` should move. Needs no lock: the caller's object keeps the span what it is, and a
    /// mark missed now is seen in the next pass.
    pub fn is_victim(&self, location: Location) -> bool {
        self.known_span(location.span()).is_some_and(|span| span.mark() == Mark::Victim)
    }

    /// Makes ordinary spans of the victims that a pass could not empty.
    pub fn spare_victims(&self) {
        let spans = self.source.lock().fresh;
        for id in 0..spans {
            let span = self.span(id);
            if span.mark() != Mark::Victim {
                continue;
            }
            let class = span.class();
            let mut lists = self.lists(class);
            // Looked at again under the lock: freeing its last object may have retired it meanwhile.
            if span.mark() == Mark::Victim && span.objects() > 0 {
                span.set_mark(Mark::Plain);
                lists.free += class.objects() - span.objects();
                self.relist(&mut lists, id, span, class);
            }
        }
    }

    /// Gives back the memory that empty spans keep. Returns the bytes.
    pub fn retire_kept(&self, budget: &Budget) -> u64 {
        if self.kept_bytes.load(Relaxed) == 0 {
            return 0;
        }
        Class::all().map(|class| self.retire_kept_in(class, budget)).sum()
    }

    fn retire_kept_in(&self, class: Class, budget: &Budget) -> u64 {
        let mut bytes = 0;
        loop {
            let mut lists = self.lists(class);
            // Kept spans are empty, so they are all in the lowest list.
            let mut id = lists.bins[0];
            while id != NONE && self.span(id).mark() != Mark::Kept {
                id = self.span(id).next.load(Relaxed);
            }
            if id == NONE {
                return bytes;
            }
            let span = self.span(id);
            self.kept_bytes.fetch_sub(span.touched_pages() as u64 * PAGE, Relaxed);
            self.unlink(&mut lists, span);
            lists.free -= class.objects();
            drop(lists);
            bytes += self.retire(id, span, budget);
        }
    }
}

const _: () = assert!(BINS <= 16);
