//! How many threads a process has, as its directory in /proc tells: a link to `/proc/self/task` for each, and two.
//!
//! Who asks there wants to know whether a copy of the process, or a filter on its system calls, would have all of it (Chromium's
//! sandbox ends the process otherwise). So the pager's threads do not count. They are listed there all the same.

use crate::libc::{self, Stat};
use core::ffi::{CStr, c_char, c_int};
use rustix::fd::BorrowedFd;
use rustix::fs::{CWD, Mode, OFlags, PROC_SUPER_MAGIC};

/// As the kernel's linux/stat.h.
const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o40_000;
/// As the kernel's linux/fcntl.h.
const AT_FDCWD: c_int = -100;
/// The links of such a directory with one thread.
const LINKS_LEAST: u64 = 3;

/// Takes the pager's threads off what was found under a path.
///
/// # Safety
/// `path` must be a string, and `stat` what libc has just written for it.
unsafe fn correct(directory: c_int, path: *const c_char, stat: *mut Stat) {
    // SAFETY: says the caller.
    let stat = unsafe { &mut *stat };
    // The path of an open file itself may be null.
    if stat.mode & S_IFMT != S_IFDIR || stat.links <= LINKS_LEAST || path.is_null() {
        return;
    }
    // SAFETY: says the caller.
    let path = unsafe { CStr::from_ptr(path) };
    if is_own_task(path)
        && let Some(pager) = crate::pager()
        && is_in_proc(directory, path)
    {
        stat.links = stat.links.saturating_sub(pager.own_threads()).max(LINKS_LEAST);
    }
}

fn is_own_task(path: &CStr) -> bool {
    let path = path.to_bytes();
    path.strip_suffix(b"/").unwrap_or(path).ends_with(b"self/task")
}

fn is_in_proc(directory: c_int, path: &CStr) -> bool {
    // SAFETY: only used for this one call; a number that is not open is an error.
    let directory = if directory == AT_FDCWD { CWD } else { unsafe { BorrowedFd::borrow_raw(directory) } };
    let opened = rustix::fs::openat(directory, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    opened.and_then(rustix::fs::fstatfs).is_ok_and(|found| found.f_type == PROC_SUPER_MAGIC)
}

/// Functions of libc's that tell of a path, each passed on with its arguments as they are; those with two underscores are what
/// programs call that were built with a glibc before 2.33.
macro_rules! tellers {
    ($($name:ident($($argument:ident: $type:ty),*) of $directory:expr, $path:ident, $stat:ident;)*) => {$(
        /// As libc's; the pager's threads do not count.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            let Some(real) = libc::real::$name() else { return -1 };
            // SAFETY: the caller's own call, passed on.
            let result = unsafe { real($($argument),*) };
            if result == 0 {
                // SAFETY: libc has read the one and written the other.
                unsafe { correct($directory, $path, $stat) };
            }
            result
        }
    )*};
}

tellers! {
    stat(path: *const c_char, stat: *mut Stat) of AT_FDCWD, path, stat;
    stat64(path: *const c_char, stat: *mut Stat) of AT_FDCWD, path, stat;
    fstatat(dir: c_int, path: *const c_char, stat: *mut Stat, flags: c_int) of dir, path, stat;
    fstatat64(dir: c_int, path: *const c_char, stat: *mut Stat, flags: c_int) of dir, path, stat;
    __xstat(version: c_int, path: *const c_char, stat: *mut Stat) of AT_FDCWD, path, stat;
    __xstat64(version: c_int, path: *const c_char, stat: *mut Stat) of AT_FDCWD, path, stat;
    __fxstatat(version: c_int, dir: c_int, path: *const c_char, stat: *mut Stat, flags: c_int) of dir, path, stat;
    __fxstatat64(version: c_int, dir: c_int, path: *const c_char, stat: *mut Stat, flags: c_int) of dir, path, stat;
}
