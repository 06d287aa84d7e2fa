//! The backing of a disk: its file or device, and the thread that has blocks leave for it.
//!
//! | what is named        | what becomes of it                                                                       |
//! |----------------------|------------------------------------------------------------------------------------------|
//! | nothing is there     | a file is made (mode 0600), and has no name any more: its room comes back with the disk's end, or the server's, however that comes |
//! | a block device       | taken for itself alone (nobody has it mounted); refused if there seems to be something on it, and emptied so far at the end |
//! | anything else        | refused: what is in a file that somebody has is not overwritten                         |
//!
//! For swap it must be a block device, and nothing like a loop device: a file system asks for memory to write a file, when there is none
//! (docs/decisions/0030-swap-leaves-for-a-bare-device.md).
//!
//! The thread looks fifty times a second whether there is something to do, and goes on until there is not. A disk's writers do
//! the same where it is too late (`Disk` in compcache-block), so nothing depends on how soon it comes. Ages, which say what was
//! not used for longest, advance with the work that is done: each time a sixteenth of what is stored was read or written. While the
//! machine is short of memory blocks leave whatever the limit ([`super::relief`]).
//!
//! What goes wrong with a backing is said once, and once more when it is right again; a failing one is tried each second, and so is one whose
//! budget for the day is spent. While writes fail it is tried after twice as long each time, up to a minute: they count for the day, as they may wear it out.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use compcache_block::loop_device_over;
use compcache_cache::pressure::Pressure;
use compcache_store::{
    Backing, BackingConfig, BackingStats, DailyWrites, FileMedium, Health, Leaving, Pool, Store, Worker,
};
use rustix::fs::{OFlags, ioctl_blksszget};

use crate::control::{BackingChange, BackingState, BackingWanted, DailyState, Reply};
use crate::kernel::clock_ns;
use crate::run::say;
use crate::serve::below::{not_bare, refuse_own};
use crate::serve::relief::{Relief, Signs};
use crate::size::Shown;

/// Between two looks at whether something has to leave.
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);
/// Between two attempts at a backing that takes nothing, and between two times that room which is free is given back.
const BETWEEN_ATTEMPTS: Duration = Duration::from_secs(1);
/// Where writes fail again and again.
const BETWEEN_ATTEMPTS_MOST: Duration = Duration::from_secs(60);
/// So much of a device is looked at for something that somebody might miss.
const LOOKED_AT_BYTES: usize = 1 << 20;
/// A small backing has at least so many segments.
const SEGMENTS_LEAST: u64 = 64;
/// Beside what a disk holds there must be room for lists, and for segments that are partly dead.
const ROOM_SHARE: u64 = 8;
const ROOM_LEAST_BYTES: u64 = 4 << 20;
/// The most a backing can be.
const BACKING_BYTES_MAX: u64 = 512 << 30;
/// An age is over when so large a share of what is stored was read or written.
const AGE_SHARE: u64 = 16;
const AGE_LEAST_PAGES: u64 = 256;
/// And that blocks, which know 256 ages, are still known to be cold when recompression comes to them: that is after a minute by default, and comes each
/// quarter of that.
const AGE_LEAST_NS: u64 = 320_000_000;
/// Where it can be said that blocks leave.
const ABOVE_PERCENTS: std::ops::RangeInclusive<u8> = 10..=95;
const NS_PER_S: u64 = 1_000_000_000;
/// What is written for swap at a time, unless told otherwise: six times as much is locked in memory.
const SWAP_BATCH_BYTES: usize = 256 << 10;
/// How long who ends a disk waits for its thread, which makes the beginning of a device zeroes, once nobody writes there any more, for which it waits so long.
const ENDED_WITHIN: Duration = Duration::from_secs(5);
const UNUSED_WITHIN: Duration = Duration::from_secs(3);

/// A backing, and its thread, which ends when this is dropped.
pub struct DiskBacking {
    path: PathBuf,
    batch_bytes: u64,
    backing: Arc<Backing>,
    is_device: bool,
    stop: Arc<AtomicBool>,
    thread: Option<(Thread, Receiver<()>)>,
}

impl DiskBacking {
    /// Opens, or makes, what is wanted for a disk of `disk_bytes`. `own_devices` are those this server serves.
    ///
    /// # Errors
    /// It cannot be had, or holds something; nothing of it was changed, and no file is left behind.
    pub fn open(
        wanted: &BackingWanted,
        disk_bytes: u64,
        for_swap: bool,
        own_devices: &[String],
    ) -> anyhow::Result<DiskBacking> {
        let path = wanted.path.clone();
        refuse_own(&path, own_devices)?;
        let (file, device_bytes) = match fs::metadata(&path) {
            Ok(there) if there.file_type().is_block_device() => {
                if let Some(part) = for_swap.then(|| not_bare(there.rdev())).flatten() {
                    bail!(
                        "{} cannot be the backing of swap: to write to {part}, which it is or lies on, takes memory, and swap is written \
                         when there is none. That takes a disk, a partition or a volume, with nothing on it",
                        path.display()
                    );
                }
                open_device(&path, wanted.overwrite)?
            }
            _ if for_swap => bail!(
                "{} cannot be the backing of swap: that takes a disk, a partition or a volume, with nothing on it. To write a file, its \
                 file system needs memory, and swap is written when there is none",
                path.display()
            ),
            Ok(there) if there.is_dir() => {
                bail!("{} is a directory; name a file in it that is not there yet", path.display())
            }
            Ok(there) if !there.is_file() => {
                bail!("{} is neither a block device nor a file: name one that is not there yet", path.display())
            }
            Ok(_) => bail!("{} is there already; a backing is made anew: name another, or remove it", path.display()),
            Err(_) => (make_file(&path)?, u64::MAX),
        };
        let batch_bytes = if for_swap { SWAP_BATCH_BYTES } else { BackingConfig::default().segment_bytes };
        let config = config(wanted, disk_bytes, device_bytes, batch_bytes)?;
        let medium = if for_swap { FileMedium::frugal(file.into()) } else { FileMedium::new(file.into()) };
        if !medium.is_direct() {
            say(&format!(
                "compcache: the file system of {} has no direct input and output; the page cache will hold a part of it, too\n",
                path.display()
            ));
        }
        let backing = Backing::new(Box::new(medium), config)?;
        backing.set_daily_bytes(wanted.daily_bytes);
        let batch_bytes = config.segment_bytes as u64;
        let is_device = device_bytes < u64::MAX;
        Ok(DiskBacking { path, batch_bytes, backing, is_device, stop: Arc::default(), thread: None })
    }

    /// For making the pool of the disk.
    pub fn backing(&self) -> &Arc<Backing> {
        &self.backing
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread, or no memory, for it.
    pub fn start(&mut self, name: &str, store: &Arc<Store>, pool: &Arc<Pool>) -> anyhow::Result<()> {
        let worker = Worker::new(store, clock_ns)?;
        let reclaimer = Reclaimer {
            disk: name.to_owned(),
            pool: Arc::downgrade(pool),
            backing: self.backing.clone(),
            store: store.clone(),
            worker,
            stop: self.stop.clone(),
            used_pages: 0,
            health: Health::Good,
            pressure: Pressure::open().context("cannot open /proc/meminfo")?,
            relief: Relief::default(),
        };
        let (running, ended) = mpsc::sync_channel(0);
        let (backing, is_device, users) = (self.backing.clone(), self.is_device, Arc::downgrade(pool));
        let body = move || {
            let _running: SyncSender<()> = running;
            // Let go of before it is told that this has ended: then the device is free.
            let backing = backing;
            reclaimer.run();
            // Who had blocks leave by hand may be at the last of them.
            let until = Instant::now() + UNUSED_WITHIN;
            while is_device && users.strong_count() > 0 && Instant::now() < until {
                thread::sleep(BETWEEN_LOOKS);
            }
            if is_device && is_touched(&backing.stats()) {
                // If it cannot be done, the device has to be given with --backing-overwrite the next time.
                let _ = backing.erase_start(LOOKED_AT_BYTES);
            }
        };
        let started = thread::Builder::new().name("backing".into()).spawn(body);
        self.thread = Some((started.context("cannot start the thread for the backing")?.thread().clone(), ended));
        Ok(())
    }

    /// Refuses a change that makes no sense.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn refuse(&self, change: &BackingChange) -> anyhow::Result<()> {
        if let Some(percent) = change.above_percent.filter(|percent| !ABOVE_PERCENTS.contains(percent)) {
            bail!("blocks can leave above 10% to 95% of a limit, not {percent}%");
        }
        if let Some(daily_bytes) = change.daily_bytes {
            refuse_less_than_a_batch(daily_bytes, self.batch_bytes)?;
        }
        Ok(())
    }

    /// Changes what can be changed while it is in use, which was not [refused](Self::refuse).
    pub fn change(&self, change: &BackingChange) {
        if let Some(percent) = change.above_percent {
            self.backing.set_above_percent(percent);
        }
        if let Some(daily_bytes) = change.daily_bytes {
            self.backing.set_daily_bytes((daily_bytes < u64::MAX).then_some(daily_bytes));
        }
    }

    /// What is shown of it.
    pub fn state(&self) -> BackingState {
        // That first: it knows what time it is.
        let daily = self.backing.daily_writes(clock_ns());
        let stats = self.backing.stats();
        let BackingStats { capacity_bytes, live_bytes, dead_bytes, free_bytes, .. } = stats;
        BackingState {
            path: self.path.clone(),
            health: told(stats.health, &daily).unwrap_or_else(|| "good".into()),
            capacity_bytes,
            live_bytes,
            dead_bytes,
            free_bytes,
            above_percent: Some(self.backing.above_percent()),
            daily: Some(DailyState {
                budget_bytes: daily.budget_bytes,
                written_bytes: daily.written_bytes,
                is_spent: stats.health == Health::Spent,
                more_after_s: daily.wait_ns.map(|wait_ns| wait_ns.div_ceil(NS_PER_S)),
                waits: daily.waits,
            }),
            segments_written: stats.segments_written,
            records_moved: stats.records_moved,
            failed_writes: stats.failed_writes,
            failed_reads: stats.failed_reads,
            damaged_reads: stats.damaged_reads,
        }
    }
}

/// Whether anything may have been written; a write that failed may have come some of its way.
fn is_touched(stats: &BackingStats) -> bool {
    stats.segments_written > 0 || stats.failed_writes > 0
}

impl Drop for DiskBacking {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some((thread, ended)) = &self.thread {
            thread.unpark();
            if self.is_device {
                // Not for ever: a medium that hangs must not hang who ends the disk.
                let _ = ended.recv_timeout(ENDED_WITHIN);
            }
        }
    }
}

/// Has blocks that take so much memory leave for the backing of `pool`, waiting as long as that takes, and `goes_on`; no more than there are now.
///
/// # Errors
/// The backing takes no more, or it does not go on; what has left until then is said.
pub fn write_back(
    store: &Arc<Store>,
    pool: &Pool,
    bytes: u64,
    leaving: Leaving,
    goes_on: &dyn Fn() -> anyhow::Result<()>,
) -> anyhow::Result<Reply> {
    let mut worker = Worker::new(store, clock_ns)?;
    let bytes = bytes.min(pool.stats().mem_used_total);
    let (mut blocks, mut left_bytes) = (0, 0);
    while left_bytes < bytes {
        goes_on().with_context(|| format!("{blocks} blocks have left, and no more will"))?;
        let done = store
            .write_back(&mut worker, pool, leaving)
            .map_err(|error| anyhow!("{blocks} blocks have left, and no more can: {error}"))?;
        blocks += done.pages as u64;
        left_bytes += done.object_bytes;
        if done.is_busy {
            thread::sleep(BETWEEN_LOOKS);
        } else if done.pages == 0 && done.finished {
            break;
        }
    }
    let stats = pool.stats();
    let could_leave = match leaving {
        Leaving::Incompressible => stats.huge_pages,
        Leaving::Oldest => stats.pages_stored().saturating_sub(stats.same_pages + stats.bd_count),
    };
    if let Some(backing) = pool.backing().filter(|_| left_bytes < bytes && could_leave > 0) {
        let daily = backing.daily_writes(clock_ns());
        match backing.health() {
            health @ (Health::Full | Health::Spent) => {
                let why = told(health, &daily).unwrap_or_default();
                bail!("{blocks} blocks have left, and no more can: {why}");
            }
            // Somebody may have been told already.
            Health::Good | Health::Failing(_) => {}
        }
    }
    Ok(Reply::Reclaimed { blocks, bytes: left_bytes })
}

/// A file of our own, which has lost its name before anything is in it.
fn make_file(path: &Path) -> anyhow::Result<File> {
    let made = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
    let file = made.with_context(|| format!("cannot make the backing {}", path.display()))?;
    fs::remove_file(path).with_context(|| format!("cannot take the name off the backing {}", path.display()))?;
    Ok(file)
}

fn open_device(path: &Path, overwrite: bool) -> anyhow::Result<(File, u64)> {
    // Which claims no device.
    if let Some(by) = fs::canonicalize(path).ok().and_then(|whole| loop_device_over(&whole)) {
        bail!("{} is in use by {}; detach that first (losetup -d)", path.display(), by.display());
    }
    // With O_EXCL the kernel gives a block device to nobody but us, and not if it is mounted or swapped to.
    let exclusive = OFlags::EXCL.bits() as i32;
    let opened = OpenOptions::new().read(true).write(true).custom_flags(exclusive).open(path);
    let mut device = opened.with_context(|| format!("cannot have the device {} as a backing", path.display()))?;
    let mut begin = Vec::new();
    let looked = (&device).take(LOOKED_AT_BYTES as u64).read_to_end(&mut begin);
    looked.with_context(|| format!("cannot read the device {}", path.display()))?;
    if !overwrite && begin.iter().any(|byte| *byte != 0) {
        bail!(
            "there is something on {}, and a backing overwrites it; if that may be, say so with --backing-overwrite",
            path.display()
        );
    }
    let sector_bytes = ioctl_blksszget(&device).with_context(|| format!("{} has no sectors", path.display()))?;
    if sector_bytes > 4096 {
        bail!(
            "{} has sectors of {}, and a backing is read in pages of 4096 bytes; make a file system on it, and the backing a file there (not \
             for swap)",
            path.display(),
            Shown(sector_bytes.into())
        );
    }
    let bytes = device.seek(SeekFrom::End(0)).with_context(|| format!("{} has no size", path.display()))?;
    Ok((device, bytes))
}

/// How large it may become, and what is written at a time.
fn config(
    wanted: &BackingWanted,
    disk_bytes: u64,
    device_bytes: u64,
    batch_bytes: usize,
) -> anyhow::Result<BackingConfig> {
    let enough = disk_bytes.saturating_add(disk_bytes / ROOM_SHARE).saturating_add(ROOM_LEAST_BYTES);
    let capacity_bytes = wanted.max_bytes.unwrap_or(enough).min(device_bytes).min(BACKING_BYTES_MAX);
    let batch = wanted.batch_bytes.unwrap_or_else(|| {
        let few = usize::try_from(capacity_bytes / SEGMENTS_LEAST).unwrap_or(usize::MAX);
        few.clamp(*BackingConfig::SEGMENT_BYTES.start(), batch_bytes) as u64
    });
    let segment_bytes = usize::try_from(batch / 4096 * 4096).unwrap_or(usize::MAX);
    if !BackingConfig::SEGMENT_BYTES.contains(&segment_bytes) {
        bail!("--backing-batch is 64K to 16M; {} is not", Shown(batch));
    }
    if capacity_bytes / (segment_bytes as u64) < BackingConfig::SEGMENTS_LEAST {
        bail!(
            "a backing of {} has not four batches of {}; make it larger, or the batches smaller (--backing-batch)",
            Shown(capacity_bytes),
            Shown(segment_bytes as u64)
        );
    }
    if let Some(daily_bytes) = wanted.daily_bytes {
        refuse_less_than_a_batch(daily_bytes, segment_bytes as u64)?;
    }
    Ok(BackingConfig { capacity_bytes, segment_bytes })
}

/// Nothing could ever be written; only 0 says that this is meant.
fn refuse_less_than_a_batch(daily_bytes: u64, batch_bytes: u64) -> anyhow::Result<()> {
    if (1..batch_bytes).contains(&daily_bytes) {
        bail!(
            "of {} a day not one batch of {} can be written; make --backing-daily larger, or 0 if nothing is to be",
            Shown(daily_bytes),
            Shown(batch_bytes)
        );
    }
    Ok(())
}

/// The thread's.
struct Reclaimer {
    disk: String,
    pool: Weak<Pool>,
    backing: Arc<Backing>,
    store: Arc<Store>,
    worker: Worker,
    stop: Arc<AtomicBool>,
    /// Pages read and written when the age last advanced.
    used_pages: u64,
    health: Health,
    pressure: Pressure,
    relief: Relief,
}

impl Reclaimer {
    fn run(mut self) {
        let (mut attempt, mut tidied, mut in_vain) = (Instant::now(), Instant::now(), false);
        let mut between = BETWEEN_ATTEMPTS;
        while !self.stop.load(Ordering::Acquire) {
            self.advance_age();
            // What fails, is full, or finds nothing that could leave, only now and then.
            let health = self.backing.health();
            if health == Health::Good {
                between = BETWEEN_ATTEMPTS;
            }
            if (health == Health::Good && !in_vain) || attempt.elapsed() >= between {
                let failed_writes = self.backing.stats().failed_writes;
                if self.store.wants_reclaim(&self.backing) {
                    in_vain = !self.reclaim();
                    attempt = Instant::now();
                } else if matches!(health, Health::Failing(_)) {
                    self.try_again();
                    attempt = Instant::now();
                }
                // No room wears nothing out, and may be there the next second.
                let has_failed = self.backing.stats().failed_writes > failed_writes
                    && matches!(self.backing.health(), Health::Failing(_));
                between = next_between(between, has_failed);
            }
            self.tell();
            if tidied.elapsed() >= BETWEEN_ATTEMPTS {
                self.relieve(tidied.elapsed());
                // What is to leave does not wait until all that nobody uses any more is given back.
                let is_wanted =
                    || !in_vain && self.backing.health() == Health::Good && self.store.wants_reclaim(&self.backing);
                self.backing.tidy(|| !self.stop.load(Ordering::Acquire) && !is_wanted());
                tidied = Instant::now();
            }
            thread::park_timeout(BETWEEN_LOOKS);
        }
    }

    /// Goes on until there is no more to do, or nothing more can be done. Returns whether anything has left, or is leaving.
    fn reclaim(&mut self) -> bool {
        let mut any = false;
        while !self.stop.load(Ordering::Acquire) {
            // What went wrong is in its health.
            let Ok(done) = self.store.reclaim(&mut self.worker, &self.backing) else { return any };
            any |= done.pages > 0 || done.is_busy;
            if done.finished {
                break;
            }
        }
        any
    }

    /// Writes to a backing that failed, if there is something to write, however far the limit: who waits for the reserve of swap has blocks leave
    /// only for one that is in good health.
    fn try_again(&mut self) {
        let Some(pool) = self.pool.upgrade() else { return };
        // What went wrong is in its health.
        let _ = self.store.write_back(&mut self.worker, &pool, Leaving::Oldest);
    }

    /// Has some leave if the machine is short of memory, for as long as a window at most.
    fn relieve(&mut self, window: Duration) {
        let Some(pool) = self.pool.upgrade() else { return };
        let (stats, begun) = (pool.stats(), Instant::now());
        let wanted_bytes = self.relief.wanted_bytes(&Signs {
            window,
            stalled: self.pressure.stalled(),
            memory: self.pressure.memory(),
            came_back: stats.bd_reads,
            used_bytes: stats.mem_used_total,
        });
        // One that fails is tried now and then, however short memory is.
        let wanted_bytes = if matches!(self.backing.health(), Health::Failing(_)) { 0 } else { wanted_bytes };
        let (mut pages, mut left_bytes) = (0, 0);
        while left_bytes < wanted_bytes && begun.elapsed() < BETWEEN_ATTEMPTS && !self.stop.load(Ordering::Acquire) {
            // What went wrong is in its health.
            let Ok(done) = self.store.write_back(&mut self.worker, &pool, Leaving::Oldest) else { break };
            pages += done.pages as u64;
            left_bytes += done.object_bytes;
            if done.finished || done.is_busy {
                break;
            }
        }
        self.relief.have_left(pages);
    }

    fn advance_age(&mut self) {
        let Some(pool) = self.pool.upgrade() else { return };
        let stats = pool.stats();
        let used_pages = stats.num_reads + stats.num_writes;
        let is_over = used_pages - self.used_pages >= (stats.pages_stored() / AGE_SHARE).max(AGE_LEAST_PAGES);
        if is_over && self.store.advance_age_unless_since(clock_ns(), AGE_LEAST_NS) {
            self.used_pages = used_pages;
        }
    }

    /// Says what has changed for better or worse.
    fn tell(&mut self) {
        // A day that is over is so whether blocks have to leave or not.
        let daily = self.backing.daily_writes(clock_ns());
        let health = self.backing.health();
        if health == self.health {
            return;
        }
        self.health = health;
        match told(health, &daily) {
            None => say(&format!("compcache: the backing of disk {} takes blocks again\n", self.disk)),
            Some(why) => say(&format!(
                "compcache: {why}: blocks of disk {} stay in memory, and what does not fit there is refused\n",
                self.disk
            )),
        }
    }
}

/// How long it is to the next attempt when it was so long to one in which writes failed, or did not.
fn next_between(between: Duration, has_failed: bool) -> Duration {
    if has_failed { (between * 2).min(BETWEEN_ATTEMPTS_MOST) } else { BETWEEN_ATTEMPTS }
}

/// What is wrong with a backing.
fn told(health: Health, daily: &DailyWrites) -> Option<String> {
    match health {
        Health::Good => None,
        Health::Full => Some("the backing is full".into()),
        Health::Failing(error) => Some(error.to_string()),
        Health::Spent => {
            let budget = Shown(daily.budget_bytes.unwrap_or_default());
            Some(match daily.wait_ns {
                None => format!("with {budget} a day nothing is written to the backing"),
                Some(wait_ns) => {
                    let wait = about(Duration::from_nanos(wait_ns));
                    format!("the day's budget of {budget} is written; more may follow in about {wait}")
                }
            })
        }
    }
}

/// A duration in minutes or hours, no shorter than it is.
fn about(duration: Duration) -> String {
    match duration.as_secs().div_ceil(60) {
        minutes @ 0..=120 => format!("{} min", minutes.max(1)),
        minutes => format!("{} h", minutes.div_ceil(60)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use compcache_store::{Medium, MediumError, PageIndex, PoolConfig, StoreConfig};

    const MIB: u64 = 1 << 20;

    fn of(wanted: &BackingWanted, disk_bytes: u64, device_bytes: u64) -> anyhow::Result<BackingConfig> {
        config(wanted, disk_bytes, device_bytes, BackingConfig::default().segment_bytes)
    }

    fn wanted() -> BackingWanted {
        BackingWanted { path: "/x".into(), max_bytes: None, batch_bytes: None, overwrite: false, daily_bytes: None }
    }

    #[test]
    fn a_backing_has_room_for_all_of_its_disk_and_batches_that_fit() {
        let large = of(&wanted(), 1 << 30, u64::MAX).unwrap();
        assert!(large.capacity_bytes > (1 << 30) + (100 << 20) && large.segment_bytes == 1 << 20);
        let small = of(&wanted(), 8 * MIB, u64::MAX).unwrap();
        assert!(small.capacity_bytes > 12 * MIB && small.capacity_bytes / small.segment_bytes as u64 >= SEGMENTS_LEAST);
        assert_eq!(of(&wanted(), 1 << 40, 10 << 30).unwrap().capacity_bytes, 10 << 30, "the device is smaller");
        assert_eq!(of(&wanted(), 1 << 50, u64::MAX).unwrap().capacity_bytes, BACKING_BYTES_MAX);
    }

    #[test]
    fn sizes_that_make_no_backing_are_refused() {
        for (max_bytes, batch_bytes) in [(MIB, MIB), (MIB, 1), (1 << 40, 32 * MIB), (0, 64 << 10)] {
            let wanted = BackingWanted { max_bytes: Some(max_bytes), batch_bytes: Some(batch_bytes), ..wanted() };
            assert!(of(&wanted, 1 << 30, u64::MAX).is_err(), "{max_bytes}, {batch_bytes}");
        }
    }

    #[test]
    fn a_budget_of_less_than_a_batch_is_refused_unless_it_is_nothing() {
        let daily = |daily_bytes| BackingWanted { batch_bytes: Some(MIB), daily_bytes, ..wanted() };
        for (daily_bytes, is_taken) in [(None, true), (Some(0), true), (Some(MIB), true), (Some(MIB - 1), false)] {
            let config = of(&daily(daily_bytes), 1 << 30, u64::MAX);
            assert_eq!(config.is_ok(), is_taken, "{daily_bytes:?}");
        }
        let error = of(&daily(Some(1)), 1 << 30, u64::MAX).unwrap_err().to_string();
        assert!(error.contains("not one batch of 1.0 MiB") && error.contains("0 if"), "{error}");
    }

    /// Fails with the first write, and then with none.
    struct FailsOnce(AtomicBool);

    impl Medium for FailsOnce {
        fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), MediumError> {
            Err(MediumError::Short)
        }

        fn write_at(&self, _: u64, _: &[u8]) -> Result<(), MediumError> {
            let failed = self.0.swap(true, Ordering::SeqCst);
            if failed { Ok(()) } else { Err(MediumError::System { errno: 5 }) }
        }

        fn punch(&self, _: u64, _: u64) {}
    }

    #[test]
    fn a_backing_that_failed_is_tried_again_however_far_the_limit() {
        let store = Store::new(StoreConfig::default()).unwrap();
        let backing = Backing::new(Box::new(FailsOnce(AtomicBool::new(false))), BackingConfig::default()).unwrap();
        let pool = store.create_pool_on(PoolConfig::default(), &backing).unwrap();
        let (mut worker, stop) = (Worker::new(&store, clock_ns).unwrap(), Arc::new(AtomicBool::new(false)));
        let page: Vec<u8> = (0..=u8::MAX).cycle().take(4096).collect();
        pool.write(&mut worker, PageIndex(1), page.as_slice().try_into().unwrap()).unwrap();
        // As who waits for the reserve has them leave.
        store.write_back(&mut worker, &pool, Leaving::Oldest).unwrap_err();
        assert!(matches!(backing.health(), Health::Failing(_)) && is_touched(&backing.stats()));
        let reclaimer = Reclaimer {
            disk: "test".into(),
            pool: Arc::downgrade(&pool),
            backing: backing.clone(),
            store: store.clone(),
            worker,
            stop: stop.clone(),
            used_pages: 0,
            health: Health::Good,
            pressure: Pressure::open().unwrap(),
            relief: Relief::default(),
        };
        let (running, begun) = (thread::spawn(move || reclaimer.run()), Instant::now());
        while backing.health() != Health::Good && begun.elapsed() < Duration::from_secs(20) {
            thread::sleep(BETWEEN_LOOKS);
        }
        stop.store(true, Ordering::Release);
        running.join().unwrap();
        assert_eq!((backing.health(), pool.stats().bd_count), (Health::Good, 1));
    }

    #[test]
    fn writes_that_fail_all_day_are_a_small_part_of_those_that_there_could_be() {
        let (mut between, mut at, mut writes) = (BETWEEN_ATTEMPTS, Duration::ZERO, 0);
        while at < Duration::from_secs(24 * 60 * 60) {
            at += between;
            writes += 1;
            between = next_between(between, true);
        }
        assert!((1440..1450).contains(&writes), "{writes}");
        assert_eq!(next_between(between, false), BETWEEN_ATTEMPTS);
    }

    #[test]
    fn a_device_is_touched_also_by_writes_that_fail() {
        let stats = |segments_written, failed_writes| BackingStats {
            segments_written,
            failed_writes,
            ..BackingStats::default()
        };
        assert!(is_touched(&stats(0, 1)) && is_touched(&stats(1, 0)) && !is_touched(&stats(0, 0)));
    }

    #[test]
    fn a_day_that_is_spent_is_told_with_what_is_left_of_it() {
        let daily = |wait_ns| DailyWrites { budget_bytes: Some(2 << 30), wait_ns, ..DailyWrites::default() };
        let minutes = |minutes: u64| Some(minutes * 60 * NS_PER_S);
        for (wait_ns, words) in [
            (minutes(181), "the day's budget of 2.0 GiB is written; more may follow in about 4 h"),
            (minutes(180), "in about 3 h"),
            (minutes(120), "in about 120 min"),
            (Some(1), "in about 1 min"),
            (None, "with 2.0 GiB a day nothing is written"),
        ] {
            let told = told(Health::Spent, &daily(wait_ns)).unwrap();
            assert!(told.contains(words), "{told}");
        }
    }
}
