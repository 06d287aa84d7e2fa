//! The answering side: a socket, and a thread for each who asks.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use compcache_block::nbd::{is_answered, listen_alone};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

use super::{LINE_BYTES_MAX, Reply, Request, from_line, to_line};
use crate::run::why;

/// Who has connected must say something at least so often, and take the answer.
const PATIENCE: Duration = Duration::from_secs(10);

const BETWEEN_TRIES: Duration = Duration::from_millis(50);
const NOT_YOURS: &str = "this server answers only the user it runs as, and root; run this as that user";

/// Carries out what is asked.
pub trait Served: Send + Sync + 'static {
    /// Answers one request. Called by several threads at once.
    fn serve(&self, request: Request, asker: &Asker<'_>) -> Reply;
}

/// Who waits for an answer.
pub struct Asker<'a>(&'a UnixStream);

impl Asker<'_> {
    /// Fails when he waits no more: he was interrupted, or killed.
    pub fn check(&self) -> anyhow::Result<()> {
        let mut fds = [PollFd::new(self.0, PollFlags::empty())];
        match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(_) if fds[0].revents().contains(PollFlags::HUP) => bail!("whoever asked for it has gone"),
            _ => Ok(()),
        }
    }
}

/// The control socket. Removed when dropped, if it was made here.
pub struct Control {
    listener: UnixListener,
    ours: Option<Ours>,
}

/// A socket that was made here, and the lock that keeps a second server from taking it for a dead one's.
struct Ours {
    socket: PathBuf,
    /// Device and inode.
    inode: (u64, u64),
    _lock: File,
}

impl Control {
    /// Makes the socket, in a directory that only this user can enter if there is none yet.
    ///
    /// # Errors
    /// Another server answers there; or the directory cannot be written to.
    pub fn bind(socket: &Path) -> anyhow::Result<Self> {
        let directory = socket.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Some(directory) = directory.filter(|directory| !directory.exists()) {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(directory)
                .with_context(|| format!("cannot make {}; name another place with --socket", directory.display()))?;
        }
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
            .with_context(|| format!("cannot write {}; name another place with --socket", path.display()))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => bail!(
                "a server already answers at {}; end that one first, or name another socket with --socket",
                socket.display()
            ),
            Err(error) => return Err(error).with_context(|| format!("cannot lock {}", path.display())),
        }
        remove_if_dead(socket)?;
        let listener = listen_alone(socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
        let made = fs::symlink_metadata(socket).with_context(|| format!("cannot look at {}", socket.display()))?;
        let ours = Ours { socket: socket.to_owned(), inode: (made.dev(), made.ino()), _lock: lock };
        Ok(Self { listener, ours: Some(ours) })
    }

    /// Takes the socket that whoever started us listens at already (socket activation).
    ///
    /// # Errors
    /// It cannot be waited at.
    pub fn inherit(listener: UnixListener) -> anyhow::Result<Self> {
        listener.set_nonblocking(false).context("cannot wait at the socket that was handed over")?;
        Ok(Self { listener, ours: None })
    }

    /// Where it listens, if that has a name.
    pub fn path(&self) -> Option<PathBuf> {
        self.listener.local_addr().ok()?.as_pathname().map(Path::to_owned)
    }

    /// Starts answering, on a thread of its own, for as long as the process lives.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn answer(&self, served: Arc<dyn Served>) -> anyhow::Result<()> {
        let listener = self.listener.try_clone().context("cannot share the control socket with its thread")?;
        thread::Builder::new()
            .name("control".into())
            .spawn(move || {
                loop {
                    let Ok((stream, _)) = listener.accept() else {
                        // Out of descriptors, most likely: some are given back as others end.
                        thread::sleep(BETWEEN_TRIES);
                        continue;
                    };
                    let served = served.clone();
                    // Without a thread to answer on, who asked is told by the connection's end.
                    let _ = thread::Builder::new().name("ask".into()).spawn(move || converse(&stream, &*served));
                }
            })
            .context("cannot start the thread that answers")?;
        Ok(())
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Another's may be in its place by now: a service manager binds without our lock.
        if let Some(ours) = &self.ours
            && fs::symlink_metadata(&ours.socket).is_ok_and(|there| (there.dev(), there.ino()) == ours.inode)
        {
            // The lock's file stays: removed, two servers could lock two files of the same name.
            let _ = fs::remove_file(&ours.socket);
        }
    }
}

/// Removes a socket that nobody answers at any more. One that somebody does (it may have been handed to him, without our
/// lock), and a file that is none, stay.
fn remove_if_dead(socket: &Path) -> anyhow::Result<()> {
    let found = match fs::symlink_metadata(socket) {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot look at {}", socket.display())),
    };
    if !found.file_type().is_socket() {
        bail!("{} is there already, and is no socket; name another place with --socket", socket.display());
    }
    let answered = is_answered(socket);
    if answered.with_context(|| format!("cannot tell whether somebody answers at {}", socket.display()))? {
        bail!(
            "somebody already answers at {}; end that server first, or name another socket with --socket",
            socket.display()
        );
    }
    fs::remove_file(socket).with_context(|| format!("cannot replace {}", socket.display()))
}

/// Answers line after line until the other end has no more to ask.
fn converse(stream: &UnixStream, served: &dyn Served) {
    let patient = stream.set_read_timeout(Some(PATIENCE)).and(stream.set_write_timeout(Some(PATIENCE)));
    if patient.is_err() {
        return;
    }
    let may_ask = may_ask(stream);
    let mut lines = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            Ok(_) if line.ends_with(b"\n") => {}
            // The end, half a line, or one without an end.
            _ => return,
        }
        let reply = match from_line(&line) {
            // Said only now: a connection that is closed with a question unread loses the answer as well.
            Ok(_) if !may_ask => Reply::Failed { why: NOT_YOURS.into() },
            Ok(request) => served.serve(request, &Asker(stream)),
            Err(error) => Reply::Failed { why: why(&error) },
        };
        let unsaid = |error| Reply::Failed { why: format!("what came of it cannot be said: {error}") };
        let line = to_line(reply).or_else(|error| to_line(unsaid(error)));
        if line.is_ok_and(|line| (&mut &*stream).write_all(&line).is_ok()) {
            continue;
        }
        return;
    }
}

/// Whether who is at the other end may ask: the user we run as, or root.
fn may_ask(stream: &UnixStream) -> bool {
    socket_peercred(stream).is_ok_and(|peer| peer.uid.is_root() || peer.uid == geteuid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_took_the_place_of_ours_stays_when_ours_goes() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("control");
        drop(Control::bind(&socket).unwrap());
        assert!(!socket.exists());
        let ours = Control::bind(&socket).unwrap();
        fs::rename(&socket, directory.path().join("away")).unwrap();
        let _theirs = UnixListener::bind(&socket).unwrap();
        drop(ours);
        assert!(socket.exists());
    }

    #[test]
    fn who_has_nothing_more_to_ask_waits_and_who_has_gone_does_not() {
        let (here, there) = UnixStream::pair().unwrap();
        assert!(Asker(&here).check().is_ok());
        there.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(Asker(&here).check().is_ok());
        drop(there);
        assert!(Asker(&here).check().is_err());
    }
}
