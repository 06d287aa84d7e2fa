//! The arena: where objects live.
//!
//! One reserved range of addresses is cut into spans of 256 KiB; a span belongs to a size class ([`class`]) while it
//! holds objects, and its memory goes back to the system when it is empty. An object has no header and no pointer back
//! to its slot: the slot is the only thing that knows it, and is what compaction changes when it moves the object.
//!
//! Allocation takes the fullest span of the class and the lowest free position in it; memory already touched is used
//! before memory that is not. Worked example: 191 slots of 1368 bytes; three objects have been stored, then the second
//! freed: two pages are touched (8 KiB are charged), and the next object of 1365 bytes goes to the second slot and costs
//! nothing.
//!
//! Lock order: a class's lists, then the source of fresh spans, then a region's growth. Whoever calls may hold slot
//! locks. The lists are held for tens of nanoseconds; during a system call only when a span begins or grows by
//! several pages, or compaction cuts off its end; and while a pass of compaction begins, as long as it takes to look at each span
//! of the class that has room (16 000 of them in 4 GiB).
//!
//! Not here: the limit ([`crate::budget`]; this module spends the credit it is given), checksums, locks on objects.
//!
//! # Source
//! Size classes and emptying sparse spans as in `mm/zsmalloc.c`; marking the pages of partly used spans as not there is
//! possible because the arena is virtual memory, and is what makes many classes cheap.

#![allow(unsafe_code)]

pub(crate) mod class;
mod reserve;
mod span;
mod sparse;

use alloc::boxed::Box;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::budget::{Budget, CREDIT_LEAST, Credit};
use crate::error::StoreError;
use crate::lock::{Guard, Mutex};
use crate::page::PAGE_SIZE;
use crate::region::Region;
use class::{CLASSES, Class, GRANULE, SPAN_BYTES};
use span::{Mark, NONE, Placed, Span};

const PAGE: u64 = PAGE_SIZE as u64;
const BINS: usize = 8;
/// The bin of a span that is on no list: full, or a victim.
const UNLISTED: u8 = u8::MAX;
/// Empty spans keep this much memory, and 1/256 of what is used, so that a class at the edge of a span does not ask the
/// system for memory and give it back at every page.
const KEPT_LEAST: u64 = 128 << 10;
const KEPT_SHARE: u64 = 256;
/// A large store asks for the pages of a span several at a time: one for each of these it uses.
const AHEAD_SHARE: u64 = 128 << 20;
const AHEAD_PAGES_MAX: u64 = 16;
/// Cache lines asked for ahead of reading; the processor goes on by itself from there.
const PREFETCHED_LINES: usize = 10;

/// Where an object begins, in units of 8 bytes from the start of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location(pub u64);

impl Location {
    /// Bits a location needs: 2^36 units are 512 GiB.
    pub const BITS: u32 = 36;
    /// The largest arena.
    pub const ARENA_BYTES_MAX: u64 = (1 << Self::BITS) * GRANULE as u64;

    fn new(span: u32, offset: usize) -> Location {
        Location((u64::from(span) * SPAN_BYTES as u64 + offset as u64) / GRANULE as u64)
    }

    /// Where an object of a whole page begins, by the number of its page.
    pub fn of_page(page: u32) -> Location {
        Location(u64::from(page) * (PAGE / GRANULE as u64))
    }

    /// The number of the page it lies in.
    pub fn page(self) -> u32 {
        (self.0 / (PAGE / GRANULE as u64)) as u32
    }

    fn byte(self) -> usize {
        self.0 as usize * GRANULE
    }

    fn span(self) -> u32 {
        (self.byte() / SPAN_BYTES) as u32
    }

    fn offset(self) -> usize {
        self.byte() % SPAN_BYTES
    }
}

/// The spans of one class that have room, by how full they are.
struct Lists {
    bins: [u32; BINS],
    /// Free positions in the listed spans.
    free: usize,
}

#[repr(align(64))]
struct ClassLists(Mutex<Lists>);

/// Where spans come from.
struct Source {
    /// Spans given back, linked by `next`.
    free: u32,
    /// Spans whose memory is there already, linked by `next`: the reserve.
    prepared: u32,
    /// Spans never used begin here.
    fresh: u32,
    descriptor_pages: u64,
}

/// All objects of a store.
pub(crate) struct Arena {
    objects: Region,
    descriptors: Region,
    classes: Box<[ClassLists]>,
    source: Mutex<Source>,
    spans_max: u32,
    kept_bytes: AtomicU64,
    /// How many spans the reserve shall have, and has.
    reserve_wanted: AtomicU32,
    reserve_spans: AtomicU32,
}

impl Arena {
    /// Reserves `bytes` of addresses; nothing is touched yet.
    pub fn reserve(bytes: u64, lock_in_ram: bool) -> Result<Arena, StoreError> {
        let bytes = bytes.clamp(SPAN_BYTES as u64, Location::ARENA_BYTES_MAX).next_multiple_of(SPAN_BYTES as u64);
        let spans_max = (bytes / SPAN_BYTES as u64) as u32;
        let lists = || ClassLists(Mutex::new(Lists { bins: [NONE; BINS], free: 0 }));
        Ok(Arena {
            objects: Region::reserve(bytes as usize, 4 << 20, lock_in_ram)?,
            descriptors: Region::reserve(spans_max as usize * size_of::<Span>(), 64 << 10, lock_in_ram)?,
            classes: (0..CLASSES).map(|_| lists()).collect(),
            source: Mutex::new(Source { free: NONE, prepared: NONE, fresh: 0, descriptor_pages: 0 }),
            spans_max,
            kept_bytes: AtomicU64::new(0),
            reserve_wanted: AtomicU32::new(0),
            reserve_spans: AtomicU32::new(0),
        })
    }

    /// Finds room for an object of `class`, touching new memory only as far as `credit` goes.
    pub fn allocate(&self, class: Class, budget: &Budget, credit: &mut Credit) -> Result<Location, StoreError> {
        if self.wants_reserve() || credit.reserve_only && credit.bytes < CREDIT_LEAST {
            match self.allocate_touched(class, budget, credit) {
                Some(location) => return Ok(location),
                None if credit.reserve_only => {
                    // Not there yet, or there will be none: who waits wants to know.
                    budget.must_fit(SPAN_BYTES as u64)?;
                    return Err(StoreError::MemoryRefused { bytes: PAGE });
                }
                None => {}
            }
        }
        let mut lists = self.lists(class);
        let pages = (credit.bytes / PAGE) as usize;
        if let Some(location) = self.place_in_listed(&mut lists, class, pages, budget, credit) {
            return Ok(self.after_growth(lists, location, budget, credit));
        }
        let id = self.fresh_span(budget, credit)?;
        self.begin_span(&mut lists, id, class, 0);
        let placed = self.place(&mut lists, id, class, (credit.bytes / PAGE) as usize, budget, credit);
        let refused = StoreError::LimitReached { used_bytes: budget.used_bytes(), limit_bytes: budget.limit_bytes() };
        let location = placed.ok_or(refused)?;
        Ok(self.after_growth(lists, location, budget, credit))
    }

    /// Makes an unused span one of `class`, with so much memory.
    fn begin_span(&self, lists: &mut Lists, id: u32, class: Class, touched_pages: usize) {
        let span = self.span(id);
        span.begin(class);
        span.set_touched_pages(touched_pages);
        self.link(lists, id, span, class);
        lists.free += class.objects();
    }

    /// Finds room for an object that compaction moves out of a victim: in spans that hold objects already.
    fn allocate_elsewhere(&self, from: Location, budget: &Budget, credit: &mut Credit) -> Option<Location> {
        let span = self.known_span(from.span()).filter(|span| span.mark() == Mark::Victim)?;
        let class = span.class();
        let mut lists = self.lists(class);
        // With a reserve, nobody waits for memory while he holds the lock of a slot.
        let pages = if self.wants_reserve() { 0 } else { (credit.bytes / PAGE) as usize };
        let placed = self.place_in_listed(&mut lists, class, pages, budget, credit);
        placed.map(|(location, ..)| location)
    }

    /// Frees the object at `location` and returns how many bytes that gave back to the system.
    ///
    /// The caller owned the object: its slot was locked when it was taken out of it, and nothing refers to it any more.
    pub fn free(&self, location: Location, budget: &Budget) -> u64 {
        let Some(span) = self.known_span(location.span()) else { return 0 };
        let class = span.class();
        let position = location.offset() / class.slot_bytes();
        let mut lists = self.lists(class);
        if self.holds(location) != Some(class) {
            // Only damaged slot words lead here. To leak is better than to free what belongs to another page.
            return 0;
        }
        let left = span.vacate(position);
        let is_victim = span.mark() == Mark::Victim;
        if !is_victim {
            lists.free += 1;
            self.relist(&mut lists, location.span(), span, class);
        }
        if left > 0 || (!is_victim && self.keep(span, budget)) {
            return 0;
        }
        if is_victim {
            // Under the lock: who ends the pass must not take what the span is next for what it was.
            span.set_mark(Mark::Plain);
        } else {
            self.unlink(&mut lists, span);
            lists.free -= class.objects();
        }
        drop(lists);
        self.retire(location.span(), span, budget)
    }

    /// The class of the slot that `location` lies in: what the object costs, which can be more than its length needs.
    pub fn class_of(&self, location: Location) -> Class {
        self.known_span(location.span()).map_or(Class(0), Span::class)
    }

    /// The class of the object that begins at `location`; `None` if none does, which only a damaged slot can say. For whoever
    /// is about to change what lies there.
    pub fn holds(&self, location: Location) -> Option<Class> {
        let span = self.known_span(location.span())?;
        let (class, offset) = (span.class(), location.offset() as u32);
        // Of 32 bits, which is cheaper to divide, and this is on the way of every page that is written again.
        let slot_bytes = class.slot_bytes() as u32;
        let (position, rest) = ((offset / slot_bytes) as usize, offset % slot_bytes);
        (rest == 0 && position < class.objects() && span.is_taken(position)).then_some(class)
    }

    /// The bytes of an object; `None` if they would lie outside the arena, which only a damaged slot can ask for.
    ///
    /// # Safety
    /// The caller owns the object at `location` (its slot is locked, or it has just been allocated) for as long as it
    /// holds the reference, and nobody writes to it meanwhile. At worst, reading what another thread writes gives bytes
    /// that fail their checksum.
    pub unsafe fn bytes(&self, location: Location, length: usize) -> Option<&[u8]> {
        let start = location.byte();
        if start + length > self.objects.open_bytes() {
            return None;
        }
        // SAFETY: inside the open part, whose memory is always initialised; exclusive use is kept by the caller.
        Some(unsafe { core::slice::from_raw_parts(self.objects.base().as_ptr().add(start), length) })
    }

    /// Asks the processor for the beginning of an object that will be read soon. Only a hint: `location` may be stale, or
    /// nothing at all.
    #[inline]
    pub fn prefetch(&self, location: Location) {
        #[cfg(target_arch = "x86_64")]
        for line in 0..PREFETCHED_LINES {
            let at = self.objects.base().as_ptr().wrapping_add(location.byte() + line * 64);
            // SAFETY: prefetching reads nothing and cannot fault, whatever the address.
            unsafe { core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at.cast::<i8>()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (location, PREFETCHED_LINES);
    }

    /// Copies `bytes` to `location`.
    ///
    /// # Safety
    /// The caller owns the object at `location` and its slot size is at least `bytes.len()`. At worst another page's
    /// object is overwritten, which its checksum tells.
    pub unsafe fn fill(&self, location: Location, bytes: &[u8]) {
        let start = location.byte();
        assert!(start + bytes.len() <= self.objects.open_bytes());
        // SAFETY: inside the open part; `bytes` is a caller's buffer, never arena memory; exclusive use is the caller's.
        unsafe {
            let to = self.objects.base().as_ptr().add(start);
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Copies an object of `length` bytes from one slot to another.
    ///
    /// # Safety
    /// The caller owns both, and both slots hold `length` bytes.
    pub unsafe fn copy(&self, from: Location, to: Location, length: usize) {
        assert!(from.byte().max(to.byte()) + length <= self.objects.open_bytes());
        // SAFETY: both inside the open part, two different slots do not overlap; exclusive use is the caller's.
        unsafe {
            let base = self.objects.base().as_ptr();
            core::ptr::copy_nonoverlapping(base.add(from.byte()), base.add(to.byte()), length);
        }
    }

    /// The address ranges of objects and of descriptors.
    pub fn ranges(&self) -> [(usize, usize); 2] {
        [self.objects.range(), self.descriptors.range()]
    }

    fn lists(&self, class: Class) -> Guard<'_, Lists> {
        self.classes[class.0 as usize].0.lock()
    }

    /// Tries memory already touched first, then at most so many new pages in a span that has some left.
    fn place_in_listed(
        &self,
        lists: &mut Lists,
        class: Class,
        new_pages_max: usize,
        budget: &Budget,
        credit: &mut Credit,
    ) -> Option<(Location, usize, usize)> {
        if lists.free == 0 {
            return None;
        }
        for pages in [0, new_pages_max] {
            for bin in (0..BINS).rev() {
                let mut id = lists.bins[bin];
                // The first of a list may be the one with untouched pages; look behind it, but not at the whole list.
                for _ in 0..2 {
                    if id == NONE {
                        break;
                    }
                    if let Some(found) = self.place(lists, id, class, pages, budget, credit) {
                        return Some(found);
                    }
                    id = self.span(id).next.load(Relaxed);
                }
            }
        }
        None
    }

    fn place(
        &self,
        lists: &mut Lists,
        id: u32,
        class: Class,
        pages_max: usize,
        budget: &Budget,
        credit: &mut Credit,
    ) -> Option<(Location, usize, usize)> {
        let placed = self.span(id).place(class, pages_max)?;
        Some(self.placed(lists, id, class, placed, budget, credit))
    }

    /// Notes that a position of a listed span was taken.
    fn placed(
        &self,
        lists: &mut Lists,
        id: u32,
        class: Class,
        placed: Placed,
        budget: &Budget,
        credit: &mut Credit,
    ) -> (Location, usize, usize) {
        let span = self.span(id);
        if span.mark() == Mark::Kept {
            span.set_mark(Mark::Plain);
            self.kept_bytes.fetch_sub(placed.pages_before as u64 * PAGE, Relaxed);
        }
        lists.free -= 1;
        self.relist(lists, id, span, class);
        if placed.pages_after > placed.pages_before {
            credit.spend((placed.pages_after - placed.pages_before) as u64 * PAGE, budget);
        }
        let location = Location::new(id, placed.position * class.slot_bytes());
        (location, placed.pages_before, placed.pages_after)
    }

    /// After an object touched new pages of a large store, asks for the next few at once: a page that the system gives on
    /// request costs less than one that it gives on a fault.
    fn after_growth(
        &self,
        lists: Guard<'_, Lists>,
        (location, before, after): (Location, usize, usize),
        budget: &Budget,
        credit: &mut Credit,
    ) -> Location {
        let ahead = (budget.used_bytes() / AHEAD_SHARE).min(AHEAD_PAGES_MAX) as usize;
        // With a reserve, memory is asked for elsewhere, and not under a lock.
        if after == before || after - before >= ahead || self.wants_reserve() {
            return location;
        }
        let span = self.span(location.span());
        let target = (before + ahead).min((span.class().objects() * span.class().slot_bytes()).div_ceil(PAGE_SIZE));
        let more = (target.saturating_sub(after)) as u64 * PAGE;
        if !budget.has_ample_room(more) || budget.try_charge(more).is_err() {
            return location;
        }
        credit.bytes += more;
        credit.spend(more, budget);
        span.set_touched_pages(target.max(after));
        let start = location.span() as usize * SPAN_BYTES + before * PAGE_SIZE;
        // Still under the lock: compaction must not cut these pages off before they are there.
        self.objects.populate(start, target.saturating_sub(before) * PAGE_SIZE);
        drop(lists);
        location
    }

    /// A span that nobody uses, its descriptor charged.
    fn fresh_span(&self, budget: &Budget, credit: &mut Credit) -> Result<u32, StoreError> {
        let mut source = self.source.lock();
        if source.free != NONE {
            let id = source.free;
            source.free = self.span(id).next.load(Relaxed);
            return Ok(id);
        }
        let id = source.fresh;
        if id == self.spans_max {
            return Err(StoreError::MemoryRefused { bytes: SPAN_BYTES as u64 });
        }
        self.objects.ensure((id as usize + 1) * SPAN_BYTES)?;
        let descriptors_end = (id as usize + 1) * size_of::<Span>();
        self.descriptors.ensure(descriptors_end)?;
        let pages = descriptors_end.div_ceil(PAGE_SIZE) as u64;
        if pages > source.descriptor_pages {
            credit.spend((pages - source.descriptor_pages) * PAGE, budget);
            source.descriptor_pages = pages;
        }
        source.fresh = id + 1;
        Ok(id)
    }

    /// Whether the memory of a span that has just become empty stays, to be used again soon.
    fn keep(&self, span: &Span, budget: &Budget) -> bool {
        let bytes = span.touched_pages() as u64 * PAGE;
        let kept_max = match self.wants_reserve() {
            true => self.kept_ahead_bytes(span),
            false => KEPT_LEAST + budget.used_bytes() / KEPT_SHARE,
        };
        if self.kept_bytes.load(Relaxed) + bytes > kept_max {
            return false;
        }
        self.kept_bytes.fetch_add(bytes, Relaxed);
        span.set_mark(Mark::Kept);
        true
    }

    /// Gives the memory of an empty span that is on no list back to the system.
    fn retire(&self, id: u32, span: &Span, budget: &Budget) -> u64 {
        let bytes = span.touched_pages() * PAGE_SIZE;
        if bytes == SPAN_BYTES && self.reserve_spans.load(Relaxed) < self.reserve_wanted.load(Relaxed) {
            span.end();
            self.put_prepared(id, span);
            return 0;
        }
        // SAFETY: the span holds no object and is on no list, so nobody reads it or is given a place in it.
        unsafe { self.objects.release(id as usize * SPAN_BYTES, bytes) };
        span.end();
        budget.released(bytes as u64);
        let mut source = self.source.lock();
        span.next.store(source.free, Relaxed);
        source.free = id;
        bytes as u64
    }

    fn span(&self, id: u32) -> &Span {
        self.known_span(id).expect("a listed span has a descriptor")
    }

    fn known_span(&self, id: u32) -> Option<&Span> {
        let end = (id as usize + 1) * size_of::<Span>();
        if end > self.descriptors.open_bytes() {
            return None;
        }
        // SAFETY: inside the open part, which is zeroed memory from the start, a valid `Span`; all its fields are atomics.
        Some(unsafe { &*self.descriptors.base().as_ptr().cast::<Span>().add(id as usize) })
    }

    /// Puts a span on the list of its fullness, if it is not on it already.
    fn relist(&self, lists: &mut Lists, id: u32, span: &Span, class: Class) {
        let (objects, room) = (span.objects(), class.objects());
        let bin = if objects == room { UNLISTED } else { (objects * BINS / room) as u8 };
        if span.bin.load(Relaxed) != bin {
            self.unlink(lists, span);
            if bin != UNLISTED {
                self.link(lists, id, span, class);
            }
        }
    }

    fn link(&self, lists: &mut Lists, id: u32, span: &Span, class: Class) {
        let bin = span.objects() * BINS / class.objects();
        let first = lists.bins[bin];
        if first != NONE {
            self.span(first).previous.store(id, Relaxed);
        }
        span.next.store(first, Relaxed);
        span.previous.store(NONE, Relaxed);
        span.bin.store(bin as u8, Relaxed);
        lists.bins[bin] = id;
    }

    fn unlink(&self, lists: &mut Lists, span: &Span) {
        let bin = span.bin.swap(UNLISTED, Relaxed);
        if bin == UNLISTED {
            return;
        }
        let (previous, next) = (span.previous.load(Relaxed), span.next.load(Relaxed));
        if next != NONE {
            self.span(next).previous.store(previous, Relaxed);
        }
        if previous == NONE {
            lists.bins[bin as usize] = next;
        } else {
            self.span(previous).next.store(next, Relaxed);
        }
    }
}
