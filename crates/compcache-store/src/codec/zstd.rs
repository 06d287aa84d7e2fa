//! zstd in memory of our own.
//!
//! The library would take its contexts from the host program's malloc, which a pager's thread must never reach. It can
//! also be given memory ("static" contexts); then it never asks for any, and fails instead. The size is the largest that
//! any level and any dictionary need for a page; only what a level uses is touched. That for compressing is megabytes, and is asked for when something
//! is: where the system counts what could be touched (vm.overcommit_memory=2), a worker that only decodes costs little.
//!
//! Frames are as short as the format allows: no magic number, no content size, no checksum, no dictionary number. Two
//! bytes of header are left.
//!
//! # Source
//! "Static context" section of `zstd.h` (`ZSTD_initStaticCCtx` and its limitations), zstd 1.5.7.

#![allow(unsafe_code)]

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;

use zstd_safe::zstd_sys as sys;

use super::dictionary::{DICTIONARY_BYTES_MAX, Dictionary, DictionaryId};
use crate::error::StoreError;
use crate::page::{PAGE_SIZE, Page};
use crate::region::Region;

const LEVEL_MIN: i8 = -7;
const LEVEL_MAX: i8 = 19;

/// Whether a level may be asked for.
pub(crate) fn is_level(level: i8) -> bool {
    (LEVEL_MIN..=LEVEL_MAX).contains(&level) && level != 0
}

/// What a level means for units of `unit_bytes`, with a dictionary of `dictionary_bytes`.
pub(super) fn parameters(level: i8, unit_bytes: usize, dictionary_bytes: usize) -> sys::ZSTD_compressionParameters {
    // SAFETY: reads tables of the library, no pointer is passed.
    unsafe { sys::ZSTD_getCParams(c_int::from(level), unit_bytes as u64, dictionary_bytes) }
}

/// What the compression context is set to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Setting {
    Nothing,
    Level(i8),
    Dictionary(DictionaryId),
}

/// The contexts of one worker.
pub(crate) struct Zstd {
    /// The one context behind the other.
    memory: Region,
    decompressor: NonNull<sys::ZSTD_DCtx>,
    decompressor_bytes: usize,
    /// Made when it is needed.
    compressor: Option<NonNull<sys::ZSTD_CCtx>>,
    compressor_bytes: usize,
    setting: Setting,
}

// SAFETY: the contexts lie in `memory`, which moves with them, and have no tie to a thread.
unsafe impl Send for Zstd {}

fn compressor_bytes(unit_bytes: usize) -> usize {
    let levels = (LEVEL_MIN..=LEVEL_MAX).filter(|level| is_level(*level));
    let sizes = levels.flat_map(|level| [0, DICTIONARY_BYTES_MAX].map(|bytes| parameters(level, unit_bytes, bytes)));
    // SAFETY: arithmetic on values.
    sizes.map(|p| unsafe { sys::ZSTD_estimateCCtxSize_usingCParams(p) }).max().unwrap_or(0)
}

fn is_error(code: usize) -> bool {
    // SAFETY: arithmetic on a value.
    unsafe { sys::ZSTD_isError(code) != 0 }
}

impl Zstd {
    /// Contexts for compressing units of `unit_bytes`, and for decoding units of any size.
    pub fn new(unit_bytes: usize) -> Result<Zstd, StoreError> {
        let compressor_bytes = compressor_bytes(unit_bytes).next_multiple_of(PAGE_SIZE);
        // SAFETY: arithmetic.
        let decompressor_bytes = unsafe { sys::ZSTD_estimateDCtxSize() }.next_multiple_of(PAGE_SIZE);
        let memory = Region::reserve(compressor_bytes + decompressor_bytes, PAGE_SIZE, false)?;
        memory.ensure(decompressor_bytes)?;
        let start = memory.base().as_ptr().cast::<c_void>();
        // SAFETY: open memory of our own, aligned to a page, which lives as long as `memory`.
        let decompressor = unsafe { sys::ZSTD_initStaticDCtx(start, decompressor_bytes) };
        let decompressor = NonNull::new(decompressor).ok_or(StoreError::CodecFailed)?;
        let format = sys::ZSTD_format_e::ZSTD_f_zstd1_magicless as c_int;
        // SAFETY: a context just made, a parameter without pointer.
        let code = unsafe {
            let parameter = sys::ZSTD_dParameter::ZSTD_d_experimentalParam1; // ZSTD_d_format
            sys::ZSTD_DCtx_setParameter(decompressor.as_ptr(), parameter, format)
        };
        if is_error(code) {
            return Err(StoreError::CodecFailed);
        }
        let setting = Setting::Nothing;
        Ok(Zstd { memory, decompressor, decompressor_bytes, compressor: None, compressor_bytes, setting })
    }

    fn compressor(&mut self) -> Result<NonNull<sys::ZSTD_CCtx>, StoreError> {
        if let Some(made) = self.compressor {
            return Ok(made);
        }
        self.memory.ensure(self.decompressor_bytes + self.compressor_bytes)?;
        // SAFETY: open memory of our own behind the other context, aligned to a page, which lives as long as `memory`.
        let made = unsafe {
            let start = self.memory.base().as_ptr().add(self.decompressor_bytes);
            sys::ZSTD_initStaticCCtx(start.cast::<c_void>(), self.compressor_bytes)
        };
        self.compressor = NonNull::new(made);
        self.compressor.ok_or(StoreError::CodecFailed)
    }

    /// Compresses `unit` into `output` at `level` and returns the length; [`StoreError::MemoryRefused`] if there is no memory for the context.
    pub fn compress(&mut self, level: i8, unit: &[u8], output: &mut [u8]) -> Result<usize, StoreError> {
        if self.setting != Setting::Level(level) {
            self.set_up(level)?;
            self.setting = Setting::Level(level);
        }
        self.run(unit, output)
    }

    /// Compresses `page` into `output` with a dictionary and returns the length.
    pub fn compress_with(
        &mut self,
        id: DictionaryId,
        dictionary: &Dictionary,
        page: &Page,
        output: &mut [u8],
    ) -> Result<usize, StoreError> {
        if self.setting != Setting::Dictionary(id) {
            self.set_up(dictionary.level())?;
            // SAFETY: the context is ours; the dictionary is read-only and outlives it, since the store keeps it and the
            // worker keeps the store.
            let code = unsafe { sys::ZSTD_CCtx_refCDict(self.compressor()?.as_ptr(), dictionary.compression()) };
            if is_error(code) {
                return Err(StoreError::CodecFailed);
            }
            self.setting = Setting::Dictionary(id);
        }
        self.run(page, output)
    }

    /// Decodes `object` into `page`; `false` if it is not a page.
    #[must_use]
    pub fn decompress(&mut self, object: &[u8], page: &mut Page) -> bool {
        self.decode(core::ptr::null(), object, page) == PAGE_SIZE
    }

    /// Decodes a frame that is as long as `units` or shorter into the start of it, and returns the length; `None` if it is not.
    pub fn decompress_group(&mut self, frame: &[u8], units: &mut [u8]) -> Option<usize> {
        let length = self.decode(core::ptr::null(), frame, units);
        (!is_error(length)).then_some(length)
    }

    /// As [`Zstd::decompress`], for an object made with `dictionary`.
    #[must_use]
    pub fn decompress_with(&mut self, dictionary: &Dictionary, object: &[u8], page: &mut Page) -> bool {
        self.decode(dictionary.decompression(), object, page) == PAGE_SIZE
    }

    /// The address range of the contexts.
    pub fn range(&self) -> (usize, usize) {
        self.memory.range()
    }

    fn set_up(&mut self, level: i8) -> Result<(), StoreError> {
        use sys::ZSTD_cParameter as P;
        self.setting = Setting::Nothing;
        let context = self.compressor()?.as_ptr();
        let settings = [
            (P::ZSTD_c_experimentalParam2, sys::ZSTD_format_e::ZSTD_f_zstd1_magicless as c_int), // ZSTD_c_format
            (P::ZSTD_c_compressionLevel, c_int::from(level)),
            (P::ZSTD_c_contentSizeFlag, 0),
            (P::ZSTD_c_checksumFlag, 0),
            (P::ZSTD_c_dictIDFlag, 0),
        ];
        // SAFETY: the context is ours; resetting forgets parameters and dictionary.
        let reset =
            unsafe { sys::ZSTD_CCtx_reset(context, sys::ZSTD_ResetDirective::ZSTD_reset_session_and_parameters) };
        // SAFETY: the context is ours; parameters are values.
        let set = |(parameter, value)| unsafe { sys::ZSTD_CCtx_setParameter(context, parameter, value) };
        if is_error(reset) || settings.into_iter().any(|setting| is_error(set(setting))) {
            return Err(StoreError::CodecFailed);
        }
        Ok(())
    }

    fn run(&mut self, unit: &[u8], output: &mut [u8]) -> Result<usize, StoreError> {
        let context = self.compressor()?.as_ptr();
        // SAFETY: the context is ours; both buffers are passed with their lengths.
        let length = unsafe {
            sys::ZSTD_compress2(
                context,
                output.as_mut_ptr().cast::<c_void>(),
                output.len(),
                unit.as_ptr().cast::<c_void>(),
                unit.len(),
            )
        };
        if is_error(length) {
            self.setting = Setting::Nothing;
            return Err(StoreError::CodecFailed);
        }
        Ok(length)
    }

    /// What the library says: a length, or an error.
    fn decode(&mut self, dictionary: *const sys::ZSTD_DDict, object: &[u8], output: &mut [u8]) -> usize {
        // SAFETY: the context is ours, the dictionary null or kept by the store, both buffers passed with their lengths.
        // The decoder bounds itself by them whatever the bytes are.
        unsafe {
            sys::ZSTD_decompress_usingDDict(
                self.decompressor.as_ptr(),
                output.as_mut_ptr().cast::<c_void>(),
                output.len(),
                object.as_ptr().cast::<c_void>(),
                object.len(),
                dictionary,
            )
        }
    }
}
