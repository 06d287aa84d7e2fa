//! Which page goes next: S3-FIFO.
//!
//! ```text
//!   new page ---> small (a tenth) --- read again ---> main --- read again: once more round
//!                   |                                  |
//!                   +--- not read: goes, remembered    +--- not read since: goes
//!                          as a ghost                 ^
//!                                                     |
//!   a page that is a ghost when it comes -------------+
//! ```
//!
//! Where main *holds* (`miniature`), what is read again or a ghost goes there only if an old page of main gives way ([`Queues::gives_way`]).
//!
//! A scan through a large file passes through the small queue and leaves main as it was. Nothing is moved when a page is read; it is only
//! counted, up to 3. Here "read" means read from the pool: that is when the kernel has dropped the page from its own cache and wanted it again, so one
//! such read is a sign of reuse (in the paper the small queue asks for two, since there every access is seen).
//!
//! Example, 1000 pages: 100 may be in small. A page that comes when there are 150 in small makes the first of those go, or move to main if it was
//! read; only when small has its tenth or less does main give one up. While nothing has to go yet, what is too much for small goes to main (as in the
//! authors' own program, libCacheSim; the caller knows).
//!
//! A page is a *place*: a number from 0, which is also its index in the pool. Places are used again; each use has another version, also where the place was
//! given back in between ([`Queues::give_back`]). 32 bytes a place. Arithmetic only: no lock, no pool.
//!
//! # Source
//! J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak: FIFO queues are all you need for cache eviction, SOSP 2023.

use std::mem;

/// No place.
const NONE: u32 = u32::MAX;
/// One of so many pages is in the small queue.
const SMALL_SHARE: usize = 10;
const READS_MAX: u8 = 3;
/// After so many pages that were all read, the next goes although it was: whoever has the lock is not to go round all of main, up to three times.
const STEPS_MAX: u32 = 4096;
/// At most one of so many pages of main is challenged at once.
const MAIN_SHARE: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    /// Given out, and in neither queue.
    Taken,
    Small,
    Main,
}

struct Place {
    file: u32,
    page: u32,
    /// Towards the page that came before.
    older: u32,
    newer: u32,
    version: u32,
    /// What the page takes in the pool.
    bytes: u16,
    reads: u8,
    state: State,
    /// It came because somebody read it, not because somebody wrote it.
    is_of_read: bool,
}

#[derive(Clone, Copy)]
struct Queue {
    oldest: u32,
    newest: u32,
    length: usize,
}

impl Queue {
    const EMPTY: Queue = Queue { oldest: NONE, newest: NONE, length: 0 };
}

/// A page that leaves.
#[derive(Debug, PartialEq, Eq)]
pub struct Victim {
    pub place: u32,
    pub file: u32,
    pub page: u32,
    /// It was in the small queue: should it come again soon, it is new no longer.
    pub becomes_ghost: bool,
    /// The same, it was somebody's read that it came by, and it was never found there.
    pub is_new: bool,
}

pub struct Queues {
    places: Vec<Place>,
    free: Vec<u32>,
    /// That of a place that is new: none that was given back had it.
    version: u32,
    small: Queue,
    main: Queue,
    /// Pages that came by a read and were found in the small queue when they had to leave it.
    found_in_small: u32,
    /// Pages that were passed over when one was to go.
    passed: u64,
}

impl Queues {
    pub fn new() -> Queues {
        let (places, free, small, main) = (Vec::new(), Vec::new(), Queue::EMPTY, Queue::EMPTY);
        Queues { places, free, version: 0, small, main, found_in_small: 0, passed: 0 }
    }

    /// Pages in the queues.
    pub fn length(&self) -> usize {
        self.small.length + self.main.length
    }

    /// The memory it takes, in bytes.
    pub fn bytes(&self) -> u64 {
        (self.places.capacity() * size_of::<Place>() + self.free.capacity() * size_of::<u32>()) as u64
    }

    /// What places without pages take if there are so many places at most: they are in no page's charge.
    pub fn unused_bytes(&self, places_max: usize) -> u64 {
        let unused = self.places.len().min(places_max).saturating_sub(self.length());
        (unused * (size_of::<Place>() + size_of::<u32>())) as u64
    }

    /// How many places are enough within this limit: four times as many as there are pages, but an eighth of it may be for places without pages, and no more than half
    /// is for any.
    pub fn places_wanted(&self, limit_bytes: u64) -> usize {
        let all = limit_bytes as usize / (size_of::<Place>() + size_of::<u32>());
        (4 * self.length()).clamp(all / 8, all / 2)
    }

    /// Whether there are too many, or there is memory for too many.
    pub fn has_beyond(&self, wanted: usize) -> bool {
        self.places.len() > wanted || self.places.capacity() > 2 * wanted
    }

    /// The last page at a place that is too much, with its file and its number there: it has to go for the place to be given back.
    pub fn last_beyond(&self, wanted: usize, before: u32) -> Option<(u32, u32, u32)> {
        let end = self.places.len().min(before as usize);
        let is_here = |at: &Place| matches!(at.state, State::Small | State::Main);
        let place = wanted.min(end) + self.places[wanted.min(end)..end].iter().rposition(is_here)?;
        let at = &self.places[place];
        Some((place as u32, at.file, at.page))
    }

    /// Gives back memory of free places at the end, down to so many.
    pub fn give_back(&mut self, wanted: usize) {
        let used = self.places.iter().rposition(|at| at.state != State::Free).map_or(0, |last| last + 1);
        let gone = self.places.drain(used.max(wanted).min(self.places.len())..);
        if let Some(last) = gone.map(|at| at.version).max() {
            self.version = self.version.max(last.wrapping_add(1));
        }
        let length = self.places.len() as u32;
        self.free.retain(|place| *place < length);
        // The first are taken first, so that the last may be given back another time.
        self.free.sort_unstable_by(|one, other| other.cmp(one));
        self.places.shrink_to(wanted);
        self.free.shrink_to(self.places.capacity());
    }

    /// Whether the small queue has more than its share.
    pub fn is_small_full(&self) -> bool {
        self.small.length > self.length() / SMALL_SHARE
    }

    /// Whether it has so much more, by what was written or since others were dropped, that main is to grow at its cost.
    pub fn is_small_swollen(&self) -> bool {
        self.small.length > 2 * self.length() / SMALL_SHARE
    }

    /// A place for a page that is being stored; `None` when there are four billion.
    pub fn take(&mut self) -> Option<u32> {
        let place = match self.free.pop() {
            Some(place) => place,
            None => {
                let place = u32::try_from(self.places.len()).ok().filter(|place| *place != NONE)?;
                let fresh = Place {
                    file: 0,
                    page: 0,
                    older: NONE,
                    newer: NONE,
                    version: self.version,
                    bytes: 0,
                    reads: 0,
                    state: State::Free,
                    is_of_read: false,
                };
                self.places.push(fresh);
                // All may be given back without asking for memory.
                if self.free.capacity() < self.places.len() {
                    self.free.reserve(self.places.capacity());
                }
                place
            }
        };
        self.places[place as usize].state = State::Taken;
        Some(place)
    }

    /// The page at a place that was taken is stored: it is the newest of a queue.
    pub fn admit(&mut self, place: u32, (file, page): (u32, u32), bytes: u16, is_of_read: bool, to_main: bool) {
        let state = if to_main { State::Main } else { State::Small };
        let at = &mut self.places[place as usize];
        (at.file, at.page, at.bytes, at.reads, at.is_of_read) = (file, page, bytes, 0, is_of_read);
        self.push(place, state);
    }

    /// The page's file is called so from now on.
    pub fn moved(&mut self, place: u32, file: u32) {
        self.places[place as usize].file = file;
    }

    /// The page was read.
    pub fn count_read(&mut self, place: u32) {
        let at = &mut self.places[place as usize];
        at.reads = (at.reads + 1).min(READS_MAX);
    }

    /// Tells one use of a place from another; `None` if it was given back.
    pub fn version(&self, place: u32) -> Option<u32> {
        self.places.get(place as usize).map(|at| at.version)
    }

    /// What the page takes in the pool, in bytes.
    pub fn bytes_of(&self, place: u32) -> u16 {
        self.places[place as usize].bytes
    }

    /// The page at a place is no more. The pool must have let go of it.
    pub fn release(&mut self, place: u32) {
        self.unlink(place);
        let at = &mut self.places[place as usize];
        at.state = State::Free;
        at.version = at.version.wrapping_add(1);
        self.free.push(place);
    }

    /// The page that is to go: out of its queue, the place still taken. `None` if there is no page. Where main holds, what was read in the small queue challenges a
    /// page of main, too, before it goes there, and else stays where it is.
    pub fn next_victim(&mut self, main_holds: bool) -> Option<Victim> {
        for step in 0.. {
            let from_small = self.is_small_full() || self.main.length == 0;
            let place = if from_small { self.small.oldest } else { self.main.oldest };
            if place == NONE {
                return None;
            }
            self.unlink(place);
            let at = &mut self.places[place as usize];
            if at.reads == 0 || step == STEPS_MAX {
                let is_new = from_small && at.is_of_read && at.reads == 0;
                return Some(Victim { place, file: at.file, page: at.page, becomes_ghost: from_small, is_new });
            }
            self.passed += 1;
            self.found_in_small += u32::from(from_small && at.is_of_read);
            at.reads = if from_small { 0 } else { at.reads - 1 };
            let stays = from_small && main_holds && !self.is_small_swollen() && !self.gives_way(1);
            // It counts once, and no more when it leaves.
            self.places[place as usize].is_of_read &= !stays;
            self.push(place, if stays { State::Small } else { State::Main });
        }
        None
    }

    /// How many pages have been passed over, since they were read, when one was to go: what that took.
    pub fn passed(&self) -> u64 {
        self.passed
    }

    /// So many pages that come again challenge as many of the oldest of main, or an eighth of all, if that is less: whether none of these was read since it was last
    /// challenged. Such stay the oldest; others become the newest, and have to be read again until next time.
    pub fn gives_way(&mut self, count: usize) -> bool {
        let challenged = count.min(self.main.length.div_ceil(MAIN_SHARE));
        let (mut unread, mut next) = (0, self.main.oldest);
        for _ in 0..challenged {
            let place = next;
            let at = &mut self.places[place as usize];
            next = at.newer;
            if mem::take(&mut at.reads) == 0 {
                unread += 1;
            } else {
                self.unlink(place);
                self.push(place, State::Main);
            }
        }
        unread == challenged
    }

    /// How many pages that came by a read were found in the small queue when their turn came to leave it, since this was last asked.
    pub fn take_found_in_small(&mut self) -> u32 {
        mem::take(&mut self.found_in_small)
    }

    fn queue(&mut self, state: State) -> Option<&mut Queue> {
        match state {
            State::Small => Some(&mut self.small),
            State::Main => Some(&mut self.main),
            State::Free | State::Taken => None,
        }
    }

    fn push(&mut self, place: u32, state: State) {
        let Some(queue) = self.queue(state) else { return };
        let before = queue.newest;
        queue.newest = place;
        queue.length += 1;
        if before == NONE {
            queue.oldest = place;
        } else {
            self.places[before as usize].newer = place;
        }
        let at = &mut self.places[place as usize];
        (at.older, at.newer, at.state) = (before, NONE, state);
    }

    fn unlink(&mut self, place: u32) {
        let at = &mut self.places[place as usize];
        let (older, newer, state) = (at.older, at.newer, at.state);
        at.state = State::Taken;
        let Some(queue) = self.queue(state) else { return };
        queue.length -= 1;
        if older == NONE {
            queue.oldest = newer;
        }
        if newer == NONE {
            queue.newest = older;
        }
        if older != NONE {
            self.places[older as usize].newer = newer;
        }
        if newer != NONE {
            self.places[newer as usize].older = older;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(queues: &mut Queues, page: u32, to_main: bool) -> u32 {
        let place = queues.take().unwrap();
        queues.admit(place, (0, page), 1000, true, to_main);
        place
    }

    fn evict(queues: &mut Queues) -> Victim {
        let victim = queues.next_victim(false).unwrap();
        queues.release(victim.place);
        victim
    }

    #[test]
    fn a_scan_leaves_what_was_read_again_in_place() {
        let mut queues = Queues::new();
        for page in 0..1000 {
            let place = add(&mut queues, page, false);
            if page < 500 {
                queues.count_read(place);
            }
        }
        for page in 1000..50_000 {
            add(&mut queues, page, false);
            assert!(evict(&mut queues).page >= 500, "page {page} of the scan pushed out one that was used");
        }
        assert_eq!(queues.length(), 1000);
    }

    #[test]
    fn main_gives_up_first_what_was_not_read_since() {
        let mut queues = Queues::new();
        let places: Vec<u32> = (0..10).map(|page| add(&mut queues, page, true)).collect();
        places.iter().step_by(2).for_each(|place| queues.count_read(*place));
        let pages: Vec<u32> = (0..10).map(|_| evict(&mut queues).page).collect();
        assert_eq!(pages, [1, 3, 5, 7, 9, 0, 2, 4, 6, 8]);
        assert_eq!(queues.next_victim(false), None);
    }

    #[test]
    fn where_all_was_read_again_one_goes_all_the_same_before_all_were_looked_at() {
        let mut queues = Queues::new();
        let places: Vec<u32> = (0..100_000).map(|page| add(&mut queues, page, true)).collect();
        places.iter().for_each(|place| (0..3).for_each(|_| queues.count_read(*place)));
        assert_eq!(evict(&mut queues).page, STEPS_MAX);
        queues.count_read(places[STEPS_MAX as usize + 1]);
        assert_eq!(evict(&mut queues).page, 2 * STEPS_MAX + 1, "the next begins where that one ended");
    }

    #[test]
    fn what_is_read_between_two_challenges_holds_and_gives_way_else() {
        let mut queues = Queues::new();
        assert!(queues.gives_way(5), "nobody is there");
        let places: Vec<u32> = (0..80).map(|page| add(&mut queues, page, true)).collect();
        assert!(queues.gives_way(4) && queues.gives_way(4), "a challenge that is won is not over");
        places[..8].iter().for_each(|place| (0..3).for_each(|_| queues.count_read(*place)));
        assert!(!queues.gives_way(3) && !queues.gives_way(5));
        assert!(queues.gives_way(2), "those that nobody read are the oldest now");
        assert_eq!([evict(&mut queues).page, evict(&mut queues).page], [8, 9]);
        places[10..20].iter().for_each(|place| queues.count_read(*place));
        assert!(!queues.gives_way(1000) && queues.gives_way(1000), "more than an eighth are not challenged");
        let pages: Vec<u32> = (0..78).map(|_| evict(&mut queues).page).collect();
        assert_eq!(pages, [(20..80).collect::<Vec<_>>(), (0..8).collect(), (10..20).collect()].concat());
    }

    #[test]
    fn where_main_holds_what_was_read_in_the_small_queue_stays_there() {
        // What was read goes to main, and on from there, where all others were read, too; or the next one goes.
        for (main_holds, page) in [(false, 90), (true, 91)] {
            let mut queues = Queues::new();
            let main: Vec<u32> = (0..90).map(|page| add(&mut queues, page, true)).collect();
            let new: Vec<u32> = (90..101).map(|page| add(&mut queues, page, false)).collect();
            main.iter().for_each(|place| queues.count_read(*place));
            queues.count_read(new[0]);
            assert_eq!(queues.next_victim(main_holds).unwrap().page, page);
        }
        // But not for ever, where most of what is here is in the small queue.
        let mut queues = Queues::new();
        let main = add(&mut queues, 0, true);
        let new: Vec<u32> = (1..50).map(|page| add(&mut queues, page, false)).collect();
        for _ in 0..2 {
            queues.count_read(main);
            new.iter().take(20).for_each(|place| queues.count_read(*place));
        }
        assert_eq!(queues.next_victim(true).unwrap().page, 21);
        assert_eq!(queues.main.length, 21);
    }

    #[test]
    fn a_page_that_was_never_read_leaves_a_ghost_and_one_of_main_does_not() {
        let mut queues = Queues::new();
        add(&mut queues, 1, false);
        assert!(evict(&mut queues).becomes_ghost);
        add(&mut queues, 2, true);
        assert!(!evict(&mut queues).becomes_ghost);
    }

    #[test]
    fn places_that_are_too_many_are_given_back_and_never_have_a_version_again() {
        let mut queues = Queues::new();
        let places: Vec<u32> = (0..1000).map(|page| add(&mut queues, page, false)).collect();
        let (taken, versions) = (queues.take().unwrap(), places.iter().map(|place| queues.version(*place)));
        let versions: Vec<_> = versions.collect();
        let full = queues.bytes();
        places[100..].iter().for_each(|place| queues.release(*place));
        assert_eq!([0, 8000, 80_000, 1 << 20].map(|limit| queues.places_wanted(limit)), [0, 125, 400, 4096]);
        queues.give_back(400);
        assert_eq!(queues.places.len(), 1001, "the last is being stored");
        queues.release(taken);
        queues.give_back(400);
        assert!(queues.bytes() <= full / 2, "{} of {full} bytes", queues.bytes());
        assert_eq!((queues.version(350).is_some(), queues.version(400)), (true, None));
        assert_eq!(queues.last_beyond(50, u32::MAX), Some((99, 0, 99)));
        assert_eq!(queues.last_beyond(50, 99), Some((98, 0, 98)));
        assert_eq!((queues.last_beyond(100, u32::MAX), queues.last_beyond(5000, u32::MAX)), (None, None));
        for page in 100..2000 {
            let place = add(&mut queues, page, false);
            assert_eq!(place, page, "the first free one");
            assert_ne!(Some(&queues.version(place)), versions.get(place as usize), "place {place}");
        }
        assert!(!queues.has_beyond(2000));
    }

    #[test]
    fn queues_are_what_a_list_of_pages_is_under_random_use() {
        let mut rng = fastrand::Rng::with_seed(7);
        let (mut queues, mut there) = (Queues::new(), Vec::new());
        for page in 0..20_000 {
            let main_holds = page % 4000 < 2000;
            match rng.u8(..11) {
                10 => _ = queues.gives_way(rng.usize(..40)),
                0..5 => there.push(add(&mut queues, page, rng.bool())),
                5..7 if !there.is_empty() => queues.count_read(there[rng.usize(..there.len())]),
                7 if !there.is_empty() => {
                    let place = there.swap_remove(rng.usize(..there.len()));
                    let version = queues.version(place);
                    queues.release(place);
                    assert_ne!(queues.version(place), version);
                }
                _ if !there.is_empty() => {
                    let victim = queues.next_victim(main_holds).unwrap();
                    queues.release(victim.place);
                    there.remove(there.iter().position(|place| *place == victim.place).expect("it was there"));
                }
                _ => {}
            }
            assert_eq!(queues.length(), there.len());
            if page % 100 == 0 {
                for queue in [queues.small, queues.main] {
                    let (mut at, mut count, mut before) = (queue.oldest, 0, NONE);
                    while at != NONE {
                        assert_eq!(queues.places[at as usize].older, before);
                        (before, at, count) = (at, queues.places[at as usize].newer, count + 1);
                    }
                    assert_eq!((before, count), (queue.newest, queue.length));
                }
            }
        }
        while let Some(victim) = queues.next_victim(false) {
            queues.release(victim.place);
            there.retain(|place| *place != victim.place);
        }
        assert!(there.is_empty());
    }
}
