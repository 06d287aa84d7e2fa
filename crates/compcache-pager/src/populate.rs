//! Copies of the process that no handler of ours saw: what was evicted is brought to them when the kernel announces them.
//!
//! A copy runs meanwhile. What it does to its memory is announced on the descriptor that came with it, and until that is read nothing can be brought
//! (EAGAIN). So it is read, and each page goes to where the copy has moved its place, or nowhere if that was given up:
//!
//! | the copy               | what follows                                                          |
//! |------------------------|-----------------------------------------------------------------------|
//! | unmaps, discards       | pages of the range that have not come yet are wanted no more           |
//! | moves                  | they are brought to the new place                                     |
//! | makes a copy of itself | that is brought all that has not come yet, and then the first goes on  |
//!
//! What cannot be brought is an error for whoever touches it (SIGBUS), where the kernel has that (Linux 6.6), and never zeroes for want of a try.

use crate::events::{self, EventLog};
use crate::lock;
use crate::memory::PAGE;
use crate::pager::{Pager, State};
use crate::spill::read_stored;
use crate::sys::Errno;
use crate::table::{PAGES, Phase};
use crate::uffd::{Message, Uffd, decode};
use compcache_store::{Page, Worker};
use linux_raw_sys::general::uffd_msg;

/// Changes that are kept in mind of a copy. One that makes more while pages are brought waits for ever, rather than see zeroes.
const CHANGES_MAX: usize = 256;
/// Copies of copies that are brought pages at the same time. They take so many logs on the handler's stack.
const DEEP_MAX: u32 = 6;
/// How often it is tried, a millisecond apart, to bring a page for which there is no memory, and to hear what a copy does that does something.
const PATIENCE: u32 = 10_000;

/// What a copy has done to its memory.
type Changes = EventLog<CHANGES_MAX>;

impl Changes {
    /// Where what was at `address` is now; `None` when it is nowhere.
    fn place(&self, address: usize) -> Option<usize> {
        let mut at = address;
        for event in self.moves() {
            match event {
                Message::Remap { from, to, len } if (from..from + len).contains(&at) => at = at - from + to,
                Message::Remap { to, len, .. } if (to..to + len).contains(&at) => return None,
                Message::Remove { start, end } | Message::Unmap { start, end } if (start..end).contains(&at) => {
                    return None;
                }
                _ => {}
            }
        }
        Some(at)
    }

    /// Takes note of a change. False when there is no room for it.
    fn note(&mut self, event: Message) -> bool {
        let (Message::Remove { start, end } | Message::Unmap { start, end }) = event else { return self.push(event) };
        // Memory that is given back again and again.
        let since_moved = self.iter().rev().take_while(|event| !matches!(event, Message::Remap { .. }));
        let is_known = since_moved.into_iter().any(|known| match known {
            Message::Remove { start: from, end: to } | Message::Unmap { start: from, end: to } => {
                from <= start && end <= to
            }
            _ => false,
        });
        is_known || self.push(event)
    }
}

/// A copy, and what is known of it.
struct Copied {
    uffd: Uffd,
    changes: Changes,
    state: Told,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    /// All is known that it did.
    All,
    /// It has ended, or runs another program.
    Gone,
    /// It did more than can be kept in mind, or something that is never told.
    TooMuch,
}

/// What reading of a copy's descriptor brought.
enum News {
    Nothing,
    Changes,
    /// A copy of the copy.
    Copy(Uffd),
}

impl Copied {
    fn new(uffd: Uffd, changes: Changes) -> Copied {
        Copied { uffd, changes, state: Told::All }
    }

    /// What was there is lost, and nobody is told that it is zeroes.
    fn fail(&self, place: usize) {
        let _ = self.uffd.poison(place, PAGE);
    }

    /// Reads one thing that it did, or waits a moment for that.
    fn hear(&mut self) -> News {
        // SAFETY: a message is plain data, and zeroes are one.
        let mut message: [uffd_msg; 1] = unsafe { core::mem::zeroed() };
        if self.uffd.read(&mut message) == 0 {
            let _ = self.uffd.wait(1);
            return News::Nothing;
        }
        match decode(&message[0]) {
            Some(Message::Fork { child }) => return News::Copy(Uffd::from_event(child)),
            // Whoever waits for a page is woken when it comes.
            Some(Message::Fault { .. }) | None => {}
            Some(event) if self.changes.note(event) => {}
            Some(_) => self.state = Told::TooMuch,
        }
        News::Changes
    }
}

/// Brings a copy all that was evicted.
pub fn populate(pager: &Pager, state: &mut State, worker: &mut Worker, contents: &mut Page, child: Uffd) {
    bring(pager, state, worker, contents, Copied::new(child, Changes::empty()), 0, 0);
}

/// The same of all pages from one on, and lets go of the copy.
fn bring(
    pager: &Pager,
    state: &mut State,
    worker: &mut Worker,
    contents: &mut Page,
    mut copy: Copied,
    first: u64,
    deep: u32,
) {
    events::for_each_known(state, first..PAGES, |state, page, word| {
        let mut tries = 0;
        while copy.state == Told::All
            && let Some(place) = copy.changes.place(page as usize * PAGE)
        {
            // Anew each time: a copy of the copy was brought others meanwhile.
            let source = match word.phase() {
                Phase::Staged | Phase::Compressing => state.staging.address(word.payload()) as *const u8,
                Phase::Stored if read_stored(pager, worker, page, contents) => contents.as_ptr(),
                Phase::Stored => return copy.fail(place),
                Phase::Resident | Phase::Dropped => return,
            };
            // SAFETY: both kinds of source are memory of ours, and present.
            match unsafe { copy.uffd.copy(place, source, PAGE) }.1 {
                // A page that is there already stays; what has never been ours is nobody's here.
                None | Some(Errno::EEXIST | Errno::ENOENT) => return,
                Some(Errno::EAGAIN) => match copy.hear() {
                    News::Nothing if tries == PATIENCE => copy.state = Told::TooMuch,
                    News::Nothing => tries += 1,
                    News::Changes => tries = 0,
                    News::Copy(uffd) if deep < DEEP_MAX => {
                        let other = Copied::new(uffd, copy.changes.clone());
                        bring(pager, state, worker, contents, other, page, deep + 1);
                    }
                    // It waits for ever for what it has not got, as does one that did too much.
                    News::Copy(_) => {}
                },
                Some(Errno::ESRCH) => copy.state = Told::Gone,
                Some(Errno::ENOMEM) if tries < PATIENCE => {
                    tries += 1;
                    let _ = copy.uffd.wait(1);
                }
                Some(_) => return copy.fail(place),
            }
            lock::pause();
        }
    });
    if copy.state != Told::TooMuch {
        copy.uffd.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(events: &[Message]) -> Changes {
        let mut changes = Changes::empty();
        assert!(events.iter().all(|event| changes.note(*event)));
        changes
    }

    #[test]
    fn a_page_is_brought_to_where_its_place_went() {
        let moved = Message::Remap { from: 0x10_000, to: 0x50_000, len: 0x4000 };
        let after = changes(&[moved, Message::Unmap { start: 0x10_000, end: 0x14_000 }]);
        assert_eq!(after.place(0x11_000), Some(0x51_000));
        assert_eq!(after.place(0x14_000), Some(0x14_000));
        assert_eq!(after.place(0x50_000), None, "something else was moved there");
        let back = Message::Remap { from: 0x50_000, to: 0x90_000, len: 0x2000 };
        let after = changes(&[moved, back]);
        assert_eq!((after.place(0x11_000), after.place(0x12_000)), (Some(0x91_000), Some(0x52_000)));
    }

    #[test]
    fn what_was_given_up_is_brought_nowhere() {
        let after = changes(&[Message::Remove { start: 0x1000, end: 0x3000 }]);
        assert_eq!((after.place(0x2000), after.place(0x3000)), (None, Some(0x3000)));
    }

    #[test]
    fn memory_that_is_given_up_again_and_again_takes_no_more_room() {
        let mut changes = Changes::empty();
        for round in 0..10 * CHANGES_MAX {
            let start = 0x1000 * (round % 3);
            assert!(changes.note(Message::Remove { start, end: start + 0x1000 }));
        }
        // Not so if others may have come to its place.
        for round in 1..=CHANGES_MAX {
            let is_noted = changes.note(Message::Remap { from: 0x9000 * round, to: 0x9000 * (round + 1), len: 0x1000 });
            assert_eq!(is_noted, round <= CHANGES_MAX - 3);
        }
    }
}
