//! What a thread that serves requests owns: a lane, and a buffer to read into.
//!
//! fuser starts its threads itself and hands them nothing, and a lane may not move between threads; so each thread makes
//! its own when its first request arrives, and keeps it until it ends. A thread belongs to one disk for all its life.

use std::cell::RefCell;
use std::sync::Arc;

use rustix::process::configure_io_flusher_behavior;

use super::REQUEST_BYTES_MAX;
use crate::device::{BlockDevice, Lane};
use crate::error::DeviceError;

/// A thread's own.
pub(super) struct Own {
    pub lane: Box<dyn Lane>,
    buffer: Vec<u8>,
}

impl Own {
    /// Makes a lane on this thread, and says to the kernel that the thread cleans its memory: what it allocates from then
    /// on does not wait for pages to be written out, perhaps through this very thread.
    pub fn new(device: &Arc<dyn BlockDevice>) -> Result<Own, DeviceError> {
        // Only a privileged process may say so, on Linux 5.6 and later. Without it the disk works, but for swap.
        let _ = configure_io_flusher_behavior(true);
        Ok(Own { lane: device.clone().lane()?, buffer: vec![0; REQUEST_BYTES_MAX] })
    }

    /// The lane, and the first `length_bytes` of the buffer, which grows if the kernel does not keep to what was agreed.
    pub fn lane_and_buffer(&mut self, length_bytes: usize) -> (&mut dyn Lane, &mut [u8]) {
        if self.buffer.len() < length_bytes {
            self.buffer.resize(length_bytes, 0);
        }
        (&mut *self.lane, &mut self.buffer[..length_bytes])
    }
}

thread_local! {
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

/// Calls `serve` with what this thread owns, or with why it owns nothing; the next request tries again.
pub(super) fn with_own<T>(device: &Arc<dyn BlockDevice>, serve: impl FnOnce(Result<&mut Own, DeviceError>) -> T) -> T {
    OWN.with_borrow_mut(|own| match own {
        Some(own) => serve(Ok(own)),
        None => match Own::new(device) {
            Ok(made) => serve(Ok(own.insert(made))),
            Err(error) => serve(Err(error)),
        },
    })
}
