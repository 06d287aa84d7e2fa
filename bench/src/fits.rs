//! Scenario `fits`: what compcache costs where there is nothing for it to do.
//!
//! | question   | what is done                                                            | sides                                            | wanted, in time |
//! |------------|-------------------------------------------------------------------------|--------------------------------------------------|-----------------|
//! | `programs` | those of [`crate::programs`], under a limit of four times their peak    | by themselves; under `compcache run --ram`       | 1.02 at most    |
//! | `reads`    | a file is read that is in the page cache already: see [`reads`]         | its file system; a mount of ours, and an origin  | 1.03 at most    |
//!
//! Nothing is compressed, and nobody waits for a disk: what is compared is what it costs that ours is there. For a program that is the start of `compcache run`
//! and of its threads, and that its memory is watched: the shorter a program, the larger the share of the start. The sides take turns, the order turned round every second
//! time, and what they are divided by is what ran a moment before or after. Every output is compared with that of a run without ours, and every byte that is read with what was
//! written.

mod reads;

use std::path::Path;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde_json::json;

use crate::compare::{Answers, Comparison};
use crate::iozone::image::Holds;
use crate::iozone::place::{self, Keeper};
use crate::programs;
use crate::programs::inputs::Much;
use crate::scan::print_targets;
use crate::side::{Bench, Side, SideRun};
use crate::stat::Target;

/// What `fits` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// What is asked.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "programs,reads")]
    questions: Vec<Question>,
    /// Only these programs; also the others of the scenario programs.
    #[arg(long, value_delimiter = ',', default_value = "python,sort,gcc,sqlite,node,java")]
    only: Vec<String>,
    /// The limit of a program, in times of its peak.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..=64))]
    times: u64,
    /// Who reads: plain, origin, and mounts as for iozone; the first one is what the others are divided by.
    #[arg(long, value_delimiter = ',', default_value = "plain,mount,origin")]
    sides: Vec<Keeper>,
    /// MiB in the file that is read [default: 256; 16 with --quick].
    #[arg(long, value_parser = clap::value_parser!(u64).range(4..=1 << 20))]
    megabytes: Option<u64>,
    /// What its pages hold.
    #[arg(long, value_enum, default_value_t = Holds::Real)]
    content: Holds,
    /// KiB that are read at once.
    #[arg(long, value_delimiter = ',', default_value = "4,64,1024")]
    record_sizes: Vec<u64>,
    /// How often in each round the file is read in each way [default: 4; 1 with --quick].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1000))]
    passes: Option<u64>,
}

/// A question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Question {
    /// What `compcache run` adds to programs.
    Programs,
    /// What a mount adds to reads.
    Reads,
}

/// At most so many times as long as a program takes by itself.
const WANTED_OF_PROGRAMS: f64 = 1.02;

/// Some programs take less than a second, and differ by more than what is asked for.
const ROUNDS_OF_PROGRAMS: usize = 20;

/// What programs run under, and what that is divided by.
const RUN: &str = "run:lz4";
const ALONE: &str = "uncapped";

/// Runs the scenario.
///
/// # Errors
/// A run failed, its output was different, or wrong bytes were read; nothing could be measured.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: Option<usize>, record: Option<&Path>) -> Result<()> {
    let plan = reads::Plan::of(options, quick, rounds)?;
    let rounds = rounds.unwrap_or(if quick { 1 } else { ROUNDS_OF_PROGRAMS });
    let settings = json!({
        "quick": quick, "programs": {"rounds": rounds, "times": options.times},
        "reads": plan.settings(), "sides": place::words(&options.sides),
    });
    let mut comparison = Comparison::new(bench, bench.record("fits", settings), rounds);
    let measured = ask_all(&mut comparison, options, &plan, quick);
    comparison.finish(measured, record)
}

fn ask_all(comparison: &mut Comparison<'_>, options: &Options, plan: &reads::Plan, quick: bool) -> Result<()> {
    for question in &options.questions {
        let targets = match question {
            Question::Programs => {
                let much = if quick { Much::Small } else { Much::Full };
                let cap_bytes = |peak_bytes: u64| peak_bytes * options.times;
                programs::compare(comparison, &options.only, much, &Side::list(&[ALONE, RUN]), cap_bytes, of_program)?
            }
            Question::Reads => reads::measure(comparison.bench, plan, &mut comparison.record)?,
        };
        print_targets(&targets);
        for target in &targets {
            comparison.record.summary(json!({
                "target": target.about, "bound": target.bound, "measured": target.measured, "met": target.met(),
            }));
        }
    }
    Ok(())
}

/// What is wanted of a program; says so if it did not fit.
fn of_program(name: &str, answers: &Answers) -> Target {
    let evicted = |run: &SideRun| run.evicted_pages().map(|pages| pages as f64);
    let most = (0..answers.sides.len()).filter_map(|nth| answers.spread(nth, evicted)).map(|spread| spread.max);
    if let Some(pages) = most.reduce(f64::max).filter(|pages| *pages > 0.0) {
        println!("  {pages} pages left {name} at most: it did not fit, so take a larger limit (--times)");
    }
    Target {
        about: format!("{name} under compcache run, in times of that by itself"),
        measured: answers.ratio_of(RUN, ALONE, programs::wall_s),
        bound: WANTED_OF_PROGRAMS,
        at_least: false,
        unit: "x",
    }
}
