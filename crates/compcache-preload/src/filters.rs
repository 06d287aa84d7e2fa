//! Filters that a program sets on the system calls of all threads of its process (seccomp with SECCOMP_FILTER_FLAG_TSYNC): before one
//! that would end the pager's threads, or take from them what they need, the pager leaves.

use compcache_pager::filter::{INSTRUCTIONS_MAX, Instruction, lets_pager_go_on};
use compcache_pager::pager::Pager;
use compcache_pager::{read_own_memory, retire};

/// As the kernel's linux/seccomp.h.
const SECCOMP_SET_MODE_FILTER: usize = 1;
const SECCOMP_FILTER_FLAG_TSYNC: usize = 1;
/// As the kernel's asm/unistd_64.h.
pub const SYS_SECCOMP: usize = 317;

/// Before `seccomp` with these arguments.
pub fn before_seccomp(pager: &Pager, arguments: &[usize; 6]) {
    let [operation, flags, program, ..] = *arguments;
    if operation != SECCOMP_SET_MODE_FILTER || flags & SECCOMP_FILTER_FLAG_TSYNC == 0 {
        return;
    }
    // As the kernel's sock_fprog: how many instructions, and where. What cannot be read the kernel refuses.
    let mut words = [[0; 8]; 2];
    if !read_own_memory(program, words.as_flattened_mut()) {
        return;
    }
    let (count, at) = (u16::from_ne_bytes([words[0][0], words[0][1]]).into(), usize::from_ne_bytes(words[1]));
    let mut instructions: [Instruction; INSTRUCTIONS_MAX] = [[0; 8]; INSTRUCTIONS_MAX];
    let Some(read) = instructions.get_mut(..count).filter(|read| !read.is_empty()) else { return };
    if read_own_memory(at, read.as_flattened_mut()) && !lets_pager_go_on(read) {
        retire::retire(pager);
    }
}
