//! Signals that come while a disk is made in several steps: it shall be complete afterwards, or not be.
//!
//! The steps are programs of the system's, which have these signals as always: ^C ends them too, and what was made is undone. ^\ (SIGQUIT) ends us at
//! once, should the server not answer.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::{Context, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use super::ended;
use crate::run::{die_by, was_ignored};

/// Which signal has come; 0 is none.
#[derive(Default)]
pub struct Caught(Arc<AtomicUsize>);

impl Caught {
    /// To be asked before each step.
    ///
    /// # Errors
    /// A signal has come.
    pub fn none(&self) -> anyhow::Result<()> {
        match self.0.load(Relaxed) {
            0 => Ok(()),
            signal => bail!("interrupted by signal {signal}"),
        }
    }
}

/// Has `make` make something and print it, and ends by the signal that has come meanwhile.
pub fn finish_or_undo(make: impl FnOnce(&Caught) -> anyhow::Result<String>) -> ExitCode {
    let caught = Caught::default();
    let made = [SIGINT, SIGTERM, SIGHUP]
        .into_iter()
        .filter(|signal| !was_ignored(*signal))
        .try_for_each(|signal| flag::register_usize(signal, caught.0.clone(), signal as usize).map(drop))
        .context("cannot catch signals")
        .and_then(|()| make(&caught));
    let status = ended(made);
    match caught.0.load(Relaxed) {
        0 => {}
        // Returns only in the first process of a container.
        signal => die_by(signal as i32),
    }
    status
}
