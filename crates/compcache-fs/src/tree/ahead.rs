//! Reading ahead below, for who reads a file in order.
//!
//! The kernel reads ahead as well, 128 KiB, and asks for the next when those are there. So the disk waits while we answer and compress, and who reads
//! waits while the disk works. A larger read-ahead of the kernel's own would be read around each fault of a mapping, too (docs/decisions/0041). Here
//! the requests are seen of which one begins where another ended:
//!
//! ```text
//!            a run of requests
//!    start |-----------------------| next          planned
//!          |     asked for         |  chunk | chunk |
//!                                     ready   being read, or waiting for that
//! ```
//!
//! Where the run before ended is taken to be where this one does, so records of one length at random are not read over their ends again and again; beyond
//! that, no more is planned than was asked for already. A *chunk* is not in the cache: it is what a request takes instead of reading below, and
//! then treats as if it had read it. A request waits for a chunk that is being read, and never for one whose turn has not come. A chunk is good for who finds the file with the stamp it had when the chunk was planned, and if no write through
//! the mount has begun or ended in its pages since.
//!
//! Lock: one for all chunks, held while none is read or copied; and one for each open file's run, taken before it.

use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use compcache_cache::{Aligned, FileId, missing};
use compcache_store::Page;

use super::Tree;
use crate::handles::OpenFile;
use crate::stamp::Stamp;

const PAGE: u64 = 4096;
/// What is read ahead at once.
const CHUNK_PAGES: u32 = 64;
/// How far ahead of who reads at most.
const AHEAD_PAGES: u32 = 2 * CHUNK_PAGES;
/// So many chunks there are at most, 2 MiB for all who read.
const CHUNKS_MAX: usize = 8;
/// Who has read so much in order may go on; and so much less, if he did the time before.
const IN_ORDER_PAGES: u32 = 64;
const IN_ORDER_AGAIN_PAGES: u32 = 32;
/// Requests that the kernel makes at the same time overtake each other, by so much.
const OVERTAKEN_PAGES: u32 = 64;
/// A chunk that nobody asks for so long goes. So long nothing is read ahead for whom that was in vain because the file changed.
const PATIENCE: Duration = Duration::from_secs(1);
/// Who takes longer from one plan to the next would find his chunks gone.
const SLOW: Duration = Duration::from_millis(250);

/// A run of requests of an open file, one after the other, upwards or downwards.
///
/// Pages are counted in the direction in which it goes: downwards, from the last there can be.
#[derive(Debug, Default)]
pub struct Run {
    goes_down: bool,
    start: u32,
    next: u32,
    requests: u32,
    /// What is before this page was planned, or asked for.
    planned: u32,
    /// How long the run before was.
    before: u32,
    /// When there was something to plan.
    wanted_at: Option<Instant>,
    /// When what was read ahead was not what the file has any more.
    in_vain: Option<Instant>,
}

impl Run {
    /// These pages are asked for. Says which are to be read ahead.
    fn ask(&mut self, pages: Range<u32>) -> Option<Range<u32>> {
        if self.requests == 1 && (pages.start < self.start) != self.goes_down {
            // The second tells which way it goes.
            let turned = mirrored(&(self.start..self.next));
            (self.start, self.next, self.planned) = (turned.start, turned.end, turned.end);
            self.goes_down = !self.goes_down;
        }
        let mut asked = if self.goes_down { mirrored(&pages) } else { pages.clone() };
        if !self.goes_on(&asked) {
            let before = self.next - self.start;
            *self = Run { start: pages.start, before, in_vain: self.in_vain, ..Run::default() };
            asked = pages;
        }
        self.next = self.next.max(asked.end);
        self.planned = self.planned.max(self.next);
        self.requests = self.requests.saturating_add(1);
        let wanted = self.wanted()?;
        Some(if self.goes_down { mirrored(&wanted) } else { wanted })
    }

    fn goes_on(&self, asked: &Range<u32>) -> bool {
        asked.start <= self.next.max(self.planned) && asked.start.saturating_add(OVERTAKEN_PAGES) >= self.next
    }

    fn wanted(&self) -> Option<Range<u32>> {
        let length = self.next - self.start;
        let enough = if self.before > IN_ORDER_PAGES { IN_ORDER_AGAIN_PAGES } else { IN_ORDER_PAGES };
        if self.requests < 2 || length < enough {
            return None;
        }
        // It ends where the one before did; if not, it is a new one from there on.
        let rest = self.before.saturating_sub(length);
        let more = if rest > 0 { rest } else { length - self.before };
        let end = self.next.saturating_add(more.min(AHEAD_PAGES));
        let least = match more {
            AHEAD_PAGES.. => CHUNK_PAGES,
            // The last of the run.
            _ if rest > 0 => 1,
            _ => IN_ORDER_AGAIN_PAGES,
        };
        let is_enough = end >= self.planned.saturating_add(least);
        is_enough.then(|| self.planned..end.min(self.planned.saturating_add(CHUNK_PAGES)))
    }

    /// Whether what is read ahead now would be in vain: it was a moment ago, or who reads is slow.
    fn is_hopeless(&mut self) -> bool {
        let before = self.wanted_at.replace(Instant::now());
        let lasts = |since: Option<Instant>, least| since.is_some_and(|since| since.elapsed() < least);
        before.is_some() && !lasts(before, SLOW) || lasts(self.in_vain, PATIENCE)
    }

    /// Pages up to the end of this range were planned.
    fn is_planned(&mut self, wanted: &Range<u32>) {
        self.planned = if self.goes_down { mirrored(wanted).end } else { wanted.end };
    }
}

/// The same pages, counted from the last there can be; and back.
fn mirrored(pages: &Range<u32>) -> Range<u32> {
    u32::MAX - pages.end..u32::MAX - pages.start
}

/// Pages that were read, and which.
struct Filled {
    buffer: Aligned,
    here: [bool; CHUNK_PAGES as usize],
}

enum State {
    Waiting,
    Reading,
    Ready(Arc<Filled>),
}

struct Chunk {
    number: u64,
    id: FileId,
    /// Who is expected to ask for it.
    reader: Weak<OpenFile>,
    /// What the file was when the chunk was planned.
    stamp: Stamp,
    pages: Range<u32>,
    since: Instant,
    state: State,
    /// So many pages of it were not asked for yet.
    left: usize,
    /// Written to since.
    is_void: bool,
}

/// What the reading thread is to read: a chunk, of a file of so many bytes.
struct Job {
    number: u64,
    size_bytes: u64,
}

#[derive(Default)]
struct Chunks {
    all: Vec<Chunk>,
    spare: Vec<Aligned>,
    next_number: u64,
}

/// What is read ahead of the files of a tree.
pub struct Ahead {
    chunks: Mutex<Chunks>,
    /// A chunk is not being read any more.
    read: Condvar,
    jobs: Sender<Job>,
}

/// What the thread that reads ahead listens to.
pub struct Jobs(Receiver<Job>);

impl Ahead {
    pub fn new() -> (Ahead, Jobs) {
        let (jobs, heard) = channel();
        (Ahead { chunks: Mutex::default(), read: Condvar::new(), jobs }, Jobs(heard))
    }

    fn lock(&self) -> MutexGuard<'_, Chunks> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages `asked` of an open file, of so many bytes, are asked for: has what comes next be read. Returns which pages.
    pub fn plan(&self, open: &Arc<OpenFile>, stamp: Stamp, asked: Range<u32>, size_bytes: u64) -> Option<Range<u32>> {
        let run = &mut *open.run.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = run.ask(asked.clone())?;
        let wanted = wanted.start..wanted.end.min(size_bytes.div_ceil(PAGE).min(u32::MAX.into()) as u32);
        if wanted.is_empty() || run.is_hopeless() {
            return None;
        }
        let (id, reader) = (open.node.pages, Arc::downgrade(open));
        let mut chunks = self.lock();
        // What it has left behind.
        let near = asked.start.min(wanted.start).saturating_sub(OVERTAKEN_PAGES)
            ..asked.end.max(wanted.end).saturating_add(OVERTAKEN_PAGES);
        chunks.let_go(|chunk| {
            let is_old = chunk.is_void || chunk.stamp != stamp;
            chunk.reader.ptr_eq(&reader) && !chunk.meets(id, &near) || is_old && chunk.meets(id, &wanted)
        });
        if chunks.all.len() == CHUNKS_MAX {
            chunks.let_go(|chunk| chunk.since.elapsed() >= PATIENCE);
        }
        // What another reads ahead already is not read twice.
        let is_there = chunks.all.iter().any(|chunk| chunk.meets(id, &wanted));
        if !is_there && chunks.all.len() == CHUNKS_MAX {
            return None;
        }
        run.is_planned(&wanted);
        if is_there {
            return None;
        }
        chunks.next_number += 1;
        let (number, since) = (chunks.next_number, Instant::now());
        let (state, left, is_void) = (State::Waiting, wanted.len(), false);
        chunks.all.push(Chunk { number, id, reader, stamp, pages: wanted.clone(), since, state, left, is_void });
        drop(chunks);
        // Where nobody listens yet, or any more, it is not read, and nobody waits for it.
        let _ = self.jobs.send(Job { number, size_bytes });
        Some(wanted)
    }

    /// Copies what was read ahead of the pages from `first` on, which are not `there` yet, and says that they are. Waits for what is being read.
    pub fn take(&self, open: &OpenFile, stamp: Stamp, first: u32, pages: &mut [Page], there: &mut [bool]) {
        let end = first.saturating_add(pages.len() as u32);
        let (mut from, mut in_vain) = (first, false);
        while from < end
            && let Some((filled, chunk, is_last)) = self.next_filled((open.node.pages, stamp), from..end, &mut in_vain)
        {
            let (begin, stop) = (chunk.start.max(from), chunk.end.min(end));
            for page in begin..stop {
                let (to, of) = ((page - first) as usize, (page - chunk.start) as usize);
                if !there[to] && filled.here[of] {
                    pages[to] = filled.buffer.pages()[of];
                    there[to] = true;
                }
            }
            from = stop;
            if is_last {
                self.lock().recycle(filled);
            }
        }
        if in_vain {
            open.run.lock().unwrap_or_else(PoisonError::into_inner).in_vain = Some(Instant::now());
        }
    }

    /// The next chunk with any of these pages, the pages it is of, and whether nobody will ask for it again. Says if there was one that is
    /// not what the file has now.
    fn next_filled(
        &self,
        (id, stamp): (FileId, Stamp),
        asked: Range<u32>,
        in_vain: &mut bool,
    ) -> Option<(Arc<Filled>, Range<u32>, bool)> {
        let mut chunks = self.lock();
        loop {
            let met = chunks.all.iter_mut().enumerate().filter(|(_, chunk)| chunk.meets(id, &asked));
            let (at, chunk) = met.min_by_key(|(_, chunk)| chunk.pages.start)?;
            if chunk.is_void || chunk.stamp != stamp {
                *in_vain = true;
                chunks.all.swap_remove(at);
                continue;
            }
            let filled = match &chunk.state {
                State::Ready(filled) => filled,
                State::Reading => {
                    chunks = self.read.wait(chunks).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                State::Waiting => {
                    // Whoever asks reads it himself; the thread may be busy with a disk that sleeps.
                    chunk.cut_off(&asked);
                    if chunk.pages.is_empty() {
                        chunks.all.swap_remove(at);
                    }
                    continue;
                }
            };
            let (filled, pages) = (filled.clone(), chunk.pages.clone());
            let taken = pages.start.max(asked.start)..pages.end.min(asked.end);
            chunk.left = chunk.left.saturating_sub(taken.len());
            chunk.since = Instant::now();
            let is_last = chunk.left == 0;
            if is_last {
                chunks.all.swap_remove(at);
            }
            return Some((filled, pages, is_last));
        }
    }

    /// What was read ahead of these pages is not what the file has, from now on.
    pub fn void(&self, id: FileId, pages: Range<u64>) {
        for chunk in &mut self.lock().all {
            chunk.is_void |=
                chunk.id == id && u64::from(chunk.pages.start) < pages.end && pages.start < u64::from(chunk.pages.end);
        }
    }

    /// An open file is closed: nothing more is read ahead of it.
    pub fn close(&self, open: &Arc<OpenFile>) {
        let reader = Arc::downgrade(open);
        self.lock().let_go(|chunk| chunk.reader.ptr_eq(&reader));
    }

    /// Begins to read a chunk, if it is wanted still: of what, which pages, and into what.
    fn begin(&self, number: u64) -> Option<(Arc<OpenFile>, Range<u32>, Aligned)> {
        let mut chunks = self.lock();
        let at = chunks.all.iter().position(|chunk| chunk.number == number)?;
        let chunk = &mut chunks.all[at];
        let Some(open) = chunk.reader.upgrade().filter(|_| !chunk.is_void) else {
            chunks.all.swap_remove(at);
            return None;
        };
        chunk.state = State::Reading;
        let pages = chunk.pages.clone();
        let buffer = chunks.spare.pop().unwrap_or_else(|| Aligned::new((u64::from(CHUNK_PAGES) * PAGE) as usize));
        Some((open, pages, buffer))
    }

    /// A chunk was read; which pages of it are `here` now.
    fn end(&self, number: u64, buffer: Aligned, here: [bool; CHUNK_PAGES as usize]) {
        let mut chunks = self.lock();
        let at = chunks.all.iter().position(|chunk| chunk.number == number);
        match at {
            Some(at) if here.contains(&true) && !chunks.all[at].is_void => {
                let chunk = &mut chunks.all[at];
                chunk.state = State::Ready(Arc::new(Filled { buffer, here }));
                chunk.since = Instant::now();
            }
            _ => {
                at.map(|at| chunks.all.swap_remove(at));
                chunks.spare(buffer);
            }
        }
        drop(chunks);
        self.read.notify_all();
    }

    /// Gives back what nobody asks for. Returns whether there is nothing more to give back.
    fn tidy(&self) -> bool {
        let mut chunks = self.lock();
        let (all, spare) = (chunks.all.len(), chunks.spare.len());
        chunks.let_go(|chunk| chunk.since.elapsed() >= PATIENCE);
        // Whoever has taken the last of something may be about to give a buffer back.
        if chunks.all.is_empty() {
            chunks.spare = Vec::new();
        }
        all == 0 && spare == 0
    }
}

impl Chunk {
    fn meets(&self, id: FileId, pages: &Range<u32>) -> bool {
        self.id == id && self.pages.start < pages.end && pages.start < self.pages.end
    }

    /// Leaves out these pages, some of its own, and what of it lies before them if it begins before them.
    fn cut_off(&mut self, pages: &Range<u32>) {
        if self.pages.start < pages.start {
            self.pages.end = pages.start;
        } else {
            self.pages.start = pages.end.min(self.pages.end);
        }
        self.left = self.pages.len();
    }
}

impl Chunks {
    /// Lets go of chunks that are not being read.
    fn let_go(&mut self, whether: impl Fn(&Chunk) -> bool) {
        let goes = |chunk: &mut Chunk| !matches!(chunk.state, State::Reading) && whether(chunk);
        let gone: Vec<_> = self.all.extract_if(.., goes).collect();
        for chunk in gone {
            if let State::Ready(filled) = chunk.state {
                self.recycle(filled);
            }
        }
    }

    /// Keeps the buffer of a chunk for the next one, if nobody copies from it now.
    fn recycle(&mut self, filled: Arc<Filled>) {
        if let Some(filled) = Arc::into_inner(filled) {
            self.spare(filled.buffer);
        }
    }

    fn spare(&mut self, buffer: Aligned) {
        if self.all.len() + self.spare.len() < CHUNKS_MAX {
            self.spare.push(buffer);
        }
    }
}

impl Jobs {
    /// Reads ahead for a tree, for as long as that is.
    pub fn start(self, tree: Weak<Tree>) -> std::io::Result<()> {
        let named = thread::Builder::new().name("ahead".into());
        named.spawn(move || self.serve(&tree)).map(drop)
    }

    fn serve(self, tree: &Weak<Tree>) {
        let (mut is_tidy, mut tidied) = (true, Instant::now());
        loop {
            let job = if is_tidy { self.0.recv().map_err(Into::into) } else { self.0.recv_timeout(PATIENCE) };
            let Some(tree) = tree.upgrade() else { return };
            match job {
                Ok(job) => {
                    is_tidy = false;
                    tree.read_chunk(&job);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if tidied.elapsed() >= PATIENCE {
                (is_tidy, tidied) = (tree.ahead.tidy(), Instant::now());
            }
        }
    }
}

impl Tree {
    fn read_chunk(&self, job: &Job) {
        let Some((open, chunk, mut buffer)) = self.ahead.begin(job.number) else { return };
        let mut here = [false; CHUNK_PAGES as usize];
        let (pages, _) = buffer.bytes().as_chunks_mut();
        let mut found = here;
        let found = &mut found[..chunk.len()];
        self.cache.find(open.node.pages, chunk.start, found);
        let (first, rest_bytes) = (u64::from(chunk.start), job.size_bytes - u64::from(chunk.start) * PAGE);
        for run in missing(found) {
            match self.read_run(&open, first, run.clone(), pages, rest_bytes) {
                Ok(end) if end == run.end * PAGE as usize => here[run].fill(true),
                // Whoever asks for it is told.
                _ => break,
            }
        }
        self.ahead.end(job.number, buffer, here);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use fuser::INodeNo;
    use rustix::fs::Timespec;

    use super::*;
    use crate::caller::Caller;
    use crate::inodes::Inodes;
    use crate::passthrough::Way;
    use crate::stamp::{look, stamp_of};

    /// Reads so many pages in requests of so many, from `first` on up or down, all of what is wanted being planned at once. Returns
    /// how many pages were read ahead that were not asked for then.
    fn read(run: &mut Run, first: u32, pages: u32, at_once: u32, down: bool) -> u32 {
        let mut ahead = vec![];
        for at in (0..pages).step_by(at_once as usize) {
            let end = (at + at_once).min(pages);
            let asked = if down { first + pages - end..first + pages - at } else { first + at..first + end };
            if let Some(wanted) = run.ask(asked) {
                run.is_planned(&wanted);
                assert!(ahead.iter().all(|page| !wanted.contains(page)), "planned twice");
                ahead.extend(wanted);
            }
        }
        ahead.iter().filter(|page| !(first..first + pages).contains(page)).count() as u32
    }

    #[test]
    fn who_reads_in_order_has_something_ahead_all_the_time() {
        for (down, at_once) in [(false, 32), (false, 5), (true, 32), (true, 17)] {
            let (mut run, mut planned) = (Run::default(), 0);
            for at in (0..20_000).step_by(at_once as usize) {
                let asked = if down { 30_000 - at - at_once..30_000 - at } else { at..at + at_once };
                if let Some(wanted) = run.ask(asked) {
                    run.is_planned(&wanted);
                    planned += wanted.len() as u32;
                    assert!(wanted.len() <= CHUNK_PAGES as usize);
                }
                let ahead = run.planned - run.next;
                assert!(at < 300 || (CHUNK_PAGES..=AHEAD_PAGES).contains(&ahead), "{ahead} pages ahead");
            }
            assert!(planned > 19_500, "{planned} pages of 20 000");
        }
        // At the ends of what can be counted.
        let mut run = Run::default();
        assert_eq!(read(&mut run, 0, 500, 20, true), 0);
        read(&mut run, u32::MAX - 500, 500, 20, false);
    }

    #[test]
    fn records_of_one_length_are_not_read_over_their_ends() {
        let mut rng = fastrand::Rng::with_seed(1);
        for (pages, at_once) in [(1, 1), (16, 16), (49, 17), (64, 32), (256, 32), (256, 17), (1000, 32)] {
            let mut run = Run::default();
            for round in 0..100 {
                let beyond = read(&mut run, rng.u32(0..10_000) * 2000, pages, at_once, round % 3 == 0);
                assert!(round == 0 || beyond == 0, "{beyond} pages beyond {pages}");
            }
        }
    }

    #[test]
    fn requests_that_overtake_each_other_are_one_run() {
        let (mut run, mut planned, mut rng) = (Run::default(), 0, fastrand::Rng::with_seed(1));
        for first in (0..100_000).step_by(64) {
            let two = [first..first + 32, first + 32..first + 64];
            let swapped = rng.u32(0..4) == 0;
            for asked in [&two[usize::from(swapped)], &two[usize::from(!swapped)]] {
                if let Some(wanted) = run.ask(asked.clone()) {
                    run.is_planned(&wanted);
                    planned += wanted.len();
                }
            }
        }
        assert!(planned > 95_000, "{planned}");
    }

    /// An open file of so many pages, and what it is.
    fn open(dir: &std::path::Path, pages: u64) -> (Arc<OpenFile>, Stamp) {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(dir.join("f")).unwrap();
        for page in 0..pages {
            file.write_all_at(&[page as u8; PAGE as usize], page * PAGE).unwrap();
        }
        let stamp = stamp_of(&look(&file).unwrap());
        let node = Inodes::new(dir).unwrap().get(INodeNo::ROOT).unwrap();
        let (direct, unconfirmed, appends, run) = Default::default();
        let (fd, writes, only_appends, watched) = (file.into(), false, false, false);
        (
            Arc::new(OpenFile {
                fd,
                direct,
                node,
                way: Way::Served,
                writes,
                opener: Caller { uid: 0, gid: 0 },
                only_appends,
                stores: None,
                is_past_pages: false,
                watched,
                unconfirmed,
                appends,
                run,
            }),
            stamp,
        )
    }

    /// Reads what is planned, as the thread does. Returns how many pages that were.
    fn read_all(ahead: &Ahead, jobs: &Jobs) -> usize {
        jobs.0.try_iter().filter_map(|job| ahead.begin(job.number).map(|begun| read_chunk(ahead, &job, begun))).sum()
    }

    fn read_chunk(ahead: &Ahead, job: &Job, (open, chunk, mut buffer): (Arc<OpenFile>, Range<u32>, Aligned)) -> usize {
        let mut here = [false; CHUNK_PAGES as usize];
        here[..chunk.len()].fill(true);
        let into = &mut buffer.bytes()[..chunk.len() * PAGE as usize];
        File::from(open.fd.try_clone().unwrap()).read_exact_at(into, u64::from(chunk.start) * PAGE).unwrap();
        ahead.end(job.number, buffer, here);
        chunk.len()
    }

    /// How many of these pages were read ahead; they are what they should be.
    fn taken(ahead: &Ahead, open: &OpenFile, stamp: Stamp, pages: Range<u32>) -> usize {
        let (mut into, mut there) = (vec![[0xee; PAGE as usize]; pages.len()], vec![false; pages.len()]);
        there[0] = true;
        ahead.take(open, stamp, pages.start, &mut into, &mut there);
        assert_eq!(into[0], [0xee; PAGE as usize], "it was there");
        for ((page, into), there) in pages.zip(&into).zip(&there).skip(1) {
            assert_eq!(*into, [if *there { page as u8 } else { 0xee }; PAGE as usize]);
        }
        there.iter().skip(1).filter(|there| **there).count()
    }

    /// Plans for one who does not take long between two requests, however busy the machine is.
    fn at_once(
        ahead: &Ahead,
        open: &Arc<OpenFile>,
        stamp: Stamp,
        pages: Range<u32>,
        size_bytes: u64,
    ) -> Option<Range<u32>> {
        open.run.lock().unwrap().wanted_at = None;
        ahead.plan(open, stamp, pages, size_bytes)
    }

    #[test]
    fn what_was_read_ahead_is_taken_once_and_only_while_it_is_what_the_file_has() {
        let dir = tempfile::tempdir().unwrap();
        let (open, stamp) = open(dir.path(), 2000);
        let size_bytes = 2000 * PAGE;
        let (ahead, jobs) = Ahead::new();
        let ask =
            |pages: Range<u32>| at_once(&ahead, &open, stamp, pages, size_bytes).map_or(0, |planned| planned.len());
        ask(0..64);
        ask(64..128);
        assert_eq!(read_all(&ahead, &jobs), 64);
        assert_eq!(taken(&ahead, &open, stamp, 128..150), 21);
        assert_eq!(taken(&ahead, &open, stamp, 150..250), 41);
        assert!(ahead.lock().all.is_empty(), "all of it was asked for");
        assert_eq!(taken(&ahead, &open, stamp, 128..200), 0);

        // Written to, before it is read, and after.
        ask(128..192);
        ahead.void(open.node.pages, 255..256);
        assert_eq!(read_all(&ahead, &jobs), 0);
        assert_eq!(taken(&ahead, &open, stamp, 192..256), 0);
        ask(192..256);
        ask(256..320);
        assert_eq!(read_all(&ahead, &jobs), 128);
        ahead.void(open.node.pages, 100..256);
        ahead.void(FileId { dev: 1, ino: 2 }, 0..10_000);
        assert_eq!(taken(&ahead, &open, stamp, 256..300), 43);
        ahead.void(open.node.pages, 383..1000);
        assert_eq!(taken(&ahead, &open, stamp, 300..320), 19, "that of the next chunk is none of this one's");
        assert_eq!(taken(&ahead, &open, stamp, 320..384), 0);
        assert!(open.run.lock().unwrap().in_vain.is_some());
        open.run.lock().unwrap().in_vain = Some(Instant::now());
        assert_eq!(ask(320..384) + ask(384..448), 0, "read ahead although the file has just changed");

        // Another version of the file.
        open.run.lock().unwrap().in_vain = None;
        ask(448..512);
        assert_eq!(read_all(&ahead, &jobs), 64);
        std::thread::sleep(Duration::from_millis(20));
        let times = rustix::fs::Timestamps {
            last_access: Timespec { tv_sec: 1, tv_nsec: 0 },
            last_modification: Timespec { tv_sec: 1, tv_nsec: 0 },
        };
        rustix::fs::futimens(&open.fd, &times).unwrap();
        assert_eq!(taken(&ahead, &open, stamp_of(&look(&open.fd).unwrap()), 512..576), 0);
        assert!(ahead.lock().all.is_empty());
    }

    #[test]
    fn who_asks_for_what_is_being_read_waits_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let (open, stamp) = open(dir.path(), 500);
        let (ahead, jobs) = Ahead::new();
        at_once(&ahead, &open, stamp, 0..64, 500 * PAGE);
        at_once(&ahead, &open, stamp, 64..128, 500 * PAGE);
        at_once(&ahead, &open, stamp, 128..192, 500 * PAGE);
        assert_eq!(taken(&ahead, &open, stamp, 192..224), 0, "nobody waits for what is not begun");
        let job = jobs.0.recv_timeout(Duration::from_secs(20)).unwrap();
        let begun = ahead.begin(job.number).unwrap();
        thread::scope(|scope| {
            let asks = scope.spawn(|| taken(&ahead, &open, stamp, 128..192));
            thread::sleep(Duration::from_millis(50));
            assert!(!asks.is_finished());
            assert_eq!(read_chunk(&ahead, &job, begun), 64);
            assert_eq!(asks.join().unwrap(), 63);
        });
        assert_eq!(read_all(&ahead, &jobs), 32, "but what was asked for");
        assert_eq!(taken(&ahead, &open, stamp, 223..256), 32);

        // Written to while somebody waits for it.
        at_once(&ahead, &open, stamp, 192..256, 500 * PAGE);
        let job = jobs.0.recv_timeout(Duration::from_secs(20)).unwrap();
        let begun = ahead.begin(job.number).unwrap();
        thread::scope(|scope| {
            let asks = scope.spawn(|| taken(&ahead, &open, stamp, 256..300));
            thread::sleep(Duration::from_millis(50));
            ahead.void(open.node.pages, 310..311);
            assert_eq!(taken(&ahead, &open, stamp, 300..320), 0);
            read_chunk(&ahead, &job, begun);
            assert_eq!(asks.join().unwrap(), 0);
        });
    }

    #[test]
    fn nothing_is_read_ahead_of_who_is_slow_or_has_closed_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let (open, stamp) = open(dir.path(), 500);
        let (ahead, jobs) = Ahead::new();
        let ask = |pages: Range<u32>| ahead.plan(&open, stamp, pages, 2000 * PAGE).is_some();
        let after = |time| open.run.lock().unwrap().wanted_at = Some(Instant::now() - time);
        assert!(!ask(0..64) && ask(64..128));
        after(SLOW);
        assert!(!ask(128..192));
        after(SLOW);
        assert!(!ask(192..256));
        after(Duration::ZERO);
        assert!(ask(256..320));
        ahead.close(&open);
        assert!(ahead.lock().all.is_empty());
        assert_eq!(read_all(&ahead, &jobs), 0);
    }

    #[test]
    fn there_are_so_many_chunks_at_most_and_what_nobody_asks_for_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let (ahead, jobs) = Ahead::new();
        let all: Vec<_> = (0..20).map(|_| open(dir.path(), 500)).collect();
        for (number, (open, stamp)) in (0..).zip(&all) {
            ahead.plan(open, *stamp, number * 200..number * 200 + 64, 10_000 * PAGE);
            ahead.plan(open, *stamp, number * 200 + 64..number * 200 + 128, 10_000 * PAGE);
        }
        assert_eq!(ahead.lock().all.len(), CHUNKS_MAX);
        ahead.lock().all.iter_mut().for_each(|chunk| chunk.since = Instant::now());
        assert!(!ahead.tidy() && ahead.lock().all.len() == CHUNKS_MAX, "not yet");
        for chunk in &mut ahead.lock().all {
            chunk.since -= PATIENCE;
        }
        assert!(!ahead.tidy() && ahead.lock().all.is_empty() && ahead.lock().spare.is_empty());
        assert!(ahead.tidy(), "nothing more");
        assert_eq!(read_all(&ahead, &jobs), 0, "given back before it was read");
    }
}
