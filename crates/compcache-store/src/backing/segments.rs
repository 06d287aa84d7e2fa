//! What a backing knows of its segments: which are free, how many of each one's bytes are alive, which to clean.
//!
//! | state   | from                      | to                                            |
//! |---------|---------------------------|-----------------------------------------------|
//! | Free    | the start, a failed write, its last record freed | Writing, when a flight begins; after a failed write last of all |
//! | Writing | a flight that began       | Written, or Free if the write failed          |
//! | Written | a flight that arrived     | Free, with its last live record, or Held      |
//! | Held    | as Free, while a copy of the process may read what is there | Free, when no copy may |
//!
//! A process copied by fork has the table as it was then, and writes to another part of it: see [`super::lineage`]. What its
//! ancestors wrote is read and freed there like its own, and never written to.
//!
//! Sixteen bytes a segment: for segments of a megabyte with 700 pages each, a fortieth of a byte a page. A record is alive
//! from the write on until its slot says something else. A segment with nothing alive is free at once; one that is mostly
//! dead is emptied by moving what lives ([`super::clean`]).
//!
//! Which one is cleaned is that with the largest `(1 - u) * age / (1 + u)`: what is gained by what it costs, times how long the
//! gain is likely to last. `u` is the live share, the age that of its flight. Example: half alive and 100 flights old (33) comes
//! before a fifth alive and 20 old (13).
//!
//! # Source
//! Rosenblum and Ousterhout, "The design and implementation of a log-structured file system" (1992), section 3.5.

use core::cmp::Reverse;
use core::ops::Range;

use super::BackingStats;
use super::buffer::{Table, Zeroable};
use crate::error::StoreError;

/// When a segment is cleaned.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
enum Turn {
    /// When it is the best.
    First,
    /// When there is no other: it could not be emptied, or not be read, but why not may be over.
    Later,
    /// When there is no other at all: it could not be read the last time.
    Unread,
    /// Something in it is damaged, or not where its list says: when something in it has died.
    Never,
}

/// Laid out as declared, so that zeroes are a segment nothing was ever written to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum State {
    Free {
        /// It takes room where the backing lies.
        filled: bool,
        /// The last write to it failed: it is taken when there is no other.
        failed: bool,
    },
    Writing {
        /// As it was when it was free.
        filled: bool,
        failed: bool,
    },
    Written {
        /// The slots have been told where their objects are.
        settled: bool,
        /// It is being cleaned.
        chosen: bool,
        turn: Turn,
    },
    /// Nothing of this process's is alive in it, but a copy of the process may read it.
    Held,
}

const NEVER_WRITTEN: State = State::Free { filled: false, failed: false };

#[derive(Clone, Copy)]
#[repr(C)]
struct Segment {
    flight: u64,
    live_bytes: u32,
    state: State,
}

const _: () = assert!(size_of::<Segment>() == 16);

#[allow(unsafe_code, reason = "says what its layout is")]
// SAFETY: numbers, and a state whose first variant, `Free` with `false` twice, is all zeroes.
unsafe impl Zeroable for Segment {}

/// When more writes than this failed one after the other, and then one did not, it was not for where they went.
const FAILURES_FEW: u32 = 8;
/// Where there is no room, so large a share of the segments keeps its own though it is free: more than is free when cleaning begins.
const KEPT_SHARE: usize = 8;

pub(super) struct Segments {
    table: Table<Segment>,
    segment_bytes: u64,
    /// The part of the table that this process writes to.
    own: Range<usize>,
    /// What was written by this flight or an earlier one may be read by copies of the process.
    held_until: u64,
    /// No segment before these two is free and filled, or free and not filled, but for such as failed; and none from `filled_to` on is free and filled.
    filled_from: usize,
    fresh_from: usize,
    filled_to: usize,
    free: usize,
    /// Of those that are free.
    filled: usize,
    failed: usize,
    filled_and_failed: usize,
    /// Being written, or given their room or without it, at this moment.
    writing: usize,
    /// There was no room where the backing lies: as far as is known, only what is filled can be written to.
    is_short: bool,
    /// As many of those that are free may be written to, whatever else is known.
    room: usize,
    /// Where the next one that failed is looked for.
    failed_from: usize,
    /// Writes that failed since one arrived.
    failures: u32,
    live_bytes: u64,
    flights: u64,
    /// The last one there may be.
    last_flight: u64,
    any_chosen: bool,
}

/// A segment to be written, and the number of the flight that does it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    pub segment: u32,
    pub flight: u64,
    /// Whether it was known then that there is no room for more: what could be cleaned before was.
    pub was_short: bool,
}

impl Segments {
    /// So many segments to write to, and `parts - 1` times as many for copies of the process.
    pub fn new(count: u32, segment_bytes: u64, parts: usize) -> Result<Segments, StoreError> {
        let count = count as usize;
        Ok(Segments {
            table: Table::new(count * parts)?,
            segment_bytes,
            own: 0..count,
            held_until: 0,
            filled_from: count,
            fresh_from: 0,
            filled_to: 0,
            free: count,
            filled: 0,
            failed: 0,
            filled_and_failed: 0,
            writing: 0,
            is_short: false,
            room: usize::MAX,
            failed_from: 0,
            failures: 0,
            live_bytes: 0,
            flights: 0,
            last_flight: u64::MAX,
            any_chosen: false,
        })
    }

    /// Address and length of the table.
    pub fn memory_range(&self) -> (usize, usize) {
        self.table.range()
    }

    /// In a copy of the process: what is written from now on goes to a part of the table, of `count` segments each, in which
    /// nothing is alive, if there is one. Its flights are numbered from `flights` on.
    pub fn begin_part(&mut self, count: usize, flights: u64) {
        let is_dead = |part: &Range<usize>| self.table[part.clone()].iter().all(|segment| segment.live_bytes == 0);
        let parts = (0..self.table.len() / count).map(|part| part * count..(part + 1) * count);
        self.own = parts.clone().find(is_dead).unwrap_or(0..0);
        for segment in &mut self.table[self.own.clone()] {
            // What was never touched takes no memory, and is not to take any now. One may have been given its room and nothing else.
            if segment.flight != 0 || segment.state != NEVER_WRITTEN {
                *segment = Segment { flight: 0, live_bytes: 0, state: NEVER_WRITTEN };
            }
        }
        (self.filled_from, self.fresh_from) = (self.own.end, self.own.start);
        (self.filled_to, self.filled) = (self.own.start, 0);
        (self.failed, self.failed_from, self.failures) = (0, self.own.start, 0);
        (self.filled_and_failed, self.writing, self.is_short) = (0, 0, false);
        (self.free, self.live_bytes, self.held_until) = (self.own.len(), 0, 0);
        (self.flights, self.any_chosen) = (flights, false);
    }

    /// Nothing is written after this flight.
    pub fn end_after(&mut self, last_flight: u64) {
        self.last_flight = last_flight;
    }

    /// Whether that one has begun.
    pub fn is_out_of_flights(&self) -> bool {
        self.flights >= self.last_flight
    }

    /// This process writes nothing.
    pub fn write_nothing(&mut self) {
        (self.own, self.free) = (0..0, 0);
        (self.filled_from, self.fresh_from) = (0, 0);
        (self.filled_to, self.filled) = (0, 0);
        (self.failed, self.filled_and_failed, self.failed_from) = (0, 0, 0);
    }

    /// Whether anything is alive in the part of the table that begins at `from` and has `count` segments.
    pub fn is_part_alive(&self, from: usize, count: usize) -> bool {
        self.table[from..from + count].iter().any(|segment| segment.live_bytes > 0)
    }

    /// The part of the table that is written to.
    pub fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// The number of the last flight.
    pub fn flights(&self) -> u64 {
        self.flights
    }

    /// What was written by this flight or an earlier one stays where it is, whatever of it is alive in this process; what was
    /// held until now and need not be any more becomes free.
    pub fn hold_until(&mut self, flight: u64) {
        let is_shorter = flight < self.held_until;
        self.held_until = flight;
        for segment in self.own.clone().filter(|_| is_shorter) {
            if self.table[segment].state == State::Held {
                self.become_free(segment, true, false);
            }
        }
    }

    /// Those that are free and can be written to, as far as is known.
    pub fn sure(&self) -> usize {
        self.sure_of_all().min(self.room)
    }

    /// As if none shared the room with others.
    fn sure_of_all(&self) -> usize {
        if self.is_short { self.filled_and_sure() } else { self.free - self.failed }
    }

    fn filled_and_sure(&self) -> usize {
        self.filled - self.filled_and_failed
    }

    /// All there are, but for those that cannot be had where there is no room.
    pub fn count(&self) -> usize {
        self.own.len() - if self.is_short { self.free - self.filled } else { 0 }
    }

    /// As many free segments may be written to from now on.
    pub fn set_room(&mut self, segments: usize) {
        self.room = segments;
    }

    /// Whether [`Segments::begin`] finds one. A flight that leaves none alone empties others: it gives back what it takes, so it may have one though
    /// there is no room beside what others have.
    pub fn can_begin(&self, spare: usize) -> bool {
        self.free > spare && (spare == 0 || self.room > spare) && !self.is_out_of_flights()
    }

    /// A free segment, of those that take room already if there is one, else the first; one that failed when there is no other. Leaves
    /// `spare` of them alone, and as many of those that take room as long as there are others.
    pub fn begin(&mut self, spare: usize) -> Option<Begun> {
        if !self.can_begin(spare) {
            return None;
        }
        let found = match self.sure_of_all() > spare {
            true if self.is_short || spare == 0 || self.filled_and_sure() > spare => {
                self.first_filled().or_else(|| self.first_fresh())
            }
            true => self.first_fresh().or_else(|| self.first_filled()),
            // There may be room again.
            false if self.is_short => self.first_fresh().or_else(|| self.next_failed()),
            false => self.next_failed(),
        }?;
        self.flights += 1;
        self.take(found)?;
        (self.table[found].flight, self.table[found].live_bytes) = (self.flights, 0);
        Some(self.begun(found))
    }

    /// The segment as it is now.
    fn begun(&self, segment: usize) -> Begun {
        Begun { segment: segment as u32, flight: self.table[segment].flight, was_short: self.is_short }
    }

    /// A free segment is free no more.
    fn take(&mut self, segment: usize) -> Option<()> {
        let State::Free { filled, failed } = self.table[segment].state else { return None };
        self.free -= 1;
        self.filled -= usize::from(filled);
        self.failed -= usize::from(failed);
        self.filled_and_failed -= usize::from(filled && failed);
        self.writing += 1;
        self.table[segment].state = State::Writing { filled, failed };
        Some(())
    }

    fn first_filled(&mut self) -> Option<usize> {
        let is_filled = |segment: &Segment| segment.state == State::Free { filled: true, failed: false };
        let found = self.table[self.filled_from..self.own.end].iter().position(is_filled);
        self.filled_from = found.map_or(self.own.end, |at| self.filled_from + at);
        found.map(|_| self.filled_from)
    }

    fn first_fresh(&mut self) -> Option<usize> {
        let is_fresh = |segment: &Segment| segment.state == NEVER_WRITTEN;
        let found = self.table[self.fresh_from..self.own.end].iter().position(is_fresh);
        self.fresh_from = found.map_or(self.own.end, |at| self.fresh_from + at);
        found.map(|_| self.fresh_from)
    }

    /// The one after that which failed last, so that each has its turn.
    fn next_failed(&self) -> Option<usize> {
        let is_failed = |at: &usize| matches!(self.table[*at].state, State::Free { failed: true, .. });
        (self.failed_from..self.own.end).find(is_failed).or_else(|| self.own.clone().find(is_failed))
    }

    /// Whether a flight has begun and not arrived.
    pub fn is_any_written_now(&self) -> bool {
        self.writing > 0
    }

    /// The flight has arrived, with so many bytes of records. They are alive, all of them, until freed.
    pub fn arrived(&mut self, begun: Begun, live_bytes: u32) {
        let segment = &mut self.table[begun.segment as usize];
        // There was room for what had none.
        self.is_short &= !matches!(segment.state, State::Writing { filled: false, .. });
        self.writing -= 1;
        segment.live_bytes = live_bytes;
        segment.state = State::Written { settled: false, chosen: false, turn: Turn::First };
        self.live_bytes += u64::from(live_bytes);
        if core::mem::take(&mut self.failures) > FAILURES_FEW {
            self.forgive();
        }
    }

    /// The slots have been told what has arrived: from now on it can be cleaned, if anything is alive in it still.
    pub fn settled(&mut self, begun: Begun) {
        if let Some(State::Written { settled, .. }) = self.state_of(begun) {
            *settled = true;
        }
    }

    /// The medium failed with a write; who knows what is there now. The next ones go elsewhere.
    pub fn failed(&mut self, begun: Begun) {
        self.failures += 1;
        self.failed_from = begun.segment as usize + 1;
        if let State::Writing { filled, .. } = self.table[begun.segment as usize].state {
            self.writing -= 1;
            self.become_free(begun.segment as usize, filled, true);
        }
    }

    /// Nothing was written, for no fault of the place: all is as before.
    pub fn give_back(&mut self, begun: Begun) {
        if let State::Writing { filled, failed } = self.table[begun.segment as usize].state {
            self.writing -= 1;
            self.become_free(begun.segment as usize, filled, failed);
        }
    }

    /// Whether it took no room where the backing lies when this flight began.
    pub fn has_no_room(&self, begun: Begun) -> bool {
        matches!(self.table[begun.segment as usize].state, State::Writing { filled: false, .. })
    }

    /// Nothing of it is there, as there is no room where the backing lies.
    pub fn no_room(&mut self, begun: Begun) {
        self.give_back(begun);
        self.is_short = true;
    }

    /// Whether this flight goes where there was no room.
    pub fn is_try(&self, begun: Begun) -> bool {
        self.is_short && self.has_no_room(begun)
    }

    /// A free segment that is to be given its room, so that there are `spares` for cleaning when there is none for anything else.
    pub fn next_to_fill(&mut self, spares: usize) -> Option<Begun> {
        if self.filled_and_sure() >= spares || self.is_short {
            return None;
        }
        let found = self.first_fresh()?;
        self.take(found)?;
        Some(self.begun(found))
    }

    /// Where there was no room: one to be given its room, which shows whether there is some again.
    pub fn next_to_try(&mut self) -> Option<Begun> {
        let found = if self.is_short { self.first_fresh()? } else { return None };
        self.take(found)?;
        Some(self.begun(found))
    }

    /// It has its room, or there is none.
    pub fn filled(&mut self, begun: Begun, filled: bool) {
        if let State::Writing { failed, .. } = self.table[begun.segment as usize].state {
            self.writing -= 1;
            self.is_short &= !filled;
            self.free_again(begun.segment as usize, filled, failed);
        }
    }

    /// There may be room again; the next write to what has none tells.
    pub fn is_short_no_more(&mut self) {
        self.is_short = false;
    }

    /// It was the medium that failed, not a place on it.
    fn forgive(&mut self) {
        for segment in &mut self.table[self.own.clone()] {
            if let State::Free { failed, .. } = &mut segment.state {
                *failed = false;
            }
        }
        (self.failed, self.filled_and_failed) = (0, 0);
        (self.filled_from, self.fresh_from) = (self.own.start, self.own.start);
    }

    /// A record of so many bytes is dead. Returns whether its segment is free now.
    pub fn free_record(&mut self, segment: u32, bytes: u32) -> bool {
        let Some(found) = self.table.get_mut(segment as usize) else { return false };
        // Only a damaged slot could ask for more than there is.
        let bytes = bytes.min(found.live_bytes);
        found.live_bytes -= bytes;
        let is_dead = found.live_bytes == 0 && matches!(found.state, State::Written { .. });
        // Its slot said so a moment before this: who looked in between has not found all that was alive, and took it for damage.
        if let State::Written { turn: turn @ Turn::Never, .. } = &mut found.state {
            *turn = Turn::Later;
        }
        if !self.own.contains(&(segment as usize)) {
            return false;
        }
        self.live_bytes -= u64::from(bytes);
        if is_dead {
            self.become_free(segment as usize, true, false);
        }
        is_dead && self.table[segment as usize].state != State::Held
    }

    /// Nothing is alive any more in a segment of this process's own part; it is free, unless a copy may read it.
    fn become_free(&mut self, segment: usize, filled: bool, failed: bool) {
        if self.table[segment].flight <= self.held_until {
            self.table[segment].state = State::Held;
        } else {
            self.free_again(segment, filled, failed);
        }
    }

    fn free_again(&mut self, segment: usize, filled: bool, failed: bool) {
        self.table[segment].state = State::Free { filled, failed };
        self.free += 1;
        self.filled += usize::from(filled);
        self.failed += usize::from(failed);
        self.filled_and_failed += usize::from(filled && failed);
        if filled {
            self.filled_from = self.filled_from.min(segment);
            self.filled_to = self.filled_to.max(segment + 1);
        } else {
            self.fresh_from = self.fresh_from.min(segment);
        }
    }

    /// The flight that wrote a segment; `None` if nothing there is alive.
    pub fn flight_of(&self, segment: u32) -> Option<u64> {
        let segment = self.table.get(segment as usize)?;
        matches!(segment.state, State::Written { .. }).then_some(segment.flight)
    }

    /// The state of a segment, as long as it is what that flight wrote.
    fn state_of(&mut self, begun: Begun) -> Option<&mut State> {
        let segment = self.table.get_mut(begun.segment as usize)?;
        (segment.flight == begun.flight).then_some(&mut segment.state)
    }

    /// The bytes alive in a segment; `None` if it is not what that flight wrote any more: it has become free, and may be written
    /// again.
    pub fn live_bytes_of(&self, begun: Begun) -> Option<u64> {
        self.flight_of(begun.segment).filter(|flight| *flight == begun.flight)?;
        Some(self.table[begun.segment as usize].live_bytes.into())
    }

    /// The segment that is best cleaned now, and whose live records should fit into `room` bytes, with an eighth to spare: one that is fuller than eight
    /// ninths gains too little. It is not chosen again before [`Segments::cleaned`].
    pub fn choose(&mut self, room: u64) -> Option<Begun> {
        let whole = self.segment_bytes;
        let fits = |live: u64| live + live / 8 <= room;
        let worth = |segment: &Segment| {
            let live = u64::from(segment.live_bytes);
            // What copies of the process may read stays in use, however little of it is wanted here: nothing is won by emptying it.
            let is_held = segment.flight <= self.held_until;
            // What its slots do not know yet would look as if it could not be moved.
            let State::Written { settled: true, chosen: false, turn } = segment.state else { return None };
            let can = turn != Turn::Never && fits(live) && !is_held;
            can.then(|| (Reverse(turn), (whole - live) * (self.flights - segment.flight + 1) / (whole + live)))
        };
        let own = self.own.clone().zip(&self.table[self.own.clone()]);
        let worths = own.filter_map(|(at, segment)| Some((worth(segment)?, at)));
        let ((Reverse(turn), _), best) = worths.max()?;
        if turn == Turn::Unread {
            self.try_all_again();
        }
        if let State::Written { chosen, .. } = &mut self.table[best].state {
            *chosen = true;
        }
        self.any_chosen = true;
        Some(self.begun(best))
    }

    /// All that is left could not be read: each has its turn again before one has it twice.
    fn try_all_again(&mut self) {
        for segment in &mut self.table[self.own.clone()] {
            if let State::Written { turn: turn @ Turn::Unread, .. } = &mut segment.state {
                *turn = Turn::Later;
            }
        }
    }

    /// Something in a segment cannot be moved: it is not chosen before something in it has died, as long as it is what that flight
    /// wrote. Whether others are worth a try: there may be some that were not tried before.
    pub fn stick(&mut self, begun: Begun) -> bool {
        match self.state_of(begun) {
            Some(State::Written { turn, .. }) => core::mem::replace(turn, Turn::Never) == Turn::First,
            _ => true,
        }
    }

    /// A segment could not be read: it is chosen when there is no other, as long as it is what that flight wrote.
    pub fn put_off(&mut self, begun: Begun) {
        if let Some(State::Written { turn, .. }) = self.state_of(begun) {
            *turn = Turn::Unread;
        }
    }

    /// The flight that cleaned is over. What is left in the segments that were chosen can be chosen again.
    pub fn cleaned(&mut self) {
        if !core::mem::take(&mut self.any_chosen) {
            return;
        }
        for segment in &mut self.table[self.own.clone()] {
            if let State::Written { chosen, .. } = &mut segment.state {
                *chosen = false;
            }
        }
    }

    /// How many free segments keep their room: `least`, and more where there is no other. What is cleaned there, to have some, is not to be
    /// given away.
    pub fn kept(&self, least: usize) -> usize {
        if self.is_short { least.max(self.count() / KEPT_SHARE) } else { least }
    }

    /// A free segment that takes room where the backing lies, beside `kept` of them; it does so no more after this. Keeps the
    /// first ones, so that the end of a file empties. What it has passed over it does not look at again.
    pub fn next_to_punch(&mut self, kept: usize) -> Option<Begun> {
        if self.filled <= kept {
            return None;
        }
        let from = self.own.start;
        let is_filled = |segment: &Segment| matches!(segment.state, State::Free { filled: true, .. });
        let last = from + self.table[from..self.filled_to].iter().rposition(is_filled)?;
        self.take(last)?;
        self.filled_to = last;
        Some(self.begun(last))
    }

    /// It was punched.
    pub fn punched(&mut self, begun: Begun) {
        self.filled(begun, false);
    }

    /// The bytes now; what only the backing knows is left out.
    pub fn stats(&self) -> BackingStats {
        let capacity_bytes = self.own.len() as u64 * self.segment_bytes;
        let free_bytes = self.free as u64 * self.segment_bytes;
        BackingStats {
            capacity_bytes,
            free_bytes,
            live_bytes: self.live_bytes,
            flying_bytes: self.writing as u64 * self.segment_bytes,
            dead_bytes: capacity_bytes - free_bytes - self.live_bytes,
            ..BackingStats::default()
        }
    }
}

#[cfg(test)]
mod tests;
