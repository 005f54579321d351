//! What the operator sees of the agent: metrics, health, log.

mod collector;
mod http;
mod log;
mod metrics;
mod readiness;
#[cfg(test)]
mod tests;

pub use collector::SnapshotCell;
pub use http::{Endpoints, SnapshotRequest, serve};
pub(crate) use log::parse_filter;
pub use log::{LogControl, LogFormat, init as init_log};
pub use metrics::{Label, Metrics};
pub use readiness::{Condition, Readiness};
