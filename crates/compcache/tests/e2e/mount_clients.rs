//! What others wrote works on a mounted tree as it does on the tree itself. Programs that are missing are skipped by name.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::{Tree, can_mount, scratch};

/// Runs a script of the shell's in a directory; what it prints, if it succeeds.
#[track_caller]
fn shell(at: &Path, script: &str) -> String {
    let output = Command::new("sh")
        .args(["-euc", script])
        .current_dir(at)
        .env("HOME", at)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .stdin(Stdio::null())
        .output()
        .expect("there is a shell");
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{script}\n{out}\n{error}");
    out.into_owned()
}

/// The script prints the same in an ordinary directory, on a mount, and again on it when the kernel has dropped all it kept.
#[track_caller]
fn prints_the_same(programs: &[&'static str], script: &str, again: &str) {
    if !can_mount(programs) {
        return;
    }
    let plain = scratch();
    let (expected, expected_again) = (shell(plain.path(), script), shell(plain.path(), again));
    assert!(!expected_again.is_empty());
    for arguments in [&["--memory", "16M"][..], &["--memory", "64M", "--exclusive", "--remember", "1"]] {
        let tree = Tree::mounted(arguments);
        assert_eq!(shell(&tree.target(), script), expected, "{arguments:?}");
        for _ in 0..2 {
            tree.drop_kernel_cache();
            assert_eq!(shell(&tree.target(), again), expected_again, "{arguments:?}");
        }
        assert!(tree.stat("puts") > 0, "nothing came to the cache");
    }
}

#[test]
fn a_repository_of_gits_is_in_order() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates lie beside each other");
    let script = format!(
        "git init -q r && cd r && git config user.email a@b && git config user.name n && cp -r {}/compcache-store/src s
         export GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' GIT_COMMITTER_DATE='2026-01-01T00:00:00Z'
         git add -A && git commit -qm one && git mv s t && echo more >> t/lib.rs && git commit -qam two
         git gc -q && git fsck --full && git status --porcelain && git log --format=%T",
        here.display()
    );
    prints_the_same(
        &["git"],
        &script,
        "cd r && git fsck --full && git status --porcelain && git rev-parse HEAD^{tree} && git diff HEAD~1 | md5sum",
    );
}

#[test]
fn an_archive_of_tars_unpacks_to_what_it_was_made_of() {
    prints_the_same(
        &["tar"],
        "mkdir a && cd a && cp -r /usr/include/linux l && ln -s l s && ln l/fs.h hard && mkfifo fifo && cd .. && \
         tar -cf t.tar --sort=name --mtime=@0 a && mkdir b && tar -xpf t.tar -C b && diff -r --no-dereference a/l b/a/l && \
         tar -cf - -C b --sort=name --mtime=@0 a | md5sum && md5sum < t.tar",
        "diff -r --no-dereference a/l b/a/l && md5sum < t.tar && tar -df t.tar -C b 2>&1 | grep -vc time || true",
    );
}

#[test]
fn a_database_of_sqlites_is_in_order() {
    let inserts = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i<40000) \
                   INSERT INTO t SELECT i, i*7919%10007, 'row number ' || i FROM n";
    let script = format!(
        "for mode in delete wal; do sqlite3 $mode.db \"PRAGMA journal_mode=$mode; PRAGMA mmap_size=100000000; \
         CREATE TABLE t(a INTEGER PRIMARY KEY, b INT, c TEXT); CREATE INDEX b ON t(b); {inserts}; \
         UPDATE t SET c = c || '!' WHERE b % 3 = 0; DELETE FROM t WHERE b % 5 = 1; VACUUM; PRAGMA integrity_check\"; done"
    );
    let again = "for mode in delete wal; do sqlite3 $mode.db 'PRAGMA integrity_check; SELECT count(*), sum(a), sum(length(c)) FROM t; \
                 UPDATE t SET b = b + 1; SELECT sum(b) > 0 FROM t'; done";
    prints_the_same(&["sqlite3"], &script, again);
}

#[test]
fn a_program_is_built_and_runs() {
    prints_the_same(
        &["gcc"],
        "for n in 1 2 3 4 5 6 7 8; do echo \"int putchar(int); int f$n(void) { return putchar(48 + $n); }\" > f$n.c; done
         echo 'int f1(void); int f5(void); int main(void) { return f1() + f5() == 102 ? 0 : 1; }' > main.c
         gcc -O1 -c *.c && ar rc lib.a f*.o && gcc main.o lib.a -o prog && ./prog",
        "./prog && gcc -O1 main.c lib.a -o again && ./again",
    );
}

/// Runs fio with verification; it fails if a block is not what was written there.
fn fio(arguments: &str) {
    if !can_mount(&["fio"]) {
        return;
    }
    for mount in [&["--memory", "8M"][..], &["--memory", "64M", "--exclusive"]] {
        let tree = Tree::mounted(mount);
        let script = format!(
            "fio --name=v --size=24M --bs=4k --verify=crc32c --verify_fatal=1 --do_verify=1 --randseed=7 --loops=2 \
             --buffer_compress_percentage=60 --invalidate=1 --output=/dev/null {arguments}"
        );
        shell(&tree.target(), &script);
        tree.drop_kernel_cache();
        // Once more, of what is there.
        shell(&tree.target(), &format!("{script} --verify_only --loops=1"));
        assert!(fs::metadata(tree.source().join("v.0.0")).unwrap().len() == 24 << 20);
    }
}

#[test]
fn fio_verifies_what_it_read_and_wrote() {
    fio("--rw=randwrite --ioengine=psync");
}

#[test]
fn fio_verifies_what_it_mapped() {
    fio("--rw=randwrite --ioengine=mmap --fsync=64");
}

#[test]
fn fio_verifies_direct_blocks_of_many_sizes() {
    fio("--rw=write --direct=1 --ioengine=psync --bsrange=4k-256k --bs_unaligned=0");
}

#[test]
fn stress_ng_finds_nothing_wrong_with_files() {
    if !can_mount(&["stress-ng"]) {
        return;
    }
    let tree = Tree::mounted(&["--memory", "16M"]);
    shell(
        &tree.target(),
        "stress-ng --temp-path . --verify --timeout 3 --hdd 1 --hdd-bytes 8M --iomix 1 --iomix-bytes 8M --fallocate 1 --fallocate-bytes 8M \
         --rename 1 --link 1 --symlink 1 --dir 1 --dentry 1 --utime 1 --seek 1 --seek-size 8M --quiet",
    );
}

/// It is ended in the midst of its work, without a word to its files, and must find in them what it had promised.
#[test]
fn a_database_of_postgres_recovers_from_its_end() {
    if !can_mount(&["initdb", "pg_ctl", "pgbench", "psql", "setpriv"]) {
        return;
    }
    let sockets = scratch();
    fs::set_permissions(sockets.path(), Permissions::from_mode(0o777)).expect("ours");
    let begin = format!(
        r#"
bin=$(dirname "$(readlink -f "$(command -v initdb)")")
export PGHOST={sockets} PGUSER=tester PGDATABASE=postgres
as_nobody() {{ setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; }}
control() {{ as_nobody "$bin/pg_ctl" -s -w -D data "$@"; }}
start() {{ control -l data/log -o "-c listen_addresses= -c unix_socket_directories={sockets} -c shared_buffers=4MB" start || cat data/log; }}
ask() {{ psql -XqAt -v ON_ERROR_STOP=1 -c "$1"; }}
"#,
        sockets = sockets.path().display()
    );
    let tree = Tree::mounted(&["--memory", "32M", "--allow-other"]);
    let work = r#"
mkdir data && chown 65534:65534 data && chmod 700 data
as_nobody "$bin/initdb" -A trust -U tester --locale=C -E UTF8 --data-checksums -D data >/dev/null
start
"$bin/pgbench" -i -q -s 3 2>/dev/null
"$bin/pgbench" -n -c 4 -T 60 >/dev/null 2>&1 & load=$!
until [ "$(ask 'select count(*) > 200 from pgbench_history')" = t ]; do sleep 0.1; done
control -m immediate stop
wait $load || true
"#;
    shell(&tree.target(), &format!("{begin}{work}"));
    tree.drop_kernel_cache();
    let look = r#"
start
ask "select count(*) > 200 from pgbench_history"
ask "select (select sum(delta) from pgbench_history) = all (array[(select sum(abalance) from pgbench_accounts),
     (select sum(bbalance) from pgbench_branches), (select sum(tbalance) from pgbench_tellers)])"
ask "create extension amcheck"
ask "select count(bt_index_check(c.oid, c.relname like 'pgbench%')) > 100 from pg_class c join pg_am a on a.oid = relam where amname = 'btree'"
control -m fast stop
as_nobody "$bin/pg_checksums" --check -D data | grep "Bad checksums"
grep -c "automatic recovery" data/log
"#;
    let found = shell(&tree.target(), &format!("{begin}{look}"));
    assert_eq!(found, "t\nt\nt\nBad checksums:  0\n1\n");
    assert!(tree.stat("succ_gets") > 0, "nothing was found in the cache");
}
