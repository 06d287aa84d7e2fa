//! Cold blocks of a disk are compressed again, by themselves or when asked, and nobody who reads them notices.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use compcache_testkit::features::{Feature, requires};

use crate::support::{PATIENCE, Server, said};

pub const PAGES: u64 = 8192;

/// Pages as heaps have them: pointers with the same upper half, small numbers, zeroes.
pub fn contents() -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(5);
    let words = (0..PAGES * 512).map(|nth| match nth % 6 {
        0 => 0x7f3a_1000_0000 | (random.u64(..) >> 40 & 0xff_fff0),
        1 | 2 => random.u64(..64),
        3 => 0x5555_5560_0000 | (random.u64(..) >> 50 & 0xff8),
        _ => 0,
    });
    words.flat_map(u64::to_le_bytes).collect()
}

/// A disk that holds these contents, and where they are to be read.
struct Filled {
    server: Server,
    at: String,
    written: Vec<u8>,
}

impl Filled {
    /// `None`, told and counted, where nbdcopy is missing.
    fn new(arguments: &[&str]) -> Option<Filled> {
        requires(&[Feature::Program("nbdcopy")]).then(|| {
            let server = Server::start(&[]);
            let mut create = vec!["disk", "create", "--name", "d", "--size", "32M", "--transport", "nbd"];
            create.extend_from_slice(arguments);
            let at = server.ok(&create).trim().to_owned();
            let written = contents();
            let path = server.directory.path().join("in");
            fs::write(&path, &written).expect("the scratch directory can be written to");
            nbdcopy(&path.display().to_string(), &at);
            Filled { server, at, written }
        })
    }

    fn must_be_recompressed(&self) {
        let until = Instant::now() + 3 * PATIENCE;
        loop {
            let grouped = self.server.stat("d", "grouped_pages");
            if grouped == PAGES {
                return;
            }
            assert!(Instant::now() < until, "{grouped} of {PAGES} pages in groups");
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn must_be_the_same(&self) {
        let path = self.server.directory.path().join("out");
        nbdcopy(&self.at, &path.display().to_string());
        assert!(fs::read(&path).expect("nbdcopy wrote it") == self.written, "other bytes came back");
    }
}

fn nbdcopy(from: &str, to: &str) {
    let output = Command::new("nbdcopy").args(["--", from, to]).output().expect("nbdcopy runs");
    assert!(output.status.success(), "nbdcopy {from} {to}: {}", said(&output));
}

#[test]
fn blocks_that_are_not_used_are_recompressed_by_themselves_and_read_as_before() {
    let Some(filled) = Filled::new(&["--recompress-after", "1"]) else { return };
    let server = &filled.server;
    filled.must_be_recompressed();
    filled.must_be_the_same();
    assert!(server.ok(&["show", "d"]).contains("zstd:3, what was not used for 1 s"));
    // Nothing is left behind by blocks that are written anew.
    nbdcopy(&server.directory.path().join("in").display().to_string(), &filled.at);
    filled.must_be_the_same();
    server.ok(&["disk", "reset", "d"]);
    assert_eq!((server.stat("d", "grouped_pages"), server.stat("d", "slot_bytes")), (0, 0));
}

#[test]
fn what_is_asked_to_be_recompressed_takes_two_thirds_at_most() {
    let Some(filled) = Filled::new(&["--recompress", "none"]) else { return };
    let server = &filled.server;
    let before = server.stat("d", "mem_used_total");
    assert!(server.ok(&["recompress", "--idle", "3600", "d"]).starts_with("nothing to gain"), "nothing is so old");
    assert_eq!(server.stat("d", "grouped_pages"), 0);
    // What the server moves just then is left for the next time.
    let mut pages = 0;
    for _ in 0..10 {
        let said = server.ok(&["recompress", "d"]);
        let Some((recompressed, _)) = said.split_once(" pages recompressed: ") else { break };
        pages += recompressed.parse::<u64>().expect("a number");
    }
    assert!(pages >= PAGES && server.stat("d", "grouped_pages") == PAGES, "{pages} pages recompressed");
    assert!(server.ok(&["recompress", "d"]).starts_with("nothing to gain"), "it was done already");
    let after = server.stat("d", "mem_used_total");
    assert!(after * 3 < before * 2, "{before} bytes became {after}");
    filled.must_be_the_same();
    // And it can begin later.
    server.ok(&["disk", "change", "d", "--recompress", "zstd:9", "--recompress-after", "1"]);
    nbdcopy(&server.directory.path().join("in").display().to_string(), &filled.at);
    filled.must_be_recompressed();
    filled.must_be_the_same();
}

#[test]
fn what_cannot_be_recompressed_is_refused_with_the_reason() {
    let server = Server::start(&[]);
    let create = ["disk", "create", "--size", "8M", "--transport", "nbd"];
    server.refuses(&[&create[..], &["--recompress", "lz4"]].concat(), &["zstd", "none"]);
    server.refuses(&[&create[..], &["--recompress", "zstd:40"]].concat(), &["1 to 19"]);
    server.refuses(&[&create[..], &["--recompress-after=-1"]].concat(), &["seconds"]);
    server.ok(&create);
    server.refuses(&["recompress", "other"], &["no disk called other"]);
    server.refuses(&["recompress", "--idle", "long", "disk0"], &["seconds"]);
    assert!(server.ok(&["recompress", "disk0"]).starts_with("nothing to gain"), "an empty disk");
    server.ok(&["disk", "change", "disk0", "--recompress", "none"]);
    assert!(!server.ok(&["show", "disk0"]).contains("recompress "));
}
