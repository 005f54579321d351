//! coil-guard, the agent.
//!
//! ```text
//! kube watchers ──> index ──> plan ──> datapath ──> events, metrics, status
//! ```
//!
//! * [`cli`]: the command line.
//! * [`index`]: what the watches have said, joined.
//! * [`k8s`]: the watches, and events about Egresses.
//! * [`observe`]: metrics, health, log.
//! * [`plan`]: what should be guarded, as plain data.
//! * [`datapath`]: maps, programs, links and pins.
//! * [`cilium`]: Cilium's maps.
//! * [`run`]: the loop that ties them together.
//! * [`check`]: the preflight.
//! * [`clock`]: the one clock that the agent and the program share.

pub mod check;
pub mod cilium;
pub mod cli;
pub mod clock;
pub mod datapath;
pub mod index;
pub mod k8s;
mod memory;
pub mod observe;
pub mod plan;
pub mod run;
