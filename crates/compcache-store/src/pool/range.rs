//! Discarding, moving and listing pages, one or whole ranges.
//!
//! Ranges can be the whole address space and nearly empty: absent subtrees are skipped a gigabyte or a terabyte at a time.

use core::sync::atomic::Ordering::Relaxed;

use super::{NO_WORKER, Pool};
use crate::error::StoreError;
use crate::page::PageIndex;
use crate::slot::{self, Slot};
use crate::table::{Charge, FANOUT, LeafCache, SlotGuard};

impl Pool {
    /// Forgets page `index` and frees what it held. Returns whether it was there. An index out of range was not.
    pub fn discard(&self, index: PageIndex) -> bool {
        let discarded = index.is_valid() && self.discard_one(index, &mut LeafCache::default());
        if discarded {
            self.core.counters.shard(NO_WORKER).discards.fetch_add(1, Relaxed);
            self.core.note_emptied();
        }
        discarded
    }

    /// Forgets the `count` pages from `first` on and returns how many of them were there. Tables that become empty are
    /// freed. What is beyond the last index is ignored, so `count` may be [`PageIndex::LIMIT`].
    pub fn discard_range(&self, first: PageIndex, count: u64) -> u64 {
        let mut discarded = 0;
        let mut leaf = LeafCache::default();
        self.for_each_leaf(first, count, |leaf_first| {
            self.for_each_in_leaf(leaf_first, first, count, |index| {
                discarded += u64::from(self.discard_one(index, &mut leaf));
            });
            self.free_leaf_if_empty(leaf_first);
        });
        self.core.counters.shard(NO_WORKER).discards.fetch_add(discarded, Relaxed);
        discarded
    }

    /// Frees the leaf of that page if none of its pages is stored, or has compaction do so if somebody is looking at one.
    pub(super) fn free_leaf_if_empty(&self, index: PageIndex) {
        let metas = self.core.tree.leaf(&self.store.tables, index).map(|leaf| &leaf.meta);
        if metas.is_some_and(|metas| metas.iter().all(|meta| !slot::is_present(meta.load(Relaxed)))) {
            self.core.free_leaf_or_note(&self.store, index);
        }
    }

    /// Makes the tables of the first `count` pages now, so that storing these pages touches no new table: for a pool that
    /// serves swap. They stay, empty or not, for the pool's life.
    ///
    /// # Errors
    /// [`StoreError::LimitReached`], [`StoreError::MemoryRefused`]; tables that were made go with the next compaction, and where all of them are
    /// more than the limit leaves room for none is made.
    pub fn prepare(&self, count: u64) -> Result<(), StoreError> {
        let prepared = self.core.tree.prepare(&self.store.tables, PageIndex(count), &self.store.budget);
        prepared.inspect_err(|_| self.core.note_emptied())
    }

    /// Calls `each` for every page of the `count` from `first` on that is stored when it is looked at, in order.
    pub fn for_each_stored(&self, first: PageIndex, count: u64, mut each: impl FnMut(PageIndex)) {
        self.for_each_leaf(first, count, |leaf_first| self.for_each_in_leaf(leaf_first, first, count, &mut each));
    }

    /// The first of the `count` pages from `first` on that is stored when it is looked at.
    pub fn next_stored(&self, first: PageIndex, count: u64) -> Option<PageIndex> {
        let end = first.plus(count);
        let mut next = first;
        while let Some(leaf_first) = self.core.tree.next_leaf(&self.store.tables, next, end) {
            let from = next.max(leaf_first);
            next = leaf_first.plus(FANOUT as u64);
            let Some(leaf) = self.core.tree.leaf(&self.store.tables, leaf_first) else { continue };
            let present = |index: &u64| slot::is_present(leaf.meta[(index - leaf_first.0) as usize].load(Relaxed));
            if let Some(index) = (from.0..end.min(next).0).find(present) {
                return Some(PageIndex(index));
            }
        }
        None
    }

    /// Moves what page `from` holds to page `to`: the object stays, the slot moves, the age with it. What `to` held is
    /// freed; if `from` is absent, so is `to` afterwards. Returns whether there was something to move.
    ///
    /// # Errors
    /// [`StoreError::MemoryRefused`] when the system gives no table for `to`; nothing has moved. The limit does not
    /// count here. [`StoreError::IndexOutOfRange`].
    pub fn move_slot(&self, from: PageIndex, to: PageIndex) -> Result<bool, StoreError> {
        for index in [from, to] {
            if !index.is_valid() {
                return Err(StoreError::IndexOutOfRange { index });
            }
        }
        if from == to {
            return Ok(self.contains(from));
        }
        if !self.contains(from) {
            if self.discard_one(to, &mut LeafCache::default()) {
                self.core.note_emptied();
            }
            return Ok(false);
        }
        let Some((mut source, mut target)) = self.lock_both(from, to)? else {
            // The leaf that was made for it, or what it held was all there.
            self.core.note_emptied();
            return Ok(false);
        };
        let moved = source.get() != Slot::Absent;
        let overwritten = target.get();
        target.take_from(&mut source);
        drop((source, target));
        self.core.note_emptied();
        let store = &self.store;
        let before = super::footprint(overwritten, &store.arena);
        self.core.counters.shard(NO_WORKER).change(before, crate::stats::Footprint::ABSENT);
        self.core.free(store, overwritten);
        Ok(moved)
    }

    /// Moves `count` pages from `from` on to `to` on, as [`Pool::move_slot`] does each; skips absent subtrees. The two
    /// ranges must not overlap. Returns how many pages moved.
    ///
    /// # Errors
    /// As [`Pool::move_slot`]; pages already moved stay moved, those not moved are still at `from`.
    pub fn move_range(&self, from: PageIndex, to: PageIndex, count: u64) -> Result<u64, StoreError> {
        debug_assert!(from.0.abs_diff(to.0) >= count, "the ranges overlap");
        self.discard_range(to, count);
        let (mut moved, mut failed) = (0, None);
        self.for_each_stored(from, count, |index| {
            if failed.is_none() {
                match self.move_slot(index, to.plus(index.0 - from.0)) {
                    Ok(one) => moved += u64::from(one),
                    Err(error) => failed = Some(error),
                }
            }
        });
        failed.map_or(Ok(moved), Err)
    }

    /// Both slots, locked in the order of their indexes.
    fn lock_both(&self, from: PageIndex, to: PageIndex) -> Result<Option<(SlotGuard<'_>, SlotGuard<'_>)>, StoreError> {
        let (store, tree) = (&self.store, &self.core.tree);
        let (mut leaf_of_from, mut leaf_of_to) = (LeafCache::default(), LeafCache::default());
        loop {
            // Makes the leaf of `to` while nothing is locked; if it is freed again before the lock below, once more.
            drop(tree.lock_or_make(&store.tables, to, &mut leaf_of_to, &store.budget, Charge::Always)?);
            let mut lock_from = || tree.lock(&store.tables, from, &mut leaf_of_from);
            let (source, target) = if from < to {
                let source = lock_from();
                (source, tree.lock(&store.tables, to, &mut leaf_of_to))
            } else {
                let target = tree.lock(&store.tables, to, &mut leaf_of_to);
                (lock_from(), target)
            };
            match (source, target) {
                (Some(source), Some(target)) => return Ok(Some((source, target))),
                (None, target) => {
                    // Discarded meanwhile, leaf and all: then `to` becomes absent too.
                    if let Some(target) = target {
                        self.replace(target, Slot::Absent, NO_WORKER);
                    }
                    return Ok(None);
                }
                (Some(_), None) => {}
            }
        }
    }

    fn discard_one(&self, index: PageIndex, leaf: &mut LeafCache) -> bool {
        let Some(guard) = self.core.tree.lock(&self.store.tables, index, leaf) else { return false };
        if guard.get() == Slot::Absent {
            return false;
        }
        self.replace(guard, Slot::Absent, NO_WORKER);
        true
    }

    /// Calls `each` with the first index of every leaf that has pages of the range.
    fn for_each_leaf(&self, first: PageIndex, count: u64, mut each: impl FnMut(PageIndex)) {
        let end = first.plus(count);
        let mut next = first;
        while let Some(leaf_first) = self.core.tree.next_leaf(&self.store.tables, next, end) {
            each(leaf_first);
            next = leaf_first.plus(FANOUT as u64);
        }
    }

    /// Calls `each` for every page of one leaf that is in the range and present.
    fn for_each_in_leaf(&self, leaf_first: PageIndex, first: PageIndex, count: u64, mut each: impl FnMut(PageIndex)) {
        let Some(leaf) = self.core.tree.leaf(&self.store.tables, leaf_first) else { return };
        let from = first.max(leaf_first);
        let to = first.plus(count).min(leaf_first.plus(FANOUT as u64));
        for index in from.0..to.0 {
            if slot::is_present(leaf.meta[(index - leaf_first.0) as usize].load(Relaxed)) {
                each(PageIndex(index));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::sync::Arc;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::config::{PoolConfig, StoreConfig};
    use crate::page::Page;
    use crate::pool::Read;
    use crate::store::Store;
    use crate::worker::Worker;

    fn place() -> (Arc<Pool>, Worker) {
        let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
        (store.create_pool(PoolConfig::default()).unwrap(), Worker::new(&store, || 0).unwrap())
    }

    fn page(seed: u8) -> Page {
        core::array::from_fn(|byte| (byte as u8).wrapping_mul(seed) ^ (byte >> 8) as u8)
    }

    fn compact(pool: &Pool, worker: &mut Worker) {
        while !pool.store.compact(worker, 1 << 20).finished {}
    }

    #[test]
    fn a_leaf_in_which_somebody_looks_at_an_absent_page_goes_a_little_later() {
        let (pool, mut worker) = place();
        pool.write(&mut worker, PageIndex(7), &page(3)).unwrap();
        compact(&pool, &mut worker);
        let with_leaf = pool.stats().table_bytes;
        let lock = || pool.core.tree.lock(&pool.store.tables, PageIndex(9), &mut LeafCache::default()).unwrap();

        let looking = lock();
        assert_eq!(pool.discard_range(PageIndex(0), PageIndex::LIMIT), 1);
        assert_eq!(pool.stats().table_bytes, with_leaf, "it is in use");
        // Compaction meets it in use, too.
        compact(&pool, &mut worker);
        drop(looking);
        compact(&pool, &mut worker);
        assert!(pool.stats().table_bytes < with_leaf, "{with_leaf} bytes as before");
    }

    #[test]
    fn who_only_looks_waits_for_nobody_in_another_area() {
        let (pool, mut worker) = place();
        let mut looks = Worker::new(&pool.store, || 0).unwrap();
        let (here, there) = (PageIndex(7), PageIndex(7 + (FANOUT as u64 * 5)));
        pool.write(&mut worker, here, &page(3)).unwrap();
        pool.read(&mut looks, here, &mut [0; 4096]).unwrap();
        let leaf_of = |index| core::ptr::from_ref(pool.core.tree.leaf(&pool.store.tables, index).unwrap());
        let leaf_of_here = leaf_of(here);
        pool.discard_range(PageIndex(0), FANOUT as u64);
        pool.write(&mut worker, there, &page(5)).unwrap();
        assert_eq!(leaf_of(there), leaf_of_here, "the same leaf serves another area");
        let held = pool.core.tree.lock(&pool.store.tables, there, &mut LeafCache::default()).unwrap();

        let (done, is_done) = mpsc::channel();
        let pool = &pool;
        std::thread::scope(|scope| {
            scope.spawn(move || done.send(pool.look_at(&mut looks, here, &mut [0; 4096]).unwrap()));
            let looked = is_done.recv_timeout(Duration::from_secs(20));
            drop(held);
            assert_eq!(looked, Ok(Read::Absent));
        });
    }
}
