//! Programs that run at the same time in one memory cgroup, at three times what it may have: each checks its memory byte for
//! byte, or prints what it prints with all the memory it wants.

use std::fs;
use std::panic::resume_unwind;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::corpus::{self, Kind};
use compcache_testkit::features::{Feature, requires};

use super::{NEEDED, Swap, the_machines_swap};
use crate::real_programs::sources;
use crate::support::{Cgroup, Outcome, Program, memory_tester, release_binary, scratch, seconds_or};

/// What each of those has that check their own memory.
const TESTED_MIB: u64 = 64;

fn seconds() -> u64 {
    seconds_or(10)
}

/// They look at every byte of theirs.
fn that_check(dir: &Path) -> [Program; 2] {
    let content = dir.join("content");
    let pages = corpus::load(Kind::PythonHeap, 1024).expect("memory of a program");
    fs::write(&content, pages.as_flattened()).expect("a file in the scratch directory");
    let (mib, seconds) = (TESTED_MIB.to_string(), seconds().to_string());
    let tester = Program::new(memory_tester()).args(["--seed", "7", "--threads", "2", "--mb", &mib]);
    let scan = Program::new(release_binary("scan")).args([&mib, "2", "--order", "random", "--content"]);
    [tester.args(["--seconds", &seconds]), scan.args([content])]
}

/// They print what can be compared: a sort, a database, an interpreter, a compiler.
fn that_print(dir: &Path) -> [Program; 4] {
    let file = |name: &str, text: &str| {
        let path = dir.join(name);
        fs::write(&path, text).expect("a file in the scratch directory");
        path
    };
    let sort = Program::new("sort").args(["-S", "120M", "--parallel=2", "-k2,2", "-k1,1n"]).env("LC_ALL", "C");
    let compiler = Program::new("g++").args(["-std=c++17", "-O1", "-S", "-o", "-"]);
    [
        sort.args([file("lines", &sources::lines(220_000))]).env("TMPDIR", dir),
        Program::new("sqlite3").args(["-batch", ":memory:"]).input(&file("x.sql", sources::SQL)),
        Program::new("python3").args([file("x.py", sources::PYTHON)]).env("PYTHONHASHSEED", "7"),
        compiler.args([file("x.cpp", &sources::cpp_unit(1))]),
    ]
}

/// What it does with all the memory it wants.
#[track_caller]
fn unhindered(program: &Program) -> Outcome {
    let outcome = program.bare();
    assert!(outcome.status.success() && !outcome.stdout.is_empty(), "{}", outcome.explain());
    outcome
}

#[test]
fn a_mix_of_programs_at_three_times_the_memory_of_a_cgroup_does_what_it_does_elsewhere() {
    let programs = ["sort", "sqlite3", "python3", "g++"].map(Feature::Program);
    if !requires(&[&NEEDED[..], &programs].concat()) {
        return;
    }
    let _ours = the_machines_swap();
    let dir = scratch();
    let (checking, printing) = (that_check(dir.path()), that_print(dir.path()));
    let expected = printing.each_ref().map(unhindered);
    let peaks = expected.each_ref().map(|outcome| outcome.peak_bytes);
    let together = peaks.iter().sum::<u64>() + checking.len() as u64 * (TESTED_MIB << 20);

    let swap = Swap::on();
    let cgroup = Cgroup::new(together / 3);
    let (begun, lasts) = (Instant::now(), Duration::from_secs(seconds()));
    // Once, and again until the time is over; how often.
    let again = |program: &Program, expected: Option<&Outcome>| {
        let program = program.inside(&cgroup).patience(seconds() * 10 + 90);
        let mut rounds = 0;
        while rounds == 0 || begun.elapsed() < lasts {
            let outcome = program.bare();
            assert!(outcome.status.success(), "{}", outcome.explain());
            expected.inspect(|expected| outcome.must_equal(expected));
            rounds += 1;
        }
        rounds
    };
    let (rounds, most_out) = cgroup.meanwhile(|| {
        thread::scope(|scope| {
            let printing = printing.iter().zip(&expected).map(|(program, expected)| (program, Some(expected)));
            let all = checking.iter().map(|program| (program, None)).chain(printing);
            let again = &again;
            let working: Vec<_> = all.map(|(one, expected)| scope.spawn(move || again(one, expected))).collect();
            let mut most_out = 0;
            while working.iter().any(|one| !one.is_finished()) {
                most_out = most_out.max(swap.used_bytes().unwrap_or_default());
                thread::sleep(Duration::from_millis(20));
            }
            let ended = working.into_iter().map(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic)));
            (ended.collect::<Vec<u32>>(), most_out)
        })
    });
    let [written, read] = ["num_writes", "num_reads"].map(|stat| swap.server.stat("s", stat));
    let lasted = begun.elapsed().as_secs_f64();
    let facts = format!(
        "rounds {rounds:?} in {lasted:.1} s, {most_out} bytes of {together} out, {written} pages written, {read} read"
    );
    eprintln!("{facts}; peaks {peaks:?}");
    // Where others leave them little time, the programs meet less.
    assert!(written > 10_000 && read > 10_000 && most_out > together / 6, "hardly anything was swapped: {facts}");
    swap.off_without_a_failure();
}
