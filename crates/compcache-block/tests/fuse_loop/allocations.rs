//! Serving allocates nothing, fuser's part included: a counting allocator, and a device that says which threads serve.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use compcache_block::{BLOCK_BYTES, BlockDevice, DeviceError, Extent, Lane, Manner, Outcome, Zeroes};
use rustix::fs::{FallocateFlags, fallocate};

use crate::support::{Aligned, Served, can_serve};

/// Allocations of the threads that serve a device that counts them.
static COUNTED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static COUNTS: Cell<bool> = const { Cell::new(false) };
}

struct Counting;

fn count() {
    if COUNTS.try_with(Cell::get) == Ok(true) {
        COUNTED.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is handed on to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of this very function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Another device, with its flushes counted, and the allocations of the threads that serve it on request.
pub struct Spied {
    inner: Arc<dyn BlockDevice>,
    pub flushes: AtomicU64,
    counts_allocations: bool,
}

impl Spied {
    pub fn new(inner: Arc<dyn BlockDevice>) -> Spied {
        Spied { inner, flushes: AtomicU64::new(0), counts_allocations: false }
    }
}

impl BlockDevice for Spied {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        Ok(Box::new(SpiedLane { inner: self.inner.clone().lane()?, device: self }))
    }
}

struct SpiedLane {
    inner: Box<dyn Lane>,
    device: Arc<Spied>,
}

impl SpiedLane {
    /// From the thread's first request on, all it allocates counts.
    fn inner(&mut self) -> &mut dyn Lane {
        COUNTS.set(self.device.counts_allocations);
        &mut *self.inner
    }
}

impl Lane for SpiedLane {
    fn read(&mut self, offset_bytes: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.inner().read(offset_bytes, into, manner)
    }

    fn write(&mut self, offset_bytes: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.inner().write(offset_bytes, from, manner)
    }

    fn flush(&mut self, manner: Manner) -> Result<Outcome, DeviceError> {
        self.device.flushes.fetch_add(1, Ordering::SeqCst);
        self.inner().flush(manner)
    }

    fn discard(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome, DeviceError> {
        self.inner().discard(offset_bytes, length_bytes, manner)
    }

    fn write_zeroes(
        &mut self,
        offset_bytes: u64,
        length_bytes: u64,
        zeroes: Zeroes,
        manner: Manner,
    ) -> Result<Outcome, DeviceError> {
        self.inner().write_zeroes(offset_bytes, length_bytes, zeroes, manner)
    }

    fn extent(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome<Extent>, DeviceError> {
        self.inner().extent(offset_bytes, length_bytes, manner)
    }
}

#[test]
fn serving_allocates_nothing() {
    if !can_serve(&[]) {
        return;
    }
    let array = Arc::new(compcache_block::Array::new(4 << 20).unwrap());
    let spied = Spied { counts_allocations: true, ..Spied::new(array) };
    let served = Served::new(Arc::new(spied));
    let file = served.open();
    let mut bytes = Aligned::new(1 << 20);
    for round in 0..300u64 {
        let length = if round % 10 == 0 { 1 << 20 } else { BLOCK_BYTES };
        file.write_all_at(&bytes.get()[..length], round * 4096).unwrap();
        file.read_exact_at(&mut bytes.get()[..length], round * 4096).unwrap();
        if round % 10 == 5 {
            file.sync_all().unwrap();
            fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, round * 4096, 8192).unwrap();
        }
    }
    assert_eq!(COUNTED.load(Ordering::Relaxed), 0);
    drop(file);
    served.remove();
    // The counter counts: this thread allocates now.
    let before = COUNTED.load(Ordering::Relaxed);
    COUNTS.set(true);
    drop(std::hint::black_box(Box::new(1)));
    COUNTS.set(false);
    assert!(COUNTED.load(Ordering::Relaxed) > before);
}
