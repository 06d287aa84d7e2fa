//! Requests that need a slow medium, and the threads that wait for it.
//!
//! A request comes here after the device said `MustWait`, so that the thread it came to is free for the next one. Places are taken in
//! advance, for [`PLACES`] requests, and buffers for [`WRITE_BYTES`] of writes, whose bytes must be copied because
//! fuser receives the next request in the same buffer. When they are all taken, whoever brings one more waits for the
//! medium itself; so many slow requests at once do hold up quick ones.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::{io, iter, mem};

use compcache_fuse::told;
use fuser::{Errno, ReplyData, ReplyEmpty, ReplyLseek, ReplyWrite};

use super::Largest;
use super::lanes::Own;
use crate::device::{BlockDevice, Extent, Lane, Manner, Outcome, Zeroes};
use crate::error::DeviceError;
use crate::waiting::{Takes, Waiting};

/// How many requests may wait: as many as the kernel has under way (`IN_FLIGHT_MAX`).
const PLACES: usize = 128;

/// How many bytes of them may be writes'.
const WRITE_BYTES: usize = 2 << 20;

/// A request, and where its answer goes.
pub(super) enum Job {
    Read { offset_bytes: u64, length_bytes: usize, reply: ReplyData },
    Write { offset_bytes: u64, from: Vec<u8>, reply: ReplyWrite },
    Empty { request: EmptyRequest, reply: ReplyEmpty },
    Seek { seek: Seek, reply: ReplyLseek },
}

/// A request that is answered with success and nothing else.
#[derive(Clone, Copy)]
pub(super) enum EmptyRequest {
    Flush,
    Discard { offset_bytes: u64, length_bytes: u64 },
    WriteZeroes { offset_bytes: u64, length_bytes: u64, zeroes: Zeroes },
}

impl EmptyRequest {
    pub fn serve(self, lane: &mut dyn Lane, manner: Manner) -> Result<Outcome, DeviceError> {
        match self {
            EmptyRequest::Flush => lane.flush(manner),
            EmptyRequest::Discard { offset_bytes, length_bytes } => lane.discard(offset_bytes, length_bytes, manner),
            EmptyRequest::WriteZeroes { offset_bytes, length_bytes, zeroes } => {
                lane.write_zeroes(offset_bytes, length_bytes, zeroes, manner)
            }
        }
    }
}

/// `SEEK_HOLE` or `SEEK_DATA`.
#[derive(Clone, Copy)]
pub(super) struct Seek {
    pub offset_bytes: u64,
    pub size_bytes: u64,
    pub for_hole: bool,
}

impl Seek {
    /// The first place from the offset on that is of the wanted kind. The end of a file counts as a hole.
    pub fn serve(self, lane: &mut dyn Lane, manner: Manner) -> Result<Outcome<Option<u64>>, DeviceError> {
        let mut at = self.offset_bytes;
        if at >= self.size_bytes {
            return Ok(Outcome::Done(None));
        }
        while at < self.size_bytes {
            match lane.extent(at, self.size_bytes - at, manner)? {
                Outcome::MustWait => return Ok(Outcome::MustWait),
                Outcome::Done(Extent { is_hole, .. }) if is_hole == self.for_hole => {
                    return Ok(Outcome::Done(Some(at)));
                }
                Outcome::Done(extent) => at += extent.length_bytes.max(1),
            }
        }
        Ok(Outcome::Done(self.for_hole.then_some(self.size_bytes)))
    }
}

/// The errno of a device's error, in fuser's type.
pub(super) fn errno(error: &DeviceError) -> Errno {
    Errno::from_i32(told(error.errno()))
}

/// The requests that wait, and the buffers of those that are writes.
pub(super) struct Waiters {
    waiting: Waiting<Job>,
    largest: Largest,
    /// Emptied, each with room for the largest write. The mutex is held for moments.
    buffers: Mutex<Vec<Vec<u8>>>,
}

impl Waiters {
    pub fn new(largest: Largest, all_at_once: bool) -> Waiters {
        // Ones, not zeroes, so that the memory is there.
        let asked_for = |mut buffer: Vec<u8>| {
            buffer.resize(largest.write_bytes, 1);
            buffer.clear();
            buffer
        };
        let buffers = iter::repeat_with(|| Vec::with_capacity(largest.write_bytes));
        let buffers = buffers.map(|buffer| if all_at_once { asked_for(buffer) } else { buffer });
        let buffers = buffers.take(WRITE_BYTES / largest.write_bytes).collect();
        Waiters { waiting: Waiting::new(PLACES), largest, buffers: Mutex::new(buffers) }
    }

    /// Starts `count` threads that wait, and returns once each has its lane.
    pub fn start(
        self: &Arc<Waiters>,
        device: &Arc<dyn BlockDevice>,
        count: usize,
    ) -> io::Result<Result<Vec<JoinHandle<()>>, DeviceError>> {
        let (ready, each) = mpsc::channel();
        let mut threads = Vec::with_capacity(count);
        let mut started = Ok(());
        for number in 0..count {
            let (waiters, device, ready) = (self.clone(), device.clone(), ready.clone());
            let body = move || match Own::new(&device, waiters.largest).inspect(Own::settle) {
                Ok(mut own) => {
                    let _ = ready.send(Ok(()));
                    drop(ready);
                    waiters.serve(&mut own, Takes::of_thread(number, count));
                }
                Err(error) => drop(ready.send(Err(error))),
            };
            match thread::Builder::new().name(format!("fuse-wait-{number}")).spawn(body) {
                Ok(thread) => threads.push(thread),
                Err(error) => started = started.and(Err(error)),
            }
        }
        drop(ready);
        let lanes: Result<(), DeviceError> = each.iter().collect();
        if started.is_err() || lanes.is_err() {
            self.close();
            threads.into_iter().for_each(|thread| drop(thread.join()));
            return started.map(|()| Err(lanes.expect_err("one of the two failed")));
        }
        Ok(Ok(threads))
    }

    /// A buffer holding `bytes`, if one is free.
    pub fn copy(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let mut buffer = self.buffers().pop()?;
        buffer.extend_from_slice(bytes);
        Some(buffer)
    }

    /// Has `job` done where waiting is allowed: by a thread for it, or here.
    pub fn pass_on(&self, own: &mut Own, job: Job) {
        let is_read = matches!(job, Job::Read { .. });
        if let Err(job) = self.waiting.put(job, is_read) {
            self.finish(own, job);
        }
    }

    /// Ends the threads once the queue is empty.
    pub fn close(&self) {
        self.waiting.close();
    }

    fn serve(&self, own: &mut Own, takes: Takes) {
        while let Some(job) = self.waiting.next(takes) {
            self.finish(own, job);
        }
    }

    /// Does `job`, waiting as long as it takes, and answers it.
    fn finish(&self, own: &mut Own, job: Job) {
        match job {
            Job::Read { offset_bytes, length_bytes, reply } => {
                let (lane, into) = own.lane_and_buffer(length_bytes);
                match done(lane.read(offset_bytes, into, Manner::WAITING)) {
                    Ok(()) => reply.data(into),
                    Err(error) => reply.error(error),
                }
            }
            Job::Write { offset_bytes, mut from, reply } => {
                let written = done(own.lane.write(offset_bytes, &from, Manner::WAITING));
                let length_bytes = from.len() as u32;
                from.clear();
                self.buffers().push(mem::take(&mut from));
                match written {
                    Ok(()) => reply.written(length_bytes),
                    Err(error) => reply.error(error),
                }
            }
            Job::Empty { request, reply } => match done(request.serve(&mut *own.lane, Manner::WAITING)) {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error),
            },
            Job::Seek { seek, reply } => match done(seek.serve(&mut *own.lane, Manner::WAITING)) {
                Ok(Some(at)) => reply.offset(at as i64),
                Ok(None) => reply.error(Errno::ENXIO),
                Err(error) => reply.error(error),
            },
        }
    }

    fn buffers(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What came of a request that was allowed to wait. A device that must wait even so breaks its contract; that is an I/O
/// error to the client.
pub(super) fn done<T>(outcome: Result<Outcome<T>, DeviceError>) -> Result<T, Errno> {
    match outcome {
        Ok(Outcome::Done(value)) => Ok(value),
        Ok(Outcome::MustWait) => Err(Errno::EIO),
        Err(error) => Err(errno(&error)),
    }
}
