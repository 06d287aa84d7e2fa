//! A served disk that goes with the test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

pub use crate::blocks::{Mounted, disk, fill_run, open_by_another_name, open_direct, run};
use compcache_block::BlockDevice;
use compcache_block::ublk::{Ublk, UblkOptions};
pub use compcache_cache::Aligned;
use compcache_testkit::features::{Feature, requires};

/// How long a request may take to fail once its server is dead.
pub const AT_LAST: Duration = Duration::from_secs(90);

/// Whether the machine can serve disks this way, and has `programs`.
pub fn can_serve(programs: &[&'static str]) -> bool {
    let mut features = vec![Feature::Root, Feature::Ublk];
    features.extend(programs.iter().map(|name| Feature::Program(name)));
    requires(&features)
}

/// A disk, served until dropped.
pub struct Served(pub Ublk);

impl Served {
    pub fn new(device: Arc<dyn BlockDevice>) -> Served {
        Served(Ublk::serve(device, &options(2, 16)).unwrap())
    }

    /// With one queue, so that everything meets the same thread.
    pub fn with_one_queue(device: Arc<dyn BlockDevice>, depth: u16) -> Served {
        Served(Ublk::serve(device, &options(1, depth)).unwrap())
    }

    /// Opened for direct I/O.
    pub fn open(&self) -> File {
        open_direct(self.0.path())
    }

    /// Removes it and sees that nothing is left.
    pub fn remove(self) {
        let path = self.0.path().to_owned();
        self.0.remove().unwrap();
        assert_nothing_left(&path);
    }
}

pub fn options(queues: u16, depth: u16) -> UblkOptions {
    UblkOptions {
        queues: queues.try_into().unwrap(),
        depth: depth.try_into().unwrap(),
        waiting_threads: 1.try_into().unwrap(),
        ..UblkOptions::default()
    }
}

/// An attribute of the block device's queue.
pub fn attribute(device: &Path, name: &str) -> String {
    let path = format!("/sys/block/{}/{name}", device.file_name().unwrap().to_str().unwrap());
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}")).trim().to_owned()
}

/// The character device that belongs to a block device.
pub fn character(device: &Path) -> PathBuf {
    PathBuf::from(device.to_str().unwrap().replace("ublkb", "ublkc"))
}

/// That neither block nor character device is left.
pub fn assert_nothing_left(device: &Path) {
    assert!(!device.exists(), "{} is there still", device.display());
    let character = character(device);
    assert!(!character.exists(), "{} is there still", character.display());
    let listed = Path::new("/sys/class/ublk-char").join(character.file_name().unwrap());
    assert!(!listed.exists(), "{} is there still", listed.display());
}

/// Waits for something that comes by itself, soon.
pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + AT_LAST;
    while !is_so() {
        assert!(Instant::now() < give_up, "{what}: not so after {AT_LAST:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
