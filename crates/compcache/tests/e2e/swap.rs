//! Whole machines that swap to a disk of ours, on a distribution's kernel in an emulated machine of 512 MiB ([S54] and on).
//!
//! The machine is watched: a shell that does next to nothing looks at the clock each second, and the longest it had to wait
//! is printed; a task that the kernel finds hung ends the machine, and the test with it.

use std::fs;
use std::time::Duration;

use compcache_testkit::corpus::{self, Kind};
use compcache_testkit::features::{Feature, find_program, requires};
use compcache_testkit::seed::Seed;
use compcache_testkit::vm::{Kernel, Vm};

use crate::support::{beside_others, memory_tester, release_binary};

const NEEDED: [Feature; 5] = [
    Feature::StockKernel,
    Feature::Program("qemu-system-x86_64"),
    Feature::Program("busybox"),
    Feature::Program("mkswap"),
    Feature::Program("swapon"),
];

/// Real memory of a program, in pages; the machine reads it again and again.
const CONTENT_PAGES: usize = 1024;

/// How the machine gets to its disk, and what that takes: the script leaves its name in `$disk` and the device in `$device`.
#[derive(Clone, Copy)]
struct Wire {
    on: &'static str,
    /// Takes the swap off again, and the disk away.
    off: &'static str,
    /// The device stays when the server is killed, so that the machine can swap off. Linux 6.12 takes ublk's away.
    stays: bool,
}

const LOOP: Wire = Wire {
    on: "/compcache swap on --size 2G --transport loop >/run/on; status on $?; read disk device </run/on",
    off: "/compcache swap off; status off $?",
    stays: true,
};

const UBLK: Wire = Wire {
    on: "/compcache swap on --size 2G --transport ublk >/run/on; status on $?; read disk device </run/on",
    off: "/compcache swap off; status off $?",
    stays: false,
};

/// What `compcache` ends with when it fails.
const FAILED: i32 = 125;

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
# Waits until so many KiB are.
swapped_out() {
    while :; do
        while read of kind size used rest; do
            [ "$of" = "$device" ] && [ $used -ge $1 ] && return
        done </proc/swaps
        sleep 1
    done
}
work() { echo 0 >/sys/fs/cgroup/cgroup.procs; exec "$@"; }
status() { echo "status of $1: $2"; }
/compcache serve --memory 50% 2>/run/served & server=$!
while ! /compcache list >/dev/null 2>&1; do sleep 0.1; done
"#;

const END: &str = r#"
cat /run/served; /compcache list; cat /proc/swaps
echo "longest wait: $(cat /run/longest 2>/dev/null)"
dmesg | grep -i "out of memory\|oom-kill\|hung\|I/O error" | tail -20
"#;

fn machine(processors: u32) -> Vm {
    let mut vm = Kernel::stock().map_err(std::io::Error::other).and_then(|kernel| Vm::new(&kernel)).expect("a machine");
    vm.size(processors, 512);
    vm.before(KEEP);
    for module in ["loop", "fuse", "ublk_drv"] {
        // What is not a module is in the kernel itself.
        let _ = vm.module(module, "");
    }
    for program in ["mkswap", "swapon", "swapoff"] {
        vm.program(&find_program(program).expect("asked for above"), &format!("/bin/{program}")).expect("a program");
    }
    let programs = [
        (release_binary("compcache", "compcache"), "/compcache"),
        (release_binary("compcache-bench", "scan"), "/scan"),
        (memory_tester().to_owned(), "/memory-tester"),
    ];
    for (host, guest) in &programs {
        vm.program(host, guest).expect("a program that can be read");
    }
    let pages = corpus::load(Kind::PythonHeap, CONTENT_PAGES).expect("memory of a program");
    let content = crate::support::scratch().keep().join("content");
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
fn run(processors: u32, script: &str, patience_s: u64) -> String {
    let _others = beside_others();
    let script = format!("{BEGIN}{script}{END}");
    let printed = machine(processors).run(&script, Duration::from_secs(patience_s));
    let printed = printed.unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{printed}");
    let longest = printed.lines().find_map(|line| line.trim().strip_prefix("longest wait: ")).unwrap_or_default();
    assert!(longest.parse().is_ok_and(|longest: f64| longest < GAP_S_MAX), "the machine hung:\n{printed}");
    printed
}

/// Each of these was said, and ended so.
#[track_caller]
fn assert_ended(printed: &str, expected: &[(&str, i32)]) {
    for (name, status) in expected {
        let line = format!("status of {name}: {status}");
        assert!(printed.lines().any(|printed| printed.trim() == line), "not `{line}`:\n{printed}");
    }
}

/// More work, where there is time for it (`COMPCACHE_LONG`).
fn at_length(long: u32, short: u32) -> u32 {
    if std::env::var_os("COMPCACHE_LONG").is_some() { long } else { short }
}

/// The scan of the papers from a fresh boot, with their content and with real memory; then everything that must be refused
/// while swap is on.
fn scans_and_is_not_taken_away(wire: Wire) {
    if !requires(&NEEDED) {
        return;
    }
    let published = if at_length(1, 0) == 1 { "(work /scan 480 10); status published $?" } else { "" };
    let script = format!(
        r#"
{on}
{published}
(work /scan 480 1 --content /content); status real $?
/compcache disk rm --force $disk; status rm $?
/compcache disk reset $disk; status reset $?
/compcache disk resize $disk 64M; status shrink $?
echo "score $(cat /proc/$server/oom_score_adj)"
kill $server; sleep 1; kill -0 $server; status served $?
(work /scan 900 1000) >/dev/null & holder=$!
swapped_out 450000
/compcache swap off $disk; status full $?
kill $holder; wait $holder
{off}
"#,
        on = wire.on,
        off = wire.off,
    );
    let printed = run(1, &script, 1800);
    assert_ended(&printed, &[("on", 0), ("real", 0), ("off", 0), ("served", 0)]);
    assert_ended(&printed, &[("rm", FAILED), ("reset", FAILED), ("shrink", FAILED)]);
    assert!(published.is_empty() || printed.contains("status of published: 0"), "{printed}");
    assert!(printed.contains("not ending: disk") && printed.contains("score -1000"), "{printed}");
    assert_ended(&printed, &[("full", FAILED)]);
    for said in ["it is swap space", "are swapped out to it, and there is room for"] {
        assert!(printed.contains(said), "not `{said}`:\n{printed}");
    }
}

/// Several programs at more than the machine's memory, some of them checking every byte; then the server is killed, which
/// takes with it whoever has pages there, and nothing else.
fn carries_a_mix_and_survives_its_servers_death(wire: Wire) {
    if !requires(&NEEDED) {
        return;
    }
    // Three times the memory at length, else somewhat more than there is.
    let (seconds, passes) = (at_length(180, 8), at_length(3, 1));
    let [tested, real, published, random] =
        [(200, 64), (300, 110), (500, 150), (536, 150)].map(|(long, short)| at_length(long, short));
    let script = format!(
        r#"
{on}
(work /memory-tester --seed 3 --seconds {seconds} --mb {tested} --threads 2) & tester=$!
(work /scan {real} {passes} --content /content) & real=$!
(work /scan {published} {passes}) & published=$!
(work /scan {random} {passes} --order random) & random=$!
wait $tester; status tester $?
wait $real; status real $?
wait $published; status published $?
wait $random; status random $?
(work /scan 450 1000 --content /content) >/dev/null & victim=$!
swapped_out 100000
kill -9 $server; wait $server
wait $victim; status victim $?
swapoff $device; status gone $?
/compcache serve --memory 50% 2>>/run/served & server=$!
while ! /compcache list >/dev/null 2>&1; do sleep 0.1; done
{on}
(work /scan 200 1 --content /content); status again $?
{off}
kill $server; wait $server; status end $?
ls /run/compcache-block; cat /proc/swaps
"#,
        on = wire.on,
        off = wire.off,
    );
    let printed = run(2, &script, 1800);
    let works = ["on", "tester", "real", "published", "random", "again", "off", "end"];
    assert_ended(&printed, &works.map(|name| (name, 0)));
    assert!(!wire.stays || printed.contains("status of gone: 0"), "{printed}");
    // SIGBUS.
    assert_ended(&printed, &[("victim", 135)]);
    let cleaned = printed.contains("removed /run/compcache-block/");
    assert!(!wire.stays || cleaned, "the dead server's device was not cleaned up:\n{printed}");
}

/// A program that takes more than there is, of memory that does not compress: it is killed, and nobody else is.
fn a_hog_is_killed_and_nobody_else(wire: Wire, processors: u32) {
    if !requires(&NEEDED) {
        return;
    }
    let script = format!(
        r#"
{on}
(work /memory-tester --seed 5 --seconds 20 --mb 60 --threads 2) & tester=$!
(work /scan 1500 1 --content /noise) & hog=$!
wait $hog; status hog $?
echo "hog ended after $(cut -d' ' -f1 /proc/uptime)"
wait $tester; status tester $?
kill -0 $server; status server $?
(work /scan 200 1 --content /content); status after $?
{off}
"#,
        on = wire.on,
        off = wire.off,
    );
    let printed = run(processors, &script, 900);
    // SIGKILL, by the kernel.
    assert_ended(&printed, &[("on", 0), ("hog", 137), ("tester", 0), ("server", 0), ("after", 0), ("off", 0)]);
    let killed: Vec<_> = printed.lines().filter(|line| line.contains("Killed process")).collect();
    assert!(!killed.is_empty() && killed.iter().all(|line| line.contains("(scan)")), "the wrong one died: {killed:?}");
}

#[test]
fn a_machine_with_one_processor_swaps_to_a_loop_device_that_is_not_taken_away() {
    scans_and_is_not_taken_away(LOOP);
}

#[test]
fn a_machine_with_one_processor_swaps_to_a_ublk_device_that_is_not_taken_away() {
    scans_and_is_not_taken_away(UBLK);
}

#[test]
fn a_machine_that_swaps_to_a_loop_device_carries_a_mix_and_outlives_its_server() {
    carries_a_mix_and_survives_its_servers_death(LOOP);
}

#[test]
fn a_machine_that_swaps_to_a_ublk_device_carries_a_mix_and_outlives_its_server() {
    carries_a_mix_and_survives_its_servers_death(UBLK);
}

#[test]
fn a_hog_is_killed_and_nobody_else_where_swap_is_on_a_loop_device() {
    a_hog_is_killed_and_nobody_else(LOOP, 2);
}

#[test]
fn a_hog_is_killed_and_nobody_else_where_swap_is_on_a_ublk_device_and_one_processor() {
    a_hog_is_killed_and_nobody_else(UBLK, 1);
}
