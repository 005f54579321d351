//! What a process uses.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};
use serde::Serialize;

/// Resident memory of a process, bytes.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Memory {
    /// All that is resident, pages of its own program file among them, which are shared by all who run it: VmRSS.
    pub(super) resident: u64,
    /// The part that is the process's alone, such as its heap: RssAnon.
    pub(super) anonymous: u64,
}

/// Reads the memory of a process.
pub(super) fn memory(pid: u32) -> Result<Memory> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let field = |name: &str| -> Result<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        Ok(kilobytes.with_context(|| format!("{path} has no {name}"))? * 1024)
    };
    Ok(Memory { resident: field("VmRSS")?, anonymous: field("RssAnon")? })
}

/// Processor time of a process since its start, of threads that have ended too.
pub(super) fn processor_time(pid: u32) -> Result<Duration> {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: writes the clock's id.
    let refused = unsafe { libc::clock_getcpuclockid(libc::pid_t::try_from(pid)?, &mut clock) };
    anyhow::ensure!(refused == 0, "process {pid} has no clock: error {refused}");
    let time = nix::time::clock_gettime(nix::time::ClockId::from_raw(clock));
    Ok(time.with_context(|| format!("cannot read the clock of process {pid}"))?.into())
}

/// Bytes as MiB.
pub(super) fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
