//! Everything that can go wrong, grouped by what the caller can do about it.

use crate::backing::MediumError;
use crate::page::PageIndex;

/// Why the store did not do what it was asked. After every one of them the pool is as it was before the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store or the pool holds as much memory as it may and refuses until it has fallen to 90 % of its limit.
    /// Nothing was stored; what the page held before is still there. Discard, compact, write back, or raise the limit,
    /// and call again.
    #[error("limit reached: {used_bytes} bytes held of {limit_bytes}; nothing was stored")]
    LimitReached {
        /// Memory held when the page was refused.
        used_bytes: u64,
        /// The limit it was held against.
        limit_bytes: u64,
    },
    /// The system refused memory (overcommit, RLIMIT_AS, RLIMIT_MEMLOCK), or the reserved address range is full.
    /// Nothing was stored; the caller may go on as after [`StoreError::LimitReached`].
    #[error("the system refused {bytes} bytes of memory; nothing was stored")]
    MemoryRefused {
        /// How much was asked for.
        bytes: u64,
    },
    /// The object stored for this page is not what was written: its checksum does not match, or, on the backing, its seal. The page is lost and is
    /// never returned; the buffer of the failed read holds nothing of value. Discarding or writing the page ends the state.
    #[error("page {} is corrupt: the stored object does not match its checksum", index.0)]
    Corrupt {
        /// The page that is lost.
        index: PageIndex,
    },
    /// The page is on the backing, and that could not be read. It stays there; another attempt may succeed, and writing or
    /// discarding the page ends the state.
    #[error("page {} is on the backing and cannot be read: {error}", index.0)]
    BackingFailed {
        /// The page asked for.
        index: PageIndex,
        /// What the medium said.
        #[source]
        error: MediumError,
    },
    /// Segments are not whole pages or not 64 KiB to 16 MiB, or the backing has not four of them, or is larger than 512 GiB.
    #[error(
        "no backing of {capacity_bytes} bytes in segments of {segment_bytes}: at least four segments, of 64 KiB to 16 MiB in whole pages, at most 512 GiB"
    )]
    BackingRefused {
        /// The room asked for.
        capacity_bytes: u64,
        /// The segment asked for.
        segment_bytes: usize,
    },
    /// A key for a backing cannot be kept safe: the system locks no memory for this process (`ulimit -l`), or is too old.
    #[error("no memory can be locked for the key of a backing (ulimit -l)")]
    KeyRefused,
    /// The index is not below [`PageIndex::LIMIT`], or a range reaches beyond it.
    #[error("page index {} is out of range", index.0)]
    IndexOutOfRange {
        /// The index asked for.
        index: PageIndex,
    },
    /// A zstd level outside 1..=19 and -7..=-1, or a dictionary this store does not hold. The pool keeps its codec.
    #[error("no such codec: level out of range, or the dictionary belongs to another store")]
    NoSuchCodec,
    /// The dictionary is empty, too large, malformed, or the store already holds four. The store is unchanged.
    #[error("the dictionary cannot be used, or four are loaded already")]
    DictionaryRefused,
    /// A codec could not be set up or failed on data that it must accept: a fault in the library or in its memory.
    #[error("a codec failed where it must not")]
    CodecFailed,
}
