//! Serving allocates nothing, fuser's part included.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use compcache_block::BLOCK_BYTES;
use rustix::fs::{FallocateFlags, fallocate};

use crate::spied::{Spied, allocated, assert_counting_works};
use crate::support::{Aligned, Served, can_serve};

#[test]
fn serving_allocates_nothing() {
    if !can_serve(&[]) {
        return;
    }
    let array = Arc::new(compcache_block::Array::new(4 << 20).unwrap());
    let served = Served::new(Arc::new(Spied::counting(array)));
    let file = served.open();
    let mut bytes = Aligned::new(1 << 20);
    for round in 0..300u64 {
        let length = if round % 10 == 0 { 1 << 20 } else { BLOCK_BYTES };
        file.write_all_at(&bytes.bytes()[..length], round * 4096).unwrap();
        file.read_exact_at(&mut bytes.bytes()[..length], round * 4096).unwrap();
        if round % 10 == 5 {
            file.sync_all().unwrap();
            fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, round * 4096, 8192).unwrap();
        }
    }
    assert_eq!(allocated(), 0);
    drop(file);
    served.remove();
    assert_counting_works();
}
