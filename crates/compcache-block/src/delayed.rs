//! A device of which a part is slow: there it answers `MustWait` first, and takes its time when it is asked again.
//!
//! The stand-in for a backing device, before there is one: what a transport does with it shows whether one slow request
//! holds up the others.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::device::{BlockDevice, Extent, Lane, Manner, Outcome, Zeroes};
use crate::error::DeviceError;

/// Another device, slow for some of its bytes, as behind nbdkit's delay filter.
pub struct Delayed {
    inner: Arc<dyn BlockDevice>,
    slow_bytes: Range<u64>,
    delay: Duration,
    waited: AtomicU64,
}

impl Delayed {
    /// `inner`, where requests that touch `slow_bytes` take `delay` longer. Flushes are not slow.
    pub fn new(inner: Arc<dyn BlockDevice>, slow_bytes: Range<u64>, delay: Duration) -> Delayed {
        Delayed { inner, slow_bytes, delay, waited: AtomicU64::new(0) }
    }

    /// How many requests have waited.
    pub fn waited(&self) -> u64 {
        self.waited.load(Relaxed)
    }

    /// Waits, if that is necessary and allowed; `MustWait` where it is not allowed.
    fn pass(&self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Outcome {
        let (slow, end) = (&self.slow_bytes, offset_bytes.saturating_add(length_bytes));
        if offset_bytes >= slow.end || slow.start >= end {
            return Outcome::Done(());
        }
        if !manner.may_wait {
            return Outcome::MustWait;
        }
        self.waited.fetch_add(1, Relaxed);
        thread::sleep(self.delay);
        Outcome::Done(())
    }
}

impl BlockDevice for Delayed {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn zeroes_quickly(&self) -> bool {
        self.inner.zeroes_quickly()
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        let inner = self.inner.clone().lane()?;
        Ok(Box::new(DelayedLane { device: self, inner }))
    }
}

struct DelayedLane {
    device: Arc<Delayed>,
    inner: Box<dyn Lane>,
}

impl Lane for DelayedLane {
    fn read(&mut self, offset_bytes: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        match self.device.pass(offset_bytes, into.len() as u64, manner) {
            Outcome::Done(()) => self.inner.read(offset_bytes, into, manner),
            Outcome::MustWait => Ok(Outcome::MustWait),
        }
    }

    fn write(&mut self, offset_bytes: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        match self.device.pass(offset_bytes, from.len() as u64, manner) {
            Outcome::Done(()) => self.inner.write(offset_bytes, from, manner),
            Outcome::MustWait => Ok(Outcome::MustWait),
        }
    }

    fn flush(&mut self, manner: Manner) -> Result<Outcome, DeviceError> {
        self.inner.flush(manner)
    }

    fn discard(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome, DeviceError> {
        match self.device.pass(offset_bytes, length_bytes, manner) {
            Outcome::Done(()) => self.inner.discard(offset_bytes, length_bytes, manner),
            Outcome::MustWait => Ok(Outcome::MustWait),
        }
    }

    fn write_zeroes(
        &mut self,
        offset_bytes: u64,
        length_bytes: u64,
        zeroes: Zeroes,
        manner: Manner,
    ) -> Result<Outcome, DeviceError> {
        match self.device.pass(offset_bytes, length_bytes, manner) {
            Outcome::Done(()) => self.inner.write_zeroes(offset_bytes, length_bytes, zeroes, manner),
            Outcome::MustWait => Ok(Outcome::MustWait),
        }
    }

    fn extent(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome<Extent>, DeviceError> {
        match self.device.pass(offset_bytes, length_bytes, manner) {
            Outcome::Done(()) => self.inner.extent(offset_bytes, length_bytes, manner),
            Outcome::MustWait => Ok(Outcome::MustWait),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::array::Array;

    #[test]
    fn a_slow_request_is_refused_at_once_and_takes_its_time_when_it_may() {
        let delay = Duration::from_millis(30);
        let delayed = Arc::new(Delayed::new(Arc::new(Array::new(16384).unwrap()), 4096..8192, delay));
        let mut lane = delayed.clone().lane().unwrap();
        assert_eq!(lane.write(8191, &[7; 2], Manner::AT_ONCE), Ok(Outcome::MustWait));
        assert_eq!(lane.write(8192, &[1; 1], Manner::AT_ONCE), Ok(Outcome::Done(())));
        assert_eq!(delayed.waited(), 0);
        let begun = Instant::now();
        assert_eq!(lane.write(8191, &[7; 2], Manner::WAITING), Ok(Outcome::Done(())));
        assert!(begun.elapsed() >= delay);
        assert_eq!(delayed.waited(), 1);
        let mut back = [0; 1];
        lane.read(8192, &mut back, Manner::AT_ONCE).unwrap();
        assert_eq!(back, [7]);
    }
}
