//! Swap over NBD to another machine: the emulated one swaps, with its kernel's own client, to a disk that a server here serves
//! over TCP. Between them is an emulated network ([`compcache_testkit::vm::HOST`]).
//!
//! The machine asks us for what must happen here, at a port of our own: a line of arguments for `compcache`, or a word about the
//! server's process. It reads what came of it.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use compcache_testkit::features::{Feature, find_program, requires};
use compcache_testkit::vm::{HOST, Vm};

use super::machine::{self, NEEDED, assert_ended, assert_lost_a_page, at_length};
use crate::support::{Server, said};

/// All that crosses the emulated network takes its time: a smaller machine swaps as much with less.
const MEMORY_MIB: u32 = 192;

/// The client gives a server up that has not answered for so long. What waits may wait twice as long, since requests that were sent
/// after the connection was lost are given so long, too; the machine finds a task hung after 60 s.
const TIMEOUT_S: u32 = 25;

/// Less than half of that.
const PAUSE: Duration = Duration::from_secs(5);

/// What `compcache` ends with when it fails, and who is ended by the script.
const FAILED: i32 = 125;
const TERMINATED: i32 = 143;

/// The server's side of a test.
struct Host {
    listener: TcpListener,
    server: Server,
    /// Where the machine finds the disk.
    disk_port: u16,
}

impl Host {
    fn start() -> Host {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = Server::start(&["--memory", "4G"]);
        let disk_port = create(&server, 0);
        Host { listener, server, disk_port }
    }

    /// Does what the machine asks for, until it is told that there is no machine any more.
    fn answer(mut self) {
        loop {
            let (stream, _) = self.listener.accept().expect("it listens");
            let mut line = String::new();
            // A machine that has ended says nothing; nor is there anybody to answer then.
            if BufReader::new(&stream).read_line(&mut line).is_err() || line.trim() == "end" {
                return;
            }
            let answer = self.does(line.trim());
            let _ = (&stream).write_all(answer.as_bytes());
            drop(stream);
            if line.trim() == "pause" {
                self.pause();
            }
        }
    }

    /// The server stands still for a while. A machine that waits for its swap has no memory for any other packet, so it could
    /// not ask for the end of it.
    fn pause(&self) {
        self.server.signal("-STOP");
        thread::sleep(PAUSE);
        self.server.signal("-CONT");
    }

    fn does(&mut self, asked: &str) -> String {
        match asked {
            "kill" => {
                self.server.child.kill().expect("it is our child");
                let status = self.server.child.wait().expect("it is our child");
                format!("killed: {status}\n")
            }
            "again" => {
                self.server = Server::start(&["--memory", "4G"]);
                create(&self.server, self.disk_port);
                "started\n".to_owned()
            }
            "pause" => "pausing\n".to_owned(),
            "INT" | "STOP" | "CONT" => {
                self.server.signal(&format!("-{asked}"));
                format!("sent {asked}\n")
            }
            _ => {
                let words = asked.strip_suffix(" at last").unwrap_or(asked).split(' ');
                let output = self.server.asked(&words.collect::<Vec<_>>());
                let printed = String::from_utf8_lossy(&output.stdout);
                let status = output.status.code().unwrap_or(-1);
                format!("{printed}{}status of {asked}: {status}\n", said(&output))
            }
        }
    }
}

/// A disk for a machine to swap to; returns its port.
fn create(server: &Server, port: u16) -> u16 {
    let at = server.ok(&["disk", "create", "--name", "far", "--size", "2G", "--nbd-tcp", &port.to_string()]);
    let port = at.trim().strip_prefix("nbd://127.0.0.1:").and_then(|rest| rest.strip_suffix("/far"));
    port.and_then(|port| port.parse().ok()).unwrap_or_else(|| panic!("no port in {at}"))
}

fn far_machine(processors: u32) -> Vm {
    let mut vm = machine::machine(processors, MEMORY_MIB);
    vm.network().expect("a module of this kernel's");
    vm.module("nbd", "nbds_max=1").expect("a module of this kernel's");
    let client = find_program("nbd-client").expect("asked for before");
    vm.program(&client, "/bin/nbd-client").expect("a program that can be read");
    vm
}

/// Runs the script on a machine beside a server; what was printed.
fn run(processors: u32, script: &str) -> String {
    // Time is of the essence: a machine that is kept waiting by two others may give its server up.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let host = Host::start();
    let asked_at = host.listener.local_addr().expect("it is bound");
    let script = format!(
        r#"
host() {{ echo "$*" | nc {HOST} {asked}; }}
connect() {{ nbd-client {HOST} {port} $device -N far -b 4096 -swap -timeout {TIMEOUT_S}; }}
device=/dev/nbd0
# A program that stands still, with most of its pages swapped out and memory to bring them back.
sleeper() {{
    (work /scan 80 1000000 --content /content) >/run/laps & sleeper=$!
    while ! grep -q fill /run/laps; do sleep 1; done; kill -STOP $sleeper
    # A server that had to wait for a processor may be slower than the kernel is patient: it kills rather than wait for ever.
    for try in 1 2 3; do
        (work /scan 110 1) >/dev/null; pressed=$?
        [ $pressed = 137 ] || break
    done
    status pressed $pressed
    swapped_out 20000
}}
# What is sent is lost, and nobody hears of it. To do it takes some memory.
cut() {{ ip route add blackhole {HOST}; }}
mend() {{ ip route del blackhole {HOST}; }}
{script}
"#,
        asked = asked_at.port(),
        port = host.disk_port,
    );
    let answering = thread::spawn(move || host.answer());
    let printed = std::panic::catch_unwind(|| machine::run(far_machine(processors), &script));
    let told = TcpStream::connect(asked_at).and_then(|mut stream| stream.write_all(b"end\n"));
    let ended = answering.join();
    let printed = printed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    told.expect("it listens until it is told");
    ended.expect("it answers to the end");
    printed
}

fn has_all() -> bool {
    requires(&[&NEEDED[..], &[Feature::Program("nbd-client")]].concat())
}

// As the guide says.
const ON: &str = r#"
echo 0 >/proc/sys/vm/watermark_boost_factor
echo 16384 >/proc/sys/vm/min_free_kbytes
connect; status connect $?
mkswap -L far $device >/dev/null && swapon -dpages $device; status on $?
"#;

#[test]
fn a_machine_with_one_processor_swaps_to_another_which_does_not_take_the_disk_away() {
    if !has_all() {
        return;
    }
    let script = format!(
        r#"
{ON}
(work /scan 128 1 --content /content); status real $?
host disk rm far
host disk reset far
host disk resize far 64M
host INT
host list
(work /scan 140 1000 --content /content) >/dev/null & holder=$!
swapped_out 20000
kill $holder; wait $holder
swapoff $device; status off $?
nbd-client -d $device; status disconnect $?
host disk rm far at last
"#
    );
    let printed = run(1, &script);
    assert_ended(&printed, &[("connect", 0), ("on", 0), ("real", 0), ("off", 0), ("disconnect", 0)]);
    assert_ended(&printed, &["disk rm far", "disk reset far", "disk resize far 64M"].map(|asked| (asked, FAILED)));
    assert!(printed.contains("NBD clients are connected (1) from 127.0.0.1:"), "{printed}");
    // The server was asked to end, and is there.
    assert_ended(&printed, &[("list", 0), ("disk rm far at last", 0)]);
}

#[test]
fn a_machine_that_swaps_to_another_carries_a_mix_and_outlives_the_servers_death() {
    if !has_all() {
        return;
    }
    let (seconds, passes) = (at_length(180, 8), at_length(3, 1));
    let [tested, real, published, random] =
        [(76, 24), (120, 32), (190, 48), (190, 48)].map(|(long, short)| at_length(long, short));
    let script = format!(
        r#"
{ON}
(work /memory-tester --seed 3 --seconds {seconds} --mb {tested} --threads 2) & tester=$!
(work /scan {real} {passes} --content /content) & real=$!
(work /scan {published} {passes}) & published=$!
(work /scan {random} {passes} --order random) & random=$!
wait $tester; status tester $?
wait $real; status real $?
wait $published; status published $?
wait $random; status random $?
sleeper
host kill
kill -CONT $sleeper; wait $sleeper; status victim $?
swapoff $device; status gone $?
nbd-client -d $device; status disconnect $?
host again
{ON}
(work /memory-tester --seed 5 --seconds 8 --mb 128 --threads 2); status again $?
swapoff $device; status off $?
"#
    );
    let printed = run(2, &script);
    let works = ["on", "tester", "real", "published", "random", "pressed", "gone", "disconnect", "again", "off"];
    assert_ended(&printed, &works.map(|name| (name, 0)));
    assert_lost_a_page(&printed, "victim");
}

#[test]
fn a_machine_waits_for_a_server_that_pauses_and_gives_up_one_that_is_silent_or_cut_off() {
    if !has_all() {
        return;
    }
    let script = format!(
        r#"
{ON}
(work /scan 140 1000 --content /content) >/dev/null & patient=$!
swapped_out 20000
host pause; sleep 20
kill $patient; wait $patient; status patient $?
sleeper
host STOP
kill -CONT $sleeper; wait $sleeper; status given-up $?
swapoff $device; status stopped $?
host CONT
nbd-client -d $device
{ON}
sleeper
cut
kill -CONT $sleeper; wait $sleeper; status cut $?
mend
swapoff $device; status off $?
"#
    );
    let printed = run(1, &script);
    assert_ended(&printed, &["on", "pressed", "stopped", "off"].map(|name| (name, 0)));
    // It was still there to be ended.
    assert_ended(&printed, &[("patient", TERMINATED)]);
    assert_lost_a_page(&printed, "given-up");
    assert_lost_a_page(&printed, "cut");
}
