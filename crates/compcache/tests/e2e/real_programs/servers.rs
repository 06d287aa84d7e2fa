//! Servers run under compcache; clients ask them from outside, and the answers are compared.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Output};

use super::{quarter, report, set_up, write};
use crate::support::{Cap, Outcome, Program, Way, beside_others, sample_until, scratch, ways};

fn answers(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().expect("the client can be started");
    assert!(status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&stderr));
    String::from_utf8_lossy(&stdout).into_owned()
}

/// Starts the server, asks it, ends it by `signal`, both ways; the answers must be those of a bare run.
fn compare(server: &Program, signal: i32, ask: impl Fn() -> String + Sync) {
    let _shared = beside_others();
    let serve = |way: Way, cap: &Cap| -> (String, Outcome) {
        let mut running = server.start(way, cap);
        let answers = running.during(&ask);
        running.signal(signal);
        (answers, running.finish())
    };
    let (right, bare) = serve(Way::Bare, &Cap::Resident(0));
    assert!(bare.status.success(), "it fails without compcache: {}", bare.explain());
    for way in ways() {
        let (paged, outcome) = serve(way, &quarter(&bare));
        assert!(paged == right, "other answers than without compcache ({way:?}): {}", outcome.explain());
        assert_eq!(outcome.status, bare.status, "{}", outcome.explain());
        outcome.must_have_evicted();
        report(way, &outcome, &bare, &quarter(&bare));
    }
}

/// Fills it by a stream, saves by a forked child while it is changed, and compares the digest of everything.
pub fn redis() {
    let dir = scratch();
    // A socket's path must be short.
    let home = tempfile::tempdir().expect("a temporary directory");
    let socket = home.path().join("redis");
    let mut commands = String::new();
    for i in 0..32_000 {
        let k = (i * 7919) % 60_013;
        commands.push_str(&format!(
            "SET key:{k} value-{i}-of-{k}-{}\r\nHSET h:{} f{i} {i}\r\n",
            "text_".repeat(i % 150),
            k % 500
        ));
        if i == 16_000 {
            commands.push_str("BGSAVE\r\n");
        }
    }
    let stream = write(dir.path(), "commands", commands);
    let server = Program::new("redis-server")
        .args(["--port", "0", "--save", "", "--daemonize", "no", "--logfile", "/dev/null", "--unixsocket"])
        .args([&socket])
        .args(["--enable-debug-command", "yes", "--dir"])
        .args([dir.path()]);
    let cli = |arguments: &[&str]| {
        let mut command = Command::new("redis-cli");
        command.arg("-s").arg(&socket).args(arguments);
        command
    };
    compare(&server, libc::SIGTERM, || {
        sample_until("redis-server answers", 30, || cli(&["PING"]).output().ok().filter(|said| said.status.success()));
        let mut all = String::new();
        answers(cli(&["--pipe"]).stdin(fs::File::open(&stream).expect("the commands")));
        sample_until("the background save ends", 60, || {
            answers(&mut cli(&["INFO", "persistence"])).contains("rdb_bgsave_in_progress:0").then_some(())
        });
        all += &answers(&mut cli(&["DBSIZE"]));
        all += &answers(&mut cli(&["DEBUG", "DIGEST"]));
        all += &answers(&mut cli(&["SORT", "nothing", "BY", "nosort"]));
        all += &answers(&mut cli(&["GET", "key:4711"]));
        all += &answers(&mut cli(&["INFO", "persistence"]))
            .lines()
            .find(|line| line.starts_with("rdb_last_bgsave_status"))
            .map(str::to_owned)
            .unwrap_or_default();
        all
    });
}

/// A cluster of its own, run by nobody, who keeps the one right that userfaultfd asks for.
pub fn postgres() {
    const NOBODY: u32 = 65534;
    let scratch = scratch();
    let home = tempfile::tempdir().expect("a temporary directory");
    let (home, data) = (home.path(), home.path().join("data"));
    fs::create_dir(&data).expect("a directory");
    for dir in [home, &data] {
        chown(dir, Some(NOBODY), Some(NOBODY)).expect("root may give files away");
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).expect("our directory");
    }
    let as_nobody =
        ["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=+sys_ptrace", "--ambient-caps=+sys_ptrace"];
    let initdb = binary("initdb");
    let mut setup = Command::new("setpriv");
    setup.args(as_nobody).arg(initdb).args([
        "--no-sync",
        "-A",
        "trust",
        "-U",
        "tester",
        "--locale=C",
        "-E",
        "UTF8",
        "-D",
    ]);
    set_up(setup.arg(&data).current_dir(home).env("HOME", home));
    let server = Program::new("setpriv")
        .args(as_nobody)
        .args([binary("postgres")])
        .args(["-c", "listen_addresses=", "-c", "fsync=off", "-c", "shared_buffers=8MB", "-c", "work_mem=96MB"])
        .args(["-c", "max_parallel_workers_per_gather=2", "-c", "jit=off", "-c", "autovacuum=off"])
        .args(["-c", "log_min_messages=fatal"])
        .args([&format!("-cunix_socket_directories={}", home.display()), "-D"])
        .args([&data])
        .dir(home)
        .env("HOME", home);
    let queries = write(scratch.path(), "queries.sql", QUERIES);
    let psql = |arguments: &[&str]| {
        let mut command = Command::new("psql");
        command.arg("-h").arg(home).args(["-U", "tester", "-d", "postgres", "-X", "-q", "-A", "-t"]).args(arguments);
        command
    };
    compare(&server, libc::SIGINT, || {
        sample_until("postgres answers", 60, || {
            psql(&["-c", "select 1"]).output().ok().filter(|said| said.status.success())
        });
        answers(psql(&["-v", "ON_ERROR_STOP=1", "-f"]).arg(&queries))
    });
}

/// The program itself, where a distribution keeps it.
fn binary(name: &str) -> std::path::PathBuf {
    let found = compcache_testkit::features::find_program(name).expect("asked before");
    let real = found.canonicalize().unwrap_or(found);
    if Path::new(&real).is_file() { real } else { name.into() }
}

const QUERIES: &str = "
drop table if exists t, u;
set synchronize_seqscans = off;
create table t as select i as id, (i * 7919::bigint) % 100003 as k, 'name' || i % 1000 as name, repeat(md5(i::text), 3) as extra
  from generate_series(1, 150000) i;
create table u as select (i * 31) % 100003 as k, md5((i * 7)::text) as m from generate_series(1, 120000) i;
create index on t (k);
analyze t; analyze u;
select name, count(*), sum(k), max(extra) from t group by name order by name;
select count(*), sum(t.k), md5(string_agg(t.extra || u.m, ',' order by t.id, u.m)) from t join u using (k);
select k, array_agg(id order by id) from t group by k having count(*) > 1 order by k limit 3000;
update t set extra = reverse(extra) where id % 3 = 0;
select md5(string_agg(extra, '' order by extra)) from t;
";
