//! Which spans compaction empties, and which it squeezes.
//!
//! Within a class, the sparsest spans become victims as long as all they hold fits into the free positions of the spans
//! that stay: where there is little room left, of those in pages that are touched, since no others will be touched for it.
//! A victim is taken off its list, so nothing new is placed in it; the sweep ([`crate::compact`]) moves what it holds, and
//! freeing the last object gives its memory back. A span fuller than 15/16 is left alone: moving it would
//! cost more than it gives.
//!
//! What stays can still have holes, and in a small store most classes have one span. A span that touches more than its
//! objects need is squeezed: the sweep moves objects from its end to free positions nearer its start, and at the end of
//! the pass the pages behind the last object go back. Example: 200 objects of 1368 bytes were stored and 160 of them
//! discarded all over: 67 pages are touched, 14 are needed, 53 go back.

use core::sync::atomic::Ordering::Relaxed;

use super::class::{Class, SPAN_BYTES};
use super::span::{Mark, NONE, Span};
use super::{Arena, Lists, Location, PAGE};
use crate::budget::{Budget, CREDIT_STEP, Credit};
use crate::page::PAGE_SIZE;

/// A span is squeezed when it would give back so many pages, and so large a share of what it touches.
const SQUEEZE_PAGES: usize = 2;
const SQUEEZE_SHARE: usize = 16;

pub(super) fn pages_for(positions: usize, class: Class) -> usize {
    (positions * class.slot_bytes()).div_ceil(PAGE_SIZE)
}

impl Arena {
    /// Marks victims and spans to squeeze in all classes. Returns whether there are any.
    pub fn choose_sparse(&self, budget: &Budget) -> bool {
        // As in `place_for_move`. With a reserve, what is emptied goes back into it, and what squeezing gives back does not.
        let touches = budget.has_ample_room(CREDIT_STEP) || self.wants_reserve();
        Class::all().fold(false, |any, class| self.choose_in(class, touches) | any)
    }

    /// `touches`: objects may be moved to pages that are not touched yet.
    fn choose_in(&self, class: Class, touches: bool) -> bool {
        let mut lists = self.lists(class);
        let room = class.objects();
        let free_in = |span: &Span| match touches {
            true => room - span.objects(),
            false => span.touched_positions(class).saturating_sub(span.objects()),
        };
        let mut free = if touches { lists.free } else { self.listed(&lists).map(free_in).sum() };
        let (mut to_move, mut any) = (0, false);
        while let Some((span, objects)) = self.sparsest(&lists) {
            let free_elsewhere = free - free_in(span);
            if objects == 0 || free_elsewhere < to_move + objects || objects * 16 > room * 15 {
                break;
            }
            self.unlink(&mut lists, span);
            span.set_mark(Mark::Victim);
            lists.free -= room - objects;
            free = free_elsewhere;
            to_move += objects;
            any = true;
        }
        for span in self.listed(&lists) {
            let touched = span.touched_pages();
            let needed = pages_for(span.objects() + to_move, class) + self.ahead_pages();
            let spare = touched.saturating_sub(needed);
            if span.mark() == Mark::Plain && spare >= SQUEEZE_PAGES && spare * SQUEEZE_SHARE >= touched {
                span.set_mark(Mark::Squeezed);
                any = true;
            }
        }
        any
    }

    /// The spans of a class that have room.
    pub(super) fn listed(&self, lists: &Lists) -> impl Iterator<Item = &Span> {
        lists.bins.into_iter().flat_map(|first| {
            let known = |id| (id != NONE).then(|| self.span(id));
            core::iter::successors(known(first), move |span| known(span.next.load(Relaxed)))
        })
    }

    /// The first span of the emptiest list, which is within an eighth of the sparsest.
    fn sparsest(&self, lists: &Lists) -> Option<(&Span, usize)> {
        lists.bins.iter().find_map(|first| {
            let mut id = *first;
            // Empty ones are kept on purpose.
            while id != NONE && self.span(id).objects() == 0 {
                id = self.span(id).next.load(Relaxed);
            }
            (id != NONE).then(|| (self.span(id), self.span(id).objects()))
        })
    }

    /// Whether the object at `location` should move. Needs no lock: the caller's object keeps the span what it is, and a
    /// mark missed now is seen in the next pass.
    fn should_move(&self, location: Location) -> bool {
        self.known_span(location.span()).is_some_and(|span| match span.mark() {
            Mark::Victim => true,
            Mark::Squeezed => location.offset() / span.class().slot_bytes() >= span.objects(),
            Mark::Plain | Mark::Kept => false,
        })
    }

    /// A place nearer the start of the same span for an object that [`Arena::should_move`] out of a squeezed span.
    fn allocate_below(&self, location: Location) -> Option<Location> {
        let span = self.known_span(location.span()).filter(|span| span.mark() == Mark::Squeezed)?;
        let class = span.class();
        let mut lists = self.lists(class);
        let placed = span.place(class, 0)?;
        if placed.position * class.slot_bytes() > location.offset() {
            span.vacate(placed.position);
            return None;
        }
        lists.free -= 1;
        self.relist(&mut lists, location.span(), span, class);
        Some(Location::new(location.span(), placed.position * class.slot_bytes()))
    }

    /// Another place for an object of so many bytes, if compaction wants it moved and there is room.
    pub fn place_for_move(
        &self,
        from: Location,
        length: usize,
        budget: &Budget,
        credit: &mut Credit,
    ) -> Option<Location> {
        // Only who is damaged says that there is none, or one longer than its slot: what lies there and behind is others'.
        if !self.should_move(from) || self.holds(from).is_none_or(|class| length > class.slot_bytes()) {
            return None;
        }
        self.allocate_below(from).or_else(|| {
            // New pages only where there is room for them anyway; else the object goes where memory is already touched.
            if budget.has_ample_room(CREDIT_STEP) {
                let _ = budget.admit(credit);
            }
            self.allocate_elsewhere(from, budget, credit)
        })
    }

    /// Ends a pass: gives back what squeezing freed, and makes all marked spans ordinary ones. Returns the bytes.
    pub fn finish_pass(&self, budget: &Budget) -> u64 {
        let spans = self.source.lock().fresh;
        (0..spans).map(|id| self.finish_span(id, budget)).sum()
    }

    fn finish_span(&self, id: u32, budget: &Budget) -> u64 {
        let span = self.span(id);
        if !matches!(span.mark(), Mark::Victim | Mark::Squeezed) {
            return 0;
        }
        let class = span.class();
        let mut lists = self.lists(class);
        // Looked at again under the lock: freeing its last object may have retired it meanwhile.
        match span.mark() {
            Mark::Victim if span.objects() > 0 && span.class() == class => {
                span.set_mark(Mark::Plain);
                lists.free += class.objects() - span.objects();
                self.relist(&mut lists, id, span, class);
                0
            }
            Mark::Squeezed if span.objects() > 0 && span.class() == class => {
                span.set_mark(Mark::Plain);
                self.release_tail(id, span, class, budget)
            }
            _ => 0,
        }
    }

    /// Gives the pages behind the last object of a span back. The span's class is locked: the one system call made under
    /// such a lock, since nothing may be placed there meanwhile.
    #[allow(unsafe_code)]
    fn release_tail(&self, id: u32, span: &Span, class: Class, budget: &Budget) -> u64 {
        let needed = pages_for(span.highest().map_or(0, |position| position + 1), class) + self.ahead_pages();
        let spare = span.touched_pages().saturating_sub(needed);
        if spare == 0 {
            return 0;
        }
        let start = id as usize * SPAN_BYTES + needed * PAGE_SIZE;
        // SAFETY: behind the last object of the span, and the lock of its class, which the caller holds, keeps new ones
        // away until the pages are no longer counted as touched.
        unsafe { self.objects.release(start, spare * PAGE_SIZE) };
        span.set_touched_pages(needed);
        budget.released(spare as u64 * PAGE);
        spare as u64 * PAGE
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
            // With a reserve, each class keeps what it has ahead.
            if id == NONE || (self.wants_reserve() && !self.has_two(&lists)) {
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

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const LENGTH: usize = 1368;

    /// A full span of which one object in six is left, and one that is full in its first half.
    fn holes() -> (Arena, Budget, Vec<Location>) {
        let (arena, budget, class) =
            (Arena::reserve(64 * SPAN_BYTES as u64, false).unwrap(), Budget::new(u64::MAX), Class::for_length(LENGTH));
        let mut credit = Credit::default();
        let mut place = |_| {
            budget.admit(&mut credit).unwrap();
            arena.allocate(class, &budget, &mut credit).unwrap()
        };
        let mut places: Vec<_> = (0..class.objects() * 3 / 2).map(&mut place).collect();
        let dense = places.split_off(class.objects());
        let (left, gone): (Vec<_>, Vec<_>) = places.into_iter().enumerate().partition(|(at, _)| at % 6 == 0);
        gone.into_iter().for_each(|(_, place)| _ = arena.free(place, &budget));
        (arena, budget, left.into_iter().map(|(_, place)| place).chain(dense).collect())
    }

    /// One pass over all objects; how many bytes it gave back.
    fn pass(arena: &Arena, budget: &Budget, places: &mut [Location]) -> u64 {
        let mut freed_bytes = 0;
        for place in places {
            if let Some(to) = arena.place_for_move(*place, LENGTH, budget, &mut Credit::default()) {
                freed_bytes += arena.free(core::mem::replace(place, to), budget);
            }
        }
        freed_bytes + arena.finish_pass(budget)
    }

    #[test]
    fn where_no_memory_may_be_touched_a_span_is_squeezed_that_would_not_fit_into_what_is() {
        let (arena, budget, mut places) = holes();
        budget.set_limit_bytes(budget.charged_bytes());
        let touched = |place: Location| arena.span(place.span()).touched_pages();
        let before = touched(places[0]);
        assert!(arena.choose_sparse(&budget));
        let freed_bytes = pass(&arena, &budget, &mut places);
        assert!(freed_bytes > before as u64 * PAGE * 3 / 4, "{freed_bytes} bytes of {before} pages");
        budget.set_limit_bytes(budget.charged_bytes());
        assert!(!arena.choose_sparse(&budget), "there is nothing left to do");
    }

    #[test]
    fn where_there_is_room_it_is_emptied() {
        let (arena, budget, mut places) = holes();
        let first = places[0].span();
        assert!(arena.choose_sparse(&budget));
        let freed_bytes = pass(&arena, &budget, &mut places);
        assert!(freed_bytes == SPAN_BYTES as u64 && places.iter().all(|place| place.span() != first), "{freed_bytes}");
    }
}
