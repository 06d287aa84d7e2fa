//! Programs of many runtimes print the same, byte for byte, with a quarter of the memory they need.
//!
//! Each runs bare first: that gives the output and the peak (the largest resident size of one of its processes). Then
//! it runs with `--resident` of a quarter of that, both ways. Servers are started under compcache and asked by a client
//! that is not. The inputs are made here, from fixed seeds. Sizes are chosen so that a paged run takes some seconds at most,
//! and a bare one still works on 20 MiB and more: what goes over its memory at random is given less of it, and what has tables of one size, whatever it is given, so much
//! that they fit into a quarter.

mod servers;
pub mod sources;

use std::fs;
use std::path::Path;
use std::process::Command;

use compcache_testkit::features::{Feature, requires};

use crate::support::{Cap, Outcome, Program, Way, beside_others, scratch, ways};

/// Nothing smaller is tried: thread stacks and what the loader mapped cannot leave.
const LEAST_CAP: u64 = 4 << 20;

fn quarter(bare: &Outcome) -> Cap {
    Cap::Resident((bare.peak_bytes / 4).max(LEAST_CAP))
}

/// So many times that, for a program whose copies take memory, too: `bare` knows the largest process alone.
fn quarter_of(bare: &Outcome, times: u64) -> Cap {
    Cap::Resident(quarter(bare).bytes() * times)
}

/// How long it took, and under what.
fn report(way: Way, paged: &Outcome, bare: &Outcome, cap: &Cap) {
    let (peak, cap, faults) = (bare.peak_bytes >> 20, cap.bytes() >> 20, paged.stat("faults"));
    eprintln!("{way:?}: {:.1} s, bare {:.1} s; {peak} MiB in {cap} MiB, {faults} faults", paged.seconds, bare.seconds);
}

/// Runs it bare and both ways, and compares.
#[track_caller]
fn prints_the_same(program: &Program) {
    prints_the_same_in(program, 1);
}

#[track_caller]
fn prints_the_same_in(program: &Program, quarters: u64) {
    let _shared = beside_others();
    let bare = program.bare();
    assert!(bare.status.success(), "it fails without compcache: {}", bare.explain());
    assert!(!bare.stdout.is_empty(), "it prints nothing: {}", bare.explain());
    let cap = quarter_of(&bare, quarters);
    for way in ways() {
        let paged = program.paged(way, &cap);
        paged.must_equal(&bare);
        paged.must_have_evicted();
        report(way, &paged, &bare, &cap);
    }
}

fn has(programs: &[&'static str]) -> bool {
    requires(&programs.iter().map(|name| Feature::Program(name)).collect::<Vec<_>>())
}

/// Sets something up, outside of what is tested.
#[track_caller]
fn set_up(command: &mut Command) {
    let output = command.output().expect("the command can be started");
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
}

fn write(dir: &Path, name: &str, text: impl AsRef<[u8]>) -> std::path::PathBuf {
    let path = dir.join(name);
    fs::write(&path, text).expect("a file in the scratch directory");
    path
}

#[test]
fn python_prints_the_same() {
    if has(&["python3"]) {
        let dir = scratch();
        prints_the_same(
            &Program::new("python3").args([write(dir.path(), "x.py", sources::PYTHON)]).env("PYTHONHASHSEED", "7"),
        );
    }
}

#[test]
fn python_with_processes_prints_the_same() {
    if has(&["python3"]) {
        let dir = scratch();
        // Four processes, each of which touches nearly all: in a quarter of one's, by mremap and beside two others, they get nowhere in minutes.
        prints_the_same_in(&Program::new("python3").args([write(dir.path(), "x.py", sources::PYTHON_POOL)]), 2);
    }
}

#[test]
fn node_prints_the_same() {
    if has(&["node"]) {
        let dir = scratch();
        prints_the_same(&Program::new("node").args([write(dir.path(), "x.js", sources::NODE)]));
    }
}

/// Both collectors: the serial one, and the one with many threads that JVMs take by default on larger machines.
#[test]
fn java_prints_the_same() {
    if has(&["java", "javac"]) {
        let dir = scratch();
        let source = write(dir.path(), "Work.java", sources::JAVA);
        set_up(Command::new("javac").arg("-d").arg(dir.path()).arg(source));
        for collector in ["-XX:+UseSerialGC", "-XX:+UseG1GC"] {
            prints_the_same(
                &Program::new("java").args([collector, "-Xmx128m", "-cp"]).args([dir.path()]).args(["Work"]),
            );
        }
    }
}

#[test]
fn sort_prints_the_same() {
    if has(&["sort"]) {
        let dir = scratch();
        let lines = write(dir.path(), "lines", sources::lines(220_000));
        let sort = Program::new("sort").args(["-S", "120M", "--parallel=2", "-k2,2", "-k1,1n"]).args([lines]);
        prints_the_same(&sort.env("LC_ALL", "C").env("TMPDIR", dir.path()));
    }
}

#[test]
fn the_cpp_compiler_prints_the_same() {
    if has(&["g++"]) {
        let dir = scratch();
        let source = write(dir.path(), "x.cpp", sources::CPP);
        prints_the_same(&Program::new("g++").args(["-std=c++17", "-O1", "-S", "-o", "-"]).args([source]));
    }
}

#[test]
fn rustc_prints_the_same() {
    if has(&["rustc"]) {
        let dir = scratch();
        let source = write(dir.path(), "x.rs", sources::rust(90));
        let rustc =
            Program::new("rustc").args(["--edition=2021", "--crate-type=lib", "-Copt-level=1", "-Ccodegen-units=1"]);
        prints_the_same(&rustc.args(["--emit=asm", "-o", "-"]).args([source]).dir(dir.path()));
    }
}

/// Its unwinding is its own: errors are found, and told, as without us.
#[test]
fn rustc_fails_the_same() {
    if has(&["rustc"]) {
        let _shared = beside_others();
        let dir = scratch();
        let source = write(dir.path(), "x.rs", "fn main() { let x: u32 = nothing; }");
        let rustc = Program::new("rustc").args(["--error-format=short"]).args([source]).dir(dir.path());
        let (bare, paged) = (rustc.bare(), rustc.paged(ways()[0], &Cap::Resident(512 << 20)));
        paged.must_equal(&bare);
        assert!(bare.status.code() == Some(1) && paged.stderr.contains("E0425"), "{}", paged.explain());
    }
}

#[test]
fn perl_prints_the_same() {
    if has(&["perl"]) {
        let dir = scratch();
        prints_the_same(
            &Program::new("perl").args([write(dir.path(), "x.pl", sources::PERL)]).env("PERL_HASH_SEED", "0"),
        );
    }
}

#[test]
fn awk_prints_the_same() {
    if has(&["awk"]) {
        let dir = scratch();
        prints_the_same(&Program::new("awk").args(["-f"]).args([write(dir.path(), "x.awk", sources::AWK)]));
    }
}

#[test]
fn sqlite_prints_the_same() {
    if has(&["sqlite3"]) {
        let dir = scratch();
        let queries = write(dir.path(), "x.sql", sources::SQL);
        prints_the_same(&Program::new("sqlite3").args(["-batch", ":memory:"]).input(&queries));
    }
}

#[test]
fn xz_prints_the_same() {
    if has(&["xz"]) {
        let dir = scratch();
        let lines = write(dir.path(), "lines", sources::lines(600_000));
        prints_the_same(
            &Program::new("xz")
                .args(["--lzma2=preset=1,dict=512KiB", "--threads=2", "--block-size=12MiB", "--stdout"])
                .args([lines]),
        );
    }
}

#[test]
fn zstd_with_a_large_window_prints_the_same() {
    if has(&["zstd"]) {
        let dir = scratch();
        let lines = write(dir.path(), "lines", sources::lines(1_000_000));
        prints_the_same(&Program::new("zstd").args(["-q", "-7", "--long=26", "-T1", "-c"]).args([lines]));
    }
}

#[test]
fn gdb_prints_the_same() {
    if has(&["gdb", "g++"]) {
        let dir = scratch();
        let source = write(dir.path(), "x.cpp", sources::CPP);
        let object = dir.path().join("x");
        set_up(Command::new("g++").args(["-std=c++17", "-g", "-O0", "-o"]).arg(&object).arg(source));
        let gdb = Program::new("gdb").args(["-nx", "-batch", "-ex", "set width 0", "-ex", "info types .", "-ex"]);
        prints_the_same(&gdb.args(["info functions std::", "-ex", "info line main"]).args([object]).dir(dir.path()));
    }
}

#[test]
fn git_prints_the_same() {
    if has(&["git"]) {
        let dir = scratch();
        let history = write(dir.path(), "history", sources::history(220));
        let git = |arguments: &[&str]| {
            let mut command = Command::new("git");
            command.args(arguments).current_dir(dir.path());
            command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1");
            command
        };
        set_up(&mut git(&["init", "-q", "--bare", "it.git"]));
        set_up(
            git(&["--git-dir=it.git", "fast-import", "--quiet"]).stdin(fs::File::open(history).expect("the history")),
        );
        // A pack of everything, to standard output, with deltas searched anew by two threads.
        let script = "git --git-dir=it.git rev-list --objects --all | \
                      git --git-dir=it.git -c pack.threads=1 pack-objects --no-reuse-delta --window=60 --depth=50 --stdout -q && \
                      git --git-dir=it.git log --stat --format=%H%n%s | cksum";
        prints_the_same(&Program::new("sh").args(["-c", script]).dir(dir.path()).env("GIT_CONFIG_NOSYSTEM", "1"));
    }
}

#[test]
fn a_shell_pipeline_prints_the_same() {
    if has(&["sh", "awk", "sort", "uniq"]) {
        let dir = scratch();
        // Not `| (head; cksum)`: how much of a pipe head reads beyond its lines depends on how fast it is filled.
        let script =
            "seq 1 500000 | awk '{ seen[$1 % 150001] = seen[$1 % 150001] \" \" $1; print ($1 * 7919) % 100043 }
                          END { for (i = 0; i < 150001; i++) sum += length(seen[i]); print sum }' \
                      | sort -S 60M | uniq -c | sort -S 60M -rn -k1,1 -k2,2 >counts; head -5000 counts; cksum <counts";
        prints_the_same(&Program::new("sh").args(["-c", script]).dir(dir.path()).env("LC_ALL", "C"));
    }
}

#[test]
fn a_parallel_make_prints_the_same() {
    if has(&["make", "g++"]) {
        let dir = scratch();
        let mut rules = String::from("all: ");
        (0..3).for_each(|unit| rules.push_str(&format!("u{unit}.s ")));
        rules.push_str("\n\t@cat $^\n%.s: %.cpp\n\t@g++ -std=c++17 -O0 -S -o $@ $<\n");
        (0..3).for_each(|unit| {
            write(dir.path(), &format!("u{unit}.cpp"), sources::cpp_unit(unit));
        });
        let file = write(dir.path(), "Makefile", rules);
        // Everything is made anew each time.
        prints_the_same(&Program::new("make").args(["-B", "-s", "-j3", "-f"]).args([file]).dir(dir.path()));
    }
}

#[test]
fn redis_answers_the_same() {
    if has(&["redis-server", "redis-cli"]) {
        servers::redis();
    }
}

#[test]
fn postgres_answers_the_same() {
    if has(&["postgres", "psql", "initdb", "setpriv"]) && requires(&[Feature::Root]) {
        servers::postgres();
    }
}
