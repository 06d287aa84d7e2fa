//! One of the kernel's own ways to keep memory it has no room for, under a memory limit, for one run.
//!
//! | written         | what it is                                                                             |
//! |-----------------|-----------------------------------------------------------------------------------------|
//! | `zram:lz4`      | swap on a zram device with that compressor (`lzo-rle`, `lzo`, `zstd`: what the kernel has) |
//! | `zswap:lzo`     | zswap with that compressor, in front of a swap file                                    |
//! | `disk`          | a swap file alone: a loop device with direct I/O, throttled when asked                 |
//! | `disk-2009`, `zswap-2009:lzo` | the same on a disk that is as slow as one of 2009: [`Throttle::OF_2009`] |
//! | `swap:lz4`      | not the kernel's: swap on a disk of ours (`compcache serve`) over FUSE and a loop device |
//! | `swap-ublk:lz4` | the same over ublk                                                                     |
//! | `backed:lz4`, `backed-2009:lz4` | `swap:lz4` with what `disk` (`disk-2009`) swaps to as its backing: a quarter of the limit is the disk's, the rest the group's |
//! | `none`          | the limit alone; the kernel ends what does not fit                                     |
//!
//! A run enters a control group that limits its memory; the swap is the machine's, at priority 100, so no other swap of
//! that priority may be active. What is set up is noted in the [`Session`] first and undone when the [`Baseline`] is
//! dropped. Beside ours, the [`Baseline`] of a run without limit is a control group that only counts.
//!
//! What swaps, spills or leaves for a disk has the same file, one for the whole session, all of whose blocks have been written: to write one for the first time takes
//! longer. A throttle that did not hold is an error of the run ([`Baseline::check_throttle`]).

pub mod cgroup;
pub mod loop_device;
pub mod swap;
pub mod zram;
pub mod zswap;

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::{Value, json};

use crate::device::{Device, Kind, Over, Server, mount};
use crate::ours;
use crate::scratch::write_all_blocks;
use crate::session::Session;
use cgroup::Cgroup;
use loop_device::{Throttle, Traffic};

/// Larger than any scenario needs, so that swap space never runs out.
const SWAP_BYTES: u64 = 4 << 30;
/// The same for the file on the disk, which is written from end to end once.
const DISK_BYTES: u64 = 2 << 30;
/// Of the memory of a run whose swap has a backing, one over this is the disk's.
const POOL_PART: u64 = 4;

/// How fast the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speed {
    /// As it is.
    Full,
    /// [`Throttle::OF_2009`].
    Of2009,
}

impl Speed {
    /// What is added to the word for a side.
    pub fn suffix(self) -> &'static str {
        match self {
            Speed::Full => "",
            Speed::Of2009 => "-2009",
        }
    }

    fn throttle(self) -> Throttle {
        match self {
            Speed::Full => Throttle::default(),
            Speed::Of2009 => Throttle::OF_2009,
        }
    }
}

/// Which of the kernel's paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwapPath {
    /// Swap on zram with this compressor.
    Zram(String),
    /// zswap with this compressor over a swap file.
    Zswap(String, Speed),
    /// A swap file.
    Disk(Speed),
    /// Swap on a disk of ours, with this codec.
    Ours(String, Over),
    /// The same over a loop device, and what does not fit in memory leaves for a disk.
    Backed(String, Speed),
    /// No swap.
    None,
}

impl SwapPath {
    /// Whether it is compcache that keeps the pages.
    pub fn is_ours(&self) -> bool {
        matches!(self, SwapPath::Ours(..) | SwapPath::Backed(..))
    }
}

impl FromStr for SwapPath {
    type Err = String;

    fn from_str(word: &str) -> Result<SwapPath, String> {
        match word.split_once(':').unwrap_or((word, "")) {
            ("zram", codec) if !codec.is_empty() => Ok(SwapPath::Zram(codec.to_owned())),
            ("zswap", codec) if !codec.is_empty() => Ok(SwapPath::Zswap(codec.to_owned(), Speed::Full)),
            ("zswap-2009", codec) if !codec.is_empty() => Ok(SwapPath::Zswap(codec.to_owned(), Speed::Of2009)),
            ("disk", "") => Ok(SwapPath::Disk(Speed::Full)),
            ("disk-2009", "") => Ok(SwapPath::Disk(Speed::Of2009)),
            ("swap", codec) if !codec.is_empty() => Ok(SwapPath::Ours(codec.to_owned(), Over::Loop)),
            ("swap-ublk", codec) if !codec.is_empty() => Ok(SwapPath::Ours(codec.to_owned(), Over::Ublk)),
            ("backed", codec) if !codec.is_empty() => Ok(SwapPath::Backed(codec.to_owned(), Speed::Full)),
            ("backed-2009", codec) if !codec.is_empty() => Ok(SwapPath::Backed(codec.to_owned(), Speed::Of2009)),
            ("none", "") => Ok(SwapPath::None),
            _ => Err(format!(
                "{word:?} is none of zram:CODEC, zswap[-2009]:CODEC, swap[-ublk]:CODEC, backed[-2009]:CODEC, disk[-2009], none"
            )),
        }
    }
}

impl fmt::Display for SwapPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SwapPath::Zram(codec) => f.pad(&format!("zram:{codec}")),
            SwapPath::Zswap(codec, speed) => f.pad(&format!("zswap{}:{codec}", speed.suffix())),
            SwapPath::Disk(speed) => f.pad(&format!("disk{}", speed.suffix())),
            SwapPath::Ours(codec, over) => f.pad(&format!("swap{}:{codec}", over.suffix())),
            SwapPath::Backed(codec, speed) => f.pad(&format!("backed{}:{codec}", speed.suffix())),
            SwapPath::None => f.pad("none"),
        }
    }
}

/// What the kernel's path holds at one moment.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Held {
    /// Bytes of the program that have been put there.
    pub original_bytes: u64,
    /// What they became, payload alone.
    pub compressed_bytes: u64,
    /// The memory that they really take (`mem_used_total` of zram and of a disk of ours, zswap's pool; 0 on a disk).
    pub memory_bytes: u64,
    /// What the server of a disk of ours takes besides: its program's memory, its threads' buffers.
    pub server_bytes: u64,
    /// Pages that repeat one word (zram).
    pub same_pages: u64,
    /// Pages that could not be compressed (zram).
    pub huge_pages: u64,
}

impl Held {
    /// All memory that it takes.
    pub fn all_bytes(&self) -> u64 {
        self.memory_bytes + self.server_bytes
    }
}

/// A path that is set up; undone when it is dropped.
pub struct Baseline<'s> {
    session: &'s Session,
    mark: usize,
    cgroup: Option<Cgroup>,
    store: Store<'s>,
    /// What was slowed down, and by how much.
    slow: Option<(PathBuf, Throttle)>,
}

enum Store<'s> {
    Nothing,
    Zram(u32),
    Zswap(PathBuf),
    Disk(PathBuf),
    Ours(Box<Device<'s>>),
}

impl<'s> Baseline<'s> {
    /// Sets up `path` and a control group limited to `limit_bytes`. A `throttle` that slows nothing down leaves a disk's speed to `path`. `compcache` is the binary that [`SwapPath::Ours`] runs,
    /// outside that group.
    ///
    /// # Errors
    /// Something is missing or in use; what had been set up is undone.
    pub fn set_up(
        session: &'s Session,
        path: &SwapPath,
        limit_bytes: u64,
        throttle: Throttle,
        compcache: &Path,
    ) -> Result<Baseline<'s>> {
        let mut made = Baseline::nothing(session);
        if !matches!(path, SwapPath::Zswap(..)) {
            zswap::disable(session)?;
        }
        let pool_bytes = if matches!(path, SwapPath::Backed(..)) { limit_bytes / POOL_PART } else { 0 };
        made.cgroup = Some(Cgroup::make(session, Some(limit_bytes - pool_bytes))?);
        if *path != SwapPath::None {
            swap::refuse_others()?;
        }
        made.store = match path {
            SwapPath::None => Store::Nothing,
            SwapPath::Zram(codec) => Store::Zram(set_up_zram(session, codec)?),
            SwapPath::Disk(speed) => Store::Disk(made.set_up_disk(throttle.or(speed.throttle()))?),
            SwapPath::Ours(codec, over) => made.set_up_ours(codec, *over, compcache, &Value::Null)?,
            SwapPath::Backed(codec, speed) => {
                // In version 2 only who is in the run's group is slowed down, and the server is not.
                let unified = cgroup::is_unified();
                ensure!(
                    *speed == Speed::Full || !unified,
                    "a server's disk cannot be slowed down here (blkio, control groups of version 1)"
                );
                let device = made.attach_disk()?;
                made.slow_down(&device, throttle.or(speed.throttle()))?;
                let backing = json!({"path": device, "overwrite": true});
                // Not for swap, which would refuse a loop device for want of a promise that the whole machine needs: here a group alone is short of memory.
                let wanted = json!({"do": "create_on", "limit_bytes": pool_bytes, "backing": backing});
                made.set_up_ours(codec, Over::Loop, compcache, &wanted)?
            }
            SwapPath::Zswap(codec, speed) => {
                let device = made.set_up_disk(throttle.or(speed.throttle()))?;
                zswap::enable(session, codec)?;
                Store::Zswap(device)
            }
        };
        Ok(made)
    }

    /// A control group without limit, to count a run that limits itself; nothing at all where there are none.
    pub fn counting(session: &'s Session) -> Baseline<'s> {
        let mut made = Baseline::nothing(session);
        made.cgroup = Cgroup::make(session, None).ok();
        made
    }

    fn nothing(session: &'s Session) -> Baseline<'s> {
        Baseline { session, mark: session.mark(), cgroup: None, store: Store::Nothing, slow: None }
    }

    /// As [`Baseline::counting`], and a file system on a disk such as [`SwapPath::Disk`] swaps to, for what a run of ours spills. Returns
    /// its directory, too.
    ///
    /// # Errors
    /// There is no control group, no loop device, or no mkfs.ext4.
    pub fn spilling(session: &'s Session, speed: Speed) -> Result<(Baseline<'s>, PathBuf)> {
        let mut made = Baseline::nothing(session);
        made.cgroup = Some(Cgroup::make(session, None)?);
        let device = made.attach_disk()?;
        mount::make_ext4_on_disk(&device)?;
        let point = session.directory().join("spill.ext4");
        mount::on(session, &device, &point, "ext4", "")?;
        made.slow_down(&device, speed.throttle())?;
        Ok((made, point))
    }

    /// The control group that the program enters.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.as_ref()
    }

    /// What the path holds now. All zero where it holds nothing or cannot be read.
    pub fn held(&self) -> Held {
        match &self.store {
            Store::Nothing => Held::default(),
            Store::Zram(number) => zram::held(*number),
            Store::Zswap(device) => Held { original_bytes: swap::used_bytes(device), ..zswap::held() },
            Store::Disk(device) => Held { original_bytes: swap::used_bytes(device), ..Held::default() },
            Store::Ours(device) => device.held(),
        }
    }

    /// Whether what the path holds is memory that its control group does not pay for.
    pub fn holds_beside(&self) -> bool {
        match &self.store {
            Store::Nothing | Store::Disk(_) => false,
            Store::Zram(_) | Store::Ours(_) => true,
            Store::Zswap(_) => !cgroup::is_unified(),
        }
    }

    /// What went so far to the disk that was slowed down; nothing where none was.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn slow_traffic(&self) -> Result<Traffic> {
        self.slow.as_ref().map_or(Ok(Traffic::default()), |(device, _)| Traffic::of(device))
    }

    /// Fails if more went to that disk in `seconds`, since it was `before`, than it should let through.
    ///
    /// # Errors
    /// It did.
    pub fn check_throttle(&self, before: Traffic, seconds: f64) -> Result<()> {
        let Some((device, limit)) = &self.slow else { return Ok(()) };
        limit.check(Traffic::of(device)?.since(before), seconds)
    }

    /// The device that is swapped to, if it is one.
    pub fn swap_device(&self) -> Option<PathBuf> {
        match &self.store {
            Store::Nothing => None,
            Store::Zram(number) => Some(PathBuf::from(format!("/dev/zram{number}"))),
            Store::Zswap(device) | Store::Disk(device) => Some(device.clone()),
            Store::Ours(device) => Some(device.path().to_owned()),
        }
    }

    /// The server of [`SwapPath::Ours`].
    pub fn server(&self) -> Option<&Server> {
        match &self.store {
            Store::Ours(device) => device.server(),
            _ => None,
        }
    }

    fn set_up_disk(&mut self, throttle: Throttle) -> Result<PathBuf> {
        let device = self.attach_disk()?;
        self.slow_down(&device, throttle)?;
        swap::on(self.session, &device, DISK_BYTES)?;
        Ok(device)
    }

    fn slow_down(&mut self, device: &Path, throttle: Throttle) -> Result<()> {
        loop_device::throttle(self.session, device, throttle, self.cgroup.as_ref())?;
        self.slow = Some((device.to_owned(), throttle));
        Ok(())
    }

    fn set_up_ours(&self, codec: &str, over: Over, compcache: &Path, wanted: &Value) -> Result<Store<'s>> {
        let kind = Kind::Ours { codec: codec.to_owned(), over, binary: None };
        let device = Device::set_up_as(self.session, &kind, SWAP_BYTES, compcache, wanted)?;
        ours::step(ours::disk_needs(over), swap::on(self.session, device.path(), SWAP_BYTES))?;
        Ok(Store::Ours(Box::new(device)))
    }

    /// The session's file as a device. Whoever gave blocks of it back (a backing does) has them written again.
    fn attach_disk(&self) -> Result<PathBuf> {
        let file = self.session.directory().join("disk");
        if !fs::metadata(&file).is_ok_and(|found| found.blocks() * 512 >= DISK_BYTES) {
            loop_device::make_file(&file, DISK_BYTES)?;
            write_all_blocks(&file, DISK_BYTES)?;
        }
        loop_device::attach(self.session, &file)
    }
}

impl Drop for Baseline<'_> {
    fn drop(&mut self) {
        self.session.undo_to(self.mark);
    }
}

fn set_up_zram(session: &Session, codec: &str) -> Result<u32> {
    let number = zram::take(session, codec, SWAP_BYTES)?;
    swap::on(session, &PathBuf::from(format!("/dev/zram{number}")), SWAP_BYTES)?;
    Ok(number)
}

/// Reads a file of the kernel without the newline at its end.
pub fn read_trimmed(path: impl Into<PathBuf>) -> Result<String> {
    let path = path.into();
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

/// Writes a file of the kernel.
pub fn write(path: impl Into<PathBuf>, text: &str) -> Result<()> {
    let path = path.into();
    fs::write(&path, text).with_context(|| format!("cannot write {text:?} to {}", path.display()))
}
