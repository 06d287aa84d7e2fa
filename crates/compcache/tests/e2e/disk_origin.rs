//! A disk that shows somebody's file or block device: what is on it is there, whatever becomes of the server, and what was read is found
//! again in memory.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires};

use crate::support::{
    LoopDevice, Mounted, PATIENCE, Server, await_unmounted, backing_file, beside_others, said, unmount,
};

const NEEDED: [Feature; 4] = [Feature::Root, Feature::Fuse, Feature::Loop, Feature::Program("mkfs.ext4")];
const BLOCK: usize = 4096;

#[track_caller]
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{out}{}", output.status, said(&output));
    out
}

/// A file of so many bytes, with an empty ext4 in it.
fn image(directory: &Path, size_bytes: u64) -> String {
    let path = directory.join("image");
    File::create(&path).unwrap().set_len(size_bytes).unwrap();
    let path = path.display().to_string();
    run("mkfs.ext4", &["-q", &path]);
    path
}

/// A place to mount at; unmounted when dropped.
fn place(directory: &Path, name: &str) -> (Mounted, String) {
    let at = directory.join(name);
    fs::create_dir(&at).unwrap();
    (Mounted(at.clone()), at.display().to_string())
}

#[test]
fn a_file_system_on_an_origin_is_there_without_us_and_what_was_read_of_it_is_found_in_memory() {
    if !requires(&NEEDED) || !requires(&[Feature::Program("git"), Feature::Program("sqlite3")]) {
        return;
    }
    let _shared = beside_others();
    let server = Server::start(&["--memory", "64M"]);
    let directory = server.directory.path();
    let image = image(directory, 512 << 20);
    let (mounted, at) = place(directory, "mnt");
    let create = ["disk", "create", "--name", "o", "--origin", &image, "--memory", "96M", "--transport", "loop"];
    let device = server.ok(&[&create[..], &["--mount", &at]].concat()).trim().to_owned();
    assert_eq!(run("blockdev", &["--getss", &device]).trim(), "512", "what is on a file is made for such sectors");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().display().to_string();
    let copy = format!("{at}/copy");
    run("cp", &["-r", &sources, &copy]);
    run("git", &["init", "-q", &copy]);
    run("git", &["-C", &copy, "add", "."]);
    run("git", &["-C", &copy, "-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "all"]);
    let database = format!("{at}/database");
    let rows = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 20000) insert into t select i, i * i from n";
    run("sqlite3", &[&database, "create table t (i integer primary key, square integer)", rows]);

    // The kernel forgets what it has with the mount; the second time all of it is in memory.
    let read_all = || {
        run("umount", &[&at]);
        await_unmounted(&device);
        run("mount", &[&device, &at]);
        run("diff", &["-r", "-x", ".git", &sources, &copy]);
        run("git", &["-C", &copy, "fsck", "--full"]);
        assert_eq!(
            run("sqlite3", &[&database, "pragma integrity_check; select sum(square) from t"]),
            "ok\n2666866670000\n"
        );
        server.stat("o", "origin_reads")
    };
    let first = read_all();
    // Not all that does not compress is kept the first time it is read.
    read_all();
    let (before, hits) = (read_all(), server.stat("o", "succ_gets"));
    let (after, more) = (read_all(), server.stat("o", "succ_gets") - hits);
    assert!(
        after - before < more / 20 && more > first / 4,
        "{first}, {before}, {after}; {hits}, {more}\n{}",
        server.ok(&["show", "o"])
    );
    let listed = server.ok(&["list"]);
    assert!(listed.lines().any(|line| line.starts_with("o ") && line.contains('%') && line.contains(&at)), "{listed}");
    assert!(server.stat("o", "mem_used_total") <= 96 << 20, "{}", server.ok(&["show", "o"]));
    assert_eq!(server.stat("o", "origin_failed"), 0);

    server.refuses(&["disk", "rm", "o"], &["mounted on", &at]);
    run("umount", &[&at]);
    await_unmounted(&device);
    let ours = backing_file(&device).expect("it is in use");
    server.ok(&["disk", "rm", "o"]);
    assert_ne!(backing_file(&device), Some(ours), "the loop device is left behind");
    // Without us.
    run("fsck.ext4", &["-fn", &image]);
    run("mount", &["-o", "loop,ro", &image, &at]);
    run("diff", &["-r", "-x", ".git", &sources, &copy]);
    run("git", &["-c", "safe.directory=*", "-C", &copy, "fsck", "--full"]);
    drop(mounted);
}

#[test]
fn what_was_flushed_is_on_the_origin_when_the_server_is_killed() {
    if !requires(&NEEDED) {
        return;
    }
    let _shared = beside_others();
    for after_files in [5, 60] {
        let mut server = Server::start(&["--memory", "64M"]);
        let directory = server.directory.path().to_owned();
        let image = image(&directory, 128 << 20);
        let (mounted, at) = place(&directory, "mnt");
        let create = ["disk", "create", "--origin", &image, "--memory", "16M", "--transport", "loop", "--mount", &at];
        server.ok(&create);
        let synced = Mutex::new(Vec::new());
        let content = |nth: usize| format!("{nth} ").repeat(3000 + nth * 97).into_bytes();
        thread::scope(|scope| {
            scope.spawn(|| {
                for nth in 0.. {
                    let path = PathBuf::from(&at).join(nth.to_string());
                    let file = File::create(&path).and_then(|mut file| file.write_all(&content(nth)).map(|()| file));
                    let directory = File::open(&at);
                    if file.and_then(|file| file.sync_all()).and(directory.and_then(|at| at.sync_all())).is_err() {
                        return;
                    }
                    synced.lock().unwrap().push(nth);
                }
            });
            // Each is some flushes of a real file, beside tests that have the machine write all it has.
            let until = Instant::now() + 6 * PATIENCE;
            while synced.lock().unwrap().len() < after_files {
                assert!(Instant::now() < until, "files are not written");
                thread::sleep(Duration::from_millis(5));
            }
            server.child.kill().expect("it is our child");
        });
        // What is left of it goes with the mount, and with the next server.
        unmount(at.as_ref());
        let (_, _, scratch) = server.ended();
        let next = Server::start_in(scratch, &[]);
        let checked = Command::new("fsck.ext4").args(["-fp", &image]).output().unwrap();
        // The journal was played back, or there was nothing to do.
        assert!(
            checked.status.code().is_some_and(|code| code <= 1),
            "{}{}",
            String::from_utf8_lossy(&checked.stdout),
            said(&checked)
        );
        run("mount", &["-o", "loop,ro", &image, &at]);
        let synced = synced.into_inner().unwrap();
        for nth in &synced {
            assert!(
                fs::read(Path::new(&at).join(nth.to_string())).unwrap() == content(*nth),
                "file {nth} of {}",
                synced.len()
            );
        }
        drop((mounted, next));
    }
}

#[test]
fn a_block_device_is_an_origin_and_nobody_elses_meanwhile() {
    if !requires(&NEEDED) {
        return;
    }
    let _shared = beside_others();
    let server = Server::start(&["--memory", "64M"]);
    let directory = server.directory.path();
    let image = image(directory, 256 << 20);
    let origin = LoopDevice::over(&image);
    let (mounted, at) = place(directory, "mnt");
    run("mount", &[&origin.0, &at]);
    let create = ["disk", "create", "--name", "o", "--origin", &origin.0, "--memory", "32M", "--transport", "loop"];
    server.refuses(&create, &["no disk was made", &origin.0, "in use"]);
    run("umount", &[&at]);
    let device = server.ok(&create).trim().to_owned();
    let taken = Command::new("mount").args([&origin.0, &at]).output().unwrap();
    assert!(!taken.status.success(), "the origin was mounted beside us");
    server.refuses(&["disk", "create", "--origin", &origin.0], &["in use"]);
    server.refuses(&["disk", "create", "--origin", &device], &[&device]);

    run("mount", &["-o", "discard", &device, &at]);
    let noise: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(64 << 20).collect();
    fs::write(format!("{at}/noise"), &noise).unwrap();
    run("sync", &["-f", &at]);
    let used_bytes = || run("stat", &["-c", "%b", &image]).trim().parse::<u64>().unwrap() * 512;
    let full = used_bytes();
    fs::remove_file(format!("{at}/noise")).unwrap();
    run("sync", &["-f", &at]);
    run("fstrim", &[&at]);
    assert!(
        full > 64 << 20 && used_bytes() < full - (48 << 20),
        "{full}, {}: discards are not passed on",
        used_bytes()
    );
    run("umount", &[&at]);
    await_unmounted(&device);
    server.ok(&["disk", "rm", "o"]);
    run("fsck.ext4", &["-fn", &origin.0]);
    drop(mounted);
}

/// The server would wait for itself.
#[test]
fn a_loop_device_over_a_file_on_a_disk_of_the_same_server_is_no_origin_and_no_backing() {
    if !requires(&NEEDED) {
        return;
    }
    let server = Server::start(&["--memory", "64M"]);
    let (mounted, at) = place(server.directory.path(), "mnt");
    let create = ["disk", "create", "--name", "a", "--size", "64M", "--transport", "loop", "--mkfs", "ext4"];
    let disk = server.ok(&[&create[..], &["--mount", &at]].concat()).trim().to_owned();
    let image = format!("{at}/image");
    run("truncate", &["-s", "16M", &image]);
    let refuses = |device: &str| {
        let words = [device, "a disk of this server", "wait for itself", &disk];
        server.refuses(&["disk", "create", "--transport", "nbd", "--origin", device], &words);
        server.refuses(&["disk", "create", "--size", "64M", "--transport", "nbd", "--backing", device], &words);
    };
    {
        let over = LoopDevice::over(&image);
        refuses(&over.0);
        refuses(&LoopDevice::over(&over.0).0);
    }
    assert_eq!(server.ok(&["list"]).lines().count(), 2);
    run("umount", &[&at]);
    await_unmounted(&disk);
    server.ok(&["disk", "rm", "a"]);
    drop(mounted);
}

#[test]
fn an_origin_that_cannot_be_had_is_refused_with_the_reason_and_stays_as_it_is() {
    let server = Server::start(&["--memory", "32M"]);
    let directory = server.directory.path();
    let path = |name: &str| directory.join(name).display().to_string();
    fs::write(path("file"), vec![7; 3 * BLOCK + 100]).unwrap();
    fs::write(path("small"), "hardly").unwrap();
    let create = |name: &str, more: &[&str]| -> Vec<String> {
        let first = ["disk", "create", "--transport", "nbd", "--origin", name].map(str::to_owned);
        first.into_iter().chain(more.iter().map(|&word| word.to_owned())).collect()
    };
    let refuses = |name: &str, more: &[&str], words: &[&str]| {
        let command = create(name, more);
        server.refuses(&command.iter().map(String::as_str).collect::<Vec<_>>(), words);
    };
    let file = path("file");
    refuses(&path("nothing"), &[], &["no disk was made", "nothing", "No such file"]);
    refuses(&path(""), &[], &["neither a block device nor a file"]);
    refuses("/dev/null", &[], &["neither a block device nor a file"]);
    refuses(&path("small"), &[], &["6 bytes"]);
    refuses(&file, &["--memory", "100K"], &["--memory", "1M"]);
    refuses(&file, &["--recompress", "zstd:40"], &["1 to 19"]);
    refuses(&file, &["--memory", "1000T"], &["too large", "--memory"]);
    refuses(&file, &["--size", "1G"], &["--size", "--origin"]);
    refuses(&file, &["--mkfs", "ext4"], &["--mkfs", "--origin"]);
    refuses(&file, &["--backing", "/x"], &["--backing", "--origin"]);
    refuses(&file, &["--limit", "1M"], &["--limit", "--origin"]);
    server.refuses(&["disk", "create", "--memory", "1M", "--size", "1M"], &["--origin"]);
    assert_eq!(server.ok(&["list"]).lines().count(), 1);

    let create = create(&file, &["--name", "o", "--memory", "4M"]);
    server.ok(&create.iter().map(String::as_str).collect::<Vec<_>>());
    refuses(&file, &[], &["locked"]);
    assert!(server.ok(&["show", "o"]).contains("last 100 bytes"), "{}", server.ok(&["show", "o"]));
    server.refuses(&["disk", "resize", "o", "1M"], &["stays as it is", &file]);
    server.refuses(&["disk", "reset", "o"], &["stays as it is", &file]);
    server.refuses(&["show", "o", "--ramzswap"], &["cache of its origin"]);
    server.refuses(&["recompress", "o"], &["disk o, which has an origin", "by themselves"]);
    server.refuses(&["disk", "change", "o", "--limit", "0"], &["limit"]);
    server.refuses(&["disk", "change", "o", "--limit", "64K"], &["--limit", "1M"]);
    assert!(server.ok(&["show", "o"]).contains("auto, what was not used for 60 s"), "{}", server.ok(&["show", "o"]));
    server.refuses(&["disk", "change", "o", "--limit", "1000T"], &["too large"]);
    server.ok(&["disk", "change", "o", "--limit", "2M", "--codec", "zstd:3", "--recompress-after", "5"]);
    assert_eq!(server.stat("o", "memlimit"), 2 << 20);
    let shown = server.ok(&["show", "o"]);
    assert!(shown.contains("zstd:3") && shown.contains("auto, what was not used for 5 s"), "{shown}");
    server.ok(&["disk", "change", "o", "--recompress", "zstd:9"]);
    assert!(server.ok(&["show", "o"]).contains("zstd:9, what was not used for 5 s"), "{}", server.ok(&["show", "o"]));
    server.ok(&["disk", "rm", "o"]);
    assert_eq!(fs::read(&file).unwrap(), vec![7; 3 * BLOCK + 100]);
}

#[test]
fn a_client_reads_and_writes_an_origin_over_nbd_within_a_limit_that_changes() {
    if !requires(&[Feature::Program("nbdcopy")]) {
        return;
    }
    let server = Server::start(&["--memory", "32M"]);
    let directory = server.directory.path();
    let path = |name: &str| directory.join(name).display().to_string();
    let mut content = vec![0; 24 << 20];
    for block in content.chunks_mut(BLOCK) {
        fastrand::fill(&mut block[..1000]);
    }
    fs::write(path("origin"), &content).unwrap();
    let create = ["disk", "create", "--name", "o", "--transport", "nbd", "--memory", "4M", "--origin", &path("origin")];
    let at = server.ok(&create).trim().to_owned();
    let copy = |from: &str, to: &str| run("nbdcopy", &["--", from, to]);
    for limit in ["4M", "16M", "1M", "16M"] {
        server.ok(&["disk", "change", "o", "--limit", limit]);
        copy(&at, &path("out"));
        assert!(fs::read(path("out")).unwrap() == content, "other bytes at {limit}");
    }
    copy(&at, &path("out"));
    assert!(server.stat("o", "succ_gets") >= 24 << 8, "{}", server.ok(&["show", "o"]));
    // What is written is on the origin before anything is flushed by us, and read back as it is.
    content.reverse();
    fs::write(path("in"), &content).unwrap();
    copy(&path("in"), &at);
    assert!(fs::read(path("origin")).unwrap() == content);
    copy(&at, &path("out"));
    assert!(fs::read(path("out")).unwrap() == content);

    // Somebody cuts the origin short: what is gone fails, and the rest is served.
    OpenOptions::new().write(true).open(path("origin")).unwrap().set_len(8 << 20).unwrap();
    server.ok(&["disk", "change", "o", "--limit", "1M"]);
    let cut = Command::new("nbdcopy").args(["--", &at, &path("out")]).output().unwrap();
    assert!(!cut.status.success() && server.stat("o", "origin_failed") > 0);
    let mut begin = vec![0; BLOCK];
    File::open(path("origin")).unwrap().read_exact_at(&mut begin, 0).unwrap();
    assert!(begin == content[..BLOCK]);
}
