//! One thread's way to a disk.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use compcache_store::{Batch, Fetcher, Health, Leaving, Page, PageIndex, Read, RunFailed, StoreError, Worker};
use rustix::time::{ClockId, clock_gettime};

use super::Disk;
use crate::device::{BLOCK_BYTES, Extent, Lane, Manner, Outcome, Request, Zeroes};
use crate::error::DeviceError;
use crate::range::{Part, Split};

const BLOCK: u64 = BLOCK_BYTES as u64;
const ZEROES: Page = [0; BLOCK_BYTES];
/// Blocks that share a stripe because they are neighbours.
pub(super) const SEGMENT_BLOCKS: u64 = 64;
/// Pages read at a time.
const RUN: usize = SEGMENT_BLOCKS as usize;
/// How often, and for how long, a write waits for the reserve.
const REFILL_WAITS: u32 = 125;
const REFILL_WAIT: Duration = Duration::from_millis(2);
/// A page that waited so often before it was taken was taken late.
const LATE_WAITS: u32 = 4;
/// How long a write waits while another thread has pages leave for the backing, before it looks again.
const RECLAIM_WAIT: Duration = Duration::from_millis(1);
/// How often, and how long between, a write looks whether something has left, when this thread found nothing that could: what
/// others have on its way may leave room yet.
const IDLE_MAX: u32 = 25;
const IDLE_WAIT: Duration = Duration::from_millis(10);
/// So long it is waited for another disk's medium that hangs, by all writes of a disk that cannot have blocks leave by itself; who looks so long after the last began anew.
const HELD_UP_MAX_NS: u64 = if cfg!(test) { 200_000_000 } else { 30_000_000_000 };
const HELD_UP_GAP_NS: u64 = 1_000_000_000;
/// As far as a stretch of data is followed in one answer: 256 MiB. The next question goes on from there.
const DATA_BLOCKS_MAX: u64 = 1 << 16;

pub(super) struct DiskLane {
    disk: Arc<Disk>,
    worker: Worker,
    /// The block of which a part is read or written.
    page: Box<Page>,
    found: [Read; RUN],
    /// For blocks on the backing, if there is one.
    fetcher: Option<(Fetcher, Batch)>,
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// What came of having blocks leave memory.
enum Room {
    /// Some have left, or will have, or the backing is in another state now.
    Made,
    /// None could.
    Nowhere,
    /// All that could are of a medium that hangs.
    HeldUp,
}

/// Goes on with the request unless the step before must wait.
macro_rules! done {
    ($step:expr) => {
        if $step? == Outcome::MustWait {
            return Ok(Outcome::MustWait);
        }
    };
}

impl Disk {
    /// Writes whole blocks from `first` on. Where memory may come from a reserve alone, waits a while for it to be refilled;
    /// where there is a backing, has other blocks leave for it.
    fn write_pages(
        &self,
        worker: &mut Worker,
        first: u64,
        pages: &[Page],
        manner: Manner,
    ) -> Result<Outcome, DeviceError> {
        let (mut done, mut waits, mut idle) = (0, 0, 0);
        // What the page at `done` has waited.
        let mut page_waits = 0;
        let taken = |page_waits: &mut u32| {
            if std::mem::take(page_waits) >= LATE_WAITS {
                self.late_writes.fetch_add(1, Relaxed);
            }
        };
        loop {
            match self.pool.write_run(worker, PageIndex(first + done as u64), &pages[done..]) {
                Ok(()) => {
                    taken(&mut page_waits);
                    if self.exhausted.load(Relaxed) {
                        self.exhausted.store(false, Relaxed);
                    }
                    return Ok(Outcome::Done(()));
                }
                // An absent block reads as zeroes, and needs no room. Its tables are missing: where they are, zeroes are not refused.
                Err(RunFailed {
                    done: more,
                    error: StoreError::LimitReached { .. } | StoreError::MemoryRefused { .. },
                }) if pages[done + more] == ZEROES && !self.pool.contains(PageIndex(first + (done + more) as u64)) => {
                    self.not_told.fetch_add(1, Relaxed);
                    done += more + 1;
                }
                Err(RunFailed { done: more, error }) if self.can_make_room(&error) => {
                    self.not_told.fetch_add(1, Relaxed);
                    if !manner.may_wait {
                        return Ok(Outcome::MustWait);
                    }
                    done += more;
                    let gives_up = match self.make_room(worker, &error) {
                        Room::Made => continue,
                        Room::Nowhere => {
                            idle += 1;
                            idle > IDLE_MAX
                        }
                        Room::HeldUp => self.held_up_for_ns(now_ns()) > HELD_UP_MAX_NS,
                    };
                    if gives_up {
                        self.not_told.fetch_sub(1, Relaxed);
                        return Err(error.into());
                    }
                    thread::sleep(IDLE_WAIT);
                }
                Err(RunFailed { done: more, error: StoreError::MemoryRefused { .. } })
                    if self.reserve_only.load(Relaxed) && !self.exhausted.load(Relaxed) =>
                {
                    self.not_told.fetch_add(1, Relaxed);
                    if !manner.may_wait {
                        return Ok(Outcome::MustWait);
                    }
                    if more > 0 {
                        taken(&mut page_waits);
                    }
                    done += more;
                    page_waits += 1;
                    waits += 1;
                    // Others may have waited less: who was given room takes it back.
                    if waits > REFILL_WAITS {
                        self.exhausted.store(true, Relaxed);
                    }
                    thread::sleep(REFILL_WAIT);
                }
                Err(failed) => return Err(failed.error.into()),
            }
        }
    }
}

impl Disk {
    /// Whether a write that failed so would succeed once blocks have left memory, and some can, as far as is known.
    fn can_make_room(&self, failed: &StoreError) -> bool {
        let own = || self.has_good_backing();
        let store = self.pool.store();
        match failed {
            // Where it is the store that is full, others' blocks do as well.
            StoreError::LimitReached { limit_bytes, .. } if !self.reserve_only.load(Relaxed) => {
                own() || *limit_bytes == store.limit_bytes() && store.can_reclaim()
            }
            StoreError::LimitReached { .. } | StoreError::MemoryRefused { .. } => own(),
            _ => false,
        }
    }

    fn has_good_backing(&self) -> bool {
        self.pool.backing().is_some_and(|backing| backing.health() == Health::Good)
    }

    /// How long writes have been held up now, each looking now and then.
    fn held_up_for_ns(&self, now_ns: u64) -> u64 {
        let (since, last) = (&self.held_up_ns[0], &self.held_up_ns[1]);
        if now_ns.saturating_sub(last.swap(now_ns, Relaxed)) > HELD_UP_GAP_NS {
            since.store(now_ns, Relaxed);
        }
        now_ns.saturating_sub(since.load(Relaxed))
    }

    /// Has some blocks leave memory, this disk's or others', or waits for another thread that does.
    fn make_room(&self, worker: &mut Worker, failed: &StoreError) -> Room {
        let store = self.pool.store();
        let done = match (failed, self.pool.backing()) {
            // Its own limit is no reason for others' blocks to leave.
            (StoreError::LimitReached { limit_bytes, .. }, Some(own))
                if !self.reserve_only.load(Relaxed) && *limit_bytes != store.limit_bytes() =>
            {
                store.reclaim(worker, own)
            }
            (StoreError::LimitReached { .. }, _) if !self.reserve_only.load(Relaxed) => store.reclaim_any(worker),
            // The reserve is used up, however far the limit is. Who is swapped to writes to nothing but his own backing: a file, which
            // others may have, takes memory.
            _ => store.write_back(worker, &self.pool, Leaving::Oldest),
        };
        match done {
            Ok(done) if done.is_busy => thread::sleep(RECLAIM_WAIT),
            // Its own is one to wait for, as long as it is well.
            Ok(done) if done.is_held_up && self.has_good_backing() => thread::sleep(IDLE_WAIT),
            Ok(done) if done.is_held_up => return Room::HeldUp,
            // A flight that only cleaned has made room for the next.
            Ok(done) if done.pages == 0 && done.freed_bytes == 0 && done.finished => return Room::Nowhere,
            // After an error it is in bad health, and that is where the writer looks next.
            Ok(_) | Err(_) => {}
        }
        Room::Made
    }
}

impl DiskLane {
    pub fn new(disk: Arc<Disk>) -> Result<DiskLane, DeviceError> {
        let mut worker = Worker::new(disk.pool.store(), now_ns)?;
        worker.set_reserve_only(disk.reserve_only.load(Relaxed));
        let mut fetcher = match disk.pool.backing() {
            Some(_) => Some((Fetcher::new()?, Batch::new()?)),
            None => None,
        };
        if let Some((one, run)) = &mut fetcher {
            one.prefault();
            run.prefault();
        }
        Ok(DiskLane { disk, worker, page: Box::new(ZEROES), found: [Read::Absent; RUN], fetcher })
    }

    fn read_blocks(&mut self, first: u64, into: &mut [Page], manner: Manner) -> Result<Outcome, DeviceError> {
        for (run, pages) in into.chunks_mut(RUN).enumerate() {
            let first = first + (run * RUN) as u64;
            let found = &mut self.found[..pages.len()];
            let read = self.disk.pool.read_run(&mut self.worker, PageIndex(first), pages, found);
            read.map_err(|failed| failed.error)?;
            if found.iter().any(|found| matches!(found, Read::OnBacking(_))) {
                let unreachable = DeviceError::Unreachable { offset_bytes: first * BLOCK };
                let (fetcher, batch) = self.fetcher.as_mut().ok_or(unreachable)?;
                if !manner.may_wait {
                    return Ok(Outcome::MustWait);
                }
                let fetched =
                    self.disk.pool.fetch_run(&mut self.worker, (fetcher, batch), PageIndex(first), pages, found);
                fetched.map_err(|failed| failed.error)?;
            }
            // Some may have been discarded meanwhile.
            pages
                .iter_mut()
                .zip(found)
                .filter(|(_, found)| **found == Read::Absent)
                .for_each(|(page, _)| *page = ZEROES);
        }
        Ok(Outcome::Done(()))
    }

    /// Reads block `block` into the lane's page.
    fn read_page(&mut self, block: u64, manner: Manner) -> Result<Outcome, DeviceError> {
        match self.disk.pool.read(&mut self.worker, PageIndex(block), &mut self.page)? {
            Read::Done => {}
            Read::Absent => *self.page = ZEROES,
            Read::OnBacking(_) if !manner.may_wait => return Ok(Outcome::MustWait),
            Read::OnBacking(_) => fetch(&self.disk, &mut self.worker, &mut self.fetcher, block, &mut self.page)?,
        }
        Ok(Outcome::Done(()))
    }

    fn read_part(&mut self, part: Part, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        done!(self.read_page(part.block, manner));
        into.copy_from_slice(&self.page[part.within]);
        Ok(Outcome::Done(()))
    }

    /// Lets `change` loose on a part of a block; nobody else changes the block meanwhile.
    fn change_part(
        &mut self,
        request: Request,
        part: Part,
        manner: Manner,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<Outcome, DeviceError> {
        let disk = self.disk.clone();
        let Some(_alone) = disk.stripes.have_as(part.block, manner) else { return Ok(Outcome::MustWait) };
        disk.check(request, part.block * BLOCK, BLOCK)?;
        done!(self.read_page(part.block, manner));
        change(&mut self.page[part.within]);
        disk.write_pages(&mut self.worker, part.block, std::slice::from_ref(&self.page), manner)
    }

    /// Calls `change` for the blocks of each segment, with its stripe shared and inside the disk as it is then.
    fn change_blocks(
        &mut self,
        request: Request,
        blocks: Range<u64>,
        manner: Manner,
        mut change: impl FnMut(&Disk, &mut Worker, Range<u64>) -> Result<Outcome, DeviceError>,
    ) -> Result<Outcome, DeviceError> {
        let mut next = blocks.start;
        while next < blocks.end {
            let end = (next - next % SEGMENT_BLOCKS + SEGMENT_BLOCKS).min(blocks.end);
            let Some(_shared) = self.disk.stripes.share_as(next, manner) else { return Ok(Outcome::MustWait) };
            self.disk.check(request, next * BLOCK, (end - next) * BLOCK)?;
            done!(change(&self.disk, &mut self.worker, next..end));
            next = end;
        }
        Ok(Outcome::Done(()))
    }

    fn discard_blocks(&mut self, request: Request, blocks: Range<u64>, manner: Manner) -> Result<Outcome, DeviceError> {
        if blocks.end - blocks.start <= SEGMENT_BLOCKS {
            return self.change_blocks(request, blocks, manner, |disk, _, blocks| {
                disk.pool.discard_range(PageIndex(blocks.start), blocks.end - blocks.start);
                Ok(Outcome::Done(()))
            });
        }
        // The pool skips what is empty a gigabyte at a time, which segments would not let it do.
        let Some(_shared) = self.disk.stripes.share_all_as(manner) else { return Ok(Outcome::MustWait) };
        self.disk.check(request, blocks.start * BLOCK, (blocks.end - blocks.start) * BLOCK)?;
        self.disk.pool.discard_range(PageIndex(blocks.start), blocks.end - blocks.start);
        Ok(Outcome::Done(()))
    }

    fn zero_blocks(&mut self, blocks: Range<u64>, manner: Manner) -> Result<Outcome, DeviceError> {
        self.change_blocks(Request::WriteZeroes, blocks, manner, |disk, worker, blocks| {
            for block in blocks {
                done!(disk.write_pages(worker, block, std::slice::from_ref(&ZEROES), manner));
            }
            Ok(Outcome::Done(()))
        })
    }
}

/// Reads a block that is, or was just now, on the backing, and waits for it.
fn fetch(
    disk: &Disk,
    worker: &mut Worker,
    fetcher: &mut Option<(Fetcher, Batch)>,
    block: u64,
    page: &mut Page,
) -> Result<(), DeviceError> {
    let unreachable = DeviceError::Unreachable { offset_bytes: block * BLOCK };
    let (fetcher, _) = fetcher.as_mut().ok_or(unreachable)?;
    match disk.pool.fetch(worker, fetcher, PageIndex(block), page)? {
        Read::Done => {}
        // Discarded meanwhile.
        Read::Absent => *page = ZEROES,
        Read::OnBacking(_) => return Err(unreachable),
    }
    Ok(())
}

impl Lane for DiskLane {
    fn read(&mut self, offset_bytes: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.disk.check(Request::Read, offset_bytes, into.len() as u64)?;
        let split = Split::new(offset_bytes, into.len() as u64);
        let (head, rest) = into.split_at_mut(split.head_bytes());
        let (whole, tail) = rest.split_at_mut(split.whole_bytes() as usize);
        if let Some(part) = split.head {
            done!(self.read_part(part, head, manner));
        }
        done!(self.read_blocks(split.whole.start, whole.as_chunks_mut().0, manner));
        match split.tail {
            Some(part) => self.read_part(part, tail, manner),
            None => Ok(Outcome::Done(())),
        }
    }

    fn write(&mut self, offset_bytes: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.disk.check(Request::Write, offset_bytes, from.len() as u64)?;
        let split = Split::new(offset_bytes, from.len() as u64);
        let (head, rest) = from.split_at(split.head_bytes());
        let (whole, tail) = rest.split_at(split.whole_bytes() as usize);
        if let Some(part) = split.head {
            done!(self.change_part(Request::Write, part, manner, |bytes| bytes.copy_from_slice(head)));
        }
        let (pages, first) = (whole.as_chunks().0, split.whole.start);
        done!(self.change_blocks(Request::Write, split.whole, manner, |disk, worker, blocks| {
            let pages = &pages[(blocks.start - first) as usize..(blocks.end - first) as usize];
            disk.write_pages(worker, blocks.start, pages, manner)
        }));
        match split.tail {
            Some(part) => self.change_part(Request::Write, part, manner, |bytes| bytes.copy_from_slice(tail)),
            None => Ok(Outcome::Done(())),
        }
    }

    /// Nothing to do: what was written is in RAM, where it stays, and lasts no longer than the process.
    fn flush(&mut self, _manner: Manner) -> Result<Outcome, DeviceError> {
        Ok(Outcome::Done(()))
    }

    fn discard(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome, DeviceError> {
        self.disk.check(Request::Discard, offset_bytes, length_bytes)?;
        self.discard_blocks(Request::Discard, Split::new(offset_bytes, length_bytes).whole, manner)
    }

    fn write_zeroes(
        &mut self,
        offset_bytes: u64,
        length_bytes: u64,
        zeroes: Zeroes,
        manner: Manner,
    ) -> Result<Outcome, DeviceError> {
        self.disk.check(Request::WriteZeroes, offset_bytes, length_bytes)?;
        let split = Split::new(offset_bytes, length_bytes);
        for part in [split.head, split.tail].into_iter().flatten() {
            done!(self.change_part(Request::WriteZeroes, part, manner, |bytes| bytes.fill(0)));
        }
        match zeroes {
            Zeroes::MayBeHoles => self.discard_blocks(Request::WriteZeroes, split.whole, manner),
            Zeroes::AreData => self.zero_blocks(split.whole, manner),
        }
    }

    fn extent(&mut self, offset_bytes: u64, length_bytes: u64, _: Manner) -> Result<Outcome<Extent>, DeviceError> {
        self.disk.check(Request::Extent, offset_bytes, length_bytes)?;
        let pool = &self.disk.pool;
        let (first, end) = (offset_bytes / BLOCK, (offset_bytes + length_bytes).div_ceil(BLOCK));
        let is_hole = !pool.contains(PageIndex(first));
        let border = if is_hole {
            pool.next_stored(PageIndex(first), end - first).map_or(end, |index| index.0)
        } else {
            let last = end.min(first + DATA_BLOCKS_MAX);
            (first..last).find(|block| !pool.contains(PageIndex(*block))).unwrap_or(last)
        };
        // At least as far as the block it begins in: what was looked at first may have changed since.
        let length_bytes = (border.max(first + 1) * BLOCK - offset_bytes).min(length_bytes);
        Ok(Outcome::Done(Extent { length_bytes, is_hole }))
    }
}
