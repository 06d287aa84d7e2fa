//! Programs that others wrote, on a disk that `compcache serve` serves as a block device: file systems and their checkers,
//! fio, stress-ng, and what people keep on disks (trees, repositories, databases).
//!
//! What was written is looked at only after the file system was unmounted and mounted again, so that it comes from the
//! disk and not from the page cache. Where a program's work has a result, it is done on an ordinary disk as well, and both
//! must be the same, byte for byte.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::RwLockReadGuard;
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires};

use crate::real_programs::sources;
use crate::support::{Guard, Mounted, Program, Server, await_unmounted, backing_file, beside_others, scratch};
use crate::swap_here::the_list_of_swap;

/// Whether the machine can serve block devices and has these programs.
fn can_serve(programs: &[&'static str]) -> bool {
    let mut features = vec![Feature::Root, Feature::Fuse, Feature::Loop];
    features.extend(programs.iter().map(|name| Feature::Program(name)));
    requires(&features)
}

/// What the command prints; it must succeed.
#[track_caller]
fn done(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out
}

#[track_caller]
fn run(program: &str, arguments: &[&str]) -> String {
    done(Command::new(program).args(arguments))
}

#[track_caller]
fn shell(dir: &Path, script: &str) -> String {
    let steps = format!("set -e\n{script}");
    done(Command::new("sh").args(["-c", &steps]).current_dir(dir).env("LC_ALL", "C"))
}

/// A disk with a server of its own, called `d`, and where a file system on it may be mounted. All of it goes at the end.
struct Disk {
    // Unmounted before the server ends.
    mounted: Mounted,
    device: String,
    server: Server,
    _shared: RwLockReadGuard<'static, ()>,
}

impl Disk {
    fn new(size: &str, more: &[&str]) -> Disk {
        let shared = beside_others();
        let server = Server::start(&[]);
        let mounted = Mounted(server.directory.path().join("mnt"));
        fs::create_dir(&mounted.0).unwrap();
        let create = ["disk", "create", "--name", "d", "--transport", "loop", "--size", size];
        let device = server.ok(&[&create[..], more].concat()).trim().to_owned();
        Disk { mounted, device, server, _shared: shared }
    }

    /// With a file system on it, mounted.
    fn with_file_system(kind: &str, size: &str) -> Disk {
        let disk = Disk::new(size, &["--mkfs", kind]);
        disk.mount();
        disk
    }

    fn at(&self) -> &Path {
        &self.mounted.0
    }

    fn mount(&self) {
        done(Command::new("mount").arg(&self.device).arg(self.at()));
    }

    fn unmount(&self) {
        done(Command::new("umount").arg(self.at()));
        await_unmounted(&self.device);
    }

    /// Has everything read from the disk again.
    fn mount_again(&self) {
        self.unmount();
        self.mount();
    }

    /// It must have stored something, refused nothing, and go without a trace.
    fn remove(self) {
        for refused in ["failed_reads", "failed_writes", "invalid_io"] {
            assert_eq!(self.server.stat("d", refused), 0, "{refused}");
        }
        assert!(self.server.stat("d", "num_writes") > 0, "nothing was written to it");
        // Another server's disk may take the device at once.
        let ours = backing_file(&self.device).expect("it is in use");
        self.server.ok(&["disk", "rm", "d"]);
        assert_ne!(backing_file(&self.device), Some(ours), "the loop device is left behind");
    }
}

/// Sources: this repository's own, and those of what it is built from where cargo keeps them here, else the C library's.
fn trees() -> Vec<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates lie beside each other");
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo = cargo.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let registry = cargo.map(|cargo| cargo.join("registry/src")).filter(|sources| sources.is_dir());
    vec![here.to_owned(), registry.unwrap_or_else(|| "/usr/include".into())]
}

/// Keeps a tree, loses a part of it, takes it again into the place that became free, and is found in order by its checker.
fn keeps_a_tree_and_is_found_in_order(kind: &str, check: &[&str]) {
    let disk = Disk::with_file_system(kind, "512M");
    let trees = trees();
    let copy = |number: usize| disk.at().join(format!("copy{number}"));
    let copied = |number: usize| done(Command::new("cp").arg("-a").arg(&trees[number]).arg(copy(number)));
    let same = |number: usize| done(Command::new("diff").arg("-r").args([&trees[number], &copy(number)]));
    let in_order = || {
        disk.unmount();
        done(Command::new(check[0]).args(&check[1..]).arg(&disk.device));
        disk.mount();
    };
    (0..trees.len()).for_each(|number| drop(copied(number)));
    in_order();
    (0..trees.len()).for_each(|number| drop(same(number)));

    let full = disk.server.stat("d", "orig_data_size");
    assert!(full > 20 << 20, "{full} bytes of sources are too few to show anything");
    fs::remove_dir_all(copy(1)).unwrap();
    // XFS frees what was deleted when it finds the time.
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        run("sync", &["-f", &disk.at().display().to_string()]);
        run("fstrim", &[&disk.at().display().to_string()]);
        let trimmed = disk.server.stat("d", "orig_data_size");
        if trimmed < full * 2 / 3 {
            break;
        }
        assert!(Instant::now() < deadline, "{trimmed} bytes are still stored of {full}");
        thread::sleep(Duration::from_millis(200));
    }
    copied(1);
    in_order();
    (0..trees.len()).for_each(|number| drop(same(number)));
    disk.unmount();
    disk.remove();
}

#[test]
fn ext4_keeps_a_tree_and_is_found_in_order() {
    if can_serve(&["mkfs.ext4", "fsck.ext4", "fstrim"]) {
        keeps_a_tree_and_is_found_in_order("ext4", &["fsck.ext4", "-fn"]);
    }
}

#[test]
fn xfs_keeps_a_tree_and_is_found_in_order() {
    if can_serve(&["mkfs.xfs", "xfs_repair", "fstrim"]) {
        keeps_a_tree_and_is_found_in_order("xfs", &["xfs_repair", "-n"]);
    }
}

/// Its checker compares the checksums that it keeps of all data, too.
#[test]
fn btrfs_keeps_a_tree_and_is_found_in_order() {
    if can_serve(&["mkfs.btrfs", "btrfs", "fstrim"]) {
        keeps_a_tree_and_is_found_in_order("btrfs", &["btrfs", "check", "--readonly", "--check-data-csum"]);
    }
}

/// Lets fio loose on the disk itself, by direct I/O. It ends with an error when a checksum is wrong.
fn fio(disk: &Disk, name: &str, arguments: &[&str]) {
    let (name, file) = (format!("--name={name}"), format!("--filename={}", disk.device));
    let common = ["--ioengine=libaio", "--direct=1", "--iodepth=16", "--thread", "--group_reporting", "--randseed=7"];
    let verify = ["--verify_fatal=1", "--verify_state_save=0", "--buffer_compress_percentage=50", "--refill_buffers"];
    let said = done(Command::new("fio").args([&name, &file]).args(common).args(verify).args(arguments));
    assert!(said.contains("err= 0"), "{said}");
}

#[test]
fn fio_verifies_what_it_wrote_mixed_and_trimmed_at_random() {
    if !can_serve(&["fio"]) {
        return;
    }
    let disk = Disk::new("256M", &[]);
    let four_jobs = ["--numjobs=4", "--offset_increment=64M", "--verify=crc32c"];
    let jobs = |name: &str, arguments: &[&str]| fio(&disk, name, &[&four_jobs[..], arguments].concat());
    jobs("random", &["--rw=randwrite", "--bs=4k", "--size=16M"]);
    // Requests larger than those of FUSE among them.
    jobs("mixed", &["--rw=randrw", "--bssplit=4k/40:64k/30:1m/20:2m/10", "--size=48M"]);
    jobs("trimmed", &["--rw=randtrimwrite", "--bs=4k", "--size=4M"]);
    let stored = disk.server.stat("d", "orig_data_size");
    fio(&disk, "trims", &["--rw=randtrim", "--bs=64k", "--size=64M"]);
    fio(&disk, "is-empty", &["--rw=read", "--bs=1M", "--size=64M", "--verify=pattern", "--verify_pattern=0x00"]);
    assert!(disk.server.stat("d", "orig_data_size") < stored, "trims freed nothing");
    disk.remove();
}

#[test]
fn stress_ng_finds_nothing_wrong_with_files_on_the_disk() {
    if !can_serve(&["stress-ng", "mkfs.xfs", "xfs_repair"]) {
        return;
    }
    let disk = Disk::with_file_system("xfs", "512M");
    let before = disk.server.stat("d", "num_writes");
    // Its direct I/O is for blocks of 512 bytes.
    let stressors = "--hdd 1 --hdd-bytes 16M --hdd-opts dsync,wr-rnd,rd-rnd --iomix 1 --iomix-bytes 16M --revio 1 \
        --revio-bytes 16M --readahead 1 --readahead-bytes 16M --seek 1 --seek-size 16M --sync-file 1 --sync-file-bytes 4M \
        --fallocate 1 --fallocate-bytes 16M --aiol 1 --fpunch 1";
    let mut stress = Command::new("stress-ng");
    stress.args(["--verify", "--timeout", "4s", "--temp-path"]).arg(disk.at()).args(stressors.split_whitespace());
    // What it says of its own run lands there, too.
    done(stress.current_dir(disk.server.directory.path()));
    let written = disk.server.stat("d", "num_writes") - before;
    eprintln!("{written} pages were written");
    assert!(written > 2000, "{written} pages were written: they did nothing to speak of");
    disk.unmount();
    run("xfs_repair", &["-n", &disk.device]);
    disk.remove();
}

/// Swap on files below a directory is off at the end, whatever happens: nothing else that is there could be undone.
struct NoSwapBelow(PathBuf, #[allow(dead_code, reason = "it is there to be dropped")] Guard);

impl NoSwapBelow {
    const OFF: &str = r#"while read -r of rest; do case $of in "$1"/*) swapoff "$of" ;; esac; done </proc/swaps"#;

    fn at(dir: &Path) -> NoSwapBelow {
        // Who has it on is ended first, by another such shell.
        NoSwapBelow(dir.to_owned(), Guard::new(&format!("sleep 1; {}", Self::OFF), &[dir.as_os_str()]))
    }
}

impl Drop for NoSwapBelow {
    fn drop(&mut self) {
        let _ = Command::new("sh").args(["-c", Self::OFF, "sh"]).arg(&self.0).status();
    }
}

/// It has the machine swap to files on the disk that are on for a moment each, and swaps its own pages out to them.
#[test]
fn stress_ng_swaps_to_files_on_the_disk() {
    if !can_serve(&["stress-ng", "mkfs.ext4", "fsck.ext4", "swapoff"]) {
        return;
    }
    let _list = the_list_of_swap();
    let disk = Disk::with_file_system("ext4", "256M");
    let before = disk.server.stat("d", "num_writes");
    let below = NoSwapBelow::at(disk.at());
    let report = disk.server.directory.path().join("report");
    let stress = Program::new("stress-ng").args("--verify --metrics --swap 2 --timeout 8s".split_whitespace());
    let stress = stress.args(["--temp-path".as_ref(), disk.at(), "--yaml".as_ref(), &report]).patience(120);
    let outcome = stress.dir(disk.server.directory.path()).bare();
    drop(below);
    assert!(outcome.status.success(), "{}", outcome.explain());
    // It also succeeds when it skips what it cannot do.
    let report = fs::read_to_string(report).unwrap_or_default();
    let rounds = report.lines().find_map(|line| line.trim().strip_prefix("bogo-ops:")?.trim().parse::<u64>().ok());
    let written = disk.server.stat("d", "num_writes") - before;
    eprintln!("{rounds:?} times swap was on, {written} pages were written");
    let explained = outcome.explain();
    assert!(rounds >= Some(50) && written > 5_000, "{rounds:?}, {written}: it did nothing to speak of\n{explained}");
    disk.unmount();
    run("fsck.ext4", &["-fn", &disk.device]);
    disk.remove();
}

/// Names and contents of all files below, but for git's own notes of when it last looked at them.
fn digest(dir: &Path) -> String {
    shell(dir, "find . -type f ! -path '*/.git/index' -print0 | sort -z | xargs -0 sha256sum")
}

/// Has `work` done in a directory on a disk of ours and in one on an ordinary disk. What is there afterwards, and what it
/// printed, must be the same.
fn leaves_the_same_as_on_an_ordinary_disk(kind: &str, work: impl Fn(&Path) -> String) {
    let disk = Disk::with_file_system(kind, "512M");
    let ordinary = scratch();
    let (printed, expected) = (work(disk.at()), work(ordinary.path()));
    assert_eq!(printed, expected, "it printed something else");
    disk.mount_again();
    let _ = fs::remove_dir(disk.at().join("lost+found"));
    let (found, expected) = (digest(disk.at()), digest(ordinary.path()));
    assert!(expected.lines().count() > 1 || expected.contains("./"), "it left nothing: {expected}");
    assert!(found == expected, "other files than on an ordinary disk:\n{found}\nexpected:\n{expected}");
    disk.unmount();
    disk.remove();
}

#[test]
fn a_git_clone_is_the_same_as_on_an_ordinary_disk() {
    if !can_serve(&["git", "mkfs.ext4"]) {
        return;
    }
    let origin = scratch();
    fs::write(origin.path().join("history"), sources::history(150)).unwrap();
    shell(origin.path(), "git init -q --bare it.git; git --git-dir=it.git fast-import --quiet <history");
    let url = format!("file://{}", origin.path().join("it.git").display());
    leaves_the_same_as_on_an_ordinary_disk("ext4", |dir| {
        let script = format!(
            "export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_COMMITTER_DATE='1700000000 +0000' \
                    GIT_COMMITTER_NAME=A GIT_COMMITTER_EMAIL=a@example.org
             git clone -q -c core.fsync=all -c pack.threads=1 -b main {url} clone
             cd clone; git checkout -q HEAD~70; git checkout -q main; git repack -q -a -d -f
             git fsck --full --strict; git status --porcelain; git log --stat --format=%H%n%s | cksum"
        );
        shell(dir, &script)
    });
}

#[test]
fn a_tar_of_a_source_tree_is_the_same_as_on_an_ordinary_disk() {
    if !can_serve(&["tar", "mkfs.ext4"]) {
        return;
    }
    let tree = trees().remove(0);
    leaves_the_same_as_on_an_ordinary_disk("ext4", |dir| {
        let script = format!(
            "pack() {{ tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cf $2 -C $1 .; }}
             pack {} one.tar; mkdir tree; tar -xf one.tar -C tree; pack tree two.tar; cmp one.tar two.tar
             tar -xf two.tar -C tree; cksum <two.tar",
            tree.display()
        );
        shell(dir, &script)
    });
}

#[test]
fn a_sqlite_database_is_the_same_as_on_an_ordinary_disk() {
    if !can_serve(&["sqlite3", "mkfs.ext4"]) {
        return;
    }
    let mut sql =
        String::from("PRAGMA synchronous = FULL; CREATE TABLE t (id INTEGER PRIMARY KEY, k INTEGER, text TEXT);");
    sql += "CREATE INDEX by_k ON t (k);\n";
    // Transactions that each reach the disk, with a rollback journal and with a write-ahead log.
    for journal in ["PERSIST", "WAL"] {
        sql += &format!("PRAGMA journal_mode = {journal};\n");
        for round in 0..40 {
            sql += &format!(
                "BEGIN; WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < 500)
                 INSERT INTO t (k, text) SELECT (i * 7919 + {round}) % 10007, printf('%0200d', i * {round}) FROM c;
                 UPDATE t SET text = text || k WHERE id % 7 = {round} % 7; DELETE FROM t WHERE id % 31 = {round} % 31; COMMIT;\n"
            );
        }
    }
    sql += "VACUUM; PRAGMA integrity_check; SELECT count(*), sum(k), sum(length(text)) FROM t;\n";
    let queries = scratch();
    let file = queries.path().join("x.sql");
    fs::write(&file, sql).unwrap();
    leaves_the_same_as_on_an_ordinary_disk("ext4", |dir| {
        shell(dir, &format!("sqlite3 -batch x.db <{0}; sqlite3 x.db .dump | cksum", file.display()))
    });
}
