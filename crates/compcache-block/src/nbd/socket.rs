//! Where clients come in: a Unix socket, or TCP.

use std::fs;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with, sockopt,
};

/// A TCP client that says nothing for so long is asked whether it is there, again and again; machines lose power, and cables their
/// plugs, without a word.
const ASKED_AFTER: Duration = Duration::from_secs(120);
const ASKED_EVERY: Duration = Duration::from_secs(60);
/// After so many questions, a quarter of an hour after its last word, it is gone: the kernel waits as long for the acknowledgement of
/// what was sent. Not sooner: who swaps over the network may be cut off for a while, and would lose its pages.
const ASKED_TIMES: u32 = 13;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A Unix socket that is made there, for its owner alone (mode 0600), and removed when the server ends.
    Unix(PathBuf),
    /// TCP for programs on this machine: 127.0.0.1. Port 0 is one that is free.
    Loopback(u16),
    /// TCP for whoever reaches this address. The protocol knows no passwords: what is served is everybody's.
    Anyone(SocketAddr),
}

/// Listens at a Unix socket that is made there, for its owner alone from the first instant on: it is made with the mode that the unnamed one has. By its name
/// it could be another file by the time that is changed.
///
/// # Errors
/// There is a file of this name; or the directory cannot be written to.
pub fn listen_alone(path: &Path) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    // As many as the kernel lets wait.
    listen(&socket, -1)?;
    Ok(socket.into())
}

/// Whether somebody answers at a Unix socket, or would: nobody is waited for, who listens and lets nobody in least of all.
///
/// # Errors
/// It cannot be told.
pub fn is_answered(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        // As many as he lets wait are waiting.
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

pub(super) enum Listener {
    Unix { listener: UnixListener, path: PathBuf, inode: (u64, u64) },
    Tcp(TcpListener),
}

impl Listener {
    pub fn bind(listen: &Listen) -> io::Result<Listener> {
        match listen {
            Listen::Unix(path) => Listener::bind_unix(path),
            Listen::Loopback(port) => Ok(Listener::Tcp(TcpListener::bind((Ipv4Addr::LOCALHOST, *port))?)),
            Listen::Anyone(address) => Ok(Listener::Tcp(TcpListener::bind(address)?)),
        }
    }

    /// A socket that nobody answers at was left behind by a server that died, and is replaced. One that somebody answers
    /// at, and a file that is no socket, are not.
    fn bind_unix(path: &Path) -> io::Result<Listener> {
        if let Ok(there) = fs::symlink_metadata(path) {
            if !there.file_type().is_socket() {
                return Err(io::Error::new(ErrorKind::AlreadyExists, "there is a file that is no socket"));
            }
            if is_answered(path)? {
                return Err(io::Error::new(ErrorKind::AddrInUse, "somebody is serving there"));
            }
            fs::remove_file(path)?;
        }
        let listener = listen_alone(path)?;
        let made = fs::symlink_metadata(path)?;
        Ok(Listener::Unix { listener, path: path.to_owned(), inode: (made.dev(), made.ino()) })
    }

    pub fn accept(&self) -> io::Result<Stream> {
        match self {
            Listener::Unix { listener, .. } => Ok(Stream::Unix(listener.accept()?.0)),
            Listener::Tcp(listener) => {
                let stream = listener.accept()?.0;
                stream.set_nodelay(true)?;
                sockopt::set_tcp_keepidle(&stream, ASKED_AFTER)?;
                sockopt::set_tcp_keepintvl(&stream, ASKED_EVERY)?;
                sockopt::set_tcp_keepcnt(&stream, ASKED_TIMES)?;
                sockopt::set_socket_keepalive(&stream, true)?;
                Ok(Stream::Tcp(stream))
            }
        }
    }

    /// The address a TCP client connects to.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match self {
            Listener::Unix { .. } => None,
            Listener::Tcp(listener) => listener.local_addr().ok(),
        }
    }

    /// Nobody is let in any more, and who waits in [`Listener::accept`] is sent back with an error.
    pub fn close(&self) {
        let fd = match self {
            Listener::Unix { listener, .. } => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        };
        // Fails where it is closed already.
        let _ = rustix::net::shutdown(fd, Shutdown::Both);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix { path, inode, .. } = self
            && fs::symlink_metadata(&*path).is_ok_and(|there| (there.dev(), there.ino()) == *inode)
        {
            let _ = fs::remove_file(path);
        }
    }
}

/// A connection.
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    pub fn try_clone(&self) -> io::Result<Stream> {
        Ok(match self {
            Stream::Unix(stream) => Stream::Unix(stream.try_clone()?),
            Stream::Tcp(stream) => Stream::Tcp(stream.try_clone()?),
        })
    }

    /// Where it comes from, if it is TCP.
    pub fn tcp_peer(&self) -> Option<SocketAddr> {
        match self {
            Stream::Unix(_) => None,
            Stream::Tcp(stream) => stream.peer_addr().ok(),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }

    /// Nothing more is read; what is being answered still is.
    pub fn close_reading(&self) {
        // Fails where the client is gone.
        let _ = rustix::net::shutdown(self.fd(), Shutdown::Read);
    }

    /// Nothing more is read or written.
    pub fn close(&self) {
        let _ = rustix::net::shutdown(self.fd(), Shutdown::Both);
    }

    pub fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Unix(stream) => stream.set_read_timeout(patience),
            Stream::Tcp(stream) => stream.set_read_timeout(patience),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(into),
            Stream::Tcp(stream) => stream.read(into),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    /// A client that is gone is an error, and no signal.
    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
        Ok(sendmsg(self.fd(), from, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_its_owners_alone_and_takes_nobodys_place() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = listen_alone(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(listener.local_addr().unwrap().as_pathname(), Some(&*path));
        let _client = UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
        assert_eq!(listen_alone(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path().join("elsewhere"), &link).unwrap();
        assert_eq!(listen_alone(&link).unwrap_err().kind(), ErrorKind::AddrInUse);
    }

    #[test]
    fn who_listens_and_lets_nobody_in_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let lets_nobody_in = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        bind(&lets_nobody_in, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert!(!is_answered(&path).unwrap(), "nobody listens yet");
        listen(&lets_nobody_in, 0).unwrap();
        let _waits = UnixStream::connect(&path).unwrap();
        let refused = Listener::bind(&Listen::Unix(path.clone())).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse);
    }
}
