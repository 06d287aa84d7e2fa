//! A thread that has answered looks for the next request for a while before it sleeps, and the others leave it to that one.
//!
//! To wake a thread on a processor that sleeps takes longer than to serve a page: tens of microseconds in a virtual
//! machine. Whoever waits for each answer before he asks again (a journal, a program that faults its pages in) pays that
//! with each request. So one thread of a connection at a time goes on looking for [`LONGEST`], and lets others have its
//! processor with each look. That is a processor's time, spent in the hope of a request, so hope is kept count of: after
//! `n` looks in vain, one after the other, it is tried again after 2^n requests, 2^[`MISSES_MAX`] at most. A connection whose
//! requests come far apart pays next to nothing; one that is asked again and again has a thread that looks.
//!
//! A thread that sleeps in read(2) meanwhile is woken by the kernel for each request all the same, runs for it, and takes the
//! processor that the client wants, mostly for nothing. So while one looks the others stand by elsewhere, until they are called:
//! when the one who looks goes to sleep, when he has found several requests that came before he looked, and when he is
//! about to do something long. Should a call not come, they look themselves, fifty times a second.
//!
//! On a machine with one processor nobody looks: the one who would ask could not run.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

const LONGEST: Duration = Duration::from_micros(100);
const MISSES_MAX: u32 = 6;
/// So many requests in a row that came before they were looked for are more than one thread's work.
const AT_ONCE_MANY: u32 = 3;
const STAND_BY: Duration = Duration::from_millis(20);

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// What the threads that serve a connection share.
#[derive(Debug)]
pub struct Linger {
    /// A descriptor of the connection, to look through.
    connection: OwnedFd,
    alone: bool,
    /// Somebody looks now. The three below are changed by him.
    occupied: AtomicBool,
    misses: AtomicU32,
    skipped: AtomicU32,
    at_once: AtomicU32,
    /// How often somebody was called, and how many stand by; that is changed with the lock held.
    calls: Mutex<u32>,
    called: Condvar,
    standing_by: AtomicU32,
}

/// A request is being served.
#[derive(Debug)]
pub struct AfterThis<'a>(&'a Linger);

impl Drop for AfterThis<'_> {
    fn drop(&mut self) {
        self.0.look();
    }
}

/// What came of looking.
enum Found {
    /// A request that had come before.
    AtOnce,
    Later,
    Nothing,
}

impl Linger {
    /// For the threads that serve `connection`; a descriptor of it.
    #[must_use]
    pub fn new(connection: OwnedFd) -> Linger {
        Linger {
            connection,
            alone: thread::available_parallelism().is_ok_and(|processors| processors.get() == 1),
            occupied: AtomicBool::new(false),
            misses: AtomicU32::new(0),
            skipped: AtomicU32::new(0),
            at_once: AtomicU32::new(0),
            calls: Mutex::new(0),
            called: Condvar::new(),
            standing_by: AtomicU32::new(0),
        }
    }

    /// Returns when there is a request, or the time is up; at once when there is little hope. When another thread looks,
    /// once that one wants help. To be called by a thread that would wait for a request next.
    pub fn look(&self) {
        if self.alone {
            return;
        }
        if self.occupied.swap(true, Relaxed) {
            return self.stand_by();
        }
        let (misses, skipped) = (self.misses.load(Relaxed), self.skipped.load(Relaxed) + 1);
        let mut found = Found::Nothing;
        if skipped < 1 << misses {
            self.skipped.store(skipped, Relaxed);
        } else {
            found = self.look_for_a_while();
            let in_vain = matches!(found, Found::Nothing);
            self.misses.store(if in_vain { (misses + 1).min(MISSES_MAX) } else { 0 }, Relaxed);
            self.skipped.store(0, Relaxed);
        }
        let at_once = if matches!(found, Found::AtOnce) { self.at_once.load(Relaxed) + 1 } else { 0 };
        self.at_once.store(at_once.min(AT_ONCE_MANY), Relaxed);
        self.occupied.store(false, Relaxed);
        match found {
            Found::Nothing => self.call(Condvar::notify_all),
            Found::AtOnce if at_once >= AT_ONCE_MANY => self.call_one(),
            _ => {}
        }
    }

    /// Looks, as [`Linger::look`] does, when the answer is dropped.
    #[must_use]
    pub fn after_this(&self) -> AfterThis<'_> {
        AfterThis(self)
    }

    /// Has another thread serve what comes meanwhile, if one stands by. To be called before what takes longer than to wake a
    /// thread.
    pub fn call_one(&self) {
        self.call(Condvar::notify_one);
    }

    fn call(&self, notify: fn(&Condvar)) {
        let mut calls = self.calls();
        if self.standing_by.load(Relaxed) > 0 {
            *calls = calls.wrapping_add(1);
            notify(&self.called);
        }
    }

    fn stand_by(&self) {
        let mut calls = self.calls();
        let before = *calls;
        // He who looked may have gone to sleep, and have found nobody to call; or he has more than he can do.
        if !self.occupied.load(Relaxed) || self.at_once.load(Relaxed) > 0 {
            return;
        }
        self.standing_by.fetch_add(1, Relaxed);
        while *calls == before && !self.request_is_there() {
            (calls, _) = self.called.wait_timeout(calls, STAND_BY).unwrap_or_else(PoisonError::into_inner);
        }
        self.standing_by.fetch_sub(1, Relaxed);
    }

    fn look_for_a_while(&self) -> Found {
        if self.request_is_there() {
            return Found::AtOnce;
        }
        let started = Instant::now();
        while started.elapsed() < LONGEST {
            thread::yield_now();
            if self.request_is_there() {
                return Found::Later;
            }
        }
        Found::Nothing
    }

    /// An error is the reader's to see, as is a connection that is cut.
    fn request_is_there(&self) -> bool {
        poll(&mut [PollFd::new(&self.connection, PollFlags::IN)], Some(&AT_ONCE)) != Ok(0)
    }

    fn calls(&self) -> MutexGuard<'_, u32> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{read, write};

    use super::*;

    const SOON: Duration = Duration::from_secs(10);
    const A_WHILE: Duration = Duration::from_millis(200);

    /// Whatever the machine has, with an event for its connection.
    fn linger() -> Linger {
        Linger { alone: false, ..Linger::new(eventfd(0, EventfdFlags::empty()).unwrap()) }
    }

    fn request(linger: &Linger) {
        write(linger.connection.as_fd(), &1_u64.to_ne_bytes()).unwrap();
    }

    fn take(linger: &Linger) {
        read(linger.connection.as_fd(), &mut [0_u8; 8]).unwrap();
    }

    /// Whoever stands by goes on, also when a test fails.
    struct GoOn<'a>(&'a Linger);

    impl Drop for GoOn<'_> {
        fn drop(&mut self) {
            request(self.0);
        }
    }

    /// While one looks, as it seems, another begins to; what is done then, and when that one has come back.
    fn beside_one_who_looks(linger: &Linger, then: impl FnOnce(&Receiver<()>)) {
        linger.occupied.store(true, Relaxed);
        let (back, comes_back) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                linger.look();
                back.send(()).unwrap();
            });
            let _go_on = GoOn(linger);
            then(&comes_back);
        });
        assert_eq!(linger.standing_by.load(Relaxed), 0);
    }

    /// However late the thread begins.
    fn await_one_who_stands_by(linger: &Linger) {
        let until = Instant::now() + SOON;
        while linger.standing_by.load(Relaxed) == 0 {
            assert!(Instant::now() < until, "nobody stands by");
            thread::yield_now();
        }
    }

    fn stays_away(comes_back: &Receiver<()>) {
        assert_eq!(comes_back.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout));
    }

    #[test]
    fn whoever_finds_somebody_looking_stands_by_until_he_is_called() {
        let linger = linger();
        beside_one_who_looks(&linger, |comes_back| {
            await_one_who_stands_by(&linger);
            stays_away(comes_back);
            linger.call_one();
            comes_back.recv_timeout(SOON).unwrap();
        });
    }

    #[test]
    fn he_who_goes_to_sleep_calls_all() {
        let linger = linger();
        beside_one_who_looks(&linger, |comes_back| {
            await_one_who_stands_by(&linger);
            stays_away(comes_back);
            linger.occupied.store(false, Relaxed);
            linger.look();
            comes_back.recv_timeout(SOON).unwrap();
        });
    }

    #[test]
    fn a_request_that_nobody_takes_is_found_without_a_call() {
        let linger = linger();
        beside_one_who_looks(&linger, |comes_back| {
            stays_away(comes_back);
            request(&linger);
            comes_back.recv_timeout(SOON).unwrap();
        });
    }

    #[test]
    fn where_requests_were_there_at_once_nobody_stands_by() {
        let linger = linger();
        request(&linger);
        linger.look();
        take(&linger);
        beside_one_who_looks(&linger, |comes_back| comes_back.recv_timeout(SOON).unwrap());
    }

    #[test]
    fn after_looks_in_vain_there_is_less_hope_and_after_a_request_there_is_again() {
        let linger = linger();
        (0..1 << (MISSES_MAX + 2)).for_each(|_| linger.look());
        assert_eq!(linger.misses.load(Relaxed), MISSES_MAX);
        request(&linger);
        (0..1 << MISSES_MAX).for_each(|_| linger.look());
        assert_eq!(linger.misses.load(Relaxed), 0);
    }
}
