//! Signals for the supervisor that are meant for the program.
//!
//! | sent by                                             | who has it     | what we do                                         |
//! |-----------------------------------------------------|----------------|----------------------------------------------------|
//! | the terminal (^C, ^\, ^Z, resize, use of it from the background) to our group | program and we | nothing: the program has it already |
//! | the same, and the program has a group of its own    | we             | pass it on                                         |
//! | the terminal that closes, and we lead the session   | we             | pass it on                                         |
//! | a process, `kill SUPERVISOR`                        | we             | pass it on                                         |
//! | the program itself, to its parent or its group      | we             | nothing: it is not meant for the program           |
//! | the program stops, for any reason                   | we see it      | stop as well, so that the shell sees a stopped job: [`stop_with`] |
//!
//! We never die before the program does. A signal that was ignored when we were started (`nohup`) stays ignored, for the
//! program as well: see [`inherited`].

mod inherited;
mod send;
mod stop;

use std::io;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, getpgid, getpgrp, getpid, getsid};
use signal_hook::consts::{
    SIGABRT, SIGALRM, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGIO, SIGPIPE, SIGPROF, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN,
    SIGTTOU, SIGURG, SIGUSR1, SIGUSR2, SIGVTALRM, SIGWINCH, SIGXCPU, SIGXFSZ,
};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::{Cause, Origin};

pub use inherited::{descriptors, was_ignored};
pub use send::{die_by, from_background};
pub use stop::stop_with;

/// What is passed on beside real-time signals: all that can be caught and end a process, but for faults of its own code, and
/// what tells it to stop, to go on, and of changes.
const PASSED_ON: [i32; 22] = [
    SIGHUP,
    SIGINT,
    SIGQUIT,
    SIGABRT,
    SIGUSR1,
    SIGUSR2,
    SIGPIPE,
    SIGALRM,
    SIGTERM,
    SIGXCPU,
    SIGXFSZ,
    SIGVTALRM,
    SIGPROF,
    SIGIO,
    libc::SIGSTKFLT,
    libc::SIGPWR,
    SIGCONT,
    SIGTSTP,
    SIGTTIN,
    SIGTTOU,
    SIGURG,
    SIGWINCH,
];

/// What comes to us once the program has been started.
pub struct Signals {
    delivery: SignalDelivery<UnixStream, WithOrigin>,
}

impl Signals {
    /// Catches the end of children, and files of ours that become larger than they may (`ulimit -f`): writing to them then
    /// fails, and we can say so. Not by ignoring the signal, which the program would inherit.
    pub fn new() -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        let wanted =
            [SIGCHLD, SIGXFSZ].into_iter().filter(|signal| !inherited::was_ignored(*signal) || *signal == SIGCHLD);
        let delivery = SignalDelivery::with_pipe(read, write, WithOrigin::default(), wanted)?;
        Ok(Self { delivery })
    }

    /// Starts the program, and catches what is passed on to it. No signal is lost between the two. What was inherited is the program's alone from then on.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let handle = self.delivery.handle();
        let child = inherited::spawn(command, || {
            let all = PASSED_ON.into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX());
            let mut wanted = all.filter(|signal| !inherited::was_ignored(*signal));
            wanted.try_for_each(|signal| handle.add_signal(signal))
        })?;
        // The program runs; where these cannot be let go of, they are ours until it ends.
        let _ = inherited::let_go();
        Ok(child)
    }

    /// Sleeps until a signal has come or `longest` has passed; passes on to `program` what has.
    pub fn wait(&mut self, longest: Duration, program: Pid) -> io::Result<()> {
        let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        let mut fds = [PollFd::new(self.delivery.get_read(), PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        self.pass_on(program, |_| true);
        Ok(())
    }

    /// To be called when `program` has stopped: what has come of signals that stop is done. What comes later waits in the kernel, which forgets it
    /// when we go on.
    pub fn forget_stops(&mut self, program: Pid) {
        self.pass_on(program, |signal| !matches!(signal, SIGTSTP | SIGTTIN | SIGTTOU));
    }

    fn pass_on(&mut self, program: Pid, is_wanted: impl Fn(i32) -> bool) {
        for origin in self.delivery.pending().filter(|origin| is_to_pass_on(origin, program)) {
            if is_wanted(origin.signal) {
                send::send(program, origin.signal);
            }
        }
    }
}

fn is_to_pass_on(origin: &Origin, program: Pid) -> bool {
    let is_from = |process: Pid| origin.process.is_some_and(|sender| sender.pid == process.as_raw_nonzero().get());
    match (origin.cause, origin.signal) {
        (_, SIGCHLD) => false,
        // Timers that were set before we were executed are ours, and the program has not inherited them.
        (Cause::Kernel, SIGALRM | SIGVTALRM | SIGPROF) => true,
        (Cause::Kernel, signal @ (SIGHUP | SIGINT | SIGQUIT | SIGTSTP | SIGTTIN | SIGTTOU | SIGCONT | SIGWINCH)) => {
            !has_it_already(program, signal)
        }
        // Of what we did: the program has limits of its own.
        (Cause::Kernel, _) => false,
        // Ourselves: of a write of ours, SIGPIPE and SIGXFSZ.
        _ => !is_from(getpid()) && !is_from(program),
    }
}

/// Whether `program` was sent the signal that the kernel has sent to us: a terminal sends to a whole group, but tells only
/// the leader of its session that it has closed.
fn has_it_already(program: Pid, signal: i32) -> bool {
    let to_the_leader_alone = signal == SIGHUP && getsid(None) == Ok(getpid());
    !to_the_leader_alone && getpgid(Some(program)) == Ok(getpgrp())
}
