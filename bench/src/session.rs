//! What is set up is undone, however the bench ends.
//!
//! Before a swap device, a control group, a loop device or a kernel parameter is touched, the step that undoes it is
//! appended to a journal, one line of JSON a step, in `/run/compcache-bench` (for other users, in `$XDG_RUNTIME_DIR`, or
//! `compcache-bench.UID` where temporary files are: see [`journal`]). It is locked by the session that wrote it, and the
//! kernel drops that lock however the process ends. So there are three who undo, with the same steps in the same order (last first, after ending the processes of
//! the control groups):
//!
//! | who                          | when                                                                      |
//! |------------------------------|----------------------------------------------------------------------------|
//! | the session                  | a run is over, whether it went well or not                                 |
//! | its guard, a process apart   | the session died: a signal, SIGKILL, a panic (which aborts here)           |
//! | `compcache-bench undo`, and the next session | the guard died as well                                     |
//!
//! Only one session measures at a time: a second one waits. Steps tolerate that what they undo never happened.

mod journal;

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::baseline::{cgroup, loop_device, swap, zram};
use crate::device::{brd, mount, process};
use crate::trace;

/// Everything that the bench makes and that outlives a process carries this in its name.
pub const NAME: &str = "compcache-bench";

/// How to undo one step of a set-up.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub enum Undo {
    /// End the processes in this control group, later remove it.
    Cgroup(PathBuf),
    /// Stop swapping on this device.
    Swap(PathBuf),
    /// Empty the zram device of this number; remove it when it was added for us.
    Zram {
        /// N of `/dev/zramN`.
        number: u32,
        /// It did not exist before.
        added: bool,
    },
    /// Detach this loop device.
    Loop(PathBuf),
    /// Give back the memory of this RAM disk.
    RamDisk(PathBuf),
    /// Unmount what is mounted here.
    Mount(PathBuf),
    /// Remove this instance of the kernel's tracing.
    Trace(PathBuf),
    /// End the processes whose command line names something in this directory.
    Processes(PathBuf),
    /// Remove this directory and what is in it.
    Directory(PathBuf),
    /// Remove this file.
    File(PathBuf),
    /// Write this text to this file of the kernel: a parameter's former value.
    Write(PathBuf, String),
}

impl Undo {
    fn carry_out(&self) -> Result<()> {
        match self {
            Undo::Cgroup(path) => cgroup::remove(path),
            Undo::Swap(device) => swap::off(device),
            Undo::Zram { number, added } => zram::release(*number, *added),
            Undo::Loop(device) => loop_device::detach(device),
            Undo::RamDisk(path) => brd::empty(path),
            Undo::Mount(path) => mount::off(path),
            Undo::Trace(path) if !path.exists() => Ok(()),
            Undo::Trace(path) => Ok(fs::remove_dir(path)?),
            Undo::Processes(directory) => process::end_all(directory),
            Undo::Directory(path) if !path.exists() => Ok(()),
            Undo::Directory(path) => Ok(fs::remove_dir_all(path)?),
            Undo::File(path) if !path.exists() => Ok(()),
            Undo::File(path) => Ok(fs::remove_file(path)?),
            Undo::Write(path, text) => Ok(fs::write(path, text)?),
        }
    }
}

/// The right to measure on this machine, and the duty to leave it as it was.
pub struct Session {
    directory: PathBuf,
    journal_path: PathBuf,
    /// Locked for as long as the session lives.
    journal: File,
    guard: Child,
    steps: Mutex<Vec<Undo>>,
    /// Held so that no other session measures meanwhile.
    _machine: File,
}

impl Session {
    /// Waits until no other session measures, undoes what dead ones left, and begins.
    ///
    /// # Errors
    /// The journal cannot be written, or the guard cannot be started. Nothing has been set up.
    pub fn begin() -> Result<Session> {
        let state = journal::state_directory();
        journal::make_own(&state)?;
        let machine = lock_machine(&state)?;
        undo_leftovers(&state)?;
        let own = std::process::id();
        let journal_path = state.join(format!("{own}.journal"));
        let journal = File::options().create(true).append(true).mode(0o600).open(&journal_path);
        let journal = journal.with_context(|| journal_path.display().to_string())?;
        journal.lock()?;
        let directory = PathBuf::from(format!("/var/tmp/{NAME}.{own}"));
        let guard = start_guard(&journal_path)?;
        let session = Session { directory, journal_path, journal, guard, steps: Mutex::default(), _machine: machine };
        // Noted after the act: before it, it could be another user's, who knows its name. Should the process die in between,
        // it is found by that.
        let made = DirBuilder::new().mode(0o700).create(&session.directory);
        made.with_context(|| format!("cannot make {}", session.directory.display()))?;
        session.note(Undo::Directory(session.directory.clone()))?;
        Ok(session)
    }

    /// A directory for this session's files, on a disk. Removed at its end.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A name that nothing else on the machine has.
    pub fn unique_name(&self) -> String {
        format!("{NAME}.{}", std::process::id())
    }

    /// Notes how to undo the step that the caller takes next.
    pub fn note(&self, undo: Undo) -> Result<()> {
        let mut line = serde_json::to_vec(&undo)?;
        line.push(b'\n');
        // One write, at the end of a file that only this process writes.
        (&self.journal).write_all(&line).context("cannot write the journal")?;
        self.steps().push(undo);
        Ok(())
    }

    /// How many steps are noted: what [`Session::undo_to`] goes back to.
    pub fn mark(&self) -> usize {
        self.steps().len()
    }

    fn steps(&self) -> MutexGuard<'_, Vec<Undo>> {
        self.steps.lock().expect("nobody panics with it: a panic aborts")
    }

    /// Undoes everything noted since `mark`; says on stderr what could not be undone.
    pub fn undo_to(&self, mark: usize) {
        let undone = {
            let mut steps = self.steps();
            // What belongs together may have been undone from an earlier mark.
            let from = mark.min(steps.len());
            steps.split_off(from)
        };
        undo_all(&undone);
        // What is left is written anew; were this to fail, undoing twice does no harm.
        let left: Vec<_> = self.steps().iter().filter_map(|step| serde_json::to_string(step).ok()).collect();
        let _ = self.journal.set_len(0);
        // Opened for appending: what is written goes to the new end.
        left.iter().for_each(|line| drop(writeln!(&self.journal, "{line}")));
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.undo_to(0);
        let _ = fs::remove_file(&self.journal_path);
        let _ = self.journal.unlock();
        let _ = self.guard.wait();
    }
}

/// The guard's whole life: waits until the session that locks `journal` has ended, and undoes what it left.
pub fn guard(journal: &Path) -> Result<()> {
    undo_journal(journal).map(drop)
}

/// `compcache-bench undo`: what dead sessions left, from their journals and by name. Returns how many steps were undone.
pub fn undo() -> Result<usize> {
    let state = journal::state_directory();
    journal::make_own(&state)?;
    let _machine = lock_machine(&state)?;
    let from_journals = undo_leftovers(&state)?;
    let by_name = find_by_name();
    undo_all(&by_name);
    Ok(from_journals + by_name.len())
}

fn lock_machine(state: &Path) -> Result<File> {
    let machine = File::create(state.join("machine.lock"))?;
    if machine.try_lock().is_err() {
        eprintln!("{NAME}: another one is measuring; waiting for it");
        machine.lock()?;
    }
    Ok(machine)
}

/// Undoes the journals in `state`, waiting for guards that are at it already. Returns how many steps there were.
fn undo_leftovers(state: &Path) -> Result<usize> {
    let mut steps = 0;
    for found in fs::read_dir(state)?.flatten() {
        let path = found.path();
        if path.extension().is_some_and(|extension| extension == "journal") {
            steps += undo_journal(&path)?;
        }
    }
    Ok(steps)
}

/// Undoes the journal at `path` once nobody else has it. Returns how many steps there were.
fn undo_journal(path: &Path) -> Result<usize> {
    // Gone already: the session undid it itself.
    let Some(file) = journal::lock(path)? else { return Ok(0) };
    let text = io::read_to_string(&file)?;
    let steps: Vec<Undo> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    undo_all(&steps);
    let _ = fs::remove_file(path);
    Ok(steps.len())
}

/// Processes first, so that nothing still uses what goes; then last step first.
fn undo_all(steps: &[Undo]) {
    for step in steps {
        if let Undo::Cgroup(path) = step {
            cgroup::end_processes(path);
        }
    }
    for step in steps.iter().rev() {
        if let Err(error) = retry(|| step.carry_out()) {
            eprintln!("{NAME}: cannot undo {step:?}: {error:#}");
        }
    }
}

/// A device can stay busy for a moment after its last user.
fn retry(mut work: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 0..40 {
        if work().is_ok() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(50));
    }
    work()
}

/// What carries our name, belongs to no session and is this user's, for when even the journal is gone.
fn find_by_name() -> Vec<Undo> {
    let uid = journal::own_uid();
    // None but root makes groups, instances of tracing and loop devices.
    let is_root = uid == 0;
    let groups = if is_root { cgroup::find_by_name() } else { Vec::new() };
    let mut found: Vec<Undo> = groups.into_iter().map(Undo::Cgroup).collect();
    let directories = fs::read_dir("/var/tmp").into_iter().flatten().flatten();
    let ours = directories.filter(|one| {
        let is_own = one.metadata().is_ok_and(|found| found.is_dir() && found.uid() == uid);
        is_own && one.file_name().to_string_lossy().starts_with(&format!("{NAME}."))
    });
    for directory in ours.map(|one| one.path()) {
        let inside = |path: &PathBuf| path.starts_with(&directory);
        found.extend([Undo::Directory(directory.clone()), Undo::Processes(directory.clone())]);
        // What was mounted first is unmounted last.
        found.extend(mount::points().into_iter().filter(inside).map(Undo::Mount));
    }
    if is_root {
        found.extend(trace::find_by_name().into_iter().map(Undo::Trace));
        for device in loop_device::find_by_name() {
            found.extend([Undo::Loop(device.clone()), Undo::Swap(device)]);
        }
    }
    found
}

fn start_guard(journal: &Path) -> Result<Child> {
    let own = std::env::current_exe()?;
    let mut command = Command::new(own);
    command.arg("guard").arg(journal).stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: between fork and exec only setsid(2) and signal(2) run, which are async-signal-safe and touch no memory
    // of ours. A session of its own keeps the terminal's signals away; ignored signals stay ignored after exec.
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                libc::signal(signal, libc::SIG_IGN);
            }
            Ok(())
        });
    }
    command.spawn().context("cannot start the guard")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_is_undone_last_step_first_and_removed() {
        let dir = std::env::temp_dir().join(format!("{NAME}-test.{}", std::process::id()));
        fs::create_dir_all(dir.join("inner")).unwrap();
        let parameter = dir.join("parameter");
        let steps = [
            Undo::Write(parameter.clone(), "first noted, last undone".to_owned()),
            Undo::Directory(dir.join("inner")),
            Undo::Write(parameter.clone(), "last noted, first undone".to_owned()),
        ];
        let journal = dir.join("1.journal");
        let lines: String = steps.iter().map(|step| serde_json::to_string(step).unwrap() + "\n").collect();
        fs::write(&journal, lines + "half a li").unwrap();
        guard(&journal).unwrap();
        assert_eq!(fs::read_to_string(&parameter).unwrap(), "first noted, last undone");
        assert!(!dir.join("inner").exists() && !journal.exists());
        fs::remove_dir_all(dir).unwrap();
    }
}
