//! The limit on the size of files (`ulimit -f`) of whoever starts a server, which writes files for others.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lifts the limit as far as the system lets. What is written past the rest of it fails (EFBIG), and the signal that comes with that (SIGXFSZ) does
/// not end the process.
///
/// # Errors
/// The system takes no handler for that.
pub fn lift_limit() -> anyhow::Result<()> {
    // A handler and not ignored: programs that the server starts have what they expect.
    signal_hook::flag::register(libc::SIGXFSZ, Arc::new(AtomicBool::new(false))).context("cannot wait for signals")?;
    let maximum = getrlimit(Resource::Fsize).maximum;
    // A service manager may forbid it; then it stays.
    let _ = setrlimit(Resource::Fsize, Rlimit { current: maximum, maximum });
    Ok(())
}
