//! systemd's units: that systemd takes them, and that their commands do what they are there for. No systemd runs them here.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use compcache_testkit::features::{Feature, requires};
use tempfile::TempDir;

use crate::support::{Mounted, Server, compcache, said, scratch};

/// The units, as they are installed beside the program that is tested; of those that are templates one of this name.
fn installed(instance: &str) -> TempDir {
    let directory = scratch();
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../units");
    for unit in fs::read_dir(units).expect("they are in the tree") {
        let path = unit.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let program = compcache().display().to_string();
        let name = path.file_name().unwrap().to_str().expect("text").replace('@', &format!("@{instance}"));
        fs::write(directory.path().join(name), text.replace("/usr/local/bin/compcache", &program)).unwrap();
    }
    directory
}

#[test]
fn systemd_finds_nothing_wrong_with_them() {
    if !requires(&[Feature::Program("systemd-analyze")]) {
        return;
    }
    let units = installed("srv-data");
    let names = fs::read_dir(units.path()).unwrap().map(|unit| unit.unwrap().path());
    // Without the manual pages: those are not installed.
    let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).args(names).output().unwrap();
    assert!(output.status.success() && said(&output).is_empty(), "{}", said(&output));
    let wrong = units.path().join("compcache-swap.service");
    fs::write(&wrong, fs::read_to_string(&wrong).unwrap().replace("Type=oneshot", "Type=none")).unwrap();
    let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&wrong).output().unwrap();
    assert!(!said(&output).is_empty(), "it finds nothing wrong with anything");
}

/// Runs the commands of a unit under `key`, as systemd would with this environment; all must succeed.
#[track_caller]
fn run(unit: &Path, key: &str, instance: &str, environment: &[(&str, &str)]) {
    let text = fs::read_to_string(unit).unwrap().replace("\\\n", " ");
    let commands: Vec<_> = text.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect();
    assert!(!commands.is_empty(), "no {key} in {}", unit.display());
    for command in commands {
        let command = command.replace("%i", instance).replace("$$", "\u{1}");
        // Variables of one dollar are systemd's, which splits a word that is nothing else; those of two are the shell's.
        let command = environment
            .iter()
            .fold(command, |command, (name, value)| command.replace(&format!("${name}"), value))
            .replace('\u{1}', "$");
        let output = sh(&command, environment);
        assert!(output.status.success(), "{command}: {}", said(&output));
    }
}

fn sh(command: &str, environment: &[(&str, &str)]) -> Output {
    // A command in quotes is one argument of the shell that systemd starts.
    let script = match command.strip_prefix("/bin/sh -c '").and_then(|rest| rest.strip_suffix('\'')) {
        Some(script) => script,
        None => command,
    };
    // What never ends is a failure, too.
    let mut timed = Command::new("timeout");
    timed.args(["60", "/bin/sh", "-c", script]).envs(environment.iter().copied()).output().unwrap()
}

#[test]
fn a_disks_unit_makes_mounts_and_removes_it() {
    if !requires(&[Feature::Root, Feature::Fuse, Feature::Loop, Feature::Program("mkfs.ext4")]) {
        return;
    }
    let (server, units, place) = (Server::start(&[]), installed("fast"), scratch());
    let unit = units.path().join("compcache-disk@fast.service");
    let socket = server.socket().display().to_string();
    let at = place.path().join("a place").display().to_string();
    fs::create_dir(&at).unwrap();
    let _mounted = Mounted(at.clone().into());
    let path = path_to_systemctl(place.path(), 1);
    let options = [
        ("PATH", &*path),
        ("COMPCACHE_SOCKET", &*socket),
        ("OPTIONS", "--size 64M --transport loop --mkfs ext4"),
        ("MOUNT", &at),
    ];
    run(&unit, "ExecStart", "fast", &options);
    fs::write(format!("{at}/file"), "kept").unwrap();
    let listed = server.ok(&["list"]);
    assert!(listed.contains("fast") && listed.contains("a\\x20place"), "{listed}");
    // Somebody has it for a while longer.
    let used = fs::File::open(format!("{at}/file")).unwrap();
    let user = thread::spawn(move || {
        thread::sleep(Duration::from_millis(1500));
        drop(used);
    });
    run(&unit, "ExecStop", "fast", &options);
    user.join().unwrap();
    assert!(!fs::exists(format!("{at}/file")).unwrap() && !server.ok(&["list"]).contains("fast"));
    // One that is mounted nowhere.
    let options =
        [("PATH", &*path), ("COMPCACHE_SOCKET", &*socket), ("OPTIONS", "--size 64M --transport loop"), ("MOUNT", "")];
    run(&unit, "ExecStart", "fast", &options);
    assert!(server.ok(&["list"]).contains("fast"));
    run(&unit, "ExecStop", "fast", &options);
    assert!(!server.ok(&["list"]).contains("fast"));
}

/// It would wait for itself: the server that its socket starts begins when the unit has stopped.
#[test]
fn a_server_that_has_died_is_not_asked_by_units_that_end_with_it() {
    let (units, place) = (installed("fast"), scratch());
    let path = path_to_systemctl(place.path(), 0);
    // As systemd's: it takes whoever connects, and nobody answers.
    let socket = place.path().join("socket");
    let _listens = UnixListener::bind(&socket).unwrap();
    let environment = [("PATH", &*path), ("COMPCACHE_SOCKET", socket.to_str().unwrap()), ("MOUNT", "")];
    for unit in ["compcache-disk@fast.service", "compcache-swap.service"] {
        run(&units.path().join(unit), "ExecStop", "fast", &environment);
    }
}

/// A path whose `systemctl` says that the server is the process of this number.
fn path_to_systemctl(directory: &Path, server: u32) -> String {
    let systemctl = directory.join("systemctl");
    fs::write(&systemctl, format!("#!/bin/sh\necho {server}\n")).unwrap();
    fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:{}", directory.display(), std::env::var("PATH").unwrap())
}
