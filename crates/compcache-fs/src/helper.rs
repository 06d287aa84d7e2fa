//! Mounting and unmounting for others than root, by fusermount3.
//!
//! Called here and not by the library, which unmounts by the path once more when a session has ended, whatever is mounted there by then.

use std::ffi::OsStr;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::fs::StatVfsMountFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg, socketpair,
};

use crate::error::FsError;

/// It is set-user-ID root, and lets a user mount on what is his.
const PROGRAM: &str = "fusermount3";
/// Names the descriptor of a socket, through which it hands over the connection to the kernel.
const ENV_SOCKET: &str = "_FUSE_COMMFD";

/// Mounts; returns the connection.
pub fn mount(target: &Path, options: &str) -> io::Result<OwnedFd> {
    let (ours, helpers) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let mut helper = Command::new(PROGRAM);
    // Of all descriptors the standard input is the one that it inherits, and nobody else who is started meanwhile.
    helper.args(["-o", options, "--"]).arg(target).env(ENV_SOCKET, "0").stdin(helpers);
    let output = ended(&mut helper)?;
    if !output.status.success() {
        return Err(io::Error::other(said(&output)));
    }
    // Nobody serves it without.
    handed_over(&ours).inspect_err(|_| detach(target))
}

/// What a helper that has ended has sent.
fn handed_over(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut handed = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut handed, flags)?;
    let connection = handed.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    connection.ok_or_else(|| io::Error::other(format!("{PROGRAM} handed over no connection")))
}

/// The options of a mount that forbids the same; devices and set-user-ID programs it forbids by itself.
pub fn options(source: &Path, limits: StatVfsMountFlags, allow_other: bool, read_bytes_max: u32) -> String {
    let name = source.to_string_lossy();
    // A comma would begin another option.
    let name = if name.contains([',', '\\']) { "compcache" } else { &name };
    let has = |limit| limits.contains(limit);
    format!(
        "fsname={name},subtype=compcache,default_permissions,max_read={read_bytes_max},{},{}{}",
        if has(StatVfsMountFlags::RDONLY) { "ro" } else { "rw" },
        if has(StatVfsMountFlags::NOEXEC) { "noexec" } else { "exec" },
        if allow_other { ",allow_other" } else { "" },
    )
}

/// Unmounts what lies on top at `target`, if nobody uses it.
///
/// # Errors
/// [`FsError::InUse`], [`FsError::Unmount`].
pub fn unmount(target: &Path) -> Result<(), FsError> {
    let path = target.to_owned();
    let mut helper = Command::new(PROGRAM);
    helper.args([OsStr::new("-u"), OsStr::new("--"), target.as_os_str()]).stdin(Stdio::null());
    let output = ended(&mut helper).map_err(|error| FsError::Unmount { path: path.clone(), error })?;
    if output.status.success() {
        return Ok(());
    }
    let said = said(&output);
    if said.contains("busy") {
        return Err(FsError::InUse { path });
    }
    Err(FsError::Unmount { path, error: io::Error::other(said) })
}

/// Takes what lies on top at `target` out of the tree, whoever uses it.
pub fn detach(target: &Path) {
    let mut helper = Command::new(PROGRAM);
    helper.args([OsStr::new("-u"), OsStr::new("-z"), OsStr::new("--"), target.as_os_str()]).stdin(Stdio::null());
    let _ = ended(&mut helper);
}

fn ended(helper: &mut Command) -> io::Result<Output> {
    helper.output().map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("the program {PROGRAM} (package fuse3) cannot be run, or waited for: {error}"),
        )
    })
}

fn said(output: &Output) -> String {
    match String::from_utf8_lossy(&output.stderr).trim() {
        "" => format!("{PROGRAM}: {}", output.status),
        said => said.to_owned(),
    }
}
