//! The real agent, as a process on the lab's node.

use std::{
    env, fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    kube_api::KubeApi,
    lab::{command, eventually},
    net::Paths,
};

/// Name of the lab's node in the cluster.
pub const NODE: &str = "node-1";

const HEALTH: ([u8; 4], u16) = ([127, 0, 0, 1], 9398);
const BINARY: &str = "COIL_GUARD_BINARY";

/// The agent's binary: `COIL_GUARD_BINARY`, or the one beside the running test.
///
/// # Errors
///
/// When there is none; says how to build it.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = env::var_os(BINARY) {
        return Ok(path.into());
    }
    let running = env::current_exe().context("cannot find the running executable")?;
    let built = running.ancestors().skip(1).take(2).map(|directory| directory.join("coil-guard"));
    match built.into_iter().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!(
            "no coil-guard beside {}: build it with `cargo build -p coil-guard`, or set {BINARY}, or use `cargo xtask test`",
            running.display()
        ),
    }
}

/// A running agent. Dropping it kills it.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    log: PathBuf,
    health: SocketAddr,
    metrics: SocketAddr,
}

impl Agent {
    /// Starts `coil-guard run` with the lab's paths and these further arguments.
    ///
    /// # Errors
    ///
    /// When there is no binary, or it cannot be started.
    pub fn start(api: &KubeApi, arguments: &[String]) -> Result<Self> {
        Self::start_at(api, arguments, HEALTH.1)
    }

    /// Starts one through another program, which ends with its arguments: `setpriv`, with fewer rights.
    ///
    /// # Errors
    ///
    /// When there is no binary, or it cannot be started.
    pub fn start_under(wrapper: &[&str], api: &KubeApi, arguments: &[String]) -> Result<Self> {
        Self::launch(wrapper, api, arguments, HEALTH.1)
    }

    /// Starts one that serves its health at this port, and its metrics one below: for two at once.
    ///
    /// # Errors
    ///
    /// When there is no binary, or it cannot be started.
    pub fn start_at(api: &KubeApi, arguments: &[String], health_port: u16) -> Result<Self> {
        Self::launch(&[], api, arguments, health_port)
    }

    fn launch(wrapper: &[&str], api: &KubeApi, arguments: &[String], health_port: u16) -> Result<Self> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let log = Paths.scratch_file(&format!("agent-{number}.log"));
        let output = fs::File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let health = SocketAddr::from((HEALTH.0, health_port));
        let metrics = SocketAddr::from((HEALTH.0, health_port - 1));
        let binary = binary()?;
        let mut command = match wrapper {
            [] => command(binary),
            [program, options @ ..] => {
                let mut command = command(program);
                command.args(options).arg(binary);
                command
            }
        };
        command.arg("run").args(["--node-name", NODE]);
        if !arguments.iter().any(|argument| argument == "--log-level") {
            command.args(["--log-level", "info,coil_guard=debug"]);
        }
        if health_port != HEALTH.1 {
            command.args(["--health-address", &health.to_string()]);
            command.args(["--metrics-address", &metrics.to_string()]);
        }
        command.arg("--kubeconfig").arg(api.kubeconfig()).args(arguments);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().context("cannot start the agent")?;
        Ok(Self { child, log, health, metrics })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The file that it logs to.
    #[must_use]
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Body of /readyz and whether it was 200.
    ///
    /// # Errors
    ///
    /// When nothing answers.
    pub fn ready(&self) -> Result<(bool, String)> {
        get(self.health, "/readyz")
    }

    /// Waits until it is ready.
    ///
    /// # Errors
    ///
    /// When it is not in time, or has ended; with the end of its log.
    pub fn wait_ready(&mut self, patience: Duration) -> Result<()> {
        let found = eventually("ready agent", patience, || {
            if let Some(status) = self.child.try_wait()? {
                bail!("the agent ended: {status}");
            }
            Ok(match self.ready() {
                Ok((true, _)) => Ok(()),
                Ok((false, body)) => Err(body),
                Err(error) => Err(format!("{error:#}")),
            })
        });
        found.with_context(|| self.log_tail())
    }

    /// The text of /metrics.
    ///
    /// # Errors
    ///
    /// When nothing answers.
    pub fn metrics(&self) -> Result<String> {
        get(self.metrics, "/metrics").map(|(_, body)| body)
    }

    /// Sum of the samples of a metric whose labels contain each of `labels`.
    ///
    /// # Errors
    ///
    /// When nothing answers.
    pub fn metric(&self, name: &str, labels: &[&str]) -> Result<f64> {
        let text = self.metrics()?;
        let samples = text.lines().filter(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
                && labels.iter().all(|label| line.contains(label))
        });
        Ok(samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }

    /// Waits until its log has a line with each of `parts`.
    ///
    /// # Errors
    ///
    /// When it has not in time; with the end of the log.
    pub fn wait_log(&self, parts: &[&str], patience: Duration) -> Result<()> {
        let seen = eventually(&format!("log line with {parts:?}"), patience, || {
            let log = self.log();
            let found = log.lines().any(|line| parts.iter().all(|part| line.contains(part)));
            Ok(if found { Ok(()) } else { Err("see below") })
        });
        seen.with_context(|| self.log_tail())
    }

    /// Kills it with no chance to do anything, and waits for its end.
    ///
    /// # Errors
    ///
    /// When it cannot be waited for.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("cannot kill the agent")?;
        self.child.wait().map(|_| ()).context("cannot wait for the agent")
    }

    /// Waits until it has ended by itself, not well, and has said each of `parts` in one line.
    ///
    /// # Errors
    ///
    /// When it has not in time.
    pub fn wait_end(mut self, parts: &[&str], patience: Duration) -> Result<()> {
        let status =
            eventually("end of the agent", patience, || Ok(self.child.try_wait()?.ok_or("still running")))
                .with_context(|| self.log_tail())?;
        anyhow::ensure!(!status.success(), "the agent ended with {status}\n{}", self.log_tail());
        self.wait_log(parts, Duration::ZERO)
    }

    /// Asks it to end and waits for that.
    ///
    /// # Errors
    ///
    /// When it does not end in time, or not well.
    pub fn stop(mut self, patience: Duration) -> Result<()> {
        kill(Pid::from_raw(i32::try_from(self.child.id())?), Signal::SIGTERM)
            .context("cannot signal the agent")?;
        let status =
            eventually("end of the agent", patience, || Ok(self.child.try_wait()?.ok_or("still running")))?;
        anyhow::ensure!(status.success(), "the agent ended with {status}\n{}", self.log_tail());
        Ok(())
    }

    /// The last lines of its log, for messages.
    #[must_use]
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        format!("end of the agent's log:\n{}", lines[lines.len().saturating_sub(60)..].join("\n"))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended; either way nothing is left of it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.log_tail());
        }
    }
}

/// A minimal HTTP/1.0 request: status 200 or not, and the body.
fn get(address: SocketAddr, path: &str) -> Result<(bool, String)> {
    let patience = Duration::from_secs(2);
    let mut stream =
        TcpStream::connect_timeout(&address, patience).with_context(|| format!("no answer at {address}"))?;
    stream.set_read_timeout(Some(patience))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: lab\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).with_context(|| format!("no answer to GET {path}"))?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer has no header")?;
    Ok((head.split(' ').nth(1) == Some("200"), body.to_owned()))
}
