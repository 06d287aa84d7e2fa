//! Byte ranges as blocks: a part of a block, whole blocks, a part of a block.
//!
//! | range, bytes  | head         | whole blocks | tail          |
//! |---------------|--------------|--------------|---------------|
//! | 0..8192       | -            | 0..2         | -             |
//! | 512..8704     | 512.. of 0   | 1..2         | ..512 of 2    |
//! | 4608..4700    | 512..604 of 1 | -           | -             |
//!
//! Arithmetic only. That head, whole blocks and tail are the range, each byte once, is checked below for random ranges.

use std::ops::Range;

use crate::device::BLOCK_BYTES;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Bytes of one block, but not all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Which block.
    pub block: u64,
    /// Which of its bytes; never empty and never all.
    pub within: Range<usize>,
}

/// A range of bytes, cut at the borders of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    /// The bytes before the first border, or all of them if they lie inside one block.
    pub head: Option<Part>,
    /// The blocks that are covered whole; empty if none is.
    pub whole: Range<u64>,
    /// The bytes after the last border.
    pub tail: Option<Part>,
}

impl Split {
    /// Cuts `length_bytes` from `offset_bytes` on; the end must not pass 2^64, which a range inside a device never does.
    pub fn new(offset_bytes: u64, length_bytes: u64) -> Split {
        let end = offset_bytes + length_bytes;
        let (first, last) = (offset_bytes.div_ceil(BLOCK), end / BLOCK);
        let before = (offset_bytes % BLOCK) as usize;
        let after = (end % BLOCK) as usize;
        if first > last {
            // Neither a border nor a whole block: the range lies inside block `last`.
            let inside = Part { block: last, within: before..after };
            return Split { head: (before < after).then_some(inside), whole: last..last, tail: None };
        }
        Split {
            head: (before != 0 && length_bytes != 0)
                .then_some(Part { block: offset_bytes / BLOCK, within: before..BLOCK_BYTES }),
            whole: first..last,
            tail: (after != 0 && length_bytes != 0).then_some(Part { block: last, within: 0..after }),
        }
    }

    /// How many bytes of the range come before the whole blocks.
    pub fn head_bytes(&self) -> usize {
        self.head.as_ref().map_or(0, |part| part.within.len())
    }

    /// How many bytes the whole blocks are.
    pub fn whole_bytes(&self) -> u64 {
        (self.whole.end - self.whole.start) * BLOCK
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The range put together again from its parts, or `None` if they are not adjacent.
    fn joined(split: &Split) -> Option<Range<u64>> {
        let part = |part: &Part| {
            assert!(!part.within.is_empty() && part.within.len() < BLOCK_BYTES, "{part:?} is no part");
            part.block * BLOCK + part.within.start as u64..part.block * BLOCK + part.within.end as u64
        };
        let whole = (!split.whole.is_empty()).then_some(split.whole.start * BLOCK..split.whole.end * BLOCK);
        let pieces = [split.head.as_ref().map(part), whole, split.tail.as_ref().map(part)];
        let mut all: Option<Range<u64>> = None;
        for piece in pieces.into_iter().flatten() {
            match &mut all {
                None => all = Some(piece),
                Some(all) if all.end == piece.start => all.end = piece.end,
                Some(_) => return None,
            }
        }
        Some(all.unwrap_or(0..0))
    }

    proptest! {
        #[test]
        fn the_parts_of_a_range_are_the_range(offset in 0u64..40_000, length in 0u64..40_000, far in any::<bool>()) {
            let offset = offset + if far { (1 << 47) - 20_000 } else { 0 };
            let split = Split::new(offset, length);
            let expected = if length == 0 { 0..0 } else { offset..offset + length };
            prop_assert_eq!(joined(&split), Some(expected));
            let tail = split.tail.as_ref().map_or(0, |part| part.within.len() as u64);
            prop_assert_eq!(split.head_bytes() as u64 + split.whole_bytes() + tail, length);
        }

        #[test]
        fn whole_blocks_have_no_edges(first in 0u64..1000, count in 0u64..1000) {
            let split = Split::new(first * BLOCK, count * BLOCK);
            prop_assert_eq!(split, Split { head: None, whole: first..first + count, tail: None });
        }
    }

    #[test]
    fn the_examples_of_the_header_hold() {
        let part = |block, within| Some(Part { block, within });
        assert_eq!(Split::new(0, 8192), Split { head: None, whole: 0..2, tail: None });
        assert_eq!(Split::new(512, 8192), Split { head: part(0, 512..4096), whole: 1..2, tail: part(2, 0..512) });
        assert_eq!(Split::new(4608, 92), Split { head: part(1, 512..604), whole: 1..1, tail: None });
    }
}
