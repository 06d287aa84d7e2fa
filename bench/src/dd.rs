//! Scenario `dd`: a file on an ext4, read and written synchronously with dd(1) in fifteen block sizes.
//!
//! Document 004 of compcache compares zram with a plain RAM disk this way; here ours and nbdkit's compressed disk stand
//! beside both. As there, a read goes through an empty page cache (`drop_caches` before each), and a write (`oflag=sync`)
//! makes the file longer and waits, block by block, for the data and ext4's journal. Other than there, content is memory
//! and files of real programs, and small blocks are fewer than a whole file.
//!
//! **Copies**, compression apart: a read is copied from the device into the page cache (not by zram, which decompresses
//! there; twice more by `nbdkit`) and from there to dd on every side; a write the other way round. Writes of less than
//! 4 KiB reach the device as whole pages, again and again.
//!
//! No side but `disk` has anything to flush. zram says so; a loop device cannot, and ext4 would wait for two flushes with each write. So all of those are
//! mounted with `barrier=0`, as `compcache disk create --mkfs ext4 --mount` does; `--barriers` leaves them as mount(8) would.
//!
//! All disks are there at the same time; sides take turns for each block size, and the order turns round every second
//! round. At the end of a round what was written is compared with what should have been, read from the device.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::content::Content;
use crate::device::{Cost, Device, Devices, Kind, kinds};
use crate::record::Record;
use crate::scan::print_targets;
use crate::side::Bench;
use crate::stat::{Spread, Target};
use crate::table::{Table, cell};

/// What `dd` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// ram, brd, zram:CODEC, nbdkit:CODEC, ours, ours:CODEC, ours:CODEC@BINARY, ours-ublk:CODEC.
    #[arg(long, value_delimiter = ',', default_value = "ram,zram:lz4,nbdkit:zstd,ours")]
    sides: Vec<String>,
    /// read, write.
    #[arg(long, value_delimiter = ',', default_value = "read,write")]
    what: Vec<String>,
    /// Bytes in a block [default: the fifteen of document 004; four with --quick].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..))]
    blocks: Vec<u64>,
    /// Leave file systems to wait for flushes, also where there is nothing to flush.
    #[arg(long)]
    barriers: bool,
    /// MiB in the file [default: 256; 16 with --quick].
    #[arg(long)]
    megabytes: Option<u64>,
    /// Blocks that are written at most [default: 2000; 50 with --quick].
    #[arg(long)]
    writes: Option<u64>,
}

/// Bytes in a block, and the MB/s of document 004: RAM disk and zram reading, RAM disk and zram writing.
const DOCUMENT_004: [(u64, [f64; 4]); 15] = [
    (64, [90.3, 88.6, 7.3, 2.9]),
    (128, [176.0, 156.0, 13.7, 5.5]),
    (256, [300.0, 245.0, 23.7, 9.7]),
    (512, [483.0, 354.0, 37.5, 15.6]),
    (1 << 10, [695.0, 450.0, 52.9, 24.8]),
    (2 << 10, [890.0, 520.0, 67.0, 29.3]),
    (4 << 10, [1024.0, 567.0, 79.1, 41.8]),
    (8 << 10, [1126.4, 586.0, 136.0, 58.8]),
    (16 << 10, [1126.4, 598.0, 218.0, 87.4]),
    (32 << 10, [1126.4, 601.0, 310.0, 114.0]),
    (64 << 10, [1126.4, 603.0, 393.0, 133.0]),
    (128 << 10, [1126.4, 604.0, 454.0, 147.0]),
    (256 << 10, [1228.8, 605.0, 481.0, 156.0]),
    (512 << 10, [1228.8, 607.0, 500.0, 159.0]),
    (1 << 20, [1126.4, 604.0, 403.0, 160.0]),
];

const QUICK_BLOCKS: [u64; 4] = [64, 4 << 10, 64 << 10, 1 << 20];

/// From here on, targets hold.
const LARGE_BLOCK: u64 = 64 << 10;

/// What is done with the file.
#[derive(Clone, Copy, PartialEq)]
enum What {
    Read,
    Write,
}

impl What {
    fn word(self) -> &'static str {
        match self {
            What::Read => "read",
            What::Write => "write",
        }
    }

    /// What of zram's speed is wanted, and in document 004 zram's speed in those of the RAM disk.
    fn wanted(self, block_bytes: u64) -> (f64, Option<f64>) {
        let (share, at) = if self == What::Read { (0.8, 0) } else { (0.6, 2) };
        let line = DOCUMENT_004.iter().find(|(bytes, _)| *bytes == block_bytes);
        (share, line.map(|(_, speeds)| speeds[at + 1] / speeds[at]))
    }
}

/// How much is done.
struct Size {
    file_bytes: u64,
    /// Blocks read, written: at most.
    blocks_max: [u64; 2],
}

/// One dd.
#[derive(Clone, Copy)]
struct Run {
    mb_per_s: f64,
    cpu_us_per_mb: f64,
}

/// Runs the scenario.
///
/// # Errors
/// dd failed, wrong bytes were read, or nothing could be measured.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let mut size = match quick {
        true => Size { file_bytes: 16 << 20, blocks_max: [20_000, 50] },
        false => Size { file_bytes: 256 << 20, blocks_max: [2_000_000, 2000] },
    };
    size.file_bytes = options.megabytes.map_or(size.file_bytes, |megabytes| megabytes << 20);
    size.blocks_max[1] = options.writes.unwrap_or(size.blocks_max[1]);
    let blocks: Vec<u64> = match (options.blocks.is_empty(), quick) {
        (false, _) => options.blocks.clone(),
        (true, true) => QUICK_BLOCKS.to_vec(),
        (true, false) => DOCUMENT_004.iter().map(|(bytes, _)| *bytes).collect(),
    };
    let settings = json!({
        "rounds": rounds, "file_bytes": size.file_bytes, "blocks_max": size.blocks_max, "barriers": options.barriers,
    });
    let mut record_kept = bench.record("dd", settings);
    let content = Content::write(&bench.session().directory().join("content"), size.file_bytes, &mut record_kept)?;
    println!(
        "\ndd through ext4, {} MiB of {} ({:.1} % same-filled), {rounds} rounds",
        content.bytes >> 20,
        content.kinds,
        content.same_filled
    );
    let asked = Asked { content: &content, size: &size, blocks: &blocks };
    let measured = measure(bench, options, &asked, rounds, &mut record_kept);
    record_kept.finish(measured, record)
}

/// What is read and written.
struct Asked<'a> {
    content: &'a Content,
    size: &'a Size,
    blocks: &'a [u64],
}

fn measure(bench: &Bench, options: &Options, asked: &Asked<'_>, rounds: usize, kept: &mut Record) -> Result<()> {
    let Asked { content, size, blocks } = *asked;
    let kinds = kinds(&options.sides)?;
    kept.binaries_of(&kinds);
    let devices = Devices::set_up(bench.session(), &kinds, 4 * size.file_bytes, bench.compcache())?;
    let mut mounted = Vec::new();
    for (nth, kind) in kinds.iter().enumerate() {
        let waits = options.barriers || *kind == Kind::Disk;
        mounted.push(prepare(devices.at(nth), content, if waits { "" } else { "barrier=0" })?);
    }
    let mut targets = Vec::new();
    for what in [What::Read, What::Write] {
        if !options.what.iter().any(|word| word == what.word()) {
            continue;
        }
        let mut runs = vec![vec![Vec::new(); blocks.len()]; mounted.len()];
        for round in 0..rounds {
            for (place, &block_bytes) in blocks.iter().enumerate() {
                for nth in devices.order(round) {
                    let count = (content.bytes / block_bytes).min(size.blocks_max[what as usize]);
                    let (run, cost) = one(devices.at(nth), &mounted[nth], what, content, (block_bytes, count))?;
                    kept.run(json!({
                        "side": devices.kinds()[nth].to_string(), "what": what.word(), "round": round,
                        "block_bytes": block_bytes, "bytes": block_bytes * count, "mb_per_s": run.mb_per_s, "cost": cost,
                    }));
                    runs[nth][place].push(run);
                }
            }
        }
        let sides = Sides { kinds: devices.kinds(), blocks, runs };
        kept.summary(sides.print(what));
        targets.extend(sides.targets(what));
    }
    for nth in 0..mounted.len() {
        let held = devices.at(nth).held();
        kept.summary(json!({"side": devices.kinds()[nth].to_string(), "held": held}));
    }
    print_targets(&targets);
    Ok(())
}

/// An ext4 with the content in `file`, which reads back as it is.
fn prepare(device: &Device<'_>, content: &Content, ext4_options: &str) -> Result<PathBuf> {
    let point = device.with_ext4(ext4_options)?;
    let file = point.join("file");
    fs::copy(&content.path, &file)?;
    fs::File::open(&file)?.sync_all()?;
    drop_caches()?;
    content.check(&file, content.bytes)?;
    Ok(point)
}

fn one(
    device: &Device<'_>,
    point: &Path,
    what: What,
    content: &Content,
    (block_bytes, count): (u64, u64),
) -> Result<(Run, Cost)> {
    let bytes = block_bytes * count;
    let (from, to) = match what {
        What::Read => (point.join("file"), PathBuf::from("/dev/null")),
        What::Write => (content.path.clone(), point.join("written")),
    };
    let flag = if what == What::Read { "iflag=sync" } else { "oflag=sync" };
    match what {
        What::Read => drop_caches()?,
        // The source is in the page cache.
        What::Write => drop(io::copy(&mut fs::File::open(&content.path)?, &mut io::sink())?),
    }
    let (seconds, cost) = device.metered(|| dd(&from, &to, block_bytes, count, flag));
    if what == What::Write {
        drop_caches()?;
        content.check(&to, bytes)?;
    }
    let run =
        Run { mb_per_s: bytes as f64 / 1e6 / seconds?, cpu_us_per_mb: cost.machine_cpu_s * 1e6 / (bytes as f64 / 1e6) };
    Ok((run, cost))
}

/// Runs dd(1). Returns the seconds that it says it took.
fn dd(from: &Path, to: &Path, block_bytes: u64, count: u64, flag: &str) -> Result<f64> {
    let mut command = Command::new("dd");
    command.env("LC_ALL", "C").arg(flag).arg(format!("bs={block_bytes}")).arg(format!("count={count}"));
    command.arg(format!("if={}", from.display())).arg(format!("of={}", to.display()));
    // SAFETY: between fork and exec one prctl(2) with numbers. Should the bench die, dd must not keep the disk in use.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    };
    let output = command.output().context("dd cannot be run")?;
    let said = String::from_utf8_lossy(&output.stderr);
    // 1048576 bytes (1.0 MB, 1.0 MiB) copied, 0.00261 s, 402 MB/s
    let seconds = said.rsplit_once("copied, ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    match (output.status.success(), seconds) {
        (true, Some(seconds)) => Ok(seconds),
        _ => bail!("dd from {} to {}: {}", from.display(), to.display(), said.trim()),
    }
}

/// Has the kernel forget what it read or has written; twice, as the document does.
fn drop_caches() -> Result<()> {
    for _ in 0..2 {
        fs::write("/proc/sys/vm/drop_caches", "1").context("/proc/sys/vm/drop_caches")?;
    }
    Ok(())
}

/// All runs of all sides: by side, block size and round.
struct Sides<'b> {
    kinds: Vec<Kind>,
    blocks: &'b [u64],
    runs: Vec<Vec<Vec<Run>>>,
}

impl Sides<'_> {
    fn find(&self, wanted: fn(&Kind) -> bool) -> Option<usize> {
        self.kinds.iter().position(wanted)
    }

    fn each(&self, nth: usize, block: usize, number: fn(&Run) -> f64) -> Vec<Option<f64>> {
        self.runs[nth][block].iter().map(|run| Some(number(run))).collect()
    }

    /// The speed of one side in those of another, round by round.
    fn ratio(&self, nth: usize, of: Option<usize>, block: usize) -> Option<Spread> {
        let speed = |run: &Run| run.mb_per_s;
        Spread::of_ratios(&self.each(nth, block, speed), &self.each(of?, block, speed))
    }

    fn print(&self, what: What) -> Value {
        let (ram, zram) = (self.find(is_ram), self.find(|kind| matches!(kind, Kind::Zram(_))));
        let mut headings = vec!["block".to_owned()];
        headings.extend(self.kinds.iter().map(|kind| format!("{kind} MB/s")));
        let compared: Vec<usize> =
            (0..self.kinds.len()).filter(|nth| Some(*nth) != ram && Some(*nth) != zram).collect();
        headings.extend(compared.iter().map(|nth| format!("{}/zram", self.kinds[*nth])));
        headings.extend(compared.iter().map(|nth| format!("{}/ram", self.kinds[*nth])));
        headings.extend(["zram/ram".to_owned(), "in 004".to_owned()]);
        let cpu_headings: Vec<String> = self.kinds.iter().map(Kind::to_string).collect();
        let cpu_headings = ["block"].into_iter().chain(cpu_headings.iter().map(String::as_str));
        let mut cpu_table = Table::new(&cpu_headings.collect::<Vec<_>>());
        let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
        let mut lines = Vec::new();
        for (block, bytes) in self.blocks.iter().enumerate() {
            let median =
                |nth, number| Spread::of(self.each(nth, block, number).into_iter().flatten()).map(|all| all.median);
            let all = 0..self.kinds.len();
            let mut cells = vec![shown(*bytes)];
            let speeds: Vec<_> = all.clone().map(|nth| median(nth, |run: &Run| run.mb_per_s)).collect();
            cells.extend(speeds.iter().map(|speed| cell(speed.map(|speed| format!("{speed:.1}")))));
            let to_zram: Vec<_> = compared.iter().map(|nth| self.ratio(*nth, zram, block)).collect();
            cells.extend(to_zram.iter().map(|ratio| cell(*ratio)));
            let to_ram: Vec<_> = compared.iter().map(|nth| self.ratio(*nth, ram, block)).collect();
            cells.extend(to_ram.iter().map(|ratio| cell(ratio.map(|ratio| format!("{:.2}", ratio.median)))));
            let theirs = zram.and_then(|zram| self.ratio(zram, ram, block)).map(|ratio| ratio.median);
            cells.extend([theirs, what.wanted(*bytes).1].map(|ratio| cell(ratio.map(|ratio| format!("{ratio:.2}")))));
            let cpu: Vec<_> = all.map(|nth| median(nth, |run: &Run| run.cpu_us_per_mb)).collect();
            table.line(cells);
            let cpu_cells = cpu.iter().map(|us| cell(us.map(|us| format!("{us:.0}"))));
            cpu_table.line([shown(*bytes)].into_iter().chain(cpu_cells));
            lines.push(json!({
                "what": what.word(), "block_bytes": bytes, "mb_per_s": speeds, "to_zram": to_zram, "to_ram": to_ram,
                "zram_to_ram": theirs, "machine_cpu_us_per_mb": cpu,
            }));
        }
        println!("\n{}\n{table}\n{}: CPU of the whole machine, us/MB\n{cpu_table}", what.word(), what.word());
        json!({"sides": self.kinds.iter().map(Kind::to_string).collect::<Vec<_>>(), "compared": compared, "lines": lines})
    }

    /// For each target, the block size of at least [`LARGE_BLOCK`] that is furthest from it.
    fn targets(&self, what: What) -> Vec<Target> {
        let ours = self.find(|kind| matches!(kind, Kind::Ours { binary: None, .. }));
        let Some(ours) = ours else { return Vec::new() };
        let large = (0..self.blocks.len()).filter(|block| self.blocks[*block] >= LARGE_BLOCK);
        let worst = |of: Option<usize>, bound: &dyn Fn(u64) -> Option<f64>| {
            let all = large.clone().filter_map(|block| {
                Some((self.ratio(ours, of, block)?, bound(self.blocks[block])?, self.blocks[block]))
            });
            all.min_by(|one, other| (one.0.median / one.1).total_cmp(&(other.0.median / other.1)))
        };
        let zram = worst(self.find(|kind| matches!(kind, Kind::Zram(_))), &|bytes| Some(what.wanted(bytes).0));
        let ram = worst(self.find(is_ram), &|bytes| what.wanted(bytes).1);
        let target = |found: Option<(Spread, f64, u64)>, of: &str| {
            let (measured, bound, bytes) = found?;
            let bound = (bound * 100.0).round() / 100.0;
            let about = format!("{}, blocks of {}: ours in speeds of {of}", what.word(), shown(bytes));
            Some(Target { about, measured: Some(measured), bound, at_least: true, unit: "x" })
        };
        [target(zram, "zram"), target(ram, "the RAM disk, as zram in document 004")].into_iter().flatten().collect()
    }
}

fn is_ram(kind: &Kind) -> bool {
    matches!(kind, Kind::Ram | Kind::Brd)
}

fn shown(bytes: u64) -> String {
    match bytes {
        0..1024 => bytes.to_string(),
        1024..1_048_576 => format!("{}K", bytes >> 10),
        _ => format!("{}M", bytes >> 20),
    }
}
