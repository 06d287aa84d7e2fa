//! What makes the server safe to swap to.
//!
//! A machine that swaps is short of memory. Whoever takes its pages then must not wait for memory that only the taking of
//! pages frees, nor be thrown out himself:
//!
//! | danger                                               | what is done                                        | when            |
//! |------------------------------------------------------|-----------------------------------------------------|-----------------|
//! | a thread looks for memory and waits for pages to be written, to us | all threads are I/O flushers (`PR_SET_IO_FLUSHER`) | at the start |
//! | the end of the server unmounts what lies on its disks | a mount namespace of its own                        | at the start    |
//! | the server's own pages are dropped or swapped        | all of it is populated and locked (`mlockall`)      | the first swap disk |
//! | the machine is out of memory and something is killed | never the server (`oom_score_adj` -1000)            | the first swap disk |
//! | a page comes in and needs memory to be kept in       | the store has a reserve, refilled by a thread that serves nothing | the first swap disk |
//! | nobody has memory for the next request, the kernel neither | a ballast is thrown off                         | the first swap disk |
//! | the kernel keeps what is free from the next request, too | no boost of its watermarks ([`super::boost`])     | the first swap disk |
//! | a table of the pool must grow                        | the tables of the whole disk are there              | each swap disk  |
//! | swap is full while memory is not                     | the store may take more of it                       | the first swap disk without a backing |
//! | a backing is written when there is no memory         | what it writes from is there; a bare device, asked in pieces for which the kernel needs none | each swap disk with one |
//! | more is in use than fits, and the kernel goes on trying | its OOM killer is asked for ([`super::overload`])  | the first swap disk |
//! | the server is killed, and the kernel goes on writing  | another process takes swap off ([`mod@super::guard`])| the first swap disk |
//!
//! Threads inherit the first two, so they are done before there are any. All of it needs root; without, disks are served
//! and swap is refused. Root in a container often lacks CAP_SYS_RESOURCE, which the first and the fourth take: then swap is
//! refused unless it is asked for unprotected. That is fine where memory cgroups are short of memory and the machine is not.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use compcache_block::fuse_loop::own_mounts;
use compcache_block::{BlockDevice, Disk};
use compcache_store::{PAGE_SIZE, Store};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MlockAllFlags, ProtFlags, madvise, mlockall, mmap_anonymous};
use rustix::process::configure_io_flusher_behavior;

use crate::cgroup;
use crate::kernel::{clock_ns, ram_bytes};
use crate::run::say;
use crate::serve::boost::NoBoost;
use crate::serve::guard::Guard;
use crate::serve::overload::{self, SwapDisks};
use crate::size::Shown;

/// The reserve is so large a share of the RAM, within bounds: what a machine swaps out while the reserve's thread sleeps,
/// and some more.
const RESERVE_SHARE: u64 = 64;
const RESERVE_BYTES: Range<u64> = 8 << 20..64 << 20;

/// The ballast, likewise: what the kernel needs to hand over some requests.
const BALLAST_SHARE: u64 = 128;
const BALLAST_BYTES: Range<u64> = 2 << 20..16 << 20;
/// Whoever fills the reserve has waited for so long when the ballast is thrown off.
const STUCK: Duration = Duration::from_millis(100);

/// Between two looks at the reserve: when it was used a moment ago, and else.
const PAUSE_BUSY: Duration = Duration::from_millis(2);
const PAUSE_IDLE: Duration = Duration::from_millis(20);
/// After the system or the limit refused memory.
const PAUSE_REFUSED: Duration = Duration::from_millis(50);

/// Of larger mappings only a part is populated: of a stack, which lies above a page that nobody may touch, the end that is used;
/// of a buffer as much as the largest request takes.
const STACK_BYTES: usize = 128 << 10;
const BUFFER_BYTES: usize = 5 << 18;

/// The tables take so much for each page.
const TABLE_BYTES: u64 = 12;
/// A disk's own limit leaves so much for pages at least, beside its tables.
const LEAST_FOR_PAGES_BYTES: u64 = 1 << 20;

const OOM_NEVER: &str = "-1000";

/// What has been done, and why some of it could not be.
pub struct Safety {
    /// What is missing of what threads inherit, in words.
    lacks: Vec<String>,
    /// What the store may take from then on.
    limit_bytes: u64,
    state: Mutex<State>,
    disks: SwapDisks,
}

#[derive(Default)]
struct State {
    /// What was done for the first disk, as far as it got.
    locked: bool,
    ballast: Option<Arc<Ballast>>,
    is_refilling: bool,
    is_watching: bool,
    is_overload_watched: bool,
    boost: Option<NoBoost>,
    guard: Option<Guard>,
    /// There is a disk to swap to.
    serving: bool,
}

impl Safety {
    /// Does what threads inherit. To be called before there are any. With swap the store may take `limit_bytes`.
    pub fn at_start(limit_bytes: u64) -> Safety {
        let mut lacks = Vec::new();
        if let Err(error) = configure_io_flusher_behavior(true) {
            lacks.push(format!("it cannot mark its threads as I/O flushers (CAP_SYS_RESOURCE, Linux 5.6): {error}"));
        }
        if let Err(error) = own_mounts() {
            lacks.push(format!("it cannot have a mount namespace of its own (CAP_SYS_ADMIN): {error}"));
        }
        Safety { lacks, limit_bytes, state: Mutex::default(), disks: SwapDisks::default() }
    }

    /// What the store may take once there is swap without a backing; at least.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Makes the process, the store and `disk` fit for swap. What was done for one disk holds for all later ones, if it is
    /// [kept](Preparation::keep). With `unprotected`, what takes CAP_SYS_RESOURCE may be lacking.
    ///
    /// # Errors
    /// It cannot be done; the server may be locked in memory nevertheless, also where it is not kept.
    pub fn make_safe<'s>(
        &'s self,
        store: &'s Arc<Store>,
        disk: &Arc<Disk>,
        unprotected: bool,
    ) -> anyhow::Result<Preparation<'s>> {
        let mut lacks = self.lacks.clone();
        // Harmless where it turns out to be in vain.
        let spared = fs::write("/proc/self/oom_score_adj", OOM_NEVER);
        if let Err(error) = &spared {
            lacks.push(format!(
                "it cannot keep itself from being killed when memory is out (CAP_SYS_RESOURCE): {error}"
            ));
        }
        if !lacks.is_empty() && !unprotected {
            bail!(
                "the server is not safe to swap to: {}; run `compcache serve` as root with these capabilities, or add --unprotected \
                 where only memory cgroups will be short of memory",
                lacks.join("; ")
            );
        }
        let mut state = self.lock();
        let here = cgroup::memory_limit().map_or(u64::MAX, |limit| limit.bytes).min(ram_bytes());
        self.start(&mut state, store, here, spared.is_ok())?;
        if state.guard.is_none() {
            state.guard = Some(Guard::start()?);
        }
        if !state.serving {
            state.boost = NoBoost::take();
        }
        if let Some(ballast) = &state.ballast {
            ballast.is_wanted.store(true, Relaxed);
        }
        drop(state);
        self.disks.add(disk);
        let preparation = Preparation { safety: self, store, limit_before: store.limit_bytes(), kept: false };
        // Where pages can leave, memory is better left to the programs.
        if disk.pool().backing().is_none() {
            store.set_limit_bytes(self.limit_bytes);
        }
        prepare(store, disk, (here / RESERVE_SHARE).clamp(RESERVE_BYTES.start, RESERVE_BYTES.end))?;
        Ok(preparation)
    }

    /// Locks the server in memory, and starts the threads that swap needs. What was done before is not done again.
    fn start(&self, state: &mut State, store: &Arc<Store>, here: u64, is_spared: bool) -> anyhow::Result<()> {
        if !state.locked {
            // What is mapped from here on is locked as it is touched. Not all of it at once: the store maps far more than it uses.
            mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)
                .context("the server cannot lock its memory, as it must for swap (CAP_IPC_LOCK)")?;
            state.locked = true;
        }
        let ballast = match &state.ballast {
            Some(ballast) => ballast.clone(),
            None => Arc::new(Ballast::new((here / BALLAST_SHARE).clamp(BALLAST_BYTES.start, BALLAST_BYTES.end))?),
        };
        state.ballast = Some(ballast.clone());
        // First who throws it off.
        if !state.is_watching {
            start_watching(ballast.clone())?;
            state.is_watching = true;
        }
        if !state.is_refilling {
            start_refilling(store.clone(), ballast.clone())?;
            state.is_refilling = true;
        }
        if !state.is_overload_watched {
            // In a container only its memory cgroup will be short, and the kernel acts there by itself.
            let watching = match is_spared {
                true => overload::start_watching(self.disks.clone(), move || ballast.asked_for()),
                false => Err(anyhow!("it could choose this server")),
            };
            if let Err(error) = watching {
                say(&format!(
                    "compcache: a machine with more in use than fits will not be helped by the OOM killer soon: {error:#}\n"
                ));
            }
            state.is_overload_watched = true;
        }
        Ok(())
    }

    /// There is no disk for swap any more: what was taken for it goes back, by the thread that got it. The server stays locked in memory, and
    /// keeps its limit.
    pub fn rest(&self, store: &Store) {
        let mut state = self.lock();
        state.serving = false;
        state.boost = None;
        state.guard = None;
        store.set_reserve_bytes(0);
        if let Some(ballast) = &state.ballast {
            ballast.is_wanted.store(false, Relaxed);
        }
    }

    /// Says which devices are for swap: from these it is taken off when this server is killed.
    pub fn guard(&self, devices: &[String]) {
        let mut state = self.lock();
        let Some(guard) = &mut state.guard else { return };
        if guard.tell(devices).is_ok() || devices.is_empty() {
            return;
        }
        // Somebody has ended it.
        let told = Guard::start().and_then(|guard| Ok(state.guard.insert(guard).tell(devices)?));
        if let Err(error) = told {
            say(&format!(
                "compcache: swap will stay on if this server is killed, and can stop the machine: {error:#}\n"
            ));
        }
    }

    /// Has the system give the memory of what was mapped since: stacks and buffers of threads that were started.
    pub fn settle(&self, store: &Store) {
        if self.lock().serving {
            populate(store);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What was changed for a disk that is not there yet. Put back when this is dropped, but for the lock on the server's memory and
/// the threads, which cost little; unless the disk has come.
#[must_use = "it is put back when this is dropped"]
pub struct Preparation<'s> {
    safety: &'s Safety,
    store: &'s Store,
    limit_before: u64,
    kept: bool,
}

impl Preparation<'_> {
    /// The disk is there.
    pub fn keep(mut self) {
        self.kept = true;
        self.safety.lock().serving = true;
    }
}

impl Drop for Preparation<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        self.store.set_limit_bytes(self.limit_before);
        let state = self.safety.lock();
        if !state.serving {
            drop(state);
            self.safety.rest(self.store);
        }
    }
}

/// The least limit of a disk with tables of so many bytes: with less, one that was full once would refuse all for good.
fn least_limit_bytes(table_bytes: u64) -> u64 {
    // A full pool accepts again below nine tenths of its limit.
    (table_bytes + LEAST_FOR_PAGES_BYTES).div_ceil(9) * 10
}

/// What was prepared for swap stays, so that a limit must be more than that.
fn refuse_too_little(limit_bytes: u64, table_bytes: u64) -> anyhow::Result<()> {
    let least_bytes = least_limit_bytes(table_bytes);
    if limit_bytes < least_bytes {
        bail!(
            "a limit of {} has no room for the tables of the disk, {}, and pages beside them; write --limit {}M at least, or a \
             smaller --size",
            Shown(limit_bytes),
            Shown(table_bytes),
            least_bytes.div_ceil(1 << 20)
        );
    }
    Ok(())
}

/// Refuses to change size or limit of a disk that serves swap to what leaves no room for pages.
pub fn refuse_change(disk: &Disk, size_bytes: Option<u64>, limit_bytes: Option<u64>) -> anyhow::Result<()> {
    let stats = disk.stats();
    let more_bytes = size_bytes.map_or(0, |bytes| bytes.saturating_sub(disk.size_bytes()));
    if more_bytes == 0 && limit_bytes.is_none() {
        return Ok(());
    }
    let table_bytes = stats.table_bytes.saturating_add((more_bytes / PAGE_SIZE as u64).saturating_mul(TABLE_BYTES));
    refuse_too_little(limit_bytes.unwrap_or(stats.mem_limit), table_bytes)
}

/// What a disk needs to be there.
fn prepare(store: &Store, disk: &Disk, reserve_bytes: u64) -> anyhow::Result<()> {
    let pages = disk.size_bytes() / PAGE_SIZE as u64;
    let tables = || {
        format!(
            "there is no memory for the tables of the disk, {}; a smaller --size needs less",
            Shown(pages * TABLE_BYTES)
        )
    };
    disk.pool().prepare(pages).with_context(tables)?;
    let stats = disk.stats();
    refuse_too_little(stats.mem_limit, stats.table_bytes)?;
    for (start, bytes) in disk.pool().backing().into_iter().flat_map(|backing| backing.memory_ranges()) {
        // SAFETY: populating changes no content, whatever is there.
        let populated = unsafe { madvise(start as *mut c_void, bytes, Advice::LinuxPopulateWrite) };
        // Kernels before 5.14 know nothing of it: then it comes as it is touched.
        if let Err(error) = populated.or_else(|error| if error == Errno::INVAL { Ok(()) } else { Err(error) }) {
            bail!("there is no memory to write to the backing from ({error}); a smaller --backing-batch needs less");
        }
    }
    // Not before: the thread that fills it would take what the tables need.
    store.set_reserve_bytes(reserve_bytes);
    while store.refill().context("there is no memory for the reserve that swap needs")? {}
    Ok(())
}

/// Refills the reserve, off the path of those who use it; and the ballast after it.
fn start_refilling(store: Arc<Store>, ballast: Arc<Ballast>) -> anyhow::Result<()> {
    let refill = move || {
        let mut pause = PAUSE_IDLE;
        loop {
            ballast.asking.store(clock_ns(), Relaxed);
            let refilled = store.refill();
            if refilled == Ok(false) {
                if ballast.is_wanted.load(Relaxed) {
                    ballast.take_on();
                    ballast.probe();
                } else if ballast.is_on.load(Relaxed) {
                    ballast.throw_off();
                }
            }
            ballast.asking.store(NOT_ASKING, Relaxed);
            match refilled {
                // One unit after the other while some are missing.
                Ok(true) => pause = PAUSE_BUSY,
                Ok(false) => {
                    thread::sleep(pause);
                    pause = PAUSE_IDLE;
                }
                Err(_) => thread::sleep(PAUSE_REFUSED),
            }
        }
    };
    let thread = thread::Builder::new().name("reserve".into()).spawn(refill);
    thread.map(drop).context("cannot start the thread that refills the reserve")
}

/// Throws the ballast off when who fills the reserve gets no memory: then requests wait for the kernel, which waits for
/// memory that only requests that end would free.
fn start_watching(ballast: Arc<Ballast>) -> anyhow::Result<()> {
    let watch = move || {
        loop {
            thread::sleep(STUCK / 4);
            if ballast.asked_for() > STUCK {
                ballast.throw_off();
            }
        }
    };
    let thread = thread::Builder::new().name("ballast".into()).spawn(watch);
    thread.map(drop).context("cannot start the thread that watches over the reserve")
}

const NOT_ASKING: u64 = 0;

/// Memory that is held only to be given back when there is no other, and behind it a page to ask for.
struct Ballast {
    start: usize,
    bytes: usize,
    /// There is swap.
    is_wanted: AtomicBool,
    is_on: AtomicBool,
    /// Since when the system is asked for memory, on [`clock_ns`], or [`NOT_ASKING`].
    asking: AtomicU64,
}

impl Ballast {
    fn new(bytes: u64) -> anyhow::Result<Ballast> {
        let (bytes, access) = (bytes as usize, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping, at an address of the kernel's choice, disturbs nobody's memory.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes + PAGE_SIZE, access, MapFlags::PRIVATE) };
        let start = start.context("there is no memory for the ballast that swap needs")? as usize;
        let (is_on, is_wanted) = (AtomicBool::new(false), AtomicBool::new(true));
        let ballast = Ballast { start, bytes, is_wanted, is_on, asking: AtomicU64::new(NOT_ASKING) };
        ballast.take_on();
        Ok(ballast)
    }

    /// For how long the system has been asked for memory and has given none.
    fn asked_for(&self) -> Duration {
        match self.asking.load(Relaxed) {
            NOT_ASKING => Duration::ZERO,
            since_ns => Duration::from_nanos(clock_ns().saturating_sub(since_ns)),
        }
    }

    fn take_on(&self) {
        if !self.is_on.swap(true, Relaxed) {
            // SAFETY: our own mapping, whose contents mean nothing. Kernels before 5.14 refuse; then there is no ballast.
            let _ = unsafe { madvise(self.start as *mut c_void, self.bytes, Advice::LinuxPopulateWrite) };
        }
    }

    /// Asks the system for a page. The reserve may be full and the kernel's part of a transport at a loss.
    fn probe(&self) {
        let page = self.start + self.bytes;
        // SAFETY: the last page of our own mapping, which nobody reads; on kernels before 5.18 it stays, and nothing is asked.
        unsafe {
            let _ = madvise(page as *mut c_void, PAGE_SIZE, Advice::LinuxDontneedLocked);
            (page as *mut u8).write_volatile(1);
        }
    }

    /// May be done again and again, also while it is being taken on.
    fn throw_off(&self) {
        self.is_on.store(false, Relaxed);
        // SAFETY: as above. Kernels before 5.18 do not give locked memory back; then it stays.
        let _ = unsafe { madvise(self.start as *mut c_void, self.bytes, Advice::LinuxDontneedLocked) };
    }
}

/// Asks for the memory of all that is mapped, but for the store, which has its reserve.
fn populate(store: &Store) {
    let own = store.memory_ranges().map(|(start, length)| start..start + length);
    let maps = fs::read("/proc/self/maps").unwrap_or_default();
    for mapping in Mapping::all(&String::from_utf8_lossy(&maps)) {
        if own.iter().any(|range| range.contains(&mapping.range.start)) {
            continue;
        }
        let advice = if mapping.writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        let part = mapping.part();
        // SAFETY: populating changes no content and frees nothing, whatever is mapped there by now. Kernels before 5.14
        // refuse, and what cannot be had is not: then it comes as it is touched.
        let _ = unsafe { madvise(part.start as *mut c_void, part.len(), advice) };
    }
}

/// A line of `/proc/self/maps` about memory that can be read and is not shared.
#[derive(Debug, PartialEq)]
struct Mapping {
    range: Range<usize>,
    writable: bool,
    of_file: bool,
    /// It lies directly above one that nobody may touch.
    guarded: bool,
}

impl Mapping {
    fn all(maps: &str) -> Vec<Mapping> {
        let mut guard_end = 0;
        let parse = |line: &str| {
            let mut words = line.split_ascii_whitespace();
            let (start, end) = words.next()?.split_once('-')?;
            let (access, name) = (words.next()?, words.nth(3).unwrap_or_default());
            let address = |text| usize::from_str_radix(text, 16).ok();
            let range = address(start)?..address(end)?;
            let guarded = range.start == guard_end;
            if access.starts_with("---") {
                guard_end = range.end;
            }
            // The kernel's own have names like [vvar].
            let usual = access.starts_with('r') && access.ends_with('p') && !name.starts_with("[v");
            let writable = access.as_bytes()[1] == b'w';
            usual.then(|| Mapping { range, writable, of_file: name.starts_with('/'), guarded })
        };
        maps.lines().filter_map(parse).collect()
    }

    /// What of it is used, as far as that can be told from outside.
    fn part(&self) -> Range<usize> {
        let Range { start, end } = self.range;
        match (self.of_file, self.guarded) {
            (true, _) => start..end,
            (false, true) => end - STACK_BYTES.min(end - start)..end,
            (false, false) => start..start + BUFFER_BYTES.min(end - start),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_told_apart() {
        let maps = "55d0a000-55d0b000 r-xp 00001000 fe:01 1234   /usr/bin/compcache\n\
                    7f0000000000-7f0000001000 ---p 00000000 00:00 0\n\
                    7f0000001000-7f0000201000 rw-p 00000000 00:00 0\n\
                    7f0000201000-7f0001201000 rw-p 00000000 00:00 0\n\
                    7f0001201000-7f0001202000 rw-s 00000000 00:01 5 /dev/zero\n\
                    7ffc00000000-7ffc00004000 r--p 00000000 00:00 0 [vvar]\n";
        let [text, stack, buffer] = &Mapping::all(maps)[..] else { panic!("{:?}", Mapping::all(maps)) };
        assert!(text.of_file && !text.writable && text.part() == text.range);
        assert!(stack.guarded && stack.writable && stack.part() == (0x7f00001e1000..0x7f0000201000));
        assert_eq!(buffer.part(), 0x7f0000201000..0x7f0000341000);
    }

    #[test]
    fn what_this_process_maps_can_be_populated() {
        let store = Store::new(compcache_store::StoreConfig::default()).unwrap();
        populate(&store);
        assert_eq!(store.mem_used_total_bytes(), 0);
    }
}
