//! `compcache run`, end to end: programs of others and of ours, with and without, byte for byte.
//!
//! | file               | what must hold                                                                           |
//! |--------------------|------------------------------------------------------------------------------------------|
//! | `traps.rs`         | what is known to go wrong in a pager does not (`tests/programs/*.c`, each checks itself) |
//! | `memory_tester.rs` | memory is an array of bytes, through random operations, forks and threads                |
//! | `swap_here.rs`     | a disk is swap, from a server that is safe to swap to; a mix in a cgroup at thrice its memory |
//! | `swap.rs`          | whole machines of 512 MiB swap to it and live, emulated; over the network, too           |
//! | `old_kernel.rs`    | it holds on a kernel without UFFDIO_MOVE, in an emulated machine                         |
//! | `real_programs.rs` | programs of many runtimes print the same with a quarter of their memory                  |
//! | `accounting.rs`    | the limits hold, for one process and for a tree, and what is dead gives its share back    |
//! | `spill.rs`         | with --spill the limit holds for any content, and nothing is lost or left behind          |
//! | `cold.rs`          | with groups of what is not used memory is right, and less; through forks and with --spill     |
//! | `cli.rs`           | statuses and signals go through, output is the program's alone, failures say the remedy  |
//! | `signals.rs`       | what terminals, service managers and containers send reaches the program, as without us  |
//! | `disks.rs`         | `compcache serve` and its disks do what they are told, and say why when they do not      |
//! | `disk_backing.rs`  | a disk larger than memory keeps its contents in a file, and says what is wrong with that |
//! | `disk_clients.rs`  | file systems, fio, stress-ng, git, tar, sqlite on such a disk find what they wrote       |
//! | `disk_cold.rs`     | what was not used is compressed again, by itself and when asked, and reads as before     |
//! | `disk_origin.rs`   | a disk over an origin is the origin, with and without its server, and finds what was read |
//! | `nbd_client.rs`    | so does the kernel's NBD client, in an emulated machine                                  |
//! | `mount.rs`         | a mount caches, notices what changes behind it, changes its limit, ends, and is cleaned up |
//! | `mount_commands.rs` | mounts are asked for, changed and shown as it is said, or it is said why not               |
//! | `mount_files.rs`   | files on it are arrays of bytes, through every way of writing and reading, from both sides |
//! | `mount_clients.rs` | fio, stress-ng, git, tar, sqlite and a compiler on it find what they wrote                 |
//! | `mount_below.rs`   | what special file systems below do, run out of room for one, it does too                     |
//! | `mount_posix.rs`   | a mounted tree answers as the tree itself, errno for errno                               |
//! | `mount_passthrough.rs` | files that the kernel reads and writes by itself are what they are to all others             |
//! | `mount_moved.rs`   | paths lead to what is there, though directories are believed to be where they were for a moment |
//! | `mount_network.rs` | most of it once more where the tree lies on NFS, in an emulated machine                     |
//! | `mount_user.rs`    | a user without root's rights mounts, unmounts, and cleans up                               |
//! | `ublk_disks.rs`    | the same over ublk, in an emulated machine whose kernel has it                           |
//!
//! Each runs both ways of eviction. What a machine lacks is skipped, printed and counted (`COMPCACHE_REQUIRE_ALL=1`
//! makes it fail). A program that hangs is a failure: what its threads wait for is printed, then it is killed.
//!
//! | variable           | meaning                                                             |
//! |--------------------|---------------------------------------------------------------------|
//! | `COMPCACHE_BIN`    | another `compcache` than the one of this build                      |
//! | `COMPCACHE_PRELOAD`| another preload object than the one built on demand                 |
//! | `COMPCACHE_WAYS`   | `move` or `remap`: only this one                                    |
//! | `COMPCACHE_SEED`   | the seed of the memory tester                                       |
//! | `COMPCACHE_LONG`   | seconds that the memory tester runs (4), and the mix of `swap_here` (10) |
//! | `COMPCACHE_OLD_KERNEL` | a kernel before 6.8, to be emulated (`.ci/kernel old DIR` fetches one) |
//! | `COMPCACHE_STOCK_KERNEL` | one with ublk, NBD and zram (`.ci/kernel stock DIR`) |

mod accounting;
mod cli;
mod cold;
mod disk_backing;
mod disk_clients;
mod disk_cold;
mod disk_origin;
mod disks;
mod end_signals;
mod memory_tester;
mod mount;
mod mount_below;
mod mount_clients;
mod mount_cold;
mod mount_commands;
mod mount_files;
mod mount_moved;
mod mount_network;
mod mount_passthrough;
mod mount_posix;
mod mount_shrinker;
mod mount_user;
mod mount_writeback;
mod nbd_client;
mod old_kernel;
mod real_programs;
mod signals;
mod spill;
mod support;
mod swap;
mod swap_here;
mod traps;
mod ublk_disks;
mod units;
