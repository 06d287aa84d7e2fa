//! Copies: what has come back from the pool and stays there as well, as long as the page is likely to leave unchanged.
//!
//! Most of what a page costs is compressing it again, and most pages that come back are only read. So a page that waits in
//! the small queue ([`crate::small`]), and will leave before all others, keeps its object. When it leaves, the object is
//! decoded and compared: what is equal is stored already, which takes a third of the time, and what differs little gets a patch
//! ([`Pool::rewrite`]). Nothing is believed: a page that was written to differs.
//!
//! [`Pool::rewrite`]: compcache_store::Pool::rewrite
//!
//! Copies cost what their objects take; there are at most twice as many as the small queue has room for. One is dropped when its page
//! leaves the queue and stays. A comparison in vain costs a third of what one with success saves twice over; where most pages have
//! changed a lot, only one of 32 keeps its copy, to notice when that changes.
//!
//! # Source
//! The kernel's swap cache does this for swap on disks, by write protection, and not for zram, whose slots it frees when it
//! reads. User space learns of a write only by a fault, which costs more than to compare.

use crate::pager::{Pager, State};
use crate::table::Word;
use compcache_store::PageIndex;
use core::ops::Range;

/// How far the score goes either way.
const SCORE_MAX: i32 = 256;
/// What a comparison gains that makes compressing needless, and one in vain loses: see above.
const SPARED: i32 = 2;
const IN_VAIN: i32 = 1;
/// Of so many pages one keeps its copy in any case.
const TRIAL: u32 = 32;

/// Whether copies pay at the moment.
#[derive(Default)]
pub struct Copies {
    score: i32,
    pages: u32,
    kept: u64,
}

impl Copies {
    /// How many there are.
    pub fn kept(&self) -> u64 {
        self.kept
    }

    /// Whether the next page that could keep its copy does; then it is counted. At most `most` do.
    pub fn keep(&mut self, most: u64) -> bool {
        self.pages = self.pages.wrapping_add(1);
        let keep = self.kept < most && (self.score >= 0 || self.pages.is_multiple_of(TRIAL));
        self.kept += u64::from(keep);
        keep
    }

    /// A copy is none any more.
    pub fn dropped(&mut self) {
        debug_assert!(self.kept > 0);
        self.kept = self.kept.saturating_sub(1);
    }

    /// So many pages left that had copies; of them so many were not compressed.
    pub fn compared(&mut self, pages: u32, spared: u32) {
        let gain = spared as i32 * SPARED - (pages - spared) as i32 * IN_VAIN;
        self.score = (self.score + gain).clamp(-SCORE_MAX, SCORE_MAX);
    }
}

/// Drops what the pool has of a page, whether the page is stored or has a copy. Its word must be changed.
pub fn drop_object(pager: &Pager, state: &mut State, page: u64, word: Word) {
    if word.is_in_pool() {
        let _ = pager.pool.discard(PageIndex(page));
    }
    if word.has_copy() {
        state.copies.dropped();
    }
}

/// Drops the copies of pages that are resident and stay.
pub fn drop_copies(pager: &Pager, state: &mut State, pages: Range<u64>) {
    for page in pages {
        let word = state.table.get(page);
        if word.has_copy() {
            drop_object(pager, state, page, word);
            state.table.update(page, word.with_copy(false));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_kept_while_they_pay_and_tried_again_when_they_did_not() {
        let mut copies = Copies::default();
        let kept = |copies: &mut Copies| (0..320).filter(|_| copies.keep(u64::MAX)).count();
        assert_eq!(kept(&mut copies), 320);
        copies.compared(1000, 300);
        assert_eq!(kept(&mut copies), 10);
        (0..6).for_each(|_| copies.compared(100, 80));
        assert_eq!(kept(&mut copies), 320);
    }

    #[test]
    fn no_more_are_kept_than_may_be() {
        let mut copies = Copies::default();
        assert_eq!((0..20).filter(|_| copies.keep(7)).count(), 7);
        copies.dropped();
        assert_eq!((copies.keep(7), copies.keep(7), copies.kept()), (true, false, 7));
    }
}
