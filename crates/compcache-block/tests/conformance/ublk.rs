//! The suite over `/dev/ublkbN`. Where the machine has no ublk, in a virtual one that has.

use std::env;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use compcache_block::ublk::{self, UblkOptions};
use compcache_block::{BlockDevice, Request};
use compcache_testkit::features::{Feature, requires};
use compcache_testkit::vm::{Kernel, Vm};

use crate::block::Node;

/// A device that is served as one of ublk's.
pub struct Ublk(ublk::Ublk);

impl Node for Ublk {
    const NEEDS: &'static [Feature] = &[Feature::Root, Feature::Ublk];
    const RESIZES: &'static [Feature] = &[Feature::UblkResize];
    const TOLD_OF: &'static [Request] =
        &[Request::Read, Request::Write, Request::Flush, Request::Discard, Request::WriteZeroes];

    fn serve(device: Arc<dyn BlockDevice>) -> Ublk {
        let options = UblkOptions { queues: 2.try_into().unwrap(), ..UblkOptions::default() };
        Ublk(ublk::Ublk::serve(device, &options).unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn resized(&self) {
        self.0.resized().unwrap();
    }
}

/// Seventeen tests of the suite, of which two need a newer kernel.
#[test]
fn a_stock_kernels_ublk_holds_the_suite() {
    let needed = [Feature::StockKernel, Feature::Program("qemu-system-x86_64"), Feature::Program("busybox")];
    if Feature::Ublk.probe().is_ok() || !requires(&needed) {
        return;
    }
    let mut vm = Vm::new(&Kernel::stock().unwrap()).unwrap();
    vm.module("ublk_drv", "").unwrap();
    vm.program(&env::current_exe().unwrap(), "/bin/suite").unwrap();
    // The first file system has no holes, which an origin wants for discards.
    let script = "mkdir -p /tmp; mount -t tmpfs tmpfs /tmp; suite --test-threads=1 --nocapture ublk:: 2>&1; echo status $?; ls /sys/class/ublk-char | wc -l";
    let printed = vm.run(script, Duration::from_secs(900)).unwrap_or_else(|error| panic!("{error}"));
    println!("{printed}");
    let passed = printed.lines().any(|line| line.starts_with("test result: ok. 17 passed; 0 failed"));
    assert!(passed && printed.contains("status 0"));
    let skipped = printed.lines().filter(|line| line.contains("SKIP"));
    assert!(skipped.clone().all(|line| line.contains("UblkResize")), "{:?}", skipped.collect::<Vec<_>>());
    assert_eq!(printed.lines().last().unwrap().trim(), "0", "a device is left");
}
