//! What tests and benchmarks share, and nothing that ships: real memory to store, seeds, and what this machine can do.
//!
//! | module       | answers                                                                          |
//! |--------------|----------------------------------------------------------------------------------|
//! | [`corpus`]   | which bytes does a page of a real program hold?                                    |
//! | [`features`] | can this test run on this machine, and if not, is that allowed?                  |
//! | [`seed`]     | which one number repeats this run?                                                 |
//! | [`vm`]       | what does it do on another kernel?                                               |
//!
//! The crate depends on no other crate of the workspace, so that each of them can use it in its tests.

pub mod corpus;
pub mod features;
pub mod seed;
pub mod vm;

/// Bytes in a page. Everything here is made for machines with 4 KiB pages.
pub const PAGE_BYTES: usize = 4096;
