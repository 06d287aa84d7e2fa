//! Serving in the background, a mount or disks: who asked is told when it is there, or why not, and goes on.
//!
//! Another process of ours serves. Its standard input is a pipe to the one that was asked, which waits for a word; then it lets go of
//! all that was the asker's (terminal, output, session), for those who wait for the end of that would wait for it. What else he has open it does not get.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, pipe};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use rustix::process::setsid;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout, stdin};

use crate::kernel::setting;
use crate::run::{STATUS_FAILED, descriptors};

/// Has what `arguments` (of this program, its name first) ask for served by another process, which finds `--background-inner` for
/// `--background`; returns when that can be used, or has said why not and ended.
///
/// # Errors
/// It cannot be started, or ended in another way.
pub fn start(arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let inner = |word: &OsString| if word == "--background" { "--background-inner".into() } else { word.clone() };
    let arguments = arguments.iter().skip(1).map(inner);
    let (mut heard, told) = pipe().context("cannot make a pipe")?;
    let program = std::env::current_exe().context("cannot find this program")?;
    inherit_nothing().context("cannot tell what is open")?;
    // The command ends with this line, and our end of the pipe for writing with it.
    let mut child =
        Command::new(program).args(arguments).stdin(told).spawn().context("cannot start another process")?;
    let mut word = [0];
    if heard.read(&mut word).context("cannot wait for it")? == 1 {
        return Ok(ExitCode::SUCCESS);
    }
    match child.wait().context("cannot wait for it")?.code() {
        Some(0) => bail!("it ended at once"),
        // It has said why.
        Some(_) => Ok(STATUS_FAILED.into()),
        None => bail!("what was to serve it was killed"),
    }
}

/// Has what this process was given beside the three standard descriptors closed in what it starts: the other end of a pipe, a lock.
fn inherit_nothing() -> io::Result<()> {
    for number in descriptors()? {
        // SAFETY: it changes what becomes of a descriptor at exec.
        unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    Ok(())
}

/// When memory is out the kernel looks for the largest process, and many use what this one serves. As in the units.
const OOM_LATE: i32 = -900;

/// Says that it can be used, and lets go of everything of the asker's.
///
/// # Errors
/// There is no /dev/null.
pub fn begun() -> anyhow::Result<()> {
    let null = OpenOptions::new().read(true).write(true).open("/dev/null").context("cannot open /dev/null")?;
    // It leads a session of its own already if a service manager started it.
    let _ = setsid();
    be_chosen_late();
    // Who asked may be gone; it is there all the same.
    let _ = rustix::io::write(stdin(), b"\n");
    dup2_stdin(&null).context("cannot let go of the input")?;
    dup2_stdout(&null).context("cannot let go of the output")?;
    dup2_stderr(&null).context("cannot let go of the output for errors")
}

/// If we may: root, with CAP_SYS_RESOURCE. Who is to be chosen later still stays so.
fn be_chosen_late() {
    const SCORE: &str = "/proc/self/oom_score_adj";
    let now = setting(SCORE).and_then(|score| score.parse::<i32>().ok());
    if now.is_some_and(|now| now > OOM_LATE) {
        let _ = fs::write(SCORE, OOM_LATE.to_string());
    }
}
