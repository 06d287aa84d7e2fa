//! Serving a request allocates nothing: neither a lane, nor a connection once it is served.
//!
//! The allocator of this test program counts, for all threads but the one that runs the tests; so it has one test.

#![allow(unsafe_code)]

#[path = "conformance/client.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod client;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use client::Client;
use compcache_block::nbd::{Export, Listen, NbdServer};
use compcache_block::{BlockDevice, Cached, Disk, Lane, Manner, Origin, Outcome, Zeroes};
use compcache_store::{Codec, PoolConfig, Store, StoreConfig};
use rustix::process::getpid;
use rustix::thread::gettid;

static COUNTING: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicU64 = AtomicU64::new(0);
/// The thread that runs the test.
static OURS: AtomicI32 = AtomicI32::new(0);

struct Counting;

#[global_allocator]
static COUNTING_ALLOCATOR: Counting = Counting;

fn count() {
    if !COUNTING.load(Relaxed) {
        return;
    }
    // The program's first thread starts the one that runs the test, and may still be writing that down.
    let thread = gettid();
    if thread != getpid() || thread.as_raw_pid() == OURS.load(Relaxed) {
        CALLS.fetch_add(1, Relaxed);
    }
}

// SAFETY: passes everything on to the system's allocator, whose contract it thereby keeps.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as for `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: as for `alloc`.
        unsafe { System.realloc(old, layout, bytes) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as for `alloc`.
        unsafe { System.dealloc(old, layout) }
    }
}

/// How often something was allocated while `work` was done.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = CALLS.load(Relaxed);
    COUNTING.store(true, Relaxed);
    work();
    COUNTING.store(false, Relaxed);
    CALLS.load(Relaxed) - before
}

fn use_lane(lane: &mut dyn Lane, buffer: &mut [u8]) {
    for at in 0..200u64 {
        buffer.iter_mut().enumerate().for_each(|(byte, value)| *value = (at as usize * byte / 7) as u8);
        let offset = at * 5000;
        lane.write(offset, buffer, Manner::AT_ONCE).unwrap();
        lane.read(offset + 1, buffer, Manner::AT_ONCE).unwrap();
        lane.write_zeroes(offset, 9000, Zeroes::AreData, Manner::AT_ONCE).unwrap();
        lane.write_zeroes(offset, 9000, Zeroes::MayBeHoles, Manner::AT_ONCE).unwrap();
        lane.extent(0, 1 << 24, Manner::AT_ONCE).unwrap();
        lane.discard(offset, 1 << 20, Manner::AT_ONCE).unwrap();
        lane.flush(Manner::AT_ONCE).unwrap();
        lane.read(1 << 30, buffer, Manner::AT_ONCE).unwrap_err();
    }
}

/// Reads what is in the pool.
fn find(lane: &mut dyn Lane, buffer: &mut [u8]) {
    for at in 0..200u64 {
        assert_eq!(lane.read(at * 5000, buffer, Manner::AT_ONCE), Ok(Outcome::Done(())));
    }
}

/// What drops blocks from the pool.
fn write_through(lane: &mut dyn Lane, buffer: &[u8]) {
    for at in 0..50u64 {
        let offset = at * 20_000;
        lane.write(offset, buffer, Manner { may_wait: true, fua: at % 2 == 0 }).unwrap();
        lane.write_zeroes(offset + 100, 9000, Zeroes::AreData, Manner::WAITING).unwrap();
        lane.discard(offset, 1 << 20, Manner::WAITING).unwrap();
        lane.flush(Manner::WAITING).unwrap();
    }
}

/// Asks for one thing after the other; `buffer` takes the replies.
fn use_connection(client: &mut Client, buffer: &mut [u8]) {
    for at in 0..200u64 {
        let mut ask = |command: u16, length: u32, payload: usize, reply: usize| {
            let request = client::request(0, command, at, at * 5000, length);
            client.stream.write_all(&request).unwrap();
            client.stream.write_all(&buffer[..payload]).unwrap();
            client.stream.read_exact(&mut buffer[..reply]).unwrap();
        };
        ask(client::WRITE, 70_000, 70_000, 16);
        ask(client::READ, 70_000, 0, 28 + 70_000);
        ask(client::BLOCK_STATUS, 4096, 0, 32);
        ask(client::TRIM, 1 << 20, 0, 16);
        ask(client::WRITE_ZEROES, 10_000, 0, 16);
    }
}

#[test]
fn serving_a_request_allocates_nothing() {
    OURS.store(gettid().as_raw_pid(), Relaxed);
    let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
    let disk = Arc::new(Disk::new(store.create_pool(PoolConfig::default()).unwrap(), 1 << 24).unwrap());
    assert!(allocations(|| drop(vec![1u8; 100])) > 0, "the counting does not work");

    let mut lane = disk.clone().lane().unwrap();
    let mut buffer = vec![0; 100_000];
    assert_eq!(allocations(|| use_lane(&mut *lane, &mut buffer)), 0, "by a lane");

    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4 << 20).unwrap();
    let origin = Arc::new(Origin::open(file.path()).unwrap());
    let cached = Arc::new(Cached::new(origin, 16 << 20, Codec::Lz4).unwrap());
    let mut worker = cached.cache().worker().unwrap();
    cached.cache().keep_written(&mut worker, Duration::ZERO);
    let mut through = cached.clone().lane().unwrap();
    through.read(0, &mut vec![0; 4 << 20], Manner::WAITING).unwrap();
    assert_eq!(allocations(|| find(&mut *through, &mut buffer)), 0, "where blocks are found");
    assert_eq!(allocations(|| write_through(&mut *through, &buffer)), 0, "where they are written");
    cached.cache().keep_written(&mut worker, Duration::ZERO);
    assert!(cached.cache().stats().failed_puts > 0, "there were buffers for all of it");

    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd");
    let export = Export { name: "disk".into(), device: disk, read_only: false };
    let server = NbdServer::start(&Listen::Unix(socket.clone()), vec![export]).unwrap();
    let mut client = Client::connect(&socket, "disk", true).unwrap();
    // A connection takes memory for the largest request yet, and keeps it.
    use_connection(&mut client, &mut buffer);
    assert_eq!(allocations(|| use_connection(&mut client, &mut buffer)), 0, "by a connection");
    drop(server);
}
