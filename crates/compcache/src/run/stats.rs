//! The statistics of a run, as `--stats` writes them and the summary tells them.

use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, bail};
use compcache_pager::shared::{Counters, LATENCY_BUCKETS, Region, RunCodec, Trouble, bucket_floor_ns};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, Stat, openat, renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use serde::Serialize;

use crate::run::children::max_rss_bytes;
use crate::run::failure::say;
use crate::run::supervise::Outcome;

/// What a tree of processes holds and has done. Gauges are of now, peaks and counters since the start.
#[derive(Clone, Default, Serialize)]
#[cfg_attr(test, derive(Debug, PartialEq))]
pub struct Stats {
    /// `--ram`; 0 is none.
    pub ram_limit_bytes: u64,
    /// `--resident`; 0 is none.
    pub resident_limit_bytes: u64,
    /// Resident anonymous memory of all processes.
    pub resident_bytes: u64,
    /// Its highest sum.
    pub resident_peak_bytes: u64,
    /// Memory of ours in all processes: pools, staging, stacks.
    pub ours_bytes: u64,
    /// The highest sum of resident memory and ours.
    pub total_peak_bytes: u64,
    /// Processes that live.
    pub processes: u64,
    /// Processes since the start.
    pub processes_total: u64,
    /// Pages in the pools.
    pub pages_stored: u64,
    /// What they were before compression.
    pub orig_data_size_bytes: u64,
    /// What they are now.
    pub compr_data_size_bytes: u64,
    /// The pools' memory with its tables.
    pub mem_used_total_bytes: u64,
    /// Stored pages that repeat one word.
    pub same_pages: u64,
    /// Stored pages in groups of cold ones.
    pub grouped_pages: u64,
    /// The highest amount of data stored.
    pub orig_data_peak_bytes: u64,
    /// Its compressed size at that moment.
    pub compr_data_at_peak_bytes: u64,
    /// The pools' memory at that moment.
    pub mem_used_at_peak_bytes: u64,
    /// Faults answered.
    pub faults: u64,
    /// Of those, from the pool.
    pub faults_stored: u64,
    /// Pages that left a process for staging.
    pub evicted_pages: u64,
    /// Of those, the ones touched before they were compressed.
    pub refaults_staged: u64,
    /// Evicted pages that had not changed since they came back from the pool: they were not compressed again.
    pub unchanged_pages: u64,
    /// Evicted pages that had changed little since: only what had changed was stored.
    pub patched_pages: u64,
    /// Cold pages that were compressed again, in groups.
    pub recompressed_pages: u64,
    /// Pages brought back before they were asked for.
    pub readahead_pages: u64,
    /// Of those, the ones that saved a fault.
    pub readahead_hits: u64,
    /// Pages in spill files, and not in the pool.
    pub spilled_pages: u64,
    /// The most of them at a time.
    pub spilled_pages_peak: u64,
    /// Bytes of spill files in use.
    pub spill_bytes: u64,
    /// The most of them at a time.
    pub spill_peak_bytes: u64,
    /// Pages written to spill files.
    pub spill_written_pages: u64,
    /// Pages read from them.
    pub spill_read_pages: u64,
    /// Median of the time from when the pager heard of a fault to its answer, what others took that it heard of together with that one included, at most a fifth less.
    pub fault_p50_ns: u64,
    /// 99 of 100 faults took no longer, as above.
    pub fault_p99_ns: u64,
    /// Since the start, seconds.
    pub wall_s: f64,
    /// For how long processes were held up, since more memory came than could leave, seconds.
    pub held_s: f64,
    /// The pools' codec is zstd.
    #[serde(skip)]
    pub is_zstd: bool,
    /// The program's status as a shell shows it, at the end.
    pub exit_status: Option<i32>,
    /// At the end: the largest resident memory of one process at a time, file pages and shared memory included.
    pub max_rss_bytes: u64,
    /// The program has ended.
    pub finished: bool,
    /// Processes that copied themselves without fork handlers and went on unpaged.
    pub unpaged_copies: u64,
    /// What went wrong in some process; the first trouble stays.
    pub trouble: Option<String>,
}

impl Stats {
    /// What the region says now.
    pub fn gather(region: &Region, wall: Duration, outcome: Option<Outcome>) -> Self {
        let now = region.totals();
        let header = &region.header;
        let sum = |counter: fn(&Counters) -> &AtomicU64| {
            let living = region.living().map(|slot| counter(&slot.counters).load(Relaxed));
            living.sum::<u64>() + counter(&header.retired).load(Relaxed)
        };
        let faults_of = fault_histogram(region);
        Self {
            ram_limit_bytes: header.ram_limit_bytes.load(Relaxed),
            resident_limit_bytes: header.resident_limit_bytes.load(Relaxed),
            resident_bytes: now.resident_bytes,
            resident_peak_bytes: header.resident_peak_bytes.load(Relaxed),
            ours_bytes: now.ours_bytes,
            total_peak_bytes: header.total_peak_bytes.load(Relaxed),
            processes: now.processes,
            processes_total: header.processes_total.load(Relaxed),
            pages_stored: now.pages_stored,
            orig_data_size_bytes: now.orig_data_bytes,
            compr_data_size_bytes: now.compr_data_bytes,
            mem_used_total_bytes: now.mem_used_total_bytes,
            same_pages: now.same_pages,
            grouped_pages: now.grouped_pages,
            orig_data_peak_bytes: header.orig_data_peak_bytes.load(Relaxed),
            compr_data_at_peak_bytes: header.compr_data_at_peak_bytes.load(Relaxed),
            mem_used_at_peak_bytes: header.mem_used_at_peak_bytes.load(Relaxed),
            faults: sum(|counters| &counters.faults),
            faults_stored: sum(|counters| &counters.faults_stored),
            evicted_pages: sum(|counters| &counters.evicted_pages),
            refaults_staged: sum(|counters| &counters.refaults_staged),
            unchanged_pages: sum(|counters| &counters.unchanged_pages),
            patched_pages: sum(|counters| &counters.patched_pages),
            recompressed_pages: sum(|counters| &counters.recompressed_pages),
            readahead_pages: sum(|counters| &counters.readahead_pages),
            readahead_hits: sum(|counters| &counters.readahead_hits),
            spilled_pages: now.spilled_pages,
            spilled_pages_peak: header.spilled_pages_peak.load(Relaxed),
            spill_bytes: now.spill_bytes,
            spill_peak_bytes: header.spill_peak_bytes.load(Relaxed),
            spill_written_pages: sum(|counters| &counters.spill_written_pages),
            spill_read_pages: sum(|counters| &counters.spill_read_pages),
            fault_p50_ns: quantile_ns(&faults_of, 0.50),
            fault_p99_ns: quantile_ns(&faults_of, 0.99),
            wall_s: wall.as_secs_f64(),
            held_s: Duration::from_nanos(header.held_ns.load(Relaxed)).as_secs_f64(),
            is_zstd: header.codec.load(Relaxed) == RunCodec::Zstd as u32,
            exit_status: outcome.map(Outcome::status),
            max_rss_bytes: if outcome.is_some() { max_rss_bytes() } else { 0 },
            finished: outcome.is_some(),
            unpaged_copies: header.unpaged_copies.load(Relaxed),
            trouble: trouble(header.trouble.load(Relaxed), header.trouble_errno.load(Relaxed)),
        }
    }
}

fn fault_histogram(region: &Region) -> [u64; LATENCY_BUCKETS] {
    let mut sum = [0; LATENCY_BUCKETS];
    let living = region.living().map(|slot| &slot.counters);
    for counters in living.chain([&region.header.retired]) {
        for (bucket, count) in sum.iter_mut().zip(&counters.fault_ns) {
            *bucket += count.load(Relaxed);
        }
    }
    sum
}

/// The latency that `share` of all faults did not exceed by more than a bucket; 0 without faults.
fn quantile_ns(buckets: &[u64; LATENCY_BUCKETS], share: f64) -> u64 {
    let wanted = (buckets.iter().sum::<u64>() as f64 * share).ceil() as u64;
    let mut seen = 0;
    let bucket = buckets.iter().position(|count| {
        seen += count;
        seen >= wanted
    });
    if wanted == 0 { 0 } else { bucket.map_or(0, bucket_floor_ns) }
}

/// What the header's trouble means.
fn trouble(trouble: u32, errno: u32) -> Option<String> {
    const ALL: [Trouble; 14] = [
        Trouble::NoUserfaultfd,
        Trouble::NoMemory,
        Trouble::NoEvictionWay,
        Trouble::NoThread,
        Trouble::LostPage,
        Trouble::Bug,
        Trouble::NoProc,
        Trouble::Devices,
        Trouble::NotMeant,
        Trouble::Sanitizer,
        Trouble::Filter,
        Trouble::Changes,
        Trouble::Regions,
        Trouble::Slots,
    ];
    if trouble == 0 {
        return None;
    }
    let known = ALL.into_iter().find(|known| *known as u32 == trouble);
    let what = match known {
        Some(Trouble::NoUserfaultfd) => "a process ran unpaged: userfaultfd was refused",
        Some(Trouble::NoMemory) => {
            "a process ran unpaged: memory for the pager was refused; a limit on address space (ulimit -v) counts what is \
             only reserved, and programs under valgrind get none"
        }
        Some(Trouble::NoEvictionWay) => "a process ran unpaged: the kernel lacks what the eviction way needs",
        Some(Trouble::NoThread) => {
            "a process ran unpaged: the pager's thread could not be started; under an emulator such as qemu-user it cannot"
        }
        Some(Trouble::Devices) => {
            "nothing more was evicted from a process that uses O_DIRECT or io_uring: before Linux 6.8, and where files are \
             on NFS or Ceph, nobody can tell which of its pages are written to"
        }
        Some(Trouble::NotMeant) => {
            "a process was ended: it changed its mappings in the instant in which pages left, and was not to get wrong \
             bytes; Linux 6.8 and newer rule this out"
        }
        Some(Trouble::NoProc) => "a process ran unpaged: /proc is not mounted or not readable there",
        Some(Trouble::Sanitizer) => {
            "a process ran unpaged: it was built with a sanitizer (-fsanitize=address, leak, memory or thread), whose runtime does not bear a pager beside it"
        }
        Some(Trouble::Filter) => {
            "a process went on unpaged: it set a filter on the system calls of all its threads (seccomp) that forbids what paging takes"
        }
        Some(Trouble::Changes) => {
            "a process was ended: while a copy of it was being made (fork) its other threads changed mappings thousands of times"
        }
        Some(Trouble::Regions) => {
            "a process was paged in part: it had memory in more than 16384 places at a time, and what came after that stays resident"
        }
        Some(Trouble::Slots) => {
            "more than 1024 processes were paged at a time: what those beyond held is in none of these numbers"
        }
        Some(Trouble::LostPage) => "a process was ended: a stored page was damaged, and it was not to get wrong bytes",
        Some(Trouble::Bug) => "a process was ended: compcache has a bug, please report it",
        None => "a process had a trouble this version does not know",
    };
    Some(match errno {
        0 => what.into(),
        line if matches!(known, Some(Trouble::Bug | Trouble::LostPage | Trouble::NotMeant | Trouble::Changes)) => {
            format!("{what} (at line {line})")
        }
        errno => {
            let errno = Errno::from_raw_os_error(errno as i32);
            let remedy = match known {
                // Who started it has it: else nothing would have been started.
                Some(Trouble::NoUserfaultfd) if errno == Errno::NOSYS => {
                    "; the kernel has it, so what stands between answered: an emulator of system calls, whose programs cannot be paged, or a filter"
                }
                Some(Trouble::NoUserfaultfd) => {
                    "; if it changed its user, that user needs it: by sysctl vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd"
                }
                _ => "",
            };
            format!("{what} ({errno}){remedy}")
        }
    })
}

/// The file of `--stats`, replaced as a whole each time, so that a reader never sees half of it.
pub struct StatsFile {
    path: PathBuf,
    /// The one that was meant: whoever may rename it, or one above it, has nothing written elsewhere.
    directory: OwnedFd,
    name: OsString,
    temporary: OsString,
    /// What was there before: who may read that may read what replaces it.
    before: Option<Stat>,
    failed: Option<io::Error>,
}

impl StatsFile {
    /// Makes sure that `path` can be written, before the program starts.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let Some(name) = path.file_name() else { bail!("--stats {}: not a file's name", path.display()) };
        let why = || format!("--stats {}: cannot write there, name a file in a directory of yours", path.display());
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty()).with_context(why)?;
        // Not what a link leads to: it is the link that would be replaced, which may be /dev/stdout.
        let before = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).ok();
        match before.map(|there| FileType::from_raw_mode(there.st_mode)) {
            Some(FileType::Symlink) => bail!(
                "--stats {}: is a link, which would be replaced; name the file that it leads to, or one that does not exist yet",
                path.display()
            ),
            Some(kind) if kind != FileType::RegularFile => bail!(
                "--stats {}: is not a file, and would be replaced; name a file, or one that does not exist yet",
                path.display()
            ),
            _ => {}
        }
        let mut temporary = OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}", std::process::id()));
        let file = Self { path: path.to_owned(), directory, name: name.to_owned(), temporary, before, failed: None };
        file.write_anew("").and_then(|()| file.try_replacing()).with_context(why)?;
        Ok(file)
    }

    /// Finds out whether what is there can be replaced: something may be mounted on it, or it may be another user's where that is not allowed. It stays
    /// as it is. A file system that cannot do this tells nothing.
    fn try_replacing(&self) -> io::Result<()> {
        let swap =
            || renameat_with(&self.directory, &self.temporary, &self.directory, &self.name, RenameFlags::EXCHANGE);
        match self.before.map(|_| swap().and_then(|()| swap())) {
            None | Some(Ok(()) | Err(Errno::INVAL | Errno::NOSYS)) => Ok(()),
            Some(Err(error)) => Err(error.into()),
        }
    }

    /// Replaces the file. A failure is kept for [`StatsFile::complain`]: the program is not to suffer from it.
    pub fn write(&mut self, stats: &Stats) {
        let mut text = serde_json::to_string_pretty(stats).expect("numbers and words are always JSON");
        text.push('\n');
        let replace = || renameat(&self.directory, &self.temporary, &self.directory, &self.name);
        self.failed = self.write_anew(&text).and_then(|()| Ok(replace()?)).err();
    }

    /// Writes a file that is new: in a directory of many users a link could be there, to a file of ours.
    fn write_anew(&self, text: &str) -> io::Result<()> {
        self.remove_temporary();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(if self.before.is_some() { 0o600 } else { 0o666 });
        let mut file = File::from(openat(&self.directory, &self.temporary, flags, mode)?);
        let Some(before) = &self.before else { return file.write_all(text.as_bytes()) };
        // Nobody but root can give files away.
        let _ = fchown(&file, Some(before.st_uid), Some(before.st_gid));
        file.set_permissions(Permissions::from_mode(before.st_mode & 0o777))?;
        file.write_all(text.as_bytes())
    }

    fn remove_temporary(&self) {
        let _ = unlinkat(&self.directory, &self.temporary, AtFlags::empty());
    }

    /// Says if the last write failed.
    pub fn complain(&self) {
        if let Some(error) = &self.failed {
            say(&format!("compcache: the statistics in {} are not the last ones: {error}\n", self.path.display()));
        }
    }
}

impl Drop for StatsFile {
    fn drop(&mut self) {
        // Exists only if the last rename failed or none was made.
        self.remove_temporary();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn every_field_is_told_of_in_the_documents() {
        let told = include_str!("../../../../docs/stats.md");
        let fields = serde_json::to_value(Stats::default()).unwrap();
        let untold: Vec<_> =
            fields.as_object().unwrap().keys().filter(|field| !told.contains(&format!("| `{field}` |"))).collect();
        assert!(untold.is_empty(), "{untold:?}");
    }

    #[test]
    fn statistics_are_not_written_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, path) = (dir.path().join("victim"), dir.path().join("stats"));
        let plant = || std::os::unix::fs::symlink(&victim, dir.path().join(format!(".stats.{}", std::process::id())));
        fs::write(&victim, "kept").unwrap();
        plant().unwrap();
        let mut file = StatsFile::create(&path).unwrap();
        fs::remove_file(dir.path().join(&file.temporary)).unwrap();
        plant().unwrap();
        file.write(&Stats::default());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }

    #[test]
    fn a_directory_that_takes_the_place_of_the_one_that_was_meant_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let [meant, moved, victim] = ["meant", "moved", "victim"].map(|name| dir.path().join(name));
        fs::create_dir(&meant).unwrap();
        fs::create_dir(&victim).unwrap();
        let mut file = StatsFile::create(&meant.join("stats")).unwrap();
        fs::rename(&meant, &moved).unwrap();
        std::os::unix::fs::symlink(&victim, &meant).unwrap();
        file.write(&Stats::default());
        drop(file);
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
        assert!(fs::read_to_string(moved.join("stats")).unwrap().starts_with('{'));
    }

    #[test]
    fn what_is_no_file_is_not_replaced_and_a_file_keeps_who_may_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link, descriptor) = (dir.path().join("file"), dir.path().join("link"), dir.path().join("stdout"));
        fs::write(&file, "kept").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        std::os::unix::fs::symlink("/proc/self/fd/1", &descriptor).unwrap();
        for (path, word) in [(&link, "link"), (&descriptor, "link"), (&dir.path().into(), "not a file")] {
            let refused = StatsFile::create(path).err().expect("it would be replaced").to_string();
            assert!(refused.contains(word), "{refused}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
        assert_eq!(fs::read_to_string(&link).unwrap(), "kept");
        for mode in [0o600, 0o644, 0o640] {
            fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            let before = fs::read_to_string(&file).unwrap();
            drop(StatsFile::create(&file).unwrap());
            assert_eq!(fs::read_to_string(&file).unwrap(), before, "nothing was written");
            StatsFile::create(&file).unwrap().write(&Stats::default());
            assert!(fs::read_to_string(&file).unwrap().starts_with('{'));
            assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, mode);
        }
    }

    #[test]
    fn a_quantile_is_the_floor_of_its_bucket() {
        let mut buckets = [0; LATENCY_BUCKETS];
        assert_eq!(quantile_ns(&buckets, 0.5), 0);
        buckets[20] = 98;
        buckets[30] = 1;
        buckets[40] = 1;
        assert_eq!(quantile_ns(&buckets, 0.50), bucket_floor_ns(20));
        assert_eq!(quantile_ns(&buckets, 0.98), bucket_floor_ns(20));
        assert_eq!(quantile_ns(&buckets, 0.99), bucket_floor_ns(30));
        assert_eq!(quantile_ns(&buckets, 1.0), bucket_floor_ns(40));
    }

    #[test]
    fn trouble_is_told_with_its_errno() {
        assert_eq!(trouble(0, 0), None);
        let told = trouble(Trouble::NoUserfaultfd as u32, 1).unwrap();
        assert!(told.contains("userfaultfd was refused (") && told.contains("permitted"), "{told}");
        assert!(told.contains("changed its user") && told.contains("vm.unprivileged_userfaultfd=1"), "{told}");
        let told = trouble(Trouble::NoUserfaultfd as u32, Errno::NOSYS.raw_os_error() as u32).unwrap();
        assert!(told.contains("emulator") && !told.contains("changed its user"), "{told}");
        assert!(trouble(Trouble::LostPage as u32, 0).unwrap().ends_with("wrong bytes"));
    }
}
