//! What is known of processes that hang, and their end.
//!
//! Every process that a test starts carries a variable of its run in its environment, and so do its descendants, daemons
//! and orphans too. Servers that write their title over their environment are found by their process group or by their
//! parents. Nobody else's process is ever touched.

use std::fmt::Write;
use std::fs;

/// The variable; its value is unique to a run.
pub const MARK: &str = "COMPCACHE_E2E_RUN";

/// The processes of one run that are alive: `root` was started by the test, in a process group of its own.
pub fn processes_of(run: &str, root: i32) -> Vec<i32> {
    let wanted = format!("{MARK}={run}");
    let numbers =
        fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut others: Vec<(i32, Facts)> = numbers.filter_map(|pid: i32| Some((pid, Facts::of(pid)?))).collect();
    others.retain(|(_, facts)| !matches!(facts.state, 'Z' | 'X'));
    let mut found = Vec::new();
    others.retain(|(pid, facts)| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let marked = environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes());
        let ours = marked || *pid == root || facts.group == root;
        if ours {
            found.push(*pid);
        }
        !ours
    });
    loop {
        let before = found.len();
        others.retain(|(pid, facts)| {
            let ours = found.contains(&facts.parent);
            if ours {
                found.push(*pid);
            }
            !ours
        });
        if found.len() == before {
            break;
        }
    }
    found.sort_unstable();
    found
}

/// Some fields of `/proc/PID/stat`.
struct Facts {
    state: char,
    parent: i32,
    group: i32,
}

impl Facts {
    fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?.chars().next()?;
        Some(Self { state, parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()? })
    }
}

/// The largest resident size that any of these processes has had.
pub fn peak_bytes(pids: &[i32]) -> u64 {
    let peak = |pid: &i32| -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.trim().trim_end_matches(" kB").parse().ok()
    };
    pids.iter().filter_map(peak).max().unwrap_or(0) * 1024
}

/// What the threads of these processes wait for.
pub fn report(pids: &[i32]) -> String {
    let mut report = String::new();
    for pid in pids {
        let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let command = read("cmdline").replace('\0', " ");
        let _ = writeln!(report, "process {pid}: {}", command.trim_end());
        for line in read("status").lines() {
            let wanted = ["State", "VmSize", "VmRSS", "RssAnon", "RssShmem", "Threads", "SigQ", "SigBlk"];
            if wanted.iter().any(|name| line.starts_with(name)) {
                let _ = writeln!(report, "  {line}");
            }
        }
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let state = read("stat");
            let state = state.rsplit_once(')').map_or("?", |(_, rest)| rest.trim_start().get(..1).unwrap_or("?"));
            let _ = writeln!(
                report,
                "  task {} {} {state} wchan {} syscall {}",
                task.file_name().display(),
                read("comm").trim(),
                read("wchan"),
                read("syscall").trim(),
            );
            for line in read("stack").lines() {
                let _ = writeln!(report, "    {line}");
            }
        }
    }
    report
}

/// Ends these processes, each by its own id.
pub fn kill(pids: &[i32]) {
    for pid in pids {
        // SAFETY: sends a signal; the ids are of processes that this test started (see `processes_of`).
        unsafe { libc::kill(*pid, libc::SIGKILL) };
    }
}
