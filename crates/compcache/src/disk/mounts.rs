//! Where block devices of this machine are mounted, as the kernel tells whoever asks.

use std::collections::BTreeMap;
use std::fs;

/// The first mount point of each device, or `[SWAP]`, by the device's path.
pub fn of_this_machine() -> BTreeMap<String, String> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    parse(&read("/proc/self/mounts"), &read("/proc/swaps"))
}

fn parse(mounts: &str, swaps: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for line in mounts.lines() {
        let mut words = line.split(' ');
        if let (Some(device), Some(place)) = (words.next(), words.next()) {
            found.entry(unescaped(device)).or_insert_with(|| unescaped(place));
        }
    }
    for device in swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next()) {
        found.insert(unescaped(device), "[SWAP]".into());
    }
    found
}

/// The kernel writes blanks and backslashes as three octal digits.
fn unescaped(word: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .into_iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(word.to_owned(), |word, (from, to)| word.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_and_swap_are_told_apart_and_names_unescaped() {
        let mounts = "/dev/loop3 /mnt/my\\040disk ext4 rw 0 0\n/dev/loop3 /again ext4 rw 0 0\nproc /proc proc rw 0 0\n";
        let swaps = "Filename Type Size Used Priority\n/dev/loop4 partition 1 0 100\n";
        let found = parse(mounts, swaps);
        assert_eq!(found["/dev/loop3"], "/mnt/my disk");
        assert_eq!(found["/dev/loop4"], "[SWAP]");
    }
}
