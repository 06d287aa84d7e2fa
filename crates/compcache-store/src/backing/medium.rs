//! What a backing is written to: bytes at offsets, and three ways to fail.
//!
//! The store does no other input and output than this. [`FileMedium`](crate::FileMedium) is the one that is used; tests have
//! one that lies. Calls come from any number of threads, each for whole blocks of 4096 bytes in memory that is aligned to
//! them. Nothing that a medium returns is believed: it is sealed.

/// Bytes at offsets: a file, or a block device.
pub trait Medium: Send + Sync {
    /// Reads all of `into`.
    ///
    /// # Errors
    /// Why not; `into` holds nothing of value.
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediumError>;

    /// Writes all of `from`. Need not be lasting: what is on a backing is worthless without the process.
    ///
    /// # Errors
    /// Why not. What is there afterwards is not defined.
    fn write_at(&self, offset_bytes: u64, from: &[u8]) -> Result<(), MediumError>;

    /// Has a range take its room, so that it is there when it is written, without writing it.
    ///
    /// # Errors
    /// There is none, or that cannot be done.
    fn fill(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<(), MediumError> {
        Ok(())
    }

    /// Gives the room of a range back, which reads as anything afterwards. A wish: what cannot do it does nothing.
    fn punch(&self, offset_bytes: u64, length_bytes: u64);
}

/// Why a medium did not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediumError {
    /// There is no room left where it lies.
    #[error("no space is left where the backing lies")]
    NoSpace,
    /// It ends before something that was written to it.
    #[error("the backing is shorter than what was written to it: somebody has truncated it")]
    Short,
    /// This process was copied by fork from the one whose backing it is, and must not write there.
    #[error("the backing belongs to the process that this one is a copy of")]
    Forked,
    /// The system says so.
    #[error("the backing failed with errno {errno}")]
    System {
        /// What it said.
        errno: i32,
    },
}
