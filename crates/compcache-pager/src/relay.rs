//! A moment in which the process has no thread of the pager's.
//!
//! Some calls the kernel allows to a process of one thread only: unshare and setns of user namespaces, above all. So the pager's threads
//! end before such a call and others come after it, which go on where those were:
//!
//! | who                    | does                                                                                   |
//! |------------------------|----------------------------------------------------------------------------------------|
//! | the program's thread   | freezes as for a fork; asks the evictor to end                                         |
//! | the evictor            | sends every descriptor of its table, with its number, to a socket; has the others end; ends |
//! | the program's thread   | waits until the kernel knows none of them; makes the call; starts an evictor            |
//! | the new evictor        | gives the descriptors the numbers they had; starts the others; thaws                   |
//!
//! On their way the descriptors are open: what is registered stays so, and whoever touches a page that is not there waits. The program's
//! thread touches none: nothing leaves while frozen, and its stack is there.
//!
//! Not where the program has several threads, for it would be refused the call in any case; nor where few descriptors are allowed, nor
//! where the process may have no more threads.

use crate::lock;
use crate::memory::PAGE;
use crate::pager::{Channel, Pager};
use crate::process;
use crate::shared::Trouble;
use crate::{fork, sys};
use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::*};
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use rustix::io::{IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, Resource};

/// Threads that a pager can have.
/// The place of who brakes.
const BRAKE: usize = 2;
const THREADS_MAX: usize = crate::pager::OWN_THREADS + crate::spill::THREADS;
/// Numbers that descriptors of the pager's can have, and how many there can be.
const NUMBERS: RawFd = 256;
const DESCRIPTORS_MAX: usize = 64;
/// Where the sockets are meanwhile, and then the descriptors before they get their own numbers.
const ASIDE_FROM: RawFd = 288;
/// So many descriptors must be allowed.
const NUMBERS_NEEDED: u64 = 512;

/// What the threads that end and those that come know of each other.
pub(crate) struct Relay {
    /// Numbers, in the program's table, of the sockets that the old evictor sends to and the new one receives from.
    from: AtomicI32,
    to: AtomicI32,
    is_ending: AtomicBool,
    /// 1 from before the new evictor is there until it has everything.
    is_under_way: AtomicU32,
    /// The threads by their numbers; 0 is none.
    threads: [AtomicU32; THREADS_MAX],
}

impl Relay {
    /// Nothing is handed over.
    pub const fn new() -> Relay {
        Relay {
            from: AtomicI32::new(-1),
            to: AtomicI32::new(-1),
            is_ending: AtomicBool::new(false),
            is_under_way: AtomicU32::new(0),
            threads: [const { AtomicU32::new(0) }; THREADS_MAX],
        }
    }

    /// None has been: this is a copy of the process in which they were.
    pub fn forget_threads(&self) {
        self.threads.iter().for_each(|thread| thread.store(0, Release));
    }

    /// Notes a thread that has been started.
    pub fn note_thread(&self, place: usize, thread: u32) {
        self.threads[place].store(thread, Release);
    }

    /// Whether the calling thread, one of the spill's, is to end. It must hold nothing, and have nothing half done.
    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Acquire)
    }

    /// Whether the calling evictor comes after another.
    pub fn is_under_way(&self) -> bool {
        self.is_under_way.load(Acquire) != 0
    }

    /// What an evictor that comes after another must not close.
    pub fn socket(&self) -> RawFd {
        self.to.load(Acquire)
    }

    /// The new evictor has everything.
    pub fn end(&self) {
        self.is_under_way.store(0, Release);
        lock::wake(&self.is_under_way);
    }
}

/// Runs `call` in a thread of the program's, without a thread of the pager's if that is possible. No signal comes meanwhile. The process
/// must still be allowed threads afterwards.
pub fn while_alone<T>(pager: &'static Pager, call: impl FnOnce() -> T) -> T {
    if !pager.is_here() || pager.is_filtered() || !are_descriptors_allowed() {
        return call();
    }
    let is_armed = fork::hold_still(pager);
    if !pager.fork_turn.is_prepared() {
        return call();
    }
    if !is_armed {
        // The evictor must come to where it looks what is asked of it. That it pages nothing follows from the turn.
        // SAFETY: held by `prepare`, in this thread.
        unsafe { pager.state.free_held() };
    }
    let sockets = if is_only_thread(pager) && may_have_threads() { sockets() } else { None };
    let sockets = sockets.filter(|_| pager.can_start_threads());
    let ended = sockets.filter(|[from, to]| {
        pager.relay.from.store(from.as_raw_fd(), Release);
        pager.relay.to.store(to.as_raw_fd(), Release);
        sys::touch_stack();
        fork::ask_to_end(pager, is_armed)
    });
    if ended.is_some() {
        wait_for_the_end(pager);
    }
    let result = call();
    if let Some(sockets) = ended {
        go_on(pager);
        drop(sockets);
        while pager.relay.is_under_way() {
            lock::wait(&pager.relay.is_under_way, 1, None);
        }
    }
    if !is_armed {
        pager.state.hold();
    }
    fork::parent(pager);
    result
}

fn are_descriptors_allowed() -> bool {
    rustix::process::getrlimit(Resource::Nofile).current.is_none_or(|most| most >= NUMBERS_NEEDED)
}

/// Whether the process may have new threads: not when its children are to be in another namespace than it.
fn may_have_threads() -> bool {
    let inode = |path| rustix::fs::stat(path).ok().map(|found| found.st_ino);
    let is_one = |own, childrens| inode(own) == inode(childrens);
    is_one(c"/proc/self/ns/pid", c"/proc/self/ns/pid_for_children")
        && is_one(c"/proc/self/ns/time", c"/proc/self/ns/time_for_children")
}

/// Whether the program has no other thread. Only while none of the pager's comes or goes.
pub(crate) fn is_only_thread(pager: &Pager) -> bool {
    process::has_one_thread_beside(pager.own_threads())
}

fn sockets() -> Option<[OwnedFd; 2]> {
    let made = rustix::net::socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    let aside = |socket| rustix::io::fcntl_dupfd_cloexec(socket, ASIDE_FROM).ok();
    Some([aside(&made.0)?, aside(&made.1)?])
}

/// Waits until nothing in the kernel is left of any of the threads.
pub(crate) fn wait_for_the_end(pager: &Pager) {
    for thread in &pager.relay.threads {
        let number = thread.swap(0, AcqRel);
        while number != 0 && sys::is_own_thread(number) {
            lock::pause();
        }
    }
    // A thread loses its number a moment before it leaves the process; until then `unshare` is refused. Both happen under the kernel's lock
    // of all tasks (`release_task`), which this question waits for.
    let _ = rustix::process::getpriority_pgrp(None);
}

fn go_on(pager: &'static Pager) {
    pager.relay.is_ending.store(false, Release);
    pager.relay.is_under_way.store(1, Release);
    if pager.start_again().is_err() {
        // Nothing ends a process whose only thread hears no signal.
        sys::restore_signals(0);
        process::die(pager, Trouble::NoThread);
    }
}

/// In the evictor: sends its descriptors. False when that cannot be; then nothing has changed.
pub(crate) fn hand_over(pager: &Pager) -> bool {
    let Some(socket) = of_the_program(pager.relay.from.load(Acquire)) else { return false };
    let (mut numbers, mut count) = ([0; DESCRIPTORS_MAX], 0);
    for number in (0..NUMBERS).filter(|number| *number != socket.as_raw_fd() && is_open(*number)) {
        match numbers.get_mut(count) {
            Some(place) => *place = number,
            None => return false,
        }
        count += 1;
    }
    let (numbers, mut bytes) = (&numbers[..count], [[0; size_of::<RawFd>()]; DESCRIPTORS_MAX]);
    let mut descriptors = [rustix::fs::CWD; DESCRIPTORS_MAX];
    for ((number, bytes), descriptor) in numbers.iter().zip(&mut bytes).zip(&mut descriptors) {
        *bytes = number.to_ne_bytes();
        // SAFETY: open, and in this thread's own table, from which nobody takes anything now.
        *descriptor = unsafe { BorrowedFd::borrow_raw(*number) };
    }
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut with = SendAncillaryBuffer::new(&mut room);
    let message = [IoSlice::new(bytes[..count].as_flattened())];
    with.push(SendAncillaryMessage::ScmRights(&descriptors[..count]))
        && rustix::net::sendmsg(&socket, &message, &mut with, SendFlags::NOSIGNAL).is_ok()
}

/// A descriptor of the program's table, also in the calling thread's.
fn of_the_program(number: RawFd) -> Option<OwnedFd> {
    let process = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).ok()?;
    rustix::process::pidfd_getfd(process, number, PidfdGetfdFlags::empty()).ok()
}

fn is_open(number: RawFd) -> bool {
    // SAFETY: only asked for its flags; a number that is not open is an error.
    rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(number) }).is_ok()
}

/// In the evictor, once its descriptors are sent: has the others end. Returns when the handler has heard it, or the kernel would wait
/// for somebody to read.
pub(crate) fn have_others_end(pager: &Pager, channel: Option<&Channel>) {
    pager.relay.is_ending.store(true, Release);
    pager.brake.ring();
    // Before the handler: it may have left somebody to that.
    let number = pager.relay.threads[BRAKE].load(Acquire);
    while number != 0 && sys::is_own_thread(number) {
        lock::pause();
    }
    if let Some(spill) = &pager.spill {
        spill.wake_all();
    }
    if let Some(channel) = channel.filter(|_| pager.armed.load(Acquire)) {
        // News of a page where nothing has ever been.
        // SAFETY: a page of the pager's own that nobody uses.
        let _ = unsafe { rustix::mm::madvise(channel.bell() as *mut c_void, PAGE, rustix::mm::Advice::LinuxDontNeed) };
    }
}

/// In the new evictor, whose table has nothing but the socket: gets the old one's descriptors.
pub(crate) fn take_over(pager: &Pager) {
    if receive(pager.relay.to.load(Acquire)).is_none() {
        // What is registered on them is out of reach.
        process::die(pager, Trouble::NoThread);
    }
}

fn receive(socket: RawFd) -> Option<()> {
    // SAFETY: in this thread's own table, and nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let mut bytes = [[0; size_of::<RawFd>()]; DESCRIPTORS_MAX];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut with = RecvAncillaryBuffer::new(&mut room);
    let mut message = [IoSliceMut::new(bytes.as_flattened_mut())];
    let got = rustix::net::recvmsg(&socket, &mut message, &mut with, RecvFlags::CMSG_CLOEXEC).ok()?;
    let count = got.bytes / size_of::<RawFd>();
    let mut aside = [const { None }; DESCRIPTORS_MAX];
    let received = with.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    for (place, descriptor) in aside.iter_mut().zip(received.flatten()) {
        // None may stand where another is to be.
        *place = Some(rustix::io::fcntl_dupfd_cloexec(&descriptor, ASIDE_FROM).ok()?);
    }
    for (number, descriptor) in bytes[..count].iter().zip(&aside) {
        sys::duplicate_to(descriptor.as_ref()?.as_raw_fd(), RawFd::from_ne_bytes(*number)).ok()?;
    }
    Some(())
}
