//! Sizes as people type and read them.
//!
//! | typed   | bytes                         |
//! |---------|-------------------------------|
//! | `4096`  | 4096                          |
//! | `512M`  | 512 x 1024 x 1024             |
//! | `1.5G`  | 1610612736                    |
//! | `64MiB` | 64 x 1024 x 1024              |
//! | `10%`   | a tenth of the machine's RAM  |
//!
//! K, M, G and T are powers of 1024, with or without `B` or `iB` behind them, in either case: memory is sold and
//! limited in those everywhere else (cgroups, `free -h`, `docker --memory`).

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, bail};

/// A size as typed: bytes, or a share of the machine's RAM.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Size {
    /// So many bytes.
    Bytes(u64),
    /// So many hundredths of the RAM.
    PercentOfRam(f64),
}

impl Size {
    /// The size in bytes on a machine with `ram_bytes` of RAM.
    pub fn bytes(self, ram_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::PercentOfRam(percent) => (ram_bytes as f64 * percent / 100.0) as u64,
        }
    }
}

impl FromStr for Size {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = (&text[..end], text[end..].trim_start());
        if number.is_empty() {
            bail!("a size starts with a number, like 512M, 1.5G or 10%");
        }
        let value: f64 = number.parse().with_context(|| format!("`{number}` is not a number"))?;
        let shift = match unit.to_ascii_lowercase().as_str() {
            "%" if value <= 100.0 => return Ok(Self::PercentOfRam(value)),
            "%" => bail!("{value} % is more than there is"),
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => bail!("unknown unit `{unit}`; write K, M, G or T (powers of 1024), or % of the machine's RAM"),
        };
        // Whole numbers stay exact: a double has 53 bits only.
        let bytes = match number.parse::<u64>() {
            Ok(whole) => whole.checked_mul(1 << shift),
            Err(_) if shift == 0 && number.contains('.') => {
                bail!("half a byte? Write a unit behind {number}: K, M, G or T")
            }
            Err(_) => Some(value * (1u64 << shift) as f64).filter(|bytes| *bytes < 2f64.powi(63)).map(|b| b as u64),
        };
        let bytes = bytes.filter(|bytes| *bytes < 1 << 63).with_context(|| format!("{text} is too large"))?;
        Ok(Self::Bytes(bytes))
    }
}

/// Bytes for a reader: `421.3 MiB`.
pub struct Shown(pub u64);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&bytesize::ByteSize(self.0).display().iec().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> u64 {
        text.parse::<Size>().unwrap().bytes(1000)
    }

    #[test]
    fn sizes_are_powers_of_1024_with_any_spelling_of_the_unit() {
        assert_eq!(bytes("4096"), 4096);
        assert_eq!(bytes("0"), 0);
        for text in ["512M", "512m", "512MB", "512MiB", "512 MiB", " 0.5G "] {
            assert_eq!(bytes(text), 512 << 20, "{text}");
        }
        assert_eq!(bytes("1.5G"), 1536 << 20);
        assert_eq!(bytes("9007199254740993"), 9007199254740993, "more than 53 bits");
        assert_eq!(bytes("1T"), 1 << 40);
    }

    #[test]
    fn a_percentage_is_of_the_machines_ram() {
        assert_eq!(bytes("10%"), 100);
        assert_eq!(bytes("12.5 %"), 125);
        assert!("101%".parse::<Size>().is_err());
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "M", "-5M", "1.2.3M", "5X", "5Mi", "1.5", "9999999999T", "16777216T", "99999999999999999999"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        let why = |text: &str| text.parse::<Size>().unwrap_err().to_string();
        for text in ["99999999999999999999", "9223372036854775808", "99999999999999999999M", "16777216T"] {
            assert!(why(text).contains("too large"), "{}", why(text));
        }
        assert!(why("1.5").contains("unit"), "{}", why("1.5"));
    }

    #[test]
    fn sizes_are_shown_in_binary_units() {
        assert_eq!(Shown(441_804_390).to_string(), "421.3 MiB");
    }
}
