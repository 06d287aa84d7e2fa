//! The group that a worker has read from last, decoded: whoever reads one page of it often reads the next.

use super::{FRAME_BYTES_MAX, GROUP_BYTES, GroupId};
use crate::backing::buffer::Buffer;
use crate::checksum;
use crate::codec::Codecs;
use crate::error::StoreError;
use crate::page::{PAGE_SIZE, Page};
use crate::slot::Member;
use crate::store::Store;

/// Room for one group, compressed and not: 88 KiB, touched when the first is read.
pub(crate) struct Opened {
    frame: Buffer,
    pages: Buffer,
    opened: Option<Which>,
}

/// What lies in the room.
#[derive(Clone, Copy)]
struct Which {
    group: GroupId,
    /// How many had been made by then: when there are more, the number may be another group's.
    made: u64,
    length: usize,
}

impl Opened {
    pub fn new() -> Result<Opened, StoreError> {
        Ok(Opened { frame: Buffer::new(FRAME_BYTES_MAX)?, pages: Buffer::new(GROUP_BYTES)?, opened: None })
    }

    /// The address ranges of the room.
    pub fn ranges(&self) -> [(usize, usize); 2] {
        [self.frame.range(), self.pages.range()]
    }

    /// Whatever lies in the room is nothing.
    pub fn forget(&mut self) {
        self.opened = None;
    }

    /// One page of a group, if it is what was stored. The caller has its slot locked, so that the group stays.
    pub fn page(&mut self, store: &Store, codecs: &mut Codecs, member: &Member) -> Option<&Page> {
        let made = store.groups.made();
        let is_open = |which: &Which| which.group == member.group && which.made == made;
        let which = match self.opened.take().filter(is_open) {
            Some(which) => which,
            None => {
                let frame = store.groups.copy(member.group, &store.arena, &mut self.frame)?;
                let length = codecs.decompress_group(&self.frame[..frame], &mut self.pages)?;
                Which { group: member.group, made, length }
            }
        };
        self.opened = Some(which);
        let page = self.pages[..which.length].as_chunks::<PAGE_SIZE>().0.get(usize::from(member.place))?;
        (checksum::of(page, None) == member.checksum).then_some(page)
    }
}
