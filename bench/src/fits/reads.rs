//! What a mount of ours adds to reads of a file that is in the page cache.
//!
//! The same file lies on an ext4 of each side's own, and all sides stand at the same time, so that a reading on one follows the same reading on another
//! at once. In each round they are mounted anew, and the file is read once, from the disk, into the page cache: nobody has memory kept from him ([`Plan::memory`]). Then it is read
//! again and again, all of it each time: in order and at random, in records of each size, through read(2) and through a mapping, which is made anew for each reading, as
//! the file is opened anew.
//!
//! Timed is each reading from its first record to its last, the faults of a mapping in it; opening is not. Then all is read once more and compared with what was written. What came in these
//! two from elsewhere than the page cache is counted, by our server and on the disk. Others may empty the page cache of the whole machine: then all sides read again, and only
//! who finds nothing in it each time has that counted, and told.

use anyhow::{Context, Result, bail};
use compcache_worker::columns::{Answer, Column, Through};
use serde_json::{Value, json};

use super::Options;
use crate::baseline::loop_device::Throttle;
use crate::compare::turns;
use crate::iozone::check_records;
use crate::iozone::client::{Client, Cost};
use crate::iozone::image::{Holds, Image};
use crate::iozone::place::{Disk, Keeper, Memory, Standing};
use crate::ours;
use crate::record::Record;
use crate::side::Bench;
use crate::stat::{Spread, Target};
use crate::table::{Table, cell, mib};

/// At most so many times as long as without a mount.
const WANTED: f64 = 1.03;

/// How often a reading is tried that finds the page cache empty. One that finds it so each time is that side's own doing.
const ATTEMPTS: usize = 3;

const THROUGHS: [Through; 2] = [Through::ReadWrite, Through::Mmap];
const ORDERS: [Column; 2] = [Column::Reread, Column::RandomRead];

/// What is asked: how large everything is.
pub struct Plan {
    file_bytes: u64,
    holds: Holds,
    record_sizes: Vec<u64>,
    keepers: Vec<Keeper>,
    rounds: usize,
    passes: usize,
    /// As [`Memory`] has it.
    spare_bytes: u64,
}

impl Plan {
    /// What the command line says.
    ///
    /// # Errors
    /// The file has no whole number of records, or no side is named.
    pub fn of(options: &Options, quick: bool, rounds: Option<usize>) -> Result<Plan> {
        let plan = Plan {
            file_bytes: options.megabytes.unwrap_or(if quick { 16 } else { 256 }) << 20,
            holds: options.content,
            record_sizes: options.record_sizes.iter().map(|kilobytes| kilobytes << 10).collect(),
            keepers: options.sides.clone(),
            rounds: rounds.unwrap_or(if quick { 1 } else { 5 }),
            passes: options.passes.map_or(if quick { 1 } else { 4 }, |passes| passes as usize),
            spare_bytes: Memory::spare_bytes(quick),
        };
        check_records(plan.file_bytes, &plan.record_sizes)?;
        if plan.keepers.is_empty() {
            bail!("name a side at least");
        }
        Ok(plan)
    }

    /// As it stands in a record.
    pub fn settings(&self) -> Value {
        json!({
            "rounds": self.rounds, "passes": self.passes, "file_bytes": self.file_bytes, "content": format!("{:?}", self.holds),
            "record_sizes": self.record_sizes,
        })
    }

    /// More than everything takes: the file in the page cache of who reads, again as what the kernel caches below on the server's behalf, and in the pool, should
    /// none of it compress.
    fn memory(&self) -> Memory {
        Memory::beside(2 * self.file_bytes, self.file_bytes, self.file_bytes + self.spare_bytes)
    }

    /// Whether so little came from elsewhere that it was none of the file's contents.
    fn is_cached(&self, elsewhere_bytes: u64) -> bool {
        elsewhere_bytes < self.file_bytes / 100
    }

    fn name(&self, side: usize) -> String {
        self.keepers[side].to_string()
    }
}

/// One way to read the file.
#[derive(Clone, Copy, PartialEq)]
struct Way {
    through: Through,
    order: Column,
    record_bytes: u64,
}

impl Way {
    /// All of them.
    fn all(plan: &Plan) -> impl Iterator<Item = Way> {
        THROUGHS.into_iter().flat_map(move |through| {
            let of_order = move |order| plan.record_sizes.iter().map(move |&bytes| (order, bytes));
            let ways = ORDERS.into_iter().flat_map(of_order);
            ways.map(move |(order, record_bytes)| Way { through, order, record_bytes })
        })
    }

    fn order(self) -> &'static str {
        if self.order == Column::RandomRead { "at random" } else { "in order" }
    }
}

/// One reading.
struct Cell {
    way: Way,
    side: usize,
    /// Which of all readings in this way; those of one number followed each other.
    nth: usize,
    seconds: f64,
    /// Of CPU, of who reads.
    cpu_s: Option<f64>,
    /// Bytes of it, and of the one that checks it, that were not in the page cache.
    elsewhere_bytes: u64,
}

/// Measures and prints all of it. Returns what is wanted of it.
///
/// # Errors
/// Wrong bytes were read, a side failed in the middle, or there is no disk to be had.
pub fn measure(bench: &Bench, plan: &Plan, kept: &mut Record) -> Result<Vec<Target>> {
    let image = Image::make(plan.holds, plan.file_bytes, kept)?;
    println!(
        "\nreads of a file of {} MiB of {} ({:.1} % same-filled) that is in the page cache, {} rounds of {} readings in each way",
        plan.file_bytes >> 20,
        image.kinds,
        image.same_filled,
        plan.rounds,
        plan.passes
    );
    let disks = plan.keepers.iter().map(|_| disk_with_file(bench, plan, &image)).collect::<Result<Vec<_>>>()?;
    let mut cells = Vec::new();
    let mut missing = vec![false; plan.keepers.len()];
    for nth in 0..plan.rounds {
        let sides = Sides::stand(bench, plan, &disks, &mut missing)?;
        Round { bench, plan, disks: &disks, image: &image, sides: &sides, nth }.take(&mut cells, kept)?;
    }
    print(plan, &cells, kept);
    Ok(targets(plan, &cells))
}

/// A disk that the file has been written to, and where it is in nobody's page cache.
fn disk_with_file<'s>(bench: &'s Bench, plan: &Plan, image: &Image) -> Result<Disk<'s>> {
    let disk = Disk::make(bench, plan.file_bytes, Throttle::default())?;
    let standing = disk.stand(bench, Keeper::Plain, plan.memory())?;
    let mut client = start(bench, plan, &disk, &standing, image, (Through::ReadWrite, 1 << 20))?;
    client.ask(Column::Write)?;
    client.end()?;
    drop(standing);
    Ok(disk)
}

/// Sides that stand at the same time, with their numbers; taken down in the opposite order.
struct Sides<'s>(Vec<(usize, Standing<'s>)>);

impl<'s> Sides<'s> {
    /// Sets up those that are not missing; says which this machine cannot have, and why.
    fn stand(bench: &'s Bench, plan: &Plan, disks: &[Disk<'s>], missing: &mut [bool]) -> Result<Sides<'s>> {
        let mut sides = Sides(Vec::new());
        for (side, disk) in disks.iter().enumerate() {
            if missing[side] {
                continue;
            }
            match disk.stand(bench, plan.keepers[side], plan.memory()) {
                Ok(standing) => sides.0.push((side, standing)),
                Err(error) if ours::has_failed(&error) => return Err(error.context(plan.name(side))),
                Err(error) => {
                    println!("  {}: not here: {error:#}", plan.name(side));
                    missing[side] = true;
                }
            }
        }
        Ok(sides)
    }
}

impl Drop for Sides<'_> {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// All ways on all sides, the file read from the disk before.
struct Round<'r> {
    bench: &'r Bench,
    plan: &'r Plan,
    disks: &'r [Disk<'r>],
    image: &'r Image,
    sides: &'r Sides<'r>,
    nth: usize,
}

impl<'r> Round<'r> {
    fn take(&self, cells: &mut Vec<Cell>, kept: &mut Record) -> Result<()> {
        let mut is_cached = false;
        for way in Way::all(self.plan) {
            let mut clients = self.clients(way)?;
            if !is_cached {
                for (side, client) in &mut clients {
                    self.ask((*side, client), (way, Column::Read, 0), kept)?;
                }
                is_cached = true;
            }
            for pass in 0..self.plan.passes {
                cells.extend(self.pass(&mut clients, way, pass, kept)?);
            }
            for (side, client) in clients {
                client.end().with_context(|| self.plan.name(side))?;
            }
        }
        Ok(())
    }

    /// One reading on each side. Where somebody has emptied the page cache all read again: what reads anew also fills it.
    fn pass(&self, clients: &mut [(usize, Client<'_>)], way: Way, pass: usize, kept: &mut Record) -> Result<Vec<Cell>> {
        let nth = self.nth * self.plan.passes + pass;
        let mut cells = Vec::new();
        for _ in 0..ATTEMPTS {
            cells.clear();
            for place in turns(clients.len(), nth) {
                let (side, client) = &mut clients[place];
                let (answer, cost) = self.ask((*side, client), (way, way.order, pass), kept)?;
                let Answer { seconds, cpu_s, .. } = answer;
                cells.push(Cell { way, side: *side, nth, seconds, cpu_s, elsewhere_bytes: elsewhere_bytes(&cost) });
            }
            if cells.iter().all(|cell| self.plan.is_cached(cell.elsewhere_bytes)) {
                break;
            }
        }
        Ok(cells)
    }

    /// Those who read in this way, with the numbers of their sides.
    fn clients(&self, way: Way) -> Result<Vec<(usize, Client<'r>)>> {
        let on_side = |(side, standing): &'r (usize, Standing<'r>)| {
            let manner = (way.through, way.record_bytes);
            let client = start(self.bench, self.plan, &self.disks[*side], standing, self.image, manner);
            Ok((*side, client.with_context(|| self.plan.name(*side))?))
        };
        self.sides.0.iter().map(on_side).collect()
    }

    /// Has the file read, and notes it.
    fn ask(
        &self,
        (side, client): (usize, &mut Client<'_>),
        (way, column, pass): (Way, Column, usize),
        kept: &mut Record,
    ) -> Result<(Answer, Cost)> {
        let Way { through, record_bytes, .. } = way;
        let (answer, cost) = client.ask(column).with_context(|| {
            format!("{} through {through}, records of {} KiB", self.plan.name(side), record_bytes >> 10)
        })?;
        kept.run(json!({
            "side": self.plan.name(side), "round": self.nth, "pass": pass, "through": through, "record_bytes": record_bytes,
            "mb_per_s": answer.bytes as f64 / 1e6 / answer.seconds, "answer": answer, "cost": cost,
        }));
        Ok((answer, cost))
    }
}

/// A worker that times what it reads as a whole, and leaves the file where it is. `manner` is how it reads and how much at once.
fn start<'p>(
    bench: &Bench,
    plan: &Plan,
    disk: &'p Disk<'p>,
    standing: &'p Standing<'p>,
    image: &Image,
    (through, record_bytes): (Through, u64),
) -> Result<Client<'p>> {
    let bytes = (plan.file_bytes, record_bytes);
    Client::start(disk, standing, through, bytes, &image.path, &["--whole", "--stays"], bench.patience())
}

/// Bytes that the page cache did not have: what our server was asked for, and what came from the disk, which may be the same bytes.
fn elsewhere_bytes(cost: &Cost) -> u64 {
    (4096 * (cost.found + cost.missed)).max(cost.traffic.read_bytes)
}

/// A number of each reading in this way on this side.
fn each(plan: &Plan, cells: &[Cell], (way, side): (Way, usize), number: Number) -> Vec<Option<f64>> {
    let of_number = |nth| cells.iter().find(|cell| (cell.way, cell.side, cell.nth) == (way, side, nth));
    (0..plan.rounds * plan.passes).map(|nth| of_number(nth).and_then(number)).collect()
}

type Number = fn(&Cell) -> Option<f64>;

fn seconds(cell: &Cell) -> Option<f64> {
    Some(cell.seconds)
}

/// How many times as much as on the first side it was.
fn ratio(plan: &Plan, cells: &[Cell], (way, side): (Way, usize), number: Number) -> Option<Spread> {
    Spread::of_ratios(&each(plan, cells, (way, side), number), &each(plan, cells, (way, 0), number))
}

/// Prints everything, and notes it in the record.
fn print(plan: &Plan, cells: &[Cell], kept: &mut Record) {
    let sides = 0..plan.keepers.len();
    let mut headings = ["through", "order", "KiB"].map(str::to_owned).to_vec();
    headings.extend(sides.clone().map(|side| format!("{} MB/s", plan.name(side))));
    headings.extend(sides.clone().skip(1).flat_map(|side| ["x", "x CPU"].map(|x| format!("{} {x}", plan.name(side)))));
    let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    for way in Way::all(plan) {
        let speed = |side| {
            let all = each(plan, cells, (way, side), seconds).into_iter().flatten();
            Spread::of(all.map(|seconds| plan.file_bytes as f64 / 1e6 / seconds))
        };
        let mut line = vec![way.through.to_string(), way.order().to_owned(), (way.record_bytes >> 10).to_string()];
        line.extend(sides.clone().map(|side| cell(speed(side).map(|spread| format!("{:.0}", spread.median)))));
        for side in sides.clone().skip(1) {
            let times = ratio(plan, cells, (way, side), seconds);
            let times_cpu = ratio(plan, cells, (way, side), |cell| cell.cpu_s);
            line.extend([times, times_cpu].map(|spread| cell(spread.map(|spread| format!("{spread:.3}")))));
            kept.summary(json!({
                "through": way.through, "order": way.order, "record_bytes": way.record_bytes, "side": plan.name(side),
                "mb_per_s": speed(side), "first_mb_per_s": speed(0), "times_as_long": times, "times_cpu": times_cpu,
            }));
        }
        table.line(line);
    }
    print!("{table}");
    for side in sides {
        let of_side = cells.iter().filter(|cell| cell.side == side).map(|cell| cell.elsewhere_bytes);
        if let Some(most) = of_side.max().filter(|most| !plan.is_cached(*most)) {
            println!(
                "  {}: {} MiB of a reading and its check were not in the page cache, at most; a smaller file may fit (--megabytes)",
                plan.name(side),
                mib(most)
            );
        }
    }
}

/// What is wanted of ours, where it can be divided by the file system alone.
fn targets(plan: &Plan, cells: &[Cell]) -> Vec<Target> {
    let ours = match plan.keepers[0] {
        Keeper::Plain => 1..plan.keepers.len(),
        _ => 0..0,
    };
    let of_way = |way: Way| {
        ours.clone().map(move |side| Target {
            about: format!(
                "{} KiB {} through {} on {}, in times of plain",
                way.record_bytes >> 10,
                way.order(),
                way.through,
                plan.name(side)
            ),
            measured: ratio(plan, cells, (way, side), seconds),
            bound: WANTED,
            at_least: false,
            unit: "x",
        })
    };
    Way::all(plan).flat_map(of_way).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(sides: &[&str]) -> Plan {
        Plan {
            file_bytes: 16 << 20,
            holds: Holds::Real,
            record_sizes: vec![4 << 10, 1 << 20],
            keepers: sides.iter().map(|word| word.parse().unwrap()).collect(),
            rounds: 2,
            passes: 2,
            spare_bytes: 0,
        }
    }

    #[test]
    fn readings_are_divided_by_those_of_their_number_and_way() {
        let plan = plan(&["plain", "mount"]);
        let way = Way::all(&plan).next().unwrap();
        let other = Way { order: Column::RandomRead, ..way };
        let cell = |way, side, nth, seconds| Cell { way, side, nth, seconds, cpu_s: None, elsewhere_bytes: 0 };
        let cells = [
            cell(way, 1, 0, 3.0),
            cell(way, 0, 0, 2.0),
            cell(other, 0, 1, 100.0),
            cell(way, 0, 3, 4.0),
            cell(way, 1, 3, 4.0),
            cell(way, 1, 2, 9.0),
        ];
        assert_eq!(ratio(&plan, &cells, (way, 1), seconds), Some(Spread { median: 1.25, min: 1.0, max: 1.5 }));
        assert_eq!(ratio(&plan, &cells, (other, 1), seconds), None);
        let met: Vec<_> = targets(&plan, &cells).iter().map(Target::met).collect();
        assert_eq!((met.len(), met[0]), (8, Some(false)));
        assert!(met[1..].iter().all(Option::is_none));
    }

    #[test]
    fn whoever_stands_beside_the_file_system_alone_has_a_target() {
        let wanted = |sides: &[&str]| targets(&plan(sides), &[]).len();
        assert_eq!([wanted(&["plain", "origin"]), wanted(&["mount", "plain"]), wanted(&["plain"])], [8, 0, 0]);
        assert_eq!(wanted(&["plain", "mount", "origin", "mount-exclusive"]), 24);
    }

    #[test]
    fn what_the_server_was_asked_for_and_read_from_the_disk_is_counted_once() {
        let mut cost = Cost::default();
        assert_eq!(elsewhere_bytes(&cost), 0);
        (cost.found, cost.missed, cost.traffic.read_bytes) = (3, 1, 4096);
        assert_eq!(elsewhere_bytes(&cost), 4 * 4096);
        cost.traffic.read_bytes = 1 << 20;
        assert_eq!(elsewhere_bytes(&cost), 1 << 20);
    }
}
