//! Who takes swap off when its server was killed.
//!
//! The kernel does not let go of a swap device that answers with errors only. A write that fails leaves its page in memory, and the device looks
//! nearly empty, so that it tries another, for ever: who grows is neither given memory nor ended, and the machine stands still. Taken off
//! (swapoff(2)) the device is written no more at once, what was lost on it is marked as lost, and memory that is out is out, as the kernel's
//! OOM killer knows.
//!
//! So, as long as there is swap, a process of ours waits for the end of the server. It is the server's child, with a pipe between them: in it
//! stands which devices are for swap, and its end is the server's. It serves nothing, waits for nobody but the server, and needs little: the
//! program, which is in memory for the server already, and half a MiB.
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
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use compcache_block::fuse_loop::cut_off;
use compcache_cache::pressure::Pressure;
use libc::{SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Pid, configure_io_flusher_behavior, setsid};
use rustix::thread::set_name;

use crate::kernel::{marks_lost_pages, setting};
use crate::run::{descriptors, say};
use crate::serve::clean_up_after_the_dead;
use crate::serve::overload::{Overload, WINDOW};
use crate::swap::{GONE, has_room_beside, used_bytes};
use held::Held;

/// As processes are listed: whoever ends all that are called compcache is not to end this one.
const NAME: &str = "swap-guard";
/// Between two looks at the memory there is.
const LOOK: Duration = Duration::from_millis(10);
/// Before what was refused is tried again, and for how long.
const PAUSE: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(20);

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
    let (pressure, overload) = (Pressure::open().ok(), Overload::open().ok());
    let mut disks = Vec::new();
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        disks = line.split_ascii_whitespace().map(Swap::to).collect();
    }
    disks.retain(|disk| disk.on().is_some());
    if disks.is_empty() {
        return ExitCode::SUCCESS;
    }
    have_precedence();
    let marks_lost_pages = marks_lost_pages();
    let mut held = pressure.as_ref().filter(|_| marks_lost_pages).map(Held::new);
    let take_off = |disk: &Swap| match marks_lost_pages {
        true => disk.take_off(&mut held),
        false => Err(anyhow!("Linux before 5.19 would give programs other bytes for those that are lost")),
    };
    let taken_off: Vec<_> = disks.iter().map(take_off).collect();
    let waited = held.map(Held::end).unwrap_or_default();
    // Nobody may read what is said before: he is held.
    for (Swap { device, .. }, taken_off) in disks.iter().zip(taken_off) {
        say(&match taken_off {
            Ok(()) => format!(
                "compcache: the server has died, and swap was taken off {device}: whose pages were there dies of SIGBUS\n"
            ),
            Err(error) => format!("compcache: the server has died, and swap stays on {device}: {error:#}\n"),
        });
    }
    if !waited.is_empty() {
        let waited: Vec<_> = waited.iter().map(|pid| pid.as_raw_nonzero().to_string()).collect();
        say(&format!(
            "compcache: until then these processes were stopped, for memory was short: {}\n",
            waited.join(", ")
        ));
    }
    clean_up_after_the_dead();
    disks.retain(|disk| disk.on().is_some());
    if !disks.is_empty() {
        watch(&disks, marks_lost_pages, pressure.as_ref(), overload);
        clean_up_after_the_dead();
    }
    ExitCode::SUCCESS
}

/// What ends the server is not to end this, nor what keeps it waiting.
fn outlive_the_server() {
    // What whoever started the server had open; nothing of ours is yet.
    for number in descriptors().unwrap_or_default() {
        // SAFETY: nothing here knows of it.
        unsafe { libc::close(number) };
    }
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

/// Nobody else on the machine gets further before this has, nor the memory that the kernel keeps for a realtime task. The child that swaps off
/// works for long, and has no precedence.
fn have_precedence() {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: it reads the priority. Without it, it takes longer.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &priority) };
}

/// For as long as swap stays on a device that is dead: to the kernel it is room. It is tried again while there is memory, for nobody is held any more; where there is no
/// other room, the OOM killer is asked for.
fn watch(disks: &[Swap], is_tried: bool, pressure: Option<&Pressure>, mut overload: Option<Overload>) {
    if overload.is_some() {
        say(
            "compcache: while the machine stands still for want of memory, the kernel's OOM killer is asked to choose\n",
        );
    }
    let (mut taken, mut refused) = (0, 0);
    let is_short = || pressure.and_then(Pressure::memory).is_none_or(held::is_short);
    while disks.iter().any(|disk| disk.on().is_some()) {
        thread::sleep(WINDOW);
        for disk in disks.iter().filter(|disk| is_tried && disk.on() == Some(On::There)) {
            if !is_short() {
                let _ = disk.try_once(&mut None);
            }
        }
        let is_dead = |device: &str| {
            let name = device.strip_suffix(GONE).unwrap_or(device);
            disks.iter().any(|disk| disk.device == name && disk.on().is_some())
        };
        *if has_room_beside(&swaps(), is_dead) { &mut taken } else { &mut refused } += 1;
        if let Some(overload) = &mut overload {
            overload.asks(taken, refused, false);
        }
    }
}

/// A device of the server's that is for swap.
struct Swap {
    device: String,
    /// By that it is told from another of its name.
    identity: Option<String>,
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
        Swap { device: device.to_owned(), identity: identity(device) }
    }

    fn on(&self) -> Option<On> {
        let swaps = swaps();
        if used_bytes(&swaps, &format!("{}{GONE}", self.device)).is_some() {
            return Some(On::Gone);
        }
        // The kernel may be about to take it away.
        let is_another = identity(&self.device).is_some_and(|now| Some(now) != self.identity);
        (used_bytes(&swaps, &self.device).is_some() && !is_another).then_some(On::There)
    }

    /// Takes swap off, for as long as it takes.
    ///
    /// # Errors
    /// Why it stays.
    fn take_off(&self, held: &mut Option<Held<'_>>) -> anyhow::Result<()> {
        let give_up = Instant::now() + PATIENCE;
        loop {
            match self.on() {
                None => return Ok(()),
                Some(On::Gone) => bail!("the kernel has taken the device away"),
                Some(On::There) => {}
            }
            let tried = self.try_once(held);
            let is_over = held.as_ref().is_none_or(Held::is_over) || Instant::now() > give_up;
            match tried {
                Ok(Tried::Off) => return Ok(()),
                Ok(Tried::Killed) if is_over => bail!("who took it off was killed for want of memory"),
                Ok(Tried::Killed) => {}
                Ok(Tried::Refused(error)) if is_over || error.raw_os_error() == Some(libc::EPERM) => {
                    return Err(error.into());
                }
                Ok(Tried::Refused(_)) => {
                    for _ in 0..PAUSE.as_millis() / LOOK.as_millis() {
                        look(held, None);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Who swaps off may be killed for want of memory, of which there may be some by now.
    fn try_once(&self, held: &mut Option<Held<'_>>) -> anyhow::Result<Tried> {
        let path = CString::new(self.device.as_str())?;
        let work = || {
            // It is read for each page that is lost. Without this, that takes longer.
            if self.device.starts_with("/dev/loop") {
                let _ = cut_off(self.device.as_ref());
            }
            swap_off(&path)
        };
        let ended = match in_a_child(work, |child| look(held, child)) {
            Ok(ended) => ended,
            Err(error) => return Ok(Tried::Refused(error)),
        };
        match (ended.code(), ended.signal()) {
            (Some(0), _) => Ok(Tried::Off),
            (Some(number), _) => Ok(Tried::Refused(io::Error::from_raw_os_error(number))),
            (_, Some(SIGKILL)) => Ok(Tried::Killed),
            _ => bail!("who took it off ended with {ended}"),
        }
    }
}

/// What has become of who swapped off.
enum Tried {
    Off,
    Killed,
    Refused(io::Error),
}

fn look(held: &mut Option<Held<'_>>, child: Option<Pid>) {
    if let Some(held) = held {
        held.look(child);
    }
    thread::sleep(LOOK);
}

fn swaps() -> String {
    String::from_utf8_lossy(&fs::read("/proc/swaps").unwrap_or_default()).into_owned()
}

/// Of a block device that is there: its number in the order in which all came (Linux 5.15), or the file below it.
fn identity(device: &str) -> Option<String> {
    let of = format!("/sys/block/{}", device.strip_prefix("/dev/")?);
    setting(format!("{of}/diskseq")).or_else(|| setting(format!("{of}/loop/backing_file")))
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
fn in_a_child(work: impl FnOnce() -> i32, mut meanwhile: impl FnMut(Option<Pid>)) -> io::Result<ExitStatus> {
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
            0 => meanwhile(Pid::from_raw(child)),
            -1 => return Err(io::Error::last_os_error()),
            _ => return Ok(ExitStatus::from_raw(status)),
        }
    }
}
