//! A cluster whose pods have Coil's tunnels, and the host outside.

use std::{fs, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use coil_guard_common::abi::mark;
use coil_guard_tests::{
    cilium::{CiliumVersion, IpFamily, MatchPolicy},
    lab::{Lab, LabBuilder},
    net::{Pod, device::set_tx_checksum_offload, topology::POD_DEVICE},
    scenario::{Scenario, ScenarioBuilder},
};

use crate::{coil::Tunnels, outside::Outside};

/// Both families.
pub(crate) const FAMILIES: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

/// What should take moments, on a machine that is emulated.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Cilium 1.17 with Coil's default affinity: what keeps a flow on a leaving backend in the most ways.
pub(crate) fn lab() -> LabBuilder {
    let affinity = Some(Duration::from_secs(10_800));
    Lab::builder().version(CiliumVersion::V1_17).affinity(affinity).match_policy(MatchPolicy::Kept)
}

/// The cluster and the host outside.
pub(crate) struct World {
    /// The cluster.
    pub(crate) scenario: Scenario,
    /// The host outside.
    pub(crate) outside: Outside,
}

impl World {
    /// Starts everything; the egress pods that the lab does not publish have their tunnels too.
    pub(crate) fn start(builder: ScenarioBuilder, tunnels: Tunnels) -> Result<Self> {
        let builder = if tunnels.sport_auto { builder.sport_auto() } else { builder };
        // Minutes of grace: no test here waits for the end of a drain.
        let mut scenario = builder.grace(600).start()?;
        tunnels.equip(&mut scenario.lab)?;
        if let Some(agent) = &scenario.agent {
            let log = agent.log();
            let kind = log.split("attachment=").nth(1).and_then(|rest| rest.split_whitespace().next());
            println!("figure: attached by {}", kind.unwrap_or("nothing"));
        }
        let outside = Outside::start(scenario.lab.families())?;
        Ok(Self { scenario, outside })
    }

    /// The client pod.
    pub(crate) fn client(&self) -> &Pod {
        self.scenario.lab.client(0)
    }

    /// Which egress pod has an address that the host outside saw.
    pub(crate) fn index_of(&self, seen: IpAddr) -> Result<usize> {
        let found = self.scenario.lab.topology.backends.iter().position(|pod| pod.addresses.contains(&seen));
        found.with_context(|| format!("the host outside saw {seen}, which is no egress pod's address"))
    }

    /// A new egress pod is Ready: Kubernetes and Cilium know it.
    pub(crate) fn bring_up(&mut self, index: usize) -> Result<()> {
        self.scenario.lab.publish_backend(index)?;
        self.scenario.announce_backend(index)?;
        self.scenario.wait_answering(index)
    }

    /// An egress pod gets its deletionTimestamp; returns when the guard, if there is one, knows it too.
    pub(crate) fn begin_to_delete(&mut self, index: usize) -> Result<()> {
        self.scenario.terminate(index)?;
        if self.scenario.agent.is_some() { self.scenario.wait_mark(index, mark::LEAVING) } else { Ok(()) }
    }

    /// The pod object goes, and Cilium forgets the backend.
    pub(crate) fn finish_deletion(&mut self, index: usize) -> Result<()> {
        self.scenario.cluster.force_delete(&self.scenario.backend_pod(index)?)?;
        self.scenario.lab.remove_backend(index)
    }

    /// Whether devices leave transmit checksums to their peers. With it off, mistakes in checksums are seen.
    pub(crate) fn set_checksum_offload(&self, on: bool) -> Result<()> {
        let topology = &self.scenario.lab.topology;
        for pod in topology.clients.iter().chain(&topology.backends) {
            pod.namespace.run(|| set_tx_checksum_offload(POD_DEVICE, on))?;
            set_tx_checksum_offload(&pod.host_device, on)?;
        }
        Ok(())
    }

    /// Fails when any namespace has counted a wrong checksum, of UDP (outer headers too), TCP or ICMP.
    pub(crate) fn ensure_no_checksum_errors(&self) -> Result<()> {
        let topology = &self.scenario.lab.topology;
        let pods = topology.clients.iter().chain(&topology.backends).map(|pod| &pod.namespace);
        for namespace in pods.chain([&self.outside.namespace]) {
            let errors = namespace.run(checksum_errors)?;
            ensure!(errors.is_empty(), "{} counted {errors:?}", namespace.name());
        }
        Ok(())
    }
}

/// Names and values of the calling thread's checksum counters that are not zero.
fn checksum_errors() -> Result<Vec<(String, u64)>> {
    let snmp = fs::read_to_string("/proc/thread-self/net/snmp").context("cannot read net/snmp")?;
    let mut counters = Vec::new();
    let lines: Vec<&str> = snmp.lines().collect();
    for pair in lines.chunks(2) {
        let [names, values] = pair else { bail!("net/snmp should have pairs of lines") };
        let protocol = names.split(':').next().unwrap_or_default();
        for (name, value) in names.split(' ').zip(values.split(' ')) {
            counters.push((format!("{protocol}.{name}"), value.to_owned()));
        }
    }
    let snmp6 = fs::read_to_string("/proc/thread-self/net/snmp6").context("cannot read net/snmp6")?;
    counters.extend(snmp6.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    }));
    let checksums: Vec<_> = counters.into_iter().filter(|(name, _)| name.contains("CsumErrors")).collect();
    ensure!(checksums.len() >= 4, "the kernel counts checksum errors in {checksums:?} only");
    let parsed = checksums.into_iter().map(|(name, value)| Ok((name, value.parse::<u64>()?)));
    Ok(parsed.collect::<Result<Vec<_>>>()?.into_iter().filter(|(_, value)| *value != 0).collect())
}
