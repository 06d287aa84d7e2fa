//! Cold pages: what was not found for a while is compressed again, sixteen pages together, by the thread that keeps up the cache.
//!
//! Under zstd, and together, pages take half or two thirds of what they take under LZ4 (the store's groups), so that more of them fit within the same
//! limit. To find one costs more then: its group is decoded, 64 KiB. Whether that pays depends on what lies below:
//!
//! | below                             | a request of up to 16 pages, us | of a group | pays |
//! |-----------------------------------|---------------------------------|------------|------|
//! | a fast disk, a page a request     | 75                              | 60         | no   |
//! | a fast disk, in order             | 50                              | 60         | no   |
//! | a file system over the network    | 300 and more                    | 60         | yes  |
//! | a throttled disk, or one that turns | 1400 and more                 | 60         | yes  |
//!
//! So unless it is told otherwise a cache has groups made only where what was read below lately took more than twice as long as decoding groups would have.
//!
//! **Charges.** What a page is taken to cost (`index::charge`) stays what it was when it came. What groups save in all is what the pool takes less than that, and is
//! reckoned anew whenever pages go; so it is known, too, what is left of groups that are half empty.

use std::time::Duration;

use compcache_store::{Recompression, Recompressor, StoreError, Worker};

use crate::index::Index;
use crate::{Cache, now_ns};

/// It is done only where contexts and buffers take no more than such a part of the limit.
const TOOLS_SHARE: u64 = 8;

/// What becomes of pages that were not found for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recompress {
    /// The level of zstd that they are compressed with in groups; without one they stay as they are.
    pub level: Option<i8>,
    /// Only as long as what lies below is so slow that it pays.
    pub where_it_pays: bool,
    /// How long that while is.
    pub after: Duration,
}

impl Default for Recompress {
    fn default() -> Recompress {
        Recompress { level: Some(3), where_it_pays: true, after: Duration::from_secs(60) }
    }
}

/// What the thread needs for it.
#[derive(Default)]
pub struct Cold {
    /// What was wanted when it was made.
    tools: Option<(Recompress, Recompression)>,
}

impl Cold {
    /// Does the next piece, if there is one. Returns when to come again at the latest.
    pub fn go_on<S: Copy + PartialEq>(&mut self, cache: &Cache<S>, worker: &mut Worker) -> Option<Duration> {
        let (wanted, limit_bytes) = {
            let index = cache.lock();
            (index.recompress_now(self.tools.is_some()), index.limit_bytes)
        };
        if self.tools.as_ref().map(|(made_for, _)| *made_for) != wanted {
            self.tools = None;
            self.tools = wanted.and_then(|wanted| tools(cache, wanted));
            cache.lock().cold_bytes = 0;
        }
        let (_, tools) = self.tools.as_mut()?;
        if tools.used_bytes() > limit_bytes / TOOLS_SHARE {
            return None;
        }
        let piece = tools.go_on(&cache.pool, worker, now_ns());
        if piece.worked {
            let index = &mut *cache.lock();
            index.cold_bytes = tools.used_bytes();
            index.has_groups = true;
            cache.trim(index);
        }
        piece.again_ns.map(Duration::from_nanos)
    }
}

/// `None` where there is no memory for it; it is tried again.
fn tools<S: Copy + PartialEq>(cache: &Cache<S>, wanted: Recompress) -> Option<(Recompress, Recompression)> {
    let recompressor = Recompressor::new(&cache.store, wanted.level?).ok()?;
    let after_ns = u64::try_from(wanted.after.as_nanos()).unwrap_or(u64::MAX);
    Some((wanted, Recompression::new(recompressor, after_ns, now_ns())))
}

impl<S: Copy + PartialEq> Cache<S> {
    /// Changes what becomes of pages that were not found for a while; those in groups stay there.
    ///
    /// # Errors
    /// [`StoreError::NoSuchCodec`]: there is no such level; [`StoreError::MemoryRefused`]: it could not be done.
    pub fn set_recompress(&self, recompress: Recompress) -> Result<(), StoreError> {
        if let Some(level) = recompress.level {
            Recompressor::new(&self.store, level)?;
        }
        self.lock().recompress = recompress;
        Ok(())
    }

    /// What becomes of them.
    pub fn recompress(&self) -> Recompress {
        self.lock().recompress
    }

    /// Reckons what groups save, if there are any.
    pub(crate) fn reckon(&self, index: &mut Index<S>) {
        if index.has_groups {
            index.saved_bytes = index.charged_bytes.saturating_sub(index.charged_for(self.pool.used_bytes()));
        }
    }
}

#[cfg(test)]
mod tests;
