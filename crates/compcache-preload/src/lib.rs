//! The shared object that puts the pager into a program: a constructor, the fork handlers and what copies the process past them, and
//! a look at each new thread's control block, at each robust mutex, at locked memory, vmsplice, direct input and guard pages.
//! Everything else is `compcache-pager`.
//!
//! `compcache run` names this object in `LD_PRELOAD` and the tree's shared region in `COMPCACHE_REGION`. Without that
//! variable, or where anything is missing, the object does nothing: a program must run unpaged rather than not at all.
//!
//! No `std`: the pager's threads may touch no thread-local storage and no allocator of the program's, and without `std`
//! nothing here can do so by accident. What is called of libc is called in the program's own threads only.

#![no_std]

extern crate alloc;

mod copies;
mod devices;
mod filters;
mod guards;
mod handed;
mod libc;
mod namespaces;
mod task_count;
mod threads;

use compcache_pager::fork;
use compcache_pager::memory::{self, SetupHeap};
use compcache_pager::pager::Pager;
use compcache_pager::read_own_memory;
use compcache_pager::shared::{self, Region, Trouble};
use core::arch::global_asm;
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering::*};
use rustix::fs::{Mode, OFlags};

#[global_allocator]
static HEAP: SetupHeap = SetupHeap::new();

/// The version of the tree's region that this object knows: `compcache run` reads it off the file, for it must know the same.
#[unsafe(no_mangle)]
pub static COMPCACHE_REGION_VERSION: u32 = shared::VERSION;

/// This process's pager; null when it has none.
static PAGER: AtomicPtr<Pager> = AtomicPtr::new(null_mut());

#[panic_handler]
fn panic(panic: &core::panic::PanicInfo<'_>) -> ! {
    // A bug of ours, in a thread that must not print: the tree's region carries the news to `compcache run`.
    if let Some(pager) = pager() {
        let line = panic.location().map_or(0, core::panic::Location::line);
        pager.region.note_trouble(shared::Trouble::Bug, line as i32);
    }
    compcache_pager::abort()
}

// Named by the unwind tables of the precompiled core library; nothing here ever unwinds. Hidden: a program that has one in a shared object of its own
// (rustc) would be given this one.
global_asm!(".globl rust_eh_personality", ".hidden rust_eh_personality", "rust_eh_personality: ud2");

fn pager() -> Option<&'static Pager> {
    // SAFETY: null, or a pager that is never freed.
    unsafe { PAGER.load(Acquire).as_ref() }
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = construct;

extern "C" fn construct(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    if !libc::is_glibc() {
        return;
    }
    // SAFETY: glibc's loader passes the program's environment, a list that ends with a null pointer.
    let Some(path) = (unsafe { variable(environment, shared::ENV_REGION.as_bytes()) }) else { return };
    let Some(region) = map_region(path) else { return };
    // SAFETY: as above; nothing of the program's has run yet.
    unsafe { handed::take_over(environment, region.header.supervisor.load(Relaxed)) };
    if libc::has_sanitizer() {
        return region.note_trouble(Trouble::Sanitizer, 0);
    }
    libc::real::look_up();
    // SAFETY: as above.
    let spill_to = unsafe { variable(environment, shared::ENV_SPILL.as_bytes()) };
    match Pager::new(region, spill_to) {
        Ok(pager) => {
            PAGER.store(core::ptr::from_ref(pager).cast_mut(), Release);
            threads::learn();
            devices::note_inherited(pager);
            libc::register_fork_handlers(before_fork, after_fork_in_parent, after_fork_in_child);
            if let Err(trouble) = pager.start() {
                region.note_trouble(trouble, 0);
            }
            // SAFETY: the loader calls this on the process's first stack.
            unsafe { memory::give_back_dead_stack() };
        }
        Err(trouble) => region.note_trouble(trouble, 0),
    }
}

/// The value of an environment variable.
///
/// # Safety
/// As [`entry`].
unsafe fn variable(environment: *const *const c_char, name: &[u8]) -> Option<&'static CStr> {
    // SAFETY: says the caller.
    unsafe { entry(environment, name) }.map(|(_, value)| value)
}

/// Where an environment variable is in the list, and its value.
///
/// # Safety
/// `environment` must be null or a list of strings that ends with a null pointer, alive for the whole process.
unsafe fn entry(environment: *const *const c_char, name: &[u8]) -> Option<(usize, &'static CStr)> {
    if environment.is_null() {
        return None;
    }
    for place in 0.. {
        // SAFETY: not past the null pointer that ends the list, says the caller.
        let entry = unsafe { *environment.add(place) };
        if entry.is_null() {
            return None;
        }
        // SAFETY: an entry of the environment is a string.
        let entry = unsafe { CStr::from_ptr(entry) };
        let bytes = entry.to_bytes_with_nul();
        if bytes.starts_with(name) && bytes.get(name.len()) == Some(&b'=') {
            return CStr::from_bytes_with_nul(&bytes[name.len() + 1..]).ok().map(|value| (place, value));
        }
    }
    None
}

/// Maps the tree's region; `None` when it is not there or not of this version.
fn map_region(path: &CStr) -> Option<&'static Region> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let size = rustix::fs::fstat(&file).ok()?.st_size;
    if (size as u64) < shared::REGION_BYTES as u64 {
        return None;
    }
    // SAFETY: a new shared mapping, of a file large enough for the structure; all of it is atomics, so that whatever
    // other processes write is a value.
    let region: &'static Region = unsafe {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        &*mmap(null_mut(), shared::REGION_BYTES, flags, MapFlags::SHARED, &file, 0).ok()?.cast::<Region>()
    };
    let known =
        region.header.magic.load(Relaxed) == shared::MAGIC && region.header.version.load(Relaxed) == shared::VERSION;
    known.then_some(region)
}

extern "C" fn before_fork() {
    if let Some(pager) = pager()
        && fork::prepare(pager)
    {
        // What libc touches in the child before its handlers run must be there.
        libc::touch_streams();
        threads::touch_all();
        threads::touch_libcs_own();
    }
}

extern "C" fn after_fork_in_parent() {
    if let Some(pager) = pager() {
        fork::parent(pager);
    }
}

extern "C" fn after_fork_in_child() {
    if let Some(pager) = pager() {
        // SAFETY: called by fork in the child, in its only thread.
        unsafe { fork::child(pager) };
    }
}

/// `pthread_create`, with a look at the new thread's control block.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    let Some(real) = libc::real::pthread_create() else { return libc::EAGAIN };
    let Some(pager) = pager() else {
        // SAFETY: the caller's own call, passed on.
        return unsafe { real(thread, attributes, start, argument) };
    };
    // SAFETY: the caller's own call, passed on.
    let result = unsafe { real(thread, attributes, start, argument) };
    // Once the pager has left, the program's filter may forbid what it does.
    if result != 0 || !pager.is_at_work() {
        return result;
    }
    // In glibc a thread's handle is the address of its control block. By the kernel, unless a filter may be in the way: the new thread may have
    // unmapped where it was written to.
    let mut handle = [0; size_of::<usize>()];
    let is_read = match pager.is_filtered() {
        false => read_own_memory(thread as usize, &mut handle),
        true => {
            // SAFETY: libc has written it.
            handle = unsafe { thread.cast::<[u8; size_of::<usize>()]>().read_volatile() };
            true
        }
    };
    if is_read {
        pager.add_control_block(usize::from_ne_bytes(handle));
    }
    result
}

/// `mlockall`, with what the pager keeps left out.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    // SAFETY: the caller's own call, passed on.
    let lock = || libc::real::mlockall().map_or(-1, |real| unsafe { real(flags) });
    match pager() {
        Some(pager) => pager.while_memory_is_locked(lock),
        None => lock(),
    }
}

/// `mlock`, with the pager told.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *const c_void, len: usize) -> c_int {
    // SAFETY: the caller's own call, passed on.
    lock(address, len, || libc::real::mlock().map_or(-1, |real| unsafe { real(address, len) }))
}

/// `mlock2`, as [`mlock`].
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *const c_void, len: usize, flags: c_uint) -> c_int {
    // SAFETY: the caller's own call, passed on.
    lock(address, len, || libc::real::mlock2().map_or(-1, |real| unsafe { real(address, len, flags) }))
}

fn lock(address: *const c_void, len: usize, lock: impl FnOnce() -> c_int) -> c_int {
    // Before: what leaves after it was locked would stay away. A call that fails may have locked a part.
    pager().inspect(|pager| pager.set_locked(address as usize, len, true));
    lock()
}

/// `munlock`, with the pager told.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlock(address: *const c_void, len: usize) -> c_int {
    // SAFETY: the caller's own call, passed on.
    let result = libc::real::munlock().map_or(-1, |real| unsafe { real(address, len) });
    if result == 0 {
        pager().inspect(|pager| pager.set_locked(address as usize, len, false));
    }
    result
}

/// `munlockall`, with the pager told.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlockall() -> c_int {
    // SAFETY: the caller's own call, passed on.
    let result = libc::real::munlockall().map_or(-1, |real| unsafe { real() });
    if result == 0 {
        pager().inspect(|pager| pager.set_all_unlocked());
    }
    result
}

/// `pthread_mutex_init`, with mutexes left where they are that the kernel writes to by itself, and does not wait for a pager when it does: robust ones,
/// when the thread ends that holds them, and those that inherit priorities, when they are not free.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_mutex_init(mutex: *mut c_void, attributes: *const c_void) -> c_int {
    let Some(real) = libc::real::pthread_mutex_init() else { return libc::EAGAIN };
    // SAFETY: the caller's own call, passed on.
    let result = unsafe { real(mutex, attributes) };
    // SAFETY: libc has just read these attributes and found them right.
    if result == 0 && unsafe { libc::is_kernels(attributes) } {
        pager().inspect(|pager| pager.keep(mutex as usize, libc::MUTEX_BYTES));
    }
    result
}

/// `madvise`, with the pager told of guard pages. What need not be kept any more (MADV_FREE) goes at once: memory is short, and the kernel could drop it
/// unseen wherever it is at that moment, on its way out as well.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    let Some(real) = libc::real::madvise() else { return -1 };
    // SAFETY: the caller's own call, passed on; or a part of what it does.
    let advise = |len, advice| unsafe { real(address, len, advice) };
    match pager() {
        Some(pager) if advice == libc::MADV_GUARD_INSTALL => guards::install(pager, address as usize, len, advise),
        Some(pager) if advice == libc::MADV_GUARD_REMOVE => guards::remove(pager, address as usize, len, advise),
        Some(_) if advice == libc::MADV_FREE => {
            // First as asked: of a file's pages it must not drop the changes.
            let freed = advise(len, advice);
            if freed == 0 {
                advise(len, libc::MADV_DONTNEED);
            }
            freed
        }
        _ => advise(len, advice),
    }
}

/// `vmsplice`, with the pages that are lent to the pipe left where they are.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmsplice(pipe: c_int, vectors: *const libc::Vector, count: usize, flags: c_uint) -> isize {
    let Some(real) = libc::real::vmsplice() else { return -1 };
    // SAFETY: the caller's own call, passed on.
    let lend = || unsafe { real(pipe, vectors, count, flags) };
    let Some(pager) = pager().filter(|_| !vectors.is_null() && count <= libc::VECTORS_MAX) else { return lend() };
    let keep = |vector: libc::Vector| pager.keep(vector.address, vector.len);
    if pager.is_filtered() {
        // The kernel may not be asked, and only it knows whether there is a vector. What leaves between the two is an old copy for the reader ([S43]).
        let lent = lend();
        if lent > 0 {
            // SAFETY: the kernel has read them.
            (0..count).for_each(|place| keep(unsafe { vectors.add(place).read_volatile() }));
        }
        return lent;
    }
    // By the kernel: of a vector that is not there it is to say so itself.
    for place in 0..count {
        let mut words = [[0; size_of::<usize>()]; 2];
        if !read_own_memory(vectors.wrapping_add(place) as usize, words.as_flattened_mut()) {
            break;
        }
        let [address, len] = words.map(usize::from_ne_bytes);
        keep(libc::Vector { address, len });
    }
    lend()
}
