//! However a bench ends, the machine is as it was.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, mounts, requires};

const BENCH: &str = env!("CARGO_BIN_EXE_compcache-bench");
const SCAN: &str = env!("CARGO_BIN_EXE_scan");

/// What the bench of process `pid` has set up and not yet undone.
fn left_by(pid: u32) -> Vec<String> {
    let own = format!("compcache-bench.{pid}");
    let mut left = Vec::new();
    for dir in ["/sys/fs/cgroup/memory", "/sys/fs/cgroup", "/var/tmp"] {
        let names =
            fs::read_dir(dir).into_iter().flatten().flatten().map(|one| one.file_name().to_string_lossy().into_owned());
        left.extend(names.filter(|name| *name == own || name.starts_with(&format!("{own}."))));
    }
    for block in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let backing = fs::read_to_string(block.path().join("loop/backing_file")).unwrap_or_default();
        if backing.contains(&own) {
            left.push(backing);
        }
    }
    left.extend(mounts().lines().filter(|line| line.contains(&format!("{own}/"))).map(str::to_owned));
    left.extend(processes_naming(&format!("{own}/")));
    let instance = format!("/sys/kernel/tracing/instances/{own}");
    if Path::new(&instance).exists() {
        left.push(instance);
    }
    let journal = format!("/run/compcache-bench/{pid}.journal");
    if Path::new(&journal).exists() {
        left.push(journal);
    }
    left
}

/// The command lines of the processes that say `word`.
fn processes_naming(word: &str) -> Vec<String> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let lines = all.map(|one| fs::read(one.path().join("cmdline")).unwrap_or_default());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(word)).collect()
}

fn zram_devices() -> usize {
    let blocks = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    blocks.filter(|one| one.file_name().to_string_lossy().starts_with("zram")).count()
}

fn zswap() -> Vec<String> {
    let read = |name| fs::read_to_string(format!("/sys/module/zswap/parameters/{name}")).unwrap_or_default();
    ["enabled", "compressor"].map(read).to_vec()
}

fn start(swap: &str) -> Child {
    let mut command = Command::new(BENCH);
    command.args(["baseline", "--ram", "16M", "--swap", swap, "--", SCAN, "64", "100000"]).stdout(Stdio::null());
    // SAFETY: between fork and exec only signal(2) runs. A test started in the background ignores this signal.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        })
    };
    command.spawn().unwrap()
}

/// Whether the run is going on: swap is in use for it.
fn is_swapping() -> bool {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    swaps.lines().skip(1).any(|line| line.split_whitespace().nth(3).is_some_and(|used| used != "0"))
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(120), "{what} did not happen");
        thread::sleep(Duration::from_millis(20));
    }
}

fn killed_with(signal: libc::c_int, swap: &str) {
    let zswap_before = zswap();
    let mut bench = start(swap);
    let pid = bench.id();
    wait_for("swapping", || !left_by(pid).is_empty() && is_swapping());
    let devices = zram_devices();
    // SAFETY: kill(2) takes two numbers; the pid is a child that has not been waited for.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
    bench.wait().unwrap();
    wait_for("undoing", || left_by(pid).is_empty());
    assert_eq!(zswap(), zswap_before);
    if swap.starts_with("zram") && Path::new("/sys/class/zram-control").exists() {
        wait_for("removing the zram device", || zram_devices() == devices - 1);
    }
}

#[test]
fn a_bench_that_is_killed_leaves_nothing_behind() {
    if !requires(&[Feature::Root, Feature::CgroupMemory, Feature::ZramDevice]) {
        return;
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGKILL] {
        killed_with(signal, "zram:lzo-rle");
    }
    if requires(&[Feature::Zswap, Feature::Loop]) {
        killed_with(libc::SIGKILL, "zswap:lzo");
    }
}

#[test]
fn a_bench_that_is_killed_in_the_middle_of_a_dd_leaves_no_mount_and_no_server_behind() {
    let programs = ["mkfs.ext4", "nbdkit", "nbdfuse"].map(Feature::Program);
    if !requires(&[&[Feature::Root, Feature::Loop, Feature::Fuse, Feature::ZramDevice][..], &programs].concat()) {
        return;
    }
    let devices = zram_devices();
    let mut bench =
        Command::new(BENCH).args(["--quick", "dd", "--blocks", "64"]).stdout(Stdio::null()).spawn().unwrap();
    let pid = bench.id();
    let is_dd = |line: &String| line.starts_with("dd ") && line.contains("oflag=sync");
    wait_for("dd", || processes_naming(&format!("compcache-bench.{pid}/")).iter().any(is_dd));
    let left = left_by(pid);
    assert!(left.iter().any(|one| one.contains("ext4")) && left.iter().any(|one| one.contains("nbdkit")), "{left:?}");
    bench.kill().unwrap();
    bench.wait().unwrap();
    wait_for("undoing", || left_by(pid).is_empty());
    if Path::new("/sys/class/zram-control").exists() {
        wait_for("removing the zram device", || zram_devices() == devices);
    }
}

#[test]
fn a_writeback_that_is_killed_leaves_no_file_behind() {
    if !requires(&[Feature::Program("fio")]) {
        return;
    }
    let _alone = alone();
    // Not where it may be a tmpfs, which takes no direct I/O.
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let arguments = ["--quick", "--runs", "1000", "writeback", "--segments", "1048576", "--dir"];
    let mut bench = Command::new(BENCH).args(arguments).arg(directory.path()).stdout(Stdio::null()).spawn().unwrap();
    let file = directory.path().join(format!("compcache-bench-{}.backing", bench.id()));
    wait_for("writing", || file.metadata().is_ok_and(|file| file.len() > 0));
    bench.kill().unwrap();
    bench.wait().unwrap();
    wait_for("undoing", || !file.exists() && left_by(bench.id()).is_empty());
}

#[test]
fn a_bench_that_is_killed_leaves_no_emulated_machine_behind() {
    let programs = ["qemu-system-x86_64", "busybox", "xz", "mkfs.ext4"].map(Feature::Program);
    if !requires(&[&[Feature::StockKernel][..], &programs].concat()) {
        return;
    }
    let _alone = alone();
    let arguments = ["--quick", "emulated", "--processors", "1", "--what", "scan"];
    let mut bench = Command::new(BENCH).args(arguments).stdout(Stdio::null()).spawn().unwrap();
    let pid = bench.id();
    let is_machine = |line: &String| line.starts_with("qemu-system-x86_64");
    wait_for("a machine", || processes_naming(&format!("compcache-bench.{pid}/")).iter().any(is_machine));
    bench.kill().unwrap();
    bench.wait().unwrap();
    wait_for("undoing", || left_by(pid).is_empty());
}

#[test]
fn a_command_keeps_its_exit_status_and_its_output() {
    if !requires(&[Feature::Root, Feature::CgroupMemory, Feature::ZramDevice]) {
        return;
    }
    let command = ["baseline", "--ram", "64M", "--swap", "zram:lzo-rle", "--", "sh", "-c", "echo said; exit 7"];
    let bench = Command::new(BENCH).args(command).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let pid = bench.id();
    let output = bench.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(output.stdout, b"said\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("by the clock"));
    assert_eq!(left_by(pid), Vec::<String>::new());
}

/// `undo` ends what has the bench's name and is of the same user, whose journals may lie where it does not look: not beside a session of another test.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Someone who runs the bench without root's rights: where the tests have those, nobody, and root is another user.
struct User {
    uid: u32,
    /// Temporary files of all users lie here.
    directory: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl User {
    fn new() -> User {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o1777)).unwrap();
        let own = directory.path().metadata().unwrap().uid();
        // Nobody need not get to where this program was built.
        fs::copy(BENCH, directory.path().join("bench")).unwrap();
        User { uid: if own == 0 { 65534 } else { own }, directory, _alone: alone() }
    }

    fn has_another_beside(&self) -> bool {
        self.directory.path().metadata().unwrap().uid() != self.uid
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Gives it to the user.
    fn own(&self, path: &Path) {
        chown(path, Some(self.uid), None).unwrap();
    }

    /// Where the user's journals lie.
    fn state(&self) -> PathBuf {
        self.path(&format!("compcache-bench.{}", self.uid))
    }

    fn bench(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.path("bench"));
        command.args(arguments).env_remove("XDG_RUNTIME_DIR").env("TMPDIR", self.directory.path());
        if self.has_another_beside() {
            command.uid(self.uid).gid(self.uid);
        }
        command
    }

    fn undo(&self) -> Output {
        self.bench(&["undo"]).output().unwrap()
    }
}

/// Puts a journal into a directory of this mode, which the caller makes.
fn plant(directory: &Path, mode: u32, steps: &str) -> PathBuf {
    fs::create_dir(directory).unwrap();
    fs::set_permissions(directory, Permissions::from_mode(mode)).unwrap();
    let journal = directory.join("1.journal");
    fs::write(&journal, steps).unwrap();
    journal
}

#[test]
fn a_journal_that_another_user_can_have_written_is_not_carried_out() {
    let user = User::new();
    let victim = user.path("victim");
    fs::write(&victim, "of the user").unwrap();
    user.own(&victim);
    let steps = format!("{{\"File\":{victim:?}}}\n");
    let is_refused = |what: &str| {
        let output = user.undo();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(victim.exists(), "{what}: {said}");
        assert!(!output.status.success(), "{what}");
        said
    };
    let state = user.state();
    // Where it was before it had the user's number in its name.
    plant(&user.path("compcache-bench"), 0o777, &steps);
    plant(&state, 0o777, &steps);
    is_refused("a directory that anybody writes to");
    if user.has_another_beside() {
        fs::set_permissions(&state, Permissions::from_mode(0o755)).unwrap();
        assert!(is_refused("another's directory").contains("somebody else made it"));
        user.own(&state);
        assert!(is_refused("another's journal").contains("1.journal is not a journal of yours"));
    }
    fs::set_permissions(&state, Permissions::from_mode(0o700)).unwrap();
    user.own(&state.join("1.journal"));
    fs::rename(&state, user.path("elsewhere")).unwrap();
    symlink(user.path("elsewhere"), &state).unwrap();
    assert!(is_refused("a link").contains("is not a directory of yours"));
    fs::remove_file(&state).unwrap();
    fs::rename(user.path("elsewhere"), &state).unwrap();
    let output = user.undo();
    assert!(output.status.success() && !victim.exists(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// In the place of `compcache run`: runs the program as it is. With KEEP it first makes what its own user cannot remove, in the session's directory.
const RUNS_IT: &str = r#"#!/bin/sh
while [ "$1" != -- ]; do
    [ "$1" = --stats ] && session=${2%/*}
    shift
done
shift
[ -n "$KEEP" ] && mkdir -p "$session/kept/inside" && chmod 0 "$session/kept"
exec "$@"
"#;

#[test]
fn a_bench_that_leaves_something_fails_and_the_next_one_does_not_begin() {
    let user = User::new();
    fs::copy(SCAN, user.path("scan")).unwrap();
    fs::write(user.path("compcache"), RUNS_IT).unwrap();
    fs::set_permissions(user.path("compcache"), Permissions::from_mode(0o755)).unwrap();
    let mut scan = user.bench(&["--quick", "scan", "--sides", "ours", "--content", "same"]);
    let mut run = |keep: &str| {
        let mut bench = scan.env("KEEP", keep).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let pid = bench.id();
        let said = std::io::read_to_string(bench.stderr.take().unwrap()).unwrap();
        (bench.wait().unwrap().success(), said, PathBuf::from(format!("/var/tmp/compcache-bench.{pid}")))
    };
    let journals = || {
        let all = fs::read_dir(user.state()).unwrap().flatten().map(|one| one.path());
        all.filter(|path| path.extension().is_some_and(|kind| kind != "lock")).count()
    };
    let (done, said, _) = run("");
    assert!(done && journals() == 0, "{said}");
    let (done, said, left) = run("yes");
    assert!(!done && left.exists() && journals() == 1, "{said}");
    assert!(said.contains("cannot undo Directory") && said.contains("this machine is not as it was"), "{said}");
    let (done, said, _) = run("");
    assert!(!done && said.contains("1 steps of a session that died are not undone"), "{said}");
    let output = user.undo();
    assert!(!output.status.success() && left.exists() && journals() == 1);
    fs::set_permissions(left.join("kept"), Permissions::from_mode(0o700)).unwrap();
    let output = user.undo();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!left.exists() && journals() == 0);
}
