//! Everything that can go wrong with a device, grouped by what the caller can do about it.

use compcache_store::StoreError;
use rustix::io::Errno;

use crate::device::{BLOCK_BYTES, Request};

/// Why a device did not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The request is wrong: it reaches beyond the end. Nothing was touched.
    #[error("{request:?} of {length_bytes} bytes at {offset_bytes} reaches beyond the end at {size_bytes}")]
    BeyondEnd {
        /// What was asked.
        request: Request,
        /// Where.
        offset_bytes: u64,
        /// How much.
        length_bytes: u64,
        /// The size of the device then.
        size_bytes: u64,
    },
    /// The size is not a multiple of a block, or larger than the device can be. The device is as it was.
    #[error(
        "{size_bytes} bytes is no size: {}",
        if size_bytes > size_bytes_max { format!("the most is {size_bytes_max}") } else { "not a multiple of 4096".into() }
    )]
    BadSize {
        /// The size asked for.
        size_bytes: u64,
        /// The largest this device can be.
        size_bytes_max: u64,
    },
    /// The pool or its store holds as much memory as it may. Discard, or raise the limit, and write again: blocks that
    /// were refused still hold what they held.
    #[error("no room: {0}")]
    LimitReached(#[source] StoreError),
    /// The system refused memory. As after [`DeviceError::LimitReached`].
    #[error("no memory: {0}")]
    MemoryRefused(#[source] StoreError),
    /// What is stored for this block is not what was written. Its content is lost; writing all of it or discarding it ends
    /// the state.
    #[error("the block at {offset_bytes} is damaged")]
    Damaged {
        /// Where the block begins.
        offset_bytes: u64,
    },
    /// The block lies on the backing, which cannot be read there. Other blocks are not affected; writing all of the block, or
    /// discarding it, ends the state.
    #[error("the block at {offset_bytes} lies on a backing that cannot be read")]
    Unreachable {
        /// Where the block begins.
        offset_bytes: u64,
    },
    /// The device below failed, and said why.
    #[error("the device below failed with errno {errno}")]
    Below {
        /// What it said, passed on as it is.
        errno: i32,
    },
    /// The device below returned something else than was written to it. Do not trust it with more.
    #[error("the device below lies: the block at {offset_bytes} is not what was written")]
    Lied {
        /// Where the first wrong block begins.
        offset_bytes: u64,
    },
    /// The engine failed where it must not: a fault in a codec or in ours.
    #[error("the engine failed: {0}")]
    Engine(#[source] StoreError),
}

impl DeviceError {
    /// The errno that says the most of it: what a system call on such a device would fail with.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            // As write(2) at the end of a disk, and as NBD wants it.
            DeviceError::BeyondEnd { request: Request::Write | Request::WriteZeroes, .. } => Errno::NOSPC,
            DeviceError::BeyondEnd { .. } | DeviceError::BadSize { .. } => Errno::INVAL,
            DeviceError::LimitReached(_) => Errno::NOSPC,
            DeviceError::MemoryRefused(_) => Errno::NOMEM,
            DeviceError::Below { errno } => return *errno,
            DeviceError::Damaged { .. }
            | DeviceError::Unreachable { .. }
            | DeviceError::Lied { .. }
            | DeviceError::Engine(_) => Errno::IO,
        };
        errno.raw_os_error()
    }
}

impl From<StoreError> for DeviceError {
    fn from(error: StoreError) -> DeviceError {
        match error {
            StoreError::LimitReached { .. } => DeviceError::LimitReached(error),
            StoreError::MemoryRefused { .. } => DeviceError::MemoryRefused(error),
            StoreError::Corrupt { index } => DeviceError::Damaged { offset_bytes: index.0 * BLOCK_BYTES as u64 },
            StoreError::BackingFailed { index, .. } => {
                DeviceError::Unreachable { offset_bytes: index.0 * BLOCK_BYTES as u64 }
            }
            _ => DeviceError::Engine(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use compcache_store::{MediumError, PageIndex};

    use super::*;

    #[test]
    fn every_error_of_the_store_has_the_errno_a_disk_would_give() {
        let errno = |error: StoreError| DeviceError::from(error).errno();
        assert_eq!(errno(StoreError::LimitReached { used_bytes: 2, limit_bytes: 1 }), Errno::NOSPC.raw_os_error());
        assert_eq!(errno(StoreError::MemoryRefused { bytes: 1 }), Errno::NOMEM.raw_os_error());
        assert_eq!(errno(StoreError::Corrupt { index: PageIndex(1) }), Errno::IO.raw_os_error());
        assert_eq!(errno(StoreError::CodecFailed), Errno::IO.raw_os_error());
        let failed = StoreError::BackingFailed { index: PageIndex(1), error: MediumError::Short };
        assert_eq!(errno(failed), Errno::IO.raw_os_error());
    }

    #[test]
    fn beyond_the_end_is_no_space_for_writers_and_invalid_for_others() {
        let errno =
            |request| DeviceError::BeyondEnd { request, offset_bytes: 0, length_bytes: 1, size_bytes: 0 }.errno();
        assert_eq!(errno(Request::Write), Errno::NOSPC.raw_os_error());
        assert_eq!(errno(Request::WriteZeroes), Errno::NOSPC.raw_os_error());
        for request in [Request::Read, Request::Discard, Request::Extent] {
            assert_eq!(errno(request), Errno::INVAL.raw_os_error());
        }
    }

    #[test]
    fn a_damaged_page_is_named_by_its_offset() {
        let damaged = DeviceError::from(StoreError::Corrupt { index: PageIndex(3) });
        assert_eq!(damaged, DeviceError::Damaged { offset_bytes: 12288 });
    }
}
