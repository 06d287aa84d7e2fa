//! The atomics of the slot word: the machine's, or loom's when the word is model-checked.

#[cfg(not(loom))]
pub(crate) use crate::futex::{wait, wake_one};
#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU32, Ordering};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(loom)]
pub(crate) use model::{wait, wake_one};

/// A futex as the kernel documents it: comparing and going to sleep are one step, a wake reaches one sleeper.
#[cfg(loom)]
pub(crate) mod model {
    use super::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};

    loom::lazy_static! {
        static ref BUCKET: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    pub(crate) fn wait(word: &AtomicU32, expected: u32) {
        let asleep = BUCKET.0.lock().unwrap();
        if word.load(Ordering::SeqCst) == expected {
            drop(BUCKET.1.wait(asleep).unwrap());
        }
    }

    pub(crate) fn wake_one(_word: &AtomicU32) {
        let _bucket = BUCKET.0.lock().unwrap();
        BUCKET.1.notify_one();
    }
}
