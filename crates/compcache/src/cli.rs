//! What may be typed: the flags, and nothing of what they do.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use compcache_pager::shared::RunCodec;

use crate::size::Size;

/// Any program in less RAM: memory pages kept compressed, from user space.
#[derive(Parser)]
#[command(name = "compcache", version, propagate_version = true, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The ways in.
#[derive(Subcommand)]
pub enum Command {
    Run(RunArgs),
    Doctor(DoctorArgs),
    /// Print completions for a shell
    Completions {
        /// The shell they are for
        shell: clap_complete::Shell,
    },
    /// Write the manual pages into a directory
    #[command(hide = true)]
    Man {
        /// Where they go
        dir: PathBuf,
    },
}

/// Run a program, and all it starts, in less RAM
///
/// The program runs unmodified. What it has not touched for a while is kept compressed, and is decompressed when it is
/// touched again. The limit holds for the program and all its children together.
///
/// The exit status is the program's; if a signal killed it, compcache ends by the same signal. compcache itself answers
/// 127 if the program was not found, 126 if it cannot be run, 2 for a wrong command line, 125 for any other failure of
/// its own. It prints nothing on standard output.
#[derive(Args)]
#[command(after_help = NOTES)]
pub struct RunArgs {
    /// Limit on all memory: what stays resident and everything of ours [default: nine tenths of the memory cgroup's limit]
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Size>,

    /// Limit on the resident part alone, as a memory cgroup beside compressed swap would set it
    #[arg(long, value_name = "SIZE")]
    pub resident: Option<Size>,

    /// lz4 is faster; zstd or zstd:LEVEL makes the pages smaller (levels 1 to 19 and -1 to -7; 1 if none is given)
    #[arg(long, value_name = "CODEC", default_value = "lz4")]
    pub codec: Codec,

    /// How pages leave the program
    #[arg(long, value_name = "WAY", default_value = "auto")]
    pub evict: Evict,

    /// Keep statistics in this file (JSON, replaced twice a second and at the end)
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,

    /// No summary at the end
    #[arg(long, short)]
    pub quiet: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_names = ["PROGRAM", "ARGUMENTS"])]
    pub program: Vec<OsString>,
}

const NOTES: &str = "SIZE is a number of bytes, or one with K, M, G or T (powers of 1024; 512M, 1.5G, 64MiB), \
                     or a share of the machine's RAM (10%).\n\n\
                     COMPCACHE_PRELOAD in the environment names the object to preload, if it is not beside the \
                     executable or in ../lib/compcache.";

/// Say which ways in work on this machine, and why not
///
/// The exit status is 0 if `compcache run` works here, else 1.
#[derive(Args)]
pub struct DoctorArgs {
    /// Print the facts as JSON
    #[arg(long)]
    pub json: bool,
}

/// `--codec`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Codec {
    /// Which one.
    pub codec: RunCodec,
    /// The level of zstd; 0 for LZ4, which has none.
    pub level: i32,
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

/// `--evict`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Evict {
    /// The best way this kernel has
    Auto,
    /// UFFDIO_MOVE (Linux 6.8)
    Move,
    /// mremap (Linux 5.7)
    Remap,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_do_not_contradict_each_other() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn everything_after_the_program_is_the_programs() {
        let cli = Cli::try_parse_from(["compcache", "run", "--ram", "1G", "ls", "--ram", "-l", "--help"]).unwrap();
        let Command::Run(args) = cli.command else { panic!("not run") };
        assert_eq!(args.program, ["ls", "--ram", "-l", "--help"]);
    }

    #[test]
    fn a_codec_is_read_with_its_level() {
        assert_eq!("lz4".parse::<Codec>().unwrap(), Codec { codec: RunCodec::Lz4, level: 0 });
        assert_eq!("zstd".parse::<Codec>().unwrap(), Codec { codec: RunCodec::Zstd, level: 1 });
        assert_eq!("zstd:-3".parse::<Codec>().unwrap(), Codec { codec: RunCodec::Zstd, level: -3 });
        for wrong in ["", "lzo", "lz4:1", "zstd:", "zstd:0", "zstd:20", "zstd:x", "ZSTD"] {
            assert!(wrong.parse::<Codec>().is_err(), "{wrong}");
        }
    }
}
