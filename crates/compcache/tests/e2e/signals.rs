//! `compcache run` between a program and who started it: terminals, service managers, containers.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write, pipe};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires};

use crate::support::{Cap, Program, beside_others, compcache, preload, sample_until, ways};

/// A terminal, and `compcache run` as the leader of its session, as a terminal's window or ssh starts it.
struct Terminal {
    master: Option<File>,
    leader: Child,
}

impl Terminal {
    /// Starts it, and waits until the program has said that it is ready.
    fn start(program: &[&str]) -> Self {
        let mut ptmx = OpenOptions::new();
        let mut master =
            ptmx.read(true).write(true).custom_flags(libc::O_NOCTTY).open("/dev/ptmx").expect("a terminal");
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        // SAFETY: the first request reads an integer of ours, the second opens a descriptor that nobody else knows.
        let terminal = unsafe {
            assert_eq!(libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &0), 0, "the terminal stays locked");
            let terminal = libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags);
            assert!(terminal >= 0, "the terminal's other end: {}", std::io::Error::last_os_error());
            OwnedFd::from_raw_fd(terminal)
        };
        let mut command = Command::new(compcache());
        command.args(["run", "--ram", "64M", "--quiet", "--"]).args(program).env("COMPCACHE_PRELOAD", preload());
        let duplicate = || terminal.try_clone().expect("a descriptor");
        command.stdin(duplicate()).stdout(duplicate()).stderr(duplicate());
        // SAFETY: system calls alone, and those are async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                for signal in [libc::SIGHUP, libc::SIGINT] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                match libc::setsid() >= 0 && libc::ioctl(0, libc::TIOCSCTTY, 0) == 0 {
                    true => Ok(()),
                    false => Err(std::io::Error::last_os_error()),
                }
            });
        }
        let leader = command.spawn().expect("compcache can be started");
        drop((command, terminal));
        let mut said = Vec::new();
        while !said.ends_with(b"ready\r\n") {
            let mut byte = [0];
            master.read_exact(&mut byte).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&said)));
            said.push(byte[0]);
        }
        Self { master: Some(master), leader }
    }

    fn types(&mut self, keys: &[u8]) {
        self.master.as_mut().expect("a terminal that is open").write_all(keys).expect("the terminal takes keys");
    }

    fn closes(&mut self) {
        drop(self.master.take());
    }

    #[track_caller]
    fn ends(&mut self) -> ExitStatus {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.leader.try_wait().expect("our child") {
                return status;
            }
            assert!(Instant::now() < until, "the program runs on");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A program that goes on after a failure ends by itself: it sleeps a minute.
        let _ = self.leader.kill();
        let _ = self.leader.wait();
    }
}

#[test]
fn a_terminal_that_closes_ends_the_program_where_we_lead_its_session() {
    let _shared = beside_others();
    let mut terminal = Terminal::start(&["sh", "-c", "echo ready; exec sleep 60"]);
    terminal.closes();
    assert_eq!(terminal.ends().signal(), Some(libc::SIGHUP));
}

#[test]
fn keys_of_the_terminal_reach_a_program_that_has_left_our_group() {
    let _shared = beside_others();
    let mut terminal = Terminal::start(&["timeout", "60", "sh", "-c", "echo ready; exec sleep 60"]);
    terminal.types(b"\x03");
    terminal.ends();
}

/// Whoever stops the program, continues it or ends it without us.
#[test]
fn a_program_that_is_stopped_and_continued_by_itself_goes_on_and_ends() {
    let _shared = beside_others();
    let stat = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let is_stopped = |pid| stat(pid).rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'));
    // SAFETY: sends a signal to a process of this test that has not ended.
    let send = |pid, signal| assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    for way in ways().into_iter().take(1) {
        for stop in [libc::SIGSTOP, libc::SIGTSTP] {
            for then in ["the program goes on", "we go on", "the program is killed"] {
                let program = Program::new("sh").args(["-c", "echo $$; read line; exit 7"]).piped_input().patience(60);
                let mut running = program.start(way, &Cap::resident_mib(16));
                running.await_output("\n");
                let (us, program) = (running.pid(), running.stdout_so_far().trim().parse().expect("a number"));
                send(program, stop);
                sample_until("both have stopped", 20, || (is_stopped(program) && is_stopped(us)).then_some(()));
                // They stay so.
                std::thread::sleep(Duration::from_millis(300));
                assert!(is_stopped(program) && is_stopped(us));
                match then {
                    "we go on" => send(us, libc::SIGCONT),
                    "the program goes on" => send(program, libc::SIGCONT),
                    _ => send(program, libc::SIGKILL),
                }
                running.close_input();
                let status = running.finish().status;
                let wanted =
                    if then == "the program is killed" { (None, Some(libc::SIGKILL)) } else { (Some(7), None) };
                assert_eq!((status.code(), status.signal()), wanted, "{stop}, {then}");
            }
        }
    }
}

/// What standard output says of a command that starts `program`, with compcache between the two or without.
fn inherited(starter: &[&str], program: &[&str], between: bool) -> String {
    let compcache = compcache().display().to_string();
    let ours = [compcache.as_str(), "run", "--ram", "64M", "--quiet", "--"];
    let ours = if between { &ours[..] } else { &[] };
    let mut command = Command::new(starter[0]);
    command.args(&starter[1..]).args(ours).args(program).env("COMPCACHE_PRELOAD", preload());
    let output = command.output().expect("the starter can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn signals_that_are_ignored_or_blocked_are_so_for_the_program() {
    let _shared = beside_others();
    let program = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"];
    for starter in [
        &["sh", "-c", "trap '' PIPE HUP; exec \"$@\"", "sh"][..],
        &["env", "--default-signal"],
        &["env", "--ignore-signal=PIPE,CHLD,USR2,ALRM", "--block-signal=USR1,TERM,CHLD"],
    ] {
        let (bare, paged) = (inherited(starter, &program, false), inherited(starter, &program, true));
        assert_eq!(paged, bare, "{starter:?}");
    }
}

#[test]
fn standard_descriptors_that_are_closed_are_so_for_the_program() {
    let _shared = beside_others();
    let which = "s=1; for n in 0 1 2; do s=$((s * 2)); if [ -e /proc/$$/fd/$n ]; then s=$((s + 1)); fi; done; exit $s";
    let compcache = compcache().display().to_string();
    let ours = [compcache.as_str(), "run", "--ram", "64M", "--quiet", "--"];
    for (closed, status) in [("", 15), ("<&-", 11), (">&-", 13), ("2>&-", 14), ("<&- >&- 2>&-", 8)] {
        for between in [&[][..], &ours] {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("exec \"$@\" {closed}"), "sh"]).args(between).args(["sh", "-c", which]);
            let ended = command.env("COMPCACHE_PRELOAD", preload()).status().expect("a shell can be started");
            assert_eq!(ended.code(), Some(status), "{closed} {between:?}");
        }
    }
}

/// Runs a shell's `script` under a compcache that is the first process of a container.
fn in_a_container(script: &str) -> Output {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc"]).arg(compcache()).args(["run", "--ram", "64M", "--"]);
    command.args(["sh", "-c", script]).env("COMPCACHE_PRELOAD", preload()).output().expect("unshare can be started")
}

#[test]
fn as_the_first_process_of_a_container_it_tells_the_signal_and_leaves_no_zombies() {
    if !requires(&[Feature::Root, Feature::Program("unshare")]) {
        return;
    }
    let _shared = beside_others();
    for signal in [libc::SIGTERM, libc::SIGKILL, libc::SIGUSR1] {
        let output = in_a_container(&format!("kill -{signal} $$; sleep 5"));
        assert_eq!(output.status.code(), Some(128 + signal), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let script = "(sleep 0.1 & sleep 0.2 &); sleep 1; grep -l '^State:.Z' /proc/[0-9]*/status; exit 9";
    let output = in_a_container(script);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "zombies");
    assert_eq!(output.status.code(), Some(9), "{}", String::from_utf8_lossy(&output.stderr));
    let told = |script| String::from_utf8_lossy(&in_a_container(script).stderr).into_owned();
    let left = told("sleep 5 & sleep 0.5");
    assert!(left.contains("first process of its container") && !left.contains("live"), "{left}");
    assert!(!told("sleep 0.5").contains("first process"));
}

/// A timer outlives exec, but is not inherited.
#[test]
fn a_timer_that_was_set_before_ends_the_program() {
    let _shared = beside_others();
    let mut command = Command::new(compcache());
    command.args([
        "run",
        "--ram",
        "64M",
        "--quiet",
        "--",
        "sh",
        "-c",
        "trap 'exit 9' ALRM; for i in $(seq 30); do sleep 1; done",
    ]);
    // SAFETY: alarm(2) is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            // By then the shell has its trap.
            libc::alarm(8);
            Ok(())
        });
    }
    let output = command.env("COMPCACHE_PRELOAD", preload()).output().expect("compcache can be started");
    assert_eq!(output.status.code(), Some(9), "{:?}", output.status);
}

#[test]
fn a_limit_on_files_is_told() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 1; exec \"$@\"", "sh"]).arg(compcache()).args(["run", "--ram", "64M", "true"]);
    let output = command.env("COMPCACHE_PRELOAD", preload()).output().expect("a shell can be started");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{:?}: {said}", output.status);
    assert!(said.contains("ulimit -f"), "{said}");
}

/// Where the system counts what could be touched, as it does for this limit, a process must not take much for what it may never need.
#[test]
fn a_program_that_may_have_little_memory_of_its_own_is_paged() {
    let mut command = Command::new("sh");
    let program = ["run", "--ram", "64M", "cat", "/proc/self/status"];
    command.args(["-c", "ulimit -d 16384; exec \"$@\"", "sh"]).arg(compcache()).args(program);
    let output = command.env("COMPCACHE_PRELOAD", preload()).output().expect("a shell can be started");
    let (printed, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && printed.contains("VmData"), "{said}");
    assert!(!said.contains("WARNING"), "{said}");
}

#[test]
fn what_the_program_closes_is_closed_for_who_is_at_the_other_end() {
    let [from_it, into_it, third] = [(); 3].map(|()| pipe().expect("a pipe"));
    let mut command = Command::new(compcache());
    let program = "exec 0<&- 1>&-; eval \"exec $FD>&-\"; exec sleep 100";
    command.args(["run", "--ram", "64M", "--quiet", "--", "bash", "-c", program]).env("COMPCACHE_PRELOAD", preload());
    let kept = third.1.as_raw_fd();
    command.stdin(into_it.0).stdout(from_it.1).env("FD", kept.to_string());
    // SAFETY: a system call, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || match libc::fcntl(kept, libc::F_SETFD, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let mut run = command.spawn().expect("compcache can be started");
    drop((command, third.1));
    let (sent, heard) = std::sync::mpsc::channel();
    for (name, mut end) in [("output", from_it.0), ("third", third.0)] {
        let sent = sent.clone();
        std::thread::spawn(move || sent.send((name, end.read(&mut [0]).expect("it can be read"))));
    }
    let next = || heard.recv_timeout(Duration::from_secs(30)).unwrap_or(("nothing", 0));
    let mut both = [next(), next()];
    let mut into_it = into_it.1;
    let input = sample_until("the input has no reader", 30, || into_it.write(b"x").err()).kind();
    let goes_on = run.try_wait().expect("its end can be asked for").is_none();
    // SAFETY: it is our child, and not waited for.
    unsafe { libc::kill(run.id() as i32, libc::SIGTERM) };
    run.wait().expect("it ends");
    both.sort_unstable();
    assert_eq!(both, [("output", 0), ("third", 0)]);
    assert_eq!((input, goes_on), (std::io::ErrorKind::BrokenPipe, true));
}
