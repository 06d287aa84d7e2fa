//! Where block devices of this machine are mounted, as the kernel tells whoever asks.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use compcache_fuse::{Mounted, mounts, table_of_mounts, unescape};

/// The first mount point of each device, or `[SWAP]`, by the device's path.
pub fn of_this_machine() -> BTreeMap<String, String> {
    parse(&table_of_mounts().unwrap_or_default(), &fs::read("/proc/swaps").unwrap_or_default())
}

fn parse(table: &[u8], swaps: &[u8]) -> BTreeMap<String, String> {
    // To be looked at: what is no text is shown as far as it is.
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    let mut found = BTreeMap::new();
    for mounted in mounts(table).filter(is_believed) {
        found.entry(text(mounted.source())).or_insert_with(|| text(mounted.place()));
    }
    for line in swaps.split(|byte| *byte == b'\n').skip(1) {
        if let Some(device) = line.split(u8::is_ascii_whitespace).next().filter(|device| !device.is_empty()) {
            found.insert(text(unescape(device)), "[SWAP]".into());
        }
    }
    found
}

/// Whether it is what it says that is mounted there. A user's FUSE server may call its source what it likes.
fn is_believed(mounted: &Mounted) -> bool {
    let is_fuse = mounted.kind == b"fuse" || mounted.kind.starts_with(b"fuse.");
    !is_fuse || mounted.super_options.split(|byte| *byte == b',').any(|option| option == b"user_id=0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_and_swap_are_told_apart_names_unescaped_and_users_not_believed() {
        let mounts = b"30 22 0:49 / /srv/\xff rw - tmpfs none rw\n\
            34 22 0:50 / /home/mallory rw - fuse.sshfs /dev/loop3 rw,user_id=1000,group_id=0\n\
            35 22 0:51 / /old rw - fuse.fuse2fs /dev/loop5 rw,user_id=0,group_id=0\n\
            31 22 7:3 / /mnt/my\\040disk rw - ext4 /dev/loop3 rw\n\
            32 22 7:3 / /again rw - ext4 /dev/loop3 rw\n33 22 0:4 / /proc rw - proc proc rw\n";
        let swaps = b"Filename Type Size Used Priority\n/srv/\xff file 1 0 -2\n/dev/loop4 partition 1 0 100\n";
        let found = parse(mounts, swaps);
        assert_eq!(found["/dev/loop3"], "/mnt/my disk");
        assert_eq!(found["/dev/loop4"], "[SWAP]");
        assert_eq!(found["/dev/loop5"], "/old");
    }
}
