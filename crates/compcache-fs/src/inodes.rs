//! The files that the kernel knows of: a number for each, and a descriptor that holds it.
//!
//! The kernel speaks of files by number, long after their names have changed. For each number it was given we keep a descriptor opened with
//! O_PATH, which stands for the file itself: renaming, unlinking or replacing its name changes nothing, and the file system below cannot
//! give its inode number to another file while we hold it. The kernel counts how often it was given a number and says when it forgets.
//!
//! **Numbers** are those below, so that `st_ino` is: on the device of the root the inode's own number; on others (a mount below the
//! source) the number with upper 16 bits that are the device's, counted down as they are met, past those that files of the root's device have had; numbers that do not fit so, or whose
//! upper bits are another device's, and number 1, which is the root's by the protocol, get one from a counter, each time that they are met.
//!
//! | device | number below        | number given        |
//! |--------|---------------------|---------------------|
//! | root's | 1835009             | 1835009             |
//! | root's | 0x0003_0000001c0001 | 0x0003_0000001c0001 |
//! | second | 1835009             | 0xfffe_0000001c0001 |
//! | root's | 1                   | 0xffff_000000000000 |
//!
//! A file server may remove a file that we hold, and give its number to another, which is then met under the number that the kernel knows the first by. That one gets a number from
//! the counter; so do all but the first of those that only look like one file (`twins.rs`). Else the number of a file that is held is nobody else's.
//!
//! **Room.** The kernel remembers every file it has met until it wants the memory, and a process has only so many descriptors. When half of them
//! are taken, the files that were met first are handed, by all of their names, to a thread that has the kernel forget them ([`Inodes::oldest`]); it keeps those that are
//! in use, and says of the others that they are forgotten. Directories are left alone, and files that something is mounted on (`mounted_on.rs`): the kernel would unmount it.
//!
//! The idea of holding files by O_PATH is libfuse's `passthrough_ll`. One lock, held for a few map operations and never around a system call.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use compcache_cache::FileId;
use fuser::INodeNo;
use rustix::fs::{CWD, FileType, Mode, OFlags, StatVfsMountFlags, Statx, fstatvfs, openat};
use rustix::io::{self, Errno};

use crate::astray::Way;
use crate::kinds::{Kind, Kinds};
use crate::names::Given;
use crate::node::Node;
use crate::stamp::{generation_of, id_at, id_of, look, mount_of};
use crate::twins::{self, Comparison};

const DEVICE_SHIFT: u32 = 48;
/// Descriptors that are not for files the kernel knows.
const SPARE: u64 = 256;
/// How often, and for how long, a request waits for a descriptor.
const ROOM_TRIES: u32 = 500;
const ROOM_PAUSE: Duration = Duration::from_millis(2);
/// How often it is looked again where a directory is, while something is moved.
const MOVES_AWAITED: u32 = 100;
/// What is not allowed of a file whose mount does not say what it forbids.
const ALL_LIMITS: StatVfsMountFlags =
    StatVfsMountFlags::NOSUID.union(StatVfsMountFlags::NODEV).union(StatVfsMountFlags::NOEXEC);
/// Numbers that are nobody's below.
const COUNTED: u64 = 0xffff << DEVICE_SHIFT;
/// Where no file is: a device's number has 32 bits twice, of which the kernel uses as many in all.
const NO_DEVICE: u64 = u64::MAX;
/// All upper bits but theirs.
const UPPERS: usize = 0xffff;

struct Known {
    node: Arc<Node>,
    /// How often the kernel was given the number, less how often it forgot it.
    lookups: u64,
    /// When it was met; never, if it is not to be forgotten.
    met: Option<u64>,
}

/// Whose numbers have these upper bits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Upper {
    Free,
    Root,
    Other,
}

struct Table {
    by_number: HashMap<u64, Known>,
    by_id: HashMap<FileId, u64>,
    /// Those that look like another, which is in `by_id`, or was when they were met ([`twins`]).
    twins: HashMap<FileId, Vec<u64>>,
    root_device: u64,
    /// The upper bits of others, if there were any left.
    devices: HashMap<u64, Option<u64>>,
    uppers: Vec<Upper>,
    kinds: Kinds,
    /// Which file was met when, of those that the kernel may be asked to forget: counted, not timed.
    met: BTreeMap<u64, u64>,
    meetings: u64,
}

impl Table {
    fn new(root_device: u64) -> Table {
        let mut uppers = vec![Upper::Free; UPPERS];
        uppers[0] = Upper::Root;
        let (by_number, by_id, twins, devices, kinds, met) = Default::default();
        Table { by_number, by_id, twins, root_device, devices, uppers, kinds, met, meetings: 0 }
    }

    /// The number of a file that follows from its own, if one does.
    fn number(&mut self, id: FileId) -> Option<u64> {
        let upper = id.ino >> DEVICE_SHIFT;
        if id.ino <= INodeNo::ROOT.0 {
            return None;
        }
        if id.dev == self.root_device {
            let whose = self.uppers.get_mut(upper as usize).filter(|whose| **whose != Upper::Other)?;
            *whose = Upper::Root;
            return Some(id.ino);
        }
        let uppers = &mut self.uppers;
        let device = *self.devices.entry(id.dev).or_insert_with(|| {
            let free = uppers.iter().rposition(|whose| *whose == Upper::Free)?;
            uppers[free] = Upper::Other;
            Some(free as u64)
        });
        device.filter(|_| upper == 0).map(|device| device << DEVICE_SHIFT | id.ino)
    }

    /// All that look so.
    fn looking_so(&self, id: FileId) -> impl Iterator<Item = &Arc<Node>> {
        let all = self.by_id.get(&id).into_iter().chain(self.twins.get(&id).into_iter().flatten());
        all.filter_map(|number| self.by_number.get(number)).map(|known| &known.node)
    }

    /// A file is known from now on, and what its file system is.
    fn know(&mut self, kind: Kind, known: Known) {
        self.kinds.hold(known.node.id.dev, kind);
        self.by_number.insert(known.node.number.0, known);
    }

    /// And from now on not.
    fn unknow(&mut self, number: u64) -> Option<Known> {
        self.by_number.remove(&number).inspect(|known| self.kinds.let_go(known.node.id.dev))
    }

    /// A file counts as met last.
    fn meet(&mut self, number: u64) -> u64 {
        self.meetings += 1;
        self.met.insert(self.meetings, number);
        self.meetings
    }
}

/// All of them.
pub struct Inodes {
    table: Mutex<Table>,
    /// Who meets a file that may have twins meets it alone.
    meeting: Mutex<Comparison>,
    counted: AtomicU64,
    /// `/proc/self/fd`, where every descriptor can be opened anew.
    descriptors: OwnedFd,
    root: Arc<Node>,
    /// Above so many known files, some are to be forgotten.
    crowded: usize,
    /// Or above this many, where nothing came of that.
    tolerated: AtomicUsize,
    /// Somebody has been told that there are too many.
    told: AtomicBool,
    /// How often the kernel itself has begun to move something, and how often that was done and noted.
    moves: (AtomicUsize, AtomicUsize),
}

impl Inodes {
    /// The tree at `source`. To be called before anything is mounted over it.
    pub fn new(source: &Path) -> io::Result<Inodes> {
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptors = openat(CWD, "/proc/self/fd", directory, Mode::empty())?;
        let fd = openat(CWD, source, directory, Mode::empty())?;
        let stat = look(&fd)?;
        let id = id_of(&stat);
        let kind = Kind::of(&fd);
        let root = Arc::new(Node::new(INodeNo::ROOT, &stat, StatVfsMountFlags::empty(), true, fd));
        let mut table = Table::new(id.dev);
        table.by_id.insert(id, INodeNo::ROOT.0);
        // Never forgotten.
        table.know(kind, Known { node: root.clone(), lookups: u64::MAX / 2, met: None });
        let room = allow_many_descriptors().saturating_sub(SPARE);
        let crowded = usize::try_from(room / 2).unwrap_or(usize::MAX);
        Ok(Inodes {
            table: Mutex::new(table),
            meeting: Mutex::default(),
            counted: AtomicU64::new(COUNTED),
            descriptors,
            root,
            crowded,
            tolerated: AtomicUsize::new(0),
            told: AtomicBool::new(false),
            moves: Default::default(),
        })
    }

    pub fn root(&self) -> &Node {
        &self.root
    }

    /// A file by the kernel's number.
    pub fn get(&self, number: INodeNo) -> io::Result<Arc<Node>> {
        let table = self.lock();
        table.by_number.get(&number.0).map(|known| known.node.clone()).ok_or(Errno::STALE)
    }

    /// The file with this number below, if the kernel knows it.
    pub fn known(&self, id: FileId) -> Option<Arc<Node>> {
        let table = self.lock();
        let number = table.by_id.get(&id)?;
        Some(table.by_number.get(number)?.node.clone())
    }

    /// The file behind `fd`, opened with O_PATH and found under `name` in `parent`: that which the kernel knows already, or a new one. Counts as
    /// given to the kernel.
    pub fn give(&self, fd: OwnedFd, parent: &Node, name: &OsStr) -> io::Result<(Arc<Node>, Statx)> {
        let stat = look(&fd)?;
        Ok((self.give_as(fd, &stat, parent, name), stat))
    }

    /// The file that looks so, if the kernel knows it; of several, that with this name.
    pub fn known_as(&self, id: FileId, parent: INodeNo, name: &OsStr) -> Option<Arc<Node>> {
        let has_twins = self.lock().twins.contains_key(&id);
        let twin = has_twins.then(|| self.looking_so(id).into_iter().find(|node| node.names.has(parent, name)));
        twin.flatten().or_else(|| self.known(id))
    }

    /// The file that looks so and was found under `name` in `parent`, if the kernel knows it already and no other can have its number; counts as given once more.
    pub fn give_again(&self, stat: &Statx, parent: &Node, name: &OsStr) -> Option<Arc<Node>> {
        let id = id_of(stat);
        let mut table = self.lock();
        if table.kinds.get(id.dev).is_none_or(|kind| kind.is_remote() || twins::may_have(kind, stat)) {
            return None;
        }
        let number = *table.by_id.get(&id)?;
        let known = table.by_number.get_mut(&number)?;
        if known.node.generation != generation_of(stat) {
            return None;
        }
        known.lookups += 1;
        let node = known.node.clone();
        drop(table);
        node.is_found(parent, name);
        Some(node)
    }

    /// Calls `work`, which moves something for the kernel, and takes note of that.
    pub fn moving<T>(&self, work: impl FnOnce() -> T) -> T {
        self.moves.0.fetch_add(1, SeqCst);
        let done = work();
        self.moves.1.fetch_add(1, SeqCst);
        done
    }

    /// Whether a directory is not where the kernel was given it, or one of those above it, as far as they were given within `time`.
    pub fn out_of_place(&self, directory: &Node, time: Duration) -> Option<Way> {
        let begun_and_done = || (self.moves.0.load(SeqCst), self.moves.1.load(SeqCst));
        let mut way = None;
        for _ in 0..MOVES_AWAITED {
            let before = begun_and_done();
            way = self.out_of_place_now(directory, time);
            if way.is_none() || before.0 == before.1 && begun_and_done() == before {
                break;
            }
            // It may be what the kernel moves itself, and knows.
            thread::yield_now();
        }
        way
    }

    /// The same where nothing that the kernel moves is moved and not noted.
    fn out_of_place_now(&self, directory: &Node, time: Duration) -> Option<Way> {
        // A directory that is mounted below itself is above itself.
        let mut seen = vec![directory.number];
        let (mut all, mut id, mut doubtful) = (directory.names.given_within(time), directory.id, None);
        while let Some(last) = all.pop() {
            let is_gone = |given: &Given| {
                // Forgotten by the kernel, nobody comes from there.
                let parent = self.get(given.place.0).ok()?;
                match id_at(&*parent, &given.place.1) {
                    Ok(found) => (found != id).then_some(given.when),
                    Err(Errno::NOENT | Errno::NOTDIR) => Some(given.when),
                    // Whatever else it is, it says nothing of where the directory is.
                    Err(_) => None,
                }
            };
            if let Some(since) = is_gone(&last) {
                return Some(Way { since, is_certain: true });
            }
            // That it was found elsewhere since then, the kernel may not have heard yet.
            doubtful = doubtful.or_else(|| all.iter().find_map(is_gone));
            let Ok(parent) = self.get(last.place.0) else { break };
            if seen.contains(&parent.number) {
                break;
            }
            seen.push(parent.number);
            (all, id) = (parent.names.given_within(time), parent.id);
        }
        doubtful.map(|since| Way { since, is_certain: false })
    }

    /// Whether there is something of this name where the kernel was last given a directory within `time`, be that the directory or another, or a symbolic link on the way there.
    pub fn is_where_it_was(&self, directory: &Node, name: &OsStr, time: Duration) -> bool {
        let last_of = |node: &Node| node.names.given_within(time).pop();
        let (mut seen, mut names, mut given) = (vec![directory.number], Vec::new(), last_of(directory));
        let mut above = None;
        while let Some(Given { place: (parent, name), .. }) = given {
            let Ok(parent) = self.get(parent) else { break };
            if seen.contains(&parent.number) {
                break;
            }
            seen.push(parent.number);
            names.push(name);
            given = last_of(&parent);
            above = Some(parent);
        }
        // Step by step: a link might lead anywhere, and into our own mount.
        let Some(above) = above else { return false };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut at = None;
        for name in names.iter().rev() {
            let from = at.as_ref().map_or_else(|| above.as_fd(), OwnedFd::as_fd);
            let Ok(next) = openat(from, name, flags, Mode::empty()) else { return false };
            if look(&next).is_ok_and(|stat| FileType::from_raw_mode(stat.stx_mode.into()).is_symlink()) {
                return true;
            }
            at = Some(next);
        }
        at.is_some_and(|at| id_at(&at, name).is_ok())
    }

    /// The same as [`Inodes::give`] of a file that looks like this.
    pub fn give_as(&self, fd: OwnedFd, stat: &Statx, parent: &Node, name: &OsStr) -> Arc<Node> {
        let id = id_of(stat);
        let dead = self.dead(id, stat, &fd);
        let is_beside = mount_of(stat) == parent.mount;
        // Asked outside the lock: the answer may come from a file server.
        let limits = if is_beside { parent.limits } else { limits_of(&fd) };
        let kind = self.kind(id, &fd);
        let is_steady = !kind.is_fuse();
        let may_have_twins = twins::may_have(kind, stat);
        let mut alone = may_have_twins.then(|| self.meeting.lock().unwrap_or_else(PoisonError::into_inner));
        let same = alone.as_mut().and_then(|comparison| self.same(comparison, id, &fd, (parent.number, name)));
        let mut table = self.lock();
        let known = if may_have_twins { same } else { table.by_id.get(&id).copied() };
        let is_twin = may_have_twins && known.is_none() && table.by_id.contains_key(&id);
        if let Some(number) = known.filter(|number| Some(*number) != dead)
            && let Some(known) = table.by_number.get_mut(&number)
        {
            known.lookups += 1;
            let node = known.node.clone();
            drop(table);
            node.is_found(parent, name);
            return node;
        }
        let number = if dead.is_some() || is_twin { self.next_counted() } else { self.number(&mut table, id) };
        // The kernel still calls another by the number that this one would have: one that is dead, whoever is known by its identity since.
        let number = if table.by_number.contains_key(&number) { self.next_counted() } else { number };
        let is_directory = FileType::from_raw_mode(stat.stx_mode.into()).is_dir();
        let mut node = Node::new(INodeNo(number), stat, limits, is_steady, fd);
        if may_have_twins {
            node.pages = FileId { dev: NO_DEVICE, ino: self.next_counted() };
        }
        let node = Arc::new(node);
        if is_twin {
            table.twins.entry(id).or_default().push(number);
        } else {
            table.by_id.insert(id, number);
        }
        let met = (!is_directory).then(|| table.meet(number));
        table.know(kind, Known { node: node.clone(), lookups: 1, met });
        drop(table);
        node.is_found(parent, name);
        node
    }

    /// What the kernel calls the one of those that look so that is this one.
    fn same(&self, comparison: &mut Comparison, id: FileId, fd: &OwnedFd, place: (INodeNo, &OsStr)) -> Option<u64> {
        let mut all = self.looking_so(id);
        // Mostly it is where it was.
        all.sort_by_key(|node| !node.names.has(place.0, place.1));
        comparison.find(fd, all.iter().map(Arc::as_ref)).map(|node| node.number.0)
    }

    fn looking_so(&self, id: FileId) -> Vec<Arc<Node>> {
        self.lock().looking_so(id).cloned().collect()
    }

    /// What the kernel calls a file that had this number below, if that is another's by now: a file server does not know that we hold the file, and gives its
    /// number away when it is removed there.
    fn dead(&self, id: FileId, stat: &Statx, fd: &OwnedFd) -> Option<u64> {
        if !self.is_remote(id, fd) {
            return None;
        }
        let table = self.lock();
        let node = table.by_id.get(&id).and_then(|number| table.by_number.get(number))?.node.clone();
        drop(table);
        let generation = generation_of(stat);
        let was_made_later = generation != node.generation && generation != 0 && node.generation != 0;
        (was_made_later || node.look().err() == Some(Errno::STALE)).then_some(node.number.0)
    }

    /// Whether a file, with this descriptor, is on a server, which may use its number again while we hold it, and asks by itself who may do what.
    pub fn is_remote(&self, id: FileId, fd: &OwnedFd) -> bool {
        self.kind(id, fd).is_remote()
    }

    /// Whether its file system may say something when it is closed.
    pub fn tells_at_close(&self, id: FileId, fd: &OwnedFd) -> bool {
        self.kind(id, fd).tells_at_close()
    }

    /// Whether a file of no length has none.
    pub fn has_lengths(&self, id: FileId, fd: &OwnedFd) -> bool {
        self.kind(id, fd).has_lengths()
    }

    /// Whether a directory there may have a file under names of other spellings than it lists.
    pub fn folds_case(&self, node: &Node) -> bool {
        self.kind(node.id, &node.fd).folds_case()
    }

    /// What its file system is.
    fn kind(&self, id: FileId, fd: &OwnedFd) -> Kind {
        let known = self.lock().kinds.get(id.dev);
        // Asked outside the lock, as above.
        known.unwrap_or_else(|| Kind::of(fd))
    }

    /// How many files the kernel may be asked to forget.
    pub fn count(&self) -> usize {
        self.lock().met.len()
    }

    /// Whether some files are to be forgotten for others to have room.
    pub fn is_crowded(&self) -> bool {
        self.lock().by_number.len() > self.crowded.max(self.tolerated.load(Relaxed))
    }

    /// As many as there are now, and an eighth of the limit more, are not too many, until somebody [hears](Inodes::heard) again: it was tried in vain.
    /// Not more: who waits for a descriptor holds his directory meanwhile, and the kernel forgets nothing of that.
    pub fn tolerate(&self) {
        let known = self.lock().by_number.len();
        self.tolerated.store(known + self.crowded / 8, Relaxed);
    }

    /// Whether it is to be told that there are too many files; once, until it [is heard](Inodes::heard) or [ignored](Inodes::ignored).
    pub fn is_to_be_told(&self) -> bool {
        !self.told.swap(true, Relaxed)
    }

    /// Who was told begins to do something about it.
    pub fn heard(&self) {
        self.told.store(false, Relaxed);
        self.tolerated.store(0, Relaxed);
    }

    /// Who was told does nothing about it, and is to be told again.
    pub fn ignored(&self) {
        self.told.store(false, Relaxed);
    }

    /// The file that was met first of those that are known; it counts as met last from now on.
    pub fn oldest(&self) -> Option<Arc<Node>> {
        let mut table = self.lock();
        let (_, number) = table.met.pop_first()?;
        let met = table.meet(number);
        let known = table.by_number.get_mut(&number)?;
        known.met = Some(met);
        Some(known.node.clone())
    }

    /// Whether so many open files may have a second descriptor each: those are a quarter of all at most.
    pub fn has_room_for_two_each(&self, open_files: usize) -> bool {
        open_files <= self.crowded / 2
    }

    /// Calls `open`, again if there is no descriptor to be had; calls `ask_for_room` before.
    pub fn with_room<T>(&self, ask_for_room: impl Fn(), open: impl Fn() -> io::Result<T>) -> io::Result<T> {
        for _ in 0..ROOM_TRIES {
            match open() {
                Err(Errno::MFILE) => {
                    ask_for_room();
                    thread::sleep(ROOM_PAUSE);
                }
                other => return other,
            }
        }
        open()
    }

    /// The kernel forgets `count` of the times it was given a number.
    pub fn forget(&self, number: INodeNo, count: u64) {
        let mut table = self.lock();
        let Some(known) = table.by_number.get_mut(&number.0) else { return };
        known.lookups = known.lookups.saturating_sub(count);
        if known.lookups > 0 {
            return;
        }
        let gone = table.unknow(number.0);
        if let Some(known) = &gone {
            // A file that has its number below by now keeps it.
            if table.by_id.get(&known.node.id) == Some(&number.0) {
                table.by_id.remove(&known.node.id);
            }
            if let Entry::Occupied(mut twins) = table.twins.entry(known.node.id) {
                twins.get_mut().retain(|twin| *twin != number.0);
                if twins.get().is_empty() {
                    twins.remove();
                }
            }
            known.met.map(|met| table.met.remove(&met));
        }
        drop(table);
        // Closed only here, outside the lock.
        drop(gone);
    }

    /// The number that programs are shown for a file, which may not be known yet. The root is number 1 to the kernel alone.
    pub fn shown(&self, id: FileId) -> u64 {
        let mut table = self.lock();
        match table.by_id.get(&id) {
            Some(number) if *number == INodeNo::ROOT.0 => id.ino,
            Some(number) => *number,
            None => self.number(&mut table, id),
        }
    }

    /// Opens the file itself, for what its descriptor is not good for.
    pub fn reach(&self, node: &Node, flags: OFlags) -> io::Result<OwnedFd> {
        openat(&self.descriptors, node.name(), flags | OFlags::CLOEXEC, Mode::empty())
    }

    /// An O_PATH descriptor for a file that is open.
    pub fn place_of(&self, open: &OwnedFd) -> io::Result<OwnedFd> {
        self.anew(open, OFlags::PATH)
    }

    /// Opens what `fd` is a descriptor of.
    pub fn anew(&self, fd: &OwnedFd, flags: OFlags) -> io::Result<OwnedFd> {
        openat(&self.descriptors, fd.as_raw_fd().to_string(), flags | OFlags::CLOEXEC, Mode::empty())
    }

    fn number(&self, table: &mut Table, id: FileId) -> u64 {
        table.number(id).unwrap_or_else(|| self.next_counted())
    }

    fn next_counted(&self) -> u64 {
        self.counted.fetch_add(1, Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the mount forbids that `fd` lies on.
fn limits_of(fd: &OwnedFd) -> StatVfsMountFlags {
    fstatvfs(fd).map_or(ALL_LIMITS, |stat| stat.f_flag)
}

/// Lets the process hold as many files as it may, and returns how many: each that the kernel knows takes a descriptor.
fn allow_many_descriptors() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // If it may not be, the kernel is told to forget files earlier.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn place(path: &Path) -> OwnedFd {
        openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }

    #[test]
    fn a_file_has_its_own_number_until_it_was_forgotten_as_often_as_given() {
        let directory = tempfile::tempdir().unwrap();
        File::create(directory.path().join("a")).unwrap();
        std::fs::hard_link(directory.path().join("a"), directory.path().join("b")).unwrap();
        let inodes = Inodes::new(directory.path()).unwrap();
        let (one, stat) = inodes.give(place(&directory.path().join("a")), inodes.root(), OsStr::new("a")).unwrap();
        let (two, _) = inodes.give(place(&directory.path().join("b")), inodes.root(), OsStr::new("b")).unwrap();
        assert!(Arc::ptr_eq(&one, &two), "two names, one file");
        assert_eq!(one.number.0, stat.stx_ino);
        let names = |node: Arc<Node>| node.names.all();
        let both = ["a", "b"].map(|name| (INodeNo::ROOT, name.into()));
        assert_eq!(inodes.oldest().map(names), Some(both.into()));
        assert!(inodes.known(one.id).is_some_and(|known| Arc::ptr_eq(&known, &one)));
        inodes.forget(one.number, 1);
        assert!(inodes.get(one.number).is_ok());
        inodes.forget(one.number, 1);
        assert_eq!(inodes.get(one.number).err(), Some(Errno::STALE));
        assert!(inodes.oldest().is_none() && inodes.known(one.id).is_none());
        assert!(inodes.get(INodeNo::ROOT).is_ok(), "the root stays");
    }

    #[test]
    fn what_a_file_system_is_is_known_as_long_as_one_of_its_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        File::create(&path).unwrap();
        let inodes = Inodes::new(directory.path()).unwrap();
        let mut elsewhere = look(place(&path)).unwrap();
        elsewhere.stx_dev_minor += 1;
        let give = || inodes.give_as(place(&path), &elsewhere, inodes.root(), OsStr::new("f"));
        let node = give();
        assert_eq!(give().number, node.number);
        let is_known = || inodes.lock().kinds.get(node.id.dev).is_some();
        inodes.forget(node.number, 1);
        assert!(is_known());
        inodes.forget(node.number, 1);
        // Whoever asks for it afterwards notes nothing.
        assert!(!inodes.is_remote(node.id, &place(&path)) && !is_known(), "its number may be another's by now");
    }

    #[test]
    fn a_file_with_the_number_of_one_that_is_no_more_on_a_file_server_is_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        File::create(&path).unwrap();
        let inodes = Inodes::new(directory.path()).unwrap();
        let give = |stat: &Statx| inodes.give_as(place(&path), stat, inodes.root(), OsStr::new("f"));
        let stat = look(place(&path)).unwrap();
        let mut later = stat;
        later.stx_btime.tv_sec += 1;
        let old = give(&stat);
        assert!(Arc::ptr_eq(&old, &give(&later)), "no file server: another layer of the same file");
        inodes.lock().kinds.set(old.id.dev, Kind::NFS);
        assert!(Arc::ptr_eq(&old, &give(&stat)));
        let new = give(&later);
        assert!(!Arc::ptr_eq(&old, &new) && new.number.0 >= COUNTED);
        assert!(Arc::ptr_eq(&new, &give(&later)));
        inodes.forget(old.number, 3);
        assert_eq!(inodes.get(old.number).err(), Some(Errno::STALE));
        assert!(Arc::ptr_eq(&new, &inodes.known(old.id).unwrap()), "what is forgotten of the one is not of the other");
        inodes.forget(new.number, 2);
        assert!(inodes.known(old.id).is_none());
    }

    #[test]
    fn nothing_is_left_of_a_file_that_was_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let _files = ["a", "b", "c"].map(|name| File::create(path(name)).unwrap());
        let inodes = Inodes::new(directory.path()).unwrap();
        let give = |name: &str| inodes.give(place(&path(name)), inodes.root(), OsStr::new(name)).unwrap().0.number;
        let [a, _, c] = ["a", "b", "c"].map(give);
        for _ in 0..100 {
            inodes.forget(a, 1);
            assert_eq!(give("a"), a);
        }
        assert_eq!(inodes.count(), 3);
        let oldest = || inodes.oldest().unwrap().names.all().remove(0).1;
        assert_eq!([oldest(), oldest(), oldest(), oldest()], ["b", "c", "a", "b"]);
        inodes.forget(c, 1);
        assert_eq!([oldest(), oldest(), oldest()], ["a", "b", "a"]);
        assert_eq!(inodes.count(), 2);
    }

    #[test]
    fn who_was_ignored_is_told_again_and_heard_when_there_are_many_more() {
        let directory = tempfile::tempdir().unwrap();
        let mut inodes = Inodes::new(directory.path()).unwrap();
        inodes.crowded = 16;
        let give = |name: usize| {
            let path = directory.path().join(name.to_string());
            File::create(&path).unwrap();
            inodes.give(place(&path), inodes.root(), path.file_name().unwrap()).unwrap();
        };
        (0..16).for_each(give);
        assert!(inodes.is_crowded() && inodes.is_to_be_told() && !inodes.is_to_be_told());
        inodes.heard();
        inodes.tolerate();
        // Who has no descriptor while the thread that makes room rests is ignored, and who asks next is told of again.
        assert!(!inodes.is_crowded() && inodes.is_to_be_told());
        inodes.ignored();
        assert!(!inodes.is_crowded(), "so many are tolerated still");
        (16..19).for_each(give);
        assert!(inodes.is_crowded() && inodes.is_to_be_told());
    }

    #[test]
    fn long_numbers_stay_what_they_are_and_are_nobody_elses() {
        let mut table = Table::new(7);
        let mut number = |dev, ino| table.number(FileId { dev, ino });
        let long = |upper: u64| upper << 48 | 99;
        assert_eq!([number(7, long(3)), number(7, long(0xfffe))], [Some(long(3)), Some(long(0xfffe))]);
        assert_eq!(number(8, 99), Some(long(0xfffd)), "the first upper bits that were left");
        assert_eq!(number(7, long(0xfffd)), None, "those are another device's by now");
        assert_eq!([number(7, long(0xffff)), number(8, long(3)), number(7, 1)], [None; 3]);
        assert_eq!([number(7, long(3)), number(8, 99)], [Some(long(3)), Some(long(0xfffd))], "the same again");
        (0..0xffff).for_each(|upper| assert!(upper == 0xfffd || number(7, long(upper)).is_some()));
        assert_eq!(number(9, 99), None, "no upper bits are left");
    }

    #[test]
    fn the_root_is_number_one_and_another_file_of_that_number_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let inodes = Inodes::new(directory.path()).unwrap();
        let mut table = Table::new(7);
        assert_eq!(inodes.number(&mut table, FileId { dev: 7, ino: 99 }), 99);
        assert_eq!(inodes.number(&mut table, FileId { dev: 8, ino: 99 }), 0xfffe << 48 | 99);
        assert_eq!(inodes.number(&mut table, FileId { dev: 7, ino: 1 }), COUNTED);
        let (root, _) = inodes.give(place(directory.path()), inodes.root(), OsStr::new(".")).unwrap();
        assert_eq!(root.number, INodeNo::ROOT);
    }
}
