//! The signals that ask a server to end.
//!
//! A signal that was ignored when we were started (`nohup`, a job in the background of a script) stays ignored.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Handle;
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use crate::run::{say, was_ignored};

const BETWEEN_TRIES: Duration = Duration::from_secs(1);

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

    /// Has `end` try whenever a signal asks, and says why it could not. Returns when it could, or `false` when the handle was closed.
    pub fn wait_until(&mut self, mut end: impl FnMut() -> anyhow::Result<()>) -> bool {
        loop {
            let asked = self.wait();
            if self.delivery.handle().is_closed() {
                return false;
            }
            if asked.is_empty() {
                continue;
            }
            let Err(error) = end() else { return true };
            say(&format!("compcache: not ending: {error:#}\n"));
        }
    }

    /// Sleeps until a signal has come. May return earlier.
    fn wait(&mut self) -> Vec<i32> {
        let mut fds = [PollFd::new(self.delivery.get_read(), PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            // It has no memory for it, perhaps; the next second may be better.
            Err(_) => std::thread::sleep(BETWEEN_TRIES),
        }
        self.delivery.pending().collect()
    }
}
