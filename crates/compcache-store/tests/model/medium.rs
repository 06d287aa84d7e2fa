//! A medium in memory, and everything that can go wrong with one.

#![allow(dead_code, reason = "each test program uses its part")]

use std::sync::{Arc, Mutex};

use compcache_store::{BackingConfig, Medium, MediumError};

/// How often something goes wrong: once in so many calls; zero is never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// A write fails, having written a part or nothing.
    pub failed_writes: u32,
    pub failed_reads: u32,
    /// A write succeeds, having written a part.
    pub torn: u32,
    /// A write succeeds, somewhere else.
    pub misdirected: u32,
    /// A write succeeds, having done nothing.
    pub lost: u32,
    /// A bit of what is read is another.
    pub flipped: u32,
    /// There is no room from here on.
    pub room_bytes: u64,
}

impl Faults {
    pub const NONE: Faults = Faults {
        failed_writes: 0,
        failed_reads: 0,
        torn: 0,
        misdirected: 0,
        lost: 0,
        flipped: 0,
        room_bytes: u64::MAX,
    };

    pub const ALL: [Faults; 8] = [
        Faults { failed_writes: 3, ..Faults::NONE },
        Faults { failed_reads: 3, ..Faults::NONE },
        Faults { room_bytes: 5 * (64 << 10), ..Faults::NONE },
        Faults { torn: 10, ..Faults::NONE },
        Faults { misdirected: 10, ..Faults::NONE },
        Faults { lost: 10, ..Faults::NONE },
        Faults { flipped: 20, ..Faults::NONE },
        Faults { failed_writes: 5, failed_reads: 5, torn: 20, misdirected: 20, lost: 20, flipped: 50, ..Faults::NONE },
    ];

    /// Whether what is read may be something else than what was written, and nothing is said.
    pub fn lies(&self) -> bool {
        self.torn + self.misdirected + self.lost + self.flipped > 0
    }
}

/// What a medium was asked, and did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Did {
    pub writes: u64,
    pub overwritten: u64,
    pub reads: u64,
    pub punches: u64,
    /// Calls that a fault struck.
    pub struck: u64,
    /// The longest write and read, in bytes.
    pub longest_write: usize,
    pub longest_read: usize,
}

struct Inside {
    bytes: Vec<u8>,
    faults: Faults,
    rng: fastrand::Rng,
    did: Did,
}

/// The medium, as a test sees it while a backing has it.
pub struct Memory(Mutex<Inside>);

struct Handle(Arc<Memory>);

/// Segments of 64 or 128 KiB, 4 to 100 of them.
pub fn config(seed: u64) -> BackingConfig {
    let segment_bytes = (64 << 10) << (seed % 2);
    let segments = [4, 9, 24, 100][seed as usize / 2 % 4];
    BackingConfig { capacity_bytes: segments * segment_bytes as u64, segment_bytes }
}

impl Memory {
    pub fn new(seed: u64, faults: Faults) -> Arc<Memory> {
        let rng = fastrand::Rng::with_seed(seed);
        Arc::new(Memory(Mutex::new(Inside { bytes: Vec::new(), faults, rng, did: Did::default() })))
    }

    pub fn medium(self: &Arc<Self>) -> Box<dyn Medium> {
        Box::new(Handle(self.clone()))
    }

    pub fn set_faults(&self, faults: Faults) {
        self.0.lock().unwrap().faults = faults;
    }

    pub fn did(&self) -> Did {
        self.0.lock().unwrap().did
    }

    /// Lets `change` at the bytes.
    pub fn with_bytes<T>(&self, change: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        change(&mut self.0.lock().unwrap().bytes)
    }
}

impl Inside {
    fn strikes(&mut self, one_in: u32) -> bool {
        let strikes = one_in > 0 && self.rng.u32(0..one_in) == 0;
        self.did.struck += u64::from(strikes);
        strikes
    }

    fn store(&mut self, at: usize, from: &[u8]) {
        if self.bytes.len() < at + from.len() {
            self.bytes.resize(at + from.len(), 0);
        }
        self.did.overwritten += u64::from(self.bytes[at..at + from.len()].iter().any(|byte| *byte != 0));
        self.bytes[at..at + from.len()].copy_from_slice(from);
    }
}

impl Medium for Handle {
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError> {
        let mut inside = self.0.0.lock().unwrap();
        assert!(is_aligned(offset_bytes, into));
        inside.did.reads += 1;
        inside.did.longest_read = inside.did.longest_read.max(into.len());
        let faults = inside.faults;
        if inside.strikes(faults.failed_reads) {
            into.fill(0x77);
            return Err(MediumError::System { errno: 5 });
        }
        let at = offset_bytes as usize;
        let there = inside.bytes.get(at..at + into.len()).ok_or(MediumError::Short)?;
        into.copy_from_slice(there);
        if inside.strikes(faults.flipped) {
            let bit = inside.rng.usize(0..into.len() * 8);
            into[bit / 8] ^= 1 << (bit % 8);
        }
        Ok(())
    }

    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError> {
        let mut inside = self.0.0.lock().unwrap();
        assert!(is_aligned(offset_bytes, from));
        inside.did.writes += 1;
        inside.did.longest_write = inside.did.longest_write.max(from.len());
        let (faults, at) = (inside.faults, offset_bytes as usize);
        let part = inside.rng.usize(0..from.len() / 512) * 512;
        if offset_bytes + from.len() as u64 > faults.room_bytes {
            inside.did.struck += 1;
            return Err(MediumError::NoSpace);
        }
        if inside.strikes(faults.failed_writes) {
            inside.store(at, &from[..part]);
            return Err(MediumError::System { errno: 5 });
        }
        // Whatever is written, a file is as long as if all of it had been.
        let length = inside.bytes.len().max(at + from.len());
        inside.bytes.resize(length, 0);
        match () {
            () if inside.strikes(faults.torn) => inside.store(at, &from[..part]),
            () if inside.strikes(faults.misdirected) => {
                let elsewhere = inside.rng.usize(0..length / 4096) * 4096;
                inside.store(elsewhere.min(length - from.len()), from);
            }
            () if inside.strikes(faults.lost) => {}
            () => inside.store(at, from),
        }
        Ok(())
    }

    fn punch(&self, offset_bytes: u64, length_bytes: u64) {
        let mut inside = self.0.0.lock().unwrap();
        inside.did.punches += 1;
        let (at, end) = (offset_bytes as usize, (offset_bytes + length_bytes) as usize);
        if end <= inside.bytes.len() {
            inside.bytes[at..end].fill(0);
        }
    }
}

/// What direct input and output ask for.
fn is_aligned(offset_bytes: u64, bytes: &[u8]) -> bool {
    [offset_bytes as usize, bytes.as_ptr() as usize, bytes.len()].iter().all(|number| number % 4096 == 0)
}
