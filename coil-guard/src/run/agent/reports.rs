//! What the datapath's worker tells.

use anyhow::bail;

use super::Agent;
use crate::{
    clock::Monotonic,
    datapath::{How, Part, Report},
    memory,
    plan::PodUid,
};

impl Agent {
    pub(super) fn take_report(&mut self, report: Report) -> anyhow::Result<()> {
        let attachments = self.metrics.attachments.clone();
        let count = |outcome| {
            attachments.get_or_create(&[("outcome", outcome)]).inc();
        };
        let now = Monotonic::now();
        match report {
            Report::Attached { pod, part, interface, attachment, ports_overlap, how } => {
                let name = self.pod_name(&pod);
                tracing::info!(
                    pod = name,
                    uid = pod,
                    part = part.label(),
                    interface,
                    ?attachment,
                    ?how,
                    "attached"
                );
                count(match how {
                    How::Fresh => "attached",
                    How::Kept => "kept",
                    How::Replaced => "replaced",
                    How::Restored => "restored",
                });
                if how == How::Restored {
                    tracing::warn!(
                        pod = name,
                        part = part.label(),
                        "somebody had removed the pod's program; it was attached anew"
                    );
                }
                if part == Part::Guard {
                    if let Some(client) = self.planner.desired().pods.get(&pod).filter(|_| ports_overlap) {
                        self.notices.ports_overlap(&self.index, client, now);
                    }
                    self.names.insert(pod.clone(), name);
                    self.planner.attached(pod);
                }
            }
            Report::Detached { pod, part } => {
                tracing::info!(pod = self.pod_name(&pod), uid = pod, part = part.label(), "detached");
                count("detached");
                if part == Part::Guard {
                    self.planner.detached(&pod);
                    self.names.remove(&pod);
                }
            }
            Report::Failed { pod, part, error, retry_in } => {
                let name = self.pod_name(&pod);
                tracing::warn!(pod = name, uid = pod, part = part.label(), error, ?retry_in, "cannot attach");
                count("failed");
                if let Some(client) = self.planner.desired().pods.get(&pod) {
                    self.notices.attach_failed(&self.index, client, &error, now);
                }
            }
            Report::CoreFailed { error, retry_in } => {
                tracing::error!(error, ?retry_in, "cannot load the core program");
            }
            Report::DetachFailed { pod, part, error } => {
                let name = self.pod_name(&pod);
                tracing::warn!(
                    pod = name,
                    uid = pod,
                    part = part.label(),
                    error,
                    "cannot detach; trying again"
                );
                count("detach_failed");
            }
            Report::Bound(maps) => {
                let ids: Vec<String> =
                    maps.iter().map(|map| format!("{}={}", map.name, map.id.unwrap_or(0))).collect();
                tracing::info!(maps = ids.join(" "), "bound to Cilium's maps");
                self.metrics.cilium_binds.inc();
            }
            Report::Unbound(error) => tracing::error!(%error, "not bound to Cilium's maps"),
            // The loop looks at the progress after each report: readiness does not wait for something else to happen.
            // Loading programs reads objects, and the kernel's types.
            Report::Settled => memory::give_back(),
            Report::PinLost(path) => bail!(
                "somebody has removed the pin {}, so programs and agent would no longer share that map: ending, for the next \
                 start makes it anew",
                path.display()
            ),
            Report::Warning(warning) => tracing::warn!("{warning}"),
        }
        Ok(())
    }

    fn pod_name(&self, uid: &PodUid) -> String {
        let client = self.desired().pods.get(uid).map(|pod| format!("{}/{}", pod.namespace, pod.name));
        let egress_pod =
            || self.desired().egress_pods.get(uid).map(|pod| format!("{}/{}", pod.namespace, pod.name));
        client
            .or_else(egress_pod)
            .or_else(|| self.names.get(uid).cloned())
            .unwrap_or_else(|| "(unknown)".to_owned())
    }
}
