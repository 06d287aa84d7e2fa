//! The memory limit the process is under, from its control groups, versions 1 and 2.
//!
//! A limit may be set on any ancestor, and the tightest one counts: we walk from the process's own group up to the top
//! of what is mounted. Example: `/proc/self/cgroup` says `0::/user.slice/job`, the mount is at `/sys/fs/cgroup`, so
//! `/sys/fs/cgroup/user.slice/job/memory.max` (and `memory.high`) is read first, then `/sys/fs/cgroup/user.slice/memory.max`, then the top.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use compcache_fuse::{Mounted, mounts, table_of_mounts};

/// Limits of this many bytes and more mean none: version 1 writes "none" as the largest multiple of a page.
const NO_LIMIT_BYTES: u64 = 1 << 60;

/// A memory limit and where it is written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limit {
    /// The limit.
    pub bytes: u64,
    /// The file it stands in.
    pub file: PathBuf,
}

/// The tightest memory limit of this process's control groups; `None` where there is none.
pub fn memory_limit() -> Option<Limit> {
    let cgroups = fs::read("/proc/self/cgroup").ok()?;
    let table = table_of_mounts().ok()?;
    hierarchies(&cgroups, &table).iter().filter_map(|hierarchy| hierarchy.tightest(read_limit)).min_by_key(|l| l.bytes)
}

fn read_limit(file: &Path) -> Option<u64> {
    parse_limit(&fs::read_to_string(file).ok()?)
}

/// A limit file's content; `None` for `max` and for the huge number version 1 uses.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|bytes| *bytes < NO_LIMIT_BYTES)
}

/// One mounted hierarchy that can limit memory, and the process's place in it.
#[derive(PartialEq, Eq, Debug)]
struct Hierarchy {
    /// The process's own group.
    group: PathBuf,
    /// Where the hierarchy is mounted.
    top: PathBuf,
    /// The names of the files with limits: above the second the kernel slows down what takes more.
    files: &'static [&'static str],
}

impl Hierarchy {
    fn tightest(&self, read: impl Fn(&Path) -> Option<u64>) -> Option<Limit> {
        self.group
            .ancestors()
            .take_while(|dir| dir.starts_with(&self.top))
            .flat_map(|dir| self.files.iter().map(move |file| dir.join(file)))
            .filter_map(|file| read(&file).map(|bytes| Limit { bytes, file }))
            .min_by_key(|limit| limit.bytes)
    }
}

/// The hierarchies that may limit memory, from `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn hierarchies(cgroups: &[u8], table: &[u8]) -> Vec<Hierarchy> {
    mounts(table).filter_map(|mounted| hierarchy(cgroups, &mounted)).collect()
}

fn hierarchy(cgroups: &[u8], mounted: &Mounted) -> Option<Hierarchy> {
    let has = |list: &[u8], wanted: &[u8]| list.split(|byte| *byte == b',').any(|one| one == wanted);
    let (files, controller) = match mounted.kind {
        b"cgroup2" => (&["memory.max", "memory.high"][..], &b""[..]),
        b"cgroup" if has(mounted.super_options, b"memory") => (&["memory.limit_in_bytes"][..], &b"memory"[..]),
        _ => return None,
    };
    let path = cgroups.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.splitn(3, |byte| *byte == b':').skip(1);
        let controllers = fields.next()?;
        let path = fields.next()?;
        has(controllers, controller).then(|| Path::new(OsStr::from_bytes(path)))
    })?;
    let top = mounted.place();
    // A bind mount, as containers use it, shows a part of the hierarchy, whose root is then not "/".
    let group = match path.strip_prefix(mounted.root()) {
        Ok(below) => top.join(below),
        Err(_) => top.clone(),
    };
    Some(Hierarchy { group, top, files })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &[u8] = b"30 24 0:29 / /srv/\xff rw - tmpfs none rw\n\
                      35 24 0:30 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n\
                      36 24 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      40 24 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate";

    #[test]
    fn a_v1_group_is_found_below_its_controllers_mount() {
        let found = hierarchies(b"4:memory:/a/b\n1:cpu:/\xff\n0::/\n", V1);
        let memory = |file| move |h: &&Hierarchy| h.files[0] == file;
        let v1 = found.iter().find(memory("memory.limit_in_bytes")).unwrap();
        assert_eq!(v1.group, Path::new("/sys/fs/cgroup/memory/a/b"));
        let v2 = found.iter().find(memory("memory.max")).unwrap();
        assert_eq!(v2.group, Path::new("/sys/fs/cgroup/unified"));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn a_container_sees_its_part_of_the_hierarchy() {
        let mount = b"40 24 0:32 /docker/77 /sys/fs/cgroup ro - cgroup2 cgroup rw";
        assert_eq!(hierarchies(b"0::/docker/77/job\n", mount)[0].group, Path::new("/sys/fs/cgroup/job"));
        assert_eq!(hierarchies(b"0::/../elsewhere\n", mount)[0].group, Path::new("/sys/fs/cgroup"));
    }

    #[test]
    fn the_tightest_ancestor_counts() {
        let hierarchy = Hierarchy { group: "/cg/a/b".into(), top: "/cg".into(), files: &["memory.max", "memory.high"] };
        let limits = |file: &Path| match file.to_str().unwrap() {
            "/cg/a/b/memory.max" => Some(300),
            "/cg/a/memory.max" => Some(200),
            "/cg/a/memory.high" => Some(150),
            "/memory.max" => Some(1),
            _ => None,
        };
        assert_eq!(hierarchy.tightest(limits), Some(Limit { bytes: 150, file: "/cg/a/memory.high".into() }));
        assert_eq!(hierarchy.tightest(|_| None), None);
    }

    #[test]
    fn no_limit_is_written_in_two_ways() {
        assert_eq!(parse_limit("max\n"), None);
        assert_eq!(parse_limit("9223372036854771712\n"), None);
        assert_eq!(parse_limit("104857600\n"), Some(104857600));
    }
}
