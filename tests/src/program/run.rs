//! Packets through an instance.

use std::{
    os::fd::{AsFd as _, BorrowedFd},
    time::Duration,
};

use anyhow::{Result, ensure};
use aya::{TestRun as _, TestRunOptions, programs::SchedClassifier};
use coil_guard_common::{
    abi::{EgressCounters, Event},
    counters::Reason,
};

use super::{Instance, counters::difference};
use crate::cilium::Change;

/// What the program did with one packet.
#[derive(Clone, Debug)]
pub struct Run {
    /// The verdict that was counted.
    pub reason: Reason,
    /// The packet afterwards.
    pub output: Vec<u8>,
    /// What changed in Cilium's maps.
    pub changes: Vec<Change>,
    /// Growth of the Egress's counters.
    pub egress: EgressCounters,
    /// Events that were sent.
    pub events: Vec<Event>,
}

/// Runs one packet through a classifier and gives what it is afterwards.
///
/// # Errors
///
/// When the kernel refuses the packet, or the program returned anything but "next".
pub(super) fn pass(program: &SchedClassifier, frame: &[u8]) -> Result<Vec<u8>> {
    let mut output = vec![0; frame.len() + 64];
    let result = program.test_run(TestRunOptions {
        data_in: Some(frame),
        data_out: Some(&mut output),
        ..TestRunOptions::new()
    })?;
    // TCX_NEXT, and TC_ACT_UNSPEC on clsact.
    ensure!(result.return_value as i32 == -1, "returned {}, not -1", result.return_value as i32);
    output.truncate(result.data_size_out as usize);
    Ok(output)
}

impl Instance {
    /// Runs one packet and gives what it is afterwards.
    ///
    /// # Errors
    ///
    /// When the kernel refuses the packet, or the program returned anything but "next".
    pub fn pass(&self, frame: &[u8]) -> Result<Vec<u8>> {
        pass(self.program()?, frame)
    }

    /// The stub, which is what is attached in a pod.
    ///
    /// # Errors
    ///
    /// When it is not loaded.
    pub fn stub(&self) -> Result<BorrowedFd<'_>> {
        Ok(self.program()?.fd()?.as_fd())
    }

    /// Runs one packet `times` times, one after the other in the kernel, each on what the one before it left. Gives the
    /// mean time of a run as the kernel measured it.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn repeat(&self, frame: &[u8], times: u32) -> Result<Duration> {
        let options = TestRunOptions { data_in: Some(frame), repeat: times, ..TestRunOptions::new() };
        Ok(self.program()?.test_run(options)?.duration)
    }

    /// Runs one packet and tells everything that it did.
    ///
    /// # Errors
    ///
    /// As [`Self::pass`], and when not exactly one verdict was counted.
    pub fn run(&mut self, frame: &[u8], egress: u32) -> Result<Run> {
        let before = (self.cilium().dump()?, self.counters()?, self.egress(egress)?);
        self.take_events()?;
        let output = self.pass(frame)?;
        let after = (self.cilium().dump()?, self.counters()?, self.egress(egress)?);
        Ok(Run {
            reason: after.1.one_since(&before.1)?,
            output,
            changes: before.0.changes(&after.0),
            egress: difference(&after.2, &before.2),
            events: self.take_events()?,
        })
    }
}
