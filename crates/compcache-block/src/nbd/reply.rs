//! The writing side of a connection: whole replies, one at a time, from whichever thread has one.
//!
//! A payload lies in a buffer behind [`HEADROOM`] free bytes, into which its header goes, so that each reply is one write.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use super::socket::Stream;
use super::wire::{self, Request, chunk, command};

/// Free bytes before the payload in every buffer: more than any header takes, and a cache line.
pub(super) const HEADROOM: usize = 64;

pub(super) struct Replies {
    /// Held while one reply is written.
    out: Mutex<Stream>,
    pub structured: bool,
}

fn simple_header(error: u32, cookie: u64) -> [u8; 16] {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&wire::SIMPLE_REPLY_MAGIC.to_be_bytes());
    header[4..8].copy_from_slice(&error.to_be_bytes());
    header[8..].copy_from_slice(&cookie.to_be_bytes());
    header
}

/// The header of a reply's only chunk.
fn chunk_header(kind: u16, cookie: u64, length_bytes: usize) -> [u8; 20] {
    let mut header = [0; 20];
    header[..4].copy_from_slice(&wire::STRUCTURED_REPLY_MAGIC.to_be_bytes());
    header[4..6].copy_from_slice(&chunk::DONE.to_be_bytes());
    header[6..8].copy_from_slice(&kind.to_be_bytes());
    header[8..16].copy_from_slice(&cookie.to_be_bytes());
    header[16..].copy_from_slice(&(length_bytes as u32).to_be_bytes());
    header
}

impl Replies {
    pub fn new(out: Stream, structured: bool) -> Replies {
        Replies { out: Mutex::new(out), structured }
    }

    fn send(&self, reply: &[u8]) -> io::Result<()> {
        let out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        (&*out).write_all(reply)
    }

    /// Reading and status must be answered in chunks once those are agreed on; the rest may be answered simply.
    fn in_chunks(&self, request: &Request) -> bool {
        self.structured && matches!(request.command, command::READ | command::BLOCK_STATUS)
    }

    pub fn done(&self, request: &Request) -> io::Result<()> {
        if self.in_chunks(request) {
            return self.send(&chunk_header(chunk::NONE, request.cookie, 0));
        }
        self.send(&simple_header(0, request.cookie))
    }

    pub fn failed(&self, request: &Request, error: u32) -> io::Result<()> {
        if !self.in_chunks(request) {
            return self.send(&simple_header(error, request.cookie));
        }
        let mut reply = [0; 26];
        reply[..20].copy_from_slice(&chunk_header(chunk::ERROR, request.cookie, 6));
        reply[20..24].copy_from_slice(&error.to_be_bytes());
        self.send(&reply)
    }

    /// What was read, from [`HEADROOM`] on to the end of `buffer`.
    pub fn data(&self, request: &Request, buffer: &mut [u8]) -> io::Result<()> {
        let length = buffer.len() - HEADROOM;
        if !self.structured {
            buffer[HEADROOM - 16..HEADROOM].copy_from_slice(&simple_header(0, request.cookie));
            return self.send(&buffer[HEADROOM - 16..]);
        }
        if length == 0 {
            return self.done(request);
        }
        let header = chunk_header(chunk::OFFSET_DATA, request.cookie, 8 + length);
        buffer[HEADROOM - 28..HEADROOM - 8].copy_from_slice(&header);
        buffer[HEADROOM - 8..HEADROOM].copy_from_slice(&request.offset_bytes.to_be_bytes());
        self.send(&buffer[HEADROOM - 28..])
    }

    /// Extents of `base:allocation`, eight bytes each, from [`HEADROOM`] on to the end of `buffer`.
    pub fn extents(&self, request: &Request, buffer: &mut [u8]) -> io::Result<()> {
        let header = chunk_header(chunk::BLOCK_STATUS, request.cookie, 4 + buffer.len() - HEADROOM);
        buffer[HEADROOM - 24..HEADROOM - 4].copy_from_slice(&header);
        buffer[HEADROOM - 4..HEADROOM].copy_from_slice(&wire::BASE_ALLOCATION_ID.to_be_bytes());
        self.send(&buffer[HEADROOM - 24..])
    }

    /// The client has lost us: nothing more is read or written.
    pub fn hang_up(&self) {
        self.out.lock().unwrap_or_else(PoisonError::into_inner).close();
    }
}
