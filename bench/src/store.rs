//! `store`: what the engine costs beside the codec it uses, and how much memory it holds beside what it stores.
//!
//! | question                                  | compared with                                    | wanted             |
//! |-------------------------------------------|--------------------------------------------------|--------------------|
//! | writing a page (pool full: rewriting)     | LZ4 compressing the same page into a buffer      | <= 1.20 x          |
//! | reading a page                            | LZ4 decompressing the same page from a buffer    | <= 1.25 x          |
//! | two threads writing and reading           | one thread doing the same                        | >= 1.8 x           |
//! | memory the system gave, pool full         | bytes of the objects                             | <= 1.06 x          |
//! | slot tables and span descriptors          | pages stored                                     | <= 16 bytes a page |
//!
//! Pages are those of [`corpus`], memory of real programs. Pages of one repeated word are left out of all times, since
//! no codec runs on them; their share is printed. Codec and store take turns every [`BATCH`] pages, the order swapped
//! each time, and a ratio is one pass over all pages. One thread's times are CPU time of that thread, so that a busy
//! machine disturbs them less; two threads are measured by the clock, and by CPU time beside it, which shows what they
//! cost each other but not what they wait. A first pass that fills an empty pool is shown apart: it pays for the memory
//! that the system gives.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use compcache_store::{PageIndex, Pool, PoolConfig, Read, Store, StoreConfig, Worker};
use compcache_testkit::corpus::{self, Kind, Page};
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
use serde_json::json;

use crate::clock::{cpu_time, now_ns};
use crate::record::Record;
use crate::stat::{Spread, Target};
use crate::table::Table;

/// Pages between turns: 512 KiB, which stay in a second-level cache for both.
const BATCH: usize = 128;
const PAGE_BYTES: usize = 4096;

/// How much is done.
#[derive(Clone, Copy)]
struct Size {
    pages: usize,
    passes: usize,
}

/// One kind of content, measured.
struct Measured {
    kind: &'static str,
    same_filled_share: f64,
    codec_ns: (f64, f64),
    fill: Spread,
    write: Spread,
    read: Spread,
    random_read: Spread,
    threads: Spread,
    cpu_threads: Spread,
    codec_threads: Spread,
    memory: f64,
    ratio: f64,
    metadata_bytes: f64,
}

/// Runs the scenario and prints its tables and targets; with `record`, writes the raw record into that directory.
///
/// # Errors
/// The page images cannot be made, the store fails, or it returns a page that is not what was written.
pub fn run(quick: bool, record: Option<&Path>) -> Result<()> {
    if cfg!(debug_assertions) {
        println!("built without optimisation: the numbers below mean nothing");
    }
    let size = if quick { Size { pages: 2048, passes: 3 } } else { Size { pages: corpus::IMAGE_PAGES, passes: 15 } };
    let mut kept = Record::new("store", json!({"quick": quick, "pages": size.pages, "passes": size.passes}));
    let mut all = Vec::new();
    let mut pages_of_all = Vec::new();
    for kind in Kind::HEAPS.into_iter().chain([Kind::Text, Kind::Elf]) {
        let pages = corpus::load(kind, size.pages).with_context(|| format!("page image of {kind}"))?;
        let measured = measure(kind.name(), &pages, size, &mut kept)?;
        kept.content(kind.name(), pages.len(), measured.same_filled_share);
        if Kind::HEAPS.contains(&kind) {
            pages_of_all.extend(pages);
        }
        all.push(measured);
    }
    let mixed = full_pool("all heaps", &pages_of_all)?;
    print(&all, &mixed);
    let missed = judge(&all, &mixed, &mut kept);
    if let Some(directory) = record {
        println!("record: {}", kept.save(directory)?.display());
    }
    if missed > 0 && !quick {
        bail!("{missed} targets missed");
    }
    Ok(())
}

/// The codec alone, with buffers made once, as a store would use it.
struct Bare {
    table: CompressTable,
    output: Vec<u8>,
    page: Page,
}

impl Bare {
    fn new() -> Bare {
        Bare {
            table: CompressTable::small(),
            output: vec![0; get_maximum_output_size(PAGE_BYTES)],
            page: [0; PAGE_BYTES],
        }
    }

    fn compress(&mut self, page: &Page) -> usize {
        compress_into_with_table(page, &mut self.output, &mut self.table).expect("the output holds any page")
    }

    fn decompress(&mut self, object: &[u8]) {
        // SAFETY: reads the object's bytes alone, and writes to the page alone.
        let length = unsafe {
            let (from, to) = (object.as_ptr().cast(), self.page.as_mut_ptr().cast());
            lz4_sys::LZ4_decompress_safe(from, to, object.len() as i32, PAGE_BYTES as i32)
        };
        assert_eq!(black_box(length), PAGE_BYTES as i32);
    }
}

/// A store with one pool.
struct Subject {
    store: Arc<Store>,
    pool: Arc<Pool>,
}

impl Subject {
    fn new() -> Result<Subject> {
        let store = Store::new(StoreConfig { reserve_bytes: 8 << 30, ..StoreConfig::default() })?;
        let pool = store.create_pool(PoolConfig::default())?;
        Ok(Subject { store, pool })
    }

    fn worker(&self) -> Result<Worker> {
        Ok(Worker::new(&self.store, now_ns)?)
    }
}

fn measure(kind: &'static str, image: &[Page], size: Size, kept: &mut Record) -> Result<Measured> {
    let pages: Vec<Page> = image.iter().filter(|page| !is_same_filled(page)).copied().collect();
    ensure!(pages.len() > 4 * BATCH, "{kind}: only {} pages are not same-filled", pages.len());
    let same_filled_share = 1.0 - pages.len() as f64 / image.len() as f64;
    let mut fill = Vec::new();
    for _ in 0..size.passes.div_ceil(3) {
        let subject = Subject::new()?;
        fill.push(write_pass(&subject, &pages, 0)?.ratio());
    }
    let subject = Subject::new()?;
    write_pass(&subject, &pages, 0)?;
    let shift = pages.len() / 3;
    let (mut writes, mut reads, mut random_reads, mut codec_ns) = (Vec::new(), Vec::new(), Vec::new(), (0.0, 0.0));
    for pass in 0..size.passes {
        // Every pass writes to each index the page of another, so that objects change their size class.
        let turned = (pass + 1) * shift % pages.len();
        let write = write_pass(&subject, &pages, turned)?;
        let read = read_pass(&subject, &pages, turned, false)?;
        let random = read_pass(&subject, &pages, turned, true)?;
        codec_ns.0 += write.bare_ns() / size.passes as f64;
        codec_ns.1 += read.bare_ns() / size.passes as f64;
        kept.run(json!({"kind": kind, "pass": pass, "write": write.json(), "read": read.json(), "random_read": random.json()}));
        writes.push(write.ratio());
        reads.push(read.ratio());
        random_reads.push(random.ratio());
    }
    let rounds = size.passes.div_ceil(2);
    let (mut threads, mut cpu_threads, mut codec_threads) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (clock, cpu) = scaling(|begin| with_store(&subject, &pages, begin))?;
        threads.push(clock);
        cpu_threads.push(cpu);
        codec_threads.push(scaling(|begin| with_codec(&pages, begin))?.0);
    }
    kept.run(json!({"kind": kind, "fill": fill, "two_threads": threads, "two_threads_cpu": cpu_threads, "two_threads_codec": codec_threads}));
    drop(subject);
    let full = full_pool(kind, image)?;
    let spread = |ratios: Vec<f64>| Spread::of(ratios).context("no pass was measured");
    Ok(Measured {
        same_filled_share,
        codec_ns,
        fill: spread(fill)?,
        write: spread(writes)?,
        read: spread(reads)?,
        random_read: spread(random_reads)?,
        threads: spread(threads)?,
        cpu_threads: spread(cpu_threads)?,
        codec_threads: spread(codec_threads)?,
        ..full
    })
}

fn is_same_filled(page: &Page) -> bool {
    page.chunks_exact(8).all(|word| word == &page[..8])
}

/// Time of the codec alone and of the store, over the same pages.
#[derive(Clone, Copy, Default)]
struct Pass {
    bare: Duration,
    store: Duration,
    pages: usize,
}

impl Pass {
    fn ratio(&self) -> f64 {
        self.store.as_secs_f64() / self.bare.as_secs_f64()
    }

    fn bare_ns(&self) -> f64 {
        self.bare.as_secs_f64() * 1e9 / self.pages as f64
    }

    fn json(&self) -> serde_json::Value {
        let each = |time: Duration| time.as_secs_f64() * 1e9 / self.pages as f64;
        json!({"codec_ns": each(self.bare), "store_ns": each(self.store), "ratio": self.ratio()})
    }

    /// Lets both do a batch, the one first whose turn it is.
    fn turn(&mut self, batch: usize, bare: impl FnOnce(), store: impl FnOnce()) {
        if batch.is_multiple_of(2) {
            self.bare += timed(bare);
            self.store += timed(store);
        } else {
            self.store += timed(store);
            self.bare += timed(bare);
        }
    }
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = cpu_time();
    work();
    cpu_time() - start
}

/// Writes page `turned` at index 0, the next at 1, and so on.
fn write_pass(subject: &Subject, pages: &[Page], turned: usize) -> Result<Pass> {
    let (mut worker, mut bare) = (subject.worker()?, Bare::new());
    let mut pass = Pass { pages: pages.len(), ..Pass::default() };
    let mut failed = None;
    let order: Vec<usize> = (0..pages.len()).map(|index| (index + turned) % pages.len()).collect();
    for (batch, sources) in order.chunks(BATCH).enumerate() {
        let codec = || sources.iter().for_each(|source| _ = black_box(bare.compress(&pages[*source])));
        let store = || {
            for (nth, source) in sources.iter().enumerate() {
                let index = PageIndex((batch * BATCH + nth) as u64);
                failed = subject.pool.write(&mut worker, index, &pages[*source]).err().or(failed);
            }
        };
        pass.turn(batch, codec, store);
    }
    failed.map_or(Ok(pass), |error| Err(error.into()))
}

/// Reads what [`write_pass`] wrote, in order or all over the pool, and checks one page of each batch.
fn read_pass(subject: &Subject, pages: &[Page], turned: usize, random: bool) -> Result<Pass> {
    let (mut worker, mut bare) = (subject.worker()?, Bare::new());
    let mut order: Vec<usize> = (0..pages.len()).collect();
    if random {
        fastrand::Rng::with_seed(7).shuffle(&mut order);
    }
    // The codec's objects lie one behind the other, in the order in which the pages are.
    let (mut objects, mut places) = (Vec::new(), Vec::new());
    for index in 0..pages.len() {
        let length = bare.compress(&pages[(index + turned) % pages.len()]);
        places.push(objects.len()..objects.len() + length);
        objects.extend_from_slice(&bare.output[..length]);
    }
    let mut pass = Pass { pages: pages.len(), ..Pass::default() };
    let mut page = [0; PAGE_BYTES];
    let mut wrong = 0;
    for (batch, indexes) in order.chunks(BATCH).enumerate() {
        let codec = || indexes.iter().for_each(|index| bare.decompress(&objects[places[*index].clone()]));
        let store = || {
            for index in indexes {
                let read = subject.pool.read(&mut worker, PageIndex(*index as u64), &mut page);
                wrong += usize::from(read != Ok(Read::Done));
            }
        };
        pass.turn(batch, codec, store);
        let last = indexes[indexes.len() - 1];
        wrong += usize::from(page != pages[(last + turned) % pages.len()]);
    }
    ensure!(wrong == 0, "{wrong} pages did not read as what was written");
    Ok(pass)
}

/// How much more two threads do than one, when each does what the one did: by the clock, and by CPU time.
fn scaling(work: impl Fn(usize) -> Result<()> + Sync) -> Result<(f64, f64)> {
    let barrier = Barrier::new(2);
    let elapsed = |begin| {
        let (start, start_cpu) = (Instant::now(), cpu_time());
        work(begin)?;
        anyhow::Ok((start.elapsed().as_secs_f64(), (cpu_time() - start_cpu).as_secs_f64()))
    };
    let together = |begin| {
        barrier.wait();
        elapsed(begin)
    };
    let one = elapsed(0)?;
    let two = std::thread::scope(|scope| {
        let other = scope.spawn(|| together(1));
        let this = together(0)?;
        let other = other.join().map_err(|_| anyhow::anyhow!("a thread died"))??;
        anyhow::Ok((this.0.max(other.0), this.1.max(other.1)))
    })?;
    Ok((2.0 * one.0 / two.0, 2.0 * one.1 / two.1))
}

/// Half of the pool, written and read: every second leaf of tables, so that threads share the pool but not its pages.
fn with_store(subject: &Subject, pages: &[Page], begin: usize) -> Result<()> {
    let mut worker = subject.worker()?;
    let mut back = [0; PAGE_BYTES];
    for run in (begin * BATCH..pages.len()).step_by(2 * BATCH) {
        let indexes = run..(run + BATCH).min(pages.len());
        for index in indexes.clone() {
            subject.pool.write(&mut worker, PageIndex(index as u64), &pages[index])?;
        }
        for index in indexes {
            ensure!(
                subject.pool.read(&mut worker, PageIndex(index as u64), &mut back)? == Read::Done,
                "a page is lost"
            );
        }
    }
    Ok(())
}

/// The same without a store: what the machine's second CPU is worth.
fn with_codec(pages: &[Page], begin: usize) -> Result<()> {
    let mut bare = Bare::new();
    for page in pages.chunks(BATCH).skip(begin).step_by(2).flatten() {
        let length = bare.compress(page);
        let object = std::mem::take(&mut bare.output);
        bare.decompress(&object[..length]);
        bare.output = object;
    }
    Ok(())
}

/// Memory of a pool that holds `image`, same-filled pages too.
fn full_pool(kind: &'static str, image: &[Page]) -> Result<Measured> {
    let subject = Subject::new()?;
    let mut worker = subject.worker()?;
    subject.pool.write_run(&mut worker, PageIndex(0), image)?;
    let stats = subject.pool.stats();
    let used = subject.store.mem_used_total_bytes();
    let nothing = Spread { median: 0.0, min: 0.0, max: 0.0 };
    // What is neither an object nor a page of arena: slot tables, and the descriptor of each span of 256 KiB.
    let descriptors = used.div_ceil(256 << 10) * 192;
    Ok(Measured {
        kind,
        same_filled_share: stats.same_pages as f64 / image.len() as f64,
        codec_ns: (0.0, 0.0),
        fill: nothing,
        write: nothing,
        read: nothing,
        random_read: nothing,
        threads: nothing,
        cpu_threads: nothing,
        codec_threads: nothing,
        memory: used as f64 / stats.compr_data_size as f64,
        ratio: stats.orig_data_size as f64 / used as f64,
        metadata_bytes: (stats.table_bytes + descriptors) as f64 / image.len() as f64,
    })
}

fn print(all: &[Measured], mixed: &Measured) {
    let mut times = Table::new(&[
        "content",
        "same-filled",
        "lz4 c/d ns",
        "write x codec",
        "filling x codec",
        "read x codec",
        "random read x codec",
        "two threads x one",
        "(by CPU time)",
        "(codec alone)",
    ]);
    for m in all {
        times.line([
            m.kind.to_owned(),
            format!("{:.1} %", m.same_filled_share * 100.0),
            format!("{:.0}/{:.0}", m.codec_ns.0, m.codec_ns.1),
            m.write.to_string(),
            m.fill.to_string(),
            m.read.to_string(),
            m.random_read.to_string(),
            m.threads.to_string(),
            m.cpu_threads.to_string(),
            m.codec_threads.to_string(),
        ]);
    }
    println!("{times}");
    let mut memory =
        Table::new(&["content", "mem_used x compr_data", "orig_data x mem_used", "metadata, bytes a page"]);
    for m in all.iter().chain([mixed]) {
        let cells = [format!("{:.3}", m.memory), format!("{:.2}", m.ratio), format!("{:.2}", m.metadata_bytes)];
        memory.line([m.kind.to_owned()].into_iter().chain(cells));
    }
    println!("{memory}");
}

/// Prints the targets and notes them. Returns how many were missed.
fn judge(all: &[Measured], mixed: &Measured, kept: &mut Record) -> usize {
    let exact = |value: f64| Some(Spread { median: value, min: value, max: value });
    let target = |m: &Measured, what: &str, measured, bound, at_least, unit| Target {
        about: format!("{}: {what}", m.kind),
        measured,
        bound,
        at_least,
        unit,
    };
    let mut targets = Vec::new();
    for m in all.iter().filter(|m| Kind::HEAPS.iter().any(|kind| kind.name() == m.kind)) {
        targets.push(target(m, "write", Some(m.write), 1.20, false, "x codec"));
        targets.push(target(m, "read", Some(m.read), 1.25, false, "x codec"));
        // Where the codec alone does not gain from a second thread, others use the CPUs, and nothing can be said.
        let free = m.codec_threads.median >= 1.8;
        targets.push(target(m, "two threads", free.then_some(m.threads), 1.8, true, "x one"));
    }
    for m in all.iter().chain([mixed]) {
        targets.push(target(m, "memory", exact(m.memory), 1.06, false, "x compr_data_size"));
        targets.push(target(m, "metadata", exact(m.metadata_bytes), 16.0, false, "bytes a page"));
    }
    if all.iter().any(|m| m.codec_threads.median < 1.8) {
        println!("the second CPU is not free: two threads of the codec alone do not reach 1.8 x one either");
    }
    for target in &targets {
        println!("{target}");
        kept.summary(
            json!({"target": target.about, "bound": target.bound, "measured": target.measured, "met": target.met()}),
        );
    }
    targets.iter().filter(|target| target.met() == Some(false)).count()
}
