//! A device served as `/dev/loopN`: what is particular to this way of serving, and what is left when it goes.
//!
//! That it is an array of bytes, is held to its size, and tells of errors, the suite over all transports shows (`conformance`).
//!
//! All of it needs root, FUSE and loop devices. Each test serves from a directory of its own and touches no loop device but
//! those it set up; they are undone when it panics too. Contents derive from the block and its generation, so the model of
//! a disk is a number for each block.

mod allocations;
#[path = "../support/blocks.rs"]
mod blocks;
mod contents;
mod killed;
mod life;
#[path = "../support/spied.rs"]
mod spied;
mod support;
mod waiting;
