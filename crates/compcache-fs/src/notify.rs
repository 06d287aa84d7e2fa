//! What the kernel can be told beside what the library has.

use std::os::fd::AsFd;

use fuser::INodeNo;
use rustix::io;

/// `enum fuse_notify_code`.
const INVAL_INODE: u32 = 2;
const PRUNE: u32 = 9;

/// Bytes of a `fuse_out_header`, and of three numbers of eight bytes.
const MESSAGE_BYTES: usize = 16 + 24;

/// Has the kernel forget the names of a file that nobody uses, and then the file: Linux 6.18.
pub fn prune(connection: impl AsFd, number: INodeNo) -> io::Result<()> {
    // How many, and that one.
    send(connection, PRUNE, [1, 0, number.0])
}

/// Has it forget what a file is like. It waits for nothing.
pub fn forget_attributes(connection: impl AsFd, number: INodeNo) -> io::Result<()> {
    // From a place before the beginning on: no pages.
    send(connection, INVAL_INODE, [number.0, -1i64 as u64, 0])
}

fn send(connection: impl AsFd, code: u32, numbers: [u64; 3]) -> io::Result<()> {
    let mut message = [0; MESSAGE_BYTES];
    message[..4].copy_from_slice(&(MESSAGE_BYTES as u32).to_ne_bytes());
    message[4..8].copy_from_slice(&code.to_ne_bytes());
    message[16..].copy_from_slice(numbers.map(u64::to_ne_bytes).as_flattened());
    io::write(connection, &message).map(drop)
}
