//! Cold pages: what nobody has used for a while is compressed again, sixteen pages together, by the evictor when it has nothing to evict
//! ([`Recompression`]).
//!
//! Under zstd, and together, pages of programs take half or two thirds of what they take under LZ4; the first read of one
//! takes longer then. So it is for pages that were not used for a minute (`compcache run --recompress-after`), and as memory
//! becomes free by it more of the program may be resident.
//!
//! Like compaction it is never under way while the process may be copied, since the evictor freezes itself. What becomes free the evictor's
//! compaction brings together, step by step.

use crate::pager::Pager;
use alloc::sync::Arc;
use compcache_store::{Recompression, Recompressor, Store, Worker};
use core::sync::atomic::Ordering::*;

/// What the evictor needs for it.
pub struct Cold(Recompression);

impl Cold {
    /// For pages that were not used for `after_ns`, at a level of zstd. All memory it will ever need is mapped, and hardly any of it is touched. `None`
    /// where there is none.
    pub fn new(store: &Arc<Store>, level: i8, after_ns: u64, now_ns: u64) -> Option<Cold> {
        let recompressor = Recompressor::new(store, level).ok()?.without_compaction();
        Some(Cold(Recompression::new(recompressor, after_ns, now_ns)))
    }

    /// In a copy of the process: a visit begins anew.
    pub fn reset(&mut self) {
        self.0.forget_visit();
    }

    /// Does the next piece, if there is one. Returns when to come again, if that is soon. Only the evictor calls this, and not while frozen.
    pub fn go_on(&mut self, pager: &Pager, worker: &mut Worker, now_ns: u64) -> Option<u64> {
        let piece = self.0.go_on(&pager.pool, worker, now_ns);
        if piece.worked {
            pager.cold_bytes.store(self.0.used_bytes(), Relaxed);
        }
        if piece.pages > 0 {
            pager.has_groups.store(true, Relaxed);
        }
        if let Some(slot) = pager.slot() {
            slot.counters.recompressed_pages.fetch_add(piece.pages as u64, Relaxed);
        }
        piece.again_ns
    }
}
