//! Mount namespaces: one of its own for a server, and a look into a dead one's.
//!
//! A server that has its mounts for itself is not in the way of anybody who looks at or unmounts those of the machine, and
//! does not hold up its own end: the last process of a namespace unmounts what is mounted there, and one that did so for a
//! file system on its own disk would wait for itself. What others mount and unmount arrives there too, but nothing that
//! it mounts arrives at others.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::thread;

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
    Ok(())
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
                    let _ = unmount(mount_point, UnmountFlags::FORCE);
                }
            }
        });
    });
}
