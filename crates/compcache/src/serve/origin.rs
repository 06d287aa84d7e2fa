//! A disk that shows somebody's block device or file, with a compressed cache of its own.
//!
//! The cache has its own limit (`--memory`), beside what the server's other disks share, and is emptied of half-empty spans by a thread of its own:
//! what it holds can always be read again, so nothing waits for its memory; when the machine is short of it, most is left to others.
//!
//! An origin that lies on one of this server's own disks is refused: the server would wait for itself.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use compcache_block::{BelowStats, BlockDevice, Cached, Origin};
use compcache_cache::{Cache, CacheStats, LEAST_BYTES, Recompress};

use crate::cli::Codec;
use crate::control::{OriginState, OriginWanted};
use crate::run::say;
use crate::serve::below::refuse_own;
use crate::size::Shown;

/// The origin of a disk, and its cache.
pub struct DiskOrigin {
    origin: Arc<Origin>,
    cached: Arc<Cached>,
}

impl DiskOrigin {
    /// Opens what is wanted, for nobody else. `own_devices` are those this server serves.
    ///
    /// # Errors
    /// It cannot be had; nothing of it was changed.
    pub fn open(wanted: &OriginWanted, codec: Codec, own_devices: &[String]) -> anyhow::Result<DiskOrigin> {
        refuse_little("--memory", wanted.memory_bytes)?;
        refuse_own(&wanted.path, own_devices)?;
        let origin = Arc::new(Origin::open(&wanted.path)?);
        if !origin.is_direct() {
            say(&format!(
                "compcache: the file system of {} has no direct input and output; the page cache will hold a part of it, too\n",
                origin.path().display()
            ));
        }
        let cached = Arc::new(Cached::new(origin.clone(), wanted.memory_bytes, codec.of_store())?);
        start_upkeep(&cached)?;
        Ok(DiskOrigin { origin, cached })
    }

    /// To be served.
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        self.cached.clone()
    }

    /// The most memory its cache may take.
    pub fn memory_bytes(&self) -> u64 {
        self.cached.cache().stats().memlimit
    }

    /// Changes that; what does not fit any more goes.
    ///
    /// # Errors
    /// There is no cache without a limit, nor one so small; it is as it was.
    pub fn set_memory_bytes(&self, memory_bytes: u64) -> anyhow::Result<()> {
        if memory_bytes == u64::MAX {
            bail!("a cache is as large as its limit lets it be; name a limit, 10% for instance");
        }
        refuse_little("--limit", memory_bytes)?;
        self.cached.cache().set_limit_bytes(memory_bytes);
        Ok(())
    }

    /// Changes what is compressed from now on.
    ///
    /// # Errors
    /// There is no such codec.
    pub fn set_codec(&self, codec: Codec) -> anyhow::Result<()> {
        Ok(self.cached.cache().set_codec(codec.of_store())?)
    }

    /// What becomes of cold blocks of its cache.
    pub fn recompress(&self) -> Recompress {
        self.cached.cache().recompress()
    }

    /// Changes that.
    ///
    /// # Errors
    /// There is no such level, or no memory to do it with.
    pub fn set_recompress(&self, recompress: Recompress) -> anyhow::Result<()> {
        Ok(self.cached.cache().set_recompress(recompress)?)
    }

    /// What is shown of it.
    pub fn state(&self) -> OriginState {
        OriginState {
            path: self.origin.path().display().to_string(),
            is_direct: self.origin.is_direct(),
            left_out_bytes: self.origin.left_out_bytes(),
        }
    }

    /// Every statistic by its name.
    pub fn stats(&self) -> impl Iterator<Item = (String, u64)> + use<> {
        let (cache, below) = (self.cached.cache().stats(), self.cached.below_stats());
        let cached = CacheStats::TABLE.iter().map(move |(name, value, _)| ((*name).to_owned(), value(&cache)));
        let asked = BelowStats::TABLE.iter().map(move |(name, value, _)| ((*name).to_owned(), value(&below)));
        cached.chain(asked).chain([("disksize".to_owned(), self.cached.size_bytes())])
    }
}

fn refuse_little(flag: &str, memory_bytes: u64) -> anyhow::Result<()> {
    if memory_bytes < LEAST_BYTES {
        bail!("{flag} {} has no room for any block; write 10%, or 1M at least", Shown(memory_bytes));
    }
    Ok(())
}

/// Whose thread does what the cache needs done beside reading and writing.
fn start_upkeep(cached: &Cached) -> anyhow::Result<()> {
    let mut worker = cached.cache().worker().context("cannot get the memory that the cache's thread works in")?;
    // The first write is kept, too, however late the thread comes.
    cached.cache().keep_written(&mut worker, Duration::ZERO);
    let cache = Arc::downgrade(cached.cache());
    let started = thread::Builder::new().name("upkeep".into()).spawn(move || Cache::keep_up(&cache, worker, true));
    started.map(drop).context("cannot start the thread that keeps what is written")
}
