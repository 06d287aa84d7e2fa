//! Small virtual machines: a kernel that a distribution made, some programs in an initial RAM disk, and what they print.
//!
//! For what another kernel than this machine's must show. Emulated, so that no KVM is needed: about ten times slower, which
//! is why nothing measured in here is a number.
//!
//! ```no_run
//! use compcache_testkit::vm::{Vm, old_kernel};
//! let mut vm = Vm::new(&old_kernel().unwrap()).unwrap();
//! vm.program("/usr/bin/true".as_ref(), "/bin/true").unwrap();
//! let printed = vm.run("true; echo status $?", std::time::Duration::from_secs(300)).unwrap();
//! assert!(printed.contains("status 0"));
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cpio::newc;

use crate::features::find_program;

const FILE: u32 = 0o100_755;
const DIRECTORY: u32 = 0o040_755;
/// Printed where the script's own output begins and ends.
const BEGIN: &str = "=== begin";
const END: &str = "=== end";

/// The image of a kernel before 6.8, named by `COMPCACHE_OLD_KERNEL`.
///
/// # Errors
/// None is named, or it is not there; in words for a person.
pub fn old_kernel() -> Result<PathBuf, String> {
    let named = std::env::var_os("COMPCACHE_OLD_KERNEL").map(PathBuf::from);
    match named {
        Some(path) if path.is_file() => Ok(path),
        Some(path) => Err(format!("COMPCACHE_OLD_KERNEL: {} is not there", path.display())),
        None => Err("COMPCACHE_OLD_KERNEL names no kernel image; .ci/old-kernel DIR fetches one".to_owned()),
    }
}

/// A machine that has not been started: a kernel, and files.
pub struct Vm {
    kernel: PathBuf,
    archive: Vec<u8>,
    known: BTreeSet<String>,
}

impl Vm {
    /// A machine with this kernel, and busybox for a shell.
    ///
    /// # Errors
    /// There is no busybox, or it cannot be read.
    pub fn new(kernel: &Path) -> io::Result<Vm> {
        let mut vm = Vm { kernel: kernel.to_owned(), archive: Vec::new(), known: BTreeSet::new() };
        let busybox = find_program("busybox").ok_or_else(|| io::Error::other("busybox is not on the path"))?;
        for directory in ["/proc", "/sys", "/dev", "/tmp"] {
            vm.directories_of(&format!("{directory}/x"))?;
        }
        vm.program(&busybox, "/bin/busybox")?;
        Ok(vm)
    }

    /// Adds a program under another name, with all libraries it is linked with.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn program(&mut self, host: &Path, guest: &str) -> io::Result<()> {
        self.file(host, guest)?;
        let listed = Command::new("ldd").arg(host).output()?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        for library in listed.split_whitespace().filter(|word| word.starts_with('/')) {
            self.file(Path::new(library), library)?;
        }
        Ok(())
    }

    fn file(&mut self, host: &Path, guest: &str) -> io::Result<()> {
        if self.known.insert(guest.to_owned()) {
            self.directories_of(guest)?;
            self.entry(guest, FILE, &fs::read(host)?)?;
        }
        Ok(())
    }

    fn directories_of(&mut self, guest: &str) -> io::Result<()> {
        let parents: Vec<_> = Path::new(guest).ancestors().skip(1).map(|path| path.display().to_string()).collect();
        for parent in parents.into_iter().rev().filter(|parent| parent != "/") {
            if self.known.insert(parent.clone()) {
                self.entry(&parent, DIRECTORY, &[])?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, guest: &str, mode: u32, contents: &[u8]) -> io::Result<()> {
        let size = u32::try_from(contents.len()).map_err(io::Error::other)?;
        let header = newc::Builder::new(guest.trim_start_matches('/')).mode(mode).nlink(1);
        let mut writer = header.write(&mut self.archive, size);
        writer.write_all(contents)?;
        writer.finish().map(drop)
    }

    /// Starts the machine, with two processors and 1.5 GiB, runs `script` as its first process, and returns what that printed.
    ///
    /// # Errors
    /// The machine did not end within `patience`, or the script did not: with all that was printed.
    pub fn run(mut self, script: &str, patience: Duration) -> io::Result<String> {
        let init = format!(
            "#!/bin/busybox sh\n/bin/busybox --install -s /bin\nexport PATH=/bin HOME=/\n\
             mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev\n\
             mkdir -p /dev/shm; mount -t tmpfs shm /dev/shm\n\
             echo '{BEGIN}'\n{script}\necho '{END}'\npoweroff -f\n"
        );
        self.entry("/init", FILE, init.as_bytes())?;
        newc::trailer(&mut self.archive)?;
        let directory = tempfile::tempdir()?;
        let (disk, console) = (directory.path().join("initrd"), directory.path().join("console"));
        fs::write(&disk, &self.archive)?;
        let mut machine = Command::new("qemu-system-x86_64")
            .args([
                "-M",
                "q35",
                "-cpu",
                "max",
                "-smp",
                "2",
                "-m",
                "1536",
                "-display",
                "none",
                "-no-reboot",
                "-net",
                "none",
            ])
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&disk)
            .args(["-append", "console=ttyS0 quiet panic=-1"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        let ended = wait(&mut machine, patience);
        let mut printed = Vec::new();
        File::open(&console)?.read_to_end(&mut printed)?;
        let printed = String::from_utf8_lossy(&printed).replace('\r', "");
        let told = |why: &str| io::Error::other(format!("{why}; its console:\n{printed}"));
        if !ended? {
            return Err(told(&format!("the machine did not end within {} s", patience.as_secs())));
        }
        let own = printed.split_once(BEGIN).and_then(|(_, rest)| rest.split_once(END));
        own.map(|(own, _)| own.trim().to_owned()).ok_or_else(|| told("the script did not end"))
    }
}

/// Waits for the machine, and ends it if it takes too long. Whether it ended by itself.
fn wait(machine: &mut Child, patience: Duration) -> io::Result<bool> {
    let begun = Instant::now();
    while begun.elapsed() < patience {
        if machine.try_wait()?.is_some() {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    machine.kill()?;
    machine.wait()?;
    Ok(false)
}
