//! The node of a block device that is ours, and who uses it, as far as the system says.
//!
//! It is read from `/proc` and `/sys`. Of what others have open only the kind is asked, in the way that asks no file system's server: one that is
//! dead, or is this process, would not answer.

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
use rustix::fs::{AtFlags, CWD, FileType, OFlags, StatxFlags, statx};
use rustix::io::Errno;

/// How long somebody who only looks (udev and its probes, when a device appears) may have the device open.
pub(crate) const LOOKED_AT: Duration = Duration::from_secs(1);

/// How often to look again.
pub(crate) const PAUSE: Duration = Duration::from_millis(5);

/// The same where all descriptors of all processes are looked at.
const LONG_PAUSE: Duration = Duration::from_millis(100);

/// Who uses a block device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Holder {
    /// The system swaps to it.
    #[error("it is swap space; `swapoff` it first")]
    Swap,
    /// A file system on it is mounted.
    #[error("it is mounted on {}; unmount it first", shown(at.as_os_str()))]
    Mounted {
        /// Where.
        at: PathBuf,
    },
    /// A block device above it: of the device mapper, of md, or a loop device.
    #[error("the block device {} lies on it", name.display())]
    Stacked {
        /// Its name in `/sys/block`.
        name: PathBuf,
    },
    /// A process has it open.
    #[error("process {pid} ({}) has it open", shown(.name))]
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

/// A claim to a block device: as long as it lives nobody mounts the device, swaps to it, or has a device lie on it.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct Claim(pub(crate) Option<File>);

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

    /// Claims the device unless somebody uses it. Who has it open for a moment only is waited for. Of a device that is not ours any more, as
    /// `is_ours` says, nothing is claimed.
    pub fn claim(&self, is_ours: impl Fn() -> bool) -> Result<Claim, NotClaimed> {
        let give_up = Instant::now() + LOOKED_AT;
        let claimed = loop {
            if !is_ours() {
                return Ok(Claim(None));
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
            return Ok(Claim(None));
        }
        loop {
            // To look takes long on a busy machine: who has it open for a moment is seen twice only by accident.
            let is_late = Instant::now() > give_up;
            match self.used_by(claimed.as_raw_fd()) {
                None => break,
                Some(by) if is_late => return Err(NotClaimed::InUse(by)),
                Some(_) => thread::sleep(LONG_PAUSE),
            }
        }
        Ok(Claim(Some(claimed)))
    }

    /// Whether there is such a device, with a node or without.
    pub fn is_there(&self) -> bool {
        Path::new("/sys/block").join(&self.name).exists()
    }

    /// Who keeps it from being claimed.
    pub fn user(&self) -> Holder {
        self.claimed_by().or_else(|| self.used_by(-1)).unwrap_or(Holder::Unknown)
    }

    /// Who uses it without a claim to it: a loop device, or a process that has it open, other than through descriptor `ours` of this one.
    pub fn used_by(&self, ours: i32) -> Option<Holder> {
        let numbers = self.numbers();
        let above = self.loop_device(&numbers).map(|name| Holder::Stacked { name: name.into() });
        above.or_else(|| self.opened_by(ours, &numbers))
    }

    /// A loop device over it or a partition, by any name in /dev.
    fn loop_device(&self, numbers: &[(u32, u32)]) -> Option<String> {
        let is_above = |over: &Path| self.is_it(over) || over.starts_with("/dev") && is_one_of(over, numbers);
        loop_devices().find(|(_, over)| is_above(over)).map(|(name, _)| name)
    }

    /// Whether a path, as the kernel tells it, is the node's or that of a partition.
    fn is_it(&self, path: &Path) -> bool {
        let rest = path.strip_prefix("/dev").ok().and_then(|name| name.to_str()?.strip_prefix(&self.name));
        rest.is_some_and(|rest| {
            let partition = rest.strip_prefix('p').unwrap_or("none");
            rest.is_empty() || !partition.is_empty() && partition.bytes().all(|byte| byte.is_ascii_digit())
        })
    }

    /// The numbers of the device and its partitions.
    fn numbers(&self) -> Vec<(u32, u32)> {
        let directory = Path::new("/sys/class/block").join(&self.name);
        let partitions = fs::read_dir(&directory).into_iter().flatten().flatten().map(|entry| entry.path());
        let partitions = partitions.filter(|path| path.join("partition").exists());
        let numbers = std::iter::once(directory.clone()).chain(partitions).filter_map(|device| {
            let number = fs::read_to_string(device.join("dev")).ok()?;
            let (major, minor) = number.trim().split_once(':')?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        });
        numbers.collect()
    }

    fn open_exclusive(&self) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(O_EXCL as i32).open(self.path())
    }

    /// Who claimed it for himself: swap, a mount, or a block device on top.
    fn claimed_by(&self) -> Option<Holder> {
        let path = self.path();
        let swaps = fs::read("/proc/swaps").unwrap_or_default();
        if swaps_to(&String::from_utf8_lossy(&swaps), &path) {
            return Some(Holder::Swap);
        }
        let number = fs::read_to_string(format!("/sys/block/{}/dev", self.name)).unwrap_or_default();
        if let Some(at) = mounts_of_all_namespaces().find_map(|mounts| mounted_at(&mounts, number.trim(), &path)) {
            return Some(Holder::Mounted { at });
        }
        let mut above = fs::read_dir(format!("/sys/block/{}/holders", self.name)).ok()?;
        above.find_map(Result::ok).map(|entry| Holder::Stacked { name: entry.file_name().into() })
    }

    /// A process that has it or a partition open, under whatever name, other than through descriptor `ours` of this one.
    fn opened_by(&self, ours: i32, numbers: &[(u32, u32)]) -> Option<Holder> {
        for process in fs::read_dir("/proc").ok()?.filter_map(Result::ok) {
            let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            // A process that has just ended has no descriptors.
            let Ok(descriptors) = fs::read_dir(process.path().join("fd")) else { continue };
            let is_ours = |name: OsString| pid == process::id() && name.to_str() == Some(&ours.to_string());
            let opened = descriptors.filter_map(Result::ok).any(|one| {
                // Sockets and their like have no path. By itself a path says nothing: in a mount namespace of his own anybody calls a file so.
                let has_path = fs::read_link(one.path()).is_ok_and(|path| path.is_absolute());
                has_path
                    && is_one_of(&one.path(), numbers)
                    && !is_ours(one.file_name())
                    && !is_only_a_place(&process.path(), &one.file_name())
            });
            if opened {
                let mut name = fs::read(process.path().join("comm")).unwrap_or_default();
                name.truncate(name.trim_ascii_end().len());
                return Some(Holder::Process { pid, name: OsString::from_vec(name) });
            }
        }
        None
    }
}

/// A loop device over the file or the block device, or over a partition of it. Of files names are compared, and nothing is looked at: one may be our own process's.
pub fn loop_device_over(path: &Path) -> Option<PathBuf> {
    let device = path.strip_prefix("/dev").ok().and_then(|name| name.to_str()).map(|name| Node::new(name.to_owned()));
    let above = match device {
        Some(node) => node.loop_device(&node.numbers()),
        None => loop_devices().find(|(_, over)| over == path).map(|(name, _)| name),
    };
    above.map(|name| Path::new("/dev").join(name))
}

/// The loop devices of this machine, and the path that each lies on as the kernel tells it.
fn loop_devices() -> impl Iterator<Item = (String, PathBuf)> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    devices.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let over = fs::read(format!("/sys/block/{name}/loop/backing_file")).ok()?;
        let over = over.strip_suffix(b"\n").unwrap_or(&over);
        Some((name, Path::new(OsStr::from_bytes(over)).to_owned()))
    })
}

/// A name that somebody else has chosen, for a terminal or a log.
fn shown(name: &OsStr) -> String {
    name.to_string_lossy().chars().map(|one| if one.is_control() { '?' } else { one }).collect()
}

/// Whether a descriptor of a process is one of O_PATH, which anybody can have of anything, and holds nothing.
fn is_only_a_place(process: &Path, descriptor: &OsStr) -> bool {
    let told = fs::read_to_string(process.join("fdinfo").join(descriptor)).unwrap_or_default();
    let flags = told.lines().find_map(|line| u32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    flags.is_some_and(|flags| OFlags::from_bits_retain(flags).contains(OFlags::PATH))
}

/// Whether what is open or lies there is one of the block devices. Nobody is asked who serves a file system.
fn is_one_of(path: &Path, numbers: &[(u32, u32)]) -> bool {
    let seen = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
    seen.is_ok_and(|seen| {
        let is_block_device = FileType::from_raw_mode(seen.stx_mode.into()) == FileType::BlockDevice;
        is_block_device && numbers.contains(&(seen.stx_rdev_major, seen.stx_rdev_minor))
    })
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

/// Whether a file system on a block device has another device number than that. These name their source, and nobody else is believed: any
/// user calls that of a FUSE mount, or of a tmpfs in a namespace of his own, what he likes.
fn has_own_number(kind: &[u8]) -> bool {
    matches!(kind, b"btrfs" | b"bcachefs")
}

/// Where a file system on the device is mounted, from `/proc/self/mountinfo`.
fn mounted_at(mounts: &[u8], number: &str, source: &Path) -> Option<PathBuf> {
    let mut all = compcache_fuse::mounts(mounts);
    all.find(|one| one.device == number.as_bytes() || has_own_number(one.kind) && one.source() == source)
        .map(|one| one.place())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"36 35 0:30 / /run rw - tmpfs tmpfs rw\n\
        40 36 7:3 / /mnt/with\\040blank rw,relatime shared:5 - ext4 /dev/loop3 rw\n\
        42 36 0:51 / /home/mallory rw - fuse.sshfs /dev/ublkb5 rw,user_id=1000,group_id=0\n\
        41 36 0:50 / /mnt/tree rw - btrfs /dev/ublkb4 rw\n";

    #[test]
    fn mounts_are_found_by_device_number_and_by_source() {
        assert_eq!(mounted_at(MOUNTS, "7:3", Path::new("/dev/else")), Some(PathBuf::from("/mnt/with blank")));
        assert_eq!(mounted_at(MOUNTS, "259:4", Path::new("/dev/ublkb4")), Some(PathBuf::from("/mnt/tree")));
        assert_eq!(mounted_at(MOUNTS, "7:33", Path::new("/dev/loop33")), None);
        assert_eq!(mounted_at(MOUNTS, "", Path::new("/dev/ublkb6")), None, "a device that has gone has no number");
        assert_eq!(
            mounted_at(MOUNTS, "259:5", Path::new("/dev/ublkb5")),
            None,
            "a user calls his source what he likes"
        );
    }

    #[test]
    fn a_partition_is_the_device_and_another_device_is_not() {
        let node = Node::new("ublkb1".to_owned());
        for path in ["/dev/ublkb1", "/dev/ublkb1p1", "/dev/ublkb1p12"] {
            assert!(node.is_it(Path::new(path)), "{path}");
        }
        for path in ["/dev/ublkb12", "/dev/ublkb1p", "/dev/ublkb1px", "/dev/ublkb", "/ublkb1", "/mnt/dev/ublkb1"] {
            assert!(!node.is_it(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn a_descriptor_that_names_a_file_is_told_from_one_that_has_it_open() {
        let named = rustix::fs::open("/dev/null", OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let open = File::open("/dev/null").unwrap();
        let is_place =
            |number: i32| is_only_a_place(Path::new("/proc/self"), OsStr::from_bytes(number.to_string().as_bytes()));
        assert!(is_place(named.as_raw_fd()) && !is_place(open.as_raw_fd()) && !is_place(-1));
    }

    #[test]
    fn what_others_are_called_does_not_write_to_the_terminal() {
        let holder = Holder::Process { pid: 1, name: "a\x1b[2J\nb".into() };
        assert_eq!(holder.to_string(), "process 1 (a?[2J?b) has it open");
    }

    #[test]
    fn swap_on_loop_1_is_not_swap_on_loop_12() {
        let swaps = "Filename Type Size Used Priority\n/dev/loop12 partition 1 0 -2\n";
        assert!(swaps_to(swaps, Path::new("/dev/loop12")));
        assert!(!swaps_to(swaps, Path::new("/dev/loop1")));
    }
}
