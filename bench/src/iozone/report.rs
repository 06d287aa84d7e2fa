//! The tables of `iozone`, and its targets.

use compcache_worker::columns::{Column, Through};
use serde_json::json;

use super::client::Cost;
use super::image::Holds;
use super::{Cell, Keeper, Plan, Speed};
use crate::record::Record;
use crate::stat::{Spread, Target};
use crate::table::{Table, cell, mib};

/// How many times faster each column was in document 001.
const DOCUMENT_001: [f64; 9] = [1.02, 2.52, 2.41, 2.42, 3.06, 1.84, 2.82, 1.40, 3.47];

/// All cells, and what they are to be compared by.
pub struct Report<'p> {
    plan: &'p Plan,
    cells: Vec<Cell>,
}

impl<'p> Report<'p> {
    /// Without cells.
    pub fn new(plan: &'p Plan) -> Report<'p> {
        Report { plan, cells: Vec::new() }
    }

    /// Adds one.
    pub fn add(&mut self, cell: Cell) {
        self.cells.push(cell);
    }

    /// Prints everything, and notes it in the record.
    pub fn print(&self, kept: &mut Record) {
        for &through in &self.plan.throughs {
            for side in self.sides() {
                println!("\nthrough {through}, {}: MB/s", self.plan.keepers[side]);
                self.print_grid(|column, bytes| {
                    let speeds = self.of(side, through, column).filter(|cell| cell.record_bytes == bytes);
                    cell(Spread::of(speeds.map(|cell| cell.mb_per_s)).map(|speeds| format!("{:.1}", speeds.median)))
                });
            }
            for side in self.others() {
                let first = self.plan.keepers[0];
                println!("\nthrough {through}, {} in speeds of {first}", self.plan.keepers[side]);
                self.print_grid(|column, bytes| cell(self.ratio(side, through, column, Some(bytes))));
                self.print_averages(side, through, kept);
            }
        }
        self.print_memory();
    }

    /// What is wanted, as far as this is the experiment that it is wanted of.
    pub fn targets(&self, kept: &mut Record) -> Vec<Target> {
        let mut targets = Vec::new();
        for side in self.others().filter(|_| self.plan.keepers[0] == Keeper::Plain) {
            for &through in &self.plan.throughs {
                for (column, published) in Column::ALL.into_iter().zip(DOCUMENT_001) {
                    let bound = match (self.plan.speed, self.plan.holds) {
                        (Speed::Throttled, Holds::Iozone) => published,
                        (Speed::Fast | Speed::Ssd, Holds::Real) if is_wanted_faster(column) => 1.3,
                        (Speed::Fast | Speed::Ssd, Holds::Real) => 0.95,
                        _ => continue,
                    };
                    targets.push(Target {
                        about: format!(
                            "{column} through {through}: average of {} in that of plain",
                            self.plan.keepers[side]
                        ),
                        measured: self.ratio(side, through, column, None),
                        bound,
                        at_least: true,
                        unit: "x",
                    });
                }
            }
        }
        for target in &targets {
            kept.summary(json!({
                "target": target.about, "bound": target.bound, "measured": target.measured, "met": target.met(),
            }));
        }
        targets
    }

    /// The sides that this machine has.
    fn sides(&self) -> impl Iterator<Item = usize> {
        (0..self.plan.keepers.len()).filter(|side| self.cells.iter().any(|cell| cell.side == *side))
    }

    /// Those that are divided by the first one.
    fn others(&self) -> impl Iterator<Item = usize> {
        let has_first = self.sides().next() == Some(0);
        self.sides().filter(move |side| has_first && *side != 0)
    }

    fn of(&self, side: usize, through: Through, column: Column) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(move |cell| (cell.side, cell.through, cell.column) == (side, through, column))
    }

    /// The mean speed of all record sizes (or of one) in each round; none where one is missing.
    fn averages(&self, side: usize, through: Through, column: Column, record_bytes: Option<u64>) -> Vec<Option<f64>> {
        let wanted = if record_bytes.is_some() { 1 } else { self.plan.record_sizes.len() };
        let of_round = |round| {
            let cells = self.of(side, through, column).filter(|cell| cell.round == round);
            let speeds: Vec<f64> = cells
                .filter(|cell| record_bytes.is_none_or(|bytes| cell.record_bytes == bytes))
                .map(|cell| cell.mb_per_s)
                .collect();
            (speeds.len() == wanted).then(|| speeds.iter().sum::<f64>() / wanted as f64)
        };
        (0..self.plan.rounds).map(of_round).collect()
    }

    /// The averages of a side in those of the first one, round by round.
    fn ratio(&self, side: usize, through: Through, column: Column, record_bytes: Option<u64>) -> Option<Spread> {
        let averages = |side| self.averages(side, through, column, record_bytes);
        Spread::of_ratios(&averages(side), &averages(0))
    }

    fn print_grid(&self, text: impl Fn(Column, u64) -> String) {
        let headings: Vec<&str> = ["KiB"].into_iter().chain(Column::ALL.iter().map(|column| column.word())).collect();
        let mut table = Table::new(&headings);
        for &bytes in &self.plan.record_sizes {
            let first = [(bytes >> 10).to_string()];
            table.line(first.into_iter().chain(Column::ALL.iter().map(|&column| text(column, bytes))));
        }
        print!("{table}");
    }

    fn print_averages(&self, side: usize, through: Through, kept: &mut Record) {
        let keeper = self.plan.keepers[side];
        let first = self.plan.keepers[0];
        let mut table = Table::new(&[
            "average",
            &format!("{first} MB/s"),
            &format!("{keeper} MB/s"),
            "x",
            "in 001",
            &format!("{first} CPU s/GB"),
            &format!("{keeper} CPU s/GB"),
            "of it server",
            &format!("{first} disk MB/MB"),
            &format!("{keeper} disk MB/MB"),
            "pool hit %",
        ]);
        for (column, published) in Column::ALL.into_iter().zip(DOCUMENT_001) {
            let average = |side| Spread::of(self.averages(side, through, column, None).into_iter().flatten());
            let speed = |side| cell(average(side).map(|all| format!("{:.1}", all.median)));
            let ratio = self.ratio(side, through, column, None);
            let sum = |side, number: fn(&Cost) -> f64| {
                self.of(side, through, column).map(|cell| number(&cell.cost)).sum::<f64>()
            };
            let bytes = |side| self.of(side, through, column).count() as f64 * self.plan.file_bytes as f64;
            let per_gb = |side, number| sum(side, number) / (bytes(side) / 1e9);
            let cpu = |side| per_gb(side, |cost| cost.client_cpu_s + cost.server_cpu_s);
            let disk = |side| per_gb(side, |cost| (cost.traffic.read_bytes + cost.traffic.written_bytes) as f64 / 1e9);
            let (found, missed) = (sum(side, |cost| cost.found as f64), sum(side, |cost| cost.missed as f64));
            let hits = (found + missed > 0.0).then(|| 100.0 * found / (found + missed));
            table.line([
                column.to_string(),
                speed(0),
                speed(side),
                cell(ratio),
                format!("{published:.2}"),
                format!("{:.2}", cpu(0)),
                format!("{:.2}", cpu(side)),
                format!("{:.2}", per_gb(side, |cost| cost.server_cpu_s)),
                format!("{:.2}", disk(0)),
                format!("{:.2}", disk(side)),
                cell(hits.map(|hits| format!("{hits:.1}"))),
            ]);
            kept.summary(json!({
                "through": through, "column": column, "side": keeper.to_string(), "first": first.to_string(),
                "first_mb_per_s": average(0), "mb_per_s": average(side), "ratio": ratio, "in_document_001": published,
                "first_cpu_s_per_gb": cpu(0), "cpu_s_per_gb": cpu(side),
                "first_machine_cpu_s_per_gb": per_gb(0, |cost| cost.machine_cpu_s),
                "machine_cpu_s_per_gb": per_gb(side, |cost| cost.machine_cpu_s), "pool_hit_percent": hits,
            }));
        }
        println!("\nthrough {through}, {keeper} beside {first}: averages of all record sizes");
        print!("{table}");
    }

    /// The most memory of each side, at the end of a column.
    fn print_memory(&self) {
        let mut table = Table::new(&[
            "MiB at most",
            "all",
            "worker's page cache",
            "server and its pool",
            "page cache of the server",
            "pool",
            "same-filled % of it",
            "compressed to %",
        ]);
        for side in self.sides() {
            let costs = || self.cells.iter().filter(move |cell| cell.side == side).map(|cell| &cell.cost);
            let most = |number: fn(&Cost) -> u64| mib(costs().map(number).max().unwrap_or(0));
            let fullest = costs().map(|cost| cost.pool).max_by_key(|pool| pool.pages).unwrap_or_default();
            let share = |part: u64, of: u64| cell((of > 0).then(|| format!("{:.1}", 100.0 * part as f64 / of as f64)));
            table.line([
                self.plan.keepers[side].to_string(),
                most(|cost| cost.taken.all),
                most(|cost| cost.taken.client_page_cache),
                most(|cost| cost.taken.server),
                most(|cost| cost.taken.server_page_cache),
                most(|cost| cost.taken.pool),
                share(fullest.same_pages, fullest.pages),
                share(fullest.compressed_bytes, fullest.pages * 4096),
            ]);
        }
        println!("\nmemory");
        print!("{table}");
    }
}

/// Reads, random reads, backward and stride reads.
fn is_wanted_faster(column: Column) -> bool {
    !column.writes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_ratios_are_those_of_the_averages_in_the_document() {
        // KB/s without and with zcache.
        let averages = [
            (83_644.0, 85_031.0),
            (33_051.0, 83_320.0),
            (74_315.0, 179_252.0),
            (74_555.0, 180_196.0),
            (52_544.0, 160_645.0),
            (21_525.0, 39_693.0),
            (101_463.0, 285_731.0),
            (48_773.0, 68_307.0),
            (64_052.0, 222_025.0),
        ];
        for ((without, with), published) in averages.into_iter().zip(DOCUMENT_001) {
            let ratio: f64 = with / without;
            assert!((ratio - published).abs() < 0.01, "{ratio} is not {published}");
        }
    }
}
