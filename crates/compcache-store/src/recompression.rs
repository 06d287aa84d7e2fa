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
//! ([`Recompression::gather_above`]). Not every hole can be filled, since groups of which most is left stay as they are: what a visit has left counts no more.

use crate::ages::{Aged, Ages};
use crate::groups::{MEMBERS_MAX, Recompressor};
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
    /// The most that groups may waste, beside what the last visit left.
    waste_bytes_max: u64,
    left_bytes: u64,
    gathering_due_ns: u64,
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
            left_bytes: 0,
            gathering_due_ns: 0,
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

    /// Has groups of which less than half is left made into full ones as soon as groups waste more than this, beside what the last visit left.
    pub fn gather_above(&mut self, waste_bytes_max: u64) {
        self.waste_bytes_max = waste_bytes_max;
    }

    /// What will become free by gathering, most of it.
    pub fn expected_bytes(&self, pool: &Pool) -> u64 {
        waste_bytes(&pool.stats()).saturating_sub(self.left_bytes)
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
            let is_urgent = self.waste_bytes_max < u64::MAX;
            let rest_ns = self.after_ns / VISITS;
            self.rests_until_ns = now_ns + if is_urgent { rest_ns.min(BETWEEN_GATHERINGS_NS) } else { rest_ns };
            return Piece { worked: true, ..Piece::default() };
        };
        let ended_ns = worker.now_ns();
        self.rests_until_ns = ended_ns + (ended_ns - begun_ns) * PAUSE;
        self.visit = done.next.map(|from| Visit { from, ..visit });
        if self.visit.is_none() {
            self.tried = visit.before.or(self.tried);
            self.left_bytes = waste_bytes(&pool.stats());
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
        let is_due = now_ns >= self.due_ns && !self.only_gathers;
        let before = if is_due { self.ages.before(self.after_ns, now_ns) } else { None };
        if is_due {
            self.due_ns = now_ns + self.after_ns / VISITS;
        }
        let waste_bytes = waste_bytes(stats);
        self.left_bytes = self.left_bytes.min(waste_bytes);
        let has_become = |before: &u64| self.tried.is_none_or(|tried| !self.ages.aged(tried, *before).is_empty());
        self.visit = match before.filter(has_become) {
            // It gathers, too.
            Some(before) => Some(Visit { from: PageIndex(0), before: Some(before) }),
            None if now_ns >= self.gathering_due_ns && waste_bytes - self.left_bytes > self.waste_bytes_max => {
                Some(Visit { from: PageIndex(0), before: None })
            }
            None => None,
        };
        if self.visit.is_some() {
            self.gathering_due_ns = now_ns + BETWEEN_GATHERINGS_NS;
        }
        self.visit
    }
}

/// What groups take for pages that are not there, as if each had had sixteen.
fn waste_bytes(stats: &PoolStats) -> u64 {
    let places = stats.groups * MEMBERS_MAX as u64;
    let gone = u128::from(places.saturating_sub(stats.grouped_pages));
    (u128::from(stats.group_bytes) * gone).checked_div(places.into()).unwrap_or(0) as u64
}

#[cfg(test)]
mod tests {
    use alloc::sync::Arc;
    use core::cell::Cell;

    use super::*;
    use crate::config::{PoolConfig, StoreConfig};
    use crate::page::{PAGE_SIZE, Page};
    use crate::store::Store;

    const SECOND: u64 = 1_000_000_000;

    std::thread_local! {
        static NOW: Cell<u64> = const { Cell::new(0) };
    }

    fn now_ns() -> u64 {
        NOW.get()
    }

    fn text(index: u64) -> Page {
        let words = (0..512u64).map(|word| if word % 4 == 0 { (index * 977 + word * word) % 10007 } else { 7 });
        let bytes: alloc::vec::Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        bytes.try_into().unwrap()
    }

    /// A pool with so many pages, and who recompresses what was not used for 8 s.
    fn place(pages: u64) -> (Arc<Pool>, Worker, Recompression) {
        let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
        let pool = store.create_pool(PoolConfig::default()).unwrap();
        let mut worker = Worker::new(&store, now_ns).unwrap();
        write(&pool, &mut worker, 0..pages);
        let recompressor = Recompressor::new(&store, 1).unwrap();
        (pool, worker, Recompression::new(recompressor, 8 * SECOND, now_ns()))
    }

    fn write(pool: &Pool, worker: &mut Worker, pages: core::ops::Range<u64>) {
        pages.for_each(|index| _ = pool.write(worker, PageIndex(index), &text(index)).unwrap());
    }

    /// So many seconds pass, in which somebody comes as soon as he is wanted, and four times a second at the least. Returns how often there was something to do.
    fn pass(seconds: u64, pool: &Pool, worker: &mut Worker, recompression: &mut Recompression) -> usize {
        let (end_ns, mut pieces) = (NOW.get() + seconds * SECOND, 0);
        while NOW.get() < end_ns {
            let piece = recompression.go_on(pool, worker, NOW.get());
            pieces += usize::from(piece.worked);
            NOW.set(NOW.get() + piece.again_ns.unwrap_or(SECOND / 4).clamp(1, SECOND / 4));
        }
        pieces
    }

    #[test]
    fn pages_come_into_groups_once_they_are_cold_and_nothing_is_done_where_nothing_is_used() {
        let (pool, mut worker, mut recompression) = place(4096);
        pass(7, &pool, &mut worker, &mut recompression);
        assert_eq!(pool.stats().grouped_pages, 0);
        pass(10, &pool, &mut worker, &mut recompression);
        assert_eq!(pool.stats().grouped_pages, 4096);
        pass(20, &pool, &mut worker, &mut recompression);
        assert_eq!(pass(3600, &pool, &mut worker, &mut recompression), 0);
        // Who comes later finds what has been there for long.
        let (pool, mut worker, recompression) = place(4096);
        drop(recompression);
        (0..300).for_each(|_| _ = pool.store().advance_age());
        let mut late = Recompression::new(Recompressor::new(pool.store(), 1).unwrap(), 8 * SECOND, now_ns());
        pass(20, &pool, &mut worker, &mut late);
        assert_eq!(pool.stats().grouped_pages, 4096);
    }

    #[test]
    fn a_pool_that_holds_little_is_left_alone() {
        let (pool, mut worker, mut recompression) = place(Recompression::PAGES_LEAST - 1);
        assert_eq!(pass(60, &pool, &mut worker, &mut recompression), 0);
    }

    #[test]
    fn sparse_groups_are_gathered_at_once_and_holes_that_cannot_be_filled_are_not_looked_for_again() {
        let (pool, mut worker, mut recompression) = place(8192);
        recompression.gather_above(64 << 10);
        pass(30, &pool, &mut worker, &mut recompression);
        assert_eq!((pool.stats().grouped_pages, pool.stats().groups), (8192, 512));
        // A quarter of each group goes: too little to gather.
        (0..8192).filter(|index| index % 4 == 0).for_each(|index| _ = pool.discard(PageIndex(index)));
        assert!(recompression.expected_bytes(&pool) > 64 << 10);
        pass(2, &pool, &mut worker, &mut recompression);
        assert_eq!((pool.stats().groups, recompression.expected_bytes(&pool)), (512, 0));
        recompression.only_gathers(true);
        assert_eq!(pass(600, &pool, &mut worker, &mut recompression), 0, "again and again");
        // Nor do they keep others from becoming groups.
        recompression.only_gathers(false);
        write(&pool, &mut worker, 10_000..12_048);
        pass(20, &pool, &mut worker, &mut recompression);
        assert_eq!((pool.stats().grouped_pages, pool.stats().groups), (6144 + 2048, 512 + 128));
        // Another half goes, and is gathered long before anything is cold.
        (0..8192).filter(|index| index % 4 < 3).for_each(|index| _ = pool.discard(PageIndex(index)));
        pass(1, &pool, &mut worker, &mut recompression);
        assert_eq!((pool.stats().grouped_pages, pool.stats().groups), (2048 + 2048, 128 + 128));
        assert_eq!(recompression.expected_bytes(&pool), 0);
        for index in (3..8192).step_by(4) {
            let mut page = [0; PAGE_SIZE];
            pool.read(&mut worker, PageIndex(index), &mut page).unwrap();
            assert!(page == text(index), "page {index}");
        }
    }
}
