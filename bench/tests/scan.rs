//! A scenario runs from end to end: sides in turn, a table, a record of every run.

use std::fs;
use std::process::Command;

use compcache_testkit::features::{Feature, requires};

#[test]
fn a_scan_compares_its_sides_and_records_every_run() {
    if !requires(&[Feature::Root, Feature::CgroupMemory, Feature::ZramDevice]) {
        return;
    }
    let records = std::env::temp_dir().join(format!("compcache-bench-records.{}", std::process::id()));
    let small = ["--content", "same", "--order", "random", "--megabytes", "24", "--cap", "12", "--passes", "2"];
    let output = Command::new(env!("CARGO_BIN_EXE_compcache-bench"))
        .args(["--quick", "--runs", "2", "--record"])
        .arg(&records)
        .args(["scan", "--sides", "uncapped,zram:lzo-rle"])
        .args(small)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("100.0 % same-filled") && said.contains("zram:lzo-rle"), "{said}");
    let record = fs::read_dir(&records).unwrap().next().unwrap().unwrap().path();
    let record: serde_json::Value = serde_json::from_str(&fs::read_to_string(record).unwrap()).unwrap();
    let runs = record["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4);
    let sides: Vec<_> = runs.iter().map(|run| run["side"].as_str().unwrap()).collect();
    assert_eq!(sides, ["uncapped", "zram:lzo-rle", "zram:lzo-rle", "uncapped"], "the order turns round");
    assert!(runs.iter().all(|run| run["laps"].as_array().unwrap().len() == 4), "fill, two passes, verify");
    assert!(record["machine"]["kernel"].is_string() && record["commit"].is_string());
    fs::remove_dir_all(records).unwrap();
}
