//! Scenario `emulated`: what only a distribution's kernel has, in emulated machines: ublk, and zram with zstd and brd beside it.
//!
//! This program is put into a small virtual machine ([`compcache_testkit::vm`], Debian's Linux 6.12 under qemu, without KVM), is
//! run there as it is run here, and its tables and records are brought back:
//!
//! | processors | scenario | sides                                            |
//! |------------|----------|--------------------------------------------------|
//! | 2          | `dd`     | `brd`, `zram:lz4`, `ours-ublk:lz4`, through ext4 |
//! | 2          | `tiers`  | `ours-ublk:lz4`, `zram:lz4`, `zram:zstd`         |
//! | 2, then 1  | `scan`   | `zram:lz4`, `swap-ublk:lz4`; sequential, random  |
//!
//! **These are no numbers of a machine.** Each instruction is translated, which makes code some ten times slower, a compressor more
//! so than a system call, and a second processor is another thread of qemu's. Only sides within one such machine are compared: like
//! with like. What holds here holds of the work that is done, not of how fast a processor does it.
//!
//! Content is a part of each image of this machine ([`content_pages`]), and the rounds take turns inside, as they do outside. CPU time
//! is that of the emulated machine, in which nothing else runs. Without a kernel (`COMPCACHE_STOCK_KERNEL`) or qemu nothing is
//! measured, and it is said why.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use compcache_testkit::corpus::{self, Kind};
use compcache_testkit::features::find_program;
use compcache_testkit::vm::{Kernel, Vm};
use serde_json::{Value, json};

use crate::record::Record;
use crate::session::Undo;
use crate::side::Bench;

/// What `emulated` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// How many processors the machines have, one machine each. The first one runs dd and tiers, too.
    #[arg(long, value_delimiter = ',', default_value = "2,1", value_parser = clap::value_parser!(u32).range(1..=8))]
    processors: Vec<u32>,
    /// dd, tiers, scan.
    #[arg(long, value_delimiter = ',', default_value = "dd,tiers,scan")]
    what: Vec<String>,
}

/// A scenario that is run inside.
struct Scenario {
    name: &'static str,
    /// All of which the machine must have.
    sides: &'static str,
    /// What else it is told, in short and at length.
    arguments: [&'static str; 2],
    /// Whether the first machine alone runs it.
    once: bool,
}

const SCENARIOS: [Scenario; 3] = [
    Scenario {
        name: "dd",
        sides: "brd,zram:lz4,ours-ublk:lz4",
        arguments: ["--megabytes 8 --blocks 4096,1048576", "--megabytes 32 --writes 200"],
        once: true,
    },
    Scenario {
        name: "tiers",
        sides: "ours-ublk:lz4,zram:lz4,zram:zstd",
        arguments: ["--content python --megabytes 2", "--megabytes 16 --reads 500"],
        once: true,
    },
    Scenario {
        name: "scan",
        sides: "zram:lz4,swap-ublk:lz4",
        arguments: [
            "--content python --order sequential,random --megabytes 24 --cap 12 --passes 1",
            "--content python --order sequential,random --megabytes 48 --cap 12 --passes 2",
        ],
        once: false,
    },
];

const MEMORY_MIB: u32 = 2048;
/// `dd` makes its disks four times as large as its file.
const BRD_KIB: u64 = 256 << 10;

/// A scenario in it may take as long as so many runs.
const RUNS_PATIENCE: u32 = 10;

/// What the kernel says comes between what we say; from here on it does not.
const PREPARE: &str = "dmesg -n 1
mkdir -p /sys/fs/cgroup; mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t tmpfs tmp /tmp
export COMPCACHE_CORPUS_DIR=/corpus
bench() { compcache-bench \"$@\" --record /records; echo \"=== status $?\"; }
";
/// Each record on one line: text of JSON has no newlines but between its parts.
const BRING_BACK: &str = "for record in /records/*; do echo '=== record'; tr -d '\\n' <$record; echo; done\n";

/// Runs the scenario.
///
/// # Errors
/// A machine could not be made or did not end, or a scenario in it failed or lacked a side.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let kernel = match kernel() {
        Ok(kernel) => kernel,
        Err(why) => {
            println!("emulated: left out: {why}");
            return Ok(());
        }
    };
    let settings =
        json!({"rounds": rounds, "memory_mib": MEMORY_MIB, "content_pages_of_each_kind": content_pages(quick)});
    let mut kept = bench.record("emulated", settings);
    let measured = measure(bench, options, &kernel, (quick, rounds), &mut kept);
    kept.finish(measured, record)
}

fn measure(
    bench: &Bench,
    options: &Options,
    kernel: &Kernel,
    (quick, rounds): (bool, usize),
    kept: &mut Record,
) -> Result<()> {
    let patience_with_one = bench.patience() * if quick { 1 } else { RUNS_PATIENCE };
    for (nth, &processors) in options.processors.iter().enumerate() {
        let wanted = |one: &&Scenario| options.what.iter().any(|word| word == one.name) && (nth == 0 || !one.once);
        let scenarios: Vec<_> = SCENARIOS.iter().filter(wanted).collect();
        if scenarios.is_empty() {
            continue;
        }
        println!("\n=== emulated, {processors} processors");
        let vm = machine(kernel, bench, processors, content_pages(quick))?;
        let script = script(&scenarios, quick, rounds);
        let printed =
            vm.run(&script, patience_with_one * scenarios.len() as u32).map_err(|error| anyhow::anyhow!("{error}"))?;
        let (said, records) = printed.split_once("=== record").unwrap_or((&printed, ""));
        println!("{}", said.trim());
        let mut all_there = Ok(());
        for text in records.split("=== record").map(str::trim).filter(|text| !text.is_empty()) {
            let inside: Value = serde_json::from_str(text).context("a record that the machine brought back")?;
            all_there = all_there.and(has_all_sides(&inside));
            kept.summary(
                json!({"processors": processors, "scenario": inside["scenario"], "summary": inside["summary"]}),
            );
            kept.run(json!({"processors": processors, "record": inside}));
        }
        let succeeded = said.lines().filter(|line| *line == "=== status 0").count();
        if succeeded < scenarios.len() {
            bail!("{} of {} scenarios failed in the machine, see above", scenarios.len() - succeeded, scenarios.len());
        }
        all_there?;
    }
    if kept.is_empty() {
        bail!("nothing was measured: --what is one of dd, tiers and scan, or several");
    }
    Ok(())
}

/// Of each kind of content: the machine holds its files in memory.
fn content_pages(quick: bool) -> usize {
    if quick { 1024 } else { 4096 }
}

/// The kernel, if everything else is there, too.
fn kernel() -> Result<Kernel, String> {
    for program in ["qemu-system-x86_64", "busybox", "xz", "mkfs.ext4", "dd"] {
        find_program(program).ok_or_else(|| format!("{program} is not on the path"))?;
    }
    Kernel::stock()
}

impl Scenario {
    /// What is asked of the program inside.
    fn words(&self, quick: bool) -> String {
        format!("{} --sides {} {}", self.name, self.sides, self.arguments[usize::from(!quick)])
    }
}

fn script(scenarios: &[&Scenario], quick: bool, rounds: usize) -> String {
    let mut script = PREPARE.to_owned();
    let short = if quick { "--quick" } else { "" };
    for scenario in scenarios {
        // Writing to a string does not fail.
        let _ = writeln!(script, "bench {short} --runs {rounds} {}", scenario.words(quick));
    }
    script + BRING_BACK
}

/// A machine with this program, those it runs, and content.
fn machine(kernel: &Kernel, bench: &Bench, processors: u32, content_pages: usize) -> Result<Vm> {
    let mut vm = Vm::new(kernel)?;
    // What the session leaves is found there: its files, and the emulator by its command line.
    let directory = bench.session().directory().join("machine");
    bench.session().note(Undo::Processes(directory.clone()))?;
    fs::create_dir_all(&directory)?;
    vm.directory(&directory);
    vm.size(processors, MEMORY_MIB);
    vm.module("brd", &format!("rd_nr=1 rd_size={BRD_KIB}"))?;
    vm.module("zram", "num_devices=0")?;
    vm.module("ublk_drv", "")?;
    // Where it is not a module it is in the kernel itself.
    let _ = vm.module("ext4", "");
    let own = std::env::current_exe()?;
    vm.program(&own, "/bin/compcache-bench")?;
    vm.program(bench.compcache(), "/bin/compcache")?;
    vm.program(&own.with_file_name("scan"), "/bin/scan")?;
    for name in ["mkfs.ext4", "dd"] {
        vm.program(&find_program(name).with_context(|| format!("{name} went away"))?, &format!("/bin/{name}"))?;
    }
    for kind in Kind::HEAPS.into_iter().chain([Kind::Text, Kind::Elf]) {
        match corpus::load(kind, content_pages) {
            Ok(pages) => {
                let name = format!("{}.pages", kind.name());
                let path = bench.session().directory().join(&name);
                fs::write(&path, pages.as_flattened())?;
                vm.file(&path, &format!("/corpus/{name}"))?;
            }
            Err(error) => println!("{kind}: not in it: {error}"),
        }
    }
    Ok(vm)
}

/// A side that is missing in such a machine, or of which no run succeeded, is our mistake. Runs of dd that failed are not in the record.
fn has_all_sides(record: &Value) -> Result<()> {
    let scenario =
        SCENARIOS.iter().find(|one| record["scenario"] == one.name).context("a record that nobody asked for")?;
    let none = Vec::new();
    let runs = record["runs"].as_array().unwrap_or(&none);
    for side in scenario.sides.split(',') {
        let succeeded = |run: &Value| matches!(run["outcome"]["exit"].as_i64(), None | Some(0));
        if !runs.iter().any(|run| run["side"] == side && succeeded(run)) {
            bail!("{side} is missing in the machine, see above");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_without_one_of_its_sides_is_refused() {
        let runs = |sides: &[&str]| json!({"scenario": "scan", "runs": sides.iter().map(|side| json!({"side": side})).collect::<Vec<_>>()});
        assert!(has_all_sides(&runs(&["zram:lz4", "swap-ublk:lz4"])).is_ok());
        assert!(has_all_sides(&runs(&["zram:lz4"])).is_err());
        assert!(has_all_sides(&json!({"scenario": "dd"})).is_err());
        let scan = |exits: [i32; 2]| {
            let ours = exits.map(|exit| json!({"side": "swap-ublk:lz4", "outcome": {"exit": exit}}));
            json!({"scenario": "scan", "runs": [{"side": "zram:lz4", "outcome": {"exit": 0}}, ours[0], ours[1]]})
        };
        assert!(has_all_sides(&scan([137, 0])).is_ok());
        assert!(has_all_sides(&scan([1, 139])).is_err(), "no run of ours succeeded");
    }

    #[test]
    fn what_is_asked_inside_is_understood() {
        for quick in [false, true] {
            for scenario in &SCENARIOS {
                let asked = scenario.words(quick);
                assert!(crate::cli::parses(["compcache-bench"].into_iter().chain(asked.split(' '))), "{asked}");
            }
        }
    }
}
