//! A device is an array of bytes: random walks over a stretch of it, each thread its own.
//!
//! The stretches begin and end inside blocks, so that threads share the blocks at their borders. What is written derives
//! from (block, generation), so that old contents and contents of other places are told from right ones.

use compcache_block::{BLOCK_BYTES, Zeroes};
use compcache_testkit::seed::{Seed, scramble};

use crate::front::Talk;

const BLOCK: usize = BLOCK_BYTES;
/// Longer than a block's segment in a disk, and no multiple of a block.
pub const STRETCH_BYTES: usize = 300_000;

/// Fills `into`, which begins at `offset`, with a generation: some of it zeroes, some repeated, some noise.
pub fn fill(into: &mut [u8], offset: u64, generation: u64) {
    for (at, byte) in into.iter_mut().enumerate() {
        let (block, within) = ((offset + at as u64) / BLOCK as u64, (offset as usize + at) % BLOCK);
        let key = scramble(block ^ scramble(generation));
        *byte = match key % 4 {
            0 => (key >> 8) as u8,
            1 if within % 64 < 48 => (key >> (within % 8)) as u8,
            2 => b"of a page "[within % 10] ^ (key >> 16) as u8,
            _ => scramble(key ^ (within as u64 / 8)).to_le_bytes()[within % 8],
        };
    }
}

pub struct Walk {
    rng: fastrand::Rng,
    start: u64,
    model: Vec<u8>,
    generation: u64,
}

impl Walk {
    /// Over the stretch numbered `number`, which reads as zeroes.
    pub fn new(seed: Seed, number: u64) -> Walk {
        let rng = seed.part(number).rng();
        Walk { rng, start: number * STRETCH_BYTES as u64, model: vec![0; STRETCH_BYTES], generation: number << 32 }
    }

    /// Takes `steps` steps and reads everything at the end. An error says where device and model parted.
    pub fn run(&mut self, talk: &mut dyn Talk, steps: u32) -> Result<(), String> {
        for step in 0..steps {
            self.step(talk).map_err(|parted| format!("step {step}: {parted}"))?;
        }
        self.read(talk, 0..STRETCH_BYTES)
    }

    /// A range of the stretch: often whole blocks, often not, seldom long.
    fn range(&mut self) -> std::ops::Range<usize> {
        let most = if self.rng.u8(..8) == 0 { STRETCH_BYTES } else { 4 * BLOCK };
        let (start, length) = (self.rng.usize(..STRETCH_BYTES), self.rng.usize(1..=most));
        let end = (start + length).min(STRETCH_BYTES);
        if self.rng.bool() {
            return start..end;
        }
        let border = |at: usize| (at as u64 + self.start).next_multiple_of(BLOCK as u64) - self.start;
        let (from, to) = (border(start) as usize, border(end) as usize);
        if from < to && to <= STRETCH_BYTES { from..to } else { start..end }
    }

    fn step(&mut self, talk: &mut dyn Talk) -> Result<(), String> {
        let range = self.range();
        let (offset, length) = (self.start + range.start as u64, range.len() as u64);
        let failed = |what: &str, errno: i32| format!("{what} of {length} at {offset} failed with {errno}");
        match self.rng.u8(..16) {
            0..6 => {
                self.generation += 1;
                fill(&mut self.model[range.clone()], offset, self.generation);
                let fua = self.rng.u8(..8) == 0;
                talk.write(offset, &self.model[range], fua).map_err(|errno| failed("write", errno))
            }
            6..11 => self.read(talk, range),
            11 => {
                let first = offset.next_multiple_of(BLOCK as u64);
                let end = (offset + length) / BLOCK as u64 * BLOCK as u64;
                if first < end {
                    self.model[(first - self.start) as usize..(end - self.start) as usize].fill(0);
                }
                talk.discard(offset, length).map_err(|errno| failed("discard", errno))
            }
            12 | 13 => {
                let zeroes = if self.rng.bool() { Zeroes::AreData } else { Zeroes::MayBeHoles };
                self.model[range].fill(0);
                talk.write_zeroes(offset, length, zeroes).map_err(|errno| failed("write_zeroes", errno))
            }
            14 => talk.flush().map_err(|errno| failed("flush", errno)),
            _ => self.extents(talk, range),
        }
    }

    fn read(&mut self, talk: &mut dyn Talk, range: std::ops::Range<usize>) -> Result<(), String> {
        let offset = self.start + range.start as u64;
        let mut back = vec![0xa5; range.len()];
        talk.read(offset, &mut back).map_err(|errno| format!("read at {offset} failed with {errno}"))?;
        match back.iter().zip(&self.model[range]).position(|(back, model)| back != model) {
            Some(at) => Err(format!("byte {} is not what was written there", offset + at as u64)),
            None => Ok(()),
        }
    }

    /// What is called a hole must read as zeroes, and the stretches must be the range.
    fn extents(&mut self, talk: &mut dyn Talk, range: std::ops::Range<usize>) -> Result<(), String> {
        let (offset, length) = (self.start + range.start as u64, range.len() as u64);
        let Some(extents) = talk.extents(offset, length) else { return Ok(()) };
        let extents = extents.map_err(|errno| format!("extents at {offset} failed with {errno}"))?;
        let mut at = range.start;
        for (length, is_hole) in extents {
            let stretch = at..at + length as usize;
            let inside = self.model.get(stretch).ok_or(format!("extents reach beyond the range at {offset}"))?;
            if is_hole && inside.iter().any(|byte| *byte != 0) {
                return Err(format!("a hole at {} that holds something", self.start + at as u64));
            }
            at += length as usize;
        }
        // A server may say less than it was asked, if it says something.
        if at == range.start { Err(format!("no extents at {offset}")) } else { Ok(()) }
    }
}
