//! Cold blocks: the thread that has them compressed again, in groups, and what a command asks of it.
//!
//! Blocks know the age of the store at which they were last used. The thread has the store grow older while disks are used, and
//! remembers when it was which age; so "not used for a minute" becomes a number of ages. It comes to each disk four times in the
//! time after which its blocks are cold, and takes those that have become cold since it was there, so that what did not pay
//! is not tried again and again. It takes at most a quarter of a processor.
//!
//! While there is a disk for swap nothing is done: groups take memory before they give some back, and the reserve is for what is
//! swapped out.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use compcache_store::{PageIndex, Pool, Recompressor, Store, StoreError, Worker};

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

/// When the store had which age. Ages are counted without end here; the store's are the lowest eight bits.
struct Ages {
    now: u64,
    began: VecDeque<(Instant, u64)>,
    used: u64,
    used_at: Instant,
}

/// A visit to a disk.
struct Visit {
    pool: Arc<Pool>,
    level: i8,
    ages: RangeInclusive<u8>,
    /// What will have been tried by it.
    before: u64,
}

fn operations(pool: &Pool) -> u64 {
    let stats = pool.stats();
    stats.num_reads + stats.num_writes + stats.pages_discard
}

impl Ages {
    fn new(store: &Store, at: Instant) -> Ages {
        let now = u64::from(store.age());
        Ages { now, began: VecDeque::from([(at, now)]), used: 0, used_at: at }
    }

    /// The store is of this age now; others may have advanced it.
    fn note(&mut self, age: u8, at: Instant) {
        self.now += u64::from(age.wrapping_sub(self.now as u8));
        if self.began.back().is_none_or(|(_, last)| *last != self.now) {
            self.began.push_back((at, self.now));
        }
        // A page does not know more than 256 ages.
        while self.began.len() > 256 {
            self.began.pop_front();
        }
    }

    /// Pages of ages before this one were not used for `idle`.
    fn before(&self, idle: Duration, at: Instant) -> Option<u64> {
        let began = self.began.iter().rev().find(|(began, _)| at.duration_since(*began) >= idle);
        began.map(|(_, age)| *age).filter(|age| self.now - age < 255)
    }

    /// The pages of ages from `from` on and before `before`, in ages before now.
    fn ago(&self, from: u64, before: u64) -> RangeInclusive<u8> {
        let ago = |age: u64| u8::try_from(self.now - age).unwrap_or(u8::MAX);
        ago(before).saturating_add(1)..=ago(from.min(before))
    }
}

impl Cold {
    /// Starts the thread, which lives as long as the server.
    ///
    /// # Errors
    /// The system has no thread, or no memory, for it.
    pub fn start(store: Arc<Store>) -> anyhow::Result<Arc<Cold>> {
        let ages = Ages::new(&store, Instant::now());
        let cold = Arc::new(Cold { store, watched: Mutex::new(Watched { disks: Vec::new(), ages }) });
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
        let tried = watched.ages.now;
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

    /// Has all blocks of a disk that were not used for `idle` recompressed, or all there are, and waits for it.
    ///
    /// # Errors
    /// There is a disk for swap; memory is so short that not even the next group can be made. What was made stays.
    pub fn recompress(&self, pool: &Pool, level: i8, idle: Option<Duration>) -> anyhow::Result<Done> {
        let mut tools = Tools::new(&self.store, level)?;
        let ages = {
            let mut watched = self.lock();
            if watched.disks.iter().any(|disk| disk.for_swap && disk.pool.strong_count() > 0) {
                bail!("nothing is recompressed while the server has a disk for swap");
            }
            let now = Instant::now();
            watched.ages.note(self.store.age(), now);
            match idle {
                None => 0..=u8::MAX,
                Some(idle) => match watched.ages.before(idle, now) {
                    Some(before) => watched.ages.ago(0, before),
                    None => return Ok(Done::default()),
                },
            }
        };
        tools.recompress(pool, ages, || true).context("recompression stopped for want of memory; what was done stays")
    }

    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the next age, if it is time and any disk was used lately. Returns when to look again.
    fn grow_older(&self) -> Duration {
        let mut watched = self.lock();
        let Watched { disks, ages } = &mut *watched;
        disks.retain(|disk| disk.pool.strong_count() > 0);
        let now = Instant::now();
        let used = disks.iter().filter_map(|disk| disk.pool.upgrade()).map(|pool| operations(&pool)).sum();
        let after = disks.iter().map(|disk| disk.recompress.after);
        let (Some(soonest), Some(latest)) = (after.clone().min(), after.max()) else { return LOOK_MOST };
        let lasts = (soonest / AGES).max(latest / AGES_MOST);
        if used != ages.used {
            (ages.used, ages.used_at) = (used, now);
        }
        // Also for a while after the last use, so that what was used last becomes cold.
        let is_over = ages.began.back().is_none_or(|(began, _)| now - *began >= lasts);
        if is_over && now - ages.used_at <= latest * 2 + LOOK_MOST {
            self.store.advance_age();
        }
        ages.note(self.store.age(), now);
        lasts.clamp(LOOK_LEAST, LOOK_MOST)
    }

    /// Goes to the disks that it is time for.
    fn visit(&self, tools: &mut Tools) {
        for Visit { pool, level, ages, before } in self.due() {
            let mut began = Instant::now();
            let goes_on = || {
                let worked = began.elapsed();
                if worked >= PIECE {
                    thread::sleep(worked * PAUSE);
                    began = Instant::now();
                }
                // Else nobody has the disk any more.
                Arc::strong_count(&pool) > 1
            };
            // Where memory is too short, it is tried again the next time.
            if tools.set_level(level).is_ok() && tools.recompress(&pool, ages, goes_on).is_ok() {
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
        let Watched { disks, ages } = &mut *watched;
        let now = Instant::now();
        if disks.iter().any(|disk| disk.for_swap) {
            return Vec::new();
        }
        let visit = |disk: &mut Disk| {
            let (level, before) = (disk.recompress.level?, ages.before(disk.recompress.after, now)?);
            if disk.due > now {
                return None;
            }
            disk.due = now + disk.recompress.after / VISITS;
            let (pool, ages) = (disk.pool.upgrade()?, ages.ago(disk.tried, before));
            let used = operations(&pool);
            // Without any use nothing has come out of a group.
            let is_idle = ages.is_empty() && disk.used == used;
            disk.used = used;
            (!is_idle).then_some(Visit { pool, level, ages, before })
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
        Ok(Tools { store: store.clone(), worker, recompressor, level })
    }

    fn set_level(&mut self, level: i8) -> Result<(), StoreError> {
        if level != self.level {
            self.recompressor = Recompressor::new(&self.store, level)?;
            self.level = level;
        }
        Ok(())
    }

    fn recompress(
        &mut self,
        pool: &Pool,
        ages: RangeInclusive<u8>,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Done, StoreError> {
        let (mut done, mut next) = (Done::default(), Some(PageIndex(0)));
        while let Some(from) = next {
            let step = pool.recompress(&mut self.worker, &mut self.recompressor, ages.clone(), from)?;
            done.pages += step.pages as u64;
            done.before_bytes += step.before_bytes;
            done.after_bytes += step.after_bytes;
            next = step.next.filter(|_| goes_on());
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        *START.get_or_init(Instant::now) + Duration::from_secs(seconds)
    }

    #[test]
    fn time_becomes_ages_and_each_is_looked_at_once() {
        let mut ages = Ages { now: 7, began: VecDeque::from([(at(0), 7)]), used: 0, used_at: at(0) };
        (1..=30).for_each(|age| ages.note(7 + age as u8, at(age * 10)));
        let minute = Duration::from_secs(60);
        assert_eq!(ages.before(minute, at(300)), Some(31), "age 31 began at 240");
        assert_eq!(ages.before(Duration::from_secs(400), at(300)), None);
        // Now is 37: pages of age 30 and older are cold.
        assert_eq!(ages.ago(0, 31), 7..=37);
        assert_eq!(ages.ago(25, 31), 7..=12);
        assert!(ages.ago(31, 31).is_empty(), "nothing has become cold since");
        // Somebody else has it grow older, past the end of what the store counts.
        ages.note(250, at(310));
        ages.note(4, at(320));
        assert_eq!((ages.now, ages.before(Duration::from_secs(15), at(325))), (260, Some(250)));
        assert_eq!(ages.ago(0, 250), 11..=255);
        assert_eq!(ages.before(Duration::from_secs(320), at(325)), Some(7));
        (0..60).for_each(|n| ages.note((4 + n * 5) as u8, at(330 + n)));
        assert_eq!(ages.before(Duration::from_secs(320), at(400)), None, "older than what pages know");
    }
}
