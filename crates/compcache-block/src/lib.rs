//! A pool as a disk: one seam, the devices behind it, and the transports in front.
//!
//! ```text
//!    NBD clients (a socket)          /dev/loopN                    /dev/ublkbN     ... a later transport is one more box
//!          |                              |                              |
//!    +-----v-------------+   +------------v--------------+   +-----------v-------------+
//!    | nbd: a thread and |   | fuse_loop: a lane for     |   | ublk: a thread and a    |   know BlockDevice,
//!    | a lane for each   |   | each thread of FUSE's and |   | lane for each queue and |   nothing below it
//!    | connection        |   | each that waits           |   | each that waits         |
//!    +-----+-------------+   +------------+--------------+   +-----------+-------------+
//!          +------------------------------+------------------------------+
//!          |   Lane: read, write, flush, discard, write_zeroes, extent
//!    ======v====================================  device.rs, the seam
//!          |   Done | MustWait | DeviceError
//!    +-----v-----+   +-------+   +------------------------------+   +---------------------------------+
//!    | Disk      |   | Array |   | Cached                       |   | Origin: somebody's block device |
//!    +-----+-----+   +-------+   | Faulty, Delayed, Checked     |   | or file                         |
//!          |                     +----+------------------+------+   +---------------------------------+
//!          |   pages, in runs         |                  +--> another device, mostly an Origin
//!    compcache-store: a Pool     compcache-cache
//! ```
//!
//! ```
//! use std::sync::Arc;
//! use compcache_block::{BlockDevice, Disk, Manner};
//! use compcache_store::{PoolConfig, Store, StoreConfig};
//!
//! let store = Store::new(StoreConfig { limit_bytes: 64 << 20, ..StoreConfig::default() })?;
//! let disk = Arc::new(Disk::new(store.create_pool(PoolConfig::default())?, 1 << 30)?);
//! let mut lane = disk.clone().lane()?;
//! lane.write(1000, b"hello", Manner::WAITING)?;
//! let mut back = [0; 5];
//! lane.read(1000, &mut back, Manner::WAITING)?;
//! assert_eq!(&back, b"hello");
//! assert_eq!(disk.stats().orig_data_size, 4096);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Array`] is memory as it is, the thing to compare with. [`Faulty`], [`Delayed`] and [`Checked`] go between a transport
//! and a device. They are ordinary public modules, as nbdkit's memory plugin and its error, delay and checkwrite filters
//! are ordinary parts of nbdkit: whoever serves a disk can put one in front and see what the clients make of it, other
//! crates' tests need no feature for it, and one that nobody uses costs nothing.
//!
//! # Lock order
//! From the outermost in; none is taken in the other direction.
//!
//! 1. a server's list of connections
//! 2. a connection's queue of waiting requests; a connection's writing side. Neither is held when the other is taken, and
//!    none is held when a device is asked. The queue of waiting requests of a [`fuse_loop::FuseLoop`] or a [`ublk::Ublk`], and
//!    the list of those that are done, likewise
//! 3. a [`Disk`]'s turn to change its size
//! 4. a [`Disk`]'s or an [`Origin`]'s stripes of blocks: one of them, or all by their numbers; a [`Checked`]'s memory in its place
//! 5. a cache's index, then what is inside the store
//!
//! A [`Disk`] is not lasting: its contents end with the process. Its `flush` says so by succeeding at once.

// Lifted for fuse_loop/loop_device.rs, which makes the system calls of loop devices, and fuse_loop/namespace.rs; for
// ublk/control.rs and ublk/queue.rs, which put commands into an io_uring, and ublk/memory.rs, which maps what they need; and for nbd/buffer.rs.
#![deny(unsafe_code)]

mod array;
mod cached;
mod checked;
mod delayed;
mod device;
mod disk;
mod error;
mod faulty;
pub mod fuse_loop;
pub mod nbd;
mod node;
mod origin;
mod range;
mod stripes;
pub mod ublk;
mod waiting;

pub use array::Array;
pub use cached::{BelowStats, Cached};
pub use checked::Checked;
pub use delayed::Delayed;
pub use device::{BLOCK_BYTES, BlockDevice, Extent, Lane, Manner, Outcome, Request, Zeroes, check_range, check_size};
pub use disk::Disk;
pub use error::DeviceError;
pub use faulty::{Fault, Faulty};
pub use node::loop_device_over;
pub use origin::{Origin, OriginError};
