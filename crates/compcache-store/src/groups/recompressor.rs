//! What the thread that makes groups needs for it, made once.

use alloc::sync::Arc;

use super::{FRAME_BYTES_MAX, GROUP_BYTES, GroupId, MEMBERS_MAX};
use crate::backing::buffer::Buffer;
use crate::codec::GroupCompressor;
use crate::error::StoreError;
use crate::page::{PAGE_SIZE, Page, PageIndex};
use crate::store::Store;

/// A page that is to be in the next group.
#[derive(Clone, Copy)]
pub(crate) struct Candidate {
    pub index: PageIndex,
    /// The sparse group it comes from.
    pub group: Option<GroupId>,
    pub age: u8,
    /// What it takes now.
    pub slot_bytes: usize,
}

/// What contexts and buffers take once they were used, those of one who reads groups among them; by the highest level of zstd for which that is
/// enough: measured by hand.
const USED_BYTES: [(i8, u64); 4] = [(1, 528 << 10), (3, 896 << 10), (9, 1184 << 10), (i8::MAX, 1984 << 10)];

/// Context and buffers for making groups ([`Pool::recompress`](crate::Pool::recompress)): all of its memory is taken when it is made,
/// a megabyte of addresses or some, touched as far as the level needs it; using it allocates nothing.
///
/// It belongs to one store. All of a store have up to 256 KiB of credit against its limit together, from the first step on
/// or from when they are told to ([`Recompressor::set_aside`]): a full store can be recompressed if one had it before.
pub struct Recompressor {
    store: Arc<Store>,
    compressor: GroupCompressor,
    frame: Buffer,
    pages: Buffer,
    candidates: [Option<Candidate>; MEMBERS_MAX],
    count: usize,
    /// Where the last step ended before it had enough, of which pool: the next one goes on with what it has, if it begins there.
    goes_on: Option<(u64, PageIndex)>,
    used_bytes: u64,
    /// Whether what becomes free is brought together here.
    pub(crate) compacts: bool,
}

impl Recompressor {
    /// For pools of `store`, compressing with zstd at `level`: 1..=19, or -7..=-1 for faster and larger.
    ///
    /// # Errors
    /// [`StoreError::NoSuchCodec`] for the level, [`StoreError::MemoryRefused`], [`StoreError::CodecFailed`].
    pub fn new(store: &Arc<Store>, level: i8) -> Result<Recompressor, StoreError> {
        let (compressor, frame, pages) =
            (GroupCompressor::new(level)?, Buffer::new(FRAME_BYTES_MAX)?, Buffer::new(GROUP_BYTES)?);
        let used_bytes = Recompressor::used_bytes_at(level);
        store.aside.lock().join();
        Ok(Recompressor {
            store: store.clone(),
            compressor,
            frame,
            pages,
            candidates: [None; MEMBERS_MAX],
            count: 0,
            goes_on: None,
            used_bytes,
            compacts: true,
        })
    }

    /// Leaves it to [`Store::compact`](crate::Store::compact) to bring together what becomes free: for a thread that must not be long at anything.
    #[must_use]
    pub fn without_compaction(mut self) -> Recompressor {
        self.compacts = false;
        self
    }

    /// Sets aside the memory for making groups now, while the store has some, rather than with the first step.
    ///
    /// # Errors
    /// [`StoreError::LimitReached`]: there is none. It is tried again with each step.
    pub fn set_aside(&self) -> Result<(), StoreError> {
        self.store.aside.lock().credit(&self.store.budget).map(drop)
    }

    /// What contexts and buffers take once they were used, with those of one worker that reads groups: half a MiB to two, by the level.
    pub fn used_bytes_at(level: i8) -> u64 {
        USED_BYTES.into_iter().find(|(most, _)| level <= *most).map_or(0, |(_, bytes)| bytes)
    }

    /// The same, of this one.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// A step begins at a page of a pool.
    pub(crate) fn begin(&mut self, pool: u64, from: PageIndex) {
        if self.goes_on.take() != Some((pool, from)) {
            self.count = 0;
        }
    }

    /// A step ends before it has enough.
    pub(crate) fn pause(&mut self, pool: u64, at: PageIndex) {
        self.goes_on = Some((pool, at));
    }

    /// A step ends without room for what it has: the next one, which begins where this one did, goes on with what was there before.
    pub(crate) fn pause_before(&mut self, pool: u64, from: PageIndex) {
        self.count = self.candidates().take_while(|(candidate, _)| candidate.index < from).count();
        self.pause(pool, from);
    }

    /// Whether what was gathered is kept for the next step.
    pub(crate) fn is_paused(&self) -> bool {
        self.goes_on.is_some()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.count == MEMBERS_MAX
    }

    /// Room for the page of the next candidate. There is some unless it [`Recompressor::is_full`].
    pub(crate) fn next_page(&mut self) -> &mut Page {
        &mut self.pages.as_chunks_mut::<PAGE_SIZE>().0[self.count]
    }

    /// The page in [`Recompressor::next_page`] is a candidate.
    pub(crate) fn push(&mut self, candidate: Candidate) {
        self.candidates[self.count] = Some(candidate);
        self.count += 1;
    }

    /// The candidates and their pages, in the order of their indexes.
    pub(crate) fn candidates(&self) -> impl ExactSizeIterator<Item = (Candidate, &Page)> {
        let pages = self.pages.as_chunks::<PAGE_SIZE>().0;
        let known = |(candidate, page)| (Option::expect(candidate, "counted"), page);
        self.candidates[..self.count].iter().copied().zip(pages).map(known)
    }

    /// Compresses the first `count` of them; `None` if the frame would be too long.
    pub(crate) fn compress(&mut self, count: usize) -> Option<usize> {
        self.compressor.compress(&self.pages[..count * PAGE_SIZE], &mut self.frame)
    }

    /// The frame.
    pub(crate) fn frame(&self, length: usize) -> &[u8] {
        &self.frame[..length]
    }
}

impl Drop for Recompressor {
    fn drop(&mut self) {
        self.store.aside.lock().leave(&self.store.budget);
    }
}
