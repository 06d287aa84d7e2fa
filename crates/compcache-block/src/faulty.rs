//! A device that fails the requests it is told to fail, and passes on the others.
//!
//! Which of many it fails follows from a seed and from how many came before: with one thread, the same requests fail in
//! every run. A request that fails does nothing.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::device::{BlockDevice, Extent, Lane, Manner, Outcome, Request, Zeroes};
use crate::error::DeviceError;

/// Which requests fail, and how.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Requests of this kind.
    pub request: Request,
    /// Those that touch one of these bytes. A flush touches all.
    pub offsets_bytes: Range<u64>,
    /// One in so many of them; 1 is each.
    pub one_in: u64,
    /// What they fail with.
    pub errno: i32,
}

/// Fails chosen requests of another device, as nbdkit's error filter does.
pub struct Faulty {
    inner: Arc<dyn BlockDevice>,
    faults: Vec<Fault>,
    seed: u64,
    asked: AtomicU64,
    failed: AtomicU64,
}

impl Faulty {
    /// `inner`, with `faults` drawn from `seed`.
    pub fn new(inner: Arc<dyn BlockDevice>, seed: u64, faults: Vec<Fault>) -> Faulty {
        Faulty { inner, faults, seed, asked: AtomicU64::new(0), failed: AtomicU64::new(0) }
    }

    /// How many requests have been failed.
    pub fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    fn judge(&self, request: Request, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        for fault in self.faults.iter().filter(|fault| fault.request == request) {
            let bytes = &fault.offsets_bytes;
            let touches = request == Request::Flush
                || offset_bytes < bytes.end && bytes.start < offset_bytes.saturating_add(length_bytes);
            if touches && self.draw().is_multiple_of(fault.one_in.max(1)) {
                self.failed.fetch_add(1, Relaxed);
                return Err(DeviceError::Below { errno: fault.errno });
            }
        }
        Ok(())
    }

    /// # Source
    /// SplitMix64 (Steele, Lea and Flood, 2014).
    fn draw(&self) -> u64 {
        let turn = self.asked.fetch_add(1, Relaxed).wrapping_add(1);
        let word = self.seed.wrapping_add(turn.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }
}

impl BlockDevice for Faulty {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn zeroes_quickly(&self) -> bool {
        self.inner.zeroes_quickly()
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        let inner = self.inner.clone().lane()?;
        Ok(Box::new(FaultyLane { device: self, inner }))
    }
}

struct FaultyLane {
    device: Arc<Faulty>,
    inner: Box<dyn Lane>,
}

impl Lane for FaultyLane {
    fn read(&mut self, offset_bytes: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.device.judge(Request::Read, offset_bytes, into.len() as u64)?;
        self.inner.read(offset_bytes, into, manner)
    }

    fn write(&mut self, offset_bytes: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.device.judge(Request::Write, offset_bytes, from.len() as u64)?;
        self.inner.write(offset_bytes, from, manner)
    }

    fn flush(&mut self, manner: Manner) -> Result<Outcome, DeviceError> {
        self.device.judge(Request::Flush, 0, 0)?;
        self.inner.flush(manner)
    }

    fn discard(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome, DeviceError> {
        self.device.judge(Request::Discard, offset_bytes, length_bytes)?;
        self.inner.discard(offset_bytes, length_bytes, manner)
    }

    fn write_zeroes(
        &mut self,
        offset_bytes: u64,
        length_bytes: u64,
        zeroes: Zeroes,
        manner: Manner,
    ) -> Result<Outcome, DeviceError> {
        self.device.judge(Request::WriteZeroes, offset_bytes, length_bytes)?;
        self.inner.write_zeroes(offset_bytes, length_bytes, zeroes, manner)
    }

    fn extent(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome<Extent>, DeviceError> {
        self.device.judge(Request::Extent, offset_bytes, length_bytes)?;
        self.inner.extent(offset_bytes, length_bytes, manner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Array;

    fn failures(seed: u64, one_in: u64) -> Vec<bool> {
        let fault = Fault { request: Request::Read, offsets_bytes: 4096..8192, one_in, errno: 5 };
        let faulty = Arc::new(Faulty::new(Arc::new(Array::new(16384).unwrap()), seed, vec![fault]));
        let mut lane = faulty.lane().unwrap();
        (0..200).map(|_| lane.read(5000, &mut [0; 10], Manner::WAITING).is_err()).collect()
    }

    #[test]
    fn the_same_seed_fails_the_same_requests_and_about_as_many_as_told() {
        assert_eq!(failures(7, 4), failures(7, 4));
        assert_ne!(failures(7, 4), failures(8, 4));
        let failed = failures(7, 4).iter().filter(|failed| **failed).count();
        assert!((25..=75).contains(&failed), "{failed} of 200, where 50 were to fail");
        assert!(failures(7, 1).iter().all(|failed| *failed));
    }

    #[test]
    fn only_what_touches_the_range_fails_and_does_nothing() {
        let fault = Fault { request: Request::Write, offsets_bytes: 4096..8192, one_in: 1, errno: 28 };
        let array = Arc::new(Array::new(16384).unwrap());
        let faulty = Arc::new(Faulty::new(array, 1, vec![fault]));
        let mut lane = faulty.clone().lane().unwrap();
        assert_eq!(lane.write(4095, &[1; 2], Manner::WAITING), Err(DeviceError::Below { errno: 28 }));
        assert_eq!(lane.write(8192, &[1; 2], Manner::WAITING), Ok(Outcome::Done(())));
        assert_eq!(lane.write(0, &[0; 4096], Manner::WAITING), Ok(Outcome::Done(())));
        let mut back = [9; 2];
        lane.read(4095, &mut back, Manner::WAITING).unwrap();
        assert_eq!((back, faulty.failed()), ([0; 2], 1));
    }
}
