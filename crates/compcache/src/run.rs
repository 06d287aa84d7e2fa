//! `compcache run`: any program, and all it starts, in less RAM.
//!
//! The work is done inside the program, by the pager that a preloaded object puts there. Here we only prepare and watch:
//!
//! 1. [`preflight`]: what cannot work is said before the program starts, with the remedy.
//! 2. [`region`]: the memory by which all pagers of the tree share one budget.
//! 3. [`supervise`]: starts the program, passes signals and the exit status on, keeps [`stats`].
//! 4. [`spill`]: where what does not fit goes, and what is told of it.
//! 5. [`summary`]: what it was worth, on one screen of standard error.
//!
//! The supervisor may be killed at any instant: the program goes on as it is, and the next `compcache run` removes what
//! is left.

mod children;
mod elf;
mod failure;
mod limits;
mod preflight;
mod program;
mod region;
mod signals;
mod spill;
mod stats;
mod summary;
mod supervise;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;

pub use failure::{STATUS_FAILED, say, why};
pub use preflight::{eviction_way, explain as explain_refusal, find_object, rehearse};
pub use signals::{descriptors, die_by, was_ignored};

use crate::cli::{Recompress, RunArgs};
use crate::run::failure::Failure;
use crate::run::limits::Limits;
use crate::run::region::TreeRegion;
use crate::run::signals::Signals;
use crate::run::spill::SpillPlace;
use crate::run::stats::StatsFile;
use crate::run::supervise::{Outcome, Run};

/// Runs the program, says what it was worth, and ends as the program did.
pub fn run(args: RunArgs) -> ExitCode {
    match supervised(args) {
        Ok(outcome) => outcome.pass_on(),
        Err(failure) => failure.report(),
    }
}

fn supervised(args: RunArgs) -> Result<Outcome, Failure> {
    let signals = Signals::new().context("cannot catch signals")?;
    let limits = Limits::choose(args.ram, args.resident)?;
    let ready = preflight::check(&args)?;
    if let Some(warning) = limits.warning().filter(|_| !args.quiet) {
        say(&warning);
    }
    let spill = SpillPlace::choose(args.spill.as_deref(), args.spill_max, &limits, args.quiet)?;
    let stats = args.stats.as_deref().map(StatsFile::create).transpose()?;
    let recompress = Recompress { level: args.recompress.0, after: Duration::from_secs_f64(args.recompress_after) };
    region::leftovers::sweep();
    let region = TreeRegion::create(&limits, spill.as_ref(), args.codec, recompress, ready.eviction)?;
    let mut run = Run::start(&ready, &args.program, &region, signals, spill.as_ref(), stats)?;
    let outcome = run.watch()?;
    let stats = run.finish(outcome);
    if !args.quiet {
        say(&summary::render(&stats, &ready.name()));
    }
    if let Some(left) = region.remove_unless_in_use()
        && !args.quiet
    {
        say(&format!("compcache: {left}\n"));
    }
    Ok(outcome)
}
