//! Errors as the kernel takes them.
//!
//! An errno from 512 on is the kernel's own, and not for programs. Some file systems let one out all the same (NFS says ENOTSUPP, 524, where its
//! server cannot do something), and programs are told it as it is. An answer with such a number is refused: through /dev/fuse it counts as
//! not given, and who asked waits until the connection ends, whatever signal he is sent.

use rustix::io::Errno;

/// The first that the kernel refuses, `ERESTARTSYS`.
const REFUSED_MIN: i32 = 512;
const ENOTSUPP: i32 = 524;

/// What an errno from below is called in an answer: itself, or the nearest that the kernel takes.
#[must_use]
pub fn told(errno: i32) -> i32 {
    match errno {
        1..REFUSED_MIN => errno,
        ENOTSUPP => Errno::OPNOTSUPP.raw_os_error(),
        _ => Errno::IO.raw_os_error(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_is_told_that_the_kernel_refuses() {
        assert!((1..512).all(|errno| told(errno) == errno));
        assert_eq!(told(524), Errno::OPNOTSUPP.raw_os_error());
        for refused in [i32::MIN, -5, 0, 512, 521, 523, 525, 4095, i32::MAX] {
            assert_eq!(told(refused), Errno::IO.raw_os_error(), "{refused}");
        }
    }
}
