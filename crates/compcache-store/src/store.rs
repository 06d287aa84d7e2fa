//! The store: one arena, one budget, the pools that share them.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};

use crate::arena::Arena;
use crate::backing::Backing;
use crate::budget::{Budget, Credit};
use crate::codec::{Dictionaries, DictionaryId};
use crate::compact::Registry;
use crate::config::{PoolConfig, StoreConfig};
use crate::error::StoreError;
use crate::groups::{Aside, Groups};
use crate::lock::Mutex;
use crate::page::PAGE_SIZE;
use crate::pool::Pool;
use crate::table::Tables;

/// The least address range for tables: dense tables of 20 GiB of pages, or a thousand pages far from each other.
const TABLE_RESERVE_LEAST: u64 = 64 << 20;

/// The address range for entries of groups: 32 bytes for each 2 KiB of objects, which is less than a group takes.
const GROUPS_SHARE: u64 = 64;

/// Compressed pages of any number of pools, in one arena, under one limit.
pub struct Store {
    pub(crate) arena: Arena,
    pub(crate) tables: Tables,
    pub(crate) groups: Groups,
    pub(crate) aside: Mutex<Aside>,
    pub(crate) budget: Budget,
    pub(crate) dictionaries: Dictionaries,
    pub(crate) registry: Mutex<Registry>,
    workers: AtomicUsize,
    pools: AtomicU64,
    age: AtomicU8,
    /// When somebody who asked first did so last.
    age_advanced_ns: AtomicU64,
    /// Bytes of objects that have left memory, or have become smaller, since that was last made up for by compacting.
    pub(crate) held_back: AtomicU64,
}

impl Store {
    /// Reserves addresses; memory comes as pages are stored.
    ///
    /// # Errors
    /// [`StoreError::MemoryRefused`] when the address range is not to be had (RLIMIT_AS).
    pub fn new(config: StoreConfig) -> Result<Arc<Store>, StoreError> {
        let table_bytes = (config.reserve_bytes / 16).max(TABLE_RESERVE_LEAST);
        Ok(Arc::new(Store {
            arena: Arena::reserve(config.reserve_bytes, config.lock_in_ram)?,
            tables: Tables::reserve(table_bytes as usize, config.lock_in_ram)?,
            groups: Groups::reserve(
                (config.reserve_bytes / GROUPS_SHARE).max(PAGE_SIZE as u64) as usize,
                config.lock_in_ram,
            )?,
            aside: Mutex::new(Aside::default()),
            budget: Budget::new(config.limit_bytes),
            dictionaries: Dictionaries::new(),
            registry: Mutex::new(Registry::new()),
            workers: AtomicUsize::new(0),
            pools: AtomicU64::new(0),
            age: AtomicU8::new(0),
            age_advanced_ns: AtomicU64::new(0),
            held_back: AtomicU64::new(0),
        }))
    }

    /// An empty pool in this store.
    ///
    /// # Errors
    /// [`StoreError::NoSuchCodec`].
    pub fn create_pool(self: &Arc<Self>, config: PoolConfig) -> Result<Arc<Pool>, StoreError> {
        self.make_pool(config, None)
    }

    /// An empty pool in this store, whose pages can go to `backing` ([`Store::reclaim`]). Several pools may have the same.
    ///
    /// # Errors
    /// [`StoreError::NoSuchCodec`].
    pub fn create_pool_on(
        self: &Arc<Self>,
        config: PoolConfig,
        backing: &Arc<Backing>,
    ) -> Result<Arc<Pool>, StoreError> {
        self.make_pool(config, Some(backing.clone()))
    }

    fn make_pool(self: &Arc<Self>, config: PoolConfig, backing: Option<Arc<Backing>>) -> Result<Arc<Pool>, StoreError> {
        config.codec.check(&self.dictionaries)?;
        let pool = Pool::new(self.clone(), self.pools.fetch_add(1, Relaxed), config, backing);
        self.registry.lock().add(pool.core());
        Ok(Arc::new(pool))
    }

    /// Digests a zstd dictionary for `level`; any pool of this store can then use it. Allocates: for setting up.
    ///
    /// # Errors
    /// [`StoreError::DictionaryRefused`] when four are loaded or it cannot be used, [`StoreError::NoSuchCodec`] for the level.
    pub fn load_dictionary(&self, dictionary: &[u8], level: i8) -> Result<DictionaryId, StoreError> {
        self.dictionaries.add(dictionary, level)
    }

    /// Memory the system gave for objects and tables, in bytes: pages touched, not address ranges. Workers and what the
    /// allocator gave when pools were made (about 32 KiB each) are not in it.
    pub fn mem_used_total_bytes(&self) -> u64 {
        self.budget.used_bytes()
    }

    /// The most that [`Store::mem_used_total_bytes`] has been.
    pub fn mem_used_max_bytes(&self) -> u64 {
        self.budget.used_max_bytes()
    }

    /// The limit on memory, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.budget.limit_bytes()
    }

    /// Changes the limit. Below what is used, writes are refused until discards and compaction bring it to 90 % of the
    /// new limit; nothing stored is lost.
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        self.budget.set_limit_bytes(limit_bytes);
    }

    /// Keeps so many bytes of memory at hand, so that pages can be stored without asking the system: for a store that serves
    /// swap. 0, as at first: none. Nothing happens here; [`Store::refill`] gets the memory.
    pub fn set_reserve_bytes(&self, bytes: u64) {
        self.arena.set_reserve_bytes(bytes);
    }

    /// Memory at hand now, in bytes. It is in [`Store::mem_used_total_bytes`].
    pub fn reserve_bytes(&self) -> u64 {
        self.arena.reserve_bytes()
    }

    /// Makes sure of room for one object. What the reserve has is charged already.
    pub(crate) fn admit(&self, credit: &mut Credit) -> Result<(), StoreError> {
        if credit.reserve_only && self.arena.wants_reserve() { Ok(()) } else { self.budget.admit(credit) }
    }

    /// Gets 256 KiB of what is missing of the reserve, or gives so much back of what is too much; `false` when there is nothing to
    /// do. It may wait for the system to find
    /// memory, and holds no lock of the store's while it does: call it from a thread that stores no pages, again and again.
    ///
    /// # Errors
    /// [`StoreError::LimitReached`], [`StoreError::MemoryRefused`]: not now; the reserve is what it was.
    pub fn refill(&self) -> Result<bool, StoreError> {
        self.arena.refill(&self.budget)
    }

    /// The age that pages written or read from now on get.
    pub fn age(&self) -> u8 {
        self.age.load(Relaxed)
    }

    /// Begins the next age. 256 ages later it is the same again, so whoever looks for old pages looks more often.
    pub fn advance_age(&self) -> u8 {
        self.age.fetch_add(1, Relaxed).wrapping_add(1)
    }

    /// Begins the next age, unless this did so less than `least_ns` before `now_ns`: of several who see to it that ages pass each may do so, and they pass
    /// no faster. Whether it did.
    pub fn advance_age_unless_since(&self, now_ns: u64, least_ns: u64) -> bool {
        let passed = |then: u64| (now_ns.saturating_sub(then) >= least_ns).then_some(now_ns);
        let is_due = self.age_advanced_ns.fetch_update(Relaxed, Relaxed, passed).is_ok();
        if is_due {
            self.advance_age();
        }
        is_due
    }

    /// Address and length of the ranges the store keeps its pages and tables in. A pager must not evict them.
    pub fn memory_ranges(&self) -> [(usize, usize); 6] {
        let [objects, descriptors] = self.arena.ranges();
        let [leaves, headers, nodes] = self.tables.ranges();
        [objects, descriptors, leaves, headers, nodes, self.groups.range()]
    }

    pub(crate) fn next_worker(&self) -> usize {
        self.workers.fetch_add(1, Relaxed)
    }
}
