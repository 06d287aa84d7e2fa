//! How one talks to a device: the ways the suite runs over. A further transport is a further implementer.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use compcache_block::nbd::{Export, Listen, NbdServer};
use compcache_block::{BlockDevice, Extent, Lane, Manner, Outcome, Request, Zeroes};
use compcache_testkit::features::Feature;
use tempfile::TempDir;

use crate::client::{self, Client};

/// What one thread says to a device. Errors are errnos.
pub trait Talk {
    fn size_bytes(&mut self) -> u64;
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), i32>;
    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), i32>;
    fn flush(&mut self) -> Result<(), i32>;
    fn discard(&mut self, offset: u64, length: u64) -> Result<(), i32>;
    fn write_zeroes(&mut self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), i32>;
    /// Lengths of the stretches from `offset` on, and whether each is a hole; `None` where this way cannot tell.
    fn extents(&mut self, offset: u64, length: u64) -> Option<Result<Vec<(u64, bool)>, i32>>;
}

/// A request that a client makes, as far as errors differ by it.
#[derive(Clone, Copy)]
pub struct Asked {
    pub request: Request,
    pub whole_blocks: bool,
}

/// A device that is being served.
pub trait Front: Send + Sync + Sized {
    /// What serving one takes.
    const NEEDS: &'static [Feature] = &[];
    /// What it takes to change the size of one that is served.
    const RESIZES: &'static [Feature] = &[];
    /// Whether the device is asked once for each request of a client.
    const ONE_FOR_ONE: bool = true;
    /// Errors of a device that this way has an answer for.
    const ERRNOS: &'static [i32] = &[1, 5, 12, 22, 28, 75, 95, 108];
    fn serve(device: Arc<dyn BlockDevice>) -> Self;
    fn talk(&self) -> Box<dyn Talk>;
    /// Tells whoever does not see it that the device has another size.
    fn resized(&self) {}
    /// What a client is told when the device fails with `errno`.
    fn told(_asked: Asked, errno: i32) -> Result<(), i32> {
        Err(errno)
    }
}

/// Lanes, without a transport.
pub struct Direct(Arc<dyn BlockDevice>);

struct DirectTalk {
    device: Arc<dyn BlockDevice>,
    lane: Box<dyn Lane>,
}

impl Front for Direct {
    fn serve(device: Arc<dyn BlockDevice>) -> Direct {
        Direct(device)
    }

    fn talk(&self) -> Box<dyn Talk> {
        Box::new(DirectTalk { device: self.0.clone(), lane: self.0.clone().lane().unwrap() })
    }
}

impl DirectTalk {
    /// As a transport does: at once if possible, else waiting.
    fn ask<T>(
        &mut self,
        fua: bool,
        mut request: impl FnMut(&mut dyn Lane, Manner) -> Result<Outcome<T>, compcache_block::DeviceError>,
    ) -> Result<T, i32> {
        for may_wait in [false, true] {
            if let Outcome::Done(done) =
                request(&mut *self.lane, Manner { may_wait, fua }).map_err(|error| error.errno())?
            {
                return Ok(done);
            }
        }
        panic!("a device that has to wait where it may")
    }
}

impl Talk for DirectTalk {
    fn size_bytes(&mut self) -> u64 {
        self.device.size_bytes()
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), i32> {
        self.ask(false, |lane, manner| lane.read(offset, into, manner))
    }

    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), i32> {
        self.ask(fua, |lane, manner| lane.write(offset, from, manner))
    }

    fn flush(&mut self) -> Result<(), i32> {
        self.ask(false, |lane, manner| lane.flush(manner))
    }

    fn discard(&mut self, offset: u64, length: u64) -> Result<(), i32> {
        self.ask(false, |lane, manner| lane.discard(offset, length, manner))
    }

    fn write_zeroes(&mut self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), i32> {
        self.ask(false, |lane, manner| lane.write_zeroes(offset, length, zeroes, manner))
    }

    fn extents(&mut self, mut offset: u64, mut length: u64) -> Option<Result<Vec<(u64, bool)>, i32>> {
        let mut extents = Vec::new();
        while length > 0 {
            match self.ask(false, |lane, manner| lane.extent(offset, length, manner)) {
                Ok(Extent { length_bytes, is_hole }) => {
                    extents.push((length_bytes, is_hole));
                    offset += length_bytes;
                    length -= length_bytes;
                }
                Err(errno) => return Some(Err(errno)),
            }
        }
        Some(Ok(extents))
    }
}

/// NBD over a Unix socket; with structured replies or without.
pub struct Nbd<const STRUCTURED: bool> {
    pub server: NbdServer,
    pub device: Arc<dyn BlockDevice>,
    pub socket: PathBuf,
    _dir: TempDir,
}

struct NbdTalk {
    client: Client,
    device: Arc<dyn BlockDevice>,
    structured: bool,
}

impl<const STRUCTURED: bool> Front for Nbd<STRUCTURED> {
    /// A discard is a hint, which nobody has to be able to take.
    fn told(asked: Asked, errno: i32) -> Result<(), i32> {
        if asked.request == Request::Discard && errno == 95 { Ok(()) } else { Err(errno) }
    }

    fn serve(device: Arc<dyn BlockDevice>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("nbd");
        let export = Export { name: "disk".into(), device: device.clone(), read_only: false };
        let server = NbdServer::start(&Listen::Unix(socket.clone()), vec![export]).unwrap();
        Nbd { server, device, socket, _dir: dir }
    }

    fn talk(&self) -> Box<dyn Talk> {
        let client = Client::connect(&self.socket, "disk", STRUCTURED).unwrap();
        client.stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Box::new(NbdTalk { client, device: self.device.clone(), structured: STRUCTURED })
    }
}

impl NbdTalk {
    fn ask(&mut self, flags: u16, command: u16, offset: u64, length: u64, data: &[u8]) -> Result<Vec<u8>, i32> {
        let length = u32::try_from(length).expect("a length the protocol can say");
        let reply = self.client.ask(flags, command, offset, length, data).unwrap();
        if reply.error == 0 { Ok(reply.data) } else { Err(reply.error as i32) }
    }
}

impl Talk for NbdTalk {
    /// The protocol tells the size once; what the server holds requests against is the device's.
    fn size_bytes(&mut self) -> u64 {
        self.device.size_bytes()
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), i32> {
        let data = self.ask(0, client::READ, offset, into.len() as u64, &[])?;
        into.copy_from_slice(&data);
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), i32> {
        let flags = if fua { client::FUA } else { 0 };
        self.ask(flags, client::WRITE, offset, from.len() as u64, from).map(drop)
    }

    fn flush(&mut self) -> Result<(), i32> {
        self.ask(0, client::FLUSH, 0, 0, &[]).map(drop)
    }

    fn discard(&mut self, offset: u64, length: u64) -> Result<(), i32> {
        self.ask(0, client::TRIM, offset, length, &[]).map(drop)
    }

    fn write_zeroes(&mut self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), i32> {
        let quick = if self.client.flags & client::SEND_FAST_ZERO == 0 { 0 } else { client::FAST_ZERO };
        let flags = if zeroes == Zeroes::AreData { client::NO_HOLE } else { quick };
        self.ask(flags, client::WRITE_ZEROES, offset, length, &[]).map(drop)
    }

    fn extents(&mut self, offset: u64, length: u64) -> Option<Result<Vec<(u64, bool)>, i32>> {
        if !self.structured {
            return None;
        }
        let data = match self.ask(0, client::BLOCK_STATUS, offset, length, &[]) {
            Ok(data) => data,
            Err(errno) => return Some(Err(errno)),
        };
        let be = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        Some(Ok(data.chunks(8).map(|extent| (u64::from(be(&extent[..4])), be(&extent[4..]) == 3)).collect()))
    }
}
