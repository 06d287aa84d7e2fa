//! One number repeats a run: every random choice of a test comes from its seed.
//!
//! The seed is taken from `COMPCACHE_SEED` when that is set, else from the system; it is printed either way, in the form
//! that repeats the run:
//!
//! ```text
//! COMPCACHE_SEED=8716253987163  (a_pool_is_an_array_of_pages)
//! ```
//!
//! Threads and parts of a test take their own generators from the one seed by name or number, so that what one part
//! draws does not change what another draws.

use std::env;
use std::hash::{BuildHasher, RandomState};

/// The one number a run follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(u64);

impl Seed {
    /// The seed for this run of the test called `test`; prints it.
    ///
    /// # Panics
    /// When `COMPCACHE_SEED` is set and is not a number: a run that silently took another seed would mislead.
    pub fn for_test(test: &str) -> Seed {
        let seed = match env::var("COMPCACHE_SEED") {
            Ok(text) => parse(&text).unwrap_or_else(|| panic!("COMPCACHE_SEED={text:?} is not a number")),
            Err(_) => RandomState::new().hash_one(test),
        };
        eprintln!("COMPCACHE_SEED={seed}  ({test})");
        Seed(seed)
    }

    /// A seed that is known, for tests that must always do the same.
    pub const fn fixed(seed: u64) -> Seed {
        Seed(seed)
    }

    /// The number itself.
    pub fn number(self) -> u64 {
        self.0
    }

    /// A seed of its own for the part numbered `part`: a thread, a round, a process.
    pub fn part(self, part: u64) -> Seed {
        Seed(scramble(self.0 ^ scramble(part.wrapping_add(1))))
    }

    /// A generator that starts from this seed.
    pub fn rng(self) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.0)
    }
}

fn parse(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// A bijection of 64-bit words that leaves no pattern in them.
///
/// # Source
/// The output function of SplitMix64 (Steele, Lea and Flood, 2014).
pub fn scramble(word: u64) -> u64 {
    let word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_draws_the_same_and_parts_draw_apart() {
        let seed = Seed::fixed(7);
        assert_eq!(seed.rng().u64(..), seed.rng().u64(..));
        assert_ne!(seed.part(0), seed.part(1));
        assert_ne!(seed.part(0), seed);
        assert_eq!(seed.part(3), Seed::fixed(7).part(3));
    }

    #[test]
    fn seeds_are_read_in_decimal_and_in_hexadecimal() {
        assert_eq!(parse("0x10"), Some(16));
        assert_eq!(parse("10"), Some(10));
        assert_eq!(parse("ten"), None);
    }
}
