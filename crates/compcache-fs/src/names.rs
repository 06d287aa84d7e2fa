//! The names by which the kernel knows a file.
//!
//! To have it forget a file, it must be told to forget each name it looked up: every one of them holds the file. It does not say when it forgets a
//! name alone, so this may be more than it knows, but never less: what has come to have too many names has the oldest forgotten
//! ([`Names::superfluous`]). Directories are never to be forgotten, and have none here.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fuser::INodeNo;

/// The most that are kept of one file.
pub const NAMES_MAX: usize = 32;

/// A name, and the directory it is in.
pub type Place = (INodeNo, OsString);

/// Those of a file; of a directory, none.
pub struct Names(Option<Mutex<VecDeque<Place>>>);

impl Names {
    pub fn new(is_directory: bool) -> Names {
        Names((!is_directory).then(Mutex::default))
    }

    /// The file was found so.
    pub fn add(&self, parent: INodeNo, name: &OsStr) {
        let Some(mut names) = self.lock() else { return };
        if !names.iter().any(|known| is(known, parent, name)) {
            // Mostly there is only one.
            names.reserve_exact(1);
            names.push_back((parent, name.to_owned()));
        }
    }

    /// It is not called so any more, and the kernel knows.
    pub fn remove(&self, parent: INodeNo, name: &OsStr) {
        let Some(mut names) = self.lock() else { return };
        names.retain(|known| !is(known, parent, name));
    }

    /// A name that the kernel is to forget now, since there are too many; it is none any more.
    pub fn superfluous(&self) -> Option<Place> {
        let mut names = self.lock()?;
        if names.len() > NAMES_MAX { names.pop_front() } else { None }
    }

    /// All of them.
    pub fn all(&self) -> Vec<Place> {
        self.lock().map_or_else(Vec::new, |names| names.iter().cloned().collect())
    }

    fn lock(&self) -> Option<MutexGuard<'_, VecDeque<Place>>> {
        Some(self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
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
        assert_eq!((names.all().len(), names.superfluous()), (NAMES_MAX, None));
        names.add(INodeNo(7), &name(0));
        assert_eq!(names.superfluous(), Some((INodeNo::ROOT, name(0))), "the same name elsewhere is another");
        names.remove(INodeNo::ROOT, &name(1));
        assert_eq!((names.all().len(), names.superfluous()), (NAMES_MAX - 1, None));
        assert!(!names.all().contains(&(INodeNo::ROOT, name(1))));
    }

    #[test]
    fn a_directory_is_never_to_be_forgotten() {
        let names = Names::new(true);
        (0..2 * NAMES_MAX).for_each(|number| names.add(INodeNo::ROOT, OsStr::new(&number.to_string())));
        assert_eq!((names.all().len(), names.superfluous()), (0, None));
    }
}
