//! Files that the kernel reads and writes below by itself while they are open (FUSE passthrough, Linux 6.9).
//!
//! Who writes to a file has nothing of a cache, and each of his requests costs a way to the server and back. So the kernel is given the file below, its
//! *backing file*, with the answer to an open, and asks for neither reads nor writes by that handle. A file is open either way, not both: the kernel holds pages of a
//! file that is served, and of one that is passed through the file system below does.
//!
//! | the file is                       | opened for reading | for writing, as [`Passthrough`] says, by the same user | else for writing, or past the page cache |
//! |-----------------------------------|--------------------|----------------------------------------------------------|------------------------------------------|
//! | not open                          | served             | passed through                                           | served                                   |
//! | served                            | served             | served                                                   | served                                   |
//! | passed through, or mapped perhaps | passed through     | passed through                                           | beside: mappings pass, all else is served, past the kernel's pages |
//!
//! The kernel takes back how a file is open before it says that a handle was closed, so what is known here of it may be late, never early.
//!
//! A mapping of a file that is passed through is one of the backing file, and outlives the handle; it may be stored to, and shall show what others store. It holds the name by which the file was
//! opened, so there is none once the kernel has forgotten the file, and it is told to when the last handle that could map is closed. Until then every open of it is passed through.
//!
//! What is kept of a file, here and by the kernel, is asked of nothing while it is passed through, and dropped before it is served again: nobody is told what is written in between.

use std::mem;
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
    /// Some handle that was passed through, or beside, could map: somebody may still have such a mapping.
    may_be_mapped: bool,
    /// So the kernel is to be told to forget the file, and somebody knows.
    told: bool,
    /// The kernel was told what the file is like, and may believe it.
    is_believed: bool,
}

#[derive(Debug)]
struct Passed {
    backing: u32,
    /// As whom the kernel writes.
    opener: Caller,
    handles: usize,
}

/// A file is no longer open past us.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended {
    /// To be given back to the kernel.
    pub backing: u32,
    /// Somebody is to be told that the kernel is to forget the file, so that it can be served.
    pub is_to_be_told: bool,
}

impl Ways {
    /// Whether nobody here knows what the file has.
    pub fn are_past_us(&self) -> bool {
        let open = self.lock();
        open.passed.is_some() || open.may_be_mapped
    }

    /// The kernel is about to be told what the file is like; whether it may believe that for a while: not while any handle is open.
    pub fn may_be_believed(&self) -> bool {
        let mut open = self.lock();
        let may_be = open.served == 0 && open.passed.is_none();
        open.is_believed |= may_be;
        may_be
    }

    /// A handle was opened; whether the kernel may still believe what it was told before.
    pub fn were_believed(&self) -> bool {
        mem::take(&mut self.lock().is_believed)
    }

    /// A handle is closed. If it was the last of a file that was passed through, `forget` is called before it may be served again.
    pub fn close(&self, way: Way, forget: impl FnOnce()) -> Option<Ended> {
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
        let is_to_be_told = open.may_be_mapped && !mem::replace(&mut open.told, true);
        open.passed.take().map(|passed| Ended { backing: passed.backing, is_to_be_told })
    }

    /// Whether the kernel is to forget the file still, who was told begins to ask.
    pub fn are_to_be_forgotten(&self) -> bool {
        let mut open = self.lock();
        open.told = false;
        open.may_be_mapped && open.passed.is_none()
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
    /// The last device of which it has refused a file; 0 is none's.
    refused: AtomicU64,
}

impl Backings {
    pub fn new(which: Passthrough) -> Backings {
        let (agreed, connection) = (AtomicBool::new(false), OnceLock::new());
        Backings { which, agreed, connection, passed: AtomicU64::new(0), refused: AtomicU64::new(0) }
    }

    /// How many handles were passed through so far.
    pub fn passed(&self) -> u64 {
        self.passed.load(Relaxed)
    }

    /// The kernel is asked whether it can, if any file is to be passed through.
    pub fn agree(&self, config: &mut KernelConfig) {
        let is_wanted = self.which != Passthrough::None;
        // This file system counts as one that lies on another: none such may lie below, and one, not two, may lie above.
        let agreed = is_wanted
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(1).is_ok();
        self.agreed.store(agreed, Relaxed);
    }

    /// From now on, if the kernel has agreed.
    pub fn start(&self, connection: &OwnedFd) -> io::Result<()> {
        if self.agreed.load(Relaxed) {
            let connection = connection.try_clone().map_err(|error| errno(&error))?;
            self.connection.get_or_init(|| connection);
        }
        Ok(())
    }

    /// A file of device `dev` was opened below, as `fd`, for `opener` who asked for it `as_asked`; says how that handle is used. `must_come` is whether the kernel is not to write
    /// by itself whatever it is used for.
    ///
    /// # Errors
    /// The file may be mapped past us, and the kernel does not take it.
    pub fn open(
        &self,
        ways: &Ways,
        (fd, dev): (&OwnedFd, u64),
        opener: Caller,
        (as_asked, must_come): (OFlags, bool),
    ) -> io::Result<Way> {
        let mut open = ways.lock();
        let Open { served, passed, may_be_mapped, .. } = &mut *open;
        let access = as_asked & OFlags::RWMODE;
        let mut must_come = must_come || as_asked.contains(OFlags::DIRECT);
        let is_new = *served == 0 && self.which.takes(as_asked) && !must_come && self.refused.load(Relaxed) != dev;
        let backing = match (&mut *passed, self.connection.get()) {
            (Some(passed), _) => {
                passed.handles += 1;
                must_come |= access != OFlags::RDONLY && passed.opener != opener;
                Some(passed.backing)
            }
            (None, Some(connection)) if is_new || *may_be_mapped => match give(connection, fd, opener) {
                Ok(backing) => {
                    *passed = Some(Passed { backing, opener, handles: 1 });
                    Some(backing)
                }
                Err(error) if *may_be_mapped => return Err(error),
                Err(error) => {
                    // Whatever else it is may be over soon.
                    if matches!(error, Errno::LOOP | Errno::OPNOTSUPP | Errno::PERM | Errno::NOTTY) {
                        self.refused.store(dev, Relaxed);
                    }
                    None
                }
            },
            _ => None,
        };
        let Some(backing) = backing else {
            *served += 1;
            return Ok(Way::Served);
        };
        *may_be_mapped |= access != OFlags::WRONLY;
        if must_come {
            return Ok(Way::Beside(backing));
        }
        self.passed.fetch_add(1, Relaxed);
        Ok(Way::Passed(backing))
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
    let give = || BackingId::create_raw(&connection, fd).map_err(|error| errno(&error));
    // Root has all rights in whatever group.
    if opener.uid == 0 { give() } else { with_rights(opener, CapabilitySet::SYS_ADMIN, give) }
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
    fn what_the_kernel_takes_no_file_for_is_served_and_not_tried_again() {
        let backings = Backings::new(Passthrough::Writable);
        let (ways, caller) = (Ways::default(), Caller { uid: 0, gid: 0 });
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let open_and_close = || {
            let nothing = || panic!("nothing is passed");
            assert_eq!(backings.open(&ways, (&file, 5), caller, (OFlags::WRONLY, false)), Ok(Way::Served));
            assert_eq!(ways.close(Way::Served, nothing), None);
        };
        open_and_close();
        assert_eq!(backings.refused.load(Relaxed), 0, "nobody was asked");
        // Agreed on, and refused when it comes to a file.
        backings.connection.get_or_init(|| File::open("/dev/null").unwrap().into());
        open_and_close();
        open_and_close();
        assert!(!ways.are_past_us() && backings.passed() == 0);
        assert_eq!(backings.refused.load(Relaxed), 5);
        // Where somebody may have it mapped, it cannot be served.
        ways.lock().may_be_mapped = true;
        assert!(ways.are_past_us());
        let opened = backings.open(&ways, (&file, 5), caller, (OFlags::RDONLY, false));
        assert!(opened.is_err() && ways.lock().served == 0);
    }

    #[test]
    fn who_opens_a_file_that_is_passed_through_joins_or_stays_beside() {
        let backings = Backings::new(Passthrough::WriteOnly);
        let (first, other) = (Caller { uid: 1, gid: 1 }, Caller { uid: 2, gid: 2 });
        let passed = Some(Passed { backing: 7, opener: first, handles: 1 });
        let ways = Ways(Mutex::new(Open { served: 0, passed, may_be_mapped: false, told: false, is_believed: false }));
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let open = |caller, how| backings.open(&ways, (&file, 5), caller, how).unwrap();
        assert_eq!(open(first, (OFlags::WRONLY, false)), Way::Passed(7));
        assert_eq!(open(other, (OFlags::WRONLY, false)), Way::Beside(7));
        assert!(!ways.lock().may_be_mapped, "who only writes has no mapping");
        let joined = [(first, (OFlags::RDWR, false)), (other, (OFlags::RDONLY, false))];
        let beside = [(first, (OFlags::WRONLY, true)), (other, (OFlags::RDONLY | OFlags::DIRECT, false))];
        assert_eq!(joined.map(|(caller, how)| open(caller, how)), [Way::Passed(7); 2]);
        assert_eq!(beside.map(|(caller, how)| open(caller, how)), [Way::Beside(7); 2]);
        for _ in 0..6 {
            assert_eq!(ways.close(Way::Beside(7), || panic!("it is passed still")), None);
        }
        let mut forgotten = false;
        let ended = Some(Ended { backing: 7, is_to_be_told: true });
        assert_eq!(ways.close(Way::Passed(7), || forgotten = true), ended);
        assert!(forgotten && ways.are_past_us());
        // Told once, until that is heard; and nothing is to be done while somebody has it open again.
        let again = || ways.lock().passed = Some(Passed { backing: 8, opener: first, handles: 1 });
        let end = || ways.close(Way::Passed(8), || ()).unwrap().is_to_be_told;
        again();
        assert!(!end() && ways.are_to_be_forgotten());
        again();
        assert!(!ways.are_to_be_forgotten() && end());
    }
}
