//! The handler: answers faults and applies events.
//!
//! The loop: wait for messages; take the lock; read all there are, applying the events among them first; answer the
//! faults; release the lock. An answer that meets EAGAIN (an event is pending) reads the events and decides the fault
//! *afresh*: the page may have been dropped meanwhile, and what was decompressed before would be a wrong byte.
//!
//! How a fault is answered depends on the page's word alone: the table in [`crate::table`]. A page that comes from the
//! pool is decompressed into a buffer and copied into a new frame: the process has grown by a page, and the evictor makes
//! up for it.

mod first_touch;
mod grown;

use crate::around;
use crate::compress;
use crate::copies;
use crate::cpus::Follower;
use crate::distance;
use crate::fork;
use crate::lock::{self, Guard};
use crate::lost;
use crate::memory::{PAGE, boxed_zeroed};
use crate::pager::{Channel, NOTHING, Pager, State, Way, clock_ns};
use crate::remap::Early;
use crate::shared::Trouble;
use crate::small::SmallQueue;
use crate::spill::{Fetched, Spill, read_stored};
use crate::streams::{Run, Streams, Window, stored_run};
use crate::sys::{self, Errno};
use crate::table::{HEAT_MAX, Phase, Word};
use crate::uffd::{self, Message};
use alloc::boxed::Box;
use compcache_store::{Page, PageIndex, Read, Worker};
use core::sync::atomic::Ordering::*;
use grown::Grown;
use linux_raw_sys::general::uffd_msg;

/// Pages of the buffer that fills frames when staging has none.
const BATCH: usize = 16;
const MESSAGES: usize = 16;
const PENDING: usize = 512;
/// Pages looked at for where a stream goes on behind those that are there: a microsecond, and a stream that begins anew costs several faults.
const LOOKED_AHEAD: i64 = 512;
/// How long a fault may wait for pages to leave for the spill file before the process grows.
const WAIT_FOR_SPILL_NS: u64 = 500_000_000;
/// Pages that are on their way from the spill file, whose streams are remembered.
const AWAITED: usize = 32;
/// How long the handler waits for the evictor to free a frame before it lets the process grow.
const WAIT_FOR_FRAME_NS: u64 = 2_000_000;

/// A fault waiting for its answer.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Fault {
    page: u64,
    thread: u32,
}

/// What the handler's thread owns.
pub struct Handler {
    worker: Worker,
    pages: Box<[Page; BATCH]>,
    zeroes: Box<[Page; BATCH]>,
    messages: Box<[uffd_msg; MESSAGES]>,
    pending: Box<[Fault; PENDING]>,
    /// When each of them was read.
    pending_since_ns: Box<[u64; PENDING]>,
    pending_len: usize,
    /// When the thread woke up, as long as nothing was read since.
    woken_ns: Option<u64>,
    /// When what is being read was there, as far as we know.
    read_ns: u64,
    /// Messages read without the lock: [`crate::remap`].
    early: Box<Early>,
    streams: Streams,
    /// Of faults in staging. Apart: where pages are touched here and there, those would push out the streams of all others.
    streams_back: Streams,
    /// A fault that must be answered anew, and what was decided for it.
    unanswered: Option<(u64, Window)>,
    /// As above, for faults that come again when their pages have been read from the spill file.
    awaited: [Option<(u64, Window)>; AWAITED],
    awaited_next: usize,
    follower: Follower,
    grown: Grown,
    /// The bell was rung: [`crate::relay`].
    is_to_end: bool,
}

/// How an attempt to answer went.
enum Answer {
    Done,
    /// An event is pending, or the page has been read from the spill file: read what events there are, then decide afresh.
    Again,
}

impl Handler {
    /// A handler with all its buffers.
    pub fn new(worker: Worker) -> Box<Handler> {
        // SAFETY: bytes, messages of plain numbers, and pairs of numbers are valid when zero.
        let (pages, zeroes, messages, pending, pending_since_ns) =
            unsafe { (boxed_zeroed(), boxed_zeroed(), boxed_zeroed(), boxed_zeroed(), boxed_zeroed()) };
        Box::new(Handler {
            worker,
            pages,
            zeroes,
            messages,
            pending,
            pending_since_ns,
            pending_len: 0,
            woken_ns: None,
            read_ns: 0,
            // SAFETY: messages of plain numbers are valid when zero.
            early: unsafe { boxed_zeroed() },
            streams: Streams::default(),
            streams_back: Streams::default(),
            unanswered: None,
            awaited: [None; AWAITED],
            awaited_next: 0,
            follower: Follower::default(),
            grown: Grown::default(),
            is_to_end: false,
        })
    }

    /// Forgets what a parent's handler was in the middle of.
    pub fn reset(&mut self) {
        self.worker.forget_group();
        self.pending_len = 0;
        self.early.clear();
        self.unanswered = None;
        self.awaited = [None; AWAITED];
        self.grown.clear();
        self.follower.reset();
    }

    /// Has the memory that the kernel copies from be present. Zeroes that are only read are the kernel's own page of them: they take none.
    fn touch_buffers(&mut self) {
        for page in self.pages.iter_mut() {
            // SAFETY: a write to memory of ours.
            unsafe { core::ptr::write_volatile(page.as_mut_ptr(), 0) };
        }
        for page in self.zeroes.iter() {
            // SAFETY: a read of memory of ours.
            unsafe { core::ptr::read_volatile(page.as_ptr()) };
        }
    }

    /// The thread.
    pub fn run(&mut self, pager: &Pager) -> ! {
        sys::ask_for_short_slices(100_000);
        self.touch_buffers();
        let channel = pager.channel.lock().expect("the evictor opens the channel before it starts the handler");
        self.follower.unbind();
        self.is_to_end = false;
        while !self.is_to_end {
            channel.uffd.wait(-1);
            self.woken_ns = Some(clock_ns());
            self.follower.before_answer(pager);
            let mut state = self.lock(pager, &channel);
            state = self.catch_up(pager, &channel, state, false);
            let mut answered = 0;
            while self.pending_len > 0 || !self.early.is_empty() {
                if !self.early.is_empty() {
                    state = self.catch_up(pager, &channel, state, false);
                    continue;
                }
                self.pending_len -= 1;
                let (fault, since_ns) = (self.pending[self.pending_len], self.pending_since_ns[self.pending_len]);
                state = self.answer(pager, &channel, state, fault);
                if let Some(slot) = pager.slot() {
                    slot.counters.record_fault_ns(clock_ns().saturating_sub(since_ns));
                }
                answered += 1;
                self.follower.note_fault(pager, fault.thread);
            }
            let low = state.estimate_pages() + state.reserve_pages() / 2 > state.limit_pages;
            drop(state);
            if answered > 0
                && let Some(slot) = pager.slot()
            {
                slot.counters.faults.fetch_add(answered, Relaxed);
            }
            if low {
                pager.ring();
            }
        }
        sys::end_thread();
    }

    /// Takes the lock, before the evictor does. What was half done when it was let go can be ended now; but before
    /// anything new is decided, messages that were read meanwhile (`early`) must be taken in.
    fn lock<'a>(&mut self, pager: &'a Pager, channel: &Channel) -> Guard<'a, Box<State>> {
        pager.turn.want();
        let state = match channel.way {
            Way::Move { .. } => pager.state.lock(),
            Way::Remap => self.lock_early(pager, channel),
        };
        pager.turn.had();
        state
    }

    /// Reads every message there is, and keeps them.
    ///
    /// The caller holds the lock from before the first message is read until its own decisions are carried out, or until
    /// the events are kept where everybody sees that they are not applied yet: so nobody acts on what was true before an
    /// event whose originator has already been let go on.
    fn pump(&mut self, pager: &Pager, channel: &Channel, state: &mut State) -> usize {
        let mut total = 0;
        self.read_ns = self.woken_ns.take().unwrap_or_else(clock_ns);
        while let Some(message) = self.early.pop(pager) {
            if uffd::decode(&message).is_some_and(|event| crate::remap::not_meant(channel, state, &event)) {
                crate::process::die(pager, Trouble::NotMeant);
            }
            self.take_in(pager, channel, state, &message);
            total += 1;
        }
        (state.taken_span, state.own_move) = (0..0, (0, 0));
        loop {
            let read = channel.uffd.read(&mut self.messages[..]);
            total += read;
            for place in 0..read {
                let message = self.messages[place];
                self.take_in(pager, channel, state, &message);
            }
            if read < MESSAGES {
                return total;
            }
        }
    }

    fn take_in(&mut self, pager: &Pager, channel: &Channel, state: &mut State, message: &uffd_msg) {
        match uffd::decode(message) {
            Some(Message::Fault { address, thread }) => {
                self.keep(channel, Fault { page: (address / PAGE) as u64, thread });
            }
            Some(Message::Protected { address, thread }) => {
                crate::brake::wants_to_write(pager, channel, address, thread);
            }
            Some(Message::Remap { from, to, .. }) if state.own_move == (from, to) => {}
            Some(Message::Remove { start, .. }) if start == channel.bell() => self.is_to_end = true,
            Some(event) => {
                self.apply(pager, channel, state, event);
                self.grown.told(channel, &event);
            }
            None => {}
        }
    }

    fn keep(&mut self, channel: &Channel, fault: Fault) {
        if self.pending_len == PENDING {
            // Whoever waits there tries again, and comes back as a new message.
            channel.uffd.wake(fault.page as usize * PAGE, PAGE);
            return;
        }
        (self.pending[self.pending_len], self.pending_since_ns[self.pending_len]) = (fault, self.read_ns);
        self.pending_len += 1;
    }

    fn apply(&mut self, pager: &Pager, channel: &Channel, state: &mut State, event: Message) {
        if let Message::Fork { child } = event {
            // The copy has what was moved before where it is now.
            crate::events::settle_as_told(pager, channel, state);
            fork::on_event(pager, state, &mut self.worker, &mut self.pages[0], uffd::Uffd::from_event(child));
            return;
        }
        crate::events::take(pager, channel, state, event);
    }

    /// Answers one fault, however often it takes. The lock may be released and taken again meanwhile.
    fn answer<'a>(
        &mut self,
        pager: &'a Pager,
        channel: &Channel,
        mut state: Guard<'a, Box<State>>,
        fault: Fault,
    ) -> Guard<'a, Box<State>> {
        self.unanswered = None;
        self.grown.answering = Some(fault);
        let mut since_ns = None;
        while state.estimate_pages() > state.limit_pages + state.limit_pages / 32 {
            state = self.help(pager, channel, state);
            // With a file that takes what is too much, nobody need grow beyond the limit: it is a matter of time.
            let relieved = pager.spill.as_ref().is_some_and(Spill::is_relieving) && !pager.exhausted.load(Acquire);
            let too_long = clock_ns() - *since_ns.get_or_insert_with(clock_ns) > WAIT_FOR_SPILL_NS;
            if !relieved || too_long || pager.frozen.load(Acquire) {
                break;
            }
            state = self.catch_up(pager, channel, state, false);
        }
        if !self.early.is_empty() {
            state = self.catch_up(pager, channel, state, false);
        }
        loop {
            let answer;
            (state, answer) = self.attempt(pager, channel, state, fault.page);
            match answer {
                Answer::Done => break,
                Answer::Again => state = self.catch_up(pager, channel, state, true),
            }
        }
        self.grown.answering = None;
        state
    }

    /// Reads and applies every event there is, also those that a thread is about to tell: `expected` says that there must
    /// be some, for the kernel has refused something.
    fn catch_up<'a>(
        &mut self,
        pager: &'a Pager,
        channel: &Channel,
        mut state: Guard<'a, Box<State>>,
        expected: bool,
    ) -> Guard<'a, Box<State>> {
        let mut since_ns = None;
        loop {
            let read = self.pump(pager, channel, &mut state);
            since_ns = since_ns.filter(|_| read == 0);
            if (state.pending.is_empty() && !expected)
                || channel.is_quiet() && crate::events::settle(pager, channel, &mut state)
            {
                return state;
            }
            if read == 0 {
                // All have been read, but a thread that caused one has not yet gone on, or has not yet told.
                self.leave_what_grows(channel, &mut since_ns);
                drop(state);
                rustix::thread::sched_yield();
                state = self.lock(pager, channel);
            }
        }
    }

    /// The process is above its limit: compresses some of what is staged, as the evictor does on the other processor. With
    /// nothing staged, or far above, whoever faults waits for the evictor, which alone gives memory back, unless that has
    /// found nothing to evict.
    fn help<'a>(
        &mut self,
        pager: &'a Pager,
        channel: &Channel,
        mut state: Guard<'a, Box<State>>,
    ) -> Guard<'a, Box<State>> {
        if pager.frozen.load(Acquire) {
            return state;
        }
        let far_above = state.estimate_pages() > state.limit_pages + state.limit_pages / 16;
        if !far_above && let Some(group) = state.staging.staged.pop() {
            let mut batch = compress::begin(&mut state, group, BATCH);
            drop(state);
            compress::compress(pager, &mut self.worker, &mut batch);
            state = self.lock(pager, channel);
            compress::settle(pager, &mut state, &batch);
            return state;
        }
        if pager.exhausted.load(Acquire) {
            return state;
        }
        let seen = pager.progress.load(Acquire);
        drop(state);
        pager.ring();
        match channel.way {
            Way::Move { .. } => lock::wait(&pager.progress, seen, Some(WAIT_FOR_FRAME_NS)),
            Way::Remap => self.wait_and_read(pager, channel, seen),
        }
        self.lock(pager, channel)
    }

    /// Waits for the evictor, which may have to wait for this thread.
    fn wait_and_read(&mut self, pager: &Pager, channel: &Channel, seen: u32) {
        let until_ns = clock_ns() + WAIT_FOR_FRAME_NS;
        while pager.progress.load(Acquire) == seen && self.early.is_empty() && clock_ns() < until_ns {
            lock::pause();
            drop(self.lock(pager, channel));
        }
    }

    fn attempt<'a>(
        &mut self,
        pager: &'a Pager,
        channel: &Channel,
        mut state: Guard<'a, Box<State>>,
        page: u64,
    ) -> (Guard<'a, Box<State>>, Answer) {
        if pager.spill.is_some() && pager.frozen.load(Acquire) {
            // The file may take long, and what is told meanwhile a copy would not know: at least what was told before it does.
            state = self.catch_up(pager, channel, state, false);
        }
        if pager.frozen.load(Acquire) {
            let answer = self.attempt_frozen(pager, channel, &mut state, page);
            return (state, answer);
        }
        let word = state.table.get(page);
        let answer = match word.phase() {
            Phase::Staged | Phase::Compressing => self.second_chance(pager, channel, &mut state, page, word),
            Phase::Stored => return self.load(pager, channel, state, page),
            Phase::Resident | Phase::Dropped => self.first_touch(pager, channel, &mut state, page),
        };
        (state, answer)
    }

    /// The page was still on its way out: it is hot, and goes back. By copy: moving its frame back would interrupt the
    /// processor the evictor runs on, which takes ten times as long (docs/decisions/0006). The frame is garbage then.
    fn second_chance(&mut self, pager: &Pager, channel: &Channel, state: &mut State, page: u64, word: Word) -> Answer {
        let window = self.streams_back.fault(page);
        if let Some(came) = around::bring_back(pager, channel, state, page, word, &window) {
            self.streams_back.brought(came);
            return Answer::Done;
        }
        let source = state.staging.address(word.payload()) as *const u8;
        // SAFETY: a frame of a staged or compressing page is present until its group is released, under this lock.
        let (_, error) = unsafe { channel.uffd.copy(page as usize * PAGE, source, PAGE) };
        match error {
            None => state.grown_pages += 1,
            Some(Errno::EAGAIN) => return Answer::Again,
            Some(Errno::EEXIST) => channel.uffd.wake(page as usize * PAGE, PAGE),
            Some(_) => {
                // No such range any more: nobody can wait there for long.
                channel.uffd.wake(page as usize * PAGE, PAGE);
                return Answer::Done;
            }
        }
        state.table.update(page, Word::new(Phase::Resident).with_heat(HEAT_MAX));
        if let Some(slot) = pager.slot() {
            slot.counters.refaults_staged.fetch_add(1, Relaxed);
        }
        Answer::Done
    }

    /// What the stream of a fault will ask for next, and whether the fault is new: one that could not be answered at once
    /// comes again.
    fn window_of(&mut self, page: u64) -> (Window, bool) {
        match self.unanswered.take() {
            Some((unanswered, window)) if unanswered == page => (window, false),
            // Nothing was ever waited for: there is no spill file, or nothing in it.
            _ if self.awaited_next == 0 => (self.streams.fault(page), true),
            _ => match self.awaited.iter_mut().find(|awaited| awaited.is_some_and(|(awaited, _)| awaited == page)) {
                Some(awaited) => (awaited.take().expect("it is there").1, false),
                None => (self.streams.fault(page), true),
            },
        }
    }

    /// The page is in the pool; what its stream will ask for next comes with it.
    fn load<'a>(
        &mut self,
        pager: &'a Pager,
        channel: &Channel,
        mut state: Guard<'a, Box<State>>,
        page: u64,
    ) -> (Guard<'a, Box<State>>, Answer) {
        // What was read from the spill file is gone when an attempt with it fails: then the page is read here and now, lest the
        // next one fail as well.
        let nobody_reads = pager.spill.as_ref().is_some_and(|spill| !spill.has_fetchers());
        let mut at_once = nobody_reads || self.unanswered.is_some_and(|(unanswered, _)| unanswered == page);
        let (window, is_new) = self.window_of(page);
        if let Some(slot) = pager.slot().filter(|_| is_new) {
            slot.counters.faults_stored.fetch_add(1, Relaxed);
            slot.counters.readahead_hits.fetch_add(u64::from(window.hits), Relaxed);
        }
        if let Some(spill) = pager.spill.as_ref().filter(|_| is_new) {
            let out = state.table.left_after(state.table.get(page));
            spill.note_fault(pager.region, state.estimate_pages() + out);
        }
        let (mut at, mut left, mut asked, mut brought) = (page, window.pages as usize, true, 0);
        while left > 0 && (asked || self.early.is_empty()) {
            // What nobody asked for must not push out what somebody uses.
            let room = (state.limit_pages + state.limit_pages / 32).saturating_sub(state.estimate_pages()) as usize;
            let run = stored_run(&state, page, at, &window, left);
            let most = run.pages.min(BATCH).min(if asked { room.max(1) } else { room });
            let pages = here(pager, &run, most).max(usize::from(asked && at_once));
            if pages < most && !at_once {
                let from = (at as i64 + window.step * pages as i64) as u64;
                let ordered = self.order(pager, &state, page, from, &window);
                if pages == 0 && asked {
                    return self.await_order(pager, channel, state, page, window, ordered > 0);
                }
                ring_for(pager, ordered);
            }
            if pages == 0 {
                break;
            }
            let loaded;
            (state, loaded) = self.load_run(pager, channel, state, &run, pages, at_once);
            match loaded {
                Ok(0) => break,
                Ok(loaded) => {
                    if let Some(slot) = pager.slot() {
                        slot.counters.readahead_pages.fetch_add((loaded - usize::from(asked)) as u64, Relaxed);
                    }
                    left -= loaded;
                    brought += loaded as u32;
                    at = (at as i64 + window.step * loaded as i64) as u64;
                }
                Err(Errno::EAGAIN) if asked => {
                    self.unanswered = Some((page, window));
                    return (state, Answer::Again);
                }
                // Before it, the run may lie in another mapping: the one that was asked for, alone.
                Err(_) if asked && pages > 1 => {
                    (left, at_once) = (1, true);
                    continue;
                }
                Err(_) => break,
            }
            asked = false;
        }
        self.streams.brought(brought);
        if left > 0 && brought > 0 && window.step.abs() == 1 {
            self.streams.expect(behind_present(&state, at, window.step));
        }
        (state, Answer::Done)
    }

    /// Orders what the stream of a fault will ask for from `at` on, as far as it is in the spill file; how many pages.
    fn order(&mut self, pager: &Pager, state: &State, asked: u64, at: u64, window: &Window) -> usize {
        let Some(spill) = &pager.spill else { return 0 };
        let bounds = state.regions.containing(asked as usize * PAGE);
        let mut ordered = 0;
        for ahead in 0..i64::from(window.pages.max(1)) {
            let page = (at as i64 + window.step * ahead) as u64;
            let inside = bounds.as_ref().is_none_or(|range| range.contains(&(page as usize * PAGE)));
            let may_come = page == asked || inside && !state.must_stay(page as usize * PAGE);
            let is_stored = may_come && state.table.get(page).phase() == Phase::Stored;
            if !is_stored || !spill.order(&pager.pool, &mut self.worker, page, page == asked) {
                break;
            }
            ordered += 1;
        }
        ordered
    }

    /// The page that was asked for is to be read: by this thread, if no other fault waits, nobody forks, and either the program has one thread
    /// or the disk is fast. Otherwise its fault comes again when it is there, and if there was no room for the order, soon.
    fn await_order<'a>(
        &mut self,
        pager: &'a Pager,
        channel: &Channel,
        mut state: Guard<'a, Box<State>>,
        page: u64,
        window: Window,
        is_ordered: bool,
    ) -> (Guard<'a, Box<State>>, Answer) {
        self.awaited[self.awaited_next % AWAITED] = Some((page, window));
        self.awaited_next += 1;
        let is_alone = self.pending_len == 0 && self.early.is_empty() && !pager.fork_turn.wants_to_freeze();
        match pager.spill.as_ref().filter(|spill| is_alone && (spill.is_fast() || !pager.has_many_threads())) {
            Some(spill) if is_ordered => {
                state.under_way += 1;
                drop(state);
                let is_read = spill.fetch_for(page, channel.uffd);
                let mut state = self.lock(pager, channel);
                state.under_way -= 1;
                // If it is not, a fetcher reads it just now.
                (state, if is_read { Answer::Again } else { Answer::Done })
            }
            _ => {
                ring_for(pager, usize::from(is_ordered));
                if !is_ordered {
                    state.under_way += 1;
                    drop(state);
                    lock::pause();
                    channel.uffd.wake(page as usize * PAGE, PAGE);
                    state = self.lock(pager, channel);
                    state.under_way -= 1;
                }
                (state, Answer::Done)
            }
        }
    }

    /// Brings `pages` neighbouring stored pages; returns how many came.
    ///
    /// Without the lock: that a page is stored changes only with an event, which this thread alone reads, or when it is
    /// evicted again, which `loading` forbids. An event that nobody has read makes the copy fail.
    fn load_run<'a>(
        &mut self,
        pager: &'a Pager,
        channel: &Channel,
        mut state: Guard<'a, Box<State>>,
        run: &Run,
        pages: usize,
        at_once: bool,
    ) -> (Guard<'a, Box<State>>, Result<usize, Errno>) {
        let first = run.first_of(pages);
        state.under_way += 1;
        state.loading = first..first + pages as u64;
        drop(state);
        let Handler { worker, pages: buffers, .. } = self;
        let (mut damaged, mut gone) = (None, false);
        for (buffer, page) in buffers[..pages].iter_mut().zip(first..) {
            let read = match (pager.pool.read(worker, PageIndex(page), buffer), &pager.spill) {
                (Ok(Read::Done), _) => Fetched::Done,
                (Ok(Read::OnBacking(_)), Some(spill)) => {
                    match spill.take(pager, worker, page, page == run.asked, buffer) {
                        Fetched::Not if at_once && page == run.asked => {
                            spill.read(pager, worker, PageIndex(page), buffer)
                        }
                        taken => taken,
                    }
                }
                _ => Fetched::Lost,
            };
            if read != Fetched::Done {
                (damaged, gone) = (Some(page).filter(|_| read == Fetched::Lost), read == Fetched::Not);
                break;
            }
        }
        let (copied, error) = match damaged {
            // It went to the spill file just now, or could not be read from there and nobody asked for it: decided afresh.
            None if gone => (0, Some(Errno::EAGAIN)),
            // SAFETY: the buffer is ours and present.
            None => unsafe { channel.uffd.copy(first as usize * PAGE, buffers.as_ptr().cast(), pages * PAGE) },
            Some(page) => (0, lost::poison(pager, channel, page).err()),
        };
        let mut state = self.lock(pager, channel);
        state.under_way -= 1;
        state.loading = 0..0;
        match (damaged, error) {
            (Some(_), Some(errno)) => return (state, Err(errno)),
            (Some(page), None) => return Self::lost(state, run, page),
            (None, _) => {}
        }
        let copied = copied / PAGE;
        state.grown_pages += copied as u64;
        self.loaded(pager, channel, &mut state, run, first, copied);
        let loaded = match error {
            None => Ok(pages),
            Some(errno) => self.loaded_in_part(pager, channel, &mut state, run, first, copied, errno),
        };
        (state, loaded)
    }

    /// A stored copy is damaged, and its page poisoned: nothing more is known of it. The others of its run go on.
    fn lost<'a>(
        mut state: Guard<'a, Box<State>>,
        run: &Run,
        page: u64,
    ) -> (Guard<'a, Box<State>>, Result<usize, Errno>) {
        state.table.update(page, Word::new(Phase::Resident));
        (state, if page == run.asked { Ok(0) } else { Err(Errno::EAGAIN) })
    }

    /// Pages `first..first + pages` are in their places. What waits in the small queue may stay in the pool as well.
    fn loaded(&mut self, pager: &Pager, channel: &Channel, state: &mut State, run: &Run, first: u64, pages: usize) {
        for page in first..first + pages as u64 {
            let word = state.table.get(page);
            // Back sooner than everything resident could have been evicted: it belongs to the working set.
            let returns = left_since(state, word) < state.limit_pages;
            let heat = if returns && page == run.asked { HEAT_MAX } else { 0 };
            // A copy in the spill file could not be compared without being read.
            let in_file = pager.spill.is_some() && pager.pool.is_on_backing(PageIndex(page));
            // Nor one in a group without decoding all of it.
            let in_group = pager.has_groups.load(Relaxed) && pager.pool.is_grouped(PageIndex(page));
            let in_pool = word.phase() == Phase::Stored && !in_file && !in_group;
            let may_keep = !returns && in_pool && matches!(channel.way, Way::Move { .. });
            let copy = may_keep && state.copies.keep(2 * SmallQueue::room(state.limit_pages));
            if !copy {
                copies::drop_object(pager, state, page, word);
            }
            state.table.update(page, Word::new(Phase::Resident).with_heat(heat).with_copy(copy));
            if !returns && let Some(pushed_out) = state.small.push(page..page + 1) {
                copies::drop_copies(pager, state, pushed_out);
            }
        }
    }

    /// A call stopped at page `first + done`. A page that was there already is the truth, its stored copy is old.
    #[allow(clippy::too_many_arguments, reason = "one call's circumstances")]
    fn loaded_in_part(
        &mut self,
        pager: &Pager,
        channel: &Channel,
        state: &mut State,
        run: &Run,
        first: u64,
        done: usize,
        errno: Errno,
    ) -> Result<usize, Errno> {
        let stopped_at = first + done as u64;
        match errno {
            Errno::EEXIST => {
                self.loaded(pager, channel, state, run, stopped_at, 1);
                copies::drop_copies(pager, state, stopped_at..stopped_at + 1);
                channel.uffd.wake(stopped_at as usize * PAGE, PAGE);
                if run.asked == stopped_at || (first..stopped_at).contains(&run.asked) {
                    Ok(done + 1)
                } else {
                    Err(Errno::EAGAIN)
                }
            }
            Errno::EAGAIN if (first..stopped_at).contains(&run.asked) => Ok(done),
            Errno::EAGAIN => Err(Errno::EAGAIN),
            _ => {
                channel.uffd.wake(run.asked as usize * PAGE, PAGE);
                Err(errno)
            }
        }
    }

    /// Like [`Handler::attempt`], but nothing changes that a copy of the process will need: pages are copied in, and stay
    /// stored as well, with a note that they are here: their stored copies are old from now on. Such a copy is read only if the page goes
    /// missing, and whatever makes it go missing drops or replaces it.
    fn attempt_frozen(&mut self, pager: &Pager, channel: &Channel, state: &mut State, page: u64) -> Answer {
        let source = state.fork_log.source(page);
        let stored = source.filter(|&source| state.table.get(source).phase() == Phase::Stored);
        let filled = match stored {
            Some(stored) => {
                // Should the process be copied just now, the copy has a lock to free.
                pager.frozen_read.store(stored, Release);
                read_stored(pager, &mut self.worker, stored, &mut self.pages[0])
            }
            None => false,
        };
        if stored.is_some() && !filled {
            return if lost::poison(pager, channel, page).is_ok() { Answer::Done } else { Answer::Again };
        }
        let from = if filled { self.pages.as_ptr() } else { self.zeroes.as_ptr() };
        // A copy that is made between the two has to look by itself.
        pager.frozen_bring.store(page, Release);
        // SAFETY: both buffers are ours and present.
        let (_, error) = unsafe { channel.uffd.copy(page as usize * PAGE, from.cast(), PAGE) };
        if let (None | Some(Errno::EEXIST), Some(stored)) = (error, stored) {
            state.table.note_here(stored);
        }
        pager.frozen_bring.store(NOTHING, Release);
        match error {
            None => state.grown_pages += 1,
            Some(Errno::EAGAIN) => return Answer::Again,
            Some(_) => channel.uffd.wake(page as usize * PAGE, PAGE),
        }
        Answer::Done
    }
}

/// Has fetchers look for what was ordered: all of it at once, for what lies together is read together.
fn ring_for(pager: &Pager, ordered: usize) {
    if let Some(spill) = pager.spill.as_ref().filter(|_| ordered > 0) {
        spill.ring_for_orders();
    }
}

/// The first page from `at` on that is not there, as far as it pays to look; else `at`.
fn behind_present(state: &State, at: u64, step: i64) -> u64 {
    let ahead = |ahead: i64| (at as i64 + step * ahead) as u64;
    (0..LOOKED_AHEAD).map(ahead).find(|&page| state.table.get(page).phase() != Phase::Resident).unwrap_or(at)
}

/// How many pages have left since the one of this word was stored, to some dozens.
fn left_since(state: &State, word: Word) -> u64 {
    distance::evictions_since(word.payload(), state.eviction_clock)
}

/// How many pages of a run are in the pool, or read from the spill file, nearest first.
fn here(pager: &Pager, run: &Run, most: usize) -> usize {
    let Some(spill) = &pager.spill else { return most };
    let is_here = |page: u64| !pager.pool.is_on_backing(PageIndex(page)) || spill.is_ready(page);
    (0..most as i64).take_while(|ahead| is_here((run.at as i64 + run.step * ahead) as u64)).count()
}
