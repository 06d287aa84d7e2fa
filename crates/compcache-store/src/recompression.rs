//! When cold pages become groups: what a thread does for it, a piece at a time, beside other work.
//!
//! | step  | when                                                          | what                                                         |
//! |-------|---------------------------------------------------------------|--------------------------------------------------------------|
//! | age   | an eighth of the time after which pages are cold is over, and pages came or were read lately | the store grows older         |
//! | visit | four times in that time                                       | goes over all pages that have become cold since the last one |
//! | piece | when the thread has nothing else to do                        | one group; a quarter of a processor at most                  |
//!
//! A visit that there is no room for goes on later. A pool that holds little is left alone: there is less to be had than the contexts take.
//!
//! Where pages of groups go one by one and their memory is wanted, as in a cache, groups of which little is left are made into full ones as soon as they waste too much
//! ([`Recompression::gather_above`]); the waste is what groups take beyond what as many pages took in new ones.

use crate::ages::{Aged, Ages};
use crate::groups::Recompressor;
use crate::page::PageIndex;
use crate::pool::Pool;
use crate::stats::PoolStats;
use crate::worker::Worker;

/// An age lasts for such a part of the time after which pages are cold.
const AGES: u64 = 8;
/// So many ages more begin when nothing is used any more: twice that time, at the least.
const AGES_AFTER_USE: u64 = 2 * AGES;
/// Visits in that time.
const VISITS: u64 = 4;
/// Between two pieces the thread waits so many times as long as the last one took.
const PAUSE: u64 = 3;
/// Between two visits to sparse groups.
const BETWEEN_GATHERINGS_NS: u64 = 250_000_000;
/// The mean of what a page takes in a new group is over about so many pages.
const PAGES_MEAN: u64 = 1 << 16;

/// What has the cold pages of one pool recompressed, where nobody else has the store grow older. Times are of the worker's clock.
pub struct Recompression {
    recompressor: Recompressor,
    after_ns: u64,
    ages: Ages,
    /// Pages of ages before this one were looked at.
    tried: Option<u64>,
    due_ns: u64,
    /// Nothing becomes a group that was none.
    only_gathers: bool,
    /// The most that sparse groups may waste.
    waste_bytes_max: u64,
    gathering_due_ns: u64,
    /// Pages that came into new groups, and what these took.
    made_pages: u64,
    made_bytes: u64,
    visit: Option<Visit>,
    /// No piece before that.
    rests_until_ns: u64,
    /// Operations when that last changed, and in which age it did.
    used: u64,
    used_age: u64,
}

/// A visit that is under way: where it has come to, and before which age pages are cold; if none is, only sparse groups are looked for.
#[derive(Clone, Copy)]
struct Visit {
    from: PageIndex,
    before: Option<u64>,
}

/// What came of a call of [`Recompression::go_on`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Contexts and buffers were used: their memory is there.
    pub worked: bool,
    /// Pages that are in a new group.
    pub pages: usize,
    /// In how many nanoseconds to come again, if there is more to do.
    pub again_ns: Option<u64>,
}

impl Recompression {
    /// With fewer pages in memory, and none in groups, nothing is done: 8 MiB.
    pub const PAGES_LEAST: u64 = 2048;

    /// For pages that were not used for `after_ns`.
    pub fn new(recompressor: Recompressor, after_ns: u64, now_ns: u64) -> Recompression {
        let ages = Ages::new(recompressor.store().age(), now_ns);
        let used_age = ages.now();
        Recompression {
            recompressor,
            after_ns,
            ages,
            tried: None,
            due_ns: 0,
            only_gathers: false,
            waste_bytes_max: u64::MAX,
            gathering_due_ns: 0,
            made_pages: 0,
            made_bytes: 0,
            visit: None,
            rests_until_ns: 0,
            used: 0,
            used_age,
        }
    }

    /// What its contexts and buffers take once they were used ([`Recompressor::used_bytes`]).
    pub fn used_bytes(&self) -> u64 {
        self.recompressor.used_bytes()
    }

    /// Has sparse groups made into full ones as soon as they waste more than this.
    pub fn gather_above(&mut self, waste_bytes_max: u64) {
        self.waste_bytes_max = waste_bytes_max;
    }

    /// Whether that is all that is done from now on: no page that is in none comes into a group.
    pub fn only_gathers(&mut self, only: bool) {
        if self.only_gathers != only {
            (self.only_gathers, self.visit) = (only, None);
        }
    }

    /// Where it is a copy of a process that has this: a visit begins anew.
    pub fn forget_visit(&mut self) {
        self.visit = None;
    }

    /// Does the next piece, if it is time for one. To be called again and again, several times in the time after which pages are cold.
    pub fn go_on(&mut self, pool: &Pool, worker: &mut Worker, now_ns: u64) -> Piece {
        let stats = pool.stats();
        self.grow_older(&stats, now_ns);
        let Some(visit) = self.visit.or_else(|| self.begin(&stats, now_ns)) else { return Piece::default() };
        let rest_ns = self.rests_until_ns.saturating_sub(now_ns);
        if rest_ns > 0 {
            return Piece { again_ns: Some(rest_ns), ..Piece::default() };
        }
        let cold = match (visit.before, self.tried) {
            (None, _) => Aged::NONE,
            (Some(before), None) => self.ages.aged_before(before),
            (Some(before), Some(tried)) => self.ages.aged(tried, before),
        };
        let begun_ns = worker.now_ns();
        let Ok(done) = pool.recompress(worker, &mut self.recompressor, &cold, visit.from) else {
            // There was no room. It goes on from here.
            self.rests_until_ns = now_ns + self.after_ns / VISITS;
            return Piece { worked: true, ..Piece::default() };
        };
        let ended_ns = worker.now_ns();
        self.note_made(done.pages as u64, done.after_bytes);
        self.rests_until_ns = ended_ns + (ended_ns - begun_ns) * PAUSE;
        self.visit = done.next.map(|from| Visit { from, ..visit });
        if self.visit.is_none() {
            self.tried = visit.before.or(self.tried);
        }
        let again_ns = self.visit.map(|_| self.rests_until_ns - ended_ns);
        Piece { worked: true, pages: done.pages, again_ns }
    }

    /// Begins the next age if it is time; for a while after the last use as well, so that what was used last becomes cold.
    fn grow_older(&mut self, stats: &PoolStats, now_ns: u64) {
        let store = self.recompressor.store();
        self.ages.note(store.age(), now_ns);
        // What is read from a backing without the pool counts there alone.
        let used = stats.num_reads + stats.num_writes + stats.bd_reads;
        if used != self.used {
            (self.used, self.used_age) = (used, self.ages.now());
        }
        let is_over = now_ns.saturating_sub(self.ages.began_ns()) >= self.after_ns / AGES;
        if is_over && self.ages.now() <= self.used_age + AGES_AFTER_USE {
            store.advance_age();
            self.ages.note(store.age(), now_ns);
        }
    }

    /// The next visit, if it is time for one, and something has become cold since the last, or too much is wasted.
    fn begin(&mut self, stats: &PoolStats, now_ns: u64) -> Option<Visit> {
        let pages = stats.pages_stored().saturating_sub(stats.bd_count + stats.same_pages);
        if pages < Self::PAGES_LEAST && stats.grouped_pages == 0 {
            return None;
        }
        if now_ns >= self.gathering_due_ns && self.waste_bytes(stats) > self.waste_bytes_max {
            self.gathering_due_ns = now_ns + BETWEEN_GATHERINGS_NS;
            self.visit = Some(Visit { from: PageIndex(0), before: None });
            return self.visit;
        }
        if now_ns < self.due_ns || self.only_gathers {
            return None;
        }
        self.due_ns = now_ns + self.after_ns / VISITS;
        let before = self.ages.before(self.after_ns, now_ns)?;
        let has_become = self.tried.is_none_or(|tried| !self.ages.aged(tried, before).is_empty());
        self.visit = has_become.then_some(Visit { from: PageIndex(0), before: Some(before) });
        self.visit
    }

    fn note_made(&mut self, pages: u64, bytes: u64) {
        if pages > 0 {
            (self.made_pages, self.made_bytes) = (self.made_pages + pages, self.made_bytes + bytes);
            if self.made_pages > PAGES_MEAN {
                (self.made_pages, self.made_bytes) = (self.made_pages / 2, self.made_bytes / 2);
            }
        }
    }

    /// What groups take beyond what their pages took when there were sixteen in each; nothing as long as none was made.
    fn waste_bytes(&self, stats: &PoolStats) -> u64 {
        let needed = u128::from(stats.grouped_pages) * u128::from(self.made_bytes);
        needed
            .checked_div(self.made_pages.into())
            .map_or(0, |needed| u128::from(stats.group_bytes).saturating_sub(needed) as u64)
    }
}
