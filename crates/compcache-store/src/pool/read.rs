//! Reading a page, taking one, and looking at one.

use core::sync::atomic::Ordering::Relaxed;

use super::Pool;
use crate::backing::record::{Sealed, record_bytes};
use crate::checksum;
use crate::codec::CodecId;
use crate::error::StoreError;
use crate::page::{self, Page, PageIndex};
use crate::slot::{Member, Object, Slot};
use crate::table::{LeafCache, SlotGuard};
use crate::worker::Worker;

/// What a read found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// The page is in the buffer.
    Done,
    /// Never written, or discarded. The buffer is untouched; what an absent page reads as is the front end's to say.
    Absent,
    /// The page is on the backing; the buffer is untouched. [`Pool::fetch`] reads it, and waits.
    OnBacking(Extent),
}

/// What becomes of a page that is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// It counts as used.
    Used,
    /// It is discarded.
    Taken,
    /// It stays as it is.
    Untouched,
}

/// A place on the backing device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins.
    pub offset_bytes: u64,
    /// How long it is.
    pub length_bytes: u32,
}

impl Extent {
    fn of(sealed: &Sealed) -> Extent {
        Extent { offset_bytes: sealed.place.byte(), length_bytes: record_bytes(sealed.length.into()) as u32 }
    }
}

impl Pool {
    /// Reads page `index` into `page`. The page stays stored, and counts as used now.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`]: the page is lost; the buffer holds nothing of value. [`StoreError::IndexOutOfRange`].
    pub fn read(&self, worker: &mut Worker, index: PageIndex, page: &mut Page) -> Result<Read, StoreError> {
        let start_ns = worker.now_ns();
        self.read_from(worker, index, page, start_ns, Then::Used).0
    }

    /// As [`Pool::read`], but nothing of the page changes, not even how long ago it was used: for a process that may be copied by
    /// fork meanwhile ([`Pool::free_reader_after_fork`]).
    ///
    /// # Errors
    /// As [`Pool::read`].
    pub fn look_at(&self, worker: &mut Worker, index: PageIndex, page: &mut Page) -> Result<Read, StoreError> {
        let start_ns = worker.now_ns();
        // The leaf it used last may be another area's by now, and not even for a moment must it have a slot there.
        worker.leaf = LeafCache::default();
        self.read_from(worker, index, page, start_ns, Then::Untouched).0
    }

    /// Reads page `index` into `page` and discards it, in one step: for owners that have the page in memory from then on.
    ///
    /// # Errors
    /// As [`Pool::read`]. A corrupt page stays stored, and corrupt, until it is discarded or written.
    pub fn take(&self, worker: &mut Worker, index: PageIndex, page: &mut Page) -> Result<Read, StoreError> {
        let start_ns = worker.now_ns();
        self.read_from(worker, index, page, start_ns, Then::Taken).0
    }

    /// As [`Pool::read`] and those like it, begun at `start_ns`; also returns when it ended.
    pub(super) fn read_from(
        &self,
        worker: &mut Worker,
        index: PageIndex,
        page: &mut Page,
        start_ns: u64,
        then: Then,
    ) -> (Result<Read, StoreError>, u64) {
        worker.must_be_of(&self.store);
        let read = self.read_page(worker, index, page, then);
        let end_ns = worker.now_ns();
        let shard = self.core.counters.shard(worker.number);
        match read {
            // Not read yet.
            Ok(Read::OnBacking(_)) => {}
            Ok(_) => shard.reads.record(end_ns.saturating_sub(start_ns)),
            Err(StoreError::IndexOutOfRange { .. }) => _ = shard.invalid.fetch_add(1, Relaxed),
            Err(_) => _ = shard.failed_reads.fetch_add(1, Relaxed),
        }
        (read, end_ns)
    }

    pub(super) fn read_page(
        &self,
        worker: &mut Worker,
        index: PageIndex,
        page: &mut Page,
        then: Then,
    ) -> Result<Read, StoreError> {
        if !index.is_valid() {
            return Err(StoreError::IndexOutOfRange { index });
        }
        let store = &self.store;
        let Some(mut guard) = self.lock_for_reading(worker, index) else { return Ok(Read::Absent) };
        match guard.get() {
            Slot::Absent => return Ok(Read::Absent),
            Slot::OnBacking(sealed) => return Ok(Read::OnBacking(Extent::of(&sealed))),
            Slot::Damaged => return Err(StoreError::Corrupt { index }),
            Slot::SameFilled { word } => page::fill(page, word),
            Slot::Stored(_) | Slot::Grouped(_) => {
                if !self.decode(worker, &guard, page) {
                    return Err(StoreError::Corrupt { index });
                }
            }
        }
        match then {
            Then::Taken => {
                self.replace(guard, Slot::Absent, worker.number);
                self.core.note_emptied();
            }
            Then::Used => {
                guard.touch(store.age());
                if let Slot::Grouped(member) = guard.get() {
                    self.used_in_group(worker, guard, member, page);
                }
            }
            Then::Untouched => {}
        }
        Ok(Read::Done)
    }

    /// A page of a group was read: the second time, it leaves the group, if memory is to spare.
    fn used_in_group(&self, worker: &mut Worker, mut guard: SlotGuard<'_>, member: Member, page: &Page) {
        if !member.read_once {
            guard.set(Slot::Grouped(Member { read_once: true, ..member }), self.store.age());
        } else if self.has_memory_to_spare() {
            // If there is no place for it, it stays where it is.
            let _ = self.leave_group(worker, guard, page);
        }
    }

    /// Locks the slot of a page whose object is about to be decoded; `None` if it has none.
    pub(super) fn lock_for_reading(&self, worker: &mut Worker, index: PageIndex) -> Option<SlotGuard<'_>> {
        let (store, tree) = (&self.store, &self.core.tree);
        let guard = tree.lock(&store.tables, index, &mut worker.leaf)?;
        // Whoever reads a page often reads the next one; its object is on its way while this one is decoded.
        if let Some(next) = tree.guess_next(&store.tables, index, &worker.leaf) {
            store.arena.prefetch(next);
        }
        Some(guard)
    }

    /// The bytes of an object, if they are what was stored.
    pub(super) fn checked_bytes<'g>(&'g self, guard: &'g SlotGuard<'_>, object: &Object) -> Option<&'g [u8]> {
        let bytes = guard.bytes(object, &self.store.arena)?;
        (checksum::of(bytes, object.codec) == object.checksum).then_some(bytes)
    }

    /// Decodes what the slot leads to in the arena into `page`, if its checksum says that it is what was stored.
    pub(super) fn decode(&self, worker: &mut Worker, guard: &SlotGuard<'_>, page: &mut Page) -> bool {
        match guard.get() {
            Slot::Stored(object) => {
                let bytes = self.checked_bytes(guard, &object);
                bytes.is_some_and(|bytes| self.decode_bytes(worker, object.codec, bytes, page))
            }
            Slot::Grouped(member) => {
                let Worker { opened, codecs, .. } = worker;
                opened.page(&self.store, codecs, &member).map(|there| *page = *there).is_some()
            }
            _ => false,
        }
    }

    /// Decodes the bytes of an object that were checked.
    pub(super) fn decode_bytes(
        &self,
        worker: &mut Worker,
        codec: Option<CodecId>,
        bytes: &[u8],
        page: &mut Page,
    ) -> bool {
        match (codec, <&Page>::try_from(bytes)) {
            (Some(id), _) => worker.codecs.decompress(id, bytes, page, &self.store.dictionaries),
            (None, Ok(raw)) => {
                *page = *raw;
                true
            }
            (None, Err(_)) => false,
        }
    }
}
