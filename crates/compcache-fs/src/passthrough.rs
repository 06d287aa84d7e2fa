//! Files that the kernel reads and writes below by itself while they are open (FUSE passthrough, Linux 6.9).
//!
//! Who writes to a file has nothing of a cache, and each of his requests costs a way to the server and back. So the kernel is given the file below, its
//! *backing file*, with the answer to an open, and asks for neither reads nor writes by that handle. A file is open either way, not both: the kernel holds pages of a
//! file that is served, and of one that is passed through the file system below does.
//!
//! | the file is open   | opened for reading | for writing, as [`Passthrough`] says, by the same user | else for writing, or past the page cache |
//! |--------------------|--------------------|----------------------------------------------------------|------------------------------------------|
//! | not at all         | served             | passed through                                           | served                                   |
//! | served             | served             | served                                                   | served                                   |
//! | passed through     | passed through     | passed through                                           | beside: served, past the kernel's pages  |
//!
//! The kernel takes back how a file is open before it says that a handle was closed, so what is known here of it may be late, never early.
//!
//! What is kept of a file, here and by the kernel, is dropped before it is passed through, and after: nobody is told what is written then.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use fuser::{BackingId, InitFlags, KernelConfig};
use rustix::fs::OFlags;
use rustix::io::{self, Errno};
use rustix::thread::CapabilitySet;

use crate::caller::{Caller, with_rights};
use crate::sys;

/// Which files are passed through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Passthrough {
    /// None.
    #[default]
    None,
    /// Those that are opened to be written and not read.
    WriteOnly,
    /// Those that are opened to be written.
    Writable,
}

impl Passthrough {
    fn takes(self, how: OFlags) -> bool {
        match how & OFlags::RWMODE {
            OFlags::WRONLY => self != Passthrough::None,
            OFlags::RDWR => self == Passthrough::Writable,
            _ => false,
        }
    }
}

/// How a handle is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each request comes here; the kernel keeps pages.
    Served,
    /// Reads, writes and mappings go to the backing file of this number.
    Passed(u32),
    /// The same file's, but reads and writes come here, and the kernel keeps nothing of them.
    Beside(u32),
}

/// How a file is open.
#[derive(Debug, Default)]
pub struct Ways(Mutex<Open>);

#[derive(Debug, Default)]
struct Open {
    /// Handles that are served.
    served: usize,
    passed: Option<Passed>,
}

#[derive(Debug)]
struct Passed {
    backing: u32,
    /// As whom the kernel writes.
    opener: Caller,
    handles: usize,
}

impl Ways {
    /// Whether nobody here knows what the file has.
    pub fn are_past_us(&self) -> bool {
        self.lock().passed.is_some()
    }

    /// A handle is closed. If it was the last of a file that was passed through, `forget` is called before it is served again, and what is returned is
    /// to be given back to the kernel.
    pub fn close(&self, way: Way, forget: impl FnOnce()) -> Option<u32> {
        let mut open = self.lock();
        if way == Way::Served {
            open.served -= 1;
            return None;
        }
        let passed = open.passed.as_mut()?;
        passed.handles -= 1;
        if passed.handles > 0 {
            return None;
        }
        forget();
        open.passed.take().map(|passed| passed.backing)
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What passes files through.
pub struct Backings {
    which: Passthrough,
    /// The kernel can.
    agreed: AtomicBool,
    /// By which it is given backing files.
    connection: OnceLock<OwnedFd>,
    /// Handles so far that were used so.
    passed: AtomicU64,
}

impl Backings {
    pub fn new(which: Passthrough) -> Backings {
        let (agreed, connection, passed) = (AtomicBool::new(false), OnceLock::new(), AtomicU64::new(0));
        Backings { which, agreed, connection, passed }
    }

    /// How many handles were passed through so far.
    pub fn passed(&self) -> u64 {
        self.passed.load(Relaxed)
    }

    /// The kernel is asked whether it can, if any file is to be passed through.
    pub fn agree(&self, config: &mut KernelConfig) {
        if self.which == Passthrough::None || config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_err() {
            return;
        }
        // What lies on one file system more may not lie below, and may lie above.
        self.agreed.store(config.set_max_stack_depth(1).is_ok(), Relaxed);
    }

    /// From now on, if the kernel has agreed.
    pub fn start(&self, connection: &OwnedFd) -> io::Result<()> {
        if self.agreed.load(Relaxed) {
            let connection = connection.try_clone().map_err(|error| errno(&error))?;
            self.connection.get_or_init(|| connection);
        }
        Ok(())
    }

    /// A file was opened below, as `fd`, for `opener` who asked for it `as_asked`; says how that handle is used. `must_come` is whether the kernel is not to write
    /// by itself whatever it is used for. `forget` is called before the file is passed through.
    pub fn open(
        &self,
        ways: &Ways,
        fd: &OwnedFd,
        opener: Caller,
        (as_asked, must_come): (OFlags, bool),
        forget: impl FnOnce(),
    ) -> Way {
        let way = self.way(ways, fd, opener, (as_asked, must_come), forget);
        if matches!(way, Way::Passed(_)) {
            self.passed.fetch_add(1, Relaxed);
        }
        way
    }

    fn way(
        &self,
        ways: &Ways,
        fd: &OwnedFd,
        opener: Caller,
        (as_asked, must_come): (OFlags, bool),
        forget: impl FnOnce(),
    ) -> Way {
        let mut open = ways.lock();
        let must_come = must_come || as_asked.contains(OFlags::DIRECT);
        if let Some(passed) = &mut open.passed {
            passed.handles += 1;
            let is_another = as_asked & OFlags::RWMODE != OFlags::RDONLY && passed.opener != opener;
            return if is_another || must_come { Way::Beside(passed.backing) } else { Way::Passed(passed.backing) };
        }
        if open.served == 0
            && self.which.takes(as_asked)
            && !must_come
            && let Some(connection) = self.connection.get()
            && let Ok(backing) = give(connection, fd, opener)
        {
            forget();
            open.passed = Some(Passed { backing, opener, handles: 1 });
            return Way::Passed(backing);
        }
        open.served += 1;
        Way::Served
    }

    /// The kernel may let go of a backing file.
    pub fn close(&self, backing: u32) {
        if let Some(connection) = self.connection.get() {
            // It is gone with the connection at the latest.
            let _ = sys::close_backing(connection, backing);
        }
    }
}

/// Gives the kernel a backing file, which it writes to as `opener`: not into what is left for root, nor past his quota. For that takes a file system's user and capabilities
/// from this thread. Refused by kernels that do not know of it, to others than root, and on file systems that lie over others themselves.
fn give(connection: impl AsFd, fd: &OwnedFd, opener: Caller) -> io::Result<u32> {
    let give = || BackingId::create_raw(&connection, fd);
    with_rights(opener, CapabilitySet::SYS_ADMIN, || give().map_err(|error| errno(&error)))
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn files_are_taken_by_what_they_are_opened_for() {
        let taken = |which: Passthrough| [OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR].map(|how| which.takes(how));
        assert_eq!(taken(Passthrough::None), [false, false, false]);
        assert_eq!(taken(Passthrough::WriteOnly), [false, true, false]);
        assert_eq!(taken(Passthrough::Writable), [false, true, true]);
    }

    #[test]
    fn what_the_kernel_takes_no_file_for_is_served() {
        let backings = Backings::new(Passthrough::Writable);
        let (ways, caller) = (Ways::default(), Caller { uid: 0, gid: 0 });
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let open = || {
            let way = backings.open(&ways, &file, caller, (OFlags::WRONLY, false), || panic!("nothing is passed"));
            assert_eq!(way, Way::Served);
            way
        };
        let way = open();
        // Agreed on, and refused when it comes to a file.
        backings.connection.get_or_init(|| File::open("/dev/null").unwrap().into());
        assert_eq!(ways.close(way, || panic!("nothing is passed")), None);
        let way = open();
        assert_eq!(ways.close(way, || panic!("nothing is passed")), None);
        assert!(!ways.are_past_us() && backings.passed() == 0);
    }

    #[test]
    fn who_opens_a_file_that_is_passed_through_joins_or_stays_beside() {
        let backings = Backings::new(Passthrough::WriteOnly);
        let (first, other) = (Caller { uid: 1, gid: 1 }, Caller { uid: 2, gid: 2 });
        let passed = Some(Passed { backing: 7, opener: first, handles: 1 });
        let ways = Ways(Mutex::new(Open { served: 0, passed }));
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let open = |caller, how| backings.open(&ways, &file, caller, how, || panic!("it is passed already"));
        let joined = [(first, (OFlags::RDWR, false)), (other, (OFlags::RDONLY, false))];
        let beside = [
            (other, (OFlags::WRONLY, false)),
            (first, (OFlags::WRONLY, true)),
            (other, (OFlags::RDONLY | OFlags::DIRECT, false)),
        ];
        assert_eq!(joined.map(|(caller, how)| open(caller, how)), [Way::Passed(7); 2]);
        assert_eq!(beside.map(|(caller, how)| open(caller, how)), [Way::Beside(7); 3]);
        for _ in 0..5 {
            assert_eq!(ways.close(Way::Beside(7), || panic!("it is passed still")), None);
        }
        let mut forgotten = false;
        assert_eq!(ways.close(Way::Passed(7), || forgotten = true), Some(7));
        assert!(forgotten && !ways.are_past_us());
    }
}
