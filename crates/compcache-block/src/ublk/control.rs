//! The control device: adding, starting, stopping and removing ublk devices.
//!
//! A command travels through an io_uring of its own, since the driver takes it in no other way, and is waited for. What it
//! reads or answers lies in a page that lives as long as the ring.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process;
use std::time::{Duration, Instant};

use io_uring::squeue::Entry128;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::error::{Step, UblkError};
use super::memory::Buffer;
use super::uapi::{
    ANY_DEVICE, CMD_ADD_DEV, CMD_DEL_DEV, CMD_GET_DEV_INFO, CMD_GET_FEATURES, CMD_SET_PARAMS, CMD_START_DEV,
    CMD_STOP_DEV, CMD_UPDATE_SIZE, CONTROL, CtrlCmd, DevInfo, NO_QUEUE, Params,
};

/// Without padding, and any bytes are one: may be copied to and from what the driver reads and writes.
///
/// # Safety
/// Implemented for plain structures alone whose fields fill them, and that fit into the page.
unsafe trait Plain: Copy {}
// SAFETY: its fields fill its 64 bytes, which is asserted where it is defined.
unsafe impl Plain for DevInfo {}
// SAFETY: as for `DevInfo`.
unsafe impl Plain for Params {}
// SAFETY: a number.
unsafe impl Plain for u64 {}

/// The opened control device.
pub(super) struct Control {
    // Dropped in this order: no command refers to the page any more when it goes.
    ring: IoUring<Entry128, cqueue::Entry>,
    page: Buffer,
    node: File,
    /// Tells the answers apart.
    asked: u64,
}

impl Control {
    /// # Errors
    /// [`UblkError::NodeMissing`], or [`UblkError::Step`]: io_uring may not be used, or there is no memory.
    pub fn open() -> Result<Control, UblkError> {
        let node = open_node()?;
        let at = |error| UblkError::at(Step::Ring, Path::new(CONTROL))(error);
        let ring = IoUring::<Entry128, cqueue::Entry>::builder().build(4).map_err(at)?;
        let page = Buffer::new(size_of::<DevInfo>()).map_err(at)?;
        Ok(Control { ring, page, node, asked: 0 })
    }

    /// What the driver can do, as bits.
    pub fn features(&mut self) -> io::Result<u64> {
        self.ask_about(CMD_GET_FEATURES, 0, 0u64)
    }

    /// Makes the character device of a new device of any number. Says what it is in truth.
    pub fn add(&mut self, wanted: DevInfo) -> io::Result<DevInfo> {
        self.ask_about(CMD_ADD_DEV, ANY_DEVICE, DevInfo { dev_id: ANY_DEVICE, ..wanted })
    }

    pub fn info(&mut self, number: u32) -> io::Result<DevInfo> {
        self.ask_about(CMD_GET_DEV_INFO, number, DevInfo::default())
    }

    pub fn set_params(&mut self, number: u32, params: Params) -> io::Result<()> {
        self.ask_about(CMD_SET_PARAMS, number, params).map(drop)
    }

    /// Makes the block device. The kernel looks for partitions on it before this returns: its queues must be served, all
    /// of them, or it does not return.
    pub fn start(&mut self, number: u32) -> io::Result<()> {
        self.ask(CMD_START_DEV, number, u64::from(process::id()))
    }

    /// Takes the block device away, from whoever uses it, when what is in flight is answered; then ends the queues.
    pub fn stop(&mut self, number: u32) -> io::Result<()> {
        match self.ask(CMD_STOP_DEV, number, 0) {
            // It is gone altogether: whoever still had it open has closed it.
            Err(error) if is(&error, Errno::NODEV) => Ok(()),
            other => other,
        }
    }

    pub fn update_size(&mut self, number: u32, sectors: u64) -> io::Result<()> {
        self.ask(CMD_UPDATE_SIZE, number, sectors)
    }

    /// Removes the device with all that belongs to it. Whether nothing of it is left: if `patience` ran out, somebody still
    /// has it open, and the rest goes when the last of them closes it.
    pub fn delete(&mut self, number: u32, patience: Duration) -> io::Result<bool> {
        let command = CtrlCmd { dev_id: number, queue_id: NO_QUEUE, ..CtrlCmd::default() };
        match self.submit(CMD_DEL_DEV, command, Some(patience)) {
            // There is none, or not any more.
            Ok(()) => Ok(true),
            Err(error) if is(&error, Errno::NODEV) => Ok(true),
            Err(error) if error.kind() == ErrorKind::TimedOut => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn ask(&mut self, command: u32, number: u32, data: u64) -> io::Result<()> {
        let argument = CtrlCmd { dev_id: number, queue_id: NO_QUEUE, data, ..CtrlCmd::default() };
        self.submit(command, argument, None)
    }

    /// A command that reads `value` and may change it.
    fn ask_about<T: Plain>(&mut self, command: u32, number: u32, value: T) -> io::Result<T> {
        let place = self.page.get();
        assert!(size_of::<T>() <= place.len());
        let place = place.as_mut_ptr().cast::<T>();
        // SAFETY: the place is ours, large enough and page-aligned; the driver is not at it, since every command that refers
        // to it is waited for below.
        unsafe { place.write(value) };
        let (addr, len) = (place as u64, size_of::<T>() as u16);
        let argument = CtrlCmd { dev_id: number, queue_id: NO_QUEUE, len, addr, ..CtrlCmd::default() };
        self.submit(command, argument, None)?;
        // SAFETY: as above; whatever the driver wrote is a `T`.
        Ok(unsafe { place.read() })
    }

    /// Submits a command and waits for its answer; fails with `TimedOut` if none came within `patience`.
    fn submit(&mut self, command: u32, argument: CtrlCmd, patience: Option<Duration>) -> io::Result<()> {
        self.asked += 1;
        let entry = opcode::UringCmd80::new(Fd(self.node.as_raw_fd()), command).cmd(argument.to_bytes()).build();
        // SAFETY: the node is open as long as the ring, and so is the page that `argument` may refer to.
        unsafe { self.ring.submission().push(&entry.user_data(self.asked)) }
            .map_err(|_| io::Error::from(ErrorKind::WouldBlock))?;
        let give_up = patience.map(|patience| Instant::now() + patience);
        loop {
            let waited = match give_up {
                None => self.ring.submit_and_wait(1),
                Some(at) => {
                    let left = Timespec::from(at.saturating_duration_since(Instant::now()));
                    self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&left))
                }
            };
            let answers = self.ring.completion().map(|answer| (answer.user_data(), answer.result()));
            // Others are of commands that were not waited for.
            for (asked, result) in answers {
                if asked == self.asked {
                    return if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) };
                }
            }
            match waited {
                Err(error) if is(&error, Errno::TIME) => {}
                Err(error) if !matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {
                    return Err(error);
                }
                _ => {}
            }
            if give_up.is_some_and(|at| Instant::now() >= at) {
                return Err(ErrorKind::TimedOut.into());
            }
        }
    }
}

/// Keeps others from adding devices, and from cleaning up, until dropped.
pub(super) fn take_turn() -> Result<File, UblkError> {
    let node = open_node()?;
    flock(&node, FlockOperation::LockExclusive).map_err(UblkError::at(Step::Turn, Path::new(CONTROL)))?;
    Ok(node)
}

fn open_node() -> Result<File, UblkError> {
    let opened = OpenOptions::new().read(true).write(true).open(CONTROL);
    opened.map_err(|source| UblkError::NodeMissing { path: CONTROL.into(), module: "ublk_drv", source })
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}
