//! Copies of the process, by fork: who may read what is in whose file, and until when it must stay there.
//!
//! A child reads what is in its parent's file, and writes to one of its own: [`compcache_store::Backing::new_for_copies`]. What it needs
//! for that is made ready before the fork:
//! - *The descriptors.* The thread that forks opens the files once more, in its own table, and closes them afterwards.
//! - *That nothing there is overwritten.* The parent maps a page of a memfd, shared and writable, unmaps it after the fork, and then
//!   tries now and again to seal the memfd against writing: the kernel refuses (EBUSY) as long as any process has it mapped. So the
//!   parent learns when the child, and the child's children, have ended or executed something else, however that came.
//!
//! Where one of these cannot be had, everything is brought back into memory before the fork.

use super::{HOLDS, Inline, PARTS, Progress, Spill};
use crate::fork;
use crate::memory::PAGE;
use crate::pager::Pager;
use crate::process;
use crate::shared::SpillNews;
use crate::table::Phase;
use compcache_store::PageIndex;
use core::ffi::c_void;
use core::sync::atomic::Ordering::*;
use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};

/// Between two looks at whether copies have ended.
const HOLD_NS: u64 = 50_000_000;

/// What a fork has left to wait for.
pub(super) struct Hold {
    memfd: OwnedFd,
    until_flight: u64,
}

impl Spill {
    /// Before a fork, in the evictor, with everything frozen: what is in the file stays there until the copy has gone.
    pub fn prepare_copy(&self, pager: &Pager) {
        self.handed.iter().for_each(|handed| handed.store(-1, Release));
        for (part, in_use) in self.parts_in_use.iter().enumerate() {
            in_use.store(self.backing.is_part_alive(part), Release);
        }
        if !self.backing.own_part().is_some_and(|part| self.backing.is_part_alive(part)) {
            return;
        }
        let until_flight = self.backing.flights();
        let made = {
            let mut holds = self.holds.lock();
            match holds.iter_mut().position(|hold| hold.is_none()) {
                // The last one's processes are waited for as well.
                None => holds[HOLDS - 1].as_mut().is_some_and(|hold| {
                    hold.until_flight = until_flight;
                    self.map_held(&hold.memfd)
                }),
                Some(place) => memfd().filter(|memfd| self.map_held(memfd)).is_some_and(|memfd| {
                    holds[place] = Some(Hold { memfd, until_flight });
                    true
                }),
            }
        };
        match made {
            true => self.backing.hold(until_flight),
            false => self.recall(pager),
        }
    }

    fn map_held(&self, memfd: &OwnedFd) -> bool {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, which nobody reads or writes.
        let mapped = unsafe { mmap(core::ptr::null_mut(), PAGE, access, MapFlags::SHARED, memfd, 0) };
        self.held_at.store(mapped.map_or(0, |at| at as usize), Release);
        mapped.is_ok()
    }

    /// Then, in the thread that forks: opens for the copy what it will read from. False when it cannot; then nothing is left open.
    ///
    /// Takes no lock: the thread's stack may be in the pool, and whoever brings it may need that lock.
    pub fn hand_over(&self) -> bool {
        for part in (0..PARTS).filter(|part| self.parts_in_use[*part].load(Acquire)) {
            let number = self.files.numbers[part].load(Acquire);
            let Some(file) = process::open_of_thread(self.thread.load(Acquire), number) else {
                self.close_handed();
                return false;
            };
            // Not where the program expects its own: another of its threads may write to a number that it closed before.
            let file = process::out_of_the_way(file);
            let (device, inode) = rustix::fs::fstat(&file).map_or((0, 0), |stat| (stat.st_dev, stat.st_ino));
            self.handed_file[part].0.store(device, Release);
            self.handed_file[part].1.store(inode, Release);
            self.handed[part].store(file.as_raw_fd(), Release);
            core::mem::forget(file);
        }
        true
    }

    /// Closes in the calling thread's table what was opened there by [`Spill::hand_over`].
    pub fn close_handed(&self) {
        for (part, handed) in self.handed.iter().enumerate() {
            let number = handed.swap(-1, AcqRel);
            if number < 0 {
                continue;
            }
            // SAFETY: opened by us; only dropped, and only if the program has not closed it and opened something else.
            let file = unsafe { OwnedFd::from_raw_fd(number) };
            match self.is_handed(part, &file) {
                true => drop(file),
                false => core::mem::forget(file),
            }
        }
    }

    /// Whether it is the file that was handed over: no other has its number while the evictor has it open. On file systems that give open files a hidden
    /// name instead of none (NFS) it has a link.
    fn is_handed(&self, part: usize, file: impl AsFd) -> bool {
        let (device, inode) = &self.handed_file[part];
        let is_it = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino) == (device.load(Acquire), inode.load(Acquire));
        rustix::fs::fstat(file).is_ok_and(is_it)
    }

    /// The descriptors that a copy's evictor must keep.
    pub fn handed(&self) -> [i32; PARTS] {
        core::array::from_fn(|part| self.handed[part].load(Acquire))
    }

    /// Everything in the file comes back into memory, however much that is.
    pub fn recall(&self, pager: &Pager) {
        pager.region.note_spill(SpillNews::Recalled, 0);
        pager.store.set_limit_bytes(u64::MAX);
        let mut state = pager.state.lock();
        let mut inline = self.inline.lock();
        let Inline { worker, fetcher, page: contents } = &mut *inline;
        crate::events::for_each_known(&mut state, fork::ALL_PAGES, |_, page, word| {
            let index = PageIndex(page);
            if word.phase() == Phase::Stored && pager.pool.is_on_backing(index) {
                // One that cannot be read is an error for whoever touches it, here or there.
                let _ = pager.pool.fetch(worker, fetcher, index, contents);
            }
        });
    }

    /// After the fork, in the parent's evictor.
    pub fn copied(&self) {
        let at = self.held_at.swap(0, AcqRel);
        if at != 0 {
            // SAFETY: mapped for the copy alone.
            let _ = unsafe { rustix::mm::munmap(at as *mut c_void, PAGE) };
        }
    }

    /// Sees which copies have gone. Called by the evictor, and not while frozen.
    pub fn look_at_holds(&self, now_ns: u64) {
        if now_ns - self.holds_looked_at_ns.load(Relaxed) < HOLD_NS || self.held_at.load(Acquire) != 0 {
            return;
        }
        self.holds_looked_at_ns.store(now_ns, Relaxed);
        let mut holds = self.holds.lock();
        let (mut until_flight, mut any_gone) = (0, false);
        for hold in holds.iter_mut() {
            let Some(Hold { memfd, until_flight: until }) = hold else { continue };
            if rustix::fs::fcntl_add_seals(memfd, SealFlags::WRITE).is_ok() {
                (*hold, any_gone) = (None, true);
            } else {
                until_flight = until_flight.max(*until);
            }
        }
        if any_gone {
            self.backing.hold(until_flight);
        }
    }

    /// In a copy of the process, in its only thread.
    ///
    /// # Safety
    /// As [`crate::fork::child`].
    pub unsafe fn begin_copy(&self, pager: &Pager) {
        // SAFETY: the threads that may have held these do not exist here; they were reading, or holding what is reset below.
        unsafe {
            self.files.files.free_after_fork();
            self.orders.free_after_fork();
            self.inline.free_after_fork();
            self.worker.free_after_fork();
            self.holds.free_after_fork();
        }
        self.files.forget_all();
        // Some may have been used just now, and not counted yet.
        // SAFETY: there is no other thread.
        let buffers = self.buffers.iter().map(|buffer| unsafe { &*buffer.get() }.touched_bytes()).sum::<usize>();
        // SAFETY: as above.
        let batches = self.batches.iter().map(|batch| unsafe { &*batch.get() }.touched_bytes()).sum::<usize>();
        self.touched_bytes.store((buffers + batches) as u64, Relaxed);
        self.orders.lock().all.iter_mut().for_each(|order| order.progress = Progress::Free);
        // The parent's descriptors. The page that is mapped stays: that is what the parent waits for.
        self.holds.lock().iter_mut().for_each(|hold| core::mem::forget(hold.take()));
        self.held_at.store(0, Release);
        self.started.store(0, Release);
        self.fetchers.store(0, Release);
        self.is_failing.store(false, Release);
        self.aged_at.store(0, Relaxed);
        self.reuse.reset();
        let number = pager.region.header.spill_copies.fetch_add(1, Relaxed) + 1;
        // SAFETY: says the caller; the number is the tree's.
        unsafe { self.backing.begin_copy(number) };
        self.files.used_bytes.store(0, Relaxed);
    }

    /// Closes what [`Spill::adopt`] took, where no evictor has a table of its own for it.
    pub fn close_adopted(&self) {
        self.files.close_all();
        self.handed.iter().for_each(|handed| handed.store(-1, Release));
    }

    /// Takes what was handed over, in the table of the calling thread.
    pub fn adopt(&self) {
        for (part, number) in self.handed().into_iter().enumerate().filter(|(_, number)| *number >= 0) {
            // SAFETY: opened for this, and in this table nobody else's.
            let file = unsafe { OwnedFd::from_raw_fd(number) };
            match self.is_handed(part, &file) {
                true => self.files.put(part, process::out_of_the_way(file)),
                // The program has closed it, and this is a file of its own.
                false => core::mem::forget(file),
            }
        }
    }
}

/// A memfd of a page that can be sealed, under a high number.
fn memfd() -> Option<OwnedFd> {
    let memfd = rustix::fs::memfd_create(c"compcache", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
    rustix::fs::ftruncate(&memfd, PAGE as u64).ok()?;
    Some(process::out_of_the_way(memfd))
}
