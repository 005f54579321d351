//! What the agent and the eBPF program share.
//!
//! * [`abi`]: the layouts of the guard's own maps;
//! * [`cilium`]: the layouts of Cilium's maps;
//! * [`counters`]: the verdicts, by reason.
#![no_std]

#[cfg(test)]
extern crate std;

pub mod abi;
pub mod cilium;
pub mod counters;
