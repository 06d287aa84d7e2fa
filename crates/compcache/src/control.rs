//! How the commands talk to the server: one line of JSON each way, over a Unix socket.
//!
//!     -> {"version":1,"do":"create","name":"scratch","size_bytes":1073741824,"codec":"lz4","at":{"nbd_unix":null}}
//!     <- {"version":1,"disk":{"name":"scratch","at":"nbd+unix:///?socket=/run/compcache/scratch.nbd", ...}}
//!     <- {"version":1,"failed":{"why":"there is a disk called scratch already; choose another name"}}
//!
//! Each side says the version it speaks; a server refuses a version it does not know and says which it does. What a
//! version means does not change once it is released: fields may be added, and unknown ones are ignored.
//!
//! Who may ask: the user the server runs as, and root. The kernel says who that is (SO_PEERCRED); the socket's own mode
//! keeps others from connecting at all.

mod client;
mod server;

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;

use anyhow::bail;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

pub use client::{ask, ask_own};
pub use server::{Asker, Control, Served};

/// The protocol spoken here.
pub const VERSION: u32 = 1;
/// No question is longer.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// What a command asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Request {
    /// Make a disk.
    Create(Create),
    /// Make a disk with a backing. A request of its own: a server that knows none of it must not make one without.
    CreateOn {
        #[serde(flatten)]
        disk: Create,
        backing: BackingWanted,
    },
    /// Make a disk that shows an origin. Its size is the origin's.
    CreateOver {
        #[serde(flatten)]
        disk: Create,
        origin: OriginWanted,
    },
    /// All disks.
    List,
    /// One disk.
    Show { name: String },
    /// Change what can be changed while a disk is in use.
    Change(Change),
    /// Have blocks of a disk compressed again that were not used for so long, or all; answered when it is done.
    Recompress { name: String, idle_ms: Option<u64> },
    /// Forget all that a disk holds.
    Reset { name: String },
    /// Have blocks of a disk leave memory for its backing, whatever its limits; so many bytes of memory, or all.
    Reclaim {
        name: String,
        bytes: Option<u64>,
        /// Those alone that do not compress.
        #[serde(default)]
        incompressible: bool,
    },
    /// End a disk; what it holds is gone. With `force` also if NBD clients are connected.
    Remove {
        name: String,
        #[serde(default)]
        force: bool,
    },
}

/// A disk to be made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Create {
    /// Its name; the server finds one if there is none.
    pub name: Option<String>,
    /// What it looks like from outside.
    pub size_bytes: u64,
    /// As `--codec` spells it.
    pub codec: String,
    /// The most memory it may take; none beside the server's own limit if absent.
    pub limit_bytes: Option<u64>,
    /// Where it is to be found.
    pub at: At,
    /// The server shall be safe to swap to before the disk appears.
    #[serde(default)]
    pub for_swap: bool,
    /// As far as the server's privileges allow.
    #[serde(default)]
    pub unprotected: bool,
    /// As `--recompress` spells it.
    #[serde(default)]
    pub recompress: Option<String>,
    /// After how long.
    #[serde(default)]
    pub recompress_after_ms: Option<u64>,
}

/// Where blocks of a disk are to go that do not fit in memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackingWanted {
    /// A file that is not there yet, or a block device.
    pub path: PathBuf,
    /// The most room it may take; enough for the disk if absent.
    pub max_bytes: Option<u64>,
    /// What is written at a time.
    pub batch_bytes: Option<u64>,
    /// What is on the device may be lost.
    #[serde(default)]
    pub overwrite: bool,
    /// The most that may be written to it in a day. A server that knows none of it ignores it, and says so by what it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daily_bytes: Option<u64>,
}

/// What a disk is to show, and how much of it may be kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OriginWanted {
    /// A block device, or a file.
    pub path: PathBuf,
    /// The most memory that its cache may take.
    pub memory_bytes: u64,
}

/// How clients get to a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum At {
    /// A block device where that is possible (of ublk's, else a loop device), else NBD at a Unix socket.
    Auto,
    /// A block device that stays when the server is killed, failing all requests, as swap wants it; or none.
    BlockDevice,
    /// A block device of ublk's.
    Ublk,
    /// A loop device, over a file that is served by FUSE.
    Loop,
    /// NBD at a Unix socket; beside the control socket if none is named.
    NbdUnix(Option<PathBuf>),
    /// NBD at an address and port.
    NbdTcp(std::net::SocketAddr),
}

/// Changes to a disk in use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// Which disk.
    pub name: String,
    /// Its new size.
    pub size_bytes: Option<u64>,
    /// Its new limit; `u64::MAX` for none.
    pub limit_bytes: Option<u64>,
    /// What it compresses new pages with.
    pub codec: Option<String>,
    /// What it does with cold ones.
    #[serde(default)]
    pub recompress: Option<String>,
    /// After how long.
    #[serde(default)]
    pub recompress_after_ms: Option<u64>,
    /// What changes about its backing. A server that knows none of it ignores it, and says so by what it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<BackingChange>,
}

/// Changes to a backing in use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BackingChange {
    /// In hundredths of a limit: above it, blocks leave memory.
    pub above_percent: Option<u8>,
    /// The most that may be written in a day; `u64::MAX` for as much as there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daily_bytes: Option<u64>,
}

/// What the server answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Nothing more to say.
    Done,
    /// One disk.
    Disk(Box<DiskState>),
    /// All of them.
    Disks(Vec<DiskState>),
    /// What was recompressed: so many pages that took so much before, and take so much now.
    Recompressed { pages: u64, before_bytes: u64, after_bytes: u64 },
    /// What has left memory.
    Reclaimed {
        blocks: u64,
        /// Memory that these took.
        bytes: u64,
    },
    /// It was not done.
    Failed {
        /// What failed, why, and what to do.
        why: String,
    },
}

/// A disk as it is at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskState {
    /// Its name.
    pub name: String,
    /// Where it is found: a URI, or the path of a device.
    pub at: String,
    /// As `--codec` spells it.
    pub codec: String,
    /// What is done with cold blocks, as `--recompress` spells it.
    #[serde(default)]
    pub recompress: String,
    /// When they are cold.
    #[serde(default)]
    pub recompress_after_ms: u64,
    /// Whether it was made to be swapped to.
    #[serde(default)]
    pub for_swap: bool,
    /// Its backing, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<BackingState>,
    /// What it shows, if that lies elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<OriginState>,
    /// The store's statistics by their names.
    pub stats: BTreeMap<String, u64>,
    /// How long reads and writes took.
    pub latency: Latencies,
}

impl DiskState {
    /// A statistic by its name; zero if the server does not have it.
    pub fn stat(&self, name: &str) -> u64 {
        self.stats.get(name).copied().unwrap_or_default()
    }
}

/// A backing as it is at one moment. Alive, dead and free bytes make the capacity.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BackingState {
    /// As it was named; a file has no name any more.
    pub path: PathBuf,
    /// `good`, or what is wrong.
    pub health: String,
    /// The most room it takes.
    pub capacity_bytes: u64,
    /// What blocks of the disk take there.
    pub live_bytes: u64,
    /// What nothing refers to any more, in batches where something is alive.
    pub dead_bytes: u64,
    /// What can be written to.
    pub free_bytes: u64,
    /// Above so many hundredths of a limit, blocks leave for it; `None` from a server that does not say.
    #[serde(default)]
    pub above_percent: Option<u8>,
    /// What is written to it in a day; `None` from a server that does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daily: Option<DailyState>,
    /// Batches written.
    pub segments_written: u64,
    /// Blocks that were moved to empty others.
    pub records_moved: u64,
    /// Batches that could not be written.
    pub failed_writes: u64,
    /// Blocks that could not be read.
    pub failed_reads: u64,
    /// Blocks that were not what was written.
    pub damaged_reads: u64,
}

/// What is written to a backing in a day.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DailyState {
    /// The most that may be, in any 24 hours; `None` for as much as there is.
    pub budget_bytes: Option<u64>,
    /// What was, in the last 24 hours and up to a quarter of an hour more.
    pub written_bytes: u64,
    /// Blocks should leave, and no more may be written now.
    pub is_spent: bool,
    /// In so many seconds it may; `None`: not while the budget is what it is.
    pub more_after_s: Option<u64>,
    /// How often blocks had to wait for that.
    pub waits: u64,
}

/// An origin.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OriginState {
    /// Where it is.
    pub path: String,
    /// Whether the page cache holds none of it.
    pub is_direct: bool,
    /// What lies behind its last whole block, and is not shown.
    pub left_out_bytes: u64,
}

/// Durations, reads and writes apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latencies {
    /// Pages read.
    pub reads: Durations,
    /// Pages written.
    pub writes: Durations,
}

/// A histogram in seven numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Durations {
    pub count: u64,
    pub min_ns: u64,
    pub avg_ns: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub max_ns: u64,
    pub sum_ns: u64,
}

/// Where a server listens unless told otherwise: root's where services have their sockets, others' among their own.
///
/// # Errors
/// The user has no directory for such things.
pub fn default_socket() -> anyhow::Result<PathBuf> {
    let directory = match env::var_os("XDG_RUNTIME_DIR") {
        _ if geteuid().is_root() => PathBuf::from("/run"),
        Some(directory) if !directory.is_empty() => directory.into(),
        _ => bail!("there is no place for the control socket: name one with --socket, or set XDG_RUNTIME_DIR"),
    };
    Ok(directory.join("compcache/control.sock"))
}

/// A line, either way: who speaks, and what.
#[derive(Serialize, Deserialize)]
struct Line<T> {
    version: u32,
    #[serde(flatten)]
    said: T,
}

/// What is read of a line before the rest of it means anything.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// A path that is no text cannot be said.
fn to_line<T: Serialize>(said: T) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(&Line { version: VERSION, said })?;
    line.push(b'\n');
    Ok(line)
}

fn from_line<T: for<'a> Deserialize<'a>>(line: &[u8]) -> anyhow::Result<T> {
    let Ok(Version { version }) = serde_json::from_slice(line) else {
        bail!("that is not a line of JSON with a `version`");
    };
    if version != VERSION {
        bail!("version {version} of the protocol was spoken; version {VERSION} is known here");
    }
    Ok(serde_json::from_slice::<Line<T>>(line)?.said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        let create = Request::Create(Create {
            name: Some("a".into()),
            size_bytes: 4096,
            codec: "lz4".into(),
            limit_bytes: None,
            at: At::NbdUnix(None),
            for_swap: true,
            unprotected: false,
            recompress: Some("zstd:3".into()),
            recompress_after_ms: None,
        });
        let backing = BackingWanted {
            path: "/b".into(),
            max_bytes: Some(1),
            batch_bytes: None,
            overwrite: true,
            daily_bytes: Some(7),
        };
        let Request::Create(disk) = create.clone() else { unreachable!() };
        let origin = OriginWanted { path: "/o".into(), memory_bytes: 1 << 20 };
        let create_over = Request::CreateOver { disk: disk.clone(), origin };
        let create_on = Request::CreateOn { disk, backing };
        for request in [
            create,
            create_on,
            create_over,
            Request::Recompress { name: "a".into(), idle_ms: Some(1) },
            Request::List,
            Request::Change(Change { name: "b".into(), ..Change::default() }),
        ] {
            assert_eq!(from_line::<Request>(&to_line(request.clone()).unwrap()).unwrap(), request);
        }
        let recompressed = Reply::Recompressed { pages: 1, before_bytes: 2, after_bytes: 1 };
        let failed = Reply::Failed { why: "no".into() };
        for reply in [Reply::Done, failed, recompressed, Reply::Disks(Vec::new())] {
            assert_eq!(from_line::<Reply>(&to_line(reply.clone()).unwrap()).unwrap(), reply);
        }
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let refused = from_line::<Request>(br#"{"version":2,"do":"dance"}"#).unwrap_err().to_string();
        assert!(refused.contains("version 2") && refused.contains("version 1"), "{refused}");
        for rubbish in ["", "[]", "{}", "{\"version\":\"1\"}", "\u{0}"] {
            assert!(from_line::<Request>(rubbish.as_bytes()).is_err(), "{rubbish}");
        }
    }

    #[test]
    fn unknown_fields_are_ignored() {
        assert_eq!(from_line::<Request>(br#"{"version":1,"do":"list","later":true}"#).unwrap(), Request::List);
    }
}
