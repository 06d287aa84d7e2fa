//! Flags' values that are types of their own.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use compcache_pager::shared::RunCodec;

/// `--nbd-tcp`: an address to listen at, this machine's own if there is only a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpAddress(pub SocketAddr);

impl FromStr for TcpAddress {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match text.parse::<u16>() {
            Ok(port) => Ok(Self((Ipv4Addr::LOCALHOST, port).into())),
            Err(_) => text.parse().map(Self).context("write a port, or ADDRESS:PORT with a number for the address"),
        }
    }
}

/// `--recompress`: the level of zstd, or `None`. A type of its own, since an option of clap's is something else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecompressLevel(pub Option<i8>);

pub fn recompress_level(text: &str) -> anyhow::Result<RecompressLevel> {
    text.parse()
}

impl FromStr for RecompressLevel {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match text {
            "none" => Ok(Self(None)),
            "zstd" => Ok(Self(Some(Recompress::DEFAULT_LEVEL))),
            "lz4" => bail!("what is cold is compressed again with zstd or zstd:LEVEL, or not at all (none)"),
            _ => Ok(Self(Some(text.parse::<Codec>()?.level as i8))),
        }
    }
}

impl fmt::Display for RecompressLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => write!(f, "none"),
            Some(level) => write!(f, "zstd:{level}"),
        }
    }
}

/// `--recompress` of disks and caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HowRecompress {
    /// As if nothing had been said.
    Auto,
    /// At this level of zstd; without one, not at all.
    Is(Option<i8>),
}

impl HowRecompress {
    /// What a cache was told.
    pub fn of(cache: compcache_cache::Recompress) -> HowRecompress {
        if cache.where_it_pays { HowRecompress::Auto } else { HowRecompress::Is(cache.level) }
    }

    /// What a cache is told, of which nothing else was said of `after`.
    pub fn of_cache(self, after: Option<Duration>) -> compcache_cache::Recompress {
        let untold = compcache_cache::Recompress::default();
        let after = after.unwrap_or(untold.after);
        match self {
            HowRecompress::Auto => compcache_cache::Recompress { after, ..untold },
            HowRecompress::Is(level) => compcache_cache::Recompress { level, where_it_pays: false, after },
        }
    }
}

impl FromStr for HowRecompress {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match text {
            "auto" => Ok(HowRecompress::Auto),
            _ => Ok(HowRecompress::Is(text.parse::<RecompressLevel>()?.0)),
        }
    }
}

impl fmt::Display for HowRecompress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HowRecompress::Auto => write!(f, "auto"),
            HowRecompress::Is(level) => RecompressLevel(*level).fmt(f),
        }
    }
}

/// What is done with cold blocks of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recompress {
    /// The level of zstd; nothing is done if there is none.
    pub level: Option<i8>,
    /// Blocks are cold when they were not used for so long.
    pub after: Duration,
}

impl Recompress {
    /// `zstd`, without a level.
    pub const DEFAULT_LEVEL: i8 = 3;
    /// Of a disk of which nothing was said.
    pub const DEFAULT: Recompress = Recompress { level: Some(Self::DEFAULT_LEVEL), after: Duration::from_secs(60) };
    /// Of one whose blocks stay as they are.
    pub const NEVER: Recompress = Recompress { level: None, ..Self::DEFAULT };
}

/// `--codec`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Codec {
    /// Which one.
    pub codec: RunCodec,
    /// The level of zstd; 0 for LZ4, which has none.
    pub level: i32,
}

impl Codec {
    /// As the store calls it.
    pub fn of_store(self) -> compcache_store::Codec {
        match self.codec {
            RunCodec::Lz4 => compcache_store::Codec::Lz4,
            // Between -7 and 19: see `from_str`.
            RunCodec::Zstd => compcache_store::Codec::Zstd { level: self.level as i8 },
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codec {
            RunCodec::Lz4 => write!(f, "lz4"),
            RunCodec::Zstd => write!(f, "zstd:{}", self.level),
        }
    }
}

impl FromStr for Codec {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match text.split_once(':') {
            None if text == "lz4" => Ok(Self { codec: RunCodec::Lz4, level: 0 }),
            None if text == "zstd" => Ok(Self { codec: RunCodec::Zstd, level: 1 }),
            Some(("zstd", level)) => {
                let level: i32 = level.parse().with_context(|| format!("`{level}` is no level of zstd"))?;
                if level == 0 || !(-7..=19).contains(&level) {
                    bail!("zstd has the levels 1 to 19 and -1 to -7, not {level}");
                }
                Ok(Self { codec: RunCodec::Zstd, level })
            }
            Some(("lz4", _)) => bail!("lz4 has no levels; write `lz4`, or `zstd:LEVEL`"),
            _ => bail!("the codecs are lz4, zstd and zstd:LEVEL"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_this_machines() {
        assert_eq!("10809".parse::<TcpAddress>().unwrap().0.to_string(), "127.0.0.1:10809");
        assert_eq!("[::]:1".parse::<TcpAddress>().unwrap().0.to_string(), "[::]:1");
        for wrong in ["", "localhost", "70000", "1.2.3.4", "1.2.3.4:"] {
            assert!(wrong.parse::<TcpAddress>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_becomes_of_cold_pages_is_as_it_was_said_and_else_what_pays() {
        for (text, level, where_it_pays) in
            [("auto", Some(3), true), ("none", None, false), ("zstd", Some(3), false), ("zstd:9", Some(9), false)]
        {
            let how: HowRecompress = text.parse().unwrap();
            let cache = how.of_cache(Some(Duration::from_secs(5)));
            let expected = compcache_cache::Recompress { level, where_it_pays, after: Duration::from_secs(5) };
            assert_eq!((cache, HowRecompress::of(cache)), (expected, how));
        }
        assert_eq!(HowRecompress::Auto.of_cache(None), compcache_cache::Recompress::default());
        assert_eq!("zstd".parse::<HowRecompress>().unwrap().to_string(), "zstd:3");
        assert!("lz4".parse::<HowRecompress>().is_err());
    }

    #[test]
    fn a_codec_is_read_with_its_level() {
        assert_eq!("lz4".parse::<Codec>().unwrap(), Codec { codec: RunCodec::Lz4, level: 0 });
        assert_eq!("zstd".parse::<Codec>().unwrap(), Codec { codec: RunCodec::Zstd, level: 1 });
        assert_eq!("zstd:-3".parse::<Codec>().unwrap(), Codec { codec: RunCodec::Zstd, level: -3 });
        for text in ["lz4", "zstd:1", "zstd:-7", "zstd:19"] {
            assert_eq!(text.parse::<Codec>().unwrap().to_string(), text);
        }
        for wrong in ["", "lzo", "lz4:1", "zstd:", "zstd:0", "zstd:20", "zstd:x", "ZSTD"] {
            assert!(wrong.parse::<Codec>().is_err(), "{wrong}");
        }
    }
}
