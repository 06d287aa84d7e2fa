//! Statistics and settings of a mount, as extended attributes of its root.
//!
//! Who has the mount has these: there is no socket to find and none that is left over, and they say what this mount is, whatever else is mounted
//! there. They are not listed, nor stored anywhere.
//!
//! | name                    | read                                 | written, by root and who mounted   |
//! |-------------------------|--------------------------------------|------------------------------------|
//! | `user.compcache.stats`  | a line `NAME VALUE` for each statistic | -                                |
//! | `user.compcache.memory` | the same                             | the new limit, in bytes            |
//! | `user.compcache.codec`  | the same                             | `lz4`, or `zstd LEVEL`             |

use std::ffi::OsStr;

use compcache_cache::CacheStats;
use compcache_store::Codec;
use fuser::INodeNo;
use rustix::io::{self, Errno};
use rustix::process::geteuid;

use super::Tree;
use crate::caller::Caller;

/// What can be asked or set.
#[derive(Clone, Copy)]
pub enum Control {
    Stats,
    Memory,
    Codec,
}

impl Control {
    pub fn named(number: INodeNo, name: &OsStr) -> Option<Control> {
        match name.to_str()? {
            _ if number != INodeNo::ROOT => None,
            "user.compcache.stats" => Some(Control::Stats),
            "user.compcache.memory" => Some(Control::Memory),
            "user.compcache.codec" => Some(Control::Codec),
            _ => None,
        }
    }
}

impl Tree {
    pub fn statistics(&self) -> String {
        let stats = self.cache.stats();
        CacheStats::TABLE.iter().map(|(name, value, _)| format!("{name} {}\n", value(&stats))).collect()
    }

    pub fn control(&self, caller: Caller, control: Control, value: &[u8]) -> io::Result<()> {
        if caller.uid != 0 && caller.uid != geteuid().as_raw() {
            return Err(Errno::PERM);
        }
        let value = std::str::from_utf8(value).map_err(|_| Errno::INVAL)?.trim();
        match control {
            Control::Stats => Err(Errno::PERM),
            Control::Memory => {
                self.cache.set_limit_bytes(value.parse().map_err(|_| Errno::INVAL)?);
                Ok(())
            }
            Control::Codec => {
                let codec = match value.split_once(' ') {
                    None if value == "lz4" => Codec::Lz4,
                    Some(("zstd", level)) => Codec::Zstd { level: level.parse().map_err(|_| Errno::INVAL)? },
                    _ => return Err(Errno::INVAL),
                };
                self.cache.set_codec(codec).map_err(|_| Errno::INVAL)
            }
        }
    }
}
