//! What a store and a pool are told when they are made.

use crate::codec::Codec;
use crate::reclaim::{ABOVE_PERCENT, GAP_PERCENT};

/// How a [`Store`](crate::Store) is set up. All of it but the limit is fixed for the store's life.
#[derive(Clone, Copy, Debug)]
pub struct StoreConfig {
    /// The most memory the store may hold from the system: arena and tables, not compressed payload. `u64::MAX` is no
    /// limit. Can be changed at any time with [`Store::set_limit_bytes`](crate::Store::set_limit_bytes).
    pub limit_bytes: u64,
    /// Address range set aside for objects, in bytes; only addresses, no memory. Rounded up to 256 KiB; at most 512 GiB.
    /// The tables take about an eighth as much again. Matters where RLIMIT_AS is set.
    pub reserve_bytes: u64,
    /// Keep arena and tables out of the kernel's swap (`mlock2(MLOCK_ONFAULT)`, counted against RLIMIT_MEMLOCK).
    pub lock_in_ram: bool,
}

impl Default for StoreConfig {
    /// No limit, 64 GiB of addresses, not locked.
    fn default() -> Self {
        StoreConfig { limit_bytes: u64::MAX, reserve_bytes: 64 << 30, lock_in_ram: false }
    }
}

/// How a [`Pool`](crate::Pool) is set up. Codec and limit can be changed while it is in use.
#[derive(Clone, Copy, Debug)]
pub struct PoolConfig {
    /// What new pages are compressed with.
    pub codec: Codec,
    /// The most memory this pool may hold: the size classes of its objects and its tables. `u64::MAX` is no limit
    /// beside the store's.
    pub limit_bytes: u64,
    /// In hundredths of the limits, the pool's and the store's: up to so much in use, a page that is read the second time leaves its group. Without effect where there is a
    /// backing.
    pub spare_percent: u8,
}

impl Default for PoolConfig {
    /// LZ4, no limit of its own, 75 percent.
    fn default() -> Self {
        PoolConfig { codec: Codec::Lz4, limit_bytes: u64::MAX, spare_percent: ABOVE_PERCENT - GAP_PERCENT }
    }
}
