//! The page table: what the pager knows of each page of the process, one word a page.
//!
//! | phase        | where the bytes are | on a fault                  | on eviction      |
//! |--------------|---------------------|-----------------------------|------------------|
//! | `Resident`   | the process         | filled with zeroes          | -> `Staged`      |
//! | `Staged`     | a staging frame     | copied from the frame       | -> `Compressing` |
//! | `Compressing`| a staging frame     | copied from the frame       | -> `Stored`      |
//! | `Stored`     | the pool            | decompressed, copied in     | (none)           |
//! | `Dropped`    | about to be zeroes  | filled with zeroes          | (none)           |
//!
//! `Resident` is also what a page is that the pager never saw. A fault on a `Resident` page is a first touch, or one
//! that somebody else's fault has answered meanwhile.
//!
//! `Dropped` is a page present when the kernel announced that its contents will go (madvise): until it has faulted
//! again nobody can tell whether they have gone, so it must not be evicted: its old contents would come back later.
//! The payload is then the time of the announcement.
//!
//! A page that came back from the pool lately has its *copy* there still: if it leaves unchanged, nothing is compressed
//! ([`crate::copies`]).
//!
//! A page that was brought while the process was about to be copied is still `Stored`, for nothing may be changed then; a bit says
//! that it is here, and the newer.
//!
//! Word: bits 0-2 phase, 3-4 heat, 5 copy, 6 here, 8-31 payload (staging frame, or the eviction clock).
//!
//! The tree has three levels of 512 under a root of 512 (48-bit addresses); nodes come from one mapped range and are
//! never given back: 2 KiB for each 2 MiB of addresses that were ever evicted from, 0.1 %.

use crate::distance::Out;
use crate::memory;
use crate::sys::Errno;

/// Where a page's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Phase {
    Resident = 0,
    Staged = 1,
    Compressing = 2,
    Stored = 3,
    Dropped = 4,
}

/// Highest heat: how many passes of the hand a page survives.
pub const HEAT_MAX: u32 = 3;

const COPY: u32 = 1 << 5;
const HERE: u32 = 1 << 6;

/// One page's word, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Word(u32);

impl Word {
    /// A page nobody knows anything of.
    pub const UNKNOWN: Word = Word(0);

    /// A word of this phase, with no heat and no payload.
    pub fn new(phase: Phase) -> Word {
        Word(phase as u32)
    }

    pub fn phase(self) -> Phase {
        match self.0 & 7 {
            0 => Phase::Resident,
            1 => Phase::Staged,
            2 => Phase::Compressing,
            3 => Phase::Stored,
            _ => Phase::Dropped,
        }
    }

    pub fn heat(self) -> u32 {
        self.0 >> 3 & 3
    }

    pub fn payload(self) -> u32 {
        self.0 >> 8
    }

    pub fn with_phase(self, phase: Phase) -> Word {
        Word(self.0 & !7 | phase as u32)
    }

    pub fn with_heat(self, heat: u32) -> Word {
        Word(self.0 & !(3 << 3) | heat.min(HEAT_MAX) << 3)
    }

    /// Whether the pool has something under the page's number.
    pub fn is_in_pool(self) -> bool {
        self.phase() == Phase::Stored || self.has_copy()
    }

    /// Whether a page that is resident is in the pool, too, as it was when it came from there.
    pub fn has_copy(self) -> bool {
        self.0 & COPY != 0
    }

    pub fn with_copy(self, copy: bool) -> Word {
        Word(self.0 & !COPY | if copy { COPY } else { 0 })
    }

    /// Whether what is stored of the page is old: it was brought, and its word left as it was ([`PageTable::note_here`]).
    pub fn is_here(self) -> bool {
        self.phase() == Phase::Stored && self.0 & HERE != 0
    }

    pub fn with_payload(self, payload: u32) -> Word {
        Word(self.0 & 0xff | payload << 8)
    }
}

const FANOUT: usize = 512;
/// Pages of the address space: 48 bits of bytes.
pub const PAGES: u64 = 1 << 36;
/// Address range for nodes: enough for 16 TiB of addresses evicted from.
const NODES_BYTES: usize = 16 << 30;
/// Nodes opened at a time: 1 MiB.
const OPEN_NODES: u32 = 512;

type Node = [u32; FANOUT];

/// The tree. Nodes and leaves are both 512 words of 32 bits; a node's word is the number of a child, 0 for none.
pub struct PageTable {
    nodes: *mut Node,
    used: u32,
    /// Nodes that may be touched.
    opened: u32,
    capacity: u32,
    /// Of the pages that are stored.
    out: Out,
}

// SAFETY: the table owns its mapping; it is reached under the pager's lock.
unsafe impl Send for PageTable {}

impl PageTable {
    /// An empty table, for a memory of so many pages.
    pub fn new(ram_pages: u64) -> Result<PageTable, Errno> {
        let mut bytes = NODES_BYTES;
        let nodes = loop {
            match memory::reserve(bytes) {
                Ok(start) => break start.cast(),
                Err(errno) if bytes <= 16 << 20 => return Err(errno),
                Err(_) => bytes /= 4,
            }
        };
        // Number 0 is "no child"; the root is 1.
        let mut table = PageTable {
            nodes,
            used: 2,
            opened: 0,
            capacity: (bytes / size_of::<Node>()) as u32,
            out: Out::new(ram_pages),
        };
        if table.open_more() { Ok(table) } else { Err(Errno::ENOMEM) }
    }

    fn open_more(&mut self) -> bool {
        if self.opened == self.capacity {
            return false;
        }
        let start = self.nodes as usize + self.opened as usize * size_of::<Node>();
        // SAFETY: a part of the range that was reserved for nodes, touched by nobody yet.
        let opened = unsafe { memory::set_access(start, OPEN_NODES as usize * size_of::<Node>(), true) }.is_ok();
        self.opened += if opened { OPEN_NODES } else { 0 };
        opened
    }

    /// Memory the table holds, bytes.
    pub fn used_bytes(&self) -> u64 {
        u64::from(self.used) * size_of::<Node>() as u64
    }

    fn node(&self, number: u32) -> &Node {
        // SAFETY: numbers are handed out below `used`, inside the mapping, and nodes are never given back.
        unsafe { &*self.nodes.add(number as usize) }
    }

    fn node_mut(&mut self, number: u32) -> &mut Node {
        // SAFETY: as `node`, and `&mut self` makes the reference unique.
        unsafe { &mut *self.nodes.add(number as usize) }
    }

    fn steps(page: u64) -> [usize; 3] {
        [27, 18, 9].map(|shift| (page >> shift) as usize % FANOUT)
    }

    fn leaf(&self, page: u64) -> Option<u32> {
        let mut number = 1;
        for step in Self::steps(page) {
            number = self.node(number)[step];
            if number == 0 {
                return None;
            }
        }
        Some(number)
    }

    /// The word of a page.
    pub fn get(&self, page: u64) -> Word {
        self.leaf(page).map_or(Word::UNKNOWN, |leaf| Word(self.node(leaf)[page as usize % FANOUT]))
    }

    /// Sees to it that any word of a page can be kept. False when the table is full, or gets no memory.
    #[must_use]
    pub fn make_leaf(&mut self, page: u64) -> bool {
        self.leaf_or_new(page).is_some()
    }

    fn leaf_or_new(&mut self, page: u64) -> Option<u32> {
        let mut number = 1;
        for step in Self::steps(page) {
            let child = self.node(number)[step];
            number = if child != 0 {
                child
            } else if self.used == self.opened && !self.open_more() {
                return None;
            } else {
                let fresh = self.used;
                self.used += 1;
                self.node_mut(number)[step] = fresh;
                fresh
            };
        }
        Some(number)
    }

    /// Sets the word of a page. False when the table is full and the word could not be kept.
    #[must_use]
    pub fn set(&mut self, page: u64, word: Word) -> bool {
        let leaf = match self.leaf(page) {
            None if word == Word::UNKNOWN => return true,
            None => self.leaf_or_new(page),
            leaf => leaf,
        };
        let Some(leaf) = leaf else { return false };
        let was = core::mem::replace(&mut self.node_mut(leaf)[page as usize % FANOUT], word.0);
        self.out.note(Word(was), word);
        true
    }

    /// Sets the word of a page whose leaf exists, because it holds a word already.
    pub fn update(&mut self, page: u64, word: Word) {
        let kept = self.set(page, word);
        debug_assert!(kept, "a page with a word has a leaf");
    }

    /// A stored page was brought while the process is about to be copied: by one store, so that a copy has the word before it or after.
    pub fn note_here(&mut self, page: u64) {
        let word = self.get(page);
        if word.phase() == Phase::Stored
            && let Some(leaf) = self.leaf(page)
        {
            self.node_mut(leaf)[page as usize % FANOUT] = word.0 | HERE;
        }
    }

    /// Pages will leave at this time of the eviction clock.
    pub fn pass_to(&mut self, tick: u32) {
        self.out.pass_to(tick);
    }

    /// How many pages are stored that left after this one.
    pub fn left_after(&self, word: Word) -> u64 {
        self.out.left_after(word.payload())
    }

    /// The first page at or after `page` that may have a word, and before `end`: absent subtrees are skipped.
    pub fn next_known(&self, page: u64, end: u64) -> Option<u64> {
        let mut page = page;
        'search: while page < end.min(PAGES) {
            let mut number = 1;
            for (step, shift) in Self::steps(page).into_iter().zip([27, 18, 9]) {
                number = self.node(number)[step];
                if number == 0 {
                    page = ((page >> shift) + 1) << shift;
                    continue 'search;
                }
            }
            return Some(page);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_each_of_its_fields_apart() {
        let word = Word::new(Phase::Stored).with_heat(3).with_payload(0xff_ffff);
        assert_eq!((word.phase(), word.heat(), word.payload()), (Phase::Stored, 3, 0xff_ffff));
        let word = word.with_phase(Phase::Staged).with_heat(0).with_payload(7);
        assert_eq!((word.phase(), word.heat(), word.payload()), (Phase::Staged, 0, 7));
        assert!(!word.has_copy() && word.with_copy(true).has_copy() && word.with_copy(true).with_copy(false) == word);
        let word = word.with_copy(true).with_phase(Phase::Resident).with_heat(2);
        assert_eq!((word.phase(), word.heat(), word.payload(), word.is_in_pool()), (Phase::Resident, 2, 7, true));
    }

    #[test]
    fn that_a_stored_page_is_here_is_known_until_its_word_changes() {
        let mut table = PageTable::new(1 << 14).unwrap();
        let stored = Word::new(Phase::Stored).with_payload(7);
        table.note_here(5);
        assert_eq!(table.get(5), Word::UNKNOWN);
        assert!(table.set(5, stored) && !table.get(5).is_here());
        table.note_here(5);
        assert!(table.get(5).is_here() && table.get(5).payload() == 7);
        table.update(5, Word::new(Phase::Staged).with_payload(1));
        table.update(5, stored);
        assert!(!table.get(5).is_here());
    }

    #[test]
    fn a_page_reads_as_it_was_set_and_its_neighbours_are_unknown() {
        let mut table = PageTable::new(1 << 14).unwrap();
        for page in [0, 1, 511, 512, 1 << 20, PAGES - 1] {
            assert!(table.set(page, Word::new(Phase::Stored).with_payload(page as u32 & 0xffff)));
        }
        assert_eq!(table.get(512).payload(), 512);
        assert_eq!(table.get(2), Word::UNKNOWN);
        assert_eq!(table.get(1 << 30), Word::UNKNOWN);
    }

    #[test]
    fn a_table_that_cannot_grow_says_so_before_a_page_leaves() {
        let mut table = PageTable::new(1 << 14).unwrap();
        table.capacity = table.opened;
        let leaves =
            (0..u64::from(table.opened)).take_while(|&leaf| table.make_leaf(leaf * FANOUT as u64)).count() as u64;
        assert!((1..u64::from(table.opened)).contains(&leaves));
        assert!(table.set(leaves * FANOUT as u64 - 1, Word::new(Phase::Staged)), "it has a leaf");
        assert!(!table.make_leaf(leaves * FANOUT as u64), "it has none, and gets none");
        assert!(table.set(leaves * FANOUT as u64, Word::UNKNOWN), "nothing needs be kept");
    }

    #[test]
    fn a_search_for_known_pages_skips_what_was_never_set() {
        let mut table = PageTable::new(1 << 14).unwrap();
        assert!(table.set(1 << 33, Word::new(Phase::Stored)));
        let found = table.next_known(0, PAGES).unwrap();
        assert!(found <= 1 << 33 && (1 << 33) - found < FANOUT as u64);
        assert_eq!(table.next_known((1 << 33) + FANOUT as u64, PAGES), None);
    }
}
