//! One thread's way to an origin.

use std::ops::Range;
use std::sync::Arc;

use compcache_cache::Aligned;
use rustix::io::Errno;

use super::{Origin, below};
use crate::device::{BLOCK_BYTES, Extent, Lane, Manner, Outcome, Request, Zeroes, check_range};
use crate::error::DeviceError;
use crate::range::{Part, Split};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Blocks that share a stripe because they are neighbours, and the most that are read or written at a time: a megabyte.
pub(super) const SEGMENT_BLOCKS: u64 = 256;
/// Blocks that are made a hole, or zeroes, by one call: 64 MiB.
const FREED_AT_ONCE: usize = 64 * SEGMENT_BLOCKS as usize;

const DONE: Result<Outcome, DeviceError> = Ok(Outcome::Done(()));

pub(super) struct OriginLane {
    origin: Arc<Origin>,
    buffer: Aligned,
}

/// The blocks, cut where segments end.
fn segments(blocks: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut next = blocks.start;
    std::iter::from_fn(move || {
        let end = (next - next % SEGMENT_BLOCKS + SEGMENT_BLOCKS).min(blocks.end);
        (next < end).then(|| std::mem::replace(&mut next, end)..end)
    })
}

fn length_of(blocks: &Range<u64>) -> usize {
    (blocks.end - blocks.start) as usize * BLOCK_BYTES
}

impl OriginLane {
    pub fn new(origin: Arc<Origin>) -> OriginLane {
        OriginLane { origin, buffer: Aligned::new(SEGMENT_BLOCKS as usize * BLOCK_BYTES) }
    }

    fn check(&self, request: Request, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        check_range(request, offset_bytes, length_bytes, self.origin.size_bytes)
    }

    /// Lets `change` loose on a part of a block; nobody else changes the block meanwhile.
    fn change_part(&mut self, part: Part, forced: bool, change: impl FnOnce(&mut [u8])) -> Result<(), DeviceError> {
        let _alone = self.origin.stripes.have(part.block);
        let block = &mut self.buffer.bytes()[..BLOCK_BYTES];
        self.origin.read(part.block * BLOCK, block)?;
        change(&mut block[part.within]);
        self.origin.write(part.block * BLOCK, block, forced)
    }

    /// Makes blocks zeroes in the first way of three that the origin has.
    fn zero_blocks(&mut self, blocks: Range<u64>, zeroes: Zeroes) -> Result<(), DeviceError> {
        let (offset, length) = (blocks.start * BLOCK, length_of(&blocks) as u64);
        let _shared = self.origin.stripes.share_all();
        if zeroes == Zeroes::MayBeHoles && self.origin.punch(offset, length)? || self.origin.zero(offset, length)? {
            return Ok(());
        }
        let from = self.buffer.bytes();
        from.fill(0);
        segments(blocks)
            .try_for_each(|blocks| self.origin.write(blocks.start * BLOCK, &from[..length_of(&blocks)], false))
    }
}

impl Lane for OriginLane {
    fn read(&mut self, offset_bytes: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.check(Request::Read, offset_bytes, into.len() as u64)?;
        if !manner.may_wait {
            return Ok(Outcome::MustWait);
        }
        let (mut offset, mut into) = (offset_bytes, into);
        let end = offset_bytes + into.len() as u64;
        for blocks in segments(offset / BLOCK..end.div_ceil(BLOCK)) {
            let from = &mut self.buffer.bytes()[..length_of(&blocks)];
            self.origin.read(blocks.start * BLOCK, from)?;
            let within = (offset - blocks.start * BLOCK) as usize;
            let (now, later) = into.split_at_mut((from.len() - within).min(into.len()));
            now.copy_from_slice(&from[within..][..now.len()]);
            offset += now.len() as u64;
            into = later;
        }
        DONE
    }

    fn write(&mut self, offset_bytes: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError> {
        self.check(Request::Write, offset_bytes, from.len() as u64)?;
        if !manner.may_wait {
            return Ok(Outcome::MustWait);
        }
        let split = Split::new(offset_bytes, from.len() as u64);
        let (head, rest) = from.split_at(split.head_bytes());
        let (mut whole, tail) = rest.split_at(split.whole_bytes() as usize);
        if let Some(part) = split.head {
            self.change_part(part, manner.fua, |bytes| bytes.copy_from_slice(head))?;
        }
        for blocks in segments(split.whole) {
            let (now, later) = whole.split_at(length_of(&blocks));
            let below = &mut self.buffer.bytes()[..now.len()];
            below.copy_from_slice(now);
            let _shared = self.origin.stripes.share(blocks.start);
            self.origin.write(blocks.start * BLOCK, below, manner.fua)?;
            whole = later;
        }
        if let Some(part) = split.tail {
            self.change_part(part, manner.fua, |bytes| bytes.copy_from_slice(tail))?;
        }
        DONE
    }

    fn flush(&mut self, manner: Manner) -> Result<Outcome, DeviceError> {
        if manner.may_wait { self.origin.flush().map(Outcome::Done) } else { Ok(Outcome::MustWait) }
    }

    /// Fails with EOPNOTSUPP, and has done nothing, where the origin has no holes.
    fn discard(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome, DeviceError> {
        self.check(Request::Discard, offset_bytes, length_bytes)?;
        if !manner.may_wait {
            return Ok(Outcome::MustWait);
        }
        let whole = Split::new(offset_bytes, length_bytes).whole;
        let end = whole.end;
        for start in whole.step_by(FREED_AT_ONCE) {
            let _shared = self.origin.stripes.share_all();
            let count = (end - start).min(FREED_AT_ONCE as u64);
            if !self.origin.punch(start * BLOCK, count * BLOCK)? {
                return Err(below(Errno::OPNOTSUPP));
            }
        }
        if manner.fua { self.flush(manner) } else { DONE }
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
        let split = Split::new(offset_bytes, length_bytes);
        for part in [split.head, split.tail].into_iter().flatten() {
            self.change_part(part, false, |bytes| bytes.fill(0))?;
        }
        let end = split.whole.end;
        for start in split.whole.step_by(FREED_AT_ONCE) {
            self.zero_blocks(start..end.min(start + FREED_AT_ONCE as u64), zeroes)?;
        }
        if manner.fua { self.flush(manner) } else { DONE }
    }

    /// All of it is data: which parts of a file are holes is its file system's business.
    fn extent(&mut self, offset_bytes: u64, length_bytes: u64, _: Manner) -> Result<Outcome<Extent>, DeviceError> {
        self.check(Request::Extent, offset_bytes, length_bytes)?;
        Ok(Outcome::Done(Extent { length_bytes, is_hole: false }))
    }
}
