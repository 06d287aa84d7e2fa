//! What a read takes of the disk.
//!
//! A disk that lets so many operations a second through (a volume of a cloud's, a control group's limit) does so in bursts: most reads take tens of
//! microseconds, and one of some dozens a hundred milliseconds. What such a disk is slow by is that one; so it counts in full, and the mean is over
//! several bursts. It decides what the pool's share is derived from ([`crate::share`]), and whether the handler reads itself.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Who took longer was stopped, more likely than not.
const NS_MAX: u64 = 250_000_000;
/// The mean is that of so many reads, about.
const READS: u64 = 256;
/// What is believed at first weighs as much as so many.
const READS_FIRST: u64 = 16;

/// The mean of what reads took lately, the older ones less and less.
pub struct DeviceTime {
    ns: AtomicU64,
    reads: AtomicU64,
}

impl DeviceTime {
    /// Before there was a read.
    pub fn new(believed_ns: u64) -> Self {
        DeviceTime { ns: AtomicU64::new(believed_ns), reads: AtomicU64::new(READS_FIRST) }
    }

    /// The mean, nanoseconds.
    pub fn ns(&self) -> u64 {
        self.ns.load(Relaxed)
    }

    /// A read took so long. Of two at once one may be lost.
    pub fn note(&self, took_ns: u64) {
        let (reads, was_ns) = (self.reads.load(Relaxed).min(READS - 1) + 1, self.ns());
        self.reads.store(reads, Relaxed);
        self.ns.store((was_ns * (reads - 1) + took_ns.min(NS_MAX)) / reads, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_reads_in_bursts_is_as_slow_as_it_is_on_the_whole() {
        let time = DeviceTime::new(100_000);
        let mut means = (0..2000).map(|read| {
            time.note(if read % 70 == 69 { 95_000_000 } else { 70_000 });
            time.ns()
        });
        // 1.43 ms each. The first wait is believed at once, and from then on it is never taken for a fast one.
        assert!(means.by_ref().take(69).all(|ns| ns < 100_000));
        assert!(means.all(|ns| (500_000..2_500_000).contains(&ns)));
    }

    #[test]
    fn one_long_wait_does_not_make_a_fast_disk_slow_for_long() {
        let time = DeviceTime::new(100_000);
        (0..1000).for_each(|_| time.note(60_000));
        time.note(u64::MAX);
        assert!(time.ns() > 400_000);
        (0..300).for_each(|_| time.note(60_000));
        assert!(time.ns() < 400_000);
    }
}
