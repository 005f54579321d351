//! coil-guard, the agent.
//!
//! ```text
//! kube watchers ──> index ──> plan ──> datapath ──> events, metrics, status
//! ```
//!
//! * [`plan`]: what should be guarded, as plain data.
//! * [`clock`]: the one clock that the agent and the program share.

pub mod clock;
pub mod plan;
