//! Disks, what their blocks hold, and the programs that use them.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use compcache_block::{BLOCK_BYTES, Disk};
use compcache_store::{PoolConfig, Store, StoreConfig};
use compcache_testkit::seed::scramble;

pub fn open_direct(path: &Path) -> File {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    OpenOptions::new().read(true).write(true).custom_flags(direct).open(path).unwrap()
}

/// A pool as a disk.
pub fn disk(size_bytes: u64) -> Arc<Disk> {
    let store = Store::new(StoreConfig { limit_bytes: 512 << 20, ..StoreConfig::default() }).unwrap();
    Arc::new(Disk::new(store.create_pool(PoolConfig::default()).unwrap(), size_bytes).unwrap())
}

/// What `block` holds in its `generation`: zeroes in generation 0, else bytes that differ from those of every other, half
/// of them compressible.
pub fn fill(into: &mut [u8], block: u64, generation: u32) {
    if generation == 0 {
        return into.fill(0);
    }
    let seed = scramble(block << 32 | u64::from(generation));
    for (at, word) in into.chunks_exact_mut(8).enumerate() {
        let value = if at % 2 == 0 { seed } else { scramble(seed ^ at as u64) };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Fills `into`, which begins at block `first`, with generation `generation` of each block.
pub fn fill_run(into: &mut [u8], first: u64, generation: u32) {
    for (at, block) in into.chunks_exact_mut(BLOCK_BYTES).enumerate() {
        fill(block, first + at as u64, generation);
    }
}

/// Runs a program that must succeed.
pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{out}\n{error}", output.status);
}

/// A block device opened under a name of another directory, which nobody knows any more.
pub fn open_by_another_name(device: &Path) -> File {
    let number = std::fs::metadata(device).unwrap().rdev();
    // Other file systems may be mounted so that devices cannot be opened there.
    let directory = tempfile::tempdir_in("/dev").unwrap();
    let alias = directory.path().join("alias");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &alias, rustix::fs::FileType::BlockDevice, mode, number).unwrap();
    File::open(alias).unwrap()
}

/// A mounted file system, unmounted when dropped.
pub struct Mounted {
    pub at: PathBuf,
    unmounted: bool,
}

impl Mounted {
    pub fn new(device: &Path, at: &Path) -> Mounted {
        run("mount", &["-t", "ext4", device.to_str().unwrap(), at.to_str().unwrap()]);
        Mounted::there(at)
    }

    /// What is mounted there already.
    pub fn there(at: &Path) -> Mounted {
        Mounted { at: at.to_owned(), unmounted: false }
    }

    pub fn unmount(mut self) {
        self.unmounted = true;
        run("umount", &[self.at.to_str().unwrap()]);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if !self.unmounted {
            let _ = Command::new("umount").arg(&self.at).output();
        }
    }
}
