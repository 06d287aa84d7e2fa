//! What the tests run, built once: the preload object, the memory tester, and the trap programs.

use std::collections::HashMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, OnceLock};

/// The object that goes into the programs: `COMPCACHE_PRELOAD`, or built here.
pub fn preload() -> &'static Path {
    static PRELOAD: OnceLock<PathBuf> = OnceLock::new();
    PRELOAD.get_or_init(|| match std::env::var_os("COMPCACHE_PRELOAD") {
        Some(path) => path.into(),
        None => cargo_builds(&["-p", "compcache-preload"], "libcompcache_preload.so"),
    })
}

/// `memory-tester` of the test kit.
pub fn memory_tester() -> &'static Path {
    static TESTER: OnceLock<PathBuf> = OnceLock::new();
    TESTER.get_or_init(|| release_binary("memory-tester"))
}

/// A program of one of our packages, as people build it.
pub fn release_binary(name: &str) -> PathBuf {
    // With the same packages as `make bench-build`, so that what they are built of is the same.
    let packages = ["-p", "compcache", "-p", "compcache-bench", "-p", "compcache-testkit"];
    cargo_builds(&[&packages[..], &["--bin", name]].concat(), name)
}

/// The build directory that this test was built in.
fn target_dir() -> PathBuf {
    let executable = Path::new(env!("CARGO_BIN_EXE_compcache"));
    executable.ancestors().nth(2).expect("an executable in TARGET/PROFILE").to_owned()
}

fn cargo_builds(arguments: &[&str], file: &str) -> PathBuf {
    // Only one at a time, and no two builds of one workspace: cargo would wait for its own lock anyway.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let target = target_dir();
    let mut cargo = Command::new(env!("CARGO"));
    // What cargo has told this test of its package is asked for by some build scripts, which would run once more, and all that is built of them.
    for (name, _) in std::env::vars_os() {
        let bytes = name.as_bytes();
        if bytes.starts_with(b"CARGO_PKG_") || bytes.starts_with(b"CARGO_MANIFEST_") || bytes == b"OUT_DIR" {
            cargo.env_remove(name);
        }
    }
    let output = cargo
        .args(["build", "--release", "--quiet"])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("CARGO_TARGET_DIR", &target)
        .output()
        .expect("cargo can be started");
    assert!(output.status.success(), "cargo build {arguments:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    let built = target.join("release").join(file);
    assert!(built.is_file(), "cargo built no {}", built.display());
    built
}

/// `tests/programs/NAME.c`, compiled. Panics when the compiler says anything at all.
pub fn trap_program(name: &'static str) -> PathBuf {
    static BUILT: LazyLock<Mutex<HashMap<&'static str, PathBuf>>> = LazyLock::new(Default::default);
    let mut built = BUILT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(path) = built.get(name) {
        return path.clone();
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs");
    fs::create_dir_all(&place).expect("a directory under the build directory");
    // Another name first: two test runs may build at the same time.
    let (path, partial) = (place.join(name), place.join(format!("{name}.{}", std::process::id())));
    let output = Command::new(std::env::var_os("CC").unwrap_or("cc".into()))
        .args(["-O1", "-g", "-pthread", "-Wall", "-Wextra", "-o"])
        .args([&partial, &sources.join(name).with_extension("c")])
        .output()
        .expect("a C compiler, as cc or in CC");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{name}.c does not compile cleanly:\n{said}");
    fs::rename(&partial, &path).expect("a file beside");
    built.insert(name, path.clone());
    path
}
