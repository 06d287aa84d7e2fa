//! Scenario `scan`: every page of a memory four times as large as its cap, again and again.
//!
//! The question: how long does a page take that has to come back while another has to leave, next to the kernel's own
//! compressed memory? Real content and the published same-filled one apart; sequential and random; on all CPUs and
//! pinned to one, where nobody compresses in the background for free.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use compcache_testkit::corpus::{self, Kind};
use serde::Serialize;
use serde_json::json;

use crate::compare::{Answers, Comparison};
use crate::laps;
use crate::record::Record;
use crate::run::Job;
use crate::side::{Bench, Side};
use crate::stat::Target;

/// What `scan` can be asked on the command line. Without any of it, the questions of [`standard`].
#[derive(Args, Clone, Debug, Serialize)]
pub struct Options {
    /// Kinds of content: python, node, jvm, compiler, database, text, elf, random, same.
    #[arg(long, value_delimiter = ',')]
    content: Vec<String>,
    /// sequential, backward, stride, random.
    #[arg(long, value_delimiter = ',')]
    order: Vec<String>,
    /// read, write, shift: what is done to each page. One word is read; read and written; and all others moved by a word.
    #[arg(long, value_delimiter = ',')]
    touch: Vec<String>,
    /// all, one.
    #[arg(long, value_delimiter = ',')]
    cpus: Vec<String>,
    /// ours, ours:CODEC, swap:CODEC (on a disk of ours), zram:CODEC, zswap:CODEC, disk, uncapped. The others are divided by the first.
    #[arg(long, value_delimiter = ',')]
    sides: Vec<String>,
    /// MiB of memory.
    #[arg(long)]
    megabytes: Option<usize>,
    /// MiB that may be resident.
    #[arg(long)]
    cap: Option<u64>,
    /// Passes in a run.
    #[arg(long)]
    passes: Option<u32>,
}

/// One question.
#[derive(Clone, Serialize)]
struct Question {
    content: String,
    order: String,
    touch: String,
    one_cpu: bool,
    #[serde(skip)]
    sides: Vec<Side>,
}

const EVERY_SIDE: [&str; 5] = ["ours", "zram:lz4", "zram:lzo-rle", "zswap:lzo", "disk"];
const ZRAM_SIDES: [&str; 3] = ["ours", "zram:lz4", "zram:lzo-rle"];

/// Runs the scenario.
///
/// # Errors
/// A run failed, or returned wrong bytes; content could not be made.
pub fn run(bench: &Bench, options: &Options, quick: bool, rounds: usize, record: Option<&Path>) -> Result<()> {
    let megabytes = options.megabytes.unwrap_or(if quick { 48 } else { 256 });
    let cap_mb = options.cap.unwrap_or(if quick { 16 } else { 64 });
    let passes = options.passes.unwrap_or(if quick { 2 } else { 4 });
    let settings = json!({"megabytes": megabytes, "cap_mb": cap_mb, "passes": passes, "rounds": rounds});
    let mut comparison = Comparison::new(bench, bench.record("scan", settings), rounds);
    let mut targets = Vec::new();
    for question in questions(options, quick)? {
        let Some(share) = note_content(&mut comparison.record, &question.content) else { continue };
        let cpus = if question.one_cpu { "one CPU" } else { "all CPUs" };
        let Question { content, order, touch, .. } = &question;
        println!(
            "\nscan {megabytes} MiB in {cap_mb} MiB, {order}, {touch}, {content} ({share:.1} % same-filled), {cpus}, {rounds} rounds"
        );
        let content = content_argument(content)?;
        let words =
            [&megabytes.to_string(), &passes.to_string(), "--order", order, "--touch", touch, "--content", &content];
        let mut job = worker("scan", &words.map(String::from))?;
        job.pin = question.one_cpu.then_some(0);
        let answers = comparison.ask(&json!(question), &question.sides, cap_mb << 20, &job);
        let printed = laps::print(&answers);
        comparison.record.summary(json!({"question": question, "table": printed}));
        targets.extend(targets_of(&question, &answers));
    }
    print_targets(&targets);
    comparison.finish(Ok(()), record)
}

/// The questions on the command line, or the standard ones.
fn questions(options: &Options, quick: bool) -> Result<Vec<Question>> {
    if options.content.is_empty() && options.order.is_empty() && options.touch.is_empty() && options.cpus.is_empty() {
        let mut all = standard(quick);
        if !options.sides.is_empty() {
            let sides = parse_sides(&options.sides)?;
            all.iter_mut().for_each(|question| question.sides = sides.clone());
        }
        return Ok(all);
    }
    let or = |given: &[String], default: &[&str]| -> Vec<String> {
        if given.is_empty() { default.iter().map(|word| word.to_string()).collect() } else { given.to_vec() }
    };
    let sides = parse_sides(&or(&options.sides, &EVERY_SIDE))?;
    let mut all = Vec::new();
    for content in or(&options.content, &["python"]) {
        for order in or(&options.order, &["sequential"]) {
            for touch in or(&options.touch, &["write"]) {
                for cpus in or(&options.cpus, &["all"]) {
                    let (content, order, touch, sides) = (content.clone(), order.clone(), touch.clone(), sides.clone());
                    all.push(Question { content, order, touch, one_cpu: cpus == "one", sides });
                }
            }
        }
    }
    Ok(all)
}

fn standard(quick: bool) -> Vec<Question> {
    let question = |content: &str, order: &str, one_cpu, sides: &[&str]| Question {
        content: content.to_owned(),
        order: order.to_owned(),
        touch: "write".to_owned(),
        one_cpu,
        sides: Side::list(sides),
    };
    let mut all = vec![
        question("python", "sequential", false, &EVERY_SIDE),
        question("python", "random", false, &EVERY_SIDE),
        question("python", "sequential", true, &ZRAM_SIDES),
        question("python", "random", true, &ZRAM_SIDES),
        question("same", "sequential", false, &EVERY_SIDE),
    ];
    if !quick {
        let others = ["node", "jvm", "compiler", "database"];
        all.extend(others.map(|content| question(content, "sequential", false, &ZRAM_SIDES[..2])));
        all.push(question("python", "backward", false, &ZRAM_SIDES[..2]));
        all.push(question("python", "stride", false, &ZRAM_SIDES[..2]));
        // What is only read, and what is written to all over, costs us less and more.
        for touch in ["read", "shift"] {
            let questions = [false, true].map(|one_cpu| question("python", "sequential", one_cpu, &ZRAM_SIDES[..2]));
            all.extend(questions.map(|question| Question { touch: touch.to_owned(), ..question }));
        }
    }
    all
}

fn targets_of(question: &Question, answers: &Answers) -> Vec<Target> {
    let ours = question.sides.iter().any(|side| matches!(side, Side::Ours(_)));
    if !ours || question.content != "python" || question.touch != "write" {
        return Vec::new();
    }
    let bound = match (question.order.as_str(), question.one_cpu) {
        ("sequential", false) => 4.0,
        ("sequential", true) => 2.5,
        ("random", _) => 1.2,
        _ => return Vec::new(),
    };
    let place = format!("{} on {}", question.order, if question.one_cpu { "one CPU" } else { "all CPUs" });
    let mut all = vec![Target {
        about: format!("{place}, times faster than zram:lz4"),
        measured: answers.ratio_of("zram:lz4", "ours:lz4", laps::later_us),
        bound,
        at_least: true,
        unit: "x",
    }];
    if !question.one_cpu {
        all.push(Target {
            about: format!("{place}, total memory over that of zram:lz4"),
            measured: answers.ratio_of("ours:lz4", "zram:lz4", laps::total_bytes),
            bound: 1.0,
            at_least: false,
            unit: "x",
        });
    }
    all
}

/// Reads the words of `--sides`.
pub fn parse_sides(words: &[String]) -> Result<Vec<Side>> {
    words.iter().map(|word| word.parse().map_err(anyhow::Error::msg)).collect()
}

/// Prints targets, met or missed, under a heading.
pub fn print_targets(targets: &[Target]) {
    if !targets.is_empty() {
        println!("\ntargets");
    }
    targets.iter().for_each(|target| println!("{target}"));
}

/// A job of one of the worker programs, which lie beside this one.
///
/// # Errors
/// It has not been built.
pub fn worker(name: &str, arguments: &[String]) -> Result<Job> {
    let path: PathBuf = std::env::current_exe()?.with_file_name(name);
    path.metadata()
        .with_context(|| format!("{} is not there: cargo build --release -p compcache-bench", path.display()))?;
    let mut job = Job::new([path]);
    job.words.extend(arguments.iter().map(Into::into));
    Ok(job)
}

/// What the worker is told: the image's path, so that it is not the worker who makes it.
///
/// # Errors
/// The image cannot be made.
pub fn content_argument(content: &str) -> Result<String> {
    match content.parse::<Kind>() {
        Ok(kind) => Ok(corpus::image(kind)?.to_string_lossy().into_owned()),
        Err(_) => Ok(content.to_owned()),
    }
}

/// Notes what the content is. Returns the percentage of its pages that are same-filled; none, and says why, when this
/// machine cannot make it.
pub fn note_content(record: &mut Record, content: &str) -> Option<f64> {
    let pages = match content.parse::<Kind>() {
        Ok(kind) => corpus::load(kind, corpus::IMAGE_PAGES),
        Err(_) if content.starts_with("same") => Ok(vec![[0; compcache_testkit::PAGE_BYTES]]),
        Err(_) => corpus::load_file(Path::new(content), corpus::IMAGE_PAGES),
    };
    match pages {
        Ok(pages) => {
            let share = corpus::same_filled_share(&pages);
            record.content(content, pages.len(), share);
            Some(share * 100.0)
        }
        Err(error) => {
            println!("\n{content}: not here: {error}");
            None
        }
    }
}
