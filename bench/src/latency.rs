//! Scenario `latency`: how long one access to one page that is not resident takes, on a machine that does nothing else.
//!
//! Twice: with a program that stays busy between two faults, and with one that sleeps, whose CPU has to wake up first.

use std::path::Path;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use crate::compare::{Comparison, laps};
use crate::scan::{content_argument, note_content, parse_sides, print_targets, worker};
use crate::side::{Bench, Side, SideRun};
use crate::stat::{Spread, Target};
use crate::table::{Table, cell};

/// What `latency` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Kinds of content.
    #[arg(long, value_delimiter = ',', default_value = "python")]
    content: Vec<String>,
    /// The sides.
    #[arg(long, value_delimiter = ',')]
    sides: Vec<String>,
}

/// Runs the scenario.
///
/// # Errors
/// A run failed, or returned wrong bytes; content could not be made.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let (megabytes, cap_mb, faults) = if quick { (48, 16, 200) } else { (256, 64, 5000) };
    let settings = json!({"megabytes": megabytes, "cap_mb": cap_mb, "faults": faults, "rounds": rounds});
    let mut comparison = Comparison::new(bench, bench.record("latency", settings), rounds);
    let sides = match options.sides.is_empty() {
        true => Side::list(&["ours", "zram:lz4", "zram:lzo-rle", "zswap:lzo", "disk"]),
        false => parse_sides(&options.sides)?,
    };
    let mut targets = Vec::new();
    for content in &options.content {
        let Some(share) = note_content(&mut comparison.record, content) else { continue };
        for gap in ["spin", "sleep"] {
            println!(
                "\nlatency of single random faults, us, {gap} between them, {content} ({share:.1} % same-filled), {rounds} rounds"
            );
            let arguments = [megabytes.to_string(), faults.to_string(), "--gap".into(), gap.to_owned()];
            let mut job = worker("latency", &arguments)?;
            job.words.extend(["--content".into(), content_argument(content)?.into()]);
            let question = json!({"content": content, "gap": gap});
            let answers = comparison.ask(&question, &sides, cap_mb << 20, &job);
            let mut table = Table::new(&["side", "min", "p50", "p90", "p99", "p99.9", "max"]);
            for (nth, side) in answers.sides.iter().enumerate() {
                let columns = ["min_us", "p50_us", "p90_us", "p99_us", "p999_us", "max_us"];
                let cells = columns.map(|name| cell(answers.spread(nth, |run| number(run, name))));
                table.line([side.to_string()].into_iter().chain(cells));
                if *side == Side::Ours("lz4".to_owned()) && gap == "spin" {
                    targets.push(p50_target(content, answers.spread(nth, |run| number(run, "p50_us"))));
                }
            }
            print!("{table}");
        }
    }
    print_targets(&targets);
    comparison.finish(Ok(()), record)
}

fn number(run: &SideRun, name: &str) -> Option<f64> {
    laps(run).first()?[name].as_f64()
}

fn p50_target(content: &str, measured: Option<Spread>) -> Target {
    Target {
        about: format!("p50 of a single random fault, {content}"),
        measured,
        bound: 12.0,
        at_least: false,
        unit: "us",
    }
}
