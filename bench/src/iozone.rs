//! Scenario `iozone`: the nine columns of IOzone on a file twice as large as memory, with and without a compressed page cache.
//!
//! Document 001 of compcache compares both with IOzone (`-a -B`: thirteen record sizes, through mmap); here the same is done by a worker of our own
//! ([`compcache_worker::columns`]), through mmap and through read(2) and write(2). The sides have the same memory and the same disk: [`place`] says
//! how. Each column is timed as IOzone does it, without opening and flushing; columns of one record size follow each other on one file, and find in
//! memory what the one before left there.
//!
//! For every record size the sides take turns, the order turned round every second round. A turn begins with a new file, an empty page
//! cache and an empty pool. Every byte that is read is compared with what was written.

pub mod client;
pub mod image;
pub mod place;
mod report;

use std::path::Path;
use std::str::FromStr;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use compcache_testkit::PAGE_BYTES;
use compcache_worker::columns::{Column, Through};
use serde_json::json;

use crate::baseline::loop_device::Throttle;
use crate::compare::turns;
use crate::ours;
use crate::record::Record;
use crate::scan::print_targets;
use crate::side::Bench;
use client::{Client, Cost};
use image::{Holds, Image};
use place::{Disk, Keeper, Memory};
use report::Report;

/// What `iozone` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// MiB of memory of each side; the file is twice as large. Document 001 has 512 [default: 64; 512 on ssd; 48 if throttled; 80 with --quick].
    #[arg(long)]
    megabytes: Option<u64>,
    /// What of it the pool may take: a percentage, or half [default: 10% of IOzone's pattern, half of real content].
    #[arg(long, value_name = "SHARE")]
    pool: Option<Share>,
    /// What the pages hold.
    #[arg(long, value_enum, default_value_t = Holds::Iozone)]
    content: Holds,
    /// What the file lies on.
    #[arg(long, value_enum, default_value_t = Speed::Fast)]
    disk: Speed,
    /// How the file is read and written [default: both; mmap if throttled].
    #[arg(long, value_enum, value_delimiter = ',')]
    through: Vec<Through>,
    /// plain, mount, mount-asking, mount-passthrough, mount-exclusive, mount-writeback, mount-recompress, origin; the first one is what the others are divided by.
    #[arg(long, value_delimiter = ',', default_value = "plain,mount")]
    sides: Vec<Keeper>,
    /// KiB in a record [default: 4 to 16384, doubled each time; 64 and 4096 with --quick].
    #[arg(long, value_delimiter = ',')]
    record_sizes: Vec<u64>,
}

/// How fast the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Speed {
    /// This machine's.
    Fast,
    /// The same, at 800 MB/s and 22 000 operations a second: 45 us each.
    Ssd,
    /// The same, at 75 MB/s and 700 operations a second.
    Throttled,
}

impl Speed {
    /// As it is written in tables and on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Speed::Fast => "fast",
            Speed::Ssd => "ssd",
            Speed::Throttled => "throttled",
        }
    }

    /// What makes it so slow.
    pub fn throttle(self) -> Throttle {
        match self {
            Speed::Fast => Throttle::default(),
            Speed::Ssd => Throttle { iops: 22_000, bytes_per_s: 800_000_000 },
            Speed::Throttled => Throttle { iops: 700, bytes_per_s: 75_000_000 },
        }
    }
}

/// A share of the memory, in hundredths.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Share(u64);

impl FromStr for Share {
    type Err = String;

    fn from_str(word: &str) -> Result<Share, String> {
        let percent =
            if word == "half" { Some(50) } else { word.strip_suffix('%').and_then(|digits| digits.parse().ok()) };
        percent
            .filter(|percent| (1..=90).contains(percent))
            .map(Share)
            .ok_or_else(|| format!("{word:?} is neither half nor 1% to 90%"))
    }
}

/// What is asked: how large everything is.
pub struct Plan {
    memory: Memory,
    file_bytes: u64,
    holds: Holds,
    speed: Speed,
    throughs: Vec<Through>,
    keepers: Vec<Keeper>,
    record_sizes: Vec<u64>,
    rounds: usize,
}

impl Plan {
    fn of(options: &Options, quick: bool, rounds: Option<usize>) -> Result<Plan> {
        let throttled = options.disk == Speed::Throttled;
        let megabytes = options.megabytes.unwrap_or(match (quick, options.disk) {
            (true, _) => 80,
            (false, Speed::Fast) => 64,
            // The throttle lets some hundred megabytes pass at first.
            (false, Speed::Ssd) => 512,
            (false, Speed::Throttled) => 48,
        });
        let Share(percent) = options.pool.unwrap_or(Share(if options.content == Holds::Iozone { 10 } else { 50 }));
        let all_bytes = megabytes << 20;
        let record_sizes: Vec<u64> = match (options.record_sizes.is_empty(), quick) {
            (false, _) => options.record_sizes.iter().map(|kilobytes| kilobytes << 10).collect(),
            (true, true) => vec![64 << 10, 4096 << 10],
            (true, false) => (0..13).map(|power| 4096 << power).collect(),
        };
        let plan = Plan {
            memory: Memory {
                all_bytes,
                pool_bytes: all_bytes * percent / 100,
                spare_bytes: Memory::spare_bytes(quick),
            },
            file_bytes: 2 * all_bytes,
            holds: options.content,
            speed: options.disk,
            throughs: match (options.through.is_empty(), throttled) {
                (false, _) => options.through.clone(),
                (true, true) => vec![Through::Mmap],
                (true, false) => vec![Through::Mmap, Through::ReadWrite],
            },
            keepers: options.sides.clone(),
            record_sizes,
            // A round of the throttled disk takes minutes.
            rounds: rounds.unwrap_or(if quick || throttled { 1 } else { 2 }),
        };
        for &keeper in &plan.keepers {
            plan.memory.client_bytes(keeper)?;
        }
        check_records(plan.file_bytes, &plan.record_sizes)?;
        if plan.keepers.is_empty() {
            bail!("name a side at least");
        }
        Ok(plan)
    }
}

/// Fails unless a file of so many bytes has a whole number of records of each size, which are whole pages.
///
/// # Errors
/// It has not.
pub fn check_records(file_bytes: u64, record_sizes: &[u64]) -> Result<()> {
    let is_bad =
        |bytes: &&u64| **bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES as u64) || !file_bytes.is_multiple_of(**bytes);
    match record_sizes.iter().find(is_bad) {
        Some(bytes) => {
            bail!("a file of {} MiB has no whole number of records of {} KiB", file_bytes >> 20, bytes >> 10)
        }
        None => Ok(()),
    }
}

/// One column of one turn.
pub struct Cell {
    /// The place of its side in the plan.
    side: usize,
    through: Through,
    record_bytes: u64,
    round: usize,
    column: Column,
    mb_per_s: f64,
    cost: Cost,
}

/// Runs the scenario.
///
/// # Errors
/// Wrong bytes were read, a side failed in the middle, or nothing could be measured.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: Option<usize>, record: Option<&Path>) -> Result<()> {
    let plan = Plan::of(options, quick, rounds)?;
    let Throttle { iops, bytes_per_s } = plan.speed.throttle();
    let settings = json!({
        "rounds": plan.rounds, "memory_bytes": plan.memory.all_bytes, "pool_bytes": plan.memory.pool_bytes,
        "file_bytes": plan.file_bytes, "content": format!("{:?}", plan.holds), "iops": iops, "bytes_per_s": bytes_per_s,
        "sides": place::words(&plan.keepers),
    });
    let mut kept = bench.record("iozone", settings);
    let image = Image::make(plan.holds, plan.file_bytes, &mut kept)?;
    println!(
        "\nthe columns of IOzone: {} MiB of memory ({} MiB of it for the pool), a file of {} MiB of {} ({:.1} % \
         same-filled), disk: {}, {} rounds",
        plan.memory.all_bytes >> 20,
        plan.memory.pool_bytes >> 20,
        plan.file_bytes >> 20,
        image.kinds,
        image.same_filled,
        if iops == 0 {
            "as it is".to_owned()
        } else {
            format!("{iops} operations and {} MB a second", bytes_per_s / 1_000_000)
        },
        plan.rounds
    );
    let measured = measure(bench, &plan, &image, &mut kept);
    kept.finish(measured, record)
}

fn measure(bench: &Bench, plan: &Plan, image: &Image, kept: &mut Record) -> Result<()> {
    // The record rewrite has a file of its own.
    let disk = Disk::make(bench, 2 * plan.file_bytes, plan.speed.throttle())?;
    let mut missing = vec![false; plan.keepers.len()];
    let mut report = Report::new(plan);
    for round in 0..plan.rounds {
        for &through in &plan.throughs {
            for &record_bytes in &plan.record_sizes {
                for side in turns(plan.keepers.len(), round) {
                    if missing[side] {
                        continue;
                    }
                    let turn = Turn { bench, plan, disk: &disk, image, side, through, record_bytes, round };
                    match turn.take(&mut report, kept) {
                        Err(Failure::NotHere(error)) => {
                            println!("  {}: not here: {error:#}", plan.keepers[side]);
                            missing[side] = true;
                        }
                        Err(Failure::Broken(error)) => {
                            return Err(error.context(format!(
                                "{} through {through}, records of {} KiB",
                                plan.keepers[side],
                                record_bytes >> 10
                            )));
                        }
                        Ok(()) => {}
                    }
                }
            }
        }
    }
    if !kept.is_empty() {
        report.print(kept);
        print_targets(&report.targets(kept));
    }
    Ok(())
}

/// Why a turn was not taken.
enum Failure {
    /// This machine cannot have the side.
    NotHere(anyhow::Error),
    /// It was there, and failed.
    Broken(anyhow::Error),
}

/// All columns of one record size on one side.
struct Turn<'t> {
    bench: &'t Bench,
    plan: &'t Plan,
    disk: &'t Disk<'t>,
    image: &'t Image,
    side: usize,
    through: Through,
    record_bytes: u64,
    round: usize,
}

impl Turn<'_> {
    fn take(&self, report: &mut Report<'_>, kept: &mut Record) -> Result<(), Failure> {
        let keeper = self.plan.keepers[self.side];
        let standing = self.disk.stand(self.bench, keeper, self.plan.memory);
        let standing = standing.map_err(|error| match ours::has_failed(&error) {
            true => Failure::Broken(error),
            false => Failure::NotHere(error),
        })?;
        let bytes = (self.plan.file_bytes, self.record_bytes);
        let (image, patience) = (&self.image.path, self.bench.patience());
        let client = Client::start(self.disk, &standing, self.through, bytes, image, &[], patience);
        let mut client = client.map_err(Failure::Broken)?;
        for column in Column::ALL {
            let (answer, cost) = client.ask(column).map_err(Failure::Broken)?;
            let mb_per_s = answer.bytes as f64 / 1e6 / answer.seconds;
            kept.run(json!({
                "side": keeper.to_string(), "through": self.through, "record_bytes": self.record_bytes, "round": self.round,
                "mb_per_s": mb_per_s, "answer": answer, "cost": cost,
            }));
            let (side, through, record_bytes, round) = (self.side, self.through, self.record_bytes, self.round);
            report.add(Cell { side, through, record_bytes, round, column, mb_per_s, cost });
        }
        client.end().map_err(Failure::Broken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percentages_or_half() {
        assert_eq!("10%".parse(), Ok(Share(10)));
        assert_eq!("half".parse(), Ok(Share(50)));
        for word in ["", "0%", "100%", "10", "64M"] {
            assert!(word.parse::<Share>().is_err(), "{word}");
        }
    }

    #[test]
    fn records_are_whole_pages_and_whole_in_number() {
        assert!(check_records(16 << 20, &[4 << 10, 1 << 20, 16 << 20]).is_ok());
        for bytes in [0, 512, 6 << 10, 12 << 10, 32 << 20] {
            assert!(check_records(16 << 20, &[4 << 10, bytes]).is_err(), "{bytes}");
        }
    }
}
