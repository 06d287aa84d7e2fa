//! Scenario `disk-memory`: what a disk that holds a source tree costs, ours beside the kernel's zram with the same codec.
//!
//! An ext4 on each gets the same files in the same order: the sources in cargo's registry, by name, up to a size. Then
//! both say what they hold. `mem_used_total` is what they took from the system; zram's table ([`ZRAM_ENTRY_BYTES`]) is
//! not in its number, ours is in ours, and the server's memory is in neither. So there are two ratios: of these numbers, and of all, with
//! server and table.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use compcache_testkit::PAGE_BYTES;
use serde_json::json;

use crate::baseline::Held;
use crate::device::{Device, Kind, kinds};
use crate::ours;
use crate::scan::print_targets;
use crate::side::Bench;
use crate::stat::{Spread, Target};
use crate::table::{Table, cell, mib};

/// What `disk-memory` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// ours, ours:CODEC, zram:CODEC.
    #[arg(long, value_delimiter = ',', default_value = "ours:lz4,zram:lz4")]
    sides: Vec<String>,
    /// The tree [default: the sources in cargo's registry].
    #[arg(long, value_name = "DIR")]
    tree: Option<PathBuf>,
}

/// Longer than our server rests between two looks at what can be compacted.
const SETTLED: Duration = Duration::from_millis(1500);
/// What zram's table has for each page of the device, used or not: `struct zram_table_entry`, where it does not track when a page was used.
const ZRAM_ENTRY_BYTES: u64 = 16;

/// Runs the scenario.
///
/// # Errors
/// There is no tree, a disk of ours could not be made, or one could not hold it.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let bytes_max: u64 = if quick { 8 << 20 } else { 384 << 20 };
    let rounds = rounds.min(3);
    let tree = options.tree.clone().map_or_else(registry, Ok)?;
    let files = files(&tree, bytes_max)?;
    let bytes: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    let mut kept = bench.record("disk-memory", json!({"files": files.len(), "bytes": bytes, "rounds": rounds}));
    println!("\nan ext4 with {} files of {} MiB, {rounds} rounds", files.len(), mib(bytes));
    let kinds = kinds(&options.sides)?;
    kept.binaries_of(&kinds);
    let disk_bytes = 2 * bytes_max + (64 << 20);
    let mut held: Vec<Vec<Held>> = vec![Vec::new(); kinds.len()];
    let mut failures = 0;
    for round in 0..rounds {
        for (nth, kind) in kinds.iter().enumerate() {
            let device = Device::set_up(bench.session(), kind, disk_bytes, bench.compcache());
            let device = match device {
                Err(error) if !ours::has_failed(&error) => {
                    println!("  {kind}: not here: {error:#}");
                    continue;
                }
                device => device,
            };
            match device.and_then(|device| filled(&device, &tree, &files)) {
                Ok(found) => {
                    kept.run(json!({"side": kind.to_string(), "round": round, "held": found}));
                    held[nth].push(found);
                }
                Err(error) => {
                    println!("  {kind}: {error:#}");
                    failures += 1;
                }
            }
        }
    }
    print(&kinds, &held);
    let targets = targets(&kinds, &held, disk_bytes);
    let measured = |nth: usize| targets.get(nth).and_then(|target| target.measured);
    kept.summary(json!({"ours_to_zram": measured(0), "all_of_ours_to_all_of_zram": measured(1)}));
    print_targets(&targets);
    let measured = if failures > 0 { Err(anyhow!("{failures} disks failed, see above")) } else { Ok(()) };
    kept.finish(measured, record)
}

/// What a new disk holds with the files on it, once they are written and it has come to rest.
fn filled(device: &Device<'_>, tree: &Path, files: &[(PathBuf, u64)]) -> Result<Held> {
    let point = device.with_ext4("")?;
    for (file, _) in files {
        let to = point.join(file.strip_prefix(tree)?);
        fs::create_dir_all(to.parent().context("a file lies in a directory")?)?;
        fs::copy(file, &to).with_context(|| to.display().to_string())?;
    }
    // SAFETY: sync(2) takes nothing and returns nothing.
    unsafe { libc::sync() };
    thread::sleep(SETTLED);
    Ok(device.held())
}

fn print(kinds: &[Kind], held: &[Vec<Held>]) {
    let headings = ["side", "data MiB", "compressed", "mem_used_total", "server", "same-filled %", "used/compressed"];
    let mut table = Table::new(&headings);
    for (kind, held) in kinds.iter().zip(held) {
        let median =
            |number: fn(&Held) -> u64| Spread::of(held.iter().map(|one| number(one) as f64)).map(|all| all.median);
        let bytes = |number| cell(median(number).map(|bytes| mib(bytes as u64)));
        let pair = |over: fn(&Held) -> u64, under: fn(&Held) -> u64| Some(median(over)? / median(under)?);
        table.line([
            kind.to_string(),
            bytes(|held| held.original_bytes),
            bytes(|held| held.compressed_bytes),
            bytes(|held| held.memory_bytes),
            bytes(|held| held.server_bytes),
            cell(
                pair(|held| held.same_pages * 4096 * 100, |held| held.original_bytes)
                    .map(|share| format!("{share:.1}")),
            ),
            cell(pair(|held| held.memory_bytes, |held| held.compressed_bytes).map(|ratio| format!("{ratio:.3}"))),
        ]);
    }
    print!("{table}");
}

/// By what both say they took from the system, and by all that they took. None where a side is missing.
fn targets(kinds: &[Kind], held: &[Vec<Held>], disk_bytes: u64) -> Vec<Target> {
    let find = |wanted: fn(&Kind) -> bool| kinds.iter().position(wanted);
    let ours = find(|kind| matches!(kind, Kind::Ours { binary: None, .. }));
    let (Some(ours), Some(zram)) = (ours, find(|kind| matches!(kind, Kind::Zram(_)))) else { return Vec::new() };
    let of = |nth: usize, bytes: &dyn Fn(&Held) -> u64| {
        held[nth].iter().map(|held| Some(bytes(held) as f64)).collect::<Vec<_>>()
    };
    let table_bytes = disk_bytes / PAGE_BYTES as u64 * ZRAM_ENTRY_BYTES;
    let told = Spread::of_ratios(&of(ours, &|held| held.memory_bytes), &of(zram, &|held| held.memory_bytes));
    let all = Spread::of_ratios(&of(ours, &Held::all_bytes), &of(zram, &|held| held.all_bytes() + table_bytes));
    let target =
        |about: &str, measured| Target { about: about.to_owned(), measured, bound: 1.03, at_least: false, unit: "x" };
    vec![
        target("mem_used_total of ours in that of zram", told),
        target("the same with our server's memory and zram's table", all),
    ]
}

fn registry() -> Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let tree = home.context("no home directory")?.join("registry/src");
    match tree.is_dir() {
        true => Ok(tree),
        false => bail!("{} is not there: build something first, or name a tree with --tree", tree.display()),
    }
}

/// The files of a tree by their names, until `bytes_max` is reached, and their sizes.
fn files(tree: &Path, bytes_max: u64) -> Result<Vec<(PathBuf, u64)>> {
    let mut directories = vec![tree.to_owned()];
    let mut all = Vec::new();
    while let Some(directory) = directories.pop() {
        for found in fs::read_dir(&directory).with_context(|| directory.display().to_string())? {
            let found = found?;
            let kind = found.file_type()?;
            if kind.is_dir() {
                directories.push(found.path());
            } else if kind.is_file() {
                all.push((found.path(), found.metadata()?.len()));
            }
        }
    }
    all.sort();
    let mut bytes = 0;
    Ok(all
        .into_iter()
        .take_while(|(_, length)| {
            bytes += length;
            bytes <= bytes_max
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_of_ours_and_the_table_of_zram_are_in_the_second_ratio() {
        let kinds = kinds(&["zram:lz4", "ours"]).unwrap();
        let zram = Held { memory_bytes: 1000, ..Held::default() };
        let ours = Held { memory_bytes: 900, server_bytes: 180, ..Held::default() };
        let targets = targets(&kinds, &[vec![zram], vec![ours]], 5 * 4096);
        let measured: Vec<_> = targets.iter().map(|target| target.measured.unwrap().median).collect();
        assert_eq!(measured, [0.9, 1.0]);
        assert!(super::targets(&kinds[..1], &[vec![zram]], 4096).is_empty());
    }
}
