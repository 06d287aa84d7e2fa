//! Guard pages (MADV_GUARD_INSTALL, Linux 6.13): the kernel drops what they are laid over, and tells no pager.
//!
//! So what has guards on it is dropped once more, with MADV_DONTNEED, which is announced and leaves guards as they are.
//! Not before they are there: a call that fails drops nothing.

use crate::libc;
use compcache_pager::memory::PAGE;
use compcache_pager::pager::Pager;
use core::ffi::c_int;

/// Puts guards on `len` bytes at `address`; `advise(len, advice)` is the system call for that address.
pub fn install(pager: &Pager, address: usize, len: usize, advise: impl Fn(usize, c_int) -> c_int) -> c_int {
    let is_range = address.checked_add(len).is_some_and(|end| end.checked_next_multiple_of(PAGE).is_some());
    // A kernel without guards refuses this, and so does one with them if the address is not a page's.
    let is_known = advise(0, libc::MADV_GUARD_INSTALL) == 0;
    if !is_range || !is_known {
        return advise(len, libc::MADV_GUARD_INSTALL);
    }
    pager.while_guards_come(address, len, || {
        let result = advise(len, libc::MADV_GUARD_INSTALL);
        let errno = libc::errno();
        let guarded = if result == 0 { len } else { guarded_part(len, &advise) };
        advise(guarded, libc::MADV_DONTNEED);
        libc::set_errno(errno);
        result
    })
}

/// Takes the guards off `len` bytes at `address`.
pub fn remove(pager: &Pager, address: usize, len: usize, advise: impl Fn(usize, c_int) -> c_int) -> c_int {
    let mut result = 0;
    pager.while_guards_go(address, len, || {
        result = advise(len, libc::MADV_GUARD_REMOVE);
        result == 0
    });
    result
}

/// How much of a range has guards after the call for all of it has failed, in bytes from its start.
///
/// The kernel goes from mapping to mapping and stops at the first that may have none; the ones before it have theirs.
/// Where nothing is mapped it says ENOMEM at the end, and does not stop. So the longest part that it does not refuse has
/// guards already, and another call for it or for less changes nothing.
fn guarded_part(len: usize, advise: impl Fn(usize, c_int) -> c_int) -> usize {
    let is_guarded = |pages| advise(pages * PAGE, libc::MADV_GUARD_INSTALL) == 0 || libc::errno() == libc::ENOMEM;
    let (mut guarded, mut refused) = (0, len.div_ceil(PAGE) + 1);
    while refused - guarded > 1 {
        let middle = guarded + (refused - guarded) / 2;
        if is_guarded(middle) {
            guarded = middle;
        } else {
            refused = middle;
        }
    }
    guarded * PAGE
}
