//! The queue of requests that a device let wait: reads first, mostly, and one thread that is there for them alone.
//!
//! A write may have to wait until others have left memory; a read never waits for more than its own block. Whoever waits for a
//! read is stopped, and who writes seldom is; and where it is swap that is written, what is read may be needed for the
//! writing to go on. But who flushes waits, too: after some reads it is another's turn.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// So many reads go before a request of another kind that is there.
const READS_FIRST: u32 = 4;

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

/// The requests, and whose turn it is.
pub(crate) struct Jobs<J> {
    reads: VecDeque<J>,
    others: VecDeque<J>,
    /// Reads that were taken while others were there, by threads that take all.
    before_others: u32,
    pub closed: bool,
}

impl<J> Jobs<J> {
    /// With room for `places` requests, which is taken now.
    pub fn new(places: usize) -> Jobs<J> {
        let empty = || VecDeque::with_capacity(places);
        Jobs { reads: empty(), others: empty(), before_others: 0, closed: false }
    }

    pub fn len(&self) -> usize {
        self.reads.len() + self.others.len()
    }

    pub fn push(&mut self, job: J, is_read: bool) {
        if is_read {
            self.reads.push_back(job);
        } else {
            self.others.push_back(job);
        }
    }

    /// Nobody will ask for any more, and those that are there are dropped.
    pub fn give_up(&mut self) {
        self.reads.clear();
        self.others.clear();
        self.closed = true;
    }

    pub fn pop(&mut self, takes: Takes) -> Option<J> {
        if takes == Takes::Reads {
            return self.reads.pop_front();
        }
        if self.others.is_empty() || self.before_others < READS_FIRST {
            self.before_others += u32::from(!self.others.is_empty());
            if let Some(read) = self.reads.pop_front() {
                return Some(read);
            }
        }
        self.before_others = 0;
        self.others.pop_front()
    }
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
        Waiting { jobs: Mutex::new(Jobs::new(places)), arrived: Condvar::new(), places }
    }

    /// Takes a request, or gives it back when all places are taken, or the queue is closed.
    pub fn put(&self, job: J, is_read: bool) -> Result<(), J> {
        let mut jobs = self.lock();
        if jobs.closed || jobs.len() == self.places {
            return Err(job);
        }
        jobs.push(job, is_read);
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
            let next = jobs.pop(takes);
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
    use std::sync::{Arc, mpsc};
    use std::thread;
    use std::time::Duration;

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
    fn reads_that_never_end_do_not_keep_the_others_waiting() {
        let waiting = Waiting::new(64);
        waiting.put(0, false).unwrap();
        (1..=20).for_each(|read| waiting.put(read, true).unwrap());
        let taken: Vec<_> = (0..6).map(|_| waiting.next(Takes::All).unwrap()).collect();
        assert_eq!(taken, [1, 2, 3, 4, 0, 5]);
    }

    #[test]
    fn a_write_wakes_a_thread_that_takes_it() {
        let (waiting, (taken, each)) = (Arc::new(Waiting::new(8)), mpsc::channel());
        // The reader waits first, so that it is the first to be woken.
        for takes in [Takes::Reads, Takes::All] {
            let (waiting, taken) = (waiting.clone(), taken.clone());
            thread::spawn(move || taken.send((takes, waiting.next(takes))));
            thread::sleep(Duration::from_millis(50));
        }
        for (job, is_read, takes) in [("write", false, Takes::All), ("read", true, Takes::Reads)] {
            waiting.put(job, is_read).unwrap();
            assert_eq!(each.recv_timeout(Duration::from_secs(20)), Ok((takes, Some(job))));
        }
    }
}
