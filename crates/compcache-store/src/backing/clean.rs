//! Cleaning: what lives in mostly dead segments is gathered for the next flight, and the segments become free.
//!
//! It begins when at most one segment in sixteen is free (two at least), and is done as part of a flight, so that what it moves
//! and what leaves memory share one write. Where nothing leaves memory it goes on while there is room: a flight that takes a segment, empties
//! only one and has nothing else is not written. Where what leaves does not fit beside it, it leaves without. A segment is read whole, its list says which pages its records were of, and
//! their slots say which still are. A record is opened before it is moved, so that damage is not sealed anew.
//!
//! A segment with something in it that is damaged, or that is not where its list says (its page was moved to
//! another index), is left alone until something in it has died by itself. Then it is tried again when there is no other, and so is one
//! that the medium failed to read: what fails may be over soon, for all of them.

use core::sync::atomic::Ordering::Relaxed;

use super::flight::{Flight, From, Head, list_once};
use super::record::{LISTED_BYTES, Listed, Place, Sealed, TAG_BYTES, TRAILER_BYTES, record_bytes};
use super::segments::{Begun, Segments};
use super::{Backing, Once, associated};
use crate::slot::Slot;
use crate::store::Store;
use crate::worker::Worker;

/// Cleaning begins when so small a share of the segments is free.
const FREE_SHARE: usize = 16;
const FREE_LEAST: usize = 2;

/// What cleaning remembers from one flight to the next.
#[derive(Default)]
pub(super) struct Cleaning {
    /// The last flight had too little to be written, beside what was moved: with less than this from memory another one has it, too. Else 0.
    pub least_bytes: usize,
}

/// What was cleaned for a flight.
#[derive(Default)]
pub(super) struct Cleaned {
    /// Segments that will be free once it has arrived.
    pub emptied: usize,
    /// Nothing more fits.
    pub is_full: bool,
}

/// How far segments are cleaned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    SomeAreFree,
    Full,
}

/// What became of a segment.
enum Outcome {
    /// Everything alive in it is in the flight.
    Emptied,
    /// The flight is full.
    Partly,
    /// It cannot be cleaned.
    Stuck,
    /// Nor can others, as far as is known.
    InVain,
    /// All that was alive in it has died meanwhile. It is free, or something else by now.
    Gone,
}

fn stick(segments: &mut Segments, chosen: Begun) -> Outcome {
    if segments.stick(chosen) { Outcome::Stuck } else { Outcome::InVain }
}

impl Backing {
    /// Gathers what lives in the segments that are best cleaned, if there is need.
    pub(super) fn clean(
        &self,
        store: &Store,
        worker: &mut Worker,
        flight: &mut Flight,
        cleaned: &mut Cleaned,
        until: Until,
    ) {
        loop {
            let chosen = {
                let mut segments = self.segments.lock();
                let few = (segments.count() / FREE_SHARE).max(FREE_LEAST);
                let are_some = segments.sure() + cleaned.emptied > few;
                if until == Until::SomeAreFree && are_some { None } else { segments.choose(flight.room() as u64) }
            };
            let Some(chosen) = chosen else { return };
            match self.clean_one(store, worker, flight, chosen) {
                Outcome::Emptied => cleaned.emptied += 1,
                // To move a part of it alone would gain nothing.
                Outcome::Partly if cleaned.emptied == 0 => {
                    flight.clear();
                    return;
                }
                Outcome::Partly => {
                    cleaned.is_full = true;
                    return;
                }
                Outcome::InVain => return,
                Outcome::Stuck | Outcome::Gone => {}
            }
        }
    }

    fn clean_one(&self, store: &Store, worker: &mut Worker, flight: &mut Flight, chosen: Begun) -> Outcome {
        let (whole, Begun { segment, flight: number, .. }) = (self.segment_bytes, chosen);
        let offset_bytes = u64::from(segment) * whole as u64;
        let read = self.at_medium(flight.nth, worker.now_ns(), || self.medium.read_at(offset_bytes, &mut flight.image));
        if read.is_err() {
            self.counts.failed_reads.fetch_add(1, Relaxed);
            self.segments.lock().put_off(chosen);
            return Outcome::InVain;
        }
        let Some(list) = self.open_list(&mut flight.image, number) else { return self.stick_damaged(chosen) };
        let mut moved_bytes = 0;
        let registry = store.registry.lock();
        for at in list.step_by(LISTED_BYTES) {
            let line = flight.image[at..at + LISTED_BYTES].try_into().expect("as long as a line");
            let listed = Listed::unpack(line);
            let Some(pool) = registry.listed_pool(listed.pool) else { continue };
            let slot = pool.tree.lock(&store.tables, listed.index, &mut worker.leaf).map(|guard| guard.get());
            let place = Place::new(segment, whole, listed.within as usize);
            let Some(Slot::OnBacking(sealed)) = slot else { continue };
            if sealed.place != place || !sealed.is_of(number) || !pool.is_on(self) {
                continue;
            }
            if !flight.fits(sealed.length) {
                return Outcome::Partly;
            }
            let from = From::Record { place, check: sealed.check };
            let head =
                Head { pool: pool.serial(), index: listed.index, from, length: sealed.length, codec: sealed.codec };
            let once = Once { flight: number, within: listed.within };
            if !flight.add(head, |copy, image| self.open_in(image, once, pool.serial(), sealed, copy)) {
                self.counts.damaged_reads.fetch_add(1, Relaxed);
                continue;
            }
            moved_bytes += record_bytes(sealed.length.into()) as u64;
        }
        let mut segments = self.segments.lock();
        match segments.live_bytes_of(chosen) {
            None => Outcome::Gone,
            Some(live_bytes) if moved_bytes >= live_bytes => Outcome::Emptied,
            Some(_) => stick(&mut segments, chosen),
        }
    }

    /// What was read of a segment is not what was written. That says something of it only if it is still what it was when it was chosen: no
    /// lock is held while the medium works, so it may have died, and been written again by another flight.
    fn stick_damaged(&self, chosen: Begun) -> Outcome {
        let mut segments = self.segments.lock();
        if segments.live_bytes_of(chosen).is_none() {
            return Outcome::Gone;
        }
        self.counts.damaged_reads.fetch_add(1, Relaxed);
        stick(&mut segments, chosen)
    }

    /// Opens the list of a segment that was read, and returns where it lies.
    fn open_list(&self, image: &mut [u8], flight: u64) -> Option<core::ops::Range<usize>> {
        let end = image.len() - TRAILER_BYTES;
        let (before, trailer) = image.split_at_mut(end);
        let (tag, rest) = trailer.split_first_chunk::<TAG_BYTES>()?;
        let records = rest.first_chunk::<8>()?;
        let start = usize::try_from(u64::from_le_bytes(*records)).ok()?;
        let start = end.checked_sub(start.checked_mul(LISTED_BYTES)?)?;
        let once = list_once(flight, self.segment_bytes);
        self.key.open(once, records, &mut before[start..], tag).then_some(start..end)
    }

    /// Opens one record of a segment that was read.
    fn open_in(&self, image: &[u8], once: Once, pool: u64, sealed: Sealed, into: &mut [u8]) -> bool {
        let within = once.within as usize;
        let Some(record) = image.get(within..within + into.len() + TAG_BYTES) else { return false };
        let (object, tag) = record.split_at(into.len());
        into.copy_from_slice(object);
        self.key.open(once, &associated(pool, sealed), into, tag.try_into().expect("as long as a tag"))
    }
}
