//! The program: where it is, and whether the preloaded object can get into it.
//!
//! What a shell would say about a program that is missing or not executable, we say too, and before anything else. The
//! rest is about LD_PRELOAD, which the loader of a program honours, but only a loader, and not for a program that gains
//! rights when it starts.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::read::ReadCache;
use rustix::fs::Access;
use rustix::process::{getgid, getuid};

use crate::run::elf::{Binary, classify, sanitizer};
use crate::run::failure::Failure;

/// How deep scripts may name scripts as their interpreters: what the kernel allows.
const SCRIPTS_DEEP_MAX: usize = 5;

/// Finds `name` as a shell does: a path as it is, anything else in `path_variable`.
pub fn find(name: &OsStr, path_variable: Option<&OsStr>) -> Result<PathBuf, Failure> {
    if name.is_empty() {
        return Err(Failure::not_found("the program's name is empty".into()));
    }
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        executable(&path)?;
        return Ok(path);
    }
    let variable = path_variable.unwrap_or(OsStr::new("/usr/local/bin:/usr/bin:/bin"));
    let mut found_but = None;
    for dir in std::env::split_paths(variable) {
        let path = if dir.as_os_str().is_empty() { Path::new(".").join(name) } else { dir.join(name) };
        if !path.exists() {
            continue;
        }
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(why) => found_but = found_but.or(Some(why)),
        }
    }
    let shown = name.display();
    Err(found_but.unwrap_or_else(|| {
        Failure::not_found(format!("{shown}: not found in PATH. If it is a file here, write ./{shown}"))
    }))
}

/// Whether `path` is a file that may be executed.
fn executable(path: &Path) -> Result<(), Failure> {
    let shown = path.display();
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Failure::not_found(format!("{shown}: not found")),
        _ => Failure::cannot_run(format!("{shown}: {error}")),
    })?;
    if metadata.is_dir() {
        return Err(Failure::cannot_run(format!("{shown} is a directory, not a program")));
    }
    if !metadata.is_file() {
        return Err(Failure::cannot_run(format!("{shown} is not a file, so not a program")));
    }
    rustix::fs::access(path, Access::EXEC_OK).map_err(|_| {
        if metadata.mode() & 0o111 == 0o111 {
            return Failure::cannot_run(format!(
                "{shown} may not be executed where it lies: is that file system mounted with noexec? Copy it to another."
            ));
        }
        Failure::cannot_run(format!(
            "{shown} may not be executed by this user.\n  If it is a program: chmod +x {shown}. \
             If it is a script: give it to its interpreter, for example compcache run -- python3 {shown}"
        ))
    })
}

/// Whether the preloaded object can get into `path`.
pub fn check(path: &Path) -> Result<(), Failure> {
    check_depth(path, SCRIPTS_DEEP_MAX)
}

fn check_depth(path: &Path, scripts_left: usize) -> Result<(), Failure> {
    let refuse = |why: &str| Err(Failure::cannot_run(format!("{} {why}", path.display())));
    // A program may be executable and not readable: then nothing can be known, and we try.
    let Ok(file) = File::open(path) else { return Ok(()) };
    let metadata = file.metadata();
    let file = ReadCache::new(file);
    match classify(&file) {
        Binary::Dynamic(loader) => {
            check_loader(path, &loader)?;
            check_rights(path, metadata.as_ref().ok())?;
            match sanitizer(&file) {
                Some(flag) => refuse(&format!(
                    "was built with {flag}: what that adds to the program keeps books of all its memory, and does not bear a \
                     pager beside it.\n  Build it without, or run it in a memory cgroup with the kernel's zram as swap."
                )),
                None => Ok(()),
            }
        }
        Binary::Static => refuse(
            "is statically linked: there is no loader that could put the pager into it.\n  \
             Link it dynamically (Go: go build -buildmode=pie with cgo; Rust musl targets: build for -gnu; \
             C: without -static), or run it in a memory cgroup with the kernel's zram as swap.",
        ),
        Binary::Bits32 => refuse("is a 32-bit program; compcache pages 64-bit programs only. Use its 64-bit build."),
        Binary::OtherMachine(machine) => {
            refuse(&format!("is a program for {machine}, this machine is another. Use the build for this machine."))
        }
        Binary::Broken => refuse("is a damaged program: its ELF headers make no sense."),
        Binary::Script(..) if scripts_left == 0 => {
            refuse("is a script whose interpreter is a script, and so on: too deep.")
        }
        Binary::Script(interpreter, argument) if has_windows_line_end(&interpreter, argument.as_deref()) => {
            Err(Failure::not_found(format!(
                "{shown} is a script whose first line ends in a carriage return (a Windows line end), which counts as part of its interpreter's \
             name.\n  Without them it can be run: sed -i 's/\\r$//' {shown}",
                shown = path.display()
            )))
        }
        Binary::Script(interpreter, argument) => {
            executable(&interpreter).map_err(|why| why.about(format!("{} is a script for", path.display())))?;
            check_depth(&interpreter, scripts_left - 1)?;
            let Some(named) = named_to_env(&interpreter, argument.as_deref()) else { return Ok(()) };
            match find(named.program.as_ref(), std::env::var_os("PATH").as_deref()) {
                Ok(program) => check_depth(&program, scripts_left - 1)?,
                Err(why) if named.alone => return Err(why.about(format!("{} is a script for", path.display()))),
                // We may have read the line otherwise than env does, which says what is wrong with it.
                Err(_) => {}
            }
            Ok(())
        }
        // A shell would run it as its own script; the kernel may also know it by binfmt_misc.
        Binary::Other => Ok(()),
    }
}

/// Whether the name of what runs a script ends in what its author did not see; others may take it with a flag.
fn has_windows_line_end(interpreter: &Path, argument: Option<&str>) -> bool {
    let is_env = || interpreter.file_name().is_some_and(|name| name == "env");
    match argument {
        None => interpreter.as_os_str().as_bytes().ends_with(b"\r"),
        Some(argument) => is_env() && argument.ends_with('\r'),
    }
}

/// What a script's line names to env.
#[derive(PartialEq, Eq, Debug)]
struct Named<'a> {
    program: &'a str,
    /// Nothing else stands there.
    alone: bool,
}

/// The program that `#!/usr/bin/env python3` runs, as far as that is clear.
fn named_to_env<'a>(interpreter: &Path, argument: Option<&'a str>) -> Option<Named<'a>> {
    if interpreter.file_name()? != "env" {
        return None;
    }
    let argument = argument?;
    // Quoted, or to be sought in another PATH than ours.
    if argument.contains(['"', '\'', '\\', '$']) || argument.split_whitespace().any(|word| word.starts_with("PATH=")) {
        return None;
    }
    let mut words = argument.split_whitespace();
    while let Some(word) = words.next() {
        if matches!(word, "-u" | "-C" | "-a" | "--unset" | "--chdir" | "--argv0") {
            words.next();
        } else if !word.starts_with('-') && !word.contains('=') {
            return Some(Named { program: word, alone: word == argument });
        }
    }
    None
}

fn check_loader(path: &Path, loader: &Path) -> Result<(), Failure> {
    let (path, shown) = (path.display(), loader.display());
    if loader.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld-musl")) {
        return Err(Failure::cannot_run(format!(
            "{path} is built against musl ({shown}); compcache's object knows glibc alone, and would do \
             nothing there.\n  Use the program's glibc build (Rust: a -gnu target; Alpine: run it in a Debian image)."
        )));
    }
    if !loader.exists() {
        return Err(Failure::cannot_run(format!(
            "{path} needs the loader {shown}, which is not installed. Install the C library it was built against."
        )));
    }
    Ok(())
}

/// A loader ignores LD_PRELOAD in a program that gains rights at its start.
fn check_rights(path: &Path, metadata: Option<&Metadata>) -> Result<(), Failure> {
    let Some(metadata) = metadata else { return Ok(()) };
    let gains = gained(metadata.mode(), metadata.uid(), metadata.gid(), getuid().as_raw(), getgid().as_raw())
        .or_else(|| (!getuid().is_root() && has_file_capabilities(path)).then_some("has file capabilities"));
    let Some(gains) = gains else { return Ok(()) };
    let path = path.display();
    Err(Failure::cannot_run(format!(
        "{path} {gains}: the loader ignores LD_PRELOAD for it, so the pager cannot get in.\n  \
         Run compcache as the user it would become (sudo compcache run ... {path}), or use a copy without that right."
    )))
}

/// What a program of this mode and owner gains when `uid` and `gid` start it.
fn gained(mode: u32, owner: u32, group: u32, uid: u32, gid: u32) -> Option<&'static str> {
    const SETUID: u32 = 0o4000;
    const SETGID_AND_GROUP_EXECUTE: u32 = 0o2010;
    if mode & SETUID != 0 && owner != uid {
        Some("is setuid")
    } else if mode & SETGID_AND_GROUP_EXECUTE == SETGID_AND_GROUP_EXECUTE && group != gid {
        Some("is setgid")
    } else {
        None
    }
}

fn has_file_capabilities(path: &Path) -> bool {
    let mut value = [0u8; 64];
    rustix::fs::getxattr(path, "security.capability", &mut value[..]).is_ok_and(|len| len > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_gains_rights_only_if_another_owns_it() {
        assert_eq!(gained(0o104755, 0, 0, 1000, 1000), Some("is setuid"));
        assert_eq!(gained(0o104755, 0, 0, 0, 0), None);
        assert_eq!(gained(0o102755, 0, 42, 1000, 1000), Some("is setgid"));
        assert_eq!(gained(0o102745, 0, 42, 1000, 1000), None, "setgid without group execution is a lock mark");
        assert_eq!(gained(0o100755, 0, 0, 1000, 1000), None);
    }

    #[test]
    fn env_names_the_program_behind_its_options_and_assignments() {
        let env = Path::new("/usr/bin/env");
        let named = |argument| named_to_env(env, Some(argument)).map(|named| (named.program, named.alone));
        assert_eq!(named("python3"), Some(("python3", true)));
        assert_eq!(named("-S A=1 node --x"), Some(("node", false)));
        assert_eq!(named("-S -u DISPLAY --chdir /tmp python3"), Some(("python3", false)));
        assert_eq!(named("-S A='b c' python3"), None);
        assert_eq!(named("-S PATH=/opt/x/bin:/usr/bin tool"), None);
        assert_eq!(named_to_env(env, None), None);
        assert_eq!(named_to_env(Path::new("/bin/sh"), Some("-e")), None);
    }

    #[test]
    fn a_script_with_line_ends_of_windows_says_so() {
        let script = tempfile::NamedTempFile::new().unwrap();
        for line in ["#!/bin/sh", "#!/usr/bin/env sh", "#!/usr/bin/env -S sh -u"] {
            fs::write(&script, format!("{line}\r\necho\r\n")).unwrap();
            let failure = check(script.path()).unwrap_err();
            assert!(failure.message().contains("carriage return") && !failure.message().contains('\r'), "{failure:?}");
        }
    }

    #[test]
    fn a_missing_program_says_where_it_was_sought() {
        let failure = find("no-such-program".as_ref(), Some("/bin".as_ref())).unwrap_err();
        assert!(failure.message().contains("not found in PATH"), "{}", failure.message());
        let failure = find("/bin".as_ref(), None).unwrap_err();
        assert!(failure.message().contains("directory"), "{}", failure.message());
    }
}
