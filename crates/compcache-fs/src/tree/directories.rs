//! Opening and listing directories.
//!
//! The kernel asks for names from a place on, and has room for so many; the place is the one that the file system below gave with the
//! name before. What was read below and found no room is kept for the next request, which mostly goes on there.

use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::sync::PoisonError;

use compcache_cache::FileId;
use fuser::{FileAttr, FileHandle, FileType, FopenFlags, INodeNo};
use rustix::fs::{OFlags, RawDir, SeekFrom, fdatasync, fsync, seek};
use rustix::io::{self, Errno};

use super::Tree;
use crate::handles::{Listed, Listing, OpenDirectory};

/// Read below at once.
const BATCH_BYTES: usize = 32 << 10;

/// What is known of a name.
pub enum Entry<'a> {
    /// All of it, and the generation of its number; the kernel is given the file.
    Known(&'a FileAttr, u64),
    /// That it is there, its number and kind; why no more.
    Named(INodeNo, FileType, Errno),
}

impl Tree {
    pub fn open_directory(&self, number: INodeNo) -> io::Result<(FileHandle, FopenFlags)> {
        let node = self.inodes.get(number)?;
        let fd = self.with_room(|| self.inodes.reach(&node, OFlags::RDONLY | OFlags::DIRECTORY))?;
        let opened = OpenDirectory { fd, node, listing: Listing::default().into() };
        Ok((self.directories.add(opened), FopenFlags::empty()))
    }

    pub fn sync_directory(&self, handle: FileHandle, data_alone: bool) -> io::Result<()> {
        let open = self.directories.get(handle)?;
        if data_alone { fdatasync(&open.fd) } else { fsync(&open.fd) }
    }

    /// Calls `give` with a number, the place after it, kind, and name, until that says it has no room.
    pub fn list(
        &self,
        handle: FileHandle,
        offset: u64,
        mut give: impl FnMut(INodeNo, u64, FileType, &OsStr) -> bool,
    ) -> io::Result<()> {
        self.each_name(handle, offset, |open, listed| {
            let kind = listed.kind.or_else(|| self.kind_of(open, &listed.name)).unwrap_or(FileType::RegularFile);
            Some(give(self.number_of(open, listed), listed.next, kind, &listed.name))
        })
    }

    /// The same with all that is known of each.
    pub fn list_with_attributes(
        &self,
        handle: FileHandle,
        offset: u64,
        mut give: impl FnMut(Entry<'_>, u64, &OsStr) -> bool,
    ) -> io::Result<()> {
        self.each_name(handle, offset, |open, listed| {
            // The kernel takes no note of the file behind these two.
            if listed.name == "." || listed.name == ".." {
                let mut shown = self.shown(&open.node.look().ok()?, &open.node);
                shown.ino = self.number_of(open, listed);
                return Some(give(Entry::Known(&shown, 0), listed.next, &listed.name));
            }
            let made = match self.find_in(&open.node, &listed.name) {
                Ok(made) => made,
                // Gone in the meantime.
                Err(Errno::NOENT) => return None,
                // Who may list a directory may not look into it, maybe.
                Err(error) => {
                    let kind = listed.kind.unwrap_or(FileType::RegularFile);
                    let entry = Entry::Named(self.number_of(open, listed), kind, error);
                    return Some(give(entry, listed.next, &listed.name));
                }
            };
            let has_room = give(Entry::Known(&made.attributes(), made.node.generation), listed.next, &listed.name);
            if !has_room {
                self.inodes.forget(made.node.number, 1);
            }
            Some(has_room)
        })
    }

    /// Calls `give` with the names from `offset` on, until it says that it has no room for one. `None` says that there is nothing to give.
    fn each_name(
        &self,
        handle: FileHandle,
        offset: u64,
        mut give: impl FnMut(&OpenDirectory, &Listed) -> Option<bool>,
    ) -> io::Result<()> {
        let open = self.directories.get(handle)?;
        let mut listing = open.listing.lock().unwrap_or_else(PoisonError::into_inner);
        if offset != listing.at || offset == 0 {
            seek(&open.fd, SeekFrom::Start(offset))?;
            *listing = Listing { at: offset, ..Listing::default() };
        }
        let mut any_given = false;
        loop {
            while let Some(listed) = listing.batch.get(listing.given) {
                match give(&open, listed) {
                    Some(false) => return Ok(()),
                    given => any_given |= given.is_some(),
                }
                listing.at = listed.next;
                listing.given += 1;
            }
            listing.given = 0;
            listing.batch.clear();
            let read = read_batch(&open, &mut listing.batch);
            if any_given && listing.batch.is_empty() {
                // An error is what who asks next is told: with it, those that were given now would be lost.
                return Ok(());
            }
            read?;
            if listing.batch.is_empty() {
                return Ok(());
            }
        }
    }

    fn number_of(&self, open: &OpenDirectory, listed: &Listed) -> INodeNo {
        INodeNo(self.inodes.shown(FileId { dev: open.node.id.dev, ino: listed.ino }))
    }

    fn kind_of(&self, open: &OpenDirectory, name: &OsStr) -> Option<FileType> {
        let made = self.find_in(&open.node, name).ok()?;
        self.inodes.forget(made.node.number, 1);
        Some(made.attributes().kind)
    }
}

/// Reads what fits into a buffer; nothing at the end.
fn read_batch(open: &OpenDirectory, batch: &mut Vec<Listed>) -> io::Result<()> {
    let mut buffer = [MaybeUninit::uninit(); BATCH_BYTES];
    let mut names = RawDir::new(&open.fd, &mut buffer);
    while let Some(name) = names.next() {
        let name = name?;
        batch.push(Listed {
            name: OsStr::from_bytes(name.file_name().to_bytes()).to_owned(),
            ino: name.ino(),
            kind: kind(name.file_type()),
            next: name.next_entry_cookie(),
        });
        if names.is_buffer_empty() {
            break;
        }
    }
    Ok(())
}

fn kind(kind: rustix::fs::FileType) -> Option<FileType> {
    Some(match kind {
        rustix::fs::FileType::RegularFile => FileType::RegularFile,
        rustix::fs::FileType::Directory => FileType::Directory,
        rustix::fs::FileType::Symlink => FileType::Symlink,
        rustix::fs::FileType::Fifo => FileType::NamedPipe,
        rustix::fs::FileType::Socket => FileType::Socket,
        rustix::fs::FileType::CharacterDevice => FileType::CharDevice,
        rustix::fs::FileType::BlockDevice => FileType::BlockDevice,
        rustix::fs::FileType::Unknown => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::tree::contents::tests::tree;

    #[test]
    fn names_that_were_given_before_an_error_are_not_lost_by_it() {
        let directory = tempfile::tempdir().unwrap();
        let listed = directory.path().join("d");
        fs::create_dir(&listed).unwrap();
        (0..3000).for_each(|number| drop(fs::File::create(listed.join(number.to_string())).unwrap()));
        let tree = tree(directory.path(), false);
        let number = tree.find(0, INodeNo::ROOT, OsStr::new("d")).unwrap().node.number;
        let handle = tree.open_directory(number).unwrap().0;
        let (mut given, mut last) = (0, 0);
        let first = tree.list(handle, 0, |_, next, _, _| {
            // What was read is here; below, the directory is no more.
            if given == 0 {
                fs::remove_dir_all(&listed).unwrap();
            }
            (given, last) = (given + 1, next);
            true
        });
        assert_eq!(first, Ok(()));
        assert!((1..3000).contains(&given), "{given} names were read at once");
        assert_eq!(tree.list(handle, last, |_, _, _, _| panic!("there are no more")), Err(Errno::NOENT));
    }
}
