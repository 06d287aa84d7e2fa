//! Writing a page again that is stored already, and has changed little since, or not at all.

use super::write::COMPRESSED_MAX;
use super::{Pool, Written};
use crate::codec::Change;
use crate::error::StoreError;
use crate::page::{self, Page, PageIndex};
use crate::slot::Slot;
use crate::worker::Worker;

/// How a page was written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rewritten {
    /// It is stored already as it is.
    Unchanged,
    /// The old object stays, and what has changed stands behind it: so many bytes in all.
    Patched {
        /// Length of the object, 1..=3968.
        bytes: u16,
    },
    /// As any other page, for too much has changed.
    Written(Written),
}

impl Pool {
    /// As [`Pool::write`], for owners that have kept the page stored while they had it in memory. To compare costs a third
    /// of compressing; it is in vain where much has changed. A page that is unchanged counts as used, and as no write.
    ///
    /// # Errors
    /// As [`Pool::write`].
    pub fn rewrite(&self, worker: &mut Worker, index: PageIndex, page: &Page) -> Result<Rewritten, StoreError> {
        worker.must_be_of(&self.store);
        let start_ns = worker.now_ns();
        match self.patch(worker, index, page) {
            Some(Rewritten::Patched { bytes }) => {
                let end_ns = worker.now_ns();
                self.core.counters.shard(worker.number).writes.record(end_ns.saturating_sub(start_ns));
                Ok(Rewritten::Patched { bytes })
            }
            Some(rewritten) => Ok(rewritten),
            None => self.write_from(worker, index, page, start_ns).0.map(Rewritten::Written),
        }
    }

    /// `None`, and nothing done, where the page must be written as any other.
    fn patch(&self, worker: &mut Worker, index: PageIndex, page: &Page) -> Option<Rewritten> {
        let store = &self.store;
        if !index.is_valid() {
            return None;
        }
        let mut guard = self.lock_for_reading(worker, index)?;
        let old = match guard.get() {
            Slot::Stored(old) => old,
            Slot::SameFilled { word } if page::repeated_word(page) == Some(word) => {
                guard.touch(store.age());
                return Some(Rewritten::Unchanged);
            }
            _ => return None,
        };
        let bytes = self.checked_bytes(&guard, &old)?;
        let change = match old.codec {
            Some(id) => worker.codecs.change(self.codec(), id, bytes, page, &store.dictionaries),
            None if bytes == page => Change::None,
            None => Change::Much,
        };
        match change {
            Change::None => {
                guard.touch(store.age());
                Some(Rewritten::Unchanged)
            }
            Change::Patch(id, bytes) if bytes.len() <= COMPRESSED_MAX => {
                let length = bytes.len() as u16;
                store.admit(&mut worker.credit).ok()?;
                let _reservation = self.core.reserve().ok()?;
                self.place(guard, Some(id), bytes, &mut worker.credit, worker.number).ok()?;
                Some(Rewritten::Patched { bytes: length })
            }
            Change::Patch(..) | Change::Much => None,
        }
    }
}
