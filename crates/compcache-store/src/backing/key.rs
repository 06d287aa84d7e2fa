//! The key of a backing: made by the system's random numbers, in locked memory, gone with the process.
//!
//! ChaCha20-Poly1305 (RFC 8439), from the crate chacha20poly1305. A nonce is the number of the flight, of which no two are the
//! same, and the place in its segment, so none is ever used twice with the key: 2^64 flights of a megabyte will not come to an
//! end. The page that holds the key is locked, is left out of core dumps, and reads as zeroes in a process that was copied by
//! fork, which then can neither read nor overwrite what is its parent's.
//!
//! While an object is sealed or opened the state of the cipher is on the stack, and the crate overwrites it afterwards; that
//! copy can get to a disk only if the stack is swapped out at that moment.

#![allow(unsafe_code)]

use core::ffi::c_void;
use core::sync::atomic::{Ordering, compiler_fence};

use chacha20poly1305::aead::AeadInOut;
use chacha20poly1305::{ChaCha20Poly1305, KeyInit};
use rustix::mm::Advice;
use rustix::rand::{GetRandomFlags, getrandom};

use super::record::TAG_BYTES;
use crate::error::StoreError;
use crate::page::PAGE_SIZE;
use crate::region::Region;

const KEY_BYTES: usize = 32;

/// What the page begins with.
#[repr(C)]
struct Secret {
    key: [u8; KEY_BYTES],
    /// Not zero; in a process copied by fork it is.
    is_here: u64,
}

pub(crate) struct Key {
    page: Region,
}

/// This process is a copy of the one that made the key.
#[derive(Debug)]
pub(crate) struct Forked;

/// What seals one thing and no other: the flight, and the byte in its segment.
#[derive(Clone, Copy)]
pub(crate) struct Once {
    pub flight: u64,
    pub within: u32,
}

impl Key {
    /// A new key.
    ///
    /// # Errors
    /// [`StoreError::KeyRefused`]: the system locks no memory (RLIMIT_MEMLOCK), or has no random numbers.
    pub fn new() -> Result<Key, StoreError> {
        let page = Region::reserve(PAGE_SIZE, PAGE_SIZE, true).map_err(|_| StoreError::KeyRefused)?;
        page.ensure(PAGE_SIZE).map_err(|_| StoreError::KeyRefused)?;
        for advice in [Advice::LinuxDontDump, Advice::LinuxWipeOnFork] {
            // SAFETY: the page is ours; the advice changes nothing for this process.
            unsafe { rustix::mm::madvise(page.base().as_ptr().cast::<c_void>(), PAGE_SIZE, advice) }
                .map_err(|_| StoreError::KeyRefused)?;
        }
        // SAFETY: the page is open, zeroed and aligned, and nobody else knows it yet.
        let secret = unsafe { &mut *page.base().as_ptr().cast::<Secret>() };
        let filled = getrandom(&mut secret.key[..], GetRandomFlags::empty());
        if filled != Ok(KEY_BYTES) {
            return Err(StoreError::KeyRefused);
        }
        secret.is_here = 1;
        Ok(Key { page })
    }

    /// The cipher, unless this process is a copy.
    fn cipher(&self) -> Result<ChaCha20Poly1305, Forked> {
        // SAFETY: the page is open for as long as `self` lives, and written to only by `new` and `drop`, which have it alone.
        let secret = unsafe { &*self.page.base().as_ptr().cast::<Secret>() };
        // Read through a pointer since fork changes it behind the compiler's back.
        // SAFETY: as above.
        match unsafe { (&raw const secret.is_here).read_volatile() } {
            0 => Err(Forked),
            _ => Ok(ChaCha20Poly1305::new((&secret.key).into())),
        }
    }

    /// Seals `bytes` where they are, and returns the tag. Nothing may ever be sealed again with the same `once`.
    pub fn seal(&self, once: Once, associated: &[u8], bytes: &mut [u8]) -> Result<[u8; TAG_BYTES], Forked> {
        let tag = self.cipher()?.encrypt_inout_detached(&nonce(once).into(), associated, bytes.into());
        // It refuses only more than 256 GiB.
        tag.map(Into::into).map_err(|_| Forked)
    }

    /// Opens `bytes` where they are. `false`: they are not what was sealed so, and hold nothing of value.
    pub fn open(&self, once: Once, associated: &[u8], bytes: &mut [u8], tag: &[u8; TAG_BYTES]) -> bool {
        self.cipher().is_ok_and(|cipher| {
            cipher.decrypt_inout_detached(&nonce(once).into(), associated, bytes.into(), tag.into()).is_ok()
        })
    }
}

fn nonce(Once { flight, within }: Once) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&flight.to_le_bytes());
    nonce[8..].copy_from_slice(&within.to_le_bytes());
    nonce
}

impl Drop for Key {
    fn drop(&mut self) {
        // SAFETY: the page is open and ours alone, since `self` is borrowed mutably.
        unsafe { self.page.base().as_ptr().cast::<[u8; KEY_BYTES]>().write_volatile([0; KEY_BYTES]) };
        compiler_fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONCE: Once = Once { flight: 5, within: 64 };

    #[test]
    fn what_is_sealed_opens_only_as_it_was_sealed() {
        let key = Key::new().unwrap();
        let page: [u8; 4096] = core::array::from_fn(|at| (at * 7) as u8);
        let mut sealed = page;
        let tag = key.seal(ONCE, b"pool 1", &mut sealed).unwrap();
        assert!(sealed != page);
        let opens = |once, associated: &[u8], mut bytes: [u8; 4096], tag: &[u8; TAG_BYTES]| {
            let opened = key.open(once, associated, &mut bytes, tag);
            assert!(!opened || bytes == page);
            opened
        };
        assert!(opens(ONCE, b"pool 1", sealed, &tag));
        assert!(!opens(ONCE, b"pool 2", sealed, &tag));
        assert!(!opens(Once { flight: 6, ..ONCE }, b"pool 1", sealed, &tag));
        assert!(!opens(Once { within: 72, ..ONCE }, b"pool 1", sealed, &tag));
        for bit in (0..4096 * 8).step_by(61) {
            let mut damaged = sealed;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(!opens(ONCE, b"pool 1", damaged, &tag), "bit {bit}");
        }
        for bit in 0..TAG_BYTES * 8 {
            let mut damaged = tag;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(!opens(ONCE, b"pool 1", sealed, &damaged), "bit {bit} of the tag");
        }
        assert!(!{ Key::new().unwrap() }.open(ONCE, b"pool 1", &mut sealed.clone(), &tag), "another key");
    }

    #[test]
    fn a_process_copied_by_fork_has_no_key() {
        let key = Key::new().unwrap();
        let mut bytes = *b"a page";
        let tag = key.seal(ONCE, b"", &mut bytes).unwrap();
        // SAFETY: the child calls nothing that needs other threads, and ends.
        let child = unsafe { libc_fork() };
        if child == 0 {
            let right = key.seal(Once { flight: 9, ..ONCE }, b"", &mut [0; 4]).is_err()
                && !key.open(ONCE, b"", &mut bytes, &tag);
            // SAFETY: ends this process alone.
            unsafe { libc_exit(i32::from(!right)) };
        }
        let pid = rustix::process::Pid::from_raw(child).expect("fork succeeds");
        let (_, status) = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(0), "the child had the key");
        assert!(key.open(ONCE, b"", &mut bytes, &tag) && bytes == *b"a page");
    }

    unsafe extern "C" {
        #[link_name = "fork"]
        fn libc_fork() -> i32;
        #[link_name = "_exit"]
        fn libc_exit(status: i32) -> !;
    }
}
