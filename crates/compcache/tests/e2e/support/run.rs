//! One run of one program: bare, or under compcache one way or the other.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::{Cgroup, Guard, build, compcache, diagnose};

/// Ends the processes of a run: those of the group `$1`, and those that carry its mark, `$2`. See [`diagnose`].
const END: &str = r#"
kill -s KILL -- "-$1"
for of in $(grep -lzxs "$2" /proc/[0-9]*/environ); do
    of=${of#/proc/}
    kill -s KILL "${of%/environ}"
done"#;

/// A run may take this long, and hangs if it takes longer.
const PATIENCE: Duration = Duration::from_secs(600);

/// How the program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Without compcache.
    Bare,
    /// `--evict move`.
    Move,
    /// `--evict remap`: what kernels without UFFDIO_MOVE do.
    Remap,
}

/// The ways to run under compcache on this machine, of those that `COMPCACHE_WAYS` allows.
///
/// # Panics
/// It names something else, or nothing: tests would pass that have run nothing.
pub fn ways() -> Vec<Way> {
    let wanted = ways_of(&std::env::var("COMPCACHE_WAYS").unwrap_or("move,remap".into()));
    let mut ways = Vec::new();
    if !compcache_testkit::features::requires(&[compcache_testkit::features::Feature::Userfaultfd]) {
        return ways;
    }
    if wanted.contains(&Way::Move)
        && compcache_testkit::features::requires(&[compcache_testkit::features::Feature::UffdMove])
    {
        ways.push(Way::Move);
    }
    if wanted.contains(&Way::Remap) {
        ways.push(Way::Remap);
    }
    ways
}

fn ways_of(words: &str) -> Vec<Way> {
    let way = |word: &str| match word.trim() {
        "move" => Way::Move,
        "remap" => Way::Remap,
        _ => panic!("COMPCACHE_WAYS={words:?}: {word:?} is neither move nor remap"),
    };
    words.split(',').map(way).collect()
}

#[test]
fn ways_that_there_are_not_are_refused() {
    assert_eq!(ways_of("remap,move"), [Way::Remap, Way::Move]);
    assert_eq!(ways_of("move"), [Way::Move]);
    for words in ["", "bare", "moves", "move,", "move;remap"] {
        assert!(std::panic::catch_unwind(|| ways_of(words)).is_err(), "{words:?} is understood");
    }
}

/// What the program may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cap {
    /// `--resident`, in bytes.
    Resident(u64),
    /// `--ram`, in bytes.
    Ram(u64),
}

impl Cap {
    /// `--resident`, in MiB.
    pub fn resident_mib(mib: u64) -> Self {
        Self::Resident(mib << 20)
    }

    pub fn bytes(&self) -> u64 {
        match self {
            Self::Resident(bytes) | Self::Ram(bytes) => *bytes,
        }
    }
}

// Tests that measure run alone (all of them in `accounting.rs`, whose header says why), all others beside each other.
static MACHINE: RwLock<()> = RwLock::new(());

/// Nothing else runs while this is held.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    MACHINE.write().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Others may run at the same time.
pub fn beside_others() -> RwLockReadGuard<'static, ()> {
    MACHINE.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A program to be run, any number of times.
#[derive(Clone)]
pub struct Program {
    path: OsString,
    arguments: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
    flags: Vec<OsString>,
    dir: Option<PathBuf>,
    input: Option<PathBuf>,
    piped_input: bool,
    patience: Duration,
}

impl Program {
    pub fn new(path: impl AsRef<OsStr>) -> Self {
        Self {
            path: path.as_ref().to_owned(),
            arguments: Vec::new(),
            variables: Vec::new(),
            flags: Vec::new(),
            dir: None,
            input: None,
            piped_input: false,
            patience: PATIENCE,
        }
    }

    pub fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.variables.push((name.into(), value.as_ref().to_owned()));
        self
    }

    /// More flags for `compcache run`.
    pub fn flags(mut self, flags: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.flags.extend(flags.into_iter().map(|flag| flag.as_ref().to_owned()));
        self
    }

    /// The same program in a memory cgroup.
    pub fn inside(&self, cgroup: &Cgroup) -> Self {
        let mut inside = self.clone();
        inside.path = "sh".into();
        inside.arguments = cgroup.inside().into();
        inside.arguments.push(self.path.clone());
        inside.args(&self.arguments)
    }

    pub fn dir(mut self, dir: &Path) -> Self {
        self.dir = Some(dir.to_owned());
        self
    }

    /// Standard input from a file.
    pub fn input(mut self, file: &Path) -> Self {
        self.input = Some(file.to_owned());
        self
    }

    /// Standard input from the test.
    pub fn piped_input(mut self) -> Self {
        self.piped_input = true;
        self
    }

    pub fn patience(mut self, seconds: u64) -> Self {
        self.patience = Duration::from_secs(seconds);
        self
    }

    /// Runs without compcache to the end.
    pub fn bare(&self) -> Outcome {
        self.start(Way::Bare, &Cap::Resident(0)).finish()
    }

    /// Runs under compcache to the end.
    pub fn paged(&self, way: Way, cap: &Cap) -> Outcome {
        self.start(way, cap).finish()
    }

    /// The same, for who changes its mappings all the time: where nobody refuses to move the wrong page, such a process is now and then ended before it sees a
    /// wrong byte ([S39]), and is run again; thrice it must not be.
    pub fn paged_again_if_ended(&self, way: Way, cap: &Cap) -> Outcome {
        let was_ended = |outcome: &Outcome| {
            let told = |what| outcome.stderr.contains(what);
            way == Way::Remap && told("changed its mappings") && !told("MISMATCH at")
        };
        (0..2).map(|_| self.paged(way, cap)).find(|outcome| !was_ended(outcome)).unwrap_or_else(|| self.paged(way, cap))
    }

    /// Starts it.
    pub fn start(&self, way: Way, cap: &Cap) -> Running {
        static RUNS: AtomicU64 = AtomicU64::new(0);
        let mark = format!("{}-{}", std::process::id(), RUNS.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::tempdir().expect("a temporary directory");
        let stats = dir.path().join("stats.json");
        let mut command = match way {
            Way::Bare => Command::new(&self.path),
            Way::Move | Way::Remap => {
                let mut command = Command::new(compcache());
                let (flag, bytes) = match cap {
                    Cap::Resident(bytes) => ("--resident", bytes),
                    Cap::Ram(bytes) => ("--ram", bytes),
                };
                command.arg("run").arg(flag).arg(bytes.to_string());
                command.args(["--evict", if way == Way::Move { "move" } else { "remap" }]);
                command.arg("--stats").arg(&stats).args(&self.flags).arg("--").arg(&self.path);
                command.env("COMPCACHE_PRELOAD", build::preload());
                command
            }
        };
        command.args(&self.arguments).env(diagnose::MARK, &mark).envs(self.variables.iter().map(|(a, b)| (a, b)));
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        // Files, not pipes: a daemon that keeps one open must not keep the test.
        let stdout = File::create_new(dir.path().join("stdout")).expect("a new file");
        let stderr = File::create_new(dir.path().join("stderr")).expect("a new file");
        let input = match &self.input {
            _ if self.piped_input => Stdio::piped(),
            Some(file) => File::open(file).expect("the input file").into(),
            None => Stdio::null(),
        };
        let shown = format!("{command:?}");
        // Whoever started the tests may ignore signals (nohup does); a shell cannot trap what it was born ignoring.
        // SAFETY: signal(2) is async-signal-safe, and nothing else happens between fork and exec.
        unsafe {
            command.pre_exec(|| {
                for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                Ok(())
            });
        }
        let child = command.stdin(input).stdout(stdout).stderr(stderr).process_group(0).spawn();
        let child = child.unwrap_or_else(|error| panic!("{shown}: {error}"));
        let marked = format!("{}={mark}", diagnose::MARK);
        let guard = Guard::new(END, &[child.id().to_string().as_ref(), marked.as_ref()]);
        Running {
            child,
            _guard: guard,
            mark,
            dir,
            started: Instant::now(),
            patience: self.patience,
            shown,
            stats,
            way,
            waited: false,
            peak_bytes: 0,
        }
    }
}

/// A program that runs. It is ended with the test if the test ends first, also where that is killed.
pub struct Running {
    child: Child,
    _guard: Guard,
    mark: String,
    dir: TempDir,
    started: Instant,
    patience: Duration,
    shown: String,
    stats: PathBuf,
    way: Way,
    waited: bool,
    peak_bytes: u64,
}

/// A program that has ended.
pub struct Outcome {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: String,
    /// The largest resident size of one of its processes, sampled; of a bare run only.
    pub peak_bytes: u64,
    /// What `--stats` said last.
    pub stats: Option<Value>,
    pub seconds: f64,
    pub shown: String,
}

impl Running {
    /// The process that the test started: the program, or compcache.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// The processes of the run that are alive.
    fn processes(&self) -> Vec<i32> {
        // Once it was waited for, its number may be another's.
        diagnose::processes_of(&self.mark, if self.waited { -1 } else { self.pid() })
    }

    /// The processes of the run that are alive and called `name`, in the order they were started.
    pub fn pids_named(&self, name: &str) -> Vec<i32> {
        let called =
            |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end() == name);
        self.processes().into_iter().filter(called).collect()
    }

    /// What it has printed so far.
    pub fn stdout_so_far(&self) -> String {
        fs::read_to_string(self.dir.path().join("stdout")).unwrap_or_default()
    }

    /// Waits until it has printed `text`.
    pub fn await_output(&mut self, text: &str) {
        while !self.stdout_so_far().contains(text) {
            self.still_runs(text);
        }
    }

    /// Between two looks at what it has printed: it must not have ended before `text`, nor be late.
    pub fn still_runs(&mut self, text: &str) {
        let ended = self.try_wait();
        assert!(ended.is_none(), "{}: ended before it printed {text:?}\n{}", self.shown, self.stderr_so_far());
        self.give_up_when_late();
        std::thread::sleep(Duration::from_millis(5));
    }

    pub fn stderr_so_far(&self) -> String {
        fs::read_to_string(self.dir.path().join("stderr")).unwrap_or_default()
    }

    /// What `--stats` says now; `None` before it was written for the first time.
    pub fn stats_now(&self) -> Option<Value> {
        let text = fs::read_to_string(&self.stats).ok()?;
        // Replaced atomically: half a file is a failure.
        Some(serde_json::from_str(&text).unwrap_or_else(|error| panic!("--stats holds no JSON: {error}\n{text}")))
    }

    pub fn write_input(&mut self, bytes: &[u8]) {
        use std::io::Write;
        self.child.stdin.as_mut().expect("piped input").write_all(bytes).expect("the program reads its input");
    }

    pub fn close_input(&mut self) {
        drop(self.child.stdin.take());
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: sends a signal to a process that this test started and has not waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    fn try_wait(&mut self) -> Option<ExitStatus> {
        let mut status = 0;
        // SAFETY: the pointer is to a value of ours; the process is our child and is waited for here alone.
        let got = unsafe { libc::waitpid(self.pid(), &mut status, libc::WNOHANG) };
        assert!(got >= 0, "{}: waitpid: {}", self.shown, std::io::Error::last_os_error());
        self.waited = got == self.pid();
        self.waited.then(|| ExitStatus::from_raw(status))
    }

    fn give_up_when_late(&self) {
        if self.started.elapsed() < self.patience {
            return;
        }
        let pids = self.processes();
        let report = diagnose::report(&pids);
        diagnose::kill(&pids);
        let (shown, patience, stderr) = (&self.shown, self.patience, self.stderr_so_far());
        let stats = self.stats_now().unwrap_or_default();
        panic!("HANG: {shown} after {patience:?}\nstderr: {stderr}\nstatistics: {stats:#}\n{report}");
    }

    /// Not `ru_maxrss`: that counts what the test's own process held when it started the program.
    fn sample_peak(&mut self) {
        if self.way == Way::Bare {
            self.peak_bytes = self.peak_bytes.max(diagnose::peak_bytes(&self.processes()));
        }
    }

    /// Does this while the program runs. A server's workers may be gone when it ends: the peak is sampled meanwhile.
    ///
    /// Where it is late its processes are ended, which ends the work of who asks them.
    pub fn during<T: Send>(&mut self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let working = scope.spawn(work);
            while !working.is_finished() {
                self.sample_peak();
                self.give_up_when_late();
                std::thread::sleep(Duration::from_millis(15));
            }
            working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Waits for the end of the process that was started; others of the run may go on.
    pub fn await_end(&mut self) -> ExitStatus {
        let mut rounds = 0_u64;
        loop {
            if let Some(status) = self.try_wait() {
                return status;
            }
            if rounds.is_multiple_of(8) {
                self.sample_peak();
            }
            self.give_up_when_late();
            std::thread::sleep(Duration::from_millis(2));
            rounds += 1;
        }
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Outcome {
        let status = self.await_end();
        let mut stdout = Vec::new();
        let mut file = File::open(self.dir.path().join("stdout")).expect("the output");
        file.rewind().and_then(|()| file.read_to_end(&mut stdout)).expect("the output");
        let outcome = Outcome {
            status,
            stdout,
            stderr: self.stderr_so_far(),
            peak_bytes: self.peak_bytes,
            stats: self.stats_now(),
            seconds: self.started.elapsed().as_secs_f64(),
            shown: self.shown.clone(),
        };
        if self.way != Way::Bare {
            assert!(outcome.status.code() != Some(125), "compcache itself failed: {}", outcome.explain());
        }
        outcome
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Daemons that are expected have ended by now; whatever else is left must not disturb other tests.
        diagnose::kill(&self.processes());
        if !self.waited {
            // SAFETY: waits for a child of ours that is dead or dying, once.
            unsafe { libc::waitpid(self.pid(), std::ptr::null_mut(), 0) };
        }
    }
}

impl Outcome {
    /// A number of `--stats`.
    pub fn stat(&self, name: &str) -> u64 {
        let stats = self.stats.as_ref().unwrap_or_else(|| panic!("no --stats file: {}", self.explain()));
        stats[name].as_u64().unwrap_or_else(|| panic!("--stats has no number {name}:\n{stats:#}"))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Everything that helps to understand it.
    pub fn explain(&self) -> String {
        let shorten = |text: &str| text.chars().take(4000).collect::<String>();
        format!(
            "{}\nended with {} after {:.1} s, peak {} KiB\nstderr: {}\nstdout: {}",
            self.shown,
            self.status,
            self.seconds,
            self.peak_bytes / 1024,
            shorten(&self.stderr),
            shorten(&self.text()),
        )
    }

    /// The same status and the same output as `bare`.
    #[track_caller]
    pub fn must_equal(&self, bare: &Outcome) {
        assert_eq!(self.status, bare.status, "another status than without compcache:\n{}", self.explain());
        if self.stdout != bare.stdout {
            let at = self.stdout.iter().zip(&bare.stdout).position(|(a, b)| a != b);
            panic!(
                "another output than without compcache ({} bytes, not {}; first difference at {at:?}):\n{}",
                self.stdout.len(),
                bare.stdout.len(),
                self.explain()
            );
        }
    }

    /// The cap was felt: a test that evicts nothing proves nothing.
    #[track_caller]
    pub fn must_have_evicted(&self) {
        assert!(self.stat("evicted_pages") > 0, "nothing was evicted:\n{}", self.explain());
    }
}

/// Asks `question` every few milliseconds until it answers, at most for some seconds.
pub fn sample_until<T>(what: &str, seconds: u64, mut question: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(seconds);
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(Instant::now() < until, "after {seconds} s still not: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
