//! What those who serve the kernel through /dev/fuse have in common: how their threads come by requests, and how the kernel's table of
//! mounts is read ([`mounts`]).
//!
//! By read(2), with a library that speaks the protocol, and a thread that looks for the next request before it sleeps ([`Linger`]); or
//! by io_uring, where the kernel has that enabled ([`Rings`]).

#![deny(unsafe_code)]

mod errors;
mod linger;
mod mounts;
mod rings;

pub use errors::told;
pub use linger::{AfterThis, Linger};
pub use mounts::{Mounted, OpenTable, mounts, table_of_mounts, unescape, uppermost};
pub use rings::{Answer, Asked, ENABLED, QUEUES_MAX, Rings, Serve, queues};
