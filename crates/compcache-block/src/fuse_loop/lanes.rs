//! What a thread that serves requests owns: a lane, and a buffer to read into.
//!
//! fuser starts its threads itself and hands them nothing. What they need is made before the disk appears, when there is
//! memory; each thread takes its own when its first request arrives, and keeps it until it ends. A thread belongs to one
//! disk for all its life.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::configure_io_flusher_behavior;

use super::Largest;
use crate::device::{BlockDevice, Lane};
use crate::error::DeviceError;

/// A thread's own.
pub(super) struct Own {
    pub lane: Box<dyn Lane>,
    buffer: Vec<u8>,
}

impl Own {
    /// Takes all the memory it will need.
    pub fn new(device: &Arc<dyn BlockDevice>, largest: Largest) -> Result<Own, DeviceError> {
        // Not zero, so that the memory is there and not only promised.
        Ok(Own { lane: device.clone().lane()?, buffer: vec![1; largest.read_bytes] })
    }

    /// To be called once by the thread it belongs to: says to the kernel that the thread cleans its memory. What it
    /// allocates from then on does not wait for pages to be written out, perhaps through this very thread.
    pub fn settle(&self) {
        // Only a privileged process may say so, on Linux 5.6 and later. Without it the disk works, but for swap.
        let _ = configure_io_flusher_behavior(true);
    }

    /// The lane, and the first `length_bytes` of the buffer, which grows if the kernel does not keep to what was agreed.
    pub fn lane_and_buffer(&mut self, length_bytes: usize) -> (&mut dyn Lane, &mut [u8]) {
        if self.buffer.len() < length_bytes {
            self.buffer.resize(length_bytes, 0);
        }
        (&mut *self.lane, &mut self.buffer[..length_bytes])
    }
}

/// What the threads of a disk take.
pub(super) struct Lanes {
    device: Arc<dyn BlockDevice>,
    largest: Largest,
    ready: Mutex<Vec<Own>>,
}

thread_local! {
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

impl Lanes {
    /// For `threads` threads.
    pub fn new(device: Arc<dyn BlockDevice>, threads: usize, largest: Largest) -> Result<Lanes, DeviceError> {
        let ready = (0..threads).map(|_| Own::new(&device, largest)).collect::<Result<_, _>>()?;
        Ok(Lanes { device, largest, ready: Mutex::new(ready) })
    }

    /// The device they lead to.
    pub fn device(&self) -> &dyn BlockDevice {
        &*self.device
    }

    /// Calls `serve` with what this thread owns, or with why it owns nothing; the next request tries again.
    pub fn with_own<T>(&self, serve: impl FnOnce(Result<&mut Own, DeviceError>) -> T) -> T {
        OWN.with_borrow_mut(|own| {
            if own.is_none() {
                let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner).pop();
                match ready.map_or_else(|| Own::new(&self.device, self.largest), Ok) {
                    Ok(taken) => own.insert(taken).settle(),
                    Err(error) => return serve(Err(error)),
                }
            }
            serve(Ok(own.as_mut().expect("taken above")))
        })
    }
}
