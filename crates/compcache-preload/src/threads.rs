//! What libc keeps of the program's threads, as far as it goes through it in the child of a fork.
//!
//! There it forgets the threads that the child does not have, before any handler runs: it writes to each one's control
//! block and clears the values of its keys, the first of which lie in the block and the others in the heap. What is not
//! there then reads as zeroes, and stays so: the bytes around it are lost. So all of it is touched before the fork.
//!
//! Where it lies libc itself says: it describes its structures for debuggers (libthread_db), in symbols that it exports.
//! A glibc before 2.34 keeps its list to itself: there the control blocks that the pager knows must do.

use crate::libc::symbol;
use alloc::boxed::Box;
use compcache_pager::memory::PAGE;
use compcache_pager::read_own_memory;
use core::ffi::CStr;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering::*};

/// A list longer than this is not one: threads come and go while it is read.
const THREADS_MAX: usize = 65_536;
/// Blocks of values that a thread can have.
const KEY_BLOCKS: usize = 32;
/// A list's head: the first and the last.
const HEAD_BYTES: usize = 16;

/// Where things are: addresses, offsets and sizes, bytes.
struct Layout {
    /// Heads of the lists of threads on libc's own stacks, and of stacks that are free.
    used: usize,
    free: usize,
    /// Where in a control block the list goes on.
    list: usize,
    /// Where in a control block its blocks of values are named, and how large each is.
    keys: usize,
    key_block_bytes: usize,
    block_bytes: usize,
}

/// Null where libc does not say.
static LAYOUT: AtomicPtr<Layout> = AtomicPtr::new(null_mut());

/// Finds out where things are. Called once, before the program runs: looking up symbols takes locks of the loader's.
pub fn learn() {
    if let Some(layout) = described() {
        LAYOUT.store(Box::into_raw(Box::new(layout)), Release);
    }
}

fn described() -> Option<Layout> {
    let loader = symbol(c"_rtld_global") as usize;
    if loader == 0 {
        return None;
    }
    Some(Layout {
        used: loader + field(c"_thread_db_rtld_global__dl_stack_used")?,
        // Described nowhere. It follows the list of threads on stacks of the program's own; should it ever not, then
        // something else is read, which does no harm.
        free: loader + field(c"_thread_db_rtld_global__dl_stack_user")? + HEAD_BYTES,
        list: field(c"_thread_db_pthread_list")?,
        keys: field(c"_thread_db_pthread_specific")?,
        key_block_bytes: size(c"_thread_db_sizeof_pthread_key_data_level2")?,
        block_bytes: size(c"_thread_db_sizeof_pthread")?,
    })
}

/// The offset of a field that libc describes: its size in bits, how many, and where.
fn field(name: &CStr) -> Option<usize> {
    let description = symbol(name).cast::<[u32; 3]>();
    // SAFETY: null, or what libc exports under such a name.
    unsafe { description.as_ref() }.map(|&[_, _, offset]| offset as usize)
}

/// A size that libc describes.
fn size(name: &CStr) -> Option<usize> {
    // SAFETY: null, or what libc exports under such a name.
    unsafe { symbol(name).cast::<u32>().as_ref() }.map(|&bytes| bytes as usize)
}

/// Touches the control blocks of all threads, and what they name.
///
/// The lists change while they are read, and stacks are unmapped: so every word is read by the kernel, which says when
/// it is not there. A thread that comes or goes now is in memory: it has just been written to.
pub fn touch_all() {
    // SAFETY: null, or a layout that is never freed.
    let Some(layout) = (unsafe { LAYOUT.load(Acquire).as_ref() }) else { return };
    // The threads are put before the first free stack, which is told so.
    if let Some(first) = word(layout.free) {
        word(first);
    }
    let mut node = word(layout.used);
    for _ in 0..THREADS_MAX {
        let Some(this) = node.filter(|&this| this != layout.used) else { break };
        touch_thread(layout, this.wrapping_sub(layout.list));
        node = word(this);
    }
}

fn touch_thread(layout: &Layout, block: usize) {
    touch(block, layout.block_bytes);
    let mut key_blocks = [0; KEY_BLOCKS];
    if read_words(block.wrapping_add(layout.keys), &mut key_blocks) {
        key_blocks.into_iter().filter(|&values| values != 0).for_each(|values| touch(values, layout.key_block_bytes));
    }
}

/// Touches what libc keeps in the calling thread's local storage: errno, its arena, its locale. It may lie far from the control block, for the program's own
/// variables come between.
pub fn touch_libcs_own() {
    const EITHER_SIDE: usize = 512;
    touch(crate::libc::errno_address().wrapping_sub(EITHER_SIDE), 2 * EITHER_SIDE);
}

/// Sees to it that `bytes` from `start` on are there, if they can be.
fn touch(start: usize, bytes: usize) {
    let last = start.wrapping_add(bytes - 1);
    for at in (start..last).step_by(PAGE).chain([last]) {
        read_own_memory(at, &mut [0]);
    }
}

fn word(address: usize) -> Option<usize> {
    let mut words = [0];
    read_words(address, &mut words).then_some(words[0])
}

fn read_words<const N: usize>(address: usize, words: &mut [usize; N]) -> bool {
    // SAFETY: any bytes are valid words.
    let bytes = unsafe { core::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), size_of::<[usize; N]>()) };
    read_own_memory(address, bytes)
}
