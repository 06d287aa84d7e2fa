//! Sleeping until a word changes: the two futex operations that every lock here is built on.

use core::sync::atomic::AtomicU32;

use rustix::thread::futex::{self, Flags};

/// Sleeps if `word` is still `expected`; may wake for no reason. The caller looks again.
pub(crate) fn wait(word: &AtomicU32, expected: u32) {
    // Every error (changed value, signal) means: look again.
    let _ = futex::wait(word, Flags::PRIVATE, expected, None);
}

/// Wakes one sleeper on `word`, if there is one.
pub(crate) fn wake_one(word: &AtomicU32) {
    let _ = futex::wake(word, Flags::PRIVATE, 1);
}
