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
//! What cannot be read is an error for whoever touches it (SIGBUS), where the kernel has that (Linux 6.6). A copy that cannot be followed is left to wait for
//! what it has not got, as long as this process lives; its descriptor goes with that.

use crate::events::{self, EventLog};
use crate::lock;
use crate::maps::{self, MapsBuffer};
use crate::memory::PAGE;
use crate::pager::{Pager, STACK_BYTES, State};
use crate::process;
use crate::spill::read_stored;
use crate::sys::Errno;
use crate::table::{PAGES, Phase};
use crate::uffd::{Message, Uffd, decode};
use compcache_store::{Page, Worker};
use core::sync::atomic::Ordering::Relaxed;
use linux_raw_sys::general::uffd_msg;
use rustix::fd::AsFd;

/// Changes that are kept in mind of a copy.
const CHANGES_MAX: usize = 256;
/// Copies of copies that are brought pages at the same time, each with a log on the handler's stack.
const DEEP_MAX: u32 = 4;
const _: () = assert!((DEEP_MAX as usize + 1) * 2 * size_of::<Copied>() + size_of::<MapsBuffer>() < STACK_BYTES / 2);
/// How often in a row it is tried in vain to bring a page: for which there is no memory, or while the copy does something.
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
    told: Told,
    /// How often it was tried in vain since a page was brought.
    tries: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    /// All is known that it did.
    All,
    /// It has ended, or runs another program.
    Gone,
    /// It did more than can be kept in mind, or cannot be brought what it must have.
    TooMuch,
}

/// How an attempt to bring a page ended.
enum Brought {
    /// It is there, or need not be.
    Done,
    Again,
    /// The copy has made a copy of itself.
    Copy(Uffd),
}

impl Copied {
    fn new(uffd: Uffd, changes: Changes) -> Copied {
        Copied { uffd, changes, told: Told::All, tries: 0 }
    }

    /// What follows from what the kernel says to an attempt.
    fn after(&mut self, errno: Option<Errno>) -> Brought {
        match errno {
            // A page that is there already stays; what has never been ours is nobody's here.
            None | Some(Errno::EEXIST | Errno::ENOENT) => {
                self.tries = 0;
                return Brought::Done;
            }
            Some(Errno::EAGAIN | Errno::ENOMEM) if self.tries < PATIENCE => self.tries += 1,
            Some(Errno::ESRCH) => self.told = Told::Gone,
            Some(_) => self.told = Told::TooMuch,
        }
        if errno == Some(Errno::EAGAIN) { self.hear() } else { Brought::Again }
    }

    /// Reads one thing that it did, and waits a moment: for it to go on, or for that to be told.
    fn hear(&mut self) -> Brought {
        // SAFETY: a message is plain data, and zeroes are one.
        let mut message: [uffd_msg; 1] = unsafe { core::mem::zeroed() };
        if self.uffd.read(&mut message) == 0 {
            let _ = self.uffd.wait(1);
            return Brought::Again;
        }
        match decode(&message[0]) {
            Some(Message::Fork { child }) => return Brought::Copy(Uffd::from_event(child)),
            // Whoever waits for a page is woken when it comes.
            Some(Message::Fault { .. }) | None => {}
            // It is the parent who should wait.
            Some(Message::Protected { address, .. }) => _ = self.uffd.protect(address, PAGE, false),
            Some(event) if self.changes.note(event) => {}
            Some(_) => self.told = Told::TooMuch,
        }
        lock::pause();
        Brought::Again
    }
}

/// Brings a copy all that was evicted, but for what it is to find empty (MADV_WIPEONFORK).
pub fn populate(pager: &Pager, state: &mut State, worker: &mut Worker, contents: &mut Page, child: Uffd) {
    // It is the parent who should wait. What cannot be changed now is when the copy asks for it.
    pager.brake.held().inspect(|stack| _ = child.protect(stack.start, stack.len(), false));
    let mut copy = Copied::new(child, Changes::empty());
    if !note_wiped(&mut copy.changes) {
        copy.told = Told::TooMuch;
    }
    bring(pager, state, worker, contents, &mut copy, 0, 0);
}

/// Notes as given up what a copy of this process finds empty. False when that is too much, or cannot be seen.
#[inline(never)]
fn note_wiped(changes: &mut Changes) -> bool {
    let Some(smaps) = process::open(c"/proc/thread-self/smaps") else { return false };
    let (mut buffer, mut has_all) = (MapsBuffer::new(), true);
    maps::for_each_wiped(smaps.as_fd(), &mut buffer, |mapping| {
        has_all &= changes.note(Message::Remove { start: mapping.start, end: mapping.end });
    });
    has_all
}

/// The same of all pages from one on, and lets go of the copy.
fn bring(
    pager: &Pager,
    state: &mut State,
    worker: &mut Worker,
    contents: &mut Page,
    copy: &mut Copied,
    first: u64,
    deep: u32,
) {
    pager.region.header.unpaged_copies.fetch_add(1, Relaxed);
    events::for_each_known(state, first..PAGES, |state, page, word| {
        while copy.told == Told::All
            && let Some(place) = copy.changes.place(page as usize * PAGE)
        {
            // Anew each time: a copy of the copy was brought others meanwhile.
            let source = match word.phase() {
                Phase::Staged | Phase::Compressing => Some(state.staging.address(word.payload()) as *const u8),
                Phase::Stored => read_stored(pager, worker, page, contents).then_some(contents.as_ptr()),
                Phase::Resident | Phase::Dropped => return,
            };
            let lay = || match source {
                // SAFETY: both kinds of source are memory of ours, and present.
                Some(source) => unsafe { copy.uffd.copy(place, source, PAGE) }.1,
                None => copy.uffd.poison(place, PAGE).err(),
            };
            // Perhaps it is being moved, and that is still to be told.
            let errno = match lay() {
                Some(Errno::ENOENT) => lay(),
                errno => errno,
            };
            match copy.after(errno) {
                Brought::Done => return,
                Brought::Again => {}
                Brought::Copy(uffd) if deep < DEEP_MAX => {
                    let mut other = Copied::new(uffd, copy.changes.clone());
                    bring(pager, state, worker, contents, &mut other, page, deep + 1);
                }
                // It is left to wait, as one is that cannot be followed.
                Brought::Copy(_) => _ = pager.region.header.unpaged_copies.fetch_add(1, Relaxed),
            }
        }
    });
    if copy.told != Told::TooMuch {
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
