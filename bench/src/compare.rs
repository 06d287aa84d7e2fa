//! Sides run in turn, round by round, the order turned round every second time, each run noted in the record.
//!
//! A machine that others share, or that grows warm, is slower at one time than at another; runs that follow each other
//! are compared with each other. A side that this machine does not have is named once and left out. A run that failed,
//! or whose output was different, is shown and counts for no ratio; when it was ours, or a byte was wrong, the whole
//! scenario fails in the end. So it does when a side of ours cannot be set up though the machine has what it needs, or any side
//! cannot that was there before. Where the program is pinned to one CPU, a side that works on others too is left out. One that the kernel ended for want of memory is tried again, and each time is shown.

use std::path::Path;

use anyhow::{Error, Result, bail};
use serde_json::{Value, json};

use crate::baseline::cgroup;
use crate::ours;
use crate::record::Record;
use crate::run::{Job, Outcome};
use crate::side::{Bench, Side, SideRun};
use crate::stat::Spread;
use crate::table::mib;

/// How often a run is tried that the kernel ended for want of memory.
const ATTEMPTS: usize = 3;

/// The sides by number, in the order of this round: turned round every second time.
pub fn turns(sides: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sides).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// How a scenario compares.
pub struct Comparison<'b> {
    /// Who runs.
    pub bench: &'b Bench,
    /// Where every run is noted.
    pub record: Record,
    /// How many rounds.
    pub rounds: usize,
    failures: usize,
}

/// What one question was answered with: all runs of all sides.
pub struct Answers {
    /// The sides that this machine has, in the order in which they were asked for.
    pub sides: Vec<Side>,
    runs: Vec<Vec<Option<SideRun>>>,
}

impl<'b> Comparison<'b> {
    /// A comparison of `rounds` rounds.
    pub fn new(bench: &'b Bench, record: Record, rounds: usize) -> Comparison<'b> {
        Comparison { bench, record, rounds, failures: 0 }
    }

    /// Runs `job` on every side in every round, under the same cap. `question` says in the record what was asked. Left out are sides whose pool is charged to
    /// their group: they would have that much less memory.
    pub fn ask(&mut self, question: &Value, sides: &[Side], cap_bytes: u64, job: &Job) -> Answers {
        let unified = cgroup::is_unified();
        let (left_out, sides): (Vec<_>, Vec<_>) =
            sides.iter().cloned().partition(|side| side.pays_for_its_pool(unified));
        for side in left_out {
            println!(
                "  {side}: left out: control groups of version 2 charge its pool to the program, which would have less memory than others"
            );
        }
        self.ask_with(question, &sides, |_| cap_bytes, job)
    }

    /// As [`Comparison::ask`], each side under a cap of its own.
    pub fn ask_with(
        &mut self,
        question: &Value,
        sides: &[Side],
        cap_bytes: impl Fn(&Side) -> u64,
        job: &Job,
    ) -> Answers {
        let (sides, left_out): (Vec<_>, Vec<_>) =
            sides.iter().cloned().partition(|side| job.pin.is_none() || side.fits_one_cpu());
        for side in left_out {
            println!("  {side}: left out: its server is not pinned to the one CPU");
        }
        let mut runs: Vec<Vec<Option<SideRun>>> = sides.iter().map(|_| Vec::new()).collect();
        let mut missing = vec![false; sides.len()];
        for round in 0..self.rounds {
            for (place, nth) in turns(sides.len(), round).into_iter().enumerate() {
                let attempts = if missing[nth] { 0 } else { ATTEMPTS };
                let cap_bytes = cap_bytes(&sides[nth]);
                let mut kept = None;
                for attempt in 1..=attempts {
                    let run = match self.one_run(&sides[nth], cap_bytes, job) {
                        Ok(run) => run,
                        Err(error) => {
                            missing[nth] = !self.fails(&sides[nth], &error, runs[nth].iter().any(Option::is_some));
                            break;
                        }
                    };
                    self.note(question, &sides[nth], (round, place), cap_bytes, &run);
                    let again = run.outcome.kills > 0;
                    kept = Some(run).filter(is_good);
                    if !again {
                        break;
                    }
                    // Swap of ours that never works is no answer of the kernel's.
                    self.failures += usize::from(attempt == attempts && kept.is_none() && sides[nth].is_ours());
                }
                runs[nth].push(kept);
            }
        }
        if let (Some(true), Some(first)) = (missing.first(), missing.iter().position(|missing| !missing)) {
            println!("  {} is not here: the others are divided by {}", sides[0], sides[first]);
        }
        let present = missing.iter().map(|missing| !missing);
        let (sides, runs) = sides
            .into_iter()
            .zip(runs)
            .zip(present)
            .filter_map(|((side, runs), present)| present.then_some((side, runs)))
            .unzip();
        Answers { sides, runs }
    }

    /// Saves the record as [`Record::finish`] does, and fails when a run did.
    ///
    /// # Errors
    /// As there, or some run failed.
    pub fn finish(mut self, scenario: Result<()>, directory: Option<&Path>) -> Result<()> {
        let failures = self.failures;
        let scenario = scenario.and_then(|()| match failures {
            0 => Ok(()),
            _ => bail!("{failures} runs failed, see above"),
        });
        self.record.finish(scenario, directory)
    }

    fn one_run(&mut self, side: &Side, cap_bytes: u64, job: &Job) -> Result<SideRun> {
        let run = self.bench.run(side, cap_bytes, job)?;
        if let Some((told, seen)) = run.untold_peak() {
            println!("  {side}: says that its peak was {} MiB; {} MiB were seen", mib(told), mib(seen));
        }
        if !is_good(&run) {
            self.failures += usize::from(is_failure(side, &run.outcome));
            let what = match run.outcome {
                Outcome { out_of_patience: true, .. } => "took longer than --patience allows, and was ended",
                Outcome { exit: 0, .. } => "wrong output",
                Outcome { kills: 1.., .. } => "ended by the kernel for want of memory",
                _ => "failed",
            };
            println!("  {side}: {what}, exit status {}: {}", run.outcome.exit, tail(&run.outcome.stderr));
        }
        Ok(run)
    }

    /// Whether `error`, in setting `side` up, counts as a run that failed: it was there before, or ours failed. Else this machine does not have it.
    fn fails(&mut self, side: &Side, error: &Error, was_there: bool) -> bool {
        let fails = was_there || ours::has_failed(error);
        self.failures += usize::from(fails);
        println!("  {side}: {}: {error:#}", if fails { "failed" } else { "not here" });
        fails
    }

    fn note(&mut self, question: &Value, side: &Side, at: (usize, usize), cap_bytes: u64, run: &SideRun) {
        self.record.run(json!({
            "question": question,
            "side": side.to_string(),
            "round": at.0,
            "place_in_round": at.1,
            "cap_bytes": cap_bytes,
            "outcome": run.outcome,
            "laps": laps(run),
            "stats": run.stats,
        }));
    }
}

impl Answers {
    /// A number of each round of the side at `nth`.
    pub fn each(&self, nth: usize, number: impl Fn(&SideRun) -> Option<f64>) -> Vec<Option<f64>> {
        self.runs[nth].iter().map(|run| run.as_ref().and_then(&number)).collect()
    }

    /// The spread of a number over the rounds.
    pub fn spread(&self, nth: usize, number: impl Fn(&SideRun) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.each(nth, number).into_iter().flatten())
    }

    /// The spread of `number(their side) / number(ours)`, round by round.
    pub fn ratio(&self, theirs: usize, ours: usize, number: impl Fn(&SideRun) -> Option<f64>) -> Option<Spread> {
        Spread::of_ratios(&self.each(theirs, &number), &self.each(ours, &number))
    }

    /// As [`Answers::ratio`], for sides given by their words; none when this machine does not have both.
    pub fn ratio_of(&self, theirs: &str, ours: &str, number: impl Fn(&SideRun) -> Option<f64>) -> Option<Spread> {
        let find = |word: &str| self.sides.iter().position(|side| side.to_string() == word);
        self.ratio(find(theirs)?, find(ours)?, number)
    }
}

/// The laps that a worker printed, one line of JSON each.
pub fn laps(run: &SideRun) -> Vec<Value> {
    let text = String::from_utf8_lossy(&run.outcome.stdout);
    text.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|lap| lap["lap"].is_string())
        .collect()
}

fn is_good(run: &SideRun) -> bool {
    run.outcome.exit == 0 && !run.outcome.is_wrong()
}

/// Whether a run that is not good fails the scenario. That the kernel ends a program which it finds no room for is its answer, whoever keeps the pages.
fn is_failure(side: &Side, outcome: &Outcome) -> bool {
    let no_room = outcome.kills > 0 && matches!(side, Side::Kernel(_));
    outcome.is_wrong() || (side.is_ours() && !no_room)
}

fn tail(text: &str) -> &str {
    let start = text.char_indices().rev().nth(600).map_or(0, |(at, _)| at);
    text[start..].trim()
}

#[cfg(test)]
mod tests {
    use crate::run::Peak;

    use super::*;

    fn outcome(exit: i32, kills: u64, stderr: &str) -> Outcome {
        Outcome::of_test(Peak::default(), exit, kills, stderr)
    }

    #[test]
    fn a_wrong_byte_fails_a_scenario_on_every_side() {
        let wrong = "scan: WRONG BYTES in page 3: found 0x1, wanted 0x2";
        for side in Side::list(&[
            "ours",
            "spill",
            "swap:lz4",
            "swap-ublk:lz4",
            "backed-2009:lz4",
            "zram:lz4",
            "disk",
            "uncapped",
        ]) {
            assert!(is_failure(&side, &outcome(1, 0, wrong)), "{side}");
            let other = Outcome { same_output: Some(false), ..outcome(0, 0, "") };
            assert!(is_failure(&side, &other), "{side}: another output");
        }
    }

    #[test]
    fn what_fails_is_ours_also_where_the_kernel_swaps_to_it() {
        for (word, fails) in [
            ("ours", true),
            ("spill", true),
            ("swap:lz4", true),
            ("swap-ublk:lz4", true),
            ("backed-2009:lz4", true),
            ("zram:lz4", false),
        ] {
            let side: Side = word.parse().unwrap();
            assert_eq!(is_failure(&side, &outcome(139, 0, "")), fails, "{side}");
            let no_room = is_failure(&side, &outcome(137, 1, ""));
            assert_eq!(no_room, matches!(side, Side::Ours(_) | Side::Spill(..)), "{side}: ended for want of memory");
        }
    }
}
