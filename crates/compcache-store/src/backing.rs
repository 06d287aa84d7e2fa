//! The backing: where pages go that are not to take memory any more, compressed and sealed.
//!
//! Pages are gathered until they fill a segment (a megabyte, or what one chooses), sealed one by one, and written in one piece;
//! only then do their slots say that they are here, and their memory is free. A page is read with one access to the blocks
//! that hold it. What is written again, discarded or taken is dead at once; a segment with nothing alive in it is free, and
//! when free ones become few, mostly dead ones are emptied in the same flights.
//!
//! | part         | does                                                        |
//! |--------------|-------------------------------------------------------------|
//! | [`record`]   | what a segment looks like, and a slot that names a record   |
//! | [`segments`] | which are free, how much of each is alive, which to clean   |
//! | [`key`]      | sealing and opening                                         |
//! | [`gather`]   | which pages leave: raw ones first, then the oldest          |
//! | [`clean`]    | moving what lives out of mostly dead segments               |
//! | [`daily`]    | how much is written in a day, and how much may be           |
//! | [`flight`]   | one segment from memory to the medium, and the slots after it |
//! | [`medium`], [`file`] | what it is written to                               |
//! | [`lineage`]  | copies of the process, by fork                              |
//!
//! # What holds whatever the medium does
//! - **A page has its memory until it has arrived.** A failed write costs nothing but the attempt.
//! - **Nothing but what was written is returned.** Each record is sealed with the number of its flight and its place: a sector
//!   that is damaged, older, or another's, does not open, and the page is [`StoreError::Corrupt`].
//! - **What is read is believed only if the slot still says the same afterwards**, so segments are used again without
//!   waiting for readers.
//! - Bytes are exact: alive, dead and free make the capacity at any moment ([`BackingStats`]).
//!
//! Nothing here has a thread or a clock: [`Store::reclaim`](crate::Store::reclaim) is called by who has them. Flights allocate nothing:
//! their buffers and the table are made with the backing (for segments of a megabyte up to 2.8 MiB a flight, of which
//! about 2.1 are touched, and 16 bytes a segment). A second flight takes memory only where a second thread flies.
//!
//! # Lock order
//! The flight (held while the medium works), cleaning, the plan, the registry of pools (these two not then), the settling of one, slots, the arena's;
//! the segments, the day's writes and the health last: leaves, held for tens of nanoseconds, or a nanosecond a segment when
//! one is chosen.
//!
//! Arithmetic: docs/design/backing.md. Why so: docs/decisions/0022-backing.md.

pub(crate) mod buffer;
mod clean;
mod daily;
mod file;
mod flight;
mod gather;
mod key;
mod lineage;
mod medium;
pub(crate) mod record;
mod segments;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};

pub use daily::DailyWrites;
pub use file::FileMedium;
pub(crate) use flight::{FLIGHTS, Flown};
pub(crate) use gather::Wanted;
pub use medium::{Medium, MediumError};

use crate::error::StoreError;
use crate::lock::Mutex;
use crate::page::PAGE_SIZE;
use crate::reclaim::{ABOVE_PERCENT, GAP_PERCENT};
use buffer::Buffer;
use clean::Cleaning;
use daily::Daily;
use flight::Flight;
use gather::Plan;
use key::{Forked, Key, Once};
use record::{Place, READ_BYTES_MAX, Sealed, TAG_BYTES, record_bytes};
use segments::Segments;

/// What lies between two records is read along with them up to so much, in bytes: less than what it would cost to ask twice.
const NEAR_BYTES: u64 = 16 << 10;
/// Free segments that [`Backing::tidy`] leaves their room, to be written to again.
const FILLED_KEPT: usize = 4;

/// What [`Backing::set_above_percent`] takes.
const ABOVE_PERCENTS: core::ops::RangeInclusive<u8> = GAP_PERCENT..=95;

/// How a backing is set up.
#[derive(Clone, Copy, Debug)]
pub struct BackingConfig {
    /// The most room it takes on its medium, in bytes; at most 512 GiB. Rounded down to whole segments, of which there must be four.
    pub capacity_bytes: u64,
    /// What is written at a time, in bytes: a multiple of 4096 from 64 KiB to 16 MiB. A flight takes three times
    /// as much memory at most, and there are two.
    pub segment_bytes: usize,
}

impl BackingConfig {
    /// Segments are 64 KiB to 16 MiB.
    pub const SEGMENT_BYTES: core::ops::RangeInclusive<usize> = 64 << 10..=16 << 20;
    /// The fewest segments that can be written, cleaned and written again.
    pub const SEGMENTS_LEAST: u64 = 4;
}

impl Default for BackingConfig {
    /// A gigabyte, in segments of a megabyte.
    fn default() -> Self {
        BackingConfig { capacity_bytes: 1 << 30, segment_bytes: 1 << 20 }
    }
}

/// Whether pages can go to a backing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// They can, as far as is known.
    #[default]
    Good,
    /// There is no free segment, and none that is worth cleaning, or no room where it lies. Pages that are there can be read. Ends
    /// when a segment has become free, or with a flight that arrives.
    Full,
    /// The last write failed so. What could not be written is in memory still.
    Failing(MediumError),
    /// What may be written in a day is ([`Backing::set_daily_bytes`]). Pages that are there can be read. Ends as time passes.
    Spent,
}

/// A backing at one moment. `live_bytes + dead_bytes + free_bytes == capacity_bytes`, but for a flight in the air.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackingStats {
    /// The most it takes.
    pub capacity_bytes: u64,
    /// Records that slots refer to.
    pub live_bytes: u64,
    /// Records that nothing refers to any more, the lists of segments, and what is left at their ends.
    pub dead_bytes: u64,
    /// Of these, what is being written at this moment, or given its room or without it.
    pub flying_bytes: u64,
    /// Segments with nothing in them.
    pub free_bytes: u64,
    /// Segments written, and how many records of others were moved into them by cleaning.
    pub segments_written: u64,
    /// As above.
    pub records_moved: u64,
    /// Writes that failed, a segment each.
    pub failed_writes: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Reads that returned something else than was written.
    pub damaged_reads: u64,
    /// Whether pages can go there.
    pub health: Health,
}

#[derive(Default)]
struct Counts {
    segments_written: AtomicU64,
    records_moved: AtomicU64,
    failed_writes: AtomicU64,
    failed_reads: AtomicU64,
    damaged_reads: AtomicU64,
    daily_waits: AtomicU64,
}

/// Who writes a segment for longer has others look elsewhere first.
pub(crate) const SLOW_NS: u64 = 100_000_000;
/// And then it hangs, as far as one can tell: 16 MiB go to a disk of 5 MB/s meanwhile.
pub(crate) const HANGING_NS: u64 = 4_000_000_000;

/// Room outside memory for the pages of one pool, or of several. The pools that are made with it
/// ([`Store::create_pool_on`](crate::Store::create_pool_on)) keep it.
pub struct Backing {
    medium: Box<dyn Medium>,
    key: Key,
    segment_bytes: usize,
    part_segments: usize,
    segments: Mutex<Segments>,
    health: Mutex<Health>,
    daily: Mutex<Daily>,
    counts: Counts,
    plan: Mutex<Plan>,
    above_percent: AtomicU8,
    /// Pages leave for the limit of a pool.
    pub(crate) own_leave: AtomicBool,
    /// Held for a whole flight, by one that cleans.
    cleaning: Mutex<Cleaning>,
    flights: [Mutex<Flight>; FLIGHTS],
    /// Since when each of them waits for the medium to write; 0 if it does not.
    waiting_since_ns: [AtomicU64; FLIGHTS],
}

impl Backing {
    /// A backing on `medium`, nobody else's, whatever is on it.
    ///
    /// # Errors
    /// [`StoreError::BackingRefused`]: a size it cannot have. [`StoreError::KeyRefused`], [`StoreError::MemoryRefused`].
    pub fn new(medium: Box<dyn Medium>, config: BackingConfig) -> Result<Arc<Backing>, StoreError> {
        Backing::with_parts(medium, config, 1, true)
    }

    fn with_parts(
        medium: Box<dyn Medium>,
        config: BackingConfig,
        parts: usize,
        is_key_wiped: bool,
    ) -> Result<Arc<Backing>, StoreError> {
        let BackingConfig { capacity_bytes, segment_bytes } = config;
        let is_segment =
            BackingConfig::SEGMENT_BYTES.contains(&segment_bytes) && segment_bytes.is_multiple_of(PAGE_SIZE);
        let segments = capacity_bytes.checked_div(segment_bytes as u64).unwrap_or(0);
        if !is_segment
            || segments < BackingConfig::SEGMENTS_LEAST
            || capacity_bytes.saturating_mul(parts as u64) > Place::BACKING_BYTES_MAX
        {
            return Err(StoreError::BackingRefused { capacity_bytes, segment_bytes });
        }
        Ok(Arc::new(Backing {
            medium,
            key: Key::new(is_key_wiped)?,
            segment_bytes,
            part_segments: segments as usize,
            segments: Mutex::new(Segments::new(segments as u32, segment_bytes as u64, parts)?),
            health: Mutex::new(Health::Good),
            daily: Mutex::new(Daily::new()),
            counts: Counts::default(),
            plan: Mutex::new(Plan::new()),
            above_percent: AtomicU8::new(ABOVE_PERCENT),
            own_leave: AtomicBool::new(false),
            cleaning: Mutex::new(Cleaning::default()),
            flights: [Mutex::new(Flight::new(0, segment_bytes)?), Mutex::new(Flight::new(1, segment_bytes)?)],
            waiting_since_ns: [const { AtomicU64::new(0) }; FLIGHTS],
        }))
    }

    /// What it holds and how it is.
    pub fn stats(&self) -> BackingStats {
        let bytes = self.segments.lock().stats();
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        BackingStats {
            segments_written: count(&self.counts.segments_written),
            records_moved: count(&self.counts.records_moved),
            failed_writes: count(&self.counts.failed_writes),
            failed_reads: count(&self.counts.failed_reads),
            damaged_reads: count(&self.counts.damaged_reads),
            health: self.health(),
            ..bytes
        }
    }

    /// Address and length of what it writes from, and of its table of segments: for whoever wants that to be there before it is
    /// needed.
    pub fn memory_ranges(&self) -> [(usize, usize); 5] {
        let [[copies, image], [other_copies, other_image]] =
            self.flights.each_ref().map(|flight| flight.lock().memory_ranges());
        [copies, image, other_copies, other_image, self.segments.lock().memory_range()]
    }

    /// Makes the first `bytes` of the medium zeroes, once what is being written has arrived: for the end. What was there can be read no more.
    ///
    /// # Errors
    /// What the medium said.
    pub fn erase_start(&self, bytes: usize) -> Result<(), MediumError> {
        let [mut flight, _other] = self.flights.each_ref().map(Mutex::lock);
        let bytes = bytes.min(self.part_segments * self.segment_bytes);
        flight.image.fill(0);
        for from in (0..bytes).step_by(self.segment_bytes) {
            let length = self.segment_bytes.min(bytes - from).next_multiple_of(PAGE_SIZE);
            self.medium.write_at(from as u64, &flight.image[..length])?;
        }
        Ok(())
    }

    /// Whether pages can go there, as far as is known.
    pub fn health(&self) -> Health {
        *self.health.lock()
    }

    /// Whether a flight has waited for the medium for longer than `longest_ns`. That may end at any moment.
    pub(crate) fn has_waited_for(&self, longest_ns: u64, now_ns: u64) -> bool {
        let since = |since: &AtomicU64| since.load(Relaxed);
        self.waiting_since_ns.iter().map(since).any(|since| since != 0 && now_ns.saturating_sub(since) > longest_ns)
    }

    /// A call of the medium by one of the flights, which began at about `now_ns`: others can see how long it has waited.
    fn at_medium<R>(&self, nth: usize, now_ns: u64, call: impl FnOnce() -> R) -> R {
        let since = &self.waiting_since_ns[nth];
        since.store(now_ns.max(1), Relaxed);
        let done = call();
        since.store(0, Relaxed);
        done
    }

    /// Gives room that nothing is in back to where the backing lies, but for a few segments that are written to soon, as long as
    /// `may_go_on`, which is asked before each. May wait for the medium: call it every few seconds, from a thread that may wait.
    pub fn tidy(&self, may_go_on: impl Fn() -> bool) {
        // While room is short, what is there already is the only room that is sure.
        let may_go_on = || may_go_on() && matches!(self.health(), Health::Good | Health::Spent) && self.key.may_seal();
        if may_go_on() && self.look_for_room() {
            // What there is stays until a write has found more.
            return;
        }
        let (kept, mut any) = (self.segments.lock().kept(FILLED_KEPT), false);
        while may_go_on() {
            let Some(begun) = self.segments.lock().next_to_punch(kept) else { break };
            let bytes = self.segment_bytes as u64;
            self.medium.punch(u64::from(begun.segment) * bytes, bytes);
            self.segments.lock().punched(begun);
            any = true;
        }
        // Only now: who is short keeps more.
        if any {
            self.segments.lock().is_short_no_more();
        }
    }

    /// Of what is free, only so many bytes may be written to from now on; `u64::MAX` is all: where several share what there is. As much
    /// as that is kept for cleaning, or begins it, as if there were no more.
    pub fn set_room_bytes(&self, bytes: u64) {
        let segments = usize::try_from(bytes / self.segment_bytes as u64).unwrap_or(usize::MAX);
        self.segments.lock().set_room(segments);
    }

    /// Above how many hundredths of a limit pages leave for it.
    pub fn above_percent(&self) -> u8 {
        self.above_percent.load(Relaxed)
    }

    /// Changes that, from now on, to 10 to 95.
    pub fn set_above_percent(&self, percent: u8) {
        self.above_percent.store(percent.clamp(*ABOVE_PERCENTS.start(), *ABOVE_PERCENTS.end()), Relaxed);
    }

    /// Until how many hundredths they leave.
    pub(crate) fn until_percent(&self) -> u64 {
        (self.above_percent() - GAP_PERCENT).into()
    }

    fn set_health(&self, health: Health) {
        *self.health.lock() = health;
    }

    /// Nothing refers to a record any more.
    pub(crate) fn free(&self, sealed: Sealed) {
        let (segment, _) = sealed.place.split(self.segment_bytes);
        let bytes = record_bytes(sealed.length.into()) as u32;
        let is_free = {
            let mut segments = self.segments.lock();
            // A damaged slot frees nothing: to leak is better than to free what is another page's.
            segments.flight_of(segment).is_some_and(|flight| sealed.is_of(flight))
                && segments.free_record(segment, bytes)
        };
        if is_free {
            let mut health = self.health.lock();
            if *health == Health::Full {
                *health = Health::Good;
            }
        }
    }

    /// Reads the blocks of what a slot said; waits for the medium, and locks nothing. Whether they are the page's is seen when it
    /// is opened ([`Pool::open_fetched`](crate::Pool::open_fetched)).
    ///
    /// # Errors
    /// What the medium said.
    pub fn fetch(&self, record: Record, fetcher: &mut Fetcher) -> Result<(), MediumError> {
        self.read(record.0, fetcher)?;
        fetcher.holds = Some(record.0);
        Ok(())
    }

    /// Takes a record along, if it lies near enough to those that `batch` has; an empty one takes any.
    pub fn add_to(&self, batch: &mut Batch, record: Record) -> bool {
        let ((segment, _), (blocks, _)) = (record.0.place.split(self.segment_bytes), covering(record.0));
        let joined = match &batch.holds {
            None => blocks,
            Some((of, _)) if *of != segment => return false,
            Some((_, held)) => {
                let is_near = blocks.start <= held.end + NEAR_BYTES && held.start <= blocks.end + NEAR_BYTES;
                let joined = held.start.min(blocks.start)..held.end.max(blocks.end);
                if !is_near || joined.end - joined.start > Batch::BYTES as u64 {
                    return false;
                }
                joined
            }
        };
        batch.holds = Some((segment, joined));
        true
    }

    /// As [`Backing::fetch`], for all records that were added, with one access.
    ///
    /// # Errors
    /// What the medium said; of which record, it does not say.
    pub fn fetch_batch(&self, batch: &mut Batch) -> Result<(), MediumError> {
        let Some((_, blocks)) = &batch.holds else { return Ok(()) };
        let bytes = (blocks.end - blocks.start) as usize;
        batch.touched = batch.touched.max(bytes);
        self.medium.read_at(blocks.start, &mut batch.buffer[..bytes])
    }

    /// Reads the blocks of a record; waits for the medium. Whether they are the record's is seen by [`Backing::open`].
    pub(crate) fn read(&self, sealed: Sealed, fetcher: &mut Fetcher) -> Result<(), MediumError> {
        fetcher.holds = None;
        let (blocks, _) = covering(sealed);
        let bytes = (blocks.end - blocks.start) as usize;
        fetcher.touched = fetcher.touched.max(bytes);
        let into = &mut fetcher.buffer[..bytes];
        self.medium.read_at(blocks.start, into).inspect_err(|_| _ = self.counts.failed_reads.fetch_add(1, Relaxed))
    }

    /// The object of a record that was read; `None` if what was read is not it. The slot is locked, and said so before the
    /// reading and says so now.
    pub(crate) fn open<'f>(&self, sealed: Sealed, pool: u64, fetcher: &'f mut Fetcher) -> Option<&'f [u8]> {
        let (_, at) = covering(sealed);
        let (segment, within) = sealed.place.split(self.segment_bytes);
        let flight = self.segments.lock().flight_of(segment).filter(|flight| sealed.is_of(*flight));
        let length = usize::from(sealed.length);
        let (object, rest) = fetcher.buffer[at..].split_at_mut(length);
        let tag = rest[..TAG_BYTES].try_into().expect("as long as a tag");
        let opened = flight.is_some_and(|flight| {
            let once = Once { flight, within: within as u32 };
            self.key.open(once, &associated(pool, sealed), object, tag)
        });
        if !opened {
            self.counts.damaged_reads.fetch_add(1, Relaxed);
        }
        opened.then_some(&*object)
    }
}

/// The blocks that a record touches, and where in them it begins.
fn covering(sealed: Sealed) -> (core::ops::Range<u64>, usize) {
    let (page, byte) = (PAGE_SIZE as u64, sealed.place.byte());
    let end = (byte + record_bytes(sealed.length.into()) as u64).next_multiple_of(page);
    (byte / page * page..end, (byte % page) as usize)
}

/// What is sealed with an object without being written: whose it is, and how it is to be read. The index is not part of it,
/// since pages move from one to another; the place is, through the nonce.
fn associated(pool: u64, sealed: Sealed) -> [u8; 12] {
    let mut associated = [0; 12];
    associated[..8].copy_from_slice(&pool.to_le_bytes());
    associated[8..].copy_from_slice(&record::reading(sealed.length, sealed.codec).to_le_bytes());
    associated
}

/// What a slot says of a page on a backing, for a thread that reads it ahead of being asked: [`Backing::fetch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record(pub(crate) Sealed);

/// What a thread needs to read pages from a backing, made once: 12 KiB, aligned.
pub struct Fetcher {
    buffer: Buffer,
    /// What [`Backing::fetch`] has read, until it is opened.
    pub(crate) holds: Option<Sealed>,
    /// The most that was ever read into it.
    touched: usize,
}

impl Fetcher {
    /// A buffer for one page at a time.
    ///
    /// # Errors
    /// [`StoreError::MemoryRefused`].
    pub fn new() -> Result<Fetcher, StoreError> {
        Ok(Fetcher { buffer: Buffer::new(READ_BYTES_MAX)?, holds: None, touched: 0 })
    }

    /// Has its memory be there from now on: who reads may be one that memory waits for.
    pub fn prefault(&mut self) {
        self.buffer.fill(0);
        self.touched = READ_BYTES_MAX;
    }

    /// How much of its memory is there: as much as was ever read into it, bytes.
    pub fn touched_bytes(&self) -> usize {
        self.touched
    }

    /// Whether it holds this, read and not opened yet.
    pub fn holds(&self, record: Record) -> bool {
        self.holds == Some(record.0)
    }

    /// Address and length of the buffer. A pager must not evict it.
    pub fn memory_range(&self) -> (usize, usize) {
        self.buffer.range()
    }
}

/// What a thread needs to read records that lie near each other with one access, made once: 64 KiB, aligned.
pub struct Batch {
    buffer: Buffer,
    /// The segment, and the blocks in the backing, of the records that were added.
    holds: Option<(u32, core::ops::Range<u64>)>,
    /// The most that was ever read into it.
    touched: usize,
}

impl Batch {
    /// The most that is read with one access.
    pub const BYTES: usize = 64 << 10;

    /// An empty one.
    ///
    /// # Errors
    /// [`StoreError::MemoryRefused`].
    pub fn new() -> Result<Batch, StoreError> {
        Ok(Batch { buffer: Buffer::new(Batch::BYTES)?, holds: None, touched: 0 })
    }

    /// Has its memory be there from now on: who reads may be one that memory waits for.
    pub fn prefault(&mut self) {
        self.buffer.fill(0);
        self.touched = Batch::BYTES;
    }

    /// Makes it empty.
    pub fn clear(&mut self) {
        self.holds = None;
    }

    /// How much of its memory is there: as much as was ever read into it, bytes.
    pub fn touched_bytes(&self) -> usize {
        self.touched
    }

    /// Gives a fetcher what was read of a record, as if it had fetched it. False if it was not added.
    pub fn hand_to(&self, record: Record, fetcher: &mut Fetcher) -> bool {
        let (blocks, _) = covering(record.0);
        let from = self.holds.as_ref().and_then(|(_, held)| blocks.start.checked_sub(held.start));
        let read = from.and_then(|from| self.buffer.get(from as usize..)?.get(..(blocks.end - blocks.start) as usize));
        fetcher.holds = read.is_some().then_some(record.0);
        if let Some(read) = read {
            fetcher.touched = fetcher.touched.max(read.len());
            fetcher.buffer[..read.len()].copy_from_slice(read);
        }
        read.is_some()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::{PoolConfig, StoreConfig};
    use crate::pool::Pool;
    use crate::store::Store;
    use crate::worker::Worker;

    /// A store with a pool on a backing of 16 MiB.
    pub fn place(segment_bytes: usize) -> (Arc<Store>, Arc<Backing>, Arc<Pool>, Worker) {
        let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
        let medium = FileMedium::new(tempfile::tempfile().unwrap().into());
        let config = BackingConfig { capacity_bytes: 16 << 20, segment_bytes };
        let backing = Backing::new(Box::new(medium), config).unwrap();
        let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
        let worker = Worker::new(&store, || 0).unwrap();
        (store, backing, pool, worker)
    }
}
