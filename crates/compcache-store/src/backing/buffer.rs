//! Whole pages of memory that do not come from the allocator: what direct input and output ask for.

#![allow(unsafe_code)]

use core::ops::{Deref, DerefMut};

use crate::error::StoreError;
use crate::region::Region;

/// So many bytes, zeroes at first, aligned to a page. Takes no memory before it is touched.
pub(crate) struct Buffer {
    region: Region,
    bytes: usize,
}

impl Buffer {
    pub fn new(bytes: usize) -> Result<Buffer, StoreError> {
        let region = Region::reserve(bytes, bytes, false)?;
        region.ensure(bytes)?;
        Ok(Buffer { region, bytes })
    }

    /// Address and length.
    pub fn range(&self) -> (usize, usize) {
        self.region.range()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: all of it is open since `new`, initialised since it is fresh memory, and this buffer's alone.
        unsafe { core::slice::from_raw_parts(self.region.base().as_ptr(), self.bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { core::slice::from_raw_parts_mut(self.region.base().as_ptr(), self.bytes) }
    }
}
