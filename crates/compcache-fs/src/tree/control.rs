//! Statistics and settings of a mount, as extended attributes of its root.
//!
//! Who has the mount has these: there is no socket to find and none that is left over, and they say what this mount is, whatever else is mounted
//! there. They are not listed, nor stored anywhere.
//!
//! | name                    | read                                 | written, by root and who mounted   |
//! |-------------------------|--------------------------------------|------------------------------------|
//! | `user.compcache.stats`  | a line `NAME VALUE` for each statistic, and each setting but the limit, which is one | - |
//! | `user.compcache.memory` | the same                             | the new limit, in bytes, or `50%` of what is there where the server is: 0, or 1 MiB at least |
//! | `user.compcache.codec`  | the same                             | `lz4`, or `zstd LEVEL`             |
//! | `user.compcache.recompress` | the same                         | `auto`, `none`, or `zstd LEVEL`    |
//! | `user.compcache.recompress_after` | the same                   | milliseconds                       |
//!
//! Where nothing may be written (`ro`) the kernel lets no attribute be set, and settings are changed by reading: `user.compcache.memory=8388608`, by
//! the same users.

use std::ffi::OsStr;
use std::time::Duration;

use compcache_cache::{CacheStats, LEAST_BYTES, Recompress};
use compcache_store::Codec;
use fuser::INodeNo;
use rustix::io::{self, Errno};
use rustix::process::geteuid;

use super::Tree;
use crate::caller::Caller;

/// The statistic beside those of the cache: name, meaning.
pub const PASSED_OPENS: (&str, &str) =
    ("passed_opens", "Opens since the mount of files that the kernel then read or wrote below by itself.");

/// What can be asked or set.
#[derive(Clone, Copy)]
pub enum Control {
    Stats,
    Memory,
    Codec,
    Recompress,
    RecompressAfter,
}

impl Control {
    pub fn named(number: INodeNo, name: &OsStr) -> Option<Control> {
        match name.to_str()? {
            _ if number != INodeNo::ROOT => None,
            "user.compcache.stats" => Some(Control::Stats),
            "user.compcache.memory" => Some(Control::Memory),
            "user.compcache.codec" => Some(Control::Codec),
            "user.compcache.recompress" => Some(Control::Recompress),
            "user.compcache.recompress_after" => Some(Control::RecompressAfter),
            _ => None,
        }
    }
}

impl Tree {
    pub fn statistics(&self) -> String {
        let stats = self.cache.stats();
        let cached = CacheStats::TABLE.iter().map(|(name, value, _)| format!("{name} {}\n", value(&stats)));
        let Recompress { level, where_it_pays, after } = self.cache.recompress();
        let zstd = |level| format!("zstd:{level}");
        let codec = match self.cache.codec() {
            Codec::Zstd { level } => zstd(level),
            _ => "lz4".to_owned(),
        };
        let recompress = if where_it_pays { "auto".to_owned() } else { level.map_or("none".to_owned(), zstd) };
        let settings = [
            format!("{} {}\n", PASSED_OPENS.0, self.backings.passed()),
            format!("codec {codec}\nrecompress {recompress}\nrecompress_after_ms {}\n", after.as_millis()),
        ];
        cached.chain(settings).collect()
    }

    /// Reads what is named; a setting with its new value changes that.
    pub fn read_control(&self, caller: Caller, number: INodeNo, name: &OsStr) -> Option<io::Result<String>> {
        if Control::named(number, name).is_some() {
            return Some(Ok(self.statistics()));
        }
        let (setting, value) = name.to_str()?.split_once('=')?;
        let control = Control::named(number, OsStr::new(setting))?;
        Some(self.control(caller, control, value.as_bytes()).map(|()| String::new()))
    }

    pub fn control(&self, caller: Caller, control: Control, value: &[u8]) -> io::Result<()> {
        if caller.uid != 0 && caller.uid != geteuid().as_raw() {
            return Err(Errno::PERM);
        }
        let value = std::str::from_utf8(value).map_err(|_| Errno::INVAL)?.trim();
        match control {
            Control::Stats => Err(Errno::PERM),
            Control::Memory => {
                let bytes = limit_bytes(value, self.whole_bytes).ok_or(Errno::INVAL)?;
                if (1..LEAST_BYTES).contains(&bytes) {
                    return Err(Errno::RANGE);
                }
                self.cache.set_limit_bytes(bytes);
                Ok(())
            }
            Control::Codec => {
                let codec = match value {
                    "lz4" => Codec::Lz4,
                    _ => Codec::Zstd { level: zstd_level(value).ok_or(Errno::INVAL)? },
                };
                self.cache.set_codec(codec).map_err(|_| Errno::INVAL)
            }
            Control::Recompress => {
                let after = self.cache.recompress().after;
                let recompress = match value {
                    "auto" => Recompress { after, ..Recompress::default() },
                    "none" => Recompress { level: None, where_it_pays: false, after },
                    _ => {
                        let level = zstd_level(value).ok_or(Errno::INVAL)?;
                        Recompress { level: Some(level), where_it_pays: false, after }
                    }
                };
                self.cache.set_recompress(recompress).map_err(|_| Errno::INVAL)
            }
            Control::RecompressAfter => {
                let after = Duration::from_millis(value.parse().map_err(|_| Errno::INVAL)?);
                let recompress = Recompress { after, ..self.cache.recompress() };
                self.cache.set_recompress(recompress).map_err(|_| Errno::INVAL)
            }
        }
    }
}

/// The level in `zstd LEVEL`.
fn zstd_level(value: &str) -> Option<i8> {
    value.strip_prefix("zstd ")?.parse().ok()
}

/// A number of bytes, or of hundredths of what there is.
fn limit_bytes(value: &str, whole_bytes: impl Fn() -> u64) -> Option<u64> {
    let Some(percent) = value.strip_suffix('%') else { return value.parse().ok() };
    let percent: f64 = percent.parse().ok()?;
    (0.0..=100.0).contains(&percent).then(|| (whole_bytes() as f64 * percent / 100.0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_of_what_the_server_has() {
        let limit = |value| limit_bytes(value, || 1000);
        assert_eq!(["4096", "0", "50%", "12.5%", "100%"].map(limit), [4096, 0, 500, 125, 1000].map(Some));
        for value in ["", "%", "101%", "-1%", "NaN%", "4K", "50 %"] {
            assert_eq!(limit(value), None, "{value}");
        }
    }
}
