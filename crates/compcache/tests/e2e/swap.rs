//! Whole machines that swap to a disk of ours, on a distribution's kernel in an emulated machine of 512 MiB ([S54] and on): a disk
//! of their own here, over the network in [`remote`].

mod backing;
mod machine;
mod remote;

use compcache_testkit::features::requires;
use compcache_testkit::vm::Vm;

use crate::support::release_binary;
use machine::{NEEDED, assert_ended, assert_lost_a_page, at_length, count};

/// How the machine gets to its disk, and what that takes: the script leaves its name in `$disk` and the device in `$device`.
#[derive(Clone, Copy)]
struct Wire {
    on: &'static str,
    /// Takes the swap off again, and the disk away.
    off: &'static str,
    /// The device stays when the server is killed. Linux 6.12 takes ublk's away, and swap stays on it unless it is off before.
    stays: bool,
}

const MEMORY_MIB: u32 = 512;

/// A machine whose server was killed has ended who cannot be helped by then, emulated and beside others. Left alone it took from 9 s to over
/// 9 minutes.
const STOOD_S_MAX: u32 = 60;

const LOOP: Wire = Wire {
    on: "/compcache swap on --size 2G --transport loop >/run/on; status on $?; read disk device </run/on",
    off: "/compcache swap off; status off $?",
    stays: true,
};

const UBLK: Wire = Wire {
    on: "/compcache swap on --size 2G --transport ublk >/run/on; status on $?; read disk device </run/on
        (cd /sys/block/${device#/dev/}/queue; echo on its way: $(cat nr_requests) of $(cat max_sectors_kb) KiB)",
    off: "/compcache swap off; status off $?",
    stays: false,
};

/// What `compcache` ends with when it fails.
const FAILED: i32 = 125;

/// What every machine of these does first. `off_the_dead` waits until swap is on no device that it can be taken off.
const SERVE: &str = r#"
off_the_dead() {
    for second in $(seq 60); do
        grep -v deleted /proc/swaps | grep -q "loop\|ublk" || return 0
        sleep 1
    done
    return 1
}
/compcache serve 2>/run/served & server=$!
while ! /compcache list >/dev/null 2>&1; do sleep 0.1; done
"#;

fn machine(processors: u32, memory_mib: u32) -> Vm {
    let mut vm = machine::machine(processors, memory_mib);
    for module in ["loop", "fuse", "ublk_drv"] {
        // What is not a module is in the kernel itself.
        let _ = vm.module(module, "");
    }
    vm.program(&release_binary("compcache"), "/compcache").expect("a program that can be read");
    vm
}

/// Runs the script where a server serves; what was printed.
fn run(vm: Vm, script: &str) -> String {
    machine::run(vm, &format!("{SERVE}{script}cat /run/served; /compcache list\n"))
}

/// The scan of the papers from a fresh boot, with their content and with real memory; then everything that must be refused
/// while swap is on.
fn scans_and_is_not_taken_away(wire: Wire) {
    if !requires(&NEEDED) {
        return;
    }
    let published = if at_length(1, 0) == 1 { "(work /scan 480 10); status published $?" } else { "" };
    // Half the machine takes half the time; 512 MiB and one processor are also where a hog is killed.
    let memory_mib = at_length(MEMORY_MIB, MEMORY_MIB / 2);
    let passes = at_length(1, 0);
    let [real, held, swapped_kib] = [480, 900, 450_000].map(|of_512| of_512 / (MEMORY_MIB / memory_mib));
    let script = format!(
        r#"
{on}
{published}
(work /scan {real} {passes} --content /content); status real $?
/compcache disk rm --force $disk; status rm $?
/compcache disk reset $disk; status reset $?
/compcache disk resize $disk 64M; status shrink $?
echo "score $(cat /proc/$server/oom_score_adj) boost $(cat /proc/sys/vm/watermark_boost_factor)"
kill -HUP $server; sleep 1; kill -0 $server; status served $?
(work /scan {held} 1000) >/dev/null & holder=$!
swapped_out {swapped_kib}
/compcache swap off $disk; status full $?
kill $holder; wait $holder
{off}
kill $server; wait $server; status end $?
echo "boost again $(cat /proc/sys/vm/watermark_boost_factor)"
"#,
        on = wire.on,
        off = wire.off,
    );
    let printed = run(machine(1, memory_mib), &script);
    assert_ended(&printed, &[("on", 0), ("real", 0), ("off", 0), ("served", 0)]);
    assert_ended(&printed, &[("rm", FAILED), ("reset", FAILED), ("shrink", FAILED)]);
    assert!(published.is_empty() || printed.contains("status of published: 0"), "{printed}");
    // An I/O scheduler, where there is one, has room for twice as many.
    let few = ["on its way: 16 of 128 KiB", "on its way: 32 of 128 KiB"];
    assert!(wire.stays || few.iter().any(|few| printed.contains(few)), "{printed}");
    assert!(printed.contains("not ending: disk") && printed.contains("score -1000 boost 0"), "{printed}");
    assert_ended(&printed, &[("full", FAILED), ("end", 0)]);
    assert!(printed.contains("boost again 15000"), "{printed}");
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
    // Three times the memory at length. Else it is half the machine, at half as much again as that has free: there all meet before the
    // first ends, and it takes no longer.
    let memory_mib = at_length(MEMORY_MIB, MEMORY_MIB / 2);
    let (seconds, passes) = (at_length(180, 8), at_length(3, 1));
    let [tested, real, published, random] =
        [(200, 32), (300, 56), (500, 56), (536, 56)].map(|(long, short)| at_length(long, short));
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
/compcache show $disk
(work /scan {held} 1000 --content /content) >/dev/null & victim=$!
swapped_out {swapped_kib}
kill -9 $server; wait $server
wait $victim; status victim $?
off_the_dead; status gone $?
/compcache serve 2>>/run/served & server=$!
while ! /compcache list >/dev/null 2>&1; do sleep 0.1; done
{on}
(work /scan {again} 1 --content /content); status again $?
{off}
kill $server; wait $server; status end $?
ls /run/compcache-block; cat /proc/swaps
"#,
        on = wire.on,
        off = wire.off,
        // Without what is swapped out when the server is killed it fits.
        held = at_length(450, 170),
        swapped_kib = at_length(100_000, 44_000),
        again = at_length(200, 100),
    );
    let printed = run(machine(2, memory_mib), &script);
    let works = ["on", "tester", "real", "published", "random", "again", "off", "end"];
    assert_ended(&printed, &works.map(|name| (name, 0)));
    let moved = ["num_writes", "num_reads"].map(|stat| count(&printed, stat));
    eprintln!("pages written and read by the mix: {moved:?}");
    let least = at_length(100_000, 5_000).into();
    assert!(moved.iter().all(|pages| *pages >= Some(least)), "{printed}\nit hardly swapped: {moved:?}");
    assert_ended(&printed, &[("gone", 0)]);
    assert_lost_a_page(&printed, "victim");
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
    let printed = run(machine(processors, MEMORY_MIB), &script);
    // SIGKILL, by the kernel.
    assert_ended(&printed, &[("on", 0), ("hog", 137), ("tester", 0), ("server", 0), ("after", 0), ("off", 0)]);
    assert!(ended_by_the_kernel(&printed, &["(scan)"]) > 0, "{printed}");
}

/// How many times the kernel has said whom it ends for want of memory: nobody but these.
#[track_caller]
fn ended_by_the_kernel(printed: &str, names: &[&str]) -> usize {
    let killed: Vec<_> = printed.lines().filter(|line| line.contains("Killed process")).collect();
    assert!(
        killed.iter().all(|line| names.iter().any(|name| line.contains(name))),
        "the wrong one died: {killed:?}\n{printed}"
    );
    killed.len()
}

/// A program that goes on growing when the server is killed, and touches none of the pages that are lost: nothing can be written any more,
/// and swap looks nearly empty.
fn who_grows_when_the_server_is_killed_is_ended(wire: Wire) {
    if !requires(&NEEDED) {
        return;
    }
    let script = format!(
        r#"
{on}
(work /scan 600 1000 --content /content) >/dev/null & victim=$!
swapped_out 50000
kill -9 $server; wait $server
read killed rest </proc/uptime
wait $victim; status victim $?
read now rest </proc/uptime
off_the_dead; status gone $?
echo "stood still: $((${{now%.*}} - ${{killed%.*}}))"
/compcache serve 2>>/run/served & server=$!
while ! /compcache list >/dev/null 2>&1; do sleep 0.1; done
{on}
(work /scan 100 1 --content /content); status again $?
{off}
kill $server; wait $server; status end $?
/compcache serve --background --socket /run/background
for process in $(pidof compcache); do echo "score in the background: $(cat /proc/$process/oom_score_adj)"; done
"#,
        on = wire.on,
        off = wire.off,
    );
    let printed = run(machine(2, MEMORY_MIB / 2), &script);
    assert_ended(&printed, &["on", "again", "off", "end"].map(|name| (name, 0)));
    assert_ended(&printed, &[("gone", 0)]);
    assert!(printed.contains("score in the background: -900"), "{printed}");
    // By the kernel for want of memory, or of a lost page.
    assert!([137, 135, 139].iter().any(|status| printed.contains(&format!("status of victim: {status}"))), "{printed}");
    // Who takes swap off may be, and another does it.
    ended_by_the_kernel(&printed, &["(scan)", "(swap-guard)"]);
    let stood_s = printed.lines().find_map(|line| line.trim().strip_prefix("stood still: ")?.parse::<u32>().ok());
    eprintln!("until the machine went on: {stood_s:?} s");
    assert!(stood_s.is_some_and(|seconds| seconds < STOOD_S_MAX), "{printed}");
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

#[test]
fn who_grows_when_the_server_is_killed_does_not_stop_a_machine_that_swaps_to_a_loop_device() {
    who_grows_when_the_server_is_killed_is_ended(LOOP);
}

#[test]
fn who_grows_when_the_server_is_killed_does_not_stop_a_machine_that_swaps_to_a_ublk_device() {
    who_grows_when_the_server_is_killed_is_ended(UBLK);
}
