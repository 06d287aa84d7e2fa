//! What is known of a file, and changing it.

use std::time::{SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileHandle, INodeNo, TimeOrNow};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Statx, Timespec, Timestamps, chmodat, chownat, ftruncate};
use rustix::io::{self, Errno};
use rustix::process::{Gid, Uid, geteuid};

use super::Tree;
use crate::caller::{Caller, as_owner, dropping_suid};
use crate::modified::AS_IT_IS;
use crate::node::Node;
use crate::stamp::{attributes, look};

/// utimensat(2): the time of the call.
pub const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0x3fff_ffff };

/// What is to be changed.
pub struct Changes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size_bytes: Option<u64>,
    pub accessed: Option<Timespec>,
    pub modified: Option<Timespec>,
}

impl Changes {
    /// truncate(2), which names the file; where others have it open, ftruncate(2) among them, there is a handle.
    pub fn are_by_path(&self, handle: Option<FileHandle>) -> bool {
        self.size_bytes.is_some() && handle.is_none()
    }
}

impl Tree {
    pub fn attributes_of(&self, number: INodeNo, handle: Option<FileHandle>) -> io::Result<FileAttr> {
        // A file that was opened is asked itself: its node may be one the kernel has just forgotten.
        match handle.and_then(|handle| self.files.asked(handle).ok()) {
            Some(open) => Ok(self.shown(&look(&open.fd)?, &open.node)),
            None => {
                let node = self.inodes.get(number)?;
                Ok(self.shown(&node.look()?, &node))
            }
        }
    }

    /// As programs see it: the kernel's number, but that of the root below.
    pub fn shown(&self, stat: &Statx, node: &Node) -> FileAttr {
        let number = if node.number == INodeNo::ROOT { INodeNo(stat.stx_ino) } else { node.number };
        attributes(stat, number, node.limits)
    }

    pub fn change(
        &self,
        caller: Caller,
        number: INodeNo,
        handle: Option<FileHandle>,
        changes: &Changes,
    ) -> io::Result<FileAttr> {
        let node = self.inodes.get(number)?;
        if let Some(mode) = changes.mode {
            change_mode(caller, &node, mode)?;
        }
        if changes.uid.is_some() || changes.gid.is_some() {
            if ![0, geteuid().as_raw(), node.look()?.stx_uid].contains(&caller.uid) {
                return Err(Errno::PERM);
            }
            let (owner, group) = (changes.uid.map(Uid::from_raw), changes.gid.map(Gid::from_raw));
            chownat(&node, c"", owner, group, AtFlags::EMPTY_PATH)?;
        }
        if let Some(size_bytes) = changes.size_bytes {
            self.cut(caller, &node, handle, size_bytes)?;
        }
        if changes.accessed.is_some() || changes.modified.is_some() {
            let times = Timestamps {
                last_access: changes.accessed.unwrap_or(AS_IT_IS),
                last_modification: changes.modified.unwrap_or(AS_IT_IS),
            };
            self.give_times(&node, &times)?;
        }
        let stat = node.look()?;
        if self.exclusive {
            node.follow(&stat);
        }
        Ok(self.shown(&stat, &node))
    }

    /// Where the kernel writes back, it makes a time of its own of the present, and gives a file its time for who has written to it: both may be for one who may write to the
    /// file and does not own it, of whom the file system below takes the present alone.
    fn give_times(&self, node: &Node, times: &Timestamps) -> io::Result<()> {
        match node.modified.set(&node.path(), times) {
            Err(Errno::PERM | Errno::ACCESS) if self.writes_back && times.last_access == NOW => {
                node.modified.set(&node.path(), &Timestamps { last_access: NOW, last_modification: NOW })
            }
            // It has the time of our writing.
            Err(Errno::PERM | Errno::ACCESS)
                if self.writes_back && times.last_access == AS_IT_IS && !geteuid().is_root() =>
            {
                Ok(())
            }
            given => given,
        }
    }

    /// Gives a file another length.
    fn cut(&self, caller: Caller, node: &Node, handle: Option<FileHandle>, size_bytes: u64) -> io::Result<()> {
        let open = handle.and_then(|handle| self.files.asked(handle).ok()).filter(|open| open.writes);
        let reach = || self.past_leases(caller, OFlags::WRONLY, |how| self.inodes.reach(node, how));
        let reached = if open.is_some() { None } else { Some(self.with_room(reach)?) };
        let cut = || match (&open, &reached) {
            (Some(open), _) => ftruncate(&open.fd, size_bytes),
            (None, reached) => ftruncate(reached.as_ref().ok_or(Errno::BADF)?, size_bytes),
        };
        // Also the page that the end was in before: what it held behind that was zeroes, and may be shown now.
        let before = node.look()?.stx_size;
        // Whoever may not keep these bits is not told by fuser; root alone is taken to be allowed.
        dropping_suid(caller.uid != 0, node, || self.writing(node, (size_bytes.min(before), u64::MAX), cut))
    }
}

/// Gives a file another mode, if who asks owns it now. That set-user-ID and set-group-ID bits go because somebody else has written to it, kernels before 5.11
/// ask for in his name.
fn change_mode(caller: Caller, node: &Node, mode: u32) -> io::Result<()> {
    const BITS: u32 = 0o7777;
    const SET_IDS: u32 = 0o6000;
    let change = || chmodat(CWD, node.path(), Mode::from_raw_mode(mode), AtFlags::empty());
    let refused = match as_owner(caller, change) {
        Err(Errno::PERM) => Errno::PERM,
        changed => return changed,
    };
    let before = u32::from(node.look()?.stx_mode) & BITS;
    let changed = before ^ (mode & BITS);
    if changed != 0 && changed & !(before & SET_IDS) == 0 { change() } else { Err(refused) }
}

/// A time as the library gives it.
pub fn timespec(time: TimeOrNow) -> Timespec {
    match time {
        TimeOrNow::Now => NOW,
        TimeOrNow::SpecificTime(time) => exact(time),
    }
}

/// The time as the kernel sent it. Before 1970 fuser counts the fraction backwards as well as the seconds; so is it undone.
fn exact(time: SystemTime) -> Timespec {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Timespec { tv_sec: after.as_secs() as i64, tv_nsec: after.subsec_nanos().into() },
        Err(before) => {
            let before = before.duration();
            Timespec { tv_sec: 0i64.wrapping_sub(before.as_secs() as i64), tv_nsec: before.subsec_nanos().into() }
        }
    }
}
