//! A process's cold pages in a pool: the pager behind `compcache run`.
//!
//! A program that needs more memory than it may have is given a pager inside its own address space. Cold pages are moved
//! out with userfaultfd, compressed into a [`compcache_store::Pool`], and brought back when they are touched.
//!
//! | module     | what it does                                                              |
//! |------------|---------------------------------------------------------------------------|
//! | `pager`    | what the threads share, and how they start                                |
//! | `evict`    | the evictor: limit, staging                                               |
//! | `registrar` | reads the map, and registers what has come                               |
//! | `code`     | staging for what may be executed                                          |
//! | `leave`    | pages go to staging, frames back to the system                            |
//! | `remap`    | the way out for kernels without UFFDIO_MOVE                               |
//! | `hand`     | finds cold pages                                                          |
//! | `compress` | what is staged goes to the pool                                           |
//! | `fault`    | the handler: faults and events                                            |
//! | `events`   | munmap, mremap, madvise, applied to what is kept                          |
//! | `fork`     | copies of the process                                                     |
//! | `retire`   | the pager leaves a process                                                |
//! | `filter`   | whether a filter on system calls lets the pager go on                     |
//! | `relay`    | a moment without the pager's threads                                      |
//! | `spill`    | a file for what is too much even compressed                               |
//! | `share`    | how much of the memory the pool has then                                  |
//! | `distance` | how far back a page was that comes back                                   |
//! | `keep`     | pages that may not leave                                                  |
//! | `blocks`   | nor those of threads' control blocks                                      |
//! | `streams`  | read-ahead                                                                |
//! | `table`, `staging`, `regions` | what is known of pages, frames and ranges; no system calls |
//! | `maps`, `scan`, `process`, `uffd`, `sys`, `memory`, `lock` | the kernel's interfaces, without libc |
//! | `shared`   | the budget of a whole tree of processes                                   |
//!
//! The threads run inside programs nothing is known of, and may touch nothing that could be evicted: hence no `std`, no
//! libc, no thread-local storage. Why no wrong byte is returned: docs/design/pager.md.
//!
//! Lock order: fork turn, state, channel, then the spill's, then the store's.

#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]
#![allow(rustdoc::private_intra_doc_links, reason = "these pages are for those who read the code as well")]

extern crate alloc;

#[allow(unsafe_code, reason = "names the memory the kernel copies from")]
mod around;
#[allow(unsafe_code, reason = "makes its buffers")]
mod blocks;
#[allow(unsafe_code, reason = "its thread is given a pager and descriptors")]
mod brake;
#[allow(unsafe_code, reason = "gives ranges of the pager's own their rights")]
mod code;
mod cold;
#[allow(unsafe_code, reason = "reads frames of staging")]
mod compress;
mod copies;
mod cpus;
mod distance;
mod events;
#[allow(unsafe_code, reason = "makes its buffers")]
mod evict;
#[allow(unsafe_code, reason = "names the memory the kernel copies from")]
mod fault;
pub mod filter;
#[allow(unsafe_code, reason = "frees locks of threads that a copy does not have")]
pub mod fork;
mod hand;
#[allow(unsafe_code, reason = "keeps ranges of the pager's own from being locked")]
mod keep;
#[allow(unsafe_code, reason = "gives the memory of frames back")]
mod leave;
#[allow(unsafe_code, reason = "is a lock")]
mod lock;
mod lost;
#[allow(unsafe_code, reason = "the kernel writes results into its buffers")]
mod maps;
#[allow(unsafe_code, reason = "maps memory, and is an allocator")]
pub mod memory;
#[allow(unsafe_code, reason = "shares memory between threads unknown to the language")]
pub mod pager;
#[allow(unsafe_code, reason = "fills pages of another process, and reads messages")]
mod populate;
mod process;
mod regions;
#[allow(unsafe_code, reason = "makes its buffers")]
mod registrar;
#[allow(unsafe_code, reason = "hands descriptors from thread to thread by their numbers")]
pub mod relay;
#[allow(unsafe_code, reason = "moves mappings")]
mod remap;
#[allow(unsafe_code, reason = "changes the rights of mappings")]
mod restore;
#[allow(unsafe_code, reason = "names the memory the kernel copies from")]
pub mod retire;
#[allow(unsafe_code, reason = "the kernel writes results into its buffers")]
mod scan;
mod share;
pub mod shared;
mod small;
#[allow(unsafe_code, reason = "opens descriptors, and shares buffers between threads")]
pub mod spill;
mod staging;
mod streams;
#[allow(unsafe_code, reason = "makes system calls")]
mod sys;
#[allow(unsafe_code, reason = "keeps its nodes in mapped memory")]
mod table;
#[allow(unsafe_code, reason = "makes system calls")]
mod uffd;
mod unseen;
mod waits;

pub use remap::Kernel as RemapKernel;
pub use sys::{Errno, abort, call6 as system_call, end_process, end_thread, read_own_memory};
