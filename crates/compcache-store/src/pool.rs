//! A pool: one address space of compressed pages.
//!
//! | operation | same-filled           | compresses                      | does not compress       | at the limit            |
//! |-----------|-----------------------|---------------------------------|-------------------------|-------------------------|
//! | write     | the word in the slot  | object in the arena             | the page in the arena   | refused, old page stays |
//! | read      | filled from the slot  | checked, decoded in place       | checked, copied         | (no difference)         |
//! | rewrite   | compared with the word | a patch, if little changed     | compared                | as write                |
//! | take      | read, then discarded  | read, then discarded            | read, then discarded    | (no difference)         |
//!
//! A page in a group (`recompress.rs`) is like one that compresses, but that its group stays until the last page of it goes.
//!
//! A page that is on the backing is not read so, but fetched ([`Pool::fetch`]); written, rewritten, discarded and moved it is like
//! any other.
//!
//! A page is compressed before its slot is locked; the lock is held while the object is placed, or decoded (both, when a page is
//! rewritten), and for that page alone. Two writers of one page: the later one to lock stays. Whatever fails leaves the page as it was.
//!
//! Not here: tables, arena, codecs, limit; this module puts them together.

mod fetch;
mod fork;
mod range;
mod read;
mod recompress;
mod rewrite;
mod run;
mod write;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

pub use read::{Extent, Read};
pub use recompress::Recompressed;
pub use rewrite::Rewritten;
pub use run::RunFailed;
pub use write::Written;
pub(crate) use write::form;

use crate::arena::Arena;
use crate::backing::{Backing, FLIGHTS, HANGING_NS, Health, record::record_bytes};
use crate::codec::Codec;
use crate::config::PoolConfig;
use crate::error::StoreError;
use crate::latency::Latency;
use crate::lock::Mutex;
use crate::page::{PAGE_SIZE, PageIndex};
use crate::slot::{self, Member, Slot};
use crate::stats::{Counters, Footprint, PoolStats};
use crate::store::Store;
use crate::table::{LeafCache, SlotGuard, Tree};

/// The shard of operations without a worker.
const NO_WORKER: usize = usize::MAX;

/// One address space of pages in a [`Store`]. Shared by any number of threads, each with its own
/// [`Worker`](crate::Worker). Dropping it frees all it holds.
pub struct Pool {
    core: Arc<PoolCore>,
    store: Arc<Store>,
}

/// What compaction sees of a pool.
pub(crate) struct PoolCore {
    pub tree: Tree,
    pub counters: Box<Counters>,
    codec: AtomicU32,
    limit: write::PoolLimit,
    /// As [`PoolConfig`] has it.
    spare_percent: u8,
    disk_bytes: AtomicU64,
    pub backing: Option<Arc<Backing>>,
    /// Pages were taken one by one, so that there may be leaves to free.
    emptied: AtomicBool,
    /// Each is held by a flight of the backing while it changes slots of this pool, which does not end meanwhile.
    pub settling: [Mutex<()>; FLIGHTS],
}

impl PoolCore {
    /// Whether leaves may have become empty since last asked.
    pub fn take_emptied(&self) -> bool {
        self.emptied.load(Relaxed) && self.emptied.swap(false, Relaxed)
    }

    pub fn note_emptied(&self) {
        if !self.emptied.load(Relaxed) {
            self.emptied.store(true, Relaxed);
        }
    }

    /// Frees the leaf that begins at `first`, whose pages are absent, and returns the bytes given back. Where somebody just looks
    /// at one of them, compaction looks again.
    pub fn free_leaf_or_note(&self, store: &Store, first: PageIndex) -> u64 {
        let freed_bytes = self.tree.free_leaf_if_empty(&store.tables, first, &store.budget);
        if freed_bytes == 0 && !self.tree.is_kept(first) {
            self.note_emptied();
        }
        freed_bytes
    }

    /// Bytes held by this pool: its objects' slots and its tables.
    fn used_bytes(&self) -> u64 {
        self.counters.slot_bytes() + self.tree.bytes()
    }

    /// The number that no other pool of the store has, or will have.
    pub fn serial(&self) -> u64 {
        self.tree.serial()
    }

    /// Whether its pages can go to `backing`.
    pub fn is_on(&self, backing: &Backing) -> bool {
        self.backing.as_ref().is_some_and(|mine| core::ptr::eq(&**mine, backing))
    }

    /// Whether its pages can leave memory, as far as is known.
    pub fn can_leave(&self) -> bool {
        self.backing.as_ref().is_some_and(|backing| backing.health() == Health::Good)
    }

    /// Whether its pages, though they can leave, would wait for who knows how long.
    pub fn is_held_up(&self, now_ns: u64) -> bool {
        self.backing.as_ref().is_some_and(|backing| backing.has_waited_for(HANGING_NS, now_ns))
    }

    /// Whether it uses more than so many hundredths of its own limit.
    pub fn is_above(&self, percent: u64) -> bool {
        self.used_bytes() > self.limit.bytes() / 100 * percent
    }

    /// Makes `guard`'s slot say `new`, counts the difference, unlocks it, and frees what it had.
    fn replace(&self, store: &Store, guard: SlotGuard<'_>, new: Slot, shard: usize) {
        self.replace_aged(store, guard, new, shard, store.age());
    }

    /// As [`PoolCore::replace`], with an age other than now.
    pub fn replace_aged(&self, store: &Store, mut guard: SlotGuard<'_>, new: Slot, shard: usize, age: u8) {
        let old = guard.get();
        // Both while the slot is locked: afterwards the new object may be gone, and its span another's.
        let (before, after) = (footprint(old, &store.arena), footprint(new, &store.arena));
        guard.set(new, age);
        drop(guard);
        self.counters.shard(shard).change(before, after);
        self.free(store, old);
    }

    /// Frees what a slot had that says something else now.
    fn free(&self, store: &Store, old: Slot) {
        match (old, &self.backing) {
            (Slot::Stored(object), _) => _ = store.arena.free(object.location, &store.budget),
            (Slot::OnBacking(sealed), Some(backing)) => backing.free(sealed),
            (Slot::Grouped(member), _) => self.leave_group(store, member),
            _ => {}
        }
    }

    /// One page less in its group; with the last goes the group.
    fn leave_group(&self, store: &Store, member: Member) {
        if let Some(size) = store.groups.release(member.group, member.place, &store.arena, &store.budget) {
            self.counters.shard(NO_WORKER).change(Footprint::group(size), Footprint::ABSENT);
        }
    }
}

/// What a slot costs.
fn footprint(slot: Slot, arena: &Arena) -> Footprint {
    match slot {
        Slot::Absent => Footprint::ABSENT,
        Slot::SameFilled { .. } => Footprint::SAME_FILLED,
        Slot::Damaged => Footprint::DAMAGED,
        Slot::Grouped(_) => Footprint::GROUPED,
        Slot::OnBacking(sealed) => Footprint::on_backing(record_bytes(sealed.length.into())),
        Slot::Stored(object) => {
            let slot_bytes = arena.class_of(object.location).slot_bytes();
            Footprint::stored(object.codec.is_none(), object.length as usize, slot_bytes)
        }
    }
}

impl Pool {
    pub(crate) fn new(store: Arc<Store>, serial: u64, config: PoolConfig, backing: Option<Arc<Backing>>) -> Pool {
        let core = PoolCore {
            tree: Tree::new(serial),
            counters: Counters::new(),
            codec: AtomicU32::new(config.codec.pack()),
            limit: write::PoolLimit::new(config.limit_bytes),
            spare_percent: config.spare_percent,
            disk_bytes: AtomicU64::new(0),
            backing,
            emptied: AtomicBool::new(false),
            settling: [const { Mutex::new(()) }; FLIGHTS],
        };
        Pool { core: Arc::new(core), store }
    }

    pub(crate) fn core(&self) -> Arc<PoolCore> {
        self.core.clone()
    }

    /// The store it is in.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Where its pages can go, if there is such a place.
    pub fn backing(&self) -> Option<&Arc<Backing>> {
        self.core.backing.as_ref()
    }

    /// What new pages are compressed with.
    pub fn codec(&self) -> Codec {
        Codec::unpack(self.core.codec.load(Relaxed))
    }

    /// Changes what new pages are compressed with. Pages already stored stay as they are and readable.
    ///
    /// # Errors
    /// [`StoreError::NoSuchCodec`]; the codec is unchanged.
    pub fn set_codec(&self, codec: Codec) -> Result<(), StoreError> {
        codec.check(&self.store.dictionaries)?;
        self.core.codec.store(codec.pack(), Relaxed);
        Ok(())
    }

    /// Changes the pool's own limit, in bytes of slots and tables; `u64::MAX` is none.
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        self.core.limit.set(limit_bytes, self.core.used_bytes());
    }

    /// Tells the pool the size its front end shows, for the statistics alone.
    pub fn set_disk_bytes(&self, disk_bytes: u64) {
        self.core.disk_bytes.store(disk_bytes, Relaxed);
    }

    /// Whether the page is stored, in any form. Waits for nobody.
    pub fn contains(&self, index: PageIndex) -> bool {
        index.is_valid() && slot::is_present(self.core.tree.peek(&self.store.tables, index))
    }

    /// Whether the page is stored as one repeated word. Waits for nobody.
    pub fn is_same_filled(&self, index: PageIndex) -> bool {
        index.is_valid() && slot::is_same_filled(self.core.tree.peek(&self.store.tables, index))
    }

    /// Whether the page is on the backing, and not in memory. Waits for nobody.
    pub fn is_on_backing(&self, index: PageIndex) -> bool {
        index.is_valid() && slot::is_on_backing(self.core.tree.peek(&self.store.tables, index))
    }

    /// Whether the page is in a group of cold ones ([`Pool::recompress`]). Waits for nobody.
    pub fn is_grouped(&self, index: PageIndex) -> bool {
        index.is_valid() && slot::is_grouped(self.core.tree.peek(&self.store.tables, index))
    }

    /// The store's age when the page was last written or read; `None` if it is absent.
    pub fn age_of(&self, index: PageIndex) -> Option<u8> {
        let mut leaf = LeafCache::default();
        let guard = if index.is_valid() { self.core.tree.lock(&self.store.tables, index, &mut leaf) } else { None };
        guard.and_then(|guard| (guard.get() != Slot::Absent).then(|| guard.age()))
    }

    /// The statistics now. [`TABLE`](crate::TABLE) names them.
    pub fn stats(&self) -> PoolStats {
        let counted = self.core.counters.read();
        let table_bytes = self.core.tree.bytes();
        PoolStats {
            disk_size: self.core.disk_bytes.load(Relaxed),
            mem_limit: self.core.limit.bytes(),
            table_bytes,
            mem_used_total: counted.slot_bytes + table_bytes,
            mem_used_max: self.store.mem_used_max_bytes(),
            ..counted
        }
    }

    /// The bytes of memory it takes: `mem_used_total` of its statistics, for much less.
    pub fn used_bytes(&self) -> u64 {
        self.core.used_bytes()
    }

    /// How long reads and writes took since the pool was made.
    pub fn latency(&self) -> Latency {
        self.core.counters.latency()
    }

    fn replace(&self, guard: SlotGuard<'_>, new: Slot, shard: usize) {
        self.core.replace(&self.store, guard, new, shard);
    }
}

/// How often a leaf is tried that somebody has a slot of, for some tens of nanoseconds or until he runs again.
const DROP_PATIENCE: u32 = 10_000;

impl Drop for Pool {
    fn drop(&mut self) {
        // Compaction holds the registry while it works on a pool, and a flight as long as it gathers; after this they do not know this one
        // any more. One that settles has found it there, and is waited for.
        self.store.registry.lock().remove(&self.core);
        self.core.settling.iter().for_each(|settling| drop(settling.lock()));
        self.core.tree.let_go();
        self.discard_range(PageIndex(0), PageIndex::LIMIT);
        // A worker of another pool may have a slot of a leaf for a moment, which was that pool's when it looked there last. Only in a copy of a
        // process could nobody be left who gives it back.
        let mut patience = DROP_PATIENCE;
        while patience > 0
            && let Some(first) = self.core.tree.next_leaf(&self.store.tables, PageIndex(0), PageIndex(PageIndex::LIMIT))
        {
            let freed_bytes = self.core.tree.free_leaf_if_empty(&self.store.tables, first, &self.store.budget);
            patience -= u32::from(freed_bytes == 0);
        }
        self.core.tree.dismantle(&self.store.tables);
    }
}

const _: () = assert!(PAGE_SIZE == 4096);
