//! Files that are open, watched for changes behind the mount.
//!
//! What reaches us is always looked at anew; the kernel's own pages are not. So each file is watched (inotify) while it is open, and when it is
//! changed the kernel is told to forget what it keeps of it. inotify does not say by whom a file was changed: what is written through the mount counts, too,
//! and is then read anew. That is why this is not done unasked.
//!
//! A watch is one of those that a user may have (`fs.inotify.max_user_watches`). Beyond them, and where the file may not be read, a
//! file is not watched, and is as it would be without this. Writing through a mapping behind the mount changes nothing that inotify hears of.
//!
//! A file may be closed, and forgotten by the kernel, between a change and the moment we read of it, and our pages of it would outlive both. So a watch is
//! known until the kernel says that no more is to come of it (IN_IGNORED, which is queued behind its changes), and by the file's identity, not only by
//! the kernel's number. Numbers of watches are not given twice, short of two thousand million of them.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use compcache_cache::FileId;
use fuser::INodeNo;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io;

use crate::node::Node;

/// How long it may take to be noticed that there is nothing to watch for any more.
const PATIENCE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Of changes that come close together the kernel is told once.
const TOGETHER: Duration = Duration::from_millis(10);
const EVENTS_BYTES: usize = 16 << 10;

/// A file that somebody has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// What the kernel calls it, if it knows it still.
    pub number: INodeNo,
    /// Under what its pages are kept.
    pub pages: FileId,
}

struct Watched {
    file: Changed,
    /// How often it is open. Not at all: of its changes some may be waiting to be read.
    opens: u32,
}

#[derive(Default)]
struct Table {
    by_watch: HashMap<i32, Watched>,
    by_number: HashMap<u64, i32>,
}

pub struct Watches {
    inotify: OwnedFd,
    table: Mutex<Table>,
}

impl Watches {
    /// None yet.
    pub fn new() -> io::Result<Watches> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Watches { inotify, table: Mutex::default() })
    }

    /// A file is opened: from here on changes are noticed. Returns whether it can be watched.
    pub fn begin(&self, node: &Node) -> bool {
        let mut table = self.lock();
        // The same file has the same watch.
        let Ok(watch) = inotify::add_watch(&self.inotify, node.path(), WatchFlags::MODIFY) else { return false };
        table.by_number.insert(node.number.0, watch);
        let file = Changed { number: node.number, pages: node.pages };
        table.by_watch.entry(watch).or_insert(Watched { file, opens: 0 }).opens += 1;
        true
    }

    /// It is closed, once for each time it could be watched.
    pub fn end(&self, node: &Node) {
        let mut table = self.lock();
        let Some(watch) = table.by_number.get(&node.number.0).copied() else { return };
        let Some(watched) = table.by_watch.get_mut(&watch) else { return };
        watched.opens -= 1;
        if watched.opens == 0 {
            table.by_number.remove(&node.number.0);
            let _ = inotify::remove_watch(&self.inotify, watch);
        }
    }

    /// Starts a thread that calls `changed` for files that were changed, as long as there are watches and it says that somebody listens.
    pub fn start(self: &Arc<Watches>, changed: impl Fn(Changed) -> bool + Send + 'static) -> std::io::Result<()> {
        let watches = Arc::downgrade(self);
        let listen = move || {
            let mut events = vec![MaybeUninit::uninit(); EVENTS_BYTES];
            while let Some(watches) = watches.upgrade() {
                let changes = watches.wait(&mut events);
                if !changes.into_iter().all(&changed) {
                    return;
                }
                drop(watches);
                thread::sleep(TOGETHER);
            }
        };
        thread::Builder::new().name("watch".into()).spawn(listen).map(drop)
    }

    /// The files that were changed, each once; none after a while.
    fn wait(&self, events: &mut [MaybeUninit<u8>]) -> Vec<Changed> {
        let _ = poll(&mut [PollFd::new(&self.inotify, PollFlags::IN)], Some(&PATIENCE));
        let (mut watches, mut ended, mut is_lost) = (Vec::new(), Vec::new(), false);
        let mut reader = Reader::new(&self.inotify, events);
        while let Ok(event) = reader.next() {
            is_lost |= event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            let is_last = event.events().contains(ReadFlags::IGNORED);
            if is_last { ended.push(event.wd()) } else { watches.push(event.wd()) }
        }
        let table = &mut *self.lock();
        let changed = if is_lost {
            // Any may have been changed.
            table.by_watch.values().map(|watched| watched.file).collect()
        } else {
            watches.sort_unstable();
            watches.dedup();
            watches.iter().filter_map(|watch| Some(table.by_watch.get(watch)?.file)).collect()
        };
        for watch in ended {
            // It may have ended by itself, that is, while the file is open; or that was opened again.
            if let Some(gone) = table.by_watch.remove(&watch)
                && table.by_number.get(&gone.file.number.0) == Some(&watch)
            {
                table.by_number.remove(&gone.file.number.0);
            }
        }
        if is_lost {
            // So may be the last word of those that are closed; what was done to them until then is among what was changed.
            table.by_watch.retain(|_, watched| watched.opens > 0);
        }
        changed
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use rustix::fs::{CWD, Mode, OFlags, openat};

    use super::*;
    use crate::inodes::Inodes;

    fn node(inodes: &Inodes, path: &Path) -> Arc<Node> {
        let place = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        inodes.give(place, inodes.root(), path.file_name().unwrap_or(OsStr::new("f"))).unwrap().0
    }

    fn one_file() -> (tempfile::TempDir, Inodes, Arc<Node>) {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("f"), "old").unwrap();
        let inodes = Inodes::new(directory.path()).unwrap();
        let file = node(&inodes, &directory.path().join("f"));
        (directory, inodes, file)
    }

    fn heard(watches: &Watches) -> Vec<Changed> {
        watches.wait(&mut vec![MaybeUninit::uninit(); EVENTS_BYTES])
    }

    fn is_empty(watches: &Watches) -> bool {
        let table = watches.lock();
        table.by_watch.is_empty() && table.by_number.is_empty()
    }

    #[test]
    fn a_change_is_heard_of_though_the_file_was_closed_and_forgotten_before_it_was_read() {
        let (directory, inodes, file) = one_file();
        let (path, watches) = (directory.path().join("f"), Watches::new().unwrap());
        let changed = Changed { number: file.number, pages: file.pages };
        assert!(watches.begin(&file) && watches.begin(&file));
        watches.end(&file);
        fs::write(&path, "new").unwrap();
        watches.end(&file);
        inodes.forget(file.number, 1);
        drop(file);
        assert_eq!(heard(&watches), [changed]);
        assert!(is_empty(&watches), "what is not open any more is not remembered");
    }

    #[test]
    fn a_file_that_is_opened_again_before_its_end_was_read_is_watched_on() {
        let (directory, _inodes, file) = one_file();
        let (path, watches) = (directory.path().join("f"), Watches::new().unwrap());
        let changed = Changed { number: file.number, pages: file.pages };
        assert!(watches.begin(&file));
        watches.end(&file);
        assert!(watches.begin(&file));
        assert_eq!(heard(&watches), [], "nobody has changed it");
        fs::write(&path, "new").unwrap();
        assert_eq!(heard(&watches), [changed]);
        watches.end(&file);
        assert_eq!(heard(&watches), []);
        assert!(is_empty(&watches));
    }

    #[test]
    fn where_too_much_is_changed_all_may_have_been_and_nothing_is_left_of_what_was_closed() {
        let directory = tempfile::tempdir().unwrap();
        let inodes = Inodes::new(directory.path()).unwrap();
        let watches = Watches::new().unwrap();
        let files = ["a", "b", "c"].map(|name| {
            let file = File::create(directory.path().join(name)).unwrap();
            (node(&inodes, &directory.path().join(name)), file)
        });
        assert!(files.iter().all(|(node, _)| watches.begin(node)));
        let most = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
        // By turns: the same event twice in a row is queued once.
        for _ in 0..=most.trim().parse::<u32>().unwrap() / 2 {
            files[..2].iter().for_each(|(_, file)| file.write_all_at(b"x", 0).unwrap());
        }
        watches.end(&files[0].0);
        let mut changed: Vec<_> = heard(&watches).iter().map(|changed| changed.pages.ino).collect();
        changed.sort_unstable();
        let mut all = files.each_ref().map(|(node, _)| node.pages.ino);
        all.sort_unstable();
        assert_eq!(changed, all);
        assert_eq!(watches.lock().by_watch.len(), 2);
        files[1..].iter().for_each(|(node, _)| watches.end(node));
        assert_eq!(heard(&watches), []);
        assert!(is_empty(&watches));
    }
}
