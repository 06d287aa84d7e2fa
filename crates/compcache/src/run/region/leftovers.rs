//! Regions whose supervisor was killed: removed by the next one, as far as nobody uses them.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use compcache_pager::shared::{self, Region};

use super::mapping::Mapping;
use super::{PREFIX, file_in, places, remove};

/// Removes them all. Those of other users are left to their owners.
pub fn sweep() {
    for place in places() {
        let Ok(found) = fs::read_dir(&place) else { continue };
        for leftover in found.flatten().filter(|found| is_ours(&found.file_name())) {
            // One that stays does no harm, and will be looked at again.
            let _ = sweep_one(&leftover.path());
        }
    }
}

fn is_ours(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.strip_prefix(PREFIX.as_bytes()).is_some_and(|rest| rest.len() == 32 && rest.iter().all(u8::is_ascii_hexdigit))
}

fn sweep_one(dir: &Path) -> anyhow::Result<()> {
    let metadata = fs::symlink_metadata(dir)?;
    if !metadata.is_dir() || metadata.uid() != rustix::process::geteuid().as_raw() {
        bail!("not ours");
    }
    let lock = File::open(dir)?;
    lock.try_lock()?;
    if let Some(path) = file_in(dir) {
        let mapping = OpenOptions::new().read(true).write(true).open(&path).and_then(|file| Mapping::of(&file));
        if mapping.is_ok_and(|mapping| in_use(mapping.region(), &path)) {
            bail!("in use");
        }
    }
    remove(dir);
    Ok(())
}

/// Whether a process of the tree still lives.
pub fn in_use(region: &Region, file: &Path) -> bool {
    region.retire_dead();
    region.living().next().is_some() || named_by_a_process(file)
}

/// Whether the environment of some process names `file`: one that is between fork and exec holds no slot.
///
/// In the middle of exec an environment reads as empty, for a fraction of a millisecond; so we look again where one is.
fn named_by_a_process(file: &Path) -> bool {
    const LOOKS: u32 = 5;
    let wanted = [shared::ENV_REGION.as_bytes(), b"=", file.as_os_str().as_encoded_bytes()].concat();
    for _ in 0..LOOKS {
        let mut unknown = false;
        for process in processes() {
            let Ok(environment) = fs::read(process.join("environ")) else { continue };
            if environment.split(|byte| *byte == 0).any(|variable| variable == wanted) {
                return true;
            }
            // The kernel's own threads have no executable.
            unknown |= environment.is_empty() && fs::read_link(process.join("exe")).is_ok();
        }
        if !unknown {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

fn processes() -> impl Iterator<Item = PathBuf> {
    let found = fs::read_dir("/proc").into_iter().flatten().flatten();
    found.filter(|process| process.file_name().as_encoded_bytes()[0].is_ascii_digit()).map(|process| process.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_names_are_swept() {
        assert!(is_ours(format!("{PREFIX}{}", super::super::random_name().unwrap()).as_ref()));
        assert!(!is_ours("compcache-run-".as_ref()));
        assert!(!is_ours("compcache-run-../../../../../../etc/passwd".as_ref()));
        assert!(!is_ours("other".as_ref()));
    }
}
