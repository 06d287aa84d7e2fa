//! A pool in a process that has just been copied by fork.

#![allow(unsafe_code, reason = "what makes the call sound is the caller's to know")]

use core::sync::atomic::Ordering::Relaxed;

use super::Pool;
use crate::page::PageIndex;
use crate::slot;

impl Pool {
    /// Frees the lock of the slot of `index`, which a thread of the parent may have been reading when the process was
    /// copied: that thread does not exist here.
    ///
    /// # Safety
    /// Only in the child of a fork, by its only thread, and if no thread of the parent was doing anything with the store
    /// at the moment of the copy but reading this one page, and no pool of the store was ever recompressed: to read a page of a
    /// group takes more locks.
    pub unsafe fn free_reader_after_fork(&self, index: PageIndex) {
        if let Some(meta) = self.core.tree.meta(&self.store.tables, index) {
            meta.fetch_and(!(slot::LOCKED | slot::WAITERS), Relaxed);
        }
    }
}
