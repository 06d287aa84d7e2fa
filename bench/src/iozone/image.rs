//! What the files hold that are written and read.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use compcache_testkit::PAGE_BYTES;
use compcache_testkit::corpus::Kind;

use crate::content::Content;
use crate::record::Record;

/// What the pages hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Holds {
    /// A few bytes and zeroes, as IOzone has it: it compresses to 1 %.
    Iozone,
    /// Memory of real programs: about 3:1.
    Real,
}

/// The pages that are written, in a file without a name, in memory that is the bench's.
pub struct Image {
    /// Where it can be read, by any process of this user.
    pub path: PathBuf,
    /// What it is memory of.
    pub kinds: String,
    /// Hundredths of its pages.
    pub same_filled: f64,
    _file: OwnedFd,
}

impl Image {
    /// Makes one that has so many bytes at most, and notes in the record what it holds.
    ///
    /// # Errors
    /// There is no memory of real programs to be had, or no room.
    pub fn make(holds: Holds, bytes: u64, kept: &mut Record) -> Result<Image> {
        // SAFETY: a name that ends in zero, and a number.
        let number = unsafe { libc::memfd_create(c"compcache-bench".as_ptr(), libc::MFD_CLOEXEC) };
        if number < 0 {
            return Err(io::Error::last_os_error().into());
        }
        // SAFETY: a descriptor that was just made, and is nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(number) };
        let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
        if holds == Holds::Real {
            let content = Content::write_of(&Kind::HEAPS, &path, bytes.min(64 << 20), kept)?;
            return Ok(Image { path, kinds: content.kinds, same_filled: content.same_filled, _file: file });
        }
        let mut page = [0; PAGE_BYTES];
        page[..8].fill(0x70);
        fs::write(&path, page)?;
        kept.content("iozone", 1, 0.0);
        Ok(Image { path, kinds: "IOzone's pattern".to_owned(), same_filled: 0.0, _file: file })
    }
}
