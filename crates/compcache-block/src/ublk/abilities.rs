//! What the kernel's ublk can do, and whether it can do what is needed here.

use rustix::thread::{CapabilitySet, capabilities};

use super::control::Control;
use super::error::UblkError;
use super::uapi::{F_CMD_IOCTL_ENCODE, F_UPDATE_SIZE, F_USER_COPY, F_USER_RECOVERY, F_USER_RECOVERY_FAIL_IO};

/// Without these nothing is served.
const NEEDED: u64 = F_CMD_IOCTL_ENCODE | F_USER_COPY;

/// A disk outlives its server, and no request waits for another.
const KEEP: u64 = F_USER_RECOVERY | F_USER_RECOVERY_FAIL_IO;

/// What the kernel's ublk can do with a disk, beyond serving it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Change its size while it is in use: Linux 6.16.
    pub resize: bool,
    /// Keep it, failing all requests, when its server is killed: Linux 6.13.
    pub keep: bool,
}

impl Abilities {
    /// Asks the driver.
    pub(super) fn of(control: &mut Control) -> Result<Abilities, UblkError> {
        match control.features() {
            Ok(features) if features & NEEDED == NEEDED => {
                Ok(Abilities { resize: features & F_UPDATE_SIZE != 0, keep: features & KEEP == KEEP })
            }
            // A driver that does not know the question is older than the answer.
            Ok(_) | Err(_) => {
                Err(UblkError::TooOld { what: "leave the copying of requests to the server", since: "6.5" })
            }
        }
    }

    /// What a device is asked for when it is added.
    pub(super) fn flags(self) -> u64 {
        NEEDED | if self.keep { KEEP } else { 0 }
    }
}

/// Asks the kernel whether disks can be served here. Changes nothing.
///
/// # Errors
/// As those of [`super::Ublk::serve`] before anything is changed.
pub fn probe() -> Result<Abilities, UblkError> {
    open().map(|(_, abilities)| abilities)
}

/// The control device, of a driver that can do what is needed.
pub(super) fn open() -> Result<(Control, Abilities), UblkError> {
    if !capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN)) {
        return Err(UblkError::NotPrivileged);
    }
    let mut control = Control::open()?;
    let abilities = Abilities::of(&mut control)?;
    Ok((control, abilities))
}
