//! The numbers of the protocol, and how its two fixed messages look. All of it is big-endian.
//!
//! # Source
//! `doc/proto.md` of the NetworkBlockDevice/nbd project.

/// "NBDMAGIC", the first thing a server says.
pub(super) const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT", which begins the second, and every option.
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// The largest payload of a request or a reply.
pub(super) const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// What server and client say of themselves before the options; both use the same bits.
pub(super) mod handshake {
    pub const FIXED_NEWSTYLE: u32 = 1 << 0;
    pub const NO_ZEROES: u32 = 1 << 1;
}

pub(super) mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

pub(super) mod option_reply {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const UNSUPPORTED: u32 = (1 << 31) | 1;
    pub const INVALID: u32 = (1 << 31) | 3;
    pub const UNKNOWN: u32 = (1 << 31) | 6;
    pub const TOO_BIG: u32 = (1 << 31) | 9;
}

pub(super) mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub(super) mod transmission {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

pub(super) mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

pub(super) mod command_flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
}

pub(super) mod chunk {
    /// The flag of the last chunk of a reply.
    pub const DONE: u16 = 1;
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) | 1;
}

/// What `base:allocation` says of an extent: nothing is stored there, and it reads as zeroes.
pub(super) const STATE_HOLE_AND_ZERO: u32 = 1 << 0 | 1 << 1;
/// The only metadata context there is.
pub(super) const BASE_ALLOCATION: &[u8] = b"base:allocation";
/// Its number on the wire.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;

/// Errors, which the protocol numbers as Linux does.
pub(super) mod error {
    pub const PERM: u32 = 1;
    pub const IO: u32 = 5;
    pub const NOMEM: u32 = 12;
    pub const INVAL: u32 = 22;
    pub const NOSPC: u32 = 28;
    pub const OVERFLOW: u32 = 75;
    pub const NOTSUP: u32 = 95;
    pub const SHUTDOWN: u32 = 108;
}

/// A device's errno as the protocol may say it; one it does not know is an I/O error.
pub(super) fn error_of(errno: i32) -> u32 {
    use error::*;
    match u32::try_from(errno) {
        Ok(known @ (PERM | IO | NOMEM | INVAL | NOSPC | OVERFLOW | NOTSUP | SHUTDOWN)) => known,
        _ => IO,
    }
}

/// Takes integers and bytes off the front of a message; `None` where it is too short.
pub(super) struct Parser<'m>(pub &'m [u8]);

impl<'m> Parser<'m> {
    pub fn bytes(&mut self, length: usize) -> Option<&'m [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A length, and that many bytes.
    pub fn string(&mut self) -> Option<&'m [u8]> {
        let length = self.u32()?;
        self.bytes(length as usize)
    }
}

pub(super) const REQUEST_BYTES: usize = 28;

/// What a client asks, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset_bytes: u64,
    pub length_bytes: u32,
}

impl Request {
    /// `None` if it is no request: the client and we have lost each other.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Request> {
        let mut parser = Parser(bytes);
        if parser.u32()? != REQUEST_MAGIC {
            return None;
        }
        let (flags, command, cookie) = (parser.u16()?, parser.u16()?, parser.u64()?);
        Some(Request { flags, command, cookie, offset_bytes: parser.u64()?, length_bytes: parser.u32()? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_message_cut_off_anywhere_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..64), length in any::<u32>()) {
            let message = [&length.to_be_bytes()[..], &bytes].concat();
            let string = Parser(&message).string();
            prop_assert_eq!(string.is_some(), length as usize <= bytes.len());
            prop_assert_eq!(string.unwrap_or_default(), &bytes[..string.map_or(0, |_| length as usize)]);
        }
    }

    #[test]
    fn an_errno_the_protocol_does_not_know_is_an_io_error() {
        assert_eq!([5, 28, 12, 22, 1].map(error_of), [5, 28, 12, 22, 1]);
        assert_eq!([0, -1, 2, 116].map(error_of), [5; 4]);
    }
}
