//! The limits hold, and the books are right: measured from outside, by what the kernel says of the processes.
//!
//! `tests/programs/holds.c` holds memory whose place it prints, so that its resident pages are counted in
//! `/proc/PID/pagemap`, whatever our own statistics say; `grows.c` does the same with a heap that grows in small pieces.
//! Those that measure how much there is at a moment run alone: how far a program gets ahead of the pager depends on who else
//! wants the processors. They come first of all (tests run in the order of their names): one that waits in the midst of others to be alone
//! has all wait that come after it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires};

use crate::spill;
use crate::support::{
    Cap, Cgroup, Program, Running, Way, alone, beside_others, compcache, preload, sample_until, scratch, trap_program,
    ways,
};

const MIB: u64 = 1 << 20;
/// A tenth above the limit is allowed.
const TOLERANCE: f64 = 1.10;

fn holds(arguments: &[&str]) -> Program {
    Program::new(trap_program("holds")).args(arguments)
}

/// The memory that `holds` or `grows` said it uses.
struct Area {
    at: u64,
    pages: u64,
}

impl Area {
    /// As the `number`th program of this run printed it.
    fn of(running: &Running, number: usize) -> Self {
        let said = running.stdout_so_far();
        let line = said.lines().filter(|line| line.starts_with("area ")).nth(number).expect("an area");
        let mut fields = line.split(' ').skip(1);
        let at = fields.next().and_then(|at| u64::from_str_radix(at.trim_start_matches("0x"), 16).ok());
        Self { at: at.expect("an address"), pages: fields.next().and_then(|n| n.parse().ok()).expect("a number") }
    }

    /// How much of it is resident; `None` when the process is gone.
    fn resident_bytes(&self, pid: i32) -> Option<u64> {
        let file = File::open(format!("/proc/{pid}/pagemap")).ok()?;
        let mut entries = vec![0; self.pages as usize * 8];
        file.read_exact_at(&mut entries, self.at / 4096 * 8).ok()?;
        Some(entries.chunks_exact(8).filter(|entry| entry[7] & 0x80 != 0).count() as u64 * 4096)
    }

    /// Of how many mappings it consists.
    fn mappings(&self, pid: i32) -> usize {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the map of a process that runs");
        let start = |line: &str| u64::from_str_radix(line.split('-').next()?, 16).ok();
        maps.lines().filter_map(start).filter(|at| (self.at..self.at + self.pages * 4096).contains(at)).count()
    }
}

/// Anonymous and shared memory of a process, its share of what is shared: resident pages and everything of ours.
pub fn total_bytes(pid: i32) -> Option<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let field = |name: &str| -> Option<u64> {
        rollup.lines().find_map(|line| line.strip_prefix(name))?.trim().trim_end_matches(" kB").trim().parse().ok()
    };
    Some((field("Pss_Anon:")? + field("Pss_Shmem:")?) * 1024)
}

/// The one in the middle, and the largest.
fn median_and_peak(mut samples: Vec<u64>) -> (u64, u64) {
    samples.sort_unstable();
    (samples[samples.len() / 2], samples[samples.len() - 1])
}

/// Samples until the run ends or `seconds` are over.
fn sample(running: &Running, seconds: f64, mut measure: impl FnMut() -> Option<u64>) -> Vec<u64> {
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let mut samples = Vec::new();
    while Instant::now() < until {
        samples.extend(measure());
        std::thread::sleep(Duration::from_millis(15));
    }
    assert!(samples.len() > 10, "too few samples: {}", running.stderr_so_far());
    samples
}

#[test]
fn resident_memory_stays_within_a_tenth_of_the_cap_once_warm() {
    let _alone = alone();
    for way in ways() {
        let mut running = holds(&["96", "3"]).start(way, &Cap::resident_mib(24));
        running.await_output("warm\n");
        let area = Area::of(&running, 0);
        let pid = running.pids_named("holds")[0];
        let mut counted = 0;
        let samples = sample(&running, 2.5, || {
            let stats = running.stats_now().unwrap_or_default();
            counted = counted.max(stats["resident_bytes"].as_u64().unwrap_or(0));
            area.resident_bytes(pid)
        });
        let (middle, peak) = median_and_peak(samples);
        let outcome = running.finish();
        assert!(outcome.status.success(), "{}", outcome.explain());
        let cap = 24.0 * MIB as f64;
        eprintln!("{way:?}: resident median {} KiB, peak {} KiB of {} KiB", middle >> 10, peak >> 10, cap as u64 >> 10);
        assert!(peak as f64 <= cap * TOLERANCE, "{way:?}: {peak} resident bytes under a cap of {cap}");
        // A pager that keeps nothing resident keeps its cap too, and is useless.
        assert!(middle as f64 >= cap * 0.6, "{way:?}: only {middle} of {cap} bytes are used");
        // The peak of the statistics includes the time before it was warm.
        let told = outcome.stat("resident_peak_bytes");
        assert!(
            counted as f64 >= cap * 0.6 && told as f64 >= peak as f64 * 0.9,
            "{way:?}: they say {counted}, peak {told}"
        );
        assert_eq!(outcome.stat("resident_limit_bytes"), 24 * MIB);
    }
}

/// The kernel moves the pages of one mapping with one call, and a heap that grows while it is paged is many of them.
#[test]
fn a_heap_that_grows_in_pieces_stays_within_a_tenth_of_the_cap() {
    let _alone = alone();
    for way in ways() {
        let program = Program::new(trap_program("grows")).args(["96", "3", "256"]);
        let mut running = program.start(way, &Cap::resident_mib(24));
        running.await_output("warm\n");
        let area = Area::of(&running, 0);
        let pid = running.pids_named("grows")[0];
        let mappings = area.mappings(pid);
        let samples = sample(&running, 2.5, || area.resident_bytes(pid));
        let (middle, peak) = median_and_peak(samples);
        let outcome = running.finish();
        assert!(outcome.status.success(), "{}", outcome.explain());
        let cap = 24 * MIB;
        eprintln!(
            "{way:?}: {mappings} mappings, resident median {} KiB, peak {} KiB of {} KiB",
            middle >> 10,
            peak >> 10,
            cap >> 10
        );
        // In one mapping, or a few, it would show nothing.
        assert!(mappings >= 16, "{way:?}: the heap consists of {mappings} mappings only");
        assert!(peak as f64 <= cap as f64 * TOLERANCE, "{way:?}: {peak} resident bytes under a cap of {cap}");
        assert!(middle as f64 >= cap as f64 * 0.6, "{way:?}: only {middle} of {cap} bytes are used");
        outcome.must_have_evicted();
    }
}

#[test]
fn total_memory_stays_within_a_tenth_of_ram() {
    let _alone = alone();
    let ram = 64 * MIB;
    for way in ways() {
        // Before the program is warm ([S7]) some milliseconds in which the evictor does not run are enough to pass it: one of three must not.
        let mut peaks = Vec::new();
        let within = |bytes: &u64| *bytes as f64 <= ram as f64 * TOLERANCE;
        while !peaks.last().is_some_and(within) {
            assert!(peaks.len() < 3, "{way:?}: {peaks:?} bytes in all, under --ram {ram}");
            peaks.push(peak_from_the_first_page_on(way, ram));
        }
    }
}

/// The whole is capped, not only the steady state. The most by the kernel and by the statistics.
fn peak_from_the_first_page_on(way: Way, ram: u64) -> u64 {
    let mut running = holds(&["96", "3"]).start(way, &Cap::Ram(ram));
    let mut samples = Vec::new();
    let pid = sample_until("the program runs", 20, || running.pids_named("holds").first().copied());
    while !running.stdout_so_far().contains("warm\n") {
        samples.extend(total_bytes(pid));
        running.still_runs("warm\n");
    }
    samples.extend(sample(&running, 2.0, || total_bytes(pid)));
    let (count, (_, peak)) = (samples.len(), median_and_peak(samples));
    let outcome = running.finish();
    assert!(outcome.status.success(), "{}", outcome.explain());
    eprintln!("{way:?}: total peak {} KiB of {} KiB ({count} samples)", peak >> 10, ram >> 10);
    let said = outcome.stat("total_peak_bytes");
    assert!(said as f64 >= peak as f64 * 0.85, "{way:?}: the statistics say {said}, the kernel {peak}");
    assert_eq!(outcome.stat("ram_limit_bytes"), ram);
    outcome.must_have_evicted();
    peak.max(said)
}

/// Each has to reckon with the others, before any of them has looked again.
#[test]
fn several_processes_that_grow_at_once_keep_within_the_limit_too() {
    let _shared = beside_others();
    let ram = 384 * MIB;
    let one = format!("{} 160 1 & ", trap_program("holds").display());
    let four = Program::new("sh").args(["-c", &format!("{} wait", one.repeat(4))]);
    for way in ways() {
        // As above: of three tries.
        let mut peaks = Vec::new();
        while !peaks.last().is_some_and(|peak| *peak as f64 <= ram as f64 * 1.15) {
            assert!(peaks.len() < 3, "{way:?}: {peaks:?} bytes in all, under --ram {ram}");
            let outcome = four.paged(way, &Cap::Ram(ram));
            assert_eq!((outcome.status.success(), outcome.text().matches("right").count()), (true, 4));
            peaks.push(outcome.stat("total_peak_bytes"));
        }
    }
}

/// Faster than pages can leave: it waits until they have.
#[test]
fn a_program_that_floods_memory_keeps_within_the_limit_too() {
    let _shared = beside_others();
    let ram = 192 * MIB;
    for way in ways() {
        let mut peaks = Vec::new();
        while !peaks.last().is_some_and(|peak| *peak as f64 <= ram as f64 * 1.15) {
            assert!(peaks.len() < 3, "{way:?}: {peaks:?} bytes in all, under --ram {ram}");
            let outcome = Program::new(trap_program("floods")).args(["640"]).paged(way, &Cap::Ram(ram));
            assert!(outcome.status.success(), "{}", outcome.explain());
            peaks.push(outcome.stat("total_peak_bytes"));
        }
    }
}

#[test]
fn who_is_held_up_finds_no_call_of_his_cut_short() {
    let _shared = beside_others();
    let ram = 128 * MIB;
    for way in ways() {
        let outcome = Program::new(trap_program("held_up")).args(["600"]).paged(way, &Cap::Ram(ram));
        assert!(outcome.status.success() && outcome.text() == "right\n", "{}", outcome.explain());
        let held_s = outcome.stats.as_ref().and_then(|stats| stats["held_s"].as_f64());
        assert!(held_s.is_some_and(|held_s| held_s > 0.0), "nobody was held up: {held_s:?}, {}", outcome.explain());
    }
}

/// The kernel ends what has more than the group may, be it for a moment: of three tries one must come to its end, and without the brake none does.
#[test]
fn a_program_that_floods_memory_ends_in_a_memory_cgroup_of_a_third_of_it() {
    if !requires(&[Feature::CgroupMemory]) {
        return;
    }
    let _shared = beside_others();
    let cgroup = Cgroup::new(256 * MIB);
    let object = format!("COMPCACHE_PRELOAD={}", preload().display());
    let [compcache, program] = [compcache().to_owned(), trap_program("floods")];
    let [compcache, program] = [&compcache, &program].map(|path| path.to_str().expect("a name of letters"));
    let arguments = [&object, compcache, "run", "--", program, "700"];
    let mut failed = Vec::new();
    while failed.len() < 3 {
        let output = cgroup.output("env".as_ref(), &arguments);
        if output.status.success() {
            return;
        }
        failed.push(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    panic!("{failed:#?}");
}

/// What does not fit must leave nevertheless, but of the one that works it is not taken because others are there.
#[test]
fn a_program_keeps_what_it_works_on_beside_shells_that_wait() {
    let _shared = beside_others();
    let script = format!("sleep 60 & {} 80 3 noise 9; kill $!", trap_program("holds").display());
    for way in ways() {
        let outcome = Program::new("sh").args(["-c", &script]).paged(way, &Cap::Ram(64 * MIB));
        assert!(outcome.status.success(), "{}", outcome.explain());
        // All of it is looked at once in the end, mostly brought before it is asked for.
        assert!(outcome.stat("faults_stored") < 5_000, "{way:?}: {:#?}", outcome.stats);
    }
}

/// Under the kernel's reclaim, and under ours without the small queue, every page of every pass comes from the pool.
#[test]
fn the_limit_holds_whatever_the_content_where_it_spills() {
    let _alone = alone();
    for way in ways() {
        let place = spill::place();
        let mut running = spill::waiting(place.path(), way);
        let pid = running.pids_named("spills")[0];
        running.write_input(b"again\nand again\n");
        let mut samples = Vec::new();
        while running.stdout_so_far().matches("right\n").count() < 2 {
            samples.extend(total_bytes(pid));
            running.still_runs("right\n");
        }
        running.close_input();
        spill::must_have_spilled(&running.finish());
        samples.sort_unstable();
        let [middle, peak] = [samples.len() / 2, samples.len() - 1].map(|at| samples[at]);
        eprintln!("{way:?}: total median {} KiB, peak {} KiB of {} KiB", middle >> 10, peak >> 10, 40 << 10);
        assert!(peak <= 44 * MIB, "{way:?}: {peak} bytes under a limit of 40 MiB");
        assert!(middle >= 20 * MIB, "{way:?}: only {middle} bytes of 40 MiB are used");
    }
}

#[test]
fn a_scan_finds_a_part_of_its_memory_still_there() {
    const PASSES: u64 = 6;
    let _alone = alone();
    let scans = Program::new(trap_program("scans")).args([&PASSES.to_string()]).env("TRAP_MB", "64");
    let outcome = scans.paged(Way::Move, &Cap::resident_mib(16));
    assert!(outcome.status.success(), "{}", outcome.explain());
    let (pages, brought) = (64 * MIB / 4096 * PASSES, outcome.stat("faults_stored") + outcome.stat("readahead_pages"));
    eprintln!("{brought} of {pages} pages came from the pool");
    assert!(brought * 10 <= pages * 9, "{brought} of {pages} pages came from the pool: {:#?}", outcome.stats);
    // What was only read leaves as it came.
    let (unchanged, evicted) = (outcome.stat("unchanged_pages"), outcome.stat("evicted_pages"));
    eprintln!("{unchanged} of {evicted} pages left unchanged");
    assert!(unchanged * 2 >= evicted, "{unchanged} of {evicted} pages were not compressed again: {:#?}", outcome.stats);
}

/// Of what changed little only that is stored.
#[test]
fn pages_with_a_counter_in_them_are_patched() {
    let _alone = alone();
    let counts = Program::new(trap_program("scans")).args(["6", "counting"]).env("TRAP_MB", "64");
    let outcome = counts.paged(Way::Move, &Cap::resident_mib(16));
    assert!(outcome.status.success(), "{}", outcome.explain());
    let (patched, evicted) = (outcome.stat("patched_pages"), outcome.stat("evicted_pages"));
    eprintln!("{patched} of {evicted} pages were patched");
    assert!(patched * 2 >= evicted, "{patched} of {evicted} pages were patched: {:#?}", outcome.stats);
}

#[test]
fn one_cap_holds_for_a_tree_of_processes() {
    let _alone = alone();
    for way in ways() {
        let holds = trap_program("holds").display().to_string();
        let script = format!("{holds} 40 4 & {holds} 40 4 & {holds} 40 4 & wait");
        let running = Program::new("sh").args(["-c", &script]).start(way, &Cap::resident_mib(32));
        let warm = |running: &Running| running.stdout_so_far().matches("warm\n").count() == 3;
        sample_until("all three are warm", 60, || warm(&running).then_some(()));
        // Which area belongs to which process is told by where its pages are: each is looked up in all three.
        let pids = running.pids_named("holds");
        assert_eq!(pids.len(), 3);
        let areas: Vec<Area> = (0..3).map(|number| Area::of(&running, number)).collect();
        let resident = || {
            pids.iter().map(|pid| areas.iter().filter_map(|area| area.resident_bytes(*pid)).max()).sum::<Option<u64>>()
        };
        let samples = sample(&running, 2.0, resident);
        let (middle, peak) = median_and_peak(samples);
        let outcome = running.finish();
        assert_eq!(outcome.text().matches("right\n").count(), 3, "{}", outcome.explain());
        eprintln!("{way:?}: resident median {} KiB, peak {} KiB of 32768 KiB", middle >> 10, peak >> 10);
        assert!(peak as f64 <= 32.0 * MIB as f64 * TOLERANCE, "{way:?}: {peak} resident bytes in the tree");
        assert!(middle >= 16 * MIB, "{way:?}: only {middle} bytes of the budget are used");
    }
}

#[test]
fn what_a_process_that_waits_has_goes_to_those_that_work() {
    let _shared = beside_others();
    for way in ways() {
        let holds = trap_program("holds").display().to_string();
        // The second has filled 96 MiB, and waits for a line that comes when the first has ended: whose 96 MiB fit, if the second keeps next to nothing.
        let script = format!("{{ {holds} 96 4 text >&2; echo; }} | {holds} 97 0 text 97 96");
        let outcome = Program::new("sh").args(["-c", &script]).paged(way, &Cap::Ram(150 * MIB));
        assert!(outcome.status.success() && outcome.text().ends_with("right\n"), "{}", outcome.explain());
        assert!(outcome.stat("faults_stored") < 30_000, "{way:?}: {:#?}", outcome.stats);
        // They fit, but not beside what waits in staging: of what leaves, most comes back from there, and not page by page.
        let [evicted, second_chances] = ["evicted_pages", "refaults_staged"].map(|name| outcome.stat(name));
        eprintln!(
            "{way:?}: {second_chances} of {evicted} second chances, {} faults from the pool",
            outcome.stat("faults_stored")
        );
        assert!(second_chances * 5 < evicted * 2, "{way:?}: {:#?}", outcome.stats);
    }
}

/// Asks it to end.
fn end(pid: i32) {
    // SAFETY: it takes numbers; the process is one that a test has started, and still runs.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
}

#[test]
fn a_pager_that_has_nothing_to_do_takes_little() {
    let _shared = beside_others();
    let place = scratch();
    let mut bare = Command::new("sleep").arg("60").spawn().expect("there is sleep");
    std::thread::sleep(Duration::from_millis(200));
    let without = total_bytes(bare.id() as i32).expect("it sleeps");
    bare.kill().and_then(|()| bare.wait()).expect("it is ours");
    for way in ways() {
        let taken = |flags: &[&str]| {
            let running = Program::new("sleep").args(["60"]).flags(flags).start(way, &Cap::Ram(512 * MIB));
            let pid = sample_until("it has begun", 10, || running.pids_named("sleep").first().copied());
            std::thread::sleep(Duration::from_millis(300));
            let bytes = total_bytes(pid).expect("it sleeps");
            end(pid);
            assert_eq!(running.finish().status.signal(), Some(libc::SIGTERM));
            bytes.saturating_sub(without)
        };
        let (fits, spills) = (taken(&[]), taken(&["--spill", &place.path().display().to_string()]));
        eprintln!("{way:?}: {} KiB, with a spill {} KiB", fits >> 10, spills >> 10);
        assert!(fits <= 224 << 10 && spills <= 288 << 10, "{way:?}: {fits} bytes, with a spill {spills}");
    }
}

#[test]
fn a_killed_process_gives_its_share_back() {
    let _alone = alone();
    for way in ways() {
        let holds = trap_program("holds").display().to_string();
        let script = format!("{holds} 48 60 & victim=$!; {holds} 24 8 text 24; kill -9 $victim; {holds} 24 24; wait");
        let running = Program::new("sh").args(["-c", &script]).start(way, &Cap::resident_mib(32));
        sample_until("both are warm", 60, || (running.stdout_so_far().matches("warm\n").count() == 2).then_some(()));
        let before = sample_until("both are counted", 10, || {
            running
                .stats_now()
                .filter(|stats| stats["processes"].as_u64() >= Some(2) && stats["pages_stored"].as_u64() > Some(0))
        });
        // The victim dies; what it held resident and stored is gone from the books, and the next one gets it.
        sample_until("the third is warm", 60, || {
            (running.stdout_so_far().matches("warm\n").count() == 3).then_some(())
        });
        let area = Area::of(&running, 2);
        let pid = running.pids_named("holds")[0];
        let late = sample_until("the share of the dead is used by the living", 20, || {
            let resident = area.resident_bytes(pid)?;
            (resident >= 22 * MIB).then_some(resident)
        });
        let after = sample_until("the books forget the dead", 20, || {
            let stats = running.stats_now()?;
            (stats["mem_used_total_bytes"].as_u64()? < before["mem_used_total_bytes"].as_u64()? / 2).then_some(stats)
        });
        let outcome = running.finish();
        eprintln!(
            "{way:?}: {} KiB resident after the death; {} processes before, {} after",
            late >> 10,
            before["processes"],
            after["processes"]
        );
        assert_eq!(outcome.text().matches("right\n").count(), 2, "{}", outcome.explain());
        assert!(after["processes"].as_u64() <= before["processes"].as_u64());
        assert_eq!(outcome.stat("processes"), 0);
    }
}

#[test]
fn pages_shared_after_a_fork_count_once_in_each_process() {
    let _shared = beside_others();
    for way in ways() {
        let size = 48 * MIB;
        // All of it fits: nothing comes or goes but by the fork and the writes after it.
        let program = Program::new(trap_program("twins")).args(["48"]).piped_input();
        let mut running = program.start(way, &Cap::resident_mib(256));
        // What the books say of so many processes, and what the kernel says they have between them.
        let mut look = |word: &str, processes: u64| {
            let least = processes * size * 9 / 10;
            running.await_output(word);
            let seconds = |stats: &serde_json::Value| stats["wall_s"].as_f64().unwrap_or(0.0);
            let printed = running.stats_now().map_or(0.0, |stats| seconds(&stats));
            let told = sample_until(&format!("the books count {least} bytes when {word:?} is printed"), 10, || {
                let stats = running.stats_now().filter(|stats| seconds(stats) > printed + 1.0)?;
                let counted = stats["resident_bytes"].as_u64()?;
                (stats["processes"].as_u64() == Some(processes) && counted >= least).then_some(counted)
            });
            let there = running.pids_named("twins").into_iter().map(total_bytes).sum::<Option<u64>>();
            running.write_input(b"\n");
            (told, there.expect("they wait"))
        };
        let alone = look("alone\n", 1);
        let forked = look("forked\n", 2);
        let written = look("written\n", 2);
        let outcome = running.finish();
        assert!(outcome.status.success(), "{}", outcome.explain());
        for (when, (told, there)) in [("alone", alone), ("forked", forked), ("written", written)] {
            eprintln!("{way:?}: {when}: {} KiB in the books, {} KiB there", told >> 10, there >> 10);
        }
        assert!(forked.1 < size * 3 / 2, "the fork has copied the memory, so nothing was shared");
        assert!(written.1 >= 2 * size, "the child has pages of its own: {} bytes", written.1);
        // Twice from the fork on, and no more when it has become true.
        for (told, _) in [forked, written] {
            assert!(told as f64 <= 2.0 * alone.0 as f64 * TOLERANCE, "{told} bytes in the books, {} before", alone.0);
        }
        assert_eq!(outcome.stat("evicted_pages"), 0);
    }
}

#[test]
fn a_program_that_fits_its_cap_is_left_alone() {
    let _shared = beside_others();
    for way in ways() {
        let mut running = holds(&["32", "2"]).start(way, &Cap::resident_mib(64));
        running.await_output("warm\n");
        let pid = running.pids_named("holds")[0];
        let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it sleeps").count();
        let mappings = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("it sleeps");
        // The pager's own is wiped on fork, as nothing else is here.
        let is_registered = |line: &&str| {
            let has = |wanted| line.split(' ').any(|flag| flag == wanted);
            line.starts_with("VmFlags:") && has("um") && !has("wf")
        };
        assert_eq!((threads, mappings.lines().find(is_registered)), (2, None), "{way:?}");
        let outcome = running.finish();
        assert!(outcome.status.success(), "{}", outcome.explain());
        assert_eq!((outcome.stat("evicted_pages"), outcome.stat("faults")), (0, 0), "{:#?}", outcome.stats);
    }
}

#[test]
fn hot_memory_stays_resident() {
    let _alone = alone();
    for way in ways() {
        // 8 MiB are used all the time, 88 MiB never, 24 MiB may stay.
        let mut running = holds(&["96", "3", "text", "8"]).start(way, &Cap::resident_mib(24));
        running.await_output("warm\n");
        let area = Area::of(&running, 0);
        let hot = Area { at: area.at, pages: 8 * MIB / 4096 };
        let pid = running.pids_named("holds")[0];
        std::thread::sleep(Duration::from_millis(800));
        let samples = sample(&running, 1.5, || hot.resident_bytes(pid));
        let (middle, _) = median_and_peak(samples);
        let outcome = running.finish();
        assert!(outcome.status.success(), "{}", outcome.explain());
        assert!(middle as f64 >= 0.95 * 8.0 * MIB as f64, "{way:?}: only {middle} bytes of 8 MiB in use are resident");
    }
}

#[test]
fn hot_memory_stays_resident_beside_a_pool_that_has_grown() {
    let _shared = beside_others();
    for way in ways() {
        // 86 MiB that nobody uses leave no more than 12 of 44: in them, 10 have room beside what is on its way out.
        let outcome = holds(&["96", "2", "text", "10"]).paged(way, &Cap::Ram(44 * MIB));
        assert!(outcome.text().ends_with("right\n"), "{}", outcome.explain());
        outcome.must_have_evicted();
        assert!(outcome.stat("faults") < 12_000, "{way:?}: {:#?}", outcome.stats);
    }
}

#[test]
fn new_memory_takes_its_turn_to_leave() {
    let _shared = beside_others();
    for way in ways() {
        let program = Program::new(trap_program("fills")).args(["6", "8", "12"]);
        let outcome = program.paged(way, &Cap::resident_mib(12));
        assert!(outcome.text().ends_with("right\n"), "{}", outcome.explain());
        outcome.must_have_evicted();
        // Where the new part does not leave, all else has to do without its room: up to 120 000.
        assert!(outcome.stat("faults_stored") < 50_000, "{way:?}: {:#?}", outcome.stats);
    }
}

#[test]
fn memory_that_does_not_compress_is_neither_lost_nor_killed() {
    let _shared = beside_others();
    for way in ways() {
        let outcome = holds(&["48", "1", "noise"]).paged(way, &Cap::Ram(24 * MIB));
        assert!(outcome.status.success(), "{}", outcome.explain());
        assert!(outcome.text().ends_with("right\n"), "{}", outcome.explain());
        // What did not fit is told, with its amount.
        assert!(outcome.stat("total_peak_bytes") > 40 * MIB, "{:#?}", outcome.stats);
        assert!(outcome.stderr.contains("MiB"), "the summary says nothing of it: {}", outcome.explain());
    }
}

#[test]
fn pages_that_repeat_a_word_cost_next_to_nothing() {
    let _shared = beside_others();
    for way in ways() {
        let mut running = holds(&["96", "1", "same"]).start(way, &Cap::resident_mib(8));
        running.await_output("warm\n");
        let stats = sample_until("the statistics are written", 10, || {
            running.stats_now().filter(|stats| stats["same_pages"].as_u64() > Some(10_000))
        });
        let used = stats["mem_used_total_bytes"].as_u64().unwrap_or(u64::MAX);
        assert!(used < 4 * MIB, "{way:?}: {stats:#}");
        let outcome = running.finish();
        assert!(outcome.status.success(), "{}", outcome.explain());
    }
}

/// They never leave, which is when what was stored of them was given up.
#[test]
fn nothing_is_kept_of_pages_that_came_back_to_be_locked() {
    let _shared = beside_others();
    for way in ways() {
        let mut running = holds(&["48", "5"]).env("TRAP_LOCK", "1").start(way, &Cap::resident_mib(16));
        running.await_output("locked\n");
        // They are written every second.
        std::thread::sleep(Duration::from_millis(2500));
        let stats = running.stats_now().expect("they are there by now");
        assert!(stats["evicted_pages"].as_u64() > Some(2_000), "{way:?}: {stats:#}");
        assert!(stats["pages_stored"].as_u64() < Some(1_000), "{way:?}: {stats:#}");
        let outcome = running.finish();
        assert!(outcome.status.success(), "{}", outcome.explain());
    }
}

#[test]
fn the_statistics_agree_with_each_other() {
    let _shared = beside_others();
    for way in ways() {
        let mut running = holds(&["64", "60"]).start(way, &Cap::resident_mib(16));
        running.await_output("warm\n");
        std::thread::sleep(Duration::from_millis(1200));
        let live = sample_until("the statistics are written while the program runs", 20, || {
            running.stats_now().filter(|stats| stats["pages_stored"].as_u64() > Some(8_000))
        });
        running.pids_named("holds").into_iter().for_each(end);
        let outcome = running.finish();
        let number = |name: &str| live[name].as_u64().unwrap_or_else(|| panic!("--stats has no {name}: {live:#}"));
        let stored = number("pages_stored");
        assert!(stored > 8_000, "{live:#}");
        assert!(number("orig_data_size_bytes") <= stored * 4096, "{live:#}");
        assert!(number("compr_data_size_bytes") < number("orig_data_size_bytes"), "{live:#}");
        assert!(number("mem_used_total_bytes") >= number("compr_data_size_bytes"), "{live:#}");
        assert!(number("ours_bytes") >= number("mem_used_total_bytes"), "{live:#}");
        assert!(number("resident_bytes") <= number("resident_peak_bytes"), "{live:#}");
        assert!(number("processes") >= 1, "{live:#}");
        assert!(number("faults") > 0 && number("fault_p50_ns") > 0, "{live:#}");
        assert!(number("fault_p50_ns") <= number("fault_p99_ns"), "{live:#}");
        assert!(number("readahead_hits") <= number("readahead_pages"), "{live:#}");
        for name in ["refaults_staged", "same_pages", "total_peak_bytes"] {
            number(name);
        }
        for name in ["faults", "evicted_pages", "resident_peak_bytes", "total_peak_bytes"] {
            assert!(outcome.stat(name) >= number(name), "{name} went back: {live:#}");
        }
        assert!(number("resident_bytes") + number("ours_bytes") <= number("total_peak_bytes") * 11 / 10, "{live:#}");
    }
}
