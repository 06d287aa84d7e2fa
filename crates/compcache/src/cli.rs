//! What may be typed: the flags, and nothing of what they do.

mod values;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};

pub use values::{Codec, HowRecompress, Recompress, RecompressLevel, TcpAddress};

use crate::size::Size;
use values::recompress_level;

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
    Serve(ServeArgs),
    /// Make, show, change and end compressed RAM disks
    ///
    /// Asks the server (`compcache serve`), whose disks they are.
    Disk {
        /// What to do.
        #[command(subcommand)]
        command: DiskCommand,
    },
    /// Give the machine compressed swap, and take it away
    ///
    /// Asks the server (`compcache serve`), which keeps what is swapped out in its memory.
    Swap {
        /// What to do.
        #[command(subcommand)]
        command: SwapCommand,
    },
    Mount(MountArgs),
    Umount(UmountArgs),
    Remount(RemountArgs),
    #[command(visible_alias = "writeback")]
    Reclaim(ReclaimArgs),
    /// The same as `compcache disk list`
    List(ListArgs),
    /// Show all statistics of a disk, or of a mount
    Show(ShowArgs),
    Recompress(RecompressArgs),
    Doctor(DoctorArgs),
    /// Print completions for a shell
    Completions {
        /// The shell they are for
        shell: clap_complete::Shell,
    },
    /// Wait for the end of the server that is at the other end of the standard input, and take swap off its devices
    #[command(hide = true)]
    SwapGuard,
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
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub ram: Option<Size>,

    /// Limit on the resident part alone, as a memory cgroup beside compressed swap would set it
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub resident: Option<Size>,

    /// Write what does not fit into --ram, compressed and sealed, to files without names in this directory, or beside this file
    ///
    /// They need no cleaning up: they are gone when the processes end, however these end. A file that is named must not be
    /// there, or be empty.
    #[arg(long, value_name = "FILE|DIR")]
    pub spill: Option<PathBuf>,

    /// The most that these files may take together [default: sixteen times --ram for each process]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, requires = "spill")]
    pub spill_max: Option<Size>,

    /// lz4 is faster; zstd or zstd:LEVEL makes the pages smaller (levels 1 to 19 and -1 to -7; 1 if none is given)
    #[arg(long, value_name = "CODEC", default_value = "lz4")]
    pub codec: Codec,

    /// What becomes of pages that are compressed and were not used for a while: zstd or zstd:LEVEL compresses sixteen of them together, to
    /// half or two thirds of what they take under lz4; reading one takes longer then. none leaves them as they are
    #[arg(long, value_name = "HOW", default_value = "zstd:3", value_parser = recompress_level)]
    pub recompress: RecompressLevel,

    /// How long that while is, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = seconds)]
    pub recompress_after: f64,

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
    #[arg(required = true, trailing_var_arg = true, value_names = ["PROGRAM", "ARGUMENTS"])]
    pub program: Vec<OsString>,
}

const SIZE_NOTE: &str = "SIZE is a number of bytes, or one with K, M, G or T (powers of 1024), or a share of the \
                         machine's RAM (10%).";

const MOUNT_SIZE_NOTE: &str = "SIZE is a number of bytes, or one with K, M, G or T (powers of 1024), or a share (10%) of the \
                               machine's RAM, or of the memory cgroup's limit where the mount is served if that is lower.";

const NOTES: &str = "SIZE is a number of bytes, or one with K, M, G or T (powers of 1024; 512M, 1.5G, 64MiB), \
                     or a share (10%) of the machine's RAM, or of the memory cgroup's limit if that is lower.\n\n\
                     COMPCACHE_PRELOAD in the environment names the object to preload, if it is not beside the \
                     executable or in ../lib/compcache.";

/// Flags of which one is asked for. The group that clap makes of a struct is another: in that is all that the struct has, a name too.
fn one_of(id: &'static str, flags: &[&'static str]) -> ArgGroup {
    ArgGroup::new(id).args(flags).multiple(true)
}

/// Say which ways in work on this machine, and why not
///
/// The exit status is 0 if `compcache run` works here, else 1.
#[derive(Args)]
pub struct DoctorArgs {
    /// Print the facts as JSON
    #[arg(long)]
    pub json: bool,
}

/// Own compressed RAM disks, until ended by a signal
///
/// Stays in the foreground (without --background), for a terminal or a service manager; the commands of `compcache disk` ask it for what they do.
/// What the disks hold is in its memory, and is gone when it ends. Under systemd it takes the socket it is handed over,
/// and says when it is ready. While a disk is in use no signal but SIGKILL ends it: SIGTERM does as soon as none is, ^C not.
/// Signals that are ignored when it starts (nohup) stay so.
#[derive(Args)]
#[command(after_help = SIZE_NOTE)]
pub struct ServeArgs {
    /// Listen here for commands [default: /run/compcache/control.sock for root, else under $XDG_RUNTIME_DIR; or COMPCACHE_SOCKET in the environment]
    #[arg(long, value_name = "PATH", env = "COMPCACHE_SOCKET")]
    pub socket: Option<PathBuf>,

    /// Limit on the memory that all disks take together; a percentage is of the memory cgroup's limit, if that is lower
    /// [default: 50%, and 80% from when a disk without a backing is swapped to]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub memory: Option<Size>,

    /// Return when it can be asked, and go on in the background. What it would say later (that a backing is full, why it does not end) nobody hears
    #[arg(long)]
    pub background: bool,

    /// Standard input is whoever waits for the server.
    #[arg(long, hide = true)]
    pub background_inner: bool,
}

/// Which server is meant.
#[derive(Args)]
pub struct ServerArgs {
    /// The server's control socket [default: where `compcache serve` listens; or COMPCACHE_SOCKET in the environment]
    #[arg(long, value_name = "PATH", env = "COMPCACHE_SOCKET")]
    pub socket: Option<PathBuf>,
}

/// What can be done with disks.
#[derive(Subcommand)]
pub enum DiskCommand {
    Create(Box<CreateArgs>),
    List(ListArgs),
    Show(ShowArgs),
    Resize(ResizeArgs),
    Change(ChangeArgs),
    /// Forget all that a disk holds; its size stays
    Reset(NameArgs),
    Rm(RmArgs),
}

/// What can be said of a `--backing`.
#[derive(Args)]
pub struct BackingArgs {
    /// The most room it may take there [default: enough for all of the disk, or all of the device]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, requires = "backing")]
    pub backing_max: Option<Size>,

    /// How much is written there at a time, 64K to 16M; the server takes four times as much memory for it, for swap six times [default: 1M,
    /// for swap 256K, less for a small backing]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, requires = "backing")]
    pub backing_batch: Option<Size>,

    /// The most that may be written there in any 24 hours, for flash, which wears out: whole batches, what is moved to make room
    /// too. When it is written, blocks stay in memory until time has passed, and what does not fit is refused. 0: nothing at all
    /// [default: as much as there is]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, requires = "backing")]
    pub backing_daily: Option<Size>,

    /// Also if there is something on the device, which is then lost
    #[arg(long, requires = "backing")]
    pub backing_overwrite: bool,
}

/// Make a disk, and print where it is found
///
/// The size is what its users see; it takes memory as they write, compressed, and gives it back as they discard.
#[derive(Args)]
#[command(after_help = SIZE_NOTE, group = one_of("contents", &["mkfs", "origin"]))]
pub struct CreateArgs {
    #[command(flatten)]
    pub server: ServerArgs,

    /// A name for it [default: disk0, disk1 ...]
    #[arg(long)]
    pub name: Option<String>,

    /// How much its users can write, uncompressed
    #[arg(
        long,
        value_name = "SIZE",
        allow_hyphen_values = true,
        required_unless_present = "origin",
        conflicts_with = "origin"
    )]
    pub size: Option<Size>,

    /// Show this block device or file instead, and keep compressed what is read of it: writes go through to it before they are
    /// answered. It must be nobody else's, and not be mounted
    #[arg(long, value_name = "DEVICE|FILE", conflicts_with_all = ["limit", "backing", "mkfs"])]
    pub origin: Option<PathBuf>,

    /// The most memory that pages of the origin, tables and index take, beside what the server's other disks take [default: 10%]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub memory: Option<Size>,

    /// Limit on the memory it takes; what goes beyond is refused (ENOSPC), or leaves for --backing. 0 is none but the server's
    /// [default: 0]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub limit: Option<Size>,

    /// Where blocks go that do not fit in memory, compressed and encrypted with a key that only the server has: a file, which
    /// must not exist yet and is gone with the disk, or a block device
    #[arg(long, value_name = "FILE|DEVICE")]
    pub backing: Option<PathBuf>,

    #[command(flatten)]
    pub backing_options: BackingArgs,

    /// lz4 is faster; zstd or zstd:LEVEL makes the pages smaller (levels 1 to 19 and -1 to -7; 1 if none is given)
    #[arg(long, value_name = "CODEC", default_value = "lz4")]
    pub codec: Codec,

    /// What becomes of blocks that were not used for a while: zstd or zstd:LEVEL compresses sixteen of them together, to half of what
    /// they take under lz4; reading one takes longer then. none leaves them as they are. auto is zstd:3; with an origin only as long as reading
    /// there takes so long that it pays [default: auto]
    #[arg(long, value_name = "HOW")]
    pub recompress: Option<HowRecompress>,

    /// How long that while is, in seconds [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub recompress_after: Option<f64>,

    /// How its users get to it
    #[arg(long, value_name = "WAY", default_value = "auto")]
    pub transport: Transport,

    /// Make a file system of this kind on it (mkfs.KIND); needs a block device
    #[arg(long, value_name = "KIND")]
    pub mkfs: Option<String>,

    /// Mount it there; needs --mkfs or --origin
    #[arg(long, value_name = "DIR", requires = "contents")]
    pub mount: Option<PathBuf>,

    /// Serve NBD at this Unix socket [default: NAME.nbd beside the control socket]
    #[arg(long, value_name = "PATH", conflicts_with = "nbd_tcp")]
    pub nbd_socket: Option<PathBuf>,

    /// Serve NBD at this port of this machine, or at this address. Whoever reaches it can read and write the disk: there
    /// is no password, and nothing is encrypted
    #[arg(long, value_name = "[ADDRESS:]PORT")]
    pub nbd_tcp: Option<TcpAddress>,
}

/// What can be done with swap.
#[derive(Subcommand)]
pub enum SwapCommand {
    On(SwapOnArgs),
    Off(SwapOffArgs),
}

/// Give the machine compressed swap, and print the disk's name and device
///
/// Makes a disk, formats it as swap and takes it into use. The server locks its memory before; it needs to run as root.
/// The size is what can be swapped out; the memory that takes depends on what it is, a third for most programs.
#[derive(Args)]
#[command(after_help = SIZE_NOTE)]
pub struct SwapOnArgs {
    #[command(flatten)]
    pub server: ServerArgs,

    /// A name for the disk [default: swap0, swap1 ...]
    #[arg(long)]
    pub name: Option<String>,

    /// How much can be swapped out, uncompressed
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, default_value = "50%")]
    pub size: Size,

    /// Limit on the memory it takes; what goes beyond stays in memory, or goes to other swap or --backing. 0 is none but the
    /// server's [default: 0]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub limit: Option<Size>,

    /// Where pages go that do not fit in memory, compressed and encrypted with a key that only the server has: a disk, partition or
    /// volume that is nobody else's. Not a file, nor a loop device
    #[arg(long, value_name = "DEVICE")]
    pub backing: Option<PathBuf>,

    #[command(flatten)]
    pub backing_options: BackingArgs,

    /// lz4 is faster; zstd or zstd:LEVEL makes the pages smaller (levels 1 to 19 and -1 to -7; 1 if none is given)
    #[arg(long, value_name = "CODEC", default_value = "lz4")]
    pub codec: Codec,

    /// How the machine gets to it
    #[arg(long, value_name = "WAY", default_value = "auto")]
    pub transport: SwapTransport,

    /// Used before other swap of a lower priority; a higher one is taken where swap of a server that was killed would come first
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(0..=32767))]
    pub priority: u16,

    /// Also if the server lacks the capabilities to protect itself (CAP_SYS_RESOURCE), as in many containers. Fine while it is
    /// memory cgroups that are short of memory, and not the machine
    #[arg(long)]
    pub unprotected: bool,
}

/// `--transport` of swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum SwapTransport {
    /// ublk where the kernel keeps the device of a server that was killed (Linux 6.13), else a loop device
    Auto,
    /// /dev/ublkbN. Before Linux 6.13, if the server is killed, swap may stay on it until the system ends
    Ublk,
    /// A loop device over FUSE
    Loop,
}

/// Bring back what is swapped out, and end the disk
///
/// Refused while memory and other swap have no room for it. It can take a while; interrupted, swap stays on.
#[derive(Args)]
pub struct SwapOffArgs {
    #[command(flatten)]
    pub server: ServerArgs,

    /// Which disks [default: all that `compcache swap on` made]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,

    /// Also if there is no room: then the kernel kills `swapoff`, which leaves swap on, or programs
    #[arg(long)]
    pub force: bool,
}

/// Show a file tree in another place, or over itself, with its pages kept compressed
///
/// Stays in the foreground (without --background) and serves the mount until it is unmounted or a signal asks it to end, which it does unless the mount is in use; asked by SIGTERM it
/// ends as soon as it is not. Signals that are ignored when it starts (nohup) stay so.
/// What is written goes to the files at the source; however it ends, they are whole there, as on any file system.
#[derive(Args)]
#[command(after_help = MOUNT_SIZE_NOTE)]
pub struct MountArgs {
    /// The tree
    pub source: PathBuf,

    /// The directory it is mounted on; may be the same
    pub target: PathBuf,

    /// The most memory that pages, tables and index take, 1M or more
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, default_value = "10%")]
    pub memory: Size,

    /// lz4 is faster; zstd or zstd:LEVEL makes the pages smaller (levels 1 to 19 and -1 to -7; 1 if none is given)
    #[arg(long, value_name = "CODEC", default_value = "lz4")]
    pub codec: Codec,

    /// What becomes of pages that were not found for a while: zstd or zstd:LEVEL compresses sixteen of them together, so that more fit; reading one takes
    /// longer then. none leaves them as they are. auto is zstd:3, as long as reading from the tree takes so long that it pays
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub recompress: HowRecompress,

    /// How long that while is, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = seconds)]
    pub recompress_after: f64,

    /// Nobody changes the files but through this mount: what is kept of a file then outlives writes to it, and what is written is kept. If
    /// somebody does all the same, old contents can be read
    #[arg(long)]
    pub exclusive: bool,

    /// What is written stays in the kernel's page cache until the file is synced or closed, or for as long as the kernel likes, as on other file systems;
    /// without this each write is done below before it returns. A server that is killed then loses what a killed machine would
    #[arg(long, requires = "exclusive")]
    pub writeback_cache: bool,

    /// Files that the kernel reads and writes below by itself, at the speed it has there, for as long as they are open: none; those that are opened to be written and not read; or
    /// all that are opened to be written. Nothing of them is in the cache meanwhile. For root, from Linux 6.9 on, and where the file system below allows it; `compcache show` counts
    /// them (passed_opens) [default: write-only; with --exclusive none]
    #[arg(long, value_name = "WHICH")]
    pub passthrough: Option<Passthrough>,

    /// Changes behind the mount are noticed while files are open, within moments (inotify), and not only when they are opened. What is written
    /// through the mount is then read anew, too
    #[arg(long, conflicts_with = "exclusive")]
    pub watch: bool,

    /// Other users may use it too, as the permissions of the files allow; for others than root, if /etc/fuse.conf has user_allow_other
    #[arg(long)]
    pub allow_other: bool,

    /// Names and attributes are believed for so long, in seconds, before they are looked up again. More is faster; what changes behind the
    /// mount is noticed that much later [default: 10 ms, for where directories are and for attributes of files that nobody has open; opening, making, moving and removing look again all the same. With
    /// --exclusive: a minute, for everything]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub remember: Option<f64>,

    /// Options as in /etc/fstab: memory=SIZE, codec=CODEC, recompress=HOW, recompress_after=SECONDS, remember=SECONDS, passthrough=WHICH, exclusive, writeback_cache, watch and allow_other are the flags of the same names; ro, noexec,
    /// nosuid and nodev forbid what they do anywhere; those that are for mount(8) alone are ignored
    #[arg(short = 'o', long, value_name = "OPTION,...", value_delimiter = ',')]
    pub options: Vec<String>,

    /// Return when it is mounted, and go on serving it in the background
    #[arg(long)]
    pub background: bool,

    /// Standard input is whoever waits for the mount.
    #[arg(long, hide = true)]
    pub background_inner: bool,
}

/// Which files are passed through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Passthrough {
    /// Reads and writes of all files are served
    None,
    /// Not those of files that were opened with O_WRONLY: what copies, unpacks and logs
    WriteOnly,
    /// Nor those of files that were opened with O_RDWR: databases among them
    Writable,
}

impl Passthrough {
    /// What a mount is asked for.
    pub fn of_mount(self) -> compcache_fs::Passthrough {
        match self {
            Passthrough::None => compcache_fs::Passthrough::None,
            Passthrough::WriteOnly => compcache_fs::Passthrough::WriteOnly,
            Passthrough::Writable => compcache_fs::Passthrough::Writable,
        }
    }
}

/// A number of seconds that something is remembered.
pub fn seconds(text: &str) -> anyhow::Result<f64> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=86400.0).contains(&seconds) => Ok(seconds),
        _ => bail!("write a number of seconds, at most 86400"),
    }
}

/// End a mount of `compcache mount`, whether its server lives or was killed
#[derive(Args)]
pub struct UmountArgs {
    /// Where it is mounted
    pub target: PathBuf,

    /// Only if its server was killed; else nothing is done, and that is no failure
    #[arg(long)]
    pub dead: bool,
}

/// Change limit, codec, and what becomes of cold pages, of a mount while it is in use
#[derive(Args)]
#[command(after_help = MOUNT_SIZE_NOTE, group = one_of("settings", &SETTINGS).required(true))]
pub struct RemountArgs {
    /// Where it is mounted
    pub target: PathBuf,

    /// Its new limit, 1M or more; what does not fit any more is dropped. 0: nothing is kept
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub memory: Option<Size>,

    /// What it compresses from now on with; what it holds stays as it is
    #[arg(long, value_name = "CODEC")]
    pub codec: Option<Codec>,

    /// What becomes of pages that were not found for a while: none, zstd, zstd:LEVEL or auto
    #[arg(long, value_name = "HOW")]
    pub recompress: Option<HowRecompress>,

    /// How long that while is, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub recompress_after: Option<f64>,
}

/// List the disks
#[derive(Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub server: ServerArgs,

    /// Print the states as JSON
    #[arg(long)]
    pub json: bool,
}

/// Show all statistics of a disk, and how long its reads and writes took
#[derive(Args)]
pub struct ShowArgs {
    #[command(flatten)]
    pub server: ServerArgs,

    /// Which disk; or, with a slash in it, where a tree is mounted
    pub name: OsString,

    /// Under the names, and in the units, of ramzswap
    #[arg(long, conflicts_with = "json")]
    pub ramzswap: bool,

    /// Print the state as JSON
    #[arg(long)]
    pub json: bool,
}

/// Give a disk another size while it is in use
///
/// What lies beyond a smaller size is gone. The users of a disk learn of it as the transport permits: NBD clients when they
/// connect again. Over ublk a disk keeps its size before Linux 6.16; this is refused then.
#[derive(Args)]
#[command(after_help = SIZE_NOTE)]
pub struct ResizeArgs {
    #[command(flatten)]
    pub server: ServerArgs,

    /// Which disk
    pub name: String,

    /// Its new size
    pub size: Size,
}

const SETTINGS: [&str; 4] = ["memory", "codec", "recompress", "recompress_after"];
const CHANGES: [&str; 6] = ["limit", "reclaim_above", "backing_daily", "codec", "recompress", "recompress_after"];

/// Change limit, codec, threshold, write budget, and what becomes of cold blocks, of a disk while it is in use
#[derive(Args)]
#[command(after_help = SIZE_NOTE, group = one_of("changes", &CHANGES).required(true))]
pub struct ChangeArgs {
    #[command(flatten)]
    pub server: ServerArgs,

    /// Which disk
    pub name: String,

    /// Its new limit, 0 for none. Below what it takes already, writes are refused until enough was discarded, or has left for its backing;
    /// nothing is lost. With an origin it is that of the cache, which drops what does not fit
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub limit: Option<Size>,

    /// Blocks leave for its backing when it takes more than this share of its limit, or all disks of the server's: 10% to 95%, and until ten
    /// per cent less [at first: 85%]
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub reclaim_above: Option<u8>,

    /// The most that may be written to its backing in any 24 hours, what was written before counted: more ends a wait for the next
    /// day at once. 0: nothing at all; none: as much as there is
    #[arg(long, value_name = "SIZE|none", value_parser = daily)]
    pub backing_daily: Option<Daily>,

    /// What it compresses from now on with; what it holds stays as it is
    #[arg(long, value_name = "CODEC")]
    pub codec: Option<Codec>,

    /// What becomes of blocks that were not used for a while: none, zstd, zstd:LEVEL or auto
    #[arg(long, value_name = "HOW")]
    pub recompress: Option<HowRecompress>,

    /// How long that while is, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub recompress_after: Option<f64>,
}

/// Compress cold blocks of a disk again now, in groups of sixteen, and print what came of it
///
/// By itself a disk does so when blocks were not used for a minute (`compcache disk create --recompress`). Groups that do not pay are not made.
#[derive(Args)]
pub struct RecompressArgs {
    #[command(flatten)]
    pub disk: NameArgs,

    /// Only blocks that were not used for so many seconds [default: all blocks]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub idle: Option<f64>,
}

/// `--backing-daily` of a change, `None` for none. A type of its own, since an option of clap's is something else.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Daily(pub Option<Size>);

fn daily(text: &str) -> anyhow::Result<Daily> {
    match text {
        "none" => Ok(Daily(None)),
        _ => text.parse().map(|size| Daily(Some(size))).context("write a size, or none"),
    }
}

fn percent(text: &str) -> anyhow::Result<u8> {
    let number = text.strip_suffix('%').unwrap_or(text);
    number.parse().with_context(|| format!("`{text}` is no percentage; write 70%"))
}

/// Have blocks of a disk leave memory for its backing now
///
/// What does not compress goes first, then what was not used for longest, as when memory is short. Says how many blocks have left, and how much
/// memory they took. Where memory is to spare, what is read comes back.
#[derive(Args)]
#[command(after_help = SIZE_NOTE)]
pub struct ReclaimArgs {
    #[command(flatten)]
    pub server: ServerArgs,

    /// Which disk; it needs a backing
    pub name: String,

    /// About how much memory it is to give up [default: all]
    pub size: Option<Size>,

    /// Only blocks that do not compress
    #[arg(long)]
    pub incompressible: bool,
}

/// End a disk; what it holds is gone
///
/// Refused while it is in use: mounted, used as swap, opened, or with NBD clients connected.
#[derive(Args)]
pub struct RmArgs {
    #[command(flatten)]
    pub disk: NameArgs,

    /// Also if NBD clients are connected
    #[arg(long)]
    pub force: bool,
}

/// A disk by its name.
#[derive(Args)]
pub struct NameArgs {
    #[command(flatten)]
    pub server: ServerArgs,

    /// Which disk
    pub name: String,
}

/// `--transport`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Transport {
    /// A block device where that is possible (ublk, else loop), else NBD
    Auto,
    /// A block device straight from the kernel's block layer: /dev/ublkbN; needs root, ublk_drv and Linux 6.5
    Ublk,
    /// A loop device over FUSE: /dev/loopN; needs root
    Loop,
    /// Network block device, over a socket: needs no privilege
    Nbd,
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
    fn a_change_of_nothing_is_refused() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).map(|_| ()).map_err(|error| error.to_string());
        for line in ["remount /mnt", "disk change disk0", "disk create --size 1G --mount /mnt"] {
            let refused = parse(&format!("compcache {line}")).expect_err(line);
            assert!(refused.contains("required"), "{refused}");
        }
        for line in [
            "remount /mnt --codec lz4",
            "remount --memory 1M /mnt --codec lz4",
            "disk change disk0 --limit 1G",
            "disk change --codec lz4 --recompress-after 5 disk0",
            "disk create --size 1G --mkfs ext4 --mount /mnt",
            "disk create --origin /dev/x --mount /mnt",
        ] {
            assert_eq!(parse(&format!("compcache {line}")), Ok(()));
        }
    }

    #[test]
    fn everything_after_the_program_is_the_programs() {
        let cli = Cli::try_parse_from(["compcache", "run", "--ram", "1G", "ls", "--ram", "-l", "--help"]).unwrap();
        let Command::Run(args) = cli.command else { panic!("not run") };
        assert_eq!(args.program, ["ls", "--ram", "-l", "--help"]);
    }
}
