//! The checksum of an object: 32 bits over its stored bytes and over how they are to be read.
//!
//! Length and codec are part of it, so that a damaged slot cannot have good bytes decoded in a wrong way. Computed over
//! what is stored, not over the page: it is shorter, and the check comes before a decoder sees the bytes.
//!
//! Which function, and what it costs: docs/decisions/0011-checksum.md.

use xxhash_rust::xxh3::xxh3_64;

use crate::codec::CodecId;

/// The checksum of `bytes`, stored raw (`None`) or by a codec.
#[inline]
pub(crate) fn of(bytes: &[u8], codec: Option<CodecId>) -> u32 {
    // Mixed in afterwards: a seed would make the function prepare 192 bytes of secret for every object.
    let reading = codec.map_or(0, |id| u32::from(id.0) + 1);
    let hash = xxh3_64(bytes);
    (hash ^ hash >> 32) as u32 ^ reading.wrapping_mul(0x9e37_79b9) ^ (bytes.len() as u32).wrapping_mul(0x85eb_ca6b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_single_bit_counts_and_so_do_length_and_codec() {
        let bytes: [u8; 300] = core::array::from_fn(|i| (i * 7) as u8);
        let sum = of(&bytes, None);
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(of(&flipped, None), sum, "bit {bit}");
        }
        assert_ne!(of(&bytes[..299], None), sum);
        assert_ne!(of(&bytes, Some(CodecId(0))), sum);
        assert_ne!(of(&bytes, Some(CodecId(0))), of(&bytes, Some(CodecId(1))));
    }
}
