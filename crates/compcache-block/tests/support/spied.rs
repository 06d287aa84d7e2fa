//! A device that notes what is asked of it, and counts what the threads that serve it allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use compcache_block::{BlockDevice, DeviceError, Extent, Lane, Manner, Outcome, Zeroes};

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

/// Another device, with its flushes and its forced writes counted, its longest reads and writes noted, and the allocations of
/// the threads that serve it counted on request.
pub struct Spied {
    inner: Arc<dyn BlockDevice>,
    pub flushes: AtomicU64,
    pub forced: AtomicU64,
    pub longest_read_bytes: AtomicU64,
    pub longest_write_bytes: AtomicU64,
    needs_flush: bool,
    counts_allocations: bool,
}

/// How much the threads allocated that serve devices which count it.
pub fn allocated() -> u64 {
    COUNTED.load(Ordering::Relaxed)
}

/// Shows that the counting works: this thread allocates.
pub fn assert_counting_works() {
    let before = allocated();
    COUNTS.set(true);
    drop(std::hint::black_box(Box::new(1)));
    COUNTS.set(false);
    assert!(allocated() > before);
}

impl Spied {
    /// With what the threads that serve it allocate counted, from the first request of each on. Needs a flush if `inner` does.
    pub fn counting(inner: Arc<dyn BlockDevice>) -> Spied {
        Spied { counts_allocations: true, needs_flush: inner.needs_flush(), ..Spied::new(inner) }
    }

    pub fn new(inner: Arc<dyn BlockDevice>) -> Spied {
        let zero = || AtomicU64::new(0);
        Spied {
            inner,
            flushes: zero(),
            forced: zero(),
            longest_read_bytes: zero(),
            longest_write_bytes: zero(),
            needs_flush: true,
            counts_allocations: false,
        }
    }

    /// One that says that it has nothing to flush.
    pub fn lasting(inner: Arc<dyn BlockDevice>) -> Spied {
        Spied { needs_flush: false, ..Spied::new(inner) }
    }
}

impl BlockDevice for Spied {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn needs_flush(&self) -> bool {
        self.needs_flush
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
        self.device.longest_read_bytes.fetch_max(into.len() as u64, Ordering::SeqCst);
        self.inner().read(offset_bytes, into, manner)
    }

    fn write(&mut self, offset_bytes: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.device.forced.fetch_add(manner.fua.into(), Ordering::SeqCst);
        self.device.longest_write_bytes.fetch_max(from.len() as u64, Ordering::SeqCst);
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
