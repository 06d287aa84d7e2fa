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
use crate::session::Session;

const DISK: &str = "bench";

/// A server of ours. It removes its disk when it is ended, which it refuses while somebody uses it.
pub struct Server {
    /// The process.
    pub process: Process,
    socket: PathBuf,
}

impl Server {
    /// Starts the server and has it make a disk. Returns the device, too.
    ///
    /// # Errors
    /// The binary is not there or does not serve, or this machine cannot have such a disk.
    pub fn start(
        session: &Session,
        directory: &Path,
        compcache: &Path,
        (codec, over): (&str, Over),
        bytes: u64,
    ) -> Result<(Server, PathBuf)> {
        let socket = directory.join("control.sock");
        let mut command = Command::new(compcache);
        command.args(["serve", "--memory", "80%", "--socket"]).arg(&socket);
        let process = Process::start(session, directory, command)?;
        let mut server = Server { process, socket };
        let socket = server.socket.clone();
        server.process.wait_until(|| UnixStream::connect(&socket).is_ok())?;
        let disk = server.ask(json!({
            "do": "create", "name": DISK, "size_bytes": bytes, "codec": codec, "limit_bytes": null, "at": over.transport(),
        }))?;
        let device = disk["disk"]["at"].as_str().context("the server says no device")?.into();
        Ok((server, device))
    }

    /// All that the server knows of the disk: statistics and latencies.
    ///
    /// # Errors
    /// It does not answer.
    pub fn state(&self) -> Result<Value> {
        Ok(self.ask(json!({"do": "show", "name": DISK}))?["disk"].take())
    }

    /// What the disk holds; all zero when the server does not answer.
    pub fn held(&self) -> Held {
        let state = self.state().unwrap_or_default();
        let stat = |name: &str| state["stats"][name].as_u64().unwrap_or(0);
        Held {
            original_bytes: stat("orig_data_size"),
            compressed_bytes: stat("compr_data_size"),
            memory_bytes: stat("mem_used_total"),
            same_pages: stat("same_pages"),
            huge_pages: stat("huge_pages"),
        }
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
