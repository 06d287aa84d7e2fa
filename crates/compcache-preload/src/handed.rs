//! What systemd has handed to the supervisor is for the program: it names the process that it is meant for.
//!
//! Sockets (sd_listen_fds) and the watchdog (sd_watchdog_enabled) are told of in variables, with the number of the process that is to use them,
//! lest its children do. That is the supervisor's number; the program has another, which only it knows before it begins.

use alloc::boxed::Box;
use core::ffi::c_char;

/// The variables that name a process.
const NAMES: [&[u8]; 2] = [b"LISTEN_PID", b"WATCHDOG_PID"];
/// A name, `=`, a number and a zero.
const ENTRY_BYTES: usize = 32;

/// In the process that `supervisor` has started, with what names that process, puts this one's number in its place.
///
/// # Safety
/// `environment` must be null, or the program's environment before anybody else has read it.
pub unsafe fn take_over(environment: *const *const c_char, supervisor: u32) {
    let number = |pid: Option<rustix::process::Pid>| pid.map_or(0, |pid| pid.as_raw_nonzero().get() as u32);
    // Not what the program itself hands to others: it has no such parent.
    if supervisor == 0 || number(rustix::process::getppid()) != supervisor {
        return;
    }
    let own = number(Some(rustix::process::getpid()));
    for name in NAMES {
        // SAFETY: says the caller.
        let Some((place, value)) = (unsafe { crate::entry(environment, name) }) else { continue };
        if value.to_bytes() == decimal(supervisor, &mut [0; 10]) {
            let entry = Box::leak(Box::new([0u8; ENTRY_BYTES]));
            entry[..name.len()].copy_from_slice(name);
            entry[name.len()] = b'=';
            let mut digits = [0; 10];
            let digits = decimal(own, &mut digits);
            entry[name.len() + 1..][..digits.len()].copy_from_slice(digits);
            // SAFETY: the list is the program's own, and one of its strings is named anew.
            unsafe { *environment.add(place).cast_mut() = entry.as_ptr().cast() };
        }
    }
}

/// A number's digits.
fn decimal(mut number: u32, digits: &mut [u8; 10]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[at..];
        }
    }
}
