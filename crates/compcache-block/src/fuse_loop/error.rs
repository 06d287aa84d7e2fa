//! What can go wrong between a device and its `/dev/loopN`.

use std::io;
use std::path::PathBuf;

use super::FuseLoop;
use crate::error::DeviceError;
use crate::node::Holder;

/// Why a disk was not set up, not resized or not removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuseLoopError {
    /// The process may not mount. Nothing was changed.
    #[error(
        "this process may not mount file systems nor set up loop devices (it lacks CAP_SYS_ADMIN): run it as root, or \
         serve the disk over NBD, which needs no privilege"
    )]
    NotPrivileged,
    /// A device node of the kernel's cannot be opened. Nothing was changed.
    #[error("{} cannot be opened: {source}; it is made by `modprobe {module}`, and opened by root", path.display())]
    NodeMissing {
        /// Which node.
        path: PathBuf,
        /// The kernel module it belongs to.
        module: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A step on the way failed. What the steps before it had set up is undone.
    #[error("{}: it was not possible to {step}: {source}", path.display())]
    Step {
        /// Which step.
        step: Step,
        /// What it was done to.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Others took every loop device that was free, one after the other. Try again, or raise the number of loop devices.
    #[error("{attempts} free loop devices in turn were taken by others: try again")]
    NoneFree {
        /// How many were tried.
        attempts: u32,
    },
    /// The kernel would keep the disk's contents in its page cache a second time, under the loop device.
    #[error("{} does no direct I/O on a file of FUSE: this kernel is too old (5.8 is needed)", path.display())]
    NotDirect {
        /// The loop device.
        path: PathBuf,
    },
    /// Somebody uses the disk. It is served as before.
    #[error("{} is in use: {by}", path.display())]
    InUse {
        /// The loop device.
        path: PathBuf,
        /// Who uses it.
        by: Holder,
    },
    /// Somebody else has detached the loop device, and it may be anybody's by now.
    #[error(
        "{} was detached by somebody else, and this disk has no device any more: `compcache disk rm` it, and create it anew",
        path.display()
    )]
    Detached {
        /// The loop device.
        path: PathBuf,
    },
    /// The device gave no lane.
    #[error("the device cannot be served: {0}")]
    Device(#[from] DeviceError),
}

/// A step of setting up, resizing or removing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Step {
    /// A directory, or a file in it.
    #[error("make, lock or list it")]
    Directory,
    /// mount(2).
    #[error("mount a FUSE file system there")]
    Mount,
    /// The first words exchanged with the kernel.
    #[error("agree with the kernel on how to speak")]
    Handshake,
    /// A thread.
    #[error("start the threads that serve it")]
    Thread,
    /// open(2) of the served file.
    #[error("open the served file")]
    File,
    /// `LOOP_CTL_GET_FREE`.
    #[error("find a free loop device")]
    FreeLoop,
    /// open(2) of the loop device.
    #[error("open the loop device")]
    OpenLoop,
    /// `LOOP_CONFIGURE`.
    #[error("set up the loop device")]
    Configure,
    /// `queue/write_cache` of the loop device.
    #[error("have flushes of the loop device passed on (`write back`)")]
    WriteCache,
    /// statx(2) and chmod(2) of the served file.
    #[error("have the kernel remember its new size")]
    Remember,
    /// `LOOP_SET_CAPACITY`.
    #[error("tell the loop device its new size")]
    Resize,
    /// `LOOP_CLR_FD`.
    #[error("detach the loop device")]
    Detach,
    /// umount(2).
    #[error("unmount it")]
    Unmount,
}

/// A disk that was not removed, and why.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct NotRemoved {
    /// The disk. After [`FuseLoopError::InUse`] it is served as before; after another error remove it again.
    pub disk: FuseLoop,
    /// Why.
    #[source]
    pub error: FuseLoopError,
}

impl FuseLoopError {
    /// For `map_err`: what failed at which path.
    pub(super) fn at<E: Into<io::Error>>(step: Step, path: &std::path::Path) -> impl FnOnce(E) -> FuseLoopError {
        move |source| FuseLoopError::Step { step, path: path.to_owned(), source: source.into() }
    }
}
