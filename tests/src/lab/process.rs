//! What runs beside the lab: processes on its node, and Cilium's garbage collection.

use std::{
    ffi::OsStr,
    os::unix::process::CommandExt as _,
    process::Command,
    sync::mpsc::{self, RecvTimeoutError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, bail};

use super::Lab;
use crate::cilium::maps::collect_garbage;

/// A command that runs on the node of the calling thread and is killed when that thread ends, however it ends.
#[must_use]
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    let die_with_parent = || {
        // SAFETY: a system call without pointers, allowed between fork and exec.
        nix::errno::Errno::result(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
        Ok(())
    };
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(die_with_parent) };
    command
}

/// Looks again and again until `look` finds something.
///
/// # Errors
///
/// When it has not found it within `patience`: the message holds what was looked for and what was seen last. And
/// whatever `look` returns.
pub fn eventually<T, S: std::fmt::Debug>(
    what: &str,
    patience: Duration,
    mut look: impl FnMut() -> Result<Result<T, S>>,
) -> Result<T> {
    let deadline = Instant::now() + patience;
    loop {
        match look()? {
            Ok(found) => return Ok(found),
            Err(seen) if Instant::now() > deadline => {
                bail!("no {what} after {patience:?}; last seen: {seen:?}")
            }
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Cilium's garbage collection, running. Dropping it stops it.
#[derive(Debug)]
pub struct GarbageCollector {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<Result<usize>>>,
}

impl Lab {
    /// Starts the agent's garbage collection, which removes conntrack entries whose lifetime is over, every `interval`.
    ///
    /// # Errors
    ///
    /// When no thread can be started.
    pub fn start_garbage_collection(&self, interval: Duration) -> Result<GarbageCollector> {
        let maps: Vec<_> = self
            .maps
            .options()
            .families
            .iter()
            .map(|family| Ok(self.maps.conntrack(*family)?.try_clone()?))
            .collect::<Result<_>>()?;
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("gc".to_owned()).spawn(move || {
            let mut removed = 0;
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                for map in &maps {
                    removed += collect_garbage(map)?;
                }
            }
            Ok(removed)
        })?;
        Ok(GarbageCollector { stop: Some(stop), thread: Some(thread) })
    }
}

impl GarbageCollector {
    /// Stops it and says how many entries it removed.
    ///
    /// # Errors
    ///
    /// When a map refused.
    pub fn finish(mut self) -> Result<usize> {
        self.stop = None;
        let Some(thread) = self.thread.take() else { return Ok(0) };
        thread.join().map_err(|_| anyhow!("the garbage collection panicked"))?
    }
}

impl Drop for GarbageCollector {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // Its count was not asked for.
            let _ = thread.join();
        }
    }
}
