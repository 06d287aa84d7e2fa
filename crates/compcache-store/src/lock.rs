//! A mutex of one word on the kernel's futex: no allocation, no thread-local storage, no poison.
//!
//! The three states and their transitions are those of the third mutex in Ulrich Drepper, "Futexes Are Tricky" (2011).
//! The critical sections it guards are tens of nanoseconds, so it spins briefly before it sleeps.

#![allow(unsafe_code)]

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use crate::futex;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;
const SPINS: u32 = 100;

/// Guards a `T`. Locks are not recursive.
pub(crate) struct Mutex<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: `value` is reached only through a `Guard`, and the word lets one exist at a time.
unsafe impl<T: Send> Sync for Mutex<T> {}

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Mutex<T> {
        Mutex { word: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    pub fn lock(&self) -> Guard<'_, T> {
        if self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.lock_slow();
        }
        Guard { mutex: self }
    }

    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        let free = self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // Not `then_some`: it would make a guard in any case, which would unlock what another holds.
        free.then(|| Guard { mutex: self })
    }

    /// Frees the lock whoever held it.
    ///
    /// # Safety
    /// Only in the child of a fork, by its only thread; what is guarded must be fit to be used as it was copied.
    pub unsafe fn free_after_fork(&self) {
        self.word.store(FREE, Ordering::Release);
    }

    #[cold]
    fn lock_slow(&self) {
        for _ in 0..SPINS {
            if self.word.load(Ordering::Relaxed) == FREE
                && self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
            core::hint::spin_loop();
        }
        while self.word.swap(CONTENDED, Ordering::Acquire) != FREE {
            futex::wait(&self.word, CONTENDED);
        }
    }
}

/// The right to use what a [`Mutex`] guards, until dropped.
pub(crate) struct Guard<'a, T> {
    mutex: &'a Mutex<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one alive (the word is not FREE until it drops).
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if self.mutex.word.swap(FREE, Ordering::Release) == CONTENDED {
            futex::wake_one(&self.mutex.word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn increments_by_many_threads_are_all_counted() {
        let count = Mutex::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50_000).for_each(|_| *count.lock() += 1));
            }
        });
        assert_eq!(*count.lock(), 200_000);
        let held = count.lock();
        assert!(count.try_lock().is_none());
        assert!(count.try_lock().is_none(), "trying in vain gave away another's lock");
        drop(held);
        assert!(count.try_lock().is_some());
    }
}
