//! What a cache leaves to others while the machine is short of memory, as the kernel's own caches do when it calls their shrinkers.
//!
//! A limit says what a cache may take, and not whether somebody needs it more: what is here can be read below again, what a program has cannot.
//! So pages go
//!
//! - while less than a sixteenth of the RAM is available, or
//! - less than an eighth, and somebody waited for memory for a tenth of the time since that was last looked at.
//!
//! As much goes as is missing for that eighth, at most a quarter of what there is at a time, and never what the last eighth of the limit has room for. It is *lent*: pages are charged
//! for so much less than the limit until more than the eighth is available. Then the cache has that back, all of a limit in eight seconds. What the store may take is the
//! limit all the time, and tables stay as large as they are: when little is lent and had back, nothing is to be refused, nor made anew.
//!
//! It is looked at four times a second, and forty times while less than a quarter is available, but where groups are gathered, whose memory comes later: the kernel calls its own shrinkers before it refuses memory, and nobody calls us. Who
//! takes memory quicker than pages can go meets the OOM killer all the same.
//!
//! Who reads files that are larger than memory waits for it, too; but what is available counts the kernel's page cache, which is not short then.

use std::mem::replace;
use std::time::{Duration, Instant};

use crate::pressure::{Memory, Pressure, Stalled};
use crate::{Cache, LEAST_BYTES, Worker};

/// The share of the time that somebody waited for memory.
const STALLED_SHARE: u32 = 10;
/// The share of the RAM that is to be available.
const AVAILABLE_SHARE: u64 = 8;
/// Less than this share is hardly any.
const HARDLY_SHARE: u64 = 16;
/// Less than this share is looked at more often.
const LITTLE_SHARE: u64 = 4;
/// The share of what there is that goes at once.
const GOES_SHARE: u64 = 4;
/// The share of the limit that is never lent, beside what takes memory however few pages there are.
const KEPT_SHARE: u64 = 8;
/// All of a limit comes back in this time.
const COMES_BACK_IN: Duration = Duration::from_secs(8);
/// Between two looks, and between two while there is little.
const BETWEEN_LOOKS: [Duration; 2] = [Duration::from_millis(250), Duration::from_millis(25)];

/// Looks at the machine from time to time.
pub struct Shrinker {
    /// Not without `/proc`; then nothing is lent.
    pressure: Option<Pressure>,
    looked: Instant,
    stalled: Option<Stalled>,
    is_little: bool,
}

/// What is seen at the end of a window.
struct Signs {
    memory: Memory,
    /// How much of it somebody waited for memory; `None` where the kernel does not say.
    stalled: Option<Duration>,
    window: Duration,
}

impl Signs {
    fn is_short(&self) -> bool {
        let is_waited_for = self.stalled.is_some_and(|stalled| stalled >= self.window / STALLED_SHARE);
        self.memory.is_below(if is_waited_for { AVAILABLE_SHARE } else { HARDLY_SHARE })
    }
}

/// What a cache takes now, in bytes.
struct Taken {
    limit: u64,
    /// What its pages cost.
    pages: u64,
    /// What it takes beside them.
    fixed: u64,
    lent: u64,
}

impl Taken {
    /// How much is to be lent.
    fn lends(&self, signs: &Signs) -> u64 {
        // The least, at which pages are charged for an eighth of the limit.
        let least = LEAST_BYTES.max(limit_for(self.fixed + self.limit / KEPT_SHARE));
        let lent = if signs.is_short() {
            let goes = signs.memory.missing_bytes(AVAILABLE_SHARE).min(self.pages / GOES_SHARE);
            // What is not used is nothing that somebody else could have.
            self.lent.max(self.limit.saturating_sub(limit_for(self.fixed + self.pages - goes)))
        } else {
            let spare = signs.memory.spare_bytes(AVAILABLE_SHARE);
            let comes = self.limit as f64 * signs.window.div_duration_f64(COMES_BACK_IN);
            self.lent.saturating_sub(spare.min(comes as u64))
        };
        lent.min(self.limit.saturating_sub(least))
    }
}

/// The limit under which so much is what everything is kept below.
fn limit_for(bytes: u64) -> u64 {
    bytes / 15 * 16
}

impl Shrinker {
    pub fn new() -> Shrinker {
        // Tests say themselves what there is.
        let pressure = if cfg!(test) { None } else { Pressure::open().ok() };
        let stalled = pressure.as_ref().and_then(Pressure::stalled);
        Shrinker { pressure, looked: Instant::now(), stalled, is_little: false }
    }

    /// When the next look is due.
    pub fn again(&self) -> Duration {
        BETWEEN_LOOKS[usize::from(self.is_little)].saturating_sub(self.looked.elapsed())
    }

    /// A window ends, and the next begins.
    fn signs(&mut self) -> Option<Signs> {
        let now = Instant::now();
        let window = now - replace(&mut self.looked, now);
        let pressure = self.pressure.as_ref()?;
        let stalled = pressure.stalled();
        let waited = stalled.zip(self.stalled).map(|(stalled, before)| stalled.some.saturating_sub(before.some));
        let signs = Signs { memory: pressure.memory()?, stalled: waited, window };
        (self.stalled, self.is_little) = (stalled, signs.memory.is_below(LITTLE_SHARE));
        Some(signs)
    }

    /// Looks if that is due, and lends memory or has it back.
    pub fn look<S: Copy + PartialEq>(&mut self, cache: &Cache<S>, worker: &mut Worker) {
        if self.again().is_zero()
            && let Some(signs) = self.signs()
        {
            self.is_little &= !cache.lend(worker, &signs);
        }
    }
}

impl<S: Copy + PartialEq> Cache<S> {
    /// Lends memory or has it back. Whether what goes is gone later, as groups are gathered.
    fn lend(&self, worker: &mut Worker, signs: &Signs) -> bool {
        let (limit_bytes, before, lent_bytes, gathers, mut most) = {
            let index = &mut *self.lock();
            self.reckon(index);
            let (limit, before) = (index.limit_bytes, index.lent_bytes);
            let taken = Taken { limit, pages: index.full_cost_bytes(), fixed: index.fixed_bytes(), lent: before };
            let mut lent = taken.lends(signs);
            if index.gathers && index.full_cost_bytes() > index.target_bytes(16) {
                // What went already will have been enough, perhaps, when it is gathered. (Some is always to be.)
                lent = lent.min(before);
            }
            if lent <= before {
                index.lent_bytes = lent;
                // Much of it came back: what comes now pushes out nothing.
                index.is_filling |= lent < before && index.cost_bytes() <= index.target_bytes(15) / 2;
            }
            (limit, before, lent, index.gathers, index.queues.length() / GOES_SHARE as usize)
        };
        if lent_bytes > before {
            // Who puts pages meanwhile is to find no more than his own too much, and not to have again what went.
            self.in_parts(|index| {
                if index.limit_bytes != limit_bytes {
                    return true;
                }
                let target_bytes = index.target_bytes_of(limit_bytes - lent_bytes);
                let length = index.queues.length();
                let is_done = self.shrink_some(index, target_bytes);
                most = most.saturating_sub(length - index.queues.length());
                let gone = limit_bytes.saturating_sub(limit_for(index.fixed_bytes() + index.full_cost_bytes()));
                // Of groups, whose memory goes with their last page, others go when they were gathered.
                let is_done = is_done || gathers && most == 0;
                index.lent_bytes = if is_done { lent_bytes } else { gone.clamp(index.lent_bytes, lent_bytes) };
                is_done
            });
            self.compact(worker);
        }
        gathers
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use compcache_store::{Codec, Page};

    use super::*;
    use crate::FileId;
    use crate::cold::tests::full_of_groups;

    const WINDOW: Duration = Duration::from_secs(1);

    /// Of 800 KiB, so much is available, and somebody waited for so long.
    fn signs(available: u64, stalled_ms: u64) -> Signs {
        Signs { memory: Memory::of(800, available), stalled: Some(Duration::from_millis(stalled_ms)), window: WINDOW }
    }

    #[test]
    fn memory_is_lent_while_it_is_short_and_comes_back() {
        const LIMIT: u64 = 32 << 20;
        // All that it is kept below, and nothing beside pages.
        const FULL: u64 = LIMIT / 16 * 15;
        let lends = |signs: Signs, pages, fixed, lent| Taken { limit: LIMIT, pages, fixed, lent }.lends(&signs);
        let unsaid = |available| Signs { stalled: None, ..signs(available, 0) };
        assert_eq!(lends(signs(100, 1000), FULL, 0, 0), 0, "an eighth is enough");
        assert_eq!(lends(signs(99, 99), FULL, 0, 0), 0, "hardly anybody waited");
        let lent_for = |kib: u64| (kib << 10).div_ceil(15) * 16;
        assert_eq!(lends(signs(99, 100), FULL, 0, 0), lent_for(1), "what is missing");
        assert_eq!(lends(signs(49, 0), FULL, 0, 0), lent_for(51), "hardly any is there");
        assert_eq!(
            [50, 49].map(|kib| lends(unsaid(kib), FULL, 0, 0)),
            [0, lent_for(51)],
            "nothing is known of waiting"
        );
        assert_eq!(lends(signs(49, 0), FULL / 2, FULL / 2, 0), lent_for(51), "pages, not what is beside them");
        let unused = lends(signs(0, 0), FULL / 2, 0, 0);
        assert_eq!(unused, LIMIT / 2 + lent_for(100), "what is not used helps nobody");
        let (none, all) = [0, 8 << 20].map(|available| Memory::of(8 << 20, available)).into();
        let of = |memory| Signs { memory, ..signs(0, 0) };
        assert_eq!(lends(of(none), FULL, 0, 0), LIMIT / 4, "not all at once");
        assert!(lends(of(none), 1 << 20, 0, 0) < LIMIT / 8 * 7, "the last eighth stays");
        assert_eq!(lends(of(none), 1 << 20, LIMIT, 0), 0, "where there is room for no more pages than that");
        assert_eq!(lends(signs(101, 1000), FULL, 0, 5000), 5000 - 1024, "not more than there is");
        assert_eq!(lends(of(all), FULL, 0, LIMIT / 2), LIMIT / 8 * 3, "nor all at once");
    }

    #[test]
    fn what_is_lent_goes_at_once_and_new_pages_come_when_it_is_back() {
        const LIMIT: u64 = 16 << 20;
        let id = FileId { dev: 1, ino: 1 };
        let cache = Cache::new(LIMIT, Codec::Lz4).unwrap();
        let mut worker = cache.worker().unwrap();
        let mut fill = |cache: &Cache<u64>| {
            for first in (0..16_384).step_by(16) {
                let mut rng = fastrand::Rng::with_seed(first);
                let pages: Vec<Page> = (0..16)
                    .map(|_| {
                        let mut page = [0; 4096];
                        rng.fill(&mut page[..1500]);
                        page
                    })
                    .collect();
                let token = cache.begin_read(id, 1, true);
                cache.put(&mut worker, token, first as u32, &pages);
            }
            cache.compact(&mut worker);
            cache.stats()
        };
        let full = fill(&cache);
        assert!(full.mem_used_total > LIMIT / 8 * 7, "{full:?}");
        let mut worker = cache.worker().unwrap();
        // A gigabyte is missing.
        let short = Signs { memory: Memory::of(8 << 20, 0), ..signs(0, 0) };
        for _ in 0..3 {
            cache.lend(&mut worker, &short);
        }
        let lent = cache.stats();
        assert!(lent.mem_used_total < full.mem_used_total / 16 * 8, "{lent:?}");
        assert_eq!((lent.memlimit, lent.mem_lent > LIMIT / 2), (LIMIT, true), "{lent:?}");
        let still = fill(&cache);
        assert!(still.mem_used_total < full.mem_used_total / 16 * 8, "it would have them again: {still:?}");
        assert!(still.pages_stored > 0);
        let enough = Signs { memory: Memory::of(8 << 20, 8 << 20), ..signs(0, 0) };
        for _ in 0..8 {
            cache.lend(&mut worker, &enough);
        }
        let again = fill(&cache);
        assert!(again.mem_used_total > LIMIT / 8 * 7 && again.mem_lent == 0, "{again:?}");
        // Whatever was lent, a new limit is what it says.
        cache.lend(&mut worker, &short);
        cache.set_limit_bytes(2 * LIMIT);
        assert_eq!(cache.stats().mem_lent, 0);
    }

    #[test]
    fn of_groups_others_go_only_when_what_went_was_gathered() {
        let (cache, mut worker) = full_of_groups();
        // Some of each are read again, and stay.
        for page in (0..16_384).filter(|page| page % 4 == 1) {
            let token = cache.begin_read(FileId { dev: 1, ino: 1 }, 1, true);
            cache.get(&mut worker, token, page, &mut [[0; 4096]], &mut [false]);
        }
        let (before, begun) = (cache.stats(), Instant::now());
        // A gigabyte is missing, all the time.
        let short = Signs { memory: Memory::of(8 << 20, 0), ..signs(0, 0) };
        while cache.stats().mem_used_total > before.mem_used_total / 4 * 3 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{before:?} {:?}", cache.stats());
            cache.lend(&mut worker, &short);
            thread::sleep(BETWEEN_LOOKS[1]);
        }
        let after = cache.stats();
        assert!(after.pages_stored > before.pages_stored / 20 * 9, "{before:?} {after:?}");
    }
}
