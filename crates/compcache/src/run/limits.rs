//! Which limits hold: as typed, or nine tenths of the memory cgroup's.

use anyhow::Context;

use crate::cgroup;
use crate::kernel;
use crate::run::failure::Failure;
use crate::size::{Shown, Size};

/// Below this no program starts: its libraries' data alone need more.
const LEAST_BYTES: u64 = 1 << 20;

/// The limits of a tree, bytes; 0 is none, as in the region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// On resident memory and everything of ours together.
    pub ram_bytes: u64,
    /// On resident memory alone.
    pub resident_bytes: u64,
}

impl Limits {
    /// The limits typed, else nine tenths of the cgroup's.
    pub fn choose(ram: Option<Size>, resident: Option<Size>) -> Result<Self, Failure> {
        let machine_bytes = kernel::ram_bytes();
        let bytes = |flag: &str, size: Option<Size>| {
            let Some(size) = size else { return Ok(0) };
            let bytes = size.bytes(machine_bytes);
            if bytes < LEAST_BYTES {
                let (bytes, least) = (Shown(bytes), Shown(LEAST_BYTES));
                return Err(Failure::usage(format!(
                    "{flag} {bytes} is too little for any program; give {least} or more"
                )));
            }
            Ok(bytes)
        };
        let limits = Self { ram_bytes: bytes("--ram", ram)?, resident_bytes: bytes("--resident", resident)? };
        if limits.ram_bytes != 0 || limits.resident_bytes != 0 {
            return Ok(limits);
        }
        let cgroup = cgroup::memory_limit().filter(|limit| limit.bytes < machine_bytes).context(
            "no limit: this process is in no memory cgroup with a limit below the machine's RAM.\n  \
             Say how much the program may use, for example: compcache run --ram 512M -- PROGRAM",
        )?;
        let ram_bytes = cgroup.bytes / 10 * 9;
        if ram_bytes < LEAST_BYTES {
            let (file, bytes) = (cgroup.file.display(), Shown(cgroup.bytes));
            return Err(Failure::usage(format!(
                "{file} says {bytes}, too little for any program; name another limit with --ram"
            )));
        }
        Ok(Self { ram_bytes, resident_bytes: 0 })
    }
}
