//! Another device, with a compressed cache in front of it: zcache for a whole partition.
//!
//! | request              | blocks in the pool           | others                               | afterwards in the pool             |
//! |----------------------|------------------------------|--------------------------------------|------------------------------------|
//! | read                 | decompressed; nobody waits   | read below, by who may wait          | both                               |
//! | write                | dropped                      | written below, then answered         | soon, if the cache's thread keeps up |
//! | zeroes               | dropped                      | written below, then answered         | none of them, until they are read  |
//! | discard              | dropped                      | handed on                            | none of them                       |
//! | flush, forced access | -                            | handed on                            | all; none if it failed             |
//!
//! Nothing is kept back: what was answered is where the device below has put it, so that holds at each flush what it would without us, and there
//! is nothing to be saved when the process ends, however that comes.
//!
//! # Why a block is never an old one
//! To the cache each megabyte of the device is a file of 256 pages. Its order of reads and writes (compcache-cache) holds for
//! them: a write begins by dropping its blocks and by making void what others are reading of that megabyte, and does so again when it is done. A read that
//! took from below before or during it is answered with what it took, as on any disk, but not kept; nor is what was written, where two writes met. What a write failed at is not in the
//! pool either: it is read from below next. Nobody else writes below ([`Origin`](crate::Origin) sees to it), so there are no stamps.
//!
//! # Allocations
//! Reading what is in the pool, and writing, allocate nothing. Keeping what was read below does, for the cache's index.

mod lane;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use compcache_cache::{Cache, FileId};
use compcache_store::Codec;

use crate::device::{BLOCK_BYTES, BlockDevice, Lane};
use crate::error::DeviceError;

/// Blocks that are one file to the cache: a megabyte.
const SEGMENT_BLOCKS: u64 = 256;

/// A device whose blocks are kept compressed when they have been read or written.
pub struct Cached {
    below: Arc<dyn BlockDevice>,
    cache: Arc<Cache<()>>,
    counted: Counted,
}

#[derive(Default)]
struct Counted {
    reads: AtomicU64,
    writes: AtomicU64,
    discards: AtomicU64,
    flushes: AtomicU64,
    failed: AtomicU64,
}

/// What the device below was asked. [`BelowStats::TABLE`] says what each means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "TABLE is their documentation")]
pub struct BelowStats {
    pub blocks_read: u64,
    pub blocks_written: u64,
    pub blocks_discarded: u64,
    pub flushes: u64,
    pub failed: u64,
}

/// One number: its name, how to read it, and what it means.
type Row = (&'static str, fn(&BelowStats) -> u64, &'static str);

impl BelowStats {
    /// Every statistic: name, value, meaning.
    pub const TABLE: &'static [Row] = &[
        ("origin_reads", |s| s.blocks_read, "Blocks read from the origin."),
        (
            "origin_writes",
            |s| s.blocks_written,
            "Blocks written to it, zeroes included; a part of a block counts as one.",
        ),
        ("origin_discards", |s| s.blocks_discarded, "Blocks discarded there."),
        ("origin_flushes", |s| s.flushes, "Flushes handed on to it."),
        ("origin_failed", |s| s.failed, "Requests that it failed."),
    ];
}

impl Cached {
    /// A device that shows `below`, and keeps what is read of it in at most `memory_bytes`, tables and index included.
    ///
    /// Nobody else may write to `below`. If its size changes, the cache is to be cleared.
    ///
    /// # Errors
    /// The system refuses addresses or memory, or there is no such codec.
    pub fn new(below: Arc<dyn BlockDevice>, memory_bytes: u64, codec: Codec) -> Result<Cached, DeviceError> {
        Ok(Cached { below, cache: Arc::new(Cache::new(memory_bytes, codec)?), counted: Counted::default() })
    }

    /// The cache: its limit, codec and statistics. It wants a thread ([`Cache::keep_up`]); without, nothing is kept of what is written.
    pub fn cache(&self) -> &Arc<Cache<()>> {
        &self.cache
    }

    /// What the device below was asked so far.
    pub fn below_stats(&self) -> BelowStats {
        let Counted { reads, writes, discards, flushes, failed } = &self.counted;
        BelowStats {
            blocks_read: reads.load(Relaxed),
            blocks_written: writes.load(Relaxed),
            blocks_discarded: discards.load(Relaxed),
            flushes: flushes.load(Relaxed),
            failed: failed.load(Relaxed),
        }
    }
}

/// The megabyte that a block is in, as the cache knows it, and which page of it the block is.
fn place_of(block: u64) -> (FileId, u32) {
    (FileId { dev: 0, ino: block / SEGMENT_BLOCKS }, (block % SEGMENT_BLOCKS) as u32)
}

impl BlockDevice for Cached {
    fn size_bytes(&self) -> u64 {
        self.below.size_bytes()
    }

    fn sector_bytes(&self) -> u32 {
        self.below.sector_bytes()
    }

    fn needs_flush(&self) -> bool {
        self.below.needs_flush()
    }

    fn zeroes_quickly(&self) -> bool {
        self.below.zeroes_quickly()
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        Ok(Box::new(lane::CachedLane::new(self)?))
    }
}

const _: () = assert!(SEGMENT_BLOCKS * BLOCK_BYTES as u64 == 1 << 20);

#[cfg(test)]
mod tests;
