//! Trees that are served by io_uring: the tests of mounts once more, in a process of their own.
//!
//! Whether it is used is decided when a tree is mounted, by a parameter that is the whole machine's. So it is set for that moment alone, and others
//! who mount in the meantime wait.

use std::env;
use std::fs::{self, File};
use std::process::Command;

use compcache_testkit::features::{Feature, requires};

use super::Guard;

/// Set where trees are to be served so.
const BY_RINGS: &str = "COMPCACHE_TEST_BY_RINGS";
const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// Whether that is how trees are served.
pub fn are_meant() -> bool {
    env::var_os(BY_RINGS).is_some()
}

/// What the kernel's parameter was; it is again when this is dropped, or this process dies.
struct Set(String, #[allow(dead_code, reason = "it is there to be dropped")] Guard);

impl Set {
    fn to(value: &str) -> Set {
        let before = fs::read_to_string(PARAMETER).expect("it is there");
        let guard = Guard::new(r#"printf %s "$1" >"$2""#, &[before.trim().as_ref(), PARAMETER.as_ref()]);
        fs::write(PARAMETER, value).expect("root may");
        Set(before, guard)
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        let _ = fs::write(PARAMETER, self.0.trim());
    }
}

/// Calls `mount`, which mounts a tree: to be served by io_uring if that is meant, and not while another process has it set.
pub fn mounting<T>(mount: impl FnOnce() -> T) -> T {
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/mounting.lock");
    // To be locked by many it must be readable, where that is on NFS.
    let lock = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let lock = lock.expect("a file under the build directory");
    if !are_meant() {
        lock.lock_shared().expect("a lock");
        return mount();
    }
    lock.lock().expect("a lock");
    let _set = Set::to("Y");
    mount()
}

/// Fails unless process `pid` serves its trees as it is meant to.
#[track_caller]
pub fn check(pid: u32) {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    let rings = names.filter(|name| name.starts_with("fuse-ring")).count();
    assert!(rings > 0 || !are_meant(), "it has no threads for rings");
}

/// Runs this program's tests with `filter` in their names again, but for those with one of `but`, the caller among them.
pub fn run_again(filter: &str, but: &[&str]) {
    if are_meant() || !requires(&[Feature::Root, Feature::Fuse, Feature::FuseRings]) {
        return;
    }
    again(&[filter], but, (BY_RINGS, "1"));
}

/// Runs this program's tests with any of `filters` in their names, but for those with one of `but`, in an environment with `how`.
pub fn again(filters: &[&str], but: &[&str], how: (&str, &str)) {
    let program = env::current_exe().expect("it runs");
    let skipped = but.iter().flat_map(|name| ["--skip", name]);
    let output = Command::new(program).args(filters).args(skipped).env(how.0, how.1).output().expect("it runs again");
    let printed = String::from_utf8_lossy(&output.stdout);
    eprintln!("{printed}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{how:?}: {}", output.status);
    assert!(!printed.contains(" 0 passed"), "nothing was run");
}
