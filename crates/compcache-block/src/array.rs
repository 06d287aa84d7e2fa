//! Plain memory as a disk: nothing compressed, nothing clever. What the others are compared with.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::device::{
    BLOCK_BYTES, BlockDevice, Extent, Lane, Manner, Outcome, Request, Zeroes, check_range, check_size,
};
use crate::error::DeviceError;
use crate::range::Split;

/// A block device that is an array of bytes. Each request is one step; there are no holes.
pub struct Array {
    bytes: RwLock<Vec<u8>>,
}

impl Array {
    /// The largest, 64 GiB: it is memory, after all.
    pub const SIZE_BYTES_MAX: u64 = 64 << 30;

    /// An array of `size_bytes` zeroes.
    ///
    /// # Errors
    /// [`DeviceError::BadSize`].
    pub fn new(size_bytes: u64) -> Result<Array, DeviceError> {
        check_size(size_bytes, Array::SIZE_BYTES_MAX)?;
        Ok(Array { bytes: RwLock::new(vec![0; size_bytes as usize]) })
    }

    /// Cuts off the end, or adds zeroes there.
    ///
    /// # Errors
    /// [`DeviceError::BadSize`]; the size is as it was.
    pub fn resize(&self, size_bytes: u64) -> Result<(), DeviceError> {
        check_size(size_bytes, Array::SIZE_BYTES_MAX)?;
        self.change().resize(size_bytes as usize, 0);
        Ok(())
    }

    fn look(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.bytes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.bytes.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockDevice for Array {
    fn size_bytes(&self) -> u64 {
        self.look().len() as u64
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        Ok(Box::new(ArrayLane(self)))
    }
}

struct ArrayLane(Arc<Array>);

impl Lane for ArrayLane {
    fn read(&mut self, offset_bytes: u64, into: &mut [u8], _: Manner) -> Result<Outcome, DeviceError> {
        let bytes = self.0.look();
        check_range(Request::Read, offset_bytes, into.len() as u64, bytes.len() as u64)?;
        into.copy_from_slice(&bytes[offset_bytes as usize..][..into.len()]);
        Ok(Outcome::Done(()))
    }

    fn write(&mut self, offset_bytes: u64, from: &[u8], _: Manner) -> Result<Outcome, DeviceError> {
        let mut bytes = self.0.change();
        check_range(Request::Write, offset_bytes, from.len() as u64, bytes.len() as u64)?;
        bytes[offset_bytes as usize..][..from.len()].copy_from_slice(from);
        Ok(Outcome::Done(()))
    }

    fn flush(&mut self, _: Manner) -> Result<Outcome, DeviceError> {
        Ok(Outcome::Done(()))
    }

    fn discard(&mut self, offset_bytes: u64, length_bytes: u64, _: Manner) -> Result<Outcome, DeviceError> {
        let mut bytes = self.0.change();
        check_range(Request::Discard, offset_bytes, length_bytes, bytes.len() as u64)?;
        let whole = Split::new(offset_bytes, length_bytes).whole;
        bytes[whole.start as usize * BLOCK_BYTES..whole.end as usize * BLOCK_BYTES].fill(0);
        Ok(Outcome::Done(()))
    }

    fn write_zeroes(
        &mut self,
        offset_bytes: u64,
        length_bytes: u64,
        _: Zeroes,
        _: Manner,
    ) -> Result<Outcome, DeviceError> {
        let mut bytes = self.0.change();
        check_range(Request::WriteZeroes, offset_bytes, length_bytes, bytes.len() as u64)?;
        bytes[offset_bytes as usize..][..length_bytes as usize].fill(0);
        Ok(Outcome::Done(()))
    }

    fn extent(&mut self, offset_bytes: u64, length_bytes: u64, _: Manner) -> Result<Outcome<Extent>, DeviceError> {
        check_range(Request::Extent, offset_bytes, length_bytes, self.0.size_bytes())?;
        Ok(Outcome::Done(Extent { length_bytes, is_hole: false }))
    }
}
