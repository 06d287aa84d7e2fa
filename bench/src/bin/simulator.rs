//! A simulator of processor caches: `simulator MEGABYTES SEED` makes a trace of so many MiB, keeps it in memory, and lets caches of growing
//! size see it, one after the other. Prints their misses.
//!
//! A record of the trace is 16 bytes: when, at which address, and what was done. The program that it is of reads and writes arrays in order and
//! follows pointers.

use std::process::ExitCode;

const LINE_BITS: u32 = 6;
const WAYS: usize = 8;
/// Lines in the caches.
const CACHES: [usize; 3] = [1 << 9, 1 << 12, 1 << 15];

#[derive(Clone, Copy)]
struct Access {
    cycle: u32,
    is_write: bool,
    address: u64,
}

/// Least recently used out of [`WAYS`] goes.
struct Cache {
    /// The last one of a set was used last.
    sets: Vec<[u64; WAYS]>,
    misses: u64,
    written_misses: u64,
}

impl Cache {
    fn new(lines: usize) -> Cache {
        Cache { sets: vec![[u64::MAX; WAYS]; lines / WAYS], misses: 0, written_misses: 0 }
    }

    fn see(&mut self, access: &Access) {
        let line = access.address >> LINE_BITS;
        let set = line as usize % self.sets.len();
        let ways = &mut self.sets[set];
        let found = ways.iter().position(|&way| way == line);
        self.misses += u64::from(found.is_none());
        self.written_misses += u64::from(found.is_none() && access.is_write);
        let from = found.unwrap_or(0);
        ways.copy_within(from + 1.., from);
        ways[WAYS - 1] = line;
    }
}

/// xorshift64*: the same everywhere.
fn random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_F491_4F6C_DD1D)
}

fn trace(accesses: usize, seed: u64) -> Vec<Access> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let (mut cycle, mut array) = (0u32, 0u64);
    let step = |_| {
        let choice = random(&mut state);
        cycle = cycle.wrapping_add(1 + (choice >> 60) as u32);
        array += 8;
        let address = match choice % 8 {
            0 => 0x7f00_0000_0000 | (choice >> 20 & 0xff_fff8),
            1 | 2 => 0x5500_0000_0000 | (choice >> 40 & 0xfff8),
            _ => 0x6000_0000_0000 | (array & 0x3f_ffff),
        };
        Access { cycle, is_write: choice >> 8 & 3 == 0, address }
    };
    (0..accesses).map(step).collect()
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1).map(|word| word.parse::<u64>());
    let (Some(Ok(megabytes)), Some(Ok(seed)), None) = (words.next(), words.next(), words.next()) else {
        eprintln!("usage: simulator MEGABYTES SEED");
        return ExitCode::from(2);
    };
    let trace = trace((megabytes << 20) as usize / size_of::<Access>(), seed);
    let cycles = trace.last().map_or(0, |last| last.cycle);
    println!("seed {seed}: {} accesses, the last in cycle {cycles}", trace.len());
    for lines in CACHES {
        let mut cache = Cache::new(lines);
        trace.iter().for_each(|access| cache.see(access));
        println!("  {lines} lines: {} misses, {} of them writes", cache.misses, cache.written_misses);
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_line_of_a_set_goes() {
        let mut cache = Cache::new(2 * WAYS);
        let mut see = |line: u64| cache.see(&Access { cycle: 0, is_write: false, address: line << LINE_BITS });
        // Even lines are of one set: it is full with eight.
        (0..8).for_each(|nth| see(2 * nth));
        see(0);
        see(16);
        see(0);
        see(2);
        assert_eq!(cache.misses, 10, "the first eight, the ninth, and the second, which went for it");
    }
}
