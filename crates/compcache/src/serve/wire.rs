//! What serves a disk to its users, whichever transport it is.

use std::net::Ipv4Addr;
use std::num::{NonZeroU16, NonZeroUsize};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use compcache_block::BlockDevice;
use compcache_block::fuse_loop::{FuseLoop, FuseLoopError, FuseLoopOptions};
use compcache_block::nbd::{Export, Held, Listen, NbdServer};
use compcache_block::ublk::{self, Claim, Ublk, UblkError, UblkOptions};

use crate::control::At;
use crate::run::say;

/// How long requests in flight have when a disk is ended.
const GRACE: Duration = Duration::from_secs(5);
/// How long a client that has gone may count as connected.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Threads that wait for an origin.
const WAITING_THREADS: NonZeroUsize = NonZeroUsize::new(8).expect("8 is not 0");

/// Of swap no more than 2 MiB are on their way at a time in each queue (twice that under an I/O scheduler); then who reclaims waits for a tag. The kernel ends a program if all that
/// its control group has is on its way to swap, since it does not wait for that (cgroup v2).
const SWAP_DEPTH: NonZeroU16 = NonZeroU16::new(16).expect("16 is not 0");
const SWAP_REQUEST_BYTES: usize = 128 << 10;

/// A disk's transport, at work.
pub enum Wire {
    /// NBD, and the URI where clients find it.
    Nbd { server: NbdServer, uri: String },
    /// A loop device over FUSE.
    Loop(FuseLoop),
    /// A device of ublk's.
    Ublk(Ublk),
}

/// That nobody uses a disk, and nobody begins to.
#[must_use = "it ends when it is dropped"]
pub enum Claimed {
    Nbd(#[expect(dead_code, reason = "it is let go with this")] Held),
    Device(Claim),
}

/// A transport that goes on, and why.
pub struct NotEnded {
    pub wire: Wire,
    pub why: anyhow::Error,
}

impl Wire {
    /// Serves `disk`, which may be one for swap. `directory` is for sockets that nobody named.
    pub fn start(
        name: &str,
        disk: Arc<dyn BlockDevice>,
        at: &At,
        for_swap: bool,
        directory: &Path,
    ) -> anyhow::Result<Self> {
        let beside_us = || directory.join(format!("{name}.nbd"));
        let listen = match at {
            At::Ublk => return Ok(Wire::Ublk(Ublk::serve(disk.clone(), &ublk_options(&disk, for_swap))?)),
            At::Loop => return Ok(Wire::Loop(FuseLoop::serve(disk.clone(), &loop_options(&disk, for_swap))?)),
            At::BlockDevice => return Ok(kept_device(name, &disk, for_swap)??),
            At::Auto => match block_device(name, &disk, for_swap)? {
                Ok(wire) => return Ok(wire),
                Err(error) => {
                    say(&format!("compcache: disk {name} is no block device but an NBD export: {error}\n"));
                    Listen::Unix(beside_us())
                }
            },
            At::NbdUnix(path) => Listen::Unix(path.clone().unwrap_or_else(beside_us)),
            At::NbdTcp(address) if address.ip() == Ipv4Addr::LOCALHOST => Listen::Loopback(address.port()),
            At::NbdTcp(address) => Listen::Anyone(*address),
        };
        let export = Export { name: name.to_owned(), device: disk, read_only: false };
        let server = NbdServer::start(&listen, vec![export]).with_context(|| match &listen {
            Listen::Unix(path) => format!("at {}", path.display()),
            Listen::Loopback(port) => format!("at port {port}"),
            Listen::Anyone(address) => format!("at {address}"),
        })?;
        let uri = match (&listen, server.tcp_address()) {
            (Listen::Unix(path), _) => format!("nbd+unix:///{name}?socket={}", escaped(path)),
            (_, Some(address)) => format!("nbd://{address}/{name}"),
            (_, None) => unreachable!("TCP has an address"),
        };
        Ok(Wire::Nbd { server, uri })
    }

    /// Where its users find it.
    pub fn at(&self) -> String {
        match self {
            Wire::Nbd { uri, .. } => uri.clone(),
            Wire::Loop(served) => served.path().display().to_string(),
            Wire::Ublk(served) => served.path().display().to_string(),
        }
    }

    /// Why its users could not be told of another size now, if they could not.
    pub fn fixed_size(&self) -> Option<anyhow::Error> {
        match self {
            Wire::Ublk(served) if !served.can_be_resized() => Some(anyhow!(
                "the size of {} is fixed: the kernel can change that of a ublk device since Linux 6.16; a disk made with \
                 --transport loop can be resized here",
                served.path().display()
            )),
            _ => None,
        }
    }

    /// The disk has another size now.
    pub fn resized(&self) -> anyhow::Result<()> {
        match self {
            // Clients hear of it when they connect again: the protocol has no message for it.
            Wire::Nbd { .. } => Ok(()),
            Wire::Loop(served) => Ok(served.resized()?),
            Wire::Ublk(served) => Ok(served.resized()?),
        }
    }

    /// Claims it, so that nobody begins to use it as long as the answer lives.
    ///
    /// # Errors
    /// Somebody uses it; who.
    pub fn claim(&self) -> anyhow::Result<Claimed> {
        match self {
            Wire::Nbd { server, .. } => {
                // A client that has ended just now may take a moment to be noticed.
                let until = Instant::now() + LAST_WORDS;
                loop {
                    match server.hold() {
                        Some(held) => return Ok(Claimed::Nbd(held)),
                        None if Instant::now() > until => return Err(connected(server)),
                        None => thread::sleep(Duration::from_millis(5)),
                    }
                }
            }
            Wire::Loop(served) => Ok(Claimed::Device(served.claim()?)),
            Wire::Ublk(served) => Ok(Claimed::Device(served.claim()?)),
        }
    }

    /// Ends it, with what is in flight answered, however long that takes; NBD clients are cut off.
    ///
    /// # Errors
    /// The device is used; it goes on as before.
    pub fn end_by_force(self) -> Result<(), Box<NotEnded>> {
        match self {
            Wire::Nbd { server, .. } => {
                server.stop(GRACE);
                Ok(())
            }
            wire => match wire.claim() {
                Ok(claimed) => wire.end_claimed(claimed),
                Err(why) => Err(Box::new(NotEnded { wire, why })),
            },
        }
    }

    /// Ends it under a claim that it has given, so that nobody has begun to use it since.
    ///
    /// # Errors
    /// The system refuses, or somebody has opened the device without a claim to it; it goes on as before. The claim is gone.
    pub fn end_claimed(self, claimed: Claimed) -> Result<(), Box<NotEnded>> {
        match (self, claimed) {
            (Wire::Nbd { server, uri }, claimed) => {
                let ended = server.stop_unused().map_err(|server| {
                    let why = connected(&server);
                    Box::new(NotEnded { wire: Wire::Nbd { server, uri }, why })
                });
                drop(claimed);
                ended
            }
            (Wire::Loop(served), Claimed::Device(claim)) => served
                .remove_claimed(claim)
                .map_err(|not| Box::new(NotEnded { wire: Wire::Loop(not.disk), why: not.error.into() })),
            (Wire::Ublk(served), Claimed::Device(claim)) => served
                .remove_claimed(claim)
                .map_err(|not| Box::new(NotEnded { wire: Wire::Ublk(not.disk), why: not.error.into() })),
            (Wire::Loop(_) | Wire::Ublk(_), Claimed::Nbd(_)) => unreachable!("it has given a claim to its device"),
        }
    }
}

/// The best block device that can be had here: ublk's, else a loop device; or why there is none.
///
/// # Errors
/// The disk cannot be served in any way.
fn block_device(
    name: &str,
    disk: &Arc<dyn BlockDevice>,
    for_swap: bool,
) -> anyhow::Result<Result<Wire, FuseLoopError>> {
    match Ublk::serve(disk.clone(), &ublk_options(disk, for_swap)) {
        Ok(served) => return Ok(Ok(Wire::Ublk(served))),
        Err(error @ UblkError::Device(_)) => return Err(error.into()),
        // As on most machines, and nothing is amiss.
        Err(UblkError::NotPrivileged | UblkError::NodeMissing { .. } | UblkError::TooOld { .. }) => {}
        Err(error) => say(&format!("compcache: disk {name} is not served by ublk: {error}\n")),
    }
    loop_device(disk, for_swap)
}

/// The same, of those that stay when we are killed, failing all that is asked: else swap on it could not be taken off.
fn kept_device(name: &str, disk: &Arc<dyn BlockDevice>, for_swap: bool) -> anyhow::Result<Result<Wire, FuseLoopError>> {
    let ublk_stays = ublk::probe().is_ok_and(|abilities| abilities.keep);
    if ublk_stays { block_device(name, disk, for_swap) } else { loop_device(disk, for_swap) }
}

fn loop_device(disk: &Arc<dyn BlockDevice>, for_swap: bool) -> anyhow::Result<Result<Wire, FuseLoopError>> {
    match FuseLoop::serve(disk.clone(), &loop_options(disk, for_swap)) {
        Err(error @ FuseLoopError::Device(_)) => Err(error.into()),
        served => Ok(served.map(Wire::Loop)),
    }
}

/// What lies on a disk or a file server is asked for by many at a time, or its queue runs empty.
fn waiting_threads(disk: &Arc<dyn BlockDevice>, usual: NonZeroUsize) -> NonZeroUsize {
    if disk.needs_flush() { WAITING_THREADS } else { usual }
}

fn ublk_options(disk: &Arc<dyn BlockDevice>, for_swap: bool) -> UblkOptions {
    let usual = UblkOptions::default();
    let waiting_threads = waiting_threads(disk, usual.waiting_threads);
    match for_swap {
        true => UblkOptions { waiting_threads, depth: SWAP_DEPTH, request_bytes: SWAP_REQUEST_BYTES, ..usual },
        false => UblkOptions { waiting_threads, ..usual },
    }
}

fn loop_options(disk: &Arc<dyn BlockDevice>, for_swap: bool) -> FuseLoopOptions {
    let usual = FuseLoopOptions::default();
    let waiting_threads = waiting_threads(disk, usual.waiting_threads);
    FuseLoopOptions { waiting_threads, all_at_once: for_swap, ..usual }
}

fn connected(server: &NbdServer) -> anyhow::Error {
    let peers = server.tcp_peers().iter().map(|peer| format!(" {peer}")).collect::<String>();
    anyhow!(
        "it is in use: NBD clients are connected ({}){}{peers}; disconnect them (swapoff first, where one swaps to it)",
        server.connections(),
        if peers.is_empty() { "" } else { " from" }
    )
}

/// A path as part of a URI.
fn escaped(path: &Path) -> String {
    path.as_os_str().as_encoded_bytes().iter().fold(String::new(), |uri, &byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' | b'~' => {
            uri + &char::from(byte).to_string()
        }
        _ => uri + &format!("%{byte:02X}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_in_a_uri_has_no_signs_that_mean_something_there() {
        assert_eq!(escaped(Path::new("/run/a-b_1/c.nbd")), "/run/a-b_1/c.nbd");
        assert_eq!(escaped(Path::new("/a b?c&d%ä")), "/a%20b%3Fc%26d%25%C3%A4");
    }
}
