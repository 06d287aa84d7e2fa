//! The signals that ask a server to end, and what becomes of a server that cannot end yet.
//!
//! | signal                  | sent by                             | where the end is refused                    |
//! |-------------------------|-------------------------------------|---------------------------------------------|
//! | SIGTERM                 | a service manager, once; `kill`     | tried again after a second, until it succeeds |
//! | SIGINT, SIGQUIT, SIGHUP | a terminal: its keys, and its end   | it is said, and that is all                 |
//!
//! A service manager stops what uses a server at the same time as the server, and asks nobody twice: after a while it kills. Who
//! has pressed ^C and was refused knows that the server goes on, and must not find it gone an hour later.
//!
//! A signal that was ignored when we were started (`nohup`, a job in the background of a script) stays ignored.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Handle;
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use crate::run::{say, was_ignored};

const BETWEEN_TRIES: Duration = Duration::from_secs(1);
/// Who tries holds up what else is asked: no longer than one part of so many.
const TRIES_SHARE: u32 = 10;

/// What asks us to end. From when it is made such a signal does not end us by itself.
pub struct EndSignals {
    delivery: SignalDelivery<UnixStream, SignalOnly>,
}

impl EndSignals {
    /// To be called first of all.
    ///
    /// # Errors
    /// The system refuses.
    pub fn new() -> anyhow::Result<Self> {
        let wanted = [SIGTERM, SIGINT, SIGHUP, SIGQUIT].into_iter().filter(|signal| !was_ignored(*signal));
        let pair = UnixStream::pair().context("cannot wait for signals")?;
        let delivery = SignalDelivery::with_pipe(pair.0, pair.1, SignalOnly, wanted);
        Ok(Self { delivery: delivery.context("cannot wait for signals")? })
    }

    /// By which others end the waiting.
    pub fn handle(&self) -> Handle {
        self.delivery.handle()
    }

    /// Has `end` try whenever a signal asks, and says why it could not, each time that it is asked or the reason is
    /// another. It is told whether it will be asked until it succeeds. Returns when it could, or `false` when the handle was closed.
    pub fn wait_until(&mut self, mut end: impl FnMut(bool) -> anyhow::Result<()>) -> bool {
        let (mut insists, mut told, mut pause) = (false, String::new(), BETWEEN_TRIES);
        loop {
            let asked = self.wait(insists.then_some(pause));
            if self.delivery.handle().is_closed() {
                return false;
            }
            if asked.is_empty() && !insists {
                continue;
            }
            insists |= asked.contains(&SIGTERM);
            let begun = Instant::now();
            let Err(error) = end(insists) else { return true };
            pause = BETWEEN_TRIES.max(begun.elapsed() * TRIES_SHARE);
            let why = format!("{error:#}");
            if asked.is_empty() && why == told {
                continue;
            }
            let again = if insists { "; trying again until it can be done" } else { "" };
            say(&format!("compcache: not ending: {why}{again}\n"));
            told = why;
        }
    }

    /// Sleeps until a signal has come or `longest` has passed. May return earlier.
    fn wait(&mut self, longest: Option<Duration>) -> Vec<i32> {
        let timeout = longest
            .map(|longest| Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() });
        let mut fds = [PollFd::new(self.delivery.get_read(), PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // It has no memory for it, perhaps; the next second may be better.
            Err(_) => std::thread::sleep(BETWEEN_TRIES),
        }
        self.delivery.pending().collect()
    }
}
