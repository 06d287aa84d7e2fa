//! The pager leaves a process, which goes on without: a filter on its system calls would not let the pager's threads do their work.
//!
//! Everything evicted is brought back first, however much that is, while the handler still answers. Then all threads end. With them the
//! descriptors close, and what was registered is registered no more.

use crate::copies;
use crate::fork::{self, ALL_PAGES};
use crate::lock;
use crate::lost;
use crate::memory::PAGE;
use crate::pager::{Channel, Pager, State};
use crate::relay;
use crate::shared::Trouble;
use crate::spill::read_stored;
use crate::sys::{self, Errno};
use crate::table::{Phase, Word};
use compcache_store::{Page, Worker};
use core::sync::atomic::Ordering::*;

impl Pager {
    /// Whether it has not left the process.
    pub fn is_at_work(&self) -> bool {
        self.has_threads().load(Acquire)
    }
}

/// Has the pager leave this process. Called in a thread of the program's; returns when it is gone.
pub fn retire(pager: &Pager) {
    fork::while_nobody_forks(pager, || {
        // Another thread may have come first.
        if !pager.has_threads().load(Acquire) {
            return;
        }
        fork::ask_to_retire(pager);
        relay::wait_for_the_end(pager);
        pager.armed.store(false, Release);
        pager.slot.store(0, Release);
        pager.forget_own_threads();
        pager.has_threads().store(false, Release);
        pager.region.note_trouble(Trouble::Filter, 0);
    });
}

/// In the evictor: does so, and ends.
pub(crate) fn carry_out(pager: &Pager, channel: Option<&Channel>, worker: &mut Worker) -> ! {
    if let Some(channel) = channel.filter(|_| pager.armed.load(Acquire)) {
        bring_back(pager, channel, worker);
    }
    relay::have_others_end(pager, channel);
    fork::retired(pager);
    sys::end_thread();
}

fn bring_back(pager: &Pager, channel: &Channel, worker: &mut Worker) {
    // Nobody is to wait for a frame that this thread would free, nor is anything to leave for a file.
    pager.store.set_limit_bytes(u64::MAX);
    pager.exhausted.store(true, Release);
    pager.tell_progress();
    let (mut contents, mut at, mut has_staged) = ([0; PAGE], ALL_PAGES.start, true);
    let mut moves = None;
    loop {
        let mut state = pager.state.lock();
        if moves != Some(state.moves) {
            // Something was moved, perhaps behind where this is.
            (moves, at) = (Some(state.moves), ALL_PAGES.start);
        }
        if state.under_way > 0 || !pager.is_settled(&state) {
            // An event must be read, or something comes to its end.
        } else if has_staged {
            has_staged = !fork::unstage_all(pager, &mut state);
        } else {
            match bring_one(pager, channel, worker, &mut state, at, &mut contents) {
                Brought::All => return,
                Brought::UpTo(page) => {
                    at = page;
                    drop(state);
                    pager.turn.let_go_first();
                    continue;
                }
                Brought::Again => {}
            }
        }
        drop(state);
        lock::pause();
    }
}

enum Brought {
    All,
    UpTo(u64),
    Again,
}

/// Brings the next stored page.
fn bring_one(
    pager: &Pager,
    channel: &Channel,
    worker: &mut Worker,
    state: &mut State,
    from: u64,
    contents: &mut Page,
) -> Brought {
    let Some(page) = state.table.next_known(from, ALL_PAGES.end) else { return Brought::All };
    let word = state.table.get(page);
    if word.phase() != Phase::Stored {
        return Brought::UpTo(page + 1);
    }
    let address = page as usize * PAGE;
    if read_stored(pager, worker, page, contents) {
        // SAFETY: the contents are ours and present. A page that is there already is the truth.
        match unsafe { channel.uffd.copy(address, contents.as_ptr(), PAGE) }.1 {
            None | Some(Errno::EEXIST) => {}
            Some(Errno::EAGAIN) => return Brought::Again,
            // Perhaps it is being moved, and that is still to be told.
            Some(Errno::ENOENT) if !channel.is_quiet() => return Brought::Again,
            // Its range was taken away: nobody can ask for it.
            Some(Errno::ENOENT | Errno::ESRCH) => {}
            Some(_) => crate::process::die(pager, Trouble::NoMemory),
        }
    } else if lost::poison(pager, channel, page).is_err() {
        return Brought::Again;
    }
    copies::drop_object(pager, state, page, word);
    state.table.update(page, Word::new(Phase::Resident));
    Brought::UpTo(page + 1)
}
