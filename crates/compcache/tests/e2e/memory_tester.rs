//! Memory is an array of bytes, whatever a program does to its address space (`memory-tester` of the test kit).
//!
//! Some seconds here; longer by `COMPCACHE_LONG=600 cargo test --test e2e memory`. The seed is printed and repeats a run
//! (`COMPCACHE_SEED`).

use compcache_testkit::seed::Seed;

use crate::support::{Cap, Program, beside_others, memory_tester, seconds_or, ways};

fn seconds() -> u64 {
    seconds_or(4)
}

fn tester(seed: u64, threads: usize, mb: usize) -> Program {
    let (seed, seconds) = (seed.to_string(), seconds());
    Program::new(memory_tester())
        .args(["--seed", &seed, "--seconds", &seconds.to_string()])
        .args(["--threads", &threads.to_string(), "--mb", &mb.to_string()])
        .patience(seconds * 10 + 90)
}

fn memory_holds(test: &str, threads: usize, mb: usize, cap: &Cap) {
    let _shared = beside_others();
    let seed = Seed::for_test(test).number() >> 16;
    for (round, way) in ways().into_iter().enumerate() {
        let outcome = tester(seed + round as u64, threads, mb).paged_again_if_ended(way, cap);
        assert!(outcome.status.success(), "{way:?}: {}", outcome.explain());
        eprintln!("{way:?}: {}", outcome.text().trim_end());
        outcome.must_have_evicted();
    }
}

#[test]
fn memory_is_an_array_of_bytes_for_one_thread() {
    memory_holds("memory_is_an_array_of_bytes_for_one_thread", 1, 64, &Cap::resident_mib(12));
}

#[test]
fn memory_is_an_array_of_bytes_for_many_threads() {
    memory_holds("memory_is_an_array_of_bytes_for_many_threads", 5, 96, &Cap::resident_mib(16));
}

#[test]
fn memory_is_an_array_of_bytes_when_ours_counts_too() {
    memory_holds("memory_is_an_array_of_bytes_when_ours_counts_too", 1, 192, &Cap::Ram(64 << 20));
}

#[test]
fn the_memory_tester_notices_a_planted_bit() {
    let _shared = beside_others();
    let outcome = Program::new(memory_tester()).args(["--seconds", "2", "--plant-bug"]).bare();
    assert_eq!(outcome.status.code(), Some(1), "{}", outcome.explain());
    assert!(outcome.stderr.contains("MISMATCH"), "{}", outcome.explain());
}
