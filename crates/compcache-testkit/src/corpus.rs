//! Page images of real programs: what a store, a codec or a pager meets outside a test.
//!
//! A page of zeroes or of one repeated byte costs a compressed memory nothing, and made-up text compresses as nothing
//! real does, so a number taken on them says little. Here a program is started, builds a heap of many kinds of object,
//! is read through `/proc/PID/mem` while it waits, and is then ended. Several kinds, because codecs rank differently:
//!
//! | kind           | program            | LZ4, about | what is in it                                       |
//! |----------------|--------------------|------------|-----------------------------------------------------|
//! | `PythonHeap`   | `python3`          | 3:1        | syntax trees, dictionaries, strings, JSON           |
//! | `NodeHeap`     | `node`             | 3:1        | objects, maps, strings, arrays of numbers           |
//! | `JvmHeap`      | `java` (a JDK)     | 3:1        | boxed numbers, hash maps, strings, class files      |
//! | `CompilerHeap` | `g++`              | 4:1        | `cc1plus`, stopped in the middle of a C++ file      |
//! | `DatabaseHeap` | `sqlite3`          | 2:1        | tables and indexes of a database in memory          |
//! | `Text`         | (files)            | 2:1        | headers, scripts and other text of this system      |
//! | `Elf`          | (files)            | 1.6:1      | programs and libraries of this system               |
//! | `Random`       | (none)             | 1:1        | nothing compresses it                               |
//!
//! An image is made once and kept in `$COMPCACHE_CORPUS_DIR`, else in `$CARGO_TARGET_DIR/corpus`, else in the
//! workspace's `target/corpus`. It is [`IMAGE_PAGES`] pages long, taken in runs of neighbours spread evenly over the
//! whole heap, so that any part of it speaks for all. Two machines have different images: a result names its machine.
//! To make them anew, delete them.
//!
//! A kind whose program is missing is an error that names what to install. Nothing is put in its place.

mod files;
mod heaps;
mod snapshot;

use std::env;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::PAGE_BYTES;

/// Pages in a full image: 64 MiB.
pub const IMAGE_PAGES: usize = 16384;

/// An image with fewer pages than this would say too little; making one is an error.
const IMAGE_PAGES_MIN: usize = 4096;

/// Neighbouring pages that stay together when a part of something longer is taken.
const RUN_PAGES: usize = 16;

/// One page of content.
pub type Page = [u8; PAGE_BYTES];

/// A kind of content. The table at the head of this module says what each holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The heap of a Python program.
    PythonHeap,
    /// The heap of a Node.js program.
    NodeHeap,
    /// The heap of a Java program.
    JvmHeap,
    /// The heap of the GNU C++ compiler in the middle of its work.
    CompilerHeap,
    /// The heap of SQLite holding a database in memory.
    DatabaseHeap,
    /// Text files.
    Text,
    /// Program files and libraries.
    Elf,
    /// Bytes from a generator with a fixed seed.
    Random,
}

impl Kind {
    /// Every kind, heaps first.
    pub const ALL: [Kind; 8] = [
        Kind::PythonHeap,
        Kind::NodeHeap,
        Kind::JvmHeap,
        Kind::CompilerHeap,
        Kind::DatabaseHeap,
        Kind::Text,
        Kind::Elf,
        Kind::Random,
    ];

    /// The kinds that are memory of running programs.
    pub const HEAPS: [Kind; 5] =
        [Kind::PythonHeap, Kind::NodeHeap, Kind::JvmHeap, Kind::CompilerHeap, Kind::DatabaseHeap];

    /// The word for it on command lines, in tables and in file names.
    pub fn name(self) -> &'static str {
        match self {
            Kind::PythonHeap => "python",
            Kind::NodeHeap => "node",
            Kind::JvmHeap => "jvm",
            Kind::CompilerHeap => "compiler",
            Kind::DatabaseHeap => "database",
            Kind::Text => "text",
            Kind::Elf => "elf",
            Kind::Random => "random",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(word: &str) -> Result<Kind, String> {
        Kind::ALL.into_iter().find(|kind| kind.name() == word).ok_or_else(|| {
            let names: Vec<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
            format!("no content is called {word:?}; there are {}", names.join(", "))
        })
    }
}

/// Returns `pages` pages of this kind.
///
/// Fewer than the image holds are taken in runs of 16 neighbours spread evenly over it; more begin again at its start.
/// The first call for a kind makes its image, which takes some seconds.
///
/// # Errors
/// The program that makes this kind is missing (the message names what to install), it failed, or the image could not be
/// written or read. Nothing is put in its place.
pub fn load(kind: Kind, pages: usize) -> io::Result<Vec<Page>> {
    load_file(&image(kind)?, pages)
}

/// As [`load`], from an image at `path`: any file of at least one whole page.
///
/// # Errors
/// The file cannot be read or is shorter than a page.
pub fn load_file(path: &Path, pages: usize) -> io::Result<Vec<Page>> {
    let mut file = File::open(path)?;
    let held = file.metadata()?.len() as usize / PAGE_BYTES;
    if held == 0 {
        return Err(io::Error::other(format!("{} holds no whole page", path.display())));
    }
    let mut content = Vec::with_capacity(pages);
    let mut at = usize::MAX;
    for index in spread(held, pages.min(held)) {
        if index != at {
            file.seek(SeekFrom::Start((index * PAGE_BYTES) as u64))?;
        }
        let mut page = [0; PAGE_BYTES];
        file.read_exact(&mut page)?;
        content.push(page);
        at = index + 1;
    }
    while content.len() < pages {
        content.push(content[content.len() - held]);
    }
    Ok(content)
}

/// The file that holds this kind's image; makes it when there is none. Safe to call from several processes at once.
///
/// # Errors
/// As [`load`].
pub fn image(kind: Kind) -> io::Result<PathBuf> {
    let dir = directory();
    fs::create_dir_all(&dir).map_err(|error| at_path("cannot make the corpus directory", &dir, error))?;
    let path = dir.join(format!("{}.pages", kind.name()));
    if path.exists() {
        return Ok(path);
    }
    let lock_path = dir.join(format!("{}.lock", kind.name()));
    let lock = File::create(&lock_path).map_err(|error| at_path("cannot lock", &lock_path, error))?;
    lock.lock()?;
    if path.exists() {
        return Ok(path);
    }
    let content = make(kind).map_err(|error| io::Error::new(error.kind(), format!("content {kind}: {error}")))?;
    let half_made = dir.join(format!("{}.new", kind.name()));
    let mut file = File::create(&half_made).map_err(|error| at_path("cannot write", &half_made, error))?;
    for page in &content {
        file.write_all(page)?;
    }
    fs::rename(&half_made, &path)?;
    Ok(path)
}

/// Where images are kept: see the head of this module.
pub fn directory() -> PathBuf {
    if let Some(dir) = env::var_os("COMPCACHE_CORPUS_DIR") {
        return PathBuf::from(dir);
    }
    if let Some(target) = env::var_os("CARGO_TARGET_DIR") {
        return PathBuf::from(target).join("corpus");
    }
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/corpus")
}

/// The share of pages, from 0 to 1, that repeat one 8-byte word: those that cost a compressed memory nothing.
///
/// A compression ratio without this number beside it means nothing.
pub fn same_filled_share(pages: &[Page]) -> f64 {
    if pages.is_empty() {
        return 0.0;
    }
    let same = pages.iter().filter(|page| is_same_filled(page)).count();
    same as f64 / pages.len() as f64
}

/// Whether the page repeats one 8-byte word.
pub fn is_same_filled(page: &Page) -> bool {
    page[8..] == page[..PAGE_BYTES - 8]
}

fn make(kind: Kind) -> io::Result<Vec<Page>> {
    let content = match kind {
        Kind::PythonHeap => heaps::python(),
        Kind::NodeHeap => heaps::node(),
        Kind::JvmHeap => heaps::jvm(),
        Kind::CompilerHeap => heaps::compiler(),
        Kind::DatabaseHeap => heaps::database(),
        Kind::Text => files::text(),
        Kind::Elf => files::elf(),
        Kind::Random => Ok(random()),
    }?;
    if content.len() < IMAGE_PAGES_MIN {
        let (held, wanted) = (content.len(), IMAGE_PAGES_MIN);
        return Err(io::Error::other(format!("only {held} pages were found, fewer than {wanted}")));
    }
    Ok(content)
}

fn random() -> Vec<Page> {
    let mut rng = fastrand::Rng::with_seed(0x636f_6d70_6361_6368);
    let mut content = vec![[0; PAGE_BYTES]; IMAGE_PAGES];
    content.iter_mut().for_each(|page| rng.fill(page));
    content
}

/// `wanted` of the indices below `held`, ascending, in runs of [`RUN_PAGES`] spread evenly; `wanted <= held`.
fn spread(held: usize, wanted: usize) -> Vec<usize> {
    let mut chosen = Vec::with_capacity(wanted);
    let runs = wanted.div_ceil(RUN_PAGES);
    for run in 0..runs {
        let length = RUN_PAGES.min(wanted - run * RUN_PAGES);
        // Run starts are `held / runs >= RUN_PAGES` apart except for rounding, which `max` takes care of.
        let even = run * (held - length) / runs.max(2).saturating_sub(1).max(1);
        let start = even.max(chosen.last().map_or(0, |last| last + 1)).min(held - (wanted - run * RUN_PAGES));
        chosen.extend(start..start + length);
    }
    chosen
}

fn at_path(what: &str, path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_ascending_complete_and_within_bounds() {
        for held in [1, 5, 16, 17, 100, 4096] {
            for wanted in 0..=held.min(300) {
                let chosen = spread(held, wanted);
                assert_eq!(chosen.len(), wanted, "held {held}, wanted {wanted}");
                assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]), "held {held}, wanted {wanted}");
                assert!(chosen.iter().all(|&index| index < held), "held {held}, wanted {wanted}");
            }
        }
        assert_eq!(spread(4096, 4096), (0..4096).collect::<Vec<_>>());
        assert!(*spread(4096, 32).last().unwrap() > 4000, "the end of the heap is represented");
    }

    #[test]
    fn the_share_of_same_filled_pages_counts_repeated_words_of_any_value() {
        let mut word = [0; PAGE_BYTES];
        word.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 8) as u8);
        let mut nearly = [7; PAGE_BYTES];
        nearly[PAGE_BYTES - 1] = 8;
        assert_eq!(same_filled_share(&[[0; PAGE_BYTES], [7; PAGE_BYTES], word, nearly]), 0.75);
        assert_eq!(same_filled_share(&[]), 0.0);
    }

    #[test]
    fn random_content_is_the_same_every_time_and_never_same_filled() {
        let content = random();
        assert_eq!(content[0], random()[0]);
        assert_eq!(same_filled_share(&content), 0.0);
    }

    #[test]
    fn names_lead_back_to_their_kinds() {
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert!("heap".parse::<Kind>().unwrap_err().contains("python"));
    }
}
