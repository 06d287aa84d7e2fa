//! Real content, pages of the corpus: a file, kinds in turn, that programs write to the disks they measure, or heaps in memory.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use compcache_testkit::corpus::{self, Kind, Page};

use crate::record::Record;

/// Neighbouring pages of one kind before the next kind's: 1 MiB, as files lie on a disk.
const RUN_PAGES: usize = 256;

/// What a file holds.
pub struct Content {
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// The percentage of its pages that are same-filled.
    pub same_filled: f64,
    /// The kinds in it.
    pub kinds: String,
}

impl Content {
    /// Writes `bytes` bytes of every kind that this machine has into `path`, and notes them in the record.
    ///
    /// # Errors
    /// No kind can be had, or the file cannot be written.
    pub fn write(path: &Path, bytes: u64, record: &mut Record) -> Result<Content> {
        let kinds: Vec<Kind> = Kind::HEAPS.into_iter().chain([Kind::Text, Kind::Elf]).collect();
        Content::write_of(&kinds, path, bytes, record)
    }

    /// Writes `bytes` bytes of those of `kinds` that this machine has into `path`, and notes them in the record.
    ///
    /// # Errors
    /// As [`Content::write`].
    pub fn write_of(kinds: &[Kind], path: &Path, bytes: u64, record: &mut Record) -> Result<Content> {
        let pages_wanted = (bytes / compcache_testkit::PAGE_BYTES as u64) as usize;
        let mut images = Vec::new();
        for &kind in kinds {
            match corpus::load(kind, corpus::IMAGE_PAGES.min(pages_wanted)) {
                Ok(pages) => images.push((kind.name(), pages)),
                Err(error) => println!("{kind}: not in it: {error}"),
            }
        }
        if images.is_empty() {
            bail!("this machine can make no content");
        }
        let mut file = BufWriter::new(File::create(path)?);
        let (mut written, mut same) = (0, 0.0);
        while written < pages_wanted {
            let run = written / RUN_PAGES;
            let image = &images[run % images.len()].1;
            let first = run / images.len() * RUN_PAGES % image.len();
            let pages = &image[first..(first + RUN_PAGES.min(pages_wanted - written)).min(image.len())];
            file.write_all(pages.as_flattened())?;
            same += corpus::same_filled_share(pages) * pages.len() as f64;
            written += pages.len();
        }
        file.into_inner()?.sync_all()?;
        let share = same / written as f64;
        let kinds = images.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" ");
        record.content(&kinds, written, share);
        Ok(Content {
            path: path.to_owned(),
            bytes: (written * compcache_testkit::PAGE_BYTES) as u64,
            same_filled: share * 100.0,
            kinds,
        })
    }

    /// Fails unless the first `bytes` bytes of `other` are those of the file.
    ///
    /// # Errors
    /// A byte is different, or one of them cannot be read.
    pub fn check(&self, other: &Path, bytes: u64) -> Result<()> {
        let (mut wanted, mut found) = (File::open(&self.path)?.take(bytes), File::open(other)?.take(bytes));
        let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        let mut at = 0;
        while at < bytes {
            let length = (bytes - at).min(1 << 20) as usize;
            wanted.read_exact(&mut left[..length])?;
            found.read_exact(&mut right[..length])?;
            if let Some(wrong) = (0..length).find(|&nth| left[nth] != right[nth]) {
                bail!("WRONG BYTES in {}, at {}", other.display(), at + wrong as u64);
            }
            at += length as u64;
        }
        Ok(())
    }
}

/// Pages of every heap this machine has, one kind after the other, without those of one repeated word, which never leave memory.
/// Notes them in the record.
///
/// # Errors
/// No kind can be had.
pub fn heaps(pages_each: usize, record: &mut Record) -> Result<Vec<Page>> {
    let mut all = Vec::new();
    for kind in Kind::HEAPS {
        match corpus::load(kind, pages_each) {
            Ok(pages) => {
                record.content(kind.name(), pages.len(), corpus::same_filled_share(&pages));
                all.extend(pages.into_iter().filter(|page| page.chunks_exact(8).any(|word| word != &page[..8])));
            }
            Err(error) => println!("{kind}: left out: {error}"),
        }
    }
    ensure!(!all.is_empty(), "this machine can make no content");
    Ok(all)
}
