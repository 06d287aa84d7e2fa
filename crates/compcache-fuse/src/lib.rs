//! What those who serve the kernel through /dev/fuse have in common: how their threads wait for requests ([`Linger`]).

#![deny(unsafe_code)]

mod linger;

pub use linger::{AfterThis, Linger};
