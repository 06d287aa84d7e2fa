//! The engine: memory pages in, memory pages out, compressed in between.
//!
//! A [`Store`] owns an arena and a memory limit; a [`Pool`] is one address space of pages in it, with its own codec, limit
//! and statistics. A thread that reads or writes has a [`Worker`].
//!
//! ```
//! use compcache_store::{Codec, PageIndex, PoolConfig, Read, Store, StoreConfig, Worker};
//!
//! let store = Store::new(StoreConfig { limit_bytes: 64 << 20, ..StoreConfig::default() })?;
//! let pool = store.create_pool(PoolConfig { codec: Codec::Lz4, ..PoolConfig::default() })?;
//! let mut worker = Worker::new(&store, || 0)?;
//!
//! let mut page = [0u8; 4096];
//! page[..5].copy_from_slice(b"hello");
//! pool.write(&mut worker, PageIndex(7), &page)?;
//!
//! let mut back = [0u8; 4096];
//! assert_eq!(pool.read(&mut worker, PageIndex(7), &mut back)?, Read::Done);
//! assert_eq!(back, page);
//! assert_eq!(pool.read(&mut worker, PageIndex(8), &mut back)?, Read::Absent);
//! # Ok::<(), compcache_store::StoreError>(())
//! ```
//!
//! # What may be relied on
//! - A page that is read is the page that was written, or an error: every object is checked before it is decoded.
//! - Reading, writing, discarding, moving and compacting allocate nothing: contexts and buffers are made with the worker,
//!   objects and tables come from address ranges of the store's own. No standard library, no thread-local storage, no
//!   clock, no thread: the crate runs on threads of programs it knows nothing about.
//! - A page that has been written back takes no memory but its slot, and is read from the backing by whoever may wait for that
//!   ([`Pool::fetch`]). Everybody else is told where it is ([`Read::OnBacking`]).
//! - Pages that were not used for a while can be compressed together ([`Pool::recompress`]); they are read, written and discarded
//!   one by one as before.
//! - Memory stays below the limit, except for the tables of moved pages (twelve bytes a page).
//!
//! # Lock order
//! 0. a flight of a backing, its cleaning (both while its medium is written to; nobody waits for them), its plan (while it gathers)
//! 1. the registry of pools (one step of compaction or of a flight; making and dropping pools), then the settling of one
//! 2. slots, by page index when two are held
//! 3. the growth of tables (takes slots only by trying); what is set aside for groups, then a group of pages
//! 4. a size class, then the source of spans; the table of groups
//! 5. the growth of a region; the segments of a backing, and its count of what is written in a day
//!
//! Every lock but the first two is held for well under a microsecond, system calls that grow a region aside; the lock of a
//! slot also while its object is decoded, and what is set aside for groups while one is copied to its place. Two are held longer where there is much:
//! a size class while a pass of compaction begins (it looks at each span of the class that has room), and the segments of a backing while one to be
//! cleaned is chosen (a nanosecond each).
//!
//! Arithmetic, waste and worst cases: docs/design/pool.md; of the backing: docs/design/backing.md.

#![cfg_attr(not(any(test, loom)), no_std)]
#![deny(unsafe_code)]

extern crate alloc;

#[cfg(not(loom))]
mod ages;
#[cfg(not(loom))]
mod arena;
#[cfg(not(loom))]
mod backing;
#[cfg(not(loom))]
mod budget;
#[cfg(not(loom))]
mod checksum;
#[cfg(not(loom))]
mod codec;
#[cfg(not(loom))]
mod compact;
#[cfg(not(loom))]
mod config;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod futex;
#[cfg(not(loom))]
mod groups;
#[cfg(not(loom))]
mod latency;
#[cfg(not(loom))]
mod lock;
#[cfg(not(loom))]
mod page;
#[cfg(not(loom))]
mod pool;
#[cfg(not(loom))]
mod reclaim;
#[cfg(not(loom))]
mod recompression;
#[cfg(not(loom))]
mod region;
#[cfg(not(loom))]
mod slot;
#[cfg(not(loom))]
mod stats;
#[cfg(not(loom))]
mod store;
#[cfg(not(loom))]
mod table;
#[cfg(not(loom))]
mod worker;

mod sync;

#[cfg(not(loom))]
pub use crate::{
    ages::{Aged, Ages},
    backing::{
        Backing, BackingConfig, BackingStats, Batch, DailyWrites, Fetcher, FileMedium, Health, Medium, MediumError,
        Record,
    },
    codec::{Codec, DictionaryId, train_dictionary},
    compact::Compacted,
    config::{PoolConfig, StoreConfig},
    error::StoreError,
    groups::Recompressor,
    latency::{Latency, LatencySnapshot},
    page::{PAGE_SIZE, Page, PageIndex},
    pool::{Extent, Pool, Read, Recompressed, Rewritten, RunFailed, Written},
    reclaim::{Leaving, Reclaimed},
    recompression::{Piece, Recompression},
    stats::{PoolStats, Stat, TABLE, Unit},
    store::Store,
    worker::{Clock, Worker},
};

// Under the model checker only the slot's lock is built: everything above it is checked by ordinary tests.
#[cfg(loom)]
mod slot {
    pub(crate) const LOCKED: u32 = 1 << 0;
    pub(crate) const WAITERS: u32 = 1 << 1;
    pub(crate) mod word;
}
