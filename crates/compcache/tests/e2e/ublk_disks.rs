//! Disks over ublk as a person meets them ([S60], [S61]), on a distribution's kernel in an emulated machine (`vm` of the test
//! kit): made, used, refused, and cleaned up after a server that was killed.

use std::time::Duration;

use compcache_testkit::features::{Feature, find_program, requires};
use compcache_testkit::vm::{Kernel, Vm};

use crate::support::{alone, compcache};

/// Each line that begins with `is` or `not` is a command that must succeed, or fail.
const SCRIPT: &str = r#"
is() { "$@" >/tmp/out 2>&1 && echo "right: $*" || { echo "WRONG: $*"; cat /tmp/out; }; }
not() { "$@" >/tmp/out 2>&1 && echo "WRONG: $*" || echo "right: not $*"; cat /tmp/out; }
says() { grep -q "$1" /tmp/out && echo "right: says $1" || { echo "WRONG: does not say $1"; cat /tmp/out; }; }
serve() {
    rm -f /tmp/served
    compcache serve 2>/tmp/served & server=$!
    until grep -qs 'serving at' /tmp/served; do sleep 1; done
}
compcache doctor --json >/tmp/out
says '"ublk": "usable"'; says '"ublk_resize": false'
serve
mkdir -p /mnt
is compcache disk create --name a --size 256M --mkfs ext4 --mount /mnt; says /dev/ublkb0
is cp -r /bin /mnt
is diff -r /bin /mnt/bin
is umount /mnt
echo 3 >/proc/sys/vm/drop_caches
is fsck.ext4 -f -n /dev/ublkb0
is mount -t ext4 /dev/ublkb0 /mnt
is diff -r /bin /mnt/bin
not compcache disk rm a; says 'mounted on /mnt'
not compcache disk resize a 128M; says 'transport loop'
is compcache list; says '^a .*/mnt'
is compcache disk create --name b --size 16M --transport ublk; says /dev/ublkb1
is compcache disk rm b
not test -e /dev/ublkb1
kill $server; sleep 1; is kill -0 $server
kill -9 $server; wait $server
not dd if=/dev/zero of=/mnt/more bs=1M count=8 conv=fsync
is umount /mnt
serve
is grep 'removed /dev/ublkb0, of a server that was killed' /tmp/served
not test -e /dev/ublkc0
is compcache disk create --name c --size 16M; says /dev/ublkb0
compcache serve --socket /run/other/control 2>/tmp/served & other=$!
until grep -qs 'serving at' /tmp/served; do sleep 1; done
export COMPCACHE_SOCKET=/run/other/control
kill -STOP $server
compcache disk create --name over --origin /dev/ublkb0 --memory 4M --transport ublk >/tmp/over 2>&1 & made=$!
until test -e /dev/ublkc1; do sleep 1; done; sleep 1
is timeout 10 compcache list
not timeout 10 compcache show over; says 'is being made'
kill -HUP $other; sleep 1; is kill -0 $other; is grep 'over is being made' /tmp/served
kill -CONT $server
is wait $made; is grep /dev/ublkb1 /tmp/over
kill $other; is wait $other
kill $server; wait $server; echo "the server's status: $?"
not test -e /dev/ublkc0
"#;

#[test]
fn a_disk_of_ublks_is_made_used_and_cleaned_up_after_a_killed_server() {
    let programs = ["mkfs.ext4", "fsck.ext4"];
    let machine = [Feature::StockKernel, Feature::Program("qemu-system-x86_64"), Feature::Program("busybox")];
    if !requires(&[&machine[..], &programs.map(Feature::Program)].concat()) {
        return;
    }
    let _alone = alone();
    let mut vm = Kernel::stock().map_err(std::io::Error::other).and_then(|kernel| Vm::new(&kernel)).expect("a machine");
    vm.module("ublk_drv", "").expect("a module");
    vm.program(&compcache(), "/bin/compcache").expect("a program that can be read");
    for name in programs {
        let path = find_program(name).expect("asked for above");
        vm.program(&path, &format!("/bin/{name}")).expect("a program that can be read");
    }
    let printed = vm.run(SCRIPT, Duration::from_secs(600)).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{printed}");
    assert!(!printed.contains("WRONG"), "{printed}");
    assert!(printed.contains("the server's status: 0"), "{printed}");
    let asked = SCRIPT
        .lines()
        .flat_map(|line| line.split("; "))
        .filter(|part| ["is ", "not ", "says "].iter().any(|word| part.starts_with(word)));
    assert_eq!(printed.matches("right: ").count(), asked.count(), "not all of it was done:\n{printed}");
}
