//! Pages, their indexes, and the one cheap test every write begins with: is the page one word repeated?
//!
//! A page index counts pages, never bytes. 2^36 pages of 4 KiB are the 48 bits of address space a process has, so the
//! index of a page in a process is its address divided by the page size, with nothing to translate.
//!
//! Arithmetic only: no memory of its own, no locks, no `unsafe`.

/// Bytes in a page. Machines with larger pages are not served yet: x86-64 and the usual arm64 kernels have this one.
pub const PAGE_SIZE: usize = 4096;

/// The content of one page.
pub type Page = [u8; PAGE_SIZE];

/// The position of a page in a pool, counted in pages from zero. Valid below [`PageIndex::LIMIT`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// The first index that is out of range: 2^36, the pages of a 48-bit address space.
    pub const LIMIT: u64 = 1 << 36;

    /// Whether a pool has such a page.
    pub const fn is_valid(self) -> bool {
        self.0 < Self::LIMIT
    }

    /// The index `pages` further on. May be out of range; what it is given to will say so.
    pub const fn plus(self, pages: u64) -> PageIndex {
        PageIndex(self.0.saturating_add(pages))
    }
}

const WORD: usize = size_of::<u64>();

/// The eight-byte word that `page` repeats, or `None` when it holds anything else.
///
/// The last word is compared first: pages that begin with a run of zeroes are common, pages that also end in it are
/// mostly same-filled.
///
/// # Source
/// `page_same_filled()`, Linux `drivers/block/zram/zram_drv.c`.
pub(crate) fn repeated_word(page: &Page) -> Option<u64> {
    let word_at = |at: usize| u64::from_ne_bytes(page[at..at + WORD].try_into().expect("eight bytes"));
    let word = word_at(0);
    if word_at(PAGE_SIZE - WORD) != word {
        return None;
    }
    let pattern = word.to_ne_bytes();
    let (words, _) = page.as_chunks::<WORD>();
    // Eight words at a time: one branch a cache line, and the comparison inside is vectorised.
    let (lines, _) = words.as_chunks::<8>();
    lines.iter().all(|line| line.iter().fold(true, |same, w| same & (*w == pattern))).then_some(word)
}

/// Fills `page` with `word`, the inverse of [`repeated_word`].
pub(crate) fn fill(page: &mut Page, word: u64) {
    let pattern = word.to_ne_bytes();
    for chunk in page.as_chunks_mut::<WORD>().0 {
        *chunk = pattern;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_word_is_found_and_refilled() {
        for word in [0, 1, u64::MAX, 0x0102_0304_0506_0708] {
            let mut page = [0xaa; PAGE_SIZE];
            fill(&mut page, word);
            assert_eq!(repeated_word(&page), Some(word));
        }
    }

    #[test]
    fn one_different_byte_anywhere_makes_a_page_not_same_filled() {
        let mut page = [0x5a; PAGE_SIZE];
        for at in 0..PAGE_SIZE {
            page[at] ^= 1;
            assert_eq!(repeated_word(&page), None, "byte {at}");
            page[at] ^= 1;
        }
    }
}
