//! The names by which the kernel knows a file.
//!
//! To have it forget a file, it must be told to forget each name it looked up: every one of them holds the file. It does not say when it forgets a
//! name alone, so this may be more than it knows, but never less: what has come to have too many names has the oldest forgotten
//! ([`Names::take_superfluous`]). Directories are never to be forgotten; of one it is known where the kernel was given it of late, and may believe it to be.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fuser::INodeNo;

/// The most that are kept of one file.
pub const NAMES_MAX: usize = 32;

/// A name, and the directory it is in.
pub type Place = (INodeNo, OsString);

/// Those of a file.
#[derive(Default)]
pub struct Known {
    places: VecDeque<Place>,
    /// Somebody has been told that there are too many.
    told: bool,
}

/// One of a directory, and when the kernel was last given it there.
#[derive(Clone)]
pub struct Given {
    pub place: Place,
    pub when: Instant,
}

/// The most places that are kept of a directory.
const GIVEN_MOST: usize = 8;

pub enum Names {
    OfFile(Mutex<Known>),
    /// The last one last.
    OfDirectory(Mutex<Vec<Given>>),
}

impl Names {
    pub fn new(is_directory: bool) -> Names {
        if is_directory { Names::OfDirectory(Mutex::default()) } else { Names::OfFile(Mutex::default()) }
    }

    /// The file was found so.
    pub fn add(&self, parent: INodeNo, name: &OsStr) {
        let mut known = match self {
            Names::OfFile(known) => lock(known),
            Names::OfDirectory(given) => return give(&mut lock(given), parent, name),
        };
        let places = &mut known.places;
        if !places.iter().any(|place| is(place, parent, name)) {
            // Mostly there is only one.
            places.reserve_exact(1);
            places.push_back((parent, name.to_owned()));
        }
    }

    /// It is not called so any more, and the kernel knows.
    pub fn remove(&self, parent: INodeNo, name: &OsStr) {
        match self {
            Names::OfFile(known) => lock(known).places.retain(|place| !is(place, parent, name)),
            Names::OfDirectory(given) => lock(given).retain(|given| !is(&given.place, parent, name)),
        }
    }

    /// Where and when the kernel was given a directory, if that was not so long ago; the last one last.
    pub fn given_within(&self, time: Duration) -> Vec<Given> {
        let Names::OfDirectory(given) = self else { return Vec::new() };
        lock(given).iter().filter(|given| given.when.elapsed() < time).cloned().collect()
    }

    /// Whether somebody is to be told that there are too many; once, until he has [taken](Names::take_superfluous) them.
    pub fn is_to_be_told(&self) -> bool {
        self.of_file().is_some_and(|mut known| known.places.len() > NAMES_MAX && !mem::replace(&mut known.told, true))
    }

    /// The names that the kernel is to forget now, since there are too many; they are none any more. Should it look one up meanwhile, that is
    /// here again, and it is told to forget it all the same.
    pub fn take_superfluous(&self) -> Vec<Place> {
        let Some(mut known) = self.of_file() else { return Vec::new() };
        known.told = false;
        let superfluous = known.places.len().saturating_sub(NAMES_MAX);
        known.places.drain(..superfluous).collect()
    }

    /// All of a file; of a directory, none.
    pub fn all(&self) -> Vec<Place> {
        self.of_file().map_or_else(Vec::new, |known| known.places.iter().cloned().collect())
    }

    /// Whether a file was found there.
    pub fn has(&self, parent: INodeNo, name: &OsStr) -> bool {
        self.of_file().is_some_and(|known| known.places.iter().any(|place| is(place, parent, name)))
    }

    fn of_file(&self) -> Option<MutexGuard<'_, Known>> {
        if let Names::OfFile(known) = self { Some(lock(known)) } else { None }
    }
}

fn give(all: &mut Vec<Given>, parent: INodeNo, name: &OsStr) {
    let when = Instant::now();
    if let Some(last) = all.last_mut().filter(|given| is(&given.place, parent, name)) {
        last.when = when;
        return;
    }
    all.retain(|given| !is(&given.place, parent, name));
    if all.len() == GIVEN_MOST {
        all.remove(0);
    }
    // Mostly there is only one.
    all.reserve_exact(1);
    all.push(Given { place: (parent, name.to_owned()), when });
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is(known: &Place, parent: INodeNo, name: &OsStr) -> bool {
    known.0 == parent && known.1 == name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_each_of_its_names_once_and_the_oldest_go_when_there_are_too_many() {
        let names = Names::new(false);
        let name = |number: usize| OsString::from(number.to_string());
        (0..NAMES_MAX).for_each(|number| names.add(INodeNo::ROOT, &name(number)));
        names.add(INodeNo::ROOT, &name(0));
        assert_eq!((names.all().len(), names.take_superfluous()), (NAMES_MAX, vec![]));
        names.add(INodeNo(7), &name(0));
        assert_eq!(names.take_superfluous(), [(INodeNo::ROOT, name(0))], "the same name elsewhere is another");
        names.remove(INodeNo::ROOT, &name(1));
        assert_eq!((names.all().len(), names.take_superfluous()), (NAMES_MAX - 1, vec![]));
        assert!(!names.all().contains(&(INodeNo::ROOT, name(1))));
    }

    #[test]
    fn a_directory_is_never_to_be_forgotten() {
        let names = Names::new(true);
        (0..2 * NAMES_MAX).for_each(|number| names.add(INodeNo::ROOT, OsStr::new(&number.to_string())));
        assert_eq!((names.all().len(), names.take_superfluous()), (0, vec![]));
        assert!(!names.is_to_be_told());
    }

    #[test]
    fn a_directory_is_where_it_was_given_for_a_while() {
        let names = Names::new(true);
        let within = |time| names.given_within(time).into_iter().map(|given| given.place).collect::<Vec<_>>();
        let places = || within(Duration::from_secs(60));
        assert_eq!(places(), []);
        let place = |number: u64| (INodeNo(number), OsString::from(number.to_string()));
        let give = |number| names.add(place(number).0, &place(number).1);
        [1, 2, 1, 1].into_iter().for_each(give);
        assert_eq!(places(), [place(2), place(1)], "the last one last");
        assert_eq!(within(Duration::ZERO), []);
        names.remove(place(2).0, &place(2).1);
        assert_eq!(places(), [place(1)]);
        (10..20).for_each(give);
        assert_eq!(places(), (12..20).map(place).collect::<Vec<_>>());
        let file = Names::new(false);
        file.add(INodeNo(7), OsStr::new("one"));
        assert!(file.given_within(Duration::from_secs(60)).is_empty());
    }

    #[test]
    fn of_too_many_names_it_is_told_once_until_they_are_taken() {
        let names = Names::new(false);
        let look_up_all = || {
            let names = (0..NAMES_MAX + 5).map(|number| {
                names.add(INodeNo::ROOT, OsStr::new(&number.to_string()));
                names.is_to_be_told()
            });
            names.filter(|is| *is).count()
        };
        assert_eq!([look_up_all(), look_up_all()], [1, 0]);
        let taken = || names.take_superfluous().len();
        assert_eq!((taken(), names.all().len()), (5, NAMES_MAX));
        assert_eq!((look_up_all(), taken()), (1, 5), "those that were taken are new again");
    }
}
