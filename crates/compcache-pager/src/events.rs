//! What the program does to its own map, applied to what the pager keeps: munmap, mremap, madvise.
//!
//! A thread that changes the map waits, when the change is made, until its event has been read. So the events of one
//! thread come in their order, but not those of several: one thread may have unmapped a range and not yet have told,
//! when another has moved something to the same addresses and has. As long as anybody has something to tell, the kernel
//! refuses every copy and move ([`Channel::is_quiet`]). So moves, and what comes after one, are kept until nothing is
//! missing. Then the map itself shows the order: what frees a range that something was moved to came before the move if
//! the range is registered now, and after it if not ([`settle`]). Who told first plays no part.

use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State};
use crate::table::{Phase, Word};
use crate::uffd::Message;
use compcache_store::PageIndex;
use core::ops::Range;
use core::sync::atomic::Ordering::Acquire;

/// Events in the order they were read.
pub struct EventLog<const N: usize> {
    entries: [Entry; N],
    len: usize,
}

/// A message without an enumeration's tag: zero bytes are one too.
#[derive(Clone, Copy)]
struct Entry {
    kind: u8,
    from: usize,
    to: usize,
    len: usize,
}

const REMOVE: u8 = 0;
const UNMAP: u8 = 1;
const REMAP: u8 = 2;

impl Entry {
    fn event(self) -> Message {
        let Entry { kind, from, to, len } = self;
        match kind {
            REMOVE => Message::Remove { start: from, end: from + len },
            UNMAP => Message::Unmap { start: from, end: from + len },
            _ => Message::Remap { from, to, len },
        }
    }
}

impl<const N: usize> EventLog<N> {
    /// Keeps an event. False when there is no room.
    pub fn push(&mut self, event: Message) -> bool {
        let entry = match event {
            Message::Remove { start, end } => Entry { kind: REMOVE, from: start, to: 0, len: end - start },
            Message::Unmap { start, end } => Entry { kind: UNMAP, from: start, to: 0, len: end - start },
            Message::Remap { from, to, len } => Entry { kind: REMAP, from, to, len },
            Message::Fault { .. } | Message::Fork { .. } => return true,
        };
        if self.len == N {
            return false;
        }
        self.entries[self.len] = entry;
        self.len += 1;
        true
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The events, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Message> + ExactSizeIterator + '_ {
        self.entries[..self.len].iter().map(|entry| entry.event())
    }

    /// Takes one out; those after it move up.
    pub fn remove(&mut self, place: usize) -> Option<Message> {
        let event = self.entries[..self.len].get(place)?.event();
        self.entries.copy_within(place + 1..self.len, place);
        self.len -= 1;
        Some(event)
    }
}

/// Takes in an event that was just read: it is applied, or kept until its order is known.
pub fn take(pager: &Pager, channel: &Channel, state: &mut State, event: Message) {
    let in_order = state.pending.is_empty() && !matches!(event, Message::Remap { .. });
    if in_order {
        take_in_order(pager, channel, state, event);
    } else if !state.pending.push(event) {
        settle(pager, channel, state);
        take_in_order(pager, channel, state, event);
    }
}

/// Applies the next event, or logs it while a copy of the process is made.
fn take_in_order(pager: &Pager, channel: &Channel, state: &mut State, event: Message) {
    if !(pager.frozen.load(Acquire) && state.fork_log.push(event)) {
        apply(pager, channel, state, event);
    }
}

/// Applies all events that were kept, in the order in which they happened. Nothing else is on its way.
pub fn settle(pager: &Pager, channel: &Channel, state: &mut State) {
    while let Some(event) = state.pending.remove(0) {
        if let Some(place) = came_before(channel, state, event)
            && let Some(earlier) = state.pending.remove(place)
        {
            take_in_order(pager, channel, state, earlier);
        }
        take_in_order(pager, channel, state, event);
        if let Message::Remap { to, len, .. } = event {
            // Of a program with one thread the order is never in doubt.
            state.doubt |= pager.has_many_threads();
            forget_freed(pager, channel, state, to..to + len);
        }
    }
}

/// The place of a kept event that happened before `event`, though it was told later.
fn came_before(channel: &Channel, state: &State, event: Message) -> Option<usize> {
    let later = || state.pending.iter().enumerate();
    let frees_place = |place: usize, range: &Range<usize>| {
        later().skip(place).any(|(_, other)| freed(other).is_some_and(|freed| common(&freed, range).is_some()))
    };
    let freeing = target(event).and_then(|target| {
        let freed = |other| freed(other).and_then(|freed| common(&freed, &target));
        later().find_map(|(place, other)| Some((place, freed(other)?)))
    });
    if let Some((place, range)) = freeing
        && channel.is_registered(range.start)
    {
        return Some(place);
    }
    let freed = freed(event)?;
    let filled = |other| target(other).and_then(|target| common(&freed, &target));
    let (place, range) = later().find_map(|(place, other)| Some((place, filled(other)?)))?;
    (channel.is_unregistered(range.start) && !frees_place(place + 1, &range)).then_some(place)
}

/// What was moved to a place that is registered no more has been unmapped since, by an event that was told before.
fn forget_freed(pager: &Pager, channel: &Channel, state: &mut State, target: Range<usize>) {
    if !channel.is_unregistered(target.start) {
        return;
    }
    let is_freed_later = |state: &State, at| {
        let page = at..at + PAGE;
        state.pending.iter().any(|other| freed(other).is_some_and(|freed| common(&freed, &page).is_some()))
    };
    for at in target.step_by(PAGE) {
        if !is_freed_later(state, at) && channel.is_unregistered(at) {
            take_in_order(pager, channel, state, Message::Unmap { start: at, end: at + PAGE });
        }
    }
}

/// Where an event leaves nothing.
fn freed(event: Message) -> Option<Range<usize>> {
    match event {
        Message::Unmap { start, end } => Some(start..end),
        Message::Remap { from, len, .. } => Some(from..from + len),
        Message::Remove { .. } | Message::Fault { .. } | Message::Fork { .. } => None,
    }
}

/// Where an event brings something.
fn target(event: Message) -> Option<Range<usize>> {
    match event {
        Message::Remap { to, len, .. } => Some(to..to + len),
        _ => None,
    }
}

/// What two ranges have in common.
fn common(one: &Range<usize>, other: &Range<usize>) -> Option<Range<usize>> {
    let common = one.start.max(other.start)..one.end.min(other.end);
    (!common.is_empty()).then_some(common)
}

/// Applies an event. The caller holds the lock.
pub fn apply(pager: &Pager, channel: &Channel, state: &mut State, event: Message) {
    match event {
        Message::Remove { start, end } => {
            forget_contents(pager, state, start..end);
            distrust_present(channel, state, start..end);
        }
        Message::Unmap { start, end } => forget_range(pager, state, start..end),
        Message::Remap { from, to, len } => move_range(pager, state, from, to, len),
        Message::Fault { .. } | Message::Fork { .. } => {}
    }
}

/// A range is mapped no more.
pub fn forget_range(pager: &Pager, state: &mut State, range: Range<usize>) {
    forget_contents(pager, state, range.clone());
    state.let_go(range.clone());
    state.regions.remove(range);
    state.generation += 1;
}

/// A range has another address now, with its registration. Where nothing was unmapped (MREMAP_DONTUNMAP) the place is
/// registered anew when it is next found in the map.
pub fn move_range(pager: &Pager, state: &mut State, from: usize, to: usize, len: usize) {
    forget_contents(pager, state, to..to + len);
    move_words(pager, state, from, to, len);
    state.keep_at(from..from + len, to);
    state.regions.remove(from..from + len);
    state.regions.add(to..to + len);
    state.generation += 1;
}

/// Drops what is kept of a range: stored copies at once; staged frames become garbage when their group's turn comes.
pub fn forget_contents(pager: &Pager, state: &mut State, range: Range<usize>) {
    for_each_known(state, pages(&range), |state, page, word| {
        if word.phase() == Phase::Stored {
            let _ = pager.pool.discard(PageIndex(page));
        }
        state.table.update(page, Word::UNKNOWN);
    });
}

/// Pages still present in a range whose contents are about to be dropped may not be evicted until they fault again.
fn distrust_present(channel: &Channel, state: &mut State, range: Range<usize>) {
    let mut at = range.start;
    while at < range.end {
        let State { table, event_scan, now_s, .. } = state;
        let dropped = Word::new(Phase::Dropped).with_payload(*now_s);
        let next = event_scan
            .present_runs(channel.pagemap(), at..range.end, |run| pages(&run).all(|page| table.set(page, dropped)));
        at = next.max(at + PAGE);
    }
}

fn move_words(pager: &Pager, state: &mut State, from: usize, to: usize, len: usize) {
    let shift = (to as i64 - from as i64) / PAGE as i64;
    for_each_known(state, pages(&(from..from + len)), |state, page, word| {
        let target = (page as i64 + shift) as u64;
        let word = match word.phase() {
            Phase::Stored => {
                let _ = pager.pool.move_slot(PageIndex(page), PageIndex(target));
                word
            }
            // The frame's page has another number now.
            Phase::Staged | Phase::Compressing => {
                state.staging.rename(word.payload(), target);
                word
            }
            Phase::Resident | Phase::Dropped => word,
        };
        state.table.update(page, Word::UNKNOWN);
        if !state.table.set(target, word) {
            crate::process::die(pager, crate::shared::Trouble::NoMemory);
        }
    });
}

/// Calls `each` for every page of a range that has a word.
pub fn for_each_known(state: &mut State, range: Range<u64>, mut each: impl FnMut(&mut State, u64, Word)) {
    let mut page = range.start;
    while let Some(known) = state.table.next_known(page, range.end) {
        let word = state.table.get(known);
        if word != Word::UNKNOWN {
            each(state, known, word);
        }
        page = known + 1;
    }
}

fn pages(range: &Range<usize>) -> Range<u64> {
    (range.start / PAGE) as u64..range.end.div_ceil(PAGE) as u64
}
