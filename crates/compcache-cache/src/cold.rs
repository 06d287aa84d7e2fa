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
//! reckoned anew whenever pages go. It is less than nothing where too little is left of too many groups.
//!
//! **Holes.** Pages go one by one, and the memory of a group with its last. So groups of which less than half is left are gathered into full ones as soon as they waste a
//! 32nd of the limit beyond what cannot be gathered; until then that memory counts as free, and a page that comes pushes out two others at the most: else what groups have gained
//! would be given up for a few new pages. They are gathered also when no more are to be made.

use std::time::Duration;

use compcache_store::{Recompression, Recompressor, StoreError, Worker};

use crate::index::Index;
use crate::{Cache, now_ns};

/// It is done only where contexts and buffers take no more than such a part of the limit.
pub const TOOLS_SHARE: u64 = 8;
/// Groups of which little is left may waste such a part of it.
pub const WASTE_SHARE: u64 = 32;

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
pub struct Cold(Option<Tools>);

struct Tools {
    level: i8,
    after: Duration,
    recompression: Recompression,
}

impl Cold {
    /// Does the next piece, if there is one. Returns when to come again at the latest.
    pub fn go_on<S: Copy + PartialEq>(&mut self, cache: &Cache<S>, worker: &mut Worker) -> Option<Duration> {
        let (wanted, limit_bytes, pages) = {
            let index = cache.lock();
            (index.recompress_now(self.0.is_some()), index.limit_bytes, index.queues.length() as u64)
        };
        let fits = |level| Recompressor::used_bytes_at(level) <= limit_bytes / TOOLS_SHARE;
        let only_gathers = match (&self.0, wanted.filter(|(level, _)| fits(*level))) {
            (Some(tools), Some(wanted)) if (tools.level, tools.after) == wanted => false,
            (_, Some(wanted)) => {
                self.have(cache, worker, (pages >= Recompression::PAGES_LEAST).then_some(wanted));
                false
            }
            // What is in groups stays there, and is not to keep others from being stored.
            (Some(tools), None) if fits(tools.level) && cache.pool.stats().group_bytes > limit_bytes / WASTE_SHARE => {
                true
            }
            (Some(_), None) => {
                self.have(cache, worker, None);
                return None;
            }
            (None, None) => return None,
        };
        let tools = &mut self.0.as_mut()?.recompression;
        tools.only_gathers(only_gathers);
        tools.gather_above(limit_bytes / WASTE_SHARE);
        let piece = tools.go_on(&cache.pool, worker, now_ns());
        let expected_bytes = tools.expected_bytes(&cache.pool).min(limit_bytes / WASTE_SHARE);
        let index = &mut *cache.lock();
        index.has_groups |= piece.worked;
        index.expected_bytes = expected_bytes;
        piece.again_ns.map(Duration::from_nanos)
    }

    /// Has tools for this, or none; also where there is no memory for them, which is tried again.
    fn have<S: Copy + PartialEq>(&mut self, cache: &Cache<S>, worker: &mut Worker, wanted: Option<(i8, Duration)>) {
        if self.0.is_none() && wanted.is_none() {
            return;
        }
        // The old ones first: what they have set aside is others'.
        self.0 = None;
        self.0 = wanted.and_then(|(level, after)| {
            let recompressor = Recompressor::new(&cache.store, level).ok()?;
            let after_ns = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
            Some(Tools { level, after, recompression: Recompression::new(recompressor, after_ns, now_ns()) })
        });
        {
            let index = &mut *cache.lock();
            // Before they are used: then their memory is there.
            index.cold_bytes = self.0.as_ref().map_or(0, |tools| tools.recompression.used_bytes());
            index.gathers = self.0.is_some();
            if !index.gathers {
                index.expected_bytes = 0;
            }
        }
        cache.trim_in_parts();
        cache.compact(worker);
    }
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
            index.saved_bytes = index.charged_bytes as i64 - index.charged_for(self.pool.used_bytes()) as i64;
        }
    }
}

#[cfg(test)]
pub mod tests;
