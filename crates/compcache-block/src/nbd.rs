//! NBD: a disk for any program and machine that speaks the protocol, without a privilege or a kernel module of ours.
//!
//! ```text
//!    client ---- socket ----> a thread: BufReader -> Request -> Lane -> Replies
//!                                          | MustWait
//!                                          v
//!                             a second thread, when first needed: queue -> Lane -> Replies
//! ```
//!
//! Blocking threads, one a connection: `handshake` agrees on an export, `session` serves requests, `waiting` those
//! that need a slow medium. All memory of a connection is taken when it begins serving. A client that wants more in
//! parallel opens more connections, and may: what one has had answered, all see.
//!
//! | the client                              | what it gets                                                      |
//! |-----------------------------------------|-------------------------------------------------------------------|
//! | asks for an option we do not know       | `NBD_REP_ERR_UNSUP`, and may go on                                |
//! | asks for TLS                            | the same: who needs it puts a tunnel in front                     |
//! | reads more than 32 MiB                  | EINVAL                                                            |
//! | writes more than 32 MiB                 | the connection closed: there is no telling where it goes on       |
//! | sends a command or flag we do not know  | EINVAL                                                            |
//! | reaches beyond the end                  | ENOSPC when it writes, else EINVAL                                |
//! | sends no request where one should be    | the connection closed                                             |
//! | says nothing for 30 s before it is served | the connection closed                                           |
//! | is served, over TCP, and its machine is gone | the connection closed after a quarter of an hour             |
//!
//! Of what clients say, only lengths that were checked are believed; a connection takes memory for the largest payload yet, and ends where there is none. No more than
//! [`CONNECTIONS_MAX`] are served at a time, of which each may come to hold 32 MiB, and three times as much more if its largest requests
//! have waited.
//!
//! # Source
//! `doc/proto.md` of the NetworkBlockDevice/nbd project: fixed newstyle, structured replies, `base:allocation`. Extended
//! headers are refused.

mod buffer;
mod handshake;
mod reply;
mod session;
mod socket;
mod waiting;
mod wire;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

pub use socket::{Listen, is_answered, listen_alone};

use crate::device::BlockDevice;
use socket::{Listener, Stream};

/// Clients that are served at a time; further ones are sent away.
pub const CONNECTIONS_MAX: usize = 128;
/// How long a client may say nothing before it is served.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(30);
/// How long requests in flight have when a server is dropped.
const GRACE_WHEN_DROPPED: Duration = Duration::from_secs(2);
/// Bytes in a name, by the protocol.
const NAME_BYTES_MAX: usize = 4096;

/// A device under a name.
pub struct Export {
    /// What clients ask for. The first export also goes by the empty name.
    pub name: String,
    /// What they get.
    pub device: Arc<dyn BlockDevice>,
    /// They may not change it: EPERM.
    pub read_only: bool,
}

/// Why a server was not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdError {
    /// There is nothing to serve.
    #[error("no export")]
    NoExport,
    /// Two exports have the same name, or one has a name longer than 4096 bytes.
    #[error("export {number} has a name that another has, or one longer than 4096 bytes")]
    BadName {
        /// Which, counted from 0.
        number: usize,
    },
    /// The place to listen at cannot be had: somebody else has it, or it may not be used. Choose another.
    #[error("cannot listen: {0}")]
    Listen(#[source] io::Error),
}

/// A running server. Dropping it stops it.
pub struct NbdServer {
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    exports: Vec<Export>,
    listener: Listener,
    connections: Mutex<Connections>,
    /// A connection ended.
    ended: Condvar,
}

#[derive(Default)]
struct Connections {
    stopping: bool,
    /// Nobody is let in as long as a [`Held`] lives.
    held: bool,
    begun: u64,
    live: HashMap<u64, Connection>,
    /// Threads that are at their end.
    ending: Vec<JoinHandle<()>>,
}

struct Connection {
    stream: Stream,
    thread: JoinHandle<()>,
}

impl NbdServer {
    /// Serves `exports` at `listen` until it is stopped.
    ///
    /// # Errors
    /// [`NbdError`]; nothing is served and nothing is left behind.
    pub fn start(listen: &Listen, exports: Vec<Export>) -> Result<NbdServer, NbdError> {
        if exports.is_empty() {
            return Err(NbdError::NoExport);
        }
        for (number, export) in exports.iter().enumerate() {
            let taken = exports[..number].iter().any(|other| other.name == export.name);
            if taken || export.name.len() > NAME_BYTES_MAX {
                return Err(NbdError::BadName { number });
            }
        }
        let listener = Listener::bind(listen).map_err(NbdError::Listen)?;
        let shared = Arc::new(Shared { exports, listener, connections: Mutex::default(), ended: Condvar::new() });
        let accepting = shared.clone();
        let thread = thread::Builder::new().name("nbd-accept".into());
        let accepting = thread.spawn(move || accept_all(&accepting)).map_err(NbdError::Listen)?;
        Ok(NbdServer { shared, accepting: Some(accepting) })
    }

    /// Where TCP clients connect to, the port chosen if it was 0; `None` for a Unix socket.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.shared.listener.tcp_address()
    }

    /// How many clients are connected now.
    pub fn connections(&self) -> usize {
        self.shared.lock().live.len()
    }

    /// Where those come from that are connected over TCP.
    pub fn tcp_peers(&self) -> Vec<SocketAddr> {
        self.shared.lock().live.values().filter_map(|connection| connection.stream.tcp_peer()).collect()
    }

    /// Lets nobody in as long as the answer lives, if nobody is connected and nobody else holds it.
    pub fn hold(&self) -> Option<Held> {
        let mut connections = self.shared.lock();
        let is_free = connections.live.is_empty() && !connections.held;
        connections.held |= is_free;
        is_free.then(|| Held(self.shared.clone()))
    }

    /// As [`NbdServer::stop`], unless somebody is connected, as nobody is while it is held: then it goes on, and nobody was cut off.
    ///
    /// # Errors
    /// The server is given back.
    pub fn stop_unused(mut self) -> Result<(), NbdServer> {
        let mut connections = self.shared.lock();
        connections.stopping |= connections.live.is_empty();
        let stops = connections.stopping;
        drop(connections);
        if !stops {
            return Err(self);
        }
        self.end(Duration::ZERO);
        Ok(())
    }

    /// Lets nobody in any more, answers what is in flight, for `grace` at most, and ends all connections and threads. A
    /// request that a device is working on ends when the device says; its answer may not reach the client.
    pub fn stop(mut self, grace: Duration) {
        self.end(grace);
    }

    fn end(&mut self, grace: Duration) {
        let Some(accepting) = self.accepting.take() else { return };
        let shared = &self.shared;
        let mut connections = shared.lock();
        connections.stopping = true;
        for connection in connections.live.values() {
            connection.stream.close_reading();
        }
        drop(connections);
        shared.listener.close();
        // It does not panic; if it did, there would be nobody left to tell. The same holds for the others below.
        let _ = accepting.join();
        let alive = |connections: &mut Connections| !connections.live.is_empty();
        let waited = shared.ended.wait_timeout_while(shared.lock(), grace, alive);
        let (connections, _) = waited.unwrap_or_else(PoisonError::into_inner);
        for connection in connections.live.values() {
            connection.stream.close();
        }
        let mut connections = shared.ended.wait_while(connections, alive).unwrap_or_else(PoisonError::into_inner);
        let ending = std::mem::take(&mut connections.ending);
        drop(connections);
        for thread in ending {
            let _ = thread.join();
        }
    }
}

/// A server that lets nobody in: who connects is hung up on. It may be stopped meanwhile, but its socket is there as long as this is.
#[must_use = "it ends when it is dropped"]
pub struct Held(Arc<Shared>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.lock().held = false;
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.end(GRACE_WHEN_DROPPED);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a client a thread, unless there are too many, or an end is near.
    fn begin(self: &Arc<Self>, stream: Stream) -> io::Result<()> {
        let ours = stream.try_clone()?;
        // Held until the connection is in the list, so that it cannot end before.
        let mut connections = self.lock();
        for thread in std::mem::take(&mut connections.ending) {
            let _ = thread.join();
        }
        if connections.stopping || connections.held || connections.live.len() == CONNECTIONS_MAX {
            return Ok(());
        }
        connections.begun += 1;
        let number = connections.begun;
        let shared = self.clone();
        let thread = thread::Builder::new().name("nbd".into()).spawn(move || {
            // However it went: there is a client to hang up on, and nobody to tell.
            let _ = session::serve(stream, &shared.exports);
            let mut connections = shared.lock();
            if let Some(connection) = connections.live.remove(&number) {
                connection.stream.close();
                connections.ending.push(connection.thread);
            }
            drop(connections);
            shared.ended.notify_all();
        })?;
        connections.live.insert(number, Connection { stream: ours, thread });
        Ok(())
    }
}

fn accept_all(shared: &Arc<Shared>) {
    loop {
        let accepted = shared.listener.accept().and_then(|stream| shared.begin(stream));
        if shared.lock().stopping {
            return;
        }
        if accepted.is_err() {
            // Out of descriptors or threads, most likely: some are given back as others end.
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The export called `name`; the first one has no name too.
fn find_export<'e>(exports: &'e [Export], name: &[u8]) -> Option<&'e Export> {
    let named = exports.iter().find(|export| export.name.as_bytes() == name);
    named.or_else(|| exports.first().filter(|_| name.is_empty()))
}
