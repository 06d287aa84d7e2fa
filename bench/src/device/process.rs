//! Processes that serve a device: started for a run, found again by their command line, and what CPU they took.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::run::resident_bytes;
use crate::session::{Session, Undo};

/// How long a server may take until it serves, and to end when told to.
const PATIENCE: Duration = Duration::from_secs(10);
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// A server that runs; ended when dropped.
pub struct Process {
    child: Child,
    directory: PathBuf,
    name: String,
}

impl Process {
    /// Starts `command`, one of whose arguments must name something in `directory`: by that it is found should the bench
    /// die. What it says goes to a file there.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(session: &Session, directory: &Path, mut command: Command) -> Result<Process> {
        session.note(Undo::Processes(directory.to_owned()))?;
        let name = command.get_program().to_string_lossy().into_owned();
        let log = log_of(directory, &name);
        let said = File::create(&log).with_context(|| log.display().to_string())?;
        // In a group of its own, so that the terminal's signals do not end it before those who use it are gone.
        command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said).process_group(0);
        let child = command.spawn().with_context(|| format!("cannot run {name}"))?;
        Ok(Process { child, directory: directory.to_owned(), name })
    }

    /// Waits until `ready`.
    ///
    /// # Errors
    /// It ended, or takes too long; with what it said.
    pub fn wait_until(&mut self, ready: impl Fn() -> bool) -> Result<()> {
        let started = Instant::now();
        while !ready() {
            if self.child.try_wait()?.is_some() || started.elapsed() > PATIENCE {
                let said = fs::read_to_string(log_of(&self.directory, &self.name)).unwrap_or_default();
                bail!("{} does not serve: {}", self.name, said.trim());
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Its anonymous and shared memory that is resident.
    pub fn resident_bytes(&self) -> u64 {
        resident_bytes(&[self.child.id()])
    }

    /// Seconds of CPU of all its threads so far, in user mode and in the kernel.
    pub fn cpu_s(&self) -> f64 {
        cpu_s(self.child.id())
    }

    /// Waits until it has ended by itself; without end, unless whoever uses it has gone.
    pub fn wait(&mut self) -> Result<()> {
        let status = self.child.wait()?;
        match status.success() {
            true => Ok(()),
            false => {
                let said = fs::read_to_string(log_of(&self.directory, &self.name)).unwrap_or_default();
                bail!("{} ended with {status}: {}", self.name, said.trim())
            }
        }
    }
}

/// Seconds of CPU of all threads of a process so far, in user mode and in the kernel; 0 once it is gone.
pub fn cpu_s(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = after_name.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok());
    ticks.sum::<u64>() as f64 / ticks_a_second()
}

impl Drop for Process {
    fn drop(&mut self) {
        // Ended by the journal already, in its order; this only collects it.
        let _ = end_all(&self.directory);
        let _ = self.child.wait();
    }
}

fn log_of(directory: &Path, name: &str) -> PathBuf {
    directory.join(Path::new(name).file_name().unwrap_or_default()).with_extension("log")
}

/// Ends the processes whose command line names something in `directory`: asked to first, then by force.
///
/// # Errors
/// They do not end.
pub fn end_all(directory: &Path) -> Result<()> {
    let started = Instant::now();
    let mut last_asked = None;
    while started.elapsed() < PATIENCE {
        let found = naming(directory);
        if found.is_empty() {
            return Ok(());
        }
        // A server that was still in use refuses, so it is asked again.
        if last_asked.is_none_or(|at: Instant| at.elapsed() > ASK_AGAIN) {
            last_asked = Some(Instant::now());
            let by_force = started.elapsed() > PATIENCE / 2;
            for pid in found {
                // SAFETY: kill(2) takes two numbers. The process named a directory that only this session has.
                unsafe { libc::kill(pid as libc::pid_t, if by_force { libc::SIGKILL } else { libc::SIGTERM }) };
            }
        }
        thread::sleep(Duration::from_millis(10));
    }
    bail!("processes {:?} do not end", naming(directory))
}

fn naming(directory: &Path) -> Vec<u32> {
    let wanted = format!("{}/", directory.display());
    let names_it = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        *pid != std::process::id() && String::from_utf8_lossy(&words).contains(&wanted)
    };
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|one| one.file_name().to_str()?.parse().ok()).filter(names_it).collect()
}

/// What `/proc` counts CPU time in.
pub fn ticks_a_second() -> f64 {
    // SAFETY: sysconf(3) takes a number and touches no memory of ours.
    (unsafe { libc::sysconf(libc::_SC_CLK_TCK) }) as f64
}
