//! The one seam: byte ranges in, bytes out.
//!
//! A transport knows a [`BlockDevice`] and nothing below it; a device knows nothing of transports. Whoever serves
//! requests makes a [`Lane`] on each thread that does: it owns what the thread needs (codec contexts, buffers), so that
//! serving a request allocates nothing (tests/allocation.rs) and takes no lock that another lane's request holds for long.
//!
//! | outcome                | what was done            | what the caller does                                  |
//! |------------------------|--------------------------|-------------------------------------------------------|
//! | `Ok(Done)`             | all of it                | answers                                               |
//! | `Ok(MustWait)`         | perhaps a part           | makes the same request from a thread that may wait    |
//! | `Err(_)`               | perhaps a part, unless it says otherwise | answers with [`DeviceError::errno`]    |
//!
//! `MustWait` comes only where [`Manner::may_wait`] is false. A transport asks that way first, so that a request which
//! needs a slow medium is moved aside and the others go on.
//!
//! What holds for every device:
//! - A request that reaches beyond the end is refused before anything is touched.
//! - Blocks never written, and blocks discarded, read as zeroes.
//! - A write that was answered is seen by every later read, through whichever lane.
//! - Writes of parts of one block do not undo each other, and neither do they undo a write of all of it.
//! - Two requests in flight for the same bytes may take effect in either order, block by block.

use std::sync::Arc;

use compcache_store::PAGE_SIZE;

use crate::error::DeviceError;

/// Bytes in a block: a page. Sizes are multiples of it, and requests that are, are the fast ones.
pub const BLOCK_BYTES: usize = PAGE_SIZE;

/// Something that holds bytes at offsets, as a disk does.
pub trait BlockDevice: Send + Sync {
    /// The size now, in bytes: a multiple of [`BLOCK_BYTES`]. May change while lanes are in use; each request is held
    /// against the size it finds.
    fn size_bytes(&self) -> u64;

    /// The smallest request that a block device for it takes, in bytes; lanes take any. File systems are made for one size, and refuse
    /// devices of a larger one. 512 to [`BLOCK_BYTES`]; does not change.
    fn sector_bytes(&self) -> u32 {
        BLOCK_BYTES as u32
    }

    /// Whether a flush can make anything more lasting than it is when it is answered. Where it cannot, a transport may spare
    /// its users the way: a file system asks for two with each write that it waits for.
    fn needs_flush(&self) -> bool {
        true
    }

    /// Whether zeroes are always written sooner than as many bytes of data. Where they may not be, a client that would write zeroes
    /// before its data, if only that is quick, must not be told that it is.
    fn zeroes_quickly(&self) -> bool {
        true
    }

    /// What one thread needs to make requests. Takes all its memory here.
    ///
    /// # Errors
    /// [`DeviceError::MemoryRefused`]: there is no lane, and the device is as it was.
    fn lane(self: Arc<Self>) -> Result<Box<dyn Lane>, DeviceError>;
}

/// One thread's way to a device; it may be made by another thread. Offsets and lengths are in bytes, at any alignment; whole blocks are the fast path.
///
/// Every method fails with [`DeviceError::BeyondEnd`] before anything is touched (if the device shrinks in that moment, perhaps
/// after a part), or with what the device says. After any
/// other error, and after [`Outcome::MustWait`], each block of the range is as it was or as it was asked to be; making the
/// same request again does all of it.
pub trait Lane: Send {
    /// Reads `into.len()` bytes. After an error the buffer holds nothing of value.
    fn read(&mut self, offset_bytes: u64, into: &mut [u8], manner: Manner) -> Result<Outcome, DeviceError>;

    /// Writes `from`.
    fn write(&mut self, offset_bytes: u64, from: &[u8], manner: Manner) -> Result<Outcome, DeviceError>;

    /// Makes everything answered before as lasting as the device can. What is kept in RAM lasts as long as its process,
    /// flushed or not; each device says what it does.
    fn flush(&mut self, manner: Manner) -> Result<Outcome, DeviceError>;

    /// Forgets the whole blocks in the range, which read as zeroes from then on. Parts of blocks at its edges stay.
    fn discard(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome, DeviceError>;

    /// Makes the range read as zeroes, edges too.
    fn write_zeroes(
        &mut self,
        offset_bytes: u64,
        length_bytes: u64,
        zeroes: Zeroes,
        manner: Manner,
    ) -> Result<Outcome, DeviceError>;

    /// What lies at `offset_bytes`, and how far it goes on, within `length_bytes`: at least so far. What is written at the
    /// same time may or may not be seen. A range of no length is an extent of no length.
    fn extent(&mut self, offset_bytes: u64, length_bytes: u64, manner: Manner) -> Result<Outcome<Extent>, DeviceError>;
}

/// How a request is to be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Manner {
    /// The thread may block on a slow medium. If not, the answer then is [`Outcome::MustWait`].
    pub may_wait: bool,
    /// Forced unit access: what is written lasts, as after a flush, before it is answered. Means nothing for reads.
    pub fua: bool,
}

impl Manner {
    /// Without waiting for a slow medium, and without forced unit access.
    pub const AT_ONCE: Manner = Manner { may_wait: false, fua: false };
    /// Waiting as long as it takes, without forced unit access.
    pub const WAITING: Manner = Manner { may_wait: true, fua: false };
}

/// What became of a request that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<T = ()> {
    /// It is done.
    Done(T),
    /// It needs a slow medium, and the thread may not wait for one. Make it again where waiting is allowed.
    MustWait,
}

/// What [`Lane::write_zeroes`] leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroes {
    /// Blocks may be forgotten, since those that are absent read as zeroes.
    MayBeHoles,
    /// Blocks are kept, holding zeroes, so that they count as data.
    AreData,
}

/// A stretch that is all of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How far it reaches from the offset asked about.
    pub length_bytes: u64,
    /// Nothing is stored there; it reads as zeroes.
    pub is_hole: bool,
}

/// The kinds of requests, for messages and for choosing among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    /// [`Lane::read`].
    Read,
    /// [`Lane::write`].
    Write,
    /// [`Lane::flush`].
    Flush,
    /// [`Lane::discard`].
    Discard,
    /// [`Lane::write_zeroes`].
    WriteZeroes,
    /// [`Lane::extent`].
    Extent,
}

/// Refuses a range that is not inside a device of `size_bytes`. An empty range at the end is inside.
///
/// # Errors
/// [`DeviceError::BeyondEnd`].
pub fn check_range(request: Request, offset_bytes: u64, length_bytes: u64, size_bytes: u64) -> Result<(), DeviceError> {
    match offset_bytes.checked_add(length_bytes) {
        Some(end) if end <= size_bytes => Ok(()),
        _ => Err(DeviceError::BeyondEnd { request, offset_bytes, length_bytes, size_bytes }),
    }
}

/// Refuses a size no device has.
///
/// # Errors
/// [`DeviceError::BadSize`].
pub fn check_size(size_bytes: u64, size_bytes_max: u64) -> Result<(), DeviceError> {
    if size_bytes.is_multiple_of(BLOCK_BYTES as u64) && size_bytes <= size_bytes_max {
        return Ok(());
    }
    Err(DeviceError::BadSize { size_bytes, size_bytes_max })
}
