//! What is used of the program's libc, and what is known of it.

use compcache_pager::read_own_memory;
use core::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use core::ptr::{null_mut, read_volatile};
use core::sync::atomic::{AtomicPtr, Ordering::*};

/// As libc's errno.h.
pub const EAGAIN: c_int = 11;
pub const ENOMEM: c_int = 12;
/// As libc's sys/mman.h.
pub const MADV_DONTNEED: c_int = 4;
pub const MADV_FREE: c_int = 8;
pub const MADV_GUARD_INSTALL: c_int = 102;
pub const MADV_GUARD_REMOVE: c_int = 103;

type Handler = extern "C" fn();
/// What a copy made by `clone` begins with.
pub type Start = unsafe extern "C" fn(*mut c_void) -> c_int;

#[link(name = "c")]
unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
    /// Whether mutexes made with these attributes are robust: `PTHREAD_MUTEX_ROBUST` in `robust`.
    fn pthread_mutexattr_getrobust(attributes: *const c_void, robust: *mut c_int) -> c_int;
    fn pthread_mutexattr_getprotocol(attributes: *const c_void, protocol: *mut c_int) -> c_int;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// As libc's sys/uio.h.
#[repr(C)]
pub struct Vector {
    pub address: usize,
    pub len: usize,
}

/// As libc's sys/stat.h, as far as the mode.
#[repr(C)]
pub struct Stat {
    pub device: u64,
    pub inode: u64,
    pub links: u64,
    pub mode: c_uint,
}

/// The most vectors of one call.
pub const VECTORS_MAX: usize = 1024;
/// Bytes of a `pthread_mutex_t`.
pub const MUTEX_BYTES: usize = 40;

const RTLD_NEXT: *mut c_void = -1isize as *mut c_void;

/// Words of a `FILE` of glibc's: its flags are the first, and the last of these says where its lock is. The same since 1997.
const STREAM_WORDS: usize = 0x88 / size_of::<usize>() + 1;
/// That which leads to the next in the list of all.
const CHAIN_WORD: usize = 0x68 / size_of::<usize>();

/// The address of a symbol that may be in none of the objects; then 0. The loader finds it when it loads this one.
macro_rules! weak_symbol {
    ($name:literal) => {{
        let address: usize;
        // SAFETY: reads a word of this object's own.
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $name),
                concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"),
                out(reg) address,
                options(nostack, pure, readonly, preserves_flags),
            );
        }
        address
    }};
}

/// Whether this process's libc is glibc, by two symbols that no other has. To call another's [`register_fork_handlers`] is a bug.
///
/// musl loads this object too, and hands no arguments to its constructor.
pub fn is_glibc() -> bool {
    weak_symbol!("__register_atfork") != 0 && weak_symbol!("_IO_list_all") != 0
}

/// Asks libc to call these around every fork.
pub fn register_fork_handlers(prepare: Handler, parent: Handler, child: Handler) {
    // pthread_atfork itself is in the part of libc that is linked statically; this is what it calls.
    type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;
    let address = weak_symbol!("__register_atfork") as *const c_void;
    // SAFETY: null is None; glibc's function by this name has this type.
    if let Some(register) = unsafe { core::mem::transmute::<*const c_void, Option<Register>>(address) } {
        // SAFETY: handlers are plain functions that live as long as the object, which is never unloaded.
        let _ = unsafe { register(prepare, parent, child, null_mut()) };
    }
}

/// The calling thread's errno.
pub fn errno() -> c_int {
    // SAFETY: libc's own word, alive as long as the thread.
    unsafe { *__errno_location() }
}

/// Where the calling thread's errno is.
pub fn errno_address() -> usize {
    // SAFETY: libc says where, and touches nothing.
    unsafe { __errno_location() as usize }
}

/// Sets the calling thread's errno.
pub fn set_errno(errno: c_int) {
    // SAFETY: as `errno`.
    unsafe { *__errno_location() = errno };
}

/// Whether attributes of a mutex ask for one that the kernel writes to by itself: a robust one, or one that inherits priorities.
///
/// # Safety
/// Null, or attributes that libc has initialised.
pub unsafe fn is_kernels(attributes: *const c_void) -> bool {
    const ROBUST: c_int = 1;
    const PRIO_INHERIT: c_int = 1;
    let (mut robust, mut protocol) = (0, 0);
    // SAFETY: says the caller.
    !attributes.is_null()
        && unsafe {
            pthread_mutexattr_getrobust(attributes, &mut robust) == 0 && robust == ROBUST
                || pthread_mutexattr_getprotocol(attributes, &mut protocol) == 0 && protocol == PRIO_INHERIT
        }
}

/// The functions of libc's, or of an object between, that are called when this object's are.
pub mod real {
    use super::*;

    macro_rules! functions {
        ($($name:ident: fn($($argument:ty),*) -> $result:ty;)*) => {
            $(
                /// The function of this name in the objects after this one; `None` when there is none.
                #[allow(non_snake_case, reason = "as libc has them")]
                pub fn $name() -> Option<unsafe extern "C" fn($($argument),*) -> $result> {
                    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
                    const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("a name has no zero in it"),
                    };
                    // SAFETY: null is None; anything else that libc calls by this name has this type.
                    unsafe { core::mem::transmute::<*mut c_void, Option<_>>(next(&FOUND, NAME)) }
                }
            )*

            /// Looks all of them up: some are called where nothing can be looked up, by allocators, and while a library
            /// is loaded.
            pub fn look_up() {
                $($name();)*
            }
        };
    }

    functions! {
        pthread_create: fn(*mut c_void, *const c_void, extern "C" fn(*mut c_void) -> *mut c_void, *mut c_void) -> c_int;
        pthread_mutex_init: fn(*mut c_void, *const c_void) -> c_int;
        madvise: fn(*mut c_void, usize, c_int) -> c_int;
        mlock: fn(*const c_void, usize) -> c_int;
        mlock2: fn(*const c_void, usize, c_uint) -> c_int;
        mlockall: fn(c_int) -> c_int;
        munlock: fn(*const c_void, usize) -> c_int;
        munlockall: fn() -> c_int;
        vmsplice: fn(c_int, *const Vector, usize, c_uint) -> isize;
        open: fn(*const c_char, c_int, c_uint) -> c_int;
        open64: fn(*const c_char, c_int, c_uint) -> c_int;
        __open_2: fn(*const c_char, c_int) -> c_int;
        __open64_2: fn(*const c_char, c_int) -> c_int;
        openat: fn(c_int, *const c_char, c_int, c_uint) -> c_int;
        openat64: fn(c_int, *const c_char, c_int, c_uint) -> c_int;
        __openat_2: fn(c_int, *const c_char, c_int) -> c_int;
        __openat64_2: fn(c_int, *const c_char, c_int) -> c_int;
        fcntl: fn(c_int, c_int, usize) -> c_int;
        fcntl64: fn(c_int, c_int, usize) -> c_int;
        stat: fn(*const c_char, *mut Stat) -> c_int;
        stat64: fn(*const c_char, *mut Stat) -> c_int;
        fstatat: fn(c_int, *const c_char, *mut Stat, c_int) -> c_int;
        fstatat64: fn(c_int, *const c_char, *mut Stat, c_int) -> c_int;
        __xstat: fn(c_int, *const c_char, *mut Stat) -> c_int;
        __xstat64: fn(c_int, *const c_char, *mut Stat) -> c_int;
        __fxstatat: fn(c_int, c_int, *const c_char, *mut Stat, c_int) -> c_int;
        __fxstatat64: fn(c_int, c_int, *const c_char, *mut Stat, c_int) -> c_int;
        clone: fn(Start, *mut c_void, c_int, *mut c_void, usize, usize, usize) -> c_int;
        _Fork: fn() -> c_int;
        prctl: fn(c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> c_int;
        unshare: fn(c_int) -> c_int;
        setns: fn(c_int, c_int) -> c_int;
    }
}

/// Whether the program was built with a sanitizer that knows of all memory: its runtime has such a symbol.
///
/// The one for leaks stops all threads at the end, the pager's too, and then goes through memory. Any other takes most of the address space, and has its books of memory in places of its choice. It may not even be ready yet when this
/// object's constructor runs; so nothing may be called that it stands in for, not even the loader's look-up of a symbol.
pub fn has_sanitizer() -> bool {
    let inits = [
        weak_symbol!("__asan_init"),
        weak_symbol!("__hwasan_init"),
        weak_symbol!("__lsan_init"),
        weak_symbol!("__msan_init"),
        weak_symbol!("__tsan_init"),
    ];
    inits.into_iter().any(|address| address != 0)
}

/// The symbol of this name in the objects after this one; looked up once.
fn next(found: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    if found.load(Relaxed).is_null() {
        found.store(symbol(name), Relaxed);
    }
    found.load(Relaxed)
}

/// The symbol of this name in the objects after this one; null when there is none.
pub fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: a look-up by a name that ends with a zero.
    unsafe { dlsym(RTLD_NEXT, name.as_ptr()) }
}

/// Touches every open stream and its lock: in the child of a fork libc looks at the flags and resets the lock before it calls handlers.
///
/// libc's list, which fork has not locked yet: another thread may close a stream at this very moment, and what it was in may hold anything by
/// then. So every word is read by the kernel, which says when an address is none. The length is bounded in case the chain is seen torn.
pub fn touch_streams() {
    const STREAMS_MAX: usize = 65_536;
    let list = weak_symbol!("_IO_list_all") as *const usize;
    if list.is_null() {
        return;
    }
    // SAFETY: a word of libc's own; what it says is not relied on.
    let mut stream = unsafe { read_volatile(list) };
    for _ in 0..STREAMS_MAX {
        let mut words = [[0; size_of::<usize>()]; STREAM_WORDS];
        if stream == 0 || !read_own_memory(stream, words.as_flattened_mut()) {
            break;
        }
        let words = words.map(usize::from_ne_bytes);
        read_own_memory(words[STREAM_WORDS - 1], &mut [0]);
        stream = words[CHAIN_WORD];
    }
}
