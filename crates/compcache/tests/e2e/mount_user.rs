//! A tree that is mounted by a user who has no rights of root's, through fusermount3.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::{Command, Stdio};

use crate::support::{by_rings, can_mount, compcache, copy_program, scratch};

const NOBODY: u32 = 65534;

/// Where only root may open /dev/fuse, as in some containers, another node of the same device stands for it, as it is elsewhere.
const OPEN_DEVICE: &str = r#"
mknod fuse c 10 229; chmod 666 fuse; mount --bind fuse /dev/fuse
[ -z "$2" ] || { echo user_allow_other >fuse.conf; mount --bind fuse.conf /etc/fuse.conf; }
exec setpriv --reuid=65534 --regid=65534 --groups=1234 sh -euc "$1"
"#;

/// Runs a script as nobody, who is in the group 1234, too, in a directory where `source` and `target` are his, and in a mount namespace of its own; what it prints.
#[track_caller]
fn as_nobody(script: &str) -> String {
    as_nobody_where("", script)
}

/// The same, where users may let others in on their mounts if `others` says something.
#[track_caller]
fn as_nobody_where(others: &str, script: &str) -> String {
    let place = scratch();
    fs::set_permissions(place.path(), Permissions::from_mode(0o755)).expect("ours");
    for name in ["source", "target"] {
        fs::create_dir(place.path().join(name)).expect("a directory");
        chown(place.path().join(name), Some(NOBODY), Some(NOBODY)).expect("root may give it away");
    }
    // Nobody may enter where the build puts it.
    copy_program(&compcache(), &place.path().join("compcache"));
    let begin = r#"
mounted() { for _ in $(seq 300); do grep -q " $PWD/target fuse" /proc/mounts && by_rings && return; sleep 0.1; done; echo "not mounted, or otherwise than meant"; exit 1; }
by_rings() { [ -z "${COMPCACHE_TEST_BY_RINGS:-}" ] || grep -q fuse-ring /proc/$server/task/*/comm; }
# Whatever fails, nobody is left who holds what we wait for the end of.
trap 'kill -9 ${server:-} 2>/dev/null || true' EXIT
"#;
    let mut command = Command::new("unshare");
    command
        .args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-euc",
            OPEN_DEVICE,
            "sh",
            &format!("{begin}{script}"),
            others,
        ])
        .current_dir(place.path())
        .stdin(Stdio::null());
    let output = by_rings::mounting(|| command.output()).expect("there is unshare");
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{script}\n{out}\n{error}");
    out.into_owned()
}

fn can() -> bool {
    can_mount(&["fusermount3", "unshare", "setpriv", "mknod"])
}

#[test]
fn a_user_mounts_uses_and_unmounts_a_tree_of_his() {
    if !can() {
        return;
    }
    let printed = as_nobody(
        r#"
./compcache mount --memory 8M source target & server=$!
mounted
grep -q fuse-ring /proc/$server/task/*/comm && largest=262144 || largest=1048576
grep -c " $PWD/target .*max_read=$largest" /proc/mounts
seq 200000 >target/numbers
cmp target/numbers source/numbers
dd if=target/numbers of=/dev/null bs=1M iflag=direct 2>/dev/null
chmod 600 target/numbers; stat -c "%a %u" source/numbers
chown root target/numbers 2>/dev/null || echo "not given away"
./compcache show ./target | grep -c mem_used_total
./compcache remount --memory 4M target >/dev/null
./compcache umount target
wait $server; echo "ended $?"
grep -c " $PWD/target " /proc/mounts || true
"#,
    );
    assert_eq!(printed, "1\n600 65534\nnot given away\n1\nended 0\n0\n");
}

#[test]
fn what_a_user_may_write_and_not_read_is_not_left_to_the_kernel_to_write_back() {
    if !can() {
        return;
    }
    let printed = as_nobody(
        r#"
# The kernel has no page of it yet that it could change a part of.
echo one >source/w; chmod 200 source/w
./compcache mount --memory 8M --exclusive --writeback-cache source target & server=$!
mounted
printf two >>target/w; printf three >>target/w
cat target/w 2>/dev/null || echo "not read"
chmod 600 target/w; cat target/w; cmp target/w source/w
./compcache umount target
wait $server; echo " ended $?"
"#,
    );
    assert_eq!(printed, "not read\none\ntwothree ended 0\n");
}

#[test]
fn what_a_user_makes_as_one_of_another_group_is_that_groups() {
    if !can() || !std::path::Path::new("/etc/fuse.conf").exists() {
        return;
    }
    let printed = as_nobody_where(
        "may be let in",
        r#"
mkdir source/shared; chmod 2777 source/shared
for name in touch mkdir ln; do cp "$(command -v $name)" "source/$name"; chgrp 1234 "source/$name"; chmod 2755 "source/$name"; done
./compcache mount --memory 8M --allow-other source target & server=$!
mounted
source/touch target/f target/shared/f
source/mkdir target/d
source/ln -s f target/l
stat -c "%n %u %g" target/f target/d target/l target/shared/f
stat -c "%n %u %g" source/f source/d source/l source/shared/f
touch target/own; stat -c "%n %u %g" source/own
./compcache umount target
wait $server; echo "ended $?"
"#,
    );
    let made = |place: &str| {
        let named = |(name, group)| format!("{place}/{name} 65534 {group}\n");
        [("f", 1234), ("d", 1234), ("l", 1234), ("shared/f", 65534)].map(named).concat()
    };
    assert_eq!(printed, format!("{}{}source/own 65534 65534\nended 0\n", made("target"), made("source")));
}

#[test]
fn a_user_cleans_up_after_a_killed_server() {
    if !can() {
        return;
    }
    let printed = as_nobody(
        r#"
./compcache mount --memory 8M source target & server=$!
mounted
echo kept >target/file; sync target/file
kill -9 $server; wait $server || echo "killed $?"
ls target 2>/dev/null || echo "gone"
./compcache umount target; cat source/file
grep -c " $PWD/target " /proc/mounts || true
"#,
    );
    assert_eq!(printed, "killed 137\ngone\nkept\n0\n");
}

/// The first is out of the tree, and ends when its last file is closed; another is mounted there by then.
#[test]
fn a_mount_in_the_place_of_one_that_ends_later_stays() {
    if !can() {
        return;
    }
    let printed = as_nobody(
        r#"
./compcache mount --memory 8M source target & first=$!; server=$first
mounted
echo text >target/file
exec 3<target/file
fusermount3 -u -z target
./compcache mount --memory 8M source target 3<&- & server=$!
mounted
exec 3<&-
wait $first; echo "ended $?"
grep -c " $PWD/target " /proc/mounts
./compcache umount target
wait $server; echo "ended $?"
"#,
    );
    assert_eq!(printed, "ended 0\n1\nended 0\n");
}

#[test]
fn who_may_not_write_to_his_source_may_change_his_mount() {
    if !can() {
        return;
    }
    let printed = as_nobody(
        r#"
chmod 555 source
./compcache mount --memory 8M source target & server=$!
mounted
./compcache remount --memory 4M target
./compcache show --json target/ | grep -o '"memlimit": [0-9]*'
chmod 755 source
./compcache umount target
wait $server; echo "ended $?"
"#,
    );
    assert_eq!(printed, "\"memlimit\": 4194304\nended 0\n");
}

#[test]
fn what_a_user_may_not_is_refused_with_the_reason() {
    if !can() {
        return;
    }
    let printed = as_nobody(
        r#"
./compcache mount source /etc 2>&1 || echo "status $?"
./compcache mount --allow-other source target 2>&1 || echo "status $?"
"#,
    );
    assert!(printed.contains("no write access to mountpoint /etc"), "{printed}");
    assert!(printed.contains("user_allow_other"), "{printed}");
    assert_eq!(printed.matches("status 125").count(), 2, "{printed}");
}

#[test]
fn a_directory_that_may_be_listed_and_not_entered_has_all_its_names() {
    if !can() {
        return;
    }
    let printed = as_nobody(
        r#"
mkdir source/d source/d/sub; (cd source/d && seq -f "name %g" 2000 | tr "\n" "\0" | xargs -0 touch); chmod 444 source/d
./compcache mount --memory 8M --remember 1 source target & server=$!
mounted
ls source/d >source/below; ls target/d >source/above; cmp source/below source/above
wc -l <source/above
chmod 755 target/d; ls target/d | cmp source/below -
stat -c %n "target/d/name 7"
./compcache umount target
wait $server; echo "ended $?"
"#,
    );
    assert_eq!(printed, "2001\ntarget/d/name 7\nended 0\n");
}
