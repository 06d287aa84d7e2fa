//! The command line of compcache: flags and glue. What it does lives in [`run`], [`doctor`] and the crates below.

#![deny(unsafe_code)]

mod background;
mod cgroup;
mod cli;
mod control;
mod disk;
mod doctor;
mod end_signals;
mod file_size;
mod kernel;
mod mount;
mod pages;
mod run;
mod serve;
mod size;
mod swap;

use std::env;
use std::ffi::OsString;
use std::panic;
use std::process::{self, ExitCode};

use clap::Parser;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    if cfg!(panic = "unwind") {
        stop_at_a_panic();
    }
    let arguments: Vec<OsString> = env::args_os().collect();
    let arguments = mount::options::of_mount_command(&arguments).unwrap_or(arguments);
    match Cli::parse_from(&arguments).command {
        Command::Run(args) => run::run(args),
        Command::Serve(args) => serve::serve(&args, &arguments),
        Command::Disk { command } => disk::disk(command),
        Command::Swap { command } => swap::swap(command),
        Command::Mount(args) => mount::mount(args, &arguments),
        Command::Umount(args) => mount::umount(&args),
        Command::Remount(args) => mount::remount(&args),
        Command::Reclaim(args) => disk::reclaim(&args),
        Command::List(args) => disk::list(&args),
        Command::Show(args) => disk::show(&args),
        Command::Recompress(args) => disk::recompress(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Completions { shell } => pages::completions(shell),
        Command::SwapGuard => serve::guard(),
        Command::Man { dir } => pages::man(&dir),
    }
}

/// Whichever thread it is in: what it was in the middle of, the others would wait for. The release profile aborts by itself; that of
/// the tests unwinds.
fn stop_at_a_panic() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        print(info);
        process::abort();
    }));
}
