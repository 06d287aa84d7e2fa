//! Compressing what is staged: by the evictor, and by the handler when the process is above its limit.
//!
//! In three steps, the lock held in the first and the last: a fault on a page in work copies it from its frame, and that
//! is noticed at the end.

use crate::distance;
use crate::memory::PAGE;
use crate::pager::{Pager, State};
use crate::process;
use crate::staging::{Frame, GROUP};
use crate::table::{Phase, Word};
use compcache_store::{Page, PageIndex, Rewritten, Worker};
use core::sync::atomic::Ordering::Relaxed;

/// Pages of a group that are being compressed.
pub struct Batch {
    group: usize,
    /// The number of the group's first frame, as a page.
    first: u64,
    taken: u64,
    /// Pages with a copy, which of those were compared with it, which had not changed, which little enough for a patch, and which are in the pool
    /// now.
    copies: u64,
    compared: u64,
    unchanged: u64,
    patched: u64,
    stored: u64,
}

impl Batch {
    /// Whether there was something, and the pool took none of it.
    pub fn is_refused(&self) -> bool {
        self.taken != 0 && self.stored == 0
    }
}

/// Takes the pages of a group that are still staged, `most` at most.
pub fn begin(state: &mut State, group: usize, most: usize) -> Batch {
    let present = state.staging.groups[group].present;
    let pages = state.staging.groups[group].pages;
    let mut taken = 0u64;
    for place in (0..GROUP).filter(|place| present >> place & 1 == 1) {
        if taken.count_ones() as usize == most {
            break;
        }
        let (page, frame) = (pages[place], (group * GROUP + place) as Frame);
        let word = state.table.get(page);
        if word.phase() == Phase::Staged && word.payload() == frame {
            state.table.update(page, word.with_phase(Phase::Compressing));
            taken |= 1 << place;
        }
    }
    state.under_way += 1;
    let first = process::page_of(state.staging.address((group * GROUP) as Frame));
    let copies = state.staging.groups[group].copies & taken;
    state.staging.groups[group].copies &= !taken;
    Batch { group, first, taken, copies, compared: 0, unchanged: 0, patched: 0, stored: 0 }
}

/// Compresses them; of those with copies only what has changed, if that is little. The caller does not hold the lock.
pub fn compress(pager: &Pager, worker: &mut Worker, batch: &mut Batch) {
    for place in (0..GROUP).filter(|place| batch.taken >> place & 1 == 1) {
        // SAFETY: the frame is present and nobody writes to it: it leaves staging only when the group is released, in
        // `settle`.
        let contents = unsafe { &*(((batch.first as usize + place) * PAGE) as *const Page) };
        // Under the frame's own number: what is stored under the page's changes under the lock only, for the page may
        // be taken away, and another one moved to its place, while the codec works.
        let object = PageIndex(batch.first + place as u64);
        // A copy that was compressed again, in a group, is no help.
        let is_compared = batch.copies >> place & 1 == 1 && !pager.pool.is_grouped(object);
        let stored = if is_compared {
            batch.compared |= 1 << place;
            let rewritten = pager.pool.rewrite(worker, object, contents);
            batch.unchanged |= u64::from(rewritten == Ok(Rewritten::Unchanged)) << place;
            batch.patched |= u64::from(matches!(rewritten, Ok(Rewritten::Patched { .. }))) << place;
            rewritten.is_ok()
        } else {
            pager.pool.write(worker, object, contents).is_ok()
        };
        batch.stored |= u64::from(stored) << place;
    }
}

/// What compressing came to: pages stored, pages that went another way meanwhile, pages the pool refused.
pub fn settle(pager: &Pager, state: &mut State, batch: &Batch) {
    let &Batch { group, taken, copies, compared, unchanged, patched, stored, .. } = batch;
    state.under_way -= 1;
    state.copies.compared(compared.count_ones(), (unchanged | patched).count_ones());
    if let Some(slot) = pager.slot() {
        slot.counters.unchanged_pages.fetch_add(u64::from(unchanged.count_ones()), Relaxed);
        slot.counters.patched_pages.fetch_add(u64::from(patched.count_ones()), Relaxed);
    }
    // As they are called now: a page may have been moved meanwhile.
    let pages = state.staging.groups[group].pages;
    let clock = distance::tick(state.eviction_clock);
    state.table.pass_to(clock);
    for place in (0..GROUP).filter(|place| taken >> place & 1 == 1) {
        let (page, frame) = (pages[place], (group * GROUP + place) as Frame);
        let object = PageIndex(process::page_of(state.staging.address(frame)));
        let word = state.table.get(page);
        let ours = word.phase() == Phase::Compressing && word.payload() == frame;
        let stored = stored >> place & 1 == 1;
        if ours && stored && pager.pool.move_slot(object, PageIndex(page)) == Ok(true) {
            state.table.update(page, Word::new(Phase::Stored).with_payload(clock));
        } else {
            if stored || copies >> place & 1 == 1 {
                let _ = pager.pool.discard(object);
            }
            if ours {
                state.table.update(page, word.with_phase(Phase::Staged));
            }
        }
    }
    let held = state.staging.groups[group];
    let still_staged = (0..GROUP).any(|place| {
        let word = state.table.get(held.pages[place]);
        held.present >> place & 1 == 1
            && matches!(word.phase(), Phase::Staged)
            && word.payload() == (group * GROUP + place) as Frame
    });
    // Its other pages are the oldest there are; but if the pool takes none, another group's turn comes first.
    if still_staged && stored != 0 {
        state.staging.staged.push_front(group);
    } else if still_staged {
        state.staging.staged.push(group);
    } else {
        release(pager, state, group);
    }
}

/// No page of a group is wanted any more: with its frames, which are garbage now, go the copies of those that went back.
pub fn release(pager: &Pager, state: &mut State, group: usize) {
    let copies = core::mem::take(&mut state.staging.groups[group].copies);
    for place in (0..GROUP).filter(|place| copies >> place & 1 == 1) {
        let frame = (group * GROUP + place) as Frame;
        let _ = pager.pool.discard(PageIndex(process::page_of(state.staging.address(frame))));
    }
    state.staging.release(group);
}
