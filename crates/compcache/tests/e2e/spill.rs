//! `--spill`: what does not fit, compressed or not, goes to a file and comes back as it was, through forks, exec and closed
//! descriptors; the limit holds; nothing is left behind; what fails is said.
//!
//! The file lies where the build does: a disk, on most machines. `tests/programs/spills.c` holds memory that does not compress.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::{
    Cap, Outcome, Program, Running, Way, beside_others, memory_tester, sample_until, trap_program, ways,
};

const MIB: u64 = 1 << 20;

/// A directory on the disk that the build is on.
pub fn place() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory under the build directory")
}

fn spilling(program: Program, place: &Path) -> Program {
    program.flags(["--spill", &place.display().to_string()])
}

fn spills(arguments: &[&str], place: &Path) -> Program {
    spilling(Program::new(trap_program("spills")).args(arguments), place)
}

fn is_empty(place: &Path) -> bool {
    fs::read_dir(place).expect("the directory is there").count() == 0
}

#[track_caller]
pub fn must_have_spilled(outcome: &Outcome) {
    assert!(outcome.status.success(), "{}", outcome.explain());
    let [written, read] = ["spill_written_pages", "spill_read_pages"].map(|name| outcome.stat(name));
    assert!(written > 1000 && read > 100, "{written} pages written, {read} read: {}", outcome.explain());
    assert!(!outcome.stderr.contains("--spill: "), "there was something to be told: {}", outcome.explain());
    assert!(outcome.stderr.contains("  spill  "), "the summary does not tell of it: {}", outcome.explain());
}

/// The program, within `ram_mib`, the two ways.
fn holds_in(arguments: &[&str], ram_mib: u64) {
    let _shared = beside_others();
    for way in ways() {
        let place = place();
        let outcome = spills(arguments, place.path()).paged(way, &Cap::Ram(ram_mib * MIB));
        must_have_spilled(&outcome);
        assert_eq!(outcome.text(), "spills: right\n", "{way:?}: {}", outcome.explain());
        assert!(is_empty(place.path()), "{way:?}: something was left behind");
    }
}

#[test]
fn what_does_not_compress_and_is_four_times_the_memory_is_right_for_many_threads() {
    holds_in(&["work", "192", "4", "2"], 48);
}

#[test]
fn children_and_their_parents_have_right_memory_that_is_in_files() {
    holds_in(&["fork", "64"], 32);
}

#[test]
fn a_parent_that_changes_everything_leaves_its_children_what_they_had() {
    holds_in(&["forks", "64", "4"], 32);
}

#[test]
fn a_child_reads_the_file_of_a_parent_that_has_ended() {
    holds_in(&["outlived", "96"], 32);
}

#[test]
fn a_child_that_can_have_no_file_reads_what_it_had() {
    let _shared = beside_others();
    for way in ways() {
        let place = place();
        let directory = place.path().join("gone");
        fs::create_dir(&directory).expect("ours");
        let outcome =
            spills(&["fileless", "96", &directory.display().to_string()], &directory).paged(way, &Cap::Ram(32 * MIB));
        assert_eq!(outcome.text(), "spills: right\n", "{way:?}: {}", outcome.explain());
        assert!(outcome.status.success() && outcome.stat("spill_read_pages") > 1000, "{}", outcome.explain());
    }
}

#[test]
fn exec_begins_with_a_file_of_its_own() {
    holds_in(&["exec", "96"], 32);
}

#[test]
fn a_program_that_closes_all_descriptors_closes_not_the_file() {
    holds_in(&["closes", "64"], 32);
}

#[test]
fn memory_is_an_array_of_bytes_when_most_of_it_is_in_a_file() {
    let _shared = beside_others();
    for (way, threads) in ways().into_iter().flat_map(|way| [(way, 1), (way, 4)]) {
        let place = place();
        let tester = Program::new(memory_tester())
            .args(["--seed", &(20 + threads).to_string(), "--seconds", "3", "--mb", "160"])
            .args(["--threads", &threads.to_string()]);
        let outcome = spilling(tester, place.path()).patience(200).paged_again_if_ended(way, &Cap::Ram(24 * MIB));
        assert!(outcome.status.success(), "{way:?}: {}", outcome.explain());
        assert!(outcome.stat("spill_read_pages") > 100, "{way:?}: {}", outcome.explain());
        assert!(is_empty(place.path()));
    }
}

/// Eight times the memory; compressed, three times.
#[test]
fn what_compresses_and_is_eight_times_the_memory_is_right() {
    let _shared = beside_others();
    for way in ways() {
        let place = place();
        let forks = Program::new(trap_program("forks")).args(["both_sides"]).env("TRAP_MB", "128");
        let outcome = spilling(forks, place.path()).paged(way, &Cap::Ram(16 * MIB));
        must_have_spilled(&outcome);
        assert!(is_empty(place.path()));
    }
}

/// Holds 160 MiB that do not compress, in 40 MiB.
pub fn waiting(place: &Path, way: Way) -> Running {
    let mut running = spills(&["waits", "160"], place).piped_input().start(way, &Cap::Ram(40 * MIB));
    running.await_output("ready\n");
    running
}

/// The spill file of a process, as one of its threads has it.
fn file_of(pid: i32, place: &Path) -> Option<PathBuf> {
    let place = place.display().to_string();
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
    let files = tasks.filter_map(|task| fs::read_dir(task.path().join("fd")).ok()).flat_map(|fds| fds.flatten());
    let is_spill = |path: &PathBuf| fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with(&place));
    files.map(|fd| fd.path()).find(is_spill)
}

#[test]
fn a_tree_that_is_killed_leaves_no_file() {
    let _shared = beside_others();
    for way in ways() {
        let place = place();
        let running = waiting(place.path(), way);
        let pid = running.pids_named("spills")[0];
        let file = file_of(pid, place.path()).expect("it has a file");
        assert!(fs::metadata(&file).unwrap().len() > 32 * MIB, "and pages in it");
        assert!(is_empty(place.path()), "{way:?}: the file has a name");
        running.signal(libc::SIGKILL);
        // SAFETY: signals a process of this test's.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        sample_until("its process is gone", 20, || (!Path::new(&format!("/proc/{pid}/fd")).exists()).then_some(()));
        assert!(is_empty(place.path()), "{way:?}: something was left behind");
    }
}

#[test]
fn a_page_that_cannot_be_read_back_is_sigbus_and_never_another() {
    let _shared = beside_others();
    for (way, truncated) in ways().into_iter().flat_map(|way| [(way, true), (way, false)]) {
        let place = place();
        let mut running = waiting(place.path(), way);
        let pid = running.pids_named("spills")[0];
        let path = file_of(pid, place.path()).expect("it has a file");
        let file = OpenOptions::new().read(true).write(true).open(path).expect("the file can be opened again");
        let length = file.metadata().unwrap().len();
        file.set_len(0).unwrap();
        if !truncated {
            // Zeroes in the place of what was written.
            file.set_len(length).unwrap();
        }
        running.write_input(b"again\n");
        let outcome = running.finish();
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(outcome.status.signal(), Some(libc::SIGBUS), "{way:?}: {}", outcome.explain());
        assert!(outcome.stderr.contains("SIGBUS, rather than wrong bytes"), "{way:?}: {}", outcome.explain());
        assert!(
            !outcome.stderr.contains("MISMATCH") && !outcome.text().contains("right"),
            "{way:?}: {}",
            outcome.explain()
        );
    }
}

#[test]
fn pages_that_could_not_be_read_ahead_are_read_when_the_disk_is_well_again() {
    let _shared = beside_others();
    for way in ways() {
        let place = place();
        let mut running = spills(&["skips", "96"], place.path()).piped_input().start(way, &Cap::Ram(32 * MIB));
        running.await_output("ready\n");
        let path = file_of(running.pids_named("spills")[0], place.path()).expect("it has a file");
        let file = OpenOptions::new().read(true).write(true).open(path).expect("the file can be opened again");
        nothing_more_leaves(&running);
        let mut whole = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut whole, 0).unwrap();
        file.set_len(0).unwrap();
        running.write_input(b"again\n");
        running.await_output("lost ");
        // What would be written between a look at a block and its old contents would be lost.
        nothing_more_leaves(&running);
        // What it has written since stays.
        file.set_len(whole.len() as u64).unwrap();
        let mut block = [0; 4096];
        for (at, old) in (0..).step_by(block.len()).zip(whole.chunks_exact(block.len())) {
            file.read_exact_at(&mut block, at).unwrap();
            if block == [0; 4096] {
                file.write_all_at(old, at).unwrap();
            }
        }
        running.write_input(b"again\n");
        let outcome = running.finish();
        assert!(outcome.status.success(), "{way:?}: {}", outcome.explain());
        let text = outcome.text();
        let lost = text.lines().find_map(|line| line.strip_prefix("lost ")).and_then(|lost| lost.parse::<u32>().ok());
        assert!(lost.is_some_and(|lost| lost > 6), "{way:?}: {}", outcome.explain());
        assert!(text.ends_with("later 0\nspills: right\n"), "{way:?}: {}", outcome.explain());
    }
}

/// Waits until the program has written nothing for some seconds.
fn nothing_more_leaves(running: &Running) {
    let written = || running.stats_now().and_then(|stats| stats["spill_written_pages"].as_u64());
    let mut last = (written(), Instant::now());
    sample_until("no page leaves", 60, || {
        let now = written();
        if now != last.0 {
            last = (now, Instant::now());
        }
        (now.is_some() && last.1.elapsed() > Duration::from_secs(3)).then_some(())
    });
}

/// A file system of 16 MiB, until dropped.
struct Small(TempDir);

impl Small {
    fn mount() -> Option<Self> {
        let dir = place();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=16M", "tmpfs"]).arg(dir.path());
        mount.status().is_ok_and(|status| status.success()).then_some(Self(dir))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_file_system_and_a_full_file_are_said_once_and_the_program_goes_on() {
    let _shared = beside_others();
    let small = Small::mount();
    let on_disk = place();
    let full = |small: &Small| (small.0.path().to_owned(), "1G", "no space is left");
    // Without the right to mount, one case less; a machine that must have all has that right.
    let required = std::env::var("COMPCACHE_REQUIRE_ALL").is_ok_and(|value| value == "1");
    assert!(small.is_some() || !required, "COMPCACHE_REQUIRE_ALL=1, and nothing can be mounted here");
    let cases = small.as_ref().map(full).into_iter().chain([(on_disk.path().to_owned(), "16M", "--spill-max")]);
    for (way, (place, max, said)) in cases.flat_map(|case| ways().into_iter().map(move |way| (way, case.clone()))) {
        let program = spills(&["work", "96", "2", "2"], &place).flags(["--spill-max", max]);
        let outcome = program.paged(way, &Cap::Ram(32 * MIB));
        assert!(outcome.status.success(), "{way:?} {max}: {}", outcome.explain());
        assert_eq!(outcome.stderr.matches(said).count(), 1, "{way:?} {max}: {}", outcome.explain());
        assert!(outcome.stat("spill_written_pages") > 1000, "{way:?} {max}: {}", outcome.explain());
        // The segment that turns out to have no room counts while it is being written.
        let segment = if said == "--spill-max" { 0 } else { 128 << 10 };
        assert!(outcome.stat("spill_peak_bytes") <= 16 * MIB + segment, "{way:?} {max}: {}", outcome.explain());
    }
}

#[test]
fn what_a_process_gives_up_is_room_for_others_in_their_files() {
    let _shared = beside_others();
    for way in ways() {
        let place = place();
        let program = spills(&["frees", "128"], place.path()).flags(["--spill-max", "176M"]);
        let outcome = program.paged(way, &Cap::Ram(32 * MIB));
        must_have_spilled(&outcome);
        assert_eq!(outcome.text(), "spills: right\nspills: right\n", "{way:?}: {}", outcome.explain());
    }
}

#[test]
fn programs_of_several_processes_print_the_same_with_most_of_it_in_files() {
    let _shared = beside_others();
    let python = "import multiprocessing, hashlib, random\n\
                  data = [random.Random(n).randbytes(1 << 20) for n in range(96)]\n\
                  def digest(n): return hashlib.sha256(data[n] + data[-1 - n]).hexdigest()\n\
                  if __name__ == '__main__':\n\
                  \x20   with multiprocessing.get_context('fork').Pool(3) as pool:\n\
                  \x20       print(pool.map(digest, range(96), 4))\n";
    let place = place();
    let lines = place.path().join("lines");
    let noise = "import random, sys\nr = random.Random(5)\nfor n in range(250000): print(r.getrandbits(320))\n";
    let made = Command::new("python3").args(["-c", noise]).stdout(fs::File::create(&lines).unwrap()).status().unwrap();
    assert!(made.success());
    let sort = format!("sort --parallel=3 -S 300M {} | sha256sum", lines.display());
    let python = Program::new("python3").args(["-c", python]);
    let sort = Program::new("sh").args(["-c", &sort]).env("LC_ALL", "C");
    for (program, ram_mib) in [(python, 64), (sort, 24)] {
        let bare = program.bare();
        assert!(bare.status.success() && !bare.stdout.is_empty(), "{}", bare.explain());
        for way in ways() {
            let spilled = tempfile::tempdir_in(place.path()).unwrap();
            let outcome = spilling(program.clone(), spilled.path()).paged(way, &Cap::Ram(ram_mib * MIB));
            outcome.must_equal(&bare);
            must_have_spilled(&outcome);
            assert!(is_empty(spilled.path()));
        }
    }
}
