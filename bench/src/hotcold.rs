//! Scenario `hotcold`: nine tenths of the accesses go to one tenth of the memory, scattered over all of it.
//!
//! The question: do hot pages stay? The hot tenth fits the cap two and a half times. The side without a cap says what
//! full speed is.

use std::path::Path;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use crate::compare::Comparison;
use crate::laps;
use crate::scan::{content_argument, note_content, parse_sides, print_targets, worker};
use crate::side::{Bench, Side};
use crate::stat::Target;

/// What `hotcold` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Kinds of content.
    #[arg(long, value_delimiter = ',', default_value = "python")]
    content: Vec<String>,
    /// The sides; the first is what the others are divided by.
    #[arg(long, value_delimiter = ',')]
    sides: Vec<String>,
}

/// Runs the scenario.
///
/// # Errors
/// A run failed, or returned wrong bytes; content could not be made.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let (megabytes, cap_mb) = if quick { (48, 16) } else { (256, 64) };
    let accesses = megabytes * 256 * if quick { 2 } else { 8 };
    let settings = json!({"megabytes": megabytes, "cap_mb": cap_mb, "accesses": accesses, "rounds": rounds});
    let mut comparison = Comparison::new(bench, bench.record("hotcold", settings), rounds);
    let sides = match options.sides.is_empty() {
        true => Side::list(&["ours", "zram:lz4", "zram:lzo-rle", "zswap:lzo", "disk", "uncapped"]),
        false => parse_sides(&options.sides)?,
    };
    let mut targets = Vec::new();
    for content in &options.content {
        let Some(share) = note_content(&mut comparison.record, content) else { continue };
        for one_cpu in [false, true] {
            let cpus = if one_cpu { "one CPU" } else { "all CPUs" };
            println!(
                "\nhotcold {megabytes} MiB in {cap_mb} MiB, {content} ({share:.1} % same-filled), {cpus}, {rounds} rounds"
            );
            let arguments =
                [megabytes.to_string(), accesses.to_string(), "--content".into(), content_argument(content)?];
            let mut job = worker("hotcold", &arguments)?;
            job.pin = one_cpu.then_some(0);
            let question = json!({"content": content, "one_cpu": one_cpu});
            let answers = comparison.ask(&question, &sides, cap_mb << 20, &job);
            let printed = laps::print(&answers);
            comparison.record.summary(json!({"question": question, "table": printed}));
            targets.push(Target {
                about: format!("hotcold, {content}, {cpus}, times faster than zram:lz4"),
                measured: answers.ratio_of("zram:lz4", "ours:lz4", laps::later_us),
                bound: 1.2,
                at_least: true,
                unit: "x",
            });
        }
    }
    print_targets(&targets);
    comparison.finish(Ok(()), record)
}
