//! The slot tables: a radix tree of leaves per pool, all carved from one region per store.
//!
//! | bits of a page index | level                                            | size                      |
//! |----------------------|--------------------------------------------------|---------------------------|
//! | 30..36               | root, in the pool                                | 64 entries of 4 bytes     |
//! | 20..30, 10..20       | nodes                                            | 1024 entries, one page    |
//! | 0..10                | leaf: 1024 metas of 4 bytes, 1024 payloads of 8  | three pages exactly       |
//!
//! So a dense gigabyte costs 256 leaves, 3 MiB; a single page far from all others costs a leaf and up to two nodes,
//! 20 KiB. Entries are numbers, not pointers, and zero is none, so fresh memory is an empty node.
//!
//! **Leaves are given back while others read.** A reader finds a leaf without a lock, so the leaf may be freed, and even
//! given to another pool, before it locks a slot in it. Every leaf therefore has a key outside itself (which pool, which
//! part of it), checked after a slot is locked; a leaf is freed only with all its slots locked and absent. The page of
//! metas of a freed leaf is kept (a late reader may still lock and unlock there), its payload pages go back to the system.
//!
//! Lock order: slots, then `grow` here, then a region's growth. Creating and freeing leaves takes `grow`; looking up
//! takes nothing.

#![allow(unsafe_code)]

mod guard;
mod tree;

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(crate) use guard::SlotGuard;
pub(crate) use tree::{LeafCache, Tree};

use crate::budget::Budget;
use crate::error::StoreError;
use crate::lock::Mutex;
use crate::page::PAGE_SIZE;
use crate::region::Region;

/// Slots in a leaf, entries in a node.
pub(crate) const FANOUT: usize = 1024;
const LEAF_BYTES: usize = FANOUT * 12;
const PAYLOAD_BYTES: usize = FANOUT * 8;
const META_BYTES: usize = FANOUT * 4;
const NO_KEY: u64 = 0;
const NONE: u32 = 0;

const _: () = assert!(LEAF_BYTES == 3 * PAGE_SIZE && META_BYTES == PAGE_SIZE);
const _: () = assert!(size_of::<Leaf>() == LEAF_BYTES && size_of::<Node>() == PAGE_SIZE);

/// The slots of 1024 pages, the two words of each apart.
#[repr(C, align(4096))]
pub(crate) struct Leaf {
    pub meta: [AtomicU32; FANOUT],
    pub payload: [AtomicU64; FANOUT],
}

#[repr(C, align(4096))]
struct Node([AtomicU32; FANOUT]);

/// What is known about a leaf outside it.
#[repr(C)]
struct LeafHeader {
    key: AtomicU64,
    next_free: AtomicU32,
    _spare: u32,
}

/// Where leaves and nodes come from. Numbers count from one.
struct Growth {
    leaves: u32,
    free_leaf: u32,
    nodes: u32,
    free_node: u32,
    header_pages: usize,
}

/// How table pages are paid for.
#[derive(Clone, Copy)]
pub(crate) enum Charge {
    /// Refused at the limit.
    Limited,
    /// Refused where it would pass the limit, and nobody else for it: same-filled pages are stored while others are refused.
    IfItFits,
    /// Charged past the limit if it must be: moves do not fail for want of a table page.
    Always,
}

/// The table pages of a store.
pub(crate) struct Tables {
    leaves: Region,
    headers: Region,
    nodes: Region,
    grow: Mutex<Growth>,
}

impl Tables {
    /// Reserves addresses for `bytes` of leaves.
    pub fn reserve(bytes: usize, lock_in_ram: bool) -> Result<Tables, StoreError> {
        let leaves_max = bytes / LEAF_BYTES;
        let growth = Growth { leaves: 0, free_leaf: NONE, nodes: 0, free_node: NONE, header_pages: 0 };
        Ok(Tables {
            leaves: Region::reserve(leaves_max * LEAF_BYTES, 768 << 10, lock_in_ram)?,
            headers: Region::reserve((leaves_max + 1) * size_of::<LeafHeader>(), 64 << 10, lock_in_ram)?,
            // A node for every leaf would be the sparsest tree possible, but for the nodes above it.
            nodes: Region::reserve((leaves_max * 2 + 2) * PAGE_SIZE, 256 << 10, lock_in_ram)?,
            grow: Mutex::new(growth),
        })
    }

    /// The address ranges of leaves, headers and nodes.
    pub fn ranges(&self) -> [(usize, usize); 3] {
        [self.leaves.range(), self.headers.range(), self.nodes.range()]
    }

    fn leaf(&self, number: u32) -> &Leaf {
        let at = (number - 1) as usize;
        assert!((at + 1) * LEAF_BYTES <= self.leaves.open_bytes());
        // SAFETY: inside the open part, zeroed from the start, aligned since the region is and the size is whole pages;
        // all fields are atomics.
        unsafe { &*self.leaves.base().as_ptr().cast::<Leaf>().add(at) }
    }

    fn header(&self, number: u32) -> &LeafHeader {
        let at = (number - 1) as usize;
        assert!((at + 1) * size_of::<LeafHeader>() <= self.headers.open_bytes());
        // SAFETY: as for leaves.
        unsafe { &*self.headers.base().as_ptr().cast::<LeafHeader>().add(at) }
    }

    fn node(&self, number: u32) -> &Node {
        let at = (number - 1) as usize;
        assert!((at + 1) * PAGE_SIZE <= self.nodes.open_bytes());
        // SAFETY: as for leaves.
        unsafe { &*self.nodes.base().as_ptr().cast::<Node>().add(at) }
    }

    /// Says why `missing` more leaves could never be made, if that is so now.
    fn must_have_room(&self, missing: usize, budget: &Budget) -> Result<(), StoreError> {
        let bytes = missing.saturating_mul(LEAF_BYTES);
        if bytes > self.leaves.range().1 {
            return Err(StoreError::MemoryRefused { bytes: bytes as u64 });
        }
        // What leads to them, and what says whose they are, is more by a little.
        let others = missing.div_ceil(FANOUT) + (missing * size_of::<LeafHeader>()).div_ceil(PAGE_SIZE);
        budget.must_fit((bytes + others * PAGE_SIZE) as u64)
    }

    /// A leaf for `key`, all absent, or why there is none. Returns its number and the bytes charged for it.
    fn new_leaf(
        &self,
        growth: &mut Growth,
        key: u64,
        budget: &Budget,
        charge: Charge,
    ) -> Result<(u32, u64), StoreError> {
        if growth.free_leaf != NONE {
            // Its metas are still there, all absent; the payload pages come back when touched.
            charge.take(budget, PAYLOAD_BYTES)?;
            let number = growth.free_leaf;
            growth.free_leaf = self.header(number).next_free.load(Ordering::Relaxed);
            self.header(number).key.store(key, Ordering::Relaxed);
            return Ok((number, LEAF_BYTES as u64));
        }
        let number = growth.leaves + 1;
        self.leaves.ensure(number as usize * LEAF_BYTES)?;
        let headers_end = number as usize * size_of::<LeafHeader>();
        self.headers.ensure(headers_end)?;
        let header_pages = headers_end.div_ceil(PAGE_SIZE);
        charge.take(budget, LEAF_BYTES + (header_pages - growth.header_pages) * PAGE_SIZE)?;
        growth.header_pages = header_pages;
        growth.leaves = number;
        self.header(number).key.store(key, Ordering::Relaxed);
        Ok((number, LEAF_BYTES as u64))
    }

    fn new_node(&self, growth: &mut Growth, budget: &Budget, charge: Charge) -> Result<u32, StoreError> {
        if growth.free_node != NONE {
            let number = growth.free_node;
            let node = self.node(number);
            growth.free_node = node.0[0].swap(NONE, Ordering::Relaxed);
            return Ok(number);
        }
        let number = growth.nodes + 1;
        self.nodes.ensure(number as usize * PAGE_SIZE)?;
        charge.take(budget, PAGE_SIZE)?;
        growth.nodes = number;
        Ok(number)
    }

    /// Keeps an empty node for later. Its memory stays charged to the store.
    fn recycle_node(&self, growth: &mut Growth, number: u32) {
        let node = self.node(number);
        for entry in &node.0 {
            entry.store(NONE, Ordering::Relaxed);
        }
        node.0[0].store(growth.free_node, Ordering::Relaxed);
        growth.free_node = number;
    }

    /// Gives the payload pages of a leaf back that no tree refers to and all of whose slots are absent.
    fn recycle_leaf(&self, growth: &mut Growth, number: u32, budget: &Budget) {
        // SAFETY: payloads are read and written only with the slot locked and the key checked; the key is gone, so
        // nobody gets past the check.
        unsafe { self.leaves.release((number - 1) as usize * LEAF_BYTES + META_BYTES, PAYLOAD_BYTES) };
        budget.released(PAYLOAD_BYTES as u64);
        self.header(number).next_free.store(growth.free_leaf, Ordering::Relaxed);
        growth.free_leaf = number;
    }
}

impl Charge {
    fn take(self, budget: &Budget, bytes: usize) -> Result<(), StoreError> {
        match self {
            Charge::Limited => budget.try_charge(bytes as u64)?,
            Charge::IfItFits => budget.charge_if_it_fits(bytes as u64)?,
            Charge::Always => budget.charge(bytes as u64),
        }
        budget.touched(bytes as u64);
        Ok(())
    }
}
