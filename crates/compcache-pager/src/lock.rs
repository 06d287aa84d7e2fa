//! A mutex of four bytes on the kernel's futex, for threads that may use nothing of libc.
//!
//! Three states, after Drepper's "Futexes Are Tricky" (2011), mutex 3: free, held, held with somebody waiting.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering::*};
use rustix::thread::futex;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;
/// Rounds of looking before a thread sleeps: about 10 us. Locks here are held for 2 us, or while a few pages move; being
/// woken from sleep costs more than either.
const SPINS: u32 = 250;
/// Rounds of [`pause`] in which a lock is free once: ten seconds at least.
const PASSES: u32 = 200_000;

/// Waits until `word` no longer holds `value`, or `timeout_ns` have passed, or for no reason at all.
pub fn wait(word: &AtomicU32, value: u32, timeout_ns: Option<u64>) {
    let timeout = timeout_ns
        .map(|ns| futex::Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as _ });
    let _ = futex::wait(word, futex::Flags::PRIVATE, value, timeout.as_ref());
}

/// Wakes everybody who waits on `word`.
pub fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX as u32);
}

/// Lets one thread go first at a lock that another takes again and again.
///
/// The mutex is not fair: who frees it and comes back at once finds it free before the sleeper it woke has run. The one
/// that must not starve announces itself here; the other waits until it has had the lock.
pub struct Turn(AtomicU32);

const NOBODY: u32 = 0;
const WANTED: u32 = 1;
const WANTED_AND_WATCHED: u32 = 2;

impl Turn {
    /// Nobody wants to go first.
    pub const fn new() -> Self {
        Turn(AtomicU32::new(NOBODY))
    }

    /// Announces that this thread wants the lock now.
    pub fn want(&self) {
        self.0.store(WANTED, Release);
    }

    /// It has it.
    pub fn had(&self) {
        if self.0.swap(NOBODY, AcqRel) == WANTED_AND_WATCHED {
            wake(&self.0);
        }
    }

    /// In a copy of the process: whoever wanted it, or waited, exists only in the parent.
    pub fn forget(&self) {
        self.0.store(NOBODY, Release);
    }

    /// Waits until the other thread, if it wants the lock, has it.
    pub fn let_go_first(&self) {
        for _ in 0..SPINS {
            if self.0.load(Acquire) == NOBODY {
                return;
            }
            core::hint::spin_loop();
        }
        if self.0.compare_exchange(WANTED, WANTED_AND_WATCHED, AcqRel, Acquire) != Err(NOBODY) {
            wait(&self.0, WANTED_AND_WATCHED, Some(1_000_000));
        }
    }
}

/// Waits a little, for what no word tells.
pub fn pause() {
    let never = AtomicU32::new(0);
    wait(&never, 0, Some(50_000));
}

/// Mutual exclusion around a `T`.
pub struct Mutex<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the word lets one thread at a time reach the value.
unsafe impl<T: Send> Sync for Mutex<T> {}
// SAFETY: owning the mutex is owning the value.
unsafe impl<T: Send> Send for Mutex<T> {}

impl<T> Mutex<T> {
    /// An unlocked mutex.
    pub const fn new(value: T) -> Self {
        Mutex { word: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock.
    pub fn lock(&self) -> Guard<'_, T> {
        if self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_err() {
            self.lock_contended();
        }
        Guard { mutex: self }
    }

    /// Waits for the lock, but not much longer than `timeout_ns`.
    pub fn lock_within(&self, timeout_ns: u64) -> Option<Guard<'_, T>> {
        if self.word.swap(CONTENDED, Acquire) != FREE {
            wait(&self.word, CONTENDED, Some(timeout_ns));
            if self.word.swap(CONTENDED, Acquire) != FREE {
                return None;
            }
        }
        Some(Guard { mutex: self })
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok().then(|| Guard { mutex: self })
    }

    /// Waits until nobody has the lock for a moment: what is done under it after this sees what the caller did before. Takes nothing, so that
    /// a signal may interrupt it. Not for ever: in a copy of the process made past libc who has it may not exist.
    pub fn pass(&self) {
        for _ in 0..PASSES {
            // Not a load: this is to be in the order of those who change it.
            if self.word.fetch_add(0, AcqRel) == FREE {
                return;
            }
            pause();
        }
    }

    #[cold]
    fn lock_contended(&self) {
        for _ in 0..SPINS {
            if self.word.load(Relaxed) == FREE && self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok() {
                return;
            }
            core::hint::spin_loop();
        }
        while self.word.swap(CONTENDED, Acquire) != FREE {
            wait(&self.word, CONTENDED, None);
        }
    }

    /// Frees the lock whoever held it.
    ///
    /// # Safety
    /// For a process that has just been copied by fork: the holder exists only in the parent, and what it protects must
    /// be fit to be used as it was copied.
    pub unsafe fn free_after_fork(&self) {
        self.word.store(FREE, Release);
    }

    /// Leaves the lock held with no guard to free it: for [`Mutex::free_held`].
    pub fn hold(&self) {
        core::mem::forget(self.lock());
    }

    /// Frees the lock taken by [`Mutex::hold`].
    ///
    /// # Safety
    /// The caller must be the one that called `hold`, and have no reference to the value left.
    pub unsafe fn free_held(&self) {
        drop(Guard { mutex: self });
    }
}

/// The lock, held.
pub struct Guard<'a, T> {
    mutex: &'a Mutex<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard exists only while its thread holds the lock.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists only while its thread holds the lock, and is borrowed uniquely here.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if self.mutex.word.swap(FREE, Release) == CONTENDED {
            let _ = futex::wake(&self.mutex.word, futex::Flags::PRIVATE, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_held_is_not_taken_and_stays_held() {
        let mutex = Mutex::new(1);
        let held = mutex.try_lock().unwrap();
        assert!(mutex.try_lock().is_none() && mutex.try_lock().is_none());
        drop(held);
        assert_eq!(*mutex.try_lock().unwrap(), 1);
    }

    #[test]
    fn who_passes_has_waited_for_who_has_the_lock() {
        let (mutex, done) = (Mutex::new(()), AtomicU32::new(0));
        std::thread::scope(|scope| {
            let held = mutex.lock();
            let waiter = scope.spawn(|| {
                mutex.pass();
                done.load(Relaxed)
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            done.store(1, Relaxed);
            drop(held);
            assert_eq!(waiter.join().unwrap(), 1);
        });
        assert!(mutex.try_lock().is_some(), "it was taken");
    }

    #[test]
    fn nobody_is_let_go_first_who_exists_only_in_the_parent() {
        let turn = Turn::new();
        for is_watched in [false, true] {
            turn.want();
            if is_watched {
                turn.let_go_first();
            }
            turn.forget();
            assert_eq!(turn.0.load(Acquire), NOBODY);
        }
    }
}
