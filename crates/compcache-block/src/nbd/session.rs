//! The second phase of a connection: requests and replies.
//!
//! The connection's thread reads a request, serves it from its own lane and answers it. One that must wait goes to
//! [`Waiting`], and the thread reads the next, so replies may come in another order than requests.

use std::io::{self, BufReader, Read};
use std::sync::Arc;

use super::buffer::Buffer;
use super::handshake::{self, Agreed};
use super::reply::{HEADROOM, Replies};
use super::socket::Stream;
use super::waiting::Waiting;
use super::wire::{self, PAYLOAD_BYTES_MAX, REQUEST_BYTES, Request, command, command_flag, error};
use super::{Export, HANDSHAKE_PATIENCE};
use crate::device::{self, BlockDevice, Extent, Lane, Manner, Outcome, Zeroes, check_range};
use crate::error::DeviceError;

/// Extents in one answer: as much as fits into a page.
const EXTENTS_MAX: usize = 512;
const EXTENT_BYTES: usize = 8;

/// Serves one client until it leaves, talks nonsense, or is cut off.
pub(super) fn serve(stream: Stream, exports: &[Export]) -> io::Result<()> {
    let out = stream.try_clone()?;
    let mut input = BufReader::with_capacity(64 << 10, stream);
    input.get_ref().set_patience(Some(HANDSHAKE_PATIENCE))?;
    let Some(agreed) = handshake::haggle(&mut input, &out, exports)? else { return Ok(()) };
    input.get_ref().set_patience(None)?;
    let replies = Arc::new(Replies::new(out, agreed.structured));
    let server = Server::new(&agreed, replies);
    let Ok(mut lane) = server.device.clone().lane() else { return Ok(()) };
    let mut waiting = Waiting::new(server.clone());
    let mut buffer = Buffer::default();
    loop {
        let mut header = [0; REQUEST_BYTES];
        input.read_exact(&mut header)?;
        let Some(request) = Request::parse(&header) else { return Ok(()) };
        if request.command == command::DISC {
            return Ok(());
        }
        // What cannot be taken in cannot be told from the next request either.
        if request.command == command::WRITE && request.length_bytes > PAYLOAD_BYTES_MAX {
            return Ok(());
        }
        let room = buffer.fit(room_for(&request))?;
        if request.command == command::WRITE {
            input.read_exact(&mut room[HEADROOM..][..request.length_bytes as usize])?;
        }
        if server.serve(&mut *lane, &request, room, false)? == Outcome::MustWait {
            waiting.push(request, room)?;
        }
    }
}

/// What a request needs of a buffer, with the headroom.
pub(super) fn room_for(request: &Request) -> usize {
    HEADROOM
        + match request.command {
            command::READ | command::WRITE => request.length_bytes.min(PAYLOAD_BYTES_MAX) as usize,
            command::BLOCK_STATUS => EXTENTS_MAX * EXTENT_BYTES,
            _ => 0,
        }
}

/// What a connection's threads know.
#[derive(Clone)]
pub(super) struct Server {
    pub device: Arc<dyn BlockDevice>,
    pub replies: Arc<Replies>,
    read_only: bool,
    block_status: bool,
}

impl Server {
    fn new(agreed: &Agreed<'_>, replies: Arc<Replies>) -> Server {
        let Agreed { export, block_status, .. } = *agreed;
        Server { device: export.device.clone(), replies, read_only: export.read_only, block_status }
    }

    /// Serves a request and answers it, unless it must wait. `buffer` has room for what is read, or holds what is written,
    /// behind its headroom.
    pub fn serve(
        &self,
        lane: &mut dyn Lane,
        request: &Request,
        buffer: &mut [u8],
        may_wait: bool,
    ) -> io::Result<Outcome> {
        if let Err(refused) = self.check(request) {
            self.replies.failed(request, refused)?;
            return Ok(Outcome::Done(()));
        }
        let manner = Manner { may_wait, fua: request.flags & command_flag::FUA != 0 };
        let (offset, length) = (request.offset_bytes, u64::from(request.length_bytes));
        let end = HEADROOM + request.length_bytes as usize;
        let outcome = match request.command {
            command::READ => lane.read(offset, &mut buffer[HEADROOM..end], manner),
            command::WRITE => lane.write(offset, &buffer[HEADROOM..end], manner),
            command::FLUSH => lane.flush(manner),
            command::TRIM => match lane.discard(offset, length, manner) {
                // Nothing was done, which is what a hint may come to. Linux's client makes of this error, as of any, EIO.
                Err(error) if error.errno() == error::NOTSUP as i32 => Ok(Outcome::Done(())),
                discarded => discarded,
            },
            command::WRITE_ZEROES => {
                let keep = request.flags & command_flag::NO_HOLE != 0;
                lane.write_zeroes(offset, length, if keep { Zeroes::AreData } else { Zeroes::MayBeHoles }, manner)
            }
            // Everything is as near as it gets.
            command::CACHE => {
                check_range(device::Request::Read, offset, length, self.device.size_bytes()).map(|()| Outcome::Done(()))
            }
            _ => return self.block_status(lane, request, buffer, manner),
        };
        match outcome {
            Ok(Outcome::MustWait) => return Ok(Outcome::MustWait),
            Ok(Outcome::Done(())) if request.command == command::READ => {
                self.replies.data(request, &mut buffer[..end])?;
            }
            Ok(Outcome::Done(())) => self.replies.done(request)?,
            Err(error) => self.replies.failed(request, wire::error_of(error.errno()))?,
        }
        Ok(Outcome::Done(()))
    }

    /// Refuses what this connection may not ask for, whatever the device would say.
    fn check(&self, request: &Request) -> Result<(), u32> {
        use command_flag::*;
        let allowed = match request.command {
            command::READ if self.replies.structured => DF,
            command::READ | command::WRITE | command::FLUSH | command::TRIM | command::CACHE => 0,
            // Who is not told of quick zeroes may not ask for them.
            command::WRITE_ZEROES if self.device.zeroes_quickly() => NO_HOLE | FAST_ZERO,
            command::WRITE_ZEROES => NO_HOLE,
            command::BLOCK_STATUS if self.block_status => REQ_ONE,
            _ => return Err(error::INVAL),
        };
        // Forced unit access is allowed with everything.
        if request.flags & !(allowed | FUA) != 0 {
            return Err(error::INVAL);
        }
        let changes = matches!(request.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        if self.read_only && changes {
            return Err(error::PERM);
        }
        match request.command {
            command::READ if request.length_bytes > PAYLOAD_BYTES_MAX => Err(error::INVAL),
            command::BLOCK_STATUS if request.length_bytes == 0 => Err(error::INVAL),
            command::FLUSH if request.length_bytes != 0 || request.offset_bytes != 0 => Err(error::INVAL),
            _ => Ok(()),
        }
    }

    fn block_status(
        &self,
        lane: &mut dyn Lane,
        request: &Request,
        buffer: &mut [u8],
        manner: Manner,
    ) -> io::Result<Outcome> {
        match list_extents(lane, request, &mut buffer[HEADROOM..], manner) {
            Ok(Outcome::MustWait) => return Ok(Outcome::MustWait),
            Ok(Outcome::Done(bytes)) => self.replies.extents(request, &mut buffer[..HEADROOM + bytes])?,
            Err(error) => self.replies.failed(request, wire::error_of(error.errno()))?,
        }
        Ok(Outcome::Done(()))
    }
}

/// Writes extents as the protocol wants them; neighbours of one kind become one. Returns how many bytes they take.
fn list_extents(
    lane: &mut dyn Lane,
    request: &Request,
    into: &mut [u8],
    manner: Manner,
) -> Result<Outcome<usize>, DeviceError> {
    let most = if request.flags & command_flag::REQ_ONE != 0 { 1 } else { EXTENTS_MAX };
    let (mut offset, mut left) = (request.offset_bytes, u64::from(request.length_bytes));
    let (mut count, mut last) = (0, Extent { length_bytes: 0, is_hole: false });
    let (slots, _) = into.as_chunks_mut::<EXTENT_BYTES>();
    loop {
        let extent = match lane.extent(offset, left, manner)? {
            Outcome::Done(extent) => extent,
            Outcome::MustWait => return Ok(Outcome::MustWait),
        };
        if count > 0 && extent.is_hole == last.is_hole {
            last.length_bytes += extent.length_bytes;
        } else if count == most {
            break;
        } else {
            count += 1;
            last = extent;
        }
        let state = if last.is_hole { wire::STATE_HOLE_AND_ZERO } else { 0 };
        // No longer than the request, whose length has 32 bits.
        slots[count - 1][..4].copy_from_slice(&(last.length_bytes as u32).to_be_bytes());
        slots[count - 1][4..].copy_from_slice(&state.to_be_bytes());
        offset += extent.length_bytes;
        left -= extent.length_bytes;
        if left == 0 || extent.length_bytes == 0 {
            break;
        }
    }
    Ok(Outcome::Done(count * EXTENT_BYTES))
}
