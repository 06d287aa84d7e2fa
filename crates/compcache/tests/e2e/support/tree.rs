//! A tree that is mounted for a test by a `compcache mount` of its own, and unmounted with it.

use std::fs::{self, Permissions};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires};
use serde_json::Value;
use tempfile::TempDir;

use super::{PATIENCE, by_rings, compcache, hears, ignore, said, scratch};

/// Whether trees can be mounted here, and there are these programs.
pub fn can_mount(programs: &[&'static str]) -> bool {
    let programs = programs.iter().map(|name| Feature::Program(name));
    let features: Vec<_> = [Feature::Root, Feature::Fuse].into_iter().chain(programs).collect();
    requires(&features)
}

/// Called in the process that is to be the server; makes system calls alone.
type Prepare = Box<dyn FnMut() -> io::Result<()> + Send + Sync>;

/// A source, a target, and the process that serves one at the other.
pub struct Tree {
    pub child: Child,
    said: BufReader<ChildStderr>,
    directory: TempDir,
    over: bool,
}

impl Tree {
    /// An empty tree, mounted beside its source.
    pub fn mounted(arguments: &[&str]) -> Tree {
        Tree::start(scratch(), false, None, &[], arguments)
    }

    /// One whose server has these signals ignored when it is started.
    pub fn mounted_ignoring(ignored: &'static [i32]) -> Tree {
        Tree::start(scratch(), false, None, ignored, &[])
    }

    /// One in a directory where there may be a source already.
    pub fn mounted_in(directory: TempDir, arguments: &[&str]) -> Tree {
        Tree::start(directory, false, None, &[], arguments)
    }

    /// One that is mounted over itself.
    pub fn over_itself(directory: TempDir, arguments: &[&str]) -> Tree {
        Tree::start(directory, true, None, &[], arguments)
    }

    /// One in a directory where there may be a source already, whose server is in this group, too.
    pub fn mounted_in_group(directory: TempDir, group: u32, arguments: &[&str]) -> Tree {
        // SAFETY: it reads one number, which lives as long as the closure.
        let set = move || match unsafe { libc::setgroups(1, &group) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        Tree::start(directory, false, Some(Box::new(set)), &[], arguments)
    }

    /// One whose server may have so many files open.
    pub fn mounted_with_descriptors(descriptors: u64, arguments: &[&str]) -> Tree {
        Tree::mounted_limited(libc::RLIMIT_NOFILE, descriptors, descriptors, arguments)
    }

    /// One whose server may make files so large, and that large if it asks for it.
    pub fn mounted_with_files_of(bytes: u64, bytes_max: u64) -> Tree {
        Tree::mounted_limited(libc::RLIMIT_FSIZE, bytes, bytes_max, &[])
    }

    fn mounted_limited(resource: libc::__rlimit_resource_t, current: u64, maximum: u64, arguments: &[&str]) -> Tree {
        let limit = libc::rlimit { rlim_cur: current, rlim_max: maximum };
        // SAFETY: it reads a structure that lives as long as the closure.
        let set = move || match unsafe { libc::setrlimit(resource, &limit) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        Tree::start(scratch(), false, Some(Box::new(set)), &[], arguments)
    }

    /// One whose server is told `errno` by the system call of number `refused`, whatever it asks for.
    pub fn mounted_where_a_call_fails(refused: libc::c_long, errno: u32) -> Tree {
        let (load, equal) = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
        let answer = libc::BPF_RET | libc::BPF_K;
        let step = |code: u32, otherwise, k| libc::sock_filter { code: code as u16, jt: 0, jf: otherwise, k };
        let filter = [
            step(load, 0, 0),
            step(equal, 1, refused as u32),
            step(answer, 0, libc::SECCOMP_RET_ERRNO | errno),
            step(answer, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let set = move || {
            let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
            // SAFETY: it reads the program and its steps, which live as long as the closure.
            match unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program, 0, 0) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        Tree::start(scratch(), false, Some(Box::new(set)), &[], &[])
    }

    fn start(
        directory: TempDir,
        over: bool,
        prepare: Option<Prepare>,
        ignored: &'static [i32],
        arguments: &[&str],
    ) -> Tree {
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        let (source, target) = (directory.path().join("source"), directory.path().join("target"));
        for path in [&source, &target] {
            if !path.exists() {
                fs::create_dir(path).unwrap();
                fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
            }
        }
        let mut command = Command::new(compcache());
        command.arg("mount").args(flags_beside(arguments)).args(arguments).arg(&source).arg(if over {
            &source
        } else {
            &target
        });
        ignore(&mut command, ignored);
        if let Some(prepare) = prepare {
            // SAFETY: that is all that is done between fork and exec.
            unsafe { command.pre_exec(prepare) };
        }
        let (child, said) = by_rings::mounting(|| {
            let mut child =
                command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("compcache can be started");
            let mut said = BufReader::new(child.stderr.take().expect("it is piped"));
            let lines = hears(&mut said, "is mounted on");
            assert!(lines.lines().count() == 1, "it said {lines:?}");
            (child, said)
        });
        by_rings::check(child.id());
        let cmdline = fs::read(format!("/proc/{}/cmdline", child.id())).expect("it runs");
        let cmdline = String::from_utf8_lossy(&cmdline);
        assert!(
            arguments.contains(&"--watch") || flags().iter().all(|flag| cmdline.contains(flag)),
            "mounted as {cmdline}"
        );
        Tree { child, said, directory, over }
    }

    pub fn source(&self) -> PathBuf {
        self.directory.path().join("source")
    }

    pub fn target(&self) -> PathBuf {
        self.directory.path().join(if self.over { "source" } else { "target" })
    }

    /// Waits until its server has said this, after that it is mounted.
    #[track_caller]
    pub fn hears(&mut self, words: &str) -> String {
        hears(&mut self.said, words)
    }

    /// What else it has said, once it has ended.
    pub fn said_at_the_end(&mut self) -> String {
        let mut text = String::new();
        self.said.read_to_string(&mut text).expect("text");
        text
    }

    /// What a command prints, which must succeed; the target is its last argument.
    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = Command::new(compcache()).args(arguments).arg(self.target()).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).expect("text")
    }

    #[track_caller]
    pub fn stat(&self, name: &str) -> u64 {
        let stats: Value = serde_json::from_str(&self.ok(&["show", "--json"])).expect("JSON");
        stats[name].as_u64().unwrap_or_else(|| panic!("no {name} in {stats}"))
    }

    /// Unmounts; the server must end by itself, well.
    #[track_caller]
    pub fn unmount(&mut self) {
        let give_up = Instant::now() + PATIENCE;
        loop {
            let output = Command::new(compcache()).arg("umount").arg(self.target()).output().unwrap();
            if output.status.success() {
                break;
            }
            // What another test starts has our files open, too, until it is another program.
            assert!(said(&output).contains("in use") && Instant::now() < give_up, "{}", said(&output));
            thread::sleep(Duration::from_millis(10));
        }
        while Instant::now() < give_up {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{status}");
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("it was unmounted, and goes on");
    }

    /// Has the kernel drop what it keeps of all files, on the whole machine, as memory pressure would.
    pub fn drop_kernel_cache(&self) {
        // SAFETY: it takes nothing.
        unsafe { libc::sync() };
        fs::write("/proc/sys/vm/drop_caches", "3").expect("root may");
    }
}

/// Flags for each tree where that is set, by words: the tests of mounts once more.
const FLAGS: &str = "COMPCACHE_TEST_MOUNT_FLAGS";

/// Whether trees are mounted so in this process that nobody else changes them.
pub fn tree_is_exclusive() -> bool {
    std::env::var(FLAGS).is_ok_and(|flags| flags.contains("--exclusive") || flags.contains("--writeback"))
}

/// Those, unless a test's own exclude them.
fn flags_beside(own: &[&str]) -> Vec<String> {
    let excluded = own.contains(&"--watch");
    flags().into_iter().filter(|flag| !excluded && !own.contains(&flag.as_str())).collect()
}

fn flags() -> Vec<String> {
    std::env::var(FLAGS).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// Runs this program's tests with any of `filters` in their names once more, but for those with one of `but`, where all trees are mounted with `flags`.
pub fn run_again_with(filters: &[&str], but: &[&str], flags: &[&str]) {
    if can_mount(&[]) {
        by_rings::again(filters, but, (FLAGS, &flags.join(" ")));
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Nobody is left who could answer, so it does not wait for anybody.
        let _ = Command::new("umount").arg("-l").arg(self.target()).stderr(Stdio::null()).status();
    }
}
