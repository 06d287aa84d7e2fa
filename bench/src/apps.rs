//! Scenario `apps`: document 003's experiment. Programs of different nature in half of the memory they need, over a disk.
//!
//! The question: how many times faster than swapping to a disk is it to keep what does not fit compressed, and to write out, compressed and many at a
//! time, only what does not fit even so? On the disk there is, and on one that is as slow as in 2009.
//!
//! | side                             | what it is                                                                   | memory                   |
//! |----------------------------------|------------------------------------------------------------------------------|--------------------------|
//! | `disk`, `disk-2009`              | swap on a loop device, direct I/O                                            | the cap, by a control group |
//! | `zram:CODEC`                     | kernel zram: no disk                                                         | the cap, with what zram holds |
//! | `zswap:CODEC`, `zswap-2009:CODEC` | kernel zswap in front of `disk`                                             | the cap, with its pool   |
//! | `backed:CODEC`, `backed-2009:CODEC` | swap on a disk of ours with `disk`'s as its backing                      | the cap: three quarters by a control group, one the disk's limit |
//! | `spill:CODEC`, `spill-2009:CODEC` | `compcache run --ram CAP --spill` on an ext4 on such a loop device          | the cap, ours and all    |
//!
//! **Memory is meant to be the same on all sides, and is not quite.** The peak of resident anonymous memory without a cap, halved, is the cap. A control group
//! does not count what zram and zswap (in version 1) hold, so theirs is lower: it is found by running twice, under the cap and under what should be right with the
//! ratio seen there, and corrected by how far off the total was. (What came back from swap stays there, too, until it is written to, so that more is held
//! than what is out.) Where pages compress to half or worse no such limit exists; the side gets half of the cap. Ours is told the cap, and keeps to it as well as it can.
//!
//! What a side took is measured in the same way on all: resident anonymous memory, the largest resident shared memory of a process, and
//! what holds compressed pages, at the worst moment that was seen; of ours what it says itself, if that is more. It stands beside each ratio, in times of the cap; from [`SAME_MEMORY`] on
//! the table marks it (`!`): a side with more memory than others is compared with them in its favour. The control groups of the kernel's sides pay for the kernel's own memory
//! and for the page cache, too, which this does not count: to their disfavour. All files are read before, by the run without a cap, so that most of them are
//! charged elsewhere. What each group was charged at most, all of that included, and what was held beside it, stands apart (`group x cap`): ours runs in a group
//! without a limit, in which nothing is given back.
//!
//! Every output is compared, byte for byte, with that of the run without a cap.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::baseline::{SwapPath, cgroup};
use crate::compare::{Answers, Comparison};
use crate::programs::Program;
use crate::programs::inputs::{self, Much};
use crate::run::{Job, Peak};
use crate::scan::{parse_sides, print_targets};
use crate::side::{Bench, Side, SideRun};
use crate::stat::{Spread, Target};
use crate::table::{Table, cell, mib};

/// What `apps` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Only these; also gcc, node, java.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "sort,fft,simulator,simulators,build,filter,sqlite,redis,python"
    )]
    only: Vec<String>,
    /// disk, zram:CODEC, zswap:CODEC, spill:CODEC and backed:CODEC (ours), and disk-2009, zswap-2009:CODEC, spill-2009:CODEC, backed-2009:CODEC on a
    /// slow disk [default: all but those of `backed`, with the kernel's lz4 or lzo; with --quick nothing of the kernel's on the slow disk].
    #[arg(long, value_delimiter = ',')]
    sides: Vec<String>,
    /// The part of its peak that a program gets is one over this.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    part: u64,
    /// Inputs as large as those of `programs`; the slow disk takes many minutes for each.
    #[arg(long)]
    full: bool,
}

const SIDES: [&str; 7] =
    ["spill:lz4", "disk", "zram:lz4", "zswap:lzo", "spill-2009:lz4", "disk-2009", "zswap-2009:lzo"];
/// The first so many of them, in seconds.
const QUICK_SIDES: usize = 5;
/// From this ratio on, same-filled pages aside, pages compress.
const COMPRESSES: f64 = 1.1;
/// A side whose memory was more than so many times the cap had more than the others.
const SAME_MEMORY: f64 = 1.1;
/// How often it is tried to find out what a side takes.
const PROBES: usize = 3;

/// What was seen of a program.
struct Seen {
    name: &'static str,
    cap_bytes: u64,
    /// Of its pages that are not same-filled.
    ratio: Option<f64>,
    same_percent: Option<f64>,
    answers: Answers,
}

impl Seen {
    /// The side of that word.
    fn find(&self, word: &str) -> Option<usize> {
        self.answers.sides.iter().position(|side| side.to_string() == word)
    }

    /// What the side at `nth` took at the worst moment, in times of the cap.
    fn total_to_cap(&self, nth: usize) -> Option<f64> {
        let total = self.answers.spread(nth, |run| Some(run.total_bytes() as f64))?;
        Some(total.median / self.cap_bytes as f64)
    }

    /// What its control group was charged at most, and what was held beside it, in times of the cap.
    fn group_to_cap(&self, nth: usize) -> Option<f64> {
        let group = self.answers.spread(nth, SideRun::group_bytes)?;
        Some(group.median / self.cap_bytes as f64)
    }
}

/// As it is shown.
fn marked(to_cap: f64) -> String {
    format!("{to_cap:.2}{}", if to_cap > SAME_MEMORY { "!" } else { "" })
}

/// Runs the scenario.
///
/// # Errors
/// A run of ours failed or its output was different; no program is installed.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let settings = json!({"quick": quick, "part": options.part, "rounds": rounds, "full": options.full});
    let mut comparison = Comparison::new(bench, bench.record("apps", settings), rounds);
    let sides = match options.sides.is_empty() {
        true => Side::list(if quick { &SIDES[..QUICK_SIDES] } else { &SIDES }),
        false => parse_sides(&options.sides)?,
    };
    let much = match (quick, options.full) {
        (true, _) => Much::Tiny,
        (false, true) => Much::Full,
        (false, false) => Much::Small,
    };
    let measured = compare_all(&mut comparison, options, &sides, much);
    comparison.finish(measured, record)
}

fn compare_all(comparison: &mut Comparison<'_>, options: &Options, sides: &[Side], much: Much) -> Result<()> {
    let mut all = Vec::new();
    for program in inputs::make_all(comparison.bench.session().directory(), much, &options.only)? {
        match program.lacks() {
            Some(lacking) => println!("\n{}: not here: {lacking:?} is not installed", program.name),
            None => all.push(compare(comparison, &program, sides, options.part)?),
        }
    }
    if all.is_empty() {
        bail!("no program to run");
    }
    let summary = print_all(&all);
    comparison.record.summary(summary);
    let targets = targets(&all);
    print_targets(&targets);
    let met =
        targets.iter().map(|target| json!({"target": target.about, "measured": target.measured, "met": target.met()}));
    comparison.record.summary(met.collect());
    Ok(())
}

fn compare(comparison: &mut Comparison<'_>, program: &Program, sides: &[Side], part: u64) -> Result<Seen> {
    let started = Instant::now();
    let reference = comparison.bench.session().directory().join(format!("{}.out", program.name));
    let (alone, job) = program.alone(comparison.bench, &reference)?;
    let need_bytes = alone.peak.resident_bytes;
    let cap_bytes = need_bytes / part / 4096 * 4096;
    println!(
        "\n{}: needs {} MiB, {:.1} s; in {} MiB, {} KiB of output compared, {} rounds",
        program.name,
        mib(need_bytes),
        alone.wall_s,
        mib(cap_bytes),
        reference.metadata()?.len() >> 10,
        comparison.rounds
    );
    let limits: Vec<_> = sides.iter().map(|side| limit(comparison.bench, side, need_bytes, cap_bytes, &job)).collect();
    let limit_of =
        |side: &Side| sides.iter().zip(&limits).find(|(one, _)| *one == side).map_or(cap_bytes, |(_, &limit)| limit);
    let question = json!({"program": program.name, "need_bytes": need_bytes, "cap_bytes": cap_bytes, "alone": alone});
    let answers = comparison.ask_with(&question, sides, limit_of, &job);
    let (ratio, same_percent) = ratio(&answers);
    let seen = Seen { name: program.name, cap_bytes, ratio, same_percent, answers };
    let table = print(&seen);
    comparison
        .record
        .summary(json!({"question": question, "ratio": ratio, "same_percent": same_percent, "table": table}));
    std::fs::remove_file(reference)?;
    println!("  all of this took {:.0} s", started.elapsed().as_secs_f64());
    Ok(seen)
}

/// The limit of a side's control group under which what it holds beside fits into the cap, too.
fn limit(bench: &Bench, side: &Side, need_bytes: u64, cap_bytes: u64, job: &Job) -> u64 {
    if !holds_beside(side, cgroup::is_unified()) {
        return cap_bytes;
    }
    let Some(first) = probe(bench, side, cap_bytes, job) else { return cap_bytes };
    let share = first.held.memory_bytes as f64 / first.held.original_bytes.max(1) as f64;
    let limit = limit_for(need_bytes as f64, cap_bytes as f64, share);
    probe(bench, side, limit, job).map_or(limit, |second| corrected(limit, cap_bytes, second.total_bytes))
}

/// Whether a side holds pages in memory that its control group does not pay for.
fn holds_beside(side: &Side, unified: bool) -> bool {
    match side {
        Side::Kernel(SwapPath::Zram(_)) => true,
        Side::Kernel(SwapPath::Zswap(..)) => !side.pays_for_its_pool(unified),
        _ => false,
    }
}

/// What a run under this limit takes; nothing of one that did not end as it should, which says so.
fn probe(bench: &Bench, side: &Side, limit_bytes: u64, job: &Job) -> Option<Peak> {
    for _ in 0..PROBES {
        // One that is not here is found missing, and named, when it is to be measured.
        let outcome = bench.run(side, limit_bytes, job).ok()?.outcome;
        if outcome.exit == 0 {
            return Some(outcome.peak);
        }
    }
    println!("  {side}: what it takes in {} MiB is not known: it failed {PROBES} times", mib(limit_bytes));
    None
}

/// A limit that is lower by what was taken beyond the cap with this one, or higher by what was left of it; at least half of the cap.
fn corrected(limit: u64, cap: u64, total: u64) -> u64 {
    (limit + cap).saturating_sub(total).clamp(cap / 2, cap) / 4096 * 4096
}

/// `limit + (need - limit) * share = cap`, where a page that is out takes `share` of a page; at least half of the cap.
fn limit_for(need: f64, cap: f64, share: f64) -> u64 {
    let limit = if share < 1.0 { (cap - need * share) / (1.0 - share) } else { 0.0 };
    limit.clamp(cap / 2.0, cap) as u64 / 4096 * 4096
}

/// How well what left memory compressed, same-filled pages aside, and how many of a hundred were same-filled; as zram saw it, or else ours.
fn ratio(answers: &Answers) -> (Option<f64>, Option<f64>) {
    let find = |wanted: fn(&Side) -> bool| answers.sides.iter().position(wanted);
    if let Some(zram) = find(|side| matches!(side, Side::Kernel(SwapPath::Zram(_)))) {
        let same_bytes = |run: &SideRun| 4096.0 * run.outcome.peak.held.same_pages as f64;
        let of = |number: &dyn Fn(&SideRun) -> f64| answers.spread(zram, |run| Some(number(run))).map(|all| all.median);
        let held = |run: &SideRun| run.outcome.peak.held;
        return (
            of(&|run| (held(run).original_bytes as f64 - same_bytes(run)) / held(run).compressed_bytes as f64),
            of(&|run| 100.0 * same_bytes(run) / held(run).original_bytes as f64),
        );
    }
    let Some(ours) = find(|side| matches!(side, Side::Ours(_) | Side::Spill(..))) else { return (None, None) };
    let of_peak = |run: &SideRun| {
        let number = |name: &str| run.stats.as_ref()?[name].as_f64();
        Some(number("orig_data_peak_bytes")? / number("compr_data_at_peak_bytes")?)
    };
    (answers.spread(ours, of_peak).map(|all| all.median), None)
}

fn wall_s(run: &SideRun) -> Option<f64> {
    Some(run.outcome.wall_s)
}

fn is_on_slow_disk(side: &Side) -> bool {
    side.to_string().contains("-2009")
}

/// How many times faster than swap on `disk` the side at `nth` is.
fn times_faster(answers: &Answers, nth: usize, disk: &str) -> Option<Spread> {
    let disk = answers.sides.iter().position(|side| side.to_string() == disk)?;
    answers.ratio(disk, nth, wall_s)
}

fn print(seen: &Seen) -> Value {
    let headings = [
        "side",
        "wall s",
        "x disk",
        "x disk-2009",
        "CPU s",
        "machine CPU s",
        "resident MiB",
        "held MiB",
        "total MiB",
        "x cap",
        "group x cap",
        "written MiB",
    ];
    let mut table = Table::new(&headings);
    let mut lines = Vec::new();
    let answers = &seen.answers;
    for (nth, side) in answers.sides.iter().enumerate() {
        let bytes = |number: fn(&SideRun) -> Option<u64>| {
            answers.spread(nth, |run| number(run).map(|bytes| bytes as f64)).map(|spread| spread.median as u64)
        };
        let of_zram = matches!(side, Side::Kernel(SwapPath::Zram(_)));
        let fast = times_faster(answers, nth, "disk").filter(|_| !is_on_slow_disk(side));
        let slow = times_faster(answers, nth, "disk-2009").filter(|_| is_on_slow_disk(side) || of_zram);
        let total = bytes(|run| Some(run.total_bytes()));
        let (to_cap, group_to_cap) = (seen.total_to_cap(nth), seen.group_to_cap(nth));
        table.line([
            side.to_string(),
            cell(answers.spread(nth, wall_s)),
            cell(fast),
            cell(slow),
            cell(answers.spread(nth, |run| Some(run.outcome.cpu_s()))),
            cell(answers.spread(nth, |run| Some(run.outcome.machine_cpu_s)).map(|all| format!("{:.2}", all.median))),
            cell(bytes(|run| Some(run.resident_bytes())).map(mib)),
            cell(bytes(|run| Some(run.held_bytes())).map(mib)),
            cell(total.map(mib)),
            cell(to_cap.map(marked)),
            cell(group_to_cap.map(|to_cap| format!("{to_cap:.2}"))),
            cell(bytes(spilled_bytes).map(mib)),
        ]);
        lines.push(json!({
            "side": side.to_string(), "wall_s": answers.spread(nth, wall_s), "x_disk": fast, "x_disk_2009": slow, "total_to_cap": to_cap,
            "group_to_cap": group_to_cap,
        }));
    }
    let number = |value: Option<f64>| cell(value.map(|value| format!("{value:.2}")));
    println!("  pages compress {} : 1, {} % of them same-filled", number(seen.ratio), number(seen.same_percent));
    print!("{table}");
    Value::Array(lines)
}

/// The most that was in the spill file at a time.
fn spilled_bytes(run: &SideRun) -> Option<u64> {
    run.stats.as_ref()?["spill_peak_bytes"].as_u64()
}

/// The experiment's own table: how many times faster than swap on the same disk.
fn print_all(all: &[Seen]) -> Value {
    let mut sides: Vec<String> = Vec::new();
    for side in all.iter().flat_map(|seen| &seen.answers.sides) {
        let word = side.to_string();
        if !word.starts_with("disk") && !sides.contains(&word) {
            sides.push(word);
        }
    }
    let headings = ["", "ratio", "same %"].into_iter().chain(sides.iter().map(String::as_str));
    let mut table = Table::new(&headings.collect::<Vec<_>>());
    let mut lines = Vec::new();
    for seen in all {
        let number = |value: Option<f64>| cell(value.map(|value| format!("{value:.2}")));
        let speed_ups: Vec<_> = sides.iter().map(|side| speed_up(seen, side)).collect();
        let totals: Vec<_> = sides.iter().map(|side| seen.total_to_cap(seen.find(side)?)).collect();
        let cells = [seen.name.to_owned(), number(seen.ratio), number(seen.same_percent)];
        let faster = speed_ups.iter().zip(&totals).map(|(faster, total)| match (faster, total) {
            (Some(faster), Some(total)) => format!("{faster}, {}", marked(*total)),
            _ => cell(*faster),
        });
        table.line(cells.into_iter().chain(faster));
        lines.push(json!({
            "program": seen.name, "ratio": seen.ratio, "sides": sides, "times_faster": speed_ups, "total_to_cap": totals,
        }));
    }
    println!("\ntimes faster than swap on the same disk, and memory in times of the cap (! from {SAME_MEMORY} on)");
    print!("{table}");
    Value::Array(lines)
}

/// Over swap on the disk that the side has; over the fast one if it has none.
fn speed_up(seen: &Seen, word: &str) -> Option<Spread> {
    let nth = seen.find(word)?;
    let slow = is_on_slow_disk(&seen.answers.sides[nth]);
    times_faster(&seen.answers, nth, if slow { "disk-2009" } else { "disk" })
}

fn targets(all: &[Seen]) -> Vec<Target> {
    let mut targets = Vec::new();
    for (disk, suffix) in [("disk-2009", "-2009"), ("disk", "")] {
        for seen in all.iter().filter(|seen| word_of(seen, disk).is_some()) {
            let Some(word) = word_of(seen, &format!("spill{suffix}")) else { continue };
            let compresses = seen.ratio.is_some_and(|ratio| ratio >= COMPRESSES);
            targets.push(Target {
                about: format!("{}, times faster than {disk}", seen.name),
                measured: speed_up(seen, &word),
                bound: if compresses && !suffix.is_empty() { 1.2 } else { 1.0 },
                at_least: true,
                unit: "x",
            });
        }
        let to_zswap = all.iter().filter_map(|seen| {
            let (ours, zswap) = (word_of(seen, &format!("spill{suffix}"))?, word_of(seen, &format!("zswap{suffix}"))?);
            seen.answers.ratio_of(&zswap, &ours, wall_s)
        });
        let to_zswap: Vec<_> = to_zswap.collect();
        if to_zswap.is_empty() {
            continue;
        }
        let as_fast = to_zswap.iter().filter(|ratio| ratio.median >= 1.0).count() as f64;
        let share = as_fast / to_zswap.len() as f64;
        targets.push(Target {
            about: format!("share of {} programs that are at least as fast as with zswap{suffix}", to_zswap.len()),
            measured: Spread::of([share]),
            bound: 0.75,
            at_least: true,
            unit: "",
        });
    }
    targets
}

/// The word of the first side of that kind, whatever its codec.
fn word_of(seen: &Seen, kind: &str) -> Option<String> {
    let words = seen.answers.sides.iter().map(Side::to_string);
    words.into_iter().find(|word| word.split(':').next() == Some(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_resident_and_what_is_held_come_to_the_cap() {
        let (need, cap) = (96.0 * 1048576.0, 48.0 * 1048576.0);
        for ratio in [3.0, 4.0, 10.0] {
            let limit = limit_for(need, cap, 1.0 / ratio) as f64;
            assert!((limit + (need - limit) / ratio - cap).abs() < 8192.0, "{ratio}");
        }
        for share in [0.5, 0.9, 1.0, 1.1] {
            assert_eq!(limit_for(need, cap, share) as f64, cap / 2.0, "{share}: nothing fits");
        }
        assert_eq!(limit_for(need, cap, 0.0) as f64, cap, "what is held takes nothing");
    }

    #[test]
    fn a_limit_is_corrected_by_what_is_beyond_the_cap_or_left_of_it() {
        let mib = |number: u64| number << 20;
        assert_eq!(corrected(mib(40), mib(48), mib(58)), mib(30));
        assert_eq!(corrected(mib(40), mib(48), mib(44)), mib(44));
        assert_eq!(corrected(mib(40), mib(48), mib(90)), mib(24), "at least half");
        assert_eq!(corrected(mib(40), mib(48), mib(12)), mib(48), "at most all");
    }

    #[test]
    fn what_the_group_pays_for_is_not_taken_off_its_limit_again() {
        let holds = |word: &str, unified| holds_beside(&word.parse().unwrap(), unified);
        assert!(holds("zram:lz4", false) && holds("zram:lz4", true));
        assert!(holds("zswap:lzo", false) && !holds("zswap:lzo", true));
        assert!(["disk", "spill", "swap:lz4"].iter().all(|word| !holds(word, false)));
    }

    #[test]
    fn the_sides_that_are_asked_for_without_being_told_exist() {
        assert_eq!(Side::list(&SIDES).iter().map(Side::to_string).collect::<Vec<_>>(), SIDES);
    }
}
