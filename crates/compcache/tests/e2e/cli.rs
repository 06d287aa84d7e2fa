//! `compcache run` as a person or a script meets it: statuses, signals, streams, and what it says when it cannot.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use compcache_testkit::features::{Feature, requires, skip};

use crate::support::{
    Cap, Program, beside_others, compcache, copy_program, preload, sample_until, scratch, trap_program, ways,
};

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(compcache());
    command.arg("run").args(arguments).env("COMPCACHE_PRELOAD", preload()).output().expect("compcache can be started")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// It is refused with this status before the program starts, in words that name the matter.
#[track_caller]
fn is_refused(arguments: &[&str], status: i32, words: &[&str]) {
    let output = run(arguments);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {text}");
    assert!(output.stdout.is_empty(), "{arguments:?} printed on standard output");
    for word in words {
        assert!(text.contains(word), "{arguments:?} does not say {word:?}: {text}");
    }
}

#[test]
fn the_status_of_the_program_is_passed_on() {
    let _shared = beside_others();
    for status in [0, 1, 7, 77, 128, 255] {
        let output = run(&["--ram", "64M", "sh", "-c", &format!("exit {status}")]);
        assert_eq!(output.status.code(), Some(status), "{}", said(&output));
    }
}

#[test]
fn the_signal_that_kills_the_program_is_passed_on() {
    let _shared = beside_others();
    for signal in [libc::SIGTERM, libc::SIGKILL, libc::SIGUSR1, libc::SIGPWR, libc::SIGRTMIN() + 3] {
        let output = run(&["--ram", "64M", "sh", "-c", &format!("kill -{signal} $$; sleep 5")]);
        assert_eq!(output.status.signal(), Some(signal), "{}", said(&output));
    }
}

#[test]
fn signals_reach_the_program() {
    let _shared = beside_others();
    for way in ways() {
        for (signal, status) in [
            (libc::SIGTERM, 31),
            (libc::SIGINT, 32),
            (libc::SIGHUP, 33),
            (libc::SIGUSR2, 34),
            (libc::SIGALRM, 35),
            (libc::SIGPWR, 36),
            (libc::SIGTTIN, 38),
            (libc::SIGTTOU, 39),
            (libc::SIGRTMIN() + 3, 37),
        ] {
            let script = format!("trap 'exit {status}' {signal}; echo ready; while :; do sleep 0.05; done");
            let mut running = Program::new("sh").args(["-c", &script]).start(way, &Cap::resident_mib(16));
            running.await_output("ready\n");
            running.signal(signal);
            let outcome = running.finish();
            assert_eq!(outcome.status.code(), Some(status), "signal {signal}: {}", outcome.explain());
        }
    }
}

#[test]
fn what_the_program_sends_to_its_parent_does_not_come_back_to_it() {
    let _shared = beside_others();
    let output = run(&["--ram", "64M", "sh", "-c", "kill -USR1 $PPID; sleep 0.3; exit 7"]);
    assert_eq!(output.status.code(), Some(7), "{}", said(&output));
}

#[test]
fn a_flag_that_is_none_is_not_taken_for_the_program() {
    let _shared = beside_others();
    is_refused(&["--rma", "512M", "true"], 2, &["--rma"]);
    is_refused(&["--ram", "64M", "--quite", "--", "true"], 2, &["--quite", "--quiet"]);
    let output = run(&["--ram", "64M", "sh", "-c", "echo $0 $*", "--ram", "--quiet", "-x"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "--ram --quiet -x\n", "{}", said(&output));
}

#[test]
fn the_output_is_the_programs_alone() {
    let _shared = beside_others();
    for way in ways() {
        let outcome = Program::new(trap_program("holds")).args(["32", "0"]).paged(way, &Cap::resident_mib(8));
        let lines: Vec<String> = outcome.text().lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 3, "{}", outcome.explain());
        assert!(outcome.stderr.contains("compcache"), "no summary on standard error: {}", outcome.explain());
        let quiet = Program::new(trap_program("holds")).args(["32", "0"]).flags(["--quiet"]);
        let outcome = quiet.paged(way, &Cap::resident_mib(8));
        assert_eq!(outcome.stderr, "", "--quiet is not quiet");
    }
}

#[test]
fn input_and_environment_are_the_programs() {
    let _shared = beside_others();
    for way in ways() {
        let program = Program::new("sh").args(["-c", "cat; echo \"$WORD\"; pwd"]).env("WORD", "a b  c").piped_input();
        let mut running = program.dir("/usr/bin".as_ref()).start(way, &Cap::resident_mib(8));
        running.write_input(b"in\n");
        running.close_input();
        let outcome = running.finish();
        assert_eq!(outcome.text(), "in\na b  c\n/usr/bin\n", "{}", outcome.explain());
    }
}

/// The shell becomes compcache: it is the process that systemd would have started.
#[test]
fn what_systemd_hands_over_is_the_programs() {
    let _shared = beside_others();
    let program = "test $LISTEN_PID = $$ && test $WATCHDOG_PID = 1 && test -z \"$LISTEN_PIDFDID\" && sh -c 'test $LISTEN_PID = $PPID'";
    let service = format!(
        "export LISTEN_PID=$$ WATCHDOG_PID=1 LISTEN_PIDFDID=7; exec {} run --resident 64M -- sh -c \"$0\"",
        compcache().display()
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &service, &format!("{program}; echo $?")]);
    let output = shell.env("COMPCACHE_PRELOAD", preload()).output().expect("a shell can be started");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n", "{}", said(&output));
}

#[test]
fn a_program_that_does_not_exist_is_told_before_anything_starts() {
    is_refused(&["--ram", "64M", "no-such-program-anywhere"], 127, &["no-such-program-anywhere"]);
    is_refused(&["--ram", "64M", "/etc/passwd"], 126, &["/etc/passwd"]);
    is_refused(&["--ram", "64M", "/usr"], 126, &["/usr"]);
}

#[test]
fn scripts_for_env_run_whatever_their_line_says() {
    let _shared = beside_others();
    let dir = scratch();
    let [written, script, tool] = ["written", "script", "tool-for-scripts"].map(|name| dir.path().join(name));
    std::os::unix::fs::symlink("/bin/sh", &tool).expect("a link");
    let with_path = format!("PATH={}:/usr/bin:/bin tool-for-scripts", dir.path().display());
    for way in ways() {
        for line in ["-u DISPLAY sh", "--unset NAME sh", "A='b c d' sh", &with_path] {
            let text = format!("#!/usr/bin/env -S {line}\nexec {} 48 0\n", trap_program("holds").display());
            fs::write(&written, text).expect("a file");
            fs::set_permissions(&written, fs::Permissions::from_mode(0o755)).expect("our file");
            copy_program(&written, &script);
            let outcome = Program::new(&script).paged(way, &Cap::resident_mib(12));
            assert!(outcome.status.success() && outcome.text().ends_with("right\n"), "{line}: {}", outcome.explain());
            outcome.must_have_evicted();
        }
    }
}

#[test]
fn a_size_that_is_none_is_told() {
    is_refused(&["--ram", "many", "true"], 2, &["many"]);
    is_refused(&["--ram", "0", "true"], 2, &[]);
    is_refused(&["--resident", "-5M", "true"], 2, &[]);
}

#[test]
fn a_directory_that_is_taken_for_a_disk_is_told_so() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("tree")).unwrap();
    let shown = |name: &str| {
        let mut command = Command::new(compcache());
        command.current_dir(&directory).args(["show", "--socket", "/nonexistent/socket", name]);
        said(&command.output().unwrap())
    };
    assert!(shown("tree").contains("a mount is named with a slash: ./tree"), "{}", shown("tree"));
    assert!(!shown("disk").contains("slash"), "{}", shown("disk"));
}

#[test]
fn a_static_program_is_refused_with_a_remedy() {
    let dir = scratch();
    let (source, program) = (dir.path().join("x.c"), dir.path().join("static-program"));
    fs::write(&source, "int main(void) { return 0; }\n").expect("a file");
    let built = Command::new("cc").arg("-static").arg("-o").arg(&program).arg(&source).output().expect("a C compiler");
    if !built.status.success() {
        // No static C library here: take any static program.
        return skip("this machine cannot build a static program");
    }
    is_refused(&["--ram", "64M", &program.display().to_string()], 126, &["static"]);
}

/// What our object stands in for is musl's there, and the object itself does nothing.
#[test]
fn a_program_of_musl_is_refused_and_what_starts_one_is_not() {
    if !requires(&[Feature::Program("musl-gcc")]) {
        return;
    }
    let _shared = beside_others();
    let dir = scratch();
    let (source, program) = (dir.path().join("m.c"), dir.path().join("musl-program"));
    let text = r#"
        #define _GNU_SOURCE
        #include <fcntl.h>
        #include <pthread.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        #include <sys/mman.h>
        #include <sys/stat.h>
        #include <sys/wait.h>
        #include <unistd.h>
        static void *thread(void *given) { return given; }
        int main(void) {
            char *memory = malloc(1 << 20);
            memset(memory, 7, 1 << 20);
            pthread_mutex_t mutex;
            pthread_t handle;
            void *result;
            if (pthread_mutex_init(&mutex, NULL) || pthread_create(&handle, NULL, thread, memory)) return 2;
            if (pthread_join(handle, &result) || result != memory) return 3;
            if (mlock(memory, 4096) || munlock(memory, 4096)) return 4;
            struct stat status;
            int file = open("/dev/null", O_RDONLY);
            if (file < 0 || fcntl(file, F_GETFD) < 0 || stat("/dev/null", &status) || !S_ISCHR(status.st_mode)) return 5;
            if (madvise((void *)((unsigned long)memory & -4096), 4096, MADV_NORMAL)) return 6;
            int ended;
            pid_t child = fork();
            if (child == 0) _exit(9);
            if (waitpid(child, &ended, 0) != child || WEXITSTATUS(ended) != 9) return 7;
            puts("all as always");
            return 0;
        }"#;
    fs::write(&source, text).unwrap();
    let built = Command::new("musl-gcc").arg("-o").arg(&program).arg(&source).output().unwrap();
    assert!(built.status.success(), "{}", said(&built));
    let path = program.display().to_string();
    is_refused(&["--ram", "64M", &path], 126, &["musl", "-gnu"]);
    let output = run(&["--ram", "64M", "sh", "-c", &format!("{path}; exit $?")]);
    let text = said(&output);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"all as always\n"[..]), "{text}");
}

/// Builds a program that uses memory with a sanitizer; none where the compiler has not that one.
fn sanitized(dir: &Path, sanitizer: &str) -> Option<PathBuf> {
    let (source, program) = (dir.join("s.c"), dir.join(sanitizer));
    let text = r#"
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        int main(void) {
            unsigned long sum = 0;
            for (int i = 0; i < 64; i++) {
                unsigned char *block = malloc(1 << 20);
                memset(block, i, 1 << 20);
                sum += block[i * 1000];
                free(block);
            }
            printf("%lu\n", sum);
            return 0;
        }"#;
    std::fs::write(&source, text).unwrap();
    let flag = format!("-fsanitize={sanitizer}");
    let built = Command::new("cc").arg(flag).arg("-o").arg(&program).arg(&source).output().expect("a C compiler");
    built.status.success().then_some(program)
}

/// What it starts runs, unpaged, and the summary says so.
#[test]
fn a_program_with_a_sanitizer_is_refused_and_what_starts_one_is_not() {
    let _shared = beside_others();
    for sanitizer in ["address", "thread", "leak"] {
        let dir = scratch();
        let Some(program) = sanitized(dir.path(), sanitizer) else {
            skip(&format!("this machine cannot build a program with -fsanitize={sanitizer}"));
            continue;
        };
        let path = program.display().to_string();
        is_refused(&["--ram", "64M", &path], 126, &[&format!("-fsanitize={sanitizer}")]);
        let output = run(&["--ram", "64M", "sh", "-c", &format!("{path}; exit 3")]);
        let text = said(&output);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(3), &b"2016\n"[..]), "{text}");
        assert!(text.contains("sanitizer"), "nobody is told: {text}");
    }
}

#[test]
fn a_setuid_program_is_refused_with_a_remedy() {
    let dir = scratch();
    if !requires(&[Feature::Root]) {
        return;
    }
    let program = dir.path().join("true");
    fs::copy("/bin/true", &program).expect("a copy");
    std::os::unix::fs::chown(&program, Some(65534), Some(65534)).expect("root may give files away");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).expect("our file");
    is_refused(&["--ram", "64M", &program.display().to_string()], 126, &["set"]);
}

#[test]
fn someone_without_userfaultfd_is_told_three_ways_to_get_it() {
    if !requires(&[Feature::Root, Feature::Program("setpriv")]) {
        return;
    }
    let allowed = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let device = fs::metadata("/dev/userfaultfd").is_ok_and(|device| device.permissions().mode() & 0o006 != 0);
    if allowed.trim() == "1" || device {
        return skip("everybody may use userfaultfd on this machine");
    }
    // Where nobody can read it: a copy of both files.
    let dir = tempfile::tempdir().expect("a temporary directory");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("our directory");
    copy_program(&compcache(), &dir.path().join("compcache"));
    fs::copy(preload(), dir.path().join("libcompcache_preload.so")).expect("a copy");
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(dir.path().join("compcache"));
    let output = command.args(["run", "--ram", "64M", "true"]).output().expect("setpriv can be started");
    assert_eq!(output.status.code(), Some(125), "{}", said(&output));
    for way in ["vm.unprivileged_userfaultfd", "/dev/userfaultfd", "CAP_SYS_PTRACE"] {
        assert!(said(&output).contains(way), "{way} is not told: {}", said(&output));
    }
    let output = Command::new("setpriv")
        .args([
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=+sys_ptrace",
            "--ambient-caps=+sys_ptrace",
        ])
        .arg(dir.path().join("compcache"))
        .args(["run", "--ram", "64M", "sh", "-c", "exit 9"])
        .output()
        .expect("setpriv can be started");
    assert_eq!(output.status.code(), Some(9), "with the capability it must work: {}", said(&output));
}

#[test]
fn statistics_are_written_while_the_program_runs() {
    let _shared = beside_others();
    for way in ways() {
        let mut running = Program::new(trap_program("holds")).args(["48", "2"]).start(way, &Cap::resident_mib(12));
        running.await_output("warm\n");
        let mut last = None;
        // Replaced atomically: `stats_now` fails on half a file.
        for _ in 0..60 {
            last = running.stats_now().or(last);
            std::thread::sleep(Duration::from_millis(20));
        }
        let stats = last.expect("--stats is written while the program runs");
        assert!(stats["evicted_pages"].as_u64() > Some(0), "{stats:#}");
        assert!(running.finish().status.success());
    }
}

#[test]
fn statistics_that_can_never_be_replaced_are_told_before_the_program_starts() {
    if !requires(&[Feature::Root, Feature::Program("unshare")]) {
        return;
    }
    let directory = scratch();
    let stats = directory.path().join("stats");
    fs::write(&stats, "kept").expect("a file");
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", "mount --bind \"$0\" \"$0\" && exec \"$@\""]).arg(&stats).arg(compcache());
    command.args(["run", "--ram", "64M", "--stats"]).arg(&stats).args(["--", "echo", "ran"]);
    let output = command.env("COMPCACHE_PRELOAD", preload()).output().expect("unshare can be started");
    assert_eq!(output.status.code(), Some(125), "{}", said(&output));
    assert!(output.stdout.is_empty() && said(&output).contains("--stats"), "{}", said(&output));
    assert_eq!(fs::read_dir(&directory).expect("our directory").count(), 1, "something is left beside it");
}

#[test]
fn the_program_survives_the_death_of_its_supervisor() {
    let _shared = beside_others();
    for way in ways() {
        let dir = scratch();
        let script = format!("{} 48 10 > {}", trap_program("holds").display(), dir.path().join("out").display());
        let mut running = Program::new("sh").args(["-c", &script]).start(way, &Cap::resident_mib(12));
        let output = || fs::read_to_string(dir.path().join("out")).unwrap_or_default();
        sample_until("the program is warm", 30, || output().contains("warm\n").then_some(()));
        let environment = fs::read(format!("/proc/{}/environ", running.pids_named("holds")[0])).expect("it runs");
        let region = environment.split(|byte| *byte == 0).find_map(|one| one.strip_prefix(b"COMPCACHE_REGION="));
        let region = PathBuf::from(OsStr::from_bytes(region.expect("it knows its region")));
        running.signal(libc::SIGKILL);
        running.await_end();
        let holds = running.pids_named("holds");
        assert_eq!(holds.len(), 1, "the program died with its supervisor");
        assert!(region.exists(), "its region went with its supervisor");
        sample_until("the program comes to its end", 30, || running.pids_named("holds").is_empty().then_some(()));
        assert!(output().ends_with("right\n"), "{way:?}: it did not end well: {}", output());
        // And the next run is not disturbed by what is left, and removes it.
        let place = region.parent().expect("it has a directory of its own");
        // The last threads of a process may end after its first one.
        sample_until(&format!("{} is removed", place.display()), 30, || {
            let next = Program::new(trap_program("holds")).args(["24", "0"]).paged(way, &Cap::resident_mib(8));
            assert!(next.status.success(), "{}", next.explain());
            (!place.exists()).then_some(())
        });
    }
}

#[test]
fn a_run_within_a_run_works() {
    let _shared = beside_others();
    for way in ways() {
        let inner = [compcache().display().to_string(), "run".into(), "--resident".into(), "8M".into(), "-q".into()];
        let holds = trap_program("holds").display().to_string();
        let program = Program::new(&inner[0]).args(&inner[1..]).args(["--", &holds, "32", "0"]);
        let outcome = program.env("COMPCACHE_PRELOAD", preload()).paged(way, &Cap::resident_mib(16));
        assert!(outcome.status.success() && outcome.text().ends_with("right\n"), "{}", outcome.explain());
    }
}

#[test]
fn a_child_that_runs_unpaged_works_and_is_told_of() {
    let _shared = beside_others();
    let holds = trap_program("holds").display().to_string();
    for (script, is_told) in [(format!("env -i {holds} 120 0"), true), (format!("{holds} 120 0"), false)] {
        let output = run(&["--ram", "24M", "sh", "-c", &script]);
        assert!(output.status.success(), "{}", said(&output));
        assert!(String::from_utf8_lossy(&output.stdout).ends_with("right\n"), "{}", said(&output));
        assert_eq!(said(&output).contains("note: one process had 12"), is_told, "{}", said(&output));
        assert_eq!(said(&output).contains("note: one process had"), is_told, "{}", said(&output));
    }
}

#[test]
fn an_object_of_another_version_is_refused_before_the_program_starts() {
    let mut command = Command::new(compcache());
    // Any other file of the kind knows no version at all.
    command.args(["run", "--ram", "64M", "echo", "ran"]).env("COMPCACHE_PRELOAD", compcache());
    let output = command.output().expect("compcache can be started");
    assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(125), true), "{}", said(&output));
    assert!(said(&output).contains("not of the same version as this program"), "{}", said(&output));
}

#[test]
fn what_cannot_be_printed_is_an_error() {
    for command in [&["completions", "bash"][..], &["doctor"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("every machine has it");
        let output = Command::new(compcache()).args(command).stdout(full).output().expect("compcache can be started");
        assert!(!output.status.success() && said(&output).contains("No space left"), "{command:?}: {}", said(&output));
    }
}

#[test]
fn the_doctor_agrees_with_run() {
    let output = Command::new(compcache()).arg("doctor").output().expect("compcache can be started");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("userfaultfd"), "{text}");
    let works = run(&["--ram", "64M", "true"]).status.success();
    assert_eq!(output.status.success(), works, "{text}");
}

/// Where every program would be refused.
#[test]
fn the_doctor_agrees_with_run_where_the_object_or_its_region_has_no_place() {
    let dir = scratch();
    let blank = dir.path().join("a b");
    fs::create_dir(&blank).expect("a directory");
    fs::copy(preload(), blank.join("object.so")).expect("a copy");
    let both = |words: &str, start: &dyn Fn() -> Command| {
        let run = start().args(["run", "--ram", "64M", "true"]).output().expect("it can be started");
        assert_eq!(run.status.code(), Some(125), "{}", said(&run));
        assert!(said(&run).contains(words), "{}", said(&run));
        let doctor = start().arg("doctor").output().expect("it can be started");
        let text = String::from_utf8_lossy(&doctor.stdout);
        assert!(doctor.status.code() == Some(1) && text.contains(words), "{text}");
    };
    if !requires(&[Feature::Userfaultfd]) {
        return;
    }
    both("separates paths by blanks", &|| {
        let mut command = Command::new(compcache());
        command.env("COMPCACHE_PRELOAD", blank.join("object.so"));
        command
    });
    if !requires(&[Feature::Root, Feature::Program("unshare")]) {
        return;
    }
    let read_only =
        "for d in /dev/shm /tmp; do mount --bind $d $d && mount -o remount,bind,ro $d || exit; done; exec \"$@\"";
    both("Make one of these directories writable", &|| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", read_only, "sh"]).arg(compcache());
        command.env("COMPCACHE_PRELOAD", preload()).env_remove("TMPDIR");
        command
    });
}

#[test]
fn both_codecs_keep_the_contents() {
    let _shared = beside_others();
    for way in ways() {
        for codec in ["lz4", "zstd", "zstd:6"] {
            let program = Program::new(trap_program("holds")).args(["48", "0"]).flags(["--codec", codec]);
            let outcome = program.paged(way, &Cap::resident_mib(12));
            assert!(outcome.status.success() && outcome.text().ends_with("right\n"), "{codec}: {}", outcome.explain());
            outcome.must_have_evicted();
        }
    }
}
