//! `compcache serve` with one disk, asked over its control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::Over;
use super::process::Process;
use crate::baseline::Held;
use crate::baseline::cgroup::Cgroup;
use crate::session::Session;

const DISK: &str = "bench";

/// A server of ours. It removes its disk when it is ended, which it refuses while somebody uses it.
pub struct Server {
    /// The process.
    pub process: Process,
    socket: PathBuf,
}

impl Server {
    /// Starts the server and has it make a disk; what `wanted` names is so in the question for it. Returns the device, too.
    ///
    /// # Errors
    /// The binary is not there or does not serve, or this machine cannot have such a disk.
    pub fn start(
        session: &Session,
        directory: &Path,
        compcache: &Path,
        (codec, over): (&str, Over),
        bytes: u64,
        wanted: &Value,
    ) -> Result<(Server, PathBuf)> {
        let mut command = Command::new(compcache);
        command.args(["serve", "--memory", "80%"]);
        let server = Server::start_with(session, directory, command)?;
        let mut question = json!({
            "do": "create", "name": DISK, "size_bytes": bytes, "codec": codec, "limit_bytes": null, "at": over.transport(),
        });
        for (name, value) in wanted.as_object().into_iter().flatten() {
            question[name] = value.clone();
        }
        let device = server.make(question)?;
        Ok((server, device))
    }

    /// Starts the server in `group` and has it show `origin` as a disk, with a cache of `pool_bytes`. Returns the device, too.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_over(
        session: &Session,
        directory: &Path,
        compcache: &Path,
        (origin, pool_bytes): (&Path, u64),
        group: &Cgroup,
    ) -> Result<(Server, PathBuf)> {
        let mut command = Command::new(compcache);
        // For its other disks, of which there are none; the cache is beside it, within the same memory.
        command.args(["serve", "--memory", "4M"]);
        group.take_in(&mut command)?;
        let server = Server::start_with(session, directory, command)?;
        let device = server.make(json!({
            "do": "create_over", "name": DISK, "size_bytes": 0, "codec": "lz4", "limit_bytes": null, "at": "auto",
            "origin": {"path": origin, "memory_bytes": pool_bytes},
        }))?;
        if !device.starts_with("/dev") {
            bail!("the disk is {}; there is no block device for it here", device.display());
        }
        Ok((server, device))
    }

    fn start_with(session: &Session, directory: &Path, mut command: Command) -> Result<Server> {
        let socket = directory.join("control.sock");
        command.arg("--socket").arg(&socket);
        let process = Process::start(session, directory, command)?;
        let mut server = Server { process, socket };
        let socket = server.socket.clone();
        server.process.wait_until(|| UnixStream::connect(&socket).is_ok())?;
        Ok(server)
    }

    fn make(&self, question: Value) -> Result<PathBuf> {
        let disk = self.ask(question)?;
        Ok(disk["disk"]["at"].as_str().context("the server says no device")?.into())
    }

    /// All that the server knows of the disk: statistics and latencies.
    ///
    /// # Errors
    /// It does not answer.
    pub fn state(&self) -> Result<Value> {
        Ok(self.ask(json!({"do": "show", "name": DISK}))?["disk"].take())
    }

    /// What the disk holds; all zero but the server's own memory when it does not answer.
    pub fn held(&self) -> Held {
        let state = self.state().unwrap_or_default();
        let stat = |name: &str| state["stats"][name].as_u64().unwrap_or(0);
        let process_bytes = self.process.resident_bytes();
        Held {
            server_bytes: process_bytes.saturating_sub(stat("mem_used_total")),
            original_bytes: stat("orig_data_size"),
            compressed_bytes: stat("compr_data_size"),
            memory_bytes: stat("mem_used_total"),
            same_pages: stat("same_pages"),
            huge_pages: stat("huge_pages"),
        }
    }

    /// Has all of the disk leave memory for its backing.
    ///
    /// # Errors
    /// It has none, or nothing can be written there.
    pub fn reclaim(&self) -> Result<()> {
        self.ask(json!({"do": "reclaim", "name": DISK, "bytes": null})).map(drop)
    }

    fn ask(&self, mut question: Value) -> Result<Value> {
        question["version"] = json!(1);
        let stream = UnixStream::connect(&self.socket)?;
        (&stream).write_all(format!("{question}\n").as_bytes())?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        let answer: Value = serde_json::from_str(&line).context("the server's answer")?;
        match answer["failed"]["why"].as_str() {
            Some(why) => bail!("{why}"),
            None => Ok(answer),
        }
    }
}
