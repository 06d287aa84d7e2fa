//! Scenario `files`: many small files, by the programs that people use: unpacked, listed, compared by git, read and removed, with and without a mount.
//!
//! | step       | what is timed                                                                    |
//! |------------|----------------------------------------------------------------------------------|
//! | `unpack`   | tar(1) of an archive that is in the page cache, nothing synced                   |
//! | `list`     | find(1), which looks at each file                                                |
//! | `status`   | git(1): which of the files, which were all committed before, have changed        |
//! | `read`     | cat(1), of every third file                                                      |
//! | `remove`   | rm(1) of all                                                                     |
//!
//! All of it fits in memory, and nothing waits for the disk if it need not: what is compared is what each step of a path, and of making, opening and closing a file,
//! costs. Each turn has a new ext4: one that has lost many files a moment ago makes new ones slower. After `unpack`, untimed, tar compares all bytes.
//!
//! The tree is made here: in each of its directories, six to eight deep, are sixteen files of 200 bytes to 30 KiB, half of them below 2.5 KiB, of text.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use compcache_testkit::corpus::Kind;
use serde_json::json;

use crate::baseline::loop_device::Throttle;
use crate::compare::turns;
use crate::content::Content;
use crate::device::machine_cpu_s;
use crate::iozone::place::{self, Disk, Keeper, Memory, Standing};
use crate::ours;
use crate::record::Record;
use crate::scan::print_targets;
use crate::side::Bench;
use crate::stat::{Spread, Target};
use crate::table::{Table, cell};

/// What `files` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// plain, and mounts as for iozone; the first one is what the others are divided by.
    #[arg(long, value_delimiter = ',', default_value = "plain,mount,mount-asking,mount-exclusive")]
    sides: Vec<Keeper>,
    /// How many files [default: 9000; 300 with --quick].
    #[arg(long)]
    files: Option<usize>,
}

/// What is timed, in this order.
const STEPS: [&str; 5] = ["unpack", "list", "status", "read", "remove"];

/// At most so many times as long as without a mount (`git status`, and tar), or the cost is to be named.
const WANTED: [(&str, f64); 2] = [("unpack", 1.1), ("status", 1.1)];

const FILES_IN_A_DIRECTORY: usize = 16;

/// Memory of a side, its page cache in it; more than all of it takes, also of what the kernel keeps below on the server's behalf.
const MEMORY: Memory = Memory { all_bytes: 1 << 30, pool_bytes: 256 << 20, spare_bytes: 0 };

/// Runs the scenario.
///
/// # Errors
/// A program failed, or wrote other bytes; nothing could be measured.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let files = options.files.unwrap_or(if quick { 300 } else { 9000 });
    let mut kept =
        bench.record("files", json!({"files": files, "rounds": rounds, "sides": place::words(&options.sides)}));
    let (archive, bytes) = make_archive(bench.session().directory(), files, &mut kept)?;
    println!("\n{files} files of {} KiB, {rounds} rounds", bytes >> 10);
    let measured = measure(bench, options, (&archive, bytes), rounds, &mut kept);
    kept.finish(measured, record)
}

/// Seconds of each step, by round and side.
type Times = Vec<Vec<Option<[f64; STEPS.len()]>>>;

fn measure(bench: &Bench, options: &Options, archive: (&Path, u64), rounds: usize, kept: &mut Record) -> Result<()> {
    let (archive, bytes) = archive;
    // And as much for git, which keeps compressed copies, and for files that are larger on a disk.
    let disk = Disk::make(bench, 3 * bytes + (32 << 20), Throttle::default())?;
    let mut times: Times = vec![vec![None; options.sides.len()]; rounds];
    let mut missing = vec![false; options.sides.len()];
    for (round, times) in times.iter_mut().enumerate() {
        for side in turns(options.sides.len(), round) {
            if missing[side] {
                continue;
            }
            let keeper = options.sides[side];
            disk.empty()?;
            match disk.stand(bench, keeper, MEMORY) {
                Err(error) if !ours::has_failed(&error) => {
                    println!("  {keeper}: not here: {error:#}");
                    missing[side] = true;
                }
                standing => {
                    let turn = standing.and_then(|standing| Turn { standing: &standing, archive }.take());
                    let steps = turn.with_context(|| keeper.to_string())?;
                    for (step, cost) in STEPS.iter().zip(&steps) {
                        kept.run(json!({
                            "side": keeper.to_string(), "round": round, "step": step, "seconds": cost.wall_s,
                            "cpu_s": cost.cpu_s, "server_cpu_s": cost.server_cpu_s,
                        }));
                    }
                    times[side] = Some(steps.map(|cost| cost.wall_s));
                }
            }
        }
    }
    print(&options.sides, &times, kept);
    print_targets(&targets(&options.sides, &times));
    Ok(())
}

/// What a step took.
struct Cost {
    wall_s: f64,
    /// Of the whole machine.
    cpu_s: f64,
    server_cpu_s: f64,
}

/// All steps on one side.
struct Turn<'t> {
    standing: &'t Standing<'t>,
    archive: &'t Path,
}

impl Turn<'_> {
    fn take(&self) -> Result<[Cost; STEPS.len()]> {
        let (point, archive) = (self.standing.point(), self.archive.to_string_lossy());
        let (tree, point) = (point.join("tree"), point.to_string_lossy());
        let tree = tree.to_string_lossy();
        // It is in the page cache then, whoever's.
        fs::read(self.archive)?;
        let (unpack, _) = self.timed([vec!["tar", "-xf", &archive, "-C", &point]])?;
        self.timed([vec!["tar", "--compare", "-f", &archive, "-C", &point]])?;
        let (list, _) = self.timed([vec!["find", &tree, "-type", "f", "-size", "+0"]])?;
        let names = self.timed([vec!["find", &tree, "-type", "f"]])?.1;
        let git = |words: &[&'static str]| {
            let settings = ["-c", "user.name=bench", "-c", "user.email=bench", "-c", "gc.auto=0"];
            [["git", "-C", &tree].as_slice(), &settings, words].concat()
        };
        self.timed([git(&["init", "-q"]), git(&["add", "-A"]), git(&["commit", "-qm", "all"])])?;
        // The first one looks into what is as young as the index.
        let ask = || self.timed([git(&["status", "--porcelain"])]);
        if !ask()?.1.is_empty() {
            bail!("git finds other files than it committed");
        }
        let (status, _) = ask()?;
        let third: Vec<_> = names.lines().step_by(3).collect();
        let (read, _) = self.timed(third.chunks(1000).map(|names| [&["cat"], names].concat()))?;
        let (remove, _) = self.timed([vec!["rm", "-rf", &tree]])?;
        Ok([unpack, list, status, read, remove])
    }

    /// What it costs to run these one after the other, in the worker's memory, and the text that they print.
    fn timed<'w>(&self, all: impl IntoIterator<Item = Vec<&'w str>>) -> Result<(Cost, String)> {
        let mut printed = Vec::new();
        let (begun, machine, server) = (Instant::now(), machine_cpu_s(), self.standing.server_cpu_s());
        for words in all {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).envs([("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_SYSTEM", "/dev/null")]);
            for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
                command.env_remove(name);
            }
            self.standing.client().take_in(&mut command)?;
            let output = command.stdin(Stdio::null()).output().with_context(|| words[0].to_owned())?;
            if !output.status.success() {
                bail!("{}: {}: {}", words[0], output.status, String::from_utf8_lossy(&output.stderr).trim());
            }
            printed.extend_from_slice(&output.stdout);
        }
        let cost = Cost {
            wall_s: begun.elapsed().as_secs_f64(),
            cpu_s: machine_cpu_s() - machine,
            server_cpu_s: self.standing.server_cpu_s() - server,
        };
        Ok((cost, String::from_utf8_lossy(&printed).into_owned()))
    }
}

/// Makes the tree's archive in `directory`, the same each time; and how many bytes are in its files.
fn make_archive(directory: &Path, files: usize, kept: &mut Record) -> Result<(PathBuf, u64)> {
    let text = Content::write_of(&[Kind::Text], &directory.join("text"), 8 << 20, kept)?;
    let text = fs::read(text.path)?;
    let (top, archive) = (directory.join("unpacked"), directory.join("archive.tar"));
    let mut random = fastrand::Rng::with_seed(7);
    let mut all_bytes = 0;
    for number in 0..files {
        let mut place = top.join("tree");
        let mut rest = number / FILES_IN_A_DIRECTORY;
        for _ in 0..4 + rest % 3 {
            place.push(format!("d{}", rest % 5));
            rest /= 5;
        }
        place.push(format!("of{}", number / FILES_IN_A_DIRECTORY));
        if number % FILES_IN_A_DIRECTORY == 0 {
            fs::create_dir_all(&place)?;
        }
        // From 200 bytes to 150 times as much; the square root of that is in the middle.
        let bytes = (200.0 * 150f64.powf(random.f64())) as usize;
        let from = random.usize(0..text.len() - bytes);
        fs::write(place.join(format!("file{number}")), &text[from..from + bytes])?;
        all_bytes += bytes as u64;
    }
    let packed = Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(&top).arg("tree").status();
    if !packed.context("tar")?.success() {
        bail!("tar could not make an archive");
    }
    fs::remove_dir_all(&top)?;
    Ok((archive, all_bytes))
}

/// Of one step: how many times as long it took as without.
fn ratios(times: &Times, side: usize, step: usize) -> Option<Spread> {
    let of = |side: usize| times.iter().map(|round| Some(round[side]?[step])).collect::<Vec<_>>();
    Spread::of_ratios(&of(side), &of(0))
}

fn print(sides: &[Keeper], times: &Times, kept: &mut Record) {
    let mut table = Table::new(&[&["side"], STEPS.as_slice()].concat());
    for (side, keeper) in sides.iter().enumerate() {
        let seconds = |step: usize| Spread::of(times.iter().filter_map(|round| Some(round[side]?[step])));
        let shown = (0..STEPS.len()).map(|step| cell(seconds(step).map(|spread| format!("{spread:.3} s"))));
        table.line([keeper.to_string()].into_iter().chain(shown));
        if side > 0 {
            let spreads: Vec<_> = (0..STEPS.len()).map(|step| ratios(times, side, step)).collect();
            let shown = spreads.iter().map(|spread| cell(spread.map(|spread| format!("{spread:.1} x"))));
            table.line(["  times".to_owned()].into_iter().chain(shown));
            kept.summary(json!({"side": keeper.to_string(), "steps": STEPS, "times_as_long": spreads}));
        }
    }
    print!("{table}");
}

fn targets(sides: &[Keeper], times: &Times) -> Vec<Target> {
    let Some(side) = sides.iter().position(|side| side.to_string() == "mount").filter(|side| *side > 0) else {
        return Vec::new();
    };
    let steps = WANTED.iter().filter_map(|(wanted, bound)| {
        let step = STEPS.iter().position(|step| step == wanted)?;
        let about = format!("{wanted} on a mount, in times of that without");
        Some(Target { about, measured: ratios(times, side, step), bound: *bound, at_least: false, unit: "x" })
    });
    steps.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_on_either_side_counts_for_no_ratio() {
        let times = vec![vec![Some([1.0; 5]), Some([3.0; 5])], vec![None, Some([9.0; 5])], vec![Some([2.0; 5]), None]];
        assert_eq!(ratios(&times, 1, 0), Spread::of([3.0]));
        let sides = ["plain", "mount"].map(|word| word.parse().unwrap());
        assert_eq!(targets(&sides, &times).iter().map(Target::met).collect::<Vec<_>>(), [Some(false); 2]);
        assert!(targets(&sides[..1], &times).is_empty());
    }
}
