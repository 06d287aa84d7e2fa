//! What this machine can do, asked by the tests that need it.
//!
//! A test begins with `if !requires(&[Feature::Userfaultfd]) { return; }`. Where the feature is missing the test ends
//! early, and a counted line says so, which `make test` shows at the end:
//!
//! ```text
//! SKIP 3: a_disk_survives_its_server needs zram-control (/sys/class/zram-control is missing)
//! ```
//!
//! With `COMPCACHE_REQUIRE_ALL=1` it fails instead, so that a machine meant to run everything does. The probes change
//! nothing on the machine.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Something a test may need and a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// userfaultfd(2) that also answers faults of the kernel (not user mode only).
    Userfaultfd,
    /// `UFFDIO_MOVE`, Linux 6.8 and later.
    UffdMove,
    /// The `PAGEMAP_SCAN` request, Linux 6.7 and later.
    PagemapScan,
    /// The `PROCMAP_QUERY` request, Linux 6.11 and later.
    ProcmapQuery,
    /// A kernel zram device that is free, or one that can be added.
    ZramDevice,
    /// The kernel's zswap.
    Zswap,
    /// The memory controller of control groups, version 1.
    CgroupMemoryV1,
    /// The memory controller of control groups, version 2.
    CgroupMemoryV2,
    /// The memory controller of control groups, in either version.
    CgroupMemory,
    /// Loop devices.
    Loop,
    /// Block devices whose sectors are larger than a page: Linux 6.15.
    LargeSectors,
    /// The fuse device.
    Fuse,
    /// Attributes of files on tmpfs (`chattr`): Linux 6.6.
    TmpfsAttributes,
    /// Requests of FUSE's by io_uring, which the superuser may enable: Linux 6.14, and no more processors than we want queues for.
    FuseRings,
    /// Files that the kernel reads and writes past a FUSE server: Linux 6.9.
    FusePassthrough,
    /// A FUSE server can have the kernel forget a file that nobody uses, and no other: Linux 6.18.
    FusePrune,
    /// The kernel's driver for block devices that are served from user space.
    Ublk,
    /// The same, able to change the size of a device in use: Linux 6.16.
    UblkResize,
    /// io_uring that this user may use.
    IoUring,
    /// To be the superuser.
    Root,
    /// At least this many CPUs.
    Cpus(usize),
    /// A kernel before 6.8, to be started in a virtual machine.
    OldKernel,
    /// A kernel with ublk, NBD and zram with writeback, to be started in a virtual machine.
    StockKernel,
    /// A program on the path.
    Program(&'static str),
}

impl Feature {
    /// Whether this machine has it; if not, what is missing, in words for a person who wants to add it.
    pub fn probe(self) -> Result<(), String> {
        match self {
            Feature::Userfaultfd => uffd_features().map(drop),
            Feature::UffdMove => bit(uffd_features()?, 16, "the kernel's userfaultfd has no MOVE (Linux 6.8)"),
            Feature::PagemapScan => pagemap_scan(),
            Feature::ProcmapQuery => since((6, 11)),
            Feature::ZramDevice => zram(),
            Feature::Zswap => exists("/sys/module/zswap/parameters/enabled"),
            Feature::CgroupMemoryV1 => exists("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
            Feature::CgroupMemoryV2 => cgroup_v2(),
            Feature::CgroupMemory => Feature::CgroupMemoryV1.probe().or_else(|_| cgroup_v2()),
            Feature::Loop => exists("/dev/loop-control"),
            Feature::LargeSectors => since((6, 15)),
            Feature::Fuse => exists("/dev/fuse"),
            Feature::TmpfsAttributes => since((6, 6)),
            Feature::FuseRings => fuse_rings(),
            Feature::FusePassthrough => since((6, 9)),
            Feature::FusePrune => since((6, 18)),
            Feature::Ublk => exists("/dev/ublk-control"),
            Feature::UblkResize => Feature::Ublk.probe().and_then(|()| since((6, 16))),
            Feature::IoUring => io_uring(),
            Feature::Root => root(),
            Feature::Cpus(wanted) => cpus(wanted),
            Feature::OldKernel => crate::vm::Kernel::old().map(drop),
            Feature::StockKernel => crate::vm::Kernel::stock().map(drop),
            Feature::Program(name) => match find_program(name) {
                Some(_) => Ok(()),
                None => Err(format!("the program {name} is not on the path")),
            },
        }
    }
}

static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// Whether the machine has all of `features`. If not, prints a counted line; the test then returns.
///
/// # Panics
/// When something is missing and `COMPCACHE_REQUIRE_ALL=1`.
pub fn requires(features: &[Feature]) -> bool {
    let missing: Vec<_> = features.iter().filter_map(|one| one.probe().err().map(|why| (one, why))).collect();
    if missing.is_empty() {
        return true;
    }
    let test = thread::current().name().unwrap_or("a test").to_owned();
    let needs: Vec<_> = missing.iter().map(|(feature, why)| format!("{feature:?} ({why})")).collect();
    let needs = needs.join(", ");
    skip(&format!("{test} needs {needs}"));
    false
}

/// Says that a test, or a part of one, is skipped, and counts it. What a test prints that passes nobody sees: so it is also added to the file
/// that `COMPCACHE_SKIPS` names.
///
/// # Panics
/// When `COMPCACHE_REQUIRE_ALL=1`; and if that file cannot be written.
pub fn skip(why: &str) {
    let required = env::var("COMPCACHE_REQUIRE_ALL").is_ok_and(|value| value == "1");
    assert!(!required, "COMPCACHE_REQUIRE_ALL=1, and {why}");
    let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
    eprintln!("SKIP {count}: {why}");
    if let Some(path) = env::var_os("COMPCACHE_SKIPS") {
        let file = OpenOptions::new().create(true).append(true).open(&path);
        // One call, so that lines of several processes do not mix.
        let written = file.and_then(|mut file| file.write_all(format!("{why}\n").as_bytes()));
        written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

/// What is mounted here, one mount in a line. The table is the whole machine's, in which another test's names need not be text: those are made some.
#[must_use]
pub fn mounts() -> String {
    let table = fs::read("/proc/self/mounts").expect("the kernel tells what is mounted");
    String::from_utf8_lossy(&table).into_owned()
}

/// Where the program `name` is on the path.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

fn exists(path: &str) -> Result<(), String> {
    if Path::new(path).exists() { Ok(()) } else { Err(format!("{path} is missing")) }
}

fn fuse_rings() -> Result<(), String> {
    const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";
    const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
    const QUEUES_MAX: u32 = 16;

    let writable = OpenOptions::new().write(true).open(PARAMETER);
    writable.map_err(|error| format!("{PARAMETER} cannot be written: {error}"))?;
    let possible = fs::read_to_string(POSSIBLE).unwrap_or_default();
    let last = possible.trim().rsplit(['-', ',']).next().and_then(|last| last.parse::<u32>().ok());
    match last {
        Some(last) if last < QUEUES_MAX => Feature::IoUring.probe(),
        _ => Err(format!("there may be more than {QUEUES_MAX} processors: {}", possible.trim())),
    }
}

fn bit(word: u64, number: u32, why: &str) -> Result<(), String> {
    if word >> number & 1 == 1 { Ok(()) } else { Err(why.to_owned()) }
}

fn root() -> Result<(), String> {
    // SAFETY: geteuid(2) takes nothing, touches nothing and cannot fail.
    if unsafe { libc::geteuid() } == 0 { Ok(()) } else { Err("this is not the superuser".to_owned()) }
}

fn cpus(wanted: usize) -> Result<(), String> {
    let have = thread::available_parallelism().map_or(1, |count| count.get());
    if have >= wanted { Ok(()) } else { Err(format!("there are {have} CPUs, fewer than {wanted}")) }
}

/// Whether the kernel is of this version, or a later one.
fn since(wanted: (u32, u32)) -> Result<(), String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").map_err(|error| error.to_string())?;
    let mut numbers = release.split(['.', '-', '+']).map_while(|number| number.trim().parse::<u32>().ok());
    let have = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if have >= wanted {
        Ok(())
    } else {
        Err(format!("Linux {}.{} is needed, not {}", wanted.0, wanted.1, release.trim()))
    }
}

fn cgroup_v2() -> Result<(), String> {
    let path = "/sys/fs/cgroup/cgroup.controllers";
    let controllers = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let found = controllers.split_whitespace().any(|name| name == "memory");
    if found { Ok(()) } else { Err(format!("{path} does not list memory")) }
}

fn zram() -> Result<(), String> {
    if Path::new("/sys/class/zram-control/hot_add").exists() {
        return Ok(());
    }
    let size = fs::read_to_string("/sys/block/zram0/disksize").map_err(|error| format!("no zram device: {error}"))?;
    if size.trim() == "0" { Ok(()) } else { Err("/dev/zram0 is in use and no other can be added".to_owned()) }
}

/// `struct uffdio_api` of `linux/userfaultfd.h`.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// The features that userfaultfd offers here, as the kernel's bits.
fn uffd_features() -> Result<u64, String> {
    const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;
    // SAFETY: userfaultfd(2) takes flags alone and returns a descriptor that nobody else owns.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(format!("userfaultfd: {}", std::io::Error::last_os_error()));
    }
    let mut api = UffdioApi { api: 0xAA, features: 0, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one `struct uffdio_api`, which `api` is; the descriptor is ours and is closed
    // once, here.
    let (answer, error) = unsafe {
        let answer = libc::ioctl(fd as libc::c_int, UFFDIO_API, &mut api);
        let error = std::io::Error::last_os_error();
        libc::close(fd as libc::c_int);
        (answer, error)
    };
    if answer == 0 { Ok(api.features) } else { Err(format!("UFFDIO_API: {error}")) }
}

/// Sends PAGEMAP_SCAN with a size of 0: a kernel that knows it says EINVAL, one that does not says ENOTTY.
fn pagemap_scan() -> Result<(), String> {
    use std::os::fd::AsRawFd;
    const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
    let file = File::open("/proc/self/pagemap").map_err(|error| format!("/proc/self/pagemap: {error}"))?;
    let mut argument = [0u64; 12];
    // SAFETY: the request reads and writes at most 96 bytes (its size is part of its number), which `argument` has.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), PAGEMAP_SCAN, argument.as_mut_ptr()) };
    let error = std::io::Error::last_os_error();
    if answer < 0 && error.raw_os_error() == Some(libc::ENOTTY) {
        return Err("the kernel has no PAGEMAP_SCAN (Linux 6.7)".to_owned());
    }
    Ok(())
}

fn io_uring() -> Result<(), String> {
    let mut parameters = [0u64; 15];
    // SAFETY: io_uring_setup(2) reads and writes one `struct io_uring_params` of 120 bytes, which `parameters` is.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    if fd < 0 {
        return Err(format!("io_uring_setup: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: the descriptor was returned just now and nobody else has it.
    unsafe { libc::close(fd as libc::c_int) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_and_a_present_one_is_found() {
        assert!(Feature::Program("no-such-program-anywhere").probe().unwrap_err().contains("no-such-program-anywhere"));
        assert_eq!(Feature::Program("sh").probe(), Ok(()));
        assert!(requires(&[Feature::Program("sh"), Feature::Cpus(1)]));
    }

    #[test]
    fn every_probe_answers_without_disturbing_the_machine() {
        use Feature::*;
        let all = [
            Userfaultfd,
            UffdMove,
            PagemapScan,
            ZramDevice,
            Zswap,
            CgroupMemoryV1,
            CgroupMemoryV2,
            Loop,
            Fuse,
            IoUring,
            Root,
        ];
        for feature in all {
            eprintln!("{feature:?}: {:?}", feature.probe());
        }
    }
}
