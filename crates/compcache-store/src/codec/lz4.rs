//! LZ4: the encoder of `lz4_flex`, whose table is made once, and the decoder of the C library.
//!
//! Why: docs/decisions/0016-lz4-decoder.md. The C decoder stays within both its bounds, whatever it is given; but of a
//! damaged object it may make a page with bytes that were in the buffer before. The checksum comes first.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use core::ffi::c_int;

use lz4_flex::block::{CompressTable, compress_into_with_table};

use crate::error::StoreError;
use crate::page::{PAGE_SIZE, Page};

pub(crate) struct Lz4 {
    table: Box<CompressTable>,
}

impl Lz4 {
    pub fn new() -> Lz4 {
        Lz4 { table: Box::new(CompressTable::small()) }
    }

    /// Compresses `page` into `output` and returns the length.
    #[inline]
    pub fn compress(&mut self, page: &Page, output: &mut [u8]) -> Result<usize, StoreError> {
        compress_into_with_table(page, output, &mut self.table).map_err(|_| StoreError::CodecFailed)
    }
}

/// Decodes `object`, at most a page long, into `page`; `false` if it is not a page.
#[inline]
pub(crate) fn decompress(object: &[u8], page: &mut Page) -> bool {
    const ROOM: c_int = PAGE_SIZE as c_int;
    // SAFETY: reads the object's bytes alone, and writes to the page alone.
    let written = unsafe {
        lz4_sys::LZ4_decompress_safe(object.as_ptr().cast(), page.as_mut_ptr().cast(), object.len() as c_int, ROOM)
    };
    written == ROOM
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// What both decoders take is the same page to both.
        #[test]
        fn a_damaged_object_is_refused_or_a_page(word: u64, at in 0..PAGE_SIZE, damage in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4)) {
            let mut page: Page = core::array::from_fn(|i| b"a page of text, and more of it; "[i * i / 37 % 32]);
            page[at / 8 * 8..][..8].copy_from_slice(&word.to_le_bytes());
            let mut object = [0; PAGE_SIZE + 512];
            let length = Lz4::new().compress(&page, &mut object).unwrap();
            let object = &mut object[..length];
            damage.iter().for_each(|&(at, byte)| object[at % length] = byte);
            let (mut one, mut other) = ([0x11; PAGE_SIZE], [0x22; PAGE_SIZE]);
            let decoded = decompress(object, &mut one);
            let checked = matches!(lz4_flex::block::decompress_into(object, &mut other), Ok(PAGE_SIZE));
            if decoded && checked {
                prop_assert_eq!(one, other);
            }
            prop_assert!(!damage.is_empty() || (decoded && one == page));
        }
    }
}
