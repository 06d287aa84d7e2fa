//! Whether userfaultfd may be used here, by which way, and what it can do.
//!
//! Paging needs faults of the kernel too (a `read` into an evicted buffer), so `UFFD_USER_MODE_ONLY`, which every
//! process may have, is not enough. The full kind is given by three ways, and we try them as the pager will:
//!
//! | way                                    | opened by                                   |
//! |----------------------------------------|---------------------------------------------|
//! | CAP_SYS_PTRACE, or root                | userfaultfd(2)                              |
//! | sysctl vm.unprivileged_userfaultfd = 1 | userfaultfd(2)                              |
//! | access to /dev/userfaultfd (Linux 6.1) | open(2), then USERFAULTFD_IOC_NEW           |
//!
//! A capability that only this executable has (by `setcap`) would deceive us: it is gone in the program. So it counts
//! only where the program will have it too: for root, and as an ambient capability.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use linux_raw_sys::general::{UFFD_API, uffdio_api};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Updater, ioctl, opcode};
use rustix::mm::UserfaultfdFlags;

/// Where userfaultfd comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The system call.
    Syscall,
    /// /dev/userfaultfd.
    Device,
}

impl Way {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Syscall => "userfaultfd(2)",
            Self::Device => "/dev/userfaultfd",
        }
    }
}

/// What the kernel's userfaultfd can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features(pub u64);

impl Features {
    const EVENT_FORK: u64 = 1 << 1;
    const EVENT_REMAP: u64 = 1 << 2;
    const EVENT_REMOVE: u64 = 1 << 3;
    const EVENT_UNMAP: u64 = 1 << 6;
    const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    const MOVE: u64 = 1 << 16;

    /// Reports munmap, mremap and madvise (Linux 4.11); paging is impossible without.
    pub fn events(self) -> bool {
        let all = Self::EVENT_REMAP | Self::EVENT_REMOVE | Self::EVENT_UNMAP;
        self.0 & all == all
    }

    /// Write-protects pages (Linux 5.7).
    pub fn write_protect(self) -> bool {
        self.0 & Self::PAGEFAULT_FLAG_WP != 0
    }

    /// Moves pages (UFFDIO_MOVE, Linux 6.8).
    pub fn moves(self) -> bool {
        self.0 & Self::MOVE != 0
    }
}

/// A userfaultfd that could be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted {
    /// By which way.
    pub way: Way,
    /// What it can do.
    pub features: Features,
    /// Whether it may report copies of the process (CAP_SYS_PTRACE).
    pub fork_events: bool,
}

/// Why none could be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused {
    /// What the system call answered; `None` if it worked only by a capability the program will not have.
    pub syscall: Option<Errno>,
    /// What opening the device answered.
    pub device: Errno,
}

impl Refused {
    /// The kernel was built without userfaultfd.
    pub fn unsupported(&self) -> bool {
        self.syscall == Some(Errno::NOSYS) && self.device == Errno::NOENT
    }
}

/// Opens a userfaultfd as the pager in the program will, asks what it can do, and closes it.
pub fn probe() -> Result<Granted, Refused> {
    let syscall = match open_by_syscall() {
        Ok(_) if !sysctl_allows() && capability_is_lost() => None,
        Ok(fd) => match features(&fd, 0) {
            Ok(features) => return Ok(Granted { way: Way::Syscall, features, fork_events: fork_events() }),
            Err(errno) => Some(errno),
        },
        Err(errno) => Some(errno),
    };
    match open_by_device().and_then(|fd| features(&fd, 0)) {
        Ok(features) => Ok(Granted { way: Way::Device, features, fork_events: false }),
        Err(device) => Err(Refused { syscall, device }),
    }
}

fn open_by_syscall() -> Result<OwnedFd, Errno> {
    // SAFETY: nothing is registered with it, so no memory's behaviour changes.
    unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }
}

fn open_by_device() -> Result<OwnedFd, Errno> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd")
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    // SAFETY: USERFAULTFD_IOC_NEW takes flags by value and touches no memory; see `New`.
    unsafe { ioctl(device.as_fd(), New { flags }) }
}

fn fork_events() -> bool {
    !capability_is_lost() && open_by_syscall().and_then(|fd| features(&fd, Features::EVENT_FORK)).is_ok()
}

/// The handshake, which a descriptor can do once: asks for `wanted`, answers what the kernel has.
fn features(fd: &OwnedFd, wanted: u64) -> Result<Features, Errno> {
    let mut api = uffdio_api { api: UFFD_API.into(), features: wanted, ioctls: 0 };
    const UFFDIO_API: Opcode = linux_raw_sys::ioctl::UFFDIO_API as Opcode;
    // SAFETY: UFFDIO_API reads and writes one `uffdio_api`, which is what it is given.
    unsafe { ioctl(fd, Updater::<UFFDIO_API, uffdio_api>::new(&mut api)) }?;
    Ok(Features(api.features))
}

/// USERFAULTFD_IOC_NEW: makes a descriptor, from flags passed by value.
struct New {
    flags: UserfaultfdFlags,
}

// SAFETY: the opcode is _IO(0xAA, 0), whose argument is a number, and whose answer is a new descriptor that nobody else
// owns. The kernel reads and writes no memory of ours.
unsafe impl Ioctl for New {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::none(0xaa, 0)
    }

    fn as_ptr(&mut self) -> *mut rustix::ffi::c_void {
        core::ptr::without_provenance_mut(self.flags.bits() as usize)
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut rustix::ffi::c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: success returns a descriptor that was made for us.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

fn sysctl_allows() -> bool {
    crate::kernel::setting("/proc/sys/vm/unprivileged_userfaultfd").as_deref() == Some("1")
}

fn capability_is_lost() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| loses_ptrace_at_exec(&status))
}

/// Whether a process with this `/proc/self/status` has CAP_SYS_PTRACE, and the program it starts will not.
fn loses_ptrace_at_exec(status: &str) -> bool {
    const CAP_SYS_PTRACE: u64 = 1 << 19;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let has = |name| {
        field(name).and_then(|mask| u64::from_str_radix(mask, 16).ok()).is_some_and(|mask| mask & CAP_SYS_PTRACE != 0)
    };
    let root = field("Uid:").is_some_and(|uids| uids.split_whitespace().take(2).any(|uid| uid == "0"));
    has("CapEff:") && !has("CapAmb:") && !root
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_of_this_executable_alone_is_gone_in_the_program() {
        let status = |uid, effective, ambient| {
            format!("Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{effective}\nCapAmb:\t{ambient}\n")
        };
        assert!(loses_ptrace_at_exec(&status(1000, "0000000000080000", "0000000000000000")));
        assert!(!loses_ptrace_at_exec(&status(1000, "0000000000080000", "0000000000080000")));
        assert!(!loses_ptrace_at_exec(&status(1000, "0000000000000000", "0000000000000000")));
        assert!(!loses_ptrace_at_exec(&status(0, "000001ffffffffff", "0000000000000000")));
    }

    #[test]
    fn features_are_read_from_their_bits() {
        assert!(Features(0x1ffff).moves() && Features(0x1ffff).events());
        assert!(!Features(0xffff).moves());
        assert!(!Features(0x1ffff & !(1 << 3)).events());
    }
}
