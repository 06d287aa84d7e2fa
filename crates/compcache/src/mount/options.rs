//! Options as in /etc/fstab, and the form in which mount(8) asks for them.
//!
//! For a line `/slow/tree /mnt/tree fuse.compcache memory=10%,allow_other 0 0` mount(8) runs `mount.fuse` (of the package fuse3; Fedora: fuse), and that
//! `compcache /slow/tree /mnt/tree -o rw,memory=10%,allow_other,dev,suid`. It is mounted when this returns, so what serves it goes on
//! in the background.
//!
//! | option                                      | is                                         |
//! |---------------------------------------------|--------------------------------------------|
//! | `memory=`, `codec=`, `recompress=`, `recompress_after=`, `remember=`, `passthrough=` | the flag of that name |
//! | `exclusive`, `writeback_cache`, `allow_other`, `watch` | the flag of that name           |
//! | `ro`, `noexec`, `nosuid`, `nodev`           | what programs may not do there             |
//! | `nofail`, `_netdev`, `x-...` and their like | mount(8)'s and systemd's own, and ignored  |
//! | anything else                               | refused                                    |

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, anyhow, bail};
use compcache_fs::Forbidden;

use clap::ValueEnum;

use crate::cli::{MountArgs, Passthrough};

/// What says nothing to a file system's server: what is so anyway, or is for who mounts.
const IGNORED: &[&str] = &[
    "async",
    "atime",
    "auto",
    "defaults",
    "dev",
    "diratime",
    "exec",
    "group",
    "noatime",
    "noauto",
    "nodiratime",
    "nofail",
    "nouser",
    "owner",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "rw",
    "suid",
    "user",
    "users",
    "_netdev",
];

/// The arguments of `compcache mount`, if we are called as mount(8) has it done: no command has a slash in it.
pub fn of_mount_command(arguments: &[OsString]) -> Option<Vec<OsString>> {
    let is_path = |word: &&OsString| word.as_bytes().contains(&b'/');
    arguments.get(1).filter(is_path)?;
    let ours = [arguments[0].as_os_str(), OsStr::new("mount"), OsStr::new("--background")];
    Some(ours.into_iter().map(OsStr::to_owned).chain(arguments[1..].iter().cloned()).collect())
}

/// Does what the options say to the other arguments; returns what they forbid.
///
/// # Errors
/// One is not known, or its value makes no sense.
pub fn apply(args: &mut MountArgs) -> anyhow::Result<Forbidden> {
    let mut forbidden = Forbidden::default();
    for option in std::mem::take(&mut args.options) {
        let (name, value) = option.split_once('=').map_or((&*option, None), |(name, value)| (name, Some(value)));
        let bad = || format!("the option {option} makes no sense");
        match (name, value) {
            ("memory", Some(value)) => args.memory = value.parse().with_context(bad)?,
            ("codec", Some(value)) => args.codec = value.parse().with_context(bad)?,
            ("recompress", Some(value)) => args.recompress = value.parse().with_context(bad)?,
            ("recompress_after", Some(value)) => {
                args.recompress_after = crate::cli::seconds(value).with_context(bad)?;
            }
            ("remember", Some(value)) => {
                args.remember = Some(crate::cli::seconds(value).with_context(bad)?);
            }
            ("passthrough", Some(value)) => {
                let which = Passthrough::from_str(value, false).map_err(|why| anyhow!(why)).with_context(bad)?;
                args.passthrough = Some(which);
            }
            ("exclusive", None) => args.exclusive = true,
            ("writeback_cache", None) => args.writeback_cache = true,
            ("allow_other", None) => args.allow_other = true,
            ("watch", None) => args.watch = true,
            ("ro", None) => forbidden.writing = true,
            ("noexec", None) => forbidden.programs = true,
            ("nosuid", None) => forbidden.set_user_id = true,
            ("nodev", None) => forbidden.devices = true,
            ("comment", Some(_)) | ("", None) => {}
            _ if name.starts_with("x-") || value.is_none() && IGNORED.contains(&name) => {}
            ("memory" | "codec" | "recompress" | "recompress_after" | "remember" | "passthrough", None) => {
                bail!("the option {name} needs a value, as in memory=10%")
            }
            ("remount", None) => bail!(
                "what a mount forbids is changed by the kernel alone: `mount -i -o remount,ro DIR`; limit and codec by `compcache remount`"
            ),
            _ => return Err(anyhow!("there is no option {option}; compcache-mount(1) has the list")),
        }
    }
    if args.exclusive && args.watch {
        bail!("the options exclusive and watch exclude each other: what nobody else changes need not be watched");
    }
    if args.writeback_cache && !args.exclusive {
        bail!(
            "the option writeback_cache needs exclusive: what others change is not seen by who has his own idea of a file"
        );
    }
    Ok(forbidden)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn args_of(words: &[&str]) -> MountArgs {
        match Cli::try_parse_from(words).unwrap().command {
            Command::Mount(args) => args,
            _ => panic!("another command"),
        }
    }

    #[test]
    fn what_mount_calls_is_a_mount_in_the_background() {
        let words = ["compcache", "/a b", "/c", "-o", "rw,memory=1G,allow_other,dev,suid"].map(OsString::from);
        let words = of_mount_command(&words).unwrap();
        let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
        let mut args = args_of(&words);
        assert_eq!(apply(&mut args).unwrap(), Forbidden::default());
        assert!(args.background && args.allow_other && !args.exclusive);
        assert_eq!((args.source.to_str(), args.memory.bytes(0)), (Some("/a b"), 1 << 30));
        for other in [&["compcache"][..], &["compcache", "list"], &["compcache", "mount", "/a", "/b"]] {
            assert!(of_mount_command(&other.iter().map(OsString::from).collect::<Vec<_>>()).is_none());
        }
    }

    #[test]
    fn options_are_flags_or_limits_or_mounts_own_or_refused() {
        let with = |options: &str| args_of(&["compcache", "mount", "/a", "/b", "-o", options]);
        let mut args =
            with("ro,nodev,,noexec,nofail,x-systemd.automount,codec=zstd:3,remember=1.5,exclusive,comment=x");
        let expected = Forbidden { writing: true, programs: true, set_user_id: false, devices: true };
        assert_eq!(apply(&mut args).unwrap(), expected);
        assert!(args.exclusive && !args.background);
        assert_eq!((args.codec.to_string(), args.remember), ("zstd:3".into(), Some(1.5)));
        for wrong in
            ["memory", "memory=x", "codec=lzo", "remember=-1", "exclusive=1", "nonesuch", "ro=1", "sync", "dirsync"]
        {
            let refused = apply(&mut with(wrong)).unwrap_err();
            assert!(format!("{refused:#}").contains(wrong), "{refused:#}");
        }
        let mut args = with("writeback_cache,exclusive");
        assert!(apply(&mut args).is_ok() && args.writeback_cache);
        let refused = apply(&mut with("writeback_cache")).unwrap_err();
        assert!(refused.to_string().contains("needs exclusive"), "{refused:#}");
        let refused = apply(&mut with("ro,remount")).unwrap_err();
        assert!(refused.to_string().contains("mount -i -o remount"), "{refused:#}");
        let refused = apply(&mut with("exclusive,watch")).unwrap_err();
        assert!(refused.to_string().contains("exclude each other"), "{refused:#}");
    }
}
