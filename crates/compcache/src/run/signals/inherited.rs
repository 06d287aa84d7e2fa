//! What a program inherits of signals: which are ignored, and which are blocked; and what it inherits of descriptors, the program alone.
//!
//! Before `main` the Rust runtime ignores SIGPIPE, and what it starts has the default in any case; in the place of standard descriptors that are
//! closed it opens /dev/null. So we look before the runtime does, and set again what we found between fork and exec, after std has set its own.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::mem::zeroed;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::stdio::{dup2_stdin, dup2_stdout};
use signal_hook::consts::{SIGCHLD, SIGPIPE};

const SIGNALS: i32 = 64;

/// One bit a signal: ignored when this process was started.
static IGNORED: AtomicU64 = AtomicU64::new(0);

/// One bit a standard descriptor: closed when this process was started.
static CLOSED: AtomicU64 = AtomicU64::new(0);

/// The C library calls what stands in this section before it calls `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    for signal in 1..=SIGNALS {
        // SAFETY: zeroes are a valid action; the call changes none and writes to one of ours.
        let ignored = unsafe {
            let mut action: libc::sigaction = zeroed();
            libc::sigaction(signal, null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
        };
        if ignored {
            IGNORED.fetch_or(bit(signal), Relaxed);
        }
    }
    for descriptor in 0..=libc::STDERR_FILENO {
        // SAFETY: it reads a flag.
        if unsafe { libc::fcntl(descriptor, libc::F_GETFD) } < 0 {
            CLOSED.fetch_or(1 << descriptor, Relaxed);
        }
    }
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Whether the signal was ignored when this process was started, as `nohup` starts one.
pub fn was_ignored(signal: i32) -> bool {
    IGNORED.load(Relaxed) & bit(signal) != 0
}

/// Starts `command` with what was ignored, blocked and closed when we were started, and then does `then` before a signal can come
/// to us. Afterwards none is blocked here: a signal that the program has blocked waits there, not at us.
///
/// A signal that comes to the new process before its exec does what it would do without us, provided that nothing the
/// program is to be told of was caught before.
pub fn spawn(command: &mut Command, then: impl FnOnce() -> io::Result<()>) -> io::Result<Child> {
    let before = set_mask(libc::sigfillset)?;
    // Who started us wanted what we are to end with him; it does not pass to what we start.
    let mut with_parent: libc::c_int = 0;
    // SAFETY: it writes one number to ours.
    unsafe { libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut with_parent) };
    let parent = std::process::id();
    // SAFETY: the closure makes system calls alone, which are async-signal-safe, and uses what was computed before.
    unsafe {
        command.pre_exec(move || {
            // Others that were ignored still are; of these std and we have changed what is done.
            for signal in [SIGPIPE, SIGCHLD].into_iter().filter(|signal| was_ignored(*signal)) {
                libc::signal(signal, libc::SIG_IGN);
            }
            // What std still needs has a higher number.
            for descriptor in (0..=libc::STDERR_FILENO).filter(|descriptor| CLOSED.load(Relaxed) >> descriptor & 1 == 1)
            {
                libc::close(descriptor);
            }
            if with_parent != 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, with_parent);
                // It may have ended already.
                if libc::getppid() as u32 != parent {
                    libc::raise(with_parent);
                }
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &before, null_mut());
            Ok(())
        });
    }
    let child = command.spawn();
    let then = then();
    set_mask(libc::sigemptyset)?;
    let child = child?;
    then.map(|()| child)
}

/// What this process has open beside the three standard descriptors; one of these is closed by then.
///
/// # Errors
/// There is no /proc.
pub fn descriptors() -> io::Result<Vec<i32>> {
    let names = fs::read_dir("/proc/self/fd")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(names.filter(|number| *number > libc::STDERR_FILENO).collect())
}

/// Lets go of what this process has inherited and the program has now: when the program closes one end of a pipe, or a socket, who is at the other end shall see that. Standard
/// error stays, for what there is to say.
///
/// # Errors
/// There is no /proc or no /dev/null; then it is kept.
pub fn let_go() -> io::Result<()> {
    // All that is ours is closed at exec.
    let is_inherited = |number: &i32| {
        // SAFETY: it reads a flag.
        let flags = unsafe { libc::fcntl(*number, libc::F_GETFD) };
        flags >= 0 && flags & libc::FD_CLOEXEC == 0
    };
    for number in descriptors()?.into_iter().filter(is_inherited) {
        // SAFETY: nothing here knows of it.
        unsafe { libc::close(number) };
    }
    let null = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    Ok(dup2_stdout(&null)?)
}

/// Blocks the signals that `fill` names, and no others. Answers what was blocked before.
fn set_mask(fill: unsafe extern "C" fn(*mut libc::sigset_t) -> i32) -> io::Result<libc::sigset_t> {
    // SAFETY: zeroes are a valid set; all calls write to sets of ours.
    unsafe {
        let (mut set, mut before) = (zeroed(), zeroed());
        fill(&mut set);
        match libc::pthread_sigmask(libc::SIG_SETMASK, &set, &mut before) {
            0 => Ok(before),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}
