//! Which staged pages go back together with one that is touched.
//!
//! Pages that are used lie together more often than not. When a second page of a block of sixteen is touched while they wait in staging, the rest
//! of the block goes back with it, as far as it is staged beside it: one call, where each would have been a fault. One that is touched alone goes
//! back alone: bringing what nobody uses has it leave once more. All of them are as hot as the one: else they would leave one by one the next time, and
//! not lie side by side any more.
//!
//! # Source
//! The kernel does so for pages of files (fault-around, `mm/memory.c`); the second page as the sign is ours.

use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State};
use crate::staging::{Frame, GROUP};
use crate::table::{HEAT_MAX, Phase, Word};
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;

/// Pages of a block.
const BLOCK: u64 = 16;

/// Brings a page back from staging with those that go with it, if any do. False if it did not come.
pub fn bring_back(pager: &Pager, channel: &Channel, state: &mut State, page: u64, word: Word) -> bool {
    let pages = if word.phase() == Phase::Staged { around(state, page, word.payload()) } else { page..page + 1 };
    if pages.end - pages.start == 1 {
        return false;
    }
    let first_frame = state.table.get(pages.start).payload();
    let source = state.staging.address(first_frame) as *const u8;
    let bytes = (pages.end - pages.start) as usize * PAGE;
    // SAFETY: frames of staged pages are present until their group is released, under the lock that the caller holds.
    let (copied, _) = unsafe { channel.uffd.copy(pages.start as usize * PAGE, source, bytes) };
    let came = pages.start..pages.start + (copied / PAGE) as u64;
    state.grown_pages += came.end - came.start;
    for page in came.clone() {
        let heat = (state.table.get(page).heat() + 2).min(HEAT_MAX);
        state.table.update(page, Word::new(Phase::Resident).with_heat(heat));
    }
    if came.contains(&page)
        && let Some(slot) = pager.slot()
    {
        slot.counters.refaults_staged.fetch_add(1, Relaxed);
    }
    came.contains(&page)
}

/// The pages that go back with the one staged in `frame`, itself among them.
fn around(state: &State, page: u64, frame: Frame) -> Range<u64> {
    let group = &state.staging.groups[frame as usize / GROUP];
    let place_of = |page_near: u64| {
        let place = (frame as usize % GROUP) as i64 + (page_near as i64 - page as i64);
        usize::try_from(place).ok().filter(|&place| place < GROUP)
    };
    let is_staged = |near: u64| {
        let word = state.table.get(near);
        let frame_of = place_of(near).map(|place| frame - frame % GROUP as Frame + place as Frame);
        let is_beside = word.phase() == Phase::Staged && frame_of == Some(word.payload());
        is_beside && !state.must_stay(near as usize * PAGE)
    };
    let went_back = |near: u64| {
        let was_there =
            place_of(near).is_some_and(|place| group.present >> place & 1 == 1 && group.pages[place] == near);
        was_there && state.table.get(near).phase() == Phase::Resident
    };
    block_of(page, is_staged, went_back)
}

fn block_of(page: u64, is_staged: impl Fn(u64) -> bool, went_back: impl Fn(u64) -> bool) -> Range<u64> {
    let start = page / BLOCK * BLOCK;
    let block = start..start + BLOCK;
    if !block.clone().any(|near| near != page && went_back(near)) {
        return page..page + 1;
    }
    let first = page - (block.start..page).rev().take_while(|&near| is_staged(near)).count() as u64;
    let last = page + (page + 1..block.end).take_while(|&near| is_staged(near)).count() as u64;
    first..last + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_page_of_a_block_goes_back_alone_and_the_second_takes_what_lies_beside_it() {
        assert_eq!(block_of(37, |_| true, |_| false), 37..38);
        assert_eq!(block_of(37, |near| near != 33, |near| near == 33), 34..48);
        assert_eq!(block_of(37, |near| near != 47 && near != 36, |near| near == 47), 37..47);
        // Another block's does not count.
        assert_eq!(block_of(37, |_| true, |near| near == 48 || near == 31), 37..38);
    }
}
