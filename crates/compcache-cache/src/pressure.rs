//! How short of memory the machine is, by what the kernel says in `/proc/meminfo` and `/proc/pressure/memory`.
//!
//! The files are opened beforehand and read into a buffer that is there, since no memory may be asked for when this is needed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// More than the kernel prints in the files read here, as far as we need them.
const TEXT_BYTES: usize = 512;

/// The files, open.
pub struct Pressure {
    meminfo: File,
    /// Not on kernels without PSI, nor where it is off.
    stalls: Option<File>,
}

/// For how long, all in all, there was who waited for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalled {
    /// Somebody did.
    pub some: Duration,
    /// Everybody did.
    pub full: Duration,
}

/// Memory of the machine, in KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    total: u64,
    available: u64,
}

impl Memory {
    /// So much in all, of which so much could be had without swapping.
    pub fn of(total: u64, available: u64) -> Memory {
        Memory { total, available }
    }

    /// Whether less than a part in `share` is available.
    pub fn is_below(self, share: u64) -> bool {
        self.available < self.total / share
    }

    /// Whether less than so much is available.
    pub fn is_below_kib(self, kib: u64) -> bool {
        self.available < kib
    }

    /// What is missing, in bytes, for a part in `share` to be available.
    pub fn missing_bytes(self, share: u64) -> u64 {
        (self.total / share).saturating_sub(self.available) * 1024
    }

    /// What is available beyond that, in bytes.
    pub fn spare_bytes(self, share: u64) -> u64 {
        self.available.saturating_sub(self.total / share) * 1024
    }

    /// Whether clearly less is available than there was, a tenth of it, or nothing.
    pub fn has_shrunk_since(self, before: Memory) -> bool {
        self.available < before.available / 10 * 9 || self.available == 0
    }
}

impl Pressure {
    /// Opens the files.
    ///
    /// # Errors
    /// There is no `/proc/meminfo`.
    pub fn open() -> io::Result<Pressure> {
        let meminfo = File::open("/proc/meminfo")?;
        Ok(Pressure { meminfo, stalls: File::open("/proc/pressure/memory").ok() })
    }

    /// What counts up; `None` where the kernel does not say.
    pub fn stalled(&self) -> Option<Stalled> {
        read(self.stalls.as_ref()?, stalled)
    }

    /// What there is now.
    pub fn memory(&self) -> Option<Memory> {
        read(&self.meminfo, memory)
    }
}

fn read<T>(file: &File, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    let mut buffer = [0; TEXT_BYTES];
    let length = file.read_at(&mut buffer, 0).ok()?;
    parse(str::from_utf8(&buffer[..length]).ok()?)
}

/// Of the first lines of `/proc/meminfo`.
fn memory(meminfo: &str) -> Option<Memory> {
    let kib = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    Some(Memory { total: kib("MemTotal")?, available: kib("MemAvailable")? })
}

/// The totals of `/proc/pressure/memory`.
fn stalled(pressure: &str) -> Option<Stalled> {
    let total = |kind: &str| {
        let line = pressure.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))?;
        let total = line.split_ascii_whitespace().find_map(|word| word.strip_prefix("total="))?;
        total.parse().ok().map(Duration::from_micros)
    };
    Some(Stalled { some: total("some")?, full: total("full")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_understood() {
        let of = |available: u64| format!("MemTotal:  500000 kB\nMemFree:  9 kB\nMemAvailable:  {available} kB\n");
        assert_eq!([24_999, 25_000].map(|kib| memory(&of(kib)).unwrap().is_below(20)), [true, false]);
        let since = |before: u64, now: u64| Memory::of(before, now).has_shrunk_since(Memory::of(before, before));
        assert_eq!([0, 899, 900, 1000].map(|now| since(1000, now)), [true, true, false, false]);
        assert!(since(0, 0));
        assert_eq!([99, 100, 101].map(|now| Memory::of(800, now).missing_bytes(8)), [1024, 0, 0]);
        assert_eq!([99, 100, 101].map(|now| Memory::of(800, now).spare_bytes(8)), [0, 0, 1024]);
        assert_eq!(memory("MemTotal: 5 kB\n"), None);
        let pressure =
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=9\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=2000000\n";
        let expected = Stalled { some: Duration::from_micros(9), full: Duration::from_secs(2) };
        assert_eq!(stalled(pressure), Some(expected));
        assert_eq!(stalled("some avg10=0.00 total=9\n"), None);
        let here = Pressure::open().unwrap();
        assert!(here.memory().is_some());
        assert!(here.memory().is_some(), "it is read anew each time");
    }
}
