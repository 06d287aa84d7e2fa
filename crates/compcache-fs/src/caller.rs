//! Doing something below as the one who asked for it above.
//!
//! Who may do what is decided by the kernel above, which checks every operation as it does for any file system (`default_permissions`, ACLs
//! included). What is left is whom a new file belongs to, and which bits it gets:
//!
//! | asked through a mount of | is done below with                                                                    |
//! |--------------------------|---------------------------------------------------------------------------------------|
//! | the asker's own          | what the thread is; the group, if his is another by now (newgrp), is given afterwards |
//! | root's, by another user  | his user and group, and the capabilities that let a checked operation through         |
//!
//! And how much room there is: what another user writes to a file on root's mount is written without root's rights ([`taking_room`]).
//!
//! The umask is the asker's as well, so that the file system below decides between it and a directory's default ACL. Credentials
//! belong to a thread in Linux; the umask does once a thread has let go of the process's (`unshare`). The thread is what it was
//! before it takes the next request; if it cannot be, the process ends rather than serve with another's rights.

use std::cell::Cell;
use std::process::abort;
use std::sync::LazyLock;
use std::sync::atomic::Ordering::Relaxed;

use fuser::Request;
use rustix::fs::{AtFlags, CWD, Mode, chmodat};
use rustix::io::{self, Errno};
use rustix::process::{Gid, Uid, getegid, geteuid, umask};
use rustix::system::uname;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

use crate::node::Node;
use crate::sys;

/// What the kernel above has checked already.
const CHECKED: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MKNOD);

/// Before Linux 6.0 it leaves it to file systems to take the set-group-ID bit from what somebody makes in a directory of a group he is not in.
static CHECKS_GROUPS: LazyLock<bool> = LazyLock::new(|| checks_groups(&uname().release().to_string_lossy()));

fn checks_groups(release: &str) -> bool {
    release.split('.').next().and_then(|major| major.parse().ok()).is_some_and(|major: u32| major >= 6)
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
}

impl Caller {
    /// Of a request by the library.
    pub fn of(request: &Request) -> Caller {
        Caller { uid: request.uid(), gid: request.gid() }
    }
}

/// Who serves, when nobody else.
struct Server {
    uid: u32,
    gid: u32,
    /// Whether it may be of any group.
    takes_groups: bool,
}

/// Found out by a thread before it is anybody else.
static SERVER: LazyLock<Server> = LazyLock::new(|| Server {
    uid: geteuid().as_raw(),
    gid: getegid().as_raw(),
    takes_groups: capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SETGID)),
});

thread_local! {
    static HAS_OWN_UMASK: Cell<bool> = const { Cell::new(false) };
    static LEFT_GROUPS: Cell<bool> = const { Cell::new(false) };
}

/// Calls `make` so that what it makes is as if who asks had made it. The kernel has checked that he may.
pub fn as_caller<T>(caller: Caller, mask: u32, make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    own_umask()?;
    umask(Mode::from_raw_mode(mask & 0o777));
    let is_left_to_us = caller.uid != 0 && !*CHECKS_GROUPS;
    with_rights(caller, if is_left_to_us { CHECKED - CapabilitySet::FSETID } else { CHECKED }, make)
}

/// Calls `open` with no more rights than who asks has, his supplementary groups not among them: for what the kernel has not checked.
pub fn unchecked<T>(caller: Caller, open: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    with_rights(caller, CapabilitySet::empty(), open)
}

/// Calls `change` as the one who asks, if he is not root, and with no right but to keep a set-group-ID bit: who owned a file when the kernel above
/// last looked may own it no more, and the kernel below knows.
pub fn as_owner<T>(caller: Caller, change: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    if caller.uid == 0 { change() } else { with_rights(caller, CapabilitySet::FSETID, change) }
}

/// The group that is still to be given to what [`as_caller`] made: who serves a tree of his own, and asks as one of another of his groups, could not make it so.
pub fn group_to_give(caller: Caller) -> Option<Gid> {
    let is_another = caller.uid == SERVER.uid && caller.gid != SERVER.gid && !SERVER.takes_groups;
    is_another.then(|| Gid::from_raw(caller.gid))
}

/// Calls `make` as the one who asks, with these capabilities and no other.
pub fn with_rights<T>(caller: Caller, rights: CapabilitySet, make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Caller { uid, gid } = caller;
    if uid == SERVER.uid && (gid == SERVER.gid || !SERVER.takes_groups) {
        return make();
    }
    if uid == u32::MAX || gid == u32::MAX {
        return Err(Errno::OVERFLOW);
    }
    leave_groups();
    let borrowed = Borrowed::take(Uid::from_raw(uid), Gid::from_raw(gid), rights)?;
    let made = make();
    drop(borrowed);
    made
}

/// Changes the file `node`, whose set-user-ID and set-group-ID bits go if it `drops` them, as they would have for who asks: without the right to
/// keep them the kernel below drops them, or, where that leaves it to a server who takes us for root (NFS), they are dropped beforehand.
pub fn dropping_suid<T>(drops: bool, node: &Node, change: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    if !drops {
        return change();
    }
    let before = capabilities(None)?;
    if !before.effective.contains(CapabilitySet::FSETID) {
        return change();
    }
    drop_suid(node, None)?;
    set_capabilities(None, CapabilitySets { effective: before.effective - CapabilitySet::FSETID, ..before })?;
    let changed = change();
    if set_capabilities(None, before).is_err() {
        abort();
    }
    changed
}

/// The same of what takes room in an open file: where who asks may not keep these bits, and is not root, it is done as the file system's user that he
/// is and with no capability, so that what is left for root below is not used up for him, nor his quota passed. Takes one system call fewer than the above.
///
/// The kernel above has checked that he may. What a file server checks anew, and without his supplementary groups, is done as above if it refuses.
pub fn taking_room<T>(
    caller: Caller,
    drops: bool,
    node: &Node,
    mut change: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    if !drops || caller.uid == 0 || SERVER.uid != 0 {
        return dropping_suid(drops, node, change);
    }
    leave_groups();
    drop_suid(node, Some(caller))?;
    // The kernel has that go for the file system's user, too, and no capability is in effect until it is root again.
    if set_thread_res_uid(None, Uid::from_raw(caller.uid), None).is_err() {
        // In a container that does not let us.
        return dropping_suid(drops, node, change);
    }
    let changed = change();
    if set_thread_res_uid(None, Uid::ROOT, None).is_err() {
        abort();
    }
    match changed {
        Err(Errno::ACCESS | Errno::PERM) => dropping_suid(drops, node, change),
        changed => changed,
    }
}

/// Calls `change`, of which the kernel above has checked that who asks may do so, without what root may take: room that is left for root, and more than a quota
/// lets others. What is refused all the same, by a file server, is done as root.
pub fn in_own_room<T>(caller: Caller, mut change: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    if caller.uid == 0 || SERVER.uid != 0 {
        return change();
    }
    match with_rights(caller, CHECKED, &mut change) {
        Err(Errno::ACCESS | Errno::PERM) => change(),
        changed => changed,
    }
}

/// Takes the bits from a file that has them. That of a group which nobody runs it as goes too if the file is our group's and `caller` is not: the kernel below finds
/// the thread in it.
fn drop_suid(node: &Node, caller: Option<Caller>) -> io::Result<()> {
    let stat = node.look()?;
    let mode = Mode::from_raw_mode(stat.stx_mode.into());
    let is_stranger = caller.is_some_and(|caller| stat.stx_gid == SERVER.gid && caller.gid != SERVER.gid);
    let loses_group = mode.contains(Mode::SGID) && (mode.contains(Mode::XGRP) || is_stranger);
    if mode.contains(Mode::SUID) || loses_group {
        let dropped = if loses_group { Mode::SUID | Mode::SGID } else { Mode::SUID };
        chmodat(CWD, node.path(), mode - dropped, AtFlags::empty())?;
        node.has_lost_set_id.store(true, Relaxed);
    }
    Ok(())
}

fn own_umask() -> io::Result<()> {
    if !HAS_OWN_UMASK.get() {
        sys::own_umask()?;
        HAS_OWN_UMASK.set(true);
    }
    Ok(())
}

/// Leaves the supplementary groups of who serves, for good: nobody else is in them. Root can do without where it may pass over what files allow.
fn leave_groups() {
    if LEFT_GROUPS.replace(true) {
        return;
    }
    let needed = CapabilitySet::SETGID | CapabilitySet::DAC_OVERRIDE;
    if capabilities(None).is_ok_and(|sets| sets.effective.contains(needed)) {
        // Refused in a container that does not let us; then they are of no use outside it.
        let _ = set_thread_groups(&[]);
    }
}

/// Another's user and group, until dropped.
struct Borrowed {
    uid: Uid,
    gid: Gid,
    rights: CapabilitySets,
}

impl Borrowed {
    fn take(uid: Uid, gid: Gid, rights: CapabilitySet) -> io::Result<Borrowed> {
        let own = Borrowed { uid: geteuid(), gid: getegid(), rights: capabilities(None)? };
        // Given back from here on, also by an error.
        set_thread_res_gid(None, gid, None)?;
        set_thread_res_uid(None, uid, None)?;
        // Root's mount, or one that may be anybody: the permitted set is what it was, only the effective one was emptied.
        let effective = own.rights.permitted & rights;
        set_capabilities(None, CapabilitySets { effective, ..own.rights })?;
        Ok(own)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let user = set_thread_res_uid(None, self.uid, None);
        let group = user.and_then(|()| set_thread_res_gid(None, self.gid, None));
        // The kernel gives them back where the user becomes root; not where he was all the time, with another group.
        let rights = group.and_then(|()| capabilities(None)).and_then(|rights| match rights == self.rights {
            true => Ok(()),
            false => set_capabilities(None, self.rights),
        });
        if rights.is_err() {
            abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_from_six_on_check_groups() {
        let releases = ["5.7.0", "5.19.17-generic", "6.0.0-rc1", "6.18.44", "10.1"].map(checks_groups);
        assert_eq!(releases, [false, false, true, true, true]);
        assert!(!checks_groups("of another kind"));
    }
}
