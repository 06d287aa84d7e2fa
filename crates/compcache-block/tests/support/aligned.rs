//! Bytes at an address that direct I/O takes.

use compcache_block::BLOCK_BYTES;

pub struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    pub fn new(length: usize) -> Aligned {
        let bytes = vec![0; length + BLOCK_BYTES];
        let start = bytes.as_ptr().align_offset(BLOCK_BYTES);
        Aligned { bytes, start, length }
    }

    pub fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.length]
    }
}
