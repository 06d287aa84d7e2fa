//! `compcache mount` and `umount`: a file tree whose pages are kept compressed.
//!
//! The process that mounts is the one that serves, in the foreground unless asked otherwise ([`crate::background`]). It works outside of what it serves: its directory is the
//! root, so that it holds no place of the mount itself.

pub mod options;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf, absolute};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use compcache_fs::{CacheStats, FsError, Mount, MountOptions, PASSED_OPENS, Remembered, has_dead_server, is_dead};
use compcache_fuse::{table_of_mounts, uppermost};
use rustix::fs::{XattrFlags, getxattr, getxattr_query, setxattr};
use rustix::io::Errno;
use rustix::process::geteuid;
use sd_notify::NotifyState;
use serde_json::Value;

use crate::background;
use crate::cgroup;
use crate::cli::{MountArgs, Passthrough, RemountArgs, ShowArgs, UmountArgs};
use crate::disk::ended;
use crate::end_signals::EndSignals;
use crate::file_size;
use crate::kernel::{self, ram_bytes};
use crate::run::{STATUS_FAILED, say, why};
use crate::serve::notify;
use crate::size::{Shown, Size};

/// What our mounts are called in the table of mounts.
const KIND: &str = "fuse.compcache";
const OLDEST_THAT_WRITES_BACK: (u32, u32) = (6, 6);
const OLDEST_THAT_PASSES: (u32, u32) = (6, 9);
/// Nobody else changes such a tree; what the kernel has not looked up for a while it may as well.
const EXCLUSIVE_REMEMBERED: Duration = Duration::from_secs(60);
/// From when the kernel aborts a connection to when it has unmounted what is not in use, at the most.
const ABORTED: Duration = Duration::from_millis(200);

/// Mounts, and serves until it is unmounted. `arguments` are all that this program was given.
pub fn mount(args: MountArgs, arguments: &[OsString]) -> ExitCode {
    let served = if args.background { background::start(arguments) } else { serve(args).map(|()| ExitCode::SUCCESS) };
    match served {
        Ok(status) => status,
        Err(error) => {
            say(&format!("compcache: {}\n", why(&error)));
            STATUS_FAILED.into()
        }
    }
}

fn serve(mut args: MountArgs) -> anyhow::Result<()> {
    let forbidden = options::apply(&mut args)?;
    refuse_little(args.memory.bytes(ram_here()))?;
    if args.writeback_cache {
        // Before, what is written past the kernel's pages leaves old ones there, and what is kept in others is written over it later.
        refuse_old("--writeback-cache", OLDEST_THAT_WRITES_BACK, &kernel::release())?;
    }
    if args.passthrough.is_some_and(|which| which != Passthrough::None) {
        if args.writeback_cache {
            bail!(
                "--writeback-cache and --passthrough exclude each other: what is written is kept by the kernel, or passed through"
            );
        }
        refuse_old("--passthrough", OLDEST_THAT_PASSES, &kernel::release())?;
        if !geteuid().is_root() {
            bail!("--passthrough needs root: run this as root, or mount without it");
        }
    }
    let passthrough = args.passthrough.unwrap_or(match args.exclusive {
        true => Passthrough::None,
        false => Passthrough::WriteOnly,
    });
    let mut signals = EndSignals::new()?;
    file_size::lift_limit()?;
    let options = MountOptions {
        allow_other: args.allow_other,
        codec: args.codec.of_store(),
        recompress: args.recompress.of_cache(Some(Duration::from_secs_f64(args.recompress_after))),
        exclusive: args.exclusive,
        writes_back: args.writeback_cache,
        passthrough: passthrough.of_mount(),
        watch: args.watch,
        forbidden,
        whole_bytes: ram_here,
        remembered: match args.remember {
            None if args.exclusive => Remembered::Everything(EXCLUSIVE_REMEMBERED),
            None => Remembered::Directories,
            Some(0.0) => Remembered::Nothing,
            Some(seconds) => Remembered::Everything(Duration::from_secs_f64(seconds)),
        },
        ..MountOptions::new(absolute(&args.source)?, absolute(&args.target)?, args.memory.bytes(ram_here()))
    };
    std::env::set_current_dir("/").context("cannot leave the working directory")?;
    let mount = Mount::new(&options)?;
    let at = mount.at().clone();
    if args.background_inner {
        background::begun()?;
    } else {
        say(&format!(
            "compcache: {} is mounted on {}; its pages may take {} of memory\n",
            options.source.display(),
            at.path().display(),
            Shown(options.memory_bytes)
        ));
    }
    notify(NotifyState::Ready, args.background_inner);
    let ends = signals.handle();
    let watched = at.clone();
    let watcher = thread::Builder::new().name("signals".into()).spawn(move || {
        // Whoever uses it would lose what he has open. Unmounted, it is served on where others have it in a namespace of theirs.
        while signals.wait_until(|_| Ok(watched.unmount()?)) {}
    });
    let watcher = watcher.context("cannot start the thread that waits for signals")?;
    let served = mount.wait();
    ends.close();
    drop(watcher.join());
    served.context("the connection to the kernel failed")?;
    let is_aborted = at.is_dead() && {
        // The kernel aborts it first, and may be about to unmount it.
        thread::sleep(ABORTED);
        at.is_dead()
    };
    if is_aborted {
        let place = at.path().display();
        bail!(
            "the kernel has aborted the connection (umount -f, or somebody by /sys/fs/fuse/connections): nobody serves {place} any more.\n  \
             End the mount with `compcache umount {place}` when nobody uses it"
        );
    }
    Ok(())
}

/// A percentage is of the RAM, or of the memory cgroup's limit if that is lower.
fn ram_here() -> u64 {
    cgroup::memory_limit().map_or(u64::MAX, |limit| limit.bytes).min(ram_bytes())
}

fn refuse_old(flag: &str, oldest: (u32, u32), release: &str) -> anyhow::Result<()> {
    if kernel::version(release).is_some_and(|version| version < oldest) {
        bail!("{flag} needs Linux {}.{}, and this is {release}; mount without it", oldest.0, oldest.1);
    }
    Ok(())
}

fn refuse_little(memory_bytes: u64) -> anyhow::Result<()> {
    if memory_bytes < compcache_cache::LEAST_BYTES {
        bail!("--memory {} has no room for pages and tables; write 10%, or 1M at least", Shown(memory_bytes));
    }
    Ok(())
}

/// Changes settings.
pub fn remount(args: &RemountArgs) -> ExitCode {
    ended(changed(args).map(|()| String::new()))
}

fn changed(args: &RemountArgs) -> anyhow::Result<()> {
    let set = |name: &str, value: String| {
        let set = match setxattr(&args.target, name, value.as_bytes(), XattrFlags::empty()) {
            // Where nothing may be written, or not by who asks, a setting is read with its new value; the server knows whether he may.
            Err(Errno::ROFS | Errno::ACCESS | Errno::PERM) => {
                getxattr_query(&args.target, format!("{name}={value}")).map(drop)
            }
            set => set,
        };
        set.map_err(|error| match error {
            Errno::RANGE => {
                anyhow!("{value} of what there is has no room for pages and tables; write 10%, or 1M at least")
            }
            error => refused(&args.target, error),
        })
    };
    if let Some(memory) = args.memory {
        ours(&args.target)?;
        // A share is of what there is where it is served, which may be in another memory cgroup.
        let limit = match memory {
            Size::Bytes(0) => "0".into(),
            Size::Bytes(bytes) => refuse_little(bytes).map(|()| bytes.to_string())?,
            Size::PercentOfRam(percent) => format!("{percent}%"),
        };
        set("user.compcache.memory", limit)?;
    }
    if let Some(codec) = args.codec {
        ours(&args.target)?;
        set("user.compcache.codec", codec.to_string().replace(':', " "))?;
    }
    if let Some(seconds) = args.recompress_after {
        ours(&args.target)?;
        set("user.compcache.recompress_after", Duration::from_secs_f64(seconds).as_millis().to_string())?;
    }
    if let Some(how) = args.recompress {
        ours(&args.target)?;
        set("user.compcache.recompress", how.to_string().replace(':', " "))?;
    }
    Ok(())
}

/// All that is known of a mount.
pub fn show(args: &ShowArgs) -> ExitCode {
    ended(shown(args))
}

fn shown(args: &ShowArgs) -> anyhow::Result<String> {
    let target = Path::new(&args.name);
    ours(target)?;
    let mut text = vec![0; 16 << 10];
    let length = getxattr(target, "user.compcache.stats", &mut *text).map_err(|error| refused(target, error))?;
    let text = String::from_utf8_lossy(&text[..length]);
    let told: BTreeMap<&str, &str> = text.lines().filter_map(|line| line.split_once(' ')).collect();
    let number = |name: &str| told.get(name).and_then(|value| value.parse().ok()).unwrap_or(0_u64);
    if args.ramzswap {
        bail!("--ramzswap is for disks; a mount's statistics have the names of cleancache and zcache already");
    }
    if args.json {
        let value = |text: &str| text.parse::<u64>().map_or_else(|_| Value::from(text), Value::from);
        let values: BTreeMap<&str, Value> = told.iter().map(|(name, text)| (*name, value(text))).collect();
        return Ok(serde_json::to_string_pretty(&values).context("cannot print")? + "\n");
    }
    let line = |(name, meaning): (&str, &str)| {
        let value = number(name);
        let value = match name {
            "orig_data_size" | "compr_data_size" | "mem_used_total" | "memlimit" | "mem_lent" => {
                Shown(value).to_string()
            }
            _ => value.to_string(),
        };
        format!("  {name:<16} {value:<12} {meaning}\n")
    };
    let cached = CacheStats::TABLE.iter().map(|(name, _, meaning)| (*name, *meaning));
    let setting = |name| told.get(name).copied().unwrap_or("unknown");
    let mut text = format!("  {:<16} {}\n", "codec", setting("codec"));
    text += &match setting("recompress") {
        how @ ("none" | "unknown") => format!("  {:<16} {how}\n", "recompress"),
        how => {
            let after_s = number("recompress_after_ms") as f64 / 1000.0;
            format!("  {:<16} {how}, what was not found for {after_s} s\n", "recompress")
        }
    };
    text.extend(cached.chain([PASSED_OPENS]).map(line));
    Ok(text)
}

/// What a directory is called without links. A mount whose server is dead can be named, but not looked at, as it would be for a slash at the end.
fn place(target: &Path) -> io::Result<PathBuf> {
    let named: PathBuf = target.components().collect();
    fs::canonicalize(&named).or_else(|_| absolute(&named))
}

/// That a directory is one of our mounts.
fn ours(target: &Path) -> anyhow::Result<()> {
    let whole = place(target)?;
    let mounts = table_of_mounts().context("cannot read the table of mounts")?;
    match uppermost(&mounts, &whole) {
        Some(mounted) if mounted.kind == KIND.as_bytes() => Ok(()),
        _ => bail!("{} is not where compcache has mounted something", whole.display()),
    }
}

fn refused(target: &Path, error: Errno) -> anyhow::Error {
    let place = target.display();
    match error {
        error if is_dead(&error.into()) => {
            anyhow!("the server of {place} was killed; end the mount with `compcache umount {place}`")
        }
        // That is the kernel: it lets nobody else in, not even root.
        Errno::ACCESS => anyhow!("{place} is another user's mount; run this as that user"),
        Errno::PERM => anyhow!("{place} is another user's mount; run this as that user, or as root"),
        error => anyhow::Error::new(error).context(format!("the server of {place} refused")),
    }
}

/// Unmounts.
pub fn umount(args: &UmountArgs) -> ExitCode {
    ended(unmounted(args).map(|()| String::new()))
}

fn unmounted(args: &UmountArgs) -> anyhow::Result<()> {
    let target = place(&args.target)?;
    let mounts = table_of_mounts().context("cannot read the table of mounts")?;
    match uppermost(&mounts, &target) {
        Some(mounted) if mounted.kind == KIND.as_bytes() => {
            if args.dead && !has_dead_server(&target) {
                // To whom it does not let in, the kernel says nothing of a server.
                let user = format!("user_id={}", geteuid().as_raw());
                let has = |option: &str| {
                    mounted.super_options.split(|byte| *byte == b',').any(|one| one == option.as_bytes())
                };
                if !has(&user) && !has("allow_other") {
                    bail!("{} is another user's mount; run this as that user", target.display());
                }
                return Ok(());
            }
            compcache_fs::unmount(&target).map_err(FsError::into)
        }
        _ if args.dead => Ok(()),
        None => bail!("nothing is mounted on {}", target.display()),
        Some(mounted) => {
            let kind = String::from_utf8_lossy(mounted.kind);
            bail!("what is mounted on {} is {kind}, not ours; use umount", target.display())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_is_too_old_for_a_flag_is_named() {
        let refused = refuse_old("--it", (6, 6), "6.5.13-generic").unwrap_err().to_string();
        assert!(refused.contains("--it needs Linux 6.6, and this is 6.5.13"), "{refused}");
        for release in ["6.6.0", "6.12.1", "7.0"] {
            assert!(refuse_old("--it", (6, 6), release).is_ok(), "{release}");
        }
    }
}
