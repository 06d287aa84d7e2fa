//! The hand: goes round the registered ranges in order of address and finds pages that may leave.
//!
//! A page it meets that has heat loses one degree and stays; a cold one may go, in runs as long as they come. While the
//! small queue ([`crate::small`]) holds more than its share, that queue's pages go, and the hand has one group of 32: for each
//! it takes, as many pages of the queue become its own. So what nobody uses any more leaves in the end, also under a scan.
//!
//! # Source
//! A clock hand with counts is S3-FIFO's main queue (Yang et al., 2023).

use crate::copies;
use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State, Way};
use crate::process;
use crate::scan::ScanBuffer;
use crate::staging::{FILLED_AT_ONCE, GROUP, Kind, Staging};
use crate::sys::Errno;
use crate::table::{HEAT_MAX, Phase, Word};
use core::ops::Range;

/// How much of the address range is looked at in one scan, bytes: many mappings are mostly holes, which the kernel goes over at once, while a map's writers
/// wait for it.
const SCAN_BYTES: usize = 1 << 30;
const RUNS_MAX: usize = 128;
/// After so many groups, while the small queue is full, one is the hand's.
const SMALL_GROUPS: u32 = 32;
/// As many as a word has bits.
const LOOSE_MAX: usize = 64;
/// Pages that are not cold, or not there, between two that move with one call.
const GAP_PAGES: usize = 8;
/// After this time a page that was announced to be dropped and is still there was not dropped: the kernel may do so at any time until it is
/// written to (MADV_FREE).
const DROPPED_FOR_S: u32 = 10;

/// Where the hand is, and what it has found there.
pub struct Hand {
    scan: ScanBuffer,
    runs: [(usize, usize); RUNS_MAX],
    run: usize,
    run_count: usize,
    /// What is left of the run under the hand, and whether it is from the small queue; then what is left of the hand's own
    /// lies aside.
    rest: Range<usize>,
    is_small: bool,
    aside: Range<usize>,
    /// Groups filled since the hand's last turn.
    groups: u32,
    random: u64,
    /// The map's generation when `runs` was filled.
    generation: u64,
    at: usize,
    /// Most pages to be moved with the next call, and pages to pass over when one alone is refused.
    most: usize,
    odd: usize,
    /// What the frames are to be like that pages move to next, and the first page that did not move to the others.
    kind: Kind,
    refused: Option<usize>,
    before_span: (usize, Range<usize>),
    /// Pages that are not the process's alone: a copy of it may share them, or the kernel may drop them whenever it likes (MADV_FREE), in staging as well.
    loose: [usize; LOOSE_MAX],
    loose_count: usize,
}

impl Hand {
    /// A hand that has found nothing yet.
    pub fn new() -> Hand {
        Hand {
            scan: ScanBuffer::new(false),
            runs: [(0, 0); RUNS_MAX],
            run: 0,
            run_count: 0,
            rest: 0..0,
            is_small: false,
            aside: 0..0,
            groups: 0,
            random: 88_172_645_463_325_252,
            generation: 0,
            at: 0,
            most: GROUP * FILLED_AT_ONCE,
            odd: 0,
            kind: Kind::Data,
            refused: None,
            before_span: (0, 0..0),
            loose: [0; LOOSE_MAX],
            loose_count: 0,
        }
    }

    /// Looks at the pagemap file, as on kernels before 6.7.
    pub fn use_old_scan(&mut self) {
        self.scan = ScanBuffer::new(true);
    }

    /// Forgets what it has found.
    pub fn reset(&mut self) {
        (self.run, self.run_count, self.rest, self.aside, self.is_small) = (0, 0, 0..0, 0..0, false);
    }

    /// Goes back to a page of the run it is in.
    pub fn go_back(&mut self, address: usize) {
        self.rest.start = address;
    }

    /// Goes back to where the last span began.
    pub fn go_back_to_span(&mut self) {
        (self.run, self.rest) = self.before_span.clone();
    }

    /// Pages have moved.
    pub fn moved(&mut self) {
        (self.most, self.odd, self.refused) = (GROUP * FILLED_AT_ONCE, 0, None);
    }

    /// What the pages under the hand are taken for; where there are no frames for code (any more) there is no question.
    pub fn kind(&self, staging: &Staging) -> Kind {
        if staging.has_code() { self.kind } else { Kind::Data }
    }

    /// What begins at `address` did not move, perhaps because it may be executed and the frames may not, or the reverse: it is tried
    /// with the others. False when it was, be it more or less of it: then it is passed over, or tried in pieces.
    pub fn tries_other_kind(&mut self, address: usize) -> bool {
        if self.refused.take() == Some(address) {
            return false;
        }
        self.kind = match self.kind {
            Kind::Data => Kind::Code,
            Kind::Code => Kind::Data,
        };
        self.go_back(address);
        self.refused = Some(address);
        true
    }

    /// Whether [`Hand::take_loose`] has as many pages as there is room for.
    pub fn has_many_loose(&self) -> bool {
        self.loose_count == LOOSE_MAX
    }

    /// The pages that have to be made the process's own, since this was last asked; they are forgotten.
    pub fn take_loose(&mut self) -> &[usize] {
        let count = core::mem::take(&mut self.loose_count);
        &self.loose[..count]
    }

    fn note_loose(&mut self, address: usize) {
        if self.loose_count < LOOSE_MAX {
            self.loose[self.loose_count] = address;
            self.loose_count += 1;
        }
    }

    /// Groups are about to be filled: decides whose turn it is, and how many groups at most.
    pub fn begin(&mut self, pager: &Pager, channel: &Channel, state: &mut State) -> usize {
        // Where a group holds one span only, pages that lie apart are dear.
        let one_span = matches!(channel.way, Way::Remap);
        let full = !one_span && state.small.is_full(state.limit_pages);
        let small = full && self.groups < SMALL_GROUPS;
        if full && !small {
            self.groups = 0;
            leave_to_hand(pager, state);
            self.jump(state);
        }
        if small != core::mem::replace(&mut self.is_small, small) {
            let rest = if small { 0..0 } else { core::mem::take(&mut self.aside) };
            let before = core::mem::replace(&mut self.rest, rest);
            if small {
                self.aside = before;
            } else {
                drop_copies_of(pager, state, before);
            }
        }
        // When it is the hand's turn under a scan, as many pages become its own as it takes.
        if one_span || full && !small { 1 } else { state.staging.filled_at_once(state.limit_pages) }
    }

    /// Whether what is under the hand is from the small queue.
    pub fn is_small(&self) -> bool {
        self.is_small
    }

    /// So many groups have been filled.
    pub fn filled(&mut self, groups: usize) {
        self.groups = self.groups.saturating_add(groups as u32);
    }

    /// Goes on somewhere else. In step with a scan it would take what is needed next.
    fn jump(&mut self, state: &State) {
        let bytes: usize = state.regions.iter().map(|region| region.end - region.start).sum();
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let mut left = self.random as usize % bytes.max(1) / PAGE * PAGE;
        for region in state.regions.iter() {
            let len = region.end - region.start;
            if left < len {
                self.at = region.start + left;
                (self.run, self.run_count, self.aside) = (0, 0, 0..0);
                return;
            }
            left -= len;
        }
    }

    /// Sees to it that there is something in `rest`: what is left of a run, or the next one. False when the hand has been
    /// everywhere. The small queue gives `room` pages at most.
    pub fn next_run(
        &mut self,
        pager: &Pager,
        channel: &Channel,
        state: &mut State,
        room: usize,
        wrapped: &mut u32,
    ) -> bool {
        if self.generation != state.generation {
            self.generation = state.generation;
            if self.is_small {
                drop_copies_of(pager, state, self.rest.clone());
            }
            self.reset();
        }
        if !self.rest.is_empty() {
            return true;
        }
        if self.is_small {
            if state.small.is_full(state.limit_pages) && self.take_small(state, room) {
                return true;
            }
            self.is_small = false;
            self.rest = core::mem::take(&mut self.aside);
            if !self.rest.is_empty() {
                return true;
            }
        }
        while self.run == self.run_count {
            let Some(region) = state.regions.at_or_after(self.at) else {
                *wrapped += 1;
                // Each round takes one degree of heat off: after as many everything is cold that is there.
                if *wrapped > HEAT_MAX + 1 || state.regions.len() == 0 {
                    self.is_small = matches!(channel.way, Way::Move { .. }) && self.take_small(state, room);
                    return self.is_small;
                }
                self.at = 0;
                continue;
            };
            let start = self.at.max(region.start);
            let end = region.end.min(start + SCAN_BYTES);
            let (runs, mut count) = (&mut self.runs, 0);
            self.at = self.scan.present_runs(channel.pagemap(), start..end, |run| {
                runs[count] = (run.start, run.end);
                count += 1;
                count < RUNS_MAX
            });
            (self.run, self.run_count) = (0, count);
        }
        let (start, end) = self.runs[self.run];
        self.run += 1;
        self.rest = start..end;
        true
    }

    /// Puts the oldest run of the small queue under the hand, `most` pages of it, as far as it is still registered.
    fn take_small(&mut self, state: &mut State, most: usize) -> bool {
        while let Some(pages) = state.small.pop(most as u64) {
            let run = pages.start as usize * PAGE..pages.end as usize * PAGE;
            let Some(region) = state.regions.at_or_after(run.start) else { continue };
            let run = run.start.max(region.start)..run.end.min(region.end);
            if run.is_empty() {
                continue;
            }
            self.rest = run;
            return true;
        }
        false
    }

    /// The first cold pages of `rest`, at most `room`, as many as may move with one call; what was hot before and just after them has cooled by one degree.
    /// `rest` is what comes after.
    pub fn cold_part(&mut self, pager: &Pager, state: &mut State, room: usize) -> Range<usize> {
        let most = room.min(self.most);
        let mut at = self.rest.start;
        let mut cold = None;
        while at < self.rest.end {
            let is_cold = if self.is_small {
                let may_leave = is_still_there(state, at) && may_leave(pager, state, at);
                if !may_leave {
                    drop_copies_of(pager, state, at..at + PAGE);
                }
                may_leave
            } else {
                if was_spared(state, at) {
                    self.note_loose(at);
                }
                is_cold(pager, state, at)
            };
            at += PAGE;
            match (&mut cold, is_cold) {
                (None, true) => cold = Some(at - PAGE..at),
                (Some(cold), true) => cold.end = at,
                (None, false) => continue,
                (Some(_), false) => break,
            }
            if cold.as_ref().is_some_and(|cold| (cold.end - cold.start) / PAGE == most) {
                break;
            }
        }
        self.rest.start = at;
        cold.unwrap_or(at..at)
    }

    /// As [`Hand::cold_part`], together with the cold pages that come next and what lies between, if that is little and
    /// may move too.
    pub fn cold_span(&mut self, pager: &Pager, state: &mut State, room: usize) -> Range<usize> {
        let most = room.min(self.most);
        let mut span = self.cold_part(pager, state, most);
        self.before_span = (self.run, span.start..self.rest.end);
        let near = |from: usize, to: usize| (to - from) / PAGE <= GAP_PAGES;
        while !span.is_empty() {
            let before = (self.run, self.rest.clone());
            if self.rest.is_empty() && self.run < self.run_count {
                let (start, end) = self.runs[self.run];
                (self.run, self.rest) = (self.run + 1, start..end);
            }
            let left = most - (span.end - span.start) / PAGE;
            if left > 0 && !self.rest.is_empty() && near(span.end, self.rest.start) {
                let next = self.cold_part(pager, state, left);
                let fits = (next.end - span.start) / PAGE <= most && near(span.end, next.start);
                if !next.is_empty()
                    && fits
                    && (span.end..next.start).step_by(PAGE).all(|at| may_go_along(pager, state, at))
                {
                    span.end = next.end;
                    continue;
                }
            }
            (self.run, self.rest) = before;
            break;
        }
        span
    }

    /// `pages` at `address` will not move: the first is pinned, shared with a copy of the process, or gone; or something
    /// is wrong with all of them, for they lie in several mappings, or in one of another kind (read-only, locked).
    pub fn pass_over(&mut self, address: usize, pages: usize, errno: Errno) {
        if errno == Errno::EBUSY {
            self.note_loose(address);
        }
        let passed_over = match errno {
            Errno::EBUSY | Errno::ENOENT => 1,
            _ if pages > 1 => {
                self.most = pages / 2;
                0
            }
            _ => {
                self.odd = (self.odd * 2).clamp(1, GROUP);
                self.odd
            }
        };
        self.rest.start = (address + passed_over * PAGE).min(self.rest.end);
    }
}

/// Pages of the small queue stay after all.
fn drop_copies_of(pager: &Pager, state: &mut State, addresses: Range<usize>) {
    copies::drop_copies(pager, state, process::page_of(addresses.start)..process::page_of(addresses.end));
}

/// Leaves the oldest pages of the small queue to the hand, a group of them.
fn leave_to_hand(pager: &Pager, state: &mut State) {
    let mut left = 0;
    while left < GROUP as u64
        && let Some(run) = state.small.pop(GROUP as u64 - left)
    {
        left += run.end - run.start;
        copies::drop_copies(pager, state, run);
    }
}

/// Whether a page that was announced to be dropped, and is there, was not: it has been there for long.
fn was_spared(state: &State, address: usize) -> bool {
    let word = state.table.get(process::page_of(address));
    word.phase() == Phase::Dropped && state.now_s.wrapping_sub(word.payload()) & 0xff_ffff > DROPPED_FOR_S
}

/// A page that was spared has been written to, if it can be: the kernel takes it as it likes no more, and it may leave. Else that is tried again after a while.
pub fn note_written(state: &mut State, address: usize, is_written: bool) {
    if was_spared(state, address) {
        let word = match is_written {
            true => Word::new(Phase::Resident),
            false => Word::new(Phase::Dropped).with_payload(state.now_s),
        };
        state.table.update(process::page_of(address), word);
    }
}

/// Whether a page may go now; a hot one cools by one degree.
fn is_cold(pager: &Pager, state: &mut State, address: usize) -> bool {
    let page = process::page_of(address);
    let word = state.table.get(page);
    let may_leave = may_leave(pager, state, address);
    if !may_leave && word.phase() == Phase::Resident && word.heat() > 0 {
        state.table.update(page, word.with_heat(word.heat() - 1));
    }
    may_leave
}

/// Whether a page of the small queue can be there: a run may be out of date, while what the hand finds was seen there.
fn is_still_there(state: &State, address: usize) -> bool {
    state.table.get(process::page_of(address)).phase() == Phase::Resident
}

/// Whether a page may go now.
fn may_leave(pager: &Pager, state: &mut State, address: usize) -> bool {
    let word = state.table.get(process::page_of(address));
    match word.phase() {
        Phase::Resident if word.heat() > 0 => false,
        // A stored copy of a page that is present is old: left over from a fork.
        Phase::Resident | Phase::Stored | Phase::Dropped => may_go_along(pager, state, address),
        Phase::Staged | Phase::Compressing => false,
    }
}

/// Whether a page may leave its place, if it is there.
fn may_go_along(pager: &Pager, state: &mut State, address: usize) -> bool {
    let page = process::page_of(address);
    state.table.get(page).phase() != Phase::Dropped
        && !state.loading.contains(&page)
        && !state.must_stay(address)
        && !pager.is_control_block(state, address)
        // What left, and could not be noted, would be lost.
        && state.table.make_leaf(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_frames_of_neither_kind_take_is_passed_over_however_much_was_tried_of_it() {
        let mut hand = Hand::new();
        hand.rest = PAGE..1000 * PAGE;
        // There are more empty frames of the one kind than of the other.
        let (mut tries, mut at) = (0, PAGE);
        while hand.rest.start == at && tries < 100 {
            let room = if hand.kind == Kind::Data { 4 * GROUP } else { GROUP };
            let pages = room.min(hand.most);
            at = hand.rest.start;
            if !hand.tries_other_kind(at) {
                hand.pass_over(at, pages, Errno::EINVAL);
            }
            tries += 1;
        }
        assert_eq!((hand.rest.start, tries < 20), (2 * PAGE, true), "{tries}");
        // One page more, tried with both, before two are passed over.
        assert!(hand.tries_other_kind(2 * PAGE) && !hand.tries_other_kind(2 * PAGE));
        hand.pass_over(2 * PAGE, 1, Errno::EINVAL);
        assert_eq!(hand.rest.start, 4 * PAGE);
        // What has moved meanwhile was not refused.
        assert!(hand.tries_other_kind(4 * PAGE));
        hand.moved();
        assert!(hand.tries_other_kind(4 * PAGE));
    }
}
