//! Files opened for direct input: a device writes to the program's pages then, and only UFFDIO_MOVE knows which.
//!
//! Where pages leave another way ([`Pager::needs_to_know_devices`]) none does once there is such a file. Nor does any, whatever the way,
//! once there is one on a file system that holds on to the pages without pinning them ([`UNPINNED`]): UFFDIO_MOVE asks for pins alone.
//! Asynchronous input shows in the process's map; a file that comes through a socket, or is opened past libc, is not seen (docs/semantics.md).

use crate::libc;
use compcache_pager::pager::Pager;
use core::ffi::{c_char, c_int, c_uint};
use rustix::fd::BorrowedFd;

/// As the kernel's asm-generic/fcntl.h.
const O_DIRECT: c_int = 0o40000;
const F_SETFL: c_int = 4;
/// Descriptors looked at in a process that starts.
const INHERITED_MAX: i32 = 256;

/// What statfs calls NFS and Ceph: nfs_direct_read_schedule_iovec and ceph's iter_get_bvecs_alloc get pages by iov_iter_get_pages, Linux 6.18 at least.
const UNPINNED: [u64; 2] = [0x6969, 0x00c3_6400];

/// Notes what the process has from whoever started it.
pub fn note_inherited(pager: &Pager) {
    for number in 0..INHERITED_MAX {
        // SAFETY: only asked for its flags; a number that is not open is an error.
        let flags = rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(number) });
        if flags.is_ok_and(|flags| flags.bits() as c_int & O_DIRECT != 0) {
            note_opened(pager, number);
        }
    }
}

/// There is a file for direct input.
fn note_opened(pager: &Pager, descriptor: c_int) {
    let is_unpinned = || {
        // SAFETY: only asked for its file system; a number that is not open is an error.
        let about = rustix::fs::fstatfs(unsafe { BorrowedFd::borrow_raw(descriptor) });
        about.is_ok_and(|about| UNPINNED.contains(&(about.f_type as u64)))
    };
    if pager.needs_to_know_devices() || is_unpinned() {
        pager.note_devices();
    }
}

/// Nothing is read into memory before the program knows the number.
fn note(flags: c_int, descriptor: c_int) {
    if flags & O_DIRECT != 0 && descriptor >= 0 {
        crate::pager().inspect(|pager| note_opened(pager, descriptor));
    }
}

/// Functions of libc's that open a file, each passed on with its arguments as they are.
macro_rules! openers {
    ($($name:ident($($argument:ident: $type:ty),*) flags $flags:ident;)*) => {$(
        /// As libc's, with a look at the flags.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            let real = libc::real::$name();
            // SAFETY: the caller's own call, passed on.
            let descriptor = real.map_or(-1, |real| unsafe { real($($argument),*) });
            note($flags, descriptor);
            descriptor
        }
    )*};
}

openers! {
    open(path: *const c_char, flags: c_int, mode: c_uint) flags flags;
    open64(path: *const c_char, flags: c_int, mode: c_uint) flags flags;
    __open_2(path: *const c_char, flags: c_int) flags flags;
    __open64_2(path: *const c_char, flags: c_int) flags flags;
    openat(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) flags flags;
    openat64(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) flags flags;
    __openat_2(dir: c_int, path: *const c_char, flags: c_int) flags flags;
    __openat64_2(dir: c_int, path: *const c_char, flags: c_int) flags flags;
}

/// `fcntl`, with a look at the flags it sets. Its third argument is a number or a pointer, or is not there; in each case
/// it is in the same register.
macro_rules! fcntls {
    ($($name:ident)*) => {$(
        /// As libc's, with a look at the flags it sets.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(descriptor: c_int, command: c_int, argument: usize) -> c_int {
            if command == F_SETFL {
                note(argument as c_int, descriptor);
            }
            // SAFETY: the caller's own call, passed on.
            libc::real::$name().map_or(-1, |real| unsafe { real(descriptor, command, argument) })
        }
    )*};
}

fcntls! { fcntl fcntl64 }
