//! The region every process of one `compcache run` shares: the budget, and what each process uses of it.
//!
//! `compcache run` creates one small file in memory, every pager of the tree maps it, and each claims one
//! [`ProcessSlot`]. A pager publishes what its process holds; each compares the sum with the limit, so the budget is one
//! for the whole tree and needs no server. The supervisor only reads it, for `--stats` and the summary.
//!
//! A process may die at any instant, by SIGKILL too, and must give its share back. So the slot's `owner` word is a
//! *robust futex*: it holds the owning thread's id, and the kernel itself replaces that by `FUTEX_OWNER_DIED` when the
//! thread ends, for whatever reason (exit, signal, exec). Whoever sees the mark folds the slot's counters into
//! [`Header::retired`] and frees the slot; the kernel watches over it, too, and marks the slot again if it dies meanwhile.
//!
//! | `owner`                    | meaning                                               |
//! |----------------------------|-------------------------------------------------------|
//! | 0                          | free                                                  |
//! | thread id                  | in use                                                |
//! | `FUTEX_OWNER_DIED`         | its owner died; the share counts no more              |
//! | thread id and `RECLAIMING` | that thread is folding its counters away              |
//!
//! A word is on its thread's robust list before it gets the thread's id, and as long as it has it: no death goes unseen.
//!
//! All fields are atomics with no order between them: gauges of different processes are read at slightly different
//! times, which the limit's gap absorbs. Nothing here is trusted for correctness, only for policy: a hostile process of
//! the tree can spoil the budget, never the contents.

use crate::sys::RobustList;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// Marks a region as ours: `"CMPCRUN1"`.
pub const MAGIC: u64 = 0x314e_5552_4350_4d43;
/// Changes with the layout; a pager refuses a region of another version.
pub const VERSION: u32 = 9;
/// How many processes of one tree are counted at once; those beyond are paged, each as if it were the only one that is not.
pub const SLOTS: usize = 1024;
/// Set by the kernel in a robust futex whose owner died.
pub const OWNER_DIED: u32 = 0x4000_0000;
/// The kernel's FUTEX_WAITERS, which it leaves aside when it compares the word with the id of a thread that ends.
const RECLAIMING: u32 = 0x8000_0000;

/// The environment variable that names the region's file.
pub const ENV_REGION: &str = "COMPCACHE_REGION";
/// The environment variable that names the directory for what does not fit, if there is one.
pub const ENV_SPILL: &str = "COMPCACHE_SPILL";

/// Buckets of the fault latency histogram: bucket `i` counts faults of `bucket_floor_ns(i)` and more.
pub const LATENCY_BUCKETS: usize = 128;

/// How pages leave the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum EvictionWay {
    /// UFFDIO_MOVE to staging (Linux 6.8).
    Move = 1,
    /// mremap(MREMAP_DONTUNMAP) to staging (Linux 5.7).
    Remap = 2,
}

/// The codec of the tree's pools.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum RunCodec {
    /// LZ4.
    Lz4 = 0,
    /// zstd, with [`Header::codec_level`].
    Zstd = 1,
}

/// What grows only: one set per process, and one of all processes that have ended.
#[repr(C)]
pub struct Counters {
    /// Faults answered, of any kind.
    pub faults: AtomicU64,
    /// Faults answered from the pool.
    pub faults_stored: AtomicU64,
    /// Pages that left the process for staging.
    pub evicted_pages: AtomicU64,
    /// Pages touched while staged: moved back, and known to be hot.
    pub refaults_staged: AtomicU64,
    /// Evicted pages that were as they had come from the pool, and were not compressed again.
    pub unchanged_pages: AtomicU64,
    /// Evicted pages that differed so little from what had come from the pool that only that was added to it.
    pub patched_pages: AtomicU64,
    /// Pages brought back before anyone asked for them.
    pub readahead_pages: AtomicU64,
    /// Of those, the ones that were there when a run went on (each saved a fault).
    pub readahead_hits: AtomicU64,
    /// Cold pages that were compressed again, in groups.
    pub recompressed_pages: AtomicU64,
    /// Pages written to spill files.
    pub spill_written_pages: AtomicU64,
    /// Pages read from spill files.
    pub spill_read_pages: AtomicU64,
    /// Time from reading a fault's message to the end of its answer, nanoseconds.
    pub fault_ns: [AtomicU64; LATENCY_BUCKETS],
}

/// What one process holds now.
#[repr(C)]
pub struct Gauges {
    /// Resident anonymous memory of the program itself, bytes.
    pub resident_bytes: AtomicU64,
    /// Memory of ours in that process: arena, tables, staging, stacks, bytes.
    pub ours_bytes: AtomicU64,
    /// Pages in the pool.
    pub pages_stored: AtomicU64,
    /// Of those, same-filled.
    pub same_pages: AtomicU64,
    /// Of those, in groups of cold ones.
    pub grouped_pages: AtomicU64,
    /// Bytes the stored pages were before compression.
    pub orig_data_bytes: AtomicU64,
    /// Bytes of compressed payload.
    pub compr_data_bytes: AtomicU64,
    /// The pool's arena and tables, bytes.
    pub mem_used_total_bytes: AtomicU64,
    /// Pages in spill files, and not in the pool.
    pub spilled_pages: AtomicU64,
    /// Bytes of this process's spill file that are in use, but for what is being written.
    pub spill_bytes: AtomicU64,
    /// Bytes that it is about to write there, or writes.
    pub spill_flying_bytes: AtomicU64,
}

/// One process of the tree.
#[repr(C, align(64))]
pub struct ProcessSlot {
    /// The robust futex: see the module.
    pub owner: AtomicU32,
    /// Process id, as the process itself sees it.
    pub pid: AtomicU32,
    /// What it holds now.
    pub gauges: Gauges,
    /// What it has done.
    pub counters: Counters,
}

/// The head of the region, then the slots.
#[repr(C, align(64))]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// [`EvictionWay`].
    pub eviction_way: AtomicU32,
    /// [`RunCodec`].
    pub codec: AtomicU32,
    /// zstd level, as two's complement.
    pub codec_level: AtomicU32,
    /// Pages that were not used for so long are compressed again, in groups; 0: none are.
    pub recompress_after_ms: AtomicU64,
    /// At this level of zstd, as two's complement.
    pub recompress_level: AtomicU32,
    /// The process that has started the program.
    pub supervisor: AtomicU32,
    /// Not 0: the system counts what could be touched, and has not enough for all to have what they may never need (vm.overcommit_memory=2).
    pub overcommits_never: AtomicU32,
    /// Limit on resident and ours together over the tree, bytes; 0 is none.
    pub ram_limit_bytes: AtomicU64,
    /// Limit on the resident part over the tree, bytes; 0 is none.
    pub resident_limit_bytes: AtomicU64,
    /// Highest sum of resident memory seen, bytes.
    pub resident_peak_bytes: AtomicU64,
    /// Highest sum of resident memory and ours seen, bytes.
    pub total_peak_bytes: AtomicU64,
    /// Highest number of bytes of original data in all pools.
    pub orig_data_peak_bytes: AtomicU64,
    /// Compressed payload at that moment, bytes.
    pub compr_data_at_peak_bytes: AtomicU64,
    /// Pools' memory at that moment, bytes.
    pub mem_used_at_peak_bytes: AtomicU64,
    /// Set when a pager had to stop paging, see [`Trouble`]; the first one stays.
    pub trouble: AtomicU32,
    /// The errno that came with it.
    pub trouble_errno: AtomicU32,
    /// Processes that claimed a slot since the start.
    pub processes_total: AtomicU64,
    /// Processes that copied themselves without fork handlers and go on unpaged (see docs/semantics.md).
    pub unpaged_copies: AtomicU64,
    /// The most that all spill files may take together, bytes; 0 is none.
    pub spill_max_bytes: AtomicU64,
    /// The highest sum of pages in spill files.
    pub spilled_pages_peak: AtomicU64,
    /// The highest sum of bytes of spill files in use.
    pub spill_peak_bytes: AtomicU64,
    /// What was to be told of the spill so far: a bit for each of [`SpillNews`].
    pub spill_news: AtomicU32,
    /// The errno that came with the last of them that had one.
    pub spill_errno: AtomicU32,
    /// Copies of processes so far that have a spill: no two have the same number.
    pub spill_copies: AtomicU64,
    /// For how long processes were held up, since more came than could leave; added up.
    pub held_ns: AtomicU64,
    /// Slots from this number on have never been claimed.
    pub slots_used: AtomicU32,
    /// Counters of processes that have ended.
    pub retired: Counters,
}

/// Why a process runs unpaged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Trouble {
    /// userfaultfd was refused.
    NoUserfaultfd = 1,
    /// Memory for the pager itself was refused.
    NoMemory = 2,
    /// The kernel lacks what the chosen eviction way needs.
    NoEvictionWay = 3,
    /// The pager's thread could not be started.
    NoThread = 4,
    /// A stored page was damaged and the process was ended rather than given wrong bytes.
    LostPage = 5,
    /// A device may write to the process's pages, and the way of eviction cannot tell to which: none leaves.
    Devices = 8,
    /// Pages were taken from a mapping that came in the place of the one meant, and the process was ended.
    NotMeant = 9,
    /// /proc is not mounted or not readable.
    NoProc = 7,
    /// The program has the runtime of a sanitizer, which does not bear a pager beside it.
    Sanitizer = 10,
    /// A filter on the system calls of all threads does not let the pager do its work.
    Filter = 11,
    /// The program changed its mappings more often than can be kept while a copy of it was made, and the process was ended.
    Changes = 12,
    /// The process has had memory in more places than can be kept in mind: what comes now is not paged.
    Regions = 13,
    /// There are more processes than can be counted.
    Slots = 14,
    /// An invariant of the pager's own did not hold, and the process was ended.
    Bug = 6,
}

/// What is told of the spill, once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum SpillNews {
    /// A process has no file.
    NoFile = 0,
    /// The file system is full.
    NoSpace = 1,
    /// The files have all they may.
    Max = 2,
    /// A write failed.
    WriteFailed = 3,
    /// A page could not be read back, or was not what was written: whoever touches it gets SIGBUS.
    LostPage = 4,
    /// What a copy of a process was to read could not be handed over, and was brought back into memory.
    Recalled = 5,
    /// A copy of a process finds none of the files that a process may know without pages that it needs.
    NoPart = 6,
    /// There were as many copies, or a process has written as often, as what is written can be told apart.
    NoNumbers = 7,
}

impl SpillNews {
    /// All of them.
    pub const ALL: [SpillNews; 8] = [
        SpillNews::NoFile,
        SpillNews::NoSpace,
        SpillNews::Max,
        SpillNews::WriteFailed,
        SpillNews::LostPage,
        SpillNews::Recalled,
        SpillNews::NoPart,
        SpillNews::NoNumbers,
    ];
}

/// The whole region.
#[repr(C)]
pub struct Region {
    /// Limits and totals.
    pub header: Header,
    /// One slot a process.
    pub slots: [ProcessSlot; SLOTS],
}

/// Bytes of the region's file. Most of it is never touched, so never allocated.
pub const REGION_BYTES: usize = core::mem::size_of::<Region>();

/// Sums over the tree.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of Gauges, summed")]
pub struct Totals {
    pub processes: u64,
    pub resident_bytes: u64,
    pub ours_bytes: u64,
    pub pages_stored: u64,
    pub same_pages: u64,
    pub grouped_pages: u64,
    pub orig_data_bytes: u64,
    pub compr_data_bytes: u64,
    pub mem_used_total_bytes: u64,
    /// Pages in spill files.
    pub spilled_pages: u64,
    /// Bytes of spill files in use.
    pub spill_bytes: u64,
    /// Pages that have left, so far; of processes that have ended, too.
    pub evicted_pages: u64,
}

impl ProcessSlot {
    /// What the process said last that it holds, bytes.
    pub fn bytes(&self) -> u64 {
        self.gauges.resident_bytes.load(Relaxed) + self.gauges.ours_bytes.load(Relaxed)
    }
}

impl Region {
    /// Claims a free slot for the calling thread, `tid`, whose robust list is `list`; `None` when all are taken.
    ///
    /// The slot's owner word stays on the list: only that makes its owner's death visible.
    pub fn claim(&self, tid: u32, pid: u32, list: &RobustList) -> Option<&ProcessSlot> {
        self.retire_dead_by(tid, list);
        for (number, slot) in self.slots.iter().enumerate() {
            if slot.owner.load(Relaxed) != 0 {
                continue;
            }
            // Before it is claimed: whoever dies as its owner must be found by others.
            if self.header.slots_used.load(Relaxed) <= number as u32 {
                self.header.slots_used.fetch_max(number as u32 + 1, Relaxed);
            }
            list.watch(Some(&slot.owner));
            if slot.owner.compare_exchange(0, tid, AcqRel, Relaxed).is_ok() {
                slot.pid.store(pid, Release);
                self.header.processes_total.fetch_add(1, Relaxed);
                return Some(slot);
            }
            list.watch(None);
        }
        None
    }

    /// Folds away the slots whose owners died. Returns how many. For any thread: its robust list is its own again afterwards.
    pub fn retire_dead(&self) -> usize {
        if self.used().iter().all(|slot| slot.owner.load(Relaxed) & OWNER_DIED == 0) {
            return 0;
        }
        let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        RobustList::with_own(|list| self.retire_dead_by(tid, list))
    }

    fn retire_dead_by(&self, tid: u32, list: &RobustList) -> usize {
        let mut retired = 0;
        for slot in self.used() {
            let seen = slot.owner.load(Acquire);
            if seen & OWNER_DIED == 0 {
                continue;
            }
            list.watch(Some(&slot.owner));
            if slot.owner.compare_exchange(seen, tid | RECLAIMING, AcqRel, Relaxed).is_ok() {
                slot.gauges.clear();
                slot.counters.fold_into(&self.header.retired);
                slot.pid.store(0, Relaxed);
                slot.owner.store(0, Release);
                retired += 1;
            }
            list.watch(None);
        }
        retired
    }

    /// What the living processes hold together; raises the peaks.
    pub fn totals(&self) -> Totals {
        let evicted_pages = self.header.retired.evicted_pages.load(Relaxed);
        let mut sum = Totals { evicted_pages, ..Totals::default() };
        for slot in self.living() {
            let gauges = &slot.gauges;
            sum.processes += 1;
            sum.resident_bytes += gauges.resident_bytes.load(Relaxed);
            sum.ours_bytes += gauges.ours_bytes.load(Relaxed);
            sum.pages_stored += gauges.pages_stored.load(Relaxed);
            sum.same_pages += gauges.same_pages.load(Relaxed);
            sum.grouped_pages += gauges.grouped_pages.load(Relaxed);
            sum.orig_data_bytes += gauges.orig_data_bytes.load(Relaxed);
            sum.compr_data_bytes += gauges.compr_data_bytes.load(Relaxed);
            sum.mem_used_total_bytes += gauges.mem_used_total_bytes.load(Relaxed);
            sum.spilled_pages += gauges.spilled_pages.load(Relaxed);
            sum.spill_bytes += gauges.spill_bytes.load(Relaxed);
            sum.evicted_pages += slot.counters.evicted_pages.load(Relaxed);
        }
        let header = &self.header;
        header.resident_peak_bytes.fetch_max(sum.resident_bytes, Relaxed);
        header.spilled_pages_peak.fetch_max(sum.spilled_pages, Relaxed);
        header.spill_peak_bytes.fetch_max(sum.spill_bytes, Relaxed);
        header.total_peak_bytes.fetch_max(sum.resident_bytes + sum.ours_bytes, Relaxed);
        if header.orig_data_peak_bytes.fetch_max(sum.orig_data_bytes, Relaxed) < sum.orig_data_bytes {
            header.compr_data_at_peak_bytes.store(sum.compr_data_bytes, Relaxed);
            header.mem_used_at_peak_bytes.store(sum.mem_used_total_bytes, Relaxed);
        }
        sum
    }

    /// The slots of processes that live.
    pub fn living(&self) -> impl Iterator<Item = &ProcessSlot> {
        self.used().iter().filter(|slot| {
            let owner = slot.owner.load(Relaxed);
            owner != 0 && owner & (OWNER_DIED | RECLAIMING) == 0
        })
    }

    fn used(&self) -> &[ProcessSlot] {
        &self.slots[..(self.header.slots_used.load(Relaxed) as usize).min(SLOTS)]
    }

    /// Notes what is to be told of the spill.
    pub fn note_spill(&self, news: SpillNews, errno: i32) {
        if errno != 0 {
            self.header.spill_errno.store(errno as u32, Relaxed);
        }
        self.header.spill_news.fetch_or(1 << news as u32, Relaxed);
    }

    /// Notes why a process goes on unpaged, or was ended; the first reason stays, unless it only says that one is paged in part.
    pub fn note_trouble(&self, trouble: Trouble, errno: i32) {
        const IN_PART: [u32; 3] = [Trouble::Devices as u32, Trouble::Regions as u32, Trouble::Slots as u32];
        let gives_way = |noted| noted == 0 || IN_PART.contains(&noted) && !IN_PART.contains(&(trouble as u32));
        let replaced = |noted| gives_way(noted).then_some(trouble as u32);
        if self.header.trouble.fetch_update(Relaxed, Relaxed, replaced).is_ok() {
            self.header.trouble_errno.store(errno as u32, Relaxed);
        }
    }
}

impl ProcessSlot {
    /// Whether it is that thread's still. In another PID namespace a thread may have the same number: if it dies as it claims the slot, and comes
    /// too late, the kernel takes the slot for its own, and marks it.
    pub fn is_of(&self, thread: u32) -> bool {
        self.owner.load(Relaxed) == thread
    }
}

impl Gauges {
    fn clear(&self) {
        for gauge in [
            &self.resident_bytes,
            &self.ours_bytes,
            &self.pages_stored,
            &self.same_pages,
            &self.grouped_pages,
            &self.orig_data_bytes,
            &self.compr_data_bytes,
            &self.mem_used_total_bytes,
            &self.spilled_pages,
            &self.spill_bytes,
            &self.spill_flying_bytes,
        ] {
            gauge.store(0, Relaxed);
        }
    }
}

impl Counters {
    /// Counts one fault's latency.
    pub fn record_fault_ns(&self, ns: u64) {
        self.fault_ns[latency_bucket(ns)].fetch_add(1, Relaxed);
    }

    /// Adds these counters to `other` and clears them. What was begun by one that died is gone on with.
    fn fold_into(&self, other: &Counters) {
        let add = |from: &AtomicU64, to: &AtomicU64| {
            let value = from.swap(0, Relaxed);
            if value != 0 {
                to.fetch_add(value, Relaxed);
            }
        };
        add(&self.faults, &other.faults);
        add(&self.faults_stored, &other.faults_stored);
        add(&self.evicted_pages, &other.evicted_pages);
        add(&self.refaults_staged, &other.refaults_staged);
        add(&self.unchanged_pages, &other.unchanged_pages);
        add(&self.patched_pages, &other.patched_pages);
        add(&self.readahead_pages, &other.readahead_pages);
        add(&self.readahead_hits, &other.readahead_hits);
        add(&self.recompressed_pages, &other.recompressed_pages);
        add(&self.spill_written_pages, &other.spill_written_pages);
        add(&self.spill_read_pages, &other.spill_read_pages);
        for (from, to) in self.fault_ns.iter().zip(&other.fault_ns) {
            add(from, to);
        }
    }
}

/// The histogram bucket of a latency: four buckets to each power of two.
pub fn latency_bucket(ns: u64) -> usize {
    if ns < 4 {
        return ns as usize;
    }
    let log = 63 - ns.leading_zeros() as usize;
    let quarter = ((ns >> (log - 2)) & 3) as usize;
    ((log - 1) * 4 + quarter).min(LATENCY_BUCKETS - 1)
}

/// The smallest latency that falls into `bucket`, nanoseconds.
pub fn bucket_floor_ns(bucket: usize) -> u64 {
    if bucket < 4 {
        return bucket as u64;
    }
    let (log, quarter) = (bucket / 4 + 1, (bucket % 4) as u64);
    (4 + quarter) << (log - 2)
}

#[cfg(test)]
#[allow(unsafe_code, reason = "copies the process, and has memory for it")]
mod tests {
    use super::*;
    use crate::memory::PAGE;

    /// A region of this process's and its copies', on pages of its own.
    fn region() -> &'static Region {
        let (rights, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: new memory.
        let start = unsafe { libc::mmap(core::ptr::null_mut(), REGION_BYTES, rights, shared, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: zeroes are a region, and stay mapped.
        unsafe { &*start.cast::<Region>() }
    }

    /// Runs `work` in a copy of the process that may not write to the region's head, and dies when it does.
    fn in_a_copy_that_dies_at_the_head(region: &Region, work: impl FnOnce(u32)) {
        const { assert!(core::mem::offset_of!(Region, slots) < PAGE) };
        // SAFETY: the copy calls only what is safe in one.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: the head's page, which is mapped; and no file is to be left by its death.
            unsafe {
                libc::prctl(libc::PR_SET_DUMPABLE, 0);
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                libc::mprotect(core::ptr::from_ref(region).cast_mut().cast(), PAGE, libc::PROT_READ);
            }
            work(rustix::thread::gettid().as_raw_nonzero().get() as u32);
            // SAFETY: nothing more is done in the copy.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: writes to `status`.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "it ended by {status:#x}");
    }

    /// Takes the slots that share a page with the head, and some more. Returns how many.
    fn take_the_first_slots(region: &Region) -> usize {
        let taken = PAGE.div_ceil(size_of::<ProcessSlot>());
        region.slots[..taken].iter().for_each(|slot| slot.owner.store(1, Relaxed));
        region.header.slots_used.store(taken as u32 + 1, Relaxed);
        taken
    }

    #[test]
    fn a_slot_is_given_back_whose_owner_dies_while_it_claims_it() {
        let region = region();
        let taken = take_the_first_slots(region);
        in_a_copy_that_dies_at_the_head(region, |tid| {
            let list = RobustList::empty();
            // SAFETY: the thread ends in here.
            unsafe { list.register() };
            region.claim(tid, tid, &list);
        });
        let slot = &region.slots[taken];
        assert_ne!(slot.pid.load(Relaxed), 0, "it was not claimed");
        assert_eq!(slot.owner.load(Relaxed), OWNER_DIED);
        assert_eq!((region.living().count(), region.retire_dead()), (taken, 1));
        assert_eq!(slot.owner.load(Relaxed), 0);
    }

    #[test]
    fn a_slot_is_given_back_whose_reclaimer_dies_over_it() {
        let region = region();
        let taken = take_the_first_slots(region);
        let slot = &region.slots[taken];
        slot.owner.store(OWNER_DIED, Relaxed);
        slot.gauges.pages_stored.store(5, Relaxed);
        slot.counters.spill_read_pages.store(7, Relaxed);
        in_a_copy_that_dies_at_the_head(region, |_| assert_eq!(region.retire_dead(), 0));
        assert_eq!(slot.gauges.pages_stored.load(Relaxed), 0, "it was not being reclaimed");
        assert_ne!(slot.owner.load(Relaxed) & OWNER_DIED, 0, "{:#x}", slot.owner.load(Relaxed));
        // What the dead one held in its hands is lost; what it had not come to is not.
        slot.counters.spill_read_pages.store(7, Relaxed);
        assert_eq!((region.living().count(), region.retire_dead()), (taken, 1));
        assert_eq!((slot.owner.load(Relaxed), region.header.retired.spill_read_pages.load(Relaxed)), (0, 7));
    }

    #[test]
    fn why_a_process_was_ended_is_told_though_another_was_paged_in_part() {
        let region = region();
        let noted = || (region.header.trouble.load(Relaxed), region.header.trouble_errno.load(Relaxed));
        region.note_trouble(Trouble::Regions, 0);
        region.note_trouble(Trouble::Devices, 1);
        assert_eq!(noted(), (Trouble::Regions as u32, 0));
        region.note_trouble(Trouble::LostPage, 7);
        region.note_trouble(Trouble::Regions, 0);
        region.note_trouble(Trouble::Bug, 9);
        assert_eq!(noted(), (Trouble::LostPage as u32, 7));
    }

    #[test]
    fn a_slot_that_was_marked_while_its_owner_lives_is_claimed_anew() {
        let (region, thread) = (region(), rustix::thread::gettid().as_raw_nonzero().get() as u32);
        RobustList::with_own(|list| {
            let slot = region.claim(thread, 1, list).unwrap();
            assert!(slot.is_of(thread));
            // As the kernel does for the death of a thread of the same number.
            slot.owner.fetch_or(OWNER_DIED, Relaxed);
            assert!(!slot.is_of(thread) && region.living().count() == 0);
            assert!(region.claim(thread, 1, list).is_some_and(|slot| slot.is_of(thread)));
            assert_eq!(region.living().count(), 1);
            list.watch(None);
        });
    }

    #[test]
    fn a_thread_that_reclaims_has_its_robust_list_again() {
        let region = region();
        let before = crate::sys::robust_list_of(0);
        region.header.slots_used.store(1, Relaxed);
        region.slots[0].owner.store(OWNER_DIED, Relaxed);
        assert_eq!(region.retire_dead(), 1);
        assert!(before.is_some() && crate::sys::robust_list_of(0) == before);
    }

    #[test]
    fn every_latency_falls_between_its_buckets_floor_and_the_next() {
        for ns in (0..10_000u64).chain([1 << 20, (1 << 30) + 12345]) {
            let bucket = latency_bucket(ns);
            assert!(bucket_floor_ns(bucket) <= ns, "{ns} below the floor of bucket {bucket}");
            assert!(ns < bucket_floor_ns(bucket + 1), "{ns} above bucket {bucket}");
        }
    }
}
