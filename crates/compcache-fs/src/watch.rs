//! Files that are open, watched for changes behind the mount.
//!
//! What reaches us is always looked at anew; the kernel's own pages are not. So each file is watched (inotify) while it is open, and when it is
//! changed the kernel is told to forget what it keeps of it. inotify does not say by whom a file was changed: what is written through the mount counts, too,
//! and is then read anew. That is why this is not done unasked.
//!
//! A watch is one of those that a user may have (`fs.inotify.max_user_watches`). Beyond them, and where the file may not be read, a
//! file is not watched, and is as it would be without this. Writing through a mapping behind the mount changes nothing that inotify hears of.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use fuser::INodeNo;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io;

use crate::inodes::Node;

/// How long it may take to be noticed that there is nothing to watch for any more.
const PATIENCE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Of changes that come close together the kernel is told once.
const TOGETHER: Duration = Duration::from_millis(10);
const EVENTS_BYTES: usize = 16 << 10;

struct Watched {
    number: INodeNo,
    /// How often it is open.
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
        table.by_watch.entry(watch).or_insert(Watched { number: node.number, opens: 0 }).opens += 1;
        true
    }

    /// It is closed, once for each time it could be watched.
    pub fn end(&self, node: &Node) {
        let mut table = self.lock();
        let Some(watch) = table.by_number.get(&node.number.0).copied() else { return };
        let Some(watched) = table.by_watch.get_mut(&watch) else { return };
        watched.opens -= 1;
        if watched.opens == 0 {
            table.by_watch.remove(&watch);
            table.by_number.remove(&node.number.0);
            let _ = inotify::remove_watch(&self.inotify, watch);
        }
    }

    /// Starts a thread that calls `changed` for files that were changed, as long as there are watches and it says that somebody listens.
    pub fn start(self: &Arc<Watches>, changed: impl Fn(INodeNo) -> bool + Send + 'static) -> std::io::Result<()> {
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
    fn wait(&self, events: &mut [MaybeUninit<u8>]) -> Vec<INodeNo> {
        let _ = poll(&mut [PollFd::new(&self.inotify, PollFlags::IN)], Some(&PATIENCE));
        let (mut watches, mut is_lost) = (Vec::new(), false);
        let mut reader = Reader::new(&self.inotify, events);
        while let Ok(event) = reader.next() {
            is_lost |= event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            watches.push(event.wd());
        }
        let table = self.lock();
        if is_lost {
            // Any may have been changed.
            return table.by_watch.values().map(|watched| watched.number).collect();
        }
        watches.sort_unstable();
        watches.dedup();
        watches.iter().filter_map(|watch| Some(table.by_watch.get(watch)?.number)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
