//! Everything that is checked before the program starts: what cannot work is said then, with the remedy.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use compcache_pager::RemapKernel;
use compcache_pager::shared::{self, EvictionWay};
use object::read::ReadCache;

use crate::cli::{Evict, RunArgs};
use crate::kernel::userfaultfd::{self, Features, Refused};
use crate::run::failure::Failure;
use crate::run::region::TreeRegion;
use crate::run::{elf, program};

/// The object that puts the pager into the program.
const PRELOAD_OBJECT: &str = "libcompcache_preload.so";
/// The symbol under which it shows the version of the region that it knows.
const REGION_VERSION: &str = "COMPCACHE_REGION_VERSION";
/// Names another object than the one beside the executable.
const ENV_PRELOAD: &str = "COMPCACHE_PRELOAD";

/// What the checks found.
pub struct Ready {
    /// The program's file.
    pub program: PathBuf,
    /// The value of LD_PRELOAD for it.
    pub ld_preload: OsString,
    /// How pages will leave it.
    pub eviction: EvictionWay,
}

impl Ready {
    /// The program's name for messages.
    pub fn name(&self) -> String {
        self.program.file_name().unwrap_or(self.program.as_os_str()).display().to_string()
    }
}

/// Checks the program, the object and the kernel.
pub fn check(args: &RunArgs) -> Result<Ready, Failure> {
    let program = program::find(&args.program[0], std::env::var_os("PATH").as_deref())?;
    program::check(&program)?;
    let object = find_object()?;
    let ld_preload = ld_preload(&object, std::env::var_os("LD_PRELOAD").as_deref())?;
    let granted = userfaultfd::probe().map_err(|refused| anyhow::Error::msg(explain(&refused)))?;
    let eviction = eviction_way(args.evict, granted.features)?;
    Ok(Ready { program, ld_preload, eviction })
}

/// Whether programs could get `object`, and it what it shares with others: all that is checked and does not depend on the program.
pub fn rehearse(object: &Path) -> anyhow::Result<()> {
    ld_preload(object, std::env::var_os("LD_PRELOAD").as_deref())?;
    TreeRegion::rehearse()
}

/// The preload object, which knows the same region as this program does.
pub fn find_object() -> anyhow::Result<PathBuf> {
    let object = named_object()?;
    let file = File::open(&object).with_context(|| format!("cannot read {}", object.display()))?;
    match elf::shown_number(&ReadCache::new(file), REGION_VERSION) {
        Some(shared::VERSION) => Ok(object),
        _ => bail!(
            "{} is not of the same version as this program, and would leave programs as they are.\n  \
             Install both of one version, or say where the right one is in {ENV_PRELOAD}.",
            object.display()
        ),
    }
}

/// COMPCACHE_PRELOAD, else beside the executable, else in ../lib/compcache.
fn named_object() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os(ENV_PRELOAD).filter(|value| !value.is_empty()) {
        let path = std::path::absolute(&named)?;
        if !path.is_file() {
            bail!("{ENV_PRELOAD} names {}, which is not a file", path.display());
        }
        return Ok(path);
    }
    let executable = std::env::current_exe().context("cannot tell where this executable is")?;
    let dir = executable.parent().unwrap_or(Path::new("/"));
    let places = [dir.join(PRELOAD_OBJECT), dir.join("../lib/compcache").join(PRELOAD_OBJECT)];
    for place in &places {
        if place.is_file() {
            return place.canonicalize().with_context(|| format!("cannot resolve {}", place.display()));
        }
    }
    bail!(
        "{PRELOAD_OBJECT}, which puts the pager into programs, is missing: it is neither {} nor {}.\n  \
         Build it (cargo build --release -p compcache-preload), or say where it is in {ENV_PRELOAD}.",
        places[0].display(),
        places[1].display()
    )
}

/// LD_PRELOAD with `object` before what it held already.
fn ld_preload(object: &Path, before: Option<&OsStr>) -> anyhow::Result<OsString> {
    if object.as_os_str().as_encoded_bytes().iter().any(|byte| b" :\t\n".contains(byte)) {
        bail!(
            "the loader cannot preload {}: LD_PRELOAD separates paths by blanks and colons.\n  \
             Install compcache in a directory without them, or name a copy of the object in {ENV_PRELOAD}.",
            object.display()
        );
    }
    let mut value = object.as_os_str().to_owned();
    if let Some(before) = before.filter(|before| !before.is_empty()) {
        value.push(":");
        value.push(before);
    }
    Ok(value)
}

/// The way pages leave, or why the one asked for does not exist here.
pub fn eviction_way(asked: Evict, features: Features) -> anyhow::Result<EvictionWay> {
    if !features.events() {
        bail!("this kernel's userfaultfd does not report munmap, mremap and madvise; Linux 5.7 or newer is needed");
    }
    let way = match asked {
        Evict::Auto if features.moves() => EvictionWay::Move,
        Evict::Auto | Evict::Remap => EvictionWay::Remap,
        Evict::Move if features.moves() => EvictionWay::Move,
        Evict::Move => bail!("this kernel has no UFFDIO_MOVE, which came with Linux 6.8; leave `--evict move` out"),
    };
    if way == EvictionWay::Remap && RemapKernel::probe().is_none() {
        bail!("this kernel has neither UFFDIO_MOVE (Linux 6.8) nor mremap with MREMAP_DONTUNMAP (Linux 5.7)");
    }
    Ok(way)
}

/// Why there is no userfaultfd, and the ways to get it.
pub fn explain(refused: &Refused) -> String {
    if refused.unsupported() {
        return "this kernel was built without userfaultfd (CONFIG_USERFAULTFD), which paging needs. \
                Use a distribution's own kernel."
            .into();
    }
    let syscall = match refused.syscall {
        Some(errno) => format!("{errno}"),
        None => "only this executable has the capability; the program would not".into(),
    };
    format!(
        "userfaultfd is not permitted here, and paging needs it (userfaultfd(2): {syscall}; /dev/userfaultfd: {}).\n  \
         Any one of these grants it:\n    \
         - for everybody, until the next boot: sudo sysctl vm.unprivileged_userfaultfd=1\n    \
         - for one group, Linux 6.1 and newer: sudo chgrp GROUP /dev/userfaultfd && sudo chmod g+rw /dev/userfaultfd\n      \
           (for good: a udev rule KERNEL==\"userfaultfd\", GROUP=\"GROUP\", MODE=\"0660\")\n    \
         - for one program: the capability CAP_SYS_PTRACE, as root has it (setpriv --ambient-caps +sys_ptrace \
         --inh-caps +sys_ptrace; AmbientCapabilities= in a systemd unit; docker run --cap-add SYS_PTRACE)\n  \
         In a container, the seccomp profile must allow userfaultfd as well. `compcache doctor` shows what works.",
        refused.device
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn the_object_goes_before_what_is_preloaded_already() {
        let object = Path::new("/opt/x/libcompcache_preload.so");
        assert_eq!(ld_preload(object, None).unwrap(), "/opt/x/libcompcache_preload.so");
        assert_eq!(ld_preload(object, Some("".as_ref())).unwrap(), "/opt/x/libcompcache_preload.so");
        let both = ld_preload(object, Some("/a.so /b.so".as_ref())).unwrap();
        assert_eq!(both, "/opt/x/libcompcache_preload.so:/a.so /b.so");
    }

    #[test]
    fn a_path_the_loader_would_split_is_refused() {
        for path in ["/my dir/x.so", "/a:b/x.so"] {
            assert!(ld_preload(Path::new(path), None).is_err(), "{path}");
        }
    }

    #[test]
    fn the_way_is_the_one_asked_for_or_the_best_there_is() {
        let (new, old) = (Features(0x1ffff), Features(0xffff));
        assert_eq!(eviction_way(Evict::Auto, new).unwrap(), EvictionWay::Move);
        assert_eq!(eviction_way(Evict::Auto, old).unwrap(), EvictionWay::Remap);
        assert_eq!(eviction_way(Evict::Remap, new).unwrap(), EvictionWay::Remap);
        assert_eq!(eviction_way(Evict::Move, new).unwrap(), EvictionWay::Move);
        assert!(eviction_way(Evict::Move, old).is_err());
        assert!(eviction_way(Evict::Auto, Features(1)).is_err());
    }

    #[test]
    fn a_refusal_names_three_ways_to_grant_it() {
        let said = explain(&Refused { syscall: Some(Errno::PERM), device: Errno::ACCESS });
        for way in ["vm.unprivileged_userfaultfd=1", "/dev/userfaultfd", "CAP_SYS_PTRACE"] {
            assert!(said.contains(way), "{way}");
        }
    }
}
