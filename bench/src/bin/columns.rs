//! Runs the nine columns of IOzone on a file, one after the other, when told to; one line of JSON for each.
//!
//! Whoever starts it writes the name of a column to its standard input and reads the answer, so that he can look at the rest of the machine in
//! between. Timed is reading or writing alone, record by record: what is written is made before, what was read is checked after. Each column opens the
//! file anew, and flushes what it wrote before it answers, which is timed apart.
//!
//! Where a record takes less than a microsecond, so would looking at the clock, and bytes that are compared displace others from the processor's
//! caches: `--whole` times a column that reads from end to end, and checks by reading a second time.

use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::{self, BufRead};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::ptr;
use std::time::{Duration, Instant};

use clap::Parser;
use compcache_worker::columns::{Answer, Column, Through};
use compcache_worker::pattern::Pattern;
use compcache_worker::{PAGE_BYTES, cpu_s};

/// Read and write a file in the nine ways of IOzone, and check every byte.
#[derive(Parser)]
struct Options {
    /// Where the file is made, and the one of the record rewrite; both are removed at the end.
    directory: PathBuf,
    /// Bytes in the file.
    bytes: u64,
    /// Bytes in a record: whole pages, of which the file has a whole number.
    record_bytes: usize,
    /// How it is read and written.
    #[arg(long, value_enum)]
    through: Through,
    /// The pages that are written.
    #[arg(long)]
    image: PathBuf,
    /// A column that reads is timed from its first record to its last, and what it read is then checked by reading it again.
    #[arg(long)]
    whole: bool,
    /// The file stays at the end, and may be there at the beginning: as one `write` leaves it.
    #[arg(long)]
    stays: bool,
}

fn main() {
    if let Err(error) = run(&Options::parse()) {
        eprintln!("columns: {error}");
        std::process::exit(1);
    }
}

fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    if options.record_bytes == 0
        || !options.record_bytes.is_multiple_of(PAGE_BYTES)
        || !options.bytes.is_multiple_of(options.record_bytes as u64)
    {
        return Err(format!("{} bytes are no whole records of whole pages", options.bytes).into());
    }
    let mut worker = Worker {
        options,
        pattern: Pattern::open(&options.image)?,
        buffer: vec![0; options.record_bytes],
        generation: u32::from(options.stays && options.directory.join("file").exists()),
        passes: 0,
        took: Duration::ZERO,
    };
    for line in io::stdin().lock().lines() {
        let answer = worker.column(line?.parse()?)?;
        println!("{}", serde_json::to_string(&answer)?);
    }
    if options.stays {
        return Ok(());
    }
    for name in ["file", "record"] {
        match fs::remove_file(options.directory.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}

struct Worker<'o> {
    options: &'o Options,
    pattern: Pattern,
    buffer: Vec<u8>,
    /// How often all of the file has been written.
    generation: u32,
    /// Columns that were run before.
    passes: u64,
    /// Of the column under way.
    took: Duration,
}

impl Worker<'_> {
    fn column(&mut self, column: Column) -> Result<Answer, Box<dyn std::error::Error>> {
        let bytes = self.options.bytes;
        let is_new = matches!(column, Column::Write | Column::RecordRewrite);
        let name = if column == Column::RecordRewrite { "record" } else { "file" };
        let path = self.options.directory.join(name);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(column.writes()).create(is_new).truncate(is_new).open(&path)?;
        let target = match self.options.through {
            Through::ReadWrite => Target::File(&file),
            Through::Mmap => {
                if is_new {
                    file.set_len(bytes)?;
                }
                Target::Mapping(Mapping::new(&file, bytes as usize, column.writes())?)
            }
        };
        if column.writes() && column != Column::RecordRewrite {
            self.generation += 1;
        }
        self.took = Duration::ZERO;
        let order = column.order((bytes / self.options.record_bytes as u64) as u32, self.passes);
        self.passes += 1;
        let whole = match self.options.whole && !column.writes() {
            true => Some(self.read_all(&target, &order)?),
            false => None,
        };
        for (turn, record) in (1..).zip(order) {
            match column {
                Column::RecordRewrite => self.write(&target, record, turn)?,
                _ if column.writes() => self.write(&target, record, self.generation)?,
                _ => self.read(&target, record, self.generation)?,
            }
        }
        let (took, cpu_s) = whole.map_or((self.took, None), |(took, cpu_s)| (took, Some(cpu_s)));
        let seconds = took.as_secs_f64();
        let started = Instant::now();
        target.flush(&file)?;
        let flush_s = started.elapsed().as_secs_f64();
        if column == Column::RecordRewrite {
            self.read(&target, 0, (bytes / self.options.record_bytes as u64) as u32)?;
        }
        Ok(Answer { column, bytes, seconds, cpu_s, flush_s })
    }

    fn write(&mut self, target: &Target<'_>, record: u32, generation: u32) -> io::Result<()> {
        let at = u64::from(record) * self.buffer.len() as u64;
        self.pattern.fill(at / PAGE_BYTES as u64, generation, &mut self.buffer);
        let started = Instant::now();
        target.write(at, &self.buffer)?;
        self.took += started.elapsed();
        Ok(())
    }

    /// Reads these records and checks none. Returns how long all of them took, and how many seconds of CPU.
    fn read_all(&mut self, target: &Target<'_>, order: &[u32]) -> io::Result<(Duration, f64)> {
        let used_s = || cpu_s().0 + cpu_s().1;
        let (started, used_before_s) = (Instant::now(), used_s());
        for &record in order {
            target.read(u64::from(record) * self.buffer.len() as u64, &mut self.buffer)?;
            // It is read although nobody looks at it.
            black_box(&mut self.buffer);
        }
        Ok((started.elapsed(), used_s() - used_before_s))
    }

    fn read(&mut self, target: &Target<'_>, record: u32, generation: u32) -> Result<(), Box<dyn std::error::Error>> {
        let at = u64::from(record) * self.buffer.len() as u64;
        let started = Instant::now();
        target.read(at, &mut self.buffer)?;
        self.took += started.elapsed();
        Ok(self.pattern.check(at / PAGE_BYTES as u64, generation, &self.buffer)?)
    }
}

/// The file, one way or the other.
enum Target<'f> {
    File(&'f File),
    Mapping(Mapping),
}

impl Target<'_> {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        match self {
            Target::File(file) => file.read_exact_at(into, at),
            Target::Mapping(mapping) => {
                let from = mapping.at(at, into.len());
                // SAFETY: `at` has checked that so much is mapped there, and the buffer is not in the mapping.
                unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
                Ok(())
            }
        }
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        match self {
            Target::File(file) => file.write_all_at(from, at),
            Target::Mapping(mapping) => {
                let to = mapping.at(at, from.len());
                // SAFETY: as in `read`; columns that write map for writing, and no reference into the mapping exists.
                unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
                Ok(())
            }
        }
    }

    fn flush(&self, file: &File) -> io::Result<()> {
        match self {
            Target::File(_) => file.sync_all(),
            Target::Mapping(mapping) => mapping.sync(),
        }
    }
}

/// A shared mapping of a file. A page that cannot be read or written ends the process (SIGBUS), which the bench sees.
struct Mapping {
    base: *mut u8,
    bytes: usize,
}

impl Mapping {
    fn new(file: &File, bytes: usize, writes: bool) -> io::Result<Mapping> {
        let access = libc::PROT_READ | if writes { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping of a file that is open here, at an address that the kernel chooses.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        match base == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(Mapping { base: base.cast(), bytes }),
        }
    }

    fn at(&self, at: u64, length: usize) -> *mut u8 {
        assert!(at as usize + length <= self.bytes);
        // SAFETY: the assertion keeps the result inside the mapping.
        unsafe { self.base.add(at as usize) }
    }

    fn sync(&self) -> io::Result<()> {
        // SAFETY: the whole of a mapping of ours.
        match unsafe { libc::msync(self.base.cast(), self.bytes, libc::MS_SYNC) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: a mapping of ours, to which nothing refers any more.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}
