//! Small virtual machines: a kernel that a distribution made, some programs in an initial RAM disk, and what they print.
//!
//! For what another kernel than this machine's must show. Emulated, so that no KVM is needed: about ten times slower, so nothing
//! measured in here is a number of a machine's; at most, things measured in the same one may be compared.
//!
//! ```no_run
//! use compcache_testkit::vm::{Kernel, Vm};
//! let mut vm = Vm::new(&Kernel::stock().unwrap()).unwrap();
//! vm.program("/usr/bin/true".as_ref(), "/bin/true").unwrap();
//! vm.module("zram", "num_devices=1").unwrap();
//! let printed = vm.run("true; echo status $?", std::time::Duration::from_secs(300)).unwrap();
//! assert!(printed.contains("status 0"));
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cpio::newc;

use crate::features::find_program;

const FILE: u32 = 0o100_755;
const DIRECTORY: u32 = 0o040_755;
/// Where a machine with a network finds what listens on this machine's loopback.
pub const HOST: &str = "10.0.2.2";
const NETWORK_UP: &str = "ip link set lo up; ip addr add 10.0.2.15/24 dev eth0; ip link set eth0 up\n";
/// Printed where the script's own output begins and ends.
const BEGIN: &str = "=== begin";
const END: &str = "=== end";
/// How long a machine may take until its script begins, and how often it is started: now and then the emulator stands still while the kernel brings up
/// its processors, on a busy host, whatever is in the machine, or gets code wrong that the kernel rewrites then (int3).
const BOOT: Duration = Duration::from_secs(120);
const STARTS: u32 = 3;
/// How often it is run, if it was emulated wrongly.
const RUNS: u32 = 3;
/// How long a machine may take to print what its tasks are waiting for.
const INTERRUPTED: Duration = Duration::from_secs(60);

/// A distribution's kernel, unpacked into a directory of its own: `boot/vmlinuz-*`, and its modules under `lib/modules`.
#[derive(Clone, Debug)]
pub struct Kernel {
    image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// One before 6.8, named by `COMPCACHE_OLD_KERNEL`.
    ///
    /// # Errors
    /// None is named, or it is not there; in words for a person.
    pub fn old() -> Result<Kernel, String> {
        Kernel::named("COMPCACHE_OLD_KERNEL", "old")
    }

    /// One with ublk, NBD and zram with writeback (6.12), named by `COMPCACHE_STOCK_KERNEL`.
    ///
    /// # Errors
    /// None is named, or it is not there; in words for a person.
    pub fn stock() -> Result<Kernel, String> {
        Kernel::named("COMPCACHE_STOCK_KERNEL", "stock")
    }

    fn named(variable: &str, which: &str) -> Result<Kernel, String> {
        let directory = std::env::var_os(variable).map(PathBuf::from);
        let directory = directory.ok_or(format!("{variable} names no kernel; .ci/kernel {which} DIR fetches one"))?;
        let one_in = |within: &str| {
            let found = fs::read_dir(directory.join(within)).ok().into_iter().flatten().flatten();
            let found = found.map(|entry| entry.path()).find(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                within == "lib/modules" || name.starts_with("vmlinuz-")
            });
            found.ok_or(format!("{variable}: {} has no kernel in {within}", directory.display()))
        };
        Ok(Kernel { image: one_in("boot")?, modules: one_in("lib/modules")? })
    }
}

/// A machine that has not been started: a kernel, and files. Two processors and 1.5 GiB, unless told otherwise.
pub struct Vm {
    kernel: Kernel,
    archive: Vec<u8>,
    known: BTreeSet<String>,
    /// Lines that load the modules.
    loads: String,
    before: String,
    processors: u32,
    memory_mib: u32,
    network: bool,
    disk_mib: Option<u64>,
    /// Where its files are while it runs; else where temporary ones are.
    directory: Option<PathBuf>,
}

impl Vm {
    /// A machine with this kernel, and busybox for a shell.
    ///
    /// # Errors
    /// There is no busybox, or it cannot be read.
    pub fn new(kernel: &Kernel) -> io::Result<Vm> {
        let mut vm = Vm {
            kernel: kernel.clone(),
            archive: Vec::new(),
            known: BTreeSet::new(),
            loads: String::new(),
            before: String::new(),
            processors: 2,
            memory_mib: 1536,
            network: false,
            disk_mib: None,
            directory: None,
        };
        let busybox = find_program("busybox").ok_or_else(|| io::Error::other("busybox is not on the path"))?;
        for directory in ["/proc", "/sys", "/dev", "/tmp"] {
            vm.directories_of(&format!("{directory}/x"))?;
        }
        vm.program(&busybox, "/bin/busybox")?;
        Ok(vm)
    }

    /// How many processors it has, and how much memory. What is in the initial RAM disk takes a part of that for good.
    pub fn size(&mut self, processors: u32, memory_mib: u32) {
        (self.processors, self.memory_mib) = (processors, memory_mib);
    }

    /// Gives it a network with this machine alone, which it finds at [`HOST`]: `eth0`, which is up, behind an emulated router. It can
    /// connect to what listens on the loopback here; nobody can connect to it.
    ///
    /// The adapter is VMware's, since it receives in a machine without memory, too: its driver gives the adapter the same buffer again where
    /// it gets no other. virtio_net's then receives nothing until there is memory, and a machine that swaps over it waits for itself.
    ///
    /// # Errors
    /// As [`Vm::module`]: the kernel has no vmxnet3.
    pub fn network(&mut self) -> io::Result<()> {
        self.network = true;
        self.module("vmxnet3", "")
    }

    /// Gives it an empty disk of so many MiB, `/dev/vda`, which lies in a file here while the machine runs.
    ///
    /// # Errors
    /// As [`Vm::module`]: the kernel has no virtio_blk.
    pub fn disk(&mut self, mib: u64) -> io::Result<()> {
        self.disk_mib = Some(mib);
        self.module("virtio_blk", "")
    }

    /// Its files are to be in a directory of their own in this one while it runs, and nothing else of it anywhere. The emulator's command line names
    /// them.
    pub fn directory(&mut self, path: &Path) {
        self.directory = Some(path.to_owned());
    }

    /// Lines that the first process runs before it becomes, by exec, the shell that runs the script: so that all of its memory
    /// belongs where they put it.
    pub fn before(&mut self, lines: &str) {
        self.before += lines;
    }

    /// Adds a module of the kernel's and those it needs, to be loaded before the script begins.
    ///
    /// # Errors
    /// The kernel has no such module, or it cannot be read or unpacked (`xz` does that).
    pub fn module(&mut self, name: &str, parameters: &str) -> io::Result<()> {
        let guest = format!("/modules/{name}.ko");
        if self.known.contains(&guest) {
            return Ok(());
        }
        let module = unpacked_module(&self.kernel.modules, name)?;
        for needed in needed_modules(&module) {
            self.module(&needed, "")?;
        }
        self.directories_of(&guest)?;
        self.entry(&guest, FILE, &module)?;
        self.loads += &format!("insmod {guest} {parameters} || echo 'module {name} cannot be loaded'\n");
        self.known.insert(guest);
        Ok(())
    }

    /// Adds a program under another name, with all libraries it is linked with, but without what only debuggers read: the
    /// machine holds its files in memory.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn program(&mut self, host: &Path, guest: &str) -> io::Result<()> {
        let stripped = tempfile::NamedTempFile::new()?;
        let strip = Command::new("strip").arg("-o").arg(stripped.path()).arg(host).stderr(Stdio::null()).status();
        // A script, or no binutils: as it is.
        let usable = strip.is_ok_and(|status| status.success());
        self.file(if usable { stripped.path() } else { host }, guest)?;
        let listed = Command::new("ldd").arg(host).output()?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        for library in listed.split_whitespace().filter(|word| word.starts_with('/')) {
            self.file(Path::new(library), library)?;
        }
        Ok(())
    }

    /// Adds a file, which can be executed.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn file(&mut self, host: &Path, guest: &str) -> io::Result<()> {
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

    /// Starts the machine, runs `script` as its first process, and returns what that printed. The emulator ends with the thread that calls this, however
    /// that ends. One without a network that was plainly emulated wrongly is started again.
    ///
    /// # Errors
    /// The machine did not end within `patience`, or the script did not: with all that was printed.
    pub fn run(mut self, script: &str, patience: Duration) -> io::Result<String> {
        let init = format!(
            "#!/bin/busybox sh\n/bin/busybox --install -s /bin\nexport PATH=/bin HOME=/\n\
             mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev\n\
             mkdir -p /dev/shm; mount -t tmpfs shm /dev/shm\n{}{}{}\nexec /bin/busybox sh /script\n",
            self.loads,
            if self.network { NETWORK_UP } else { "" },
            self.before
        );
        let script = format!("echo '{BEGIN}'\n{script}\necho '{END}'\npoweroff -f\n");
        self.entry("/init", FILE, init.as_bytes())?;
        self.entry("/script", FILE, script.as_bytes())?;
        newc::trailer(&mut self.archive)?;
        let directory = match &self.directory {
            Some(path) => tempfile::tempdir_in(path)?,
            None => tempfile::tempdir()?,
        };
        let [disk, console, monitor] = ["initrd", "console", "monitor"].map(|name| directory.path().join(name));
        fs::write(&disk, &self.archive)?;
        // No option ROM: what boots from a network is not always installed.
        let network: &[&str] = match self.network {
            true => &["-netdev", "user,id=host,ipv6=off", "-device", "vmxnet3,netdev=host,romfile="],
            false => &["-net", "none"],
        };
        let image = directory.path().join("drive");
        let drive = self.disk_mib.map(|_| format!("file={},if=virtio,format=raw,cache=unsafe", image.display()));
        let drive = drive.iter().flat_map(|drive| ["-drive", drive.as_str()]);
        // The kernel believes the clock whatever the host lets it wait for: to do without, it rewrites code in use, and that the emulator
        // has got wrong (int3 in sched_clock_cpu, after 24 minutes on a host with ten others at work).
        // A machine that is interrupted prints what each task is waiting for.
        // What protects from other programs on the same processor, wipes pages before they are used, and tests ciphers at the start, costs the emulator time.
        let options = "console=ttyS0 quiet panic=-1 rootfstype=ramfs tsc=reliable unknown_nmi_panic panic_print=67 mitigations=off \
                       init_on_alloc=0 cryptomgr.notests";
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-M", "q35", "-cpu", "max", "-display", "none", "-no-reboot"])
            .args(network)
            .args(drive)
            .args(["-smp", &self.processors.to_string(), "-m", &self.memory_mib.to_string()])
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .arg("-monitor")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .arg("-kernel")
            .arg(&self.kernel.image)
            .arg("-initrd")
            .arg(&disk)
            .args(["-append", options])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // SAFETY: between fork and exec one prctl(2) with numbers: no allocation, no lock. The signal comes when this thread ends, and until then it waits below.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            })
        };
        let _processors = Processors::take(self.processors);
        // What it did to others cannot be done again.
        let mut runs_left = if self.network { 1 } else { RUNS };
        loop {
            if let Some(mib) = self.disk_mib {
                File::create(&image)?.set_len(mib << 20)?;
            }
            let mut machine = command.spawn()?;
            for _ in 1..STARTS {
                if has_begun(&mut machine, &console)? {
                    break;
                }
                eprintln!("a machine did not boot, or not within {} s, and is started again", BOOT.as_secs());
                machine.kill()?;
                machine.wait()?;
                machine = command.spawn()?;
            }
            let ended = wait(&mut machine, patience);
            let registers =
                if matches!(ended, Ok(false)) { interrupt(&mut machine, &monitor) } else { Ok(String::new()) };
            machine.kill()?;
            machine.wait()?;
            let mut printed = Vec::new();
            File::open(&console)?.read_to_end(&mut printed)?;
            let printed = String::from_utf8_lossy(&printed).replace('\r', "");
            runs_left -= 1;
            if runs_left > 0 && has_impossible_flags(&printed) {
                eprintln!("a machine was emulated wrongly, and is started again; its console:\n{printed}");
                continue;
            }
            let told = |why: &str| io::Error::other(format!("{why}; its console:\n{printed}"));
            if !ended? {
                let registers = registers.unwrap_or_else(|error| format!("its monitor does not answer: {error}"));
                return Err(told(&format!("the machine did not end within {} s; {registers}", patience.as_secs())));
            }
            let own = printed.split_once(BEGIN).and_then(|(_, rest)| rest.split_once(END));
            return own.map(|(own, _)| own.trim().to_owned()).ok_or_else(|| told("the script did not end"));
        }
    }
}

/// Whether a kernel that ended printed flags that no processor has: the emulator has got something wrong, as it does with code that is rewritten while it
/// is in use: seen once, in a double fault where nothing could be at fault.
fn has_impossible_flags(printed: &str) -> bool {
    const HIGHEST: u64 = 1 << 21;
    let flags = printed.lines().filter_map(|line| line.split_once("EFLAGS: "));
    let mut flags = flags.filter_map(|(_, flags)| u64::from_str_radix(flags.split(' ').next()?, 16).ok());
    flags.any(|flags| flags >= HIGHEST << 1)
}

/// The module's contents, as the kernel takes them.
fn unpacked_module(modules: &Path, name: &str) -> io::Result<Vec<u8>> {
    // File names have dashes where the kernel's own names have underscores.
    let path = find_file(modules, &|file| {
        let stem = file.split_once(".ko").map_or("", |(stem, _)| stem);
        stem.replace('-', "_") == name.replace('-', "_")
    });
    let path = path.ok_or_else(|| io::Error::other(format!("no module {name} under {}", modules.display())))?;
    if path.extension().is_none_or(|extension| extension != "xz") {
        return fs::read(path);
    }
    let output = Command::new("xz").arg("-dc").arg(&path).output()?;
    if output.status.success() { Ok(output.stdout) } else { Err(io::Error::other(format!("xz: {}", path.display()))) }
}

fn find_file(directory: &Path, wanted: &dyn Fn(&str) -> bool) -> Option<PathBuf> {
    let entries: Vec<_> = fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path()).collect();
    entries.iter().find_map(|path| match path.is_dir() && !path.is_symlink() {
        true => find_file(path, wanted),
        false => wanted(&path.file_name()?.to_string_lossy()).then(|| path.clone()),
    })
}

/// What a module says of itself: `depends=a,b`, a string between zeroes.
fn needed_modules(module: &[u8]) -> Vec<String> {
    let said = module.split(|byte| *byte == 0).find_map(|word| word.strip_prefix(b"depends="));
    let said = String::from_utf8_lossy(said.unwrap_or_default()).into_owned();
    said.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Processors of this computer that a machine has. All of this process together have no more than there are: else who has a lock in one of them is
/// often kept waiting, those who want it turn in circles meanwhile, and all of them take several times as long.
struct Processors(u32);

/// Those who come first are served first.
struct Queue {
    taken: u32,
    come: u64,
    served: u64,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { taken: 0, come: 0, served: 0 });
static CHANGED: Condvar = Condvar::new();

impl Processors {
    fn take(wanted: u32) -> Processors {
        let all = thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let wanted = wanted.min(all);
        let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
        let ours = queue.come;
        queue.come += 1;
        while queue.served != ours || queue.taken + wanted > all {
            queue = CHANGED.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.served += 1;
        queue.taken += wanted;
        CHANGED.notify_all();
        Processors(wanted)
    }
}

impl Drop for Processors {
    fn drop(&mut self) {
        QUEUE.lock().unwrap_or_else(PoisonError::into_inner).taken -= self.0;
        CHANGED.notify_all();
    }
}

/// Makes a machine that hangs say where it does: what its processors were at, and then, with an interrupt that none can mask,
/// what each task was waiting for, which the kernel prints as it ends.
fn interrupt(machine: &mut Child, monitor: &Path) -> io::Result<String> {
    let mut monitor = UnixStream::connect(monitor)?;
    monitor.write_all(b"info registers -a\nnmi\n")?;
    // The monitor may go with the machine.
    wait(machine, INTERRUPTED)?;
    monitor.set_nonblocking(true)?;
    let mut said = Vec::new();
    match monitor.read_to_end(&mut said) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(String::from_utf8_lossy(&said).replace('\r', "")),
    }
}

/// Waits until a machine's script begins. Whether it did, in time.
fn has_begun(machine: &mut Child, console: &Path) -> io::Result<bool> {
    let begun = Instant::now();
    while begun.elapsed() < BOOT {
        let has_ended = machine.try_wait()?.is_some();
        let printed = fs::read(console).unwrap_or_default();
        let has_begun = printed.windows(BEGIN.len()).any(|part| part == BEGIN.as_bytes());
        if has_begun || has_ended {
            return Ok(has_begun);
        }
        thread::sleep(Duration::from_millis(200));
    }
    Ok(false)
}

/// Waits until the machine ends, but not for longer. Whether it ended.
fn wait(machine: &mut Child, patience: Duration) -> io::Result<bool> {
    let begun = Instant::now();
    while begun.elapsed() < patience {
        if machine.try_wait()?.is_some() {
            return Ok(true);
        }
        thread::sleep(Duration::from_millis(100));
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;
    use std::net::TcpListener;
    use std::sync::mpsc;

    use super::*;
    use crate::features::{Feature, requires};

    #[test]
    fn flags_that_no_processor_has_are_told_from_a_faults() {
        let printed = |flags: &str| {
            format!("=== begin\n[   24.8] RSP: 0000:ff3b98ea004a3ad0 EFLAGS: {flags}\n[   24.9] RAX: 0\n")
        };
        assert!(has_impossible_flags(&printed("5ebba202")));
        assert!(!["00010206", "00250246", "003fffff"].iter().any(|flags| has_impossible_flags(&printed(flags))));
        assert!(!has_impossible_flags("EFLAGS: \nnothing"));
    }

    #[test]
    fn machines_have_no_more_processors_together_than_there_are() {
        let first = Processors::take(u32::MAX);
        let (took, second) = mpsc::channel();
        thread::spawn(move || {
            let _taken = Processors::take(1);
            took.send(())
        });
        assert!(second.recv_timeout(Duration::from_millis(200)).is_err());
        drop(first);
        // Others of these tests may have come before it.
        second.recv_timeout(Duration::from_secs(600)).unwrap();
    }

    #[test]
    fn a_module_is_loaded_after_those_it_needs() {
        if !requires(&[Feature::StockKernel, Feature::Program("qemu-system-x86_64"), Feature::Program("busybox")]) {
            return;
        }
        let mut vm = Vm::new(&Kernel::stock().unwrap()).unwrap();
        vm.size(1, 512);
        for (module, parameters) in [("zram", "num_devices=2"), ("ublk_drv", ""), ("nbd", "nbds_max=1"), ("loop", "")] {
            vm.module(module, parameters).unwrap();
        }
        assert!(vm.module("no_such_module", "").is_err());
        let script = "nproc; ls -1d /dev/ublk-control /dev/nbd0 /dev/loop0 /dev/zram1; grep MemTotal /proc/meminfo";
        let printed = vm.run(script, Duration::from_secs(600)).unwrap_or_else(|error| panic!("{error}"));
        let lines: Vec<_> = printed.lines().map(str::trim).collect();
        assert_eq!(
            lines.get(..5).unwrap_or(&lines),
            ["1", "/dev/loop0", "/dev/nbd0", "/dev/ublk-control", "/dev/zram1"]
        );
        let mib: u64 = lines[5].split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024;
        assert!((400..512).contains(&mib), "{mib} MiB");
    }

    #[test]
    fn a_machine_that_hangs_says_where() {
        if !requires(&[Feature::StockKernel, Feature::Program("qemu-system-x86_64"), Feature::Program("busybox")]) {
            return;
        }
        let mut vm = Vm::new(&Kernel::stock().unwrap()).unwrap();
        vm.size(1, 512);
        let said = vm.run("echo before; sleep 1000", Duration::from_secs(20)).unwrap_err().to_string();
        let expected = ["did not end within 20 s", "RIP=", "before", "NMI", "task:sleep"];
        assert_eq!(expected.map(|expected| said.contains(expected)), [true; 5], "{said}");
    }

    #[test]
    fn a_machine_with_a_disk_reads_back_what_it_wrote_there() {
        if !requires(&[Feature::StockKernel, Feature::Program("qemu-system-x86_64"), Feature::Program("busybox")]) {
            return;
        }
        let mut vm = Vm::new(&Kernel::stock().unwrap()).unwrap();
        vm.size(1, 512);
        vm.disk(64).unwrap();
        let script = "cat /sys/block/vda/size; echo there >/tmp/x; dd if=/tmp/x of=/dev/vda bs=6 seek=9 conv=fsync; \
                      echo 3 >/proc/sys/vm/drop_caches; dd if=/dev/vda bs=6 skip=9 count=1";
        let printed = vm.run(script, Duration::from_secs(600)).unwrap_or_else(|error| panic!("{error}"));
        let lines: Vec<_> = printed.lines().map(str::trim).collect();
        assert_eq!((lines[0], lines.contains(&"there")), ("131072", true), "{printed}");
    }

    #[test]
    fn a_machine_that_ends_before_its_script_begins_is_started_again() {
        if !requires(&[Feature::StockKernel, Feature::Program("qemu-system-x86_64"), Feature::Program("busybox")]) {
            return;
        }
        let mut vm = Vm::new(&Kernel::stock().unwrap()).unwrap();
        vm.size(1, 512);
        vm.disk(64).unwrap();
        // The disk remembers the first start.
        vm.before += "grep -q been /dev/vda || { echo been | dd of=/dev/vda conv=fsync 2>/dev/null; poweroff -f; }\n";
        let printed = vm.run("head -c 4 /dev/vda", Duration::from_secs(600)).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(printed, "been");
    }

    #[test]
    fn a_machine_with_a_network_reaches_what_listens_on_the_loopback_here() {
        if !requires(&[Feature::StockKernel, Feature::Program("qemu-system-x86_64"), Feature::Program("busybox")]) {
            return;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let answering = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            io::BufReader::new(&stream).read_line(&mut line).unwrap();
            stream.write_all(line.to_uppercase().as_bytes()).unwrap();
        });
        let mut vm = Vm::new(&Kernel::stock().unwrap()).unwrap();
        vm.size(1, 512);
        vm.network().unwrap();
        let printed = vm.run(&format!("echo are you there | nc {HOST} {port}"), Duration::from_secs(600));
        assert_eq!(printed.unwrap_or_else(|error| panic!("{error}")), "ARE YOU THERE");
        answering.join().unwrap();
    }
}
