//! One suite over every way to talk to a device, and what only a transport can get wrong.
//!
//! `COMPCACHE_SEED=n` repeats a run.

#[path = "conformance/block.rs"]
mod block;
#[path = "conformance/client.rs"]
mod client;
#[path = "conformance/front.rs"]
mod front;
#[path = "conformance/nbd.rs"]
mod nbd;
#[path = "conformance/rubbish.rs"]
mod rubbish;
#[path = "conformance/ublk.rs"]
mod ublk_node;
#[path = "conformance/walk.rs"]
mod walk;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use compcache_block::{
    Array, BlockDevice, Cached, Checked, DeviceError, Disk, Extent, Fault, Faulty, Lane, Manner, Origin, Outcome,
    Request, Zeroes,
};
use compcache_cache::Cache;
use compcache_store::{Codec, PoolConfig, Store, StoreConfig};
use compcache_testkit::features::requires;
use compcache_testkit::seed::Seed;

use block::{Block, Loop, beyond_the_end_nothing_reaches_the_device};
use front::{Asked, Direct, Front, Nbd};
use ublk_node::Ublk;
use walk::{STRETCH_BYTES, Walk};

const THREADS: u64 = 4;
const SIZE_BYTES: u64 = 2 << 20;

/// A device the suite runs over, and how its size is changed.
struct Subject {
    device: Arc<dyn BlockDevice>,
    resize: Box<dyn Fn(u64) -> Result<(), DeviceError>>,
}

fn disk_of(size_bytes: u64, limit_bytes: u64) -> Arc<Disk> {
    let store = Store::new(StoreConfig { limit_bytes, reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
    Arc::new(Disk::new(store.create_pool(PoolConfig::default()).unwrap(), size_bytes).unwrap())
}

fn disk() -> Subject {
    let disk = disk_of(SIZE_BYTES, u64::MAX);
    Subject { device: disk.clone(), resize: Box::new(move |size| disk.resize(size)) }
}

/// An origin whose cache has hardly room for anything, so that blocks come and go.
fn cached() -> Subject {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SIZE_BYTES).unwrap();
    let origin = Arc::new(Origin::open(file.path()).unwrap());
    let cached = Cached::new(origin, 1 << 20, Codec::Lz4).unwrap();
    let (cache, worker) = (Arc::downgrade(cached.cache()), cached.cache().worker().unwrap());
    // It ends with the cache.
    thread::spawn(move || Cache::keep_up(&cache, worker, true));
    Subject { device: Arc::new(cached), resize: Box::new(|_| unreachable!("its size is the file's")) }
}

fn array() -> Subject {
    let array = Arc::new(Array::new(SIZE_BYTES).unwrap());
    Subject { device: array.clone(), resize: Box::new(move |size| array.resize(size)) }
}

/// Walks of several threads side by side; the first divergence, if there is one.
fn walk_together<F: Front>(front: &F, seed: Seed, steps: u32) -> Result<(), String> {
    thread::scope(|scope| {
        let walk = |thread| move || Walk::new(seed, thread).run(&mut *front.talk(), steps);
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(walk(thread))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })
}

fn a_device_is_an_array_of_bytes_for_every_thread<F: Front>(subject: Subject) {
    const { assert!(THREADS * STRETCH_BYTES as u64 <= SIZE_BYTES) };
    let seed = Seed::for_test("a_device_is_an_array_of_bytes_for_every_thread");
    walk_together(&F::serve(subject.device), seed, 400).unwrap();
}

fn a_checked_device_finds_nothing_wrong_with_an_honest_one<F: Front>(subject: Subject) {
    let seed = Seed::for_test("a_checked_device_finds_nothing_wrong_with_an_honest_one");
    let checked = Arc::new(Checked::new(subject.device));
    walk_together(&F::serve(checked.clone()), seed, 150).unwrap();
    assert_eq!(checked.lies(), 0);
}

fn a_device_that_lies_is_caught_by_the_walk_and_by_checked<F: Front>(subject: Subject) {
    let seed = Seed::for_test("a_device_that_lies_is_caught_by_the_walk_and_by_checked");
    let liar = || Arc::new(Liar { inner: subject.device.clone(), writes: AtomicU64::new(0) });
    let parted = walk_together(&F::serve(liar()), seed, 400).expect_err("the walk noticed nothing");
    assert!(parted.contains("is not what was written there") || parted.contains("hole"), "{parted}");
    let front = F::serve(subject.device.clone());
    front.talk().write_zeroes(0, SIZE_BYTES, Zeroes::MayBeHoles).unwrap();
    let checked = Arc::new(Checked::new(liar()));
    let parted = walk_together(&F::serve(checked.clone()), seed, 400).expect_err("nothing was noticed");
    assert!(parted.contains("failed with 5"), "{parted}");
    assert!(checked.lies() > 0);
}

fn a_request_beyond_the_end_is_refused_and_touches_nothing<F: Front>(subject: Subject) {
    const INVAL: i32 = 22;
    const NOSPC: i32 = 28;
    let front = F::serve(subject.device);
    let mut talk = front.talk();
    talk.write(SIZE_BYTES - 8192, &[7; 8192], false).unwrap();
    for offset in [SIZE_BYTES - 4096, SIZE_BYTES - 1, SIZE_BYTES, u64::MAX - 100, u64::MAX] {
        assert_eq!(talk.read(offset, &mut [0; 8192]), Err(INVAL), "read at {offset}");
        assert_eq!(talk.write(offset, &[9; 8192], false), Err(NOSPC), "write at {offset}");
        assert_eq!(talk.write(offset, &[9; 8192], true), Err(NOSPC), "write at {offset}");
        assert_eq!(talk.discard(offset, 8192), Err(INVAL), "discard at {offset}");
        assert_eq!(talk.write_zeroes(offset, 8192, Zeroes::AreData), Err(NOSPC), "zeroes at {offset}");
        assert_eq!(talk.write_zeroes(offset, 8192, Zeroes::MayBeHoles), Err(NOSPC), "zeroes at {offset}");
        assert!(matches!(talk.extents(offset, 8192), None | Some(Err(INVAL))), "extents at {offset}");
    }
    let mut back = [0; 8192];
    talk.read(SIZE_BYTES - 8192, &mut back).unwrap();
    assert_eq!(back, [7; 8192]);
}

fn a_device_that_changes_its_size_is_held_to_the_new_one<F: Front>(subject: Subject) {
    if !requires(F::RESIZES) {
        return;
    }
    let checked = Arc::new(Checked::new(subject.device));
    let front = F::serve(checked.clone());
    let mut talk = front.talk();
    talk.write(0, &vec![7; SIZE_BYTES as usize], true).unwrap();
    let resize = |size| checked.resize(size, || (subject.resize)(size)).map(|()| front.resized());
    resize(SIZE_BYTES / 2).unwrap();
    assert_eq!(talk.size_bytes(), SIZE_BYTES / 2);
    assert_eq!(talk.read(SIZE_BYTES / 2 - 1, &mut [0; 2]), Err(22));
    assert_eq!(talk.write(SIZE_BYTES / 2 - 1, &[7; 2], false), Err(28));
    resize(SIZE_BYTES * 2).unwrap();
    let mut back = vec![9; SIZE_BYTES as usize];
    talk.read(SIZE_BYTES, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0), "the new part is not empty");
    talk.read(0, &mut back).unwrap();
    let half = SIZE_BYTES as usize / 2;
    assert!(back[..half].iter().all(|byte| *byte == 7), "what was kept is not what was written");
    assert!(back[half..].iter().all(|byte| *byte == 0), "what was cut off came back");
    assert!(resize(4097).is_err());
    assert_eq!(checked.lies(), 0);
}

fn an_error_of_the_device_reaches_the_client_as_it_is<F: Front>(subject: Subject) {
    for &errno in F::ERRNOS {
        let all =
            [Request::Read, Request::Write, Request::Flush, Request::Discard, Request::WriteZeroes, Request::Extent];
        let bytes = 65536..131_072;
        let fault = |request| Fault { request, offsets_bytes: bytes.clone(), one_in: 1, errno };
        let faulty = Arc::new(Faulty::new(subject.device.clone(), 1, all.map(fault).to_vec()));
        let front = F::serve(faulty.clone());
        let mut talk = front.talk();
        let mut page = [0; 4096];
        let told = |request, whole_blocks| F::told(Asked { request, whole_blocks }, errno);
        for round in 1..=3 {
            assert_eq!(talk.read(65536, &mut page), told(Request::Read, true));
            assert_eq!(talk.write(65536 - 100, &page, false), told(Request::Write, false));
            assert_eq!(talk.write(131_071, &[1], true), told(Request::Write, false));
            assert_eq!(talk.write(65536, &page, true), told(Request::Write, true));
            assert_eq!(talk.flush(), told(Request::Flush, true));
            assert_eq!(talk.discard(0, SIZE_BYTES), told(Request::Discard, true));
            assert_eq!(talk.write_zeroes(65536, 4096, Zeroes::MayBeHoles), told(Request::WriteZeroes, true));
            let extents = talk.extents(65536, 4096);
            assert!(extents.is_none() || extents == Some(Err(errno)), "{extents:?}");
            let asked = round * if extents.is_none() { 7 } else { 8 };
            assert!(faulty.failed() == asked || faulty.failed() > asked && !F::ONE_FOR_ONE, "{}", faulty.failed());
            // The connection goes on, and what is not at fault is served.
            assert_eq!(talk.write(0, &page, false), Ok(()));
            assert_eq!(talk.read(131_072, &mut page), Ok(()));
        }
    }
}

/// Says that it has written, one time in eleven, of whole blocks, that it has not.
struct Liar {
    inner: Arc<dyn BlockDevice>,
    writes: AtomicU64,
}

struct LiarLane(Arc<Liar>, Box<dyn Lane>);

impl BlockDevice for Liar {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        let inner = self.inner.clone().lane()?;
        Ok(Box::new(LiarLane(self, inner)))
    }
}

impl Lane for LiarLane {
    fn read(&mut self, offset: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.1.read(offset, into, manner)
    }

    fn write(&mut self, offset: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        if self.0.writes.fetch_add(1, Relaxed) % 11 == 10 {
            return Ok(Outcome::Done(()));
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

macro_rules! suite {
    // A transport, and what holds beyond the end there.
    ($($front:ident: $way:ty, $at_the_end:ident;)*) => {
        $(mod $front {
            use super::*;
            suite!(@over disk, $way, $at_the_end);
            suite!(@over array, $way, $at_the_end);
            suite!(@over_fixed cached, $way, $at_the_end);
        })*
    };
    (@over $subject:ident, $way:ty, $at_the_end:ident) => {
        suite!(@tests $subject, $way: $at_the_end
            a_device_is_an_array_of_bytes_for_every_thread
            a_checked_device_finds_nothing_wrong_with_an_honest_one
            a_device_that_lies_is_caught_by_the_walk_and_by_checked
            a_device_that_changes_its_size_is_held_to_the_new_one
            an_error_of_the_device_reaches_the_client_as_it_is);
    };
    // What keeps its size.
    (@over_fixed $subject:ident, $way:ty, $at_the_end:ident) => {
        suite!(@tests $subject, $way: $at_the_end
            a_device_is_an_array_of_bytes_for_every_thread
            a_checked_device_finds_nothing_wrong_with_an_honest_one
            a_device_that_lies_is_caught_by_the_walk_and_by_checked
            an_error_of_the_device_reaches_the_client_as_it_is);
    };
    (@tests $subject:ident, $way:ty: $($test:ident)*) => {
        mod $subject {
            use super::*;
            $(#[test]
            fn $test() {
                if requires(<$way as Front>::NEEDS) {
                    super::super::$test::<$way>(super::super::$subject());
                }
            })*
        }
    };
}

suite! {
    direct: Direct, a_request_beyond_the_end_is_refused_and_touches_nothing;
    nbd_structured: Nbd<true>, a_request_beyond_the_end_is_refused_and_touches_nothing;
    nbd_simple: Nbd<false>, a_request_beyond_the_end_is_refused_and_touches_nothing;
    fuse_loop: Block<Loop>, beyond_the_end_nothing_reaches_the_device;
    ublk: Block<Ublk>, beyond_the_end_nothing_reaches_the_device;
}
