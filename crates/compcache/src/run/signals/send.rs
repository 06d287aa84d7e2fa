//! Signals by their numbers: rustix and signal-hook send only those that have names.
#![allow(unsafe_code)]

use std::mem::zeroed;
use std::ptr::null_mut;

use rustix::process::Pid;

/// Sends it to `program`, which has not been waited for.
pub fn send(program: Pid, signal: i32) {
    // SAFETY: changes no memory of ours; the number is still the program's.
    unsafe { libc::kill(program.as_raw_nonzero().get(), signal) };
}

/// Ends this process by `signal`. Returns if that does not end it, as in the first process of a container.
pub fn die_by(signal: i32) {
    // SAFETY: no code runs at the default of a signal, and this process has nothing left to do.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// Does `write` so that a terminal which stops who writes from the background (`stty tostop`) lets it through: who catches SIGTTOU
/// would try for ever.
pub fn from_background(write: impl FnOnce()) {
    // SAFETY: zeroes are a valid set; all calls write to sets of ours.
    unsafe {
        let (mut set, mut before) = (zeroed(), zeroed());
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before);
        write();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, null_mut());
    }
}
