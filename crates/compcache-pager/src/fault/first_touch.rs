//! What nobody has touched before: zeroes.

use super::{Answer, BATCH, Handler};
use crate::copies;
use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State};
use crate::scan;
use crate::shared::Trouble;
use crate::streams::Window;
use crate::sys::Errno;
use crate::table::{Phase, Word};

impl Handler {
    /// A page that was never there, or whose contents were dropped: zeroes.
    pub(super) fn first_touch(&mut self, pager: &Pager, channel: &Channel, state: &mut State, page: u64) -> Answer {
        if state.staging.owns(page as usize * PAGE) {
            // Somebody read a frame that is not there: zeroes would be compressed in place of a page.
            crate::process::die(pager, Trouble::Bug);
        }
        let (window, _) = self.window_of(page);
        let pages = self.untouched_run(channel, state, page, &window);
        // SAFETY: the zeroes are ours and present.
        let (filled, error) =
            unsafe { channel.uffd.copy(page as usize * PAGE, self.zeroes.as_ptr().cast(), pages * PAGE) };
        state.grown_pages += (filled / PAGE) as u64;
        self.streams.brought((filled / PAGE) as u32);
        (page..page + (filled / PAGE) as u64).for_each(|touched| note_fresh(pager, state, touched));
        match error {
            Some(Errno::EAGAIN) if filled == 0 => {
                self.unanswered = Some((page, window));
                Answer::Again
            }
            Some(errno) if filled == 0 && errno != Errno::EEXIST => self.first_touch_alone(pager, channel, state, page),
            _ => {
                if filled == 0 {
                    channel.uffd.wake(page as usize * PAGE, PAGE);
                }
                Answer::Done
            }
        }
    }

    /// One page of zeroes, by copy: what works in every range.
    fn first_touch_alone(&mut self, pager: &Pager, channel: &Channel, state: &mut State, page: u64) -> Answer {
        // SAFETY: the zeroes are ours and present.
        let (_, error) = unsafe { channel.uffd.copy(page as usize * PAGE, self.zeroes.as_ptr().cast(), PAGE) };
        match error {
            Some(Errno::EAGAIN) => return Answer::Again,
            // What is there is what another was answered with, or somebody else's by now.
            Some(_) => channel.uffd.wake(page as usize * PAGE, PAGE),
            None => {
                state.grown_pages += 1;
                note_fresh(pager, state, page);
            }
        }
        Answer::Done
    }

    /// How many pages from `page` on may be filled with zeroes at once: a forward stream's window, inside one range, as
    /// far as nothing is known of them, nor has the kernel anything there. A guard that libc has put on a stack (MADV_GUARD_INSTALL) would go.
    fn untouched_run(&self, channel: &Channel, state: &State, page: u64, window: &Window) -> usize {
        let Some(region) = state.regions.containing(page as usize * PAGE) else { return 1 };
        if window.step != 1 {
            return 1;
        }
        let end = (region.end / PAGE) as u64;
        let most = (window.pages as u64).min(BATCH as u64).min(end - page);
        let fillable = |page| state.table.get(page) == Word::UNKNOWN && !state.must_stay(page as usize * PAGE);
        let ahead = (1..most).take_while(|ahead| fillable(page + ahead)).count();
        if ahead == 0 {
            return 1;
        }
        let (from, pagemap) = ((page as usize + 1) * PAGE, channel.pagemap());
        let empty = scan::are_there(pagemap, from..from + ahead * PAGE).map_or(0, u64::trailing_zeros);
        ahead.min(empty as usize) + 1
    }
}

/// A page is zeroes now, whatever was known of it.
fn note_fresh(pager: &Pager, state: &mut State, page: u64) {
    let word = state.table.get(page);
    if word != Word::UNKNOWN {
        copies::drop_object(pager, state, page, word);
        state.table.update(page, Word::new(Phase::Resident));
    }
}
