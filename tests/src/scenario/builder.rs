//! How a scenario is asked for.

use anyhow::Result;

use super::{EGRESS, NAMESPACE, NODE, Scenario};
use crate::{
    kube_api::{
        KubeApi,
        cluster::{Cluster, EgressSpec},
    },
    lab::LabBuilder,
};

/// Options of a [`Scenario`].
#[derive(Clone, Debug)]
pub struct ScenarioBuilder {
    pub(super) lab: LabBuilder,
    pub(super) mode: Option<String>,
    annotations: Vec<(String, String)>,
    sport_auto: bool,
    affinity: bool,
    pub(super) grace: i64,
    pre_stop: bool,
    pub(super) arguments: Vec<String>,
    pub(super) backend_node: &'static str,
    agent: bool,
    only_client: Option<usize>,
}

impl ScenarioBuilder {
    /// Around this lab.
    #[must_use]
    pub fn new(lab: LabBuilder) -> Self {
        Self {
            lab,
            mode: None,
            annotations: Vec::new(),
            sport_auto: false,
            affinity: false,
            grace: 30,
            pre_stop: true,
            arguments: Vec::new(),
            backend_node: "node-2",
            agent: true,
            only_client: None,
        }
    }

    /// With `coil-guard.io/mode` on the Egress.
    #[must_use]
    pub fn mode(self, mode: &str) -> Self {
        Self { mode: Some(mode.to_owned()), ..self }
    }

    /// With another annotation on the Egress.
    #[must_use]
    pub fn annotation(mut self, name: &str, value: &str) -> Self {
        self.annotations.push((name.to_owned(), value.to_owned()));
        self
    }

    /// With `spec.fouSourcePortAuto`.
    #[must_use]
    pub fn sport_auto(self) -> Self {
        Self { sport_auto: true, ..self }
    }

    /// Whether the Service has ClientIP affinity; Cilium's maps follow the lab's builder, not this.
    #[must_use]
    pub fn affinity(self, affinity: bool) -> Self {
        Self { affinity, ..self }
    }

    /// With this grace period of egress pods, seconds.
    #[must_use]
    pub fn grace(self, seconds: i64) -> Self {
        Self { grace: seconds, ..self }
    }

    /// Without a preStop hook in the Egress's template.
    #[must_use]
    pub fn no_pre_stop(self) -> Self {
        Self { pre_stop: false, ..self }
    }

    /// With further arguments for the agent.
    #[must_use]
    pub fn arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// With egress pods that are on the clients' node to Kubernetes too: the agent guards both ends.
    #[must_use]
    pub fn local_backends(self) -> Self {
        Self { backend_node: NODE, ..self }
    }

    /// Without an agent at first.
    #[must_use]
    pub fn no_agent(self) -> Self {
        Self { agent: false, ..self }
    }

    /// Only this client pod of the lab is known to Kubernetes, and so guarded; the others send as it does.
    #[must_use]
    pub fn only_client(self, index: usize) -> Self {
        Self { only_client: Some(index), ..self }
    }

    /// Starts everything; the agent is ready and every client attached (if the mode wants it) when it returns.
    ///
    /// # Errors
    ///
    /// When something cannot be started, or the agent is not ready in time.
    pub fn start(self) -> Result<Scenario> {
        let lab = self.lab.clone().start()?;
        let api = KubeApi::start()?;
        let cluster = Cluster::new(&api);
        let addresses = lab.families().iter().map(|family| lab.service(*family).0).collect::<Vec<_>>();
        let mut egress = EgressSpec::new(NAMESPACE, EGRESS, &addresses);
        egress.sport_auto = self.sport_auto;
        egress.affinity = self.affinity;
        egress.annotations.extend(self.annotations.iter().cloned());
        if let Some(mode) = &self.mode {
            egress = egress.mode(mode);
        }
        let mut container = serde_json::json!({"name": "egress"});
        if self.pre_stop {
            container["lifecycle"] = serde_json::json!({"preStop": {"exec": {"command": ["sleep", "25"]}}});
        }
        egress.template = Some(serde_json::json!({
            "spec": {"terminationGracePeriodSeconds": self.grace, "containers": [container]},
        }));
        cluster.egress(&egress)?;
        let mut scenario = Scenario {
            agent: None,
            cluster,
            api,
            backends: Vec::new(),
            clients: Vec::new(),
            lab,
            options: self,
        };
        for index in 0..scenario.lab.topology.backends.len() {
            let known = scenario.lab.backend_id(scenario.lab.families()[0], index).is_ok();
            scenario.backends.push(None);
            if known {
                scenario.announce_backend(index)?;
            }
        }
        let announced = match scenario.options.only_client {
            Some(index) => index..index + 1,
            None => 0..scenario.lab.topology.clients.len(),
        };
        for index in announced.clone() {
            scenario.announce_client(index)?;
        }
        if scenario.options.agent {
            scenario.start_agent()?;
            if scenario.options.mode.as_deref().is_some_and(|mode| mode != "off") {
                for index in announced {
                    scenario.wait_attached(index)?;
                }
                let symmetric =
                    scenario.options.mode.as_deref() == Some("rewrite") && !scenario.options.sport_auto;
                for index in (0..scenario.backends.len()).filter(|index| scenario.backends[*index].is_some())
                {
                    if symmetric {
                        scenario.wait_answering(index)?;
                    }
                }
            }
        }
        Ok(scenario)
    }
}
