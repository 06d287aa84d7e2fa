//! Memory control groups, of either version.

use std::ffi::OsString;
use std::fs;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use super::Guard;

/// A memory cgroup of the test's own.
pub struct Cgroup(PathBuf, #[allow(dead_code, reason = "it is there to be dropped")] Guard);

impl Cgroup {
    pub fn new(limit_bytes: u64) -> Cgroup {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("compcache-test-{}-{}", std::process::id(), MADE.fetch_add(1, Relaxed));
        let v1 = PathBuf::from("/sys/fs/cgroup/memory");
        let (root, file) = match v1.is_dir() {
            true => (v1, "memory.limit_in_bytes"),
            false => (PathBuf::from("/sys/fs/cgroup"), "memory.max"),
        };
        let path = root.join(name);
        let end =
            r#"for nth in $(seq 100); do kill -s KILL $(cat "$1/cgroup.procs"); rmdir "$1" && exit; sleep 0.1; done"#;
        let guard = Guard::new(end, &[path.as_os_str()]);
        fs::create_dir(&path).expect("a cgroup");
        let cgroup = Cgroup(path, guard);
        fs::write(cgroup.0.join(file), limit_bytes.to_string()).expect("a limit");
        cgroup
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// What sh(1) is told to run a program inside, which is to follow, and what that is told.
    pub fn inside(&self) -> [OsString; 3] {
        let script = r#"echo $$ >"$0" && exec "$@""#;
        ["-c".into(), script.into(), self.0.join("cgroup.procs").into()]
    }

    /// What the program did, inside.
    pub fn output(&self, program: &Path, arguments: &[&str]) -> Output {
        let mut command = Command::new("sh");
        command.args(self.inside()).arg(program).args(arguments);
        self.meanwhile(|| command.output()).expect("it starts")
    }

    /// Does this with programs inside. Meanwhile the group's statistics are read: the kernel decides by them whether there is
    /// anything to swap out, and by itself brings them up to date so seldom that it ends programs in small groups although swap is empty.
    pub fn meanwhile<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let working = scope.spawn(work);
            while !working.is_finished() {
                let _ = fs::read_to_string(self.0.join("memory.stat"));
                thread::sleep(Duration::from_millis(2));
            }
            working.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let until = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.0).is_err() && Instant::now() < until {
            thread::sleep(Duration::from_millis(20));
        }
    }
}
