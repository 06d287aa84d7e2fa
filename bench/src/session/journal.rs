//! Where journals lie, whose they are, and how they get shorter.
//!
//! A journal is carried out with the rights of whoever finds it: files are removed, files of the kernel are written to. Where temporary files
//! are, anybody can make a directory of any name. So nothing is taken as it is:
//!
//! | what                                | is refused unless it is                                          |
//! |-------------------------------------|------------------------------------------------------------------|
//! | the directory of all journals       | a directory, no link, of the caller's, that nobody else writes to |
//! | a journal                           | a file, no link, of the caller's                                 |
//!
//! Who may read a file can lock it, so others do not look into that directory either.
//!
//! A journal grows by a line at a time. When steps were undone, one of those that are left is written beside it, locked, and given its name
//! ([`replace`]): whenever the process ends, a journal is there that has all that is left. Who waited for the old one's lock looks at the name again.

use std::env;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::{NAME, Undo};

/// Whose rights the bench has.
pub fn own_uid() -> u32 {
    // SAFETY: geteuid(2) takes nothing, touches nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Where this user's journals lie, whether it is there or not.
pub fn state_directory() -> PathBuf {
    let uid = own_uid();
    if uid == 0 {
        return Path::new("/run").join(NAME);
    }
    // Another user's, as su(1) leaves it, is of no use.
    let is_own = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| found.uid() == uid);
    match env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(is_own) {
        Some(own) => own.join(NAME),
        None => env::temp_dir().join(format!("{NAME}.{uid}")),
    }
}

/// Makes `directory` for the caller alone, which must not be there; what it lies in may have to be made as well, in an emulated machine.
///
/// # Errors
/// It is there, or cannot be made.
pub fn make_new(directory: &Path) -> Result<()> {
    if let Some(parent) = directory.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    let made = DirBuilder::new().mode(0o700).create(directory);
    made.with_context(|| format!("cannot make {}", directory.display()))
}

/// Makes `directory` for the caller alone, or takes the one that is there.
///
/// # Errors
/// It is not the caller's, or others may have written to it. It is as it was.
pub fn make_own(directory: &Path) -> Result<()> {
    match make_new(directory) {
        Err(_) if fs::symlink_metadata(directory).is_ok() => {}
        made => return made,
    }
    let found = fs::symlink_metadata(directory)?;
    let path = directory.display();
    ensure!(found.is_dir() && found.uid() == own_uid(), "{path} is not a directory of yours: somebody else made it");
    ensure!(found.mode() & 0o022 == 0, "others may write to {path}: look at what is in it, and remove it");
    if found.mode() & 0o077 != 0 {
        // Made by an earlier version.
        fs::set_permissions(directory, Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// Locks the journal at `path`, which waits until the session that wrote it has ended. None when it is gone.
///
/// # Errors
/// It is not the caller's, or cannot be locked.
pub fn lock(path: &Path) -> Result<Option<File>> {
    loop {
        let file = match File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.with_context(|| path.display().to_string())?,
        };
        let found = file.metadata()?;
        let is_own = found.is_file() && found.uid() == own_uid();
        ensure!(is_own, "{} is not a journal of yours: somebody else made it", path.display());
        file.lock()?;
        // Whoever held the lock before may have undone and removed it, or put a shorter one in its place.
        let is_there = |now: fs::Metadata| (now.dev(), now.ino()) == (found.dev(), found.ino());
        if fs::symlink_metadata(path).is_ok_and(is_there) {
            return Ok(Some(file));
        }
    }
}

/// What a journal says, as far as its last line was written to the end.
///
/// # Errors
/// It cannot be read.
pub fn read(journal: &File) -> Result<Vec<Undo>> {
    let text = io::read_to_string(journal)?;
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Appends a step.
///
/// # Errors
/// It cannot be written.
pub fn append(mut journal: &File, step: &Undo) -> Result<()> {
    let mut line = serde_json::to_vec(step)?;
    line.push(b'\n');
    // One write, at the end of a file that only this process writes.
    journal.write_all(&line).context("cannot write the journal")
}

/// Puts a new journal, of these steps, in the place of the one at `path`, if there is one. Returns it, locked; the caller holds the lock of the old one
/// until then.
///
/// # Errors
/// It cannot be written. The old one is there.
pub fn replace(path: &Path, steps: &[Undo]) -> Result<File> {
    let beside = beside(path);
    let journal = File::options().create(true).write(true).truncate(true).mode(0o600).open(&beside);
    let journal = journal.with_context(|| beside.display().to_string())?;
    journal.lock()?;
    steps.iter().try_for_each(|step| append(&journal, step))?;
    fs::rename(&beside, path).with_context(|| path.display().to_string())?;
    Ok(journal)
}

/// Removes the journal at `path`, whose lock the caller holds.
///
/// # Errors
/// It is still there.
pub fn remove(path: &Path) -> Result<()> {
    // Of one who died while it was written.
    let _ = fs::remove_file(beside(path));
    fs::remove_file(path).with_context(|| path.display().to_string())
}

fn beside(path: &Path) -> PathBuf {
    path.with_extension("new")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_directory_is_taken_only_if_nobody_else_can_have_written_to_it() {
        let all = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        let own = all.path().join("own");
        make_own(&own).unwrap();
        make_own(&own).unwrap();
        assert_eq!(mode(&own), 0o700);
        fs::set_permissions(&own, Permissions::from_mode(0o755)).unwrap();
        make_own(&own).unwrap();
        assert_eq!(mode(&own), 0o700);
        let link = all.path().join("link");
        symlink(&own, &link).unwrap();
        assert!(make_own(&link).is_err());
        for others in [0o770, 0o702] {
            fs::set_permissions(&own, Permissions::from_mode(others)).unwrap();
            assert!(make_own(&own).is_err(), "{others:o}");
        }
    }

    #[test]
    fn a_journal_that_was_replaced_while_somebody_waited_for_it_is_read_anew() {
        let all = tempfile::tempdir().unwrap();
        let path = all.path().join("1.journal");
        let steps = [1, 2].map(|nth| Undo::File(PathBuf::from(format!("/{nth}"))));
        let long = replace(&path, &steps).unwrap();
        let short = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lock(&path).unwrap().map(|journal| read(&journal).unwrap()));
            std::thread::sleep(std::time::Duration::from_millis(50));
            let short = replace(&path, &steps[..1]).unwrap();
            drop(long);
            append(&short, &steps[1]).unwrap();
            drop(short);
            waiting.join().unwrap()
        });
        assert_eq!(short.as_deref(), Some(&steps[..]));
        remove(&path).unwrap();
        assert!(lock(&path).unwrap().is_none() && fs::read_dir(&all).unwrap().count() == 0);
    }
}
