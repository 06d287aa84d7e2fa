//! What killed servers leave behind, and its removal.
//!
//! | left behind                  | what is done                                                                     |
//! |------------------------------|----------------------------------------------------------------------------------|
//! | requests without an answer   | the connection is cut, and they fail; a process that hung on them goes on        |
//! | a loop device, unused        | detached                                                                         |
//! | a loop device, mounted       | named in the report, and left: its user must unmount it, then it can be cleaned   |
//! | the mount, the directory     | unmounted, removed                                                               |
//!
//! A directory belongs to a living server as long as its lock is held. A server that was killed and cannot end, since one
//! of its own threads waits for its answer, counts as dead.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::error::{FuseLoopError, Step};
use super::loop_device::LoopDevice;
use super::place::{Place, lock_parent};

/// What [`clean`] found.
#[derive(Debug, Default)]
pub struct Cleaned {
    /// The directories of disks whose servers were dead, and of which nothing is left.
    pub removed: Vec<PathBuf>,
    /// The directories of those of which something is left, and why.
    pub left: Vec<(PathBuf, FuseLoopError)>,
}

/// Removes what servers that were killed left in `parent`, the directory they were given
/// ([`super::FuseLoopOptions::directory`]). Disks that are served are not touched. May be called at any time, and by
/// several at once.
///
/// # Errors
/// [`FuseLoopError::Step`] when the directory cannot be listed. That there is none is no error.
pub fn clean(parent: &Path) -> Result<Cleaned, FuseLoopError> {
    let mut cleaned = Cleaned::default();
    for mut place in dead_places(parent).map_err(FuseLoopError::at(Step::Directory, parent))? {
        let directory = place.directory().to_owned();
        match remove(&mut place) {
            Ok(()) => cleaned.removed.push(directory),
            Err(error) => {
                place.leave();
                cleaned.left.push((directory, error));
            }
        }
    }
    Ok(cleaned)
}

/// Takes the directories over whose owners are dead.
fn dead_places(parent: &Path) -> io::Result<Vec<Place>> {
    // If this fails on the way they go after the lock, which is taken to remove them.
    let mut dead = Vec::new();
    let _order = match lock_parent(parent) {
        Ok(order) => order,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    for entry in fs::read_dir(fs::canonicalize(parent)?)? {
        let entry = entry?;
        if !is_name_of_place(&entry.file_name().to_string_lossy()) {
            continue;
        }
        // Otherwise its owner removed it just now; or it is nothing of ours, or cannot be had now: the others are cleaned all
        // the same.
        if let Ok(place) = Place::take_over(&entry.path()) {
            dead.extend(place);
        }
    }
    Ok(dead)
}

fn remove(place: &mut Place) -> Result<(), FuseLoopError> {
    place.cut();
    // Killed before it wrote the name down, it has no device.
    if place.file_name().is_empty() {
        return place.remove();
    }
    let file = place.file();
    for device in LoopDevice::over(&file).map_err(FuseLoopError::at(Step::Directory, Path::new("/sys/block")))? {
        device.detach(device.claim()?)?;
    }
    place.remove()
}

/// Whether a file name is one that [`Place::create`] gives: the number of a process, a hyphen, a number.
fn is_name_of_place(name: &str) -> bool {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    name.split_once('-').is_some_and(|(pid, number)| is_number(pid) && is_number(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_of_our_names_are_touched() {
        assert!(is_name_of_place("123-0"));
        for other in ["123", "-", "123-", "a-1", "1-1-1", "-1"] {
            assert!(!is_name_of_place(other), "{other}");
        }
        let parent = tempfile::tempdir().unwrap();
        fs::create_dir(parent.path().join("else")).unwrap();
        fs::create_dir(parent.path().join("999999999-0")).unwrap();
        fs::write(parent.path().join("999999999-1"), "a file").unwrap();
        let cleaned = clean(parent.path()).unwrap();
        assert_eq!(cleaned.removed, [fs::canonicalize(parent.path()).unwrap().join("999999999-0")]);
        assert!(cleaned.left.is_empty() && parent.path().join("else").exists());
        assert!(clean(&parent.path().join("nowhere")).unwrap().removed.is_empty());
    }
}
