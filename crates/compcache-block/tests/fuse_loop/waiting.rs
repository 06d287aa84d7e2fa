//! Writes that wait in the device: they hold up no read, and nobody waits for them when the disk is taken away.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use compcache_block::{BLOCK_BYTES, BlockDevice, DeviceError, Extent, Lane, Manner, Outcome, Zeroes};

use crate::support::{
    AT_LAST, Aligned, Served, assert_nothing_left, backing_file, can_serve, disk, fill_run, open_direct, wait_for,
};

const MIB: u64 = 1 << 20;

/// How many writes to a device that needs no flush may wait apart from all else, and how many to one that needs it.
const APART: u64 = 64;
const APART_FLUSHED: u64 = 8;

const WRITE_BYTES: usize = 32 << 10;

/// How long it is watched that something does not happen.
const A_WHILE: Duration = Duration::from_millis(300);

/// Another device, whose writes must wait while its gate is shut, until it is opened.
struct Gated {
    inner: Arc<dyn BlockDevice>,
    needs_flush: bool,
    is_shut: Mutex<bool>,
    opened: Condvar,
    /// Writes that came to the shut gate and could not wait.
    put_off: AtomicU64,
}

/// The gate is opened when this is dropped, also when a test fails.
struct Shut<'a>(&'a Gated);

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        *self.0.is_shut.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.opened.notify_all();
    }
}

impl Gated {
    /// Its gate is open.
    fn new(inner: Arc<dyn BlockDevice>, needs_flush: bool) -> Gated {
        Gated { inner, needs_flush, is_shut: Mutex::new(false), opened: Condvar::new(), put_off: AtomicU64::new(0) }
    }

    fn shut(&self) -> Shut<'_> {
        *self.is_shut.lock().unwrap() = true;
        Shut(self)
    }

    fn put_off(&self) -> u64 {
        self.put_off.load(Ordering::SeqCst)
    }

    /// Waits at the gate, if that is necessary and allowed.
    fn pass(&self, manner: Manner) -> Outcome {
        let is_shut = self.is_shut.lock().unwrap();
        if *is_shut && !manner.may_wait {
            self.put_off.fetch_add(1, Ordering::SeqCst);
            return Outcome::MustWait;
        }
        drop(self.opened.wait_while(is_shut, |is_shut| *is_shut).unwrap());
        Outcome::Done(())
    }
}

impl BlockDevice for Gated {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn needs_flush(&self) -> bool {
        self.needs_flush
    }

    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError> {
        Ok(Box::new(GatedLane { inner: self.inner.clone().lane()?, device: self }))
    }
}

struct GatedLane {
    inner: Box<dyn Lane>,
    device: Arc<Gated>,
}

impl Lane for GatedLane {
    fn read(&mut self, offset_bytes: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.inner.read(offset_bytes, into, manner)
    }

    fn write(&mut self, offset_bytes: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        match self.device.pass(manner) {
            Outcome::Done(()) => self.inner.write(offset_bytes, from, manner),
            Outcome::MustWait => Ok(Outcome::MustWait),
        }
    }

    fn flush(&mut self, manner: Manner) -> Result<Outcome, DeviceError> {
        self.inner.flush(manner)
    }

    fn discard(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome, DeviceError> {
        self.inner.discard(offset_bytes, length_bytes, manner)
    }

    fn write_zeroes(
        &mut self,
        offset_bytes: u64,
        length_bytes: u64,
        zeroes: Zeroes,
        manner: Manner,
    ) -> Result<Outcome, DeviceError> {
        self.inner.write_zeroes(offset_bytes, length_bytes, zeroes, manner)
    }

    fn extent(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome<Extent>, DeviceError> {
        self.inner.extent(offset_bytes, length_bytes, manner)
    }
}

/// Does something with the loop device, opened for direct I/O, in a thread of its own; what came of it arrives through the
/// channel, after the device was closed.
fn apart<T: Send + 'static>(path: &Path, work: impl FnOnce(&File) -> T + Send + 'static) -> Receiver<T> {
    let (file, (done, result)) = (open_direct(path), mpsc::channel());
    thread::spawn(move || {
        let answer = work(&file);
        drop(file);
        done.send(answer)
    });
    result
}

/// Where write `number` goes: each beside no other, so that nobody makes one of two.
fn offset_bytes(number: u64) -> u64 {
    MIB + number * 2 * WRITE_BYTES as u64
}

/// Starts so many writes, each of which must wait by itself.
fn write_apart(path: &Path, writes: u64) -> Vec<Receiver<io::Result<()>>> {
    let write = |number| {
        apart(path, move |file| {
            let (mut bytes, at) = (Aligned::new(WRITE_BYTES), offset_bytes(number));
            fill_run(bytes.bytes(), at / BLOCK_BYTES as u64, 2);
            file.write_all_at(bytes.bytes(), at)
        })
    };
    (0..writes).map(write).collect()
}

#[test]
fn as_many_writes_as_may_wait_hold_up_no_read() {
    if !can_serve(&[]) {
        return;
    }
    for (needs_flush, writes) in [(false, APART), (true, APART_FLUSHED)] {
        let device = Arc::new(Gated::new(disk(16 * MIB), needs_flush));
        // One thread serves, and one waits.
        let served = Served::with_threads(device.clone(), 1);
        let path = served.disk.path();
        let (file, mut bytes) = (served.open(), Aligned::new(WRITE_BYTES));
        fill_run(bytes.bytes(), 0, 1);
        file.write_all_at(bytes.bytes(), 0).unwrap();

        let shut = device.shut();
        let results = write_apart(path, writes);
        wait_for("all writes wait", || device.put_off() == writes);
        let read = apart(path, |file| {
            let mut back = Aligned::new(WRITE_BYTES);
            file.read_exact_at(back.bytes(), 0).map(|()| back)
        });
        let read = read.recv_timeout(AT_LAST).unwrap_or_else(|_| panic!("{writes} writes hold up a read"));
        assert!(read.unwrap().bytes() == bytes.bytes());
        for result in &results {
            assert!(result.try_recv().is_err(), "a write did not wait");
        }
        drop(shut);
        for (number, result) in results.iter().enumerate() {
            result.recv_timeout(AT_LAST).expect("it hangs").unwrap();
            let (mut back, at) = (Aligned::new(WRITE_BYTES), offset_bytes(number as u64));
            file.read_exact_at(back.bytes(), at).unwrap();
            fill_run(bytes.bytes(), at / BLOCK_BYTES as u64, 2);
            assert!(back.bytes() == bytes.bytes(), "write {number} wrote something else");
        }
        assert_eq!(device.put_off(), writes, "they came in other parts");
        drop(file);
        served.remove();
    }
}

#[test]
fn a_disk_that_is_dropped_while_writes_wait_in_the_device_is_taken_away() {
    if !can_serve(&[]) {
        return;
    }
    const THREADS: u64 = 2;
    // A thread that waits has one of them and others are behind it; or all threads wait, and others are with the kernel.
    for writes in [3, APART + THREADS + 20] {
        let device = Arc::new(Gated::new(disk(16 * MIB), false));
        let Served { disk: served, parent } = Served::with_threads(device.clone(), THREADS as usize);
        let path = served.path().to_owned();
        let name = || Some(Path::new(&backing_file(&path)?).file_name()?.to_owned());
        let ours = name().expect("it is attached");
        let shut = device.shut();
        let results = write_apart(&path, writes);
        wait_for("writes wait wherever they can", || device.put_off() == writes.min(APART + THREADS));

        let (done, gone) = mpsc::channel();
        thread::spawn(move || {
            drop(served);
            done.send(())
        });
        for result in results {
            let answer = result.recv_timeout(AT_LAST).expect("it hangs on a disk that is taken away");
            let errno = answer.err().and_then(|error| error.raw_os_error());
            assert_eq!(errno, Some(rustix::io::Errno::IO.raw_os_error()), "of {writes}");
        }
        assert!(gone.recv_timeout(A_WHILE).is_err(), "it is gone, and threads are in the device");
        drop(shut);
        gone.recv_timeout(AT_LAST).expect("it is not taken away once the device lets go");
        assert_eq!(Arc::strong_count(&device), 1, "somebody has the device still");
        wait_for("the loop device is detached", || name().is_none_or(|name| name != ours));
        assert_nothing_left(parent.path(), &path);
    }
}
