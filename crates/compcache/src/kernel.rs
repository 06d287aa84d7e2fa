//! What this kernel offers and permits. Facts are found by asking the kernel for the thing itself wherever that is
//! harmless: a version number or a setting alone would not know about containers, seccomp filters or backports.

pub mod pagemap_scan;
pub mod userfaultfd;

use std::fs;
use std::path::Path;

/// RAM of the machine, bytes.
pub fn ram_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit)
}

/// Nanoseconds that only grow.
pub fn clock_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The kernel's release, as `uname -r` has it.
pub fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Major and minor number of a release like `6.18.44-cloud`.
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Whether swapoff marks a page that it cannot read as lost. Before Linux 5.19 the program gets whatever bytes there are.
pub fn marks_lost_pages() -> bool {
    version(&release()).is_none_or(|version| version >= (5, 19))
}

/// The first line of a small file of /proc or /sys, without the line end; `None` if it cannot be read.
pub fn setting(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok()?.lines().next().map(str::to_owned)
}

/// Of a line like `always [madvise] never`, the choice in brackets.
pub fn chosen(line: &str) -> Option<&str> {
    line.split_once('[')?.1.split_once(']').map(|(chosen, _)| chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_has_two_leading_numbers() {
        assert_eq!(version("6.18.44-fc-v669"), Some((6, 18)));
        assert_eq!(version("5.10"), Some((5, 10)));
        assert_eq!(version("rc"), None);
    }

    #[test]
    fn the_choice_stands_in_brackets() {
        assert_eq!(chosen("always [madvise] never"), Some("madvise"));
        assert_eq!(chosen("madvise"), None);
    }
}
