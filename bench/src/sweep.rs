//! Scenario `sweep`: how the speed of compressed swap with batched writes depends on its cache, and on when that is cleaned.
//!
//! | question                                                                        | varied                    | fixed                        |
//! |---------------------------------------------------------------------------------|---------------------------|------------------------------|
//! | how large must the compressed cache be?                                         | its size, 256 KiB to 64 MiB | pages leave above 50 percent |
//! | how full may it be when pages begin to leave for the disk?                      | 10 to 95 percent          | 1 MiB, and 8 MiB             |
//!
//! A size is the limit of a store, tables included ([`cache`]). A percentage is
//! [`Backing::set_above_percent`](compcache_store::Backing::set_above_percent). The paper's 1 % cannot be set: pages leave until the cache is
//! ten percent emptier than that, so 10 is the least.
//!
//! [`machine`] says what is done: for every page that comes in another goes out, in order or at random. The baseline does the same steps with each page
//! uncompressed, read and written by itself at its place on the same disk ([`disk`]). It waits for its writes and reads nothing ahead, so it is
//! less than the kernel's swap, and a ratio to it is no ratio to that: it tells points of the sweep apart. Each point's two sides follow each
//! other, the order turned round every second round; their ratio is the result. No number is to be reached.
//!
//! # Source
//! The two sweeps of Cervera, Cortes and Becerra, "Improving application performance through swap compression" (USENIX 1999).

mod cache;
mod disk;
mod machine;
mod report;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use compcache_store::{BackingConfig, Page};
use compcache_testkit::PAGE_BYTES;
use compcache_testkit::corpus::{self, Kind};
use serde_json::json;

use crate::content::heaps;
use crate::iozone::Speed;
use crate::record::Record;
use crate::side::Bench;
use crate::table::{mib, size};
use cache::{Cache, Run};
use disk::{Disk, Places};
use machine::{Machine, Order, Walk};
use report::Report;

/// What `sweep` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// What pages go to.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Speed::Fast, Speed::Throttled])]
    disk: Vec<Speed>,
    /// Sizes of the cache, bytes, or with K, M, G [default: 256K to 64M, doubled each time; 256K,1M,4M with --quick].
    #[arg(long, value_delimiter = ',', value_parser = crate::cli::bytes)]
    sizes: Vec<u64>,
    /// How full the cache is when pages begin to leave, in percent [default: 10,20,30,50,70,90,95; 10,50,90 with --quick].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u8).range(10..=95))]
    percents: Vec<u8>,
    /// Sizes of the caches that this is asked of [default: 1M,8M; 1M with --quick].
    #[arg(long, value_delimiter = ',', value_parser = crate::cli::bytes)]
    percent_sizes: Vec<u64>,
    /// In which order pages are wanted.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Order::Sequential, Order::Random])]
    orders: Vec<Order>,
    /// Pages that come in while a point is measured [default: 10000, if throttled 1000; 1000 and 200 with --quick].
    #[arg(long)]
    steps: Option<usize>,
    /// MiB of pages that the machine has [default: 48; 6 with --quick].
    #[arg(long)]
    megabytes: Option<usize>,
    /// What is written at a time, but no more than a quarter of the cache, and no less than 64K.
    #[arg(long, value_parser = crate::cli::bytes, default_value = "256K")]
    segment: u64,
    /// Where the file of the fast disk is made [default: where the page images are].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Where the sizes are compared, as in the paper.
const USUAL_PERCENT: u8 = 50;
/// So large a share of the pages is in the machine's memory.
const RESIDENT_SHARE: usize = 16;
/// Neighbours that stay together.
const RUN_PAGES: usize = 16;
/// Steps that do not count, before those that do: so large a share of the pages.
const BEFORE_SHARE: usize = 4;
/// A cache is so many segments at least.
const SEGMENTS_IN_CACHE: u64 = 4;
/// What `compcache serve` gives a backing beside what its disk holds.
const ROOM_SHARE: u64 = 8;
const ROOM_LEAST_BYTES: u64 = 4 << 20;

/// A cache that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// The limit of the store.
    cache_bytes: u64,
    /// How full it is when pages begin to leave.
    percent: u8,
    /// What is written at a time.
    segment_bytes: usize,
}

/// What is varied in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The size, at [`USUAL_PERCENT`].
    Size,
    /// When pages begin to leave, of a cache of so many bytes.
    Percent(u64),
}

impl By {
    fn has(self, point: &Point) -> bool {
        match self {
            By::Size => point.percent == USUAL_PERCENT,
            By::Percent(bytes) => point.cache_bytes == bytes,
        }
    }
}

/// What a machine has to do.
pub struct Work<'p> {
    content: &'p [Page],
    order: Order,
    resident_pages: usize,
    steps_before: usize,
    steps: usize,
}

/// What is asked.
struct Plan {
    sizes: Vec<u64>,
    percents: Vec<u8>,
    percent_sizes: Vec<u64>,
    segment_bytes: u64,
    pages: usize,
}

impl Plan {
    fn of(options: &Options, quick: bool) -> Result<Plan> {
        fn or<T: Clone>(given: &[T], usual: &[T]) -> Vec<T> {
            if given.is_empty() { usual.to_vec() } else { given.to_vec() }
        }
        let sizes: Vec<u64> =
            if quick { vec![256 << 10, 1 << 20, 4 << 20] } else { (18..=26).map(|s| 1 << s).collect() };
        let plan = Plan {
            sizes: or(&options.sizes, &sizes),
            percents: or(&options.percents, if quick { &[10, 50, 90] } else { &[10, 20, 30, 50, 70, 90, 95] }),
            percent_sizes: or(&options.percent_sizes, if quick { &[1 << 20] } else { &[1 << 20, 8 << 20] }),
            segment_bytes: options.segment,
            pages: options.megabytes.unwrap_or(if quick { 6 } else { 48 }).saturating_mul((1 << 20) / PAGE_BYTES),
        };
        let least = SEGMENTS_IN_CACHE * *BackingConfig::SEGMENT_BYTES.start() as u64;
        for bytes in plan.sizes.iter().chain(&plan.percent_sizes) {
            ensure!(*bytes >= least, "a cache of {bytes} bytes is too small; {} KiB are the least", least >> 10);
        }
        let is_segment = usize::try_from(plan.segment_bytes).is_ok_and(|b| BackingConfig::SEGMENT_BYTES.contains(&b));
        ensure!(
            is_segment && plan.segment_bytes.is_multiple_of(PAGE_BYTES as u64),
            "a segment has 64 KiB to 16 MiB, in whole pages; {} bytes are none",
            plan.segment_bytes
        );
        ensure!(plan.pages >= Kind::HEAPS.len() * RESIDENT_SHARE, "so few pages are no machine (--megabytes)");
        Ok(plan)
    }

    fn point(&self, cache_bytes: u64, percent: u8) -> Point {
        let most = cache_bytes / SEGMENTS_IN_CACHE / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        Point { cache_bytes, percent, segment_bytes: self.segment_bytes.min(most) as usize }
    }

    /// Every one once: some are in both tables.
    fn points(&self) -> Vec<Point> {
        let mut points: Vec<Point> = self.sizes.iter().map(|bytes| self.point(*bytes, USUAL_PERCENT)).collect();
        for bytes in &self.percent_sizes {
            points.extend(self.percents.iter().map(|percent| self.point(*bytes, *percent)));
        }
        for nth in (1..points.len()).rev() {
            if points[..nth].contains(&points[nth]) {
                points.remove(nth);
            }
        }
        points
    }

    /// The tables, and what is in them.
    fn tables(&self) -> Vec<By> {
        [By::Size].into_iter().chain(self.percent_sizes.iter().map(|bytes| By::Percent(*bytes))).collect()
    }

    /// Room for all pages as they are, as `compcache serve` has it.
    fn backing_bytes(&self, pages: usize) -> u64 {
        let raw_bytes = (pages * PAGE_BYTES) as u64;
        let room = raw_bytes + raw_bytes / ROOM_SHARE + ROOM_LEAST_BYTES;
        room.max(self.segment_bytes * BackingConfig::SEGMENTS_LEAST).next_multiple_of(PAGE_BYTES as u64)
    }
}

/// The two sides of a point, one after the other.
struct Turn {
    point: Point,
    order: Order,
    ours: Run,
    plain_s: f64,
}

/// Runs the scenario and prints its tables; with `record`, writes the raw record into that directory.
///
/// # Errors
/// A page is wrong, a disk fails, or nothing could be measured.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let plan = Plan::of(options, quick)?;
    let names = |all: &[Speed]| all.iter().map(|speed| speed.word()).collect::<Vec<_>>();
    let mut kept = bench.record(
        "sweep",
        json!({
            "quick": quick, "rounds": rounds, "disks": names(&options.disk), "sizes": plan.sizes, "percents": plan.percents,
            "percent_sizes": plan.percent_sizes, "segment_bytes": plan.segment_bytes, "steps": options.steps,
        }),
    );
    let content = mixed(&heaps(plan.pages / Kind::HEAPS.len(), &mut kept)?);
    let (compressed_bytes, table_bytes) = cache::weigh(&content)?;
    println!(
        "\nsweep: a machine that swaps {} MiB of pages (none same-filled), compressed {} MiB and {} KiB of tables; {} pages of them are in, {rounds} rounds",
        mib((content.len() * PAGE_BYTES) as u64),
        mib(compressed_bytes),
        table_bytes >> 10,
        content.len() / RESIDENT_SHARE
    );
    kept.summary(json!({
        "pages": content.len(), "compressed_bytes": compressed_bytes, "table_bytes": table_bytes,
        "resident_pages": content.len() / RESIDENT_SHARE,
    }));
    let measured = measure(bench, options, &plan, &content, (quick, rounds), &mut kept);
    kept.finish(measured, record)
}

fn measure(
    bench: &Bench,
    options: &Options,
    plan: &Plan,
    content: &[Page],
    (quick, rounds): (bool, usize),
    kept: &mut Record,
) -> Result<()> {
    let directory = options.dir.clone().unwrap_or_else(corpus::directory);
    for &speed in &options.disk {
        let steps = options.steps.unwrap_or(match (speed, quick) {
            (Speed::Fast | Speed::Ssd, false) => 10_000,
            (Speed::Throttled, false) => 1000,
            (Speed::Fast | Speed::Ssd, true) => 1000,
            (Speed::Throttled, true) => 200,
        });
        let room = (plan.backing_bytes(content.len()), content.len());
        match Disk::make(bench, speed, room, &directory) {
            Err(error) => println!("  {}: not here: {error:#}", speed.word()),
            Ok(disk) => {
                let mut report = Report::new(speed, steps);
                let sides = Sides { disk: &disk, content, steps, orders: &options.orders };
                sides.measure(&plan.points(), rounds, &mut report, kept)?;
                report.print(&plan.tables(), kept);
            }
        }
    }
    Ok(())
}

/// Heaps that take turns, few neighbours at a time, so that a part of a pass speaks for all.
fn mixed(pages: &[Page]) -> Vec<Page> {
    let runs: Vec<&[Page]> = pages.chunks(RUN_PAGES).collect();
    let in_each = runs.len().div_ceil(Kind::HEAPS.len()).max(1);
    let turn = |nth: usize| runs.iter().skip(nth).step_by(in_each);
    (0..in_each).flat_map(turn).flat_map(|run| run.iter().copied()).collect()
}

/// What all points of a disk have in common.
struct Sides<'s> {
    disk: &'s Disk<'s>,
    content: &'s [Page],
    steps: usize,
    orders: &'s [Order],
}

impl Sides<'_> {
    fn measure(&self, points: &[Point], rounds: usize, report: &mut Report, kept: &mut Record) -> Result<()> {
        let (mut machine, mut places) = (Machine::new(self.content), self.disk.places()?);
        for round in 0..rounds {
            for &order in self.orders {
                for point in points {
                    let work = self.work(order);
                    let turn = self.turn(&work, point, round % 2 == 1, &mut machine, &mut places);
                    let turn = turn.with_context(|| {
                        format!("a cache of {}, {} percent, {}", size(point.cache_bytes), point.percent, order.name())
                    })?;
                    kept.run(report.json(&turn, round));
                    report.add(turn);
                }
            }
        }
        Ok(())
    }

    fn work(&self, order: Order) -> Work<'_> {
        let (content, steps) = (self.content, self.steps);
        let resident_pages = content.len() / RESIDENT_SHARE;
        Work { content, order, resident_pages, steps_before: content.len() / BEFORE_SHARE, steps }
    }

    fn turn<'p>(
        &'p self,
        work: &Work<'_>,
        point: &Point,
        ours_first: bool,
        machine: &mut Machine<'p>,
        places: &mut Places,
    ) -> Result<Turn> {
        let ours_before = if ours_first { Some(self.ours(work, point)?) } else { None };
        let plain_s = self.plain(work, machine, places)?;
        let ours = ours_before.map_or_else(|| self.ours(work, point), Ok)?;
        Ok(Turn { point: *point, order: work.order, ours, plain_s })
    }

    fn ours(&self, work: &Work<'_>, point: &Point) -> Result<Run> {
        Cache::new(self.disk, point)?.run(self.disk, work)
    }

    /// The baseline; seconds.
    fn plain(&self, work: &Work<'_>, machine: &mut Machine<'_>, places: &mut Places) -> Result<f64> {
        let mut walk = Walk::new(work.order, work.content.len());
        machine.begin(work.resident_pages, places)?;
        machine.run(&mut walk, work.steps_before, places)?;
        let _slow = self.disk.slow_down()?;
        let start = Instant::now();
        machine.run(&mut walk, work.steps, places)?;
        let seconds = start.elapsed().as_secs_f64();
        self.disk.check_slow(work.steps, seconds)?;
        Ok(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(words: &[&str], quick: bool) -> Result<Plan> {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            options: Options,
        }
        let line = <Line as clap::Parser>::try_parse_from(["sweep"].iter().chain(words))?;
        Plan::of(&line.options, quick)
    }

    #[test]
    fn a_segment_is_a_quarter_of_the_cache_at_most() {
        let segments = |words: &[&str]| {
            let plan = plan(words, false).unwrap();
            [256 << 10, 512 << 10, 1 << 20, 64 << 20].map(|bytes| plan.point(bytes, 50).segment_bytes >> 10)
        };
        assert_eq!(segments(&[]), [64, 128, 256, 256]);
        assert_eq!(segments(&["--segment", "16M"]), [64, 128, 256, 16384]);
    }

    #[test]
    fn what_both_sweeps_have_is_measured_once() {
        let plan = plan(&["--sizes", "1M,8M", "--percents", "10,50"], false).unwrap();
        let points: Vec<_> = plan.points().iter().map(|point| (point.cache_bytes >> 20, point.percent)).collect();
        assert_eq!(points, [(1, 50), (8, 50), (1, 10), (8, 10)]);
        let counts = plan.tables().into_iter().map(|by| plan.points().iter().filter(|point| by.has(point)).count());
        assert_eq!(counts.collect::<Vec<_>>(), [2, 2, 2]);
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        assert!(plan(&[], true).is_ok() && plan(&["--percents", "95"], false).is_ok());
        for words in [
            ["--sizes", "128K"],
            ["--percent-sizes", "255K"],
            ["--segment", "32K"],
            ["--segment", "100000"],
            ["--segment", "32M"],
            ["--percents", "1"],
            ["--percents", "96"],
            ["--megabytes", "0"],
        ] {
            assert!(plan(&words, false).is_err(), "{words:?}");
        }
    }

    #[test]
    fn heaps_take_turns_and_no_page_is_lost() {
        let mut pages = vec![[0; PAGE_BYTES]; 1003];
        pages.iter_mut().enumerate().for_each(|(nth, page)| page[..8].copy_from_slice(&nth.to_le_bytes()));
        let mixed: Vec<_> =
            mixed(&pages).iter().map(|page| usize::from_le_bytes(page[..8].try_into().unwrap())).collect();
        assert_eq!(mixed[..RUN_PAGES], (0..RUN_PAGES).collect::<Vec<_>>());
        let of_each: Vec<_> = mixed.iter().step_by(RUN_PAGES).take(5).map(|nth| nth / 200).collect();
        assert_eq!(of_each, [0, 1, 2, 3, 4]);
        let mut sorted = mixed.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1003).collect::<Vec<_>>());
    }

    #[test]
    fn a_backing_has_room_for_all_pages_and_for_its_segments() {
        let plan = plan(&["--segment", "16M"], true).unwrap();
        assert!(plan.backing_bytes(1536) >= 64 << 20);
        assert!(plan.backing_bytes(1 << 20) > 4 << 30);
    }
}
