//! Directories that are moved and replaced behind the mount, though the kernel believes for some milliseconds that they are where they were; and what else it believes of files.
//!
//! Each trial is made right after the directory was replaced, so that nothing but asking finds it out; what the kernel believes then is refreshed before.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, linkat, mkdirat, mknodat, openat, readlinkat, renameat,
    renameat_with, symlinkat, unlinkat,
};

use compcache_testkit::features::{Feature, requires};

use crate::mount_posix::as_user;
use crate::support::{PATIENCE, Tree, by_rings, can_mount};

const ROUNDS: usize = 40;

/// A tree where `here` and `there`, in [`DEEP`], have the same names in them, and other contents.
struct Two {
    tree: Tree,
    /// What is in `here`.
    which: char,
}

const DEEP: &str = "one/two/three/above";

impl Two {
    fn new(arguments: &[&str]) -> Two {
        let tree = Tree::mounted(arguments);
        for (name, which) in [("here", "1"), ("there", "2")] {
            let directory = tree.source().join(DEEP).join(name);
            fs::create_dir_all(directory.join("sub")).unwrap();
            fs::write(directory.join("file"), which).unwrap();
            fs::write(directory.join("sub/file"), which).unwrap();
            fs::write(directory.join(format!("only{which}")), "").unwrap();
            symlink(format!("only{which}"), directory.join("link")).unwrap();
            mknodat(CWD, directory.join("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        }
        Two { tree, which: '1' }
    }

    fn seen(&self, name: &str) -> PathBuf {
        self.tree.target().join(DEEP).join("here").join(name)
    }

    fn below(&self, name: &str) -> PathBuf {
        self.tree.source().join(DEEP).join("here").join(name)
    }

    /// Exchanges the two behind the mount, when the kernel was just told where they are.
    fn exchange(&mut self) {
        for name in ["file", "sub/file", "link", "only1", "only2", "fifo"] {
            let _ = fs::symlink_metadata(self.seen(name));
        }
        let above = self.tree.source().join(DEEP);
        renameat_with(CWD, above.join("here"), CWD, above.join("there"), RenameFlags::EXCHANGE).unwrap();
        self.which = if self.which == '1' { '2' } else { '1' };
    }

    /// Does something after each of many exchanges.
    #[track_caller]
    fn trials(&mut self, what: &str, trial: impl Fn(&Two) -> std::io::Result<bool>) {
        for round in 0..ROUNDS {
            self.exchange();
            let done = trial(self);
            assert!(matches!(done, Ok(true)), "{what}, round {round}, now {}: {done:?}", self.which);
        }
    }
}

fn text(path: &Path) -> std::io::Result<String> {
    fs::read_to_string(path)
}

fn cut(path: &Path) -> std::io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: it reads a text that lives until it returns.
    match unsafe { libc::truncate(path.as_ptr(), 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[test]
fn a_path_leads_to_what_is_there_right_after_a_directory_was_replaced() {
    if !can_mount(&[]) {
        return;
    }
    let mut two = Two::new(&[]);
    two.trials("reads", |two| Ok(text(&two.seen("file"))? == two.which.to_string()));
    two.trials("reads further down", |two| Ok(text(&two.seen("sub/file"))? == two.which.to_string()));
    two.trials(
        "follows a link",
        |two| Ok(fs::read_link(two.seen("link"))? == Path::new(&format!("only{}", two.which))),
    );
    two.trials("opens by a link", |two| File::open(two.seen("link")).map(|_| true));
    two.trials("finds what is there", |two| File::open(two.seen(&format!("only{}", two.which))).map(|_| true));
    two.trials("finds what is there to be made", |two| {
        let name = two.seen(&format!("only{}", two.which));
        Ok(File::create_new(name).is_err_and(|error| error.kind() == std::io::ErrorKind::AlreadyExists))
    });
    two.trials("finds nothing where nothing is", |two| {
        let other = if two.which == '1' { "only2" } else { "only1" };
        Ok(File::open(two.seen(other)).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound))
    });
    two.trials("opens what the kernel serves", |two| {
        let fifo = File::options().read(true).write(true).open(two.seen("fifo"))?;
        Ok(fifo.metadata()?.ino() == fs::metadata(two.below("fifo"))?.ino())
    });
    two.trials("opens what the kernel serves where it was moved to", |two| {
        let there = |above: PathBuf| above.join(DEEP).join("there/fifo");
        let fifo = File::options().read(true).write(true).open(there(two.tree.target()))?;
        Ok(fifo.metadata()?.ino() == fs::metadata(there(two.tree.source()))?.ino())
    });
    two.trials("lists", |two| {
        let names = fs::read_dir(two.seen(""))?.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        Ok(names.filter(|name| name.starts_with("only")).collect::<String>() == format!("only{}", two.which))
    });
    two.trials("writes", |two| {
        fs::write(two.seen("file"), format!("{} again", two.which))?;
        let is = text(&two.below("file"))? == format!("{} again", two.which);
        fs::write(two.below("file"), two.which.to_string())?;
        Ok(is)
    });
    two.trials("cuts", |two| {
        cut(&two.seen("file"))?;
        let is = text(&two.below("file"))?.is_empty();
        fs::write(two.below("file"), two.which.to_string())?;
        Ok(is)
    });
    two.trials("makes a file", |two| {
        File::create_new(two.seen("new"))?;
        fs::remove_file(two.below("new")).map(|()| true)
    });
    two.trials("makes a directory", |two| {
        fs::create_dir(two.seen("new"))?;
        fs::remove_dir(two.below("new")).map(|()| true)
    });
    two.trials("makes a link", |two| {
        symlink("anywhere", two.seen("new"))?;
        fs::remove_file(two.below("new")).map(|()| true)
    });
    two.trials("gives a second name", |two| {
        fs::hard_link(two.seen("file"), two.seen("new"))?;
        let is = text(&two.below("new"))? == two.which.to_string();
        fs::remove_file(two.below("new"))?;
        Ok(is)
    });
    two.trials("moves", |two| {
        fs::rename(two.seen("file"), two.seen("new"))?;
        fs::rename(two.below("new"), two.below("file")).map(|()| true)
    });
    two.trials("moves a directory", |two| {
        fs::rename(two.seen("sub"), two.seen("new"))?;
        fs::rename(two.below("new"), two.below("sub")).map(|()| true)
    });
    two.trials("removes", |two| {
        fs::remove_file(two.seen("file"))?;
        let is = !two.below("file").exists();
        fs::write(two.below("file"), two.which.to_string())?;
        Ok(is)
    });
    two.trials("removes a directory", |two| {
        fs::create_dir(two.below("new"))?;
        fs::remove_dir(two.seen("new"))?;
        Ok(!two.below("new").exists())
    });
    two.tree.unmount();
}

/// As above, where what is exchanged is further up than where something is done.
#[test]
fn a_path_leads_to_what_is_there_right_after_something_above_was_replaced() {
    if !can_mount(&[]) {
        return;
    }
    let mut tree = Tree::mounted(&[]);
    let path = "a/b/c/d/e";
    for which in ["1", "2"] {
        fs::create_dir_all(tree.source().join(which).join(path)).unwrap();
        fs::write(tree.source().join(which).join(path).join("file"), which).unwrap();
    }
    for round in 0..ROUNDS {
        // From the first directory to the last but one.
        let (depth, place) = (round % 5, tree.target().join("1").join(path));
        let top: PathBuf = path.split('/').take(depth).collect();
        let before = text(&place.join("file")).unwrap();
        let (one, two) = (tree.source().join("1").join(&top), tree.source().join("2").join(&top));
        renameat_with(CWD, one, CWD, two, RenameFlags::EXCHANGE).unwrap();
        assert_ne!(text(&place.join("file")).unwrap(), before, "exchanged at depth {depth}");
        let made = place.join("made");
        fs::write(&made, "").unwrap();
        fs::remove_file(tree.source().join("1").join(path).join("made")).unwrap();
    }
    tree.unmount();
}

/// Threads that go on until it is over are told when this is dropped, also by a test that fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Several at once, while it goes on. Whoever begins after an exchange and ends before the next must have what is there; who is on his way when a directory is replaced twice may be told that
/// what he came by is stale.
#[test]
fn paths_lead_to_what_is_there_while_directories_are_replaced_all_the_time() {
    if !can_mount(&[]) {
        return;
    }
    let mut two = Two::new(&[]);
    // Odd while they are exchanged; then twice the number of exchanges.
    let (count, is_over, sure) = (AtomicU64::new(0), AtomicBool::new(false), AtomicU64::new(0));
    let (file, above) = (two.seen("file"), two.tree.source().join(DEEP));
    thread::scope(|scope| {
        let walk = || {
            while !is_over.load(SeqCst) {
                let before = count.load(SeqCst);
                let found = text(&file);
                let (is_sure, there) = (before % 2 == 0 && count.load(SeqCst) == before, before / 2 % 2);
                match found {
                    Ok(found) if is_sure => {
                        assert_eq!(found, ["1", "2"][there as usize], "after {} exchanges", before / 2);
                        sure.fetch_add(1, SeqCst);
                    }
                    Ok(found) => assert!(["1", "2"].contains(&found.as_str()), "{found}"),
                    Err(error) => assert!(!is_sure && error.raw_os_error() == Some(libc::ESTALE), "{error}"),
                }
            }
        };
        let walkers = [(); 3].map(|()| scope.spawn(walk));
        // Of the other place nothing is wanted but that it is looked up.
        let (other, is_over) = (two.tree.target().join(DEEP).join("there/file"), &is_over);
        scope.spawn(move || {
            while !is_over.load(SeqCst) {
                let _ = fs::metadata(&other);
            }
        });
        let (begun, ends) = (Instant::now(), Ends(is_over));
        while begun.elapsed() < Duration::from_secs(2) || sure.load(SeqCst) < 100 && begun.elapsed() < PATIENCE {
            count.fetch_add(1, SeqCst);
            renameat_with(CWD, above.join("here"), CWD, above.join("there"), RenameFlags::EXCHANGE).unwrap();
            count.fetch_add(1, SeqCst);
            thread::sleep(Duration::from_micros(fastrand::u64(0..5000)));
        }
        drop(ends);
        walkers.into_iter().for_each(|walker| walker.join().unwrap());
    });
    assert!(sure.load(SeqCst) >= 100, "only {} were sure of what is there", sure.load(SeqCst));
    two.tree.unmount();
}

/// Does one of eleven things in the directory `held`, which is called `there` by now and has what `was` in it.
fn in_what_was_moved(two: &Two, held: &OwnedFd, was: &str, step: usize) -> rustix::io::Result<()> {
    let now = |name: &str| two.tree.source().join(DEEP).join("there").join(name);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let read = |name: &str| {
        let (mut file, mut text) = (File::from(openat(held, name, flags, Mode::empty())?), String::new());
        file.read_to_string(&mut text).unwrap();
        Ok(text)
    };
    match step {
        0 => assert_eq!(read("file")?, was),
        1 => assert_eq!(read("sub/file")?, was),
        2 => {
            let made = openat(held, "made", OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, Mode::RUSR)?;
            File::from(made).write_all(b"made").unwrap();
            assert_eq!(text(&now("made")).unwrap(), "made");
            fs::remove_file(now("made")).unwrap();
        }
        3 => {
            mkdirat(held, "made", Mode::RWXU)?;
            fs::remove_dir(now("made")).unwrap();
        }
        4 => {
            symlinkat("anywhere", held, "made")?;
            fs::remove_file(now("made")).unwrap();
        }
        5 => {
            linkat(held, "file", held, "made", AtFlags::empty())?;
            assert_eq!(text(&now("made")).unwrap(), was);
            fs::remove_file(now("made")).unwrap();
        }
        6 => {
            renameat(held, "file", held, "made")?;
            fs::rename(now("made"), now("file")).unwrap();
        }
        7 => {
            fs::write(now("made"), "").unwrap();
            unlinkat(held, "made", AtFlags::empty())?;
            assert!(!now("made").exists());
        }
        8 => {
            fs::create_dir(now("made")).unwrap();
            unlinkat(held, "made", AtFlags::REMOVEDIR)?;
            assert!(!now("made").exists());
        }
        9 => assert_eq!(readlinkat(held, "link", Vec::new())?.to_str().unwrap(), format!("only{was}")),
        _ => {
            let names = Dir::read_from(openat(held, ".", flags, Mode::empty())?)?;
            let names = names.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned());
            assert_eq!(names.filter(|name| name.starts_with("only")).collect::<String>(), format!("only{was}"));
        }
    }
    Ok(())
}

#[test]
fn who_is_in_a_directory_that_is_moved_stays_in_it() {
    if !can_mount(&[]) {
        return;
    }
    let mut two = Two::new(&[]);
    for round in 0..ROUNDS {
        // The kernel hears that it was moved before: who opens it only to hold it is not told, as long as it is believed to be there.
        assert_eq!(text(&two.seen("file")).unwrap(), two.which.to_string());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let held = openat(CWD, two.seen(""), flags, Mode::empty()).unwrap();
        let (was, step) = (two.which.to_string(), round % 11);
        two.exchange();
        // One thing first, a different one each time, and then all of them.
        for step in [step].into_iter().chain(0..11) {
            if let Err(error) = in_what_was_moved(&two, &held, &was, step) {
                panic!("round {round}, step {step}: {error}");
            }
        }
    }
    two.tree.unmount();
}

#[test]
fn what_is_moved_by_the_mount_itself_is_stale_to_nobody() {
    if !can_mount(&[]) {
        return;
    }
    let mut two = Two::new(&[]);
    let is_over = AtomicBool::new(false);
    let (here, elsewhere) = (two.seen(""), two.tree.target().join(DEEP).join("elsewhere"));
    let held = openat(CWD, &here, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    thread::scope(|scope| {
        // In what is moved, by its descriptor; nothing is told, and nothing is missing.
        scope.spawn(|| {
            while !is_over.load(SeqCst) {
                let flags = OFlags::RDONLY | OFlags::CLOEXEC;
                openat(&held, "sub/file", flags, Mode::empty()).unwrap();
                openat(&held, "made", OFlags::CREATE | OFlags::EXCL | flags, Mode::RUSR).unwrap();
                unlinkat(&held, "made", AtFlags::empty()).unwrap();
            }
        });
        // By its path it is there, or not.
        scope.spawn(|| {
            while !is_over.load(SeqCst) {
                if let Err(error) = File::open(here.join("sub/file")) {
                    assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{error}");
                }
            }
        });
        let (begun, ends) = (Instant::now(), Ends(&is_over));
        while begun.elapsed() < Duration::from_secs(2) {
            fs::rename(&here, &elsewhere).unwrap();
            fs::rename(&elsewhere, &here).unwrap();
        }
        drop(ends);
    });
    drop(held);
    two.tree.unmount();
}

#[test]
fn what_a_file_is_like_is_seen_at_once_and_a_directory_soon() {
    if !can_mount(&[]) {
        return;
    }
    let mut two = Two::new(&[]);
    let (seen, below) = (two.seen("file"), two.below("file"));
    for round in 1..=200_u64 {
        assert_eq!(fs::metadata(&seen).unwrap().len(), fs::metadata(&below).unwrap().len());
        File::options().append(true).open(&below).unwrap().write_all(b"x").unwrap();
        assert_eq!(fs::metadata(&seen).unwrap().len(), round + 1, "by its name");
        let open = File::open(&seen).unwrap();
        File::options().append(true).open(&below).unwrap().write_all(b"x").unwrap();
        assert_eq!(open.metadata().unwrap().len(), round + 2, "by its descriptor, opened a moment ago");
        drop(open);
        File::options().write(true).open(&below).unwrap().set_len(round + 1).unwrap();
        let held = File::options().read(true).custom_flags(libc::O_APPEND).open(&seen).unwrap();
        let mut text = Vec::new();
        File::options().append(true).open(&below).unwrap().write_all(b"yz").unwrap();
        (&held).read_to_end(&mut text).unwrap();
        assert_eq!(text.len() as u64, round + 3, "what was appended after it was opened is read");
        File::options().write(true).open(&below).unwrap().set_len(round + 1).unwrap();
    }
    two.exchange();
    let begun = Instant::now();
    while fs::metadata(two.seen("")).unwrap().ino() != fs::metadata(two.below("")).unwrap().ino() {
        assert!(begun.elapsed() < PATIENCE, "another directory is shown still");
        thread::sleep(Duration::from_millis(1));
    }
    two.tree.unmount();
}

#[test]
fn set_user_id_goes_at_once_also_where_attributes_are_believed() {
    // Where the kernel is young enough for that, it can write back, too.
    if !can_mount(&[]) || !requires(&[Feature::FusePassthrough]) {
        return;
    }
    let all: [&[&str]; 4] = [
        &["--exclusive"],
        &["--exclusive", "--writeback-cache"],
        &["--passthrough", "none"],
        &["--passthrough", "write-only"],
    ];
    for flags in all {
        let mut tree = Tree::mounted(&[&["--allow-other", "--remember", "60"], flags].concat());
        let path = tree.target().join("f");
        fs::write(&path, "text").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
        let mode = || fs::metadata(&path).unwrap().mode() & 0o7777;
        assert_eq!(mode(), 0o6777);
        let append = || File::options().append(true).open(&path).unwrap().write_all(b"more");
        as_user(1001, 1001, append).unwrap();
        // What was passed is known once the kernel has said that it was closed.
        let begun = Instant::now();
        while mode() != 0o777 {
            assert!(flags[1..] == ["write-only"] && begun.elapsed() < PATIENCE, "{flags:?}: {:o}", mode());
            thread::sleep(Duration::from_millis(1));
        }
        tree.unmount();
    }
}

/// Requests that were served so far: each is read by a call of its own.
fn requests(tree: &Tree) -> u64 {
    let io = fs::read_to_string(format!("/proc/{}/io", tree.child.id())).unwrap();
    io.lines().find_map(|line| line.strip_prefix("syscr: ")?.parse().ok()).unwrap()
}

#[test]
fn the_directories_of_a_path_are_not_asked_for_each_time() {
    if !can_mount(&[]) || by_rings::are_meant() {
        return;
    }
    const FILES: u64 = 50;
    // Where it goes slowly the whole way is asked for each time, as it is to be: the least of some is what is meant.
    let served = |arguments: &[&str]| {
        let mut two = Two::new(arguments);
        let least = (0..40).map(|_| {
            let begun = requests(&two.tree);
            for _ in 0..FILES {
                fs::metadata(two.seen("file")).unwrap();
            }
            requests(&two.tree) - begun
        });
        let least = least.min().unwrap();
        two.tree.unmount();
        least
    };
    let (each, mostly_not) = (served(&["--remember", "0"]), served(&[]));
    assert!(each > FILES * 8, "{each} requests for {FILES} files six directories deep, where nothing is remembered");
    assert!(mostly_not < each / 3, "{mostly_not} requests where directories are, {each} where they are not");
}
