//! userfaultfd(2): descriptor, handshake, messages, and the ioctls the pager uses.
//!
//! Addresses and lengths are bytes and page-aligned. Every call returns the kernel's word: what EAGAIN, EEXIST, EBUSY
//! and ENOENT mean in each place is decided by the caller.
//!
//! ENOENT can be too early a word. A copy that begins while memory is being moved (mremap) passes the kernel's first look at whether the map is
//! changing, waits for the map, and then finds nothing where the memory was (Linux 6.9 and later). Who asks once more is told to wait
//! (EAGAIN), until the move has been told.

use crate::sys::{self, Errno};
use linux_raw_sys::general as uapi;
use linux_raw_sys::ioctl as codes;

const UFFDIO_API: u32 = codes::UFFDIO_API;
pub(crate) const UFFDIO_MOVE: u32 = 0xc028_aa05; // _IOWR(0xaa, 5, struct uffdio_move), not in linux-raw-sys
pub(crate) const UFFDIO_POISON: u32 = 0xc020_aa08;
const USERFAULTFD_IOC_NEW: u32 = 0xaa00; // _IO(0xaa, 0)
const O_NONBLOCK: u32 = 0o4000;
const O_CLOEXEC: u32 = 0o2_000_000;

const _: () = assert!(size_of::<uapi::uffdio_move>() == 40 && size_of::<uapi::uffd_msg>() == 32);

/// Events the pager cannot do without: what the program drops must be dropped here too.
const EVENTS: u64 =
    (uapi::UFFD_FEATURE_EVENT_REMAP | uapi::UFFD_FEATURE_EVENT_REMOVE | uapi::UFFD_FEATURE_EVENT_UNMAP) as u64;

/// What a new descriptor can do.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    /// UFFDIO_MOVE.
    pub moves: bool,
    /// Copies of the process are announced. Needs CAP_SYS_PTRACE.
    pub fork_events: bool,
}

/// A message, decoded.
#[derive(Clone, Copy, Debug)]
pub enum Message {
    /// A thread waits for the page at `address`.
    Fault { address: usize, thread: u32 },
    /// A thread waits until the page at `address`, which is there, may be written to.
    Protected { address: usize, thread: u32 },
    /// The process was copied; `child` is a userfaultfd for the copy.
    Fork { child: i32 },
    /// `len` bytes went from `from` to `to`.
    Remap { from: usize, to: usize, len: usize },
    /// The contents of a range are about to be dropped.
    Remove { start: usize, end: usize },
    /// A range is mapped no more.
    Unmap { start: usize, end: usize },
}

/// A userfaultfd. Closing one turns what is evicted behind it into zeroes, so it closes only where that is meant.
#[derive(Clone, Copy, Debug)]
pub struct Uffd {
    fd: i32,
}

impl Uffd {
    /// Opens a descriptor and agrees on features: with the events of the process it is in, or for moves alone.
    ///
    /// # Errors
    /// EPERM when none of the ways to userfaultfd is open to this process; ENOSYS without kernel support.
    pub fn open(with_events: bool) -> Result<(Uffd, Features), Errno> {
        let base = if with_events { EVENTS | u64::from(uapi::UFFD_FEATURE_THREAD_ID) } else { 0 };
        let fork = if with_events { u64::from(uapi::UFFD_FEATURE_EVENT_FORK) } else { 0 };
        let moves = u64::from(uapi::UFFD_FEATURE_MOVE);
        let mut last = Errno(22);
        for wanted in [base | fork | moves, base | moves, base | fork, base] {
            match Self::open_with(wanted)? {
                Ok(uffd) => {
                    let features = Features { moves: wanted & moves != 0, fork_events: wanted & fork != 0 };
                    return Ok((uffd, features));
                }
                Err(errno) => last = errno,
            }
        }
        Err(last)
    }

    /// Opens a descriptor and agrees on these features; the inner error says that the kernel does not agree.
    pub(crate) fn open_with(features: u64) -> Result<Result<Uffd, Errno>, Errno> {
        let uffd = Self::open_descriptor()?;
        let mut api = uapi::uffdio_api { api: 0xaa, features, ioctls: 0 };
        // SAFETY: UFFDIO_API reads and writes a struct uffdio_api.
        let agreed = unsafe { sys::ioctl(uffd.fd, UFFDIO_API, &mut api) };
        Ok(agreed.map(|_| uffd).inspect_err(|_| uffd.close()))
    }

    fn open_descriptor() -> Result<Uffd, Errno> {
        use rustix::fd::IntoRawFd;
        // SAFETY: opening a userfaultfd changes no memory; what is registered on it later is the caller's concern.
        let direct = unsafe {
            rustix::mm::userfaultfd(rustix::mm::UserfaultfdFlags::CLOEXEC | rustix::mm::UserfaultfdFlags::NONBLOCK)
        };
        match direct {
            Ok(fd) => Ok(Uffd { fd: crate::process::out_of_the_way(fd).into_raw_fd() }),
            Err(refused) => Self::open_device().ok_or(Errno(refused.raw_os_error())),
        }
    }

    fn open_device() -> Option<Uffd> {
        use rustix::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        let device = rustix::fs::open(c"/dev/userfaultfd", flags, rustix::fs::Mode::empty()).ok()?;
        // SAFETY: USERFAULTFD_IOC_NEW takes flags by value; see `ioctl_value`.
        let fd =
            unsafe { sys::ioctl_value(device.as_raw_fd(), USERFAULTFD_IOC_NEW, (O_NONBLOCK | O_CLOEXEC) as usize) };
        // SAFETY: a descriptor made just now, which is nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd.ok()? as i32) };
        Some(Uffd { fd: crate::process::out_of_the_way(fd).into_raw_fd() })
    }

    /// Takes over a descriptor that came with a fork event.
    pub fn from_event(fd: i32) -> Uffd {
        Uffd { fd }
    }

    /// Closes the descriptor; whoever waits on it goes on, and its ranges are ordinary memory again.
    pub fn close(self) {
        // SAFETY: the descriptor is ours, and this value is consumed.
        unsafe { rustix::io::close(self.fd) }
    }

    /// Waits until there is a message, or `timeout_ms` have passed. Returns whether there is one.
    pub fn wait(&self, timeout_ms: i32) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        // SAFETY: the descriptor is open as long as the pager lives.
        let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(self.fd) };
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let timeout =
            Timespec { tv_sec: i64::from(timeout_ms) / 1000, tv_nsec: (i64::from(timeout_ms) % 1000) * 1_000_000 };
        matches!(poll(&mut fds, (timeout_ms >= 0).then_some(&timeout)), Ok(n) if n > 0)
    }

    /// Reads messages into `out` without waiting; returns how many.
    pub fn read(&self, out: &mut [uapi::uffd_msg]) -> usize {
        // SAFETY: the kernel writes whole messages of plain data.
        let bytes = unsafe { core::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), size_of_val(out)) };
        // SAFETY: the descriptor is open as long as the pager lives.
        let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(self.fd) };
        match rustix::io::read(fd, bytes) {
            Ok(read) => read / size_of::<uapi::uffd_msg>(),
            Err(_) => 0,
        }
    }

    /// Asks for messages about missing pages of a range.
    pub fn register(&self, start: usize, len: usize) -> Result<(), Errno> {
        self.register_as(start, len, uapi::UFFDIO_REGISTER_MODE_MISSING)
    }

    /// Asks for messages about writes to pages of a range that [`Uffd::protect`] names, and about nothing else.
    pub fn register_for_writes(&self, start: usize, len: usize) -> Result<(), Errno> {
        self.register_as(start, len, uapi::UFFDIO_REGISTER_MODE_WP)
    }

    fn register_as(&self, start: usize, len: usize, mode: u32) -> Result<(), Errno> {
        let range = uapi::uffdio_range { start: start as u64, len: len as u64 };
        let mut argument = uapi::uffdio_register { range, mode: mode.into(), ioctls: 0 };
        // SAFETY: UFFDIO_REGISTER reads and writes a struct uffdio_register.
        unsafe { sys::ioctl(self.fd, codes::UFFDIO_REGISTER, &mut argument) }.map(drop)
    }

    /// From now on who writes to a page that is there waits; or does no longer, and whoever waits goes on.
    pub fn protect(&self, start: usize, len: usize, is_protected: bool) -> Result<(), Errno> {
        const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1;
        let range = uapi::uffdio_range { start: start as u64, len: len as u64 };
        let mode = if is_protected { UFFDIO_WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = uapi::uffdio_writeprotect { range, mode };
        // SAFETY: UFFDIO_WRITEPROTECT reads a struct uffdio_writeprotect.
        unsafe { sys::ioctl(self.fd, codes::UFFDIO_WRITEPROTECT, &mut argument) }.map(drop)
    }

    /// Makes a range ordinary memory again.
    pub fn unregister(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut range = uapi::uffdio_range { start: start as u64, len: len as u64 };
        // SAFETY: UFFDIO_UNREGISTER reads a struct uffdio_range.
        unsafe { sys::ioctl(self.fd, codes::UFFDIO_UNREGISTER, &mut range) }.map(drop)
    }

    /// Lets whoever waits in a range try again.
    pub fn wake(&self, start: usize, len: usize) {
        let mut range = uapi::uffdio_range { start: start as u64, len: len as u64 };
        // SAFETY: UFFDIO_WAKE reads a struct uffdio_range.
        let _ = unsafe { sys::ioctl(self.fd, codes::UFFDIO_WAKE, &mut range) };
    }

    /// Moves the page frames under `[src, src + len)` to `dst`, without a copy, and wakes whoever waits there.
    ///
    /// Returns how many bytes were moved, and the error that stopped it, if any.
    pub fn move_pages(&self, dst: usize, src: usize, len: usize) -> (usize, Option<Errno>) {
        let mut argument = uapi::uffdio_move { dst: dst as u64, src: src as u64, len: len as u64, mode: 0, move_: 0 };
        // SAFETY: UFFDIO_MOVE reads and writes a struct uffdio_move. Page contents only change place between ranges the
        // pager owns or has registered; the caller's state machine says who may look at them.
        match unsafe { sys::ioctl(self.fd, UFFDIO_MOVE, &mut argument) } {
            Ok(_) => (len, None),
            Err(errno) => (argument.move_.max(0) as usize, Some(errno)),
        }
    }

    /// Fills missing pages at `dst` with copies, and wakes whoever waits there. Results as of [`Uffd::move_pages`].
    ///
    /// # Safety
    /// `src` must be readable for `len` bytes, and all of it present: a fault taken here would be answered by nobody.
    pub unsafe fn copy(&self, dst: usize, src: *const u8, len: usize) -> (usize, Option<Errno>) {
        let mut argument = uapi::uffdio_copy { dst: dst as u64, src: src as u64, len: len as u64, mode: 0, copy: 0 };
        // SAFETY: UFFDIO_COPY reads and writes a struct uffdio_copy; the caller answers for the source.
        match unsafe { sys::ioctl(self.fd, codes::UFFDIO_COPY, &mut argument) } {
            Ok(_) => (len, None),
            Err(errno) => (argument.copy.max(0) as usize, Some(errno)),
        }
    }

    /// Makes a missing page an error for whoever touches it: SIGBUS, or EFAULT in a system call.
    ///
    /// For a page whose stored copy is damaged: the truth is gone, and a lie is worse.
    pub fn poison(&self, dst: usize, len: usize) -> Result<(), Errno> {
        let mut argument = uapi::uffdio_poison {
            range: uapi::uffdio_range { start: dst as u64, len: len as u64 },
            mode: 0,
            updated: 0,
        };
        // SAFETY: UFFDIO_POISON reads and writes a struct uffdio_poison.
        unsafe { sys::ioctl(self.fd, UFFDIO_POISON, &mut argument) }.map(drop)
    }
}

/// Decodes a message of the kernel's; `None` for one this version does not know.
pub fn decode(message: &uapi::uffd_msg) -> Option<Message> {
    // SAFETY: the event number says which member of the union the kernel filled; all are plain data.
    unsafe {
        let arg = message.arg;
        Some(match u32::from(message.event) {
            uapi::UFFD_EVENT_PAGEFAULT if arg.pagefault.flags & u64::from(uapi::UFFD_PAGEFAULT_FLAG_WP) != 0 => {
                Message::Protected { address: arg.pagefault.address as usize & !4095, thread: arg.pagefault.feat.ptid }
            }
            uapi::UFFD_EVENT_PAGEFAULT => {
                Message::Fault { address: arg.pagefault.address as usize & !4095, thread: arg.pagefault.feat.ptid }
            }
            uapi::UFFD_EVENT_FORK => Message::Fork { child: arg.fork.ufd as i32 },
            uapi::UFFD_EVENT_REMAP => {
                Message::Remap { from: arg.remap.from as usize, to: arg.remap.to as usize, len: arg.remap.len as usize }
            }
            uapi::UFFD_EVENT_REMOVE => {
                Message::Remove { start: arg.remove.start as usize, end: arg.remove.end as usize }
            }
            uapi::UFFD_EVENT_UNMAP => Message::Unmap { start: arg.remove.start as usize, end: arg.remove.end as usize },
            _ => return None,
        })
    }
}
