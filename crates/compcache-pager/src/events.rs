//! What the program does to its own map, applied to what the pager keeps: munmap, mremap, madvise.

use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State};
use crate::table::{Phase, Word};
use crate::uffd::Message;
use compcache_store::PageIndex;
use core::ops::Range;

/// Applies an event. The caller holds the lock, and has held it since before the event was read.
pub fn apply(pager: &Pager, channel: &Channel, state: &mut State, event: Message) {
    match event {
        Message::Remove { start, end } => {
            forget_contents(pager, state, start..end);
            distrust_present(channel, state, start..end);
        }
        Message::Unmap { start, end } => {
            if !state.moved_away.take(start..end) {
                forget_range(pager, state, start..end);
            }
        }
        Message::Remap { from, to, len } => move_range(pager, state, from, to, len),
        Message::Fault { .. } | Message::Fork { .. } => {}
    }
}

/// A range is mapped no more.
pub fn forget_range(pager: &Pager, state: &mut State, range: Range<usize>) {
    forget_contents(pager, state, range.clone());
    state.regions.remove(range);
    state.generation += 1;
}

/// A range has another address now, with its registration.
///
/// Where it was is unmapped by the same call, which says so in an event of its own, later: by then another thread may have
/// moved something to that place. So that event is remembered, and not obeyed when it comes. Where nothing was unmapped
/// (MREMAP_DONTUNMAP) the place is registered anew when it is next found in the map.
pub fn move_range(pager: &Pager, state: &mut State, from: usize, to: usize, len: usize) {
    forget_contents(pager, state, to..to + len);
    move_words(pager, state, from, to, len);
    state.regions.remove(from..from + len);
    state.regions.add(to..to + len);
    state.moved_away.expect(from..from + len);
    state.generation += 1;
}

/// Ranges that were moved away and whose unmapping has yet to be announced.
pub struct MovedAway {
    ranges: [(usize, usize); EXPECTED],
    len: usize,
}

const EXPECTED: usize = 64;

impl MovedAway {
    fn expect(&mut self, range: Range<usize>) {
        if self.len < EXPECTED {
            self.ranges[self.len] = (range.start, range.end);
            self.len += 1;
        }
    }

    /// Whether this unmapping was expected; it is not any more.
    fn take(&mut self, range: Range<usize>) -> bool {
        let found = self.ranges[..self.len].iter().position(|&expected| expected == (range.start, range.end));
        if let Some(place) = found {
            self.len -= 1;
            self.ranges[place] = self.ranges[self.len];
        }
        found.is_some()
    }

    /// Nothing is pending: the kernel has just allowed a move or a copy.
    pub fn nothing_pending(&mut self) {
        self.len = 0;
    }
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
            // The frame's page has another number now; who is compressing it under the old one will notice.
            Phase::Staged | Phase::Compressing => {
                state.staging.rename(word.payload(), target);
                word.with_phase(Phase::Staged)
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
