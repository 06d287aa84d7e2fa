//! `compcache-bench`: scenarios in which compcache and the kernel's own compressed memory do the same work side by side.
//!
//! Sides take turns, results are ratios of runs that followed each other, and what is set up (control groups, zram and
//! loop devices, swap, zswap's parameters) is undone however the bench ends: see [`session`].

mod apps;
mod baseline;
mod cli;
mod clock;
mod compare;
mod content;
mod dd;
mod device;
mod disk;
mod disk_memory;
mod emulated;
mod files;
mod fits;
mod hotcold;
mod iozone;
mod laps;
mod latency;
mod limits;
mod ours;
mod plot;
mod programs;
mod record;
mod run;
mod scan;
mod scratch;
mod session;
mod side;
mod stat;
mod store;
mod swap_latency;
mod sweep;
mod table;
mod tiers;
mod trace;
mod writeback;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run() {
        // Whatever was measured, or the command said.
        Ok(_) if session::left_something() => ExitCode::FAILURE,
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("{}: {error:#}", session::NAME);
            ExitCode::FAILURE
        }
    }
}
