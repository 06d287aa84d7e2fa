//! Requests that need a slow medium, and the threads that wait for it.
//!
//! A request comes here after the device said `MustWait`, so that its queue's thread is free for the next one. Its bytes
//! stay in the driver until it is served, so nothing is copied to have it wait, and there is room for all that a device can
//! have in flight: none is ever refused.

use std::path::Path;
use std::sync::Arc;

use rustix::process::configure_io_flusher_behavior;

use super::REQUEST_BYTES_MAX;
use super::error::{Step, UblkError};
use super::memory::Buffer;
use super::queue::Shared;
use super::request::Asked;
use crate::device::{BlockDevice, Lane, Outcome};
use crate::waiting::{Takes, Waiting};

/// A request, and where its result goes.
pub(super) struct Job {
    pub queue: Arc<Shared>,
    pub tag: u16,
    pub asked: Asked,
}

/// A thread that waits: its own.
pub(super) struct Waiter {
    lane: Box<dyn Lane>,
    buffer: Buffer,
    waiting: Arc<Waiting<Job>>,
    takes: Takes,
}

impl Waiter {
    /// Takes all that the thread needs. To be called on the thread.
    pub fn new(
        device: Arc<dyn BlockDevice>,
        waiting: Arc<Waiting<Job>>,
        takes: Takes,
        path: &Path,
    ) -> Result<Waiter, UblkError> {
        let _ = configure_io_flusher_behavior(true);
        let buffer = Buffer::new(REQUEST_BYTES_MAX).map_err(UblkError::at(Step::Memory, path))?;
        Ok(Waiter { lane: device.lane()?, buffer, waiting, takes })
    }

    /// Serves until the queue is closed and empty.
    pub fn serve(mut self) {
        while let Some(Job { queue, tag, asked }) = self.waiting.next(self.takes) {
            match asked.serve(&mut *self.lane, self.buffer.get(), &queue.data(tag), true) {
                Outcome::Done(result) => queue.finished(tag, result),
                Outcome::MustWait => unreachable!("it may wait"),
            }
        }
    }
}
