//! What a device or a file lies on, as far as the kernel shows it: under partitions, the device mapper, md and loop devices, and the file system a
//! file is on. What lies behind a file system that is on no device, a network's or one in user space, is believed to be somebody else's.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::bail;
use compcache_block::fuse_loop;
use compcache_fuse::{mounts, table_of_mounts};
use rustix::fs::{major, minor};

/// Devices that ask for memory when they are written to; ours are among them.
const NOT_BARE: [&str; 4] = ["loop", "zram", "nbd", "ublkb"];

/// Refuses what lies on one of the server's own disks, whose nodes are `own_devices`: the server would wait for itself. `path` need not be there yet.
///
/// # Errors
/// It does.
pub fn refuse_own(path: &Path, own_devices: &[String]) -> anyhow::Result<()> {
    let own: Vec<&str> = own_devices.iter().filter_map(|device| device.strip_prefix("/dev/")).collect();
    let is_own = |name: &str| own.iter().any(|own| is_of(name, own));
    match device_under(path).and_then(|device| found_under(device, &is_own)) {
        None => Ok(()),
        Some(name) => bail!(
            "{} is on /dev/{name}, a disk of this server, which would wait for itself; name a place on another disk",
            path.display()
        ),
    }
}

/// A device that asks for memory when it is written to, if `device` is one, a part of one, or lies on one.
pub fn not_bare(device: u64) -> Option<String> {
    found_under(device, &|name| NOT_BARE.iter().any(|kind| is_of_kind(name, kind)))
}

/// The block device that is there, or that the file system is on.
fn device_under(path: &Path) -> Option<u64> {
    let whole = fs::canonicalize(path).or_else(|_| fs::canonicalize(path.parent().unwrap_or(path))).ok()?;
    let there = fs::metadata(&whole).ok()?;
    if there.file_type().is_block_device() {
        return Some(there.rdev());
    }
    if major(there.dev()) != 0 {
        return Some(there.dev());
    }
    // Btrfs has numbers of its own, but says what it was mounted from.
    let source = source_of(&table_of_mounts().ok()?, &whole)?;
    let source = fs::metadata(source).ok()?;
    source.file_type().is_block_device().then(|| source.rdev())
}

/// What the file system with the file was mounted from.
fn source_of(table: &[u8], file: &Path) -> Option<PathBuf> {
    let with_file = mounts(table).filter(|mounted| file.starts_with(mounted.place()));
    // Of two at one place the later one is seen.
    with_file.max_by_key(|mounted| mounted.place().components().count()).map(|mounted| mounted.source())
}

/// The first device that `is_it` by its name: the device, its disk if it is a partition, or one that it lies on.
fn found_under(device: u64, is_it: &dyn Fn(&str) -> bool) -> Option<String> {
    let place = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    found_at(&fs::canonicalize(place).ok()?, is_it)
}

fn found_at(place: &Path, is_it: &dyn Fn(&str) -> bool) -> Option<String> {
    let mut names = place.iter().filter_map(|name| name.to_str());
    let own = names.rfind(|name| is_it(name)).map(str::to_owned);
    // Of a partition those of the disk count.
    let below = [place.join("slaves"), place.parent()?.join("slaves")];
    let mut below = below.iter().filter_map(|slaves| fs::read_dir(slaves).ok()).flatten().flatten();
    own.or_else(|| below.find_map(|slave| found_at(&fs::canonicalize(slave.path()).ok()?, is_it)))
        .or_else(|| found_under(under_loop(place)?, is_it))
}

/// What a loop device, or one of which this is a partition, is over, or has its file on.
fn under_loop(place: &Path) -> Option<u64> {
    let name = place.iter().filter_map(|name| name.to_str()).find(|name| is_of_kind(name, "loop"))?;
    let device = fuse_loop::lies_on(&Path::new("/dev").join(name)).ok()?;
    if major(device) != 0 {
        return Some(device);
    }
    let file = fs::read(format!("/sys/block/{name}/loop/backing_file")).ok()?;
    device_under(Path::new(OsStr::from_bytes(file.strip_suffix(b"\n")?)))
}

/// The disk or a partition: `loop7`, also `loop7p1`.
fn is_of(name: &str, disk: &str) -> bool {
    name.strip_prefix(disk).is_some_and(|rest| rest.is_empty() || rest.starts_with('p'))
}

/// The kind, and a number: `loop7`, also `loop7p1`.
fn is_of_kind(name: &str, kind: &str) -> bool {
    name.strip_prefix(kind).is_some_and(|number| number.starts_with(|first: char| first.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not_bare_at(place: &Path) -> Option<String> {
        found_at(place, &|name| NOT_BARE.iter().any(|kind| is_of_kind(name, kind)))
    }

    #[test]
    fn what_takes_memory_to_write_is_found_under_its_parts_and_mappings() {
        let sys = tempfile::tempdir().unwrap();
        let at = |path: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(&path).unwrap();
            path
        };
        assert_eq!(not_bare_at(&at("virtio1/block/vda/vda1")), None);
        assert_eq!(not_bare_at(&at("virtual/block/loop0/loop0p1")).as_deref(), Some("loop0p1"));
        assert_eq!(not_bare_at(&at("virtual/block/ublkb12")).as_deref(), Some("ublkb12"));
        assert_eq!(not_bare_at(&at("virtual/block/loopback")), None, "another kind");
        let mapped = at("virtual/block/dm-1/slaves").parent().unwrap().to_owned();
        std::os::unix::fs::symlink(at("virtual/block/vda"), mapped.join("slaves/vda")).unwrap();
        assert_eq!(not_bare_at(&mapped), None);
        std::os::unix::fs::symlink(at("virtual/block/zram3"), mapped.join("slaves/zram3")).unwrap();
        assert_eq!(not_bare_at(&mapped).as_deref(), Some("zram3"));
        let part = at("virtual/block/dm-1/dm-1p1");
        assert_eq!(not_bare_at(&part).as_deref(), Some("zram3"), "it lies on what the whole lies on");
    }

    #[test]
    fn a_file_is_on_what_its_nearest_mount_is_of() {
        let mounts = b"22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n\
            40 22 0:50 / /mnt rw - btrfs /dev/ublkb4 rw\n\
            39 22 0:49 / /srv/\xff rw - tmpfs none rw\n\
            41 40 0:51 /sub /mnt/with\\040blank rw shared:2 - btrfs /dev/loop3 rw\n";
        let source = |file: &str| source_of(mounts, Path::new(file)).unwrap();
        assert_eq!(source("/mnt/a/b"), Path::new("/dev/ublkb4"));
        assert_eq!(source("/mnt/with blank/b"), Path::new("/dev/loop3"));
        assert_eq!(source("/mntx/b"), Path::new("/dev/vda"));
    }

    #[test]
    fn a_disk_is_not_another_whose_name_goes_on() {
        assert!(is_of("ublkb1", "ublkb1") && is_of("ublkb1p2", "ublkb1"));
        assert!(!is_of("ublkb12", "ublkb1") && !is_of("loop1", "loop12"));
    }
}
