//! Whole pages of memory that do not come from the allocator: what direct input and output ask for.

#![allow(unsafe_code)]

use core::marker::PhantomData;
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

/// A type whose bytes may all be zero.
///
/// # Safety
/// Zeroes must be a value of it, and it must not be aligned to more than a page.
pub(crate) unsafe trait Zeroable: Copy {}

/// So many values, zeroes at first. Takes memory as they are changed.
pub(crate) struct Table<T> {
    buffer: Buffer,
    values: PhantomData<T>,
    count: usize,
}

impl<T: Zeroable> Table<T> {
    pub fn new(count: usize) -> Result<Table<T>, StoreError> {
        let refused = StoreError::MemoryRefused { bytes: u64::MAX };
        let bytes = count.checked_mul(size_of::<T>()).ok_or(refused)?;
        Ok(Table { buffer: Buffer::new(bytes)?, values: PhantomData, count })
    }

    /// Address and length.
    pub fn range(&self) -> (usize, usize) {
        self.buffer.range()
    }
}

impl<T: Zeroable> Deref for Table<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: so many bytes are there, on a page's boundary; they are zeroes, which are values, or values written here.
        unsafe { core::slice::from_raw_parts(self.buffer.as_ptr().cast(), self.count) }
    }
}

impl<T: Zeroable> DerefMut for Table<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { core::slice::from_raw_parts_mut(self.buffer.as_mut_ptr().cast(), self.count) }
    }
}
