//! Memory for payloads, which may be refused.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed};
use std::io::{self, ErrorKind};

/// Zeroed bytes, as many as were ever asked for at a time.
#[derive(Default)]
pub(super) struct Buffer(Vec<u8>);

impl Buffer {
    /// At least so many; whatever they hold. The system gives memory as they are first touched, which is as far as data has really come in or
    /// gone out.
    ///
    /// # Errors
    /// There is no memory to be had.
    pub fn fit(&mut self, bytes: usize) -> io::Result<&mut [u8]> {
        if self.0.len() < bytes {
            self.0 = Vec::new();
            let layout = Layout::array::<u8>(bytes).map_err(|_| ErrorKind::OutOfMemory)?;
            // SAFETY: there are more than none.
            let start = unsafe { alloc_zeroed(layout) };
            if start.is_null() {
                return Err(ErrorKind::OutOfMemory.into());
            }
            // SAFETY: from the global allocator, of that size and alignment; zeroes are bytes.
            self.0 = unsafe { Vec::from_raw_parts(start, bytes, bytes) };
        }
        Ok(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_and_what_is_too_much_is_refused() {
        let mut buffer = Buffer::default();
        buffer.fit(100).unwrap().fill(7);
        assert_eq!(buffer.fit(50).unwrap().len(), 100);
        assert!(buffer.fit(5000).unwrap().iter().all(|byte| *byte == 0));
        assert_eq!(buffer.fit(isize::MAX as usize).unwrap_err().kind(), ErrorKind::OutOfMemory);
        assert_eq!(buffer.fit(64).unwrap().len(), 64, "what was there went first");
    }
}
