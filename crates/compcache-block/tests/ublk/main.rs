//! A device served as `/dev/ublkbN`: what is particular to this way of serving, and what is left when it goes.
//!
//! That it is an array of bytes, is held to its size, and tells of errors, the suite over all transports shows (`conformance`).
//!
//! All of it needs root and the kernel's ublk driver. Where the machine has none, [`machine`] runs this very program in a
//! virtual one that has. Each test touches no device but those it added; they are removed when it panics too. Contents derive
//! from the block and its generation, so the model of a disk is a number for each block.

#[path = "../support/blocks.rs"]
mod blocks;
mod contents;
mod fio;
mod killed;
mod life;
mod machine;
#[path = "../support/spied.rs"]
mod spied;
mod support;
