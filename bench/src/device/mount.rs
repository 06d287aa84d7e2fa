//! Mounting and unmounting, noted in the session first.

use std::ffi::{CString, OsStr};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::session::{Session, Undo};

/// Makes `target` and mounts there.
///
/// # Errors
/// The directory cannot be made, or mount(2) refuses.
pub fn on(session: &Session, source: &Path, target: &Path, kind: &str, options: &str) -> Result<()> {
    fs::create_dir_all(target).with_context(|| target.display().to_string())?;
    session.note(Undo::Mount(target.to_owned()))?;
    let (from, to) = (CString::new(source.as_os_str().as_bytes())?, CString::new(target.as_os_str().as_bytes())?);
    let (kind_text, options) = (CString::new(kind)?, CString::new(options)?);
    // SAFETY: four strings that end in zero and outlive the call.
    let done = unsafe {
        libc::mount(from.as_ptr(), to.as_ptr(), kind_text.as_ptr(), libc::MS_NOATIME, options.as_ptr().cast())
    };
    if done != 0 {
        bail!("cannot mount {} ({kind}) at {}: {}", source.display(), target.display(), io::Error::last_os_error());
    }
    Ok(())
}

/// Makes an ext4 on `device`, finished when this returns: nothing is left for the kernel to do in the background.
///
/// # Errors
/// There is no mkfs.ext4, or it failed.
pub fn make_ext4(device: &Path) -> Result<()> {
    make_ext4_with(device, "lazy_itable_init=0,lazy_journal_init=0")
}

/// As [`make_ext4`], on a device whose blocks have been written: discarded, they would have to be found anew.
///
/// # Errors
/// As there.
pub fn make_ext4_on_disk(device: &Path) -> Result<()> {
    make_ext4_with(device, "nodiscard,lazy_itable_init=0,lazy_journal_init=0")
}

fn make_ext4_with(device: &Path, extended: &str) -> Result<()> {
    let mut command = Command::new("mkfs.ext4");
    command.args(["-q", "-F", "-b", "4096", "-m", "0", "-E", extended]).arg(device);
    let output = command.output().context("mkfs.ext4 cannot be run (Debian: e2fsprogs)")?;
    if !output.status.success() {
        bail!("mkfs.ext4 {}: {}", device.display(), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Unmounts what is mounted at `target`; no error when nothing is.
pub fn off(target: &Path) -> Result<()> {
    let path = CString::new(target.as_os_str().as_bytes())?;
    // SAFETY: a string that ends in zero and outlives the call.
    if unsafe { libc::umount2(path.as_ptr(), libc::UMOUNT_NOFOLLOW) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(()),
        error => Err(error).with_context(|| format!("cannot unmount {}", target.display())),
    }
}

/// Where something is mounted now, in the order in which it was.
pub fn points() -> Vec<PathBuf> {
    let table = fs::read("/proc/self/mounts").unwrap_or_default();
    // Others' names need not be text.
    let places = table.split(|byte| *byte == b'\n').filter_map(|line| line.split(|byte| *byte == b' ').nth(1));
    places.map(|place| PathBuf::from(OsStr::from_bytes(place))).collect()
}
