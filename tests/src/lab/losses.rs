//! Why packets did not arrive.

use std::collections::BTreeMap;

use anyhow::Result;

use super::Lab;
use crate::{cilium::model::Stat, net::ip_errors};

/// What the parts of the lab threw away since it was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Dropped by Cilium's model, because it found no backend.
    pub no_backend: u64,
    /// Of these, packets whose service the control plane wrote anew while they were looked at.
    pub service_changed: u64,
    /// Dropped by Cilium's model for any other reason.
    pub other: u64,
    /// Thrown away by the kernel on the node, by its reason.
    pub node: BTreeMap<String, u64>,
}

impl Losses {
    /// Packets that no part but Cilium's model lost, all of them because the control plane changed the service under them.
    #[must_use]
    pub fn by_changes_alone(&self) -> Option<u64> {
        let alone = self.other == 0 && self.node.is_empty() && self.no_backend == self.service_changed;
        alone.then_some(self.service_changed)
    }
}

impl Lab {
    /// What was thrown away so far, on the node of the calling thread.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn losses(&self) -> Result<Losses> {
        let stat = |stat| self.model.stat(stat);
        Ok(Losses {
            no_backend: stat(Stat::DropNoService)? + stat(Stat::DropNoBackend)?,
            service_changed: stat(Stat::ServiceChanged)?,
            other: stat(Stat::DropUntranslated)? + stat(Stat::DropPolicy)?,
            node: ip_errors()?,
        })
    }

    /// Stops every receiver; they must not have missed a packet.
    ///
    /// # Errors
    ///
    /// When one was too slow, or failed.
    pub fn finish_receivers(&mut self) -> Result<()> {
        let receivers = [&mut self.backend_receivers, &mut self.client_receivers, &mut self.taps];
        receivers.into_iter().flat_map(std::mem::take).try_for_each(crate::fou::Receiver::finish)
    }
}
