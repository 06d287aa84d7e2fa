//! Which limits hold: as typed, or nine tenths of the memory cgroup's.

use anyhow::Context;

use crate::cgroup::{self, Limit};
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
        Self::choose_on(ram, resident, kernel::ram_bytes(), cgroup::memory_limit().as_ref())
    }

    /// The same on a machine with so much RAM, in a cgroup with that limit.
    fn choose_on(
        ram: Option<Size>,
        resident: Option<Size>,
        machine_bytes: u64,
        cgroup: Option<&Limit>,
    ) -> Result<Self, Failure> {
        let cgroup = cgroup.filter(|limit| limit.bytes < machine_bytes);
        let here_bytes = cgroup.map_or(machine_bytes, |limit| limit.bytes);
        let bytes = |flag: &str, size: Option<Size>| {
            let Some(size) = size else { return Ok(0) };
            let bytes = size.bytes(here_bytes);
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
        let cgroup = cgroup.context(
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

    /// What to say before the program starts where the memory cgroup will be full before the limit is met.
    pub fn warning(&self) -> Option<String> {
        self.warning_in(&cgroup::memory_limit()?)
    }

    fn warning_in(&self, cgroup: &Limit) -> Option<String> {
        let ours = if self.ram_bytes != 0 { self.ram_bytes } else { self.resident_bytes };
        (ours > cgroup.bytes).then(|| {
            format!(
                "compcache: a limit of {} is more than the memory cgroup has ({} says {}): the kernel may end the program before it is met; without \
                 --ram it is nine tenths of that\n",
                Shown(ours),
                cgroup.file.display(),
                Shown(cgroup.bytes)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn without_a_limit_it_is_nine_tenths_of_the_cgroups_and_shares_are_of_what_there_is() {
        let choose = |ram, cgroup: Option<u64>| {
            let cgroup = cgroup.map(|bytes| Limit { bytes, file: "/sys/fs/cgroup/memory.max".into() });
            Limits::choose_on(ram, None, 1000 * MIB, cgroup.as_ref()).ok().map(|limits| limits.ram_bytes)
        };
        assert_eq!(choose(None, Some(100 * MIB)), Some(100 * MIB / 10 * 9));
        assert_eq!([choose(None, None), choose(None, Some(2000 * MIB))], [None, None], "nothing limits it");
        assert_eq!(choose(None, Some(MIB)), None, "too little for any program");
        let quarter = Some(Size::PercentOfRam(25.0));
        assert_eq!([choose(quarter, Some(100 * MIB)), choose(quarter, None)], [Some(25 * MIB), Some(250 * MIB)]);
    }

    #[test]
    fn a_limit_that_will_not_be_met_is_told_of() {
        let cgroup = Limit { bytes: 100 * MIB, file: "/sys/fs/cgroup/memory.max".into() };
        let warning = |ram_bytes, resident_bytes| Limits { ram_bytes, resident_bytes }.warning_in(&cgroup);
        assert!(warning(101 * MIB, 0).is_some_and(|text| text.contains("memory.max says 100.0 MiB")));
        assert!(warning(0, 200 * MIB).is_some());
        assert_eq!([warning(100 * MIB, 0), warning(90 * MIB, 200 * MIB)], [None, None]);
    }
}
