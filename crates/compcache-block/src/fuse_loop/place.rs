//! The directory of one disk: where it is mounted, and the lock that says it is alive.
//!
//! ```text
//! /run/compcache-block/            0700; locked for a moment by whoever adds a directory or looks for dead ones
//!     1234-0/                      0700; of process 1234, its first
//!         lock                     locked as long as the disk is served: the kernel lets go when the process ends; holds
//!                                  the name of the file below
//!         mount/                   the FUSE file system, of the type fuse.compcache-block
//!             disk-6b8b4567327b23c6     the device, under the loop device
//! ```
//!
//! The file's name is random, and belongs to no other disk: a server in a mount namespace of its own takes the mount with it when
//! it is killed, and the loop device that it leaves is known by this name alone.

use std::ffi::{CString, OsStr};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{getgid, getuid};

use super::Largest;
use super::error::{FuseLoopError, Step};
use super::namespace::cut_in_namespace_of;

/// What the file system is called in the table of mounts.
pub(super) const FILE_SYSTEM: &str = "fuse.compcache-block";

/// How long an unmounted file system may stay busy with what the kernel still has to put away.
const PUT_AWAY: Duration = Duration::from_secs(5);

/// A directory and its lock. What is left of it when dropped is unmounted and removed as far as that is possible.
pub(super) struct Place {
    directory: PathBuf,
    /// What the device is called in the file system.
    file_name: String,
    /// Held locked. `None` once all is removed.
    lock: Option<File>,
    /// The process in the directory's name was killed, and cannot end: that number is its still.
    is_owner_dying: bool,
}

const FILE_PREFIX: &str = "disk-";

/// Whether a loop device over `file` is one of a server's, by the file's name, which outlives server and mount.
pub fn is_served_file(file: &Path) -> bool {
    let name = file.file_name().and_then(OsStr::to_str).and_then(|name| name.strip_prefix(FILE_PREFIX));
    name.is_some_and(|random| random.len() == 16 && random.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

impl Place {
    /// Makes a directory of a new name in `parent`, and locks it.
    pub fn create(parent: &Path) -> Result<Place, FuseLoopError> {
        let at = FuseLoopError::at::<io::Error>;
        DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(at(Step::Directory, parent))?;
        // As the kernel names the file under a loop device: by that it is found again.
        let parent = &fs::canonicalize(parent).map_err(at(Step::Directory, parent))?;
        let _order = lock_parent(parent).map_err(at(Step::Directory, parent))?;
        let mut number = 0u32;
        let directory = loop {
            let directory = parent.join(format!("{}-{number}", process::id()));
            match DirBuilder::new().mode(0o700).create(&directory) {
                Ok(()) => break directory,
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(at(Step::Directory, &directory)(error)),
            }
        };
        let file_name = format!("{FILE_PREFIX}{:016x}", RandomState::new().hash_one(&directory));
        let mut place = Place { directory, file_name, lock: None, is_owner_dying: false };
        let made = open_lock(&place.directory).and_then(|mut lock| {
            flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
            lock.write_all(place.file_name.as_bytes())?;
            DirBuilder::new().mode(0o700).create(place.mount_point())?;
            Ok(lock)
        });
        match made {
            Ok(lock) => place.lock = Some(lock),
            Err(error) => {
                let _ = fs::remove_dir(place.mount_point());
                let _ = fs::remove_file(place.directory.join("lock"));
                let _ = fs::remove_dir(&place.directory);
                return Err(at(Step::Directory, &place.directory)(error));
            }
        }
        Ok(place)
    }

    /// Takes over the directory of a process that ended; `None` if it lives, or if others are at it. To be called with the parent locked: one that
    /// has no lock is then of a process that ended before it made it, or while it removed all.
    pub fn take_over(directory: &Path) -> io::Result<Option<Place>> {
        let mut lock = open_lock(directory)?;
        let is_owner_dying = match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => false,
            Err(Errno::WOULDBLOCK) if owner_is_dying(directory) => true,
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut file_name = String::new();
        lock.read_to_string(&mut file_name)?;
        Ok(Some(Place { directory: directory.to_owned(), file_name, lock: Some(lock), is_owner_dying }))
    }

    /// Where the file system is, or will be, mounted.
    pub fn mount_point(&self) -> PathBuf {
        self.directory.join("mount")
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The served file. The kernel gives the same path for it, as long as the mount is there.
    pub fn file(&self) -> PathBuf {
        self.mount_point().join(&self.file_name)
    }

    /// What the served file is called.
    pub fn file_name(&self) -> &str {
        &self.file_name
    }

    /// Mounts, and returns the connection to serve it through.
    pub fn mount(&self, device_node: OwnedFd, largest: Largest) -> Result<OwnedFd, FuseLoopError> {
        let options = format!(
            "fd={},rootmode=40000,user_id={},group_id={},max_read={}",
            device_node.as_raw_fd(),
            getuid().as_raw(),
            getgid().as_raw(),
            largest.read_bytes,
        );
        let options = CString::new(options).expect("numbers have no zero byte");
        let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NOATIME;
        let point = self.mount_point();
        mount("compcache-block", &point, FILE_SYSTEM, flags, options.as_c_str())
            .map_err(FuseLoopError::at(Step::Mount, &point))?;
        Ok(device_node)
    }

    /// Cuts the connection: requests that wait for an answer fail, and so does every later one. Nothing else ends those
    /// of a server that hangs. The mount stays.
    pub fn cut(&self) {
        let point = self.mount_point();
        // The kernel cuts the connection first, and then finds that the file system is busy.
        if unmount(&point, UnmountFlags::FORCE) == Err(Errno::INVAL)
            && self.is_owner_dying
            && let Some(pid) = owner(&self.directory)
        {
            cut_in_namespace_of(pid, &point);
        }
    }

    /// Cuts the connection and unmounts, waiting a while for what the kernel still holds; then removes the directory.
    pub fn remove(&mut self) -> Result<(), FuseLoopError> {
        let point = self.mount_point();
        let give_up = Instant::now() + PUT_AWAY;
        loop {
            match unmount(&point, UnmountFlags::FORCE) {
                // Not mounted, or not any more.
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => break,
                Err(Errno::BUSY) if Instant::now() < give_up => thread::sleep(Duration::from_millis(2)),
                Err(error) => return Err(FuseLoopError::at(Step::Unmount, &point)(error)),
            }
        }
        self.remove_directory().map_err(FuseLoopError::at(Step::Directory, &self.directory))?;
        self.lock = None;
        Ok(())
    }

    fn remove_directory(&self) -> io::Result<()> {
        // Who looks for dead ones would take this for one, whose lock was never made, and make that anew.
        let parent = self.directory.parent().expect("it was made in one");
        let _order = match lock_parent(parent) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            order => order?,
        };
        let gone = |result: io::Result<()>| match result {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        };
        gone(fs::remove_dir(self.mount_point()))?;
        gone(fs::remove_file(self.directory.join("lock")))?;
        gone(fs::remove_dir(&self.directory))
    }

    /// Lets go without removing anything.
    pub fn leave(mut self) {
        self.lock = None;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.lock.is_some() {
            let _ = unmount(self.mount_point(), UnmountFlags::FORCE | UnmountFlags::DETACH);
            let _ = self.remove_directory();
        }
    }
}

/// Keeps others from adding or removing directories until dropped. Nobody holds it for longer than a few system calls.
pub(super) fn lock_parent(parent: &Path) -> io::Result<File> {
    let file = File::open(parent)?;
    flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

fn open_lock(directory: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(directory.join("lock"))
}

/// Whether the process in the directory's name was killed but cannot end, because a thread of it waits for an answer that
/// it will not give any more. Cutting the connection is what lets it end.
fn owner_is_dying(directory: &Path) -> bool {
    let Some(pid) = owner(directory) else { return false };
    fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| status_of_dying(&status))
}

/// The process in the directory's name.
fn owner(directory: &Path) -> Option<u32> {
    directory.file_name()?.to_str()?.split('-').next()?.parse().ok()
}

/// Whether a `/proc/PID/status` is of a process that SIGKILL is sent to, or whose first thread has ended.
fn status_of_dying(status: &str) -> bool {
    const SIGKILL_BIT: u64 = 1 << 8;
    status.lines().filter_map(|line| line.split_once(':')).any(|(key, value)| match key {
        "State" => value.trim_start().starts_with(['Z', 'X']),
        "SigPnd" | "ShdPnd" => u64::from_str_radix(value.trim(), 16).is_ok_and(|bits| bits & SIGKILL_BIT != 0),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::super::clean;
    use super::*;

    #[test]
    fn a_killed_process_is_told_from_a_living_one() {
        let living = "Name:\tx\nState:\tS (sleeping)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000004000\n";
        assert!(!status_of_dying(living));
        assert!(status_of_dying(&living.replace("S (sleeping)", "Z (zombie)")));
        assert!(status_of_dying(&living.replace("ShdPnd:\t0000000000004000", "ShdPnd:\t0000000000000100")));
        assert!(!owner_is_dying(Path::new("/nowhere/no-number")));
    }

    #[test]
    fn a_place_has_a_new_name_and_is_taken_over_only_when_nobody_holds_it() {
        let parent = tempfile::tempdir().unwrap();
        let (one, two) = (Place::create(parent.path()).unwrap(), Place::create(parent.path()).unwrap());
        assert_ne!(one.directory(), two.directory());
        let directory = one.directory().to_owned();
        assert!(Place::take_over(&directory).unwrap().is_none());
        one.leave();
        let mut taken = Place::take_over(&directory).unwrap().expect("its lock is free");
        taken.remove().unwrap();
        assert!(!directory.exists() && two.directory().exists());
    }

    #[test]
    fn a_place_is_removed_whole_while_others_look_for_dead_ones() {
        let parent = tempfile::tempdir().unwrap();
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    assert!(clean(parent.path()).unwrap().left.is_empty());
                }
            });
            let removed: Vec<_> =
                (0..200).map(|_| Place::create(parent.path()).and_then(|mut place| place.remove())).collect();
            is_done.store(true, Relaxed);
            removed.into_iter().for_each(|removed| removed.unwrap());
        });
    }
}
