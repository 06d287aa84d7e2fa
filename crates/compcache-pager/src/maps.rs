//! The process's own map, read line by line without allocating, or asked for one mapping.

use crate::sys::{self, Errno};
use core::ops::Range;
use linux_raw_sys::general as uapi;
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::mm::MprotectFlags;

pub(crate) const PROCMAP_QUERY: u32 = 0xc068_6611; // _IOWR('f', 17, struct procmap_query)

const _: () = assert!(size_of::<uapi::procmap_query>() == 104);

/// One mapping, as far as the pager cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub start: usize,
    pub end: usize,
    /// Private and anonymous, by the map alone: no file, no name but `[heap]` or a name the program gave it.
    pub anonymous: bool,
    /// Readable and writable.
    pub writable: bool,
    pub rights: MprotectFlags,
    pub heap: bool,
    /// A queue by which devices are asked to write to memory: of io_uring, or of io_setup.
    pub device_queue: bool,
}

const BUFFER: usize = 32 << 10;

/// Reads `/proc/self/maps` through an open descriptor and calls `each` for every mapping, in order of address.
///
/// The buffer is the caller's; a mapping that changes meanwhile may be seen as it was or as it is.
pub fn for_each(fd: BorrowedFd<'_>, buffer: &mut MapsBuffer, mut each: impl FnMut(Mapping)) {
    for_each_line(fd, buffer, |line| {
        if let Some(mapping) = parse(line) {
            each(mapping);
        }
    });
}

/// Reads `/proc/self/smaps` and calls `each` for every mapping that a copy of the process finds empty
/// (MADV_WIPEONFORK). The kernel walks all page tables for this file: only for use after a fork.
pub fn for_each_wiped(fd: BorrowedFd<'_>, buffer: &mut MapsBuffer, mut each: impl FnMut(Mapping)) {
    let mut last = None;
    for_each_line(fd, buffer, |line| {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let wiped = flags.split(|&byte| byte == b' ').any(|flag| flag == b"wf");
            if let Some(mapping) = last.take()
                && wiped
            {
                each(mapping);
            }
        } else if let Some(mapping) = parse(line) {
            last = Some(mapping);
        }
    });
}

/// What the kernel says about an address.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// The mapping there, or the next one above.
    Mapping {
        range: Range<usize>,
        private_anonymous: bool,
    },
    Nothing,
}

/// The mapping at an address, or the next above it, through a descriptor of `/proc/self/maps`. `None` when the kernel cannot
/// be asked (before Linux 6.11).
pub fn covering_or_next(fd: BorrowedFd<'_>, address: usize) -> Option<Found> {
    match query(fd, address, uapi::procmap_query_flags::PROCMAP_QUERY_COVERING_OR_NEXT_VMA as u64) {
        Ok(found) => {
            let shared = found.vma_flags & uapi::procmap_query_flags::PROCMAP_QUERY_VMA_SHARED as u64 != 0;
            let private_anonymous = found.inode == 0 && !shared;
            Some(Found::Mapping { range: found.vma_start as usize..found.vma_end as usize, private_anonymous })
        }
        Err(Errno::ENOENT) => Some(Found::Nothing),
        Err(_) => None,
    }
}

/// Whether what is mapped at an address may be written and executed; `None` when nothing is, or the kernel cannot be asked.
pub fn is_code(fd: BorrowedFd<'_>, address: usize) -> Option<bool> {
    use uapi::procmap_query_flags::{PROCMAP_QUERY_VMA_EXECUTABLE, PROCMAP_QUERY_VMA_WRITABLE};
    const BOTH: u64 = PROCMAP_QUERY_VMA_EXECUTABLE as u64 | PROCMAP_QUERY_VMA_WRITABLE as u64;
    Some(query(fd, address, 0).ok()?.vma_flags & BOTH == BOTH)
}

/// The mapping that covers an address, or the one that the flags ask for.
fn query(fd: BorrowedFd<'_>, address: usize, query_flags: u64) -> Result<uapi::procmap_query, Errno> {
    let mut query = uapi::procmap_query {
        size: size_of::<uapi::procmap_query>() as u64,
        query_flags,
        query_addr: address as u64,
        vma_start: 0,
        vma_end: 0,
        vma_flags: 0,
        vma_page_size: 0,
        vma_offset: 0,
        inode: 0,
        dev_major: 0,
        dev_minor: 0,
        vma_name_size: 0,
        build_id_size: 0,
        vma_name_addr: 0,
        build_id_addr: 0,
    };
    // SAFETY: PROCMAP_QUERY reads and writes a struct procmap_query, and nothing else where no name is asked for.
    unsafe { sys::ioctl(fd.as_raw_fd(), PROCMAP_QUERY, &mut query) }.map(|_| query)
}

fn for_each_line(fd: BorrowedFd<'_>, buffer: &mut MapsBuffer, mut each: impl FnMut(&[u8])) {
    let bytes = &mut buffer.0;
    let mut offset = 0u64;
    let mut held = 0;
    loop {
        let read = match rustix::io::pread(fd, &mut bytes[held..], offset) {
            Ok(0) | Err(_) => break,
            Ok(read) => read,
        };
        offset += read as u64;
        let filled = held + read;
        let mut line_start = 0;
        while let Some(length) = bytes[line_start..filled].iter().position(|&byte| byte == b'\n') {
            each(&bytes[line_start..line_start + length]);
            line_start += length + 1;
        }
        bytes.copy_within(line_start..filled, 0);
        held = filled - line_start;
        if held == bytes.len() {
            break; // a line longer than the buffer: no kernel writes one
        }
    }
}

/// Room for reading maps. Zeroes at first.
pub struct MapsBuffer([u8; BUFFER]);

impl MapsBuffer {
    /// An empty one.
    pub const fn new() -> MapsBuffer {
        MapsBuffer([0; BUFFER])
    }
}

fn parse(line: &[u8]) -> Option<Mapping> {
    let mut fields = line.splitn(6, |&byte| byte == b' ');
    let range = fields.next()?;
    let dash = range.iter().position(|&byte| byte == b'-')?;
    let (start, end) = (hex(&range[..dash])?, hex(&range[dash + 1..])?);
    let rights = fields.next()?;
    let (_offset, _device) = (fields.next()?, fields.next()?);
    let inode = fields.next()?;
    let name = fields.next().unwrap_or(b"");
    let name = &name[name.iter().position(|&byte| byte != b' ').unwrap_or(name.len())..];
    let file = inode != b"0";
    let plain = name.is_empty() || name == b"[heap]" || name.starts_with(b"[anon:");
    Some(Mapping {
        start,
        end,
        anonymous: !file && plain && rights.get(3) == Some(&b'p'),
        writable: rights.starts_with(b"rw"),
        rights: [MprotectFlags::READ, MprotectFlags::WRITE, MprotectFlags::EXEC]
            .into_iter()
            .zip(rights)
            .filter_map(|(right, &letter)| (letter != b'-').then_some(right))
            .collect(),
        heap: name == b"[heap]",
        device_queue: name.starts_with(b"anon_inode:[io_uring]") || name.starts_with(b"/[aio]"),
    })
}

pub(crate) fn hex(digits: &[u8]) -> Option<usize> {
    digits.iter().try_fold(0usize, |value, &digit| {
        let digit = (digit as char).to_digit(16)?;
        Some(value << 4 | digit as usize)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PAGE;
    use compcache_testkit::features::{Feature, requires};

    #[test]
    fn only_private_mappings_without_a_file_are_anonymous() {
        let anonymous = |line: &str| parse(line.as_bytes()).unwrap().anonymous;
        assert!(anonymous("7f0000000000-7f0000021000 rw-p 00000000 00:00 0 "));
        assert!(anonymous("55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]"));
        assert!(anonymous("7f0000000000-7f0000021000 rw-p 00000000 00:00 0                  [anon:arena]"));
        assert!(!anonymous("7f0000000000-7f0000021000 rw-s 00000000 00:01 77                 /dev/zero (deleted)"));
        assert!(!anonymous("7f0000000000-7f0000021000 rw-p 00000000 fe:00 77                 /usr/lib/x.so"));
        assert!(!anonymous("7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                  [stack]"));
    }

    #[test]
    fn a_line_is_read_to_the_byte() {
        let heap = parse(b"55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]").unwrap();
        assert_eq!((heap.start, heap.end), (0x55d0_c000_0000, 0x55d0_c002_1000));
        assert!(heap.heap && heap.writable && heap.anonymous);
        assert_eq!(heap.rights, MprotectFlags::READ | MprotectFlags::WRITE);
        let guard = parse(b"7f0000000000-7f0000001000 ---p 00000000 00:00 0 ").unwrap();
        let code = parse(b"7f0000000000-7f0000001000 r-xp 00001000 fe:00 77 /usr/lib/x.so").unwrap();
        assert_eq!((guard.rights, code.rights), (MprotectFlags::empty(), MprotectFlags::READ | MprotectFlags::EXEC));
    }

    #[test]
    #[allow(unsafe_code, reason = "asks the kernel to wipe a range in copies")]
    fn a_range_that_copies_find_empty_is_told_apart() {
        use rustix::fs::{Mode, OFlags};
        let wiped = crate::memory::map(16 * 4096).unwrap();
        let kept = crate::memory::map(16 * 4096).unwrap();
        // SAFETY: a range mapped just now.
        unsafe { rustix::mm::madvise(wiped.cast(), 16 * 4096, rustix::mm::Advice::LinuxWipeOnFork) }.unwrap();
        let fd = rustix::fs::open(c"/proc/self/smaps", OFlags::RDONLY, Mode::empty()).unwrap();
        let (mut saw_wiped, mut saw_kept) = (false, false);
        for_each_wiped(rustix::fd::AsFd::as_fd(&fd), &mut MapsBuffer::new(), |mapping| {
            saw_wiped |= (mapping.start..mapping.end).contains(&(wiped as usize));
            saw_kept |= (mapping.start..mapping.end).contains(&(kept as usize));
        });
        assert!(saw_wiped && !saw_kept);
    }

    #[test]
    #[allow(unsafe_code, reason = "makes the middle of a mapping another one")]
    fn a_single_mapping_is_asked_for() {
        use rustix::fs::{Mode, OFlags};
        use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
        if !requires(&[Feature::ProcmapQuery]) {
            return;
        }
        let fd = rustix::fs::open(c"/proc/self/maps", OFlags::RDONLY, Mode::empty()).unwrap();
        let ask = |address| covering_or_next(rustix::fd::AsFd::as_fd(&fd), address);
        let start = crate::memory::map(3 * PAGE).unwrap();
        // SAFETY: within a range mapped just now.
        unsafe {
            rustix::mm::mprotect(start.cast(), PAGE, MprotectFlags::empty()).unwrap();
            let (middle, rights) = (start.add(PAGE).cast(), ProtFlags::READ | ProtFlags::WRITE);
            rustix::mm::mmap_anonymous(middle, PAGE, rights, MapFlags::SHARED | MapFlags::FIXED).unwrap();
        }
        let code = |address| is_code(rustix::fd::AsFd::as_fd(&fd), address);
        let function = a_single_mapping_is_asked_for as *const () as usize;
        let last = start as usize + 2 * PAGE;
        assert_eq!([function, last, 0].map(code), [Some(false), Some(false), None]);
        // SAFETY: within the range mapped above.
        unsafe { rustix::mm::mprotect(last as *mut _, PAGE, MprotectFlags::from_bits_retain(7)).unwrap() };
        assert_eq!(code(last), Some(true));
        let middle = start as usize + PAGE;
        let shared = Found::Mapping { range: middle..middle + PAGE, private_anonymous: false };
        assert_eq!(ask(middle), Some(shared));
        let Some(Found::Mapping { range, private_anonymous: true }) = ask(middle - PAGE) else { panic!() };
        assert_eq!(range.end, middle);
        let above = match ask(0) {
            Some(Found::Mapping { range, .. }) => range,
            other => panic!("{other:?}"),
        };
        assert!(above.start > 0);
        assert_eq!(ask(0xffff_8000_0000_0000), Some(Found::Nothing));
    }

    #[test]
    fn the_map_of_this_process_contains_this_function() {
        use rustix::fs::{Mode, OFlags};
        let fd = rustix::fs::open(c"/proc/self/maps", OFlags::RDONLY, Mode::empty()).unwrap();
        let mut buffer = MapsBuffer::new();
        let here = only_private_mappings_without_a_file_are_anonymous as *const () as usize;
        let mut found = 0;
        for_each(rustix::fd::AsFd::as_fd(&fd), &mut buffer, |mapping| {
            found += usize::from((mapping.start..mapping.end).contains(&here) && !mapping.anonymous);
        });
        assert_eq!(found, 1);
    }
}
