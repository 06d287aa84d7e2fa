//! Scenario `swap-latency`: how long each single read and write of swap takes, from its submission to its completion.
//!
//! Document 002 of compcache measured this with SystemTap around swap_readpage and swap_writepage, for a disk and for
//! ramzswap. Here the kernel's own tracing does, around the bios ([`crate::trace`]): a page, or a few neighbours, each.
//! The scan program runs in a quarter of its memory, sequentially and at random, so that readahead helps and does not.
//!
//! Beside it stands what our server says of itself (`compcache show`): how long the pool took for a page, without the
//! kernel, the loop device and FUSE, which are most of the way.

use std::path::Path;

use anyhow::{Context, Error, Result, anyhow};
use clap::Args;
use serde_json::{Value, json};

use crate::baseline::loop_device::Throttle;
use crate::baseline::{Baseline, SwapPath};
use crate::ours;
use crate::run::{self, Job, Outcome};
use crate::scan::{content_argument, note_content, print_targets, worker};
use crate::side::Bench;
use crate::stat::{Spread, Target};
use crate::table::{Table, cell};
use crate::trace::{Bios, Trace};

/// What `swap-latency` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// disk, zram:CODEC, swap:CODEC (a disk of ours).
    #[arg(long, value_delimiter = ',', default_value = "disk,zram:lz4,swap:lz4")]
    sides: Vec<String>,
    /// The kind of content.
    #[arg(long, default_value = "python")]
    content: String,
}

/// One direction of one run, in microseconds.
#[derive(Clone, Copy, serde::Serialize)]
struct Durations {
    count: usize,
    min: f64,
    avg: f64,
    p50: f64,
    p99: f64,
    max: f64,
}

type Column = (&'static str, fn(&Durations) -> f64);

const COLUMNS: [Column; 5] = [
    ("min", |all| all.min),
    ("avg", |all| all.avg),
    ("p50", |all| all.p50),
    ("p99", |all| all.p99),
    ("max", |all| all.max),
];

impl Durations {
    fn of(mut ns: Vec<u64>) -> Option<Durations> {
        ns.sort_unstable();
        let us = |ns: u64| ns as f64 / 1000.0;
        let at = |share: f64| us(ns[((ns.len() - 1) as f64 * share) as usize]);
        let sum: u64 = ns.iter().sum();
        (!ns.is_empty()).then(|| Durations {
            count: ns.len(),
            min: at(0.0),
            avg: us(sum) / ns.len() as f64,
            p50: at(0.5),
            p99: at(0.99),
            max: at(1.0),
        })
    }

    /// Of the server's own histogram.
    fn of_server(said: &Value) -> Option<Durations> {
        let us = |name: &str| said[name].as_f64().map(|ns| ns / 1000.0);
        Some(Durations {
            count: said["count"].as_u64()? as usize,
            min: us("min_ns")?,
            avg: us("avg_ns")?,
            p50: us("p50_ns")?,
            p99: us("p99_ns")?,
            max: us("max_ns")?,
        })
    }
}

/// A line of the table: who, which direction, and each round.
struct Line {
    who: String,
    direction: &'static str,
    rounds: Vec<Durations>,
}

/// Runs the scenario.
///
/// # Errors
/// A run failed, or returned wrong bytes; content could not be made; the kernel does not trace.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let (megabytes, cap_mb, passes) = if quick { (48, 16, 1) } else { (192, 48, 2) };
    let settings = json!({"megabytes": megabytes, "cap_mb": cap_mb, "passes": passes, "rounds": rounds});
    let mut kept = bench.record("swap-latency", settings);
    let sides = options.sides.iter().map(|word| word.parse::<SwapPath>().map_err(anyhow::Error::msg));
    let sides = sides.collect::<Result<Vec<_>>>()?;
    let share = note_content(&mut kept, &options.content).context("no content")?;
    let mut targets = Vec::new();
    let mut failures = 0;
    for order in ["sequential", "random"] {
        println!(
            "\nswap of scan {megabytes} MiB in {cap_mb} MiB, {order}, {} ({share:.1} % same-filled), us for a bio, {rounds} rounds",
            options.content
        );
        let words = [megabytes.to_string(), passes.to_string(), "--order".into(), order.into(), "--content".into()];
        let job = worker("scan", &words)?;
        let job = Job { words: [job.words, vec![content_argument(&options.content)?.into()]].concat(), ..job };
        let mut lines: Vec<Line> = Vec::new();
        for round in 0..rounds {
            let order_of_sides: Vec<_> =
                if round % 2 == 1 { sides.iter().rev().collect() } else { sides.iter().collect() };
            for side in order_of_sides {
                let found = match one(bench, side, cap_mb << 20, &job) {
                    Ok(found) => found,
                    Err(NotMeasured { error, fails }) => {
                        failures += usize::from(fails);
                        println!("  {side}: {error:#}");
                        continue;
                    }
                };
                for (who, direction, durations) in found {
                    kept.run(json!({"order": order, "round": round, "who": who, "what": direction, "us": durations}));
                    match lines.iter_mut().find(|line| line.who == who && line.direction == direction) {
                        Some(line) => line.rounds.push(durations),
                        None => lines.push(Line { who, direction, rounds: vec![durations] }),
                    }
                }
            }
        }
        lines.sort_by_key(|line| sides.iter().position(|side| line.who.starts_with(&side.to_string())));
        kept.summary(json!({"order": order, "table": print(&lines)}));
        targets.extend(target(&lines, order));
    }
    print_targets(&targets);
    let measured = if failures > 0 { Err(anyhow!("{failures} runs failed, see above")) } else { Ok(()) };
    kept.finish(measured, record)
}

/// Why a run was not measured.
struct NotMeasured {
    error: Error,
    /// It fails the scenario. Else this machine does not have the side, or the kernel's own ended the program.
    fails: bool,
}

impl NotMeasured {
    fn failed(error: Error) -> NotMeasured {
        NotMeasured { error, fails: true }
    }
}

type Found = Vec<(String, &'static str, Durations)>;

fn one(bench: &Bench, side: &SwapPath, cap_bytes: u64, job: &Job) -> Result<Found, NotMeasured> {
    let place = Baseline::set_up(bench.session(), side, cap_bytes, Throttle::default(), bench.compcache());
    let place = place.map_err(|error| NotMeasured { fails: ours::has_failed(&error), error })?;
    let (outcome, bios) = traced(bench, &place, job).map_err(NotMeasured::failed)?;
    if outcome.exit != 0 {
        let error = anyhow!("scan failed, exit status {}: {}", outcome.exit, outcome.stderr.trim());
        return Err(NotMeasured { error, fails: outcome.is_wrong() || side.is_ours() });
    }
    found(side, &place, bios).map_err(NotMeasured::failed)
}

fn traced(bench: &Bench, place: &Baseline<'_>, job: &Job) -> Result<(Outcome, Bios)> {
    let device = place.swap_device().context("no swap device")?;
    let trace = Trace::begin(bench.session(), &device)?;
    let outcome = run::run(&Job { patience: bench.patience(), ..job.clone() }, place)?;
    Ok((outcome, trace.end()?))
}

fn found(side: &SwapPath, place: &Baseline<'_>, bios: Bios) -> Result<Found> {
    let both = [("read", Durations::of(bios.reads)), ("write", Durations::of(bios.writes))];
    let mut found: Vec<_> = both.into_iter().filter_map(|(what, all)| Some((side.to_string(), what, all?))).collect();
    if let Some(server) = place.server() {
        let state = server.state()?;
        for (what, name) in [("read", "reads"), ("write", "writes")] {
            let said = Durations::of_server(&state["latency"][name]).context("the server says no latencies")?;
            found.push((format!("{side}, as the server says"), what, said));
        }
    }
    Ok(found)
}

fn print(lines: &[Line]) -> Value {
    let mut table = Table::new(&["side", "", "count", "min", "avg", "p50", "p99", "max"]);
    let mut all = Vec::new();
    for line in lines {
        let spread = |number: &dyn Fn(&Durations) -> f64| Spread::of(line.rounds.iter().map(number));
        let count = spread(&|all| all.count as f64).map(|count| format!("{:.0}", count.median));
        let columns = COLUMNS.map(|(_, number)| spread(&number));
        let cells = columns.iter().enumerate().map(|(nth, spread)| match nth {
            1 => cell(*spread),
            _ => cell(spread.map(|spread| format!("{:.1}", spread.median))),
        });
        table.line([line.who.clone(), line.direction.to_owned(), cell(count)].into_iter().chain(cells));
        let named: Value =
            COLUMNS.iter().zip(columns).map(|((name, _), spread)| (name.to_string(), json!(spread))).collect();
        all.push(json!({"who": line.who, "what": line.direction, "us": named}));
    }
    print!("{table}");
    Value::Array(all)
}

/// Reads of ours no slower than its writes.
fn target(lines: &[Line], order: &str) -> Option<Target> {
    let averages = |direction| {
        let line = lines.iter().find(|line| line.direction == direction && line.who == "swap:lz4")?;
        Some(line.rounds.iter().map(|all| Some(all.avg)).collect::<Vec<_>>())
    };
    let (reads, writes) = (averages("read")?, averages("write")?);
    Some(Target {
        about: format!("{order}: time of a read in those of a write, ours"),
        measured: Spread::of_ratios(&reads, &writes),
        bound: 1.0,
        at_least: false,
        unit: "x",
    })
}
