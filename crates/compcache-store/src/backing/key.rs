//! The key of a backing: made by the system's random numbers, in locked memory, gone with the process.
//!
//! AES-256-GCM where the processor has instructions for it, else ChaCha20-Poly1305 (RFC 5116, RFC 8439), from the crate ring. A
//! nonce is the number of the flight, of which no two are the same, and the place in its segment, so none is ever used twice with
//! the key: 2^64 flights of a megabyte will not come to an end. The page that holds the key, and all that is computed of it
//! beforehand, is locked, is left out of core dumps, and reads as zeroes in a process that was copied by fork, which then can
//! neither read nor overwrite what is its parent's; unless it was made for copies ([`super::lineage`]), which have it too, in a page
//! that they lock as well.
//!
//! While the key is made it is on the stack, which is overwritten afterwards; that copy can get to a disk only if the stack
//! is swapped out at that moment.

#![allow(unsafe_code)]

use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, Ordering, compiler_fence};

use ring::aead::{AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use rustix::mm::Advice;
use rustix::rand::{GetRandomFlags, getrandom};

use super::record::TAG_BYTES;
use crate::error::StoreError;
use crate::page::PAGE_SIZE;
use crate::region::Region;

const KEY_BYTES: usize = 32;
/// More than making a key takes of the stack.
const STACK_BYTES: usize = 8 << 10;

/// What the page begins with.
#[repr(C)]
struct Secret {
    /// Not zero; in a process copied by fork it is.
    is_here: u64,
    /// There as long as `is_here` is not zero. It has no memory elsewhere.
    key: MaybeUninit<LessSafeKey>,
}

const _: () = assert!(size_of::<Secret>() <= PAGE_SIZE);

/// What the next page begins with, which reads as zeroes in every copy of the process.
#[repr(C)]
struct Sealer {
    /// Whether this process may seal: a copy has the numbers of its parent's flights, too, and would use them once more.
    may_seal: AtomicU32,
}

/// The page of the secret, and that of the sealer.
const KEY_PAGES_BYTES: usize = 2 * PAGE_SIZE;

pub(crate) struct Key {
    pages: Region,
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

/// What is quickest on this processor.
fn algorithm() -> &'static Algorithm {
    #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
    cpufeatures::new!(instructions, "aes", "pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    cpufeatures::new!(instructions, "aes");
    #[cfg(any(target_arch = "x86", target_arch = "x86_64", target_arch = "aarch64"))]
    if instructions::get() {
        return &AES_256_GCM;
    }
    &CHACHA20_POLY1305
}

/// A new key of random bytes.
#[inline(never)]
fn random_key(algorithm: &'static Algorithm) -> Option<LessSafeKey> {
    let mut bytes = [0; KEY_BYTES];
    let filled = getrandom(&mut bytes[..], GetRandomFlags::empty());
    UnboundKey::new(algorithm, &bytes).ok().filter(|_| filled == Ok(KEY_BYTES)).map(LessSafeKey::new)
}

/// Overwrites what calls have left on the stack below the caller.
#[inline(never)]
fn wipe_stack() {
    let mut left = MaybeUninit::<[u8; STACK_BYTES]>::uninit();
    // SAFETY: our own variable; volatile, since nobody reads it.
    unsafe { left.as_mut_ptr().write_volatile([0; STACK_BYTES]) };
    compiler_fence(Ordering::SeqCst);
}

impl Key {
    /// A new key; wiped in copies of the process, or theirs as well.
    ///
    /// # Errors
    /// [`StoreError::KeyRefused`]: the system locks no memory (RLIMIT_MEMLOCK), or has no random numbers.
    pub fn new(is_wiped: bool) -> Result<Key, StoreError> {
        let key = Key::with(algorithm(), is_wiped);
        wipe_stack();
        key
    }

    #[inline(never)]
    fn with(algorithm: &'static Algorithm, is_wiped: bool) -> Result<Key, StoreError> {
        let pages = Region::reserve(KEY_PAGES_BYTES, KEY_PAGES_BYTES, true).map_err(|_| StoreError::KeyRefused)?;
        pages.ensure(KEY_PAGES_BYTES).map_err(|_| StoreError::KeyRefused)?;
        let wiped = if is_wiped { 0..KEY_PAGES_BYTES } else { PAGE_SIZE..KEY_PAGES_BYTES };
        for (range, advice) in [(0..KEY_PAGES_BYTES, Advice::LinuxDontDump), (wiped, Advice::LinuxWipeOnFork)] {
            let start = pages.base().as_ptr().wrapping_add(range.start).cast::<c_void>();
            // SAFETY: the pages are ours; the advice changes nothing for this process.
            unsafe { rustix::mm::madvise(start, range.len(), advice) }.map_err(|_| StoreError::KeyRefused)?;
        }
        // SAFETY: the page is open, zeroed and aligned, and nobody else knows it yet.
        let secret = unsafe { &mut *pages.base().as_ptr().cast::<Secret>() };
        secret.key.write(random_key(algorithm).ok_or(StoreError::KeyRefused)?);
        secret.is_here = 1;
        let key = Key { pages };
        key.sealer().may_seal.store(1, Ordering::Relaxed);
        Ok(key)
    }

    /// In a copy of the process that has flights of its own: it may seal from here on. A copy inherits no locks of memory; where the
    /// system locks none any more, the key stays as it is.
    pub fn begin_copy(&self) {
        // SAFETY: the pages are ours; their content does not change.
        let _ = unsafe { rustix::mm::mlock(self.pages.base().as_ptr().cast::<c_void>(), KEY_PAGES_BYTES) };
        self.sealer().may_seal.store(1, Ordering::Relaxed);
    }

    /// Whether this process may seal, and write: not in a copy before [`Key::begin_copy`].
    pub fn may_seal(&self) -> bool {
        self.sealer().may_seal.load(Ordering::Relaxed) != 0
    }

    fn sealer(&self) -> &Sealer {
        // SAFETY: the page is open for as long as `self` lives, and aligned; any content is one of `Sealer`.
        unsafe { &*self.pages.base().as_ptr().add(PAGE_SIZE).cast::<Sealer>() }
    }

    /// The key itself, unless this process is a copy.
    fn secret(&self) -> Result<&LessSafeKey, Forked> {
        // SAFETY: the page is open for as long as `self` lives, and written to only by `with` and `drop`, which have it alone.
        let secret = unsafe { &*self.pages.base().as_ptr().cast::<Secret>() };
        // Read through a pointer since fork changes it behind the compiler's back.
        // SAFETY: as above.
        match unsafe { (&raw const secret.is_here).read_volatile() } {
            0 => Err(Forked),
            // SAFETY: it is there.
            _ => Ok(unsafe { secret.key.assume_init_ref() }),
        }
    }

    /// Seals `bytes` where they are, and returns the tag. Nothing may ever be sealed again with the same `once`.
    pub fn seal(&self, once: Once, associated: &[u8], bytes: &mut [u8]) -> Result<[u8; TAG_BYTES], Forked> {
        if !self.may_seal() {
            return Err(Forked);
        }
        let tag = self.secret()?.seal_in_place_separate_tag(nonce(once), Aad::from(associated), bytes);
        // It refuses only more than 64 GiB.
        tag.ok().and_then(|tag| tag.as_ref().try_into().ok()).ok_or(Forked)
    }

    /// Opens `bytes` where they are. `false`: they are not what was sealed so, and hold nothing of value.
    pub fn open(&self, once: Once, associated: &[u8], bytes: &mut [u8], tag: &[u8; TAG_BYTES]) -> bool {
        self.secret().is_ok_and(|secret| {
            secret.open_in_place_separate_tag(nonce(once), Aad::from(associated), (*tag).into(), bytes, 0..).is_ok()
        })
    }
}

fn nonce(Once { flight, within }: Once) -> Nonce {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&flight.to_le_bytes());
    nonce[8..].copy_from_slice(&within.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

impl Drop for Key {
    fn drop(&mut self) {
        // SAFETY: the page is open and ours alone, since `self` is borrowed mutably; what was in it needs no dropping.
        unsafe { self.pages.base().as_ptr().cast::<[u8; PAGE_SIZE]>().write_volatile([0; PAGE_SIZE]) };
        compiler_fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONCE: Once = Once { flight: 5, within: 64 };

    #[test]
    fn what_is_sealed_opens_only_as_it_was_sealed() {
        for algorithm in [&AES_256_GCM, &CHACHA20_POLY1305] {
            opens_only_as_it_was_sealed(&Key::with(algorithm, true).unwrap());
        }
    }

    fn opens_only_as_it_was_sealed(key: &Key) {
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
        assert!(!{ Key::new(true).unwrap() }.open(ONCE, b"pool 1", &mut sealed.clone(), &tag), "another key");
    }

    /// Whether this is so in a copy of the process.
    fn is_so_after_fork(what: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child calls nothing that needs other threads, and ends.
        let child = unsafe { libc_fork() };
        if child == 0 {
            let status = i32::from(!what());
            // SAFETY: ends this process alone.
            unsafe { libc_exit(status) };
        }
        let pid = rustix::process::Pid::from_raw(child).expect("fork succeeds");
        let (_, status) = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap().unwrap();
        status.exit_status() == Some(0)
    }

    #[test]
    fn a_process_copied_by_fork_has_no_key() {
        let key = Key::new(true).unwrap();
        let mut bytes = *b"a page";
        let tag = key.seal(ONCE, b"", &mut bytes).unwrap();
        let other = Once { flight: 9, ..ONCE };
        assert!(is_so_after_fork(|| {
            key.seal(other, b"", &mut [0; 4]).is_err() && !key.open(ONCE, b"", &mut bytes.clone(), &tag)
        }));
        assert!(key.open(ONCE, b"", &mut bytes, &tag) && bytes == *b"a page");
    }

    #[test]
    fn a_copy_that_has_the_key_opens_with_it_and_seals_only_from_when_it_is_told_to() {
        let key = Key::new(false).unwrap();
        let mut bytes = *b"a page";
        let tag = key.seal(ONCE, b"", &mut bytes).unwrap();
        let other = Once { flight: 9, ..ONCE };
        assert!(is_so_after_fork(|| key.open(ONCE, b"", &mut bytes.clone(), &tag)));
        assert!(is_so_after_fork(|| key.seal(other, b"", &mut [0; 4]).is_err()));
        assert!(is_so_after_fork(|| {
            key.begin_copy();
            key.seal(other, b"", &mut [0; 4]).is_ok()
        }));
        assert!(key.may_seal());
    }

    unsafe extern "C" {
        #[link_name = "fork"]
        fn libc_fork() -> i32;
        #[link_name = "_exit"]
        fn libc_exit(status: i32) -> !;
    }
}
