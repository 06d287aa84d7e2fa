//! A device served as `/dev/loopN`: what its users see, and what is left when it goes.
//!
//! All of it needs root, FUSE and loop devices. Each test serves from a directory of its own and touches no loop device but
//! those it set up; they are undone when it panics too. Contents derive from the block and its generation, so the model of
//! a disk is a number for each block.

mod allocations;
mod contents;
mod killed;
mod life;
mod support;
