//! The program as our child: started, watched, and its end passed on.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::Context;
use compcache_pager::shared::{ENV_REGION, ENV_SPILL, Region};
use rustix::process::{
    DumpableBehavior, Pid, Resource, Rlimit, WaitOptions, WaitStatus, getpid, set_dumpable_behavior, setrlimit, waitpid,
};

use crate::run::failure::Failure;
use crate::run::preflight::Ready;
use crate::run::region::TreeRegion;
use crate::run::signals::{Signals, die_by, stop_with};
use crate::run::spill::{SpillPlace, Told};
use crate::run::stats::{Stats, StatsFile};

/// Between two looks at the region.
const TICK: Duration = Duration::from_millis(100);
/// Ticks between two writes of the statistics.
const TICKS_A_WRITE: u32 = 5;

/// How the program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It ended with this status.
    Exited(i32),
    /// A signal killed it.
    Killed(i32),
}

impl Outcome {
    /// The status as a shell shows it.
    pub fn status(self) -> i32 {
        match self {
            Self::Exited(status) => status,
            Self::Killed(signal) => 128 + signal,
        }
    }

    /// Ends this process as the program ended. A core of ours would overwrite the program's.
    pub fn pass_on(self) -> ExitCode {
        if let Self::Killed(signal) = self {
            let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
            let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            // Returns only in the first process of a container.
            die_by(signal);
        }
        ExitCode::from(self.status() as u8)
    }
}

/// A program that was started.
pub struct Run<'a> {
    program: Pid,
    signals: Signals,
    region: &'a Region,
    stats: Option<StatsFile>,
    spill_told: Told,
    started: Instant,
}

impl<'a> Run<'a> {
    /// Starts the program.
    pub fn start(
        ready: &Ready,
        program: &[OsString],
        region: &'a TreeRegion,
        signals: Signals,
        spill: Option<&SpillPlace>,
        stats: Option<StatsFile>,
    ) -> Result<Self, Failure> {
        let started = Instant::now();
        let mut command = Command::new(&ready.program);
        match spill {
            Some(spill) => command.env(ENV_SPILL, &spill.dir),
            None => command.env_remove(ENV_SPILL),
        };
        if std::env::var_os("ASAN_OPTIONS").is_none() {
            // Should something that the program starts have been built so, its runtime would end it for an object that comes before.
            command.env("ASAN_OPTIONS", "verify_asan_link_order=0");
        }
        // It names the process in another way than LISTEN_PID, which the preloaded object puts right.
        command.env_remove("LISTEN_PIDFDID");
        command.arg0(&program[0]).args(&program[1..]);
        command.env(ENV_REGION, region.file()).env("LD_PRELOAD", &ready.ld_preload);
        let child = signals.spawn(&mut command).map_err(|error| cannot_start(ready, error))?;
        let program = Pid::from_raw(child.id() as i32).context("the program has no process id")?;
        Ok(Self { program, signals, region: region.region(), stats, spill_told: Told::default(), started })
    }

    /// Passes signals on and keeps the statistics until the program ends.
    pub fn watch(&mut self) -> anyhow::Result<Outcome> {
        let mut next_tick = self.started;
        for tick in 0.. {
            self.region.retire_dead();
            self.region.totals();
            self.spill_told.tell(self.region);
            if tick % TICKS_A_WRITE == 0
                && let Some(file) = &mut self.stats
            {
                file.write(&Stats::gather(self.region, self.started.elapsed(), None));
            }
            next_tick = (next_tick + TICK).max(Instant::now());
            loop {
                if let Some(outcome) = self.reap()? {
                    return Ok(outcome);
                }
                let left = next_tick.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                self.signals.wait(left, self.program).context("cannot wait for signals")?;
            }
        }
        unreachable!("the ticks do not end")
    }

    /// The statistics at the end, written to their file too.
    pub fn finish(mut self, outcome: Outcome) -> Stats {
        self.region.retire_dead();
        self.spill_told.tell(self.region);
        let stats = Stats::gather(self.region, self.started.elapsed(), Some(outcome));
        if let Some(file) = &mut self.stats {
            file.write(&stats);
            file.complain();
        }
        stats
    }

    /// The program's end, if it has come. If it has stopped, we stop as well.
    fn reap(&mut self) -> anyhow::Result<Option<Outcome>> {
        while let Some((child, status)) = self.wait_status()? {
            if child != self.program {
                continue;
            }
            if let Some(status) = status.exit_status() {
                return Ok(Some(Outcome::Exited(status)));
            }
            if let Some(signal) = status.terminating_signal() {
                return Ok(Some(Outcome::Killed(signal)));
            }
            // The first process of a container cannot stop, and nobody would see it.
            if status.stopped() && getpid() != Pid::INIT {
                self.signals.forget_stops(self.program);
                stop_with(self.program);
            }
        }
        Ok(None)
    }

    /// News of the program. The first process of a container also inherits orphans, which stay zombies until it waits for them.
    fn wait_status(&self) -> anyhow::Result<Option<(Pid, WaitStatus)>> {
        let whom = if getpid() == Pid::INIT { None } else { Some(self.program) };
        loop {
            match waitpid(whom, WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Err(rustix::io::Errno::INTR) => {}
                answer => return answer.context("cannot wait for the program"),
            }
        }
    }
}

fn cannot_start(ready: &Ready, error: std::io::Error) -> Failure {
    let program = ready.program.display();
    if rustix::io::Errno::from_io_error(&error) == Some(rustix::io::Errno::NOEXEC) {
        return Failure::cannot_run(format!(
            "{program} is neither a program nor a script with a #! line.\n  \
             Give it to its interpreter, for example: compcache run -- sh {program}"
        ));
    }
    Failure::cannot_run(format!("cannot start {program}: {error}"))
}
