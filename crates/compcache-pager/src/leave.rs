//! Pages leave the process for staging, and frames that hold garbage go back to the system.
//!
//! Both by either way ([`Way`]): UFFDIO_MOVE, or mremap before Linux 6.8. With UFFDIO_MOVE garbage goes to the morgue and is
//! dropped there: that range's descriptor has no events, so that the pager never waits for itself.

use crate::copies;
use crate::events;
use crate::evict::Evictor;
use crate::lock::Guard;
use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State, Way, clock_ns};
use crate::process;
use crate::remap;
use crate::shared::Trouble;
use crate::staging::{BURIED_AT_ONCE, Frame, GROUP, Kind};
use crate::sys::Errno;
use crate::table::{Phase, Word};
use alloc::boxed::Box;
use compcache_store::PageIndex;
use core::ffi::c_void;
use core::ops::Range;
use core::sync::atomic::Ordering::*;

/// How long the lock is held before it is let go at the end of a group: where the calls interrupt nobody, several groups are
/// filled in that time.
const HELD_FOR_NS: u64 = 400_000;

/// How filling a group ended.
pub enum Filled {
    Some,
    Nothing,
    EventPending,
    /// No group is empty of the kind that is needed.
    NoRoom,
}

impl Evictor {
    /// Gives garbage frames back to the system, without the lock. Whether one has gone.
    pub fn bury(&mut self, pager: &Pager, channel: &Channel, mut state: Guard<'_, Box<State>>) -> bool {
        let mut groups = [0; BURIED_AT_ONCE / GROUP];
        let first = self.hand.kind(&state.staging);
        let count = state.staging.take_garbage(&mut groups, first);
        let groups = &groups[..count];
        let mut left = [0u64; BURIED_AT_ONCE / GROUP];
        for (left, &group) in left.iter_mut().zip(groups) {
            *left = state.staging.groups[group].present;
        }
        let places = state.staging.places;
        state.under_way += 1;
        drop(state);
        let (mut buried, mut at) = ([0; 2], 0);
        while let Some(run) = next_run_of_frames(groups, &left, at) {
            let (kind, start) = (Kind::of(run.start), places.address(run.start as Frame));
            let gone = match channel.way {
                Way::Move { quiet } => {
                    let grave = pager.morgue(kind) + buried[kind as usize] * PAGE;
                    channel.move_pages(quiet, grave, start, run.len() * PAGE).0 / PAGE
                }
                Way::Remap => drop_contents(start, run.len()),
            };
            for frame in run.start..run.start + gone {
                if let Ok(place) = groups.binary_search(&(frame / GROUP)) {
                    left[place] &= !(1 << (frame % GROUP));
                }
            }
            buried[kind as usize] += gone;
            // One that will not go does not keep those behind it.
            at = run.start + (gone + 1).min(run.len());
        }
        for kind in [Kind::Data, Kind::Code] {
            if buried[kind as usize] > 0 && matches!(channel.way, Way::Move { .. }) {
                drop_contents(pager.morgue(kind), buried[kind as usize]);
            }
        }
        let buried: usize = buried.iter().sum();
        let mut state = pager.state.lock();
        state.under_way -= 1;
        for (&left, &group) in left.iter().zip(groups) {
            state.staging.given_back(group, left);
        }
        drop_pages(&mut state, buried as u64);
        if buried == 0 {
            // Not even one frame moves: take the estimate back to what a look will say, rather than try for ever.
            state.grown_pages = 0;
            state.resident_pages = state.resident_pages.min(state.limit_pages);
        }
        drop(state);
        pager.tell_progress();
        buried > 0
    }

    /// Moves cold pages into an empty group until it is full, under one hold of the lock: who waits for it leaves a
    /// processor idle, and one that idles need not be interrupted for every move (docs/decisions/0006). Into several groups
    /// when as many neighbours move with one call, or while the small queue has more (docs/decisions/0017).
    pub fn fill_groups(&mut self, pager: &Pager, channel: &Channel, state: &mut State) -> Filled {
        if pager.has_devices() {
            return Filled::Nothing;
        }
        if !pager.is_settled(state) {
            return Filled::EventPending;
        }
        let (most, mut wrapped) = (self.hand.begin(pager, channel, state), 0);
        loop {
            if let Some(filled) = self.fill_groups_of_kind(pager, channel, state, most, &mut wrapped) {
                return filled;
            }
        }
    }

    /// With pages of one kind; `None` when there are none before the first of the other. `wrapped` is how often the hand has been everywhere: what
    /// moves to frames of neither kind is not tried for ever.
    fn fill_groups_of_kind(
        &mut self,
        pager: &Pager,
        channel: &Channel,
        state: &mut State,
        most: usize,
        wrapped: &mut u32,
    ) -> Option<Filled> {
        let kind = self.hand.kind(&state.staging);
        let Some(groups) = state.staging.take_empty(most, kind) else { return Some(Filled::NoRoom) };
        let (mut filled, mut outcome) = (0, Filled::Nothing);
        let (mut wanted, begun_ns) = (groups.len() * GROUP, clock_ns());
        // Pages that are not the process's alone are made so, and moved the next time, before the hand goes on.
        while filled < wanted && !self.hand.has_many_loose() && self.hand.kind(&state.staging) == kind {
            let frame = (groups.start * GROUP + filled) as Frame;
            let room = wanted - filled;
            if !self.hand.next_run(pager, channel, state, room, wrapped) {
                break;
            }
            let piece = match channel.way {
                Way::Move { .. } => self.move_run(pager, channel, state, frame, room),
                Way::Remap => self.remap_span(pager, channel, state, frame, room),
            };
            match piece {
                Some(frames) => filled += frames,
                None => {
                    outcome = Filled::EventPending;
                    break;
                }
            }
            // What the hand itself takes makes room for what is needed now, and no more.
            if !self.hand.is_small() || clock_ns() - begun_ns > HELD_FOR_NS {
                wanted = wanted.min(filled.next_multiple_of(GROUP).max(GROUP));
            }
        }
        let mut staged = 0;
        for group in groups {
            if state.staging.groups[group].present == 0 {
                state.staging.give_empty(group);
            } else {
                state.staging.staged.push(group);
                staged += 1;
            }
        }
        if staged == 0 {
            return (self.hand.kind(&state.staging) == kind).then_some(outcome);
        }
        self.hand.filled(staged);
        pager.exhausted.store(false, Release);
        Some(Filled::Some)
    }

    /// Moves the next cold pages that are neighbours to the frames from `frame` on. Returns how many frames that took;
    /// `None` when an event must be read first.
    fn move_run(
        &mut self,
        pager: &Pager,
        channel: &Channel,
        state: &mut State,
        frame: Frame,
        room: usize,
    ) -> Option<usize> {
        let cold = self.hand.cold_part(pager, state, room);
        if cold.is_empty() {
            return Some(0);
        }
        let pages = (cold.end - cold.start) / PAGE;
        // UFFDIO_MOVE asks for its target alone whether it is registered. A change of the map from here on makes it refuse.
        if state.doubt && pager.has_many_threads() && !channel.is_registered(cold.start) {
            self.hand.go_back(cold.start);
            return forget_unregistered(pager, channel, state, cold).then_some(0);
        }
        let (moved, error) = channel.move_pages(channel.uffd, state.staging.address(frame), cold.start, pages * PAGE);
        let moved = moved / PAGE;
        let stopped_at = cold.start + moved * PAGE;
        note_staged(pager, state, cold.start, frame, moved);
        if moved > 0 {
            self.hand.moved();
        }
        match error {
            None => {}
            // Stopped half-way, for a reason that the next try will name.
            Some(Errno::EAGAIN) => {
                self.hand.go_back(stopped_at);
                return (moved > 0).then_some(moved);
            }
            // Something lies in the frame that nobody has put there: garbage.
            Some(Errno::EEXIST) => {
                let occupied = frame as usize + moved;
                state.staging.groups[occupied / GROUP].present |= 1 << (occupied % GROUP);
                self.hand.go_back(stopped_at);
                return Some(moved + 1);
            }
            Some(Errno::EINVAL)
                if state.staging.has_code()
                    && self.may_be_of_other_kind(stopped_at, frame)
                    && self.hand.tries_other_kind(stopped_at) => {}
            Some(errno) => self.hand.pass_over(stopped_at, pages - moved, errno),
        }
        Some(moved)
    }

    /// Whether a page did not move to a frame because of what that is like. Where that is not known it may be.
    fn may_be_of_other_kind(&self, address: usize, frame: Frame) -> bool {
        self.kind_at(address) != Some(Kind::of(frame as usize))
    }

    /// As [`Evictor::move_run`], with all that lies between cold pages that are near to each other.
    fn remap_span(
        &mut self,
        pager: &Pager,
        channel: &Channel,
        state: &mut State,
        frame: Frame,
        room: usize,
    ) -> Option<usize> {
        let span = self.hand.cold_span(pager, state, room);
        if span.is_empty() {
            return Some(0);
        }
        // The call before this one has let the handler read something.
        if !pager.is_settled(state) || pager.has_devices() || !channel.is_quiet() {
            self.hand.go_back_to_span();
            return None;
        }
        if !channel.is_registered(span.start) {
            self.hand.go_back_to_span();
            return forget_unregistered(pager, channel, state, span).then_some(0);
        }
        let pages = (span.end - span.start) / PAGE;
        match remap::take_out(pager, channel, state, &span, frame) {
            Ok(present) => {
                self.hand.moved();
                let mut from = 0;
                while let Some(run) = next_run_of_bits(present, from) {
                    note_staged(pager, state, span.start + run.start * PAGE, frame + run.start as Frame, run.len());
                    from = run.end;
                }
                Some(pages)
            }
            Err(errno) => {
                self.hand.go_back_to_span();
                self.hand.pass_over(span.start, pages, errno);
                (!state.staging.is_retired(frame as usize / GROUP)).then_some(0)
            }
        }
    }
}

/// Pages from `start` on are in the frames from `frame` on.
fn note_staged(pager: &Pager, state: &mut State, start: usize, frame: Frame, pages: usize) {
    for place in 0..pages {
        let (page, frame) = (process::page_of(start) + place as u64, frame + place as Frame);
        let word = state.table.get(page);
        // One that went along with its neighbours may be hot.
        if !state.table.set(page, Word::new(Phase::Staged).with_heat(word.heat()).with_payload(frame)) {
            process::die(pager, Trouble::NoMemory);
        }
        let place = frame as usize % GROUP;
        let group = &mut state.staging.groups[frame as usize / GROUP];
        group.present |= 1 << place;
        group.pages[place] = page;
        let object = PageIndex(process::page_of(state.staging.address(frame)));
        if word.has_copy() && pager.pool.move_slot(PageIndex(page), object) == Ok(true) {
            state.staging.groups[frame as usize / GROUP].copies |= 1 << place;
            state.copies.dropped();
        } else {
            copies::drop_object(pager, state, page, word);
        }
    }
    state.eviction_clock += pages as u64;
    if let Some(slot) = pager.slot() {
        slot.counters.evicted_pages.fetch_add(pages as u64, Relaxed);
    }
}

/// A range that was taken for one of the regions is not registered: nothing is kept of it. False when that may be so only
/// because the map is changing.
fn forget_unregistered(pager: &Pager, channel: &Channel, state: &mut State, range: Range<usize>) -> bool {
    let unregistered = channel.is_quiet() && !channel.is_registered(range.start) && channel.is_quiet();
    if unregistered {
        events::forget_range(pager, state, range);
    }
    unregistered
}

/// Drops pages of the pager's own ranges, in which nothing is wanted; returns how many went.
pub fn drop_contents(start: usize, pages: usize) -> usize {
    // SAFETY: says the caller's knowledge of what garbage is: these ranges are the pager's alone.
    let dropped = unsafe { rustix::mm::madvise(start as *mut c_void, pages * PAGE, rustix::mm::Advice::LinuxDontNeed) };
    if dropped.is_ok() { pages } else { 0 }
}

/// The first run of set bits of `bits` at or after `from`.
fn next_run_of_bits(bits: u64, from: usize) -> Option<Range<usize>> {
    let rest = bits.checked_shr(from as u32).filter(|&rest| rest != 0)?;
    let start = from + rest.trailing_zeros() as usize;
    Some(start..start + (bits >> start).trailing_ones() as usize)
}

/// The first run of neighbouring frames at or after `from` that have their bit set: `bits` go with `groups`, which ascend.
fn next_run_of_frames(groups: &[usize], bits: &[u64], from: usize) -> Option<Range<usize>> {
    let mut found: Option<Range<usize>> = None;
    for (&group, &bits) in groups.iter().zip(bits) {
        let first = group * GROUP;
        let mut at = from.saturating_sub(first);
        while at < GROUP
            && let Some(run) = next_run_of_bits(bits, at)
        {
            let run = first + run.start..first + run.end;
            at = run.end - first;
            match &mut found {
                None => found = Some(run),
                Some(found) if found.end == run.start => found.end = run.end,
                Some(_) => return found,
            }
        }
    }
    found
}

fn drop_pages(state: &mut State, pages: u64) {
    let from_grown = pages.min(state.grown_pages);
    state.grown_pages -= from_grown;
    state.resident_pages -= (pages - from_grown).min(state.resident_pages);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(groups: &[usize], bits: &[u64]) -> Vec<Range<usize>> {
        let (mut at, mut runs) = (0, Vec::new());
        while let Some(run) = next_run_of_frames(groups, bits, at) {
            at = run.end;
            runs.push(run);
        }
        runs
    }

    #[test]
    fn frames_of_neighbouring_groups_are_one_run() {
        assert_eq!(runs(&[1, 2, 4], &[u64::MAX, u64::MAX, u64::MAX]), [64..192, 256..320]);
        assert_eq!(runs(&[0, 1], &[1 << 63 | 0b110, 0b1011]), [1..3, 63..66, 67..68]);
        assert_eq!(runs(&[3], &[0]), []);
    }

    #[test]
    fn every_frame_is_in_one_run() {
        // The last four frames of a group and the first four of the next, in all ways.
        for mask in 0..256u64 {
            let bits = [mask << 60, mask >> 4];
            let wanted = (0..8).filter(|place| mask >> place & 1 == 1).map(|place| 5 * GROUP + 60 + place);
            assert!(runs(&[5, 6], &bits).into_iter().flatten().eq(wanted), "{mask:b}");
        }
    }
}
