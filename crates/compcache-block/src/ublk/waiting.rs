//! Requests that need a slow medium, and the threads that wait for it.
//!
//! A request comes here after the device said `MustWait`, so that its queue's thread is free for the next one. Its bytes
//! stay in the driver until it is served, so nothing is copied to have it wait, and there is room for all that a device can
//! have in flight: none is ever refused.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::process::configure_io_flusher_behavior;

use super::REQUEST_BYTES_MAX;
use super::error::{Step, UblkError};
use super::memory::Buffer;
use super::queue::Shared;
use super::request::Asked;
use crate::device::{BlockDevice, Lane, Outcome};

/// A request, and where its result goes.
pub(super) struct Job {
    pub queue: Arc<Shared>,
    pub tag: u16,
    pub asked: Asked,
}

struct Jobs {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// The queue; its mutex is held for moments, and never while a device is asked.
pub(super) struct Waiting {
    jobs: Mutex<Jobs>,
    arrived: Condvar,
}

impl Waiting {
    /// With room for `places` requests.
    pub fn new(places: usize) -> Waiting {
        let jobs = Jobs { jobs: VecDeque::with_capacity(places), closed: false };
        Waiting { jobs: Mutex::new(jobs), arrived: Condvar::new() }
    }

    /// Takes a request, each once: so no more than there are tags.
    pub fn put(&self, job: Job) {
        self.lock().jobs.push_back(job);
        self.arrived.notify_one();
    }

    /// Ends the threads once the queue is empty.
    pub fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_all();
    }

    fn next(&self) -> Option<Job> {
        let none_yet = |jobs: &mut Jobs| jobs.jobs.is_empty() && !jobs.closed;
        let mut jobs = self.arrived.wait_while(self.lock(), none_yet).unwrap_or_else(PoisonError::into_inner);
        jobs.jobs.pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that waits: its own.
pub(super) struct Waiter {
    lane: Box<dyn Lane>,
    buffer: Buffer,
    waiting: Arc<Waiting>,
}

impl Waiter {
    /// Takes all that the thread needs. To be called on the thread.
    pub fn new(device: Arc<dyn BlockDevice>, waiting: Arc<Waiting>, path: &Path) -> Result<Waiter, UblkError> {
        let _ = configure_io_flusher_behavior(true);
        let buffer = Buffer::new(REQUEST_BYTES_MAX).map_err(UblkError::at(Step::Memory, path))?;
        Ok(Waiter { lane: device.lane()?, buffer, waiting })
    }

    /// Serves until the queue is closed and empty.
    pub fn serve(mut self) {
        while let Some(Job { queue, tag, asked }) = self.waiting.next() {
            match asked.serve(&mut *self.lane, self.buffer.get(), &queue.data(tag), true) {
                Outcome::Done(result) => queue.finished(tag, result),
                Outcome::MustWait => unreachable!("it may wait"),
            }
        }
    }
}
