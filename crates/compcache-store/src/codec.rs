//! Codecs: what a pool compresses with, and how every object says what it was compressed with.
//!
//! | number   | codec            | decoding needs  |
//! |----------|------------------|-----------------|
//! | 0        | LZ4              | nothing         |
//! | 1        | zstd, any level  | nothing         |
//! | 2        | LZ4, then a patch | nothing        |
//! | 3        | none: raw        | nothing         |
//! | 4..=7    | zstd, dictionary | the dictionary  |
//!
//! The number is kept in the slot (three bits), so a pool's codec can change while it holds objects of others. A codec is
//! one file here, and one arm in `compress` and `decode` below. All contexts belong to a worker and are made with it;
//! nothing here allocates afterwards.

mod dictionary;
mod lz4;
mod patch;
mod zstd;

use alloc::boxed::Box;

pub(crate) use dictionary::{DICTIONARIES_MAX, Dictionaries};
pub use dictionary::{DictionaryId, train_dictionary};

use crate::error::StoreError;
use crate::groups::GROUP_BYTES;
use crate::page::{PAGE_SIZE, Page};

/// What a pool compresses new pages with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Codec {
    /// LZ4: the fastest. The default.
    #[default]
    Lz4,
    /// zstd: about two thirds of the size of LZ4 on heap data, three times the time to write and four to read.
    Zstd {
        /// 1..=19, or -7..=-1 for faster and larger.
        level: i8,
    },
    /// zstd with a dictionary that the store holds; the level was given with the dictionary.
    ZstdDictionary(DictionaryId),
}

/// The number of a codec in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CodecId(pub u8);

const LZ4: CodecId = CodecId(0);
const ZSTD: CodecId = CodecId(1);
/// An object of [`LZ4`], the patch that makes the page of it, and two bytes with the length of the patch.
const LZ4_PATCHED: CodecId = CodecId(2);
const FIRST_DICTIONARY: u8 = 4;

const _: () = assert!(FIRST_DICTIONARY as usize + DICTIONARIES_MAX == CodecId::MASK as usize + 1);

impl CodecId {
    /// The bits a number has.
    pub const MASK: u8 = 0b111;
}

/// A patch takes at most such a part of what it is for: the ratio hardly suffers, and the next read is hardly slower.
const PATCH_PART: usize = 8;

/// Room for the largest output any codec makes of a page.
const OUTPUT_BYTES: usize = PAGE_SIZE + 512;

impl Codec {
    /// One word that can be changed while others read it.
    pub(crate) fn pack(self) -> u32 {
        match self {
            Codec::Lz4 => 0,
            Codec::Zstd { level } => 1 | u32::from(level as u8) << 8,
            Codec::ZstdDictionary(DictionaryId(number)) => 2 | u32::from(number) << 8,
        }
    }

    /// The inverse of [`Codec::pack`].
    pub(crate) fn unpack(word: u32) -> Codec {
        let parameter = (word >> 8) as u8;
        match word & 0xff {
            0 => Codec::Lz4,
            1 => Codec::Zstd { level: parameter as i8 },
            _ => Codec::ZstdDictionary(DictionaryId(parameter)),
        }
    }

    /// Whether a store with `dictionaries` can use it.
    pub(crate) fn check(self, dictionaries: &Dictionaries) -> Result<(), StoreError> {
        let known = match self {
            Codec::Lz4 => true,
            Codec::Zstd { level } => zstd::is_level(level),
            Codec::ZstdDictionary(id) => dictionaries.get(id).is_some(),
        };
        known.then_some(()).ok_or(StoreError::NoSuchCodec)
    }
}

/// The contexts of one worker.
pub(crate) struct Codecs {
    lz4: lz4::Lz4,
    zstd: zstd::Zstd,
    output: Box<[u8]>,
    base: Box<Page>,
}

/// How the content of a page differs from what an object holds.
pub(crate) enum Change<'c> {
    /// Not at all.
    None,
    /// So little that the old object and a patch are the new one.
    Patch(CodecId, &'c [u8]),
    /// Too much, or this codec takes no patches, or the object does not decode.
    Much,
}

impl Codecs {
    pub fn new() -> Result<Codecs, StoreError> {
        let output = alloc::vec![0; OUTPUT_BYTES].into_boxed_slice();
        Ok(Codecs { lz4: lz4::Lz4::new(), zstd: zstd::Zstd::new(PAGE_SIZE)?, output, base: Box::new([0; PAGE_SIZE]) })
    }

    /// Compresses `page` and returns the result with the number that decodes it. It can be longer than the page. Where there is no memory for what the codec needs, LZ4 does
    /// it, which needs none.
    #[inline]
    pub fn compress(
        &mut self,
        codec: Codec,
        page: &Page,
        dictionaries: &Dictionaries,
    ) -> Result<(CodecId, &[u8]), StoreError> {
        let (id, compressed) = match codec {
            Codec::Lz4 => (LZ4, self.lz4.compress(page, &mut self.output)),
            Codec::Zstd { level } => (ZSTD, self.zstd.compress(level, page, &mut self.output)),
            Codec::ZstdDictionary(id) => {
                let dictionary = dictionaries.get(id).ok_or(StoreError::NoSuchCodec)?;
                let compressed = self.zstd.compress_with(id, dictionary, page, &mut self.output);
                (CodecId(FIRST_DICTIONARY + id.0), compressed)
            }
        };
        let (id, length) = match compressed {
            Err(StoreError::MemoryRefused { .. }) => (LZ4, self.lz4.compress(page, &mut self.output)?),
            other => (id, other?),
        };
        Ok((id, &self.output[..length]))
    }

    /// Decodes `object` into `page`; `false` if it does not decode to exactly one page.
    #[inline]
    #[must_use]
    pub fn decompress(&mut self, id: CodecId, object: &[u8], page: &mut Page, dictionaries: &Dictionaries) -> bool {
        decode(&mut self.zstd, id, object, page, dictionaries)
    }

    /// Compares `page` with what `object` holds, of which `id` says how. Only what `codec` writes gets a patch.
    pub fn change(
        &mut self,
        codec: Codec,
        id: CodecId,
        object: &[u8],
        page: &Page,
        dictionaries: &Dictionaries,
    ) -> Change<'_> {
        let Codecs { zstd, output, base, .. } = self;
        let ((base_id, base_bytes, old), takes_patches) = match (id, split_patched(object)) {
            (LZ4_PATCHED, Some((bytes, patch))) => ((LZ4, bytes, patch), codec == Codec::Lz4),
            (LZ4_PATCHED, None) => return Change::Much,
            _ => ((id, object, &[][..]), id == LZ4 && codec == Codec::Lz4),
        };
        if !decode(zstd, base_id, base_bytes, base, dictionaries) {
            return Change::Much;
        }
        // What is there now is found also where nothing new may be made.
        let most = if takes_patches { base_bytes.len() / PATCH_PART } else { old.len() };
        let (start, room) = output.split_at_mut(base_bytes.len());
        let Some(length) = patch::diff(base, page, &mut room[..most]) else { return Change::Much };
        if room[..length] == *old {
            return Change::None;
        }
        if !takes_patches {
            return Change::Much;
        }
        start.copy_from_slice(base_bytes);
        if length == 0 {
            return Change::Patch(LZ4, &output[..base_bytes.len()]);
        }
        let Some(end) = room.get_mut(length..length + PATCH_LENGTH) else { return Change::Much };
        end.copy_from_slice(&(length as u16).to_le_bytes());
        Change::Patch(LZ4_PATCHED, &output[..base_bytes.len() + length + PATCH_LENGTH])
    }

    /// Whether `object`, of which `id` says how it is to be read, is `page`.
    pub fn is_page(&mut self, id: CodecId, object: &[u8], page: &Page, dictionaries: &Dictionaries) -> bool {
        let Codecs { zstd, base, .. } = self;
        decode(zstd, id, object, base, dictionaries) && **base == *page
    }

    /// Decodes the frame of a group into the start of `pages` and returns its length.
    pub fn decompress_group(&mut self, frame: &[u8], pages: &mut [u8]) -> Option<usize> {
        self.zstd.decompress_group(frame, pages)
    }

    /// The address range of the contexts that are not in the allocator's memory.
    pub fn range(&self) -> (usize, usize) {
        self.zstd.range()
    }
}

/// What makes the frames of groups.
pub(crate) struct GroupCompressor {
    zstd: zstd::Zstd,
    level: i8,
}

impl GroupCompressor {
    pub fn new(level: i8) -> Result<GroupCompressor, StoreError> {
        if !zstd::is_level(level) {
            return Err(StoreError::NoSuchCodec);
        }
        Ok(GroupCompressor { zstd: zstd::Zstd::new(GROUP_BYTES)?, level })
    }

    /// Compresses `pages` into `frame` and returns the length; `None` if it is too long.
    pub fn compress(&mut self, pages: &[u8], frame: &mut [u8]) -> Option<usize> {
        self.zstd.compress(self.level, pages, frame).ok()
    }
}

/// Decodes `object`; `false` if it does not decode to exactly one page.
#[inline]
fn decode(zstd: &mut zstd::Zstd, id: CodecId, object: &[u8], page: &mut Page, dictionaries: &Dictionaries) -> bool {
    match id {
        LZ4 => lz4::decompress(object, page),
        LZ4_PATCHED => {
            split_patched(object).is_some_and(|(base, patch)| lz4::decompress(base, page) && patch::apply(patch, page))
        }
        ZSTD => zstd.decompress(object, page),
        CodecId(number) => number
            .checked_sub(FIRST_DICTIONARY)
            .and_then(|number| dictionaries.get(DictionaryId(number)))
            .is_some_and(|dictionary| zstd.decompress_with(dictionary, object, page)),
    }
}

/// Bytes behind a patch that say how long it is.
const PATCH_LENGTH: usize = 2;

/// What an object with a patch consists of.
fn split_patched(object: &[u8]) -> Option<(&[u8], &[u8])> {
    let (rest, length) = object.split_last_chunk::<PATCH_LENGTH>()?;
    rest.split_at_checked(rest.len().checked_sub(usize::from(u16::from_le_bytes(*length)))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_codec_survives_packing() {
        let mut codecs = alloc::vec![Codec::Lz4, Codec::ZstdDictionary(DictionaryId(3))];
        codecs.extend((-7..=19).map(|level| Codec::Zstd { level }));
        for codec in codecs {
            assert_eq!(Codec::unpack(codec.pack()), codec);
        }
    }

    #[test]
    fn every_codec_and_level_returns_what_it_was_given() {
        let text: Page = core::array::from_fn(|i| b"a page of text, and more of it; "[i * i / 37 % 32]);
        let noise: Page = core::array::from_fn(|i| ((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8);
        let dictionaries = Dictionaries::new();
        let mut codecs = Codecs::new().unwrap();
        let all = (-7..=19).filter(|level| *level != 0).map(|level| Codec::Zstd { level });
        for codec in all.chain([Codec::Lz4, Codec::Zstd { level: 1 }]) {
            for page in [&text, &noise, &[0; PAGE_SIZE]] {
                let (id, object) = codecs.compress(codec, page, &dictionaries).unwrap();
                let object = object.to_vec();
                let mut back = [0xee; PAGE_SIZE];
                assert!(codecs.decompress(id, &object, &mut back, &dictionaries), "{codec:?}");
                assert_eq!(&back, page);
            }
        }
    }

    #[test]
    fn a_dictionary_is_used_and_makes_similar_pages_smaller() {
        // Pages of the same two hundred long words in ever different order: what a dictionary is for.
        let mixed = |n: usize| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let page = |seed: usize| -> Page {
            core::array::from_fn(|i| mixed(mixed(seed * 4096 + i / 16) % 200 * 16 + i % 16) as u8)
        };
        let samples: alloc::vec::Vec<Page> = (0..300).map(page).collect();
        let dictionary = train_dictionary(&samples, 16 << 10).unwrap();
        let dictionaries = Dictionaries::new();
        let mut codecs = Codecs::new().unwrap();
        for level in [-3i8, 1, 7, 19] {
            let id = dictionaries.add(&dictionary, level).unwrap();
            let plain = codecs.compress(Codec::Zstd { level }, &page(300), &dictionaries).unwrap().1.len();
            let (number, object) = codecs.compress(Codec::ZstdDictionary(id), &page(300), &dictionaries).unwrap();
            let object = object.to_vec();
            assert!(object.len() < plain, "level {level}: {} against {plain}", object.len());
            let mut back = [0; PAGE_SIZE];
            assert!(codecs.decompress(number, &object, &mut back, &dictionaries));
            assert_eq!(back, page(300));
        }
        assert_eq!(dictionaries.add(&dictionary, 1), Err(StoreError::DictionaryRefused), "a fifth dictionary");
    }
}
