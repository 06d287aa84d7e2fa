//! Groups: cold pages that are compressed together.
//!
//! Sixteen pages compress better as one unit of 64 KiB than one by one: on heaps a group takes about half of what its pages take
//! under LZ4. The price is that reading one of them decodes all. So groups are for pages that nobody has used for a while
//! ([`Pool::recompress`](crate::Pool::recompress) makes them), and a page that is used again leaves its group.
//!
//! A group is one zstd frame of at most 24 KiB, in up to six objects of the arena: as many of a whole page as it fills, and one with the
//! rest. Its entry in the table here says where they are and which of its pages are alive; the slot of each page says which
//! entry, and which of the pages.
//!
//! | entry, bytes | means                                                            |
//! |--------------|------------------------------------------------------------------|
//! | 0..4         | lock and waiters, as in a slot; bits 16..32: which pages are alive |
//! | 4..24        | the whole pages, each by its number in the arena                 |
//! | 24..32       | the rest: 36 bits of location, and the length of the frame       |
//!
//! Example: sixteen pages that LZ4 makes 22 KiB of become a frame of 10100 bytes: two whole pages, an object of 1908 bytes in a
//! slot of 1912, and 32 bytes here, two for each page. A page that is written, discarded or taken clears its bit; with the last one
//! the group is freed. Nobody needs to know whose slots a group's pages are in: compaction moves it under its own lock.
//!
//! | who                         | holds                            | and the group              |
//! |-----------------------------|----------------------------------|----------------------------|
//! | reads a page                | its slot                         | is locked while it is copied, not while it is decoded |
//! | frees a page                | nothing; its slot says something else now | is locked for some instructions |
//! | moves a group               | the registry                     | is locked while it is copied |
//!
//! A page that is alive keeps its group: so an entry that a locked slot names is in use, and stays so while the slot is locked.
//!
//! Lock order: a slot, then what is set aside for groups, then a group, then the arena's; `growth` with none of them below it.
//!
//! Arithmetic: docs/design/tiers.md. What else was thought of: docs/decisions/0025-groups-of-cold-pages.md.

#![allow(unsafe_code)]

mod aside;
mod opened;
mod recompressor;

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(crate) use aside::Aside;
pub(crate) use opened::Opened;
pub(crate) use recompressor::Candidate;
pub use recompressor::Recompressor;

use crate::arena::class::Class;
use crate::arena::{Arena, Location};
use crate::budget::{Budget, Credit};
use crate::error::StoreError;
use crate::lock::Mutex;
use crate::page::PAGE_SIZE;
use crate::region::Region;
use crate::slot::{self, word};

/// The most pages in a group.
pub(crate) const MEMBERS_MAX: usize = 16;
/// A group of fewer would not pay for its entry and for what decoding it takes.
pub(crate) const MEMBERS_LEAST: usize = 8;
/// The bytes of a full group's pages.
pub(crate) const GROUP_BYTES: usize = MEMBERS_MAX * PAGE_SIZE;
/// The longest frame.
pub(crate) const FRAME_BYTES_MAX: usize = (WHOLE_MAX + 1) * PAGE_SIZE;
const WHOLE_MAX: usize = 5;

const ALIVE_SHIFT: u32 = 16;
const LENGTH_BITS: u32 = 16;
const NONE: u32 = u32::MAX;
const ENTRY_BYTES: usize = size_of::<Group>();
const ENTRIES_A_PAGE: usize = PAGE_SIZE / ENTRY_BYTES;

const _: () = assert!(ENTRY_BYTES == 32);
const _: () = assert!(Location::BITS + LENGTH_BITS <= 64 && FRAME_BYTES_MAX < 1 << LENGTH_BITS);

/// The most memory that making a group touches: its objects, two pages for the last, and descriptors of two spans and an entry.
pub(crate) const CREDIT_FOR_GROUP: u64 = ((WHOLE_MAX + 2 + 3) * PAGE_SIZE) as u64;

/// The number of a group's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupId(pub u32);

/// What a group takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupSize {
    /// Bytes of the frame.
    pub length: usize,
    /// Bytes of the slots of its objects.
    pub slot_bytes: usize,
}

impl GroupSize {
    /// A group's entry in the table.
    pub const ENTRY_BYTES: usize = ENTRY_BYTES;

    /// What a frame of so many bytes will take, as far as the arena has slots of the size.
    pub fn of(length: usize) -> GroupSize {
        let (whole, rest) = split(length);
        GroupSize { length, slot_bytes: whole * PAGE_SIZE + Class::for_length(rest).slot_bytes() }
    }
}

/// An entry of the table. All zeroes is one that was never used. Fields are changed with the lock in `word` held.
#[repr(C)]
struct Group {
    word: AtomicU32,
    /// Numbers of pages of the arena; in a free entry, the first is the next free one.
    whole: [AtomicU32; WHOLE_MAX],
    rest: AtomicU64,
}

/// Free entries, and how many there are.
struct Growth {
    free: u32,
    /// Entries never used begin here.
    fresh: u32,
    in_use: u32,
    touched_pages: usize,
}

/// All groups of a store.
pub(crate) struct Groups {
    entries: Region,
    growth: Mutex<Growth>,
    /// Groups made: what was read of an entry before this changed may be another group's.
    made: AtomicU64,
}

/// How many whole pages a frame fills, and the length of what is left: 1..=4096.
fn split(length: usize) -> (usize, usize) {
    let whole = (length - 1) / PAGE_SIZE;
    (whole, length - whole * PAGE_SIZE)
}

/// A locked entry.
struct GroupGuard<'g> {
    group: &'g Group,
    now: u32,
}

impl Drop for GroupGuard<'_> {
    fn drop(&mut self) {
        word::unlock(&self.group.word, self.now);
    }
}

impl GroupGuard<'_> {
    fn alive(&self) -> u16 {
        (self.now >> ALIVE_SHIFT) as u16
    }

    fn set_alive(&mut self, alive: u16) {
        self.now = u32::from(alive) << ALIVE_SHIFT;
    }

    fn length(&self) -> usize {
        (self.group.rest.load(Ordering::Relaxed) >> Location::BITS) as usize
    }

    /// Which of its objects begins where, and how long it is. Nothing for an entry that makes no sense.
    fn objects(&self) -> impl Iterator<Item = (usize, Location, usize)> {
        let length = self.length();
        let (whole, rest) = if (1..=FRAME_BYTES_MAX).contains(&length) { split(length) } else { (0, 0) };
        let count = whole + usize::from(rest > 0);
        (0..count).map(move |nth| match nth < whole {
            true => (nth, Location::of_page(self.group.whole[nth].load(Ordering::Relaxed)), PAGE_SIZE),
            false => (nth, self.rest(), rest),
        })
    }

    fn rest(&self) -> Location {
        Location(self.group.rest.load(Ordering::Relaxed) & ((1 << Location::BITS) - 1))
    }

    /// Says where the object that is the `nth` lies; the last one is the rest.
    fn place(&self, nth: usize, length: usize, location: Location) {
        match split(length).0 {
            whole if nth < whole => self.group.whole[nth].store(location.page(), Ordering::Relaxed),
            _ => self.group.rest.store(location.0 | (length as u64) << Location::BITS, Ordering::Relaxed),
        }
    }
}

impl Groups {
    /// Reserves `bytes` of addresses for entries.
    pub fn reserve(bytes: usize, lock_in_ram: bool) -> Result<Groups, StoreError> {
        Ok(Groups {
            entries: Region::reserve(bytes.min((NONE as usize) * ENTRY_BYTES), 64 << 10, lock_in_ram)?,
            growth: Mutex::new(Growth { free: NONE, fresh: 0, in_use: 0, touched_pages: 0 }),
            made: AtomicU64::new(0),
        })
    }

    /// Groups made so far: while this is the same, a number means the same group.
    pub fn made(&self) -> u64 {
        self.made.load(Ordering::Acquire)
    }

    /// The address range of the entries.
    pub fn range(&self) -> (usize, usize) {
        self.entries.range()
    }

    /// Makes a group of `frame`, with the pages `alive`. `credit` must suffice ([`CREDIT_FOR_GROUP`]).
    pub fn add(
        &self,
        frame: &[u8],
        alive: u16,
        arena: &Arena,
        budget: &Budget,
        credit: &mut Credit,
    ) -> Result<(GroupId, GroupSize), StoreError> {
        let id = self.take_entry(budget, credit)?;
        let group = self.entry(id).expect("taken from the table");
        // Nobody else knows it: the lock is only what entries are changed under.
        let mut guard = lock(group);
        let mut slot_bytes = 0;
        for (nth, part) in frame.chunks(PAGE_SIZE).enumerate() {
            match arena.allocate(Class::for_length(part.len()), budget, credit) {
                Ok(location) => {
                    // SAFETY: just allocated in a class that holds the bytes, and known to nobody else.
                    unsafe { arena.fill(location, part) };
                    slot_bytes += arena.class_of(location).slot_bytes();
                    guard.place(nth, frame.len(), location);
                }
                Err(refused) => {
                    let placed = guard.objects_before(nth);
                    placed.for_each(|location| _ = arena.free(location, budget));
                    drop(guard);
                    self.put_entry(id);
                    return Err(refused);
                }
            }
        }
        guard.set_alive(alive);
        drop(guard);
        // Before any slot names it.
        self.made.fetch_add(1, Ordering::Release);
        Ok((id, GroupSize { length: frame.len(), slot_bytes }))
    }

    /// Frees the lock of a group that nobody has: its holder is no thread of this process.
    pub fn free_lock(&self, id: GroupId) {
        if let Some(group) = self.entry(id) {
            group.word.fetch_and(!(slot::LOCKED | slot::WAITERS), Ordering::Relaxed);
        }
    }

    /// Which pages of a group are alive.
    pub fn alive(&self, id: GroupId) -> u16 {
        self.entry(id).map_or(0, |group| (group.word.load(Ordering::Relaxed) >> ALIVE_SHIFT) as u16)
    }

    /// What a group takes, while one of its pages is kept alive by the caller.
    pub fn size(&self, id: GroupId, arena: &Arena) -> GroupSize {
        let guard = self.entry(id).map(lock);
        guard.map_or(GroupSize { length: 0, slot_bytes: 0 }, |guard| guard.size(arena))
    }

    /// Copies the frame of a group to the start of `into` and returns its length. The caller has the slot of a page of it locked.
    pub fn copy(&self, id: GroupId, arena: &Arena, into: &mut [u8]) -> Option<usize> {
        let guard = lock(self.entry(id)?);
        let mut end = 0;
        for (_, location, length) in guard.objects() {
            // SAFETY: the group is locked, so its objects stay where they are; they are never written to.
            let bytes = unsafe { arena.bytes(location, length) }?;
            into.get_mut(end..end + length)?.copy_from_slice(bytes);
            end += length;
        }
        (end > 0).then_some(end)
    }

    /// Takes the page at `place` out of a group; its slot says something else by now. Returns what the group took, if that was the
    /// last one and it is free now.
    pub fn release(&self, id: GroupId, place: u8, arena: &Arena, budget: &Budget) -> Option<GroupSize> {
        let mut guard = lock(self.entry(id)?);
        let left = guard.alive() & !(1 << place);
        if guard.alive() == left {
            // Only damaged slot words lead here. To leak is better than to free what belongs to other pages.
            return None;
        }
        guard.set_alive(left);
        if left != 0 {
            return None;
        }
        let size = guard.size(arena);
        guard.objects().for_each(|(_, location, _)| _ = arena.free(location, budget));
        drop(guard);
        self.put_entry(id);
        Some(size)
    }

    /// Entries that are, or were, in use.
    pub fn end(&self) -> u32 {
        self.growth.lock().fresh
    }

    /// Moves what compaction wants moved of one group. Returns how many objects moved, and the memory that gave back.
    pub fn move_if_sparse(&self, id: GroupId, arena: &Arena, budget: &Budget, credit: &mut Credit) -> (usize, u64) {
        let Some(group) = self.entry(id).filter(|group| group.word.load(Ordering::Relaxed) >> ALIVE_SHIFT != 0) else {
            return (0, 0);
        };
        let guard = lock(group);
        let (mut moved, mut freed_bytes) = (0, 0);
        if guard.alive() == 0 {
            return (0, 0);
        }
        let length = guard.length();
        for (nth, from, part) in guard.objects() {
            let Some(to) = arena.place_for_move(from, part, budget, credit) else { continue };
            // SAFETY: the group is locked, `to` was just allocated in the class of `from`.
            unsafe { arena.copy(from, to, part) };
            guard.place(nth, length, to);
            freed_bytes += arena.free(from, budget);
            moved += 1;
        }
        (moved, freed_bytes)
    }

    /// Gives the table's memory back if no group is left. Returns the bytes.
    pub fn trim(&self, budget: &Budget) -> u64 {
        let mut growth = self.growth.lock();
        if growth.in_use > 0 || growth.touched_pages == 0 {
            return 0;
        }
        let bytes = growth.touched_pages * PAGE_SIZE;
        // SAFETY: no entry is in use, and none can be taken while `growth` is locked; who looks at one in passing
        // (`move_if_sparse`, `alive`) reads zeroes.
        unsafe { self.entries.release(0, bytes) };
        *growth = Growth { free: NONE, fresh: 0, in_use: 0, touched_pages: 0 };
        budget.released(bytes as u64);
        bytes as u64
    }

    fn take_entry(&self, budget: &Budget, credit: &mut Credit) -> Result<GroupId, StoreError> {
        let mut growth = self.growth.lock();
        let id = match growth.free {
            NONE => {
                let id = growth.fresh;
                self.entries.ensure((id as usize + 1) * ENTRY_BYTES)?;
                let pages = (id as usize + 1).div_ceil(ENTRIES_A_PAGE);
                if pages > growth.touched_pages {
                    credit.spend(((pages - growth.touched_pages) * PAGE_SIZE) as u64, budget);
                    growth.touched_pages = pages;
                }
                growth.fresh = id + 1;
                id
            }
            id => {
                let next = self.entry(GroupId(id)).map(|group| group.whole[0].load(Ordering::Relaxed));
                growth.free = next.unwrap_or(NONE);
                id
            }
        };
        growth.in_use += 1;
        Ok(GroupId(id))
    }

    fn put_entry(&self, id: GroupId) {
        let mut growth = self.growth.lock();
        if let Some(group) = self.entry(id) {
            group.whole[0].store(growth.free, Ordering::Relaxed);
            growth.free = id.0;
            growth.in_use -= 1;
        }
    }

    fn entry(&self, id: GroupId) -> Option<&Group> {
        if (id.0 as usize + 1) * ENTRY_BYTES > self.entries.open_bytes() {
            return None;
        }
        // SAFETY: inside the open part, which is zeroed memory from the start, a valid `Group`; all its fields are atomics.
        Some(unsafe { &*self.entries.base().as_ptr().cast::<Group>().add(id.0 as usize) })
    }
}

fn lock(group: &Group) -> GroupGuard<'_> {
    GroupGuard { now: word::lock(&group.word), group }
}

impl GroupGuard<'_> {
    fn size(&self, arena: &Arena) -> GroupSize {
        let slots = self.objects().map(|(_, location, _)| arena.class_of(location).slot_bytes());
        GroupSize { length: self.length(), slot_bytes: slots.sum() }
    }

    /// The first `count` objects of a group whose rest is not placed yet.
    fn objects_before(&self, count: usize) -> impl Iterator<Item = Location> {
        self.group.whole[..count].iter().map(|page| Location::of_page(page.load(Ordering::Relaxed)))
    }
}
