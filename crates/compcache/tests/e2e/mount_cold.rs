//! Cold pages of a mount, and of a disk with an origin, are compressed again, and who reads and writes the files notices nothing.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires};

use crate::disk_cold::{PAGES, contents};
use crate::mount::SETTLED;
use crate::support::{PATIENCE, Server, Tree, can_mount, compcache, said};

/// Waits for so many pages in groups.
#[track_caller]
fn must_be_in_groups(pages: u64, grouped: impl Fn() -> u64) {
    let until = Instant::now() + 3 * PATIENCE;
    while grouped() < pages {
        assert!(Instant::now() < until, "{} pages are in groups, and not {pages}", grouped());
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn pages_that_are_not_used_are_recompressed_and_are_what_the_file_is_like() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "32M", "--recompress", "zstd", "--recompress-after", "1"]);
    let mut content = contents();
    let write = |content: &[u8]| {
        fs::write(tree.source().join("file"), content).unwrap();
        // What changed just now is not kept.
        thread::sleep(SETTLED);
    };
    write(&content);
    let read = || {
        tree.drop_kernel_cache();
        fs::read(tree.target().join("file")).unwrap()
    };
    assert!(read() == content);
    must_be_in_groups(PAGES / 10 * 9, || tree.stat("grouped_pages"));
    let (stored, compressed) = (tree.stat("pages_stored"), tree.stat("compr_data_size"));
    assert!(stored >= PAGES / 10 * 9, "{stored} pages are there");
    let found = tree.stat("succ_gets");
    assert!(read() == content);
    assert!(tree.stat("succ_gets") - found > PAGES / 10 * 8, "{}", tree.ok(&["show"]));
    // What is written goes out of its group, by the mount and behind it.
    let mut rng = fastrand::Rng::with_seed(3);
    for above in [true, false] {
        let path = if above { tree.target() } else { tree.source() }.join("file");
        let file = File::options().write(true).open(path).unwrap();
        for _ in 0..200 {
            let (at, byte) = (rng.usize(..content.len() - 6000), rng.u8(..));
            content[at..at + 6000].fill(byte);
            file.write_all_at(&content[at..at + 6000], at as u64).unwrap();
        }
        drop(file);
        assert!(read() == content, "{}", if above { "written above" } else { "written below" });
    }
    // Told otherwise, and told again.
    tree.ok(&["remount", "--recompress", "none"]);
    write(&content);
    assert!(read() == content);
    thread::sleep(Duration::from_secs(3));
    assert_eq!(tree.stat("grouped_pages"), 0);
    let alone = tree.stat("compr_data_size");
    assert!(alone > compressed * 5 / 4, "{alone} bytes alone, {compressed} in groups");
    tree.ok(&["remount", "--recompress", "zstd:1", "--recompress-after", "0.5"]);
    must_be_in_groups(PAGES / 2, || tree.stat("grouped_pages"));
    assert!(read() == content);
    assert!(tree.stat("mem_used_total") <= 32 << 20);
}

#[test]
fn how_cold_pages_are_kept_is_refused_where_it_makes_no_sense() {
    for (flags, words) in [
        (["--recompress", "lz4"], "zstd or zstd:LEVEL"),
        (["--recompress", "zstd:20"], "1 to 19"),
        (["--recompress-after", "long"], "seconds"),
        (["-o", "recompress"], "needs a value"),
        (["-o", "recompress=x"], "makes no sense"),
        (["-o", "recompress_after=x"], "makes no sense"),
    ] {
        let output = Command::new(compcache()).arg("mount").args(flags).args(["/nowhere"; 2]).output().unwrap();
        assert!(!output.status.success() && said(&output).contains(words), "{flags:?}: {}", said(&output));
    }
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["-o", "memory=8M,recompress=zstd:2,recompress_after=5"]);
    for value in ["zstd", "zstd 20", "5", ""] {
        let set = rustix::fs::setxattr(
            tree.target(),
            "user.compcache.recompress",
            value.as_bytes(),
            rustix::fs::XattrFlags::empty(),
        );
        assert_eq!(set, Err(rustix::io::Errno::INVAL), "{value}");
    }
}

#[test]
fn blocks_of_an_origin_that_are_not_used_are_recompressed_and_are_what_it_is_like() {
    if !requires(&[Feature::Program("nbdcopy")]) {
        return;
    }
    let server = Server::start(&[]);
    let path = |name: &str| server.directory.path().join(name).display().to_string();
    let content = contents();
    fs::write(path("origin"), &content).unwrap();
    let at = server.ok(&[
        "disk",
        "create",
        "--name",
        "o",
        "--transport",
        "nbd",
        "--origin",
        &path("origin"),
        "--memory",
        "32M",
        "--recompress",
        "zstd",
        "--recompress-after",
        "1",
    ]);
    let copy = |from: &str, to: &str| {
        let output = Command::new("nbdcopy").args(["--", from, to]).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
    };
    copy(at.trim(), &path("out"));
    must_be_in_groups(PAGES / 10 * 9, || server.stat("o", "grouped_pages"));
    let found = server.stat("o", "succ_gets");
    copy(at.trim(), &path("again"));
    assert!(fs::read(path("again")).unwrap() == content);
    assert!(server.stat("o", "succ_gets") - found > PAGES / 10 * 8, "{}", server.ok(&["show", "o"]));
    // What is written is what is read.
    let other: Vec<u8> = content.iter().rev().copied().collect();
    fs::write(path("in"), &other).unwrap();
    copy(&path("in"), at.trim());
    copy(at.trim(), &path("out"));
    assert!(fs::read(path("out")).unwrap() == other);
    server.ok(&["disk", "rm", "o"]);
    assert!(fs::read(path("origin")).unwrap() == other);
}
