//! Who came to something by a way that is there no more.
//!
//! A path has many directories and one file. Where nothing is remembered the kernel asks for each of them whenever somebody goes that way, mostly to hear what it
//! heard a moment ago. So it may believe for some milliseconds where directories are ([`Remembered::Directories`](crate::Remembered)), though not where files are.
//! Then somebody may have moved one behind the mount, or put another in its place, and a path still leads to what it led to before. So each time that a name is looked up in
//! a directory, we look whether that and those above it are where the kernel was given them ([`Inodes::out_of_place`](crate::inodes::Inodes::out_of_place)). If they are not, who then
//! opens what was found, or makes, moves or removes something there, is told that it is stale (ESTALE). The kernel does not tell the program: it goes the whole way
//! once more, and believes nothing. So is who finds nothing there, if there is something where the path leads to.
//!
//! Who did not come by the directory's name, but by a descriptor of it, or since it is his working directory, comes again as he came before, and is let in then; who came by its name
//! does not come that way again. It is the same way if it was given the kernel at the same time.
//!
//! | asked, `here` being replaced by another | by its name                     | by a descriptor           |
//! |------------------------------------------|---------------------------------|---------------------------|
//! | look up `file` in the old one            | found, astray                   | found, astray             |
//! | open that                                | ESTALE                          | ESTALE                    |
//! | look up `here`                           | the new one                     |                           |
//! | look up `file`                           | in the new one                  | in the old one, astray    |
//! | open that                                | opened                          | opened, since he was told |
//!
//! Of nothing he is told twice when he looks it up, since the kernel asks twice for a name that it knew: who comes by a descriptor for one that it did not know, and that is there where the directory was, is told himself.
//! So it is with what the kernel opens without asking (FIFOs, sockets, devices).

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fuser::INodeNo;

/// For so long the kernel may believe where directories are; it counts in ticks, of 10 ms at most, and may take two more.
pub const BELIEVED: Duration = Duration::from_millis(10);
/// So long after it was given one it believes nothing of it, unless who was given it did not run for that long; and what it asks then was not asked because of it.
pub const DOUBTED: Duration = Duration::from_secs(1);
/// So long after he was told that it is stale somebody does not come again for that reason.
const COMES_AGAIN: Duration = Duration::from_secs(1);
/// Who else is astray at the same time is told each time, and his program with him.
const MOST: usize = 1024;
/// Those who are gone are looked for each time among so few.
const FEW: usize = 16;
/// Of what a thread was led to, the last are kept: what it names in one system call.
const LED_MOST: usize = 4;

/// A way that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// When the kernel was given the directory that it led to.
    pub since: Instant,
    /// Else it was given that directory where it is now as well, and may have heard of that, or not yet: who has looked again has come by that.
    pub is_certain: bool,
}

/// What a thread is about to do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum About {
    /// What its program has asked for.
    Do,
    /// To go on by what a symbolic link says.
    GoOn,
    /// To be told that there is nothing, or to have the kernel do what it does without asking.
    Find,
}

impl About {
    /// How often it is told.
    fn times(self) -> u8 {
        if self == About::Find { 2 } else { 1 }
    }
}

/// A thread that is astray.
struct Visitor {
    /// The files it was led to, by these ways.
    led: Vec<(INodeNo, Way)>,
    /// The ways that it was told are not there; none if it was not.
    ways: Vec<Way>,
    /// How often.
    times: u8,
    /// It has come again, and was let in: that may have been the end of it.
    has_come: bool,
    when: Instant,
}

impl Visitor {
    fn new() -> Visitor {
        Visitor { led: Vec::new(), ways: Vec::new(), times: 0, has_come: false, when: Instant::now() }
    }

    /// Whether it was told of all these.
    fn knows(&self, ways: &[Way]) -> bool {
        ways.iter().all(|way| !way.is_certain || self.ways.contains(way))
    }

    fn is_told(&mut self, ways: &[Way]) {
        (self.ways, self.times, self.has_come, self.when) = (ways.to_vec(), 1, false, Instant::now());
    }
}

/// All of them, by thread. Who cannot be told from others, since he is in another namespace of processes, is thread 0, and is told each time.
#[derive(Default)]
pub struct Astray {
    visitors: Mutex<HashMap<u32, Visitor>>,
    /// How many, for who is not among them.
    count: AtomicUsize,
}

impl Astray {
    /// A thread of some program was led to a file, by a way that is not there or by one that is. Whether that will be known: else it is to be told now.
    pub fn led(&self, thread: u32, file: INodeNo, way: Option<Way>) -> bool {
        let Some(way) = way else {
            self.with_known(thread, |visitor| visitor.led.retain(|(led, _)| *led != file));
            return true;
        };
        let note = |visitor: &mut Visitor| {
            visitor.led.retain(|(led, _)| *led != file);
            if visitor.led.len() == LED_MOST {
                visitor.led.remove(0);
            }
            visitor.led.push((file, way));
            visitor.when = Instant::now();
        };
        self.with(thread, note).is_some() || !way.is_certain
    }

    /// Whether it was, to what it is about to do something with.
    pub fn was_led(&self, thread: u32, file: INodeNo) -> Option<Way> {
        let take = |visitor: &mut Visitor| {
            let index = visitor.led.iter().position(|(led, _)| *led == file)?;
            Some(visitor.led.remove(index).1)
        };
        self.with_known(thread, take).flatten()
    }

    /// Whether a thread that came by these ways, of which none is there, is to be told so. When it has come again after that it is not, and may do what it is about to do once. If it then
    /// comes by others, its program is told: the kernel tries no third time.
    pub fn is_to_be_told(&self, thread: u32, ways: &[Way], about: About) -> bool {
        let ask = |visitor: &mut Visitor| {
            let knows = visitor.knows(ways);
            if visitor.ways.is_empty() || visitor.has_come && !knows {
                // For the first time, or again: what it was told of was before, most likely.
                visitor.is_told(ways);
                return !ways.is_empty();
            }
            // The kernel may have heard by now where else it is; then it asks no second time for that.
            let times = if ways.iter().any(|way| way.is_certain) { about.times() } else { 1 };
            let is_to_be = !knows || !ways.is_empty() && visitor.times < times;
            visitor.times = visitor.times.saturating_add(1);
            visitor.has_come |= !is_to_be;
            if !knows || !is_to_be && about == About::Do {
                // It has looked again, whatever came of it.
                visitor.ways.clear();
            }
            is_to_be
        };
        match ways.is_empty() {
            true => self.with_known(thread, ask).unwrap_or(false),
            // Who has looked again cannot be told from who has not: of what is certain alone.
            false => self.with(thread, ask).unwrap_or_else(|| ways.iter().any(|way| way.is_certain)),
        }
    }

    /// Calls `work` with what is known of a thread, if there is room for it.
    fn with<T>(&self, thread: u32, work: impl FnOnce(&mut Visitor) -> T) -> Option<T> {
        if thread == 0 {
            return None;
        }
        let mut visitors = self.visitors.lock().unwrap_or_else(PoisonError::into_inner);
        if visitors.len() <= FEW || visitors.len() >= MOST {
            visitors.retain(|_, visitor| visitor.when.elapsed() < COMES_AGAIN);
        }
        if visitors.len() >= MOST && !visitors.contains_key(&thread) {
            return None;
        }
        let visitor = visitors.entry(thread).or_insert_with(Visitor::new);
        if visitor.when.elapsed() >= COMES_AGAIN {
            *visitor = Visitor::new();
        }
        let done = work(visitor);
        if visitor.led.is_empty() && visitor.ways.is_empty() {
            visitors.remove(&thread);
        }
        self.count.store(visitors.len(), SeqCst);
        Some(done)
    }

    /// The same if anything is.
    fn with_known<T>(&self, thread: u32, work: impl FnOnce(&mut Visitor) -> T) -> Option<T> {
        if self.count.load(SeqCst) == 0 { None } else { self.with(thread, work) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: INodeNo = INodeNo(7);

    fn way(begun: Instant, number: u64) -> Way {
        Way { since: begun + Duration::from_nanos(number), is_certain: true }
    }

    #[test]
    fn who_comes_by_a_way_that_is_not_there_is_told_once_each_time() {
        let (astray, begun) = (Astray::default(), Instant::now());
        let (way, later) = ([way(begun, 0)], [way(begun, 1)]);
        let told = |thread, ways: &[Way]| astray.is_to_be_told(thread, ways, About::Do);
        assert!(!told(1, &[]));
        assert!(told(1, &way) && told(2, &way));
        assert!(!told(1, &way), "he comes again");
        assert!(told(1, &way), "for something else");
        assert!(!told(1, &[]), "by another way");
        assert!(told(1, &way));
        assert!(told(1, &later), "it was there meanwhile");
        assert!(told(1, &way), "that was the end of it");
        assert!(!told(2, &way));
    }

    #[test]
    fn of_a_way_that_is_not_there_perhaps_is_told_who_has_not_looked_again() {
        let (astray, begun) = (Astray::default(), Instant::now());
        let [one, other] = [0, 1].map(|number| [Way { is_certain: false, ..way(begun, number) }]);
        let told = |ways: &[Way]| astray.is_to_be_told(1, ways, About::Do);
        assert!(told(&one) && !told(&other), "a certain one would be the end of it");
        assert!(told(&[way(begun, 2)]) && !told(&one));
        let finds = [(); 2].map(|()| astray.is_to_be_told(1, &one, About::Find));
        assert_eq!(finds, [true, false]);
        assert!(astray.led(0, FILE, Some(one[0])) && !astray.is_to_be_told(0, &one, About::Do), "a stranger");
    }

    #[test]
    fn who_comes_by_two_ways_or_by_a_link_is_told_of_all_at_once() {
        let (astray, begun) = (Astray::default(), Instant::now());
        let ways = [way(begun, 0), way(begun, 1)];
        let told = |ways: &[Way], about| astray.is_to_be_told(1, ways, about);
        assert!(told(&ways, About::Do) && !told(&ways, About::Do));
        assert!(told(&ways[..1], About::GoOn) && !told(&ways[..1], About::GoOn));
        assert!(!told(&ways[..1], About::Do), "what is behind the link");
        assert!(told(&ways[..1], About::GoOn) && !told(&ways[..1], About::GoOn));
        assert!(told(&ways[1..], About::Do), "later");
        assert!(!told(&ways[1..], About::Do));
    }

    #[test]
    fn who_finds_nothing_is_told_twice_however_often_he_looks() {
        let (astray, way) = (Astray::default(), [way(Instant::now(), 0)]);
        let mut told = (0..1000).map(|_| astray.is_to_be_told(1, &way, About::Find));
        assert!(told.next() == Some(true) && told.next() == Some(true) && !told.any(|is| is));
        assert!(!astray.is_to_be_told(1, &way, About::Do), "what he then does there he may");
        let later = [Way { since: way[0].since + Duration::from_nanos(1), is_certain: true }];
        (0..3).for_each(|time| assert_eq!(astray.is_to_be_told(1, &way, About::Find), time < 2));
        assert!(astray.is_to_be_told(1, &later, About::Do) && !astray.is_to_be_told(1, &later, About::Do), "later");
    }

    #[test]
    fn where_somebody_was_led_is_known_until_he_does_something_with_it() {
        let (astray, begun) = (Astray::default(), Instant::now());
        let (way, later) = (way(begun, 0), way(begun, 1));
        assert!(astray.led(1, FILE, Some(way)) && astray.led(1, FILE, Some(later)));
        assert_eq!((astray.was_led(2, FILE), astray.was_led(1, INodeNo(8))), (None, None));
        assert_eq!((astray.was_led(1, FILE), astray.was_led(1, FILE)), (Some(later), None));
        assert!(astray.led(1, FILE, Some(way)) && astray.led(1, FILE, None));
        assert_eq!(astray.was_led(1, FILE), None, "by another way, which is there");
        (10..20).for_each(|file| assert!(astray.led(1, INodeNo(file), Some(way))));
        let known = (10..20).filter(|file| astray.was_led(1, INodeNo(*file)).is_some());
        assert_eq!(known.collect::<Vec<_>>(), [16, 17, 18, 19]);
        assert_eq!(astray.count.load(SeqCst), 0);
    }

    #[test]
    fn who_cannot_be_told_from_others_or_finds_no_room_is_told_each_time() {
        let (astray, way) = (Astray::default(), way(Instant::now(), 0));
        let last = MOST as u32 + 1;
        (1..last).for_each(|thread| assert!(astray.led(thread, FILE, Some(way))));
        for thread in [0, last] {
            assert!(!astray.led(thread, FILE, Some(way)));
            (0..3).for_each(|_| assert!(astray.is_to_be_told(thread, &[way], About::Do)));
            assert!(!astray.is_to_be_told(thread, &[], About::Do));
        }
        let long_ago = Instant::now().checked_sub(COMES_AGAIN).unwrap();
        astray.visitors.lock().unwrap().values_mut().for_each(|visitor| visitor.when = long_ago);
        assert!(astray.led(last, FILE, Some(way)) && astray.was_led(1, FILE).is_none());
        assert_eq!(astray.visitors.lock().unwrap().len(), 1);
    }
}
