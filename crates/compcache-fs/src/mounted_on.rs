//! The files of our mount that something else is mounted on.
//!
//! If the kernel is told to forget a name, it unmounts what is mounted there. On a directory nothing is forgotten; on a file, that of a container say, something
//! may be mounted as well, and such a name must be left alone. Mounts in other namespaces are not seen ([S109] of docs/semantics.md).

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use compcache_fuse::{Mounted, mounts};
use fuser::INodeNo;
use rustix::fs::{AtFlags, StatxFlags, statx};

use crate::inodes::Inodes;
use crate::names::Place;
use crate::stamp::id_of;

/// Names that are not to be forgotten.
#[derive(Default)]
pub struct MountedOn(Vec<(Option<INodeNo>, OsString)>);

impl MountedOn {
    /// Those in this table of mounts.
    pub fn read(table: &[u8], device: &[u8], inodes: &Inodes) -> MountedOn {
        let known = |path: PathBuf| {
            let name = path.file_name()?.to_owned();
            Some((path.parent().and_then(|parent| number(inodes, parent)), name))
        };
        MountedOn(places(table, device).into_iter().filter_map(known).collect())
    }

    /// Whether something is mounted there.
    pub fn has(&self, (parent, name): &Place) -> bool {
        // Where it cannot be known in which directory, it may be in any.
        self.0.iter().any(|(directory, mounted)| mounted == name && directory.is_none_or(|number| number == *parent))
    }
}

/// What the kernel calls the directory at this path of the tree, as it is below.
fn number(inodes: &Inodes, path: &Path) -> Option<INodeNo> {
    if path.as_os_str().is_empty() {
        return Some(INodeNo::ROOT);
    }
    let stat = statx(inodes.root(), path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::INO).ok()?;
    Some(inodes.known(id_of(&stat))?.number)
}

/// Where things are mounted on the tree with this device, by paths in it.
fn places(table: &[u8], device: &[u8]) -> Vec<PathBuf> {
    let ours: Vec<Mounted> = mounts(table).filter(|mounted| mounted.device == device).collect();
    let inside = |mounted: Mounted| {
        let on = ours.iter().find(|ours| ours.id == mounted.parent && ours.id != mounted.id)?;
        // One of ours may show a part of the tree alone.
        let (root, place) = (on.root(), mounted.place());
        Some(root.strip_prefix("/").ok()?.join(place.strip_prefix(on.place()).ok()?))
    };
    mounts(table).filter_map(inside).collect()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;

    use rustix::fs::{CWD, Mode, OFlags, openat};

    use super::*;

    const TABLE: &[u8] = b"90 22 0:50 / /mnt rw - fuse.compcache /srv rw\n\
        91 90 0:51 / /mnt/f rw - tmpfs none rw\n\
        92 22 0:50 /sub /other rw - fuse.compcache /srv rw\n\
        93 92 254:0 /x /other/in\\040it/f rw - ext4 /dev/vda rw\n\
        94 22 0:52 / /mnt2 rw - tmpfs none rw\n\
        95 94 0:53 / /mnt2/f rw - tmpfs none rw\n";

    #[test]
    fn what_is_mounted_on_any_place_of_a_tree_is_found_by_its_path_there() {
        assert_eq!(places(TABLE, b"0:50"), ["f", "sub/in it/f"].map(PathBuf::from));
        assert!(places(TABLE, b"0:54").is_empty());
    }

    #[test]
    fn a_name_is_mounted_on_in_its_directory_alone_if_that_is_known() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("sub/in it")).unwrap();
        let inodes = Inodes::new(directory.path()).unwrap();
        let number = |path: &str| {
            let fd = openat(CWD, directory.path().join(path), OFlags::PATH, Mode::empty()).unwrap();
            inodes.give(fd, inodes.root(), OsStr::new(path)).unwrap().0.number
        };
        let sub = number("sub");
        let has = |parent| MountedOn::read(TABLE, b"0:50", &inodes).has(&(parent, "f".into()));
        assert!(has(INodeNo::ROOT) && has(sub), "one of the directories is not known");
        let inner = number("sub/in it");
        assert!(has(INodeNo::ROOT) && has(inner) && !has(sub));
    }
}
