//! Which rule finds more: tried out on two small caches of page numbers.
//!
//! A page that the ghost knows goes to main, and the oldest page there that was not read since has to go. Where a little more is read again and again than there is room for, that is one which
//! will be wanted sooner: three quarters of the room find less than a half. So there is another rule, by which main *holds*: the page that comes challenges the oldest page of
//! main. Was that read since it was last challenged, it becomes the newest, and the page that comes is remembered, no more; else it gives way. What main has then stays
//! as long as it is read once between two rounds. But where others come to be wanted than before, it takes a round longer until they are there.
//!
//! | percent found                          | first rule | main holds | the one that is better at the time |
//! |----------------------------------------|------------|------------|------------------------------------|
//! | in any order, 4/3 of the room          | 44         | 73         | 73                                 |
//! | 6 sets, each 4 times, 9/10 of the room | 43         | 27         | 42                                 |
//!
//! (docs/decisions/0037 has more.) So both are simulated: of one page in 32, or in small caches of up to one in 16, chosen by a hash, eight neighbours at a time; with as many places as
//! that part of the pages that are here. The rule changes when the other has found a sixteenth more lately. A simulation has no bytes, and knows neither of writes nor of what is dropped.
//!
//! # Source
//! C. Waldspurger, T. Saemundsson, I. Ahmad, N. Park: Cache modeling and optimization using miniature simulations, USENIX ATC 2017.

use std::collections::HashMap;

use crate::FileId;
use crate::ghost::{Ghost, hash};
use crate::queues::Queues;

/// One of so many pages is simulated in the large, and more in small caches, so that there are a thousand places or so.
const SAMPLED_MAX: usize = 32;
const SAMPLED_MIN: usize = 16;
const PLACES_WANTED: usize = 1024;
/// Neighbours that are sampled together, 1 << this.
const GROUP_SHIFT: u32 = 3;
/// Pages that were asked for and wait to be simulated; more are forgotten.
const ASKED_MAX: usize = 1024;
const PLACES_MIN: usize = 8;
/// Beside its place, what a page takes in a map, in bytes.
const MAP_BYTES: usize = 24;

/// A cache of page numbers.
struct Miniature {
    /// Whether main holds.
    holds: bool,
    queues: Queues,
    ghost: Ghost,
    places: HashMap<u64, u32>,
    is_filling: bool,
    found: u32,
}

impl Miniature {
    fn new(holds: bool, ghost_pages: usize) -> Miniature {
        Miniature {
            holds,
            queues: Queues::new(),
            ghost: Ghost::new(ghost_pages),
            places: HashMap::new(),
            is_filling: true,
            found: 0,
        }
    }

    /// Somebody asks for a page; those that are here are as many as `places` at most.
    fn ask(&mut self, key: u64, places: usize) {
        self.ghost.pass(1, self.queues.length());
        if let Some(place) = self.places.get(&key) {
            self.queues.count_read(*place);
            self.found += 1;
            return;
        }
        let age = self.ghost.age(named(key), 0);
        let (mut to_main, is_full) = (age.is_some(), self.queues.length() >= places && !self.is_filling);
        if let Some(age) = age.filter(|_| is_full && self.holds) {
            to_main = age >= soon_pages(self.queues.length());
            if to_main && !self.queues.gives_way(1) {
                return self.ghost.remember(named(key), 0);
            }
        }
        self.ghost.take(named(key), 0);
        let Some(place) = self.queues.take() else { return };
        to_main |= self.is_filling && self.queues.is_small_full();
        self.queues.admit(place, ((key >> 32) as u32, key as u32), 0, true, to_main);
        self.places.insert(key, place);
        while self.queues.length() > places
            && let Some(victim) = self.queues.next_victim(self.holds)
        {
            self.is_filling = false;
            let key = u64::from(victim.file) << 32 | u64::from(victim.page);
            self.queues.release(victim.place);
            self.places.remove(&key);
            if victim.becomes_ghost {
                self.ghost.remember(named(key), 0);
            }
        }
    }

    fn bytes(&self) -> u64 {
        self.queues.bytes() + self.ghost.bytes() + (self.places.capacity() * MAP_BYTES) as u64
    }
}

/// Of a cache with so many pages: what is asked for again before so many others were, is wanted at once.
pub fn soon_pages(pages: usize) -> u32 {
    (pages / 4) as u32
}

fn named(key: u64) -> FileId {
    FileId { dev: 0, ino: key }
}

/// Both of them, and what they have found.
pub struct Miniatures {
    /// The first rule, and the one by which main holds.
    both: [Miniature; 2],
    /// One of so many pages is simulated.
    sampled: usize,
    /// Pages that were asked for and are not simulated yet.
    asked: Vec<u64>,
    /// Pages simulated since what was found last lost half of its weight: it does whenever there were more than places.
    simulated: usize,
    main_holds: bool,
}

impl Miniatures {
    /// Of a cache whose ghost remembers so many pages.
    pub fn new(ghost_pages: usize) -> Miniatures {
        let sampled = (ghost_pages / PLACES_WANTED).clamp(SAMPLED_MIN, SAMPLED_MAX);
        let small = ghost_pages.div_ceil(sampled);
        Miniatures {
            sampled,
            both: [Miniature::new(false, small), Miniature::new(true, small)],
            asked: Vec::with_capacity(ASKED_MAX),
            simulated: 0,
            main_holds: false,
        }
    }

    /// Whether main holds against pages that come again, as things are.
    pub fn main_holds(&self) -> bool {
        self.main_holds
    }

    #[cfg(test)]
    pub fn let_main_hold(&mut self, holds: bool) {
        self.main_holds = holds;
    }

    /// The memory it takes, in bytes.
    pub fn bytes(&self) -> u64 {
        (ASKED_MAX * size_of::<u64>()) as u64 + self.both.iter().map(Miniature::bytes).sum::<u64>()
    }

    /// Somebody asks for these pages of a file. Allocates nothing.
    pub fn note(&mut self, file: FileId, pages: std::ops::Range<u32>) {
        let mut next = pages.start;
        while next < pages.end {
            let last = next | ((1 << GROUP_SHIFT) - 1);
            let end = pages.end.min(last.saturating_add(1));
            if hash(file, last).is_multiple_of(self.sampled as u64) {
                let room = ASKED_MAX - self.asked.len();
                self.asked.extend((next..end).take(room).map(|page| hash(file, page)));
            }
            next = end;
        }
    }

    /// Simulates what was asked for, for a cache of so many pages.
    pub fn simulate(&mut self, pages: usize) {
        let places = (pages / self.sampled).max(PLACES_MIN);
        for key in self.asked.drain(..) {
            self.both.iter_mut().for_each(|miniature| miniature.ask(key, places));
            self.simulated += 1;
        }
        let [other, same] = if self.main_holds { [0, 1] } else { [1, 0] }.map(|which| self.both[which].found);
        if other > same + same / 16 + 1 {
            self.main_holds = !self.main_holds;
        }
        if self.simulated > places {
            self.simulated = 0;
            self.both.iter_mut().for_each(|miniature| miniature.found /= 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { dev: 1, ino: 2 };
    const PAGES: usize = 32_000;

    /// Pages from `first` on in a random order.
    fn shuffled(rng: &mut fastrand::Rng, first: u32, count: usize) -> Vec<u32> {
        let mut pages: Vec<u32> = (first..first + count as u32).collect();
        rng.shuffle(&mut pages);
        pages
    }

    fn ask(miniatures: &mut Miniatures, pages: &[u32]) {
        for page in pages {
            miniatures.note(FILE, *page..page + 1);
            miniatures.simulate(PAGES);
        }
    }

    #[test]
    fn main_holds_against_a_loop_that_is_a_little_too_large_and_not_against_other_pages() {
        let mut rng = fastrand::Rng::with_seed(5);
        let mut miniatures = Miniatures::new(PAGES);
        assert!(!miniatures.main_holds());
        for _ in 0..8 {
            let pages = shuffled(&mut rng, 0, PAGES / 3 * 4);
            ask(&mut miniatures, &pages);
        }
        assert!(miniatures.main_holds());
        // Each set is used six times, and never again.
        for set in 1..8 {
            for _ in 0..6 {
                let pages = shuffled(&mut rng, set * 100_000, PAGES / 10 * 9);
                ask(&mut miniatures, &pages);
            }
        }
        assert!(!miniatures.main_holds());
    }

    /// How often each of some pages is asked for follows Zipf's law with this exponent; whenever as many as a `step` were, all ranks belong to the next page.
    fn zipf(rng: &mut fastrand::Rng, pages: usize, exponent: f64, count: usize, step: usize) -> Vec<u32> {
        let mut sum = 0.0;
        let sums: Vec<f64> = (1..=pages)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        let order = shuffled(rng, 0, pages);
        let mut rank = || {
            let at = rng.f64() * sum;
            sums.partition_point(|upto| *upto < at).min(pages - 1)
        };
        (0..count).map(|count| order[(rank() + count / step) % pages]).collect()
    }

    /// What a page cache of so many pages that leaves out the longest unused still asks for.
    fn behind(places: usize, asked: Vec<u32>) -> Vec<u32> {
        let (mut last, mut ages) = (HashMap::new(), std::collections::BTreeMap::new());
        let mut missed = Vec::new();
        for (time, page) in asked.into_iter().enumerate() {
            match last.insert(page, time) {
                Some(before) => _ = ages.remove(&before),
                None => missed.push(page),
            }
            ages.insert(time, page);
            if ages.len() > places
                && let Some((_, oldest)) = ages.pop_first()
            {
                last.remove(&oldest);
            }
        }
        missed
    }

    /// The table of docs/decisions/0037; with --nocapture it is printed.
    #[test]
    fn what_is_done_is_nearly_as_good_as_the_better_rule() {
        const ROOM: usize = 4000;
        let mut rng = fastrand::Rng::with_seed(11);
        let rng = &mut rng;
        let loops = |rng: &mut fastrand::Rng, pages: usize| (0..12).flat_map(|_| shuffled(rng, 0, pages)).collect();
        let in_order = |pages: usize| (0..12).flat_map(|_| 0..pages as u32).collect();
        let sets = |rng: &mut fastrand::Rng, pages: usize, times: usize| {
            (0..6)
                .flat_map(|set| (0..times).flat_map(|_| shuffled(rng, set * 100_000, pages)).collect::<Vec<_>>())
                .collect()
        };
        let tenth = |rng: &mut fastrand::Rng, pages: usize| {
            let part = |rng: &mut fastrand::Rng| if rng.u8(..10) == 0 { pages } else { pages / 10 };
            (0..20 * ROOM).map(|_| (rng.f64() * part(rng) as f64) as u32).collect()
        };
        let cases: Vec<(&str, Vec<u32>)> = vec![
            ("in any order, 10/9 of the room", loops(rng, ROOM / 9 * 10)),
            ("in any order, 4/3 of the room", loops(rng, ROOM / 3 * 4)),
            ("in any order, 2 times the room", loops(rng, ROOM * 2)),
            ("in any order, 3 times the room", loops(rng, ROOM * 3)),
            ("in order, 10/9 of the room", in_order(ROOM / 9 * 10)),
            ("in order, 4/3 of the room", in_order(ROOM / 3 * 4)),
            ("in order, 2 times the room", in_order(ROOM * 2)),
            ("Zipf 0.7, 3 times the room", zipf(rng, 3 * ROOM, 0.7, 30 * ROOM, usize::MAX)),
            ("Zipf 0.9, 10 times the room", zipf(rng, 10 * ROOM, 0.9, 30 * ROOM, usize::MAX)),
            ("nine tenths to one tenth, of 10 times the room", tenth(rng, 10 * ROOM)),
            ("drifting Zipf 0.9, 4 times the room", zipf(rng, 4 * ROOM, 0.9, 30 * ROOM, 10)),
            ("6 sets, each 4 times, 9/10 of the room", sets(rng, ROOM / 10 * 9, 4)),
            ("6 sets, each 8 times, half of the room", sets(rng, ROOM / 2, 8)),
        ];
        for (name, asked) in cases {
            let asked = behind(ROOM / 5, asked);
            let mut each = [Miniature::new(false, ROOM), Miniature::new(true, ROOM), Miniature::new(false, ROOM)];
            let mut miniatures = Miniatures::new(ROOM);
            let mut begun = [0; 3];
            for (at, page) in asked.iter().enumerate() {
                if at == asked.len() / 3 {
                    begun = each.each_ref().map(|cache| cache.found);
                }
                miniatures.note(FILE, *page..page + 1);
                miniatures.simulate(ROOM);
                each[2].holds = miniatures.main_holds();
                each.iter_mut().for_each(|cache| cache.ask(hash(FILE, *page), ROOM));
            }
            let percent = |which: usize| {
                f64::from(100 * (each[which].found - begun[which])) / (asked.len() - asked.len() / 3) as f64
            };
            let [first, holds, done] = [0, 1, 2].map(percent);
            eprintln!("| {name:46} | {first:2.0} | {holds:2.0} | {done:2.0} |");
            assert!(done >= first.max(holds) * 0.85 - 1.0, "{name}: {first:.0} {holds:.0} {done:.0}");
        }
    }

    #[test]
    fn what_is_asked_for_is_sampled_with_its_neighbours_and_bounded() {
        const COUNT: u32 = 1 << 14;
        let mut miniatures = Miniatures::new(PAGES);
        miniatures.note(FILE, 0..COUNT);
        let asked = miniatures.asked.clone();
        assert!((350..700).contains(&asked.len()) && asked.len().is_multiple_of(8), "{} of {COUNT}", asked.len());
        miniatures.simulate(PAGES);
        assert!(miniatures.asked.is_empty() && miniatures.both.iter().all(|each| each.queues.length() == asked.len()));
        // Part by part it is the same.
        (0..COUNT).step_by(7).for_each(|page| miniatures.note(FILE, page..(page + 7).min(COUNT)));
        assert_eq!(miniatures.asked, asked);
        let capacity = miniatures.asked.capacity();
        (0..100).for_each(|_| miniatures.note(FILE, 0..COUNT));
        assert_eq!((miniatures.asked.len(), miniatures.asked.capacity()), (ASKED_MAX, capacity));
        // The last page there is.
        miniatures.note(FILE, u32::MAX - 40..u32::MAX);
    }

    #[test]
    fn as_many_are_kept_as_there_are_places_whatever_is_asked_for() {
        let mut miniatures = Miniatures::new(PAGES);
        for first in (0..3_000_000).step_by(64) {
            miniatures.note(FILE, first..first + 64);
            miniatures.simulate(PAGES);
        }
        assert!(
            miniatures
                .both
                .iter()
                .all(|each| each.queues.length() == each.places.len() && each.places.len() == PAGES / 31)
        );
        assert!(miniatures.bytes() < 384 << 10, "{}", miniatures.bytes());
    }

    #[test]
    fn while_there_is_room_nothing_is_pushed_out() {
        let mut miniatures = Miniatures::new(PAGES);
        for page in (0..PAGES as u32 / 3).chain(0..PAGES as u32 / 3) {
            miniatures.note(FILE, page..page + 1);
            miniatures.simulate(PAGES);
        }
        let [one, other] = &miniatures.both;
        assert!(one.found > 0 && one.found == other.found && one.found as usize == one.queues.length());
    }
}
