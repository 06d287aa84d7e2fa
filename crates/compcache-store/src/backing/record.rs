//! How a segment is laid out, and how a slot names a record in it.
//!
//! | bytes of a segment             | what                                                                 |
//! |--------------------------------|----------------------------------------------------------------------|
//! | 0..                            | records: the sealed object, its tag of 16 bytes, zeroes up to 8      |
//! | ..                             | nothing                                                              |
//! | end - 32 - 16 n..end - 32      | the list, sealed: of each record the pool, the page, where it begins |
//! | end - 32..end - 16             | the tag of the list                                                  |
//! | end - 16..end - 8              | n                                                                    |
//!
//! A page compressed to 1300 bytes takes 1320 and 16 in the list. The list is for cleaning, which asks the slots whether a
//! record is still theirs; nothing else reads it, and a list that is damaged costs room and no page.
//!
//! A slot has 32 bits in which a stored object has its checksum; here they are a mixture of the flight that wrote the
//! segment, the place, length and codec ([`check`]). So a slot that is damaged, or older than what its segment holds now, is
//! noticed before anything is opened. What was read is checked by its tag alone.
//!
//! Arithmetic only.

use crate::codec::CodecId;
use crate::page::{PAGE_SIZE, PageIndex};

/// Records begin at multiples of this, in bytes.
pub(crate) const UNIT: usize = 8;
/// What sealing adds.
pub(crate) const TAG_BYTES: usize = 16;
/// What a record costs in the list of its segment.
pub(crate) const LISTED_BYTES: usize = 16;
/// What stands at the end of a segment: the tag of the list, how long it is, and nothing.
pub(crate) const TRAILER_BYTES: usize = 32;
/// The most that is read for one record: it may begin and end in the middle of a block.
pub(crate) const READ_BYTES_MAX: usize = 3 * PAGE_SIZE;

const INDEX_BITS: u32 = 36;
const _: () = assert!(PageIndex::LIMIT == 1 << INDEX_BITS);
const _: () = assert!(record_bytes(PAGE_SIZE) + PAGE_SIZE - UNIT <= READ_BYTES_MAX);

/// Where a record begins, in units of 8 bytes from the start of the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(pub u64);

impl Place {
    /// The largest backing: as many bits as an arena has.
    pub const BACKING_BYTES_MAX: u64 = (1 << INDEX_BITS) * UNIT as u64;

    /// The byte `within` a segment.
    pub fn new(segment: u32, segment_bytes: usize, within: usize) -> Place {
        Place((u64::from(segment) * segment_bytes as u64 + within as u64) / UNIT as u64)
    }

    pub fn byte(self) -> u64 {
        self.0 * UNIT as u64
    }

    /// The segment, and the byte in it.
    pub fn split(self, segment_bytes: usize) -> (u32, usize) {
        ((self.byte() / segment_bytes as u64) as u32, (self.byte() % segment_bytes as u64) as usize)
    }
}

/// What a slot says of an object on the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sealed {
    /// `None`: the page itself, not compressed.
    pub codec: Option<CodecId>,
    pub place: Place,
    /// Of the object, before it was sealed.
    pub length: u16,
    pub check: u32,
}

impl Sealed {
    /// The slot of an object that the flight `flight` wrote to `place`.
    pub fn new(flight: u64, place: Place, length: u16, codec: Option<CodecId>) -> Sealed {
        Sealed { codec, place, length, check: check(flight, place, length, codec) }
    }

    /// Whether it is one of that flight's, and undamaged.
    pub fn is_of(&self, flight: u64) -> bool {
        check(flight, self.place, self.length, self.codec) == self.check
    }
}

/// What a record of an object takes, in bytes.
pub(crate) const fn record_bytes(length: usize) -> usize {
    (length + TAG_BYTES).next_multiple_of(UNIT)
}

/// How an object is to be read, for the tag and for [`check`].
pub(crate) fn reading(length: u16, codec: Option<CodecId>) -> u32 {
    u32::from(length) | codec.map_or(0, |id| u32::from(id.0) + 1) << 16
}

fn check(flight: u64, place: Place, length: u16, codec: Option<CodecId>) -> u32 {
    let mut mixed = flight.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ place.0;
    for word in [u64::from(reading(length, codec)), flight] {
        mixed = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) ^ word;
    }
    ((mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32) as u32
}

/// One line of the list of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    /// The pool's serial number, as far as there is room for it. Only a hint, as all of this: the slot decides.
    pub pool: u32,
    pub index: PageIndex,
    /// The byte in the segment where the record begins.
    pub within: u32,
}

impl Listed {
    /// The bits of a serial number that a line keeps.
    pub const POOL_MASK: u64 = (1 << (64 - INDEX_BITS)) - 1;

    pub fn pack(&self) -> [u8; LISTED_BYTES] {
        let page = u64::from(self.pool) << INDEX_BITS | self.index.0;
        let mut bytes = [0; LISTED_BYTES];
        bytes[..8].copy_from_slice(&page.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.within.to_le_bytes());
        bytes
    }

    pub fn unpack(bytes: &[u8; LISTED_BYTES]) -> Listed {
        let [page, place] = [0, 8].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes")));
        Listed {
            pool: (page >> INDEX_BITS) as u32,
            index: PageIndex(page & (PageIndex::LIMIT - 1)),
            within: place as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_place_and_a_line_survive_packing(
            segment in 0u32..1000, blocks in 16usize..4096, within in 0usize..8192, pool in 0u32..1 << 28, index in 0u64..1 << 36,
        ) {
            let (segment_bytes, within) = (blocks * 4096, within * UNIT);
            prop_assert_eq!(Place::new(segment, segment_bytes, within).split(segment_bytes), (segment, within));
            let line = Listed { pool, index: PageIndex(index), within: within as u32 };
            prop_assert_eq!(Listed::unpack(&line.pack()), line);
        }
    }

    #[test]
    fn a_slot_of_another_flight_or_with_a_flipped_bit_is_none_of_this_flight() {
        let sealed = Sealed::new(7, Place(0x1234), 1300, Some(CodecId(1)));
        assert!(sealed.is_of(7));
        assert!((0..10_000).filter(|flight| *flight != 7).all(|flight| !sealed.is_of(flight)));
        for bit in 0..36 {
            assert!(!Sealed { place: Place(0x1234 ^ 1 << bit), ..sealed }.is_of(7), "bit {bit} of the place");
        }
        for bit in 0..12 {
            assert!(!Sealed { length: ((1299 ^ 1 << bit) + 1) as u16, ..sealed }.is_of(7), "bit {bit} of the length");
        }
        for codec in [None, Some(CodecId(0)), Some(CodecId(5))] {
            assert!(!Sealed { codec, ..sealed }.is_of(7), "{codec:?}");
        }
    }
}
