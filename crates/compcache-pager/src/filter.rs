//! Filters on system calls (seccomp), and whether one would let the pager's threads do what they do.
//!
//! A filter that a thread sets for all of its process's (SECCOMP_FILTER_FLAG_TSYNC) holds for the pager's too. What it says of a call it says
//! by a small program, which is run here beforehand for each call they make ([`CALLS`]), as the kernel would: classic BPF, as
//! Linux's `Documentation/networking/filter.rst` and `seccomp(2)` have it.
//!
//! Arguments that are addresses or descriptors are zero here: hardly a filter decides by them.

use crate::maps::PROCMAP_QUERY;
use crate::scan::PAGEMAP_SCAN;
use crate::uffd::{UFFDIO_MOVE, UFFDIO_POISON};
use linux_raw_sys::general as uapi;
use linux_raw_sys::ioctl as codes;

/// As the kernel's sock_filter: a code of two bytes, two distances, and a value of four bytes.
pub type Instruction = [u8; 8];

/// The longest program that the kernel takes.
pub const INSTRUCTIONS_MAX: usize = 4096;

/// The kernel's seccomp_data, as words of four bytes: number, architecture, instruction pointer, six arguments.
type Data = [u32; 16];

const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const RET_ERRNO: u32 = 0x0005_0000;
const RET_LOG: u32 = 0x7ffc_0000;
const RET_ALLOW: u32 = 0x7fff_0000;
const RET_ACTION: u32 = 0xffff_0000;

/// What the pager's threads call, once they are there, with the arguments that filters look at, and where these are.
const CALLS: &[(u32, &[(usize, u32)])] = &[
    (uapi::__NR_ioctl, &[(1, codes::UFFDIO_COPY)]),
    (uapi::__NR_ioctl, &[(1, UFFDIO_MOVE)]),
    (uapi::__NR_ioctl, &[(1, codes::UFFDIO_WAKE)]),
    (uapi::__NR_ioctl, &[(1, codes::UFFDIO_REGISTER)]),
    (uapi::__NR_ioctl, &[(1, codes::UFFDIO_UNREGISTER)]),
    (uapi::__NR_ioctl, &[(1, UFFDIO_POISON)]),
    (uapi::__NR_ioctl, &[(1, codes::UFFDIO_WRITEPROTECT)]),
    (uapi::__NR_ioctl, &[(1, PAGEMAP_SCAN)]),
    (uapi::__NR_ioctl, &[(1, PROCMAP_QUERY)]),
    (uapi::__NR_futex, &[(1, uapi::FUTEX_WAIT | uapi::FUTEX_PRIVATE_FLAG)]),
    (uapi::__NR_futex, &[(1, uapi::FUTEX_WAKE | uapi::FUTEX_PRIVATE_FLAG)]),
    (uapi::__NR_futex, &[(1, uapi::FUTEX_WAKE_OP | uapi::FUTEX_PRIVATE_FLAG)]),
    (uapi::__NR_read, &[]),
    (uapi::__NR_pread64, &[]),
    (uapi::__NR_pwrite64, &[]),
    (uapi::__NR_ppoll, &[]),
    (uapi::__NR_madvise, &[(2, uapi::MADV_DONTNEED)]),
    (uapi::__NR_mmap, &[(2, uapi::PROT_READ | uapi::PROT_WRITE), (3, uapi::MAP_PRIVATE | uapi::MAP_ANONYMOUS)]),
    (uapi::__NR_munmap, &[]),
    (uapi::__NR_mremap, &[]),
    (uapi::__NR_clock_gettime, &[(0, uapi::CLOCK_MONOTONIC)]),
    (uapi::__NR_clock_gettime, &[(0, uapi::CLOCK_PROCESS_CPUTIME_ID)]),
    (uapi::__NR_clock_gettime, &[(0, uapi::CLOCK_THREAD_CPUTIME_ID)]),
    (uapi::__NR_get_robust_list, &[]),
    (uapi::__NR_fcntl, &[(1, uapi::F_DUPFD_CLOEXEC)]),
    (uapi::__NR_getdents64, &[]),
    (uapi::__NR_sched_setaffinity, &[]),
    (uapi::__NR_open, &[]),
    (uapi::__NR_close, &[]),
    (uapi::__NR_process_vm_readv, &[]),
    (uapi::__NR_gettid, &[]),
    (uapi::__NR_exit, &[]),
    (
        uapi::__NR_clone,
        &[(
            0,
            uapi::CLONE_VM
                | uapi::CLONE_SIGHAND
                | uapi::CLONE_THREAD
                | uapi::CLONE_SYSVSEM
                | uapi::CLONE_SETTLS
                | uapi::CLONE_FILES,
        )],
    ),
];

/// What they call when they start, in a copy of the process above all, or now and then, and bear to be refused.
const CALLS_REFUSABLE: &[u32] = &[
    uapi::__NR_userfaultfd,
    uapi::__NR_close_range,
    uapi::__NR_capset,
    uapi::__NR_set_robust_list,
    uapi::__NR_sched_setattr,
    uapi::__NR_sched_getaffinity,
    uapi::__NR_sched_yield,
    uapi::__NR_rt_sigprocmask,
    uapi::__NR_getpid,
    uapi::__NR_mprotect,
    uapi::__NR_munlock,
    uapi::__NR_fallocate,
    uapi::__NR_memfd_create,
    uapi::__NR_ftruncate,
    uapi::__NR_process_vm_writev,
];

/// Whether a filter lets the pager's threads go on.
pub fn lets_pager_go_on(program: &[Instruction]) -> bool {
    CALLS.iter().all(|(number, arguments)| matches!(action_of(program, *number, arguments), Some(RET_ALLOW | RET_LOG)))
        && CALLS_REFUSABLE.iter().all(|number| may_try(program, *number, &[]))
}

/// Whether a filter does not kill who asks for memory that may be executed ([`crate::code`]).
pub fn lets_ask_for_code(program: &[Instruction]) -> bool {
    may_try(program, uapi::__NR_mprotect, &[(2, uapi::PROT_READ | uapi::PROT_WRITE | uapi::PROT_EXEC)])
}

fn may_try(program: &[Instruction], number: u32, arguments: &[(usize, u32)]) -> bool {
    matches!(action_of(program, number, arguments), Some(RET_ALLOW | RET_LOG | RET_ERRNO))
}

/// What a filter does of a call; `None` when the kernel would not take it.
fn action_of(program: &[Instruction], number: u32, arguments: &[(usize, u32)]) -> Option<u32> {
    let mut data = [0; 16];
    (data[0], data[1]) = (number, AUDIT_ARCH_X86_64);
    for (place, value) in arguments {
        data[4 + 2 * place] = *value;
    }
    run(program, &data).map(|result| result & RET_ACTION)
}

/// Runs a program as the kernel would; `None` when the kernel would not take it.
fn run(program: &[Instruction], data: &Data) -> Option<u32> {
    let (mut accumulator, mut index, mut memory, mut at) = (0u32, 0u32, [0u32; 16], 0usize);
    // It can only go forwards.
    while let Some([low, high, if_true, if_false, value @ ..]) = program.get(at).copied() {
        at += 1;
        let (code, value) = (u32::from(u16::from_ne_bytes([low, high])), u32::from_ne_bytes(value));
        let (class, source) = (code & 0x07, if code & 0x08 == 0 { value } else { index });
        match class {
            // Loads: a word of the data, a constant, a word of the memory, or the data's length.
            0x00 | 0x01 => {
                let loaded = match code & 0xe0 {
                    0x00 => value,
                    0x20 if class == 0 && value % 4 == 0 => *data.get(value as usize / 4)?,
                    0x60 => *memory.get(value as usize)?,
                    0x80 => size_of::<Data>() as u32,
                    _ => return None,
                };
                *if class == 0 { &mut accumulator } else { &mut index } = loaded;
            }
            0x02 => *memory.get_mut(value as usize)? = accumulator,
            0x03 => *memory.get_mut(value as usize)? = index,
            0x04 => {
                accumulator = match code & 0xf0 {
                    0x00 => accumulator.wrapping_add(source),
                    0x10 => accumulator.wrapping_sub(source),
                    0x20 => accumulator.wrapping_mul(source),
                    // By zero the program ends with 0.
                    0x30 => match accumulator.checked_div(source) {
                        Some(quotient) => quotient,
                        None => return Some(0),
                    },
                    0x40 => accumulator | source,
                    0x50 => accumulator & source,
                    0x60 => accumulator.wrapping_shl(source),
                    0x70 => accumulator.wrapping_shr(source),
                    0x80 => accumulator.wrapping_neg(),
                    0xa0 => accumulator ^ source,
                    _ => return None,
                };
            }
            0x05 => {
                let holds = match code & 0xf0 {
                    0x00 => {
                        at = at.checked_add(value as usize)?;
                        continue;
                    }
                    0x10 => accumulator == source,
                    0x20 => accumulator > source,
                    0x30 => accumulator >= source,
                    0x40 => accumulator & source != 0,
                    _ => return None,
                };
                at += usize::from(if holds { if_true } else { if_false });
            }
            0x06 => return Some(if code & 0x18 == 0x10 { accumulator } else { value }),
            _ if code & 0xf8 == 0 => index = accumulator,
            _ => accumulator = index,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: u16 = 0x20;
    const EQUALS: u16 = 0x15;
    const HAS_BITS: u16 = 0x45;
    const AT_LEAST: u16 = 0x35;
    const GO: u16 = 0x05;
    const RETURN: u16 = 0x06;
    const REFUSE: u32 = 0x0005_0001;
    const KILL: u32 = 0x8000_0000;

    fn of(lines: &[(u16, u8, u8, u32)]) -> Vec<Instruction> {
        let line = |(code, if_true, if_false, value): (u16, u8, u8, u32)| {
            let ([low, high], [a, b, c, d]) = (code.to_ne_bytes(), value.to_ne_bytes());
            [low, high, if_true, if_false, a, b, c, d]
        };
        lines.iter().copied().map(line).collect()
    }

    #[test]
    fn a_filter_that_forbids_other_calls_lets_the_pager_go_on() {
        let program = of(&[
            (LOAD, 0, 0, 0),
            (EQUALS, 0, 1, uapi::__NR_reboot),
            (RETURN, 0, 0, REFUSE),
            (EQUALS, 0, 1, uapi::__NR_mount),
            (RETURN, 0, 0, KILL),
            (RETURN, 0, 0, RET_ALLOW),
        ]);
        assert!(lets_pager_go_on(&program));
    }

    #[test]
    fn a_filter_that_forbids_one_of_its_calls_does_not() {
        for (number, _) in CALLS {
            for action in [REFUSE, KILL, 0, 0x0003_0000] {
                let program =
                    of(&[(LOAD, 0, 0, 0), (EQUALS, 0, 1, *number), (RETURN, 0, 0, action), (RETURN, 0, 0, RET_ALLOW)]);
                assert!(!lets_pager_go_on(&program), "call {number} with {action:#x}");
            }
        }
    }

    #[test]
    fn a_filter_may_refuse_what_can_be_done_without_but_not_kill_for_it() {
        for number in CALLS_REFUSABLE {
            for (action, goes_on) in [(REFUSE, true), (KILL, false), (0x0003_0000, false)] {
                let program =
                    of(&[(LOAD, 0, 0, 0), (EQUALS, 0, 1, *number), (RETURN, 0, 0, action), (RETURN, 0, 0, RET_ALLOW)]);
                assert_eq!(lets_pager_go_on(&program), goes_on, "call {number} with {action:#x}");
            }
        }
    }

    #[test]
    fn a_filter_may_refuse_memory_that_may_be_executed_but_not_kill_for_it() {
        for (action, lets) in [(REFUSE, true), (KILL, false)] {
            // The rights are the third argument.
            let program = of(&[
                (LOAD, 0, 0, 0),
                (EQUALS, 0, 3, uapi::__NR_mprotect),
                (LOAD, 0, 0, 32),
                (HAS_BITS, 0, 1, uapi::PROT_EXEC),
                (RETURN, 0, 0, action),
                (RETURN, 0, 0, RET_ALLOW),
            ]);
            assert_eq!((lets_pager_go_on(&program), lets_ask_for_code(&program)), (true, lets), "{action:#x}");
        }
    }

    #[test]
    fn a_filter_may_look_at_arguments_and_the_architecture() {
        // Of ioctl only the terminal's; everything else is allowed, on this architecture.
        let only_terminals = of(&[
            (LOAD, 0, 0, 4),
            (EQUALS, 1, 0, AUDIT_ARCH_X86_64),
            (RETURN, 0, 0, KILL),
            (LOAD, 0, 0, 0),
            (EQUALS, 0, 3, uapi::__NR_ioctl),
            (LOAD, 0, 0, 24),
            (EQUALS, 1, 0, 0x5401),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, RET_ALLOW),
        ]);
        assert!(!lets_pager_go_on(&only_terminals));
        // No thread may be made that is no thread of libc's.
        let no_bare_threads = of(&[
            (LOAD, 0, 0, 0),
            (EQUALS, 0, 4, uapi::__NR_clone),
            (LOAD, 0, 0, 16),
            (HAS_BITS, 1, 0, uapi::CLONE_THREAD),
            (RETURN, 0, 0, REFUSE),
            (GO, 0, 0, 0),
            (RETURN, 0, 0, RET_ALLOW),
        ]);
        assert!(lets_pager_go_on(&no_bare_threads));
    }

    #[test]
    fn numbers_are_computed_with_as_the_kernel_does() {
        let data: Data = core::array::from_fn(|place| place as u32 * 10);
        let result = |lines: &[(u16, u8, u8, u32)]| run(&of(lines), &data);
        // The accumulator is returned; index and memory hold what they are given.
        let sum = [(LOAD, 0, 0, 8), (0x02, 0, 0, 3), (0x61, 0, 0, 3), (0x0c, 0, 0, 0), (0x16, 0, 0, 0)];
        assert_eq!(result(&sum), Some(40));
        assert_eq!(result(&[(0x00, 0, 0, 7), (0x34, 0, 0, 0), (0x16, 0, 0, 0)]), Some(0));
        assert_eq!(result(&[(0x80, 0, 0, 0), (0x07, 0, 0, 0), (0x87, 0, 0, 0), (0x16, 0, 0, 0)]), Some(64));
        assert_eq!(result(&[(LOAD, 0, 0, 20), (AT_LEAST, 0, 1, 50), (RETURN, 0, 0, 1), (RETURN, 0, 0, 2)]), Some(1));
        assert_eq!(result(&[(LOAD, 0, 0, 64)]), None, "there is nothing behind the last argument");
        assert_eq!(result(&[(LOAD, 0, 0, 0)]), None, "it must return");
        assert_eq!(result(&[]), None);
    }
}
