//! Swap on this machine's own kernel: on and off, what makes the server safe, and programs in a memory cgroup that check
//! every byte. What must not be tried on a machine that others use is in `swap.rs`.

mod mix;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, RwLockReadGuard};
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires};
use serde_json::Value;

use crate::support::{Cgroup, Guard, PATIENCE, Server, beside_others, memory_tester};

const NEEDED: [Feature; 6] = [
    Feature::Root,
    Feature::Fuse,
    Feature::Loop,
    Feature::CgroupMemory,
    Feature::Program("mkswap"),
    Feature::Program("swapon"),
];

/// Before all other swap there may be; `--unprotected`, for containers in which root is not all root.
const ON: [&str; 8] = ["swap", "on", "--size", "512M", "--priority", "32767", "--unprotected", "--name"];

/// The machine has one list of swap, and one setting of its watermarks.
static SWAP: Mutex<()> = Mutex::new(());

/// No other test changes them while this is held.
pub fn the_list_of_swap() -> MutexGuard<'static, ()> {
    SWAP.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn the_machines_swap() -> (MutexGuard<'static, ()>, RwLockReadGuard<'static, ()>) {
    (the_list_of_swap(), beside_others())
}

/// Swap of a server of the test's own, off at the end whatever happens.
struct Swap {
    server: Server,
    device: String,
    _guard: Guard,
}

impl Swap {
    fn on() -> Swap {
        Swap::of(Server::start(&["--memory", "1G"]), &[&ON[..], &["s", "--transport", "loop"]].concat())
    }

    fn of(server: Server, on: &[&str]) -> Swap {
        let printed = server.ok(on);
        Swap::beside(server, &printed)
    }

    /// What `swap on` has printed is on.
    fn beside(server: Server, printed: &str) -> Swap {
        let device = printed.split_whitespace().nth(1).expect("a name and a device").to_owned();
        // A server that swap is on does not end.
        let end = r#"swapoff "$1"; kill "$2""#;
        let guard = Guard::new(end, &[device.as_ref(), server.child.id().to_string().as_ref()]);
        Swap { server, device, _guard: guard }
    }

    /// Bytes swapped out to it now.
    fn used_bytes(&self) -> Option<u64> {
        let swaps = fs::read_to_string("/proc/swaps").expect("a table");
        let line = swaps.lines().find(|line| line.split_whitespace().next() == Some(&self.device))?;
        line.split_whitespace().nth(3)?.parse::<u64>().ok().map(|kib| kib << 10)
    }

    /// It is taken off; nothing that it was asked for has failed.
    #[track_caller]
    fn off_without_a_failure(&self) {
        for stat in ["failed_reads", "failed_writes", "invalid_io"] {
            assert_eq!(self.server.stat("s", stat), 0, "{stat}");
        }
        self.server.ok(&["swap", "off", "s"]);
    }

    fn status(&self, key: &str) -> String {
        status(self.server.child.id(), key).expect("its status")
    }

    /// The process that takes swap off when the server is killed: the only one there is.
    #[track_caller]
    fn guard(&self) -> u32 {
        let all = fs::read_dir("/proc").expect("processes").flatten();
        let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let server = self.server.child.id().to_string();
        let is_its = |process: &u32| status(*process, "PPid").is_some_and(|parent| parent == server);
        let children: Vec<_> = all.filter(is_its).collect();
        let [guard] = children[..] else { panic!("the server has {children:?}") };
        assert_eq!(status(guard, "Name").as_deref(), Some("swap-guard"));
        guard
    }
}

/// A device that swap is off when this is dropped.
struct Off(String);

impl Drop for Off {
    fn drop(&mut self) {
        let _ = Command::new("swapoff").arg(&self.0).stderr(Stdio::null()).status();
    }
}

/// Of a line of a process's status; `None` if it has ended.
fn status(process: u32, key: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    Some(line.unwrap_or_default().trim().to_owned())
}

/// Whether a process is no more, or nobody has asked what became of it.
fn has_ended(process: u32) -> bool {
    status(process, "State").is_none_or(|state| state.starts_with('Z'))
}

/// Waits until this holds.
#[track_caller]
fn until(what: &str, holds: impl Fn() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < give_up, "not yet {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if self.used_bytes().is_some() {
            let _ = Command::new("swapoff").arg(&self.device).status();
        }
    }
}

const BOOST: &str = "/proc/sys/vm/watermark_boost_factor";

fn boost() -> String {
    fs::read_to_string(BOOST).expect("a setting")
}

/// The machine's setting as it was, which a server that is killed cannot put back.
struct BoostBefore(String, #[allow(dead_code, reason = "it is there to be dropped")] Guard);

impl BoostBefore {
    fn note() -> BoostBefore {
        let before = boost();
        let guard = Guard::new(r#"echo "$1" >"$2""#, &[before.trim().as_ref(), BOOST.as_ref()]);
        BoostBefore(before, guard)
    }
}

impl Drop for BoostBefore {
    fn drop(&mut self) {
        let _ = fs::write(BOOST, &self.0);
    }
}

#[test]
fn swap_is_on_until_it_is_off_and_the_disk_stays_as_long() {
    if !requires(&NEEDED) {
        return;
    }
    let _ours = the_machines_swap();
    let swap = Swap::on();
    let swaps = fs::read_to_string("/proc/swaps").unwrap();
    let line = swaps.lines().find(|line| line.starts_with(&format!("{} ", swap.device))).expect("it is on");
    assert_eq!(line.split_whitespace().last(), Some("32767"));
    let listed = swap.server.ok(&["list"]);
    assert!(listed.lines().any(|line| line.starts_with("s ") && line.contains("[SWAP]")), "{listed}");
    let state: Value = serde_json::from_str(&swap.server.ok(&["show", "--json", "s"])).unwrap();
    assert_eq!(state["for_swap"], true);

    for refused in [&["disk", "rm", "s"][..], &["disk", "rm", "--force", "s"], &["disk", "reset", "s"]] {
        swap.server.refuses(refused, &["it is swap space", "swapoff"]);
    }
    swap.server.refuses(&["disk", "resize", "s", "64M"], &["it is swap space"]);
    swap.server.refuses(&[&ON[..], &["s"]].concat(), &["swap stays as it was", "already"]);
    swap.server.signal("-INT");
    std::thread::sleep(Duration::from_millis(300));
    assert!(swap.used_bytes().is_some() && swap.server.ok(&["list"]).contains("[SWAP]"), "the server is gone");

    let guard = swap.guard();
    swap.server.ok(&["swap", "off", "s"]);
    assert_eq!(swap.used_bytes(), None);
    assert_eq!(swap.server.ok(&["disk", "list", "--json"]).trim(), "[]");
    until("has who would take it off ended", || has_ended(guard));
    swap.server.refuses(&["swap", "off"], &["no disk for swap"]);
    swap.server.refuses(&["swap", "off", "s"], &["no disk called s"]);
}

#[test]
fn swap_that_was_taken_off_by_hand_is_ended_all_the_same_and_with_it_goes_what_was_kept_for_it() {
    if !requires(&NEEDED) {
        return;
    }
    let _ours = the_machines_swap();
    let before = boost();
    let swap = Swap::on();
    let resident_kib = || swap.status("VmRSS").trim_end_matches(" kB").parse::<u64>().expect("a number");
    let with_swap_kib = resident_kib();
    assert!(Command::new("swapoff").arg(&swap.device).status().expect("it starts").success());
    swap.server.ok(&["swap", "off"]);
    assert_eq!(swap.server.ok(&["disk", "list", "--json"]).trim(), "[]");
    assert_eq!(boost(), before);
    let until = Instant::now() + Duration::from_secs(20);
    while resident_kib() + (8 << 10) > with_swap_kib {
        assert!(Instant::now() < until, "of {with_swap_kib} KiB the server keeps {}", resident_kib());
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn swap_of_a_server_that_was_killed_is_told_of_and_taken_after_that_of_the_next() {
    if !requires(&NEEDED) {
        return;
    }
    let _ours = the_machines_swap();
    let _boost = BoostBefore::note();
    let on = ["swap", "on", "--size", "64M", "--transport", "loop", "--unprotected", "--priority", "0"];
    let killed = Swap::of(Server::start(&[]), &on);
    assert_eq!(killed.used_bytes(), Some(0), "this machine swaps: somebody would die with the server");
    // Together with who would take swap off.
    let ends = [killed.guard(), killed.server.child.id()].map(|process| process.to_string());
    assert!(Command::new("kill").arg("-KILL").args(ends).status().expect("kill runs").success());
    let next = Server::start(&[]);
    next.refuses(&["swap", "off"], &["no disk for swap", &killed.device, "swapoff"]);
    let output = next.asked(&on);
    let (said, told) = (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert!(said.contains(&format!("swapoff {}", killed.device)), "{said}");
    let next = Swap::beside(next, &told);
    let swaps = fs::read_to_string("/proc/swaps").unwrap();
    let line = swaps.lines().find(|line| line.starts_with(&format!("{} ", next.device))).expect("it is on");
    assert_eq!(line.split_whitespace().last(), Some("1"), "{swaps}");
    next.server.ok(&["swap", "off"]);
    drop(killed);
    drop(next);
    // Whose first act is to remove what was left.
    let _last = Server::start(&[]);
}

#[test]
fn swap_of_a_server_that_is_killed_is_taken_off_and_of_no_other() {
    if !requires(&NEEDED) {
        return;
    }
    let _ours = the_machines_swap();
    let _boost = BoostBefore::note();
    let on = ["swap", "on", "--size", "64M", "--transport", "loop", "--unprotected"];
    let stays = Swap::of(Server::start(&[]), &on);
    let mut killed = Swap::of(Server::start(&[]), &on);
    let second = Off(killed.server.ok(&on).split_whitespace().nth(1).expect("a device").to_owned());
    assert_eq!(killed.used_bytes(), Some(0), "this machine swaps: somebody would die with the server");
    let guard = killed.guard();
    // It lives as long as the server, and whatever the two are asked.
    let ends = [guard, killed.server.child.id()].map(|process| process.to_string());
    for signal in ["-TERM", "-INT", "-HUP", "-QUIT"] {
        assert!(Command::new("kill").arg(signal).args(&ends).status().expect("kill runs").success());
    }
    thread::sleep(Duration::from_millis(300));
    assert_eq!(killed.guard(), guard);
    let all_locked = status(guard, "VmLck").zip(status(guard, "VmRSS")).expect("it lives");
    let kib = |text: &str| text.trim_end_matches(" kB").parse::<u64>().expect("a number");
    assert!(kib(&all_locked.0) + 64 >= kib(&all_locked.1), "{all_locked:?}");
    // What the server holds on to it does not: devices and mounts would outlive the server.
    let open = fs::read_dir(format!("/proc/{guard}/fd")).expect("it lives").flatten();
    let open: Vec<_> = open.filter_map(|entry| fs::read_link(entry.path()).ok()).collect();
    assert!(open.len() <= 6 && !open.iter().any(|open| open.starts_with("/dev/fuse")), "{open:?}");

    killed.server.signal("-KILL");
    let is_on = |device: &str| fs::read_to_string("/proc/swaps").unwrap().contains(&format!("{device} "));
    until("is swap off", || killed.used_bytes().is_none() && !is_on(&second.0));
    until("has who took it off ended", || has_ended(guard));
    killed.server.hears(&format!("swap was taken off {}", killed.device));
    assert_eq!(stays.used_bytes(), Some(0));
    // Another is started for one that was ended.
    let guard = stays.guard();
    assert!(Command::new("kill").args(["-KILL", &guard.to_string()]).status().expect("kill runs").success());
    until("has it ended", || has_ended(guard));
    stays.server.ok(&on);
    assert_ne!(stays.guard(), guard);
    stays.server.ok(&["swap", "off"]);
    drop((killed, stays));
    // Whose first act is to remove what was left.
    let _last = Server::start(&[]);
}

#[test]
fn a_server_that_swap_is_on_is_locked_in_memory_and_by_itself() {
    if !requires(&NEEDED) {
        return;
    }
    let _ours = the_machines_swap();
    let swap = Swap::on();
    let kib = |key: &str| swap.status(key).trim_end_matches(" kB").parse::<u64>().expect("a number");
    // All that is there is locked: it maps much more than it uses.
    assert!(kib("VmLck") >= kib("VmRSS"), "{} KiB of {} are locked", kib("VmLck"), kib("VmRSS"));
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/mnt")).expect("a namespace");
    assert_ne!(namespace(&swap.server.child.id().to_string()), namespace("self"));
    // The tables of 512 MiB, and the reserve, are there before anything is swapped out.
    assert!(swap.server.stat("s", "table_bytes") >= 128 * 3 * 4096);
    assert!(swap.server.stat("s", "mem_used_max") >= 8 << 20);
    let protected =
        ["oom_score_adj"].map(|file| fs::read_to_string(format!("/proc/{}/{file}", swap.server.child.id())).unwrap());
    // Root without CAP_SYS_RESOURCE may not; then swap must be refused unless asked for unprotected.
    if protected[0].trim() != "-1000" {
        swap.server.refuses(
            &["swap", "on", "--size", "64M", "--name", "t"],
            &["not safe to swap to", "CAP_SYS_RESOURCE", "--unprotected"],
        );
    }
    let facts = String::from_utf8(swap.server.asked(&["doctor"]).stdout).expect("text");
    let told = facts.lines().any(|line| line.contains("swap") && line.contains("--unprotected"));
    assert_eq!(told, protected[0].trim() != "-1000", "doctor says something else");
    swap.server.ok(&["swap", "off"]);
}

#[test]
fn a_program_in_a_memory_cgroup_finds_every_byte_that_was_swapped_out() {
    if !requires(&NEEDED) {
        return;
    }
    let _ours = the_machines_swap();
    let swap = Swap::on();
    let cgroup = Cgroup::new(64 << 20);
    let output = cgroup.output(memory_tester(), &["--seed", "7", "--seconds", "4", "--mb", "160", "--threads", "3"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("right"), "{said}");
    for (stat, least) in [("num_writes", 2_000), ("num_reads", 2_000), ("notify_free", 1)] {
        assert!(swap.server.stat("s", stat) >= least, "{stat}: {}", swap.server.stat("s", stat));
    }
    swap.off_without_a_failure();
}

#[test]
fn swap_that_cannot_be_made_leaves_nothing_behind() {
    if !requires(&NEEDED) {
        return;
    }
    let _ours = the_machines_swap();
    let server = Server::start(&["--memory", "256M"]);
    let on = |arguments: &[&'static str]| [&["swap", "on", "--unprotected"][..], arguments].concat();
    server.refuses(&on(&["--size", "8K"]), &["swap stays as it was", "mkswap"]);
    server.refuses(&on(&["--size", "0"]), &["no size"]);
    server.refuses(&on(&["--size", "1G", "--name", "a/b"]), &["no name for a disk"]);
    // Its tables alone would take more than the server may.
    server.refuses(&on(&["--size", "90G"]), &["swap stays as it was", "no memory for the tables", "limit"]);
    // The same of what the disk itself may take. What is said to be enough is.
    let limited = |limit| on(&["--size", "4G", "--name", "s", "--limit", limit]);
    server.refuses(&limited("8M"), &["swap stays as it was", "8.0 MiB has no room for the tables", "--limit 15M"]);
    server.refuses(&limited("14M"), &["swap stays as it was", "14.0 MiB has no room for the tables", "--limit 15M"]);
    let swap = Swap::of(server, &limited("15M"));
    let server = &swap.server;
    // What it must not be made with it must not become.
    server.refuses(&["disk", "change", "s", "--limit", "14M"], &["14.0 MiB has no room for the tables", "--limit 15M"]);
    server.refuses(&["disk", "resize", "s", "8G"], &["15.0 MiB has no room for the tables", "--limit"]);
    let is = server.ok(&["disk", "list", "--json"]);
    assert!([4 << 30, 15 << 20].iter().all(|bytes: &u64| is.contains(&bytes.to_string())), "it is as it was: {is}");
    server.ok(&["swap", "off"]);
    server.refuses(&on(&["--priority", "40000"]), &["--priority"]);
    for backing in ["/dev/null", "/no/such/device", "/tmp"] {
        let said = ["swap stays as it was", "cannot be the backing of swap", "a disk, a partition or a volume"];
        server.refuses(&on(&["--size", "64M", "--backing", backing]), &said);
    }
    server.refuses(&on(&["--size", "64M", "--backing-batch", "1M"]), &["required", "--backing <DEVICE>"]);
    assert_eq!(server.ok(&["disk", "list", "--json"]).trim(), "[]");
    let caching = Server::start(&[]);
    let origin = caching.directory.path().join("origin").display().to_string();
    fs::write(&origin, vec![0; 1 << 20]).expect("it can be written to");
    caching.ok(&["disk", "create", "--transport", "nbd", "--memory", "40%", "--origin", &origin]);
    caching.refuses(&on(&["--size", "8K"]), &["swap stays as it was", "caches of disks with an origin"]);
    // It has swapped, and so the setting is not boosted for as long as it is there.
    drop(swap);
    // Where ublk is, there is a disk.
    if !Path::new("/dev/ublk-control").exists() {
        let usual = Server::start(&[]);
        let before = boost();
        usual.refuses(&on(&["--size", "64M", "--transport", "ublk"]), &["swap stays as it was", "ublk"]);
        assert_eq!(boost(), before, "the setting is not as it was");
        // With 80 % for swap there would be no room for this.
        let origin = usual.directory.path().join("origin").display().to_string();
        fs::write(&origin, vec![0; 1 << 20]).expect("it can be written to");
        usual.ok(&["disk", "create", "--transport", "nbd", "--memory", "40%", "--origin", &origin]);
    }
    let small = Server::start(&["--memory", "4M"]);
    small.refuses(&on(&["--size", "64M"]), &["no memory for the reserve", "limit"]);
}
