//! What the program does to its own map, applied to what the pager keeps: munmap, mremap, madvise.
//!
//! A thread that changes the map waits, when the change is made, until its event has been read. So the events of one
//! thread come in their order, but not those of several: one thread may have unmapped a range and not yet have told,
//! when another has moved something to the same addresses and has. As long as anybody has something to tell, the kernel
//! refuses every copy and move ([`Channel::is_quiet`]). So moves, and what comes after one, are kept until nothing is
//! missing, and are then applied in the order in which they can have happened ([`first_of`]): what fills a place comes after
//! what emptied it, and what empties it after what filled it.
//!
//! An mremap tells two events: that the range has moved, and then that its old place is unmapped. They are one here.

use crate::copies;
use crate::fork;
use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State};
use crate::regions::Ranges;
use crate::table::{Phase, Word};
use crate::uffd::Message;
use compcache_store::PageIndex;
use core::ops::Range;

/// Events in the order they were read.
#[derive(Clone)]
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
    /// No events.
    pub const fn empty() -> Self {
        EventLog { entries: [Entry { kind: REMOVE, from: 0, to: 0, len: 0 }; N], len: 0 }
    }

    /// Keeps an event. False when there is no room.
    pub fn push(&mut self, event: Message) -> bool {
        let entry = match event {
            Message::Remove { start, end } => Entry { kind: REMOVE, from: start, to: 0, len: end - start },
            Message::Unmap { start, end } => Entry { kind: UNMAP, from: start, to: 0, len: end - start },
            Message::Remap { from, to, len } => Entry { kind: REMAP, from, to, len },
            Message::Fault { .. } | Message::Protected { .. } | Message::Fork { .. } => return true,
        };
        if self.len == N {
            return false;
        }
        self.entries[self.len] = entry;
        self.len += 1;
        true
    }

    fn get(&self, place: usize) -> Message {
        self.entries[place].event()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The events, oldest first, each mremap with the length that moved.
    pub fn moves(&self) -> impl Iterator<Item = Message> + '_ {
        (0..self.len).map(|place| self.event(place))
    }

    /// The events, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Message> + ExactSizeIterator + '_ {
        self.entries[..self.len].iter().map(|entry| entry.event())
    }

    /// The second event of the mremap at `place`, and what it unmaps; `None` when that has left its old place mapped. On some kernels
    /// the first tells the length before it was shortened, and the second what has moved.
    fn own(&self, place: usize) -> Option<(usize, Range<usize>)> {
        let Message::Remap { from, len, .. } = self.get(place) else { return None };
        (place + 1..self.len).find_map(|later| match self.get(later) {
            Message::Unmap { start, end } if start == from && end <= from + len => Some((later, start..end)),
            _ => None,
        })
    }

    /// The event at a place, with the length that moved.
    fn event(&self, place: usize) -> Message {
        match (self.get(place), self.own(place)) {
            (Message::Remap { from, to, .. }, Some((_, moved))) => {
                Message::Remap { from, to, len: moved.end - moved.start }
            }
            (event, _) => event,
        }
    }

    /// Takes one out, and with an mremap the second event of it.
    pub fn take(&mut self, place: usize) -> Option<Message> {
        let event = (place < self.len).then(|| self.event(place))?;
        if let Some((own, _)) = self.own(place) {
            let _ = self.remove(own);
        }
        let _ = self.remove(place);
        Some(event)
    }

    /// The event at a place, if there are so many.
    pub fn nth(&self, place: usize) -> Option<Message> {
        self.entries[..self.len].get(place).map(|entry| entry.event())
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.len = 0;
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
    let may_be_later = || match event {
        Message::Remap { .. } => true,
        // Another thread may have moved a part of what is unmapped, and not yet have told.
        Message::Unmap { .. } => pager.has_many_threads() && !channel.is_quiet(),
        _ => false,
    };
    if state.pending.is_empty() && !may_be_later() {
        take_in_order(pager, channel, state, event);
    } else if !state.pending.push(event) {
        settle_as_told(pager, channel, state);
        let _ = state.pending.push(event);
    }
}

/// Applies the next event, or logs it while a copy of the process is made.
fn take_in_order(pager: &Pager, channel: &Channel, state: &mut State, event: Message) {
    if !fork::is_being_copied(pager) {
        apply(pager, channel, state, event);
    } else if !state.fork_log.push(event) {
        // Before those that are kept it would be applied to what it was not meant for, and they may not be applied now.
        crate::process::die(pager, crate::shared::Trouble::Changes);
    }
}

/// Applies all events that were kept, in the order in which they happened. False, with some still kept, when the map changes
/// meanwhile: then there is more to read.
pub fn settle(pager: &Pager, channel: &Channel, state: &mut State) -> bool {
    // Of one thread all come in their order; and while what is believed of the map stands still, nothing can be told from it.
    if !pager.has_many_threads() || fork::is_being_copied(pager) {
        settle_as_told(pager, channel, state);
    }
    while !state.pending.is_empty() {
        let State { pending, regions, .. } = &*state;
        match first_of(pending, regions, |address| channel.registration(address)) {
            Some(place) => settle_one(pager, channel, state, place),
            // Nothing changes, and yet the kernel says neither the one nor the other: it would say so for ever.
            None if channel.is_quiet() => settle_as_told(pager, channel, state),
            None => return false,
        }
    }
    true
}

/// Applies all events that were kept as they were told.
pub fn settle_as_told(pager: &Pager, channel: &Channel, state: &mut State) {
    while !state.pending.is_empty() {
        settle_one(pager, channel, state, 0);
    }
}

fn settle_one(pager: &Pager, channel: &Channel, state: &mut State, place: usize) {
    let stays = state.pending.own(place).is_none();
    let Some(event) = state.pending.take(place) else { return };
    take_in_order(pager, channel, state, event);
    if let Message::Remap { from, to, len } = event {
        state.doubt = true;
        if pager.has_many_threads() {
            forget_freed(pager, channel, state, to..to + len);
        }
        // Left mapped and registered, and empty (MREMAP_DONTUNMAP).
        if stays && !fork::is_being_copied(pager) && channel.registration(from) == Some(true) {
            state.regions.add(from..from + len);
        }
    }
}

/// Which of the kept events happened first; `None` when the kernel cannot say just now what is `registered`.
fn first_of<const N: usize, const M: usize>(
    kept: &EventLog<N>,
    regions: &Ranges<M>,
    registered: impl Fn(usize) -> Option<bool>,
) -> Option<usize> {
    let mut place = 0;
    for _ in 0..kept.len {
        match came_before(kept, regions, &registered, place)? {
            Some(earlier) => place = earlier,
            None => return Some(place),
        }
    }
    Some(0)
}

/// A kept event that happened before the one at `place`, whenever it was told; `None` when the kernel cannot say.
///
/// What is believed of the map decides if it can. It may lag behind (a range that grew, or was left registered by
/// MREMAP_DONTUNMAP, is not known yet); then what is registered in the end does.
fn came_before<const N: usize, const M: usize>(
    kept: &EventLog<N>,
    regions: &Ranges<M>,
    registered: &impl Fn(usize) -> Option<bool>,
    place: usize,
) -> Option<Option<usize>> {
    let others = |range: Range<usize>, part: fn(&EventLog<N>, usize) -> Option<Range<usize>>| {
        let part_of = move |other| Some((other, common(&part(kept, other)?, &range)?));
        (0..kept.len).filter(move |&other| other != place).filter_map(part_of)
    };
    let is_remap = |other| matches!(kept.get(other), Message::Remap { .. });
    match kept.event(place) {
        Message::Remap { from, to, len } => {
            let target = to..to + len;
            if regions.overlaps(&target) {
                let moved_away = others(target.clone(), freed).find(|&(other, _)| is_remap(other));
                if let Some((earlier, _)) = moved_away.or_else(|| others(target, freed).next()) {
                    return Some(Some(earlier));
                }
            } else if let Some((earlier, freed)) = others(target, freed).find(|&(other, _)| other > place)
                && others(freed.clone(), filled).next().is_none()
                && registered(freed.start)?
            {
                return Some(Some(earlier));
            }
            let source = from..from + len;
            let has_come = regions.overlaps(&source);
            Some(others(source, filled).next().filter(|_| !has_come).map(|(earlier, _)| earlier))
        }
        Message::Unmap { start, end } if freed(kept, place).is_some() && regions.overlaps(&(start..end)) => {
            // After it nothing could have been moved from there.
            let first = others(start..end, freed).find(|(other, from)| {
                let filled_first = || others(from.clone(), filled).any(|(filling, _)| filling != *other);
                is_remap(*other) && regions.overlaps(from) && !filled_first()
            });
            Some(first.map(|(earlier, _)| earlier))
        }
        Message::Unmap { start, end } if freed(kept, place).is_some() => {
            let Some((earlier, filled)) = others(start..end, filled).find(|&(other, _)| other > place) else {
                return Some(None);
            };
            let is_freed_again = others(filled.clone(), freed).any(|(other, _)| other > earlier);
            Some((!is_freed_again && !registered(filled.start)?).then_some(earlier))
        }
        _ => Some(None),
    }
}

/// What was moved to a place that is registered no more has been unmapped since, by an event that was told before.
fn forget_freed(pager: &Pager, channel: &Channel, state: &mut State, target: Range<usize>) {
    let is_gone = |state: &State, at| {
        let page = at..at + PAGE;
        let is_freed_later = (0..state.pending.len)
            .any(|other| freed(&state.pending, other).is_some_and(|freed| common(&freed, &page).is_some()));
        !is_freed_later && channel.registration(at) == Some(false)
    };
    if !is_gone(state, target.start) && !is_gone(state, target.end - PAGE) {
        return;
    }
    let mut at = target.start;
    while at < target.end {
        let start = at;
        while at < target.end && is_gone(state, at) {
            at += PAGE;
        }
        if start < at {
            take_in_order(pager, channel, state, Message::Unmap { start, end: at });
        }
        at += PAGE;
    }
}

/// What the event at `place` leaves empty. An mremap that leaves its old place mapped empties nothing, and the second event of
/// one that does not is no event by itself.
fn freed<const N: usize>(kept: &EventLog<N>, place: usize) -> Option<Range<usize>> {
    match kept.event(place) {
        Message::Unmap { start, end } => {
            let mut untold = 0;
            for earlier in (0..place).map(|earlier| kept.get(earlier)) {
                match earlier {
                    Message::Remap { from, len, .. } if from == start && end <= from + len => untold += 1,
                    Message::Unmap { start: told, .. } if told == start && untold > 0 => untold -= 1,
                    _ => {}
                }
            }
            (untold == 0).then_some(start..end)
        }
        Message::Remap { from, len, .. } => kept.own(place).is_some().then_some(from..from + len),
        _ => None,
    }
}

/// Where the event at `place` brings something.
fn filled<const N: usize>(kept: &EventLog<N>, place: usize) -> Option<Range<usize>> {
    match kept.event(place) {
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
        Message::Fault { .. } | Message::Protected { .. } | Message::Fork { .. } => {}
    }
}

/// A range is mapped no more.
pub fn forget_range(pager: &Pager, state: &mut State, range: Range<usize>) {
    forget_contents(pager, state, range.clone());
    state.let_go(range.clone());
    state.regions.remove(range);
    state.generation += 1;
}

/// A range has another address now, with its registration.
pub fn move_range(pager: &Pager, state: &mut State, from: usize, to: usize, len: usize) {
    forget_contents(pager, state, to..to + len);
    move_words(pager, state, from, to, len);
    state.keep_at(from..from + len, to);
    state.regions.remove(from..from + len);
    state.regions.add(to..to + len);
    state.generation += 1;
    state.moves += 1;
}

/// Drops what is kept of a range: stored copies at once; staged frames become garbage when their group's turn comes.
pub fn forget_contents(pager: &Pager, state: &mut State, range: Range<usize>) {
    for_each_known(state, pages(&range), |state, page, word| {
        copies::drop_object(pager, state, page, word);
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
        match word.phase() {
            _ if word.is_in_pool() => {
                if pager.pool.move_slot(PageIndex(page), PageIndex(target)).is_err() {
                    crate::process::die(pager, crate::shared::Trouble::NoMemory);
                }
            }
            // The frame's page has another number now.
            Phase::Staged | Phase::Compressing => state.staging.rename(word.payload(), target),
            Phase::Resident | Phase::Stored | Phase::Dropped => {}
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const A: usize = 0x10_0000;
    const B: usize = 0x20_0000;
    const C: usize = 0x30_0000;
    const D: usize = 0x40_0000;
    const LEN: usize = 0x1_0000;

    fn unmap_from(start: usize, end: usize) -> Message {
        Message::Unmap { start, end }
    }

    fn unmap(start: usize) -> Message {
        unmap_from(start, start + LEN)
    }

    fn remap(from: usize, to: usize) -> [Message; 2] {
        [Message::Remap { from, to, len: LEN }, unmap(from)]
    }

    /// What each place holds after all that was `told`, named by where it was in the beginning.
    fn outcome(mapped: &[usize], told: &[&[Message]], registered: &[usize]) -> Vec<(usize, usize)> {
        let entry = Entry { kind: REMOVE, from: 0, to: 0, len: 0 };
        let mut kept = EventLog::<16> { entries: [entry; 16], len: 0 };
        assert!(told.iter().flat_map(|events| events.iter()).all(|&event| kept.push(event)));
        let mut regions = Ranges::<16>::empty();
        mapped.iter().for_each(|&start| assert!(regions.add(start..start + LEN)));
        let mut holds: Vec<(usize, usize)> = mapped.iter().map(|&start| (start, start)).collect();
        while !kept.is_empty() {
            let place = first_of(&kept, &regions, |address| Some(registered.contains(&address))).unwrap();
            match kept.take(place).unwrap() {
                Message::Remap { from, to, .. } => {
                    holds.retain(|&(place, _)| place != to);
                    holds.iter_mut().filter(|(place, _)| *place == from).for_each(|held| held.0 = to);
                    regions.remove(from..from + LEN);
                    regions.add(to..to + LEN);
                }
                Message::Unmap { start, end } => {
                    holds.retain(|&(place, _)| place != start);
                    regions.remove(start..end);
                }
                _ => {}
            }
        }
        holds.sort_unstable();
        holds
    }

    #[test]
    fn the_events_of_one_thread_stay_in_their_order() {
        let there_and_back = [&remap(A, B)[..], &remap(B, A), &remap(A, B)];
        assert_eq!(outcome(&[A], &there_and_back, &[B]), [(B, A)]);
        let into_holes = [&remap(A, B)[..], &remap(B, C), &remap(D, B)];
        assert_eq!(outcome(&[A, D], &into_holes, &[C, B]), [(B, D), (C, A)]);
        let over_another = [&remap(C, D)[..], &[unmap(B)], &remap(A, B)];
        assert_eq!(outcome(&[A, B, C], &over_another, &[B, D]), [(B, A), (D, C)]);
    }

    #[test]
    fn a_place_that_stays_mapped_when_it_moves_does_not_come_first() {
        let stays = Message::Remap { from: B, to: C, len: LEN };
        assert_eq!(outcome(&[A], &[&remap(A, B), &[stays]], &[B, C]), [(C, A)]);
    }

    #[test]
    fn who_moved_into_a_hole_came_after_who_made_it() {
        // One thread moved A away, another moved B there, and told first.
        assert_eq!(outcome(&[A, B], &[&remap(B, A), &remap(A, C)], &[A, C]), [(A, B), (C, A)]);
        // And has unmapped it since.
        assert_eq!(outcome(&[A, B], &[&remap(B, A), &[unmap(A)], &remap(A, C)], &[C]), [(C, A)]);
        // The hole was made by an unmapping of more than that.
        let both = Message::Unmap { start: A, end: B + LEN };
        assert_eq!(outcome(&[A, B], &[&[both], &remap(B, C)], &[C]), [(C, B)]);
        // The hole was an unmapping.
        assert_eq!(outcome(&[A, B], &[&remap(B, A), &[unmap(A)]], &[A]), [(A, B)]);
    }

    #[test]
    fn an_mremap_that_shortens_moves_what_is_left() {
        let cut = LEN / 2;
        let told = [Message::Remap { from: A, to: B, len: LEN }, unmap_from(A + cut, A + LEN), unmap_from(A, A + cut)];
        let entry = Entry { kind: REMOVE, from: 0, to: 0, len: 0 };
        let mut kept = EventLog::<4> { entries: [entry; 4], len: 0 };
        assert!(told.into_iter().all(|event| kept.push(event)));
        assert!(matches!(kept.take(0), Some(Message::Remap { from: A, to: B, len }) if len == cut));
        assert!(matches!(kept.take(0), Some(Message::Unmap { start, .. }) if start == A + cut));
        assert!(kept.take(0).is_none());
    }

    #[test]
    fn an_unmapping_of_more_than_moved_is_an_event_by_itself() {
        let stays = Message::Remap { from: A, to: B, len: LEN };
        let entry = Entry { kind: REMOVE, from: 0, to: 0, len: 0 };
        let mut kept = EventLog::<4> { entries: [entry; 4], len: 0 };
        assert!([stays, unmap_from(A, A + 2 * LEN)].into_iter().all(|event| kept.push(event)));
        assert!(kept.own(0).is_none() && kept.take(0).is_some() && !kept.is_empty());
    }

    #[test]
    fn three_threads_that_told_in_the_opposite_order_are_put_right() {
        let told = [&remap(B, C)[..], &remap(A, B), &remap(D, A)];
        assert_eq!(outcome(&[A, B, D], &told, &[A, B, C]), [(A, D), (B, A), (C, B)]);
        let told = [&remap(D, A)[..], &remap(A, B), &remap(B, C)];
        assert_eq!(outcome(&[A, B, D], &told, &[A, B, C]), [(A, D), (B, A), (C, B)]);
    }

    #[test]
    fn an_unmapping_told_before_what_it_unmapped_had_come_waits_for_it() {
        assert_eq!(outcome(&[A, C], &[&remap(C, D), &[unmap(B)], &remap(A, B)], &[D]), [(D, C)]);
    }

    #[test]
    fn nothing_is_decided_while_the_map_changes() {
        let entry = Entry { kind: REMOVE, from: 0, to: 0, len: 0 };
        let mut kept = EventLog::<4> { entries: [entry; 4], len: 0 };
        assert!([remap(A, B)[0], unmap(B)].into_iter().all(|event| kept.push(event)));
        let mut regions = Ranges::<4>::empty();
        regions.add(A..A + LEN);
        assert_eq!(first_of(&kept, &regions, |_| None), None);
        assert_eq!(first_of(&kept, &regions, |_| Some(true)), Some(1));
        assert_eq!(first_of(&kept, &regions, |_| Some(false)), Some(0));
    }
}
