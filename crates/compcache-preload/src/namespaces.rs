//! `unshare` and `setns`, where the kernel allows them to a process of one thread only: made without the pager's threads.
//!
//! A process whose children are to be in another namespace of process numbers, or of time, may have no new threads. So that part of a call
//! is made after the others, when the pager's threads are there again.

use crate::libc;
use compcache_pager::pager::Pager;
use compcache_pager::{relay, system_call};
use core::ffi::c_int;

/// As the kernel's linux/sched.h.
const CLONE_NEWTIME: usize = 0x80;
const CLONE_VM: usize = 0x100;
const CLONE_SIGHAND: usize = 0x800;
const CLONE_THREAD: usize = 0x1_0000;
const CLONE_NEWUSER: usize = 0x1000_0000;
const CLONE_NEWPID: usize = 0x2000_0000;
/// As the kernel's linux/nsfs.h.
const NS_GET_NSTYPE: usize = 0xb703;
/// As the kernel's asm/unistd_64.h.
const SYS_IOCTL: usize = 16;
pub const SYS_UNSHARE: usize = 272;
pub const SYS_SETNS: usize = 308;

/// Makes a system call; the error as a negative number.
///
/// # Safety
/// As the kernel's documentation of call `number` has it.
pub unsafe fn call(number: usize, arguments: [usize; 6]) -> isize {
    // SAFETY: says the caller.
    match unsafe { system_call(number, arguments) } {
        Ok(result) => result as isize,
        Err(errno) => -(errno.0 as isize),
    }
}

/// Makes a call in two parts; `flags` says which of all.
fn in_parts(pager: &'static Pager, all: usize, after: usize, part: impl Fn(usize) -> isize) -> isize {
    let result = relay::while_alone(pager, || part(all & !after));
    if result < 0 || all & after == 0 { result } else { part(all & after) }
}

/// `unshare`; `None` where it can be made as any call.
pub fn unshare_alone(pager: &'static Pager, flags: usize) -> Option<isize> {
    // SAFETY: takes flags, and is the caller's own call.
    let unshare = |flags| unsafe { call(SYS_UNSHARE, [flags, 0, 0, 0, 0, 0]) };
    let wants_one_thread = flags & (CLONE_VM | CLONE_SIGHAND | CLONE_THREAD | CLONE_NEWUSER) != 0;
    wants_one_thread.then(|| in_parts(pager, flags, CLONE_NEWPID | CLONE_NEWTIME, unshare))
}

/// `setns`; `None` where it can be made as any call.
pub fn setns_alone(pager: &'static Pager, descriptor: usize, kind: usize) -> Option<isize> {
    // SAFETY: takes numbers, and is the caller's own call.
    let setns = |kind| unsafe { call(SYS_SETNS, [descriptor, kind, 0, 0, 0, 0]) };
    let kind = match kind {
        // SAFETY: only asks.
        0 => unsafe { call(SYS_IOCTL, [descriptor, NS_GET_NSTYPE, 0, 0, 0, 0]) }.try_into().unwrap_or(0),
        kind => kind,
    };
    (kind & (CLONE_NEWUSER | CLONE_NEWTIME) != 0).then(|| in_parts(pager, kind, CLONE_NEWPID, setns))
}

/// As libc has it: errno, and -1.
fn result_of(result: isize) -> c_int {
    if result < 0 {
        libc::set_errno(-result as c_int);
        return -1;
    }
    result as c_int
}

/// `unshare`, also of what the kernel gives to a single thread only.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unshare(flags: c_int) -> c_int {
    match crate::pager().and_then(|pager| unshare_alone(pager, flags as u32 as usize)) {
        Some(result) => result_of(result),
        // SAFETY: the caller's own call, passed on.
        None => libc::real::unshare().map_or(-1, |real| unsafe { real(flags) }),
    }
}

/// `setns`, also into what the kernel lets a single thread in only.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setns(descriptor: c_int, kind: c_int) -> c_int {
    match crate::pager().and_then(|pager| setns_alone(pager, descriptor as usize, kind as u32 as usize)) {
        Some(result) => result_of(result),
        // SAFETY: the caller's own call, passed on.
        None => libc::real::setns().map_or(-1, |real| unsafe { real(descriptor, kind) }),
    }
}
