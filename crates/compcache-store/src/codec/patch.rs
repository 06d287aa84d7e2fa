//! Patches: what differs between two pages, a few bytes at a time.
//!
//! A sequence of changed words, in their order. Each begins with two bytes: which of the 512 words (9 bits), which of its
//! bytes is the first that differs (3), and from there to the last, how many less one (3); those bytes follow, as they
//! are now. So a counter that changed takes three or four bytes. Of two pages there is exactly one patch.
//!
//! Arithmetic only.

use crate::page::Page;

const WORD: usize = 8;
const LINE: usize = 64;

/// Writes what makes `page` of `base` to the start of `patch`, and returns its length; `None` if it does not fit.
pub(super) fn diff(base: &Page, page: &Page, patch: &mut [u8]) -> Option<usize> {
    let mut length = 0;
    let lines = base.as_chunks::<LINE>().0.iter().zip(page.as_chunks::<LINE>().0);
    for (line, (before, after)) in lines.enumerate().filter(|(_, (before, after))| before != after) {
        let words = before.as_chunks::<WORD>().0.iter().zip(after.as_chunks::<WORD>().0);
        for (word, (before, after)) in words.enumerate() {
            let changed = u64::from_le_bytes(*before) ^ u64::from_le_bytes(*after);
            if changed == 0 {
                continue;
            }
            let (first, last) = (changed.trailing_zeros() as usize / 8, 7 - changed.leading_zeros() as usize / 8);
            let head = (line * (LINE / WORD) + word) << 6 | first << 3 | (last - first);
            let end = length + 2 + last - first + 1;
            let entry = patch.get_mut(length..end)?;
            entry[..2].copy_from_slice(&(head as u16).to_le_bytes());
            entry[2..].copy_from_slice(&after[first..=last]);
            length = end;
        }
    }
    Some(length)
}

/// Makes of a base the page that it was for [`diff`]. `false` if `patch` is none; `page` holds nothing of value then.
#[must_use]
pub(super) fn apply(mut patch: &[u8], page: &mut Page) -> bool {
    while let Some((head, rest)) = patch.split_first_chunk::<2>() {
        let head = usize::from(u16::from_le_bytes(*head));
        let (word, first, bytes) = (head >> 6, head >> 3 & 7, (head & 7) + 1);
        let start = word * WORD + first;
        let (Some((changed, rest)), true) = (rest.split_at_checked(bytes), word < 512 && first + bytes <= WORD) else {
            return false;
        };
        page[start..start + bytes].copy_from_slice(changed);
        patch = rest;
    }
    patch.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PAGE_SIZE;
    use proptest::prelude::*;

    fn page(seed: usize) -> Page {
        core::array::from_fn(|i| ((i * 31) ^ (i / 7 * seed)) as u8)
    }

    proptest! {
        #[test]
        fn a_patched_base_is_the_page(changes in proptest::collection::vec((0..PAGE_SIZE, any::<u8>()), 0..60)) {
            let base = page(3);
            let mut changed = base;
            changes.iter().for_each(|&(at, byte)| changed[at] = byte);
            let mut patch = [0; 600];
            let length = diff(&base, &changed, &mut patch).expect("ten bytes a change at most");
            let mut back = base;
            prop_assert!(apply(&patch[..length], &mut back));
            prop_assert_eq!(back, changed);
            prop_assert_eq!(length == 0, base == changed);
            if length > 0 {
                prop_assert_eq!(diff(&base, &changed, &mut patch[..length - 1]), None);
            }
        }

        #[test]
        fn anything_else_is_refused_or_applied_and_never_more(patch in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = apply(&patch, &mut page(5));
        }
    }

    #[test]
    fn a_counter_takes_three_bytes_and_a_word_ten() {
        let base = page(1);
        let mut changed = base;
        changed[PAGE_SIZE - 3] ^= 1;
        assert_eq!(diff(&base, &changed, &mut [0; 16]), Some(3));
        changed[..8].iter_mut().for_each(|byte| *byte ^= 1);
        assert_eq!(diff(&base, &changed, &mut [0; 16]), Some(13));
        assert_eq!(diff(&base, &page(2), &mut [0; 512]), None);
    }
}
