//! The lock bit in a slot's meta word.
//!
//! The lock lives in the word it guards: taking it returns what the slot holds, and giving it back stores what the slot
//! holds from then on, in the same atomic step. A second bit says that somebody sleeps, so that giving it back is one
//! exchange and no system call unless it must be.
//!
//! | word            | lock()                      | unlock(new)          |
//! |-----------------|-----------------------------|----------------------|
//! | free            | -> held, returns the slot   | (not held: a bug)    |
//! | held            | spins, then -> held+waiters | -> free, new         |
//! | held+waiters    | sleeps                      | -> free, new; wakes one |
//!
//! Whoever wakes takes the lock with the waiters bit set, since others may still sleep. Model-checked with loom, futex
//! included (`RUSTFLAGS="--cfg loom" cargo test -p compcache-store --lib`).

use crate::slot::{LOCKED, WAITERS};
use crate::sync::{AtomicU32, Ordering, wait, wake_one};

#[cfg(not(loom))]
const SPINS: u32 = 60;
#[cfg(loom)]
const SPINS: u32 = 0;

/// Takes the lock and returns the slot's meta word, lock bits clear.
#[inline]
pub(crate) fn lock(word: &AtomicU32) -> u32 {
    let seen = word.load(Ordering::Relaxed);
    if seen & LOCKED == 0 && word.compare_exchange(seen, seen | LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok() {
        return seen;
    }
    lock_slow(word)
}

/// Takes the lock if the slot is free and its meta word is `expected`.
#[inline]
pub(crate) fn try_lock_if(word: &AtomicU32, expected: u32) -> bool {
    word.compare_exchange(expected, expected | LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// Gives the lock back and makes `meta` (lock bits clear) the slot's meta word.
#[inline]
pub(crate) fn unlock(word: &AtomicU32, meta: u32) {
    debug_assert_eq!(meta & (LOCKED | WAITERS), 0);
    let before = word.swap(meta, Ordering::Release);
    debug_assert_ne!(before & LOCKED, 0, "a slot was unlocked by somebody who did not hold it");
    if before & WAITERS != 0 {
        wake_one(word);
    }
}

#[cold]
fn lock_slow(word: &AtomicU32) -> u32 {
    // Becomes WAITERS once we have slept: other sleepers may then be left, and unlocking must wake them.
    let mut with = LOCKED;
    let mut spins = 0;
    loop {
        let seen = word.load(Ordering::Relaxed);
        if seen & LOCKED == 0 {
            if word.compare_exchange(seen, seen | with, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return seen;
            }
        } else if spins < SPINS {
            spins += 1;
            core::hint::spin_loop();
        } else {
            let marked = seen | WAITERS;
            if seen == marked || word.compare_exchange(seen, marked, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                wait(word, marked);
                with = LOCKED | WAITERS;
            }
        }
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    struct Page {
        meta: AtomicU32,
        payload: UnsafeCell<u32>,
    }

    const SHIFT: u32 = 16;

    fn write(page: &Page, value: u32) {
        lock(&page.meta);
        page.payload.with_mut(|payload| {
            #[allow(unsafe_code)]
            // SAFETY: the lock is held; loom checks that nobody else is inside.
            unsafe {
                *payload = value;
            }
        });
        unlock(&page.meta, value << SHIFT);
    }

    fn read(page: &Page) -> (u32, u32) {
        let meta = lock(&page.meta);
        #[allow(unsafe_code)]
        // SAFETY: the lock is held.
        let payload = page.payload.with(|payload| unsafe { *payload });
        unlock(&page.meta, meta);
        (meta >> SHIFT, payload)
    }

    /// All interleavings with at most two involuntary switches between threads, or `LOOM_MAX_PREEMPTIONS`: two take
    /// seconds, three minutes, and the whole space of three threads hours.
    fn check(test: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = model.preemption_bound.or(Some(2));
        model.check(test);
    }

    #[test]
    fn a_reader_never_sees_half_of_a_write_and_no_sleeper_is_forgotten() {
        check(|| {
            let page = Arc::new(Page { meta: AtomicU32::new(0), payload: UnsafeCell::new(0) });
            let writer = {
                let page = page.clone();
                loom::thread::spawn(move || write(&page, 1))
            };
            let other = {
                let page = page.clone();
                loom::thread::spawn(move || write(&page, 2))
            };
            let (meta, payload) = read(&page);
            assert_eq!(meta, payload);
            writer.join().unwrap();
            other.join().unwrap();
            let (meta, payload) = read(&page);
            assert!(meta == payload && meta != 0);
        });
    }

    #[test]
    fn a_conditional_lock_excludes_a_writer() {
        check(|| {
            let page = Arc::new(Page { meta: AtomicU32::new(0), payload: UnsafeCell::new(0) });
            let writer = {
                let page = page.clone();
                loom::thread::spawn(move || write(&page, 1))
            };
            if try_lock_if(&page.meta, 0) {
                #[allow(unsafe_code)]
                // SAFETY: the lock is held.
                page.payload.with_mut(|payload| unsafe { *payload = 0 });
                unlock(&page.meta, 0);
            }
            writer.join().unwrap();
            assert_eq!(read(&page), (1, 1));
        });
    }
}
