//! What a program has not used for a while is compressed again, sixteen pages together ([S150]), and reads as before.

use std::thread;
use std::time::Duration;

use crate::spill;
use crate::support::{Cap, Outcome, Program, Way, beside_others, memory_tester, sample_until, trap_program, ways};

const MIB: u64 = 1 << 20;

/// Pages are cold before the program has gone round once.
const AT_ONCE: [&str; 2] = ["--recompress-after", "0.02"];

#[track_caller]
fn must_have_made_groups(outcome: &Outcome, way: Way) {
    assert!(outcome.status.success(), "{way:?}: {}", outcome.explain());
    assert!(outcome.stat("recompressed_pages") > 1000, "{way:?}: {}", outcome.explain());
    assert!(outcome.stderr.contains("  recompressed "), "the summary does not tell of it: {}", outcome.explain());
}

/// Holds 64 MiB and does nothing until it is given a line; and so again, twice.
fn idles(recompress: &[&str]) -> Program {
    Program::new(trap_program("idles")).args(["line"]).env("TRAP_MB", "64").piped_input().flags(recompress)
}

#[test]
fn memory_that_is_not_used_takes_much_less_and_is_right_afterwards() {
    let _shared = beside_others();
    for way in ways() {
        let mut running = idles(&["--recompress-after", "1"]).start(way, &Cap::resident_mib(12));
        running.await_output("ready\n");
        let stat = |name: &str| running.stats_now().and_then(|stats| stats[name].as_u64());
        let most = sample_until("what is cold is in groups", 60, || {
            let (grouped, stored) = (stat("grouped_pages")?, stat("pages_stored")?);
            (stored > 10_000 && grouped * 10 >= stored * 8).then(|| stat("mem_used_at_peak_bytes"))?
        });
        // Spans that became emptier are brought together a little later.
        let much_less = || stat("mem_used_total_bytes").filter(|used| used * 10 <= most * 7);
        let used = sample_until("memory is given back", 20, much_less);
        eprintln!("{way:?}: {} KiB of {}", used >> 10, most >> 10);
        running.write_input(b"\n\n\n");
        running.close_input();
        let outcome = running.finish();
        must_have_made_groups(&outcome, way);
    }
}

#[test]
fn memory_stays_as_it_is_where_that_is_wanted() {
    let _shared = beside_others();
    let program = idles(&["--recompress", "none", "--recompress-after", "0.1"]);
    let Some(&way) = ways().first() else { return };
    let mut running = program.start(way, &Cap::resident_mib(12));
    running.await_output("ready\n");
    thread::sleep(Duration::from_secs(2));
    running.write_input(b"\n\n\n");
    running.close_input();
    let outcome = running.finish();
    assert!(outcome.status.success() && outcome.stat("recompressed_pages") == 0, "{}", outcome.explain());
}

#[test]
fn memory_is_an_array_of_bytes_while_it_is_compressed_again() {
    let _shared = beside_others();
    for (way, threads) in ways().into_iter().flat_map(|way| [(way, 1), (way, 3)]) {
        let tester = Program::new(memory_tester())
            .args(["--seed", &(40 + threads).to_string(), "--seconds", "2", "--mb", "64"])
            .args(["--threads", &threads.to_string()])
            .patience(150);
        must_have_made_groups(&tester.flags(AT_ONCE).paged_again_if_ended(way, &Cap::resident_mib(16)), way);
    }
}

#[test]
fn children_and_their_parents_have_right_memory_that_is_in_groups() {
    let _shared = beside_others();
    for way in ways() {
        for which in ["both_sides", "from_thread", "nested"] {
            let forks = Program::new(trap_program("forks")).args([which]).env("TRAP_MB", "24").flags(AT_ONCE);
            must_have_made_groups(&forks.paged(way, &Cap::resident_mib(8)), way);
        }
    }
}

#[test]
fn what_is_in_groups_and_then_in_a_file_is_right() {
    let _shared = beside_others();
    for way in ways() {
        let place = spill::place();
        let forks = Program::new(trap_program("forks")).args(["both_sides"]).env("TRAP_MB", "48").flags(AT_ONCE);
        let outcome = forks.flags(["--spill", &place.path().display().to_string()]).paged(way, &Cap::Ram(16 * MIB));
        must_have_made_groups(&outcome, way);
        assert!(outcome.stat("spill_written_pages") > 1000, "{way:?}: {}", outcome.explain());
    }
}
