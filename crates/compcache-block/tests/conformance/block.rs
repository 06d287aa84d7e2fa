//! The suite over a block device of the machine's: what its users see of the device behind it, through the kernel.
//!
//! | asked                              | how                                                                        |
//! |------------------------------------|----------------------------------------------------------------------------|
//! | reads, writes of whole blocks      | direct I/O; forced unit access as RWF_DSYNC                                 |
//! | reads, writes of parts of blocks   | the page cache: written out at once, and dropped before and after, so that  |
//! |                                    | the device is asked each time                                              |
//! | discard                            | BLKDISCARD for the whole blocks of the range                                |
//! | zeroes                             | BLKZEROOUT (data) or fallocate (holes), and writes of zeroes at the edges   |
//! | the size                           | where a seek to the end arrives                                             |
//!
//! Beyond the end nothing reaches the device: the kernel answers, and cuts off what begins before it. What is cut off is
//! called an error here, with the errno of a device that is asked for such a thing itself.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use compcache_block::fuse_loop::{FuseLoop, FuseLoopOptions};
use compcache_block::{BLOCK_BYTES, BlockDevice, Fault, Faulty, Request, Zeroes};
use compcache_testkit::features::Feature;
use rustix::fs::{Advice, FallocateFlags, OFlags, SeekFrom, fadvise, fallocate, fdatasync, seek};
use rustix::io::{Errno, ReadWriteFlags, pwritev2};
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use tempfile::TempDir;

use crate::Subject;
use crate::front::{Asked, Front, Talk};
use compcache_cache::Aligned;

const BLOCK: u64 = BLOCK_BYTES as u64;
const BLKDISCARD: Opcode = opcode::none(0x12, 119);
const BLKZEROOUT: Opcode = opcode::none(0x12, 127);

/// A device that is served as a block device; taken away when dropped.
pub trait Node: Send + Sync + Sized {
    /// What serving one takes.
    const NEEDS: &'static [Feature];
    /// What it takes to change its size then.
    const RESIZES: &'static [Feature] = &[];
    /// What the kernel hands on as the device says it; of other requests it says that they failed.
    const TOLD_OF: &'static [Request] = &[Request::Read, Request::Write];
    fn serve(device: Arc<dyn BlockDevice>) -> Self;
    /// Its node in /dev.
    fn path(&self) -> &Path;
    /// Has the block device take the size that the device has now.
    fn resized(&self);
}

/// `/dev/loopN`, over a file of FUSE's.
pub struct Loop {
    // Dropped in this order.
    served: FuseLoop,
    _parent: TempDir,
}

impl Node for Loop {
    const NEEDS: &'static [Feature] = &[Feature::Root, Feature::Fuse, Feature::Loop];

    fn serve(device: Arc<dyn BlockDevice>) -> Loop {
        let parent = tempfile::tempdir().unwrap();
        let options = FuseLoopOptions {
            directory: parent.path().to_owned(),
            threads: 2.try_into().unwrap(),
            waiting_threads: 1.try_into().unwrap(),
            all_at_once: true,
        };
        Loop { served: FuseLoop::serve(device, &options).unwrap(), _parent: parent }
    }

    fn path(&self) -> &Path {
        self.served.path()
    }

    fn resized(&self) {
        self.served.resized().unwrap();
    }
}

/// A block device, with the kernel in front of it.
pub struct Block<N>(N);

impl<N: Node> Front for Block<N> {
    const NEEDS: &'static [Feature] = N::NEEDS;
    const RESIZES: &'static [Feature] = N::RESIZES;
    const ONE_FOR_ONE: bool = false;
    // EINVAL, EOPNOTSUPP, EOVERFLOW: words of the block layer of some kernels, EIO on others.
    const ERRNOS: &'static [i32] = &[1, 5, 12, 28, 108, 122];

    fn serve(device: Arc<dyn BlockDevice>) -> Block<N> {
        Block(N::serve(device))
    }

    fn talk(&self) -> Box<dyn Talk> {
        let open = |flags: OFlags| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).custom_flags(flags.bits() as i32).open(self.0.path()).unwrap()
        };
        let (direct, cached) = (open(OFlags::DIRECT), open(OFlags::empty()));
        // Else the page cache would hold neighbours that others change by direct I/O at the same time.
        fadvise(&cached, 0, None, Advice::Random).unwrap();
        Box::new(BlockTalk { direct, cached })
    }

    fn resized(&self) {
        self.0.resized();
    }

    /// The block layer has few words, and the page cache one.
    fn told(asked: Asked, errno: i32) -> Result<(), i32> {
        let [nospc, nomem, io] = [Errno::NOSPC, Errno::NOMEM, Errno::IO].map(Errno::raw_os_error);
        let has_a_word = errno == nospc || errno == nomem;
        let through = N::TOLD_OF.contains(&asked.request) && asked.whole_blocks;
        Err(if has_a_word && through { errno } else { io })
    }
}

struct BlockTalk {
    direct: File,
    cached: File,
}

/// Whether direct I/O takes it.
fn is_whole(offset: u64, length: u64) -> bool {
    offset.is_multiple_of(BLOCK) && length.is_multiple_of(BLOCK)
}

/// The whole blocks of a range, if there are any.
fn whole_blocks(offset: u64, length: u64) -> Option<[u64; 2]> {
    let first = offset.next_multiple_of(BLOCK);
    let end = (offset + length) / BLOCK * BLOCK;
    (first < end).then(|| [first, end - first])
}

/// The errno; `cut_off` for what the kernel has cut off at the end.
fn answer(result: io::Result<()>, cut_off: Errno) -> Result<(), i32> {
    result.map_err(|error| match error.raw_os_error() {
        Some(errno) => errno,
        None if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::WriteZero) => {
            cut_off.raw_os_error()
        }
        None => panic!("{error}"),
    })
}

impl BlockTalk {
    fn forget(&self, offset: u64, length: u64) {
        // Whole pages alone are dropped.
        let (first, end) = (offset / BLOCK * BLOCK, (offset + length).next_multiple_of(BLOCK));
        fadvise(&self.cached, first, (end - first).try_into().ok(), Advice::DontNeed).unwrap();
    }

    fn write_cached(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.forget(offset, from.len() as u64);
        let written = self.cached.write_all_at(from, offset);
        // What was taken before it failed is written out as well: nothing may come later.
        let synced = fdatasync(&self.cached);
        self.forget(offset, from.len() as u64);
        written.and(synced.map_err(Into::into))
    }

    fn write_direct(&self, offset: u64, from: &[u8], fua: bool) -> io::Result<()> {
        let mut bytes = Aligned::new(from.len());
        bytes.bytes().copy_from_slice(from);
        let flags = if fua { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
        let mut at = 0;
        while at < from.len() {
            match pwritev2(&self.direct, &[IoSlice::new(&bytes.bytes()[at..])], offset + at as u64, flags)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                some => at += some,
            }
        }
        Ok(())
    }

    /// A request of the block layer's for a range of whole blocks.
    fn ask<const REQUEST: Opcode>(&self, range: [u64; 2]) -> io::Result<()> {
        // SAFETY: both requests read two numbers, an offset and a length, which `Setter` holds until after the call. The
        // worst they can do is to the contents of the disk, which is this test's.
        unsafe { ioctl(self.direct.as_fd(), Setter::<REQUEST, [u64; 2]>::new(range)) }.map_err(Into::into)
    }
}

impl Talk for BlockTalk {
    fn size_bytes(&mut self) -> u64 {
        seek(&self.direct, SeekFrom::End(0)).unwrap()
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), i32> {
        let length = into.len();
        let result = if is_whole(offset, length as u64) {
            let mut bytes = Aligned::new(length);
            let result = self.direct.read_exact_at(bytes.bytes(), offset);
            into.copy_from_slice(bytes.bytes());
            result
        } else {
            self.forget(offset, length as u64);
            self.cached.read_exact_at(into, offset)
        };
        answer(result, Errno::INVAL)
    }

    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), i32> {
        let whole = is_whole(offset, from.len() as u64);
        let result = if whole { self.write_direct(offset, from, fua) } else { self.write_cached(offset, from) };
        answer(result, Errno::NOSPC)
    }

    fn flush(&mut self) -> Result<(), i32> {
        answer(fdatasync(&self.direct).map_err(Into::into), Errno::IO)
    }

    fn discard(&mut self, offset: u64, length: u64) -> Result<(), i32> {
        let Some(range) = whole_blocks(offset, length) else { return Ok(()) };
        answer(self.ask::<BLKDISCARD>(range), Errno::INVAL)
    }

    fn write_zeroes(&mut self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), i32> {
        let Some([first, middle]) = whole_blocks(offset, length) else {
            return answer(self.write_cached(offset, &vec![0; length as usize]), Errno::NOSPC);
        };
        for (from, to) in [(offset, first), (first + middle, offset + length)] {
            if from < to {
                answer(self.write_cached(from, &vec![0; (to - from) as usize]), Errno::NOSPC)?;
            }
        }
        let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let result = match zeroes {
            Zeroes::AreData => self.ask::<BLKZEROOUT>([first, middle]),
            Zeroes::MayBeHoles => fallocate(&self.direct, holes, first, middle).map_err(Into::into),
        };
        answer(result, Errno::NOSPC)
    }

    /// A block device does not say what of it is empty.
    fn extents(&mut self, _: u64, _: u64) -> Option<Result<Vec<(u64, bool)>, i32>> {
        None
    }
}

/// In place of the suite's test of the end: here the kernel keeps it, so that the device is not even asked.
pub fn beyond_the_end_nothing_reaches_the_device<F: Front>(subject: Subject) {
    let size = subject.device.size_bytes();
    // It would fail, and count, whatever it is asked for.
    let all = [Request::Read, Request::Write, Request::Discard, Request::WriteZeroes];
    let fault = |request| Fault { request, offsets_bytes: size..u64::MAX, one_in: 1, errno: 5 };
    let faulty = Arc::new(Faulty::new(subject.device, 1, all.map(fault).to_vec()));
    let front = F::serve(faulty.clone());
    let mut talk = front.talk();
    let mut last = [7; 8192];
    talk.write(size - 8192, &last, false).unwrap();
    for offset in [size, size + 4096, size + 1000, 1 << 40] {
        assert_eq!(talk.read(offset, &mut [0; 4096]), Err(22), "read at {offset}");
        assert_eq!(talk.write(offset, &[9; 4096], false), Err(28), "write at {offset}");
    }
    for offset in [size - 4096, size] {
        assert_eq!(talk.discard(offset, 8192), Err(22), "discard at {offset}");
        assert_eq!(talk.write_zeroes(offset, 8192, Zeroes::AreData), Err(22), "zeroes at {offset}");
    }
    talk.read(size - 8192, &mut last).unwrap();
    assert_eq!(last, [7; 8192], "a request that was refused has touched something");
    // What begins before the end is done up to there.
    assert_eq!(talk.write(size - 4096, &[9; 8192], false), Err(28));
    assert_eq!(talk.read(size - 4096, &mut last), Err(22));
    talk.read(size - 4096, &mut last[4096..]).unwrap();
    assert_eq!(last[4096..], [9; 4096]);
    assert_eq!(faulty.failed(), 0, "the device was asked for what it does not have");
}
