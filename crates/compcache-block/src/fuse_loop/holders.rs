//! Who uses a loop device, as far as the system says.
//!
//! It is read from `/proc` and `/sys`, and no file that lies on any file system is touched: a look at one whose server is
//! dead would hang.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process;

use super::error::Holder;

/// The major number of loop devices.
const LOOP_MAJOR: u32 = 7;

/// Who claimed loop device `number` for itself: swap, a mount, or a block device on top.
pub(super) fn claimed_by(number: u32) -> Option<Holder> {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps_to(&swaps, number) {
        return Some(Holder::Swap);
    }
    if let Some(at) = mounts_of_all_namespaces().find_map(|mounts| mounted_at(&mounts, number)) {
        return Some(Holder::Mounted { at });
    }
    let mut above = fs::read_dir(format!("/sys/block/loop{number}/holders")).ok()?;
    above.find_map(Result::ok).map(|entry| Holder::Stacked { name: entry.file_name().into() })
}

/// The tables of mounts of this machine, one for each mount namespace: a server may have its own, and so have containers.
fn mounts_of_all_namespaces() -> impl Iterator<Item = Vec<u8>> {
    let mut seen = BTreeSet::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().map(|process| process.path());
    processes.filter_map(move |process| {
        let namespace = fs::read_link(process.join("ns/mnt")).ok()?;
        seen.insert(namespace).then(|| fs::read(process.join("mountinfo")).ok())?
    })
}

/// A process that has loop device `number` open, other than through descriptor `ours` of this one.
pub(super) fn opened_by(number: u32, ours: i32) -> Option<Holder> {
    let node = PathBuf::from(format!("/dev/loop{number}"));
    for process in fs::read_dir("/proc").ok()?.filter_map(Result::ok) {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // A process that has just ended has no descriptors.
        let Ok(descriptors) = fs::read_dir(process.path().join("fd")) else { continue };
        let is_ours = |name: OsString| pid == process::id() && name.to_str() == Some(&ours.to_string());
        let opened = descriptors
            .filter_map(Result::ok)
            .any(|one| fs::read_link(one.path()).is_ok_and(|path| path == node) && !is_ours(one.file_name()));
        if opened {
            let mut name = fs::read(process.path().join("comm")).unwrap_or_default();
            name.truncate(name.trim_ascii_end().len());
            return Some(Holder::Process { pid, name: OsString::from_vec(name) });
        }
    }
    None
}

/// Whether `/proc/swaps` lists the loop device.
fn swaps_to(swaps: &str, number: u32) -> bool {
    let node = format!("/dev/loop{number}");
    swaps.lines().any(|line| line.split_whitespace().next() == Some(&node))
}

/// Where a file system on the loop device is mounted, from `/proc/self/mountinfo`. Btrfs shows a device number of its own,
/// but names its source.
fn mounted_at(mounts: &[u8], number: u32) -> Option<PathBuf> {
    let device = format!("{LOOP_MAJOR}:{number}");
    let source = format!("/dev/loop{number}");
    mounts.split(|byte| *byte == b'\n').find_map(|line| {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let dash = fields.iter().position(|field| *field == b"-")?;
        let is_it = fields.get(2) == Some(&device.as_bytes()) || fields.get(dash + 2) == Some(&source.as_bytes());
        is_it.then(|| unescape(fields[4]))
    })
}

/// A path as the kernel writes it in tables: blanks and backslashes as three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = after.get(..3).and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        match (byte, octal) {
            (b'\\', Some(value)) => {
                path.push(value);
                rest = &after[3..];
            }
            _ => {
                path.push(byte);
                rest = after;
            }
        }
    }
    Path::new(OsStr::from_bytes(&path)).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"36 35 0:30 / /run rw - tmpfs tmpfs rw\n\
        40 36 7:3 / /mnt/with\\040blank rw,relatime shared:5 - ext4 /dev/loop3 rw\n\
        41 36 0:50 / /mnt/tree rw - btrfs /dev/loop4 rw\n";

    #[test]
    fn mounts_are_found_by_device_number_and_by_source() {
        assert_eq!(mounted_at(MOUNTS, 3), Some(PathBuf::from("/mnt/with blank")));
        assert_eq!(mounted_at(MOUNTS, 4), Some(PathBuf::from("/mnt/tree")));
        assert_eq!(mounted_at(MOUNTS, 33), None);
    }

    #[test]
    fn swap_on_loop_1_is_not_swap_on_loop_12() {
        let swaps = "Filename Type Size Used Priority\n/dev/loop12 partition 1 0 -2\n";
        assert!(swaps_to(swaps, 12));
        assert!(!swaps_to(swaps, 1));
    }
}
