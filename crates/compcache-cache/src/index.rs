//! Where the pages of files are in the pool, and what they were read from.
//!
//! A file has a record while pages of it are stored: the stamp it had when they were read, and where they are.
//!
//! A *turn* says which pages that are being read may be stored: its generation changes whenever some of them may be out of date, and what was
//! read below may be stored only under the generation at which the reading began (docs/design/fs.md, "The order of reads and writes"). There is a fixed number of turns,
//! which files share by a hash of what they are, so that a write needs no record. Two files that share one cost each other pages that are read during a
//! write, one time in 4096.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use crate::admission::Admission;
use crate::cold::WASTE_SHARE;
use crate::ghost::{Ghost, hash};
use crate::miniature::Miniatures;
use crate::queues::{Queues, Victim};
use crate::written::WrittenPages;
use crate::{FileId, Recompress, Wanted};

const TURNS: usize = 4096;
/// A page in its file's map, of which every node is little more than half full where it was filled in order.
const MAP_PAGE_BYTES: usize = 24;
/// The same of a file's first page, whose node is there for eleven, with what the allocator takes: so much more.
const MAP_BYTES: usize = 112 - MAP_PAGE_BYTES;

/// Whether what is being read of some files may be stored.
#[derive(Clone, Copy)]
pub struct Turn {
    /// Never the same again.
    pub generation: u64,
    /// Writes under way.
    pub writers: u32,
}

pub struct Turns(Box<[Turn]>);

impl Turns {
    pub fn new() -> Turns {
        Turns(vec![Turn { generation: 0, writers: 0 }; TURNS].into())
    }

    pub fn of(&self, id: FileId) -> Turn {
        self.0[hash(id, 0) as usize % TURNS]
    }

    /// Makes void what is being read of the file, and says whose turn it is.
    pub fn next(&mut self, id: FileId) -> &mut Turn {
        let turn = &mut self.0[hash(id, 0) as usize % TURNS];
        turn.generation += 1;
        turn
    }

    pub fn next_of_all(&mut self) {
        self.0.iter_mut().for_each(|turn| turn.generation += 1);
    }
}

pub struct CachedFile<S> {
    pub id: FileId,
    /// What the file was like when the pages here were read.
    pub seen: Option<S>,
    /// Page of the file to place in the pool.
    pub pages: BTreeMap<u32, u32>,
    /// The file has them no more, and they are to go.
    pub is_left: bool,
}

impl<S> CachedFile<S> {
    /// Takes out the first page from `first` on, before `end`, and says where it is in the pool.
    pub fn take_first(&mut self, first: u32, end: u32) -> Option<u32> {
        if first >= end {
            return None;
        }
        let page = *self.pages.range(first..end).next()?.0;
        self.pages.remove(&page)
    }
}

/// All files that have a record.
pub struct Files<S> {
    slots: Vec<Option<CachedFile<S>>>,
    free: Vec<u32>,
    by_id: HashMap<FileId, u32>,
    /// Records that no file has.
    left: usize,
}

impl<S> Files<S> {
    pub fn new() -> Files<S> {
        Files { slots: Vec::new(), free: Vec::new(), by_id: HashMap::new(), left: 0 }
    }

    pub fn find(&mut self, id: FileId) -> Option<(u32, &mut CachedFile<S>)> {
        let slot = *self.by_id.get(&id)?;
        self.slots[slot as usize].as_mut().map(|file| (slot, file))
    }

    pub fn at(&mut self, slot: u32) -> Option<&mut CachedFile<S>> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// The record of a file, made if there is none.
    pub fn make(&mut self, id: FileId) -> u32 {
        if let Some(slot) = self.by_id.get(&id) {
            return *slot;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            // All may be given back without asking for memory.
            self.free.reserve(self.slots.len());
            (self.slots.len() - 1) as u32
        });
        self.slots[slot as usize] = Some(CachedFile { id, seen: None, pages: BTreeMap::new(), is_left: false });
        self.by_id.insert(id, slot);
        slot
    }

    /// Takes its record from a file, if it has one, and says in which slot that is. What is there is nobody's from now on, and can only go.
    pub fn leave(&mut self, id: FileId) -> Option<u32> {
        let slot = self.by_id.remove(&id)?;
        self.at(slot)?.is_left = true;
        self.left += 1;
        Some(slot)
    }

    /// All slots that may have a record are below this.
    pub fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Forgets a record that says nothing.
    pub fn tidy(&mut self, slot: u32) {
        if let Some(file) = self.at(slot)
            && file.pages.is_empty()
        {
            let (id, is_left) = (file.id, file.is_left);
            self.slots[slot as usize] = None;
            if is_left {
                self.left -= 1;
            } else {
                self.by_id.remove(&id);
            }
            self.free.push(slot);
        }
    }

    /// How many records there are.
    pub fn count(&self) -> usize {
        self.by_id.len()
    }

    /// The memory that records take, in bytes, but for what their pages do.
    pub fn bytes(&self) -> u64 {
        let slots =
            self.slots.capacity() * size_of::<Option<CachedFile<S>>>() + self.free.capacity() * size_of::<u32>();
        // One of eight buckets stays empty, and each has a byte more.
        let by_id = self.by_id.capacity() * 8 / 7 * (size_of::<(FileId, u32)>() + 1);
        (slots + by_id + (self.count() + self.left) * MAP_BYTES) as u64
    }

    /// The same if there was memory for as many as there are and no more. No less than that: the table of identities doubles.
    pub fn fitted_bytes(&self) -> u64 {
        let slot = size_of::<Option<CachedFile<S>>>() + size_of::<u32>();
        let by_id = 2 * (size_of::<(FileId, u32)>() + 1) * 8 / 7;
        (self.count() * (slot + by_id + MAP_BYTES)) as u64
    }

    /// Whether they are something to speak of within this limit, and there are slots for so many times as many as there are. Where one was left, no other is moved: who
    /// empties it knows its slot.
    fn is_sparse(&self, times: usize, limit_bytes: u64) -> bool {
        self.left == 0 && self.slots.len() > times * self.count() && self.bytes() > limit_bytes / 32
    }

    /// Moves all records to the first slots, and gives the memory of the others back. `moved` is told each page's place, and the slot its file has now. What is
    /// being read meanwhile finds its file no more, mostly, and is not kept.
    fn give_back(&mut self, mut moved: impl FnMut(u32, u32)) {
        self.slots.retain(Option::is_some);
        self.slots.shrink_to_fit();
        self.free = Vec::with_capacity(self.slots.capacity());
        self.by_id.clear();
        self.by_id.shrink_to(self.slots.len());
        for (slot, file) in (0..).zip(self.slots.iter().flatten()) {
            self.by_id.insert(file.id, slot);
            file.pages.values().for_each(|place| moved(*place, slot));
        }
    }
}

/// What the cache's lock protects.
pub struct Index<S> {
    pub files: Files<S>,
    pub turns: Turns,
    pub queues: Queues,
    pub ghost: Ghost,
    pub admission: Admission,
    pub miniatures: Miniatures,
    pub written: WrittenPages<S>,
    /// What the pages in the queues are taken to cost, in bytes.
    pub charged_bytes: u64,
    /// Of that, what groups of cold pages save, as last reckoned.
    pub saved_bytes: i64,
    pub has_groups: bool,
    /// Groups of which little is left are made into full ones, and so much more is expected of that.
    pub gathers: bool,
    pub expected_bytes: u64,
    pub recompress: Recompress,
    /// What the tools take that groups are made with.
    pub cold_bytes: u64,
    pub limit_bytes: u64,
    /// Of that, what is left to others while the machine is short of memory.
    pub lent_bytes: u64,
    /// Nothing had to go since most of it was empty, or its limit was raised.
    pub is_filling: bool,
}

/// Beside the object: slot of the pool's table, place, the file's map, and some of a span that is not full.
const PAGE_BYTES: u64 = 88;

/// What a page is taken to cost: its object with what its size class wastes, and the tables' share.
pub fn charge(bytes: u16) -> u64 {
    let bytes = u64::from(bytes);
    bytes + bytes / 32 + PAGE_BYTES
}

impl<S: Copy + PartialEq> Index<S> {
    /// Memory of the index itself, in bytes: what is not in the store.
    pub fn own_bytes(&self) -> u64 {
        self.fixed_bytes() + self.queues.bytes() + (self.queues.length() * MAP_PAGE_BYTES) as u64
    }

    /// The same without what is in the pages' charges.
    pub fn fixed_bytes(&self) -> u64 {
        let turns = size_of_val(&*self.turns.0) as u64;
        let tables = self.ghost.bytes() + self.miniatures.bytes() + self.written.bytes() + self.files.bytes();
        turns + tables + self.cold_bytes
    }

    /// What the pages that are here cost.
    pub fn full_cost_bytes(&self) -> u64 {
        self.charged_bytes.saturating_add_signed(-self.saved_bytes)
    }

    /// The same without what is expected of gathering, as long as the limit is not lower by so much than when that was reckoned.
    pub fn cost_bytes(&self) -> u64 {
        self.full_cost_bytes().saturating_sub(self.expected_bytes.min(self.limit_bytes / WASTE_SHARE))
    }

    /// Whether what is gone by and by, as groups are gathered, is enough: not where the limit was lowered by so much that the store alone does not keep it.
    pub fn gathers_in_time(&self) -> bool {
        self.gathers && self.full_cost_bytes() + self.fixed_bytes() <= self.limit_bytes / 16 * 18
    }

    /// What they are charged for, all in all, where the pool takes so much.
    pub fn charged_for(&self, pool_bytes: u64) -> u64 {
        pool_bytes + self.queues.length() as u64 * PAGE_BYTES
    }

    /// At what level of zstd cold pages are to be compressed again, and after how long, if they are not to stay as they are; `already`: it is done.
    pub fn recompress_now(&self, already: bool) -> Option<(i8, Duration)> {
        let Recompress { level, where_it_pays, after } = self.recompress;
        let pays = !where_it_pays || self.admission.is_below_slow(already);
        level.filter(|_| pays).map(|level| (level, after))
    }

    /// Gives back memory of records that went, if most did.
    pub fn fit_files(&mut self) {
        self.fit_files_if(4);
    }

    /// The same, however few.
    pub fn give_back_files(&mut self) {
        self.fit_files_if(1);
    }

    fn fit_files_if(&mut self, times: usize) {
        if self.files.is_sparse(times, self.limit_bytes) {
            let queues = &mut self.queues;
            self.files.give_back(|place, slot| queues.moved(place, slot));
        }
    }

    /// Takes the last page out that has to go for so many places to be all, of those before this one. Says where it is in the pool, as [`Index::evict`] does.
    pub fn evict_beyond(&mut self, wanted: usize, before: u32) -> Option<u32> {
        let (place, slot, page) = self.queues.last_beyond(wanted, before)?;
        self.charged_bytes -= charge(self.queues.bytes_of(place));
        if let Some(file) = self.files.at(slot) {
            file.pages.remove(&page);
        }
        self.files.tidy(slot);
        Some(place)
    }

    /// Adds a stored page to a file. While there is room for all, main takes what the small queue has no room for: who reads a file in order that is larger
    /// than the cache, again and again, then finds its beginning, where a queue alone would have none of it at any time.
    pub fn admit(&mut self, slot: u32, page: u32, place: u32, bytes: u16, is_of_read: bool, to_main: bool) {
        let Some(file) = self.files.at(slot) else { return };
        file.pages.insert(page, place);
        let to_main = to_main || self.is_filling && self.queues.is_small_full();
        self.queues.admit(place, (slot, page), bytes, is_of_read, to_main);
        self.charged_bytes += charge(bytes);
    }

    /// What the charges are to be kept below under a limit of so much.
    pub fn target_bytes_of(&self, limit_bytes: u64) -> u64 {
        (limit_bytes / 16 * 15).saturating_sub(self.fixed_bytes())
    }

    /// What the charges are kept below: so many sixteenths of the limit, without what the index has of its own.
    pub fn target_bytes(&self, sixteenths: u64) -> u64 {
        self.target_bytes_without_files(sixteenths).saturating_sub(self.files.bytes())
    }

    /// The same if the records of files took nothing.
    pub fn target_bytes_without_files(&self, sixteenths: u64) -> u64 {
        ((self.limit_bytes - self.lent_bytes) / 16 * sixteenths).saturating_sub(self.fixed_bytes() - self.files.bytes())
    }

    /// Whether so many pages more would push out none, whatever they compress to.
    pub fn has_room(&self, pages: u64) -> bool {
        self.cost_bytes() + pages * charge(4096) <= self.target_bytes(15)
    }

    /// What is wanted of pages that were read together, of which so many are not here and the ghost knows most; `soon`: they are asked for again already.
    pub fn wants_again(&mut self, pages: u64, soon: bool) -> Wanted {
        let costs_main = !self.queues.is_small_swollen() && !self.has_room(pages);
        if self.is_filling || !costs_main || !self.miniatures.main_holds() {
            Wanted::Again
        } else if soon {
            Wanted::Soon
        } else if self.queues.gives_way(pages as usize) {
            Wanted::Again
        } else {
            Wanted::None
        }
    }

    /// Tries out which rule finds more of what was asked for lately.
    pub fn simulate(&mut self) {
        // While it fills, for more than it has, but not for however many are asked for.
        let length = self.queues.length();
        self.miniatures.simulate(if self.is_filling { length.max(2 * self.ghost.length()) } else { length });
    }

    /// Takes the page that goes next out of its file, and says where in the pool it is: to be discarded there, then released. In the common way one
    /// goes for another; else many at once, long before their time.
    pub fn evict(&mut self, is_common: bool) -> Option<u32> {
        let Victim { place, file: slot, page, becomes_ghost, is_new } =
            self.queues.next_victim(self.miniatures.main_holds())?;
        self.is_filling = false;
        let found = self.queues.take_found_in_small();
        if is_common {
            self.admission.left_small(found, is_new.into());
        }
        self.charged_bytes -= charge(self.queues.bytes_of(place));
        if let Some(file) = self.files.at(slot) {
            let id = file.id;
            file.pages.remove(&page);
            if becomes_ghost {
                self.ghost.remember(id, page);
            }
        }
        self.files.tidy(slot);
        Some(place)
    }
}
