//! What each page must hold, and how contents follow from it.

use compcache_testkit::PAGE_BYTES as PAGE;
use compcache_testkit::seed::scramble;

use crate::os;

/// Eight-byte words in a page.
pub const WORDS: usize = PAGE / 8;

/// What a page must hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Never written, or discarded.
    Zero,
    /// Page of this generation.
    Written(u32),
    /// The same, with word `.1` replaced by the one of generation `.2`.
    Patched(u32, u16, u32),
    /// Given to MADV_FREE: of this generation, or zero from some moment on.
    Freed(u32),
}

/// Pages that follow each other in memory, each with its model.
pub struct Region {
    pub at: usize,
    pub tag: u64,
    /// The number of the first page within its tag: a region that was cut keeps its contents.
    pub first: usize,
    pub pages: Vec<Content>,
}

impl Region {
    /// Cuts off what begins with page `from`.
    pub fn split_off(&mut self, from: usize) -> Self {
        let pages = self.pages.split_off(from);
        Self { at: self.address(from), tag: self.tag, first: self.first + from, pages }
    }

    pub fn new(tag: u64, pages: usize, filled: bool) -> Self {
        let mut region = Self { at: os::map(pages), tag, first: 0, pages: vec![Content::Zero; pages] };
        if filled {
            for page in 0..pages {
                region.write(page, 1);
            }
        }
        region
    }

    pub fn address(&self, page: usize) -> usize {
        self.at + page * PAGE
    }

    pub fn write(&mut self, page: usize, generation: u32) {
        fill(os::page_mut(self.address(page)), self.tag, self.first + page, generation);
        self.pages[page] = Content::Written(generation);
    }

    /// Changes one word and leaves the rest, as most writes of programs do.
    pub fn patch(&mut self, page: usize, word: usize, generation: u32) {
        let (base, word) = match self.pages[page] {
            Content::Written(base) => (base, word),
            Content::Patched(base, word, _) => (base, usize::from(word)),
            Content::Zero | Content::Freed(_) => return self.write(page, generation),
        };
        os::page_mut(self.address(page))[word] = patch_word(self.tag, self.first + page, generation);
        self.pages[page] = Content::Patched(base, word as u16, generation);
    }

    /// The first wrong word: its index, what should be there and what is.
    pub fn compare(&mut self, page: usize) -> Result<(), (usize, u64, u64)> {
        let found = os::page(self.address(page));
        let mut expected = [0u64; WORDS];
        match self.pages[page] {
            Content::Zero => {}
            Content::Written(generation) => fill(&mut expected, self.tag, self.first + page, generation),
            Content::Patched(generation, word, patched) => {
                fill(&mut expected, self.tag, self.first + page, generation);
                expected[usize::from(word)] = patch_word(self.tag, self.first + page, patched);
            }
            Content::Freed(generation) => fill(&mut expected, self.tag, self.first + page, generation),
        }
        if *found == expected {
            return Ok(());
        }
        // Looked at last: it may have gone a moment ago, and once gone it is gone.
        if matches!(self.pages[page], Content::Freed(_)) && found.iter().all(|word| *word == 0) {
            self.pages[page] = Content::Zero;
            return Ok(());
        }
        match (0..WORDS).find(|&word| found[word] != expected[word]) {
            Some(word) => Err((word, expected[word], found[word])),
            None => Ok(()),
        }
    }
}

fn patch_word(tag: u64, page: usize, generation: u32) -> u64 {
    scramble(tag ^ 0x7061_7463 ^ ((page as u64) << 32) ^ u64::from(generation))
}

const TOKENS: [&[u8; 8]; 16] = [
    b"the page",
    b" of cold",
    b" memory ",
    b"is moved",
    b" out and",
    b" faulted",
    b" in when",
    b" it is, ",
    b"touched.",
    b" {\"key\":",
    b" \"value\"",
    b", null},",
    b"<a href=",
    b"</span> ",
    b"    retu",
    b"rn self.",
];

/// Content of mixed kinds: text, records with pointers, noise, and pages that repeat one word.
fn fill(to: &mut [u64; WORDS], tag: u64, page: usize, generation: u32) {
    let seed = scramble(tag ^ scramble((page as u64) << 32 | u64::from(generation)));
    let mut step = seed;
    let mut next = || {
        step = step.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        step >> 33
    };
    match seed % 8 {
        0 => to.fill(scramble(seed) & !0xff | 1),
        1 => to.iter_mut().for_each(|word| *word = next() << 33 ^ next() << 11 ^ next()),
        2 | 3 => {
            for record in to.chunks_exact_mut(8) {
                record.copy_from_slice(&[seed, 0, 0x7f00_0000_0000 + next() % 65536 * 64, next() % 100, 0, 0, !0, 1]);
            }
        }
        _ => {
            to.iter_mut().for_each(|word| *word = u64::from_le_bytes(*TOKENS[(next() % 16) as usize]));
            to.iter_mut().step_by(32).for_each(|word| *word = seed);
        }
    }
}
