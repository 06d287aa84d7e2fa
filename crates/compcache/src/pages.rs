//! The manual pages and shell completions, made from the flags themselves.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::Cli;
use crate::disk::ended;
use crate::run::{STATUS_FAILED, say, why};

/// Prints the completions for `shell`.
pub fn completions(shell: Shell) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "compcache", &mut text);
    ended(String::from_utf8(text).context("the completions are no text"))
}

/// Writes compcache.1, compcache-run.1 and so on into `dir`.
pub fn man(dir: &Path) -> ExitCode {
    let written = std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
        .with_context(|| format!("cannot write the manual pages into {}", dir.display()));
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("compcache: {}\n", why(&error)));
            STATUS_FAILED.into()
        }
    }
}
