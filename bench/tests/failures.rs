//! What goes wrong with ours fails the scenario, and takes nothing away that was measured.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use compcache_testkit::features::{Feature, requires};
use serde_json::Value;

/// Small scans of one repeated byte, for which no content has to be made.
const SCAN: [&str; 11] =
    ["scan", "--content", "same", "--order", "random", "--megabytes", "24", "--cap", "12", "--passes", "1"];

/// A script in place of `compcache`.
fn in_place_of_ours(directory: &Path, script: &str) -> PathBuf {
    let [written, path] = ["written", "compcache"].map(|name| directory.join(name));
    fs::write(&written, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&written, fs::Permissions::from_mode(0o755)).unwrap();
    // By another process: what a test starts meanwhile would have it open for writing, and then it cannot be run.
    assert!(Command::new("cp").args([&written, &path]).status().unwrap().success());
    path
}

/// Whether the bench succeeded, and all that it said.
fn bench(compcache: &Path, arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_compcache-bench"));
    let output = command.arg("--quick").arg("--compcache").arg(compcache).args(arguments).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

/// The one record in `directory`.
fn record_in(directory: &Path) -> Value {
    let found = fs::read_dir(directory).unwrap().next().expect("a record").unwrap();
    serde_json::from_str(&fs::read_to_string(found.path()).unwrap()).unwrap()
}

#[test]
fn a_scenario_in_which_ours_does_not_start_fails() {
    let needed = [Feature::Root, Feature::CgroupMemory, Feature::ZramDevice, Feature::Loop, Feature::Fuse];
    if !requires(&[&needed[..], &[Feature::Program("mkfs.ext4")]].concat()) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let compcache = in_place_of_ours(directory.path(), "echo it is broken >&2; exit 1");
    let tree = directory.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("file"), "content").unwrap();
    let scan = [&SCAN[..], &["--sides", "zram:lzo-rle,swap:lz4"]].concat();
    let all: [&[&str]; 6] = [
        &scan,
        &["swap-latency", "--content", "same", "--sides", "zram:lzo-rle,swap:lz4"],
        &["disk-memory", "--sides", "zram:lzo-rle,ours", "--tree", tree.to_str().unwrap()],
        &["iozone", "--sides", "plain,mount", "--through", "mmap", "--record-sizes", "4096"],
        &["limits", "--content", "iozone", "--sides", "mount", "--percent", "50"],
        &["fits", "--questions", "reads", "--content", "iozone"],
    ];
    for arguments in all {
        let (succeeded, said) = bench(&compcache, arguments);
        assert!(!succeeded && said.contains("ours failed") && said.contains("it is broken"), "{arguments:?}: {said}");
    }
    // What came before is not lost.
    let records = directory.path().join("records");
    let (succeeded, said) = bench(&compcache, &[&["--record", records.to_str().unwrap()], all[3]].concat());
    assert!(!succeeded && records.exists(), "{said}");
    let record = record_in(&records);
    assert!(record["runs"].as_array().unwrap().iter().all(|run| run["side"] == "plain"), "{record}");
    assert!(record["error"].as_str().unwrap().contains("it is broken"), "{record}");
}

#[test]
fn a_side_that_fails_in_the_second_round_keeps_its_first() {
    let directory = tempfile::tempdir().unwrap();
    // The first run is the program by itself; then there is nothing to run.
    let once = r#"rm -- "$0"; while [ "$1" != -- ]; do shift; done; shift; exec "$@""#;
    let compcache = in_place_of_ours(directory.path(), once);
    let records = directory.path().join("records");
    let arguments = ["--runs", "2", "--record", records.to_str().unwrap()];
    let (succeeded, said) = bench(&compcache, &[&arguments[..], &SCAN, &["--sides", "ours,uncapped"]].concat());
    assert!(!succeeded && said.contains("1 runs failed"), "{said}");
    let record = record_in(&records);
    let sides: Vec<_> = record["runs"].as_array().unwrap().iter().map(|run| run["side"].as_str().unwrap()).collect();
    assert_eq!(sides, ["ours:lz4", "uncapped", "uncapped"]);
    let table = &record["summary"][0]["table"];
    assert_eq!(table[0]["side"], "ours:lz4", "{table}");
    assert!(table[1]["times_first_side_wall"]["median"].is_number(), "{table}");
}
