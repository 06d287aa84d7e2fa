//! The registrar: reads the map of the process and registers what has come since the last time.
//!
//! A mapping must be registered as a whole or not at all. The kernel splits one that is registered in part: the program
//! cannot move it then (mremap: EFAULT), and if pages come to both parts while they differ, it never joins them again. But
//! the map may change between its reading and the registering. So each mapping is asked for by itself right before it is
//! registered (PROCMAP_QUERY, Linux 6.11), a microsecond where the reading of a map takes hundreds; and the map is read again
//! at once, for what was missed.

use crate::events;
use crate::maps::{self, Found, Mapping, MapsBuffer};
use crate::memory::{PAGE, boxed_zeroed};
use crate::pager::{Channel, Pager, REGIONS_MAX, State};
use crate::regions::Ranges;
use crate::shared::Trouble;
use crate::table::PAGES;
use alloc::boxed::Box;
use core::ops::Range;
use core::sync::atomic::Ordering::Acquire;
use rustix::fd::BorrowedFd;
use rustix::mm::MprotectFlags;

/// Ranges smaller than this are left alone.
const REGION_BYTES_MIN: usize = 16 << 10;
/// Times that the map is read before something is registered, if events that are not applied yet make it worthless.
const TRIES: u32 = 4;
/// Times that what was found is registered, and the map read again, with the lock held.
const ROUNDS: u32 = 2;

/// What the registrar works with.
pub struct Registrar {
    maps: Box<MapsBuffer>,
    found: Box<Ranges<REGIONS_MAX>>,
    fresh: Box<Ranges<REGIONS_MAX>>,
    /// The kernel cannot be asked for a single mapping.
    without_query: bool,
}

/// How far the registrar came.
#[derive(PartialEq, Eq)]
pub enum Registered {
    /// All that the map showed is registered.
    All,
    /// The map kept changing: a mapping may be registered in part.
    Part,
    /// Nothing was tried: a copy of the process is being made.
    Frozen,
}

impl Registrar {
    pub fn new() -> Registrar {
        // SAFETY: bytes and pairs of numbers are valid when zero.
        let (maps, found, fresh) = unsafe { (boxed_zeroed(), boxed_zeroed(), boxed_zeroed()) };
        Registrar { maps, found, fresh, without_query: false }
    }

    /// From now on does without what kernels before Linux 6.11 do not have.
    pub fn use_old_maps(&mut self) {
        self.without_query = true;
    }

    /// The buffer for reading maps, which is the registrar's only while it registers.
    pub fn buffer(&mut self) -> &mut MapsBuffer {
        &mut self.maps
    }

    /// What is there, as anonymous mappings, of the regions; `None` where that is too much to hold. For when the map does not change.
    pub fn anonymous_of(
        &mut self,
        maps: BorrowedFd<'_>,
        regions: &Ranges<REGIONS_MAX>,
    ) -> Option<&Ranges<REGIONS_MAX>> {
        self.found.clear();
        let found = &mut self.found;
        maps::for_each(maps, &mut self.maps, |mapping| {
            let range = mapping.start..mapping.end;
            if mapping.anonymous && regions.overlaps(&range) {
                found.add(range);
            }
        });
        (!self.found.has_lost()).then_some(&*self.found)
    }

    /// Registers what the map shows and is not among the regions yet.
    pub fn register(&mut self, pager: &Pager, channel: &Channel, maps: BorrowedFd<'_>) -> Registered {
        for _ in 0..TRIES {
            let (found, mut candidates) = (&mut self.found, Candidates::default());
            found.clear();
            maps::for_each(maps, &mut self.maps, |mapping| _ = candidates.take(pager, &mapping, found));
            let mut state = pager.state.lock();
            if pager.frozen.load(Acquire) {
                return Registered::Frozen;
            }
            if candidates.has_code && !state.staging.has_code() && pager.code.open(channel) {
                state.staging.add_code(pager.code.start());
            }
            // What is registered and not held would be taken for new, and what is stored of it for nobody's.
            if state.regions.has_lost() {
                pager.region.note_trouble(Trouble::Regions, 0);
                return Registered::All;
            }
            // What is moved and not applied yet would be taken for new.
            if !pager.is_settled(&state) {
                continue;
            }
            for round in 1..=ROUNDS {
                if self.register_found(channel, &state.regions, maps, round == ROUNDS) && self.fresh.len() == 0 {
                    return Registered::All;
                }
                self.take_fresh(pager, channel, &mut state, maps);
            }
            return Registered::Part;
        }
        Registered::Part
    }

    /// Registers what is new of what was found. False when some of it is not as it was found: such a mapping is left to the next
    /// round, but in the last one registered as it was found, for one that grows all the time would never be.
    fn register_found(
        &mut self,
        channel: &Channel,
        regions: &Ranges<REGIONS_MAX>,
        maps: BorrowedFd<'_>,
        is_last: bool,
    ) -> bool {
        self.fresh.clear();
        let Registrar { found, fresh, without_query, .. } = self;
        let mut ask = |at| {
            let asked = if *without_query { None } else { maps::covering_or_next(maps, at) };
            *without_query = asked.is_none();
            asked
        };
        let mut is_all = true;
        for range in found.iter() {
            for_each_unknown(regions, range, |new| {
                for_each_whole(new, &mut ask, |part, now| {
                    let register = || channel.uffd.register(part.start, part.end - part.start).is_ok();
                    let is_registered = match now {
                        Now::AsFound => register(),
                        // It may have grown: what mremap adds to a registered mapping is so too.
                        Now::Larger => channel.is_registered(part.start) || is_last && register(),
                        Now::Another => false,
                    };
                    is_all &= now == Now::AsFound || is_registered;
                    if is_registered {
                        fresh.add(part);
                    }
                });
            });
        }
        is_all
    }

    /// Takes among the regions what was registered just now, and finds what there is besides.
    ///
    /// The map was read before anything was registered. What was unmapped between was not announced, and what has been mapped
    /// there since is not registered: the kernel registers around it. Such a mapping cannot be joined with its neighbours, so each that the
    /// map shows now is registered as a whole or not at all, and asked for once. While the map is changing nothing is known.
    ///
    /// What is registered and must not be taken stays as it is: its missing pages are answered with zeroes, as they would be without us, and it does not
    /// leave. (It may be what was moved from another place, which is not told yet: to unregister it would lose its pages.)
    fn take_fresh(&mut self, pager: &Pager, channel: &Channel, state: &mut State, maps: BorrowedFd<'_>) {
        let Registrar { found, fresh, .. } = self;
        let mut candidates = Candidates::default();
        found.clear();
        maps::for_each(maps, &mut self.maps, |mapping| {
            let may_be = candidates.take(pager, &mapping, found);
            let mut at = mapping.start;
            while at < mapping.end
                && let Some(piece) = fresh.at_or_after(at).filter(|piece| piece.start < mapping.end)
            {
                let part = piece.start.max(at)..piece.end.min(mapping.end);
                at = part.end;
                if may_be && channel.is_registered(part.start) {
                    // Nothing old may be kept of it.
                    events::forget_contents(pager, state, part.clone());
                    state.regions.add(part);
                }
            }
        });
    }
}

/// Where what the table can hold ends: a program that asks for it has memory above, where page tables have five levels.
const ADDRESSES_END: usize = PAGES as usize * PAGE;

/// Which mappings are to be registered, as the map shows them one after the other.
#[derive(Default)]
struct Candidates {
    found_end: usize,
    small: Range<usize>,
    /// Some of them may be executed.
    has_code: bool,
}

impl Candidates {
    /// The next mapping: adds it to `found` if it is writable and large enough. False when it must not be among the regions; one that was
    /// found may have become read-only since, and may.
    fn take(&mut self, pager: &Pager, mapping: &Mapping, found: &mut Ranges<REGIONS_MAX>) -> bool {
        let range = mapping.start..mapping.end;
        if !mapping.anonymous || range.end > ADDRESSES_END || pager.never.overlaps(&range) {
            return false;
        }
        let large = range.len() >= REGION_BYTES_MIN;
        // A small one beside a large one may be what is left of the same mapping, which is whole again when both are
        // registered.
        if mapping.writable && (large || range.start == self.found_end) {
            if self.small.end == range.start {
                found.add(self.small.clone());
            }
            self.found_end = range.end;
            self.has_code |= mapping.rights.contains(MprotectFlags::EXEC);
            found.add(range);
        } else if mapping.writable {
            self.small = range;
        }
        true
    }
}

/// Calls `each` with the parts of a range that are not among the regions.
fn for_each_unknown(regions: &Ranges<REGIONS_MAX>, range: Range<usize>, mut each: impl FnMut(Range<usize>)) {
    let mut at = range.start;
    while at < range.end {
        let known = regions.at_or_after(at).filter(|known| known.start < range.end);
        let (end, next) = match &known {
            Some(known) => (known.start.max(at), known.end.max(at)),
            None => (range.end, range.end),
        };
        if at < end {
            each(at..end);
        }
        at = next;
    }
}

/// What a mapping is now, compared with when it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Now {
    /// Private, anonymous, and no larger.
    AsFound,
    /// Private and anonymous, and it reaches over what was found.
    Larger,
    /// Shared, or of a file.
    Another,
}

/// Calls `each` with the parts of a range that one mapping covers, and what that is now. `ask` is [`maps::covering_or_next`]; where it knows nothing
/// the range is taken as it was found.
fn for_each_whole(
    range: Range<usize>,
    mut ask: impl FnMut(usize) -> Option<Found>,
    mut each: impl FnMut(Range<usize>, Now),
) {
    let mut at = range.start;
    while at < range.end {
        let (part, now) = match ask(at) {
            Some(Found::Mapping { range: mapping, private_anonymous }) if mapping.start < range.end => {
                let part = mapping.start.max(at)..mapping.end.min(range.end);
                let now = match private_anonymous {
                    true if part == mapping => Now::AsFound,
                    true => Now::Larger,
                    false => Now::Another,
                };
                (part, now)
            }
            Some(_) => return,
            None => (at..range.end, Now::AsFound),
        };
        at = part.end;
        each(part, now);
    }
}

#[cfg(test)]
mod tests {
    use super::Now::{Another, AsFound, Larger};
    use super::*;
    use alloc::vec::Vec;
    use compcache_testkit::features::{Feature, requires};

    /// What is said of a range, if these mappings are there.
    fn parts(range: Range<usize>, there: &[(Range<usize>, bool)]) -> Vec<(Range<usize>, Now)> {
        let ask = |at| {
            let found = there.iter().find(|(mapping, _)| mapping.end > at).cloned();
            Some(found.map_or(Found::Nothing, |(range, private_anonymous)| Found::Mapping { range, private_anonymous }))
        };
        let mut parts = Vec::new();
        for_each_whole(range, ask, |part, now| parts.push((part, now)));
        parts
    }

    #[test]
    fn only_a_whole_mapping_is_registered() {
        assert_eq!(
            parts(20..60, &[(10..20, true), (20..40, true), (40..60, true)]),
            [(20..40, AsFound), (40..60, AsFound)]
        );
        // It has a hole now, and ends sooner.
        assert_eq!(
            parts(20..60, &[(20..30, true), (40..50, true), (70..80, true)]),
            [(20..30, AsFound), (40..50, AsFound)]
        );
        assert_eq!(parts(20..60, &[]), []);
        // Another is there, which reaches over an end, or over both.
        assert_eq!(parts(20..60, &[(10..30, true), (50..70, true)]), [(20..30, Larger), (50..60, Larger)]);
        assert_eq!(parts(20..60, &[(10..70, true)]), [(20..60, Larger)]);
        // It is of a file, or shared.
        assert_eq!(parts(20..60, &[(20..60, false)]), [(20..60, Another)]);
    }

    #[test]
    fn a_mapping_that_is_larger_now_waits_for_the_last_round() {
        use crate::memory::{self, PAGE};
        if !requires(&[Feature::Userfaultfd, Feature::ProcmapQuery]) {
            return;
        }
        let (uffd, _) = crate::uffd::Uffd::open(false).unwrap();
        let unreadable = memory::reserve(PAGE).unwrap() as usize;
        let channel = Channel { pagemap: -1, uffd, way: crate::pager::Way::Remap, gate: 0, unreadable };
        let maps = crate::process::open(c"/proc/thread-self/maps").unwrap();
        let maps = rustix::fd::AsFd::as_fd(&maps);
        // Alone, between two that nobody may touch.
        let start = memory::reserve(10 * PAGE).unwrap() as usize + PAGE;
        let whole = start..start + 8 * PAGE;
        // SAFETY: of a range reserved just now.
        unsafe { memory::set_access(start, 8 * PAGE, true) }.unwrap();
        // SAFETY: pairs of numbers are valid when zero.
        let mut regions: Box<Ranges<REGIONS_MAX>> = unsafe { boxed_zeroed() };
        let mut registrar = Registrar::new();
        let mut register = |found: Range<usize>, regions: &Ranges<REGIONS_MAX>, is_last| {
            registrar.found.clear();
            registrar.found.add(found);
            let is_all = registrar.register_found(&channel, regions, maps, is_last);
            (is_all, registrar.fresh.iter().collect::<Vec<_>>())
        };
        let part = start + 2 * PAGE..start + 5 * PAGE;
        assert_eq!(register(part.clone(), &regions, false), (false, Vec::new()));
        assert!(!channel.is_registered(part.start), "in part");
        assert_eq!(register(whole.clone(), &regions, false), (true, Vec::from([whole.clone()])));
        assert!(channel.is_registered(whole.start) && channel.is_registered(whole.end - PAGE));
        // What is registered already, and not known of, is found again.
        assert_eq!(register(part.clone(), &regions, false), (true, Vec::from([part.clone()])));
        regions.add(whole.clone());
        assert_eq!(register(whole.clone(), &regions, false), (true, Vec::new()));
        uffd.unregister(whole.start, whole.end - whole.start).unwrap();
        regions.clear();
        assert_eq!(register(part.clone(), &regions, true), (true, Vec::from([part.clone()])));
        assert!(channel.is_registered(part.start) && !channel.is_registered(whole.start), "as it was found");
        uffd.close();
    }

    #[test]
    fn memory_that_moves_is_registered_where_it_was_until_the_move_is_told() {
        use crate::memory::{self, PAGE};
        use crate::uffd::{Message, Uffd, decode};
        use core::sync::atomic::{AtomicBool, Ordering::*};
        use linux_raw_sys::general::{UFFD_FEATURE_EVENT_REMAP, uffd_msg};
        use rustix::mm::{MremapFlags, mremap_fixed};
        const BYTES: usize = 1000 * PAGE;
        if !requires(&[Feature::Userfaultfd]) {
            return;
        }
        // Of moves alone: another test that forks would wait until that was read, and hold malloc's locks.
        let uffd = Uffd::open_with(u64::from(UFFD_FEATURE_EVENT_REMAP)).unwrap().unwrap();
        let unreadable = memory::reserve(PAGE).unwrap() as usize;
        let channel = Channel { pagemap: -1, uffd, way: crate::pager::Way::Remap, gate: 0, unreadable };
        // Far from where the kernel puts what others map: the place that is left is nobody's.
        let (mut here, there) = (0x1000_0000_0000, 0x1000_4000_0000);
        assert!(memory::map_where_nothing_is(here, BYTES));
        // So that it takes a while to move.
        // SAFETY: mapped just now.
        (0..BYTES).step_by(PAGE).for_each(|at| unsafe { ((here + at) as *mut u8).write_volatile(1) });
        uffd.register(here, BYTES).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (mut from, mut to) = (here, there);
            let is_over = &is_over;
            let bind_to = |processor| {
                let mut set = rustix::thread::CpuSet::new();
                set.set(processor);
                let _ = rustix::thread::sched_setaffinity(None, &set);
            };
            bind_to(0);
            let mover = scope.spawn(move || {
                bind_to(1);
                while !is_over.load(Acquire) {
                    let (old, new) = (from as *mut _, to as *mut _);
                    // SAFETY: mapped above, and nobody else's; nothing is at the other place.
                    unsafe { mremap_fixed(old, BYTES, BYTES, MremapFlags::MAYMOVE, new) }.unwrap();
                    (from, to) = (to, from);
                }
            });
            let (mut moves, mut too_early) = (0, 0);
            while !mover.is_finished() {
                // SAFETY: a message is plain data, and zeroes are one.
                let mut message: [uffd_msg; 1] = unsafe { core::mem::zeroed() };
                // As long as nothing more is read.
                let said = (0..100).find_map(|_| Some(channel.registration(here)).filter(|&said| said != Some(true)));
                too_early += usize::from(said == Some(Some(false)));
                if uffd.read(&mut message) == 1
                    && let Some(Message::Remap { to, .. }) = decode(&message[0])
                {
                    (here, moves) = (to, moves + 1);
                }
                is_over.store(moves >= 2000, Release);
            }
            assert_eq!(too_early, 0, "of {moves} moves");
        });
        uffd.close();
    }

    #[test]
    fn where_the_kernel_cannot_be_asked_a_range_is_registered_as_it_was_found() {
        let mut parts = Vec::new();
        for_each_whole(20..60, |_| None, |part, now| parts.push((part, now)));
        assert_eq!(parts, [(20..60, AsFound)]);
    }
}
