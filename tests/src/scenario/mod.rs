//! A whole cluster around one node: the lab, the Kubernetes API with one Egress, and the real agent.
//!
//! Kubernetes and Cilium are told of a change separately, so that a test says who knows what:
//! [`Scenario::terminate`] tells both, [`Scenario::cluster`] and [`Scenario::lab`] one.

mod agent;
mod builder;
pub mod check;

use std::time::Duration;

use anyhow::{Context as _, Result};

pub use self::{
    agent::{Agent, NODE, binary},
    builder::ScenarioBuilder,
};
use crate::{
    cilium::{BackendState, IpFamily},
    kube_api::{
        Kind, KubeApi,
        cluster::{Cluster, PodRef, PodSpec},
    },
    lab::{Lab, LabBuilder, eventually},
    net::{attachments, topology::POD_DEVICE},
};

/// Namespace of the Egress.
pub const NAMESPACE: &str = "internet";
/// Name of the Egress.
pub const EGRESS: &str = "nat";

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

    /// How long to wait for so many client pods: the kernel attaches one after the other, each time waiting for all processors.
    #[must_use]
    pub fn patience_for(&self, clients: usize) -> Duration {
        self.patience() + Duration::from_millis(500) * clients as u32
    }

    /// Starts an agent and waits until it is ready.
    ///
    /// # Errors
    ///
    /// When it is not in time.
    pub fn start_agent(&mut self) -> Result<()> {
        let mut agent = Agent::start(&self.api, &self.options.arguments)?;
        agent.wait_ready(self.patience_for(self.clients.len()))?;
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
        let node = self.options.backend_node;
        let mut spec = PodSpec::new(&format!("{EGRESS}-{index}"), node, &self.lab.backend(index).addresses);
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

    /// Waits until the programs for symmetric replies are on both hooks of an egress pod, if it is one of the agent's node.
    ///
    /// # Errors
    ///
    /// When they are not in time; with the end of the agent's log.
    pub fn wait_answering(&self, index: usize) -> Result<()> {
        if self.agent.is_none() || self.options.backend_node != NODE {
            return Ok(());
        }
        let found = eventually("programs on the egress pod's device", self.patience(), || {
            let attachments = self.lab.backend(index).namespace.run(|| attachments(POD_DEVICE))?;
            let there = (attachments.ingress_programs(), attachments.egress_programs());
            Ok(if there == (1, 1) { Ok(()) } else { Err(format!("{attachments:?}")) })
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
