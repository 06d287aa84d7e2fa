//! What a file below looks like at one moment, and whether that tells one version of it from another.
//!
//! A [`Stamp`] is a file's size, the times of its last change and of its making. Pages that were read while the file had one stamp are
//! used again while it still has it. A time says little for a moment after it was given: the kernel's clock for files steps every 4 ms
//! or less often (10 ms with HZ=100), and two changes within one step look the same. So a stamp that is younger than 40 ms tells nothing:
//!
//! | file changed at | looked at | stamp is | pages read then   |
//! |-----------------|-----------|----------|-------------------|
//! | 0 ms            | 2 ms      | young    | are not kept      |
//! | 0 ms            | 100 ms    | settled  | are kept          |
//! | again at 101 ms | 200 ms    | another  | the old are dropped |
//!
//! The same as git's treatment of "racily clean" files. A clock that is ahead of ours (a file server's) makes every new file young until
//! ours has caught up: slower, never wrong. One that is behind makes it seem old too soon, and of two changes within one step of that clock the second is missed
//! by who read in between; no margin would be the right one.
//!
//! A write gives a file both times, of contents and of anything, and who sets the first by hand has the second set for it. So where the first lies in the future, as much as a
//! stamp must be old, and the second is settled, it was set by hand, and the second alone says how old the stamp is: else such a file would not be kept until then.
//!
//! A file is given its time when a write begins. What one long call writes 40 ms later and more is not told from what was there before: no age would be enough,
//! for a write to a busy disk takes seconds, and with each second more that is asked for, more of what was just made would be read again and again. Who watches is told at the end of the call.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use compcache_cache::FileId;
use fuser::{FileAttr, FileType, INodeNo};
use rustix::fs::{AtFlags, StatVfsMountFlags, Statx, StatxFlags, StatxTimestamp, statx};
use rustix::io;
use rustix::time::{ClockId, clock_gettime};

/// How old the last change must be before a stamp is trusted.
const SETTLED: Duration = Duration::from_millis(40);
/// The same for times of whole seconds: of a file system that has no others (FAT counts in twos), or set by hand.
const SETTLED_COARSE: Duration = Duration::from_millis(2100);

const EVERYTHING: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME).union(StatxFlags::MNT_ID);

/// Neither what a link leads to, nor what would be mounted there.
const AS_IT_IS: AtFlags = AtFlags::SYMLINK_NOFOLLOW.union(AtFlags::NO_AUTOMOUNT);

/// Seconds and nanoseconds of a file's time.
type Moment = (i64, u32);

/// One version of a file's contents, as far as its metadata can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub size_bytes: u64,
    modified: Moment,
    changed: Moment,
    /// Tells a file from a later one of the same number, where the file system keeps it.
    made: Moment,
}

impl Stamp {
    /// Whether every later change gives another stamp, if it is the `now` of [`now`].
    pub fn is_settled(&self, now: Moment) -> bool {
        let coarse = self.changed.1 == 0 || self.modified.1 == 0;
        let settled = if coarse { SETTLED_COARSE } else { SETTLED }.as_nanos() as i128;
        let ns = |moment: Moment| i128::from(moment.0) * 1_000_000_000 + i128::from(moment.1);
        let (modified, changed) = (ns(now) - ns(self.modified), ns(now) - ns(self.changed));
        changed >= settled && (modified >= settled || modified <= -settled)
    }

    /// What stays the same while nobody but us changes the file.
    pub fn identity(&self) -> Stamp {
        Stamp { size_bytes: 0, modified: (0, 0), changed: (0, 0), ..*self }
    }
}

/// The time as files are given it.
pub fn now() -> Moment {
    let now = clock_gettime(ClockId::Realtime);
    (now.tv_sec, now.tv_nsec as u32)
}

/// Everything that is known of a file.
pub fn look(fd: impl AsFd) -> io::Result<Statx> {
    statx(fd, c"", AtFlags::EMPTY_PATH, EVERYTHING)
}

/// The same of what has this name in a directory.
pub fn look_at(directory: impl AsFd, name: &OsStr) -> io::Result<Statx> {
    statx(directory, name, AS_IT_IS, EVERYTHING)
}

/// Which file that is.
pub fn id_at(directory: impl AsFd, name: &OsStr) -> io::Result<FileId> {
    statx(directory, name, AS_IT_IS, StatxFlags::INO).map(|stat| id_of(&stat))
}

/// Which mount a file was found on; before Linux 5.8, which device.
pub fn mount_of(stat: &Statx) -> u64 {
    let is_told = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::MNT_ID);
    if is_told { stat.stx_mnt_id } else { id_of(stat).dev }
}

pub fn id_of(stat: &Statx) -> FileId {
    let dev = u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor);
    FileId { dev, ino: stat.stx_ino }
}

pub fn stamp_of(stat: &Statx) -> Stamp {
    let moment = |time: &StatxTimestamp| (time.tv_sec, time.tv_nsec);
    Stamp {
        size_bytes: stat.stx_size,
        modified: moment(&stat.stx_mtime),
        changed: moment(&stat.stx_ctime),
        made: moment(&stat.stx_btime),
    }
}

/// A number that differs for files that had the same inode number one after the other; 0 where the file system does not tell.
pub fn generation_of(stat: &Statx) -> u64 {
    (stat.stx_btime.tv_sec as u64) << 30 ^ u64::from(stat.stx_btime.tv_nsec)
}

/// As the kernel is told of it, under the number `node`, where what a mount with the flags `limits` forbids is to be so above: nobody is made another user by a file
/// there, nor is a device opened.
pub fn attributes(stat: &Statx, node: INodeNo, limits: StatVfsMountFlags) -> FileAttr {
    let kind = kind_of_mode(u32::from(stat.stx_mode));
    let is_harmless = kind == FileType::RegularFile && limits.contains(StatVfsMountFlags::NOSUID);
    let (major, minor) = match limits.contains(StatVfsMountFlags::NODEV) {
        // Nothing's number.
        true => (0, 0),
        false => (stat.stx_rdev_major, stat.stx_rdev_minor),
    };
    FileAttr {
        ino: node,
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        atime: system_time(&stat.stx_atime),
        mtime: system_time(&stat.stx_mtime),
        ctime: system_time(&stat.stx_ctime),
        crtime: system_time(&stat.stx_btime),
        kind,
        perm: stat.stx_mode & if is_harmless { 0o1777 } else { 0o7777 },
        nlink: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        rdev: device_number(major, minor),
        blksize: stat.stx_blksize,
        flags: 0,
    }
}

fn system_time(time: &StatxTimestamp) -> SystemTime {
    let fraction = Duration::from_nanos(time.tv_nsec.into());
    let seconds = Duration::from_secs(time.tv_sec.unsigned_abs());
    let whole = if time.tv_sec < 0 { UNIX_EPOCH.checked_sub(seconds) } else { UNIX_EPOCH.checked_add(seconds) };
    whole.and_then(|whole| whole.checked_add(fraction)).unwrap_or(UNIX_EPOCH)
}

/// The kernel's 32-bit form: 12 bits of major number, 20 of minor.
fn device_number(major: u32, minor: u32) -> u32 {
    minor & 0xff | (major & 0xfff) << 8 | (minor & 0xfff00) << 12
}

fn kind_of_mode(mode: u32) -> FileType {
    match rustix::fs::FileType::from_raw_mode(mode) {
        rustix::fs::FileType::Directory => FileType::Directory,
        rustix::fs::FileType::Symlink => FileType::Symlink,
        rustix::fs::FileType::Fifo => FileType::NamedPipe,
        rustix::fs::FileType::Socket => FileType::Socket,
        rustix::fs::FileType::CharacterDevice => FileType::CharDevice,
        rustix::fs::FileType::BlockDevice => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed_at(changed: Moment) -> Stamp {
        Stamp { size_bytes: 1, modified: (0, 1), changed, made: (0, 0) }
    }

    #[test]
    fn a_stamp_is_settled_forty_milliseconds_after_the_change_and_never_before() {
        let stamp = changed_at((100, 980_000_000));
        assert!(!stamp.is_settled((100, 980_000_000)));
        assert!(!stamp.is_settled((101, 19_999_999)));
        assert!(stamp.is_settled((101, 20_000_000)));
        assert!(!stamp.is_settled((50, 0)), "a clock ahead of ours");
    }

    #[test]
    fn a_stamp_with_a_new_modification_time_is_young_though_its_change_is_old() {
        let stamp = Stamp { modified: (200, 1), ..changed_at((100, 1)) };
        assert!(!stamp.is_settled((200, 2)));
    }

    #[test]
    fn a_modification_time_in_the_future_was_set_by_hand_and_the_change_counts() {
        let changed = (100, 980_000_000);
        let stamp = |modified| Stamp { modified, ..changed_at(changed) };
        assert!(stamp((5000, 1)).is_settled((101, 20_000_000)));
        assert!(!stamp((5000, 1)).is_settled((101, 19_999_999)), "it was set a moment ago");
        assert!(!stamp((101, 21_000_000)).is_settled((101, 20_000_000)), "a clock that is hardly ahead");
        assert!(stamp((5000, 0)).is_settled((103, 80_000_000)) && !stamp((5000, 0)).is_settled((103, 0)));
        let ahead = Stamp { modified: (5000, 1), ..changed_at((5000, 1)) };
        assert!(!ahead.is_settled((4000, 0)) && ahead.is_settled((5001, 0)), "a clock ahead of ours");
    }

    #[test]
    fn whole_seconds_take_two_of_them_to_settle() {
        let stamp = Stamp { modified: (100, 0), ..changed_at((100, 0)) };
        assert!(!stamp.is_settled((102, 0)));
        assert!(stamp.is_settled((102, 100_000_000)));
    }

    #[test]
    fn times_before_1970_keep_their_fraction() {
        let file = tempfile::tempfile().unwrap();
        file.set_modified(UNIX_EPOCH - Duration::from_millis(1750)).unwrap();
        let shown = attributes(&look(&file).unwrap(), INodeNo(5), StatVfsMountFlags::empty()).mtime;
        assert_eq!(UNIX_EPOCH.duration_since(shown).unwrap(), Duration::from_millis(1750));
    }

    #[test]
    fn device_numbers_are_the_kernels() {
        assert_eq!(device_number(8, 1), 0x801);
        assert_eq!(device_number(259, 0x12345), 0x1231_0345);
    }
}
