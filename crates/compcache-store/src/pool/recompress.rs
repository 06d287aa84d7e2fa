//! Recompression: cold pages become groups.
//!
//! | step     | what                                                                   | locks held          |
//! |----------|------------------------------------------------------------------------|---------------------|
//! | gather   | up to 16 cold pages, in the order of their indexes, are decoded        | the slot of each    |
//! | compress | all of them, as one frame; if that is too long, the first eight        | none                |
//! | decide   | a group that saves less than an eighth of what its pages take is none  | none                |
//! | add      | the frame goes to the arena, with memory that is set aside for it      | what is set aside   |
//! | settle   | each slot whose page is still the same says where it is now            | that slot           |
//!
//! So nobody waits for compression, and what was written, discarded or used meanwhile is not in the group; its bit is cleared.
//! Pages of groups of which less than half is alive are gathered again, whatever their age, and the old group goes with its
//! last page. A page that is read a second time leaves its group for an object of its own (`read.rs`).
//!
//! Raw pages are gathered if zstd makes three quarters of one alone.
//!
//! What was gathered in vain stays as it is. It is not tried again by who asks for pages that have *become* cold: the range
//! of ages that counts as cold has two ends.

use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::{Pool, PoolCore, write};
use crate::ages::Aged;
use crate::checksum;
use crate::codec::Codec;
use crate::error::StoreError;
use crate::groups::{Candidate, GroupId, GroupSize, MEMBERS_LEAST, MEMBERS_MAX, Recompressor};
use crate::page::{PAGE_SIZE, Page, PageIndex};
use crate::slot::{self, Member, Object, Slot};
use crate::stats::Footprint;
use crate::store::Store;
use crate::table::{FANOUT, SlotGuard};
use crate::worker::Worker;

/// A group must save at least such a part of what its pages took.
const SAVED_PART: usize = 8;
/// Zstd must make so much of a raw page.
const RAW_WORTH_BYTES: usize = PAGE_SIZE / 4 * 3;
const TRIED_LEVEL: Codec = Codec::Zstd { level: 1 };
/// A step ends when it has tried so many pages in vain, or has come over so many slots: about a millisecond. The next one goes on with what it
/// has found.
const VAIN_MOST: usize = 64;
const LOOKED_MOST: usize = 1 << 15;

/// What one step of recompression did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompressed {
    /// Pages that are in the group that was made; none if it did not pay.
    pub pages: usize,
    /// What they took before, and the group takes now, in bytes of slots in the arena.
    pub before_bytes: u64,
    /// See above.
    pub after_bytes: u64,
    /// Where to go on; `None`: this was the last of the pool.
    pub next: Option<PageIndex>,
}

impl Pool {
    /// Looks from page `from` on for pages that were last used in some ages, and makes one group of up to sixteen of them, if
    /// that pays. Goes on from [`Recompressed::next`] when called again. May run while any other operations do.
    ///
    /// Allocates nothing. Memory that becomes free goes back to the system when enough has, and at the end of the pool, unless the recompressor
    /// leaves that to others ([`Recompressor::without_compaction`]).
    ///
    /// # Errors
    /// [`StoreError::LimitReached`] when there is not even room for what is made before the old is freed; [`StoreError::MemoryRefused`].
    /// Nothing is lost, and `from` is where to go on later.
    pub fn recompress(
        &self,
        worker: &mut Worker,
        recompressor: &mut Recompressor,
        cold: &Aged,
        from: PageIndex,
    ) -> Result<Recompressed, StoreError> {
        worker.must_be_of(&self.store);
        assert!(core::ptr::eq(&*self.store, &**recompressor.store()), "a recompressor serves one store");
        // Taken while there is some, for when there is none.
        let _ = recompressor.set_aside();
        let mut done = Recompressed { next: self.gather(worker, recompressor, cold, from), ..Recompressed::default() };
        if recompressor.is_paused() {
            return Ok(done);
        }
        let count = recompressor.candidates().len();
        let frame = match self.worth_it(recompressor, count) {
            // What follows the first half may be better company for what comes behind it.
            None if count > MEMBERS_LEAST => {
                done.next = recompressor.candidates().nth(MEMBERS_LEAST).map(|(candidate, _)| candidate.index);
                self.worth_it(recompressor, MEMBERS_LEAST).map(|length| (MEMBERS_LEAST, length))
            }
            worth => worth.map(|length| (count, length)),
        };
        match frame {
            Some((count, length)) => {
                let made = self.make_room(worker, recompressor);
                made.and_then(|()| self.settle(worker, recompressor, count, length, &mut done))
                    .inspect_err(|_| recompressor.pause_before(self.core.serial(), from))?;
            }
            // Those behind the half are looked at again, with others.
            None => self.scatter(worker, recompressor, count.min(MEMBERS_LEAST)),
        }
        let freed_bytes = done.before_bytes.saturating_sub(done.after_bytes);
        if recompressor.compacts {
            self.store.compact_after(worker, freed_bytes, done.next.is_none());
        }
        Ok(done)
    }

    /// Decodes the next pages that are cold. Returns where to go on, or `None` at the end.
    fn gather(
        &self,
        worker: &mut Worker,
        recompressor: &mut Recompressor,
        cold: &Aged,
        from: PageIndex,
    ) -> Option<PageIndex> {
        let tables = &self.store.tables;
        let serial = self.core.serial();
        recompressor.begin(serial, from);
        let (mut next, mut looked, mut vain) = (from, 0, 0);
        while let Some(first) = self.core.tree.next_leaf(tables, next, PageIndex(PageIndex::LIMIT)) {
            let end = first.plus(FANOUT as u64);
            if looked >= LOOKED_MOST {
                recompressor.pause(serial, first.max(next));
                return Some(first.max(next));
            }
            looked += FANOUT;
            if let Some(leaf) = self.core.tree.leaf(tables, first) {
                for index in first.max(next).0..end.0 {
                    let meta = leaf.meta[(index - first.0) as usize].load(Acquire);
                    // Of the store after the page: used in an age that has just begun, it would be older than all others.
                    let is_cold = slot::is_stored(meta) && cold.has(slot::age(meta), self.store.age());
                    if !is_cold && !slot::is_grouped(meta) {
                        continue;
                    }
                    if recompressor.is_full() {
                        return Some(PageIndex(index));
                    }
                    if vain >= VAIN_MOST {
                        recompressor.pause(serial, PageIndex(index));
                        return Some(PageIndex(index));
                    }
                    let is_taken = self.gather_one(worker, recompressor, PageIndex(index)).is_some();
                    vain += usize::from(!is_taken && slot::is_raw(meta));
                }
            }
            next = end;
        }
        None
    }

    /// Decodes one page, if it is still there, and sound, and worth it.
    fn gather_one(&self, worker: &mut Worker, recompressor: &mut Recompressor, index: PageIndex) -> Option<()> {
        let guard = self.core.tree.lock(&self.store.tables, index, &mut worker.leaf)?;
        let slot = guard.get();
        let slot_bytes = match slot {
            Slot::Stored(object) => self.store.arena.class_of(object.location).slot_bytes(),
            Slot::Grouped(member) => self.share_if_sparse(&member)?,
            _ => return None,
        };
        let page = recompressor.next_page();
        self.decode(worker, &guard, page).then_some(())?;
        let age = guard.age();
        drop(guard);
        let is_raw = matches!(slot, Slot::Stored(Object { codec: None, .. }));
        if is_raw {
            let tried = worker.codecs.compress(TRIED_LEVEL, page, &self.store.dictionaries);
            tried.ok().filter(|(_, bytes)| bytes.len() <= RAW_WORTH_BYTES)?;
        }
        recompressor.push(Candidate { index, group: group_of(slot), age, slot_bytes });
        Some(())
    }

    /// What a page has its group take, if less than half of that is alive.
    fn share_if_sparse(&self, member: &Member) -> Option<usize> {
        let (groups, arena) = (&self.store.groups, &self.store.arena);
        let alive = groups.alive(member.group).count_ones() as usize;
        let is_sparse = alive < MEMBERS_LEAST;
        is_sparse.then(|| groups.size(member.group, arena).slot_bytes / alive.max(1))
    }

    /// Compresses the first `count` candidates and returns the length of the frame, if a group of them pays.
    fn worth_it(&self, recompressor: &mut Recompressor, count: usize) -> Option<usize> {
        if count < MEMBERS_LEAST {
            return None;
        }
        let before: usize = recompressor.candidates().take(count).map(|(candidate, _)| candidate.slot_bytes).sum();
        let length = recompressor.compress(count)?;
        let after = GroupSize::of(length).slot_bytes + GroupSize::ENTRY_BYTES;
        (after <= before - before / SAVED_PART).then_some(length)
    }

    /// Has credit for a group; where there is none, what has room, by the last ones or whoever else, is brought together first.
    fn make_room(&self, worker: &mut Worker, recompressor: &Recompressor) -> Result<(), StoreError> {
        recompressor.set_aside().or_else(|refused| {
            if !recompressor.compacts {
                return Err(refused);
            }
            // One byte, so that it is done in any case: others may have left room without saying so.
            self.store.compact_after(worker, 1, true);
            recompressor.set_aside()
        })
    }

    /// Makes the group, and has the slots say so whose pages are still the same.
    fn settle(
        &self,
        worker: &mut Worker,
        recompressor: &Recompressor,
        count: usize,
        length: usize,
        done: &mut Recompressed,
    ) -> Result<(), StoreError> {
        let store = &self.store;
        let (frame, all) = (recompressor.frame(length), u16::MAX >> (MEMBERS_MAX - count));
        let (group, size) = {
            let mut aside = store.aside.lock();
            let credit = aside.credit(&store.budget)?;
            store.groups.add(frame, all, &store.arena, &store.budget, credit)?
        };
        // The group is counted last, so that a pool at its own limit is not above it meanwhile. Until then as much of it is held as its pages
        // give up, so that writers do not fill that.
        let mut held = self.core.hold();
        for (place, (candidate, page)) in recompressor.candidates().take(count).enumerate() {
            let member = Member { group, place: place as u8, read_once: false, checksum: checksum::of(page, None) };
            match self.lock_if_same(worker, &candidate, page) {
                Some(guard) => {
                    held.grow((candidate.slot_bytes as u64).min(size.slot_bytes as u64 - held.bytes()));
                    self.core.replace_aged(store, guard, Slot::Grouped(member), worker.number, candidate.age);
                    done.pages += 1;
                    done.before_bytes += candidate.slot_bytes as u64;
                }
                None => self.core.free(store, Slot::Grouped(member)),
            }
        }
        let shard = self.core.counters.shard(worker.number);
        shard.recompressed.fetch_add(done.pages as u64, Relaxed);
        shard.change(Footprint::ABSENT, Footprint::group(size));
        done.after_bytes = size.slot_bytes as u64;
        Ok(())
    }

    /// The slot of a candidate, if its page was neither written nor used since.
    fn lock_if_same(&self, worker: &mut Worker, candidate: &Candidate, page: &Page) -> Option<SlotGuard<'_>> {
        let guard = self.core.tree.lock(&self.store.tables, candidate.index, &mut worker.leaf)?;
        // Compaction may have moved the object, and its place may be another's: what counts is what it holds.
        // But for who else recompresses: what it has put into a group is not put into another.
        let same = guard.age() == candidate.age
            && group_of(guard.get()) == candidate.group
            && self.core.holds(&self.store, worker, &guard, page);
        same.then_some(guard)
    }

    /// Gives those of the first `count` candidates objects of their own that were gathered from sparse groups and come into no other.
    fn scatter(&self, worker: &mut Worker, recompressor: &Recompressor, count: usize) {
        for (candidate, page) in recompressor.candidates().take(count) {
            if candidate.group.is_some()
                && let Some(guard) = self.lock_if_same(worker, &candidate, page)
            {
                // If there is no room, it stays in its group.
                let _ = self.leave_group_aside(worker, guard, page);
            }
        }
    }

    /// Gives a page of a group, which is `page`, an object of its own. It counts as used now.
    pub(super) fn leave_group(&self, worker: &mut Worker, guard: SlotGuard<'_>, page: &Page) -> Result<(), StoreError> {
        let store = &self.store;
        store.budget.admit(&mut worker.credit)?;
        let _reservation = self.core.reserve()?;
        let (id, compressed) = worker.codecs.compress(self.codec(), page, &store.dictionaries)?;
        let (codec, bytes, _) = write::form(id, compressed, page);
        self.place(guard, codec, bytes, &mut worker.credit, worker.number)
    }

    /// As [`Pool::leave_group`], with what is set aside for groups, so that nobody is refused for it.
    fn leave_group_aside(&self, worker: &mut Worker, guard: SlotGuard<'_>, page: &Page) -> Result<(), StoreError> {
        let store = &self.store;
        let (id, compressed) = worker.codecs.compress(self.codec(), page, &store.dictionaries)?;
        let (codec, bytes, _) = write::form(id, compressed, page);
        let mut aside = store.aside.lock();
        let credit = aside.credit(&store.budget)?;
        let _reservation = self.core.reserve_if_it_fits(PAGE_SIZE as u64)?;
        self.place(guard, codec, bytes, credit, worker.number)
    }
}

fn group_of(slot: Slot) -> Option<GroupId> {
    if let Slot::Grouped(member) = slot { Some(member.group) } else { None }
}

impl PoolCore {
    /// Whether what a slot leads to in the arena is this page.
    pub(crate) fn holds(&self, store: &Store, worker: &mut Worker, guard: &SlotGuard<'_>, page: &Page) -> bool {
        let Worker { opened, codecs, .. } = worker;
        match guard.get() {
            Slot::Stored(object) => {
                let bytes = guard.bytes(&object, &store.arena);
                bytes.is_some_and(|bytes| match object.codec {
                    Some(id) => codecs.is_page(id, bytes, page, &store.dictionaries),
                    None => bytes == page,
                })
            }
            Slot::Grouped(member) => opened.page(store, codecs, &member) == Some(page),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::sync::Arc;

    use super::*;
    use crate::config::{PoolConfig, StoreConfig};

    fn text(index: u64) -> Page {
        let words = (0..512u64).map(|word| if word % 4 == 0 { (index * 977 + word * word) % 10007 } else { 7 });
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        bytes.try_into().unwrap()
    }

    /// A pool with the pages `0..count`, and two who recompress.
    fn place(count: u64) -> (Arc<Pool>, Worker, [Recompressor; 2]) {
        let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
        let pool = store.create_pool(PoolConfig::default()).unwrap();
        let mut worker = Worker::new(&store, || 0).unwrap();
        for index in 0..count {
            pool.write(&mut worker, PageIndex(index), &text(index)).unwrap();
        }
        let recompressors = [(); 2].map(|()| Recompressor::new(&store, 3).unwrap());
        (pool, worker, recompressors)
    }

    fn settled(pool: &Pool, worker: &mut Worker, recompressor: &mut Recompressor, count: usize) -> Recompressed {
        let mut done = Recompressed::default();
        let length = recompressor.compress(count).unwrap();
        pool.settle(worker, recompressor, count, length, &mut done).unwrap();
        done
    }

    #[test]
    fn what_another_has_put_into_a_group_meanwhile_stays_there() {
        let (pool, mut worker, [mut slow, mut quick]) = place(16);
        pool.gather(&mut worker, &mut slow, &Aged::ALL, PageIndex(0));
        assert_eq!(pool.recompress(&mut worker, &mut quick, &Aged::ALL, PageIndex(0)).unwrap().pages, 16);
        assert_eq!(settled(&pool, &mut worker, &mut slow, 16).pages, 0);
        assert_eq!((pool.stats().pages_recompressed, pool.stats().grouped_pages), (16, 16));
        // The same for what both have found in groups of which little is alive.
        let (pool, mut worker, [mut slow, mut quick]) = place(64);
        for from in (0..64).step_by(16) {
            assert_eq!(pool.recompress(&mut worker, &mut quick, &Aged::ALL, PageIndex(from)).unwrap().pages, 16);
        }
        (0..64).filter(|index| index % 4 != 0).for_each(|index| assert!(pool.discard(PageIndex(index))));
        pool.gather(&mut worker, &mut slow, &Aged::ALL, PageIndex(0));
        assert_eq!(pool.recompress(&mut worker, &mut quick, &Aged::ALL, PageIndex(0)).unwrap().pages, 16);
        assert_eq!(settled(&pool, &mut worker, &mut slow, 16).pages, 0);
        assert_eq!((pool.stats().pages_recompressed, pool.stats().grouped_pages), (80, 16));
        (0..64).step_by(4).for_each(|index| {
            let mut page = [0; PAGE_SIZE];
            pool.read(&mut worker, PageIndex(index), &mut page).unwrap();
            assert!(page == text(index), "page {index}");
        });
    }

    #[test]
    fn nobody_is_refused_for_a_page_that_cannot_leave_its_group() {
        for is_pools in [false, true] {
            let (pool, mut worker, [mut recompressor, _]) = place(64);
            assert_eq!(pool.recompress(&mut worker, &mut recompressor, &Aged::ALL, PageIndex(0)).unwrap().pages, 16);
            // Three are left of the group: too few for another.
            (3..16).chain(19..64).for_each(|index| assert!(pool.discard(PageIndex(index))));
            let mut writer = Worker::new(&pool.store, || 0).unwrap();
            pool.write(&mut writer, PageIndex(100), &text(100)).unwrap();
            // Room for the writer, who has its credit, and for nothing else.
            let mut other = Worker::new(&pool.store, || 0).unwrap();
            if is_pools {
                pool.set_limit_bytes(pool.core.used_bytes() + PAGE_SIZE as u64 + 100);
                let held = pool.core.reserve_if_it_fits(PAGE_SIZE as u64).unwrap();
                pool.recompress(&mut other, &mut recompressor, &Aged::new(pool.store.age(), 200..=255), PageIndex(0))
                    .unwrap();
                drop(held);
            } else {
                pool.store.aside.lock().give_back(&pool.store.budget);
                pool.store.set_limit_bytes(pool.store.budget.charged_bytes() + PAGE_SIZE as u64);
                pool.recompress(&mut other, &mut recompressor, &Aged::new(pool.store.age(), 200..=255), PageIndex(0))
                    .unwrap();
            }
            assert_eq!(pool.stats().grouped_pages, 3, "there was room");
            assert!(pool.write(&mut writer, PageIndex(101), &text(101)).is_ok(), "a writer was refused: {is_pools}");
        }
    }

    #[test]
    fn what_was_found_before_there_was_no_room_is_not_forgotten() {
        let (pool, mut worker, [mut recompressor, _]) = place(8);
        // So many tables in between that a step ends before it has enough.
        let behind = LOOKED_MOST as u64;
        for index in (FANOUT as u64..behind).step_by(FANOUT) {
            pool.write(&mut worker, PageIndex(index), &[0; PAGE_SIZE]).unwrap();
        }
        for index in behind..behind + 8 {
            pool.write(&mut worker, PageIndex(index), &text(index)).unwrap();
        }
        let done = pool.recompress(&mut worker, &mut recompressor, &Aged::ALL, PageIndex(0)).unwrap();
        assert_eq!((done.pages, done.next), (0, Some(PageIndex(behind))));
        pool.store.aside.lock().give_back(&pool.store.budget);
        pool.store.set_limit_bytes(pool.store.budget.charged_bytes());
        let refused = pool.recompress(&mut worker, &mut recompressor, &Aged::ALL, PageIndex(behind));
        assert!(matches!(refused, Err(StoreError::LimitReached { .. })), "{refused:?}");
        pool.store.set_limit_bytes(u64::MAX);
        assert_eq!(pool.recompress(&mut worker, &mut recompressor, &Aged::ALL, PageIndex(behind)).unwrap().pages, 16);
    }

    #[test]
    fn the_table_of_groups_goes_back_when_all_pages_are_discarded_at_once() {
        let (pool, mut worker, [mut recompressor, _]) = place(16);
        assert_eq!(pool.recompress(&mut worker, &mut recompressor, &Aged::ALL, PageIndex(0)).unwrap().pages, 16);
        assert_eq!(pool.discard_range(PageIndex(0), PageIndex::LIMIT), 16);
        while !pool.store.compact(&mut worker, 100).finished {}
        assert_eq!(pool.store.groups.trim(&pool.store.budget), 0, "it was still there");
    }
}
