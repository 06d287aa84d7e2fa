//! Memory that direct input and output takes: aligned to blocks.

use crate::device::BLOCK_BYTES;

pub(crate) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length_bytes: usize,
}

impl Aligned {
    /// `length_bytes` zeroes, of which none takes memory before it is written to.
    pub fn new(length_bytes: usize) -> Aligned {
        let bytes = vec![0; length_bytes + BLOCK_BYTES];
        let start = bytes.as_ptr().align_offset(BLOCK_BYTES);
        Aligned { bytes, start, length_bytes }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.length_bytes]
    }
}
