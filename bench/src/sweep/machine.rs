//! A machine that swaps: for every page that comes in, the one that has been in for longest goes out.
//!
//! | order        | the page that comes in next                                                                      |
//! |--------------|---------------------------------------------------------------------------------------------------|
//! | `sequential` | the next one, and after the last the first                                                       |
//! | `random`     | in four cases of five one of a fifth of them, scattered over all; else any; the same in every run |
//!
//! One that is in is passed over. Every page is changed while it is in, so each that goes out has to be written: page `i` that was changed `g` times
//! holds page `i + g * 7919` of the content. So nothing but two numbers a page says what a page must be, and an older
//! state of it does not pass for the newer.
//!
//! No clock, no disk, no pool: where pages are while they are out is a [`Swap`].

use std::collections::VecDeque;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use compcache_store::Page;

/// What a page holds after a change is so many pages of the content further on; a prime.
const CHANGE_PAGES: usize = 7919;
/// A fifth of the pages is wanted in four cases of five, and now and then as one of all.
const HOT_SHARE: usize = 5;
const SEED: u64 = 1999;

/// In which order pages are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Order {
    /// One after the other, again and again.
    Sequential,
    /// At random, four fifths of the times one of a fifth of them.
    Random,
}

impl Order {
    /// The word for it on the command line, in tables and in records.
    pub fn name(self) -> &'static str {
        match self {
            Order::Sequential => "sequential",
            Order::Random => "random",
        }
    }
}

/// Where pages are while they are out.
pub trait Swap {
    /// Reads a page that comes in; what is kept of it need not be kept any longer.
    ///
    /// # Errors
    /// It cannot be read.
    fn read(&mut self, index: usize, page: &mut Page) -> Result<()>;

    /// Keeps a page that goes out.
    ///
    /// # Errors
    /// It cannot be kept.
    fn write(&mut self, index: usize, page: &Page) -> Result<()>;
}

/// The pages, and which of them are in.
pub struct Machine<'p> {
    content: &'p [Page],
    changes: Vec<usize>,
    /// The one that has been in for longest first.
    resident: VecDeque<usize>,
    is_resident: Vec<bool>,
}

impl<'p> Machine<'p> {
    /// As many pages as there is content, all of them in.
    pub fn new(content: &'p [Page]) -> Machine<'p> {
        let count = content.len();
        Machine { content, changes: vec![0; count], resident: (0..count).collect(), is_resident: vec![true; count] }
    }

    /// Has all go out but the first `resident_pages`, which are in from then on. Each run begins so.
    ///
    /// # Errors
    /// One cannot be kept.
    pub fn begin(&mut self, resident_pages: usize, swap: &mut dyn Swap) -> Result<()> {
        for index in std::mem::take(&mut self.resident) {
            if index >= resident_pages {
                swap.write(index, self.page(index))?;
                self.is_resident[index] = false;
            }
        }
        // One of them that was out is the same there and here.
        self.resident = (0..resident_pages).collect();
        self.is_resident[..resident_pages].fill(true);
        Ok(())
    }

    /// Has so many pages come in, and as many go out.
    ///
    /// # Errors
    /// One cannot be read or kept, or is not what it was.
    pub fn run(&mut self, walk: &mut Walk, steps: usize, swap: &mut dyn Swap) -> Result<()> {
        let mut page = [0; size_of::<Page>()];
        for _ in 0..steps {
            let coming = walk.next_where(|index| !self.is_resident[index]);
            swap.read(coming, &mut page)?;
            ensure!(page == *self.page(coming), "WRONG BYTES in page {coming}");
            let going = self.resident.pop_front().context("no page is in")?;
            swap.write(going, self.page(going))?;
            self.is_resident[going] = false;
            self.changes[coming] += 1;
            self.is_resident[coming] = true;
            self.resident.push_back(coming);
        }
        Ok(())
    }

    /// What a page holds now, or, if it is out, held when it went.
    fn page(&self, index: usize) -> &'p Page {
        &self.content[(index + self.changes[index] * CHANGE_PAGES) % self.content.len()]
    }
}

/// Pages in the order in which they are wanted, without end.
pub struct Walk {
    order: Order,
    pages: usize,
    next: usize,
    random: fastrand::Rng,
}

impl Walk {
    /// The same for the same order and number of pages.
    pub fn new(order: Order, pages: usize) -> Walk {
        Walk { order, pages, next: 0, random: fastrand::Rng::with_seed(SEED) }
    }

    /// The next page for which `may` holds; there must be one.
    fn next_where(&mut self, may: impl Fn(usize) -> bool) -> usize {
        loop {
            let index = match self.order {
                Order::Sequential => {
                    let index = self.next;
                    self.next = (index + 1) % self.pages;
                    index
                }
                Order::Random if self.random.usize(..HOT_SHARE) > 0 => {
                    self.random.usize(..self.pages.div_ceil(HOT_SHARE)) * HOT_SHARE
                }
                Order::Random => self.random.usize(..self.pages),
            };
            if may(index) {
                return index;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages by themselves.
    #[derive(Default)]
    struct Kept(std::collections::HashMap<usize, Page>);

    impl Swap for Kept {
        fn read(&mut self, index: usize, page: &mut Page) -> Result<()> {
            *page = self.0.remove(&index).context("is not there")?;
            Ok(())
        }

        fn write(&mut self, index: usize, page: &Page) -> Result<()> {
            ensure!(self.0.insert(index, *page).is_none(), "is there already");
            Ok(())
        }
    }

    fn content(pages: u8) -> Vec<Page> {
        (0..pages).map(|nth| [nth; size_of::<Page>()]).collect()
    }

    #[test]
    fn every_page_that_comes_in_is_out_and_is_what_it_was_when_it_went() {
        let content = content(100);
        for order in [Order::Sequential, Order::Random] {
            let (mut machine, mut kept) = (Machine::new(&content), Kept::default());
            machine.begin(10, &mut kept).unwrap();
            assert_eq!(kept.0.len(), 90);
            machine.run(&mut Walk::new(order, 100), 1000, &mut kept).unwrap();
            assert_eq!((kept.0.len(), machine.resident.len()), (90, 10));
            assert_eq!(machine.changes.iter().sum::<usize>(), 1000);
        }
    }

    #[test]
    fn a_run_that_begins_again_wants_the_same_pages() {
        let content = content(100);
        let (mut machine, mut place) =
            (Machine::new(&content), Place(vec![[0xff; size_of::<Page>()]; 100], Vec::new()));
        machine.begin(0, &mut place).unwrap();
        let wanted = |machine: &mut Machine<'_>, place: &mut Place| {
            machine.begin(10, place).unwrap();
            place.1.clear();
            machine.run(&mut Walk::new(Order::Random, 100), 500, place).unwrap();
            place.1.clone()
        };
        assert_eq!(wanted(&mut machine, &mut place), wanted(&mut machine, &mut place));
    }

    /// Pages each at its place, which stay there, and what was read.
    struct Place(Vec<Page>, Vec<usize>);

    impl Swap for Place {
        fn read(&mut self, index: usize, page: &mut Page) -> Result<()> {
            *page = self.0[index];
            self.1.push(index);
            Ok(())
        }

        fn write(&mut self, index: usize, page: &Page) -> Result<()> {
            self.0[index] = *page;
            Ok(())
        }
    }

    #[test]
    fn what_is_not_what_went_out_ends_the_run() {
        let content = content(100);
        let (mut machine, mut place) =
            (Machine::new(&content), Place(vec![[0xff; size_of::<Page>()]; 100], Vec::new()));
        machine.begin(10, &mut place).unwrap();
        place.0[50][4095] ^= 1;
        let error = machine.run(&mut Walk::new(Order::Sequential, 100), 100, &mut place).unwrap_err();
        assert_eq!(error.to_string(), "WRONG BYTES in page 50");
    }

    #[test]
    fn a_fifth_of_the_pages_is_wanted_four_times_of_five() {
        let mut walk = Walk::new(Order::Random, 1000);
        let hot = (0..10_000).filter(|_| walk.next_where(|_| true).is_multiple_of(HOT_SHARE)).count();
        assert!((8200..8600).contains(&hot), "{hot}");
    }
}
