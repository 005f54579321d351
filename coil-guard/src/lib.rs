//! coil-guard, the agent.
//!
//! ```text
//! kube watchers ──> index ──> plan ──> datapath ──> events, metrics, status
//! ```
//!
//! * [`index`]: what the watches have said, joined.
//! * [`k8s`]: the watches, and events about Egresses.
//! * [`plan`]: what should be guarded, as plain data.
//! * [`datapath`]: maps, programs, links and pins.
//! * [`cilium`]: Cilium's maps.
//! * [`clock`]: the one clock that the agent and the program share.

pub mod cilium;
pub mod clock;
pub mod datapath;
pub mod index;
pub mod k8s;
pub mod plan;
