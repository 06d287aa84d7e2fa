//! Whether the kernel has the PAGEMAP_SCAN ioctl (Linux 6.7), by which present pages are found.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;

use linux_raw_sys::general::{page_region, pm_scan_arg};
use rustix::ioctl::{Updater, ioctl, opcode};

const PAGEMAP_SCAN: rustix::ioctl::Opcode = opcode::read_write::<pm_scan_arg>(b'f', 16);
const PAGE_IS_PRESENT: u64 = 1 << 3;

/// Asks for the present pages of one page of this process.
pub fn works() -> bool {
    let Ok(pagemap) = File::open("/proc/self/pagemap") else { return false };
    // The page of this very variable is present.
    let here = &raw const pagemap as u64 & !4095;
    let mut found = [page_region { start: 0, end: 0, categories: 0 }; 1];
    let mut question = pm_scan_arg {
        size: size_of::<pm_scan_arg>() as u64,
        flags: 0,
        start: here,
        end: here + 4096,
        walk_end: 0,
        vec: found.as_mut_ptr() as *mut c_void as u64,
        vec_len: found.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: PAGE_IS_PRESENT,
        category_anyof_mask: 0,
        return_mask: PAGE_IS_PRESENT,
    };
    // SAFETY: the opcode belongs to `pm_scan_arg`, whose `vec` and `vec_len` describe `found`, which outlives the call;
    // without the two flags that write-protect, the ioctl changes nothing else. A kernel without it answers ENOTTY.
    unsafe { ioctl(&pagemap, Updater::<PAGEMAP_SCAN, pm_scan_arg>::new(&mut question)) }.is_ok()
}
