//! The same requests by io_uring: what the library does of the protocol, for requests whose payload lies in memory that is there.
//!
//! Names in offsets and lengths are those of `<linux/fuse.h>`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use compcache_fuse::{Answer, Asked, Serve};
use fuser::{FileAttr, FileHandle, FileType, FopenFlags, INodeNo, OpenFlags, RenameFlags, WriteFlags};
use rustix::fs::{Timespec, fstatvfs};
use rustix::io::{self, Errno};

use super::Tree;
use super::attributes::{Changes, NOW};
use super::directories::Entry;
use super::names::Made;
use super::reading::Bytes;
use super::xattrs::Value;
use crate::astray::About;
use crate::caller::Caller;
use crate::mount::Believed;

/// `enum fuse_opcode`.
mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const CREATE: u32 = 35;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
}

/// Of `fuse_getattr_in`, whose handle lies at 8.
const GETATTR_FH: u32 = 1;

// `valid` of `fuse_setattr_in`.
const FATTR_MODE: u32 = 1 << 0;
const FATTR_UID: u32 = 1 << 1;
const FATTR_GID: u32 = 1 << 2;
const FATTR_SIZE: u32 = 1 << 3;
const FATTR_ATIME: u32 = 1 << 4;
const FATTR_MTIME: u32 = 1 << 5;
const FATTR_FH: u32 = 1 << 6;
const FATTR_ATIME_NOW: u32 = 1 << 7;
const FATTR_MTIME_NOW: u32 = 1 << 8;

/// Of `fuse_fsync_in`.
const FSYNC_FDATASYNC: u32 = 1;

const ATTR_BYTES: usize = 88;
const ENTRY_BYTES: usize = 40 + ATTR_BYTES;
const OPENED_BYTES: usize = 16;
/// `fuse_dirent`, before the name.
const DIRENT_BYTES: usize = 24;

impl Serve for Tree {
    fn serve(&self, asked: &Asked, mut answer: Answer<'_>) {
        if asked.opcode == opcode::READ {
            let (handle, offset, size) = (FileHandle(asked.u64_at(0)), asked.u64_at(8), asked.u32_at(16));
            let size = answer.payload().len().min(size as usize);
            return self.read_file(handle, offset, size, answer);
        }
        match self.done(asked, answer.payload()) {
            Ok(length) => answer.ok(length),
            Err(error) => answer.fail(error.raw_os_error()),
        }
    }
}

impl Bytes for Answer<'_> {
    fn bytes(mut self, bytes: &[u8], more: bool) {
        self.payload()[..bytes.len()].copy_from_slice(bytes);
        if more { self.ok_now(bytes.len()) } else { self.ok(bytes.len()) }
    }

    fn failed(self, error: Errno) {
        self.fail(error.raw_os_error());
    }
}

impl Tree {
    /// Does what is asked; the answer is in the payload, of which it took so much.
    fn done(&self, asked: &Asked, payload: &mut [u8]) -> io::Result<usize> {
        let came = &payload[..asked.payload_bytes];
        let (caller, node) = (Caller { uid: asked.uid, gid: asked.gid }, INodeNo(asked.node));
        // Where most that concern something open have them.
        let (handle, offset, length) = (FileHandle(asked.u64_at(0)), asked.u64_at(8), asked.u64_at(16));
        self.comes(asked)?;
        match asked.opcode {
            opcode::LOOKUP => {
                self.find(asked.thread, node, name(came)?.0).map(|made| self.entry_out(&made, payload, true))
            }
            opcode::GETATTR => {
                let handle = (asked.u32_at(0) & GETATTR_FH != 0).then(|| FileHandle(asked.u64_at(8)));
                self.attributes_of(node, handle).map(|known| self.attr_out(&known, payload))
            }
            opcode::SETATTR => {
                let handle = handle_of_changes(asked);
                self.change(caller, node, handle, &changes(asked)).map(|known| self.attr_out(&known, payload))
            }
            opcode::READLINK => self.target_of(node).map(|target| put(payload, &[&target])),
            opcode::SYMLINK => {
                let (called, rest) = name(came)?;
                let target = Path::new(name(rest)?.0);
                self.make_symlink(caller, node, called, target).map(|made| self.entry_out(&made, payload, false))
            }
            opcode::MKNOD => {
                let (mode, device, mask) = (asked.u32_at(0), asked.u32_at(4), asked.u32_at(8));
                let made = self.make_node(caller, node, name(came)?.0, mode, mask, device)?;
                Ok(self.entry_out(&made, payload, false))
            }
            opcode::MKDIR => {
                let made = self.make_directory(caller, node, name(came)?.0, asked.u32_at(0), asked.u32_at(4))?;
                Ok(self.entry_out(&made, payload, false))
            }
            opcode::UNLINK => self.remove(node, name(came)?.0, false).map(|()| 0),
            opcode::RMDIR => self.remove(node, name(came)?.0, true).map(|()| 0),
            opcode::RENAME | opcode::RENAME2 => {
                let (old, rest) = name(came)?;
                let flags = if asked.opcode == opcode::RENAME2 { asked.u32_at(8) } else { 0 };
                let (new, flags) = (name(rest)?.0, RenameFlags::from_bits_retain(flags));
                self.move_name(caller, node, old, INodeNo(asked.u64_at(0)), new, flags).map(|()| 0)
            }
            opcode::LINK => {
                let made = self.make_link(INodeNo(asked.u64_at(0)), node, name(came)?.0)?;
                Ok(self.entry_out(&made, payload, false))
            }
            opcode::OPEN => {
                let (handle, how) = self.open_file(caller, node, OpenFlags(asked.u32_at(0) as i32))?;
                Ok(put(payload, &[&open_out(handle, how, self.backing_of(handle))]))
            }
            opcode::CREATE => {
                let (flags, mode, mask) = (OpenFlags(asked.u32_at(0) as i32), asked.u32_at(4), asked.u32_at(8));
                let (made, handle, how) = self.create_file(caller, node, name(came)?.0, mode, mask, flags)?;
                let entry = self.entry_out(&made, payload, false);
                Ok(entry + put(&mut payload[entry..], &[&open_out(handle, how, self.backing_of(handle))]))
            }
            opcode::WRITE => {
                let (how, flags) = (WriteFlags::from_bits_retain(asked.u32_at(20)), OpenFlags(asked.u32_at(32) as i32));
                let written = self.write_file(caller, handle, offset, came, how, flags)?;
                Ok(put(payload, &[&(written as u32).to_ne_bytes(), &[0; 4]]))
            }
            opcode::FLUSH => self.close_report(handle).map(|()| 0),
            opcode::RELEASE => {
                self.close_file(handle);
                Ok(0)
            }
            opcode::FSYNC => self.sync_file(handle, asked.u32_at(8) & FSYNC_FDATASYNC != 0).map(|()| 0),
            opcode::FALLOCATE => self.allocate(caller, handle, offset, length, asked.u32_at(24) as i32).map(|()| 0),
            opcode::LSEEK => {
                let at = self.seek_file(handle, offset as i64, asked.u32_at(16) as i32)?;
                Ok(put(payload, &[&at.to_ne_bytes()]))
            }
            opcode::COPY_FILE_RANGE => {
                let to = (FileHandle(asked.u64_at(24)), asked.u64_at(32));
                let copied = self.copy_range(caller, (handle, offset), to, asked.u64_at(40))?;
                Ok(put(payload, &[&(copied as u32).to_ne_bytes(), &[0; 4]]))
            }
            opcode::OPENDIR => {
                let (handle, how) = self.open_directory(node)?;
                Ok(put(payload, &[&open_out(handle, how, 0)]))
            }
            opcode::READDIR => {
                let mut out = Names::new(payload, asked.u32_at(16));
                self.list(handle, offset, |number, next, kind, name| out.add(&[], number, next, kind, name))?;
                Ok(out.length)
            }
            opcode::READDIRPLUS => {
                let mut out = Names::new(payload, asked.u32_at(16));
                self.list_with_attributes(handle, offset, |entry, next, name| match entry {
                    Entry::Known(known, generation) => out.add(
                        &entry_bytes(known, generation, &self.remembered.of(known.kind, true)),
                        known.ino,
                        next,
                        known.kind,
                        name,
                    ),
                    // Without a node the kernel takes the name alone.
                    Entry::Named(number, kind, _) => out.add(&[0; ENTRY_BYTES], number, next, kind, name),
                })?;
                Ok(out.length)
            }
            opcode::RELEASEDIR => {
                drop(self.directories.remove(handle));
                Ok(0)
            }
            opcode::FSYNCDIR => self.sync_directory(handle, asked.u32_at(8) & FSYNC_FDATASYNC != 0).map(|()| 0),
            opcode::STATFS => self.statfs_out(node, payload),
            opcode::SETXATTR => {
                let (called, value) = name(came)?;
                let value = value.get(..asked.u32_at(0) as usize).ok_or(Errno::INVAL)?;
                self.set_attribute(caller, node, called, value, asked.u32_at(4) as i32).map(|()| 0)
            }
            opcode::GETXATTR => {
                self.attribute(caller, node, name(came)?.0, asked.u32_at(0)).map(|value| xattr_out(value, payload))
            }
            opcode::LISTXATTR => {
                self.attribute_names(caller, node, asked.u32_at(0)).map(|value| xattr_out(value, payload))
            }
            opcode::REMOVEXATTR => self.remove_attribute(caller, node, name(came)?.0).map(|()| 0),
            _ => Err(Errno::NOSYS),
        }
    }

    /// Whether who asks is to look again for what he came to.
    fn comes(&self, asked: &Asked) -> io::Result<()> {
        let (node, other) = (INodeNo(asked.node), INodeNo(asked.u64_at(0)));
        let (file, directories, about): (_, &[_], _) = match asked.opcode {
            opcode::SYMLINK
            | opcode::MKNOD
            | opcode::MKDIR
            | opcode::UNLINK
            | opcode::RMDIR
            | opcode::CREATE
            | opcode::OPENDIR => (None, &[node], About::Do),
            opcode::RENAME | opcode::RENAME2 => (None, &[node, other], About::Do),
            opcode::LINK => (Some(other), &[node], About::Do),
            opcode::OPEN => (Some(node), &[], About::Do),
            opcode::READLINK => (Some(node), &[], About::GoOn),
            opcode::SETATTR if changes(asked).are_by_path(handle_of_changes(asked)) => (Some(node), &[], About::Do),
            _ => return Ok(()),
        };
        self.comes_to(asked.thread, file, directories, about)
    }

    fn entry_out(&self, made: &Made, payload: &mut [u8], is_looked_up: bool) -> usize {
        let known = made.attributes();
        let believed = self.believed(&made.node, known.kind, is_looked_up);
        put(payload, &[&entry_bytes(&known, made.node.generation, &believed)])
    }

    /// `fuse_attr_out`.
    fn attr_out(&self, known: &FileAttr, payload: &mut [u8]) -> usize {
        let (seconds, fraction) = seconds(self.believed_asked(known));
        put(payload, &[&seconds, &fraction, &[0; 4], &attr(known)])
    }

    /// `fuse_statfs_out`.
    fn statfs_out(&self, node: INodeNo, payload: &mut [u8]) -> io::Result<usize> {
        let stat = self.inodes.get(node).and_then(fstatvfs)?;
        let counts = [stat.f_blocks, stat.f_bfree, stat.f_bavail, stat.f_files, stat.f_ffree].map(u64::to_ne_bytes);
        let sizes = [stat.f_bsize, stat.f_namemax, stat.f_frsize].map(|size| (size as u32).to_ne_bytes());
        Ok(put(payload, &[counts.as_flattened(), sizes.as_flattened(), &[0; 28]]))
    }
}

/// `fuse_entry_out`.
fn entry_bytes(known: &FileAttr, generation: u64, believed: &Believed) -> [u8; ENTRY_BYTES] {
    let (name, attributes) = (seconds(believed.name), seconds(believed.attributes));
    let (seconds, fractions) = ([name.0, attributes.0], [name.1, attributes.1]);
    let mut entry = [0; ENTRY_BYTES];
    let (number, generation) = (known.ino.0.to_ne_bytes(), generation.to_ne_bytes());
    put(&mut entry, &[&number, &generation, seconds.as_flattened(), fractions.as_flattened(), &attr(known)]);
    entry
}

/// Whole ones, and nanoseconds.
fn seconds(time: Duration) -> ([u8; 8], [u8; 4]) {
    (time.as_secs().to_ne_bytes(), time.subsec_nanos().to_ne_bytes())
}

/// A name, which ends with a zero, and what follows it.
fn name(came: &[u8]) -> io::Result<(&OsStr, &[u8])> {
    let length = came.iter().position(|byte| *byte == 0).ok_or(Errno::INVAL)?;
    Ok((OsStr::from_bytes(&came[..length]), &came[length + 1..]))
}

/// Puts one behind the other; the length of all.
fn put(into: &mut [u8], parts: &[&[u8]]) -> usize {
    let mut length = 0;
    for part in parts {
        into[length..][..part.len()].copy_from_slice(part);
        length += part.len();
    }
    length
}

/// Of `fuse_setattr_in`.
fn handle_of_changes(asked: &Asked) -> Option<FileHandle> {
    (asked.u32_at(0) & FATTR_FH != 0).then(|| FileHandle(asked.u64_at(8)))
}

/// The same.
fn changes(asked: &Asked) -> Changes {
    let valid = asked.u32_at(0);
    let number = |flag, offset| (valid & flag != 0).then(|| asked.u32_at(offset));
    let time = |flag, now, seconds, fraction| {
        let exact = || Timespec { tv_sec: asked.u64_at(seconds) as i64, tv_nsec: asked.u32_at(fraction).into() };
        (valid & flag != 0).then(|| if valid & now != 0 { NOW } else { exact() })
    };
    Changes {
        mode: number(FATTR_MODE, 68),
        uid: number(FATTR_UID, 76),
        gid: number(FATTR_GID, 80),
        size_bytes: (valid & FATTR_SIZE != 0).then(|| asked.u64_at(16)),
        accessed: time(FATTR_ATIME, FATTR_ATIME_NOW, 32, 56),
        modified: time(FATTR_MTIME, FATTR_MTIME_NOW, 40, 60),
    }
}

/// `fuse_open_out`.
fn open_out(handle: FileHandle, how: FopenFlags, backing: u32) -> [u8; OPENED_BYTES] {
    let mut opened = [0; OPENED_BYTES];
    put(&mut opened, &[&handle.0.to_ne_bytes(), &how.bits().to_ne_bytes(), &backing.to_ne_bytes()]);
    opened
}

/// `fuse_getxattr_out`, or the value.
fn xattr_out(value: Value, payload: &mut [u8]) -> usize {
    match value {
        Value::Length(length) => put(payload, &[&(length as u32).to_ne_bytes(), &[0; 4]]),
        Value::Bytes(bytes) => put(payload, &[&bytes]),
    }
}

/// `fuse_attr`.
fn attr(known: &FileAttr) -> [u8; ATTR_BYTES] {
    let times = [known.atime, known.mtime, known.ctime].map(moment);
    let mode = kind_bits(known.kind) << 12 | u32::from(known.perm);
    let mut attr = [0; ATTR_BYTES];
    let numbers = [known.ino.0, known.size, known.blocks].map(u64::to_ne_bytes);
    let seconds = times.map(|(seconds, _)| seconds.to_ne_bytes());
    let fractions = times.map(|(_, fraction)| fraction.to_ne_bytes());
    let rest = [mode, known.nlink, known.uid, known.gid, known.rdev, known.blksize].map(u32::to_ne_bytes);
    let parts = [numbers.as_flattened(), seconds.as_flattened(), fractions.as_flattened(), rest.as_flattened()];
    put(&mut attr, &parts);
    attr
}

/// Seconds since 1970, rounded down, and nanoseconds.
fn moment(time: SystemTime) -> (i64, u32) {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (after.as_secs() as i64, after.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            let whole = before.as_secs() + u64::from(before.subsec_nanos() > 0);
            let after = Duration::from_secs(whole) - before;
            ((whole as i64).wrapping_neg(), after.subsec_nanos())
        }
    }
}

/// The upper four bits of a mode, and `d_type`.
fn kind_bits(kind: FileType) -> u32 {
    match kind {
        FileType::NamedPipe => 1,
        FileType::CharDevice => 2,
        FileType::Directory => 4,
        FileType::BlockDevice => 6,
        FileType::RegularFile => 8,
        FileType::Symlink => 10,
        FileType::Socket => 12,
    }
}

/// Names of a directory, in as much of the payload as the kernel has room for.
struct Names<'p> {
    payload: &'p mut [u8],
    length: usize,
}

impl Names<'_> {
    fn new(payload: &mut [u8], size: u32) -> Names<'_> {
        let size = payload.len().min(size as usize);
        Names { payload: &mut payload[..size], length: 0 }
    }

    /// `fuse_dirent`, behind `before`; false if there is no room for it.
    fn add(&mut self, before: &[u8], number: INodeNo, next: u64, kind: FileType, name: &OsStr) -> bool {
        let name = name.as_bytes();
        let padding = name.len().next_multiple_of(8) - name.len();
        let length = before.len() + DIRENT_BYTES + name.len() + padding;
        if self.payload.len() - self.length < length {
            return false;
        }
        let (number, next) = (number.0.to_ne_bytes(), next.to_ne_bytes());
        let (name_length, kind) = ((name.len() as u32).to_ne_bytes(), kind_bits(kind).to_ne_bytes());
        let parts = [before, &number, &next, &name_length, &kind, name, &[0; 8][..padding]];
        self.length += put(&mut self.payload[self.length..], &parts);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_before_1970_count_forwards_from_a_whole_second() {
        let at = |seconds, fraction| UNIX_EPOCH - Duration::new(seconds, fraction);
        assert_eq!(moment(UNIX_EPOCH + Duration::new(5, 7)), (5, 7));
        assert_eq!(moment(at(1, 750_000_000)), (-2, 250_000_000));
        assert_eq!(moment(at(3, 0)), (-3, 0));
    }

    #[test]
    fn names_end_with_zeroes() {
        let (first, rest) = name(b"a\0bc\0").unwrap();
        assert_eq!((first.as_bytes(), name(rest).unwrap().0.as_bytes()), (&b"a"[..], &b"bc"[..]));
        assert_eq!(name(b"abc").unwrap_err(), Errno::INVAL);
    }

    #[test]
    fn what_finds_no_room_is_left_out_whole() {
        let mut payload = [0; 100];
        let mut names = Names::new(&mut payload, 64);
        assert!(names.add(&[], INodeNo(7), 1, FileType::Directory, OsStr::new("four")), "24 and 8 bytes");
        assert!(!names.add(&[], INodeNo(8), 2, FileType::Directory, OsStr::new("nine bytes")), "24 and 16 bytes");
        assert!(names.add(&[], INodeNo(8), 2, FileType::Directory, OsStr::new("")), "24 bytes");
        assert_eq!(names.length, 56);
    }
}
