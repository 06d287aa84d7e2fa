//! Page contents made from (seed, index, generation): the model keeps eight bytes a page and can still tell every byte.

#![allow(dead_code, reason = "each test program uses its part")]

use compcache_store::Page;

/// SplitMix64: the next of a sequence, and a good hash of its argument.
pub fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Fills `page` with the content of `generation` of page `index`. Kinds and their share:
/// same-filled 1/8, heap-like (pointers, small integers, zeroes) 3/8, text-like 2/8, mostly zero 1/8, noise 1/8.
pub fn fill(page: &mut Page, seed: u64, index: u64, generation: u64) {
    let key = mix(mix(seed ^ index) ^ generation);
    let mut state = key;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(state)
    };
    match key % 8 {
        0 => {
            let word = [0, u64::MAX, 0x2020_2020_2020_2020, key][(key >> 8) as usize % 4];
            words(page, || word);
        }
        1..=3 => {
            let heap = 0x7f00_0000_0000 | key >> 20 & 0xffff_f000;
            // How much of the page is noise differs, so that objects of all lengths come up.
            let noise = (key >> 12) % 32;
            words(page, || {
                let random = next();
                match random % 32 {
                    kind if kind < noise => random,
                    kind if kind % 4 == 0 => heap | random >> 40 & 0xfff8,
                    kind if kind % 4 == 1 => random >> 32 & 0xff,
                    _ => 0,
                }
            });
        }
        4 | 5 => {
            let vocabulary = 4 + (key >> 12) % 252;
            words(page, || mix(((key % 16) << 8) | (next() % vocabulary)) & 0x7f7f_7f7f_7f7f_7f7f);
        }
        6 => {
            page.fill(0);
            for _ in 0..1 + (key >> 12) % 12 {
                let random = next();
                page[random as usize % page.len()] = (random >> 32) as u8 | 1;
            }
        }
        _ => words(page, next),
    }
}

fn words(page: &mut Page, mut next: impl FnMut() -> u64) {
    for word in page.as_chunks_mut::<8>().0 {
        *word = next().to_le_bytes();
    }
}
