//! A block device that keeps its contents in RAM, of each kind, for one run.
//!
//! | written          | what it is                                                                                     |
//! |------------------|------------------------------------------------------------------------------------------------|
//! | `ram`            | nothing compressed: a file on a tmpfs, under a loop device                                     |
//! | `brd`            | the same by the kernel's brd: `/dev/ram0`                                                      |
//! | `zram:CODEC`     | the kernel's zram                                                                              |
//! | `nbdkit:CODEC`   | nbdkit's memory plugin with that allocator, its NBD export made a file by nbdfuse, under a loop device |
//! | `ours[:CODEC]`   | `compcache serve` with a disk over FUSE and a loop device                                      |
//! | `ours-ublk[:CODEC]` | the same disk over ublk                                                                     |
//! | `ours:CODEC@PATH`| `ours`, of another binary: one version beside another                                          |
//! | `disk`           | not RAM: a file on the machine's disk, under a loop device                                     |
//!
//! Copies between the caller's pages and where the bytes are kept, compression apart, with direct I/O: none for zram; one
//! for `ram`, `brd`, `ours` and `disk`; three for `nbdkit` (FUSE, and in and out of a socket). Loop devices all have direct I/O.
//!
//! What is set up is noted in the [`Session`] and undone when the [`Device`] is dropped. [`Device::metered`] says what a
//! piece of work cost: by the clock, and in CPU time of those who asked, of the process that serves, and of the whole
//! machine, in which the kernel's own threads are, and whatever else runs.

pub mod brd;
pub mod mount;
pub mod process;
mod server;

use std::cell::Cell;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use crate::baseline::{Held, loop_device, zram};
use crate::ours;
use crate::session::{Session, Undo};
use process::{Process, ticks_a_second};
pub use server::Server;

/// Which kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A RAM disk.
    Ram,
    /// The kernel's own RAM disk.
    Brd,
    /// The kernel's, with this compressor.
    Zram(String),
    /// nbdkit's, with this allocator.
    Nbdkit(String),
    /// Ours.
    Ours {
        /// Its codec.
        codec: String,
        /// How the kernel gets to it.
        over: Over,
        /// Not the binary under test but this one.
        binary: Option<PathBuf>,
    },
    /// A disk.
    Disk,
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(word: &str) -> Result<Kind, String> {
        let (word, binary) = match word.split_once('@') {
            Some((word, binary)) => (word, Some(PathBuf::from(binary))),
            None => (word, None),
        };
        let kind = match word.split_once(':').unwrap_or((word, "")) {
            ("ram", "") => Kind::Ram,
            ("brd", "") => Kind::Brd,
            ("disk", "") => Kind::Disk,
            ("zram", codec) if !codec.is_empty() => Kind::Zram(codec.to_owned()),
            ("nbdkit", codec) if !codec.is_empty() => Kind::Nbdkit(codec.to_owned()),
            (ours @ ("ours" | "ours-ublk"), codec) => {
                let codec = if codec.is_empty() { "lz4" } else { codec }.to_owned();
                let over = if ours == "ours" { Over::Loop } else { Over::Ublk };
                return Ok(Kind::Ours { codec, over, binary });
            }
            _ => {
                let all = "ram, brd, zram:CODEC, nbdkit:CODEC, ours[:CODEC], ours-ublk[:CODEC], disk";
                return Err(format!("{word:?} is none of {all}"));
            }
        };
        if binary.is_some() { Err(format!("{word} has no binary of ours")) } else { Ok(kind) }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Ram => f.pad("ram"),
            Kind::Brd => f.pad("brd"),
            Kind::Zram(codec) => f.pad(&format!("zram:{codec}")),
            Kind::Nbdkit(codec) => f.pad(&format!("nbdkit:{codec}")),
            Kind::Ours { codec, over, binary: None } => f.pad(&format!("ours{}:{codec}", over.suffix())),
            Kind::Ours { codec, over, binary: Some(path) } => {
                f.pad(&format!("ours{}:{codec}@{}", over.suffix(), path.display()))
            }
            Kind::Disk => f.pad("disk"),
        }
    }
}

/// A transport of ours that makes a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// FUSE and a loop device.
    Loop,
    /// ublk.
    Ublk,
}

impl Over {
    /// What is added to the word for a side.
    pub fn suffix(self) -> &'static str {
        match self {
            Over::Loop => "",
            Over::Ublk => "-ublk",
        }
    }

    /// As the server calls it.
    pub fn transport(self) -> &'static str {
        match self {
            Over::Loop => "loop",
            Over::Ublk => "ublk",
        }
    }
}

/// Reads a list of words.
///
/// # Errors
/// One of them is no kind.
pub fn kinds<W: AsRef<str>>(words: &[W]) -> Result<Vec<Kind>> {
    words.iter().map(|word| word.as_ref().parse().map_err(anyhow::Error::msg)).collect()
}

/// A device that is set up; undone when it is dropped.
pub struct Device<'s> {
    session: &'s Session,
    mark: usize,
    path: PathBuf,
    directory: PathBuf,
    keeper: Keeper,
}

/// Who keeps the contents. Processes are ended by the journal first, and collected when this is dropped.
enum Keeper {
    Kernel,
    Zram(u32),
    Processes(Vec<Process>),
    Server(Box<Server>),
}

/// What a piece of work cost.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cost {
    /// Seconds by the clock.
    pub wall_s: f64,
    /// CPU seconds of the programs that were run meanwhile and waited for.
    pub client_cpu_s: f64,
    /// CPU seconds of the processes that serve the device.
    pub server_cpu_s: f64,
    /// CPU seconds of the whole machine, whoever took them.
    pub machine_cpu_s: f64,
}

impl<'s> Device<'s> {
    /// Sets a device of `bytes` bytes up; `compcache` is the binary under test.
    ///
    /// # Errors
    /// Something is missing or in use; what had been set up is undone.
    pub fn set_up(session: &'s Session, kind: &Kind, bytes: u64, compcache: &Path) -> Result<Device<'s>> {
        Device::set_up_as(session, kind, bytes, compcache, &Value::Null)
    }

    /// As [`Device::set_up`]; a disk of ours is made as the fields of `wanted` say.
    ///
    /// # Errors
    /// As there.
    pub fn set_up_as(
        session: &'s Session,
        kind: &Kind,
        bytes: u64,
        compcache: &Path,
        wanted: &Value,
    ) -> Result<Device<'s>> {
        let mark = session.mark();
        let directory = new_directory(session)?;
        let mut device = Device { session, mark, path: PathBuf::new(), directory, keeper: Keeper::Kernel };
        match kind {
            Kind::Ram => {
                let point = device.directory.join("tmpfs");
                mount::on(session, Path::new("none"), &point, "tmpfs", &format!("size={}", bytes + (1 << 20)))?;
                device.path = device.over_new_file(&point.join("disk"), bytes)?;
            }
            Kind::Brd => device.path = brd::take(session, bytes)?,
            Kind::Disk => device.path = device.over_new_file(&device.directory.join("disk"), bytes)?,
            Kind::Zram(codec) => {
                let number = zram::take(session, codec, bytes)?;
                device.keeper = Keeper::Zram(number);
                device.path = PathBuf::from(format!("/dev/zram{number}"));
            }
            Kind::Nbdkit(allocator) => device.set_up_nbdkit(allocator, bytes)?,
            Kind::Ours { codec, over, binary } => {
                let compcache = binary.as_deref().unwrap_or(compcache);
                let started = Server::start(session, &device.directory, compcache, (codec, *over), bytes, wanted);
                let (server, path) = ours::step(ours::disk_needs(*over), started)?;
                device.keeper = Keeper::Server(Box::new(server));
                device.path = path;
            }
        }
        Ok(device)
    }

    /// `/dev/...`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it holds; all zero where nobody says.
    pub fn held(&self) -> Held {
        match &self.keeper {
            Keeper::Zram(number) => zram::held(*number),
            Keeper::Server(server) => server.held(),
            Keeper::Kernel | Keeper::Processes(_) => Held::default(),
        }
    }

    /// The server, when it is ours.
    pub fn server(&self) -> Option<&Server> {
        match &self.keeper {
            Keeper::Server(server) => Some(server),
            _ => None,
        }
    }

    /// Makes an ext4 on it and mounts it with these options of its. Returns where.
    ///
    /// # Errors
    /// There is no mkfs.ext4, or one of the two failed.
    pub fn with_ext4(&self, options: &str) -> Result<PathBuf> {
        mount::make_ext4(&self.path)?;
        let point = self.directory.join("ext4");
        mount::on(self.session, &self.path, &point, "ext4", options)?;
        Ok(point)
    }

    /// Does `work`, and says what it cost.
    pub fn metered<T>(&self, work: impl FnOnce() -> T) -> (T, Cost) {
        let before = (children_cpu_s(), self.server_cpu_s(), machine_cpu_s());
        let started = Instant::now();
        let result = work();
        let wall_s = started.elapsed().as_secs_f64();
        let cost = Cost {
            wall_s,
            client_cpu_s: children_cpu_s() - before.0,
            server_cpu_s: self.server_cpu_s() - before.1,
            machine_cpu_s: machine_cpu_s() - before.2,
        };
        (result, cost)
    }

    fn server_cpu_s(&self) -> f64 {
        match &self.keeper {
            Keeper::Kernel | Keeper::Zram(_) => 0.0,
            Keeper::Processes(all) => all.iter().map(Process::cpu_s).sum(),
            Keeper::Server(server) => server.process.cpu_s(),
        }
    }

    fn over_new_file(&self, file: &Path, bytes: u64) -> Result<PathBuf> {
        loop_device::make_file(file, bytes)?;
        loop_device::attach(self.session, file)
    }

    fn set_up_nbdkit(&mut self, allocator: &str, bytes: u64) -> Result<()> {
        let socket = self.directory.join("nbd.sock");
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.args(["--foreground", "--unix"]).arg(&socket);
        nbdkit.arg("memory").arg(format!("size={bytes}")).arg(format!("allocator={allocator}"));
        let mut nbdkit = Process::start(self.session, &self.directory, nbdkit)?;
        nbdkit.wait_until(|| socket.exists())?;
        let point = self.directory.join("nbdfuse");
        fs::create_dir_all(&point)?;
        self.session.note(Undo::Mount(point.clone()))?;
        let file = point.join("disk");
        let mut nbdfuse = Command::new("nbdfuse");
        nbdfuse.arg(&file).arg("--unix").arg(&socket);
        let mut nbdfuse = Process::start(self.session, &self.directory, nbdfuse)?;
        nbdfuse.wait_until(|| file.exists())?;
        // Asked to end, nbdfuse unmounts; when it was killed, this does.
        self.keeper = Keeper::Processes(vec![nbdfuse, nbdkit]);
        self.path = loop_device::attach(self.session, &file)?;
        Ok(())
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        self.session.undo_to(self.mark);
    }
}

/// Devices that are there at the same time, taken down in the opposite order.
pub struct Devices<'s>(Vec<(Kind, Device<'s>)>);

impl<'s> Devices<'s> {
    /// Sets up those that this machine can have; says which it cannot, and why.
    ///
    /// # Errors
    /// One of ours failed.
    pub fn set_up(session: &'s Session, kinds: &[Kind], bytes: u64, compcache: &Path) -> Result<Devices<'s>> {
        let mut devices = Devices(Vec::new());
        for kind in kinds {
            match Device::set_up(session, kind, bytes, compcache) {
                Ok(device) => devices.0.push((kind.clone(), device)),
                Err(error) if ours::has_failed(&error) => return Err(error.context(kind.to_string())),
                Err(error) => println!("  {kind}: not here: {error:#}"),
            }
        }
        Ok(devices)
    }

    /// What they are, in the order in which they were asked for.
    pub fn kinds(&self) -> Vec<Kind> {
        self.0.iter().map(|(kind, _)| kind.clone()).collect()
    }

    /// The one at `nth`.
    pub fn at(&self, nth: usize) -> &Device<'s> {
        &self.0[nth].1
    }

    /// Their numbers, turned round every second round.
    pub fn order(&self, round: usize) -> Vec<usize> {
        let numbers = 0..self.0.len();
        if round % 2 == 1 { numbers.rev().collect() } else { numbers.collect() }
    }
}

impl Drop for Devices<'_> {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

fn new_directory(session: &Session) -> Result<PathBuf> {
    thread_local! { static MADE: Cell<u32> = const { Cell::new(0) } }
    let nth = MADE.replace(MADE.get() + 1);
    let directory = session.directory().join(format!("device.{nth}"));
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    Ok(directory)
}

/// CPU seconds of all children that have been waited for.
fn children_cpu_s() -> f64 {
    // SAFETY: a `rusage` of zeroes is a valid value, and getrusage(2) writes one where the pointer says.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// CPU seconds of the machine since it started: all that is not idle, waiting, or taken by the host.
pub fn machine_cpu_s() -> f64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    // cpu  user nice system idle iowait irq softirq steal ...
    let fields = text.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let ticks = fields.enumerate().filter(|(nth, _)| matches!(nth, 0..=2 | 5 | 6));
    ticks.filter_map(|(_, field)| field.parse::<u64>().ok()).sum::<u64>() as f64 / ticks_a_second()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_as_they_are_written() {
        let words = ["ram", "brd", "disk", "zram:lz4", "nbdkit:zstd", "ours:lz4", "ours:zstd:3", "ours:lz4@/a/b"];
        for word in words.into_iter().chain(["ours-ublk:lz4", "ours-ublk:zstd@/a/b"]) {
            assert_eq!(word.parse::<Kind>().unwrap().to_string(), word);
        }
        assert_eq!("ours".parse::<Kind>().unwrap().to_string(), "ours:lz4");
        for word in ["", "zram", "nbdkit", "ram@/a", "ours2"] {
            assert!(word.parse::<Kind>().is_err(), "{word}");
        }
    }

    #[test]
    fn the_machine_has_used_cpu_time_and_it_grows() {
        let before = machine_cpu_s();
        let started = Instant::now();
        while started.elapsed().as_millis() < 100 {}
        assert!(machine_cpu_s() > before && before > 0.0);
    }
}
