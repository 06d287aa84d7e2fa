//! On a kernel that has no UFFDIO_MOVE ([S39]), a distribution's own, in an emulated machine (`vm` of the test kit).
//!
//! The other tests force the other way of eviction on the kernel that is here. This shows that it is chosen, and right, where
//! there is no choice.

use std::time::Duration;

use compcache_testkit::features::{Feature, requires};
use compcache_testkit::vm::{Kernel, Vm};

use crate::support::{beside_others, compcache, memory_tester, preload, trap_program};

/// A name, MiB that may be resident, and what is run under compcache.
const JOBS: [(&str, u32, &str); 6] = [
    ("one-thread", 16, "/memory-tester --seconds 4 --mb 64 --threads 1 --seed 1"),
    ("three-threads", 16, "/memory-tester --seconds 4 --mb 64 --threads 3 --seed 2"),
    // Often another thread's memory is moved into the hole that a refused mremap leaves in staging.
    ("hole", 16, "/memory-tester --seconds 4 --mb 64 --threads 3 --seed 11"),
    ("fork", 4, "/forks both_sides"),
    ("robust", 4, "/futexes robust"),
    ("shortens", 4, "/maps shortens"),
];

#[test]
fn programs_are_paged_rightly_where_pages_cannot_be_moved() {
    if !requires(&[Feature::OldKernel, Feature::Program("qemu-system-x86_64"), Feature::Program("busybox")]) {
        return;
    }
    let _shared = beside_others();
    let mut vm = Kernel::old().map_err(std::io::Error::other).and_then(|kernel| Vm::new(&kernel)).expect("a machine");
    let programs = [
        (compcache(), "/compcache"),
        (preload().to_owned(), "/libcompcache_preload.so"),
        (memory_tester().to_owned(), "/memory-tester"),
        (trap_program("forks"), "/forks"),
        (trap_program("futexes"), "/futexes"),
        (trap_program("maps"), "/maps"),
    ];
    for (host, guest) in &programs {
        vm.program(host, guest).expect("a program that can be read");
    }
    let mut script = "export COMPCACHE_PRELOAD=/libcompcache_preload.so TRAP_EXPECT_EVICTION=1 TRAP_MB=16\n\
                      /compcache doctor | grep 'UFFDIO_MOVE\\|compcache run'\n"
        .to_owned();
    for (name, mib, job) in JOBS {
        // One that was ended for what it did to its mappings is run again ([S39]), as elsewhere; thrice it must not be.
        script += &format!(
            "for try in 1 2 3; do\n\
             /compcache run --resident {mib}M -- {job} >/out 2>&1; status=$?\n\
             grep -q 'changed its mappings' /out && ! grep -q 'MISMATCH at' /out || break\n\
             done\n\
             cat /out; echo \"status of {name}: $status\"\n"
        );
    }
    let printed = vm.run(&script, Duration::from_secs(900)).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{printed}");
    let line = |start: &str| printed.lines().find(|line| line.trim_start().starts_with(start)).unwrap_or_default();
    assert!(line("- UFFDIO_MOVE").ends_with("no"), "this kernel needs no other way:\n{printed}");
    assert!(line("compcache run").contains("works"), "{printed}");
    for (name, ..) in JOBS {
        assert!(line(&format!("status of {name}:")).ends_with(": 0"), "{name}:\n{printed}");
    }
    let evictions = printed.lines().filter_map(|line| line.trim_start().strip_prefix("evicted pages"));
    assert_eq!(
        evictions.filter(|pages| pages.contains(|digit: char| ('1'..='9').contains(&digit))).count(),
        JOBS.len()
    );
}
