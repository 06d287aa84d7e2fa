//! How long each bio of one block device took, as the kernel traced it.
//!
//! An instance of the kernel's tracing of its own notes when a bio is submitted (`block_bio_queue`) and when it is
//! completed: by itself (`block_bio_complete`, zram) or with the request that it was a part of (`block_rq_complete`, loop
//! devices). Times are of the processor's counter, because the text of a trace shows other clocks
//! in whole microseconds only; two marks, at the beginning and at the end, say how long a tick is.
//!
//! Tracing costs some hundred nanoseconds an event, on every side alike. Events that the buffer had no room for are
//! counted, and make a trace worthless.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::baseline::{read_trimmed, write};
use crate::device::mount;
use crate::session::{NAME, Session, Undo};

const TRACEFS: &str = "/sys/kernel/tracing";
const INSTANCES: &str = "/sys/kernel/tracing/instances";
const BUFFER_KILOBYTES: &str = "98304";
const MARK: &str = "compcache-bench-mark";

/// A trace that is being taken; gone when the session undoes it.
pub struct Trace {
    directory: PathBuf,
    begun: Instant,
}

/// Nanoseconds of each completed bio, reads and writes apart.
#[derive(Default)]
pub struct Bios {
    /// Reads.
    pub reads: Vec<u64>,
    /// Writes.
    pub writes: Vec<u64>,
}

impl Trace {
    /// Begins to trace the bios of `device`. Mounts tracefs for as long as the session lasts where nobody has.
    ///
    /// # Errors
    /// This kernel or this user cannot trace.
    pub fn begin(session: &Session, device: &Path) -> Result<Trace> {
        if !Path::new(INSTANCES).exists() {
            let tracefs = Path::new("tracefs");
            mount::on(session, tracefs, Path::new(TRACEFS), "tracefs", "").context("this machine does not trace")?;
        }
        let directory = Path::new(INSTANCES).join(session.unique_name());
        session.note(Undo::Trace(directory.clone()))?;
        fs::create_dir(&directory).context("this machine does not trace (tracefs, root)")?;
        let name = device.file_name().context("no device name")?.to_string_lossy().into_owned();
        let number = read_trimmed(format!("/sys/block/{name}/dev"))?;
        let (major, minor) = number.split_once(':').context("MAJOR:MINOR")?;
        let dev = major.parse::<u64>()? << 20 | minor.parse::<u64>()?;
        write(directory.join("trace_clock"), "x86-tsc").context("a clock of the processor")?;
        write(directory.join("buffer_size_kb"), BUFFER_KILOBYTES)?;
        for event in ["block_bio_queue", "block_bio_complete", "block_rq_complete"] {
            let event = directory.join("events/block").join(event);
            write(event.join("filter"), &format!("dev == {dev}"))?;
            write(event.join("enable"), "1")?;
        }
        write(directory.join("trace_marker"), MARK)?;
        Ok(Trace { directory, begun: Instant::now() })
    }

    /// Ends it, and says what there was.
    ///
    /// # Errors
    /// The trace cannot be read, or is not whole.
    pub fn end(self) -> Result<Bios> {
        write(self.directory.join("trace_marker"), MARK)?;
        let elapsed_ns = self.begun.elapsed().as_nanos() as f64;
        write(self.directory.join("tracing_on"), "0")?;
        self.check_whole()?;
        let text = BufReader::new(File::open(self.directory.join("trace"))?);
        let lines: Vec<Line> = text.lines().map_while(Result::ok).filter_map(|line| Line::parse(&line)).collect();
        let marks: Vec<u64> = lines.iter().filter(|line| line.event == Event::Mark).map(|line| line.ticks).collect();
        let [first, last] = marks[..] else { bail!("the trace has {} marks", marks.len()) };
        Ok(pair(&lines, elapsed_ns / (last - first) as f64))
    }

    fn check_whole(&self) -> Result<()> {
        for cpu in fs::read_dir(self.directory.join("per_cpu"))?.flatten() {
            let stats = fs::read_to_string(cpu.path().join("stats"))?;
            let lost = stats.lines().filter(|line| line.starts_with("overrun:") || line.starts_with("dropped events:"));
            if lost.into_iter().any(|line| !line.ends_with(": 0")) {
                bail!("the trace is not whole: {stats}");
            }
        }
        Ok(())
    }
}

/// The instances that carry the bench's name.
pub fn find_by_name() -> Vec<PathBuf> {
    let all = fs::read_dir(INSTANCES).into_iter().flatten().flatten();
    all.filter(|one| one.file_name().to_string_lossy().starts_with(&format!("{NAME}."))).map(|one| one.path()).collect()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Mark,
    Queued,
    Completed,
}

/// A line of a trace.
#[derive(Debug, PartialEq)]
struct Line {
    ticks: u64,
    event: Event,
    is_read: bool,
    sector: u64,
    sectors: u64,
}

impl Line {
    /// ```text
    ///  scan-812  [001] .....  123456789: block_bio_queue: 7,0 RM 1024 + 8 [scan]
    ///  scan-812  [001] .....  123456789: block_rq_complete: 7,0 RM () 1024 + 8 none,0,0 [0]
    /// ```
    fn parse(line: &str) -> Option<Line> {
        let names = ["block_bio_queue: ", "block_bio_complete: ", "block_rq_complete: ", "tracing_mark_write: "];
        let (name, (before, rest)) = names.iter().find_map(|name| Some((*name, line.split_once(name)?)))?;
        let ticks = before.trim_end().trim_end_matches(':').rsplit(' ').next()?.parse().ok()?;
        if name == names[3] {
            let mark = Line { ticks, event: Event::Mark, is_read: false, sector: 0, sectors: 0 };
            return rest.contains(MARK).then_some(mark);
        }
        let mut words = rest.split_whitespace().skip(1);
        let kind = words.next()?;
        let is_read = kind.contains('R');
        if !is_read && !kind.contains('W') {
            return None;
        }
        let mut words = words.skip_while(|word| word.starts_with('('));
        let sector = words.next()?.parse().ok()?;
        let sectors = words.nth(1)?.parse().ok()?;
        let event = if name == names[0] { Event::Queued } else { Event::Completed };
        Some(Line { ticks, event, is_read, sector, sectors })
    }
}

/// Finds for each completion what was submitted within its sectors.
fn pair(lines: &[Line], ns_per_tick: f64) -> Bios {
    // What is in flight, by direction and first sector.
    let mut open: BTreeMap<(bool, u64), u64> = BTreeMap::new();
    let mut bios = Bios::default();
    for line in lines {
        match line.event {
            Event::Mark => {}
            Event::Queued => drop(open.insert((line.is_read, line.sector), line.ticks)),
            Event::Completed => {
                let within = (line.is_read, line.sector)..(line.is_read, line.sector + line.sectors);
                while let Some((&place, &ticks)) = open.range(within.clone()).next() {
                    open.remove(&place);
                    let ns = (line.ticks.saturating_sub(ticks) as f64 * ns_per_tick) as u64;
                    if line.is_read { bios.reads.push(ns) } else { bios.writes.push(ns) }
                }
            }
        }
    }
    bios
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bios_end_by_themselves_or_with_the_request_they_became() {
        let text = "\
 scan-812     [001] .....  1000: tracing_mark_write: compcache-bench-mark
 scan-812     [001] .....  2000: block_bio_queue: 7,0 R 1024 + 8 [scan]
 scan-812     [001] .....  2100: block_bio_queue: 7,0 R 1032 + 8 [scan]
 scan-812     [001] .....  2100: block_bio_queue: 7,0 WS 4096 + 16 [scan]
 kworker/0:1  [000] .....  2600: block_rq_complete: 7,0 R () 1024 + 16 none,0,0 [0]
 kworker/0:1  [000] .....  3100: block_bio_complete: 7,0 WS 4096 + 16 [0]
 scan-812     [001] .....  3200: block_bio_queue: 7,0 FN 0 + 0 [scan]
 scan-812     [001] .....  3300: block_bio_complete: 7,0 R 9 + 8 [0]";
        let lines: Vec<Line> = text.lines().filter_map(Line::parse).collect();
        assert_eq!((lines.len(), lines[0].ticks), (7, 1000));
        let bios = pair(&lines, 0.5);
        assert_eq!((bios.reads, bios.writes), (vec![300, 250], vec![500]));
    }
}
