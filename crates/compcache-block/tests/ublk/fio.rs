//! fio, which others wrote: what it writes it reads back and checks, through the kernel and many requests at once.

use std::process::Command;

use compcache_block::Checked;

use crate::support::{Served, can_serve, disk};
use std::sync::Arc;

/// Runs jobs one after the other on a disk of their own. Of the disk behind it must be found that nothing was lost.
fn verify(jobs: &[&[&str]]) {
    if !can_serve(&["fio"]) {
        return;
    }
    let checked = Arc::new(Checked::new(disk(24 << 20)));
    let served = Served::new(checked.clone());
    for job in jobs {
        let output = Command::new("fio")
            .args(["--name=verify", "--thread", "--direct=1", "--ioengine=libaio", "--iodepth=16", "--size=16M"])
            .args(["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"])
            .args(["--buffer_compress_percentage=50", "--refill_buffers"])
            .arg(format!("--filename={}", served.0.path().display()))
            .args(*job)
            .output()
            .unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && said.contains("err= 0"), "{said}");
        assert!(said.contains("READ:") || job.contains(&"--rw=trim"), "it did not read what it wrote:\n{said}");
    }
    assert_eq!(checked.lies(), 0);
    served.remove();
}

#[test]
fn fio_finds_what_it_wrote_at_random() {
    verify(&[&["--rw=randwrite", "--bs=4k"]]);
}

#[test]
fn fio_finds_what_it_wrote_while_it_read() {
    verify(&[&["--rw=randrw", "--bssplit=4k/50:16k/30:128k/20"]]);
}

#[test]
fn fio_finds_zeroes_where_it_trimmed_and_what_it_wrote_behind() {
    let zeroes = ["--rw=read", "--bs=64k", "--size=8M", "--verify=pattern", "--verify_pattern=0x00"];
    verify(&[
        &["--rw=write", "--bs=64k"],
        &["--rw=trim", "--bs=64k", "--size=8M"],
        &zeroes,
        &["--rw=write", "--bs=64k", "--offset=8M", "--size=8M"],
        &zeroes,
        &["--rw=trimwrite", "--bs=16k"],
    ]);
}
