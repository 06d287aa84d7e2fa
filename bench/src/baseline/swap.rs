//! A block device as swap: its header, on, off, and how much of it is used.
//!
//! The header is what mkswap(8) writes: version 1, the number of the last page, and the magic word at the end of the
//! first page.

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::session::{Session, Undo};

/// Above what systems give their own swap, which is negative unless somebody chose otherwise.
const PRIORITY: i32 = 100;
const PATIENCE_WITH_OTHERS: Duration = Duration::from_secs(60);
const SWAP_FLAG_PREFER: libc::c_int = 0x8000;
const PAGE_BYTES: usize = 4096;

/// Makes `device`, of `bytes` bytes, the swap that the kernel prefers.
///
/// # Errors
/// The header cannot be written or swapon(2) refuses.
pub fn on(session: &Session, device: &Path, bytes: u64) -> Result<()> {
    let mut header = [0u8; PAGE_BYTES];
    header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    header[1028..1032].copy_from_slice(&((bytes / PAGE_BYTES as u64 - 1) as u32).to_ne_bytes());
    header[PAGE_BYTES - 10..].copy_from_slice(b"SWAPSPACE2");
    let file = OpenOptions::new().write(true).open(device).with_context(|| device.display().to_string())?;
    file.write_all_at(&header, 0)?;
    file.sync_all()?;
    drop(file);
    session.note(Undo::Swap(device.to_owned()))?;
    let path = CString::new(device.as_os_str().as_bytes())?;
    // SAFETY: the path is a string that ends in zero and outlives the call.
    if unsafe { libc::swapon(path.as_ptr(), SWAP_FLAG_PREFER | PRIORITY) } != 0 {
        bail!("swapon {}: {}", device.display(), io::Error::last_os_error());
    }
    Ok(())
}

/// Stops swapping on `device`; no error when nothing does.
pub fn off(device: &Path) -> Result<()> {
    if !active().iter().any(|swap| swap.device == device) {
        return Ok(());
    }
    let path = CString::new(device.as_os_str().as_bytes())?;
    // SAFETY: as in `on`.
    if unsafe { libc::swapoff(path.as_ptr()) } != 0 {
        bail!("swapoff {}: {}", device.display(), io::Error::last_os_error());
    }
    Ok(())
}

/// Bytes in use on `device`.
pub fn used_bytes(device: &Path) -> u64 {
    active().iter().find(|swap| swap.device == device).map_or(0, |swap| swap.used_bytes)
}

/// Refuses to go on beside swap that would take a part of the pages. Waits a while first: it may be a test's.
pub fn refuse_others() -> Result<()> {
    let others = || active().into_iter().find(|swap| swap.priority >= PRIORITY);
    let started = Instant::now();
    while others().is_some() && started.elapsed() < PATIENCE_WITH_OTHERS {
        thread::sleep(Duration::from_millis(100));
    }
    match others() {
        Some(other) => bail!(
            "{} is active as swap with priority {}: the result would be a mixture. Turn it off with swapoff, or lower its priority",
            other.device.display(),
            other.priority
        ),
        None => Ok(()),
    }
}

struct Swap {
    device: PathBuf,
    used_bytes: u64,
    priority: i32,
}

fn active() -> Vec<Swap> {
    let parse = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let used_kilobytes: u64 = fields.get(3)?.parse().ok()?;
        let device = PathBuf::from(fields.first()?);
        Some(Swap { device, used_bytes: used_kilobytes * 1024, priority: fields.get(4)?.parse().ok()? })
    };
    let table = fs::read("/proc/swaps").unwrap_or_default();
    String::from_utf8_lossy(&table).lines().filter_map(parse).collect()
}
