//! Scenario `limits`: what the limit of one pool is worth, from 1 to 50 percent of the file that it caches.
//!
//! Document 001 of compcache leaves it to be done: "per-pool limits". A file is read in three orders ([`ORDERS`]) by a worker whose own page cache
//! stays the same, a sixteenth of the file, while the pool's limit grows from turn to turn. Beside each limit stands the kernel alone, whose page cache has
//! all the memory that ours has there: the worker's, the pool, and what the server needs ([`Memory`]).
//!
//! In each order the file is read twice: first so that what is worth keeping gets into the pool, then to be measured. Where records are drawn, they are
//! drawn anew the second time, on every side the same. The sides take turns, the order turned round every second round. Every byte that is read is compared with what
//! was written.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use compcache_worker::columns::{Column, Through};
use serde_json::json;

use crate::baseline::loop_device::Throttle;
use crate::compare::turns;
use crate::iozone::client::{Client, Cost};
use crate::iozone::image::{Holds, Image};
use crate::iozone::place::{self, Disk, Keeper, Memory};
use crate::iozone::{Speed, check_records};
use crate::ours;
use crate::record::Record;
use crate::side::Bench;
use crate::stat::Spread;
use crate::table::{Table, cell, mib};

/// In which order a file is read: what makes an LRU cache useless, what makes it no worse than any other, and what it is made for.
const ORDERS: [Column; 3] = [Column::Reread, Column::UniformRead, Column::SkewedRead];

/// The page cache of the worker, in parts of the file; of a quick run, on a machine where others work and what is written waits for the disk.
const CLIENT_PARTS: u64 = 16;
const CLIENT_PARTS_QUICK: u64 = 4;

/// What `limits` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// MiB in the file [default: 256; 128 with --quick].
    #[arg(long)]
    megabytes: Option<u64>,
    /// The pool's limits, in percent of the file [default: 1, 2, 5, 10, 20, 30, 40, 50; 2 and 50 with --quick].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=100))]
    percent: Vec<u64>,
    /// What the pages hold.
    #[arg(long, value_enum, default_value_t = Holds::Real)]
    content: Holds,
    /// What the file lies on [default: both; fast with --quick].
    #[arg(long, value_enum, value_delimiter = ',')]
    disk: Vec<Speed>,
    /// mount, mount-passthrough, mount-exclusive, mount-writeback, mount-recompress, origin; beside each of them stands plain.
    #[arg(long, value_delimiter = ',', default_value = "mount,origin")]
    sides: Vec<Keeper>,
    /// KiB that are read at once.
    #[arg(long, default_value_t = 64)]
    record_size: u64,
}

/// What is asked: how large everything is.
struct Plan {
    file_bytes: u64,
    record_bytes: u64,
    percents: Vec<u64>,
    holds: Holds,
    speeds: Vec<Speed>,
    /// Plain is the first.
    keepers: Vec<Keeper>,
    rounds: usize,
    /// The page cache of the worker.
    client_bytes: u64,
    /// As [`Memory`] has it.
    spare_bytes: u64,
}

impl Plan {
    fn of(options: &Options, quick: bool, rounds: Option<usize>) -> Result<Plan> {
        let or = |given: &[u64], usual: &[u64]| if given.is_empty() { usual.to_vec() } else { given.to_vec() };
        let file_bytes = options.megabytes.unwrap_or(if quick { 128 } else { 256 }) << 20;
        let plan = Plan {
            file_bytes,
            record_bytes: options.record_size << 10,
            percents: or(&options.percent, if quick { &[2, 50] } else { &[1, 2, 5, 10, 20, 30, 40, 50] }),
            holds: options.content,
            speeds: match (options.disk.is_empty(), quick) {
                (false, _) => options.disk.clone(),
                (true, true) => vec![Speed::Fast],
                (true, false) => vec![Speed::Fast, Speed::Throttled],
            },
            keepers: [Keeper::Plain].into_iter().chain(options.sides.iter().copied()).collect(),
            rounds: rounds.unwrap_or(if quick { 1 } else { 2 }),
            client_bytes: file_bytes / if quick { CLIENT_PARTS_QUICK } else { CLIENT_PARTS },
            spare_bytes: Memory::spare_bytes(quick),
        };
        check_records(plan.file_bytes, &[plan.record_bytes])?;
        if plan.keepers.len() == 1 || plan.keepers[1..].contains(&Keeper::Plain) {
            bail!("name sides of ours: plain is there anyway");
        }
        plan.memory(1).client_bytes(plan.keepers[1]).context("the file is too small")?;
        Ok(plan)
    }

    /// What all sides have where the pool has so much of the file.
    fn memory(&self, percent: u64) -> Memory {
        Memory::beside(self.client_bytes, self.file_bytes * percent / 100, self.spare_bytes)
    }
}

/// One order of one turn: what the second reading did.
struct Cell {
    speed: Speed,
    percent: u64,
    side: usize,
    round: usize,
    order: Column,
    mb_per_s: f64,
    /// Bytes from the disk for each byte that was asked for.
    from_disk: f64,
    cost: Cost,
}

/// Runs the scenario.
///
/// # Errors
/// Wrong bytes were read, a side failed in the middle, or nothing could be measured.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: Option<usize>, record: Option<&Path>) -> Result<()> {
    let plan = Plan::of(options, quick, rounds)?;
    let settings = json!({
        "rounds": plan.rounds, "file_bytes": plan.file_bytes, "record_bytes": plan.record_bytes, "percents": plan.percents,
        "client_bytes": plan.client_bytes, "content": format!("{:?}", plan.holds), "sides": place::words(&plan.keepers),
    });
    let mut kept = bench.record("limits", settings);
    let image = Image::make(plan.holds, plan.file_bytes, &mut kept)?;
    println!(
        "\nlimits of a pool: a file of {} MiB of {} ({:.1} % same-filled), read {} KiB at a time, {} MiB of it in the page \
         cache of who reads; {} rounds",
        plan.file_bytes >> 20,
        image.kinds,
        image.same_filled,
        plan.record_bytes >> 10,
        plan.client_bytes >> 20,
        plan.rounds
    );
    let measured = measure(bench, &plan, &image, &mut kept);
    kept.finish(measured, record)
}

fn measure(bench: &Bench, plan: &Plan, image: &Image, kept: &mut Record) -> Result<()> {
    let mut cells = Vec::new();
    for &speed in &plan.speeds {
        let disk = Disk::make(bench, plan.file_bytes, speed.throttle())?;
        let mut missing = vec![false; plan.keepers.len()];
        for round in 0..plan.rounds {
            for &percent in &plan.percents {
                for side in turns(plan.keepers.len(), round) {
                    if missing[side] {
                        continue;
                    }
                    let turn = Turn { bench, plan, disk: &disk, image, speed, percent, side, round };
                    let taken = turn
                        .take(kept)
                        .with_context(|| format!("{}, {speed:?} disk, a pool of {percent} %", plan.keepers[side]))?;
                    match taken {
                        Some(of_turn) => cells.extend(of_turn),
                        None => missing[side] = true,
                    }
                }
            }
        }
    }
    report(plan, &cells, kept);
    Ok(())
}

/// All orders at one limit on one side.
struct Turn<'t> {
    bench: &'t Bench,
    plan: &'t Plan,
    disk: &'t Disk<'t>,
    image: &'t Image,
    speed: Speed,
    percent: u64,
    side: usize,
    round: usize,
}

impl Turn<'_> {
    /// None where this machine cannot have the side, which is said.
    fn take(&self, kept: &mut Record) -> Result<Option<Vec<Cell>>> {
        let keeper = self.plan.keepers[self.side];
        let standing = match self.disk.stand(self.bench, keeper, self.plan.memory(self.percent)) {
            Ok(standing) => standing,
            Err(error) if ours::has_failed(&error) => return Err(error),
            Err(error) => {
                println!("  {keeper}: not here: {error:#}");
                return Ok(None);
            }
        };
        let bytes = (self.plan.file_bytes, self.plan.record_bytes);
        let (image, patience) = (&self.image.path, self.bench.patience());
        let mut client = Client::start(self.disk, &standing, Through::ReadWrite, bytes, image, &[], patience)?;
        client.ask(Column::Write)?;
        let mut cells = Vec::new();
        for order in ORDERS {
            client.ask(order)?;
            let (answer, cost) = client.ask(order)?;
            let cell = Cell {
                speed: self.speed,
                percent: self.percent,
                side: self.side,
                round: self.round,
                order,
                mb_per_s: answer.bytes as f64 / 1e6 / answer.seconds,
                from_disk: cost.traffic.read_bytes as f64 / answer.bytes as f64,
                cost,
            };
            let Throttle { iops, bytes_per_s } = self.speed.throttle();
            kept.run(json!({
                "side": keeper.to_string(), "iops": iops, "bytes_per_s": bytes_per_s, "percent": self.percent, "order": order,
                "round": self.round, "mb_per_s": cell.mb_per_s, "from_disk": cell.from_disk, "answer": answer, "cost": cost,
            }));
            cells.push(cell);
        }
        client.end()?;
        Ok(Some(cells))
    }
}

/// Prints everything, and notes it in the record.
fn report(plan: &Plan, cells: &[Cell], kept: &mut Record) {
    for &speed in &plan.speeds {
        for order in ORDERS {
            for (side, keeper) in plan.keepers.iter().enumerate().skip(1) {
                let of = |percent, side| {
                    let these = move |cell: &&Cell| {
                        (cell.speed, cell.order, cell.percent, cell.side) == (speed, order, percent, side)
                    };
                    cells.iter().filter(these)
                };
                if plan.percents.iter().all(|&percent| of(percent, side).next().is_none()) {
                    continue;
                }
                println!("\n{order}, {} disk: {keeper} beside plain in the same memory", speed.word());
                let mut table = Table::new(&[
                    "limit, % of the file",
                    "memory MiB",
                    "pool MiB",
                    "pool hit %",
                    "from the disk, B/B",
                    "plain's",
                    "MB/s",
                    "plain's",
                    "times faster",
                ]);
                for &percent in &plan.percents {
                    let over = |side, number: fn(&Cell) -> f64| Spread::of(of(percent, side).map(number));
                    let by_round = |side| -> Vec<Option<f64>> {
                        let in_round =
                            |round| of(percent, side).find(|cell| cell.round == round).map(|cell| cell.mb_per_s);
                        (0..plan.rounds).map(in_round).collect()
                    };
                    let hits = over(side, Cell::hit_percent);
                    let ratio = Spread::of_ratios(&by_round(side), &by_round(0));
                    let two = |spread: Option<Spread>| cell(spread.map(|all| format!("{:.2}", all.median)));
                    let one = |spread: Option<Spread>| cell(spread.map(|all| format!("{:.1}", all.median)));
                    let pool = of(percent, side).map(|cell| cell.cost.pool.memory_bytes).max();
                    table.line([
                        percent.to_string(),
                        mib(plan.memory(percent).all_bytes),
                        cell(pool.map(mib)),
                        one(hits),
                        two(over(side, |cell| cell.from_disk)),
                        two(over(0, |cell| cell.from_disk)),
                        one(over(side, |cell| cell.mb_per_s)),
                        one(over(0, |cell| cell.mb_per_s)),
                        cell(ratio),
                    ]);
                    kept.summary(json!({
                        "disk": speed.word(), "order": order, "side": keeper.to_string(), "percent": percent, "ratio": ratio,
                        "hit_percent": hits, "mb_per_s": over(side, |cell| cell.mb_per_s), "plain_mb_per_s": over(0, |cell| cell.mb_per_s),
                        "from_disk": over(side, |cell| cell.from_disk), "plain_from_disk": over(0, |cell| cell.from_disk),
                    }));
                }
                print!("{table}");
            }
        }
    }
}

impl Cell {
    /// Of the pages that the pool was asked for, those that it had; no number where it was asked for none.
    fn hit_percent(&self) -> f64 {
        100.0 * self.cost.found as f64 / (self.cost.found + self.cost.missed) as f64
    }
}
