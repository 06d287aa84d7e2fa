//! A served disk that goes with the test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

pub use crate::blocks::{Mounted, disk, fill_run, open_by_another_name, open_direct, run};
use compcache_block::BlockDevice;
use compcache_block::fuse_loop::{FuseLoop, FuseLoopOptions};
pub use compcache_cache::Aligned;
use compcache_testkit::features::{Feature, mounts, requires};
use tempfile::TempDir;

/// How long what must happen soon may take.
pub const AT_LAST: Duration = Duration::from_secs(20);

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
        all_at_once: false,
    }
}

/// That neither directory, mount nor loop device is left of what was served from `parent`.
pub fn assert_nothing_left(parent: &Path, device: &Path) {
    assert_eq!(fs::read_dir(parent).unwrap().count(), 0, "{} is not empty", parent.display());
    let under = parent.to_str().unwrap();
    assert!(!mounts().contains(under), "something is mounted still");
    let file = backing_file(device);
    assert!(file.as_ref().is_none_or(|file| !file.starts_with(under)), "{file:?} is attached still");
}

/// What the loop device lies over.
pub fn backing_file(device: &Path) -> Option<String> {
    let path = format!("/sys/block/{}/loop/backing_file", device.file_name()?.to_str()?);
    Some(fs::read_to_string(path).ok()?.trim_end().to_owned())
}

/// Waits until it is so, which it must be soon.
pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + AT_LAST;
    while !is_so() {
        assert!(Instant::now() < give_up, "{what}: not so after {AT_LAST:?}");
        thread::sleep(Duration::from_millis(5));
    }
}
