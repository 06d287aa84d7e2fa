//! Which pages leave memory: those that do not compress, then the oldest.
//!
//! A raw page takes three times the memory of another and gains nothing by being here, so raw ones go first, whatever their
//! age. After them go pages by the age in their slots: the distances from now are counted into a histogram, and the oldest
//! that make up an eighth of what is stored (two segments at least) go in the next pass. So a pass costs two looks at four bytes a
//! page for an eighth of the memory: at a million pages, 2 ms beside some 130 flights.
//!
//! Where a pass has come to is kept from flight to flight, for all of them: two that gather at the same time would take the same pages. Pools that have no need, or another backing, are passed over.
//!
//! # Source
//! That what does not compress goes straight to the backing is ramzswap's rule.

use super::Backing;
use super::flight::{Flight, From, Head};
use crate::checksum;
use crate::compact::Registry;
use crate::page::PageIndex;
use crate::pool::PoolCore;
use crate::slot::{self, Slot};
use crate::store::Store;
use crate::table::{FANOUT, LeafCache};
use core::sync::atomic::Ordering::Relaxed;

/// What a pass takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    Raw,
    /// Compressed, and so many ages old.
    Aged {
        least: u8,
    },
}

/// A pass over the pools, and how far it has come.
pub(super) struct Plan {
    taken: Taken,
    pool: usize,
    next: PageIndex,
}

/// Passes in one flight: the rest of one and each kind once more, so that a flight that finds nothing has looked at everything.
const PASSES: usize = 3;
/// The share of what is stored that one pass by age takes.
const PASS_SHARE: u64 = 8;

impl Plan {
    pub fn new() -> Plan {
        Plan { taken: Taken::Raw, pool: 0, next: PageIndex(0) }
    }

    /// Goes on with the pass. `true`: the segment is full.
    fn go_on(
        &mut self,
        store: &Store,
        registry: &Registry,
        leaf: &mut LeafCache,
        flight: &mut Flight,
        wants: &dyn Fn(&PoolCore) -> bool,
    ) -> bool {
        while let Some(pool) = registry.pools().get(self.pool) {
            let has_some = match self.taken {
                Taken::Raw => pool.counters.raw_pages() > 0,
                Taken::Aged { .. } => true,
            };
            if wants(pool) && has_some && self.go_on_in(store, pool, leaf, flight) {
                return true;
            }
            (self.pool, self.next) = (self.pool + 1, PageIndex(0));
        }
        false
    }

    fn go_on_in(&mut self, store: &Store, pool: &PoolCore, leaf: &mut LeafCache, flight: &mut Flight) -> bool {
        let (taken, now) = (self.taken, store.age());
        while let Some(first) = pool.tree.next_leaf(&store.tables, self.next, PageIndex(PageIndex::LIMIT)) {
            let end = first.plus(FANOUT as u64);
            let from = first.max(self.next);
            if let Some(slots) = pool.tree.leaf(&store.tables, first) {
                for index in from.0..end.0 {
                    let meta = slots.meta[(index - first.0) as usize].load(Relaxed);
                    if taken.takes(meta, now) && !copy(store, pool, PageIndex(index), leaf, flight) {
                        self.next = PageIndex(index);
                        return true;
                    }
                }
            }
            self.next = end;
        }
        false
    }
}

/// Copies the object of a page, if it has one, and one that is sound. `false`: it does not fit.
fn copy(store: &Store, pool: &PoolCore, index: PageIndex, leaf: &mut LeafCache, flight: &mut Flight) -> bool {
    let Some(guard) = pool.tree.lock(&store.tables, index, leaf) else { return true };
    let Slot::Stored(object) = guard.get() else { return true };
    if !flight.fits(object.length) {
        return false;
    }
    let Some(bytes) = guard.bytes(&object, &store.arena) else { return true };
    // One that is damaged stays, and is told to whoever reads it.
    if checksum::of(bytes, object.codec) == object.checksum {
        let pool = pool.serial();
        let head = Head { pool, index, from: From::Memory, length: object.length, codec: object.codec };
        flight.add(head, |copy, _| {
            copy.copy_from_slice(bytes);
            true
        });
    }
    true
}

impl Taken {
    fn takes(self, meta: u32, now: u8) -> bool {
        match self {
            Taken::Raw => slot::is_raw(meta),
            Taken::Aged { least } => {
                slot::is_stored(meta) && !slot::is_raw(meta) && now.wrapping_sub(slot::age(meta)) >= least
            }
        }
    }
}

impl Backing {
    /// Fills the flight with copies of what should leave, as far as there is anything.
    pub(super) fn gather(
        &self,
        store: &Store,
        leaf: &mut LeafCache,
        flight: &mut Flight,
        wants: &dyn Fn(&PoolCore) -> bool,
    ) {
        let wants = |pool: &PoolCore| pool.is_on(self) && wants(pool);
        let mut plan = self.plan.lock();
        let registry = store.registry.lock();
        for _ in 0..PASSES {
            if plan.go_on(store, &registry, leaf, flight, &wants) {
                return;
            }
            let taken = match plan.taken {
                Taken::Raw => Taken::Aged { least: self.least_age(store, &registry, &wants) },
                Taken::Aged { .. } => Taken::Raw,
            };
            *plan = Plan { taken, ..Plan::new() };
        }
    }

    /// How old the pages are that the next pass by age takes.
    fn least_age(&self, store: &Store, registry: &Registry, wants: &dyn Fn(&PoolCore) -> bool) -> u8 {
        let (mut bytes, now) = ([0u64; 256], store.age());
        for pool in registry.pools().iter().filter(|pool| wants(pool)) {
            let mut next = PageIndex(0);
            while let Some(first) = pool.tree.next_leaf(&store.tables, next, PageIndex(PageIndex::LIMIT)) {
                next = first.plus(FANOUT as u64);
                let Some(slots) = pool.tree.leaf(&store.tables, first) else { continue };
                for meta in slots.meta.iter().map(|meta| meta.load(Relaxed)).filter(|meta| slot::is_stored(*meta)) {
                    bytes[usize::from(now.wrapping_sub(slot::age(meta)))] += u64::from(slot::length(meta));
                }
            }
        }
        let wanted = (bytes.iter().sum::<u64>() / PASS_SHARE).max(2 * self.segment_bytes as u64);
        let mut older = 0;
        let least = (0..256).rev().find(|age| {
            older += bytes[*age];
            older >= wanted
        });
        least.unwrap_or(0) as u8
    }
}
