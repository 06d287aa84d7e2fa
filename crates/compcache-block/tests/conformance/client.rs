//! A small NBD client that says exactly what a test wants said, and believes nothing it is told.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const FAST_ZERO: u16 = 16;

/// Among the flags of an export.
pub const SEND_FAST_ZERO: u16 = 1 << 11;

pub struct Client {
    pub stream: UnixStream,
    pub size_bytes: u64,
    pub flags: u16,
    structured: bool,
    cookie: u64,
}

/// An answer: to which request, with which error, and what came with it.
#[derive(Debug)]
pub struct Reply {
    pub cookie: u64,
    pub error: u32,
    pub data: Vec<u8>,
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().unwrap())
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().unwrap())
}

/// A connection that has been greeted and has said which flags it knows.
pub fn greet(socket: &Path) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    assert_eq!(greeting[17] & 3, 3, "fixed newstyle, no zeroes");
    stream.write_all(&3u32.to_be_bytes())?;
    Ok(stream)
}

pub fn option(option: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT", &option.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

/// All replies to an option, up to the one that ends them: their kinds and data.
pub fn option_replies(stream: &mut UnixStream, asked: u32) -> io::Result<Vec<(u32, Vec<u8>)>> {
    let mut replies = Vec::new();
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header)?;
        assert_eq!((be64(&header), be32(&header[8..])), (0x0003_e889_0455_65a9, asked));
        let mut data = vec![0; be32(&header[16..]) as usize];
        stream.read_exact(&mut data)?;
        let kind = be32(&header[12..]);
        replies.push((kind, data));
        if kind == 1 || kind >> 31 == 1 {
            return Ok(replies);
        }
    }
}

/// The data of GO or INFO for `name`.
pub fn go_data(name: &str) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes()[..], name.as_bytes(), &[0, 0]].concat()
}

/// The data of SET_META_CONTEXT for `name` and one query.
pub fn context_data(name: &str, query: &str) -> Vec<u8> {
    let length = |text: &str| (text.len() as u32).to_be_bytes();
    [&length(name)[..], name.as_bytes(), &1u32.to_be_bytes(), &length(query), query.as_bytes()].concat()
}

impl Client {
    pub fn connect(socket: &Path, name: &str, structured: bool) -> io::Result<Client> {
        let mut stream = greet(socket)?;
        if structured {
            stream.write_all(&option(8, &[]))?;
            assert_eq!(option_replies(&mut stream, 8)?, [(1, vec![])]);
            stream.write_all(&option(10, &context_data(name, "base:allocation")))?;
            assert_eq!(option_replies(&mut stream, 10)?.len(), 2);
        }
        stream.write_all(&option(7, &go_data(name)))?;
        let replies = option_replies(&mut stream, 7)?;
        let (last, infos) = replies.split_last().unwrap();
        assert_eq!(last.0, 1, "{last:?}");
        let export = &infos.iter().find(|(_, data)| data[..2] == [0, 0]).expect("what the export is").1;
        let flags = u16::from_be_bytes([export[10], export[11]]);
        Ok(Client { stream, size_bytes: be64(&export[2..]), flags, structured, cookie: 0 })
    }

    /// Sends a request and returns its cookie.
    pub fn send(&mut self, flags: u16, command: u16, offset: u64, length: u32, data: &[u8]) -> io::Result<u64> {
        self.cookie += 1;
        self.stream.write_all(&request(flags, command, self.cookie, offset, length))?;
        self.stream.write_all(data)?;
        Ok(self.cookie)
    }

    /// The next reply. `read_bytes` is what a simple reply without an error brings along.
    pub fn receive(&mut self, read_bytes: usize) -> io::Result<Reply> {
        let mut magic = [0; 4];
        self.stream.read_exact(&mut magic)?;
        if magic == 0x6744_6698u32.to_be_bytes() {
            let mut rest = [0; 12];
            self.stream.read_exact(&mut rest)?;
            let error = be32(&rest);
            let mut data = vec![0; if error == 0 { read_bytes } else { 0 }];
            self.stream.read_exact(&mut data)?;
            return Ok(Reply { cookie: be64(&rest[4..]), error, data });
        }
        assert_eq!((magic, self.structured), (0x668e_33efu32.to_be_bytes(), true));
        let mut rest = [0; 16];
        self.stream.read_exact(&mut rest)?;
        let (flags, kind) = (u16::from_be_bytes([rest[0], rest[1]]), u16::from_be_bytes([rest[2], rest[3]]));
        assert_eq!(flags, 1, "one chunk a reply");
        let mut data = vec![0; be32(&rest[12..]) as usize];
        self.stream.read_exact(&mut data)?;
        let (error, data) = match kind {
            0 => (0, vec![]),
            1 => (0, data.split_off(8)),
            5 => (0, data.split_off(4)),
            0x8001 => (be32(&data), vec![]),
            other => panic!("chunk of kind {other}"),
        };
        Ok(Reply { cookie: be64(&rest[4..]), error, data })
    }

    /// A request and its reply.
    pub fn ask(&mut self, flags: u16, command: u16, offset: u64, length: u32, data: &[u8]) -> io::Result<Reply> {
        let cookie = self.send(flags, command, offset, length, data)?;
        let reply = self.receive(if command == READ { length as usize } else { 0 })?;
        assert_eq!(reply.cookie, cookie);
        Ok(reply)
    }
}

pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, length: u32) -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&length.to_be_bytes());
    bytes
}
