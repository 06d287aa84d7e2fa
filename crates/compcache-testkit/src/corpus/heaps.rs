//! The programs whose heaps are read: how each is started, when its heap is ready, and how it is ended.
//!
//! The scripts in `workloads/` build what such programs hold, print `ready`, and wait until their input ends. The
//! compiler cannot be asked to wait: it is stopped in the middle of its work.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::snapshot;
use super::{IMAGE_PAGES, Page};
use crate::PAGE_BYTES;

/// How much a heap grows before it is read: half as much again as an image takes.
const HEAP_MB: usize = IMAGE_PAGES * PAGE_BYTES / (1 << 20) * 3 / 2;

/// No workload takes a tenth of this on a machine of today.
const PATIENCE: Duration = Duration::from_secs(180);

pub(super) fn python() -> io::Result<Vec<Page>> {
    let mut command = Command::new("python3");
    command.args(["-c", include_str!("workloads/heap.py"), &HEAP_MB.to_string()]).env("PYTHONHASHSEED", "1");
    waiting(command, b"", "python3")
}

pub(super) fn node() -> io::Result<Vec<Page>> {
    let mut command = Command::new("node");
    command.args(["-e", include_str!("workloads/heap.js"), &HEAP_MB.to_string()]);
    waiting(command, b"", "node (on Debian, nodejs)")
}

pub(super) fn jvm() -> io::Result<Vec<Page>> {
    let dir = Scratch::new("jvm")?;
    let source = dir.0.join("Heap.java");
    fs::write(&source, include_str!("workloads/Heap.java"))?;
    let mut command = Command::new("java");
    command.arg("-Xmx1g").arg(&source).arg(HEAP_MB.to_string());
    waiting(command, b"", "java with its compiler (on Debian, default-jdk-headless)")
}

pub(super) fn database() -> io::Result<Vec<Page>> {
    let mut command = Command::new("sqlite3");
    command.arg("-batch").arg(":memory:");
    waiting(command, include_bytes!("workloads/heap.sql"), "sqlite3")
}

pub(super) fn compiler() -> io::Result<Vec<Page>> {
    let dir = Scratch::new("compiler")?;
    let source = dir.0.join("heap.cpp");
    fs::write(&source, large_source())?;
    let mut command = Command::new("g++");
    command.args(["-O2", "-w", "-S", "-o", "/dev/null"]).arg(&source);
    let mut driver = Running::start(&mut command, "g++")?;
    let wanted = (HEAP_MB as u64 * 3 / 2) << 20;
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        if driver.0.try_wait()?.is_some() {
            return Err(io::Error::other("g++ ended before its heap had grown enough to be read"));
        }
        match child_of(driver.0.id(), "cc1plus") {
            Some(pid) if snapshot::resident_bytes(pid) >= wanted => {
                let content = stopped(pid);
                // The driver sees its compiler die and ends by itself.
                signal(pid, libc::SIGKILL);
                return content;
            }
            _ => thread::sleep(Duration::from_millis(5)),
        }
    }
    Err(io::Error::other("g++ did not grow to the wanted size in time"))
}

/// Starts `command`, gives it `input`, waits for the line `ready`, and reads its heap.
fn waiting(mut command: Command, input: &[u8], install: &str) -> io::Result<Vec<Page>> {
    let mut program = Running::start(&mut command, install)?;
    let mut stdin = program.0.stdin.take().expect("piped");
    stdin.write_all(input)?;
    stdin.flush()?;
    let mut said = String::new();
    for line in BufReader::new(program.0.stdout.take().expect("piped")).lines() {
        let line = line?;
        if line == "ready" {
            return snapshot::of_process(program.0.id());
        }
        said.push_str(&line);
        said.push('\n');
    }
    let status = program.0.wait()?;
    Err(io::Error::other(format!("{install} ended with {status} before its heap was ready: {said}")))
}

fn stopped(pid: u32) -> io::Result<Vec<Page>> {
    signal(pid, libc::SIGSTOP);
    thread::sleep(Duration::from_millis(20));
    snapshot::of_process(pid)
}

/// Sends a signal to a process that this module started and has not yet waited for.
fn signal(pid: u32, which: libc::c_int) {
    // SAFETY: kill(2) takes two numbers and touches no memory of ours. The pid is a child, or a child of a child that is
    // still running, so it cannot have been given to another process.
    unsafe { libc::kill(pid as libc::pid_t, which) };
}

/// The process called `name` whose parent is `parent`.
fn child_of(parent: u32, name: &str) -> Option<u32> {
    let is_it = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let Some((head, tail)) = stat.rsplit_once(')') else { return false };
        head.ends_with(&format!("({name}")) && tail.split_whitespace().nth(1) == Some(&parent.to_string())
    };
    fs::read_dir("/proc").ok()?.flatten().filter_map(|one| one.file_name().to_str()?.parse().ok()).find(is_it)
}

/// A C++ file that keeps a compiler busy: the heavy headers, and many templates of different types.
fn large_source() -> String {
    let headers =
        ["algorithm", "functional", "future", "iostream", "map", "memory", "random", "regex", "set", "string"];
    let mut source: String = headers.iter().map(|name| format!("#include <{name}>\n")).collect();
    for nth in 0..400 {
        source.push_str(&format!(
            "struct T{nth} {{ int a[{size}]; std::string s; double d; bool operator<(const T{nth}& o) const \
             {{ return s < o.s || a[0] < o.a[0]; }} }};\n\
             std::map<T{nth}, std::set<std::string>> m{nth};\n\
             double f{nth}(std::vector<T{nth}>& v, std::function<double(const T{nth}&)> g) {{\n  \
             std::sort(v.begin(), v.end()); double sum = {nth};\n  \
             for (auto& t : v) {{ m{nth}[t].insert(t.s + \"{nth}\"); sum += g(t) * t.a[{nth} % {size}]; }}\n  \
             for (auto& p : m{nth}) for (auto& s : p.second) sum += s.size();\n  return sum;\n}}\n",
            size = nth % 7 + 1
        ));
    }
    source
}

/// A child that is killed and waited for when it goes out of scope.
struct Running(Child);

impl Running {
    fn start(command: &mut Command, install: &str) -> io::Result<Running> {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        child.map(Running).map_err(|error| {
            let name = command.get_program().to_string_lossy();
            io::Error::new(error.kind(), format!("cannot start {name} ({error}); install {install}"))
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory that is removed when it goes out of scope.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> io::Result<Scratch> {
        let dir: &Path = &super::directory();
        let path = dir.join(format!("{name}.work"));
        fs::create_dir_all(&path)?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
