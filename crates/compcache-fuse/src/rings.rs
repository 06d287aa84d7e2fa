//! Requests by io_uring (Linux 6.14): the kernel puts each on the queue of the processor it was made on, where a thread of that queue serves it.
//!
//! ```text
//!   the kernel                                   | a thread, its ring, one command
//!   a request: headers and payload into the      |
//!   thread's memory; completes the command ------+-> serve(asked, answer)
//!                                                |   the answer, into the same memory
//!   the answer is taken from there <-------------+-- COMMIT_AND_FETCH: answered, and
//!   the thread may be given the next             |   waiting for the next
//! ```
//!
//! An answer and the wait for the next request are one system call, and who waits for his answer is served on his own processor: nobody
//! is woken on another. What a request is about, its *argument*, has a place of its own; all else (names, bytes to write, and every answer) is
//! the *payload*. Forgets and interrupts still come by read(2), and so does INIT, in which `FUSE_OVER_IO_URING` is agreed; from then on the kernel
//! holds back all requests until each processor that there could be has its queue ([`Rings::start`]).
//!
//! **Threads.** A queue has several, with one command each, so that the kernel gives requests to those alone that have nothing to do, and a thread
//! may wait for a slow medium; it prefers the one that was free last. A thread that finds itself the only one to serve on its queue, time and
//! again, serves somebody who waits for each answer, and stays on his processor. One that finds others busy runs where there is room
//! (docs/decisions/0032).
//!
//! The kernel agrees if its parameter `enable_uring` of the module fuse is set, which it is not by default ([`queues`]). A thread ends when the
//! connection does.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::io::{self, ErrorKind};
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
use std::{fmt, fs, mem};

use io_uring::squeue::Entry128;
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::errors::told;

/// The kernel's parameter: `Y` where it agrees to io_uring. It is there since Linux 6.14.
pub const ENABLED: &str = "/sys/module/fuse/parameters/enable_uring";
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

/// Threads of all queues, about, of which each has two to four.
const THREADS: usize = 32;
/// So many requests in a row without another being served are of somebody who waits for each.
const ALONE_MANY: u32 = 8;

/// With more processors there would be more threads and memory than they are worth.
pub const QUEUES_MAX: usize = 16;

// `enum fuse_uring_cmd`.
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;

// `struct fuse_uring_req_header`: `in_out`, `op_in`, `ring_ent_in_out`.
const HEADER_BYTES: usize = 288;
const ARGUMENT: usize = 128;
const ARGUMENT_BYTES: usize = 128;
const COMMIT_ID: usize = 264;
const PAYLOAD_LENGTH: usize = 272;
// `struct fuse_in_header`, which `in_out` begins as.
const OPCODE: usize = 4;
const UNIQUE: usize = 8;
const NODE: usize = 16;
const UID: usize = 24;
const GID: usize = 28;
const PID: usize = 32;

/// How many queues there will be, if the kernel would agree to it now: it wants one for each processor that there could be.
#[must_use]
pub fn queues() -> Option<NonZeroUsize> {
    let enabled = fs::read_to_string(ENABLED).ok()?;
    let possible = fs::read_to_string(POSSIBLE).ok()?;
    let last: usize = possible.trim().rsplit(['-', ',']).next()?.parse().ok()?;
    let queues = NonZeroUsize::new(last + 1)?;
    // Many a container may have no rings.
    (enabled.trim() == "Y" && queues.get() <= QUEUES_MAX && new_ring().is_ok()).then_some(queues)
}

/// Who serves requests.
pub trait Serve: Send + Sync + 'static {
    /// Serves a request and answers it. May wait.
    fn serve(&self, asked: &Asked, answer: Answer<'_>);
}

/// A request, but for its payload.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// `enum fuse_opcode`.
    pub opcode: u32,
    /// The number of the file it is about.
    pub node: u64,
    /// Who asks.
    pub uid: u32,
    /// His group.
    pub gid: u32,
    /// His thread, by the number that it has where the connection was made.
    pub thread: u32,
    /// How much of the payload came with it, bytes.
    pub payload_bytes: usize,
    argument: [u8; ARGUMENT_BYTES],
}

impl Asked {
    /// A number in the argument, at an offset in bytes.
    #[must_use]
    pub fn u32_at(&self, offset: usize) -> u32 {
        u32::from_ne_bytes(part(&self.argument, offset))
    }

    /// As above.
    #[must_use]
    pub fn u64_at(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(part(&self.argument, offset))
    }
}

/// Where the answer to a request goes. If it is dropped, that is EIO.
#[derive(Debug)]
pub struct Answer<'q> {
    queue: &'q mut Queue,
    is_given: bool,
}

impl Answer<'_> {
    /// What came with the request, and where what is answered goes: as much as was agreed to be the most.
    pub fn payload(&mut self) -> &mut [u8] {
        // SAFETY: from its completion until the next command the memory is this thread's, which has lent the queue to this alone.
        unsafe { &mut *self.queue.memory.payload() }
    }

    /// Success, and so much of the payload. Given when the request has been served.
    pub fn ok(mut self, length_bytes: usize) {
        self.give(0, length_bytes as u32);
    }

    /// The same at once: there is more to be done.
    pub fn ok_now(mut self, length_bytes: usize) {
        self.give(0, length_bytes as u32);
        // What it could not take it takes when it is waited for the next request.
        let _ = self.queue.ring.submit();
    }

    /// An error; an errno, [as it may be told](told).
    pub fn fail(mut self, errno: i32) {
        self.give(-told(errno), 0);
    }

    fn give(&mut self, error: i32, length_bytes: u32) {
        self.is_given = true;
        self.queue.answer(error, length_bytes);
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        if !self.is_given {
            self.give(-Errno::IO.raw_os_error(), 0);
        }
    }
}

/// The threads that serve a connection. They end with it.
#[derive(Debug)]
pub struct Rings {
    threads: Vec<JoinHandle<()>>,
}

impl Rings {
    /// Starts threads for each processor there could be, which serve what comes by `connection`. To be called when the flag has been agreed. No
    /// request may have more than `payload_bytes`: neither what may be written at a time nor `max_pages`.
    ///
    /// # Errors
    /// The connection is of no use, since the kernel waits for queues that are not there: it must be cut.
    pub fn start(connection: &OwnedFd, payload_bytes: usize, serve: &Arc<impl Serve>) -> io::Result<Rings> {
        let queues = queues().ok_or(ErrorKind::Unsupported)?.get();
        let threads_each = (THREADS / queues).clamp(2, 4);
        let mut threads = Vec::with_capacity(queues * threads_each);
        let (ready, each) = channel();
        for index in 0..queues {
            let busy = Arc::new(AtomicU32::new(0));
            for _ in 0..threads_each {
                let place = Place::new(index, busy.clone());
                let (connection, serve, ready) = (connection.try_clone()?, serve.clone(), ready.clone());
                let body = move || match Queue::new(connection, index as u16, payload_bytes) {
                    Ok(queue) => {
                        let _ = ready.send(Ok(()));
                        drop(ready);
                        queue.serve(place, &*serve);
                    }
                    Err(error) => drop(ready.send(Err(error))),
                };
                threads.push(thread::Builder::new().name(format!("fuse-ring-{index}")).spawn(body)?);
            }
        }
        drop(ready);
        each.iter().collect::<io::Result<()>>()?;
        Ok(Rings { threads })
    }

    /// Returns when they have ended.
    pub fn join(self) {
        self.threads.into_iter().for_each(|thread| drop(thread.join()));
    }
}

/// Where a thread runs.
struct Place {
    queue: usize,
    /// How many of the queue's threads serve a request now.
    busy: Arc<AtomicU32>,
    /// Requests in a row that were served alone.
    alone: u32,
    /// Where it was allowed to run, if it stays now where the requests come from.
    stays: Option<CpuSet>,
    /// It may not run there, as who administers this has it, or the system; that it may later is not looked for.
    is_refused: bool,
}

impl Place {
    fn new(queue: usize, busy: Arc<AtomicU32>) -> Place {
        Place { queue, busy, alone: 0, stays: None, is_refused: false }
    }

    /// Calls `serve`, at the right place.
    fn serve(&mut self, serve: impl FnOnce()) {
        if self.busy.fetch_add(1, Relaxed) == 0 {
            self.alone = (self.alone + 1).min(ALONE_MANY);
        } else {
            self.alone = 0;
        }
        match self.stays.take() {
            None if self.alone == ALONE_MANY && !self.is_refused => self.stay(),
            Some(anywhere) if self.alone == 0 => self.leave(&anywhere),
            as_it_is => self.stays = as_it_is,
        }
        serve();
        self.busy.fetch_sub(1, Relaxed);
    }

    fn stay(&mut self) {
        let Ok(anywhere) = sched_getaffinity(None) else { return };
        if anywhere.is_set(self.queue) && sched_setaffinity(None, &self.here()).is_ok() {
            self.stays = Some(anywhere);
        } else {
            self.is_refused = true;
        }
    }

    /// Unless somebody else has said meanwhile where it is to run.
    fn leave(&self, anywhere: &CpuSet) {
        if sched_getaffinity(None).is_ok_and(|now| now == self.here()) {
            let _ = sched_setaffinity(None, anywhere);
        }
    }

    fn here(&self) -> CpuSet {
        let mut here = CpuSet::new();
        here.set(self.queue);
        here
    }
}

/// What the kernel and we read and write of a request: its headers, and its payload.
#[derive(Debug)]
struct Memory {
    header: Box<UnsafeCell<[u8; HEADER_BYTES]>>,
    payload: UnsafeCell<Box<[u8]>>,
}

impl Memory {
    fn header(&self) -> *mut [u8; HEADER_BYTES] {
        self.header.get()
    }

    fn payload(&self) -> *mut [u8] {
        // SAFETY: nobody changes which memory it is; only what is in it.
        unsafe { &raw mut **self.payload.get() }
    }
}

/// A thread's own.
struct Queue {
    // Before what its command refers to.
    ring: IoUring<Entry128>,
    memory: Memory,
    connection: OwnedFd,
    index: u16,
    /// The command was completed while it was handed over.
    early: Option<i32>,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("index", &self.index).finish_non_exhaustive()
    }
}

impl Queue {
    /// Gives the kernel the first command. To be called on the thread.
    fn new(connection: OwnedFd, index: u16, payload_bytes: usize) -> io::Result<Queue> {
        // Pages of the payload are touched when they are first needed.
        let (header, payload) = (Box::new([0; HEADER_BYTES].into()), vec![0; payload_bytes].into_boxed_slice().into());
        let mut queue = Queue { ring: new_ring()?, memory: Memory { header, payload }, connection, index, early: None };
        queue.register()?;
        Ok(queue)
    }

    fn register(&mut self) -> io::Result<()> {
        // Read by the kernel while the command is handed over.
        let (header, payload) = (self.memory.header(), self.memory.payload());
        let places = [(header as usize, HEADER_BYTES), (payload.cast::<u8>() as usize, payload.len())];
        let mut command = self.command(REGISTER, 0, Some((&raw const places) as u64));
        // SAFETY: as many bytes as a submission has, of which these are its `len`, in what <linux/io_uring.h> promises: so many places.
        unsafe { (&raw mut command).cast::<u8>().add(24).cast::<u32>().write_unaligned(places.len() as u32) };
        self.push(&command);
        self.ring.submit()?;
        // What the kernel did not want it has completed already; what it took stays until there is a request, which may be now.
        self.early = self.completed();
        match self.early {
            Some(refused) if refused < 0 => Err(io::Error::from_raw_os_error(-refused)),
            _ => Ok(()),
        }
    }

    fn completed(&mut self) -> Option<i32> {
        self.ring.completion().next().map(|completed| completed.result())
    }

    /// Serves until the connection ends.
    fn serve(mut self, mut place: Place, serve: &impl Serve) {
        loop {
            let completed = match self.early.take() {
                None => match self.ring.submit_and_wait(1) {
                    Ok(_) => self.completed(),
                    Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => None,
                    Err(error) if error.kind() == ErrorKind::ResourceBusy => None,
                    // What the thread had, who asked would wait for until the connection ends, and without it the queue may have nobody: so the
                    // process ends, and the connection with it, as after any panic.
                    Err(error) => panic!("io_uring fails for requests of processor {}: {error}", self.index),
                },
                early => early,
            };
            match completed {
                None => {}
                Some(0) => {
                    let asked = self.asked();
                    place.serve(|| serve.serve(&asked, Answer { queue: &mut self, is_given: false }));
                }
                // Mostly -ENOTCONN: the connection has ended. Whatever it is, the kernel has no command of ours any more.
                Some(_) => return,
            }
        }
    }

    fn asked(&self) -> Asked {
        // SAFETY: the header is this thread's from its completion until the next command.
        let header = unsafe { &*self.memory.header() };
        Asked {
            opcode: u32::from_ne_bytes(part(header, OPCODE)),
            node: u64::from_ne_bytes(part(header, NODE)),
            uid: u32::from_ne_bytes(part(header, UID)),
            gid: u32::from_ne_bytes(part(header, GID)),
            thread: u32::from_ne_bytes(part(header, PID)),
            payload_bytes: u32::from_ne_bytes(part(header, PAYLOAD_LENGTH)) as usize,
            argument: part(header, ARGUMENT),
        }
    }

    fn answer(&mut self, error: i32, length_bytes: u32) {
        // SAFETY: as in `asked`.
        let header = unsafe { &mut *self.memory.header() };
        let unique: [u8; 8] = part(header, UNIQUE);
        let commit_id = u64::from_ne_bytes(part(header, COMMIT_ID));
        // `struct fuse_out_header`: length with itself, error, unique.
        header[..4].copy_from_slice(&(16 + length_bytes).to_ne_bytes());
        header[4..8].copy_from_slice(&error.to_ne_bytes());
        header[8..16].copy_from_slice(&unique);
        header[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&length_bytes.to_ne_bytes());
        let command = self.command(COMMIT_AND_FETCH, commit_id, None);
        self.push(&command);
    }

    fn push(&mut self, entry: &Entry128) {
        // SAFETY: what a command refers to (the places until it is handed over, the memory, the connection) lives longer than the ring.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("a command at a time, and room for one");
    }

    /// `struct fuse_uring_cmd_req`: flags, commit_id, qid.
    fn command(&self, command: u32, commit_id: u64, places: Option<u64>) -> Entry128 {
        let mut argument = [0; 80];
        argument[8..16].copy_from_slice(&commit_id.to_ne_bytes());
        argument[16..18].copy_from_slice(&self.index.to_ne_bytes());
        opcode::UringCmd80::new(Fd(self.connection.as_raw_fd()), command).cmd(argument).addr(places).build()
    }
}

/// For the thread that makes it alone; with room for one command and its successor.
fn new_ring() -> io::Result<IoUring<Entry128>> {
    IoUring::<Entry128>::builder().setup_single_issuer().setup_defer_taskrun().setup_submit_all().build(2)
}

fn part<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes[offset..offset + N].try_into().expect("it lies there")
}

const _: () = assert!(mem::size_of::<Entry128>() == 128 && ARGUMENT + ARGUMENT_BYTES == 256);

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that is to be at one processor may run on `allowed`, and serves alone, then with another; where it may run each time.
    fn served(at: usize, allowed: &CpuSet) -> [CpuSet; 2] {
        let serve = || {
            sched_setaffinity(None, allowed).unwrap();
            let busy = Arc::new(AtomicU32::new(0));
            let mut place = Place::new(at, busy.clone());
            let now = || sched_getaffinity(None).unwrap();
            (0..2 * ALONE_MANY).for_each(|_| place.serve(|| ()));
            let alone = now();
            busy.store(1, Relaxed);
            place.serve(|| ());
            [alone, now()]
        };
        thread::scope(|scope| scope.spawn(serve).join().unwrap())
    }

    #[test]
    fn a_thread_stays_with_who_asks_it_alone_but_only_where_it_may_run() {
        let here = sched_getaffinity(None).unwrap();
        let mut allowed = (0..CpuSet::MAX_CPU).filter(|cpu| here.is_set(*cpu));
        let (Some(one), Some(other)) = (allowed.next(), allowed.next()) else { return };
        let just = |cpu| {
            let mut set = CpuSet::new();
            set.set(cpu);
            set
        };
        assert!(served(one, &here) == [just(one), here], "and lets go of it where there are others");
        assert!(served(other, &just(one)) == [just(one), just(one)]);
    }
}
