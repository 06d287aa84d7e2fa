//! The region in this process's memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ptr::{NonNull, null_mut};

use compcache_pager::shared::{REGION_BYTES, Region};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A shared mapping of a region's file.
pub struct Mapping {
    region: NonNull<Region>,
}

impl Mapping {
    /// Maps `file`, which the caller has sized.
    ///
    /// # Errors
    /// If the kernel refuses, or the file is smaller than a region: then a read of its end would kill us.
    pub fn of(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() < REGION_BYTES as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: a new mapping at a place of the kernel's choosing changes no memory in use.
        let start =
            unsafe { mmap(null_mut(), REGION_BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) }?;
        Ok(Self { region: NonNull::new(start.cast()).expect("mmap answers no null pointer without MAP_FIXED") })
    }

    /// The region.
    pub fn region(&self) -> &Region {
        // SAFETY: the mapping is REGION_BYTES long, aligned to a page, and lives as long as `self`. Every field of
        // `Region` is an atomic integer, so any content is valid, and other processes may change it meanwhile. They
        // could truncate the file, which would kill us by SIGBUS: the name is known to processes of the tree alone, and
        // the program would go on without us.
        unsafe { self.region.as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `of` with this length, and no reference outlives `self`.
        let _ = unsafe { munmap(self.region.as_ptr().cast(), REGION_BYTES) };
    }
}
