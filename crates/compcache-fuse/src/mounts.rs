//! The kernel's table of mounts (`/proc/self/mountinfo`), read by all of us in the same way.
//!
//! ```text
//! 36 35 98:0 /sub /mnt/a\040b rw,noatime master:1 - ext3 /dev/root rw,errors=continue
//! id parent device root place options tags - kind source super-options
//! ```
//!
//! It is bytes: names of directories need not be text, and one that is none, anywhere on the machine, must not cost us the
//! whole table.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A line of the table. What is bytes here the kernel writes as it is; names are behind methods, for it escapes them.
#[derive(Debug)]
pub struct Mounted<'t> {
    /// Its number, which it keeps wherever it is moved.
    pub id: &'t [u8],
    /// The number of what it is mounted on.
    pub parent: &'t [u8],
    /// `major:minor`. Btrfs has numbers of its own.
    pub device: &'t [u8],
    root: &'t [u8],
    place: &'t [u8],
    /// How it hears of mounts elsewhere: `shared:1`, `master:1`.
    pub tags: Vec<&'t [u8]>,
    /// Of which kind it is: `ext4`, `fuse.compcache`.
    pub kind: &'t [u8],
    source: &'t [u8],
    /// Those of the file system, with commas between them.
    pub super_options: &'t [u8],
}

impl Mounted<'_> {
    /// Which part of the file system it shows.
    pub fn root(&self) -> PathBuf {
        unescape(self.root)
    }

    /// Where it is mounted.
    pub fn place(&self) -> PathBuf {
        unescape(self.place)
    }

    /// What was mounted: a device's path, or any word.
    pub fn source(&self) -> PathBuf {
        unescape(self.source)
    }
}

/// The table as this process sees it.
///
/// # Errors
/// There is no /proc.
pub fn table_of_mounts() -> io::Result<Vec<u8>> {
    OpenTable::new()?.read()
}

/// The table, open: to be read also where there is no descriptor to be had.
pub struct OpenTable(File);

impl OpenTable {
    /// Opens it.
    ///
    /// # Errors
    /// There is no /proc, or no descriptor.
    pub fn new() -> io::Result<OpenTable> {
        File::open("/proc/self/mountinfo").map(OpenTable)
    }

    /// The table as it is now.
    ///
    /// # Errors
    /// Whatever the system says.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        let (mut file, mut table) = (&self.0, Vec::new());
        file.rewind()?;
        file.read_to_end(&mut table)?;
        Ok(table)
    }
}

/// What is in the table, in its order: what is mounted over something comes later, unless it was moved there.
pub fn mounts(table: &[u8]) -> impl DoubleEndedIterator<Item = Mounted<'_>> {
    table.split(|byte| *byte == b'\n').filter_map(parse)
}

/// What is seen at `place`, if that is where something is mounted.
pub fn uppermost<'t>(table: &'t [u8], place: &Path) -> Option<Mounted<'t>> {
    let mut there: Vec<_> = mounts(table).filter(|mounted| mounted.place() == place).collect();
    let is_covered = |one: &Mounted| there.iter().any(|other| other.parent == one.id && other.id != one.id);
    let last = there.iter().rposition(|one| !is_covered(one))?;
    Some(there.swap_remove(last))
}

fn parse(line: &[u8]) -> Option<Mounted<'_>> {
    let mut fields = line.split(|byte| *byte == b' ');
    let [id, parent, device, root, place] =
        [fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?];
    let tags = fields.by_ref().skip(1).take_while(|field| *field != b"-").collect();
    let [kind, source, super_options] = [fields.next()?, fields.next()?, fields.next()?];
    Some(Mounted { id, parent, device, root, place, tags, kind, source, super_options })
}

/// A name as the kernel writes it in tables: blanks, line ends and backslashes as three octal digits.
pub fn unescape(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = after.get(..3).and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        match (byte, octal) {
            (b'\\', Some(value)) => {
                path.push(value);
                rest = &after[3..];
            }
            _ => {
                path.push(byte);
                rest = after;
            }
        }
    }
    Path::new(OsStr::from_bytes(&path)).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
        80 22 0:49 / /mnt/\xff rw - tmpfs none rw\n\
        90 22 0:50 / /mnt/a\\040b rw master:3 shared:4 - fuse.compcache /srv/c\\134d rw,user_id=0\n\
        91 90 0:51 /sub /mnt/a\\040b rw - tmpfs  rw\n";

    #[test]
    fn a_line_is_read_whatever_its_names_and_its_neighbours() {
        let all: Vec<_> = mounts(TABLE).collect();
        assert_eq!(all.len(), 4);
        assert_eq!(all[1].place().as_os_str().as_bytes(), b"/mnt/\xff");
        let ours = &all[2];
        assert_eq!((ours.place(), ours.source()), ("/mnt/a b".into(), "/srv/c\\d".into()));
        assert_eq!(
            (ours.device, ours.kind, ours.super_options),
            (&b"0:50"[..], &b"fuse.compcache"[..], &b"rw,user_id=0"[..])
        );
        assert_eq!(ours.tags, [&b"master:3"[..], b"shared:4"]);
        assert_eq!((all[3].root(), all[3].source()), ("/sub".into(), "".into()), "a source may have no name");
        assert!(parse(b"").is_none() && parse(b"22 1 254:0 / / rw").is_none());
    }

    #[test]
    fn the_uppermost_mount_of_a_place_is_the_one_over_which_there_is_none() {
        let kind = |table, place: &str| uppermost(table, Path::new(place)).map(|mounted| mounted.kind.to_vec());
        assert_eq!(kind(TABLE, "/mnt/a b"), Some(b"tmpfs".to_vec()));
        assert_eq!(kind(TABLE, "/mnt/a"), None);
        assert_eq!(kind(TABLE, "/"), Some(b"ext4".to_vec()));
        let moved = b"70 90 0:51 / /mnt rw - tmpfs none rw\n90 22 0:50 / /mnt rw - fuse.compcache /srv rw\n";
        assert_eq!(kind(moved, "/mnt"), Some(b"tmpfs".to_vec()), "an older one was moved over it");
    }
}
