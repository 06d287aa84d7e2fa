//! Whether ours failed, or is not here.
//!
//! A side that the machine lacks something for is named and left out. Where the machine has all that a side of ours needs, and it
//! cannot be set up even so, that is a failure: left out as well, a scenario in which ours does not so much as start would succeed.

use std::fmt;

use anyhow::{Error, Result};
use compcache_testkit::features::Feature;

use crate::device::Over;

/// What a disk of ours needs.
pub fn disk_needs(over: Over) -> &'static [Feature] {
    match over {
        Over::Loop => &[Feature::Root, Feature::Fuse, Feature::Loop],
        Over::Ublk => &[Feature::Root, Feature::Ublk],
    }
}

/// What a mounted tree of ours needs.
pub const MOUNT_NEEDS: &[Feature] = &[Feature::Fuse];

/// Marks an error as one of ours.
#[derive(Debug)]
struct Failed;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ours failed")
    }
}

/// `result` of a step of ours: its error is marked as ours where the machine has all that `needs` names.
///
/// # Errors
/// That of `result`.
pub fn step<T>(needs: &[Feature], result: Result<T>) -> Result<T> {
    result.map_err(|error| match needs.iter().all(|feature| feature.probe().is_ok()) {
        true => error.context(Failed),
        false => error,
    })
}

/// Whether it was ours that failed.
pub fn has_failed(error: &Error) -> bool {
    error.is::<Failed>()
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, bail};

    use super::*;

    #[test]
    fn an_error_is_ours_only_where_the_machine_has_what_is_needed() {
        let fails = || -> Result<()> { bail!("why") };
        let error = step(&[Feature::Program("sh")], fails()).context("said by somebody above").unwrap_err();
        assert!(has_failed(&error));
        assert_eq!(format!("{error:#}"), "said by somebody above: ours failed: why");
        let lacking = [Feature::Program("sh"), Feature::Program("no-such-program-anywhere")];
        assert!(!has_failed(&step(&lacking, fails()).unwrap_err()));
        assert!(!has_failed(&fails().unwrap_err()));
    }
}
