//! A locked slot, and with it the object it leads to.
//!
//! The lock on the slot is the right to the object: nobody else reads, writes, moves or frees it. This is the invariant
//! every access to the arena rests on, and this file is where it is kept: a location is in one slot at a time, enters it
//! with [`SlotGuard::set`], and its bytes are reached through the guard alone.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::arena::{Arena, Location};
use crate::slot::{self, Object, Slot, word};

/// A slot that this thread has locked. Dropping unlocks it.
pub(crate) struct SlotGuard<'t> {
    meta: &'t AtomicU32,
    payload: &'t AtomicU64,
    now: u32,
}

impl<'t> SlotGuard<'t> {
    /// For a slot whose meta word is locked by this thread and was `now` before.
    pub(super) fn new(meta: &'t AtomicU32, payload: &'t AtomicU64, now: u32) -> SlotGuard<'t> {
        SlotGuard { meta, payload, now }
    }

    pub fn get(&self) -> Slot {
        if self.now == 0 {
            // Absent, the usual case of a write; its payload may not even be in memory.
            return Slot::Absent;
        }
        Slot::unpack(self.now, self.payload.load(Ordering::Relaxed))
    }

    /// Changes what the slot says. What it said before is the caller's to free.
    pub fn set(&mut self, slot: Slot, age: u8) {
        let (meta, payload) = slot.pack(age);
        self.now = meta;
        if slot != Slot::Absent {
            self.payload.store(payload, Ordering::Relaxed);
        }
    }

    /// The page was used now.
    pub fn touch(&mut self, age: u8) {
        self.now = slot::with_age(self.now, age);
    }

    /// Takes both words over from another slot, age included, and leaves that one absent.
    pub fn take_from(&mut self, other: &mut SlotGuard<'_>) {
        self.now = other.now;
        self.payload.store(other.payload.load(Ordering::Relaxed), Ordering::Relaxed);
        other.now = 0;
    }

    /// The stored bytes of `object`, which is what this slot says; `None` if it lies outside the arena.
    pub fn bytes<'s>(&'s self, object: &Object, arena: &'s Arena) -> Option<&'s [u8]> {
        // SAFETY: the slot is locked for as long as the reference lives (it borrows the guard), and the object is its.
        unsafe { arena.bytes(object.location, object.length as usize) }
    }

    /// Copies an object into a place that has just been allocated for this slot.
    pub fn fill(&mut self, location: Location, bytes: &[u8], arena: &Arena) {
        // SAFETY: either nobody knows the location yet, or it is this slot's own object, and the slot is locked; the
        // caller chose a class that holds the bytes.
        unsafe { arena.fill(location, bytes) };
    }

    /// Moves the object to `to`, a place just allocated in a slot of the same class, and returns where it was.
    pub fn relocate(&mut self, object: &Object, to: Location, arena: &Arena) -> Location {
        // SAFETY: the slot is locked, `to` is known to nobody else, and both are of one class.
        unsafe { arena.copy(object.location, to, object.length as usize) };
        let payload = self.payload.load(Ordering::Relaxed);
        self.payload.store(slot::with_location(payload, to), Ordering::Relaxed);
        object.location
    }

    /// The age of the slot.
    pub fn age(&self) -> u8 {
        slot::age(self.now)
    }
}

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        word::unlock(self.meta, self.now);
    }
}
