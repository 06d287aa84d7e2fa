//! Clients that send rubbish: random bytes, and real sessions that were changed or cut off.
//!
//! Whatever it is sent, the server lives, serves the next client, and ends the connection or answers. A thread of its that
//! panicked would keep its place among the connections, which is looked for at the end.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use compcache_testkit::seed::Seed;

use crate::client::{self, Client, context_data, go_data, option, request};
use crate::disk;
use crate::front::{Front, Nbd};
use crate::nbd::eventually;

/// A session as it should be: what a client sends from its first byte on.
fn session(rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    let options = [
        option(3, &[]),
        option(6, &go_data("disk")),
        option(8, &[]),
        option(9, &context_data("disk", "base:")),
        option(10, &context_data("disk", "base:allocation")),
        option(4711, b"anything"),
    ];
    for wanted in options {
        if rng.u8(..4) != 0 {
            bytes.extend(wanted);
        }
    }
    bytes.extend(if rng.u8(..8) == 0 { option(1, b"disk") } else { option(7, &go_data("disk")) });
    for cookie in 0..rng.u64(1..12) {
        let (command, length) = (rng.u16(..9), rng.u32(..20_000));
        let command = if command == client::DISC { client::READ } else { command };
        let flags = if rng.u8(..4) == 0 { rng.u16(..) & 0x1f } else { 0 };
        bytes.extend(request(flags, command, cookie, rng.u64(..2_200_000), length));
        if command == client::WRITE {
            bytes.extend(std::iter::repeat_with(|| rng.u8(..)).take(length as usize));
        }
    }
    bytes
}

/// Changes a session in one of the ways in which clients go wrong.
fn spoil(rng: &mut fastrand::Rng, mut bytes: Vec<u8>) -> Vec<u8> {
    for _ in 0..rng.u8(1..5) {
        // Mostly where there is structure rather than payload.
        let near = if rng.bool() { 200 } else { bytes.len() };
        let at = rng.usize(..near.min(bytes.len()).max(1));
        match rng.u8(..6) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at.min(bytes.len()), rng.u8(..)),
            2 => drop(bytes.drain(at..(at + rng.usize(1..9)).min(bytes.len()).max(at))),
            3 => bytes.iter_mut().skip(at).take(4).for_each(|byte| *byte = 0xff),
            _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << rng.u8(..8)),
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}

/// Sends `bytes`, and takes what comes until the server has said all it wants to.
fn send(front: &Nbd<true>, bytes: &[u8]) -> usize {
    let mut stream = UnixStream::connect(&front.socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut reader = stream.try_clone().unwrap();
    let taken = thread::spawn(move || {
        let mut taken = 0;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return taken,
                Ok(some) => taken += some,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return taken,
                Err(error) => panic!("the server neither answers nor hangs up: {error}"),
            }
        }
    });
    // Fails where the server has heard enough.
    let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
    taken.join().unwrap()
}

#[test]
fn a_server_outlives_whatever_clients_send() {
    let seed = Seed::for_test("a_server_outlives_whatever_clients_send");
    let front = Nbd::<true>::serve(disk().device);
    let mut rng = seed.rng();
    let (mut honest_bytes, mut sent) = (0, 0);
    for round in 0..600 {
        let bytes = match round % 4 {
            0 => {
                let length = rng.usize(..5000);
                std::iter::repeat_with(|| rng.u8(..)).take(length).collect()
            }
            1 => [&3u32.to_be_bytes()[..], &option(rng.u32(..13), &vec![rng.u8(..); rng.usize(..300)])].concat(),
            _ => {
                let honest = session(&mut rng);
                if round % 40 == 3 {
                    honest_bytes += send(&front, &honest);
                }
                spoil(&mut rng, honest)
            }
        };
        sent += bytes.len();
        send(&front, &bytes);
    }
    println!("600 sessions, {sent} bytes of rubbish; honest ones were answered with {honest_bytes} bytes");
    assert!(honest_bytes > 20_000, "the sessions are not as they should be, so spoiling them shows little");
    let mut client = Client::connect(&front.socket, "disk", true).unwrap();
    assert_eq!(client.ask(0, client::WRITE, 0, 5, b"still").unwrap().error, 0);
    assert_eq!(client.ask(0, client::READ, 0, 5, &[]).unwrap().data, b"still");
    drop(client);
    eventually("the end of all connections", || front.server.connections() == 0);
}
