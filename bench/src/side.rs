//! The sides of a comparison: ours, each of the kernel's paths, and no cap at all.

use std::cell::Cell;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, anyhow};
use serde_json::Value;

use crate::baseline::loop_device::Throttle;
use crate::baseline::{Baseline, Speed, SwapPath};
use crate::ours;
use crate::record::Record;
use crate::run::{self, Job, Outcome};
use crate::session::Session;

/// One side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Side {
    /// `compcache run` with this codec.
    Ours(String),
    /// `compcache run --ram` with this codec. The cap is one on all memory, ours too.
    Run(String),
    /// `compcache run --ram ... --spill` with this codec, the file on a disk of this speed. The cap is as that of [`Side::Run`].
    Spill(String, Speed),
    /// The kernel under a memory control group.
    Kernel(SwapPath),
    /// No cap: what the program costs by itself.
    Uncapped,
}

impl FromStr for Side {
    type Err = String;

    fn from_str(word: &str) -> Result<Side, String> {
        match word.split_once(':').unwrap_or((word, "lz4")) {
            ("ours", codec) => Ok(Side::Ours(codec.to_owned())),
            ("run", codec) => Ok(Side::Run(codec.to_owned())),
            ("spill", codec) => Ok(Side::Spill(codec.to_owned(), Speed::Full)),
            ("spill-2009", codec) => Ok(Side::Spill(codec.to_owned(), Speed::Of2009)),
            ("uncapped", "lz4") => Ok(Side::Uncapped),
            _ => word
                .parse()
                .map(Side::Kernel)
                .map_err(|error| format!("{error}, ours[:CODEC], run[:CODEC], spill[-2009][:CODEC], uncapped")),
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Side::Ours(codec) => f.pad(&format!("ours:{codec}")),
            Side::Run(codec) => f.pad(&format!("run:{codec}")),
            Side::Spill(codec, speed) => f.pad(&format!("spill{}:{codec}", speed.suffix())),
            Side::Kernel(path) => path.fmt(f),
            Side::Uncapped => f.pad("uncapped"),
        }
    }
}

impl Side {
    /// Whether compcache is in it: it runs the program, or keeps what is swapped.
    pub fn is_ours(&self) -> bool {
        match self {
            Side::Ours(_) | Side::Run(_) | Side::Spill(..) => true,
            Side::Kernel(path) => path.is_ours(),
            Side::Uncapped => false,
        }
    }

    /// Whether all that works for it stays on the one CPU that its program is pinned to. The server of a disk of ours, and the kernel's threads before it, do not.
    pub fn fits_one_cpu(&self) -> bool {
        !matches!(self, Side::Kernel(path) if path.is_ours())
    }

    /// Whether the memory it compresses pages into is charged to the control group, and so taken off what the program has.
    pub fn pays_for_its_pool(&self, unified: bool) -> bool {
        unified && matches!(self, Side::Kernel(SwapPath::Zswap(..)))
    }

    /// Reads a list of words that the program itself wrote down.
    pub fn list(words: &[&str]) -> Vec<Side> {
        words.iter().map(|word| word.parse().expect("a side that is written in the source")).collect()
    }
}

/// What every run needs.
pub struct Bench {
    session: Session,
    compcache: PathBuf,
    patience: Duration,
    runs: Cell<u32>,
}

/// A run on a side: what it took, and for ours the statistics it wrote.
pub struct SideRun {
    /// What it took and said.
    pub outcome: Outcome,
    /// The last state of the statistics file of `compcache run`.
    pub stats: Option<Value>,
}

impl SideRun {
    /// The most that was resident: for ours as its statistics say, which know apart what is the program's.
    pub fn resident_bytes(&self) -> u64 {
        self.statistic("resident_peak_bytes").unwrap_or(self.outcome.peak.resident_bytes)
    }

    /// The memory that held the compressed pages when they were most.
    pub fn held_bytes(&self) -> u64 {
        self.statistic("mem_used_at_peak_bytes").unwrap_or(self.outcome.peak.held.all_bytes())
    }

    /// The most memory of all that is counted: what was seen, or, for ours, what it says, if that is more. It knows its own peaks, however short.
    pub fn total_bytes(&self) -> u64 {
        self.outcome.peak.total_bytes.max(self.statistic("total_peak_bytes").unwrap_or(0))
    }

    /// See [`run::Peak::group_bytes`].
    pub fn group_bytes(&self) -> Option<f64> {
        self.outcome.peak.group_bytes().map(|bytes| bytes as f64)
    }

    /// The peak that ours says it had and the one that was seen, when they lie more than a tenth apart.
    pub fn untold_peak(&self) -> Option<(u64, u64)> {
        let (told, seen) = (self.statistic("total_peak_bytes")?, self.outcome.peak.total_bytes);
        (seen > told + told / 10).then_some((told, seen))
    }

    /// The pages that ours had leave the program.
    pub fn evicted_pages(&self) -> Option<u64> {
        self.statistic("evicted_pages")
    }

    fn statistic(&self, name: &str) -> Option<u64> {
        self.stats.as_ref()?[name].as_u64()
    }
}

impl Bench {
    /// Begins a session; `compcache` is the binary under test, and a run that takes longer than `patience` is ended.
    ///
    /// # Errors
    /// As [`Session::begin`].
    pub fn begin(compcache: PathBuf, patience: Duration) -> Result<Bench> {
        Ok(Bench { session: Session::begin()?, compcache, patience, runs: Cell::new(0) })
    }

    /// The session, for its directory.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// An empty record of `scenario`, with the binary under test.
    pub fn record(&self, scenario: &'static str, settings: Value) -> Record {
        let mut record = Record::new(scenario, settings);
        record.binary(&self.compcache);
        record
    }

    /// How long a run may take.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// The binary under test.
    pub fn compcache(&self) -> &Path {
        &self.compcache
    }

    /// Runs `job` on `side` with `cap_bytes` of resident memory.
    ///
    /// # Errors
    /// The side does not exist on this machine, or could not be set up. A command that failed is no error here.
    pub fn run(&self, side: &Side, cap_bytes: u64, job: &Job) -> Result<SideRun> {
        let job = &Job { patience: self.patience, ..job.clone() };
        match side {
            Side::Ours(codec) => {
                let place = Baseline::counting(&self.session);
                self.run_ours(&["--resident".into(), cap_bytes.to_string().into()], codec, job, &place)
            }
            Side::Run(codec) => {
                let place = Baseline::counting(&self.session);
                self.run_ours(&["--ram".into(), cap_bytes.to_string().into()], codec, job, &place)
            }
            Side::Spill(codec, speed) => {
                let (place, directory) = Baseline::spilling(&self.session, *speed)?;
                let limit = cap_bytes.to_string();
                self.run_ours(&["--ram".into(), limit.into(), "--spill".into(), directory.into()], codec, job, &place)
            }
            Side::Kernel(path) => {
                let place = Baseline::set_up(&self.session, path, cap_bytes, Throttle::default(), &self.compcache)?;
                Ok(SideRun { outcome: run::run(job, &place)?, stats: None })
            }
            Side::Uncapped => {
                let place = Baseline::counting(&self.session);
                Ok(SideRun { outcome: run::run(job, &place)?, stats: None })
            }
        }
    }

    fn run_ours(&self, limits: &[OsString], codec: &str, job: &Job, place: &Baseline<'_>) -> Result<SideRun> {
        if !self.compcache.is_file() {
            let path = self.compcache.display();
            let missing = anyhow!("{path} is not there: build it (cargo build --release) or say --compcache PATH");
            return ours::step(&[], Err(missing));
        }
        self.runs.set(self.runs.get() + 1);
        let stats = self.session.directory().join(format!("stats.{}.json", self.runs.get()));
        let mut words = vec![self.compcache.clone().into(), "run".into()];
        words.extend_from_slice(limits);
        words.extend(["--codec".into(), codec.into()]);
        words.extend(["--stats".into(), stats.clone().into(), "--".into()]);
        words.extend(job.words.iter().cloned());
        let outcome = run::run(&Job { words, ..job.clone() }, place)?;
        let text = std::fs::read_to_string(&stats).unwrap_or_default();
        Ok(SideRun { outcome, stats: serde_json::from_str(&text).ok() })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::run::Peak;

    #[test]
    fn a_total_is_the_greater_of_what_was_seen_and_what_ours_says() {
        let total = |seen, told: Option<u64>| {
            let peak = Peak { total_bytes: seen, ..Peak::default() };
            let stats = told.map(|told| json!({"total_peak_bytes": told}));
            SideRun { outcome: Outcome::of_test(peak, 0, 0, ""), stats }.total_bytes()
        };
        assert_eq!([total(7, None), total(7, Some(9)), total(7, Some(5))], [7, 9, 7]);
    }

    #[test]
    fn zswap_pays_for_its_pool_where_groups_are_of_version_2() {
        let pays = |word: &str, unified| word.parse::<Side>().unwrap().pays_for_its_pool(unified);
        assert!(pays("zswap:lzo", true) && pays("zswap-2009:lzo", true) && !pays("zswap:lzo", false));
        assert!(["zram:lz4", "disk", "swap:lz4", "ours"].iter().all(|word| !pays(word, true)));
    }
}
