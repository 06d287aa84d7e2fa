//! One thread: draws operations, performs them on memory and model, compares.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use compcache_testkit::PAGE_BYTES as PAGE;
use compcache_testkit::seed::{Seed, scramble};

use crate::model::{Content, Region, WORDS};
use crate::os;

const MADV_POPULATE_READ: libc::c_int = 22;

/// What has been done so far, by all threads of this process.
pub static OPERATIONS: AtomicU64 = AtomicU64::new(0);
pub static CHECKED: AtomicU64 = AtomicU64::new(0);
pub static FORKS: AtomicU64 = AtomicU64::new(0);

/// What all threads see.
pub struct Common {
    pub seed: u64,
    /// Written before the threads start, read by all of them.
    pub read_only: Region,
    /// Page `i` belongs to thread `i % threads`.
    pub interleaved: usize,
    pub interleaved_pages: usize,
    pub threads: usize,
    pub start: Instant,
}

/// How likely each operation is; a seed leaves some out (swarm testing).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Operation {
    WriteRun,
    PatchPages,
    CheckRun,
    CheckReadOnly,
    Interleaved,
    NewRegion,
    DropRegion,
    UnmapPart,
    Grow,
    Shrink,
    Move,
    MoveOver,
    Discard,
    Free,
    Cold,
    ReadOnly,
    NoAccess,
    MapOver,
    HeapEnd,
    Huge,
    Fork,
    Sleep,
}

const OPERATION_WEIGHTS: [(Operation, u32); 22] = [
    (Operation::WriteRun, 20),
    (Operation::PatchPages, 20),
    (Operation::CheckRun, 30),
    (Operation::CheckReadOnly, 10),
    (Operation::Interleaved, 20),
    (Operation::NewRegion, 6),
    (Operation::DropRegion, 2),
    (Operation::UnmapPart, 3),
    (Operation::Grow, 4),
    (Operation::Shrink, 3),
    (Operation::Move, 4),
    (Operation::MoveOver, 2),
    (Operation::Discard, 5),
    (Operation::Free, 4),
    (Operation::Cold, 3),
    (Operation::ReadOnly, 4),
    (Operation::NoAccess, 2),
    (Operation::MapOver, 3),
    (Operation::HeapEnd, 3),
    (Operation::Huge, 1),
    (Operation::Fork, 1),
    (Operation::Sleep, 1),
];

pub struct Worker<'a> {
    common: &'a Common,
    which: usize,
    random: fastrand::Rng,
    weights: Vec<(Operation, u32)>,
    budget_pages: usize,
    regions: Vec<Region>,
    interleaved: Vec<Content>,
    /// Memory between these two ends of the heap is ours; only thread 0 moves it, the main thread sleeps meanwhile.
    heap: Option<Region>,
    generation: u32,
    next_tag: u64,
    children: Vec<libc::pid_t>,
    depth: usize,
    recent: Vec<String>,
    /// When one bit is to be flipped behind the model's back.
    pub plant_at: Option<Instant>,
}

impl<'a> Worker<'a> {
    pub fn new(common: &'a Common, seed: Seed, which: usize, budget_pages: usize) -> Self {
        let mut random = seed.rng();
        let mut weights: Vec<_> = OPERATION_WEIGHTS
            .into_iter()
            .filter(|(operation, _)| {
                matches!(operation, Operation::NewRegion | Operation::CheckRun) || random.u8(..8) != 0
            })
            .collect();
        weights.iter_mut().for_each(|(_, weight)| *weight *= random.u32(1..8));
        if which != 0 {
            weights.retain(|(operation, _)| *operation != Operation::HeapEnd);
        }
        let own = (0..common.interleaved_pages).filter(|page| page % common.threads == which).count();
        Self {
            common,
            which,
            random,
            weights,
            budget_pages,
            regions: Vec::new(),
            interleaved: vec![Content::Zero; own],
            heap: None,
            generation: 1,
            next_tag: seed.part(77).number(),
            children: Vec::new(),
            depth: 0,
            recent: Vec::new(),
            plant_at: None,
        }
    }

    pub fn work_until(&mut self, deadline: Instant) {
        self.new_region();
        while Instant::now() < deadline {
            if self.plant_at.is_some_and(|at| Instant::now() >= at) {
                self.plant();
            }
            let total: u32 = self.weights.iter().map(|(_, weight)| weight).sum();
            let mut drawn = self.random.u32(..total);
            let operation = self.weights.iter().find(|(_, weight)| {
                let found = drawn < *weight;
                drawn = drawn.wrapping_sub(*weight);
                found
            });
            let Some(&(operation, _)) = operation else { continue };
            OPERATIONS.fetch_add(1, Ordering::Relaxed);
            self.perform(operation);
        }
    }

    fn note(&mut self, what: String) {
        if self.recent.len() == 24 {
            self.recent.remove(0);
        }
        self.recent.push(what);
    }

    fn next_generation(&mut self) -> u32 {
        self.generation += 1;
        self.generation
    }

    /// A region of ours, and a run of pages within it.
    fn pick(&mut self, most: usize) -> Option<(usize, usize, usize)> {
        if self.regions.is_empty() {
            return None;
        }
        let region = self.random.usize(..self.regions.len());
        let pages = self.regions[region].pages.len();
        let from = self.random.usize(..pages);
        Some((region, from, self.random.usize(1..=most.min(pages - from))))
    }

    fn perform(&mut self, operation: Operation) {
        match operation {
            Operation::NewRegion => self.new_region(),
            Operation::CheckReadOnly => self.check_read_only(64),
            Operation::Interleaved => self.use_interleaved(),
            Operation::HeapEnd => self.move_heap_end(),
            Operation::Fork => self.fork(),
            Operation::Sleep => os::sleep_ms(self.random.u64(1..60)),
            _ => {
                let Some((region, from, count)) = self.pick(256) else { return self.new_region() };
                let at = self.regions[region].address(from);
                self.note(format!("{operation:?} of {count} pages at {at:#x}"));
                self.perform_on(operation, region, from, count);
            }
        }
    }

    fn perform_on(&mut self, operation: Operation, which: usize, from: usize, count: usize) {
        let generation = self.next_generation();
        let word = self.random.usize(..WORDS);
        match operation {
            Operation::WriteRun => (from..from + count).for_each(|page| self.regions[which].write(page, generation)),
            Operation::PatchPages => {
                let stride = 1 + word % 7;
                (from..from + count).step_by(stride).for_each(|page| self.regions[which].patch(page, word, generation));
            }
            Operation::CheckRun => self.check_region(which, from, count),
            Operation::DropRegion => {
                self.check_region(which, from, count);
                let region = self.regions.swap_remove(which);
                os::unmap(region.at, region.pages.len());
            }
            Operation::UnmapPart => self.unmap_part(which, from, count),
            Operation::Grow | Operation::Shrink | Operation::Move => self.remap(operation, which, from),
            Operation::MoveOver => self.move_over(which, from, count),
            Operation::Discard => {
                os::advise(self.regions[which].address(from), count, libc::MADV_DONTNEED);
                self.regions[which].pages[from..from + count].fill(Content::Zero);
            }
            Operation::Free => self.free(which, from, count),
            Operation::Cold => {
                let advice = [libc::MADV_COLD, libc::MADV_PAGEOUT, libc::MADV_WILLNEED, MADV_POPULATE_READ][word % 4];
                os::advise(self.regions[which].address(from), count, advice);
                self.check_region(which, from, count.min(8));
            }
            Operation::ReadOnly => {
                os::protect(self.regions[which].address(from), count, libc::PROT_READ);
                self.check_region(which, from, count);
                os::protect(self.regions[which].address(from), count, libc::PROT_READ | libc::PROT_WRITE);
            }
            Operation::NoAccess => {
                os::protect(self.regions[which].address(from), count, libc::PROT_NONE);
                os::sleep_ms(word as u64 % 4);
                os::protect(self.regions[which].address(from), count, libc::PROT_READ | libc::PROT_WRITE);
                self.check_region(which, from, count);
            }
            Operation::MapOver => {
                os::map_at(self.regions[which].address(from), count);
                self.regions[which].pages[from..from + count].fill(Content::Zero);
            }
            Operation::Huge => {
                let region = &self.regions[which];
                os::advise(region.at, region.pages.len(), libc::MADV_HUGEPAGE);
            }
            _ => unreachable!("{operation:?} needs no region"),
        }
    }

    fn held_pages(&self) -> usize {
        self.regions.iter().map(|region| region.pages.len()).sum()
    }

    fn new_region(&mut self) {
        // Mostly small ones, sometimes one that fills what is left.
        let most = (self.budget_pages / 2).saturating_sub(self.held_pages());
        if most < 8 {
            return;
        }
        let pages = if self.random.u8(..4) == 0 { most } else { self.random.usize(1..=most.min(1024)) };
        self.next_tag += 1;
        let tag = scramble(self.next_tag);
        self.note(format!("NewRegion of {pages} pages"));
        let mut region = Region::new(tag, pages, false);
        let generation = self.next_generation();
        // Some stay holes.
        for page in 0..pages {
            if !scramble(tag ^ page as u64).is_multiple_of(16) {
                region.write(page, generation);
            }
        }
        self.regions.push(region);
    }

    fn unmap_part(&mut self, which: usize, from: usize, count: usize) {
        os::unmap(self.regions[which].address(from), count);
        self.cut(which, from, count);
        self.sweep();
    }

    /// Takes a run out of a region; what is behind it becomes a region of its own. The indices of the others stay.
    fn cut(&mut self, which: usize, from: usize, count: usize) -> Region {
        let mut run = self.regions[which].split_off(from);
        self.regions.push(run.split_off(count));
        run
    }

    /// Forgets regions of which nothing is left.
    fn sweep(&mut self) {
        self.regions.retain(|region| !region.pages.is_empty());
    }

    fn remap(&mut self, operation: Operation, which: usize, from: usize) {
        let old = self.regions[which].pages.len();
        let new = match operation {
            Operation::Grow if self.held_pages() < self.budget_pages / 2 => old + 1 + from.min(512),
            Operation::Shrink => (old - from).max(1),
            _ => old,
        };
        let region = &mut self.regions[which];
        let moved = match operation {
            Operation::Move => os::move_to(region.at, old, new, os::map(new)),
            _ => os::resize(region.at, old, new),
        };
        let Some(at) = moved else { return };
        region.at = at;
        region.pages.resize(new, Content::Zero);
        let checked = self.random.usize(1..=16).min(new);
        self.check_region(which, 0, checked);
        self.check_region(which, new - checked, checked);
    }

    /// Moves a run onto another region, whose contents there are lost; where the run was nothing is left.
    fn move_over(&mut self, which: usize, from: usize, count: usize) {
        let other = self.random.usize(..self.regions.len());
        let count = count.min(self.regions[other].pages.len());
        if other == which || count == 0 {
            return;
        }
        let to = self.random.usize(..=self.regions[other].pages.len() - count);
        let (source, target) = (self.regions[which].address(from), self.regions[other].address(to));
        // By way of a place of its own: a refusal then comes before anything is lost.
        let Some(between) = os::move_to(source, count, count, os::map(count)) else { return };
        if os::move_to(between, count, count, target).is_none() {
            os::fail("FAILED: mremap refuses to move again what it has just moved\n");
        }
        // The run becomes a region of its own. It is cut out of the one it covered and of the one it came from: where it was
        // is free for anybody, and another thread may have it already.
        let run = self.cut(which, from, count);
        self.cut(other, to, count);
        self.sweep();
        self.regions.push(Region { at: target, ..run });
        let last = self.regions.len() - 1;
        self.check_region(last, 0, self.regions[last].pages.len().min(32));
    }

    fn free(&mut self, which: usize, from: usize, count: usize) {
        os::advise(self.regions[which].address(from), count, libc::MADV_FREE);
        for page in from..from + count {
            self.regions[which].pages[page] = match self.regions[which].pages[page] {
                Content::Zero => Content::Zero,
                Content::Written(generation) | Content::Freed(generation) => Content::Freed(generation),
                Content::Patched(..) => {
                    // Two contents are enough for the model: make it one of them.
                    let generation = self.generation;
                    self.regions[which].write(page, generation);
                    Content::Written(generation)
                }
            };
        }
    }

    fn move_heap_end(&mut self) {
        let end = os::heap_end();
        let Some(mut heap) = self.heap.take() else {
            let at = end.next_multiple_of(PAGE);
            if os::set_heap_end(at) {
                self.next_tag += 1;
                self.heap = Some(Region { at, tag: scramble(self.next_tag), first: 0, pages: Vec::new() });
            }
            return;
        };
        let old = heap.pages.len();
        if end != heap.address(old) {
            // Somebody else moved it: leave this heap alone from now on.
            self.weights.retain(|(operation, _)| *operation != Operation::HeapEnd);
            return;
        }
        let most = self.budget_pages / 4;
        let new = self.random.usize(..=most.max(1));
        self.note(format!("HeapEnd from {old} to {new} pages at {:#x}", heap.at));
        if !os::set_heap_end(heap.address(new)) {
            self.heap = Some(heap);
            return;
        }
        heap.pages.resize(new, Content::Zero);
        for page in 0..new {
            self.check(&mut heap, page);
        }
        let generation = self.next_generation();
        for page in old.min(new)..new {
            heap.write(page, generation);
        }
        self.heap = Some(heap);
    }

    /// A view of the pages of the interleaved region, as a region of one page each.
    fn interleaved_page(&self, own: usize) -> Region {
        let page = own * self.common.threads + self.which;
        let at = self.common.interleaved + page * PAGE;
        Region { at, tag: self.common.seed ^ 0x1e, first: page, pages: vec![self.interleaved[own]] }
    }

    fn use_interleaved(&mut self) {
        if self.interleaved.is_empty() {
            return;
        }
        let generation = self.next_generation();
        let from = self.random.usize(..self.interleaved.len());
        let until = (from + self.random.usize(1..64)).min(self.interleaved.len());
        self.note(format!("Interleaved from {from} until {until}"));
        let (choice, word) = (self.random.u8(..3), self.random.usize(..WORDS));
        for own in from..until {
            let mut view = self.interleaved_page(own);
            match choice {
                0 => view.write(0, generation),
                1 => view.patch(0, word, generation),
                _ => {}
            }
            self.check(&mut view, 0);
            self.interleaved[own] = view.pages[0];
        }
    }

    fn check_read_only(&mut self, count: usize) {
        let all = &self.common.read_only;
        let from = self.random.usize(..all.pages.len());
        for page in from..(from + count).min(all.pages.len()) {
            let mut view = Region { at: all.address(page), tag: all.tag, first: page, pages: vec![all.pages[page]] };
            self.check(&mut view, 0);
        }
    }

    fn check_region(&mut self, which: usize, from: usize, count: usize) {
        let empty = Region { at: 0, tag: 0, first: 0, pages: Vec::new() };
        let mut region = std::mem::replace(&mut self.regions[which], empty);
        for page in from..from + count {
            self.check(&mut region, page);
        }
        self.regions[which] = region;
    }

    pub fn check_everything(&mut self) {
        for which in 0..self.regions.len() {
            self.check_region(which, 0, self.regions[which].pages.len());
        }
        if let Some(mut heap) = self.heap.take() {
            for page in 0..heap.pages.len() {
                self.check(&mut heap, page);
            }
            self.heap = Some(heap);
        }
        for own in 0..self.interleaved.len() {
            let mut view = self.interleaved_page(own);
            self.check(&mut view, 0);
            self.interleaved[own] = view.pages[0];
        }
        self.check_read_only(self.common.read_only.pages.len());
    }

    fn check(&self, region: &mut Region, page: usize) {
        CHECKED.fetch_add(1, Ordering::Relaxed);
        let model = region.pages[page];
        let Err((word, expected, found)) = region.compare(page) else { return };
        let again = region.compare(page).is_ok();
        let zeroes = os::page(region.address(page)).iter().filter(|word| **word == 0).count();
        let mut report = format!(
            "MISMATCH at {:#x}: expected {expected:#018x}, found {found:#018x}\n  page {page} of {} at {:#x}, word {word}, \
             model {model:?}; {zeroes} of {WORDS} words are zero; read again: {}\n  thread {} of {}, fork depth {}, \
             process {}, after {:.3} s, seed {}\n  last operations of this thread:\n",
            region.address(page) + word * 8,
            region.pages.len(),
            region.at,
            if again { "right" } else { "wrong" },
            self.which,
            self.common.threads,
            self.depth,
            std::process::id(),
            self.common.start.elapsed().as_secs_f64(),
            self.common.seed,
        );
        for line in &self.recent {
            let _ = writeln!(report, "    {line}");
        }
        os::fail(&report);
    }

    fn fork(&mut self) {
        self.reap(false);
        if self.depth == 2 || self.children.len() == 2 {
            return;
        }
        self.note("Fork".to_owned());
        FORKS.fetch_add(1, Ordering::Relaxed);
        // Drawn before, so that the parent's sequence does not hang on the child.
        let child_seed = self.random.u64(..);
        match os::fork() {
            0 => {
                self.depth += 1;
                self.children.clear();
                self.plant_at = None;
                self.random = fastrand::Rng::with_seed(child_seed);
                self.check_everything();
                let milliseconds = self.random.u64(20..300);
                self.work_until(Instant::now() + Duration::from_millis(milliseconds));
                self.check_everything();
                self.reap(true);
                os::exit(0);
            }
            child => self.children.push(child),
        }
    }

    /// Hears what the children found; `all` waits for those that are still at it.
    pub fn reap(&mut self, all: bool) {
        let seed = self.common.seed;
        self.children.retain(|&child| match os::wait(child, all) {
            None => true,
            Some(0) => false,
            Some(status) => {
                os::fail(&format!("MISMATCH or death in child {child}: wait status {status:#x}, seed {seed}\n"))
            }
        });
    }

    fn plant(&mut self) {
        self.plant_at = None;
        if let Some((which, page, _)) = self.pick(1) {
            let region = &self.regions[which];
            os::page_mut(region.address(page))[100] ^= 1 << 17;
            eprintln!("planted a wrong bit at {:#x}", region.address(page) + 800);
            self.check_region(which, 0, self.regions[which].pages.len());
        }
    }
}
