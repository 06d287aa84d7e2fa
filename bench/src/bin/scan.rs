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
    /// Reads a word.
    Read,
    /// Reads a word and writes it.
    Write,
    /// As write, and moves all others by a word.
    Shift,
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
    let mut memory = Lap::timed("fill", pages as u64, || Memory::filled(options.megabytes, &content))?;
    let write = options.touch != Touch::Read;
    let mut rng = fastrand::Rng::with_seed(1);
    let mut shuffled: Vec<u32> = if options.order == Order::Random { (0..pages as u32).collect() } else { Vec::new() };
    for pass in 0..options.passes {
        rng.shuffle(&mut shuffled);
        let visits = if write { pass } else { 0 };
        Lap::timed("pass", pages as u64, || one_pass(&mut memory, options, &shuffled, visits))?;
    }
    let visits = if write { options.passes } else { 0 };
    let shifts = if options.touch == Touch::Shift { options.passes } else { 0 };
    Lap::timed("verify", pages as u64, || (0..pages).try_for_each(|page| memory.verify(page, visits, shifts)))?;
    Ok(())
}

fn one_pass(memory: &mut Memory, options: &Options, shuffled: &[u32], visits: u64) -> Result<(), WrongBytes> {
    let pages = memory.pages();
    let mut touch = |page| {
        memory.touch(page, visits, options.touch != Touch::Read)?;
        if options.touch == Touch::Shift {
            memory.shift(page);
        }
        Ok(())
    };
    match options.order {
        Order::Sequential => (0..pages).try_for_each(touch),
        Order::Backward => (0..pages).rev().try_for_each(touch),
        Order::Stride => (0..STRIDE).flat_map(|start| (start..pages).step_by(STRIDE)).try_for_each(touch),
        Order::Random => shuffled.iter().try_for_each(|&page| touch(page as usize)),
    }
}
