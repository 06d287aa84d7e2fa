//! A disk larger than the memory its server may take: blocks go to a backing, and come back as they were; and everything that can
//! go wrong with one.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires};
use rustix::fs::OFlags;

use crate::support::{LoopDevice, Mounted, PATIENCE, Server, backing_file, said, scratch};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
const LOOP_DEVICE: [Feature; 3] = [Feature::Root, Feature::Fuse, Feature::Loop];
/// O_DIRECT on x86-64.
const O_DIRECT: i32 = 0o40000;

/// Content of which no two blocks are alike: half of them do not compress, the others to about a quarter.
fn contents(bytes: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(11);
    let mut all = vec![0; bytes];
    for block in all.chunks_mut(BLOCK) {
        let random = if rng.bool() { block.len() } else { block.len() / 5 };
        rng.fill(&mut block[..random]);
    }
    all
}

/// What a server says, for as long as it runs.
fn listen(said: &mut BufReader<ChildStderr>) -> Arc<Mutex<String>> {
    let child: ChildStderr = {
        let fd = std::os::fd::AsFd::as_fd(said.get_ref()).try_clone_to_owned().expect("a descriptor");
        fd.into()
    };
    let text = Arc::new(Mutex::new(String::new()));
    let heard = text.clone();
    thread::spawn(move || {
        for line in BufReader::new(child).lines().map_while(Result::ok) {
            *heard.lock().expect("nobody panics with it") += &(line + "\n");
        }
    });
    text
}

/// Waits until the server has said something.
#[track_caller]
fn hears(text: &Mutex<String>, words: &str) {
    let until = Instant::now() + PATIENCE;
    while !text.lock().expect("nobody panics with it").contains(words) {
        assert!(Instant::now() < until, "it does not say {words:?}: {}", text.lock().expect("as above"));
        thread::sleep(Duration::from_millis(10));
    }
}

/// One block, past every cache.
fn read_block(device: &File, block: usize, aligned: &mut [u8]) -> std::io::Result<()> {
    device.read_exact_at(aligned, (block * BLOCK) as u64)
}

/// A block's worth of memory that direct input takes.
fn with_aligned<T>(work: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut room = vec![0; 2 * BLOCK];
    let at = room.as_ptr().align_offset(BLOCK);
    work(&mut room[at..at + BLOCK])
}

/// Which blocks can be read; each of them must be as it was written.
#[track_caller]
fn readable(device: &Path, written: &[u8]) -> Vec<bool> {
    let file = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(device).expect("the device is there");
    with_aligned(|block| {
        (0..written.len() / BLOCK)
            .map(|at| {
                let read = read_block(&file, at, block);
                assert!(read.is_err() || block == &written[at * BLOCK..][..BLOCK], "block {at} is another");
                read.is_ok()
            })
            .collect()
    })
}

/// Runs a command where the server sees what is mounted: it has a table of mounts of its own, which need not hear of the machine's.
#[track_caller]
fn in_mounts_of(server: &Server, command: &[&str]) {
    let pid = server.child.id().to_string();
    let output = Command::new("nsenter").args(["-t", &pid, "-m"]).args(command).output();
    let output = output.expect("nsenter can be started");
    assert!(output.status.success(), "{command:?}: {}", said(&output));
}

/// The file behind a backing: it has no name, but its server has it open.
fn nameless(server: &Server, name: &str) -> PathBuf {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", server.child.id())).expect("it runs");
    let ends = format!("{name} (deleted)");
    let found = descriptors
        .map(|entry| entry.expect("it can be listed").path())
        .find(|path| fs::read_link(path).is_ok_and(|to| to.to_string_lossy().ends_with(&ends)));
    found.expect("the server has the file open")
}

fn nbdcopy(from: &str, to: &str) {
    let output = Command::new("nbdcopy").args(["--", from, to]).output().expect("nbdcopy runs");
    assert!(output.status.success(), "nbdcopy {from} {to}: {}", said(&output));
}

#[test]
fn a_disk_of_many_times_its_servers_memory_keeps_its_contents() {
    if !requires(&[Feature::Program("nbdcopy")]) {
        return;
    }
    let server = Server::start(&["--memory", "24M"]);
    let path = |name: &str| server.directory.path().join(name).display().to_string();
    let create =
        ["disk", "create", "--name", "d", "--size", "160M", "--transport", "nbd", "--backing", &path("backing")];
    let at = server.ok(&create);
    assert!(!Path::new(&path("backing")).exists(), "the file has a name still");
    let written = contents(144 * MIB);
    fs::write(path("in"), &written).expect("the scratch directory can be written to");
    nbdcopy(&path("in"), at.trim());
    nbdcopy(at.trim(), &path("out"));
    assert!(fs::read(path("out")).expect("nbdcopy wrote it")[..written.len()] == written, "other bytes came back");

    // What does not compress is out, and more than fits into memory; what is said adds up.
    let stat = |name: &str| server.stat("d", name);
    assert!(stat("mem_used_max") <= 24 << 20 && stat("bd_count") > 144 * 256 / 3, "{}", server.ok(&["show", "d"]));
    assert!(stat("bd_writes") >= stat("bd_count") && stat("bd_reads") > 144 * 256 / 3);
    assert_eq!((stat("bd_failed"), stat("failed_reads")), (0, 0));
    let state: serde_json::Value = serde_json::from_str(&server.ok(&["show", "--json", "d"])).expect("JSON");
    let of_backing = |name: &str| state["backing"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {state}"));
    assert_eq!(of_backing("live_bytes"), state["stats"]["bd_bytes"].as_u64().expect("a number"));
    let room = of_backing("live_bytes") + of_backing("dead_bytes") + of_backing("free_bytes");
    assert_eq!((room, &state["backing"]["health"]), (of_backing("capacity_bytes"), &"good".into()));
    let ramzswap = server.ok(&["show", "--ramzswap", "d"]);
    for name in ["BDevNumReads:", "BDevNumWrites:"] {
        let line = ramzswap.lines().find(|line| line.starts_with(name)).expect("a line of ramzswap's");
        let number: u64 = line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number");
        assert!(number > 10_000, "{line}");
    }
    // All of the server, its code and its buffers too.
    let status = fs::read_to_string(format!("/proc/{}/status", server.child.id())).expect("it runs");
    let peak = status.lines().find(|line| line.starts_with("VmHWM")).expect("every process has it");
    let peak_kib: u64 = peak.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number");
    assert!(peak_kib < 100 << 10, "{peak}");

    // Emptied, its room comes back; nothing of it is left in the directory, or anywhere.
    let file = nameless(&server, "backing");
    server.ok(&["disk", "reset", "d"]);
    let until = Instant::now() + PATIENCE;
    let kib = || std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&file).expect("it is open")) / 2;
    while kib() > 8 << 10 {
        assert!(Instant::now() < until, "{} KiB are not given back", kib());
        thread::sleep(Duration::from_millis(20));
    }
    server.ok(&["disk", "rm", "d"]);
    let left: Vec<_> = fs::read_dir(server.directory.path()).expect("it is there").collect();
    assert!(left.iter().all(|entry| !entry.as_ref().expect("it can be listed").path().ends_with("backing")));
    let until = Instant::now() + PATIENCE;
    while file.exists() {
        assert!(Instant::now() < until, "the file is open still");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Writes until it is refused, and returns how many blocks were taken.
fn fill(device: &Path, written: &[u8]) -> usize {
    fill_from(device, written, 0)
}

/// As [`fill`], from this block on.
fn fill_from(device: &Path, written: &[u8], first: usize) -> usize {
    let file = OpenOptions::new().write(true).custom_flags(O_DIRECT).open(device).expect("the device is there");
    with_aligned(|block| {
        (first..written.len() / BLOCK)
            .find(|at| {
                block.copy_from_slice(&written[at * BLOCK..][..BLOCK]);
                let put = file.write_all_at(block, (at * BLOCK) as u64);
                put.is_err_and(|error| {
                    assert_eq!(error.raw_os_error(), Some(28), "{error}");
                    true
                })
            })
            .unwrap_or(written.len() / BLOCK)
    })
}

#[test]
fn a_full_backing_and_a_full_file_system_are_said_and_cost_nothing_that_was_taken() {
    if !requires(&LOOP_DEVICE) {
        return;
    }
    for full_file_system in [false, true] {
        let small = scratch();
        let small = small.path();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=16M", "tmpfs"]).arg(small);
        let _mounted = full_file_system.then(|| {
            assert!(mount.status().expect("mount runs").success());
            Mounted(small.to_owned())
        });
        // After that: it has mounts of its own.
        let mut server = Server::start(&["--memory", "8M"]);
        let heard = listen(&mut server.said);
        let backing = small.join("backing").display().to_string();
        let max = if full_file_system { "1G" } else { "16M" };
        let create = ["disk", "create", "--name", "d", "--size", "128M", "--transport", "loop", "--backing", &backing];
        let at = server.ok(&[&create[..], &["--backing-max", max]].concat());
        let (device, mut written) = (PathBuf::from(at.trim()), contents(64 * MIB));
        // None of it compresses.
        fastrand::Rng::with_seed(5).fill(&mut written);
        let taken = fill(&device, &written);
        // 8 MiB here and 16 there, but for tables, lists, and a batch that is kept for cleaning.
        assert!((18..24).contains(&(taken * BLOCK / MIB)), "{taken} blocks were taken, {full_file_system}");
        hears(&heard, "blocks of disk d stay in memory");
        hears(&heard, if full_file_system { "full" } else { "the backing is full" });
        assert!(server.ok(&["show", "d"]).contains("the backing is full"), "{}", server.ok(&["show", "d"]));
        let reads = readable(&device, &written[..taken * BLOCK]);
        assert!(reads.iter().all(|read| *read), "something that was taken cannot be read");
        // Where something is discarded there is room again.
        let discarded = Command::new("blkdiscard").args(["--length", "8M"]).arg(&device).status().expect("it runs");
        assert!(discarded.success());
        hears(&heard, "takes blocks again");
        assert_eq!(fill(&device, &written[..4 * MIB]), 4 * MIB / BLOCK);
        server.ok(&["disk", "rm", "d"]);
    }
}

#[test]
fn blocks_leave_by_hand_and_by_a_smaller_limit_or_threshold_while_the_disk_is_in_use() {
    if !requires(&LOOP_DEVICE) {
        return;
    }
    let server = Server::start(&["--memory", "512M"]);
    let backing = server.directory.path().join("backing").display().to_string();
    let create = ["disk", "create", "--name", "d", "--size", "64M", "--transport", "loop", "--backing", &backing];
    let device = PathBuf::from(server.ok(&create).trim());
    // Half of it does not compress.
    let written = contents(32 * MIB);
    assert_eq!(fill(&device, &written), written.len() / BLOCK);
    let stat = |name: &str| server.stat("d", name);
    let raw = stat("huge_pages");
    assert!(raw > 3000 && stat("bd_count") == 0, "{}", server.ok(&["show", "d"]));

    // So much, those that do not compress, all: each says what it did, and that is what the statistics say.
    let printed = server.ok(&["reclaim", "d", "4M"]);
    let some = stat("bd_count");
    assert!(printed.starts_with(&format!("{some} blocks have left")) && (900..1600).contains(&some), "{printed}");
    server.ok(&["reclaim", "d", "--incompressible"]);
    assert_eq!((stat("huge_pages"), stat("bd_count")), (0, raw));
    server.ok(&["writeback", "d"]);
    assert_eq!((stat("bd_count"), stat("compr_data_size")), (written.len() as u64 / 4096, 0));
    assert!(readable(&device, &written).iter().all(|read| *read));

    // With a smaller limit blocks leave by themselves, and with a smaller threshold more of them.
    let leaves_until = |most: u64| {
        let until = Instant::now() + PATIENCE;
        while stat("mem_used_total") > most {
            assert!(Instant::now() < until, "{} bytes are used still", stat("mem_used_total"));
            thread::sleep(Duration::from_millis(20));
        }
    };
    assert_eq!(fill(&device, &written), written.len() / BLOCK);
    assert!(stat("mem_used_total") > 16 << 20);
    server.ok(&["disk", "change", "d", "--limit", "10M"]);
    leaves_until(8 << 20);
    server.ok(&["disk", "change", "d", "--reclaim-above", "50%"]);
    assert!(server.ok(&["show", "d"]).contains("above 50 %"));
    leaves_until(5 << 20);
    assert!(readable(&device, &written).iter().all(|read| *read));
    assert_eq!(stat("failed_writes"), 0);

    server.refuses(&["disk", "change", "d", "--reclaim-above", "96%"], &["10% to 95%"]);
    server.refuses(&["disk", "change", "d", "--reclaim-above", "much"], &["no percentage"]);
    server.ok(&["disk", "create", "--name", "plain", "--size", "16M", "--transport", "nbd"]);
    server.refuses(&["reclaim", "plain"], &["plain has no backing", "--backing"]);
    server.refuses(&["disk", "change", "plain", "--reclaim-above", "50%"], &["plain has no backing"]);
    server.refuses(&["disk", "change", "plain", "--backing-daily", "1G"], &["plain has no backing"]);
    server.refuses(&["reclaim", "nothing"], &["no disk called nothing"]);
    server.ok(&["disk", "rm", "d"]);
}

/// A backing's state, as JSON shows it.
#[track_caller]
fn backing_of(server: &Server) -> serde_json::Value {
    let state: serde_json::Value = serde_json::from_str(&server.ok(&["show", "--json", "d"])).expect("JSON");
    state["backing"].clone()
}

#[test]
fn a_budget_that_is_spent_is_said_and_refuses_writes_and_more_of_it_lets_them_go_on() {
    if !requires(&LOOP_DEVICE) {
        return;
    }
    let mut server = Server::start(&["--memory", "8M"]);
    let heard = listen(&mut server.said);
    let backing = server.directory.path().join("backing").display().to_string();
    let create = ["disk", "create", "--name", "d", "--size", "128M", "--transport", "loop", "--backing", &backing];
    let budget = ["--backing-batch", "64K", "--backing-daily", "4M"];
    let device = PathBuf::from(server.ok(&[&create[..], &budget].concat()).trim());
    let mut written = vec![0; 64 * MIB];
    // None of it compresses.
    fastrand::Rng::with_seed(5).fill(&mut written);
    // 8 MiB here and 4 there, but for tables and lists.
    let taken = fill(&device, &written);
    assert!((9..12).contains(&(taken * BLOCK / MIB)), "{taken} blocks were taken");
    hears(&heard, "the day's budget of 4.0 MiB is written; more may follow in about 2");
    hears(&heard, "blocks of disk d stay in memory");
    let shown = server.ok(&["show", "d"]);
    for words in ["day's budget of 4.0 MiB", "4.0 MiB of 4.0 MiB in the last day", "disk change d --backing-daily SIZE"]
    {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    let daily = |name: &str| backing_of(&server)["daily"][name].clone();
    assert_eq!([daily("budget_bytes"), daily("written_bytes")], [4 << 20, 4 << 20]);
    assert!(daily("is_spent") == true && daily("waits") == 1, "{}", backing_of(&server));
    assert!((86_000..=87_300).contains(&daily("more_after_s").as_u64().expect("a number")), "{}", backing_of(&server));
    assert_eq!(backing_of(&server)["segments_written"], 64);
    server.refuses(&["reclaim", "d"], &["no more can", "the day's budget of 4.0 MiB is written"]);
    assert!(readable(&device, &written[..taken * BLOCK]).iter().all(|read| *read), "what was taken cannot be read");

    // More of it, and on it goes from where it was refused. From the start, blocks would be written there anew.
    server.ok(&["disk", "change", "d", "--backing-daily", "16M"]);
    hears(&heard, "takes blocks again");
    let more = fill_from(&device, &written, taken);
    assert!((19..24).contains(&(more * BLOCK / MIB)), "{more} blocks were taken");
    hears(&heard, "the day's budget of 16.0 MiB is written");
    assert!(daily("written_bytes").as_u64().expect("a number") <= 16 << 20);
    assert!(readable(&device, &written[..more * BLOCK]).iter().all(|read| *read), "what was taken cannot be read");
    // Less than was written, nothing at all, and as much as there is.
    server.ok(&["disk", "change", "d", "--backing-daily", "1M"]);
    assert!(server.ok(&["show", "d"]).contains("16.0 MiB of 1.0 MiB"), "{}", server.ok(&["show", "d"]));
    server.ok(&["disk", "change", "d", "--backing-daily", "0"]);
    assert!(server.ok(&["show", "d"]).contains("with 0 B a day nothing is written"), "{}", server.ok(&["show", "d"]));
    server.ok(&["disk", "change", "d", "--backing-daily", "none"]);
    assert_eq!(fill(&device, &written), written.len() / BLOCK);
    assert!(server.ok(&["show", "d"]).contains("in the last day, with no budget"), "{}", server.ok(&["show", "d"]));
    assert!(readable(&device, &written).iter().all(|read| *read));
    assert_eq!((server.stat("d", "failed_reads"), &backing_of(&server)["health"]), (0, &"good".into()));

    // What makes no sense changes nothing.
    server.refuses(&["disk", "change", "d", "--backing-daily", "63K"], &["not one batch of 64.0 KiB", "or 0"]);
    server.refuses(
        &["disk", "change", "d", "--backing-daily", "1", "--reclaim-above", "60%"],
        &["not one batch of 64.0 KiB"],
    );
    assert_eq!((daily("budget_bytes"), &backing_of(&server)["above_percent"]), (().into(), &85.into()));
    server.refuses(&["disk", "change", "d", "--backing-daily", "much"], &["a size, or none"]);
    server.ok(&["disk", "rm", "d"]);
}

/// While blocks leave and come back, at moments that nobody chose.
#[test]
fn a_server_killed_at_any_moment_leaves_no_file_and_a_device_that_can_be_removed() {
    if !requires(&LOOP_DEVICE) {
        return;
    }
    let mut rng = fastrand::Rng::new();
    let mut directory = scratch();
    let written = contents(24 * MIB);
    for round in 0..5 {
        let mut server = Server::start_in(directory, &["--memory", "8M"]);
        let backing = server.directory.path().join("backing").display().to_string();
        let create = ["disk", "create", "--name", "d", "--size", "64M", "--transport", "loop", "--backing", &backing];
        let device = PathBuf::from(server.ok(&create).trim());
        let bound = backing_file(&device.display().to_string());
        assert!(bound.is_some());
        let wait = Duration::from_millis(rng.u64(0..600));
        let file = OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT).open(&device).expect("it is there");
        thread::scope(|scope| {
            // Writes, then reads, until nobody answers; never other bytes.
            scope.spawn(|| {
                with_aligned(|block| {
                    for at in (0..written.len() / BLOCK).cycle().take(1 << 16) {
                        block.copy_from_slice(&written[at * BLOCK..][..BLOCK]);
                        if file.write_all_at(block, (at * BLOCK) as u64).is_err() {
                            return;
                        }
                        let back = at / 2;
                        if read_block(&file, back, block).is_err() {
                            return;
                        }
                        assert!(block == &written[back * BLOCK..][..BLOCK], "block {back} is another");
                    }
                });
            });
            thread::sleep(wait);
            server.signal("-KILL");
            server.child.wait().expect("it is our child");
        });
        drop(file);
        directory = std::mem::replace(&mut server.directory, scratch());
        let left: Vec<_> =
            fs::read_dir(directory.path()).expect("it is there").flatten().map(|entry| entry.path()).collect();
        assert!(left.iter().all(|path| !path.ends_with("backing")), "round {round}, {wait:?}: {left:?}");
        // The next server removes what is left of the device.
        let next = Server::start_in(directory, &[]);
        assert_eq!(next.ok(&["list"]).lines().count(), 1);
        // It, or one of another test that is still at it. Somebody else may have the device by now.
        let until = Instant::now() + PATIENCE;
        while backing_file(&device.display().to_string()) == bound {
            assert!(Instant::now() < until, "round {round}, {wait:?}: the device is bound still");
            thread::sleep(Duration::from_millis(20));
        }
        next.signal("-TERM");
        (_, _, directory) = next.ended();
    }
}

#[test]
fn a_backing_that_somebody_truncates_or_scribbles_on_costs_errors_and_never_a_wrong_byte() {
    if !requires(&LOOP_DEVICE) {
        return;
    }
    for scribble in [false, true] {
        let server = Server::start(&["--memory", "8M"]);
        let backing = server.directory.path().join("backing").display().to_string();
        let create = ["disk", "create", "--name", "d", "--size", "64M", "--transport", "loop", "--backing", &backing];
        let device = PathBuf::from(server.ok(&create).trim());
        let written = contents(48 * MIB);
        assert_eq!(fill(&device, &written), written.len() / BLOCK);
        assert!(readable(&device, &written).iter().all(|read| *read));
        let file = OpenOptions::new().write(true).open(nameless(&server, "backing")).expect("root may");
        let length = file.metadata().expect("it is open").len();
        assert!(length > 16 << 20, "{length} bytes are out");
        match scribble {
            false => file.set_len(8 << 20).expect("it can be made shorter"),
            true => {
                (8 << 20..length).step_by(MIB).for_each(|at| file.write_all_at(&[0x5a; 300_000], at).expect("room"));
            }
        }
        let reads = readable(&device, &written);
        let lost = reads.iter().filter(|read| !**read).count();
        assert!((500..10_000).contains(&lost), "{lost} blocks of {}", reads.len());
        let (failed, count) = (server.stat("d", "bd_failed"), server.stat("d", "bd_count"));
        assert!(failed >= lost as u64 && count >= lost as u64, "{failed} failed reads, {count} blocks out");
        let shown = server.ok(&["show", "d"]);
        assert!(shown.contains("backing errors"), "{shown}");
        // What is written anew is right again, wherever it goes.
        assert_eq!(fill(&device, &written), written.len() / BLOCK);
        assert!(readable(&device, &written).iter().all(|read| *read), "not all is right after it was written anew");
        server.ok(&["disk", "rm", "d"]);
    }
}

#[test]
fn a_backing_that_makes_no_sense_is_refused_with_the_reason_and_nothing_is_overwritten() {
    let server = Server::start(&[]);
    let path = |name: &str| server.directory.path().join(name).display().to_string();
    fs::write(path("file"), "somebody's").expect("the scratch directory can be written to");
    let create = |arguments: &[&'static str], backing: &str| -> Vec<String> {
        let size = ["disk", "create", "--size", "64M", "--transport", "nbd", "--backing", backing];
        size.iter().chain(arguments).map(ToString::to_string).collect()
    };
    let refuses = |arguments: &[&'static str], backing: &str, words: &[&str]| {
        let line = create(arguments, backing);
        server.refuses(&line.iter().map(String::as_str).collect::<Vec<_>>(), words);
    };
    refuses(&[], &path("file"), &["file is there already", "another"]);
    refuses(&[], &path(""), &["is a directory"]);
    refuses(&[], &path("nowhere/at/all"), &["cannot make the backing", "nowhere/at/all"]);
    refuses(&["--backing-max", "1M", "--backing-batch", "1M"], &path("b"), &["four batches"]);
    refuses(&["--backing-batch", "1K"], &path("b"), &["64K to 16M"]);
    refuses(&["--backing-batch", "1M", "--backing-daily", "1023K"], &path("b"), &["not one batch of 1.0 MiB", "or 0"]);
    server.refuses(&["disk", "create", "--size", "64M", "--backing-max", "1M"], &["--backing"]);
    server.refuses(&["disk", "create", "--size", "64M", "--backing-daily", "1G"], &["--backing"]);
    assert_eq!(fs::read_to_string(path("file")).expect("it is there"), "somebody's");
    assert!(!Path::new(&path("b")).exists() && server.ok(&["list"]).lines().count() == 1, "something was made");
}

#[test]
fn a_disk_that_outgrows_its_backing_says_so() {
    let server = Server::start(&[]);
    let backing = server.directory.path().join("b").display().to_string();
    let create = ["disk", "create", "--name", "d", "--size", "64M", "--transport", "nbd", "--backing", &backing];
    server.ok(&create);
    // A little more than the disk.
    let room = backing_of(&server)["capacity_bytes"].as_u64().expect("a number");
    let resize = |bytes: u64| {
        let output = server.asked(&["disk", "resize", "d", &bytes.to_string()]);
        assert!(output.status.success(), "{}", said(&output));
        said(&output)
    };
    assert_eq!(resize(room / 4096 * 4096), "");
    assert!(resize(room + (1 << 20)).contains("with room for"));
}

#[test]
fn what_is_asked_to_leave_stops_when_the_disk_is_removed_and_the_device_is_free() {
    if !requires(&LOOP_DEVICE) {
        return;
    }
    let below = Server::start(&["--memory", "256M"]);
    let device = below.ok(&["disk", "create", "--size", "192M", "--transport", "loop"]).trim().to_owned();
    let server = Server::start(&["--memory", "256M"]);
    let create = ["disk", "create", "--name", "d", "--size", "160M", "--transport", "loop", "--backing", &device];
    let mut noise = vec![0; 128 * MIB];
    fastrand::Rng::with_seed(1).fill(&mut noise);
    // Whether the disk is removed before it has begun, or when all has left, is a matter of luck.
    let is_stopped = |patience: Duration| {
        fs::write(server.ok(&create).trim(), &noise).expect("there is room");
        thread::scope(|scope| {
            let reclaim = scope.spawn(|| server.asked(&["reclaim", "d"]));
            thread::sleep(patience);
            server.ok(&["disk", "rm", "d"]);
            let exclusive = OFlags::EXCL.bits() as i32;
            let until = Instant::now() + PATIENCE;
            let mut free = loop {
                match OpenOptions::new().read(true).custom_flags(exclusive).open(&device) {
                    Ok(free) => break free,
                    Err(error) => assert!(Instant::now() < until, "somebody has it: {error}"),
                }
                thread::sleep(Duration::from_millis(5));
            };
            let mut begin = vec![1; MIB];
            free.read_exact(&mut begin).expect("it can be read");
            assert!(begin.iter().all(|byte| *byte == 0), "there is something on it");
            let reclaimed = reclaim.join().expect("it does not panic");
            let why = said(&reclaimed);
            !reclaimed.status.success() && why.contains("removed") && why.contains("blocks have left")
        })
    };
    let mut patience = (1..=12).map(|step| Duration::from_millis(25) * step);
    assert!(patience.any(is_stopped), "it was never stopped");
}

#[test]
fn a_place_on_a_disk_of_the_same_server_is_no_backing_and_no_origin() {
    if !requires(&LOOP_DEVICE) || !requires(&[Feature::Program("mkfs.ext4"), Feature::Program("nsenter")]) {
        return;
    }
    let server = Server::start(&["--memory", "64M"]);
    let at = server.directory.path().join("mnt");
    fs::create_dir(&at).expect("the scratch directory can be written to");
    let at = at.display().to_string();
    let device =
        server.ok(&["disk", "create", "--transport", "loop", "--mkfs", "ext4", "--size", "32M"]).trim().to_owned();
    in_mounts_of(&server, &["mount", &device, &at]);
    let (new, old) = (format!("{at}/backing"), format!("{at}/image"));
    in_mounts_of(&server, &["truncate", "-s", "1M", &old]);
    for place in [&new, &device] {
        let create = ["disk", "create", "--size", "64M", "--transport", "nbd", "--backing", place];
        server.refuses(&create, &[place, "a disk of this server"]);
    }
    server.refuses(&["disk", "create", "--transport", "nbd", "--origin", &old], &[&old, "a disk of this server"]);
    in_mounts_of(&server, &["test", "!", "-e", &new]);
    in_mounts_of(&server, &["umount", &at]);
    server.ok(&["disk", "rm", "disk0"]);
}

#[test]
fn a_device_is_a_backing_if_nothing_is_on_it_or_that_may_be_overwritten() {
    if !requires(&LOOP_DEVICE) {
        return;
    }
    // Its device is another disk's, on a server of its own.
    let below = Server::start(&[]);
    let device = below.ok(&["disk", "create", "--size", "32M", "--transport", "loop"]).trim().to_owned();
    OpenOptions::new().write(true).open(&device).expect("root may").write_all_at(b"something", 700_000).expect("room");
    let server = Server::start(&["--memory", "8M"]);
    let create = ["disk", "create", "--name", "d", "--size", "64M", "--transport", "loop", "--backing", &device];
    server.refuses(&create, &["there is something on", &device, "--backing-overwrite"]);
    {
        let above = LoopDevice::over(&device);
        server.refuses(&[&create[..], &["--backing-overwrite"]].concat(), &["in use by", &above.0]);
        below.refuses(&["disk", "reset", "disk0"], &["stays as it is", above.0.trim_start_matches("/dev/")]);
    }
    let at = server.ok(&[&create[..], &["--backing-overwrite"]].concat());
    below.refuses(&["disk", "rm", "disk0"], &["in use"]);
    server.refuses(&["disk", "create", "--size", "64M", "--backing", at.trim()], &["a disk of this server"]);
    let written = contents(24 * MIB);
    assert_eq!(fill(Path::new(at.trim()), &written), written.len() / BLOCK);
    assert!(readable(Path::new(at.trim()), &written).iter().all(|read| *read));
    assert!(server.stat("d", "bd_count") > 1000);
    server.ok(&["disk", "rm", "d"]);
    // It was given back with nothing on it, as far as anybody looks.
    server.ok(&create);
    server.ok(&["disk", "rm", "d"]);
}

#[test]
fn a_disk_of_sectors_larger_than_a_page_is_no_backing_and_a_file_on_it_is() {
    if !requires(
        &[&LOOP_DEVICE[..], &[Feature::LargeSectors, Feature::Program("mkfs.xfs"), Feature::Program("nsenter")]]
            .concat(),
    ) {
        return;
    }
    let place = scratch();
    let (image, at) = (place.path().join("image"), place.path().join("at"));
    File::create(&image).and_then(|file| file.set_len(512 << 20)).expect("there is room");
    let device = LoopDevice::with(&["--sector-size", "16384", image.to_str().expect("a plain name")]);
    let made = Command::new("mkfs.xfs").args(["-q", "-s", "size=16384", "-b", "size=16384", &device.0]).output();
    assert!(made.as_ref().is_ok_and(|made| made.status.success()), "{made:?}");
    fs::create_dir(&at).expect("there is room");
    let server = Server::start(&["--memory", "8M"]);
    let path = at.to_str().expect("a plain name");
    in_mounts_of(&server, &["mount", &device.0, path]);
    let file = at.join("backing");
    let create = ["disk", "create", "--name", "d", "--size", "64M", "--transport", "loop", "--backing"];
    let disk = server.ok(&[&create[..], &[file.to_str().expect("a plain name")]].concat());
    let written = contents(24 * MIB);
    assert_eq!(fill(Path::new(disk.trim()), &written), written.len() / BLOCK);
    assert!(server.stat("d", "bd_count") > 1000);
    assert!(readable(Path::new(disk.trim()), &written).iter().all(|read| *read));
    server.ok(&["disk", "rm", "d"]);
    in_mounts_of(&server, &["umount", path]);
    server.refuses(
        &[&create[..], &[&device.0, "--backing-overwrite"]].concat(),
        &["sectors of 16.0 KiB", "a file there"],
    );
}
