//! Signals by their numbers: rustix and signal-hook send only those that have names.
#![allow(unsafe_code)]

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
