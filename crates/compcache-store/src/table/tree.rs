//! The tree of one pool: from a page index to its slot, and over ranges of them.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::guard::SlotGuard;
use super::{Charge, FANOUT, Leaf, NO_KEY, NONE, Tables};
use crate::arena::Location;
use crate::budget::Budget;
use crate::error::StoreError;
use crate::page::{PAGE_SIZE, PageIndex};
use crate::slot::{self, word};

const FANOUT_BITS: u32 = FANOUT.trailing_zeros();
const FANOUT_MASK: u64 = FANOUT as u64 - 1;
const ROOTS: usize = 64;
const LEAF_NUMBER_BITS: u32 = 26;

const _: () = assert!(PageIndex::LIMIT == (ROOTS as u64) << (3 * FANOUT_BITS));
const _: () = assert!(1 << LEAF_NUMBER_BITS == PageIndex::LIMIT / FANOUT as u64);

/// The root of a pool's slots.
pub(crate) struct Tree {
    /// Never given to two trees of a store, so that a leaf's key means one place for ever.
    serial: u64,
    root: [AtomicU32; ROOTS],
    /// Leaves and nodes held, in bytes.
    bytes: AtomicU64,
    /// Leaves before this one stay when they are empty.
    kept_leaves: AtomicU64,
}

/// The leaf used last: most pages follow their neighbours. Safe to be stale, since the key is checked.
#[derive(Clone, Copy, Default)]
pub(crate) struct LeafCache {
    key: u64,
    leaf: u32,
}

fn leaf_of(index: PageIndex) -> u64 {
    index.0 >> FANOUT_BITS
}

fn place_in_leaf(index: PageIndex) -> usize {
    (index.0 & FANOUT_MASK) as usize
}

impl Tree {
    pub fn new(serial: u64) -> Tree {
        Tree {
            serial,
            root: [const { AtomicU32::new(NONE) }; ROOTS],
            bytes: AtomicU64::new(0),
            kept_leaves: AtomicU64::new(0),
        }
    }

    /// The number that no other tree of the store has, or will have.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// Bytes of the leaves and nodes of this tree.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn key(&self, leaf: u64) -> u64 {
        (self.serial << LEAF_NUMBER_BITS | leaf) + 1
    }

    /// The slot of `index`, locked; `None` if its leaf does not exist, so that the page is absent.
    pub fn lock<'t>(&self, tables: &'t Tables, index: PageIndex, cache: &mut LeafCache) -> Option<SlotGuard<'t>> {
        let key = self.key(leaf_of(index));
        loop {
            let number = if cache.key == key { cache.leaf } else { self.find(tables, leaf_of(index))? };
            let leaf = tables.leaf(number);
            let place = place_in_leaf(index);
            let meta = word::lock(&leaf.meta[place]);
            if tables.header(number).key.load(Ordering::Relaxed) == key {
                *cache = LeafCache { key, leaf: number };
                return Some(SlotGuard::new(&leaf.meta[place], &leaf.payload[place], meta));
            }
            word::unlock(&leaf.meta[place], meta);
            *cache = LeafCache::default();
        }
    }

    /// As [`Tree::lock`], making the leaf if there is none.
    pub fn lock_or_make<'t>(
        &self,
        tables: &'t Tables,
        index: PageIndex,
        cache: &mut LeafCache,
        budget: &Budget,
        charge: Charge,
    ) -> Result<SlotGuard<'t>, StoreError> {
        loop {
            if let Some(guard) = self.lock(tables, index, cache) {
                return Ok(guard);
            }
            self.make(tables, leaf_of(index), budget, charge)?;
        }
    }

    /// The meta word of `index` without locking; zero, absent, if it has no leaf.
    pub fn peek(&self, tables: &Tables, index: PageIndex) -> u32 {
        let key = self.key(leaf_of(index));
        loop {
            let Some(number) = self.find(tables, leaf_of(index)) else { return 0 };
            let meta = tables.leaf(number).meta[place_in_leaf(index)].load(Ordering::Acquire);
            if tables.header(number).key.load(Ordering::Relaxed) == key {
                return meta;
            }
        }
    }

    /// Where the object of the page after `index` probably is: looked up without lock or check, in the leaf used last, for
    /// prefetching alone.
    #[inline]
    pub fn guess_next(&self, tables: &Tables, index: PageIndex, cache: &LeafCache) -> Option<Location> {
        let place = place_in_leaf(index) + 1;
        if place == FANOUT || cache.key != self.key(leaf_of(index)) {
            return None;
        }
        let leaf = tables.leaf(cache.leaf);
        let stored = slot::is_stored(leaf.meta[place].load(Ordering::Relaxed));
        stored.then(|| slot::location(leaf.payload[place].load(Ordering::Relaxed)))
    }

    /// Number and first index of the first leaf that exists at or after the one of `from` and begins before `end`.
    pub fn next_leaf(&self, tables: &Tables, from: PageIndex, end: PageIndex) -> Option<PageIndex> {
        let mut leaf = leaf_of(from);
        let leaves_end = end.0.min(PageIndex::LIMIT).div_ceil(FANOUT as u64);
        while leaf < leaves_end {
            // How far an absent entry lets us skip: a whole root entry, a whole node, or one leaf.
            let (root, upper, lower) = split(leaf);
            let node = self.root[root].load(Ordering::Acquire);
            if node == NONE {
                leaf = ((root as u64) + 1) << (2 * FANOUT_BITS);
                continue;
            }
            let node = tables.node(node).0[upper].load(Ordering::Acquire);
            if node == NONE {
                leaf = ((leaf >> FANOUT_BITS) + 1) << FANOUT_BITS;
                continue;
            }
            let entries = &tables.node(node).0[lower..];
            match entries.iter().position(|entry| entry.load(Ordering::Acquire) != NONE) {
                Some(skip) => {
                    leaf += skip as u64;
                    return (leaf < leaves_end).then_some(PageIndex(leaf << FANOUT_BITS));
                }
                None => leaf = ((leaf >> FANOUT_BITS) + 1) << FANOUT_BITS,
            }
        }
        None
    }

    /// The leaf that `first` (as given by [`Tree::next_leaf`]) begins, for reading metas without locking. The leaf may
    /// be freed meanwhile; then its metas are all absent, or another tree's: lock before believing.
    pub fn leaf<'t>(&self, tables: &'t Tables, first: PageIndex) -> Option<&'t Leaf> {
        self.find(tables, leaf_of(first)).map(|number| tables.leaf(number))
    }

    /// The meta word of `index`, if its leaf exists.
    pub fn meta<'t>(&self, tables: &'t Tables, index: PageIndex) -> Option<&'t AtomicU32> {
        self.find(tables, leaf_of(index)).map(|number| &tables.leaf(number).meta[place_in_leaf(index)])
    }

    fn find(&self, tables: &Tables, leaf: u64) -> Option<u32> {
        let (root, upper, lower) = split(leaf);
        let step = |entry: &AtomicU32| Some(entry.load(Ordering::Acquire)).filter(|number| *number != NONE);
        let node = step(&self.root[root])?;
        let node = step(&tables.node(node).0[upper])?;
        step(&tables.node(node).0[lower])
    }

    /// What making the leaf of `index` would add to [`Tree::bytes`]; nothing if it is there.
    pub fn missing_bytes(&self, tables: &Tables, index: PageIndex) -> u64 {
        let (root, upper, lower) = split(leaf_of(index));
        let mut entry = &self.root[root];
        for (at, nodes) in [(upper, 2), (lower, 1)] {
            match entry.load(Ordering::Acquire) {
                NONE => return (nodes * size_of::<super::Node>() + size_of::<Leaf>()) as u64,
                node => entry = &tables.node(node).0[at],
            }
        }
        if entry.load(Ordering::Acquire) == NONE { size_of::<Leaf>() as u64 } else { 0 }
    }

    #[cold]
    fn make(&self, tables: &Tables, leaf: u64, budget: &Budget, charge: Charge) -> Result<(), StoreError> {
        let mut growth = tables.grow.lock();
        let (root, upper, lower) = split(leaf);
        let mut entry = &self.root[root];
        for at in [upper, lower] {
            if entry.load(Ordering::Relaxed) == NONE {
                let node = tables.new_node(&mut growth, budget, charge)?;
                self.bytes.fetch_add(size_of::<super::Node>() as u64, Ordering::Relaxed);
                entry.store(node, Ordering::Release);
            }
            entry = &tables.node(entry.load(Ordering::Relaxed)).0[at];
        }
        if entry.load(Ordering::Relaxed) == NONE {
            let (number, bytes) = tables.new_leaf(&mut growth, self.key(leaf), budget, charge)?;
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
            entry.store(number, Ordering::Release);
        }
        Ok(())
    }

    /// Makes the leaves of the pages before `end` and has the system give their memory now. They stay, empty or not, until
    /// [`Tree::let_go`]. Where they cannot fit, none is made: a freed leaf keeps a page. Who fails on the way keeps no more than before.
    pub fn prepare(&self, tables: &Tables, end: PageIndex, budget: &Budget) -> Result<(), StoreError> {
        let leaves = end.0.min(PageIndex::LIMIT).div_ceil(FANOUT as u64);
        let missing = (0..leaves).filter(|leaf| self.find(tables, *leaf).is_none()).count();
        tables.must_have_room(missing, budget)?;
        // First, so that compaction does not free what is made here.
        let kept_before = self.kept_leaves.fetch_max(leaves, Ordering::Relaxed);
        for leaf in 0..leaves {
            let made = self.make(tables, leaf, budget, Charge::Limited);
            made.inspect_err(|_| self.kept_leaves.store(kept_before, Ordering::Relaxed))?;
            if let Some(number) = self.find(tables, leaf) {
                let leaf = tables.leaf(number);
                // Changes nothing, and is a write to each page; adding nothing would be made a read.
                let _ = leaf.meta[0].compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
                for word in leaf.payload.iter().step_by(PAGE_SIZE / size_of::<AtomicU64>()) {
                    let _ = word.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    /// Empty leaves may be freed again.
    pub fn let_go(&self) {
        self.kept_leaves.store(0, Ordering::Relaxed);
    }

    /// Whether the leaf that begins at `first` stays when it is empty.
    pub fn is_kept(&self, first: PageIndex) -> bool {
        leaf_of(first) < self.kept_leaves.load(Ordering::Relaxed)
    }

    /// Frees the leaf that begins at `first` if every page of it is absent and nobody is using it just now. Returns the
    /// bytes given back.
    pub fn free_leaf_if_empty(&self, tables: &Tables, first: PageIndex, budget: &Budget) -> u64 {
        // A pool that serves swap has nothing to do with the growth of tables, which may wait for memory.
        if self.is_kept(first) {
            return 0;
        }
        let mut growth = tables.grow.lock();
        // Again: who makes those that stay may have held the lock.
        if self.is_kept(first) {
            return 0;
        }
        let Some(number) = self.find(tables, leaf_of(first)) else { return 0 };
        let leaf = tables.leaf(number);
        // `grow` is held while slots are locked, against the lock order: safe because these locks never wait.
        let locked = leaf.meta.iter().take_while(|meta| word::try_lock_if(meta, 0)).count();
        let empty = locked == FANOUT;
        if empty {
            let (root, upper, lower) = split(leaf_of(first));
            let node = tables.node(self.root[root].load(Ordering::Relaxed)).0[upper].load(Ordering::Relaxed);
            tables.node(node).0[lower].store(NONE, Ordering::Release);
            tables.header(number).key.store(NO_KEY, Ordering::Relaxed);
        }
        // Releasing a slot publishes the lost key to whoever locks it next.
        leaf.meta[..locked].iter().for_each(|meta| word::unlock(meta, 0));
        if !empty {
            return 0;
        }
        self.bytes.fetch_sub(size_of::<Leaf>() as u64, Ordering::Relaxed);
        tables.recycle_leaf(&mut growth, number, budget);
        super::PAYLOAD_BYTES as u64
    }

    /// Gives the nodes back. Only for a tree that nobody uses any more and whose leaves are freed.
    pub fn dismantle(&self, tables: &Tables) {
        let mut growth = tables.grow.lock();
        for root in &self.root {
            let upper = root.swap(NONE, Ordering::Relaxed);
            if upper == NONE {
                continue;
            }
            for at in 0..FANOUT {
                let lower = tables.node(upper).0[at].load(Ordering::Relaxed);
                if lower != NONE {
                    tables.recycle_node(&mut growth, lower);
                }
            }
            tables.recycle_node(&mut growth, upper);
        }
    }
}

/// Positions in the root, the upper node and the lower node.
fn split(leaf: u64) -> (usize, usize, usize) {
    let upper = (leaf >> FANOUT_BITS & FANOUT_MASK) as usize;
    ((leaf >> (2 * FANOUT_BITS)) as usize, upper, (leaf & FANOUT_MASK) as usize)
}
