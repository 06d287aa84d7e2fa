//! A worker: what one thread needs to write and read pages, made once.

use alloc::sync::Arc;

use crate::budget::Credit;
use crate::codec::Codecs;
use crate::error::StoreError;
use crate::groups::Opened;
use crate::store::Store;
use crate::table::LeafCache;

/// Nanoseconds that only grow. The store has no clock of its own; it measures how long operations take with this one.
pub type Clock = fn() -> u64;

/// Codec contexts, buffers and memory credit of one thread. All of its memory is taken when it is made (about 30 KiB from
/// the allocator, 0.3 MiB of addresses more for zstd and for groups, touched when first used); using it allocates nothing.
///
/// A worker belongs to one store and serves all its pools; used with another's, a call panics. It holds up to 16 KiB of credit against the store's limit.
pub struct Worker {
    store: Arc<Store>,
    clock: Clock,
    pub(crate) number: usize,
    pub(crate) codecs: Codecs,
    pub(crate) credit: Credit,
    pub(crate) leaf: LeafCache,
    pub(crate) opened: Opened,
}

impl Worker {
    /// A worker for the pools of `store`.
    ///
    /// # Errors
    /// [`StoreError::MemoryRefused`] or [`StoreError::CodecFailed`]; nothing is left behind.
    pub fn new(store: &Arc<Store>, clock: Clock) -> Result<Worker, StoreError> {
        Ok(Worker {
            store: store.clone(),
            clock,
            number: store.next_worker(),
            codecs: Codecs::new()?,
            credit: Credit::default(),
            leaf: LeafCache::default(),
            opened: Opened::new()?,
        })
    }

    /// Whether the worker stores pages only in memory that the store has already, once it has a reserve
    /// ([`Store::set_reserve_bytes`]). When that is used up it fails with [`StoreError::MemoryRefused`], and the caller may come
    /// again a little later, rather than have the thread wait for the system to find memory: it would wait for ever where the
    /// system waits for this very page to be stored.
    pub fn set_reserve_only(&mut self, reserve_only: bool) {
        self.credit.reserve_only = reserve_only;
    }

    /// Forgets the group that it has read from last: in a copy of the process, whose parent's thread was in the midst of that.
    pub fn forget_group(&mut self) {
        self.opened.forget();
    }

    /// The address ranges of the worker's memory that does not come from the allocator, and their lengths. A pager must not
    /// evict it.
    pub fn memory_ranges(&self) -> [(usize, usize); 3] {
        let [frame, pages] = self.opened.ranges();
        [self.codecs.range(), frame, pages]
    }

    /// The store it belongs to.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Ends the call if the worker is another store's. Its leaf, its groups and its credit mean nothing there, and to follow them would
    /// be to write to memory that is somebody else's: so this is asked in release, too, and costs a comparison.
    #[inline]
    pub(crate) fn must_be_of(&self, store: &Store) {
        assert!(core::ptr::eq(store, &*self.store), "a worker serves one store");
    }

    pub(crate) fn now_ns(&self) -> u64 {
        (self.clock)()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.store.budget.uncharge(self.credit.bytes);
    }
}
