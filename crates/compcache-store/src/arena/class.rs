//! Size classes: which slot size holds an object of 1..=4096 bytes.
//!
//! One class per length would leave most spans nearly empty; few classes would waste every tail. A class is a number of
//! objects per span of 256 KiB, and its slot size is what is left for each, rounded down to 8 bytes, so that span tails
//! are short; classes are thinned so that one is 1.1 to 2.5 % larger than the one below, except where the granule of
//! 8 bytes is coarser than that (below 320 bytes):
//!
//! | object, bytes | slot, bytes | objects in a span | waste in the slot | tail of the span |
//! |---------------|-------------|-------------------|-------------------|------------------|
//! | 40            | 40          | 1024              | 0 %               | (not touched)    |
//! | 1365          | 1368        | 191               | 0.2 %             | 0.3 %            |
//! | 2700          | 2752        | 95                | 1.9 %             | 0.3 %            |
//! | 4096          | 4096        | 64                | 0 %               | 0 %              |
//!
//! A span holds at most 1024 objects, so that its bitmap is 128 bytes; the rest of a span of tiny objects stays
//! untouched and costs addresses only. The full table is in docs/design/pool.md.
//!
//! Arithmetic only: no memory, no locks, no `unsafe`. All 4096 lengths are checked below.

use crate::page::PAGE_SIZE;

/// Bytes of addresses in a span.
pub(crate) const SPAN_BYTES: usize = 256 << 10;
/// Slot sizes and locations are multiples of this.
pub(crate) const GRANULE: usize = 8;
/// The most objects in a span.
pub(crate) const OBJECTS_MAX: usize = 1024;
const SLOT_MIN: usize = 32;
/// From this slot size on, slots are chosen to divide a span evenly; ...
const TAIL_MATTERS: usize = 1024;
/// ... then a class is smaller than the next larger one by at least slot / this ...
const LARGE_STEP_DIVISOR: usize = 90;
/// ... and below, by slot / this, in whole granules.
const SMALL_STEP_DIVISOR: usize = 40;

/// A size class, by its position in the table; larger classes have larger slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class(pub u8);

/// Slot size and number of objects of each class, smallest first.
const TABLE: ([u16; 256], usize) = slot_sizes();
const SLOT: [u16; 256] = TABLE.0;
/// How many classes there are.
pub(crate) const CLASSES: usize = TABLE.1;
const OBJECTS: [u16; CLASSES] = objects_per_span();
const BY_GRANULES: [u8; PAGE_SIZE / GRANULE + 1] = class_by_granules();

const fn slot_sizes() -> ([u16; 256], usize) {
    // Largest first, then turned round.
    let mut falling = [0u16; 256];
    let mut count = 0;
    let mut slot = PAGE_SIZE;
    while slot >= SLOT_MIN {
        falling[count] = slot as u16;
        count += 1;
        let step = slot / SMALL_STEP_DIVISOR / GRANULE * GRANULE;
        slot = if slot > TAIL_MATTERS {
            SPAN_BYTES / SPAN_BYTES.div_ceil(slot - slot / LARGE_STEP_DIVISOR) / GRANULE * GRANULE
        } else {
            // The tail of a span is shorter than a slot: where slots are small, it is nothing.
            slot / GRANULE * GRANULE - if step > GRANULE { step } else { GRANULE }
        };
    }
    let mut rising = [0u16; 256];
    let mut i = 0;
    while i < count {
        rising[i] = falling[count - 1 - i];
        i += 1;
    }
    (rising, count)
}

const fn objects_per_span() -> [u16; CLASSES] {
    let mut table = [0u16; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        let objects = SPAN_BYTES / SLOT[class] as usize;
        table[class] = if objects > OBJECTS_MAX { OBJECTS_MAX } else { objects } as u16;
        class += 1;
    }
    table
}

const fn class_by_granules() -> [u8; PAGE_SIZE / GRANULE + 1] {
    let mut table = [0u8; PAGE_SIZE / GRANULE + 1];
    let mut granules = 0;
    let mut class = 0;
    while granules < table.len() {
        while (SLOT[class] as usize) < granules * GRANULE {
            class += 1;
        }
        table[granules] = class as u8;
        granules += 1;
    }
    table
}

const _: () = assert!(CLASSES < 256);

impl Class {
    /// The smallest class that holds `length` bytes, 1..=4096.
    #[inline]
    pub fn for_length(length: usize) -> Class {
        Class(BY_GRANULES[length.div_ceil(GRANULE)])
    }

    /// Bytes in a slot.
    #[inline]
    pub fn slot_bytes(self) -> usize {
        SLOT[self.0 as usize] as usize
    }

    /// Objects in a span.
    #[inline]
    pub fn objects(self) -> usize {
        OBJECTS[self.0 as usize] as usize
    }

    /// Every class, smallest first.
    pub fn all() -> impl Iterator<Item = Class> {
        (0..CLASSES as u8).map(Class)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_has_the_smallest_class_that_holds_it() {
        for length in 1..=PAGE_SIZE {
            let class = Class::for_length(length);
            assert!(class.slot_bytes() >= length);
            assert!(class.0 == 0 || Class(class.0 - 1).slot_bytes() < length, "length {length}");
        }
    }

    #[test]
    fn no_object_wastes_more_than_a_36th_or_a_granule() {
        for length in SLOT_MIN..=PAGE_SIZE {
            let waste = Class::for_length(length).slot_bytes() - length;
            assert!(waste * 36 <= length.max(36 * GRANULE), "length {length} wastes {waste}");
        }
    }

    #[test]
    fn slots_fit_their_span_and_tails_are_short() {
        for class in Class::all() {
            let touched = class.slot_bytes() * class.objects();
            assert!(touched <= SPAN_BYTES && class.slot_bytes() % GRANULE == 0);
            if class.objects() < OBJECTS_MAX {
                assert!(
                    (SPAN_BYTES - touched) * 33 <= SPAN_BYTES,
                    "slot {} tail {}",
                    class.slot_bytes(),
                    SPAN_BYTES - touched
                );
            }
        }
    }
}
