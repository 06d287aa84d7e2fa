//! Real clients of NBD: what they make of our server is what counts.
//!
//! They are Debian's packages libnbd-bin, qemu-utils and fio. A test whose client is missing is skipped, printed and
//! counted; with `COMPCACHE_REQUIRE_ALL=1` it fails.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use compcache_block::nbd::{Export, Listen, NbdServer};
use compcache_block::{Checked, Disk};
use compcache_store::{PoolConfig, Store, StoreConfig};
use compcache_testkit::features::{Feature, requires};
use compcache_testkit::seed::Seed;
use tempfile::TempDir;

const SIZE_BYTES: u64 = 64 << 20;

/// A disk that is served at a socket, and remembered by a [`Checked`].
struct Served {
    disk: Arc<Disk>,
    checked: Arc<Checked>,
    dir: TempDir,
    _server: NbdServer,
}

fn serve() -> Served {
    let store = Store::new(StoreConfig { reserve_bytes: 1 << 30, ..StoreConfig::default() }).unwrap();
    let disk = Arc::new(Disk::new(store.create_pool(PoolConfig::default()).unwrap(), SIZE_BYTES).unwrap());
    let checked = Arc::new(Checked::new(disk.clone()));
    let dir = tempfile::tempdir().unwrap();
    let exports = vec![
        Export { name: "disk".into(), device: checked.clone(), read_only: false },
        Export { name: "look".into(), device: checked.clone(), read_only: true },
    ];
    let server = NbdServer::start(&Listen::Unix(dir.path().join("nbd")), exports).unwrap();
    Served { disk, checked, dir, _server: server }
}

impl Served {
    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.dir.path().join("nbd").display())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// What the program prints, if it succeeds.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{out}\n{err}", output.status);
    out
}

/// An image of `SIZE_BYTES`: stretches of text, of noise, and of nothing.
fn image(path: &Path, seed: Seed) {
    let mut rng = seed.rng();
    let mut bytes = vec![0; SIZE_BYTES as usize];
    for stretch in bytes.chunks_mut(100_000) {
        match rng.u8(..4) {
            0 => rng.fill(stretch),
            1 => stretch.iter_mut().enumerate().for_each(|(at, byte)| *byte = b"line of text\n"[at % 13]),
            _ => {}
        }
    }
    fs::write(path, bytes).unwrap();
}

fn same(one: &Path, other: &Path) -> bool {
    fs::read(one).unwrap() == fs::read(other).unwrap()
}

#[test]
fn nbdinfo_finds_the_exports_their_sizes_and_what_they_can_do() {
    if !requires(&[Feature::Program("nbdinfo")]) {
        return;
    }
    let served = serve();
    let info = run("nbdinfo", &[&served.uri("disk")]);
    for expected in [
        "newstyle-fixed without TLS, using structured packets",
        "export-size: 67108864",
        "base:allocation",
        "is_read_only: false",
        "can_multi_conn: true",
        "can_fua: true",
        "can_df: true",
        "can_trim: true",
        "can_zero: true",
        "can_fast_zero: true",
        "block_size_minimum: 1",
        "block_size_preferred: 4096",
        "block_size_maximum: 33554432",
    ] {
        assert!(info.contains(expected), "{expected:?} is missing in\n{info}");
    }
    assert!(run("nbdinfo", &[&served.uri("look")]).contains("is_read_only: true"));
    let list = run("nbdinfo", &["--list", &served.uri("")]);
    assert!(list.contains("export=\"disk\"") && list.contains("export=\"look\""), "{list}");
    let map = run("nbdinfo", &["--map", &served.uri("disk")]);
    assert!(map.contains("67108864") && map.contains("hole,zero"), "{map}");
}

#[test]
fn nbdcopy_brings_an_image_in_and_out_unchanged() {
    if !requires(&[Feature::Program("nbdcopy")]) {
        return;
    }
    let served = serve();
    image(&served.file("in"), Seed::for_test("nbdcopy_brings_an_image_in_and_out_unchanged"));
    let (into, out) = (served.file("in"), served.file("out"));
    run("nbdcopy", &["--connections=4", "--requests=16", into.to_str().unwrap(), &served.uri("disk")]);
    run("nbdcopy", &["--connections=4", &served.uri("look"), out.to_str().unwrap()]);
    assert!(same(&into, &out));
    let stats = served.disk.stats();
    let held = stats.compr_data_size * 100 / SIZE_BYTES;
    println!("{} pages stored, {held} % of the image held", stats.pages_stored());
    assert!((10..60).contains(&held), "of an image that is a quarter noise, {held} % is held");
    assert_eq!(served.checked.lies(), 0);
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    if !requires(&[Feature::Program("qemu-img")]) {
        return;
    }
    let served = serve();
    image(&served.file("in"), Seed::for_test("qemu_img_converts_compares_and_maps"));
    let (into, out) = (served.file("in"), served.file("out.qcow2"));
    let (into, out) = (into.to_str().unwrap(), out.to_str().unwrap());
    let uri = served.uri("disk");
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", into, &uri]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", into, &uri]);
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, out]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", into, out]);
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
    assert!(map.contains("\"zero\": true") && map.contains("\"data\": true"), "{map}");
    assert_eq!(served.checked.lies(), 0);
}

#[test]
fn qemu_io_reads_back_patterns_zeroes_and_what_was_discarded() {
    if !requires(&[Feature::Program("qemu-io")]) {
        return;
    }
    let served = serve();
    let commands = [
        "write -P 0xaa 0 1M",
        "write -f -P 0xbb 1000 3000",
        "read -P 0xaa 0 1000",
        "read -P 0xbb 1000 3000",
        "read -P 0xaa 4000 100000",
        "aio_write -P 0xcc 2M 4M",
        "aio_write -P 0xdd 6M 4M",
        "aio_flush",
        "read -P 0xcc 2M 4M",
        "read -P 0xdd 6M 4M",
        "write -z 64k 64k",
        "write -z -u 256k 64k",
        "discard 512k 64k",
        "flush",
        "read -P 0 64k 64k",
        "read -P 0 256k 64k",
        "read -P 0 512k 64k",
        "read -P 0xaa 576k 64k",
    ];
    let uri = served.uri("disk");
    let mut arguments = vec!["-f", "raw"];
    for command in &commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(&uri);
    let said = run("qemu-io", &arguments);
    assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    assert_eq!(said.matches("ops;").count(), commands.len() - 2, "{said}");
    assert_eq!(served.checked.lies(), 0);
}

/// Lets fio loose on the disk through its own client of NBD's. It ends with an error when a checksum is wrong.
fn fio(served: &Served, arguments: &[&str]) {
    let uri = format!("--uri={}", served.uri("disk"));
    let common = ["--name=verify", "--ioengine=nbd", &uri, "--thread", "--iodepth=16", "--group_reporting"];
    let verify = ["--verify_fatal=1", "--verify_state_save=0", "--buffer_compress_percentage=50", "--refill_buffers"];
    let said = run("fio", &[&common[..], &verify, arguments].concat());
    assert!(said.contains("err= 0"), "{said}");
}

#[test]
fn fio_verifies_what_four_jobs_wrote_at_random() {
    if !requires(&[Feature::Program("fio")]) {
        return;
    }
    let served = serve();
    let jobs = ["--numjobs=4", "--size=16M", "--offset_increment=16M", "--verify=crc32c"];
    fio(&served, &[&jobs[..], &["--rw=randrw", "--bs=4k,4k", "--bssplit=512/20:4k/50:64k/30"]].concat());
    let stats = served.disk.stats();
    println!("{} pages written, {} read", stats.num_writes, stats.num_reads);
    assert!(stats.num_writes >= (32 << 20) / 4096, "{} pages written", stats.num_writes);
    assert_eq!((served.checked.lies(), stats.failed_reads, stats.failed_writes), (0, 0, 0));
}

#[test]
fn fio_verifies_what_was_written_after_a_trim_and_finds_nothing_after_the_last() {
    if !requires(&[Feature::Program("fio")]) {
        return;
    }
    let served = serve();
    let jobs = ["--numjobs=4", "--size=8M", "--offset_increment=16M", "--verify=crc32c"];
    fio(&served, &[&jobs[..], &["--rw=randtrimwrite", "--bs=4k"]].concat());
    assert!(served.disk.stats().orig_data_size >= 2 << 20, "{} bytes stored", served.disk.stats().orig_data_size);
    fio(&served, &["--rw=randtrim", "--bs=64k", "--size=64M"]);
    fio(&served, &["--rw=read", "--bs=1M", "--size=64M", "--verify=pattern", "--verify_pattern=0x00"]);
    assert_eq!((served.disk.stats().orig_data_size, served.checked.lies()), (0, 0));
}
