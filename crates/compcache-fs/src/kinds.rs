//! What the file systems of the tree are, by what statfs(2) calls them: how far their numbers, names and lengths can be relied on.
//!
//! Asked once for a device, as long as one of its files is known, which holds the file system: after that the kernel gives the device's number to
//! another.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::OwnedFd;

use rustix::fs::fstatfs;

/// One that does not say, or was not asked.
const UNKNOWN: u32 = 0;
/// NFS, CIFS, SMB, Ceph, both AFS, and 9P.
const REMOTE: [u32; 7] = [0x6969, 0xff53_4d42, 0xfe53_4d42, 0x00c3_6400, 0x5346_414f, 0x6b41_4653, 0x0102_1997];
/// ext2 to 4, XFS, btrfs, F2FS and tmpfs.
const SILENT: [u32; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x0102_1994];
/// proc, both cgroups, tracefs, debugfs, securityfs, selinuxfs, resctrl.
const WITHOUT_LENGTHS: [u32; 8] =
    [0x9fa0, 0x0027_e0eb, 0x6367_7270, 0x7472_6163, 0x6462_6720, 0x7363_6673, 0xf97c_ff8c, 0x0765_5821];
/// FAT, exFAT, NTFS, CIFS and SMB.
const FOLDING: [u32; 5] = [0x4d44, 0x2011_bab0, 0x7366_746e, 0xff53_4d42, 0xfe53_4d42];
const FUSE: u32 = 0x6573_5546;
const OVERLAYFS: u32 = 0x794c_7630;

/// What a file system is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kind(u32);

impl Kind {
    #[cfg(test)]
    pub const NFS: Kind = Kind(REMOTE[0]);

    pub fn of(fd: &OwnedFd) -> Kind {
        Kind(fstatfs(fd).map_or(UNKNOWN, |stat| stat.f_type as u32))
    }

    /// A server, which may use a file's number again while we hold it, and asks by itself who may do what.
    pub fn is_remote(self) -> bool {
        REMOTE.contains(&self.0)
    }

    /// It may say something when a file is closed.
    pub fn tells_at_close(self) -> bool {
        !SILENT.contains(&self.0)
    }

    /// A file of no length has nothing in it.
    pub fn has_lengths(self) -> bool {
        !WITHOUT_LENGTHS.contains(&self.0)
    }

    /// It finds a file by its name in capitals too.
    pub fn folds_case(self) -> bool {
        FOLDING.contains(&self.0)
    }

    /// Another's server, which may give a file another number whenever it is looked up.
    pub fn is_fuse(self) -> bool {
        self.0 == FUSE
    }

    pub fn is_overlayfs(self) -> bool {
        self.0 == OVERLAYFS
    }
}

/// Those of all devices of which files are known, and how many are.
#[derive(Default)]
pub struct Kinds(HashMap<u64, (Kind, usize)>);

impl Kinds {
    pub fn get(&self, device: u64) -> Option<Kind> {
        self.0.get(&device).map(|(kind, _)| *kind)
    }

    /// A file of the device is known from now on.
    pub fn hold(&mut self, device: u64, kind: Kind) {
        self.0.entry(device).or_insert((kind, 0)).1 += 1;
    }

    /// And from now on not.
    pub fn let_go(&mut self, device: u64) {
        if let Entry::Occupied(mut held) = self.0.entry(device) {
            held.get_mut().1 -= 1;
            if held.get().1 == 0 {
                held.remove();
            }
        }
    }

    #[cfg(test)]
    pub fn set(&mut self, device: u64, kind: Kind) {
        self.0.get_mut(&device).expect("a file of it is known").0 = kind;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_is_is_known_as_long_as_one_of_its_files() {
        let mut kinds = Kinds::default();
        kinds.hold(42, Kind(FUSE));
        kinds.hold(42, Kind(FUSE));
        kinds.hold(43, Kind::NFS);
        kinds.let_go(42);
        assert_eq!(kinds.get(42), Some(Kind(FUSE)));
        kinds.let_go(42);
        assert_eq!((kinds.get(42), kinds.get(43)), (None, Some(Kind::NFS)), "its number may be another's by now");
    }
}
