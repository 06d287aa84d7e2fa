//! Pages of files that every system has: text, and programs with their libraries.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::{IMAGE_PAGES, Page};
use crate::PAGE_BYTES;

/// So that no single file makes up more than a hundredth of an image.
const FILE_PAGES_MAX: usize = IMAGE_PAGES / 100;

/// Enough to choose from; a whole `/usr/share` need not be walked.
const FILES_MAX: usize = 40_000;

pub(super) fn text() -> io::Result<Vec<Page>> {
    let roots = ["/usr/include", "/usr/share", "/usr/lib/python3", "/usr/lib/gcc", "/etc", "/usr/src"];
    gather(&roots, |start| !start.contains(&0) && is_text(start))
        .map_err(|error| io::Error::other(format!("{error}; on Debian, install libc6-dev and perl-modules")))
}

pub(super) fn elf() -> io::Result<Vec<Page>> {
    gather(&["/usr/bin", "/usr/sbin", "/usr/lib", "/lib", "/opt"], |start| start.starts_with(b"\x7fELF"))
}

/// A page cut off in the middle of a character is still text.
fn is_text(start: &[u8]) -> bool {
    match std::str::from_utf8(start) {
        Ok(_) => true,
        Err(error) => error.error_len().is_none(),
    }
}

/// Whole pages of the files below `roots` whose first page is `wanted`, files in order of their paths.
fn gather(roots: &[&str], wanted: impl Fn(&[u8]) -> bool) -> io::Result<Vec<Page>> {
    let mut paths = Vec::new();
    roots.iter().for_each(|root| walk(Path::new(root), &mut paths));
    paths.sort();
    paths.dedup();
    let mut content = Vec::new();
    for path in paths {
        if content.len() < IMAGE_PAGES {
            take_pages(&path, &wanted, &mut content);
        }
    }
    if content.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("no fitting file below {}", roots.join(", "))));
    }
    content.truncate(IMAGE_PAGES);
    Ok(content)
}

/// Adds the regular files below `dir`. What cannot be read is passed over: the count of pages decides in the end.
fn walk(dir: &Path, paths: &mut Vec<PathBuf>) {
    let Ok(found) = fs::read_dir(dir) else { return };
    let mut found: Vec<_> = found.flatten().collect();
    found.sort_by_key(|one| one.file_name());
    for one in found {
        let Ok(kind) = one.file_type() else { continue };
        if paths.len() >= FILES_MAX {
            return;
        } else if kind.is_dir() {
            walk(&one.path(), paths);
        } else if kind.is_file() {
            paths.push(one.path());
        }
    }
}

fn take_pages(path: &Path, wanted: &impl Fn(&[u8]) -> bool, content: &mut Vec<Page>) {
    let Ok(mut file) = File::open(path) else { return };
    let mut page = [0; PAGE_BYTES];
    for nth in 0..FILE_PAGES_MAX {
        if file.read_exact(&mut page).is_err() || (nth == 0 && !wanted(&page)) {
            return;
        }
        content.push(page);
    }
}
