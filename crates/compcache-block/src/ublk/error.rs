//! What can go wrong between a device and its `/dev/ublkbN`.

use std::io;
use std::path::{Path, PathBuf};

use super::Ublk;
use crate::error::DeviceError;
use crate::node::Holder;

/// Why a disk was not set up, not resized or not removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UblkError {
    /// The process may not make block devices. Nothing was changed.
    #[error(
        "this process may not make block devices (it lacks CAP_SYS_ADMIN): run it as root, or serve the disk over NBD, \
         which needs no privilege"
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
    /// The kernel's driver is too old for this. Nothing was changed.
    #[error("the kernel's ublk cannot {what}: that came with Linux {since}")]
    TooOld {
        /// What it cannot do.
        what: &'static str,
        /// The version that can.
        since: &'static str,
    },
    /// The kernel's driver takes the server for another process, since it runs in a PID namespace of its own. What was set up is undone.
    #[error(
        "this kernel's ublk does not work in a PID namespace of its own, as containers have: serve the disk from outside, or over \
         another transport"
    )]
    PidNamespace,
    /// A device that some server has made has no node here. It is left alone.
    #[error(
        "{} is not there, though the kernel has the device, as in a container: whether its server lives cannot be told, and it stays; \
         what a dead one has left is removed by a server that is started outside",
        path.display()
    )]
    Hidden {
        /// Where its node would be.
        path: PathBuf,
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
    /// Somebody uses the disk. It is served as before; if it had been taken down already, it is gone when he closes it.
    #[error("{} is in use: {by}", path.display())]
    InUse {
        /// The block device.
        path: PathBuf,
        /// Who uses it.
        by: Holder,
    },
    /// The device gave no lane.
    #[error("the device cannot be served: {0}")]
    Device(#[from] DeviceError),
}

/// A step of setting up, resizing or removing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Step {
    /// io_uring_setup(2).
    #[error("set up an io_uring; is it forbidden (sysctl kernel.io_uring_disabled)?")]
    Ring,
    /// flock(2) of the control device.
    #[error("wait for others that add or remove devices")]
    Turn,
    /// Memory, locked.
    #[error("take and lock memory for requests")]
    Memory,
    /// A thread, or what it waits with.
    #[error("start the threads that serve it")]
    Thread,
    /// `UBLK_U_CMD_GET_FEATURES`, `UBLK_U_CMD_GET_DEV_INFO`, or a look at the devices there are.
    #[error("ask what there is")]
    Look,
    /// `UBLK_U_CMD_ADD_DEV`.
    #[error("add a device")]
    Add,
    /// open(2) of a device.
    #[error("open it")]
    Open,
    /// mmap(2) of the character device.
    #[error("share a queue's requests with it")]
    Map,
    /// `UBLK_U_IO_FETCH_REQ`.
    #[error("take requests from it")]
    Fetch,
    /// `UBLK_U_CMD_SET_PARAMS`.
    #[error("tell it what kind of device it is")]
    Describe,
    /// `UBLK_U_CMD_START_DEV`.
    #[error("start it")]
    Start,
    /// `UBLK_U_CMD_UPDATE_SIZE`.
    #[error("tell it its new size")]
    Resize,
    /// `UBLK_U_CMD_STOP_DEV`.
    #[error("stop it")]
    Stop,
    /// `UBLK_U_CMD_DEL_DEV`.
    #[error("remove it")]
    Delete,
}

/// A disk that was not removed, and why.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct NotRemoved {
    /// The disk. After [`UblkError::InUse`] it is served as before; after another error remove it again.
    pub disk: Ublk,
    /// Why.
    #[source]
    pub error: UblkError,
}

impl UblkError {
    /// For `map_err`: what failed at which path.
    pub(super) fn at<E: Into<io::Error>>(step: Step, path: &Path) -> impl FnOnce(E) -> UblkError {
        move |source| UblkError::Step { step, path: path.to_owned(), source: source.into() }
    }
}
