//! The system calls, and the views of memory that no Rust object owns.

use compcache_testkit::PAGE_BYTES as PAGE;

use crate::model::WORDS;

/// A page of a region that the caller has mapped and alone writes to.
pub fn page(at: usize) -> &'static [u64; WORDS] {
    // SAFETY: every caller passes an address within a mapping of its own (the model says so), page aligned, readable;
    // nobody writes to it while the view is used, which is one statement long. A wrong address is a fault, not a lie.
    unsafe { &*(at as *const [u64; WORDS]) }
}

/// The same, to be written.
pub fn page_mut(at: usize) -> &'static mut [u64; WORDS] {
    // SAFETY: as `page`; pages have one owner, and no other view of this one is alive.
    unsafe { &mut *(at as *mut [u64; WORDS]) }
}

pub fn map(pages: usize) -> usize {
    map_with(0, pages, 0)
}

/// New memory over what was there.
pub fn map_at(at: usize, pages: usize) {
    assert_eq!(map_with(at, pages, libc::MAP_FIXED), at);
}

fn map_with(at: usize, pages: usize, flags: libc::c_int) -> usize {
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: with MAP_FIXED the range is a part of a region of the caller; else the kernel chooses free space.
    let got = unsafe { libc::mmap(at as *mut libc::c_void, pages * PAGE, rights, flags, -1, 0) };
    must(got != libc::MAP_FAILED, "mmap");
    got as usize
}

pub fn unmap(at: usize, pages: usize) {
    // SAFETY: the range is a region of the caller, who forgets it.
    must(unsafe { libc::munmap(at as *mut libc::c_void, pages * PAGE) } == 0, "munmap");
}

/// The new address; `None` if the kernel refuses, as it does when the range has become several mappings.
pub fn resize(at: usize, old: usize, new: usize) -> Option<usize> {
    if !is_one_mapping(at, old) {
        return None;
    }
    // SAFETY: the range is a region of the caller, who takes the new address.
    let got = unsafe { libc::mremap(at as *mut libc::c_void, old * PAGE, new * PAGE, libc::MREMAP_MAYMOVE) };
    accepted(got)
}

/// The same, onto `target`, whose contents are given up. After a refusal it may be mapped or not.
pub fn move_to(at: usize, old: usize, new: usize, target: usize) -> Option<usize> {
    if !is_one_mapping(at, old) {
        return None;
    }
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: both ranges belong to the caller; what the target held is given up.
    let got =
        unsafe { libc::mremap(at as *mut libc::c_void, old * PAGE, new * PAGE, flags, target as *mut libc::c_void) };
    accepted(got)
}

/// Whether the kernel has the range as one mapping. mremap of several is refused where a pager has registered them, and
/// Linux 6.17 and newer have then moved some of them already: a limit that docs/semantics.md tells, not to be tested here.
fn is_one_mapping(at: usize, pages: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc/self/maps is readable");
    maps.lines().any(|line| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let Some((start, end)) = range else { return false };
        let address = |text| usize::from_str_radix(text, 16).unwrap_or(0);
        address(start) <= at && at + pages * PAGE <= address(end)
    })
}

fn accepted(got: *mut libc::c_void) -> Option<usize> {
    let refused = std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT);
    must(got != libc::MAP_FAILED || refused, "mremap");
    (got != libc::MAP_FAILED).then_some(got as usize)
}

/// Advice may be refused (an old kernel, a page that cannot be had): only its effect on contents matters.
pub fn advise(at: usize, pages: usize, advice: libc::c_int) {
    // SAFETY: the range is a region of the caller, whose model follows the advice.
    let answer = unsafe { libc::madvise(at as *mut libc::c_void, pages * PAGE, advice) };
    let harmless = !matches!(advice, libc::MADV_DONTNEED | libc::MADV_FREE);
    must(answer == 0 || harmless, "madvise");
}

pub fn protect(at: usize, pages: usize, rights: libc::c_int) {
    // SAFETY: the range is a region of the caller, who does not touch it in a way that the rights forbid.
    must(unsafe { libc::mprotect(at as *mut libc::c_void, pages * PAGE, rights) } == 0, "mprotect");
}

pub fn heap_end() -> usize {
    // SAFETY: asks only.
    unsafe { libc::sbrk(0) as usize }
}

/// Only thread 0 calls it, the main thread sleeps, and other threads allocate from arenas of their own.
pub fn set_heap_end(end: usize) -> bool {
    // SAFETY: `end` is at or above the end that was found when the heap region began, which nobody else moved.
    unsafe { libc::brk(end as *mut libc::c_void) == 0 }
}

pub fn fork() -> libc::pid_t {
    // SAFETY: the child uses what the C library makes safe after fork (its allocator), and raw system calls.
    let child = unsafe { libc::fork() };
    must(child >= 0, "fork");
    child
}

pub fn wait(child: libc::pid_t, block: bool) -> Option<libc::c_int> {
    let mut status = 0;
    // SAFETY: `status` is ours; the child is ours.
    let got = unsafe { libc::waitpid(child, &mut status, if block { 0 } else { libc::WNOHANG }) };
    must(got >= 0, "waitpid");
    (got == child).then_some(status)
}

pub fn sleep_ms(milliseconds: u64) {
    std::thread::sleep(std::time::Duration::from_millis(milliseconds));
}

pub fn exit(status: libc::c_int) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(status) }
}

/// Says it with one write, and ends all threads at once.
pub fn fail(report: &str) -> ! {
    // SAFETY: the bytes are those of `report`.
    unsafe { libc::write(2, report.as_ptr().cast(), report.len()) };
    exit(1);
}

fn must(condition: bool, what: &str) {
    if !condition {
        fail(&format!("FAILED: {what}: {}\n", std::io::Error::last_os_error()));
    }
}
