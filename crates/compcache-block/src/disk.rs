//! A pool as a disk: block `n` is page `n`.
//!
//! | request                | whole blocks                      | parts of blocks                                |
//! |------------------------|-----------------------------------|------------------------------------------------|
//! | read                   | a run of pages, absent as zeroes  | the page, of which a part is copied            |
//! | write                  | a run of pages                    | read, changed, written, nobody else between    |
//! | discard                | pages discarded                   | left alone                                     |
//! | write zeroes           | discarded, or same-filled pages   | as a write                                     |
//! | flush, forced access   | nothing to do: it is RAM          |                                                |
//!
//! A write that meets the limit is refused (ENOSPC) with the blocks before the refused one written. Blocks that have been
//! accepted are never given up for others. Zeroes are taken nevertheless: those for which there is no table stay absent.
//!
//! If the pool has a backing, blocks that are there are fetched, and a write that meets the limit has others leave first, by
//! whoever may wait; it is refused only if the backing takes no more. A part of a block that is on the backing is
//! changed with its stripe held while it is fetched: who writes beside it then waits, too.
//!
//! # What keeps concurrent requests apart
//! Whole pages are atomic in the pool. A write of a part reads and writes a page, which takes excluding those who change
//! the same page: see [`crate::stripes`]. Changes of the size exclude each other, and a shrinking disk waits, stripe by stripe, for
//! the writes it has let in before it discards what lies beyond the new end; so nothing old comes back when it grows.
//!
//! The numbers of the pool are the disk's: [`Disk::stats`] adds the requests that were out of range, of which the pool
//! never hears.

mod lane;

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use compcache_store::{PageIndex, Pool, PoolStats};

use crate::device::{BLOCK_BYTES, BlockDevice, Lane, Request, check_range, check_size};
use crate::error::DeviceError;
use crate::stripes::Stripes;

/// A [`Pool`] as a block device. Keeps everything in RAM, compressed, or on the pool's backing; nothing lasts longer than the
/// process.
pub struct Disk {
    pool: Arc<Pool>,
    /// Read with each request; changed in one's turn only.
    size_bytes: AtomicU64,
    turn: Mutex<()>,
    stripes: Stripes,
    invalid_io: AtomicU64,
    reserve_only: AtomicBool,
    /// A write waited for the reserve in vain, and none has succeeded since: others need not wait.
    exhausted: AtomicBool,
    /// Refusals by the pool of which no client hears, since the write is made again: when others have left for the backing, or
    /// the reserve is refilled.
    not_told: AtomicU64,
    /// Pages that waited for the reserve for some time, and were taken.
    late_writes: AtomicU64,
    /// Since when writes have been held up by the medium of another disk, and when one looked last.
    held_up_ns: [AtomicU64; 2],
}

impl Disk {
    /// The largest disk: 256 TiB, the pages of a pool.
    pub const SIZE_BYTES_MAX: u64 = PageIndex::LIMIT * BLOCK_BYTES as u64;

    /// A disk of `size_bytes` over `pool`, which nobody else should write. What the pool holds is on the disk.
    ///
    /// # Errors
    /// [`DeviceError::BadSize`].
    pub fn new(pool: Arc<Pool>, size_bytes: u64) -> Result<Disk, DeviceError> {
        check_size(size_bytes, Disk::SIZE_BYTES_MAX)?;
        pool.set_disk_bytes(size_bytes);
        Ok(Disk {
            pool,
            size_bytes: AtomicU64::new(size_bytes),
            turn: Mutex::new(()),
            stripes: Stripes::new(lane::SEGMENT_BLOCKS),
            invalid_io: AtomicU64::new(0),
            reserve_only: AtomicBool::new(false),
            exhausted: AtomicBool::new(false),
            not_told: AtomicU64::new(0),
            late_writes: AtomicU64::new(0),
            held_up_ns: [const { AtomicU64::new(0) }; 2],
        })
    }

    /// Lanes made from now on never ask the system for memory, if the store has a reserve: for a disk that is swapped to. A write
    /// for which there is no memory waits a quarter of a second at most, and is then refused with
    /// [`DeviceError::MemoryRefused`]: the system keeps the page, and may end whoever takes too much.
    pub fn set_reserve_only(&self) {
        self.reserve_only.store(true, Relaxed);
    }

    /// The pool below: its codec, limit and latencies.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The statistics now, those of the pool; what was out of range counts as invalid, and as failed what failed for a client.
    pub fn stats(&self) -> PoolStats {
        let not_told = self.not_told.load(Relaxed);
        let pool = self.pool.stats();
        PoolStats {
            invalid_io: pool.invalid_io + self.invalid_io.load(Relaxed),
            failed_writes: pool.failed_writes.saturating_sub(not_told),
            ..pool
        }
    }

    /// Of the pages that were taken, those that had waited for the reserve for 8 ms or longer: where they are many, the system gives
    /// hardly any memory.
    pub fn late_writes(&self) -> u64 {
        self.late_writes.load(Relaxed)
    }

    /// Changes the size while the disk is in use. What lies beyond a new, smaller end is discarded, and reads as zeroes if
    /// the disk grows again. Requests in flight end as before the change, or with
    /// [`DeviceError::BeyondEnd`], a part of them done.
    ///
    /// # Errors
    /// [`DeviceError::BadSize`]; the size is as it was.
    pub fn resize(&self, size_bytes: u64) -> Result<(), DeviceError> {
        self.resize_if(size_bytes, || Ok::<(), Infallible>(()))?.map_err(|never| match never {})
    }

    /// The same, if `told` succeeds, which is called when the disk has the new size, and nothing beyond a smaller end is discarded yet. Else the size is as it
    /// was, and so are the contents; that is what the inner result tells. Meanwhile requests beyond the smaller end fail.
    ///
    /// # Errors
    /// [`DeviceError::BadSize`]; the size is as it was.
    pub fn resize_if<E>(
        &self,
        size_bytes: u64,
        told: impl FnOnce() -> Result<(), E>,
    ) -> Result<Result<(), E>, DeviceError> {
        check_size(size_bytes, Disk::SIZE_BYTES_MAX)?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.size_bytes.swap(size_bytes, SeqCst);
        self.pool.set_disk_bytes(size_bytes);
        if let Err(error) = told() {
            self.size_bytes.store(before, SeqCst);
            self.pool.set_disk_bytes(before);
            return Ok(Err(error));
        }
        if size_bytes < before {
            self.stripes.wait_for_all();
            let block = BLOCK_BYTES as u64;
            self.pool.discard_range(PageIndex(size_bytes / block), (before - size_bytes) / block);
        }
        Ok(Ok(()))
    }

    /// Forgets every block. The size stays. Writes in flight come before or after, each block for itself.
    pub fn reset(&self) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let _shared = self.stripes.share_all();
        self.pool.discard_range(PageIndex(0), PageIndex::LIMIT);
    }

    /// Refuses, and counts, a range that is not inside.
    fn check(&self, request: Request, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        check_range(request, offset_bytes, length_bytes, self.size_bytes.load(SeqCst))
            .inspect_err(|_| _ = self.invalid_io.fetch_add(1, Relaxed))
    }
}

impl BlockDevice for Disk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(SeqCst)
    }

    /// What is written is in RAM, or as good as there: a backing lasts no longer.
    fn needs_flush(&self) -> bool {
        false
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        Ok(Box::new(lane::DiskLane::new(self)?))
    }
}

#[cfg(test)]
mod tests;
