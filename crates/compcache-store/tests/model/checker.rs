//! The model is the specification: a pool is an array of pages.
//!
//! One random walk over operations, the mix of which differs by seed (swarm testing), against anything that looks like
//! a pool; what differs from the array is a [`Divergence`]. Stress tests and planted bugs use the same walk.

use std::fmt;

use compcache_store::{Page, PageIndex, Read, StoreError};

use crate::content;

/// What the model can be compared with.
pub trait Pages {
    fn write(&mut self, index: PageIndex, page: &Page) -> Result<(), StoreError>;
    fn rewrite(&mut self, index: PageIndex, page: &Page) -> Result<(), StoreError>;
    fn write_run(&mut self, first: PageIndex, pages: &[Page]) -> Result<(), usize>;
    fn read(&mut self, index: PageIndex, page: &mut Page, take: bool) -> Result<Read, StoreError>;
    fn read_run(&mut self, first: PageIndex, pages: &mut [Page], found: &mut [Read]) -> Result<(), StoreError>;
    fn contains(&mut self, index: PageIndex) -> bool;
    fn discard(&mut self, index: PageIndex) -> bool;
    fn discard_range(&mut self, first: PageIndex, count: u64) -> u64;
    fn move_slot(&mut self, from: PageIndex, to: PageIndex) -> Result<bool, StoreError>;
    fn move_range(&mut self, from: PageIndex, to: PageIndex, count: u64) -> Result<u64, StoreError>;
    fn stored(&mut self, first: PageIndex, count: u64) -> Vec<PageIndex>;
    /// Something that must not show: compaction, a change of codec or limit, time.
    fn disturb(&mut self, random: u64);
}

/// The pool is not the array it should be.
#[derive(Debug)]
pub struct Divergence {
    pub seed: u64,
    pub operation: u64,
    pub what: String,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {} operation {}: {}", self.seed, self.operation, self.what)
    }
}

/// How a walk went.
#[derive(Clone, Copy, Debug, Default)]
pub struct Walked {
    pub operations: u64,
    pub refused: u64,
    /// Pages that a medium that lies has cost.
    pub lost: u64,
}

const RUN: usize = 16;
const OPERATIONS: usize = 11;
/// So many generations follow each other that differ in some bytes, and in nothing else.
const EDITS: u64 = 256;

/// Pages in each stretch of neighbours, and where the stretches begin: dense and far apart.
const STRETCH: u64 = 1500;
const STRETCHES: [u64; 4] = [0, 5_000, 1 << 30, (1 << 36) - STRETCH];

/// One walk and the array it is compared with.
pub struct Walk {
    seed: u64,
    rng: fastrand::Rng,
    /// Generation of each page by position; zero is absent.
    generations: Vec<u64>,
    next_generation: u64,
    weights: [u32; OPERATIONS],
    /// Which of the pages are this walk's: those whose position is `own` modulo `walks`.
    hot: usize,
    base: u64,
    /// The medium lies: a page may be corrupt, but never another.
    pub lossy: bool,
    walked: Walked,
}

impl Walk {
    /// A walk over pages that start at `base` beside those of [`STRETCHES`], so that several walks can share a pool.
    pub fn new(seed: u64, base: u64) -> Walk {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut weights = [0; OPERATIONS];
        for weight in &mut weights {
            *weight = if rng.u32(0..4) == 0 { 0 } else { rng.u32(1..20) };
        }
        weights[0] += 8;
        weights[1] += 4;
        // Ranges empty the pool quickly: seldom.
        weights[7] = weights[7].div_ceil(16);
        weights[9] = weights[9].div_ceil(16);
        let pages = STRETCHES.len() * STRETCH as usize;
        let hot = [40, 400, pages][rng.usize(0..3)];
        Walk {
            seed,
            rng,
            generations: vec![0; pages],
            next_generation: EDITS,
            weights,
            hot,
            base,
            lossy: false,
            walked: Walked::default(),
        }
    }

    fn index(&self, position: usize) -> PageIndex {
        let stretch = STRETCHES[position / STRETCH as usize];
        // Walks share leaves at the seams of their stretches.
        let index = stretch + position as u64 % STRETCH;
        PageIndex(if stretch > 1 << 35 { index - self.base } else { index + self.base })
    }

    fn position(&mut self) -> usize {
        self.rng.usize(0..self.hot)
    }

    /// A first position and a count that stay in one stretch.
    fn stretch(&mut self, most: usize) -> (usize, usize) {
        let first = self.position();
        let room = STRETCH as usize - first % STRETCH as usize;
        (first, self.rng.usize(1..=most.min(room)))
    }

    /// Takes `operations` steps.
    pub fn run(&mut self, pages: &mut impl Pages, operations: u64) -> Result<Walked, Divergence> {
        for _ in 0..operations {
            self.walked.operations += 1;
            self.step(pages).map_err(|what| Divergence { seed: self.seed, operation: self.walked.operations, what })?;
        }
        Ok(self.walked)
    }

    /// Reads every page.
    pub fn check_all(&mut self, pages: &mut impl Pages) -> Result<Walked, Divergence> {
        let seed = self.seed;
        let operation = self.walked.operations;
        let diverged = |what| Divergence { seed, operation, what };
        for position in 0..self.generations.len() {
            self.read(pages, position, false).map_err(diverged)?;
        }
        Ok(self.walked)
    }

    fn step(&mut self, pages: &mut impl Pages) -> Result<(), String> {
        let total = self.weights.iter().sum();
        let mut draw = self.rng.u32(0..total);
        let operation = self.weights.iter().position(|weight| {
            let here = draw < *weight;
            draw = draw.wrapping_sub(*weight);
            here
        });
        let position = self.position();
        match operation.expect("a draw below the total") {
            0 => self.write(pages, position),
            1 => self.read(pages, position, false),
            2 => self.read(pages, position, true),
            3 => self.discard(pages, position),
            4 => self.contains(pages, position),
            5 => self.write_run(pages),
            6 => self.read_run(pages),
            7 => self.discard_range(pages),
            8 => self.move_one(pages, position),
            10 => self.rewrite(pages, position),
            _ if self.rng.bool() => self.move_many(pages),
            _ => {
                pages.disturb(self.rng.u64(..));
                self.list(pages)
            }
        }
    }

    fn content(&self, position: usize, generation: u64) -> Page {
        let mut page = [0; 4096];
        content::fill(&mut page, self.seed, position as u64, generation / EDITS);
        for edit in 0..[0, 1, 2, 10, 200][(generation % EDITS % 5) as usize] {
            let random = content::mix(generation << 8 | edit);
            page[random as usize % page.len()] ^= (random >> 32) as u8;
        }
        page
    }

    fn generation(&mut self) -> u64 {
        self.next_generation += EDITS;
        self.next_generation
    }

    fn write(&mut self, pages: &mut impl Pages, position: usize) -> Result<(), String> {
        let generation = self.generation();
        match pages.write(self.index(position), &self.content(position, generation)) {
            Ok(()) => self.generations[position] = generation,
            Err(error) => self.refused(error)?,
        }
        Ok(())
    }

    /// What is there already, that with some edits, or something else.
    fn rewrite(&mut self, pages: &mut impl Pages, position: usize) -> Result<(), String> {
        let generation = match self.generations[position] {
            0 => self.generation(),
            known if self.rng.u32(0..4) == 0 => known,
            known => known / EDITS * EDITS + self.rng.u64(0..EDITS),
        };
        match pages.rewrite(self.index(position), &self.content(position, generation)) {
            Ok(()) => self.generations[position] = generation,
            Err(error) => self.refused(error)?,
        }
        Ok(())
    }

    /// A refusal must leave everything as it was; the next reads say so.
    fn refused(&mut self, error: StoreError) -> Result<(), String> {
        self.walked.refused += 1;
        match error {
            StoreError::LimitReached { .. } => Ok(()),
            other => Err(format!("{other}")),
        }
    }

    fn write_run(&mut self, pages: &mut impl Pages) -> Result<(), String> {
        let (first, count) = self.stretch(RUN);
        let generation = self.generation();
        let contents: Vec<Page> = (first..first + count).map(|position| self.content(position, generation)).collect();
        let done = pages.write_run(self.index(first), &contents).err().unwrap_or(count);
        self.walked.refused += u64::from(done < count);
        self.generations[first..first + done].fill(generation);
        Ok(())
    }

    fn read(&mut self, pages: &mut impl Pages, position: usize, take: bool) -> Result<(), String> {
        let mut page = [0xa5; 4096];
        let read = match pages.read(self.index(position), &mut page, take) {
            Ok(read) => read,
            Err(error) => return self.lost(pages, error),
        };
        self.compare(position, read, &page)?;
        if take {
            self.generations[position] = 0;
        }
        Ok(())
    }

    fn read_run(&mut self, pages: &mut impl Pages) -> Result<(), String> {
        let (first, count) = self.stretch(RUN);
        let mut buffers = [[0xa5; 4096]; RUN];
        let mut found = [Read::Absent; RUN];
        if let Err(error) = pages.read_run(self.index(first), &mut buffers[..count], &mut found[..count]) {
            return self.lost(pages, error);
        }
        for nth in 0..count {
            self.compare(first + nth, found[nth], &buffers[nth])?;
        }
        Ok(())
    }

    /// A page that does not come back: allowed if the medium lies, and only as that. It is discarded, which ends the matter.
    fn lost(&mut self, pages: &mut impl Pages, error: StoreError) -> Result<(), String> {
        match error {
            StoreError::Corrupt { index } if self.lossy => {
                let position = (0..self.generations.len()).find(|position| self.index(*position) == index);
                self.generations[position.ok_or(format!("{error}, and nobody asked for it"))?] = 0;
                self.walked.lost += 1;
                pages.discard(index).then_some(()).ok_or(format!("{error}, and is not there"))
            }
            _ => Err(format!("{error}")),
        }
    }

    fn compare(&self, position: usize, read: Read, page: &Page) -> Result<(), String> {
        let generation = self.generations[position];
        let index = self.index(position).0;
        match (generation, read) {
            (0, Read::Absent) if page.iter().all(|byte| *byte == 0xa5) => Ok(()),
            (0, Read::Absent) => Err(format!("page {index} is absent, but the buffer was written to")),
            (0, _) => Err(format!("page {index} was discarded, and reads as {read:?}")),
            (_, Read::Done) if *page == self.content(position, generation) => Ok(()),
            (_, Read::Done) => Err(format!("page {index} is not its generation {generation}")),
            (_, read) => Err(format!("page {index} was written, and reads as {read:?}")),
        }
    }

    fn contains(&mut self, pages: &mut impl Pages, position: usize) -> Result<(), String> {
        let there = pages.contains(self.index(position));
        (there == (self.generations[position] != 0)).then_some(()).ok_or(format!("page {position}: contains {there}"))
    }

    fn discard(&mut self, pages: &mut impl Pages, position: usize) -> Result<(), String> {
        let was_there = core::mem::take(&mut self.generations[position]) != 0;
        let said = pages.discard(self.index(position));
        (said == was_there).then_some(()).ok_or(format!("discarding page {position} said {said}"))
    }

    fn discard_range(&mut self, pages: &mut impl Pages) -> Result<(), String> {
        let (first, count) = self.stretch(STRETCH as usize);
        let there = self.generations[first..first + count].iter().filter(|generation| **generation != 0).count() as u64;
        self.generations[first..first + count].fill(0);
        let said = pages.discard_range(self.index(first), count as u64);
        (said == there).then_some(()).ok_or(format!("discarding {count} pages from {first}: {said} of {there}"))
    }

    fn move_one(&mut self, pages: &mut impl Pages, from: usize) -> Result<(), String> {
        let to = self.position();
        // What moves keeps the content of where it was written, so the model can only follow it by writing it anew.
        let was_there = self.generations[from] != 0;
        let said = pages.move_slot(self.index(from), self.index(to)).map_err(|error| format!("{error}"))?;
        if said != was_there {
            return Err(format!("moving {from} to {to} said {said}"));
        }
        if from == to {
            return Ok(());
        }
        self.follow(pages, from, to)
    }

    fn move_many(&mut self, pages: &mut impl Pages) -> Result<(), String> {
        let (from, count) = self.stretch(64);
        let (to, room) = self.stretch(64);
        let count = count.min(room);
        if from.abs_diff(to) < count {
            return Ok(());
        }
        let there = self.generations[from..from + count].iter().filter(|generation| **generation != 0).count() as u64;
        let said =
            pages.move_range(self.index(from), self.index(to), count as u64).map_err(|error| format!("{error}"))?;
        if said != there {
            return Err(format!("moving {count} pages from {from} to {to}: {said} of {there}"));
        }
        (0..count).try_for_each(|nth| self.follow(pages, from + nth, to + nth))
    }

    /// After a move: `to` must read as what `from` held, and `from` as absent. Then `to` gets a content of its own again.
    fn follow(&mut self, pages: &mut impl Pages, from: usize, to: usize) -> Result<(), String> {
        let generation = core::mem::take(&mut self.generations[from]);
        self.generations[to] = 0;
        let mut page = [0xa5; 4096];
        self.read(pages, from, false)?;
        let read = match pages.read(self.index(to), &mut page, true) {
            Ok(read) => read,
            Err(error) => return self.lost(pages, error),
        };
        match (generation, read) {
            (0, Read::Absent) => Ok(()),
            (1.., Read::Done) if page == self.content(from, generation) => self.write(pages, to),
            _ => Err(format!("page {to} is not what was moved there from {from}: {read:?}")),
        }
    }

    fn list(&mut self, pages: &mut impl Pages) -> Result<(), String> {
        let (first, count) = self.stretch(STRETCH as usize);
        let there = (first..first + count).filter(|position| self.generations[*position] != 0);
        let expected: Vec<PageIndex> = there.map(|position| self.index(position)).collect();
        let listed = pages.stored(self.index(first), count as u64);
        (listed == expected).then_some(()).ok_or(format!("{} pages listed of {}", listed.len(), expected.len()))
    }
}
