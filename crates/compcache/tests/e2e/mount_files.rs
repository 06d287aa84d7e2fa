//! A file on a mount is an array of bytes, whoever writes it and however.
//!
//! The model is a vector for each file. Operations are drawn at random: writes of any length at any place, appends, cuts, holes, copies, through
//! plain, direct and mapped I/O, through the mount and behind it, renames and removals, with the kernel's cache dropped now and then. After a change behind the
//! mount the file is opened anew before it is looked at, as is promised ([S102]). One seed (`COMPCACHE_SEED`) repeats a run.

use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::ptr;

use compcache_testkit::features::{Feature, requires};
use compcache_testkit::seed::Seed;

use crate::support::{Tree, can_mount};

const FILES: usize = 4;
const BYTES_MAX: usize = 300_000;

struct Model {
    tree: Tree,
    rng: fastrand::Rng,
    contents: Vec<Vec<u8>>,
    open: Vec<File>,
    history: Vec<String>,
}

impl Model {
    fn new(tree: Tree, rng: fastrand::Rng) -> Model {
        let mut model = Model { tree, rng, contents: vec![Vec::new(); FILES], open: Vec::new(), history: Vec::new() };
        for which in 0..FILES {
            let file =
                File::options().read(true).write(true).create(true).truncate(true).open(model.above(which)).unwrap();
            model.open.push(file);
        }
        model
    }

    fn above(&self, which: usize) -> PathBuf {
        self.tree.target().join(which.to_string())
    }

    fn below(&self, which: usize) -> PathBuf {
        self.tree.source().join(which.to_string())
    }

    fn reopen(&mut self, which: usize) {
        self.open[which] = File::options().read(true).write(true).open(self.above(which)).unwrap();
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        match self.rng.u8(..4) {
            0 => self.rng.fill(&mut bytes),
            1 => bytes.fill(self.rng.u8(..)),
            _ => bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 9) as u8 ^ self.rng.u8(..2)),
        }
        bytes
    }

    /// A place and a length within the largest file, often at borders of pages.
    fn range(&mut self) -> (usize, usize) {
        let mut at = || match self.rng.u8(..3) {
            0 => self.rng.usize(..BYTES_MAX / 4096) * 4096,
            _ => self.rng.usize(..BYTES_MAX),
        };
        let (one, two) = (at(), at());
        let (start, end) = (one.min(two), one.max(two));
        (start, (end - start).clamp(1, 70_000).min(BYTES_MAX - start))
    }

    fn put(&mut self, which: usize, at: usize, from: &[u8]) {
        let content = &mut self.contents[which];
        content.resize(content.len().max(at + from.len()), 0);
        content[at..at + from.len()].copy_from_slice(from);
    }

    fn note(&mut self, what: String) {
        self.history.push(what);
    }

    fn check(&mut self, which: usize) {
        let content = &self.contents[which];
        let mut found = vec![0; content.len() + 10];
        let mut length = 0;
        while let Ok(more @ 1..) = self.open[which].read_at(&mut found[length..], length as u64) {
            length += more;
        }
        found.truncate(length);
        let last = &self.history[self.history.len().saturating_sub(12)..];
        assert_eq!(found.len(), content.len(), "length of {which}; {last:#?}");
        let wrong = found.iter().zip(content).position(|(found, expected)| found != expected);
        assert_eq!(wrong, None, "file {which} differs there; {last:#?}");
    }

    fn step(&mut self) {
        let which = self.rng.usize(..FILES);
        let (at, length) = self.range();
        let choice = self.rng.u8(..25);
        self.note(format!("{choice} on {which}: {at}+{length}, of {}", self.contents[which].len()));
        match choice {
            0..5 => {
                let from = self.bytes(length);
                self.open[which].write_all_at(&from, at as u64).unwrap();
                self.put(which, at, &from);
            }
            5 => self.append(which, length, 0),
            6 | 7 => {
                self.open[which].set_len(at as u64).unwrap();
                self.contents[which].resize(at, 0);
            }
            8 => self.punch(which, at, length),
            9 => self.copy(which, at, length),
            10..13 => self.through_a_mapping(which),
            13 => self.write_directly(which, at, length),
            14..17 => {
                let from = self.bytes(length);
                File::options().write(true).open(self.below(which)).unwrap().write_all_at(&from, at as u64).unwrap();
                self.put(which, at, &from);
                self.reopen(which);
            }
            17 => {
                File::options().write(true).open(self.below(which)).unwrap().set_len(at as u64).unwrap();
                self.contents[which].resize(at, 0);
                self.reopen(which);
            }
            18 => {
                let other = (which + 1) % FILES;
                let (from, to) = if self.rng.bool() {
                    (self.above(which), self.above(other))
                } else {
                    (self.below(which), self.below(other))
                };
                fs::rename(&from, to).unwrap();
                self.contents[other] = self.contents[which].clone();
                fs::write(&from, "").unwrap();
                self.contents[which].clear();
                self.reopen(which);
                self.reopen(other);
            }
            19 => {
                fs::remove_file(self.above(which)).unwrap();
                self.check(which);
                fs::write(self.below(which), "anew").unwrap();
                self.contents[which] = b"anew".to_vec();
                self.reopen(which);
            }
            20 => self.reopen(which),
            21 => self.open[which].sync_all().unwrap(),
            22 | 23 => self.by_handles_that_come_and_go(which, at, length),
            _ => self.tree.drop_kernel_cache(),
        }
        self.check(which);
    }

    /// By another descriptor than that which is open.
    fn append(&mut self, which: usize, length: usize, flags: i32) {
        let from = self.bytes(length.min(5000));
        let end = self.contents[which].len();
        if end + from.len() <= BYTES_MAX {
            let mut file = File::options().append(true).custom_flags(flags).open(self.above(which)).unwrap();
            file.write_all(&from).unwrap();
            self.put(which, end, &from);
        }
    }

    /// Nobody has the file open when it is opened for writing, and others open it meanwhile.
    fn by_handles_that_come_and_go(&mut self, which: usize, at: usize, length: usize) {
        self.open[which] = File::open("/dev/null").unwrap();
        if self.rng.bool() {
            // What it has is kept.
            fs::read(self.above(which)).unwrap();
        }
        let reads = self.rng.bool();
        let writer = File::options().read(reads).write(true).open(self.above(which)).unwrap();
        let reader = self.rng.bool().then(|| File::open(self.above(which)).unwrap());
        let from = self.bytes(length);
        writer.write_all_at(&from, at as u64).unwrap();
        self.put(which, at, &from);
        match self.rng.u8(..5) {
            0 => {
                writer.set_len(at as u64).unwrap();
                self.contents[which].truncate(at);
            }
            1 => self.append(which, length, libc::O_DIRECT),
            2 => self.append(which, length, 0),
            3 => self.write_directly(which, at, length / 2 + 1),
            _ => {}
        }
        let mut found = vec![0; self.contents[which].len() + 10];
        if let Some(reader) = reader {
            let length = reader.read_at(&mut found, 0).unwrap();
            assert!(found[..length] == self.contents[which], "of {which}, read by a handle of the time");
        }
        match reads && self.rng.bool() {
            true => self.open[which] = writer,
            false => {
                drop(writer);
                self.reopen(which);
            }
        }
    }

    fn write_directly(&mut self, which: usize, at: usize, length: usize) {
        let from = self.bytes(length);
        let direct = File::options().write(true).custom_flags(libc::O_DIRECT).open(self.above(which)).unwrap();
        direct.write_all_at(&from, at as u64).unwrap();
        self.put(which, at, &from);
    }

    fn punch(&mut self, which: usize, at: usize, length: usize) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: numbers only.
        let done = unsafe { libc::fallocate(self.open[which].as_raw_fd(), mode, at as i64, length as i64) };
        assert_eq!(done, 0);
        let content = &mut self.contents[which];
        let (start, end) = (at.min(content.len()), (at + length).min(content.len()));
        content[start..end].fill(0);
    }

    fn copy(&mut self, which: usize, at: usize, length: usize) {
        let other = (which + 1) % FILES;
        let (mut from, mut to) = (at as i64 / 2, at as i64);
        let (source, target) = (self.open[which].as_raw_fd(), self.open[other].as_raw_fd());
        // SAFETY: the two offsets live until the call returns.
        let copied = unsafe { libc::copy_file_range(source, &mut from, target, &mut to, length, 0) };
        assert!(copied >= 0, "{}", std::io::Error::last_os_error());
        if copied > 0 {
            let piece =
                self.contents[which].get(at / 2..at / 2 + copied as usize).expect("no more than there is").to_vec();
            self.put(other, at, &piece);
        }
        self.check(other);
    }

    /// Writes a part of the file through a shared mapping, and reads all of it through a private one.
    fn through_a_mapping(&mut self, which: usize) {
        let size = self.contents[which].len();
        if size == 0 {
            return;
        }
        let at = self.rng.usize(..size);
        let length = self.rng.usize(1..=(size - at).min(20_000));
        let from = self.bytes(length);
        let sync = self.rng.bool();
        let file = self.open[which].as_raw_fd();
        let map = |protection, kind| {
            // SAFETY: a new mapping of a file that nobody cuts while it is there.
            let map = unsafe { libc::mmap(ptr::null_mut(), size, protection, kind, file, 0) };
            assert_ne!(map, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
            map.cast::<u8>()
        };
        let shared = map(libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: within the mapping, which is this thread's alone and is unmapped once.
        unsafe {
            ptr::copy_nonoverlapping(from.as_ptr(), shared.add(at), length);
            if sync {
                assert_eq!(libc::msync(shared.cast(), size, libc::MS_SYNC), 0);
            }
            assert_eq!(libc::munmap(shared.cast(), size), 0);
        }
        self.put(which, at, &from);
        let private = map(libc::PROT_READ, libc::MAP_PRIVATE);
        // SAFETY: as above; nobody writes meanwhile.
        unsafe {
            assert!(std::slice::from_raw_parts(private, size) == self.contents[which], "through a private mapping");
            assert_eq!(libc::munmap(private.cast(), size), 0);
        }
        // What is behind the mount, or in a mapping's pages, is there for others once it was written back.
        self.open[which].sync_all().unwrap();
    }
}

fn run(arguments: &[&str], test: &str, steps: usize) {
    if !can_mount(&[]) {
        return;
    }
    let seed = Seed::for_test(test);
    let mut model = Model::new(Tree::mounted(arguments), seed.rng());
    for _ in 0..steps {
        model.step();
    }
    for which in 0..FILES {
        model.open[which].sync_all().unwrap();
        assert!(fs::read(model.below(which)).unwrap() == model.contents[which], "file {which} below");
    }
}

#[test]
fn files_are_arrays_of_bytes_from_both_sides() {
    run(&["--memory", "64M"], "files_are_arrays_of_bytes_from_both_sides", 1500);
}

#[test]
fn files_are_arrays_of_bytes_with_hardly_any_memory() {
    run(&["--memory", "1M"], "files_are_arrays_of_bytes_with_hardly_any_memory", 700);
}

#[test]
fn files_are_arrays_of_bytes_when_names_are_remembered() {
    let mount = ["--memory", "64M", "--exclusive", "--remember", "60"];
    run_from_above(&mount, "files_are_arrays_of_bytes_when_names_are_remembered");
}

#[test]
fn files_are_arrays_of_bytes_when_the_kernel_writes_back() {
    let mount = ["--memory", "64M", "--exclusive", "--writeback-cache"];
    run_from_above(&mount, "files_are_arrays_of_bytes_when_the_kernel_writes_back");
}

#[test]
fn files_are_arrays_of_bytes_when_the_kernel_passes_what_is_written() {
    if !requires(&[Feature::FusePassthrough]) {
        return;
    }
    let name = "files_are_arrays_of_bytes_when_the_kernel_passes_what_is_written";
    run(&["--memory", "64M", "--passthrough", "writable"], name, 700);
    run_from_above(&["--memory", "64M", "--exclusive", "--remember", "60", "--passthrough", "write-only"], name);
}

/// Without changes behind the mount, which are noticed late there, or not at all.
#[track_caller]
fn run_from_above(mount: &[&str], name: &'static str) {
    if !can_mount(&[]) {
        return;
    }
    let mut model = Model::new(Tree::mounted(mount), Seed::for_test(name).rng());
    for _ in 0..1500 {
        let which = model.rng.usize(..FILES);
        let (at, length) = model.range();
        let choice = model.rng.u8(..15);
        model.note(format!("{choice} on {which}: {at}+{length}, of {}", model.contents[which].len()));
        match choice {
            0..3 => {
                let from = model.bytes(length);
                model.open[which].write_all_at(&from, at as u64).unwrap();
                model.put(which, at, &from);
            }
            3 => {
                model.open[which].set_len(at as u64).unwrap();
                model.contents[which].resize(at, 0);
            }
            4 => model.punch(which, at, length),
            5 => model.through_a_mapping(which),
            6 => model.reopen(which),
            7 => model.append(which, length, 0),
            8 => model.append(which, length, libc::O_DIRECT),
            9 => model.write_directly(which, at, length),
            10 => model.copy(which, at, length),
            11 => {
                // By the descriptor that is open; what it wrote before may not be below yet.
                let from = model.bytes(length.min(BYTES_MAX - at));
                model.open[which].write_all_at(&from, at as u64).unwrap();
                model.put(which, at, &from);
                model.append(which, length, if at % 2 == 0 { libc::O_DIRECT } else { 0 });
            }
            12 | 13 => model.by_handles_that_come_and_go(which, at, length),
            _ => model.tree.drop_kernel_cache(),
        }
        model.check(which);
    }
    assert!(model.tree.stat("succ_gets") > 0, "the cache was never of use");
}

/// So many numbers.
fn numbers(count: Range<u32>) -> Vec<u8> {
    count.flat_map(u32::to_ne_bytes).collect()
}

/// The kernel asks for such a write in several requests at once.
#[test]
fn a_long_direct_append_is_in_one_piece() {
    if !can_mount(&[]) {
        return;
    }
    const COUNT: u32 = 1 << 20;
    let tree = Tree::mounted(&[]);
    let open = || {
        File::options().append(true).create(true).custom_flags(libc::O_DIRECT).open(tree.target().join("f")).unwrap()
    };
    let mut file = open();
    for round in 0..50 {
        let content = numbers(round * COUNT..(round + 1) * COUNT);
        assert_eq!(file.write(&content).unwrap(), content.len());
        assert!(fs::read(tree.source().join("f")).unwrap() == content, "round {round}");
        // By the same and by another, once that is as short as it is.
        file.set_len(0).unwrap();
        if round % 4 == 3 {
            file = open();
        }
    }
    // Made longer, and then shorter, behind the mount, of which the kernel knows nothing.
    let mut expected = numbers(0..1000);
    for (round, theirs) in [100_000, 5_000_000, 10].into_iter().enumerate() {
        let mut below = File::options().append(true).open(tree.source().join("f")).unwrap();
        if round == 0 {
            below.write_all(&expected).unwrap();
        }
        below.write_all(&vec![round as u8; theirs]).unwrap();
        expected.resize(expected.len() + theirs, round as u8);
        let content = numbers(0..COUNT + 1000);
        assert_eq!(file.write(&content).unwrap(), content.len());
        expected.extend(content);
        assert!(fs::read(tree.source().join("f")).unwrap() == expected, "round {round}");
    }
    File::options().write(true).open(tree.source().join("f")).unwrap().set_len(100).unwrap();
    let content = numbers(0..COUNT);
    assert_eq!(file.write(&content).unwrap(), content.len());
    assert!(fs::read(tree.source().join("f")).unwrap() == [&expected[..100], &content].concat());
}
