//! A copy of the process that cannot be paged gets everything that is stored back in its place, and goes on without a pager.
//!
//! The kernel writes past a mapping's rights only for who may open /proc/self/mem, which a process that has changed its user, or
//! has said that it must not be dumped, may not. Then the mapping is made writable as long as its pages are written; no thread of
//! the program runs yet.

use crate::fork::ALL_PAGES;
use crate::maps::{self, MapsBuffer};
use crate::memory::PAGE;
use crate::pager::Pager;
use crate::shared::Trouble;
use crate::spill::read_stored;
use crate::table::{Phase, Word};
use crate::{copies, events, process, sys};
use compcache_store::{Page, Worker};
use core::ops::Range;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::mm::MprotectFlags;

/// Writes every stored page back to its place, unless it is there, and the newer. Nothing is registered, and the program's only thread waits in fork.
pub fn restore_all(pager: &Pager, worker: &mut Worker, buffer: &mut MapsBuffer) {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let memory = rustix::fs::open(c"/proc/thread-self/mem", flags, Mode::empty()).ok();
    // Where the first could not be opened, a limit of one more descriptor may allow this.
    let maps = process::open(c"/proc/thread-self/maps");
    let mut rights = Rights { maps, buffer, lifted: None };
    let mut contents: Page = [0; PAGE];
    let mut state = pager.state.lock();
    events::for_each_known(&mut state, ALL_PAGES, |state, page, word| {
        if word.phase() == Phase::Stored && !word.is_here() {
            if !read_stored(pager, worker, page, &mut contents) {
                process::die(pager, Trouble::LostPage);
            }
            let address = page as usize * PAGE;
            let written = pager.fork_turn.is_stack_in_use(address)
                || sys::write_own_memory(address, &contents)
                || memory
                    .as_ref()
                    .is_some_and(|memory| rustix::io::pwrite(memory, &contents, address as u64) == Ok(PAGE))
                // What the copy did not get (MADV_DONTFORK) is nobody's now.
                || !sys::is_mapped(address)
                || rights.lift(pager, address) && sys::write_own_memory(address, &contents);
            if !written && state.regions.containing(address).is_some() {
                process::die(pager, Trouble::LostPage);
            }
        }
        copies::drop_object(pager, state, page, word);
        state.table.update(page, Word::UNKNOWN);
    });
    rights.put_back(pager);
}

/// The rights of mappings, one of which is writable for the moment.
struct Rights<'a> {
    maps: Option<OwnedFd>,
    buffer: &'a mut MapsBuffer,
    lifted: Option<(Range<usize>, MprotectFlags)>,
}

impl Rights<'_> {
    /// Makes the page at `address` writable, until the next one is. False when that cannot be, or could not be undone.
    fn lift(&mut self, pager: &Pager, address: usize) -> bool {
        self.put_back(pager);
        let Some(maps) = &self.maps else { return false };
        let mut found = None;
        maps::for_each(maps.as_fd(), self.buffer, |mapping| {
            if (mapping.start..mapping.end).contains(&address) {
                found = Some(mapping);
            }
        });
        let Some(mapping) = found else { return false };
        // With all it has: who may not make memory executable could not put that back.
        let writable = mapping.rights | MprotectFlags::READ | MprotectFlags::WRITE;
        // As a whole it stays one mapping. Where a limit on data is against that, it is done page by page.
        self.lifted = [mapping.start..mapping.end, address..address + PAGE]
            .into_iter()
            .find(|range| protect(range, writable))
            .map(|range| (range, mapping.rights));
        self.lifted.is_some()
    }

    /// A program may rely on what it must not touch.
    fn put_back(&mut self, pager: &Pager) {
        if let Some((range, rights)) = self.lifted.take()
            && !protect(&range, rights)
        {
            process::die(pager, Trouble::Bug);
        }
    }
}

fn protect(range: &Range<usize>, rights: MprotectFlags) -> bool {
    // SAFETY: a range of the program's, whose only thread waits in fork; at the end it has the rights that it had.
    unsafe { rustix::mm::mprotect(range.start as *mut _, range.len(), rights) }.is_ok()
}
