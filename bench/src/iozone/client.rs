//! The worker `columns` on a side, asked for one column at a time, and what each cost.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use compcache_worker::columns::{Answer, Column, Through};
use serde::Serialize;

use super::place::{Disk, Pool, Standing, Taken};
use crate::baseline::loop_device::Traffic;
use crate::device::machine_cpu_s;
use crate::device::process::cpu_s;

/// What a column cost, all of it: opening, flushing and checking, too.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Cost {
    /// Seconds by the clock.
    pub wall_s: f64,
    /// CPU seconds of the worker.
    pub client_cpu_s: f64,
    /// CPU seconds of our server.
    pub server_cpu_s: f64,
    /// CPU seconds of the whole machine, whoever took them.
    pub machine_cpu_s: f64,
    /// Pages that the pool was asked for and had.
    pub found: u64,
    /// Pages that it had not.
    pub missed: u64,
    /// What went to the disk.
    pub traffic: Traffic,
    /// The pool at the end.
    pub pool: Pool,
    /// The memory of the side at the end.
    pub taken: Taken,
}

/// The worker; ended when dropped.
pub struct Client<'p> {
    disk: &'p Disk<'p>,
    standing: &'p Standing<'p>,
    child: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<String>,
    stderr: Option<JoinHandle<String>>,
    patience: Duration,
}

impl<'p> Client<'p> {
    /// Starts it. `bytes` are those of the file and of a record, `flags` what else it is told.
    ///
    /// # Errors
    /// It has not been built, or cannot be started.
    pub fn start(
        disk: &'p Disk<'p>,
        standing: &'p Standing<'p>,
        through: Through,
        bytes: (u64, u64),
        image: &Path,
        flags: &[&str],
        patience: Duration,
    ) -> Result<Client<'p>> {
        let worker = crate::scan::worker("columns", &[])?;
        let mut command = Command::new(&worker.words[0]);
        command.arg(standing.point()).args([bytes.0.to_string(), bytes.1.to_string()]);
        let through = through.to_possible_value().expect("no way through is hidden");
        command.arg("--through").arg(through.get_name()).arg("--image").arg(image).args(flags);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        standing.client().take_in(&mut command)?;
        let mut child = command.spawn().context("cannot start the worker")?;
        let (orders, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (sender, answers) = channel();
        // Both end with the worker.
        thread::spawn(move || {
            let lines = stdout.into_iter().flat_map(|pipe| BufReader::new(pipe).lines().map_while(Result::ok));
            lines.take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
        });
        let stderr = thread::spawn(move || {
            let mut said = String::new();
            let _ = stderr.map(|mut pipe| pipe.read_to_string(&mut said));
            said
        });
        Ok(Client { disk, standing, child, orders, answers, stderr: Some(stderr), patience })
    }

    /// Has it run a column.
    ///
    /// # Errors
    /// It read wrong bytes, failed, or took longer than it may.
    pub fn ask(&mut self, column: Column) -> Result<(Answer, Cost)> {
        let pid = self.child.id();
        let counters = || -> Result<_> {
            Ok((self.standing.pool()?, self.disk.traffic()?, self.standing.server_cpu_s(), cpu_s(pid), machine_cpu_s()))
        };
        let before = counters()?;
        let started = Instant::now();
        let orders = self.orders.as_mut().context("the worker has been ended")?;
        // Should it have died, it says why below.
        let _ = writeln!(orders, "{column}");
        let line = self.answers.recv_timeout(self.patience).map_err(|error| self.why(column, error))?;
        let wall_s = started.elapsed().as_secs_f64();
        let after = counters()?;
        let traffic = after.1.since(before.1);
        self.disk.check_throttle(traffic, wall_s)?;
        let cost = Cost {
            wall_s,
            client_cpu_s: after.3 - before.3,
            server_cpu_s: after.2 - before.2,
            machine_cpu_s: after.4 - before.4,
            found: after.0.found - before.0.found,
            missed: after.0.missed - before.0.missed,
            traffic,
            pool: after.0,
            taken: self.standing.taken(after.0),
        };
        Ok((serde_json::from_str(&line).context("the worker's answer")?, cost))
    }

    /// Lets it remove its files and end.
    ///
    /// # Errors
    /// It failed.
    pub fn end(mut self) -> Result<()> {
        self.orders = None;
        let status = self.child.wait()?;
        match status.success() {
            true => Ok(()),
            false => bail!("the worker ended with {status}: {}", self.said()),
        }
    }

    fn why(&mut self, column: Column, error: RecvTimeoutError) -> anyhow::Error {
        if error == RecvTimeoutError::Timeout {
            return anyhow!("{column} took longer than --patience allows, and was ended");
        }
        let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let (said, kills) = (self.said(), self.standing.kills());
        anyhow!(
            "{column}: the worker ended with {status}: {said} ({kills} processes ended by the kernel for want of memory)"
        )
    }

    fn said(&mut self) -> String {
        let said = self.stderr.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        said.trim().to_owned()
    }
}

impl Drop for Client<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
