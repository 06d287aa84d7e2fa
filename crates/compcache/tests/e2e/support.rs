//! Runs programs with and without compcache, and knows what to do when they hang; starts servers of disks.

mod build;
pub mod by_rings;
mod cgroup;
mod diagnose;
mod guard;
mod run;
mod server;
mod tree;

pub use build::{memory_tester, preload, release_binary, trap_program};
pub use cgroup::Cgroup;
pub use guard::Guard;
pub use run::{Cap, Outcome, Program, Running, Way, alone, beside_others, sample_until, ways};
pub use server::{
    LoopDevice, Mounted, PATIENCE, Server, Stopped, ask, await_unmounted, backing_file, hears, ignore, said, unmount,
};
pub use tree::{Tree, can_mount, run_again_with, tree_is_exclusive};

use std::path::{Path, PathBuf};
use std::process::Command;

/// A directory of this test's own, on a file system with direct I/O where the build directory has it.
pub fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory under the build directory")
}

/// How long what checks memory goes on: `COMPCACHE_LONG`, or so long.
pub fn seconds_or(short: u64) -> u64 {
    std::env::var("COMPCACHE_LONG").ok().and_then(|text| text.parse().ok()).unwrap_or(short)
}

/// Copies a program, by another process: a test that forks meanwhile would have the copy open for writing, and then it cannot be run.
pub fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").args([from, to]).status();
    assert!(copied.is_ok_and(|status| status.success()), "{} can be copied", from.display());
}

/// The `compcache` under test.
pub fn compcache() -> PathBuf {
    std::env::var_os("COMPCACHE_BIN").map_or_else(|| env!("CARGO_BIN_EXE_compcache").into(), Into::into)
}
