//! One queue of a device: the thread that takes its requests and answers them.
//!
//! ```text
//!            the driver                       | the thread
//!   a request for tag 3                       |
//!   descriptor 3 <- it; completes command 3 --+-> reads the descriptor, asks the lane
//!                                             |      Done: COMMIT_AND_FETCH of 3, with the result
//!   the request ends, tag 3 is free again  <--+--    MustWait: to the waiting threads, which give the result back
//! ```
//!
//! There is a command in the driver for each tag that is free, so that there is always one to complete. Only the thread that
//! gave a tag's first command may give the others; so the waiting threads put their results into `done` and wake it through
//! an eventfd, for which a poll is always pending. Answers are handed over when the thread has nothing more to do, or after
//! [`ANSWERED_BYTES`]; one system call does that and waits for more requests.
//!
//! The thread ends when the driver has completed all commands for good, which it does when the device is stopped. Serving
//! allocates nothing: the ring, the buffer and the list are as large as they can need to be from the start.
#![allow(unsafe_code)]

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use io_uring::squeue::Entry;
use io_uring::types::Fd;
use io_uring::{IoUring, cqueue, opcode};
use linux_raw_sys::general::POLLIN;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::process::configure_io_flusher_behavior;

use super::REQUEST_BYTES_MAX;
use super::error::{Step, UblkError};
use super::memory::{Buffer, Descriptors};
use super::request::{Asked, Data, failed};
use super::uapi::{IO_COMMIT_AND_FETCH_REQ, IO_FETCH_REQ, IoCmd};
use super::waiting::Job;
use crate::device::{BLOCK_BYTES, BlockDevice, Lane, Outcome};
use crate::waiting::Waiting;

/// Served bytes after which answers are handed over while there is more to do.
const ANSWERED_BYTES: usize = 64 << 10;

/// Marks the poll's completions; tags are smaller.
const WOKEN: u64 = u64::MAX;

/// What a queue's thread and the waiting threads share.
pub(super) struct Shared {
    /// The character device.
    device: Arc<OwnedFd>,
    index: u16,
    depth: u16,
    /// Results of requests that waited. Room for every tag; held for moments.
    done: Mutex<Vec<(u16, i32)>>,
    wake: OwnedFd,
}

impl Shared {
    pub fn new(device: Arc<OwnedFd>, index: u16, depth: u16) -> io::Result<Shared> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Shared { device, index, depth, done: Mutex::new(Vec::with_capacity(depth.into())), wake })
    }

    /// The bytes of `tag`'s request.
    pub fn data(&self, tag: u16) -> Data<'_> {
        Data::of(self.device.as_fd(), self.index, tag)
    }

    /// Hands a result to the queue's thread.
    pub fn finished(&self, tag: u16, result: i32) {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).push((tag, result));
        // It fails only if the thread has been woken 2^64 times and did not look.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn take_finished(&self) -> Option<(u16, i32)> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// A thread's own.
pub(super) struct Queue {
    // Before what its commands refer to.
    ring: IoUring,
    descriptors: Descriptors,
    buffer: Buffer,
    lane: Box<dyn Lane>,
    shared: Arc<Shared>,
    waiting: Arc<Waiting<Job>>,
    /// Tags whose commands the driver has not completed for good.
    live: u32,
    /// Bytes served whose answers have not been handed over.
    answered_bytes: usize,
}

impl Queue {
    /// Takes all that the thread needs, and gives the driver the first command of each tag. To be called on the thread.
    ///
    /// # Errors
    /// The driver completes the commands it was given when the thread ends.
    pub fn new(
        device: Arc<dyn BlockDevice>,
        shared: Arc<Shared>,
        waiting: Arc<Waiting<Job>>,
        path: &std::path::Path,
    ) -> Result<Queue, UblkError> {
        // The thread cleans memory: what it allocates in the kernel does not wait for pages to be written out, perhaps
        // through this very thread.
        let _ = configure_io_flusher_behavior(true);
        let (index, depth) = (shared.index, shared.depth);
        let lane = device.lane()?;
        let buffer = Buffer::new(REQUEST_BYTES_MAX).map_err(UblkError::at(Step::Memory, path))?;
        let descriptors = Descriptors::map(shared.device.as_fd(), index, depth);
        let descriptors = descriptors.map_err(UblkError::at(Step::Map, path))?;
        // Each tag has one command at most, and there is the poll.
        let entries = (u32::from(depth) + 1).next_power_of_two();
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().setup_submit_all().build(entries);
        let ring = ring.map_err(UblkError::at(Step::Ring, path))?;
        let mut queue =
            Queue { ring, descriptors, buffer, lane, shared, waiting, live: depth.into(), answered_bytes: 0 };
        queue.fetch_all().map_err(UblkError::at(Step::Fetch, path))?;
        Ok(queue)
    }

    fn fetch_all(&mut self) -> io::Result<()> {
        for tag in 0..self.shared.depth {
            self.push(command(&self.shared, IO_FETCH_REQ, tag, -1))?;
        }
        self.push(poll(&self.shared))?;
        self.ring.submit()?;
        // What the driver did not want it has completed already; what it took stays until there is a request.
        match self.ring.completion().map(|completed| completed.result()).find(|result| *result < 0) {
            Some(refused) => Err(io::Error::from_raw_os_error(-refused)),
            None => Ok(()),
        }
    }

    /// Serves until the device is stopped.
    pub fn serve(mut self) {
        while self.live > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => self.answered_bytes = 0,
                Err(error) if goes_by(&error) => {}
                // The ring is of no use any more. When the thread ends, the driver fails what it was to serve.
                Err(_) => return,
            }
            while let Some(completed) = self.next_completed() {
                let handled = match completed.user_data() {
                    WOKEN => self.woken(),
                    tag => self.completed(tag as u16, completed.result()),
                };
                if handled.is_err() {
                    return;
                }
            }
        }
    }

    fn next_completed(&mut self) -> Option<cqueue::Entry> {
        self.ring.completion().next()
    }

    /// The command of `tag` came back.
    fn completed(&mut self, tag: u16, result: i32) -> io::Result<()> {
        // Mostly -ENODEV: the device is stopped. Whatever it is, the driver has no command for the tag any more.
        if result < 0 {
            self.live -= 1;
            return Ok(());
        }
        let asked = Asked::from(self.descriptors.get(tag));
        match asked.serve(&mut *self.lane, self.buffer.get(), &self.shared.data(tag), false) {
            Outcome::Done(result) => self.answer(tag, result, asked.data_bytes()),
            Outcome::MustWait => {
                let job = Job { queue: self.shared.clone(), tag, asked };
                match self.waiting.put(job, matches!(asked, Asked::Read { .. })) {
                    Ok(()) => Ok(()),
                    // There is a place for each tag, and the waiting threads end last.
                    Err(_) => self.answer(tag, failed(Errno::IO), 0),
                }
            }
        }
    }

    /// Requests that waited are done.
    fn woken(&mut self) -> io::Result<()> {
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        while let Some((tag, result)) = self.shared.take_finished() {
            self.answer(tag, result, BLOCK_BYTES)?;
        }
        self.push(poll(&self.shared))
    }

    fn answer(&mut self, tag: u16, result: i32, data_bytes: usize) -> io::Result<()> {
        self.push(command(&self.shared, IO_COMMIT_AND_FETCH_REQ, tag, result))?;
        self.answered_bytes += data_bytes.max(BLOCK_BYTES);
        if self.answered_bytes >= ANSWERED_BYTES {
            self.submit()?;
        }
        Ok(())
    }

    /// Hands over what is in the submission queue, without waiting.
    fn submit(&mut self) -> io::Result<()> {
        self.answered_bytes = 0;
        match self.ring.submit() {
            // What is left there is handed over next time.
            Err(error) if goes_by(&error) => Ok(()),
            other => other.map(drop),
        }
    }

    fn push(&mut self, entry: Entry) -> io::Result<()> {
        // SAFETY: a command refers to no memory, and its descriptors (the character device, the eventfd) are open as long as
        // `shared`, which lives longer than the ring.
        if unsafe { self.ring.submission().push(&entry) }.is_ok() {
            return Ok(());
        }
        // It has room for all there can be; so this is a fault of ours, and still no request is lost.
        self.submit()?;
        // SAFETY: as above.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| ErrorKind::QuotaExceeded.into())
    }
}

/// Whether io_uring_enter(2) has only not taken all it was given: a signal came, there is no memory for a request at the moment, or answers
/// have to be looked at first.
fn goes_by(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::ResourceBusy)
}

fn command(shared: &Shared, command: u32, tag: u16, result: i32) -> Entry {
    let argument = IoCmd { q_id: shared.index, tag, result, addr: 0 };
    let entry = opcode::UringCmd16::new(Fd(shared.device.as_raw_fd()), command).cmd(argument.to_bytes()).build();
    entry.user_data(tag.into())
}

/// Completes once, when there is something in `done`.
fn poll(shared: &Shared) -> Entry {
    opcode::PollAdd::new(Fd(shared.wake.as_raw_fd()), POLLIN).build().user_data(WOKEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_outlives_what_goes_by_and_nothing_else() {
        let goes_by = |errno: Errno| goes_by(&errno.into());
        assert!([Errno::INTR, Errno::AGAIN, Errno::BUSY].into_iter().all(goes_by));
        assert!(![Errno::FAULT, Errno::BADF, Errno::INVAL, Errno::NXIO].into_iter().any(goes_by));
    }
}
