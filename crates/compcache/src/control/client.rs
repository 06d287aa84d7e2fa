//! The asking side.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

use super::{Reply, Request, from_line, to_line};

/// Asks the server at `socket`, and waits for its answer.
///
/// # Errors
/// There is no server there, it is somebody else's, or it refused; the message says what to do.
pub fn ask(socket: &Path, request: Request) -> anyhow::Result<Reply> {
    exchange(socket, &connect(socket)?, request)
}

/// The same, of a server whose answer can be handed to programs that run as who asks: it must be root's, or his own. Another's could have them format any device.
///
/// # Errors
/// As [`ask`]; or it is another user's.
pub fn ask_own(socket: &Path, request: Request) -> anyhow::Result<Reply> {
    let stream = connect(socket)?;
    let theirs = socket_peercred(&stream).context("cannot see whose server it is")?.uid;
    if !theirs.is_root() && theirs != geteuid() {
        bail!(
            "the server at {} is that of user {}, who could name any device for it; have that user do it, or a server of yours",
            socket.display(),
            theirs.as_raw()
        );
    }
    exchange(socket, &stream, request)
}

fn connect(socket: &Path) -> anyhow::Result<UnixStream> {
    UnixStream::connect(socket).map_err(|error| explain(socket, error))
}

fn exchange(socket: &Path, mut stream: &UnixStream, request: Request) -> anyhow::Result<Reply> {
    let request = to_line(request).context("that cannot be asked")?;
    stream.write_all(&request).context("the server at the other end went away")?;
    let mut line = Vec::new();
    BufReader::new(stream).read_until(b'\n', &mut line).context("the server's answer did not come")?;
    if !line.ends_with(b"\n") {
        bail!("the server at {} hung up without an answer; did it end just now?", socket.display());
    }
    match from_line(&line).context("the server's answer was not understood")? {
        Reply::Failed { why } => Err(anyhow!(why)),
        reply => Ok(reply),
    }
}

fn explain(socket: &Path, error: std::io::Error) -> anyhow::Error {
    let socket = socket.display();
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => anyhow!(
            "no server answers at {socket}; start one with `compcache serve --background`, or as a service, \
             or name its socket with --socket"
        ),
        ErrorKind::PermissionDenied => {
            anyhow!("{socket} is another user's; ask the server there, if there is one, as that user or as root")
        }
        _ => anyhow::Error::new(error).context(format!("cannot reach the server at {socket}")),
    }
}
