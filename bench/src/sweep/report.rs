//! What was measured of a disk, as tables and in the record.
//!
//! | column             | what it is                                                                                      |
//! |--------------------|---------------------------------------------------------------------------------------------------|
//! | times faster       | the baseline's time through ours, in turns that followed each other                              |
//! | us a step          | a page that came in and one that went out, by the clock                                          |
//! | CPU us             | the same, CPU time of both threads                                                               |
//! | waited             | the share of the time in which a page that went out waited for room                              |
//! | from memory        | the share of the pages that came in which were in the cache                                      |
//! | pages a segment    | pages that a written segment holds                                                               |
//! | moved              | the share of them that came from other segments, which were emptied                              |
//! | bytes a page       | bytes written for every page that went out; the baseline writes 4096                             |
//!
//! Medians; the ratio's with the smallest and the largest.

use serde_json::{Value, json};

use super::{By, Order, Point, Turn};
use crate::iozone::Speed;
use crate::record::Record;
use crate::stat::Spread;
use crate::table::{Table, cell, size};

/// The turns on one disk.
pub struct Report {
    speed: Speed,
    steps: usize,
    turns: Vec<Turn>,
}

/// What is told of a point in one order.
#[derive(serde::Serialize)]
struct Line {
    ratio: Option<Spread>,
    us_per_step: Option<Spread>,
    plain_us_per_step: Option<Spread>,
    cpu_us_per_step: Option<Spread>,
    waited_share: Option<Spread>,
    from_memory_share: Option<Spread>,
    pages_per_segment: Option<Spread>,
    moved_share: Option<Spread>,
    written_bytes_per_page: Option<Spread>,
}

impl Report {
    /// An empty one.
    pub fn new(speed: Speed, steps: usize) -> Report {
        Report { speed, steps, turns: Vec::new() }
    }

    /// Takes one more turn.
    pub fn add(&mut self, turn: Turn) {
        self.turns.push(turn);
    }

    /// A turn as the record has it.
    pub fn json(&self, turn: &Turn, round: usize) -> Value {
        let (ours, point) = (&turn.ours, &turn.point);
        json!({
            "disk": self.speed.word(), "order": turn.order.name(), "round": round, "steps": self.steps,
            "cache_bytes": point.cache_bytes, "percent": point.percent, "segment_bytes": point.segment_bytes,
            "plain_s": turn.plain_s, "ours_s": ours.wall_s, "waited_s": ours.waited_s, "cpu_s": ours.cpu_s,
            "fetched_pages": ours.fetched_pages, "left_pages": ours.left_pages, "moved_pages": ours.moved_pages,
            "segments": ours.segments, "held_max_bytes": ours.held_max_bytes,
        })
    }

    /// Prints the tables, and notes their lines in the record.
    pub fn print(&self, tables: &[By], kept: &mut Record) {
        for &by in tables {
            let what = match by {
                By::Size => "by the size of the cache, pages leave above 50 percent of it".to_owned(),
                By::Percent(bytes) => format!("by how full a cache of {} is when pages begin to leave", size(bytes)),
            };
            println!("\n{} disk, {} steps, {what}", self.speed.word(), self.steps);
            println!("{}", self.table(by, kept));
        }
    }

    fn table(&self, by: By, kept: &mut Record) -> Table {
        let (named, sweep) = match by {
            By::Size => ("cache", "size"),
            By::Percent(_) => ("above", "percent"),
        };
        let mut table = Table::new(&[
            named,
            "order",
            "segment",
            "times faster",
            "us a step",
            "baseline's",
            "CPU us",
            "waited",
            "from memory",
            "pages a segment",
            "moved",
            "bytes a page",
        ]);
        for (point, order) in self.points().into_iter().filter(|(point, _)| by.has(point)) {
            let line = self.line(&point, order);
            let value = |spread: Option<Spread>, digits: usize| cell(spread.map(|s| format!("{:.digits$}", s.median)));
            let percent = |spread: Option<Spread>| cell(spread.map(|s| format!("{:.1} %", s.median * 100.0)));
            table.line([
                if by == By::Size { size(point.cache_bytes) } else { format!("{} %", point.percent) },
                order.name().to_owned(),
                size(point.segment_bytes as u64),
                cell(line.ratio),
                value(line.us_per_step, 1),
                value(line.plain_us_per_step, 1),
                value(line.cpu_us_per_step, 1),
                percent(line.waited_share),
                percent(line.from_memory_share),
                value(line.pages_per_segment, 1),
                percent(line.moved_share),
                value(line.written_bytes_per_page, 0),
            ]);
            kept.summary(json!({
                "sweep": sweep, "disk": self.speed.word(), "order": order.name(), "cache_bytes": point.cache_bytes,
                "percent": point.percent, "segment_bytes": point.segment_bytes, "measured": line,
            }));
        }
        table
    }

    /// As they are sorted in a table.
    fn points(&self) -> Vec<(Point, Order)> {
        let mut points: Vec<(Point, Order)> = Vec::new();
        for turn in &self.turns {
            if !points.contains(&(turn.point, turn.order)) {
                points.push((turn.point, turn.order));
            }
        }
        points.sort_by_key(|(point, order)| (*order, point.cache_bytes, point.percent));
        points
    }

    fn line(&self, point: &Point, order: Order) -> Line {
        let spread = |number: &dyn Fn(&Turn) -> f64| {
            let turns = self.turns.iter().filter(|turn| turn.point == *point && turn.order == order);
            Spread::of(turns.map(number))
        };
        let steps = self.steps as f64;
        Line {
            ratio: spread(&|turn| turn.plain_s / turn.ours.wall_s),
            us_per_step: spread(&|turn| turn.ours.wall_s * 1e6 / steps),
            plain_us_per_step: spread(&|turn| turn.plain_s * 1e6 / steps),
            cpu_us_per_step: spread(&|turn| turn.ours.cpu_s * 1e6 / steps),
            waited_share: spread(&|turn| turn.ours.waited_s / turn.ours.wall_s),
            from_memory_share: spread(&|turn| 1.0 - turn.ours.fetched_pages as f64 / steps),
            // No numbers where nothing was written.
            pages_per_segment: spread(&|turn| turn.ours.written_pages() as f64 / turn.ours.segments as f64),
            moved_share: spread(&|turn| turn.ours.moved_pages as f64 / turn.ours.written_pages() as f64),
            written_bytes_per_page: spread(&|turn| {
                (turn.ours.segments * turn.point.segment_bytes as u64) as f64 / steps
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Run;
    use super::*;

    const POINT: Point = Point { cache_bytes: 1 << 20, percent: 50, segment_bytes: 256 << 10 };

    fn turn(plain_s: f64, segments: u64) -> Turn {
        let ours = Run {
            wall_s: 1.0,
            waited_s: 0.25,
            cpu_s: 0.5,
            fetched_pages: 75,
            left_pages: 90 * segments,
            moved_pages: 10 * segments,
            segments,
            held_max_bytes: 1 << 20,
        };
        Turn { point: POINT, order: Order::Random, ours, plain_s }
    }

    #[test]
    fn ratios_are_of_one_turn_and_shares_of_what_was_done_in_it() {
        let mut report = Report::new(Speed::Fast, 100);
        for plain_s in [1.0, 3.0, 2.0] {
            report.add(turn(plain_s, 2));
        }
        let line = report.line(&POINT, Order::Random);
        assert_eq!(line.ratio, Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        let median = |spread: Option<Spread>| spread.unwrap().median;
        assert_eq!((median(line.us_per_step), median(line.from_memory_share)), (10_000.0, 0.25));
        assert_eq!((median(line.pages_per_segment), median(line.moved_share)), (100.0, 0.1));
        assert_eq!(median(line.written_bytes_per_page), f64::from(2 * (256 << 10)) / 100.0);
        assert_eq!(report.line(&POINT, Order::Sequential).ratio, None);
    }

    #[test]
    fn where_nothing_was_written_there_is_no_number_of_pages() {
        let mut report = Report::new(Speed::Fast, 100);
        report.add(turn(1.0, 0));
        let line = report.line(&POINT, Order::Random);
        assert_eq!((line.pages_per_segment, line.moved_share), (None, None));
        assert_eq!(line.written_bytes_per_page.unwrap().median, 0.0);
    }
}
