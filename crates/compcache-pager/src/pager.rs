//! The pager of one process: what its threads share.
//!
//! Problem: a program must run in less memory than it uses. Idea: move the frames of its cold pages to a staging range
//! in the same address space, compress them there into a pool, and give the frames to the next faults.
//!
//! Three threads, unknown to libc ([`crate::sys::start_thread`]):
//! - the *evictor* ([`crate::evict`]) wakes a few times a second, compares what the process holds with its limit, and
//!   when over it moves pages out and compresses them. A process that fits its limit pays for that thread's naps only.
//! - the *handler* ([`crate::fault`]) starts when the first range is registered; it answers faults and events.
//! - who brakes ([`crate::brake`]) starts with it; it looks whether more comes than can leave.
//!
//! **One lock**, [`Pager::state`], protects the page table, staging and regions. The handler holds it while it answers
//! a fault, the evictor while it moves a run out; compressing is done outside it, with the pages in phase
//! `Compressing`. That makes the hard rule simple: messages are read, and the events among them applied, under the same
//! hold of the lock under which pages are moved; so no decision is older than an event that has been read. Events that
//! have not been read yet make the kernel refuse every move with EAGAIN, in and out, because staging is registered with
//! the same descriptor.
//!
//! Order of locks: fork turn, state, then the store's.
//!
//! What is *not* here: policy for several processes (`shared`), what a page's word means (`table`), copies of the
//! process (`fork`).

use crate::blocks::FreshBlocks;
use crate::brake::{self, Brake};
use crate::code::CodeFrames;
use crate::cold::Cold;
use crate::copies::Copies;
use crate::cpus;
use crate::events::EventLog;
use crate::evict::Evictor;
use crate::fault::Handler;
use crate::fork::{ForkLog, ForkTurn};
use crate::keep::KeepRequest;
use crate::lock::{self, Mutex, Turn};
use crate::memory::{self, PAGE, boxed_zeroed};
use crate::process;
use crate::regions::Ranges;
use crate::relay::{self, Relay};
use crate::remap::{self, Remapping};
use crate::scan::{self, ScanBuffer};
use crate::shared::{EvictionWay, ProcessSlot, Region, RunCodec, SpillNews, Trouble};
use crate::small::SmallQueue;
use crate::spill::{self, Spill};
use crate::staging::{GROUP, Kind, Staging, groups_of_process};
use crate::sys::{self, Errno, Files, RobustList};
use crate::table::PageTable;
use crate::uffd::{Features, Uffd};
use alloc::boxed::Box;
use alloc::sync::Arc;
use compcache_store::{Codec, Pool, PoolConfig, Store, StoreConfig, Worker};
use core::ffi::{CStr, c_void};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use rustix::fd::{BorrowedFd, IntoRawFd};

/// Ranges that can be registered at once; what is beyond stays unpaged.
pub const REGIONS_MAX: usize = 16384;
/// Ranges that are never registered.
pub const EXCLUDED_MAX: usize = 1024;
/// Ranges of pages that are left where they are; with more of them, neighbours are joined.
pub const KEPT_MAX: usize = 4096;
/// Events of several threads at one time.
pub const PENDING_EVENTS: usize = 256;
/// Behind the frames: the gate, and the bell.
pub(crate) const BEHIND_FRAMES_BYTES: usize = 2 * PAGE;
/// No page.
pub(crate) const NOTHING: u64 = u64::MAX;
/// How long it is believed that nothing more can go.
const FLOOR_NS: u64 = 1_000_000_000;
/// Evictor, handler, and who brakes.
pub(crate) const OWN_THREADS: usize = 3;
pub(crate) const STACK_BYTES: usize = 256 << 10;
const TLS_BYTES: usize = 4096;
/// Bytes of frames to be given back to the system at once.
pub const MORGUE_BYTES: usize = 1 << 20;

/// Everything under the lock.
pub struct State {
    pub(crate) table: PageTable,
    pub(crate) staging: Staging,
    /// Pages that came back from the pool lately: they leave first.
    pub(crate) small: SmallQueue,
    /// Whether what comes back stays in the pool as well.
    pub(crate) copies: Copies,
    /// Registered with the userfaultfd.
    pub(crate) regions: Ranges<REGIONS_MAX>,
    /// Pages that may not leave: [`crate::keep`].
    pub(crate) kept: Ranges<KEPT_MAX>,
    /// Pages with guards on them: [`crate::keep`].
    pub(crate) guarded: Ranges<KEPT_MAX>,
    /// Locked memory: [`crate::keep`].
    pub(crate) locked: Ranges<KEPT_MAX>,
    /// Pages of control blocks: [`crate::blocks`].
    pub(crate) blocks: Ranges<KEPT_MAX>,
    /// Grows when a range is unmapped or moved: what was learnt of the map before is void.
    pub(crate) generation: u64,
    /// Ranges that were moved so far.
    pub(crate) moves: u64,
    /// What the process held when last measured, pages, without ours.
    pub(crate) resident_pages: u64,
    /// Pages added since then by answers to faults.
    pub(crate) grown_pages: u64,
    /// What it may hold, pages.
    pub(crate) limit_pages: u64,
    /// What it holds at least, pages, and until when that is believed: see [`State::raise_floor`].
    floor: (u64, u64),
    /// Evictions so far: the clock of refault distances.
    pub(crate) eviction_clock: u64,
    /// What happened while a fork was under way.
    pub(crate) fork_log: ForkLog,
    /// Seconds since some start, for ageing `Dropped` words.
    pub(crate) now_s: u32,
    /// Events whose order is not known yet: while there are any, nobody decides anything.
    pub(crate) pending: EventLog<PENDING_EVENTS>,
    /// The program moves memory: if it has several threads, what is registered is asked before anything leaves.
    pub(crate) doubt: bool,
    /// Things being done outside the lock that a copy of the process must not catch half-way: groups being compressed or
    /// given back, faults being answered from the pool.
    pub(crate) under_way: u32,
    /// Pages the handler is bringing from the pool, outside the lock: present before their words say so.
    pub(crate) loading: Range<u64>,
    /// What was taken last by [`crate::remap`], until the messages read meanwhile are taken in.
    pub(crate) taken_span: Range<usize>,
    /// From where to where it went: the event that says so is the pager's own.
    pub(crate) own_move: (usize, usize),
    /// For looking at what is present while an event is applied.
    pub(crate) event_scan: ScanBuffer,
}

/// How pages leave, and how their frames are given back.
#[derive(Clone, Copy)]
pub(crate) enum Way {
    /// UFFDIO_MOVE; frames go to the morgue by way of a descriptor without events.
    Move { quiet: Uffd },
    /// mremap: [`crate::remap`]. Frames are not registered, and are dropped where they are.
    Remap,
}

/// The descriptors the threads share, and what they can do. Written by the evictor before the handler starts.
#[derive(Clone, Copy)]
pub struct Channel {
    pub(crate) pagemap: i32,
    pub(crate) uffd: Uffd,
    pub(crate) way: Way,
    /// A page that is registered and always present, for [`Channel::is_quiet`].
    pub(crate) gate: usize,
    /// A page that may never be read.
    pub(crate) unreadable: usize,
}

impl Channel {
    /// `/proc/self/pagemap`.
    pub fn pagemap(&self) -> BorrowedFd<'_> {
        // SAFETY: opened with the channel, and never closed while a thread of the pager lives.
        unsafe { BorrowedFd::borrow_raw(self.pagemap) }
    }

    /// A page that is registered and never present: what is said of it, the handler hears.
    pub(crate) fn bell(&self) -> usize {
        self.gate + PAGE
    }

    /// Fills the gate's page; staging is registered. False when the kernel refuses.
    pub(crate) fn make_gate(&self) -> bool {
        static ZEROES: [u8; PAGE] = [0; PAGE];
        // A page of constants is not there before somebody reads it, and nobody would answer for it.
        let source = core::hint::black_box(&ZEROES);
        let _ = source.iter().fold(0, |sum, byte| sum | byte);
        loop {
            // SAFETY: the source is a page of constants, present now.
            let (_, error) = unsafe { self.uffd.copy(self.gate, source.as_ptr(), PAGE) };
            match error {
                None | Some(Errno::EEXIST) => return true,
                Some(Errno::EAGAIN) => lock::pause(),
                Some(_) => return false,
            }
        }
    }

    /// Whether no event is on its way: neither unread, nor about to be told by a thread that has changed the map.
    ///
    /// A copy to a page that is there is refused with EEXIST, but with EAGAIN first while the map is changing.
    pub(crate) fn is_quiet(&self) -> bool {
        // SAFETY: the page that nothing is copied to is present, as is any page to copy from: it is its own source.
        let (_, error) = unsafe { self.uffd.copy(self.gate, self.gate as *const u8, PAGE) };
        error == Some(Errno::EEXIST)
    }

    /// Whether a page lies in a registered range. Only while [`Channel::is_quiet`].
    ///
    /// A copy from a page that may not be read is refused: by ENOENT if its target is not registered; else by EFAULT, or by
    /// EEXIST where a huge page is. (Address 0 and its neighbours would do as well, but some kernels refuse them first.)
    pub(crate) fn is_registered(&self, address: usize) -> bool {
        self.registration(address) == Some(true)
    }

    /// As [`Channel::is_registered`], but waits until the map is not changing. Somebody must read the events.
    pub(crate) fn registration_of(&self, address: usize) -> bool {
        loop {
            match self.refusal_of(address) {
                Some(Errno::EAGAIN) => core::hint::spin_loop(),
                refusal => return matches!(refusal, Some(Errno::EFAULT | Errno::EEXIST)),
            }
        }
    }

    /// Whether a page lies in a registered range; `None` when the map is changing, or the kernel says something else.
    pub(crate) fn registration(&self, address: usize) -> Option<bool> {
        match self.refusal_of(address) {
            Some(Errno::EFAULT | Errno::EEXIST) => Some(true),
            Some(Errno::ENOENT) => Some(false),
            _ => None,
        }
    }

    fn refusal_of(&self, address: usize) -> Option<Errno> {
        // SAFETY: nothing is copied: the source is a page of the pager's own that nobody may read.
        let ask = || unsafe { self.uffd.copy(address, self.unreadable as *const u8, PAGE) }.1;
        // Perhaps it is being moved, and that is still to be told.
        match ask() {
            Some(Errno::ENOENT) => ask(),
            refusal => refusal,
        }
    }

    /// [`Uffd::move_pages`] to addresses where nothing is, on either descriptor, with the count put right.
    ///
    /// Linux 6.18 can move a page and then say EEXIST, or stop short before a page that it has moved: interrupted at the
    /// wrong instant it tries again what it has already done (docs/decisions/0004). The page tables tell: a page that
    /// has left its place and is at its target was moved.
    pub(crate) fn move_pages(&self, uffd: Uffd, dst: usize, src: usize, len: usize) -> (usize, Option<Errno>) {
        let mut done = 0;
        loop {
            let (moved, error) = uffd.move_pages(dst + done, src + done, len - done);
            done += moved;
            let Some(errno) = error else { return (len, None) };
            let stopped_short = errno == Errno::EEXIST || errno == Errno::EAGAIN && moved > 0;
            let told = done;
            // All of them now: the next try may be refused for another reason, and say nothing of these.
            while stopped_short && done < len && scan::has_moved(self.pagemap(), dst + done, src + done) {
                done += PAGE;
            }
            if done == len {
                return (len, None);
            }
            if done == told {
                return (done, error);
            }
        }
    }
}

/// One process's pager. Lives until the process ends; copied with it by fork.
pub struct Pager {
    /// What the tree of processes shares.
    pub region: &'static Region,
    pub(crate) pool: Arc<Pool>,
    pub(crate) store: Arc<Store>,
    /// Where pages go that the pool has no room for.
    pub(crate) spill: Option<Spill>,
    pub(crate) state: Mutex<Box<State>>,
    pub(crate) channel: Mutex<Option<Channel>>,
    /// The handler runs and at least one range is registered.
    pub(crate) armed: AtomicBool,
    /// A fork is under way: nothing may be changed that the copy will need.
    pub(crate) frozen: AtomicBool,
    /// The page last read from the pool while frozen.
    pub(crate) frozen_read: AtomicU64,
    /// The page that is brought at this moment while frozen, or [`NOTHING`].
    pub(crate) frozen_bring: AtomicU64,
    /// The processor the handler has bound itself to, or [`cpus::NONE`].
    pub(crate) handler_cpu: AtomicU32,
    /// The evictor has nothing to do.
    pub(crate) evictor_sleeps: AtomicBool,
    /// Whether the evictor is to keep a processor busy: [`crate::cpus`].
    pub(crate) settle: AtomicU32,
    /// The evictor sleeps on this word; any change wakes it.
    pub(crate) bell: AtomicU32,
    /// The handler wants the lock: the evictor, which takes it again and again, lets it go first.
    pub(crate) turn: Turn,
    /// At its last try the evictor found nothing that could go: waiting for it is in vain.
    pub(crate) exhausted: AtomicBool,
    /// Grows with every group of frames that becomes free: the handler waits on it when there is none.
    pub(crate) progress: AtomicU32,
    /// Groups of cold pages have been made, and what making them has touched, bytes: [`crate::cold`].
    pub(crate) has_groups: AtomicBool,
    pub(crate) cold_bytes: AtomicU64,
    pub(crate) never: Box<Ranges<EXCLUDED_MAX>>,
    pub(crate) fresh_blocks: FreshBlocks,
    /// There was more than one thread.
    pub(crate) many_threads: AtomicBool,
    pub(crate) slot: AtomicUsize,
    pub(crate) fork_turn: ForkTurn,
    pub(crate) keep_request: KeepRequest,
    pub(crate) remapping: Remapping,
    pub(crate) relay: Relay,
    pub(crate) brake: Brake,
    /// Pages are kept whose unmapping would not be announced yet.
    pub(crate) kept_unregistered: AtomicBool,
    /// The process that it is in, by the number it has there.
    process: AtomicU32,
    /// A word that is zero in a copy of the process until the copy has threads of ours.
    has_threads: *const AtomicBool,
    /// So many there are.
    own_threads: AtomicU64,
    is_filtered: AtomicBool,
    /// Staging's.
    pub(crate) frames: Range<usize>,
    morgue_start: usize,
    pub(crate) code: CodeFrames,
    unreadable: usize,
    /// An address in the stack of the program's first thread.
    pub(crate) main_stack: usize,
    stacks: [*mut u8; 3],
    spill_stacks: *mut u8,
    pub(crate) robust: *mut RobustList,
    pub(crate) evictor: *mut Evictor,
    pub(crate) handler: *mut Handler,
}

// SAFETY: the raw pointers are the threads' own stacks and structures, each used by its thread alone; the rest is
// atomics, locks and data that is only read after the constructor.
unsafe impl Sync for Pager {}
// SAFETY: as above.
unsafe impl Send for Pager {}

/// Nanoseconds of the monotonic clock, for the store.
pub fn clock_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn own_process() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get() as u32
}

impl Pager {
    /// Makes the pager of this process. Called once, before the program's own code, by the only thread there is. What does not
    /// fit goes to files in the directory `spill_to`.
    ///
    /// # Errors
    /// What the process could not get: it then runs unpaged.
    pub fn new(region: &'static Region, spill_to: Option<&CStr>) -> Result<&'static Pager, Trouble> {
        let no_memory = |_| Trouble::NoMemory;
        let header = &region.header;
        let codec = if header.codec.load(Relaxed) == RunCodec::Zstd as u32 {
            Codec::Zstd { level: header.codec_level.load(Relaxed) as i8 }
        } else {
            Codec::Lz4
        };
        let store = Store::new(StoreConfig::default()).map_err(|_| Trouble::NoMemory)?;
        let config = PoolConfig { codec, ..PoolConfig::default() };
        let parts = spill_to.and_then(|path| {
            let parts = Spill::backing(path, region);
            parts.inspect_err(|_| region.note_spill(SpillNews::NoFile, Errno::ENOMEM.0)).ok()
        });
        let pool = match &parts {
            Some(parts) => store.create_pool_on(config, &parts.backing),
            None => store.create_pool(config),
        };
        let pool = pool.map_err(|_| Trouble::NoMemory)?;
        let worker = || Worker::new(&store, clock_ns).map_err(|_| Trouble::NoMemory);
        let spill = parts.map(|parts| parts.finish(|| Worker::new(&store, clock_ns))).transpose();
        let spill = spill.map_err(|_| Trouble::NoMemory)?;
        let spill_stacks = match &spill {
            Some(_) => memory::map(spill::THREADS * STACK_BYTES).map_err(no_memory)?,
            None => core::ptr::null_mut(),
        };
        let cold = match header.recompress_after_ms.load(Relaxed) {
            0 => None,
            after_ms => {
                let level = header.recompress_level.load(Relaxed) as i8;
                Cold::new(&store, level, after_ms.saturating_mul(1_000_000), clock_ns())
            }
        };
        let limits = [&header.ram_limit_bytes, &header.resident_limit_bytes].map(|limit| limit.load(Relaxed));
        let ram_bytes = limits[0].max(limits[1]);
        let frames_bytes = groups_of_process(ram_bytes, header.overcommits_never.load(Relaxed) != 0) * GROUP * PAGE;
        let stack = || memory::map(STACK_BYTES).map_err(no_memory);
        let frames = memory::map(frames_bytes + BEHIND_FRAMES_BYTES).map_err(no_memory)? as usize;
        let remaps = header.eviction_way.load(Relaxed) == EvictionWay::Remap as u32;
        // SAFETY: an array of pairs of numbers is valid when zero.
        let never = unsafe { boxed_zeroed::<Ranges<EXCLUDED_MAX>>() };
        let pager = Pager {
            region,
            evictor: Box::into_raw(Evictor::new(worker()?, cold)),
            handler: Box::into_raw(Handler::new(worker()?)),
            pool,
            store: store.clone(),
            spill_stacks,
            spill,
            state: Mutex::new(State::new(ram_bytes / PAGE as u64).map_err(no_memory)?),
            channel: Mutex::new(None),
            armed: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            frozen_read: AtomicU64::new(0),
            frozen_bring: AtomicU64::new(NOTHING),
            handler_cpu: AtomicU32::new(cpus::NONE),
            evictor_sleeps: AtomicBool::new(false),
            settle: AtomicU32::new(cpus::SETTLED),
            bell: AtomicU32::new(0),
            turn: Turn::new(),
            exhausted: AtomicBool::new(false),
            progress: AtomicU32::new(0),
            has_groups: AtomicBool::new(false),
            cold_bytes: AtomicU64::new(0),
            never,
            fresh_blocks: FreshBlocks::new(),
            many_threads: AtomicBool::new(false),
            slot: AtomicUsize::new(0),
            fork_turn: ForkTurn::new(),
            keep_request: KeepRequest::new(),
            remapping: Remapping::new(remaps.then(remap::Kernel::probe).flatten()),
            relay: Relay::new(),
            brake: Brake::new(),
            kept_unregistered: AtomicBool::new(false),
            own_threads: AtomicU64::new(0),
            is_filtered: AtomicBool::new(false),
            process: AtomicU32::new(own_process()),
            has_threads: memory::map(PAGE).map_err(no_memory)?.cast_const().cast(),
            frames: frames..frames + frames_bytes,
            unreadable: memory::reserve(PAGE).map_err(no_memory)? as usize,
            main_stack: &raw const remaps as usize,
            morgue_start: memory::map(MORGUE_BYTES).map_err(no_memory)? as usize,
            code: CodeFrames::reserve().map_err(no_memory)?,
            stacks: [stack()?, stack()?, stack()?],
            robust: Box::into_raw(Box::new(RobustList::empty())),
        };
        let pager = Box::leak(Box::new(pager));
        pager.wipe_in_copies();
        pager.note_what_is_mapped()?;
        Ok(pager)
    }

    /// A copy of the process gets empty staging ranges: the frames in them are this process's. And it has no threads of
    /// ours.
    fn wipe_in_copies(&self) {
        let staging = (self.frames.start, self.frames.len() + BEHIND_FRAMES_BYTES);
        for (start, len) in [staging, (self.morgue_start, MORGUE_BYTES), (self.has_threads as usize, PAGE)] {
            // SAFETY: the range is the pager's own, and empty.
            let _ = unsafe { rustix::mm::madvise(start as *mut c_void, len, rustix::mm::Advice::LinuxWipeOnFork) };
        }
    }

    /// Takes what is mapped now, before the program's start, off the ranges that may ever be registered.
    fn note_what_is_mapped(&mut self) -> Result<(), Trouble> {
        use rustix::fs::{Mode, OFlags};
        let fd = rustix::fs::open(c"/proc/thread-self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|_| Trouble::NoProc)?;
        let never = &mut self.never;
        // SAFETY: the evictor's thread does not run yet, and this is the only reference.
        let buffer = unsafe { (*self.evictor).registrar.buffer() };
        crate::maps::for_each(rustix::fd::AsFd::as_fd(&fd), buffer, |mapping| {
            if mapping.anonymous && !mapping.heap {
                never.add(mapping.start..mapping.end);
            }
        });
        Ok(())
    }

    /// Starts the evictor.
    pub fn start(&'static self) -> Result<(), Trouble> {
        self.start_thread(0, Files::Own, evictor_entry)?;
        self.has_threads().store(true, Release);
        Ok(())
    }

    /// Whether the calling thread is in the process that the pager is in: not in a child that has its parent's memory (vfork).
    pub fn is_here(&self) -> bool {
        self.process.load(Acquire) == own_process()
    }

    /// Whether what does not fit goes to files.
    pub fn spills(&self) -> bool {
        self.spill.is_some()
    }

    /// Notes that a filter on system calls would not let new threads do the pager's work.
    pub fn note_filter(&self) {
        self.is_filtered.store(true, Release);
    }

    /// Notes that a filter on system calls kills who asks for memory that may be executed.
    pub fn forbid_code(&self) {
        self.code.forbid();
    }

    /// Whether new threads could not do the pager's work, as far as is known.
    pub fn is_filtered(&self) -> bool {
        self.is_filtered.load(Acquire)
    }

    /// How many threads of this process are the pager's.
    pub fn own_threads(&self) -> u64 {
        if self.has_threads().load(Acquire) { self.own_threads.load(Acquire) } else { 0 }
    }

    /// It has none: it is a copy of one that had.
    pub(crate) fn forget_own_threads(&self) {
        self.process.store(own_process(), Release);
        self.own_threads.store(0, Release);
    }

    /// Whether this process has an evictor: a copy made without fork handlers has none.
    pub(crate) fn has_threads(&self) -> &AtomicBool {
        // SAFETY: a word in a page of the pager's own, mapped as long as the process lives.
        unsafe { &*self.has_threads }
    }

    /// Starts an evictor in the place of one that has ended, and with it the others.
    pub(crate) fn start_again(&'static self) -> Result<(), Trouble> {
        self.forget_own_threads();
        self.handler_cpu.store(cpus::NONE, Release);
        self.settle.store(cpus::SETTLED, Release);
        self.evictor_sleeps.store(false, Release);
        self.slot.store(0, Release);
        self.start()
    }

    /// In a copy of the process that gets no evictor: does an evictor's work on that one's stack, for the program's may be small.
    ///
    /// # Safety
    /// No thread uses that stack, nor comes to.
    pub(crate) unsafe fn on_evictors_stack(&self, mut work: impl FnMut()) {
        // SAFETY: says the caller; the stack is mapped as long as the process lives.
        unsafe { sys::call_on_stack(self.stacks[0].add(STACK_BYTES), &mut work) };
    }

    /// Starts the handler and who brakes, from the evictor, whose descriptors they share.
    pub fn start_handler(&'static self) -> Result<(), Trouble> {
        self.start_thread(1, Files::Shared, handler_entry)?;
        // Without it nobody is held up.
        let _ = self.start_thread(2, Files::Shared, brake::entry);
        Ok(())
    }

    fn start_thread(
        &'static self,
        which: usize,
        files: Files,
        entry: extern "C" fn(*mut c_void) -> !,
    ) -> Result<(), Trouble> {
        self.start_thread_on(which, self.stacks[which], files, entry)
    }

    /// Starts one of the threads of the spill, from the evictor, whose descriptors they share; the spiller last, so that what it writes
    /// can be read. None may be started twice: each has its stack.
    pub fn start_spill_thread(&'static self, which: usize) -> Result<(), Trouble> {
        let entry = if which == spill::FETCHERS { spill::spiller_entry } else { spill::fetcher_entry };
        self.start_thread_on(
            OWN_THREADS + which,
            self.spill_stacks.wrapping_add(which * STACK_BYTES),
            Files::Shared,
            entry,
        )
    }

    /// Whether the process is given new threads now.
    pub(crate) fn can_start_threads(&self) -> bool {
        let Ok(stack) = memory::map(STACK_BYTES) else { return false };
        // SAFETY: a stack of its own, which stays until the thread has ended; it is passed nothing.
        let started = unsafe {
            sys::start_thread(stack.add(STACK_BYTES), stack, Files::Shared, ends_at_once, core::ptr::null_mut())
        };
        while let Ok(thread) = started
            && sys::is_own_thread(thread)
        {
            lock::pause();
        }
        // SAFETY: mapped above; nobody uses it any more.
        let _ = unsafe { rustix::mm::munmap(stack.cast(), STACK_BYTES) };
        started.is_ok()
    }

    fn start_thread_on(
        &'static self,
        place: usize,
        stack: *mut u8,
        files: Files,
        entry: extern "C" fn(*mut c_void) -> !,
    ) -> Result<(), Trouble> {
        // The thread inherits the mask of the one that starts it: nothing may interrupt it, for a handler of the
        // program's would run on its stack.
        let before = sys::block_signals();
        // Before it is there: who counts the threads of the process must find none too many.
        self.own_threads.fetch_add(1, AcqRel);
        // SAFETY: each stack is used by one thread, started once a process; its lowest page serves as `tls`. The
        // argument lives as long as the process.
        let started = unsafe {
            sys::start_thread(stack.add(STACK_BYTES), stack, files, entry, core::ptr::from_ref(self) as *mut c_void)
        };
        sys::restore_signals(before);
        const { assert!(TLS_BYTES < STACK_BYTES) };
        started.map(|thread| self.relay.note_thread(place, thread)).map_err(|_| {
            self.own_threads.fetch_sub(1, AcqRel);
            Trouble::NoThread
        })
    }

    /// Claims this process's slot in the shared region for the calling thread.
    pub fn claim_slot(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let process = rustix::process::getpid().as_raw_nonzero().get() as u32;
        // SAFETY: never freed, and only the evictor claims.
        let list = unsafe { &*self.robust };
        // SAFETY: as above.
        unsafe { list.register() };
        if let Some(slot) = self.region.claim(thread, process, list) {
            self.slot.store(core::ptr::from_ref(slot) as usize, Release);
        }
    }

    /// This process's slot, once claimed.
    pub fn slot(&self) -> Option<&'static ProcessSlot> {
        let slot = self.slot.load(Acquire) as *const ProcessSlot;
        // SAFETY: null or a slot of the region, which stays mapped.
        unsafe { slot.as_ref() }
    }

    /// Opens the descriptors and decides the way of eviction.
    pub fn open_channel(&self) -> Result<Channel, (Trouble, Errno)> {
        let (uffd, features) = Uffd::open(true).map_err(|errno| (Trouble::NoUserfaultfd, errno))?;
        let channel = self.open_beside(uffd, features).inspect_err(|_| uffd.close())?;
        *self.channel.lock() = Some(channel);
        Ok(channel)
    }

    /// What a channel has besides its first descriptor. Whatever fails, nothing more stays open.
    fn open_beside(&self, uffd: Uffd, features: Features) -> Result<Channel, (Trouble, Errno)> {
        let asked = self.region.header.eviction_way.load(Relaxed);
        let moves = asked == EvictionWay::Move as u32;
        if if moves { !features.moves } else { !self.remapping.is_possible() } {
            return Err((Trouble::NoEvictionWay, Errno(0)));
        }
        let pagemap = process::open(c"/proc/thread-self/pagemap").ok_or((Trouble::NoProc, Errno(0)))?;
        let pagemap = process::out_of_the_way(pagemap);
        let refused = |errno| (Trouble::NoUserfaultfd, errno);
        // The news of a fork comes with a descriptor: without room for one it could never be read.
        let room =
            rustix::io::fcntl_dupfd_cloexec(&pagemap, 0).map_err(|errno| refused(Errno(errno.raw_os_error())))?;
        let way = if moves { Way::Move { quiet: self.open_quiet().map_err(refused)? } } else { Way::Remap };
        drop(room);
        Ok(Channel { pagemap: pagemap.into_raw_fd(), uffd, way, gate: self.frames.end, unreadable: self.unreadable })
    }

    /// Frames that are given back cause no events; and nothing is announced before the first range is registered.
    fn open_quiet(&self) -> Result<Uffd, Errno> {
        let (quiet, _) = Uffd::open(false)?;
        quiet.register(self.morgue_start, MORGUE_BYTES).inspect_err(|_| quiet.close())?;
        Ok(quiet)
    }

    /// Where frames of a kind are moved to be given back.
    pub(crate) fn morgue(&self, kind: Kind) -> usize {
        match kind {
            Kind::Data => self.morgue_start,
            Kind::Code => self.code.morgue(),
        }
    }

    /// Whether the program has had more than one thread.
    pub fn has_many_threads(&self) -> bool {
        self.many_threads.load(Relaxed)
    }

    /// Whether every event that has been read is applied.
    pub(crate) fn is_settled(&self, state: &State) -> bool {
        state.pending.is_empty() && !self.remapping.has_unread()
    }

    /// Wakes the evictor.
    pub fn ring(&self) {
        self.bell.fetch_add(1, Release);
        lock::wake(&self.bell);
    }

    /// Tells whoever waits for a frame that there is one.
    pub fn tell_progress(&self) {
        self.progress.fetch_add(1, Release);
        lock::wake(&self.progress);
    }

    /// Memory of ours in this process, bytes, besides staging (which counts as the program's: it holds its pages).
    pub fn ours_bytes(&self, state: &State) -> u64 {
        let spill = self.spill.as_ref().map_or(0, Spill::used_bytes);
        let cold = self.cold_bytes.load(Relaxed);
        let fixed = if self.armed.load(Relaxed) { PAGING_BYTES } else { WAITING_BYTES };
        self.store.mem_used_total_bytes() + state.table.used_bytes() + spill + cold + fixed
    }
}

/// Stacks, contexts, buffers: what a pager holds whatever the program does, before there is anything to page and then; measured by hand
/// (docs/design/pager.md).
const WAITING_BYTES: u64 = 196 << 10;
const PAGING_BYTES: u64 = 304 << 10;

impl State {
    fn new(ram_pages: u64) -> Result<Box<State>, Errno> {
        let table = PageTable::new(ram_pages)?;
        // SAFETY: all fields but `table` are numbers, arrays of numbers, or lists of them, valid when zero. A page
        // table that is zero is never used or dropped: the true one is written over it at once.
        let mut state = unsafe { boxed_zeroed::<State>() };
        // SAFETY: the place is valid for writes; the zero bytes there own nothing.
        unsafe { core::ptr::write(&raw mut state.table, table) };
        state.small.set_size(ram_pages);
        Ok(state)
    }

    /// Room kept below the limit for pages that come back while others are still on their way out, pages.
    pub fn reserve_pages(&self) -> u64 {
        self.staging.reserve_pages(self.limit_pages)
    }

    /// Nothing more can go. What holds more than the limit, and cannot leave, would have all the rest leave as soon as it
    /// comes; so for a second the process may hold what it holds, and an eighth of its limit for what comes and goes.
    pub fn raise_floor(&mut self, now_ns: u64) {
        if now_ns >= self.floor.1 {
            self.floor = (self.estimate_pages() + self.limit_pages / 8, now_ns + FLOOR_NS);
            self.limit_pages = self.limit_pages.max(self.floor.0);
        }
    }

    /// What the process may hold at least, pages.
    pub fn floor_pages(&self, now_ns: u64) -> u64 {
        if now_ns < self.floor.1 { self.floor.0 } else { 0 }
    }

    /// The best guess at what the process holds now, pages.
    pub fn estimate_pages(&self) -> u64 {
        self.resident_pages + self.grown_pages
    }
}

extern "C" fn ends_at_once(_: *mut c_void) -> ! {
    sys::end_thread()
}

extern "C" fn evictor_entry(pager: *mut c_void) -> ! {
    // SAFETY: `start_thread` passed a pager, which is never freed.
    let pager = unsafe { &*pager.cast::<Pager>().cast_const() };
    let mut kept = [-1; spill::PARTS + 1];
    match &pager.spill {
        _ if pager.relay.is_under_way() => kept[0] = pager.relay.socket(),
        Some(spill) => kept[..spill::PARTS].copy_from_slice(&spill.handed()),
        None => {}
    }
    // SAFETY: this thread was started without CLONE_FILES: the table is a copy of its own, and none of the program's
    // descriptors may be held open by it; but for what the parent of a copy has opened for it, or what there was before.
    unsafe { sys::close_all_descriptors_but(kept) };
    if pager.relay.is_under_way() {
        relay::take_over(pager);
    }
    // SAFETY: the evictor's structure is this thread's alone.
    let evictor = unsafe { &mut *pager.evictor };
    evictor.run(pager)
}

extern "C" fn handler_entry(pager: *mut c_void) -> ! {
    // SAFETY: `start_thread` passed a pager, which is never freed.
    let pager = unsafe { &*pager.cast::<Pager>().cast_const() };
    // SAFETY: the handler's structure is this thread's alone.
    let handler = unsafe { &mut *pager.handler };
    handler.run(pager)
}
