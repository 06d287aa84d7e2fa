//! A block device, or a file, as a device: opened for nobody else, and given back as it was asked to be.
//!
//! Input and output are direct, so that the page cache holds no second copy of what our users' page cache holds already; where a file system has
//! no direct input and output, they are not ([`Origin::is_direct`]). What is written is where a plain write(2) puts it, and lasts when
//! [`Origin::flush`] has returned.
//!
//! | asked             | of a file, or a device                    | where there is no such thing    |
//! |-------------------|-------------------------------------------|---------------------------------|
//! | forced write      | pwritev2, RWF_DSYNC                       | (all have it)                   |
//! | flush             | fdatasync                                 | (all have it)                   |
//! | holes             | fallocate, punch a hole                   | the caller is told              |
//! | zeroes            | fallocate, zero a range                   | the caller is told              |
//!
//! A device punches holes by the zeroes that it can write without storing them; one that can only discard, so that anything may be read
//! afterwards, says that it cannot. All requests wait. A write of a part of a block reads the block, changes it and writes it, with the stripe of its
//! megabyte held alone ([`crate::stripes`]).

mod lane;

use std::fs::{self, OpenOptions};
use std::io::{IoSlice, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{
    FallocateFlags, FlockOperation, OFlags, fallocate, fcntl_getfl, fcntl_setfl, fdatasync, flock, ioctl_blksszget,
};
use rustix::io::{Errno, ReadWriteFlags, pread, pwritev2};

use crate::device::{BLOCK_BYTES, BlockDevice, Lane};
use crate::error::DeviceError;
use crate::node::loop_device_over;
use crate::stripes::Stripes;

/// What file systems in files are made for.
const FILE_SECTOR_BYTES: u32 = 512;

/// A block device or a file that holds what a disk shows.
pub struct Origin {
    file: OwnedFd,
    path: PathBuf,
    size_bytes: u64,
    left_out_bytes: u64,
    sector_bytes: u32,
    is_direct: bool,
    stripes: Stripes,
}

/// Why something cannot be an origin. Nothing of it was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OriginError {
    /// It cannot be opened for reading and writing, or not be looked at.
    #[error("cannot open {}", path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        error: std::io::Error,
    },
    /// It is neither a block device nor a file.
    #[error("{} is neither a block device nor a file", path.display())]
    Unsuitable {
        /// Which.
        path: PathBuf,
    },
    /// The kernel keeps the device for somebody: it is mounted, used for swap, or a part of something else.
    #[error("{} is in use (mounted, swap, part of a volume, or open for somebody alone); it must be this disk's alone", path.display())]
    DeviceInUse {
        /// Which.
        path: PathBuf,
    },
    /// Another process has locked the file.
    #[error("{} is locked by another process; it must be this disk's alone", path.display())]
    Locked {
        /// Which.
        path: PathBuf,
    },
    /// A loop device is set up over it.
    #[error("{} is in use by {}; detach that first (losetup -d)", path.display(), by.display())]
    UnderLoop {
        /// Which.
        path: PathBuf,
        /// The loop device.
        by: PathBuf,
    },
    /// There is not one whole block.
    #[error("{} has {size_bytes} bytes, which is not one block of 4096", path.display())]
    TooSmall {
        /// Which.
        path: PathBuf,
        /// Its size.
        size_bytes: u64,
    },
    /// The sectors of the device are larger than blocks.
    #[error("{} has sectors of {sector_bytes} bytes; up to 4096 can be served", path.display())]
    LargeSectors {
        /// Which.
        path: PathBuf,
        /// Their size.
        sector_bytes: u32,
    },
}

impl Origin {
    /// Opens a block device, or a file, that nobody else uses.
    ///
    /// For a device the kernel sees to that as long as it is open. A file is locked (flock), and refused if a loop device is over it; who
    /// writes to it all the same is not noticed.
    ///
    /// # Errors
    /// [`OriginError`].
    pub fn open(path: &Path) -> Result<Origin, OriginError> {
        let whole = fs::canonicalize(path).map_err(|error| OriginError::Open { path: path.into(), error })?;
        let failed = |error| OriginError::Open { path: whole.clone(), error };
        let there = fs::metadata(&whole).map_err(failed)?;
        let is_device = there.file_type().is_block_device();
        if !is_device && !there.is_file() {
            return Err(OriginError::Unsuitable { path: whole });
        }
        // With O_EXCL the kernel gives a block device to nobody but us, and not if it is mounted or swapped to.
        let flags = if is_device { OFlags::EXCL } else { OFlags::empty() };
        let opened = OpenOptions::new().read(true).write(true).custom_flags(flags.bits() as i32).open(&whole);
        let mut file = opened.map_err(|error| match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::BUSY) => OriginError::DeviceInUse { path: whole.clone() },
            _ => failed(error),
        })?;
        let mut sector_bytes = FILE_SECTOR_BYTES;
        if is_device {
            sector_bytes = ioctl_blksszget(&file).map_err(|error| failed(error.into()))?;
            if sector_bytes as usize > BLOCK_BYTES {
                return Err(OriginError::LargeSectors { path: whole, sector_bytes });
            }
        } else {
            // Some file systems have no locks.
            if let Err(Errno::WOULDBLOCK) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
                return Err(OriginError::Locked { path: whole });
            }
        }
        // Which claims neither a file nor a device.
        if let Some(by) = loop_device_over(&whole) {
            return Err(OriginError::UnderLoop { path: whole, by });
        }
        let all_bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let left_out_bytes = all_bytes % BLOCK_BYTES as u64;
        if all_bytes == left_out_bytes {
            return Err(OriginError::TooSmall { path: whole, size_bytes: all_bytes });
        }
        let direct = fcntl_getfl(&file).and_then(|flags| fcntl_setfl(&file, flags | OFlags::DIRECT));
        Ok(Origin {
            file: file.into(),
            path: whole,
            size_bytes: all_bytes - left_out_bytes,
            left_out_bytes,
            sector_bytes,
            is_direct: direct.is_ok(),
            stripes: Stripes::new(lane::SEGMENT_BLOCKS),
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What lies behind the last whole block, and is out of reach; in bytes.
    pub fn left_out_bytes(&self) -> u64 {
        self.left_out_bytes
    }

    /// Whether the page cache is left out.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Reads whole blocks into aligned memory.
    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < into.len() {
            match pread(&self.file, &mut into[done..], offset_bytes + done as u64) {
                // Somebody has made the file shorter.
                Ok(0) => return Err(below(Errno::IO)),
                Ok(more) => done += more,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(below(errno)),
            }
        }
        Ok(())
    }

    /// Writes whole blocks from aligned memory. With `forced` they last when it returns.
    fn write(&self, offset_bytes: u64, from: &[u8], forced: bool) -> Result<(), DeviceError> {
        let flags = if forced { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
        let mut done = 0;
        while done < from.len() {
            match pwritev2(&self.file, &[IoSlice::new(&from[done..])], offset_bytes + done as u64, flags) {
                Ok(0) => return Err(below(Errno::IO)),
                Ok(more) => done += more,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(below(errno)),
            }
        }
        Ok(())
    }

    /// Makes the range read as zeroes, without room for it. `false`: it cannot, and nothing was changed.
    fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<bool, DeviceError> {
        self.allocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset_bytes, length_bytes)
    }

    /// Makes the range read as zeroes, with room for it. `false`: it cannot, and nothing was changed.
    fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<bool, DeviceError> {
        self.allocate(FallocateFlags::ZERO_RANGE, offset_bytes, length_bytes)
    }

    fn allocate(&self, how: FallocateFlags, offset_bytes: u64, length_bytes: u64) -> Result<bool, DeviceError> {
        loop {
            match fallocate(&self.file, how, offset_bytes, length_bytes) {
                Ok(()) => return Ok(true),
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(below(errno)),
            }
        }
    }

    /// Everything that was written lasts when this returns.
    fn flush(&self) -> Result<(), DeviceError> {
        fdatasync(&self.file).map_err(below)
    }
}

impl BlockDevice for Origin {
    /// Of its whole blocks.
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The device's own; a file has those of most disks.
    fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// Where it has neither holes nor zeroes of its own, they are written as data.
    fn zeroes_quickly(&self) -> bool {
        false
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        Ok(Box::new(lane::OriginLane::new(self)))
    }
}

fn below(errno: Errno) -> DeviceError {
    DeviceError::Below { errno: errno.raw_os_error() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of(size_bytes: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(size_bytes).unwrap();
        file
    }

    #[test]
    fn the_size_is_that_of_the_whole_blocks_and_there_must_be_one() {
        let file = file_of(3 * 4096 + 511);
        let origin = Origin::open(file.path()).unwrap();
        assert_eq!((origin.size_bytes(), origin.left_out_bytes()), (3 * 4096, 511));
        assert!(matches!(Origin::open(file_of(4095).path()), Err(OriginError::TooSmall { size_bytes: 4095, .. })));
    }

    #[test]
    fn what_is_somebody_elses_or_no_place_for_blocks_is_refused() {
        let file = file_of(8192);
        let taken = Origin::open(file.path()).unwrap();
        assert!(matches!(Origin::open(file.path()), Err(OriginError::Locked { .. })));
        drop(taken);
        Origin::open(file.path()).unwrap();
        assert!(matches!(Origin::open(Path::new("/tmp")), Err(OriginError::Unsuitable { .. })));
        assert!(matches!(Origin::open(Path::new("/dev/null")), Err(OriginError::Unsuitable { .. })));
        assert!(matches!(Origin::open(Path::new("/nonexistent/x")), Err(OriginError::Open { .. })));
    }
}
