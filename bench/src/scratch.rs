//! Files and devices that a scenario fills: a file that goes with whoever made it, and blocks that are there before anything is measured.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A file of this process alone, which goes with this.
pub struct ScratchFile {
    path: PathBuf,
}

impl ScratchFile {
    /// Makes an empty one.
    ///
    /// # Errors
    /// The directory is not there, or cannot be written to.
    pub fn new(directory: &Path) -> Result<ScratchFile> {
        let path = directory.join(format!("compcache-bench-{}.backing", std::process::id()));
        File::create_new(&path).with_context(|| path.display().to_string())?;
        Ok(ScratchFile { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Writes zeroes to the first `bytes` bytes, of a device as far as it goes, so that no block is written for the first time while it is
/// measured, which takes longer.
///
/// # Errors
/// It cannot be written.
pub fn write_all_blocks(path: &Path, bytes: u64) -> Result<()> {
    let mut file = File::options().write(true).open(path).with_context(|| path.display().to_string())?;
    let zeroes = vec![0; 1 << 20];
    let mut left = bytes;
    while left > 0 {
        let length = left.min(zeroes.len() as u64) as usize;
        match file.write(&zeroes[..length]) {
            Ok(0) => break,
            Ok(written) => left -= written as u64,
            Err(error) if error.kind() == io::ErrorKind::StorageFull => break,
            Err(error) => return Err(error.into()),
        }
    }
    file.sync_all()?;
    // Nor is any of it in the page cache, from where direct I/O would have to take it. Advice: it may be ignored.
    // SAFETY: posix_fadvise(2) takes a descriptor that is open here, and numbers.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_file_has_all_its_blocks_and_goes_with_its_holder() {
        let directory = tempfile::tempdir().unwrap();
        let file = ScratchFile::new(directory.path()).unwrap();
        write_all_blocks(file.path(), (1 << 20) + 4096).unwrap();
        assert_eq!(fs::metadata(file.path()).unwrap().len(), (1 << 20) + 4096);
        drop(file);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
