//! Whether the kernel may keep what it has of a file when that is opened again.
//!
//! It may, if the file is what it was when the kernel was last told to drop what it has. It does that only after it has had the answer to an
//! open, and another open may be answered before. So a version counts only once the kernel has asked for something else by a handle that it was
//! given so:
//!
//! | asked               | the file's version | answered  | known then       |
//! |---------------------|--------------------|-----------|------------------|
//! | open                | 2, before 1        | drop      | 2, not confirmed |
//! | open, by another    | 2                  | drop      | 2, not confirmed |
//! | read, by either     |                    |           | 2, confirmed     |
//! | open                | 2                  | may keep  | 2, confirmed     |

use crate::stamp::Stamp;

/// What is known of a file's pages in the kernel.
#[derive(Debug, Default)]
pub struct Kept {
    /// What the file was when the kernel was last told to drop what it has.
    stamp: Option<Stamp>,
    /// Of that version. From 1 on.
    number: u64,
    is_confirmed: bool,
}

impl Kept {
    /// The file is opened, and has this stamp, if that tells it from what it will be. Returns which number is to be confirmed; 0 if the kernel may keep
    /// what it has.
    pub fn open(&mut self, stamp: Option<Stamp>) -> u64 {
        if stamp.is_none() || stamp != self.stamp {
            *self = Kept { stamp, number: self.number + 1, is_confirmed: false };
        }
        if self.is_confirmed { 0 } else { self.number }
    }

    /// The kernel has done what it was told when it was given this number.
    pub fn confirm(&mut self, number: u64) {
        self.is_confirmed |= number == self.number;
    }

    /// Nothing that the kernel has of it is good for the next open.
    pub fn forget(&mut self) {
        *self = Kept { stamp: None, number: self.number, is_confirmed: false };
    }

    /// The file was changed by the kernel itself, which knows.
    pub fn follow(&mut self, stamp: Stamp) {
        self.stamp = self.stamp.map(|_| stamp);
    }
}
