//! How long one access to a page that is not resident takes, on a program that does nothing else.
//!
//! Random pages are looked up in `/proc/self/pagemap`; one that is not present is read, with the clock before and after.
//! Between two faults the program waits, so that whoever makes room in the background has finished.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use compcache_worker::{Content, Memory, PAGE_BYTES};
use serde::{Deserialize, Serialize};

/// Fill memory with known content, then time single faults on random pages.
#[derive(Parser)]
struct Options {
    /// MiB of memory.
    megabytes: usize,
    /// Faults to time.
    faults: usize,
    /// `same`, `same:BYTE`, a kind of content (python, node, jvm, ...), or a file.
    #[arg(long, default_value = "same")]
    content: String,
    /// Microseconds between two faults.
    #[arg(long, default_value_t = 100)]
    gap_us: u64,
    /// What the program does meanwhile: a CPU that slept takes longer to answer.
    #[arg(long, value_enum, default_value_t = Gap::Spin)]
    gap: Gap,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Gap {
    Spin,
    Sleep,
}

/// The one line of JSON that is printed. Times in microseconds.
#[derive(Serialize, Deserialize)]
struct Latency {
    lap: String,
    faults: usize,
    min_us: f64,
    p50_us: f64,
    p90_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
    /// What the two looks at the clock cost, included in every number above.
    clock_us: f64,
}

/// Looks for absent pages before giving up: the memory may fit.
const LOOKS_PER_FAULT_MAX: usize = 1000;

fn main() {
    let options = Options::parse();
    if let Err(error) = run(&options) {
        eprintln!("latency: {error}");
        std::process::exit(1);
    }
}

fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let memory = Memory::filled(options.megabytes, &Content::parse(&options.content)?)?;
    let pagemap = File::open("/proc/self/pagemap")?;
    let mut rng = fastrand::Rng::with_seed(1);
    let mut taken_us = Vec::with_capacity(options.faults);
    let mut looks = 0;
    while taken_us.len() < options.faults {
        let page = rng.usize(..memory.pages());
        looks += 1;
        if looks > LOOKS_PER_FAULT_MAX * options.faults {
            return Err("hardly any page is absent: is there a cap?".into());
        }
        if is_present(&pagemap, memory.address(page))? {
            continue;
        }
        let started = Instant::now();
        let found = memory.touch(page, 0, false);
        taken_us.push(started.elapsed().as_secs_f64() * 1e6);
        found?;
        pause(options);
    }
    for page in 0..memory.pages() {
        memory.verify(page, 0, 0)?;
    }
    println!("{}", serde_json::to_string(&distribution(taken_us))?);
    Ok(())
}

fn is_present(pagemap: &File, address: usize) -> std::io::Result<bool> {
    let mut word = [0; 8];
    pagemap.read_exact_at(&mut word, (address / PAGE_BYTES * 8) as u64)?;
    Ok(u64::from_ne_bytes(word) >> 63 == 1)
}

fn pause(options: &Options) {
    let gap = Duration::from_micros(options.gap_us);
    if options.gap == Gap::Sleep {
        return std::thread::sleep(gap);
    }
    let started = Instant::now();
    while started.elapsed() < gap {
        std::hint::spin_loop();
    }
}

fn distribution(mut taken_us: Vec<f64>) -> Latency {
    let mut clock: Vec<f64> = (0..1000).map(|_| Instant::now().elapsed().as_secs_f64() * 1e6).collect();
    clock.sort_by(f64::total_cmp);
    taken_us.sort_by(f64::total_cmp);
    let at = |share: f64| taken_us[((taken_us.len() - 1) as f64 * share).round() as usize];
    Latency {
        lap: "latency".to_owned(),
        faults: taken_us.len(),
        min_us: at(0.0),
        p50_us: at(0.5),
        p90_us: at(0.9),
        p99_us: at(0.99),
        p999_us: at(0.999),
        max_us: at(1.0),
        clock_us: clock[500],
    }
}
