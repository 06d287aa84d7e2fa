//! Mounting a tree, and ending it.

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use compcache_cache::{Cache, Recompress};
use compcache_fuse::{Linger, OpenTable, Rings, mounts, table_of_mounts, uppermost};
use compcache_store::Codec;
use fuser::{BackgroundSession, Config, FileType, Notifier, Session, SessionACL};
use rustix::fs::{StatVfsMountFlags, fstatvfs, statvfs};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount};
use rustix::process::{geteuid, getgid, getuid};
use rustix::system::sysinfo;

use crate::astray::BELIEVED;
use crate::error::FsError;
use crate::helper;
use crate::inodes::Inodes;
use crate::mounted_on::MountedOn;
use crate::names::Place;
use crate::node::Node;
use crate::notify::prune;
use crate::passthrough::Passthrough;
use crate::stamp::Stamp;
use crate::tree::{ByLibrary, Notice, Parts, RING_BYTES_MAX, Tree, request_bytes_max};
use crate::watch::Watches;

/// The node through which file systems are served.
const DEVICE: &str = "/dev/fuse";
/// What our mounts are called in the table of mounts.
const KIND: &str = "fuse.compcache";

/// How many times as long as it took to ask the kernel to forget every file nobody asks again, if it did not help; and how long at most, since those wait
/// who get no descriptor.
const REST: u32 = 9;
const REST_MAX: Duration = Duration::from_millis(250);
/// Files that are asked for room between two looks at what is mounted on some: a mount made in between is unmounted with its name.
const LOOKED_AFTER: usize = 256;

/// What is mounted where, and how.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// The tree that is shown.
    pub source: PathBuf,
    /// Where; may be the source itself.
    pub target: PathBuf,
    /// Other users than the one who mounts may use it.
    pub allow_other: bool,
    /// The most memory that pages, tables and index take, in bytes.
    pub memory_bytes: u64,
    /// Of what a later limit in per cent is a share.
    pub whole_bytes: fn() -> u64,
    /// What pages are compressed with.
    pub codec: Codec,
    /// What becomes of pages that were not found for a while.
    pub recompress: Recompress,
    /// What programs may not do there.
    pub forbidden: Forbidden,
    /// Nobody changes files of the source but through this mount. Then what is kept of a file outlives a write to it.
    pub exclusive: bool,
    /// What is written stays in the kernel's page cache until a file is synced or closed, or the kernel likes, as on other file systems; not only what is
    /// written through mappings. Only with `exclusive`: the kernel then knows length and times of a file better than the file system below.
    pub writes_back: bool,
    /// Which files the kernel reads and writes by itself; where it writes back, none.
    pub passthrough: Passthrough,
    /// Changes behind the mount are noticed while files are open, not only when they are opened.
    pub watch: bool,
    /// What the kernel may believe of what it was told of names and attributes.
    pub remembered: Remembered,
    /// Requests served at the same time, where they do not come by io_uring.
    pub threads: NonZeroUsize,
}

/// What the kernel may believe, and for how long, of what it was told of names and attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remembered {
    /// Nothing: it asks each time, and sees at once what changes behind the mount.
    Nothing,
    /// Where directories are and what they are like, and what a file is like that nobody has open, for some milliseconds. What is opened, made, moved or removed is what the path leads to by then, all the same (`astray.rs`).
    Directories,
    /// Everything, for so long.
    Everything(Duration),
}

impl Remembered {
    /// For how long it may be believed what is there by a name, and what that is like, if it is of this kind. What nobody has open is looked up before anybody can tell what it is like, but for those
    /// who have a descriptor opened with O_PATH.
    pub(crate) fn of(self, kind: FileType, is_open: bool) -> Believed {
        let (name, attributes) = match (self, kind) {
            (Remembered::Everything(time), _) => (time, time),
            (Remembered::Directories, FileType::Directory) => (BELIEVED, BELIEVED),
            (Remembered::Directories, FileType::RegularFile | FileType::Symlink) if !is_open => {
                (Duration::ZERO, BELIEVED)
            }
            _ => (Duration::ZERO, Duration::ZERO),
        };
        Believed { name, attributes }
    }
}

/// How long.
pub(crate) struct Believed {
    pub name: Duration,
    pub attributes: Duration,
}

/// What a mount forbids, beside what the source's own does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forbidden {
    /// To change anything (`ro`).
    pub writing: bool,
    /// To run programs from there (`noexec`).
    pub programs: bool,
    /// To run them as their owner (`nosuid`).
    pub set_user_id: bool,
    /// To use devices there (`nodev`).
    pub devices: bool,
}

impl Forbidden {
    fn flags(self) -> StatVfsMountFlags {
        let pairs = [
            (self.writing, StatVfsMountFlags::RDONLY),
            (self.programs, StatVfsMountFlags::NOEXEC),
            (self.set_user_id, StatVfsMountFlags::NOSUID),
            (self.devices, StatVfsMountFlags::NODEV),
        ];
        pairs.into_iter().filter(|(is, _)| *is).fold(StatVfsMountFlags::empty(), |all, (_, flag)| all | flag)
    }
}

impl MountOptions {
    /// For the user alone, LZ4, remembering nothing, and two threads for each of at most 8 processors.
    pub fn new(source: impl Into<PathBuf>, target: impl Into<PathBuf>, memory_bytes: u64) -> MountOptions {
        let cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(8);
        MountOptions {
            source: source.into(),
            target: target.into(),
            allow_other: false,
            memory_bytes,
            whole_bytes: ram_bytes,
            codec: Codec::Lz4,
            recompress: Recompress::default(),
            forbidden: Forbidden::default(),
            exclusive: false,
            writes_back: false,
            passthrough: Passthrough::None,
            watch: false,
            remembered: Remembered::Nothing,
            // Most of what a thread does is to wait for the file system below.
            threads: NonZeroUsize::new(cpus * 2).unwrap_or(NonZeroUsize::MIN),
        }
    }
}

/// Where a tree is mounted, and which mount it is.
#[derive(Clone, Debug)]
pub struct MountedAt {
    path: PathBuf,
    /// `None` where the table of mounts cannot be read.
    line: Option<Line>,
}

/// What tells a mount from all others in the table of mounts, wherever it is moved.
#[derive(Clone, Debug)]
struct Line {
    id: Vec<u8>,
    /// Others may have it, too: the same tree in further places.
    device: Vec<u8>,
}

impl MountedAt {
    /// To be called right after it was mounted.
    fn now(path: PathBuf) -> MountedAt {
        let table = table_of_mounts().unwrap_or_default();
        let ours = uppermost(&table, &path).filter(|mounted| mounted.kind == KIND.as_bytes());
        let line = ours.map(|mounted| Line { id: mounted.id.to_vec(), device: mounted.device.to_vec() });
        MountedAt { line, path }
    }

    /// Where it was mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is still there and nobody can serve it any more: its server was killed, or the kernel has aborted the connection.
    pub fn is_dead(&self) -> bool {
        let Some(line) = &self.line else { return has_dead_server(&self.path) };
        // Asked last, and by its place: the numbers of one that is gone may be a new one's by now, which is not dead.
        table_of_mounts().is_ok_and(|table| {
            let ours = mounts(&table).find(|mounted| mounted.id == line.id && mounted.device == line.device);
            ours.is_some_and(|ours| has_dead_server(&ours.place()))
        })
    }

    /// Unmounts it where it is by now, and nothing else; [`Mount::wait`] then returns, unless others have it mounted in a namespace of theirs, or files are
    /// open of what was taken out of the tree (`umount -l`): with the last of that. If it is not there any more, there is nothing to unmount.
    ///
    /// # Errors
    /// [`FsError::InUse`], [`FsError::Covered`], [`FsError::Elsewhere`]: it goes on. [`FsError::Unmount`], also where it cannot be known what is mounted.
    pub fn unmount(&self) -> Result<(), FsError> {
        // Nobody could say of it which it is.
        let Some(line) = &self.line else { return unmount(&self.path) };
        let table = || table_of_mounts().map_err(|error| FsError::Unmount { path: self.path.clone(), error });
        // Mounted over itself, too, it is there as often.
        while let Some(place) = line.place(&table()?)? {
            unmount(&place)?;
        }
        match line.elsewhere(&table()?) {
            Some(path) => Err(FsError::Elsewhere { path }),
            None => Ok(()),
        }
    }
}

impl Line {
    /// Where it is, if it is anywhere; the system call takes whatever lies on top there.
    fn place(&self, table: &[u8]) -> Result<Option<PathBuf>, FsError> {
        let Some(ours) = mounts(table).find(|mounted| mounted.id == self.id && mounted.device == self.device) else {
            return Ok(None);
        };
        let path = ours.place();
        match uppermost(table, &path) {
            Some(seen) if seen.device != self.device => {
                let kind = String::from_utf8_lossy(seen.kind).into_owned();
                Err(FsError::Covered { path, kind })
            }
            _ => Ok(Some(path)),
        }
    }

    /// A place where somebody has mounted the same tree once more.
    fn elsewhere(&self, table: &[u8]) -> Option<PathBuf> {
        mounts(table).find(|mounted| mounted.device == self.device).map(|mounted| mounted.place())
    }
}

/// RAM of the machine.
fn ram_bytes() -> u64 {
    let info = sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit)
}

/// A mounted tree. Dropping it unmounts it if nobody uses it; if somebody does, it is served for as long as the process lives.
pub struct Mount {
    session: Option<BackgroundSession>,
    rings: Option<Rings>,
    at: MountedAt,
    /// It is to be unmounted at the end.
    mounted: bool,
}

impl Mount {
    /// Mounts, and serves until it is unmounted by whomever.
    ///
    /// The process must not use the mount itself while it serves it.
    ///
    /// # Errors
    /// [`FsError`]; nothing is mounted.
    pub fn new(options: &MountOptions) -> Result<Mount, FsError> {
        let (source, target) = places(options)?;
        let inodes = Inodes::new(&source);
        let inodes = inodes.map_err(|error| FsError::Source { path: source.clone(), error: error.into() })?;
        let inodes = Arc::new(inodes);
        // What the source's own mount forbids, this one does too.
        let limits = fstatvfs(inodes.root()).map_or(StatVfsMountFlags::empty(), |stat| stat.f_flag);
        let limits = limits | options.forbidden.flags();
        let (notices, heard) = channel();
        let watches = options.watch.then(Watches::new).transpose();
        let watches = watches.map_err(|error| FsError::Watch { error: error.into() })?.map(Arc::new);
        let cache = Cache::new(options.memory_bytes, options.codec);
        let cache = Arc::new(cache.map_err(|error| FsError::Memory { error })?);
        cache.set_recompress(options.recompress).map_err(|error| FsError::Memory { error })?;
        let (tree, jobs) = Tree::new(Parts {
            inodes: inodes.clone(),
            cache: cache.clone(),
            exclusive: options.exclusive,
            writes_back: options.exclusive && options.writes_back,
            passthrough: if options.writes_back { Passthrough::None } else { options.passthrough },
            remembered: options.remembered,
            whole_bytes: options.whole_bytes,
            watches: watches.clone(),
            notices,
            by_rings: compcache_fuse::queues().is_some(),
        });
        let tree = Arc::new(tree);
        if let Some(watches) = watches {
            let tree = Arc::downgrade(&tree);
            let changed = move |changed| tree.upgrade().map(|tree| tree.was_changed(changed)).is_some();
            watches.start(changed).map_err(|error| FsError::Thread { error })?;
        }
        let session = connect(&tree, options, &source, &target, limits);
        let session = session.map_err(|error| FsError::Mount { path: target.clone(), error })?;
        // Undone from here on if something fails.
        let mut mount = Mount { session: None, rings: None, at: MountedAt::now(target), mounted: true };
        let connection = || session.as_fd().try_clone_to_owned().map_err(|error| FsError::Thread { error });
        let (to_tell, connection) = (connection()?, connection()?);
        tree.is_connected(&connection).map_err(|error| FsError::Thread { error: error.into() })?;
        if tree.by_rings.load(Relaxed) {
            let rings = Rings::start(&connection, RING_BYTES_MAX as usize, &tree);
            mount.rings = Some(rings.map_err(|error| FsError::Rings { error })?);
        } else {
            tree.linger.get_or_init(|| Linger::new(connection));
        }
        let notifier = session.notifier();
        let device = mount.at.line.as_ref().map(|line| line.device.clone()).unwrap_or_default();
        let kernel = Kernel { notifier, connection: to_tell, inodes, device, table: OpenTable::new().ok() };
        let tell = move || tell(&heard, &kernel);
        let started = thread::Builder::new().name("notices".into()).spawn(tell);
        started.map_err(|error| FsError::Thread { error })?;
        start_upkeep(&cache, options.exclusive)?;
        jobs.start(Arc::downgrade(&tree)).map_err(|error| FsError::Thread { error })?;
        mount.session = Some(session.spawn().map_err(|error| FsError::Thread { error })?);
        Ok(mount)
    }

    /// Where it is mounted, and can be unmounted.
    pub fn at(&self) -> &MountedAt {
        &self.at
    }

    /// Returns when it is unmounted and every request was answered.
    ///
    /// # Errors
    /// The connection to the kernel failed in another way than by being unmounted.
    pub fn wait(mut self) -> io::Result<()> {
        self.mounted = false;
        let ended = self.session.take().map_or(Ok(()), BackgroundSession::join);
        if let Some(rings) = self.rings.take() {
            rings.join();
        }
        ended
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted {
            let _ = self.at.unmount();
        }
    }
}

/// Whether what failed there says that the mount's server has died: before it was asked, or while it was, through /dev/fuse or by io_uring.
pub fn is_dead(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED))
}

/// Whether what is seen at `target` is a mount whose server has died. The kernel may believe for a while what that has said of its root; this it asks always.
pub fn has_dead_server(target: &Path) -> bool {
    statvfs(target).is_err_and(|error| is_dead(&error.into()))
}

/// Unmounts what is mounted at `target`, whether its server lives or not.
///
/// # Errors
/// [`FsError::InUse`], [`FsError::Unmount`]; it is mounted still.
pub fn unmount(target: &Path) -> Result<(), FsError> {
    let path = target.to_owned();
    match rustix::mount::unmount(target, UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(FsError::InUse { path }),
        Err(Errno::PERM) => helper::unmount(target),
        Err(error) => Err(FsError::Unmount { path, error: error.into() }),
    }
}

/// Both places as they are called without links, if they can be used together.
fn places(options: &MountOptions) -> Result<(PathBuf, PathBuf), FsError> {
    let whole = |path: &Path| {
        let path = fs::canonicalize(path)?;
        if has_dead_server(&path) {
            return Err(Errno::NOTCONN.into());
        }
        if fs::metadata(&path)?.is_dir() { Ok(path) } else { Err(io::Error::from(ErrorKind::NotADirectory)) }
    };
    let named = |error: io::Error, path: &Path| {
        let path = path.to_owned();
        if is_dead(&error) { FsError::Dead { path } } else { FsError::Target { path, error } }
    };
    let target = whole(&options.target).map_err(|error| named(error, &options.target))?;
    let source = whole(&options.source).map_err(|error| FsError::Source { path: options.source.clone(), error })?;
    if target != source && target.starts_with(&source) {
        return Err(FsError::Inside { target, origin: source });
    }
    Ok((source, target))
}

/// Mounts, and agrees with the kernel on how it is served: by io_uring if that is meant, or else, if it has that enabled no more, without.
fn connect(
    tree: &Arc<Tree>,
    options: &MountOptions,
    source: &Path,
    target: &Path,
    limits: StatVfsMountFlags,
) -> io::Result<Session<ByLibrary>> {
    let is_meant = tree.by_rings.load(Relaxed);
    let connected = connect_once(tree, options, source, target, limits);
    let is_refused = connected.is_err() && is_meant && !tree.by_rings.load(Relaxed);
    if is_refused { connect_once(tree, options, source, target, limits) } else { connected }
}

fn connect_once(
    tree: &Arc<Tree>,
    options: &MountOptions,
    source: &Path,
    target: &Path,
    limits: StatVfsMountFlags,
) -> io::Result<Session<ByLibrary>> {
    let mut config = Config::default();
    // By rings, the library has little left to do.
    let by_rings = tree.by_rings.load(Relaxed);
    config.n_threads = Some(if by_rings { 1 } else { options.threads.get() });
    let tree = ByLibrary(tree.clone());
    config.clone_fd = true;
    let read_bytes_max = request_bytes_max(by_rings);
    let device = match geteuid().is_root() {
        true => mount_as_root(options, source, target, limits, read_bytes_max)?,
        false => helper::mount(target, &helper::options(source, limits, options.allow_other, read_bytes_max))?,
    };
    // The kernel lets in whom it may.
    Session::from_fd(tree, device, SessionACL::All, config).inspect_err(|_| {
        if rustix::mount::unmount(target, UnmountFlags::DETACH).is_err() {
            helper::detach(target);
        }
    })
}

fn mount_as_root(
    options: &MountOptions,
    source: &Path,
    target: &Path,
    limits: StatVfsMountFlags,
    read_bytes_max: u32,
) -> io::Result<OwnedFd> {
    let device = OpenOptions::new().read(true).write(true).open(DEVICE)?;
    let device = OwnedFd::from(device);
    let mut how = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,max_read={}",
        device.as_raw_fd(),
        getuid().as_raw(),
        getgid().as_raw(),
        read_bytes_max
    );
    if options.allow_other {
        how += ",allow_other";
    }
    let how = CString::new(how)?;
    mount(source, target, KIND, flags(limits), how.as_c_str())?;
    Ok(device)
}

/// The flags of a mount that forbids the same.
fn flags(limits: StatVfsMountFlags) -> MountFlags {
    let pairs = [
        (StatVfsMountFlags::RDONLY, MountFlags::RDONLY),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
    ];
    pairs
        .into_iter()
        .filter(|(limit, _)| limits.contains(*limit))
        .fold(MountFlags::empty(), |all, (_, flag)| all | flag)
}

/// Whose thread does what the cache needs done beside reading and writing.
fn start_upkeep(cache: &Arc<Cache<Stamp>>, keeps_written: bool) -> Result<(), FsError> {
    let mut worker = cache.worker().map_err(|error| FsError::Memory { error })?;
    if keeps_written {
        // The first write is kept, too, however late the thread comes.
        cache.keep_written(&mut worker, Duration::ZERO);
    }
    let cache = Arc::downgrade(cache);
    let keep_up = move || Cache::keep_up(&cache, worker, keeps_written);
    let started = thread::Builder::new().name("upkeep".into()).spawn(keep_up);
    started.map(drop).map_err(|error| FsError::Thread { error })
}

/// Who is told, and what he knows.
struct Kernel {
    notifier: Notifier,
    /// For what that does not know.
    connection: OwnedFd,
    inodes: Arc<Inodes>,
    /// The mount's number in the table of mounts; empty where that cannot be read.
    device: Vec<u8>,
    /// Open all the time: it is read when descriptors are short.
    table: Option<OpenTable>,
}

impl Kernel {
    fn mounted_on(&self) -> MountedOn {
        let table = self.table.as_ref().and_then(|table| table.read().ok()).unwrap_or_default();
        MountedOn::read(&table, &self.device, &self.inodes)
    }

    /// Has it forget these names. Returns those that it must keep.
    fn forget(&self, names: Vec<Place>, mounted_on: &MountedOn) -> Vec<Place> {
        let (kept, forgotten): (Vec<_>, Vec<_>) = names.into_iter().partition(|place| mounted_on.has(place));
        for (parent, name) in forgotten {
            let _ = self.notifier.inval_entry(parent, &name);
        }
        kept
    }

    /// Has it forget a file that nobody uses.
    fn forget_unused(&self, node: &Node) {
        let names = node.names.all();
        if prune(&self.connection, node.number).is_err() && !names.is_empty() {
            // Before Linux 6.18 by its names, also if somebody does.
            self.forget(names, &self.mounted_on());
        }
    }
}

/// Tells the kernel what it must hear. Not done by a thread that serves: the kernel may wait for a request meanwhile.
fn tell(notices: &Receiver<Notice>, kernel: &Kernel) {
    let Kernel { notifier, inodes, .. } = kernel;
    // All were in use, it seems: until then, or until there are many more, whoever wants room is not heard.
    let mut rest_until: Option<Instant> = None;
    loop {
        let left = rest_until.map(|until| until.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            inodes.heard();
            rest_until = None;
            continue;
        }
        let notice = match left {
            None => notices.recv().map_err(RecvTimeoutError::from),
            Some(left) => notices.recv_timeout(left),
        };
        match notice {
            // A file that the kernel does not know any more needs nothing.
            Ok(Notice::Outdated(number)) => drop(notifier.inval_inode(number, 0, 0)),
            Ok(Notice::Superfluous(number)) => {
                // Those that come to be too many meanwhile are told of again, behind what others wait for.
                if let Ok(node) = inodes.get(number) {
                    let kept = kernel.forget(node.names.take_superfluous(), &kernel.mounted_on());
                    kept.iter().for_each(|(parent, name)| node.names.add(*parent, name));
                }
            }
            Ok(Notice::ToForget(number)) => {
                if let Ok(node) = inodes.get(number)
                    && node.ways.are_to_be_forgotten()
                {
                    kernel.forget_unused(&node);
                }
            }
            Ok(Notice::Crowded) if rest_until.is_none() || inodes.is_crowded() => {
                inodes.heard();
                let begun = Instant::now();
                rest_until = (!make_room(kernel)).then(|| {
                    inodes.tolerate();
                    Instant::now() + (begun.elapsed() * REST).min(REST_MAX)
                });
            }
            // Asked again, he may be heard: there may be many more by then.
            Ok(Notice::Crowded) => inodes.ignored(),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Has the kernel forget files, from the one met first on, until it knows few enough, or was asked for all of them. Whether it knows few enough.
fn make_room(kernel: &Kernel) -> bool {
    let (inodes, mut mounted_on) = (&kernel.inodes, MountedOn::default());
    for asked in 0..inodes.count() {
        if asked % LOOKED_AFTER == 0 {
            mounted_on = kernel.mounted_on();
        }
        if !inodes.is_crowded() {
            return true;
        }
        let Some(node) = inodes.oldest() else { break };
        kernel.forget(node.names.all(), &mounted_on);
    }
    !inodes.is_crowded()
}

#[cfg(test)]
mod tests {
    use compcache_testkit::features::{Feature, mounts, requires, skip};

    use super::*;

    #[test]
    fn what_is_mounted_in_a_mounts_place_is_left_alone() {
        let ours = "90 22 0:50 / /mnt rw - fuse.compcache /srv rw\n";
        let over = "91 90 0:51 / /mnt rw - tmpfs none rw\n";
        let other = "92 22 0:52 / /mnt rw - fuse.compcache /srv rw\n";
        let line = Line { id: b"90".to_vec(), device: b"0:50".to_vec() };
        let place = |table: &[&str]| line.place(table.concat().as_bytes());
        assert!(matches!(place(&[ours]), Ok(Some(place)) if place == Path::new("/mnt")));
        assert!(matches!(place(&[ours, over]), Err(FsError::Covered { .. })));
        assert!(matches!(place(&[]), Ok(None)));
        assert!(matches!(place(&[other]), Ok(None)), "ours was unmounted, and another mounted");
    }

    #[test]
    fn a_mount_is_found_where_it_was_moved_and_one_of_the_same_tree_is_not_taken_for_it() {
        let moved = "90 22 0:50 / /other rw - fuse.compcache /srv rw\n";
        let bound = "93 22 0:50 /sub /bound rw - fuse.compcache /srv rw\n";
        let line = Line { id: b"90".to_vec(), device: b"0:50".to_vec() };
        let place = |table: &[&str]| line.place(table.concat().as_bytes()).unwrap();
        assert_eq!(place(&[bound, moved]), Some("/other".into()));
        assert_eq!(place(&[bound]), None);
        assert_eq!(line.elsewhere(bound.as_bytes()), Some("/bound".into()));
        assert_eq!(line.elsewhere(b"94 22 0:51 / /mnt rw - fuse.compcache /srv rw\n"), None);
    }

    #[test]
    fn a_kernel_that_has_io_uring_enabled_no_more_is_served_by_all_threads() {
        if !requires(&[Feature::Root, Feature::Fuse]) {
            return;
        }
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let options = MountOptions {
            threads: NonZeroUsize::new(3).unwrap(),
            ..MountOptions::new(source.path(), target.path(), 1 << 20)
        };
        let (tree, _) = Tree::new(Parts {
            inodes: Inodes::new(source.path()).unwrap().into(),
            cache: Arc::new(Cache::new(options.memory_bytes, options.codec).unwrap()),
            exclusive: false,
            writes_back: false,
            passthrough: Passthrough::None,
            remembered: Remembered::Nothing,
            whole_bytes: || 0,
            watches: None,
            notices: channel().0,
            by_rings: true,
        });
        let tree = Arc::new(tree);
        let session = connect(&tree, &options, source.path(), target.path(), StatVfsMountFlags::empty()).unwrap();
        let mounts = mounts();
        if tree.by_rings.load(Relaxed) {
            skip("the kernel agrees to io_uring");
            return rustix::mount::unmount(target.path(), UnmountFlags::DETACH).unwrap();
        }
        assert_eq!(mounts.matches(target.path().to_str().unwrap()).count(), 1, "{mounts}");
        assert!(mounts.contains(&format!("max_read={}", request_bytes_max(false))), "{mounts}");
        let served = session.spawn().unwrap();
        let threads = || {
            let tasks = fs::read_dir("/proc/self/task").unwrap();
            let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
            names.filter(|name| name.starts_with("fuser-") && *name != "fuser-bg\n").count()
        };
        let give_up = Instant::now() + Duration::from_secs(20);
        while threads() != 3 {
            assert!(Instant::now() < give_up, "{} threads serve", threads());
            thread::sleep(Duration::from_millis(5));
        }
        unmount(target.path()).unwrap();
        served.join().unwrap();
    }
}
