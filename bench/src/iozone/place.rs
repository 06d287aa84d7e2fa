//! Where a file is read and written on each side, in the same memory and on the same disk.
//!
//! | side                | the file lies on                                                                            |
//! |---------------------|---------------------------------------------------------------------------------------------|
//! | `plain`             | an ext4 on the disk                                                                         |
//! | `mount`             | the same ext4, seen through `compcache mount`                                               |
//! | `mount-asking`      | the same with `--remember 0`                                                                |
//! | `mount-passthrough` | the same with `--passthrough writable`                                                      |
//! | `mount-exclusive`   | the same with `--exclusive`                                                                 |
//! | `mount-writeback`   | the same with `--exclusive --writeback-cache`                                               |
//! | `mount-recompress`  | the same with `--recompress zstd --recompress-after 1`                                      |
//! | `origin`            | the same ext4, mounted on a disk of ours whose origin is the disk (`disk create --origin`)  |
//!
//! **Memory.** Every side has M. Without ours, the control group of the worker is limited to that, its page cache in it. With ours, the group of the
//! server is limited to the pool's limit and a fixed allowance for its program, buffers and threads, and for what the kernel caches of the file below on
//! its behalf, dirty pages above all ([`Memory::server_bytes`]); the worker's group has the rest. So nobody has memory that the other has
//! not: pages that the kernel would keep for the server a second time are its own loss. The image that is written and compared with is charged to
//! the bench. Nothing is swapped out.
//!
//! The two are groups apart because a FUSE server and its client cannot share one in version 1 of control groups: the server asks for memory,
//! the kernel waits for a dirty page of the client's mapping to be written, and who would write it is the server (seen on Linux 6.18).
//!
//! **The disk** is a loop device with direct I/O over a file of this machine's disk, whose blocks have all been written before. It is the
//! device that is throttled, so that plain's worker, our server and the kernel's flusher threads share one budget on every side: in version 1
//! of control groups on the device for all processes of the root group, in version 2 on the side's group. What went to the
//! disk is counted there, and a throttle that did not hold is an error.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::thread;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;

use crate::baseline::cgroup::Cgroup;
use crate::baseline::loop_device::{self, Throttle, Traffic};
use crate::device::process::Process;
use crate::device::{Device, Kind, Over, Server, mount};
use crate::ours;
use crate::scratch::write_all_blocks;
use crate::session::{Session, Undo};
use crate::side::Bench;

/// Who keeps the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// The kernel's page cache alone.
    Plain,
    /// It, and the pool of a mounted tree.
    Mount(&'static MountSide),
    /// It, and the pool under a block device.
    Origin,
}

/// What a mounted tree is called, and with which flags it is mounted.
type MountSide = (&'static str, &'static [&'static str]);

static MOUNTS: [MountSide; 6] = [
    ("mount", &[]),
    ("mount-asking", &["--remember", "0"]),
    ("mount-passthrough", &["--passthrough", "writable"]),
    ("mount-exclusive", &["--exclusive"]),
    ("mount-writeback", &["--exclusive", "--writeback-cache"]),
    ("mount-recompress", &["--recompress", "zstd", "--recompress-after", "1"]),
];

impl FromStr for Keeper {
    type Err = String;

    fn from_str(word: &str) -> Result<Keeper, String> {
        match word {
            "plain" => Ok(Keeper::Plain),
            "origin" => Ok(Keeper::Origin),
            _ => match MOUNTS.iter().find(|(name, _)| *name == word) {
                Some(side) => Ok(Keeper::Mount(side)),
                None => Err(format!(
                    "{word:?} is none of plain, mount, mount-asking, mount-passthrough, mount-exclusive, mount-writeback, mount-recompress, origin"
                )),
            },
        }
    }
}

impl fmt::Display for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Keeper::Plain => "plain",
            Keeper::Mount((name, _)) => name,
            Keeper::Origin => "origin",
        })
    }
}

/// How much memory a side has.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// All of it.
    pub all_bytes: u64,
    /// What of it ours may compress pages into.
    pub pool_bytes: u64,
    /// What the server may take beyond what it needs, for pages that are written late: where others work on the machine (`--quick`).
    pub spare_bytes: u64,
}

impl Memory {
    /// Of a quick run: on a machine that ran tests beside it the kernel ended a server whose group takes 9 to 12 of 16 MiB on a quiet one, and a worker.
    pub fn spare_bytes(quick: bool) -> u64 {
        if quick { 16 << 20 } else { 0 }
    }

    /// So much for the worker and its page cache where there is a pool of that size beside it.
    pub fn beside(client_bytes: u64, pool_bytes: u64, spare_bytes: u64) -> Memory {
        let pool_alone = Memory { all_bytes: pool_bytes, pool_bytes, spare_bytes };
        Memory { all_bytes: client_bytes + pool_alone.server_bytes(), pool_bytes, spare_bytes }
    }

    /// What the server may take, its pool included: beside it 4 MiB, and 4 for each processor, for which it has threads with buffers (7 and 10 MiB
    /// were seen of a mount and of a disk on two processors).
    pub fn server_bytes(self) -> u64 {
        let processors = thread::available_parallelism().map_or(1, |count| count.get() as u64);
        self.pool_bytes + (4 << 20) + processors * (4 << 20) + self.spare_bytes
    }

    /// What the worker and its page cache may take.
    ///
    /// # Errors
    /// Next to nothing is left.
    pub fn client_bytes(self, keeper: Keeper) -> Result<u64> {
        let left = self.all_bytes.saturating_sub(if keeper == Keeper::Plain { 0 } else { self.server_bytes() });
        match left < 8 << 20 {
            true => bail!("of {} MiB of memory, too little is left beside the server", self.all_bytes >> 20),
            false => Ok(left),
        }
    }
}

/// The disk, with an ext4 that is not mounted.
pub struct Disk<'s> {
    device: Device<'s>,
    throttle: Throttle,
}

impl<'s> Disk<'s> {
    /// Makes one with room for `bytes` bytes in files.
    ///
    /// # Errors
    /// There is no room on the machine's disk, or no loop device.
    pub fn make(bench: &'s Bench, bytes: u64, throttle: Throttle) -> Result<Disk<'s>> {
        // The rest is ext4's: its journal, tables, and room to choose from.
        let bytes = bytes + bytes / 8 + (96 << 20);
        let device = Device::set_up(bench.session(), &Kind::Disk, bytes, bench.compcache())?;
        write_all_blocks(device.path(), bytes)?;
        mount::make_ext4_on_disk(device.path())?;
        Ok(Disk { device, throttle })
    }

    /// Makes the file system on it anew.
    ///
    /// # Errors
    /// It is in use.
    pub fn empty(&self) -> Result<()> {
        mount::make_ext4_on_disk(self.device.path())
    }

    /// What went to it so far.
    pub fn traffic(&self) -> Result<Traffic> {
        Traffic::of(self.device.path())
    }

    /// Fails if more went to it in `seconds` than the throttle lets through.
    pub fn check_throttle(&self, traffic: Traffic, seconds: f64) -> Result<()> {
        self.throttle.check(traffic, seconds)
    }

    /// Sets a side up on it.
    ///
    /// # Errors
    /// This machine cannot have it; what had been set up is undone.
    pub fn stand(&self, bench: &'s Bench, keeper: Keeper, memory: Memory) -> Result<Standing<'s>> {
        let session = bench.session();
        let mark = session.mark();
        let stood = self.try_stand(bench, keeper, memory, mark);
        if stood.is_err() {
            session.undo_to(mark);
        }
        stood
    }

    fn try_stand(&self, bench: &'s Bench, keeper: Keeper, memory: Memory, mark: usize) -> Result<Standing<'s>> {
        let session = bench.session();
        // Its own: there may be sides that stand on other disks.
        let directory = session.directory().join(format!("turn.{mark}"));
        fs::create_dir_all(&directory)?;
        let group = Cgroup::make(session, None)?;
        group.keep_in_memory()?;
        let client = group.inside("client", memory.client_bytes(keeper)?)?;
        let server = group.inside("server", memory.server_bytes())?;
        // The worker goes first; the server only when what it serves is unmounted.
        session.note(Undo::Cgroup(client.path().to_owned()))?;
        loop_device::throttle(session, self.device.path(), self.throttle, Some(&group))?;
        let mut standing =
            Standing { session, mark, group, client, server, point: directory.join("ext4"), keeper: Served::Kernel };
        match keeper {
            Keeper::Plain => mount::on(session, self.device.path(), &standing.point, "ext4", "")?,
            Keeper::Mount((_, flags)) => {
                mount::on(session, self.device.path(), &standing.point, "ext4", "")?;
                ours::step(ours::MOUNT_NEEDS, standing.mount(bench, &directory, memory.pool_bytes, flags))?;
            }
            Keeper::Origin => {
                let from = (self.device.path(), memory.pool_bytes);
                let needs = ours::disk_needs(Over::Loop);
                let started = Server::start_over(session, &directory, bench.compcache(), from, &standing.server);
                let (server, device) = ours::step(needs, started)?;
                standing.keeper = Served::Disk(Box::new(server));
                ours::step(needs, mount::on(session, &device, &standing.point, "ext4", ""))?;
            }
        }
        Ok(standing)
    }
}

/// A side that is set up; undone when it is dropped.
pub struct Standing<'s> {
    session: &'s Session,
    mark: usize,
    group: Cgroup,
    client: Cgroup,
    server: Cgroup,
    point: PathBuf,
    keeper: Served,
}

enum Served {
    Kernel,
    Tree { process: Process, compcache: PathBuf, target: PathBuf },
    Disk(Box<Server>),
}

/// What a side takes of its memory now, in bytes.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Taken {
    /// All of it.
    pub all: u64,
    /// Page cache of the worker.
    pub client_page_cache: u64,
    /// The server with its pool, and what the kernel caches on its behalf.
    pub server: u64,
    /// What the kernel caches on the server's behalf: of files below, of its program.
    pub server_page_cache: u64,
    /// The pool, as it says itself.
    pub pool: u64,
}

/// What the pool counted so far; all zero where there is none.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Pool {
    /// Pages found.
    pub found: u64,
    /// Pages not found.
    pub missed: u64,
    /// Pages in it now.
    pub pages: u64,
    /// Of them, same-filled.
    pub same_pages: u64,
    /// What they are compressed to.
    pub compressed_bytes: u64,
    /// What it takes.
    pub memory_bytes: u64,
}

impl<'s> Standing<'s> {
    fn mount(&mut self, bench: &Bench, directory: &Path, pool_bytes: u64, flags: &[&str]) -> Result<()> {
        let target = directory.join("mount");
        fs::create_dir_all(&target)?;
        let mut command = Command::new(bench.compcache());
        command.arg("mount").arg("--memory").arg(pool_bytes.to_string()).args(flags);
        command.arg(&self.point).arg(&target);
        self.server.take_in(&mut command)?;
        let mut process = Process::start(self.session, directory, command)?;
        self.session.note(Undo::Mount(target.clone()))?;
        process.wait_until(|| mount::points().contains(&target))?;
        self.point = target.clone();
        self.keeper = Served::Tree { process, compcache: bench.compcache().to_owned(), target };
        Ok(())
    }

    /// Where the worker makes its file.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// The control group that the worker enters.
    pub fn client(&self) -> &Cgroup {
        &self.client
    }

    /// Seconds of CPU that the server has taken.
    pub fn server_cpu_s(&self) -> f64 {
        match &self.keeper {
            Served::Kernel => 0.0,
            Served::Tree { process, .. } => process.cpu_s(),
            Served::Disk(server) => server.process.cpu_s(),
        }
    }

    /// What the pool counted so far.
    ///
    /// # Errors
    /// It does not say.
    pub fn pool(&self) -> Result<Pool> {
        let stats = match &self.keeper {
            Served::Kernel => return Ok(Pool::default()),
            Served::Disk(server) => server.state()?["stats"].take(),
            Served::Tree { compcache, target, .. } => {
                let output = Command::new(compcache).args(["show", "--json"]).arg(target).output()?;
                serde_json::from_slice(&output.stdout)
                    .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?
            }
        };
        let stat = |name: &str| stats[name].as_u64().with_context(|| format!("{name} is not among the statistics"));
        Ok(Pool {
            found: stat("succ_gets")?,
            missed: stat("failed_gets")?,
            pages: stat("pages_stored")?,
            same_pages: stat("zero_pages")?,
            compressed_bytes: stat("compr_data_size")?,
            memory_bytes: stat("mem_used_total")?,
        })
    }

    /// What it takes of its memory now.
    pub fn taken(&self, pool: Pool) -> Taken {
        Taken {
            all: self.group.usage_bytes(),
            client_page_cache: self.client.page_cache_bytes(),
            server: self.server.usage_bytes(),
            server_page_cache: self.server.page_cache_bytes(),
            pool: pool.memory_bytes,
        }
    }

    /// How many processes the kernel has ended for want of memory.
    pub fn kills(&self) -> u64 {
        self.group.kills() + self.client.kills() + self.server.kills()
    }
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        if let Served::Tree { process, target, .. } = &mut self.keeper {
            // Unmounted, it ends; what else there is goes in the journal's order.
            if mount::off(target).is_ok()
                && let Err(error) = process.wait()
            {
                eprintln!("{error:#}");
            }
        }
        self.session.undo_to(self.mark);
    }
}

/// As text in a record.
pub fn words(keepers: &[Keeper]) -> Value {
    keepers.iter().map(Keeper::to_string).collect::<Vec<_>>().into()
}
