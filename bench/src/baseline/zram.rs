//! A zram device: one added for us where the kernel can add them, else `/dev/zram0` when nobody uses it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::{Held, read_trimmed, write};
use crate::session::{Session, Undo};

const CONTROL: &str = "/sys/class/zram-control";

/// Takes a free device and gives it a compressor and a size. Returns N of `/dev/zramN`.
///
/// # Errors
/// There is no free device, or the kernel lacks that compressor (the message lists those it has).
pub fn take(session: &Session, codec: &str, bytes: u64) -> Result<u32> {
    let number = free_device(session)?;
    let algorithm = directory(number).join("comp_algorithm");
    if write(&algorithm, codec).is_err() {
        let offered = read_trimmed(&algorithm)?.replace(['[', ']'], "");
        bail!("the kernel's zram has no compressor {codec:?}; it has {offered}");
    }
    write(directory(number).join("disksize"), &bytes.to_string())?;
    Ok(number)
}

/// Empties the device, and removes it when it was added; no error when it is gone.
pub fn release(number: u32, added: bool) -> Result<()> {
    if !directory(number).exists() {
        return Ok(());
    }
    write(directory(number).join("reset"), "1")?;
    if added {
        write(Path::new(CONTROL).join("hot_remove"), &number.to_string())?;
    }
    Ok(())
}

/// The device's `mm_stat`.
pub fn held(number: u32) -> Held {
    let text = fs::read_to_string(directory(number).join("mm_stat")).unwrap_or_default();
    let fields: Vec<u64> = text.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    let field = |nth: usize| fields.get(nth).copied().unwrap_or(0);
    // orig_data_size compr_data_size mem_used_total mem_limit mem_used_max same_pages pages_compacted huge_pages
    Held {
        original_bytes: field(0),
        compressed_bytes: field(1),
        memory_bytes: field(2),
        same_pages: field(5),
        huge_pages: field(7),
        ..Held::default()
    }
}

fn directory(number: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/zram{number}"))
}

fn free_device(session: &Session) -> Result<u32> {
    if let Ok(number) = read_trimmed(Path::new(CONTROL).join("hot_add")) {
        let number = number.parse().context("hot_add gave no number")?;
        session.note(Undo::Zram { number, added: true })?;
        return Ok(number);
    }
    let size = read_trimmed(directory(0).join("disksize")).context("this machine has no zram (modprobe zram)")?;
    if size != "0" {
        bail!("/dev/zram0 is in use, and this kernel adds no other");
    }
    session.note(Undo::Zram { number: 0, added: false })?;
    Ok(0)
}
