//! Filters that a program sets on its system calls (seccomp).
//!
//! One that is set for all threads (SECCOMP_FILTER_FLAG_TSYNC) holds for the pager's too: before one that would end these, or take from
//! them what they need, the pager leaves. One that is set for the calling thread alone holds for the threads that come from it: then none
//! of the pager's may.

use crate::libc;
use compcache_pager::filter::{INSTRUCTIONS_MAX, Instruction, lets_ask_for_code, lets_pager_go_on};
use compcache_pager::memory;
use compcache_pager::pager::Pager;
use compcache_pager::{read_own_memory, retire};
use core::ffi::{c_int, c_ulong};

/// As the kernel's linux/seccomp.h.
const SECCOMP_SET_MODE_FILTER: u32 = 1;
const SECCOMP_FILTER_FLAG_TSYNC: u32 = 1;
/// As the kernel's linux/prctl.h and linux/seccomp.h.
const PR_SET_SECCOMP: c_int = 22;
const SECCOMP_MODE_FILTER: c_ulong = 2;
/// As the kernel's asm/unistd_64.h.
pub const SYS_SECCOMP: usize = 317;

/// Before `seccomp` with these arguments.
pub fn before_seccomp(pager: &Pager, arguments: &[usize; 6]) {
    let [operation, flags, program, ..] = *arguments;
    if operation as u32 == SECCOMP_SET_MODE_FILTER {
        before_filter(pager, program, flags as u32 & SECCOMP_FILTER_FLAG_TSYNC != 0);
    }
}

/// Before a filter is set. Its program is read into memory of its own: the caller's stack may be small.
fn before_filter(pager: &Pager, program: usize, is_for_all: bool) {
    // As the kernel's sock_fprog: how many instructions, and where. What cannot be read the kernel refuses.
    let mut words = [[0; 8]; 2];
    if !pager.is_here() || !read_own_memory(program, words.as_flattened_mut()) {
        return;
    }
    let (count, at) = (u16::from_ne_bytes([words[0][0], words[0][1]]).into(), usize::from_ne_bytes(words[1]));
    if !(1..=INSTRUCTIONS_MAX).contains(&count) {
        return;
    }
    let lets = with_room(count, |read| match read_own_memory(at, read.as_flattened_mut()) {
        true => (lets_pager_go_on(read), lets_ask_for_code(read)),
        false => (true, true),
    });
    // Without memory for a look nothing is known of it.
    let (lets_go_on, lets_ask_for_code) = lets.unwrap_or((false, false));
    if !lets_ask_for_code {
        pager.forbid_code();
    }
    if lets_go_on {
        return;
    }
    match is_for_all {
        true => retire::retire(pager),
        false => pager.note_filter(),
    }
}

/// Runs `work` with room for so many instructions; `None` when there is no memory.
fn with_room<T>(count: usize, work: impl FnOnce(&mut [Instruction]) -> T) -> Option<T> {
    let bytes = count * size_of::<Instruction>();
    let start = memory::map(bytes).ok()?;
    // SAFETY: mapped just now, and so large; zeroes are instructions.
    let result = work(unsafe { core::slice::from_raw_parts_mut(start.cast(), count) });
    // SAFETY: mapped above, and nobody's any more.
    let _ = unsafe { rustix::mm::munmap(start.cast(), bytes) };
    Some(result)
}

/// `prctl`, with a look at filters. Its last four arguments may not be there; then nothing reads them.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    if option == PR_SET_SECCOMP && second == SECCOMP_MODE_FILTER {
        crate::pager().inspect(|pager| before_filter(pager, third as usize, false));
    }
    // SAFETY: the caller's own call, passed on.
    libc::real::prctl().map_or(-1, |real| unsafe { real(option, second, third, fourth, fifth) })
}
