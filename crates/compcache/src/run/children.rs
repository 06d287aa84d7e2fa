//! What the kernel says of processes that have ended.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// The largest resident memory that one of the children had at a time, or of theirs, file pages and shared memory included; bytes. Of those that were waited for.
pub fn max_rss_bytes() -> u64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: it is written to, and zeroes are one as well.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    // The kernel says KiB.
    (usage.ru_maxrss as u64) << 10
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_child_and_its_memory_are_seen_when_it_has_ended() {
        let held = "head -c 60000000 /dev/zero | sh -c 'all=$(tr \"\\0\" x); echo ${#all}' | grep -q 60000000";
        assert!(Command::new("sh").args(["-c", held]).status().unwrap().success());
        assert!(max_rss_bytes() > 55 << 20, "{}", max_rss_bytes());
    }
}
