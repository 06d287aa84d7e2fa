//! Which pages of a range are present: PAGEMAP_SCAN (Linux 6.7), or the pagemap file before.

use crate::memory::PAGE;
use crate::sys;
use core::ops::Range;
use linux_raw_sys::general as uapi;
use rustix::fd::{AsRawFd, BorrowedFd};

pub(crate) const PAGEMAP_SCAN: u32 = 0xc060_6610; // _IOWR('f', 16, struct pm_scan_arg)
const RUNS: usize = 128;
/// Pages that are present, in one scan.
const PAGES_MOST: u64 = 4096;
const WORDS: usize = 512;

const _: () = assert!(size_of::<uapi::pm_scan_arg>() == 96 && size_of::<uapi::page_region>() == 24);

/// Room for one scan's results.
pub struct ScanBuffer {
    runs: [uapi::page_region; RUNS],
    words: [u64; WORDS],
    without_scan: bool,
}

impl ScanBuffer {
    /// An empty buffer. With `old_kernel`, PAGEMAP_SCAN is never tried.
    pub const fn new(old_kernel: bool) -> Self {
        let none = uapi::page_region { start: 0, end: 0, categories: 0 };
        ScanBuffer { runs: [none; RUNS], words: [0; WORDS], without_scan: old_kernel }
    }

    /// Calls `each` with runs of present pages (addresses, bytes) within `range`, in order, until it returns false or
    /// the results of one call to the kernel are used up. Returns where to go on, `range.end` when all was seen.
    ///
    /// Pages of the kernel's shared zero page are left out: they cost nothing.
    pub fn present_runs(
        &mut self,
        pagemap: BorrowedFd<'_>,
        range: Range<usize>,
        mut each: impl FnMut(Range<usize>) -> bool,
    ) -> usize {
        if !self.without_scan {
            match self.scan(pagemap, &range) {
                Some((count, walked_to)) => {
                    for run in &self.runs[..count] {
                        if !each(run.start as usize..run.end as usize) {
                            return run.end as usize;
                        }
                    }
                    return walked_to;
                }
                None => self.without_scan = true,
            }
        }
        self.read_words(pagemap, range, each)
    }

    fn scan(&mut self, pagemap: BorrowedFd<'_>, range: &Range<usize>) -> Option<(usize, usize)> {
        let mut argument = uapi::pm_scan_arg {
            size: size_of::<uapi::pm_scan_arg>() as u64,
            flags: 0,
            start: range.start as u64,
            end: range.end as u64,
            walk_end: 0,
            vec: self.runs.as_mut_ptr() as u64,
            vec_len: RUNS as u64,
            max_pages: PAGES_MOST,
            category_inverted: u64::from(uapi::PAGE_IS_PFNZERO),
            category_mask: u64::from(uapi::PAGE_IS_PRESENT | uapi::PAGE_IS_PFNZERO),
            category_anyof_mask: 0,
            return_mask: u64::from(uapi::PAGE_IS_PRESENT),
        };
        // SAFETY: PAGEMAP_SCAN reads and writes a struct pm_scan_arg and writes at most `vec_len` regions to `vec`.
        let count = unsafe { sys::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &mut argument) }.ok()?;
        Some((count, argument.walk_end as usize))
    }

    fn read_words(
        &mut self,
        pagemap: BorrowedFd<'_>,
        range: Range<usize>,
        mut each: impl FnMut(Range<usize>) -> bool,
    ) -> usize {
        let pages = ((range.end - range.start) / PAGE).min(WORDS);
        // SAFETY: any bytes are valid words.
        let bytes = unsafe { core::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>(), pages * 8) };
        let read = rustix::io::pread(pagemap, bytes, (range.start / PAGE * 8) as u64).unwrap_or(0) / 8;
        let present = |word: &u64| word >> 63 == 1;
        let mut page = 0;
        while page < read {
            let run = self.words[page..read].iter().take_while(|word| present(word)).count();
            if run > 0 {
                let start = range.start + page * PAGE;
                if !each(start..start + run * PAGE) {
                    return start + run * PAGE;
                }
            }
            page += run.max(1);
        }
        if read == 0 { range.end } else { range.start + read * PAGE }
    }
}

/// Whether there is a page at `dst` and none at `src`.
pub fn has_moved(pagemap: BorrowedFd<'_>, dst: usize, src: usize) -> bool {
    is_there(pagemap, dst) == Some(true) && is_there(pagemap, src) == Some(false)
}

/// Whether there is a page at an address, in memory or where the system has swapped it to. `None` when nobody can tell.
pub fn is_there(pagemap: BorrowedFd<'_>, address: usize) -> Option<bool> {
    are_there(pagemap, address..address + PAGE).map(|pages| pages == 1)
}

/// Which pages of a range of at most 64 are there, the first in the lowest bit, as [`is_there`].
pub fn are_there(pagemap: BorrowedFd<'_>, range: Range<usize>) -> Option<u64> {
    const PRESENT_OR_SWAPPED: u64 = 3 << 62;
    let mut words = [[0; 8]; 64];
    let words = words.get_mut(..(range.end - range.start) / PAGE)?;
    let read = rustix::io::pread(pagemap, words.as_flattened_mut(), (range.start / PAGE * 8) as u64);
    (read == Ok(words.len() * 8)).then(|| {
        let there = |word: &[u8; 8]| u64::from_ne_bytes(*word) & PRESENT_OR_SWAPPED != 0;
        words.iter().rev().fold(0, |pages, word| pages << 1 | u64::from(there(word)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};

    #[test]
    fn both_ways_of_scanning_find_exactly_the_touched_pages() {
        let start = crate::memory::map(1024 * PAGE).unwrap();
        for page in (0..100).chain([500, 1023]) {
            // SAFETY: inside the mapping made above.
            unsafe { start.add(page * PAGE).write_volatile(1) };
        }
        let fd = rustix::fs::open(c"/proc/self/pagemap", OFlags::RDONLY, Mode::empty()).unwrap();
        for old_kernel in [false, true] {
            let mut buffer = ScanBuffer::new(old_kernel);
            let (mut from, end) = (start as usize, start as usize + 1024 * PAGE);
            let mut pages = std::vec::Vec::new();
            while from < end {
                from = buffer.present_runs(rustix::fd::AsFd::as_fd(&fd), from..end, |run| {
                    pages.extend((run.start..run.end).step_by(PAGE).map(|at| (at - start as usize) / PAGE));
                    true
                });
            }
            assert_eq!(pages, (0..100).chain([500, 1023]).collect::<std::vec::Vec<_>>(), "old kernel: {old_kernel}");
        }
    }
}
