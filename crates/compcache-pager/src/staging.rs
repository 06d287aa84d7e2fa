//! Staging: the frames that pages pass through on their way out.
//!
//! A page leaves the process by having its frame moved here, where it is compressed; the frame, garbage then, is given
//! back to the system with others.
//!
//! Frames are kept in groups of 64 neighbouring ones, so that a run of pages moves with one call: a call interrupts every
//! other processor that runs the process, which in a virtual machine takes 20 us, for one page as for 64. Neighbouring
//! groups are filled, and given back, with one call where it can be: empty and free groups are sets, not queues.
//!
//! | group     | its frames hold                | it is in      |
//! |-----------|--------------------------------|---------------|
//! | empty     | nothing                        | `empty`       |
//! | staged    | pages, oldest groups first     | `staged`      |
//! | compressing | pages being compressed       | no list       |
//! | free      | garbage, to be given back      | `free`        |
//!
//! No locks here and no system calls: the pager's lock protects it, `evict` and `fault` do the moving.

use crate::memory::PAGE;
use core::ops::Range;

/// Frames of a group.
pub const GROUP: usize = 64;
/// Most groups filled with one call.
pub const FILLED_AT_ONCE: usize = 4;
/// Garbage frames given back with one call, at most.
pub const BURIED_AT_ONCE: usize = 256;
/// One of so many pages of the limit may be garbage.
const GARBAGE_SHARE: usize = 32;
/// One of so many pages of the limit is kept free, and at least so many.
const RESERVE_SHARE: u64 = 64;
const RESERVE_PAGES_MIN: u64 = 48;
/// One of so many pages of the limit waits in staging.
const SHARE: usize = 16;
/// Fewest groups there are; half of them may be in use.
const GROUPS_MIN: usize = 6;
/// Most groups there can be: 64 MiB of frames.
pub const GROUPS_MAX: usize = 256;
/// Groups for memory that may be executed ([`crate::code`]): 4 MiB of frames.
pub const CODE_GROUPS: usize = 16;
/// The first of them. The number before it is no group's: no run of frames goes from the ones to the others.
const CODE_FIRST: usize = GROUPS_MAX + 1;
const NUMBERS: usize = CODE_FIRST + CODE_GROUPS;
/// Most groups where each frame that there could be is counted as one that there is.
const GROUPS_COUNTED_MAX: usize = 32;

/// How many groups a process has. What it may hold now may be little, and more later, up to what all may.
pub fn groups_of_process(limit_bytes: u64, is_counted: bool) -> usize {
    let most = if is_counted { GROUPS_COUNTED_MAX } else { GROUPS_MAX };
    groups_for(limit_bytes / PAGE as u64, most).max(GROUPS_MIN)
}

/// What a frame may hold: pages move between memory of the same rights only (UFFDIO_MOVE).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// What may be read and written.
    Data,
    /// What may be executed, too.
    Code,
}

impl Kind {
    /// The kind of a frame.
    pub fn of(frame: usize) -> Kind {
        if frame < CODE_FIRST * GROUP { Kind::Data } else { Kind::Code }
    }

    fn groups(self) -> Range<usize> {
        match self {
            Kind::Data => 0..GROUPS_MAX,
            Kind::Code => CODE_FIRST..NUMBERS,
        }
    }
}

/// A set of group numbers with first-in, first-out order.
pub struct Queue {
    ring: [u16; NUMBERS],
    head: usize,
    len: usize,
}

impl Queue {
    const fn new() -> Queue {
        Queue { ring: [0; NUMBERS], head: 0, len: 0 }
    }

    /// How many groups are queued.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Adds a group at the end.
    pub fn push(&mut self, group: usize) {
        debug_assert!(self.len < NUMBERS);
        self.ring[(self.head + self.len) % NUMBERS] = group as u16;
        self.len += 1;
    }

    /// Adds a group at the front: the next to be popped.
    pub fn push_front(&mut self, group: usize) {
        debug_assert!(self.len < NUMBERS);
        self.head = (self.head + NUMBERS - 1) % NUMBERS;
        self.ring[self.head] = group as u16;
        self.len += 1;
    }

    /// Takes the oldest group.
    pub fn pop(&mut self) -> Option<usize> {
        self.remove(0)
    }

    /// Takes the oldest group of a kind.
    pub fn pop_of(&mut self, kind: Kind) -> Option<usize> {
        let nth = (0..self.len).find(|nth| kind.groups().contains(&self.at(*nth)))?;
        self.remove(nth)
    }

    fn at(&self, nth: usize) -> usize {
        self.ring[(self.head + nth) % NUMBERS].into()
    }

    /// Takes the `nth`; those before it move up.
    fn remove(&mut self, nth: usize) -> Option<usize> {
        if self.len == 0 {
            return None;
        }
        let group = self.at(nth);
        for place in (0..nth).rev() {
            self.ring[(self.head + place + 1) % NUMBERS] = self.at(place) as u16;
        }
        self.head = (self.head + 1) % NUMBERS;
        self.len -= 1;
        Some(group)
    }
}

/// A set of group numbers.
pub struct Set {
    bits: [u64; NUMBERS.div_ceil(64)],
}

impl Set {
    const fn new() -> Set {
        Set { bits: [0; NUMBERS.div_ceil(64)] }
    }

    /// Whether there is none.
    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.bits.iter().all(|&bits| bits == 0)
    }

    /// Adds a group.
    pub fn add(&mut self, group: usize) {
        self.bits[group / 64] |= 1 << (group % 64);
    }

    fn has(&self, group: usize) -> bool {
        self.bits[group / 64] >> (group % 64) & 1 == 1
    }

    fn remove(&mut self, group: usize) {
        self.bits[group / 64] &= !(1 << (group % 64));
    }

    /// Takes `most` neighbours of those `within`, or else the most there are.
    fn take(&mut self, most: usize, within: Range<usize>) -> Option<Range<usize>> {
        let mut best = 0..0;
        let mut at = within.start;
        while best.len() < most
            && let Some(start) = (at..within.end).find(|&group| self.has(group))
        {
            let len = (start..within.end).take(most).take_while(|&group| self.has(group)).count();
            if len > best.len() {
                best = start..start + len;
            }
            at = start + len;
        }
        best.clone().for_each(|group| self.remove(group));
        (!best.is_empty()).then_some(best)
    }
}

/// One group.
#[derive(Clone, Copy)]
pub struct Group {
    /// Which frames hold a page or garbage (bit set) and which hold nothing.
    pub present: u64,
    /// The page each frame holds; meaningless for garbage.
    pub pages: [u64; GROUP],
    /// Frames whose pages came with a copy: it is in the pool under the frame's own number.
    pub copies: u64,
}

/// All groups, and the lists they are in.
pub struct Staging {
    /// Where the frames are.
    pub places: Places,
    /// How many groups are in use.
    pub groups_max: usize,
    /// The groups.
    pub groups: [Group; NUMBERS],
    /// Groups whose frames hold nothing.
    pub empty: Set,
    /// Groups whose frames hold pages.
    pub staged: Queue,
    /// Groups with garbage frames.
    pub free: Set,
    /// Groups that are never used again: something else is mapped at some of their frames.
    retired: [bool; NUMBERS],
    /// Garbage frames in `free`.
    pub free_frames: usize,
}

/// A frame's number: group times 64 and place in it.
pub type Frame = u32;

/// Addresses of the first frame of either kind; zero for code, as long as there is no such memory.
#[derive(Clone, Copy)]
pub struct Places {
    data: usize,
    code: usize,
}

impl Places {
    /// Address of a frame, bytes.
    pub fn address(&self, frame: Frame) -> usize {
        let frame = frame as usize;
        match Kind::of(frame) {
            Kind::Data => self.data + frame * PAGE,
            Kind::Code => self.code + (frame - CODE_FIRST * GROUP) * PAGE,
        }
    }
}

impl Staging {
    /// Puts the first `groups_max` groups at `start`, all empty, and those for code at `code`, if there is any.
    pub fn reset(&mut self, start: usize, groups_max: usize, code: Option<usize>) {
        self.places = Places { data: start, code: code.unwrap_or(0) };
        self.groups_max = groups_max;
        self.empty = Set::new();
        self.staged = Queue::new();
        self.free = Set::new();
        self.free_frames = 0;
        (0..groups_max).for_each(|group| self.begin(group));
        if code.is_some() {
            Kind::Code.groups().for_each(|group| self.begin(group));
        }
    }

    /// A group that holds nothing yet, or nothing of this process's.
    fn begin(&mut self, group: usize) {
        let held = &mut self.groups[group];
        if held.present | held.copies != 0 {
            (held.present, held.copies) = (0, 0);
        }
        self.give_empty(group);
    }

    /// There is memory that may be executed: its frames are at `start` from now on, and hold nothing.
    pub fn add_code(&mut self, start: usize) {
        if !self.has_code() {
            self.places.code = start;
            Kind::Code.groups().for_each(|group| self.begin(group));
        }
    }

    /// Nobody may touch those frames any more: what is in them is nobody's, nor ever given back.
    pub fn lose_code(&mut self) {
        while self.staged.pop_of(Kind::Code).is_some() {}
        for group in Kind::Code.groups() {
            if self.free.has(group) {
                self.free_frames -= self.groups[group].present.count_ones() as usize;
            }
            self.free.remove(group);
            self.empty.remove(group);
        }
        self.places.code = 0;
    }

    /// Whether there are frames for what may be executed.
    pub fn has_code(&self) -> bool {
        self.places.code != 0
    }

    /// Leaves a group alone once it holds nothing.
    pub fn retire(&mut self, group: usize) {
        self.retired[group] = true;
        self.empty.remove(group);
    }

    /// Addresses of the frames of every group of data that may hold something.
    pub fn frames(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let of_group = |group| self.places.data + group * GROUP * PAGE;
        (0..self.groups_max)
            .filter(|&group| !self.retired[group])
            .map(move |group| of_group(group)..of_group(group + 1))
    }

    /// Whether a group is left alone.
    pub fn is_retired(&self, group: usize) -> bool {
        self.retired[group]
    }

    /// Whether an address is a frame's, in a group where nothing else can be.
    pub fn owns(&self, address: usize) -> bool {
        let group = |start: usize| address.wrapping_sub(start) / (GROUP * PAGE);
        let of_data = group(self.places.data);
        of_data < self.groups_max && !self.retired[of_data] || self.has_code() && group(self.places.code) < CODE_GROUPS
    }

    /// Whether there is an empty group of a kind.
    pub fn has_empty(&self, kind: Kind) -> bool {
        kind.groups().any(|group| self.empty.has(group))
    }

    /// Takes neighbouring empty groups: one to `most`.
    pub fn take_empty(&mut self, most: usize, kind: Kind) -> Option<Range<usize>> {
        self.empty.take(most, kind.groups())
    }

    /// A group's frames hold nothing.
    pub fn give_empty(&mut self, group: usize) {
        if !self.retired[group] {
            self.empty.add(group);
        }
    }

    /// Most groups to be filled with one call: one of four, so that a second chance stays one.
    pub fn filled_at_once(&self, limit_pages: u64) -> usize {
        (groups_for(limit_pages, self.groups_max) / 4).clamp(1, FILLED_AT_ONCE)
    }

    /// Address of a frame, bytes.
    pub fn address(&self, frame: Frame) -> usize {
        self.places.address(frame)
    }

    /// How many groups of a kind have garbage frames.
    pub fn garbage_groups(&self, kind: Kind) -> usize {
        kind.groups().filter(|&group| self.free.has(group)).count()
    }

    /// Takes up to `out.len()` groups with garbage frames, those of a kind and neighbours first; returns how many, in ascending order.
    /// [`Staging::given_back`] ends what this began.
    pub fn take_garbage(&mut self, out: &mut [usize], first: Kind) -> usize {
        let (mut taken, all) = (0, 0..NUMBERS);
        let mut take = |most| self.free.take(most, first.groups()).or_else(|| self.free.take(most, all.clone()));
        while taken < out.len()
            && let Some(groups) = take(out.len() - taken)
        {
            for group in groups {
                self.free_frames -= self.groups[group].present.count_ones() as usize;
                out[taken] = group;
                taken += 1;
            }
        }
        out[..taken].sort_unstable();
        taken
    }

    /// The frames of a group of garbage were given back to the system, all but those in `left`.
    pub fn given_back(&mut self, group: usize, left: u64) {
        self.groups[group].present = left;
        self.release(group);
    }

    /// A staged frame's page has been moved back where it came from.
    pub fn forget(&mut self, frame: Frame) {
        self.groups[frame as usize / GROUP].present &= !(1 << (frame as usize % GROUP));
    }

    /// A staged frame's page has another number now.
    pub fn rename(&mut self, frame: Frame, page: u64) {
        self.groups[frame as usize / GROUP].pages[frame as usize % GROUP] = page;
    }

    /// Groups that stay staged for a second chance.
    pub fn held_groups(&self, limit_pages: u64) -> usize {
        groups_for(limit_pages, self.groups_max) * 3 / 4
    }

    /// With so many frames of garbage they are given back: with as few calls as there can be while they take no room that the program would feel.
    pub fn garbage_frames_max(limit_pages: u64) -> usize {
        (limit_pages as usize / GARBAGE_SHARE).clamp(GROUP, BURIED_AT_ONCE)
    }

    /// Room kept below the limit, pages.
    pub fn reserve_pages(&self, limit_pages: u64) -> u64 {
        (limit_pages / RESERVE_SHARE).max(RESERVE_PAGES_MIN).min((self.groups_max * GROUP) as u64 / 8)
    }

    /// A group whose pages are all elsewhere: its frames are garbage, or there are none.
    pub fn release(&mut self, group: usize) {
        let frames = self.groups[group].present.count_ones() as usize;
        self.free_frames += frames;
        if frames == 0 {
            self.give_empty(group);
        } else {
            self.free.add(group);
        }
    }
}

/// How many groups are used while the process may hold `limit_pages`: a sixteenth of that. The limit falls as the pool grows, and what waits in
/// staging is of no use to the program (docs/decisions/0038, 0040).
fn groups_for(limit_pages: u64, groups_max: usize) -> usize {
    (limit_pages as usize / GROUP / SHARE).min(groups_max).max(GROUPS_MIN / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(groups: &[usize]) -> Set {
        let mut set = Set::new();
        groups.iter().for_each(|&group| set.add(group));
        set
    }

    #[test]
    fn neighbours_are_taken_together_and_the_longest_run_when_none_is_long_enough() {
        let mut groups = set(&[0, 2, 3, 62, 63, 64, 65, 66, 255]);
        assert_eq!(groups.take(4, 0..NUMBERS), Some(62..66));
        assert_eq!(groups.take(4, 0..NUMBERS), Some(2..4));
        assert_eq!(groups.take(1, 0..NUMBERS), Some(0..1));
        assert_eq!(groups.take(4, 0..NUMBERS), Some(66..67));
        assert_eq!(groups.take(4, 0..NUMBERS), Some(255..256));
        assert_eq!(groups.take(4, 0..NUMBERS), None);
        assert!(groups.is_empty());
    }

    #[test]
    fn what_is_used_follows_the_limit() {
        assert_eq!([0, 1024, 4096, 8192, 16384, 1 << 20].map(|pages| groups_for(pages, 32)), [3, 3, 4, 8, 16, 32]);
    }

    #[test]
    fn frames_of_either_kind_are_apart() {
        let mut staging = empty(8, None);
        assert_eq!((staging.take_empty(4, Kind::Code), staging.has_empty(Kind::Code)), (None, false));
        staging.add_code(1 << 30);
        let code = staging.take_empty(CODE_GROUPS, Kind::Code).unwrap();
        assert_eq!((code.len(), staging.has_empty(Kind::Code)), (CODE_GROUPS, false));
        assert_eq!(staging.take_empty(GROUPS_MAX, Kind::Data), Some(0..8));
        let first = code.start * GROUP;
        assert_eq!(
            [0, first - 1, first, code.end * GROUP - 1].map(Kind::of),
            [Kind::Data, Kind::Data, Kind::Code, Kind::Code]
        );
        assert_eq!(staging.address(first as Frame + 3), (1 << 30) + 3 * PAGE);
        let last = staging.address((code.end * GROUP - 1) as Frame);
        assert!(staging.owns(last) && !staging.owns(last + PAGE) && staging.owns(1 << 20) && !staging.owns(0));
        // However many there are: no run of groups goes from the ones to the others.
        let groups = set(&[GROUPS_MAX - 1, code.start, code.start + 1]);
        assert_eq!({ groups }.take(3, 0..NUMBERS), Some(code.start..code.start + 2));
    }

    #[test]
    fn the_oldest_of_a_kind_leaves_from_among_the_others() {
        let mut queue = Queue::new();
        // Over the ring's end.
        (0..NUMBERS - 2).for_each(|group| queue.push(group));
        (0..NUMBERS - 2).for_each(|group| assert_eq!(queue.pop(), Some(group)));
        [3, CODE_FIRST, 4, 5, CODE_FIRST + 1].iter().for_each(|&group| queue.push(group));
        assert_eq!(
            [Kind::Code, Kind::Data, Kind::Code, Kind::Code].map(|kind| queue.pop_of(kind)),
            [Some(CODE_FIRST), Some(3), Some(CODE_FIRST + 1), None]
        );
        queue.push_front(9);
        assert_eq!([9, 4, 5].map(Some), [queue.pop(), queue.pop(), queue.pop()]);
        assert_eq!((queue.pop(), queue.len()), (None, 0));
    }

    #[test]
    fn garbage_of_the_kind_that_is_needed_goes_first_and_what_is_lost_is_not_counted() {
        let mut staging = empty(8, Some(1 << 30));
        let groups = [Kind::Data, Kind::Code].map(|kind| staging.take_empty(3, kind).unwrap());
        for group in groups.into_iter().flatten() {
            staging.groups[group].present = 3;
            staging.release(group);
        }
        assert_eq!((staging.free_frames, staging.garbage_groups(Kind::Code)), (12, 3));
        let mut out = [0; 4];
        assert_eq!(staging.take_garbage(&mut out, Kind::Code), 4);
        assert_eq!(out, [0, CODE_FIRST, CODE_FIRST + 1, CODE_FIRST + 2]);
        out.iter().for_each(|&group| staging.given_back(group, u64::from(group == CODE_FIRST)));
        assert_eq!((staging.free_frames, staging.garbage_groups(Kind::Code)), (5, 1));
        staging.staged.push(CODE_FIRST + 1);
        staging.lose_code();
        assert_eq!((staging.free_frames, staging.has_empty(Kind::Code), staging.staged.len()), (4, false, 0));
    }

    #[test]
    fn a_copy_of_the_process_begins_with_what_it_has() {
        let mut staging = empty(8, Some(1 << 30));
        let taken = staging.take_empty(1, Kind::Code).unwrap().start;
        (staging.groups[taken].present, staging.groups[taken].copies) = (7, 1);
        staging.release(taken);
        staging.reset(1 << 20, 8, Some(1 << 30));
        assert_eq!((staging.groups[taken].present, staging.groups[taken].copies, staging.free_frames), (0, 0, 0));
        assert_eq!(staging.take_empty(CODE_GROUPS, Kind::Code).map(|groups| groups.len()), Some(CODE_GROUPS));
    }

    fn empty(groups: usize, code: Option<usize>) -> Staging {
        let none = Group { present: 0, pages: [0; GROUP], copies: 0 };
        let mut staging = Staging {
            places: Places { data: 0, code: 0 },
            groups_max: 0,
            groups: [none; NUMBERS],
            empty: Set::new(),
            staged: Queue::new(),
            free: Set::new(),
            retired: [false; NUMBERS],
            free_frames: 0,
        };
        staging.reset(1 << 20, groups, code);
        staging
    }

    #[test]
    fn what_is_removed_is_not_taken() {
        let mut groups = set(&[7, 8, 9]);
        groups.remove(8);
        assert_eq!(groups.take(3, 0..NUMBERS), Some(7..8));
        assert_eq!(groups.take(3, 0..NUMBERS), Some(9..10));
        assert!(groups.is_empty());
    }
}
