//! Cold pages: what nobody has used for a while is compressed again, sixteen pages together, by the evictor when it has nothing to evict.
//!
//! Under zstd, and together, pages of programs take half or two thirds of what they take under LZ4 ([`Pool::recompress`]); the first read of one
//! takes longer then. So it is for pages that were not used for a minute (`compcache run --recompress-after`), and as memory
//! becomes free by it more of the program may be resident.
//!
//! | step  | when                                                       | what                                                       |
//! |-------|------------------------------------------------------------|------------------------------------------------------------|
//! | age   | an eighth of that time is over, and pages came or left lately | the store grows older                                   |
//! | visit | four times in that time                                    | goes over all pages that have become cold since the last one |
//! | piece | each time the evictor has looked and nothing had to leave  | one group; a quarter of a processor at most                |
//!
//! A visit that the pool has no room for goes on later. Processes that keep little
//! compressed are left alone: there is less to be had than the contexts take.
//!
//! Like compaction it is never under way while the process may be copied, since the evictor freezes itself. What becomes free the evictor's
//! compaction brings together, step by step.

use crate::pager::{Pager, clock_ns};
use alloc::sync::Arc;
use compcache_store::{Ages, PageIndex, PoolStats, Recompressor, Store, Worker};
use core::sync::atomic::Ordering::*;

/// An age lasts for such a part of the time after which pages are cold.
const AGES: u64 = 8;
/// Visits in that time.
const VISITS: u64 = 4;
/// Between two pieces it waits so many times as long as the last one took.
const PAUSE: u64 = 3;
/// With fewer pages in the pool, and none in groups, nothing is done: 8 MiB.
const PAGES_LEAST: u64 = 2048;
/// What contexts and buffers take once they were used, the handler's among them, which reads groups; by the highest level of zstd for which that is
/// enough: measured by hand.
const USED_BYTES: [(i8, u64); 4] = [(1, 528 << 10), (3, 896 << 10), (9, 1184 << 10), (i8::MAX, 1984 << 10)];

/// What the evictor needs for it.
pub struct Cold {
    recompressor: Recompressor,
    used_bytes: u64,
    after_ns: u64,
    ages: Ages,
    /// Pages of ages before this one were looked at.
    tried: u64,
    due_ns: u64,
    visit: Option<Visit>,
    /// No piece before that.
    rests_until_ns: u64,
    /// Pages that had come or left when that last changed, and when it did.
    used: u64,
    used_ns: u64,
}

/// A visit that is under way: where it has come to, and before which age pages are cold.
#[derive(Clone, Copy)]
struct Visit {
    from: PageIndex,
    before: u64,
}

impl Cold {
    /// For pages that were not used for `after_ns`, at a level of zstd. All memory it will ever need is mapped, and hardly any of it is touched. `None`
    /// where there is none.
    pub fn new(store: &Arc<Store>, level: i8, after_ns: u64, now_ns: u64) -> Option<Cold> {
        let ages = Ages::new(store.age(), now_ns);
        let recompressor = Recompressor::new(store, level).ok()?.without_compaction();
        let (_, used_bytes) = USED_BYTES.into_iter().find(|(most, _)| level <= *most)?;
        let tried = ages.now();
        Some(Cold {
            recompressor,
            used_bytes,
            after_ns,
            ages,
            tried,
            due_ns: 0,
            visit: None,
            rests_until_ns: 0,
            used: 0,
            used_ns: now_ns,
        })
    }

    /// In a copy of the process: a visit begins anew.
    pub fn reset(&mut self) {
        self.visit = None;
    }

    /// Does the next piece, if there is one. Returns when to come again, if that is soon. Only the evictor calls this, and not while frozen.
    pub fn go_on(&mut self, pager: &Pager, worker: &mut Worker, now_ns: u64) -> Option<u64> {
        let stats = pager.pool.stats();
        self.grow_older(pager, &stats, now_ns);
        let visit = self.visit.or_else(|| self.begin(&stats, now_ns))?;
        let rest_ns = self.rests_until_ns.saturating_sub(now_ns);
        if rest_ns > 0 {
            return Some(rest_ns);
        }
        let cold = self.ages.aged(self.tried, visit.before);
        pager.cold_bytes.store(self.used_bytes, Relaxed);
        let begun_ns = clock_ns();
        let Ok(done) = pager.pool.recompress(worker, &mut self.recompressor, &cold, visit.from) else {
            // There was no room. It goes on from here.
            self.rests_until_ns = now_ns + self.after_ns / VISITS;
            return None;
        };
        let ended_ns = clock_ns();
        self.rests_until_ns = ended_ns + (ended_ns - begun_ns) * PAUSE;
        if done.pages > 0 {
            pager.has_groups.store(true, Relaxed);
        }
        if let Some(slot) = pager.slot() {
            slot.counters.recompressed_pages.fetch_add(done.pages as u64, Relaxed);
        }
        self.visit = done.next.map(|from| Visit { from, ..visit });
        if self.visit.is_none() {
            self.tried = visit.before;
            return None;
        }
        Some(self.rests_until_ns - ended_ns)
    }

    /// Begins the next age if it is time; for a while after the last use as well, so that what was used last becomes cold.
    fn grow_older(&mut self, pager: &Pager, stats: &PoolStats, now_ns: u64) {
        self.ages.note(pager.store.age(), now_ns);
        // What is read from the disk without the pool counts there alone.
        let used = stats.num_reads + stats.num_writes + stats.bd_reads;
        if used != self.used {
            (self.used, self.used_ns) = (used, now_ns);
        }
        let is_over = now_ns.saturating_sub(self.ages.began_ns()) >= self.after_ns / AGES;
        if is_over && now_ns.saturating_sub(self.used_ns) <= self.after_ns * 2 {
            pager.store.advance_age();
            self.ages.note(pager.store.age(), now_ns);
        }
    }

    /// The next visit, if it is time for one, and something has become cold since the last.
    fn begin(&mut self, stats: &PoolStats, now_ns: u64) -> Option<Visit> {
        let pages = stats.pages_stored().saturating_sub(stats.bd_count + stats.same_pages);
        if now_ns < self.due_ns || pages < PAGES_LEAST && stats.grouped_pages == 0 {
            return None;
        }
        self.due_ns = now_ns + self.after_ns / VISITS;
        let before = self.ages.before(self.after_ns, now_ns)?;
        let has_become = !self.ages.aged(self.tried, before).is_empty();
        self.visit = has_become.then_some(Visit { from: PageIndex(0), before });
        self.visit
    }
}
