//! What a pool counts, and what each number is called elsewhere.
//!
//! [`TABLE`] is the one place that gives a statistic its name, unit and meaning: the kernel's word (zram's `mm_stat`,
//! `io_stat`, `bd_stat`), the name ramzswap printed, and how to read it from a [`PoolStats`]. Front ends print from it.
//!
//! Counting must not slow two threads down, so the counters are sharded by worker, each shard on its own cache lines;
//! gauges are sums of differences that wrap. A reading taken while others write may be off by the operations in flight.

use alloc::boxed::Box;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::groups::GroupSize;
use crate::latency::{self, Histogram, Latency};
use crate::page::PAGE_SIZE;

const SHARDS: usize = 8;
/// Things counted per page: pages, same-filled, raw, compressed to half or less, payload bytes, slot bytes; on the backing,
/// and bytes there; in groups, bytes of the groups' frames, and groups.
const GAUGES: usize = 11;

/// What one page adds to the gauges of its pool.
#[derive(Clone, Copy, Default)]
pub(crate) struct Footprint([u64; GAUGES]);

impl Footprint {
    pub const ABSENT: Footprint = Footprint([0; GAUGES]);
    pub const SAME_FILLED: Footprint = Footprint([1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    /// Nobody knows what it was: what that had cost stays counted.
    pub const DAMAGED: Footprint = Footprint([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    /// A page in a group. What the group takes is counted once, with the group.
    pub const GROUPED: Footprint = Footprint([1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]);

    /// An object of `length` bytes in a slot of `slot_bytes`.
    pub fn stored(raw: bool, length: usize, slot_bytes: usize) -> Footprint {
        let good = !raw && length <= PAGE_SIZE / 2;
        Footprint([1, 0, u64::from(raw), u64::from(good), length as u64, slot_bytes as u64, 0, 0, 0, 0, 0])
    }

    /// A record of so many bytes on the backing.
    pub fn on_backing(record_bytes: usize) -> Footprint {
        Footprint([1, 0, 0, 0, 0, 0, 1, record_bytes as u64, 0, 0, 0])
    }

    /// A group, without its pages.
    pub fn group(size: GroupSize) -> Footprint {
        let (length, slot_bytes) = (size.length as u64, size.slot_bytes as u64);
        Footprint([0, 0, 0, 0, length, slot_bytes, 0, 0, 0, length, 1])
    }
}

#[repr(align(128))]
pub(crate) struct Shard {
    gauges: [AtomicU64; GAUGES],
    pub reads: Histogram,
    pub writes: Histogram,
    pub failed_reads: AtomicU64,
    pub failed_writes: AtomicU64,
    pub invalid: AtomicU64,
    pub discards: AtomicU64,
    pub compacted: AtomicU64,
    pub recompressed: AtomicU64,
    pub bd_reads: AtomicU64,
    pub bd_writes: AtomicU64,
    pub bd_failed: AtomicU64,
}

impl Shard {
    /// A page went from one footprint to another.
    #[inline]
    pub fn change(&self, before: Footprint, after: Footprint) {
        for ((gauge, before), after) in self.gauges.iter().zip(before.0).zip(after.0) {
            let difference = after.wrapping_sub(before);
            if difference != 0 {
                gauge.fetch_add(difference, Relaxed);
            }
        }
    }
}

/// The counters of a pool.
pub(crate) struct Counters {
    shards: [Shard; SHARDS],
}

impl Counters {
    /// All zero. The shards that nobody counts in take no memory.
    #[allow(unsafe_code)]
    pub fn new() -> Box<Counters> {
        // SAFETY: all of it is atomic numbers, which are valid when zero.
        unsafe { Box::<Counters>::new_zeroed().assume_init() }
    }

    /// The shard of a worker. Those who have none use the last.
    #[inline]
    pub fn shard(&self, worker: usize) -> &Shard {
        &self.shards[worker % SHARDS]
    }

    fn gauge(&self, which: usize) -> u64 {
        let add = |sum: u64, shard: &Shard| sum.wrapping_add(shard.gauges[which].load(Relaxed));
        // A reading in the middle of a change can be a little below zero.
        (self.shards.iter().fold(0, add) as i64).max(0) as u64
    }

    fn total(&self, which: impl Fn(&Shard) -> &AtomicU64) -> u64 {
        self.shards.iter().map(|shard| which(shard).load(Relaxed)).sum()
    }

    /// Bytes of the slots of all objects.
    pub fn slot_bytes(&self) -> u64 {
        self.gauge(5)
    }

    /// Pages in memory that are kept raw.
    pub fn raw_pages(&self) -> u64 {
        self.gauge(2)
    }

    pub fn latency(&self) -> Latency {
        Latency {
            reads: latency::snapshot(self.shards.iter().map(|shard| &shard.reads)),
            writes: latency::snapshot(self.shards.iter().map(|shard| &shard.writes)),
        }
    }

    /// Everything but what only the pool knows (tables, limit).
    pub fn read(&self) -> PoolStats {
        let pages = self.gauge(0);
        let same_pages = self.gauge(1);
        PoolStats {
            orig_data_size: pages * PAGE_SIZE as u64,
            compr_data_size: self.gauge(4),
            same_pages,
            huge_pages: self.gauge(2),
            good_pages: self.gauge(3),
            pages_compacted: self.total(|shard| &shard.compacted),
            num_reads: latency::count(self.shards.iter().map(|shard| &shard.reads)),
            num_writes: latency::count(self.shards.iter().map(|shard| &shard.writes)),
            failed_reads: self.total(|shard| &shard.failed_reads),
            failed_writes: self.total(|shard| &shard.failed_writes),
            invalid_io: self.total(|shard| &shard.invalid),
            pages_discard: self.total(|shard| &shard.discards),
            slot_bytes: self.slot_bytes(),
            grouped_pages: self.gauge(8),
            group_bytes: self.gauge(9),
            groups: self.gauge(10),
            pages_recompressed: self.total(|shard| &shard.recompressed),
            bd_count: self.gauge(6),
            bd_bytes: self.gauge(7),
            bd_reads: self.total(|shard| &shard.bd_reads),
            bd_writes: self.total(|shard| &shard.bd_writes),
            bd_failed: self.total(|shard| &shard.bd_failed),
            ..PoolStats::default()
        }
    }
}

/// The statistics of a pool at one moment. [`TABLE`] says what each means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "TABLE is their documentation, and is checked to name every one")]
pub struct PoolStats {
    pub disk_size: u64,
    pub mem_limit: u64,
    pub num_reads: u64,
    pub num_writes: u64,
    pub failed_reads: u64,
    pub failed_writes: u64,
    pub invalid_io: u64,
    pub pages_discard: u64,
    pub same_pages: u64,
    pub good_pages: u64,
    pub huge_pages: u64,
    pub orig_data_size: u64,
    pub compr_data_size: u64,
    pub slot_bytes: u64,
    pub table_bytes: u64,
    pub mem_used_total: u64,
    pub mem_used_max: u64,
    pub pages_compacted: u64,
    pub grouped_pages: u64,
    pub group_bytes: u64,
    pub groups: u64,
    pub pages_recompressed: u64,
    pub bd_count: u64,
    pub bd_bytes: u64,
    pub bd_reads: u64,
    pub bd_writes: u64,
    pub bd_failed: u64,
}

impl PoolStats {
    /// Pages stored, in any form.
    pub fn pages_stored(&self) -> u64 {
        self.orig_data_size / PAGE_SIZE as u64
    }

    fn percent_in_memory(&self, pages: u64) -> u64 {
        (pages * 100).checked_div(self.pages_stored().saturating_sub(self.bd_count)).unwrap_or(0)
    }
}

/// What a statistic counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Pages of 4096 bytes.
    Pages,
    /// Calls.
    Operations,
    /// Hundredths of the pages that are in memory.
    Percent,
}

/// One line of [`TABLE`].
#[derive(Clone, Copy)]
pub struct Stat {
    /// The kernel's word, or ours in its manner where the kernel has none.
    pub name: &'static str,
    /// What ramzswap called it; empty where it had nothing like it.
    pub ramzswap: &'static str,
    /// What it counts.
    pub unit: Unit,
    /// What it means, in one sentence.
    pub meaning: &'static str,
    /// Reads it.
    pub value: fn(&PoolStats) -> u64,
}

macro_rules! stats {
    ($($name:literal, $ramzswap:literal, $unit:ident, $value:expr, $meaning:literal;)*) => {
        &[$(Stat { name: $name, ramzswap: $ramzswap, unit: Unit::$unit, meaning: $meaning, value: $value }),*]
    };
}

/// Every statistic of a pool: name, ramzswap's name, unit, how to read it, meaning.
pub const TABLE: &[Stat] = stats! {
    "disksize", "DiskSize", Bytes, |s| s.disk_size, "Size a front end gave the pool; zero if it gave none.";
    "mem_limit", "MemLimit", Bytes, |s| s.mem_limit, "The pool's own limit, 2^64-1 for none.";
    "num_reads", "NumReads", Operations, |s| s.num_reads, "Pages read or taken, absent ones included; not those that a pager reads from the backing beside the pool (bd_reads).";
    "num_writes", "NumWrites", Operations, |s| s.num_writes, "Pages stored.";
    "failed_reads", "FailedReads", Operations, |s| s.failed_reads, "Reads that returned an error: corrupt pages, a backing that failed.";
    "failed_writes", "FailedWrites", Operations, |s| s.failed_writes, "Writes refused, also those that were made again when there was room.";
    "invalid_io", "InvalidIO", Operations, |s| s.invalid_io, "Operations on an index out of range.";
    "notify_free", "PagesDiscard", Pages, |s| s.pages_discard, "Stored pages that were discarded.";
    "same_pages", "ZeroPages", Pages, |s| s.same_pages, "Pages stored that are one word repeated; they cost no arena.";
    "good_compress", "GoodCompress", Percent, |s| s.percent_in_memory(s.good_pages),
        "Share of the pages in memory that are compressed to half a page or less, or in groups.";
    "no_compress", "NoCompress", Percent, |s| s.percent_in_memory(s.huge_pages), "Share of the pages in memory that are kept raw.";
    "huge_pages", "", Pages, |s| s.huge_pages, "Pages in memory raw because they did not compress.";
    "pages_stored", "PagesStored", Pages, |s| s.pages_stored(), "Pages stored in any form.";
    "pages_used", "PagesUsed", Pages, |s| s.mem_used_total.div_ceil(PAGE_SIZE as u64), "mem_used_total in pages.";
    "orig_data_size", "OrigDataSize", Bytes, |s| s.orig_data_size, "What the stored pages hold uncompressed.";
    "compr_data_size", "ComprDataSize", Bytes, |s| s.compr_data_size, "Bytes of all objects in memory, without any overhead.";
    "slot_bytes", "", Bytes, |s| s.slot_bytes, "Bytes of the arena slots the objects lie in.";
    "table_bytes", "", Bytes, |s| s.table_bytes, "Bytes of the pool's slot tables.";
    "mem_used_total", "MemUsedTotal", Bytes, |s| s.mem_used_total,
        "slot_bytes and table_bytes: the pool's share. The store's own figure is what the system gave.";
    "mem_used_max", "", Bytes, |s| s.mem_used_max, "The most the store has held from the system.";
    "pages_compacted", "", Pages, |s| s.pages_compacted, "Objects moved by compaction; not those of groups, which are no pool's.";
    "grouped_pages", "", Pages, |s| s.grouped_pages, "Pages in groups: cold ones that were compressed again, together.";
    "group_bytes", "", Bytes, |s| s.group_bytes, "The part of compr_data_size that is groups.";
    "groups", "", Operations, |s| s.groups, "How many those are.";
    "pages_recompressed", "", Pages, |s| s.pages_recompressed, "Pages that were put into groups.";
    "bd_count", "", Pages, |s| s.bd_count, "Pages that are on the backing device now, and not in memory.";
    "bd_bytes", "", Bytes, |s| s.bd_bytes, "What they take there, compressed and sealed.";
    "bd_reads", "BDevNumReads", Pages, |s| s.bd_reads, "Pages read from the backing device.";
    "bd_writes", "BDevNumWrites", Pages, |s| s.bd_writes, "Pages written to the backing device.";
    "bd_failed", "", Pages, |s| s.bd_failed, "Reads of such pages that failed: the device said so, or it was not what was written.";
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_name_of_ramzswap_once() {
        let ramzswap = [
            "DiskSize",
            "MemLimit",
            "NumReads",
            "NumWrites",
            "FailedReads",
            "FailedWrites",
            "InvalidIO",
            "PagesDiscard",
            "ZeroPages",
            "GoodCompress",
            "NoCompress",
            "PagesStored",
            "PagesUsed",
            "OrigDataSize",
            "ComprDataSize",
            "MemUsedTotal",
            "BDevNumReads",
            "BDevNumWrites",
        ];
        for name in ramzswap {
            assert_eq!(TABLE.iter().filter(|stat| stat.ramzswap == name).count(), 1, "{name}");
        }
        for stat in TABLE {
            assert_eq!(TABLE.iter().filter(|other| other.name == stat.name).count(), 1, "{}", stat.name);
        }
    }

    #[test]
    fn gauges_return_to_zero_across_shards() {
        let counters = Counters::new();
        let stored = Footprint::stored(false, 1000, 1008);
        counters.shard(0).change(Footprint::ABSENT, stored);
        counters.shard(1).change(stored, Footprint::SAME_FILLED);
        assert_eq!(counters.read().same_pages, 1);
        assert_eq!(counters.read().compr_data_size, 0);
        counters.shard(2).change(Footprint::SAME_FILLED, Footprint::ABSENT);
        assert_eq!(counters.read(), PoolStats::default());
    }
}
