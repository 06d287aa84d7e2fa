//! What killed servers leave behind, and its removal.
//!
//! | left behind                                     | what is done                                                  |
//! |-------------------------------------------------|---------------------------------------------------------------|
//! | a device the kernel took from its users already | removed; what users still have open goes when they close it   |
//! | a device that fails all requests, unused        | stopped and removed                                           |
//! | the same, mounted                               | named in the report, and left: it can be cleaned when unmounted |
//!
//! Ours are known by a mark that the driver keeps for the server, with the server's process id; no file is needed. A device
//! is served as long as its character device is open, which can be opened once only: so the kernel says whether its server is
//! alive. It says so for a moment longer than the process lives, because io_uring lets go of files afterwards; if the
//! process has ended, that moment is waited for. Where the character device has no node, as in a container, nobody can say, and the device is left
//! alone.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::control::{Control, take_turn};
use super::error::{Step, UblkError};
use super::uapi::CONTROL;
use super::{DELETED_WITHIN, MARK, block_node, character_path};
use crate::node::{Claim, NotClaimed, PAUSE};

/// Where the kernel lists the character devices.
const LIST: &str = "/sys/class/ublk-char";

/// How long the kernel may take to let go of the files of a process that has ended.
const LET_GO_WITHIN: Duration = Duration::from_secs(5);

/// How long what was opened no more may be there still, being taken away.
const TAKEN_AWAY_WITHIN: Duration = Duration::from_millis(500);

/// What [`clean`] found.
#[derive(Debug, Default)]
pub struct Cleaned {
    /// The devices of dead servers of ours that are removed.
    pub removed: Vec<PathBuf>,
    /// Those that are not, and why.
    pub left: Vec<(PathBuf, UblkError)>,
}

/// Removes the devices of servers of ours that were killed. Devices that are served, and those of other programs, are not
/// touched. May be called at any time, and by several at once.
///
/// # Errors
/// [`UblkError::Step`] when it cannot be found out which devices there are. That the kernel has no ublk is no error.
pub fn clean() -> Result<Cleaned, UblkError> {
    let mut cleaned = Cleaned::default();
    if !Path::new(CONTROL).exists() {
        return Ok(cleaned);
    }
    // Whoever adds a device has it open before the turn is over: it cannot be taken for a dead one.
    let _turn = take_turn()?;
    let mut control = Control::open()?;
    // One for all: of a server that is alive, but in a PID namespace that cannot be seen from here, each device would be waited for.
    let give_up = Instant::now() + LET_GO_WITHIN;
    for number in numbers().map_err(UblkError::at(Step::Look, Path::new(LIST)))? {
        // Gone meanwhile, or somebody else's.
        let Some(pid) = control.info(number).ok().and_then(|info| server_of(info.ublksrv_flags)) else { continue };
        match remove(&mut control, number, pid, give_up) {
            Ok(true) => cleaned.removed.push(block_node(number).path()),
            Ok(false) => {}
            Err(error) => cleaned.left.push((block_node(number).path(), error)),
        }
    }
    Ok(cleaned)
}

/// The numbers of all ublk devices.
fn numbers() -> io::Result<Vec<u32>> {
    let entries = match fs::read_dir(LIST) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut numbers = Vec::new();
    for entry in entries {
        numbers.extend(number_of(&entry?.file_name().to_string_lossy()));
    }
    Ok(numbers)
}

/// The number in a character device's name.
fn number_of(name: &str) -> Option<u32> {
    name.strip_prefix("ublkc")?.parse().ok()
}

/// Whose device it is, if the server's word says that it is ours.
fn server_of(word: u64) -> Option<u32> {
    (word & !u64::from(u32::MAX) == MARK).then_some(word as u32)
}

/// Whether nobody serves the device that is at `path`, as far as is seen by `give_up`. Where it has no node it may be served all the same, as long as
/// the kernel has it in `list`: a container's /dev has few nodes.
fn is_dead<F>(
    path: &Path,
    list: &Path,
    pid: u32,
    give_up: Instant,
    open: fn(&Path) -> io::Result<F>,
) -> Result<bool, UblkError> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let is_listed = || path.file_name().is_some_and(|name| list.join(name).exists());
    loop {
        match open(path) {
            Ok(_) => return Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return if is_gone(is_listed) { Ok(true) } else { Err(UblkError::Hidden { path: path.to_owned() }) };
            }
            Err(error) if error.kind() != ErrorKind::ResourceBusy => {
                return Err(UblkError::at(Step::Open, path)(error));
            }
            Err(_) if process.exists() || Instant::now() > give_up => return Ok(false),
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

/// Whether what cannot be opened any more goes, as the kernel takes it away.
fn is_gone(is_there: impl Fn() -> bool) -> bool {
    let give_up = Instant::now() + TAKEN_AWAY_WITHIN;
    while is_there() {
        if Instant::now() > give_up {
            return false;
        }
        thread::sleep(PAUSE);
    }
    true
}

/// Removes a device of ours if its server is dead; whether it is.
fn remove(control: &mut Control, number: u32, pid: u32, give_up: Instant) -> Result<bool, UblkError> {
    let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
    if !is_dead(&character_path(number), Path::new(LIST), pid, give_up, open)? {
        return Ok(false);
    }
    let node = block_node(number);
    let claimed = match node.claim(|| node.is_there()) {
        Ok(claimed) => claimed,
        Err(NotClaimed::InUse(by)) => return Err(UblkError::InUse { path: node.path(), by }),
        // The kernel takes it away at this moment; else somebody may use it.
        Err(NotClaimed::Open(error)) if !is_gone(|| node.is_there()) => {
            return Err(UblkError::at(Step::Open, &node.path())(error));
        }
        Err(NotClaimed::Open(_)) => Claim(None),
    };
    control.stop(number).map_err(UblkError::at(Step::Stop, &node.path()))?;
    drop(claimed);
    control.delete(number, DELETED_WITHIN).map_err(UblkError::at(Step::Delete, &node.path()))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_ours_names_its_server_and_others_do_not() {
        assert_eq!(server_of(MARK | 1234), Some(1234));
        for other in [0, 1234, u64::MAX, MARK >> 1] {
            assert_eq!(server_of(other), None, "{other:#x}");
        }
    }

    #[test]
    fn devices_of_servers_that_cannot_be_seen_are_waited_for_once_all_together() {
        const NOBODY: u32 = u32::MAX;
        let busy = |_: &Path| Err::<(), _>(ErrorKind::ResourceBusy.into());
        let (begun, patience) = (Instant::now(), Duration::from_secs(2));
        let dead = (0..10)
            .map(|number| is_dead(&character_path(number), Path::new(LIST), NOBODY, begun + patience, busy).unwrap());
        assert_eq!(dead.filter(|is_dead| *is_dead).count(), 0);
        // One after the other it would be ten times as long.
        assert!((patience..9 * patience).contains(&begun.elapsed()), "it took {:?}", begun.elapsed());
        // Whose process is there is not waited for at all.
        let begun = Instant::now();
        assert!(
            !is_dead(&character_path(0), Path::new(LIST), std::process::id(), begun + 100 * patience, busy).unwrap()
        );
        assert!(begun.elapsed() < 10 * patience);
    }

    #[test]
    fn a_device_without_a_node_here_is_not_taken_for_a_dead_servers() {
        let list = tempfile::tempdir().unwrap();
        let missing = |_: &Path| Err::<(), _>(ErrorKind::NotFound.into());
        let is_dead = || is_dead(&character_path(7), list.path(), u32::MAX, Instant::now(), missing);
        assert!(is_dead().unwrap(), "neither the node nor the device is there");
        fs::create_dir(list.path().join("ublkc7")).unwrap();
        let left = is_dead().unwrap_err();
        assert!(matches!(&left, UblkError::Hidden { path } if *path == character_path(7)), "{left}");
    }

    #[test]
    fn a_block_device_that_the_kernel_takes_away_is_waited_for_and_one_that_stays_is_not_gone() {
        let begun = Instant::now();
        assert!(is_gone(|| begun.elapsed() < TAKEN_AWAY_WITHIN / 5));
        assert!(!is_gone(|| true));
    }

    #[test]
    fn only_character_devices_have_numbers() {
        assert_eq!(number_of("ublkc12"), Some(12));
        for other in ["ublkc", "ublkb1", "ublkc-1", "ublkc1x", ""] {
            assert_eq!(number_of(other), None, "{other}");
        }
    }
}
