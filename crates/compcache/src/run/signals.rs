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
//! program as well: see [`inherited`].

mod inherited;

use std::io;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, getpgid, getpgrp, getpid, getsid};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::{Cause, Origin};

const PASSED_ON: [i32; 9] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH, SIGTSTP];

/// What comes to us once the program has been started.
pub struct Signals {
    delivery: SignalDelivery<UnixStream, WithOrigin>,
}

impl Signals {
    /// Catches the end of children, and nothing else yet.
    pub fn new() -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        let delivery = SignalDelivery::with_pipe(read, write, WithOrigin::default(), [SIGCHLD])?;
        Ok(Self { delivery })
    }

    /// Starts the program, and catches what is passed on to it. No signal is lost between the two.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let handle = self.delivery.handle();
        inherited::spawn(command, || {
            let mut wanted = PASSED_ON.into_iter().filter(|signal| !inherited::was_ignored(*signal));
            wanted.try_for_each(|signal| handle.add_signal(signal))
        })
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
