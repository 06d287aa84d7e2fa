//! A thread that has answered looks for the next request for a while before it sleeps.
//!
//! To wake a thread on a processor that sleeps takes longer than to serve a page: tens of microseconds in a virtual
//! machine. Whoever waits for each answer before he asks again (a journal, a program that faults its pages in) pays that
//! with each request. So one thread of a disk at a time goes on looking for [`LONGEST`], and lets others have its
//! processor with each look. That is a processor's time, spent in the hope of a request, so hope is kept count of: after
//! `n` looks in vain, one after the other, it is tried again after 2^n requests, 2^[`MISSES_MAX`] at most. A disk whose
//! requests come far apart pays next to nothing; one that is asked again and again has a thread that looks.
//!
//! On a machine with one processor nobody looks: the one who would ask could not run.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

const LONGEST: Duration = Duration::from_micros(100);
const MISSES_MAX: u32 = 6;

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// What the threads of a disk share.
pub(super) struct Linger {
    /// A descriptor of the connection, to look through.
    connection: OwnedFd,
    alone: bool,
    /// Somebody looks now. The two below are changed by him.
    occupied: AtomicBool,
    misses: AtomicU32,
    skipped: AtomicU32,
}

impl Linger {
    /// For the threads that serve `connection`.
    pub fn new(connection: OwnedFd) -> Linger {
        let alone = thread::available_parallelism().is_ok_and(|processors| processors.get() == 1);
        let (misses, skipped) = (AtomicU32::new(0), AtomicU32::new(0));
        Linger { connection, alone, occupied: AtomicBool::new(false), misses, skipped }
    }

    /// Returns when there is a request, or the time is up; at once when another thread looks already, or there is little
    /// hope. To be called by a thread that would wait for a request next.
    pub fn look(&self) {
        if self.alone || self.occupied.swap(true, Relaxed) {
            return;
        }
        let (misses, skipped) = (self.misses.load(Relaxed), self.skipped.load(Relaxed) + 1);
        if skipped < 1 << misses {
            self.skipped.store(skipped, Relaxed);
        } else {
            let misses = if self.request_came() { 0 } else { (misses + 1).min(MISSES_MAX) };
            self.misses.store(misses, Relaxed);
            self.skipped.store(0, Relaxed);
        }
        self.occupied.store(false, Relaxed);
    }

    fn request_came(&self) -> bool {
        let started = Instant::now();
        loop {
            let mut connection = [PollFd::new(&self.connection, PollFlags::IN)];
            // An error is the reader's to see, as is a connection that is cut.
            if poll(&mut connection, Some(&AT_ONCE)) != Ok(0) {
                return true;
            }
            if started.elapsed() >= LONGEST {
                return false;
            }
            thread::yield_now();
        }
    }
}
