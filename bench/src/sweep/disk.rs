//! The disk that pages go to, fast or slow, and the baseline on it.
//!
//! | disk        | what it is                                                                                             |
//! |-------------|--------------------------------------------------------------------------------------------------------|
//! | `fast`      | a file on this machine's disk, as it is                                                                |
//! | `throttled` | a loop device with direct I/O over such a file, without a file system, slowed down as `iozone` does it |
//!
//! Ours has the first part of it, the baseline the rest: every page there at a place of its own, uncompressed, read and written by itself. All
//! of it is written before anything is measured. It is slow only while it is measured, so that to begin takes no longer than it must.
//!
//! Version 1 of control groups slows the device down for every process of the root group, this one among them. Version 2 slows groups
//! down, and this process is in none of its own, so that there the slow disk is left out.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use compcache_store::{Backing, BackingConfig, FileMedium, Page};
use compcache_testkit::PAGE_BYTES;

use super::machine::Swap;
use crate::baseline::loop_device::{self, Traffic};
use crate::device::{Device, Kind};
use crate::iozone::Speed;
use crate::scratch::{ScratchFile, write_all_blocks};
use crate::session::{Session, Undo};
use crate::side::Bench;

/// One that is there; it goes with this.
pub struct Disk<'s> {
    session: &'s Session,
    medium: Medium<'s>,
    speed: Speed,
    backing_bytes: u64,
}

enum Medium<'s> {
    File(ScratchFile),
    Loop(Device<'s>),
}

/// While this is there, the disk is as slow as it shall be.
pub struct Slow<'s>(&'s Session, usize);

impl Drop for Slow<'_> {
    fn drop(&mut self) {
        self.0.undo_to(self.1);
    }
}

impl<'s> Disk<'s> {
    /// Makes one with `backing_bytes` for ours, and room for `pages` pages beside it. A fast one lies in `directory`.
    ///
    /// # Errors
    /// This machine cannot have it.
    pub fn make(
        bench: &'s Bench,
        speed: Speed,
        (backing_bytes, pages): (u64, usize),
        directory: &Path,
    ) -> Result<Disk<'s>> {
        let session = bench.session();
        let bytes = backing_bytes + (pages * PAGE_BYTES) as u64;
        let medium = match speed {
            Speed::Fast => {
                let file = ScratchFile::new(directory)?;
                session.note(Undo::File(file.path().to_owned()))?;
                Medium::File(file)
            }
            Speed::Ssd | Speed::Throttled => {
                Medium::Loop(Device::set_up(session, &Kind::Disk, bytes, bench.compcache())?)
            }
        };
        let disk = Disk { session, medium, speed, backing_bytes };
        drop(disk.slow_down()?);
        write_all_blocks(disk.path(), bytes)?;
        Ok(disk)
    }

    fn path(&self) -> &Path {
        match &self.medium {
            Medium::File(file) => file.path(),
            Medium::Loop(device) => device.path(),
        }
    }

    fn open(&self) -> Result<File> {
        let opened = File::options().read(true).write(true).open(self.path());
        opened.with_context(|| self.path().display().to_string())
    }

    /// A backing on the part that is ours.
    ///
    /// # Errors
    /// There can be none; the file system takes no direct I/O.
    pub fn backing(&self, segment_bytes: usize) -> Result<Arc<Backing>> {
        let medium = FileMedium::new(self.open()?.into());
        if !medium.is_direct() {
            bail!("{}: its file system takes no direct I/O; choose another --dir", self.path().display());
        }
        let config = BackingConfig { capacity_bytes: self.backing_bytes, segment_bytes };
        Ok(Backing::new(Box::new(medium), config)?)
    }

    /// The part where every page has a place of its own.
    ///
    /// # Errors
    /// The file system takes no direct I/O.
    pub fn places(&self) -> Result<Places> {
        let opened = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(self.path());
        let file = opened.with_context(|| self.path().display().to_string())?;
        Ok(Places {
            file,
            path: self.path().to_owned(),
            from_bytes: self.backing_bytes,
            buffer: Box::new(Aligned::new()),
        })
    }

    /// Slows it down, if it is a slow one.
    ///
    /// # Errors
    /// The kernel does not.
    pub fn slow_down(&self) -> Result<Slow<'s>> {
        let slow = Slow(self.session, self.session.mark());
        if let Medium::Loop(device) = &self.medium {
            loop_device::throttle(self.session, device.path(), self.speed.throttle(), None)?;
        }
        Ok(slow)
    }

    /// Fails if so many reads in so many seconds are more than a slow one lets through.
    ///
    /// # Errors
    /// They are.
    pub fn check_slow(&self, reads: usize, seconds: f64) -> Result<()> {
        self.speed.throttle().check(Traffic { reads: reads as u64, ..Traffic::default() }, seconds)
    }
}

/// The baseline: every page uncompressed at its place, read and written with direct I/O by itself.
pub struct Places {
    file: File,
    path: PathBuf,
    from_bytes: u64,
    buffer: Box<Aligned>,
}

/// As direct I/O wants it.
#[repr(align(4096))]
struct Aligned([u8; PAGE_BYTES]);

impl Aligned {
    fn new() -> Aligned {
        Aligned([0; PAGE_BYTES])
    }
}

impl Places {
    fn at(&self, index: usize) -> u64 {
        self.from_bytes + (index * PAGE_BYTES) as u64
    }
}

impl Swap for Places {
    fn read(&mut self, index: usize, page: &mut Page) -> Result<()> {
        let at = self.at(index);
        self.file.read_exact_at(&mut self.buffer.0, at).with_context(|| self.path.display().to_string())?;
        *page = self.buffer.0;
        Ok(())
    }

    fn write(&mut self, index: usize, page: &Page) -> Result<()> {
        self.buffer.0 = *page;
        self.file.write_all_at(&self.buffer.0, self.at(index)).with_context(|| self.path.display().to_string())
    }
}
