//! Cold blocks: the thread that has them compressed again, in groups, and what a command asks of it.
//!
//! Blocks know the age of the store at which they were last used. The thread has the store grow older while disks are used, and
//! remembers when it was which age; so "not used for a minute" becomes a number of ages. It comes to each disk four times in the
//! time after which its blocks are cold, and takes those that have become cold since it was there, so that what did not pay
//! is not tried again and again. It takes at most a quarter of a processor.
//!
//! While there is a disk for swap nothing is done: groups take memory before they give some back, and the reserve is for what is
//! swapped out.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use compcache_store::{Aged, Ages, PageIndex, Pool, Recompressor, Store, StoreError, Worker};

use crate::cli::Recompress;
use crate::kernel::clock_ns;

/// An age lasts for such a part of the shortest time after which blocks of a disk are cold; or of the longest, since blocks know no
/// more than 256 ages.
const AGES: u32 = 8;
const AGES_MOST: u32 = 128;
/// Between two looks at what is to be done.
const LOOK_LEAST: Duration = Duration::from_millis(50);
const LOOK_MOST: Duration = Duration::from_secs(5);
/// Visits to a disk in that time.
const VISITS: u32 = 4;
/// Work is done in pieces of about so long; pauses between them are so many times longer.
const PIECE: Duration = Duration::from_millis(2);
const PAUSE: u32 = 3;

/// What a command had recompressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Pages that are in new groups.
    pub pages: u64,
    /// What they took before.
    pub before_bytes: u64,
    /// What the groups take.
    pub after_bytes: u64,
}

/// The disks of a server, as the thread knows them.
pub struct Cold {
    store: Arc<Store>,
    watched: Mutex<Watched>,
}

struct Watched {
    disks: Vec<Disk>,
    ages: Ages,
    /// Operations of all of them, and when that last changed.
    used: u64,
    used_at: Instant,
}

impl Watched {
    /// The pages of ages from `from` on and before `before`; others advance the store's meanwhile.
    fn aged(&mut self, store: &Store, from: u64, before: u64) -> Aged {
        self.ages.note(store.age(), clock_ns());
        self.ages.aged(from, before)
    }

    /// Nothing is recompressed while there is a disk for swap.
    fn refuse_swap(&self) -> anyhow::Result<()> {
        if self.disks.iter().any(|disk| disk.for_swap && disk.pool.strong_count() > 0) {
            bail!("nothing is recompressed while the server has a disk for swap");
        }
        Ok(())
    }
}

struct Disk {
    pool: Weak<Pool>,
    recompress: Recompress,
    for_swap: bool,
    /// Pages older than this were looked at.
    tried: u64,
    due: Instant,
    /// Operations by then.
    used: u64,
}

/// A visit to a disk. Until its turn comes the disk may be removed, and what it has goes back at once.
struct Visit {
    pool: Weak<Pool>,
    level: i8,
    /// The first age that was not tried yet, and the first that is not cold.
    tried: u64,
    before: u64,
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn operations(pool: &Pool) -> u64 {
    let stats = pool.stats();
    stats.num_reads + stats.num_writes + stats.pages_discard
}

impl Cold {
    /// Starts the thread, which lives as long as the server.
    ///
    /// # Errors
    /// The system has no thread, or no memory, for it.
    pub fn start(store: Arc<Store>) -> anyhow::Result<Arc<Cold>> {
        let ages = Ages::new(store.age(), clock_ns());
        let watched = Watched { disks: Vec::new(), ages, used: 0, used_at: Instant::now() };
        let cold = Arc::new(Cold { store, watched: Mutex::new(watched) });
        let mut tools = Tools::new(&cold.store, Recompress::DEFAULT_LEVEL)?;
        let at_work = cold.clone();
        let work = move || {
            loop {
                thread::sleep(at_work.grow_older());
                at_work.visit(&mut tools);
            }
        };
        thread::Builder::new()
            .name("recompression".into())
            .spawn(work)
            .context("cannot start the thread for cold blocks")?;
        Ok(cold)
    }

    /// From now on the thread knows of a disk.
    pub fn watch(&self, pool: &Arc<Pool>, recompress: Recompress, for_swap: bool) {
        let mut watched = self.lock();
        let tried = watched.ages.now();
        watched.disks.push(Disk {
            pool: Arc::downgrade(pool),
            recompress,
            for_swap,
            tried,
            due: Instant::now(),
            used: 0,
        });
    }

    /// From now on this is done with the cold blocks of a disk.
    pub fn change(&self, pool: &Arc<Pool>, recompress: Recompress) {
        for disk in &mut self.lock().disks {
            if disk.pool.as_ptr() == Arc::as_ptr(pool) {
                disk.recompress = recompress;
            }
        }
    }

    /// Has all blocks of a disk that were not used for `idle` recompressed, or all there are, and waits for it as long as it `goes_on`.
    ///
    /// # Errors
    /// There is a disk for swap, or one was made meanwhile; it does not go on; memory is so short that not even the next group can be made. What
    /// was made stays.
    pub fn recompress(
        &self,
        pool: &Pool,
        level: i8,
        idle: Option<Duration>,
        goes_on: &dyn Fn() -> anyhow::Result<()>,
    ) -> anyhow::Result<Done> {
        let mut tools = Tools::new(&self.store, level)?;
        let before = {
            let mut watched = self.lock();
            // Before anything is done.
            watched.refuse_swap()?;
            let now_ns = clock_ns();
            watched.ages.note(self.store.age(), now_ns);
            match idle.map(|idle| watched.ages.before(nanoseconds(idle), now_ns)) {
                None => None,
                Some(None) => return Ok(Done::default()),
                Some(before) => before,
            }
        };
        let mut stopped = Ok(());
        let next_ages = || {
            let mut watched = self.lock();
            stopped = goes_on().and_then(|()| watched.refuse_swap());
            stopped.is_ok().then(|| before.map_or(Aged::ALL, |before| watched.aged(&self.store, 0, before)))
        };
        let done = tools.recompress(pool, next_ages);
        stopped.context("what was done stays")?;
        done.context("recompression stopped for want of memory; what was done stays")
    }

    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the next age, if it is time and any disk was used lately. Returns when to look again.
    fn grow_older(&self) -> Duration {
        let mut watched = self.lock();
        let Watched { disks, ages, used, used_at } = &mut *watched;
        disks.retain(|disk| disk.pool.strong_count() > 0);
        let (now, now_ns) = (Instant::now(), clock_ns());
        let used_now = disks.iter().filter_map(|disk| disk.pool.upgrade()).map(|pool| operations(&pool)).sum();
        let after = disks.iter().map(|disk| disk.recompress.after);
        let (Some(soonest), Some(latest)) = (after.clone().min(), after.max()) else { return LOOK_MOST };
        let lasts = (soonest / AGES).max(latest / AGES_MOST);
        if used_now != *used {
            (*used, *used_at) = (used_now, now);
        }
        // Also for a while after the last use, so that what was used last becomes cold.
        let is_over = now_ns - ages.began_ns() >= nanoseconds(lasts);
        if is_over && now - *used_at <= latest * 2 + LOOK_MOST {
            self.store.advance_age();
        }
        ages.note(self.store.age(), now_ns);
        lasts.clamp(LOOK_LEAST, LOOK_MOST)
    }

    /// Goes to the disks that it is time for.
    fn visit(&self, tools: &mut Tools) {
        for Visit { pool, level, tried, before } in self.due() {
            let Some(pool) = pool.upgrade() else { continue };
            let (mut began, mut ended) = (Instant::now(), false);
            let next_ages = || {
                let worked = began.elapsed();
                if worked >= PIECE {
                    thread::sleep(worked * PAUSE);
                    began = Instant::now();
                }
                // Nobody has the disk any more, or one for swap was made.
                let mut watched = self.lock();
                ended = Arc::strong_count(&pool) == 1 || watched.refuse_swap().is_err();
                (!ended).then(|| watched.aged(&self.store, tried, before))
            };
            // Where memory is too short, it is tried again the next time.
            if tools.set_level(level).is_ok() && tools.recompress(&pool, next_ages).is_ok() && !ended {
                for disk in &mut self.lock().disks {
                    if disk.pool.as_ptr() == Arc::as_ptr(&pool) {
                        disk.tried = before;
                    }
                }
            }
        }
    }

    /// Which pools to go to, and which ages are to be looked at there.
    fn due(&self) -> Vec<Visit> {
        let mut watched = self.lock();
        if watched.refuse_swap().is_err() {
            return Vec::new();
        }
        let Watched { disks, ages, .. } = &mut *watched;
        let (now, now_ns) = (Instant::now(), clock_ns());
        let visit = |disk: &mut Disk| {
            let (level, before) = (disk.recompress.level?, ages.before(nanoseconds(disk.recompress.after), now_ns)?);
            if disk.due > now {
                return None;
            }
            disk.due = now + disk.recompress.after / VISITS;
            let used = operations(&*disk.pool.upgrade()?);
            // Without any use nothing has come out of a group.
            let is_idle = ages.aged(disk.tried, before).is_empty() && disk.used == used;
            disk.used = used;
            (!is_idle).then(|| Visit { pool: disk.pool.clone(), level, tried: disk.tried, before })
        };
        disks.iter_mut().filter_map(visit).collect()
    }
}

/// What recompressing takes.
struct Tools {
    store: Arc<Store>,
    worker: Worker,
    recompressor: Recompressor,
    level: i8,
}

impl Tools {
    fn new(store: &Arc<Store>, level: i8) -> anyhow::Result<Tools> {
        let memory = "there is no memory to recompress in";
        let worker = Worker::new(store, clock_ns).context(memory)?;
        let recompressor = Recompressor::new(store, level).context(memory)?;
        // By the thread, which is there before any disk: so a full server can be recompressed, by the thread and by commands.
        let _ = recompressor.set_aside();
        Ok(Tools { store: store.clone(), worker, recompressor, level })
    }

    fn set_level(&mut self, level: i8) -> Result<(), StoreError> {
        if level != self.level {
            self.recompressor = Recompressor::new(&self.store, level)?;
            self.level = level;
        }
        Ok(())
    }

    /// Before each step it is asked which pages are cold; `None` ends it.
    fn recompress(&mut self, pool: &Pool, mut next_ages: impl FnMut() -> Option<Aged>) -> Result<Done, StoreError> {
        let (mut done, mut next) = (Done::default(), Some(PageIndex(0)));
        while let Some(from) = next
            && let Some(aged) = next_ages()
        {
            let step = pool.recompress(&mut self.worker, &mut self.recompressor, &aged, from)?;
            done.pages += step.pages as u64;
            done.before_bytes += step.before_bytes;
            done.after_bytes += step.after_bytes;
            next = step.next;
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use compcache_store::{PoolConfig, StoreConfig};

    use super::*;
    use crate::serve::disks::Presence;

    const PAGES: u64 = 16384;

    fn fill(store: &Arc<Store>, pool: &Pool, pages: Range<u64>) {
        let mut worker = Worker::new(store, clock_ns).unwrap();
        for index in pages {
            let text = format!("page {index} holds {} and {}; ", index * 7919, index * index);
            let page: Vec<u8> = text.bytes().cycle().take(4096).collect();
            pool.write(&mut worker, PageIndex(index), page.as_slice().try_into().unwrap()).unwrap();
        }
    }

    fn filled() -> (Arc<Store>, Arc<Pool>) {
        let store = Store::new(StoreConfig { limit_bytes: 64 << 20, ..StoreConfig::default() }).unwrap();
        let pool = store.create_pool(PoolConfig::default()).unwrap();
        fill(&store, &pool, 0..PAGES);
        (store, pool)
    }

    /// What comes of a recompression of many pages, slow ones, when `meanwhile` happens once it is under way; what that returns stays until the end.
    fn recompressed_while<T>(meanwhile: impl FnOnce(&Cold, &Arc<Store>, Presence) -> T) -> anyhow::Result<Done> {
        let (store, pool) = filled();
        let cold = Cold::start(store.clone()).unwrap();
        let presence = Presence::default();
        let present = presence.present();
        thread::scope(|scope| {
            let done = scope.spawn(|| cold.recompress(&pool, 19, None, &|| present.check()));
            while pool.stats().grouped_pages == 0 {
                assert!(!done.is_finished(), "it was done before anything could happen");
                thread::yield_now();
            }
            let _stays = meanwhile(&cold, &store, presence);
            let done = done.join().unwrap();
            assert!(pool.stats().grouped_pages < PAGES, "it went on to the end");
            done
        })
    }

    #[test]
    fn a_full_server_takes_blocks_again_once_it_is_told_to_recompress() {
        let store = Store::new(StoreConfig { limit_bytes: 4 << 20, ..StoreConfig::default() }).unwrap();
        let cold = Cold::start(store.clone()).unwrap();
        let pool = store.create_pool(PoolConfig::default()).unwrap();
        let mut worker = Worker::new(&store, clock_ns).unwrap();
        let mut write = |index: u64| {
            // Each has the same noise, and so compresses beside others alone.
            let page: Vec<u8> =
                (0..4096u64).map(|at| if at < 2048 { ((at * at) >> 3) as u8 } else { index as u8 }).collect();
            pool.write(&mut worker, PageIndex(index), page.as_slice().try_into().unwrap())
        };
        let full = (0..).find(|index| write(*index).is_err()).unwrap();
        let done = cold.recompress(&pool, Recompress::DEFAULT_LEVEL, None, &|| Ok(())).unwrap();
        assert!(done.pages > full / 10 * 9, "{done:?} of {full}");
        write(full).unwrap();
        assert!(store.mem_used_max_bytes() <= 4 << 20);
    }

    #[test]
    fn what_was_used_meanwhile_is_not_cold_however_old_the_store_has_become() {
        let (store, pool) = filled();
        let cold = Cold::start(store.clone()).unwrap();
        store.advance_age();
        cold.lock().aged(&store, 0, 0);
        thread::sleep(Duration::from_millis(20));
        let presence = Presence::default();
        let present = presence.present();
        thread::scope(|scope| {
            let done = scope.spawn(|| cold.recompress(&pool, 19, Some(Duration::from_millis(10)), &|| present.check()));
            while pool.stats().grouped_pages == 0 {
                assert!(!done.is_finished(), "it was done before anything could happen");
                thread::yield_now();
            }
            fill(&store, &pool, PAGES..PAGES + 64);
            // As where a backing is worked.
            for _ in 0..100 {
                store.advance_age();
            }
            done.join().unwrap().unwrap();
        });
        assert_eq!(pool.stats().grouped_pages, PAGES, "all that was cold at first, and nothing else");
    }

    #[test]
    fn a_disk_that_is_removed_while_another_is_recompressed_gives_back_what_it_has() {
        let (store, pool) = filled();
        let cold = Cold::start(store.clone()).unwrap();
        let removed = store.create_pool(PoolConfig::default()).unwrap();
        fill(&store, &removed, 0..64);
        let recompress = Recompress { level: Some(19), after: Duration::from_millis(10) };
        cold.watch(&pool, recompress, false);
        cold.watch(&removed, recompress, false);
        while pool.stats().grouped_pages == 0 {
            thread::yield_now();
        }
        let gone = Arc::downgrade(&removed);
        drop(removed);
        assert_eq!(gone.strong_count(), 0);
        assert!(pool.stats().grouped_pages < PAGES, "it was done before anything could happen");
    }

    #[test]
    fn who_recompresses_stops_when_there_is_a_disk_for_swap() {
        let stopped = recompressed_while(|cold, store, presence| {
            let swap = store.create_pool(PoolConfig::default()).unwrap();
            cold.watch(&swap, Recompress::NEVER, true);
            (swap, presence)
        });
        let why = format!("{:#}", stopped.map(drop).expect_err("it went on"));
        assert!(why.contains("disk for swap") && why.contains("stays"), "{why}");
    }

    #[test]
    fn who_recompresses_stops_when_the_disk_is_removed() {
        let stopped = recompressed_while(|_, _, presence| drop(presence));
        let why = format!("{:#}", stopped.map(drop).expect_err("it went on"));
        assert!(why.contains("was removed") && why.contains("stays"), "{why}");
    }
}
