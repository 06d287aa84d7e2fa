//! A cache leaves its memory to programs that need it, and has it back ([S163]): in an emulated machine, which can be made short of memory.

use std::fs;
use std::time::Duration;

use compcache_testkit::features::{Feature, requires};
use compcache_testkit::vm::{Kernel, Vm};

use crate::disk_cold::contents;
use crate::support::{beside_others, compcache, memory_tester, scratch};

/// A file of pages that take half of their size when compressed, more than fit beside what the program wants, on a disk of the machine's.
const SCRIPT: &str = r#"
mkdir /below /above
mke2fs /dev/vda >/dev/null; mount -t ext2 /dev/vda /below
for i in $(seq 120); do cat /content; done >/below/file
sync; echo 3 >/proc/sys/vm/drop_caches
/compcache mount --memory 60% /below /above 2>/served &
while ! grep -q ' /above fuse' /proc/mounts; do sleep 0.1; done
stat() { /compcache show --json /above | tr ',{}' '\n' | sed -n "s/^ *\"$1\": *//p"; }
said() { echo "$1: $(stat mem_used_total) used, $(stat mem_lent) lent, $(stat memlimit) at the most, $(grep MemAvailable /proc/meminfo)"; }
was=$(md5sum </above/file); said filled
/memory-tester --seconds 20 --mb 480 --threads 1 --seed 1 >/dev/null & tester=$!
for i in $(seq 16); do sleep 1; said "beside it"; done
wait $tester; echo "status of program: $?"
sleep 10
now=$(md5sum </above/file); said "filled again"
[ "$was" = "$now" ] && echo "the same"
umount /above
dmesg | grep -i 'out of memory'
cat /served
"#;

#[test]
fn a_cache_leaves_memory_to_who_needs_it_and_has_it_back() {
    let programs = ["qemu-system-x86_64", "busybox"].map(Feature::Program);
    if !requires(&[&[Feature::StockKernel][..], &programs].concat()) {
        return;
    }
    let _shared = beside_others();
    let mut vm = Kernel::stock().map_err(std::io::Error::other).and_then(|kernel| Vm::new(&kernel)).expect("a machine");
    vm.size(2, 768);
    vm.disk(512).expect("a disk");
    for (host, guest) in [(compcache(), "/compcache"), (memory_tester().to_owned(), "/memory-tester")] {
        vm.program(&host, guest).expect("a program that can be read");
    }
    let place = scratch();
    let content = place.path().join("content");
    fs::write(&content, &contents()[..4 << 20]).expect("a file");
    vm.file(&content, "/content").expect("a file");
    let printed = vm.run(SCRIPT, Duration::from_secs(600)).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{printed}");
    assert!(printed.contains("status of program: 0") && !printed.to_lowercase().contains("out of memory"), "{printed}");
    assert!(printed.contains("the same"), "{printed}");
    let numbers = |line: &str| -> Option<[u64; 3]> {
        let (_, after) = line.split_once(": ")?;
        let mut numbers = after.split(", ").map(|part| part.split(' ').next()?.parse().ok());
        Some([numbers.next()??, numbers.next()??, numbers.next()??])
    };
    let seen =
        |name: &str| -> Vec<_> { printed.lines().filter(|line| line.starts_with(name)).filter_map(numbers).collect() };
    let ([filled, 0, limit], [again, 0, _]) = (seen("filled:")[0], seen("filled again:")[0]) else {
        panic!("memory is lent while there is enough:\n{printed}");
    };
    assert!(again > filled / 10 * 9, "{printed}");
    let beside = seen("beside it:");
    assert!(beside.iter().any(|[_, lent, _]| *lent > limit / 8), "{printed}");
    assert!(beside.iter().any(|[used, ..]| *used < filled / 4 * 3), "{printed}");
}
