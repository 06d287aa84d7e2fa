//! The region's file: one directory per tree in memory, which every pager of the tree can map and nobody else can name.
//!
//! | path                            | mode | why                                                                    |
//! |---------------------------------|------|------------------------------------------------------------------------|
//! | `/dev/shm/compcache-run-7f3a…/` | 0711 | found by the next supervisor; only its owner can list what is in it    |
//! | `region-92c0…` in it            | 0666 | a child that changed its user must map it too. The name is 128 further |
//! |                                 |      | random bits, which the tree knows by its environment, and nobody else  |
//!
//! The supervisor holds a lock on the directory (which only its owner can open). A directory without the lock belonged to
//! a supervisor that was killed, and the next one removes it, unless a process in it still lives: see [`leftovers`].

pub mod leftovers;
mod mapping;

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use compcache_pager::shared::{self, EvictionWay, Region};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::{Pid, getpid};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::cli::{Codec, Recompress};
use crate::run::limits::Limits;
use crate::run::spill::SpillPlace;
use mapping::Mapping;

const PREFIX: &str = "compcache-run-";
const FILE_PREFIX: &str = "region-";

/// The directories that may hold regions, best first.
fn places() -> Vec<PathBuf> {
    places_with(std::env::var_os("TMPDIR"))
}

/// The same where TMPDIR is this. By whole paths: who opens the region may be in another directory.
fn places_with(temporary: Option<OsString>) -> Vec<PathBuf> {
    let temporary = temporary.filter(|dir| !dir.is_empty()).and_then(|dir| std::path::absolute(dir).ok());
    [Some(PathBuf::from("/dev/shm")), temporary, Some(PathBuf::from("/tmp"))].into_iter().flatten().collect()
}

/// The region of a tree, and its place in the file system.
pub struct TreeRegion {
    dir: PathBuf,
    file: PathBuf,
    mapping: Mapping,
    /// Whether processes of the tree go on in it, once that is known.
    in_use: Option<bool>,
    /// Held while the supervisor lives.
    _lock: File,
}

impl TreeRegion {
    /// Creates the region, and fills in what the pagers are to do.
    pub fn create(
        limits: &Limits,
        spill: Option<&SpillPlace>,
        codec: Codec,
        recompress: Recompress,
        eviction: EvictionWay,
    ) -> anyhow::Result<Self> {
        let tree = Self::create_somewhere()?;
        let header = &tree.region().header;
        header.version.store(shared::VERSION, Relaxed);
        header.eviction_way.store(eviction as u32, Relaxed);
        header.codec.store(codec.codec as u32, Relaxed);
        header.codec_level.store(codec.level as u32, Relaxed);
        if let Some(level) = recompress.level {
            let after_ms = u64::try_from(recompress.after.as_millis()).unwrap_or(u64::MAX);
            header.recompress_after_ms.store(after_ms.max(1), Relaxed);
            header.recompress_level.store(i32::from(level) as u32, Relaxed);
        }
        header.ram_limit_bytes.store(limits.ram_bytes, Relaxed);
        header.resident_limit_bytes.store(limits.resident_bytes, Relaxed);
        header.spill_max_bytes.store(spill.map_or(0, |spill| spill.max_bytes), Relaxed);
        header.supervisor.store(std::process::id(), Relaxed);
        let overcommit = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
        header.overcommits_never.store((overcommit.trim() == "2").into(), Relaxed);
        header.magic.store(shared::MAGIC, Relaxed);
        Ok(tree)
    }

    /// Whether one could be created; it is removed again.
    pub fn rehearse() -> anyhow::Result<()> {
        let mut tree = Self::create_somewhere()?;
        tree.in_use = Some(false);
        Ok(())
    }

    fn create_somewhere() -> anyhow::Result<Self> {
        let mut failures = Vec::new();
        let mut too_large = false;
        for place in places() {
            match Self::create_in(&place) {
                Ok(tree) => return Ok(tree),
                Err(error) => {
                    too_large |= error.kind() == io::ErrorKind::FileTooLarge;
                    failures.push(format!("{}: {error}", place.display()));
                }
            }
        }
        let remedy = match too_large {
            true => "Let files be larger (ulimit -f, systemd's LimitFSIZE=)",
            false => "Make one of these directories writable, or name another in TMPDIR",
        };
        anyhow::bail!(
            "cannot create the region that the pagers share ({}).\n  \
             {remedy}; two megabytes are enough.",
            failures.join("; ")
        )
    }

    fn create_in(place: &Path) -> io::Result<Self> {
        let name = format!("{FILE_PREFIX}{}", random_name()?);
        let (dir, lock) = create_dir_in(place)?;
        let file = dir.join(name);
        let mapping = create_file(&file).inspect_err(|_| remove(&dir))?;
        Ok(Self { dir, file, mapping, in_use: None, _lock: lock })
    }

    /// The region itself.
    pub fn region(&self) -> &Region {
        self.mapping.region()
    }

    /// The path that the pagers map.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Removes the file, or says why it stays: a process of the tree outlives the program.
    pub fn remove_unless_in_use(mut self) -> Option<String> {
        let is_first = getpid() == Pid::INIT;
        let in_use = leftovers::in_use(self.region(), &self.file);
        // With the first process of a container all others end.
        self.in_use = Some(in_use && !is_first);
        if !in_use {
            return None;
        }
        let others = self.region().living().count();
        if is_first {
            return Some(format!(
                "this is the first process of its container, with which all others end, of which {} are paged.\n  \
                 A program that goes on in the background does not do so there: have it stay in the foreground.",
                others.max(1)
            ));
        }
        let who = match others {
            0 | 1 => "a process it started lives".into(),
            n => format!("{n} processes it started live"),
        };
        let dir = self.dir.display();
        Some(format!("{who} on, under the same limit. {dir} stays until then; a later run removes it."))
    }
}

impl Drop for TreeRegion {
    fn drop(&mut self) {
        if !self.in_use.unwrap_or_else(|| leftovers::in_use(self.region(), &self.file)) {
            remove(&self.dir);
        }
    }
}

/// Makes a directory and takes its lock.
fn create_dir_in(place: &Path) -> io::Result<(PathBuf, File)> {
    loop {
        let dir = place.join(format!("{PREFIX}{}", random_name()?));
        DirBuilder::new().mode(0o711).create(&dir)?;
        // Not through the mode above, which the umask has cut.
        let opened = fs::set_permissions(&dir, Permissions::from_mode(0o711)).and_then(|()| File::open(&dir));
        // Another supervisor may have swept it away before it is locked: then it is not there, or has no links any more.
        let lock = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound && place.exists() => continue,
            opened => opened?,
        };
        lock.lock()?;
        if lock.metadata()?.nlink() > 0 && dir.exists() {
            return Ok((dir, lock));
        }
    }
}

fn random_name() -> io::Result<String> {
    let mut bytes = [0u8; 16];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn create_file(path: &Path) -> io::Result<Mapping> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o666))?;
    let len = shared::REGION_BYTES as u64;
    file.set_len(len)?;
    // A full file system must be found out now: a page that it cannot give later ends in SIGBUS.
    match fallocate(&file, FallocateFlags::empty(), 0, len) {
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Mapping::of(&file),
        Err(errno) => Err(errno.into()),
    }
}

/// The region's file in a directory of ours, if there is one.
fn file_in(dir: &Path) -> Option<PathBuf> {
    Some(fs::read_dir(dir).ok()?.next()?.ok()?.path())
}

fn remove(dir: &Path) {
    if let Some(file) = file_in(dir) {
        let _ = fs::remove_file(file);
    }
    let _ = fs::remove_dir(dir);
}

#[cfg(test)]
mod tests {
    use std::thread;

    use compcache_testkit::features::{Feature, requires};
    use rustix::process::Uid;
    use rustix::thread::set_thread_res_uid;

    use super::*;

    #[test]
    fn another_user_can_map_a_region_that_he_was_told_of_and_can_find_none() {
        if !requires(&[Feature::Root]) {
            return;
        }
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(&place, Permissions::from_mode(0o1777)).unwrap();
        let tree = TreeRegion::create_in(place.path()).unwrap();
        let (dir, file) = (tree.dir.clone(), tree.file.clone());
        let another = thread::spawn(move || {
            set_thread_res_uid(None, Uid::from_raw(65534), None).unwrap();
            let found = fs::read_dir(&dir).map(Iterator::count).map_err(|error| error.kind());
            let told = OpenOptions::new().read(true).write(true).open(&file).map(drop);
            (found, told.map_err(|error| error.kind()))
        });
        assert_eq!(another.join().unwrap(), (Err(io::ErrorKind::PermissionDenied), Ok(())));
        let other = TreeRegion::create_in(place.path()).unwrap();
        assert_ne!(tree.file.file_name(), other.file.file_name(), "guessed from another");
        let dirs = [tree.dir.clone(), other.dir.clone()];
        drop((tree, other));
        assert!(dirs.iter().all(|dir| !dir.exists()), "nothing is left");
    }

    #[test]
    fn a_region_is_named_from_the_root_whatever_tmpdir_is() {
        let places = places_with(Some("some/where".into()));
        assert!(places.len() == 3 && places.iter().all(|place| place.is_absolute()));
        assert!(places[1].ends_with("some/where"));
        assert_eq!(places_with(Some("".into())).len(), 2);
    }
}
