//! How `compcache run` itself fails: with the statuses that `env`, `nice` and `timeout` use.

use std::io::Write;
use std::process::ExitCode;

use crate::run::signals::from_background;

/// The command line makes no sense; what the flags' parser answers too.
const STATUS_USAGE: u8 = 2;
/// compcache failed before or beside the program.
pub const STATUS_FAILED: u8 = 125;
/// The program was found but cannot be run.
const STATUS_CANNOT_RUN: u8 = 126;
/// The program was not found.
const STATUS_NOT_FOUND: u8 = 127;

/// Writes to standard error. A reader that has gone away must not cost the program its exit status.
pub fn say(text: &str) {
    from_background(|| _ = std::io::stderr().write_all(text.as_bytes()));
}

/// What failed, and why, each once: some errors name their source themselves.
pub fn why(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for part in error.chain().map(ToString::to_string).filter(|part| !part.is_empty()) {
        if text.is_empty() {
            text = part;
        } else if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
    }
    text
}

/// A reason not to have run the program.
#[derive(Debug)]
pub struct Failure {
    status: u8,
    error: anyhow::Error,
}

impl Failure {
    /// The command line makes no sense.
    pub fn usage(why: String) -> Self {
        Self { status: STATUS_USAGE, error: anyhow::Error::msg(why) }
    }

    /// The program was not found.
    pub fn not_found(why: String) -> Self {
        Self { status: STATUS_NOT_FOUND, error: anyhow::Error::msg(why) }
    }

    /// The program cannot be run, or not in less RAM.
    pub fn cannot_run(why: String) -> Self {
        Self { status: STATUS_CANNOT_RUN, error: anyhow::Error::msg(why) }
    }

    /// The same failure, with words before it.
    pub fn about(self, words: String) -> Self {
        Self { error: anyhow::Error::msg(format!("{words} {}", why(&self.error))), ..self }
    }

    /// Says it on standard error.
    pub fn report(&self) -> ExitCode {
        say(&format!("compcache: {}\n", why(&self.error)));
        self.status.into()
    }

    /// What is said.
    #[cfg(test)]
    pub fn message(&self) -> String {
        why(&self.error)
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self { status: STATUS_FAILED, error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_an_error_names_itself_is_told_once() {
        let inner = anyhow::Error::msg("no such file").context("cannot listen: no such file").context("at x");
        assert_eq!(why(&inner), "at x: cannot listen: no such file");
    }
}
