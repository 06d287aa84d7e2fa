//! One thread's way to a cached device.

use std::array;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use compcache_cache::{Token, Writing, exactly_missing, missing};
use compcache_store::{Page, Worker};

use super::{Cached, SEGMENT_BLOCKS, place_of};
use crate::device::{BLOCK_BYTES, Extent, Lane, Manner, Outcome, Request, Zeroes, check_range};
use crate::error::DeviceError;
use crate::range::{Part, Split};

const BLOCK: u64 = BLOCK_BYTES as u64;
const SEGMENT: usize = SEGMENT_BLOCKS as usize;
/// Segments that are changed by one request below.
const CHANGED_AT_ONCE: u64 = 64;

pub(super) struct CachedLane {
    disk: Arc<Cached>,
    below: Box<dyn Lane>,
    worker: Worker,
    found: [bool; SEGMENT],
    /// The block of which a part is read.
    page: Box<Page>,
}

/// Goes on with the request unless the step before must wait.
macro_rules! done {
    ($step:expr) => {
        if $step? == Outcome::MustWait {
            return Ok(Outcome::MustWait);
        }
    };
}

/// Whether something came of a request.
fn is_done<T>(outcome: &Result<Outcome<T>, DeviceError>) -> bool {
    matches!(outcome, Ok(Outcome::Done(_)))
}

/// The blocks, cut where segments end.
fn segments(blocks: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut next = blocks.start;
    std::iter::from_fn(move || {
        let end = (next - next % SEGMENT_BLOCKS + SEGMENT_BLOCKS).min(blocks.end);
        (next < end).then(|| std::mem::replace(&mut next, end)..end)
    })
}

/// The whole blocks among these bytes: which is the first, and what they hold.
fn whole_pages(offset_bytes: u64, from: &[u8]) -> (u64, &[Page]) {
    let split = Split::new(offset_bytes, from.len() as u64);
    let whole = &from[split.head_bytes()..][..split.whole_bytes() as usize];
    (split.whole.start, whole.as_chunks().0)
}

/// The blocks that a range of bytes touches.
fn touched(offset_bytes: u64, length_bytes: u64) -> Range<u64> {
    offset_bytes / BLOCK..(offset_bytes + length_bytes).div_ceil(BLOCK)
}

impl Cached {
    /// Whether all of these blocks are in the pool now.
    fn has(&self, blocks: Range<u64>) -> bool {
        segments(blocks).all(|blocks| {
            let (id, first) = place_of(blocks.start);
            self.cache.has(id, first, (blocks.end - blocks.start) as usize)
        })
    }

    /// From here until the answer is dropped nothing is kept of these blocks of one segment.
    fn begin_write(&self, blocks: Range<u64>) -> Writing<'_, ()> {
        let (id, first) = place_of(blocks.start);
        let first = u64::from(first);
        self.cache.begin_write(id, (first, first + blocks.end - blocks.start))
    }

    /// Counts what was done below, or that it failed.
    fn count<T>(&self, outcome: &Result<Outcome<T>, DeviceError>, counter: &AtomicU64, by: u64) {
        match outcome {
            Ok(Outcome::Done(_)) => _ = counter.fetch_add(by, Relaxed),
            Ok(Outcome::MustWait) => {}
            Err(_) => _ = self.counted.failed.fetch_add(1, Relaxed),
        }
    }
}

impl CachedLane {
    pub fn new(disk: Arc<Cached>) -> Result<CachedLane, DeviceError> {
        let (below, worker) = (disk.below.clone().lane()?, disk.cache.worker()?);
        Ok(CachedLane { disk, below, worker, found: [false; SEGMENT], page: Box::new([0; BLOCK_BYTES]) })
    }

    fn check(&self, request: Request, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        check_range(request, offset_bytes, length_bytes, self.disk.below.size_bytes())
    }

    /// Reads blocks of one segment: from the pool, else from below.
    fn read_segment(&mut self, first: u64, into: &mut [Page], manner: Manner) -> Result<Outcome, DeviceError> {
        let cache = &self.disk.cache;
        let (id, page) = place_of(first);
        let found = &mut self.found[..into.len()];
        let token = cache.begin_read(id, (), true);
        cache.get(&mut self.worker, token, page, into, found);
        let mut next = 0;
        // The runs are found one by one: the lane's own array says which.
        loop {
            let run = missing(&self.found[next..into.len()]).next();
            let Some(run) = run.map(|run| next + run.start..next + run.end) else { break };
            next = run.end;
            let mut read = self.read_below(token, first, run.clone(), into, manner);
            if read.is_err() && self.found[run.clone()].contains(&true) {
                read = self.read_without_gaps(token, first, run, into, manner);
            }
            done!(read);
        }
        Ok(Outcome::Done(()))
    }

    /// Reads a run of blocks below, numbers within the segment's part that begins with block `first`, and keeps them.
    fn read_below(
        &mut self,
        token: Token,
        first: u64,
        run: Range<usize>,
        into: &mut [Page],
        manner: Manner,
    ) -> Result<Outcome, DeviceError> {
        let cache = &self.disk.cache;
        let (blocks, start) = (&mut into[run.clone()], first + run.start as u64);
        let begun = Instant::now();
        let read = self.below.read(start * BLOCK, blocks.as_flattened_mut(), manner);
        self.disk.count(&read, &self.disk.counted.reads, blocks.len() as u64);
        if is_done(&read) {
            cache.took_below(self.found[run].iter().filter(|found| !**found).count(), begun.elapsed());
        }
        let kept = if is_done(&read) { blocks } else { &mut [] };
        cache.put(&mut self.worker, token, place_of(start).1, kept);
        read
    }

    /// The same, once the device has failed to: what is in the pool does not have to be read.
    fn read_without_gaps(
        &mut self,
        token: Token,
        first: u64,
        run: Range<usize>,
        into: &mut [Page],
        manner: Manner,
    ) -> Result<Outcome, DeviceError> {
        let (page, mut found) = (place_of(first).1 + run.start as u32, [false; SEGMENT]);
        let found = &mut found[..run.len()];
        self.disk.cache.get_again(&mut self.worker, token, page, &mut into[run.clone()], found);
        for part in exactly_missing(found) {
            done!(self.read_below(token, first, run.start + part.start..run.start + part.end, into, manner));
        }
        Ok(Outcome::Done(()))
    }

    /// Reads the block that a part is of into the lane's page.
    fn read_page(&mut self, part: &Part, manner: Manner) -> Result<Outcome, DeviceError> {
        let mut page = *self.page;
        let read = self.read_segment(part.block, std::slice::from_mut(&mut page), manner);
        *self.page = page;
        read
    }

    /// Has `change` ask below, with nothing kept meanwhile of the blocks it touches, and counts what came of it. `pages` are what
    /// blocks from `first` on are then.
    fn change(
        &mut self,
        blocks: Range<u64>,
        (first, pages): (u64, &[Page]),
        counter: fn(&Cached) -> &AtomicU64,
        change: impl FnOnce(&mut dyn Lane) -> Result<Outcome, DeviceError>,
    ) -> Result<Outcome, DeviceError> {
        let count = blocks.end - blocks.start;
        let mut parts = segments(blocks);
        let writing: [Option<(Range<u64>, Writing<'_, ()>)>; CHANGED_AT_ONCE as usize + 1] =
            array::from_fn(|_| parts.next().map(|blocks| (blocks.clone(), self.disk.begin_write(blocks))));
        let changed = change(&mut *self.below);
        self.disk.count(&changed, counter(&self.disk), count);
        if is_done(&changed) && !pages.is_empty() {
            for (blocks, writing) in writing.into_iter().flatten() {
                let (start, end) = (blocks.start.max(first), blocks.end.min(first + pages.len() as u64));
                if start < end {
                    let pages = &pages[(start - first) as usize..(end - first) as usize];
                    writing.done((), start % SEGMENT_BLOCKS, pages, &[]);
                }
            }
        }
        changed
    }

    /// As [`CachedLane::change`] for a range of any length, in steps; `from` is what its bytes are then, or nothing if that is not known.
    ///
    /// A forced change is a flush, too: if it fails, nobody knows what lies below, and what is kept may be what did not get there.
    fn change_range(
        &mut self,
        offset_bytes: u64,
        length_bytes: u64,
        from: &[u8],
        manner: Manner,
        counter: fn(&Cached) -> &AtomicU64,
        mut change: impl FnMut(&mut dyn Lane, u64, u64) -> Result<Outcome, DeviceError>,
    ) -> Result<Outcome, DeviceError> {
        let (mut next, end) = (offset_bytes, offset_bytes + length_bytes);
        while next < end {
            // Steps end between blocks, so that no more parts of blocks arise.
            let step_end = ((next / BLOCK + CHANGED_AT_ONCE * SEGMENT_BLOCKS) * BLOCK).min(end);
            let length = step_end - next;
            let pages = if from.is_empty() {
                (0, &[][..])
            } else {
                whole_pages(next, &from[(next - offset_bytes) as usize..][..length as usize])
            };
            let changed = self.change(touched(next, length), pages, counter, |below| change(below, next, length));
            if changed.is_err() && manner.fua {
                self.disk.cache.clear();
            }
            done!(changed);
            next = step_end;
        }
        Ok(Outcome::Done(()))
    }
}

impl Lane for CachedLane {
    fn read(&mut self, offset_bytes: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        let length_bytes = into.len() as u64;
        self.check(Request::Read, offset_bytes, length_bytes)?;
        if !manner.may_wait && !self.disk.has(touched(offset_bytes, length_bytes)) {
            return Ok(Outcome::MustWait);
        }
        let split = Split::new(offset_bytes, length_bytes);
        let (head, rest) = into.split_at_mut(split.head_bytes());
        let (whole, tail) = rest.split_at_mut(split.whole_bytes() as usize);
        if let Some(part) = split.head {
            done!(self.read_page(&part, manner));
            head.copy_from_slice(&self.page[part.within]);
        }
        let (pages, first) = (whole.as_chunks_mut().0, split.whole.start);
        for blocks in segments(split.whole) {
            let pages = &mut pages[(blocks.start - first) as usize..(blocks.end - first) as usize];
            done!(self.read_segment(blocks.start, pages, manner));
        }
        if let Some(part) = split.tail {
            done!(self.read_page(&part, manner));
            tail.copy_from_slice(&self.page[part.within]);
        }
        Ok(Outcome::Done(()))
    }

    fn write(&mut self, offset_bytes: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.check(Request::Write, offset_bytes, from.len() as u64)?;
        if !manner.may_wait {
            return Ok(Outcome::MustWait);
        }
        let length_bytes = from.len() as u64;
        self.change_range(
            offset_bytes,
            length_bytes,
            from,
            manner,
            |disk| &disk.counted.writes,
            |below, at, length| below.write(at, &from[(at - offset_bytes) as usize..][..length as usize], manner),
        )
    }

    /// After a flush that failed nobody knows what lies below: what is kept may be what did not get there.
    fn flush(&mut self, manner: Manner) -> Result<Outcome, DeviceError> {
        if !manner.may_wait {
            return Ok(Outcome::MustWait);
        }
        let flushed = self.below.flush(manner);
        self.disk.count(&flushed, &self.disk.counted.flushes, 1);
        flushed.inspect_err(|_| self.disk.cache.clear())
    }

    fn discard(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome, DeviceError> {
        self.check(Request::Discard, offset_bytes, length_bytes)?;
        if !manner.may_wait {
            return Ok(Outcome::MustWait);
        }
        self.change_range(
            offset_bytes,
            length_bytes,
            &[],
            manner,
            |disk| &disk.counted.discards,
            |below, at, length| below.discard(at, length, manner),
        )
    }

    fn write_zeroes(
        &mut self,
        offset_bytes: u64,
        length_bytes: u64,
        zeroes: Zeroes,
        manner: Manner,
    ) -> Result<Outcome, DeviceError> {
        self.check(Request::WriteZeroes, offset_bytes, length_bytes)?;
        if !manner.may_wait {
            return Ok(Outcome::MustWait);
        }
        self.change_range(
            offset_bytes,
            length_bytes,
            &[],
            manner,
            |disk| &disk.counted.writes,
            |below, at, length| below.write_zeroes(at, length, zeroes, manner),
        )
    }

    fn extent(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome<Extent>, DeviceError> {
        self.below.extent(offset_bytes, length_bytes, manner)
    }
}
