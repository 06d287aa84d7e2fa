//! The node of a block device that is ours, and who uses it, as far as the system says.
//!
//! It is read from `/proc` and `/sys`, and no file that lies on any file system is touched: a look at one whose server is
//! dead would hang.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use linux_raw_sys::general::O_EXCL;
use rustix::io::Errno;

/// How long somebody who only looks (udev and its probes, when a device appears) may have the device open.
pub(crate) const LOOKED_AT: Duration = Duration::from_secs(1);

/// How often to look again.
pub(crate) const PAUSE: Duration = Duration::from_millis(5);

/// Who uses a block device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Holder {
    /// The system swaps to it.
    #[error("it is swap space; `swapoff` it first")]
    Swap,
    /// A file system on it is mounted.
    #[error("it is mounted on {}; unmount it first", at.display())]
    Mounted {
        /// Where.
        at: PathBuf,
    },
    /// A block device above it, of the device mapper or of md.
    #[error("the block device {} lies on it", name.display())]
    Stacked {
        /// Its name in `/sys/block`.
        name: PathBuf,
    },
    /// A process has it open.
    #[error("process {pid} ({}) has it open", .name.display())]
    Process {
        /// Its id.
        pid: u32,
        /// What it is called.
        name: OsString,
    },
    /// It is held, and nothing that can be seen from here says by whom.
    #[error("it is claimed by somebody who cannot be seen from here")]
    Unknown,
}

/// Why a node was not claimed.
#[derive(Debug)]
pub(crate) enum NotClaimed {
    /// Somebody uses it.
    InUse(Holder),
    /// It cannot be opened.
    Open(io::Error),
}

/// A node: `/dev/NAME`.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    name: String,
}

impl Node {
    pub fn new(name: String) -> Node {
        Node { name }
    }

    pub fn path(&self) -> PathBuf {
        Path::new("/dev").join(&self.name)
    }

    /// Who uses the device now: mounted it, swaps to it, or has it open.
    pub fn holder(&self) -> Option<Holder> {
        match self.open_exclusive() {
            Ok(claimed) => self.opened_by(claimed.as_raw_fd()),
            Err(error) if is_busy(&error) => Some(self.user()),
            // It cannot be looked at, so it cannot be said to be free.
            Err(_) => Some(Holder::Unknown),
        }
    }

    /// Claims the device unless somebody uses it: as long as the answer is open, nobody mounts it or swaps to it. `None` if
    /// `is_ours` says that it is not ours any more.
    ///
    /// Who has it open for a moment only is waited for.
    pub fn claim(&self, is_ours: impl Fn() -> bool) -> Result<Option<File>, NotClaimed> {
        let give_up = Instant::now() + LOOKED_AT;
        let claimed = loop {
            if !is_ours() {
                return Ok(None);
            }
            match self.open_exclusive() {
                Ok(claimed) => break claimed,
                Err(error) if !is_busy(&error) => return Err(NotClaimed::Open(error)),
                Err(_) => {
                    let by = self.claimed_by();
                    if by.is_some() || Instant::now() > give_up {
                        return Err(NotClaimed::InUse(by.unwrap_or_else(|| self.user())));
                    }
                }
            }
            thread::sleep(PAUSE);
        };
        if !is_ours() {
            return Ok(None);
        }
        while let Some(by) = self.opened_by(claimed.as_raw_fd()) {
            if Instant::now() > give_up {
                return Err(NotClaimed::InUse(by));
            }
            thread::sleep(PAUSE);
        }
        Ok(Some(claimed))
    }

    /// Who keeps it from being claimed.
    pub fn user(&self) -> Holder {
        self.claimed_by().or_else(|| self.opened_by(-1)).unwrap_or(Holder::Unknown)
    }

    fn open_exclusive(&self) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(O_EXCL as i32).open(self.path())
    }

    /// Who claimed it for himself: swap, a mount, or a block device on top.
    fn claimed_by(&self) -> Option<Holder> {
        let path = self.path();
        let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
        if swaps_to(&swaps, &path) {
            return Some(Holder::Swap);
        }
        let number = fs::read_to_string(format!("/sys/block/{}/dev", self.name)).unwrap_or_default();
        if let Some(at) = mounts_of_all_namespaces().find_map(|mounts| mounted_at(&mounts, number.trim(), &path)) {
            return Some(Holder::Mounted { at });
        }
        let mut above = fs::read_dir(format!("/sys/block/{}/holders", self.name)).ok()?;
        above.find_map(Result::ok).map(|entry| Holder::Stacked { name: entry.file_name().into() })
    }

    /// A process that has it open, other than through descriptor `ours` of this one.
    pub fn opened_by(&self, ours: i32) -> Option<Holder> {
        let node = self.path();
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

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

/// Whether `/proc/swaps` lists the device.
fn swaps_to(swaps: &str, node: &Path) -> bool {
    swaps.lines().any(|line| line.split_whitespace().next() == node.to_str())
}

/// Where a file system on the device is mounted, from `/proc/self/mountinfo`. Btrfs shows a device number of its own,
/// but names its source.
fn mounted_at(mounts: &[u8], number: &str, source: &Path) -> Option<PathBuf> {
    let source = source.as_os_str().as_bytes();
    mounts.split(|byte| *byte == b'\n').find_map(|line| {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let dash = fields.iter().position(|field| *field == b"-")?;
        let is_it = fields.get(2) == Some(&number.as_bytes()) || fields.get(dash + 2) == Some(&source);
        is_it.then(|| unescape(fields[4]))
    })
}

/// A path as the kernel writes it in tables: blanks and backslashes as three octal digits.
pub(crate) fn unescape(field: &[u8]) -> PathBuf {
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
        41 36 0:50 / /mnt/tree rw - btrfs /dev/ublkb4 rw\n";

    #[test]
    fn mounts_are_found_by_device_number_and_by_source() {
        assert_eq!(mounted_at(MOUNTS, "7:3", Path::new("/dev/else")), Some(PathBuf::from("/mnt/with blank")));
        assert_eq!(mounted_at(MOUNTS, "259:4", Path::new("/dev/ublkb4")), Some(PathBuf::from("/mnt/tree")));
        assert_eq!(mounted_at(MOUNTS, "7:33", Path::new("/dev/loop33")), None);
        assert_eq!(mounted_at(MOUNTS, "", Path::new("/dev/ublkb5")), None, "a device that has gone has no number");
    }

    #[test]
    fn swap_on_loop_1_is_not_swap_on_loop_12() {
        let swaps = "Filename Type Size Used Priority\n/dev/loop12 partition 1 0 -2\n";
        assert!(swaps_to(swaps, Path::new("/dev/loop12")));
        assert!(!swaps_to(swaps, Path::new("/dev/loop1")));
    }
}
