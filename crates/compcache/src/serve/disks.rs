//! The disks of a server, by name.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use compcache_block::{BLOCK_BYTES, BlockDevice, Disk};
use compcache_store::{LatencySnapshot, Leaving, PoolConfig, Store, TABLE};

use crate::cgroup;
use crate::cli::{Codec, HowRecompress, Recompress};
use crate::control::{
    Asker, BackingWanted, Change, Create, DiskState, Durations, Latencies, OriginWanted, Reply, Request, Served,
};
use crate::disk::NOT_RECOMPRESSED;
use crate::kernel::ram_bytes;
use crate::run::why;
use crate::serve::backing::{self, DiskBacking};
use crate::serve::cold::{Cold, Done};
use crate::serve::origin::DiskOrigin;
use crate::serve::safe::{self, Safety};
use crate::serve::wire::{Claimed, Wire};
use crate::size::Shown;

const NAME_BYTES_MAX: usize = 32;

/// All disks, and the store they share.
pub struct Disks {
    store: Arc<Store>,
    /// Where the sockets of disks are made that ask for no other place.
    directory: PathBuf,
    disks: Mutex<Named>,
    safety: Safety,
    cold: Arc<Cold>,
}

#[derive(Default)]
struct Named {
    by_name: BTreeMap<String, Attached>,
    /// Those that are being made, without the lock: it takes as long as what is to lie below them.
    coming: BTreeMap<String, Comes>,
    /// Those that are being ended, without the lock: it takes as long as what lies below them. Some may come back.
    leaving: BTreeMap<String, Leaves>,
    /// The server is at its end: a disk made now would be left behind.
    ending: bool,
    /// By who tries until that succeeds.
    asked_to_end: bool,
}

/// What a disk that is being made has already.
#[derive(Default)]
struct Comes {
    cache_bytes: u64,
    /// The system may know a device of it, and read there: it must not be left behind.
    is_started: bool,
}

/// What a disk that is being ended has still.
struct Leaves {
    at: String,
    cache_bytes: u64,
}

/// A disk and what serves it.
struct Attached {
    shows: Shows,
    codec: Codec,
    recompress: Recompress,
    wire: Wire,
    for_swap: bool,
    presence: Presence,
    /// Ends with the disk, after all else: the last that is written there says that there is nothing.
    backing: Option<DiskBacking>,
}

/// Of a disk: who works on it for long, without the lock, looks whether it is there still.
#[derive(Default)]
pub struct Presence(Arc<()>);

/// What the long work has of it.
#[derive(Clone)]
pub struct Present(Weak<()>);

impl Presence {
    /// For who works on the disk.
    pub fn present(&self) -> Present {
        Present(Arc::downgrade(&self.0))
    }
}

impl Present {
    /// Fails when the disk was removed.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.0.strong_count() == 0 {
            bail!("the disk was removed");
        }
        Ok(())
    }
}

/// What a disk's users see.
enum Shows {
    /// What they wrote, in a pool.
    Pool(Arc<Disk>),
    /// What is elsewhere.
    Origin(DiskOrigin),
}

impl Named {
    /// What the caches of disks with an origin may take.
    fn cache_bytes(&self) -> u64 {
        let leaving = self.leaving.values().map(|disk| disk.cache_bytes);
        let coming = self.coming.values().map(|disk| disk.cache_bytes);
        self.by_name.values().map(Attached::cache_bytes).chain(coming).chain(leaving).sum()
    }

    /// Where all of them are found.
    fn devices(&self) -> Vec<String> {
        let leaving = self.leaving.values().map(|disk| disk.at.clone());
        self.by_name.values().map(|disk| disk.wire.at()).chain(leaving).collect()
    }

    /// Where those are that the machine may swap to. Not those that are being ended: nobody uses them.
    fn swap_devices(&self) -> Vec<String> {
        self.by_name.values().filter(|disk| disk.for_swap).map(|disk| disk.wire.at()).collect()
    }

    /// Takes a disk out that is to be ended. Its name stays taken until [`Named::left`].
    fn leave(&mut self, name: &str) -> anyhow::Result<Attached> {
        let attached = self.by_name.remove(name).ok_or_else(|| self.not_there(name))?;
        let leaves = Leaves { at: attached.wire.at(), cache_bytes: attached.cache_bytes() };
        self.leaving.insert(name.to_owned(), leaves);
        Ok(attached)
    }

    /// It is there again.
    fn stay(&mut self, name: String, attached: Attached) {
        self.leaving.remove(&name);
        self.by_name.insert(name, attached);
    }

    /// It has ended, or is there again.
    fn left(&mut self, name: &str, ended: Result<(), Box<Stays>>) -> anyhow::Result<()> {
        self.leaving.remove(name);
        ended.map_err(|stays| {
            self.stay(name.to_owned(), stays.attached);
            stays.why
        })
    }

    /// Why there is no disk of this name.
    fn not_there(&self, name: &str) -> anyhow::Error {
        if self.leaving.contains_key(name) {
            return anyhow!("disk {name} is being removed, which takes as long as what it was asked for");
        }
        if self.coming.contains_key(name) {
            return anyhow!("disk {name} is being made, which takes as long as what lies below it");
        }
        anyhow!("there is no disk called {name}; `compcache disk list` shows which there are")
    }

    /// The name that is wanted, or one that is free.
    fn name_for(&self, wanted: Option<&str>, for_swap: bool) -> anyhow::Result<String> {
        if self.ending {
            bail!("the server is ending");
        }
        // It would end with the others as soon as nobody uses it.
        if self.asked_to_end {
            bail!(
                "the server was asked to end, and does so as soon as none of its disks is in use; start another then"
            );
        }
        let is_free = |name: &String| {
            !(self.by_name.contains_key(name) || self.coming.contains_key(name) || self.leaving.contains_key(name))
        };
        match wanted {
            None => {
                let kind = if for_swap { "swap" } else { "disk" };
                Ok((0..).map(|nth| format!("{kind}{nth}")).find(is_free).expect("endless"))
            }
            Some(name) if self.leaving.contains_key(name) => {
                bail!("disk {name} is being removed already, but still there; choose another name")
            }
            Some(name) if self.coming.contains_key(name) => {
                bail!("a disk called {name} is being made already; choose another name")
            }
            Some(name) => Some(checked_name(name)?.to_owned())
                .filter(is_free)
                .ok_or_else(|| anyhow!("there is a disk called {name} already; choose another name")),
        }
    }
}

impl Disks {
    /// No disks yet.
    pub fn new(store: Arc<Store>, directory: PathBuf, safety: Safety, cold: Arc<Cold>) -> Self {
        Self { store, directory, disks: Mutex::default(), safety, cold }
    }

    /// Ends every disk, and lets no more be made; nor if that fails and is tried until it succeeds, as who `insists` does.
    ///
    /// # Errors
    /// Some are in use; then all stay, and the server goes on. Or the system does not let go of one, which stays, and with it all that have not
    /// ended before it.
    pub fn remove_all(&self, insists: bool) -> anyhow::Result<()> {
        let mut disks = self.lock();
        disks.asked_to_end |= insists;
        let started = disks.coming.iter().filter(|(_, disk)| disk.is_started).map(|(name, _)| name);
        if let Some(name) = disks.leaving.keys().chain(started).next() {
            return Err(disks.not_there(name));
        }
        // None is ended before nobody can begin to use any.
        let claims =
            disks.by_name.iter().map(|(name, attached)| attached.claim(name).map(|claim| (name.clone(), claim)));
        let claims = claims.collect::<anyhow::Result<Vec<_>>>()?;
        disks.ending = true;
        let all = claims.into_iter().map(|(name, claim)| disks.leave(&name).map(|attached| (name, attached, claim)));
        let mut all = all.collect::<anyhow::Result<Vec<_>>>()?;
        drop(disks);
        // Those first that the system may not let go of.
        all.sort_by_key(|(_, attached, _)| matches!(attached.wire, Wire::Nbd { .. }));
        let mut all = all.into_iter();
        let kept = all.by_ref().try_for_each(|(name, attached, claim)| {
            let ended = attached.end_claimed(&name, claim);
            self.left(&name, ended)
        });
        let mut disks = self.lock();
        all.for_each(|(name, attached, _)| disks.stay(name, attached));
        disks.ending = kept.is_ok();
        self.rest_without_swap(&disks);
        kept
    }

    fn lock(&self) -> MutexGuard<'_, Named> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn create(&self, wanted: &Create, backing: Option<&BackingWanted>) -> anyhow::Result<DiskState> {
        let codec: Codec = wanted.codec.parse()?;
        let untold = if wanted.for_swap { Recompress::NEVER } else { Recompress::DEFAULT };
        let recompress = Told::of(wanted.recompress.as_deref(), wanted.recompress_after_ms)?.of_pool(untold, untold);
        if wanted.for_swap && recompress.level.is_some() {
            bail!(NOT_RECOMPRESSED);
        }
        refuse_no_size(wanted.size_bytes)?;
        let disks = self.lock();
        let name = disks.name_for(wanted.name.as_deref(), wanted.for_swap)?;
        let open = |own: &[String]| {
            let open = |backing| DiskBacking::open(backing, wanted.size_bytes, wanted.for_swap, own);
            backing.map(open).transpose()
        };
        let (mut backing, mut disks) = self.opening(disks, &name, 0, open)?;
        let limit_bytes = wanted.limit_bytes.unwrap_or(u64::MAX);
        let config = PoolConfig { codec: codec.of_store(), limit_bytes, ..PoolConfig::default() };
        let pool = match &backing {
            Some(backing) => self.store.create_pool_on(config, backing.backing())?,
            None => self.store.create_pool(config)?,
        };
        let disk = Arc::new(Disk::new(pool, wanted.size_bytes)?);
        if let Some(backing) = &mut backing {
            backing.start(&name, &self.store, disk.pool())?;
        }
        // Before anything is put by for swap: whoever recompresses would take of it.
        self.cold.watch(disk.pool(), recompress, wanted.for_swap);
        if wanted.for_swap && backing.is_none() {
            self.refuse_swap_beside(disks.cache_bytes())?;
        }
        let make_safe = || self.safety.make_safe(&self.store, &disk, wanted.unprotected);
        let prepared = wanted.for_swap.then(make_safe).transpose()?;
        if wanted.for_swap {
            disk.set_reserve_only();
        }
        let wire = Wire::start(&name, disk.clone(), &wanted.at, wanted.for_swap, &self.directory)?;
        if let Some(prepared) = prepared {
            prepared.keep();
        }
        self.safety.settle(&self.store);
        let (shows, presence) = (Shows::Pool(disk), Presence::default());
        let attached = Attached { shows, codec, recompress, wire, for_swap: wanted.for_swap, presence, backing };
        let state = attached.state(&name);
        disks.by_name.insert(name, attached);
        self.safety.guard(&disks.swap_devices());
        Ok(state)
    }

    fn create_over(&self, wanted: &Create, origin: &OriginWanted) -> anyhow::Result<DiskState> {
        let codec: Codec = wanted.codec.parse()?;
        let told = Told::of(wanted.recompress.as_deref(), wanted.recompress_after_ms)?;
        let disks = self.lock();
        let name = disks.name_for(wanted.name.as_deref(), wanted.for_swap)?;
        self.refuse_too_much(disks.cache_bytes(), origin.memory_bytes)?;
        let open = |own: &[String]| {
            let origin = DiskOrigin::open(origin, codec, own)?;
            origin.set_recompress(told.of_cache(origin.recompress()))?;
            // The system looks for partitions there before it has a device.
            self.starting(&name)?;
            let wire = Wire::start(&name, origin.device(), &wanted.at, false, &self.directory)?;
            Ok((origin, wire))
        };
        let ((origin, wire), mut disks) = self.opening(disks, &name, origin.memory_bytes, open)?;
        let (shows, recompress, presence) = (Shows::Origin(origin), Recompress::NEVER, Presence::default());
        let attached = Attached { shows, codec, recompress, wire, for_swap: false, presence, backing: None };
        let state = attached.state(&name);
        disks.by_name.insert(name, attached);
        Ok(state)
    }

    /// Opens what is to lie below the disk `name`, whose cache may take so much; given which devices are ours. Others have the lock meanwhile, and find the name taken: who
    /// has that file or device may not answer.
    fn opening<'d, T>(
        &'d self,
        mut disks: MutexGuard<'d, Named>,
        name: &str,
        cache_bytes: u64,
        open: impl FnOnce(&[String]) -> anyhow::Result<T>,
    ) -> anyhow::Result<(T, MutexGuard<'d, Named>)> {
        let own = disks.devices();
        disks.coming.insert(name.to_owned(), Comes { cache_bytes, is_started: false });
        drop(disks);
        let opened = open(&own);
        let mut disks = self.lock();
        disks.coming.remove(name);
        if disks.ending {
            bail!("the server is ending");
        }
        Ok((opened?, disks))
    }

    /// The transport of a disk that is being made begins: the server does not end before it has.
    fn starting(&self, name: &str) -> anyhow::Result<()> {
        let mut disks = self.lock();
        if disks.ending {
            bail!("the server is ending");
        }
        disks.coming.entry(name.to_owned()).or_default().is_started = true;
        Ok(())
    }

    /// A cache of `more_bytes` beside others of `cache_bytes`: with what other disks may take, no more than there is.
    fn refuse_too_much(&self, cache_bytes: u64, more_bytes: u64) -> anyhow::Result<()> {
        let here = memory_here();
        let taken = self.store.limit_bytes().saturating_add(cache_bytes);
        if taken.saturating_add(more_bytes) > here {
            bail!(
                "a cache of {} is too large: other disks may take {} of {}; use less, or start the server with a smaller --memory",
                Shown(more_bytes),
                Shown(taken),
                Shown(here)
            );
        }
        Ok(())
    }

    /// The same where caches are there, and the limit of all other disks is about to be made larger for swap.
    fn refuse_swap_beside(&self, cache_bytes: u64) -> anyhow::Result<()> {
        let (here, with_swap) = (memory_here(), self.safety.limit_bytes());
        if with_swap > self.store.limit_bytes() && with_swap.saturating_add(cache_bytes) > here {
            bail!(
                "with swap disks may take {}, and caches of disks with an origin {} of {}; give these less (compcache disk change \
                 --limit), or start the server with a smaller --memory",
                Shown(with_swap),
                Shown(cache_bytes),
                Shown(here)
            );
        }
        Ok(())
    }

    fn list(&self) -> Vec<DiskState> {
        self.lock().by_name.iter().map(|(name, attached)| attached.state(name)).collect()
    }

    fn change(&self, change: &Change) -> anyhow::Result<DiskState> {
        let mut disks = self.lock();
        let cache_bytes = disks.cache_bytes();
        if !disks.by_name.contains_key(&change.name) {
            return Err(disks.not_there(&change.name));
        }
        let attached = disks.by_name.get_mut(&change.name).expect("it is there");
        // What can fail comes first.
        let codec = change.codec.as_deref().map(str::parse::<Codec>).transpose()?;
        let told = Told::of(change.recompress.as_deref(), change.recompress_after_ms)?;
        let recompress = told.of_pool(attached.recompress, Recompress::DEFAULT);
        let asked = recompress.level.is_some() || change.recompress_after_ms.is_some();
        if asked && attached.for_swap {
            bail!(NOT_RECOMPRESSED);
        }
        let backing = match (&change.backing, &attached.backing) {
            (Some(_), None) => bail!("disk {} has no backing; one is given to a disk when it is made", change.name),
            (Some(change), Some(backing)) => Some((change, backing)),
            (None, _) => None,
        };
        if let Some((change, backing)) = backing {
            backing.refuse(change)?;
        }
        if let (Shows::Pool(disk), true) = (&attached.shows, attached.for_swap) {
            let stays =
                || format!("disk {0} stays as it is; `compcache disk change {0}` changes its limit", change.name);
            safe::refuse_change(disk, change.size_bytes, change.limit_bytes).with_context(stays)?;
        }
        // Of a disk with an origin this is refused before anything is changed.
        if let Some(size_bytes) = change.size_bytes {
            attached.resize(&change.name, size_bytes)?;
        }
        if let Some((change, backing)) = backing {
            backing.change(change);
        }
        if let (Shows::Origin(origin), Some(limit_bytes)) = (&attached.shows, change.limit_bytes) {
            // A smaller one is welcome however little memory there is now.
            if limit_bytes < u64::MAX && limit_bytes > origin.memory_bytes() {
                self.refuse_too_much(cache_bytes - origin.memory_bytes(), limit_bytes)?;
            }
            origin.set_memory_bytes(limit_bytes)?;
        }
        if let (Shows::Origin(origin), Told { how: Some(_), .. } | Told { after: Some(_), .. }) =
            (&attached.shows, told)
        {
            origin.set_recompress(told.of_cache(origin.recompress()))?;
        }
        if let Some(codec) = codec {
            match &attached.shows {
                Shows::Pool(disk) => disk.pool().set_codec(codec.of_store())?,
                Shows::Origin(origin) => origin.set_codec(codec)?,
            }
            attached.codec = codec;
        }
        match &attached.shows {
            Shows::Pool(disk) => {
                self.cold.change(disk.pool(), recompress);
                attached.recompress = recompress;
            }
            Shows::Origin(_) => {}
        }
        if let (Shows::Pool(disk), Some(limit_bytes)) = (&attached.shows, change.limit_bytes) {
            disk.pool().set_limit_bytes(limit_bytes);
        }
        Ok(attached.state(&change.name))
    }

    /// Not under the lock: others are served meanwhile.
    fn reclaim(&self, name: &str, bytes: Option<u64>, leaving: Leaving, asker: &Asker<'_>) -> anyhow::Result<Reply> {
        let (disk, present) = self.with(name, |attached| {
            if attached.backing.is_none() {
                bail!("disk {name} has no backing that blocks could leave for; make a disk with --backing");
            }
            Ok((attached.pool(name)?.clone(), attached.presence.present()))
        })?;
        let goes_on = || present.check().and_then(|()| asker.check());
        backing::write_back(&self.store, disk.pool(), bytes.unwrap_or(u64::MAX), leaving, &goes_on)
    }

    fn recompress(&self, name: &str, idle_ms: Option<u64>, asker: &Asker<'_>) -> anyhow::Result<Reply> {
        // It takes a while, in which others may ask for other things.
        let (pool, level, present) = self.with(name, |attached| match &attached.shows {
            Shows::Pool(disk) if !attached.for_swap => {
                Ok((disk.pool().clone(), attached.recompress.level, attached.presence.present()))
            }
            Shows::Pool(_) => bail!("the blocks of disk {name}, which is for swap, are not recompressed"),
            Shows::Origin(_) => bail!(
                "the blocks of disk {name}, which has an origin, are recompressed by themselves alone (`compcache disk change --recompress`)"
            ),
        })?;
        let idle = idle_ms.map(Duration::from_millis);
        let goes_on = || present.check().and_then(|()| asker.check());
        let done = self.cold.recompress(&pool, level.unwrap_or(Recompress::DEFAULT_LEVEL), idle, &goes_on);
        let done = done.context("not all was recompressed")?;
        let Done { pages, before_bytes, after_bytes } = done;
        Ok(Reply::Recompressed { pages, before_bytes, after_bytes })
    }

    fn remove(&self, name: &str, force: bool) -> anyhow::Result<()> {
        let mut disks = self.lock();
        let attached = disks.by_name.get(name).ok_or_else(|| disks.not_there(name))?;
        let claimed = (!force).then(|| attached.claim(name)).transpose()?;
        let attached = disks.leave(name)?;
        drop(disks);
        let ended = match claimed {
            Some(claimed) => attached.end_claimed(name, claimed),
            None => attached.end_by_force(name),
        };
        self.left(name, ended)
    }

    /// It has ended, or is there again. With the last for swap goes what was kept for it.
    fn left(&self, name: &str, ended: Result<(), Box<Stays>>) -> anyhow::Result<()> {
        let mut disks = self.lock();
        let left = disks.left(name, ended);
        self.rest_without_swap(&disks);
        left
    }

    fn rest_without_swap(&self, disks: &Named) {
        self.safety.guard(&disks.swap_devices());
        // One that is being removed may yet stay, and then this is done.
        if disks.leaving.is_empty() && !disks.by_name.values().any(|attached| attached.for_swap) {
            self.safety.rest(&self.store);
        }
    }

    fn with<T>(&self, name: &str, work: impl FnOnce(&mut Attached) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let mut disks = self.lock();
        match disks.by_name.get_mut(name) {
            Some(attached) => work(attached),
            None => Err(disks.not_there(name)),
        }
    }
}

impl Served for Disks {
    fn serve(&self, request: Request, asker: &Asker<'_>) -> Reply {
        let one = |state| Reply::Disk(Box::new(state));
        let reply = match request {
            Request::Create(wanted) => self.create(&wanted, None).context("no disk was made").map(one),
            Request::CreateOn { disk, backing } => {
                self.create(&disk, Some(&backing)).context("no disk was made").map(one)
            }
            Request::CreateOver { disk, .. } if disk.for_swap => Err(anyhow!(
                "no disk was made: swap has no origin; its pages are worth nothing once the machine has ended"
            )),
            Request::CreateOver { disk, origin } => {
                self.create_over(&disk, &origin).context("no disk was made").map(one)
            }
            Request::List => Ok(Reply::Disks(self.list())),
            Request::Show { name } => self.with(&name, |attached| Ok(one(attached.state(&name)))),
            Request::Change(change) => self.change(&change).map(one),
            Request::Recompress { name, idle_ms } => self.recompress(&name, idle_ms, asker),
            Request::Reset { name } => self.with(&name, |attached| {
                let disk = attached.pool(&name)?;
                let _claimed = attached.claim(&name)?;
                disk.reset();
                Ok(Reply::Done)
            }),
            Request::Reclaim { name, bytes, incompressible } => {
                let leaving = if incompressible { Leaving::Incompressible } else { Leaving::Oldest };
                self.reclaim(&name, bytes, leaving, asker)
            }
            Request::Remove { name, force } => self.remove(&name, force).map(|()| Reply::Done),
        };
        reply.unwrap_or_else(|error| Reply::Failed { why: why(&error) })
    }
}

/// A disk that could not be ended.
struct Stays {
    attached: Attached,
    why: anyhow::Error,
}

impl Stays {
    fn new(name: &str, attached: Attached, why: anyhow::Error) -> Box<Stays> {
        Box::new(Stays { attached, why: why.context(format!("disk {name} cannot be ended")) })
    }
}

impl Attached {
    /// Nobody may use it, nor begin to, while it is taken away, emptied or made smaller.
    fn claim(&self, name: &str) -> anyhow::Result<Claimed> {
        self.wire.claim().with_context(|| format!("disk {name} stays as it is"))
    }

    /// Ends it, and what it has beside its transport.
    fn end_claimed(self, name: &str, claimed: Claimed) -> Result<(), Box<Stays>> {
        let Err(not) = self.wire.end_claimed(claimed) else { return Ok(()) };
        Err(Stays::new(name, Attached { wire: not.wire, ..self }, not.why))
    }

    /// The same, with NBD clients cut off.
    fn end_by_force(self, name: &str) -> Result<(), Box<Stays>> {
        let Err(not) = self.wire.end_by_force() else { return Ok(()) };
        Err(Stays::new(name, Attached { wire: not.wire, ..self }, not.why))
    }

    /// What it keeps of what is elsewhere, at most.
    fn cache_bytes(&self) -> u64 {
        if let Shows::Origin(origin) = &self.shows { origin.memory_bytes() } else { 0 }
    }

    /// The disk, whose contents are the server's.
    fn pool(&self, name: &str) -> anyhow::Result<&Arc<Disk>> {
        match &self.shows {
            Shows::Pool(disk) => Ok(disk),
            Shows::Origin(origin) => {
                bail!("disk {name} stays as it is: size and contents are those of {}", origin.state().path)
            }
        }
    }

    /// Smaller only while nobody uses it.
    fn resize(&self, name: &str, size_bytes: u64) -> anyhow::Result<()> {
        let disk = self.pool(name)?;
        refuse_no_size(size_bytes)?;
        if let Some(why) = self.wire.fixed_size() {
            return Err(why.context(format!("disk {name} stays as it is")));
        }
        let _claimed = (size_bytes < disk.size_bytes()).then(|| self.claim(name)).transpose()?;
        if self.for_swap && size_bytes > disk.size_bytes() {
            disk.pool().prepare(size_bytes / BLOCK_BYTES as u64)?;
        }
        // What has no device any more, or cannot tell its users, stays as they know it.
        disk.resize_if(size_bytes, || self.wire.resized())?
    }

    fn state(&self, name: &str) -> DiskState {
        let (stats, latency) = match &self.shows {
            Shows::Pool(disk) => {
                let (stats, latency) = (disk.stats(), disk.pool().latency());
                let stats = TABLE.iter().map(|stat| (stat.name.to_owned(), (stat.value)(&stats))).collect();
                (stats, Latencies { reads: durations(&latency.reads), writes: durations(&latency.writes) })
            }
            Shows::Origin(origin) => (origin.stats().collect(), Latencies::default()),
        };
        let (how, after) = match &self.shows {
            Shows::Pool(_) => (HowRecompress::Is(self.recompress.level), self.recompress.after),
            Shows::Origin(origin) => (HowRecompress::of(origin.recompress()), origin.recompress().after),
        };
        DiskState {
            name: name.to_owned(),
            at: self.wire.at(),
            codec: self.codec.to_string(),
            recompress: how.to_string(),
            recompress_after_ms: after.as_millis() as u64,
            for_swap: self.for_swap,
            backing: self.backing.as_ref().map(DiskBacking::state),
            origin: match &self.shows {
                Shows::Pool(_) => None,
                Shows::Origin(origin) => Some(origin.state()),
            },
            stats,
            latency,
        }
    }
}

/// What all who are here can have.
fn memory_here() -> u64 {
    cgroup::memory_limit().map_or(u64::MAX, |limit| limit.bytes).min(ram_bytes())
}

/// What was said of cold blocks.
#[derive(Clone, Copy)]
struct Told {
    how: Option<HowRecompress>,
    after: Option<Duration>,
}

impl Told {
    fn of(how: Option<&str>, after_ms: Option<u64>) -> anyhow::Result<Told> {
        Ok(Told { how: how.map(str::parse).transpose()?, after: after_ms.map(Duration::from_millis) })
    }

    /// What it makes of what a disk in RAM does, which is `untold` where nothing was ever said.
    fn of_pool(self, there: Recompress, untold: Recompress) -> Recompress {
        let level = match self.how {
            None => there.level,
            Some(HowRecompress::Auto) => untold.level,
            Some(HowRecompress::Is(level)) => level,
        };
        Recompress { level, after: self.after.unwrap_or(there.after) }
    }

    /// What it makes of what a cache does.
    fn of_cache(self, there: compcache_cache::Recompress) -> compcache_cache::Recompress {
        self.how.unwrap_or(HowRecompress::of(there)).of_cache(self.after.or(Some(there.after)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_nobody_chose_is_free_and_says_what_for() {
        let leaves = || Leaves { at: String::new(), cache_bytes: 0 };
        let mut disks = Named::default();
        assert_eq!(disks.name_for(None, true).unwrap(), "swap0");
        disks.leaving.insert("swap0".into(), leaves());
        disks.coming.insert("swap1".into(), Comes { cache_bytes: 1 << 20, is_started: false });
        assert_eq!(disks.name_for(None, true).unwrap(), "swap2");
        assert_eq!(disks.name_for(None, false).unwrap(), "disk0");
        for (name, why) in [("swap0", "being removed"), ("swap1", "being made")] {
            assert!(disks.name_for(Some(name), true).unwrap_err().to_string().contains(why));
            assert!(disks.not_there(name).to_string().contains(why));
        }
        assert_eq!(disks.cache_bytes(), 1 << 20, "those that are being made count");
    }

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
