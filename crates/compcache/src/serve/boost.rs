//! The kernel's watermarks are not boosted while there is swap.
//!
//! Whoever hands a page over to be swapped out needs a little memory for the request: a loop device for the list of its
//! parts, FUSE for what it tells us. Below the lowest watermark only those who reclaim memory get any, and nobody of these
//! does. When an allocation could not have the kind of pages it wanted, the kernel boosts the watermarks for a while, by up to one
//! and a half times the highest (`vm.watermark_boost_factor`), until kswapd has reclaimed as much. But kswapd waits for pages that
//! are being swapped out; those wait for the loop device, and that waits for memory while megabytes are free below the boosted
//! mark, the ballast ([`super::safe`]) among them. So a machine stood still that had swapped out a few megabytes.
//!
//! The setting is the machine's; it is put back with the server's last disk for swap, unless another one still has swap: each holds a shared lock on the
//! setting, and only who is alone puts it back. A server that is killed, or ends before another, leaves it at 0, which costs a machine
//! nothing but some fragmentation.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::run::say;

const SETTING: &str = "/proc/sys/vm/watermark_boost_factor";
const NONE: &str = "0";
const TRIES: u32 = 10;
const BETWEEN_TRIES: Duration = Duration::from_millis(10);

/// As long as this is there, watermarks are not boosted.
pub struct NoBoost {
    setting: PathBuf,
    before: String,
    /// Locked for other servers to see.
    shared: File,
}

impl NoBoost {
    /// `None` if that is not ours to change: in a container only its memory cgroup will be short, which has no such marks. Linux 5.0
    /// began with it.
    pub fn take() -> Option<NoBoost> {
        let taken = NoBoost::take_at(Path::new(SETTING))?;
        if taken.before != NONE {
            say(&format!(
                "compcache: vm.watermark_boost_factor is {NONE} as long as this server has a disk for swap (was {})\n",
                taken.before
            ));
        }
        Some(taken)
    }

    fn take_at(setting: &Path) -> Option<NoBoost> {
        let shared = File::open(setting).ok()?;
        // Whoever puts it back holds it alone, for a moment; any user can hold it for longer, and is not waited for.
        for _ in 0..TRIES {
            if flock(&shared, FlockOperation::NonBlockingLockShared) != Err(Errno::WOULDBLOCK) {
                break;
            }
            thread::sleep(BETWEEN_TRIES);
        }
        let before = value(setting)?;
        if before != NONE {
            fs::write(setting, NONE).ok()?;
        }
        Some(NoBoost { setting: setting.to_owned(), before, shared })
    }
}

impl Drop for NoBoost {
    fn drop(&mut self) {
        let is_alone = flock(&self.shared, FlockOperation::NonBlockingLockExclusive).is_ok();
        // Somebody else may have chosen meanwhile.
        if is_alone && self.before != NONE && value(&self.setting).is_some_and(|value| value == NONE) {
            let _ = fs::write(&self.setting, &self.before);
        }
    }
}

fn value(setting: &Path) -> Option<String> {
    Some(fs::read_to_string(setting).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_put_back_unless_somebody_else_chose_meanwhile() {
        let directory = tempfile::tempdir().unwrap();
        let setting = directory.path().join("factor");
        fs::write(&setting, "15000\n").unwrap();
        let taken = NoBoost::take_at(&setting).unwrap();
        assert_eq!(value(&setting).unwrap(), "0");
        drop(taken);
        assert_eq!(value(&setting).unwrap(), "15000");

        let (first, second) = (NoBoost::take_at(&setting).unwrap(), NoBoost::take_at(&setting).unwrap());
        drop(first);
        assert_eq!(value(&setting).unwrap(), "0", "the second has swap");
        drop(second);
        assert_eq!(value(&setting).unwrap(), "0", "it does not know what was before");
        fs::write(&setting, "15000\n").unwrap();
        let (first, second) = (NoBoost::take_at(&setting).unwrap(), NoBoost::take_at(&setting).unwrap());
        drop(second);
        assert_eq!(value(&setting).unwrap(), "0", "the first has swap");
        drop(first);
        assert_eq!(value(&setting).unwrap(), "15000");

        fs::write(&setting, "15000\n").unwrap();
        let held = File::open(&setting).unwrap();
        flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        drop(NoBoost::take_at(&setting).unwrap());
        assert_eq!(value(&setting).unwrap(), "0", "who holds it, for whatever, is not waited for");
        drop(held);

        let taken = NoBoost::take_at(&setting).unwrap();
        fs::write(&setting, "7000\n").unwrap();
        drop(taken);
        assert_eq!(value(&setting).unwrap(), "7000");
        assert!(NoBoost::take_at(&directory.path().join("none")).is_none());
    }
}
