//! A memory control group of a run's own, in either version of the interface.
//!
//! A trap: when the kernel makes room in a group, it decides from the group's statistics whether pages that were in use
//! have to be looked at again, and it brings these statistics up to date only every two seconds. A small group whose
//! pages change faster is then told that it has no page to give, and its program is ended although swap is empty (seen
//! on Linux 6.18: `sort` in 16 MiB, six times out of six). Reading `memory.stat` brings them up to date: see
//! [`Cgroup::refresh`]. It helps the kernel's side, at a cost below one percent of a CPU.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{read_trimmed, write};
use crate::session::{NAME, Session, Undo};

const V1: &str = "/sys/fs/cgroup/memory";
const V2: &str = "/sys/fs/cgroup";
/// Which controllers the groups inside a group of version 2 have.
const SWITCH: &str = "cgroup.subtree_control";

static MADE: AtomicU32 = AtomicU32::new(0);

/// A control group; removed by the session's journal.
pub struct Cgroup {
    path: PathBuf,
    unified: bool,
    statistics: File,
}

impl Cgroup {
    /// Makes a group, limited to `limit_bytes` of memory when given.
    ///
    /// # Errors
    /// No memory controller, or no right to make groups.
    pub fn make(session: &Session, limit_bytes: Option<u64>) -> Result<Cgroup> {
        let unified = is_unified();
        if unified {
            enable_controllers(&Path::new(V2).join("cgroup.controllers"), &Path::new(V2).join(SWITCH), |undo| {
                session.note(undo)
            })?;
        }
        let nth = MADE.fetch_add(1, Ordering::Relaxed);
        let root = if unified { V2 } else { V1 };
        let path = Path::new(root).join(format!("{}.{nth}", session.unique_name()));
        session.note(Undo::Cgroup(path.clone()))?;
        fs::create_dir(&path).with_context(|| format!("cannot make the control group {}", path.display()))?;
        let statistics = File::open(path.join("memory.stat")).context("memory.stat")?;
        let group = Cgroup { path, unified, statistics };
        if let Some(bytes) = limit_bytes {
            group.limit(bytes)?;
        }
        Ok(group)
    }

    /// A group inside this one, limited to `limit_bytes`, for some of the processes. It goes when this one goes.
    ///
    /// # Errors
    /// As [`Cgroup::make`].
    pub fn inside(&self, name: &str, limit_bytes: u64) -> Result<Cgroup> {
        if self.unified {
            write(self.path.join(SWITCH), "+memory")?;
        }
        let path = self.path.join(name);
        fs::create_dir(&path).with_context(|| format!("cannot make the control group {}", path.display()))?;
        let statistics = File::open(path.join("memory.stat")).context("memory.stat")?;
        let group = Cgroup { path, unified: self.unified, statistics };
        group.limit(limit_bytes)?;
        Ok(group)
    }

    fn limit(&self, bytes: u64) -> Result<()> {
        let file = if self.unified { "memory.max" } else { "memory.limit_in_bytes" };
        write(self.path.join(file), &bytes.to_string())
    }

    /// Keeps memory of the group, and of those that will be made inside it, out of the machine's swap. To be called before it is used.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn keep_in_memory(&self) -> Result<()> {
        let file = if self.unified { "memory.swap.max" } else { "memory.swappiness" };
        let path = self.path.join(file);
        // A kernel without swap has none of them.
        if path.exists() { write(path, "0") } else { Ok(()) }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Has the process that `command` will start enter the group.
    ///
    /// # Errors
    /// The group is not there any more.
    pub fn take_in(&self, command: &mut Command) -> Result<()> {
        let path = self.path.join("cgroup.procs");
        let entrance = OpenOptions::new().write(true).open(&path).with_context(|| path.display().to_string())?;
        let enter = move || {
            // SAFETY: write(2) of one byte of a constant to a descriptor that the closure owns.
            match unsafe { libc::write(entrance.as_raw_fd(), b"0".as_ptr().cast(), 1) } {
                1 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: between fork and exec the closure makes one system call: no allocation, no lock.
        unsafe { command.pre_exec(enter) };
        Ok(())
    }

    /// The processes in it.
    pub fn processes(&self) -> Vec<u32> {
        processes(&self.path)
    }

    /// Memory charged to it now, page cache included.
    pub fn usage_bytes(&self) -> u64 {
        self.number(if self.unified { "memory.current" } else { "memory.usage_in_bytes" })
    }

    /// Page cache charged to it now, that of groups inside it not included.
    pub fn page_cache_bytes(&self) -> u64 {
        let text = fs::read_to_string(self.path.join("memory.stat")).unwrap_or_default();
        let name = if self.unified { "file " } else { "cache " };
        text.lines().find_map(|line| line.strip_prefix(name)?.parse().ok()).unwrap_or(0)
    }

    /// The most that was charged to it; 0 on kernels that do not tell.
    pub fn peak_bytes(&self) -> u64 {
        self.number(if self.unified { "memory.peak" } else { "memory.max_usage_in_bytes" })
    }

    /// Makes the kernel look at its own statistics of the group; see the head of this module.
    pub fn refresh(&self) {
        let mut text = [0; 8192];
        // Nothing depends on the answer.
        let _ = self.statistics.read_at(&mut text, 0);
    }

    /// How many of its processes the kernel has ended for want of memory.
    pub fn kills(&self) -> u64 {
        let file = if self.unified { "memory.events" } else { "memory.oom_control" };
        let text = fs::read_to_string(self.path.join(file)).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
    }

    /// Its directory in the hierarchy that also limits I/O, where that is the same (version 2).
    pub fn io_max(&self) -> Option<PathBuf> {
        let path = self.path.join("io.max");
        (self.unified && path.exists()).then_some(path)
    }

    fn number(&self, file: &str) -> u64 {
        read_trimmed(self.path.join(file)).ok().and_then(|text| text.parse().ok()).unwrap_or(0)
    }
}

/// Whether groups are of version 2, in which zswap's pool is charged to the group whose pages it holds.
pub fn is_unified() -> bool {
    !Path::new(V1).join("memory.limit_in_bytes").exists()
}

/// Ends what is in the group at `path`: processes that the bench started, or their children.
pub fn end_processes(path: &Path) {
    for _ in 0..200 {
        let inside = processes(path);
        if inside.is_empty() {
            return;
        }
        for pid in inside {
            // SAFETY: kill(2) takes two numbers and touches no memory of ours.
            unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Removes the group and those inside it; no error when it is gone.
pub fn remove(path: &Path) -> Result<()> {
    if path.exists() {
        for inside in fs::read_dir(path)?.flatten().filter(|one| one.file_type().is_ok_and(|kind| kind.is_dir())) {
            remove(&inside.path())?;
        }
        end_processes(path);
        fs::remove_dir(path)?;
    }
    Ok(())
}

/// The groups that carry the bench's name.
pub fn find_by_name() -> Vec<PathBuf> {
    let below = |root| fs::read_dir(root).into_iter().flatten().flatten().map(|one| one.path());
    let ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&format!("{NAME}.")) && path.join("cgroup.procs").exists()
    };
    below(V1).chain(below(V2)).filter(ours).collect()
}

fn processes(path: &Path) -> Vec<u32> {
    let text = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Switches on what the groups of the bench need inside the root of version 2; notes how to switch off again what was off.
fn enable_controllers(offered: &Path, switch: &Path, mut note: impl FnMut(Undo) -> Result<()>) -> Result<()> {
    let has = |text: &str, name: &str| text.split(' ').any(|one| one == name);
    let offered = read_trimmed(offered).unwrap_or_default();
    if !has(&offered, "memory") {
        bail!("this machine has no memory control groups (neither {V1} nor memory in {V2}/cgroup.controllers)");
    }
    let on = read_trimmed(switch)?;
    let mut enable = |name: &str| {
        if has(&on, name) {
            return Ok(());
        }
        note(Undo::Controller(switch.to_owned(), name.to_owned()))?;
        write(switch, &format!("+{name}"))
    };
    enable("memory")?;
    // Only throttling needs it, and says so where it is missing.
    if has(&offered, "io") {
        let _ = enable("io");
    }
    Ok(())
}

/// Switches a controller off again; no error when groups of others have come to use it.
pub fn disable(switch: &Path, name: &str) -> Result<()> {
    match fs::write(switch, format!("-{name}")) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) && find_by_name().is_empty() => Ok(()),
        written => written.with_context(|| format!("cannot write -{name} to {}", switch.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_is_switched_off_again_only_if_it_was_off() {
        let root = tempfile::tempdir().unwrap();
        let (offered, switch) = (root.path().join("cgroup.controllers"), root.path().join(SWITCH));
        let notes = |has: &str, on: &str| {
            fs::write(&offered, has).unwrap();
            fs::write(&switch, on).unwrap();
            let mut noted = Vec::new();
            let made = enable_controllers(&offered, &switch, |undo| {
                noted.push(undo);
                Ok(())
            });
            (made.is_ok(), noted)
        };
        let off = |name: &str| Undo::Controller(switch.clone(), name.to_owned());
        assert_eq!(notes("cpuset cpu io memory pids\n", ""), (true, vec![off("memory"), off("io")]));
        assert_eq!(notes("cpuset cpu io memory pids\n", "cpu memory\n"), (true, vec![off("io")]));
        assert_eq!(notes("io memory\n", "io memory\n"), (true, Vec::new()));
        assert_eq!(notes("memory\n", ""), (true, vec![off("memory")]));
        assert_eq!(notes("cpu io memory_of_another_kind\n", ""), (false, Vec::new()));
    }
}
