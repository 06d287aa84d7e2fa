//! How long reads and writes take: a histogram that costs two additions.
//!
//! Log-linear: every power of two is cut into eight buckets, so a percentile is within 1/16 of the truth from a nanosecond
//! to four seconds, in 232 counters. Example: 1100 ns falls into 1024..1152 and is reported as 1088.
//!
//! An operation is counted last, so a snapshot that counts it has its bounds; one taken while others record may miss the last few.
//!
//! # Source
//! The bucket layout of HdrHistogram (Gil Tene), cut to what a pool needs.

use core::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

const SUB_BITS: u32 = 3;
const SUB: usize = 1 << SUB_BITS;
const NS_BITS: u32 = 32;
const BUCKETS: usize = SUB + (NS_BITS - SUB_BITS) as usize * SUB;

/// Durations of one kind of operation, as one shard of workers saw them. All zero at first.
pub(crate) struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
    /// How far the shortest is below the longest there can be.
    below_longest_ns: AtomicU64,
    max_ns: AtomicU64,
}

fn bucket_of(ns: u64) -> usize {
    if ns < SUB as u64 {
        return ns as usize;
    }
    let power = ns.ilog2().min(NS_BITS - 1);
    let sub = if ns >> NS_BITS == 0 { (ns >> (power - SUB_BITS)) as usize & (SUB - 1) } else { SUB - 1 };
    SUB + (power - SUB_BITS) as usize * SUB + sub
}

/// The middle of a bucket.
fn value_of(bucket: usize) -> u64 {
    if bucket < SUB {
        return bucket as u64;
    }
    let shift = (bucket - SUB) / SUB;
    let low = ((SUB + (bucket - SUB) % SUB) as u64) << shift;
    low + (1u64 << shift) / 2
}

impl Histogram {
    /// Records one operation that took `ns`.
    #[inline]
    pub fn record(&self, ns: u64) {
        self.sum_ns.fetch_add(ns, Relaxed);
        if !ns > self.below_longest_ns.load(Relaxed) {
            self.below_longest_ns.fetch_max(!ns, Relaxed);
        }
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.fetch_max(ns, Relaxed);
        }
        // Whoever sees this sees the above.
        self.buckets[bucket_of(ns)].fetch_add(1, Release);
    }
}

/// The durations of reads, or of writes, of a pool since it was made. Failed operations are not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencySnapshot {
    /// Operations.
    pub count: u64,
    /// The shortest, in nanoseconds; zero when there was none.
    pub min_ns: u64,
    /// The longest, in nanoseconds.
    pub max_ns: u64,
    /// All together, in nanoseconds.
    pub sum_ns: u64,
    /// `sum_ns / count`, or zero.
    pub average_ns: u64,
    /// Half of all took at most this long, within 1/16.
    pub p50_ns: u64,
    /// 99 of 100 took at most this long, within 1/16.
    pub p99_ns: u64,
}

/// Reads and writes apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// [`Pool::read`](crate::Pool::read) and [`Pool::take`](crate::Pool::take) of pages that were there or absent.
    pub reads: LatencySnapshot,
    /// [`Pool::write`](crate::Pool::write) of pages that were stored.
    pub writes: LatencySnapshot,
}

/// How many operations the histograms have seen.
pub(crate) fn count<'h>(shards: impl Iterator<Item = &'h Histogram>) -> u64 {
    shards.flat_map(|shard| &shard.buckets).map(|bucket| bucket.load(Relaxed)).sum()
}

/// Adds the shards up.
pub(crate) fn snapshot<'h>(shards: impl Iterator<Item = &'h Histogram>) -> LatencySnapshot {
    let mut buckets = [0u64; BUCKETS];
    let mut taken = LatencySnapshot { min_ns: u64::MAX, ..LatencySnapshot::default() };
    for shard in shards {
        for (total, bucket) in buckets.iter_mut().zip(&shard.buckets) {
            *total += bucket.load(Acquire);
        }
        taken.sum_ns = taken.sum_ns.wrapping_add(shard.sum_ns.load(Relaxed));
        taken.min_ns = taken.min_ns.min(!shard.below_longest_ns.load(Relaxed));
        taken.max_ns = taken.max_ns.max(shard.max_ns.load(Relaxed));
    }
    taken.count = buckets.iter().sum();
    if taken.count == 0 {
        return LatencySnapshot::default();
    }
    // Not `clamp`, which ends the process if a bound is missing: no statistic is worth that.
    let within = |ns: u64| ns.max(taken.min_ns).min(taken.max_ns);
    // The sum may have operations that are not counted yet.
    let average_ns = within(taken.sum_ns / taken.count);
    let at = |share_of_100: u64| {
        let rank = (taken.count * share_of_100).div_ceil(100);
        let mut seen = 0;
        let bucket = buckets.iter().position(|n| {
            seen += n;
            seen >= rank
        });
        within(value_of(bucket.unwrap_or(BUCKETS - 1)))
    };
    LatencySnapshot { average_ns, p50_ns: at(50), p99_ns: at(99), ..taken }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_within_a_sixteenth_of_every_value_in_it() {
        for ns in (0..5000).chain((12..32).flat_map(|p| [(1u64 << p) - 1, 1 << p, (1 << p) + 1, 3 << (p - 1)])) {
            let value = value_of(bucket_of(ns));
            assert!(value.abs_diff(ns) * 16 <= ns.max(16), "{ns} is reported as {value}");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    fn histogram() -> Histogram {
        let zero = || AtomicU64::new(0);
        let buckets = core::array::from_fn(|_| zero());
        Histogram { buckets, sum_ns: zero(), below_longest_ns: zero(), max_ns: zero() }
    }

    #[test]
    fn percentiles_of_a_hundred_known_durations_are_right() {
        let histogram = histogram();
        (1..=100).for_each(|n| histogram.record(n * 1000));
        let seen = snapshot([&histogram].into_iter());
        assert_eq!((seen.count, seen.min_ns, seen.max_ns, seen.sum_ns), (100, 1000, 100_000, 5_050_000));
        assert_eq!(seen.average_ns, 50_500);
        assert!(seen.p50_ns.abs_diff(50_000) < 3200 && seen.p99_ns.abs_diff(99_000) < 6200, "{seen:?}");
    }

    #[test]
    fn an_operation_without_its_bounds_is_no_reason_to_end() {
        let histogram = histogram();
        histogram.buckets[bucket_of(1000)].fetch_add(1, Relaxed);
        assert_eq!(snapshot([&histogram].into_iter()).count, 1);
    }

    #[test]
    fn what_is_counted_while_others_record_has_its_bounds() {
        for ns in 1..2000u64 {
            let histogram = histogram();
            std::thread::scope(|scope| {
                scope.spawn(|| histogram.record(ns));
                let seen = snapshot([&histogram].into_iter());
                let bounds = (seen.min_ns, seen.max_ns, seen.average_ns);
                assert!(seen.count == 0 || bounds == (ns, ns, ns), "{seen:?} of {ns}");
            });
        }
    }

    #[test]
    fn no_operations_give_zeroes() {
        assert_eq!(snapshot([&histogram()].into_iter()), LatencySnapshot::default());
    }
}
