//! Signals for the supervisor that are meant for the program.
//!
//! | sent by                           | who has it         | what we do                                         |
//! |-----------------------------------|--------------------|----------------------------------------------------|
//! | the terminal (^C, ^\, ^Z, resize) | program and we     | nothing: the program has it already                |
//! | a process, `kill SUPERVISOR`      | we                 | pass it on                                         |
//! | the program stops, for any reason | we see it          | stop as well, so that the shell sees a stopped job |
//!
//! We never die before the program does. A signal that was ignored when we were started (`nohup`) stays ignored, for the
//! program as well.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

const PASSED_ON: [i32; 9] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH, SIGTSTP];

/// Catches signals from its creation on.
pub struct Signals {
    delivery: SignalDelivery<UnixStream, WithOrigin>,
}

impl Signals {
    /// Catches what is passed on, and the end of children.
    pub fn catch() -> io::Result<Self> {
        let ignored = std::fs::read_to_string("/proc/self/status").map_or(0, |status| ignored(&status));
        let wanted = PASSED_ON.into_iter().filter(|signal| ignored & bit(*signal) == 0).chain([SIGCHLD]);
        let (read, write) = UnixStream::pair()?;
        let delivery = SignalDelivery::with_pipe(read, write, WithOrigin::default(), wanted)?;
        Ok(Self { delivery })
    }

    /// Sleeps until a signal has come or `longest` has passed; answers the signals to pass on.
    pub fn wait(&mut self, longest: Duration) -> io::Result<Vec<i32>> {
        let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        let mut fds = [PollFd::new(self.delivery.get_read(), PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let from_processes = |origin: &signal_hook::low_level::siginfo::Origin| !matches!(origin.cause, Cause::Kernel);
        let pending = self.delivery.pending().filter(from_processes).map(|origin| origin.signal);
        Ok(pending.filter(|signal| *signal != SIGCHLD).collect())
    }
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// The mask of ignored signals in a `/proc/self/status`.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nohup_is_seen_in_the_mask() {
        let mask = ignored("SigBlk:\t0000000000000002\nSigIgn:\t0000000000000001\n");
        assert_ne!(mask & bit(SIGHUP), 0);
        assert_eq!(mask & bit(SIGINT), 0);
    }
}
