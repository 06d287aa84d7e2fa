//! The disks of a server, by name.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, anyhow, bail};
use compcache_block::{BLOCK_BYTES, BlockDevice, Disk};
use compcache_store::{LatencySnapshot, PoolConfig, Store, TABLE};

use crate::cli::Codec;
use crate::control::{BackingWanted, Change, Create, DiskState, Durations, Latencies, Reply, Request, Served};
use crate::serve::backing::DiskBacking;
use crate::serve::safe::Safety;
use crate::serve::wire::Wire;

const NAME_BYTES_MAX: usize = 32;

/// All disks, and the store they share.
pub struct Disks {
    store: Arc<Store>,
    /// Where the sockets of disks are made that ask for no other place.
    directory: PathBuf,
    disks: Mutex<Named>,
    safety: Safety,
}

#[derive(Default)]
struct Named {
    by_name: BTreeMap<String, Attached>,
    /// The server is at its end: a disk made now would be left behind.
    ending: bool,
}

/// A disk and what serves it.
struct Attached {
    disk: Arc<Disk>,
    codec: Codec,
    wire: Wire,
    for_swap: bool,
    /// Ends with the disk, after its wire.
    backing: Option<DiskBacking>,
}

impl Disks {
    /// No disks yet.
    pub fn new(store: Arc<Store>, directory: PathBuf, safety: Safety) -> Self {
        Self { store, directory, disks: Mutex::default(), safety }
    }

    /// Ends every disk, and lets no more be made.
    ///
    /// # Errors
    /// Some are in use; then all stay, and the server goes on.
    pub fn remove_all(&self) -> anyhow::Result<()> {
        let mut disks = self.lock();
        for (name, attached) in &disks.by_name {
            attached.must_be_free(name)?;
        }
        let mut kept = Ok(());
        for (name, attached) in std::mem::take(&mut disks.by_name) {
            // Somebody may have begun to use it just now.
            if let Err(not) = attached.wire.end() {
                kept = Err(not.why.context(format!("disk {name} cannot be ended")));
                disks.by_name.insert(name, Attached { wire: not.wire, ..attached });
            }
        }
        disks.ending = kept.is_ok();
        kept
    }

    fn lock(&self) -> MutexGuard<'_, Named> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn create(&self, wanted: &Create, backing: Option<&BackingWanted>) -> anyhow::Result<DiskState> {
        let codec: Codec = wanted.codec.parse()?;
        refuse_no_size(wanted.size_bytes)?;
        let mut disks = self.lock();
        if disks.ending {
            bail!("the server is ending");
        }
        let disks = &mut disks.by_name;
        let name = match &wanted.name {
            Some(name) => checked_name(name)?.to_owned(),
            None => (0..).map(|nth| format!("disk{nth}")).find(|name| !disks.contains_key(name)).expect("endless"),
        };
        let Entry::Vacant(place) = disks.entry(name.clone()) else {
            bail!("there is a disk called {name} already; choose another name");
        };
        let limit_bytes = wanted.limit_bytes.unwrap_or(u64::MAX);
        let config = PoolConfig { codec: codec.of_store(), limit_bytes };
        let mut backing = backing.map(|backing| DiskBacking::open(backing, wanted.size_bytes)).transpose()?;
        let pool = match &backing {
            Some(backing) => self.store.create_pool_on(config, backing.backing())?,
            None => self.store.create_pool(config)?,
        };
        let disk = Arc::new(Disk::new(pool, wanted.size_bytes)?);
        if let Some(backing) = &mut backing {
            backing.start(&name, &self.store, disk.pool())?;
        }
        if wanted.for_swap {
            let pages = wanted.size_bytes / BLOCK_BYTES as u64;
            self.safety.make_safe(&self.store, disk.pool(), pages, wanted.unprotected)?;
            disk.set_reserve_only();
        }
        let wire = Wire::start(&name, disk.clone(), &wanted.at, &self.directory)?;
        self.safety.settle(&self.store);
        Ok(place.insert(Attached { disk, codec, wire, for_swap: wanted.for_swap, backing }).state(&name))
    }

    fn list(&self) -> Vec<DiskState> {
        self.lock().by_name.iter().map(|(name, attached)| attached.state(name)).collect()
    }

    fn change(&self, change: &Change) -> anyhow::Result<DiskState> {
        self.with(&change.name, |attached| {
            // What can fail comes first.
            let codec = change.codec.as_deref().map(str::parse::<Codec>).transpose()?;
            if let Some(size_bytes) = change.size_bytes {
                attached.resize(&change.name, size_bytes)?;
            }
            if let Some(codec) = codec {
                attached.disk.pool().set_codec(codec.of_store())?;
                attached.codec = codec;
            }
            if let Some(limit_bytes) = change.limit_bytes {
                attached.disk.pool().set_limit_bytes(limit_bytes);
            }
            Ok(attached.state(&change.name))
        })
    }

    fn remove(&self, name: &str, force: bool) -> anyhow::Result<()> {
        let mut disks = self.lock();
        let attached = disks.by_name.get(name).ok_or_else(|| no_such_disk(name))?;
        if !force {
            attached.must_be_free(name)?;
        }
        let attached = disks.by_name.remove(name).ok_or_else(|| no_such_disk(name))?;
        attached.wire.end().map_err(|not| {
            disks.by_name.insert(name.to_owned(), Attached { wire: not.wire, ..attached });
            not.why.context(format!("disk {name} cannot be ended"))
        })
    }

    fn with<T>(&self, name: &str, work: impl FnOnce(&mut Attached) -> anyhow::Result<T>) -> anyhow::Result<T> {
        work(self.lock().by_name.get_mut(name).ok_or_else(|| no_such_disk(name))?)
    }
}

impl Served for Disks {
    fn serve(&self, request: Request) -> Reply {
        let one = |state| Reply::Disk(Box::new(state));
        let reply = match request {
            Request::Create(wanted) => self.create(&wanted, None).context("no disk was made").map(one),
            Request::CreateOn { disk, .. } if disk.for_swap => {
                Err(anyhow!("no disk was made: a disk for swap has no backing in this version"))
            }
            Request::CreateOn { disk, backing } => {
                self.create(&disk, Some(&backing)).context("no disk was made").map(one)
            }
            Request::List => Ok(Reply::Disks(self.list())),
            Request::Show { name } => self.with(&name, |attached| Ok(one(attached.state(&name)))),
            Request::Change(change) => self.change(&change).map(one),
            Request::Reset { name } => self.with(&name, |attached| {
                attached.must_be_free(&name)?;
                attached.disk.reset();
                Ok(Reply::Done)
            }),
            Request::Remove { name, force } => self.remove(&name, force).map(|()| Reply::Done),
        };
        reply.unwrap_or_else(|error| Reply::Failed { why: format!("{error:#}") })
    }
}

impl Attached {
    fn must_be_free(&self, name: &str) -> anyhow::Result<()> {
        self.wire.in_use().map_or(Ok(()), |why| Err(why.context(format!("disk {name} stays as it is"))))
    }

    /// Smaller only while nobody uses it.
    fn resize(&self, name: &str, size_bytes: u64) -> anyhow::Result<()> {
        refuse_no_size(size_bytes)?;
        if let Some(why) = self.wire.fixed_size() {
            return Err(why.context(format!("disk {name} stays as it is")));
        }
        if size_bytes < self.disk.size_bytes() {
            self.must_be_free(name)?;
        }
        if self.for_swap && size_bytes > self.disk.size_bytes() {
            self.disk.pool().prepare(size_bytes / BLOCK_BYTES as u64)?;
        }
        self.disk.resize(size_bytes)?;
        self.wire.resized()
    }

    fn state(&self, name: &str) -> DiskState {
        let stats = self.disk.stats();
        let latency = self.disk.pool().latency();
        DiskState {
            name: name.to_owned(),
            at: self.wire.at(),
            codec: self.codec.to_string(),
            for_swap: self.for_swap,
            backing: self.backing.as_ref().map(DiskBacking::state),
            stats: TABLE.iter().map(|stat| (stat.name.to_owned(), (stat.value)(&stats))).collect(),
            latency: Latencies { reads: durations(&latency.reads), writes: durations(&latency.writes) },
        }
    }
}

fn durations(of: &LatencySnapshot) -> Durations {
    let &LatencySnapshot { count, min_ns, max_ns, sum_ns, average_ns, p50_ns, p99_ns, .. } = of;
    Durations { count, min_ns, avg_ns: average_ns, p50_ns, p99_ns, max_ns, sum_ns }
}

/// A name goes into paths and URIs.
fn checked_name(name: &str) -> anyhow::Result<&str> {
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    if !fits {
        bail!("`{name}` is no name for a disk: up to {NAME_BYTES_MAX} letters, digits, `-` and `_`, the first no sign");
    }
    Ok(name)
}

fn refuse_no_size(size_bytes: u64) -> anyhow::Result<()> {
    if size_bytes == 0 {
        bail!("a disk of no size is none; write 1G, for instance");
    }
    Ok(())
}

fn no_such_disk(name: &str) -> anyhow::Error {
    anyhow!("there is no disk called {name}; `compcache disk list` shows which there are")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_leave_its_directory() {
        for name in ["a", "Disk-1_b", "0"] {
            assert_eq!(checked_name(name).unwrap(), name);
        }
        let long = "a".repeat(NAME_BYTES_MAX + 1);
        for name in ["", ".", "..", "a/b", "../a", "-a", "_a", "a b", "a?b", "ä", "a\0", &long] {
            assert!(checked_name(name).is_err(), "{name}");
        }
    }
}
