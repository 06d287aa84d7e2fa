//! Copies of the process that the C library makes without calling fork handlers: `clone` without CLONE_VM, `_Fork`, and the bare
//! system calls by `syscall`. Sandboxes make theirs so (bubblewrap, systemd-nspawn, Chromium), for the flags that fork has not.

use crate::filters::{self, SYS_SECCOMP};
use crate::libc::{self, Start};
use crate::namespaces::{self, SYS_SETNS, SYS_UNSHARE};
use compcache_pager::fork::Copying;
use compcache_pager::pager::Pager;
use compcache_pager::{end_process, end_thread, read_own_memory};
use core::arch::naked_asm;
use core::ffi::{c_int, c_long, c_void};

/// As the kernel's asm/unistd_64.h.
const SYS_CLONE: usize = 56;
const SYS_FORK: usize = 57;
const SYS_CLONE3: usize = 435;
/// As the kernel's linux/sched.h.
const CLONE_VM: usize = 0x100;
const CLONE_FILES: usize = 0x400;
const CLONE_VFORK: usize = 0x4000;
const CLONE_CHILD_CLEARTID: usize = 0x0020_0000;
const CLONE_CHILD_SETTID: usize = 0x0100_0000;

/// A copy by `clone`, in its parent's stack and in its own.
struct Copied {
    copying: Copying,
    start: Start,
    argument: *mut c_void,
}

unsafe extern "C" fn begin_copied(copied: *mut c_void) -> c_int {
    // Taken from there first: the stack that the caller gave may lie above it, and be a small one.
    // SAFETY: what `clone` below passed: on the stack of the parent's thread, of which this process has a copy.
    let copied = unsafe { copied.cast::<Copied>().read() };
    // SAFETY: in the child, in its only thread; the caller's own function with its own argument.
    let status = unsafe {
        copied.copying.end_in_child();
        (copied.start)(copied.argument)
    };
    // libc would end this thread alone, and the pager's would go on until the evictor sees it.
    match copied.copying.is_alone() {
        true => end_process(status),
        false => end_thread(),
    }
}

/// `clone`, with a copy of the process paged before it begins. Its last three arguments may not be there; then nothing reads them.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    start: Start,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_thread: usize,
    tls: usize,
    child_thread: usize,
) -> c_int {
    let Some(real) = libc::real::clone() else { return -1 };
    if flags as usize & (CLONE_VM | CLONE_CHILD_CLEARTID) == CLONE_VM | CLONE_CHILD_CLEARTID {
        // The kernel writes to it when the thread ends, and does not wait for a pager then.
        crate::pager().inspect(|pager| pager.keep(child_thread, size_of::<c_int>()));
    }
    let Some(pager) = crate::pager().filter(|pager| pages(pager, flags as usize) && !stack.is_null()) else {
        // SAFETY: the caller's own call, passed on.
        return unsafe { real(start, stack, flags, argument, parent_thread, tls, child_thread) };
    };
    let copied = Copied { copying: Copying::begin(pager), start, argument };
    copied.copying.touch_below(stack as usize);
    touch_child_thread(&copied.copying, flags as usize, child_thread);
    let argument = (&raw const copied).cast_mut().cast();
    // SAFETY: the caller's own call, passed on; but for what it begins with, which does what the caller's does.
    let result = unsafe { real(begin_copied, stack, flags, argument, parent_thread, tls, child_thread) };
    copied.copying.end_in_parent();
    result
}

/// [`clone`], by its other name.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __clone(
    start: Start,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_thread: usize,
    tls: usize,
    child_thread: usize,
) -> c_int {
    // SAFETY: says the caller.
    unsafe { clone(start, stack, flags, argument, parent_thread, tls, child_thread) }
}

/// Whether a copy of the process by `clone` with these flags is paged.
///
/// Not one that shares the memory: it is none. Nor in such a one, or where a filter on system calls does not let a thread that comes from
/// this one do the pager's work. Nor when this one would stand still until the copy has become something else, and with it all that are
/// to wait until the copy is made; nor when the descriptors that are handed over in files would be this process's as well.
fn pages(pager: &Pager, flags: usize) -> bool {
    let shares_files = flags & CLONE_FILES != 0 && pager.spills();
    flags & (CLONE_VM | CLONE_VFORK) == 0 && !shares_files && pager.is_here() && !pager.is_filtered()
}

/// The kernel writes to this word in the child, before anything else happens there.
fn touch_child_thread(copying: &Copying, flags: usize, address: usize) {
    if flags & CLONE_CHILD_SETTID != 0 {
        copying.touch(address);
    }
}

/// `_Fork`, with the copy paged before it begins.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> c_int {
    // A glibc before 2.34 has none.
    // SAFETY: the caller's own call, passed on.
    let copy = || libc::real::_Fork().map_or(-1, |real| unsafe { real() } as isize);
    match crate::pager().filter(|pager| pages(pager, 0)) {
        Some(pager) => around(pager, |_| copy()) as c_int,
        None => copy() as c_int,
    }
}

/// Makes a copy of the process that goes on where this one does; `copy` returns 0 in it.
fn around(pager: &'static Pager, copy: impl FnOnce(&Copying) -> isize) -> isize {
    let copying = Copying::begin(pager);
    let result = copy(&copying);
    if result == 0 {
        // SAFETY: in the child, in its only thread.
        unsafe { copying.end_in_child() };
    } else {
        copying.end_in_parent();
    }
    result
}

/// What of a bare system call makes a copy of the process that goes on on the same stack: its flags, and where the child's number goes.
fn copies(number: usize, arguments: &[usize; 6]) -> Option<(usize, usize)> {
    let (flags, stack, child_thread) = match number {
        SYS_FORK => (0, 0, 0),
        SYS_CLONE => (arguments[0], arguments[1], arguments[3]),
        SYS_CLONE3 => {
            // As the kernel's clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack.
            let mut words = [[0; 8]; 6];
            let is_read =
                arguments[1] >= size_of_val(&words) && read_own_memory(arguments[0], words.as_flattened_mut());
            let [flags, _, child_thread, _, _, stack] = words.map(usize::from_ne_bytes);
            is_read.then_some((flags, stack, child_thread))?
        }
        _ => return None,
    };
    (stack == 0).then_some((flags, child_thread))
}

/// `syscall`, with copies of the process paged before they begin, and what wants a single thread made so.
///
/// As libc's it needs no stack for any other call: a thread may come out of one on another stack. An argument that the caller has not
/// passed is some number, which nothing reads.
///
/// # Safety
/// As libc's.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall() -> c_long {
    naked_asm!(
        ".cfi_startproc",
        "cmp rdi, {clone}",
        "je 3f",
        "cmp rdi, {fork}",
        "je 3f",
        "cmp rdi, {clone3}",
        "je 3f",
        "cmp rdi, {unshare}",
        "je 3f",
        "cmp rdi, {setns}",
        "je 3f",
        "cmp rdi, {seccomp}",
        "je 3f",
        "2:", // Any other call.
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "cmp rax, -4095",
        "jae 4f",
        "ret",
        "3:", // Perhaps not: its arguments into an array.
        "push [rsp + 8]",
        "push r9",
        "push r8",
        "push rcx",
        "push rdx",
        "push rsi",
        "mov rsi, rsp",
        "push rdi",
        ".cfi_adjust_cfa_offset 56",
        "call {special_call}",
        "pop rdi",
        "pop rsi",
        "pop rdx",
        "pop rcx",
        "pop r8",
        "pop r9",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -56",
        "cmp rax, {not_special}",
        "je 2b",
        "cmp rax, -4095",
        "jae 4f",
        "ret",
        "4:", // An error.
        "neg eax",
        "mov edi, eax",
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 8",
        "call {set_errno}",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -8",
        "mov rax, -1",
        "ret",
        ".cfi_endproc",
        clone = const SYS_CLONE,
        fork = const SYS_FORK,
        clone3 = const SYS_CLONE3,
        unshare = const SYS_UNSHARE,
        setns = const SYS_SETNS,
        seccomp = const SYS_SECCOMP,
        not_special = const NOT_SPECIAL,
        special_call = sym special_call,
        set_errno = sym set_errno,
    )
}

/// No result of a system call.
const NOT_SPECIAL: isize = -4096;

/// Makes the call if it copies the process or wants a single thread; returns what the kernel says.
extern "C" fn special_call(number: c_long, arguments: &[usize; 6]) -> isize {
    let Some(pager) = crate::pager() else { return NOT_SPECIAL };
    let made = match number as usize {
        SYS_UNSHARE => namespaces::unshare_alone(pager, arguments[0]),
        SYS_SECCOMP => {
            filters::before_seccomp(pager, arguments);
            None
        }
        SYS_SETNS => namespaces::setns_alone(pager, arguments[0], arguments[1]),
        // What a filter lets the program do it need not let us do.
        _ if pager.is_filtered() => None,
        number => copies(number, arguments).filter(|(flags, _)| pages(pager, *flags)).map(|(flags, child_thread)| {
            around(pager, |copying| {
                touch_child_thread(copying, flags, child_thread);
                // SAFETY: the caller's own call, passed on.
                unsafe { namespaces::call(number, *arguments) }
            })
        }),
    };
    made.unwrap_or(NOT_SPECIAL)
}

extern "C" fn set_errno(errno: c_int) {
    libc::set_errno(errno);
}
