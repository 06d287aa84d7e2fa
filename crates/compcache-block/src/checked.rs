//! A device that remembers all that was written to another, and finds out when that one returns something else.
//!
//! For tests and for looking into trouble: it keeps a second copy of everything, and lets one request change the device at
//! a time (reads go side by side). What becomes of the blocks of a write that failed is not known, so they are not
//! checked until they are written or discarded whole; those of one that must wait, not until it was asked for again and is done. A device whose size changes is to be changed through
//! [`Checked::resize`]: what was cut off would be missed otherwise, and be called a lie.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use crate::device::{BLOCK_BYTES, BlockDevice, Extent, Lane, Manner, Outcome, Zeroes};
use crate::error::DeviceError;
use crate::range::Split;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Another device, all of whose answers are compared with what it was told, as behind nbdkit's checkwrite filter.
pub struct Checked {
    inner: Arc<dyn BlockDevice>,
    memory: RwLock<Memory>,
    lies: AtomicU64,
}

/// What the device ought to hold.
#[derive(Default)]
struct Memory {
    /// Reaches as far as anything was written; beyond are zeroes.
    bytes: Vec<u8>,
    unknown_blocks: HashSet<u64>,
    /// Requests that must wait, by offset and length: nobody knows what they have done so far.
    waiting: Vec<(u64, u64)>,
}

impl Checked {
    /// `inner`, which must read as zeroes throughout.
    pub fn new(inner: Arc<dyn BlockDevice>) -> Checked {
        Checked { inner, memory: RwLock::new(Memory::default()), lies: AtomicU64::new(0) }
    }

    /// How many requests have found a lie.
    pub fn lies(&self) -> u64 {
        self.lies.load(Relaxed)
    }

    /// Has `resize` make the device `size_bytes` large while nobody asks anything of it, and forgets what was cut off: where
    /// the device is as large again later, zeroes are expected.
    ///
    /// # Errors
    /// What `resize` says; everything is remembered.
    pub fn resize<E>(&self, size_bytes: u64, resize: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut memory = self.change();
        resize()?;
        memory.cut_off(size_bytes);
        Ok(())
    }

    fn change(&self) -> RwLockWriteGuard<'_, Memory> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn caught(&self, block: u64) -> DeviceError {
        self.lies.fetch_add(1, Relaxed);
        DeviceError::Lied { offset_bytes: block * BLOCK }
    }
}

impl Memory {
    /// The first block of which `bytes`, read at `offset_bytes`, says something else than was written.
    fn first_lie(&self, offset_bytes: u64, bytes: &[u8]) -> Option<u64> {
        let mut at = 0;
        while at < bytes.len() {
            let offset = offset_bytes + at as u64;
            let length = ((BLOCK - offset % BLOCK) as usize).min(bytes.len() - at);
            let told = &bytes[at..at + length];
            let known = self.bytes.get(offset as usize..).unwrap_or_default();
            let (kept, beyond) = told.split_at(length.min(known.len()));
            let honest = known.starts_with(kept) && beyond.iter().all(|byte| *byte == 0);
            if !honest && !self.is_unknown(offset / BLOCK) {
                return Some(offset / BLOCK);
            }
            at += length;
        }
        None
    }

    fn is_unknown(&self, block: u64) -> bool {
        let touches =
            |&(offset, length): &(u64, u64)| (offset / BLOCK..(offset + length).div_ceil(BLOCK)).contains(&block);
        self.unknown_blocks.contains(&block) || self.waiting.iter().any(touches)
    }

    fn reach(&mut self, end: u64) {
        if (self.bytes.len() as u64) < end {
            self.bytes.resize(end as usize, 0);
        }
    }

    fn cut_off(&mut self, size_bytes: u64) {
        self.bytes.truncate(usize::try_from(size_bytes).unwrap_or(usize::MAX));
        self.unknown_blocks.retain(|block| *block < size_bytes / BLOCK);
        self.waiting.retain(|(offset, _)| *offset < size_bytes);
    }

    fn wrote(&mut self, offset_bytes: u64, from: &[u8]) {
        self.reach(offset_bytes + from.len() as u64);
        self.bytes[offset_bytes as usize..][..from.len()].copy_from_slice(from);
        self.knows(offset_bytes, from.len() as u64);
    }

    fn zeroed(&mut self, offset_bytes: u64, length_bytes: u64) {
        let from = self.bytes.len().min(offset_bytes as usize);
        let to = self.bytes.len().min((offset_bytes + length_bytes) as usize);
        self.bytes[from..to].fill(0);
        self.knows(offset_bytes, length_bytes);
    }

    /// All of a block was determined, so it is known again.
    fn knows(&mut self, offset_bytes: u64, length_bytes: u64) {
        let whole = Split::new(offset_bytes, length_bytes).whole;
        self.unknown_blocks.retain(|block| !whole.contains(block));
        // Whoever had to wait may never ask again.
        let (start, end) = (whole.start * BLOCK, whole.end * BLOCK);
        self.waiting.retain(|&(offset, length)| offset < start || offset + length > end);
    }

    fn knows_not(&mut self, offset_bytes: u64, length_bytes: u64) {
        self.unknown_blocks.extend(offset_bytes / BLOCK..(offset_bytes + length_bytes).div_ceil(BLOCK));
    }

    /// Takes down what became of a request that changes something.
    fn note(
        &mut self,
        outcome: &Result<Outcome, DeviceError>,
        offset_bytes: u64,
        length_bytes: u64,
        done: impl FnOnce(&mut Memory),
    ) {
        let request = (offset_bytes, length_bytes);
        // Asked for again, if it had to wait.
        if let Some(before) = self.waiting.iter().position(|waiting| *waiting == request) {
            self.waiting.swap_remove(before);
        }
        match outcome {
            Ok(Outcome::Done(())) => done(self),
            Err(DeviceError::BeyondEnd { .. }) => {}
            Ok(Outcome::MustWait) => self.waiting.push(request),
            Err(_) => self.knows_not(offset_bytes, length_bytes),
        }
    }
}

impl BlockDevice for Checked {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn zeroes_quickly(&self) -> bool {
        self.inner.zeroes_quickly()
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        let inner = self.inner.clone().lane()?;
        Ok(Box::new(CheckedLane { device: self, inner }))
    }
}

struct CheckedLane {
    device: Arc<Checked>,
    inner: Box<dyn Lane>,
}

impl Lane for CheckedLane {
    fn read(&mut self, offset_bytes: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        let memory = self.device.memory.read().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.inner.read(offset_bytes, into, manner)?;
        match memory.first_lie(offset_bytes, into) {
            Some(block) if outcome == Outcome::Done(()) => Err(self.device.caught(block)),
            _ => Ok(outcome),
        }
    }

    fn write(&mut self, offset_bytes: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        let mut memory = self.device.change();
        let outcome = self.inner.write(offset_bytes, from, manner);
        memory.note(&outcome, offset_bytes, from.len() as u64, |memory| memory.wrote(offset_bytes, from));
        outcome
    }

    fn flush(&mut self, manner: Manner) -> Result<Outcome, DeviceError> {
        self.inner.flush(manner)
    }

    fn discard(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome, DeviceError> {
        let mut memory = self.device.change();
        let outcome = self.inner.discard(offset_bytes, length_bytes, manner);
        memory.note(&outcome, offset_bytes, length_bytes, |memory| {
            let split = Split::new(offset_bytes, length_bytes);
            memory.zeroed(split.whole.start * BLOCK, split.whole_bytes());
        });
        outcome
    }

    fn write_zeroes(
        &mut self,
        offset_bytes: u64,
        length_bytes: u64,
        zeroes: Zeroes,
        manner: Manner,
    ) -> Result<Outcome, DeviceError> {
        let mut memory = self.device.change();
        let outcome = self.inner.write_zeroes(offset_bytes, length_bytes, zeroes, manner);
        memory.note(&outcome, offset_bytes, length_bytes, |memory| memory.zeroed(offset_bytes, length_bytes));
        outcome
    }

    /// A hole must read as zeroes; that there is none where nothing was written is no lie.
    fn extent(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome<Extent>, DeviceError> {
        let memory = self.device.memory.read().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.inner.extent(offset_bytes, length_bytes, manner)?;
        if let Outcome::Done(Extent { length_bytes, is_hole: true }) = outcome {
            let from = memory.bytes.len().min(offset_bytes as usize);
            let to = memory.bytes.len().min((offset_bytes + length_bytes) as usize);
            let known = |byte: &usize| !memory.is_unknown(*byte as u64 / BLOCK);
            if let Some(byte) = (from..to).filter(|byte| memory.bytes[*byte] != 0).find(known) {
                return Err(self.device.caught(byte as u64 / BLOCK));
            }
        }
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Array;
    use crate::device::Request;
    use crate::faulty::{Fault, Faulty};

    const WAITING: Manner = Manner::WAITING;

    #[test]
    fn a_changed_byte_is_caught_and_named() {
        let array = Arc::new(Array::new(1 << 20).unwrap());
        let checked = Arc::new(Checked::new(array.clone()));
        let mut lane = checked.clone().lane().unwrap();
        lane.write(100, &[7; 10_000], WAITING).unwrap();
        let mut back = vec![0; 20_000];
        assert_eq!(lane.read(0, &mut back, WAITING), Ok(Outcome::Done(())));
        array.lane().unwrap().write(9000, &[8], WAITING).unwrap();
        assert_eq!(lane.read(0, &mut back, WAITING), Err(DeviceError::Lied { offset_bytes: 8192 }));
        assert_eq!(lane.read(0, &mut back[..8192], WAITING), Ok(Outcome::Done(())));
        assert_eq!(checked.lies(), 1);
    }

    #[test]
    fn bytes_that_were_never_written_are_checked_too() {
        let array = Arc::new(Array::new(1 << 20).unwrap());
        let mut lane = Arc::new(Checked::new(array.clone())).lane().unwrap();
        array.lane().unwrap().write(65536, &[8], WAITING).unwrap();
        assert_eq!(lane.read(65000, &mut [0; 1000], WAITING), Err(DeviceError::Lied { offset_bytes: 65536 }));
    }

    #[test]
    fn what_a_failed_write_left_behind_is_not_held_against_the_device() {
        let array = Arc::new(Array::new(1 << 20).unwrap());
        let fault = Fault { request: Request::Write, offsets_bytes: 0..4096, one_in: 1, errno: 5 };
        let mut lane = Arc::new(Checked::new(Arc::new(Faulty::new(array.clone(), 1, vec![fault])))).lane().unwrap();
        assert!(lane.write(0, &[7; 4096], WAITING).is_err());
        array.clone().lane().unwrap().write(0, &[7; 100], WAITING).unwrap();
        assert_eq!(lane.read(0, &mut [0; 4096], WAITING), Ok(Outcome::Done(())));
        lane.discard(0, 4096, WAITING).unwrap();
        array.lane().unwrap().write(0, &[7; 100], WAITING).unwrap();
        assert_eq!(lane.read(0, &mut [0; 4096], WAITING), Err(DeviceError::Lied { offset_bytes: 0 }));
    }

    #[test]
    fn what_a_write_left_alone_that_had_to_wait_is_checked_again_when_it_is_done() {
        let mut memory = Memory::default();
        memory.wrote(0, &[7; 8192]);
        memory.note(&Ok(Outcome::MustWait), 100, 200, |_| unreachable!());
        assert_eq!(memory.first_lie(0, &[8; 4096]), None);
        assert_eq!(memory.first_lie(4096, &[8; 4096]), Some(1));
        memory.note(&Ok(Outcome::Done(())), 100, 200, |memory| memory.wrote(100, &[9; 200]));
        assert_eq!(memory.first_lie(0, &[7; 4096]), Some(0));
    }

    #[test]
    fn what_was_cut_off_is_expected_to_be_gone_and_nothing_else() {
        let array = Arc::new(Array::new(1 << 20).unwrap());
        let checked = Arc::new(Checked::new(array.clone()));
        let mut lane = checked.clone().lane().unwrap();
        lane.write(0, &[7; 1 << 20], WAITING).unwrap();
        assert!(checked.resize(4097, || array.resize(4097)).is_err(), "no size for a device");
        checked.resize(1 << 19, || array.resize(1 << 19)).unwrap();
        checked.resize(1 << 20, || array.resize(1 << 20)).unwrap();
        let mut back = vec![9; 1 << 20];
        assert_eq!(lane.read(0, &mut back, WAITING), Ok(Outcome::Done(())));
        // One that keeps what was cut off lies, and so does one that loses more than that.
        array.clone().lane().unwrap().write(1 << 19, &[7; 4096], WAITING).unwrap();
        assert_eq!(lane.read(0, &mut back, WAITING), Err(DeviceError::Lied { offset_bytes: 1 << 19 }));
        array.lane().unwrap().discard((1 << 19) - 4096, 8192, WAITING).unwrap();
        assert_eq!(lane.read(0, &mut back, WAITING), Err(DeviceError::Lied { offset_bytes: (1 << 19) - 4096 }));
    }
}
