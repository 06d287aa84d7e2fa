//! A pool in a process that has just been copied by fork.

#![allow(unsafe_code, reason = "what makes the call sound is the caller's to know")]

use core::sync::atomic::Ordering::Relaxed;

use super::Pool;
use crate::page::PageIndex;
use crate::slot::{self, Slot};
use crate::table::LeafCache;

impl Pool {
    /// Frees the lock of the slot of `index`, and of its group if it is in one, which a thread of the parent may have been looking at when
    /// the process was copied: that thread does not exist here. Its worker must forget what it was in the middle of
    /// ([`Worker::forget_group`](crate::Worker::forget_group)).
    ///
    /// # Safety
    /// Only in the child of a fork, by its only thread, and if no thread of the parent was doing anything with the store
    /// at the moment of the copy but looking at this one page ([`Pool::look_at`]).
    pub unsafe fn free_reader_after_fork(&self, index: PageIndex) {
        if !index.is_valid() {
            return;
        }
        let Some(meta) = self.core.tree.meta(&self.store.tables, index) else { return };
        meta.fetch_and(!(slot::LOCKED | slot::WAITERS), Relaxed);
        let guard = self.core.tree.lock(&self.store.tables, index, &mut LeafCache::default());
        if let Some(Slot::Grouped(member)) = guard.map(|guard| guard.get()) {
            self.store.groups.free_lock(member.group);
        }
    }
}
