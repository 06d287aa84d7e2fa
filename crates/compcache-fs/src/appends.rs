//! Direct appends, which come in pieces at the same time.
//!
//! A write with O_APPEND and O_DIRECT that is longer than a request comes as several, each with the place where the kernel takes it to go, and they
//! overtake each other. All under way at a time are of one write, since the kernel lets in one writer at a time. Each waits until it is its turn:
//!
//! | the file below ends                                          | then                                                    |
//! |--------------------------------------------------------------|---------------------------------------------------------|
//! | where the piece goes                                         | it is its turn                                          |
//! | where the piece before it has ended, or behind that           | it is its turn: others have changed it behind the mount |
//! | elsewhere, and a piece before it failed                       | so does this one                                        |
//! | elsewhere, and nothing has come or was done for a while      | it is the first one's turn: others have changed it behind the mount |
//!
//! From /dev/fuse requests are taken in the order in which they were made, so that nobody waits for a piece that nobody serves. By io_uring each processor has a
//! queue and threads, and a piece may wait in another: so longer is waited where the file ends before the place of a piece than where it ends behind it.

use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::{self, Errno};

use crate::stamp::look;

/// How long a piece waits for those before it, if there is none: where the file ends behind its place, and before it.
const PATIENCE: Duration = Duration::from_millis(250);
const PATIENCE_BEFORE: Duration = Duration::from_secs(3);

/// How far appends to an open file have come.
#[derive(Default)]
pub struct Appended {
    /// Where the last one ended, as the kernel counts, and below.
    next: u64,
    end: u64,
    at: Option<Instant>,
    /// Where the last one went that failed, why, and when that was last of interest.
    failed: Option<(u64, Errno, Instant)>,
    /// Where those go that wait.
    waiting: Vec<u64>,
}

/// Who may append to an open file.
#[derive(Default)]
pub struct Appends {
    appended: Mutex<Appended>,
    changed: Condvar,
}

impl Appends {
    /// Until what is returned is dropped nobody else uses the position of the file's descriptor.
    pub fn alone(&self) -> MutexGuard<'_, Appended> {
        self.appended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `append`, which returns where what it has appended ends, when it is the turn of a piece of so many bytes that the kernel takes to go to
    /// `offset_bytes`.
    pub fn in_order<T>(
        &self,
        file: impl AsFd,
        (offset_bytes, length_bytes): (u64, u64),
        append: impl FnOnce() -> io::Result<(T, u64)>,
    ) -> io::Result<T> {
        let mut appended = self.alone();
        appended.waiting.push(offset_bytes);
        let begun = Instant::now();
        let turn = loop {
            let wait = match appended.turn_of(offset_bytes, begun, look(&file).map(|stat| stat.stx_size)) {
                Ok(Some(wait)) => wait,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            appended = self.changed.wait_timeout(appended, wait).unwrap_or_else(PoisonError::into_inner).0;
        };
        let place = appended.waiting.iter().position(|waits| *waits == offset_bytes);
        place.map(|place| appended.waiting.swap_remove(place));
        let done = turn.and_then(|()| append());
        match &done {
            Ok((_, end)) => {
                (appended.next, appended.end) = (offset_bytes.saturating_add(length_bytes), *end);
                (appended.at, appended.failed) = (Some(Instant::now()), None);
            }
            Err(error) => {
                let first = appended.failed.map_or(offset_bytes, |(first, ..)| first.min(offset_bytes));
                appended.failed = Some((first, *error, Instant::now()));
            }
        }
        self.changed.notify_all();
        done.map(|(done, _)| done)
    }
}

impl Appended {
    /// Whether it is the turn of the piece for this place, which has waited since `begun`, when the file ends at `end`; else, how long it is to wait.
    fn turn_of(&self, offset_bytes: u64, begun: Instant, end: io::Result<u64>) -> io::Result<Option<Duration>> {
        let end = end?;
        if end == offset_bytes || offset_bytes == self.next && end >= self.end {
            return Ok(None);
        }
        if let Some((first, error, since)) = self.failed
            && first < offset_bytes
            && since.elapsed() < PATIENCE_BEFORE
        {
            return Err(error);
        }
        let since = self.at.map_or(begun, |at| at.max(begun));
        let is_first = self.waiting.iter().all(|waits| *waits >= offset_bytes);
        let patience = if end < offset_bytes { PATIENCE_BEFORE } else { PATIENCE };
        match patience.saturating_sub(since.elapsed()) {
            Duration::ZERO if is_first => Ok(None),
            Duration::ZERO => Ok(Some(PATIENCE)),
            rest => Ok(Some(rest)),
        }
    }
}
