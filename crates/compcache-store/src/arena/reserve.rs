//! The reserve: memory that is there before it is needed.
//!
//! When the system is short of memory, the store is asked to take pages so that memory becomes free, and must not have to
//! wait for memory itself. For a front end that serves swap there are two kinds of reserve, and a worker of the front end
//! makes up for what was used of them, with no lock held while it waits for the system:
//!
//! | kind                 | how much                       | for                                             |
//! |----------------------|--------------------------------|-------------------------------------------------|
//! | pages ahead          | 8 in each class                | what comes in until the worker looks again      |
//! | prepared spans       | as set, [`Arena::set_reserve_bytes`] | a class that has used up its pages: it takes one instead of touching more |
//!
//! When both are used up, an object goes to a larger slot than it needs: all that is there is used before memory is asked for
//! on the path.
//!
//! Example: 183 classes are 5.7 MiB of pages ahead, and 16 MiB of spans are 64. Pages that compress to a third fill the
//! spans with 48 MiB of them; each span taken is made up for by 256 KiB of the 768 KiB that it freed.
//!
//! What is prepared counts as used: the system gave it. So the reserve is filled up to the limit, and who stores pages in it
//! alone needs no room below the limit: all of it can be used.
//!
//! To have pages ahead, the worker takes a position behind them as for an object, so that the span stays and nobody cuts its
//! end off, lets go of the lock, has the system give the memory, and only then lets others use it.
//!
//! Lock order: as in the arena.

use core::sync::atomic::Ordering::Relaxed;

use super::class::{CLASSES, Class, SPAN_BYTES};
use super::span::{Mark, NONE, Span};
use super::sparse::pages_for;
use super::{Arena, Location, PAGE};
use crate::budget::{Budget, Credit};
use crate::error::StoreError;
use crate::page::PAGE_SIZE;

/// Pages a class has ahead.
const AHEAD_PAGES: usize = 8;

impl Arena {
    /// Whether a reserve is wanted.
    pub fn wants_reserve(&self) -> bool {
        self.reserve_wanted.load(Relaxed) > 0
    }

    /// How much may stay in empty spans, if `span` is to be one of them: what their classes have ahead.
    pub(super) fn kept_ahead_bytes(&self, span: &Span) -> u64 {
        if span.touched_pages() <= 2 * AHEAD_PAGES { (2 * CLASSES * AHEAD_PAGES) as u64 * PAGE } else { 0 }
    }

    /// Finds room in memory that is there: of the class, in a prepared span, in a slot of a larger class. The last prepared
    /// spans are for those that find no larger slot, or the small classes would have them all.
    pub(super) fn allocate_touched(&self, class: Class, budget: &Budget, credit: &mut Credit) -> Option<Location> {
        let placed = self.place_in_listed(&mut self.lists(class), class, 0, budget, credit);
        let many = || self.reserve_spans.load(Relaxed) > self.reserve_wanted.load(Relaxed) / 2;
        let placed = placed.or_else(|| if many() { self.place_in_prepared(class, budget, credit) } else { None });
        let mut larger = Class::all().filter(|larger| larger.0 > class.0);
        let placed = placed.or_else(|| {
            larger.find_map(|larger| self.place_in_listed(&mut self.lists(larger), larger, 0, budget, credit))
        });
        let placed = placed.or_else(|| self.place_in_prepared(class, budget, credit));
        placed.map(|(location, ..)| location)
    }

    fn place_in_prepared(
        &self,
        class: Class,
        budget: &Budget,
        credit: &mut Credit,
    ) -> Option<(Location, usize, usize)> {
        let id = self.take_prepared()?;
        let mut lists = self.lists(class);
        self.begin_span(&mut lists, id, class, SPAN_BYTES / PAGE_SIZE);
        self.place(&mut lists, id, class, 0, budget, credit)
    }

    /// Pages at a span's end that are there on purpose, though no object needs them.
    pub(super) fn ahead_pages(&self) -> usize {
        if self.wants_reserve() { AHEAD_PAGES } else { 0 }
    }

    /// Wants so many bytes prepared from now on, in whole spans.
    pub fn set_reserve_bytes(&self, bytes: u64) {
        let spans = bytes.div_ceil(SPAN_BYTES as u64).min(u64::from(self.spans_max));
        self.reserve_wanted.store(spans as u32, Relaxed);
    }

    /// Bytes prepared now.
    pub fn reserve_bytes(&self) -> u64 {
        u64::from(self.reserve_spans.load(Relaxed)) * SPAN_BYTES as u64
    }

    /// Has pages ahead in the classes that lack some; then prepares one span if the reserve lacks one, or gives one back that is
    /// too many. Returns whether it did any of that.
    pub fn refill(&self, budget: &Budget) -> Result<bool, StoreError> {
        let (have, wanted) = (self.reserve_spans.load(Relaxed), self.reserve_wanted.load(Relaxed));
        if have > wanted
            && let Some(id) = self.take_prepared()
        {
            let span = self.span(id);
            span.set_touched_pages(SPAN_BYTES / PAGE_SIZE);
            self.retire(id, span, budget);
            return Ok(true);
        }
        if wanted == 0 {
            return Ok(false);
        }
        let mut any = false;
        for class in Class::all() {
            any |= self.go_ahead(class, budget)?;
        }
        if have < wanted {
            self.prepare_span(budget)?;
        }
        Ok(any || have < wanted)
    }

    fn prepare_span(&self, budget: &Budget) -> Result<(), StoreError> {
        budget.charge_if_it_fits(SPAN_BYTES as u64)?;
        let taken = self.unused_span(budget);
        let id = taken.inspect_err(|_| budget.uncharge(SPAN_BYTES as u64))?;
        self.objects.touch(id as usize * SPAN_BYTES, SPAN_BYTES);
        budget.touched(SPAN_BYTES as u64);
        self.put_prepared(id, self.span(id));
        Ok(())
    }

    /// Has the pages ahead of a class. Returns whether some were missing.
    fn go_ahead(&self, class: Class, budget: &Budget) -> Result<bool, StoreError> {
        if self.has_enough_ahead(&self.lists(class), class) {
            return Ok(false);
        }
        budget.charge_if_it_fits(AHEAD_PAGES as u64 * PAGE)?;
        let grown = self.grow_class(class, budget);
        budget.uncharge((AHEAD_PAGES - grown.unwrap_or_default()) as u64 * PAGE);
        Ok(grown? > 0)
    }

    /// Has the system give [`AHEAD_PAGES`] of a class more; how many it was.
    fn grow_class(&self, class: Class, budget: &Budget) -> Result<usize, StoreError> {
        if self.span_to_grow(&self.lists(class), class).is_none() {
            let id = self.unused_span(budget)?;
            self.begin_span(&mut self.lists(class), id, class, 0);
        }
        let Some((id, position, before, after)) = self.pin(class) else { return Ok(0) };
        self.objects.populate(id as usize * SPAN_BYTES + before * PAGE_SIZE, (after - before) * PAGE_SIZE);
        Ok(self.unpin(class, id, position, after, budget))
    }

    /// Takes a position that lies [`AHEAD_PAGES`] further than what is touched. The pages up to there do not count as touched
    /// yet: nobody is given a place in them while they are waited for.
    fn pin(&self, class: Class) -> Option<(u32, usize, usize, usize)> {
        let mut lists = self.lists(class);
        let id = self.span_to_grow(&lists, class)?;
        let span = self.span(id);
        let before = span.touched_pages();
        let position = ((before + AHEAD_PAGES) * PAGE_SIZE / class.slot_bytes()).min(class.objects()).checked_sub(1)?;
        if !span.pin(position) {
            return None;
        }
        if span.mark() == Mark::Kept {
            span.set_mark(Mark::Plain);
            self.kept_bytes.fetch_sub(before as u64 * PAGE, Relaxed);
        }
        lists.free -= 1;
        self.relist(&mut lists, id, span, class);
        Some((id, position, before, pages_for(position + 1, class)))
    }

    /// Gives the position back; the pages before it are touched now. How many of them are new.
    fn unpin(&self, class: Class, id: u32, position: usize, pages: usize, budget: &Budget) -> usize {
        let mut lists = self.lists(class);
        let span = self.span(id);
        let new = pages.saturating_sub(span.touched_pages());
        span.set_touched_pages(span.touched_pages() + new);
        budget.touched(new as u64 * PAGE);
        let left = span.vacate(position);
        if span.mark() == Mark::Victim {
            // Compaction chose it meanwhile, and may have moved the last object out.
            if left == 0 {
                span.set_mark(Mark::Plain);
                drop(lists);
                self.retire(id, span, budget);
            }
            return new;
        }
        // Empty or not, it stays: that is what it was grown for.
        if left == 0 && matches!(span.mark(), Mark::Plain | Mark::Squeezed) {
            span.set_mark(Mark::Kept);
            self.kept_bytes.fetch_add(span.touched_pages() as u64 * PAGE, Relaxed);
        }
        lists.free += 1;
        self.relist(&mut lists, id, span, class);
        new
    }

    /// Whether the class has room for half of [`AHEAD_PAGES`] in pages that are touched.
    fn has_enough_ahead(&self, lists: &super::Lists, class: Class) -> bool {
        let enough = AHEAD_PAGES / 2 * PAGE_SIZE / class.slot_bytes();
        let mut free = 0;
        self.listed(lists).any(|span| {
            free += span.touched_positions(class).saturating_sub(span.objects());
            free >= enough
        })
    }

    /// A span of the class that is not wholly touched.
    fn span_to_grow(&self, lists: &super::Lists, class: Class) -> Option<u32> {
        lists.bins.iter().rev().find_map(|first| {
            let mut id = *first;
            while id != NONE && self.span(id).touched_pages() >= pages_for(class.objects(), class) {
                id = self.span(id).next.load(Relaxed);
            }
            (id != NONE).then_some(id)
        })
    }

    /// Whether more than one span of a class is listed.
    pub(super) fn has_two(&self, lists: &super::Lists) -> bool {
        let mut listed = lists.bins.iter().filter(|id| **id != NONE);
        match (listed.next(), listed.next()) {
            (Some(_), Some(_)) => true,
            (Some(id), None) => self.span(*id).next.load(Relaxed) != NONE,
            (None, _) => false,
        }
    }

    /// Takes a span that no class uses, and none of whose pages is there.
    fn unused_span(&self, budget: &Budget) -> Result<u32, StoreError> {
        let (mut source, id) = loop {
            // Opened before the lock is taken: it is a system call that may take its time.
            let ahead = self.source.lock().fresh + 1;
            if ahead <= self.spans_max {
                self.objects.ensure(ahead as usize * SPAN_BYTES)?;
                self.descriptors.ensure(ahead as usize * size_of::<Span>())?;
                // The descriptor is written to with a lock held.
                let page = (ahead as usize - 1) * size_of::<Span>() / PAGE_SIZE * PAGE_SIZE;
                self.descriptors.populate(page, PAGE_SIZE);
            }
            let mut source = self.source.lock();
            let id = source.free;
            if id != NONE {
                source.free = self.span(id).next.load(Relaxed);
                return Ok(id);
            }
            if source.fresh == self.spans_max {
                return Err(StoreError::MemoryRefused { bytes: SPAN_BYTES as u64 });
            }
            // Else another took that one just now.
            if source.fresh < ahead {
                let id = source.fresh;
                break (source, id);
            }
        };
        let pages = ((id as usize + 1) * size_of::<Span>()).div_ceil(PAGE_SIZE) as u64;
        let new_bytes = pages.saturating_sub(source.descriptor_pages) * PAGE;
        budget.charge_if_it_fits(new_bytes)?;
        budget.touched(new_bytes);
        source.descriptor_pages = pages;
        source.fresh = id + 1;
        Ok(id)
    }

    /// Whether a span is prepared. It may be taken by another the next moment.
    pub(super) fn has_reserve(&self) -> bool {
        self.reserve_spans.load(Relaxed) > 0
    }

    /// Takes a prepared span, all of whose pages are there and charged.
    pub(super) fn take_prepared(&self) -> Option<u32> {
        if !self.has_reserve() {
            return None;
        }
        let mut source = self.source.lock();
        let id = source.prepared;
        if id == NONE {
            return None;
        }
        source.prepared = self.span(id).next.load(Relaxed);
        self.reserve_spans.fetch_sub(1, Relaxed);
        Some(id)
    }

    /// Puts an empty span with all its memory into the reserve.
    pub(super) fn put_prepared(&self, id: u32, span: &Span) {
        let mut source = self.source.lock();
        span.next.store(source.prepared, Relaxed);
        source.prepared = id;
        self.reserve_spans.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::class::Class;
    use super::*;
    use crate::budget::Credit;

    const SPAN: u64 = SPAN_BYTES as u64;

    fn arena() -> (Arena, Budget, Credit) {
        (Arena::reserve(512 * SPAN, false).unwrap(), Budget::new(u64::MAX), Credit::default())
    }

    /// Objects of a class that fill so many pages.
    fn objects_in(pages: usize, class: Class) -> usize {
        pages * PAGE_SIZE / class.slot_bytes()
    }

    #[test]
    fn what_is_there_is_taken_before_memory_is_touched() {
        const CLASS: Class = Class(9);
        let (arena, budget, mut credit) = arena();
        arena.set_reserve_bytes(2 * SPAN);
        while arena.refill(&budget).unwrap() {}
        let used = budget.used_bytes();
        let ahead = CLASSES as u64 * AHEAD_PAGES as u64 * PAGE;
        assert!(
            arena.reserve_bytes() == 2 * SPAN && (ahead / 2..=ahead + ahead / 8).contains(&(used - 2 * SPAN)),
            "{used}"
        );
        // With no credit at all nothing could be touched. Pages ahead, half of the prepared spans, slots of larger classes.
        let mut take = |pages| -> Vec<Location> {
            (0..objects_in(pages, CLASS)).map(|_| arena.allocate(CLASS, &budget, &mut credit).unwrap()).collect()
        };
        let mut places = take(AHEAD_PAGES - 1);
        assert_eq!(arena.reserve_bytes(), 2 * SPAN);
        places.extend(take(SPAN_BYTES / PAGE_SIZE));
        assert_eq!(arena.reserve_bytes(), SPAN);
        places.extend(take(AHEAD_PAGES));
        assert!(places.last().is_some_and(|place| arena.class_of(*place).0 > CLASS.0) && arena.reserve_bytes() == SPAN);
        assert_eq!(budget.used_bytes(), used);
        // Emptied spans go back into the reserve, and not to the system.
        for place in places {
            arena.free(place, &budget);
        }
        assert_eq!((arena.reserve_bytes(), budget.used_bytes()), (2 * SPAN, used));
        assert_eq!(arena.retire_kept(&budget), 0);
        assert!(!arena.choose_sparse(&budget), "compaction would give back what is ahead");
    }

    #[test]
    fn what_was_used_of_a_class_is_made_up_for() {
        let (arena, budget, mut credit) = arena();
        arena.set_reserve_bytes(SPAN);
        while arena.refill(&budget).unwrap() {}
        for class in Class::all() {
            for round in 0..20 {
                for _ in 0..objects_in(3, class) {
                    arena.allocate(class, &budget, &mut credit).unwrap();
                }
                assert_eq!(arena.reserve_bytes(), SPAN, "class {}, round {round}", class.0);
                while arena.refill(&budget).unwrap() {}
            }
        }
    }

    #[test]
    fn a_span_that_compaction_empties_while_it_grows_goes_back() {
        const CLASS: Class = Class(9);
        let (arena, budget, mut credit) = arena();
        credit.bytes = 2 * PAGE;
        budget.charge(2 * PAGE);
        let object = arena.allocate(CLASS, &budget, &mut credit).unwrap();
        let (id, position, _, pages) = arena.pin(CLASS).unwrap();
        budget.charge(AHEAD_PAGES as u64 * PAGE);
        let span = arena.span(id);
        arena.unlink(&mut arena.lists(CLASS), span);
        span.set_mark(Mark::Victim);
        arena.lists(CLASS).free -= CLASS.objects() - span.objects();
        assert_eq!(arena.free(object, &budget), 0, "what is pinned is not given back");
        arena.unpin(CLASS, id, position, pages, &budget);
        assert_eq!((budget.used_bytes(), arena.lists(CLASS).free), (PAGE, 0), "only the descriptors' page is left");
    }

    #[test]
    fn a_reserve_stays_within_the_limit_and_is_given_back() {
        let (arena, budget, _) = arena();
        budget.set_limit_bytes(SPAN * 5 / 2);
        arena.set_reserve_bytes(u64::MAX);
        while arena.refill(&budget).is_ok_and(|more| more) {}
        let used = budget.used_bytes();
        assert!(used > SPAN * 9 / 4 && used <= SPAN * 5 / 2, "{used}");
        budget.set_limit_bytes(used + PAGE);
        while arena.refill(&budget).is_ok_and(|more| more) {}
        assert!(budget.try_charge(PAGE).is_ok(), "for want of a reserve the store refuses pages");
        budget.uncharge(PAGE);
        budget.set_limit_bytes(u64::MAX);
        arena.set_reserve_bytes(100 * SPAN);
        while arena.refill(&budget).unwrap() {}
        assert_eq!(arena.reserve_bytes(), 100 * SPAN);
        arena.set_reserve_bytes(0);
        while arena.refill(&budget).unwrap() {}
        arena.retire_kept(&budget);
        assert!(arena.reserve_bytes() == 0 && budget.used_bytes() <= 20 * PAGE, "{}", budget.used_bytes());
    }
}
