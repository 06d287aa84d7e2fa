//! The time of the last change of a file whose pages the kernel writes back.
//!
//! The kernel keeps that time, too, and gives it to the file when it has asked for pages to be written. Those requests may still wait, in the kernel or here, when
//! that one is served, and what they write makes the file younger than the kernel takes it to be, for as long as it knows the file; so it does if it was written to in the tick
//! of the kernel's clock in which it was made. So the file is given the same time again after what is written soon after; if that is a later change, the kernel gives it another.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
use rustix::io;

/// utimensat(2): the time there is.
pub const AS_IT_IS: Timespec = Timespec { tv_sec: 0, tv_nsec: 0x3fff_fffe };
const NSEC_PER_SEC: i64 = 1_000_000_000;

/// How much later than a file's time the writes before it are expected. If the server is killed, what was changed and written in this time may have the time before.
const OVERTAKEN_MAX: Duration = Duration::from_secs(10);

/// What the kernel has given a file, and when.
#[derive(Debug, Default)]
pub struct Modified(Mutex<Option<(Instant, Timespec)>>);

impl Modified {
    /// Gives the file at `path` both times, of which the second one is to stay if it is a time.
    pub fn set(&self, path: &str, times: &Timestamps) -> io::Result<()> {
        if times.last_modification.tv_nsec < NSEC_PER_SEC {
            // First, so that who is about to give it another gives it this one afterwards.
            self.told(times.last_modification);
        }
        utimensat(CWD, path, times, AtFlags::empty()).inspect_err(|_| *self.lock() = None)
    }

    /// The kernel is told that this is the file's time.
    pub fn told(&self, time: Timespec) {
        *self.lock() = Some((Instant::now(), time));
    }

    /// The file was written to by a request that may have been made before.
    pub fn restore(&self, path: &str) {
        let mut restored = None;
        while let Some(given) = self.given().filter(|given| restored.as_ref() != Some(given)) {
            let times = Timestamps { last_access: AS_IT_IS, last_modification: given.1 };
            // Where we may not, the time is that of the writing. Nobody waits for it by the lock: below may be a file server.
            let _ = utimensat(CWD, path, &times, AtFlags::empty());
            restored = Some(given);
        }
    }

    fn given(&self) -> Option<(Instant, Timespec)> {
        self.lock().filter(|(at, _)| at.elapsed() < OVERTAKEN_MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Instant, Timespec)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn what_is_written_after_a_time_that_was_given_before_leaves_that_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        let named = path.to_str().unwrap();
        fs::write(&path, "one").unwrap();
        let modified = Modified::default();
        let time_of = || fs::metadata(&path).map(|stat| (stat.mtime(), stat.mtime_nsec())).unwrap();
        let first = time_of();
        modified.restore(named);
        assert_eq!(time_of(), first, "none was given");
        let time = Timespec { tv_sec: 1_000_000_000, tv_nsec: 7 };
        modified.set(named, &Timestamps { last_access: AS_IT_IS, last_modification: time }).unwrap();
        fs::write(&path, "two").unwrap();
        assert_ne!(time_of(), (1_000_000_000, 7));
        modified.restore(named);
        assert_eq!(time_of(), (1_000_000_000, 7));
        // A time of access alone changes nothing of that.
        modified.set(named, &Timestamps { last_access: time, last_modification: AS_IT_IS }).unwrap();
        fs::write(&path, "three").unwrap();
        modified.restore(named);
        assert_eq!(time_of(), (1_000_000_000, 7));
    }
}
