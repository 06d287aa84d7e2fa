//! zstd dictionaries: trained from samples, held by the store, used by number.
//!
//! A dictionary is digested once for each direction, into memory of our own; workers share it read-only. A store holds
//! four and never lets one go, since objects made with it may be anywhere.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, Ordering};

use zstd_safe::zstd_sys as sys;

use super::zstd::{is_level, parameters};
use crate::error::StoreError;
use crate::lock::Mutex;
use crate::page::{PAGE_SIZE, Page};
use crate::region::Region;

/// How many dictionaries a store can hold.
pub(crate) const DICTIONARIES_MAX: usize = 4;
/// The largest dictionary. More would not fit the caches that make a dictionary worth while.
pub(crate) const DICTIONARY_BYTES_MAX: usize = 128 << 10;

/// A dictionary in a store. Only means something to the store that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DictionaryId(pub(crate) u8);

/// Trains a dictionary of at most `bytes_max` (16 KiB is a good size for pages) from sample pages.
///
/// For setting up only: the trainer takes its memory from the C library's allocator and takes seconds for thousands of
/// samples, so it must not be called by a thread that others wait for, or inside a paged program.
///
/// # Errors
/// [`StoreError::DictionaryRefused`] when the samples are too few or too uniform (some hundreds of real pages are enough).
pub fn train_dictionary(samples: &[Page], bytes_max: usize) -> Result<Vec<u8>, StoreError> {
    let mut dictionary = vec![0u8; bytes_max.min(DICTIONARY_BYTES_MAX)];
    let sizes = vec![PAGE_SIZE; samples.len()];
    // SAFETY: all buffers are passed with their lengths: `samples` is one run of pages of the sizes given.
    let length = unsafe {
        sys::ZDICT_trainFromBuffer(
            dictionary.as_mut_ptr().cast::<c_void>(),
            dictionary.len(),
            samples.as_ptr().cast::<c_void>(),
            sizes.as_ptr(),
            samples.len() as u32,
        )
    };
    // SAFETY: arithmetic on a value.
    if unsafe { sys::ZDICT_isError(length) } != 0 {
        return Err(StoreError::DictionaryRefused);
    }
    dictionary.truncate(length);
    Ok(dictionary)
}

/// A digested dictionary.
pub(crate) struct Dictionary {
    _memory: Region,
    level: i8,
    compression: NonNull<sys::ZSTD_CDict>,
    decompression: NonNull<sys::ZSTD_DDict>,
}

impl Dictionary {
    fn digest(bytes: &[u8], level: i8) -> Result<Dictionary, StoreError> {
        let parameters = parameters(level, PAGE_SIZE, bytes.len());
        let by_copy = sys::ZSTD_dictLoadMethod_e::ZSTD_dlm_byCopy;
        // SAFETY: arithmetic on values.
        let (compression_bytes, decompression_bytes) = unsafe {
            (
                sys::ZSTD_estimateCDictSize_advanced(bytes.len(), parameters, by_copy).next_multiple_of(PAGE_SIZE),
                sys::ZSTD_estimateDDictSize(bytes.len(), by_copy).next_multiple_of(PAGE_SIZE),
            )
        };
        let memory = Region::reserve(compression_bytes + decompression_bytes, PAGE_SIZE, false)?;
        memory.ensure(compression_bytes + decompression_bytes)?;
        let kind = sys::ZSTD_dictContentType_e::ZSTD_dct_auto;
        let (from, length) = (bytes.as_ptr().cast::<c_void>(), bytes.len());
        let start = memory.base().as_ptr();
        // SAFETY: two disjoint ranges of open memory of our own, aligned to a page, which live as long as `memory`; the
        // dictionary's bytes are copied there.
        let (compression, decompression) = unsafe {
            let to = start.cast::<c_void>();
            let compression = sys::ZSTD_initStaticCDict(to, compression_bytes, from, length, by_copy, kind, parameters);
            let to = start.add(compression_bytes).cast::<c_void>();
            (compression, sys::ZSTD_initStaticDDict(to, decompression_bytes, from, length, by_copy, kind))
        };
        let compression = NonNull::new(compression.cast_mut()).ok_or(StoreError::DictionaryRefused)?;
        let decompression = NonNull::new(decompression.cast_mut()).ok_or(StoreError::DictionaryRefused)?;
        Ok(Dictionary { _memory: memory, level, compression, decompression })
    }

    pub fn level(&self) -> i8 {
        self.level
    }

    pub fn compression(&self) -> *const sys::ZSTD_CDict {
        self.compression.as_ptr()
    }

    pub fn decompression(&self) -> *const sys::ZSTD_DDict {
        self.decompression.as_ptr()
    }
}

/// The dictionaries of a store.
pub(crate) struct Dictionaries {
    loaded: [AtomicPtr<Dictionary>; DICTIONARIES_MAX],
    adding: Mutex<()>,
}

impl Dictionaries {
    pub fn new() -> Dictionaries {
        let nothing = || AtomicPtr::new(core::ptr::null_mut());
        Dictionaries { loaded: core::array::from_fn(|_| nothing()), adding: Mutex::new(()) }
    }

    /// Digests `bytes` for `level` and keeps it.
    pub fn add(&self, bytes: &[u8], level: i8) -> Result<DictionaryId, StoreError> {
        if !is_level(level) {
            return Err(StoreError::NoSuchCodec);
        }
        if bytes.is_empty() || bytes.len() > DICTIONARY_BYTES_MAX {
            return Err(StoreError::DictionaryRefused);
        }
        let _adding = self.adding.lock();
        let free = self.loaded.iter().position(|place| place.load(Ordering::Relaxed).is_null());
        let free = free.ok_or(StoreError::DictionaryRefused)?;
        let dictionary = Box::new(Dictionary::digest(bytes, level)?);
        self.loaded[free].store(Box::into_raw(dictionary), Ordering::Release);
        Ok(DictionaryId(free as u8))
    }

    #[inline]
    pub fn get(&self, id: DictionaryId) -> Option<&Dictionary> {
        let dictionary = self.loaded.get(id.0 as usize)?.load(Ordering::Acquire);
        // SAFETY: null, or a box that is given up only when `self` is dropped.
        unsafe { dictionary.as_ref() }
    }
}

impl Drop for Dictionaries {
    fn drop(&mut self) {
        for place in &mut self.loaded {
            if let Some(dictionary) = NonNull::new(*place.get_mut()) {
                // SAFETY: made by `Box::into_raw` in `add`, and nobody can refer to it any more.
                drop(unsafe { Box::from_raw(dictionary.as_ptr()) });
            }
        }
    }
}
