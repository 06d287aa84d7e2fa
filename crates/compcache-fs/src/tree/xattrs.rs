//! Extended attributes, ACLs among them.

use std::ffi::OsStr;

use fuser::{INodeNo, ReplyXattr, Request};
use rustix::fs::{XattrFlags, getxattr, getxattr_query, listxattr, removexattr, setxattr};
use rustix::io::{self, Errno};

use super::{Tree, errno};

/// The kernel lists no more.
const LIST_BYTES_MAX: usize = 64 << 10;

impl Tree {
    pub fn attribute(&self, number: INodeNo, name: &OsStr, size_max: u32, reply: ReplyXattr) {
        let path = match self.inodes.get(number) {
            Ok(node) => node.path(),
            Err(error) => return reply.error(errno(error)),
        };
        answer(size_max, reply, || getxattr_query(&path, name), |value| getxattr(&path, name, value));
    }

    /// The names; those that begin with `trusted.` for root alone, as file systems list them.
    pub fn attribute_names(&self, request: &Request, number: INodeNo, size_max: u32, reply: ReplyXattr) {
        let names = self.inodes.get(number).and_then(|node| {
            let mut names = vec![0; LIST_BYTES_MAX];
            let length = listxattr(node.path(), &mut *names)?;
            names.truncate(length);
            Ok(names)
        });
        match names {
            Ok(names) if request.uid() == 0 => answer_with(size_max, reply, &names),
            Ok(names) => {
                let each = names.split_inclusive(|byte| *byte == 0);
                answer_with(
                    size_max,
                    reply,
                    &each.filter(|name| !name.starts_with(b"trusted.")).flatten().copied().collect::<Vec<u8>>(),
                );
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    pub fn set_attribute(&self, number: INodeNo, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        let node = self.inodes.get(number)?;
        setxattr(node.path(), name, value, XattrFlags::from_bits_retain(flags as u32))
    }

    pub fn remove_attribute(&self, number: INodeNo, name: &OsStr) -> io::Result<()> {
        removexattr(self.inodes.get(number)?.path(), name)
    }
}

/// Answers with a value, or with its length if nothing more is asked.
fn answer(
    size_max: u32,
    reply: ReplyXattr,
    length: impl FnOnce() -> io::Result<usize>,
    read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
) {
    if size_max == 0 {
        return match length() {
            Ok(length) => reply.size(length as u32),
            Err(error) => reply.error(errno(error)),
        };
    }
    let mut value = vec![0; size_max as usize];
    match read(&mut value) {
        Ok(length) if length <= value.len() => reply.data(&value[..length]),
        Ok(_) => reply.error(errno(Errno::RANGE)),
        Err(error) => reply.error(errno(error)),
    }
}

/// Answers with a value that is known, or its length.
pub fn answer_with(size_max: u32, reply: ReplyXattr, value: &[u8]) {
    match value.len() {
        length if size_max == 0 => reply.size(length as u32),
        length if length > size_max as usize => reply.error(errno(Errno::RANGE)),
        _ => reply.data(value),
    }
}
