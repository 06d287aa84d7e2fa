//! Checks every byte of its memory against a model, through everything a program can do to its address space.
//!
//! Contents derive from (region, page, generation), so the model of a page is a generation and perhaps one word that was
//! changed since. Threads own regions of their own, share one that all of them only read, and share one in which every
//! page has its owner; they map, unmap parts, move, grow, shrink, discard, protect, move the heap's end, fork, and sleep.
//! A forked child verifies all that its thread owned, goes on mutating, verifies again and reports by its exit status,
//! while its parent goes on as well.
//!
//! ```text
//! memory-tester --seed 7 --seconds 60 --mb 256 --threads 4
//! ```
//!
//! The sequence of operations of each thread follows from the seed; how threads meet does not. The mix differs by seed:
//! some operations are left out altogether. On a mismatch it says address, expected and found word, region, page, the
//! last operations of that thread, and the seed, and ends with status 1. `--plant-bug` flips one bit behind the model's
//! back half way: the run must fail.

mod model;
mod os;
mod worker;

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use compcache_testkit::seed::Seed;

use crate::model::Region;
use crate::worker::{CHECKED, Common, FORKS, OPERATIONS, Worker};

fn main() -> ExitCode {
    let options = Options::from_arguments();
    eprintln!(
        "memory-tester --seed {} --seconds {} --mb {} --threads {}{}",
        options.seed,
        options.seconds,
        options.mb,
        options.threads,
        if options.plant_bug { " --plant-bug" } else { "" }
    );
    let seed = Seed::fixed(options.seed);
    let deadline = Instant::now() + Duration::from_secs_f64(options.seconds);
    let budget_pages = options.mb * 256 / (options.threads + 1);
    let common = Common {
        seed: options.seed,
        read_only: Region::new(seed.part(1000).number(), budget_pages / 2, true),
        interleaved: os::map(budget_pages / 2),
        interleaved_pages: budget_pages / 2,
        threads: options.threads,
        start: Instant::now(),
    };
    std::thread::scope(|scope| {
        for which in 0..options.threads {
            let (common, part) = (&common, seed.part(which as u64));
            let plant_at = (options.plant_bug && which == 0)
                .then(|| Instant::now() + Duration::from_secs_f64(options.seconds / 2.0));
            scope.spawn(move || {
                let mut worker = Worker::new(common, part, which, budget_pages);
                worker.plant_at = plant_at;
                worker.work_until(deadline);
                worker.check_everything();
                worker.reap(true);
            });
        }
    });
    println!(
        "right: {} operations, {} pages checked, {} forks (seed {})",
        OPERATIONS.load(Ordering::Relaxed),
        CHECKED.load(Ordering::Relaxed),
        FORKS.load(Ordering::Relaxed),
        options.seed
    );
    ExitCode::SUCCESS
}

struct Options {
    seed: u64,
    seconds: f64,
    mb: usize,
    threads: usize,
    plant_bug: bool,
}

impl Options {
    fn from_arguments() -> Self {
        let mut options = Self { seed: 0, seconds: 10.0, mb: 64, threads: 3, plant_bug: false };
        let mut seeded = false;
        let mut arguments = std::env::args().skip(1);
        while let Some(flag) = arguments.next() {
            if flag == "--plant-bug" {
                options.plant_bug = true;
                continue;
            }
            let value = arguments.next().and_then(|text| text.parse::<f64>().ok());
            let Some(value) = value.filter(|value| *value >= 0.0) else { usage(&flag) };
            match flag.as_str() {
                "--seed" => (options.seed, seeded) = (value as u64, true),
                "--seconds" => options.seconds = value,
                "--mb" => options.mb = (value as usize).max(4),
                "--threads" => options.threads = (value as usize).clamp(1, 12),
                _ => usage(&flag),
            }
        }
        if !seeded {
            // Below 2^53, so that it can be given back as a number of any kind.
            options.seed = Seed::for_test("memory-tester").number() >> 16;
        }
        options
    }
}

fn usage(flag: &str) -> ! {
    eprintln!("{flag}: memory-tester [--seed N] [--seconds S] [--mb M] [--threads T] [--plant-bug]");
    std::process::exit(2);
}
