//! The kernel's zswap: its switch and its compressor, put back afterwards.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};

use super::{Held, read_trimmed, write};
use crate::session::{Session, Undo};

const PARAMETERS: &str = "/sys/module/zswap/parameters";

/// Switches zswap on with this compressor.
///
/// # Errors
/// The kernel has no zswap, or not that compressor.
pub fn enable(session: &Session, codec: &str) -> Result<()> {
    if !Path::new(PARAMETERS).exists() {
        bail!("this kernel has no zswap");
    }
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

/// Its pool, from `/proc/meminfo`. Pages that were written back to the disk are not in it.
pub fn held() -> Held {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("");
        line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    Held { compressed_bytes: bytes("Zswap:"), memory_bytes: bytes("Zswap:"), ..Held::default() }
}
