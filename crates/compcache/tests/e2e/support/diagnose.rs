//! What is known of processes that hang, and their end.
//!
//! Every process that a test starts carries a variable of its run in its environment, and so do its descendants: they
//! are found by it, daemons and orphans too, and nobody else's process is ever touched.

use std::fmt::Write;
use std::fs;

/// The variable; its value is unique to a run.
pub const MARK: &str = "COMPCACHE_E2E_RUN";

/// The processes of one run that are alive.
pub fn processes_of(run: &str) -> Vec<i32> {
    let wanted = format!("{MARK}={run}");
    let mut found: Vec<i32> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
        })
        .filter(|pid| state(*pid).is_some_and(|state| state != 'Z' && state != 'X'))
        .collect();
    found.sort_unstable();
    found
}

fn state(pid: i32) -> Option<char> {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    status.rsplit_once(')')?.1.trim_start().chars().next()
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
