//! Mount namespaces: one of its own for a server, and a look into a dead one's.
//!
//! A server that has its mounts for itself is not in the way of anybody who looks at or unmounts those of the machine, and
//! does not hold up its own end: the last process of a namespace unmounts what is mounted there, and one that did so for a
//! file system on its own disk would wait for itself. What others mount and unmount arrives there too, but nothing that
//! it mounts arrives at others. Where the machine's mounts are private (no systemd, many containers) nothing arrives: disks
//! that were mounted when the namespace was made are let go of, or they would be in use here for ever.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;

use compcache_fuse::{Mounted, table_of_mounts};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// Gives the calling thread, and those that it starts from now on, a mount namespace of their own. To be called before the
/// others are started; needs root.
///
/// # Errors
/// The system refuses; nothing is changed, or there is a namespace whose mounts still reach the others'.
pub fn own_mounts() -> io::Result<()> {
    // SAFETY: the table of descriptors, which is what the call could take from other threads, stays shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    for point in disks_held(&table_of_mounts()?) {
        // What cannot be let go of is held, as it would be without this.
        let _ = unmount(point, UnmountFlags::DETACH);
    }
    Ok(())
}

/// Where file systems are mounted that would stay mounted here when the others unmount them, since that does not reach us (no
/// `master` in the table), and that may lie on a disk of some server's.
fn disks_held(mounts: &[u8]) -> Vec<PathBuf> {
    let is_held = |one: &Mounted| {
        let told = one.tags.iter().any(|tag| tag.starts_with(b"master:"));
        let source = one.source();
        let on_disk = [&b"/dev/loop"[..], b"/dev/ublkb", b"/dev/nbd"]
            .iter()
            .any(|name| source.as_os_str().as_bytes().starts_with(name));
        !told && on_disk && one.place() != Path::new("/")
    };
    // The last is on top of the others.
    compcache_fuse::mounts(mounts).rev().filter(is_held).map(|one| one.place()).collect()
}

/// Cuts the connection behind a mount of process `pid`, which is ending and has mounts of its own. Does what it can.
pub(super) fn cut_in_namespace_of(pid: u32, mount_point: &Path) {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    // Those that have ended have none.
    let namespaces: Vec<_> = threads.filter_map(|thread| File::open(thread.path().join("ns/mnt")).ok()).collect();
    // In a thread of its own, which ends with the namespace it went into.
    thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: as above; what is no longer shared is the working directory, and only this thread's.
            if unsafe { unshare_unsafe(UnshareFlags::FS) }.is_err() {
                return;
            }
            for namespace in namespaces {
                if move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount)).is_ok() {
                    let _ = unmount(mount_point, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
                }
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_disks_are_let_go_of_whose_unmounting_would_not_be_heard_of() {
        let table = b"22 1 0:21 / /proc rw,relatime - proc proc rw\n\
                      30 1 7:0 / / rw - ext4 /dev/loop0 rw\n\
                      31 1 7:1 / /mnt/a\\040b rw,relatime - ext4 /dev/loop1 rw\n\
                      32 1 7:2 / /mnt/c rw master:5 - xfs /dev/loop2 rw\n\
                      33 1 254:0 / /home rw - ext4 /dev/vda1 rw\n\
                      34 1 0:50 / /mnt/d rw unbindable - btrfs /dev/ublkb3 rw\n";
        assert_eq!(disks_held(table), [Path::new("/mnt/d"), Path::new("/mnt/a b")]);
    }
}
