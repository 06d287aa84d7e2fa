//! A flight: one segment from memory to the medium, and the slots after it.
//!
//! | step      | what                                                         | locks held                      |
//! |-----------|--------------------------------------------------------------|---------------------------------|
//! | look      | whether so much may be written today; if not, nothing is     | the day's writes                |
//! | clean     | live records of mostly dead segments are gathered            | while the slots are asked: registry, a slot |
//! | gather    | objects are copied, as they are in the arena; if there are none, more is cleaned; if none fits, what was cleaned stays where it was, unless that gains | registry, a slot |
//! | begin     | a free segment, and a number that no other flight has had    | segments                        |
//! | seal      | from the copies into the image of the segment                | none                            |
//! | count     | what is about to be written counts for the day               | the day's writes                |
//! | write     | one call of the medium                                       | none                            |
//! | settle    | each slot that still holds the same object says where it is  | the settling of the pool, a slot |
//!
//! All of it is under the lock of the flight, of which there are two: while one waits for the medium, another thread makes the next
//! ready. Only one of them cleans, and they gather one after the other; while one settles the other can gather, or settle as well. Until it is settled a page is where it was, and can be read, written and discarded;
//! what changed meanwhile is compared byte for byte with its copy, and if it differs the record is dead. So there is nothing
//! to undo when the write fails.
//!
//! The copies lie one behind the other, each with a head of 32 bytes that says whose it is; the image is made of them in the
//! same order, so the second pass finds each record's place by counting.

use core::sync::atomic::Ordering::Relaxed;

use super::buffer::Buffer;
use super::clean::{Cleaned, Cleaning, Until};
use super::gather::Wanted;
use super::record::{LISTED_BYTES, Listed, Place, Sealed, TAG_BYTES, TRAILER_BYTES, UNIT, record_bytes};
use super::segments::Begun;
use super::{Backing, Forked, Health, MediumError, Once, associated};
use crate::codec::CodecId;
use crate::error::StoreError;
use crate::groups::MEMBERS_MAX;
use crate::lock::Mutex;
use crate::page::PageIndex;
use crate::pool::PoolCore;
use crate::slot::Slot;
use crate::store::Store;
use crate::worker::Worker;

const HEAD_BYTES: usize = 32;
/// An object takes its length and this at most among the copies, and its length and more than half of this in a segment, so
/// twice a segment holds all the copies.
const COPIES_FACTOR: usize = 2;
const _: () = assert!(HEAD_BYTES + UNIT <= COPIES_FACTOR * (TAG_BYTES + LISTED_BYTES));

/// Of so many segments two are for cleaning alone: what is moved to another index while it is cleaned stays where it was, and the
/// flight has taken a segment without emptying one.
const SPARE_TWO_OF: usize = 64;

/// Each page of a group that leaves frees such a part of it, in the end.
const GROUP_PAGES: u64 = MEMBERS_MAX as u64;

/// What a flight did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flown {
    /// Pages that have left memory.
    pub pages: usize,
    /// Bytes of the arena that these took.
    pub freed_bytes: u64,
    /// Records that were moved here from segments to be cleaned.
    pub moved: usize,
    /// Others are flying; there is nothing to fly with.
    pub is_busy: bool,
}

/// How many there can be at a time.
pub(crate) const FLIGHTS: usize = 2;

/// The segment being filled.
pub(super) struct Flight {
    /// Which of the flights of its backing this is.
    pub(super) nth: usize,
    copies: Buffer,
    pub(super) image: Buffer,
    copied: usize,
    records: usize,
    /// Where the next record begins in the segment.
    end: usize,
}

/// Where the object of a copy was.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    Memory,
    Record { place: Place, check: u32 },
}

/// What a copy begins with.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub pool: u64,
    pub index: PageIndex,
    pub from: From,
    pub length: u16,
    pub codec: Option<CodecId>,
}

const FROM_MEMORY: u64 = u64::MAX;

impl Head {
    fn pack(&self) -> [u8; HEAD_BYTES] {
        let (place, check) = match self.from {
            From::Memory => (FROM_MEMORY, 0),
            From::Record { place, check } => (place.0, check),
        };
        let mut bytes = [0; HEAD_BYTES];
        bytes[..8].copy_from_slice(&self.pool.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.index.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&place.to_le_bytes());
        bytes[24..28].copy_from_slice(&check.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.length.to_le_bytes());
        bytes[30] = self.codec.map_or(0, |id| id.0 + 1);
        bytes
    }

    fn unpack(bytes: &[u8; HEAD_BYTES]) -> Head {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let check = u32::from_le_bytes(bytes[24..28].try_into().expect("four bytes"));
        Head {
            pool: word(0),
            index: PageIndex(word(8)),
            from: if word(16) == FROM_MEMORY { From::Memory } else { From::Record { place: Place(word(16)), check } },
            length: u16::from_le_bytes([bytes[28], bytes[29]]),
            codec: bytes[30].checked_sub(1).map(CodecId),
        }
    }
}

impl Flight {
    pub fn new(nth: usize, segment_bytes: usize) -> Result<Flight, StoreError> {
        let (copies, image) = (Buffer::new(COPIES_FACTOR * segment_bytes)?, Buffer::new(segment_bytes)?);
        Ok(Flight { nth, copies, image, copied: 0, records: 0, end: 0 })
    }

    pub fn memory_ranges(&self) -> [(usize, usize); 2] {
        [self.copies.range(), self.image.range()]
    }

    pub fn clear(&mut self) {
        (self.copied, self.records, self.end) = (0, 0, 0);
    }

    pub fn records(&self) -> usize {
        self.records
    }

    /// Bytes left for records and their lines in the list.
    pub fn room(&self) -> usize {
        self.image.len() - TRAILER_BYTES - self.records * LISTED_BYTES - self.end
    }

    pub fn fits(&self, length: u16) -> bool {
        record_bytes(length.into()) + LISTED_BYTES <= self.room()
    }

    /// Adds a copy of an object that fits; `fill` gets the room for it and what is behind it, and says whether it is there.
    pub fn add(&mut self, head: Head, fill: impl FnOnce(&mut [u8], &[u8]) -> bool) -> bool {
        debug_assert!(self.fits(head.length));
        let (bytes, from) = (usize::from(head.length), self.copied + HEAD_BYTES);
        if !fill(&mut self.copies[from..from + bytes], &self.image) {
            return false;
        }
        self.copies[self.copied..from].copy_from_slice(&head.pack());
        self.copied = (from + bytes).next_multiple_of(UNIT);
        self.end += record_bytes(bytes);
        self.records += 1;
        true
    }

    /// The copies in order: head, object, and where the record begins in the segment.
    fn each(copies: &[u8], records: usize) -> impl Iterator<Item = (Head, &[u8], usize)> {
        let (mut at, mut within) = (0, 0);
        (0..records).map(move |_| {
            let head = Head::unpack(copies[at..at + HEAD_BYTES].try_into().expect("as long as a head"));
            let from = at + HEAD_BYTES;
            let object = &copies[from..from + usize::from(head.length)];
            let begin = within;
            at = (from + object.len()).next_multiple_of(UNIT);
            within += record_bytes(object.len());
            (head, object, begin)
        })
    }

    /// Makes the image of the segment.
    fn seal(&mut self, backing: &Backing, begun: Begun) -> Result<(), Forked> {
        let end = self.image.len();
        let (image, list) = self.image.split_at_mut(end - TRAILER_BYTES - self.records * LISTED_BYTES);
        let (list, trailer) = list.split_at_mut(self.records * LISTED_BYTES);
        let lines = list.as_chunks_mut::<LISTED_BYTES>().0;
        for ((head, object, within), line) in Self::each(&self.copies, self.records).zip(lines) {
            let place = Place::new(begun.segment, end, within);
            let sealed = Sealed::new(begun.flight, place, head.length, head.codec);
            let record = &mut image[within..within + record_bytes(object.len())];
            let (body, rest) = record.split_at_mut(object.len());
            body.copy_from_slice(object);
            let once = Once { flight: begun.flight, within: within as u32 };
            rest[..TAG_BYTES].copy_from_slice(&backing.key.seal(once, &associated(head.pool, sealed), body)?);
            rest[TAG_BYTES..].fill(0);
            let listed =
                Listed { pool: (head.pool & Listed::POOL_MASK) as u32, index: head.index, within: within as u32 };
            *line = listed.pack();
        }
        // What the last flight left there.
        image[self.end..].fill(0);
        let records = (self.records as u64).to_le_bytes();
        let tag = backing.key.seal(list_once(begun.flight, end), &records, list)?;
        trailer[..TAG_BYTES].copy_from_slice(&tag);
        trailer[TAG_BYTES..TAG_BYTES + 8].copy_from_slice(&records);
        trailer[TAG_BYTES + 8..].fill(0);
        Ok(())
    }
}

/// The list is sealed as what stands at the segment's end, where no record begins.
pub(super) fn list_once(flight: u64, segment_bytes: usize) -> Once {
    Once { flight, within: (segment_bytes - UNIT) as u32 }
}

impl Backing {
    /// Fills one segment with pages that are wanted, cleaning others if free ones are few, and writes it.
    /// Does nothing if two are at it already.
    ///
    /// # Errors
    /// What the medium said; every page is where it was.
    pub(crate) fn fly(&self, store: &Store, worker: &mut Worker, wanted: &Wanted<'_>) -> Result<Flown, MediumError> {
        match self.fly_once(store, worker, wanted) {
            Err(MediumError::NoSpace) if self.health() != Health::Full => self.fly_once(store, worker, wanted),
            flown => flown,
        }
    }

    fn fly_once(&self, store: &Store, worker: &mut Worker, wanted: &Wanted<'_>) -> Result<Flown, MediumError> {
        let busy = Flown { is_busy: true, ..Flown::default() };
        let Some(mut flight) = self.flights.iter().find_map(Mutex::try_lock) else { return Ok(busy) };
        let flight = &mut *flight;
        flight.clear();
        let now_ns = worker.now_ns();
        self.end_spent(now_ns);
        if !self.may_write(now_ns) {
            return Ok(self.stay(store, worker, flight, wanted));
        }
        let mut cleaning = self.cleaning.try_lock();
        let (emptied, is_little) = self.fill(store, worker, flight, wanted, cleaning.as_deref_mut());
        // The last free segments are for cleaning, which gives more back than it takes.
        let spare = if emptied == 0 { self.spares() } else { 0 };
        let begun = match flight.records() {
            0 => None,
            _ if is_little => None,
            _ => self.segments.lock().begin(spare),
        };
        let flown = match begun {
            Some(begun) => self.take_off(store, worker, flight, begun),
            None if flight.records() == 0 => Ok(Flown::default()),
            None if is_little => {
                self.gather_anew();
                Ok(Flown::default())
            }
            // What another is about to clean may leave room.
            None if cleaning.is_none() => {
                self.gather_anew();
                Ok(busy)
            }
            None => {
                let is_full = self.tell_if_full(spare);
                self.gather_anew();
                Ok(if is_full { Flown::default() } else { busy })
            }
        };
        if cleaning.is_some() {
            self.segments.lock().cleaned();
        }
        flown
    }

    /// Fills a flight with what lives in segments that are to be cleaned, which needs `cleaning`, and with what leaves memory. Returns how
    /// many segments are emptied so, and whether all of it is too little to be written.
    fn fill(
        &self,
        store: &Store,
        worker: &mut Worker,
        flight: &mut Flight,
        wanted: &Wanted<'_>,
        cleaning: Option<&mut Cleaning>,
    ) -> (usize, bool) {
        let (mut cleaned, mut unheld) = (Cleaned::default(), Cleaning::default());
        let is_cleaning = cleaning.is_some();
        let cleaning = cleaning.unwrap_or(&mut unheld);
        if cleaning.least_bytes > 0 {
            // Nothing is read as long as there is as little as there was.
            self.gather(store, worker, flight, wanted);
            if flight.end < if wanted.at_leisure { cleaning.least_bytes } else { 1 } {
                return (0, true);
            }
            flight.clear();
            self.gather_anew();
        }
        if is_cleaning {
            self.clean(store, worker, flight, &mut cleaned, Until::SomeAreFree);
        }
        let (mut moved, mut moved_bytes, mut room) = (flight.records(), flight.end, flight.room());
        let mut is_more = self.gather(store, worker, flight, wanted);
        let has_none = flight.end == moved_bytes && moved > 0 && !cleaned.is_full;
        if has_none && !is_more {
            self.clean(store, worker, flight, &mut cleaned, Until::Full);
            moved = flight.records();
            moved_bytes = flight.end;
        } else if has_none && cleaned.emptied <= 1 {
            // What leaves does not fit beside what was moved, and goes alone.
            flight.clear();
            cleaned = Cleaned::default();
            (moved, moved_bytes, room) = (0, 0, flight.room());
            is_more = self.gather(store, worker, flight, wanted);
        }
        let gathered_bytes = flight.end - moved_bytes;
        // One segment for another gains nothing but room in memory.
        let gains = cleaned.emptied > 1 || cleaned.is_full;
        let least_bytes = if wanted.at_leisure { room.div_ceil(2) } else { 1 };
        let is_little = !gains && !is_more && gathered_bytes < least_bytes;
        cleaning.least_bytes = if is_little && moved > 0 { least_bytes } else { 0 };
        (cleaned.emptied, is_little)
    }

    /// Whether there is no room but `spare` segments, nor will be; that is then its health. What becomes free while the segments are locked
    /// says afterwards that there is room again.
    fn tell_if_full(&self, spare: usize) -> bool {
        let segments = self.segments.lock();
        let is_full = !segments.can_begin(spare) && !segments.is_any_written_now();
        if is_full {
            self.set_health(Health::Full);
        }
        is_full
    }

    /// As a flight while nothing more may be written in this day: it is spent if there is something to write.
    fn stay(&self, store: &Store, worker: &mut Worker, flight: &mut Flight, wanted: &Wanted<'_>) -> Flown {
        self.gather(store, worker, flight, wanted);
        if flight.records() > 0 {
            self.note_spent();
            self.gather_anew();
        }
        Flown::default()
    }

    /// Free segments that are left alone by flights that empty none.
    fn spares(&self) -> usize {
        if self.part_segments >= SPARE_TWO_OF { 2 } else { 1 }
    }

    /// Has one free segment take its room before all room is in use, until those do that are spared: the only ones that cleaning then has.
    fn fill_spare(&self) {
        let spare = self.segments.lock().next_to_fill(self.spares());
        // Where there is none, that is found when it is needed.
        let _ = self.fill_one(spare);
    }

    /// Looks whether there is room again where there was none: who cleans all the time gets along without, and would do so for ever. Where that
    /// cannot be asked, the next write tells. Whether there may be some again.
    pub(super) fn look_for_room(&self) -> bool {
        let tried = self.segments.lock().next_to_try();
        let (is_tried, result) = (tried.is_some(), self.fill_one(tried));
        if !is_tried || result == Err(MediumError::NoSpace) {
            return false;
        }
        self.segments.lock().is_short_no_more();
        true
    }

    fn fill_one(&self, segment: Option<Begun>) -> Result<(), MediumError> {
        let Some(begun) = segment else { return Ok(()) };
        let bytes = self.segment_bytes as u64;
        let result = self.medium.fill(u64::from(begun.segment) * bytes, bytes);
        if result == Err(MediumError::NoSpace) {
            self.leave_no_part(begun);
        }
        self.segments.lock().filled(begun, result.is_ok());
        result
    }

    /// A segment that had no room and could not have all of it keeps what it got of it; others are short of that.
    fn leave_no_part(&self, begun: Begun) {
        let bytes = self.segment_bytes as u64;
        if self.segments.lock().has_no_room(begun) {
            self.medium.punch(u64::from(begun.segment) * bytes, bytes);
        }
    }

    /// Where there was no room, it is asked for before anything is written: what is written in vain counts for the day.
    fn ask_for_room(&self, begun: Begun) -> Result<(), MediumError> {
        let bytes = self.segment_bytes as u64;
        if !self.segments.lock().is_try(begun) {
            return Ok(());
        }
        match self.medium.fill(u64::from(begun.segment) * bytes, bytes) {
            Err(MediumError::NoSpace) => Err(MediumError::NoSpace),
            // Where it cannot be asked for, the write tells.
            _ => Ok(()),
        }
    }

    fn take_off(
        &self,
        store: &Store,
        worker: &mut Worker,
        flight: &mut Flight,
        begun: Begun,
    ) -> Result<Flown, MediumError> {
        let (nth, began_ns) = (flight.nth, worker.now_ns());
        self.at_medium(nth, began_ns, || self.fill_spare());
        let offset_bytes = u64::from(begun.segment) * self.segment_bytes as u64;
        let sealed = flight.seal(self, begun).map_err(|Forked| MediumError::Forked);
        let sealed = sealed.and_then(|()| self.at_medium(nth, began_ns, || self.ask_for_room(begun)));
        // Another may have had the last of the day's since this one looked.
        if sealed.is_ok() && !self.take_from_daily(worker.now_ns()) {
            self.segments.lock().give_back(begun);
            self.note_spent();
            self.gather_anew();
            return Ok(Flown::default());
        }
        let began_ns = worker.now_ns();
        let written =
            sealed.and_then(|()| self.at_medium(nth, began_ns, || self.medium.write_at(offset_bytes, &flight.image)));
        if let Err(error) = written {
            self.counts.failed_writes.fetch_add(1, Relaxed);
            if error != MediumError::NoSpace {
                self.segments.lock().failed(begun);
                self.set_health(Health::Failing(error));
            } else {
                self.leave_no_part(begun);
                self.segments.lock().no_room(begun);
                // If this flight did not know, there may be something to clean.
                if begun.was_short {
                    self.set_health(Health::Full);
                }
            }
            self.gather_anew();
            return Err(error);
        }
        self.segments.lock().arrived(begun, flight.end as u32);
        self.counts.segments_written.fetch_add(1, Relaxed);
        self.note_arrived(worker.now_ns());
        Ok(self.settle(store, worker, flight, begun))
    }

    /// Has the slots say where their objects are now, those that hold them still.
    fn settle(&self, store: &Store, worker: &mut Worker, flight: &Flight, begun: Begun) -> Flown {
        let mut flown = Flown::default();
        let mut records = Flight::each(&flight.copies, flight.records).peekable();
        while let Some(serial) = records.peek().map(|(head, ..)| head.pool) {
            let registry = store.registry.lock();
            let pool = registry.pool(serial).cloned();
            // As long as this is held the pool is there, though it may have been taken out of the registry.
            let _settling = pool.as_ref().map(|pool| pool.settling[flight.nth].lock());
            drop(registry);
            while let Some((head, object, within)) = records.next_if(|(head, ..)| head.pool == serial) {
                let place = Place::new(begun.segment, self.segment_bytes, within);
                let sealed = Sealed::new(begun.flight, place, head.length, head.codec);
                let pool = pool.as_deref();
                let freed = pool.and_then(|pool| settle_one(store, pool, worker, head, object, sealed));
                match (freed, head.from) {
                    (Some(freed), From::Memory) => {
                        flown.pages += 1;
                        flown.freed_bytes += freed;
                        let written = &pool.expect("its slot was changed").counters.shard(worker.number).bd_writes;
                        written.fetch_add(1, Relaxed);
                    }
                    (Some(_), From::Record { .. }) => flown.moved += 1,
                    (None, _) => self.free(sealed),
                }
            }
        }
        self.segments.lock().settled(begun);
        self.counts.records_moved.fetch_add(flown.moved as u64, Relaxed);
        flown
    }
}

/// Changes one slot, if it still holds what was copied, and returns what that freed in the arena.
fn settle_one(
    store: &Store,
    pool: &PoolCore,
    worker: &mut Worker,
    head: Head,
    object: &[u8],
    sealed: Sealed,
) -> Option<u64> {
    let guard = pool.tree.lock(&store.tables, head.index, &mut worker.leaf)?;
    let freed = match (guard.get(), head.from) {
        (Slot::Stored(there), From::Memory) => {
            let is_same = there.codec == head.codec && guard.bytes(&there, &store.arena) == Some(object);
            is_same.then(|| store.arena.class_of(there.location).slot_bytes() as u64)?
        }
        (Slot::Grouped(member), From::Memory) => {
            let Worker { opened, codecs, .. } = worker;
            let page = opened.page(store, codecs, &member)?;
            let is_same = match head.codec {
                Some(id) => codecs.is_page(id, object, page, &store.dictionaries),
                None => object == page,
            };
            let group = store.groups.size(member.group, &store.arena).slot_bytes as u64;
            is_same.then_some(group / GROUP_PAGES)?
        }
        (Slot::OnBacking(there), From::Record { place, check }) => {
            (there.place == place && there.check == check).then_some(0)?
        }
        _ => return None,
    };
    let age = guard.age();
    pool.replace_aged(store, guard, Slot::OnBacking(sealed), 0, age);
    Some(freed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::tests::place;
    use crate::reclaim::Leaving;

    #[test]
    fn who_may_not_fly_any_more_is_full_however_much_room_there_is() {
        let (store, backing, pool, mut worker) = place(64 << 10);
        backing.segments.lock().end_after(1);
        let mut page = [0; 4096];
        fastrand::Rng::with_seed(3).fill(&mut page);
        for (index, health) in [(0, Health::Good), (1, Health::Full)] {
            pool.write(&mut worker, PageIndex(index), &page).unwrap();
            let done = store.write_back(&mut worker, &pool, Leaving::Oldest).unwrap();
            assert_eq!((done.pages == 1, done.is_busy, backing.health()), (health == Health::Good, false, health));
        }
    }
}
