//! Scenario `disk`: fio, 4 KiB blocks at random places of the raw device, direct I/O, at depth 1 and 32, one job and two.
//!
//! Before each round the device is filled with memory and files of real programs, and reads come first, so that what is
//! decompressed is real. fio cannot write real content at random places; it writes one page of the corpus, that one whose
//! compressed size is the middle one, over and over (`page`), and bytes of its own that compress by two thirds, new for
//! each block (`made`), which costs fio itself time. A codec has it easier with one page again and again, on every side.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use compcache_testkit::PAGE_BYTES;
use compcache_testkit::corpus::{self, Kind as CorpusKind};
use lz4_flex::block::{compress_into, get_maximum_output_size};
use serde_json::{Value, json};

use crate::content::Content;
use crate::device::{Device, Devices, Kind, kinds};
use crate::record::Record;
use crate::scan::print_targets;
use crate::side::Bench;
use crate::stat::{Spread, Target};
use crate::table::{Table, cell};

/// What `disk` can be asked on the command line.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// ram, zram:CODEC, nbdkit:CODEC, ours, ours:CODEC, ours:CODEC@BINARY.
    #[arg(long, value_delimiter = ',', default_value = "zram:lz4,nbdkit:zstd,ours,ours:zstd")]
    sides: Vec<String>,
}

/// One question: what is done, how many requests are in flight in each of how many jobs.
#[derive(Clone, Copy)]
struct Question {
    what: What,
    depth: u32,
    jobs: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Read,
    WritePage,
    WriteMade,
}

impl What {
    fn word(self) -> &'static str {
        match self {
            What::Read => "read",
            What::WritePage => "write page",
            What::WriteMade => "write made",
        }
    }
}

/// What fio said, and what it cost.
#[derive(Clone, Copy)]
struct Answer {
    operations_per_s: f64,
    mean_us: f64,
    p99_us: f64,
    cpu_us: f64,
}

/// Runs the scenario.
///
/// # Errors
/// fio is missing or failed.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let (bytes, seconds) = if quick { (16 << 20, 0.3) } else { (256 << 20, 1.0) };
    let mut kept = bench.record("disk", json!({"rounds": rounds, "bytes": bytes, "seconds": seconds}));
    let directory = bench.session().directory();
    let content = Content::write(&directory.join("content"), bytes, &mut kept)?;
    let page = directory.join("page");
    fs::write(&page, middle_page()?)?;
    println!(
        "\nfio, 4 KiB at random in {} MiB of {} ({:.1} % same-filled), {rounds} rounds",
        content.bytes >> 20,
        content.kinds,
        content.same_filled
    );
    let asked = Asked { content: &content, page: &page, seconds, questions: questions(quick) };
    let measured = measure(bench, options, &asked, rounds, &mut kept);
    kept.finish(measured, record)
}

/// What is read and written, and how.
struct Asked<'a> {
    content: &'a Content,
    /// A file.
    page: &'a Path,
    seconds: f64,
    questions: Vec<Question>,
}

fn measure(bench: &Bench, options: &Options, asked: &Asked<'_>, rounds: usize, kept: &mut Record) -> Result<()> {
    let Asked { content, page, seconds, ref questions } = *asked;
    let kinds = kinds(&options.sides)?;
    kept.binaries_of(&kinds);
    let devices = Devices::set_up(bench.session(), &kinds, content.bytes, bench.compcache())?;
    let mut answers = vec![vec![Vec::new(); devices.kinds().len()]; questions.len()];
    for round in 0..rounds {
        for nth in devices.order(round) {
            fill(devices.at(nth), content)?;
        }
        for (question, answers) in questions.iter().zip(&mut answers) {
            for nth in devices.order(round) {
                let (answer, cost) = ask(devices.at(nth), question, content, page, seconds)?;
                kept.run(json!({
                    "side": devices.kinds()[nth].to_string(), "what": question.what.word(), "depth": question.depth,
                    "jobs": question.jobs, "round": round, "operations_per_s": answer.operations_per_s,
                    "mean_us": answer.mean_us, "p99_us": answer.p99_us, "cost": cost,
                }));
                answers[nth].push(answer);
            }
        }
    }
    kept.summary(print(&devices.kinds(), questions, &answers));
    print_targets(&targets(&devices.kinds(), questions, &answers));
    Ok(())
}

/// Reads before writes, which leave other content.
fn questions(quick: bool) -> Vec<Question> {
    let mut all = Vec::new();
    for what in [What::Read, What::WritePage, What::WriteMade] {
        for (depth, jobs) in [(1, 1), (32, 1), (1, 2), (32, 2)] {
            if !quick || jobs == 1 {
                all.push(Question { what, depth, jobs });
            }
        }
    }
    all
}

/// Writes all of the content to the start of the device.
fn fill(device: &Device<'_>, content: &Content) -> Result<()> {
    let mut from = fs::File::open(&content.path)?;
    let mut to = fs::File::options().write(true).open(device.path())?;
    io::copy(&mut from, &mut to)?;
    Ok(to.sync_all()?)
}

fn ask(
    device: &Device<'_>,
    question: &Question,
    content: &Content,
    page: &Path,
    seconds: f64,
) -> Result<(Answer, crate::device::Cost)> {
    let mut command = Command::new("fio");
    command.args(["--name=bench", "--direct=1", "--ioengine=libaio", "--bs=4k", "--time_based", "--group_reporting"]);
    // Threads, so that ending fio ends all of it; a seed of their own for each, the same in every run.
    command.args(["--thread", "--randrepeat=1", "--norandommap", "--output-format=json"]);
    command.arg(format!("--filename={}", device.path().display())).arg(format!("--size={}", content.bytes));
    command.arg(format!("--runtime={}ms", (seconds * 1000.0) as u64));
    command.arg(format!("--iodepth={}", question.depth)).arg(format!("--numjobs={}", question.jobs));
    match question.what {
        What::Read => command.arg("--rw=randread"),
        What::WritePage => command.arg("--rw=randwrite").arg(format!("--buffer_pattern='{}'", page.display())),
        What::WriteMade => {
            command.args(["--rw=randwrite", "--refill_buffers", "--buffer_compress_percentage=66"]);
            command.arg("--buffer_compress_chunk=4096")
        }
    };
    // SAFETY: between fork and exec one prctl(2) with numbers. Should the bench die, fio must not keep the device in use.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    };
    let (output, cost) = device.metered(|| command.output());
    let output = output.context("fio cannot be run (Debian: fio)")?;
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let side = &said["jobs"][0][if question.what == What::Read { "read" } else { "write" }];
    let (Some(operations_per_s), Some(operations)) = (side["iops"].as_f64(), side["total_ios"].as_f64()) else {
        bail!("fio: {}", String::from_utf8_lossy(&output.stderr).trim());
    };
    if !output.status.success() || said["jobs"][0]["error"] != 0 {
        bail!("fio: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let us = |value: &Value| value.as_f64().map_or(f64::NAN, |ns| ns / 1000.0);
    let latency = &side["clat_ns"];
    let answer = Answer {
        operations_per_s,
        mean_us: us(&latency["mean"]),
        p99_us: us(&latency["percentile"]["99.000000"]),
        cpu_us: cost.machine_cpu_s * 1e6 / operations,
    };
    Ok((answer, cost))
}

/// The page whose compressed size is the middle one of a heap's.
fn middle_page() -> Result<Vec<u8>> {
    let mut pages = corpus::load(CorpusKind::PythonHeap, 2048)?;
    let mut output = vec![0; get_maximum_output_size(PAGE_BYTES)];
    pages.sort_by_cached_key(|page| compress_into(page, &mut output).expect("the output holds any page"));
    Ok(pages[pages.len() / 2].to_vec())
}

fn spread(answers: &[Answer], number: fn(&Answer) -> f64) -> Option<Spread> {
    Spread::of(answers.iter().map(number))
}

fn ratio(ours: &[Answer], theirs: &[Answer]) -> Option<Spread> {
    let each = |answers: &[Answer]| answers.iter().map(|one| Some(one.operations_per_s)).collect::<Vec<_>>();
    Spread::of_ratios(&each(ours), &each(theirs))
}

fn print(kinds: &[Kind], questions: &[Question], answers: &[Vec<Vec<Answer>>]) -> Value {
    let mut table =
        Table::new(&["", "depth", "jobs", "side", "1000/s", "mean us", "p99 us", "CPU us", "x zram", "x nbdkit"]);
    let zram = kinds.iter().position(|kind| matches!(kind, Kind::Zram(_)));
    let nbdkit = kinds.iter().position(|kind| matches!(kind, Kind::Nbdkit(_)));
    let mut lines = Vec::new();
    for (question, answers) in questions.iter().zip(answers) {
        for (kind, of_side) in kinds.iter().zip(answers) {
            let to_zram = zram.and_then(|zram| ratio(of_side, &answers[zram]));
            let to_nbdkit = nbdkit.and_then(|nbdkit| ratio(of_side, &answers[nbdkit]));
            let short = |number| cell(spread(of_side, number).map(|all| format!("{:.1}", all.median)));
            table.line([
                question.what.word().to_owned(),
                question.depth.to_string(),
                question.jobs.to_string(),
                kind.to_string(),
                short(|one| one.operations_per_s / 1000.0),
                short(|one| one.mean_us),
                short(|one| one.p99_us),
                short(|one| one.cpu_us),
                cell(to_zram),
                cell(to_nbdkit),
            ]);
            lines.push(json!({
                "what": question.what.word(), "depth": question.depth, "jobs": question.jobs, "side": kind.to_string(),
                "operations_per_s": spread(of_side, |one| one.operations_per_s),
                "mean_us": spread(of_side, |one| one.mean_us), "p99_us": spread(of_side, |one| one.p99_us),
                "machine_cpu_us": spread(of_side, |one| one.cpu_us), "to_zram": to_zram, "to_nbdkit": to_nbdkit,
            }));
        }
    }
    print!("{table}");
    Value::Array(lines)
}

/// Ours beside nbdkit's under the same codec; of the sides, the first two of which that can be said.
fn same_codec(kinds: &[Kind]) -> Option<(usize, usize)> {
    // Not the level, which each says in its own way.
    let codec = |words: &str| words.split([':', ',']).next().unwrap_or_default().to_owned();
    kinds.iter().enumerate().find_map(|(nbdkit, kind)| {
        let Kind::Nbdkit(allocator) = kind else { return None };
        let is_alike = |kind: &Kind| matches!(kind, Kind::Ours { codec: ours, binary: None, .. } if codec(ours) == codec(allocator));
        Some((kinds.iter().position(is_alike)?, nbdkit))
    })
}

fn targets(kinds: &[Kind], questions: &[Question], answers: &[Vec<Vec<Answer>>]) -> Vec<Target> {
    let Some((ours, nbdkit)) = same_codec(kinds) else { return Vec::new() };
    let deep = questions.iter().zip(answers).filter(|(question, _)| question.depth == 32);
    let target = |(question, answers): (&Question, &Vec<Vec<Answer>>)| Target {
        about: format!(
            "{}, depth 32, {} jobs: {} in operations of {}",
            question.what.word(),
            question.jobs,
            kinds[ours],
            kinds[nbdkit]
        ),
        measured: ratio(&answers[ours], &answers[nbdkit]),
        bound: 5.0,
        at_least: true,
        unit: "x",
    };
    deep.map(target).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_of_two_sides_with_the_same_codec() {
        let alike = |words: &str| same_codec(&kinds(&words.split(' ').collect::<Vec<_>>()).unwrap());
        assert_eq!(alike("zram:lz4 nbdkit:zstd ours ours:zstd"), Some((3, 1)));
        assert_eq!(alike("ours:zstd:3 nbdkit:zstd,level=1"), Some((0, 1)));
        assert_eq!(alike("nbdkit:malloc nbdkit:zstd ours:zstd@/a/b ours-ublk:zstd"), Some((3, 1)));
        assert_eq!(alike("zram:zstd nbdkit:zstd ours:lz4"), None);
    }
}
