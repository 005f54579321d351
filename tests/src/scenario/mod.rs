//! A whole cluster around one node: the lab, the Kubernetes API with one Egress, and the real agent.
//!
//! Kubernetes and Cilium are told of a change separately, so that a test says who knows what:
//! [`Scenario::terminate`] tells both, [`Scenario::cluster`] and [`Scenario::lab`] one.

mod agent;
pub mod check;

use std::time::Duration;

use anyhow::{Context as _, Result};

pub use self::agent::{Agent, NODE, binary};
use crate::{
    cilium::{BackendState, IpFamily},
    kube_api::{
        Kind, KubeApi,
        cluster::{Cluster, EgressSpec, PodRef, PodSpec},
    },
    lab::{Lab, LabBuilder, eventually},
    net::PodRole,
};

/// Namespace of the Egress.
pub const NAMESPACE: &str = "internet";
/// Name of the Egress.
pub const EGRESS: &str = "nat";

/// Options of a [`Scenario`].
#[derive(Clone, Debug)]
pub struct ScenarioBuilder {
    lab: LabBuilder,
    mode: Option<String>,
    annotations: Vec<(String, String)>,
    sport_auto: bool,
    affinity: bool,
    grace: i64,
    pre_stop: bool,
    arguments: Vec<String>,
    agent: bool,
}

/// A running cluster.
#[derive(Debug)]
pub struct Scenario {
    /// The agent, while it runs.
    pub agent: Option<Agent>,
    /// The players of the cluster.
    pub cluster: Cluster,
    /// The API server.
    pub api: KubeApi,
    /// Egress pods, by the lab's index; `None` for one that Kubernetes does not know.
    pub backends: Vec<Option<PodRef>>,
    /// Client pods, by the lab's index.
    pub clients: Vec<PodRef>,
    /// The node.
    pub lab: Lab,
    options: ScenarioBuilder,
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
            agent: true,
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

    /// Without an agent at first.
    #[must_use]
    pub fn no_agent(self) -> Self {
        Self { agent: false, ..self }
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
        for index in 0..scenario.lab.topology.clients.len() {
            scenario.announce_client(index)?;
        }
        if scenario.options.agent {
            scenario.start_agent()?;
            if scenario.options.mode.as_deref().is_some_and(|mode| mode != "off") {
                for index in 0..scenario.clients.len() {
                    scenario.wait_attached(index)?;
                }
            }
        }
        Ok(scenario)
    }
}

impl Scenario {
    /// Options around a lab.
    #[must_use]
    pub fn builder(lab: LabBuilder) -> ScenarioBuilder {
        ScenarioBuilder::new(lab)
    }

    /// How long to wait for what should happen at once.
    #[must_use]
    pub fn patience(&self) -> Duration {
        self.lab.patience()
    }

    /// Starts an agent and waits until it is ready.
    ///
    /// # Errors
    ///
    /// When it is not in time.
    pub fn start_agent(&mut self) -> Result<()> {
        let mut agent = Agent::start(&self.api, &self.options.arguments)?;
        agent.wait_ready(self.patience())?;
        self.agent = Some(agent);
        Ok(())
    }

    /// The running agent.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn agent(&self) -> Result<&Agent> {
        self.agent.as_ref().context("no agent is running in this scenario")
    }

    /// Kills the agent with no chance to do anything.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn kill_agent(&mut self) -> Result<()> {
        self.agent.take().context("no agent is running in this scenario")?.kill()
    }

    /// Makes a backend pod of the lab known to Kubernetes, Running and Ready.
    ///
    /// # Errors
    ///
    /// What the API answers.
    pub fn announce_backend(&mut self, index: usize) -> Result<()> {
        if self.backends.len() <= index {
            self.backends.resize(index + 1, None);
        }
        let mut spec =
            PodSpec::new(&format!("{EGRESS}-{index}"), "node-2", &self.lab.backend(index).addresses);
        spec.grace = self.options.grace;
        self.backends[index] = Some(self.cluster.backend(NAMESPACE, EGRESS, &spec)?);
        Ok(())
    }

    /// Makes a client pod of the lab known to Kubernetes.
    ///
    /// # Errors
    ///
    /// What the API answers.
    pub fn announce_client(&mut self, index: usize) -> Result<()> {
        let spec = PodSpec::new(&format!("client-{index}"), NODE, &self.lab.client(index).addresses);
        let pod = self.cluster.client("default", &spec.client_of(NAMESPACE, EGRESS))?;
        self.clients.push(pod);
        Ok(())
    }

    /// The Kubernetes side of an egress pod.
    ///
    /// # Errors
    ///
    /// When Kubernetes does not know it.
    pub fn backend_pod(&self, index: usize) -> Result<PodRef> {
        self.backends
            .get(index)
            .cloned()
            .flatten()
            .with_context(|| format!("Kubernetes does not know backend {index}"))
    }

    /// Begins to delete an egress pod, as Kubernetes and then Cilium's agent see it.
    ///
    /// # Errors
    ///
    /// When either refuses.
    pub fn terminate(&mut self, index: usize) -> Result<()> {
        self.cluster.terminate(&self.backend_pod(index)?, None)?;
        self.lab.set_backend(index, BackendState::Terminating)
    }

    /// Sets the Egress's mode; `None` removes the annotation.
    ///
    /// # Errors
    ///
    /// What the API answers.
    pub fn set_mode(&self, mode: Option<&str>) -> Result<()> {
        self.cluster.set_mode(NAMESPACE, EGRESS, mode)
    }

    /// Waits until exactly one program is on the egress of a client pod.
    ///
    /// # Errors
    ///
    /// When there is not in time; with the end of the agent's log.
    pub fn wait_attached(&self, client: usize) -> Result<()> {
        self.wait_programs(client, 1)
    }

    /// Waits until no program and no qdisc is left on a client pod's device.
    ///
    /// # Errors
    ///
    /// When there is in time; with the end of the agent's log.
    pub fn wait_detached(&self, client: usize) -> Result<()> {
        let found = eventually("bare device", self.patience(), || {
            let attachments = self.lab.attachments(client)?;
            Ok(if attachments.is_empty() { Ok(()) } else { Err(format!("{attachments:?}")) })
        });
        self.explain(found)
    }

    fn wait_programs(&self, client: usize, programs: usize) -> Result<()> {
        let found = eventually("program on the client's device", self.patience(), || {
            let attachments = self.lab.attachments(client)?;
            let there = attachments.egress_programs();
            Ok(if there == programs { Ok(()) } else { Err(format!("{attachments:?}")) })
        });
        self.explain(found)
    }

    /// Index of the backend that a client's flow is bound to, waiting until it is bound.
    ///
    /// # Errors
    ///
    /// When it is not in time.
    pub fn bound(&self, client: usize, family: IpFamily, port: u16) -> Result<usize> {
        eventually("bound flow", self.patience(), || {
            Ok(self.lab.bound_backend(client, family, port)?.ok_or("no service entry"))
        })
    }

    /// Waits for a mark of the agent for a backend: its state byte in `BACKEND_MARKS`.
    ///
    /// # Errors
    ///
    /// When it does not come in time.
    pub fn wait_mark(&self, index: usize, state: u8) -> Result<()> {
        let family = self.lab.families()[0];
        let address = self.lab.backend(index).address(family);
        let found = eventually(&format!("mark {state} of {address}"), self.patience(), || {
            let mark = marks::read(address)?;
            Ok(match mark {
                Some(mark) if mark.state == state => Ok(()),
                other => Err(format!("{other:?}")),
            })
        });
        self.explain(found)
    }

    /// Waits until a backend counts as gone: marked so, or without a mark.
    ///
    /// # Errors
    ///
    /// When it does not in time.
    pub fn wait_mark_gone_or_absent(&self, index: usize) -> Result<()> {
        let address = self.lab.backend(index).address(self.lab.families()[0]);
        let found = eventually(&format!("end of {address}"), self.patience(), || {
            Ok(match marks::read(address)? {
                Some(mark) if mark.state != coil_guard_common::abi::mark::GONE => Err(format!("{mark:?}")),
                _ => Ok(()),
            })
        });
        self.explain(found)
    }

    /// Adds the end of the agent's log to an error.
    ///
    /// # Errors
    ///
    /// The one given.
    pub fn explain<T>(&self, result: Result<T>) -> Result<T> {
        result.with_context(|| {
            self.agent.as_ref().map_or_else(|| "no agent is running".to_owned(), Agent::log_tail)
        })
    }

    /// Names of the pods of a role, for messages.
    #[must_use]
    pub fn names(&self, role: PodRole) -> Vec<String> {
        match role {
            PodRole::Client => self.clients.iter().map(|pod| pod.name.clone()).collect(),
            PodRole::Backend => self.backends.iter().flatten().map(|pod| pod.name.clone()).collect(),
        }
    }

    /// Events that the agent wrote: reason and note, in the order of their names.
    #[must_use]
    pub fn events(&self) -> Vec<(String, String)> {
        let text =
            |event: &serde_json::Value, field: &str| event[field].as_str().unwrap_or_default().to_owned();
        self.api.list(Kind::Event).iter().map(|event| (text(event, "reason"), text(event, "note"))).collect()
    }
}

pub mod marks {
    //! The agent's marks, read from its pinned map.

    use std::net::IpAddr;

    use anyhow::{Context as _, Result};
    use aya::maps::{HashMap, Map, MapData, MapError};
    use coil_guard_common::abi::{BackendMark, LAYOUT_VERSION, maps, v4_mapped};

    use crate::net::Paths;

    /// The mark of an address; `None` when there is none, or no map yet.
    ///
    /// # Errors
    ///
    /// When the map cannot be read.
    pub fn read(address: IpAddr) -> Result<Option<BackendMark>> {
        let path = Paths.bpffs().join("coil-guard").join(LAYOUT_VERSION).join(maps::BACKEND_MARKS);
        if !path.exists() {
            return Ok(None);
        }
        let data = MapData::from_pin(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let map: HashMap<_, [u8; 16], BackendMark> = HashMap::try_from(Map::from_map_data(data)?)?;
        let key = match address {
            IpAddr::V4(address) => v4_mapped(address.octets()),
            IpAddr::V6(address) => address.octets(),
        };
        match map.get(&key, 0) {
            Ok(mark) => Ok(Some(mark)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(error).context("cannot read a mark"),
        }
    }
}
