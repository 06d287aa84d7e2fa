//! `compcache disk`, `list` and `show`: what is asked of the server, and how its answers look.

mod mounts;
mod tables;
mod unfinished;

use std::io::{self, ErrorKind, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, anyhow, bail};

pub use unfinished::{Caught, finish_or_undo};

use crate::cli::{
    BackingArgs, ChangeArgs, CreateArgs, DiskCommand, ListArgs, NameArgs, ReclaimArgs, RecompressArgs, ResizeArgs,
    ServerArgs, ShowArgs, Transport,
};
use crate::control::{
    At, BackingChange, BackingWanted, Change, Create, DiskState, OriginWanted, Reply, Request, ask, ask_own,
    default_socket,
};
use crate::kernel::ram_bytes;
use crate::mount;
use crate::run::{STATUS_FAILED, say, why};
use crate::size::{Shown, Size};

/// Of the cache of a disk with an origin, unless told otherwise.
const CACHE_SIZE: Size = Size::PercentOfRam(10.0);
/// Less memory holds no blocks to speak of beside their tables.
pub const LEAST_BYTES: u64 = 1 << 20;

/// Of what was said of blocks that nobody compresses again.
pub const NOT_RECOMPRESSED: &str =
    "blocks of a disk for swap are not recompressed; leave --recompress and --recompress-after out";

/// Does what was asked of a disk.
pub fn disk(command: DiskCommand) -> ExitCode {
    match command {
        DiskCommand::Create(args) if args.mkfs.is_none() && args.mount.is_none() => {
            ended(create(*args, &Caught::default()))
        }
        DiskCommand::Create(args) => finish_or_undo(|caught| create(*args, caught)),
        DiskCommand::List(args) => list(&args),
        DiskCommand::Show(args) => show(&args),
        DiskCommand::Resize(args) => ended(resize(&args)),
        DiskCommand::Change(args) => ended(change(&args)),
        DiskCommand::Reset(args) => ended(plain(&args, |name| Request::Reset { name })),
        DiskCommand::Rm(args) => ended(plain(&args.disk, |name| Request::Remove { name, force: args.force })),
    }
}

/// One line for each disk.
pub fn list(args: &ListArgs) -> ExitCode {
    ended(server(&args.server).and_then(|socket| {
        let Reply::Disks(disks) = ask(&socket, Request::List)? else { return unexpected() };
        Ok(if args.json { json(&disks) } else { tables::list(&disks, &mounts::of_this_machine()) })
    }))
}

/// All that is known of one disk; or of a mount, which is a path.
pub fn show(args: &ShowArgs) -> ExitCode {
    if args.name.as_encoded_bytes().contains(&b'/') {
        return mount::show(args);
    }
    let shown = args.name.display();
    let name = args.name.to_str().with_context(|| format!("{shown} is not text (UTF-8), as the names of disks are"));
    let disk = name.and_then(|name| one_disk(&args.server, Request::Show { name: name.to_owned() }));
    let disk = disk.map_err(|error| match Path::new(&args.name).is_dir() {
        true => error.context(format!("{shown} was taken for a disk's name; a mount is named with a slash: ./{shown}")),
        false => error,
    });
    ended(disk.and_then(|disk| match args {
        ShowArgs { json: true, .. } => Ok(json(&disk)),
        ShowArgs { ramzswap: true, .. } if disk.origin.is_some() => {
            bail!("{shown} is a cache of its origin, which ramzswap had nothing like; `compcache show {shown}` shows its statistics")
        }
        ShowArgs { ramzswap: true, .. } => Ok(tables::ramzswap(&disk)),
        _ => Ok(tables::show(&disk)),
    }))
}

fn create(args: CreateArgs, caught: &Caught) -> anyhow::Result<String> {
    let ram_bytes = ram_bytes();
    if args.memory.is_some() && args.origin.is_none() {
        bail!("--memory is for the cache of an --origin; the limit of a disk in RAM is --limit");
    }
    let at = match (args.transport, args.nbd_tcp) {
        (Transport::Loop | Transport::Ublk, _) if args.nbd_tcp.is_some() || args.nbd_socket.is_some() => {
            bail!("--transport loop and ublk make a block device, --nbd-tcp and --nbd-socket an NBD export; choose one")
        }
        (_, Some(address)) => At::NbdTcp(address.0),
        (_, None) if args.nbd_socket.is_some() => At::NbdUnix(args.nbd_socket.map(absolute).transpose()?),
        (Transport::Nbd, None) => At::NbdUnix(None),
        (Transport::Ublk, None) => At::Ublk,
        (Transport::Loop, None) => At::Loop,
        (Transport::Auto, None) => At::Auto,
    };
    if matches!(at, At::NbdUnix(_) | At::NbdTcp(_)) && (args.mkfs.is_some() || args.mount.is_some()) {
        bail!(
            "--mkfs and --mount are for a block device, and an NBD export was asked for; leave out --transport nbd, --nbd-socket and \
             --nbd-tcp, or connect a client to the export and make the file system on its device"
        );
    }
    let wanted = Create {
        name: args.name,
        // With an origin it is the origin's.
        size_bytes: args.size.map_or(0, |size| whole_blocks(size.bytes(ram_bytes))),
        codec: args.codec.to_string(),
        limit_bytes: args.limit.map(|limit| limit_bytes(limit, ram_bytes)).transpose()?,
        at,
        for_swap: false,
        unprotected: false,
        recompress: args.recompress.map(|how| how.to_string()),
        recompress_after_ms: args.recompress_after.map(milliseconds),
    };
    let backing = args.backing.map(|path| backing_wanted(path, &args.backing_options, ram_bytes)).transpose()?;
    let daily_bytes = backing.as_ref().and_then(|backing| backing.daily_bytes);
    let request = match (backing, args.origin) {
        (None, None) => Request::Create(wanted),
        (_, Some(path)) => Request::CreateOver {
            disk: wanted,
            origin: OriginWanted {
                path: absolute(path)?,
                memory_bytes: args.memory.unwrap_or(CACHE_SIZE).bytes(ram_bytes),
            },
        },
        (Some(backing), None) => Request::CreateOn { disk: wanted, backing },
    };
    let socket = server(&args.server)?;
    // What it answers is handed to other programs.
    let is_handed_on = args.mkfs.is_some() || args.mount.is_some();
    let disk = disk_of(if is_handed_on { ask_own(&socket, request) } else { ask(&socket, request) })?;
    // An older server answers all the same, and would write as much as there is.
    let agreed = if daily_bytes == budget_of(&disk) { Ok(()) } else { unexpected() };
    let complete = agreed.and_then(|()| file_system(&disk.at, args.mkfs.as_deref(), args.mount.as_deref(), caught));
    if let Err(error) = complete {
        // What was asked for is a disk with all of this: there shall not be one without. Who is interrupted may have mounted it all the same.
        if args.mount.is_some() && mounts::of_this_machine().contains_key(&disk.at) {
            let _ = tool("umount", &[&disk.at]);
        }
        let removed = ask(&socket, Request::Remove { name: disk.name, force: true });
        return match removed {
            Ok(_) => Err(error),
            Err(left) => Err(anyhow!("{error:#}; the disk stays, for {left:#}")),
        };
    }
    Ok(disk.at + "\n")
}

/// What is asked for with `--backing`.
///
/// # Errors
/// The current directory is gone.
pub fn backing_wanted(path: PathBuf, args: &BackingArgs, ram_bytes: u64) -> anyhow::Result<BackingWanted> {
    Ok(BackingWanted {
        path: absolute(path)?,
        max_bytes: args.backing_max.map(|max| max.bytes(ram_bytes)),
        batch_bytes: args.backing_batch.map(|batch| batch.bytes(ram_bytes)),
        overwrite: args.backing_overwrite,
        daily_bytes: args.backing_daily.map(|daily| daily.bytes(ram_bytes)),
    })
}

/// Makes a file system on a device, if one of some kind is wanted, and mounts what is there, if a place is.
fn file_system(device: &str, kind: Option<&str>, mount_at: Option<&Path>, caught: &Caught) -> anyhow::Result<()> {
    if kind.is_none() && mount_at.is_none() {
        return Ok(());
    }
    if !device.starts_with("/dev/") {
        bail!(
            "there is no block device for a file system, for that needs root, and ublk, or FUSE and loop devices, here"
        );
    }
    if let Some(kind) = kind {
        caught.none()?;
        make_file_system(device, kind)?;
    }
    match mount_at {
        Some(directory) => {
            let options = kind.map_or(&[][..], mount_options);
            caught.none().and_then(|()| run(Command::new("mount").args(options).arg(device).arg(directory)))
        }
        None => Ok(()),
    }
}

fn make_file_system(device: &str, kind: &str) -> anyhow::Result<()> {
    // What is discarded on a new disk is nothing.
    let quiet: &[&str] = match kind {
        "ext2" | "ext3" | "ext4" => &["-q", "-E", "nodiscard"],
        _ => &[],
    };
    run(Command::new(format!("mkfs.{kind}")).args(quiet).arg(device))
}

/// A disk in RAM has nothing to flush, but a loop device says that it might: a file system would wait for two flushes with each write that it
/// makes sure of, and each takes as long as a write.
fn mount_options(kind: &str) -> &'static [&'static str] {
    match kind {
        "ext3" | "ext4" => &["-o", "barrier=0"],
        _ => &[],
    }
}

/// Runs a program of the system's, which must succeed.
pub fn tool(name: &str, arguments: &[&str]) -> anyhow::Result<()> {
    run(Command::new(name).args(arguments))
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {name}"))?;
    if let Some(signal) = output.status.signal() {
        bail!("{name} was ended by signal {signal}");
    }
    if !output.status.success() {
        bail!("{name} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

fn resize(args: &ResizeArgs) -> anyhow::Result<String> {
    let size_bytes = Some(whole_blocks(args.size.bytes(ram_bytes())));
    let change = Change { name: args.name.clone(), size_bytes, ..Change::default() };
    let disk = one_disk(&args.server, Request::Change(change))?;
    if let (Some(backing), Some(size_bytes)) = (disk.backing, size_bytes)
        && backing.capacity_bytes < size_bytes
    {
        say(&format!(
            "compcache: the backing of disk {} stays as it was made, with room for {}: what fits neither there nor in memory is refused\n",
            disk.name,
            Shown(backing.capacity_bytes)
        ));
    }
    Ok(String::new())
}

fn change(args: &ChangeArgs) -> anyhow::Result<String> {
    let daily_bytes = args.backing_daily.map(|daily| daily.0.map_or(u64::MAX, |size| size.bytes(ram_bytes())));
    let backing = BackingChange { above_percent: args.reclaim_above, daily_bytes };
    let change = Change {
        name: args.name.clone(),
        limit_bytes: args.limit.map(|limit| limit_bytes(limit, ram_bytes())).transpose()?,
        codec: args.codec.map(|codec| codec.to_string()),
        backing: (backing != BackingChange::default()).then_some(backing),
        recompress: args.recompress.map(|how| how.to_string()),
        recompress_after_ms: args.recompress_after.map(milliseconds),
        ..Change::default()
    };
    let disk = one_disk(&args.server, Request::Change(change))?;
    let above_percent = disk.backing.as_ref().and_then(|backing| backing.above_percent);
    // An older server answers all the same, having changed nothing.
    if args.reclaim_above.is_some() && args.reclaim_above != above_percent {
        return unexpected();
    }
    if daily_bytes.is_some_and(|wanted| budget_of(&disk).unwrap_or(u64::MAX) != wanted) {
        return unexpected();
    }
    Ok(String::new())
}

/// What may be written to its backing in a day, as far as the server says.
fn budget_of(disk: &DiskState) -> Option<u64> {
    disk.backing.as_ref()?.daily.as_ref()?.budget_bytes
}

/// Has blocks leave for the backing of a disk.
pub fn reclaim(args: &ReclaimArgs) -> ExitCode {
    let request = Request::Reclaim {
        name: args.name.clone(),
        bytes: args.size.map(|size| size.bytes(ram_bytes())),
        incompressible: args.incompressible,
    };
    ended(server(&args.server).and_then(|socket| match ask(&socket, request)? {
        Reply::Reclaimed { blocks, bytes } => {
            Ok(format!("{blocks} blocks have left, and {} of memory\n", Shown(bytes)))
        }
        _ => unexpected(),
    }))
}

/// Has cold blocks compressed again.
pub fn recompress(args: &RecompressArgs) -> ExitCode {
    let idle_ms = args.idle.map(milliseconds);
    let request = Request::Recompress { name: args.disk.name.clone(), idle_ms };
    ended(server(&args.disk.server).and_then(|socket| match ask(&socket, request)? {
        Reply::Recompressed { pages: 0, .. } => Ok("nothing to gain: 0 pages recompressed\n".into()),
        Reply::Recompressed { pages, before_bytes, after_bytes } => {
            Ok(format!("{pages} pages recompressed: {} became {}\n", Shown(before_bytes), Shown(after_bytes)))
        }
        _ => unexpected(),
    }))
}

/// At most a day: see `seconds` in the flags.
fn milliseconds(seconds: f64) -> u64 {
    (seconds * 1000.0) as u64
}

fn plain(args: &NameArgs, request: impl FnOnce(String) -> Request) -> anyhow::Result<String> {
    match ask(&server(&args.server)?, request(args.name.clone()))? {
        Reply::Done => Ok(String::new()),
        _ => unexpected(),
    }
}

fn one_disk(args: &ServerArgs, request: Request) -> anyhow::Result<DiskState> {
    disk_of(ask(&server(args)?, request))
}

/// The disk that a server has answered with.
pub fn disk_of(answer: anyhow::Result<Reply>) -> anyhow::Result<DiskState> {
    match answer? {
        Reply::Disk(disk) => Ok(*disk),
        _ => unexpected(),
    }
}

pub fn server(args: &ServerArgs) -> anyhow::Result<PathBuf> {
    args.socket.clone().map_or_else(default_socket, Ok)
}

pub fn unexpected<T>() -> anyhow::Result<T> {
    bail!("the server answered something else than it was asked; is it of another version?")
}

/// A size typed in per cent or fractions is rounded up to whole blocks.
pub fn whole_blocks(bytes: u64) -> u64 {
    bytes.next_multiple_of(4096)
}

/// Zero is no limit, as it is for zram.
///
/// # Errors
/// There would be no room for anything: a unit was forgotten, most likely.
pub fn limit_bytes(limit: Size, ram_bytes: u64) -> anyhow::Result<u64> {
    match limit.bytes(ram_bytes) {
        0 => Ok(u64::MAX),
        bytes if bytes < LEAST_BYTES => {
            bail!("--limit {} is too little to be of use; write 1M or more, or 0 for none", Shown(bytes))
        }
        bytes => Ok(bytes),
    }
}

/// The server's working directory is not ours; and what it is told must be text.
fn absolute(path: PathBuf) -> anyhow::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    if path.to_str().is_none() {
        bail!("{} is not text (UTF-8); name another path", path.display());
    }
    Ok(path)
}

fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string_pretty(value).expect("states are always JSON") + "\n"
}

/// Prints what was asked for. A reader that has seen enough (`| head`) is no failure.
pub fn ended(printed: anyhow::Result<String>) -> ExitCode {
    match printed {
        Ok(text) => match io::stdout().write_all(text.as_bytes()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                say(&format!("compcache: cannot print: {error}\n"));
                STATUS_FAILED.into()
            }
            _ => ExitCode::SUCCESS,
        },
        Err(error) => {
            say(&format!("compcache: {}\n", why(&error)));
            STATUS_FAILED.into()
        }
    }
}
