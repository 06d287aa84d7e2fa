//! Requests that must wait, and the threads that wait for them, so that the others of the connection go on.
//!
//! One is there for reads, another for all; each is started by the first such request of a connection, with a lane and a buffer of its own. This is the slow
//! path: what a client has sent to be written is copied into memory taken for it. No more than one payload of the greatest
//! length, or [`REQUESTS_MAX`] requests, wait; then the client has to wait too.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::buffer::Buffer;
use super::reply::HEADROOM;
use super::session::{Server, room_for};
use super::wire::{self, PAYLOAD_BYTES_MAX, Request, command, error};
use crate::device::Outcome;
use crate::waiting::{Jobs, Takes};

const REQUESTS_MAX: usize = 128;

struct Waiter {
    request: Request,
    payload: Vec<u8>,
}

struct Queue {
    waiters: Jobs<Waiter>,
    payload_bytes: usize,
}

struct Shared {
    queue: Mutex<Queue>,
    /// Something came, something went, or the queue was closed.
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.lock().waiters.closed = true;
        self.changed.notify_all();
    }

    /// The next to be served of these, for as long as there are any.
    fn next(&self, takes: Takes) -> Option<Waiter> {
        let mut queue = self.lock();
        loop {
            if let Some(waiter) = queue.waiters.pop(takes) {
                queue.payload_bytes -= waiter.payload.len();
                self.changed.notify_all();
                return Some(waiter);
            }
            if queue.waiters.closed {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The waiting requests of a connection. When it is dropped those that wait are served, and the threads have ended.
pub(super) struct Waiting {
    server: Server,
    shared: Arc<Shared>,
    /// For reads, and for all.
    threads: [Option<JoinHandle<()>>; 2],
}

impl Waiting {
    pub fn new(server: Server) -> Waiting {
        let queue = Queue { waiters: Jobs::new(0), payload_bytes: 0 };
        let shared = Shared { queue: Mutex::new(queue), changed: Condvar::new() };
        Waiting { server, shared: Arc::new(shared), threads: [None, None] }
    }

    /// Has `request` served where it can wait; what it writes lies in `buffer`, behind the headroom.
    ///
    /// # Errors
    /// The client is gone, or there is no thread to be had, or no memory.
    pub fn push(&mut self, request: Request, buffer: &[u8]) -> io::Result<()> {
        let is_read = request.command == command::READ;
        let (number, of) = (usize::from(!is_read), self.threads.len());
        if self.threads[number].is_none() {
            let (server, shared) = (self.server.clone(), self.shared.clone());
            let thread = thread::Builder::new().name(format!("nbd-waiting-{number}"));
            let body = move || serve_waiting(&server, &shared, Takes::of_thread(number, of));
            self.threads[number] = Some(thread.spawn(body)?);
        }
        let writes = request.command == command::WRITE;
        let payload_bytes = if writes { request.length_bytes as usize } else { 0 };
        let full = |queue: &mut Queue| {
            let room = queue.payload_bytes + payload_bytes <= PAYLOAD_BYTES_MAX as usize;
            !queue.waiters.closed && (!room || queue.waiters.len() == REQUESTS_MAX)
        };
        let changed = &self.shared.changed;
        let mut queue = changed.wait_while(self.shared.lock(), full).unwrap_or_else(PoisonError::into_inner);
        if queue.waiters.closed {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let mut payload = Vec::new();
        payload.try_reserve_exact(payload_bytes).map_err(|_| ErrorKind::OutOfMemory)?;
        payload.extend_from_slice(&buffer[HEADROOM..][..payload_bytes]);
        queue.payload_bytes += payload_bytes;
        queue.waiters.push(Waiter { request, payload }, is_read);
        changed.notify_all();
        Ok(())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.shared.close();
        // They do not panic; if one did, there would be nobody left to tell.
        self.threads.iter_mut().filter_map(Option::take).for_each(|thread| drop(thread.join()));
    }
}

fn serve_waiting(server: &Server, shared: &Shared, takes: Takes) {
    let lane = server.device.clone().lane();
    let mut lane = lane.map_err(|failed| wire::error_of(failed.errno()));
    let mut buffer = Buffer::default();
    while let Some(Waiter { request, payload }) = shared.next(takes) {
        let served = buffer.fit(room_for(&request)).and_then(|room| {
            room[HEADROOM..][..payload.len()].copy_from_slice(&payload);
            match &mut lane {
                Ok(lane) => server.serve(&mut **lane, &request, room, true),
                Err(error) => server.replies.failed(&request, *error).map(Outcome::Done),
            }
        });
        let answered = match served {
            Ok(Outcome::Done(())) => Ok(()),
            // A device that still says so, where waiting is allowed, is at fault.
            Ok(Outcome::MustWait) => server.replies.failed(&request, error::IO),
            Err(gone) => Err(gone),
        };
        if answered.is_err() {
            server.replies.hang_up();
            shared.lock().waiters.give_up();
            shared.changed.notify_all();
        }
    }
}
