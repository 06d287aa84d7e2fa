//! Which pages leave memory: those that do not compress, then the oldest.
//!
//! A raw page takes three times the memory of another and gains nothing by being here, so raw ones go first, whatever their
//! age. After them go pages by the age in their slots: the distances from now are counted into a histogram, and the oldest
//! that make up an eighth of what is stored (two segments at least) go in the next pass. Where it is the store that is to be relieved, all its
//! pools that have a backing are counted: the coldest pages go first, whichever pool they are in, and a backing whose pools are all warm waits. So a pass costs two looks at four bytes a
//! page for an eighth of the memory: at a million pages, 2 ms beside some 130 flights.
//!
//! Pages in groups ([`crate::groups`]) are among those, and are what is old. They leave one by one; a group's memory is free when the
//! last of its pages has left, which is soon, since they are neighbours.
//!
//! Where a pass has come to is kept from flight to flight, for all of them: two that gather at the same time would take the same pages. Pools that have no need, or another backing, are passed over.
//!
//! # Source
//! That what does not compress goes straight to the backing is ramzswap's rule.

use super::Backing;
use super::flight::{Flight, From, Head};
use crate::checksum;
use crate::codec::Codec;
use crate::compact::Registry;
use crate::page::PageIndex;
use crate::pool::{PoolCore, form};
use crate::reclaim::Leaving;
use crate::slot::{self, Member, Slot};
use crate::store::Store;
use crate::table::FANOUT;
use crate::worker::Worker;
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

/// What a flight is to take: of which pools, and what.
pub(crate) struct Wanted<'w> {
    pub wants: &'w dyn Fn(&PoolCore) -> bool,
    pub leaving: Leaving,
    /// What fills less than half of a segment stays in memory: nobody is refused for it, and more will come.
    pub at_leisure: bool,
    /// What is old is told by all pools of the store that have somewhere to go, and not by those alone that go here.
    pub oldest_of_all: bool,
}

/// A pass over the pools, and how far it has come.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    taken: Taken,
    pool: usize,
    next: PageIndex,
}

/// What all passes of one flight have in common.
struct Round<'r> {
    wants: &'r dyn Fn(&PoolCore) -> bool,
    /// The age of the store.
    now: u8,
    /// Where the first pass began, for the last: what that took is in the flight, though its slot does not say so yet.
    before: Option<Plan>,
}

/// Passes in one flight: the rest of one and each kind once more, so that a flight that finds nothing has looked at everything; of the
/// last only what the first has not taken.
const PASSES: usize = 3;
/// A page in a group leaves alone, and nearly as short as it was.
const GROUPED_CODEC: Codec = Codec::Zstd { level: 1 };
/// What one takes in memory, about: its slot does not say.
const GROUPED_BYTES: u64 = 640;
/// The share of what is stored that one pass by age takes.
const PASS_SHARE: u64 = 8;

impl Plan {
    pub fn new() -> Plan {
        Plan { taken: Taken::Raw, pool: 0, next: PageIndex(0) }
    }

    /// Whether a pass that begins here takes this page, which lies in the pool `nth`.
    fn takes(&self, nth: usize, index: PageIndex, meta: u32, now: u8) -> bool {
        (nth, index) >= (self.pool, self.next) && self.taken.takes(meta, now)
    }

    /// Goes on with the pass, past what the flight has from the pass that `before` began. `true`: the segment is full.
    fn go_on(
        &mut self,
        store: &Store,
        registry: &Registry,
        worker: &mut Worker,
        flight: &mut Flight,
        round: &Round<'_>,
    ) -> bool {
        while let Some(pool) = registry.pools().get(self.pool) {
            let has_some = match self.taken {
                Taken::Raw => pool.counters.raw_pages() > 0,
                Taken::Aged { .. } => true,
            };
            if (round.wants)(pool) && has_some && self.go_on_in(store, pool, worker, flight, round) {
                return true;
            }
            (self.pool, self.next) = (self.pool + 1, PageIndex(0));
        }
        false
    }

    fn go_on_in(
        &mut self,
        store: &Store,
        pool: &PoolCore,
        worker: &mut Worker,
        flight: &mut Flight,
        round: &Round<'_>,
    ) -> bool {
        let (taken, now) = (self.taken, round.now);
        while let Some(first) = pool.tree.next_leaf(&store.tables, self.next, PageIndex(PageIndex::LIMIT)) {
            let end = first.plus(FANOUT as u64);
            let from = first.max(self.next);
            if let Some(slots) = pool.tree.leaf(&store.tables, first) {
                for index in from.0..end.0 {
                    let (meta, index) = (slots.meta[(index - first.0) as usize].load(Relaxed), PageIndex(index));
                    let has_it = || round.before.is_some_and(|before| before.takes(self.pool, index, meta, now));
                    if taken.takes(meta, now) && !has_it() && !copy(store, pool, index, worker, flight) {
                        self.next = index;
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
fn copy(store: &Store, pool: &PoolCore, index: PageIndex, worker: &mut Worker, flight: &mut Flight) -> bool {
    let Some(guard) = pool.tree.lock(&store.tables, index, &mut worker.leaf) else { return true };
    let object = match guard.get() {
        Slot::Stored(object) => object,
        Slot::Grouped(member) => return copy_from_group(store, pool, index, &member, worker, flight),
        _ => return true,
    };
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

/// As [`copy`], for a page in a group, whose slot is locked: it gets an object of its own, which nobody but the flight ever sees.
fn copy_from_group(
    store: &Store,
    pool: &PoolCore,
    index: PageIndex,
    member: &Member,
    worker: &mut Worker,
    flight: &mut Flight,
) -> bool {
    let Worker { opened, codecs, .. } = worker;
    let Some(page) = opened.page(store, codecs, member) else { return true };
    let Ok((id, compressed)) = codecs.compress(GROUPED_CODEC, page, &store.dictionaries) else { return true };
    let (codec, bytes, _) = form(id, compressed, page);
    let head = Head { pool: pool.serial(), index, from: From::Memory, length: bytes.len() as u16, codec };
    let fits = flight.fits(head.length);
    if fits {
        flight.add(head, |copy, _| {
            copy.copy_from_slice(bytes);
            true
        });
    }
    fits
}

impl Taken {
    fn takes(self, meta: u32, now: u8) -> bool {
        match self {
            Taken::Raw => slot::is_raw(meta),
            Taken::Aged { least } => {
                let may = (slot::is_stored(meta) && !slot::is_raw(meta)) || slot::is_grouped(meta);
                may && ago(now, meta) >= least
            }
        }
    }
}

/// How many ages ago a page was used. `now` was looked at before it: one that was used in an age that has begun since is not the oldest.
fn ago(now: u8, meta: u32) -> u8 {
    match now.wrapping_sub(slot::age(meta)) {
        u8::MAX => 0,
        ago => ago,
    }
}

impl Backing {
    /// Fills the flight with copies of what should leave, as far as there is anything. Whether there is more, which does not fit.
    pub(super) fn gather(&self, store: &Store, worker: &mut Worker, flight: &mut Flight, wanted: &Wanted<'_>) -> bool {
        let wants = |pool: &PoolCore| pool.is_on(self) && (wanted.wants)(pool);
        // Those that go here count whatever the health is: what is taken now leaves if this flight arrives.
        let now_ns = worker.now_ns();
        let counts = |pool: &PoolCore| match wanted.oldest_of_all {
            true => pool.is_on(self) || pool.can_leave() && !pool.is_held_up(now_ns),
            false => wants(pool),
        };
        let mut plan = self.plan.lock();
        let registry = store.registry.lock();
        let mut round = Round { wants: &wants, now: store.age(), before: None };
        if wanted.leaving == Leaving::Incompressible {
            if plan.taken != Taken::Raw {
                *plan = Plan::new();
            }
            // The rest of a pass over those, and what is before it, so that it has looked at everything.
            for before in [None, Some(*plan)] {
                round.before = before;
                if plan.go_on(store, &registry, worker, flight, &round) {
                    return true;
                }
                *plan = Plan::new();
            }
            return false;
        }
        let first = *plan;
        for pass in 1..=PASSES {
            round.before = (pass == PASSES).then_some(first);
            if plan.go_on(store, &registry, worker, flight, &round) {
                return true;
            }
            let taken = match plan.taken {
                Taken::Raw => Taken::Aged { least: self.least_age(store, &registry, &counts) },
                Taken::Aged { .. } => Taken::Raw,
            };
            *plan = Plan { taken, ..Plan::new() };
        }
        false
    }

    /// What was gathered was not written and stays where it was: the next flight begins a new pass, with what is to leave first.
    pub(super) fn gather_anew(&self) {
        *self.plan.lock() = Plan::new();
    }

    /// How old the pages are that the next pass by age takes, of the pools that count.
    fn least_age(&self, store: &Store, registry: &Registry, counts: &dyn Fn(&PoolCore) -> bool) -> u8 {
        let (mut bytes, now) = ([0u64; 256], store.age());
        for pool in registry.pools().iter().filter(|pool| counts(pool)) {
            let mut next = PageIndex(0);
            while let Some(first) = pool.tree.next_leaf(&store.tables, next, PageIndex(PageIndex::LIMIT)) {
                next = first.plus(FANOUT as u64);
                let Some(slots) = pool.tree.leaf(&store.tables, first) else { continue };
                for meta in slots.meta.iter().map(|meta| meta.load(Relaxed)) {
                    let length = if slot::is_grouped(meta) { GROUPED_BYTES } else { u64::from(slot::length(meta)) };
                    if slot::is_stored(meta) || slot::is_grouped(meta) {
                        bytes[usize::from(ago(now, meta))] += length;
                    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::tests::place;
    use crate::page::Page;

    const RAW: u64 = 20;
    const ALL: u64 = 60;

    /// Does not compress, or to a fifth.
    fn page(index: u64) -> Page {
        let mut random = fastrand::Rng::with_seed(index + 1);
        let mut page = [0; 4096];
        let noise = if index.is_multiple_of(3) { 4096 } else { 700 };
        random.fill(&mut page[..noise]);
        page
    }

    #[test]
    fn a_flight_takes_each_page_once_wherever_the_pass_begins() {
        let (store, backing, pool, mut worker) = place(1 << 20);
        (0..ALL).for_each(|index| _ = pool.write(&mut worker, PageIndex(index), &page(index)).unwrap());
        for (leaving, count) in [(Leaving::Oldest, ALL), (Leaving::Incompressible, RAW)] {
            let wanted = Wanted { wants: &|_| true, leaving, at_leisure: false, oldest_of_all: false };
            // None of these is written, so that all are there still; and the small one leaves the pass in its middle.
            for segment_bytes in [1 << 20, 32 << 10, 1 << 20, 64 << 10, 8 << 10, 1 << 20] {
                let mut flight = Flight::new(0, segment_bytes).unwrap();
                backing.gather(&store, &mut worker, &mut flight, &wanted);
                let is_whole = segment_bytes == 1 << 20;
                assert!(!is_whole || flight.records() as u64 == count, "{leaving:?}: {} of {count}", flight.records());
                assert!(is_whole || (flight.records() as u64) < count, "it is to be full");
            }
        }
    }
}
