//! One run of one command: placed, measured and watched.
//!
//! CPU time is that of the command and of every descendant it waited for (wait4(2)). Memory is sampled every
//! [`SAMPLE_EVERY`] over all processes of the run: anonymous memory summed, shared memory counted once, plus what the
//! kernel's path holds at the same moment. The same yardstick for every side. What the page cache holds of
//! the program's files is not in it.
//!
//! A peak between two samples is not seen. What the control group says was charged at most is exact, and counts other things: see [`Peak::group_bytes`].

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::baseline::{Baseline, Held};
use crate::device::machine_cpu_s;

/// Often enough to see a peak of some hundred milliseconds, seldom enough to cost nothing that shows.
const SAMPLE_EVERY: Duration = Duration::from_millis(20);

/// How often the kernel is made to look at its statistics: see the head of [`crate::baseline::cgroup`].
const REFRESH_EVERY: Duration = Duration::from_millis(2);

/// What is kept of an output that is not compared.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// What becomes of the command's output.
#[derive(Clone, Debug)]
pub enum Output {
    /// It is the bench's own output, errors too.
    Inherit,
    /// The first [`KEPT_BYTES_MAX`] bytes are kept in memory.
    Keep,
    /// All of it goes to a file.
    Save(PathBuf),
    /// It is compared, byte for byte, with a file.
    Compare(PathBuf),
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program and its arguments.
    pub words: Vec<OsString>,
    /// Set in its environment.
    pub environment: Vec<(&'static str, OsString)>,
    /// The only CPU it may use.
    pub pin: Option<usize>,
    /// What becomes of its output.
    pub output: Output,
    /// It is ended when it takes longer.
    pub patience: Duration,
}

impl Job {
    /// A job of these words on all CPUs, its output kept.
    pub fn new<W: Into<OsString>>(words: impl IntoIterator<Item = W>) -> Job {
        let words = words.into_iter().map(Into::into).collect();
        Job { words, environment: Vec::new(), pin: None, output: Output::Keep, patience: Duration::MAX }
    }
}

/// The most memory that was seen.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Peak {
    /// Resident anonymous and shared memory of all processes.
    pub resident_bytes: u64,
    /// That plus the memory of the kernel's path at the same moment.
    pub total_bytes: u64,
    /// What the kernel's path held when it held most.
    pub held: Held,
    /// What the control group says, page cache included.
    pub cgroup_bytes: u64,
    /// The most that the path held in memory which the control group does not pay for.
    pub beside_bytes: u64,
}

impl Peak {
    /// The most that was charged to the control group, exactly, and the most that the path held beside it. Other than in `total_bytes`, the page cache, page
    /// tables and the kernel's own memory are in it, a part of which would be given back where there is a limit. None where there are no groups.
    pub fn group_bytes(&self) -> Option<u64> {
        (self.cgroup_bytes > 0).then_some(self.cgroup_bytes + self.beside_bytes)
    }
}

/// What a run took and said.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// Seconds by the clock, from start to end.
    pub wall_s: f64,
    /// Seconds of CPU in user mode.
    pub user_s: f64,
    /// Seconds of CPU in the kernel.
    pub sys_s: f64,
    /// Seconds of CPU of the whole machine meanwhile, whoever took them.
    pub machine_cpu_s: f64,
    /// The most memory that was seen.
    pub peak: Peak,
    /// Exit status, as the shell counts: 128 + N for signal N.
    pub exit: i32,
    /// It took longer than it was given and was ended.
    pub out_of_patience: bool,
    /// How many of its processes the kernel ended for want of memory.
    pub kills: u64,
    /// With [`Output::Compare`], whether not a byte was different.
    pub same_output: Option<bool>,
    /// What was kept of the output.
    #[serde(skip)]
    pub stdout: Vec<u8>,
    /// What it said on stderr.
    pub stderr: String,
}

impl Outcome {
    /// One that took a second and no CPU.
    #[cfg(test)]
    pub fn of_test(peak: Peak, exit: i32, kills: u64, stderr: &str) -> Outcome {
        Outcome {
            wall_s: 1.0,
            user_s: 0.0,
            sys_s: 0.0,
            machine_cpu_s: 0.0,
            peak,
            exit,
            out_of_patience: false,
            kills,
            same_output: None,
            stdout: Vec::new(),
            stderr: stderr.to_owned(),
        }
    }

    /// User and kernel together.
    pub fn cpu_s(&self) -> f64 {
        self.user_s + self.sys_s
    }

    /// Whether one of our workers found another byte than it had written, or the output was not that of the run it is compared with.
    pub fn is_wrong(&self) -> bool {
        self.stderr.contains("WRONG BYTES") || (self.exit == 0 && self.same_output == Some(false))
    }
}

/// Runs `job` in the control group of `place` and waits for it.
///
/// # Errors
/// It could not be started, or a disk that should be slow was not. That it failed is not an error here: see [`Outcome::exit`].
pub fn run(job: &Job, place: &Baseline<'_>) -> Result<Outcome> {
    let mut command = prepare(job, place)?;
    let traffic_before = place.slow_traffic()?;
    let cpu_s_before = machine_cpu_s();
    let started = Instant::now();
    let mut child = command.spawn().with_context(|| format!("cannot start {:?}", job.words[0]))?;
    let pid = child.id();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let sampler = scope.spawn(|| sample(pid, place, job.patience, &ended));
        let stdout = scope.spawn(|| stdout.map(|pipe| collect(pipe, &job.output)).unwrap_or(Ok((Vec::new(), None))));
        let stderr = scope.spawn(|| stderr.map(|pipe| collect(pipe, &Output::Keep)).unwrap_or(Ok((Vec::new(), None))));
        let (status, usage) = wait(pid)?;
        let wall_s = started.elapsed().as_secs_f64();
        let machine_cpu_s = machine_cpu_s() - cpu_s_before;
        ended.store(true, Ordering::Release);
        let throttled = place.check_throttle(traffic_before, wall_s);
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
        let (kept, same_output) = stdout.join().expect("the reader does not panic")?;
        let (said, _) = stderr.join().expect("the reader does not panic")?;
        let (peak, out_of_patience) = sampler.join().expect("the sampler does not panic");
        throttled?;
        Ok(Outcome {
            out_of_patience,
            wall_s,
            user_s: seconds(usage.ru_utime),
            sys_s: seconds(usage.ru_stime),
            machine_cpu_s,
            peak,
            kills: place.cgroup().map_or(0, |group| group.kills()),
            exit: status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
            same_output,
            stdout: kept,
            stderr: String::from_utf8_lossy(&said).into_owned(),
        })
    })
}

fn prepare(job: &Job, place: &Baseline<'_>) -> Result<Command> {
    let mut command = Command::new(&job.words[0]);
    command.args(&job.words[1..]).envs(job.environment.iter().map(|(name, value)| (name, value)));
    if !matches!(job.output, Output::Inherit) {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    let pin = job.pin;
    let place_itself = move || {
        // SAFETY: prctl(2) with numbers, and sched_setaffinity(2) with a set that lives on this stack and says its size.
        unsafe {
            // Should the bench die, the command does not go on.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if let Some(cpu) = pin {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(cpu, &mut set);
                if libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls alone: no allocation, no lock.
    unsafe { command.pre_exec(place_itself) };
    if let Some(group) = place.cgroup() {
        group.take_in(&mut command)?;
    }
    Ok(command)
}

fn wait(pid: u32) -> Result<(ExitStatus, libc::rusage)> {
    // SAFETY: wait4(2) writes one status and one `rusage`, both here on the stack. The pid is a child that nobody else
    // waits for: `std::process::Child` does so only when asked.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let mut status = 0;
        while libc::wait4(pid as libc::pid_t, &mut status, 0, &mut usage) < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error).context("wait4");
            }
        }
        Ok((ExitStatus::from_raw(status), usage))
    }
}

fn collect(mut pipe: impl Read, output: &Output) -> Result<(Vec<u8>, Option<bool>)> {
    let mut buffer = vec![0; 256 << 10];
    let mut kept = Vec::new();
    let mut file = match output {
        Output::Inherit | Output::Keep => None,
        Output::Save(path) => Some(File::create(path)?),
        Output::Compare(path) => Some(File::open(path)?),
    };
    let mut same = true;
    let mut wanted = vec![0; buffer.len()];
    loop {
        let length = pipe.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        match (output, &mut file) {
            (Output::Save(_), Some(file)) => file.write_all(&buffer[..length])?,
            (Output::Compare(_), Some(file)) if same => {
                same = file.read_exact(&mut wanted[..length]).is_ok() && wanted[..length] == buffer[..length];
            }
            _ => {}
        }
        let room = KEPT_BYTES_MAX.saturating_sub(kept.len()).min(length);
        kept.extend_from_slice(&buffer[..room]);
    }
    let compared = match (output, &mut file) {
        (Output::Compare(_), Some(file)) => Some(same && file.read(&mut wanted)? == 0),
        _ => None,
    };
    Ok((kept, compared))
}

/// Watches until `ended`; ends the run itself when it takes longer than `patience`, and returns whether it did.
fn sample(pid: u32, place: &Baseline<'_>, patience: Duration, ended: &AtomicBool) -> (Peak, bool) {
    let started = Instant::now();
    let mut peak = Peak::default();
    let mut out_of_patience = false;
    while !ended.load(Ordering::Acquire) {
        let processes = place.cgroup().map_or_else(|| tree(pid), |group| group.processes());
        if started.elapsed() > patience {
            out_of_patience = true;
            for &pid in &processes {
                // SAFETY: kill(2) takes two numbers. The processes are those of this run, a moment ago.
                unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
            }
        }
        let resident_bytes = resident_bytes(&processes);
        let held = place.held();
        peak.resident_bytes = peak.resident_bytes.max(resident_bytes);
        peak.total_bytes = peak.total_bytes.max(resident_bytes + held.all_bytes());
        if place.holds_beside() {
            peak.beside_bytes = peak.beside_bytes.max(held.all_bytes());
        }
        if held.original_bytes >= peak.held.original_bytes {
            peak.held = held;
        }
        pause(place, ended);
    }
    peak.cgroup_bytes = place.cgroup().map_or(0, |group| group.peak_bytes().max(group.usage_bytes()));
    (peak, out_of_patience)
}

fn pause(place: &Baseline<'_>, ended: &AtomicBool) {
    let started = Instant::now();
    while started.elapsed() < SAMPLE_EVERY && !ended.load(Ordering::Acquire) {
        thread::sleep(REFRESH_EVERY);
        if let Some(group) = place.cgroup() {
            group.refresh();
        }
    }
}

/// Anonymous memory of all `processes`, and the largest shared memory among them (a tree shares one).
pub fn resident_bytes(processes: &[u32]) -> u64 {
    let mut anonymous = 0;
    let mut shared = 0;
    for pid in processes {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let kilobytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("");
            line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0)
        };
        anonymous += kilobytes("RssAnon:") * 1024;
        shared = shared.max(kilobytes("RssShmem:") * 1024);
    }
    anonymous + shared
}

/// `root` and its descendants.
fn tree(root: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for found in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = found.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        if let Some(parent) = after_name.split_whitespace().nth(1).and_then(|field| field.parse().ok()) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        found.extend(children.remove(&found[next]).unwrap_or_default());
        next += 1;
    }
    found
}
