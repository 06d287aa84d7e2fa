//! Where block devices of this machine are mounted, as the kernel tells whoever asks.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use compcache_fuse::{mounts, table_of_mounts, unescape};

/// The first mount point of each device, or `[SWAP]`, by the device's path.
pub fn of_this_machine() -> BTreeMap<String, String> {
    parse(&table_of_mounts().unwrap_or_default(), &fs::read("/proc/swaps").unwrap_or_default())
}

fn parse(table: &[u8], swaps: &[u8]) -> BTreeMap<String, String> {
    // To be looked at: what is no text is shown as far as it is.
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    let mut found = BTreeMap::new();
    for mounted in mounts(table) {
        found.entry(text(mounted.source())).or_insert_with(|| text(mounted.place()));
    }
    for line in swaps.split(|byte| *byte == b'\n').skip(1) {
        if let Some(device) = line.split(u8::is_ascii_whitespace).next().filter(|device| !device.is_empty()) {
            found.insert(text(unescape(device)), "[SWAP]".into());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_and_swap_are_told_apart_and_names_unescaped() {
        let mounts = b"30 22 0:49 / /srv/\xff rw - tmpfs none rw\n\
            31 22 7:3 / /mnt/my\\040disk rw - ext4 /dev/loop3 rw\n\
            32 22 7:3 / /again rw - ext4 /dev/loop3 rw\n33 22 0:4 / /proc rw - proc proc rw\n";
        let swaps = b"Filename Type Size Used Priority\n/srv/\xff file 1 0 -2\n/dev/loop4 partition 1 0 100\n";
        let found = parse(mounts, swaps);
        assert_eq!(found["/dev/loop3"], "/mnt/my disk");
        assert_eq!(found["/dev/loop4"], "[SWAP]");
    }
}
