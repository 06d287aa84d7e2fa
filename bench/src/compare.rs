//! Sides run in turn, round by round, the order turned round every second time, each run noted in the record.
//!
//! A machine that others share, or that grows warm, is slower at one time than at another; runs that follow each other
//! are compared with each other. A side that this machine does not have is named once and left out. A run that failed,
//! or whose output was different, is shown and counts for no ratio; when it was ours, or the output differed, the whole
//! scenario fails in the end. One that the kernel ended for want of memory is tried again, and each time is shown.

use anyhow::{Result, bail};
use serde_json::{Value, json};

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

    /// Runs `job` on every side in every round. `question` says in the record what was asked.
    pub fn ask(&mut self, question: &Value, sides: &[Side], cap_bytes: u64, job: &Job) -> Answers {
        self.ask_with(question, sides, |_| cap_bytes, job)
    }

    /// As [`Comparison::ask`], each side under a cap of its own.
    pub fn ask_with(
        &mut self,
        question: &Value,
        sides: &[Side],
        cap_bytes: impl Fn(&Side) -> u64,
        job: &Job,
    ) -> Answers {
        let mut runs: Vec<Vec<Option<SideRun>>> = sides.iter().map(|_| Vec::new()).collect();
        let mut missing = vec![false; sides.len()];
        for round in 0..self.rounds {
            for (place, nth) in turns(sides.len(), round).into_iter().enumerate() {
                let attempts = if missing[nth] { 0 } else { ATTEMPTS };
                let cap_bytes = cap_bytes(&sides[nth]);
                let mut kept = None;
                for _ in 0..attempts {
                    let run = self.one_run(&sides[nth], cap_bytes, job, &mut missing[nth]);
                    if let Some(run) = &run {
                        self.note(question, &sides[nth], (round, place), cap_bytes, run);
                    }
                    let again = run.as_ref().is_some_and(|run| run.outcome.kills > 0);
                    kept = run.filter(is_good);
                    if !again {
                        break;
                    }
                }
                runs[nth].push(kept);
            }
        }
        let present = missing.iter().map(|missing| !missing);
        let (sides, runs) = sides
            .iter()
            .zip(runs)
            .zip(present)
            .filter_map(|((side, runs), present)| present.then_some((side.clone(), runs)))
            .unzip();
        Answers { sides, runs }
    }

    /// Saves the record when a directory was given, and fails when a run did.
    ///
    /// # Errors
    /// Nothing was measured, the record cannot be written, or some run failed.
    pub fn finish(self, directory: Option<&std::path::Path>) -> Result<()> {
        if self.record.is_empty() {
            bail!("nothing was measured, see above");
        }
        if let Some(directory) = directory {
            println!("record: {}", self.record.save(directory)?.display());
        }
        if self.failures > 0 {
            bail!("{} runs failed, see above", self.failures);
        }
        Ok(())
    }

    fn one_run(&mut self, side: &Side, cap_bytes: u64, job: &Job, missing: &mut bool) -> Option<SideRun> {
        match self.bench.run(side, cap_bytes, job) {
            Ok(run) => {
                if let Some((told, seen)) = run.untold_peak() {
                    println!("  {side}: says that its peak was {} MiB; {} MiB were seen", mib(told), mib(seen));
                }
                if !is_good(&run) {
                    // That the kernel ends a program which it finds no room for is an answer, not a fault of ours.
                    self.failures += usize::from(side.is_ours() || run.outcome.exit == 0);
                    let what = match run.outcome {
                        Outcome { out_of_patience: true, .. } => "took longer than --patience allows, and was ended",
                        Outcome { exit: 0, .. } => "wrong output",
                        Outcome { kills: 1.., .. } => "ended by the kernel for want of memory",
                        _ => "failed",
                    };
                    println!("  {side}: {what}, exit status {}: {}", run.outcome.exit, tail(&run.outcome.stderr));
                }
                Some(run)
            }
            Err(error) => {
                println!("  {side}: not here: {error:#}");
                *missing = true;
                None
            }
        }
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
    run.outcome.exit == 0 && run.outcome.same_output != Some(false)
}

fn tail(text: &str) -> &str {
    let start = text.char_indices().rev().nth(600).map_or(0, |(at, _)| at);
    text[start..].trim()
}
