//! LZ4 by `lz4_flex`: its table is made once, and its decoder is the one without `unsafe`.

use alloc::boxed::Box;

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into};

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

/// Decodes `object` into `page`; `false` if it is not a page.
#[inline]
pub(crate) fn decompress(object: &[u8], page: &mut Page) -> bool {
    matches!(decompress_into(object, page), Ok(PAGE_SIZE))
}
