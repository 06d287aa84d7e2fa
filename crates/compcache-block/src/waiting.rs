//! The queue of requests that a device let wait: reads first, and one thread that is there for them alone.
//!
//! A write may have to wait until others have left memory; a read never waits for more than its own block. Whoever waits for a
//! read is stopped, and who writes seldom is; and where it is swap that is written, what is read may be needed for the
//! writing to go on.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What a thread takes of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    Reads,
    All,
}

impl Takes {
    /// What thread `number` of `count` takes: the first of several is there for reads.
    pub fn of_thread(number: usize, count: usize) -> Takes {
        if number == 0 && count > 1 { Takes::Reads } else { Takes::All }
    }
}

struct Jobs<J> {
    reads: VecDeque<J>,
    others: VecDeque<J>,
    closed: bool,
}

/// The queue; its mutex is held for moments, and never while a device is asked.
pub(crate) struct Waiting<J> {
    jobs: Mutex<Jobs<J>>,
    arrived: Condvar,
    places: usize,
}

impl<J> Waiting<J> {
    /// With room for `places` requests, which is taken now.
    pub fn new(places: usize) -> Waiting<J> {
        let empty = || VecDeque::with_capacity(places);
        let jobs = Jobs { reads: empty(), others: empty(), closed: false };
        Waiting { jobs: Mutex::new(jobs), arrived: Condvar::new(), places }
    }

    /// Takes a request, or gives it back when all places are taken, or the queue is closed.
    pub fn put(&self, job: J, is_read: bool) -> Result<(), J> {
        let mut jobs = self.lock();
        if jobs.closed || jobs.reads.len() + jobs.others.len() == self.places {
            return Err(job);
        }
        if is_read {
            jobs.reads.push_back(job)
        } else {
            jobs.others.push_back(job)
        }
        drop(jobs);
        // One alone might be the one that is there for reads.
        if is_read {
            self.arrived.notify_one()
        } else {
            self.arrived.notify_all()
        }
        Ok(())
    }

    /// Waits for the next; `None` once the queue is closed and has none of these.
    pub fn next(&self, takes: Takes) -> Option<J> {
        let mut jobs = self.lock();
        loop {
            let next = jobs.reads.pop_front();
            let next = next.or_else(|| if takes == Takes::All { jobs.others.pop_front() } else { None });
            if next.is_some() || jobs.closed {
                return next;
            }
            jobs = self.arrived.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the threads once the queue is empty.
    pub fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Jobs<J>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_come_first_and_each_kind_in_its_order() {
        let waiting = Waiting::new(8);
        for (job, is_read) in [(1, false), (2, true), (3, false), (4, true)] {
            waiting.put(job, is_read).unwrap();
        }
        waiting.close();
        let taken: Vec<_> = std::iter::from_fn(|| waiting.next(Takes::All)).collect();
        assert_eq!(taken, [2, 4, 1, 3]);
    }

    #[test]
    fn who_is_there_for_reads_leaves_the_others_to_others() {
        let waiting = Waiting::new(8);
        waiting.put("write", false).unwrap();
        waiting.put("read", true).unwrap();
        assert_eq!(waiting.next(Takes::Reads), Some("read"));
        waiting.close();
        assert_eq!(waiting.next(Takes::Reads), None);
        assert_eq!(waiting.next(Takes::All), Some("write"), "what came before the end is done");
        assert_eq!([Takes::of_thread(0, 1), Takes::of_thread(0, 2)], [Takes::All, Takes::Reads]);
    }

    #[test]
    fn a_full_queue_and_a_closed_one_give_back() {
        let waiting = Waiting::new(2);
        assert_eq!([1, 2, 3].map(|job| waiting.put(job, job == 1)), [Ok(()), Ok(()), Err(3)]);
        assert_eq!(waiting.next(Takes::All), Some(1));
        waiting.close();
        assert_eq!(waiting.put(4, true), Err(4));
    }

    #[test]
    fn a_write_wakes_a_thread_that_takes_it() {
        let waiting = Waiting::new(8);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| waiting.next(Takes::Reads));
            let writer = scope.spawn(|| waiting.next(Takes::All));
            waiting.put("write", false).unwrap();
            assert_eq!(writer.join().unwrap(), Some("write"));
            waiting.put("read", true).unwrap();
            assert_eq!(reader.join().unwrap(), Some("read"));
        });
    }
}
