//! Serving allocates nothing, fuser's part included.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use compcache_block::{Array, BLOCK_BYTES, BlockDevice};
use rustix::fs::{FallocateFlags, fallocate};

use crate::spied::{Spied, allocated, assert_counting_works};
use crate::support::{Aligned, Served, can_serve, disk, fill_run};

/// One device after the other, since what their threads allocate is counted together.
#[test]
fn serving_allocates_nothing() {
    if !can_serve(&[]) {
        return;
    }
    serve("an array", Arc::new(Array::new(4 << 20).unwrap()));
    serve("a disk in RAM", disk(4 << 20));
    assert_counting_works();
}

fn serve(what: &str, device: Arc<dyn BlockDevice>) {
    let before = allocated();
    let served = Served::new(Arc::new(Spied::counting(device)));
    let file = served.open();
    let mut bytes = Aligned::new(1 << 20);
    for round in 0..300u64 {
        let length = if round % 10 == 0 { 1 << 20 } else { BLOCK_BYTES };
        fill_run(&mut bytes.bytes()[..length], round, round as u32);
        file.write_all_at(&bytes.bytes()[..length], round * 4096).unwrap();
        file.read_exact_at(&mut bytes.bytes()[..length], round * 4096).unwrap();
        if round % 10 == 5 {
            file.sync_all().unwrap();
            fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, round * 4096, 8192).unwrap();
        }
    }
    assert_eq!(allocated() - before, 0, "{what}");
    drop(file);
    served.remove();
}
