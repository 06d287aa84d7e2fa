//! `compcache serve`: the process that owns the disks.
//!
//! It stays in the foreground, as systemd and every other supervisor want it, unless asked otherwise ([`crate::background`]); the other commands ask it through
//! [`crate::control`] and start nothing by themselves. What its disks hold is in its memory and ends with it.
//!
//! | thread     | does                                                     |
//! |------------|----------------------------------------------------------|
//! | main       | sets up, then waits for the signal to end                |
//! | control    | takes who connects; a thread each for those who ask      |
//! | compaction | gives memory of half-empty spans back, a step at a time  |
//! | recompression | has blocks compressed again that are [`cold`]        |
//! | reserve    | keeps memory at hand while a disk is for swap ([`safe`])  |
//! | ballast    | throws it off where the reserve cannot be filled ([`safe`]) |
//! | overload   | asks for the OOM killer when swap refuses ([`overload`])  |
//! | backing    | one for each disk that has one: blocks leave ([`backing`]) |
//! | upkeep     | one for each disk that has an origin: what was written is stored, and compaction ([`origin`]) |
//! | transports | theirs                                                   |
//!
//! While a disk is for swap, another process waits for the end of this one ([`mod@guard`]).
//!
//! Locks: the disks' names are under one lock ([`disks`]), held while a disk is made or changed, never while one
//! serves a request, nor while one is ended, which waits for requests.

mod backing;
mod below;
mod boost;
mod cold;
mod disks;
mod guard;
mod origin;
mod overload;
mod relief;
mod safe;
mod wire;

use std::ffi::OsString;
use std::fmt::{self, Display, Formatter};
use std::path::{PathBuf, absolute};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use compcache_block::fuse_loop::{self, FuseLoopOptions};
use compcache_block::ublk;
use compcache_store::{Store, StoreConfig, Worker};
use listenfd::ListenFd;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use sd_notify::NotifyState;

use crate::background;
use crate::cgroup;
use crate::cli::ServeArgs;
use crate::control::{Control, default_socket};
use crate::disk::LEAST_BYTES;
use crate::end_signals::EndSignals;
use crate::file_size;
use crate::kernel::{clock_ns, ram_bytes};
use crate::run::{STATUS_FAILED, say, why};
use crate::serve::cold::Cold;
use crate::serve::disks::Disks;
use crate::serve::safe::Safety;
use crate::size::{Shown, Size};

pub use guard::guard;

/// Between two looks at whether there is something to compact.
const BETWEEN_COMPACTIONS: Duration = Duration::from_millis(500);
/// Objects moved by one step: some tens of microseconds.
const COMPACTED_AT_ONCE: usize = 64;

/// What disks may take unless told otherwise; and from when one of them is swapped to. A page of the machine's that swap
/// refuses stays where it was, and takes more memory there.
const USUAL_LIMIT: Size = Size::PercentOfRam(50.0);
const SWAP_LIMIT: Size = Size::PercentOfRam(80.0);

/// Addresses that a store can have at most.
const RESERVE_BYTES_MAX: u64 = 512 << 30;

/// Serves until a signal asks it to end and no disk is in use. `arguments` are all that this program was given.
pub fn serve(args: &ServeArgs, arguments: &[OsString]) -> ExitCode {
    let served = match args.background {
        true => background::start(arguments),
        false => serve_until_told(args).map(|()| ExitCode::SUCCESS),
    };
    match served {
        Ok(status) => status,
        Err(error) => {
            say(&format!("compcache: {}\n", why(&error)));
            STATUS_FAILED.into()
        }
    }
}

fn serve_until_told(args: &ServeArgs) -> anyhow::Result<()> {
    // First of all: a signal from here on ends us in order.
    let mut signals = EndSignals::new()?;
    file_size::lift_limit()?;
    // And before there is any other thread.
    let limits = Limits::new(args)?;
    let limit_bytes = limits.bytes;
    let safety = Safety::at_start(limits.with_swap_bytes);
    allow_many_descriptors();
    // Fragments and the tails of spans take addresses, too.
    let reserve_bytes =
        StoreConfig::default().reserve_bytes.max(limits.with_swap_bytes.saturating_mul(2)).min(RESERVE_BYTES_MAX);
    let store = Store::new(StoreConfig { limit_bytes, reserve_bytes, ..StoreConfig::default() })
        .context("cannot reserve addresses for the pages; is there a limit on them (ulimit -v)?")?;
    let control = match ListenFd::from_env().take_unix_listener(0).context("what was handed over is no socket")? {
        Some(listener) => Control::inherit(listener)?,
        None => Control::bind(&absolute(args.socket.clone().map_or_else(default_socket, Ok)?)?)?,
    };
    let socket = control.path().context("the socket that was handed over has no name")?;
    clean_up_after_the_dead();
    let directory = socket.parent().map_or_else(PathBuf::new, Into::into);
    let cold = Cold::start(store.clone())?;
    let disks = Arc::new(Disks::new(store.clone(), directory, safety, cold));
    start_compaction(store)?;
    control.answer(disks.clone())?;
    notify(NotifyState::Ready, args.background_inner);
    if args.background_inner {
        std::env::set_current_dir("/").context("cannot leave the working directory")?;
        background::begun()?;
    } else {
        say(&format!("compcache: serving at {}; all disks together may take {limits} of memory\n", socket.display()));
    }
    // Whoever uses a disk would lose what it holds.
    signals.wait_until(|insists| disks.remove_all(insists));
    // Said before, a service manager would kill us for not ending.
    notify(NotifyState::Stopping, args.background_inner);
    Ok(())
}

/// Tells the service manager, if there is one. One in the background would tell that of whoever started it, which is no manager of it.
pub fn notify(state: NotifyState<'_>, in_background: bool) {
    if !in_background {
        // Nobody listens where no service manager is; nothing depends on it.
        let _ = sd_notify::notify(&[state]);
    }
}

/// What all disks may take: no more than the memory cgroup lets anybody here.
struct Limits {
    bytes: u64,
    /// From when a disk is swapped to.
    with_swap_bytes: u64,
}

impl Limits {
    fn new(args: &ServeArgs) -> anyhow::Result<Limits> {
        let here = cgroup::memory_limit().map_or(u64::MAX, |limit| limit.bytes).min(ram_bytes());
        let (usual, with_swap) = args.memory.map_or((USUAL_LIMIT, SWAP_LIMIT), |memory| (memory, memory));
        match usual.bytes(here) {
            bytes if bytes < LEAST_BYTES => {
                bail!("--memory {} leaves no room for any disk; write 1G, for instance, or 50%", Shown(bytes))
            }
            bytes => Ok(Limits { bytes, with_swap_bytes: with_swap.bytes(here) }),
        }
    }
}

impl Display for Limits {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", Shown(self.bytes))?;
        match self.with_swap_bytes {
            same if same == self.bytes => Ok(()),
            with_swap => write!(formatter, " ({} with swap)", Shown(with_swap)),
        }
    }
}

/// Each NBD client takes three descriptors, and there may be many.
fn allow_many_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // If it may not be, clients are sent away earlier.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// A server that was killed leaves devices that answer with errors only, and mounts that nobody can use.
fn clean_up_after_the_dead() {
    if !geteuid().is_root() {
        return;
    }
    let loops = fuse_loop::clean(&FuseLoopOptions::default().directory);
    tell_of_the_dead(loops.map(|cleaned| (cleaned.removed, cleaned.left)));
    tell_of_the_dead(ublk::clean().map(|cleaned| (cleaned.removed, cleaned.left)));
}

/// What was removed, and what stays and why.
type CleanedUp<E> = (Vec<PathBuf>, Vec<(PathBuf, E)>);

fn tell_of_the_dead<E: Display>(done: Result<CleanedUp<E>, E>) {
    let (removed, left) = match done {
        Ok(cleaned) => cleaned,
        Err(error) => return say(&format!("compcache: cannot look for what killed servers left: {error}\n")),
    };
    for place in removed {
        say(&format!("compcache: removed {}, of a server that was killed\n", place.display()));
    }
    for (place, error) in left {
        say(&format!("compcache: {}, of a server that was killed, stays: {error}\n", place.display()));
    }
}

/// What was discarded leaves spans half empty; now and then they are emptied.
fn start_compaction(store: Arc<Store>) -> anyhow::Result<()> {
    let mut worker = Worker::new(&store, clock_ns).context("cannot get the memory that compaction works in")?;
    thread::Builder::new()
        .name("compaction".into())
        .spawn(move || {
            loop {
                while !store.compact_in_turn(&mut worker, COMPACTED_AT_ONCE).finished {}
                thread::sleep(BETWEEN_COMPACTIONS);
            }
        })
        .context("cannot start the thread that compacts")?;
    Ok(())
}
