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
//! Only one session measures at a time: a second one waits. Steps tolerate that what they undo never happened. One that cannot be undone is
//! told, stays in the journal for whoever undoes next, and has the bench fail at its end; no session begins before it is undone.

mod journal;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
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
    /// Switch off, in this `cgroup.subtree_control`, the controller of this name.
    Controller(PathBuf, String),
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
            Undo::Controller(switch, name) => cgroup::disable(switch, name),
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
            Undo::Write(path, text) => put_back(path, text),
        }
    }
}

/// Writes a parameter, unless what had it has gone.
fn put_back(path: &Path, text: &str) -> Result<()> {
    let written =
        File::options().write(true).truncate(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    match written {
        // The device that a line of a control group's file names.
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        written => Ok(written?),
    }
}

/// Whether a session of this process could not undo all that it did.
static LEFT: AtomicBool = AtomicBool::new(false);

/// Whether a session of this process has ended and left something: the process shall fail, whatever it measured.
pub fn left_something() -> bool {
    LEFT.load(Ordering::Relaxed)
}

/// The steps that are to be undone, here and in the journal.
struct Noted {
    steps: Vec<Undo>,
    /// Locked for as long as the session lives.
    journal: File,
}

/// The right to measure on this machine, and the duty to leave it as it was.
pub struct Session {
    directory: PathBuf,
    journal_path: PathBuf,
    guard: Child,
    noted: Mutex<Noted>,
    /// Held so that no other session measures meanwhile.
    _machine: File,
}

impl Session {
    /// Waits until no other session measures, undoes what dead ones left, and begins.
    ///
    /// # Errors
    /// What a dead session left cannot be undone, the journal cannot be written, or the guard cannot be started. Nothing has been set up.
    pub fn begin() -> Result<Session> {
        let state = journal::state_directory();
        journal::make_own(&state)?;
        let machine = lock_machine(&state)?;
        let left = undo_leftovers(&state)?.left;
        ensure!(left == 0, "{left} steps of a session that died are not undone, see above: {}", what_to_do(&state));
        let own = std::process::id();
        let journal_path = state.join(format!("{own}.journal"));
        let noted = Noted { steps: Vec::new(), journal: journal::replace(&journal_path, &[])? };
        let directory = PathBuf::from(format!("/var/tmp/{NAME}.{own}"));
        let guard = start_guard(&journal_path)?;
        let session = Session { directory, journal_path, guard, noted: Mutex::new(noted), _machine: machine };
        // Noted after the act: before it, it could be another user's, who knows its name. Should the process die in between,
        // it is found by that.
        journal::make_new(&session.directory)?;
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
        let mut noted = self.noted();
        journal::append(&noted.journal, &undo)?;
        noted.steps.push(undo);
        Ok(())
    }

    /// How many steps are noted: what [`Session::undo_to`] goes back to.
    pub fn mark(&self) -> usize {
        self.noted().steps.len()
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().expect("nobody panics with it: a panic aborts")
    }

    /// Undoes everything noted since `mark`. What cannot be undone is told and stays noted, for the end of the session.
    pub fn undo_to(&self, mark: usize) {
        // What belongs together may have been undone from an earlier mark.
        let (from, to_undo) = {
            let mut noted = self.noted();
            let from = mark.min(noted.steps.len());
            (from, noted.steps.split_off(from))
        };
        let left = undo_all(to_undo);
        let mut noted = self.noted();
        let from = from.min(noted.steps.len());
        noted.steps.splice(from..from, left);
        match journal::replace(&self.journal_path, &noted.steps) {
            Ok(shorter) => noted.journal = shorter,
            // All of it is still there; undoing twice does no harm.
            Err(error) => eprintln!("{NAME}: cannot write the journal anew: {error:#}"),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.undo_to(0);
        let left = self.noted().steps.len();
        if left == 0
            && let Err(error) = journal::remove(&self.journal_path)
        {
            eprintln!("{NAME}: {error:#}");
        }
        let _ = self.noted().journal.unlock();
        // It has another go at what is left.
        let is_undone = self.guard.wait().is_ok_and(|status| status.success());
        if left > 0 && !is_undone {
            let state = self.journal_path.parent().expect("a journal lies in a directory");
            eprintln!("{NAME}: this machine is not as it was: {}", what_to_do(state));
            LEFT.store(true, Ordering::Relaxed);
        }
    }
}

fn what_to_do(state: &Path) -> String {
    format!(
        "`{NAME} undo` tries again; what was undone by hand is to be taken out of the journal in {}",
        state.display()
    )
}

/// How many steps were undone, and how many could not be and are still in a journal.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Undone {
    /// Of the first kind.
    pub done: usize,
    /// Of the second.
    pub left: usize,
}

impl Undone {
    fn and(self, other: Undone) -> Undone {
        Undone { done: self.done + other.done, left: self.left + other.left }
    }
}

/// The guard's whole life: waits until the session that locks `journal` has ended, and undoes what it left.
///
/// # Errors
/// Some of it cannot be undone, and is still in the journal.
pub fn guard(journal: &Path) -> Result<()> {
    let left = undo_journal(journal)?.left;
    ensure!(left == 0, "{left} steps are left in {}", journal.display());
    Ok(())
}

/// `compcache-bench undo`: what dead sessions left, from their journals and by name.
///
/// # Errors
/// The journals are not this user's, or cannot be read.
pub fn undo() -> Result<Undone> {
    let state = journal::state_directory();
    journal::make_own(&state)?;
    let _machine = lock_machine(&state)?;
    let from_journals = undo_leftovers(&state)?;
    let by_name = find_by_name();
    let all = by_name.len();
    let left = undo_all(by_name).len();
    Ok(from_journals.and(Undone { done: all - left, left }))
}

fn lock_machine(state: &Path) -> Result<File> {
    let machine = File::create(state.join("machine.lock"))?;
    if machine.try_lock().is_err() {
        eprintln!("{NAME}: another one is measuring; waiting for it");
        machine.lock()?;
    }
    Ok(machine)
}

/// Undoes the journals in `state`, waiting for guards that are at it already.
fn undo_leftovers(state: &Path) -> Result<Undone> {
    let mut undone = Undone::default();
    for found in fs::read_dir(state)?.flatten() {
        let path = found.path();
        if path.extension().is_some_and(|extension| extension == "journal") {
            undone = undone.and(undo_journal(&path)?);
        }
    }
    Ok(undone)
}

/// Undoes the journal at `path` once nobody else has it. What cannot be undone stays in it.
fn undo_journal(path: &Path) -> Result<Undone> {
    // Gone already: the session undid it itself.
    let Some(journal) = journal::lock(path)? else { return Ok(Undone::default()) };
    let steps = journal::read(&journal)?;
    let all = steps.len();
    let left = undo_all(steps);
    match left.is_empty() {
        true => journal::remove(path)?,
        false => drop(journal::replace(path, &left)?),
    }
    Ok(Undone { done: all - left.len(), left: left.len() })
}

/// Processes first, so that nothing still uses what goes; then last step first. Tells what it cannot undo, and returns it in the order in which it was.
fn undo_all(steps: Vec<Undo>) -> Vec<Undo> {
    for step in &steps {
        if let Undo::Cgroup(path) = step {
            cgroup::end_processes(path);
        }
    }
    let mut left = Vec::new();
    for step in steps.into_iter().rev() {
        if let Err(error) = retry(|| step.carry_out()) {
            eprintln!("{NAME}: cannot undo {step:?}: {error:#}");
            left.push(step);
        }
    }
    left.reverse();
    left
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
        fs::write(&parameter, "").unwrap();
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

    #[test]
    fn a_step_that_cannot_be_undone_stays_in_the_journal() {
        let dir = tempfile::tempdir().unwrap();
        let (no_file, file) = (dir.path().join("no file"), dir.path().join("file"));
        fs::create_dir(&no_file).unwrap();
        fs::write(&file, "").unwrap();
        let gone = Undo::Write(dir.path().join("a parameter that is gone"), "0".to_owned());
        let stuck = Undo::File(no_file.clone());
        let path = dir.path().join("1.journal");
        drop(journal::replace(&path, &[gone, stuck.clone(), Undo::File(file.clone())]).unwrap());
        assert_eq!(undo_journal(&path).unwrap(), Undone { done: 2, left: 1 });
        assert!(!file.exists() && no_file.exists());
        assert_eq!(journal::read(&File::open(&path).unwrap()).unwrap(), [stuck]);
        assert!(guard(&path).is_err());
        fs::remove_dir(&no_file).unwrap();
        guard(&path).unwrap();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }
}
