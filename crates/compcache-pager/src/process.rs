//! What the pager asks the kernel about its own process, without allocating.

use crate::maps::hex;
use crate::memory::PAGE;
use crate::pager::Pager;
use crate::shared::Trouble;
use crate::sys;
use core::mem::MaybeUninit;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags, RawDir};

/// Opens a file of `/proc/self`.
pub fn open(path: &core::ffi::CStr) -> Option<OwnedFd> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// Gives a descriptor that stays open a high number, where that is allowed.
///
/// A limit on descriptors is one on their numbers, and the program may lower it at any time. The low ones are then left
/// for what comes and goes: above all for the descriptor that the kernel hands over with the news of a fork, without
/// which neither that news nor any after it can be read.
pub fn out_of_the_way(descriptor: OwnedFd) -> OwnedFd {
    with_high_number(&descriptor).unwrap_or(descriptor)
}

/// The same file under a high number, if that is allowed.
pub fn with_high_number(descriptor: &OwnedFd) -> Option<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(descriptor, KEPT_FROM).ok()
}

/// Kept descriptors are numbered from here: below what makes the kernel enlarge its table.
const KEPT_FROM: i32 = 32;

/// Resident anonymous memory, pages: `/proc/self/statm`, resident less shared.
pub fn anonymous_pages(statm: BorrowedFd<'_>) -> Option<u64> {
    let mut text = [0u8; 128];
    let read = rustix::io::pread(statm, &mut text, 0).ok()?;
    let mut numbers = text[..read].split(|&byte| byte == b' ').map(number);
    let (resident, shared) = (numbers.nth(1)??, numbers.next()??);
    Some(resident.saturating_sub(shared))
}

pub fn number(digits: &[u8]) -> Option<u64> {
    let digits = digits.strip_suffix(b"\n").unwrap_or(digits);
    (!digits.is_empty()).then_some(())?;
    digits.iter().try_fold(0u64, |value, &digit| digit.is_ascii_digit().then(|| value * 10 + u64::from(digit - b'0')))
}

/// Calls `each` with the number of every thread of this process.
pub fn for_each_thread(each: impl FnMut(u32)) {
    if let Some(directory) = open(c"/proc/self/task") {
        for_each_number(directory.as_fd(), each);
    }
}

/// Calls `each` with every descriptor of the calling thread's. It may close them.
pub fn for_each_descriptor(mut each: impl FnMut(u32)) {
    let Some(directory) = open(c"/proc/thread-self/fd") else { return };
    let own = directory.as_raw_fd() as u32;
    for_each_number(directory.as_fd(), |number| {
        if number != own {
            each(number);
        }
    });
}

/// Calls `each` with every name in a directory that is a number.
fn for_each_number(directory: BorrowedFd<'_>, mut each: impl FnMut(u32)) {
    let mut room = [MaybeUninit::uninit(); 1024];
    let mut entries = RawDir::new(directory, &mut room);
    while let Some(Ok(entry)) = entries.next() {
        // Neither "." nor ".." is a number.
        if let Some(number) = number(entry.file_name().to_bytes()) {
            each(number as u32);
        }
    }
}

/// Whether this process has one thread, ended or not, beside so many of the pager's.
pub fn has_one_thread_beside(ours: u64) -> bool {
    let mut threads = 0;
    for_each_thread(|_| threads += 1);
    threads == ours + 1
}

/// The exit status of the main thread, if every thread of this process has ended but `ours`. That the main thread has ended alone says
/// little: others go on then.
pub fn ended_with(ours: u64) -> Option<i32> {
    let mut text = [0u8; 1024];
    let read = open(c"/proc/self/stat").and_then(|stat| rustix::io::pread(stat, &mut text, 0).ok())?;
    // The state follows the name, which is in brackets and may hold any; the status is last, as wait(2) has it.
    let name_end = text[..read].iter().rposition(|&byte| byte == b')')?;
    if text.get(name_end + 2) != Some(&b'Z') {
        return None;
    }
    let status = text[name_end..read].rsplit(|&byte| byte == b' ').next().and_then(number)?;
    has_one_thread_beside(ours).then_some((status >> 8) as i32 & 0xff)
}

/// What a thread of this process does, as the kernel tells it: the number of its system call, the arguments, and where its stack and its code are. -1 is no call.
fn read_call(thread: u32, line: &mut [u8; 256]) -> Option<&[u8]> {
    let mut path = [0u8; 64];
    let file = open(text(&mut path, format_args!("/proc/self/task/{thread}/syscall\0"))?)?;
    let read = rustix::io::pread(file, &mut line[..], 0).ok()?;
    Some(&line[..read])
}

/// Whether a thread of this process is in its own code, and not in a system call.
pub fn is_in_program(thread: u32) -> bool {
    read_call(thread, &mut [0; 256]).is_some_and(|line| line.starts_with(b"-1 "))
}

/// A call of mremap(2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mremap {
    pub address: usize,
    /// Whole pages.
    pub old_len: usize,
    pub new_len: usize,
    /// Where it is to be, if the program says so.
    pub to: Option<usize>,
}

/// The call of mremap(2) that a thread of this process is within.
pub fn mremap_of(thread: u32) -> Option<Mremap> {
    parse_mremap(read_call(thread, &mut [0; 256])?)
}

/// As such a line says it: the number of the call, its six arguments, and two more addresses.
fn parse_mremap(line: &[u8]) -> Option<Mremap> {
    const MREMAP_FIXED: usize = 2;
    let mut words = line.split(|&byte| byte == b' ');
    if number(words.next()?)? != linux_raw_sys::general::__NR_mremap.into() {
        return None;
    }
    let mut argument = || hex(words.next()?.strip_prefix(b"0x")?);
    let (address, old, new, flags, to) = (argument()?, argument()?, argument()?, argument()?, argument()?);
    let [old_len, new_len] = [old.checked_next_multiple_of(PAGE)?, new.checked_next_multiple_of(PAGE)?];
    Some(Mremap { address, old_len, new_len, to: (flags & MREMAP_FIXED != 0).then_some(to) })
}

/// That of the first thread, by which it is seen where it runs.
pub fn open_first_stat() -> Option<OwnedFd> {
    let mut path = [0u8; 64];
    open(thread_path(rustix::process::getpid().as_raw_nonzero().get() as u32, &mut path)?)
}

/// The file that tells where a thread of this process runs, among other things.
pub fn thread_path(thread: u32, buffer: &mut [u8; 64]) -> Option<&core::ffi::CStr> {
    text(buffer, format_args!("/proc/self/task/{thread}/stat\0"))
}

/// What the descriptor `number` of a thread of this process is, opened once more in the calling thread's table.
pub fn open_of_thread(thread: u32, number: i32) -> Option<OwnedFd> {
    let mut buffer = [0; 64];
    let path = text(&mut buffer, format_args!("/proc/self/task/{thread}/fd/{number}\0"))?;
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// A short text that ends with a zero, written into a buffer.
pub fn text<'b>(buffer: &'b mut [u8; 64], what: core::fmt::Arguments<'_>) -> Option<&'b core::ffi::CStr> {
    use core::fmt::Write;
    struct Text<'a>(&'a mut [u8; 64], usize);
    impl Write for Text<'_> {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            let end = self.1 + text.len();
            self.0.get_mut(self.1..end).ok_or(core::fmt::Error)?.copy_from_slice(text.as_bytes());
            self.1 = end;
            Ok(())
        }
    }
    let mut text = Text(buffer, 0);
    text.write_fmt(what).ok()?;
    core::ffi::CStr::from_bytes_until_nul(&buffer[..]).ok()
}

/// CPU time of all threads of this process but the calling one, nanoseconds.
pub fn cpu_time_of_others_ns() -> u64 {
    use rustix::time::{ClockId, clock_gettime};
    let ns = |clock| {
        let now = clock_gettime(clock);
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    };
    ns(ClockId::ProcessCPUTime).saturating_sub(ns(ClockId::ThreadCPUTime))
}

/// Ends the process: going on would mean wrong bytes or a hang. `compcache run` says why.
///
/// What is noted with it is the line that called, for the report.
#[track_caller]
pub fn die(pager: &Pager, trouble: Trouble) -> ! {
    pager.region.note_trouble(trouble, core::panic::Location::caller().line() as i32);
    sys::abort()
}

/// Rounds down to a page.
pub fn page_of(address: usize) -> u64 {
    (address / PAGE) as u64
}

#[cfg(test)]
#[allow(unsafe_code, reason = "makes a process that ends")]
mod tests {
    use super::{Mremap, parse_mremap};
    use crate::sys;

    #[test]
    fn a_call_of_mremap_is_read_as_the_kernel_tells_it() {
        let call = |flags| {
            parse_mremap(format!("25 0x7f0000 0x5000000 0x7800001 {flags} 0x9f0000 0x0 0x7ffc00 0x7f00\n").as_bytes())
        };
        let expected = Mremap { address: 0x7f_0000, old_len: 0x500_0000, new_len: 0x780_1000, to: None };
        assert_eq!(call("0x1"), Some(expected));
        assert_eq!(call("0x3"), Some(Mremap { to: Some(0x9f_0000), ..expected }));
        for other in ["running\n", "9 0x1 0x2 0x3000 0x1 0x0\n", "25 0x1", ""] {
            assert_eq!(parse_mremap(other.as_bytes()), None, "{other}");
        }
    }

    extern "C" fn returns(_: i32) {}

    /// How a copy of this process ends that prepares itself and aborts; `None` when it does not end.
    fn end_of_one_that(prepares: fn()) -> Option<i32> {
        // SAFETY: the copy makes system calls only.
        let child = unsafe { libc::fork() };
        if child == 0 {
            prepares();
            sys::abort();
        }
        let mut status = 0;
        for _ in 0..2000 {
            // SAFETY: the status is ours.
            if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
                return libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        // SAFETY: a child of this process, which has not been waited for.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, &raw mut status, 0);
        }
        None
    }

    #[test]
    fn a_process_ends_by_sigabrt_whatever_it_has_made_of_it() {
        // SAFETY: both handlers do nothing.
        let ignores = || _ = unsafe { libc::signal(libc::SIGABRT, libc::SIG_IGN) };
        // SAFETY: as above.
        let handles = || _ = unsafe { libc::signal(libc::SIGABRT, returns as *const () as libc::sighandler_t) };
        let blocks = || _ = sys::block_signals();
        assert_eq!(end_of_one_that(ignores), Some(libc::SIGABRT));
        assert_eq!(end_of_one_that(handles), Some(libc::SIGABRT));
        assert_eq!(end_of_one_that(blocks), Some(libc::SIGABRT));
    }

    #[test]
    fn all_descriptors_are_found_but_the_one_that_looks() {
        let high = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 200).unwrap();
        let number = |fd: &dyn rustix::fd::AsRawFd| fd.as_raw_fd() as u32;
        let its = number(&high);
        let mut found = std::collections::BTreeSet::new();
        super::for_each_descriptor(|number| assert!(found.insert(number)));
        assert!(found.contains(&its) && found.contains(&number(&std::io::stderr())), "{found:?}");
        // The one that looked is closed.
        let mut again = std::collections::BTreeSet::new();
        super::for_each_descriptor(|number| assert!(again.insert(number)));
        assert!(again.contains(&its));
    }
}
