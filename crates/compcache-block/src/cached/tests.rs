use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use compcache_store::Page;

use super::*;
use crate::array::Array;
use crate::device::{Extent, Manner, Outcome, Request, Zeroes};
use crate::faulty::{Fault, Faulty};

const BLOCK: u64 = BLOCK_BYTES as u64;
const SIZE_BYTES: u64 = 8 << 20;
const WAITING: Manner = Manner::WAITING;
const DONE: Result<Outcome, DeviceError> = Ok(Outcome::Done(()));

fn cached(below: Arc<dyn BlockDevice>) -> Arc<Cached> {
    Arc::new(Cached::new(below, 16 << 20, Codec::Lz4).unwrap())
}

fn array() -> Arc<Array> {
    Arc::new(Array::new(SIZE_BYTES).unwrap())
}

/// What a block holds in its version: compressible, and like no other.
fn content(block: u64, version: u64) -> Page {
    let mut bytes = [0; BLOCK_BYTES];
    fastrand::Rng::with_seed(block << 32 ^ version).fill(&mut bytes[..500]);
    bytes
}

fn read(lane: &mut Box<dyn Lane>, block: u64) -> Page {
    let mut page = [0xaa; BLOCK_BYTES];
    assert_eq!(lane.read(block * BLOCK, &mut page, WAITING), DONE);
    page
}

/// Stops in each read after it has read, and in each write before it writes, until it is let go on.
struct Gated {
    below: Arc<Array>,
    is_read: bool,
    arrived: SyncSender<()>,
    go_on: Mutex<Receiver<()>>,
}

struct GatedLane(Arc<Gated>, Box<dyn Lane>);

impl Gated {
    /// The device, what says that a request has arrived, and what lets it go on.
    fn new(below: Arc<Array>, is_read: bool) -> (Arc<Gated>, Receiver<()>, SyncSender<()>) {
        let ((arrived, arrival), (let_go, go_on)) = (sync_channel(1), sync_channel(1));
        (Arc::new(Gated { below, is_read, arrived, go_on: Mutex::new(go_on) }), arrival, let_go)
    }

    fn stop(&self) {
        self.arrived.send(()).unwrap();
        self.go_on.lock().unwrap().recv().unwrap();
    }
}

impl BlockDevice for Gated {
    fn size_bytes(&self) -> u64 {
        self.below.size_bytes()
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        let lane = self.below.clone().lane()?;
        Ok(Box::new(GatedLane(self, lane)))
    }
}

impl Lane for GatedLane {
    fn read(&mut self, offset: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        let read = self.1.read(offset, into, manner);
        if self.0.is_read {
            self.0.stop();
        }
        read
    }

    fn write(&mut self, offset: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        if !self.0.is_read {
            self.0.stop();
        }
        self.1.write(offset, from, manner)
    }

    fn flush(&mut self, manner: Manner) -> Result<Outcome, DeviceError> {
        self.1.flush(manner)
    }

    fn discard(&mut self, offset: u64, length: u64, manner: Manner) -> Result<Outcome, DeviceError> {
        self.1.discard(offset, length, manner)
    }

    fn write_zeroes(&mut self, at: u64, length: u64, zeroes: Zeroes, how: Manner) -> Result<Outcome, DeviceError> {
        self.1.write_zeroes(at, length, zeroes, how)
    }

    fn extent(&mut self, offset: u64, length: u64, manner: Manner) -> Result<Outcome<Extent>, DeviceError> {
        self.1.extent(offset, length, manner)
    }
}

#[test]
fn what_was_read_is_found_again_without_asking_below_and_at_once() {
    let disk = cached(array());
    let mut lane = disk.clone().lane().unwrap();
    let data: Vec<u8> = (0..768).flat_map(|block| content(block, 1)).collect();
    assert_eq!(lane.write(0, &data, WAITING), DONE);
    let mut back = vec![0; data.len()];
    assert_eq!(lane.read(0, &mut back, Manner::AT_ONCE), Ok(Outcome::MustWait), "nothing is kept of what was written");
    assert_eq!(lane.read(0, &mut back, WAITING), DONE);
    assert!(back == data && disk.below_stats().blocks_read == 768, "{:?}", disk.below_stats());
    back.fill(0);
    assert_eq!(lane.read(0, &mut back, Manner::AT_ONCE), DONE);
    let (offset, length) = (5000, 2_000_000);
    let mut part = vec![0; length];
    assert_eq!(lane.read(offset as u64, &mut part, Manner::AT_ONCE), DONE);
    assert!(back == data && part == data[offset..offset + length]);
    assert_eq!(disk.below_stats().blocks_read, 768);
    assert_eq!(lane.read(767 * BLOCK, &mut [0; 8192], Manner::AT_ONCE), Ok(Outcome::MustWait));
    assert!(disk.cache().stats().hit_percent() > 40, "{:?}", disk.cache().stats());
}

#[test]
fn what_was_written_is_found_again_without_asking_below() {
    let disk = cached(array());
    let mut worker = disk.cache().worker().unwrap();
    let mut keep = || disk.cache().keep_written(&mut worker, Duration::ZERO);
    keep();
    let mut lane = disk.clone().lane().unwrap();
    // Over a border of megabytes, with a part of a block at each end.
    let data: Vec<u8> = (0..40).flat_map(|block| content(block, 1)).collect();
    let (offset, whole) = (250 * BLOCK + 100, 251 * BLOCK..290 * BLOCK);
    assert_eq!(lane.write(offset, &data, WAITING), DONE);
    keep();
    let mut back = vec![0; (whole.end - whole.start) as usize];
    assert_eq!(lane.read(whole.start, &mut back, Manner::AT_ONCE), DONE);
    assert!(back == data[(whole.start - offset) as usize..][..back.len()]);
    assert_eq!(disk.cache().stats().pages_stored, 39);
    assert_eq!(lane.read(250 * BLOCK, &mut [0; BLOCK_BYTES], Manner::AT_ONCE), Ok(Outcome::MustWait), "a part of it");
    // Half a block over what is kept, a discard of another, zeroes over a third.
    lane.write(260 * BLOCK, &[7; 2048], WAITING).unwrap();
    lane.discard(261 * BLOCK, BLOCK, WAITING).unwrap();
    lane.write_zeroes(262 * BLOCK, BLOCK, Zeroes::AreData, WAITING).unwrap();
    keep();
    assert_eq!(disk.cache().stats().pages_stored, 36);
    assert!(read(&mut lane, 260)[..2048] == [7; 2048] && read(&mut lane, 261) == [0; BLOCK_BYTES]);
}

#[test]
fn a_read_that_a_write_overtakes_keeps_nothing_old() {
    let below = array();
    below.clone().lane().unwrap().write(0, &content(0, 1), WAITING).unwrap();
    let (gated, arrival, let_go) = Gated::new(below, true);
    let disk = cached(gated);
    // A neighbour is there, so that the cache knows the megabyte before the write and after it.
    let_go.send(()).unwrap();
    read(&mut disk.clone().lane().unwrap(), 7);
    arrival.recv().unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&mut disk.clone().lane().unwrap(), 0));
        // It has the old block in its hands, and the cache does not have it yet.
        arrival.recv().unwrap();
        assert_eq!(disk.clone().lane().unwrap().write(0, &content(0, 2), WAITING), DONE);
        let_go.send(()).unwrap();
        assert!(reader.join().unwrap() == content(0, 1), "it may have either");
    });
    assert_eq!(disk.cache().stats().pages_stored, 1, "the old block was kept, or its neighbour was not");
    let_go.send(()).unwrap();
    assert!(read(&mut disk.clone().lane().unwrap(), 0) == content(0, 2));
}

#[test]
fn what_is_read_while_a_write_is_under_way_is_not_kept() {
    let below = array();
    let (gated, arrival, let_go) = Gated::new(below, false);
    let disk = cached(gated);
    let mut lane = disk.clone().lane().unwrap();
    assert!(read(&mut lane, 3) == [0; BLOCK_BYTES], "kept");
    thread::scope(|scope| {
        let writer = scope.spawn(|| disk.clone().lane().unwrap().write(3 * BLOCK + 100, b"new", WAITING));
        arrival.recv().unwrap();
        assert!(read(&mut lane, 3) == [0; BLOCK_BYTES]);
        assert_eq!(disk.cache().stats().pages_stored, 0);
        let_go.send(()).unwrap();
        assert_eq!(writer.join().unwrap(), DONE);
    });
    assert_eq!(&read(&mut lane, 3)[100..103], b"new");
}

#[test]
fn what_the_device_below_refused_is_not_in_the_pool() {
    let below = array();
    let fault = |request| Fault { request, offsets_bytes: 0..4096, one_in: 1, errno: 5 };
    let disk = cached(Arc::new(Faulty::new(below, 1, vec![fault(Request::Write), fault(Request::WriteZeroes)])));
    let mut lane = disk.clone().lane().unwrap();
    lane.write(BLOCK, &content(1, 1), WAITING).unwrap();
    for block in 0..2 {
        read(&mut lane, block);
    }
    assert_eq!(lane.write(100, b"refused", WAITING), Err(DeviceError::Below { errno: 5 }));
    assert_eq!(lane.write_zeroes(0, 4096, Zeroes::AreData, WAITING), Err(DeviceError::Below { errno: 5 }));
    assert_eq!(disk.cache().stats().pages_stored, 1, "the other block");
    assert!(read(&mut lane, 0) == [0; BLOCK_BYTES] && read(&mut lane, 1) == content(1, 1));
    assert_eq!(disk.below_stats().failed, 2);
}

#[test]
fn a_block_that_cannot_be_read_below_hurts_nobody_while_it_is_in_the_pool() {
    let fault = Fault { request: Request::Read, offsets_bytes: 5 * BLOCK..6 * BLOCK, one_in: 1, errno: 5 };
    let disk = cached(Arc::new(Faulty::new(array(), 1, vec![fault])));
    let mut lane = disk.clone().lane().unwrap();
    let mut worker = disk.cache().worker().unwrap();
    disk.cache().keep_written(&mut worker, Duration::ZERO);
    for block in [5, 2, 9] {
        assert_eq!(lane.write(block * BLOCK, &content(block, 1), WAITING), DONE);
    }
    disk.cache().keep_written(&mut worker, Duration::ZERO);
    let mut blocks = vec![0xaa; 12 * BLOCK_BYTES];
    assert_eq!(lane.read(0, &mut blocks, WAITING), DONE);
    for (block, bytes) in (0..).zip(blocks.as_chunks::<BLOCK_BYTES>().0) {
        let expected = if [5, 2, 9].contains(&block) { content(block, 1) } else { [0; BLOCK_BYTES] };
        assert!(*bytes == expected, "block {block}");
    }
    assert!(disk.below_stats().failed > 0, "it was read along");
    let stats = disk.cache().stats();
    assert_eq!(stats.succ_gets + stats.failed_gets, 12, "each block was asked for once");
    disk.cache().clear();
    assert!(lane.read(0, &mut blocks, WAITING).is_err());
    assert_eq!(lane.read(0, &mut blocks[..5 * BLOCK_BYTES], WAITING), DONE);
}

#[test]
fn after_a_flush_that_failed_everything_is_read_anew() {
    for request in [Request::Flush, Request::Write, Request::Discard, Request::WriteZeroes] {
        let fault = Fault { request, offsets_bytes: 4096..8192, one_in: 1, errno: 5 };
        let disk = cached(Arc::new(Faulty::new(array(), 1, vec![fault])));
        let mut worker = disk.cache().worker().unwrap();
        disk.cache().keep_written(&mut worker, Duration::ZERO);
        let mut lane = disk.clone().lane().unwrap();
        read(&mut lane, 300);
        lane.write(400 * BLOCK, &content(400, 1), WAITING).unwrap();
        assert_eq!(disk.cache().stats().pages_stored, 1);
        let forced = Manner { fua: true, ..WAITING };
        let failed = match request {
            Request::Write => lane.write(4096, &[1; 4096], forced),
            Request::Discard => lane.discard(4096, 4096, forced),
            Request::WriteZeroes => lane.write_zeroes(4096, 4096, Zeroes::MayBeHoles, forced),
            _ => lane.flush(WAITING),
        };
        assert_eq!(failed, Err(DeviceError::Below { errno: 5 }));
        disk.cache().keep_written(&mut worker, Duration::ZERO);
        assert_eq!(disk.cache().stats().pages_stored, 0);
    }
}

#[test]
fn the_limit_changes_while_lanes_are_at_work_and_no_byte_is_wrong() {
    const BLOCKS: u64 = SIZE_BYTES / BLOCK;
    let disk = cached(array());
    let (cache, worker) = (Arc::downgrade(disk.cache()), disk.cache().worker().unwrap());
    thread::spawn(move || Cache::keep_up(&cache, worker, true));
    thread::scope(|scope| {
        let workers: Vec<_> = (0..3)
            .map(|thread: u64| {
                let disk = &disk;
                scope.spawn(move || {
                    let mut lane = disk.clone().lane().unwrap();
                    let mut rng = fastrand::Rng::with_seed(thread);
                    // Each has every third block.
                    let mut versions = vec![None; BLOCKS as usize];
                    for round in 1..20_000 {
                        let block = rng.u64(..BLOCKS / 3) * 3 + thread;
                        if rng.u8(..4) == 0 {
                            lane.write(block * BLOCK, &content(block, round), WAITING).unwrap();
                            versions[block as usize] = Some(round);
                        } else {
                            let expected =
                                versions[block as usize].map_or([0; BLOCK_BYTES], |round| content(block, round));
                            assert!(read(&mut lane, block) == expected, "thread {thread} block {block} round {round}");
                        }
                    }
                })
            })
            .collect();
        let mut worker = disk.cache().worker().unwrap();
        for limit in [1 << 20, 0, 4 << 20, 2 << 20].iter().cycle() {
            if workers.iter().all(|worker| worker.is_finished()) {
                break;
            }
            disk.cache().set_limit_bytes(*limit);
            disk.cache().compact(&mut worker);
            thread::sleep(Duration::from_millis(5));
        }
    });
    let stats = disk.cache().stats();
    assert!(stats.succ_gets > 1000 && stats.evictions > 100, "{stats:?}");
}

#[test]
fn a_discard_of_any_length_leaves_nothing_of_it_in_the_pool() {
    let below = Arc::new(Array::new(256 << 20).unwrap());
    let disk = cached(below);
    let mut lane = disk.clone().lane().unwrap();
    let blocks = [0, 1, 255, 256, 16_383, 16_384, 16_385, 40_000, 65_535];
    for block in blocks {
        lane.write(block * BLOCK, &content(block, 1), WAITING).unwrap();
        assert!(read(&mut lane, block) == content(block, 1));
    }
    // All but the first and the last, with parts of them.
    assert_eq!(lane.discard(100, (256 << 20) - 200, WAITING), DONE);
    for block in blocks {
        let expected = if [0, 65_535].contains(&block) { content(block, 1) } else { [0; BLOCK_BYTES] };
        assert!(read(&mut lane, block) == expected, "block {block}");
    }
    assert_eq!(lane.write_zeroes(0, 256 << 20, Zeroes::MayBeHoles, WAITING), DONE);
    assert!(read(&mut lane, 0) == [0; BLOCK_BYTES]);
}
