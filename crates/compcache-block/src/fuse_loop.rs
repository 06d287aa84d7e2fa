//! A device as `/dev/loopN`, on any kernel: one file of a FUSE file system, and a loop device over it.
//!
//! ```text
//!   mkfs, mount, swapon, O_DIRECT         the kernel's page cache, if the user of the disk wants it
//!          |
//!     /dev/loopN                          direct I/O, 4096-byte blocks, a cache to flush
//!          |
//!     DIR/PID-N/mount/disk-RANDOM         FUSE: nothing is kept here, no lock is held around a request
//!          |    one copy each way, between the pages of whoever asked and a thread's buffer
//!     thread 0, thread 1, ...             each its own descriptor of /dev/fuse, buffer and Lane
//!          |         \ MustWait
//!          |          waiting threads     each its own Lane
//!     BlockDevice
//! ```
//!
//! | asked of `/dev/loopN`                 | arrives as                       | asked of the lane                 |
//! |---------------------------------------|----------------------------------|-----------------------------------|
//! | read, write                           | READ, WRITE, in parts            | `read`, `write`                   |
//! | flush; FUA, as a write and a flush    | FSYNC; once if none is needed    | `flush`                           |
//! | discard; zeroes that may be holes     | FALLOCATE, punch a hole          | `discard` (`write_zeroes` at edges) |
//! | zeroes that must be data              | FALLOCATE, zero a range          | `write_zeroes`                    |
//! | -                                     | LSEEK for holes and data         | `extent`                          |
//!
//! A device that needs no flush ([`BlockDevice::needs_flush`]) says so to the first, and the kernel answers the others itself.
//! The loop device could be told as well, and ask for none (`queue/write_cache`); but it would keep that to itself when it is
//! detached, and the next file over it would be flushed no more.
//!
//! **Copies.** One for each direction, and it is the one that any server in user space pays: the kernel copies between
//! the pages of the request and the buffer that the device reads from or writes into, which is the one fuser received in
//! or the thread's own. A write that must wait is copied once more. **Allocations.** None on our side while serving;
//! fuser makes none for reads, writes, FSYNC and FALLOCATE either. It takes 16 MiB of address space a thread, of which
//! as much is used as the largest write has: 32 KiB if the device keeps what is written in memory, else 256.
//!
//! **Waking.** A thread that has answered looks for the next request a moment before it sleeps, and the others leave it to that one
//! ([`Linger`]).
//!
//! **Errors.** On the file the errno is the device's. The kernel's block layer has fewer: a read or a write through
//! `/dev/loopN` fails with ENOSPC or ENOMEM where the device says so, and with EIO for most else; a flush, a discard and
//! zeroes always with EIO.
//!
//! **Order.** The loop device hands on flushes, discards and zeroes one after the other, and reads and writes that come
//! behind one of them when it is done. Reads and writes do not wait for each other.
//!
//! # What the serving process must not do
//! Wait for itself. It, and all it needs to answer, must do no I/O on the disk it serves: not open `/dev/loopN` or a file
//! system on it, not look at the file under it, not have files of its own, its log or its working directory there. If it
//! is killed in the middle of that, a thread of it waits for an answer that no other gives any more, and the process
//! cannot end until [`clean`] is called by another. [`FuseLoop::resized`] and [`FuseLoop::remove`] are such moments, of
//! microseconds (the former, on a disk in use, for as long as discards in flight take); apart from them nothing here keeps
//! the disk open. When the disk is used for swap the process must also not wait for memory that only swapping frees: lock
//! it (`mlockall`) and let it allocate nothing while it serves. Its threads here are marked as cleaning memory
//! (`PR_SET_IO_FLUSHER`).
//!
//! A server that is killed leaves the loop device, the mount and the directory; what was in flight fails with EIO and
//! hangs nowhere. [`clean`] removes the rest. It needs root, `/dev/fuse` and Linux 5.8.

mod clean;
mod error;
mod file;
mod lanes;
mod loop_device;
mod namespace;
mod place;
mod waiting;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use compcache_fuse::Linger;
use fuser::{BackgroundSession, Config, Session, SessionACL};
use rustix::process::{getgid, getuid};
use rustix::thread::{CapabilitySet, capabilities};

pub use clean::{Cleaned, clean};
pub use error::{FuseLoopError, NotRemoved, Step};
pub use loop_device::{cut_off, lies_on};
pub use namespace::own_mounts;
pub use place::is_served_file;

pub use crate::node::{Claim, Holder};

use crate::device::BlockDevice;
use file::OneFile;
use lanes::Lanes;
use loop_device::{CONTROL, LoopDevice};
use place::Place;
use waiting::Waiters;

/// The largest requests, in bytes. The loop device makes none that is larger than 1.25 MiB; those come in parts, which several
/// threads serve at the same time.
#[derive(Clone, Copy)]
struct Largest {
    read_bytes: usize,
    write_bytes: usize,
}

impl Largest {
    /// What stays in memory takes a processor's time, 64 KiB under LZ4 far longer than to wake a thread, so two share them. A
    /// medium below takes few long writes sooner than many short ones.
    fn of(device: &dyn BlockDevice) -> Largest {
        match device.needs_flush() {
            true => Largest { read_bytes: 256 << 10, write_bytes: 256 << 10 },
            false => Largest { read_bytes: 128 << 10, write_bytes: 32 << 10 },
        }
    }
}

/// The node through which file systems are served.
const FUSE: &str = "/dev/fuse";

/// How to serve a disk.
#[derive(Clone, Debug)]
pub struct FuseLoopOptions {
    /// Where a directory is made for the disk. Made when it is missing, for root alone. Servers share it; [`clean`] looks
    /// for dead ones in it.
    pub directory: PathBuf,
    /// Threads that serve requests as they come.
    pub threads: NonZeroUsize,
    /// Threads that wait for requests that need a slow medium.
    pub waiting_threads: NonZeroUsize,
    /// Ask for all memory before the disk appears, also what few disks need: where it is swapped to, it is needed when there is none.
    pub all_at_once: bool,
}

impl Default for FuseLoopOptions {
    /// `/run/compcache-block`, a thread for each of at most 8 processors, and 2 that wait; memory as it is needed.
    fn default() -> FuseLoopOptions {
        let cpus = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        FuseLoopOptions {
            directory: PathBuf::from("/run/compcache-block"),
            threads: cpus.min(NonZeroUsize::new(8).expect("8 is not 0")),
            waiting_threads: NonZeroUsize::new(2).expect("2 is not 0"),
            all_at_once: false,
        }
    }
}

/// A device that is served as a loop device.
///
/// Dropping it removes it. If somebody uses it then, it is taken from him like a disk that is pulled out: his requests
/// fail with EIO. [`FuseLoop::remove`] refuses instead.
pub struct FuseLoop {
    // From the outermost in, the order in which they are taken down. All are there while the disk is served.
    attached: Option<LoopDevice>,
    place: Option<Place>,
    session: Option<BackgroundSession>,
    waiting: Arc<Waiters>,
    waiting_threads: Vec<JoinHandle<()>>,
    path: PathBuf,
}

impl FuseLoop {
    /// Serves `device` until the answer is removed or dropped.
    ///
    /// # Errors
    /// [`FuseLoopError::NotPrivileged`], [`FuseLoopError::NodeMissing`] and [`FuseLoopError::Device`] before anything is
    /// changed. After the others what was set up is undone.
    pub fn serve(device: Arc<dyn BlockDevice>, options: &FuseLoopOptions) -> Result<FuseLoop, FuseLoopError> {
        check_privilege()?;
        let fuse = OwnedFd::from(open_node(Path::new(FUSE), "fuse")?);
        let control = open_node(Path::new(CONTROL), "loop")?;
        let largest = Largest::of(&*device);
        let lanes = Lanes::new(device.clone(), options.threads.get(), largest)?;

        let place = Place::create(&options.directory)?;
        let sector_bytes = device.sector_bytes();
        let waiting = Arc::new(Waiters::new(largest, options.all_at_once));
        let mut disk = FuseLoop {
            attached: None,
            place: None,
            session: None,
            waiting: waiting.clone(),
            waiting_threads: Vec::new(),
            path: PathBuf::new(),
        };
        let point = place.mount_point();
        let threads = waiting.start(&device, options.waiting_threads.get());
        disk.waiting_threads = threads.map_err(FuseLoopError::at(Step::Thread, &point))??;
        let connection = place.mount(fuse, largest)?;
        let (file, name) = (place.file(), place.file_name().to_owned());
        disk.place = Some(place);

        let linger = Linger::new(connection.try_clone().map_err(FuseLoopError::at(Step::Handshake, &point))?);
        let served = OneFile { name, lanes, largest, waiting, linger, uid: getuid().as_raw(), gid: getgid().as_raw() };
        let mut config = Config::default();
        config.n_threads = Some(options.threads.get());
        config.clone_fd = true;
        // The kernel lets nobody but the mounting user in; requests of the loop device's bear no user.
        let session = Session::from_fd(served, connection, SessionACL::All, config);
        let session = session.map_err(FuseLoopError::at(Step::Handshake, &point))?;
        disk.session = Some(session.spawn().map_err(FuseLoopError::at(Step::Thread, &point))?);

        let attached = LoopDevice::attach(&control, &file, sector_bytes)?;
        disk.path = attached.path();
        disk.attached = Some(attached);
        Ok(disk)
    }

    /// `/dev/loopN`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Has the loop device take the size the device has now. To be called after it changed; a file system on the disk
    /// must be made smaller before, and can be made larger after.
    ///
    /// # Errors
    /// [`FuseLoopError::Step`]: the loop device has the size it had. If the device is smaller, requests beyond its end
    /// fail.
    pub fn resized(&self) -> Result<(), FuseLoopError> {
        self.attached.as_ref().map_or(Ok(()), LoopDevice::resized)
    }

    /// Claims the loop device, so that nobody begins to use it.
    ///
    /// # Errors
    /// [`FuseLoopError::InUse`], with who uses it.
    pub fn claim(&self) -> Result<Claim, FuseLoopError> {
        self.attached.as_ref().map_or(Ok(Claim(None)), LoopDevice::claim)
    }

    /// Takes the disk away, and returns when nothing is left of it. What its users wrote was answered by the device
    /// before.
    ///
    /// # Errors
    /// The disk is given back. [`FuseLoopError::InUse`]: nothing was changed; or somebody opened the device in
    /// the moment it was detached, and it is gone when he closes it. [`FuseLoopError::Step`]: some of it is
    /// removed, and calling again goes on from there.
    pub fn remove(self) -> Result<(), Box<NotRemoved>> {
        match self.claim() {
            Ok(claim) => self.remove_claimed(claim),
            Err(error) => Err(Box::new(NotRemoved { disk: self, error })),
        }
    }

    /// As [`FuseLoop::remove`], under a claim that it has given.
    ///
    /// # Errors
    /// As there; the claim is gone.
    pub fn remove_claimed(mut self, claim: Claim) -> Result<(), Box<NotRemoved>> {
        match self.take_down(claim) {
            Ok(()) => Ok(()),
            Err(error) => Err(Box::new(NotRemoved { disk: self, error })),
        }
    }

    fn take_down(&mut self, claim: Claim) -> Result<(), FuseLoopError> {
        if let Some(attached) = &self.attached {
            attached.detach(claim)?;
            self.attached = None;
        }
        if let Some(place) = &mut self.place {
            place.remove()?;
            self.place = None;
        }
        self.end_threads();
        Ok(())
    }

    /// Waits for the threads. The connection is cut, so those of the session end; requests that wait are finished.
    fn end_threads(&mut self) {
        if let Some(session) = self.session.take() {
            // What it says of the end of a connection that was cut is of no interest.
            let _ = session.join();
        }
        self.waiting.close();
        self.waiting_threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

impl Drop for FuseLoop {
    fn drop(&mut self) {
        if self.claim().is_ok_and(|claim| self.take_down(claim).is_ok()) {
            return;
        }
        // The loop device is opened and closed only after the connection is cut: what is written out then fails at once.
        if let Some(place) = &self.place {
            place.cut();
        }
        if let Some(attached) = &self.attached {
            attached.let_go();
        }
        self.place = None;
        self.end_threads();
    }
}

impl fmt::Debug for FuseLoop {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FuseLoop").field("path", &self.path).finish_non_exhaustive()
    }
}

fn check_privilege() -> Result<(), FuseLoopError> {
    match capabilities(None) {
        Ok(sets) if sets.effective.contains(CapabilitySet::SYS_ADMIN) => Ok(()),
        _ => Err(FuseLoopError::NotPrivileged),
    }
}

fn open_node(path: &Path, module: &'static str) -> Result<File, FuseLoopError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(|source: io::Error| FuseLoopError::NodeMissing { path: path.to_owned(), module, source })
}
