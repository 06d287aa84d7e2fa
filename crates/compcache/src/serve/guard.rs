//! Who takes swap off when its server was killed.
//!
//! The kernel does not let go of a swap device that answers with errors only. A write that fails leaves its page in memory, and the device looks
//! nearly empty, so that it tries another, for ever: who grows is neither given memory nor ended, and the machine stands still. Taken off
//! (swapoff(2)) the device is written no more at once, what was lost on it is marked as lost, and memory that is out is out, as the kernel's OOM killer knows.
//!
//! So, as long as there is swap, a process of ours waits for the end of the server. It is the server's child, with a pipe between them: in it stands which devices
//! are for swap, and its end is the server's. It serves nothing, waits for nobody but the server, and needs little: the program, which is in memory for the server already,
//! and half a MiB.
//!
//! The OOM killer's first choice is whoever swaps off, whatever its score; therefore a child does that, again if need be. Nothing can be swapped
//! out meanwhile, and who grows would soon have all memory: he waits ([`held`]).
//!
//! Evidence: `swap::who_grows_when_the_server_is_killed_..` in crates/compcache/tests/e2e.
#![allow(unsafe_code)]

mod held;

use std::ffi::CString;
use std::fs;
use std::io::{self, BufRead, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use libc::{SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{configure_io_flusher_behavior, setsid};
use rustix::thread::set_name;

use crate::kernel::setting;
use crate::run::say;
use crate::serve::overload::Overload;
use crate::serve::pressure::Pressure;
use crate::swap::{GONE, used_bytes};
use held::Held;

/// As processes are listed: whoever ends all that are called compcache is not to end this one.
const NAME: &str = "swap-guard";
/// Between two looks at the memory there is.
const LOOK: Duration = Duration::from_millis(10);
/// Before what was refused is tried again.
const PAUSE_REFUSED: Duration = Duration::from_secs(1);

/// The process, as the server has it.
pub struct Guard {
    child: Child,
    pipe: ChildStdin,
}

impl Guard {
    /// Starts it. It is spared by the OOM killer if the server is.
    ///
    /// # Errors
    /// There can be no other process.
    pub fn start() -> anyhow::Result<Guard> {
        // The very program that runs, whatever its file has become.
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME).arg(NAME).env_clear().current_dir("/").stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().context("cannot start who takes swap off should this server be killed")?;
        let pipe = child.stdin.take().expect("it is piped");
        Ok(Guard { child, pipe })
    }

    /// Tells it which devices are for swap: all of them.
    ///
    /// # Errors
    /// It is there no more.
    pub fn tell(&mut self, devices: &[String]) -> io::Result<()> {
        self.pipe.write_all(format!("{}\n", devices.join(" ")).as_bytes())
    }
}

/// There is no swap any more.
impl Drop for Guard {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What that process does.
pub fn guard() -> ExitCode {
    outlive_the_server();
    let pressure = Pressure::open().ok();
    let mut disks = Vec::new();
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        disks = line.split_ascii_whitespace().map(Swap::to).collect();
    }
    disks.retain(|disk| disk.on().is_some());
    have_precedence();
    for Swap { device, .. } in &disks {
        say(&format!(
            "compcache: its server has died: taking swap off {device}; whose pages were there dies of SIGBUS\n"
        ));
    }
    for disk @ Swap { device, .. } in &disks {
        match disk.take_off(pressure.as_ref()) {
            Ok(None) => say(&format!("compcache: swap is off {device}\n")),
            Ok(Some(_)) => say(&format!(
                "compcache: the kernel has taken {device} away, and swap stays on it until the machine ends: while that stands still for want of \
                 memory, its OOM killer is asked to choose\n"
            )),
            Err(error) => say(&format!("compcache: swap stays on {device}: {error}\n")),
        }
    }
    let has_gone = || disks.iter().any(|disk| disk.on() == Some(On::Gone));
    if let Ok(mut overload) = Overload::open()
        && has_gone()
    {
        overload.watch_while(has_gone);
    }
    ExitCode::SUCCESS
}

/// What ends the server is not to end this, nor what keeps it waiting.
fn outlive_the_server() {
    // Each of these is of use without the others.
    let _ = setsid();
    let _ = set_name(&CString::new(NAME).expect("it has no zero"));
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        // SAFETY: no handler is set.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // Nobody waits for us to get memory, as they do for the server: for us the kernel may write pages, and end who takes too many.
    let _ = configure_io_flusher_behavior(false);
    if let Err(error) = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        say(&format!("compcache: who takes swap off should the server be killed is not locked in memory: {error}\n"));
    }
}

/// A device of the server's that is for swap.
struct Swap {
    device: String,
    /// What lies below, of a loop device: by that it is told from another of its name.
    file: Option<String>,
}

/// Nobody else on the machine gets further before this has, nor the memory that the kernel keeps for a realtime task.
fn have_precedence() {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: it reads the priority. Without it, it takes longer.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &priority) };
}

/// Swap is on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    There,
    /// The device is there no more, so that nobody can take swap off it.
    Gone,
}

impl Swap {
    fn to(device: &str) -> Swap {
        Swap { device: device.to_owned(), file: file_under(device) }
    }

    fn on(&self) -> Option<On> {
        let swaps = fs::read("/proc/swaps").unwrap_or_default();
        let has = |device: &str| used_bytes(&String::from_utf8_lossy(&swaps), device).is_some();
        if has(&format!("{}{GONE}", self.device)) {
            return Some(On::Gone);
        }
        (has(&self.device) && file_under(&self.device) == self.file).then_some(On::There)
    }

    /// Takes swap off, for as long as it takes. `Some` if the device has gone.
    ///
    /// # Errors
    /// It may not.
    fn take_off(&self, pressure: Option<&Pressure>) -> io::Result<Option<On>> {
        let path = CString::new(self.device.as_str()).map_err(io::Error::from)?;
        loop {
            let on = self.on();
            if on != Some(On::There) {
                return Ok(on);
            }
            // Until this one has ended.
            let mut held = pressure.map(Held::new);
            let ended = in_a_child(
                || swap_off(&path),
                || {
                    held.as_mut().map(Held::look);
                    thread::sleep(LOOK);
                },
            );
            match ended.ok().map(|status| (status.code(), status.signal())) {
                Some((Some(0), _)) => return Ok(None),
                Some((Some(libc::EPERM), _)) => return Err(io::Error::from_raw_os_error(libc::EPERM)),
                // For want of memory, of which there may be some by now.
                Some((_, Some(SIGKILL))) => {}
                _ => thread::sleep(PAUSE_REFUSED),
            }
        }
    }
}

fn file_under(device: &str) -> Option<String> {
    setting(format!("/sys/block/{}/loop/backing_file", device.strip_prefix("/dev/")?))
}

/// The error's number, or 0.
fn swap_off(path: &CString) -> i32 {
    // SAFETY: a text that ends with a zero.
    match unsafe { libc::swapoff(path.as_ptr()) } {
        0 => 0,
        _ => io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
    }
}

/// Does the work in a process of its own, whose status is what the work returns, and until that has ended the other work here.
fn in_a_child(work: impl FnOnce() -> i32, mut meanwhile: impl FnMut()) -> io::Result<ExitStatus> {
    // SAFETY: this process has one thread, so that nothing is half done in its copy.
    let child = match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()),
        // SAFETY: it ends here, without cleaning up after the original.
        0 => unsafe { libc::_exit(work()) },
        child => child,
    };
    let mut status = 0;
    loop {
        // SAFETY: it writes the status.
        match unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } {
            0 => meanwhile(),
            -1 => return Err(io::Error::last_os_error()),
            _ => return Ok(ExitStatus::from_raw(status)),
        }
    }
}
