//! Nine tenths of the accesses go to one tenth of the memory; one line of JSON for each lap.
//!
//! The hot pages lie scattered over the whole range, so that no read-ahead helps: only keeping them resident does.

use clap::Parser;
use compcache_worker::{Content, Lap, Memory, WrongBytes};

/// Fill memory with known content, access it unevenly, and check every byte at the end.
#[derive(Parser)]
struct Options {
    /// MiB of memory.
    megabytes: usize,
    /// Accesses in a lap.
    accesses: u64,
    /// How many laps. The first finds out what is hot.
    #[arg(long, default_value_t = 4)]
    laps: u64,
    /// `same`, `same:BYTE`, a kind of content (python, node, jvm, ...), or a file.
    #[arg(long, default_value = "same")]
    content: String,
    /// Percent of the pages that are hot.
    #[arg(long, default_value_t = 10)]
    hot_pages: usize,
    /// Percent of the accesses that go to hot pages.
    #[arg(long, default_value_t = 90)]
    hot_accesses: u64,
}

fn main() {
    let options = Options::parse();
    if let Err(error) = run(&options) {
        eprintln!("hotcold: {error}");
        std::process::exit(1);
    }
}

fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let content = Content::parse(&options.content)?;
    let pages = options.megabytes * 256;
    let memory = Lap::timed("fill", pages as u64, || Memory::filled(options.megabytes, &content))?;
    let mut rng = fastrand::Rng::with_seed(1);
    // The first of the shuffled pages are the hot ones.
    let mut shuffled: Vec<u32> = (0..pages as u32).collect();
    rng.shuffle(&mut shuffled);
    let hot = (pages * options.hot_pages / 100).clamp(1, pages - 1);
    let mut visits = vec![0u32; pages];
    for _ in 0..options.laps {
        let mut lap = || -> Result<(), WrongBytes> {
            for _ in 0..options.accesses {
                let is_hot = rng.u64(..100) < options.hot_accesses;
                let nth = if is_hot { rng.usize(..hot) } else { rng.usize(hot..pages) };
                let page = shuffled[nth] as usize;
                memory.touch(page, visits[page].into(), true)?;
                visits[page] += 1;
            }
            Ok(())
        };
        Lap::timed("pass", options.accesses, &mut lap)?;
    }
    let mut all = (0..pages).map(|page| memory.verify(page, visits[page].into(), 0));
    Lap::timed("verify", pages as u64, || all.by_ref().collect::<Result<(), _>>())?;
    Ok(())
}
