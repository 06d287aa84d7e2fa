//! Scenario `programs`: real programs in a quarter of the memory they take by themselves.
//!
//! The question: is a program that somebody uses ever slower with us than with kernel zram, and is its output, byte for
//! byte, what it is without a cap? Each program runs once without a cap; its output is kept, and its peak of resident
//! anonymous memory, divided by four, is the cap.

pub mod inputs;

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Result, bail};
use clap::Args;
use compcache_testkit::features::find_program;
use serde_json::{Value, json};

use crate::compare::{Answers, Comparison};
use crate::run::{Job, Outcome, Output};
use crate::scan::{parse_sides, print_targets};
use crate::side::{Bench, Side, SideRun};
use crate::stat::Target;
use crate::table::{Table, cell, mib};
use inputs::Much;

/// What `programs` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Only these; also fft, simulator, simulators, build, filter, redis.
    #[arg(long, value_delimiter = ',', default_value = "python,sort,gcc,sqlite,node,java")]
    only: Vec<String>,
    /// The sides; the first is what the others are divided by.
    #[arg(long, value_delimiter = ',')]
    sides: Vec<String>,
    /// The part of its peak that a program gets is one over this.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    part: u64,
}

/// One program, ready to run.
pub struct Program {
    /// The word for it.
    pub name: &'static str,
    /// The program and its arguments.
    pub words: Vec<OsString>,
    /// The programs that have to be there.
    pub needs: Vec<OsString>,
    /// What it needs in its environment to do the same every time.
    pub environment: Vec<(&'static str, OsString)>,
}

impl Program {
    /// What of it is not installed.
    pub fn lacks(&self) -> Option<&OsString> {
        self.needs.iter().find(|name| find_program(&name.to_string_lossy()).is_none())
    }

    /// Runs it once without a cap, its output kept in `reference`. Returns what it took, and the job to run it again and compare.
    ///
    /// # Errors
    /// It could not be run, or failed.
    pub fn alone(&self, bench: &Bench, reference: &Path) -> Result<(Outcome, Job)> {
        let mut job = Job::new(self.words.iter());
        job.environment = self.environment.clone();
        job.output = Output::Save(reference.to_owned());
        let alone = bench.run(&Side::Uncapped, 0, &job)?.outcome;
        if alone.exit != 0 {
            bail!("{} fails without a cap, exit status {}: {}", self.name, alone.exit, alone.stderr);
        }
        job.output = Output::Compare(reference.to_owned());
        Ok((alone, job))
    }
}

/// Runs the scenario.
///
/// # Errors
/// A run of ours failed or its output was different; no program is installed.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let settings = json!({"quick": quick, "part": options.part, "rounds": rounds});
    let mut comparison = Comparison::new(bench, bench.record("programs", settings), rounds);
    let sides = match options.sides.is_empty() {
        true => Side::list(&["ours", "zram:lz4", "uncapped"]),
        false => parse_sides(&options.sides)?,
    };
    let much = if quick { Much::Small } else { Much::Full };
    let measured = compare_all(&mut comparison, options, &sides, much);
    comparison.finish(measured, record)
}

fn compare_all(comparison: &mut Comparison<'_>, options: &Options, sides: &[Side], much: Much) -> Result<()> {
    let cap_bytes = |peak_bytes: u64| peak_bytes / options.part;
    let targets = compare(comparison, &options.only, much, sides, cap_bytes, |name, answers| Target {
        about: format!("{name}, times faster than zram:lz4"),
        measured: answers.ratio_of("zram:lz4", "ours:lz4", wall_s),
        bound: 1.0,
        at_least: true,
        unit: "x",
    })?;
    print_targets(&targets);
    Ok(())
}

/// Runs those of the programs called `names` that are installed, under the cap that `cap_bytes` makes of a program's peak, and prints what
/// that took on each side. Returns what `wanted` makes of each one's answers.
///
/// # Errors
/// No program has such a name, none is installed, or one fails without a cap.
pub fn compare(
    comparison: &mut Comparison<'_>,
    names: &[String],
    much: Much,
    sides: &[Side],
    cap_bytes: impl Fn(u64) -> u64,
    wanted: impl Fn(&str, &Answers) -> Target,
) -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for program in inputs::make_all(comparison.bench.session().directory(), much, names)? {
        if let Some(lacking) = program.lacks() {
            println!("\n{}: not here: {lacking:?} is not installed", program.name);
            continue;
        }
        let answers = compare_one(comparison, &program, sides, &cap_bytes)?;
        targets.push(wanted(program.name, &answers));
    }
    if targets.is_empty() {
        bail!("no program to run: install python3, g++, sqlite3, nodejs or a JDK");
    }
    Ok(targets)
}

fn compare_one(
    comparison: &mut Comparison<'_>,
    program: &Program,
    sides: &[Side],
    cap_bytes: impl Fn(u64) -> u64,
) -> Result<Answers> {
    let reference = comparison.bench.session().directory().join(format!("{}.out", program.name));
    let (alone, job) = program.alone(comparison.bench, &reference)?;
    let cap_bytes = cap_bytes(alone.peak.resident_bytes) / 4096 * 4096;
    let output_bytes = reference.metadata()?.len();
    let (peak, cap, output) = (mib(alone.peak.resident_bytes), mib(cap_bytes), mib(output_bytes));
    println!(
        "\n{}: peak {peak} MiB, in {cap} MiB, {output} MiB of output compared, {} rounds",
        program.name, comparison.rounds
    );
    let question = json!({"program": program.name, "peak_bytes": alone.peak.resident_bytes});
    let answers = comparison.ask(&question, sides, cap_bytes, &job);
    let table = print(&answers);
    comparison.record.summary(json!({"question": question, "table": table}));
    std::fs::remove_file(reference)?;
    Ok(answers)
}

/// Seconds by the clock.
pub fn wall_s(run: &SideRun) -> Option<f64> {
    Some(run.outcome.wall_s)
}

fn cpu_s(run: &SideRun) -> Option<f64> {
    Some(run.outcome.cpu_s())
}

fn print(answers: &Answers) -> Value {
    let mut table = Table::new(&[
        "side",
        "wall s",
        "CPU s",
        "x wall",
        "x CPU",
        "resident MiB",
        "held MiB",
        "total MiB",
        "group MiB",
        "x group",
    ]);
    let mut lines = Vec::new();
    for (nth, side) in answers.sides.iter().enumerate() {
        let wall = answers.ratio(nth, 0, wall_s);
        let cpu = answers.ratio(nth, 0, cpu_s);
        let group = answers.ratio(nth, 0, SideRun::group_bytes);
        let bytes = |number: fn(&SideRun) -> Option<f64>| {
            cell(answers.spread(nth, number).map(|spread| mib(spread.median as u64)))
        };
        table.line([
            side.to_string(),
            cell(answers.spread(nth, wall_s)),
            cell(answers.spread(nth, cpu_s)),
            cell(wall.map(|spread| format!("{spread:.3}"))),
            cell(cpu.map(|spread| format!("{spread:.3}"))),
            bytes(|run| Some(run.resident_bytes() as f64)),
            bytes(|run| Some(run.held_bytes() as f64)),
            bytes(|run| Some(run.total_bytes() as f64)),
            bytes(SideRun::group_bytes),
            cell(group.map(|spread| format!("{:.2}", spread.median))),
        ]);
        lines.push(json!({
            "side": side.to_string(), "times_first_side_wall": wall, "times_first_side_cpu": cpu, "times_first_side_group": group,
        }));
    }
    print!("{table}");
    Value::Array(lines)
}
