//! The command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand};
use compcache_testkit::corpus::{self, Kind};
use serde_json::json;

use crate::baseline::loop_device::Throttle;
use crate::baseline::{Baseline, SwapPath};
use crate::run::{self, Job, Output};
use crate::session::{self, Session};
use crate::side::Bench;
use crate::table::mib;
use crate::{
    apps, dd, disk, disk_memory, emulated, files, fits, hotcold, iozone, latency, limits, plot, programs, record, scan,
    store, swap_latency, sweep, tiers, writeback,
};

/// As many as a set of them has room for, as sched_setaffinity(2) takes it.
const CPU_SET_CPUS: u64 = libc::CPU_SETSIZE as u64;

/// Compares compcache with the kernel's own compressed memory, side by side in one run.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// Sizes for seconds instead of minutes: whether it works, not how fast it is.
    #[arg(long, global = true)]
    quick: bool,
    /// Write the raw record of every run into this directory.
    #[arg(long, global = true, value_name = "DIR")]
    record: Option<PathBuf>,
    /// The binary under test [default: compcache beside this program].
    #[arg(long, global = true, value_name = "PATH")]
    compcache: Option<PathBuf>,
    /// Rounds [default: 5; 1 with --quick].
    #[arg(long, global = true, value_name = "N")]
    runs: Option<usize>,
    /// Seconds after which a run is ended and counts as failed [default: 600; 120 with --quick].
    #[arg(long, global = true, value_name = "SECONDS")]
    patience: Option<u64>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The engine beside its codec: times, two threads, memory held.
    Store,
    /// Passes over a memory four times as large as its cap, against zram, zswap and disk swap.
    Scan(scan::Options),
    /// Nine tenths of the accesses to one tenth of the memory.
    Hotcold(hotcold::Options),
    /// Single faults, their distribution.
    Latency(latency::Options),
    /// Real programs in a quarter of their memory, outputs compared.
    Programs(programs::Options),
    /// Programs in half of their memory over a disk: swap, zram, zswap, and ours with a spill file.
    Apps(apps::Options),
    /// A file on an ext4, read and written with dd, on ours and on the kernel's disks in RAM.
    Dd(dd::Options),
    /// 4 KiB blocks at random, read and written with fio, on ours and on the kernel's disks in RAM.
    Disk(disk::Options),
    /// How long each single read and write of swap takes, on a disk and on ours.
    SwapLatency(swap_latency::Options),
    /// What a disk that holds a source tree costs in memory.
    DiskMemory(disk_memory::Options),
    /// What cold pages take in memory, and how long a read of each tier waits.
    Tiers(tiers::Options),
    /// The nine columns of IOzone on a file twice as large as memory, with and without the compressed page cache.
    Iozone(iozone::Options),
    /// Many small files, unpacked, listed, compared, read and removed, with and without a mount.
    Files(files::Options),
    /// What compcache costs where everything fits: programs under a limit above their need, reads of what is in the page cache.
    Fits(fits::Options),
    /// What the limit of one pool of the compressed page cache is worth, from 1 to 50 % of the file.
    Limits(limits::Options),
    /// Pages leaving memory for a file, and read back from there, beside fio on the same file.
    Writeback(writeback::Options),
    /// How fast swap into a compressed cache with batched writes is, by the cache's size and by how full it is when pages leave.
    Sweep(sweep::Options),
    /// dd on a disk of ours over ublk, and swap there, beside the kernel's own, in emulated machines.
    Emulated(emulated::Options),
    /// Run a command under a memory limit with one of the kernel's paths.
    Baseline(BaselineOptions),
    /// Draw a record of apps, iozone, limits, sweep or writeback.
    Plot {
        /// The record: a file of --record.
        record: PathBuf,
        /// The picture, as SVG [default: beside the record].
        picture: Option<PathBuf>,
    },
    /// Make the page images that are missing, and say what each holds.
    Corpus,
    /// Undo what a bench left that died together with its guard.
    Undo,
    /// Wait for the end of the session that holds this journal, and undo what it left.
    #[command(hide = true)]
    Guard { journal: PathBuf },
}

#[derive(Args)]
struct BaselineOptions {
    /// The limit: bytes, or with K, M, G.
    #[arg(long, value_parser = bytes)]
    ram: u64,
    /// zram:CODEC, zswap:CODEC, swap:CODEC (a disk of ours), disk, none.
    #[arg(long, default_value = "zram:lz4")]
    swap: SwapPath,
    /// Slow the disk down to this many operations a second.
    #[arg(long, default_value_t = 0)]
    iops: u64,
    /// Slow the disk down to this many bytes a second.
    #[arg(long, value_parser = bytes, default_value = "0")]
    bps: u64,
    /// Let it use one CPU only, the one of this number.
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(..CPU_SET_CPUS))]
    pin: Option<usize>,
    /// Write what it took into this file as well.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Reads the command line and does what it says. Returns the exit status.
///
/// # Errors
/// What was asked for failed.
pub fn run() -> Result<u8> {
    let cli = Cli::parse();
    let record = cli.record.as_deref();
    let rounds = cli.runs.unwrap_or(if cli.quick { 1 } else { 5 }).max(1);
    let begin = || -> Result<Bench> {
        println!("{}", record::machine_line());
        let patience = cli.patience.unwrap_or(if cli.quick { 120 } else { 600 });
        Bench::begin(compcache_path(cli.compcache.clone())?, Duration::from_secs(patience))
    };
    match &cli.command {
        Command::Store => {
            let _alone = begin()?;
            store::run(cli.quick, record)?;
        }
        Command::Scan(options) => scan::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Hotcold(options) => hotcold::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Latency(options) => latency::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Programs(options) => programs::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Apps(options) => apps::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Dd(options) => dd::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Disk(options) => disk::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::SwapLatency(options) => swap_latency::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::DiskMemory(options) => disk_memory::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Tiers(options) => tiers::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Iozone(options) => iozone::run(&begin()?, options, cli.quick, cli.runs, record)?,
        Command::Files(options) => files::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Fits(options) => fits::run(&begin()?, options, cli.quick, cli.runs, record)?,
        Command::Limits(options) => limits::run(&begin()?, options, cli.quick, cli.runs, record)?,
        Command::Writeback(options) => writeback::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Sweep(options) => sweep::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Emulated(options) => emulated::run(&begin()?, options, cli.quick, rounds, record)?,
        Command::Baseline(options) => return baseline(options, &compcache_path(cli.compcache.clone())?),
        Command::Plot { record, picture } => {
            let beside = record.with_extension("svg");
            plot::run(record, picture.as_ref().unwrap_or(&beside))?;
        }
        Command::Corpus => list_corpus(),
        Command::Undo => {
            let undone = session::undo()?;
            println!("{} steps undone", undone.done);
            ensure!(undone.left == 0, "{} steps could not be undone, see above", undone.left);
        }
        Command::Guard { journal } => session::guard(journal)?,
    }
    Ok(0)
}

fn baseline(options: &BaselineOptions, compcache: &Path) -> Result<u8> {
    let session = Session::begin()?;
    let throttle = Throttle { iops: options.iops, bytes_per_s: options.bps };
    let place = Baseline::set_up(&session, &options.swap, options.ram, throttle, compcache)?;
    let job = Job { output: Output::Inherit, pin: options.pin, ..Job::new(options.command.iter()) };
    let outcome = run::run(&job, &place)?;
    let (peak, held) = (outcome.peak, outcome.peak.held);
    eprintln!(
        "{}: {} in {} MiB: {:.2} s by the clock, {:.2} s of CPU; at the peak {} MiB resident; {} held {} MiB as {} MiB \
         in {} MiB of memory, {} same-filled pages; together {} MiB",
        session::NAME,
        options.swap,
        options.ram >> 20,
        outcome.wall_s,
        outcome.cpu_s(),
        mib(peak.resident_bytes),
        options.swap,
        mib(held.original_bytes),
        mib(held.compressed_bytes),
        mib(held.all_bytes()),
        held.same_pages,
        mib(peak.total_bytes),
    );
    if outcome.kills > 0 {
        eprintln!("{}: the kernel ended {} of its processes for want of memory", session::NAME, outcome.kills);
    }
    if let Some(path) = &options.json {
        let text = json!({"swap": options.swap.to_string(), "ram_bytes": options.ram, "outcome": outcome});
        std::fs::write(path, format!("{text:#}\n")).with_context(|| path.display().to_string())?;
    }
    Ok(outcome.exit.clamp(0, 255) as u8)
}

fn list_corpus() {
    println!("in {}", corpus::directory().display());
    for kind in Kind::ALL {
        match corpus::load(kind, corpus::IMAGE_PAGES) {
            Ok(pages) => {
                let share = 100.0 * corpus::same_filled_share(&pages);
                println!("  {kind:10} {} pages, {share:.1} % of them same-filled", pages.len());
            }
            Err(error) => println!("  {kind:10} unavailable: {error}"),
        }
    }
}

fn compcache_path(given: Option<PathBuf>) -> Result<PathBuf> {
    match given {
        Some(path) if path.is_file() => Ok(path),
        Some(path) => bail!("{} is not there", path.display()),
        None => Ok(std::env::current_exe()?.with_file_name("compcache")),
    }
}

/// Whether these words are a command line of this program.
#[cfg(test)]
pub fn parses<'w>(words: impl Iterator<Item = &'w str>) -> bool {
    Cli::try_parse_from(words).is_ok()
}

/// `64M` and the like; the letters are powers of 1024.
pub fn bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last().map(u8::to_ascii_uppercase) {
        Some(b'K') => (&text[..text.len() - 1], 10),
        Some(b'M') => (&text[..text.len() - 1], 20),
        Some(b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text:?} is no size; write for instance 64M"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(bytes("64M"), Ok(64 << 20));
        assert_eq!(bytes("3k"), Ok(3072));
        assert_eq!(bytes("17"), Ok(17));
        assert!(bytes("many").is_err() && bytes("M").is_err());
    }

    #[test]
    fn numbers_that_cannot_be_worked_with_are_refused() {
        for (command, good, bad) in [
            ("programs --part", "1", "0"),
            ("apps --part", "2", "0"),
            ("dd --blocks", "64,4096", "64,0"),
            ("fits --times", "4", "1"),
            ("fits --passes", "1", "0"),
            ("baseline --ram 64M --pin", "1023 -- true", "1024 -- true"),
        ] {
            let parses = |rest: &str| parses(format!("compcache-bench {command} {rest}").split(' '));
            assert!(parses(good) && !parses(bad), "{command}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
