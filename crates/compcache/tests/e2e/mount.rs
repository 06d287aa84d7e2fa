//! `compcache mount`: its cache, what is noticed of changes behind it, its settings, its end.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use compcache_testkit::features::{Feature, mounts, requires};

use crate::support::{PATIENCE, Tree, by_rings, can_mount, compcache, said, sample_until, scratch};

const MIB: usize = 1 << 20;

/// Longer than a file's times need to tell its versions apart.
pub const SETTLED: Duration = Duration::from_millis(100);

/// Text that compresses, and is different everywhere.
fn text(bytes: usize, which: u32) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes + 64);
    for line in 0u64.. {
        if text.len() >= bytes {
            break;
        }
        let _ = writeln!(text, "file {which} line {line} of text {:x}", line * 7919 % 65_536);
    }
    text.truncate(bytes);
    text
}

#[test]
fn pages_that_the_kernel_dropped_are_found_again_without_reading_below() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&["--memory", "64M"]);
    let content = text(16 * MIB, 1);
    fs::write(tree.source().join("f"), &content).unwrap();
    thread::sleep(SETTLED);
    for _ in 0..3 {
        assert!(fs::read(tree.target().join("f")).unwrap() == content);
        tree.drop_kernel_cache();
    }
    let below = tree.stat("failed_gets");
    assert!(below <= 4096 + 512, "{below} pages were read below, of 4096");
    assert!(tree.stat("succ_gets") >= 2 * 4096 - 512, "{} pages were found", tree.stat("succ_gets"));
    let (data, memory) = (tree.stat("orig_data_size"), tree.stat("mem_used_total"));
    assert!(data >= 15 << 20 && memory < data / 2, "{memory} bytes for {data}");
    tree.unmount();
}

#[test]
fn what_is_written_to_an_exclusive_tree_is_found_without_reading_below() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&["--memory", "64M", "--exclusive"]);
    // As much as there are buffers for, in two files; then a part of it anew.
    let mut content = text(MIB, 1);
    for name in ["f", "g"] {
        fs::write(tree.target().join(name), &content).unwrap();
    }
    let pages = |tree: &Tree| tree.stat("pages_stored");
    let stored = |count| {
        let begun = Instant::now();
        while pages(&tree) < count && begun.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(pages(&tree), count);
    };
    stored(512);
    let part = text(64 << 10, 2);
    File::options().write(true).open(tree.target().join("f")).unwrap().write_all_at(&part, 100 << 10).unwrap();
    content[100 << 10..164 << 10].copy_from_slice(&part);
    stored(512);
    // What becomes of its name, times and rights is no change of it.
    fs::rename(tree.target().join("f"), tree.target().join("h")).unwrap();
    fs::hard_link(tree.target().join("h"), tree.target().join("i")).unwrap();
    fs::set_permissions(tree.target().join("h"), fs::Permissions::from_mode(0o600)).unwrap();
    File::options().write(true).open(tree.target().join("h")).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    tree.drop_kernel_cache();
    assert!(fs::read(tree.target().join("h")).unwrap() == content);
    // Others have the kernel drop what it has, too, and then it is read again.
    let (missed, found) = (tree.stat("failed_gets"), tree.stat("succ_gets"));
    assert!(missed == 0 && found >= 256, "{missed} pages were read below, {found} found");
    // A short file, made longer behind its end, by a part of a page and by a hole.
    fs::write(tree.target().join("short"), &content[..5000]).unwrap();
    stored(514);
    let short = File::options().read(true).write(true).open(tree.target().join("short")).unwrap();
    tree.drop_kernel_cache();
    let mut expected = content[..5000].to_vec();
    assert!(fs::read(tree.target().join("short")).unwrap() == expected);
    assert_eq!(tree.stat("failed_gets"), 0);
    short.set_len(6000).unwrap();
    short.write_all_at(b"far", 20_000).unwrap();
    expected.resize(20_000, 0);
    expected.extend_from_slice(b"far");
    drop(short);
    tree.drop_kernel_cache();
    assert!(fs::read(tree.target().join("short")).unwrap() == expected);
    tree.unmount();
}

#[test]
fn a_new_file_of_an_exclusive_tree_has_nothing_of_one_that_had_its_number() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&["--memory", "64M", "--exclusive"]);
    let (content, mut numbers) = (text(MIB, 1), BTreeSet::new());
    for round in 0..50 {
        let path = tree.target().join("f");
        let old = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        numbers.insert(old.metadata().unwrap().ino());
        // Read and written when it has no name any more.
        fs::remove_file(&path).unwrap();
        old.write_all_at(&content, 0).unwrap();
        tree.drop_kernel_cache();
        let mut back = vec![0; MIB];
        old.read_exact_at(&mut back, 0).unwrap();
        assert!(back == content);
        drop(old);
        let new = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        numbers.insert(new.metadata().unwrap().ino());
        new.write_all_at(b"end", MIB as u64 - 3).unwrap();
        new.read_exact_at(&mut back, 0).unwrap();
        assert!(back[..MIB - 3].iter().all(|byte| *byte == 0), "round {round}");
        fs::remove_file(&path).unwrap();
    }
    assert!(numbers.len() < 50, "hardly a number was used again, this shows nothing: {} of 100", numbers.len());
    tree.unmount();
}

#[test]
fn what_is_read_is_not_kept_a_second_time_for_the_file_below() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "64M"]);
    fs::write(tree.source().join("f"), text(32 * MIB, 1)).unwrap();
    tree.drop_kernel_cache();
    fs::read(tree.target().join("f")).unwrap();
    let file = File::open(tree.source().join("f")).unwrap();
    let pages = 32 * MIB / 4096;
    let mut resident = vec![0u8; pages];
    // SAFETY: a mapping of a file that is not cut while it is there; the answers of mincore have room.
    unsafe {
        use std::os::fd::AsRawFd;
        let map = libc::mmap(std::ptr::null_mut(), 32 * MIB, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(map, libc::MAP_FAILED);
        assert_eq!(libc::mincore(map, 32 * MIB, resident.as_mut_ptr()), 0);
        libc::munmap(map, 32 * MIB);
    }
    let resident = resident.iter().filter(|page| **page & 1 == 1).count();
    assert!(resident < pages / 10, "{resident} of {pages} pages are kept below as well");
}

/// Whether the file system of the tree below says that it takes direct reads of pages, and the kernel what it has cached.
fn takes_direct_reads(file: &File) -> bool {
    use std::os::fd::AsRawFd;
    // SAFETY: the kernel writes into a structure of that type, for which all zeroes is a value; the rest are numbers and a text that ends in zero.
    let stat = unsafe {
        let mut stat: libc::statx = std::mem::zeroed();
        let done =
            libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut stat);
        assert_eq!(done, 0);
        stat
    };
    let tells_what_is_cached = kernel_is_at_least(6, 5);
    (1..=4096).contains(&stat.stx_dio_offset_align) && stat.stx_dio_mem_align <= 4096 && tells_what_is_cached
}

fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.trim().parse().ok());
    (numbers.next(), numbers.next()) >= (Some(major), Some(minor))
}

#[test]
fn long_reads_of_what_nobody_else_reads_are_direct() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "64M"]);
    let (below, above) = (tree.source().join("f"), tree.target().join("f"));
    // It ends within a page.
    let mut content = text(4 * MIB + 1234, 1);
    fs::write(&below, &content).unwrap();
    thread::sleep(SETTLED);
    let takes_direct = takes_direct_reads(&File::open(&below).unwrap());
    let direct_descriptors = || {
        let flags = |entry: std::io::Result<fs::DirEntry>| {
            let info = fs::read_to_string(entry.ok()?.path()).ok()?;
            i32::from_str_radix(info.lines().find_map(|line| line.strip_prefix("flags:"))?.trim(), 8).ok()
        };
        let all = fs::read_dir(format!("/proc/{}/fdinfo", tree.child.id())).unwrap();
        all.filter_map(flags).filter(|flags| flags & libc::O_DIRECT != 0).count()
    };
    for round in 0..4u8 {
        tree.drop_kernel_cache();
        let file = File::open(&above).unwrap();
        let mut read = vec![0; content.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read == content, "round {round}");
        if round == 0 {
            assert_eq!(direct_descriptors(), usize::from(takes_direct));
        }
        drop(file);
        // Behind the mount, through a mapping, not written out; a part of it in the middle of a long run.
        let file = File::options().read(true).write(true).open(&below).unwrap();
        // SAFETY: a mapping of a file that is not cut while it is there, written to within its length.
        unsafe {
            use std::os::fd::AsRawFd;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let map = libc::mmap(std::ptr::null_mut(), MIB, access, libc::MAP_SHARED, file.as_raw_fd(), 0);
            assert_ne!(map, libc::MAP_FAILED);
            map.cast::<u8>().add(100_000).write_bytes(round, 50_000);
            content[100_000..150_000].fill(round);
            thread::sleep(SETTLED);
            assert!(fs::read(&above).unwrap() == content, "round {round}, written to below");
            libc::munmap(map, MIB);
        }
    }
    // Nobody waits for the end of the last.
    let give_up = Instant::now() + PATIENCE;
    while direct_descriptors() > 0 {
        assert!(Instant::now() < give_up, "a file that is closed has its second descriptor still");
        thread::sleep(Duration::from_millis(10));
    }
    // What somebody else has in the page cache below is read from there. What is mapped stays there, whoever drops caches.
    let (below, above) = (tree.source().join("g"), tree.target().join("g"));
    fs::write(&below, &content).unwrap();
    thread::sleep(SETTLED);
    let file = File::open(&below).unwrap();
    // SAFETY: a mapping of a file that is not cut while it is there; nothing is done with it.
    let map = unsafe {
        use std::os::fd::AsRawFd;
        let how = libc::MAP_SHARED | libc::MAP_POPULATE;
        libc::mmap(std::ptr::null_mut(), content.len(), libc::PROT_READ, how, file.as_raw_fd(), 0)
    };
    assert_ne!(map, libc::MAP_FAILED);
    let file = File::open(&above).unwrap();
    let mut read = vec![0; content.len()];
    file.read_exact_at(&mut read, 0).unwrap();
    assert!(read == content);
    assert_eq!(direct_descriptors(), 0);
    // SAFETY: the mapping from above, to which nothing refers.
    unsafe { libc::munmap(map, content.len()) };
}

#[test]
fn what_is_read_ahead_is_what_the_file_has() {
    if !can_mount(&[]) {
        return;
    }
    for (exclusive, downwards) in [(false, false), (false, true), (true, false), (true, true)] {
        // Nothing is read ahead of who is slow, which a busy machine makes him.
        let is_shown = (0..4).any(|_| reads_ahead_what_the_file_has(exclusive, downwards).is_some());
        assert!(is_shown, "{exclusive} {downwards}: nothing is read ahead");
    }
}

/// What is read ahead of who reads in order is not older than that read. Read with O_DIRECT: the kernel keeps nothing then. `None` where nothing was read
/// ahead.
fn reads_ahead_what_the_file_has(exclusive: bool, downwards: bool) -> Option<()> {
    const AT_ONCE: usize = 128 << 10;
    let options = if exclusive { vec!["--memory", "64M", "--exclusive"] } else { vec!["--memory", "64M"] };
    let mut tree = Tree::mounted(&options);
    let mut content = text(8 * MIB, 1);
    fs::write(tree.source().join("f"), &content).unwrap();
    thread::sleep(SETTLED);
    let read_below = || {
        let io = fs::read_to_string(format!("/proc/{}/io", tree.child.id())).unwrap();
        io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse::<usize>().unwrap()
    };
    let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(tree.target().join("f")).unwrap();
    let places = 8 * MIB / AT_ONCE;
    let place = |number: usize| if downwards { places - 1 - number } else { number } * AT_ONCE;
    let read = |from: usize, to: usize, content: &[u8]| {
        let mut into = vec![0; AT_ONCE];
        for at in (from..to).map(place) {
            file.read_exact_at(&mut into, at as u64).unwrap();
            assert!(into == content[at..at + AT_ONCE], "{options:?} {downwards} at {at}");
        }
    };
    let write = |directory: &Path, number: usize, which: u32, content: &mut [u8]| {
        let (new, at) = (text(5000, which), place(number) + 100);
        File::options().write(true).open(directory.join("f")).unwrap().write_all_at(&new, at as u64).unwrap();
        content[at..at + new.len()].copy_from_slice(&new);
    };
    // What comes after these is there when it returns.
    let read_and_ahead = |from: usize, to: usize, content: &[u8]| {
        let before = read_below();
        read(from, to, content);
        let give_up = Instant::now() + PATIENCE / 4;
        while read_below() < before + (to - from + 2) * AT_ONCE {
            if Instant::now() > give_up {
                return None;
            }
            thread::sleep(Duration::from_millis(10));
        }
        thread::sleep(Duration::from_millis(50));
        Some(())
    };
    // Through the mount, in what was read ahead; then behind it, if that may be.
    read_and_ahead(0, 4, &content)?;
    write(&tree.target(), 4, 2, &mut content);
    read(4, 12, &content);
    thread::sleep(Duration::from_millis(1200));
    read_and_ahead(12, 20, &content)?;
    write(&if exclusive { tree.target() } else { tree.source() }, 20, 3, &mut content);
    read(20, 30, &content);
    thread::sleep(Duration::from_millis(1200));
    read_and_ahead(30, 36, &content)?;
    // And it ends before that.
    if !downwards {
        let end = place(36) as u64 + 5000;
        File::options().write(true).open(tree.target().join("f")).unwrap().set_len(end).unwrap();
        let mut into = vec![0; AT_ONCE];
        assert_eq!(file.read_at(&mut into, place(36) as u64).unwrap(), 5000);
        assert!(into[..5000] == content[place(36)..][..5000]);
    }
    drop(file);
    tree.unmount();
    Some(())
}

#[test]
fn a_change_behind_the_mount_is_seen_at_the_next_open() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "64M"]);
    let (below, above) = (tree.source().join("f"), tree.target().join("f"));
    fs::write(&below, text(MIB, 1)).unwrap();
    thread::sleep(SETTLED);
    assert!(fs::read(&above).unwrap() == text(MIB, 1));
    // In place, of the same size.
    let file = File::options().write(true).open(&below).unwrap();
    for round in 2..30 {
        file.write_all_at(&text(MIB, round), 0).unwrap();
        assert!(fs::read(&above).unwrap() == text(MIB, round), "round {round}");
        if round.is_multiple_of(3) {
            thread::sleep(SETTLED);
            assert!(fs::read(&above).unwrap() == text(MIB, round), "round {round}, again");
        }
    }
    // Another file of that name, with the times of the old; then none, and one of the same number again.
    let times = fs::metadata(&below).unwrap().modified().unwrap();
    fs::write(tree.source().join("g"), text(MIB, 50)).unwrap();
    File::options().write(true).open(tree.source().join("g")).unwrap().set_modified(times).unwrap();
    fs::rename(tree.source().join("g"), &below).unwrap();
    assert!(fs::read(&above).unwrap() == text(MIB, 50));
    drop(file);
    for round in 60..90 {
        fs::remove_file(&below).unwrap();
        assert!(fs::read(&above).is_err());
        fs::write(&below, text(MIB / 4, round)).unwrap();
        assert!(fs::read(&above).unwrap() == text(MIB / 4, round), "round {round}");
    }
    fs::remove_file(&below).unwrap();
    symlink("elsewhere", &below).unwrap();
    assert!(fs::read_link(&above).is_ok());
}

#[test]
fn a_file_that_grows_behind_the_mount_is_seen_to_while_it_is_open() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "64M"]);
    let (below, above) = (tree.source().join("log"), tree.target().join("log"));
    let mut expected = text(5000, 1);
    fs::write(&below, &expected).unwrap();
    thread::sleep(SETTLED);
    let open = File::open(&above).unwrap();
    let mut writer = File::options().append(true).open(&below).unwrap();
    for round in 0..40 {
        let mut found = vec![0; expected.len() + 1000];
        let length = open.read_at(&mut found, 0).unwrap();
        assert!(found[..length] == expected, "round {round}: {length} bytes of {}", expected.len());
        let more = text(700, round);
        writer.write_all(&more).unwrap();
        expected.extend(more);
    }
}

#[test]
fn what_is_appended_behind_what_was_appended_below_is_read_in_its_place() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&[]);
    for (name, ours) in [("parts", text(300, 1)), ("pages", text(9000, 2))] {
        let (below, above) = (tree.source().join(name), tree.target().join(name));
        let mut expected = text(5000, 3);
        fs::write(&below, &expected).unwrap();
        let mut writer = File::options().append(true).read(true).open(&above).unwrap();
        let mut found = vec![0; expected.len()];
        if name == "parts" {
            // Else the kernel has no page of it.
            writer.read_exact_at(&mut found, 0).unwrap();
            assert!(found == expected);
        }
        for round in 0..20 {
            // The kernel hears nothing of the first, and takes the second to be where the first is.
            let theirs = text(100, round + 4);
            File::options().append(true).open(&below).unwrap().write_all(&theirs).unwrap();
            writer.write_all(&ours).unwrap();
            expected.extend([&theirs, &ours].into_iter().flatten());
            // Not to the end, so that the kernel does not ask how long the file is.
            found.resize(expected.len() - theirs.len(), 0);
            let give_up = Instant::now() + PATIENCE;
            while writer.read_exact_at(&mut found, 0).is_err() || found != expected[..found.len()] {
                assert!(Instant::now() < give_up, "{name}, round {round}");
                thread::sleep(Duration::from_millis(1));
            }
        }
        thread::sleep(SETTLED);
        assert!(fs::read(&above).unwrap() == expected);
    }
}

#[test]
fn appending_from_both_sides_loses_nothing() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&[]);
    // Each byte says who wrote it.
    let lines = |zero: u8| {
        (0..2000).map(move |number| {
            let digits = format!("{number}:").into_bytes();
            digits.into_iter().map(|digit| digit - b'0' + zero).collect::<Vec<u8>>()
        })
    };
    let append = |path: std::path::PathBuf, zero: u8| {
        let mut file = File::options().create(true).append(true).open(path).unwrap();
        lines(zero).for_each(|line| file.write_all(&line).unwrap());
    };
    thread::scope(|scope| {
        scope.spawn(|| append(tree.source().join("log"), b'A'));
        scope.spawn(|| append(tree.target().join("log"), b'a'));
    });
    let below = fs::read(tree.source().join("log")).unwrap();
    for (zero, is_theirs) in [(b'A', u8::is_ascii_uppercase as fn(&u8) -> bool), (b'a', u8::is_ascii_lowercase)] {
        let theirs: Vec<_> = below.iter().copied().filter(is_theirs).collect();
        assert!(theirs == lines(zero).flatten().collect::<Vec<_>>());
    }
    // Lines of the mount's side are in one piece, but for those over the end of a page: the kernel asks for these in two.
    let torn = below.chunk_by(|one, other| one.is_ascii_lowercase() == other.is_ascii_lowercase());
    let torn = torn.filter(|piece| !matches!(piece.last(), Some(b'k' | b'K'))).count();
    assert!(torn <= below.len() / 4096 + 1, "{torn} lines are torn");
    assert!(fs::read(tree.target().join("log")).unwrap() == below);
}

#[test]
fn the_limit_is_kept_when_it_is_lowered_to_nothing_and_raised_under_load() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "16M"]);
    let files: Vec<_> = (0..4).map(|which| text(8 * MIB, which)).collect();
    for (which, content) in files.iter().enumerate() {
        fs::write(tree.source().join(which.to_string()), content).unwrap();
    }
    thread::sleep(SETTLED);
    let read_all = || {
        for (which, content) in files.iter().enumerate() {
            assert!(fs::read(tree.target().join(which.to_string())).unwrap() == *content);
            tree.drop_kernel_cache();
        }
    };
    thread::scope(|scope| {
        let reader = scope.spawn(|| (0..6).for_each(|_| read_all()));
        for limit in ["0", "4M", "1M", "24M", "2M"].iter().cycle() {
            if reader.is_finished() {
                break;
            }
            tree.ok(&["remount", "--memory", limit]);
            thread::sleep(Duration::from_millis(50));
        }
    });
    for (limit, bytes) in [("8M", 8 << 20), ("0", 0), ("48M", 48 << 20)] {
        tree.ok(&["remount", "--memory", limit]);
        read_all();
        read_all();
        let give_up = Instant::now() + PATIENCE;
        // Tables of the pool stay, a few hundred kilobytes; compaction comes a few times a second.
        while tree.stat("mem_used_total") > bytes.max(2 << 20) {
            assert!(Instant::now() < give_up, "{} bytes with a limit of {bytes}", tree.stat("mem_used_total"));
            thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(tree.stat("pages_stored") > 0, bytes > 0);
    }
    tree.ok(&["remount", "--codec", "zstd:3"]);
    read_all();
}

#[test]
fn a_scan_of_a_large_file_leaves_what_is_used_again_in_the_cache() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "4M"]);
    fs::write(tree.source().join("used"), text(2 * MIB, 1)).unwrap();
    fs::write(tree.source().join("scanned"), text(96 * MIB, 2)).unwrap();
    thread::sleep(SETTLED);
    for _ in 0..3 {
        fs::read(tree.target().join("used")).unwrap();
        tree.drop_kernel_cache();
    }
    fs::read(tree.target().join("scanned")).unwrap();
    let did_not_fit: u64 = ["evictions", "failed_puts", "rejected_puts"].map(|name| tree.stat(name)).iter().sum();
    assert!(did_not_fit > 10_000, "the scan fits: {did_not_fit}");
    tree.drop_kernel_cache();
    let before = tree.stat("succ_gets");
    fs::read(tree.target().join("used")).unwrap();
    let found = tree.stat("succ_gets") - before;
    assert!(found > 450, "{found} of 512 pages were still there");
}

#[test]
fn a_tree_mounted_over_itself_is_there_and_back_again() {
    if !can_mount(&[]) {
        return;
    }
    let directory = scratch();
    fs::create_dir(directory.path().join("source")).unwrap();
    fs::write(directory.path().join("source/f"), "before").unwrap();
    let mut tree = Tree::over_itself(directory, &[]);
    assert_eq!(fs::read_to_string(tree.target().join("f")).unwrap(), "before");
    fs::write(tree.target().join("g"), "during").unwrap();
    assert!(tree.stat("memlimit") > 0);
    tree.unmount();
    assert_eq!(fs::read_to_string(tree.source().join("g")).unwrap(), "during");
    assert!(!mounts().contains(tree.source().to_str().unwrap()));
}

#[test]
fn a_mount_in_use_is_not_ended_by_a_signal_and_then_is() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    let held = File::create(tree.target().join("f")).unwrap();
    let output = Command::new(compcache()).arg("umount").arg(tree.target()).output().unwrap();
    assert!(!output.status.success() && said(&output).contains("in use"), "{}", said(&output));
    // SAFETY: it takes numbers, and the process is our child, not yet waited for.
    let end = |tree: &Tree| unsafe { libc::kill(tree.child.id() as i32, libc::SIGTERM) };
    end(&tree);
    thread::sleep(Duration::from_millis(300));
    assert!(tree.child.try_wait().unwrap().is_none(), "it ended, though a file is open");
    (&held).write_all(b"still served").unwrap();
    drop(held);
    let give_up = Instant::now() + PATIENCE;
    while tree.child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < give_up, "it does not end");
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(fs::read(tree.source().join("f")).unwrap(), b"still served");
    assert!(!mounts().contains(tree.target().to_str().unwrap()));
}

#[test]
fn a_killed_server_loses_nothing_that_was_synced_and_its_mount_can_be_ended() {
    if !can_mount(&[]) {
        return;
    }
    for round in 0..5 {
        let mut tree = Tree::mounted(&[]);
        let synced = AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut file = File::create(tree.target().join("log")).unwrap();
                let mut line = |number| file.write_all(format!("{number:08}\n").as_bytes()).and(file.sync_data());
                while line(synced.load(Relaxed)).is_ok() {
                    synced.fetch_add(1, Relaxed);
                }
            });
            // And others, who must not hang.
            scope.spawn(|| while fs::read(tree.target().join("log")).is_ok() {});
            let give_up = Instant::now() + PATIENCE;
            while synced.load(Relaxed) == 0 && Instant::now() < give_up {
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(round * 50));
            // SAFETY: it takes numbers, and the process is our child, not yet waited for.
            assert_eq!(unsafe { libc::kill(tree.child.id() as i32, libc::SIGKILL) }, 0);
        });
        let synced = synced.into_inner();
        tree.child.wait().unwrap();
        let log = fs::read_to_string(tree.source().join("log")).unwrap();
        let whole = (0..synced).all(|number| log.get(number * 9..number * 9 + 9) == Some(&format!("{number:08}\n")));
        assert!(synced > 0 && whole, "{synced} lines were synced, {} bytes are there", log.len());
        let show = Command::new(compcache()).arg("show").arg(tree.target()).output().unwrap();
        assert!(!show.status.success() && said(&show).contains("umount"), "{}", said(&show));
        let again = Command::new(compcache()).arg("mount").arg(tree.source()).arg(tree.target()).output().unwrap();
        assert!(said(&again).contains("umount"), "{}", said(&again));
        // By a name that a shell completes, through a link.
        let link = tree.source().with_file_name("link");
        symlink(tree.target().parent().unwrap(), &link).unwrap();
        let umount = || Command::new(compcache()).arg("umount").arg(link.join("target/")).status().unwrap();
        sample_until("nobody that other tests start has it", 10, || umount().success().then_some(()));
        assert_eq!(fs::read_dir(tree.target()).unwrap().count(), 0);
    }
}

#[test]
fn who_asks_a_server_that_dies_before_it_answers_is_told_that_it_is_dead() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    // SAFETY: it takes numbers, and the process is our child, not yet waited for.
    let send = |pid: u32, signal| assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
    send(tree.child.id(), libc::SIGSTOP);
    let show = Command::new(compcache()).arg("show").arg(tree.target()).stderr(Stdio::piped()).spawn().unwrap();
    let asks = || fs::read_to_string(format!("/proc/{}/wchan", show.id())).unwrap_or_default();
    let until = Instant::now() + Duration::from_secs(30);
    while !["fuse", "request_wait_answer"].iter().any(|place| asks().contains(place)) {
        assert!(Instant::now() < until, "it waits for something else: {}", asks());
        thread::sleep(Duration::from_millis(10));
    }
    send(tree.child.id(), libc::SIGKILL);
    tree.child.wait().unwrap();
    let show = show.wait_with_output().unwrap();
    assert!(!show.status.success() && said(&show).contains("was killed"), "{}", said(&show));
    tree.ok(&["umount"]);
}

#[test]
fn what_cannot_be_mounted_is_refused_with_the_reason() {
    let directory = scratch();
    fs::create_dir(directory.path().join("inside")).unwrap();
    fs::write(directory.path().join("file"), "").unwrap();
    let refused = |source: &str, target: &str, words: &[&str]| {
        let output =
            Command::new(compcache()).current_dir(&directory).args(["mount", source, target]).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty());
        for word in words {
            assert!(said(&output).contains(word), "no {word:?} in {}", said(&output));
        }
    };
    refused("none", "inside", &["none", "source", "No such file"]);
    refused("inside", "none", &["mount on", "none", "No such file"]);
    refused("file", "inside", &["not a directory"]);
    refused(".", "inside", &["lies inside"]);
    let output = Command::new(compcache()).arg("umount").arg(directory.path()).output().unwrap();
    assert!(said(&output).contains("nothing is mounted"), "{}", said(&output));
    let output = Command::new(compcache()).args(["show", "/proc"]).output().unwrap();
    assert!(said(&output).contains("not where compcache has mounted"), "{}", said(&output));
}

#[test]
fn a_full_file_system_below_says_so_and_nothing_else_is_harmed() {
    if !can_mount(&[]) || !requires(&[Feature::Program("mount")]) {
        return;
    }
    let directory = scratch();
    let source = directory.path().join("source");
    fs::create_dir(&source).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4M", "none"]).arg(&source).status().unwrap();
    assert!(mounted.success());
    let mut tree = Tree::over_itself(directory, &[]);
    let full = (|| -> std::io::Result<()> {
        let mut file = File::create(tree.target().join("f"))?;
        loop {
            file.write_all(&text(100_000, 1))?;
        }
    })();
    assert_eq!(full.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    let written = fs::read(tree.target().join("f")).unwrap();
    assert!(written.len() > 3 * MIB);
    assert!(written.chunks(100_000).all(|chunk| *chunk == text(100_000, 1)[..chunk.len()]));
    fs::remove_file(tree.target().join("f")).unwrap();
    // The kernel tells of the end of a file's use when it likes, and until then it takes room.
    let give_up = Instant::now() + PATIENCE;
    while fs::write(tree.target().join("g"), text(MIB, 2)).is_err() {
        assert!(Instant::now() < give_up, "there is no room, though the large file is gone");
        thread::sleep(Duration::from_millis(10));
    }
    assert!(fs::read(tree.target().join("g")).unwrap() == text(MIB, 2));
    tree.unmount();
    assert!(Command::new("umount").arg(tree.source()).status().unwrap().success());
}

#[test]
fn a_change_behind_the_mount_is_noticed_while_the_file_is_open_if_that_is_asked_for() {
    if !can_mount(&[]) {
        return;
    }
    for watch in [true, false] {
        let tree = Tree::mounted(if watch { &["--watch"] } else { &[] });
        fs::write(tree.source().join("f"), text(MIB, 1)).unwrap();
        thread::sleep(SETTLED);
        let above = File::open(tree.target().join("f")).unwrap();
        let mut read = vec![0; MIB];
        // Twice, for the kernel to have it.
        for _ in 0..2 {
            above.read_exact_at(&mut read, 0).unwrap();
        }
        let below = File::options().write(true).open(tree.source().join("f")).unwrap();
        for round in 2..6 {
            below.write_all_at(&text(MIB, round), 0).unwrap();
            // Without, it is seen when the kernel drops what it has, and that may be now.
            let begun = Instant::now();
            while watch && read != text(MIB, round) {
                assert!(begun.elapsed() < PATIENCE, "round {round}");
                thread::sleep(Duration::from_millis(20));
                above.read_exact_at(&mut read, 0).unwrap();
            }
        }
        // Closed, it is watched no more; opened again, it is.
        drop(above);
        below.write_all_at(&text(MIB, 7), 0).unwrap();
        assert!(fs::read(tree.target().join("f")).unwrap() == text(MIB, 7));
    }
}

#[test]
fn a_line_of_fstab_mounts_in_the_background_and_umount_ends_it() {
    if !can_mount(&["mount.fuse"]) {
        return;
    }
    let scratch = scratch();
    let path = |name: &str| scratch.path().join(name);
    for name in ["source dir", "target", "bin"] {
        fs::create_dir(path(name)).unwrap();
    }
    fs::write(path("source dir").join("f"), text(MIB, 1)).unwrap();
    // As it is found where it is installed.
    std::os::unix::fs::symlink(compcache(), path("bin").join("compcache")).unwrap();
    // mount(8) lets programs be searched for where the system has them alone, so here the whole path stands before the source.
    let whole = format!("{}#{}", path("bin").join("compcache").display(), path("source dir").display());
    let mount = |options: &str| {
        let mut command = Command::new("mount");
        command.args(["-t", "fuse", "-o", options, &whole]).arg(path("target"));
        // Its output ends when everybody who has it has let go of it.
        by_rings::mounting(|| command.output()).unwrap()
    };
    let umount = || Command::new("umount").arg(path("target")).output().unwrap();
    let mounted = |options: &str| {
        let output = mount(options);
        assert!(output.status.success(), "{options}: {}", said(&output));
        let mounts = mounts();
        let line =
            mounts.lines().find(|line| line.contains(&path("target").display().to_string())).expect("it is there");
        line.to_owned()
    };
    let line = mounted("memory=24M,codec=zstd:2,allow_other,nofail,x-systemd.automount");
    assert!(line.contains(" fuse.compcache ") && line.contains("allow_other") && line.contains("rw"), "{line}");
    let shown = Command::new(compcache()).args(["show", "--json"]).arg(path("target")).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains(&(24 << 20).to_string()), "{shown:?}");
    assert!(fs::read(path("target").join("f")).unwrap() == text(MIB, 1));
    fs::write(path("target").join("g"), "new").unwrap();
    assert!(umount().status.success());
    assert!(fs::read(path("source dir").join("g")).unwrap() == b"new" && !path("target").join("f").exists());

    // What mount(8) runs for a line of this type.
    let search = format!("{}:{}", path("bin").display(), std::env::var("PATH").unwrap());
    let mut helper = Command::new("mount.fuse");
    helper.arg(path("source dir")).arg(path("target")).args(["-o", "rw,memory=8M", "-t", "fuse.compcache"]);
    let output = helper.env("PATH", search).output().unwrap();
    assert!(output.status.success() && path("target").join("f").exists(), "{}", said(&output));
    assert!(umount().status.success());

    let line = mounted("ro,noexec,memory=8M");
    assert!(line.contains("ro,") && line.contains("noexec"), "{line}");
    assert_eq!(fs::write(path("target").join("h"), "no").unwrap_err().raw_os_error(), Some(libc::EROFS));
    assert!(umount().status.success());

    for (options, word) in [("nonesuch", "nonesuch"), ("memory=x", "memory=x")] {
        let output = mount(options);
        assert!(!output.status.success() && said(&output).contains(word), "{options}: {}", said(&output));
    }
    // Nothing is left to serve what is not mounted.
    let until = Instant::now() + PATIENCE;
    while serves(&path("target")) {
        assert!(Instant::now() < until, "a server is left");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn all_of_this_holds_by_io_uring() {
    by_rings::run_again("mount", &["all_of_this_holds", "mount_network", "mount_shrinker"]);
}

/// Whether there is a process that was told of this place.
fn serves(place: &Path) -> bool {
    let place = place.as_os_str().as_encoded_bytes();
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| fs::read(entry.ok()?.path().join("cmdline")).ok());
    processes.into_iter().any(|line| line.split(|byte| *byte == 0).any(|word| word == place))
}
