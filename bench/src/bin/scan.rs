//! Touches every page of a large memory again and again; one line of JSON for each pass.
//!
//! The `scan` of the compcache papers, with real content besides the published one, other orders besides the
//! sequential one, and a check of every byte.

use clap::{Parser, ValueEnum};
use compcache_worker::{Content, Lap, Memory, WrongBytes};

/// Fill memory with known content, touch every page PASSES times, and check every byte at the end.
#[derive(Parser)]
struct Options {
    /// MiB of memory.
    megabytes: usize,
    /// How many times every page is touched.
    passes: u64,
    /// `same`, `same:BYTE`, a kind of content (python, node, jvm, ...), or a file.
    #[arg(long, default_value = "same")]
    content: String,
    /// Which page comes after which.
    #[arg(long, value_enum, default_value_t = Order::Sequential)]
    order: Order,
    /// What a touch does.
    #[arg(long, value_enum, default_value_t = Touch::Write)]
    touch: Touch,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Order {
    Sequential,
    Backward,
    /// Every 17th page, then those after them.
    Stride,
    /// Every page once, another shuffle for each pass.
    Random,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Touch {
    Read,
    Write,
}

const STRIDE: usize = 17;

fn main() {
    let options = Options::parse();
    if let Err(error) = run(&options) {
        eprintln!("scan: {error}");
        std::process::exit(1);
    }
}

fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let content = Content::parse(&options.content)?;
    let pages = options.megabytes * 256;
    let memory = Lap::timed("fill", pages as u64, || Memory::filled(options.megabytes, &content))?;
    let write = options.touch == Touch::Write;
    let mut rng = fastrand::Rng::with_seed(1);
    let mut shuffled: Vec<u32> = if options.order == Order::Random { (0..pages as u32).collect() } else { Vec::new() };
    for pass in 0..options.passes {
        rng.shuffle(&mut shuffled);
        let visits = if write { pass } else { 0 };
        Lap::timed("pass", pages as u64, || one_pass(&memory, options.order, &shuffled, visits, write))?;
    }
    let visits = if write { options.passes } else { 0 };
    Lap::timed("verify", pages as u64, || (0..pages).try_for_each(|page| memory.verify(page, visits)))?;
    Ok(())
}

fn one_pass(memory: &Memory, order: Order, shuffled: &[u32], visits: u64, write: bool) -> Result<(), WrongBytes> {
    let pages = memory.pages();
    match order {
        Order::Sequential => (0..pages).try_for_each(|page| memory.touch(page, visits, write)),
        Order::Backward => (0..pages).rev().try_for_each(|page| memory.touch(page, visits, write)),
        Order::Stride => (0..STRIDE)
            .flat_map(|start| (start..pages).step_by(STRIDE))
            .try_for_each(|page| memory.touch(page, visits, write)),
        Order::Random => shuffled.iter().try_for_each(|&page| memory.touch(page as usize, visits, write)),
    }
}
