//! A slot: the twelve bytes the store knows about one page.
//!
//! Two words, kept apart in a leaf (structure of arrays, so that looking for absent pages reads four bytes a page):
//!
//! | meta, bits | means                                              |
//! |------------|----------------------------------------------------|
//! | 0          | locked                                             |
//! | 1          | somebody sleeps on the lock                        |
//! | 2..5       | state                                              |
//! | 5..8       | codec that wrote the object; 3: none, it is raw    |
//! | 8..16      | age: the store's age when last written or read     |
//! | 16..28     | length of the object less one                      |
//! | 28..32     | checksum, low four bits                            |
//!
//! | payload, bits | a stored object, or one on the backing | a same-filled page |
//! |---------------|----------------------------------------|--------------------|
//! | 0..36         | location, in units of 8 bytes          | the word, whole    |
//! | 36..64        | checksum, high 28 bits                 |                    |
//!
//! A page in a group ([`crate::groups`]) has the state of a same-filled one, and all ones where that has no codec. Its payload
//! is the number of the group and a checksum of the page, 32 bits each; its place in the group is where length begins, behind it
//! whether it was read since, and 11 bits that check number and place.
//!
//! So 512 GiB of arena, a 32-bit checksum and lengths of 1..=4096 fit with no bit to spare; and as much of a backing, so that
//! a page there costs no more than one in memory. A same-filled page keeps a
//! 16-bit check of its word where length and checksum would be. State zero is absent, so fresh memory is an empty leaf.
//!
//! The lock bit (see [`word`]) guards both words and the object they lead to.
//!
//! Arithmetic only. Evidence and alternatives: docs/decisions/0012-slot-and-arena-layout.md.

pub(crate) mod word;

use crate::arena::Location;
use crate::backing::record::{Place, Sealed};
use crate::codec::CodecId;
use crate::groups::GroupId;
use crate::page::PAGE_SIZE;

pub(crate) const LOCKED: u32 = 1 << 0;
pub(crate) const WAITERS: u32 = 1 << 1;
const STATE_SHIFT: u32 = 2;
const CODEC_SHIFT: u32 = 5;
const AGE_SHIFT: u32 = 8;
const LENGTH_SHIFT: u32 = 16;
const CHECK_SHIFT: u32 = 28;
const STATE_MASK: u32 = 0b111;
const CODEC_MASK: u32 = CodecId::MASK as u32;
const LENGTH_MASK: u32 = 0xfff;
const CHECK_LOW_BITS: u32 = 32 - CHECK_SHIFT;
const LOCATION_BITS: u32 = Location::BITS;
const LOCATION_MASK: u64 = (1 << LOCATION_BITS) - 1;

const _: () = assert!(LOCATION_BITS + 32 - CHECK_LOW_BITS == 64);
const _: () = assert!(PAGE_SIZE - 1 == LENGTH_MASK as usize);
const _: () = assert!(LENGTH_SHIFT + LENGTH_MASK.count_ones() == CHECK_SHIFT);

// Two bits apart, so that one damaged bit makes none of them another.
const ABSENT: u32 = 0b000;
const SAME_FILLED: u32 = 0b011;
const STORED: u32 = 0b101;
const ON_BACKING: u32 = 0b110;

/// The codec number of an object that is the page itself.
const RAW: u32 = 3;
/// What stands for a codec in the slot of a page in a group. Three bits from that of a same-filled page, whose state it shares.
const IN_GROUP: u32 = CODEC_MASK;
const PLACE_SHIFT: u32 = LENGTH_SHIFT;
const PLACE_MASK: u32 = 0xf;
const READ_ONCE: u32 = 1 << 20;
const MEMBER_CHECK_SHIFT: u32 = 21;

/// What a slot says about its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Never written, or discarded.
    Absent,
    /// One word repeated; holds no object.
    SameFilled { word: u64 },
    /// An object in the arena.
    Stored(Object),
    /// An object on the pool's backing.
    OnBacking(Sealed),
    /// One page of a group in the arena.
    Grouped(Member),
    /// The words contradict themselves: memory has been damaged.
    Damaged,
}

/// Where an object is, how long, and what it must hash to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Object {
    /// `None`: the page itself, not compressed.
    pub codec: Option<CodecId>,
    pub location: Location,
    pub length: u16,
    pub checksum: u32,
}

/// Which page of which group, and what it must hash to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub group: GroupId,
    /// 0..16.
    pub place: u8,
    /// It was read since it is in the group.
    pub read_once: bool,
    /// Of the page itself.
    pub checksum: u32,
}

impl Member {
    /// Spreads number and place over the 11 bits that check them.
    fn check(group: GroupId, place: u32) -> u32 {
        ((u64::from(group.0) << 4 | u64::from(place)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as u32
    }
}

/// Spreads a same-filled word over the 16 bits that check it.
fn word_check(word: u64) -> u32 {
    (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u32
}

impl Slot {
    /// The two words; lock bits are clear.
    pub fn pack(self, age: u8) -> (u32, u64) {
        let head = |state: u32| state << STATE_SHIFT | u32::from(age) << AGE_SHIFT;
        match self {
            Slot::Absent | Slot::Damaged => (0, 0),
            Slot::SameFilled { word } => (head(SAME_FILLED) | word_check(word) << LENGTH_SHIFT, word),
            Slot::Grouped(Member { group, place, read_once, checksum }) => {
                let (place, read_once) = (u32::from(place), if read_once { READ_ONCE } else { 0 });
                let check = Member::check(group, place) << MEMBER_CHECK_SHIFT;
                let meta = head(SAME_FILLED) | IN_GROUP << CODEC_SHIFT | place << PLACE_SHIFT | read_once | check;
                (meta, u64::from(group.0) | u64::from(checksum) << 32)
            }
            Slot::OnBacking(Sealed { codec, place, length, check }) => {
                with_object(head(ON_BACKING), codec, place.0, length, check)
            }
            Slot::Stored(Object { codec, location, length, checksum }) => {
                with_object(head(STORED), codec, location.0, length, checksum)
            }
        }
    }

    /// What the two words mean.
    pub fn unpack(meta: u32, payload: u64) -> Slot {
        match state(meta) {
            ABSENT if meta == 0 => Slot::Absent,
            SAME_FILLED if codec_bits(meta) == IN_GROUP => member(meta, payload),
            SAME_FILLED if codec_bits(meta) == 0 && meta >> LENGTH_SHIFT == word_check(payload) => {
                Slot::SameFilled { word: payload }
            }
            ON_BACKING => Slot::OnBacking(Sealed {
                codec: codec(meta),
                place: Place(payload & LOCATION_MASK),
                length: length(meta),
                check: checksum(meta, payload),
            }),
            STORED => Slot::Stored(Object {
                codec: codec(meta),
                location: Location(payload & LOCATION_MASK),
                length: length(meta),
                checksum: checksum(meta, payload),
            }),
            _ => Slot::Damaged,
        }
    }
}

/// The two words of an object, wherever it is.
fn with_object(head: u32, codec: Option<CodecId>, location: u64, length: u16, checksum: u32) -> (u32, u64) {
    let codec = codec.map_or(RAW, |id| u32::from(id.0));
    let length = u32::from(length) - 1;
    let meta = head | codec << CODEC_SHIFT | length << LENGTH_SHIFT | checksum << CHECK_SHIFT;
    (meta, location | u64::from(checksum >> CHECK_LOW_BITS) << LOCATION_BITS)
}

fn member(meta: u32, payload: u64) -> Slot {
    let (group, place) = (GroupId(payload as u32), meta >> PLACE_SHIFT & PLACE_MASK);
    match meta >> MEMBER_CHECK_SHIFT == Member::check(group, place) {
        true => Slot::Grouped(Member {
            group,
            place: place as u8,
            read_once: meta & READ_ONCE != 0,
            checksum: (payload >> 32) as u32,
        }),
        false => Slot::Damaged,
    }
}

fn codec_bits(meta: u32) -> u32 {
    meta >> CODEC_SHIFT & CODEC_MASK
}

fn codec(meta: u32) -> Option<CodecId> {
    Some(codec_bits(meta)).filter(|id| *id != RAW).map(|id| CodecId(id as u8))
}

/// The length of the object of a page that has one.
pub(crate) fn length(meta: u32) -> u16 {
    (meta >> LENGTH_SHIFT & LENGTH_MASK) as u16 + 1
}

fn checksum(meta: u32, payload: u64) -> u32 {
    meta >> CHECK_SHIFT | ((payload >> LOCATION_BITS) as u32) << CHECK_LOW_BITS
}

fn state(meta: u32) -> u32 {
    meta >> STATE_SHIFT & STATE_MASK
}

/// Whether the page is there in any form. Needs no lock: one word decides.
pub(crate) fn is_present(meta: u32) -> bool {
    state(meta) != ABSENT
}

/// Whether the page is one word repeated.
pub(crate) fn is_same_filled(meta: u32) -> bool {
    state(meta) == SAME_FILLED && codec_bits(meta) != IN_GROUP
}

/// Whether the page is in a group.
pub(crate) fn is_grouped(meta: u32) -> bool {
    state(meta) == SAME_FILLED && codec_bits(meta) == IN_GROUP
}

/// Whether the page is on the backing.
pub(crate) fn is_on_backing(meta: u32) -> bool {
    state(meta) == ON_BACKING
}

/// Whether the page has an object in the arena.
pub(crate) fn is_stored(meta: u32) -> bool {
    state(meta) == STORED
}

/// Whether the page has an object in the arena that is the page itself, not compressed.
pub(crate) fn is_raw(meta: u32) -> bool {
    is_stored(meta) && codec(meta).is_none()
}

/// The location in the payload of a stored page.
pub(crate) fn location(payload: u64) -> Location {
    Location(payload & LOCATION_MASK)
}

/// The payload with another location: what compaction changes, and all it changes.
pub(crate) fn with_location(payload: u64, location: Location) -> u64 {
    payload & !LOCATION_MASK | location.0
}

/// The store's age when the page was last written or read.
pub(crate) fn age(meta: u32) -> u8 {
    (meta >> AGE_SHIFT) as u8
}

/// The same slot, used now.
pub(crate) fn with_age(meta: u32, age: u8) -> u32 {
    meta & !(0xff << AGE_SHIFT) | u32::from(age) << AGE_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_stored_slot_survives_packing(
            location in 0u64..1 << 36, length in 1u16..=4096, checksum: u32, age: u8, codec in proptest::option::of(4u8..8),
        ) {
            let object = Object { codec: codec.map(CodecId), location: Location(location), length, checksum };
            let (meta, payload) = Slot::Stored(object).pack(age);
            prop_assert_eq!(meta & (LOCKED | WAITERS), 0);
            prop_assert_eq!(Slot::unpack(meta, payload), Slot::Stored(object));
            prop_assert_eq!(super::age(meta), age);
            prop_assert_eq!(super::location(payload), object.location);
            let moved = with_location(payload, Location(location ^ 1));
            prop_assert_eq!(Slot::unpack(meta, moved), Slot::Stored(Object { location: Location(location ^ 1), ..object }));
            let sealed = Sealed { codec: object.codec, place: Place(location), length, check: checksum };
            let (meta, payload) = Slot::OnBacking(sealed).pack(age);
            prop_assert_eq!(Slot::unpack(meta, payload), Slot::OnBacking(sealed));
            prop_assert!(is_on_backing(meta) && is_present(meta) && !is_stored(meta) && !is_raw(meta) && super::length(meta) == length);
        }

        #[test]
        fn every_slot_of_a_page_in_a_group_survives_packing_and_tells_a_flipped_bit(
            group: u32, place in 0u8..16, read_once: bool, checksum: u32, age: u8,
        ) {
            let member = Member { group: GroupId(group), place, read_once, checksum };
            let (meta, payload) = Slot::Grouped(member).pack(age);
            prop_assert_eq!(meta & (LOCKED | WAITERS), 0);
            prop_assert_eq!(Slot::unpack(meta, payload), Slot::Grouped(member));
            prop_assert!(is_grouped(meta) && is_present(meta) && !is_same_filled(meta) && !is_stored(meta) && !is_raw(meta));
            prop_assert_eq!(super::age(meta), age);
            for bit in (STATE_SHIFT..AGE_SHIFT).chain(PLACE_SHIFT..READ_ONCE.ilog2()).chain(MEMBER_CHECK_SHIFT..32) {
                let damaged = Slot::unpack(meta ^ 1 << bit, payload);
                prop_assert!(!matches!(damaged, Slot::Grouped(_) | Slot::SameFilled { .. }), "bit {}", bit);
            }
            for bit in 0..32 {
                prop_assert_eq!(Slot::unpack(meta, payload ^ 1 << bit), Slot::Damaged);
            }
        }

        #[test]
        fn every_same_filled_slot_survives_packing(word: u64, age: u8) {
            let (meta, payload) = Slot::SameFilled { word }.pack(age);
            prop_assert_eq!(Slot::unpack(meta, payload), Slot::SameFilled { word });
            prop_assert!(is_same_filled(meta) && is_present(meta) && !is_stored(meta));
        }
    }

    #[test]
    fn a_flipped_state_bit_is_always_damage() {
        let object = Object { codec: Some(CodecId(1)), location: Location(9), length: 70, checksum: 77 };
        let sealed = Sealed { codec: None, place: Place(3), length: 4096, check: 5 };
        let member = Member { group: GroupId(3), place: 7, read_once: false, checksum: 9 };
        for slot in [Slot::SameFilled { word: 5 }, Slot::Stored(object), Slot::OnBacking(sealed), Slot::Grouped(member)]
        {
            let (meta, payload) = slot.pack(1);
            for bit in STATE_SHIFT..CODEC_SHIFT {
                assert_eq!(Slot::unpack(meta ^ 1 << bit, payload), Slot::Damaged, "{slot:?}");
            }
        }
    }

    #[test]
    fn a_flipped_bit_in_a_same_filled_word_is_noticed() {
        for word in [0u64, u64::MAX, 0x1234_5678_9abc_def0] {
            let (meta, payload) = Slot::SameFilled { word }.pack(0);
            for bit in 0..64 {
                assert_eq!(Slot::unpack(meta, payload ^ 1 << bit), Slot::Damaged, "bit {bit}");
            }
        }
    }
}
