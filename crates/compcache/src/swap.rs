//! `compcache swap`: a disk of the server's as the machine's swap.
//!
//! On: the server makes itself safe to swap to and makes the disk; here it is formatted and taken into use, with discards,
//! so that the memory of pages that the machine has done with comes back. Off: the other way round, and only if there is
//! room for what is swapped out.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use compcache_block::fuse_loop::is_served_file;

use crate::cli::{SwapCommand, SwapOffArgs, SwapOnArgs, SwapTransport};
use crate::control::{At, Create, DiskState, Reply, Request, ask, ask_own};
use crate::disk::{
    Caught, backing_wanted, disk_of, ended, finish_or_undo, limit_bytes, server, tool, unexpected, whole_blocks,
};
use crate::kernel::{marks_lost_pages, ram_bytes, setting};
use crate::run::say;
use crate::size::Shown;

/// The kernel reads a page of its own for each it swaps in, if this is 0: nothing is gained by reading neighbours of a disk
/// that seeks in no time.
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";

/// Does what was asked.
pub fn swap(command: SwapCommand) -> ExitCode {
    match command {
        SwapCommand::On(args) => finish_or_undo(|caught| on(args, caught)),
        SwapCommand::Off(args) => ended(off(&args)),
    }
}

fn on(args: SwapOnArgs, caught: &Caught) -> anyhow::Result<String> {
    let ram_bytes = ram_bytes();
    let socket = server(&args.server)?;
    let wanted = Create {
        name: args.name,
        size_bytes: whole_blocks(args.size.bytes(ram_bytes)),
        codec: args.codec.to_string(),
        limit_bytes: args.limit.map(|limit| limit_bytes(limit, ram_bytes)).transpose()?,
        at: match args.transport {
            SwapTransport::Auto => At::BlockDevice,
            SwapTransport::Ublk => At::Ublk,
            SwapTransport::Loop => At::Loop,
        },
        for_swap: true,
        recompress: None,
        recompress_after_ms: None,
        unprotected: args.unprotected,
    };
    let request = match args.backing {
        None => Request::Create(wanted),
        Some(path) => {
            let backing = backing_wanted(path, &args.backing_options, ram_bytes)?;
            Request::CreateOn { disk: wanted, backing }
        }
    };
    let disk = disk_of(ask_own(&socket, request)).context("swap stays as it was")?;
    let swaps = read("/proc/swaps").unwrap_or_default();
    let all = disks(&socket).unwrap_or_default();
    let others = Others::beside(&all);
    for device in others.there(&swaps) {
        say(&format!(
            "compcache: swap is on {device}, which is another server's or one's that was killed; the new one is used before it. If that server \
             is no more, {}\n",
            then(device)
        ));
    }
    let priority = others.above(&swaps, args.priority);
    let started = caught
        .none()
        .and_then(|()| tool("mkswap", &["-L", "compcache", &disk.at]))
        .and_then(|()| caught.none())
        .and_then(|()| tool("swapon", &["--discard=pages", "--priority", &priority.to_string(), &disk.at]));
    if let Err(error) = started {
        // Who is interrupted may have done it all the same.
        if read("/proc/swaps").is_ok_and(|swaps| used_bytes(&swaps, &disk.at).is_some()) {
            let _ = tool("swapoff", &[&disk.at]);
        }
        return match ask(&socket, Request::Remove { name: disk.name.clone(), force: true }) {
            Ok(_) => Err(error.context("swap stays as it was")),
            Err(left) => Err(anyhow!("{error:#}; disk {} stays, for {left:#}", disk.name)),
        };
    }
    if setting(PAGE_CLUSTER).is_some_and(|value| value != "0") {
        say(&format!(
            "compcache: the kernel reads several pages for each it needs ({PAGE_CLUSTER}); on compressed memory that is \
             seldom worth it: sysctl vm.page-cluster=0\n"
        ));
    }
    Ok(format!("{} {}\n", disk.name, disk.at))
}

fn off(args: &SwapOffArgs) -> anyhow::Result<String> {
    let socket = server(&args.server)?;
    let all = disks(&socket)?;
    let swaps = read("/proc/swaps")?;
    let mut chosen: Vec<_> = match args.names.is_empty() {
        // Also one that swap is off of already: who took it off was interrupted, or did it himself.
        true => all.iter().filter(|disk| disk.for_swap).collect(),
        false => args.names.iter().map(|name| by_name(&all, name)).collect::<anyhow::Result<_>>()?,
    };
    if chosen.is_empty() {
        let others = Others::beside(&all);
        let there = others.there(&swaps).map(|device| {
            format!(
                "; swap is on {device}, which is another server's or one's that was killed; if that is no more, {}",
                then(device)
            )
        });
        bail!(
            "this server has no disk for swap; `compcache list` shows which disks there are{}",
            there.collect::<String>()
        );
    }
    // Each by itself: what there is no room for does not keep the others on. The least first, which has room soonest.
    chosen.sort_by_key(|disk| used_bytes(&swaps, &disk.at));
    let failed = chosen.into_iter().filter_map(|disk| off_one(&socket, disk, &all, args.force).err());
    match failed.reduce(|first, next| anyhow!("{first:#}; {next:#}")) {
        None => Ok(String::new()),
        Some(error) => Err(error),
    }
}

fn off_one(socket: &Path, disk: &DiskState, all: &[DiskState], force: bool) -> anyhow::Result<()> {
    if let Some(used_bytes) = used_bytes(&read("/proc/swaps")?, &disk.at) {
        if !force {
            must_fit(&disk.name, used_bytes, all)?;
        }
        tool("swapoff", &[&disk.at])
            .with_context(|| format!("swap stays on disk {}; what was brought back is in memory", disk.name))?;
    }
    let removed = ask(socket, Request::Remove { name: disk.name.clone(), force: false });
    match removed.context("swap is off, and the disk stays; `compcache swap off` again removes it")? {
        Reply::Done => Ok(()),
        _ => unexpected(),
    }
}

/// Refuses where the memory that is free would not hold what is swapped out. What is compressed of it is still held while
/// the last page is brought back.
fn must_fit(name: &str, used_bytes: u64, ours: &[DiskState]) -> anyhow::Result<()> {
    let available_bytes =
        available_bytes(&read("/proc/meminfo")?).context("/proc/meminfo does not say what is available")?;
    let elsewhere_bytes = Others::beside(ours).free_elsewhere_bytes(&read("/proc/swaps")?);
    if used_bytes <= available_bytes + elsewhere_bytes {
        return Ok(());
    }
    bail!(
        "swap stays on disk {name}: {} are swapped out to it, and there is room for {} ({} of memory, {} of other swap); end some \
         programs first, or try it all the same with --force: then the kernel may kill `swapoff`, or programs",
        Shown(used_bytes),
        Shown(available_bytes + elsewhere_bytes),
        Shown(available_bytes),
        Shown(elsewhere_bytes),
    )
}

fn disks(socket: &Path) -> anyhow::Result<Vec<DiskState>> {
    match ask_own(socket, Request::List)? {
        Reply::Disks(disks) => Ok(disks),
        _ => unexpected(),
    }
}

fn by_name<'d>(disks: &'d [DiskState], name: &str) -> anyhow::Result<&'d DiskState> {
    let disk = disks.iter().find(|disk| disk.name == name);
    let disk = disk.ok_or_else(|| anyhow!("there is no disk called {name}; `compcache list` shows which there are"))?;
    if !disk.for_swap || !disk.at.starts_with("/dev/") {
        bail!("disk {name} was not made by `compcache swap on`");
    }
    Ok(disk)
}

/// Text; of a name that is none, what can be read of it.
fn read(path: &str) -> anyhow::Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {path}"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// What to do with swap on a device whose server is no more.
fn then(device: &str) -> String {
    match marks_lost_pages() {
        true => format!("take it off: swapoff {device}"),
        false => "leave it on: before Linux 5.19 swapoff gives programs other bytes for those that are lost".to_owned(),
    }
}

/// Device, size and use of each line of `/proc/swaps`, in bytes, and its priority.
fn all_swaps(table: &str) -> impl Iterator<Item = (&str, u64, u64, i32)> {
    table.lines().skip(1).filter_map(|line| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let kib = |at: usize| words.get(at)?.parse::<u64>().ok();
        Some((words[0], kib(2)? << 10, kib(3)? << 10, words.get(4)?.parse().ok()?))
    })
}

/// Whether anything can be swapped out to another device than those.
pub fn has_room_beside(table: &str, those: impl Fn(&str) -> bool) -> bool {
    all_swaps(table).any(|(path, size, used, _)| used < size && !those(path))
}

/// What is swapped out to a device; `None` if it is no swap.
pub fn used_bytes(table: &str, device: &str) -> Option<u64> {
    all_swaps(table).find(|(path, ..)| *path == device).map(|(_, _, used, _)| used)
}

/// Tells swap on disks of this kind that are not this server's: mostly of one that was killed. The kernel keeps it, and writes to it still.
struct Others<'a> {
    /// This server's.
    ours: &'a [DiskState],
    is_disk: &'a dyn Fn(&str) -> bool,
}

impl<'a> Others<'a> {
    fn beside(ours: &'a [DiskState]) -> Others<'a> {
        Others { ours, is_disk: &is_disk_of_ours }
    }

    fn has(&self, path: &str) -> bool {
        is_gone(path) || (self.ours.iter().all(|disk| disk.at != path) && (self.is_disk)(path))
    }

    /// The devices of those that can be taken off.
    fn there<'t>(&self, table: &'t str) -> impl Iterator<Item = &'t str> {
        all_swaps(table).map(|(path, ..)| path).filter(|path| self.has(path) && !is_gone(path))
    }

    /// The priority that is wanted, or a higher one, so that none of them is taken before or as often.
    fn above(&self, table: &str, wanted: u16) -> u16 {
        const MOST: i32 = 32767;
        let others = all_swaps(table).filter(|(path, ..)| self.has(path)).map(|(.., priority)| priority).max();
        others.map_or(wanted, |other| wanted.max((other + 1).clamp(0, MOST) as u16))
    }

    /// What other swap could take that is not in memory itself.
    fn free_elsewhere_bytes(&self, table: &str) -> u64 {
        let in_memory = |path: &str| path.starts_with("/dev/zram") || self.ours.iter().any(|disk| disk.at == path);
        let elsewhere = all_swaps(table).filter(|(path, ..)| !in_memory(path) && !self.has(path));
        elsewhere.map(|(_, size, used, _)| size.saturating_sub(used)).sum()
    }
}

/// What the kernel adds to the name of a device that has none any more.
pub const GONE: &str = "\\040(deleted)";

fn is_gone(path: &str) -> bool {
    path.ends_with(GONE)
}

/// Whether a device is one that servers of compcache make, as far as can be told from outside: any of ublk's, and loop devices over a file of theirs.
fn is_disk_of_ours(path: &str) -> bool {
    let Some(device) = path.strip_prefix("/dev/") else { return false };
    let over = || setting(format!("/sys/block/{device}/loop/backing_file"));
    device.starts_with("ublkb")
        || (device.starts_with("loop") && over().is_some_and(|file| is_served_file(Path::new(&file))))
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_swapped_out_is_read_off_the_kernels_tables() {
        let table = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
                     /dev/loop7                              partition\t1048572\t\t5120\t\t100\n\
                     /swapfile                               file\t\t2000\t\t500\t\t-2\n";
        assert_eq!(used_bytes(table, "/dev/loop7"), Some(5120 << 10));
        assert_eq!(used_bytes(table, "/dev/loop70"), None);
        let strange = Others { ours: &[], is_disk: &|_| false };
        assert_eq!((strange.above(table, 100), strange.there(table).count()), (100, 0));
        assert_eq!(strange.free_elsewhere_bytes(table), (1_048_572 - 5120 + 1500) << 10);
        let zram = table.replace("/dev/loop7", "/dev/zram0");
        assert_eq!(strange.free_elsewhere_bytes(&zram), 1500 << 10);
        let gone = table.replace("/dev/loop7 ", "/dev/ublkb0\\040(deleted) ");
        assert_eq!(strange.there(&gone).count(), 0, "nobody can take it off");
        let killed = Others { ours: &[], is_disk: &|path| path == "/dev/loop7" };
        assert_eq!(killed.there(table).collect::<Vec<_>>(), ["/dev/loop7"]);
        for (others, table) in [(&strange, &*gone), (&killed, table)] {
            assert_eq!(others.free_elsewhere_bytes(table), 1500 << 10);
            assert_eq!([5, 100, 101, 200].map(|wanted| others.above(table, wanted)), [101, 101, 101, 200]);
        }
        let loop7 = |path: &str| path == "/dev/loop7";
        assert!(has_room_beside(table, loop7) && !has_room_beside(&table.replace("\t500", "\t2000"), loop7));
        assert_eq!(available_bytes("MemTotal: 9 kB\nMemAvailable:    1234 kB\n"), Some(1234 << 10));
        assert_eq!(available_bytes("MemTotal: 9 kB\n"), None);
    }
}
