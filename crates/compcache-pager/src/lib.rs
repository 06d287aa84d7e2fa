//! pager
#![cfg_attr(not(test), no_std)]
extern crate alloc;
mod events;
mod evict;
mod fault;
pub mod fork;
mod lock;
mod maps;
pub mod memory;
pub mod pager;
mod process;
pub use process::abort;
mod regions;
mod scan;
pub mod shared;
mod staging;
mod streams;
mod sys;
mod table;
mod uffd;
