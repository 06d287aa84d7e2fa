//! The kernel's own NBD client on a disk of ours, a distribution's kernel in an emulated machine (`vm` of the test kit): few
//! kernels of build machines have one.

use std::time::Duration;

use compcache_testkit::features::{Feature, find_program, requires};
use compcache_testkit::vm::{Kernel, Vm};

use crate::support::{beside_others, compcache};

/// What runs in the machine. Each step says its status.
const SCRIPT: &str = r#"
step() { name=$1; shift; "$@"; echo "status of $name: $?"; }
sums() { (cd /mnt && find . -type f | sort | xargs sha256sum); }
orig_data_size() { compcache disk show --json d | tr ',' '\n' | grep orig_data_size | tr -dc 0-9; }
# A device whose last user has just gone may still be on its way.
gone() { for i in 1 2 3 4 5 6 7 8 9 10; do nbd-client -c "$1" >/dev/null || return 0; sleep 1; done; return 1; }
mkdir -p /run /mnt; ip link set lo up
export COMPCACHE_SOCKET=/run/control
compcache serve --memory 256M & server=$!
while [ ! -S /run/control ]; do sleep 0.1; done

step create compcache disk create --name d --size 96M --transport nbd
step connect nbd-client -unix /run/d.nbd /dev/nbd0 -N d -b 4096 -C 2
echo "sectors: $(cat /sys/block/nbd0/size) of $(cat /sys/block/nbd0/queue/logical_block_size), fua $(cat /sys/block/nbd0/queue/fua), discards $(cat /sys/block/nbd0/queue/discard_granularity)"
step format mkfs.ext4 -q /dev/nbd0
step mount mount -t ext4 /dev/nbd0 /mnt
for i in 1 2 3 4 5 6; do dd if=/dev/urandom of=/mnt/noise$i bs=100k count=10 2>/dev/null; cp /bin/busybox /mnt/copy$i; done
sums >/before
step unmount umount /mnt
step check fsck.ext4 -fn /dev/nbd0
step mount-again mount -t ext4 /dev/nbd0 /mnt
sums >/after
step same cmp /before /after
echo "files: $(wc -l </after)"
full=$(orig_data_size)
rm /mnt/copy*; sync
step trim fstrim /mnt
[ "$(orig_data_size)" -lt $((full * 2 / 3)) ]; echo "status of trimmed: $?"
echo "stored: $full, then $(orig_data_size)"
step unmount-again umount /mnt
compcache disk rm d 2>&1; echo "in use: $?"
step disconnect nbd-client -d /dev/nbd0
step gone gone /dev/nbd0
step remove compcache disk rm d

step create-tcp compcache disk create --name t --size 16M --nbd-tcp 10809
step connect-tcp nbd-client 127.0.0.1 10809 /dev/nbd0 -N t -b 4096 -timeout 5
dd if=/dev/urandom of=/noise bs=1M count=16 2>/dev/null
step write dd if=/noise of=/dev/nbd0 bs=1M oflag=direct
step drop sh -c 'echo 3 >/proc/sys/vm/drop_caches'
step compare cmp /noise /dev/nbd0
# A server that is killed with a request on its way: its client is told, and does not wait for ever. Without -timeout it would:
# Linux sends no request again that a connection took with it.
kill -STOP $server
timeout 60 dd if=/dev/nbd0 of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null & reader=$!
sleep 1
kill -9 $server
wait $reader; status=$?
echo "after the death: $status"
"#;

/// How many steps of the script must succeed.
const STEPS: usize = 19;

#[test]
fn the_kernels_client_keeps_a_file_system_and_is_told_when_the_server_dies() {
    let programs = ["qemu-system-x86_64", "busybox", "xz", "nbd-client", "mkfs.ext4", "fsck.ext4"];
    let mut needs = vec![Feature::StockKernel];
    needs.extend(programs.map(Feature::Program));
    if !requires(&needs) {
        return;
    }
    let _shared = beside_others();
    let mut vm = Kernel::stock().map_err(std::io::Error::other).and_then(|kernel| Vm::new(&kernel)).expect("a machine");
    vm.size(1, 768);
    vm.module("nbd", "nbds_max=1").expect("a module of this kernel's");
    vm.program(&compcache(), "/bin/compcache").expect("a program that can be read");
    for name in ["nbd-client", "mkfs.ext4", "fsck.ext4"] {
        let path = find_program(name).expect("it was there just now");
        vm.program(&path, &format!("/bin/{name}")).expect("a program that can be read");
    }
    let printed = vm.run(SCRIPT, Duration::from_secs(900)).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{printed}");
    let says = |line: &str| printed.lines().any(|said| said.trim() == line);
    let steps: Vec<_> = printed.lines().filter(|line| line.trim().starts_with("status of ")).collect();
    let succeeded = steps.iter().filter(|line| line.trim().ends_with(": 0")).count();
    assert_eq!((succeeded, steps.len()), (STEPS, STEPS), "{printed}");
    assert!(says("sectors: 196608 of 4096, fua 1, discards 4096"), "{printed}");
    assert!(says("files: 12"), "{printed}");
    assert!(says("in use: 125") && printed.contains("NBD clients are connected"), "{printed}");
    // It fails by itself, rather than be ended by its timeout (143, or 124).
    assert!(says("after the death: 1"), "{printed}");
}
