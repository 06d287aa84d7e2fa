//! Scenario `tiers`: what a page takes once nobody has used it for a minute, and how long a read waits in each tier.
//!
//! | question                                  | asked of                                             | wanted                    |
//! |-------------------------------------------|------------------------------------------------------|---------------------------|
//! | memory of a page, after it was cold       | disks of ours, and zram with each codec of the kernel's | >= 1.5 x less than zram:lz4 |
//! | one read, at random, nothing else going on | three disks of ours, and zram:lz4                   | -                         |
//!
//! Each kind of content gets disks of its own, all filled before the wait, so that one wait is enough for all of them. What a page of ours takes
//! is `mem_used_total`, tables and all, over the pages of the disk, and once more all that the process holds that serves it; zram's table is not in
//! its number. Content that is less than a disk is there several times: nobody merges equal pages. Most of what is less than with zram:lz4 is zstd: what
//! the groups are worth is the ratio to zram:zstd, of a kernel that has it. The wait is as long as the
//! product's own default says, or `--idle`, and then as long as pages still join groups: a disk may take a quarter of a processor for it.
//!
//! | tier      | how pages got there                                        | read                            |
//! |-----------|------------------------------------------------------------|---------------------------------|
//! | `lz4`     | written, not recompressed                                  | before the wait                 |
//! | `backing` | written, then all reclaimed                                | before the wait, each page once |
//! | `groups`  | by themselves, not used for `--idle`                       | after the wait, each page once  |
//!
//! All are read at the same place: 4 KiB with pread(2) and O_DIRECT from the block device, one at a time, compared with what was written. So
//! a system call, a loop device and FUSE (or ublk) are in ours, and the first two of these not in zram's. Tiers and zram take turns every few reads.
//! The store's own clock says what of it was the store's. Pages of one repeated word are in no tier and are not read.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use compcache_testkit::corpus::{self, Kind as CorpusKind, Page};
use serde::Serialize;
use serde_json::{Value, json};

use crate::baseline::Held;
use crate::clock::now_ns;
use crate::device::{Device, Kind, kinds};
use crate::ours;
use crate::record::Record;
use crate::scan::print_targets;
use crate::side::Bench;
use crate::stat::{Spread, Target};
use crate::table::{Table, cell, mib};

/// What `tiers` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Kinds of content: python, node, jvm, compiler, database, text, elf.
    #[arg(long, value_delimiter = ',', default_value = "python,node,jvm,compiler,database")]
    content: Vec<String>,
    /// ours, ours-ublk, zram:CODEC. The first of ours is the one whose tiers are read.
    #[arg(long, value_delimiter = ',', default_value = "ours,zram:lz4,zram:zstd")]
    sides: Vec<String>,
    /// Seconds after which pages are cold [default: the product's own; 1 with --quick].
    #[arg(long, value_name = "SECONDS")]
    idle: Option<u64>,
    /// MiB of each disk.
    #[arg(long)]
    megabytes: Option<usize>,
    /// Reads of each tier, of each kind of content, in a round.
    #[arg(long)]
    reads: Option<usize>,
}

/// What reads are compared with, and memory.
const REFERENCE: &str = "zram:lz4";
/// What memory is compared with besides, where the kernel has it: what is cold is under zstd here, too.
const SAME_CODEC: &str = "zram:zstd";
/// So many reads of one tier before the next tier's turn.
const TURN_READS: usize = 16;
/// When no page has joined a group for so long, all have that do: the server looks at its disks every five seconds at least.
const SETTLED: Duration = Duration::from_secs(6);
/// When there is a disk without a group after so long, it gets none.
const PATIENCE: Duration = Duration::from_secs(30);
/// From when a page is cold to when it is looked at, a share of that time: ages are an eighth of it, and visits a quarter apart.
const LATE: f64 = 0.5;

/// Content and the disks that hold it.
struct Subject<'s> {
    name: String,
    pages: Vec<Page>,
    /// The sides that this machine has; those of ours recompress what is cold.
    sides: Vec<(Kind, Device<'s>)>,
    hot: Device<'s>,
    backed: Device<'s>,
}

/// What a side holds of a kind of content.
#[derive(Clone, Copy, Serialize)]
struct Kept {
    held: Held,
    bytes_per_page: f64,
    /// Resident memory of the process that serves a disk of ours.
    process_bytes: Option<u64>,
}

/// How long reads of a tier took in a round.
#[derive(Clone, Copy, Serialize)]
struct Latency {
    p50_us: f64,
    p99_us: f64,
    avg_us: f64,
    /// What the store says, of all reads so far; none where there is no store.
    store_p50_us: Option<f64>,
    store_p99_us: Option<f64>,
    store_avg_us: Option<f64>,
}

/// A tier beside the reference, in a round: both were read in turns.
#[derive(Clone, Copy)]
struct Read {
    tier: Latency,
    reference: Option<Latency>,
}

const TIERS: [&str; 3] = ["lz4", "backing", "groups"];

/// Runs the scenario.
///
/// # Errors
/// Content could not be made, a disk of ours not be had, or a byte was wrong.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let megabytes = options.megabytes.unwrap_or(if quick { 4 } else { 64 });
    let reads = options.reads.unwrap_or(if quick { 128 } else { 2000 });
    let idle = options.idle.or(quick.then_some(1)).map(Duration::from_secs);
    // A round takes longer than the wait in it.
    let rounds = rounds.min(3);
    let kinds = kinds(&options.sides)?;
    ensure!(kinds.iter().any(|kind| matches!(kind, Kind::Ours { .. })), "--sides needs one of ours");
    let settings = json!({
        "megabytes": megabytes, "reads": reads, "rounds": rounds, "idle_s": idle.map(|idle| idle.as_secs()),
    });
    let mut kept = bench.record("tiers", settings);
    kept.binaries_of(&kinds);
    let asked = Asked { megabytes, reads, rounds, idle, kinds: &kinds };
    let measured = measure(bench, options, &asked, &mut kept);
    kept.finish(measured, record)
}

/// How much is done, of what.
struct Asked<'a> {
    megabytes: usize,
    reads: usize,
    rounds: usize,
    idle: Option<Duration>,
    kinds: &'a [Kind],
}

fn measure(bench: &Bench, options: &Options, asked: &Asked<'_>, kept: &mut Record) -> Result<()> {
    let Asked { megabytes, reads, rounds, idle, kinds } = *asked;
    let mut memory: Vec<(String, String, Vec<Kept>)> = Vec::new();
    let mut latencies: Vec<(String, [Vec<Read>; 3])> = Vec::new();
    for round in 0..rounds {
        let mut subjects = Vec::new();
        for name in &options.content {
            let Some(pages) = content(name, megabytes * 256, (round == 0).then_some(&mut *kept))? else { continue };
            subjects.push(Subject::set_up(bench, name, pages, kinds, idle, round == 0 && subjects.is_empty())?);
        }
        ensure!(!subjects.is_empty(), "this machine can make no content");
        if round == 0 {
            let kinds: Vec<_> = subjects.iter().map(|subject| subject.name.as_str()).collect();
            println!(
                "\ntiers: {megabytes} MiB each of {}, {reads} reads of each tier, {rounds} rounds",
                kinds.join(", ")
            );
            latencies = subjects.iter().map(|subject| (subject.name.clone(), Default::default())).collect();
        }
        for (subject, (_, all)) in subjects.iter().zip(&mut latencies) {
            all[0].push(subject.read(&subject.hot, reads, round)?);
            all[1].push(subject.read(&subject.backed, reads, round)?);
        }
        let waited = wait_until_cold(&subjects)?;
        for (subject, (_, all)) in subjects.iter().zip(&mut latencies) {
            for (kind, device) in &subject.sides {
                let of_side = subject.kept(device);
                kept.run(json!({
                    "what": "memory", "content": subject.name, "side": kind.to_string(), "round": round,
                    "waited_s": waited.as_secs_f64(), "kept": of_side,
                }));
                note(&mut memory, &subject.name, &kind.to_string(), of_side);
            }
            all[2].push(subject.read(subject.cold(), reads, round)?);
            for (tier, of_tier) in TIERS.iter().zip(all) {
                let Some(Read { tier: latency, reference }) = of_tier.last() else { continue };
                kept.run(json!({
                    "what": "reads", "content": subject.name, "tier": tier, "round": round,
                    "latency": latency, REFERENCE: reference,
                }));
            }
        }
    }
    kept.summary(print_memory(&memory));
    kept.summary(print_latencies(&latencies));
    let targets: Vec<_> = [target(&memory, false), target(&memory, true)].into_iter().flatten().collect();
    print_targets(&targets);
    for target in targets {
        kept.summary(json!({"target": target.about, "measured": target.measured, "met": target.met()}));
    }
    Ok(())
}

/// Pages of a kind; none, and says so, where it cannot be made. Noted in the record when there is one.
fn content(name: &str, pages: usize, record: Option<&mut Record>) -> Result<Option<Vec<Page>>> {
    let kind: CorpusKind = name.parse().map_err(anyhow::Error::msg)?;
    match (corpus::load(kind, pages.min(corpus::IMAGE_PAGES)), record) {
        (Ok(content), record) => {
            if let Some(record) = record {
                record.content(name, content.len(), corpus::same_filled_share(&content));
            }
            Ok(Some(content.iter().cycle().take(pages).copied().collect()))
        }
        (Err(error), record) => {
            if record.is_some() {
                println!("{name}: left out: {error}");
            }
            Ok(None)
        }
    }
}

fn note(all: &mut Vec<(String, String, Vec<Kept>)>, content: &str, side: &str, kept: Kept) {
    match all.iter_mut().find(|(of, at, _)| of == content && at == side) {
        Some((_, _, rounds)) => rounds.push(kept),
        None => all.push((content.to_owned(), side.to_owned(), vec![kept])),
    }
}

impl<'s> Subject<'s> {
    /// Sets all disks up and fills them. What this machine lacks is said when it is `first` asked for.
    fn set_up(
        bench: &'s Bench,
        name: &str,
        pages: Vec<Page>,
        kinds: &[Kind],
        idle: Option<Duration>,
        first: bool,
    ) -> Result<Subject<'s>> {
        let bytes = size_of_val(pages.as_slice()) as u64;
        let make = |kind: &Kind, wanted: Value| -> Result<Device<'s>> {
            let device = Device::set_up_as(bench.session(), kind, bytes, bench.compcache(), &wanted)?;
            let file = File::options().write(true).open(device.path())?;
            file.write_all_at(pages.as_flattened(), 0)?;
            file.sync_all()?;
            Ok(device)
        };
        let mut sides = Vec::new();
        let cold = idle.map_or(Value::Null, |idle| json!({"recompress_after_ms": idle.as_millis() as u64}));
        for kind in kinds {
            ensure!(matches!(kind, Kind::Ours { .. } | Kind::Zram(_)), "{kind} is neither ours nor zram");
            match make(kind, cold.clone()) {
                Ok(device) => sides.push((kind.clone(), device)),
                Err(error) if ours::has_failed(&error) => return Err(error.context(kind.to_string())),
                Err(error) if first => println!("  {kind}: not here: {error:#}"),
                Err(_) => {}
            }
        }
        let ours = sides.iter().map(|(kind, _)| kind).find(|kind| matches!(kind, Kind::Ours { .. }));
        let ours = ours.context("no disk of ours can be had here")?.clone();
        let hot = make(&ours, json!({"recompress": "none"}))?;
        let backing = bench.session().directory().join(format!("{name}.backing"));
        let wanted = json!({"do": "create_on", "recompress": "none", "backing": {"path": backing}});
        let backed = make(&ours, wanted)?;
        backed.server().context("a disk of ours has a server")?.reclaim()?;
        Ok(Subject { name: name.to_owned(), pages, sides, hot, backed })
    }

    /// The first disk of ours among the sides.
    fn cold(&self) -> &Device<'s> {
        let ours = self.sides.iter().find(|(kind, _)| matches!(kind, Kind::Ours { .. }));
        &ours.expect("it was set up").1
    }

    fn kept(&self, device: &Device<'_>) -> Kept {
        let held = device.held();
        Kept {
            held,
            bytes_per_page: held.memory_bytes as f64 / self.pages.len() as f64,
            process_bytes: device.server().map(|server| server.process.resident_bytes()),
        }
    }

    /// Reads `reads` pages of `device`, each once, and of the reference, a few of one and then of the other.
    fn read(&self, device: &Device<'_>, reads: usize, round: usize) -> Result<Read> {
        let is_mixed = |page: &Page| page.chunks_exact(8).any(|word| word != &page[..8]);
        let mut order: Vec<usize> = (0..self.pages.len()).filter(|&nth| is_mixed(&self.pages[nth])).collect();
        fastrand::Rng::with_seed(round as u64).shuffle(&mut order);
        order.truncate(reads);
        let reference = self.sides.iter().find(|(kind, _)| kind.to_string() == REFERENCE).map(|(_, device)| device);
        let mut readers: Vec<Reader> =
            [Some(device), reference].into_iter().flatten().map(Reader::open).collect::<Result<_>>()?;
        for turn in order.chunks(TURN_READS) {
            for reader in &mut readers {
                turn.iter().try_for_each(|&nth| reader.read(nth, &self.pages[nth]))?;
            }
        }
        let latencies: Vec<_> = readers.into_iter().map(Reader::latency).collect::<Result<_>>()?;
        Ok(Read { tier: latencies[0], reference: latencies.get(1).copied() })
    }
}

/// A page where direct I/O can write to it.
#[repr(align(4096))]
struct Aligned(Page);

/// Reads single pages of a device and remembers how long each took.
struct Reader<'d, 's> {
    device: &'d Device<'s>,
    file: File,
    page: Box<Aligned>,
    times_ns: Vec<u64>,
}

impl<'d, 's> Reader<'d, 's> {
    fn open(device: &'d Device<'s>) -> Result<Reader<'d, 's>> {
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(device.path());
        let file = file.with_context(|| device.path().display().to_string())?;
        Ok(Reader { device, file, page: Box::new(Aligned([0; 4096])), times_ns: Vec::new() })
    }

    fn read(&mut self, nth: usize, wanted: &Page) -> Result<()> {
        let start = now_ns();
        self.file.read_exact_at(&mut self.page.0, nth as u64 * 4096)?;
        self.times_ns.push(now_ns() - start);
        ensure!(self.page.0 == *wanted, "WRONG BYTES in page {nth} of {}", self.device.path().display());
        Ok(())
    }

    fn latency(mut self) -> Result<Latency> {
        ensure!(!self.times_ns.is_empty(), "all pages are same-filled");
        self.times_ns.sort_unstable();
        let us = |ns: u64| ns as f64 / 1000.0;
        let at = |share: f64| us(self.times_ns[((self.times_ns.len() - 1) as f64 * share) as usize]);
        let state = self.device.server().map(|server| server.state()).transpose()?;
        let of_store = |name: &str| state.as_ref().and_then(|state| state["latency"]["reads"][name].as_u64()).map(us);
        Ok(Latency {
            p50_us: at(0.5),
            p99_us: at(0.99),
            avg_us: us(self.times_ns.iter().sum()) / self.times_ns.len() as f64,
            store_p50_us: of_store("p50_ns"),
            store_p99_us: of_store("p99_ns"),
            store_avg_us: of_store("avg_ns"),
        })
    }
}

/// Waits until pages are cold, as the disks themselves understand it, and no more of them join groups. Returns how long that took.
fn wait_until_cold(subjects: &[Subject<'_>]) -> Result<Duration> {
    let started = Instant::now();
    let servers: Vec<_> =
        subjects.iter().flat_map(|subject| &subject.sides).filter_map(|(_, device)| device.server()).collect();
    let state = servers.first().context("no disk of ours")?.state()?;
    let cold =
        Duration::from_millis(state["recompress_after_ms"].as_u64().context("the server does not say what is cold")?);
    thread::sleep(cold.mul_f64(1.0 + LATE));
    let grouped = || -> Result<Vec<u64>> {
        let of = |state: Value| state["stats"]["grouped_pages"].as_u64().context("the server knows of no groups");
        servers.iter().map(|server| of(server.state()?)).collect()
    };
    let mut last = (Instant::now(), grouped()?);
    while last.0.elapsed() < if last.1.contains(&0) { PATIENCE } else { SETTLED } {
        thread::sleep(Duration::from_millis(100));
        let now = grouped()?;
        if now != last.1 {
            last = (Instant::now(), now);
        }
    }
    if last.1.contains(&0) {
        bail!("after {} s no page of a disk is in a group", started.elapsed().as_secs());
    }
    Ok(started.elapsed())
}

fn spread(rounds: &[Kept], number: fn(&Kept) -> f64) -> Option<Spread> {
    Spread::of(rounds.iter().map(number))
}

/// How many times less than `reference` a side takes, round by round; with all that its server holds, if it is `whole`.
fn times_less(
    all: &[(String, String, Vec<Kept>)],
    content: &str,
    side: &str,
    reference: &str,
    whole: bool,
) -> Option<Spread> {
    let of = |side: &str| all.iter().find(|(of, at, _)| of == content && at == side).map(|(_, _, rounds)| rounds);
    let bytes_of = |kept: &Kept| kept.process_bytes.filter(|_| whole).unwrap_or(kept.held.memory_bytes) as f64;
    let bytes = |rounds: &[Kept]| rounds.iter().map(|kept| Some(bytes_of(kept))).collect::<Vec<_>>();
    Spread::of_ratios(&bytes(of(reference)?), &bytes(of(side)?))
}

fn print_memory(all: &[(String, String, Vec<Kept>)]) -> Value {
    let headings = [
        "content",
        "side",
        "bytes a page",
        "mem_used_total MiB",
        "of MiB",
        "same-filled %",
        "process MiB",
        "x less than zram:lz4",
        "by process",
        "than zram:zstd",
    ];
    let mut table = Table::new(&headings);
    let mut lines = Vec::new();
    for (content, side, rounds) in all {
        let less = times_less(all, content, side, REFERENCE, false);
        let whole_less = times_less(all, content, side, REFERENCE, true);
        let less_than_zstd = times_less(all, content, side, SAME_CODEC, false);
        let median = |number| spread(rounds, number).map(|all| all.median);
        let size = |number| cell(median(number).map(|bytes| mib(bytes as u64)));
        let same = median(|kept| 100.0 * 4096.0 * kept.held.same_pages as f64 / kept.held.original_bytes as f64);
        let process = rounds.last().and_then(|kept| kept.process_bytes).map(mib);
        table.line([
            content.clone(),
            side.clone(),
            cell(median(|kept| kept.bytes_per_page).map(|bytes| format!("{bytes:.0}"))),
            size(|kept| kept.held.memory_bytes as f64),
            size(|kept| kept.held.original_bytes as f64),
            cell(same.map(|share| format!("{share:.1}"))),
            cell(process),
            cell(less),
            cell(whole_less),
            cell(less_than_zstd),
        ]);
        lines.push(json!({
            "content": content, "side": side, "bytes_per_page": spread(rounds, |kept| kept.bytes_per_page),
            "times_less_than_zram_lz4": less, "by_process": whole_less, "times_less_than_zram_zstd": less_than_zstd,
        }));
    }
    println!("\nmemory, once it was idle");
    print!("{table}");
    Value::Array(lines)
}

fn print_latencies(all: &[(String, [Vec<Read>; 3])]) -> Value {
    let headings = [
        "content",
        "tier",
        "p50 us",
        "p99 us",
        "avg us",
        "store's own p50/p99/avg",
        "zram:lz4 p50/p99/avg",
        "p50 x zram",
    ];
    let mut table = Table::new(&headings);
    let mut lines = Vec::new();
    for (content, tiers) in all {
        for (tier, rounds) in TIERS.iter().zip(tiers) {
            let median = |number: &dyn Fn(&Read) -> Option<f64>| {
                Spread::of(rounds.iter().filter_map(number)).map(|all| all.median)
            };
            let short = |value: Option<f64>| cell(value.map(|us| format!("{us:.1}")));
            let three = |numbers: [Option<f64>; 3]| match numbers {
                [None, ..] => cell(None::<f64>),
                numbers => numbers.map(short).join("/"),
            };
            let to_zram = Spread::of(rounds.iter().filter_map(|read| Some(read.tier.p50_us / read.reference?.p50_us)));
            table.line([
                content.clone(),
                (*tier).to_owned(),
                short(median(&|read| Some(read.tier.p50_us))),
                short(median(&|read| Some(read.tier.p99_us))),
                short(median(&|read| Some(read.tier.avg_us))),
                three([
                    median(&|read| read.tier.store_p50_us),
                    median(&|read| read.tier.store_p99_us),
                    median(&|read| read.tier.store_avg_us),
                ]),
                three([
                    median(&|read| Some(read.reference?.p50_us)),
                    median(&|read| Some(read.reference?.p99_us)),
                    median(&|read| Some(read.reference?.avg_us)),
                ]),
                cell(to_zram),
            ]);
            lines.push(json!({"content": content, "tier": tier, "p50_us": median(&|read| Some(read.tier.p50_us)), "p50_to_zram": to_zram}));
        }
    }
    println!("\none read of 4 KiB through the block device, direct, at depth 1");
    print!("{table}");
    Value::Array(lines)
}

/// Over all kinds of heaps: the median, the best and the worst; with all that the server holds, if it is `whole`.
fn target(all: &[(String, String, Vec<Kept>)], whole: bool) -> Option<Target> {
    let ours = all.iter().map(|(_, side, _)| side).find(|side| side.starts_with("ours"))?;
    let heaps = CorpusKind::HEAPS.map(CorpusKind::name);
    let contents = all.iter().filter(|(content, side, _)| side == ours && heaps.contains(&content.as_str()));
    let ratios = contents
        .filter_map(|(content, side, _)| times_less(all, content, side, REFERENCE, whole))
        .map(|ratio| ratio.median);
    let counted = if whole { ", by its server's process" } else { "" };
    Some(Target {
        about: format!("memory of heaps in {ours}{counted}, times less than {REFERENCE}"),
        measured: Spread::of(ratios),
        bound: 1.5,
        at_least: true,
        unit: "x",
    })
}
