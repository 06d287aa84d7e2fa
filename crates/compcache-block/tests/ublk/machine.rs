//! The same tests where they can run: in a virtual machine with a distribution's kernel.
//!
//! Emulated, so about ten times slower.

use std::env;
use std::time::Duration;

use compcache_testkit::features::{Feature, find_program, requires};
use compcache_testkit::vm::{Kernel, Vm};

/// What the tests run, beside busybox's programs.
const PROGRAMS: [&str; 6] = ["mkfs.ext4", "fsck.ext4", "mkswap", "swapon", "swapoff", "fio"];

#[test]
fn a_stock_kernels_ublk_holds_all_of_it() {
    let machine = [Feature::StockKernel, Feature::Program("qemu-system-x86_64"), Feature::Program("busybox")];
    let programs = PROGRAMS.map(Feature::Program);
    if Feature::Ublk.probe().is_ok() || !requires(&[&machine[..], &programs].concat()) {
        return;
    }
    let mut vm = Vm::new(&Kernel::stock().unwrap()).unwrap();
    vm.module("ublk_drv", "").unwrap();
    vm.module("loop", "").unwrap();
    vm.program(&env::current_exe().unwrap(), "/bin/suite").unwrap();
    for name in PROGRAMS {
        vm.program(&find_program(name).unwrap(), &format!("/bin/{name}")).unwrap();
    }
    // One test at a time: what the kernel has left of one is not to be another's.
    let script = "suite --test-threads=1 --nocapture 2>&1; echo status $?; ls /sys/class/ublk-char | wc -l; dmesg | grep -E 'WARN|BUG|hung'";
    let printed = vm.run(script, Duration::from_secs(900)).unwrap_or_else(|error| panic!("{error}"));
    println!("{printed}");
    assert!(printed.contains("status 0") && !printed.contains("FAILED"));
    let skipped: Vec<_> = printed.lines().filter(|line| line.contains("SKIP")).collect();
    let known = |line: &&str| line.contains("UblkResize");
    assert!(skipped.iter().all(known), "what this machine is for was skipped: {skipped:?}");
    assert!(printed.lines().last().unwrap().trim() == "0", "the kernel complained, or a device is left");
}
