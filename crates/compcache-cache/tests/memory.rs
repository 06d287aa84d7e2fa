//! What a cache says that it takes is what it takes.
//!
//! The allocator of this test program counts bytes; so it has one test.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use compcache_cache::{Cache, FileId};
use compcache_store::Codec;

static TAKEN_BYTES: AtomicU64 = AtomicU64::new(0);

struct Counting;

#[global_allocator]
static COUNTING_ALLOCATOR: Counting = Counting;

/// What the system's allocator takes for it.
fn taken(bytes: usize) -> u64 {
    (bytes + 8).next_multiple_of(16).max(32) as u64
}

// SAFETY: passes everything on to the system's allocator, whose contract it thereby keeps; `realloc` is the trait's own, made of these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN_BYTES.fetch_add(taken(layout.size()), Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        TAKEN_BYTES.fetch_sub(taken(layout.size()), Relaxed);
        // SAFETY: as for `alloc`.
        unsafe { System.dealloc(old, layout) }
    }
}

#[test]
fn the_memory_of_the_index_is_what_is_counted() {
    // Files, and pages of each.
    for (files, pages) in [(1, 60_000), (60_000, 1), (5000, 11), (3000, 20), (600, 100)] {
        let cache = Cache::new(1 << 30, Codec::Lz4).unwrap();
        let mut worker = cache.worker().unwrap();
        let before = (cache.stats().mem_used_total, TAKEN_BYTES.load(Relaxed));
        let zeroes = vec![[0; 4096]; 50];
        for ino in 0..files {
            for first in (0..pages).step_by(zeroes.len()) {
                let token = cache.begin_read(FileId { dev: 1, ino }, (), true);
                cache.put(&mut worker, token, first, &zeroes[..(pages - first).min(50) as usize]);
            }
        }
        let taken = TAKEN_BYTES.load(Relaxed) - before.1;
        let stats = cache.stats();
        assert_eq!(stats.pages_stored, files * u64::from(pages));
        // With the store's tables, which are no affair of the allocator's.
        let counted = stats.mem_used_total - before.0;
        assert!(taken < counted + counted / 16, "{files} files: {taken} bytes taken, {counted} counted");
        assert!(counted < 2 * taken, "{files} files: {taken} bytes taken, {counted} counted");
    }
}
