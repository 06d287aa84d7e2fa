//! A served disk that goes with the test, aligned buffers, contents, programs.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

pub use crate::aligned::Aligned;
use compcache_block::fuse_loop::{FuseLoop, FuseLoopOptions};
use compcache_block::{BLOCK_BYTES, BlockDevice, Disk};
use compcache_store::{PoolConfig, Store, StoreConfig};
use compcache_testkit::features::{Feature, requires};
use compcache_testkit::seed::scramble;
use tempfile::TempDir;

/// Whether the machine can serve disks this way, and has `programs`.
pub fn can_serve(programs: &[&'static str]) -> bool {
    let mut features = vec![Feature::Root, Feature::Fuse, Feature::Loop];
    features.extend(programs.iter().map(|name| Feature::Program(name)));
    requires(&features)
}

/// A disk, served until dropped, and its directory.
pub struct Served {
    // Dropped in this order.
    pub disk: FuseLoop,
    pub parent: TempDir,
}

impl Served {
    pub fn new(device: Arc<dyn BlockDevice>) -> Served {
        Served::with_threads(device, 2)
    }

    pub fn with_threads(device: Arc<dyn BlockDevice>, threads: usize) -> Served {
        let parent = TempDir::new().unwrap();
        let disk = FuseLoop::serve(device, &options(parent.path(), threads)).unwrap();
        Served { disk, parent }
    }

    /// The loop device, opened for direct I/O.
    pub fn open(&self) -> File {
        open_direct(self.disk.path())
    }

    /// The served file under it.
    pub fn file(&self) -> PathBuf {
        PathBuf::from(backing_file(self.disk.path()).expect("it is attached"))
    }

    /// Removes it and sees that nothing is left.
    pub fn remove(self) {
        let path = self.disk.path().to_owned();
        self.disk.remove().unwrap();
        assert_nothing_left(self.parent.path(), &path);
    }
}

pub fn options(parent: &Path, threads: usize) -> FuseLoopOptions {
    FuseLoopOptions {
        directory: parent.to_owned(),
        threads: threads.try_into().unwrap(),
        waiting_threads: 1.try_into().unwrap(),
    }
}

/// That neither directory, mount nor loop device is left of what was served from `parent`.
pub fn assert_nothing_left(parent: &Path, device: &Path) {
    assert_eq!(fs::read_dir(parent).unwrap().count(), 0, "{} is not empty", parent.display());
    let under = parent.to_str().unwrap();
    assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains(under), "something is mounted still");
    let file = backing_file(device);
    assert!(file.as_ref().is_none_or(|file| !file.starts_with(under)), "{file:?} is attached still");
}

/// What the loop device lies over.
pub fn backing_file(device: &Path) -> Option<String> {
    let path = format!("/sys/block/{}/loop/backing_file", device.file_name()?.to_str()?);
    Some(fs::read_to_string(path).ok()?.trim_end().to_owned())
}

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

/// A mounted file system, unmounted when dropped.
pub struct Mounted {
    pub at: PathBuf,
    unmounted: bool,
}

impl Mounted {
    pub fn new(device: &Path, at: &Path) -> Mounted {
        run("mount", &["-t", "ext4", device.to_str().unwrap(), at.to_str().unwrap()]);
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
