//! Writing a page.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, Ordering::Relaxed};

use super::{Pool, PoolCore};
use crate::arena::class::Class;
use crate::budget::{Credit, accept_bytes};
use crate::checksum;
use crate::codec::CodecId;
use crate::error::StoreError;
use crate::page::{self, PAGE_SIZE, Page, PageIndex};
use crate::slot::{self, Object, Slot};
use crate::stats::Footprint;
use crate::table::{Charge, SlotGuard};
use crate::worker::Worker;

/// An object longer than this saves less than 1/32 of a page, and is not worth decoding: the page is kept raw.
pub(super) const COMPRESSED_MAX: usize = PAGE_SIZE - PAGE_SIZE / 32;

/// How a page was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// One word repeated: kept in the slot, costs no arena.
    SameFilled,
    /// Compressed to so many bytes.
    Compressed {
        /// Length of the object, 1..=3968.
        bytes: u16,
    },
    /// It does not compress: kept as it is.
    Raw,
}

/// The limit of one pool.
///
/// Writers reserve a page before they compress, and give the reservation up after the object is counted; so what is
/// counted and what is reserved never pass the limit together, however many write. Costs nothing without a limit.
pub(crate) struct PoolLimit {
    limit: AtomicU64,
    reserved: AtomicU64,
    refusing: AtomicBool,
}

/// A part of a pool's limit, held while something is made that is not counted yet: a page's worth while one is written. Of a pool without a limit it is
/// nothing.
pub(super) struct Reservation<'p> {
    limit: Option<&'p PoolLimit>,
    bytes: u64,
}

impl Reservation<'_> {
    /// Holds so much more, whether it is there or not: for what takes the place of something else. Returns what all hold now.
    pub fn grow(&mut self, bytes: u64) -> u64 {
        self.limit.map_or(0, |limit| {
            self.bytes += bytes;
            limit.reserved.fetch_add(bytes, Ordering::AcqRel) + bytes
        })
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if let Some(limit) = self.limit {
            limit.reserved.fetch_sub(self.bytes, Ordering::AcqRel);
        }
    }
}

impl PoolLimit {
    pub fn new(limit: u64) -> PoolLimit {
        PoolLimit { limit: AtomicU64::new(limit), reserved: AtomicU64::new(0), refusing: AtomicBool::new(false) }
    }

    pub fn bytes(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    pub fn set(&self, limit: u64, used: u64) {
        self.limit.store(limit, Relaxed);
        self.refusing.store(used > limit, Relaxed);
    }
}

impl PoolCore {
    /// Nothing of the limit yet.
    pub(super) fn hold(&self) -> Reservation<'_> {
        Reservation { limit: (self.limit.bytes() != u64::MAX).then_some(&self.limit), bytes: 0 }
    }

    pub(super) fn reserve(&self) -> Result<Reservation<'_>, StoreError> {
        self.reserve_with(|| 0)
    }

    /// As [`PoolCore::reserve`], for a page whose tables may have to be made as well, of so many bytes.
    fn reserve_with(&self, table_bytes: impl FnOnce() -> u64) -> Result<Reservation<'_>, StoreError> {
        let limit = self.limit.bytes();
        let mut reservation = self.hold();
        if reservation.limit.is_none() {
            return Ok(reservation);
        }
        let reserved = reservation.grow(PAGE_SIZE as u64 + table_bytes());
        let used = self.used_bytes();
        let refused = StoreError::LimitReached { used_bytes: used, limit_bytes: limit };
        if self.limit.refusing.load(Relaxed) && used > accept_bytes(limit) {
            return Err(refused);
        }
        let full = used + reserved > limit;
        self.limit.refusing.store(full, Relaxed);
        if full { Err(refused) } else { Ok(reservation) }
    }
}

impl PoolCore {
    /// As [`PoolCore::reserve`], so many bytes, also while writes are refused; and where there is no room, nobody else is refused for it.
    pub(super) fn reserve_if_it_fits(&self, bytes: u64) -> Result<Reservation<'_>, StoreError> {
        let mut reservation = self.hold();
        let reserved = reservation.grow(bytes);
        let (used_bytes, limit_bytes) = (self.used_bytes(), self.limit.bytes());
        match used_bytes + reserved > limit_bytes {
            true => Err(StoreError::LimitReached { used_bytes, limit_bytes }),
            false => Ok(reservation),
        }
    }
}

impl Pool {
    /// Stores `page` as page `index`; what the page held before is freed.
    ///
    /// At a limit, a page of one repeated word is accepted where its tables are, and a page that has an object already if its new content
    /// fits into the slot of the old; everything else is refused.
    ///
    /// # Errors
    /// [`StoreError::LimitReached`], [`StoreError::MemoryRefused`]: nothing was stored, and the page still holds its **old**
    /// content: who has the new one nowhere else must keep it, or discard the page.
    /// [`StoreError::IndexOutOfRange`], [`StoreError::CodecFailed`].
    pub fn write(&self, worker: &mut Worker, index: PageIndex, page: &Page) -> Result<Written, StoreError> {
        let start_ns = worker.now_ns();
        self.write_from(worker, index, page, start_ns).0
    }

    /// As [`Pool::write`], begun at `start_ns`; also returns when it ended, so that a run reads the clock once a page.
    pub(super) fn write_from(
        &self,
        worker: &mut Worker,
        index: PageIndex,
        page: &Page,
        start_ns: u64,
    ) -> (Result<Written, StoreError>, u64) {
        worker.must_be_of(&self.store);
        let written = self.write_page(worker, index, page);
        let end_ns = worker.now_ns();
        let shard = self.core.counters.shard(worker.number);
        match written {
            Ok(_) => shard.writes.record(end_ns.saturating_sub(start_ns)),
            Err(StoreError::IndexOutOfRange { .. }) => _ = shard.invalid.fetch_add(1, Relaxed),
            Err(_) => _ = shard.failed_writes.fetch_add(1, Relaxed),
        }
        (written, end_ns)
    }

    fn write_page(&self, worker: &mut Worker, index: PageIndex, page: &Page) -> Result<Written, StoreError> {
        if !index.is_valid() {
            return Err(StoreError::IndexOutOfRange { index });
        }
        let store = &self.store;
        if let Some(word) = page::repeated_word(page) {
            self.replace(self.lock_for_word(worker, index)?, Slot::SameFilled { word }, worker.number);
            return Ok(Written::SameFilled);
        }
        // Room first, work second.
        let table_bytes = || self.core.tree.missing_bytes(&store.tables, index);
        let admitted = store.admit(&mut worker.credit).and_then(|()| self.core.reserve_with(table_bytes));
        match admitted.and_then(|_reservation| self.write_object(worker, index, page)) {
            Err(refused @ (StoreError::LimitReached { .. } | StoreError::MemoryRefused { .. })) => {
                self.write_in_place(worker, index, page, refused)
            }
            written => written,
        }
    }

    /// The slot of a page of one repeated word. It takes no memory but that of its tables, if they have to be made.
    fn lock_for_word(&self, worker: &mut Worker, index: PageIndex) -> Result<SlotGuard<'_>, StoreError> {
        let (tables, tree) = (&self.store.tables, &self.core.tree);
        if let Some(guard) = tree.lock(tables, index, &mut worker.leaf) {
            return Ok(guard);
        }
        let _reservation = self.core.reserve_if_it_fits(tree.missing_bytes(tables, index))?;
        tree.lock_or_make(tables, index, &mut worker.leaf, &self.store.budget, Charge::IfItFits)
    }

    fn write_object(&self, worker: &mut Worker, index: PageIndex, page: &Page) -> Result<Written, StoreError> {
        let store = &self.store;
        let (id, compressed) = worker.codecs.compress(self.codec(), page, &store.dictionaries)?;
        let (codec, bytes, written) = form(id, compressed, page);
        let tree = &self.core.tree;
        let guard = tree.lock_or_make(&store.tables, index, &mut worker.leaf, &store.budget, Charge::Limited)?;
        let placed = self.place(guard, codec, bytes, &mut worker.credit, worker.number);
        // It may have been made for this page.
        placed.inspect_err(|_| self.free_leaf_if_empty(index))?;
        Ok(written)
    }

    /// Makes `bytes` the object of a slot: where its old one is, if that fits and the slot is sound.
    pub(super) fn place(
        &self,
        mut guard: SlotGuard<'_>,
        codec: Option<CodecId>,
        bytes: &[u8],
        credit: &mut Credit,
        shard: usize,
    ) -> Result<(), StoreError> {
        let store = &self.store;
        let (checksum, class, length) =
            (checksum::of(bytes, codec), Class::for_length(bytes.len()), bytes.len() as u16);
        if let Slot::Stored(old) = guard.get()
            && store.arena.holds(old.location) == Some(class)
        {
            let object = Object { codec, location: old.location, length, checksum };
            self.overwrite(guard, old, object, bytes, shard);
            return Ok(());
        }
        let location = store.arena.allocate(class, &store.budget, credit)?;
        guard.fill(location, bytes, &store.arena);
        self.replace(guard, Slot::Stored(Object { codec, location, length, checksum }), shard);
        Ok(())
    }

    /// The way at the limit: the new object must fit where the old one is.
    fn write_in_place(
        &self,
        worker: &mut Worker,
        index: PageIndex,
        page: &Page,
        refused: StoreError,
    ) -> Result<Written, StoreError> {
        let store = &self.store;
        if !slot::is_stored(self.core.tree.peek(&store.tables, index)) {
            return Err(refused);
        }
        let (id, compressed) = worker.codecs.compress(self.codec(), page, &store.dictionaries)?;
        let (codec, bytes, written) = form(id, compressed, page);
        let guard = self.core.tree.lock(&store.tables, index, &mut worker.leaf).ok_or(refused)?;
        let Slot::Stored(old) = guard.get() else { return Err(refused) };
        if store.arena.holds(old.location).is_none_or(|class| class.slot_bytes() < bytes.len()) {
            return Err(refused);
        }
        let checksum = checksum::of(bytes, codec);
        let object = Object { codec, location: old.location, length: bytes.len() as u16, checksum };
        self.overwrite(guard, old, object, bytes, worker.number);
        Ok(written)
    }

    /// Puts `new` where `old` is, which the arena [holds](crate::arena::Arena::holds).
    fn overwrite(&self, mut guard: SlotGuard<'_>, old: Object, new: Object, bytes: &[u8], shard: usize) {
        guard.fill(old.location, bytes, &self.store.arena);
        guard.set(Slot::Stored(new), self.store.age());
        let slot_bytes = self.store.arena.class_of(old.location).slot_bytes();
        drop(guard);
        let cost = |object: &Object| Footprint::stored(object.codec.is_none(), object.length as usize, slot_bytes);
        self.core.counters.shard(shard).change(cost(&old), cost(&new));
    }
}

/// Whether the page is kept as compressed or as it is.
pub(crate) fn form<'b>(id: CodecId, compressed: &'b [u8], page: &'b Page) -> (Option<CodecId>, &'b [u8], Written) {
    if compressed.len() > COMPRESSED_MAX {
        (None, page, Written::Raw)
    } else {
        (Some(id), compressed, Written::Compressed { bytes: compressed.len() as u16 })
    }
}
