//! Which staged pages go back together with one that is touched.
//!
//! Pages that are used lie together more often than not. Whoever goes through memory in order gets what comes next, as far as the window of its stream
//! goes ([`crate::streams`]), sixteen pages at most, of one group. Else, of the block of sixteen that a page is in, those beside it go back with it that are
//! staged, at most as many as were touched there before: the first page of a block goes alone, and where all of a block is used a few faults bring it.
//!
//! What a stream brings is as hot as the page that was asked for: else the hand would take one of them and leave the other, and they would not lie side
//! by side any more. The others keep the heat that they had: nobody asked for them, and in memory that is used here and there most of them are cold.
//!
//! # Source
//! The kernel does so for pages of files (fault-around, `mm/memory.c`); the pages that went back before as the sign are ours.

use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State};
use crate::staging::{Frame, GROUP};
use crate::streams::Window;
use crate::table::{HEAT_MAX, Phase, Word};
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;

/// Pages of a block.
const BLOCK: u64 = 16;

/// Pages that go back by one call, at most: they are copied under the lock, and the process grows by them until their frames are given back.
const AT_ONCE: usize = 16;

/// Brings a page back from staging with those that go with it, if any do; returns how many came that its stream will ask for, itself first. `None`: it did
/// not come, though others may have, and is to be brought by itself.
pub fn bring_back(
    pager: &Pager,
    channel: &Channel,
    state: &mut State,
    page: u64,
    word: Word,
    window: &Window,
) -> Option<u32> {
    let frame = Some(word.payload()).filter(|_| word.phase() == Phase::Staged)?;
    let ahead = ahead_of(page, window, |near| is_staged_beside(state, page, frame, near));
    let is_stream = ahead.end - ahead.start > 1;
    let pages = if is_stream { ahead } else { around(state, page, frame) };
    if pages.end - pages.start == 1 {
        return None;
    }
    let first_frame = state.table.get(pages.start).payload();
    let source = state.staging.address(first_frame) as *const u8;
    let bytes = (pages.end - pages.start) as usize * PAGE;
    // SAFETY: frames of staged pages are present until their group is released, under the lock that the caller holds.
    let (copied, _) = unsafe { channel.uffd.copy(pages.start as usize * PAGE, source, bytes) };
    let came = pages.start..pages.start + (copied / PAGE) as u64;
    state.grown_pages += came.end - came.start;
    for near in came.clone() {
        let heat = if is_stream || near == page { HEAT_MAX } else { state.table.get(near).heat() };
        state.table.update(near, Word::new(Phase::Resident).with_heat(heat));
    }
    if !came.contains(&page) {
        return None;
    }
    if let Some(slot) = pager.slot() {
        slot.counters.refaults_staged.fetch_add(1, Relaxed);
    }
    Some(if is_stream { (came.end - came.start) as u32 } else { 1 })
}

/// Where a page that is staged beside another one is if it is staged beside it, too: in the same group, as far from it as its address.
fn place_beside(page: u64, frame: Frame, near: u64) -> Option<usize> {
    let place = (frame as usize % GROUP) as i64 + (near as i64 - page as i64);
    usize::try_from(place).ok().filter(|&place| place < GROUP)
}

fn is_staged_beside(state: &State, page: u64, frame: Frame, near: u64) -> bool {
    let word = state.table.get(near);
    let beside = place_beside(page, frame, near).map(|place| frame - frame % GROUP as Frame + place as Frame);
    word.phase() == Phase::Staged && beside == Some(word.payload()) && !state.must_stay(near as usize * PAGE)
}

/// A page and what its stream will ask for next, as far as that is staged beside it.
fn ahead_of(page: u64, window: &Window, is_staged: impl Fn(u64) -> bool) -> Range<u64> {
    let most = if window.step.abs() == 1 { (window.pages as usize).min(AT_ONCE) } else { 1 };
    let nth = |ahead: usize| page.wrapping_add_signed(window.step * ahead as i64);
    let more = (1..most).take_while(|&ahead| is_staged(nth(ahead))).count() as u64;
    if window.step < 0 { page - more..page + 1 } else { page..page + more + 1 }
}

/// The page staged in `frame` and those of its block that go back with it.
fn around(state: &State, page: u64, frame: Frame) -> Range<u64> {
    let group = &state.staging.groups[frame as usize / GROUP];
    let was_touched = |near: u64| {
        let was_there = place_beside(page, frame, near)
            .is_some_and(|place| group.present >> place & 1 == 1 && group.pages[place] == near);
        let word = state.table.get(near);
        // What came along without being asked for, or was dropped, is cold.
        was_there && word.phase() == Phase::Resident && word.heat() > 0
    };
    block_of(page, |near| is_staged_beside(state, page, frame, near), was_touched)
}

fn block_of(page: u64, is_staged: impl Fn(u64) -> bool, was_touched: impl Fn(u64) -> bool) -> Range<u64> {
    let start = page / BLOCK * BLOCK;
    let block = start..start + BLOCK;
    let most = block.clone().filter(|&near| near != page && was_touched(near)).count();
    let behind = (page + 1..block.end).take(most).take_while(|&near| is_staged(near)).count();
    let before = (block.start..page).rev().take(most - behind).take_while(|&near| is_staged(near)).count();
    page - before as u64..page + 1 + behind as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_brings_what_it_will_ask_for_upwards_and_downwards() {
        let window = |step, pages| Window { step, pages, hits: 0 };
        let ahead = |step, pages| ahead_of(40, &window(step, pages), |near| (30..50).contains(&near) && near != 44);
        assert_eq!([ahead(1, 1), ahead(1, 3), ahead(1, 64)], [40..41, 40..43, 40..44]);
        assert_eq!([ahead(-1, 1), ahead(-1, 4), ahead(-1, 64)], [40..41, 37..41, 30..41]);
        assert_eq!([ahead(2, 8), ahead(-3, 8)], [40..41, 40..41]);
        let all = |step| ahead_of(40, &window(step, 64), |_| true);
        assert_eq!([all(1), all(-1)], [40..56, 25..41]);
    }

    #[test]
    fn who_lies_beside_is_in_the_same_group_as_far_away_as_its_address() {
        let frame = 3 * GROUP as Frame + 5;
        assert_eq!(
            [100, 104, 95, 158].map(|near| place_beside(100, frame, near)),
            [Some(5), Some(9), Some(0), Some(63)]
        );
        assert_eq!([94, 159].map(|near| place_beside(100, frame, near)), [None, None]);
    }

    #[test]
    fn the_first_page_of_a_block_goes_back_alone_and_others_take_as_many_as_were_touched_before() {
        assert_eq!(block_of(37, |_| true, |_| false), 37..38);
        assert_eq!(block_of(37, |_| true, |near| near == 33), 37..39);
        assert_eq!(block_of(37, |near| near > 37, |near| (32..37).contains(&near)), 37..43);
        assert_eq!(block_of(46, |near| near < 46, |near| near == 32 || near == 47), 44..47);
        assert_eq!(block_of(40, |near| near > 34, |near| (32..35).contains(&near)), 40..44);
        assert_eq!(block_of(45, |near| near > 38, |near| (32..39).contains(&near)), 40..48);
        // Another block's does not count.
        assert_eq!(block_of(37, |_| true, |near| near == 48 || near == 31), 37..38);
    }
}
