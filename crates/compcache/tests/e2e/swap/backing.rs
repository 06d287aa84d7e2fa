//! Machines that swap more than their memory holds however well it is compressed: the rest leaves for a bare disk.

use compcache_testkit::features::requires;

use super::machine::{NEEDED, assert_ended, assert_lost_a_page, at_length, count};
use super::{FAILED, machine, run};

/// Five times the memory at length, else as much as it is, most of which does not compress.
fn carries_more_than_fits(transport: &str, processors: u32) {
    if !requires(&NEEDED) {
        return;
    }
    let memory_mib = at_length(512, 256);
    let [tested, noise, real, random] =
        [(160, 24), (1000, 130), (1100, 20), (300, 16)].map(|(long, short)| at_length(long, short));
    // So much that a part is swapped out, and less than there is of memory: what cannot be written any more stays.
    let killed = at_length(360, 130);
    let (seconds, passes) = (at_length(300, 3), at_length(1, 0));
    let on = format!("/compcache swap on --size 4G --transport {transport} --backing /dev/vda");
    let script = format!(
        r#"
dd if=/dev/zero of=/run/file bs=1M count=8 2>/dev/null
/compcache swap on --size 1G --transport {transport} --backing /run/file 2>/run/refused; status file $?
losetup /dev/loop7 /run/file
/compcache swap on --size 1G --transport {transport} --backing /dev/loop7 2>>/run/refused; status loop $?
losetup -d /dev/loop7; rm /run/file
{on} >/run/on; status on $?; read disk device </run/on
(work /memory-tester --seed 3 --seconds {seconds} --mb {tested} --threads 2) & tester=$!
(work /scan {noise} 0 --content /noise) & noise=$!
(work /scan {real} {passes} --content /content) & real=$!
(work /scan {random} {passes} --content /content --order random) & random=$!
wait $tester; status tester $?
wait $noise; status noise $?
wait $real; status real $?
wait $random; status random $?
/compcache show $disk
(work /scan {killed} 1000 --content /noise) >/dev/null & victim=$!
swapped_out {victim_kib}
kill -9 $server; wait $server
wait $victim; status victim $?
off_the_dead; status gone $?
/compcache serve 2>>/run/served & server=$!
while ! /compcache list >/dev/null 2>&1; do sleep 0.1; done
{on} 2>>/run/refused; status left $?
{on} --backing-overwrite >/run/on; status again-on $?; read disk device </run/on
cat /proc/swaps
(work /scan {killed} 0 --content /noise); status again $?
/compcache swap off; status off $?
kill $server; wait $server; status end $?
cat /run/refused
"#,
        victim_kib = killed * 256,
    );
    let mut vm = machine(processors, memory_mib);
    vm.disk(u64::from(memory_mib) * 6).expect("virtio_blk");
    let printed = run(vm, &script);
    let works = ["on", "tester", "noise", "real", "random", "again-on", "again", "off", "end"];
    assert_ended(&printed, &works.map(|name| (name, 0)));
    // SIGBUS.
    assert_ended(&printed, &[("file", FAILED), ("loop", FAILED), ("left", FAILED)]);
    assert_lost_a_page(&printed, "victim");
    // What is left of the old swap must not be taken as often as the new one.
    let is_swap = |line: &&str| line.split_ascii_whitespace().nth(1) == Some("partition");
    let (gone, here): (Vec<_>, Vec<_>) = printed.lines().filter(is_swap).partition(|line| line.contains("(deleted)"));
    let priority = if gone.is_empty() { "100" } else { "101" };
    assert!(here.iter().any(|line| line.trim_end().ends_with(priority)), "{gone:?}, {here:?}");
    for said in [
        "/run/file cannot be the backing of swap",
        "/dev/loop7 cannot be the backing of swap: to write to loop7",
        "there is something on /dev/vda",
    ] {
        assert!(printed.contains(said), "not `{said}`:\n{printed}");
    }
    assert_eq!(count(&printed, "failed_reads"), Some(0), "{printed}");
    let written = count(&printed, "bd_writes");
    assert!(written.is_some_and(|pages| pages > u64::from(noise) * 64), "hardly anything left memory:\n{printed}");
}

/// A machine that is short of memory, and a disk whose blocks nobody uses: they leave, far below any limit.
#[test]
fn blocks_that_nobody_uses_leave_when_the_machine_is_short_of_memory() {
    if !requires(&NEEDED) {
        return;
    }
    let script = r#"
/compcache disk create --name idle --size 200M --backing /dev/vda --transport loop >/run/at; status create $?
dd if=/noise of=$(cat /run/at) bs=1M count=4 oflag=direct 2>/dev/null
for at in $(seq 1 11); do dd if=/noise of=$(cat /run/at) bs=1M count=4 seek=$((at * 4)) oflag=direct 2>/dev/null; done
sleep 3
echo before; /compcache show idle
/compcache swap on --size 1G --transport loop >/run/on; status on $?; read disk device </run/on
(work /scan 180 1 --content /content) >/dev/null; status scan $?
echo after; /compcache show idle
for at in $(seq 0 11); do dd if=$(cat /run/at) bs=1M count=4 skip=$((at * 4)) iflag=direct 2>/dev/null | cmp - /noise; status same $?; done
/compcache swap off; status off $?
/compcache disk rm idle; status rm $?
kill $server; wait $server; status end $?
"#;
    let mut vm = machine(1, 256);
    vm.disk(512).expect("virtio_blk");
    let printed = run(vm, script);
    assert_ended(&printed, &["create", "on", "scan", "same", "off", "rm", "end"].map(|name| (name, 0)));
    assert!(!printed.contains("status of same: 1"), "{printed}");
    let (before, after) = printed.split_once("after").expect("printed");
    assert_eq!(count(before, "bd_writes"), Some(0), "{printed}");
    assert!(count(after, "bd_writes").is_some_and(|pages| pages > 1000), "{printed}");
}

#[test]
fn a_machine_that_swaps_to_a_loop_device_carries_more_than_fits_on_a_bare_disk() {
    carries_more_than_fits("loop", 2);
}

#[test]
fn a_machine_with_one_processor_that_swaps_to_a_ublk_device_carries_more_than_fits_on_a_bare_disk() {
    carries_more_than_fits("ublk", 1);
}
