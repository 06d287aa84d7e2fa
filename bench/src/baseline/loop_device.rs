//! A file as a block device, with direct I/O so that nothing is cached twice, and as slow as asked.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::cgroup::Cgroup;
use super::{read_trimmed, write};
use crate::session::{NAME, Session, Undo};

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CLR_FD: libc::c_ulong = 0x4C01;
const LO_FLAGS_DIRECT_IO: u32 = 16;
const ATTEMPTS: usize = 10;
/// A slow disk lets through so much more than it should, and what it saved up in so many seconds before.
const TOLERATED: f64 = 1.25;
const SAVED_S: f64 = 0.5;

/// How slow a disk is made; both 0: as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Throttle {
    /// Operations a second, reads and writes apart.
    pub iops: u64,
    /// Bytes a second, reads and writes apart.
    pub bytes_per_s: u64,
}

impl Throttle {
    /// A disk of 2009.
    ///
    /// Such a disk did some hundred operations a second in disorder, and 75 MB/s in order. What the kernel counts as an operation is a bio, before
    /// neighbouring ones are merged.
    pub const OF_2009: Throttle = Throttle { iops: 700, bytes_per_s: 75_000_000 };

    /// This, or `other` if this slows nothing down.
    pub fn or(self, other: Throttle) -> Throttle {
        if self.iops == 0 && self.bytes_per_s == 0 { other } else { self }
    }

    /// Fails if more went to the disk in `seconds` than this lets through.
    ///
    /// # Errors
    /// It did: whoever used the disk was not slowed down.
    pub fn check(self, traffic: Traffic, seconds: f64) -> Result<()> {
        let holds =
            |count: u64, limit: u64| limit == 0 || count as f64 <= limit as f64 * TOLERATED * (seconds + SAVED_S);
        let is_kept = holds(traffic.reads, self.iops)
            && holds(traffic.writes, self.iops)
            && holds(traffic.read_bytes, self.bytes_per_s)
            && holds(traffic.written_bytes, self.bytes_per_s);
        if !is_kept {
            bail!(
                "the disk was not throttled: {traffic:?} in {seconds:.1} s; is this process in the root group of blkio?"
            );
        }
        Ok(())
    }
}

/// What went to a disk since it was attached.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Traffic {
    /// Requests.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Requests.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

impl Traffic {
    /// What went to `device` so far.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn of(device: &Path) -> Result<Traffic> {
        let name = device.file_name().context("no device name")?;
        let text = read_trimmed(Path::new("/sys/block").join(name).join("stat"))?;
        let fields: Vec<u64> = text.split_whitespace().filter_map(|field| field.parse().ok()).collect();
        // reads, merged, sectors of 512 bytes, ms, writes, merged, sectors ...
        let &[reads, _, read, _, writes, _, written, ..] = &fields[..] else { bail!("/sys/block/*/stat: {text}") };
        Ok(Traffic { reads, read_bytes: read * 512, writes, written_bytes: written * 512 })
    }

    /// What came after `before`.
    pub fn since(self, before: Traffic) -> Traffic {
        Traffic {
            reads: self.reads - before.reads,
            read_bytes: self.read_bytes - before.read_bytes,
            writes: self.writes - before.writes,
            written_bytes: self.written_bytes - before.written_bytes,
        }
    }
}

/// `struct loop_info64` of `linux/loop.h`.
#[repr(C)]
struct LoopInfo {
    numbers: [u64; 5],
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config` of `linux/loop.h`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<LoopConfig>() == 304);

/// Makes a file of `bytes` bytes, with all its blocks.
///
/// # Errors
/// The disk has no room or the file system cannot reserve it.
pub fn make_file(path: &Path, bytes: u64) -> Result<()> {
    let file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
    // SAFETY: posix_fallocate(3) takes a descriptor that is open here, and numbers.
    let error = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) };
    if error != 0 {
        bail!("no {} MiB for {}: {}", bytes >> 20, path.display(), io::Error::from_raw_os_error(error));
    }
    Ok(())
}

/// Attaches `file` to a free loop device with direct I/O. Returns the device.
///
/// # Errors
/// No loop device is free, or the file system does not do direct I/O (a cached swap would measure the cache).
pub fn attach(session: &Session, file: &Path) -> Result<PathBuf> {
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control");
    let control = control.context("this machine has no loop devices (/dev/loop-control)")?;
    let backing = OpenOptions::new().read(true).write(true).open(file)?;
    for _ in 0..ATTEMPTS {
        // SAFETY: the request takes no argument; the descriptor is open.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            bail!("no free loop device: {}", io::Error::last_os_error());
        }
        let device = PathBuf::from(format!("/dev/loop{number}"));
        let open = OpenOptions::new().read(true).write(true).open(&device)?;
        if configure(&open, &backing, file)? {
            // Noted after the act: before it, the device could have become somebody else's. Should the process die in
            // between, the device is found by its file's name.
            session.note(Undo::Loop(device.clone()))?;
            let direct = read_trimmed(format!("/sys/block/loop{number}/loop/dio"))?;
            if direct != "1" {
                bail!("{} does not take direct I/O", file.display());
            }
            return Ok(device);
        }
    }
    bail!("others take every free loop device first")
}

/// False when somebody else was faster.
fn configure(device: &File, backing: &File, file: &Path) -> Result<bool> {
    // SAFETY: all bytes zero is a valid `LoopConfig`: it holds nothing but integers.
    let mut config: LoopConfig = unsafe { std::mem::zeroed() };
    config.fd = backing.as_raw_fd() as u32;
    config.info.flags = LO_FLAGS_DIRECT_IO;
    let name = file.as_os_str().as_bytes();
    let length = name.len().min(63);
    config.info.file_name[..length].copy_from_slice(&name[..length]);
    // SAFETY: LOOP_CONFIGURE reads one `struct loop_config`, whose size is asserted above, and keeps no pointer to it.
    if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &config) } == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::EBUSY) => Ok(false),
        error => Err(error).context("LOOP_CONFIGURE"),
    }
}

/// Detaches `device`; no error when nothing is attached, or it is gone.
pub fn detach(device: &Path) -> Result<()> {
    let open = match File::open(device) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENXIO)) => return Ok(()),
        opened => opened?,
    };
    // SAFETY: the request takes no argument; the descriptor is open.
    if unsafe { libc::ioctl(open.as_raw_fd(), LOOP_CLR_FD) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ENXIO) => Ok(()),
        error => Err(error).context("LOOP_CLR_FD"),
    }
}

/// The loop devices whose files carry the bench's name.
pub fn find_by_name() -> Vec<PathBuf> {
    let ours = |name: &String| {
        let backing = read_trimmed(format!("/sys/block/{name}/loop/backing_file")).unwrap_or_default();
        backing.contains(&format!("/{NAME}."))
    };
    let names = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    names
        .map(|one| one.file_name().to_string_lossy().into_owned())
        .filter(ours)
        .map(|name| Path::new("/dev").join(name))
        .collect()
}

/// Slows `device` down. In version 1 of control groups the limit sits on the device, for every process; in version 2 on
/// the run's own group.
///
/// # Errors
/// The kernel does not throttle (`CONFIG_BLK_DEV_THROTTLING`).
pub fn throttle(session: &Session, device: &Path, limit: Throttle, group: Option<&Cgroup>) -> Result<()> {
    let limits = [("iops", limit.iops), ("bps", limit.bytes_per_s)];
    let limits = limits.into_iter().filter(|(_, value)| *value > 0);
    let number = device_number(device)?;
    for (unit, value) in limits {
        for (kind, letter) in [("read", "r"), ("write", "w")] {
            let v1 = PathBuf::from(format!("/sys/fs/cgroup/blkio/blkio.throttle.{kind}_{unit}_device"));
            if v1.exists() {
                session.note(Undo::Write(v1.clone(), format!("{number} 0")))?;
                write(v1, &format!("{number} {value}"))?;
            } else if let Some(v2) = group.and_then(Cgroup::io_max) {
                write(v2, &format!("{number} {letter}{unit}={value}"))?;
            } else {
                bail!("no control group throttles disks here (blkio in version 1, io in version 2)");
            }
        }
    }
    Ok(())
}

/// `MAJOR:MINOR`.
fn device_number(device: &Path) -> Result<String> {
    let name = device.file_name().context("no device name")?;
    read_trimmed(Path::new("/sys/block").join(name).join("dev"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_lets_through_more_than_it_should_is_found_out() {
        let check = |traffic, seconds| Throttle::OF_2009.check(traffic, seconds).is_ok();
        let reads = |reads| Traffic { reads, ..Traffic::default() };
        let written = |written_bytes| Traffic { written_bytes, ..Traffic::default() };
        assert!(check(reads(7000), 10.0) && !check(reads(10_000), 10.0));
        assert!(check(written(750_000_000), 10.0) && !check(written(1_500_000_000), 10.0));
        assert!(check(reads(400), 0.1) && !check(reads(700), 0.1), "some was saved up before");
        assert!(Throttle::default().check(reads(1 << 40), 10.0).is_ok(), "as fast as it is");
    }
}
