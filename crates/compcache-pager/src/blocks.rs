//! The control blocks of the program's threads: their pages are never evicted.
//!
//! The kernel clears a word there when the thread ends, and does not wait for a pager when it does. And in the child of a fork libc goes
//! through the blocks of all threads before anybody answers faults.
//!
//! Which pages these are stands in a sorted list under the pager's lock; what is unmapped goes from it. A thread of the program's may not take
//! that lock ([`crate::keep`]): it leaves the address where the evictor finds it before it looks for pages that can go. There it stays until no
//! event is on its way: the unmapping of what was there before must not take it from the list again.

use crate::memory::{PAGE, boxed_zeroed};
use crate::pager::{Channel, KEPT_MAX, Pager, State};
use crate::regions::Ranges;
use crate::sys::RobustList;
use crate::{process, sys};
use alloc::boxed::Box;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering::*};

/// Blocks that can wait to be taken into the list. Who asks the kernel which threads there are finds those that had no room.
const FRESH_MAX: usize = 4096;

/// The blocks that are not in the list yet.
pub(crate) struct FreshBlocks {
    /// Addresses in them, 0 for none.
    fresh: Box<[AtomicUsize; FRESH_MAX]>,
    /// How many were noted since they were last taken. It may say more than there are, in a copy of the process for one, until they are taken again.
    count: AtomicUsize,
}

impl FreshBlocks {
    pub fn new() -> FreshBlocks {
        // SAFETY: numbers are valid when zero.
        FreshBlocks { fresh: unsafe { boxed_zeroed() }, count: AtomicUsize::new(0) }
    }

    /// Whether there are any.
    pub fn are_waiting(&self) -> bool {
        self.count.load(Acquire) > 0
    }

    /// Notes the block that an address lies in. Places are filled from the first on.
    pub fn note(&self, address: usize) {
        for place in self.fresh.iter() {
            match place.load(Acquire) {
                0 if place.compare_exchange(0, address, AcqRel, Acquire).is_ok() => {
                    self.count.fetch_add(1, AcqRel);
                    return;
                }
                // libc gives stacks that it has kept to new threads.
                there if there / PAGE == address / PAGE => return,
                _ => {}
            }
        }
    }

    /// Takes all into the list.
    pub fn take_into(&self, known: &mut Ranges<KEPT_MAX>) {
        // Before: whose count comes after is seen the next time, if not now.
        self.count.swap(0, AcqRel);
        for place in self.fresh.iter() {
            let address = place.load(Acquire);
            if address != 0 {
                known.add_at_least(pages_of(address));
                place.store(0, Release);
            }
        }
    }

    /// Whether one of them may be in a range.
    pub fn are_in(&self, range: &Range<usize>) -> bool {
        let blocks = self.fresh.iter().map(|place| place.load(Acquire)).filter(|block| *block != 0);
        blocks.map(pages_of).any(|pages| pages.start < range.end && range.start < pages.end)
    }

    /// Whether an address lies near one of them.
    pub fn are_near(&self, address: usize) -> bool {
        // There may be holes: places are filled while others are emptied.
        let blocks = self.fresh.iter().map(|place| place.load(Acquire)).filter(|block| *block != 0);
        self.are_waiting() && blocks.map(pages_of).any(|pages| pages.contains(&address))
    }
}

/// The page that an address in a block lies on, and its neighbours.
fn pages_of(address: usize) -> Range<usize> {
    let page = address / PAGE * PAGE;
    page.saturating_sub(2 * PAGE)..page + 3 * PAGE
}

impl Pager {
    /// Notes the control block of a thread that the program has made, by an address in it: the page it lies on, and its
    /// neighbours, are never evicted ([`crate::blocks`]).
    pub fn add_control_block(&self, address: usize) {
        self.many_threads.store(true, Relaxed);
        self.note_control_block(address);
    }

    fn note_control_block(&self, address: usize) {
        self.brake.bar(&pages_of(address));
        // Where it was to be written there may be something else by now.
        if address >= 2 * PAGE {
            self.fresh_blocks.note(address);
            self.touch_control_block(address);
        }
    }

    /// What was noted is taken into the list, if nothing that is still to be told can take it from there. The caller holds the lock.
    pub(crate) fn take_fresh_blocks(&self, channel: &Channel, state: &mut State) {
        if self.fresh_blocks.are_waiting() && self.is_settled(state) && channel.is_quiet() {
            self.fresh_blocks.take_into(&mut state.blocks);
        }
    }

    /// Brings a control block back, should it have been evicted before it was known for one. The caller holds no lock.
    fn touch_control_block(&self, address: usize) {
        for near in [address - PAGE, address, address + PAGE] {
            // A stack may lie beside memory of ours: a frame that is touched is not empty any more.
            if !self.never.overlaps(&(near..near + 1)) {
                sys::bring_back(near & !3);
            }
        }
    }

    /// Notes the control blocks of all threads there are.
    ///
    /// The preloaded object sees only threads that are made through it: who asks the loader for libc's own
    /// `pthread_create` (jemalloc does) passes it by. The kernel knows every thread's list of robust futexes, and libc
    /// keeps that in the control block.
    pub fn note_threads(&self) {
        let mut threads = 0;
        process::for_each_thread(|thread| {
            threads += 1;
            let ours = self.robust as usize;
            let head =
                sys::robust_list_of(thread).filter(|head| !(ours..ours + size_of::<RobustList>()).contains(head));
            if let Some(head) = head
                && self.state.lock().blocks.containing(head).is_none()
            {
                self.note_control_block(head);
            }
        });
        if threads > self.own_threads() + 1 {
            self.many_threads.store(true, Relaxed);
        }
    }

    /// Whether an address lies near a thread's control block.
    pub(crate) fn is_control_block(&self, state: &State, address: usize) -> bool {
        state.blocks.containing(address).is_some() || self.fresh_blocks.are_near(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the blocks of threads with 32 KiB of stack lie.
    fn block(thread: usize) -> usize {
        0x7f00_0000_0000 + thread * (32 << 10) + 700
    }

    #[test]
    fn blocks_of_any_number_of_threads_are_known_and_go_with_their_memory() {
        const THREADS: usize = KEPT_MAX + 1000;
        let fresh = FreshBlocks::new();
        // SAFETY: pairs of numbers are valid when zero.
        let mut known: Box<Ranges<KEPT_MAX>> = unsafe { boxed_zeroed() };
        for thread in 0..THREADS {
            fresh.note(block(thread));
            fresh.note(block(thread) + 8);
            assert!(fresh.are_near(block(thread)) && fresh.are_near(block(thread) - PAGE));
            if thread % 100 == 0 {
                fresh.take_into(&mut known);
                assert!(!fresh.are_waiting());
            }
        }
        fresh.take_into(&mut known);
        assert!((0..THREADS).all(|thread| known.containing(block(thread)).is_some()));
        let stack = block(7) / PAGE * PAGE - 4 * PAGE..block(7) / PAGE * PAGE + 4 * PAGE;
        known.remove_at_most(stack);
        assert!(known.containing(block(7)).is_none() && known.containing(block(8)).is_some());
    }

    #[test]
    fn more_than_have_room_are_left_to_who_asks_the_kernel() {
        let fresh = FreshBlocks::new();
        // SAFETY: pairs of numbers are valid when zero.
        let mut known: Box<Ranges<KEPT_MAX>> = unsafe { boxed_zeroed() };
        (0..FRESH_MAX + 10).for_each(|thread| fresh.note(block(thread)));
        fresh.take_into(&mut known);
        assert!(!fresh.are_waiting() && known.containing(block(FRESH_MAX)).is_none());
        fresh.note(block(FRESH_MAX));
        assert!(fresh.are_near(block(FRESH_MAX)));
    }
}
