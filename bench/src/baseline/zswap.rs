//! The kernel's zswap: its switch and its compressor, put back afterwards.
//!
//! Where a distribution has it switched on, it takes the pages of every swap device: all other paths have it switched off for as long as they last.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};

use super::{Held, read_trimmed, write};
use crate::session::{Session, Undo};

const PARAMETERS: &str = "/sys/module/zswap/parameters";

/// Switches zswap on with this compressor.
///
/// # Errors
/// The kernel has no zswap, or not that compressor, or holds pages of others there.
pub fn enable(session: &Session, codec: &str) -> Result<()> {
    if !Path::new(PARAMETERS).exists() {
        bail!("this kernel has no zswap");
    }
    refuse_others()?;
    for (name, value) in [("compressor", codec), ("enabled", "Y")] {
        let path = Path::new(PARAMETERS).join(name);
        session.note(Undo::Write(path.clone(), read_trimmed(&path)?))?;
        write(path, value)?;
    }
    let taken = read_trimmed(Path::new(PARAMETERS).join("compressor"))?;
    if taken != codec {
        bail!("the kernel's zswap has no compressor {codec:?}");
    }
    Ok(())
}

/// Switches zswap off, where the kernel has it.
///
/// # Errors
/// It holds pages of others: swap of before the bench, whose pages come back meanwhile.
pub fn disable(session: &Session) -> Result<()> {
    let path = Path::new(PARAMETERS).join("enabled");
    if !path.exists() {
        return Ok(());
    }
    let before = read_trimmed(&path)?;
    if before != "N" {
        session.note(Undo::Write(path.clone(), before))?;
        write(&path, "N")?;
    }
    refuse_others()
}

/// Refuses to go on beside pages of other programs.
fn refuse_others() -> Result<()> {
    let pool_bytes = held().memory_bytes;
    if pool_bytes > 0 {
        bail!(
            "zswap holds {} KiB of other programs' pages: the result would be a mixture. Switch it off (echo N >{PARAMETERS}/enabled), and empty it with \
             swapoff and swapon",
            pool_bytes >> 10
        );
    }
    Ok(())
}

/// Its pool, from `/proc/meminfo`. Pages that were written back to the disk are not in it.
pub fn held() -> Held {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("");
        line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    Held { compressed_bytes: bytes("Zswap:"), memory_bytes: bytes("Zswap:"), ..Held::default() }
}
