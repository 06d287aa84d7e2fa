//! The kernel's own RAM disk, `/dev/ram0` of the module brd, when nobody uses it. Its size is a parameter of the module.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::baseline::read_trimmed;
use crate::session::{Session, Undo};

const DEVICE: &str = "/dev/ram0";
const BLKDISCARD: libc::c_ulong = 0x1277;

/// Takes the device, which must have room for `bytes` bytes; it may have more.
///
/// # Errors
/// It is not there, too small, or somebody uses it.
pub fn take(session: &Session, bytes: u64) -> Result<PathBuf> {
    let path = PathBuf::from(DEVICE);
    let has_bytes = size_bytes().with_context(|| format!("this machine has no {DEVICE} (modprobe brd rd_size=KIB)"))?;
    if has_bytes < bytes {
        bail!("{DEVICE} has {} MiB, and {} are needed (modprobe brd rd_size=KIB)", has_bytes >> 20, bytes >> 20);
    }
    let exclusive = OpenOptions::new().read(true).write(true).custom_flags(libc::O_EXCL).open(&path);
    exclusive.with_context(|| format!("somebody uses {DEVICE}"))?;
    session.note(Undo::RamDisk(path.clone()))?;
    Ok(path)
}

/// Gives the memory back; no error when the device is gone.
pub fn empty(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let device = OpenOptions::new().write(true).open(path)?;
    discard(&device, size_bytes()?)
        .with_context(|| format!("{} keeps its memory until brd is unloaded", path.display()))
}

fn size_bytes() -> Result<u64> {
    Ok(read_trimmed("/sys/block/ram0/size")?.parse::<u64>()? * 512)
}

fn discard(device: &File, bytes: u64) -> io::Result<()> {
    let range = [0, bytes];
    // SAFETY: the request reads two u64 from the pointer, which points at two; the descriptor is open.
    match unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD, &range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
