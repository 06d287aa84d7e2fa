//! A backing in copies of the process (fork).
//!
//! A copy has the slots of its parent, and they name records on what the parent writes to. So a backing can be made to be copied:
//! its key is not wiped in copies, and its range of bytes has several *parts*, of which a process writes to one. Example with
//! parts of a gigabyte: a process writes to bytes 0 to 1 G; its copy reads there what its slots say, and writes to 1 G to 2 G;
//! the copy of that one reads from both, and writes to the third. Which file a part is, is the medium's to know: each process makes
//! one for its own part, and inherits those of the parts it reads.
//!
//! | who                     | what                                                                                    |
//! |-------------------------|-----------------------------------------------------------------------------------------|
//! | the parent, before      | [`Backing::hold`]: what is there now is not written over, though all of it were dead here |
//! | the copy                | [`Backing::begin_copy`]: another part, with nothing alive in it, and flights of its own    |
//! | the parent, afterwards  | [`Backing::hold`] again, when a copy has ended that could read                            |
//!
//! The same key seals for all of them, so that no nonce may be used by two: flights are numbered from the copy's number on, of which
//! no two in a lineage are the same, and a copy seals nothing before it has such numbers. A copy that finds no part with nothing alive in it can read, and writes nothing
//! ([`Health::Full`]).

#![allow(unsafe_code, reason = "what makes the call sound is the caller's to know")]

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::{Backing, BackingConfig, Health, Medium};
use crate::error::StoreError;

/// Flights of one process in a lineage, as a power of two. The rest of a number is for copies, 2^30 of them, which come to an end after 124 days at a
/// hundred a second; so do flights of 64 KiB, the smallest there are, at 100 MB a second. Then nothing more is written.
const FLIGHTS_BITS: u32 = 34;
const OWN_FLIGHTS: u64 = (1 << FLIGHTS_BITS) - 1;

impl Backing {
    /// A backing that copies of the process can read, and write to a part of their own: `parts` of them, of
    /// `config.capacity_bytes` each.
    ///
    /// # Errors
    /// As [`Backing::new`].
    pub fn new_for_copies(
        medium: Box<dyn Medium>,
        config: BackingConfig,
        parts: usize,
    ) -> Result<Arc<Backing>, StoreError> {
        let backing = Backing::with_parts(medium, config, parts, false)?;
        backing.segments.lock().end_after(OWN_FLIGHTS);
        Ok(backing)
    }

    /// The bytes of a part.
    pub fn part_bytes(&self) -> u64 {
        self.part_segments as u64 * self.segment_bytes as u64
    }

    /// The part this process writes to; `None` in a copy that found none.
    pub fn own_part(&self) -> Option<usize> {
        let own = self.segments.lock().own();
        (!own.is_empty()).then(|| own.start / self.part_segments)
    }

    /// Whether a slot of this process names anything in a part.
    pub fn is_part_alive(&self, part: usize) -> bool {
        self.segments.lock().is_part_alive(part * self.part_segments, self.part_segments)
    }

    /// The last flight so far; 0 before the first.
    pub fn flights(&self) -> u64 {
        self.segments.lock().flights()
    }

    /// Those of this process, of a backing that was made for copies.
    pub fn own_flights(&self) -> u64 {
        self.flights() & OWN_FLIGHTS
    }

    /// Whether there is no number for another flight of this process, and it writes nothing any more: it is a copy for which there was none, or has used
    /// all of its own.
    pub fn is_out_of_flights(&self) -> bool {
        self.segments.lock().is_out_of_flights()
    }

    /// Leaves what the flights up to this one have written where it is, though nobody in this process wants it any more; with a
    /// smaller number than before, the rest becomes free. With 0, all of it. Between this and the copy there may be no flight: what it
    /// writes the copy could read, and nobody would hold.
    pub fn hold(&self, until_flight: u64) {
        self.segments.lock().hold_until(until_flight);
    }

    /// In a copy of the process: its own part, and flights that no other process in the lineage has.
    ///
    /// # Safety
    /// Only in the child of a fork, by its only thread, with a `number` above 0 that no other process of the lineage gets; and no
    /// thread of the parent may have been doing anything with the backing at the moment of the copy but read.
    pub unsafe fn begin_copy(&self, number: u64) {
        // SAFETY: says the caller: whoever held one was reading, in a thread that does not exist here.
        unsafe {
            self.segments.free_after_fork();
            self.health.free_after_fork();
        }
        // A number that another process may have had is none: nothing is sealed with it, and there are no flights of it.
        let is_number = (1..1 << (u64::BITS - FLIGHTS_BITS)).contains(&number);
        let mut segments = self.segments.lock();
        let none_yet = number << FLIGHTS_BITS;
        segments.begin_part(self.part_segments, none_yet);
        segments.end_after(if is_number { none_yet | OWN_FLIGHTS } else { none_yet });
        if is_number {
            self.key.begin_copy();
        } else {
            segments.write_nothing();
        }
        let health = if segments.own().is_empty() { Health::Full } else { Health::Good };
        drop(segments);
        self.set_health(health);
    }
}
