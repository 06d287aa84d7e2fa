//! When a machine has more in use than fits, however well it is compressed: the kernel is told to choose whom it ends.
//!
//! A page that is refused stays in memory, and the kernel tries another. Between them it drops the text of programs, which is
//! read again at once, and takes that for progress: its OOM killer stays quiet for minutes in which nobody else gets
//! anything done. A full zram is known for the same. The server knows that it refuses, and its memory is locked, so it
//! can see to it: as a person at the console would, it asks for the OOM killer (SysRq f, `/proc/sysrq-trigger`), which
//! chooses by the kernel's own rules, `oom_score_adj` included, and never the server.
//!
//! It asks, while there is a disk for swap, when all of this held for one window:
//!
//! | sign                                                             | else                                         |
//! |------------------------------------------------------------------|----------------------------------------------|
//! | disks for swap refused more writes, or took pages late, than they took at once, or whoever fills the reserve got no memory all the time | there is room yet: slow, but it goes on |
//! | hardly any memory is available                                   | only a memory cgroup is short, or a limit is |
//! | nobody got anything done for much of the time (PSI, `full`)      | whoever waits holds up nobody else           |
//!
//! A kernel without PSI is asked on the other two alone, after more windows. Then a window goes by for whoever was chosen to end.
//!
//! Evidence: `swap::a_hog_..` in crates/compcache/tests/e2e.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use compcache_block::Disk;
use compcache_cache::pressure::Pressure;

use crate::run::say;

/// Between two looks.
pub const WINDOW: Duration = Duration::from_secs(3);
/// Of a window, what nobody got anything done in.
const STALLED: Duration = Duration::from_millis(1200);
/// Less than this share of the RAM is hardly any.
pub const AVAILABLE_SHARE: u64 = 20;
/// So many windows in a row, where the kernel does not say how long anybody waited.
const WINDOWS_WITHOUT_PSI: u32 = 4;

/// The disks that the machine swaps to.
#[derive(Clone, Default)]
pub struct SwapDisks(Arc<Mutex<Vec<Weak<Disk>>>>);

impl SwapDisks {
    /// Watches this one, too, until it is dropped.
    pub fn add(&self, disk: &Arc<Disk>) {
        let mut disks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        disks.retain(|disk| disk.strong_count() > 0);
        disks.push(Arc::downgrade(disk));
    }

    /// Whether there is any.
    pub fn is_any(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|disk| disk.strong_count() > 0)
    }

    /// Pages taken and writes refused so far, by those that are there. A page that was taken after it had waited for memory for some
    /// time counts as refused: where most do, it is as good as none.
    fn taken_and_refused(&self) -> (u64, u64) {
        let disks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        disks.iter().filter_map(Weak::upgrade).fold((0, 0), |(taken, refused), disk| {
            let (late, stats) = (disk.late_writes(), disk.stats());
            (taken + stats.num_writes.saturating_sub(late), refused + stats.failed_writes + late)
        })
    }
}

/// Starts the thread that looks for overload, for ever. Whoever fills the reserve says for how long he `waits_for_memory`.
///
/// # Errors
/// The kernel cannot be asked (no `/proc/sysrq-trigger`, as in containers), or no thread can be had.
pub fn start_watching(
    disks: SwapDisks,
    waits_for_memory: impl Fn() -> Duration + Send + 'static,
) -> anyhow::Result<()> {
    let mut overload = Overload::open()?;
    let watch = move || {
        loop {
            thread::sleep(WINDOW);
            // Without swap of ours it is not our business.
            if !disks.is_any() {
                overload.watch = Watch::default();
                continue;
            }
            let (taken, refused) = disks.taken_and_refused();
            if overload.asks(taken, refused, waits_for_memory() >= WINDOW) {
                say(
                    "compcache: the machine has more in use than fits, even compressed: asked the kernel's OOM killer to choose\n",
                );
            }
        }
    };
    let thread = thread::Builder::new().name("overload".into()).spawn(watch);
    thread.map(drop).context("cannot start the thread that looks for overload")
}

/// Looks at the machine, and asks for its OOM killer.
pub struct Overload {
    trigger: File,
    pressure: Pressure,
    watch: Watch,
}

impl Overload {
    /// Opens what is looked at.
    ///
    /// # Errors
    /// The kernel cannot be asked (no `/proc/sysrq-trigger`, as in containers).
    pub fn open() -> anyhow::Result<Overload> {
        const TRIGGER: &str = "/proc/sysrq-trigger";
        let trigger = OpenOptions::new().write(true).open(TRIGGER).with_context(|| format!("cannot open {TRIGGER}"))?;
        let pressure = Pressure::open().context("cannot open /proc/meminfo")?;
        Ok(Overload { trigger, pressure, watch: Watch::default() })
    }

    /// At the end of each [`WINDOW`], with what disks for swap have taken and refused so far: asks if it is overload. Whether it was asked.
    pub fn asks(&mut self, taken: u64, refused: u64, is_starved: bool) -> bool {
        let signs = Signs {
            taken,
            refused,
            is_starved,
            is_short: self.pressure.memory().is_some_and(|memory| memory.is_below(AVAILABLE_SHARE)),
            stalled: self.pressure.stalled().map(|stalled| stalled.full),
        };
        self.watch.is_overload(&signs) && self.trigger.write_all_at(b"f", 0).is_ok()
    }
}

/// What is seen at the end of a window.
struct Signs {
    /// Count up.
    taken: u64,
    refused: u64,
    is_starved: bool,
    is_short: bool,
    /// Counts up; `None` where the kernel does not say.
    stalled: Option<Duration>,
}

/// Whether it is overload, one window after the other.
#[derive(Default)]
struct Watch {
    taken: u64,
    refused: u64,
    stalled: Duration,
    /// Windows in a row that looked like it.
    bad: u32,
}

impl Watch {
    fn is_overload(&mut self, signs: &Signs) -> bool {
        // Either may be less than before, if a disk has gone.
        let refused = signs.refused.saturating_sub(self.refused);
        let is_refused = refused > signs.taken.saturating_sub(self.taken);
        let waited = signs.stalled.map(|stalled| stalled.saturating_sub(self.stalled) >= STALLED);
        (self.taken, self.refused) = (signs.taken, signs.refused);
        self.stalled = signs.stalled.unwrap_or_default();
        let is_bad = (is_refused || signs.is_starved) && signs.is_short && waited.unwrap_or(true);
        self.bad = if is_bad { self.bad + 1 } else { 0 };
        // The first window is not whole, and the one after somebody was ended is his.
        let needed = if waited.is_some() { 2 } else { WINDOWS_WITHOUT_PSI };
        let overload = self.bad >= needed;
        if overload {
            self.bad = 0;
        }
        overload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn signs(refused: u64, is_short: bool, stalled: Option<u32>) -> Signs {
        Signs {
            taken: 100 * refused,
            refused: 101 * refused,
            is_starved: false,
            is_short,
            stalled: stalled.map(|seconds| seconds * SECOND),
        }
    }

    #[test]
    fn all_signs_together_for_two_windows_are_overload_and_the_next_are_for_its_end() {
        let mut watch = Watch::default();
        let told: Vec<_> = (1..=6).map(|n| watch.is_overload(&signs(u64::from(n), true, Some(2 * n)))).collect();
        assert_eq!(told, [false, true, false, true, false, true]);
    }

    #[test]
    fn one_sign_missing_is_no_overload() {
        let unless: [fn(u32) -> Signs; 4] = [
            |n| signs(1, true, Some(2 * n)),
            |n| Signs { taken: 101 * u64::from(n), ..signs(u64::from(n), true, Some(2 * n)) },
            |n| signs(u64::from(n), false, Some(2 * n)),
            |n| signs(u64::from(n), true, Some(n)),
        ];
        for (missing, make) in unless.iter().enumerate() {
            let mut watch = Watch::default();
            watch.is_overload(&make(1));
            assert!((2..20).all(|n| !watch.is_overload(&make(n))), "{missing}");
        }
    }

    #[test]
    fn a_machine_that_gives_no_memory_at_all_refuses_nothing_and_is_overloaded() {
        let mut watch = Watch::default();
        let starved = |n: u32| Signs { taken: 7, refused: 5, is_starved: true, ..signs(0, true, Some(2 * n)) };
        let told: Vec<_> = (1..=5).map(|n| watch.is_overload(&starved(n))).collect();
        assert_eq!(told, [false, true, false, true, false]);
        assert!((6..20).all(|n| !watch.is_overload(&Signs { is_starved: false, ..starved(n) })));
    }

    #[test]
    fn a_kernel_that_says_nothing_of_waiting_is_given_longer() {
        let mut watch = Watch::default();
        let told: Vec<_> = (1..=8).map(|n| watch.is_overload(&signs(n, true, None))).collect();
        assert_eq!(told, [false, false, false, true, false, false, false, true]);
    }
}
