//! Reading a page that is on the backing.
//!
//! | what the slot says           | what is done                                                                |
//! |------------------------------|-----------------------------------------------------------------------------|
//! | a record                     | unlocked; its blocks are read; locked and asked again                       |
//! | the same record then         | opened, decoded                                                             |
//! | something else then          | what was read is forgotten, and all begins anew                             |
//! | anything but a record        | as [`Pool::read`]                                                           |
//!
//! Of a run, pages whose records lie near each other are read with one access, and each is then opened as if it had been read alone: pages leave in the
//! order of their numbers, so that neighbours mostly lie so.
//!
//! No lock is held while the medium works. Begun anew it is only if somebody has written, discarded or moved the page, or cleaning
//! has moved its record, during one access to the medium.
//!
//! Where memory is to spare (below what reclaim goes down to) the object comes back into memory as it is, without being
//! compressed again, and the record is dead: whoever reads a page from a disk without a cache above reads it
//! often. Where it is not, the page stays where it is, since it would push out another that has then to be written: a
//! read would become a write. Nor does it come back where pages are stored in a reserve alone: who swapped it in has it in memory.

use core::sync::atomic::Ordering::Relaxed;

use super::read::Then;
use super::{Pool, RunFailed};
use crate::backing::record::Sealed;
use crate::backing::{Batch, Fetcher, Record};
use crate::error::StoreError;
use crate::page::{Page, PageIndex};
use crate::pool::Read;
use crate::slot::Slot;
use crate::table::SlotGuard;
use crate::worker::Worker;

/// The most records that are read with one access.
const RECORDS: usize = 64;

impl Pool {
    /// As [`Pool::read`], and waits for the backing if the page is there: never [`Read::OnBacking`].
    ///
    /// # Errors
    /// As [`Pool::read`], and [`StoreError::BackingFailed`]: the page is where it was.
    pub fn fetch(
        &self,
        worker: &mut Worker,
        fetcher: &mut Fetcher,
        index: PageIndex,
        page: &mut Page,
    ) -> Result<Read, StoreError> {
        self.fetch_from(worker, fetcher, index, page, false)
    }

    /// Reads those pages of a run of which [`Pool::read_run`] has `found` that they are on the backing, as [`Pool::fetch`] does, and says of each what was
    /// found now: never [`Read::OnBacking`].
    ///
    /// # Errors
    /// As [`Pool::fetch`]; the pages before `done` are done, and of others those that `found` says.
    pub fn fetch_run(
        &self,
        worker: &mut Worker,
        (fetcher, batch): (&mut Fetcher, &mut Batch),
        first: PageIndex,
        pages: &mut [Page],
        found: &mut [Read],
    ) -> Result<(), RunFailed> {
        worker.must_be_of(&self.store);
        let is_out = |found: &Read| matches!(found, Read::OnBacking(_));
        let mut start = 0;
        while let Some(ahead) = found[start..].iter().position(is_out) {
            start += ahead;
            let start_ns = worker.now_ns();
            let (mut records, mut added) = ([None; RECORDS], 0);
            batch.clear();
            for (at, (record, found)) in records.iter_mut().zip(&found[start..]).enumerate() {
                if let Some(backing) = self.core.backing.as_ref().filter(|_| is_out(found)) {
                    *record = self.record_of(worker, first.plus((start + at) as u64));
                    *record = record.filter(|record| backing.add_to(batch, *record));
                    added += usize::from(record.is_some());
                }
            }
            // Of one alone no more is read than it has; and where an access fails, each is told by itself.
            let backing = self.core.backing.as_ref().filter(|_| added > 1);
            let are_read = backing.is_some_and(|backing| backing.fetch_batch(batch).is_ok());
            for (at, record) in records.iter().take(found.len() - start).enumerate() {
                // The first is done in any case; others that lie elsewhere have their turn.
                if at > 0 && record.is_none() {
                    continue;
                }
                let (index, page) = (first.plus((start + at) as u64), &mut pages[start + at]);
                let record = record.filter(|record| are_read && batch.hand_to(*record, fetcher));
                let opened = record.and_then(|record| self.open_read(worker, fetcher, record.0, index, page, false));
                let fetched = match opened {
                    Some(fetched) => self.count_fetched(worker, start_ns, fetched),
                    None => self.fetch(worker, fetcher, index, page),
                };
                found[start + at] = fetched.map_err(|error| RunFailed { done: start, error })?;
            }
        }
        Ok(())
    }

    /// Where the page is, if it is on the backing: for a thread that reads it without the pool, while this one goes on.
    /// An index out of range has none.
    pub fn record_of(&self, worker: &mut Worker, index: PageIndex) -> Option<Record> {
        worker.must_be_of(&self.store);
        if !index.is_valid() {
            return None;
        }
        let guard = self.core.tree.lock(&self.store.tables, index, &mut worker.leaf)?;
        match guard.get() {
            Slot::OnBacking(sealed) => Some(Record(sealed)),
            _ => None,
        }
    }

    /// Reads the page from what [`Backing::fetch`](crate::Backing::fetch) has read for it. `None`, and nothing done, if that is not where the page
    /// is now. The page stays where it is, and counts as used now.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`].
    pub fn open_fetched(
        &self,
        worker: &mut Worker,
        fetcher: &mut Fetcher,
        index: PageIndex,
        page: &mut Page,
    ) -> Option<Result<(), StoreError>> {
        worker.must_be_of(&self.store);
        let sealed = fetcher.holds.filter(|_| index.is_valid())?;
        let mut guard = self.core.tree.lock(&self.store.tables, index, &mut worker.leaf)?;
        // A record is never changed, and no other has the same place and flight: if the slot says the same as before the
        // reading, what was read is what it means.
        if guard.get() != Slot::OnBacking(sealed) {
            return None;
        }
        fetcher.holds = None;
        let object = self.core.backing.as_ref().and_then(|backing| backing.open(sealed, self.core.serial(), fetcher));
        let decoded = object.is_some_and(|object| self.decode_bytes(worker, sealed.codec, object, page));
        let shard = self.core.counters.shard(worker.number);
        match decoded {
            true => {
                guard.touch(self.store.age());
                shard.bd_reads.fetch_add(1, Relaxed);
                Some(Ok(()))
            }
            false => {
                shard.bd_failed.fetch_add(1, Relaxed);
                shard.failed_reads.fetch_add(1, Relaxed);
                Some(Err(StoreError::Corrupt { index }))
            }
        }
    }

    /// As [`Pool::take`], and waits for the backing if the page is there.
    ///
    /// # Errors
    /// As [`Pool::fetch`].
    pub fn fetch_and_take(
        &self,
        worker: &mut Worker,
        fetcher: &mut Fetcher,
        index: PageIndex,
        page: &mut Page,
    ) -> Result<Read, StoreError> {
        self.fetch_from(worker, fetcher, index, page, true)
    }

    fn fetch_from(
        &self,
        worker: &mut Worker,
        fetcher: &mut Fetcher,
        index: PageIndex,
        page: &mut Page,
        take: bool,
    ) -> Result<Read, StoreError> {
        let start_ns = worker.now_ns();
        loop {
            match self.read_from(worker, index, page, start_ns, if take { Then::Taken } else { Then::Used }).0 {
                Ok(Read::OnBacking(_)) => {}
                done => return done,
            }
            let Some(fetched) = self.fetch_record(worker, fetcher, index, page, take) else { continue };
            return self.count_fetched(worker, start_ns, fetched);
        }
    }

    fn count_fetched(
        &self,
        worker: &Worker,
        start_ns: u64,
        fetched: Result<Read, StoreError>,
    ) -> Result<Read, StoreError> {
        let shard = self.core.counters.shard(worker.number);
        match fetched {
            Ok(_) => {
                shard.bd_reads.fetch_add(1, Relaxed);
                shard.reads.record(worker.now_ns().saturating_sub(start_ns));
            }
            Err(_) => {
                shard.bd_failed.fetch_add(1, Relaxed);
                shard.failed_reads.fetch_add(1, Relaxed);
            }
        }
        fetched
    }

    /// `None`: the slot says something else now.
    fn fetch_record(
        &self,
        worker: &mut Worker,
        fetcher: &mut Fetcher,
        index: PageIndex,
        page: &mut Page,
        take: bool,
    ) -> Option<Result<Read, StoreError>> {
        let Slot::OnBacking(sealed) = self.core.tree.lock(&self.store.tables, index, &mut worker.leaf)?.get() else {
            return None;
        };
        // A pool without a backing has no such slot, unless it is damaged.
        let Some(backing) = &self.core.backing else { return Some(Err(StoreError::Corrupt { index })) };
        match backing.read(sealed, fetcher) {
            Ok(()) => self.open_read(worker, fetcher, sealed, index, page, take),
            Err(error) => {
                let guard = self.core.tree.lock(&self.store.tables, index, &mut worker.leaf)?;
                (guard.get() == Slot::OnBacking(sealed)).then_some(Err(StoreError::BackingFailed { index, error }))
            }
        }
    }

    /// Opens what was read of a record that the slot told before. `None`: it says something else now.
    fn open_read(
        &self,
        worker: &mut Worker,
        fetcher: &mut Fetcher,
        sealed: Sealed,
        index: PageIndex,
        page: &mut Page,
        take: bool,
    ) -> Option<Result<Read, StoreError>> {
        let corrupt = Err(StoreError::Corrupt { index });
        let guard = self.core.tree.lock(&self.store.tables, index, &mut worker.leaf)?;
        if guard.get() != Slot::OnBacking(sealed) {
            return None;
        }
        fetcher.holds = None;
        let object = self.core.backing.as_ref().and_then(|backing| backing.open(sealed, self.core.serial(), fetcher));
        let Some(object) = object else { return Some(corrupt) };
        if !self.decode_bytes(worker, sealed.codec, object, page) {
            return Some(corrupt);
        }
        match take {
            true => {
                self.replace(guard, Slot::Absent, worker.number);
                self.core.note_emptied();
            }
            false => self.keep_in_memory(worker, guard, object),
        }
        Some(Ok(Read::Done))
    }

    /// Whether so little is used, here and in the store, that reclaim would end.
    pub(super) fn has_memory_to_spare(&self) -> bool {
        let until_percent = match &self.core.backing {
            Some(backing) => backing.until_percent(),
            None => self.core.spare_percent.into(),
        };
        !self.store.budget.is_above(until_percent) && !self.core.is_above(until_percent)
    }

    /// The page was used now; if memory is to spare, its object is in memory from now on.
    fn keep_in_memory(&self, worker: &mut Worker, mut guard: SlotGuard<'_>, object: &[u8]) {
        guard.touch(self.store.age());
        let Slot::OnBacking(sealed) = guard.get() else { return };
        if worker.credit.reserve_only || !self.has_memory_to_spare() {
            return;
        }
        let budget = &self.store.budget;
        if budget.admit(&mut worker.credit).is_ok()
            && let Ok(_reservation) = self.core.reserve()
        {
            // If there is no place for it, it stays where it is.
            let _ = self.place(guard, sealed.codec, object, &mut worker.credit, worker.number);
        }
    }
}
