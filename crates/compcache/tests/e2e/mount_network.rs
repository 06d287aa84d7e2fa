//! Trees that lie on a network file system: the tests of mounts once more, in an emulated machine that has its own NFS server, with all that they make
//! on what is mounted from that (NFS 4.2, Linux 6.12). Those of what the kernel passes through have a tmpfs of their own: on NFS, nothing is.

use std::env;
use std::time::Duration;

use compcache_testkit::features::{Feature, find_program, requires};
use compcache_testkit::vm::{Kernel, Vm};

use crate::support::{beside_others, compcache, preload, trap_program};

/// The kernel's server, asked by hand instead of by its programs: what they would answer is told it beforehand. The flags are those of
/// `rw,insecure,no_root_squash,no_subtree_check,fsid=0`.
const SERVER: &str = r#"
ip link set lo up
mkdir -p /srv /var/lib/nfs/v4recovery $PLACE
mount -t tmpfs -o size=700m srv /srv
mount -t nfsd nfsd /proc/fs/nfsd
until=$(($(date +%s) + 100000))
echo "nfsd 127.0.0.1 $until here" >/proc/net/rpc/auth.unix.ip/channel
echo "here /srv $until 9218 65534 65534 0" >/proc/net/rpc/nfsd.export/channel
echo "here 1 \\x00000000 $until /srv" >/proc/net/rpc/nfsd.fh/channel
echo "-2 -3 +4 +4.1 +4.2" >/proc/fs/nfsd/versions
echo "tcp 2049" >/proc/fs/nfsd/portlist
echo 4 >/proc/fs/nfsd/threads
echo Y >/proc/fs/nfsd/v4_end_grace
mount.nfs4 -i -t nfs4 -o vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1,proto=tcp,port=2049,sec=sys 127.0.0.1:/ $PLACE
grep " $PLACE nfs4" /proc/mounts; echo "status of network: $?"
"#;

/// What takes minutes in such a machine, or takes its time by processor time; and what says nothing here: NFS 4 has no ACLs of this kind (which ours says in
/// other words) and exchanges no names, its client may keep what it is asked not to ([S104]), the server's tmpfs uses no number again, nobody mounts by
/// fstab, and io_uring is another matter.
const NOT_HERE: [&str; 13] = [
    "a_directory_of_twenty_thousand_names",
    "more_files_are_met",
    "more_files_are_renamed",
    "what_is_mounted_on_a_file",
    "a_long_copy_is_made",
    "files_in_use_are_not_asked_for_room",
    "the_limit_is_kept",
    "what_is_read_is_not_kept_a_second_time",
    "appending_from_both_sides",
    "extended_attributes_and_acls",
    "a_new_file_of_an_exclusive_tree",
    "a_line_of_fstab",
    "all_of_this_holds",
];

/// A machine that can run [`SERVER`]; `None` where there is none.
fn machine() -> Option<Vm> {
    let programs = ["mount", "qemu-system-x86_64", "busybox"].map(Feature::Program);
    if !requires(&[&[Feature::StockKernel][..], &programs].concat()) {
        return None;
    }
    let mut vm = Kernel::stock().map_err(std::io::Error::other).and_then(|kernel| Vm::new(&kernel)).expect("a machine");
    for module in ["nfsd", "nfsv4"] {
        vm.module(module, "").expect("a module of this kernel's");
    }
    vm.program(&find_program("mount").expect("asked for above"), "/bin/mount.nfs4")
        .expect("a program that can be read");
    Some(vm)
}

#[test]
fn all_but_some_of_this_holds_on_nfs() {
    let _shared = beside_others();
    let Some(mut vm) = machine() else { return };
    vm.program(&env::current_exe().expect("it runs"), "/e2e").expect("a program that can be read");
    vm.program(&compcache(), compcache().to_str().expect("a name")).expect("a program that can be read");
    let place = env!("CARGO_TARGET_TMPDIR");
    let not_here: String = NOT_HERE.iter().map(|name| format!(" --skip {name}")).collect();
    let tests = format!(
        "COMPCACHE_REQUIRE_ALL=1 /e2e --test-threads 2 mount:: mount_posix:: mount_writeback:: mount_passthrough::{not_here}"
    );
    let script = format!("PLACE={place}\n{SERVER}\n{tests}; echo \"status of tests: $?\"");
    let printed = vm.run(&script, Duration::from_secs(900)).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{printed}");
    assert!(printed.contains("status of network: 0") && printed.contains("status of tests: 0"), "{printed}");
    let passed = printed.lines().filter(|line| line.starts_with("test ") && line.trim_end().ends_with("... ok"));
    let passed = passed.count();
    assert!(passed >= 25, "{passed} tests were run:\n{printed}");
}

/// Of [S20]: on the way from such a server data is for pages that the kernel does not say.
#[test]
fn a_direct_read_of_a_program_in_less_memory_is_not_lost_on_nfs() {
    let _shared = beside_others();
    let Some(mut vm) = machine() else { return };
    let programs = [
        (compcache(), "/compcache"),
        (preload().to_owned(), "/libcompcache_preload.so"),
        (trap_program("direct_held"), "/direct_held"),
    ];
    for (host, guest) in &programs {
        vm.program(host, guest).expect("a program that can be read");
    }
    let script = format!(
        "PLACE=/place\n{SERVER}\nexport COMPCACHE_PRELOAD=/libcompcache_preload.so TRAP_MB=16\n\
         /compcache run --resident 8M -- /direct_held $PLACE; echo \"status of run: $?\"\n"
    );
    let printed = vm.run(&script, Duration::from_secs(300)).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{printed}");
    assert!(printed.contains("status of network: 0") && printed.contains("status of run: 0"), "{printed}");
    assert!(printed.contains("nothing more was evicted from a process"), "nobody is told:\n{printed}");
}
