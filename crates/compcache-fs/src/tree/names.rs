//! What takes a place in the tree.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use compcache_cache::FileId;
use fuser::{FileAttr, INodeNo, RenameFlags};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Statx, chownat, linkat, mkdirat, mknodat, openat, readlinkat, renameat_with,
    symlinkat, unlinkat,
};
use rustix::io::{self, Errno};

use super::{Notice, Tree};
use crate::astray::{About, DOUBTED};
use crate::caller::{Caller, as_caller, group_to_give};
use crate::mount::Remembered;
use crate::node::Node;
use crate::stamp::{attributes, id_of, look_at};

/// A file and what it is like, given to the kernel.
pub struct Made {
    pub node: Arc<Node>,
    pub stat: Statx,
}

impl Made {
    pub fn attributes(&self) -> FileAttr {
        attributes(&self.stat, self.node.number, self.node.limits)
    }
}

impl Tree {
    /// What a name stands for at this moment.
    pub fn find_in(&self, parent: &Node, name: &OsStr) -> io::Result<Made> {
        // Mostly the kernel knows it, and asks whether it is there still.
        let stat = look_at(parent, name)?;
        if let Some(node) = self.inodes.give_again(&stat, parent, name) {
            return Ok(self.made(node, stat));
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let place = self.with_room(|| openat(parent, name, flags, Mode::empty()))?;
        let (node, stat) = self.inodes.give(place, parent, name)?;
        Ok(self.made(node, stat))
    }

    /// A file that the kernel is given.
    pub fn made(&self, node: Arc<Node>, stat: Statx) -> Made {
        if node.names.is_to_be_told() {
            self.tell(Notice::Superfluous(node.number));
        }
        if self.inodes.is_crowded() {
            self.ask_for_room();
        }
        Made { node, stat }
    }

    /// The same for a thread of some program, which may have come to the directory by a way that is not there any more.
    pub fn find(&self, thread: u32, parent: INodeNo, name: &OsStr) -> io::Result<Made> {
        let directory = self.inodes.get(parent)?;
        let found = self.find_in(&directory, name);
        if self.remembered != Remembered::Directories {
            return found;
        }
        let way = self.inodes.out_of_place(&directory, DOUBTED);
        let (is_to_be_told, made) = match (&found, way) {
            (Ok(made), way) => {
                let is_noted = self.astray.led(thread, made.node.number, way);
                let kind = FileType::from_raw_mode(made.stat.stx_mode.into());
                let comes_back = kind.is_file() || kind.is_dir() || kind.is_symlink();
                let find = |way| self.astray.is_to_be_told(thread, &[way], About::Find);
                (!is_noted || !comes_back && way.is_some_and(find), Some(made))
            }
            (Err(_), Some(way)) => {
                let is_there = !way.is_certain || self.inodes.is_where_it_was(&directory, name, DOUBTED);
                (is_there && self.astray.is_to_be_told(thread, &[way], About::Find), None)
            }
            (Err(_), None) => (false, None),
        };
        if !is_to_be_told {
            return found;
        }
        if let Some(made) = made {
            // The kernel is not given it.
            self.inodes.forget(made.node.number, 1);
        }
        Err(Errno::STALE)
    }

    /// A thread is about to do something with a file that it was led to, if it is one, and in these directories: whether it is to look for them again.
    ///
    /// # Errors
    /// ESTALE: it is.
    pub fn comes_to(
        &self,
        thread: u32,
        file: Option<INodeNo>,
        directories: &[INodeNo],
        about: About,
    ) -> io::Result<()> {
        if self.remembered != Remembered::Directories {
            return Ok(());
        }
        let mut ways: Vec<_> = file.and_then(|file| self.astray.was_led(thread, file)).into_iter().collect();
        for number in directories {
            ways.extend(self.inodes.out_of_place(&*self.inodes.get(*number)?, DOUBTED));
        }
        ways.dedup();
        if self.astray.is_to_be_told(thread, &ways, about) { Err(Errno::STALE) } else { Ok(()) }
    }

    /// What was made for `caller`, of the group that he has it made with. It stays of another where that cannot be.
    pub fn given(&self, caller: Caller, parent: &Node, mut made: Made) -> Made {
        let Some(group) = group_to_give(caller) else { return made };
        // A directory may give its own to what is made in it.
        let is_parents =
            parent.look().map_or(true, |stat| Mode::from_raw_mode(stat.stx_mode.into()).contains(Mode::SGID));
        if !is_parents
            && chownat(&made.node, c"", None, Some(group), AtFlags::EMPTY_PATH).is_ok()
            && let Ok(stat) = made.node.look()
        {
            made.stat = stat;
        }
        made
    }

    /// Calls `open`, and again if too many files are known for it.
    pub fn with_room<T>(&self, open: impl Fn() -> io::Result<T>) -> io::Result<T> {
        self.inodes.with_room(|| self.ask_for_room(), open)
    }

    fn ask_for_room(&self) {
        if self.inodes.is_to_be_told() {
            self.tell(Notice::Crowded);
        }
    }

    pub fn make_node(
        &self,
        caller: Caller,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        device: u32,
    ) -> io::Result<Made> {
        let parent = self.inodes.get(parent)?;
        let (kind, bits) = (FileType::from_raw_mode(mode), Mode::from_raw_mode(mode));
        as_caller(caller, umask, || mknodat(&parent, name, kind, bits, device.into()))?;
        let made = self.find_in(&parent, name).inspect(|made| self.has_nothing(made.node.pages))?;
        Ok(self.given(caller, &parent, made))
    }

    pub fn make_directory(
        &self,
        caller: Caller,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
    ) -> io::Result<Made> {
        let parent = self.inodes.get(parent)?;
        as_caller(caller, umask, || mkdirat(&parent, name, Mode::from_raw_mode(mode)))?;
        Ok(self.given(caller, &parent, self.find_in(&parent, name)?))
    }

    pub fn make_symlink(&self, caller: Caller, parent: INodeNo, name: &OsStr, target: &Path) -> io::Result<Made> {
        let parent = self.inodes.get(parent)?;
        as_caller(caller, 0, || symlinkat(target, &parent, name))?;
        Ok(self.given(caller, &parent, self.find_in(&parent, name)?))
    }

    pub fn make_link(&self, number: INodeNo, parent: INodeNo, name: &OsStr) -> io::Result<Made> {
        let (node, parent) = (self.inodes.get(number)?, self.inodes.get(parent)?);
        // The magic link leads to the file itself, also if that is a symbolic link, and needs no privilege.
        linkat(CWD, node.path(), &parent, name, AtFlags::SYMLINK_FOLLOW)?;
        self.find_in(&parent, name)
    }

    pub fn target_of(&self, number: INodeNo) -> io::Result<Vec<u8>> {
        let node = self.inodes.get(number)?;
        Ok(readlinkat(&node, c"", Vec::with_capacity(256))?.into_bytes())
    }

    pub fn remove(&self, parent: INodeNo, name: &OsStr, is_directory: bool) -> io::Result<()> {
        let parent = self.inodes.get(parent)?;
        if is_directory {
            return unlinkat(&parent, name, AtFlags::REMOVEDIR);
        }
        let called = look_at(&*parent, name).ok();
        unlinkat(&parent, name, AtFlags::empty())?;
        self.has_lost(called, &parent, name);
        Ok(())
    }

    /// A file that was just made: what is kept under its number was another's, read after that had lost its last name.
    pub fn has_nothing(&self, id: FileId) {
        self.forget_pages(id);
    }

    /// A file, as it was, has just lost a name. What is kept of it goes with its last one.
    fn has_lost(&self, file: Option<Statx>, parent: &Node, name: &OsStr) {
        let Some(stat) = file else { return };
        if let Some(node) = self.inodes.known_as(id_of(&stat), parent.number, name) {
            node.names.remove(parent.number, name);
        }
        if stat.stx_nlink == 1 {
            self.forget_pages(id_of(&stat));
        }
    }

    /// A file has just been moved: the kernel knows it by the name it has now, and no more by the one it had.
    fn has_moved(&self, had: (&Node, &OsStr), has: (&Node, &OsStr)) {
        if let Ok(stat) = look_at(has.0, has.1)
            && let Some(node) = self.inodes.known_as(id_of(&stat), had.0.number, had.1)
        {
            node.names.remove(had.0.number, had.1);
            node.names.add(has.0.number, has.1);
        }
    }

    pub fn move_name(
        &self,
        caller: Caller,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> io::Result<()> {
        let (parent, new_parent) = (self.inodes.get(parent)?, self.inodes.get(new_parent)?);
        let flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        let replaced = if flags.is_empty() { look_at(&*new_parent, new_name).ok() } else { None };
        self.inodes.moving(|| {
            let rename = || renameat_with(&parent, name, &new_parent, new_name, flags);
            // A whiteout is a file that is made, and so who asks owns it.
            let leaves_one = flags.contains(rustix::fs::RenameFlags::WHITEOUT);
            if leaves_one {
                as_caller(caller, 0, rename)?
            } else {
                rename()?
            }
            self.has_lost(replaced, &new_parent, new_name);
            let (old, new) = ((&*parent, name), (&*new_parent, new_name));
            self.has_moved(old, new);
            if flags.contains(rustix::fs::RenameFlags::EXCHANGE) {
                self.has_moved(new, old);
            }
            Ok(())
        })
    }
}
