//! Scenario `writeback`: how fast pages leave memory for a backing, what they take there, and how long a read waits.
//!
//! | question                                   | compared with                                          | wanted    |
//! |--------------------------------------------|--------------------------------------------------------|-----------|
//! | segments written, bytes a second           | fio writing the same file in order, direct, as large blocks, as many at a time as ours has threads | >= 0.8 x |
//! | room on the backing                        | the pages, uncompressed                                | -         |
//! | one page read from the backing, at random  | fio reading 4 KiB of the same file at random           | -         |
//!
//! All pages of the corpus's heaps are in memory, compressed; then the limit falls to nothing, so that all of them have to leave,
//! and two threads reclaim until they have. That is sustained writeback: finding pages, copying, sealing, writing, and
//! changing slots. Same-filled pages stay where they are. After it every page is read back in
//! another order, and compared. The file is written once from end to end before anything is measured, so that nobody waits for the file system
//! to find room; fio and ours take turns. What fio writes it makes before: random bytes, the same again and again.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use compcache_store::{
    Backing, BackingConfig, Fetcher, FileMedium, Page, PageIndex, Pool, PoolConfig, Read, Store, StoreConfig, Worker,
};
use compcache_testkit::corpus;
use serde_json::{Value, json};

use crate::clock::{cpu_time, now_ns};
use crate::content::heaps;
use crate::record::Record;
use crate::scratch::ScratchFile;
use crate::session::Undo;
use crate::side::Bench;
use crate::stat::{Spread, Target};
use crate::table::{Table, mib};

/// What `writeback` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Where the file is made [default: where the page images are].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Bytes in a segment, what is written at a time.
    #[arg(long, value_delimiter = ',', default_values_t = [256 << 10, 1 << 20, 4 << 20, 16 << 20])]
    segments: Vec<usize>,
    /// Threads that reclaim: one gets a segment ready while the other's is written.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

/// The size that [`BackingConfig`] takes if none is given: the target is for this one.
const USUAL_SEGMENT: usize = 1 << 20;

/// One turn.
struct Turn {
    fio_mb_per_s: f64,
    mb_per_s: f64,
    /// To write one page, CPU time.
    cpu_us_per_page: f64,
    written_bytes: u64,
    pages: u64,
    fetch_us: Tail,
    fio_read_us: Tail,
}

/// The middle and the end of a distribution.
#[derive(Clone, Copy)]
struct Tail {
    p50: f64,
    p99: f64,
}

/// Runs the scenario and prints its table and target; with `record`, writes the raw record into that directory.
///
/// # Errors
/// fio is missing, a page is wrong, or the file cannot be written.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let mut kept = bench.record(
        "writeback",
        json!({
            "quick": quick, "rounds": rounds, "segments": options.segments, "threads": options.threads,
            "fio_at_a_time": options.threads,
        }),
    );
    let pages = heaps(if quick { 1024 } else { corpus::IMAGE_PAGES }, &mut kept)?;
    let place = ScratchFile::new(&options.dir.clone().unwrap_or_else(corpus::directory))?;
    bench.session().note(Undo::File(place.path().to_owned()))?;
    let measured = measure(options, rounds, &pages, &place, &mut kept);
    kept.finish(measured, record)
}

fn measure(options: &Options, rounds: usize, pages: &[Page], place: &ScratchFile, kept: &mut Record) -> Result<()> {
    let mut table = Table::new(&[
        "segment",
        "fio MB/s",
        "ours MB/s",
        "ours / fio",
        "CPU us a page",
        "raw MiB",
        "on the backing MiB",
        "read p50 us",
        "p99 us",
        "fio's 4 KiB, p50 us",
        "p99 us",
    ]);
    let mut target = None;
    for &segment_bytes in &options.segments {
        let mut turns = Vec::new();
        for round in 0..rounds {
            let turn = turn(pages, place, segment_bytes, options.threads, round % 2 == 1)
                .with_context(|| format!("segments of {segment_bytes} bytes"))?;
            kept.run(turn.json(segment_bytes, round));
            turns.push(turn);
        }
        let spread = |number: fn(&Turn) -> f64| Spread::of(turns.iter().map(number)).context("no round");
        let ratio = spread(|turn| turn.mb_per_s / turn.fio_mb_per_s)?;
        if segment_bytes == USUAL_SEGMENT {
            target = Some(ratio);
        }
        let us = |number: fn(&Turn) -> f64| spread(number).map(|all| format!("{all:.0}"));
        table.line([
            format!("{} KiB", segment_bytes >> 10),
            format!("{:.0}", spread(|turn| turn.fio_mb_per_s)?.median),
            format!("{:.0}", spread(|turn| turn.mb_per_s)?.median),
            ratio.to_string(),
            spread(|turn| turn.cpu_us_per_page)?.to_string(),
            mib(pages.len() as u64 * 4096),
            mib(spread(|turn| turn.written_bytes as f64)?.median as u64),
            us(|turn| turn.fetch_us.p50)?,
            us(|turn| turn.fetch_us.p99)?,
            us(|turn| turn.fio_read_us.p50)?,
            us(|turn| turn.fio_read_us.p99)?,
        ]);
    }
    println!("{table}");
    let about = "writeback, segments of 1 MiB, against fio".to_owned();
    let target = Target { about, measured: target, bound: 0.8, at_least: true, unit: "x" };
    println!("{target}");
    kept.summary(
        json!({"target": target.about, "bound": target.bound, "measured": target.measured, "met": target.met()}),
    );
    Ok(())
}

fn turn(pages: &[Page], place: &ScratchFile, segment_bytes: usize, threads: usize, ours_first: bool) -> Result<Turn> {
    let subject = Subject::new(pages, place, segment_bytes)?;
    let bytes = subject.backing.stats().capacity_bytes;
    let fio_write = || fio(place, bytes, segment_bytes, Does::Write { at_a_time: threads });
    if fs::metadata(place.path())?.len() < bytes {
        fio_write()?;
    }
    let fio_before = if ours_first { None } else { Some(fio_write()?) };
    let (mb_per_s, cpu_us_per_page) = subject.write_back(threads)?;
    let written_bytes = subject.written_bytes();
    let fetch_us = subject.read_back(pages)?;
    let fio_write = fio_before.map_or_else(fio_write, Ok)?;
    let fio_read = fio(place, bytes, 4096, Does::Read)?;
    let turn = Turn {
        fio_mb_per_s: fio_write.mb_per_s,
        mb_per_s,
        cpu_us_per_page,
        written_bytes,
        pages: pages.len() as u64,
        fetch_us,
        fio_read_us: fio_read.tail,
    };
    Ok(turn)
}

/// All pages, in memory until they are written back.
struct Subject {
    store: Arc<Store>,
    pool: Arc<Pool>,
    backing: Arc<Backing>,
    segment_bytes: usize,
}

impl Subject {
    fn new(pages: &[Page], place: &ScratchFile, segment_bytes: usize) -> Result<Subject> {
        let store = Store::new(StoreConfig { reserve_bytes: 8 << 30, ..StoreConfig::default() })?;
        // Room for all of them as they are; what they take is less.
        let capacity_bytes = (pages.len() as u64 * 4096).max(4 * segment_bytes as u64);
        let file = File::options().read(true).write(true).open(place.path())?;
        let medium = FileMedium::new(file.into());
        ensure!(
            medium.is_direct(),
            "{}: its file system takes no direct I/O; choose another --dir",
            place.path().display()
        );
        let backing = Backing::new(Box::new(medium), BackingConfig { capacity_bytes, segment_bytes })?;
        let pool = store.create_pool_on(PoolConfig::default(), &backing)?;
        let mut worker = Worker::new(&store, now_ns)?;
        pool.write_run(&mut worker, PageIndex(0), pages).map_err(|failed| failed.error)?;
        Ok(Subject { store, pool, backing, segment_bytes })
    }

    /// MB a second, and CPU time a page, us.
    fn write_back(&self, threads: usize) -> Result<(f64, f64)> {
        self.store.set_limit_bytes(1);
        let start = Instant::now();
        let done = thread::scope(|scope| {
            let start = || thread::Builder::new().name("reclaim".into()).spawn_scoped(scope, || self.write_all_back());
            let all: Vec<_> = (0..threads).map(|_| start()).collect::<Result<_, _>>()?;
            all.into_iter().map(|one| one.join().map_err(|_| anyhow!("a thread died"))?).collect::<Result<Vec<_>>>()
        })?;
        let wall_s = start.elapsed().as_secs_f64();
        let (pages, cpu_s) = done.iter().fold((0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let stored = self.pool.stats().pages_stored();
        ensure!(pages as u64 == stored, "{pages} pages of {stored} have left: {:?}", self.backing.stats());
        Ok((self.written_bytes() as f64 / 1e6 / wall_s, cpu_s * 1e6 / pages as f64))
    }

    /// Pages and CPU time.
    fn write_all_back(&self) -> Result<(usize, f64)> {
        let mut worker = Worker::new(&self.store, now_ns)?;
        let (mut pages, start_cpu) = (0, cpu_time());
        loop {
            let done = self.store.reclaim(&mut worker, &self.backing)?;
            pages += done.pages;
            if done.finished {
                return Ok((pages, (cpu_time() - start_cpu).as_secs_f64()));
            }
        }
    }

    fn written_bytes(&self) -> u64 {
        self.backing.stats().segments_written * self.segment_bytes as u64
    }

    /// Every page, in another order, compared.
    fn read_back(&self, pages: &[Page]) -> Result<Tail> {
        let (mut worker, mut fetcher) = (Worker::new(&self.store, now_ns)?, Fetcher::new()?);
        let mut order: Vec<usize> = (0..pages.len()).collect();
        fastrand::Rng::with_seed(11).shuffle(&mut order);
        let (mut page, mut times) = ([0; 4096], Vec::with_capacity(pages.len()));
        for index in order {
            let start = now_ns();
            let read = self.pool.fetch(&mut worker, &mut fetcher, PageIndex(index as u64), &mut page)?;
            times.push(now_ns() - start);
            ensure!(read == Read::Done && page == pages[index], "WRONG BYTES in page {index}");
        }
        times.sort_unstable();
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
        Ok(Tail { p50: at(0.5), p99: at(0.99) })
    }
}

/// What fio says of the file.
struct Fio {
    mb_per_s: f64,
    tail: Tail,
}

/// What fio does with the file.
#[derive(Clone, Copy, PartialEq)]
enum Does {
    /// From end to end, so many blocks at a time.
    Write { at_a_time: usize },
    /// One block after the other, at random, for a second.
    Read,
}

fn fio(place: &ScratchFile, bytes: u64, block_bytes: usize, does: Does) -> Result<Fio> {
    let mut command = Command::new("fio");
    command.args(["--name=bench", "--direct=1", "--thread", "--output-format=json"]);
    command.args(["--scramble_buffers=0", "--randrepeat=1", "--norandommap", "--overwrite=0"]);
    command.arg(format!("--filename={}", place.path().display())).arg(format!("--size={bytes}"));
    command.arg(format!("--bs={block_bytes}"));
    match does {
        Does::Write { at_a_time } => {
            command.args(["--rw=write", "--ioengine=libaio"]).arg(format!("--iodepth={at_a_time}"))
        }
        Does::Read => command.args(["--rw=randread", "--ioengine=psync", "--time_based", "--runtime=1"]),
    };
    // SAFETY: between fork and exec one prctl(2) with numbers. Should the bench die, fio must not go on writing.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    };
    let output = command.output().context("fio cannot be run (Debian: fio)")?;
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let side = &said["jobs"][0][if does == Does::Read { "read" } else { "write" }];
    let us = |value: &Value| value.as_f64().map_or(f64::NAN, |ns| ns / 1000.0);
    let percentile = &side["clat_ns"]["percentile"];
    let tail = Tail { p50: us(&percentile["50.000000"]), p99: us(&percentile["99.000000"]) };
    match side["bw_bytes"].as_f64() {
        Some(bytes_per_s) if output.status.success() && said["jobs"][0]["error"] == 0 => {
            Ok(Fio { mb_per_s: bytes_per_s / 1e6, tail })
        }
        _ => bail!("fio: {}", String::from_utf8_lossy(&output.stderr).trim()),
    }
}

impl Turn {
    fn json(&self, segment_bytes: usize, round: usize) -> Value {
        let tail = |tail: Tail| json!({"p50_us": tail.p50, "p99_us": tail.p99});
        json!({
            "segment_bytes": segment_bytes, "round": round, "pages": self.pages, "written_bytes": self.written_bytes,
            "fio_mb_per_s": self.fio_mb_per_s, "mb_per_s": self.mb_per_s, "cpu_us_per_page": self.cpu_us_per_page,
            "fetch": tail(self.fetch_us), "fio_read": tail(self.fio_read_us),
        })
    }
}
