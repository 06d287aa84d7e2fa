//! Where the pages go that are too much even compressed: `--spill FILE|DIR`.
//!
//! | what is named           | what becomes of it                                                                      |
//! |-------------------------|-----------------------------------------------------------------------------------------|
//! | a directory             | each process of the tree makes a file without a name in it                              |
//! | nothing is there        | is made (mode 0600) and has no name any more at once, to see that it can; the processes' files lie beside it |
//! | an empty file           | as if nothing were there; not by a link, which would go in its place                      |
//! | anything else           | refused: nobody's data is overwritten                                                   |
//!
//! No file has a name while anything is in it, so their room comes back when the processes end, however they end.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, bail};
use compcache_pager::shared::{Region, SpillNews};
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl, fstatfs};
use rustix::io::Errno;

use crate::kernel;
use crate::run::failure::{Failure, say};
use crate::run::limits::Limits;
use crate::size::{Shown, Size};

/// A smaller file would hold nothing to speak of.
const LEAST_BYTES: u64 = 1 << 20;
const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58f6;

/// The place of the files.
#[derive(Debug)]
pub struct SpillPlace {
    /// The directory they lie in, from the root.
    pub dir: PathBuf,
    /// The most they take together, bytes; 0 is what there is.
    pub max_bytes: u64,
}

impl SpillPlace {
    /// Checks what was named.
    pub fn choose(
        path: Option<&Path>,
        max: Option<Size>,
        limits: &Limits,
        quiet: bool,
    ) -> Result<Option<Self>, Failure> {
        let Some(path) = path else { return Ok(None) };
        if limits.ram_bytes == 0 {
            return Err(Failure::usage("--spill is for what does not fit into --ram, which is missing".into()));
        }
        let max_bytes = max.map_or(0, |max| max.bytes(kernel::ram_bytes()));
        if max.is_some() && max_bytes < LEAST_BYTES {
            let (max, least) = (Shown(max_bytes), Shown(LEAST_BYTES));
            return Err(Failure::usage(format!("--spill-max {max} is too little to be of use; give {least} or more")));
        }
        let dir = directory(path)?;
        let file =
            unnamed_file(&dir).with_context(|| format!("cannot make a file for --spill in {}", dir.display()))?;
        if !quiet {
            tell_what_is_slow(&dir, &file);
        }
        Ok(Some(Self { dir, max_bytes }))
    }
}

/// The directory that the files are to lie in.
fn directory(path: &Path) -> anyhow::Result<PathBuf> {
    let shown = path.display();
    let absolute = std::path::absolute(path)?;
    let is_empty = match fs::metadata(path) {
        Ok(there) if there.is_dir() => return Ok(absolute),
        Ok(there) if !there.is_file() => bail!(
            "--spill {shown} is neither a directory nor a file; name a directory on the disk that may be written to"
        ),
        Ok(there) if there.len() > 0 => bail!(
            "--spill {shown} is a file with something in it, which is not overwritten; name another, or a directory"
        ),
        // Its name would be taken off, and files made beside that.
        Ok(_) if path.is_symlink() => {
            bail!("--spill {shown} is a link to a file; name that file, or the directory that the files shall lie in")
        }
        Ok(_) => true,
        Err(_) => false,
    };
    if is_empty {
        fs::remove_file(path).with_context(|| format!("cannot take the name off --spill {shown}"))?;
    }
    let made = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
    made.with_context(|| format!("cannot make the file of --spill {shown}"))?;
    fs::remove_file(path).with_context(|| format!("cannot take the name off --spill {shown}"))?;
    Ok(absolute.parent().unwrap_or(Path::new("/")).to_owned())
}

/// A file as the processes will make theirs.
fn unnamed_file(dir: &Path) -> std::io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::open(dir, OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE | OFlags::EXCL, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {
            let path = dir.join(format!(".compcache-spill-{}", std::process::id()));
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            fs::remove_file(&path)?;
            Ok(file)
        }
        done => Ok(done?.into()),
    }
}

fn tell_what_is_slow(dir: &Path, file: &File) {
    let dir = dir.display();
    if fstatfs(file).is_ok_and(|system| [TMPFS, RAMFS].contains(&system.f_type)) {
        say(&format!("compcache: {dir} is in memory itself, so --spill saves none; name a directory on a disk\n"));
    } else if fcntl_getfl(file).and_then(|flags| fcntl_setfl(file, flags | OFlags::DIRECT)).is_err() {
        say(&format!(
            "compcache: the file system of {dir} has no direct input and output; the page cache will hold a part of it, too\n"
        ));
    }
}

/// What the processes had to tell, each thing once.
#[derive(Default)]
pub struct Told(u32);

impl Told {
    /// Says what is new.
    pub fn tell(&mut self, region: &Region) {
        let news = region.header.spill_news.load(Relaxed) & !self.0;
        self.0 |= news;
        let errno = region.header.spill_errno.load(Relaxed) as i32;
        for one in SpillNews::ALL.into_iter().filter(|one| news >> *one as u32 & 1 == 1) {
            say(&format!("compcache: --spill: {}\n", words(one, errno)));
        }
    }
}

fn words(news: SpillNews, errno: i32) -> String {
    let errno = std::io::Error::from_raw_os_error(errno);
    let goes_on = "The program goes on in memory alone, where it may exceed --ram, and it is tried again";
    match news {
        SpillNews::NoFile => format!("a process has no file ({errno}), and keeps to memory, where it may exceed --ram."),
        SpillNews::NoSpace => format!("no space is left where the file lies. {goes_on}; make room there."),
        SpillNews::Max => format!("the files have all they may (--spill-max). {goes_on}."),
        SpillNews::WriteFailed => format!("a write failed ({errno}). {goes_on}."),
        SpillNews::LostPage => {
            "a page could not be read back, or was not what was written. Who touches it gets SIGBUS, rather than wrong bytes."
                .into()
        }
        SpillNews::Recalled => {
            "a process copied itself (fork) and could not hand its file over, so that what was there came back into memory, \
             which may exceed --ram."
                .into()
        }
        SpillNews::NoPart => {
            "a process copied itself (fork) so often in a row that the copy needs the files of all before it. It has none of \
             its own, and keeps to memory, where it may exceed --ram."
                .into()
        }
        SpillNews::NoNumbers => {
            "there were so many copies of processes (fork), or one has written so much, that a process has no file of its own any \
             more. It keeps to memory, where it may exceed --ram; start the program anew."
                .into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { ram_bytes: 64 << 20, resident_bytes: 0 };

    fn refusal(path: &Path) -> String {
        SpillPlace::choose(Some(path), None, &LIMITS, true).unwrap_err().message()
    }

    #[test]
    fn a_file_that_holds_something_is_refused_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine");
        fs::write(&path, "x").unwrap();
        assert!(refusal(&path).contains("not overwritten"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "x");
        assert!(refusal(Path::new("/dev/null")).contains("neither"));
        assert!(refusal(&dir.path().join("no/such")).contains("cannot make"));
        let (empty, link) = (dir.path().join("empty"), dir.path().join("link"));
        fs::write(&empty, "").unwrap();
        std::os::unix::fs::symlink(&empty, &link).unwrap();
        assert!(refusal(&link).contains("is a link"));
        assert!(empty.exists() && link.is_symlink());
        let none = Limits { ram_bytes: 0, resident_bytes: 1 << 30 };
        assert!(SpillPlace::choose(Some(dir.path()), None, &none, true).unwrap_err().message().contains("--ram"));
    }

    #[test]
    fn what_is_named_has_no_name_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spill");
        for round in 0..2 {
            let place = SpillPlace::choose(Some(&path), None, &LIMITS, true).unwrap().unwrap();
            assert_eq!((place.dir.as_path(), place.max_bytes), (dir.path(), 0));
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "round {round}");
            fs::write(&path, "").unwrap();
        }
        SpillPlace::choose(Some(dir.path()), None, &LIMITS, true).unwrap().unwrap();
        assert!(path.exists(), "a directory's files are left alone");
    }
}
