//! Signals for the supervisor that are meant for the program.
//!
//! | sent by                                             | who has it     | what we do                                         |
//! |-----------------------------------------------------|----------------|----------------------------------------------------|
//! | the terminal (^C, ^\, ^Z, resize) to our group      | program and we | nothing: the program has it already                |
//! | the same, and the program has a group of its own    | we             | pass it on                                         |
//! | the terminal that closes, and we lead the session   | we             | pass it on                                         |
//! | a process, `kill SUPERVISOR`                        | we             | pass it on                                         |
//! | the program stops, for any reason                   | we see it      | stop as well, so that the shell sees a stopped job |
//!
//! We never die before the program does. A signal that was ignored when we were started (`nohup`) stays ignored, for the
//! program as well.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, getpgid, getpgrp, getpid, getsid};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::{Cause, Origin};

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

    /// Sleeps until a signal has come or `longest` has passed; answers the signals to pass on to `program`.
    pub fn wait(&mut self, longest: Duration, program: Pid) -> io::Result<Vec<i32>> {
        let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        let mut fds = [PollFd::new(self.delivery.get_read(), PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let pending = self.delivery.pending().filter(|origin| is_to_pass_on(origin, program));
        Ok(pending.map(|origin| origin.signal).collect())
    }
}

fn is_to_pass_on(origin: &Origin, program: Pid) -> bool {
    match origin.cause {
        _ if origin.signal == SIGCHLD => false,
        Cause::Kernel => !has_it_already(program, origin.signal),
        _ => true,
    }
}

/// Whether `program` was sent the signal that the kernel has sent to us: a terminal sends to a whole group, but tells only
/// the leader of its session that it has closed.
fn has_it_already(program: Pid, signal: i32) -> bool {
    let to_the_leader_alone = signal == SIGHUP && getsid(None) == Ok(getpid());
    !to_the_leader_alone && getpgid(Some(program)) == Ok(getpgrp())
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
