//! What the agent and the eBPF program share.
//!
//! * [`abi`]: the layouts of the guard's own maps;
//! * [`cilium`]: the layouts of Cilium's maps;
//! * [`counters`]: the verdicts, by reason;
//! * [`packet`], [`inner`], [`checksum`]: reading outer and inner headers, and the one change made to them;
//! * [`decide`]: the decision;
//! * [`replies`]: what is done to replies of mode `rewrite`.
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

#[cfg(test)]
extern crate std;

pub mod abi;
pub mod checksum;
pub mod cilium;
pub mod counters;
pub mod decide;
pub mod inner;
pub mod packet;
pub mod replies;
