//! The preflight: what on this node and in this cluster would keep the guard from working.
//!
//! Nothing is changed: the program is loaded over maps of its own and dropped, and the API is asked what it would allow.

mod api;
mod cilium;
mod finding;
mod node;
mod replies;

use std::{collections::BTreeMap, path::PathBuf};

pub use finding::{Finding, Findings, Level};

use crate::{
    datapath::{Options, Snapshot},
    plan::{EgressName, Settings},
};

/// What to look at.
#[derive(Clone, Debug)]
pub struct Check {
    /// The node.
    pub datapath: Options,
    /// What the agent would be told.
    pub settings: Settings,
    /// Kubeconfig file, if not found otherwise.
    pub kubeconfig: Option<PathBuf>,
    /// Name of the node in the cluster.
    pub node_name: String,
    /// Leave the API and what is learnt from it out.
    pub skip_api: bool,
}

impl Check {
    /// Looks at everything. Must run on a `LocalSet`, as the watches do; takes at most some 15 s.
    pub async fn run(&self) -> Findings {
        let mut findings = node::check(&self.datapath);
        findings.push(cilium::maps(&self.datapath.cilium_directory));
        if self.skip_api {
            return Findings { findings };
        }
        let (found, desired) = api::check(self).await;
        findings.extend(found);
        if let Some(desired) = desired {
            let snapshot = Snapshot::read(&self.datapath.pin_directory).unwrap_or_default();
            findings.extend(cilium::services(&self.datapath.cilium_directory, &desired, &packets(&snapshot)));
            findings.extend(replies::check(&desired, &snapshot.replies));
        }
        Findings { findings }
    }
}

/// FoU packets counted so far, by Egress; none where nothing is guarded yet.
fn packets(snapshot: &Snapshot) -> BTreeMap<EgressName, u64> {
    snapshot.egresses.iter().map(|(name, counters)| (name.clone(), counters.packets)).collect()
}
