//! Where the pages of files are in the pool, and what they were read from.
//!
//! A file has a record while pages of it are stored or a write to it is under way: the stamp it had when its pages were read, and a
//! number, its generation, that changes whenever some of them may be out of date. What was read below may be stored only under
//! the generation at which the reading began (docs/design/fs.md, "The order of reads and writes").

use std::collections::{BTreeMap, HashMap};

use super::ghost::Ghost;
use super::queues::{Queues, Victim};
use crate::stamp::{FileId, Stamp};

pub struct CachedFile {
    pub id: FileId,
    /// What the file was like when the pages here were read.
    pub seen: Option<Stamp>,
    /// Never the same again, not for another file either.
    pub generation: u64,
    /// Writes under way.
    pub writers: u32,
    /// Page of the file to place in the pool.
    pub pages: BTreeMap<u32, u32>,
}

/// All files that have a record.
#[derive(Default)]
pub struct Files {
    slots: Vec<Option<CachedFile>>,
    free: Vec<u32>,
    by_id: HashMap<FileId, u32>,
    generation: u64,
}

impl Files {
    pub fn find(&mut self, id: FileId) -> Option<(u32, &mut CachedFile)> {
        let slot = *self.by_id.get(&id)?;
        self.slots[slot as usize].as_mut().map(|file| (slot, file))
    }

    pub fn at(&mut self, slot: u32) -> Option<&mut CachedFile> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// The record of a file, made if there is none.
    pub fn make(&mut self, id: FileId) -> u32 {
        if let Some(slot) = self.by_id.get(&id) {
            return *slot;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        let generation = self.next_generation();
        self.slots[slot as usize] = Some(CachedFile { id, seen: None, generation, writers: 0, pages: BTreeMap::new() });
        self.by_id.insert(id, slot);
        slot
    }

    pub fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// Forgets a record that says nothing.
    pub fn tidy(&mut self, slot: u32) {
        if let Some(file) = self.at(slot)
            && file.pages.is_empty()
            && file.writers == 0
        {
            let id = file.id;
            self.slots[slot as usize] = None;
            self.by_id.remove(&id);
            self.free.push(slot);
        }
    }

    /// How many records there are.
    pub fn count(&self) -> usize {
        self.by_id.len()
    }
}

/// What the cache's lock protects.
pub struct Index {
    pub files: Files,
    pub queues: Queues,
    pub ghost: Ghost,
    /// What the pages in the queues are taken to cost, in bytes.
    pub charged_bytes: u64,
    pub limit_bytes: u64,
}

/// Beside the object: slot of the pool's table, place, the file's map, and some of a span that is not full.
const PAGE_BYTES: u64 = 80;

impl Index {
    /// What a page is taken to cost: its object with what its size class wastes, and the tables' share.
    pub fn charge(bytes: u16) -> u64 {
        let bytes = u64::from(bytes);
        bytes + bytes / 32 + PAGE_BYTES
    }

    /// Memory of the index itself, in bytes: what is not in the store.
    pub fn own_bytes(&self) -> u64 {
        self.queues.bytes() + self.ghost.bytes() + (self.queues.length() * 16 + self.files.count() * 160) as u64
    }

    /// Adds a stored page to a file.
    pub fn admit(&mut self, slot: u32, page: u32, place: u32, bytes: u16, to_main: bool) {
        let Some(file) = self.files.at(slot) else { return };
        file.pages.insert(page, place);
        self.queues.admit(place, slot, page, bytes, to_main);
        self.charged_bytes += Index::charge(bytes);
    }

    /// Takes the page that goes next out of its file, and says where in the pool it is: to be discarded there, then released.
    pub fn evict(&mut self) -> Option<u32> {
        let Victim { place, file: slot, page, becomes_ghost } = self.queues.next_victim()?;
        self.charged_bytes -= Index::charge(self.queues.bytes_of(place));
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
