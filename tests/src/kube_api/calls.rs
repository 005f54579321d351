//! The log of API calls.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicU64, Ordering},
    },
    time::Instant,
};

use super::rbac::Attributes;

/// One call of a client.
#[derive(Clone, Debug)]
pub struct Call {
    /// When it arrived.
    pub at: Instant,
    /// What it asked for; empty group and resource for paths outside of resources, such as `/version`.
    pub attributes: Attributes,
    /// API version, such as `v1`.
    pub version: String,
    /// Namespace, `None` for all of them or a cluster-scoped resource.
    pub namespace: Option<String>,
    /// Object name, empty where a call names none.
    pub name: String,
    /// Path and query.
    pub uri: String,
    /// The client's User-Agent.
    pub user_agent: String,
    /// Bytes of the request's body.
    pub request_bytes: u64,
    /// Bytes of the answer's body; those of a watch grow while it runs.
    pub response_bytes: u64,
    /// HTTP status; 0 while unanswered.
    pub code: u16,
}

impl Call {
    /// Whether it asked for an API resource: such calls need a rule in a role.
    #[must_use]
    pub fn is_resource(&self) -> bool {
        !self.attributes.resource.is_empty()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) bytes: AtomicU64,
    pub(crate) code: AtomicU16,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) call: Call,
    pub(crate) counters: Arc<Counters>,
}

impl Entry {
    pub(crate) fn snapshot(&self) -> Call {
        Call {
            response_bytes: self.counters.bytes.load(Ordering::Relaxed),
            code: self.counters.code.load(Ordering::Relaxed),
            ..self.call.clone()
        }
    }
}
