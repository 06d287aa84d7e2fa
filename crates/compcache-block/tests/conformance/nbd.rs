//! What only a server can get wrong: its haggling, one request in the way of another, its end and its clients' ends.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use compcache_block::nbd::{Export, Listen, NbdError, NbdServer};
use compcache_block::{Array, BlockDevice, Cached, Checked, Delayed, Fault, Faulty, Origin, Request};
use compcache_store::Codec;

use crate::client::{self, Client, go_data, greet, option, option_replies};
use crate::front::{Front, Nbd};
use crate::{SIZE_BYTES, disk, disk_of};

const DELAY: Duration = Duration::from_secs(4);

fn delayed() -> Nbd<true> {
    Nbd::serve(Arc::new(Delayed::new(disk().device, 65536..131_072, DELAY)))
}

fn export(name: &str, device: Arc<dyn BlockDevice>, read_only: bool) -> Export {
    Export { name: name.into(), device, read_only }
}

/// Waits for something that takes no more than the client's end to come about.
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what} did not come about in 20 s");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_request_that_waits_does_not_hold_up_the_others_of_its_connection() {
    let front = delayed();
    let mut client = Client::connect(&front.socket, "disk", true).unwrap();
    let begun = Instant::now();
    let slow_writes = [0, 1, 2].map(|at| client.send(0, client::WRITE, 65536 + at * 4096, 4096, &[7; 4096]).unwrap());
    let slow_read = client.send(0, client::READ, 65536 + 12288, 4096, &[]).unwrap();
    let quick: Vec<u64> = (0..50).map(|at| client.send(0, client::READ, at * 100, 100, &[]).unwrap()).collect();
    let answered: Vec<u64> = quick.iter().map(|_| client.receive(0).unwrap().cookie).collect();
    assert_eq!(answered, quick, "the quick ones come first, in their order");
    assert!(begun.elapsed() < DELAY, "they took {:?}", begun.elapsed());
    let slow: Vec<_> = (0..4).map(|_| client.receive(0).unwrap()).collect();
    assert!(begun.elapsed() >= 3 * DELAY, "a write waited with another");
    assert!(slow.iter().all(|reply| reply.error == 0));
    let cookies: Vec<u64> = slow.iter().map(|reply| reply.cookie).collect();
    assert!(cookies[..2].contains(&slow_read), "the read waited for more than one write: {cookies:?}");
    assert_eq!(cookies.into_iter().filter(|cookie| *cookie != slow_read).collect::<Vec<_>>(), slow_writes);
    let back = client.ask(0, client::READ, 65536, 12288, &[]).unwrap();
    assert_eq!((back.error, back.data), (0, vec![7; 12288]));
}

#[test]
fn more_waiting_requests_than_the_queue_holds_are_all_answered() {
    let quickly = Duration::from_millis(1);
    let front = Nbd::<true>::serve(Arc::new(Delayed::new(disk().device, 65536..131_072, quickly)));
    let mut client = Client::connect(&front.socket, "disk", true).unwrap();
    let sent: Vec<u64> =
        (0..300).map(|at| client.send(0, client::WRITE, 65536 + at * 7, 7, &[at as u8; 7]).unwrap()).collect();
    let answered: Vec<u64> = sent.iter().map(|_| client.receive(0).unwrap().cookie).collect();
    assert_eq!(answered, sent);
    let back = client.ask(0, client::READ, 65536, 2100, &[]).unwrap().data;
    assert!(back.chunks(7).enumerate().all(|(at, bytes)| bytes == [at as u8; 7]));
}

#[test]
fn a_stopped_server_answers_what_is_in_flight_and_leaves_nothing_behind() {
    let delayed = Arc::new(Delayed::new(disk().device, 65536..131_072, DELAY));
    let front = Nbd::<true>::serve(delayed.clone());
    let mut client = Client::connect(&front.socket, "disk", true).unwrap();
    let mut idle = Client::connect(&front.socket, "disk", true).unwrap();
    let slow = client.send(0, client::WRITE, 65536, 4096, &[7; 4096]).unwrap();
    eventually("that the request waits", || delayed.waited() == 1);
    drop(delayed);
    let Nbd { server, device, socket, .. } = front;
    server.stop(Duration::from_secs(10));
    let reply = client.receive(0).unwrap();
    assert_eq!((reply.cookie, reply.error), (slow, 0));
    for client in [&mut client, &mut idle] {
        assert_eq!(client.stream.read(&mut [0; 1]).unwrap(), 0, "the connection is still open");
    }
    assert!(!socket.exists(), "the socket is still there");
    // Ours, and none of a thread that is still at it.
    assert_eq!(Arc::strong_count(&device), 1);
}

#[test]
fn a_server_that_gives_no_grace_stops_though_its_clients_do_not_listen() {
    let front = Nbd::<true>::serve(disk().device);
    let mut clients: Vec<Client> = (0..3).map(|_| Client::connect(&front.socket, "disk", true).unwrap()).collect();
    for client in &mut clients {
        // More than a socket holds, so that the server blocks in its writing.
        for _ in 0..8 {
            client.send(0, client::READ, 0, SIZE_BYTES as u32, &[]).unwrap();
        }
    }
    thread::sleep(Duration::from_millis(100));
    let begun = Instant::now();
    front.server.stop(Duration::ZERO);
    assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
    assert_eq!(Arc::strong_count(&front.device), 1);
}

#[test]
fn clients_that_die_in_flight_leave_a_server_that_serves_others() {
    let front = delayed();
    for round in 0..10 {
        let mut client = Client::connect(&front.socket, "disk", round % 2 == 0).unwrap();
        for at in 0..4 {
            client.send(0, client::READ, 65536 + at, 100, &[]).unwrap();
            client.send(0, client::READ, 0, SIZE_BYTES as u32 / 2, &[]).unwrap();
        }
        // A write of which half the payload never comes.
        client.send(0, client::WRITE, 0, 4096, &[9; 2048]).unwrap();
        drop(client);
    }
    let mut client = Client::connect(&front.socket, "disk", true).unwrap();
    let back = client.ask(0, client::READ, 0, 4096, &[]).unwrap();
    assert_eq!((back.error, back.data), (0, vec![0; 4096]), "half a write was made");
    drop(client);
    eventually("the end of all connections", || front.server.connections() == 0);
}

/// The kernel says when it will ask, in `/proc/net/tcp`: the hundredths of a second until its timer 02 goes off.
#[test]
fn a_tcp_client_that_says_nothing_is_asked_whether_it_is_there() {
    let server = NbdServer::start(&Listen::Loopback(0), vec![export("disk", disk().device, false)]).unwrap();
    let address = server.tcp_address().unwrap();
    let mut client = TcpStream::connect(address).unwrap();
    client.read_exact(&mut [0; 18]).unwrap();
    assert_eq!(server.tcp_peers(), [client.local_addr().unwrap()]);
    let (ours, theirs) = (format!(":{:04X}", address.port()), format!(":{:04X}", client.local_addr().unwrap().port()));
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    // sl local remote state queues timer:when ...
    let fields = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let ends = |line: &Vec<String>| line[1].ends_with(&ours) && line[2].ends_with(&theirs);
    let connection = sockets.lines().map(fields).find(ends).unwrap_or_else(|| panic!("not in {sockets}"));
    let (timer, when) = connection[5].split_once(':').unwrap();
    let seconds = u64::from_str_radix(when, 16).unwrap() / 100;
    assert!(timer == "02" && (60..=120).contains(&seconds), "timer {timer}, {seconds} s");
}

#[test]
fn exports_are_found_by_name_and_a_read_only_one_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd");
    let (first, second) = (Arc::new(Array::new(8192).unwrap()), Arc::new(Array::new(16384).unwrap()));
    let exports = vec![export("first", first, false), export("second", second, true)];
    let server = NbdServer::start(&Listen::Unix(socket.clone()), exports).unwrap();
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    for (name, size) in [("first", 8192), ("", 8192), ("second", 16384)] {
        assert_eq!(Client::connect(&socket, name, true).unwrap().size_bytes, size, "{name:?}");
    }
    let mut stream = greet(&socket).unwrap();
    stream.write_all(&option(3, &[])).unwrap();
    let listed = option_replies(&mut stream, 3).unwrap();
    let names: Vec<&[u8]> = listed[..2].iter().map(|(_, data)| &data[4..]).collect();
    assert_eq!(names, [&b"first"[..], b"second"]);
    stream.write_all(&option(7, &go_data("third"))).unwrap();
    assert_eq!(option_replies(&mut stream, 7).unwrap()[0].0, (1 << 31) | 6);
    let mut client = Client::connect(&socket, "second", true).unwrap();
    assert_eq!(client.flags & 2, 2);
    for command in [client::TRIM, client::WRITE_ZEROES] {
        assert_eq!(client.ask(0, command, 0, 4096, &[]).unwrap().error, 1);
    }
    assert_eq!(client.ask(0, client::WRITE, 0, 5, b"hello").unwrap().error, 1);
    assert_eq!(client.ask(0, client::READ, 0, 5, &[]).unwrap().data, [0; 5]);
    drop(server);
    assert!(!socket.exists());
}

#[test]
fn options_we_do_not_know_and_options_that_are_malformed_are_refused_and_haggling_goes_on() {
    let front = Nbd::<true>::serve(disk().device);
    let mut stream = greet(&front.socket).unwrap();
    let unsupported = (1 << 31) | 1;
    let invalid = (1 << 31) | 3;
    let too_big = (1 << 31) | 9;
    let cases: [(u32, Vec<u8>, u32); 9] = [
        (5, vec![], unsupported),
        (11, vec![], unsupported),
        (4711, vec![1, 2, 3], unsupported),
        (3, vec![1], invalid),
        (8, vec![1], invalid),
        (7, vec![0, 0, 0, 200, 1], invalid),
        (6, [&u32::MAX.to_be_bytes()[..], &[0; 6]].concat(), invalid),
        // Metadata before structured replies.
        (10, client::context_data("disk", "base:allocation"), invalid),
        (6, vec![0; 20_000], too_big),
    ];
    for (number, data, expected) in cases {
        stream.write_all(&option(number, &data)).unwrap();
        let replies = option_replies(&mut stream, number).unwrap();
        assert_eq!((replies.len(), replies[0].0), (1, expected), "option {number}");
    }
    stream.write_all(&option(7, &go_data("disk"))).unwrap();
    assert_eq!(option_replies(&mut stream, 7).unwrap().last().unwrap().0, 1);
}

#[test]
fn the_old_way_of_choosing_an_export_works_and_an_unknown_name_ends_it() {
    let front = Nbd::<true>::serve(disk().device);
    let mut stream = greet(&front.socket).unwrap();
    stream.write_all(&option(1, b"disk")).unwrap();
    let mut answer = [0; 10];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..8], SIZE_BYTES.to_be_bytes());
    stream.write_all(&client::request(0, client::READ, 77, 0, 4)).unwrap();
    let mut reply = [9; 20];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(&reply[4..], &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 77, 0, 0, 0, 0]);
    let mut stream = greet(&front.socket).unwrap();
    stream.write_all(&option(1, b"no such disk")).unwrap();
    assert_eq!(stream.read(&mut answer).unwrap(), 0);
}

#[test]
fn commands_and_flags_we_do_not_know_are_refused_and_the_connection_goes_on() {
    let front = Nbd::<true>::serve(disk().device);
    let mut client = Client::connect(&front.socket, "disk", true).unwrap();
    let invalid = 22;
    assert_eq!(client.ask(0, 4711, 0, 4096, &[]).unwrap().error, invalid);
    assert_eq!(client.ask(1 << 9, client::READ, 0, 4096, &[]).unwrap().error, invalid);
    assert_eq!(client.ask(1 << 9, client::WRITE, 0, 3, b"abc").unwrap().error, invalid);
    assert_eq!(client.ask(client::NO_HOLE, client::TRIM, 0, 4096, &[]).unwrap().error, invalid);
    assert_eq!(client.ask(0, client::READ, 0, (32 << 20) + 1, &[]).unwrap().error, invalid);
    assert_eq!(client.ask(0, client::BLOCK_STATUS, 0, 0, &[]).unwrap().error, invalid);
    assert_eq!(client.ask(0, client::CACHE, 0, SIZE_BYTES as u32 + 1, &[]).unwrap().error, invalid);
    assert_eq!(client.ask(0, client::CACHE, 0, SIZE_BYTES as u32, &[]).unwrap().error, 0);
    assert_eq!(client.ask(0, client::READ, 0, 0, &[]).unwrap().error, 0);
    assert_eq!(client.ask(0, client::READ, 0, 3, &[]).unwrap().data, [0; 3]);
    let mut simple = Client::connect(&front.socket, "disk", false).unwrap();
    assert_eq!(simple.ask(0, client::BLOCK_STATUS, 0, 4096, &[]).unwrap().error, invalid, "not agreed on");
    client.send(0, client::WRITE, 0, (32 << 20) + 1, &[]).unwrap();
    assert_eq!(client.stream.read(&mut [0; 1]).unwrap(), 0, "too long to be taken in");
    let mut lost = Client::connect(&front.socket, "disk", true).unwrap();
    lost.stream.write_all(&[0; 28]).unwrap();
    assert_eq!(lost.stream.read(&mut [0; 1]).unwrap(), 0, "no request where one should be");
}

#[test]
fn a_long_request_for_status_is_answered_in_extents_of_alternating_kinds() {
    let disk = disk_of(4 << 30, u64::MAX);
    let front = Nbd::<true>::serve(disk);
    let mut client = Client::connect(&front.socket, "disk", true).unwrap();
    for block in 0..1000u64 {
        assert_eq!(client.ask(0, client::WRITE, block * 8192, 4096, &[1; 4096]).unwrap().error, 0);
    }
    let reply = client.ask(0, client::BLOCK_STATUS, 0, u32::MAX, &[]).unwrap();
    assert_eq!(reply.data.len(), 512 * 8, "no more than fit into the answer");
    for (at, extent) in reply.data.chunks(8).enumerate() {
        assert_eq!(extent, [0, 0, 16, 0, 0, 0, 0, if at % 2 == 0 { 0 } else { 3 }]);
    }
    let one = client.ask(8, client::BLOCK_STATUS, 100, 1 << 20, &[]).unwrap();
    assert_eq!(one.data, [0, 0, 15, 156, 0, 0, 0, 0]);
    let rest = client.ask(0, client::BLOCK_STATUS, 999 * 8192, u32::MAX - 999 * 8192, &[]).unwrap();
    assert_eq!((rest.data.len(), rest.data[15]), (16, 3));
}

/// What an origin says that cannot discard.
fn without_holes() -> Arc<dyn BlockDevice> {
    let fault = Fault { request: Request::Discard, offsets_bytes: 0..u64::MAX, one_in: 1, errno: 95 };
    Arc::new(Faulty::new(disk().device, 1, vec![fault]))
}

#[test]
fn a_trim_of_what_cannot_be_trimmed_is_a_hint_that_was_heard() {
    let front = Nbd::<true>::serve(without_holes());
    let mut client = Client::connect(&front.socket, "disk", true).unwrap();
    assert_eq!(client.ask(0, client::WRITE, 0, 4096, &[7; 4096]).unwrap().error, 0);
    for flags in [0, client::FUA] {
        assert_eq!(client.ask(flags, client::TRIM, 0, 4096, &[]).unwrap().error, 0);
    }
    assert_eq!(client.ask(0, client::READ, 0, 4096, &[]).unwrap().data, [7; 4096]);
}

#[test]
fn quick_zeroes_are_promised_by_none_but_who_keeps_it() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SIZE_BYTES).unwrap();
    let origin = Arc::new(Origin::open(file.path()).unwrap());
    let cached = Arc::new(Cached::new(origin, 4 << 20, Codec::Lz4).unwrap());
    let checked = Arc::new(Checked::new(cached));
    for (device, is_quick) in [(disk().device, true), (checked as Arc<dyn BlockDevice>, false)] {
        let front = Nbd::<true>::serve(device);
        let mut client = Client::connect(&front.socket, "disk", true).unwrap();
        assert_eq!(client.flags & client::SEND_FAST_ZERO != 0, is_quick);
        let mut zeroes = |flags| client.ask(flags, client::WRITE_ZEROES, 0, 4096, &[]).unwrap().error;
        assert_eq!(zeroes(0), 0);
        assert_eq!(zeroes(client::FAST_ZERO), if is_quick { 0 } else { 22 });
    }
}

#[test]
fn a_socket_that_is_served_is_not_taken_over_and_one_left_behind_is() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd");
    let start = |path: &Path| NbdServer::start(&Listen::Unix(path.into()), vec![export("disk", disk().device, false)]);
    drop(UnixListener::bind(&socket).unwrap());
    assert!(socket.exists());
    let server = start(&socket).expect("nobody serves there");
    let Err(NbdError::Listen(taken)) = start(&socket) else { panic!("it was taken over") };
    assert_eq!(taken.kind(), ErrorKind::AddrInUse);
    Client::connect(&socket, "disk", true).expect("the first server still serves");
    drop(server);
    std::fs::write(&socket, "not a socket").unwrap();
    assert!(matches!(start(&socket), Err(NbdError::Listen(_))));
    assert_eq!(std::fs::read(&socket).unwrap(), b"not a socket");
}

#[test]
fn nobody_is_let_in_while_the_server_is_held_and_it_is_held_only_while_nobody_is_in() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd");
    let server = NbdServer::start(&Listen::Unix(socket.clone()), vec![export("disk", disk().device, false)]).unwrap();
    let client = Client::connect(&socket, "disk", true).unwrap();
    assert!(server.hold().is_none());
    drop(client);
    eventually("the client has gone", || server.connections() == 0);
    let held = server.hold().expect("nobody is connected");
    assert!(server.hold().is_none(), "one at a time");
    let mut greeting = Vec::new();
    UnixStream::connect(&socket).unwrap().read_to_end(&mut greeting).unwrap();
    assert!(greeting.is_empty(), "somebody was let in");
    drop(held);
    let client = Client::connect(&socket, "disk", true).expect("it is held no more");
    let server = server.stop_unused().expect_err("somebody is connected");
    drop(client);
    eventually("the client has gone", || server.connections() == 0);
    assert!(server.stop_unused().is_ok() && !socket.exists());
}

#[test]
fn tcp_is_served_to_this_machine_alone_unless_told_otherwise() {
    let exports = || vec![export("disk", disk().device, false)];
    let server = NbdServer::start(&Listen::Loopback(0), exports()).unwrap();
    let address = server.tcp_address().unwrap();
    assert!(address.ip().is_loopback() && address.port() != 0, "{address}");
    let mut greeting = [0; 18];
    std::net::TcpStream::connect(address).unwrap().read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    drop(server);
    assert!(std::net::TcpStream::connect(address).is_err(), "it still listens");
    let server = NbdServer::start(&Listen::Anyone("0.0.0.0:0".parse().unwrap()), exports()).unwrap();
    assert!(server.tcp_address().unwrap().ip().is_unspecified());
}

#[test]
fn names_that_cannot_be_told_apart_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let start = |names: &[&str]| {
        let exports = names.iter().map(|name| export(name, disk().device, false)).collect();
        NbdServer::start(&Listen::Unix(dir.path().join("nbd")), exports).map(drop)
    };
    assert!(matches!(start(&[]), Err(NbdError::NoExport)));
    assert!(matches!(start(&["a", "b", "a"]), Err(NbdError::BadName { number: 2 })));
    assert!(matches!(start(&[&"x".repeat(4097)]), Err(NbdError::BadName { number: 0 })));
    assert!(start(&["a", "b"]).is_ok());
}

#[test]
fn no_more_clients_than_the_limit_are_served_and_places_become_free() {
    let front = Nbd::<true>::serve(disk().device);
    let limit = compcache_block::nbd::CONNECTIONS_MAX;
    let streams: Vec<UnixStream> = (0..limit).map(|_| greet(&front.socket).unwrap()).collect();
    assert!(greet(&front.socket).is_err(), "one more was let in");
    drop(streams);
    eventually("a free place", || front.server.connections() == 0);
    Client::connect(&front.socket, "disk", true).unwrap();
}
