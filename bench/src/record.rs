//! The raw record of a scenario: every single run, and what is needed to know what it says.
//!
//! One file of JSON a scenario, `SCENARIO-TIME.json`, in the directory given with `--record` (in the repository,
//! `bench/records/DATE-MACHINE/`). Records are never edited.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::device::Kind;

/// The record of one scenario.
pub struct Record {
    scenario: &'static str,
    /// Of when it was begun: what is built or runs later was not measured.
    commit: String,
    machine: Value,
    /// This program first, in which the engine is that `store`, `sweep` and `writeback` measure.
    binaries: Vec<Value>,
    settings: Value,
    content: Vec<Value>,
    runs: Vec<Value>,
    summary: Vec<Value>,
    /// What ended the scenario before its end.
    error: Option<String>,
}

impl Record {
    /// An empty record of `scenario`, run with `settings`.
    pub fn new(scenario: &'static str, settings: Value) -> Record {
        Record {
            scenario,
            commit: commit(),
            machine: machine(),
            binaries: std::env::current_exe().ok().as_deref().and_then(about_file).into_iter().collect(),
            settings,
            content: Vec::new(),
            runs: Vec::new(),
            summary: Vec::new(),
            error: None,
        }
    }

    /// Notes what is measured, and as what: a file of ours, and, where it is `compcache`, the object beside it that it puts into programs.
    pub fn binary(&mut self, path: &Path) {
        let beside = preload_object(path);
        self.binaries.extend([Some(path), beside.as_deref()].into_iter().flatten().filter_map(about_file));
    }

    /// Notes the binaries that are named by sides.
    pub fn binaries_of(&mut self, kinds: &[Kind]) {
        for kind in kinds {
            if let Kind::Ours { binary: Some(path), .. } = kind {
                self.binary(path);
            }
        }
    }

    /// Notes what pages were used.
    pub fn content(&mut self, name: &str, pages: usize, same_filled_share: f64) {
        self.content.push(json!({"name": name, "pages": pages, "same_filled_share": same_filled_share}));
    }

    /// Notes one run.
    pub fn run(&mut self, run: Value) {
        self.runs.push(run);
    }

    /// Whether there has been no run.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Notes a line of what was printed.
    pub fn summary(&mut self, line: Value) {
        self.summary.push(line);
    }

    /// Saves the record when a directory was given, also of a scenario that an error ended: what was measured before stays, and the
    /// record says why there is no more.
    ///
    /// # Errors
    /// That of the scenario; nothing was measured; the record cannot be written.
    pub fn finish(&mut self, scenario: Result<()>, directory: Option<&Path>) -> Result<()> {
        self.error = scenario.as_ref().err().map(|error| format!("{error:#}"));
        let saved = match directory {
            Some(directory) if !self.is_empty() => {
                self.save(directory).map(|path| println!("record: {}", path.display()))
            }
            _ => Ok(()),
        };
        scenario?;
        if self.is_empty() {
            bail!("nothing was measured, see above");
        }
        saved
    }

    /// Writes the record into `directory`. Returns the file.
    ///
    /// # Errors
    /// The directory or the file cannot be written.
    pub fn save(&self, directory: &Path) -> Result<PathBuf> {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        let date = date(SystemTime::now());
        let path = directory.join(format!("{}-{}.json", self.scenario, date.replace([':', '-'], "")));
        let whole = json!({
            "scenario": self.scenario,
            "date": date,
            "commit": self.commit,
            "machine": self.machine,
            "binaries": self.binaries,
            "settings": self.settings,
            "content": self.content,
            "runs": self.runs,
            "summary": self.summary,
            "error": self.error,
        });
        fs::write(&path, serde_json::to_string_pretty(&whole)? + "\n").with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

/// The commit that is checked out, `-dirty` when files differ from it; `unknown` outside a repository.
pub fn commit() -> String {
    let said = Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]).output();
    let said = said.ok().filter(|output| output.status.success()).map(|output| output.stdout);
    said.map_or_else(|| "unknown".to_owned(), |bytes| String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// What this machine is, as far as it bears on the numbers.
pub fn machine() -> Value {
    let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or("");
        line.split_once(':').map_or("", |(_, value)| value).trim().to_owned()
    };
    json!({
        "kernel": read("/proc/sys/kernel/osrelease"),
        "processor": field(&read("/proc/cpuinfo"), "model name"),
        "cpus": std::thread::available_parallelism().map_or(0, |count| count.get()),
        "memory": field(&read("/proc/meminfo"), "MemTotal"),
        "page_cluster": read("/proc/sys/vm/page-cluster"),
        "swappiness": read("/proc/sys/vm/swappiness"),
        "zswap": read("/sys/module/zswap/parameters/enabled"),
        "transparent_hugepage": read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load": read("/proc/loadavg"),
    })
}

/// One line that names the machine.
pub fn machine_line() -> String {
    let machine = machine();
    let text = |name: &str| machine[name].as_str().unwrap_or("").to_owned();
    let (cpus, load) = (&machine["cpus"], text("load"));
    format!("Linux {}, {cpus} CPUs ({}), load {load}, commit {}", text("kernel"), text("processor"), commit())
}

/// The object that `compcache` at `path` puts into programs, found as it finds it.
fn preload_object(path: &Path) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("COMPCACHE_PRELOAD").filter(|value| !value.is_empty()) {
        return Some(named.into());
    }
    let name = "libcompcache_preload.so";
    let places = [path.with_file_name(name), path.parent()?.join("../lib/compcache").join(name)];
    places.into_iter().find(|place| place.is_file())
}

/// A file's path, below the current directory if it is there, its size, and when it was written. None where it is not there.
fn about_file(path: &Path) -> Option<Value> {
    let about = fs::metadata(path).ok()?;
    let here = std::env::current_dir().unwrap_or_default();
    let short = path.strip_prefix(here).unwrap_or(path);
    Some(json!({"path": short, "bytes": about.len(), "written": date(about.modified().ok()?)}))
}

/// A time, in UTC, as `2026-11-21T09:30:00Z`.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (year, month, day) = civil(seconds / 86400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month and day of a count of days since 1970.
///
/// # Source
/// `civil_from_days` of Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms".
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let of_era = shifted % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_before_an_error_is_saved_and_the_error_is_returned() {
        let directory = tempfile::tempdir().unwrap();
        let mut record = Record::new("test", json!({}));
        let fails = || -> Result<()> { bail!("why") };
        assert_eq!(record.finish(fails(), Some(directory.path())).unwrap_err().to_string(), "why");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing was measured");
        record.run(json!({"nth": 1}));
        assert_eq!(record.finish(fails(), Some(directory.path())).unwrap_err().to_string(), "why");
        let saved = fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
        let saved: Value = serde_json::from_str(&fs::read_to_string(saved).unwrap()).unwrap();
        assert_eq!((&saved["runs"][0]["nth"], &saved["error"]), (&json!(1), &json!("why")));
    }

    #[test]
    fn a_record_says_which_files_were_measured() {
        let directory = tempfile::tempdir().unwrap();
        let compcache = directory.path().join("compcache");
        fs::write(&compcache, "program").unwrap();
        let kinds = [Kind::Disk, format!("ours:lz4@{}", compcache.display()).parse().unwrap()];
        let mut record = Record::new("test", json!({}));
        record.binaries_of(&kinds);
        record.binary(&directory.path().join("not there"));
        let about = &record.binaries[1];
        assert_eq!((about["path"].as_str(), about["bytes"].as_u64()), (compcache.to_str(), Some(7)));
        assert_eq!(about["written"].as_str().unwrap()[..2], *"20");
        // The tests' own environment may name an object.
        let others = record.binaries[2..]
            .iter()
            .filter(|one| one["path"].as_str() != preload_object(&compcache).unwrap_or_default().to_str());
        assert_eq!(others.count(), 0);
    }

    #[test]
    fn days_since_1970_become_dates_across_leap_years() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(11_017), (2000, 3, 1));
        assert_eq!(civil(20_778), (2026, 11, 21));
    }
}
