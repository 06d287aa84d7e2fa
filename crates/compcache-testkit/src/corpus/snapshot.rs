//! The resident, private, anonymous pages of a process, read while it waits or is stopped.
//!
//! Which addresses: the writable private mappings without a file in `/proc/PID/maps`; of those, the pages that
//! `/proc/PID/pagemap` calls present (bit 63). Their bytes come from `/proc/PID/mem`. All three are open to a parent for
//! its child, without privilege.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use super::{IMAGE_PAGES, Page, spread};
use crate::PAGE_BYTES;

const PRESENT: u64 = 1 << 63;

/// At most [`IMAGE_PAGES`] pages of process `pid`, spread evenly over all that it has.
pub(super) fn of_process(pid: u32) -> io::Result<Vec<Page>> {
    let addresses = present_pages(pid)?;
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let mut content = Vec::with_capacity(IMAGE_PAGES);
    for index in spread(addresses.len(), addresses.len().min(IMAGE_PAGES)) {
        let mut page = [0; PAGE_BYTES];
        // A page can leave between the two looks; one page less does not change what the image says.
        if memory.read_exact_at(&mut page, addresses[index]).is_ok() {
            content.push(page);
        }
    }
    Ok(content)
}

/// Resident anonymous memory of process `pid`, in bytes; 0 when it is gone.
pub(super) fn resident_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes: u64 = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    kilobytes * 1024
}

fn present_pages(pid: u32) -> io::Result<Vec<u64>> {
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut present = Vec::new();
    for (start, end) in anonymous_ranges(&fs::read_to_string(format!("/proc/{pid}/maps"))?) {
        let first = start / PAGE_BYTES as u64;
        let pages = (end - start) / PAGE_BYTES as u64;
        let mut entries = [0; 8 * 512];
        for batch in (0..pages).step_by(512) {
            let length = 8 * 512.min(pages - batch) as usize;
            if pagemap.read_exact_at(&mut entries[..length], (first + batch) * 8).is_err() {
                break;
            }
            for (nth, word) in entries[..length].chunks_exact(8).enumerate() {
                let word = u64::from_ne_bytes(word.try_into().expect("chunks of 8"));
                if word & PRESENT != 0 {
                    present.push((first + batch + nth as u64) * PAGE_BYTES as u64);
                }
            }
        }
    }
    Ok(present)
}

/// Start and end of each writable, private mapping without a file.
fn anonymous_ranges(maps: &str) -> Vec<(u64, u64)> {
    let range = |line: &str| {
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let flags = fields.next()?;
        let inode = fields.nth(2)?;
        let kernels_own = fields.next().is_some_and(|name| name.starts_with("[v"));
        let wanted = flags.contains('w') && flags.ends_with('p') && inode == "0" && !kernels_own;
        let hex = |digits| u64::from_str_radix(digits, 16).ok();
        wanted.then_some((hex(start)?, hex(end)?))
    };
    maps.lines().filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_writable_private_mappings_without_a_file_are_read() {
        let maps = "\
1000-3000 rw-p 00000000 00:00 0          [heap]
3000-4000 rw-p 00000000 fe:00 77         /usr/lib/libc.so.6
4000-5000 r--p 00000000 00:00 0
5000-6000 rw-s 00000000 00:00 0
6000-7000 rw-p 00000000 00:00 0          [vvar]
7000-9000 rw-p 00000000 00:00 0
";
        assert_eq!(anonymous_ranges(maps), [(0x1000, 0x3000), (0x7000, 0x9000)]);
    }

    #[test]
    fn a_process_finds_its_own_bytes() {
        let mark = std::hint::black_box(vec![0xC5; 64 * PAGE_BYTES]);
        let inside = mark.as_ptr() as u64 + PAGE_BYTES as u64;
        let own = std::process::id();
        let seen = present_pages(own).unwrap();
        assert_eq!(seen.iter().filter(|&&at| at > inside && at < inside + 62 * PAGE_BYTES as u64).count(), 62);
        assert!(!of_process(own).unwrap().is_empty());
        assert!(resident_bytes(own) > mark.len() as u64);
    }
}
