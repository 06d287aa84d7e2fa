//! `compcache doctor`: which ways in work on this machine, and why not.
//!
//! Gathered once as plain facts ([`Facts`]), which `--json` prints as they are and the other form tells in lines.

use std::fmt::{self, Display};
use std::path::Path;
use std::process::ExitCode;

use compcache_block::ublk;
use compcache_fuse::{ENABLED, QUEUES_MAX};
use rustix::fs::{Access, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, geteuid, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use serde::Serialize;

use crate::cgroup;
use crate::cli::{DoctorArgs, Evict};
use crate::disk::ended;
use crate::kernel::{self, pagemap_scan, userfaultfd};
use crate::run;
use crate::size::Shown;

/// What is known of this machine.
#[derive(Serialize)]
struct Facts {
    version: &'static str,
    kernel: String,
    architecture: &'static str,
    ram_bytes: u64,
    memory_cgroup_limit_bytes: Option<u64>,
    memory_cgroup_file: Option<String>,
    userfaultfd: Option<&'static str>,
    userfaultfd_events: bool,
    userfaultfd_fork_events: bool,
    userfaultfd_move: bool,
    userfaultfd_write_protect: bool,
    pagemap_scan: bool,
    transparent_hugepages: Option<String>,
    zram: bool,
    zswap: Option<bool>,
    swap_in_use: bool,
    ublk: Device,
    /// None where no disk can be served by it.
    ublk_resize: Option<bool>,
    fuse: Device,
    fuse_by_io_uring: Rings,
    loop_control: Device,
    nbd: Device,
    preload_object: Option<String>,
    run: Way,
    disk: Way,
    swap: Way,
    mount: Way,
}

/// Whether mounts are served by io_uring.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum Rings {
    Used,
    /// The kernel could, and is not to.
    NotEnabled,
    /// It is enabled, and this machine or container is not one for it.
    Unsuitable,
    /// The kernel is too old.
    Absent,
}

fn rings() -> Rings {
    match kernel::setting(ENABLED).as_deref() {
        Some("Y") if compcache_fuse::queues().is_some() => Rings::Used,
        Some("Y") => Rings::Unsuitable,
        Some(_) => Rings::NotEnabled,
        None => Rings::Absent,
    }
}

/// A device node of the kernel's.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Device {
    Absent,
    Forbidden,
    Usable,
}

/// One way in.
#[derive(Serialize)]
struct Way {
    works: bool,
    /// What stands in the way, or what is worth knowing.
    why: Option<String>,
}

/// Prints the facts; the status says whether `run` works.
pub fn doctor(args: &DoctorArgs) -> ExitCode {
    let facts = Facts::gather();
    let text = match args.json {
        true => serde_json::to_string_pretty(&facts).expect("facts are always JSON") + "\n",
        false => facts.to_string(),
    };
    let printed = ended(Ok(text));
    if facts.run.works { printed } else { ExitCode::FAILURE }
}

impl Facts {
    fn gather() -> Self {
        let kernel = kernel::release();
        let cgroup = cgroup::memory_limit();
        let uffd = userfaultfd::probe();
        let features = uffd.map_or(userfaultfd::Features(0), |granted| granted.features);
        let (object, lacking) = match run::find_object() {
            Ok(object) => (Some(object.display().to_string()), run::rehearse(&object).err()),
            Err(error) => (None, Some(error)),
        };
        let (rights, found) = (Rights::here(), Found::here());
        Self {
            version: env!("CARGO_PKG_VERSION"),
            architecture: std::env::consts::ARCH,
            ram_bytes: kernel::ram_bytes(),
            memory_cgroup_limit_bytes: cgroup.as_ref().map(|limit| limit.bytes),
            memory_cgroup_file: cgroup.map(|limit| limit.file.display().to_string()),
            userfaultfd: uffd.ok().map(|granted| granted.way.name()),
            userfaultfd_events: features.events(),
            userfaultfd_fork_events: uffd.is_ok_and(|granted| granted.fork_events),
            userfaultfd_move: features.moves(),
            userfaultfd_write_protect: features.write_protect(),
            pagemap_scan: pagemap_scan::works(),
            transparent_hugepages: kernel::setting("/sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|line| kernel::chosen(&line).map(str::to_owned)),
            zram: Path::new("/sys/class/zram-control").exists(),
            zswap: kernel::setting("/sys/module/zswap/parameters/enabled").map(|enabled| enabled == "Y"),
            swap_in_use: std::fs::read("/proc/swaps").is_ok_and(|swaps| swaps.split(|byte| *byte == b'\n').count() > 2),
            ublk: device("/dev/ublk-control"),
            ublk_resize: ublk::probe().ok().map(|abilities| abilities.resize),
            fuse: device("/dev/fuse"),
            fuse_by_io_uring: rings(),
            loop_control: device("/dev/loop-control"),
            nbd: node("/dev/nbd0"),
            preload_object: object,
            run: run_works(uffd, lacking),
            disk: disk_works(rights, &found),
            swap: swap_works(disk_works(rights, &found), rights, found.swap_tools),
            mount: mount_works(rights, found.fuse, found.fusermount),
            kernel,
        }
    }
}

/// Who asks. Root in a container may do less than root.
#[derive(Clone, Copy)]
struct Rights {
    root: bool,
    sys_admin: bool,
    sys_resource: bool,
    /// Memory may be locked, all of it.
    ipc_lock: bool,
}

impl Rights {
    fn here() -> Rights {
        let may = |capability| capabilities(None).is_ok_and(|sets| sets.effective.contains(capability));
        Rights {
            root: geteuid().is_root(),
            sys_admin: may(CapabilitySet::SYS_ADMIN),
            sys_resource: may(CapabilitySet::SYS_RESOURCE),
            ipc_lock: may(CapabilitySet::IPC_LOCK) || getrlimit(Resource::Memlock).current.is_none(),
        }
    }
}

/// What there is to serve with.
#[derive(Clone, Copy)]
struct Found {
    ublk: bool,
    fuse: Device,
    control: Device,
    /// Which mounts for others than root.
    fusermount: bool,
    /// The programs by which swap is made and switched on.
    swap_tools: bool,
}

impl Found {
    fn here() -> Found {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = |name| std::env::split_paths(&path).any(|directory| directory.join(name).is_file());
        Found {
            ublk: ublk::probe().is_ok(),
            fuse: device("/dev/fuse"),
            control: device("/dev/loop-control"),
            fusermount: program("fusermount3"),
            swap_tools: program("mkswap") && program("swapon"),
        }
    }
}

/// Disks need nothing for NBD, which no kernel has a part in; what may be missing is what makes a block device of one.
fn disk_works(rights: Rights, found: &Found) -> Way {
    if found.ublk {
        return Way { works: true, why: None };
    }
    let missing: Vec<_> = [("/dev/fuse", "fuse", found.fuse), ("/dev/loop-control", "loop", found.control)]
        .into_iter()
        .filter(|(_, _, device)| *device != Device::Usable)
        .map(|(node, module, device)| match device {
            Device::Absent => format!("{node} is missing (modprobe {module})"),
            _ => format!("{node} may not be opened"),
        })
        .chain((!rights.sys_admin).then(|| "CAP_SYS_ADMIN is lacking".to_owned()))
        .collect();
    let why = match (rights.root, missing.is_empty()) {
        (true, true) => None,
        (false, _) => Some("over NBD; as a block device for root only".into()),
        (true, false) => Some(format!("over NBD alone: {}", missing.join(", "))),
    };
    Way { works: true, why }
}

/// Swap needs a disk that is a block device, and a server that may protect itself.
fn swap_works(disk: Way, rights: Rights, tools: bool) -> Way {
    if let Some(why) = disk.why {
        return Way { works: false, why: Some(format!("it needs a block device, and disks work only {why}")) };
    }
    let needed = [
        (rights.sys_admin, "CAP_SYS_ADMIN (to swap)"),
        (rights.ipc_lock, "CAP_IPC_LOCK (for a server that locks its memory)"),
    ];
    if let Some((_, lacking)) = needed.into_iter().find(|(has, _)| !has) {
        return Way { works: false, why: Some(format!("{lacking} is lacking")) };
    }
    if !tools {
        let why = "mkswap and swapon (package util-linux) are not in PATH, which may lack /sbin and /usr/sbin";
        return Way { works: false, why: Some(why.into()) };
    }
    let why = match rights.sys_resource {
        true => None,
        false => Some("with --unprotected alone, since CAP_SYS_RESOURCE is lacking".into()),
    };
    Way { works: true, why }
}

/// A mount needs FUSE; for others than root the program that mounts for them as well.
fn mount_works(rights: Rights, fuse: Device, fusermount: bool) -> Way {
    let why = match fuse {
        Device::Absent => Some("/dev/fuse is missing (modprobe fuse)".to_owned()),
        Device::Forbidden => Some("/dev/fuse may not be opened (chmod 666, as distributions have it)".to_owned()),
        Device::Usable if rights.root && !rights.sys_admin => Some("CAP_SYS_ADMIN is lacking (to mount)".to_owned()),
        Device::Usable if rights.root || fusermount => None,
        Device::Usable => Some("the program fusermount3 is missing (package fuse3)".to_owned()),
    };
    Way { works: why.is_none(), why }
}

fn run_works(uffd: Result<userfaultfd::Granted, userfaultfd::Refused>, lacking: Option<anyhow::Error>) -> Way {
    let granted = match uffd {
        Ok(granted) => granted,
        Err(refused) => return Way { works: false, why: Some(run::explain_refusal(&refused)) },
    };
    // As the program's start decides.
    if let Some(error) = run::eviction_way(Evict::Auto, granted.features).err().or(lacking) {
        return Way { works: false, why: Some(format!("{error:#}")) };
    }
    let mut notes = Vec::new();
    if !granted.features.moves() {
        notes.push(
            "before Linux 6.8 pages leave by mremap, which is slower, and not at all from programs that use O_DIRECT or \
             io_uring",
        );
    }
    if !granted.fork_events {
        notes.push(
            "copies made by a bare clone(2) instruction, past the C library, are not seen: that takes CAP_SYS_PTRACE",
        );
    }
    Way { works: true, why: (!notes.is_empty()).then(|| notes.join("; ")) }
}

/// By opening it: a node may be there without its driver, or be forbidden by a container whatever its mode.
fn device(path: &str) -> Device {
    told_of(rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty()))
}

/// By its mode alone: to open some does something.
fn node(path: &str) -> Device {
    told_of(rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK))
}

fn told_of<T>(asked: rustix::io::Result<T>) -> Device {
    match asked {
        Ok(_) => Device::Usable,
        Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => Device::Absent,
        Err(_) => Device::Forbidden,
    }
}

impl Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Absent => "absent",
            Self::Forbidden => "not permitted",
            Self::Usable => "usable",
        })
    }
}

impl Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |flag: bool| if flag { "yes" } else { "no" };
        let row = |f: &mut fmt::Formatter<'_>, name: &str, value: &dyn Display| writeln!(f, "  {name:<24}{value}");
        writeln!(f, "compcache {} on Linux {} ({})", self.version, self.kernel, self.architecture)?;
        writeln!(f, "\nmemory")?;
        row(f, "RAM", &Shown(self.ram_bytes))?;
        match (self.memory_cgroup_limit_bytes, &self.memory_cgroup_file) {
            (Some(bytes), Some(file)) => row(f, "memory cgroup limit", &format!("{} ({file})", Shown(bytes)))?,
            _ => row(f, "memory cgroup limit", &"none")?,
        }
        row(f, "transparent huge pages", &self.transparent_hugepages.as_deref().unwrap_or("not in this kernel"))?;
        row(f, "swap in use", &yes(self.swap_in_use))?;
        row(f, "kernel zram", &if self.zram { "present" } else { "absent" })?;
        let zswap = self.zswap.map_or("absent", |on| if on { "on" } else { "off" });
        row(f, "kernel zswap", &zswap)?;
        writeln!(f, "\npaging")?;
        row(f, "userfaultfd", &self.userfaultfd.map_or("no".to_owned(), |way| format!("yes, by {way}")))?;
        row(f, "- events", &yes(self.userfaultfd_events))?;
        row(f, "- events of copies", &yes(self.userfaultfd_fork_events))?;
        row(f, "- UFFDIO_MOVE", &yes(self.userfaultfd_move))?;
        row(f, "- write protection", &yes(self.userfaultfd_write_protect))?;
        row(f, "PAGEMAP_SCAN", &yes(self.pagemap_scan))?;
        row(f, "preload object", &self.preload_object.as_deref().unwrap_or("missing"))?;
        writeln!(f, "\nblock devices and file systems")?;
        match (self.ublk, self.ublk_resize) {
            (Device::Usable, Some(true)) => row(f, "ublk", &"usable")?,
            (Device::Usable, Some(false)) => {
                row(f, "ublk", &"usable; disks keep their size (Linux 6.16 can change it)")?
            }
            (Device::Usable, None) => {
                row(f, "ublk", &"too old: Linux 6.5 or newer is needed; or io_uring is forbidden")?
            }
            (device, _) => row(f, "ublk", &device)?,
        }
        row(f, "FUSE", &self.fuse)?;
        match self.fuse_by_io_uring {
            Rings::Used => row(f, "- by io_uring", &"yes")?,
            Rings::NotEnabled => row(f, "- by io_uring", &format!("no; Y in {ENABLED} makes mounts faster"))?,
            Rings::Unsuitable => {
                let most = QUEUES_MAX;
                row(
                    f,
                    "- by io_uring",
                    &format!("no; not with more than {most} processors, or where io_uring is forbidden"),
                )?
            }
            Rings::Absent => row(f, "- by io_uring", &"no; Linux 6.14 or newer is needed")?,
        }
        row(f, "loop", &self.loop_control)?;
        row(f, "NBD", &self.nbd)?;
        writeln!(f, "\nways in")?;
        for (name, way) in [("run", &self.run), ("disk", &self.disk), ("swap", &self.swap), ("mount", &self.mount)] {
            let why = way.why.as_deref().unwrap_or_default();
            match (way.works, why) {
                (true, "") => writeln!(f, "  compcache {name:<14}works")?,
                (true, why) => writeln!(f, "  compcache {name:<14}works; {why}")?,
                (false, why) => writeln!(f, "  compcache {name:<14}no: {why}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_without_the_capabilities_of_root_is_told_which_ones_are_lacking() {
        let root = Rights { root: true, sys_admin: true, sys_resource: true, ipc_lock: true };
        let found =
            Found { ublk: false, fuse: Device::Usable, control: Device::Usable, fusermount: false, swap_tools: true };
        let (disk, mount) =
            (|rights| disk_works(rights, &found), |rights| mount_works(rights, found.fuse, found.fusermount));
        let swap = |rights| swap_works(disk(rights), rights, found.swap_tools);
        let why = |way: Way| (way.works, way.why.unwrap_or_default());
        for way in [disk(root), swap(root), mount(root)] {
            assert_eq!(why(way), (true, String::new()));
        }
        let lacks = |(works, why): (bool, String), expected, capability: &str| {
            assert!(works == expected && why.contains(capability), "{works} {why}");
        };
        let weak = Rights { sys_admin: false, ..root };
        lacks(why(disk(weak)), true, "over NBD alone: CAP_SYS_ADMIN");
        lacks(why(swap(weak)), false, "CAP_SYS_ADMIN");
        lacks(why(mount(weak)), false, "CAP_SYS_ADMIN");
        lacks(why(swap(Rights { ipc_lock: false, ..root })), false, "CAP_IPC_LOCK");
        lacks(why(swap_works(disk(root), root, false)), false, "mkswap");
        lacks(why(swap(Rights { sys_resource: false, ..root })), true, "--unprotected");
        let user = Rights { root: false, sys_admin: false, sys_resource: false, ipc_lock: false };
        lacks(why(disk(user)), true, "for root only");
        lacks(why(mount(user)), false, "fusermount3");
        assert!(mount_works(user, Device::Usable, true).works);
    }
}
