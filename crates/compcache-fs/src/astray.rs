//! Who came to something by a way that is there no more.
//!
//! A path has many directories and one file. Where nothing is remembered the kernel asks for each of them whenever somebody goes that way, mostly to hear what it
//! heard a moment ago. So it may believe for some milliseconds where directories are ([`Remembered::Directories`](crate::Remembered)), though nothing of files.
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
//! Of nothing he is told twice, since the kernel asks twice for a name that it knew: who comes by a descriptor for one that it did not know, and that is there where the directory was, is told himself.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fuser::INodeNo;

/// For so long the kernel may believe where directories are; it counts in ticks, of 10 ms at most, and may take one more.
pub const BELIEVED: Duration = Duration::from_millis(10);
/// So long after it was given one it believes nothing of it for sure, and what it asks then was not asked because of it, however long it took to be served.
pub const DOUBTED: Duration = Duration::from_secs(1);
/// So long after he was told that it is stale somebody does not come again for that reason.
const COMES_AGAIN: Duration = Duration::from_secs(1);
/// Who else is astray at the same time may be told twice, and his program with him.
const MOST: usize = 1024;

/// What a thread is about to do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum About {
    /// What its program has asked for.
    Do,
    /// To go on by what a symbolic link says.
    GoOn,
    /// To be told that there is nothing.
    FindNothing,
}

impl About {
    /// How often it is told.
    fn times(self) -> u8 {
        if self == About::FindNothing { 2 } else { 1 }
    }
}

/// A thread was led to a file, since the kernel believes in a way that it was given at that time.
struct Led {
    thread: u32,
    file: INodeNo,
    since: Instant,
    when: Instant,
}

/// A thread was told so often that these ways are not there, and is to come again.
struct Told {
    thread: u32,
    ways: Vec<Instant>,
    times: u8,
    /// It has come again, to a symbolic link: the end of that may have been to read it.
    has_come: bool,
    when: Instant,
}

/// All who are astray.
#[derive(Default)]
pub struct Astray(Mutex<(Vec<Led>, Vec<Told>)>);

impl Astray {
    /// A thread of some program was led to a file; `since` the kernel believes in a way that is not there, or by one that is.
    pub fn led(&self, thread: u32, file: INodeNo, since: Option<Instant>) {
        self.with(|led, _| {
            led.retain(|led| (led.thread, led.file) != (thread, file));
            if let Some(since) = since
                && led.len() < MOST
            {
                led.push(Led { thread, file, since, when: Instant::now() });
            }
        });
    }

    /// Whether it was, to what it is about to do something with.
    pub fn was_led(&self, thread: u32, file: INodeNo) -> Option<Instant> {
        self.with(|led, _| {
            let index = led.iter().position(|led| (led.thread, led.file) == (thread, file))?;
            Some(led.swap_remove(index).since)
        })
    }

    /// Whether a thread that came by these ways, of which none is there, is to be told so. When it has come again after that it is not, and may do what it is about to do once. If it then
    /// comes by others, its program is told: the kernel tries no third time.
    pub fn is_to_be_told(&self, thread: u32, ways: &[Instant], about: About) -> bool {
        self.with(|_, all| {
            let Some(index) = all.iter().position(|told| told.thread == thread) else {
                if !ways.is_empty() && all.len() < MOST {
                    all.push(Told { thread, ways: ways.to_vec(), times: 1, has_come: false, when: Instant::now() });
                }
                return !ways.is_empty();
            };
            let told = &mut all[index];
            if ways.iter().all(|way| told.ways.contains(way)) {
                let is_to_be = !ways.is_empty() && told.times < about.times();
                told.times += 1;
                told.has_come |= !is_to_be && about == About::GoOn;
                if !is_to_be && about == About::Do {
                    all.swap_remove(index);
                }
                return is_to_be;
            }
            if told.has_come {
                // That was before, most likely.
                *told = Told { thread, ways: ways.to_vec(), times: 1, has_come: false, when: Instant::now() };
            } else {
                all.swap_remove(index);
            }
            true
        })
    }

    fn with<T>(&self, work: impl FnOnce(&mut Vec<Led>, &mut Vec<Told>) -> T) -> T {
        let mut both = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (led, told) = &mut *both;
        led.retain(|led| led.when.elapsed() < COMES_AGAIN);
        told.retain(|told| told.when.elapsed() < COMES_AGAIN);
        work(led, told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: INodeNo = INodeNo(7);

    #[test]
    fn who_comes_by_a_way_that_is_not_there_is_told_once_each_time() {
        let (astray, way) = (Astray::default(), [Instant::now()]);
        let told = |thread, ways: &[Instant]| astray.is_to_be_told(thread, ways, About::Do);
        assert!(!told(1, &[]));
        assert!(told(1, &way) && told(2, &way));
        assert!(!told(1, &way), "he comes again");
        assert!(told(1, &way), "for something else");
        assert!(!told(1, &[]), "by another way");
        assert!(told(1, &way));
        assert!(told(1, &[way[0] + Duration::from_nanos(1)]), "it was there meanwhile");
        assert!(told(1, &way), "that was the end of it");
        assert!(!told(2, &way));
    }

    #[test]
    fn who_comes_by_two_ways_or_by_a_link_is_told_of_all_at_once() {
        let (astray, now) = (Astray::default(), Instant::now());
        let ways = [now, now + Duration::from_nanos(1)];
        assert!(astray.is_to_be_told(1, &ways, About::Do));
        assert!(!astray.is_to_be_told(1, &ways, About::Do));
        assert!(astray.is_to_be_told(1, &ways[..1], About::GoOn));
        assert!(!astray.is_to_be_told(1, &ways[..1], About::GoOn));
        assert!(!astray.is_to_be_told(1, &ways[..1], About::Do), "what is behind the link");
        assert!(astray.is_to_be_told(1, &ways[..1], About::GoOn));
        assert!(!astray.is_to_be_told(1, &ways[..1], About::GoOn));
        assert!(astray.is_to_be_told(1, &ways[1..], About::Do), "later");
        assert!(!astray.is_to_be_told(1, &ways[1..], About::Do));
    }

    #[test]
    fn who_finds_nothing_is_told_twice() {
        let (astray, way) = (Astray::default(), [Instant::now()]);
        let told = [(); 3].map(|()| astray.is_to_be_told(1, &way, About::FindNothing));
        assert_eq!(told, [true, true, false]);
        assert!(!astray.is_to_be_told(1, &way, About::Do), "what he then does there he may");
    }

    #[test]
    fn where_somebody_was_led_is_known_until_he_does_something_with_it() {
        let (astray, way) = (Astray::default(), Instant::now());
        let later = way + Duration::from_nanos(1);
        astray.led(1, FILE, Some(way));
        astray.led(1, FILE, Some(later));
        assert_eq!((astray.was_led(2, FILE), astray.was_led(1, INodeNo(8))), (None, None));
        assert_eq!((astray.was_led(1, FILE), astray.was_led(1, FILE)), (Some(later), None));
        astray.led(1, FILE, Some(way));
        astray.led(1, FILE, None);
        assert_eq!(astray.was_led(1, FILE), None, "by another way, which is there");
    }

    #[test]
    fn no_more_are_kept_than_there_may_be_and_none_for_long() {
        let (astray, way) = (Astray::default(), Instant::now());
        let threads = MOST as u32 + 10;
        for thread in 0..threads {
            astray.led(thread, FILE, Some(way));
            assert!(astray.is_to_be_told(thread, &[way], About::GoOn));
        }
        let again = (0..threads).filter(|thread| astray.is_to_be_told(*thread, &[way], About::GoOn));
        assert_eq!(again.count(), 10, "who is told twice");
        assert_eq!(astray.0.lock().unwrap().0.len(), MOST);
        let long_ago = Instant::now().checked_sub(COMES_AGAIN).unwrap();
        let mut both = astray.0.lock().unwrap();
        both.0.iter_mut().for_each(|led| led.when = long_ago);
        both.1.iter_mut().for_each(|told| told.when = long_ago);
        drop(both);
        assert_eq!(astray.was_led(1, FILE), None);
        assert!(astray.0.lock().unwrap().1.is_empty());
    }
}
