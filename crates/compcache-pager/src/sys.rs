//! System calls that rustix does not wrap, made directly: no errno, no thread-local storage, no libc.
//!
//! The pager's threads run inside somebody else's program and may touch nothing that could itself be evicted. libc's
//! wrappers write `errno`, which lies in thread-local storage; so here is the bare instruction instead. What rustix has
//! (its `linux_raw` backend is built the same way) is used from there.

use core::arch::{asm, naked_asm};
use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*, compiler_fence};

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("the pager knows the system call and thread conventions of Linux on x86-64 only");

/// An error number of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

#[allow(missing_docs, reason = "as errno.h has them")]
impl Errno {
    pub const ENOENT: Errno = Errno(2);
    pub const ESRCH: Errno = Errno(3);
    pub const EAGAIN: Errno = Errno(11);
    pub const ENOMEM: Errno = Errno(12);
    pub const EFAULT: Errno = Errno(14);
    pub const EBUSY: Errno = Errno(16);
    pub const EEXIST: Errno = Errno(17);
    pub const EINVAL: Errno = Errno(22);
}

const SYS_CLOSE: usize = 3;
const SYS_RT_SIGACTION: usize = 13;
const SYS_RT_SIGPROCMASK: usize = 14;
const SYS_EXIT: usize = 60;
const SYS_EXIT_GROUP: usize = 231;
const SYS_TGKILL: usize = 234;
const SYS_DUP3: usize = 292;
const SYS_IOCTL: usize = 16;
const SYS_MREMAP: usize = 25;
const SYS_MINCORE: usize = 27;
const SYS_CAPSET: usize = 126;
const SYS_FUTEX: usize = 202;
const SYS_SET_ROBUST_LIST: usize = 273;
const SYS_GET_ROBUST_LIST: usize = 274;
const SYS_PROCESS_VM_READV: usize = 310;
const SYS_PROCESS_VM_WRITEV: usize = 311;
const SYS_SCHED_SETATTR: usize = 314;
const SYS_SCHED_GETATTR: usize = 315;
const SYS_CLOSE_RANGE: usize = 436;

/// One system call.
///
/// # Safety
/// As the kernel's documentation of call `number` has it.
unsafe fn call(number: usize, args: [usize; 4]) -> Result<usize, Errno> {
    // SAFETY: the caller's own call; the two arguments more are ignored.
    unsafe { call6(number, [args[0], args[1], args[2], args[3], 0, 0]) }
}

/// As [`call`], with six arguments.
///
/// # Safety
/// As [`call`].
pub unsafe fn call6(number: usize, args: [usize; 6]) -> Result<usize, Errno> {
    let result: isize;
    // SAFETY: the system call convention of x86-64 Linux; the caller answers for what the call does.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2], in("r10") args[3],
            in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    if (-4095..0).contains(&result) { Err(Errno(-result as i32)) } else { Ok(result as usize) }
}

/// Writes a word of the program's memory without changing it, so that the page it lies on becomes this process's alone:
/// after a fork pages are shared until somebody writes.
///
/// The operation is a futex's (`FUTEX_WAKE_OP`, or with nothing): atomic against the program's own writes, and an address
/// that is not there is an error and not a fault of ours; so is a page that has left, for which the kernel does not wait here.
pub fn write_nothing(address: usize) -> bool {
    const FUTEX_WAKE_OP_PRIVATE: usize = 5 | 128;
    const OR_NOTHING: usize = 2 << 28;
    let own = core::sync::atomic::AtomicU32::new(0);
    // SAFETY: both words are aligned; the kernel changes no bit of either. Waking a waiter on the program's word, should
    // there be one, is what a futex's users must expect at any time.
    unsafe { call6(SYS_FUTEX, [own.as_ptr() as usize, FUTEX_WAKE_OP_PRIVATE, 0, 0, address, OR_NOTHING]) }.is_ok()
}

/// Sees to it that the calling thread's stack is there, as far as a few calls go.
#[inline(never)]
pub fn touch_stack() {
    let here = 0u8;
    touch_below(&raw const here as usize);
}

/// Sees to it that what is below an address is there, if it can be, as far as a few calls go.
pub fn touch_below(address: usize) {
    const PAGES: usize = 5;
    for page in 0..PAGES {
        write_nothing(address.saturating_sub(page * crate::memory::PAGE + 1) & !3);
    }
}

/// Writes to an address of this process that may not be there. False when it is not, or is read-only.
pub fn write_own_memory(address: usize, bytes: &[u8]) -> bool {
    // SAFETY: the kernel only reads the local side; the caller decides what lies at the address.
    unsafe { transfer(SYS_PROCESS_VM_WRITEV, bytes.as_ptr() as usize, address, bytes.len()) }
}

/// Reads from an address of this process that may not be there. False when it is not. What is evicted comes back.
pub fn read_own_memory(address: usize, bytes: &mut [u8]) -> bool {
    // SAFETY: the local side is the caller's to write to.
    unsafe { transfer(SYS_PROCESS_VM_READV, bytes.as_mut_ptr() as usize, address, bytes.len()) }
}

/// Sees to it that what was at an address comes back, if anything was evicted there. What it belongs to is not written to, unless reading is refused (by a filter).
pub fn bring_back(address: usize) {
    let mut byte = [0u8];
    // SAFETY: as above.
    let read = unsafe { try_transfer(SYS_PROCESS_VM_READV, byte.as_mut_ptr() as usize, address, 1) };
    if !matches!(read, Ok(_) | Err(Errno::EFAULT)) {
        write_nothing(address & !3);
    }
}

/// Whether a page of this process's is mapped. Yes where the kernel may not be asked.
pub fn is_mapped(address: usize) -> bool {
    let mut resident = 0u8;
    // SAFETY: the kernel writes one byte for one page.
    let asked = unsafe { call(SYS_MINCORE, [address, crate::memory::PAGE, &raw mut resident as usize, 0]) };
    asked != Err(Errno::ENOMEM)
}

/// Whether there is a page at an address of private memory, also where /proc is not. No where the system has swapped it out.
pub fn is_present(address: usize) -> bool {
    let mut resident = 0u8;
    // SAFETY: the kernel writes one byte for one page.
    let asked = unsafe { call(SYS_MINCORE, [address, crate::memory::PAGE, &raw mut resident as usize, 0]) };
    asked.is_ok() && resident & 1 == 1
}

/// process_vm_readv or process_vm_writev with one vector on each side.
///
/// # Safety
/// As that call's, for `len` bytes at `local`.
unsafe fn transfer(number: usize, local: usize, address: usize, len: usize) -> bool {
    // SAFETY: as this call's.
    unsafe { try_transfer(number, local, address, len) == Ok(len) }
}

/// As [`transfer`], with what the kernel says; how many bytes.
///
/// # Safety
/// As that call's.
unsafe fn try_transfer(number: usize, local: usize, address: usize, len: usize) -> Result<usize, Errno> {
    let (local, remote) = ([local, len], [address, len]);
    // By the calling thread's number: a main thread that has ended has no memory.
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as usize;
    let vectors = [thread, local.as_ptr() as usize, 1, remote.as_ptr() as usize, 1, 0];
    // SAFETY: the vectors live over the call; the caller answers for what they name.
    unsafe { call6(number, vectors) }
}

/// `ioctl(fd, request, argument)`.
///
/// # Safety
/// `argument` must be what `request` reads and writes.
pub unsafe fn ioctl<T>(fd: i32, request: u32, argument: &mut T) -> Result<usize, Errno> {
    // SAFETY: the caller pairs request and argument; the borrow keeps the argument alive and unshared.
    unsafe { call(SYS_IOCTL, [fd as usize, request as usize, core::ptr::from_mut(argument) as usize, 0]) }
}

/// `ioctl(fd, request, value)`, for the requests that take a number.
///
/// # Safety
/// `request` must take its argument by value.
pub unsafe fn ioctl_value(fd: i32, request: u32, value: usize) -> Result<usize, Errno> {
    // SAFETY: no pointer is passed; the caller answers for the request.
    unsafe { call(SYS_IOCTL, [fd as usize, request as usize, value, 0]) }
}

/// Moves the page tables of `[from, from + len)` to `to`, whatever is mapped there; the old range stays, empty.
///
/// # Safety
/// Nobody may want what is mapped at `to`, and somebody must answer for what was at `from`.
pub unsafe fn mremap_dont_unmap(from: usize, len: usize, to: usize) -> Result<(), Errno> {
    const MAYMOVE_FIXED_DONTUNMAP: usize = 1 | 2 | 4;
    // SAFETY: says the caller.
    unsafe { call6(SYS_MREMAP, [from, len, len, MAYMOVE_FIXED_DONTUNMAP, to, 0]) }.map(drop)
}

/// Closes every descriptor of the calling thread's file table but these; negative ones are none.
///
/// # Safety
/// The caller owns the whole file table, as a thread started without `CLONE_FILES` does.
pub unsafe fn close_all_descriptors_but<const N: usize>(mut kept: [i32; N]) {
    kept.sort_unstable();
    let mut from = 0;
    for kept in kept.into_iter().filter(|kept| *kept >= 0).map(|kept| kept as usize).chain([u32::MAX as usize + 1]) {
        if from < kept {
            // SAFETY: close_range has no effect outside the file table, which is the caller's.
            let closed = unsafe { call(SYS_CLOSE_RANGE, [from, kept - 1, 0, 0]) };
            if closed.is_err() {
                // Linux before 5.9, or a filter.
                crate::process::for_each_descriptor(|number| {
                    if (from..kept).contains(&(number as usize)) {
                        // SAFETY: as above.
                        let _ = unsafe { call(SYS_CLOSE, [number as usize, 0, 0, 0]) };
                    }
                });
            }
        }
        from = kept + 1;
    }
}

/// Gives up every capability of the calling thread. Its descriptors keep what they were opened with.
pub fn drop_capabilities() {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let header = Header { version: 0x2008_0522, pid: 0 };
    let data = [0u32; 6];
    // SAFETY: version 3 of the interface reads one header and two times three words, which is what is passed.
    let _ = unsafe { call(SYS_CAPSET, [&raw const header as usize, data.as_ptr() as usize, 0, 0]) };
}

/// Asks the scheduler for short, prompt slices for the calling thread (Linux 6.12; ignored before). Its policy and its nice value stay what the program's are.
pub fn ask_for_short_slices(slice_ns: u64) {
    const SCHED_OTHER: u32 = 0;
    const SCHED_BATCH: u32 = 3;
    #[repr(C)]
    struct SchedAttr {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    let size = size_of::<SchedAttr>() as u32;
    let mut attr = SchedAttr { size, policy: 0, flags: 0, nice: 0, priority: 0, runtime: 0, deadline: 0, period: 0 };
    // SAFETY: the kernel writes `size` bytes to the structure.
    let known = unsafe { call(SYS_SCHED_GETATTR, [0, &raw mut attr as usize, size as usize, 0]) };
    if known.is_err() || ![SCHED_OTHER, SCHED_BATCH].contains(&attr.policy) {
        return;
    }
    let attr = SchedAttr { size, runtime: slice_ns, deadline: 0, period: 0, ..attr };
    // SAFETY: the kernel reads `size` bytes of the structure and keeps no pointer.
    let _ = unsafe { call(SYS_SCHED_SETATTR, [0, &raw const attr as usize, 0, 0]) };
}

/// The list the kernel walks when a thread ends or executes something else: each futex word on it that holds the thread's id
/// is marked `FUTEX_OWNER_DIED`.
///
/// There is one word at most, as the *pending* entry, which the kernel treats like any other and which needs no list node
/// beside it. It is put on before the thread's id is written to it, so that no death goes unseen; as long as it does not hold
/// the id the kernel leaves it alone.
#[repr(C)]
pub struct RobustList {
    head: AtomicPtr<RobustList>,
    futex_offset: isize,
    pending: AtomicPtr<AtomicU32>,
}

const _: () = assert!(size_of::<RobustList>() == 24);

impl RobustList {
    /// A list with nothing on it.
    pub const fn empty() -> Self {
        RobustList { head: AtomicPtr::new(null_mut()), futex_offset: 0, pending: AtomicPtr::new(null_mut()) }
    }

    /// Registers this list for the calling thread, with nothing on it.
    ///
    /// # Safety
    /// The list must stay where it is until the thread has ended or has registered another, and no other thread may have it.
    pub unsafe fn register(&self) {
        // What a parent watched is not this process's.
        self.watch(None);
        self.head.store(core::ptr::from_ref(self).cast_mut(), Relaxed);
        set_robust_list(self);
    }

    /// Runs `work`, which must not panic, with a list that stands in for the calling thread's meanwhile.
    pub fn with_own<T>(work: impl FnOnce(&RobustList) -> T) -> T {
        const CALLING: u32 = 0;
        let before = robust_list_of(CALLING).map_or(core::ptr::null(), |head| head as *const RobustList);
        let own = RobustList::empty();
        // SAFETY: the one there was is registered again before this one goes.
        unsafe { own.register() };
        let result = work(&own);
        set_robust_list(before);
        result
    }

    /// Makes `word` the list's only futex, or takes it off. It must stay mapped while it is on the list.
    pub fn watch(&self, word: Option<&AtomicU32>) {
        // The kernel may look between any two instructions of this thread.
        compiler_fence(SeqCst);
        self.pending.store(word.map_or(null_mut(), |word| core::ptr::from_ref(word).cast_mut()), Relaxed);
        compiler_fence(SeqCst);
    }
}

fn set_robust_list(list: *const RobustList) {
    // SAFETY: the kernel keeps the address and reads the list when the thread ends; RobustList's functions see to it that it is
    // there.
    let _ = unsafe { call(SYS_SET_ROBUST_LIST, [list as usize, size_of::<RobustList>(), 0, 0]) };
}

/// Where the list of robust futexes of a thread of this process begins; `None` when it has none, or is not there.
pub fn robust_list_of(thread: u32) -> Option<usize> {
    let (mut head, mut len) = (0usize, 0usize);
    // SAFETY: the kernel writes one word to each of the two places and keeps no pointer.
    unsafe { call(SYS_GET_ROBUST_LIST, [thread as usize, &raw mut head as usize, &raw mut len as usize, 0]) }.ok()?;
    (head != 0).then_some(head)
}

const CLONE_VM: usize = 0x100;
const CLONE_FILES: usize = 0x400;
const CLONE_SIGHAND: usize = 0x800;
const CLONE_THREAD: usize = 0x1_0000;
const CLONE_SYSVSEM: usize = 0x4_0000;
const CLONE_SETTLS: usize = 0x8_0000;

/// Blocks every signal for the calling thread; returns the mask there was.
pub fn block_signals() -> u64 {
    const SIG_SETMASK: usize = 2;
    let (all, mut before) = (u64::MAX, 0u64);
    // SAFETY: the kernel reads and writes masks of the size given.
    let _ = unsafe { call(SYS_RT_SIGPROCMASK, [SIG_SETMASK, &raw const all as usize, &raw mut before as usize, 8]) };
    before
}

/// Puts back what [`block_signals`] returned.
pub fn restore_signals(mask: u64) {
    const SIG_SETMASK: usize = 2;
    // SAFETY: the kernel reads a mask of the size given.
    let _ = unsafe { call(SYS_RT_SIGPROCMASK, [SIG_SETMASK, &raw const mask as usize, 0, 8]) };
}

/// Whose file table a new thread gets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Files {
    /// Its own, at first a copy of the caller's.
    Own,
    /// The caller's.
    Shared,
}

/// Ends the calling thread, and no other.
pub fn end_thread() -> ! {
    loop {
        // SAFETY: the thread is one of `start_thread`: nobody waits for it, and nothing is left to be undone.
        let _ = unsafe { call(SYS_EXIT, [0; 4]) };
    }
}

/// Ends the process.
pub fn end_process(status: i32) -> ! {
    loop {
        // SAFETY: nothing comes after it.
        let _ = unsafe { call(SYS_EXIT_GROUP, [status as usize, 0, 0, 0]) };
    }
}

/// Ends the process by SIGABRT, also where the program handles, ignores or blocks it.
pub fn abort() -> ! {
    const SIGABRT: usize = 6;
    const SIGKILL: usize = 9;
    const SIG_UNBLOCK: usize = 1;
    let process = rustix::process::getpid().as_raw_nonzero().get() as usize;
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as usize;
    // As the kernel's sigaction: no handler, no flags.
    let (default, only_abort) = ([0u64; 4], 1u64 << (SIGABRT - 1));
    // SAFETY: the kernel reads a sigaction and a mask of the size given; nothing of the program's goes on after it.
    unsafe {
        let _ = call(SYS_RT_SIGACTION, [SIGABRT, default.as_ptr() as usize, 0, 8]);
        let _ = call(SYS_RT_SIGPROCMASK, [SIG_UNBLOCK, &raw const only_abort as usize, 0, 8]);
        let _ = call(SYS_TGKILL, [process, thread, SIGABRT, 0]);
        // Another thread has set a handler in this instant.
        let _ = call(SYS_TGKILL, [process, thread, SIGKILL, 0]);
    }
    // The first process of a namespace, which its own signals do not end.
    end_process(127)
}

/// Whether the kernel knows a thread of this number in this process.
pub fn is_own_thread(thread: u32) -> bool {
    let process = rustix::process::getpid().as_raw_nonzero().get() as usize;
    // SAFETY: signal 0 is none.
    let asked = unsafe { call(SYS_TGKILL, [process, thread as usize, 0, 0]) };
    asked != Err(Errno::ESRCH)
}

/// Makes `number` another name of a descriptor, in the calling thread's table.
pub fn duplicate_to(descriptor: i32, number: i32) -> Result<(), Errno> {
    const O_CLOEXEC: usize = 0o2_000_000;
    // SAFETY: the caller's table; what had the number is closed.
    unsafe { call(SYS_DUP3, [descriptor as usize, number as usize, O_CLOEXEC, 0]) }.map(drop)
}

/// Starts a thread that libc does not know: `entry(argument)` on the given stack.
///
/// A thread of libc's would be counted by it (`pthread_exit` in the main thread would wait for ours for ever) and would
/// have its bookkeeping in the program's heap. This one has nothing: no errno, no thread-local storage of anybody; `tls`
/// only gives compiled C code's stack protector a word to read.
///
/// # Safety
/// `stack_top` is the end of a writable stack used by nobody else until the thread has ended; `tls` points to 64 writable
/// bytes of the same life. `entry` must not return, and must touch no thread-local storage.
pub unsafe fn start_thread(
    stack_top: *mut u8,
    tls: *mut u8,
    files: Files,
    entry: extern "C" fn(*mut c_void) -> !,
    argument: *mut c_void,
) -> Result<u32, Errno> {
    let mut flags = CLONE_VM | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS;
    if files == Files::Shared {
        flags |= CLONE_FILES;
    }
    // SAFETY: `clone_thread` follows the kernel's clone convention; the caller answers for stack, tls and entry.
    let result = unsafe { clone_thread(flags, stack_top as usize & !15, tls as usize, entry, argument) };
    if result < 0 { Err(Errno(-result as i32)) } else { Ok(result as u32) }
}

/// Runs `work` on another stack, and returns on this one.
///
/// # Safety
/// `stack_top` is the end of a writable stack, deep enough, used by nobody else meanwhile. `work` must not panic.
pub unsafe fn call_on_stack(stack_top: *mut u8, mut work: &mut dyn FnMut()) {
    extern "C" fn enter(work: *mut c_void) {
        // SAFETY: what is passed below, alive until this returns.
        unsafe { (*work.cast::<&mut dyn FnMut()>())() }
    }
    // SAFETY: says the caller.
    unsafe { switch_stack(stack_top as usize & !15, enter, (&raw mut work).cast()) };
}

#[unsafe(naked)]
unsafe extern "C" fn switch_stack(stack_top: usize, entry: extern "C" fn(*mut c_void), argument: *mut c_void) {
    naked_asm!("push rbp", "mov rbp, rsp", "mov rsp, rdi", "mov rdi, rdx", "call rsi", "mov rsp, rbp", "pop rbp", "ret",)
}

/// clone(2): returns the new thread's id, or the negative error number; the new thread goes to `entry(argument)`.
#[unsafe(naked)]
unsafe extern "C" fn clone_thread(
    flags: usize,
    stack_top: usize,
    tls: usize,
    entry: extern "C" fn(*mut c_void) -> !,
    argument: *mut c_void,
) -> isize {
    naked_asm!(
        "mov r9, rcx",  // entry, kept over the system call, which clobbers rcx
        "mov r11, r8",  // the kernel's r8 is tls
        "mov r8, rdx",  // tls
        "xor r10, r10", // child_tid
        "xor rdx, rdx", // parent_tid
        "push r12",
        "mov r12, r11", // argument
        "mov eax, 56",
        "syscall",
        "test rax, rax",
        "jz 2f",
        "pop r12",
        "ret",
        "2:",
        "xor ebp, ebp",
        "mov rdi, r12",
        "call r9",
        "ud2",
    )
}
