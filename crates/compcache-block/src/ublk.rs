//! A device as `/dev/ublkbN`: requests come straight from the kernel's block layer, through shared memory and io_uring.
//!
//! ```text
//!   mkfs, mount, swapon, O_DIRECT         the kernel's page cache, if the user of the disk wants it
//!          |
//!     /dev/ublkbN                         4096-byte blocks, a queue for each processor
//!          |          one copy each way, between the pages of the request and a thread's buffer
//!     queue 0, queue 1, ...               each a thread with its ring, its buffer and its Lane
//!          |         \ MustWait
//!          |          waiting threads     each its own buffer and Lane
//!     BlockDevice
//! ```
//!
//! | asked of `/dev/ublkbN`                | asked of the lane                 |
//! |---------------------------------------|-----------------------------------|
//! | read, write, with FUA; 1 MiB at most  | `read`, `write`                   |
//! | flush                                 | `flush`                           |
//! | discard, 64 MiB at most               | `discard`                         |
//! | zeroes, 64 MiB at most                | `write_zeroes`                    |
//!
//! A device that needs no flush ([`BlockDevice::needs_flush`]) says so, and the kernel asks for none, nor for FUA.
//!
//! **Copies.** The bytes of a request stay in the driver until a thread copies them (`UBLK_F_USER_COPY`): into the buffer
//! that the device then reads, while they are in the processor's cache, or out of it. So a queue needs one buffer, however
//! many requests are in flight. **Allocations.** None while serving; what a thread needs it takes before the disk appears.
//! Its buffer is locked, the rings and the descriptors are the kernel's own memory. **Errors.** The kernel's block layer has
//! fewer than errno: ENOSPC, ENOMEM and EIO arrive as they are, most others as EIO.
//!
//! **A killed server.** What was in flight fails with EIO, at once, or after 30 s if every request that a queue can have was
//! in flight (before Linux 6.16); so does what is asked later. Where the kernel can keep the disk of a dead server without
//! having its users wait for it (`UBLK_F_USER_RECOVERY_FAIL_IO`, Linux 6.13), it is kept, so that it can be taken over; else
//! the kernel takes it away as if it was pulled out; swap that was on it cannot be taken off any more, for its device has
//! gone ([`Abilities::keep`]). [`clean`] removes what is left, in both cases. Recovery without
//! failing is never asked for: all that use the disk would hang until somebody comes, and that is the whole machine if it is
//! swap.
//!
//! # What the serving process must not do
//! Wait for itself: as in [`crate::fuse_loop`], it must do no I/O on the disk it serves, nor have files there. There [`clean`]
//! helps if it is killed in the middle of that; here newer kernels fail what is in flight only when the last of its threads has
//! ended, and one that waits for its own disk never does. When the disk is used for swap it must also not wait for memory
//! that only swapping frees: its lanes' memory and its stacks want mlockall(2) before the disk is served. Its threads here
//! are marked as cleaning memory (`PR_SET_IO_FLUSHER`).
//!
//! It needs root, the kernel module `ublk_drv` and Linux 6.5.

mod abilities;
mod clean;
mod control;
mod error;
mod memory;
mod queue;
mod request;
mod uapi;
mod waiting;

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::num::{NonZeroU16, NonZeroUsize};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::io::Errno;

pub use abilities::{Abilities, probe};
pub use clean::{Cleaned, clean};
pub use error::{NotRemoved, Step, UblkError};

pub use crate::node::{Claim, Holder};

use crate::device::{BLOCK_BYTES, BlockDevice};
use crate::node::{Node, NotClaimed};
use crate::waiting::{Takes, Waiting};
use control::{Control, take_turn};
use queue::{Queue, Shared};
use uapi::{
    ATTR_FUA, ATTR_VOLATILE_CACHE, CONTROL, DevInfo, PARAM_TYPE_BASIC, PARAM_TYPE_DISCARD, ParamBasic, ParamDiscard,
    Params, SECTOR_BYTES,
};
use waiting::{Job, Waiter};

/// The largest read or write, in bytes; and so the size of a buffer.
const REQUEST_BYTES_MAX: usize = 1 << 20;

/// The largest discard, and the most zeroes at once: what keeps a queue busy for some milliseconds.
const FREED_BYTES_MAX: u64 = 64 << 20;

/// How long the kernel may take to remove a device that nobody has open.
const DELETED_WITHIN: Duration = Duration::from_secs(2);

/// By this, in the upper half of the server's own word of a device, ours are known. It is "cmpc".
const MARK: u64 = (u32::from_be_bytes(*b"cmpc") as u64) << 32;

/// The PID namespace that the kernel begins with, as /proc names it (its `PROC_PID_INIT_INO`).
const FIRST_PIDS: &str = "pid:[4026531836]";
/// Where it names ours.
const OUR_PIDS: &str = "/proc/self/ns/pid";

/// How to serve a disk.
#[derive(Clone, Debug)]
pub struct UblkOptions {
    /// Queues, each with a thread. The kernel makes no more than there are processors.
    pub queues: NonZeroU16,
    /// Requests that may be in flight in each queue, 4095 at most. They cost no buffers.
    pub depth: NonZeroU16,
    /// The largest read or write, in bytes: a multiple of 4096. At most, and usually, 1 MiB.
    pub request_bytes: usize,
    /// Threads that wait for requests that need a slow medium.
    pub waiting_threads: NonZeroUsize,
}

impl Default for UblkOptions {
    /// A queue for each of at most 8 processors, 128 requests in each, and 2 threads that wait.
    fn default() -> UblkOptions {
        let cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(8);
        UblkOptions {
            queues: NonZeroU16::new(cpus as u16).expect("1 to 8"),
            depth: NonZeroU16::new(128).expect("128 is not 0"),
            request_bytes: REQUEST_BYTES_MAX,
            waiting_threads: NonZeroUsize::new(2).expect("2 is not 0"),
        }
    }
}

/// A device that is served as `/dev/ublkbN`.
///
/// Dropping it removes it. If somebody uses it then, it is taken from him like a disk that is pulled out: his requests
/// fail with EIO. [`Ublk::remove`] refuses instead.
pub struct Ublk {
    device: Arc<dyn BlockDevice>,
    control: Mutex<Control>,
    number: u32,
    abilities: Abilities,
    /// The path of the block device.
    path: PathBuf,
    /// The block device is there.
    started: bool,
    /// Closed before the device is removed; the threads have it open, too.
    character: Option<Arc<OwnedFd>>,
    waiting: Arc<Waiting<Job>>,
    threads: Vec<JoinHandle<()>>,
    waiting_threads: Vec<JoinHandle<()>>,
    /// As long as nobody may take it for a dead server's: until the character device is open, and while it is removed.
    turn: Option<File>,
    /// It is not ours any more, and nor is its number.
    removed: bool,
}

impl Ublk {
    /// Serves `device` until the answer is removed or dropped.
    ///
    /// # Errors
    /// [`UblkError::NotPrivileged`], [`UblkError::NodeMissing`], [`UblkError::TooOld`] and [`UblkError::Device`] before
    /// anything is changed. After the others what was set up is undone.
    pub fn serve(device: Arc<dyn BlockDevice>, options: &UblkOptions) -> Result<Ublk, UblkError> {
        let (control, abilities) = abilities::open()?;
        // The threads make theirs later; that the device can be served at all is found out here.
        drop(device.clone().lane()?);

        let (mut disk, info) = Ublk::add(device, control, abilities, options)?;
        disk.start_threads(&info, options)?;
        let params = params(&*disk.device, options.request_bytes.clamp(BLOCK_BYTES, REQUEST_BYTES_MAX));
        let control = disk.control.get_mut().unwrap_or_else(PoisonError::into_inner);
        control.set_params(disk.number, params).map_err(UblkError::at(Step::Describe, &disk.path))?;
        control.start(disk.number).map_err(|error| not_started(error, fs::read_link(OUR_PIDS).ok(), &disk.path))?;
        disk.started = true;
        Ok(disk)
    }

    /// Adds a character device and opens it.
    fn add(
        device: Arc<dyn BlockDevice>,
        mut control: Control,
        abilities: Abilities,
        options: &UblkOptions,
    ) -> Result<(Ublk, DevInfo), UblkError> {
        let wanted = DevInfo {
            nr_hw_queues: options.queues.get(),
            queue_depth: options.depth.get().min(4095),
            max_io_buf_bytes: REQUEST_BYTES_MAX as u32,
            flags: abilities.flags(),
            ublksrv_flags: MARK | u64::from(process::id()),
            ..DevInfo::default()
        };
        let turn = take_turn()?;
        let info = control.add(wanted).map_err(UblkError::at(Step::Add, Path::new(CONTROL)))?;
        let mut disk = Ublk {
            device,
            control: Mutex::new(control),
            number: info.dev_id,
            abilities,
            path: block_node(info.dev_id).path(),
            started: false,
            character: None,
            waiting: Arc::new(Waiting::new(usize::from(info.nr_hw_queues) * usize::from(info.queue_depth))),
            threads: Vec::new(),
            waiting_threads: Vec::new(),
            turn: Some(turn),
            removed: false,
        };
        let path = character_path(info.dev_id);
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        disk.character = Some(Arc::new(opened.map_err(UblkError::at(Step::Open, &path))?.into()));
        disk.turn = None;
        Ok((disk, info))
    }

    /// Starts all threads, and returns once each is ready.
    fn start_threads(&mut self, info: &DevInfo, options: &UblkOptions) -> Result<(), UblkError> {
        let (ready, each) = mpsc::channel();
        let started = self.spawn_threads(info, options, &ready);
        drop(ready);
        // All are heard, so that none begins to take requests after a failure of another had the device stopped.
        let made = each.iter().fold(Ok(()), Result::and);
        started.and(made)
    }

    fn spawn_threads(
        &mut self,
        info: &DevInfo,
        options: &UblkOptions,
        ready: &Sender<Result<(), UblkError>>,
    ) -> Result<(), UblkError> {
        let count = options.waiting_threads.get();
        for number in 0..count {
            let takes = Takes::of_thread(number, count);
            let (device, waiting, path) = (self.device.clone(), self.waiting.clone(), self.path.clone());
            let make = move || Waiter::new(device, waiting, takes, &path);
            let thread = self.start_thread(format!("ublk-wait-{number}"), ready, make, Waiter::serve)?;
            self.waiting_threads.push(thread);
        }
        let character = self.character.clone().expect("it was opened");
        for index in 0..info.nr_hw_queues {
            let shared = Shared::new(character.clone(), index, info.queue_depth);
            let shared = Arc::new(shared.map_err(UblkError::at(Step::Thread, &self.path))?);
            let (device, waiting, path) = (self.device.clone(), self.waiting.clone(), self.path.clone());
            let make = move || Queue::new(device, shared, waiting, &path);
            let thread = self.start_thread(format!("ublk-{}-{index}", self.number), ready, make, Queue::serve)?;
            self.threads.push(thread);
        }
        Ok(())
    }

    /// Starts a thread that makes what it needs, says whether it could, and serves.
    fn start_thread<T: 'static>(
        &self,
        name: String,
        ready: &Sender<Result<(), UblkError>>,
        make: impl FnOnce() -> Result<T, UblkError> + Send + 'static,
        serve: fn(T),
    ) -> Result<JoinHandle<()>, UblkError> {
        let ready = ready.clone();
        // Whoever listens does so until all have spoken.
        let body = move || match make() {
            Ok(own) => {
                let _ = ready.send(Ok(()));
                drop(ready);
                serve(own);
            }
            Err(error) => drop(ready.send(Err(error))),
        };
        thread::Builder::new().name(name).spawn(body).map_err(UblkError::at(Step::Thread, &self.path))
    }

    /// `/dev/ublkbN`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether [`Ublk::resized`] works here: the size of a ublk device can be changed since Linux 6.16.
    pub fn can_be_resized(&self) -> bool {
        self.abilities.resize
    }

    /// Has the block device take the size the device has now. To be called after it changed; a file system on the disk
    /// must be made smaller before, and can be made larger after.
    ///
    /// # Errors
    /// The block device has the size it had. If the device is smaller, requests beyond its end fail.
    /// [`UblkError::TooOld`] where [`Ublk::can_be_resized`] says no.
    pub fn resized(&self) -> Result<(), UblkError> {
        if !self.can_be_resized() {
            return Err(UblkError::TooOld { what: "change the size of a device in use", since: "6.16" });
        }
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        let sectors = self.device.size_bytes() / SECTOR_BYTES;
        control.update_size(self.number, sectors).map_err(UblkError::at(Step::Resize, &self.path))
    }

    /// Claims the block device, so that nobody begins to use it.
    ///
    /// # Errors
    /// [`UblkError::InUse`], with who uses it.
    pub fn claim(&self) -> Result<Claim, UblkError> {
        let node = block_node(self.number);
        // Its node may be missing while it is used.
        node.claim(|| node.is_there()).map_err(|not| match not {
            NotClaimed::InUse(by) => UblkError::InUse { path: self.path.clone(), by },
            NotClaimed::Open(error) => UblkError::at(Step::Open, &self.path)(error),
        })
    }

    /// Takes the disk away, and returns when nothing is left of it. What its users wrote was answered by the device
    /// before. Of a device that somebody opened in the moment it was stopped its number is left, until he closes it.
    ///
    /// # Errors
    /// The disk is given back. [`UblkError::InUse`]: nothing was changed. [`UblkError::Step`]: some of it is removed, and
    /// calling again goes on from there; but what is left after [`Step::Delete`] is no disk of ours any more, and [`clean`] removes it.
    pub fn remove(self) -> Result<(), Box<NotRemoved>> {
        match self.claim_if_there() {
            Ok(claim) => self.remove_claimed(claim),
            Err(error) => Err(Box::new(NotRemoved { disk: self, error })),
        }
    }

    /// As [`Ublk::remove`], under a claim that it has given.
    ///
    /// # Errors
    /// As there; the claim is gone.
    pub fn remove_claimed(mut self, claim: Claim) -> Result<(), Box<NotRemoved>> {
        match self.take_down(claim) {
            Ok(()) => Ok(()),
            Err(error) => Err(Box::new(NotRemoved { disk: self, error })),
        }
    }

    fn claim_if_there(&self) -> Result<Claim, UblkError> {
        if self.started { self.claim() } else { Ok(Claim(None)) }
    }

    /// Takes it down: from whoever uses it, if it is not claimed.
    fn take_down(&mut self, claimed: Claim) -> Result<(), UblkError> {
        if self.removed {
            return Ok(());
        }
        let control = self.control.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Its queues serve until what is in flight is answered; then their threads end.
        control.stop(self.number).map_err(UblkError::at(Step::Stop, &self.path))?;
        self.started = false;
        drop(claimed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
        self.waiting.close();
        self.waiting_threads.drain(..).for_each(|thread| drop(thread.join()));
        // Once the character device is closed, the device looks like a dead server's to whoever cleans up, and if he removed it, the
        // number could be another's by the time it is deleted here.
        if self.turn.is_none() {
            self.turn = Some(take_turn()?);
        }
        self.character = None;
        // From here on the number is not ours: if it is not free yet, it will be when its last user closes it, and then another device's. That
        // holds after an error, too: one may come of what is waited for when the device is gone.
        let deleted = control.delete(self.number, DELETED_WITHIN);
        self.removed = true;
        self.turn = None;
        deleted.map_err(UblkError::at(Step::Delete, &self.path)).map(drop)
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        let claimed = self.claim_if_there();
        if !claimed.is_ok_and(|claim| self.take_down(claim).is_ok()) {
            let _ = self.take_down(Claim(None));
        }
    }
}

impl fmt::Debug for Ublk {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Ublk").field("path", &self.path).finish_non_exhaustive()
    }
}

/// What kind of block device it is.
fn params(device: &dyn BlockDevice, request_bytes: usize) -> Params {
    let block_shift = BLOCK_BYTES.trailing_zeros() as u8;
    let freed_sectors = (FREED_BYTES_MAX / SECTOR_BYTES) as u32;
    Params {
        len: size_of::<Params>() as u32,
        types: PARAM_TYPE_BASIC | PARAM_TYPE_DISCARD,
        basic: ParamBasic {
            // Passed on where they can mean anything.
            attrs: if device.needs_flush() { ATTR_VOLATILE_CACHE | ATTR_FUA } else { 0 },
            logical_bs_shift: device.sector_bytes().trailing_zeros() as u8,
            physical_bs_shift: block_shift,
            io_opt_shift: block_shift,
            io_min_shift: block_shift,
            max_sectors: (request_bytes as u64 / SECTOR_BYTES) as u32,
            dev_sectors: device.size_bytes() / SECTOR_BYTES,
            ..ParamBasic::default()
        },
        discard: ParamDiscard {
            discard_granularity: BLOCK_BYTES as u32,
            max_discard_sectors: freed_sectors,
            max_write_zeroes_sectors: freed_sectors,
            max_discard_segments: 1,
            ..ParamDiscard::default()
        },
        pad: 0,
    }
}

/// Why it was not started. The driver holds the process id that the server says against the one it sees, and many kernels have it see
/// that of the first namespace.
fn not_started(error: io::Error, namespace: Option<PathBuf>, path: &Path) -> UblkError {
    let is_other = error.raw_os_error() == Some(Errno::INVAL.raw_os_error());
    if is_other && namespace.is_some_and(|namespace| namespace != Path::new(FIRST_PIDS)) {
        return UblkError::PidNamespace;
    }
    UblkError::at(Step::Start, path)(error)
}

fn block_node(number: u32) -> Node {
    Node::new(format!("ublkb{number}"))
}

fn character_path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_started_in_a_pid_namespace_of_its_own_says_so() {
        let of = |errno: Errno, namespace: Option<&str>| {
            not_started(errno.into(), namespace.map(PathBuf::from), Path::new("/dev/ublkb0"))
        };
        assert!(matches!(of(Errno::INVAL, Some("pid:[4026532177]")), UblkError::PidNamespace));
        for (errno, namespace) in
            [(Errno::INVAL, Some(FIRST_PIDS)), (Errno::INVAL, None), (Errno::NOMEM, Some("pid:[4026532177]"))]
        {
            assert!(matches!(of(errno, namespace), UblkError::Step { step: Step::Start, .. }), "{errno} {namespace:?}");
        }
    }
}
