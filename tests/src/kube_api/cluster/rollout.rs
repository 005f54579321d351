//! A rolling update, as a Deployment with a surge of one does it.

use super::{Cluster, PodRef, PodSpec};

/// What a rolling update has just done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RollStep {
    /// A new pod is Running and not Ready yet.
    Started(PodRef),
    /// The new pod is Ready.
    Ready(PodRef),
    /// An old pod is Terminating. The callback decides how long that lasts.
    Terminating(PodRef),
    /// The old pod is gone.
    Gone(PodRef),
}

impl Cluster {
    /// Replaces the backends of an Egress one by one: a new pod is started and becomes Ready, only then an old one is
    /// deleted. `on_step` runs after each step, and so sets the pace; it is where a lab moves its own model along.
    /// Old pods beyond the number of replacements are deleted too. Returns the new pods.
    ///
    /// # Errors
    ///
    /// What the server or `on_step` answers.
    pub fn roll(
        &self,
        namespace: &str,
        egress: &str,
        replacements: &[PodSpec],
        mut on_step: impl FnMut(&RollStep) -> anyhow::Result<()>,
    ) -> anyhow::Result<Vec<PodRef>> {
        let old = self.backends(namespace, egress);
        let mut new = Vec::new();
        for index in 0..old.len().max(replacements.len()) {
            if let Some(spec) = replacements.get(index) {
                let pod = self.pending_backend(namespace, egress, spec)?;
                self.run(&pod, &spec.addresses, false)?;
                on_step(&RollStep::Started(pod.clone()))?;
                self.set_ready(&pod, true)?;
                on_step(&RollStep::Ready(pod.clone()))?;
                new.push(pod);
            }
            if let Some(pod) = old.get(index) {
                self.terminate(pod, None)?;
                on_step(&RollStep::Terminating(pod.clone()))?;
                self.force_delete(pod)?;
                on_step(&RollStep::Gone(pod.clone()))?;
            }
        }
        Ok(new)
    }
}
