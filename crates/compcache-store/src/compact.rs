//! Compaction: moving objects out of sparse spans so that the spans go back to the system.
//!
//! An object does not know its slot, so compaction cannot go from a span to the slots. It goes the other way: it marks
//! the sparse spans as victims (`arena/sparse.rs`), then sweeps the tables of all pools with a cursor, and moves every
//! object it finds in a victim, under the lock of its slot, to another span of its class. Freeing the last object of a
//! victim returns its memory. Spans that stay are squeezed towards their start in the same sweep, and the pages at their
//! end returned. A sweep reads four bytes a page, twelve for pages with an object, so a gigabyte takes about
//! a millisecond beside the moves; it is cut into steps, each of which a front end's worker does between its own work.
//!
//! Example: a class with 191 objects a span, ten spans, each half empty. Five are marked; about 480 objects move, 1.25 MiB are
//! given back.
//!
//! The sweep also frees leaves whose pages are all absent. After the tables come the groups ([`crate::groups`]), whose objects
//! no slot leads to by itself.
//!
//! Lock order: the registry, then slots, then the arena's locks. The registry is held for one step, and only making and
//! dropping pools waits for it.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::Relaxed;

use crate::backing::record::Listed;
use crate::groups::GroupId;
use crate::lock::Guard;
use crate::page::PageIndex;
use crate::pool::PoolCore;
use crate::slot::{self, Slot};
use crate::store::Store;
use crate::table::FANOUT;
use crate::worker::Worker;

/// Slots looked at for each object that may be moved.
const LOOK_PER_MOVE: usize = 64;

/// The pools of a store, and how far compaction has come.
pub(crate) struct Registry {
    pools: Vec<Arc<PoolCore>>,
    sweep: Option<Sweep>,
}

#[derive(Clone, Copy)]
struct Sweep {
    pool: usize,
    next: PageIndex,
    /// The pages before it in its leaf were absent.
    is_absent: bool,
    /// After the last pool come the groups.
    group: u32,
}

/// What one step of compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Objects moved, also those of groups, which [`PoolStats::pages_compacted`](crate::PoolStats::pages_compacted) does not know of.
    pub moved: usize,
    /// Memory given back to the system, in bytes.
    pub freed_bytes: u64,
    /// Nothing is left to do for now. `false`: call again, this pass is not at its end.
    pub finished: bool,
}

impl Registry {
    pub fn new() -> Registry {
        Registry { pools: Vec::new(), sweep: None }
    }

    pub fn add(&mut self, pool: Arc<PoolCore>) {
        self.pools.push(pool);
    }

    /// All of them, in no order that lasts.
    pub fn pools(&self) -> &[Arc<PoolCore>] {
        &self.pools
    }

    /// The pool of that serial number.
    pub fn pool(&self, serial: u64) -> Option<&Arc<PoolCore>> {
        self.pools.iter().find(|pool| pool.serial() == serial)
    }

    /// A pool with that serial number, as far as the list of a segment keeps it.
    pub fn listed_pool(&self, serial: u32) -> Option<&PoolCore> {
        let is_it = |pool: &&Arc<PoolCore>| pool.serial() & Listed::POOL_MASK == u64::from(serial);
        self.pools.iter().find(is_it).map(|pool| &**pool)
    }

    /// Takes a pool out. The sweep goes on with those that are left; as it may skip one, they are swept in the next pass.
    pub fn remove(&mut self, pool: &Arc<PoolCore>) {
        self.pools.retain(|other| !Arc::ptr_eq(other, pool));
        if self.sweep.is_some() {
            self.pools.iter().for_each(|pool| pool.note_emptied());
        }
    }
}

impl Store {
    /// Does one step of compaction: moves at most `objects_max` objects (at least one) and gives back the memory that
    /// becomes free. May run while any other operations do; a second caller at the same time does nothing.
    ///
    /// Call it until it says `finished` when memory is wanted: after large discards, or when writes are refused.
    /// Relieving memory needs none: objects move only into spans that have room.
    pub fn compact(&self, worker: &mut Worker, objects_max: usize) -> Compacted {
        worker.must_be_of(self);
        match self.registry.try_lock() {
            Some(registry) => self.compact_in(registry, worker, objects_max),
            None => Compacted::default(),
        }
    }

    /// As [`Store::compact`], after whoever is at it, or makes a segment ready to leave: for a thread that has nothing else to do.
    pub fn compact_in_turn(&self, worker: &mut Worker, objects_max: usize) -> Compacted {
        worker.must_be_of(self);
        self.compact_in(self.registry.lock(), worker, objects_max)
    }

    fn compact_in(&self, mut registry: Guard<'_, Registry>, worker: &mut Worker, objects_max: usize) -> Compacted {
        let mut done = Compacted::default();
        let mut sweep = match registry.sweep.take() {
            Some(sweep) => sweep,
            None => {
                done.freed_bytes += self.arena.retire_kept(&self.budget);
                let empty_leaves = registry.pools.iter().fold(false, |any, pool| pool.take_emptied() | any);
                if !self.arena.choose_sparse(&self.budget) && !empty_leaves {
                    // There may be no group left either.
                    done.freed_bytes += self.groups.trim(&self.budget);
                    return Compacted { finished: true, ..done };
                }
                Sweep { pool: 0, next: PageIndex(0), is_absent: true, group: 0 }
            }
        };
        // The budget of this step: a move costs as much as looking at many slots.
        let mut effort = objects_max.max(1) * LOOK_PER_MOVE;
        while effort > 0 {
            let Some(pool) = registry.pools.get(sweep.pool) else {
                if self.sweep_groups(&mut sweep.group, worker, &mut effort, &mut done) {
                    break;
                }
                done.freed_bytes += self.arena.finish_pass(&self.budget) + self.arena.retire_kept(&self.budget);
                done.finished = true;
                return done;
            };
            match pool.tree.next_leaf(&self.tables, sweep.next, PageIndex(PageIndex::LIMIT)) {
                Some(first) => {
                    self.sweep_leaf(pool, first, &mut sweep, worker, &mut effort, &mut done);
                }
                None => sweep = Sweep { pool: sweep.pool + 1, next: PageIndex(0), is_absent: true, ..sweep },
            }
        }
        registry.sweep = Some(sweep);
        done
    }

    /// Sweeps the groups from `next` on. `true`: this step has done enough, and they are not at their end.
    fn sweep_groups(&self, next: &mut u32, worker: &mut Worker, effort: &mut usize, done: &mut Compacted) -> bool {
        for id in *next..self.groups.end() {
            if *effort == 0 {
                *next = id;
                return true;
            }
            let (moved, freed_bytes) =
                self.groups.move_if_sparse(GroupId(id), &self.arena, &self.budget, &mut worker.credit);
            *effort = effort.saturating_sub(1 + moved * (LOOK_PER_MOVE - 1));
            done.moved += moved;
            done.freed_bytes += freed_bytes;
        }
        done.freed_bytes += self.groups.trim(&self.budget);
        false
    }

    /// Sweeps the leaf that begins at `first`, or the rest of it, as far as the effort goes.
    fn sweep_leaf(
        &self,
        pool: &PoolCore,
        first: PageIndex,
        sweep: &mut Sweep,
        worker: &mut Worker,
        effort: &mut usize,
        done: &mut Compacted,
    ) {
        let (from, end) = (first.max(sweep.next), first.plus(FANOUT as u64));
        let mut is_absent = from == first || sweep.is_absent;
        (sweep.next, sweep.is_absent) = (end, true);
        let Some(leaf) = pool.tree.leaf(&self.tables, first) else { return };
        for index in from.0..end.0 {
            if *effort == 0 {
                (sweep.next, sweep.is_absent) = (PageIndex(index), is_absent);
                return;
            }
            *effort -= 1;
            let meta = leaf.meta[(index - first.0) as usize].load(Relaxed);
            is_absent &= !slot::is_present(meta);
            if slot::is_stored(meta) && self.move_if_sparse(pool, PageIndex(index), worker, done) {
                *effort = effort.saturating_sub(LOOK_PER_MOVE - 1);
            }
        }
        if is_absent {
            done.freed_bytes += pool.free_leaf_or_note(self, first);
        }
    }

    /// Moves the object of one page if it lies where compaction wants room.
    fn move_if_sparse(&self, pool: &PoolCore, index: PageIndex, worker: &mut Worker, done: &mut Compacted) -> bool {
        let Some(mut guard) = pool.tree.lock(&self.tables, index, &mut worker.leaf) else { return false };
        let Slot::Stored(object) = guard.get() else { return false };
        let (from, length) = (object.location, object.length.into());
        let to = self.arena.place_for_move(from, length, &self.budget, &mut worker.credit);
        let Some(to) = to else { return false };
        let from = guard.relocate(&object, to, &self.arena);
        drop(guard);
        done.freed_bytes += self.arena.free(from, &self.budget);
        done.moved += 1;
        pool.counters.shard(worker.number).compacted.fetch_add(1, Relaxed);
        true
    }
}
