//! The evictor: keeps the process within its limit, with room for pages that come back.
//!
//! What the hand ([`crate::hand`]) finds cold is moved out to staging. There it gets a second chance: it is compressed only
//! when three quarters of the groups are staged behind it, and if it is touched before, it goes back and is hot. Heat also
//! comes from the refault distance (`fault`): a page that returns sooner than the whole resident set could have been
//! replaced belongs to the working set.
//!
//! How pages leave, and how their frames are given back: [`crate::leave`].
//!
//! # Source
//! The refault distance is `mm/workingset.c`.

use crate::brake::Noted;
use crate::cold::Cold;
use crate::compress;
use crate::cpus::Clear;
use crate::events;
use crate::fork;
use crate::hand::{self, Hand};
use crate::leave::{Filled, drop_contents};
use crate::lock::{self, Guard};
use crate::maps;
use crate::memory::PAGE;
use crate::pager::{BEHIND_FRAMES_BYTES, Channel, Pager, State, Way, clock_ns};
use crate::process;
use crate::registrar::{Registered, Registrar};
use crate::restore::restore_all;
use crate::retire;
use crate::shared::{Counters, ProcessSlot, Region, Totals, Trouble};
use crate::staging::{BURIED_AT_ONCE, GROUP, Kind, Staging};
use crate::sys::{self, Errno};
use crate::unseen::Unseen;
use crate::waits::{Seen, Waits};
use alloc::boxed::Box;
use compcache_store::Worker;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::*};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};

/// Before its first nap is over a process costs one thread and nothing else: most processes of a build end sooner.
const FIRST_NAP_NS: u64 = 3_000_000;
const NAP_MIN_NS: u64 = 1_000_000;
const NAP_IDLE_NS: u64 = 20_000_000;
/// A process that has used less than an eighth of a processor for so long is taken for idle.
const IDLE_AFTER_NS: u64 = 1_000_000_000;
/// A program that rests uses less than so small a share of a processor.
const REST_SHARE: u64 = 256;
const NAP_MAX_NS: u64 = 100_000_000;
/// How fast a process can grow without faults of ours: what a processor can touch in a second.
const GROWTH_BYTES_PER_S: u64 = 2 << 30;
/// Groups moved out or compressed before the process is measured again: about two milliseconds.
const STEPS_BETWEEN_LOOKS: u32 = 8;
/// Objects moved by a step of compaction: some tens of microseconds.
const COMPACTED_AT_ONCE: usize = 64;
/// How long the evictor waits for room in the pool before it looks again what is asked of it.
const WAIT_FOR_SPILL_NS: u64 = 2_000_000;
/// With less room than so small a share of what is resident a tree is full: a little more than the reserve of one that evicts.
const FULL_SHARE: u64 = 32;
const MAKE_OWN_TRIES: u32 = 64;
const UNFINISHED_MAX: u32 = 32;
/// Time between two looks at which threads there are.
const BETWEEN_THREADS_NS: u64 = 10_000_000;

/// What the evictor's thread owns.
pub struct Evictor {
    pub worker: Worker,
    pub(crate) registrar: Registrar,
    pub(crate) hand: Hand,
    /// What makes groups of cold pages, if that is wanted.
    cold: Option<Cold>,
    clear: Clear,
    files: Option<Files>,
    looked_at_ns: u64,
    threads_noted_ns: u64,
    cpu_ns: u64,
    busy_at_ns: u64,
    waits: Waits,
    /// No other thread of the process has done anything between the last two looks.
    rests: bool,
    /// Times in a row that the map was still changing when it had been read: a mapping may be registered in part.
    unfinished: u32,
    stack: Noted,
    unseen: Unseen,
    /// The map was read just now, and nothing was in it that is not registered.
    has_all: bool,
    /// Set in a copy of a process that was paged: it must be again before its fork returns.
    pub recover: bool,
    /// The pool took nothing of what was compressed last.
    refused: bool,
}

struct Files {
    maps: OwnedFd,
    statm: OwnedFd,
    /// Of the first thread's; for who brakes.
    _stat: Option<OwnedFd>,
}

/// What one look at the process and its tree showed.
struct Look {
    /// Pages above (positive) or below the limit.
    over_pages: i64,
    /// Pages must leave, if only to make room for those that come.
    evicts: bool,
    /// So much has come that is not registered that the map should be read.
    has_grown: bool,
    idle: bool,
    /// Processes that may grow at the same time.
    growers: u64,
}

impl Evictor {
    /// An evictor with all its buffers.
    pub fn new(worker: Worker, cold: Option<Cold>) -> Box<Evictor> {
        Box::new(Evictor {
            worker,
            registrar: Registrar::new(),
            hand: Hand::new(),
            cold,
            clear: Clear::default(),
            files: None,
            looked_at_ns: 0,
            threads_noted_ns: 0,
            cpu_ns: 0,
            busy_at_ns: clock_ns(),
            waits: Waits::default(),
            rests: false,
            unfinished: 0,
            stack: Noted::default(),
            unseen: Unseen::default(),
            has_all: false,
            recover: false,
            refused: false,
        })
    }

    /// Forgets what a parent's evictor was in the middle of. Its descriptors were the parent's.
    pub fn reset(&mut self) {
        core::mem::forget(self.files.take());
        self.hand.reset();
        self.unseen.begin_copy();
        self.stack = Noted::default();
        if let Some(cold) = &mut self.cold {
            cold.reset();
        }
        (self.cpu_ns, self.busy_at_ns, self.waits) = (0, clock_ns(), Waits::default());
    }

    /// The thread.
    pub fn run(&mut self, pager: &'static Pager) -> ! {
        sys::ask_for_short_slices(200_000);
        self.clear = Clear::new();
        let goes_on = pager.relay.is_under_way();
        if goes_on {
            // Before others are started: the thread that started this one may have more than the first one had.
            sys::drop_capabilities();
        }
        if !self.recover && !goes_on {
            let seen = pager.bell.load(Acquire);
            lock::wait(&pager.bell, seen, Some(FIRST_NAP_NS));
        }
        pager.claim_slot();
        if self.recover {
            self.forget_wiped(pager);
        }
        let opened = if goes_on { self.go_on(pager) } else { self.open_all(pager) };
        sys::drop_capabilities();
        if core::mem::take(&mut self.recover) {
            let recovered = opened.is_some_and(|channel| self.recover(pager, &channel));
            if !recovered {
                restore_all(pager, &mut self.worker, self.registrar.buffer());
                // Nothing is registered that the parent had so: it is all to be found again before anything leaves.
                let mut state = pager.state.lock();
                state.regions.clear();
                state.generation += 1;
            }
            fork::recovered(pager);
        }
        loop {
            let seen = pager.bell.load(Acquire);
            let nap_ns = match opened {
                Some(channel) => self.tick(pager, &channel),
                None => {
                    fork::serve(pager);
                    if pager.fork_turn.wants_to_retire() {
                        retire::carry_out(pager, None, &mut self.worker);
                    }
                    self.look(pager);
                    self.end_with_program(pager);
                    NAP_MAX_NS
                }
            };
            pager.evictor_sleeps.store(true, Release);
            lock::wait(&pager.bell, seen, Some(nap_ns));
            pager.evictor_sleeps.store(false, Release);
            self.clear.settle(pager);
        }
    }

    fn open_all(&mut self, pager: &Pager) -> Option<Channel> {
        let opened = self.open(pager);
        if let Some(spill) = &pager.spill {
            spill.open(pager);
        }
        opened
    }

    /// After another evictor, with its descriptors: starts what else there was.
    fn go_on(&mut self, pager: &'static Pager) -> Option<Channel> {
        if pager.slot().is_some() {
            // This is no other process.
            pager.region.header.processes_total.fetch_sub(1, Relaxed);
        }
        // The old ones told of a thread that is no more.
        self.files = None;
        self.open_files(pager);
        let has_all = (!pager.armed.load(Acquire) || pager.start_handler().is_ok())
            && pager.spill.as_ref().is_none_or(|spill| spill.go_on(pager));
        if !has_all {
            process::die(pager, crate::shared::Trouble::NoThread);
        }
        pager.relay.end();
        *pager.channel.lock()
    }

    fn open(&mut self, pager: &Pager) -> Option<Channel> {
        if !self.open_files(pager) {
            return None;
        }
        match pager.open_channel() {
            Ok(channel) => Some(channel),
            Err((trouble, errno)) => {
                pager.region.note_trouble(trouble, errno.0);
                None
            }
        }
    }

    fn open_files(&mut self, pager: &Pager) -> bool {
        let (maps, statm) = (process::open(c"/proc/thread-self/maps"), process::open(c"/proc/thread-self/statm"));
        let (Some(maps), Some(statm)) = (maps, statm) else {
            pager.region.note_trouble(crate::shared::Trouble::NoProc, 0);
            return false;
        };
        let (maps, statm) = (process::out_of_the_way(maps), process::out_of_the_way(statm));
        let stat = process::open_first_stat().map(process::out_of_the_way);
        pager.brake.set_files(statm.as_raw_fd(), stat.as_ref().map(AsRawFd::as_raw_fd));
        self.files = Some(Files { maps, statm, _stat: stat });
        true
    }

    /// Looks, and evicts what is too much; returns how long to sleep.
    fn tick(&mut self, pager: &'static Pager, channel: &Channel) -> u64 {
        loop {
            fork::serve(pager);
            if pager.fork_turn.wants_to_retire() {
                retire::carry_out(pager, Some(channel), &mut self.worker);
            }
            let Some(look) = self.look(pager) else { return NAP_MAX_NS };
            self.end_with_program(pager);
            if let Some(spill) =
                pager.spill.as_ref().filter(|_| pager.armed.load(Acquire) && !pager.frozen.load(Acquire))
            {
                spill.relieve(pager);
                spill.look_at_holds(self.looked_at_ns);
            }
            let over = look.over_pages > 0;
            pager.brake.set_behind(over);
            pager.brake.set_idle(look.idle);
            let armed = pager.armed.load(Acquire);
            if over && !armed && !self.arm(pager, channel) {
                pager.brake.set_behind(false);
                return NAP_MAX_NS;
            }
            let has_more = look.evicts && (look.has_grown || pager.exhausted.load(Acquire));
            self.has_all = false;
            if armed && !self.may_evict(pager, channel) {
                pager.exhausted.store(true, Release);
                pager.tell_progress();
                pager.brake.set_behind(false);
                return NAP_IDLE_NS;
            }
            if armed && (has_more || self.is_unfinished() || pager.kept_unregistered.swap(false, AcqRel)) {
                self.find_regions(pager, channel);
            }
            if pager.armed.load(Acquire) {
                // What was noted while nothing was evicted leaves room for what is found now.
                let mut state = pager.state.lock();
                if !pager.frozen.load(Acquire) {
                    pager.take_fresh_blocks(channel, &mut state);
                }
            }
            self.note_threads(pager);
            self.note_stack(pager, channel, over);
            let can_more = pager.armed.load(Acquire) && self.evict(pager, channel) == Evicted::More;
            // What is known may have left, where there is more that is not.
            let is_to_find = over && pager.exhausted.load(Acquire) && !self.has_all;
            pager.brake.set_behind(over && can_more || is_to_find);
            if can_more || is_to_find && pager.brake.is_on() {
                continue;
            }
            let is_compact = self.compact(pager);
            if self.is_unfinished() {
                return NAP_MIN_NS;
            }
            let again_ns = if look.evicts { NAP_MAX_NS } else { self.recompress(pager) };
            let again_ns = again_ns.min(if is_compact { NAP_MAX_NS } else { NAP_IDLE_NS });
            let headroom_bytes = (-look.over_pages).max(0) as u64 * PAGE as u64;
            let until_full_ns = headroom_bytes * 1_000_000_000 / (GROWTH_BYTES_PER_S * look.growers);
            let until_full_ns = until_full_ns.saturating_sub(clock_ns() - self.looked_at_ns);
            let floor_ns = if look.idle { NAP_IDLE_NS } else { NAP_MIN_NS };
            return until_full_ns.clamp(floor_ns, NAP_MAX_NS).min(again_ns);
        }
    }

    /// Ends the process when the program has no thread left: its last one may have ended by itself alone, past libc.
    fn end_with_program(&self, pager: &Pager) {
        if self.rests
            && let Some(status) = process::ended_with(pager.own_threads())
        {
            sys::end_process(status);
        }
    }

    /// One step of the pool's compaction: what the program has taken back or dropped leaves spans half empty. Never while
    /// the process may be copied: an object on its way would be in two places, or in none. Whether there is no more to do.
    fn compact(&mut self, pager: &Pager) -> bool {
        let may = pager.armed.load(Acquire) && !pager.frozen.load(Acquire);
        !may || pager.store.compact(&mut self.worker, COMPACTED_AT_ONCE).finished
    }

    /// A piece of what makes groups of cold pages, under the same condition. Returns when to come again at the latest.
    fn recompress(&mut self, pager: &Pager) -> u64 {
        let may = pager.armed.load(Acquire) && !pager.frozen.load(Acquire);
        let cold = self.cold.as_mut().filter(|_| may);
        let again_ns = cold.and_then(|cold| cold.go_on(pager, &mut self.worker, self.looked_at_ns));
        again_ns.map_or(NAP_MAX_NS, |again_ns| again_ns.max(NAP_MIN_NS))
    }

    /// Measures the process, publishes it, and derives its limit from what the tree holds.
    fn look(&mut self, pager: &Pager) -> Option<Look> {
        let anonymous = process::anonymous_pages(self.files.as_ref()?.statm.as_fd())?;
        let cpu_ns = process::cpu_time_of_others_ns();
        let now_ns = clock_ns();
        self.rests = cpu_ns.saturating_sub(self.cpu_ns) * REST_SHARE < now_ns - self.looked_at_ns;
        if cpu_ns.saturating_sub(self.cpu_ns) * 8 > now_ns - self.looked_at_ns {
            self.busy_at_ns = now_ns;
        }
        (self.cpu_ns, self.looked_at_ns) = (cpu_ns, now_ns);
        let idle = now_ns - self.busy_at_ns > IDLE_AFTER_NS;
        let mut state = pager.state.lock();
        let ours = pager.ours_bytes(&state);
        let resident = anonymous.saturating_sub(ours / PAGE as u64);
        self.unseen.note(resident, state.estimate_pages(), state.grown_pages);
        state.resident_pages = resident;
        state.grown_pages = 0;
        let second = (now_ns / 1_000_000_000) as u32 & 0xff_ffff;
        if pager.slot().is_none() && second != state.now_s {
            claim_late(pager);
        }
        state.now_s = second;
        publish(pager, resident, ours, state.copies.kept());
        let totals = pager.region.totals();
        if let Some(spill) = &pager.spill {
            spill.set_limit(&pager.store, &pager.pool, pager.region, &totals, resident);
        }
        // What nobody counts of this process it counts itself.
        let uncounted_bytes = if pager.slot().is_none() { resident * PAGE as u64 + ours } else { 0 };
        let headroom_bytes = headroom_bytes(pager.region, &totals) - uncounted_bytes as i64;
        let growers = totals.processes.clamp(1, self.clear.all().max(1));
        let headroom = share_of(headroom_bytes / PAGE as i64, resident, &totals, growers);
        let counted = pager.slot().map(|slot| &slot.counters);
        let count =
            |counter: fn(&Counters) -> &AtomicU64| counted.map_or(0, |counters| counter(counters).load(Relaxed));
        let may_hold = self.waits.may_hold(Seen {
            now_ns,
            cpu_ns,
            faults: count(|counters| &counters.faults),
            resident_pages: resident,
            is_full: headroom_bytes < (totals.resident_bytes / FULL_SHARE) as i64,
            evicted_by_others: totals.evicted_pages.wrapping_sub(count(|counters| &counters.evicted_pages)),
        });
        let least = least_pages(pager.region.header.ram_limit_bytes.load(Relaxed), &totals, resident);
        let limit = least.max((resident as i64 + headroom).max(0) as u64);
        state.limit_pages = limit.min(may_hold.unwrap_or(u64::MAX)).max(state.floor_pages(now_ns));
        let evicts = resident + state.reserve_pages() / 2 > state.limit_pages;
        let over_pages = resident as i64 - state.limit_pages as i64;
        let has_grown = self.unseen.is_much(state.limit_pages, over_pages > 0, now_ns);
        Some(Look { over_pages, evicts, has_grown, idle, growers })
    }

    /// Starts the handler and registers what there is.
    fn arm(&mut self, pager: &'static Pager, channel: &Channel) -> bool {
        let armed = self.start_handler(pager, channel);
        if armed {
            self.find_regions(pager, channel);
        }
        armed
    }

    fn start_handler(&mut self, pager: &'static Pager, channel: &Channel) -> bool {
        let Some(_nobody_forks) = pager.fork_turn.try_take() else { return false };
        let mut state = pager.state.lock();
        if pager.frozen.load(Acquire) {
            return false;
        }
        let frames = pager.frames.clone();
        let staging = frames.start..frames.end + BEHIND_FRAMES_BYTES;
        let registered = match channel.way {
            Way::Move { .. } => staging,
            Way::Remap => {
                // In a copy of the process: frames that were garbage in its parent.
                state.staging.frames().for_each(|frames| _ = drop_contents(frames.start, GROUP));
                self.hand.use_old_scan();
                self.registrar.use_old_maps();
                frames.end..staging.end
            }
        };
        let is_registered = register_patiently(channel, registered);
        let code = pager.code.begin_in_copy(channel);
        state.staging.reset(frames.start, frames.len() / (GROUP * PAGE), code);
        if !is_registered || !channel.make_gate() || pager.start_handler().is_err() {
            pager.region.note_trouble(crate::shared::Trouble::NoThread, 0);
            return false;
        }
        pager.armed.store(true, Release);
        true
    }

    /// In a copy of the process: what it finds empty (MADV_WIPEONFORK) must not come back. Before anything is opened that
    /// stays open: a limit may allow few descriptors.
    pub fn forget_wiped(&mut self, pager: &Pager) {
        let Some(smaps) = process::open(c"/proc/thread-self/smaps") else { return };
        let mut state = pager.state.lock();
        maps::for_each_wiped(smaps.as_fd(), self.registrar.buffer(), |mapping| {
            events::forget_contents(pager, &mut state, mapping.start..mapping.end);
        });
    }

    /// In a copy of the process: registers again what was registered in the parent, with all that is stored of it.
    ///
    /// The program's only thread waits in fork meanwhile, so the map does not change.
    fn recover(&mut self, pager: &'static Pager, channel: &Channel) -> bool {
        self.look(pager);
        if !self.start_handler(pager, channel) {
            return false;
        }
        let Some(files) = &self.files else { return false };
        let mut state = pager.state.lock();
        // What is stored and no region's, since they were too many, would read as zeroes.
        if state.regions.has_lost() {
            return false;
        }
        let Some(mapped) = self.registrar.anonymous_of(files.maps.as_fd(), &state.regions) else { return false };
        let mut at = 0;
        while let Some(region) = state.regions.at_or_after(at) {
            at = region.end;
            // What the copy did not get (MADV_DONTFORK) is nobody's now.
            let mut from = region.start;
            while from < region.end {
                let next = mapped.at_or_after(from).filter(|mapped| mapped.start < region.end);
                let (start, end) = next.map_or((region.end, region.end), |mapped| (mapped.start, mapped.end));
                let (start, end) = (start.max(from), end.min(region.end));
                if from < start {
                    events::forget_contents(pager, &mut state, from..start);
                    state.regions.remove(from..start);
                }
                if start < end && !register_patiently(channel, start..end) {
                    return false;
                }
                from = end;
            }
        }
        true
    }

    /// What frames are like that may hold what is mapped at an address, if that can be told.
    pub(crate) fn kind_at(&self, address: usize) -> Option<Kind> {
        let is_code = maps::is_code(self.files.as_ref()?.maps.as_fd(), address)?;
        Some(if is_code { Kind::Code } else { Kind::Data })
    }

    /// Whether pages may leave at all: not if a device may write to them and the kernel does not say so, nor by mremap if all are locked.
    fn may_evict(&mut self, pager: &Pager, channel: &Channel) -> bool {
        let by_remap = matches!(channel.way, Way::Remap);
        if let Some(files) = self.files.as_ref().filter(|_| by_remap && !pager.has_devices()) {
            maps::for_each(files.maps.as_fd(), self.registrar.buffer(), |mapping| {
                if mapping.device_queue {
                    pager.note_devices();
                }
            });
        }
        if pager.has_devices() {
            pager.region.note_trouble(crate::shared::Trouble::Devices, 0);
        }
        let is_locked = by_remap && pager.remapping.locked.load(Acquire);
        !pager.has_devices() && !is_locked
    }

    /// Learns of threads that were made behind our back, now and then: their control blocks must not leave.
    fn note_threads(&mut self, pager: &Pager) {
        if pager.armed.load(Acquire) && self.looked_at_ns - self.threads_noted_ns >= BETWEEN_THREADS_NS {
            self.threads_noted_ns = self.looked_at_ns;
            pager.note_threads();
        }
    }

    /// Learns where the stack is, for who brakes.
    fn note_stack(&mut self, pager: &Pager, channel: &Channel, over: bool) {
        if let Some(files) = self.files.as_ref().filter(|_| over && pager.armed.load(Acquire)) {
            self.stack.note_stack(pager, channel, files.maps.as_fd(), self.registrar.buffer());
        }
    }

    /// Whether the map should be read again soon; not for ever, where something cannot be registered at all.
    fn is_unfinished(&self) -> bool {
        (1..=UNFINISHED_MAX).contains(&self.unfinished)
    }

    /// Registers what has come since the last time. Where that did not come to an end the next look goes on.
    fn find_regions(&mut self, pager: &Pager, channel: &Channel) {
        let Some(files) = &self.files else { return };
        let begun_ns = clock_ns();
        match self.registrar.register(pager, channel, files.maps.as_fd()) {
            Registered::All => {
                (self.unfinished, self.has_all) = (0, true);
                self.unseen.was_read(begun_ns, clock_ns());
            }
            Registered::Part => self.unfinished += 1,
            Registered::Frozen => {}
        }
    }

    /// Evicts until the process is within its limit and the handler has frames, nothing more can be evicted, or it is
    /// time for another look: the pool grows while pages leave, and so the limit moves.
    fn evict(&mut self, pager: &'static Pager, channel: &Channel) -> Evicted {
        let (mut fruitless, mut made_own, mut evicting) = (0, 0, false);
        for _ in 0..STEPS_BETWEEN_LOOKS {
            fork::serve(pager);
            self.clear.keep_clear(pager);
            pager.turn.let_go_first();
            let mut state = pager.state.lock();
            if pager.frozen.load(Acquire) {
                return Evicted::Enough;
            }
            pager.take_fresh_blocks(channel, &mut state);
            if state.staging.has_code() && pager.code.in_use().is_none() {
                state.staging.lose_code();
            }
            // Begins when half of the reserve is used, ends when it is whole again.
            let kept = if evicting { state.reserve_pages() } else { state.reserve_pages() / 2 };
            evicting = state.estimate_pages() + kept > state.limit_pages;
            if !evicting {
                return Evicted::Enough;
            }
            if fruitless > 2 {
                pager.exhausted.store(true, Release);
                // Not before the map was read again: there may be memory that is not registered yet.
                if self.has_all {
                    state.raise_floor(self.looked_at_ns);
                }
                pager.tell_progress();
                return Evicted::Enough;
            }
            if state.staging.free_frames >= Staging::garbage_frames_max(state.limit_pages) {
                self.bury(pager, channel, state);
                continue;
            }
            let kind = self.hand.kind(&state.staging);
            let has_room = state.staging.has_empty(kind);
            if !has_room || state.staging.staged.len() > state.staging.held_groups(state.limit_pages) {
                // Of the frames for code there are few: they wait for no others.
                let is_code = !has_room && kind == Kind::Code;
                let is_garbage = is_code && state.staging.garbage_groups(kind) >= BURIED_AT_ONCE / GROUP;
                if is_garbage {
                    if self.bury(pager, channel, state) {
                        continue;
                    }
                    state = pager.state.lock();
                }
                if !self.compress_oldest(pager, state, is_code.then_some(kind)) {
                    self.bury(pager, channel, pager.state.lock());
                }
                if self.must_wait_for_spill(pager) {
                    return Evicted::More;
                }
                continue;
            }
            match self.fill_groups(pager, channel, &mut state) {
                Filled::Some => {
                    fruitless = 0;
                    self.make_own(pager, state);
                }
                Filled::NoRoom => {}
                Filled::EventPending => {
                    drop(state);
                    lock::pause();
                }
                Filled::Nothing => {
                    // A pinned page stays shared however often it is tried.
                    if self.make_own(pager, state) && made_own < MAKE_OWN_TRIES {
                        made_own += 1;
                        continue;
                    }
                    // What is staged is all there is to gain.
                    let gained = self.compress_oldest(pager, pager.state.lock(), None);
                    if self.must_wait_for_spill(pager) {
                        return Evicted::More;
                    }
                    fruitless = if gained { 0 } else { fruitless + 1 };
                }
            }
        }
        Evicted::More
    }

    /// Compresses the group that has been staged longest, of a kind or of all. False when none is.
    fn compress_oldest(&mut self, pager: &Pager, mut state: Guard<'_, Box<State>>, kind: Option<Kind>) -> bool {
        let staged = &mut state.staging.staged;
        let Some(group) = (match kind {
            Some(kind) => staged.pop_of(kind),
            None => staged.pop(),
        }) else {
            return false;
        };
        let mut batch = compress::begin(&mut state, group, GROUP);
        drop(state);
        compress::compress(pager, &mut self.worker, &mut batch);
        compress::settle(pager, &mut pager.state.lock(), &batch);
        self.refused = batch.is_refused();
        pager.tell_progress();
        true
    }

    /// The pool is full, and pages are leaving it for the file: waits a little for room. `false`: there is none to wait for.
    fn must_wait_for_spill(&mut self, pager: &'static Pager) -> bool {
        let refused = core::mem::take(&mut self.refused);
        let Some(spill) = pager.spill.as_ref().filter(|_| refused && !pager.frozen.load(Acquire)) else { return false };
        let seen = pager.progress.load(Acquire);
        spill.relieve(pager);
        if spill.is_relieving() {
            pager.exhausted.store(false, Release);
            lock::wait(&pager.progress, seen, Some(WAIT_FOR_SPILL_NS));
        }
        spill.is_relieving()
    }

    /// Makes the pages that could not move this process's own, where they can be (a pinned one stays as it is), by a write that changes nothing; the next
    /// round moves them. Without the lock, for the kernel may have to ask the handler for a page that has just gone.
    fn make_own(&mut self, pager: &Pager, state: Guard<'_, Box<State>>) -> bool {
        drop(state);
        let loose = self.hand.take_loose();
        if loose.is_empty() {
            return false;
        }
        let written =
            loose.iter().rev().fold(0u64, |bits, &address| bits << 1 | u64::from(sys::write_nothing(address)));
        let mut state = pager.state.lock();
        // What is not noted is written to once more.
        for (nth, &address) in loose.iter().enumerate().filter(|_| !pager.frozen.load(Acquire)) {
            hand::note_written(&mut state, address, written >> nth & 1 == 1);
        }
        true
    }
}

/// How a round of eviction ended.
#[derive(PartialEq, Eq)]
enum Evicted {
    Enough,
    More,
}

/// Registers a range that the parent's descriptor may still hold: the parent lets go of it as soon as it hears of the
/// fork.
fn register_patiently(channel: &Channel, range: Range<usize>) -> bool {
    for _ in 0..40_000 {
        match channel.uffd.register(range.start, range.end - range.start) {
            Ok(()) => return true,
            Err(Errno::EBUSY) => lock::pause(),
            Err(_) => return false,
        }
    }
    false
}

/// Claims a slot that has become free for a process that found none; where there still is none, that is told.
fn claim_late(pager: &Pager) {
    pager.claim_slot();
    if pager.slot().is_none() {
        pager.region.note_trouble(Trouble::Slots, 0);
    }
}

/// The process's slot; another one if that was taken away, though this thread lives ([`ProcessSlot::is_of`]).
fn own_slot(pager: &Pager) -> Option<&'static ProcessSlot> {
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    if pager.slot().is_some_and(|slot| !slot.is_of(thread)) {
        pager.slot.store(0, Release);
        // This is no other process, now or when it is claimed late.
        pager.region.header.processes_total.fetch_sub(1, Relaxed);
        pager.claim_slot();
    }
    pager.slot()
}

fn publish(pager: &Pager, resident_pages: u64, ours_bytes: u64, copies: u64) {
    let Some(slot) = own_slot(pager) else { return };
    let stats = pager.pool.stats();
    let gauges = &slot.gauges;
    gauges.resident_bytes.store(resident_pages * PAGE as u64, Relaxed);
    gauges.ours_bytes.store(ours_bytes, Relaxed);
    // A page that is resident and has a copy is not stored: only what the copy takes counts.
    gauges.pages_stored.store(stats.pages_stored().saturating_sub(copies), Relaxed);
    gauges.same_pages.store(stats.same_pages, Relaxed);
    gauges.grouped_pages.store(stats.grouped_pages, Relaxed);
    let not_in_pool = (copies + stats.bd_count) * PAGE as u64;
    gauges.orig_data_bytes.store(stats.orig_data_size.saturating_sub(not_in_pool), Relaxed);
    gauges.spilled_pages.store(stats.bd_count, Relaxed);
    gauges.compr_data_bytes.store(stats.compr_data_size, Relaxed);
    gauges.mem_used_total_bytes.store(pager.store.mem_used_total_bytes(), Relaxed);
    if let Some(spill) = &pager.spill {
        spill.publish(pager);
    }
}

/// Bytes the tree may still grow by; negative when it is over its limits. A small part is kept back, so that the limit
/// is met from below.
fn headroom_bytes(region: &Region, totals: &Totals) -> i64 {
    let ram = region.header.ram_limit_bytes.load(Relaxed);
    let resident = region.header.resident_limit_bytes.load(Relaxed);
    let below =
        |limit: u64, used: u64| if limit == 0 { i64::MAX / 2 } else { (limit - limit / 64) as i64 - used as i64 };
    below(ram, totals.resident_bytes + totals.ours_bytes).min(below(resident, totals.resident_bytes))
}

/// What a process that works may hold whatever the total is, pages: its part of a quarter of the limit, by number or, if that is more, by what each holds: beside
/// shells that wait, the one that works keeps nearly all of it. What does not compress makes the pool outgrow the limit alone; to have everything leave then
/// would make the pool larger and the program stand still.
fn least_pages(ram_limit_bytes: u64, totals: &Totals, resident_pages: u64) -> u64 {
    let quarter = ram_limit_bytes / 4 / PAGE as u64;
    let all = (totals.resident_bytes / PAGE as u64).max(1);
    let by_size = u128::from(quarter) * u128::from(resident_pages.min(all)) / u128::from(all);
    (quarter / totals.processes.max(1)).max(by_size as u64)
}

/// This process's part of the tree's headroom: while there is any, as much as each has if so many grow at the same time, before any of them looks again; and its proportion
/// of what is too much.
fn share_of(headroom_pages: i64, resident_pages: u64, totals: &Totals, growers: u64) -> i64 {
    if headroom_pages >= 0 {
        return headroom_pages / growers as i64;
    }
    let all = (totals.resident_bytes / PAGE as u64).max(1);
    let share = i128::from(headroom_pages) * i128::from(resident_pages) / i128::from(all);
    share as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_works_beside_others_that_wait_keeps_nearly_a_quarter_and_all_together_no_more() {
        let ram = 64u64 << 20;
        let quarter = ram / 4 / PAGE as u64;
        let all_hold = |pages: &[u64]| {
            let resident_bytes = pages.iter().sum::<u64>() * PAGE as u64;
            let totals = Totals { processes: pages.len() as u64, resident_bytes, ..Totals::default() };
            move |own: u64| least_pages(ram, &totals, own)
        };
        let beside_shells = all_hold(&[4000, 50, 50, 50, 50]);
        assert!(beside_shells(4000) > quarter * 9 / 10 && beside_shells(50) == quarter / 5);
        assert_eq!(all_hold(&[4000, 4000])(4000), quarter / 2);
        assert_eq!(all_hold(&[0])(0), quarter);
        // One that nobody counts.
        assert_eq!(all_hold(&[10])(1 << 40), quarter);
    }

    #[test]
    fn what_is_free_is_for_all_who_grow_and_what_is_too_much_is_taken_of_each_by_size() {
        let totals = Totals { processes: 3, resident_bytes: 400 * PAGE as u64, ..Totals::default() };
        assert_eq!(share_of(100, 300, &totals, 1), 100);
        assert_eq!(share_of(100, 300, &totals, 2), 50);
        assert_eq!(share_of(-100, 300, &totals, 2), -75);
    }
}
