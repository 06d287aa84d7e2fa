//! The server and its disks as a person meets them: made, listed, used, changed, ended, and every way to get it wrong.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{
    Mounted, PATIENCE, Server, Stopped, Tree, ask, await_unmounted, backing_file, can_mount, compcache, copy_program,
    hears, ignore, said, sample_until, scratch,
};

/// What a server says that must not come up; one that does is ended after a while.
fn refused_server(socket: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.arg("10").arg(compcache()).args(["serve", "--socket"]).arg(socket).args(arguments);
    command.output().expect("timeout runs")
}

/// 8 MiB that compress as memory does: words that differ a little from each other, and stretches of zeroes.
fn contents(path: &Path) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(3);
    let mut bytes = Vec::with_capacity(8 << 20);
    while bytes.len() < 8 << 20 {
        match bytes.len() / 4096 % 4 {
            0 => bytes.resize(bytes.len() + 4096, 0),
            _ => (0..512).for_each(|_| bytes.extend_from_slice(&(0x5500_0000 + random.u64(..64)).to_le_bytes())),
        }
    }
    fs::write(path, &bytes).expect("the scratch directory can be written to");
    bytes
}

fn nbdcopy(from: &str, to: &str) {
    let output = Command::new("nbdcopy").args(["--", from, to]).output().expect("nbdcopy runs");
    assert!(output.status.success(), "nbdcopy {from} {to}: {}", said(&output));
}

#[test]
fn what_is_copied_to_a_disk_is_copied_back_compressed_meanwhile() {
    if !requires(&[Feature::Program("nbdcopy")]) {
        return;
    }
    let server = Server::start(&[]);
    let at = server.ok(&["disk", "create", "--name", "d", "--size", "8M", "--transport", "nbd"]);
    let path = |name: &str| server.directory.path().join(name).display().to_string();
    let written = contents(Path::new(&path("in")));
    nbdcopy(&path("in"), at.trim());
    nbdcopy(at.trim(), &path("out"));
    assert!(fs::read(path("out")).expect("nbdcopy wrote it") == written, "other bytes came back");
    let (data, used) = (server.stat("d", "orig_data_size"), server.stat("d", "mem_used_total"));
    assert!(data >= 6 << 20 && used < data / 2, "{data} bytes in {used}");

    let list = server.ok(&["list"]);
    assert!(list.lines().nth(1).is_some_and(|line| line.starts_with("d ") && line.ends_with(at.trim())), "{list}");
    let ramzswap = server.ok(&["show", "--ramzswap", "d"]);
    assert!(ramzswap.lines().any(|line| line.split_whitespace().eq(["DiskSize:", "8192", "kB"])), "{ramzswap}");
    assert!(server.ok(&["disk", "show", "d"]).contains("latency"), "no latencies");

    server.ok(&["disk", "reset", "d"]);
    assert_eq!(server.stat("d", "orig_data_size"), 0);
    server.ok(&["disk", "rm", "d"]);
    assert_eq!(server.ok(&["disk", "list", "--json"]).trim(), "[]");
}

#[test]
fn a_disk_changes_while_it_is_in_use() {
    if !requires(&[Feature::Program("nbdcopy")]) {
        return;
    }
    let server = Server::start(&[]);
    let at = server.ok(&["disk", "create", "--size", "8M", "--codec", "zstd:3", "--limit", "1G", "--transport", "nbd"]);
    let path = |name: &str| server.directory.path().join(name).display().to_string();
    let written = contents(Path::new(&path("in")));
    nbdcopy(&path("in"), at.trim());
    server.ok(&["disk", "change", "disk0", "--codec", "lz4", "--limit", "2G"]);
    server.ok(&["disk", "resize", "disk0", "16M"]);
    assert_eq!((server.stat("disk0", "disksize"), server.stat("disk0", "mem_limit")), (16 << 20, 2 << 30));
    assert!(server.ok(&["list"]).contains("lz4"), "the codec has not changed");
    nbdcopy(at.trim(), &path("out"));
    let back = fs::read(path("out")).expect("nbdcopy wrote it");
    assert!(back.len() == 16 << 20 && back[..8 << 20] == written && back[8 << 20..].iter().all(|byte| *byte == 0));
}

#[test]
fn what_makes_no_sense_is_refused_with_the_reason_and_changes_nothing() {
    let server = Server::start(&["--memory", "64M"]);
    server.ok(&["disk", "create", "--name", "one", "--size", "1M"]);
    let before = server.ok(&["disk", "list"]);
    server.refuses(&["disk", "create", "--name", "one", "--size", "1M"], &["one", "already", "another name"]);
    server.refuses(&["disk", "create", "--name", "../one", "--size", "1M"], &["no name for a disk", "letters"]);
    server.refuses(&["disk", "create", "--size", "99999T"], &["size"]);
    server.refuses(&["disk", "create", "--size", "0"], &["no size"]);
    server.refuses(&["disk", "create", "--size", "1X"], &["unknown unit"]);
    server.refuses(&["disk", "create", "--size", "-5M"], &["starts with a number"]);
    server.refuses(&["disk", "create", "--size", "1M", "--limit", "1"], &["--limit 1 B is too little"]);
    server.refuses(&["disk", "change", "one", "--limit", "4095"], &["too little"]);
    server.refuses(&["disk", "create", "--size", "1M", "--nbd-socket", "/nowhere/at/all"], &["/nowhere/at/all"]);
    server.refuses(&["disk", "create", "--size", "1M", "--nbd-tcp", "here"], &["ADDRESS:PORT"]);
    server.refuses(&["disk", "show", "two"], &["no disk called two", "disk list"]);
    server.refuses(&["disk", "rm", "two"], &["no disk called two"]);
    server.refuses(&["disk", "change", "one"], &["--limit"]);
    server.refuses(&["disk", "change", "one", "--codec", "lzo"], &["lz4", "zstd"]);
    server.refuses(&["disk", "resize", "one"], &["SIZE"]);
    assert_eq!(server.ok(&["disk", "list"]), before);
}

#[test]
fn without_a_server_every_command_says_how_to_start_one() {
    let directory = scratch();
    for arguments in [&["list"][..], &["disk", "create", "--size", "1M"], &["disk", "rm", "a"], &["show", "a"]] {
        let output = ask(&directory.path().join("none"), arguments);
        assert!(!output.status.success());
        assert!(said(&output).contains("compcache serve"), "{}", said(&output));
    }
}

#[test]
fn a_second_server_at_the_same_socket_is_refused_and_the_first_goes_on() {
    let server = Server::start(&[]);
    let second = refused_server(&server.socket(), &[]);
    assert!(!second.status.success() && said(&second).contains("already"), "{}", said(&second));
    server.ok(&["list"]);
}

#[test]
fn a_server_without_room_for_any_disk_is_refused() {
    for little in ["0", "1K", "1048575"] {
        let refused = refused_server(&scratch().path().join("control"), &["--memory", little]);
        assert!(!refused.status.success() && said(&refused).contains("no room for any disk"), "{}", said(&refused));
    }
}

#[test]
fn a_server_in_the_background_can_be_asked_at_once() {
    let directory = scratch();
    let (socket, notify) = (directory.path().join("control"), directory.path().join("notify"));
    // Of whoever starts it, who is not ready yet.
    let manager = UnixDatagram::bind(&notify).expect("the directory can be written to");
    let serve = || {
        let mut command = Command::new(compcache());
        command.current_dir(&directory).env("NOTIFY_SOCKET", &notify);
        command.args(["serve", "--background", "--socket", "control"]);
        // Its output ends when everybody who has it has let go of it.
        command.output().expect("compcache can be started")
    };
    let output = serve();
    assert!(output.status.success(), "{}", said(&output));
    let create = ask(&socket, &["disk", "create", "--name", "d", "--size", "1M", "--transport", "nbd"]);
    // Who serves is known by the one who answers.
    let peer = UnixStream::connect(&socket).and_then(|stream| Ok(socket_peercred(stream)?)).expect("it answers").pid;
    let late = || Command::new("sh").args(["-c", "echo -900 >/proc/self/oom_score_adj"]).stderr(Stdio::null()).status();
    let expected = if late().expect("sh runs").success() { "-900\n" } else { "0\n" };
    let score = fs::read_to_string(format!("/proc/{}/oom_score_adj", peer.as_raw_nonzero())).expect("it runs");
    let again = serve();
    kill_process(peer, Signal::TERM).expect("it runs");
    sample_until("it has ended", 20, || (!socket.exists()).then_some(()));
    manager.set_nonblocking(true).expect("it can be set");
    assert!(manager.recv(&mut [0; 64]).is_err(), "the service manager of who started it is told of it");
    assert_eq!(score, expected, "who may say that it is to be ended late says so");
    assert!(create.status.success(), "{}", said(&create));
    assert!(!again.status.success() && said(&again).contains("already"), "{}", said(&again));
}

#[test]
fn a_file_in_the_place_of_the_socket_is_not_replaced() {
    let directory = scratch();
    let (notes, lock) = (directory.path().join("notes"), directory.path().join("notes.lock"));
    fs::write(&notes, "precious").unwrap();
    fs::write(&lock, "precious too").unwrap();
    let refused = refused_server(&notes, &[]);
    assert!(!refused.status.success() && said(&refused).contains("no socket"), "{}", said(&refused));
    assert_eq!(fs::read_to_string(notes).unwrap(), "precious");
    assert_eq!(fs::read_to_string(lock).unwrap(), "precious too");
}

#[test]
fn a_killed_server_leaves_nothing_in_the_way_of_the_next() {
    let mut server = Server::start(&[]);
    server.ok(&["disk", "create", "--name", "d", "--size", "1M", "--transport", "nbd"]);
    server.child.kill().expect("it is our child");
    let (status, _, directory) = server.ended();
    assert!(!status.success());
    let next = Server::start_in(directory, &[]);
    next.ok(&["disk", "create", "--name", "d", "--size", "1M", "--transport", "nbd"]);
}

#[test]
fn a_signal_ends_the_server_and_its_sockets_are_gone() {
    for signal in ["-TERM", "-INT"] {
        let server = Server::start(&[]);
        server.ok(&["disk", "create", "--name", "d", "--size", "1M", "--transport", "nbd"]);
        assert!(server.directory.path().join("d.nbd").exists());
        server.signal(signal);
        let (status, text, directory) = server.ended();
        assert!(status.success(), "{text}");
        let left: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["control.lock"], "left behind");
    }
}

#[test]
fn tcp_is_this_machines_own_unless_an_address_is_given() {
    let server = Server::start(&[]);
    let at = server.ok(&["disk", "create", "--size", "1M", "--nbd-tcp", "0"]);
    assert!(at.starts_with("nbd://127.0.0.1:"), "{at}");
    if requires(&[Feature::Program("nbdinfo")]) {
        let info = Command::new("nbdinfo").args(["--size", at.trim()]).output().expect("nbdinfo runs");
        assert_eq!(String::from_utf8_lossy(&info.stdout).trim(), (1 << 20).to_string(), "{}", said(&info));
    }
}

#[test]
fn rubbish_at_the_control_socket_is_answered_or_hung_up_on_and_the_server_goes_on() {
    let server = Server::start(&[]);
    for (line, answer) in [
        ("hello\n", "JSON"),
        ("{\"version\":9,\"do\":\"list\"}\n", "version 9"),
        ("{\"version\":1,\"do\":\"dance\"}\n", "failed"),
        ("{\"version\":1,\"do\":\"list\"}\n", "disks"),
    ] {
        let mut stream = UnixStream::connect(server.socket()).expect("it listens");
        stream.write_all(line.as_bytes()).expect("it reads");
        let mut reply = String::new();
        BufReader::new(&stream).read_line(&mut reply).expect("it answers");
        assert!(reply.contains(answer), "{line:?} was answered {reply:?}");
    }
    // A line without an end is not waited for for ever, nor kept.
    let mut stream = UnixStream::connect(server.socket()).expect("it listens");
    let endless = stream.write_all(&vec![b'x'; 2 << 20]);
    let mut reply = Vec::new();
    let hung_up = stream.read_to_end(&mut reply);
    assert!(endless.is_err(), "2 MiB without a line's end were taken");
    assert!(hung_up.is_err() || reply.is_empty());
    server.ok(&["list"]);
}

#[test]
fn another_user_may_not_ask() {
    if !requires(&[Feature::Root, Feature::Program("setpriv")]) {
        return;
    }
    // Where anybody may go; so it is not a mode that keeps them out, only who asks.
    let open_to_all = tempfile::tempdir().expect("a directory for temporary files");
    let binary = open_to_all.path().join("compcache");
    copy_program(&compcache(), &binary);
    let server = Server::start_in(open_to_all, &[]);
    for path in [server.directory.path(), &binary, &server.socket()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("it is ours");
    }
    let list = |user: &str| {
        let (user, group) = (format!("--reuid={user}"), format!("--regid={user}"));
        let mut command = Command::new("setpriv");
        command.args([&user, &group, "--clear-groups", "--"]).arg(&binary).args(["list", "--socket"]);
        command.arg(server.socket()).output().expect("setpriv runs")
    };
    let nobody = list("65534");
    assert!(!nobody.status.success() && said(&nobody).contains("only the user it runs as"), "{}", said(&nobody));
    assert!(list("0").status.success());
}

/// Whose answers root would hand to mkfs, mkswap, swapon and mount.
#[test]
fn root_lets_no_other_users_server_name_a_device() {
    if !requires(&[Feature::Root, Feature::Program("setpriv")]) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory for temporary files");
    let (binary, socket) = (directory.path().join("compcache"), directory.path().join("control"));
    copy_program(&compcache(), &binary);
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).expect("it is ours");
    let mut server = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(&binary)
        .args(["serve", "--socket"])
        .arg(&socket)
        .stderr(Stdio::piped())
        .spawn()
        .expect("setpriv runs");
    hears(&mut BufReader::new(server.stderr.take().expect("it is piped")), "serving at");
    let asked: [&[&str]; 4] = [
        &["disk", "create", "--size", "1M", "--mkfs", "ext4"],
        &["disk", "create", "--origin", "/nothing", "--mount", "/nowhere"],
        &["swap", "on", "--size", "1M"],
        &["swap", "off"],
    ];
    let refused = asked.map(|arguments| ask(&socket, arguments));
    let listed = ask(&socket, &["list"]);
    kill_process(Pid::from_child(&server), Signal::TERM).expect("it runs");
    assert!(server.wait().expect("it is our child").success());
    for output in refused {
        assert!(!output.status.success() && said(&output).contains("user 65534"), "{}", said(&output));
    }
    assert!(listed.status.success() && String::from_utf8_lossy(&listed.stdout).lines().count() == 1, "{listed:?}");
}

#[test]
fn a_full_disk_refuses_what_is_too_much_and_keeps_what_it_has() {
    if !requires(&[Feature::Program("qemu-io")]) {
        return;
    }
    let server = Server::start(&[]);
    let at = server.ok(&["disk", "create", "--name", "small", "--size", "64M", "--limit", "2M", "--transport", "nbd"]);
    let qemu_io = |command: &str| {
        Command::new("qemu-io").args(["-f", "raw", "-c", command, at.trim()]).output().expect("qemu-io runs")
    };
    assert!(qemu_io("write -P 7 0 64k").status.success());
    let random = server.directory.path().join("random");
    let mut bytes = vec![0; 8 << 20];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    fs::write(&random, bytes).unwrap();
    let full = qemu_io(&format!("write -s {} 1M 8M", random.display()));
    let text = format!("{}{}", said(&full), String::from_utf8_lossy(&full.stdout));
    assert!(text.contains("No space left"), "{text}");
    let back = qemu_io("read -P 7 0 64k");
    assert!(String::from_utf8_lossy(&back.stdout).contains("read 65536/65536"), "{}", said(&back));
    assert!(!String::from_utf8_lossy(&back.stdout).contains("verification failed"), "what was stored has changed");
    assert!(server.stat("small", "mem_used_total") <= 2 << 20);
    assert!(server.stat("small", "failed_writes") > 0);
}

#[test]
fn a_service_manager_hands_its_socket_over_and_hears_when_the_server_is_ready() {
    let directory = scratch();
    let (control, notify) = (directory.path().join("control"), directory.path().join("notify"));
    let listener = UnixListener::bind(&control).expect("the directory can be written to");
    let manager = UnixDatagram::bind(&notify).expect("the directory can be written to");
    manager.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    // As systemd does it: the socket is descriptor 3, and the variables name the process that is meant.
    let mut child = Command::new("sh")
        .args(["-c", "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" serve"])
        .arg(compcache())
        .env("NOTIFY_SOCKET", &notify)
        .env("COMPCACHE_SOCKET", &control)
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stderr(Stdio::null())
        .spawn()
        .expect("sh runs");
    let mut heard = [0; 256];
    let length = manager.recv(&mut heard).expect("the server says that it is ready");
    assert_eq!(&heard[..length], b"READY=1\n");
    // That it stops is said when it does, not when it is asked to and cannot: a service manager would kill it for that.
    assert!(ask(&control, &["disk", "create", "--name", "d", "--size", "1M", "--transport", "nbd"]).status.success());
    let mut client = UnixStream::connect(directory.path().join("d.nbd")).expect("it listens");
    client.read_exact(&mut [0; 18]).expect("it greets");
    let pid = child.id().to_string();
    let end = || assert!(Command::new("kill").arg(&pid).status().expect("kill runs").success());
    end();
    manager.set_read_timeout(Some(Duration::from_secs(2))).expect("a timeout can be set");
    assert!(manager.recv(&mut heard).is_err(), "it says that it stops, and does not");
    assert!(ask(&control, &["list"]).status.success());
    drop(client);
    manager.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    end();
    let length = manager.recv(&mut heard).expect("the server says that it stops");
    assert_eq!(&heard[..length], b"STOPPING=1\n");
    assert!(child.wait().expect("it is our child").success());
    assert!(control.exists(), "the socket is the service manager's");
}

const BLOCK_DEVICE: [Feature; 4] = [Feature::Root, Feature::Fuse, Feature::Loop, Feature::Program("mkfs.ext4")];

#[test]
fn a_file_system_on_a_disk_holds_a_tree_and_the_disk_stays_while_it_is_mounted() {
    if !requires(&BLOCK_DEVICE) {
        return;
    }
    let mut server = Server::start(&[]);
    let mounted = Mounted(server.directory.path().join("mnt"));
    let at = mounted.0.display().to_string();
    fs::create_dir(&mounted.0).unwrap();
    let device = server.ok(&["disk", "create", "--name", "fs", "--size", "256M", "--mkfs", "ext4", "--mount", &at]);
    assert!(device.starts_with("/dev/loop"), "{device}");
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = mounts.lines().find(|line| line.contains(&at)).expect("it is mounted");
    assert!(line.contains("nobarrier") || line.contains("barrier=0"), "it waits for flushes: {line}");
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    let run = |program: &str, arguments: &[&str]| {
        let output =
            Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
        assert!(output.status.success(), "{program}: {}{}", said(&output), String::from_utf8_lossy(&output.stdout));
    };
    let copy = format!("{at}/copy");
    run("cp", &["-r", sources, &copy]);
    run("sync", &["-f", &copy]);
    assert!(server.stat("fs", "orig_data_size") > 0);
    assert!(server.ok(&["list"]).lines().any(|line| line.starts_with("fs ") && line.contains(&at)));

    server.refuses(&["disk", "rm", "fs"], &["mounted on", &at, "unmount"]);
    server.signal("-INT");
    server.hears("not ending");
    server.refuses(&["disk", "reset", "fs"], &["in use", "unmount"]);
    server.refuses(&["disk", "resize", "fs", "8M"], &["in use", "unmount"]);
    run("umount", &[&at]);
    await_unmounted(device.trim());
    // From the disk this time, not from the page cache.
    run("mount", &[device.trim(), &at]);
    run("diff", &["-r", sources, &copy]);
    run("umount", &[&at]);
    await_unmounted(device.trim());
    run("fsck.ext4", &["-fn", device.trim()]);
    // Another server's disk may take the device at once.
    let ours = backing_file(device.trim()).expect("it is in use");
    server.ok(&["disk", "rm", "fs"]);
    assert_ne!(backing_file(device.trim()), Some(ours), "the loop device is left behind");
}

#[test]
fn what_cannot_become_a_file_system_leaves_no_disk() {
    if !requires(&BLOCK_DEVICE) {
        return;
    }
    let server = Server::start(&[]);
    server.refuses(&["disk", "create", "--size", "8M", "--mkfs", "nonesuch"], &["mkfs.nonesuch"]);
    server
        .refuses(&["disk", "create", "--size", "8M", "--mkfs", "ext4", "--mount", "/nowhere"], &["mount", "/nowhere"]);
    for nbd in [["--transport", "nbd"], ["--nbd-tcp", "127.0.0.1:0"]] {
        let create = [&["disk", "create", "--size", "8M", "--mkfs", "ext4"][..], &nbd].concat();
        server.refuses(&create, &["block device", "an NBD export was asked for"]);
    }
    server.refuses(&["disk", "create", "--size", "8M", "--mount", "/mnt"], &["--mkfs"]);
    assert_eq!(server.ok(&["disk", "list", "--json"]).trim(), "[]");
}

#[test]
fn a_disk_whose_making_is_interrupted_is_removed() {
    if !requires(&BLOCK_DEVICE) {
        return;
    }
    let server = Server::start(&[]);
    let [tool, begun, go_on] = ["mkfs.slow", "begun", "go on"].map(|name| server.directory.path().join(name));
    // By another process: a test that forks meanwhile would have it open for writing, and then it cannot be run.
    let script =
        format!("#!/bin/sh\n: >{}\nwhile [ ! -e '{}' ]; do sleep 0.05; done\n", begun.display(), go_on.display());
    let made =
        Command::new("sh").args(["-c", "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\""]).arg(&tool).arg(script).status();
    assert!(made.unwrap().success());
    let path = format!("{}:{}", server.directory.path().display(), std::env::var("PATH").unwrap());
    // As a key of the terminal, to all; and to who was asked alone.
    for (signal, all) in [(libc::SIGINT, true), (libc::SIGTERM, false), (libc::SIGHUP, false)] {
        let mut command = Command::new(compcache());
        command.args(["disk", "create", "--size", "8M", "--mkfs", "slow", "--mount", "/nowhere", "--socket"]);
        command.arg(server.socket()).env("PATH", &path).process_group(0);
        ignore(&mut command, &[]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        sample_until("the file system is being made", 20, || begun.exists().then_some(()));
        let pid = child.id() as i32;
        // SAFETY: sends a signal to a child that was not waited for, or to its group.
        assert_eq!(unsafe { libc::kill(if all { -pid } else { pid }, signal) }, 0);
        if !all {
            fs::write(&go_on, "").unwrap();
        }
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(signal), "{}", said(&output));
        assert!(said(&output).contains(&format!("by signal {signal}")), "{}", said(&output));
        assert_eq!(server.ok(&["disk", "list", "--json"]).trim(), "[]");
        fs::remove_file(&begun).unwrap();
        let _ = fs::remove_file(&go_on);
    }
}

#[test]
fn a_loop_device_of_a_killed_server_is_removed_by_the_next() {
    if !requires(&BLOCK_DEVICE) {
        return;
    }
    let mut server = Server::start(&[]);
    let device = server.ok(&["disk", "create", "--size", "8M", "--transport", "loop"]);
    let before = backing_file(&device).expect("it is in use");
    server.child.kill().expect("it is our child");
    let (_, _, directory) = server.ended();
    let _next = Server::start_in(directory, &[]);
    // Another test may have the device by now, and another server may be in the middle of removing it.
    let until = Instant::now() + PATIENCE;
    while backing_file(&device).as_ref() == Some(&before) {
        assert!(Instant::now() < until, "the dead server's loop device is left");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn who_has_a_file_open_whose_server_does_not_answer_holds_up_no_disk() {
    if !can_mount(&[]) || !requires(&[Feature::Loop]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "4M"]);
    fs::write(tree.source().join("file"), "text").expect("the scratch directory can be written to");
    let open = File::open(tree.target().join("file")).expect("it is there");
    let server = Server::start(&[]);
    server.ok(&["disk", "create", "--size", "8M", "--transport", "loop"]);
    let stopped = Stopped::of(&tree.child);
    let (done, hears) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| _ = done.send(server.asked(&["disk", "rm", "disk0"])));
        let heard = hears.recv_timeout(PATIENCE);
        drop(stopped);
        let output = heard.expect("the server asked another, and waits");
        assert!(output.status.success(), "{}", said(&output));
    });
    drop(open);
}

/// Whether a thread of it has asked a file system in user space for something, and has no answer yet.
fn waits_for_a_tree(child: &Child) -> bool {
    let tasks = fs::read_dir(format!("/proc/{}/task", child.id())).expect("it lives");
    let wait = |task: io::Result<fs::DirEntry>| fs::read_to_string(task.ok()?.path().join("wchan")).ok();
    // For the answer itself, or for the page that comes with it.
    tasks
        .filter_map(wait)
        .any(|place| ["request_wait_answer", "fuse_", "folio_wait_bit"].iter().any(|at| place.contains(at)))
}

#[test]
fn a_disk_that_waits_for_its_origin_to_be_opened_holds_up_no_other_command() {
    if !can_mount(&[]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "4M"]);
    fs::write(tree.source().join("origin"), vec![7; 1 << 20]).expect("the scratch directory can be written to");
    let origin = tree.target().join("origin").display().to_string();
    let server = Server::start(&[]);
    let stopped = Stopped::of(&tree.child);
    let (made, hears) = mpsc::channel();
    let socket = &server.socket();
    thread::scope(|scope| {
        // Goes on before the threads are waited for, whatever fails.
        let stopped = stopped;
        let create = ["disk", "create", "--name", "slow", "--origin", &origin, "--memory", "4M", "--transport", "nbd"];
        scope.spawn(move || _ = made.send(ask(socket, &create)));
        let until = Instant::now() + PATIENCE;
        while !waits_for_a_tree(&server.child) && Instant::now() < until {
            thread::sleep(Duration::from_millis(10));
        }
        let (done, heard) = mpsc::channel();
        scope.spawn(move || {
            let create = |name| ask(socket, &["disk", "create", "--name", name, "--size", "1M", "--transport", "nbd"]);
            let commands = [ask(socket, &["list"]), ask(socket, &["show", "slow"]), create("slow"), create("other")];
            _ = done.send(commands);
        });
        let heard = heard.recv_timeout(PATIENCE);
        let early = hears.try_recv();
        drop(stopped);
        let [list, show, same, other] = heard.expect("who asks for something else waits, too");
        assert!(early.is_err(), "nobody waited for the origin");
        assert!(list.status.success() && other.status.success(), "{}{}", said(&list), said(&other));
        assert!(
            said(&show).contains("is being made") && said(&same).contains("already"),
            "{}{}",
            said(&show),
            said(&same)
        );
        let made = hears.recv_timeout(PATIENCE).expect("it is made when its origin has answered");
        assert!(made.status.success(), "{}", said(&made));
    });
    server.ok(&["show", "slow"]);
}

#[test]
fn a_disk_that_waits_for_its_origin_to_be_removed_holds_up_no_other_command() {
    if !can_mount(&[]) || !requires(&[Feature::Program("nbdcopy")]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "4M"]);
    fs::write(tree.source().join("origin"), vec![7; 8 << 20]).expect("the scratch directory can be written to");
    let origin = tree.target().join("origin").display().to_string();
    let mut server = Server::start(&[]);
    let create = ["disk", "create", "--name", "slow", "--origin", &origin, "--memory", "4M", "--transport", "nbd"];
    let uri = server.ok(&create);
    let stopped = Stopped::of(&tree.child);
    let client = Command::new("nbdcopy").args([uri.trim(), "null:"]).stderr(Stdio::null()).spawn();
    let mut client = client.expect("nbdcopy runs");
    // It has connected, and waits for what it reads.
    let until = Instant::now() + PATIENCE;
    while !waits_for_a_tree(&server.child) {
        assert!(Instant::now() < until, "nobody reads from the origin");
        thread::sleep(Duration::from_millis(10));
    }
    let in_use = server.asked(&["disk", "rm", "slow"]);
    let (done, hears) = mpsc::channel();
    let (asked, socket) = (mpsc::channel(), server.socket());
    thread::scope(|scope| {
        // Goes on before the threads are waited for, whatever fails.
        let stopped = stopped;
        let socket = &socket;
        scope.spawn(move || _ = done.send(ask(socket, &["disk", "rm", "--force", "slow"])));
        scope.spawn(move || {
            let until = Instant::now() + PATIENCE;
            let is_going = || said(&ask(socket, &["show", "slow"])).contains("is being removed");
            while !is_going() && Instant::now() < until {
                thread::sleep(Duration::from_millis(10));
            }
            let create = |name| ask(socket, &["disk", "create", "--name", name, "--size", "1M", "--transport", "nbd"]);
            let commands = [ask(socket, &["list"]), ask(socket, &["show", "slow"]), create("slow"), create("other")];
            _ = asked.0.send(commands);
        });
        let heard = asked.1.recv_timeout(2 * PATIENCE);
        server.signal("-TERM");
        let ends = heard.is_ok().then(|| server.hears("not ending"));
        let early = hears.try_recv();
        drop(stopped);
        let [list, show, same, other] = heard.expect("who asks for something else waits, too");
        assert!(early.is_err() && said(&in_use).contains("in use"), "nobody waited for the origin");
        assert!(list.status.success() && other.status.success(), "{}{}", said(&list), said(&other));
        assert!(said(&show).contains("is being removed") && said(&same).contains("already"), "{}", said(&show));
        assert!(ends.expect("it was asked").contains("disk slow is being removed"));
        let removed = hears.recv_timeout(PATIENCE).expect("it is removed when its origin has answered");
        assert!(removed.status.success(), "{}", said(&removed));
    });
    client.kill().and_then(|()| client.wait()).expect("it is our child");
    let (status, text, _) = server.ended();
    assert!(status.success(), "{text}");
}

#[test]
fn a_disk_whose_device_was_detached_keeps_its_size() {
    if !requires(&BLOCK_DEVICE) || !requires(&[Feature::Program("losetup")]) {
        return;
    }
    let server = Server::start(&[]);
    let device = server.ok(&["disk", "create", "--name", "d", "--size", "8M", "--transport", "loop"]);
    // Before the device can be another's.
    assert!(Command::new("losetup").args(["-d", device.trim()]).status().expect("it runs").success());
    server.refuses(&["disk", "resize", "d", "24M"], &["detached", "create it anew"]);
    assert_eq!(server.stat("d", "disksize"), 8 << 20);
    server.ok(&["disk", "rm", "d"]);
}

#[test]
fn a_loop_device_grows_while_it_is_in_use() {
    if !requires(&BLOCK_DEVICE) {
        return;
    }
    let server = Server::start(&[]);
    let device = server.ok(&["disk", "create", "--name", "g", "--size", "8M", "--transport", "loop"]);
    let held = fs::File::open(device.trim()).expect("root may open it");
    server.ok(&["disk", "resize", "g", "24M"]);
    let name = device.trim().trim_start_matches("/dev/");
    let sectors = fs::read_to_string(format!("/sys/block/{name}/size")).expect("it is a block device");
    assert_eq!(sectors.trim().parse(), Ok((24u64 << 20) / 512));
    server.refuses(&["disk", "rm", "g"], &["in use"]);
    drop(held);
    server.ok(&["disk", "rm", "g"]);
}

#[test]
fn a_disk_with_clients_is_ended_by_force_alone() {
    let server = Server::start(&[]);
    server.ok(&["disk", "create", "--name", "d", "--size", "1M", "--transport", "nbd"]);
    let mut client = UnixStream::connect(server.directory.path().join("d.nbd")).expect("it listens");
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).expect("it greets");
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    server.refuses(&["disk", "rm", "d"], &["in use", "NBD clients are connected (1)"]);
    server.refuses(&["disk", "reset", "d"], &["in use"]);
    server.ok(&["disk", "rm", "--force", "d"]);
    assert_eq!(client.read(&mut greeting).unwrap_or(0), 0, "the connection goes on");
}

#[test]
fn a_path_that_is_not_text_is_refused_in_words() {
    let server = Server::start(&[]);
    let output = Command::new(compcache())
        .args(["disk", "create", "--size", "1M", "--nbd-socket"])
        .arg(OsStr::from_bytes(b"/tmp/\xff.nbd"))
        .env("COMPCACHE_SOCKET", server.socket())
        .output()
        .expect("compcache can be started");
    assert!(!output.status.success() && said(&output).contains("UTF-8"), "{}", said(&output));
    // Nor does one that is only met on the way end the server, with all it has.
    let dir = scratch();
    let (real, link) = (dir.path().join(OsStr::from_bytes(b"\xff")), dir.path().join("link"));
    fs::write(&real, [0; 1 << 16]).expect("a file");
    std::os::unix::fs::symlink(&real, &link).expect("a link");
    let (link, socket) = (link.display().to_string(), dir.path().join("nbd").display().to_string());
    server.ok(&["disk", "create", "--name", "over", "--origin", &link, "--transport", "nbd", "--nbd-socket", &socket]);
    assert!(server.ok(&["disk", "show", "over"]).contains('\u{fffd}'));
}
