//! The machine that swaps: a distribution's kernel, emulated, with the programs that need more than it has.
//!
//! It is watched: a shell that does next to nothing looks at the clock each second, and the longest it had to wait is printed; a
//! task that the kernel finds hung ends the machine, and the test with it.

use std::fs;
use std::time::Duration;

use compcache_testkit::corpus::{self, Kind};
use compcache_testkit::features::{Feature, find_program};
use compcache_testkit::seed::Seed;
use compcache_testkit::vm::{Kernel, Vm};

use crate::support::{beside_others, memory_tester, release_binary, scratch};

/// What every such test takes.
pub const NEEDED: [Feature; 5] = [
    Feature::StockKernel,
    Feature::Program("qemu-system-x86_64"),
    Feature::Program("busybox"),
    Feature::Program("mkswap"),
    Feature::Program("swapon"),
];

/// Real memory of a program, in pages; the machine reads it again and again.
const CONTENT_PAGES: usize = 1024;

/// Nobody who only wants to look at the clock may wait for so long.
const GAP_S_MAX: f64 = 60.0;

/// The shells that watch must outlive the server, the first process above all: no page of theirs may be with it. `work` runs
/// a command where memory is swapped out.
const KEEP: &str = r#"
mount -t cgroup2 cgroup /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/keep
echo 0 >/sys/fs/cgroup/keep/memory.swap.max
echo $$ >/sys/fs/cgroup/keep/cgroup.procs
"#;

/// What every machine does first. `beat` prints how long the shell had to wait at most.
const BEGIN: &str = r#"
echo 60 >/proc/sys/kernel/hung_task_timeout_secs
echo 1 >/proc/sys/kernel/hung_task_panic
echo 0 >/proc/sys/vm/page-cluster
mkdir -p /run
beats() {
    read last rest </proc/uptime
    while sleep 1; do
        read now rest </proc/uptime
        a=${now%.*}; b=${last%.*}
        [ $((a - b)) -gt ${longest:-0} ] && longest=$((a - b)) && echo $longest >/run/longest
        last=$now
    done
}
beats & beats=$!
# Waits until so many KiB are, for five minutes.
swapped_out() {
    for second in $(seq 300); do
        while read of kind size used rest; do
            [ "$of" = "$device" ] && [ $used -ge $1 ] && return
        done </proc/swaps
        sleep 1
    done
    status swapped-out 1
}
work() { echo 0 >/sys/fs/cgroup/cgroup.procs; exec "$@"; }
status() { echo "status of $1: $2"; }
"#;

const END: &str = r#"
cat /proc/swaps
echo "longest wait: $(cat /run/longest 2>/dev/null)"
dmesg | grep -i "hung\|I/O error\|nbd" | tail -20
dmesg | grep -i "out of memory\|oom-kill" | tail
"#;

/// A machine that can be added to. It has our programs, and nothing to swap to.
pub fn machine(processors: u32, memory_mib: u32) -> Vm {
    let mut vm = Kernel::stock().map_err(std::io::Error::other).and_then(|kernel| Vm::new(&kernel)).expect("a machine");
    vm.size(processors, memory_mib);
    vm.before(KEEP);
    for program in ["mkswap", "swapon", "swapoff"] {
        vm.program(&find_program(program).expect("asked for above"), &format!("/bin/{program}")).expect("a program");
    }
    let programs = [(release_binary("scan"), "/scan"), (memory_tester().to_owned(), "/memory-tester")];
    for (host, guest) in &programs {
        vm.program(host, guest).expect("a program that can be read");
    }
    let pages = corpus::load(Kind::PythonHeap, CONTENT_PAGES).expect("memory of a program");
    let content = scratch().keep().join("content");
    fs::write(&content, pages.as_flattened()).expect("a file");
    vm.file(&content, "/content").expect("a file");
    let mut noise = vec![0; pages.as_flattened().len()];
    Seed::for_test("noise").rng().fill(&mut noise);
    fs::write(&content, noise).expect("a file");
    vm.file(&content, "/noise").expect("a file");
    fs::remove_dir_all(content.parent().expect("its directory")).expect("ours");
    vm
}

/// Runs the script between the usual beginning and end; what was printed.
pub fn run(vm: Vm, script: &str) -> String {
    let _others = beside_others();
    let patience = Duration::from_secs(at_length(7200, 900).into());
    let printed = vm.run(&format!("{BEGIN}{script}{END}"), patience);
    let printed = printed.unwrap_or_else(|error| panic!("{error}"));
    if is_long() {
        eprintln!("{printed}");
    }
    let longest = printed.lines().find_map(|line| line.trim().strip_prefix("longest wait: ")).unwrap_or_default();
    assert!(longest.parse().is_ok_and(|longest: f64| longest < GAP_S_MAX), "the machine hung:\n{printed}");
    printed
}

/// Each of these was said, and ended so.
#[track_caller]
pub fn assert_ended(printed: &str, expected: &[(&str, i32)]) {
    let lines = expected.iter().map(|(name, status)| format!("status of {name}: {status}"));
    let missing: Vec<_> = lines.filter(|line| !printed.lines().any(|printed| printed.trim() == line)).collect();
    // At the end, where a long output is not cut off.
    assert!(missing.is_empty(), "{printed}\nnot {missing:?}, but {:?}", ended(printed));
}

/// What ends who reads a page that is gone: SIGBUS; SIGSEGV if it would catch that, and the stack it would do so on is gone, too.
const PAGE_GONE: [i32; 2] = [135, 139];

/// It has read a page that was gone, and ended so.
#[track_caller]
pub fn assert_lost_a_page(printed: &str, name: &str) {
    let ends = PAGE_GONE.map(|status| format!("status of {name}: {status}"));
    let is_lost = printed.lines().any(|line| ends.iter().any(|end| line.trim() == end));
    assert!(is_lost, "{printed}\nnone of {ends:?}, but {:?}", ended(printed));
}

/// Of `compcache show`.
pub fn count(printed: &str, name: &str) -> Option<u64> {
    let line = printed.lines().find_map(|line| line.trim().strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// What ended, and how.
fn ended(printed: &str) -> Vec<&str> {
    printed.lines().map(str::trim).filter(|line| line.starts_with("status of ")).collect()
}

/// More work, where there is time for it (`COMPCACHE_LONG`).
pub fn at_length(long: u32, short: u32) -> u32 {
    if is_long() { long } else { short }
}

fn is_long() -> bool {
    std::env::var_os("COMPCACHE_LONG").is_some()
}
