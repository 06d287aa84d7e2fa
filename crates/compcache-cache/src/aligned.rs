//! Memory that direct input and output takes: aligned to pages.

use compcache_store::Page;

const PAGE_BYTES: usize = 4096;

/// Bytes that begin where a page does.
pub struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length_bytes: usize,
}

impl Aligned {
    /// `length_bytes` zeroes, of which none takes memory before it is written to.
    pub fn new(length_bytes: usize) -> Aligned {
        let bytes = vec![0; length_bytes + PAGE_BYTES];
        let start = bytes.as_ptr().align_offset(PAGE_BYTES);
        Aligned { bytes, start, length_bytes }
    }

    /// Whole pages of them.
    pub fn pages(&self) -> &[Page] {
        self.bytes[self.start..][..self.length_bytes].as_chunks().0
    }

    /// All of them.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.length_bytes]
    }
}
