//! Compressing what is staged: by the evictor, and by the handler when the process is above its limit.

use crate::lock::Guard;
use crate::memory::PAGE;
use crate::pager::{Pager, State};
use crate::process;
use crate::staging::{Frame, GROUP};
use crate::table::{Phase, Word};
use alloc::boxed::Box;
use compcache_store::{PageIndex, Worker};

/// Compresses the pages of a group that are still staged, `most` at most. Both threads do this, each with its own worker.
///
/// The lock is released while the codec works: a fault on such a page copies it from its frame, and we notice.
pub fn compress_group<'a>(
    pager: &'a Pager,
    mut state: Guard<'a, Box<State>>,
    worker: &mut Worker,
    group: usize,
    most: usize,
) -> Guard<'a, Box<State>> {
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
    drop(state);
    let mut stored = 0u64;
    for place in (0..GROUP).filter(|place| taken >> place & 1 == 1) {
        // SAFETY: the frame is present and nobody writes to it: it leaves staging only when the group is released below.
        let contents = unsafe { &*(((first as usize + place) * PAGE) as *const compcache_store::Page) };
        // Under the frame's own number: what is stored under the page's changes under the lock only, for the page may
        // be taken away, and another one moved to its place, while the codec works.
        let written = pager.pool.write(worker, PageIndex(first + place as u64), contents);
        stored |= u64::from(written.is_ok()) << place;
    }
    let mut state = pager.state.lock();
    state.under_way -= 1;
    settle_group(pager, &mut state, group, taken, stored);
    state
}

/// What compressing a group came to: pages stored, pages that went another way meanwhile, pages the pool refused.
fn settle_group(pager: &Pager, state: &mut State, group: usize, taken: u64, stored: u64) {
    // As they are called now: a page may have been moved meanwhile.
    let pages = state.staging.groups[group].pages;
    let clock = (state.eviction_clock >> 6) as u32 & 0xff_ffff;
    for place in (0..GROUP).filter(|place| taken >> place & 1 == 1) {
        let (page, frame) = (pages[place], (group * GROUP + place) as Frame);
        let object = PageIndex(process::page_of(state.staging.address(frame)));
        let word = state.table.get(page);
        let ours = word.phase() == Phase::Compressing && word.payload() == frame;
        let stored = stored >> place & 1 == 1;
        if ours && stored && pager.pool.move_slot(object, PageIndex(page)) == Ok(true) {
            state.table.update(page, Word::new(Phase::Stored).with_payload(clock));
        } else {
            if stored {
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
    if still_staged {
        state.staging.staged.push(group);
    } else {
        state.staging.release(group);
    }
}
