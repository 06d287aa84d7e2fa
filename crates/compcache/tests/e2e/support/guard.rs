//! What a test undoes at its end is undone also where its process is killed first: by a shell that waits for that.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// While this is there, a shell waits for the end of this process, and undoes something then. Dropped, it undoes nothing.
pub struct Guard(Child);

impl Guard {
    /// `undo` is for sh(1); in it `$1` and so on are `arguments`.
    pub fn new(undo: &str, arguments: &[&OsStr]) -> Guard {
        // A word comes from who drops this; the end of the pipe, of which this process alone has the other end, when it has died.
        let script = format!("read -r word || {{ {undo}\n}}");
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(script).arg("guard").args(arguments);
        // In a group of its own, so that what a terminal sends to the tests does not end it.
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        Guard(shell.spawn().expect("sh can be started"))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(mut word) = self.0.stdin.take() {
            let _ = word.write_all(b"over\n");
        }
        let _ = self.0.wait();
    }
}

#[test]
fn a_guard_undoes_what_is_left_when_its_test_dies_and_nothing_where_it_ends() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let undone = dir.path().join("undone");
    let guard = || Guard::new(r#": >"$1""#, &[undone.as_os_str()]);
    drop(guard());
    assert!(!undone.exists());
    let mut died = guard();
    drop(died.0.stdin.take());
    assert!(died.0.wait().expect("it is our child").success());
    assert!(undone.exists());
}
