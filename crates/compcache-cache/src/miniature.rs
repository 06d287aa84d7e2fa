//! Which rule finds more: tried out on two small caches of page numbers.
//!
//! A page that the ghost knows goes to main, and the oldest page there that was not read since has to go. Where a little more is read again and again than there is room for, that is one which
//! will be wanted sooner: two thirds of the room find a third. So there is another rule, by which main *holds*: the page that comes challenges the oldest page of
//! main. Was that read since it was last challenged, it becomes the newest, and the page that comes is remembered, no more; else it gives way. What main has then stays
//! as long as it is read once between two rounds. But where others come to be wanted than before, it takes a round longer until they are there.
//!
//! Percentages found of what is asked for, by simulation; the last column is what is done here:
//!
//! | accesses                                                   | first rule | main holds | the better of both |
//! |------------------------------------------------------------|------------|------------|--------------------|
//! | all of 4/3 of the room, each time in another order         | 44         | 75         | 75                 |
//! | all of 20/13 of the room, likewise                         | 32         | 50         | 51                 |
//! | in order, 10/9 of the room                                 | 64         | 90         | 90                 |
//! | Zipf (0.7), 10/3 of the room, behind a page cache of a third | 42       | 45         | 44                 |
//! | 9/10 of the room, eight times, then others                 | 72         | 65         | 72                 |
//! | Zipf (0.9), four times the room, which drifts              | 56         | 52         | 56                 |
//!
//! Neither rule is always better, so both are simulated: of one page in 32, chosen by a hash, in groups of neighbours, since these are read together; with as many places as
//! one in 32 of the pages that are here. The rule changes when the other has found a sixteenth more lately. A simulation has no bytes, and costs some 100 ns for each of its pages, a few ns
//! for each that is asked for.
//!
//! # Source
//! C. Waldspurger, T. Saemundsson, I. Ahmad, N. Park: Cache modeling and optimization using miniature simulations, USENIX ATC 2017.

use std::collections::HashMap;

use crate::FileId;
use crate::ghost::{Ghost, hash};
use crate::queues::Queues;

/// One of so many pages is simulated.
const SAMPLED: u64 = 32;
/// Neighbours that are sampled together, 1 << this.
const GROUP_SHIFT: u32 = 5;
/// Pages that were asked for and wait to be simulated; more are forgotten.
const ASKED_MAX: usize = 1024;
const PLACES_MIN: usize = 8;
/// What was found loses half of its weight whenever so many times the places were asked for.
const MEMORY_IN_PLACES: usize = 1;
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
    /// Pages that were asked for and are not simulated yet.
    asked: Vec<u64>,
    /// Pages simulated since what was found last lost half of its weight.
    simulated: u32,
    main_holds: bool,
}

impl Miniatures {
    /// Of a cache whose ghost remembers so many pages.
    pub fn new(ghost_pages: usize) -> Miniatures {
        let small = ghost_pages.div_ceil(SAMPLED as usize);
        Miniatures {
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

    /// The memory it takes, in bytes.
    pub fn bytes(&self) -> u64 {
        (ASKED_MAX * size_of::<u64>()) as u64 + self.both.iter().map(Miniature::bytes).sum::<u64>()
    }

    /// Somebody asks for these pages of a file. Allocates nothing.
    pub fn note(&mut self, file: FileId, pages: std::ops::Range<u32>) {
        let mut next = pages.start;
        while next < pages.end {
            let group = next >> GROUP_SHIFT;
            let end = pages.end.min((group + 1) << GROUP_SHIFT);
            if hash(file, group).is_multiple_of(SAMPLED) {
                let room = ASKED_MAX - self.asked.len();
                self.asked.extend((next..end).take(room).map(|page| hash(file, page)));
            }
            next = end;
        }
    }

    /// Simulates what was asked for, for a cache that has so many pages; `None`: there is still room.
    pub fn simulate(&mut self, pages: Option<usize>) {
        let places = pages.map_or(usize::MAX, |pages| (pages / SAMPLED as usize).max(PLACES_MIN));
        for key in self.asked.drain(..) {
            self.both.iter_mut().for_each(|miniature| miniature.ask(key, places));
            self.simulated = self.simulated.saturating_add(1);
        }
        let [other, same] = if self.main_holds { [0, 1] } else { [1, 0] }.map(|which| self.both[which].found);
        if other > same + same / 16 + 1 {
            self.main_holds = !self.main_holds;
        }
        if self.simulated as usize > places.saturating_mul(MEMORY_IN_PLACES) {
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
            miniatures.simulate(Some(PAGES));
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

    #[test]
    fn what_is_asked_for_is_sampled_with_its_neighbours_and_bounded() {
        const COUNT: u32 = 1 << 14;
        let mut miniatures = Miniatures::new(PAGES);
        miniatures.note(FILE, 0..COUNT);
        let asked = miniatures.asked.clone();
        assert!((200..800).contains(&asked.len()) && asked.len().is_multiple_of(32), "{} of {COUNT}", asked.len());
        miniatures.simulate(None);
        assert!(miniatures.asked.is_empty() && miniatures.both.iter().all(|each| each.queues.length() == asked.len()));
        // Part by part it is the same.
        (0..COUNT).step_by(7).for_each(|page| miniatures.note(FILE, page..(page + 7).min(COUNT)));
        assert_eq!(miniatures.asked, asked);
        let capacity = miniatures.asked.capacity();
        (0..100).for_each(|_| miniatures.note(FILE, 0..COUNT));
        assert_eq!((miniatures.asked.len(), miniatures.asked.capacity()), (ASKED_MAX, capacity));
    }

    #[test]
    fn while_there_is_room_nothing_is_pushed_out() {
        let mut miniatures = Miniatures::new(PAGES);
        for _ in 0..2 {
            for page in 0..PAGES as u32 {
                miniatures.note(FILE, page..page + 1);
                miniatures.simulate(None);
            }
        }
        let [one, other] = &miniatures.both;
        assert!(one.found > 0 && one.found == other.found && one.found as usize == one.queues.length());
    }
}
